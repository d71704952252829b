//! Devices of the device mapper, made by ioctl on its control device.
//!
//! No udev and no library: the kernel makes `/dev/dm-N` itself.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::path::PathBuf;

/// `struct dm_ioctl`, from `linux/dm-ioctl.h`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Header {
    version: [u32; 3],
    data_size: u32,
    data_start: u32,
    target_count: u32,
    open_count: i32,
    flags: u32,
    event_number: u32,
    padding: u32,
    device: u64,
    name: [u8; NAME_SIZE],
    uuid: [u8; 129],
    data: [u8; 7],
}

impl Header {
    /// A request about the device `name`, whose data the buffer has behind this.
    fn of(name: &str, flags: u32, target_count: u32) -> io::Result<Self> {
        // Room for the closing NUL.
        if name.len() >= NAME_SIZE || name.contains('\0') {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let mut header = Self {
            version: VERSION,
            data_size: REQUEST_SIZE,
            data_start: DATA_START,
            target_count,
            open_count: 0,
            flags,
            event_number: 0,
            padding: 0,
            device: 0,
            name: [0; NAME_SIZE],
            uuid: [0; 129],
            data: [0; 7],
        };
        header.name[..name.len()].copy_from_slice(name.as_bytes());
        Ok(header)
    }
}

const NAME_SIZE: usize = 128;
/// The header is 312 bytes, in every version of the interface.
const HEADER_SIZE: usize = size_of::<Header>();
/// `struct dm_target_spec` without its parameters.
const TARGET_SIZE: usize = 40;
/// The kernel's bound for the name of a target.
const KIND_SIZE: usize = 16;
/// A table of one target fits easily; the kernel needs room to answer, too.
const REQUEST_MAX: usize = 4096;
/// The same two as the kernel reads them; a test compares them.
const REQUEST_SIZE: u32 = 4096;
const DATA_START: u32 = 312;

/// The device below the verified system, where a mirror has it read from two disks.
pub const SYSTEM_DISKS: &str = "polis-system-disks";

/// `DM_READONLY_FLAG`.
const READ_ONLY: u32 = 1;
/// `DM_STATUS_TABLE_FLAG`: the table and not what its targets report.
const TABLE: u32 = 1 << 4;
/// `DM_SKIP_LOCKFS_FLAG`: a file system on the device is not frozen meanwhile.
const SKIP_FREEZE: u32 = 1 << 10;
/// Version 4.0.0 of the interface: all that is used here is as old as that.
const VERSION: [u32; 3] = [4, 0, 0];

/// The commands, by their number in `linux/dm-ioctl.h`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Command {
    Create = 3,
    Remove = 4,
    /// Resume, too: that is a suspend without the suspend flag.
    Suspend = 6,
    LoadTable = 9,
    /// What the targets of the active table report, or that table.
    Status = 12,
}

impl Command {
    /// `_IOWR(0xfd, number, struct dm_ioctl)`.
    fn request(self) -> libc::Ioctl {
        const READ_AND_WRITE: libc::Ioctl = 3 << 30;
        const TYPE: libc::Ioctl = 0xfd << 8;
        READ_AND_WRITE | ((HEADER_SIZE as libc::Ioctl) << 16) | TYPE | self as libc::Ioctl
    }
}

/// A table with one target: `length` sectors of 512 bytes from 0.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Table {
    /// Sectors of 512 bytes.
    pub length: u64,
    /// For example `verity`.
    pub kind: &'static str,
    /// As `dmsetup table` shows them after the kind.
    pub parameters: String,
}

impl Table {
    /// The target as the kernel reads it.
    fn encode(&self) -> io::Result<Vec<u8>> {
        let invalid = || io::Error::from(io::ErrorKind::InvalidInput);
        // Room for the closing NUL of both strings.
        if self.kind.len() >= KIND_SIZE || self.parameters.contains('\0') {
            return Err(invalid());
        }
        let whole = (TARGET_SIZE + self.parameters.len() + 1).next_multiple_of(8);
        if HEADER_SIZE + whole > REQUEST_MAX {
            return Err(invalid());
        }
        let mut bytes = Vec::with_capacity(whole);
        bytes.extend(0_u64.to_ne_bytes());
        bytes.extend(self.length.to_ne_bytes());
        bytes.extend(0_i32.to_ne_bytes());
        bytes.extend(u32::try_from(whole).map_err(|_large| invalid())?.to_ne_bytes());
        bytes.extend(self.kind.as_bytes());
        bytes.resize(TARGET_SIZE, 0);
        bytes.extend(self.parameters.as_bytes());
        bytes.resize(whole, 0);
        Ok(bytes)
    }
}

