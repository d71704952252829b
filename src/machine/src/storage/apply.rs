//! The application of a plan: carries out the decisions of `storage::plan`.
//!
//! [`apply`] knows the order of the steps, a [`Machine`] takes them: the live one
//! is `storage::machine`, the tests' one ends at any step they choose.
//!
//! ```text
//! Create: table (marked) -> kernel -> protect -> format -> mount -> settle -> table (unmarked)
//! Finish:                   kernel -> protect -> format -> mount -> settle -> table (unmarked)
//! Mount:                    kernel -----------> mount -> [table (unmarked)] -> [grow]
//! Unlock: [table] ->        kernel -> (open, by the holder of the key) -> mount
//! Clear:                    kernel -> overwrite -> table (new identity, marked): plan again
//! ```
//!
//! Invariants:
//! - A run that ends anywhere leaves a disk for which a new plan ends in the
//!   same place.
//! - When `apply` returns well, the partition is mounted and not marked.

use std::path::PathBuf;

use tracing::{info, warn};
use uuid::Uuid;

use super::plan::{BEING_MADE, Plan};
use super::table::{self, Partition, Table};
use polis_base::sys::mount;
use polis_runtime::sys::process;

/// Why the data partition is not mounted.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The partition table cannot be written.
    #[error("cannot write the partition table")]
    Table(#[source] table::Error),
    /// The kernel does not take the partition.
    #[error("the kernel does not take partition {number}")]
    Register {
        /// Which one.
        number: u32,
        /// Its text.
        source: std::io::Error,
    },
    /// It has no file system, and making one failed.
    #[error("cannot make a file system on {device}")]
    Format {
        /// The partition.
        device: PathBuf,
        /// The output of `mkfs.xfs`.
        source: process::Error,
    },
    /// It cannot be encrypted.
    #[error("cannot encrypt {device}")]
    Protect {
        /// The partition.
        device: PathBuf,
        /// The output of `cryptsetup`.
        source: process::Error,
    },
    /// Opening it failed, and not for want of the right key.
    #[error("cannot open the encrypted partition {device}")]
    Open {
        /// The partition.
        device: PathBuf,
        /// The output of `cryptsetup`.
        source: process::Error,
    },
    /// The open partition is not protected as the header said that was read before.
    #[error("cannot confirm the encryption of {device}")]
    Weakened {
        /// The partition.
        device: PathBuf,
        /// What the kernel has instead, or its error.
        source: std::io::Error,
    },
    /// The needs of integrity cannot be written.
    #[error("cannot write the free space of {device}")]
    Wipe {
        /// The device.
        device: PathBuf,
        /// The error of the kernel.
        source: std::io::Error,
    },
    /// A step takes longer than it ever should.
    #[error("{what} took more than {seconds} seconds and has not ended")]
    Late {
        /// Which step.
        what: &'static str,
        /// How long it was waited for.
        seconds: u64,
    },
    /// The kernel has no random numbers, which the step needs.
    #[error(
        "{what} has waited more than {seconds} seconds for random numbers: this machine has no \
         source of them that the kernel knows"
    )]
    Random {
        /// Which step.
        what: &'static str,
        /// How long it was waited for.
        seconds: u64,
    },
    /// The kernel does not mount its file system.
    #[error(transparent)]
    Mount(#[from] mount::Error),
    /// The file system did not grow with the disk.
    #[error("cannot grow the file system on {device}")]
    Grow {
        /// The partition.
        device: PathBuf,
        /// The output of `xfs_growfs`.
        source: process::Error,
    },
    /// The start of a partition that was given up, by which it is recognised, cannot be
    /// overwritten.
    #[error("cannot overwrite the start of {device}")]
    Clear {
        /// The partition.
        device: PathBuf,
        /// The error of the kernel.
        source: std::io::Error,
    },
    /// The new partition does not open with the key that it was made with.
    #[error("{device} does not open with its new key")]
    OwnKey {
        /// The partition.
        device: PathBuf,
    },
    /// There is no memory for the thread of the work, or it ended with a panic.
    #[error("the thread of the disk was lost")]
    Lost,
}

/// The operations on the disk of a machine. Every step may be repeated.
pub trait Machine {
    /// Puts `table` on the disk.
    fn write_table(&self, table: &Table) -> impl Future<Output = Result<(), Error>> + Send;

    /// Makes sure that the kernel knows `partition`.
    fn register(&self, partition: &Partition) -> impl Future<Output = Result<(), Error>> + Send;

    /// Encrypts `partition`, whose content is lost, and opens it; does nothing for a kind
    /// without encryption.
    fn protect(&self, partition: &Partition) -> impl Future<Output = Result<(), Error>> + Send;

    /// Makes a file system on `partition`, whose content is lost.
    fn format(&self, partition: &Partition) -> impl Future<Output = Result<(), Error>> + Send;

    /// Mounts `partition`, after a look at how the kernel protects it.
    fn mount(&self, partition: &Partition) -> impl Future<Output = Result<(), Error>> + Send;

    /// Writes what must be written of a new file system before it is used.
    fn settle(&self, partition: &Partition) -> impl Future<Output = Result<(), Error>> + Send;

