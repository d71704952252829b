//! The service `polis.v1.Curator`: the calls of nodes to the control plane.

use std::net::IpAddr;
use std::time::Duration;

use polis_proto::v1;
use polis_proto::v1::curator_server::Curator;
use prost::Message as _;
use tonic::{Request, Response, Status};
use tracing::{info, warn};

use super::{Handlers, Lead, Stream, registries, seconds, untrusted, watching};
use crate::curator::bounds;
use crate::curator::budgets::Budgets;
use crate::curator::convert;
use crate::curator::error::Error;
use crate::curator::nodes;
use crate::curator::reported;
use crate::curator::state::{self, Commitment, Refusal, Registration, Request as Change, Step};
use crate::curator::{attested, attesting};
use polis_base::sys::clock;
use polis_wire::attestation;
use polis_wire::identity::{Identity, NodeId};
use polis_wire::rpc::{Caller, Peer};

/// The number of machines that may wait for approval: more than an operator reads through,
/// and few enough to do no harm.
const WAITING_MAX: usize = 1024;

/// The bytes of their records together. Every curator keeps them, and every watcher gets them:
/// the longest labels make one record as large as a hundred others.
const WAITING_BYTES_MAX: usize = 4 << 20;

/// Changes of its registration that a machine may make in a row: several times those of a start,
/// in which it proves its TPM to each leader anew.
const CHANGES_MAX: u32 = 12;

/// The time after which it may make one more. etcd keeps what was replaced for an hour: if all
/// records that may wait change as often, that is an eighth of its quota.
const CHANGES_PACE: Duration = Duration::from_secs(60);

/// The calling node, whose access `rpc` has checked.
fn node<T>(request: &Request<T>) -> Result<NodeId, Status> {
    match Peer::of(request) {
        Peer::Node(id) => Ok(id),
        Peer::None | Peer::Key(_) | Peer::User { .. } => Err(untrusted()),
    }
}

/// The key of a machine that is not a node of the cluster yet.
fn key<T>(request: &Request<T>) -> Result<[u8; 32], Status> {
    match Peer::of(request) {
        Peer::Key(key) => Ok(key),
        Peer::None | Peer::Node(_) | Peer::User { .. } => Err(untrusted()),
    }
}

/// The address of the caller.
fn address<T>(request: &Request<T>) -> Option<IpAddr> {
    let caller = request.extensions().get::<Caller>();
    caller.map(|caller| caller.address.ip().to_canonical())
}

impl Lead {
    /// Rejects a registering machine, and adds it to the list of rejections.
    fn reject(&self, who: Identity, from: Option<IpAddr>, error: Error) -> Status {
        let decided = error.decided().filter(|_| !error.deposed());
        if let (Some(reason), Some(from)) = (decided, from) {
            self.handlers.0.refusals.add(who.public_key, from, reason, seconds());
        }
        self.refuse(error)
    }

    /// Takes the next step of the proof of a member's start; returns the question to its TPM, if
    /// there is one.
    async fn prove(
        &self,
        id: NodeId,
        boot_id: &str,
        keys: Option<v1::TpmKeys>,
        answer: Option<v1::TpmAnswer>,
        fault: String,
    ) -> Result<Option<v1::TpmQuestion>, Error> {
        let questions = &self.handlers.0.member_questions;
        let failed = |fault| attesting::failed(boot_id, bounds::tpm_fault(fault), seconds());
        let decided = |error: attestation::Error| match attesting::is_undecided(&error) {
            true => Err(Error::TpmUndecided { why: error.to_string() }),
            false => Ok(failed(error.to_string())),
        };
        // An answer needs none: its question had one.
        let begin = || match self.handlers.0.proofs.take(id, 1) {
            true => Ok(()),
            false => Err(Error::TpmProofs),
        };
        let proof = match (answer, fault.is_empty()) {
            // Without a question the answer says nothing: another leader asked. The node
            // learns with its next heartbeat that it is asked anew.
            (Some(answer), _) => match questions.judge(id, boot_id, answer, seconds()) {
                Some(judged) => Some(judged.or_else(decided)?),
                None => None,
            },
            (None, false) => {
                begin()?;
                Some(failed(fault))
            }
            (None, true) => {
                let node = self.store().node(id).await?;
                let Some(keys) = keys.filter(|_keys| attested::awaits(&node, boot_id)) else {
                    return Ok(None);
                };
                if !questions.has_room(id) {
                    return Err(Error::TpmQuestions);
                }
                begin()?;
                match questions.ask(id, keys) {
                    Ok(question) => return Ok(Some(question)),
                    Err(error) => Some(decided(error)?),
                }
            }
        };
        if let Some(proof) = proof {
            self.store().change(id, Change::Prove(proof)).await?;
        }
        Ok(None)
    }
}

