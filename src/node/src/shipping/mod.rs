//! Shipping: sends the newest checked snapshot of etcd to the bucket that the cluster names,
//! while this node leads the cluster.
//!
//! ```text
//! curator leads, bucket named --+
//! snapshot of this voter -------+--> which snapshots has the bucket? --it has this one--> done
//!                                         ^            | it lacks it
//!                                         |            v
//!                                      backoff    checksum of the encrypted file: first reading
//!                                         |            v
//!                                         |       encrypt, send: second reading
//!                                         |            v
//!                                         +--failed-- list: is it there, with all its bytes?
//! ```
//!
//! Nothing on the disk says what was sent: the bucket itself does, so a power cut at any moment
//! and a change of leaders cost nothing but a look at the bucket.
//!
//! Invariants:
//! - Only a snapshot that was checked when it was taken, and whose own checksum still matches
//!   now, is sent, and only encrypted to the owners.
//! - The plaintext of a snapshot is nowhere but in its own file; two chunks of it are in memory.
//! - Objects are neither replaced nor deleted: how long they stay is a rule of the bucket.
//!
//! What this module does not do: take snapshots (`consensus::snapshots`), speak to the store
//! (`s3`), or keep its key (`curator::snapshot_target`).

mod plan;
mod service;
mod ship;

#[cfg(test)]
mod tests;

use std::time::{SystemTime, UNIX_EPOCH};

use polis_proto::v1;

pub use self::service::{Config, Inputs, Service};

/// The state of the bucket, while this node sends snapshots; an event value.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Status {
    /// `None`: the cluster names no bucket, or another node leads.
    pub delivery: Option<Delivery>,
}

/// The snapshots in the bucket, and the attempts to send more.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Delivery {
    /// Its URL.
    pub target: String,
    /// The newest snapshot of this cluster in it, once that is known.
    pub newest: Option<Shipped>,
    /// The snapshots that this node has sent since it leads.
    pub sent: u64,
    /// The reason to wait, without a failure: this node has no newer snapshot.
    pub waits_for: Option<String>,
    /// Why the newest snapshot of this node does not reach it.
    pub failure: Option<Failure>,
}

/// A snapshot in the bucket, by its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shipped {
    /// When it was begun.
    pub at: SystemTime,
    /// The revision of etcd in it.
    pub revision: u64,
    /// Bytes of the object.
    pub bytes: u64,
}

/// Why nothing is sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The cause of the last attempt, in words.
    pub cause: String,
    /// The remedy.
    pub help: Option<String>,
    /// When the first attempt failed.
    pub since: SystemTime,
}

impl Status {
    /// The status as a heartbeat carries it.
    #[must_use]
    pub fn figures(&self) -> Option<v1::SnapshotDelivery> {
        let Delivery { target, newest, sent: _, waits_for, failure } = self.delivery.clone()?;
        let (failure, since) = match failure {
            Some(failure) => (Some((failure.cause, failure.help)), Some(failure.since)),
            None => (None, None),
        };
        let (failure, help) = failure.unwrap_or_default();
        Some(v1::SnapshotDelivery {
            target,
            newest_at: newest.map_or(0, |newest| seconds(newest.at)),
            newest_revision: newest.map_or(0, |newest| newest.revision),
            newest_bytes: newest.map_or(0, |newest| newest.bytes),
            failure,
            failing_since: since.map_or(0, seconds),
            help: help.unwrap_or_default(),
            waits_for: waits_for.unwrap_or_default(),
        })
    }
}

/// Seconds since 1970.
fn seconds(time: SystemTime) -> i64 {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_secs()).unwrap_or(i64::MAX)
}
