//! The disks of this machine, as sysfs describes them, to choose one by what it is.
//!
//! The kernel keeps what sysfs shows of a disk, except for serial numbers: a disk of virtio is
//! asked for it at each read, and one behind USB is locked meanwhile. A disk that hangs would hold
//! the reader for ever, so serial numbers are read apart (`storage::detached`).
//!
//! Invariants:
//! - Texts of a disk are printable and short: a selector and a screen show them as they are.
//! - The disk that the machine was started from is marked, by every way to it.
//! - A disk that does not answer delays the list by [`detached::ANSWER_MAX`] at most, and is
//!   marked.
//!
//! What this module does not do: read what is on a disk (`content`), or choose (`select`).

use std::fs::{self, File};
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use futures::future::join_all;
use polis_wire::parameters::Transport;
use tokio::time::Instant;

use crate::storage::detached::{self, Key, Pending, detached};
use polis_runtime::supervisor::blocking;

/// Block devices with hardware behind them that hold no system: CD-ROM and floppy drives, raw
/// flash.
const NOT_DISKS: [&str; 3] = ["sr", "fd", "mtd"];
/// The parts of an eMMC chip beside its disk.
const NOT_MMC: [&str; 2] = ["boot", "rpmb"];
/// Longest text of a disk.
const TEXT_MAX: usize = 128;
/// The unit of a disk's size in sysfs, independent of its sector size.
const SIZE_UNIT: u64 = 512;
/// The header of a page of a SCSI disk's product data.
const VPD_HEADER: usize = 4;
/// How long the list must stay as it is: `init` loads the last drivers five seconds after the
/// start of the services, and a second disk that fits may come late.
const QUIET: Duration = Duration::from_secs(10);
/// How long it may change without staying so: an adapter with full shelves takes a minute.
const RESTLESS: Duration = Duration::from_secs(300);

/// A disk.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Disk {
    /// The kernel's name, for example `nvme0n1`.
    pub name: String,
    /// How it is connected, if that is known.
    pub transport: Option<Transport>,
    /// Its model, as it reports that; empty where it does not.
    pub model: String,
    /// Its serial number; empty where it does not say.
    pub serial: String,
    /// The identifier that its maker gave it.
    pub wwid: String,
    /// The way to it through the buses.
    pub path: String,
    /// Its size in bytes.
    pub size: u64,
    /// Whether it takes no writes.
    pub read_only: bool,
    /// Devices that are built on it, or on a partition of it.
    pub users: Vec<String>,
    /// Whether the machine was started from it.
    pub medium: bool,
    /// Whether it did not answer in time when it was asked for its serial number.
    pub silent: bool,
}

impl std::fmt::Display for Disk {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let transport = self.transport.map_or("an unknown bus", Transport::name);
        write!(f, "{} ({transport}, {} MB", self.name, self.size / 1_000_000)?;
        for (name, text) in [("model", &self.model), ("serial", &self.serial), ("wwid", &self.wwid)]
        {
            if !text.is_empty() {
                write!(f, ", {name} {text}")?;
            }
        }
        if self.silent {
            write!(f, ", does not answer")?;
        }
        write!(f, ", at {})", self.path)
    }
}

/// The disks of this machine. Clones share what is being read of them.
#[derive(Clone, Debug, Default)]
pub struct Disks {
    serials: Pending<Key, String>,
}

impl Disks {
    /// Every disk of the machine, in the order of names; `medium` is the name of the one that it
    /// was started from.
    pub async fn list(&self, sys: &Path, medium: &str) -> Vec<Disk> {
        let (sys, medium) = (sys.to_owned(), medium.to_owned());
        let found = blocking(move || find(&sys, &medium)).await;
        let keys: Vec<Key> = found.iter().map(|found| found.key.clone()).collect();
        // A disk that is not listed was pulled.
        self.serials.keep(&keys);
        let asked: Vec<_> = found.into_iter().map(|found| self.ask(found)).collect();
        join_all(asked).await
    }

    /// The disk with its serial number.
    async fn ask(&self, Found { disk, key, serials }: Found) -> Disk {
        if serials.is_empty() {
            return disk;
        }
        match self.serials.answer(key, || detached(move || first(&serials))).await {
            Some(serial) => Disk { serial, ..disk },
            None => Disk { silent: true, ..disk },
        }
    }
}

/// Whether all disks have appeared.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum List {
    /// The list has had the same disks for [`QUIET`].
    Settled,
    /// Another disk may come.
    Changing,
    /// It has not settled within [`RESTLESS`]: these disks came or went last.
    Restless(Vec<String>),
}