#[tonic::async_trait]
impl Curator for Handlers {
    type WatchStream = Stream<v1::WatchEvent>;
    type WatchRegistriesStream = Stream<v1::Registries>;

    async fn watch(
        &self,
        request: Request<v1::WatchRequest>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        let lead = self.lead()?;
        // A node needs the network of itself alone.
        let caller = match Peer::of(&request) {
            Peer::Node(id) => Some(id),
            Peer::User { .. } | Peer::Key(_) | Peer::None => None,
        };
        let only = request.into_inner().node_id;
        let only = match only.is_empty() {
            true => None,
            false => Some(convert::node_id(&only, "node_id")?),
        };
        Ok(Response::new(watching::watch(lead, only, caller).await?))
    }

    async fn update_node_status(
        &self,
        request: Request<v1::UpdateNodeStatusRequest>,
    ) -> Result<Response<v1::UpdateNodeStatusResponse>, Status> {
        let id = node(&request)?;
        let lead = self.lead()?;
        let v1::UpdateNodeStatusRequest { status, wireguard_public_key } = request.into_inner();
        let status = bounds::status(status)?;
        let key = convert::mesh_key(&wireguard_public_key, "wireguard_public_key")?;
        // Before etcd is asked for anything.
        take_status(&self.0.audit.budgets, id)?;
        let changed = lead.store().change(id, Change::Status(status)).await;
        changed.map_err(|error| lead.refuse(error))?;
        // Afterwards: the address of a node whose key is refused is needed all the same.
        if let Some(key) = key {
            let set = lead.store().set_mesh_key(id, &key).await;
            set.map_err(|error| lead.refuse(error))?;
        }
        Ok(Response::new(v1::UpdateNodeStatusResponse {}))
    }

    async fn report_calls(
        &self,
        request: Request<v1::ReportCallsRequest>,
    ) -> Result<Response<v1::ReportCallsResponse>, Status> {
        let id = node(&request)?;
        let lead = self.lead()?;
        let calls = request.into_inner().calls;
        let count = u32::try_from(calls.len()).unwrap_or(u32::MAX);
        if count > reported::REPORT_MAX {
            return Err(Status::invalid_argument(format!(
                "calls: {count} in one report, and at most {} are allowed",
                reported::REPORT_MAX
            )));
        }
        // Before etcd is asked for anything.
        take_calls(&self.0.audit.budgets, id, count)?;
        let entries = calls.into_iter().map(|call| counted(id, call));
        let entries: Option<Vec<_>> = entries.collect();
        let entries = entries.ok_or_else(|| {
            Status::invalid_argument("calls: one of them is not a call that nodes record")
        })?;
        // A report that is repeated waits for its first attempt.
        let _turn = self.0.audit.reports.lock().await;
        let newest = lead.store().audit_newest(&self.0.audit).await;
        let newest = newest.map_err(|error| lead.refuse(error))?;
        for entry in entries {
            // The answer to an earlier report was lost.
            if !is_known(&newest, &entry) {
                self.audit(entry).await?;
            }
        }
        Ok(Response::new(v1::ReportCallsResponse {}))
    }

    async fn heartbeat(
        &self,
        request: Request<v1::HeartbeatRequest>,
    ) -> Result<Response<v1::HeartbeatResponse>, Status> {
        let id = node(&request)?;
        let lead = self.lead()?;
        let request = bounds::heartbeat(request.into_inner());
        let boot_id = request.update.as_ref().map(|update| update.boot_id.clone());
        self.0.heartbeats.record(id, request);
        // The next check would publish it too, half a second later.
        let (back, prove_tpm) = {
            let directory = self.0.directory.borrow();
            let known = directory.node(id);
            let back = known.is_some_and(|known| known.health != v1::NodeHealth::Healthy);
            let boot_id = boot_id.unwrap_or_default();
            (back, known.is_some_and(|known| attested::awaits(&known.node, &boot_id)))
        };
        if back {
            self.0
                .directory
                .send_if_modified(|directory| directory.set_health(id, v1::NodeHealth::Healthy));
        }
        let interval_ms = u32::try_from(lead.pace().as_millis()).unwrap_or(u32::MAX);
        let restart_etcd = lead.starts_again(id);
        let update = lead.orders(id);
        Ok(Response::new(v1::HeartbeatResponse { interval_ms, update, restart_etcd, prove_tpm }))
    }

