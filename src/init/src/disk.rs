//! The boot disk and its partitions.
//!
//! ```text
//! /sys/block --blocks--> disks --table--> disks with their tables --candidates--> those that it
//!                                         may be --choose--> the one that it is
//! ```
//!
//! Invariants:
//! - Two disks that look alike are never distinguished by their order: the way that firmware
//!   took decides, or nothing does.
//! - A disk that has two ways to it is one disk.
//!
//! What this module does not do: wait for a disk (`search`), or for its answer (`tables`).

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::path::{Path, PathBuf};

use super::boot_path::BootPath;
use super::gpt::{self, Guid, Partition};

/// The type and the name of the ESP: with a system partition beside it, a disk of ours.
const ESP_TYPE: &str = "c12a7328-f81f-11d2-ba4b-00a0c93ec93b";
const ESP_NAME: &str = "POLIS-ESP";
/// The name of the partition that a disk gets at its first boot, with GUIDs of its own.
const DATA_NAME: &str = "POLIS-DATA";
/// The name of the partition with the records of a mirror, whose GUID both of its disks have.
const MIRROR_NAME: &str = "POLIS-MIRROR";
/// How an identifier of a disk begins that its maker assigned to it alone. Others are made
/// of a model and a serial number, and cheap disks share these.
const UNIQUE: [&str; 3] = ["eui.", "naa.", "uuid."];

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

/// Which of the two system partitions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Slot {
    /// POLIS-SYSTEM-A.
    A,
    /// POLIS-SYSTEM-B.
    B,
}

impl Slot {
    /// Both.
    pub const ALL: [Self; 2] = [Self::A, Self::B];

    /// `A` or `B`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::A => "A",
            Self::B => "B",
        }
    }

    /// The partition's name in the partition table.
    #[must_use]
    pub fn partition(self) -> &'static str {
        match self {
            Self::A => "POLIS-SYSTEM-A",
            Self::B => "POLIS-SYSTEM-B",
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
    /// The GUID of the ESP, which a copy of the disk has, too.
    pub esp_id: Guid,
    /// The system partitions that the disk has.
    pub systems: Vec<(Slot, u32)>,
    /// Whether it has a data partition. Until then its GUIDs are those of the image.
    pub data: bool,
    /// The mirror that it is a disk of.
    pub mirror: Option<Guid>,
}

impl Found {
    /// Whether `other` is the other disk of the mirror that this one is of. A copy of this one is
    /// not: each disk of a mirror has an ESP with a GUID of its own.
    #[must_use]
    pub fn is_mirrored_by(&self, other: &Self) -> bool {
        self.mirror.is_some() && self.mirror == other.mirror && self.esp_id != other.esp_id
    }
}

/// The disks that have a system partition and the ESP `esp`, or any of ours where firmware
/// names none.
#[must_use]
pub fn candidates(disks: &[Disk], esp: Option<Guid>) -> Vec<Found> {
    let ours =
        |entry: &Partition| entry.name == ESP_NAME && Some(entry.kind) == Guid::parse(ESP_TYPE);
    let found = disks.iter().filter_map(|disk| {
        let table = disk.table.as_ref().ok()?;
        let number = |slot: Slot| {
            let entry = table.iter().find(|entry| entry.name == slot.partition())?;
            Some((slot, entry.number))
        };
        let systems: Vec<_> = Slot::ALL.into_iter().filter_map(number).collect();
        let wanted = |entry: &&Partition| match esp {
            Some(esp) => entry.guid == esp,
            None => ours(entry),
        };
        // A copy of an ESP alone is nothing to start from.
        if systems.is_empty() {
            return None;
        }
        let Partition { number: esp, guid: esp_id, .. } = *table.iter().find(wanted)?;
        let data = table.iter().any(|entry| entry.name == DATA_NAME);
        let mirror = table.iter().find(|entry| entry.name == MIRROR_NAME).map(|entry| entry.guid);
        Some(Found { disk: disk.name.clone(), esp, esp_id, systems, data, mirror })
    });
    found.collect()
}

/// Which of the candidates the machine was started from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Choice {
    /// There is none.
    None,
    /// This one.
    This(Found),
    /// This one, unless a disk that has not appeared yet looks like it.
    Perhaps(Found),
    /// Only these, and firmware started from another controller: the right one may appear
    /// later.
    Elsewhere(Vec<Found>),
    /// These look alike.
    Several(Vec<Found>),
}

