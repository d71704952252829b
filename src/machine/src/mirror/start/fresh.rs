//! A new mirror: its records are put on the disk that the machine was started from, and its data
//! partition is as large as both disks have room for.
//!
//! Invariants:
//! - A disk that has no room for a data partition does not decide how large that is.

use std::io;
use std::time::Duration;

use polis_wire::parameters::Selector;
use tokio::time::{Instant, sleep};
use tracing::warn;
use uuid::Uuid;

use super::{POLL, Stop, in_time};
use crate::install;
use crate::install::select;
use crate::mirror::assemble::{self, Mirror};
use crate::mirror::disks::Disk;
use crate::mirror::{Config, Error, Service};
use crate::storage::deadline::within;
use crate::storage::detached::{ANSWER_MAX, Pending, detached, name_of};
use crate::storage::plan::{Refusal, SIZE_MIN, TYPE_ID, last_of_both, limit, place};
use crate::storage::service::PROBE_MAX;
use crate::storage::table::Table;
use crate::storage::{Wanted, machine};
use polis_base::cause;
use polis_base::stage::{Stage, State as Progress};
use polis_runtime::event;
use polis_runtime::supervisor::{Context, blocking};

/// How long a first boot waits for the other disk, before it decides the size without it.
const NEW_MAX: Duration = Duration::from_secs(15);

impl Service {
    /// Makes a mirror of the disk, if the parameters ask for one and it has no data yet.
    pub(super) async fn found(&mut self, ctx: &Context) -> Result<Option<Disk>, Stop> {
        let config = self.config.clone();
        let read = blocking(move || assemble::look(&config));
        let has_data = |table: &Table| table.partitions.iter().any(|it| it.type_id == TYPE_ID);
        if has_data(&in_time(read).await?) {
            // Whatever the parameters say: the data is where it is.
            return Ok(None);
        }
        event::until(&mut self.wanted, "the cluster manager", |wanted| {
            matches!(wanted, Some(Wanted::Make(_))).then_some(())
        })
        .await?;
        if self.selector().is_none() {
            return Ok(None);
        }
        let config = self.config.clone();
        let begun = blocking(move || assemble::begin(&config));
        within(ctx, "writing the records of the mirror", PROBE_MAX, begun).await?;
        ctx.stage(Stage::Storage, Progress::Started);
        Ok(self.started().await?)
    }

    /// The selector of the other disk.
    pub(in crate::mirror) fn selector(&self) -> Option<Selector> {
        let known = self.known.borrow();
        known.as_ref()?.parameters()?.mirror.clone()
    }

    /// The last block of a data partition that has room on both disks.
    pub(super) async fn last(&self, ctx: &Context) -> Result<u64, Error> {
        let disk = self.config.disk.clone();
        let read = blocking(move || {
            let failed = |source| Error::Table { disk: name_of(&disk), source };
            machine::read_table(&disk).map_err(failed)
        });
        let table = in_time(read).await?;
        let (others, looks) = (install::disks::Disks::default(), Pending::default());
        let since = Instant::now();
        let room = loop {
            let all = others.list(&self.config.sys, &name_of(&self.config.disk)).await;
            let (config, selector, own) = (self.config.clone(), self.selector(), table.clone());
            let look = || detached(move || other_room(&config, selector.as_ref(), &all, &own));
            let silent =
                || Err(format!("a disk did not answer within {} seconds", ANSWER_MAX.as_secs()));
            match looks.answer((), look).await.unwrap_or_else(silent) {
                Ok(room) => break Some(room),
                Err(_) if since.elapsed() < NEW_MAX => {
                    let what = format!(
                        "an empty disk that fits the parameter `mirror`: connect it, or the data \
                         partition is made without it after {} s",
                        NEW_MAX.as_secs()
                    );
                    ctx.stage(Stage::Storage, Progress::Waiting(what));
                    sleep(POLL).await;
                }
                Err(cause) => {
                    warn!(cause, "no empty disk fits the mirror: it begins with one disk");
                    break None;
                }
            }
        };
        // The wait is over.
        ctx.stage(Stage::Storage, Progress::Started);
        Ok(last_of_both(&table, room))
    }

    /// The mirror with the data partition that storage has made meanwhile.
    pub(super) async fn made(&mut self, mirror: Mirror) -> Result<Mirror, Stop> {
        event::until(&mut self.storage, "storage", |status| status.ready().map(|_| ())).await?;
        let mut mirror = mirror;
        mirror.disks[mirror.started.index()] = self.started().await?;
        self.backing.send_replace(Some(mirror.backing(None)));
        Ok(mirror)
    }
}

/// The usable blocks of the disk, of all, that would be taken beside the one with this table, or
/// why none is. Blocks.
fn other_room(
    config: &Config,
    selector: Option<&Selector>,
    all: &[install::disks::Disk],
    table: &Table,
) -> Result<u64, String> {
    let selector = selector.ok_or("the node parameters select none")?;
    let disk = select::choose(all, selector).map_err(|refusal| refusal.to_string())?;
    let name = &disk.name;
    let failed = |error: io::Error| format!("cannot read the disk {name}: {}", cause::line(&error));
    let file = install::content::open(&config.dev.join(name)).map_err(failed)?;
    if let Some(found) = install::content::found(&file).map_err(failed)? {
        return Err(format!("the disk {name} has {found}"));
    }
    let block_size = polis_base::sys::block::logical_block_size(&file).map_err(failed)?;
    room(disk.size, block_size.into(), table)
        .map_err(|why| format!("the disk {name} is not taken: {why}"))
}

/// The usable blocks of an empty disk with so many bytes, or why the data partition that follows
/// on the disk with this table cannot be on it, too.
fn room(size: u64, block_size: u64, table: &Table) -> Result<u64, String> {
    let text = |refusal: Refusal| refusal.to_string();
    if block_size != table.block_size {
        return Err(format!("it has blocks of {block_size} bytes, the other disk has not"));
    }
    // A disk of a few blocks has none that is usable.
    if size < SIZE_MIN {
        return Err(text(Refusal::OtherTooSmall { free: size }));
    }
    let (disk, blocks) = (Uuid::nil(), size / block_size);
    let usable = Table { disk, block_size, blocks, partitions: Vec::new() }.last_usable();
    let mut data = place(table, Uuid::nil()).map_err(text)?.partition().clone();
    limit(&mut data, last_of_both(table, Some(usable)), block_size).map_err(text)?;
    Ok(usable)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mirror::disks::tests::{BLOCKS, source};

    #[test]
    fn a_disk_without_room_for_a_data_partition_does_not_decide_its_size() {
        let mut table = source().table;
        // The first boot: the records are there, and the data partition will follow them.
        let records = table.partitions[3].last;
        table.partitions.truncate(4);
        let needed = (records + 1) * 512 + SIZE_MIN;
        // The backup of the table takes the last 33 blocks.
        let smallest = needed + 33 * 512;
        for size in [0, 512, 4096, 64 << 20, SIZE_MIN, needed, smallest - 512] {
            let why = room(size, 512, &table).unwrap_err();
            assert!(why.contains("512 MiB are needed"), "{size}: {why}");
        }
        for size in [smallest, BLOCKS * 512] {
            let usable = room(size, 512, &table).unwrap();
            assert!(last_of_both(&table, Some(usable)) * 512 >= records * 512 + SIZE_MIN, "{size}");
        }
        let why = room(BLOCKS * 512, 4096, &table).unwrap_err();
        assert_eq!(why, "it has blocks of 4096 bytes, the other disk has not");
    }
}
