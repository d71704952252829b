//! Volumes survive a power cut between any two steps, on a disk with projects in memory.
//!
//! The disk has a journal, as XFS has: a change is durable once an inode that it touched, or
//! that a later change touched, was flushed. A power cut takes back any number of the newest
//! changes that are not, and never one that is older than one that stays.

use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use super::*;
use crate::csi::claims::tests::UID;
use crate::host::quota::Projects;

const GIB: u64 = 1 << 30;

/// A disk of 16 GiB, whose power fails after a number of steps. Directories are real.
#[derive(Debug)]
pub(crate) struct Fake {
    pub(crate) size: u64,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// By inode, so that they follow a directory to its next name.
    projects: std::collections::BTreeMap<u64, Project>,
    limits: std::collections::BTreeMap<Project, Limits>,
    /// Bytes and files that workloads use.
    used: (u64, u64),
    /// The changes that are not durable, the oldest first.
    journal: Vec<Change>,
    /// Steps until the power fails; `None` for never.
    left: Option<u32>,
    /// The result of a sweep.
    sweep_fails: bool,
}

/// A change of the disk: the inodes that it touched, and how to take it back.
#[derive(Debug)]
struct Change {
    inodes: Vec<u64>,
    before: Before,
}

#[derive(Debug)]
enum Before {
    /// The directory did not exist.
    NoDirectory(PathBuf),
    /// The directory had another name.
    Named { from: PathBuf, to: PathBuf },
    /// An empty directory of this project was there.
    Directory(PathBuf, Option<Project>),
    /// The inode had this project.
    Project(u64, Option<Project>),
    /// The project had these limits.
    Limits(Project, Option<Limits>),
}

impl Fake {
    pub(crate) fn new() -> Arc<Self> {
        let state = State {
            projects: Default::default(),
            limits: Default::default(),
            used: (0, 0),
            journal: Vec::new(),
            left: None,
            sweep_fails: false,
        };
        Arc::new(Self { size: 16 * GIB, state: Mutex::new(state) })
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The power fails after so many steps.
    pub(crate) fn cut_after(&self, steps: Option<u32>) {
        self.state().left = steps;
    }

    /// A step; an error once the power has failed.
    pub(crate) fn step(&self) -> io::Result<()> {
        let mut state = self.state();
        match state.left.as_mut() {
            Some(0) => Err(io::Error::other("the power has failed")),
            Some(left) => {
                *left -= 1;
                Ok(())
            }
            None => Ok(()),
        }
    }

    /// The number of changes that a power cut may take back.
    pub(crate) fn unflushed(&self) -> usize {
        self.state().journal.len()
    }

    /// The power has failed, and these newest changes are lost.
    pub(crate) fn lose(&self, changes: usize) {
        for _ in 0..changes {
            let Some(change) = self.state().journal.pop() else { return };
            match change.before {
                Before::NoDirectory(path) => {
                    // An inode that is made again has no project.
                    self.state().projects.remove(&inode(&path).unwrap());
                    std::fs::remove_dir_all(path).unwrap();
                }
                Before::Named { from, to } => std::fs::rename(to, from).unwrap(),
                Before::Directory(path, project) => {
                    std::fs::create_dir(&path).unwrap();
                    let inode = inode(&path).unwrap();
                    self.state().projects.extend(project.map(|project| (inode, project)));
                }
                Before::Project(inode, None) => drop(self.state().projects.remove(&inode)),
                Before::Project(inode, Some(project)) => {
                    self.state().projects.insert(inode, project);
                }
                Before::Limits(project, None) => drop(self.state().limits.remove(&project)),
                Before::Limits(project, Some(limits)) => {
                    self.state().limits.insert(project, limits);
                }
            }
        }
        // The rest was on the disk.
        self.state().journal.clear();
    }

    fn changed(&self, inodes: Vec<u64>, before: Before) {
        self.state().journal.push(Change { inodes, before });
    }

    pub(crate) fn workloads_use(&self, bytes: u64, files: u64) {
        self.state().used = (bytes, files);
    }

    fn limits_of(&self, number: u32) -> Option<Limits> {
        self.state().limits.get(&Project::new(number).unwrap()).copied()
    }
}

fn inode(path: &Path) -> io::Result<u64> {
    Ok(path.symlink_metadata()?.ino())
}

impl Projects for Fake {
    fn size(&self) -> io::Result<u64> {
        Ok(self.size)
    }

    fn project(&self, directory: &Path) -> io::Result<Option<Project>> {
        Ok(self.state().projects.get(&inode(directory)?).copied())
    }

