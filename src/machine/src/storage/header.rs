//! The LUKS2 header: reads it, as far as is needed to recognise our own.
//!
//! `storage::probe` asks. `cryptsetup` opens a partition; this module only decides
//! whether it is ours to open.
//!
//! The header is not authenticated by itself: a person with the disk can rewrite it,
//! for example with ciphers that do nothing, and then any passphrase opens it. So a
//! header is only ours if every cipher in it is one that we choose.
//!
//! Invariants:
//! - Any bytes are an answer; nothing here can fail or panic.
//! - A kind is read only from a copy whose checksum is right, and one whole copy
//!   is enough: `cryptsetup` mends the other.

use serde::Deserialize;
use sha2::{Digest as _, Sha256};
use uuid::Uuid;

use super::Kind;

/// Where the two copies of a header of the usual size are, and how each begins.
const COPIES: [(usize, &[u8; 6]); 2] = [(0, b"LUKS\xba\xbe"), (0x4000, b"SKUL\xba\xbe")];

/// The binary part; the JSON part follows it.
const BINARY_SIZE: usize = 4096;
/// Size of one copy, both parts: the default of `cryptsetup`.
const COPY_SIZE: usize = 0x4000;
/// Where the checksum is. It covers the copy, with zeros in its own place.
const CHECKSUM: std::ops::Range<usize> = 0x1c0..0x200;

/// The maker of a header: a mark that `cryptsetup` keeps for others.
pub const SUBSYSTEM: &str = "polis";

/// The cipher of `encrypted`, and of the key slots of both kinds.
pub const CIPHER: &str = "aes-xts-plain64";
/// The cipher of `authenticated`; docs/storage.md compares it.
pub const CIPHER_AUTHENTICATED: &str = "aegis128-random";
/// Bytes that are encrypted at a time.
pub const SECTOR_SIZE: u32 = 4096;

/// A LUKS2 header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Luks {
    /// Its ID; `None` if that is not a UUID.
    pub id: Option<Uuid>,
    /// Its label.
    pub label: String,
    /// Its maker.
    pub subsystem: String,
    /// Whether a checksum confirms that the rest is as it was written.
    pub whole: bool,
    /// The kind as which it protects; `None` if we do not make such a kind, or the
    /// header is not whole.
    pub kind: Option<Kind>,
}

/// Reads the header in the first bytes of a partition: a whole copy of it, else
/// one that is not.
#[must_use]
pub fn read(head: &[u8]) -> Option<Luks> {
    let mut found = COPIES.iter().filter_map(|(offset, magic)| copy(head.get(*offset..)?, magic));
    let first = found.next()?;
    Some(if first.whole { first } else { found.find(|luks| luks.whole).unwrap_or(first) })
}

fn copy(bytes: &[u8], magic: &[u8; 6]) -> Option<Luks> {
    let bytes = bytes.get(..COPY_SIZE)?;
    let version = u16::from_be_bytes(bytes.get(6..8)?.try_into().ok()?);
    let size = u64::from_be_bytes(bytes.get(8..16)?.try_into().ok()?);
    if !bytes.starts_with(magic) || version != 2 || size != COPY_SIZE as u64 {
        return None;
    }
    let mut hash = Sha256::new();
    hash.update(&bytes[..CHECKSUM.start]);
    hash.update([0; CHECKSUM.end - CHECKSUM.start]);
    hash.update(&bytes[CHECKSUM.end..]);
    let whole =
        text(&bytes[0x48..0x68]) == "sha256" && bytes[CHECKSUM].starts_with(&hash.finalize());
    Some(Luks {
        whole,
        id: text(&bytes[0xa8..0xd0]).parse().ok(),
        label: text(&bytes[0x18..0x48]),
        subsystem: text(&bytes[0xd0..0x100]),
        kind: kind(&bytes[BINARY_SIZE..]).filter(|_| whole),
    })
}

/// Text up to the first NUL.
fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(until_nul(bytes)).into_owned()
}

fn until_nul(bytes: &[u8]) -> &[u8] {
    bytes.split(|byte| *byte == 0).next().unwrap_or_default()
}

/// The JSON part, with those fields alone that decide what protects the data.
#[derive(Deserialize)]
struct Metadata {
    keyslots: std::collections::BTreeMap<String, Slot>,
    segments: std::collections::BTreeMap<String, Segment>,
}

#[derive(Deserialize)]
struct Slot {
    #[serde(rename = "type")]
    kind: String,
    area: Area,
    kdf: Kdf,
}

#[derive(Deserialize)]
struct Area {
    encryption: String,
    key_size: u32,
}

#[derive(Deserialize)]
struct Kdf {
    #[serde(rename = "type")]
    kind: String,
    hash: String,
}

#[derive(Deserialize)]
struct Segment {
    #[serde(rename = "type")]
    kind: String,
    size: String,
    encryption: String,
    sector_size: u32,
    integrity: Option<Integrity>,
}

#[derive(Deserialize)]
struct Integrity {
    #[serde(rename = "type")]
    kind: String,
}

