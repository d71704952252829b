//! The text form of a recovery key, which a person can copy: encoding and decoding.
//!
//! ```text
//! 32 bytes | first 3 bytes of their SHA-256  --base32-->  14 groups of 4 characters
//! ```
//!
//! [`crockford`] has the alphabet.
//!
//! Invariants:
//! - A mistyped character, or two swapped ones, are detected here (all but once in
//!   sixteen million), before the disk rejects the key.

use sha2::{Digest as _, Sha256};
use zeroize::Zeroizing;

use crate::crockford;

/// Bytes of a key.
pub const SIZE: usize = 32;

const CHECKSUM: usize = 3;
const WHOLE: usize = SIZE + CHECKSUM;

/// Characters without dashes.
const CHARACTERS: usize = WHOLE * 8 / 5;

/// Why a text is not a recovery key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// Too short or too long.
    #[error("a recovery key has {CHARACTERS} letters and digits, not {0}")]
    Length(usize),
    /// A character outside of the alphabet. The error names only its place: the text is
    /// a secret.
    #[error("character {0}, not counting dashes and spaces, is not allowed in a recovery key")]
    Character(usize),
    /// Every character is valid, but the checksum does not match.
    #[error("the recovery key is mistyped: its checksum does not match")]
    Checksum,
}

impl From<crockford::Error> for Error {
    fn from(error: crockford::Error) -> Self {
        match error {
            crockford::Error::Length(length) => Self::Length(length),
            crockford::Error::Character(place) => Self::Character(place),
        }
    }
}

/// The text of a key.
#[must_use]
pub fn write(key: &[u8; SIZE]) -> Zeroizing<String> {
    crockford::write(&*with_checksum(key), CHARACTERS)
}

/// The key of a text.
///
/// # Errors
///
/// [`Error`].
pub fn read(text: &str) -> Result<Zeroizing<[u8; SIZE]>, Error> {
    let whole = crockford::read::<WHOLE>(text, CHARACTERS)?;
    let mut key = Zeroizing::new([0; SIZE]);
    key.copy_from_slice(&whole[..SIZE]);
    if *with_checksum(&key) != *whole {
        return Err(Error::Checksum);
    }
    Ok(key)
}

fn with_checksum(key: &[u8; SIZE]) -> Zeroizing<[u8; WHOLE]> {
    let mut whole = Zeroizing::new([0; WHOLE]);
    whole[..SIZE].copy_from_slice(key);
    whole[SIZE..].copy_from_slice(&Sha256::digest(key)[..CHECKSUM]);
    whole
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::crockford::ALPHABET;

    #[test]
    fn a_key_is_fourteen_groups_of_four() {
        let text = write(&[0xa7; SIZE]);
        assert_eq!(*text, "MYKT-F9X7-MYKT-F9X7-MYKT-F9X7-MYKT-F9X7-MYKT-F9X7-MYKT-F9X7-MYKK-EZGN");
    }

    #[test]
    fn each_way_to_mistype_has_its_words() {
        assert_eq!(read("ABCD"), Err(Error::Length(4)));
        let text = write(&[7; SIZE]);
        assert_eq!(read(&text.replacen('0', "U", 1)), Err(Error::Character(1)));
        let mut swapped: Vec<_> = text.chars().collect();
        swapped.swap(2, 3);
        assert_eq!(read(&swapped.into_iter().collect::<String>()), Err(Error::Checksum));
    }

    proptest! {
        #[test]
        fn a_key_survives_being_copied_by_hand(key in any::<[u8; SIZE]>()) {
            let text = write(&key);
            let copied = text.to_lowercase().replace('-', " ").replace('0', "o").replace('1', "l");
            prop_assert_eq!(*read(&text).unwrap(), key);
            prop_assert_eq!(*read(&copied).unwrap(), key);
        }

        #[test]
        fn a_single_wrong_character_never_opens(
            key in any::<[u8; SIZE]>(),
            place in 0..CHARACTERS,
            other in prop::sample::select(ALPHABET.to_vec()),
        ) {
            let mut text: Vec<_> = write(&key).chars().filter(|c| *c != '-').collect();
            prop_assume!(text[place] != char::from(other));
            text[place] = char::from(other);
            prop_assert_eq!(read(&text.into_iter().collect::<String>()), Err(Error::Checksum));
        }

        #[test]
        fn arbitrary_bytes_never_panic(text in "\\PC*") {
            prop_assert!(read(&text).is_err());
        }
    }
}

#[cfg(test)]
#[path = "form_fuzz_tests.rs"]
mod fuzz_tests;
