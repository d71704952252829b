//! Node parameters as text, for places that carry only text.
//!
//! ```text
//! polis-parameters-v1:CiIKIFhmZmZmZm...   base64 (RFC 4648) of the message; white space is skipped
//! ```
//!
//! Every place may have either form. The text begins with `p`, the tag of field 14 of
//! `NodeParameters`, which therefore stays unused: so the first bytes tell the forms apart.

use base64ct::{Base64, Encoding as _};

use super::Error;

/// The text begins with it.
pub const ARMOUR: &str = "polis-parameters-v1:";

/// The message in `bytes`, which are the message itself or its text.
///
/// # Errors
///
/// [`Error::NotBase64`].
pub fn message(bytes: Vec<u8>) -> Result<Vec<u8>, Error> {
    let Some(text) = bytes.strip_prefix(ARMOUR.as_bytes()) else { return Ok(bytes) };
    let text: Vec<u8> = text.iter().copied().filter(|byte| !byte.is_ascii_whitespace()).collect();
    std::str::from_utf8(&text)
        .ok()
        .and_then(|text| Base64::decode_vec(text).ok())
        .ok_or(Error::NotBase64)
}

/// The text of a message, without a line feed.
#[must_use]
pub fn text(message: &[u8]) -> String {
    format!("{ARMOUR}{}", Base64::encode_string(message))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_as_text_gives_the_message() {
        assert_eq!(text(b"abcd"), "polis-parameters-v1:YWJjZA==");
        for bytes in [&b""[..], b"a", b"\x0a\x22\xff"] {
            assert_eq!(message(text(bytes).into()).unwrap(), bytes);
        }
    }

    #[test]
    fn text_gives_its_message_however_its_lines_are_broken() {
        for text in ["polis-parameters-v1:YWJjZA==", "polis-parameters-v1:\n YWJj\r\nZA==\n"] {
            assert_eq!(message(text.into()).unwrap(), b"abcd");
        }
    }

    #[test]
    fn a_message_stays_as_it_is() {
        for bytes in [&b""[..], b"\x0a\x22\x0a", b"polis-parameters-v1", b"\xff"] {
            assert_eq!(message(bytes.to_vec()).unwrap(), bytes);
        }
    }

    #[test]
    fn text_that_is_not_base64_is_malformed() {
        for text in ["YWJjZA=", "YWJjZA==A", "YWJ!", "\u{e4}"] {
            let error = message(format!("{ARMOUR}{text}").into()).unwrap_err();
            assert_eq!(error.code(), polis_base::trapdoor::code::PARAMETERS_MALFORMED);
            assert!(error.to_string().contains(ARMOUR), "{error}");
        }
    }

    #[test]
    fn no_field_has_the_tag_with_which_the_text_begins() {
        // Field 14 as a number.
        assert_eq!(ARMOUR.as_bytes()[0], 14 << 3);
        let error = super::super::parse(&[ARMOUR.as_bytes()[0], 1]).unwrap_err();
        assert!(matches!(error, Error::UnknownField { number: 14, .. }), "{error}");
    }
}
