//! The calls of `NodeManagement`: answers them.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures::Stream;
use polis_proto::v1;
use polis_proto::v1::node_management_server::{NodeManagement, NodeManagementServer};
use polis_tui::Snapshot;
use polis_tui::snapshot::StageState;
use tokio::sync::watch;
use tokio::time::Instant;
use tonic::service::{Routes, RoutesBuilder};
use tonic::{Request, Response, Status, Streaming};
use tracing::{info, warn};
use zeroize::Zeroizing;

use super::calls::Calls;
use super::{Inputs, attest, console, drain, firewall, logs, update};
use polis_base::sys::clock;
use polis_base::sys::reboot::Reason;
use polis_control::cluster::unlock::firmware;
use polis_control::cluster::unlock::request::Refused;
use polis_control::cluster::unlock::sealer::Binding;
use polis_control::consensus;
use polis_machine::update::{Door, Store};
use polis_runtime::lines::Lines;
use polis_runtime::logtree;
use polis_runtime::supervisor::Tree;
use polis_runtime::sys::process;
use polis_wire::audit::layer::Audited;
use polis_wire::rpc::Peer;
use polis_workload::Part;

/// How long a request to wipe waits for the removal from the cluster: a later one, for another
/// reason, wipes no disk.
const RESET: Duration = Duration::from_secs(600);

/// Bytes of the longest text that is read as a recovery key, spaces and all.
const KEY_TEXT_MAX: usize = 1024;

/// The service above all others: the process of the node.
const ROOT: &str = "root";

/// The sources of the answers.
#[derive(Clone, Debug)]
pub(super) struct Handlers {
    pub(super) inputs: Inputs,
    pub(super) logs: logtree::Tree,
    pub(super) services: watch::Receiver<Tree>,
    pub(super) end: watch::Sender<Option<Reason>>,
    pub(super) reset: watch::Sender<Option<Instant>>,
    pub(super) update: Door,
    pub(super) bundles: Store,
    pub(super) firewall: firewall::Config,
    pub(super) tpm: attest::Tpm,
    pub(super) lines: Lines,
}

type Answers<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

impl Handlers {
    /// Everything that the management port serves.
    pub(super) fn routes(self, calls: Calls) -> Result<Routes, tonic_reflection::server::Error> {
        let describe = || {
            tonic_reflection::server::Builder::configure()
                .register_encoded_file_descriptor_set(polis_proto::DESCRIPTORS)
                .with_service_name("polis.v1.NodeManagement")
        };
        let (_reporter, health) = tonic_health::server::health_reporter();
        let mut routes = RoutesBuilder::default();
        routes
            .add_service(Audited::new(NodeManagementServer::new(self), calls))
            .add_service(describe().build_v1()?)
            .add_service(describe().build_v1alpha()?)
            .add_service(health);
        Ok(routes.routes().prepare())
    }
}

/// The first part of the node that waits, and for what.
fn waits_for(shown: &Snapshot) -> String {
    let waits = shown.stages.iter().find_map(|stage| match &stage.state {
        StageState::Waiting { what, .. } => Some(format!("{} waits for {what}", stage.name)),
        StageState::Pending | StageState::Started | StageState::Done | StageState::Failed => None,
    });
    waits.unwrap_or_default()
}

/// The member of etcd, once it serves. The console asks which others it reaches.
fn member(status: &consensus::Status, shown: &Snapshot) -> Option<v1::ConsensusMember> {
    let id = status.member.filter(|_| status.clients.is_some())?;
    let learner = matches!(status.standing, consensus::MemberStatus::Learner { .. });
    let known = status.members.iter().find(|member| member.id == id);
    let own = shown.etcd.iter().flat_map(|etcd| &etcd.members).find(|member| member.own);
    let reached = own.and_then(|own| own.reaches.clone());
    Some(v1::ConsensusMember {
        id: id.0,
        node_id: known.map(|member| member.name.clone()).unwrap_or_default(),
        peer_urls: vec![status.peer_url.clone()],
        learner,
        answers: true,
        applied_index: status.applied,
        db_bytes: status.db_size,
        db_used_bytes: status.db_used,
        index: status.index,
        leader: status.leader.map_or(0, |leader| leader.0),
        told_age_ms: 0,
        reach: reached.map(|members| v1::consensus_member::Reach { members }),
        snapshots: status.local_snapshots(),
    })
}

#[tonic::async_trait]
impl NodeManagement for Handlers {
    type LogsStream = Answers<v1::LogsResponse>;