    fn set_project(&self, directory: &Path, project: Project) -> io::Result<()> {
        self.step()?;
        let limited = self.state().limits.contains_key(&project);
        assert!(limited, "a directory in a project without limits");
        let inode = inode(directory)?;
        let before = self.state().projects.insert(inode, project);
        if before != Some(project) {
            self.changed(vec![inode], Before::Project(inode, before));
        }
        Ok(())
    }

    fn usage(&self, project: Project) -> io::Result<Option<Usage>> {
        let state = self.state();
        let inodes = state.projects.values().filter(|one| **one == project).count() as u64;
        let (bytes, files) = if project.number() == quota::WORKLOADS { state.used } else { (0, 0) };
        let limits = state.limits.get(&project);
        Ok(limits.map(|limits| Usage { bytes, inodes: inodes + files, limits: *limits }))
    }

    fn set_limits(&self, project: Project, limits: Limits) -> io::Result<()> {
        self.step()?;
        let before = self.state().limits.insert(project, limits);
        if before != Some(limits) {
            // No file's inode: only a later change of one carries it to the disk.
            self.changed(Vec::new(), Before::Limits(project, before));
        }
        Ok(())
    }
}

impl Disk for Fake {
    fn make(&self, directory: &Path, mode: u32) -> io::Result<()> {
        self.step()?;
        if !directory.exists() {
            std::fs::create_dir(directory)?;
            let parent = inode(directory.parent().unwrap())?;
            let made = inode(directory)?;
            // The kernel gives it the project of its parent.
            let project = self.state().projects.get(&parent).copied();
            self.state().projects.extend(project.map(|project| (made, project)));
            self.changed(vec![parent, made], Before::NoDirectory(directory.to_owned()));
        }
        use std::os::unix::fs::PermissionsExt as _;
        std::fs::set_permissions(directory, std::fs::Permissions::from_mode(mode))
    }

    fn write(&self, file: &files::File, content: &[u8]) -> io::Result<()> {
        self.step()?;
        file.write(content).map_err(files::Error::into_io)?;
        // It flushes the file and its directory, and so all that was before.
        self.state().journal.clear();
        Ok(())
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.step()?;
        std::fs::rename(from, to)?;
        let parent = inode(from.parent().unwrap())?;
        let before = Before::Named { from: from.to_owned(), to: to.to_owned() };
        self.changed(vec![parent, inode(to)?], before);
        Ok(())
    }

    fn remove(&self, directory: &Path) -> io::Result<()> {
        self.step()?;
        let gone = inode(directory);
        std::fs::remove_dir(directory)?;
        // The kernel forgets the project with the inode.
        let project = self.state().projects.remove(&gone?);
        let parent = inode(directory.parent().unwrap())?;
        self.changed(vec![parent], Before::Directory(directory.to_owned(), project));
        Ok(())
    }

    fn sweep(&self, volumes: &Path) -> io::Result<Swept> {
        let swept = trash::sweep(volumes)?;
        if self.state().sweep_fails { Err(io::Error::other("immutable")) } else { Ok(swept) }
    }

