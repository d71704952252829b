//! What is done beside the look at a mirror: the search for a disk, its filling, and the copy of
//! what starts the machine.
//!
//! ```text
//! search --a disk to take--> fill --the kernel is done--> copy, anew --> both
//! both --something changed---------------------------------> copy
//! ```
//!
//! What may take long, or hang, is one [`Job`] at a time.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::Duration;

use futures::FutureExt as _;
use futures::future::BoxFuture;
use tokio::time::Instant;
use tracing::info;

use super::Monitor;
use crate::mirror::disks::Disk;
use crate::mirror::esp::{self, Seen};
use crate::mirror::plan::{Leg, Used};
use crate::mirror::reads::Reads;
use crate::mirror::take::claim;
use crate::mirror::{Error, State, copy, device, system};
use crate::storage::deadline::LARGEST;
use crate::storage::detached::detached;
use polis_runtime::supervisor::blocking;

/// How often a disk is looked for that could be taken.
const SEARCH: Duration = Duration::from_secs(5);
/// FAT keeps times of two seconds: a change within them is not seen, so a changed file is copied
/// again when they are over.
const GRAIN: Duration = Duration::from_secs(3);

/// Work on other disks, which may take long, or hang.
pub(super) type Job = BoxFuture<'static, Done>;

/// What has ended of it.
pub(super) enum Done {
    /// The files of the ESP of the disk that the machine runs from.
    Looked(Result<Seen, Error>),
    /// The ESP as it was looked at before, and how many bytes of the systems were written.
    Copied(Seen, Result<u64, Error>),
    /// The source and a disk that can be filled from it.
    Claimed(Reads, Box<Result<Option<(Disk, Disk)>, Error>>),
}

/// The files of the ESP that the other disk has.
#[derive(Default)]
pub(super) struct Copied {
    /// Those at the last copy.
    seen: Seen,
    /// Those that changed since, or may have, and since when.
    changed: Option<(BTreeSet<PathBuf>, Instant)>,
    /// Whether kernel images came or went, or nothing was compared yet.
    systems: bool,
    /// Whether the node was ready: before that, records alone are copied.
    pub(super) ready: bool,
    /// When a failed copy is tried again.
    retry: Option<Instant>,
}

