//! The names of this boot, by which a cluster tells the starts of a machine apart.

use std::sync::OnceLock;

/// The file with the kernel's name for this boot.
const ID: &str = "/proc/sys/kernel/random/boot_id";
/// The file from which each read gets another random name.
const RANDOM: &str = "/proc/sys/kernel/random/uuid";

/// The kernel's name for this boot: random, and the same until the machine restarts. Empty if it
/// cannot be read.
#[must_use]
pub fn id() -> String {
    read(ID)
}

/// A random name that only the memory of this program has, until it ends. [`id`] is in the log, and
/// so in a copy of the disk. Empty if it cannot be made.
#[must_use]
pub fn secret() -> String {
    static SECRET: OnceLock<String> = OnceLock::new();
    SECRET.get_or_init(|| read(RANDOM)).clone()
}

fn read(path: &str) -> String {
    std::fs::read_to_string(path).unwrap_or_default().trim().to_owned()
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_boot_has_one_name_and_a_secret_one() {
        let (id, secret) = (super::id(), super::secret());
        assert_eq!((id.len(), secret.len()), (36, 36), "{id} {secret}");
        assert_eq!((&id, &secret), (&super::id(), &super::secret()));
        assert_ne!(id, secret);
    }
}
