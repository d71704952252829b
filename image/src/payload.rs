//! Brings the locked packages here and unpacks them, once for every checkout.
//!
//! ```text
//! payload.lock --> debs/<sha256>.deb --> trees/<hash of the lock>/  <-- target/payload/root
//!              apt                   dpkg-deb
//! ```
//!
//! Package files are kept by their hash, trees by the hash of the whole lock:
//! neither ever changes, so several builds may share them. The folder is
//! `POLIS_CACHE` when that is set, else it is below `target/`.
//!
//! Invariants:
//! - A file enters `debs/` only under the hash that it has, and is unpacked only
//!   if it still has it.
//! - A tree appears whole or not at all (unpacked aside, then renamed).
//! - One process at a time writes, under a file lock.

use std::{
    fs::{self, File},
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    sync::{
        Mutex,
        atomic::{AtomicU64, Ordering},
        mpsc,
    },
    thread,
    time::Duration,
};

use crate::{
    apt::Apt,
    digest::{hash, sha256},
    elf,
    error::{At as _, Error, Result},
    lock::{Lock, Package},
    mirror::Mirror,
    packages::{PROGRAMS, TOOLS},
    program,
    step::Observer,
};

/// Items of work at a time. Each is a process of its own, and mirrors ask for moderation.
const WORKERS: usize = 4;
/// How often the progress of downloads is looked at.
const TICK: Duration = Duration::from_millis(100);
/// Folders that Debian has merged: links must be there before anything is unpacked.
const MERGED: [&str; 4] = ["bin", "sbin", "lib", "lib64"];

/// The unpacked payload.
#[derive(Clone, Debug)]
pub(crate) struct Payload {
    /// Where the packages are unpacked.
    pub(crate) root: PathBuf,
    /// What they are.
    pub(crate) lock: Lock,
}

/// Where packages are kept, and where they come from.
#[derive(Clone, Debug)]
pub struct Source {
    /// The lock file.
    pub lock: PathBuf,
    /// Folder for package files and unpacked trees.
    pub cache: PathBuf,
    /// A mirror's URL; the host's own when absent.
    pub mirror: Option<String>,
}

impl Source {
    /// Renews the lock file from the current indices and returns it.
    ///
    /// # Errors
    ///
    /// There is no mirror, its indices are not signed by Debian, or it lacks a package.
    pub fn update(&self) -> Result<Lock> {
        let mirror = Mirror::find(self.mirror.as_deref())?;
        let _guard = self.guard()?;
        let lock = Apt::open(&self.cache.join("apt"), &mirror)?.resolve(&mirror)?;
        fs::write(&self.lock, lock.print()).at("write", &self.lock)?;
        Ok(lock)
    }

    /// Where the payload of the lock file is, or will be, unpacked.
    ///
    /// # Errors
    ///
    /// The lock file is absent or wrong.
    pub fn root(&self) -> Result<PathBuf> {
        Ok(self.tree(&self.read()?))
    }

    /// Reads the lock file.
    pub(crate) fn read(&self) -> Result<Lock> {
        if !self.lock.exists() {
            return Err(Error::NoLock { path: self.lock.clone() });
        }
        Lock::parse(&fs::read_to_string(&self.lock).at("read", &self.lock)?)
    }

    /// Where the tree of this lock is, or will be.
    pub(crate) fn tree(&self, lock: &Lock) -> PathBuf {
        self.cache.join("trees").join(&hash(lock.print().as_bytes())[..16])
    }

    /// Downloads what is missing and unpacks all of it, unless that was done before.
    pub(crate) fn prepare(&self, lock: &Lock, observer: &dyn Observer) -> Result<()> {
        let tree = self.tree(lock);
        if tree.exists() {
            return Ok(());
        }
        let _guard = self.guard()?;
        if tree.exists() {
            // Another process was quicker.
            return Ok(());
        }
        self.download(lock, observer)?;
        let aside = self.cache.join("trees").join(format!("new-{}", std::process::id()));
        self.unpack(lock, &aside, observer)?;
        elf::closure(&aside, PROGRAMS)?;
        elf::closure(&aside, TOOLS)?;
        fs::rename(&aside, &tree).at("put in place", &tree)
    }