/// The buffer of one ioctl: the header, and behind it the data.
#[repr(C, align(8))]
struct Request {
    header: Header,
    data: [u8; REQUEST_MAX - HEADER_SIZE],
}

impl Request {
    /// The length of the first target in an answer: behind its start.
    fn length(&self) -> u64 {
        let mut bytes = [0; 8];
        bytes.copy_from_slice(&self.data[8..16]);
        u64::from_ne_bytes(bytes)
    }

    /// The kind of the first target in an answer, and the text behind it.
    fn text(&self) -> String {
        let text = |bytes: &[u8]| {
            let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
            String::from_utf8_lossy(&bytes[..end]).into_owned()
        };
        // Behind two numbers of 64 bits and two of 32.
        let (target, parameters) = self.data.split_at(TARGET_SIZE);
        format!("{} {}", text(&target[TARGET_SIZE - KIND_SIZE..]), text(parameters))
    }
}

/// The open control device.
#[derive(Debug)]
pub struct DeviceMapper {
    control: File,
}

impl DeviceMapper {
    /// Opens the control device.
    ///
    /// # Errors
    ///
    /// When the module is not loaded.
    pub fn open() -> io::Result<Self> {
        let control = OpenOptions::new().read(true).write(true).open("/dev/mapper/control")?;
        Ok(Self { control })
    }

    /// Makes the read-only device `name` and returns its path.
    ///
    /// # Errors
    ///
    /// The error of the kernel; its log says more.
    pub fn create_read_only(&self, name: &str, table: &Table) -> io::Result<PathBuf> {
        self.make(name, table, READ_ONLY)
    }

    /// Makes the device `name` and returns its path.
    ///
    /// # Errors
    ///
    /// The error of the kernel; its log says more.
    pub fn create(&self, name: &str, table: &Table) -> io::Result<PathBuf> {
        self.make(name, table, 0)
    }

    fn make(&self, name: &str, table: &Table, flags: u32) -> io::Result<PathBuf> {
        let device = self.call(Command::Create, name, 0, None)?.header.device;
        let loaded = self
            .call(Command::LoadTable, name, flags, Some(table))
            .and_then(|_done| self.call(Command::Suspend, name, 0, None));
        if let Err(error) = loaded {
            // The first error is the one that matters.
            self.remove(name).ok();
            return Err(error);
        }
        // The minor number in the kernel's encoding: bits 0 to 7 and 20 to 31.
        let minor = (device & 0xff) | ((device >> 12) & !0xff);
        Ok(PathBuf::from(format!("/dev/dm-{minor}")))
    }

    /// Puts another table under the device `name`, which may be in use: requests wait while the
    /// kernel changes over, in one call.
    ///
    /// # Errors
    ///
    /// The error of the kernel; the device keeps its table.
    pub fn replace(&self, name: &str, table: &Table) -> io::Result<()> {
        self.exchange(name, table, 0)
    }

    /// The same for a read-only device.
    ///
    /// # Errors
    ///
    /// The error of the kernel; the device keeps its table.
    pub fn replace_read_only(&self, name: &str, table: &Table) -> io::Result<()> {
        self.exchange(name, table, READ_ONLY)
    }

    fn exchange(&self, name: &str, table: &Table, flags: u32) -> io::Result<()> {
        self.call(Command::LoadTable, name, flags, Some(table))?;
        self.call(Command::Suspend, name, SKIP_FREEZE, None)?;
        Ok(())
    }

