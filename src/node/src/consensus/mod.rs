//! Runs this node's etcd member, and hands out clients to it.
//!
//! The cluster manager gives [`Orders`] once it knows what this machine is to
//! be; everyone else reads [`Status`] and takes a client from it. Whoever needs
//! etcd runs a member: there is no way in but the unix socket.
//!
//! ```text
//!  orders                               nothing on the disk
//! --------> [starting] --bootstrap, unless there are credentials--+
//!               |                                                 |
//!               |   make the PKI in an etcd without a port, write |
//!               |   it to the disk, stop that etcd  <-------------+
//!               v
//!           etcd with mutual TLS --in sync, promoted--> [voter]
//!               |        \--joined--> [learner] ----------^
//!               +--ended--> [stopped]: the supervisor starts again
//! ```
//!
//! Invariants:
//! - No port is open before there are certificates, and then only mutual TLS of
//!   version 1.3 with a certificate that carries [`polis_wire::pki::ETCD_PEER_NAME`].
//! - A bootstrap that was cut off anywhere ends, after the next start, as one
//!   that was not.
//! - Data is thrown away only where `bootstrapping` on the disk says that nobody
//!   has seen it.
//! - Healthy means voter.
//! - An etcd that blames its own files is started again a few times and no more.
//!
//! What this module does not do: decide what a machine is to be (`cluster`), or
//! who may enter (`curator`).

mod args;
mod awaited;
mod bootstrap;
mod chatter;
pub mod client;
mod credentials;
mod damage;
mod maintenance;
mod members;
mod peers;
mod quorum;
mod restore;
mod serve;
mod service;
mod status;
mod wal;
mod watchers;

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

use polis_base::files::{self, Etcd, Sockets};
use polis_wire::identity::{NodeId, NodeKey};
use polis_wire::pki::Host;

pub use self::members::{Error as MembersError, Members};
pub use self::quorum::Refusal;
pub use self::service::{Service, forget, readahead};
pub use self::status::{Alarm, Member, MemberId, MemberStatus, Status};
pub use self::wal::holds_entries;

/// Where peers reach each other.
pub const PEER_PORT: u16 = 7834;

/// etcd's own default of bytes for its database, said aloud because the console
/// shows how much of it is used.
pub const QUOTA: u64 = 2 << 30;

/// Where one member is reached by its peers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    /// The host; the certificate of the member carries it.
    pub host: Host,
    /// The port.
    pub port: u16,
}

impl Config {
    /// The member of a running node.
    #[must_use]
    pub fn live(root: &files::Root) -> Self {
        Self {
            binary: PathBuf::from("/usr/bin/etcd"),
            tree: root.data.etcd.clone(),
            sockets: root.ephemeral.consensus.clone(),
            listen: SocketAddr::from((std::net::Ipv4Addr::UNSPECIFIED, PEER_PORT)),
            restorer: PathBuf::from("/usr/bin/etcdutl"),
            snapshot: root.esp.etcd_snapshot.clone(),
            directory: root.esp.cluster_directory.clone(),
            quota: QUOTA,
            probe: Probe::default(),
        }
    }
}

impl Peer {
    /// A member at its usual place: its node ID is its host name, so its URL
    /// stays the same when its address changes.
    #[must_use]
    pub fn of(id: NodeId) -> Self {
        Self { host: Host::Name(id.to_string()), port: PEER_PORT }
    }

    /// The peer URL.
    #[must_use]
    pub fn url(&self) -> String {
        format!("https://{}:{}", self.host, self.port)
    }
}

/// Fixed for the life of the process.
#[derive(Clone, Debug)]
pub struct Config {
    /// The program.
    pub binary: PathBuf,
    /// What the member keeps.
    pub tree: Etcd,
    /// Where its socket goes.
    pub sockets: Sockets,
    /// Where it listens for peers. The unspecified address serves any address
    /// that the node ever gets.
    pub listen: SocketAddr,
    /// The program that makes a member of a snapshot.
    pub restorer: PathBuf,
    /// What a bootstrap begins with, if it is there.
    pub snapshot: files::File,
    /// Where a leader's last word says who the members are.
    pub directory: files::File,
    /// Bytes of the database at which etcd refuses writes: [`QUOTA`].
    pub quota: u64,
    /// Sees every step of a bootstrap; for tests.
    pub probe: Probe,
}

/// What this member is to do.
#[derive(Clone, Debug)]
pub struct Orders {
    /// The key of the node.
    pub key: NodeKey,
    /// Where its peers reach it.
    pub peer: Peer,
    /// What it finds or makes.
    pub start: Start,
}

