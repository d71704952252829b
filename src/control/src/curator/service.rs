//! The service of the curator: runs it beside this node's etcd member.
//!
//! ```text
//! this node has a name, its member votes
//!      |
//!      +--> directory   the copy of the records
//!      +--> health      the heartbeats
//!      +--> access      the access list, for every server of this node
//!      +--> status      the status for the node and `grpc.health`
//!      +--> departures  nodes that are taken out
//!      +--> changes     the calls that change something
//!      +--> pruning     the lists of issued certificates
//!      +--> updating    the journal of an update of the cluster
//!      +--> rotating    a rotation of the authorities
//!      +--> proof       the certificate of this node as a curator
//!      +--> server      port 7835, once there is that certificate
//!      +--> leader      started last, so that it is stopped first: a leader hands over
//!                       before the port closes, once the changes under way have ended
//! ```
//!
//! The member may stop and come back; every part here waits for it and goes on.
//!
//! Invariants:
//! - The port serves only with a certificate that proves that this node is a curator.
//! - `Done` is reported when the port serves and this curator knows the leader.

use std::net::SocketAddr;
use std::sync::Arc;

use tokio::sync::{Mutex, Semaphore, watch};
use tonic_health::ServingStatus;
use tonic_health::server::HealthReporter;

use super::access_list;
use super::attested;
use super::attesting::{self, Questions};
use super::audit::Audit;
use super::directory::{self, Directory};
use super::health::{self, Heartbeats};
use super::leader::{self, Leadership};
use super::proof;
use super::refused::Refusals;
use super::serve::{
    Attempts, AuditService, Changes, ChangesService, Departures, DeparturesService, Handlers,
    Naming, Parts, Pruning, Rotating, Updating,
};
use super::skew;
use super::store::Store;
use crate::consensus::client::{Clients, User};
use crate::consensus::{self, Members};
use polis_base::stage::{Stage, State};
use polis_machine::{network, time};
use polis_runtime::event::{Closed, until};
use polis_runtime::supervisor::{Context, Policy};
use polis_wire::endpoint::CURATOR_PORT;
use polis_wire::identity::Identity;
use polis_wire::rpc::{self, AccessList, App, Credentials, Limits, Listen, Metrics, Table};

/// The services that only the leader answers.
const OF_THE_LEADER: [&str; 3] = ["polis.v1.Aaa", "polis.v1.Curator", "polis.v1.Management"];

/// The service that every curator answers.
const OF_ALL: &str = "polis.v1.CuratorLocal";

/// The configuration, fixed for the life of the process.
#[derive(Clone, Debug)]
pub struct Config {
    /// The address on which it listens.
    pub listen: Listen,
    /// The port that other nodes receive.
    pub port: u16,
    /// The limits on callers.
    pub limits: Limits,
    /// The addresses of the members of etcd.
    pub naming: Naming,
}

impl Config {
    /// The curator of a running node.
    #[must_use]
    pub fn live() -> Self {
        Self {
            listen: Listen::Everywhere(CURATOR_PORT),
            port: CURATOR_PORT,
            limits: Limits::default(),
            naming: |id, _address| consensus::Peer::of(id),
        }
    }
}

/// The published status of this node's curator.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Status {
    /// The address at which it serves, if it does.
    pub serving: Option<SocketAddr>,
    /// The leader.
    pub leadership: Leadership,
}

impl Status {
    /// Whether calls are answered, here or by a leader that is known here.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        let Leadership { leader, term } = &self.leadership;
        self.serving.is_some() && (leader.is_some() || term.is_some())
    }
}

/// Configuration, inputs and outputs. Cloned into every run; holds no progress.
#[derive(Clone, Debug)]
pub struct Service {
    /// The configuration.
    pub config: Config,
    /// The identity of this node.
    pub identity: watch::Receiver<Option<Identity>>,
    /// The member beside it.
    pub consensus: watch::Receiver<consensus::Status>,
    /// The way to change the members.
    pub members: Members,
    /// The address that other nodes receive.
    pub network: watch::Receiver<network::Status>,
    /// The time by which the clock of this node is ahead of the others.
    pub ahead: watch::Receiver<time::Ahead>,
    /// The credentials of this node.
    pub credentials: watch::Receiver<Option<Credentials>>,
    /// The access table of calls.
    pub table: Arc<Table>,
    /// The metrics.
    pub metrics: Arc<Metrics>,
    /// The access list.
    pub access_list: watch::Sender<Arc<AccessList>>,
    /// The copy of the records.
    pub directory: watch::Sender<Directory>,
    /// Learns when another machine reached this curator over a new connection.
    pub reached: watch::Sender<Option<tokio::time::Instant>>,
    /// The update of the cluster that goes on, or the last one; `None` without one, and while
    /// no curator runs here.
    pub update: watch::Sender<Option<polis_proto::v1::GetUpdateResponse>>,
    /// The published status.
    pub status: watch::Sender<Status>,
}

