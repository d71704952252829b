//! The service `polis.v1.Management`: the calls of operators.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use futures::TryStreamExt as _;
use polis_proto::v1;
use polis_proto::v1::departure::Then;
use polis_proto::v1::management_server::Management;
use tonic::{Request, Response, Status};
use tracing::info;

use super::audit::Found;
use super::{Handlers, Lead, Stream, registries, seconds, snapshot};
use crate::curator::configuration;
use crate::curator::convert;
use crate::curator::directory::Known;
use crate::curator::error::Error;
use crate::curator::pod_network;
use crate::curator::state::{Refusal, Request as Change};
use crate::curator::tickets::TicketRequest;
use polis_base::sys::clock;
use polis_wire::identity::{InvalidFingerprint, NodeId};
use polis_wire::node_roles::is_consensus_member;
use polis_wire::registry::shown;
use polis_wire::rpc::{Peer, Role};

/// Entries of each field of a filter: every node is compared with all of them, while the directory
/// is locked.
const FILTER_MAX: usize = 1024;

/// The nodes that a caller asks for: those that fit every field that is not empty.
#[derive(Debug)]
struct Filter {
    ids: BTreeSet<NodeId>,
    states: Vec<i32>,
    labels: BTreeMap<String, String>,
}

impl Filter {
    fn read(request: v1::GetNodesRequest) -> Result<Self, Error> {
        let v1::GetNodesRequest { ids, states, labels } = request;
        let fields = [("ids", ids.len()), ("states", states.len()), ("labels", labels.len())];
        if let Some((field, _)) = fields.iter().find(|(_, count)| *count > FILTER_MAX) {
            return Err(Error::Field(format!("{field}: allowed are at most {FILTER_MAX}")));
        }
        let ids = ids.iter().map(|id| convert::node_id(id, "ids"));
        Ok(Self { ids: ids.collect::<Result<_, _>>()?, states, labels })
    }

    fn fits(&self, id: NodeId, node: &v1::Node) -> bool {
        (self.ids.is_empty() || self.ids.contains(&id))
            && (self.states.is_empty() || self.states.contains(&node.state))
            && self.labels.iter().all(|(key, value)| node.labels.get(key) == Some(value))
    }
}

#[tonic::async_trait]
impl Management for Handlers {
    type GetAuditStream = Stream<v1::GetAuditResponse>;
    type GetNodesStream = Stream<v1::NodeInfo>;
    type SnapshotEtcdStream = Stream<v1::SnapshotChunk>;

    async fn get_register_ticket(
        &self,
        request: Request<v1::GetRegisterTicketRequest>,
    ) -> Result<Response<v1::GetRegisterTicketResponse>, Status> {
        let v1::GetRegisterTicketRequest { rotate, lifetime_seconds } = request.into_inner();
        let lead = self.lead()?;
        let desired = match (rotate, lifetime_seconds) {
            (false, 0) => TicketRequest::Read,
            (false, _) => {
                let text = "lifetime_seconds is only for a new ticket: set rotate";
                return Err(Error::Field(text.to_owned()).into());
            }
            (true, 0) => TicketRequest::Rotate { lifetime: None },
            (true, seconds) => {
                TicketRequest::Rotate { lifetime: Some(Duration::from_secs(seconds)) }
            }
        };
        let ticket = lead.store().ticket(desired, seconds()).await;
        let ticket = ticket.map_err(|error| lead.refuse(error))?;
        let v1::RegisterTicket { opaque, ends_at, .. } = ticket;
        Ok(Response::new(v1::GetRegisterTicketResponse { ticket: opaque, ends_at }))
    }

    async fn get_cluster_info(
        &self,
        request: Request<v1::GetClusterInfoRequest>,
    ) -> Result<Response<v1::GetClusterInfoResponse>, Status> {
        let known = request.into_inner().crl_digest;
        let lead = self.lead()?;
        let directory = lead.current().await?;
        let directory = directory.borrow();
        let leader = directory.leader();
        let mut nodes = Vec::new();
        let mut counts = [0_u32; 5];
        for (id, known) in directory.nodes() {
            counts[usize::try_from(known.node.state).unwrap_or_default().min(4)] += 1;
            // Until it has reported its address itself, the one of its election is used.
            let own = leader.filter(|leader| leader.node == id);
            nodes.extend(member(id, known, own.and_then(|leader| leader.address)));
        }
        let [_, nodes_new, nodes_standby, nodes_up, nodes_decommissioned] = counts;
        Ok(Response::new(v1::GetClusterInfoResponse {
            cluster_directory: Some(v1::ClusterDirectory { nodes }),
            ca_certificate: self.authority()?,
            configuration: Some(configuration::at(directory.configuration().clone(), clock::now())),
            leader: self.0.node.to_string(),
            nodes_new,
            nodes_standby,
            nodes_up,
            nodes_decommissioned,
            refused_registrations: self.0.refusals.list(),
            update: lead.update_that_goes_on(&directory),
            crl: match directory.crl_digest() == known {
                true => Vec::new(),
                false => directory.crl().to_vec(),
            },
        }))
    }

