//! The LUKS2 header: reads it, as far as is needed to recognise our own.
//!
//! `storage::probe` asks. `cryptsetup` opens a partition; this module only decides
//! whether it is ours to open.
//!
//! The header is not authenticated by itself: a person with the disk can rewrite it,
//! for example with ciphers that do nothing, and then any passphrase opens it. So a
//! header is only ours if every cipher in it is one that we choose, in both of its copies:
//! `cryptsetup` opens the newer one that it accepts, whichever that is.
//!
//! Invariants:
//! - Any bytes are an answer; nothing here can fail or panic.
//! - A kind is read only from a copy whose checksum is right, and one whole copy
//!   is enough: `cryptsetup` mends the other.
//! - A header has a kind only if every copy that `cryptsetup` may accept has it.

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
/// The hash of the checksum. `cryptsetup` makes no header with another one, but accepts it.
const HASH: &str = "sha256";

/// Where a copy has its size, its number, which grows with each write, and its own place.
const SIZE: usize = 8;
const SEQUENCE: usize = 16;
const PLACE: usize = 0x100;

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
    /// Whether `cryptsetup` may accept it: a checksum confirms that the rest is as it was
    /// written, or only `cryptsetup` can tell.
    pub whole: bool,
    /// The kind as which it protects; `None` if we do not make such a kind, if the header
    /// is not whole, or if its other copy is another header.
    pub kind: Option<Kind>,
}

/// One copy of a header.
struct Found {
    luks: Luks,
    sequence: u64,
}

/// Reads the header in the first bytes of a partition: the copy that `cryptsetup` takes,
/// else one that is not whole.
#[must_use]
pub fn read(head: &[u8]) -> Option<Luks> {
    let copies: Vec<Found> =
        COPIES.iter().filter_map(|(place, magic)| copy(head, *place, magic)).collect();
    let whole = || copies.iter().filter(|found| found.luks.whole);
    // Of two copies with the same number, `cryptsetup` takes the first.
    let newest = whole().rev().max_by_key(|found| found.sequence);
    let mut luks = newest.or(copies.first())?.luks.clone();
    let same = |other: &Found| {
        let other = &other.luks;
        other.id == luks.id && other.subsystem == luks.subsystem && other.kind == luks.kind
    };
    if !whole().all(same) {
        luks.kind = None;
    }
    Some(luks)
}

fn copy(head: &[u8], place: usize, magic: &[u8; 6]) -> Option<Found> {
    let bytes = head.get(place..)?.get(..COPY_SIZE)?;
    let version = u16::from_be_bytes(bytes.get(6..8)?.try_into().ok()?);
    if !bytes.starts_with(magic) || version != 2 {
        return None;
    }
    let number = |at: usize| Some(u64::from_be_bytes(bytes.get(at..at + 8)?.try_into().ok()?));
    // They are in one sector and never change, so a copy that a power cut tore has them, too.
    // Other programs made the others: `cryptsetup` may accept them, with a checksum that is not
    // computed here.
    let usual = number(SIZE)? == COPY_SIZE as u64
        && number(PLACE)? == place as u64
        && text(&bytes[0x48..0x68]) == HASH;
    let mut hash = Sha256::new();
    hash.update(&bytes[..CHECKSUM.start]);
    hash.update([0; CHECKSUM.end - CHECKSUM.start]);
    hash.update(&bytes[CHECKSUM.end..]);
    let confirmed = usual && bytes[CHECKSUM].starts_with(&hash.finalize());
    let luks = Luks {
        whole: confirmed || !usual,
        id: text(&bytes[0xa8..0xd0]).parse().ok(),
        label: text(&bytes[0x18..0x48]),
        subsystem: text(&bytes[0xd0..0x100]),
        kind: kind(&bytes[BINARY_SIZE..]).filter(|_| confirmed),
    };
    Some(Found { luks, sequence: number(SEQUENCE)? })
}

