//! What a node reports of the things beside it: its further disks, the targets of its log, and the
//! target of the snapshots of etcd.

use polis_proto::v1;
use polis_tui::bytes;
use serde::Serialize;

use crate::text::clean;
use crate::units;

/// A further disk of a node.
#[derive(Debug, Serialize)]
pub(super) struct Volume {
    name: String,
    /// `starting`, `ready`, `failed` or `absent`.
    state: String,
    /// Why it failed.
    #[serde(skip_serializing_if = "String::is_empty")]
    cause: String,
}

impl Volume {
    pub(super) fn of(report: &v1::VolumeReport) -> Self {
        let [name, state, cause] = [&report.name, &report.state, &report.cause].map(|it| clean(it));
        Self { name, state, cause }
    }

    pub(super) fn has_failed(&self) -> bool {
        self.state == "failed"
    }

    pub(super) fn text(&self) -> String {
        let cause = Some(&self.cause).filter(|cause| !cause.is_empty());
        let cause = cause.map(|cause| format!(": {cause}")).unwrap_or_default();
        format!("{} {}{cause}", self.name, self.state)
    }
}

/// How far the log of a node has reached a target.
#[derive(Debug, Serialize)]
pub(super) struct Delivery {
    target: String,
    /// Lines that the target does not have yet.
    behind: u64,
    /// When the newest line that it has was written.
    until: Option<units::Time>,
    /// Lines that were overwritten before they were delivered.
    missing: u64,
    rejected: u64,
    /// Why the log does not reach the target; empty: it does.
    failure: String,
    failing_since: Option<units::Time>,
}

impl Delivery {
    pub(super) fn of(delivery: &v1::LogDelivery) -> Self {
        let time = |seconds| units::since_1970(seconds).map(units::Time);
        Self {
            target: clean(&delivery.target),
            behind: delivery.behind,
            until: time(delivery.until),
            missing: delivery.missing,
            rejected: delivery.rejected,
            failure: clean(&delivery.failure),
            failing_since: time(delivery.failing_since),
        }
    }

    /// Whether the log does not reach the target.
    pub(super) fn fails(&self) -> bool {
        !self.failure.is_empty()
    }

    pub(super) fn text(&self) -> String {
        let mut parts = vec![match self.until {
            Some(until) => format!("{}: has the lines until {until}", self.target),
            None => format!("{}: no line in this boot yet", self.target),
        }];
        let counts = [
            (self.behind, "not sent yet"),
            (self.missing, "overwritten before they were sent"),
            (self.rejected, "rejected"),
        ];
        let counts = counts.iter().filter(|(count, _)| *count > 0);
        parts.extend(counts.map(|(count, what)| format!("{count} {what}")));
        if !self.failure.is_empty() {
            let since = units::text(self.failing_since);
            parts.push(format!("fails since {since}: {}", self.failure));
        }
        parts.join(", ")
    }
}

/// Which snapshot of etcd has reached its target.
#[derive(Debug, Serialize)]
pub(super) struct Shipped {
    target: String,
    /// When the newest there was begun; `null`: there is no snapshot yet.
    newest_at: Option<units::Time>,
    newest_revision: u64,
    newest_bytes: u64,
    /// The reason to wait, without a failure.
    waits_for: String,
    /// Why the newest snapshot is not sent; empty: it is.
    failure: String,
    failing_since: Option<units::Time>,
    /// The remedy.
    help: String,
}

impl Shipped {
    pub(super) fn of(delivery: &v1::SnapshotDelivery) -> Self {
        let time = |seconds| units::since_1970(seconds).map(units::Time);
        Self {
            target: clean(&delivery.target),
            newest_at: time(delivery.newest_at),
            newest_revision: delivery.newest_revision,
            newest_bytes: delivery.newest_bytes,
            waits_for: clean(&delivery.waits_for),
            failure: clean(&delivery.failure),
            failing_since: time(delivery.failing_since),
            help: clean(&delivery.help),
        }
    }

    pub(super) fn text(&self) -> String {
        let Self { target, newest_revision, newest_bytes, waits_for, failure, help, .. } = self;
        let mut parts = vec![match self.newest_at {
            Some(at) => {
                let size = bytes(*newest_bytes);
                format!("{target} has the one of {at}: {size}, revision {newest_revision}")
            }
            None => format!("{target}: no known snapshot yet"),
        }];
        parts.extend((!waits_for.is_empty()).then(|| format!("waits for {waits_for}")));
        if !failure.is_empty() {
            let since = units::text(self.failing_since);
            parts.push(format!("fails since {since}: {failure}"));
            parts.extend((!help.is_empty()).then(|| help.clone()));
        }
        parts.join("; ")
    }
}