    async fn get_status(
        &self,
        _request: Request<v1::GetStatusRequest>,
    ) -> Result<Response<v1::GetStatusResponse>, Status> {
        let cluster = self.inputs.cluster.borrow().clone();
        let report = self.inputs.report.borrow().clone();
        // Borrowed once: between two, the console may begin to wait for the first to end.
        let snapshot = Arc::clone(&self.inputs.snapshot.borrow());
        let consensus = self.inputs.consensus.borrow().clone();
        let etcd = member(&consensus, &snapshot);
        let version = consensus.cluster_version.filter(|_known| etcd.is_some());
        Ok(Response::new(v1::GetStatusResponse {
            node_id: cluster.node.map(|id| id.to_string()).unwrap_or_default(),
            status: Some(report),
            cluster_state: cluster.state.to_string(),
            ready: *self.inputs.ready.borrow(),
            uptime_seconds: clock::uptime().as_secs_f64(),
            etcd,
            waits_for: waits_for(&snapshot),
            etcd_cluster: version.map(|version| version.to_string()).unwrap_or_default(),
        }))
    }

    async fn logs(
        &self,
        request: Request<v1::LogsRequest>,
    ) -> Result<Response<Self::LogsStream>, Status> {
        let visibility = logs::Visibility::of(&Peer::of(&request));
        let asked = logs::asked(request.into_inner())?;
        if asked.boot < 0 {
            let ring = self.inputs.ring.borrow().ring.clone();
            let ring = ring.ok_or_else(|| {
                Status::unavailable("the logs of earlier boots are on a disk that is not open yet")
            })?;
            let past = ring.read(asked.boot, asked.query).await;
            let past = past.map_err(|error| logs::unreadable(&error))?;
            return Ok(Response::new(Box::pin(logs::past(past, visibility))));
        }
        Ok(Response::new(match asked.follow {
            true => Box::pin(logs::following(&self.logs, asked.query, visibility)),
            false => {
                let entries = self.logs.backlog(&asked.query);
                Box::pin(logs::finished(entries, logs::started(), visibility))
            }
        }))
    }

    type ConsoleStream = Answers<v1::ConsoleFrame>;

    async fn console(
        &self,
        _request: Request<v1::ConsoleRequest>,
    ) -> Result<Response<Self::ConsoleStream>, Status> {
        Ok(Response::new(Box::pin(console::frames(self.inputs.snapshot.clone()))))
    }

    async fn get_firewall(
        &self,
        _request: Request<v1::GetFirewallRequest>,
    ) -> Result<Response<v1::GetFirewallResponse>, Status> {
        let status = self.inputs.firewall.borrow().clone();
        let counted = match &status.state {
            firewall::State::InForce => self.firewall.counted().await,
            firewall::State::Starting => Err("it has just started".to_owned()),
            firewall::State::Failed(cause) => Err(cause.clone()),
            firewall::State::Open => Err("a fault that a test asks for".to_owned()),
        };
        Ok(Response::new(firewall::answer(&status, counted)))
    }

    async fn services(
        &self,
        _request: Request<v1::ServicesRequest>,
    ) -> Result<Response<v1::ServicesResponse>, Status> {
        let services = self.services.borrow().clone();
        let services = services.into_iter().map(|(name, entry)| v1::services_response::Service {
            name: name.to_string(),
            state: entry.state.name().to_owned(),
            restarts: entry.restarts,
            cause: entry.cause.unwrap_or_default(),
            since_uptime_seconds: entry.since.as_secs_f64(),
        });
        let uptime_seconds = clock::uptime().as_secs_f64();
        let loads = process::loads(ROOT).into_iter();
        let processes = loads.map(|load| v1::services_response::Process {
            name: load.name,
            id: load.id,
            cpu_seconds: load.cpu.as_secs_f64(),
            memory_bytes: load.memory,
        });
        Ok(Response::new(v1::ServicesResponse {
            // In the order of their names, parents come before their children.
            services: services.collect(),
            processes: processes.collect(),
            uptime_seconds,
        }))
    }

    type DrainStream = Answers<v1::DrainProgress>;

    async fn drain(
        &self,
        request: Request<v1::DrainRequest>,
    ) -> Result<Response<Self::DrainStream>, Status> {
        let actor = Peer::of(&request);
        let asked = drain::asked(request.into_inner())?;
        let worker = self.inputs.workload.borrow().parts.contains_key(&Part::Kubelet);
        if !worker {
            return Ok(Response::new(Box::pin(drain::no_worker())));
        }
        let (seconds, force) = (asked.timeout.as_secs(), asked.force);
        warn!(%actor, seconds, force, "a drain of this node was requested");
        let held = self.inputs.drains.begin(asked.timeout, asked.force);
        Ok(Response::new(Box::pin(drain::progress(held))))
    }

    type UpdateStream = Answers<v1::UpdateProgress>;

    async fn update(
        &self,
        request: Request<Streaming<v1::UpdateRequest>>,
    ) -> Result<Response<Self::UpdateStream>, Status> {
        let actor = Peer::of(&request);
        let entered = self.update.enter(self.lines.clone());
        let turn = entered.map_err(|error| update::refused(&error))?;
        warn!(%actor, "an update of this node was requested");
        let runs = self.inputs.consensus.borrow().cluster_version;
        let installing = update::install(turn, runs, request.into_inner()).await?;
        Ok(installing.map(|answers| Box::pin(answers) as Self::UpdateStream))
    }

    type StoreBundleStream = Answers<v1::UpdateProgress>;