/// How a member comes to be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Start {
    /// Found a new cluster, or go on with what an earlier attempt founded.
    Bootstrap,
    /// Be the member that it was.
    Again,
    /// Enter a cluster; what the curator said replaces what is on the disk.
    Join(Box<Invitation>),
}

impl Start {
    /// Whether it enters a cluster of others.
    #[must_use]
    pub fn joins(&self) -> bool {
        matches!(self, Self::Join(_))
    }
}

/// Everything but its key that a node needs to become a member.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Invitation {
    /// The certificate of the authority of the peers, DER.
    pub ca: Vec<u8>,
    /// The node's own certificate, DER.
    pub certificate: Vec<u8>,
    /// Whom not to trust, DER.
    pub crl: Vec<u8>,
    /// Every member, with the new one.
    pub members: Vec<Member>,
}

/// A step of a bootstrap that was just taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// The disk says that a bootstrap has begun.
    Marked,
    /// Nothing of an earlier attempt is left.
    Cleared,
    /// etcd without a port answers.
    Started,
    /// The authority of the peers exists.
    Authority,
    /// The member's certificate exists.
    Certificate,
    /// All files are written.
    Written,
    /// etcd without a port has ended.
    Stopped,
    /// The disk says that the bootstrap is complete.
    Finished,
}

impl Step {
    /// All steps, in order.
    pub const ALL: [Self; 8] = [
        Self::Marked,
        Self::Cleared,
        Self::Started,
        Self::Authority,
        Self::Certificate,
        Self::Written,
        Self::Stopped,
        Self::Finished,
    ];
}

/// Lets a test end a run after any step, as a power cut would.
#[derive(Clone, Default)]
pub struct Probe(Option<Arc<dyn Fn(Step) -> bool + Send + Sync>>);

impl Probe {
    /// Asks `goes_on` after each step.
    pub fn new(goes_on: impl Fn(Step) -> bool + Send + Sync + 'static) -> Self {
        Self(Some(Arc::new(goes_on)))
    }

    fn passed(&self, step: Step) -> Result<(), Error> {
        match &self.0 {
            Some(goes_on) if !goes_on(step) => Err(Error::Interrupted(step)),
            _ => Ok(()),
        }
    }
}

impl fmt::Debug for Probe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() { "Probe(set)" } else { "Probe(none)" })
    }
}

/// Why a run of the member ended, or could not begin.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The cluster manager is gone.
    #[error("nobody gives orders any more")]
    Orders(#[from] polis_runtime::event::Closed),
    /// The member is to be what it was, and was nothing.
    #[error("this node has no etcd member on its disk")]
    NoMember,
    /// What is on the disk cannot be a member.
    #[error("the etcd member on the disk is incomplete: its {missing} is missing")]
    Damaged {
        /// The first thing that is missing.
        missing: &'static str,
    },
    /// The disk.
    #[error("cannot keep what etcd needs")]
    Files(#[from] files::Error),
    /// The node's key cannot be written.
    #[error("cannot use the key of the node")]
    Key(#[source] polis_wire::identity::Error),
    /// What the cluster should begin with is no snapshot.
    #[error("cannot found the cluster from the snapshot on the ESP")]
    Snapshot(#[source] polis_runtime::sys::process::Error),
    /// etcd could not be started or waited for.
    #[error("cannot run etcd")]
    Process(#[source] polis_runtime::sys::process::Error),
    /// etcd ended.
    #[error("etcd {exit}{said}")]
    Died {
        /// How.
        exit: polis_runtime::sys::process::Exit,
        /// Its last complaint, after a colon; empty if there was none.
        said: String,
    },
    /// etcd ended and blames its own files.
    #[error("etcd {exit}: its database is damaged: {said}")]
    Corrupt {
        /// How.
        exit: polis_runtime::sys::process::Exit,
        /// What it says of it.
        said: String,
    },
    /// etcd ended because the others removed this member.
    #[error("the other members removed this one from the cluster")]
    Removed,
    /// The node leaves etcd: the cluster took the role away.
    #[error("the member of this node has left etcd")]
    Left,
    /// etcd runs and does not answer.
    #[error("etcd did not answer within {0:?} of its start")]
    Silent(std::time::Duration),
    /// A certificate could not be made.
    #[error("cannot make the certificates of the etcd peers")]
    Pki(#[from] polis_wire::pki::Error),
    /// etcd did not do as it was told.
    #[error("cannot use etcd")]
    Client(#[from] client::Error),
    /// A test ended the run.
    #[error("interrupted after the step {0:?}")]
    Interrupted(Step),
}
