//! A reader of GPT partition tables, far enough to find a partition.
//!
//! The kernel reads the table, too, and makes the partition devices; but it
//! keeps the GUIDs to itself. Here, before anything is mounted, some thirty sectors of a
//! disk that may be anyone's are read, and each number in them is checked before it is
//! used.
//!
//! The `gpt` crate, with which `storage` changes tables, is not used here: it panics at
//! entries of another size than 128 bytes and reads as many entries as the header claims,
//! and a panic of PID 1 stops the machine.
//!
//! Invariants:
//! - A table with wrong checksums, or that cannot be read, is ignored: the same rule by which
//!   the kernel and the firmware turn to the backup at the end of the disk.
//! - At most [`ENTRIES_MAX`] entries are read, even if the header has more.

use std::fmt;
use std::io::{self, Read, Seek, SeekFrom};

/// Tables have 128 entries; tools can make more, but in practice do not.
const ENTRIES_MAX: usize = 256;
/// The size of an entry in every table seen so far; the standard allows more.
const ENTRY_SIZES: std::ops::RangeInclusive<usize> = 128..=512;
/// Size of the header before its reserved rest.
const HEADER_SIZES: std::ops::RangeInclusive<usize> = 92..=512;
const SIGNATURE: &[u8; 8] = b"EFI PART";

/// A GUID in the byte order of the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Guid([u8; 16]);

/// Where the bytes of the written form lie on the disk: the first three groups
/// are little-endian.
const ORDER: [usize; 16] = [3, 2, 1, 0, 5, 4, 7, 6, 8, 9, 10, 11, 12, 13, 14, 15];

impl Guid {
    /// Reads the written form, in either case.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let groups: Vec<&str> = text.split('-').collect();
        let lengths: Vec<usize> = groups.iter().map(|group| group.len()).collect();
        if lengths != [8, 4, 4, 4, 12] {
            return None;
        }
        let digits: Vec<u32> =
            groups.concat().chars().map(|digit| digit.to_digit(16)).collect::<Option<_>>()?;
        let mut bytes = [0; 16];
        for (place, pair) in ORDER.iter().zip(digits.chunks_exact(2)) {
            bytes[*place] = u8::try_from(pair[0] * 16 + pair[1]).ok()?;
        }
        Some(Self(bytes))
    }
}

impl fmt::Display for Guid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, place) in ORDER.iter().enumerate() {
            if [4, 6, 8, 10].contains(&at) {
                f.write_str("-")?;
            }
            write!(f, "{:02x}", self.0[*place])?;
        }
        Ok(())
    }
}

/// A partition that is in use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Partition {
    /// Counted from 1, as the kernel does.
    pub number: u32,
    /// The GUID of its purpose.
    pub kind: Guid,
    /// Its own GUID.
    pub guid: Guid,
    /// Its name, for example `POLIS-ESP`.
    pub name: String,
}

/// The content of a header, checked.
struct Header {
    entries_at: u64,
    entries: usize,
    entry_size: usize,
    entries_sum: u32,
}

/// Reads the table of a disk with sectors of `sector` bytes and `sectors` of them: the
/// first valid one, the primary or its backup at the end.
///
/// # Errors
///
/// When one of both can't be read and the other is not valid. A disk without a table is
/// `Ok(None)`.
pub fn read<D: Read + Seek>(
    disk: &mut D,
    sector: u64,
    sectors: u64,
) -> io::Result<Option<Vec<Partition>>> {
    let primary = read_at(disk, sector, 1);
    if matches!(primary, Ok(Some(_))) {
        return primary;
    }
    match read_at(disk, sector, sectors.saturating_sub(1)) {
        Ok(Some(backup)) => Ok(Some(backup)),
        other => primary.and(other),
    }
}

fn read_at<D: Read + Seek>(
    disk: &mut D,
    sector: u64,
    at: u64,
) -> io::Result<Option<Vec<Partition>>> {
    let mut bytes = vec![0; *HEADER_SIZES.end()];
    if !read_exact_at(disk, sector.saturating_mul(at), &mut bytes)? {
        return Ok(None);
    }
    let Some(header) = parse_header(&bytes, at) else { return Ok(None) };
    let mut bytes = vec![0; header.entries * header.entry_size];
    if !read_exact_at(disk, sector.saturating_mul(header.entries_at), &mut bytes)?
        || checksum(&bytes) != header.entries_sum
    {
        return Ok(None);
    }
    let entries = bytes.chunks_exact(header.entry_size);
    Ok(Some((1..).zip(entries).filter_map(|(number, entry)| parse_entry(number, entry)).collect()))
}