    /// What the one target of the device `name` reports; its kind comes first.
    ///
    /// # Errors
    ///
    /// The error of the kernel: `ENXIO` without such a device.
    pub fn status(&self, name: &str) -> io::Result<String> {
        Ok(self.call(Command::Status, name, 0, None)?.text())
    }

    /// The kind of the one target of the device `name`, and its parameters.
    ///
    /// # Errors
    ///
    /// The error of the kernel: `ENXIO` without such a device.
    pub fn table(&self, name: &str) -> io::Result<String> {
        Ok(self.call(Command::Status, name, TABLE, None)?.text())
    }

    /// Removes the device `name`.
    ///
    /// # Errors
    ///
    /// `EBUSY` while it is in use.
    pub fn remove(&self, name: &str) -> io::Result<()> {
        self.call(Command::Remove, name, 0, None)?;
        Ok(())
    }

    /// The length of the one target of the device `name`, in sectors of 512 bytes.
    ///
    /// # Errors
    ///
    /// The error of the kernel: `ENXIO` without such a device.
    pub fn length(&self, name: &str) -> io::Result<u64> {
        Ok(self.call(Command::Status, name, TABLE, None)?.length())
    }

    /// One ioctl; returns what the kernel left in the buffer.
    #[expect(unsafe_code, reason = "ioctls of the device mapper")]
    fn call(
        &self,
        command: Command,
        name: &str,
        flags: u32,
        table: Option<&Table>,
    ) -> io::Result<Box<Request>> {
        let header = Header::of(name, flags, u32::from(table.is_some()))?;
        let mut request = Box::new(Request { header, data: [0; REQUEST_MAX - HEADER_SIZE] });
        if let Some(table) = table {
            let bytes = table.encode()?;
            request.data[..bytes.len()].copy_from_slice(&bytes);
        }
        let buffer = &raw mut *request;
        // SAFETY: the descriptor is open. `buffer` points to `REQUEST_MAX`
        // initialised bytes that live across the call, as `data_size` says, and
        // the kernel reads and writes only within them.
        let result = unsafe { libc::ioctl(self.control.as_raw_fd(), command.request(), buffer) };
        if result == 0 { Ok(request) } else { Err(io::Error::last_os_error()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_layout_is_the_kernel_s() {
        assert_eq!(HEADER_SIZE, 312);
        assert_eq!(usize::try_from(DATA_START).unwrap(), HEADER_SIZE);
        assert_eq!(usize::try_from(REQUEST_SIZE).unwrap(), size_of::<Request>());
        assert_eq!(Command::LoadTable.request(), 0xc138_fd09);
    }

    #[test]
    fn a_target_says_where_the_next_one_would_start() {
        let table = Table { length: 8, kind: "verity", parameters: "1 a b".to_owned() };
        let bytes = table.encode().unwrap();
        assert_eq!(bytes.len(), 48);
        assert_eq!(&bytes[8..16], &8_u64.to_ne_bytes());
        assert_eq!(&bytes[20..24], &48_u32.to_ne_bytes());
        assert_eq!(&bytes[24..31], b"verity\0");
        assert_eq!(&bytes[40..], b"1 a b\0\0\0");
    }

    #[test]
    fn an_answer_is_the_kind_of_its_target_and_the_text_behind_it() {
        let header = Header::of("polis-mirror", 0, 1).unwrap();
        let mut request = Request { header, data: [0; REQUEST_MAX - HEADER_SIZE] };
        request.data[24..28].copy_from_slice(b"raid");
        request.data[40..53].copy_from_slice(b"raid1 2 AA 8/");
        assert_eq!(request.text(), "raid raid1 2 AA 8/");
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        for name in ["x".repeat(NAME_SIZE), "a\0b".to_owned()] {
            assert!(Header::of(&name, 0, 0).is_err(), "{name:?}");
        }
        assert!(Header::of(&"x".repeat(NAME_SIZE - 1), 0, 0).is_ok());
        let long = Table { length: 8, kind: "verity", parameters: "x".repeat(REQUEST_MAX) };
        assert!(long.encode().is_err());
        let kind = Table { length: 8, kind: "sixteen-letters-", parameters: String::new() };
        assert!(kind.encode().is_err());
    }
}
