//! The kernel command line, as far as `init` reads it.
//!
//! The line is part of the unified kernel image, so the firmware's verification covers
//! it; a launcher may still append to it. Only `polis.*` words are read, and the first
//! of each counts: an appended word can't replace a signed one.
//!
//! What this module does not do: guess. A machine without a root hash stops.

use std::time::Duration;

use blake2::digest::consts::U32;
use blake2::{Blake2b, Digest as _};

use polis_base::hex;
use polis_base::sys::command_line::{seconds, value};

/// How long a guru meditation waits before it reboots, by default.
pub const COUNTDOWN: Duration = Duration::from_secs(60);

/// SHA-256, the only algorithm that images are made with.
const HASH_LENGTH: usize = 32;
/// The kernel's bound for a salt (`dm-verity`: 256 bytes).
const SALT_MAX: usize = 256;
/// 64 TiB of 4 KiB blocks: far above any system, far below an overflow.
const BLOCKS_MAX: u64 = 1 << 34;
/// How long `node` may give no sign of life, by default.
pub const NODE_DEADLINE: Duration = Duration::from_secs(60);
/// Bounds of `polis.node-deadline`, in seconds: `node` gives one every five.
const NODE_DEADLINE_SECONDS: std::ops::RangeInclusive<u64> = 10..=3600;
/// How long `init` may be silent where only the kernel's own timer watches it, by default. The
/// timer counts on in a virtual machine that its host has paused, and runs out before `init` can
/// say that it is alive.
pub const INIT_DEADLINE: Duration = Duration::from_secs(900);
/// Bounds of `polis.init-deadline`, in seconds.
const INIT_DEADLINE_SECONDS: std::ops::RangeInclusive<u64> = 30..=3600;
/// Bounds of `polis.guru-countdown`, in seconds.
const COUNTDOWN_SECONDS: std::ops::RangeInclusive<u64> = 1..=3600;

/// The parameters of dm-verity for the system partition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verity {
    /// Lower-case hexadecimal.
    pub root_hash: String,
    /// Lower-case hexadecimal, or `-` for none.
    pub salt: String,
    /// Data blocks of 4096 bytes; the hash tree follows them.
    pub blocks: u64,
}

impl Verity {
    /// Whether this block of 4096 bytes is the top of the system's hash tree: what the
    /// kernel would compare first (format 1 of `dm-verity`: the salt, then the block).
    #[must_use]
    pub fn fits(&self, top: &[u8]) -> bool {
        let salt = hex::decode(self.salt.trim_matches('-')).unwrap_or_default();
        let hash = Blake2b::<U32>::new().chain_update(salt).chain_update(top).finalize();
        hex::encode(&hash) == self.root_hash
    }
}

/// The parameters of `init`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CommandLine {
    /// How to verify the system.
    pub verity: Verity,
    /// How long a guru meditation waits before it reboots.
    pub countdown: Duration,
    /// How long `node` may give no sign of life.
    pub node_deadline: Duration,
}

/// A word of the command line that is missing or wrong.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The word is missing.
    #[error("the kernel command line has no {word}=")]
    Missing {
        /// The word.
        word: &'static str,
    },
    /// The word has an invalid value.
    #[error("the kernel command line says {word}={value:?}, but it must be {allowed}")]
    Invalid {
        /// The word.
        word: &'static str,
        /// Its value.
        value: String,
        /// The allowed values.
        allowed: &'static str,
    },
}

impl CommandLine {
    /// Reads the command line.
    ///
    /// # Errors
    ///
    /// The first word that is missing or wrong.
    pub fn parse(line: &str) -> Result<Self, Error> {
        let root_hash = required(line, "polis.verity", "64 hexadecimal digits", |value| {
            hexadecimal(value, HASH_LENGTH..=HASH_LENGTH)
        })?;
        let salt = optional(line, "polis.verity-salt", "hexadecimal digits, or -", |value| {
            if value == "-" { Some("-".to_owned()) } else { hexadecimal(value, 1..=SALT_MAX) }
        })?;
        let blocks =
            required(line, "polis.verity-blocks", "a number from 1 to 17179869184", |value| {
                value.parse().ok().filter(|blocks| (1..=BLOCKS_MAX).contains(blocks))
            })?;
        let salt = salt.unwrap_or_else(|| "-".to_owned());
        Ok(Self {
            verity: Verity { root_hash, salt, blocks },
            countdown: countdown(line),
            node_deadline: seconds(line, "polis.node-deadline", NODE_DEADLINE_SECONDS)
                .unwrap_or(NODE_DEADLINE),
        })
    }
}

