//! The calls of `Maintenance`: answers them.
//!
//! Invariants:
//! - No call does anything before the gate has admitted its caller.
//! - Parameters are written only after every check of a node, and only where they will count.
//! - The reports are read from the ESP once, however often a caller asks for them, and a read that
//!   hangs holds one thread.

use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use futures::Stream;
use polis_proto::v1;
use polis_proto::v1::maintenance_server::{Maintenance, MaintenanceServer};
use polis_proto::v1::read_log_request::Log;
use tokio::sync::{Mutex, watch};
use tonic::metadata::MetadataValue;
use tonic::service::{Routes, RoutesBuilder};
use tonic::{Request, Response, Status};
use tracing::{error, info, warn};

use super::gate::Gate;
use super::{Service, Shown, machine};
use polis_base::cause;
use polis_base::environment::{Environment, MAINTENANCE_LOG};
use polis_base::files::Root;
use polis_base::sys::clock;
use polis_base::sys::reboot::Reason;
use polis_base::trapdoor::Report;
use polis_machine::install::disks::{Disk, Disks};
use polis_machine::network;
use polis_machine::parameters::{self, Source, Surveyor};
use polis_runtime::supervisor::blocking;
use polis_wire::rpc::{Caller, Peer, REASON};

/// Bytes of a piece of a log, more or less: whole lines.
const PIECE: usize = 16 << 10;

/// The sources of the answers.
#[derive(Clone, Debug)]
pub(super) struct Handlers {
    environment: Environment,
    report: Report,
    tree: Root,
    sys: PathBuf,
    /// Where `init` has left the lines before the failure.
    log: PathBuf,
    places: parameters::Config,
    surveyor: Surveyor,
    disks: Disks,
    gate: Gate,
    network: watch::Receiver<network::Status>,
    end: watch::Sender<Option<Reason>>,
    shown: watch::Sender<Shown>,
    /// Whether a refused caller was logged.
    refused: Arc<AtomicBool>,
    /// Two calls do not write parameters at once.
    writing: Arc<Mutex<()>>,
    /// The reports on the ESP once they were read: none is written while this `node` runs.
    reports: Arc<Mutex<Option<String>>>,
}

impl Handlers {
    pub(super) fn new(
        service: &Service,
        gate: &Gate,
        surveyor: Surveyor,
        network: watch::Receiver<network::Status>,
    ) -> Self {
        Self {
            environment: service.environment.clone(),
            report: service.report.clone(),
            tree: service.tree.clone(),
            sys: service.kernel[0].clone(),
            log: Path::new(MAINTENANCE_LOG).to_owned(),
            places: service.places(),
            surveyor,
            disks: Disks::default(),
            gate: gate.clone(),
            network,
            end: service.end.clone(),
            shown: service.shown.clone(),
            refused: Arc::default(),
            writing: Arc::default(),
            reports: Arc::default(),
        }
    }

    /// Everything that the port serves.
    pub(super) fn routes(self) -> Routes {
        let mut routes = RoutesBuilder::default();
        routes.add_service(MaintenanceServer::new(self));
        routes.routes().prepare()
    }

    /// Admits the caller of a request, or refuses it; returns its name.
    fn admit<T>(&self, request: &Request<T>) -> Result<String, Status> {
        let from = request.extensions().get::<Caller>().map(|caller| caller.address.ip());
        let from = from.map(|address| format!(" at {address}")).unwrap_or_default();
        match self.gate.admit(&Peer::of(request)) {
            Ok(who) => {
                let caller = format!("{who}{from}");
                self.shown.send_modify(|shown| {
                    shown.calls += 1;
                    shown.caller.clone_from(&caller);
                });
                Ok(caller)
            }
            Err(lacks) => {
                if !self.refused.swap(true, Ordering::Relaxed) {
                    warn!("a caller{from} was refused; further ones are refused without a line");
                }
                Err(because(Status::unauthenticated(format!("this call needs {lacks}")), "gate"))
            }
        }
    }

    /// The reports of failures on the ESP.
    async fn reports(&self) -> String {
        let mut kept = Arc::clone(&self.reports).lock_owned().await;
        if let Some(text) = &*kept {
            return text.clone();
        }
        let files = self.tree.esp.guru.reports.clone();
        // The turn goes along: another caller waits for a read that hangs, also where this one is
        // gone.
        blocking(move || kept.insert(machine::reports(&files)).clone()).await
    }

    /// Whether parameters may be written, and instead of which others.
    async fn checked(&self, replace: bool) -> Result<Vec<Source>, Status> {
        // First: while the ESP hangs, a call waits here for its turn and reads no other file of it.
        let survey = self.surveyor.survey().await;
        let esp = self.tree.esp.clone();
        if blocking(move || machine::has_home(&esp)).await {
            let text = "this machine is a member of a cluster, or was: node parameters would not \
                        make it another one";
            return Err(because(Status::failed_precondition(text), "home"));
        }
        if survey.outranks_esp() {
            let text = format!(
                "the {} has node parameters, which take precedence over those on the ESP",
                Source::FwCfg.place()
            );
            return Err(because(Status::failed_precondition(text), "fw-cfg"));
        }
        if !survey.filled.is_empty() && !replace {
            let places: Vec<_> = survey.filled.iter().map(|source| source.place()).collect();
            let text = format!("this machine has node parameters: {}", places.join("; "));
            return Err(because(Status::failed_precondition(text), "parameters"));
        }
        Ok(survey.filled)
    }
}

