//! The disk of a volume: finds, makes, opens and mounts it.
//!
//! Any disk of the machine may hang. So each is read on a thread of its own, once for all volumes
//! and for a bounded time (`detached`), and each step on the disk of a volume is noted (`steps`).

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use futures::future::join_all;
use polis_wire::parameters::{Selector, VolumeName};
use tracing::{info, warn};
use uuid::{Uuid, uuid};

use super::record::{self, Entry, Record};
use crate::install::disks::{Disk, Disks};
use crate::install::{content, select};
use crate::storage::apply::{self, apply, before_unlock};
use crate::storage::deadline::{Bounded, LARGE, SMALL, Words};
use crate::storage::detached::{self, ANSWER_MAX, Key as DiskKey, Pending, detached, name_of};
use crate::storage::health::Devices;
use crate::storage::key::Key;
use crate::storage::luks::OpenError;
use crate::storage::machine::{self, Live, MOUNT_OPTIONS, Target};
use crate::storage::plan::{self, Place, Plan};
use crate::storage::steps::{Late, Noted, Steps};
use crate::storage::table::{self, Partition, Table};
use crate::storage::{Backing, Kind};
use polis_base::files::{self, Dir};
use polis_base::sys::block;
use polis_runtime::logtree::Sink;
use polis_runtime::supervisor::blocking;

/// The type and the name of the partition.
const TYPE_ID: Uuid = uuid!("0c5ec8b2-6f0b-4f0c-9c6f-3a2f6b0f8d51");
const NAME: &str = "POLIS-VOLUME";
/// The label of the file system.
const LABEL: &str = "polis-volume";

/// The directory that pods see, and its mode: which user writes is the matter of the pod.
const CONTENT: &str = "content";
const CONTENT_MODE: u32 = 0o777;
/// As that of the data partition: what was never written; see `storage::wipe`.
const HIDDEN: &str = ".unwritten";

/// The names of the steps.
const WORDS: Words = Words {
    protect: "encrypting the volume",
    mount: "mounting the volume",
    settle: "writing the initial free space of the volume",
    clear: "wiping the volume",
    grow: "growing the volume",
};

