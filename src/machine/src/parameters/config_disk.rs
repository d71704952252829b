//! Disks that a cloud or a hypervisor adds to hand over user data: NoCloud and config drive.
//!
//! ```text
//! block device --superblock--> label cidata, config-2 --mount, read-only--> one file
//! ```
//!
//! A disk is known by the label of its file system, FAT or ISO 9660, as cloud-init knows it.
//! The kernel reads the file: the drivers are those of every other machine, and FAT is
//! mounted for the ESP anyhow. The mount is attached to no directory, so no other process
//! sees it, and it ends when its last file descriptor is closed.
//!
//! Every disk of the machine is read, and one that hangs would hold its reader for ever, so each
//! is read apart (`storage::detached`).
//!
//! Invariants:
//! - Nothing is written to such a disk.
//! - A disk that does not answer keeps no other from being read, and is named.
//! - Only a file inside the file system is read: no link, no device.
//!
//! What this module does not do: wait for a disk (`service`).

use std::fs::File;
use std::io::{self, Read as _};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use futures::future::join_all;
use polis_base::sys::mount;
use polis_wire::parameters::disk::{FileSystem, foreign, recognise, user_data};
use polis_wire::parameters::{BYTES_MAX, Error, Source};
use rustix::fs::{Mode, OFlags, ResolveFlags, openat2};
use tokio::time::timeout;

use crate::storage::detached::{self, Key, Pending, detached};
use polis_runtime::supervisor::blocking;

/// Block devices of software, which no hypervisor has added, and floppy drives, which take
/// seconds to say that they are empty.
const NOT_DISKS: [&str; 9] = ["dm-", "loop", "ram", "zram", "nbd", "rbd", "drbd", "md", "fd"];

/// A disk with user data.
#[derive(Debug)]
pub(super) struct Found {
    pub(super) source: Source,
    /// The kernel's name of the device, for example `sr0`.
    pub(super) device: String,
    /// The content of the file, if it is there and may be node parameters.
    pub(super) read: Result<Option<Vec<u8>>, Error>,
    /// Why a file that is there is not read as node parameters.
    pub(super) note: Option<&'static str>,
}

/// The disks, as far as they have said what they are.
#[derive(Debug, Default)]
pub(super) struct Seen {
    /// Those with user data: NoCloud before config drives, each in the order of names.
    pub(super) found: Vec<Found>,
    /// The names of those that have not answered.
    pub(super) silent: Vec<String>,
}

/// Where the kernel shows disks; other folders in tests. Clones share what is being read of them.
#[derive(Clone, Debug)]
pub(super) struct Disks {
    pub(super) sys: PathBuf,
    pub(super) dev: PathBuf,
    /// Mounts a device for reading; the result is its root.
    mount: fn(&Path, FileSystem) -> io::Result<OwnedFd>,
    looks: Pending<Key, Option<Arc<Found>>>,
}

impl Disks {
    pub(super) fn new(sys: &Path, dev: &Path) -> Self {
        Self { sys: sys.to_owned(), dev: dev.to_owned(), mount, looks: Pending::default() }
    }

    /// Looks at every disk, for this long at most. A look that has not ended goes on in the next
    /// one. Cancel-safe.
    pub(super) async fn look(&self, time: Duration) -> Seen {
        let disks = self.clone();
        let keys = blocking(move || disks.keys()).await;
        // A disk that is not listed was pulled.
        self.looks.keep(&keys);
        let asked = keys.into_iter().map(|key| self.ask(key, time));
        let mut seen = Seen::default();
        for answer in join_all(asked).await {
            match answer {
                Ok(found) => seen.found.extend(found),
                Err(name) => seen.silent.push(name),
            }
        }
        seen.found.sort_by_key(|one| one.source != Source::NoCloud);
        seen
    }

    /// The user data of a disk, if it has any; the name of a disk that does not answer in time.
    async fn ask(&self, key: Key, time: Duration) -> Result<Option<Found>, String> {
        let (disks, name) = (self.clone(), key.0.clone());
        let silent = name.clone();
        let begin = || detached(move || disks.examine(name).map(Arc::new));
        match timeout(time, self.looks.answer(key, begin)).await.ok().flatten() {
            // Only this caller asks, so the answer has one owner.
            Some(Some(found)) => Arc::into_inner(found).map(Some).ok_or(silent),
            Some(None) => Ok(None),
            None => Err(silent),
        }
    }

    /// The disks and partitions, in the order of names.
    fn keys(&self) -> Vec<Key> {
        let Ok(entries) = std::fs::read_dir(self.sys.join("class/block")) else {
            return Vec::new();
        };
        let mut names: Vec<String> = entries
            .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
            .filter(|name| !NOT_DISKS.iter().any(|prefix| name.starts_with(prefix)))
            .collect();
        names.sort();
        names.into_iter().map(|name| detached::key(&self.sys, name)).collect()
    }