impl Monitor<'_> {
    /// A job has ended.
    pub(super) async fn finish(&mut self, done: Done) -> Result<(), Error> {
        match done {
            // The other disk was lost meanwhile.
            Done::Looked(_) | Done::Copied(..) if self.leaving => Ok(()),
            // It is looked at again once both answer.
            Done::Looked(_) if self.silent.is_some() => Ok(()),
            Done::Looked(now) => {
                self.copy(now?);
                Ok(())
            }
            Done::Claimed(reads, claimed) => {
                self.reads = reads;
                // A fault that stays is logged once.
                let claimed = (*claimed)?;
                self.cause = None;
                match claimed {
                    Some((source, target)) => self.fill(source, target).await,
                    None => Ok(()),
                }
            }
            Done::Copied(seen, copied) => {
                let result = match copied {
                    Ok(written) => {
                        self.copied_all(seen, written);
                        self.whole().await
                    }
                    Err(error) => Err(error),
                };
                if result.is_err() {
                    self.copied.failed();
                }
                result
            }
        }
    }

    fn copied_all(&mut self, seen: Seen, written: u64) {
        if self.copied.ready && self.copied.systems {
            let name = self.mirror.disk(self.mirror.started.other()).map(Disk::name);
            info!(disk = name, mib = written >> 20, "it has what starts the machine");
        }
        self.copied.done(seen);
        self.cause = None;
    }

    /// A disk that was filled has all data, and what starts the machine: it is one of both.
    async fn whole(&mut self) -> Result<(), Error> {
        let (Used::Only(source), Some(target)) = (self.mirror.used, self.filled) else {
            return Ok(());
        };
        // A loss is noted at the next look.
        if !self.device().await?.1.is_empty() {
            return Ok(());
        }
        let [one, other] = [source, target].map(|leg| self.mirror.disk(leg).cloned());
        let (Some(one), Some(other)) = (one, other) else { return Ok(()) };
        blocking(move || other.confirm(&one)).await?;
        if let Err(error) = self.raise(Used::Both).await {
            // It takes no record, so it cannot count.
            self.lose(target).await?;
            return Err(error);
        }
        self.filled = None;
        self.publish_backing();
        info!("the mirror is whole");
        self.publish(State::Whole);
        Ok(())
    }

    /// Looks for a disk to take, from time to time.
    pub(super) fn search(&mut self) -> Result<(), Error> {
        if self.searched.is_some_and(|at| at.elapsed() < SEARCH) {
            return Ok(());
        }
        self.searched = Some(Instant::now());
        self.mirror.dropped.take_if(|disk| !disk.is_there(&self.service.config.sys));
        if let Some(disk) = &self.mirror.dropped {
            let why = "it fails: pull it, and push in another one".to_owned();
            return Err(Error::Unfit { disk: disk.name(), why });
        }
        let Some(source) = self.mirror.source().cloned() else { return Ok(()) };
        let (config, selector) = (self.service.config.clone(), self.service.selector());
        let (mut reads, steps) = (std::mem::take(&mut self.reads), self.steps.clone());
        let claimed = async move {
            let claimed = claim(config, selector, source, &mut reads, &steps).await;
            Done::Claimed(reads, Box::new(claimed))
        };
        self.job = Some(claimed.boxed());
        Ok(())
    }

    /// Has the kernel fill a disk.
    async fn fill(&mut self, mut source: Disk, target: Disk) -> Result<(), Error> {
        let leg = target.leg();
        self.mirror.disks[source.leg().index()] = Some(source.clone());
        info!(disk = target.name(), from = source.name(), "the disk is filled from the other one");
        let other = target.clone();
        blocking(move || {
            source.forget()?;
            let (first, second) = match leg {
                Leg::First => (&other, &source),
                Leg::Second => (&source, &other),
            };
            device::replace(&device::both(first, second, Some(leg)))
        })
        .await?;
        self.mirror.disks[leg.index()] = Some(target);
        self.filled = Some(leg);
        // The whole of it, to a disk that has nothing.
        self.copied = Copied { ready: true, ..Copied::new() };
        self.publish(State::Filling { percent: 0 });
        Ok(())
    }

    /// Looks whether there is anything to copy: that reads a disk, too.
    pub(super) fn compare(&mut self) {
        let Some((from, _)) = self.ends() else { return };
        if self.copied.retry.is_some_and(|at| Instant::now() < at) {
            return;
        }
        let root = self.service.config.esp.clone();
        let looked = blocking(move || {
            let failed =
                |source| Error::Copy { operation: "read the ESP", disk: from.name(), source };
            esp::look(&root).map_err(failed)
        });
        self.job = Some(looked.map(Done::Looked).boxed());
    }

    /// From which disk is copied, to which.
    fn ends(&self) -> Option<(Disk, Disk)> {
        let started = self.mirror.started;
        let [from, to] = [started, started.other()].map(|leg| self.mirror.disk(leg).cloned());
        from.zip(to).filter(|_| self.mirror.used.has(started))
    }

    /// Copies what has changed of the ESP, and the systems if kernel images came or went; all of
    /// both to a disk that has just been filled.
    fn copy(&mut self, now: Seen) {
        let Some((from, to)) = self.ends() else { return };
        let Some((now, files)) = self.copied.next_files(now) else {
            // After a copy that failed there is something to copy: no fault is left.
            self.cause = None;
            return;
        };
        let config = self.service.config.clone();
        let (all, systems) = (self.copied.ready, self.copied.ready && self.copied.systems);
        let anew = self.filled.is_some();
        let (name, steps) = (to.name(), self.steps.clone());
        let work = move || {
            let copy_systems = || {
                let joined = Some(config.slot.as_str()).filter(|_| system::is_joined());
                let written = if systems { copy::systems(&from, &to, joined)? } else { 0 };
                if all && joined.is_none() {
                    system::join(&config.slot, &from, &to)?;
                }
                if anew {
                    esp::make(&config.esp, &to)?;
                }
                Ok::<_, Error>(written)
            };
            let copy_files = |files: &BTreeSet<PathBuf>, kernels| {
                esp::copy(&config.esp, &to, &config.other_esp, files, kernels)
            };
            in_order(early_ones(files, anew), all, copy_systems, copy_files)
        };
        let copied = async move {
            let what = "copying what starts the machine";
            let copied = steps.during(&name, what, LARGEST, detached(work)).await;
            let failed = |source| Error::Copy { operation: "copy the ESP", disk: name, source };
            Done::Copied(now, copied.map_err(failed).unwrap_or_else(Err))
        };
        self.job = Some(copied.boxed());
    }
}

/// The files that are copied before the systems, and those after them: an ESP that is made `anew`
/// has no place for any before.
fn early_ones(files: BTreeSet<PathBuf>, anew: bool) -> [BTreeSet<PathBuf>; 2] {
    let (early, late) = files.into_iter().partition(|path| !anew && esp::is_record(path));
    [early, late]
}

/// Copies the `early` files, the systems, and then the `late` files: with `all`, kernel images that
/// are gone go, too. A system that one of the disks does not read or write keeps no record back:
/// with the keys of before, the other disk would not open.
fn in_order(
    [early, late]: [BTreeSet<PathBuf>; 2],
    all: bool,
    copy_systems: impl FnOnce() -> Result<u64, Error>,
    copy_files: impl Fn(&BTreeSet<PathBuf>, bool) -> Result<(), Error>,
) -> Result<u64, Error> {
    if !early.is_empty() {
        copy_files(&early, false)?;
    }
    let written = copy_systems()?;
    if all || !late.is_empty() {
        copy_files(&late, all)?;
    }
    Ok(written)
}

impl Copied {
    /// Nothing was compared yet.
    pub(super) fn new() -> Self {
        Self { systems: true, ..Self::default() }
    }

