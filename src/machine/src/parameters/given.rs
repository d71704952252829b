//! The file with the node parameters that a caller in maintenance gave, and the file on the ESP
//! that they replace.
//!
//! `polis/parameters.pb` belongs to the person or the tool that puts it on the ESP, so a call
//! leaves it as it is. The given message counts instead of that file while the file has the content
//! that it had at the call, and also where nothing else would count: while the file is absent, or
//! the disk does not return it. A file that was changed, or put there later, counts again.
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

/// The message in the content of the file; `None` if another file at `esp` counts since then.
pub(super) fn message(content: Vec<u8>, esp: &Read) -> Option<Vec<u8>> {
    let Some(rest) = content.strip_prefix(START) else { return Some(content) };
    let (replaces, message) = rest.split_at_checked(DIGEST)?;
    let counts = match esp {
        Ok(None) | Err(Error::Unreadable(_)) => true,
        Ok(Some(_)) | Err(_) => replaces == digest(esp),
    };
    counts.then(|| message.to_vec())
}

/// The digest of the file; of one without a content to hash, of the reason.
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
    fn a_given_message_counts_until_another_file_takes_the_place_of_the_replaced_one() {
        let states = || -> [Read; 5] {
            let unreadable = Error::Unreadable(std::io::Error::other("the disk is gone"));
            let some = |content: &[u8]| Ok(Some(content.to_vec()));
            [Ok(None), some(b""), some(b"a"), Err(Error::TooLarge), Err(unreadable)]
        };
        for (before, seen) in states().iter().enumerate() {
            let content = content(b"given", seen);
            for (after, esp) in states().iter().enumerate() {
                let nothing_else = matches!(esp, Ok(None) | Err(Error::Unreadable(_)));
                let counts = (before == after || nothing_else).then(|| b"given".to_vec());
                assert_eq!(message(content.clone(), esp), counts, "{seen:?} {esp:?}");
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
