//! The one-time code of a machine in maintenance, and the two keys that both ends derive from it.
//!
//! A machine without an owner knows no key of a caller. It shows a code, which proves that a
//! caller can read its screen:
//!
//! ```text
//! 80 random bits --PBKDF2--> 32 bytes --HKDF--+--> key of the machine: its TLS certificate
//!   |    shown, with a checksum of 20 bits    +--> key of the caller: its TLS certificate
//!   +--> XXXX-XXXX-XXXX-XXXX-XXXX
//! ```
//!
//! Each end accepts only the other key of the pair, so a man in the middle, who has neither, can
//! neither read nor answer, and a caller with another code ends the handshake itself. A listener
//! sees the public keys, and can compare each guess of a code with them without asking the
//! machine: 2^80 guesses of [`ROUNDS`] hashes each are out of reach, so no memory-hard function
//! is needed. The rounds are those of fingerprints.
//!
//! Invariants:
//! - The same code gives the same keys in every version.
//! - `Debug` shows neither code nor key, and both are wiped.
//!
//! What this module does not do: decide whether a machine has an owner, or serve.

use std::fmt;
use std::num::NonZeroU32;
use std::str::FromStr;

use polis_base::crockford;
use rand::TryRng as _;
use rand::rngs::{SysError, SysRng};
use ring::hkdf;
use sha2::{Digest as _, Sha256};
use zeroize::Zeroizing;

use crate::identity::NodeKey;

/// Random bytes of a code.
const SIZE: usize = 10;
/// Characters of a code: 80 bits, and 20 bits of a checksum.
const CHARACTERS: usize = 20;
/// Bytes that the characters fill, the last one by half.
const WHOLE: usize = 13;
/// Iterations of PBKDF2: half a second of a processor that is emulated.
const ROUNDS: NonZeroU32 = NonZeroU32::new(1 << 16).expect("it is not zero");
/// Keeps the keys apart from every other use of the same functions.
const SALT: &[u8] = b"polis maintenance code 1";

/// A one-time code.
#[derive(Clone, PartialEq, Eq)]
pub struct Code(Zeroizing<[u8; SIZE]>);

/// The keys of both ends.
#[derive(Clone, Debug)]
pub struct Keys {
    /// The machine serves with this one.
    pub machine: NodeKey,
    /// The caller shows this one.
    pub caller: NodeKey,
}

/// Why a text is not a code. No error shows a character of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidCode {
    /// Too short or too long.
    #[error("a maintenance code has {CHARACTERS} letters and digits, not {0}")]
    Length(usize),
    /// A character outside of the alphabet.
    #[error("character {0}, not counting dashes, is not allowed in a maintenance code")]
    Character(usize),
    /// Every character is valid, but the checksum does not match.
    #[error("the maintenance code is mistyped: its checksum does not match")]
    Checksum,
}

impl From<crockford::Error> for InvalidCode {
    fn from(error: crockford::Error) -> Self {
        match error {
            crockford::Error::Length(length) => Self::Length(length),
            crockford::Error::Character(place) => Self::Character(place),
        }
    }
}

impl Code {
    /// Makes a new code from the kernel's random bytes.
    ///
    /// # Errors
    ///
    /// The kernel has none.
    pub fn generate() -> Result<Self, SysError> {
        let mut secret = Zeroizing::new([0; SIZE]);
        SysRng.try_fill_bytes(secret.as_mut())?;
        Ok(Self(secret))
    }

    /// The code for a person: five groups of four characters.
    #[must_use]
    pub fn text(&self) -> Zeroizing<String> {
        crockford::write(&*self.with_checksum(), CHARACTERS)
    }

