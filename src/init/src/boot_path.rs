//! The way from the root of the machine's buses to the disk that firmware started from.
//!
//! Two disks may carry the same image, or one be a copy of the other: then their GUIDs do
//! not tell them apart, but the entry that firmware booted names the controller of its
//! disk. The UEFI specification describes the entry (3.1.3, load options) and its device
//! path (10.3); the names in `/sys` have the same functions of PCI.
//!
//! ```text
//! BootCurrent --> Boot0001: PciRoot(0)/Pci(4,0)/...       pci0000:00/0000:00:04.0/...
//!                           `---- compared with the way of each disk ----'
//! ```
//!
//! Invariants:
//! - The bytes of a variable may be anybody's: every length in them is checked.
//!
//! What this module does not do: distinguish two disks of one controller.

use std::path::Path;

/// A function of PCI: its device and function number on its bus.
type Function = (u8, u8);

/// The functions of PCI that lead to a disk, from a root of the buses on: the bridges, then
/// the controller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BootPath(Vec<Function>);

/// Types of the nodes of a device path.
const HARDWARE: u8 = 1;
const ACPI: u8 = 2;
/// Subtypes: a function of PCI, and an ACPI device by its ID.
const PCI: u8 = 1;
const ACPI_ID: u8 = 1;
/// Compressed EISA IDs of roots of PCI: `PNP0A03`, `PNP0A08`.
const ROOTS: [u32; 2] = [0x0a03_41d0, 0x0a08_41d0];

impl BootPath {
    /// Reads the content of a variable `Boot####`: four bytes of attributes of the file
    /// system, then the load option. `None` where it does not begin at a root of PCI, as
    /// the short form that only names a partition.
    #[must_use]
    pub fn of_option(bytes: &[u8]) -> Option<Self> {
        let option = bytes.get(4..)?;
        let length = usize::from(u16::from_le_bytes(option.get(4..6)?.try_into().ok()?));
        let description = option.get(6..)?;
        let end = description.chunks_exact(2).position(|letter| letter == [0, 0])?;
        let mut path = description.get((end + 1) * 2..)?.get(..length)?;
        let mut functions = Vec::new();
        let mut rooted = false;
        while let Some((kind, subtype, data, rest)) = node(path) {
            match (kind, subtype) {
                (ACPI, ACPI_ID) if !rooted => {
                    let id = u32::from_le_bytes(data.get(..4)?.try_into().ok()?);
                    rooted = ROOTS.contains(&id);
                }
                (HARDWARE, PCI) if rooted => functions.push((*data.get(1)?, *data.first()?)),
                _ => break,
            }
            path = rest;
        }
        (!functions.is_empty()).then_some(Self(functions))
    }

    /// Reads the path of a device in `/sys/devices`. `None` where no function of PCI is on it.
    #[must_use]
    pub fn of_device(path: &Path) -> Option<Self> {
        let functions: Vec<Function> =
            path.iter().filter_map(|name| function(name.to_str()?)).collect();
        (!functions.is_empty()).then_some(Self(functions))
    }

    /// Whether the other path goes through the last function of this one: firmware may not
    /// know the rest of the way.
    #[must_use]
    pub fn leads_to(&self, other: &Self) -> bool {
        other.0.starts_with(&self.0)
    }
}

/// The first node of a device path: type, subtype, data, and what follows it.
fn node(path: &[u8]) -> Option<(u8, u8, &[u8], &[u8])> {
    let length = usize::from(u16::from_le_bytes(path.get(2..4)?.try_into().ok()?));
    let data = path.get(4..length)?;
    Some((path[0], path[1], data, &path[length..]))
}

/// The function in a name as `0000:00:1f.2`.
fn function(name: &str) -> Option<Function> {
    let (domain, rest) = name.split_once(':')?;
    let (bus, rest) = rest.split_once(':')?;
    let (device, function) = rest.split_once('.')?;
    u32::from_str_radix(domain, 16).ok()?;
    u8::from_str_radix(bus, 16).ok()?;
    Some((u8::from_str_radix(device, 16).ok()?, u8::from_str_radix(function, 16).ok()?))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn option(nodes: &[&[u8]]) -> Vec<u8> {
        let path: Vec<u8> = nodes.concat();
        let mut bytes = vec![7, 0, 0, 0, 1, 0, 0, 0];
        bytes.extend(u16::try_from(path.len()).unwrap().to_le_bytes());
        bytes.extend("UEFI Disk\0".encode_utf16().flat_map(u16::to_le_bytes));
        bytes.extend(path);
        bytes.extend([9; 5]);
        bytes
    }

    const ROOT: &[u8] = &[2, 1, 12, 0, 0xd0, 0x41, 0x03, 0x0a, 0, 0, 0, 0];
    const BRIDGE: &[u8] = &[1, 1, 6, 0, 0, 2];
    const CONTROLLER: &[u8] = &[1, 1, 6, 0, 2, 0x1f];
    const SATA: &[u8] = &[3, 18, 10, 0, 0, 0, 0xff, 0xff, 0, 0];
    const END: &[u8] = &[0x7f, 0xff, 4, 0];
    const SHORT: &[u8] = &[4, 1, 4, 0];

    fn device(path: &str) -> BootPath {
        BootPath::of_device(Path::new(path)).unwrap()
    }

    #[test]
    fn the_entry_that_was_booted_leads_to_the_disks_of_its_controller() {
        let path = BootPath::of_option(&option(&[ROOT, BRIDGE, CONTROLLER, SATA, END])).unwrap();
        assert_eq!(path, BootPath(vec![(2, 0), (0x1f, 2)]));
        let root = "/sys/devices/pci0000:00";
        let disk = format!("{root}/0000:00:02.0/0000:01:1f.2/ata1/host0/block/sda");
        assert!(path.leads_to(&device(&disk)));
        let other = format!("{root}/0000:00:02.0/0000:01:03.0/nvme/nvme0/nvme0n1");
        assert!(!path.leads_to(&device(&other)));
        assert!(!path.leads_to(&device(&format!("{root}/0000:00:02.0/virtio1/block/vda"))));
    }

    #[test]
    fn an_entry_that_names_only_a_partition_proves_nothing() {
        assert_eq!(BootPath::of_option(&option(&[SHORT, END])), None);
        assert_eq!(BootPath::of_option(&option(&[ROOT, SHORT, END])), None);
        assert_eq!(BootPath::of_device(Path::new("/sys/devices/virtual/block/loop0")), None);
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _path = BootPath::of_option(&bytes);
        }

        #[test]
        fn arbitrary_nodes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _path = BootPath::of_option(&option(&[ROOT, &bytes]));
        }
    }
}