    /// The content of `name`; `None` for a disk of another kind, and for one that cannot be
    /// read: an empty drive is one, and a broken disk is the business of its user.
    fn examine(&self, name: String) -> Option<Found> {
        let path = self.dev.join(&name);
        let nonblock = OFlags::NONBLOCK.bits().cast_signed();
        let device = File::options().read(true).custom_flags(nonblock).open(&path).ok()?;
        let (source, kind) = recognise(|buffer, at| device.read_exact_at(buffer, at))?;
        drop(device);
        let mut note = None;
        let read = self.content(&path, kind, user_data(source)).map(|content| {
            note = content.as_deref().and_then(foreign);
            content.filter(|_| note.is_none())
        });
        Some(Found { source, device: name, read, note })
    }

    fn content(
        &self,
        device: &Path,
        kind: FileSystem,
        file: &str,
    ) -> Result<Option<Vec<u8>>, Error> {
        let root = (self.mount)(device, kind).map_err(Error::Unreadable)?;
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let inside = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_XDEV;
        let file = match openat2(&root, file, flags, Mode::empty(), inside) {
            Err(rustix::io::Errno::NOENT) => return Ok(None),
            other => File::from(other.map_err(|errno| Error::Unreadable(errno.into()))?),
        };
        if !file.metadata().map_err(Error::Unreadable)?.is_file() {
            return Err(Error::Unreadable(io::Error::other("it is not a file")));
        }
        let mut bytes = Vec::new();
        file.take(BYTES_MAX + 1).read_to_end(&mut bytes).map_err(Error::Unreadable)?;
        if bytes.len() as u64 > BYTES_MAX { Err(Error::TooLarge) } else { Ok(Some(bytes)) }
    }
}

fn mount(device: &Path, kind: FileSystem) -> io::Result<OwnedFd> {
    // The same code pages as for the ESP, so that no other module is needed.
    let (name, options): (_, &[(&str, &str)]) = match kind {
        FileSystem::Fat => ("vfat", &[("codepage", "437"), ("iocharset", "cp437")]),
        FileSystem::Iso9660 => ("iso9660", &[("iocharset", "utf8")]),
    };
    mount::detached(device, name, options)
}

#[cfg(test)]
pub(super) mod tests {
    use std::fs;

    use super::*;

    /// The boot sector of a FAT12 file system, as far as it counts here.
    pub(in super::super) fn fat(label: &str) -> Vec<u8> {
        let mut sector = vec![0; 512];
        sector[0] = 0xeb;
        sector[22] = 1;
        sector[38] = 0x29;
        sector[43..54].copy_from_slice(format!("{label:11}").as_bytes());
        sector[510..].copy_from_slice(&[0x55, 0xaa]);
        sector
    }

    pub(super) fn iso(label: &str) -> Vec<u8> {
        let mut image = vec![0; 40_000];
        image[32_768..32_775].copy_from_slice(b"\x01CD001\x01");
        image[32_808..32_840].copy_from_slice(format!("{label:32}").as_bytes());
        image
    }

    /// How long a disk may take that does not answer: far longer than a file takes.
    const PATIENCE: Duration = Duration::from_secs(2);

    /// What the disks have, all of which answer.
    async fn look(disks: &Disks) -> Vec<Found> {
        let Seen { found, silent } = disks.look(detached::ANSWER_MAX).await;
        assert_eq!(silent, [""; 0]);
        found
    }

    /// The last of them.
    async fn one(disks: &Disks) -> Found {
        look(disks).await.pop().unwrap()
    }

    /// The content of the disk `sdb` is in the folder `sdb.content`.
    fn folder(device: &Path, _kind: FileSystem) -> io::Result<OwnedFd> {
        Ok(File::open(device.with_extension("content"))?.into())
    }

    /// The same disks, mounted in another way.
    pub(in super::super) fn mounted(
        disks: Disks,
        mount: fn(&Path, FileSystem) -> io::Result<OwnedFd>,
    ) -> Disks {
        Disks { mount, ..disks }
    }

