//! The fingerprint of a certificate or key, in a form that two people, or a person and
//! a screen, can compare.
//!
//! The console shows a [`Fingerprint`] of the cluster's CA and of the node's
//! registration; `polisctl` asks for it before it trusts, and the curator compares it
//! where an operator approves a node.
//!
//! ```text
//! DER, or nonce and raw key --SHA-256--> 32 bytes --+--> 64 hexadecimal digits
//!                                        +--PBKDF2--> 44 bits --> four words
//! ```
//!
//! Four words are few enough to read aloud, and would be few enough to forge: a
//! second key with the same 44 bits is 2^44 tries away. So each try is made to
//! cost [`ROUNDS`] hashes, which brings it to 2^60 and more, in the time
//! between the moment when a cluster is founded and the moment when its owner
//! looks at it. A user who wants all 256 bits compares the digits.
//!
//! A node's key could be searched for in advance: the attacker registers a key whose words
//! are those of a machine that an operator expects. So the leader chooses a [`Nonce`] after it
//! has received the key, and the fingerprint of a registration has both. A key that was
//! prepared has other words in each registration, and each further attempt is a registration
//! that the operator sees.
//!
//! Invariants:
//! - The same certificate, or key and nonce, has the same words in every version: the list,
//!   the salt and the rounds never change.
//! - Fingerprints are compared whole: a prefix of digits or three words do not match.
//!
//! What this module does not do: decide whom to trust. It only says whether two
//! fingerprints are one.

use std::fmt;
use std::num::NonZeroU32;
use std::str::FromStr;

use bip39::Language;
use sha2::{Digest as _, Sha256};

use polis_base::hex;

/// Iterations of PBKDF2 behind the words.
const ROUNDS: NonZeroU32 = NonZeroU32::new(1 << 16).expect("it is not zero");
/// Keeps the words apart from every other use of the same hash.
const SALT: &[u8] = b"polis fingerprint words 1";
/// How many words.
const WORDS: usize = 4;
/// Bits that a word carries: the list has 2048.
const WORD_BITS: u32 = 11;
/// Longest text that is looked at: far more than 64 digits with colons between.
const TEXT_MAX: usize = 256;

/// Keeps the digest of a registration apart from that of a bare key.
const REGISTRATION: &[u8] = b"polis registration 1";

/// The leader's addition to the key of a node that registers: random, chosen after the key.
pub type Nonce = [u8; 16];

/// SHA-256 of a certificate's DER, of a raw public key, or of a registration.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Fingerprint([u8; 32]);

impl Fingerprint {
    /// The fingerprint of a certificate.
    #[must_use]
    pub fn of_certificate(der: &[u8]) -> Self {
        Self(Sha256::digest(der).into())
    }

    /// The fingerprint of a raw Ed25519 public key.
    #[must_use]
    pub fn of_key(public_key: &[u8; 32]) -> Self {
        Self(Sha256::digest(public_key).into())
    }

    /// The fingerprint of a registration: the operator compares it before approving a node.
    /// An empty nonce, as in the records of earlier versions, gives that of the key. `None` for
    /// a key or a nonce of another length.
    #[must_use]
    pub fn of_registration(public_key: &[u8], nonce: &[u8]) -> Option<Self> {
        let key = public_key.try_into().ok()?;
        if nonce.is_empty() {
            return Some(Self::of_key(key));
        }
        let nonce = Nonce::try_from(nonce).ok()?;
        let digest = Sha256::new().chain_update(REGISTRATION).chain_update(nonce);
        Some(Self(digest.chain_update(key).finalize().into()))
    }

    /// A fingerprint that was computed elsewhere.
    #[must_use]
    pub fn from_bytes(sha256: [u8; 32]) -> Self {
        Self(sha256)
    }

    /// The four words, with hyphens between. **Slow on purpose**: some 20 ms of
    /// a processor, half a second of one that is emulated. Compute it away from
    /// latency-sensitive tasks, and keep it.
    #[must_use]
    pub fn words(&self) -> String {
        let mut bytes = [0; 8];
        ring::pbkdf2::derive(ring::pbkdf2::PBKDF2_HMAC_SHA256, ROUNDS, SALT, &self.0, &mut bytes);
        let bits = u64::from_be_bytes(bytes);
        let list = Language::English.word_list();
        let word = |at: usize| {
            // The topmost bits first.
            let shift = 64 - WORD_BITS * (1 + u32::try_from(at).unwrap_or_default());
            list[usize::try_from(bits >> shift).unwrap_or_default() % list.len()]
        };
        std::array::from_fn::<&str, WORDS, _>(word).join("-")
    }

    /// Whether `spoken` is of this. As slow as [`Fingerprint::words`] where it is words.
    #[must_use]
    pub fn is(&self, spoken: &Spoken) -> bool {
        match spoken {
            Spoken::Digits(fingerprint) => self == fingerprint,
            Spoken::Words(words) => self.words() == *words,
        }
    }
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex::encode(&self.0))
    }
}

impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A fingerprint as read from a screen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Spoken {
    /// All digits.
    Digits(Fingerprint),
    /// Four words of the list, in lower case, with hyphens between.
    Words(String),
}

/// The text is not a fingerprint.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidFingerprint {
    /// A word is not one of the list: a slip of the finger, not another machine.
    #[error("{word:?} is not a word of fingerprints")]
    Word {
        /// The word.
        word: String,
    },
    /// Neither four words nor 64 digits.
    #[error("a fingerprint is four words, or 64 hexadecimal digits")]
    Shape,
}

impl FromStr for Spoken {
    type Err = InvalidFingerprint;

    /// Case does not matter, nor what stands between words or digits, as long
    /// as it is a space, a hyphen, a dot, a comma or a colon.
    fn from_str(text: &str) -> Result<Self, InvalidFingerprint> {
        if text.len() > TEXT_MAX {
            return Err(InvalidFingerprint::Shape);
        }
        let text = text.to_lowercase();
        let between = |c: char| c.is_whitespace() || "-.,:".contains(c);
        let parts: Vec<&str> = text.split(between).filter(|part| !part.is_empty()).collect();
        let joined = parts.concat();
        if let Some(bytes) = hex::decode_name(&joined) {
            return Ok(Self::Digits(Fingerprint(bytes)));
        }
        if parts.len() != WORDS {
            return Err(InvalidFingerprint::Shape);
        }
        let unknown = parts.iter().find(|word| Language::English.find_word(word).is_none());
        match unknown {
            Some(word) => Err(InvalidFingerprint::Word { word: (*word).to_owned() }),
            None => Ok(Self::Words(parts.join("-"))),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const ABC: &str = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";

    #[test]
    fn a_key_has_another_fingerprint_in_each_registration() {
        let of = |nonce: &[u8]| Fingerprint::of_registration(&[1; 32], nonce);
        assert_eq!(of(&[]), Some(Fingerprint::of_key(&[1; 32])));
        assert!(of(&[1; 16]).is_some());
        assert_ne!(of(&[1; 16]), of(&[2; 16]));
        assert_ne!(of(&[1; 16]), Fingerprint::of_registration(&[2; 32], &[1; 16]));
        assert_eq!((of(&[1; 15]), Fingerprint::of_registration(&[1; 31], &[])), (None, None));
    }

    #[test]
    fn a_fingerprint_is_sha_256_in_digits() {
        assert_eq!(Fingerprint::of_certificate(b"abc").to_string(), ABC);
    }

    #[test]
    fn the_words_are_those_that_other_programs_compute() {
        // Python: hashlib.pbkdf2_hmac("sha256", bytes.fromhex(ABC),
        //         b"polis fingerprint words 1", 65536, 8), eleven bits a word.
        assert_eq!(Fingerprint::of_certificate(b"abc").words(), WORDS_OF_ABC);
    }

    const WORDS_OF_ABC: &str = "scissors-lecture-lamp-unique";

    #[test]
    fn words_and_digits_are_read_as_people_write_them() {
        let abc = Fingerprint::of_certificate(b"abc");
        let pairs: Vec<&str> =
            ABC.as_bytes().chunks(2).map(|c| std::str::from_utf8(c).unwrap()).collect();
        for text in [
            ABC.to_owned(),
            ABC.to_uppercase(),
            pairs.join(":"),
            pairs.join(" "),
            WORDS_OF_ABC.to_owned(),
            format!("  {} ", WORDS_OF_ABC.to_uppercase().replace('-', " ")),
            WORDS_OF_ABC.replace('-', ", "),
        ] {
            assert!(abc.is(&text.parse().unwrap()), "{text}");
        }
    }

    #[test]
    fn another_certificate_has_another_fingerprint() {
        let other = Fingerprint::of_certificate(b"abd");
        assert!(!other.is(&ABC.parse().unwrap()));
        assert!(!other.is(&WORDS_OF_ABC.parse().unwrap()));
    }

    #[test]
    fn a_part_of_a_fingerprint_is_refused() {
        let three = WORDS_OF_ABC.rsplit_once('-').unwrap().0;
        for text in
            ["", "-", &ABC[..62], &format!("{ABC}00"), three, &format!("{WORDS_OF_ABC}-zoo")]
        {
            assert_eq!(text.parse::<Spoken>(), Err(InvalidFingerprint::Shape), "{text}");
        }
    }

    #[test]
    fn a_mistyped_word_is_named() {
        let error = "zoo-zoo-zo-zoo".parse::<Spoken>().unwrap_err();
        assert_eq!(error, InvalidFingerprint::Word { word: "zo".to_owned() });
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic(text in any::<String>()) {
            let _parsed = text.parse::<Spoken>();
        }
    }
}
