//! Says a fingerprint in words that can be read aloud and compared by ear.
//!
//! Each sixteen bits become five letters, consonant and vowel in turn, after the
//! "proquint" proposal (Wilkerson, 2009): no list of words is needed.

const CONSONANTS: &[u8; 16] = b"bdfghjklmnprstvz";
const VOWELS: &[u8; 4] = b"aiou";

/// Words of a fingerprint: 96 bits are out of reach of anyone who would forge
/// one, and six words are not too many to read aloud.
const WORDS: usize = 6;

/// The first 96 bits of `fingerprint` as six words.
#[must_use]
pub fn words(fingerprint: &[u8; 32]) -> String {
    let word = |pair: &[u8]| {
        let bits = u16::from_be_bytes([pair[0], pair[1]]);
        let consonant = |shift: u16| char::from(CONSONANTS[usize::from(bits >> shift & 0xf)]);
        let vowel = |shift: u16| char::from(VOWELS[usize::from(bits >> shift & 0x3)]);
        String::from_iter([consonant(12), vowel(10), consonant(6), vowel(4), consonant(0)])
    };
    let words: Vec<String> = fingerprint.chunks_exact(2).take(WORDS).map(word).collect();
    words.join("-")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_those_of_the_proposal() {
        let mut fingerprint = [0; 32];
        fingerprint[..4].copy_from_slice(&[127, 0, 0, 1]);
        fingerprint[4..8].copy_from_slice(&[63, 84, 220, 193]);
        assert_eq!(words(&fingerprint), "lusab-babad-gutih-tugad-babab-babab");
    }
}