    async fn prove_tpm(
        &self,
        request: Request<v1::ProveTpmRequest>,
    ) -> Result<Response<v1::ProveTpmResponse>, Status> {
        let id = node(&request)?;
        let lead = self.lead()?;
        let v1::ProveTpmRequest { boot_id, keys, answer, fault } = request.into_inner();
        let boot_id = bounds::boot_id(boot_id, "boot_id")?;
        if boot_id.is_empty() {
            return Err(Error::Field("boot_id is missing".to_owned()).into());
        }
        let proved = lead.prove(id, &boot_id, keys, answer, fault).await;
        let question = proved.map_err(|error| lead.refuse(error))?;
        Ok(Response::new(v1::ProveTpmResponse { question }))
    }

    async fn register_node(
        &self,
        request: Request<v1::RegisterNodeRequest>,
    ) -> Result<Response<v1::RegisterNodeResponse>, Status> {
        let identity = Identity::new(key(&request)?);
        let from = address(&request);
        let lead = self.lead()?;
        let request = request.into_inner();
        let name = convert::name(&request.name, "name")?;
        let v1::RegisterNodeRequest { register_ticket, join_key, tpm, labels, .. } = request;
        let boot_id = bounds::boot_id(request.boot_id, "boot_id")?;
        let questions = &self.0.questions;
        let judge = |told| {
            let judged = questions.judge(identity.id, &boot_id, told, seconds())?;
            let failed = |error: attestation::Error| {
                attesting::failed(&boot_id, error.to_string(), seconds())
            };
            Some(judged.unwrap_or_else(failed))
        };
        let attestation = request.tpm_answer.and_then(judge);
        let external_address = request.external_address;
        let address = convert::address(&external_address, "external_address")?;
        let registration = Registration {
            identity,
            join_key: convert::key(&join_key, "join_key", 2)?,
            tpm,
            labels: convert::labels(labels, "labels", 4)?,
            address: address.map(|address| address.to_string()).unwrap_or_default(),
            name,
            now: seconds(),
            nonce: nodes::nonce().map_err(|error| lead.refuse(error))?,
            attestation: attestation.clone(),
        };
        let registered = async {
            self.check_room(identity.id)?;
            self.take_change(identity.id, Change::Register(registration.clone()))?;
            lead.store().register(&register_ticket, registration).await
        };
        let node = registered.await.map_err(|error| lead.reject(identity, from, error))?;
        let configuration = lead.store().configuration().await;
        let configuration = configuration.map_err(|error| lead.refuse(error))?;
        // An outsider with a ticket does not learn the expected values.
        let configuration = v1::ClusterConfiguration { attestation: None, ..configuration };
        // A machine that may register is asked, unless it has just answered.
        let keys = request.tpm_keys.filter(|_keys| attestation.is_none());
        let tpm_question = keys.and_then(|keys| questions.ask(identity.id, keys).ok());
        Ok(Response::new(v1::RegisterNodeResponse {
            state: node.state,
            configuration: Some(configuration),
            nonce: node.nonce,
            tpm_question,
        }))
    }

    async fn commit_node(
        &self,
        request: Request<v1::CommitNodeRequest>,
    ) -> Result<Response<v1::CommitNodeResponse>, Status> {
        let identity = Identity::new(key(&request)?);
        let from = address(&request);
        let lead = self.lead()?;
        let request = request.into_inner();
        let commitment = Commitment {
            storage_kind: request.storage_kind(),
            cluster_unlock_key: request.cluster_unlock_key,
            recovery_key: request.recovery_key,
            boot_id: bounds::boot_id(request.boot_id, "boot_id")?,
        };
        let entered = async {
            self.take_change(identity.id, Change::Commit(commitment.clone()))?;
            lead.store().enter(identity, commitment).await
        };
        entered.await.map_err(|error| lead.reject(identity, from, error))?;
        let issued = Box::pin(lead.store().member_certificate(identity, clock::now())).await;
        let issued = issued.map_err(|error| lead.refuse(error))?;
        let authorities = lead.store().authorities().await;
        let authorities = authorities.map_err(|error| lead.refuse(error))?;
        Ok(Response::new(v1::CommitNodeResponse {
            certificate: issued.der,
            authorities: Some(authorities.to_message()),
        }))
    }