    /// The keys of both ends. **Slow on purpose**, as the words of a fingerprint are.
    #[must_use]
    pub fn keys(&self) -> Keys {
        let mut stretched = Zeroizing::new([0; 32]);
        ring::pbkdf2::derive(
            ring::pbkdf2::PBKDF2_HMAC_SHA256,
            ROUNDS,
            SALT,
            &*self.0,
            stretched.as_mut(),
        );
        let source = hkdf::Salt::new(hkdf::HKDF_SHA256, SALT).extract(&*stretched);
        let key = |end: &'static [u8]| {
            let mut seed = Zeroizing::new([0; 32]);
            let filled = source
                .expand(&[end], hkdf::HKDF_SHA256)
                .and_then(|derived| derived.fill(seed.as_mut()));
            filled.expect("HKDF gives as many bytes as its hash has");
            NodeKey::from_seed(&seed)
        };
        Keys { machine: key(b"machine"), caller: key(b"caller") }
    }

    fn with_checksum(&self) -> Zeroizing<[u8; WHOLE]> {
        let mut whole = Zeroizing::new([0; WHOLE]);
        whole[..SIZE].copy_from_slice(&*self.0);
        whole[SIZE..].copy_from_slice(&Sha256::digest(*self.0)[..WHOLE - SIZE]);
        whole[WHOLE - 1] &= 0xf0;
        whole
    }
}

impl FromStr for Code {
    type Err = InvalidCode;

    fn from_str(text: &str) -> Result<Self, InvalidCode> {
        let whole = crockford::read::<WHOLE>(text, CHARACTERS)?;
        let mut secret = Zeroizing::new([0; SIZE]);
        secret.copy_from_slice(&whole[..SIZE]);
        let code = Self(secret);
        if *code.with_checksum() == *whole { Ok(code) } else { Err(InvalidCode::Checksum) }
    }
}

impl fmt::Debug for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Code(…)")
    }
}

#[cfg(test)]
mod tests {
    use polis_base::hex;
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_code_has_the_same_text_and_keys_in_every_version() {
        let code = Code(Zeroizing::new([0xa7; SIZE]));
        assert_eq!(&code.text()[..], "MYKT-F9X7-MYKT-F9X7-Z01G");
        // Computed by another program.
        let keys = code.keys();
        let machine = "e415ee8262fa7cbecbfc1ee288547274ce04c16ff7037d319fe95daedbdf8593";
        assert_eq!(hex::encode(&keys.machine.public_key()), machine);
        let caller = "5f14d34af08ea5a62d57e6c336f5482eb610223849c10dca734176b5a1060177";
        assert_eq!(hex::encode(&keys.caller.public_key()), caller);
    }

    #[test]
    fn each_way_to_mistype_has_its_words_and_none_shows_the_code() {
        let code = Code::generate().unwrap();
        assert_eq!("ABCD".parse::<Code>(), Err(InvalidCode::Length(4)));
        let text = code.text();
        let wrong = format!("U{}", &text[1..]);
        assert_eq!(wrong.parse::<Code>(), Err(InvalidCode::Character(1)));
        assert_eq!(format!("{code:?}"), "Code(…)");
        assert!(!format!("{:?}", wrong.parse::<Code>()).contains(&text[1..5]));
    }

    #[test]
    fn another_code_has_other_keys_and_the_ends_differ() {
        let (one, other) = (Code::generate().unwrap(), Code::generate().unwrap());
        assert_ne!(one.keys().machine.public_key(), other.keys().machine.public_key());
        assert_ne!(one.keys().machine.public_key(), one.keys().caller.public_key());
    }

    proptest! {
        #[test]
        fn a_code_survives_being_copied_by_hand(secret in any::<[u8; SIZE]>()) {
            let code = Code(Zeroizing::new(secret));
            let copied = code.text().to_lowercase().replace('-', " ").replace('0', "o");
            prop_assert_eq!(copied.parse::<Code>(), Ok(code));
        }

        #[test]
        fn a_wrong_character_is_detected(
            secret in any::<[u8; SIZE]>(),
            place in 0..CHARACTERS,
            by in 1_u8..32,
        ) {
            let code = Code(Zeroizing::new(secret));
            let mut whole = code.with_checksum();
            for bit in 0..5 {
                let at = place * 5 + bit;
                whole[at / 8] ^= (by >> (4 - bit) & 1) << (7 - at % 8);
            }
            let text = crockford::write(&*whole, CHARACTERS);
            prop_assert_eq!(text.parse::<Code>(), Err(InvalidCode::Checksum));
        }

        #[test]
        fn arbitrary_text_never_panics(text in any::<String>()) {
            let _read = text.parse::<Code>();
        }
    }
}