/// `false` where the disk ends.
fn read_exact_at<D: Read + Seek>(disk: &mut D, at: u64, bytes: &mut [u8]) -> io::Result<bool> {
    disk.seek(SeekFrom::Start(at))?;
    match disk.read_exact(bytes) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
        Err(error) => Err(error),
    }
}

/// The header in `bytes`, read from sector `at`, if it is valid.
fn parse_header(bytes: &[u8], at: u64) -> Option<Header> {
    if bytes.get(..8)? != SIGNATURE {
        return None;
    }
    let size = usize::try_from(u32_at(bytes, 12)?).ok()?;
    if !HEADER_SIZES.contains(&size) {
        return None;
    }
    let mut summed = bytes.get(..size)?.to_vec();
    // The checksum is made with zeros in its own place.
    summed.get_mut(16..20)?.fill(0);
    if checksum(&summed) != u32_at(bytes, 16)? || u64_at(bytes, 24)? != at {
        return None;
    }
    let entries = usize::try_from(u32_at(bytes, 80)?).ok()?;
    let entry_size = usize::try_from(u32_at(bytes, 84)?).ok()?;
    if entries > ENTRIES_MAX || !ENTRY_SIZES.contains(&entry_size) {
        return None;
    }
    let entries_at = u64_at(bytes, 72)?;
    Some(Header { entries_at, entries, entry_size, entries_sum: u32_at(bytes, 88)? })
}

/// A partition, if the entry is in use.
fn parse_entry(number: u32, entry: &[u8]) -> Option<Partition> {
    let kind: [u8; 16] = entry.get(..16)?.try_into().ok()?;
    if kind == [0; 16] {
        return None;
    }
    let kind = Guid(kind);
    let guid = Guid(entry.get(16..32)?.try_into().ok()?);
    let letters: Vec<u16> = entry
        .get(56..128)?
        .chunks_exact(2)
        .map(|letter| u16::from_le_bytes([letter[0], letter[1]]))
        .take_while(|letter| *letter != 0)
        .collect();
    Some(Partition { number, kind, guid, name: String::from_utf16_lossy(&letters) })
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?))
}

/// CRC-32 as in Ethernet, bit by bit: 16 KiB of it take no time, and a table
/// of constants would be longer than this.
fn checksum(bytes: &[u8]) -> u32 {
    const POLYNOMIAL: u32 = 0xedb8_8320;
    !bytes.iter().fold(u32::MAX, |sum, byte| {
        (0..8).fold(sum ^ u32::from(*byte), |sum, _bit| {
            if sum & 1 == 1 { (sum >> 1) ^ POLYNOMIAL } else { sum >> 1 }
        })
    })
}

#[cfg(test)]
mod tests {
    use std::io::Cursor;

    use proptest::prelude::*;

    use super::*;

    pub(super) const SECTOR: u64 = 512;

    pub(super) fn put(bytes: &mut [u8], at: usize, value: &[u8]) {
        bytes[at..at + value.len()].copy_from_slice(value);
    }

    /// A disk as the `gpt` crate writes it, with one named partition.
    pub(super) fn disk() -> (Vec<u8>, String) {
        let size = 1 << 18;
        let mut disk = Cursor::new(vec![0; size]);
        gpt::mbr::ProtectiveMBR::with_lb_size(u32::try_from(size / 512).unwrap() - 1)
            .overwrite_lba0(&mut disk)
            .unwrap();
        let config = gpt::GptConfig::new().writable(true);
        let mut table = config.create_from_device(disk, None).unwrap();
        let number =
            table.add_partition("POLIS-ESP", 1 << 16, gpt::partition_types::EFI, 0, None).unwrap();
        let guid = table.partitions()[&number].part_guid.to_string();
        (table.write().unwrap().into_inner(), guid)
    }

    pub(super) fn sectors(disk: &[u8]) -> u64 {
        disk.len() as u64 / SECTOR
    }

    #[test]
    fn a_table_written_by_the_gpt_crate_is_read() {
        let (disk, guid) = disk();
        let table = read(&mut Cursor::new(&disk), SECTOR, sectors(&disk)).unwrap().unwrap();
        let [partition] = &table[..] else { panic!("one partition, not {table:?}") };
        assert_eq!((partition.number, partition.name.as_str()), (1, "POLIS-ESP"));
        assert_eq!(partition.guid.to_string(), guid.to_lowercase());
        assert_eq!(Guid::parse(&guid.to_uppercase()), Some(partition.guid));
    }

