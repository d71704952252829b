//! The size and the free space of an XFS file system, and freezing of the file system.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd};

/// `FS_IOC_GETFSMAP`: `_IOWR('X', 59, struct fsmap_head)`.
const GETFSMAP: libc::Ioctl = 0xc0c0_583b;
/// `XFS_IOC_FSGEOMETRY_V1`: `_IOR('X', 100, struct xfs_fsop_geom_v1)`.
const GEOMETRY: libc::Ioctl = 0x8070_5864;
/// `FIFREEZE` and `FITHAW`: `_IOWR('X', 119, int)` and 120.
const FREEZE: libc::Ioctl = 0xc004_5877;
const THAW: libc::Ioctl = 0xc004_5878;

/// The owner is one of the codes of the interface, not an inode.
const SPECIAL: u32 = 0x10;
/// The last record.
const LAST: u32 = 0x20;
/// `FMR_OWN_FREE`, and XFS's own code for trees and lists of free space.
const FREE: u64 = 1;
const TREES: u64 = ((b'X' as u64) << 32) | 5;

/// Records in one question.
const COUNT: usize = 256;
const COUNT_ASKED: u32 = 256;

/// `struct fsmap`, from `linux/fsmap.h`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Record {
    device: u32,
    flags: u32,
    physical: u64,
    owner: u64,
    offset: u64,
    length: u64,
    reserved: [u64; 3],
}

/// `struct fsmap_head`, with room for the answer.
#[repr(C)]
struct Request {
    flags: u32,
    flags_out: u32,
    count: u32,
    entries: u32,
    reserved: [u64; 6],
    keys: [Record; 2],
    records: [Record; COUNT],
}

/// `struct xfs_fsop_geom_v1`, from `xfs/xfs_fs.h`, as far as it is read.
#[repr(C)]
#[derive(Default)]
struct Geometry {
    block_bytes: u32,
    others: [u32; 7],
    data_blocks: u64,
    rest: [u64; 9],
}

/// The bytes of its device that a mounted file system uses. Its superblock may say less for some
/// time after it has grown.
///
/// # Errors
///
/// The kernel's error, such as that of another file system.
#[expect(unsafe_code, reason = "no safe wrapper of XFS_IOC_FSGEOMETRY_V1 exists")]
pub fn size(root: &File) -> io::Result<u64> {
    let mut geometry = Geometry::default();
    // SAFETY: the descriptor is open, and the request writes one `struct xfs_fsop_geom_v1`, whose
    // size `Geometry` has and which outlives the call.
    let result = unsafe { libc::ioctl(root.as_raw_fd(), GEOMETRY, &raw mut geometry) };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(u64::from(geometry.block_bytes).saturating_mul(geometry.data_blocks))
}

/// The use of a stretch of the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Use {
    /// Free space.
    Free,
    /// The file system's own records of free space, or a reserve for them.
    Trees,
    /// Any other use.
    Other,
}

/// A stretch of the device, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stretch {
    /// Its first byte.
    pub start: u64,
    /// Its length.
    pub length: u64,
    /// Its use.
    pub used: Use,
}

/// Lists the use of each stretch of the device. `root` is any directory of the mounted
/// file system. Blocks.
///
/// # Errors
///
/// The kernel's error.
#[expect(unsafe_code, reason = "no safe wrapper of GETFSMAP exists")]
pub fn map(root: &File) -> io::Result<Vec<Stretch>> {
    let end = Record {
        device: u32::MAX,
        flags: u32::MAX,
        physical: u64::MAX,
        owner: u64::MAX,
        offset: u64::MAX,
        ..Record::default()
    };
    let mut request = Box::new(Request {
        flags: 0,
        flags_out: 0,
        count: COUNT_ASKED,
        entries: 0,
        reserved: [0; 6],
        keys: [Record::default(), end],
        records: [Record::default(); COUNT],
    });
    let mut stretches = Vec::new();
    loop {
        let buffer = &raw mut *request;
        // SAFETY: the descriptor is open. `buffer` points to a head with room for
        // `count` records behind it, as the interface asks, that lives across the
        // call; the kernel reads and writes only within it.
        let result = unsafe { libc::ioctl(root.as_raw_fd(), GETFSMAP, buffer) };
        if result != 0 {
            return Err(io::Error::last_os_error());
        }
        let found = usize::try_from(request.entries).unwrap_or(COUNT).min(COUNT);
        let records = &request.records[..found];
        stretches.extend(records.iter().map(|record| Stretch {
            start: record.physical,
            length: record.length,
            used: match record.owner {
                FREE if record.flags & SPECIAL != 0 => Use::Free,
                TREES if record.flags & SPECIAL != 0 => Use::Trees,
                _ => Use::Other,
            },
        }));
        match records.last() {
            // The kernel continues behind the key.
            Some(last) if last.flags & LAST == 0 => request.keys[0] = *last,
            Some(_) | None => return Ok(stretches),
        }
    }
}

/// Makes the file system write all its data, and blocks further writes until [`thaw`].
/// Blocks.
///
/// # Errors
///
/// The kernel's error.
pub fn freeze(root: &File) -> io::Result<()> {
    turn(root.as_fd(), Motion::Freeze)
}

/// Ends a [`freeze`].
///
/// # Errors
///
/// The kernel's error.
pub fn thaw(root: &File) -> io::Result<()> {
    turn(root.as_fd(), Motion::Thaw)
}

/// Whether to freeze the file system or to thaw it.
#[derive(Clone, Copy)]
enum Motion {
    Freeze,
    Thaw,
}

#[expect(unsafe_code, reason = "no safe wrapper of FIFREEZE exists")]
fn turn(root: BorrowedFd<'_>, motion: Motion) -> io::Result<()> {
    let request = match motion {
        Motion::Freeze => FREEZE,
        Motion::Thaw => THAW,
    };
    // SAFETY: the descriptor is open while it is borrowed, and the kernel ignores the
    // argument of both requests.
    let result = unsafe { libc::ioctl(root.as_raw_fd(), request, 0) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_layout_is_the_kernel_s() {
        assert_eq!(size_of::<Record>(), 64);
        assert_eq!(std::mem::offset_of!(Request, records), 0xc0);
        assert_eq!(size_of::<Geometry>(), 0x70);
        assert_eq!(std::mem::offset_of!(Geometry, data_blocks), 0x20);
        assert_eq!(usize::try_from(COUNT_ASKED).unwrap(), COUNT);
    }

    #[test]
    fn what_is_no_such_file_system_is_an_error() {
        let file = File::open("/proc").unwrap();
        assert!(map(&file).is_err());
        assert!(thaw(&file).is_err());
    }
}
