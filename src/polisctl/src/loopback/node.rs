//! The node itself: its log, its console, its firewall, its TPM, and its end.

use std::sync::atomic::Ordering;

use futures::{StreamExt as _, stream};
use polis_proto::v1;
use polis_proto::v1::node_management_server::NodeManagement;
use polis_proto::v1::update_progress::Phase;
use tonic::{Request, Response, Status, Streaming};

use super::served::{Answers, Served, answers, not_served};
use super::tpm::no_tpm;
use super::{KEPT_OUT, LEADERLESS, NODE, UPTIME};
use polis_wire::attestation::{Answer, Challenge, Keys, Question, qualifier};
use polis_wire::rpc::resume_at;
use polis_wire::rpc::testing::node_id;

impl Served {
    /// Takes any bundle to its end, from where a transfer of it broke, and refuses one that this
    /// node cannot use.
    async fn receives(
        &self,
        call: &'static str,
        phase: Phase,
        mut incoming: Streaming<v1::UpdateRequest>,
    ) -> Result<Response<Answers<v1::UpdateProgress>>, Status> {
        let v1::UpdateRequest { data: head, resume, one_way } = incoming.message().await?.unwrap();
        let part = self.part.lock().unwrap().clone();
        let part = if resume && part.starts_with(&head) { part } else { Vec::new() };
        let (served, at) = (self.clone(), part.len() as u64);
        let receiving = async move {
            let mut bundle = if part.is_empty() { head } else { part };
            while let Some(piece) = incoming.message().await? {
                bundle.extend(piece.data);
            }
            let bundle = polis_bundle::Bundle::open(&*bundle, None).unwrap();
            let version = bundle.manifest().version.to_string();
            let mut sinks = [std::io::sink(), std::io::sink()];
            let [kernel, system] = &mut sinks;
            bundle.parts([kernel, system], &mut |_bytes| ()).unwrap();
            let from = if at > 0 { format!(" from {at}") } else { String::new() };
            let one_way = if one_way { ", one way" } else { "" };
            served.note(&format!("{call} {version}{from}{one_way}"));
            let (phase, slot) = (phase.into(), "B".to_owned());
            Ok(v1::UpdateProgress { phase, version, slot, ..Default::default() })
        };
        Ok(resume_at(Response::new(stream::once(receiving).boxed()), at))
    }
}

#[tonic::async_trait]
impl NodeManagement for Served {
    type LogsStream = Answers<v1::LogsResponse>;
    type ConsoleStream = Answers<v1::ConsoleFrame>;

    async fn get_status(
        &self,
        _request: Request<v1::GetStatusRequest>,
    ) -> Result<Response<v1::GetStatusResponse>, Status> {
        self.note("GetStatus");
        let node_id = node_id(NODE).to_string();
        let uptime_seconds = UPTIME;
        let waits_for = match self.leads.load(Ordering::Relaxed) {
            true => String::new(),
            false => LEADERLESS.to_owned(),
        };
        Ok(Response::new(v1::GetStatusResponse {
            node_id,
            uptime_seconds,
            waits_for,
            etcd_cluster: self.etcd_cluster.lock().unwrap().clone(),
            ..Default::default()
        }))
    }

    async fn logs(
        &self,
        request: Request<v1::LogsRequest>,
    ) -> Result<Response<Self::LogsStream>, Status> {
        let v1::LogsRequest { name, raw, boot, .. } = request.into_inner();
        if boot < -1 {
            return Err(Status::unavailable("the logs of earlier boots are on a disk"));
        }
        self.note(&format!("Logs {name}"));
        // Without what programs print, the line is an event.
        let none = raw == i32::from(v1::logs_request::Raw::None);
        let event = none.then(|| ("event".to_owned(), "ready".to_owned()));
        let entry = v1::logs_response::Entry {
            name: if name.is_empty() { "kernel".to_owned() } else { name },
            message: self.says.lock().unwrap().clone(),
            time_unix_nanos: 1_700_000_000_123_456_789,
            uptime_seconds: UPTIME - 60.0,
            fields: event.into_iter().collect(),
            ..Default::default()
        };
        Ok(answers(vec![v1::LogsResponse { entries: vec![entry], ..Default::default() }]))
    }