    /// Disks with their first bytes, and files in them.
    fn disks(heads: &[(&str, &[u8])], files: &[(&str, &[u8])]) -> (tempfile::TempDir, Disks) {
        let root = tempfile::tempdir().unwrap();
        let (sys, dev) = (root.path().join("sys"), root.path().join("dev"));
        fs::create_dir_all(&dev).unwrap();
        for (name, head) in heads {
            fs::create_dir_all(sys.join("class/block").join(name)).unwrap();
            fs::write(dev.join(name), head).unwrap();
            fs::create_dir_all(dev.join(name).with_extension("content")).unwrap();
        }
        for (path, content) in files {
            let path = dev.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, content).unwrap();
        }
        let disks = mounted(Disks::new(&sys, &dev), folder);
        (root, disks)
    }

    #[tokio::test]
    async fn both_labels_are_known_on_both_file_systems() {
        for head in [fat("CIDATA"), fat("cidata"), iso("cidata")] {
            let (_root, disks) = disks(&[("sdb", &head)], &[("sdb.content/user-data", b"abc")]);
            let found = one(&disks).await;
            assert_eq!(
                (found.source, found.read.unwrap().unwrap()),
                (Source::NoCloud, "abc".into())
            );
        }
        for head in [fat("CONFIG-2"), iso("config-2")] {
            let file = ("sr0.content/openstack/latest/user_data", &b"abc"[..]);
            let (_root, disks) = disks(&[("sr0", &head)], &[file]);
            let found = one(&disks).await;
            assert_eq!(
                (found.source, found.read.unwrap().unwrap()),
                (Source::ConfigDrive, "abc".into())
            );
        }
    }

    #[tokio::test]
    async fn other_disks_are_left_alone() {
        let head = fat("CIDATA");
        let mut unsigned = head.clone();
        unsigned[38] = 0;
        let heads: [(&str, &[u8]); 7] = [
            ("sda", &fat("POLIS-ESP")),
            ("sdb", &iso("debian")),
            ("sdc", &unsigned),
            ("sdd", &head[..511]),
            ("sde", b""),
            ("dm-0", &head),
            ("loop1", &head),
        ];
        let (_root, disks) = disks(&heads, &[]);
        assert!(look(&disks).await.is_empty());
    }

    #[tokio::test]
    async fn user_data_for_cloud_init_is_not_ours() {
        for (content, why) in [(&b"#cloud-config\n"[..], "cloud-init"), (b"", "empty")] {
            let (_root, disks) =
                disks(&[("sdb", &fat("CIDATA"))], &[("sdb.content/user-data", content)]);
            let found = one(&disks).await;
            assert!(matches!(found.read, Ok(None)));
            assert!(found.note.unwrap().contains(why));
        }
    }

    #[tokio::test]
    async fn a_disk_without_the_file_has_no_parameters() {
        let (_root, disks) = disks(&[("sdb", &fat("CIDATA"))], &[]);
        assert!(matches!(one(&disks).await.read, Ok(None)));
    }

    #[tokio::test]
    async fn links_folders_and_large_files_are_refused() {
        let (root, disks) = disks(&[("sdb", &fat("CIDATA"))], &[]);
        let file = root.path().join("dev/sdb.content/user-data");
        std::os::unix::fs::symlink("/etc/passwd", &file).unwrap();
        assert!(matches!(one(&disks).await.read, Err(Error::Unreadable(_))));
        fs::remove_file(&file).unwrap();
        fs::create_dir(&file).unwrap();
        assert!(matches!(one(&disks).await.read, Err(Error::Unreadable(_))));
        fs::remove_dir(&file).unwrap();
        fs::write(&file, vec![7; 65_537]).unwrap();
        assert!(matches!(one(&disks).await.read, Err(Error::TooLarge)));
    }

    #[tokio::test]
    async fn a_disk_that_does_not_mount_is_unreadable() {
        let (root, disks) = disks(&[("sdb", &fat("CIDATA"))], &[]);
        fs::remove_dir(root.path().join("dev/sdb.content")).unwrap();
        assert!(matches!(one(&disks).await.read, Err(Error::Unreadable(_))));
    }

    #[tokio::test]
    async fn nocloud_comes_before_a_config_drive() {
        let heads: [(&str, &[u8]); 3] =
            [("sdb", &fat("CONFIG-2")), ("sdc", &fat("CIDATA")), ("sdd", &fat("CIDATA"))];
        let (_root, disks) = disks(&heads, &[]);
        let found = look(&disks).await;
        let names: Vec<_> = found.iter().map(|one| one.device.as_str()).collect();
        assert_eq!(names, ["sdc", "sdd", "sdb"]);
    }

    #[tokio::test]
    async fn a_disk_that_does_not_answer_keeps_no_other_from_being_read() {
        use rustix::fs::{CWD, FileType, mknodat};

        let heads: [(&str, &[u8]); 3] =
            [("sda", &fat("POLIS-ESP")), ("sdb", &fat("CIDATA")), ("sdc", &fat("CIDATA"))];
        let (root, disks) = disks(&heads, &[("sdc.content/user-data", b"abc")]);
        // To open a pipe without a writer waits.
        let content = root.path().join("dev/sdb.content");
        fs::remove_dir(&content).unwrap();
        mknodat(CWD, &content, FileType::Fifo, Mode::from_raw_mode(0o600), 0).unwrap();
        for _look in 0..2 {
            let Seen { found, silent } = disks.look(PATIENCE).await;
            assert_eq!(silent, ["sdb"]);
            let [sdc] = &found[..] else { panic!("{found:?}") };
            assert_eq!(sdc.device, "sdc");
            assert_eq!(sdc.read.as_ref().unwrap().as_deref(), Some(&b"abc"[..]));
        }
        // The look goes on, and has the answer of a disk that answers again.
        fs::write(&content, "").unwrap();
        let found = look(&disks).await;
        let names: Vec<_> = found.iter().map(|one| one.device.as_str()).collect();
        assert_eq!(names, ["sdb", "sdc"]);
    }
}

#[cfg(test)]
#[path = "config_disk_fuzz_tests.rs"]
mod fuzz_tests;
