//! Hexadecimal digits: encoding and decoding of bytes.
//!
//! Two short functions, and not the crate `data-encoding`: `init` links this module, and PID
//! 1 has as few dependencies as it can.
//!
//! Invariants:
//! - Output is lower case.
//! - Input is valid as a whole: an odd number of digits, a sign or a blank is rejected.

use std::fmt::Write as _;

/// The lower-case digits of `bytes`.
#[must_use]
pub fn encode(bytes: &[u8]) -> String {
    bytes.iter().fold(String::with_capacity(2 * bytes.len()), |mut text, byte| {
        // Writing to a string cannot fail.
        let _written = write!(text, "{byte:02x}");
        text
    })
}

/// The bytes of an even number of digits in either case; `None` for any other text.
#[must_use]
pub fn decode(text: &str) -> Option<Vec<u8>> {
    if !text.len().is_multiple_of(2) {
        return None;
    }
    text.as_bytes()
        .chunks_exact(2)
        .map(|pair| Some(digit(pair[0])? << 4 | digit(pair[1])?))
        .collect()
}

/// The bytes of exactly so many lower-case digits: for names, where upper case would
/// be a second name of the same thing.
#[must_use]
pub fn decode_name<const BYTES: usize>(text: &str) -> Option<[u8; BYTES]> {
    let bytes = decode(text)?.try_into().ok()?;
    (!text.bytes().any(|c| c.is_ascii_uppercase())).then_some(bytes)
}

fn digit(c: u8) -> Option<u8> {
    char::from(c).to_digit(16).and_then(|digit| u8::try_from(digit).ok())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn anything_but_pairs_of_digits_is_refused() {
        for text in ["0", "0g", "+1", " 0", "ä"] {
            assert_eq!(decode(text), None, "{text}");
        }
    }

    #[test]
    fn a_name_has_one_spelling() {
        assert_eq!(decode_name("0aff"), Some([10, 255]));
        for text in ["0aFF", "0af", "0a", "0aff00", ""] {
            assert_eq!(decode_name::<2>(text), None, "{text}");
        }
    }

    proptest! {
        #[test]
        fn digits_read_back(bytes in any::<Vec<u8>>()) {
            prop_assert_eq!(decode(&encode(&bytes)), Some(bytes.clone()));
            prop_assert_eq!(decode(&encode(&bytes).to_uppercase()), Some(bytes));
        }

        #[test]
        fn names_read_back(bytes in any::<[u8; 4]>()) {
            prop_assert_eq!(decode_name(&encode(&bytes)), Some(bytes));
        }
    }
}
