//! The cluster manager's access to the data partition: sends requests to storage, and waits
//! for their results.
//!
//! Invariants:
//! - A key stays in the channel only as long as storage needs it.

use tokio::sync::watch;
use uuid::Uuid;

use polis_machine::storage::key::{Key, Passphrase};
use polis_machine::storage::{Kind, Make, Status, Wanted};
use polis_runtime::event::{Closed, until};

/// The cluster manager's end of storage.
#[derive(Clone, Debug)]
pub(in crate::cluster) struct Disk {
    pub(in crate::cluster) status: watch::Receiver<Status>,
    pub(in crate::cluster) wanted: watch::Sender<Option<Wanted>>,
}

/// The state of the data partition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::cluster) enum Found {
    /// No data partition; a new one would have this GUID.
    Absent(Uuid),
    /// One that needs a key.
    Locked(Kind, Uuid),
    /// One that is mounted.
    Mounted(Kind),
}

impl Disk {
    /// Waits until storage has examined the disks.
    pub(in crate::cluster) async fn look(&mut self) -> Result<Found, Closed> {
        until(&mut self.status, "storage", |status| match status {
            Status::Starting | Status::GivenUp => None,
            Status::Absent { partition } => Some(Found::Absent(*partition)),
            Status::Locked { kind, partition } | Status::Refused { kind, partition, .. } => {
                Some(Found::Locked(*kind, *partition))
            }
            Status::Ready(ready) => Some(Found::Mounted(ready.kind)),
        })
        .await
    }

    /// Has the partition made, and waits until it is mounted.
    pub(in crate::cluster) async fn make(&mut self, make: Make) -> Result<Kind, Closed> {
        self.wanted.send_replace(Some(Wanted::Make(make)));
        self.mounted().await
    }

    /// Whether storage was asked to make the partition, and has not finished.
    pub(in crate::cluster) fn is_being_made(&self) -> bool {
        matches!(&*self.wanted.borrow(), Some(Wanted::Make(_)))
    }

    /// Waits until the partition is mounted.
    pub(in crate::cluster) async fn mounted(&mut self) -> Result<Kind, Closed> {
        let kind = until(&mut self.status, "storage", |status| status.ready().map(|r| r.kind));
        let kind = kind.await?;
        self.wanted.send_replace(None);
        Ok(kind)
    }

    /// Gives the partition up, and waits until it is marked for the next boot.
    pub(in crate::cluster) async fn give_up(&mut self) -> Result<(), Closed> {
        self.wanted.send_replace(Some(Wanted::GiveUp));
        until(&mut self.status, "storage", |status| matches!(status, Status::GivenUp).then_some(()))
            .await
    }

    /// Tries a key; returns why storage rejected it, if it did.
    pub(in crate::cluster) async fn open(
        &mut self,
        key: Key,
        rekey: Option<Passphrase>,
    ) -> Result<Result<Kind, String>, Closed> {
        // An earlier rejection is not the answer.
        drop(self.status.borrow_and_update());
        self.wanted.send_replace(Some(Wanted::Open { key, rekey }));
        let tried = loop {
            self.status.changed().await.map_err(|_closed| Closed("storage"))?;
            match &*self.status.borrow_and_update() {
                Status::Ready(ready) => break Ok(ready.kind),
                Status::Refused { reason, .. } => break Err(reason.clone()),
                Status::Starting
                | Status::Absent { .. }
                | Status::Locked { .. }
                | Status::GivenUp => {}
            }
        };
        self.wanted.send_replace(None);
        Ok(tried)
    }
}