    async fn join_node(
        &self,
        request: Request<v1::JoinNodeRequest>,
    ) -> Result<Response<v1::JoinNodeResponse>, Status> {
        let join_key = key(&request)?;
        let from = address(&request).map_or_else(String::new, |from| from.to_string());
        let lead = self.lead()?;
        let named = request.into_inner().node_public_key;
        let named = match named.is_empty() {
            true => None,
            false => Some(convert::key(&named, "node_public_key", 2)?),
        };
        let joined = lead.store().join(&join_key, named).await;
        let (id, node) = joined.map_err(|error| lead.refuse(error))?;
        // A machine that asks has no open disk, so its node sends no heartbeat.
        let health = lead.current().await?.borrow().node(id).map(|known| known.health);
        if matches!(health, Some(v1::NodeHealth::Healthy | v1::NodeHealth::Unknown)) {
            // The first question may follow the last heartbeat before a quick restart.
            if self.0.heartbeats.ask(id) {
                warn!(
                    event = "copied", node = %id, address = from,
                    "a machine asks for the key of a node's disk while the node runs"
                );
            }
            return Err(lead.refuse(Refusal::Running));
        }
        self.0.heartbeats.given(id);
        info!(event = "unlocked", node = %id, address = from, "gave a node the key of its disk");
        let cluster_unlock_key = node.cluster_unlock_key;
        Ok(Response::new(v1::JoinNodeResponse { cluster_unlock_key }))
    }

    async fn issue_certificate(
        &self,
        request: Request<v1::IssueCertificateRequest>,
    ) -> Result<Response<v1::IssueCertificateResponse>, Status> {
        let id = node(&request)?;
        let lead = self.lead()?;
        let issue = async {
            let node = lead.store().node(id).await?;
            // AccessList is checked in a copy; an issued signature cannot be taken back.
            if node.state() != v1::NodeState::Up {
                return Err(Error::Refused(Refusal::NotUp));
            }
            let identity = nodes::identity(id, &node)?;
            let renewed = lead.store().renew_node_certificate(identity, clock::now()).await?;
            // Revoked since the record was read: the node is being removed.
            renewed.ok_or(Error::Refused(Refusal::NotUp))
        };
        let issued = Box::pin(issue).await.map_err(|error| lead.refuse(error))?;
        Ok(Response::new(v1::IssueCertificateResponse { certificate: issued.der }))
    }

    async fn issue_worker_certificate(
        &self,
        request: Request<v1::IssueWorkerCertificateRequest>,
    ) -> Result<Response<v1::IssueWorkerCertificateResponse>, Status> {
        let id = node(&request)?;
        let from = address(&request);
        let lead = self.lead()?;
        // Boxed: the making of a certificate is large, and rare.
        let issued = Box::pin(lead.worker_certificate(id, from, request.into_inner())).await;
        issued.map(Response::new).map_err(|error| lead.refuse(error))
    }

    async fn watch_registries(
        &self,
        request: Request<v1::WatchRegistriesRequest>,
    ) -> Result<Response<Self::WatchRegistriesStream>, Status> {
        let id = node(&request)?;
        Ok(Response::new(registries::watch(self.lead()?, id).await?))
    }

    async fn join_consensus(
        &self,
        request: Request<v1::JoinConsensusRequest>,
    ) -> Result<Response<v1::JoinConsensusResponse>, Status> {
        let id = node(&request)?;
        let lead = self.lead()?;
        let address = convert::address(&request.into_inner().address, "address")?;
        let address = address
            .ok_or_else(|| Error::Field("address is missing; give an IP address".to_owned()))?;
        // Boxed: a new member is rare, and its future large.
        let joined = Box::pin(lead.join_consensus(id, address)).await;
        joined.map(Response::new).map_err(|error| lead.refuse(error))
    }