    async fn get_nodes(
        &self,
        request: Request<v1::GetNodesRequest>,
    ) -> Result<Response<Self::GetNodesStream>, Status> {
        // The endorsement key names a machine for life: see `docs/attestation.md`.
        let sees_keys =
            matches!(Peer::of(&request), Peer::User { role: Role::Operator | Role::Owner, .. });
        let filter = Filter::read(request.into_inner())?;
        let directory = self.lead()?.current().await?;
        let found: Vec<_> = directory
            .borrow()
            .nodes()
            .filter(|(id, known)| filter.fits(*id, &known.node))
            .map(|(id, known)| (id, known.clone()))
            .collect();
        let heartbeats = self.0.heartbeats.clone();
        let infos = found.into_iter().map(move |(id, known)| {
            let info = convert::info(id, &known, &heartbeats);
            Ok(if sees_keys { info } else { convert::without_proofs(info) })
        });
        Ok(Response::new(Box::pin(futures::stream::iter(infos))))
    }

    async fn approve_node(
        &self,
        request: Request<v1::ApproveNodeRequest>,
    ) -> Result<Response<v1::ApproveNodeResponse>, Status> {
        let v1::ApproveNodeRequest { node_id, fingerprint, attestation } = request.into_inner();
        let id = convert::node_id(&node_id, "node_id")?;
        let spoken = match fingerprint.is_empty() {
            true => None,
            false => Some(fingerprint.parse().map_err(|invalid: InvalidFingerprint| {
                Error::Field(format!("fingerprint: {invalid}"))
            })?),
        };
        let lead = self.lead()?;
        let approved = lead.store().approve(id, spoken.as_ref(), attestation.as_ref()).await;
        let returns = approved.map_err(|error| lead.refuse(error))?.returning.is_some();
        let node = Some(lead.info(id).await?);
        let mut answer = lead.answer(v1::ApproveNodeResponse { node });
        if returns {
            answer.extensions_mut().insert(Found(", new certificate"));
        }
        Ok(answer)
    }

    async fn update_node_roles(
        &self,
        request: Request<v1::UpdateNodeRolesRequest>,
    ) -> Result<Response<v1::NodeInfo>, Status> {
        let v1::UpdateNodeRolesRequest { node_id, add, remove } = request.into_inner();
        let id = convert::node_id(&node_id, "node_id")?;
        let (add, remove) = (add.unwrap_or_default(), remove.unwrap_or_default());
        let lead = self.lead()?;
        lead.check_version(id, &add).await.map_err(|error| lead.refuse(error))?;
        if remove.consensus_member.is_some() {
            lead.exists(id).await?;
            let then = Then::Roles.into();
            let departure = v1::Departure { then, add: Some(add), remove: Some(remove) };
            self.0.departures.ask(id, departure).await?;
            // Another task takes it out, or an earlier leader has: never taken to be unchanged.
            return Ok(Response::new(lead.info(id).await?));
        }
        let changed = lead.store().change(id, Change::Roles { add, remove }).await;
        changed.map_err(|error| lead.refuse(error))?;
        Ok(lead.answer(lead.info(id).await?))
    }

    async fn update_node_labels(
        &self,
        request: Request<v1::UpdateNodeLabelsRequest>,
    ) -> Result<Response<v1::NodeInfo>, Status> {
        let v1::UpdateNodeLabelsRequest { node_id, set, remove } = request.into_inner();
        let id = convert::node_id(&node_id, "node_id")?;
        let set = convert::set_labels(set, "set", 2)?;
        let remove = convert::gone(remove, &set)?;
        let lead = self.lead()?;
        let changed = lead.store().change(id, Change::Labels { set, remove }).await;
        changed.map_err(|error| lead.refuse(error))?;
        Ok(lead.answer(lead.info(id).await?))
    }