    fn guard(&self) -> Result<File> {
        fs::create_dir_all(&self.cache).at("make", &self.cache)?;
        let path = self.cache.join("guard");
        let file = File::create(&path).at("create", &path)?;
        file.lock().at("lock", &path)?;
        Ok(file)
    }

    fn deb(&self, package: &Package) -> PathBuf {
        self.cache.join("debs").join(format!("{}.deb", package.sha256))
    }

    /// Whether the file of `package` is there with the hash by which it is called:
    /// whatever the cache went through since, nothing else is unpacked.
    fn has(&self, package: &Package) -> bool {
        sha256(&self.deb(package)).is_ok_and(|hash| hash == package.sha256)
    }

    fn download(&self, lock: &Lock, observer: &dyn Observer) -> Result<()> {
        let missing: Vec<&Package> =
            lock.packages.iter().filter(|package| !self.has(package)).collect();
        if missing.is_empty() {
            return Ok(());
        }
        let mirror = Mirror::find(self.mirror.as_deref())?;
        let apt = Apt::open(&self.cache.join("apt"), &mirror)?;
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
        let fetch = |package: &&Package| {
            let target = self.deb(package);
            let part = target.with_extension("part");
            apt.fetch(&mirror, package, &part)?;
            if sha256(&part)? != package.sha256 {
                let output = "what arrived has another hash".to_owned();
                let (package, version) = (package.name.clone(), package.version.clone());
                return Err(Error::Fetch { package, version, output });
            }
            fs::rename(&part, &target).at("put in place", &target)
        };
        parallel(&missing, fetch, || observer.progress("packages", arrived().min(total), total))?;
        observer.progress("packages", total, total);
        Ok(())
    }

    fn unpack(&self, lock: &Lock, root: &Path, observer: &dyn Observer) -> Result<()> {
        if root.exists() {
            fs::remove_dir_all(root).at("clear", root)?;
        }
        for name in MERGED {
            let folder = root.join("usr").join(name);
            fs::create_dir_all(&folder).at("make", &folder)?;
            let link = root.join(name);
            symlink(Path::new("usr").join(name), &link).at("make", &link)?;
        }
        let total = lock.packages.iter().map(|package| package.size).sum();
        let done = AtomicU64::new(0);
        let unpack = |package: &Package| {
            program::run(
                program::host("dpkg-deb").arg("--extract").arg(self.deb(package)).arg(root),
            )?;
            done.fetch_add(package.size, Ordering::Relaxed);
            Ok(())
        };
        parallel(&lock.packages, unpack, || {
            observer.progress("unpacking", done.load(Ordering::Relaxed), total);
        })?;
        observer.progress("unpacking", total, total);
        Ok(())
    }
}

/// Does `work` for each item, a few at a time, and calls `tick` meanwhile.
/// Stops taking items after the first failure, which it returns.
pub(crate) fn parallel<T: Sync>(
    items: &[T],
    work: impl Fn(&T) -> Result<()> + Sync,
    mut tick: impl FnMut(),
) -> Result<()> {
    let queue = Mutex::new(items.iter());
    let next = || queue.lock().unwrap_or_else(std::sync::PoisonError::into_inner).next();
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
        let lock = folder.path().join("payload.lock");
        let source = Source { lock, cache: folder.path().to_owned(), mirror: None };
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
        let source = Source {
            lock: folder.path().join("payload.lock"),
            cache: folder.path().to_owned(),
            mirror: None,
        };
        let error = source.read().unwrap_err();
        assert!(error.help().unwrap().contains("cargo xtask image --update-payload"));
    }
}
