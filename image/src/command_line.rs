//! The kernel's command line of an image.

use crate::verity::Verity;

/// The command line of every image. Serial last, so that it is `/dev/console`; the
/// kernel's own tests of its ciphers cost most of a second, and a busy host makes the
/// check of the timer fail. With `gpt` the kernel reads the backup if a power cut has
/// torn the partition table. Of the security modules that Debian's kernel begins with, a node uses
/// those of `lsm`: AppArmor has no profile in the image, and the others no policy. The kernel's
/// second source of random numbers for its generator of SP 800-90A, which nothing on a node uses,
/// tests itself at each start, for 1 to 3 % of a translated boot.
pub(crate) const CMDLINE: &str = "console=tty0 console=ttyS0,115200 quiet loglevel=4 panic=30 \
    gpt cryptomgr.notests initcall_blacklist=jent_mod_init no_timer_check \
    lsm=landlock,lockdown,yama,bpf";

/// The word for the key whose update bundles a node takes, as 64 hexadecimal digits.
const RELEASE_KEY: &str = "polis.release-key=";
/// The text behind it in an image without keys; signing writes the key in its place.
const NO_KEY: [u8; 64] = [b'0'; 64];

/// The place of the release key on a command line: where its digits begin, and how many
/// there are. `None` without a place, or if a key is there already.
pub(crate) fn release_key(line: &[u8]) -> Option<std::ops::Range<usize>> {
    let place = [RELEASE_KEY.as_bytes(), &NO_KEY].concat();
    let start = line.windows(place.len()).position(|window| window == place)?;
    Some(start + RELEASE_KEY.len()..start + place.len())
}

/// The kernel's command line for a system. It names neither a disk nor a partition: the same
/// kernel image starts the same system from either system partition of any disk.
pub(crate) fn command_line(verity: &Verity) -> String {
    let Verity { root_hash, salt, blocks } = verity;
    format!(
        "polis.verity={root_hash} polis.verity-salt={salt} polis.verity-blocks={blocks} \
         {RELEASE_KEY}{} {CMDLINE}",
        String::from_utf8_lossy(&NO_KEY),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_fits_what_every_kernel_accepts() {
        let verity = Verity { root_hash: "a".repeat(64), salt: "b".repeat(64), blocks: u64::MAX };
        let line = command_line(&verity);
        // COMMAND_LINE_SIZE of x86 minus the words that a person may add.
        assert!(line.len() < 1024, "{line}");
        assert!(line.ends_with("lsm=landlock,lockdown,yama,bpf") && !line.contains("  "), "{line}");
        let place = release_key(line.as_bytes()).unwrap();
        assert_eq!(line[place], "0".repeat(64));
    }
}