    #[test]
    fn a_torn_primary_table_is_replaced_by_its_backup() {
        let (mut disk, _guid) = disk();
        // One byte of the entries: the checksum in the header no longer fits.
        put(&mut disk, 1024 + 60, b"x");
        let table = read(&mut Cursor::new(&disk), SECTOR, sectors(&disk)).unwrap().unwrap();
        assert_eq!(table[0].name, "POLIS-ESP");
        let torn = sectors(&disk) - 1;
        put(&mut disk, usize::try_from(torn * SECTOR).unwrap(), b"x");
        assert_eq!(read(&mut Cursor::new(&disk), SECTOR, torn + 1).unwrap(), None);
    }

    /// A disk, some bytes of which do not read.
    struct Failing {
        disk: Cursor<Vec<u8>>,
        lost: std::ops::Range<u64>,
    }

    impl Read for Failing {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            let start = self.disk.position();
            let end = start + buffer.len() as u64;
            if start < self.lost.end && self.lost.start < end {
                return Err(io::Error::other("these bytes do not read"));
            }
            self.disk.read(buffer)
        }
    }

    impl Seek for Failing {
        fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
            self.disk.seek(to)
        }
    }

    #[test]
    fn a_table_that_cannot_be_read_is_replaced_by_the_other_one() {
        let (mut disk, _guid) = disk();
        let sectors = sectors(&disk);
        let size = sectors * SECTOR;
        let read_without = |disk: &[u8], lost: std::ops::Range<u64>| {
            read(&mut Failing { disk: Cursor::new(disk.to_vec()), lost }, SECTOR, sectors)
        };
        // The header of the first one, its entries, all of the other one.
        for lost in [512..1024, 1024..1536, size - 33 * 512..size] {
            let table = read_without(&disk, lost).unwrap().unwrap();
            assert_eq!(table[0].name, "POLIS-ESP");
        }
        assert!(read_without(&disk, 0..size).is_err());
        // One byte of the entries: neither is valid, and one may have been.
        put(&mut disk, 1024 + 60, b"x");
        assert!(read_without(&disk, size - 512..size).is_err());
        let torn = usize::try_from(size - 512).unwrap();
        put(&mut disk, torn, b"x");
        assert!(read_without(&disk, 512..1024).is_err());
    }

    #[test]
    fn a_disk_without_a_table_or_of_no_size_has_none() {
        assert_eq!(read(&mut Cursor::new(vec![0; 1 << 16]), SECTOR, 128).unwrap(), None);
        assert_eq!(read(&mut Cursor::new(Vec::new()), SECTOR, 0).unwrap(), None);
    }

    #[test]
    fn the_checksum_is_the_usual_one() {
        assert_eq!(checksum(b"123456789"), 0xcbf4_3926);
    }

    proptest! {
        #[test]
        fn a_guid_reads_as_it_is_written(bytes in any::<[u8; 16]>()) {
            let guid = Guid(bytes);
            prop_assert_eq!(Guid::parse(&guid.to_string()), Some(guid));
        }

        #[test]
        fn arbitrary_bytes_never_panic(
            text in any::<String>(),
            at in 512_usize..4096,
            input in prop::collection::vec(any::<u8>(), 1..64),
        ) {
            let _guid = Guid::parse(&text);
            let (mut disk, _guid) = disk();
            put(&mut disk, at, &input);
            let _table = read(&mut Cursor::new(&disk), SECTOR, sectors(&disk));
        }

        #[test]
        fn an_arbitrary_header_with_a_right_checksum_never_panics(
            input in prop::collection::vec(any::<u8>(), 68),
        ) {
            let (mut disk, _guid) = disk();
            put(&mut disk, 512 + 24, &input);
            put(&mut disk, 512 + 24, &1_u64.to_le_bytes());
            put(&mut disk, 512 + 16, &[0; 4]);
            let sum = checksum(&disk[512..512 + 92]);
            put(&mut disk, 512 + 16, &sum.to_le_bytes());
            let _table = read(&mut Cursor::new(&disk), SECTOR, sectors(&disk));
        }
    }
}

#[cfg(test)]
#[path = "gpt_fuzz_tests.rs"]
mod fuzz_tests;
