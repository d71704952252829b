//! Log forwarding: sends every line of the kept log to the targets that the cluster names.
//!
//! The lines are read from the ring on the data partition (`logtree::ring`), so those of
//! earlier boots go, too, and the targets may be away as long as the ring keeps lines.
//!
//! ```text
//! ring --after a place--> lines --rfc5424--> syslog: TLS (RFC 5425) ---> target
//!             ^                 \--otlp----> HTTPS, protocol buffers --> target
//!             |                                  |
//!             +---- cursor of each target <------+ settled
//!                     \--every few seconds--> /data/node/log_cursors.json
//! ```
//!
//! Invariants:
//! - A cursor moves on after delivery: a line is sent at least once, across restarts of the
//!   node and of the target. A line that the ring overwrote before is counted.
//! - A target holds one chunk of the ring in memory, however far behind it is.
//! - Nothing here logs a line for a line that it sends: a target that fails is logged once.
//!
//! What this module does not do: keep lines (`logtree::ring`), or choose the targets (the
//! owner of the cluster does; `agent` receives them).

mod cursors;
mod deliver;
mod line;
mod otlp;
mod rfc5424;
mod service;
mod syslog;

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::time::{SystemTime, UNIX_EPOCH};

use polis_proto::v1;
use polis_wire::parameters::{self, Error, LogTarget};

pub use self::service::{Config, Inputs, RunError, Service};

/// Where the log goes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Order {
    /// The targets.
    pub targets: Vec<LogTarget>,
    /// The domain of the cluster.
    pub cluster: String,
}

impl Order {
    /// Reads a message of the leader, or what the disk has of one.
    ///
    /// # Errors
    ///
    /// [`Error`] for an invalid target.
    pub fn read(message: v1::LogConfiguration) -> Result<Self, Error> {
        let cluster = message.cluster_domain.clone();
        Ok(Self { targets: parameters::log_targets(message, "log")?, cluster })
    }
}

/// How far the log has reached each target, by its URL.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Status {
    /// The targets of the cluster.
    pub targets: BTreeMap<String, Target>,
}

/// How far the log has reached one target.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Target {
    /// Records on the disk that it does not have.
    pub behind: u64,
    /// Records that it took since this service began, with those that were sent again.
    pub sent: u64,
    /// When the newest line that it has was written.
    pub until: Option<SystemTime>,
    /// Records that the ring overwrote before they were delivered.
    pub missing: u64,
    /// Records that it rejected.
    pub rejected: u64,
    /// Why it cannot be reached, and since when.
    pub failure: Option<Failure>,
}

/// Why a target cannot be reached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The cause of the last attempt, in words.
    pub cause: String,
    /// When the first attempt failed.
    pub since: SystemTime,
}

impl Status {
    /// The status as a heartbeat carries it.
    #[must_use]
    pub fn figures(&self) -> Vec<v1::LogDelivery> {
        let seconds = |time: SystemTime| {
            let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
            i64::try_from(since.as_secs()).unwrap_or(i64::MAX)
        };
        let figures = |(url, target): (&String, &Target)| {
            let failure = target.failure.as_ref();
            v1::LogDelivery {
                target: url.clone(),
                behind: target.behind,
                until: target.until.map_or(0, seconds),
                missing: target.missing,
                rejected: target.rejected,
                failure: failure.map(|failure| failure.cause.clone()).unwrap_or_default(),
                failing_since: failure.map_or(0, |failure| seconds(failure.since)),
            }
        };
        self.targets.iter().map(figures).collect()
    }
}
