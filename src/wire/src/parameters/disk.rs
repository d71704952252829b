//! Disks with user data: the labels that announce them, and the file with node parameters.
//!
//! ```text
//! FAT, boot sector        --+--> label cidata    user-data
//! ISO 9660, descriptor 16 --+    label config-2  openstack/latest/user_data
//! ```
//!
//! A label counts in capitals or not, as for cloud-init.
//!
//! What this module does not do: read the file. A node mounts the disk, `polisctl` reads the
//! image.

use std::io;

use super::Source;

/// A file system that may carry user data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileSystem {
    /// FAT12, FAT16 or FAT32.
    Fat,
    /// ISO 9660, also with the names of Joliet or Rock Ridge.
    Iso9660,
}

/// The place of the primary volume descriptor of ISO 9660: sector 16 of 2,048 bytes.
const ISO_DESCRIPTOR: u64 = 16 * 2048;

/// The part of that descriptor with the label.
const ISO_HEAD: usize = 72;

/// The kind of disk, if the label of its file system announces user data. `read` fills a buffer
/// from a place of the disk; an error there means that the disk is too short.
pub fn recognise(read: impl Fn(&mut [u8], u64) -> io::Result<()>) -> Option<(Source, FileSystem)> {
    let mut sector = [0; 512];
    let fat = read(&mut sector, 0).ok().and_then(|()| fat_label(&sector));
    if let Some(source) = fat.and_then(announced) {
        return Some((source, FileSystem::Fat));
    }
    let mut descriptor = [0; ISO_HEAD];
    read(&mut descriptor, ISO_DESCRIPTOR).ok()?;
    let source = descriptor.starts_with(b"\x01CD001\x01").then(|| &descriptor[40..72]);
    Some((announced(source?)?, FileSystem::Iso9660))
}

/// The file with user data on a disk of this source.
#[must_use]
pub fn user_data(source: Source) -> &'static str {
    match source {
        Source::ConfigDrive => "openstack/latest/user_data",
        _ => "user-data",
    }
}

/// Why these bytes are not node parameters: user data of cloud-init, which some hypervisors add
/// to every machine. No message begins with these words.
#[must_use]
pub fn foreign(content: &[u8]) -> Option<&'static str> {
    let words: [&[u8]; 3] = [b"#", b"Content-Type:", b"MIME-Version:"];
    if content.is_empty() {
        Some("empty")
    } else if words.iter().any(|word| content.starts_with(word)) {
        Some("for cloud-init, not node parameters")
    } else {
        None
    }
}

fn announced(label: &[u8]) -> Option<Source> {
    let label = label.trim_ascii_end();
    if label.eq_ignore_ascii_case(b"cidata") {
        Some(Source::NoCloud)
    } else if label.eq_ignore_ascii_case(b"config-2") {
        Some(Source::ConfigDrive)
    } else {
        None
    }
}

/// The label in the boot sector of a FAT file system.
fn fat_label(sector: &[u8; 512]) -> Option<&[u8]> {
    /// Says that a label follows: four bytes after it.
    const SIGNATURE: u8 = 0x29;
    if !matches!(sector[0], 0xeb | 0xe9) || sector[510..] != [0x55, 0xaa] {
        return None;
    }
    // The old length of the table is zero where it is FAT32, which has more fields.
    let at = if sector[22..24] == [0, 0] { 66 } else { 38 };
    (sector[at] == SIGNATURE).then(|| &sector[at + 5..at + 16])
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The most bytes that are read.
    const HEAD: usize = 32_768 + ISO_HEAD;

    fn recognised(disk: &[u8]) -> Option<(Source, FileSystem)> {
        recognise(|buffer, at| {
            let at = usize::try_from(at).unwrap();
            let bytes = disk.get(at..at + buffer.len()).ok_or(io::ErrorKind::UnexpectedEof)?;
            buffer.copy_from_slice(bytes);
            Ok(())
        })
    }

    /// The head of a FAT file system whose boot sector has its label at this place.
    fn fat(at: usize, label: &[u8; 11]) -> [u8; 512] {
        let mut sector = [0; 512];
        sector[0] = 0xeb;
        sector[22] = u8::from(at == 38);
        sector[at] = 0x29;
        sector[at + 5..at + 16].copy_from_slice(label);
        sector[510..].copy_from_slice(&[0x55, 0xaa]);
        sector
    }

    #[test]
    fn a_label_is_read_from_each_kind_of_fat_and_from_iso_9660() {
        for at in [38, 66] {
            let found = recognised(&fat(at, b"CIDATA     "));
            assert_eq!(found, Some((Source::NoCloud, FileSystem::Fat)));
        }
        let mut iso = vec![0; HEAD];
        iso[32_768..32_775].copy_from_slice(b"\x01CD001\x01");
        iso[32_808..32_840].copy_from_slice(b"config-2                        ");
        assert_eq!(recognised(&iso), Some((Source::ConfigDrive, FileSystem::Iso9660)));
        assert_eq!(recognised(&iso[..HEAD - 1]), None);
        // A hybrid image has a boot sector before its descriptor.
        iso[..512].copy_from_slice(&fat(38, b"OTHER      "));
        assert_eq!(recognised(&iso), Some((Source::ConfigDrive, FileSystem::Iso9660)));
    }

    #[test]
    fn other_bytes_are_not_such_a_disk() {
        for bytes in [&b""[..], b"polis-parameters-v1:", &fat(38, b"CIDATA2    "), &[0; HEAD]] {
            assert_eq!(recognised(bytes), None);
        }
    }
}