/// The reason why a run ends.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// An input ended.
    #[error(transparent)]
    Closed(#[from] Closed),
    /// The etcd member beside which a curator could run has ended.
    #[error("the member of etcd beside this curator has left")]
    Left,
    /// The descriptors of the API cannot be read: the build is broken.
    #[error("cannot describe the API")]
    Reflection(#[from] tonic_reflection::server::Error),
}

impl Service {
    /// Runs until cancelled.
    ///
    /// # Errors
    ///
    /// [`Error`].
    pub async fn run(mut self, ctx: Context) -> Result<(), Error> {
        let ready = async {
            let identity = until(&mut self.identity, "the node's identity", Clone::clone).await?;
            let clients =
                until(&mut self.consensus, "the etcd member", |status| status.voter().cloned());
            Ok::<_, Closed>((identity, clients.await?))
        };
        let Some(ready) = ctx.until_cancelled(ready).await else { return Ok(()) };
        let (identity, clients) = ready?;
        ctx.stage(Stage::Curator, State::Started);
        self.services(&identity, &clients)?.start(&ctx);
        let left = until(&mut self.consensus, "the etcd member", |status| {
            status.is_absent().then_some(())
        });
        let left = ctx.until_cancelled(left).await;
        self.status.send_replace(Status::default());
        self.update.send_replace(None);
        match left {
            // The supervisor ends every child here, and starts it again: the new run waits
            // until a member exists once more.
            Some(Ok(())) => Err(Error::Left),
            Some(Err(closed)) => Err(closed.into()),
            None => Ok(()),
        }
    }

    /// The parts beside the member, and the channels between them.
    fn services(&self, identity: &Identity, clients: &Clients) -> Result<Services, Error> {
        let client = clients.user(User::Curator);
        let leadership = watch::Sender::<Leadership>::default();
        let heartbeats = Heartbeats::default();
        let (reporter, health) = tonic_health::server::health_reporter();
        let (departures, queue) = Departures::channel();
        let (changes, changing) = Changes::channel();
        let under_way = changes.under_way();
        let (attempts, attempted, refused) = Attempts::channel();
        let handlers = Handlers::new(Parts {
            node: identity.id,
            credentials: self.credentials.clone(),
            leadership: leadership.subscribe(),
            directory: self.directory.clone(),
            heartbeats: heartbeats.clone(),
            refusals: Refusals::default(),
            questions: Questions::default(),
            member_questions: Questions::default(),
            proofs: attesting::budgets(),
            consensus: self.consensus.clone(),
            members: self.members.clone(),
            naming: self.config.naming,
            waiting: watch::Sender::default(),
            update: self.update.clone(),
            leave: watch::Sender::default(),
            restart: watch::Sender::default(),
            changing: Mutex::default(),
            departures,
            changes,
            snapshots: Arc::new(Semaphore::new(1)),
            audit: Audit::default(),
            attempts,
        });
        let listening = watch::Sender::new(None);
        let own = watch::Sender::new(None);
        let server = rpc::Server {
            config: rpc::Config {
                name: "the curator",
                listen: self.config.listen.clone(),
                limits: self.config.limits.clone(),
            },
            credentials: own.subscribe(),
            named: None,
            access_list: self.access_list.subscribe(),
            table: Arc::clone(&self.table),
            metrics: Arc::clone(&self.metrics),
            app: App::Grpc(handlers.routes(health)?),
            refused: Some(refused),
            reached: Some(self.reached.clone()),
            listening: listening.clone(),
        };
        Ok(Services {
            directory: directory::Service {
                client: client.clone(),
                directory: self.directory.clone(),
            },
            health: health::Service {
                leadership: leadership.subscribe(),
                heartbeats,
                members: self.members.clone(),
                directory: self.directory.clone(),
            },
            attested: attested::Service {
                leadership: leadership.subscribe(),
                directory: self.directory.clone(),
            },
            access_list: access_list::Service {
                directory: self.directory.subscribe(),
                access_list: self.access_list.clone(),
            },
            status_reporter: Reporter {
                listening: listening.subscribe(),
                leadership: leadership.subscribe(),
                status: self.status.clone(),
                reporter,
            },
            pruning: Pruning { handlers: handlers.clone(), ahead: self.ahead.clone() },
            updating: Updating { handlers: handlers.clone() },
            rotating: Rotating { handlers: handlers.clone() },
            audit: AuditService { handlers: handlers.clone(), queue: attempted },
            changes: ChangesService { queue: changing },
            departures: DeparturesService {
                handlers,
                queue,
                leadership: leadership.subscribe(),
                directory: self.directory.subscribe(),
                consensus: self.consensus.clone(),
            },
            proof: proof::Service {
                identity: *identity,
                store: Store::new(client.clone()),
                node: self.credentials.clone(),
                own,
                reported: false,
            },
            server,
            skew: skew::Service {
                node: identity.id,
                ahead: self.ahead.clone(),
                directory: self.directory.subscribe(),
                leadership: leadership.subscribe(),
                stepped_down: None,
            },
            leader: leader::Service {
                node: identity.id,
                port: self.config.port,
                client,
                network: self.network.clone(),
                consensus: self.consensus.clone(),
                directory: self.directory.subscribe(),
                under_way,
                leadership,
            },
        })
    }
}

/// The children of one run.
struct Services {
    directory: directory::Service,
    health: health::Service,
    attested: attested::Service,
    access_list: access_list::Service,
    status_reporter: Reporter,
    departures: DeparturesService,
    pruning: Pruning,
    updating: Updating,
    rotating: Rotating,
    audit: AuditService,
    changes: ChangesService,
    proof: proof::Service,
    server: rpc::Server,
    skew: skew::Service,
    leader: leader::Service,
}

impl Services {
    /// Starts them; the leader last, so that it is stopped first.
    fn start(self, ctx: &Context) {
        let Self {
            directory,
            health,
            attested,
            access_list,
            status_reporter,
            departures,
            pruning,
            updating,
            rotating,
            audit,
            changes,
            proof,
            server,
            skew,
            leader,
        } = self;
        let forever = Policy::forever();
        ctx.spawn("directory", forever, move |ctx| directory.clone().run(ctx));
        ctx.spawn("health", forever, move |ctx| health.clone().run(ctx));
        ctx.spawn("attested", forever, move |ctx| attested.clone().run(ctx));
        ctx.spawn("access", forever, move |ctx| access_list.clone().run(ctx));
        let parent = ctx.clone();
        ctx.spawn("status", forever, move |ctx| status_reporter.clone().run(ctx, parent.clone()));
        ctx.spawn("departures", forever, move |ctx| departures.clone().run(ctx));
        ctx.spawn("pruning", forever, move |ctx| pruning.clone().run(ctx));
        ctx.spawn("updating", forever, move |ctx| updating.clone().run(ctx));
        ctx.spawn("rotating", forever, move |ctx| rotating.clone().run(ctx));
        ctx.spawn("audit", forever, move |ctx| audit.clone().run(ctx));
        ctx.spawn("changes", forever, move |ctx| changes.clone().run(ctx));
        ctx.spawn("proof", forever, move |ctx| proof.clone().run(ctx));
        ctx.spawn("server", forever, move |ctx| server.clone().run(ctx));
        ctx.spawn("skew", forever, move |ctx| skew.clone().run(ctx));
        ctx.spawn("leader", forever, move |ctx| leader.clone().run(ctx));
    }
}

/// Publishes the status of this curator, to the node and to callers of `grpc.health`.
#[derive(Clone)]
struct Reporter {
    listening: watch::Receiver<Option<SocketAddr>>,
    leadership: watch::Receiver<Leadership>,
    status: watch::Sender<Status>,
    reporter: HealthReporter,
}

impl Reporter {
    async fn run(mut self, ctx: Context, parent: Context) -> Result<(), Closed> {
        self.reporter.set_service_status(OF_ALL, ServingStatus::Serving).await;
        let mut done = false;
        loop {
            let serving = *self.listening.borrow_and_update();
            let leadership = self.leadership.borrow_and_update().clone();
            let leads = leadership.term.is_some();
            let status = Status { serving, leadership };
            let ready = status.is_ready();
            self.status.send_replace(status);
            let state = if leads { ServingStatus::Serving } else { ServingStatus::NotServing };
            for service in OF_THE_LEADER {
                self.reporter.set_service_status(service, state).await;
            }
            ctx.healthy();
            if ready && !done {
                done = true;
                parent.stage(Stage::Curator, State::Done);
                parent.healthy();
            }
            let changed = async {
                tokio::select! {
                    // Cancel-safe, both: they wait for event values.
                    changed = self.listening.changed() => changed.map_err(|_closed| "the server"),
                    changed = self.leadership.changed() => {
                        changed.map_err(|_closed| "the election")
                    }
                }
            };
            match ctx.until_cancelled(changed).await {
                Some(changed) => changed.map_err(Closed)?,
                None => return Ok(()),
            }
        }
    }
}