/// Chooses by the way that firmware took, where that is known; `way` returns that of a disk.
#[must_use]
pub fn choose(
    candidates: Vec<Found>,
    firmware: Option<&BootPath>,
    way: impl Fn(&str) -> Option<BootPath>,
) -> Choice {
    let leads = |found: &Found| Some(firmware?.leads_to(&way(&found.disk)?));
    let (mut near, other): (Vec<_>, Vec<_>) =
        candidates.into_iter().partition(|found| leads(found) == Some(true));
    let (unknown, far): (Vec<_>, Vec<_>) =
        other.into_iter().partition(|found| leads(found).is_none());
    // Without a way, nothing speaks against a disk; a proved disk goes before.
    let proved = !near.is_empty();
    if !proved {
        near = unknown;
    }
    match (&near[..], &far[..]) {
        ([], []) => Choice::None,
        ([], _) => Choice::Elsewhere(far),
        ([only], _) if proved || only.data => Choice::This(only.clone()),
        ([only], _) => Choice::Perhaps(only.clone()),
        _ => Choice::Several(near),
    }
}

/// The candidates without those that are another way to a disk before them; `identifier`
/// distinguishes the one that a disk has from its maker.
#[must_use]
pub fn distinct(candidates: Vec<Found>, identifier: impl Fn(&str) -> Option<String>) -> Vec<Found> {
    let mut seen = BTreeSet::new();
    let new = |found: &Found| identifier(&found.disk).is_none_or(|known| seen.insert(known));
    candidates.into_iter().filter(new).collect()
}

/// The identifier that a disk has from its maker: SCSI disks have it in their device's
/// folder, those of NVMe in their own.
#[must_use]
pub fn identifier(disk: &str) -> Option<String> {
    let disk = Path::new("/sys/block").join(disk);
    let read = |file| fs::read_to_string(disk.join(file)).ok();
    let text = read("wwid").or_else(|| read("device/wwid"))?.trim().to_owned();
    UNIQUE.iter().any(|start| text.starts_with(start)).then_some(text)
}

/// The way to a disk through the buses.
#[must_use]
pub fn way(disk: &str) -> Option<BootPath> {
    BootPath::of_device(&fs::canonicalize(Path::new("/sys/block").join(disk)).ok()?)
}

/// A disk, as the kernel lists it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Block {
    /// The kernel's name.
    pub name: String,
    /// In units of 512 bytes.
    size: u64,
    /// The number that no other disk of this boot has, and no other medium in the same drive.
    sequence: Option<u64>,
}

/// Every disk that the kernel has, sorted by name. Devices without hardware
/// behind them (`loop`, `ram`, `dm`) are not disks. Asks no disk.
#[must_use]
pub fn blocks() -> Vec<Block> {
    let Ok(entries) = fs::read_dir("/sys/block") else { return Vec::new() };
    let mut blocks: Vec<Block> = entries
        .flatten()
        .filter(|entry| entry.path().join("device").exists())
        .filter_map(|entry| {
            let size = number(&entry.path().join("size"))?;
            let sequence = number(&entry.path().join("diskseq"));
            let name = entry.file_name().into_string().ok()?;
            // An empty drive has no size.
            (size > 0).then_some(Block { name, size, sequence })
        })
        .collect();
    blocks.sort();
    blocks
}

