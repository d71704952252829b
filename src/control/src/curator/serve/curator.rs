//! The service `polis.v1.Curator`: the calls of nodes to the control plane.

use std::net::IpAddr;

use polis_proto::v1;
use polis_proto::v1::curator_server::Curator;
use tonic::{Request, Response, Status};
use tracing::info;

use super::{Handlers, Lead, Stream, limits, registries, seconds, untrusted, watching};
use crate::curator::attested;
use crate::curator::bounds;
use crate::curator::convert;
use crate::curator::error::Error;
use crate::curator::health;
use crate::curator::nodes;
use crate::curator::reported;
use crate::curator::state::{Commitment, Refusal, Registration, Request as Change};
use polis_base::sys::clock;
use polis_wire::identity::{Identity, NodeId};
use polis_wire::rpc::{Caller, Peer};

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
    pub(super) fn reject(&self, who: Identity, from: Option<IpAddr>, error: Error) -> Status {
        let decided = error.decided().filter(|_| !error.deposed());
        if let (Some(reason), Some(from)) = (decided, from) {
            self.handlers.0.refusals.add(who.public_key, from, reason, seconds());
        }
        self.refuse(error)
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
        limits::take_status(&self.0.audit.budgets, id)?;
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
        limits::take_calls(&self.0.audit.budgets, id, count)?;
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
        let (back, prove_tpm) = {
            let directory = self.0.directory.borrow();
            let known = directory.node(id);
            let back = known.is_some_and(|known| known.health != v1::NodeHealth::Healthy);
            let boot_id = boot_id.unwrap_or_default();
            (back, known.is_some_and(|known| attested::awaits(&known.node, &boot_id)))
        };
        if back {
            health::answers(&self.0.directory, id);
        }
        let interval_ms = u32::try_from(lead.pace(id).as_millis()).unwrap_or(u32::MAX);
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
        if request.returns {
            let asked = Box::pin(lead.ask_to_return(identity, from, request)).await;
            return asked.map(Response::new);
        }
        let name = convert::name(&request.name, "name")?;
        let v1::RegisterNodeRequest { register_ticket, join_key, tpm, labels, .. } = request;
        let boot_id = bounds::boot_id(request.boot_id, "boot_id")?;
        let answer = request.tpm_answer;
        let attestation = answer.and_then(|sent| lead.judged(identity.id, &boot_id, sent));
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
        let questions = &self.0.questions;
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
        let certificate = match request.returns {
            true => lead.returned(identity, from, request.boot_id).await?,
            false => {
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
                let now = clock::now();
                let issued = Box::pin(lead.store().member_certificate(identity, now)).await;
                issued.map_err(|error| lead.refuse(error))?.der
            }
        };
        let authorities = lead.store().authorities().await;
        let authorities = authorities.map_err(|error| lead.refuse(error))?;
        Ok(Response::new(v1::CommitNodeResponse {
            certificate,
            authorities: Some(authorities.to_message()),
        }))
    }

    async fn join_node(
        &self,
        request: Request<v1::JoinNodeRequest>,
    ) -> Result<Response<v1::JoinNodeResponse>, Status> {
        let join_key = key(&request)?;
        let from = address(&request);
        let lead = self.lead()?;
        let named = request.into_inner().node_public_key;
        let named = match named.is_empty() {
            true => None,
            false => Some(convert::key(&named, "node_public_key", 2)?),
        };
        let joined = lead.store().join(&join_key, named).await;
        let (id, node) = joined.map_err(|error| lead.refuse(error))?;
        // A machine that asks has no open disk, so its node sends no heartbeat.
        lead.check_off(id, from).await?;
        self.0.heartbeats.given(id);
        let from = from.map_or_else(String::new, |from| from.to_string());
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

#[cfg(test)]
mod tests {
    use super::*;

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
