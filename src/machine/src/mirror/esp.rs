//! The ESP of a disk of the mirror: what starts a machine, and the records that a node keeps there,
//! copied from the disk that the machine runs from to the other one.
//!
//! ```text
//! new      made in memory, written, its first block last
//! records  written in place, as soon as they change
//! others   kernel images, the loader, parameters: replaced whole, after both systems
//! ```
//!
//! Invariants:
//! - Firmware starts nothing from an ESP that is not complete.
//! - No kernel image is removed after the look of an ESP without a loader.
//! - What an ESP has is bounded before it is kept in memory: another machine may have written it.
//! - A look at the other ESP that hangs holds no place in the tree: the next disk is mounted there.
//!
//! What this module does not do: decide which ESP is the newer one (`Record::esp`).

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{self, Write as _};
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use polis_layout::esp;
use polis_layout::partitions::ESP;
use rustix::mount::{MountFlags, UnmountFlags};
use sha2::{Digest as _, Sha256};

use super::Error;
use super::disks::Disk;
use crate::install::boot_files;
use crate::storage::fat;
use polis_base::files::{self, Esp, in_place};
use polis_base::sys;
use polis_base::sys::files::forget;
use polis_base::sys::mount::Mount;

/// The folders of an ESP that are copied.
const FOLDERS: [&str; 3] = ["EFI", "loader", "polis"];
/// The loader's random numbers, which no two disks may share, and unfinished files.
const LEFT_OUT: [&str; 2] = ["loader/random-seed", "EFI/Linux/polis.new"];
/// A file that is being copied.
const UNFINISHED: &str = "mirror.new";
/// The folder of kernel images: what the other disk has beyond these goes.
const KERNELS: &str = "EFI/Linux";
/// The folder of what firmware and the loader start.
const PROGRAMS: &str = "EFI";
/// The folder of what `init` writes at each start: it says nothing about the age of an ESP.
const REPORTS: &str = "polis/guru";
/// Bounds of an ESP's tree: one of Polis has some forty entries, and a damaged one may be its own
/// folder.
const DEPTH_MAX: usize = 6;
const ENTRIES_MAX: usize = 2048;
/// How an ESP is read that is mounted for that alone.
const READ_OPTIONS: [(&str, &str); 2] = [("codepage", "437"), ("iocharset", "cp437")];
/// As `init` mounts an ESP.
const OPTIONS: &str = "umask=0077,codepage=437,iocharset=cp437,shortname=mixed,errors=remount-ro";

/// The files of an ESP: how long each is, and when it was changed last.
pub(super) type Seen = BTreeMap<PathBuf, (u64, Option<SystemTime>)>;

/// The files of the ESP mounted at `root` that are copied. Blocks.
pub(super) fn look(root: &Path) -> io::Result<Seen> {
    let (mut seen, mut left) = (Seen::new(), ENTRIES_MAX);
    for folder in FOLDERS {
        walk(root, Path::new(folder), DEPTH_MAX, &mut left, &mut seen)?;
    }
    Ok(seen)
}

fn walk(
    root: &Path,
    folder: &Path,
    depth: usize,
    left: &mut usize,
    seen: &mut Seen,
) -> io::Result<()> {
    let entries = match fs::read_dir(root.join(folder)) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    for entry in entries {
        let entry = entry?;
        *left = left.checked_sub(1).ok_or_else(|| io::Error::other("it has too many files"))?;
        let path = folder.join(entry.file_name());
        let unfinished = entry.file_name().eq_ignore_ascii_case(UNFINISHED);
        if unfinished || LEFT_OUT.iter().any(|out| path.as_os_str().eq_ignore_ascii_case(out)) {
            continue;
        }
        if entry.file_type()?.is_dir() {
            let deeper = depth.checked_sub(1).ok_or_else(|| io::Error::other("it is too deep"))?;
            walk(root, &path, deeper, left, seen)?;
        } else {
            let metadata = entry.metadata()?;
            seen.insert(path, (metadata.len(), metadata.modified().ok()));
        }
    }
    Ok(())
}

/// Whether this file is one of the records that a node writes in place.
pub(super) fn is_record(path: &Path) -> bool {
    Esp::in_place().iter().any(|record| record == path)
}