    fn flush(&self, directory: &Path) -> io::Result<()> {
        self.step()?;
        let inode = inode(directory)?;
        let mut state = self.state();
        let newest = state.journal.iter().rposition(|change| change.inodes.contains(&inode));
        let durable = newest.map_or(0, |newest| newest + 1);
        state.journal.drain(..durable);
        Ok(())
    }
}

pub(crate) fn store(folder: &Path, disk: &Arc<Fake>) -> Store {
    Store::new(Dir::private(folder.join("volumes")), disk.clone())
}

fn id(last: u8) -> VolumeId {
    VolumeId::of_claim(&format!("{}{last:02x}", &UID[..34])).unwrap()
}

/// A store in which `prepare` was done, and `work` was cut off after each number of steps in
/// turn, with each number of changes lost that the disk had not flushed, and then repeated,
/// until it needs no more steps; returns that number.
fn with_cuts(
    prepare: impl Fn(&Store),
    work: impl Fn(&Store) -> Result<(), Error>,
    check: impl Fn(&Store, &Fake),
) -> u32 {
    let (mut steps, mut lost) = (0, 0);
    while steps < 100 {
        let folder = tempfile::tempdir().unwrap();
        let disk = Fake::new();
        let store = store(folder.path(), &disk);
        prepare(&store);
        disk.cut_after(Some(steps));
        let done = work(&store).is_ok();
        disk.cut_after(None);
        let unflushed = disk.unflushed();
        assert!(!done || unflushed == 0, "what is done is not lost");
        disk.lose(lost);
        if !done {
            work(&store).unwrap();
        }
        assert_eq!(disk.unflushed(), 0, "cut off after {steps} steps, {lost} lost");
        check(&store, &disk);
        if done {
            return steps;
        }
        (steps, lost) = if lost < unflushed { (steps, lost + 1) } else { (steps + 1, 0) };
    }
    panic!("it never ends");
}

#[test]
fn a_volume_is_made_whole_whatever_step_the_power_fails_after() {
    let make = |store: &Store, last, bytes| store.make(&id(last), "default/data", bytes);
    let steps = with_cuts(
        |store| {
            make(store, 1, GIB).unwrap();
        },
        |store| {
            let made = make(store, 2, GIB + 1).map(drop);
            // A volume that looks whole is whole.
            if let Some(usage) = store.usage(&id(2)).unwrap() {
                assert_eq!(usage.limits.bytes, GIB + UNIT);
            }
            made
        },
        |store, disk| {
            let project = |path: &Path| disk.project(path).unwrap().unwrap().number();
            assert_eq!(project(&store.place(&id(1))), VOLUME_FIRST);
            assert_eq!(project(&store.place(&id(2))), VOLUME_FIRST + 1);
            let content = store.content(&id(2));
            assert_eq!(project(&content), VOLUME_FIRST + 1);
            assert_eq!(content.metadata().unwrap().mode() & 0o7777, 0o777);
            let outer = content.parent().unwrap().metadata().unwrap();
            assert_eq!(outer.mode() & 0o7777, 0o700);
            // Made again, it is the same, with what was written to it.
            std::fs::write(content.join("file"), "words").unwrap();
            assert_eq!(make(store, 2, GIB).unwrap(), GIB + UNIT);
            assert_eq!(std::fs::read_to_string(content.join("file")).unwrap(), "words");
            // A node that starts again finds all of it on the disk.
            assert_eq!(store.ids().unwrap(), [id(1), id(2)]);
            make(store, 3, UNIT).unwrap();
            assert_eq!(project(&store.place(&id(3))), VOLUME_FIRST + 2);
        },
    );
    assert_eq!(steps, 9);
}

#[test]
fn a_removed_volume_is_never_seen_again_and_its_project_is_free_only_at_the_end() {
    let folder = tempfile::tempdir().unwrap();
    let disk = Fake::new();
    let store = store(folder.path(), &disk);
    store.make(&id(1), "default/data", GIB).unwrap();
    std::fs::create_dir_all(store.content(&id(1)).join("a/b/c")).unwrap();
    std::fs::write(store.content(&id(1)).join("a/b/secret"), "words").unwrap();
    for steps in 0..2 {
        disk.cut_after(Some(steps));
        store.trash(&id(1)).unwrap_err();
    }
    disk.cut_after(None);
    store.trash(&id(1)).unwrap();
    assert_eq!(disk.unflushed(), 0);
    assert_eq!(store.usage(&id(1)).unwrap(), None);
    assert_eq!(store.ids().unwrap(), []);
    store.trash(&id(1)).unwrap();
    // While it is being removed, its room and its project are taken.
    let all = disk.limits_of(quota::WORKLOADS).unwrap().bytes;
    store.make(&id(2), "default/other", GIB).unwrap();
    let other = disk.project(&store.place(&id(2))).unwrap().unwrap();
    assert_eq!(other.number(), VOLUME_FIRST + 1);
    assert_eq!(std::fs::read_dir(store.content(&id(2))).unwrap().count(), 0);
    // The same name begins empty, too.
    store.make(&id(1), "default/data", GIB).unwrap();
    assert_eq!(std::fs::read_dir(store.content(&id(1))).unwrap().count(), 0);
    store.trash(&id(1)).unwrap();
    let mut calls = 0;
    while store.sweep().unwrap() == Swept::Part {
        calls += 1;
        assert!(calls < 100);
    }
    assert_eq!(store.names().unwrap(), [id(2).to_string()]);
    // Two volumes less than at most, one more than at first: workloads have their room back.
    assert_eq!(disk.limits_of(quota::WORKLOADS).unwrap().bytes, all);
    assert_eq!(store.sweep().unwrap(), Swept::Nothing);
}

#[test]
fn a_volume_that_cannot_be_read_is_not_taken_for_a_missing_one() {
    let folder = tempfile::tempdir().unwrap();
    let disk = Fake::new();
    let store = store(folder.path(), &disk);
    store.make(&id(1), "default/data", GIB).unwrap();
    // A link to itself is a directory that is there and does not open.
    for place in [store.content(&id(1)), store.place(&id(1))] {
        std::fs::rename(&place, folder.path().join("damaged")).unwrap();
        std::os::unix::fs::symlink(&place, &place).unwrap();
        let failed = [store.usage(&id(1)).map(drop), store.enlarge(&id(1), 2 * GIB).map(drop)];
        for error in failed.map(Result::unwrap_err) {
            let is_disk = matches!(&error, Error::Disk { path, .. } if *path == place);
            assert!(is_disk, "{error}");
        }
        std::fs::remove_file(&place).unwrap();
        std::fs::rename(folder.path().join("damaged"), &place).unwrap();
    }
    assert_eq!(store.usage(&id(1)).unwrap().unwrap().limits.bytes, GIB);
    assert_eq!(store.usage(&id(2)).unwrap(), None);
}

#[test]
fn what_does_not_fit_is_refused_and_changes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let disk = Fake::new();
    let store = store(folder.path(), &disk);
    let first = 10 * GIB - (GIB >> 2);
    store.make(&id(1), "default/first", first).unwrap();
    // 16 GiB, of which 4 are the node's, a third of one XFS's, and 1 is for images at the least.
    let error = store.make(&id(2), "default/second", GIB).unwrap_err();
    assert!(error.is_full(), "{error}");
    assert!(!store.place(&id(2)).exists());
    let error = store.enlarge(&id(1), 12 * GIB).unwrap_err();
    assert!(error.is_full(), "{error}");
    assert_eq!(store.usage(&id(1)).unwrap().unwrap().limits.bytes, first);
    let error = store.make(&id(2), "default/second", u64::MAX).unwrap_err();
    assert!(error.is_full(), "{error}");
    // There is room, and images have taken it already.
    disk.workloads_use(GIB + (GIB >> 1), 0);
    let error = store.make(&id(2), "default/second", GIB >> 1).unwrap_err();
    assert!(error.is_full() && error.to_string().contains("use 1536 MiB already"), "{error}");
    // They would have nothing left for another byte, or for another file.
    let left = quota::limits(disk.size, first + (GIB >> 1)).unwrap();
    for (bytes, files, resource) in [(left.bytes, 0, "MiB"), (0, left.inodes, "files")] {
        disk.workloads_use(bytes, files);
        let error = store.make(&id(2), "default/second", GIB >> 1).unwrap_err();
        assert!(error.is_full() && error.to_string().contains(resource), "{error}");
    }
    assert!(!store.place(&id(2)).exists());
    disk.workloads_use(0, 0);
    store.make(&id(2), "default/second", GIB >> 1).unwrap();
    let limits = [quota::WORKLOADS, VOLUME_FIRST, VOLUME_FIRST + 1];
    let sum: u64 = limits.map(|number| disk.limits_of(number).unwrap().bytes).iter().sum();
    assert!(sum + quota::reserve(disk.size) <= disk.size, "{sum}");
}

