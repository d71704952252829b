//! The frame around the records of a node on its EFI system partition.
//!
//! A file may be another version's, another computer's or another record's. The frame
//! separates whole from damaged, so that *absent* and *damaged* are never mistaken for each
//! other, also where the keeper is a variable of the firmware.
//!
//! ```text
//! 0      8        10     12       16        16+n        48+n
//! | magic | version | kind | length | payload | SHA-256 of all before |
//! ```
//!
//! Numbers are little-endian. Invariants:
//! - A record reads back exactly as it was written, or not at all.
//! - The version covers kind and payload: an old node refuses a record of a newer version.

use sha2::{Digest as _, Sha256};
use zeroize::Zeroizing;

use polis_base::files::{self, File};
use polis_runtime::supervisor::blocking;

/// The version of the frame; a change of its meaning is a new number.
const VERSION: u16 = 1;

/// How the secrets in a payload are protected; the public fields are always readable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub(super) enum Protection {
    /// Not at all, or the payload has no secrets.
    Plain = 0,
    /// By the TPM of the machine.
    Tpm = 1,
}

const HEAD: usize = 16;
const CHECKSUM: usize = 32;

/// The kind of a record: its first eight bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Magic(pub(super) [u8; 8]);

/// The reason why bytes are not a whole record.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Damage {
    /// Something else, or unreadable content.
    #[error("it has another header")]
    Magic,
    /// Written by a newer version.
    #[error("it has version {0}; this node supports version {VERSION}")]
    Version(u16),
    /// Protected in a way that this version does not know.
    #[error("it has protection {0}, which this node does not support")]
    Kind(u16),
    /// Cut short, or with something behind it.
    #[error("it has {has} bytes instead of {should}")]
    Length {
        /// The actual length.
        has: usize,
        /// The length in the head.
        should: usize,
    },
    /// Changed after it was written.
    #[error("its checksum does not match")]
    Checksum,
    /// The frame is whole, and its content is not valid.
    #[error("its content is invalid: {0}")]
    Content(String),
}

/// A record on the ESP.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Record<T> {
    /// The file does not exist.
    Absent,
    /// The file exists and is not whole.
    Damaged(Damage),
    /// Whole.
    Whole(T),
}

/// Frames `payload`, which may be a secret.
pub(super) fn write(magic: Magic, protection: Protection, payload: &[u8]) -> Zeroizing<Vec<u8>> {
    // Files of the tree are bounded far below four gigabytes.
    let length = u32::try_from(payload.len()).unwrap_or(u32::MAX);
    // The final capacity: a vector that is moved leaves its content behind.
    let mut record = Zeroizing::new(Vec::with_capacity(HEAD + payload.len() + CHECKSUM));
    record.extend(magic.0);
    record.extend(VERSION.to_le_bytes());
    record.extend((protection as u16).to_le_bytes());
    record.extend(length.to_le_bytes());
    record.extend(payload);
    let checksum = Sha256::digest(&*record);
    record.extend(checksum);
    record
}

/// Takes the payload out of its frame.
pub(super) fn read(magic: Magic, record: &[u8]) -> Result<(Protection, &[u8]), Damage> {
    let has = record.len();
    let rest = record.strip_prefix(&magic.0).ok_or(Damage::Magic)?;
    let head: [u8; HEAD - 8] = rest
        .get(..HEAD - 8)
        .and_then(|head| head.try_into().ok())
        .ok_or(Damage::Length { has, should: HEAD + CHECKSUM })?;
    let [v0, v1, k0, k1, length @ ..] = head;
    let version = u16::from_le_bytes([v0, v1]);
    if version != VERSION {
        return Err(Damage::Version(version));
    }
    let length = u32::from_le_bytes(length) as usize;
    let should = HEAD.saturating_add(length).saturating_add(CHECKSUM);
    if has != should {
        return Err(Damage::Length { has, should });
    }
    let (body, checksum) = record.split_at(has - CHECKSUM);
    if Sha256::digest(body).as_slice() != checksum {
        return Err(Damage::Checksum);
    }
    // After the checksum: a flipped bit is damage, not an unknown kind.
    let protection = match u16::from_le_bytes([k0, k1]) {
        0 => Protection::Plain,
        1 => Protection::Tpm,
        other => return Err(Damage::Kind(other)),
    };
    Ok((protection, &body[HEAD..]))
}

/// Reads the record in `file`.
///
/// # Errors
///
/// The kernel's, of a file that may be whole.
pub(super) async fn read_from<T: Send + 'static>(
    file: &File,
    parse: impl Fn(&[u8]) -> Result<T, Damage> + Send + 'static,
) -> Result<Record<T>, files::Error> {
    let file = file.clone();
    blocking(move || match file.read() {
        Ok(None) => Ok(Record::Absent),
        Ok(Some(bytes)) => {
            // Secrets without a TPM are in it as they are.
            let bytes = Zeroizing::new(bytes);
            Ok(parse(&bytes).map_or_else(Record::Damaged, Record::Whole))
        }
        Err(files::Error::TooLarge { .. } | files::Error::NotAFile { .. }) => {
            Ok(Record::Damaged(Damage::Magic))
        }
        Err(files::Error::Damaged { .. }) => Ok(Record::Damaged(Damage::Checksum)),
        Err(error) => Err(error),
    })
    .await
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MAGIC: Magic = Magic(*b"polistst");

    #[test]
    fn each_kind_of_damage_has_its_error() {
        let record = write(MAGIC, Protection::Tpm, b"payload");
        assert_eq!(read(MAGIC, &record), Ok((Protection::Tpm, &b"payload"[..])));
        assert_eq!(read(Magic(*b"another!"), &record), Err(Damage::Magic));
        assert_eq!(read(MAGIC, b""), Err(Damage::Magic));
        assert_eq!(read(MAGIC, &record[..10]), Err(Damage::Length { has: 10, should: 48 }));
        assert_eq!(read(MAGIC, &record[..50]), Err(Damage::Length { has: 50, should: 55 }));
        let mut newer = record.clone();
        newer[8] = 2;
        assert_eq!(read(MAGIC, &newer), Err(Damage::Version(2)));
        let mut changed = record;
        changed[20] ^= 1;
        assert_eq!(read(MAGIC, &changed), Err(Damage::Checksum));
    }

    #[test]
    fn a_way_of_protection_from_the_future_is_named() {
        let mut record = write(MAGIC, Protection::Tpm, b"payload");
        record[10] = 2;
        let body = record.len() - CHECKSUM;
        let checksum = Sha256::digest(&record[..body]);
        record[body..].copy_from_slice(&checksum);
        assert_eq!(read(MAGIC, &record), Err(Damage::Kind(2)));
    }

    proptest! {
        #[test]
        fn what_was_written_reads_back_and_no_change_goes_unseen(
            payload in prop::collection::vec(any::<u8>(), 0..200),
            at in any::<prop::sample::Index>(),
            flip in 1_u8..=255,
        ) {
            let record = write(MAGIC, Protection::Plain, &payload);
            prop_assert_eq!(read(MAGIC, &record), Ok((Protection::Plain, &payload[..])));
            let mut changed = record.clone();
            changed[at.index(record.len())] ^= flip;
            prop_assert!(read(MAGIC, &changed).is_err());
            prop_assert!(read(MAGIC, &record[..at.index(record.len())]).is_err());
        }

        #[test]
        fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..100)) {
            let _refused = read(MAGIC, &bytes);
            let _refused = read(MAGIC, &[&MAGIC.0[..], &bytes].concat());
        }
    }
}
