//! The content of a disk, as far as an installation asks: nothing, an installation that was
//! cut off, an installed system, the data of a node, or any other data.
//!
//! ```text
//! table of an installer --> start of its ESP --blank--> cut off
//!        |                                   \--FAT--> installed, by this installation or another
//!        +--with POLIS-DATA--> a node's
//! its entries alone, at the end of zeros --> cut off
//! anything else that is not zero --> other data
//! ```
//!
//! The first block of the ESP is the last that an installation writes, so it alone says
//! whether an installation is complete.
//!
//! Invariants:
//! - A disk counts as empty only if its first and its last bytes are zero.
//! - A stale backup of a table at the end of a disk hides nothing that its start carries.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::Path;

use polis_layout::partitions::{self, ESP, SYSTEM_A, SYSTEM_B};

use super::plan;
use crate::storage::plan::{NAMES, TYPE_ID, is_installed};
use crate::storage::probe::{self, Content as Found, HEAD, TAIL};
use crate::storage::table::{self, Table};
use polis_base::sys::block;

/// The type of the one partition in a protective MBR, where its entry has it, and the end of
/// the code before it.
const PROTECTIVE: (usize, u8) = (450, 0xee);
const CODE_END: usize = 440;
/// How long an MBR is, and a header of a table; how that begins.
const RECORD: usize = 512;
const HEADER: usize = 92;
const SIGNATURE: &[u8] = b"EFI PART";
/// How long an entry of a table is, and the type at its start.
const ENTRY: usize = 128;
const KIND: usize = 16;

/// The content of a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Content {
    /// Nothing.
    Empty,
    /// An installation that was cut off.
    Unfinished,
    /// The system that this installation has put there.
    Installed,
    /// The data of a node.
    Member,
    /// Anything else, in words.
    Other(String),
}

/// The parts of a disk that are looked at.
#[derive(Debug)]
struct Seen {
    head: Vec<u8>,
    tail: Vec<u8>,
    /// Where the first copy of a table ends.
    table_end: usize,
    primary: Option<Table>,
    backup: Option<Table>,
    /// The entries of a backup whose header is still to come.
    headless: Option<Table>,
    /// The first block of the place of an ESP.
    esp: Vec<u8>,
}

/// Opens a disk for this process alone: fails while anything uses it or a partition of it.
pub(crate) fn open(disk: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).custom_flags(libc::O_EXCL).open(disk)
}

/// What a disk has, in words; `None` for an empty one. Blocks.
pub(crate) fn found(disk: &File) -> io::Result<Option<String>> {
    Ok(match look(disk, &[])? {
        Content::Empty => None,
        Content::Unfinished => Some("an installation that was cut off".to_owned()),
        Content::Installed | Content::Member => Some("the data of a node".to_owned()),
        Content::Other(found) => Some(found),
    })
}

/// Whether a disk has nothing but the entries of a table that fits, at its end: what a power cut
/// leaves of making that table. Blocks.
pub(crate) fn is_begun(disk: &File, fits: impl Fn(&Table) -> bool) -> io::Result<bool> {
    let seen = see(disk)?;
    Ok(seen.has_only_entries() && seen.headless.as_ref().is_some_and(fits))
}

/// Whether the start of a disk has a whole table, or nothing but a part of one, so that the
/// backup at its end is not left from an earlier use. Blocks.
pub(crate) fn is_table_current(disk: &File) -> io::Result<bool> {
    let seen = see(disk)?;
    Ok(seen.primary.is_some() || seen.has_only_a_table())
}

/// Looks at a disk for the installation `id`. Blocks.
pub(super) fn look(disk: &File, id: &[u8]) -> io::Result<Content> {
    Ok(see(disk)?.classify(id))
}