    async fn console(
        &self,
        _request: Request<v1::ConsoleRequest>,
    ) -> Result<Response<Self::ConsoleStream>, Status> {
        self.note("Console");
        let metrics = polis_tui::snapshot::Metrics {
            processors: 4,
            cpu: vec![90, 12],
            memory_total: 8 << 30,
            memory_used: 2 << 30,
            disk_written: vec![4096],
            received: vec![2048],
            data_total: 100 << 30,
            data_used: 98 << 30,
            ..Default::default()
        };
        let snapshot = polis_tui::Snapshot { metrics: Some(metrics), ..Default::default() };
        let snapshot = serde_json::to_vec(&snapshot).unwrap();
        let frame = stream::iter([Ok(v1::ConsoleFrame { snapshot })]);
        Ok(Response::new(frame.chain(stream::pending()).boxed()))
    }

    async fn get_firewall(
        &self,
        _request: Request<v1::GetFirewallRequest>,
    ) -> Result<Response<v1::GetFirewallResponse>, Status> {
        self.note("GetFirewall");
        let configuration = self.firewall.lock().unwrap().clone();
        let rule = v1::get_firewall_response::Rule {
            name: "management".to_owned(),
            ports: "tcp/7839".to_owned(),
            callers: "any".to_owned(),
            purpose: "operators, and nodes in an update".to_owned(),
            accepted: Some(1),
            ..Default::default()
        };
        Ok(Response::new(v1::GetFirewallResponse {
            rules: vec![rule],
            // This machine is not in that network, so it would not get this answer.
            in_force: configuration.sources != [KEPT_OUT],
            configuration: Some(configuration),
            dropped: Some(0),
            ..Default::default()
        }))
    }

    async fn services(
        &self,
        _request: Request<v1::ServicesRequest>,
    ) -> Result<Response<v1::ServicesResponse>, Status> {
        self.note("Services");
        let names = ["root", "root.consensus", "root.curator", "root.kernel", "root.network"];
        let services = names.map(|name| v1::services_response::Service {
            name: name.to_owned(),
            ..Default::default()
        });
        let services = services.into_iter().chain(self.kubernetes.services()).collect();
        // A quarter of a processor for the node, whenever it is asked.
        let uptime_seconds = std::time::UNIX_EPOCH.elapsed().unwrap().as_secs_f64();
        let process = |name: &str, id, share: f64| v1::services_response::Process {
            name: name.to_owned(),
            id,
            cpu_seconds: uptime_seconds * share,
            memory_bytes: u64::from(id) << 20,
        };
        let processes = vec![process("root", 64, 0.25), process("root.consensus.etcd", 96, 0.5)];
        Ok(Response::new(v1::ServicesResponse { services, processes, uptime_seconds }))
    }

    type DrainStream = Answers<v1::DrainProgress>;

    async fn drain(
        &self,
        request: Request<v1::DrainRequest>,
    ) -> Result<Response<Self::DrainStream>, Status> {
        let v1::DrainRequest { timeout_seconds, force } = request.into_inner();
        let messages = match self.kubernetes.works.load(Ordering::Relaxed) {
            true => {
                self.note(&format!("Drain {timeout_seconds} {force}"));
                self.kubernetes.drain.lock().unwrap().clone()
            }
            false => {
                let state = v1::drain_progress::State::NoWorker.into();
                vec![Ok(v1::DrainProgress { state, ..Default::default() })]
            }
        };
        Ok(Response::new(stream::iter(messages).chain(stream::pending()).boxed()))
    }