    async fn get_consensus_status(
        &self,
        _request: Request<v1::GetConsensusStatusRequest>,
    ) -> Result<Response<v1::ConsensusStatus>, Status> {
        let lead = self.lead()?;
        // A node that is not in the answer removes its member: the last known state is not
        // enough.
        let members = self.0.members.list().await.map_err(|error| lead.refuse(error))?;
        Ok(Response::new(lead.consensus_status(Some(members)).await))
    }
}

impl Handlers {
    /// Whether the limits of pending registrations allow one more machine.
    fn check_room(&self, id: NodeId) -> Result<(), Error> {
        let directory = self.0.directory.borrow();
        let nodes = directory.nodes().map(|(_, known)| known.node.as_ref());
        let (waiting, bytes) = pending(nodes);
        let full = waiting >= WAITING_MAX || bytes >= WAITING_BYTES_MAX;
        if full && directory.node(id).is_none() {
            return Err(Error::WaitingRoom { waiting, bytes });
        }
        Ok(())
    }

    /// Takes a change of its record from the budget of a machine, if it is known.
    fn take_change(&self, id: NodeId, request: Change) -> Result<(), Error> {
        let known = self.0.directory.borrow().node(id).map(|known| v1::Node::clone(&known.node));
        match known {
            Some(known) => take_change(&self.0.audit.budgets, id, known, request),
            // The limits of pending registrations bound those.
            None => Ok(()),
        }
    }
}

/// Takes a request from the budget of a machine, which is kept beside those of nodes, if it changes
/// the record: a machine that only asks whether it was approved needs none.
fn take_change(calls: &Budgets, id: NodeId, known: v1::Node, request: Change) -> Result<(), Error> {
    let budget = calls.beside("registrations", CHANGES_MAX, CHANGES_PACE);
    if matches!(state::step(Some(known), request), Ok(Step::Put(_))) && !budget.take(id, 1) {
        return Err(Error::Registrations { max: CHANGES_MAX, seconds: CHANGES_PACE.as_secs() });
    }
    Ok(())
}

/// Takes the calls of a report from the budget of a node. A report without any takes one, too: the
/// log is read for each.
fn take_calls(calls: &Budgets, node: NodeId, count: u32) -> Result<(), Status> {
    if calls.take(node, count.max(1)) {
        return Ok(());
    }
    Err(Status::resource_exhausted(format!(
        "a node reports at most {} calls at once, and one each {} s after that; it reports the \
         others later",
        reported::CALLS_MAX,
        reported::PACE.as_secs()
    )))
}

/// Takes one status from the budget of a node, which is kept beside that of its calls.
fn take_status(calls: &Budgets, node: NodeId) -> Result<(), Status> {
    if reported::statuses(calls).take(node, 1) {
        return Ok(());
    }
    Err(Status::resource_exhausted(format!(
        "a node sends at most {} statuses at once, and one each {} s after that; it sends the \
         newest later",
        reported::STATUSES_MAX,
        reported::STATUS_PACE.as_secs()
    )))
}

/// The entry that a node reports, with the number of refusals that the node has counted in it.
fn counted(node: NodeId, call: v1::AuditEntry) -> Option<v1::AuditEntry> {
    let repeats = call.repeats;
    reported::entry(node, call).map(|entry| v1::AuditEntry { repeats, ..entry })
}

/// Whether an entry is among the newest ones. The count of a kind of refusal differs from the
/// first entry of that kind by its number alone.
fn is_known(newest: &[v1::AuditEntry], entry: &v1::AuditEntry) -> bool {
    newest.iter().any(|known| known.repeats == entry.repeats && reported::is_same(known, entry))
}