/// Why a volume is not mounted.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The record of volumes cannot be used.
    #[error(transparent)]
    Record(#[from] record::Error),
    /// Not exactly one disk fits.
    #[error("{source}; the disks of this machine are: {}", disks.join(", "))]
    Select {
        /// Which.
        source: select::Refusal,
        /// Each with the reason why it does not fit.
        disks: Vec<String>,
    },
    /// The disk has data.
    #[error("the disk {disk} is not empty: it has {found}; wipe it, or choose another one")]
    Occupied {
        /// The kernel's name of it.
        disk: String,
        /// What it has.
        found: String,
    },
    /// No disk has the partition of the volume.
    #[error(
        "no disk of this machine has its partition {partition}; put its disk back{}",
        or_check(unread)
    )]
    Missing {
        /// The GUID.
        partition: Uuid,
        /// The disks whose tables cannot be read, each with the reason.
        unread: Vec<String>,
    },
    /// Several have it.
    #[error("{} all have its partition {partition}; take the copy out", disks.join(", "))]
    Several {
        /// The GUID.
        partition: Uuid,
        /// The kernel's names.
        disks: Vec<String>,
    },
    /// Some disks did not answer, and one of them may be the one.
    #[error(
        "{} did not answer within {} seconds, and may have the volume; check the disk, or pull it",
        disks.join(", "),
        ANSWER_MAX.as_secs()
    )]
    Silent {
        /// The kernel's names.
        disks: Vec<String>,
    },
    /// The list of disks does not settle: another one that fits may come.
    #[error(
        "disks of this machine come and go: {}; check the cables of these disks, or pull them",
        disks.join(", ")
    )]
    Restless {
        /// The kernel's names of those that came or went last.
        disks: Vec<String>,
    },
    /// A step is late.
    #[error(transparent)]
    Late(Late),
    /// The disk cannot be used.
    #[error("cannot {operation} the disk {disk}")]
    Disk {
        /// The attempted operation.
        operation: &'static str,
        /// The kernel's name of it.
        disk: String,
        /// The error of the kernel.
        source: io::Error,
    },
    /// Its table cannot be used.
    #[error("cannot use the partition table of {disk}")]
    Table {
        /// The kernel's name of it.
        disk: String,
        /// Why not.
        source: table::Error,
    },
    /// It has no room, or not what the node has put there.
    #[error("the disk {disk} cannot be used for the volume")]
    Refused {
        /// The kernel's name of it.
        disk: String,
        /// Why not.
        source: plan::Refusal,
    },
    /// Its protection is not the one that it was made with, or it is not whole any more.
    #[error("the disk {disk} was changed: its partition is not as this node has made it")]
    Changed {
        /// The kernel's name of it.
        disk: String,
    },
    /// The key in the record does not open it.
    #[error("the key of the volume does not open it")]
    Key,
    /// A step failed.
    #[error(transparent)]
    Apply(#[from] apply::Error),
    /// Its directories cannot be made.
    #[error(transparent)]
    Files(#[from] files::Error),
}

/// The other remedy, where one of these disks may be the missing one.
fn or_check(unread: &[String]) -> String {
    match unread {
        [] => String::new(),
        disks => format!(", or check what cannot be read: {}", disks.join(", ")),
    }
}

/// A mounted volume.
#[derive(Debug)]
pub(super) struct Opened {
    pub(super) live: Live,
    pub(super) partition: Partition,
}

impl Opened {
    pub(super) fn disk_name(&self) -> String {
        name_of(&self.live.disk)
    }

    /// The devices whose messages are about it.
    pub(super) fn devices(&self) -> Devices {
        self.live.devices(&self.partition)
    }
}

/// The disks of this machine, and the record of volumes.
#[derive(Clone, Debug)]
pub(super) struct Machine {
    pub(super) sys: PathBuf,
    pub(super) dev: PathBuf,
    /// The disk that the machine runs from.
    pub(super) medium: PathBuf,
    /// Where volumes are mounted.
    pub(super) disks: Dir,
    pub(super) record: Record,
    pub(super) log: Sink,
    /// The reads of all volumes.
    pub(super) reads: Reads,
    /// The step of this volume.
    pub(super) steps: Steps,
}

/// What is being read of the disks. Clones share it.
#[derive(Clone, Debug, Default)]
pub(super) struct Reads {
    all: Disks,
    /// The table of each disk, or why it cannot be read; `None` where there is no sound one.
    tables: Pending<DiskKey, Option<Result<Table, String>>>,
}

/// The tables of the disks.
#[derive(Debug, Default)]
struct Tables {
    /// By the name of the disk.
    read: Vec<(String, Table)>,
    /// The names of the disks that did not answer.
    silent: Vec<String>,
    /// The names of those that do not read, each with the reason.
    unread: Vec<String>,
}

impl Machine {
    /// The disks of the machine.
    pub(super) async fn disks(&self) -> Vec<Disk> {
        self.reads.all.list(&self.sys, &name_of(&self.medium)).await
    }

    /// Mounts the volume, after making it where it is not whole; `None` as long as more disks
    /// may appear that matter.
    pub(super) async fn open(
        &self,
        name: &VolumeName,
        selector: Option<&Selector>,
        kind: Kind,
        disks: &[Disk],
        settled: bool,
    ) -> Result<Option<Opened>, Error> {
        let found = self.find(name, selector, kind, disks, settled).await?;
        let Some((disk, entry)) = found else { return Ok(None) };
        let opened = self.mount(&disk, &entry, self.target(name)).await?;
        let (record, content) = (self.record.clone(), opened.live.target.mount.join(CONTENT));
        let what = "making the directory that pods see";
        self.on(&disk, what, move || show(&record, entry, &content)).await?;
        Ok(Some(opened))
    }

    /// Takes a step on this disk: does `work` on a thread of its own.
    async fn on<T: Send + 'static>(
        &self,
        disk: &Path,
        what: &'static str,
        work: impl FnOnce() -> Result<T, Error> + Send + 'static,
    ) -> Result<T, Error> {
        let name = name_of(disk);
        let done = self.steps.during(&name, what, SMALL, detached(work)).await;
        done.map_err(|source| Error::Disk { operation: "work on", disk: name, source })?
    }

    fn target(&self, name: &VolumeName) -> Target {
        let mount = self.disks.path().join(name.as_str());
        let hidden = mount.join(HIDDEN);
        Target { mount, hidden, mapper: format!("polis-volume-{name}"), label: LABEL }
    }

    /// The disk of the volume, with a table that has its partition.
    async fn find(
        &self,
        name: &VolumeName,
        selector: Option<&Selector>,
        kind: Kind,
        disks: &[Disk],
        settled: bool,
    ) -> Result<Option<(PathBuf, Entry)>, Error> {
        let (machine, volume) = (self.clone(), name.clone());
        let known = blocking(move || machine.known(&volume)).await?;
        let Tables { read, silent, unread } = self.tables(disks).await;
        if let Some(entry) = &known {
            let has =
                |(_name, table): &&(String, Table)| partition_of(table, entry.partition).is_some();
            let found: Vec<String> =
                read.iter().filter(has).map(|(name, _)| name.clone()).collect();
            if let [disk] = &found[..] {
                return Ok(Some((self.dev.join(disk), entry.clone())));
            }
            if !found.is_empty() {
                return Err(Error::Several { partition: entry.partition, disks: found });
            }
        }
        if !settled {
            return Ok(None);
        }
        // The partition may be on one of these.
        if known.is_some() && !silent.is_empty() {
            return Err(Error::Silent { disks: silent });
        }
        let entry = match known {
            Some(entry) if entry.whole => {
                return Err(Error::Missing { partition: entry.partition, unread });
            }
            Some(entry) => entry,
            None => Entry::new(name, kind),
        };
        // A volume that was begun, and that the parameters do not name any more.
        let Some(selector) = selector else {
            return Err(Error::Missing { partition: entry.partition, unread });
        };
        let disk = select::choose(disks, selector)
            .map_err(|source| Error::Select { source, disks: select::explain(disks, selector) })?;
        if silent.contains(&disk.name) {
            return Err(Error::Silent { disks: vec![disk.name.clone()] });
        }
        let path = self.dev.join(&disk.name);
        let (machine, chosen, new) = (self.clone(), disk.clone(), entry.clone());
        let create = move || machine.create(&chosen, &new);
        self.on(&path, "writing the partition table", create).await?;
        info!(volume = %name, %disk, "the disk is taken for a volume");
        Ok(Some((path, entry)))
    }

    /// What the record has of the volume; makes its mount point. Blocks.
    fn known(&self, name: &VolumeName) -> Result<Option<Entry>, Error> {
        self.disks.create()?;
        Dir::private(self.disks.path().join(name.as_str())).create()?;
        Ok(self.record.get(name)?)
    }

    /// The tables of all these disks but the one that the machine runs from.
    async fn tables(&self, disks: &[Disk]) -> Tables {
        let others = disks.iter().filter(|disk| !disk.medium);
        let names: Vec<String> = others.map(|disk| disk.name.clone()).collect();
        let sys = self.sys.clone();
        let keys = blocking(move || {
            names.into_iter().map(|name| detached::key(&sys, name)).collect::<Vec<DiskKey>>()
        });
        let keys = keys.await;
        // What else is being read was pulled.
        self.reads.tables.keep(&keys);
        let reads: Vec<_> = keys
            .iter()
            .map(|key| {
                let path = self.dev.join(&key.0);
                self.reads.tables.answer(key.clone(), || detached(move || read_table(&path)))
            })
            .collect();
        let answers = join_all(reads).await;
        let mut tables = Tables::default();
        for ((name, _number), answer) in keys.into_iter().zip(answers) {
            match answer {
                Some(Some(Ok(table))) => tables.read.push((name, table)),
                Some(Some(Err(why))) => tables.unread.push(format!("{name} ({why})")),
                Some(None) => {}
                None => tables.silent.push(name),
            }
        }
        tables
    }

    /// Writes the table of a new volume on an empty disk; the record has it before. Blocks.
    fn create(&self, disk: &Disk, entry: &Entry) -> Result<(), Error> {
        let name = || disk.name.clone();
        let failed = |operation| move |source| Error::Disk { operation, disk: name(), source };
        let path = self.dev.join(&disk.name);
        // Fails while anything uses the disk.
        let file = content::open(&path).map_err(failed("open"))?;
        // What a power cut leaves of this table.
        let begun = table::read_headless(&file)
            .is_some_and(|table| partition_of(&table, entry.partition).is_some());
        if !begun && let Some(found) = content::found(&file).map_err(failed("read"))? {
            return Err(Error::Occupied { disk: name(), found });
        }
        let size = block::size(&file).map_err(failed("measure"))?;
        let block_size = block::logical_block_size(&file).map_err(failed("measure"))?;
        let refused = |source| Error::Refused { disk: name(), source };
        let table = planned(size, u64::from(block_size), entry.partition).map_err(refused)?;
        // Behind the blank start there may be the data of an earlier use.
        let content = machine::read_content(&path, &table, &table.partitions[0]);
        plan::spare(&content.map_err(failed("read"))?).map_err(refused)?;
        self.record.put(entry)?;
        table::create(&file, &table).map_err(|source| Error::Table { disk: name(), source })
    }

    /// Takes the steps to the mounted volume.
    async fn mount(&self, disk: &Path, entry: &Entry, target: Target) -> Result<Opened, Error> {
        let (path, id) = (disk.to_owned(), entry.partition);
        let (table, plan) = self.on(disk, "reading the disk", move || look(&path, id)).await?;
        let changed = || Error::Changed { disk: name_of(disk) };
        let fits = match &plan {
            Plan::Unlock { kind, .. } => *kind == entry.kind,
            Plan::Mount { .. } => entry.kind == Kind::Insecure,
            Plan::Finish { .. } => !entry.whole,
            Plan::Create { .. } | Plan::Clear { .. } => false,
        };
        if !fits {
            return Err(changed());
        }
        let keys = entry.keys().ok_or(Error::Key)?;
        let key = Key::Passphrase(keys.passphrase.clone());
        let live = Live {
            disk: disk.to_owned(),
            target,
            mount_options: MOUNT_OPTIONS,
            backing: Backing::Partition,
            block_size: table.block_size,
            kind: entry.kind,
            keys: Some(keys).filter(|_| entry.kind != Kind::Insecure),
            log: self.log.clone(),
        };
        let name = name_of(disk);
        let mounted = Box::pin(self.take_steps(&live, &name, &key, table, plan)).await;
        let close = || self.steps.during(&name, "closing the volume", SMALL, live.close());
        let partition = or_closed(mounted, close).await?;
        Ok(Opened { live, partition })
    }

    /// Opens and mounts the partition of the plan, on the disk `name`.
    async fn take_steps(
        &self,
        live: &Live,
        name: &str,
        key: &Key,
        table: Table,
        plan: Plan,
    ) -> Result<Partition, Error> {
        let watch = Noted { disk: name, steps: &self.steps };
        let noted = Bounded { machine: live, watch: &watch, words: WORDS };
        let plan = match plan {
            Plan::Unlock { partition, kind, grow } => {
                let grown = Box::pin(before_unlock(&noted, table.clone(), partition, grow)).await?;
                if !live.is_open() {
                    let opened = Box::pin(live.open_with(&grown, key, None));
                    let opened = self.steps.during(name, "opening the volume", LARGE, opened);
                    opened.await.map_err(|error| match error {
                        OpenError::Unfit { .. } => Error::Key,
                        OpenError::Failed(source) => {
                            apply::Error::Open { device: live.raw(&grown), source }.into()
                        }
                    })?;
                }
                Plan::Unlock { partition: grown, kind, grow: None }
            }
            plan => plan,
        };
        Ok(Box::pin(apply(&noted, table, plan)).await?)
    }
}

