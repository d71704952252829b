//! The file with the node parameters that a caller in maintenance gave, and the file on the ESP
//! that they replace.
//!
//! `polis/parameters.pb` belongs to the person or the tool that puts it on the ESP, so a call
//! leaves it as it is. What was given counts instead of it only while it has the content that the
//! caller saw: who changes it later, or puts one there, decides anew.
//!
//! ```text
//! polis-given-v1: | SHA-256 of polis/parameters.pb | message
//! ```
//!
//! A file of an earlier version has the message alone, which counts whatever the other file has.
//! No message begins as this content does: its first byte is the tag of field 14, which stays
//! unused (`polis_wire::parameters`).
//!
//! What this module does not do: read or write the two files (`places`, maintenance), or check
//! the message.

use polis_wire::parameters::Error;
use sha2::{Digest as _, Sha256};

/// The first bytes of the content.
const START: &[u8] = b"polis-given-v1:";

/// Bytes of the digest behind them.
const DIGEST: usize = 32;

/// The result of a read of `polis/parameters.pb`.
type Read = Result<Option<Vec<u8>>, Error>;

/// The content of the file with this message, which replaces what `esp` has.
pub(super) fn content(message: &[u8], esp: &Read) -> Vec<u8> {
    [START, &digest(esp), message].concat()
}

/// The message in the content of the file; `None` if `esp` has changed since it was given.
pub(super) fn message(content: Vec<u8>, esp: &Read) -> Option<Vec<u8>> {
    let Some(rest) = content.strip_prefix(START) else { return Some(content) };
    let (replaces, message) = rest.split_at_checked(DIGEST)?;
    (replaces == digest(esp)).then(|| message.to_vec())
}

/// A file that cannot be read is replaced, too, as long as it cannot be read for that reason.
fn digest(esp: &Read) -> [u8; DIGEST] {
    let mut hash = Sha256::new();
    match esp {
        Ok(None) => hash.update([0]),
        Ok(Some(content)) => {
            hash.update([1]);
            hash.update(content);
        }
        Err(Error::TooLarge) => hash.update([2]),
        Err(_) => hash.update([3]),
    }
    hash.finalize().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_given_counts_until_the_file_that_it_replaces_changes() {
        let states = || -> [Read; 5] {
            let unreadable = Error::Unreadable(std::io::Error::other("the disk is gone"));
            let some = |content: &[u8]| Ok(Some(content.to_vec()));
            [Ok(None), some(b""), some(b"a"), Err(Error::TooLarge), Err(unreadable)]
        };
        for (before, seen) in states().iter().enumerate() {
            let content = content(b"given", seen);
            for (after, esp) in states().iter().enumerate() {
                let counts = message(content.clone(), esp);
                assert_eq!(
                    counts,
                    (before == after).then(|| b"given".to_vec()),
                    "{seen:?} {esp:?}"
                );
            }
        }
    }

    #[test]
    fn a_message_without_a_digest_counts_in_any_case_and_half_a_digest_does_not() {
        assert_eq!(message(b"\x0a\x00".to_vec(), &Ok(None)), Some(b"\x0a\x00".to_vec()));
        assert_eq!(message([START, &[0; 31]].concat(), &Ok(None)), None);
        assert_eq!(START[0], 14 << 3, "the tag of field 14");
    }
}