/// Reads what is looked at. Blocks.
fn see(disk: &File) -> io::Result<Seen> {
    let size = block::size(disk)?;
    let block_size = u64::from(block::logical_block_size(disk)?);
    let read = |at: u64, wanted: usize| {
        let left = usize::try_from(size.saturating_sub(at)).unwrap_or(usize::MAX);
        let mut bytes = vec![0; wanted.min(left)];
        disk.read_exact_at(&mut bytes, at)?;
        Ok::<_, io::Error>(bytes)
    };
    let tail_start = size.saturating_sub(TAIL as u64);
    Ok(Seen {
        head: read(0, HEAD)?,
        tail: read(tail_start, TAIL)?,
        table_end: usize::try_from(table::end(block_size)).unwrap_or(HEAD),
        primary: table::read_primary(disk),
        backup: table::read_backup(disk),
        headless: table::read_headless(disk),
        esp: read(partitions::ALIGNMENT, usize::try_from(block_size).unwrap_or(HEAD))?,
    })
}

impl Seen {
    fn classify(&self, id: &[u8]) -> Content {
        let backup = self.backup.as_ref().filter(|_table| self.has_only_a_table());
        let Some(table) = self.primary.as_ref().or(backup) else { return self.without_table() };
        let ours = is_installed(table) && plan::is_of(table, id);
        let data = table.partitions.iter().any(|partition| partition.type_id == TYPE_ID);
        match (is_installed(table), data) {
            (_, true) if ours => Content::Installed,
            (_, true) => Content::Member,
            (true, false) if self.esp.iter().all(|byte| *byte == 0) => Content::Unfinished,
            (true, false) if ours => Content::Installed,
            (true, false) => Content::Other("another installation of Polis".to_owned()),
            (false, false) => Content::Other(describe(table)),
        }
    }

    /// Whether the start of the disk has nothing, or only a table of which a power cut has
    /// left any part: then its backup is not left from an earlier use. A file system may leave
    /// most of its start as zeros, so each place of the table has what belongs there.
    fn has_only_a_table(&self) -> bool {
        let zero = |bytes: &[u8]| bytes.iter().all(|byte| *byte == 0);
        let block = self.esp.len();
        let part = |range| self.head.get(range).unwrap_or_default();
        let (first, header) = (part(0..block), part(block..2 * block));
        let (at, protective) = PROTECTIVE;
        let record = zero(first)
            || (first.get(at) == Some(&protective)
                && first.get(..CODE_END).is_some_and(zero)
                && first.get(RECORD..).is_some_and(zero));
        let header = zero(header)
            || (header.starts_with(SIGNATURE) && header.get(HEADER..).is_some_and(zero));
        // Those of the backup lie before its header, at the very end.
        let length = self.table_end.saturating_sub(2 * block);
        let start = self.tail.len().saturating_sub(length + block);
        let kinds = self.tail.get(start..start + length).unwrap_or_default();
        let kinds: Vec<&[u8]> = kinds.chunks(ENTRY).filter_map(|entry| entry.get(..KIND)).collect();
        let entries = part(2 * block..self.table_end).chunks(ENTRY).all(|entry| {
            let kind = entry.get(..KIND).unwrap_or_default();
            zero(entry) || (!zero(kind) && kinds.contains(&kind))
        });
        record && header && entries && self.head.get(self.table_end..).is_some_and(zero)
    }

    /// Whether the disk has nothing but, at its end, room for the entries of a table.
    fn has_only_entries(&self) -> bool {
        // The copy at the end is as long as the first one without its block for the MBR.
        let block = self.esp.len();
        let before = self.tail.len().saturating_sub(self.table_end.saturating_sub(block));
        let zero = |bytes: &[u8]| bytes.iter().all(|byte| *byte == 0);
        zero(&self.head) && self.tail.get(..before).is_some_and(zero)
    }