/// Since when the list has the same disks. A slow one, which answers one time and not the next, is
/// the same disk.
#[derive(Debug, Default)]
pub(crate) struct Steady {
    known: Option<(Vec<String>, Instant)>,
    /// The disks that came or went last.
    moved: Vec<String>,
    /// The first look since the list was settled.
    begun: Option<Instant>,
}

impl Steady {
    /// Looks at the newest list.
    pub(crate) fn look(&mut self, disks: &[Disk]) -> List {
        let names: Vec<String> = disks.iter().map(|disk| disk.name.clone()).collect();
        let begun = *self.begun.get_or_insert_with(Instant::now);
        match self.known.take() {
            Some((known, since)) if known == names => {
                self.known = Some((known, since));
                if since.elapsed() >= QUIET {
                    self.begun = None;
                    return List::Settled;
                }
            }
            known => {
                let known = known.map(|(known, _since)| known).unwrap_or_default();
                let gone = known.iter().filter(|name| !names.contains(name));
                let new = names.iter().filter(|name| !known.contains(name));
                self.moved = gone.chain(new).cloned().collect();
                self.known = Some((names, Instant::now()));
            }
        }
        if begun.elapsed() >= RESTLESS {
            return List::Restless(self.moved.clone());
        }
        List::Changing
    }
}

/// Every disk of the machine without the serial number that it would be asked for, so that no disk
/// delays the list. Blocks.
pub(crate) fn unasked(sys: &Path, medium: &str) -> Vec<Disk> {
    find(sys, medium).into_iter().map(|found| found.disk).collect()
}

/// A disk, and the files of sysfs that may have its serial number.
struct Found {
    disk: Disk,
    key: Key,
    serials: Vec<PathBuf>,
}

fn find(sys: &Path, medium: &str) -> Vec<Found> {
    let Ok(entries) = fs::read_dir(sys.join("block")) else { return Vec::new() };
    let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let mut found: Vec<Found> = names.filter_map(|name| describe(sys, name)).collect();
    found.sort_by(|one, other| one.disk.name.cmp(&other.disk.name));
    let own = found.iter().map(|found| &found.disk).find(|disk| disk.name == medium);
    let wwid = own.map(|disk| disk.wwid.clone()).filter(|wwid| !wwid.is_empty());
    for Found { disk, .. } in &mut found {
        disk.medium = disk.name == medium || wwid.as_ref() == Some(&disk.wwid);
    }
    found
}

fn describe(sys: &Path, name: String) -> Option<Found> {
    let part = name.starts_with("mmcblk") && NOT_MMC.iter().any(|part| name.contains(part));
    if part || NOT_DISKS.iter().any(|prefix| name.starts_with(prefix)) {
        return None;
    }
    let folder = sys.join("block").join(&name);
    let device = folder.join("device");
    // A second path to an NVMe disk, which only the kernel itself uses.
    if !device.exists() || text(&folder.join("hidden")) == "1" {
        return None;
    }
    let size = text(&folder.join("size")).parse::<u64>().ok()?.saturating_mul(SIZE_UNIT);
    // An empty drive has no size.
    if size == 0 {
        return None;
    }
    let real = fs::canonicalize(&folder).ok()?;
    let devices = fs::canonicalize(sys.join("devices")).ok()?;
    let path = real.strip_prefix(&devices).ok()?.to_str()?.to_owned();
    let serial = product_serial(&device);
    let serials = if serial.is_empty() { serials(&real, &devices) } else { Vec::new() };
    let key = detached::key(sys, name.clone());
    let disk = Disk {
        transport: transport(&name, &path),
        model: first(&[device.join("model"), device.join("name")]),
        serial,
        wwid: first(&[folder.join("wwid"), device.join("wwid")]),
        path,
        size,
        read_only: text(&folder.join("ro")) == "1",
        users: users(&folder, &name),
        medium: false,
        silent: false,
        name,
    };
    Some(Found { disk, key, serials })
}

/// How a disk is connected, by its name and its way through the buses.
fn transport(name: &str, path: &str) -> Option<Transport> {
    let numbered = |part: &str, prefix: &str| {
        part.strip_prefix(prefix)
            .is_some_and(|rest| !rest.is_empty() && rest.bytes().all(|c| c.is_ascii_digit()))
    };
    let on = |prefix| path.split('/').any(|part| numbered(part, prefix));
    match () {
        () if on("usb") => Some(Transport::Usb),
        () if name.starts_with("nvme") => Some(Transport::Nvme),
        () if name.starts_with("vd") => Some(Transport::Virtio),
        () if name.starts_with("mmcblk") => Some(Transport::Mmc),
        () if on("ata") => Some(Transport::Sata),
        () if name.starts_with("sd") => Some(Transport::Scsi),
        () => None,
    }
}