    async fn update_node_taints(
        &self,
        request: Request<v1::UpdateNodeTaintsRequest>,
    ) -> Result<Response<v1::NodeInfo>, Status> {
        let v1::UpdateNodeTaintsRequest { node_id, set, remove } = request.into_inner();
        let id = convert::node_id(&node_id, "node_id")?;
        convert::taints(&set, &remove)?;
        let lead = self.lead()?;
        let changed = lead.store().change(id, Change::Taints { set, remove }).await;
        changed.map_err(|error| lead.refuse(error))?;
        Ok(lead.answer(lead.info(id).await?))
    }

    async fn name_node(
        &self,
        request: Request<v1::NameNodeRequest>,
    ) -> Result<Response<v1::NodeInfo>, Status> {
        let v1::NameNodeRequest { node_id, name } = request.into_inner();
        let id = convert::node_id(&node_id, "node_id")?;
        let name = convert::name(&name, "name")?;
        let lead = self.lead()?;
        let named = lead.store().name_node(id, name.as_ref()).await;
        named.map_err(|error| lead.refuse(error))?;
        Ok(lead.answer(lead.info(id).await?))
    }

    async fn configure_node_network(
        &self,
        request: Request<v1::ConfigureNodeNetworkRequest>,
    ) -> Result<Response<v1::NodeInfo>, Status> {
        let v1::ConfigureNodeNetworkRequest { node_id, configuration } = request.into_inner();
        let id = convert::node_id(&node_id, "node_id")?;
        let order = convert::network_order(configuration)?;
        let lead = self.lead()?;
        let changed = lead.store().change(id, Change::Network(order)).await;
        changed.map_err(|error| lead.refuse(error))?;
        Ok(lead.answer(lead.info(id).await?))
    }

    async fn decommission_node(
        &self,
        request: Request<v1::DecommissionNodeRequest>,
    ) -> Result<Response<v1::DecommissionNodeResponse>, Status> {
        let id = convert::node_id(&request.into_inner().node_id, "node_id")?;
        let lead = self.lead()?;
        let node = lead.exists(id).await?;
        if !matches!(node.state(), v1::NodeState::Up | v1::NodeState::Decommissioned) {
            return Err(lead.refuse(Refusal::NotUp));
        }
        self.0.departures.ask(id, departure(Then::Decommission)).await?;
        let node = Some(lead.info(id).await?);
        Ok(Response::new(v1::DecommissionNodeResponse { node }))
    }

    async fn delete_node(
        &self,
        request: Request<v1::DeleteNodeRequest>,
    ) -> Result<Response<v1::DeleteNodeResponse>, Status> {
        let v1::DeleteNodeRequest { node_id, force } = request.into_inner();
        let id = convert::node_id(&node_id, "node_id")?;
        let lead = self.lead()?;
        let node = lead.exists(id).await?;
        if node.state() == v1::NodeState::Up && !force {
            return Err(lead.refuse(Refusal::StillUp));
        }
        self.0.departures.ask(id, departure(Then::Delete)).await?;
        Ok(Response::new(v1::DeleteNodeResponse {}))
    }

    async fn configure_cluster(
        &self,
        request: Request<v1::ConfigureClusterRequest>,
    ) -> Result<Response<v1::ConfigureClusterResponse>, Status> {
        let lead = self.lead()?;
        let v1::ConfigureClusterRequest { configuration, snapshot_credentials } =
            request.into_inner();
        let missing = || Error::Field("configuration is missing".to_owned());
        let desired = configuration.ok_or_else(missing)?;
        let written = lead.store().configure(desired, snapshot_credentials, clock::now()).await;
        let configuration = Some(written.map_err(|error| lead.refuse(error))?);
        Ok(lead.answer(v1::ConfigureClusterResponse { configuration }))
    }

    async fn confirm_firewall(
        &self,
        request: Request<v1::ConfirmFirewallRequest>,
    ) -> Result<Response<v1::ConfirmFirewallResponse>, Status> {
        let lead = self.lead()?;
        let reached = request.into_inner().configuration;
        let reached = reached.ok_or_else(|| Error::Field("configuration is missing".to_owned()))?;
        let written = lead.store().confirm_firewall(reached, clock::now()).await;
        let configuration = Some(written.map_err(|error| lead.refuse(error))?);
        Ok(lead.answer(v1::ConfirmFirewallResponse { configuration }))
    }

    async fn set_registry(
        &self,
        request: Request<v1::SetRegistryRequest>,
    ) -> Result<Response<v1::SetRegistryResponse>, Status> {
        let lead = self.lead()?;
        let desired = request.into_inner().registry;
        let desired = desired.ok_or_else(|| Error::Field("registry is missing".to_owned()))?;
        let written = lead.store().set_registry(&desired, clock::now()).await;
        let written = written.map_err(|error| lead.refuse(error))?;
        Ok(lead.answer(v1::SetRegistryResponse { registry: Some(shown(&written)) }))
    }

