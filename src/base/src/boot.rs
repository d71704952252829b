//! The name of this boot, by which a cluster tells the starts of a machine apart.

/// Where the kernel shows it.
const ID: &str = "/proc/sys/kernel/random/boot_id";

/// The kernel's name for this boot: random, and the same until the machine restarts. Empty if it
/// cannot be read.
#[must_use]
pub fn id() -> String {
    std::fs::read_to_string(ID).unwrap_or_default().trim().to_owned()
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_boot_has_one_name() {
        let id = super::id();
        assert_eq!(id.len(), 36, "{id}");
        assert_eq!(id, super::id());
    }
}
