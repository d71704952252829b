//! The payload: Debian packages, fetched and unpacked once for every checkout.
//!
//! ```text
//! payload.lock --> debs/<sha256>.deb --> trees/<hash of the lock>/  <-- target/payload/root
//!              apt                   dpkg-deb
//! ```
//!
//! A mirror has the current version of a package only, so after some weeks it
//! lacks some of the locked ones:
//!
//! ```text
//! the mirror has every file -----------------------------------> the lock's tree
//!   | some are gone
//! the snapshot archive, if one is named, has them -------------> the lock's tree
//!   | some are gone there, too
//! the mirror has the same bytes under another path ------------> the lock's tree
//!   | it has other versions
//! `locked` --> refused          else --> today's tree, and settled/<hash of the lock>.lock
//! ```
//!
//! Today's packages are all taken from the archive as it is today, even those that the
//! mirror still has in the locked version: Debian tests and ships its current versions
//! together, and never tests a mixture.
//!
//! Package files are kept by their hash, trees by the hash of the whole lock: neither
//! ever changes, so several builds may share them. The folder is `POLIS_CACHE` if that
//! is set, else it is below `target/`.
//!
//! Invariants:
//! - A file enters `debs/` only under its own hash, and is unpacked only while the hash
//!   still matches. The hash is the lock's or that of a signed index.
//! - A tree appears whole or not at all (unpacked aside, then renamed).
//! - One process at a time writes, under a file lock.

use std::{
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
        mpsc,
    },
    thread,
    time::Duration,
};

use crate::{
    apt::{Apt, Fetched, Trust},
    difference,
    digest::{hash, sha256},
    elf,
    error::{At as _, Error, Result},
    guard,
    lock::{Lock, Package},
    manifest::Variant,
    mirror::Mirror,
    moved::Moved,
    packages::{Category, POLIS, Selection},
    program,
    step::{Observer, Silent, Unit},
};

/// Parallel items of work. Each is a process of its own, and mirrors ask for
/// moderation.
const WORKERS: usize = 4;
/// How often the progress of downloads is checked.
const TICK: Duration = Duration::from_millis(100);
/// Folders that Debian has merged: links must be there before anything is unpacked.
const MERGED: [&str; 4] = ["bin", "sbin", "lib", "lib64"];

/// The unpacked payload.
#[derive(Clone, Debug)]
pub(crate) struct Payload {
    /// Where the packages are unpacked.
    pub(crate) root: PathBuf,
    /// Its packages.
    pub(crate) lock: Lock,
    /// Those that differ from the lock file.
    pub(crate) moved: Vec<Moved>,
}

impl Payload {
    /// The package list of an image.
    pub(crate) fn listing(&self) -> String {
        difference::listing(&self.lock, &self.moved)
    }
}

/// The place of packages, and their sources.
#[derive(Clone, Debug)]
pub struct Source {
    /// The lock file.
    pub lock: PathBuf,
    /// Folder for package files and unpacked trees.
    pub cache: PathBuf,
    /// A mirror's URL; the host's own when absent.
    pub mirror: Option<String>,
    /// The URL of an archive that has old versions, laid out like a mirror. It is
    /// asked first for locked files that the mirror no longer has.
    pub snapshot: Option<String>,
    /// Whether to reject packages that differ from the lock.
    pub locked: bool,
    /// Which of the locked packages are used: those that an image of this variant is
    /// built from.
    pub variant: Variant,
    pub(crate) selection: Selection,
    pub(crate) trust: Trust,
}

/// A gap in a tree, and the category of the package that fills it.
#[derive(Debug, PartialEq, Eq)]
struct Lacking {
    category: Category,
    what: What,
}

#[derive(Debug, PartialEq, Eq)]
enum What {
    /// A library that a program or a library needs.
    Library { file: String, library: String },
    /// The package whose folder of documents another one shares.
    Package(String),
}

impl Source {
    /// Packages of the lock file `lock`, kept in the folder `cache`, from the host's mirror.
    #[must_use]
    pub fn new(lock: impl Into<PathBuf>, cache: impl Into<PathBuf>) -> Self {
        Self {
            lock: lock.into(),
            cache: cache.into(),
            mirror: None,
            snapshot: None,
            locked: false,
            variant: Variant::Base,
            selection: POLIS,
            trust: Trust::Debian,
        }
    }