/// The serial number in the product data of a SCSI disk, which the kernel keeps; empty without one.
fn product_serial(device: &Path) -> String {
    let page = fs::read(device.join("vpd_pg80")).unwrap_or_default();
    printable(page.get(VPD_HEADER..).unwrap_or_default())
}

/// Where else the serial number may be: at the nearest device on the way to the disk that has one.
/// The root of a USB bus has one that means no disk.
fn serials(real: &Path, devices: &Path) -> Vec<PathBuf> {
    real.ancestors()
        .take_while(|folder| *folder != devices)
        .take_while(|folder| {
            let name = folder.file_name().unwrap_or_default().to_string_lossy();
            !name.starts_with("usb")
        })
        .map(|folder| folder.join("serial"))
        .filter(|file| file.exists())
        .collect()
}

/// The devices on top of a disk and of its partitions.
fn users(folder: &Path, name: &str) -> Vec<String> {
    let names = |folder: &Path| -> Vec<String> {
        let entries = fs::read_dir(folder).into_iter().flatten();
        entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok()).collect()
    };
    let parts = names(folder).into_iter().filter(|part| part.starts_with(name));
    let mut users: Vec<String> = parts
        .map(|part| folder.join(part))
        .chain([folder.to_owned()])
        .flat_map(|folder| names(&folder.join("holders")))
        .collect();
    users.sort();
    users.dedup();
    users
}

/// The first text in these files of sysfs that is not empty.
fn first(files: &[PathBuf]) -> String {
    files.iter().map(|file| text(file)).find(|text| !text.is_empty()).unwrap_or_default()
}

/// A small file of sysfs as text; empty where it cannot be read.
fn text(path: &Path) -> String {
    let mut bytes = Vec::new();
    let most = TEXT_MAX as u64;
    let read = File::open(path).and_then(|file| file.take(most).read_to_end(&mut bytes));
    if read.is_ok() { printable(&bytes) } else { String::new() }
}

