//! Bytes as hexadecimal digits.

use std::fmt::Write as _;

/// Lower-case digits.
pub(super) fn encode(bytes: &[u8]) -> String {
    bytes.iter().fold(String::with_capacity(2 * bytes.len()), |mut text, byte| {
        // Writing to a string cannot fail.
        let _written = write!(text, "{byte:02x}");
        text
    })
}

/// The bytes of an even number of digits; `None` for anything else.
pub(super) fn decode(text: &str) -> Option<Vec<u8>> {
    let digit = |c: u8| char::from(c).to_digit(16).and_then(|digit| u8::try_from(digit).ok());
    if !text.len().is_multiple_of(2) {
        return None;
    }
    text.as_bytes()
        .chunks_exact(2)
        .map(|pair| Some(digit(pair[0])? << 4 | digit(pair[1])?))
        .collect()
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

    proptest! {
        #[test]
        fn digits_read_back(bytes in any::<Vec<u8>>()) {
            prop_assert_eq!(decode(&encode(&bytes)), Some(bytes.clone()));
            prop_assert_eq!(decode(&encode(&bytes).to_uppercase()), Some(bytes));
        }
    }
}