    /// Overwrites everything by which the content of `partition` is recognised and opened;
    /// nothing uses it.
    fn clear(&self, partition: &Partition) -> impl Future<Output = Result<(), Error>> + Send;

    /// Lets the mounted file system fill `partition`, which the kernel knows smaller.
    fn grow(&self, partition: &Partition) -> impl Future<Output = Result<(), Error>> + Send;
}

/// Carries out `plan` for a disk with `table`; returns the partition that is mounted.
///
/// # Errors
///
/// The first step that failed.
pub async fn apply(machine: &impl Machine, table: Table, plan: Plan) -> Result<Partition, Error> {
    match plan {
        Plan::Create { table, partition } => {
            info!(partition = partition.number, name = partition.name, "making the partition");
            machine.write_table(&table).await?;
            finish(machine, table, partition).await
        }
        // The service clears before it asks which keys the new partition gets.
        Plan::Clear { partition } => {
            let id = partition.id;
            let partition = clear(machine, table.clone(), partition, id).await?;
            finish(machine, replaced(table, &partition), partition).await
        }
        Plan::Finish { partition } => {
            info!(partition = partition.number, name = partition.name, "finishing the partition");
            finish(machine, table, partition).await
        }
        Plan::Unlock { partition, .. } => {
            machine.mount(&partition).await?;
            Ok(partition)
        }
        Plan::Mount { partition, unmark, grow } => {
            machine.register(&partition).await?;
            machine.mount(&partition).await?;
            let (table, partition) = match unmark {
                true => take_off_mark(machine, table, partition).await?,
                false => (table, partition),
            };
            let Some(last) = grow else { return Ok(partition) };
            match enlarge(machine, table, &partition, last).await {
                Ok(larger) => Ok(larger),
                Err(error) => {
                    // The content is still there, and the next boot tries again.
                    warn!(error = &error as &dyn std::error::Error, "the partition did not grow");
                    Ok(partition)
                }
            }
        }
    }
}

/// Takes the steps of an `Unlock` that need no key: the partition grows to `grow`
/// and the kernel knows it.
///
/// # Errors
///
/// The kernel does not take the partition. A partition that does not grow is not a failure.
pub async fn before_unlock(
    machine: &impl Machine,
    table: Table,
    partition: Partition,
    grow: Option<u64>,
) -> Result<Partition, Error> {
    let Some(last) = grow else {
        machine.register(&partition).await?;
        return Ok(partition);
    };
    let larger = Partition { last, ..partition.clone() };
    info!(from = partition.blocks(), to = larger.blocks(), "the partition grows");
    let grown = async {
        machine.write_table(&replaced(table, &larger)).await?;
        machine.register(&larger).await
    };
    match grown.await {
        Ok(()) => Ok(larger),
        Err(error) => {
            // The content is still there, and the next boot tries again.
            warn!(error = &error as &dyn std::error::Error, "the partition did not grow");
            machine.register(&partition).await?;
            Ok(partition)
        }
    }
}

/// Ends the content of a partition that was given up: from then on it is one that is being
/// made, with the identity `id`.
///
/// # Errors
///
/// The first step that failed; the next boot repeats them all.
pub async fn clear(
    machine: &impl Machine,
    table: Table,
    partition: Partition,
    id: Uuid,
) -> Result<Partition, Error> {
    machine.register(&partition).await?;
    machine.clear(&partition).await?;
    let partition = Partition { id, attributes: BEING_MADE, ..partition };
    machine.write_table(&replaced(table, &partition)).await?;
    info!(partition = partition.number, "the data partition was wiped");
    Ok(partition)
}

async fn finish(
    machine: &impl Machine,
    table: Table,
    partition: Partition,
) -> Result<Partition, Error> {
    machine.register(&partition).await?;
    info!("the kernel has read it");
    machine.protect(&partition).await?;
    machine.format(&partition).await?;
    info!("the file system is made");
    machine.mount(&partition).await?;
    info!("the file system is mounted");
    machine.settle(&partition).await?;
    let (_table, partition) = take_off_mark(machine, table, partition).await?;
    Ok(partition)
}

async fn take_off_mark(
    machine: &impl Machine,
    table: Table,
    partition: Partition,
) -> Result<(Table, Partition), Error> {
    let partition = Partition { attributes: partition.attributes & !BEING_MADE, ..partition };
    let table = replaced(table, &partition);
    machine.write_table(&table).await?;
    Ok((table, partition))
}

async fn enlarge(
    machine: &impl Machine,
    table: Table,
    partition: &Partition,
    last: u64,
) -> Result<Partition, Error> {
    let larger = Partition { last, ..partition.clone() };
    info!(from = partition.blocks(), to = larger.blocks(), "the partition grows");
    machine.write_table(&replaced(table, &larger)).await?;
    machine.grow(&larger).await?;
    Ok(larger)
}

/// `table` with `partition` in place of the one of that number.
fn replaced(mut table: Table, partition: &Partition) -> Table {
    for entry in &mut table.partitions {
        if entry.number == partition.number {
            entry.clone_from(partition);
        }
    }
    table
}

#[cfg(test)]
#[path = "apply_tests.rs"]
mod tests;