/// Text up to the first NUL.
fn text(bytes: &[u8]) -> String {
    let text = bytes.split(|byte| *byte == 0).next().unwrap_or_default();
    String::from_utf8_lossy(text).into_owned()
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
    let (json, rest) = json.split_at(json.iter().position(|byte| *byte == 0)?);
    // With bytes behind the text, `cryptsetup` takes the other copy. Its parser ends a name
    // at an escaped NUL, so that an escape could hide another field of the same name; it
    // writes none.
    if rest.iter().any(|byte| *byte != 0) || json.windows(2).any(|pair| pair == b"\\u") {
        return None;
    }
    let metadata: Metadata = serde_json::from_slice(json).ok()?;
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

    /// Puts one of the two copies on a disk, with a checksum that fits what `change` leaves.
    fn put(head: &mut [u8], index: usize, json: &str, change: impl Fn(&mut [u8])) {
        let (place, magic) = COPIES[index];
        let copy = &mut head[place..place + COPY_SIZE];
        copy.fill(0);
        copy[..6].copy_from_slice(magic);
        copy[7] = 2;
        copy[SIZE..SIZE + 8].copy_from_slice(&(COPY_SIZE as u64).to_be_bytes());
        copy[SEQUENCE..SEQUENCE + 8].copy_from_slice(&7_u64.to_be_bytes());
        copy[0x18..0x22].copy_from_slice(b"polis-data");
        copy[0x48..0x4e].copy_from_slice(HASH.as_bytes());
        copy[0xa8..0xcc].copy_from_slice(ID.to_string().as_bytes());
        copy[0xd0..0xd5].copy_from_slice(SUBSYSTEM.as_bytes());
        copy[PLACE..PLACE + 8].copy_from_slice(&(place as u64).to_be_bytes());
        copy[BINARY_SIZE..BINARY_SIZE + json.len()].copy_from_slice(json.as_bytes());
        change(copy);
        let hash = Sha256::digest(&*copy);
        copy[CHECKSUM][..32].copy_from_slice(&hash);
    }

    /// Makes a copy one that was written before or after the other one, whose number is 7.
    fn numbered(sequence: u64) -> impl Fn(&mut [u8]) {
        move |copy: &mut [u8]| {
            copy[SEQUENCE..SEQUENCE + 8].copy_from_slice(&sequence.to_be_bytes());
        }
    }

    pub(super) fn with(json: &str) -> Vec<u8> {
        let mut head = vec![0; 2 * COPY_SIZE];
        for index in 0..COPIES.len() {
            put(&mut head, index, json, |_copy| {});
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

    /// The error of the plan where the partition has this content.
    fn refused(luks: &Luks) -> bool {
        luks.whole && luks.kind.is_none() && luks.id == Some(ID) && luks.subsystem == SUBSYSTEM
    }

    #[test]
    fn a_forged_copy_beside_a_good_one_is_not_ours() {
        let null = json(CIPHER, "cipher_null-ecb", "");
        let open = json("cipher_null-ecb", CIPHER_AUTHENTICATED, r#","integrity":{"type":"aead"}"#);
        let lesser = json(CIPHER, CIPHER, "");
        for forged in [null, open, lesser] {
            // Older, as old, newer.
            for (index, sequence) in [(0, 6), (0, 7), (0, 8), (1, 6), (1, 7), (1, 8)] {
                let mut head = header(Kind::Authenticated);
                put(&mut head, index, &forged, numbered(sequence));
                let luks = read(&head).unwrap();
                assert!(refused(&luks), "copy {index}, number {sequence}: {luks:?}");
            }
        }
    }

    #[test]
    fn a_copy_that_we_cannot_check_is_not_ours() {
        let json = json(CIPHER, CIPHER, "");
        let changes: [fn(&mut [u8]); 3] = [
            |copy| copy[0x48..0x4e].copy_from_slice(b"sha512"),
            |copy| copy[SIZE..SIZE + 8].copy_from_slice(&0x8000_u64.to_be_bytes()),
            |copy| copy[PLACE..PLACE + 8].copy_from_slice(&0x8000_u64.to_be_bytes()),
        ];
        for change in changes {
            let mut head = header(Kind::Encrypted);
            put(&mut head, 1, &json, change);
            assert!(refused(&read(&head).unwrap()), "{:?}", read(&head));
            put(&mut head, 0, &json, change);
            assert!(refused(&read(&head).unwrap()), "{:?}", read(&head));
        }
    }

    #[test]
    fn of_two_good_copies_the_newer_one_counts() {
        for (first, second, label) in [(7, 8, "2nd"), (8, 7, "1st"), (7, 7, "1st")] {
            let mut head = vec![0; 2 * COPY_SIZE];
            for (index, sequence, label) in [(0, first, b"1st"), (1, second, b"2nd")] {
                put(&mut head, index, &json(CIPHER, CIPHER, ""), |copy| {
                    copy[0x18..0x22].fill(0);
                    copy[0x18..0x1b].copy_from_slice(label);
                    numbered(sequence)(copy);
                });
            }
            let luks = read(&head).unwrap();
            assert_eq!((&*luks.label, luks.kind), (label, Some(Kind::Encrypted)));
        }
    }

    #[test]
    fn a_newer_copy_that_a_power_cut_tore_does_not_count() {
        for (index, (place, _magic)) in COPIES.into_iter().enumerate() {
            for json in [json(CIPHER, CIPHER, ""), json(CIPHER, "cipher_null-ecb", "")] {
                let mut head = header(Kind::Encrypted);
                put(&mut head, index, &json, numbered(8));
                // `cryptsetup` writes the checksum last.
                head[place..][CHECKSUM].fill(0);
                let luks = read(&head).unwrap();
                assert_eq!((luks.whole, luks.kind), (true, Some(Kind::Encrypted)));
            }
        }
    }

    #[test]
    fn metadata_that_cryptsetup_may_read_as_another_is_not_ours() {
        let json = json(CIPHER, CIPHER, "");
        assert_eq!(read(&with(&json)).unwrap().kind, Some(Kind::Encrypted));
        let full = COPY_SIZE - BINARY_SIZE;
        for json in [
            format!("{json}\0x"),
            // Without a NUL at its end.
            format!("{json:full$}"),
            json.replace(r#""digests""#, r#""keyslots\u0000":{},"digests""#),
        ] {
            assert!(refused(&read(&with(&json)).unwrap()), "{json}");
        }
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