/// The countdown alone: it counts even when the rest of the line is wrong.
#[must_use]
pub fn countdown(line: &str) -> Duration {
    seconds(line, "polis.guru-countdown", COUNTDOWN_SECONDS).unwrap_or(COUNTDOWN)
}

/// How long `init` may be silent where only the kernel's own timer watches it.
#[must_use]
pub fn init_deadline(line: &str) -> Duration {
    seconds(line, "polis.init-deadline", INIT_DEADLINE_SECONDS).unwrap_or(INIT_DEADLINE)
}

fn optional<T>(
    line: &str,
    word: &'static str,
    allowed: &'static str,
    read: impl FnOnce(&str) -> Option<T>,
) -> Result<Option<T>, Error> {
    let Some(value) = value(line, word) else { return Ok(None) };
    match read(value) {
        Some(read) => Ok(Some(read)),
        None => Err(Error::Invalid { word, value: value.to_owned(), allowed }),
    }
}

fn required<T>(
    line: &str,
    word: &'static str,
    allowed: &'static str,
    read: impl FnOnce(&str) -> Option<T>,
) -> Result<T, Error> {
    optional(line, word, allowed, read)?.ok_or(Error::Missing { word })
}

/// `value` in lower case if it is hexadecimal and has that many bytes.
fn hexadecimal(value: &str, bytes: std::ops::RangeInclusive<usize>) -> Option<String> {
    let digits = value.bytes().all(|digit| digit.is_ascii_hexdigit());
    let whole = value.len().is_multiple_of(2) && bytes.contains(&(value.len() / 2));
    (digits && whole).then(|| value.to_ascii_lowercase())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn line() -> String {
        format!(
            "console=ttyS0 polis.verity={} polis.verity-salt=706F polis.verity-blocks=512 \
             quiet",
            "ab".repeat(32)
        )
    }

    #[test]
    fn a_whole_line_is_read() {
        let read = CommandLine::parse(&line()).unwrap();
        assert_eq!(read.verity.root_hash, "ab".repeat(32));
        assert_eq!(read.verity.salt, "706f");
        assert_eq!(read.verity.blocks, 512);
        assert_eq!((read.countdown, read.node_deadline), (COUNTDOWN, NODE_DEADLINE));
        let read = CommandLine::parse(&format!("{} polis.node-deadline=15", line())).unwrap();
        assert_eq!(read.node_deadline, Duration::from_secs(15));
        assert_eq!(init_deadline("polis.init-deadline=60"), Duration::from_secs(60));
        assert_eq!(init_deadline("polis.init-deadline=1"), INIT_DEADLINE);
    }

    #[test]
    fn what_is_appended_does_not_replace_what_was_signed() {
        let appended = format!("{} polis.verity={}", line(), "cd".repeat(32));
        assert_eq!(CommandLine::parse(&appended), CommandLine::parse(&line()));
    }

    #[test]
    fn a_machine_without_a_root_hash_is_refused() {
        let error = CommandLine::parse("quiet").unwrap_err();
        assert_eq!(error, Error::Missing { word: "polis.verity" });
    }

    #[test]
    fn a_wrong_word_is_named_with_its_value_and_what_is_allowed() {
        let error = CommandLine::parse(&line().replace("salt=706F", "salt=xy")).unwrap_err();
        let text = "the kernel command line says polis.verity-salt=\"xy\", but it must be \
                    hexadecimal digits, or -";
        assert_eq!(error.to_string(), text);
        assert!(CommandLine::parse(&line().replace("blocks=512", "blocks=0")).is_err());
        assert!(CommandLine::parse(&line().replace("salt=706F", "salt=706")).is_err());
        assert!(CommandLine::parse(&line().replace("abab", "abxy")).is_err());
    }

    #[test]
    fn a_countdown_out_of_bounds_is_the_usual_one() {
        assert_eq!(countdown("polis.guru-countdown=5"), Duration::from_secs(5));
        assert_eq!(countdown("polis.guru-countdown=0"), COUNTDOWN);
        assert_eq!(countdown("polis.guru-countdown=3601"), COUNTDOWN);
        assert_eq!(countdown("polis.guru-countdown=x"), COUNTDOWN);
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic(text in any::<String>(), at in 0_usize..200) {
            let mut noisy = line();
            if noisy.is_char_boundary(at.min(noisy.len())) {
                noisy.insert_str(at.min(noisy.len()), &text);
            }
            let _read = CommandLine::parse(&noisy);
        }
    }
}

#[cfg(test)]
#[path = "command_line_fuzz_tests.rs"]
mod fuzz_tests;
