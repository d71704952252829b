//! The snapshot: the content of the console as plain data, filled by the node, read by
//! the pages.
//!
//! The code that fills a [`Snapshot`] has done all the arithmetic with time: an age is
//! the age at the moment of the snapshot, and nothing here ever looks at a clock.
//!
//! A snapshot also travels, as JSON, to consoles elsewhere. A log is most of it,
//! and most of a log is known there already: [`Snapshot::with_logs_from`] leaves that
//! out, and [`Logs::put_before`] puts it back.
//!
//! Invariants:
//! - An unknown value is `None` or empty, never made up: each page has words for it.
//! - Texts may come from outside and hold anything; pages clean them as they
//!   draw (`text::clean`).
//! - A field that is absent from the JSON has its default, and one that is not
//!   known is ignored: two versions understand each other.

mod boot;
mod cluster;
mod etcd;
mod logs;
mod metrics;
mod network;
mod pki;
mod services;
mod time;
mod workload;

use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

pub use self::boot::{Stage, StageState};
pub use self::cluster::{Health, Node, NodeState, Nodes, Update, UpdateState};
pub use self::etcd::{Bucket, Etcd, History, Member, MemberStatus, Snapshots, Taken};
pub use self::logs::{LogEntry, Logs, Severity};
pub use self::metrics::Metrics;
pub use self::network::{Address, Change, Interface, Network};
pub use self::pki::{Authority, Certificate, Crl, Pki};
pub use self::services::{Service, ServiceState};
pub use self::workload::{Part, PartState, Pod, PodState, Pods, Quota, Workloads};

/// Everything that the console can show at one moment.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Snapshot {
    /// The head of every page.
    pub header: Header,
    /// How long after the kernel's start the node was ready; `None` before.
    #[serde(with = "time::optional")]
    pub ready: Option<Duration>,
    /// Why the boot before this one failed, if it did.
    pub previous_failure: Option<String>,
    /// The warnings for a person on every day, the most pressing first.
    pub warnings: Vec<Warning>,
    /// The stages of this boot in their order, those to come included.
    pub stages: Vec<Stage>,
    /// The network of this machine.
    pub network: Network,
    /// The nodes of the cluster, as far as this one knows them.
    pub nodes: Option<Nodes>,
    /// The etcd cluster as this node sees it.
    pub etcd: Option<Etcd>,
    /// Authorities and certificates.
    pub pki: Option<Pki>,
    /// The supervision tree, parents before their children.
    pub services: Vec<Service>,
    /// The workloads of this node, once its roles are known.
    pub workloads: Option<Workloads>,
    /// The load of the machine, once it was measured.
    pub metrics: Option<Metrics>,
    /// The newest entries of the log tree: most of a snapshot, and shared by snapshots
    /// without new entries between them.
    pub logs: Arc<Logs>,
}

impl Snapshot {
    /// The same with the log entries from number `first` on, for a reader that
    /// has those before.
    #[must_use]
    pub fn with_logs_from(&self, first: u64) -> Self {
        let entries = self.logs.entries.iter().filter(|entry| entry.number >= first);
        let Logs { total, today, .. } = &*self.logs;
        let logs =
            Logs { entries: entries.cloned().collect(), total: *total, today: today.clone() };
        // Field by field, so that the log is not copied whole only to be cut.
        Self {
            header: self.header.clone(),
            ready: self.ready,
            previous_failure: self.previous_failure.clone(),
            warnings: self.warnings.clone(),
            stages: self.stages.clone(),
            network: self.network.clone(),
            nodes: self.nodes.clone(),
            etcd: self.etcd.clone(),
            pki: self.pki.clone(),
            services: self.services.clone(),
            workloads: self.workloads.clone(),
            metrics: self.metrics.clone(),
            logs: Arc::new(logs),
        }
    }
}

/// Something that a person should know on every day until it is mended.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Warning {
    /// The problem, as a sentence.
    pub text: String,
    /// The command or the deed that mends it, if there is one.
    pub help: Option<String>,
}

