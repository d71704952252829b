//! Block devices: queries to the kernel, and its table of partitions.
//!
//! The disk that the machine runs from is busy, so the kernel will not read its partition
//! table again; `BLKPG` announces one partition at a time.

use std::fs::File;
use std::io::{self, Seek as _, SeekFrom};
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::path::{Path, PathBuf};

use rustix::io::Errno;

/// The `ioctl` of all partition changes, and its two operations that we use.
const BLKPG: libc::Ioctl = 0x1269;
const BLKPG_ADD_PARTITION: libc::c_int = 1;
const BLKPG_RESIZE_PARTITION: libc::c_int = 3;

/// `struct blkpg_ioctl_arg` of the kernel.
#[repr(C)]
struct Argument {
    operation: libc::c_int,
    flags: libc::c_int,
    data_length: libc::c_int,
    data: *const Partition,
}

/// `struct blkpg_partition` of the kernel.
#[repr(C)]
struct Partition {
    start: libc::c_longlong,
    length: libc::c_longlong,
    number: libc::c_int,
    device_name: [u8; 64],
    volume_name: [u8; 64],
}

/// How large a device or a disk image is, in bytes.
///
/// # Errors
///
/// The kernel's error.
pub fn size(mut device: &File) -> io::Result<u64> {
    let size = device.seek(SeekFrom::End(0))?;
    device.seek(SeekFrom::Start(0))?;
    Ok(size)
}

/// The unit in which a device is addressed: 512 bytes, also for a disk image in
/// a plain file, or 4096.
///
/// # Errors
///
/// The kernel's error.
pub fn logical_block_size(device: &File) -> io::Result<u32> {
    if device.metadata()?.is_file() {
        return Ok(512);
    }
    Ok(rustix::fs::ioctl_blksszget(device.as_fd())?)
}

/// Announces a new partition to the kernel. A known partition is not an error.
///
/// # Errors
///
/// The kernel's error.
pub fn add_partition(disk: &File, number: u32, start: u64, length: u64) -> io::Result<()> {
    match change(disk, BLKPG_ADD_PARTITION, number, start, length) {
        // The kernel says BUSY when the number or the place is taken.
        Err(error) if error.raw_os_error() == Some(Errno::BUSY.raw_os_error()) => Ok(()),
        other => other,
    }
}

/// Announces another length of a partition to the kernel, also while it is mounted.
///
/// # Errors
///
/// The kernel's error.
pub fn resize_partition(disk: &File, number: u32, start: u64, length: u64) -> io::Result<()> {
    change(disk, BLKPG_RESIZE_PARTITION, number, start, length)
}

fn change(
    disk: &File,
    operation: libc::c_int,
    number: u32,
    start: u64,
    length: u64,
) -> io::Result<()> {
    let invalid = |_| io::Error::from(io::ErrorKind::InvalidInput);
    let partition = Partition {
        start: start.try_into().map_err(invalid)?,
        length: length.try_into().map_err(invalid)?,
        number: number.try_into().map_err(invalid)?,
        device_name: [0; 64],
        volume_name: [0; 64],
    };
    let argument = Argument {
        operation,
        flags: 0,
        data_length: size_of::<Partition>().try_into().map_err(invalid)?,
        data: &raw const partition,
    };
    // SAFETY: `disk` is open for the whole call; `argument` and the `partition`
    // it points to have the kernel's layout and live until the call returns, and
    // the kernel only reads them.
    #[expect(unsafe_code, reason = "no safe wrapper of BLKPG exists")]
    let result = unsafe { libc::ioctl(disk.as_raw_fd(), BLKPG, &raw const argument) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// First byte and length of a partition as the kernel knows it; `None` if the device
/// does not exist.
///
/// # Errors
///
/// The kernel's error, or that sysfs is not readable as it should be.
pub fn known_extent(device: &Path) -> io::Result<Option<(u64, u64)>> {
    let name = device.file_name().unwrap_or_default();
    let directory = Path::new("/sys/class/block").join(name);
    let number = |file: &str| -> io::Result<Option<u64>> {
        match std::fs::read_to_string(directory.join(file)) {
            // sysfs counts in units of 512 bytes for every device.
            Ok(text) => match text.trim().parse::<u64>() {
                Ok(sectors) => Ok(Some(sectors.saturating_mul(512))),
                Err(error) => Err(io::Error::new(io::ErrorKind::InvalidData, error)),
            },
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    };
    Ok(number("start")?.zip(number("size")?))
}

/// Where the kernel puts partition `number` of `disk`: `/dev/vda4`, `/dev/nvme0n1p4`.
#[must_use]
pub fn partition_path(disk: &Path, number: u32) -> PathBuf {
    let mut path = disk.as_os_str().to_owned();
    if path.as_encoded_bytes().last().is_some_and(u8::is_ascii_digit) {
        path.push("p");
    }
    path.push(number.to_string());
    PathBuf::from(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_partition_is_named_as_the_kernel_names_it() {
        assert_eq!(partition_path(Path::new("/dev/vda"), 3), Path::new("/dev/vda3"));
        assert_eq!(partition_path(Path::new("/dev/nvme0n1"), 12), Path::new("/dev/nvme0n1p12"));
    }

    #[test]
    fn a_disk_image_has_its_size_and_blocks_of_512_bytes() {
        let image = tempfile::tempfile().unwrap();
        image.set_len(1_000_448).unwrap();
        assert_eq!(size(&image).unwrap(), 1_000_448);
        assert_eq!(logical_block_size(&image).unwrap(), 512);
    }

    #[test]
    fn what_is_no_disk_has_no_partitions() {
        let image = tempfile::tempfile().unwrap();
        let refused = add_partition(&image, 1, 0, 4096).unwrap_err();
        assert_eq!(refused.raw_os_error(), Some(Errno::NOTTY.raw_os_error()));
    }
}