    async fn store_bundle(
        &self,
        request: Request<Streaming<v1::UpdateRequest>>,
    ) -> Result<Response<Self::StoreBundleStream>, Status> {
        let actor = Peer::of(&request);
        let entered = self.update.enter(self.lines.clone());
        let turn = entered.map_err(|error| update::refused(&error))?;
        warn!(%actor, "this node is to keep a bundle for an update of the cluster");
        let bundles = self.bundles.clone();
        let keeping = update::keep(turn, bundles, request.into_inner()).await?;
        Ok(keeping.map(|answers| Box::pin(answers) as Self::StoreBundleStream))
    }

    type FetchBundleStream = Answers<v1::UpdateRequest>;

    async fn fetch_bundle(
        &self,
        request: Request<v1::FetchBundleRequest>,
    ) -> Result<Response<Self::FetchBundleStream>, Status> {
        let pieces = update::fetch(&self.bundles, request.into_inner()).await?;
        Ok(pieces.map(|pieces| Box::pin(pieces) as Self::FetchBundleStream))
    }

    async fn get_attestation_keys(
        &self,
        _request: Request<v1::GetAttestationKeysRequest>,
    ) -> Result<Response<v1::GetAttestationKeysResponse>, Status> {
        self.tpm.keys().await.map(Response::new)
    }

    async fn attest(
        &self,
        request: Request<v1::AttestRequest>,
    ) -> Result<Response<v1::AttestResponse>, Status> {
        let actor = Peer::of(&request);
        let asked = attest::asked(request.into_inner())?;
        let node = self.inputs.cluster.borrow().node;
        let node = node.ok_or_else(|| Status::failed_precondition("this node has no ID yet"))?;
        info!(%actor, "an attestation of this node was requested");
        self.tpm.attest(&node.to_string(), asked).await.map(Response::new)
    }

    async fn reboot(
        &self,
        request: Request<v1::RebootRequest>,
    ) -> Result<Response<v1::RebootResponse>, Status> {
        let actor = Peer::of(&request);
        let reason = match request.into_inner().power_off {
            true => Reason::PowerOff,
            false => Reason::Reboot,
        };
        warn!(%actor, "a {} was requested", reason.name());
        // The server stops in order, so the reply is on its way before the end.
        self.end.send_replace(Some(reason));
        Ok(Response::new(v1::RebootResponse {}))
    }

    async fn reset(
        &self,
        request: Request<v1::ResetRequest>,
    ) -> Result<Response<v1::ResetResponse>, Status> {
        let actor = Peer::of(&request);
        let own = self.inputs.cluster.borrow().node;
        let asked = request.into_inner().node_id;
        if own.map(|id| id.to_string()).as_deref() != Some(&*asked) {
            return Err(Status::failed_precondition("this is another node: nothing is wiped"));
        }
        warn!(%actor, "this node wipes its disk as soon as the cluster has removed it");
        self.reset.send_replace(Some(Instant::now() + RESET));
        Ok(Response::new(v1::ResetResponse {}))
    }

    async fn announce_firmware_update(
        &self,
        request: Request<v1::AnnounceFirmwareUpdateRequest>,
    ) -> Result<Response<v1::AnnounceFirmwareUpdateResponse>, Status> {
        let actor = Peer::of(&request);
        let (binding, what) = match request.into_inner().cancel {
            true => (Binding::Registers, "a firmware update is not announced any more"),
            false => (Binding::TpmAlone, "a firmware update was announced"),
        };
        warn!(%actor, "{what}");
        let sealed = self.inputs.announcements.bind(binding).await.map_err(|refused| {
            let text = refused.to_string();
            match refused {
                firmware::Refused::NotHome => Status::failed_precondition(text),
                firmware::Refused::Unknown => Status::unavailable(text),
                firmware::Refused::Failed(_) => Status::internal(text),
            }
        })?;
        Ok(Response::new(v1::AnnounceFirmwareUpdateResponse { sealed }))
    }

    async fn unlock(
        &self,
        request: Request<v1::UnlockRequest>,
    ) -> Result<Response<v1::UnlockResponse>, Status> {
        let actor = Peer::of(&request);
        // Never a part of a log entry.
        let key = Zeroizing::new(request.into_inner().recovery_key);
        if key.len() > KEY_TEXT_MAX {
            return Err(Status::invalid_argument("recovery_key is too long"));
        }
        if !self.inputs.unlock_requests.is_open() {
            return Err(Status::failed_precondition(Refused::NotWaiting.to_string()));
        }
        let opened = self.inputs.unlock_requests.unlock(&key).await;
        let outcome = if opened.is_ok() { "opened the disk" } else { "did not open the disk" };
        warn!(%actor, "a recovery key was given over the network; it {outcome}");
        opened.map(|()| Response::new(v1::UnlockResponse {})).map_err(|refused| {
            let text = refused.to_string();
            match refused {
                Refused::NotWaiting => Status::failed_precondition(text),
                Refused::Malformed(_) | Refused::Wrong(_) => Status::invalid_argument(text),
            }
        })
    }
}
