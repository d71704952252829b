//! A snapshot of etcd as a file, and its name in a store outside of the cluster (`object`).
//!
//! What this module does not do: read the database. Only etcd's own tool does, when a cluster
//! begins with the file.

pub mod object;

use sha2::{Digest as _, Sha256};

/// Whether a snapshot is complete: etcd appends the SHA-256 of its content. When the file is
/// needed, another one may be impossible to get.
#[derive(Debug, Default)]
pub struct Checksum {
    size: u64,
    before: Sha256,
    /// The last bytes, which may be the digest.
    last: Vec<u8>,
}

impl Checksum {
    const LENGTH: usize = 32;

    /// Takes the next bytes of the file.
    pub fn add(&mut self, bytes: &[u8]) {
        self.size += bytes.len() as u64;
        self.last.extend_from_slice(bytes);
        let over = self.last.len().saturating_sub(Self::LENGTH);
        self.before.update(&self.last[..over]);
        self.last.drain(..over);
    }

    /// Bytes so far.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Whether the bytes end with the digest of those before.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        self.last == self.before.clone().finalize().as_slice()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_snapshot_that_was_cut_short_is_not_whole() {
        let data: Vec<u8> = (0..=255).cycle().take(2000).collect();
        let whole = [&*data, &Sha256::digest(&data)].concat();
        let is_whole = |bytes: &[u8], piece: usize| {
            let mut checksum = Checksum::default();
            bytes.chunks(piece).for_each(|piece| checksum.add(piece));
            assert_eq!(checksum.size(), bytes.len() as u64);
            checksum.is_whole()
        };
        for piece in [1, 31, 32, 33, 512, 4096] {
            assert!(is_whole(&whole, piece), "in pieces of {piece}");
            assert!(!is_whole(&whole[..whole.len() - 1], piece));
            assert!(!is_whole(&data, piece));
        }
        assert!(!Checksum::default().is_whole(), "an empty file is not a snapshot");
    }
}