/// The number of nodes that wait for approval, and the bytes of their records.
fn pending<'a>(nodes: impl Iterator<Item = &'a v1::Node>) -> (usize, usize) {
    nodes
        .filter(|node| node.state() == v1::NodeState::New)
        .fold((0, 0), |(count, bytes), node| (count + 1, bytes + node.encoded_len()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pending_machines_are_counted_with_the_bytes_of_their_records() {
        let labels = (0..64).map(|key| (format!("{key:064}"), "x".repeat(256))).collect();
        let large = v1::Node { state: v1::NodeState::New.into(), labels, ..Default::default() };
        let up = v1::Node { state: v1::NodeState::Up.into(), ..large.clone() };
        let nodes = vec![large.clone(); 250];
        let (waiting, bytes) = pending(nodes.iter().chain([&up]));
        assert_eq!((waiting, bytes), (250, 250 * large.encoded_len()));
        assert!(waiting < WAITING_MAX && bytes > WAITING_BYTES_MAX, "{bytes}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_node_sends_a_bounded_number_of_statuses_and_then_one_at_a_time() {
        let (budgets, id) = (reported::budgets(), NodeId::from_public_key(&[1; 32]));
        for _ in 0..reported::STATUSES_MAX {
            take_status(&budgets, id).unwrap();
        }
        let refused = take_status(&budgets, id).unwrap_err();
        assert_eq!(refused.code(), tonic::Code::ResourceExhausted);
        assert!(budgets.take(id, reported::CALLS_MAX), "it reports its calls all the same");
        take_status(&budgets, NodeId::from_public_key(&[2; 32])).unwrap();
        tokio::time::advance(reported::STATUS_PACE).await;
        take_status(&budgets, id).unwrap();
        assert!(take_status(&budgets, id).is_err());
    }

    #[tokio::test(start_paused = true)]
    async fn a_report_without_calls_costs_a_node_as_much_as_one_with_a_call() {
        let (budgets, id) = (reported::budgets(), NodeId::from_public_key(&[1; 32]));
        for _ in 0..reported::CALLS_MAX {
            take_calls(&budgets, id, 0).unwrap();
        }
        for count in [0, 1] {
            let refused = take_calls(&budgets, id, count).unwrap_err();
            assert_eq!(refused.code(), tonic::Code::ResourceExhausted, "{count}");
        }
        tokio::time::advance(reported::PACE).await;
        take_calls(&budgets, id, 1).unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn a_machine_that_waits_asks_as_often_as_it_likes_and_changes_its_record_seldom() {
        let (budgets, identity) = (reported::budgets(), Identity::new([7; 32]));
        let registration = Registration {
            identity,
            join_key: [1; 32],
            tpm: false,
            labels: std::collections::BTreeMap::new(),
            address: "192.0.2.1".to_owned(),
            name: None,
            now: 5,
            nonce: [9; 16],
            attestation: None,
        };
        let Ok(Step::Put(new)) = state::step(None, Change::Register(registration.clone())) else {
            panic!("a new machine has no record")
        };
        let new = *new;
        let take = |id, known: &v1::Node, request: &Change| {
            take_change(&budgets, id, known.clone(), request.clone())
        };
        let asks = Change::Register(registration.clone());
        let moved = Registration { address: "192.0.2.2".to_owned(), ..registration };
        let moves = Change::Register(moved);
        for _ in 0..CHANGES_MAX {
            take(identity.id, &new, &moves).unwrap();
        }
        let refused = take(identity.id, &new, &moves).unwrap_err();
        assert!(matches!(refused, Error::Registrations { .. }), "{refused}");
        assert_eq!(Status::from(refused).code(), tonic::Code::ResourceExhausted);
        take(identity.id, &new, &asks).unwrap();
        take(NodeId::from_public_key(&[2; 32]), &new, &moves).unwrap();
        // Approved, it may commit again and again, and each time replaces its keys.
        let approved = v1::Node { state: v1::NodeState::Standby.into(), ..new };
        let commits = Change::Commit(Commitment {
            cluster_unlock_key: vec![1; 32],
            storage_kind: v1::StorageKind::Encrypted,
            recovery_key: vec![2; 32],
            boot_id: String::new(),
        });
        assert!(take(identity.id, &approved, &commits).is_err());
        tokio::time::advance(CHANGES_PACE).await;
        take(identity.id, &approved, &commits).unwrap();
        assert!(take(identity.id, &approved, &commits).is_err());
    }

    #[test]
    fn the_refusals_that_a_node_has_counted_are_an_entry_beside_the_first_one() {
        let first = v1::AuditEntry {
            time_unix_ms: 5,
            who: "operator otto".to_owned(),
            call: "Drain".to_owned(),
            code: 3,
            ..Default::default()
        };
        let others = v1::AuditEntry { repeats: 999, ..first.clone() };
        let id = NodeId::from_public_key(&[1; 32]);
        let [first, others] = [first, others].map(|call| counted(id, call).unwrap());
        assert_eq!((first.repeats, others.repeats), (0, 999));
        let mut log = vec![first];
        assert!(!is_known(&log, &others));
        log.push(others.clone());
        assert!(is_known(&log, &others));
    }
}