    /// Renews the lock file, of all variants, from the current indices and returns it.
    ///
    /// # Errors
    ///
    /// The mirror is missing, its indices are not signed by Debian, or it lacks a
    /// package.
    pub fn update(&self) -> Result<Lock> {
        let mirror = Mirror::find(self.mirror.as_deref())?;
        let _guard = guard::hold(&self.cache, &Silent)?;
        let apt = self.apt(&mirror, Variant::Full)?;
        let lock = apt.resolve(&mirror, self.selection.packages(Variant::Full))?;
        fs::write(&self.lock, lock.print()).at("write", &self.lock)?;
        Ok(lock)
    }

    /// Where the payload is, or will be, unpacked.
    ///
    /// # Errors
    ///
    /// The lock file is absent or wrong.
    pub fn root(&self) -> Result<PathBuf> {
        let lock = self.read()?;
        let used = if self.tree(&lock).exists() { None } else { self.settled(&lock) };
        Ok(self.tree(&used.unwrap_or(lock)))
    }

    /// Reads the lock file, checks it against the package list, and returns the packages
    /// of the variant.
    pub(crate) fn read(&self) -> Result<Lock> {
        if !self.lock.exists() {
            return Err(Error::NoLock { path: self.lock.clone() });
        }
        let lock = Lock::parse(&fs::read_to_string(&self.lock).at("read", &self.lock)?)?;
        lock.check(self.selection)?;
        Ok(lock.of(self.selection, self.variant))
    }

    /// The path of the tree of this lock.
    pub(crate) fn tree(&self, lock: &Lock) -> PathBuf {
        self.cache.join("trees").join(key(lock))
    }

    /// The packages of an earlier build for a lock that the mirror no longer had, if
    /// their tree still exists. They stay in use, so that two builds have the same
    /// inputs.
    fn settled(&self, lock: &Lock) -> Option<Lock> {
        let text = fs::read_to_string(self.settled_file(lock)).ok()?;
        Lock::parse(&text).ok().filter(|used| self.tree(used).exists())
    }

    fn settled_file(&self, lock: &Lock) -> PathBuf {
        self.cache.join("settled").join(format!("{}.lock", key(lock)))
    }

    /// The payload of `lock` if it is unpacked already, in the lock's versions or in
    /// those that an earlier build settled on.
    pub(crate) fn ready(&self, lock: &Lock) -> Option<Payload> {
        if self.tree(lock).exists() {
            return Some(self.payload(lock, lock.clone()));
        }
        // A snapshot archive may have packages that the earlier build lacked.
        if self.locked || self.snapshot.is_some() {
            return None;
        }
        Some(self.payload(lock, self.settled(lock)?))
    }

    fn payload(&self, lock: &Lock, used: Lock) -> Payload {
        Payload { root: self.tree(&used), moved: difference::between(lock, &used), lock: used }
    }

    /// Downloads the missing packages and unpacks all of them, unless that is already
    /// done.
    ///
    /// # Errors
    ///
    /// The mirror is out of reach, or has other bytes than the lock or its index names;
    /// it no longer has the locked versions, which `locked` requires; or its current
    /// packages are not a complete payload.
    pub(crate) fn prepare(&self, lock: &Lock, observer: &dyn Observer) -> Result<Payload> {
        let _guard = guard::hold(&self.cache, observer)?;
        if let Some(payload) = self.ready(lock) {
            // Another process has already finished.
            return Ok(payload);
        }
        let Some(today) = self.fetch(lock, observer)? else {
            let draft = self.unpack(&lock.packages, observer)?;
            elf::closure(&draft, &self.selection.programs(self.variant))?;
            elf::closure(&draft, &self.selection.tools(self.variant))?;
            self.put_in_place(&draft, lock)?;
            return Ok(self.payload(lock, lock.clone()));
        };
        let used = self.follow(today, observer)?;
        let settled = self.settled_file(lock);
        let folder = self.cache.join("settled");
        fs::create_dir_all(&folder).at("make", &folder)?;
        fs::write(&settled, used.print()).at("write", &settled)?;
        Ok(self.payload(lock, used))
    }

