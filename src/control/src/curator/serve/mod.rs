//! The handlers of the API: answer the calls of nodes and people, one file for each service.
//!
//! `rpc` admits calls and identifies their callers; the handlers turn them into changes of
//! records and into copies of them.
//!
//! ```text
//! call --> does this curator lead? --no--> UNAVAILABLE, and the name of the leader
//!               | yes
//!               +-- change: store, under the lock of the term
//!               +-- question: directory, once it holds all that was written before
//! ```
//!
//! Invariants:
//! - A caller sees the result of an acknowledged change in its next answer.
//! - A stream of a leader ends when its term does.
//! - Changes of the members of etcd happen one at a time.

mod aaa;
mod audit;
mod audit_pages;
mod changes;
mod curator;
mod departures;
mod kinds;
mod limits;
mod local;
mod management;
mod members;
mod objects;
mod proving;
mod pruning;
mod readmitting;
mod registries;
mod rotating;
mod snapshot;
mod updating;
mod watching;
mod workers;

use std::net::{Ipv4Addr, SocketAddr};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use polis_proto::v1::aaa_server::AaaServer;
use polis_proto::v1::curator_local_server::CuratorLocalServer;
use polis_proto::v1::curator_server::CuratorServer;
use polis_proto::v1::management_server::ManagementServer;
use tokio::sync::{Mutex, Semaphore, watch};
use tokio::time::Instant;
use tonic::Status;
use tonic::service::Routes;

pub use self::audit::Attempts;
pub(super) use self::audit::Service as AuditService;
pub use self::changes::Changes;
pub(super) use self::changes::Service as ChangesService;
pub use self::departures::{Departures, Service as DeparturesService};
pub use self::kinds::Kinds;
pub(super) use self::pruning::Pruning;
pub(super) use self::rotating::Rotating;
pub(super) use self::updating::Updating;
pub use self::updating::Waiting;
use super::attesting::Questions;
use super::audit::Audit;
use super::budgets::Budgets;
use super::directory::Directory;
use super::error::Error;
use super::fenced::Fenced;
use super::health::Heartbeats;
use super::leader::{Leadership, Term};
use super::refused::Refusals;
use super::store::Store;
use crate::consensus::client::User;
use crate::consensus::{self, Members, Peer};
use polis_base::sys::clock;
use polis_runtime::event::until;
use polis_wire::audit::layer::Audited;
use polis_wire::identity::NodeId;
use polis_wire::rpc::{self, Credentials};

/// The copy follows etcd by milliseconds; a stream whose copy needs longer is cut off.
const COPY_MAX: Duration = Duration::from_secs(3);

/// The answer of a streaming call.
type Stream<T> = Pin<Box<dyn futures::Stream<Item = Result<T, Status>> + Send>>;

/// Computes the address of a member of etcd from its node and its address.
pub type Naming = fn(NodeId, std::net::IpAddr) -> Peer;

/// The shared parts of the handlers. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Handlers(Arc<Parts>);

/// The parts of [`Handlers`].
#[derive(Debug)]
pub struct Parts {
    /// This node.
    pub node: NodeId,
    /// The credentials that it serves with, the cluster's CA among them.
    pub credentials: watch::Receiver<Option<Credentials>>,
    /// The leader.
    pub leadership: watch::Receiver<Leadership>,
    /// The copy of the records.
    pub directory: watch::Sender<Directory>,
    /// The received heartbeats.
    pub heartbeats: Heartbeats,
    /// The machines whose registration was rejected.
    pub refusals: Refusals,
    /// The questions to the TPMs of machines that register.
    pub questions: Questions,
    /// The questions to the TPMs of members: a machine that registers cannot displace one.
    pub member_questions: Questions,
    /// The proofs that members may begin.
    pub proofs: Budgets,
    /// The member of etcd beside this curator.
    pub consensus: watch::Receiver<consensus::Status>,
    /// The way to change the members of etcd.
    pub members: Members,
    /// The address of new members.
    pub naming: Naming,
    /// The reason why the update of the cluster waits.
    pub waiting: watch::Sender<Option<Waiting>>,
    /// The update of the cluster, for this node's screen and metrics.
    pub update: watch::Sender<Option<polis_proto::v1::GetUpdateResponse>>,
    /// The node that may restart in its turn, and when that was found.
    pub leave: watch::Sender<Option<(NodeId, Instant)>>,
    /// The node whose member of etcd starts again now.
    pub restart: watch::Sender<Option<NodeId>>,
    /// Held while the members of etcd change.
    pub changing: Mutex<()>,
    /// Takes nodes out of etcd and out of the cluster, one after the other.
    pub departures: Departures,
    /// Runs the calls that change something to their end.
    pub changes: Changes,
    /// The right to take a snapshot: one at a time.
    pub snapshots: Arc<Semaphore>,
    /// The audit log.
    pub audit: Audit,
    /// Receives the calls that were not done, for the audit log.
    pub attempts: Attempts,
}