/// The result of the steps. Where they failed, what they have opened is closed: the disk may be
/// another one at the next attempt.
async fn or_closed<T, E, F: Future<Output = io::Result<()>>>(
    mounted: Result<T, E>,
    close: impl FnOnce() -> F,
) -> Result<T, E> {
    if mounted.is_err()
        && let Err(error) = close().await
    {
        warn!(error = &error as &dyn std::error::Error, "a volume that is not mounted stays open");
    }
    mounted
}

/// The table of a new volume: one partition, as large as the disk allows, marked as one that is
/// being made.
fn planned(size: u64, block_size: u64, id: Uuid) -> Result<Table, plan::Refusal> {
    let blocks = size / block_size.max(1);
    let mut table = Table { disk: table::new_id(), block_size, blocks, partitions: Vec::new() };
    if size < plan::SIZE_MIN {
        return Err(plan::Refusal::TooSmall { free: size });
    }
    let (Place::Free(partition) | Place::Made(partition)) = plan::place(&table, id)?;
    table.partitions.push(Partition { name: NAME.to_owned(), type_id: TYPE_ID, ..partition });
    Ok(table)
}

/// The table of a disk, if there is a sound one, or why the disk does not read. Blocks.
fn read_table(disk: &Path) -> Option<Result<Table, String>> {
    found(table::read(&File::open(disk).ok()?))
}