    /// Fetches the files of `lock`; if that is not possible, returns the archive's
    /// current packages instead.
    fn fetch(&self, lock: &Lock, observer: &dyn Observer) -> Result<Option<Lock>> {
        let missing: Vec<&Package> =
            lock.packages.iter().filter(|package| !self.has(package)).collect();
        if missing.is_empty() {
            return Ok(None);
        }
        let mirror = Mirror::find(self.mirror.as_deref())?;
        let apt = self.apt(&mirror, self.variant)?;
        let mut gone = self.download(&apt, &mirror, &missing, observer)?;
        if let Some(snapshot) = &self.snapshot
            && !gone.is_empty()
        {
            gone = self.download(&apt, &Mirror::new(snapshot, None), &gone, observer)?;
        }
        if gone.is_empty() {
            return Ok(None);
        }
        let today = apt.resolve(&mirror, self.selection.packages(self.variant));
        if let Ok(today) = &today {
            // A security update that has become part of the release has another path.
            let elsewhere: Vec<&Package> = today
                .packages
                .iter()
                .filter(|now| gone.iter().any(|package| package.sha256 == now.sha256))
                .collect();
            self.download(&apt, &mirror, &elsewhere, observer)?;
            gone.retain(|package| !self.has(package));
            if gone.is_empty() {
                return Ok(None);
            }
        }
        if self.locked {
            let moved = difference::replaced(&gone, today.as_ref().ok());
            return Err(Error::NotLocked { moved });
        }
        today.map(Some)
    }

    /// Fetches and unpacks `today`'s packages, together with dependencies that are
    /// newer than the package list. Returns all packages used.
    fn follow(&self, mut today: Lock, observer: &dyn Observer) -> Result<Lock> {
        let mirror = Mirror::find(self.mirror.as_deref())?;
        let apt = self.apt(&mirror, self.variant)?;
        self.download_all(&apt, &mirror, &today.packages, observer)?;
        let draft = self.unpack(&today.packages, observer)?;
        let mut known: Option<Vec<Package>> = None;
        while let Some(Lacking { category, what }) = self.lacking(&draft, &today)? {
            let known = match &mut known {
                Some(known) => known,
                None => {
                    let names: Vec<&str> =
                        today.packages.iter().map(|package| package.name.as_str()).collect();
                    known.insert(apt.dependencies(&mirror, &names)?)
                }
            };
            known.retain(|package| today.packages.iter().all(|other| other.name != package.name));
            let package = self.bringing(&apt, &mirror, known, &what, observer)?;
            let package = Package { category, ..package };
            self.extract(&package, &draft)?;
            today.packages.push(package);
        }
        today.packages.sort_by(|a, b| (a.category, &a.name).cmp(&(b.category, &b.name)));
        self.put_in_place(&draft, &today)?;
        Ok(today)
    }

    /// The gap in the tree at `root`, if any.
    fn lacking(&self, root: &Path, lock: &Lock) -> Result<Option<Lacking>> {
        let programs = self.selection.programs(self.variant);
        let tools = self.selection.tools(self.variant);
        for (category, programs) in [(Category::Library, programs), (Category::Tool, tools)] {
            match elf::closure(root, &programs) {
                Ok(_) => {}
                Err(Error::Library { file, library }) => {
                    let what = What::Library { file, library };
                    return Ok(Some(Lacking { category, what }));
                }
                Err(other) => return Err(other),
            }
        }
        let documents = root.join("usr/share/doc");
        // A program's licence terms may be in the folder of another package.
        for package in lock.packages.iter().filter(|package| package.category.in_image()) {
            let Ok(shared) = fs::read_link(documents.join(&package.name)) else { continue };
            if !documents.join(&shared).exists() {
                let what = What::Package(shared.display().to_string());
                return Ok(Some(Lacking { category: package.category, what }));
            }
        }
        Ok(None)
    }

    /// The package among `known` that fills the gap.
    fn bringing(
        &self,
        apt: &Apt,
        mirror: &Mirror,
        known: &[Package],
        what: &What,
        observer: &dyn Observer,
    ) -> Result<Package> {
        let (file, library) = match what {
            What::Package(name) => {
                let package = known.iter().find(|package| package.name == *name);
                let package = package.ok_or_else(|| Error::NoPackage { package: name.clone() })?;
                self.download_all(apt, mirror, std::slice::from_ref(package), observer)?;
                return Ok(package.clone());
            }
            What::Library { file, library } => (file, library),
        };
        // A package of a library is named after it: `libab2` has `libab.so.2`. Under
        // any name it contains the file, and small packages are quick to search.
        let stem = library.split(".so").next().unwrap_or(library);
        let mut likely: Vec<&Package> =
            known.iter().filter(|package| package.name.starts_with("lib")).collect();
        likely.sort_by_key(|package| (!package.name.starts_with(stem), package.size));
        for package in likely {
            self.download_all(apt, mirror, std::slice::from_ref(package), observer)?;
            if self.brings(package, library)? {
                return Ok(package.clone());
            }
        }
        Err(Error::Library { file: file.clone(), library: library.clone() })
    }