    async fn delete_registry(
        &self,
        request: Request<v1::DeleteRegistryRequest>,
    ) -> Result<Response<v1::DeleteRegistryResponse>, Status> {
        let lead = self.lead()?;
        let deleted = lead.store().delete_registry(&request.into_inner().host).await;
        deleted.map_err(|error| lead.refuse(error))?;
        Ok(Response::new(v1::DeleteRegistryResponse {}))
    }

    async fn list_registries(
        &self,
        _request: Request<v1::ListRegistriesRequest>,
    ) -> Result<Response<v1::ListRegistriesResponse>, Status> {
        let directory = self.lead()?.current().await?;
        let answer = registries::list(&directory.borrow());
        Ok(Response::new(answer))
    }

    async fn get_recovery_key(
        &self,
        request: Request<v1::GetRecoveryKeyRequest>,
    ) -> Result<Response<v1::GetRecoveryKeyResponse>, Status> {
        let id = convert::node_id(&request.into_inner().node_id, "node_id")?;
        let lead = self.lead()?;
        let node = lead.exists(id).await?;
        if node.recovery_key.is_empty() {
            return Err(lead.refuse(Error::NoRecoveryKey));
        }
        info!(node = %id, "the encrypted recovery key of a node was handed out");
        let encrypted_recovery_key = node.recovery_key;
        Ok(Response::new(v1::GetRecoveryKeyResponse { encrypted_recovery_key }))
    }

    async fn confirm_recovery_key(
        &self,
        request: Request<v1::ConfirmRecoveryKeyRequest>,
    ) -> Result<Response<v1::ConfirmRecoveryKeyResponse>, Status> {
        let id = convert::node_id(&request.into_inner().node_id, "node_id")?;
        let lead = self.lead()?;
        let changed = lead.store().change(id, Change::ForgetRecoveryKey).await;
        changed.map_err(|error| lead.refuse(error))?;
        Ok(lead.answer(v1::ConfirmRecoveryKeyResponse {}))
    }

    async fn get_etcd_status(
        &self,
        _request: Request<v1::GetEtcdStatusRequest>,
    ) -> Result<Response<v1::ConsensusStatus>, Status> {
        Ok(Response::new(self.lead()?.consensus_status(None).await))
    }

    async fn snapshot_etcd(
        &self,
        _request: Request<v1::SnapshotEtcdRequest>,
    ) -> Result<Response<Self::SnapshotEtcdStream>, Status> {
        let lead = self.lead()?;
        let clients = self.0.consensus.borrow().voter().cloned();
        let clients = clients.ok_or_else(|| Status::unavailable("etcd does not serve here now"))?;
        let turn = Arc::clone(&self.0.snapshots).try_acquire_owned();
        let turn = turn.map_err(|_taken| lead.refuse(Error::SnapshotGoesOn))?;
        let owners = lead.store().owner_recipients().await;
        let owners = owners.map_err(|error| lead.refuse(error))?;
        let failed = |error: crate::consensus::client::Error| lead.refuse(Error::Etcd(error));
        let taken = clients.snapshot().await.map_err(failed)?;
        info!("a snapshot of etcd is taken");
        let pieces = futures::stream::try_unfold((taken, turn), |(mut taken, turn)| async move {
            let piece = taken.next().await.map_err(Error::Etcd)?;
            Ok::<_, Error>(piece.map(|piece| (piece, (taken, turn))))
        });
        let encrypted = snapshot::encrypted(pieces, &owners).map_err(|error| lead.refuse(error))?;
        let chunks = encrypted.map_ok(|data| v1::SnapshotChunk { data }).map_err(Status::from);
        Ok(Response::new(Box::pin(chunks)))
    }

    async fn get_audit(
        &self,
        request: Request<v1::GetAuditRequest>,
    ) -> Result<Response<Self::GetAuditStream>, Status> {
        Ok(Response::new(self.lead()?.audit(request.into_inner())))
    }

    async fn begin_update(
        &self,
        request: Request<v1::BeginUpdateRequest>,
    ) -> Result<Response<v1::ClusterUpdate>, Status> {
        let lead = self.lead()?;
        // The plan is made of the copy: a node that it lacks would get no turn.
        lead.current().await?;
        let begun = lead.begin_update(request.into_inner()).await;
        begun.map(|begun| lead.answer(begun)).map_err(|error| lead.refuse(error))
    }

    async fn get_update(
        &self,
        _request: Request<v1::GetUpdateRequest>,
    ) -> Result<Response<v1::GetUpdateResponse>, Status> {
        Ok(Response::new(self.lead()?.read_update().await?))
    }

