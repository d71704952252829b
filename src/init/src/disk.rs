//! The boot disk and its partitions.
//!
//! ```text
//! /sys/block --scan--> disks with their tables --choose--> ESP and system partition
//! ```
//!
//! What this module does not do: wait for a disk (`stage1`).

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use super::command_line::Slot;
use super::gpt::{self, Guid, Partition};

/// The unit of a disk's size in `/sys`, independent of its sector size.
const SIZE_UNIT: u64 = 512;

/// A disk and what is on it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Disk {
    /// The kernel's name, for example `vda`.
    pub name: String,
    /// The partitions, or the reason why the table is unusable.
    pub table: Result<Vec<Partition>, String>,
}

impl Disk {
    /// The disk in a few words, for an operator who looks for it.
    #[must_use]
    pub fn describe(&self) -> String {
        match &self.table {
            Ok(table) => {
                let names: Vec<&str> = table.iter().map(|entry| entry.name.as_str()).collect();
                format!("{} ({})", self.name, names.join(" "))
            }
            Err(why) => format!("{} ({why})", self.name),
        }
    }
}

/// The partitions that stage 1 needs: their numbers on a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// The disk's name.
    pub disk: String,
    /// Number of the ESP.
    pub esp: u32,
    /// Number of the system partition, if the disk has one.
    pub system: Option<u32>,
}

/// The disk with the ESP `esp`, and the system partition of `slot` on it.
#[must_use]
pub fn choose(disks: &[Disk], esp: Guid, slot: Slot) -> Option<Found> {
    disks.iter().find_map(|disk| {
        let table = disk.table.as_ref().ok()?;
        let esp = table.iter().find(|entry| entry.guid == esp)?.number;
        let system = table.iter().find(|entry| entry.name == slot.partition());
        Some(Found { disk: disk.name.clone(), esp, system: system.map(|entry| entry.number) })
    })
}

/// Every disk that the kernel has, with its table. Devices without hardware
/// behind them (`loop`, `ram`, `dm`) are not disks.
#[must_use]
pub fn scan() -> Vec<Disk> {
    let Ok(entries) = fs::read_dir("/sys/block") else { return Vec::new() };
    let mut disks: Vec<Disk> = entries
        .flatten()
        .filter(|entry| entry.path().join("device").exists())
        .filter_map(|entry| entry.file_name().into_string().ok())
        .filter_map(|name| {
            let size = number(&Path::new("/sys/block").join(&name).join("size"))?;
            // An empty drive has no size.
            (size > 0).then(|| Disk { table: table(&name, size), name })
        })
        .collect();
    disks.sort_by(|one, other| one.name.cmp(&other.name));
    disks
}

fn table(name: &str, size: u64) -> Result<Vec<Partition>, String> {
    let sector = number(&Path::new("/sys/block").join(name).join("queue/logical_block_size"))
        .filter(|sector| *sector >= SIZE_UNIT)
        .unwrap_or(SIZE_UNIT);
    let sectors = size.saturating_mul(SIZE_UNIT) / sector;
    let mut file = File::open(Path::new("/dev").join(name)).map_err(|error| error.to_string())?;
    match gpt::read(&mut file, sector, sectors) {
        Ok(Some(table)) => Ok(table),
        Ok(None) => Err("no partition table".to_owned()),
        Err(error) => Err(error.to_string()),
    }
}

/// The device of partition `number` of `disk`, once the kernel has made it.
#[must_use]
pub fn device(disk: &str, number: u32) -> Option<Device> {
    let entries = fs::read_dir(Path::new("/sys/block").join(disk)).ok()?;
    entries.flatten().find_map(|entry| {
        let directory = entry.path();
        if self::number(&directory.join("partition"))? != u64::from(number) {
            return None;
        }
        let name = entry.file_name().into_string().ok()?;
        let numbers = fs::read_to_string(directory.join("dev")).ok()?.trim().to_owned();
        Some(Device { path: Path::new("/dev").join(name), numbers })
    })
}

/// A block device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Device {
    /// Below `/dev`.
    pub path: PathBuf,
    /// `major:minor`, as the kernel's log names it.
    pub numbers: String,
}

fn number(path: &Path) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// Reads the value of an EFI variable that holds a GUID as text: four bytes of
/// attributes, then UTF-16, perhaps closed by a NUL.
#[must_use]
pub fn guid_of_variable(bytes: &[u8]) -> Option<Guid> {
    let letters: Vec<u16> = bytes
        .get(4..)?
        .chunks_exact(2)
        .map(|letter| u16::from_le_bytes([letter[0], letter[1]]))
        .take_while(|letter| *letter != 0)
        .collect();
    Guid::parse(&String::from_utf16(&letters).ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const ESP: &str = "6f1e4d07-5a3c-4c3b-9d3b-0123456789ab";
    const OTHER: &str = "00000000-0000-0000-0000-000000000001";

    fn partition(number: u32, guid: &str, name: &str) -> Partition {
        Partition { number, guid: Guid::parse(guid).unwrap(), name: name.to_owned() }
    }

    fn disks() -> Vec<Disk> {
        let foreign = vec![partition(1, OTHER, "POLIS-ESP"), partition(2, OTHER, "POLIS-SYSTEM-A")];
        let ours = vec![partition(3, ESP, "POLIS-ESP"), partition(7, OTHER, "POLIS-SYSTEM-A")];
        vec![
            Disk { name: "sda".to_owned(), table: Err("no partition table".to_owned()) },
            Disk { name: "sdb".to_owned(), table: Ok(foreign) },
            Disk { name: "sdc".to_owned(), table: Ok(ours) },
        ]
    }

    #[test]
    fn the_esp_s_own_disk_is_chosen_and_not_one_that_looks_like_it() {
        let esp = Guid::parse(ESP).unwrap();
        let found = choose(&disks(), esp, Slot::A).unwrap();
        assert_eq!(found, Found { disk: "sdc".to_owned(), esp: 3, system: Some(7) });
        assert_eq!(choose(&disks(), esp, Slot::B).unwrap().system, None);
        assert_eq!(choose(&disks()[..2], esp, Slot::A), None);
    }

    #[test]
    fn a_disk_says_what_is_on_it() {
        assert_eq!(disks()[0].describe(), "sda (no partition table)");
        assert_eq!(disks()[2].describe(), "sdc (POLIS-ESP POLIS-SYSTEM-A)");
    }

    #[test]
    fn the_variable_of_the_boot_stub_is_read() {
        let mut bytes = vec![6, 0, 0, 0];
        bytes.extend(ESP.to_uppercase().encode_utf16().flat_map(u16::to_le_bytes));
        bytes.extend([0, 0]);
        assert_eq!(guid_of_variable(&bytes), Guid::parse(ESP));
        assert_eq!(guid_of_variable(&bytes[..40]), None);
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..100)) {
            let _guid = guid_of_variable(&bytes);
        }
    }
}