#[test]
fn a_volume_of_all_the_room_fits_and_a_larger_one_does_not() {
    let folder = tempfile::tempdir().unwrap();
    let disk = Fake::new();
    let store = store(folder.path(), &disk);
    assert!(store.room().unwrap() > 10 * GIB, "no directory is there yet");
    store.make(&id(1), "default/first", GIB).unwrap();
    // Workloads that use nothing, many bytes, and many files.
    for (bytes, files) in [(0, 0), (4 * GIB, 0), (0, 400_000)] {
        disk.workloads_use(bytes, files);
        let room = store.room().unwrap();
        assert!(room > GIB && room.is_multiple_of(UNIT), "{room}");
        let error = store.make(&id(2), "default/second", room + UNIT).unwrap_err();
        assert!(error.is_full(), "{error}");
        assert_eq!(store.make(&id(2), "default/second", room).unwrap(), room);
        assert_eq!(store.room().unwrap(), 0);
        store.trash(&id(2)).unwrap();
        assert_eq!(store.room().unwrap(), 0, "its content is there");
        while store.sweep().unwrap() == Swept::Part {}
        assert_eq!(store.room().unwrap(), room);
    }
    // There is less than nothing.
    disk.workloads_use(15 * GIB, 0);
    assert_eq!(store.room().unwrap(), 0);
}