/// What the read of a table says of its disk.
fn found(read: Result<Table, table::Error>) -> Option<Result<Table, String>> {
    match read {
        Ok(table) => Some(Ok(table)),
        Err(table::Error::Io { source, .. }) => Some(Err(source.to_string())),
        // It reads, and has no table.
        Err(_none) => None,
    }
}

fn partition_of(table: &Table, id: Uuid) -> Option<&Partition> {
    table.partitions.iter().find(|partition| partition.type_id == TYPE_ID && partition.id == id)
}

/// Looks at the disk with this partition, and decides. Blocks.
fn look(path: &Path, id: Uuid) -> Result<(Table, Plan), Error> {
    let disk = || name_of(path);
    let table = machine::read_table(path);
    let table = table.map_err(|source| Error::Table { disk: disk(), source })?;
    let partition = partition_of(&table, id).cloned();
    let partition = partition.ok_or(Error::Missing { partition: id, unread: Vec::new() })?;
    let content = machine::read_content(path, &table, &partition);
    let content =
        content.map_err(|source| Error::Disk { operation: "read", disk: disk(), source })?;
    let plan = plan::plan(&table, Place::Made(partition), &content, table::new_id);
    Ok((table, plan.map_err(|source| Error::Refused { disk: disk(), source })?))
}

/// Notes that the volume is whole, and then makes the directory that pods see: what they have
/// written is never made again, also if the record takes no change now. Blocks.
fn show(record: &Record, mut entry: Entry, content: &Path) -> Result<(), Error> {
    if !entry.whole {
        entry.whole = true;
        record.put(&entry)?;
    }
    make_content(content)
}

/// Makes the directory that pods see. A mode that an operator has given it stays. Blocks.
fn make_content(path: &Path) -> Result<(), Error> {
    use std::os::unix::fs::PermissionsExt as _;
    let failed = |source| files::Error::Io { operation: "make", path: path.to_owned(), source };
    match std::fs::create_dir(path) {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => return Ok(()),
        Err(error) => return Err(failed(error).into()),
    }
    let mode = std::fs::Permissions::from_mode(CONTENT_MODE);
    Ok(std::fs::set_permissions(path, mode).map_err(failed)?)
}

#[cfg(test)]
#[path = "disk_tests.rs"]
mod tests;