impl Parts {
    /// The address of a node's member, existing or future.
    fn peer(&self, id: NodeId, node: &polis_proto::v1::Node) -> Peer {
        // Every member of etcd has reported its address before, and if the place is a name, the
        // address does not matter.
        let address = node.status.as_ref().and_then(|status| status.external_address.parse().ok());
        (self.naming)(id, address.unwrap_or(Ipv4Addr::UNSPECIFIED.into()))
    }
}

impl Handlers {
    /// Handlers of these parts.
    #[must_use]
    pub fn new(parts: Parts) -> Self {
        Self(Arc::new(parts))
    }

    /// Every service of a curator, with reflection and health.
    ///
    /// # Errors
    ///
    /// When the descriptors cannot be read: the build is broken.
    pub fn routes<H>(
        &self,
        health: tonic_health::pb::health_server::HealthServer<H>,
    ) -> Result<Routes, tonic_reflection::server::Error>
    where
        H: tonic_health::pb::health_server::Health,
    {
        let reflection = || {
            tonic_reflection::server::Builder::configure()
                .register_encoded_file_descriptor_set(polis_proto::DESCRIPTORS)
                .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
        };
        let (aaa, management) = (AaaServer::new(self.clone()), ManagementServer::new(self.clone()));
        Ok(Routes::new(Audited::new(aaa, self.clone()))
            .add_service(Audited::new(management, self.clone()))
            .add_service(CuratorServer::new(self.clone()))
            .add_service(CuratorLocalServer::new(self.clone()))
            .add_service(health)
            .add_service(reflection().build_v1()?)
            .add_service(reflection().build_v1alpha()?))
    }

    /// The term of this curator, for one call.
    fn lead(&self) -> Result<Lead, Status> {
        let term = self.0.leadership.borrow().term.clone();
        let mut term = term.ok_or_else(|| self.not_leader())?;
        term.store.kv = term.store.kv.for_call();
        Ok(Lead { handlers: self.clone(), term })
    }

    /// DER of the cluster's CA.
    fn authority(&self) -> Result<Vec<u8>, Status> {
        let credentials = self.0.credentials.borrow();
        let known = credentials.as_ref().and_then(|credentials| credentials.authorities.clone());
        known
            .map(|known| known.signing.clone())
            .ok_or_else(|| Status::unavailable("this node has no cluster yet"))
    }

    /// The answer of a curator that does not lead.
    fn not_leader(&self) -> Status {
        let leader = self.0.leadership.borrow().leader.clone();
        // Its own lock may still exist, right after it was given up.
        let leader = leader.filter(|leader| leader.node != self.0.node);
        rpc::not_leader(leader.map(|leader| {
            let address = leader.address.map(|address| SocketAddr::new(address, leader.port));
            (leader.node, address)
        }))
    }
}

/// A call that this curator answers as the leader.
struct Lead {
    handlers: Handlers,
    term: Term,
}

impl Lead {
    /// The write access to records.
    fn store(&self) -> &Store<Fenced> {
        &self.term.store
    }

    /// The write access to the namespace of another user of etcd.
    fn fenced(&self, user: User) -> Result<Fenced, Error> {
        let consensus = self.handlers.0.consensus.borrow();
        let clients = consensus.voter().ok_or(consensus::MembersError::NoVoter)?;
        Ok(self.term.fenced(clients.user(user)))
    }

    /// The answer to a call that failed.
    fn refuse(&self, error: impl Into<Error>) -> Status {
        let error = error.into();
        if error.deposed() { self.handlers.not_leader() } else { error.into() }
    }

    /// Whether a copy holds everything that was written before now.
    fn is_current(&self, directory: &Directory) -> bool {
        directory.holds(self.term.revision(), self.term.store.kv.written())
    }

    /// Whether the members of etcd change, or a node leaves. A departure holds the lock until its
    /// record is written, so one of the two is seen.
    fn members_change(&self, directory: &Directory) -> bool {
        self.handlers.0.changing.try_lock().is_err() || directory.has_departure()
    }

    /// Waits until the copy holds everything that was written before now.
    async fn current(&self) -> Result<watch::Receiver<Directory>, Status> {
        let (lock, written) = (self.term.revision(), self.term.store.kv.written());
        let mut directory = self.handlers.0.directory.subscribe();
        let current = until(&mut directory, "the directory", |directory| {
            directory.holds(lock, written).then_some(())
        });
        match tokio::time::timeout(COPY_MAX, current).await {
            Ok(Ok(())) => Ok(directory),
            Ok(Err(_)) | Err(_) => {
                Err(Status::unavailable("this curator receives no changes from etcd; try again"))
            }
        }
    }

    /// The public view of a node, as it is now.
    async fn info(&self, id: NodeId) -> Result<polis_proto::v1::NodeInfo, Status> {
        let directory = self.current().await?;
        let directory = directory.borrow();
        let known = directory.node(id);
        let known = known.ok_or_else(|| self.refuse(super::state::Refusal::Unknown))?;
        Ok(super::convert::info(id, known, &self.handlers.0.heartbeats))
    }
}

/// Seconds from 1970 to now.
fn seconds() -> i64 {
    super::configuration::seconds(clock::now())
}

/// The rejection of a caller that the access table should not have admitted.
fn untrusted() -> Status {
    Status::permission_denied("this kind of caller may not make this call")
}