/// A refusal with the keyword of its cause.
fn because(mut status: Status, reason: &'static str) -> Status {
    status.metadata_mut().insert(REASON, MetadataValue::from_static(reason));
    status
}

/// The bytes of a file with node parameters as a message that a node accepts.
fn accepted(bytes: Vec<u8>) -> Result<Vec<u8>, parameters::Error> {
    if bytes.len() as u64 > parameters::BYTES_MAX {
        return Err(parameters::Error::TooLarge);
    }
    let message = parameters::message(bytes)?;
    parameters::parse(&message)?;
    Ok(message)
}

fn described(disk: Disk) -> v1::MachineDisk {
    let Disk { name, size, model, serial, medium, .. } = disk;
    v1::MachineDisk { name, bytes: size, model, serial, system: medium }
}

/// A text in pieces of whole lines.
fn pieces(text: &str) -> Vec<v1::ReadLogResponse> {
    let mut pieces = vec![String::new()];
    for line in text.split_inclusive('\n') {
        match pieces.last_mut() {
            Some(last) if last.is_empty() || last.len() + line.len() <= PIECE => {
                last.push_str(line);
            }
            _ => pieces.push(line.to_owned()),
        }
    }
    pieces.into_iter().map(|text| v1::ReadLogResponse { text }).collect()
}

#[tonic::async_trait]
impl Maintenance for Handlers {
    async fn describe(
        &self,
        request: Request<v1::DescribeRequest>,
    ) -> Result<Response<v1::DescribeResponse>, Status> {
        self.admit(&request)?;
        let survey = self.surveyor.survey().await;
        let esp = self.tree.esp.clone();
        let home = blocking(move || machine::has_home(&esp)).await;
        let own = self.environment.disk.file_name().unwrap_or_default().to_string_lossy();
        let disks = self.disks.list(&self.sys, &own).await;
        let addresses = self.network.borrow().addresses();
        let mut parameters = survey.loaded.tried;
        parameters.extend(survey.fault);
        let Report { code, stage, causes, tried, next, .. } = self.report.clone();
        Ok(Response::new(v1::DescribeResponse {
            code: code.to_string(),
            stage: stage.to_string(),
            causes,
            tried,
            next,
            version: self.environment.version.clone(),
            image: self.environment.image.clone(),
            slot: self.environment.slot.clone(),
            addresses: addresses.iter().map(ToString::to_string).collect(),
            disks: disks.into_iter().map(described).collect(),
            home,
            parameters,
            uptime_seconds: clock::uptime().as_secs_f64(),
        }))
    }

    type ReadLogStream = Pin<Box<dyn Stream<Item = Result<v1::ReadLogResponse, Status>> + Send>>;

    async fn read_log(
        &self,
        request: Request<v1::ReadLogRequest>,
    ) -> Result<Response<Self::ReadLogStream>, Status> {
        self.admit(&request)?;
        let text = match request.into_inner().log() {
            Log::Unspecified => {
                let log = self.log.clone();
                let bytes = blocking(move || std::fs::read(log)).await.map_err(|error| {
                    Status::internal(format!("cannot read the lines before the failure: {error}"))
                })?;
                String::from_utf8_lossy(&bytes).into_owned()
            }
            Log::Kernel => blocking(machine::kernel_log).await,
            Log::Reports => self.reports().await,
        };
        let pieces = pieces(&text).into_iter().map(Ok);
        Ok(Response::new(Box::pin(futures::stream::iter(pieces))))
    }

    async fn give_parameters(
        &self,
        request: Request<v1::GiveParametersRequest>,
    ) -> Result<Response<v1::GiveParametersResponse>, Status> {
        let who = self.admit(&request)?;
        let v1::GiveParametersRequest { parameters, replace, dry_run } = request.into_inner();
        let message =
            accepted(parameters).map_err(|error| Status::invalid_argument(cause::line(&error)))?;
        let turn = Arc::clone(&self.writing).lock_owned().await;
        let replaced = self.checked(replace).await?;
        if !dry_run {
            let file = self.tree.esp.given_parameters.clone();
            let places = self.places.clone();
            let written = blocking(move || {
                // A caller that is gone ends no write.
                let _turn = turn;
                file.write(&parameters::given_content(&places, &message))
            });
            let written = written.await;
            written.map_err(|failed| {
                error!(error = &failed as &dyn std::error::Error, "node parameters are not kept");
                Status::internal(format!(
                    "cannot write {}: {}",
                    Source::Given.place(),
                    cause::line(&failed)
                ))
            })?;
            info!("{who} gave this machine node parameters, for its next start");
        }
        let replaced = replaced.iter().map(|source| source.place()).collect();
        Ok(Response::new(v1::GiveParametersResponse { replaced }))
    }

    async fn end(
        &self,
        request: Request<v1::EndRequest>,
    ) -> Result<Response<v1::EndResponse>, Status> {
        let who = self.admit(&request)?;
        let reason = match request.into_inner().power_off {
            true => Reason::PowerOff,
            false => Reason::Reboot,
        };
        warn!("{who} asks for a {}", reason.name());
        // The server stops in order, so the reply is on its way before the end.
        self.end.send_replace(Some(reason));
        Ok(Response::new(v1::EndResponse {}))
    }
}