    /// Whether a fetched package has this library.
    fn brings(&self, package: &Package, library: &str) -> Result<bool> {
        let listing =
            program::run(program::host("dpkg-deb").arg("--contents").arg(self.deb(package)))?;
        // With merged folders and without; behind an arrow is the target of a link.
        let end = format!("{}/{library}", program::LIBRARIES.trim_start_matches("usr"));
        Ok(String::from_utf8_lossy(&listing)
            .lines()
            .filter_map(|line| line.split(" -> ").next())
            .any(|path| path.ends_with(&end)))
    }

    fn apt(&self, mirror: &Mirror, variant: Variant) -> Result<Apt> {
        Apt::open(&self.cache.join("apt"), mirror, self.trust, variant)
    }

    fn deb(&self, package: &Package) -> PathBuf {
        self.cache.join("debs").join(format!("{}.deb", package.sha256))
    }

    /// Whether the file of `package` exists and matches the hash in its name: only such
    /// a file is unpacked, even from a damaged cache.
    fn has(&self, package: &Package) -> bool {
        sha256(&self.deb(package)).is_ok_and(|hash| hash == package.sha256)
    }

    /// Fetches files that the archive's index names.
    fn download_all(
        &self,
        apt: &Apt,
        mirror: &Mirror,
        packages: &[Package],
        observer: &dyn Observer,
    ) -> Result<()> {
        let missing: Vec<&Package> = packages.iter().filter(|one| !self.has(one)).collect();
        match self.download(apt, mirror, &missing, observer)?[..] {
            [] => Ok(()),
            [package, ..] => Err(Error::Vanished {
                package: package.name.clone(),
                version: package.version.clone(),
            }),
        }
    }

    /// Fetches files; returns those that the archive does not have.
    fn download<'a>(
        &self,
        apt: &Apt,
        mirror: &Mirror,
        missing: &[&'a Package],
        observer: &dyn Observer,
    ) -> Result<Vec<&'a Package>> {
        let folder = self.cache.join("debs");
        fs::create_dir_all(&folder).at("make", &folder)?;
        let total = missing.iter().map(|package| package.size).sum();
        let arrived = || -> u64 {
            missing
                .iter()
                .flat_map(|package| [self.deb(package), self.deb(package).with_extension("part")])
                .filter_map(|path| Some(fs::metadata(path).ok()?.len()))
                .sum()
        };
        let gone = Mutex::new(Vec::new());
        let fetch = |package: &&'a Package| {
            let target = self.deb(package);
            let part = target.with_extension("part");
            if apt.fetch(mirror, package, &part)? == Fetched::Gone {
                gone.lock().unwrap_or_else(PoisonError::into_inner).push(*package);
                return Ok(());
            }
            if sha256(&part)? != package.sha256 {
                let output = "the download has another hash".to_owned();
                let (package, version) = (package.name.clone(), package.version.clone());
                return Err(Error::Fetch { package, version, output });
            }
            fs::rename(&part, &target).at("put in place", &target)
        };
        parallel(missing, fetch, || {
            observer.progress("packages", arrived().min(total), total, Unit::Bytes);
        })?;
        observer.progress("packages", total, total, Unit::Bytes);
        let mut gone = gone.into_inner().unwrap_or_else(PoisonError::into_inner);
        gone.sort_by_key(|package| (package.category, &package.name));
        Ok(gone)
    }

    /// Unpacks fetched packages in a new folder, and returns its path.
    fn unpack(&self, packages: &[Package], observer: &dyn Observer) -> Result<PathBuf> {
        // A fixed name, since one process at a time writes: remains of a failure are
        // removed.
        let root = self.cache.join("trees/new");
        if root.exists() {
            fs::remove_dir_all(&root).at("clear", &root)?;
        }
        for name in MERGED {
            let folder = root.join("usr").join(name);
            fs::create_dir_all(&folder).at("make", &folder)?;
            let link = root.join(name);
            symlink(Path::new("usr").join(name), &link).at("make", &link)?;
        }
        let total = packages.iter().map(|package| package.size).sum();
        let done = AtomicU64::new(0);
        let unpack = |package: &Package| {
            self.extract(package, &root)?;
            done.fetch_add(package.size, Ordering::Relaxed);
            Ok(())
        };
        parallel(packages, unpack, || {
            observer.progress("unpacking", done.load(Ordering::Relaxed), total, Unit::Bytes);
        })?;
        observer.progress("unpacking", total, total, Unit::Bytes);
        Ok(root)
    }

    fn extract(&self, package: &Package, root: &Path) -> Result<()> {
        let mut dpkg = program::host("dpkg-deb");
        program::run(dpkg.arg("--extract").arg(self.deb(package)).arg(root)).map(drop)
    }

    fn put_in_place(&self, draft: &Path, lock: &Lock) -> Result<()> {
        let tree = self.tree(lock);
        if tree.exists() {
            // Another lock file led to the same packages.
            return fs::remove_dir_all(draft).at("clear", draft);
        }
        fs::rename(draft, &tree).at("put in place", &tree)
    }
}