/// Reads the partitions of a disk, or says why its table is unusable. Waits for the disk.
///
/// # Errors
///
/// The disk cannot be read, or has no table.
pub fn table(Block { name, size, .. }: &Block) -> Result<Vec<Partition>, String> {
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
impl Block {
    /// A disk of a test.
    pub(super) fn new(name: &str, sequence: u64) -> Self {
        Self { name: name.to_owned(), size: 2048, sequence: Some(sequence) }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use proptest::prelude::*;

    const ESP: &str = "6f1e4d07-5a3c-4c3b-9d3b-0123456789ab";
    const OTHER: &str = "00000000-0000-0000-0000-000000000001";

    fn partition(number: u32, guid: &str, name: &str) -> Partition {
        let kind = Guid::parse(if name == ESP_NAME { ESP_TYPE } else { OTHER }).unwrap();
        Partition { number, kind, guid: Guid::parse(guid).unwrap(), name: name.to_owned() }
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

    /// A disk of ours with this ESP, of this mirror.
    pub(in super::super) fn mirrored(name: &str, esp: Guid, mirror: Option<Guid>) -> Disk {
        let with = |guid, entry| Partition { guid, ..entry };
        let esp = with(esp, partition(1, OTHER, ESP_NAME));
        let mut table = vec![esp, partition(2, OTHER, "POLIS-SYSTEM-A")];
        table.extend(mirror.map(|mirror| with(mirror, partition(4, OTHER, MIRROR_NAME))));
        Disk { name: name.to_owned(), table: Ok(table) }
    }

    /// Where the disks of [`twins`] are.
    fn two_ways(disk: &str) -> Option<BootPath> {
        let function = if disk == "nvme0n1" { "0000:00:04.0" } else { "0000:00:05.0" };
        BootPath::of_device(&Path::new("/sys/devices/pci0000:00").join(function))
    }

    fn twins() -> Vec<Found> {
        let twin = |name: &str| Disk { name: name.to_owned(), ..disks()[2].clone() };
        candidates(&[twin("nvme0n1"), twin("sda")], Guid::parse(ESP))
    }

    #[test]
    fn the_esp_s_own_disk_is_a_candidate_and_not_one_that_looks_like_it() {
        let esp = Guid::parse(ESP);
        let (disk, systems, esp_id) = ("sdc".to_owned(), vec![(Slot::A, 7)], esp.unwrap());
        let found = Found { disk, esp: 3, esp_id, systems, data: false, mirror: None };
        assert_eq!(candidates(&disks(), esp), [found]);
        assert!(candidates(&disks()[..2], esp).is_empty());
        // Without firmware, each disk of ours is one.
        assert_eq!(candidates(&disks(), None).len(), 2);
    }

    #[test]
    fn of_two_disks_that_look_alike_the_one_that_firmware_started_from_is_chosen() {
        for disk in ["nvme0n1", "sda"] {
            let path = two_ways(disk);
            let Choice::This(found) = choose(twins(), path.as_ref(), two_ways) else {
                panic!("{disk} is not chosen")
            };
            assert_eq!(found.disk, disk);
        }
    }

    #[test]
    fn two_disks_that_nothing_tells_apart_are_not_chosen_between() {
        assert_eq!(choose(twins(), None, two_ways), Choice::Several(twins()));
        let same = |_: &str| two_ways("sda");
        assert_eq!(choose(twins(), two_ways("sda").as_ref(), same), Choice::Several(twins()));
    }

    #[test]
    fn a_disk_that_is_proved_goes_before_one_whose_way_is_not_known() {
        let known = |disk: &str| two_ways(disk).filter(|_| disk == "sda");
        let Choice::This(found) = choose(twins(), two_ways("sda").as_ref(), known) else {
            panic!("no disk is chosen")
        };
        assert_eq!(found.disk, "sda");
    }

    #[test]
    fn a_copy_of_an_esp_without_a_system_is_no_candidate() {
        let alone = vec![partition(1, ESP, "POLIS-ESP")];
        let copy = Disk { name: "sda".to_owned(), table: Ok(alone) };
        assert!(candidates(&[copy], Guid::parse(ESP)).is_empty());
    }

    #[test]
    fn a_disk_behind_another_controller_is_taken_only_after_a_wait() {
        let alone = vec![twins()[0].clone()];
        let elsewhere = choose(alone.clone(), two_ways("sda").as_ref(), two_ways);
        assert_eq!(elsewhere, Choice::Elsewhere(alone.clone()));
        // Where the kernel's way to a disk is not known, nothing speaks against it.
        let unknown = |_: &str| None;
        let [only] = &alone[..] else { panic!("one disk") };
        let chosen = choose(alone.clone(), two_ways("sda").as_ref(), unknown);
        assert_eq!(chosen, Choice::Perhaps(only.clone()));
        assert_eq!(choose(Vec::new(), None, unknown), Choice::None);
    }

    #[test]
    fn a_disk_that_nothing_proves_is_certain_once_its_guids_are_its_own() {
        let mut found = twins();
        found.truncate(1);
        assert_eq!(choose(found.clone(), None, two_ways), Choice::Perhaps(found[0].clone()));
        found[0].data = true;
        assert_eq!(choose(found.clone(), None, two_ways), Choice::This(found[0].clone()));
    }

    #[test]
    fn two_ways_to_one_disk_are_no_two_disks() {
        let same = |_: &str| Some("naa.5000c500a1b2c3d4".to_owned());
        assert_eq!(distinct(twins(), same), twins()[..1]);
        assert_eq!(distinct(twins(), |disk| Some(disk.to_owned())), twins());
        assert_eq!(distinct(twins(), |_| None), twins());
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