/// Text of a device: printable, without blanks around it, and without the comma that would
/// end it in a selector.
fn printable(bytes: &[u8]) -> String {
    let bytes = &bytes[..bytes.len().min(TEXT_MAX)];
    let printable = |byte: &u8| (b' '..=b'~').contains(byte) && *byte != b',';
    let text: String =
        bytes.iter().filter(|byte| printable(byte)).map(|b| char::from(*b)).collect();
    text.trim().to_owned()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use tokio::time::sleep;

    use super::*;

    /// How long a disk may take to answer here: far longer than a file takes.
    const PATIENCE: Duration = Duration::from_secs(2);

    /// Files below the way to a disk, with their content.
    type Files<'a> = &'a [(&'a str, &'a [u8])];

    /// A folder like `/sys` with these disks: name, way, and files.
    fn sys(disks: &[(&str, &str, Files<'_>)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir_all(root.path().join("block")).unwrap();
        for (name, way, files) in disks {
            let folder = root.path().join("devices").join(way);
            fs::create_dir_all(&folder).unwrap();
            for (file, content) in *files {
                let file = folder.join(file);
                fs::create_dir_all(file.parent().unwrap()).unwrap();
                fs::write(file, content).unwrap();
            }
            let device = folder.join("device");
            if !device.exists() {
                symlink(folder.parent().unwrap(), device).unwrap();
            }
            symlink(&folder, root.path().join("block").join(name)).unwrap();
        }
        root
    }

    #[tokio::test]
    async fn disks_are_described_by_what_sysfs_has_of_them() {
        let root = sys(&[
            (
                "vda",
                "pci0000:00/0000:00:04.0/virtio1/block/vda",
                &[("size", b"2048\n"), ("serial", b"polis\0\0"), ("vda1/holders/dm-0/x", b"")],
            ),
            (
                "nvme0n1",
                "pci0000:00/0000:00:05.0/nvme/nvme0/nvme0n1",
                &[
                    ("size", b"4096"),
                    ("../serial", b"S4EW  \n"),
                    ("../model", b"Samsung, SSD 970  "),
                    ("wwid", b"eui.01"),
                ],
            ),
            (
                "sda",
                "pci0000:00/0000:00:06.0/usb2/2-1/2-1:1.0/host1/target1:0:0/1:0:0:0/block/sda",
                &[
                    ("size", b"8192"),
                    ("ro", b"1\n"),
                    ("device/vpd_pg80", b"\0\x80\0\x04ABCD"),
                    ("device/model", b"Ultra\n"),
                ],
            ),
            ("sr0", "pci0000:00/0000:00:1f.2/ata1/host2/block/sr0", &[("size", b"100")]),
            ("loop0", "virtual/block/loop0", &[("size", b"0")]),
        ]);
        let disks = Disks::default().list(root.path(), "sda").await;
        let [nvme, usb, virtio] = &disks[..] else { panic!("{disks:?}") };
        assert_eq!(nvme.transport, Some(Transport::Nvme));
        assert_eq!((&*nvme.serial, &*nvme.model), ("S4EW", "Samsung SSD 970"));
        assert_eq!((nvme.size, &*nvme.wwid), (2 << 20, "eui.01"));
        assert_eq!(usb.transport, Some(Transport::Usb));
        assert_eq!((&*usb.serial, &*usb.model), ("ABCD", "Ultra"));
        assert!(usb.read_only && usb.medium && !nvme.medium);
        assert_eq!(virtio.transport, Some(Transport::Virtio));
        assert_eq!((&*virtio.serial, &virtio.users[..]), ("polis", &["dm-0".to_owned()][..]));
        assert_eq!(virtio.path, "pci0000:00/0000:00:04.0/virtio1/block/vda");
        let shown =
            "vda (virtio, 1 MB, serial polis, at pci0000:00/0000:00:04.0/virtio1/block/vda)";
        assert_eq!(virtio.to_string(), shown);
    }

    #[test]
    fn a_second_way_to_the_medium_is_the_medium() {
        let files: &[(&str, &[u8])] = &[("size", b"8"), ("wwid", b"naa.5")];
        let root = sys(&[
            ("sda", "pci0000:00/0000:00:04.0/host0/block/sda", files),
            ("sdb", "pci0000:00/0000:00:05.0/host1/block/sdb", files),
            ("sdc", "pci0000:00/0000:00:06.0/host2/block/sdc", &[("size", b"8")]),
        ]);
        let disks = unasked(root.path(), "sdb");
        let medium: Vec<bool> = disks.iter().map(|disk| disk.medium).collect();
        assert_eq!(medium, [true, true, false]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_disk_that_answers_one_time_and_not_the_next_keeps_the_list_as_it_is() {
        let answers = [Disk { serial: "polis".to_owned(), ..named("vda") }];
        let silent = [Disk { silent: true, ..named("vda") }];
        let mut steady = Steady::default();
        assert_eq!(steady.look(&answers), List::Changing);
        sleep(QUIET / 2).await;
        assert_eq!(steady.look(&silent), List::Changing);
        sleep(QUIET / 2).await;
        assert_eq!(steady.look(&answers), List::Settled);
        let [vda] = answers;
        assert_eq!(steady.look(&[vda, named("vdb")]), List::Changing);
        sleep(QUIET / 2).await;
        assert_eq!(steady.look(&[]), List::Changing);
    }

    #[tokio::test(start_paused = true)]
    async fn a_disk_that_comes_and_goes_is_named_in_the_end_and_until_it_stays() {
        let (one, both) = ([named("sda")], [named("sda"), named("sdb")]);
        let (mut steady, begun) = (Steady::default(), Instant::now());
        while begun.elapsed() < RESTLESS {
            for list in [&one[..], &both] {
                assert_eq!(steady.look(list), List::Changing);
                sleep(QUIET / 2).await;
            }
        }
        assert_eq!(steady.look(&one), List::Restless(vec!["sdb".to_owned()]));
        sleep(QUIET).await;
        assert_eq!(steady.look(&one), List::Settled);
        assert_eq!(steady.look(&both), List::Changing, "it has as long again");
    }

    fn named(name: &str) -> Disk {
        Disk { name: name.to_owned(), ..Disk::default() }
    }

    #[tokio::test]
    async fn a_disk_that_does_not_say_its_serial_number_holds_up_no_other_one() {
        use rustix::fs::{CWD, FileType, Mode, mknodat};

        let virtio = |name: &str| format!("pci0000:00/0000:00:04.0/virtio1/block/{name}");
        let root = sys(&[
            ("vda", &virtio("vda"), &[("size", b"8"), ("serial", b"polis")]),
            ("vdb", &virtio("vdb"), &[("size", b"8")]),
        ]);
        // To open a pipe without a writer waits.
        let serial = root.path().join("block/vdb/serial");
        mknodat(CWD, &serial, FileType::Fifo, Mode::from_raw_mode(0o600), 0).unwrap();
        let all = Disks { serials: Pending::within(PATIENCE) };
        let disks = all.list(root.path(), "vda").await;
        let [one, hung] = &disks[..] else { panic!("{disks:?}") };
        assert_eq!((&*one.serial, one.silent), ("polis", false));
        assert!(hung.silent && hung.serial.is_empty());
        assert!(hung.to_string().contains(", does not answer, at "), "{hung}");
        assert!(unasked(root.path(), "vda").iter().all(|disk| !disk.silent));
        // The read goes on, and has the answer of a disk that answers again.
        fs::write(&serial, "later").unwrap();
        let disks = all.list(root.path(), "vda").await;
        assert_eq!((&*disks[1].serial, disks[1].silent), ("later", false));
    }
}