    /// What of `now` counts, and the files of it to copy now; `None` if nothing changed.
    fn next_files(&mut self, mut now: Seen) -> Option<(Seen, BTreeSet<PathBuf>)> {
        if !self.ready {
            now.retain(|path, _| esp::is_record(path));
        }
        let new = |(path, facts): &(&PathBuf, &_)| self.seen.get(*path) != Some(*facts);
        let mut files: BTreeSet<PathBuf> =
            now.iter().filter(new).map(|(path, _)| path.clone()).collect();
        let gone = self.seen.keys().any(|path| !now.contains_key(path));
        let kernel = |path: &PathBuf| path.starts_with("EFI");
        self.systems |= gone || files.iter().any(kernel);
        let fresh = !files.is_empty() || gone;
        if let Some((changed, since)) = &self.changed {
            if !fresh && since.elapsed() < GRAIN {
                return None;
            }
            files.extend(changed.iter().cloned());
        } else if !(fresh || self.ready && self.systems) {
            return None;
        }
        self.changed = fresh.then(|| (files.clone(), Instant::now()));
        Some((now, files))
    }

    /// They were not copied, or not all of them: each is compared again. A second copy within the
    /// grain of times is of files whose times have not changed since the first.
    fn failed(&mut self) {
        (self.seen, self.changed, self.systems) = (Seen::new(), None, true);
        self.retry = Some(Instant::now() + SEARCH);
    }

    /// They were copied.
    fn done(&mut self, now: Seen) {
        (self.seen, self.retry) = (now, None);
        if self.ready {
            self.systems = false;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    const RECORD: &str = "polis/key_change.pb";
    const KERNEL: &str = "EFI/Linux/polis-2.efi";

    fn seen(files: &[(&str, u64)]) -> Seen {
        files.iter().map(|(path, length)| (PathBuf::from(path), (*length, None))).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn a_second_copy_that_fails_is_tried_again() {
        let now = || seen(&[(RECORD, 1)]);
        let mut copied = Copied::new();
        let (first, _) = copied.next_files(now()).unwrap();
        copied.done(first);
        tokio::time::advance(GRAIN).await;
        let (_, second) = copied.next_files(now()).unwrap();
        copied.failed();
        let (_, again) = copied.next_files(now()).unwrap();
        assert_eq!((second.len(), again), (1, second));
    }

    #[tokio::test(start_paused = true)]
    async fn records_are_copied_before_the_node_is_ready_and_the_rest_after() {
        let files = |found: Option<(Seen, BTreeSet<PathBuf>)>| {
            found.map(|(_, files)| {
                files.iter().map(|path| path.display().to_string()).collect::<Vec<_>>()
            })
        };
        let mut copied = Copied::new();
        let now = || seen(&[(RECORD, 1), (KERNEL, 5)]);
        let first = copied.next_files(now());
        copied.done(first.clone().unwrap().0);
        assert_eq!(files(first).unwrap(), [RECORD]);
        assert!(copied.systems, "the systems were not compared");
        // A change within the grain of FAT's times is copied once more.
        assert_eq!(copied.next_files(now()), None);
        tokio::time::advance(GRAIN).await;
        assert_eq!(files(copied.next_files(now())).unwrap(), [RECORD]);
        assert_eq!(copied.next_files(now()), None);
        copied.ready = true;
        let all = copied.next_files(now());
        assert!(copied.systems);
        copied.done(all.clone().unwrap().0);
        assert_eq!(files(all).unwrap(), [KERNEL]);
        assert!(!copied.systems);
        tokio::time::advance(GRAIN).await;
        copied.next_files(now()).unwrap();
        // A kernel image that went has both systems compared again.
        assert!(copied.next_files(seen(&[(RECORD, 1)])).is_some() && copied.systems);
    }

    #[test]
    fn a_system_that_cannot_be_copied_keeps_no_record_from_the_other_disk() {
        let set = |names: &[&str]| names.iter().map(PathBuf::from).collect::<BTreeSet<_>>();
        let copied = |anew, written: Option<u64>| {
            let done = RefCell::new(Vec::new());
            let systems = || {
                done.borrow_mut().push((set(&["systems"]), false));
                written.ok_or_else(|| Error::Copy {
                    operation: "copy the systems",
                    disk: "vdb".to_owned(),
                    source: std::io::ErrorKind::Other.into(),
                })
            };
            let files = |files: &BTreeSet<PathBuf>, kernels| {
                done.borrow_mut().push((files.clone(), kernels));
                Ok(())
            };
            let ended = in_order(early_ones(set(&[RECORD, KERNEL]), anew), true, systems, files);
            assert_eq!(ended.ok(), written);
            done.into_inner()
        };
        let [record, systems] = [RECORD, "systems"].map(|name| (set(&[name]), false));
        assert_eq!(copied(false, None), [record.clone(), systems.clone()]);
        // No kernel image names a system that is not there.
        let kernel = (set(&[KERNEL]), true);
        assert_eq!(copied(false, Some(7)), [record, systems.clone(), kernel]);
        // An ESP that is not there yet is made first.
        assert_eq!(copied(true, None), std::slice::from_ref(&systems));
        assert_eq!(copied(true, Some(7)), [systems, (set(&[RECORD, KERNEL]), true)]);
    }
}