#[test]
fn what_cannot_be_removed_does_not_keep_the_room_of_the_rest() {
    let folder = tempfile::tempdir().unwrap();
    let disk = Fake::new();
    let store = store(folder.path(), &disk);
    store.make(&id(1), "default/first", GIB).unwrap();
    let one = disk.limits_of(quota::WORKLOADS).unwrap().bytes;
    store.make(&id(2), "default/second", GIB).unwrap();
    store.trash(&id(2)).unwrap();
    disk.state().sweep_fails = true;
    let error = store.sweep().unwrap_err();
    assert!(error.to_string().starts_with("cannot sweep "), "{error}");
    assert_eq!(disk.limits_of(quota::WORKLOADS).unwrap().bytes, one);
}

#[test]
fn a_volume_grows_and_never_shrinks() {
    let folder = tempfile::tempdir().unwrap();
    let disk = Fake::new();
    let store = store(folder.path(), &disk);
    assert!(matches!(store.enlarge(&id(1), GIB), Err(Error::Missing { .. })));
    store.make(&id(1), "default/data", GIB).unwrap();
    for steps in 0..2 {
        disk.cut_after(Some(steps));
        store.enlarge(&id(1), 2 * GIB).unwrap_err();
        assert_eq!(disk.limits_of(VOLUME_FIRST).unwrap(), quota::limits_of(GIB));
    }
    disk.cut_after(None);
    assert_eq!(store.enlarge(&id(1), 2 * GIB).unwrap(), 2 * GIB);
    assert_eq!(store.enlarge(&id(1), GIB).unwrap(), 2 * GIB);
    assert_eq!(store.make(&id(1), "default/data", GIB).unwrap(), 2 * GIB);
    assert_eq!(disk.limits_of(VOLUME_FIRST).unwrap(), quota::limits_of(2 * GIB));
}

#[test]
fn only_an_empty_volume_is_abandoned() {
    let folder = tempfile::tempdir().unwrap();
    let disk = Fake::new();
    let store = store(folder.path(), &disk);
    assert_eq!(store.empty().unwrap(), []);
    store.make(&id(1), "default/first", GIB).unwrap();
    store.make(&id(2), "default/second", GIB).unwrap();
    std::fs::write(store.content(&id(2)).join("file"), "").unwrap();
    assert_eq!(store.empty().unwrap(), [(id(1), "default/first".to_owned())]);
    assert!(!store.abandon(&id(2)).unwrap());
    assert!(store.content(&id(2)).join("file").is_file());
    for steps in 0..2 {
        disk.cut_after(Some(steps));
        store.abandon(&id(1)).unwrap_err();
    }
    disk.cut_after(None);
    assert!(store.abandon(&id(1)).unwrap());
    assert_eq!(store.ids().unwrap(), [id(2)]);
}

/// The kernel's own quota, where this host has one.
#[test]
fn a_full_volume_is_full_at_its_size() {
    let Ok(folder) = std::env::var("POLIS_XFS") else {
        println!("skipped: POLIS_XFS names no directory of an XFS with project quotas");
        return;
    };
    let folder = tempfile::tempdir_in(folder).unwrap();
    let kernel = Kernel { mount: folder.path().to_owned() };
    let store = Store::new(Dir::private(folder.path().join("volumes")), Arc::new(kernel));
    store.make(&id(1), "default/data", 8 * UNIT).unwrap();
    let file = store.content(&id(1)).join("file");
    let mut file = std::fs::File::create(file).unwrap();
    let written = fill(&mut file);
    assert!((7 * UNIT..=8 * UNIT).contains(&written), "{written}");
    store.enlarge(&id(1), 16 * UNIT).unwrap();
    let more = fill(&mut file);
    assert!((7 * UNIT..=9 * UNIT).contains(&more), "{more}");
    let usage = store.usage(&id(1)).unwrap().unwrap();
    assert_eq!(usage.limits, quota::limits_of(16 * UNIT));
    drop(file);
    store.trash(&id(1)).unwrap();
    while store.sweep().unwrap() == Swept::Part {}
    assert_eq!(store.names().unwrap(), [""; 0]);
}

/// Writes until the disk is full; returns the bytes.
fn fill(file: &mut std::fs::File) -> u64 {
    use std::io::Write as _;
    let piece = vec![7; 64 << 10];
    let mut written = 0;
    loop {
        match file.write(&piece).and_then(|count| file.sync_data().map(|()| count)) {
            Ok(count) => written += count as u64,
            Err(error) => {
                assert_eq!(error.kind(), io::ErrorKind::StorageFull);
                return written;
            }
        }
        assert!(written < 64 * UNIT, "the quota does not hold");
    }
}
