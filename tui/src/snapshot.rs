//! Holds what the console shows: plain data, filled by the node, read by the pages.
//!
//! Whoever fills a [`Snapshot`] has done all the arithmetic with time: an age is
//! the age at the moment of the snapshot, and nothing here ever looks at a clock.
//!
//! Invariants:
//! - What is not known is `None` or empty, never a made-up value: each page has
//!   words for it.
//! - Texts may come from outside and hold anything; pages clean them as they
//!   draw (`text::clean`).

use std::time::Duration;

/// Everything that the console can show at one moment.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Snapshot {
    /// What stands at the top of every page.
    pub header: Header,
    /// How long after the kernel's start the node was ready; `None` before.
    pub ready: Option<Duration>,
    /// Why the boot before this one failed, if it did.
    pub previous_failure: Option<String>,
    /// What a person should know on every day, for example that the disk is not encrypted.
    pub warnings: Vec<String>,
    /// The stages of this boot in their order, those to come included.
    pub stages: Vec<Stage>,
    /// The network interfaces.
    pub network: Vec<Interface>,
    /// The etcd cluster as this node sees it.
    pub etcd: Option<Etcd>,
    /// Authorities and certificates.
    pub pki: Option<Pki>,
    /// The supervision tree, parents before their children.
    pub services: Vec<Service>,
    /// The newest entries of the log tree.
    pub logs: Logs,
}

/// What stands at the top of every page.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Header {
    /// The node ID, once there is a key.
    pub node: Option<String>,
    /// The version of the system.
    pub version: String,
    /// The slot that it was started from: `A` or `B`.
    pub slot: String,
    /// The cluster state.
    pub cluster: Cluster,
    /// The address that others reach this node by.
    pub address: Option<String>,
    /// Time since the kernel started.
    pub uptime: Duration,
    /// Date and time of day with the zone, ready to print.
    pub clock: String,
}

/// How this node stands to its cluster.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Cluster {
    /// Not yet determined; only at boot.
    #[default]
    Unknown,
    /// Registering: contact was made, not yet let in.
    Foreign,
    /// Approved, and committing.
    Trusted,
    /// A member.
    Home,
    /// Removed, for ever.
    Disowning,
    /// Would be home, but is cut off from consensus.
    Split,
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

/// A stage of the boot.
#[derive(Clone, Debug, PartialEq)]
pub struct Stage {
    /// Its word on the serial line.
    pub name: String,
    /// What it is doing.
    pub state: StageState,
    /// When it started, after the kernel did; zero while it is pending.
    pub started: Duration,
    /// How long it took, or how long it has been at it.
    pub elapsed: Duration,
    /// How much of it is done, in percent, where that can be told.
    pub progress: Option<u8>,
}

/// What a stage is doing.
#[derive(Clone, Debug, PartialEq)]
pub enum StageState {
    /// To come.
    Pending,
    /// At work.
    Started,
    /// Cannot go on before something happens.
    Waiting {
        /// For what, and what a person can do about it.
        what: String,
        /// For how long already.
        since: Duration,
    },
    /// Ended well.
    Done,
    /// Ended badly.
    Failed,
}

/// A network interface.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Interface {
    /// Its name, for example `eth0`.
    pub name: String,
    /// Its addresses and where they are from, or why it has none; ready to print.
    pub text: String,
}

/// The etcd cluster as this node sees it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Etcd {
    /// This member's standing as on the serial line: `starting learner voter stopped`.
    pub state: String,
    /// Every member, this one included.
    pub members: Vec<Member>,
    /// The raft term.
    pub term: u64,
    /// The last raft index that this member knows.
    pub index: u64,
    /// The last raft index that this member has applied.
    pub applied: u64,
    /// Bytes of the database file.
    pub db_size: u64,
    /// Bytes that the database may have; zero if not known.
    pub db_quota: u64,
    /// Alarms in force, for example `NOSPACE`, with the member where that matters.
    pub alarms: Vec<String>,
    /// How many more voters may fail before the cluster stops; `None` without a quorum.
    pub survives: Option<u32>,
}

