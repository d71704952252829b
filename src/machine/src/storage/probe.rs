//! The probe: recognises the content of a stretch of a disk from the bytes at its two
//! ends.
//!
//! `storage` probes before it formats anything: recognised content is somebody's data.
//! Pure: bytes in, a name out.
//!
//! Invariants:
//! - Any bytes are an answer; nothing here can fail or panic.
//! - A stretch is only [`Content::Blank`] if every byte looked at is zero.
//!
//! What this module does not do: check the soundness of a file system. `mkfs.xfs`
//! clears its `in progress` mark last, and the kernel checks at the mount.

use uuid::Uuid;

use super::header::{self, Luks};

/// How many bytes at the start of a stretch are looked at. The farthest sign of
/// a known format stands just after 128 KiB (ZFS).
pub const HEAD: usize = 256 << 10;

/// How many bytes at the end: Linux software RAID keeps its sign in the last 128 KiB.
pub const TAIL: usize = 128 << 10;

/// The content of a stretch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Content {
    /// Only zeros.
    Blank,
    /// Bytes in no format known here.
    Unknown,
    /// An XFS file system.
    Xfs(Xfs),
    /// A LUKS2 header that is whole.
    Luks(Luks),
    /// Something else that is known.
    Other(&'static str),
}

/// The superblock of an XFS file system.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Xfs {
    /// Its ID.
    pub id: Uuid,
    /// Its label.
    pub label: String,
    /// Whether it was never completed.
    pub in_progress: bool,
    /// How many bytes it covers.
    pub size: u64,
}

/// A sign at a fixed place from the start.
struct Sign {
    name: &'static str,
    offset: usize,
    bytes: &'static [u8],
}

const fn sign(name: &'static str, offset: usize, bytes: &'static [u8]) -> Sign {
    Sign { name, offset, bytes }
}

/// Containers come before file systems: a container's header counts even where
/// an old file system shows through.
const SIGNS: &[Sign] = &[
    sign("LUKS", 0, b"LUKS\xba\xbe"),
    // LUKS2 keeps a second header at one of these places.
    sign("LUKS", 0x4000, b"SKUL\xba\xbe"),
    sign("LUKS", 0x8000, b"SKUL\xba\xbe"),
    sign("LUKS", 0x10000, b"SKUL\xba\xbe"),
    sign("LUKS", 0x20000, b"SKUL\xba\xbe"),
    sign("dm-integrity", 0, b"integrt\0"),
    sign("dm-verity", 0, b"verity\0\0"),
    sign("BitLocker", 3, b"-FVE-FS-"),
    sign("LVM", 0x000, b"LABELONE"),
    sign("LVM", 0x200, b"LABELONE"),
    sign("LVM", 0x400, b"LABELONE"),
    sign("LVM", 0x600, b"LABELONE"),
    sign("Linux RAID", 0, b"\xfc\x4e\x2b\xa9"),
    sign("Linux RAID", 0x1000, b"\xfc\x4e\x2b\xa9"),
    sign("bcache", 0x1018, b"\xc6\x85\x73\xf6\x4e\x1a\x45\xca"),
    sign("Ceph", 0, b"bluestore block device"),
    sign("ZFS", 0x20000, b"\x0c\xb1\xba\0\0\0\0\0"),
    sign("ZFS", 0x20000, b"\0\0\0\0\0\xba\xb1\x0c"),
    sign("GPT", 0x200, b"EFI PART"),
    sign("GPT", 0x1000, b"EFI PART"),
    sign("btrfs", 0x10040, b"_BHRfS_M"),
    sign("ext", 0x438, b"\x53\xef"),
    sign("erofs", 0x400, b"\xe2\xe1\xf5\xe0"),
    sign("squashfs", 0, b"hsqs"),
    sign("f2fs", 0x400, b"\x10\x20\xf5\xf2"),
    sign("nilfs2", 0x406, b"\x34\x34"),
    sign("jfs", 0x8000, b"JFS1"),
    sign("reiserfs", 0x10034, b"ReIsEr"),
    sign("gfs2", 0x10000, b"\x01\x16\x19\x70"),
    sign("ocfs2", 0x2000, b"OCFSV2"),
    sign("bcachefs", 0x1018, b"\xc6\x85\x73\xf6\x66\xce\x90\xa9"),
    sign("iso9660", 0x8001, b"CD001"),
    sign("UDF", 0x8001, b"BEA01"),
    sign("HFS+", 0x400, b"H+"),
    sign("HFS+", 0x400, b"HX"),
    sign("APFS", 0x20, b"NXSB"),
    sign("NTFS", 3, b"NTFS    "),
    sign("exFAT", 3, b"EXFAT   "),
    sign("FAT", 0x36, b"FAT1"),
    sign("FAT", 0x52, b"FAT32"),
    // The signature of swap ends the first page, for each page size.
    sign("swap", 0x1000 - 10, b"SWAPSPACE2"),
    sign("swap", 0x1000 - 10, b"SWAP-SPACE"),
    sign("swap", 0x4000 - 10, b"SWAPSPACE2"),
    sign("swap", 0x10000 - 10, b"SWAPSPACE2"),
];