/// Names a lock in the cache.
fn key(lock: &Lock) -> String {
    hash(lock.print().as_bytes())[..16].to_owned()
}

/// Does `work` for each item, a few at a time, and calls `tick` meanwhile.
/// Stops taking items after the first failure, which it returns.
pub(crate) fn parallel<T: Sync>(
    items: &[T],
    work: impl Fn(&T) -> Result<()> + Sync,
    mut tick: impl FnMut(),
) -> Result<()> {
    let queue = Mutex::new(items.iter());
    let next = || queue.lock().unwrap_or_else(PoisonError::into_inner).next();
    let (sender, receiver) = mpsc::sync_channel(items.len());
    thread::scope(|scope| {
        for _ in 0..WORKERS.min(items.len()) {
            let (next, work, sender) = (&next, &work, sender.clone());
            scope.spawn(move || {
                while let Some(item) = next() {
                    let outcome = work(item);
                    let failed = outcome.is_err();
                    // The receiver outlives this scope, and the channel holds every item.
                    sender.send(outcome).unwrap_or_default();
                    if failed {
                        while next().is_some() {}
                    }
                }
            });
        }
        drop(sender);
        let mut outcome = Ok(());
        loop {
            match receiver.recv_timeout(TICK) {
                Ok(Ok(())) | Err(mpsc::RecvTimeoutError::Timeout) => tick(),
                Ok(Err(error)) => outcome = outcome.and(Err(error)),
                Err(mpsc::RecvTimeoutError::Disconnected) => return outcome,
            }
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parallel_work_is_done_for_each_item_once() {
        let sum = AtomicU64::new(0);
        let items: Vec<u64> = (1..=100).collect();
        let add = |item: &u64| {
            sum.fetch_add(*item, Ordering::Relaxed);
            Ok(())
        };
        parallel(&items, add, || {}).unwrap();
        assert_eq!(sum.into_inner(), 5050);
    }

    #[test]
    fn parallel_work_returns_its_failure() {
        let items = [1, 2, 3];
        let fail = |item: &i32| if *item == 2 { Err(Error::NoMirror) } else { Ok(()) };
        assert!(parallel(&items, fail, || {}).is_err());
    }

    #[test]
    fn a_package_file_that_changed_in_the_cache_is_missing() {
        let folder = tempfile::tempdir().unwrap();
        let source = Source::new(folder.path().join("payload.lock"), folder.path());
        let package = Package {
            category: crate::packages::Category::Tool,
            name: "ab".to_owned(),
            version: "1".to_owned(),
            origin: crate::lock::Origin::Archive,
            size: 5,
            sha256: hash(b"whole"),
            path: "pool/main/a/ab.deb".to_owned(),
        };
        assert!(!source.has(&package));
        fs::create_dir(folder.path().join("debs")).unwrap();
        fs::write(source.deb(&package), "whole").unwrap();
        assert!(source.has(&package));
        fs::write(source.deb(&package), "whol").unwrap();
        assert!(!source.has(&package));
    }

    #[test]
    fn a_source_without_a_lock_file_names_the_command() {
        let folder = tempfile::tempdir().unwrap();
        let source = Source::new(folder.path().join("payload.lock"), folder.path());
        let error = source.read().unwrap_err();
        assert!(error.help().unwrap().contains("cargo xtask image --update-payload"));
    }
}