/// A member of the etcd cluster.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Member {
    /// Its name, which is its node ID; empty if it never started.
    pub name: String,
    /// Its member ID.
    pub id: u64,
    /// Where its peers reach it.
    pub url: String,
    /// Voter or learner.
    pub standing: Standing,
    /// Whether it leads.
    pub leader: bool,
    /// Whether it is this node.
    pub own: bool,
    /// Whether it answers.
    pub answers: bool,
}

/// What a member may do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Standing {
    /// Counts for the quorum.
    #[default]
    Voter,
    /// Receives the log and does not vote yet.
    Learner {
        /// How much of the leader's log it has, in percent, if that is known.
        caught_up: Option<u8>,
    },
}

/// Authorities and certificates.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Pki {
    /// The certificate authorities that this node trusts.
    pub authorities: Vec<Authority>,
    /// The certificates that this node has.
    pub certificates: Vec<Certificate>,
    /// The list of revoked certificates.
    pub crl: Option<Crl>,
}

/// A certificate authority.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Authority {
    /// What it is for.
    pub name: String,
    /// SHA-256 of its certificate; shown in hexadecimal and in words (`words`).
    pub fingerprint: [u8; 32],
    /// The day on which it ends, ready to print.
    pub ends: String,
    /// Full days before that; negative afterwards.
    pub days_left: i64,
}

/// A certificate of this node.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Certificate {
    /// What it is for.
    pub name: String,
    /// The authority that signed it.
    pub issuer: String,
    /// The day on which it ends, ready to print.
    pub ends: String,
    /// Full days before that; negative afterwards.
    pub days_left: i64,
    /// The day on which it renews itself, ready to print; `None` if it never does.
    pub renews: Option<String>,
    /// Share of its life after which it renews itself, in percent.
    pub renew_at: u8,
    /// Share of its life that is over, in percent.
    pub used: u8,
}

/// A list of revoked certificates.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Crl {
    /// Counts up with each new list.
    pub number: u64,
    /// How many certificates are on it.
    pub entries: u64,
    /// Time since it was made.
    pub age: Duration,
}

/// A service of the supervision tree.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Service {
    /// How deep it stands in the tree; the root is 0.
    pub depth: u16,
    /// The last part of its dotted name.
    pub name: String,
    /// What it is doing.
    pub state: ServiceState,
    /// How often it was restarted.
    pub restarts: u64,
    /// Why it died last.
    pub cause: Option<String>,
    /// How long it has been in this state.
    pub since: Duration,
}

/// What a service is doing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ServiceState {
    /// Runs, and has not said that it is healthy.
    #[default]
    Starting,
    /// Runs and serves.
    Healthy,
    /// Ended on purpose.
    Done,
    /// Died, and waits to be started again.
    Restarting,
    /// Died, and stays so.
    Dead,
}

/// The newest entries of the log tree, the oldest of them first.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Logs {
    /// The entries that are left.
    pub entries: Vec<LogEntry>,
    /// How many there ever were, so that a paused page can say how many are new.
    pub total: u64,
    /// How many were lost because a reader was too slow.
    pub dropped: u64,
}

/// An entry of the log tree.
#[derive(Clone, Debug, PartialEq)]
pub struct LogEntry {
    /// When, after the kernel started.
    pub time: Duration,
    /// How much it matters.
    pub severity: Severity,
    /// The dotted name of the writer.
    pub name: String,
    /// What it said.
    pub text: String,
}

/// How much a log entry matters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Severity {
    /// For whoever looks for a bug.
    #[default]
    Debug,
    /// The ordinary course of things.
    Info,
    /// Went on without it.
    Warning,
    /// Someone should look.
    Error,
    /// The writer ended because of it.
    Fatal,
}

impl Severity {
    /// The letter on the serial line.
    #[must_use]
    pub fn letter(self) -> char {
        match self {
            Self::Debug => 'D',
            Self::Info => 'I',
            Self::Warning => 'W',
            Self::Error => 'E',
            Self::Fatal => 'F',
        }
    }
}