/// Returns the content of a stretch whose first bytes are `head` and last bytes `tail`.
#[must_use]
pub fn recognise(head: &[u8], tail: &[u8]) -> Content {
    if let Some(luks) = header::read(head) {
        return Content::Luks(luks);
    }
    if let Some(found) = SIGNS.iter().find(|sign| stands(head, sign.offset, sign.bytes)) {
        return Content::Other(found.name);
    }
    // RAID formats 0.90 and 1.0 stand at a multiple of 4 KiB near the end.
    if tail.chunks(4096).any(|page| page.starts_with(b"\xfc\x4e\x2b\xa9")) {
        return Content::Other("Linux RAID");
    }
    if let Some(xfs) = xfs(head) {
        return Content::Xfs(xfs);
    }
    // An MBR or FAT boot sector without any other sign is still no blank disk.
    if stands(head, 0x1fe, b"\x55\xaa") {
        return Content::Other("boot sector");
    }
    if head.iter().chain(tail).all(|byte| *byte == 0) { Content::Blank } else { Content::Unknown }
}

fn stands(bytes: &[u8], offset: usize, sign: &[u8]) -> bool {
    bytes.get(offset..).is_some_and(|rest| rest.starts_with(sign))
}

/// Reads the superblock of XFS: big-endian, at the very start.
fn xfs(head: &[u8]) -> Option<Xfs> {
    if !head.starts_with(b"XFSB") {
        return None;
    }
    let block_size = u32::from_be_bytes(field(head, 4)?);
    let blocks = u64::from_be_bytes(field(head, 8)?);
    let label: [u8; 12] = field(head, 108)?;
    let label = label.split(|byte| *byte == 0).next().unwrap_or_default();
    let [in_progress] = field(head, 126)?;
    Some(Xfs {
        id: Uuid::from_bytes(field(head, 32)?),
        label: String::from_utf8_lossy(label).into_owned(),
        in_progress: in_progress != 0,
        size: blocks.saturating_mul(block_size.into()),
    })
}

fn field<const N: usize>(bytes: &[u8], offset: usize) -> Option<[u8; N]> {
    bytes.get(offset..offset.checked_add(N)?)?.try_into().ok()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn with(offset: usize, bytes: &[u8]) -> Vec<u8> {
        let mut head = vec![0; HEAD];
        head[offset..offset + bytes.len()].copy_from_slice(bytes);
        head
    }

    #[test]
    fn zeros_are_blank_and_random_bytes_are_unknown() {
        assert_eq!(recognise(&vec![0; HEAD], &vec![0; TAIL]), Content::Blank);
        assert_eq!(recognise(&with(7, b"noise"), &vec![0; TAIL]), Content::Unknown);
        let mut tail = vec![0; TAIL];
        tail[TAIL - 1] = 1;
        assert_eq!(recognise(&vec![0; HEAD], &tail), Content::Unknown);
    }

    #[test]
    fn every_sign_is_found_where_it_stands() {
        for sign in SIGNS {
            let content = recognise(&with(sign.offset, sign.bytes), &[]);
            assert_eq!(content, Content::Other(sign.name), "{} at {:#x}", sign.name, sign.offset);
        }
    }

    #[test]
    fn raid_is_found_near_the_end() {
        let mut tail = vec![0; TAIL];
        tail[TAIL - 8192..TAIL - 8188].copy_from_slice(b"\xfc\x4e\x2b\xa9");
        assert_eq!(recognise(&vec![0; HEAD], &tail), Content::Other("Linux RAID"));
    }

    #[test]
    fn the_superblock_of_xfs_is_read() {
        let mut head = with(0, b"XFSB");
        head[4..8].copy_from_slice(&4096_u32.to_be_bytes());
        head[8..16].copy_from_slice(&131_072_u64.to_be_bytes());
        head[32..48].copy_from_slice(&[7; 16]);
        head[108..118].copy_from_slice(b"polis-data");
        head[126] = 1;
        let xfs = Xfs {
            id: Uuid::from_bytes([7; 16]),
            label: "polis-data".to_owned(),
            in_progress: true,
            size: 512 << 20,
        };
        assert_eq!(recognise(&head, &[]), Content::Xfs(xfs));
    }

    #[test]
    fn a_container_counts_before_what_shows_through() {
        let mut head = with(0, b"XFSB");
        head[0x200..0x208].copy_from_slice(b"LABELONE");
        assert_eq!(recognise(&head, &[]), Content::Other("LVM"));
    }

    proptest! {
        #[test]
        fn any_bytes_get_an_answer(
            start in prop::sample::select(vec![&b"XFSB"[..], b"", b"LUKS"]),
            input in prop::collection::vec(any::<u8>(), 0..600),
            tail in prop::collection::vec(any::<u8>(), 0..600),
        ) {
            let head = [start, &input].concat();
            let content = recognise(&head, &tail);
            prop_assert!(content != Content::Blank || head.iter().all(|byte| *byte == 0));
        }
    }
}

#[cfg(test)]
#[path = "probe_fuzz_tests.rs"]
mod fuzz_tests;
