//! The etcd member of this node: runs it, and provides clients to it.
//!
//! The cluster manager gives [`Orders`] once it knows what this machine is to be; every
//! other service reads [`Status`] and takes a client from it. A service that needs etcd
//! runs beside a member: the unix socket is the only way in.
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
//! - No port is open before there are certificates, and then only mutual TLS of version 1.3
//!   with a certificate that carries [`polis_wire::pki::ETCD_PEER_NAME`].
//! - A bootstrap that was cut off anywhere ends, after the next start, in the same state as
//!   an undisturbed one.
//! - Data is thrown away only if `bootstrapping` on the disk shows that no other machine
//!   has seen it.
//! - Healthy means voter.
//! - An etcd that attributes errors to its own files is started again a few times, then not
//!   again.
//!
//! What this module does not do: decide what a machine is to be (`cluster`), or which node
//! may enter (`curator`).

mod announcement;
mod args;
mod awaited;
mod bootstrap;
pub mod client;
mod credentials;
mod damage;
mod defragmentation;
mod maintenance;
mod members;
mod peers;
mod process;
mod quorum;
mod restore;
mod serve;
mod service;
mod severity;
pub mod snapshots;
mod status;
mod wal;
mod watchers;

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

use polis_base::files::{self, Etcd, Sockets};
use polis_base::users::{self, User};
use polis_proto::v1;
use polis_wire::identity::{NodeId, NodeKey};
use polis_wire::pki::{Authorities, Certificate, Host};
use sha2::{Digest as _, Sha256};

pub use self::members::{Error as MembersError, Members};
pub use self::peers::Work;
pub use self::quorum::Refusal;
pub use self::service::{Restarts, Service, forget, readahead};
pub use self::status::{Alarm, Member, MemberId, MemberStatus, Status};
pub use self::wal::holds_entries;

/// The authority that signs the certificates of peers.
#[must_use]
pub fn peer_authority() -> Arc<Certificate> {
    credentials::authority()
}

/// SHA-256 of the file with the authorities that a member trusts.
#[must_use]
pub fn trusted_digest(authorities: &Authorities) -> [u8; 32] {
    Sha256::digest(credentials::trusted_pem(authorities)).into()
}

/// The port on which peers reach each other.
pub const PEER_PORT: u16 = 7834;

/// etcd's own default of bytes for its database, set explicitly because the console shows
/// how much of it is used.
pub const QUOTA: u64 = 2 << 30;

/// The address at which peers reach one member.
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
            user: Some(users::ETCD),
            tree: root.data.etcd.clone(),
            sockets: root.ephemeral.consensus.clone(),
            // etcd takes this for any address of both families, and a kernel without IPv6 has
            // this one alone.
            listen: SocketAddr::from((std::net::Ipv4Addr::UNSPECIFIED, PEER_PORT)),
            restorer: PathBuf::from("/usr/bin/etcdutl"),
            snapshot: root.esp.etcd_snapshot.clone(),
            directory: root.esp.cluster_directory.clone(),
            quota: QUOTA,
            snapshot_pace: snapshots::Pace::default(),
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
    /// The user that it runs as, where the node is root; the node's own without one. The user
    /// must be able to reach the program and the tree.
    pub user: Option<User>,
    /// The directory of the member's data.
    pub tree: Etcd,
    /// The directory of its socket.
    pub sockets: Sockets,
    /// The address on which it listens for peers. The unspecified address serves any
    /// address that the node ever gets.
    pub listen: SocketAddr,
    /// The program that makes a member of a snapshot, and checks one.
    pub restorer: PathBuf,
    /// The snapshot that a bootstrap begins with, if the file exists.
    pub snapshot: files::File,
    /// The file with the last list of members that a leader sent.
    pub directory: files::File,
    /// Bytes of the database at which etcd refuses writes: [`QUOTA`].
    pub quota: u64,
    /// How often it takes snapshots of itself.
    pub snapshot_pace: snapshots::Pace,
    /// Observes every step of a bootstrap; for tests.
    pub probe: Probe,
}

