//! The damage: changes of valid input that parsers are known to stumble over.
//!
//! Each change is a value, so that proptest draws it from a seed, and leaves it out again
//! while it looks for the shortest input that fails.

use std::ops::Range;

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::Index;

/// Changes of one input at most.
const CHANGES_MAX: usize = 8;
/// Bytes that one change inserts at most.
const INSERTED_MAX: usize = 24;

/// Numbers at which lengths and counts overflow, and the numbers beside them.
const EDGES: [u64; 14] = [
    0,
    1,
    0x7f,
    0x80,
    0xff,
    0x100,
    0x7fff,
    0xffff,
    0x7fff_ffff,
    0x8000_0000,
    0xffff_ffff,
    0x7fff_ffff_ffff_ffff,
    0x8000_0000_0000_0000,
    u64::MAX,
];

/// One change; places are shares of the length that the input has by then.
#[derive(Clone, Debug)]
enum Change {
    Flip(Index, u8),
    Set(Index, u8),
    /// A number of 1, 2, 4 or 8 bytes, little- or big-endian.
    Edge(Index, u64, u8, bool),
    /// An ASCII digit, sign or delimiter where text is read.
    Text(Index, u8),
    Cut(Index),
    Remove(Index, Index),
    Repeat(Index, Index),
    Insert(Index, Vec<u8>),
    /// From here on as another sample from there on.
    Splice(Index, Index, Index),
}

/// Inputs near `samples`, and a few random ones, of at most `length_max` bytes.
pub(crate) fn inputs(samples: &[Vec<u8>], length_max: usize) -> BoxedStrategy<Vec<u8>> {
    let random = vec(any::<u8>(), 0..=length_max.min(512));
    if samples.is_empty() {
        return random.boxed();
    }
    let samples = samples.to_vec();
    let damaged = (any::<Index>(), vec(change(), 1..=CHANGES_MAX)).prop_map(move |(from, made)| {
        let mut input = from.get(&samples).clone();
        for one in &made {
            one.apply(&mut input, &samples, length_max);
        }
        input
    });
    prop_oneof![9 => damaged, 1 => random].boxed()
}

fn change() -> impl Strategy<Value = Change> {
    let at = any::<Index>;
    let edge = prop::sample::select(EDGES.to_vec());
    let width = prop::sample::select(vec![1, 2, 4, 8]);
    let text = prop::sample::select(b"0123456789+-.:/=,\"'\\[]{} \n\r\t\x1b;_%~".to_vec());
    prop_oneof![
        4 => (at(), 0..8_u8).prop_map(|(at, bit)| Change::Flip(at, bit)),
        3 => (at(), any::<u8>()).prop_map(|(at, byte)| Change::Set(at, byte)),
        3 => (at(), edge, width, any::<bool>())
            .prop_map(|(at, number, width, little)| Change::Edge(at, number, width, little)),
        2 => (at(), text).prop_map(|(at, byte)| Change::Text(at, byte)),
        2 => at().prop_map(Change::Cut),
        2 => (at(), at()).prop_map(|(from, to)| Change::Remove(from, to)),
        2 => (at(), at()).prop_map(|(from, to)| Change::Repeat(from, to)),
        2 => (at(), vec(any::<u8>(), 1..INSERTED_MAX))
            .prop_map(|(at, bytes)| Change::Insert(at, bytes)),
        1 => (at(), at(), at()).prop_map(|(at, other, from)| Change::Splice(at, other, from)),
    ]
}

impl Change {
    fn apply(&self, input: &mut Vec<u8>, samples: &[Vec<u8>], length_max: usize) {
        match self {
            Self::Flip(at, bit) => change_byte(input, at, |byte| byte ^ (1 << bit)),
            Self::Set(at, to) | Self::Text(at, to) => change_byte(input, at, |_| *to),
            Self::Edge(at, number, width, little) => {
                let width = usize::from(*width);
                let bytes = match little {
                    true => number.to_le_bytes()[..width].to_vec(),
                    false => number.to_be_bytes()[8 - width..].to_vec(),
                };
                let at = place(at, input);
                for (old, new) in input[at..].iter_mut().zip(bytes) {
                    *old = new;
                }
            }
            Self::Cut(at) => input.truncate(place(at, input)),
            Self::Remove(from, to) => drop(input.drain(range(from, to, input))),
            Self::Repeat(from, to) => {
                let range = range(from, to, input);
                let (again, at) = (input[range.clone()].to_vec(), range.end);
                drop(input.splice(at..at, again));
            }
            Self::Insert(at, bytes) => {
                let at = place(at, input);
                drop(input.splice(at..at, bytes.iter().copied()));
            }
            Self::Splice(at, other, from) => {
                input.truncate(place(at, input));
                let other = other.get(samples);
                input.extend(&other[place(from, other)..]);
            }
        }
        input.truncate(length_max);
    }
}

fn change_byte(input: &mut [u8], at: &Index, new: impl Fn(u8) -> u8) {
    if !input.is_empty() {
        let byte = &mut input[at.index(input.len())];
        *byte = new(*byte);
    }
}

/// A place in the input or at its end.
fn place(at: &Index, input: &[u8]) -> usize {
    at.index(input.len() + 1)
}

fn range(from: &Index, to: &Index, input: &[u8]) -> Range<usize> {
    let (from, to) = (place(from, input), place(to, input));
    from.min(to)..from.max(to)
}

#[cfg(test)]
mod tests {
    use super::*;

    proptest! {
        #[test]
        fn inputs_keep_the_bound(input in inputs(&[vec![7; 60], Vec::new()], 64)) {
            prop_assert!(input.len() <= 64);
        }

        #[test]
        fn inputs_without_samples_are_random_bytes(input in inputs(&[], 64)) {
            prop_assert!(input.len() <= 64);
        }
    }
}
