//! The disk of a volume: finds, makes, opens and mounts it.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use polis_wire::parameters::{Selector, VolumeName};
use tracing::info;
use uuid::{Uuid, uuid};

use super::record::{self, Entry, Record};
use crate::install::disks::{self, Disk};
use crate::install::{content, select};
use crate::storage::apply::{self, apply, before_unlock};
use crate::storage::health::Devices;
use crate::storage::key::Key;
use crate::storage::luks::OpenError;
use crate::storage::machine::{self, Live, MOUNT_OPTIONS, Target};
use crate::storage::plan::{self, Place, Plan};
use crate::storage::table::{self, Partition, Table};
use crate::storage::{Ground, Kind};
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
    #[error("no disk of this machine has its partition {partition}; put its disk back")]
    Missing {
        /// The GUID.
        partition: Uuid,
    },
    /// Several have it.
    #[error("{} all have its partition {partition}; take the copy out", disks.join(", "))]
    Several {
        /// The GUID.
        partition: Uuid,
        /// The kernel's names.
        disks: Vec<String>,
    },
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
    /// Its content is not what the node has put there.
    #[error(transparent)]
    Refused(#[from] plan::Refusal),
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

/// A mounted volume.
#[derive(Debug)]
pub(super) struct Opened {
    pub(super) live: Live,
    pub(super) partition: Partition,
}

impl Opened {
    pub(super) fn disk_name(&self) -> String {
        self.live.disk.file_name().unwrap_or_default().to_string_lossy().into_owned()
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
}

impl Machine {
    /// The disks of the machine. Blocks.
    pub(super) fn disks(&self) -> Vec<Disk> {
        let medium = self.medium.file_name().unwrap_or_default().to_string_lossy();
        disks::list(&self.sys, &medium)
    }

    /// Mounts the volume, after making it where it is not whole; `None` as long as more disks
    /// may appear that matter.
    pub(super) async fn open(
        &self,
        name: &VolumeName,
        selector: Option<&Selector>,
        kind: Kind,
        disks: Vec<Disk>,
        settled: bool,
    ) -> Result<Option<Opened>, Error> {
        let (machine, name, selector) = (self.clone(), name.clone(), selector.cloned());
        let target = self.target(&name);
        let found = blocking(move || machine.find(&name, selector.as_ref(), kind, &disks, settled));
        let Some((disk, mut entry)) = found.await? else { return Ok(None) };
        let opened = self.mount(&disk, &entry, target).await?;
        let (record, content) = (self.record.clone(), opened.live.target.mount.join(CONTENT));
        blocking(move || {
            make_content(&content)?;
            if !entry.whole {
                entry.whole = true;
                record.put(&entry)?;
            }
            Ok::<_, Error>(())
        })
        .await?;
        Ok(Some(opened))
    }

    fn target(&self, name: &VolumeName) -> Target {
        let mount = self.disks.path().join(name.as_str());
        let hidden = mount.join(HIDDEN);
        Target { mount, hidden, mapper: format!("polis-volume-{name}"), label: LABEL }
    }

    /// The disk of the volume, with a table that has its partition. Blocks.
    fn find(
        &self,
        name: &VolumeName,
        selector: Option<&Selector>,
        kind: Kind,
        disks: &[Disk],
        settled: bool,
    ) -> Result<Option<(PathBuf, Entry)>, Error> {
        self.disks.create()?;
        Dir::private(self.disks.path().join(name.as_str())).create()?;
        let known = self.record.get(name)?;
        if let Some(entry) = &known {
            match &self.with_partition(disks, entry.partition)[..] {
                [disk] => return Ok(Some((self.dev.join(&disk.name), entry.clone()))),
                [] => {}
                several => {
                    let disks = several.iter().map(|disk| disk.name.clone()).collect();
                    return Err(Error::Several { partition: entry.partition, disks });
                }
            }
        }
        if !settled {
            return Ok(None);
        }
        let entry = match known {
            Some(entry) if entry.whole => {
                return Err(Error::Missing { partition: entry.partition });
            }
            Some(entry) => entry,
            None => Entry::new(name, kind),
        };
        // A volume that was begun, and that the parameters do not name any more.
        let Some(selector) = selector else {
            return Err(Error::Missing { partition: entry.partition });
        };
        let disk = select::choose(disks, selector)
            .map_err(|source| Error::Select { source, disks: select::explain(disks, selector) })?;
        self.create(disk, &entry)?;
        info!(volume = %name, %disk, "the disk is taken for a volume");
        Ok(Some((self.dev.join(&disk.name), entry)))
    }

    /// The disks whose table has this partition.
    fn with_partition<'a>(&self, disks: &'a [Disk], id: Uuid) -> Vec<&'a Disk> {
        let has = |disk: &&Disk| {
            let table = File::open(self.dev.join(&disk.name)).map(|file| table::read(&file));
            table.is_ok_and(|table| table.is_ok_and(|table| partition_of(&table, id).is_some()))
        };
        disks.iter().filter(|disk| !disk.medium).filter(has).collect()
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
        let table = planned(size, u64::from(block_size), entry.partition)?;
        // Behind the blank start there may be the data of an earlier use.
        let content = machine::read_content(&path, &table, &table.partitions[0]);
        plan::spare(&content.map_err(failed("read"))?)?;
        self.record.put(entry)?;
        table::create(&file, &table).map_err(|source| Error::Table { disk: name(), source })
    }

    /// Takes the steps to the mounted volume.
    async fn mount(&self, disk: &Path, entry: &Entry, target: Target) -> Result<Opened, Error> {
        let (path, id) = (disk.to_owned(), entry.partition);
        let (table, plan) = blocking(move || look(&path, id)).await?;
        let changed = || Error::Changed { disk: disk.display().to_string() };
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
            ground: Ground::Partition,
            block_size: table.block_size,
            kind: entry.kind,
            keys: Some(keys).filter(|_| entry.kind != Kind::Insecure),
            log: self.log.clone(),
        };
        let plan = match plan {
            Plan::Unlock { partition, kind, grow } => {
                let grown = Box::pin(before_unlock(&live, table.clone(), partition, grow)).await?;
                if !live.is_open() {
                    let opened = live.open_with(&grown, &key, None).await;
                    opened.map_err(|error| match error {
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
        let partition = Box::pin(apply(&live, table, plan)).await?;
        Ok(Opened { live, partition })
    }
}

/// The table of a new volume: one partition, as large as the disk allows, marked as one that is
/// being made.
fn planned(size: u64, block_size: u64, id: Uuid) -> Result<Table, plan::Refusal> {
    let blocks = size / block_size.max(1);
    let disk = uuid::Builder::from_random_bytes(rand::random()).into_uuid();
    let mut table = Table { disk, block_size, blocks, partitions: Vec::new() };
    if size < plan::SIZE_MIN {
        return Err(plan::Refusal::TooSmall { free: size });
    }
    let (Place::Free(partition) | Place::Made(partition)) = plan::place(&table, id)?;
    table.partitions.push(Partition { name: NAME.to_owned(), type_id: TYPE_ID, ..partition });
    Ok(table)
}

fn partition_of(table: &Table, id: Uuid) -> Option<&Partition> {
    table.partitions.iter().find(|partition| partition.type_id == TYPE_ID && partition.id == id)
}

/// Looks at the disk with this partition, and decides. Blocks.
fn look(path: &Path, id: Uuid) -> Result<(Table, Plan), Error> {
    let disk = || path.display().to_string();
    let table = machine::read_table(path);
    let table = table.map_err(|source| Error::Table { disk: disk(), source })?;
    let partition = partition_of(&table, id).cloned();
    let partition = partition.ok_or(Error::Missing { partition: id })?;
    let content = machine::read_content(path, &table, &partition);
    let content =
        content.map_err(|source| Error::Disk { operation: "read", disk: disk(), source })?;
    let new_id = || uuid::Builder::from_random_bytes(rand::random()).into_uuid();
    let plan = plan::plan(&table, Place::Made(partition), &content, new_id)?;
    Ok((table, plan))
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