/// Makes the ESP of `target` anew, with what starts a machine from the one mounted at `root`.
/// Blocks.
pub(super) fn make(root: &Path, target: &Disk) -> Result<(), Error> {
    let failed = |source| Error::Copy { operation: "make the ESP", disk: target.name(), source };
    let Some((device, _)) = target.named(ESP.name) else { return Ok(()) };
    // It fails without a loader, as where the disk was pulled.
    let mut files = boot_files::read(root).map_err(failed)?;
    if let Ok(parameters) = fs::read(root.join(esp::PARAMETERS)) {
        files.push((esp::PARAMETERS.to_owned(), parameters));
    }
    let seed = format!("{}", target.table.disk);
    let bytes = esp::build(&seed, target.table.block_size, &files);
    let bytes = bytes.map_err(|error| failed(io::Error::other(error)))?;
    let block = usize::try_from(target.table.block_size).unwrap_or_default().min(bytes.len());
    let write = || {
        let disk = File::options().read(true).write(true).open(&device)?;
        forget(&disk)?;
        let (first, rest) = bytes.split_at(block);
        disk.write_all_at(&vec![0; block], 0)?;
        disk.sync_data()?;
        disk.write_all_at(rest, block as u64)?;
        disk.sync_data()?;
        disk.write_all_at(first, 0)?;
        disk.sync_all()?;
        forget(&disk)
    };
    write().map_err(failed)
}

/// Makes these files of the ESP of `target`, mounted at `place` meanwhile, those of the ESP at
/// `root`; with `kernels`, the kernel images that are not there go. Blocks.
pub(super) fn copy(
    root: &Path,
    target: &Disk,
    place: &Path,
    files: &BTreeSet<PathBuf>,
    kernels: bool,
) -> Result<(), Error> {
    let failed = |source| Error::Copy { operation: "copy the ESP", disk: target.name(), source };
    let synced = mounted(target, place, || {
        sync(root, place, files)?;
        if kernels { prune(root, place) } else { Ok(()) }
    });
    synced.map_err(failed)
}

/// Records of an ESP, and their content.
pub(super) type Records = Vec<(PathBuf, Option<Vec<u8>>)>;

/// What an ESP has beyond an older one.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Newer {
    /// The records with another content.
    pub(super) records: Records,
    /// Whether firmware or the loader would start something else.
    programs: bool,
}

impl Newer {
    pub(super) fn is_nothing(&self) -> bool {
        self.records.is_empty() && !self.programs
    }
}

/// What the ESP of `newer` has beyond the ESP at `root`. Blocks.
pub(super) fn compare(root: &Path, newer: &Disk) -> Result<Newer, Error> {
    let failed = |source| Error::Copy { operation: "read the ESP", disk: newer.name(), source };
    // Its table may be torn, so that the kernel knows no partition.
    newer.announce()?;
    let (device, _) = newer.named(ESP.name).ok_or_else(|| failed(missing()))?;
    // At no place in the tree: this may hang, and another disk is to be mounted meanwhile.
    let mounted = sys::mount::detached(&device, "vfat", &READ_OPTIONS).map_err(failed)?;
    let at = PathBuf::from(format!("/proc/self/fd/{}", mounted.as_raw_fd()));
    newer_at(root, &at).map_err(failed)
}

fn missing() -> io::Error {
    io::Error::other("the disk has no ESP")
}

/// Writes these records to the ESP at `root`. Blocks.
pub(super) fn put(root: &Path, records: &[(PathBuf, Option<Vec<u8>>)]) -> Result<(), Error> {
    let write = |(path, content): &(PathBuf, Option<Vec<u8>>)| {
        in_place::write(&root.join(path), content.as_deref())
    };
    records.iter().try_for_each(write).map_err(|error| {
        let source = io::Error::other(error);
        Error::Copy { operation: "write the ESP", disk: "this machine".to_owned(), source }
    })
}

/// Does `work` while the ESP of `disk` is mounted at `place`.
fn mounted<T>(disk: &Disk, place: &Path, work: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    let (device, _) = disk.named(ESP.name).ok_or_else(missing)?;
    fs::create_dir_all(place)?;
    mount(&device, place)?;
    let done = work();
    // One that failed does not stay in the way.
    let unmounted = sys::mount::unmount(place);
    let done = done?;
    unmounted.map(|()| done)
}

/// Mounts the ESP of `disk` at `root`, in place of one whose disk is lost; false if it is there
/// already. Blocks.
pub(super) fn instead(root: &Path, disk: &Disk) -> Result<bool, Error> {
    if is_mounted(root, disk) {
        return Ok(false);
    }
    let failed = |source| Error::Copy { operation: "mount the ESP", disk: disk.name(), source };
    let Some((device, _)) = disk.named(ESP.name) else { return Ok(false) };
    // A file that is open there stays with the lost disk until it is closed; an earlier attempt may
    // have unmounted it.
    match rustix::mount::unmount(root, UnmountFlags::DETACH) {
        Err(errno) if errno != rustix::io::Errno::INVAL => return Err(failed(errno.into())),
        _ => {}
    }
    mount(&device, root).map_err(failed)?;
    Ok(true)
}