    async fn rotate_authorities(
        &self,
        _request: Request<v1::RotateAuthoritiesRequest>,
    ) -> Result<Response<v1::Rotation>, Status> {
        let lead = self.lead()?;
        let rotation = Box::pin(lead.rotate()).await;
        rotation.map(|begun| lead.answer(begun)).map_err(|error| lead.refuse(error))
    }

    async fn get_rotation(
        &self,
        _request: Request<v1::GetRotationRequest>,
    ) -> Result<Response<v1::GetRotationResponse>, Status> {
        let lead = self.lead()?;
        let read = Box::pin(lead.read_rotation()).await;
        read.map(Response::new).map_err(|error| lead.refuse(error))
    }

    async fn control_update(
        &self,
        request: Request<v1::ControlUpdateRequest>,
    ) -> Result<Response<v1::ClusterUpdate>, Status> {
        let lead = self.lead()?;
        let controlled = lead.control_update(request.into_inner()).await;
        controlled.map(|update| lead.answer(update)).map_err(|error| lead.refuse(error))
    }
}

impl Lead {
    /// The record of a node that must exist.
    async fn exists(&self, id: NodeId) -> Result<v1::Node, Status> {
        self.store().node(id).await.map_err(|error| self.refuse(error))
    }

    /// Whether the version of a node knows the networks in which these roles run.
    async fn check_version(&self, id: NodeId, add: &v1::NodeRoles) -> Result<(), Error> {
        let networks = pod_network::networks(&self.store().configuration().await?)?;
        let report = self.handlers.0.heartbeats.update(id);
        pod_network::check_version(id, add, networks, report.as_deref())
    }
}

fn departure(then: Then) -> v1::Departure {
    v1::Departure { then: then.into(), ..Default::default() }
}

/// A node that runs a curator, in the form of the cluster's directory.
fn member(
    id: NodeId,
    known: &Known,
    elsewhere: Option<IpAddr>,
) -> Option<v1::cluster_directory::Node> {
    let up = known.node.state() == v1::NodeState::Up;
    let role = is_consensus_member(known.node.roles.as_ref());
    let reported = known.node.status.as_ref().map(|status| status.external_address.clone());
    let reported = reported.filter(|address| !address.is_empty());
    let address = reported.or_else(|| elsewhere.map(|address| address.to_string()))?;
    (up && role)
        .then(|| v1::cluster_directory::Node { id: id.to_string(), addresses: vec![address] })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_filter_has_a_bounded_number_of_entries_in_each_field() {
        let id = NodeId::from_public_key(&[1; 32]);
        let many = |count: usize| {
            let (ids, states) = (vec![id.to_string(); count], vec![9; count]);
            let labels = (0..count).map(|key| (key.to_string(), String::new())).collect();
            let only = |field: &'static str, request| (field, Filter::read(request));
            [
                only("ids", v1::GetNodesRequest { ids, ..Default::default() }),
                only("states", v1::GetNodesRequest { states, ..Default::default() }),
                only("labels", v1::GetNodesRequest { labels, ..Default::default() }),
            ]
        };
        for (field, read) in many(FILTER_MAX) {
            assert!(read.is_ok(), "{field}");
        }
        for (field, read) in many(FILTER_MAX + 1) {
            let refused = read.unwrap_err().to_string();
            assert!(refused.starts_with(field) && refused.ends_with("1024"), "{refused}");
        }
    }

    #[test]
    fn a_node_is_asked_for_by_every_field_that_is_not_empty() {
        let id = |seed: u8| NodeId::from_public_key(&[seed; 32]);
        let labels = |value: &str| BTreeMap::from([("zone".to_owned(), value.to_owned())]);
        let up = v1::NodeState::Up.into();
        let node = v1::Node { state: up, labels: labels("a"), ..Default::default() };
        let fits = |request| Filter::read(request).unwrap().fits(id(1), &node);
        let by_id = |seed| {
            let ids = vec![id(seed).to_string()];
            v1::GetNodesRequest { ids, ..Default::default() }
        };
        assert!(fits(v1::GetNodesRequest::default()));
        assert!(fits(by_id(1)) && !fits(by_id(2)));
        assert!(fits(v1::GetNodesRequest { states: vec![up], labels: labels("a"), ..by_id(1) }));
        assert!(!fits(v1::GetNodesRequest { states: vec![up + 1], ..by_id(1) }));
        assert!(!fits(v1::GetNodesRequest { labels: labels("b"), ..by_id(1) }));
    }
}
