//! Secrets as text that a person can copy: groups of four characters of Crockford's base32.
//!
//! ```text
//! bits --five a character--> ABCD-EFGH-...   digits, and letters without `I`, `L`, `O` and `U`
//! ```
//!
//! A character that is often mistaken for another is read as the right one; case, dashes
//! and spaces do not matter.
//!
//! Invariants:
//! - Buffers are wiped, and allocated once: a growing buffer leaves copies behind.
//!
//! What this module does not do: detect a mistyped character. Its callers encode a checksum.

use zeroize::Zeroizing;

const GROUP: usize = 4;
const BITS: usize = 5;
pub(crate) const ALPHABET: &[u8; 32] = b"0123456789ABCDEFGHJKMNPQRSTVWXYZ";

/// Why a text cannot be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Error {
    /// It has so many characters, dashes and spaces not counted.
    Length(usize),
    /// The character at this place, from 1, is outside of the alphabet.
    Character(usize),
}

/// The first bits of `whole`, five for each of so many `characters`.
#[must_use]
pub fn write(whole: &[u8], characters: usize) -> Zeroizing<String> {
    let mut text = Zeroizing::new(String::with_capacity(characters + characters / GROUP));
    for place in 0..characters {
        if place > 0 && place % GROUP == 0 {
            text.push('-');
        }
        let value = (0..BITS).fold(0, |value, bit| {
            let at = place * BITS + bit;
            let byte = whole.get(at / 8).copied().unwrap_or_default();
            value << 1 | byte >> (7 - at % 8) & 1
        });
        text.push(char::from(ALPHABET[usize::from(value)]));
    }
    text
}

/// The bits of a text of so many `characters`, from the first byte of the array on.
///
/// # Errors
///
/// [`Error`].
pub fn read<const SIZE: usize>(
    text: &str,
    characters: usize,
) -> Result<Zeroizing<[u8; SIZE]>, Error> {
    let read = || text.chars().filter(|c| !c.is_whitespace() && *c != '-');
    let length = read().count();
    if length != characters {
        return Err(Error::Length(length));
    }
    let mut whole = Zeroizing::new([0_u8; SIZE]);
    for (place, character) in read().enumerate() {
        let value = value(character).ok_or(Error::Character(place + 1))?;
        for bit in 0..BITS {
            let at = place * BITS + bit;
            if let Some(byte) = whole.get_mut(at / 8) {
                *byte |= (value >> (BITS - 1 - bit) & 1) << (7 - at % 8);
            }
        }
    }
    Ok(whole)
}

fn value(character: char) -> Option<u8> {
    let character = match character.to_ascii_uppercase() {
        'O' => '0',
        'I' | 'L' => '1',
        other => other,
    };
    let place = ALPHABET.iter().position(|known| char::from(*known) == character)?;
    u8::try_from(place).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_that_end_within_a_byte_read_back() {
        let whole = [0xff, 0x00, 0xa5, 0xf0];
        let text = write(&whole, 6);
        assert_eq!(*text, "ZW0A-BW");
        assert_eq!(*read::<4>(&text, 6).unwrap(), [0xff, 0x00, 0xa5, 0xf0]);
        assert_eq!(read::<4>("ZW0A", 6), Err(Error::Length(4)));
        assert_eq!(read::<4>("ZU0ABW", 6), Err(Error::Character(2)));
    }
}
