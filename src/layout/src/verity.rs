//! The hash tree by which the kernel checks each block of the system.
//!
//! The tree of `dm-verity` in its format 1, without a superblock: BLAKE2b with hashes of 256 bits,
//! blocks of 4096 bytes, the salt before each block. Written here because it is one loop and runs
//! on every core, and `veritysetup` does not have this hash; a test holds it to what another
//! implementation makes of the format, and each boot to the kernel's.
//!
//! ```text
//! | data blocks | root block | ... | hashes of hashes | hashes of data |
//! ```
//!
//! BLAKE2b and not SHA-256: each boot hashes some 25 MB, and a processor without instructions
//! for SHA-256, a translated one above all, takes several times as long for that.
//!
//! Invariants:
//! - The tree follows the data at once: its offset is the length of the data.

use std::thread;

use blake2::digest::consts::U32;
use blake2::{Blake2b, Digest as _};

/// Size of data blocks and of hash blocks.
pub const BLOCK: usize = 4096;
/// Size of a hash.
const HASH: usize = 32;
/// The hash function, `blake2b-256` in the kernel.
type Hasher = Blake2b<U32>;

/// The parameters with which the kernel opens the system.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Verity {
    /// Hash of the root of the tree, in hexadecimal.
    pub root_hash: String,
    /// Salt, in hexadecimal.
    pub salt: String,
    /// Number of data blocks; the tree follows them.
    pub blocks: u64,
}

/// Hashes `data`, whose length is a whole number of blocks, and returns the
/// root hash and the tree, root first.
#[must_use]
pub fn tree(data: &[u8], salt: &[u8]) -> ([u8; HASH], Vec<u8>) {
    above(level(data, salt), salt)
}

/// The same from the hashes of the data, which a caller that reads it in pieces has put end
/// to end.
#[must_use]
pub fn above(mut hashes: Vec<u8>, salt: &[u8]) -> ([u8; HASH], Vec<u8>) {
    let mut levels = Vec::new();
    while hashes.len() > HASH {
        hashes.resize(hashes.len().next_multiple_of(BLOCK), 0);
        let above = level(&hashes, salt);
        levels.push(hashes);
        hashes = above;
    }
    let mut root = [0; HASH];
    root.copy_from_slice(&hashes[..HASH]);
    levels.reverse();
    (root, levels.concat())
}

/// Bytes of the tree over so many data blocks.
#[must_use]
pub fn length(mut blocks: u64) -> u64 {
    let mut sum = 0;
    while blocks > 1 {
        blocks = blocks.div_ceil((BLOCK / HASH) as u64);
        sum += blocks;
    }
    sum.saturating_mul(BLOCK as u64)
}

/// The hashes of all blocks of one level, or of a piece of it, end to end.
#[must_use]
pub fn level(data: &[u8], salt: &[u8]) -> Vec<u8> {
    let salted = Hasher::new_with_prefix(salt);
    let workers = thread::available_parallelism().map_or(1, usize::from);
    let share = data.len().div_ceil(BLOCK).div_ceil(workers).max(1) * BLOCK;
    let mut hashes = vec![0; data.len().div_ceil(BLOCK) * HASH];
    thread::scope(|scope| {
        for (data, hashes) in data.chunks(share).zip(hashes.chunks_mut(share / BLOCK * HASH)) {
            let salted = &salted;
            scope.spawn(move || {
                for (block, hash) in data.chunks(BLOCK).zip(hashes.chunks_mut(HASH)) {
                    hash.copy_from_slice(&salted.clone().chain_update(block).finalize());
                }
            });
        }
    });
    hashes
}

/// The bytes of hexadecimal digits, as in a salt.
#[must_use]
pub fn bytes(digits: &str) -> Option<Vec<u8>> {
    if !digits.len().is_multiple_of(2) {
        return None;
    }
    let digit = |at: usize| u8::from_str_radix(digits.get(at..at + 2)?, 16).ok();
    (0..digits.len()).step_by(2).map(digit).collect()
}

#[cfg(test)]
mod tests {
    use polis_base::hex;

    use super::*;

    fn pattern(blocks: usize) -> Vec<u8> {
        (0..blocks * BLOCK).map(|at| u8::try_from((at * 7 + at / BLOCK) % 251).unwrap()).collect()
    }

    #[test]
    fn one_block_is_its_own_root() {
        let data = pattern(1);
        let (root, tree) = tree(&data, b"salt");
        assert_eq!(
            root[..],
            Hasher::new().chain_update(b"salt").chain_update(&data).finalize()[..]
        );
        assert!(tree.is_empty());
    }

    #[test]
    fn a_flipped_bit_changes_the_root() {
        let mut data = pattern(300);
        let (before, _) = tree(&data, b"salt");
        data[299 * BLOCK] ^= 1;
        assert_ne!(tree(&data, b"salt").0, before);
    }

    #[test]
    fn a_tree_that_is_made_in_pieces_is_the_same_and_has_the_length_that_was_said() {
        for blocks in [1, 2, 128, 129, 300] {
            let data = pattern(blocks);
            let whole = tree(&data, b"salt");
            let pieces = data.chunks(7 * BLOCK).flat_map(|piece| level(piece, b"salt"));
            assert!(above(pieces.collect(), b"salt") == whole, "{blocks}");
            assert_eq!(length(blocks as u64), whole.1.len() as u64, "{blocks}");
        }
    }

    #[test]
    fn the_tree_is_the_one_that_another_implementation_makes() {
        let (root, tree) = tree(&pattern(300), b"polis-salt");
        // Three blocks of hashes below one of theirs.
        assert_eq!(tree.len(), 4 * BLOCK);
        assert_eq!(
            hex::encode(&root),
            "fa155fa5cbc07d02a65728f8b3289f3fe002e82561385e70c626e6778a89ec43"
        );
        assert_eq!(
            hex::encode(&Hasher::digest(&tree)),
            "172094d7aa7db1dbb7a954baddf431edeaeea4ff41e49b64930c9a2939eeb566"
        );
    }
}