    /// The content of a disk without a whole copy of a table.
    fn without_table(&self) -> Content {
        let zero = |bytes: &[u8]| bytes.iter().all(|byte| *byte == 0);
        let alone = self.has_only_entries();
        let begun = |table: &Table| {
            let names: Vec<_> = table.partitions.iter().map(|it| it.name.as_str()).collect();
            is_installed(table) && names == [ESP, SYSTEM_A, SYSTEM_B].map(|kind| kind.name)
        };
        match &self.headless {
            Some(table) if alone && begun(table) && zero(&self.esp) => Content::Unfinished,
            _ => self.recognise(),
        }
    }

    fn recognise(&self) -> Content {
        Content::Other(match probe::recognise(&self.head, &self.tail) {
            Found::Blank => return Content::Empty,
            Found::Unknown => "data of an unknown kind".to_owned(),
            Found::Xfs(_) => "a file system (XFS)".to_owned(),
            Found::Luks(_) => "encrypted data (LUKS)".to_owned(),
            Found::Other(name) => format!("data ({name})"),
        })
    }
}

fn describe(table: &Table) -> String {
    let names: Vec<&str> =
        table.partitions.iter().map(|partition| partition.name.as_str()).take(8).collect();
    if names.iter().any(|name| name.starts_with(NAMES)) {
        return "an image of Polis".to_owned();
    }
    let count = table.partitions.len();
    format!("a partition table (GPT) with {count} partitions: {:?}", names.join(", "))
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::*;

    const ID: [u8; 16] = [7; 16];
    const SIZE: u64 = 8 << 30;

    fn disk() -> File {
        let file = tempfile::tempfile().unwrap();
        file.set_len(SIZE).unwrap();
        file
    }

    fn table(id: &[u8]) -> Table {
        plan::plan(SIZE, 512, 1 << 20, Uuid::from_u128(5), id).unwrap().table
    }

    fn with_data(mut table: Table) -> Table {
        let last = table.partitions.last().unwrap().clone();
        table.partitions.push(table::Partition {
            number: 4,
            name: "POLIS-DATA".to_owned(),
            type_id: TYPE_ID,
            first: last.last + 1,
            last: last.last + 2048,
            attributes: 0,
            ..last
        });
        table
    }

    fn boots(disk: &File) {
        disk.write_all_at(b"\xeb\x58\x90", partitions::ALIGNMENT).unwrap();
    }

    #[test]
    fn an_empty_disk_is_one_whose_ends_are_zero() {
        let disk = disk();
        assert_eq!(look(&disk, &ID).unwrap(), Content::Empty);
        disk.write_all_at(b"\x53\xef", 0x438).unwrap();
        assert_eq!(look(&disk, &ID).unwrap(), Content::Other("data (ext)".to_owned()));
        disk.write_all_at(b"\0\0", 0x438).unwrap();
        disk.write_all_at(b"x", SIZE - 1).unwrap();
        let unknown = Content::Other("data of an unknown kind".to_owned());
        assert_eq!(look(&disk, &ID).unwrap(), unknown);
    }

    #[test]
    fn the_start_of_the_esp_says_whether_an_installation_is_complete() {
        let disk = disk();
        table::create(&disk, &table(&ID)).unwrap();
        for id in [&ID, &[8; 16]] {
            assert_eq!(look(&disk, id).unwrap(), Content::Unfinished, "of any installation");
        }
        boots(&disk);
        assert_eq!(look(&disk, &ID).unwrap(), Content::Installed);
        let other = Content::Other("another installation of Polis".to_owned());
        assert_eq!(look(&disk, &[8; 16]).unwrap(), other);
    }

    #[test]
    fn a_node_s_data_is_a_node_s_unless_this_installation_made_the_disk() {
        let disk = disk();
        table::create(&disk, &with_data(table(&ID))).unwrap();
        assert_eq!(look(&disk, &ID).unwrap(), Content::Installed);
        assert_eq!(look(&disk, &[8; 16]).unwrap(), Content::Member);
        let mut image = with_data(table(&ID));
        image.partitions[1].attributes = 0;
        table::create(&disk, &image).unwrap();
        assert_eq!(look(&disk, &ID).unwrap(), Content::Member, "of an image, not of an installer");
        image.partitions.pop();
        table::create(&disk, &image).unwrap();
        let image = Content::Other("an image of Polis".to_owned());
        assert_eq!(look(&disk, &ID).unwrap(), image);
    }

    #[test]
    fn an_installation_that_was_cut_within_its_table_is_unfinished() {
        let whole = disk();
        table::create(&whole, &table(&ID)).unwrap();
        let entries = SIZE - 33 * 512..SIZE - 512;
        let header = SIZE - 512..SIZE;
        // The first copy: the record, the header and the entries that are used.
        let first = [0..512, 512..1024, 1024..1536];
        let copy = |cut: &File, range: &std::ops::Range<u64>| {
            let mut bytes = vec![0; usize::try_from(range.end - range.start).unwrap()];
            whole.read_exact_at(&mut bytes, range.start).unwrap();
            cut.write_all_at(&bytes, range.start).unwrap();
        };
        let cut = disk();
        copy(&cut, &entries);
        assert_eq!(look(&cut, &ID).unwrap(), Content::Unfinished, "entries alone");
        cut.write_all_at(b"x", SIZE - 34 * 512).unwrap();
        assert!(matches!(look(&cut, &ID).unwrap(), Content::Other(_)), "and other data");
        for arrived in 0..1 << first.len() {
            let cut = disk();
            copy(&cut, &entries);
            copy(&cut, &header);
            for (_at, range) in first.iter().enumerate().filter(|(at, _)| arrived >> at & 1 == 1) {
                copy(&cut, range);
            }
            assert_eq!(look(&cut, &ID).unwrap(), Content::Unfinished, "blocks {arrived:03b}");
        }
    }

    #[test]
    fn entries_without_a_header_are_ours_only_if_an_installer_wrote_them() {
        let mut image = table(&ID);
        image.partitions[1].attributes = 0;
        let mut named = table(&ID);
        "root".clone_into(&mut named.partitions[0].name);
        for other in [image, named, with_data(table(&ID))] {
            let file = disk();
            table::create(&file, &other).unwrap();
            file.write_all_at(&vec![0; 34 * 512], 0).unwrap();
            file.write_all_at(&[0; 512], SIZE - 512).unwrap();
            let unknown = Content::Other("data of an unknown kind".to_owned());
            assert_eq!(look(&file, &ID).unwrap(), unknown);
        }
    }

    #[test]
    fn a_stale_backup_hides_no_later_data() {
        let file = disk();
        table::create(&file, &table(&ID)).unwrap();
        file.write_all_at(&vec![0; 34 * 512], 0).unwrap();
        let mut record = vec![0; 512];
        record[450] = 0x83;
        record[510..].copy_from_slice(b"\x55\xaa");
        file.write_all_at(&record, 0).unwrap();
        assert!(matches!(look(&file, &ID).unwrap(), Content::Other(_)), "partitions of an MBR");
        file.write_all_at(&vec![0; 512], 0).unwrap();
        // A file system of the ext family, whose start is zero but for its superblock.
        file.write_all_at(b"\x53\xef", 0x438).unwrap();
        assert_eq!(look(&file, &ID).unwrap(), Content::Other("data (ext)".to_owned()));
        file.write_all_at(b"\0\0", 0x438).unwrap();
        file.write_all_at(b"_BHRfS_M", 0x10040).unwrap();
        assert_eq!(look(&file, &ID).unwrap(), Content::Other("data (btrfs)".to_owned()));
    }

    #[test]
    fn other_partitions_are_named() {
        let file = disk();
        let mut other = table(&ID);
        for (partition, name) in other.partitions.iter_mut().zip(["EFI", "root", "home"]) {
            name.clone_into(&mut partition.name);
        }
        table::create(&file, &other).unwrap();
        let words = "a partition table (GPT) with 3 partitions: \"EFI, root, home\"";
        assert_eq!(look(&file, &ID).unwrap(), Content::Other(words.to_owned()));
    }
}