    type UpdateStream = Answers<v1::UpdateProgress>;

    async fn update(
        &self,
        request: Request<Streaming<v1::UpdateRequest>>,
    ) -> Result<Response<Self::UpdateStream>, Status> {
        self.receives("Update", Phase::Installed, request.into_inner()).await
    }

    type StoreBundleStream = Answers<v1::UpdateProgress>;

    async fn store_bundle(
        &self,
        request: Request<Streaming<v1::UpdateRequest>>,
    ) -> Result<Response<Self::StoreBundleStream>, Status> {
        self.receives("StoreBundle", Phase::Stored, request.into_inner()).await
    }

    type FetchBundleStream = Answers<v1::UpdateRequest>;

    async fn fetch_bundle(
        &self,
        _request: Request<v1::FetchBundleRequest>,
    ) -> Result<Response<Self::FetchBundleStream>, Status> {
        not_served()
    }

    async fn get_attestation_keys(
        &self,
        _request: Request<v1::GetAttestationKeysRequest>,
    ) -> Result<Response<v1::GetAttestationKeysResponse>, Status> {
        let tpm = self.tpm.lock().unwrap();
        let keys = tpm.software.as_ref().ok_or_else(no_tpm)?.keys();
        let attestation = tpm.pretended.clone().unwrap_or(keys.attestation);
        let keys = Keys { attestation, ..keys }.into_message();
        Ok(Response::new(v1::GetAttestationKeysResponse { keys: Some(keys) }))
    }

    async fn attest(
        &self,
        request: Request<v1::AttestRequest>,
    ) -> Result<Response<v1::AttestResponse>, Status> {
        self.note("Attest");
        let asked = Question::from_message(request.into_inner().question.unwrap()).unwrap();
        let tpm = self.tpm.lock().unwrap();
        let software = tpm.software.as_ref().ok_or_else(no_tpm)?;
        let question = qualifier(&asked.nonce, &node_id(NODE).to_string());
        let mut registers = tpm.registers.clone();
        registers.retain(|number, _value| asked.registers.contains(number));
        let answer = match &tpm.pretended {
            None => software.prove(&asked.credential, &question, registers).unwrap(),
            // It cannot open the credential, and has all else that the question asks for.
            Some(_) => {
                let own = Challenge::new(&software.keys()).unwrap();
                let opened = software.prove(&own.credential, &question, registers).unwrap();
                Answer { secret: vec![0; 32], ..opened }
            }
        };
        Ok(Response::new(v1::AttestResponse { answer: Some(answer.into_message()) }))
    }

    async fn reboot(
        &self,
        request: Request<v1::RebootRequest>,
    ) -> Result<Response<v1::RebootResponse>, Status> {
        self.note(if request.into_inner().power_off { "PowerOff" } else { "Reboot" });
        Ok(Response::new(v1::RebootResponse {}))
    }

    async fn announce_firmware_update(
        &self,
        request: Request<v1::AnnounceFirmwareUpdateRequest>,
    ) -> Result<Response<v1::AnnounceFirmwareUpdateResponse>, Status> {
        let cancel = request.into_inner().cancel;
        self.note(if cancel { "AnnounceFirmwareUpdate cancel" } else { "AnnounceFirmwareUpdate" });
        Ok(Response::new(v1::AnnounceFirmwareUpdateResponse { sealed: true }))
    }

    async fn reset(
        &self,
        request: Request<v1::ResetRequest>,
    ) -> Result<Response<v1::ResetResponse>, Status> {
        assert_eq!(request.into_inner().node_id, node_id(NODE).to_string());
        self.note("Reset");
        Ok(Response::new(v1::ResetResponse {}))
    }

    async fn unlock(
        &self,
        _request: Request<v1::UnlockRequest>,
    ) -> Result<Response<v1::UnlockResponse>, Status> {
        self.note("Unlock");
        Ok(Response::new(v1::UnlockResponse {}))
    }
}