/// Whether the ESP of `disk` is mounted at `root`. Blocks.
pub(super) fn is_mounted(root: &Path, disk: &Disk) -> bool {
    let device = disk.named(ESP.name).and_then(|(device, _)| fs::metadata(device).ok());
    match (device, fs::metadata(root)) {
        (Some(device), Ok(root)) => device.rdev() == root.dev(),
        _ => false,
    }
}

fn mount(device: &Path, place: &Path) -> io::Result<()> {
    let quiet = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC | MountFlags::NOATIME;
    let mounted = Mount::new(device.display().to_string(), place, "vfat");
    mounted.flags(quiet).options(OPTIONS).apply().map_err(io::Error::other)
}

fn sync(root: &Path, place: &Path, files: &BTreeSet<PathBuf>) -> io::Result<()> {
    for path in files {
        let (from, to) = (root.join(path), place.join(path));
        if is_record(path) {
            record(&from, &to)?;
        } else {
            file(&from, &to)?;
        }
    }
    fat::flush(place)
}

/// Removes the kernel images at `place` that are not at `root`.
fn prune(root: &Path, place: &Path) -> io::Result<()> {
    let wanted = look(root)?;
    if !root.join(esp::LOADER).is_file() {
        // The disk was pulled meanwhile.
        return Err(io::Error::other(format!("{} is not there", esp::LOADER)));
    }
    for path in look(place)?.into_keys() {
        if path.starts_with(KERNELS) && !wanted.contains_key(&path) {
            fs::remove_file(place.join(path))?;
        }
    }
    fat::flush(place)
}

/// What the ESP at `place` has beyond the one at `root`: no programs where firmware starts
/// nothing from it, as where a power cut tore a file of it.
fn newer_at(root: &Path, place: &Path) -> io::Result<Newer> {
    // Without keys, firmware starts a kernel image in the place of the loader.
    let programs = |at: &Path| -> io::Result<BTreeMap<PathBuf, Vec<u8>>> {
        let found = look(at)?.into_keys().filter(|path| path.starts_with(PROGRAMS));
        found.map(|path| Ok((without_tries(&path), digest(&at.join(&path))?))).collect()
    };
    let mut newer = Newer::default();
    for path in Esp::in_place().into_iter().filter(|path| !path.starts_with(REPORTS)) {
        let wanted = match in_place::read(&place.join(&path)) {
            Ok(found) => found.content,
            // It has nothing better.
            Err(files::Error::Damaged { .. }) => continue,
            Err(error) => return Err(io::Error::other(error)),
        };
        // A record that cannot be read differs from any other.
        if in_place::read(&root.join(&path)).ok().map(|found| found.content) != Some(wanted.clone())
        {
            newer.records.push((path, wanted));
        }
    }
    let starts = match fs::metadata(place.join(esp::LOADER)) {
        Ok(loader) => loader.is_file(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => false,
        Err(error) => return Err(error),
    };
    newer.programs = starts && programs(root).ok() != Some(programs(place)?);
    Ok(newer)
}

/// The digest of a file, which may be as large as the ESP.
fn digest(path: &Path) -> io::Result<Vec<u8>> {
    let mut hash = Sha256::new();
    io::copy(&mut File::open(path)?, &mut hash)?;
    Ok(hash.finalize().to_vec())
}

/// The name of a kernel image without the tries that the loader counts in it.
fn without_tries(path: &Path) -> PathBuf {
    let name = path.file_stem().unwrap_or_default().to_string_lossy();
    let name = name.split_once('+').map_or(&*name, |(name, _)| name);
    path.with_file_name(name)
}

/// One of the records that a node keeps on the ESP.
fn record(from: &Path, to: &Path) -> io::Result<()> {
    // The disk was pulled meanwhile: that is not a record without content.
    fs::metadata(from)?;
    let wanted = in_place::read(from).map_err(io::Error::other)?.content;
    if in_place::read(to).is_ok_and(|found| found.alike && found.content == wanted) {
        return Ok(());
    }
    in_place::write(to, wanted.as_deref()).map_err(io::Error::other)
}

/// Any other file: whole, or as before.
fn file(from: &Path, to: &Path) -> io::Result<()> {
    let wanted = match fs::read(from) {
        Ok(wanted) => wanted,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    // One of another length is another one: what the other disk has may be of any length.
    let same = |found: fs::Metadata| found.len() == wanted.len() as u64;
    if fs::metadata(to).is_ok_and(same) && fs::read(to).is_ok_and(|found| found == wanted) {
        return Ok(());
    }
    let folder = to.parent().unwrap_or(Path::new("/"));
    fs::create_dir_all(folder)?;
    let unfinished = folder.join(UNFINISHED);
    let mut file = File::create(&unfinished)?;
    file.write_all(&wanted)?;
    file.sync_all()?;
    fat::rename(&unfinished, to)
}

#[cfg(test)]
#[path = "esp_tests.rs"]
mod tests;