/// The orders for this member.
#[derive(Clone, Debug)]
pub struct Orders {
    /// The key of the node.
    pub key: NodeKey,
    /// The address at which its peers reach it.
    pub peer: Peer,
    /// How it starts.
    pub start: Start,
}

/// The ways in which a member comes to be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Start {
    /// Create a new cluster, or continue the creation of an earlier attempt.
    Bootstrap,
    /// Start as the existing member.
    Restart,
    /// Enter a cluster; the curator's invitation replaces the data on the disk.
    Join(Box<Invitation>),
}

impl Start {
    /// Whether it enters an existing cluster.
    #[must_use]
    pub fn joins(&self) -> bool {
        matches!(self, Self::Join(_))
    }
}

/// All that a node needs to become a member, except its key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Invitation {
    /// The authority of the peers, and those before it.
    pub authorities: Authorities,
    /// The node's own certificate, DER.
    pub certificate: Vec<u8>,
    /// The revoked certificates: a CRL, DER.
    pub crl: Vec<u8>,
    /// Every member, with the new one.
    pub members: Vec<Member>,
}

impl Invitation {
    /// Reads the answer to `JoinConsensus` as the node `own`; `None` if its authorities cannot be
    /// read.
    #[must_use]
    pub fn read(answer: v1::JoinConsensusResponse, own: NodeId) -> Option<Self> {
        let own = own.to_string();
        let member = |peer: v1::join_consensus_response::Peer| Member {
            id: MemberId(0),
            // As etcd reports it: the new one has no name yet.
            name: if peer.node_id == own { String::new() } else { peer.node_id },
            peer_url: peer.peer_url,
            learner: false,
        };
        Some(Self {
            authorities: Authorities::from_message(answer.authorities?)?,
            certificate: answer.peer_certificate,
            crl: answer.crl,
            members: answer.members.into_iter().map(member).collect(),
        })
    }
}

/// A step of a bootstrap that was just taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// The disk marks that a bootstrap has begun.
    Marked,
    /// The remains of an earlier attempt are removed.
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
    /// The disk marks that the bootstrap is complete.
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

/// The reason why a run of the member ended, or could not begin.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The cluster manager has ended.
    #[error("the orders ended")]
    Orders(#[from] polis_runtime::event::Closed),
    /// The orders expect an existing member, but the disk lacks one.
    #[error("this node has no etcd member on its disk")]
    NoMember,
    /// The files on the disk do not make a member.
    #[error("the etcd member on the disk is incomplete: its {missing} is missing")]
    Damaged {
        /// The first file that is missing.
        missing: &'static str,
    },
    /// The disk.
    #[error("cannot store the files of etcd")]
    Files(#[from] files::Error),
    /// The node's key cannot be written.
    #[error("cannot use the key of the node")]
    Key(#[source] polis_wire::identity::Error),
    /// The file that the cluster should begin with is not a snapshot.
    #[error("cannot found the cluster from the snapshot on the ESP")]
    Snapshot(#[source] polis_runtime::sys::process::Error),
    /// That file has no content.
    #[error("the snapshot on the ESP is empty: its copy was cut off")]
    EmptySnapshot,
    /// That file is as `polisctl etcd snapshot` saved it, for owners to read.
    #[error("the snapshot on the ESP is encrypted to the owners of the cluster")]
    EncryptedSnapshot,
    /// etcd could not be started or waited for.
    #[error("cannot run etcd")]
    Process(#[source] polis_runtime::sys::process::Error),
    /// etcd ended.
    #[error("etcd {exit}{output}")]
    Died {
        /// The exit status.
        exit: polis_runtime::sys::process::Exit,
        /// Its last complaint, after a colon; empty without one.
        output: String,
    },
    /// etcd ended with an error about its own files.
    #[error("etcd {exit}: its database is damaged: {output}")]
    Corrupt {
        /// The exit status.
        exit: polis_runtime::sys::process::Exit,
        /// The text of that error.
        output: String,
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
    /// etcd did not carry out a request.
    #[error("cannot use etcd")]
    Client(#[from] client::Error),
    /// A test ended the run.
    #[error("interrupted after the step {0:?}")]
    Interrupted(Step),
}