/// The head of every page.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Header {
    /// The node ID, once there is a key.
    pub node: Option<String>,
    /// The fingerprint of the node's key in words that can be read aloud, once there is
    /// a key: the person who approves the node compares them.
    pub words: Option<String>,
    /// The version of the system.
    pub version: String,
    /// The slot that it was started from: `A` or `B`.
    pub slot: String,
    /// The cluster state.
    pub cluster: Cluster,
    /// The address that others reach this node by.
    pub address: Option<String>,
    /// Time since the kernel started.
    #[serde(with = "time")]
    pub uptime: Duration,
    /// Date and time of day with the zone, ready to print.
    pub clock: String,
    /// Whether nothing has confirmed that time since the start of the machine.
    pub clock_unset: bool,
}

impl Header {
    /// Whether only time has passed between the two.
    pub(crate) fn is_same_but_for_time(&self, other: &Self) -> bool {
        let Self {
            node,
            words,
            version,
            slot,
            cluster,
            address,
            uptime: _,
            clock: _,
            // It stands in the row of the clock.
            clock_unset: _,
        } = self;
        (node, words, version, slot) == (&other.node, &other.words, &other.version, &other.slot)
            && (cluster, address) == (&other.cluster, &other.address)
    }
}

/// How this node stands to its cluster.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Cluster {
    /// Registering: contact was made, not yet approved.
    Foreign,
    /// Approved, and committing.
    Trusted,
    /// A member.
    Home,
    /// Removed for good.
    Disowning,
    /// Would be home, but is cut off from consensus.
    Split,
    /// Not yet determined; only at boot.
    #[default]
    #[serde(other)]
    Unknown,
}

impl Cluster {
    /// The word for it, as on the serial line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Unknown => "unknown",
            Self::Foreign => "foreign",
            Self::Trusted => "trusted",
            Self::Home => "home",
            Self::Disowning => "disowning",
            Self::Split => "split",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::samples;

    #[test]
    fn a_snapshot_survives_the_journey() {
        for (_, snapshot) in samples::all() {
            let json = serde_json::to_string(&snapshot).unwrap();
            let read: Snapshot = serde_json::from_str(&json).unwrap();
            assert_eq!(read, snapshot);
        }
    }

    #[test]
    fn versions_understand_each_other() {
        let older: Snapshot = serde_json::from_str("{}").unwrap();
        assert_eq!(older, Snapshot::default());
        let newer = r#"{"header": {"version": "9.0.0", "cluster": "retired", "mood": 3}, "x": []}"#;
        let newer: Snapshot = serde_json::from_str(newer).unwrap();
        assert_eq!((&*newer.header.version, newer.header.cluster), ("9.0.0", Cluster::Unknown));
    }

    #[test]
    fn only_the_newer_part_of_a_log_travels() {
        let whole = samples::ordinary();
        let first = whole.logs.entries[4].number;
        let mut seen = whole.logs.clone();
        Arc::make_mut(&mut seen).entries.truncate(4);
        let mut frame = whole.with_logs_from(first);
        assert_eq!(frame.logs.entries.len(), whole.logs.entries.len() - 4);
        Arc::make_mut(&mut frame.logs).put_before(&seen, usize::MAX);
        assert_eq!(frame, whole);
        Arc::make_mut(&mut frame.logs).put_before(&seen, usize::MAX);
        assert_eq!(frame, whole, "what is there already is not put there twice");
        // A console that reconnects receives the earlier warnings and errors again,
        // with gaps between.
        let mut frame = whole.clone();
        Arc::make_mut(&mut frame.logs).entries.remove(2);
        Arc::make_mut(&mut frame.logs).put_before(&whole.logs, usize::MAX);
        assert_eq!(frame, whole, "what was seen in a gap stays");
    }

    #[test]
    fn a_log_that_was_dated_anew_replaces_what_was_seen_of_it() {
        let mut seen = samples::ordinary().logs;
        let whole = Arc::make_mut(&mut seen).clone();
        for entry in &mut Arc::make_mut(&mut seen).entries {
            let entry = Arc::make_mut(entry);
            (entry.day, entry.clock) = (String::new(), String::new());
        }
        // More than the node keeps now.
        let early = Arc::new(LogEntry { number: 0, ..LogEntry::default() });
        Arc::make_mut(&mut seen).entries.insert(0, early);
        let mut frame = whole.clone();
        frame.put_before(&seen, usize::MAX);
        assert_eq!(frame, whole);
    }
}