fn kind(json: &[u8]) -> Option<Kind> {
    let metadata: Metadata = serde_json::from_slice(until_nul(json)).ok()?;
    let ours = |slot: &Slot| {
        slot.kind == "luks2"
            && slot.area.encryption == CIPHER
            && slot.area.key_size == 64
            && slot.kdf.kind == "pbkdf2"
            && slot.kdf.hash == "sha256"
    };
    if metadata.keyslots.is_empty() || !metadata.keyslots.values().all(ours) {
        return None;
    }
    let [segment] = metadata.segments.values().collect::<Vec<_>>()[..] else { return None };
    let whole = segment.kind == "crypt" && segment.size == "dynamic";
    if !whole || segment.sector_size != SECTOR_SIZE {
        return None;
    }
    let integrity = segment.integrity.as_ref().map(|integrity| integrity.kind.as_str());
    match (segment.encryption.as_str(), integrity) {
        (CIPHER, None) => Some(Kind::Encrypted),
        (CIPHER_AUTHENTICATED, Some("aead")) => Some(Kind::Authenticated),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const ID: Uuid = Uuid::from_bytes([7; 16]);

    fn json(slot: &str, segment: &str, integrity: &str) -> String {
        format!(
            r#"{{"keyslots":{{"0":{{"type":"luks2","key_size":16,"area":{{"type":"raw",
            "encryption":"{slot}","key_size":64}},"kdf":{{"type":"pbkdf2","hash":"sha256"}}}}}},
            "tokens":{{}},"segments":{{"0":{{"type":"crypt","offset":"16777216","size":"dynamic",
            "encryption":"{segment}","sector_size":4096{integrity}}}}},"digests":{{}}}}"#
        )
    }

    pub(super) fn with(json: &str) -> Vec<u8> {
        let mut head = vec![0; 2 * COPY_SIZE];
        for (offset, magic) in COPIES {
            let copy = &mut head[offset..offset + COPY_SIZE];
            copy[..6].copy_from_slice(magic);
            copy[7] = 2;
            copy[8..16].copy_from_slice(&(COPY_SIZE as u64).to_be_bytes());
            copy[0x18..0x22].copy_from_slice(b"polis-data");
            copy[0x48..0x4e].copy_from_slice(b"sha256");
            copy[0xa8..0xcc].copy_from_slice(ID.to_string().as_bytes());
            copy[0xd0..0xd5].copy_from_slice(SUBSYSTEM.as_bytes());
            copy[BINARY_SIZE..BINARY_SIZE + json.len()].copy_from_slice(json.as_bytes());
            let hash = Sha256::digest(&*copy);
            copy[CHECKSUM][..32].copy_from_slice(&hash);
        }
        head
    }

    /// The first bytes of a partition of this kind.
    pub(super) fn header(kind: Kind) -> Vec<u8> {
        match kind {
            Kind::Insecure => Vec::new(),
            Kind::Encrypted => with(&json(CIPHER, CIPHER, "")),
            Kind::Authenticated => {
                with(&json(CIPHER, CIPHER_AUTHENTICATED, r#","integrity":{"type":"aead"}"#))
            }
        }
    }

    #[test]
    fn a_header_tells_its_kind() {
        for kind in [Kind::Encrypted, Kind::Authenticated] {
            let luks = read(&header(kind)).unwrap();
            let label = "polis-data".to_owned();
            let subsystem = SUBSYSTEM.to_owned();
            assert_eq!(
                luks,
                Luks { id: Some(ID), label, subsystem, whole: true, kind: Some(kind) }
            );
        }
    }

    #[test]
    fn one_complete_copy_of_the_header_is_enough() {
        let mut head = header(Kind::Encrypted);
        head[100] ^= 1;
        assert_eq!(read(&head).unwrap().kind, Some(Kind::Encrypted));
        head[COPY_SIZE + 5000] ^= 1;
        // A power cut while it was written leaves a name without a checksum.
        let torn = read(&head).unwrap();
        assert_eq!((torn.id, torn.whole, torn.kind), (Some(ID), false, None));
        assert_eq!(read(&head[..100]), None);
    }

    #[test]
    fn ciphers_that_do_nothing_are_not_ours() {
        for json in [
            json("cipher_null-ecb", CIPHER, ""),
            json(CIPHER, "cipher_null-ecb", ""),
            json(CIPHER, CIPHER_AUTHENTICATED, ""),
            json(CIPHER, CIPHER, r#","integrity":{"type":"none"}"#),
            json(CIPHER, CIPHER, "").replace("4096", "512"),
            json(CIPHER, CIPHER, "").replace("dynamic", "4096"),
            json(CIPHER, CIPHER, "").replace("pbkdf2", "argon2i"),
            "{}".to_owned(),
        ] {
            assert_eq!(read(&with(&json)).unwrap().kind, None, "{json}");
        }
    }

    proptest! {
        #[test]
        fn an_arbitrary_header_never_panics(
            place in 0..2 * COPY_SIZE,
            input in prop::collection::vec(any::<u8>(), 0..100),
        ) {
            let mut head = header(Kind::Authenticated);
            for (byte, input) in head[place..].iter_mut().zip(input) {
                *byte = input;
            }
            let _answer = read(&head);
        }
    }
}

#[cfg(test)]
#[path = "header_fuzz_tests.rs"]
mod fuzz_tests;
