//! The leader: its records of nodes, its settings, etcd, the audit log, updates.

use std::sync::atomic::Ordering;

use futures::{StreamExt as _, stream};
use polis_proto::v1;
use polis_proto::v1::management_server::Management;
use sha2::{Digest as _, Sha256};
use tonic::{Request, Response, Status};

use super::records::{begun_rotation, network_report, update_of};
use super::served::{Answers, Served, answers};
use super::{NAME, NODE, RECOVERY_KEY, SNAPSHOT, crowd, encrypted};
use polis_wire::parameters::taint_text;
use polis_wire::pki::Crl;
use polis_wire::rpc::testing::{key, node_id};

#[tonic::async_trait]
impl Management for Served {
    type GetAuditStream = Answers<v1::GetAuditResponse>;
    type GetNodesStream = Answers<v1::NodeInfo>;
    type SnapshotEtcdStream = Answers<v1::SnapshotChunk>;

    async fn get_register_ticket(
        &self,
        request: Request<v1::GetRegisterTicketRequest>,
    ) -> Result<Response<v1::GetRegisterTicketResponse>, Status> {
        self.note("GetRegisterTicket");
        let lifetime = i64::try_from(request.into_inner().lifetime_seconds).unwrap();
        let ends_at = if lifetime == 0 { 0 } else { 1_700_000_000 };
        Ok(Response::new(v1::GetRegisterTicketResponse { ticket: vec![5; 32], ends_at }))
    }

    async fn get_cluster_info(
        &self,
        request: Request<v1::GetClusterInfoRequest>,
    ) -> Result<Response<v1::GetClusterInfoResponse>, Status> {
        let known = request.into_inner().crl_digest;
        let crl = self.crl.lock().unwrap().clone();
        let other = Crl::read(&crl).filter(|crl| crl.digest() != known);
        let configuration = self.settings.lock().unwrap().configuration.clone();
        Ok(Response::new(v1::GetClusterInfoResponse {
            crl: other.map(|crl| crl.der).unwrap_or_default(),
            ca_certificate: self.ca.clone(),
            leader: node_id(NODE).to_string(),
            configuration: Some(configuration).filter(|it| *it != Default::default()),
            refused_registrations: self.crowd(crowd::refused),
            update: self
                .update
                .lock()
                .unwrap()
                .clone()
                .map(|update| v1::GetUpdateResponse { update: Some(update), ..Default::default() }),
            ..Default::default()
        }))
    }

    async fn get_nodes(
        &self,
        _request: Request<v1::GetNodesRequest>,
    ) -> Result<Response<Self::GetNodesStream>, Status> {
        if !self.leads.load(Ordering::Relaxed) {
            return Err(Status::unavailable("this node does not lead"));
        }
        let network_order = self.network.lock().unwrap().clone();
        let proof = self.tpm.lock().unwrap().returning.clone();
        let returning = proof.map(|proof| v1::Returning {
            nonce: vec![2; 16],
            attestation: Some(proof),
            ..Default::default()
        });
        let status = v1::NodeStatus {
            external_address: "192.0.2.1".to_owned(),
            network: Some(network_report(network_order.as_ref())),
            ..Default::default()
        };
        let node = v1::NodeInfo {
            network_order,
            id: node_id(NODE).to_string(),
            public_key: key(NODE).verifying_key().to_bytes().to_vec(),
            state: v1::NodeState::Up.into(),
            status: Some(status),
            health: v1::NodeHealth::Healthy.into(),
            heartbeat_age_ms: 1200,
            registered_at: 1_700_000_000,
            roles: self.kubernetes.roles(),
            name: NAME.to_owned(),
            attestation: self.tpm.lock().unwrap().recorded.clone(),
            returning,
            ..Default::default()
        };
        Ok(answers([vec![node], self.crowd(crowd::nodes)].concat()))
    }

    async fn approve_node(
        &self,
        request: Request<v1::ApproveNodeRequest>,
    ) -> Result<Response<v1::ApproveNodeResponse>, Status> {
        let v1::ApproveNodeRequest { attestation, .. } = request.into_inner();
        let is_recorded = attestation == self.tpm.lock().unwrap().recorded;
        self.note(match attestation {
            None => "ApproveNode",
            Some(_) if is_recorded => "ApproveNode with the proof in the record",
            Some(_) => "ApproveNode with another proof",
        });
        Ok(Response::new(v1::ApproveNodeResponse::default()))
    }

    async fn update_node_roles(
        &self,
        _request: Request<v1::UpdateNodeRolesRequest>,
    ) -> Result<Response<v1::NodeInfo>, Status> {
        self.note("UpdateNodeRoles");
        Ok(Response::new(v1::NodeInfo::default()))
    }

    async fn update_node_labels(
        &self,
        _request: Request<v1::UpdateNodeLabelsRequest>,
    ) -> Result<Response<v1::NodeInfo>, Status> {
        self.note("UpdateNodeLabels");
        Ok(Response::new(v1::NodeInfo::default()))
    }

    async fn update_node_taints(
        &self,
        request: Request<v1::UpdateNodeTaintsRequest>,
    ) -> Result<Response<v1::NodeInfo>, Status> {
        let v1::UpdateNodeTaintsRequest { set, remove, .. } = request.into_inner();
        let texts = |taints: &[v1::NodeTaint]| taints.iter().map(taint_text).collect::<Vec<_>>();
        self.note(&format!("UpdateNodeTaints {:?} {:?}", texts(&set), texts(&remove)));
        Ok(Response::new(v1::NodeInfo { taints: set, ..Default::default() }))
    }

    async fn name_node(
        &self,
        request: Request<v1::NameNodeRequest>,
    ) -> Result<Response<v1::NodeInfo>, Status> {
        let v1::NameNodeRequest { name, .. } = request.into_inner();
        self.note(&format!("NameNode {name}"));
        Ok(Response::new(v1::NodeInfo { name, ..Default::default() }))
    }

    async fn configure_node_network(
        &self,
        request: Request<v1::ConfigureNodeNetworkRequest>,
    ) -> Result<Response<v1::NodeInfo>, Status> {
        self.note("ConfigureNodeNetwork");
        let v1::ConfigureNodeNetworkRequest { configuration, .. } = request.into_inner();
        let order = Some(v1::NetworkOrder { number: 7, configuration });
        self.network.lock().unwrap().clone_from(&order);
        Ok(Response::new(v1::NodeInfo { network_order: order, ..Default::default() }))
    }

    async fn decommission_node(
        &self,
        _request: Request<v1::DecommissionNodeRequest>,
    ) -> Result<Response<v1::DecommissionNodeResponse>, Status> {
        self.note("DecommissionNode");
        Ok(Response::new(v1::DecommissionNodeResponse::default()))
    }

    async fn delete_node(
        &self,
        _request: Request<v1::DeleteNodeRequest>,
    ) -> Result<Response<v1::DeleteNodeResponse>, Status> {
        self.note("DeleteNode");
        Ok(Response::new(v1::DeleteNodeResponse {}))
    }

    async fn configure_cluster(
        &self,
        request: Request<v1::ConfigureClusterRequest>,
    ) -> Result<Response<v1::ConfigureClusterResponse>, Status> {
        self.note("ConfigureCluster");
        let configuration = request.into_inner().configuration.unwrap_or_default();
        self.settings.lock().unwrap().configure(configuration.clone())?;
        let Some(firewall) = configuration.firewall else {
            return Ok(Response::new(v1::ConfigureClusterResponse::default()));
        };
        self.firewall.lock().unwrap().clone_from(&firewall);
        let trial = v1::FirewallTrial { configuration: Some(firewall), until: i64::MAX };
        let configuration =
            v1::ClusterConfiguration { firewall_trial: Some(trial), ..Default::default() };
        Ok(Response::new(v1::ConfigureClusterResponse { configuration: Some(configuration) }))
    }

    async fn confirm_firewall(
        &self,
        request: Request<v1::ConfirmFirewallRequest>,
    ) -> Result<Response<v1::ConfirmFirewallResponse>, Status> {
        self.note("ConfirmFirewall");
        let confirmed = request.into_inner().configuration;
        self.settings.lock().unwrap().configuration.firewall = confirmed;
        Ok(Response::new(v1::ConfirmFirewallResponse::default()))
    }

    async fn set_registry(
        &self,
        request: Request<v1::SetRegistryRequest>,
    ) -> Result<Response<v1::SetRegistryResponse>, Status> {
        let registry = request.into_inner().registry.unwrap();
        self.note(&format!("SetRegistry {}", registry.host));
        let registry = polis_wire::registry::shown(&registry);
        let mut settings = self.settings.lock().unwrap();
        settings.registries.retain(|it| it.host != registry.host);
        settings.registries.push(registry.clone());
        Ok(Response::new(v1::SetRegistryResponse { registry: Some(registry) }))
    }

    async fn delete_registry(
        &self,
        request: Request<v1::DeleteRegistryRequest>,
    ) -> Result<Response<v1::DeleteRegistryResponse>, Status> {
        let host = request.into_inner().host;
        self.note(&format!("DeleteRegistry {host}"));
        self.settings.lock().unwrap().registries.retain(|it| it.host != host);
        Ok(Response::new(v1::DeleteRegistryResponse {}))
    }

    async fn list_registries(
        &self,
        _request: Request<v1::ListRegistriesRequest>,
    ) -> Result<Response<v1::ListRegistriesResponse>, Status> {
        let registries = self.settings.lock().unwrap().registries.clone();
        Ok(Response::new(v1::ListRegistriesResponse { registries }))
    }

    async fn get_recovery_key(
        &self,
        _request: Request<v1::GetRecoveryKeyRequest>,
    ) -> Result<Response<v1::GetRecoveryKeyResponse>, Status> {
        self.note("GetRecoveryKey");
        let encrypted_recovery_key = encrypted(&RECOVERY_KEY);
        Ok(Response::new(v1::GetRecoveryKeyResponse { encrypted_recovery_key }))
    }

    async fn confirm_recovery_key(
        &self,
        _request: Request<v1::ConfirmRecoveryKeyRequest>,
    ) -> Result<Response<v1::ConfirmRecoveryKeyResponse>, Status> {
        self.note("ConfirmRecoveryKey");
        Ok(Response::new(v1::ConfirmRecoveryKeyResponse {}))
    }

    async fn get_etcd_status(
        &self,
        _request: Request<v1::GetEtcdStatusRequest>,
    ) -> Result<Response<v1::ConsensusStatus>, Status> {
        let member = v1::ConsensusMember {
            id: 1,
            node_id: node_id(NODE).to_string(),
            answers: self.answers.load(Ordering::Relaxed),
            ..Default::default()
        };
        let members = [vec![member], self.crowd(crowd::members)].concat();
        self.etcd_read.notify_one();
        Ok(Response::new(v1::ConsensusStatus { leader: 1, members, ..Default::default() }))
    }

    async fn snapshot_etcd(
        &self,
        _request: Request<v1::SnapshotEtcdRequest>,
    ) -> Result<Response<Self::SnapshotEtcdStream>, Status> {
        let file = encrypted(&[SNAPSHOT, &Sha256::digest(SNAPSHOT)].concat());
        let chunks = file.chunks(100).map(|data| Ok(v1::SnapshotChunk { data: data.to_vec() }));
        let chunks = stream::iter(chunks.collect::<Vec<_>>());
        Ok(Response::new(match self.answers.load(Ordering::Relaxed) {
            true => chunks.boxed(),
            false => chunks.take(1).chain(stream::pending()).boxed(),
        }))
    }

    async fn get_audit(
        &self,
        _request: Request<v1::GetAuditRequest>,
    ) -> Result<Response<Self::GetAuditStream>, Status> {
        if !self.leads.load(Ordering::Relaxed) {
            return Err(Status::unavailable("this node does not lead"));
        }
        let (head, entries) = self.audit.lock().unwrap().clone();
        Ok(answers(vec![v1::GetAuditResponse { head: Some(head), entries }]))
    }

    async fn begin_update(
        &self,
        request: Request<v1::BeginUpdateRequest>,
    ) -> Result<Response<v1::ClusterUpdate>, Status> {
        let v1::BeginUpdateRequest { bundle, dry_run, one_way } = request.into_inner();
        let bundle = bundle.unwrap();
        let call = if dry_run { "PlanUpdate" } else { "BeginUpdate" };
        let consent = if one_way { ", one way" } else { "" };
        self.note(&format!("{call} {}{consent}", bundle.version));
        let etcd = self.etcd_cluster.lock().unwrap().clone();
        let update = update_of(bundle, v1::cluster_update::State::Loading);
        let update = v1::ClusterUpdate { etcd, one_way, ..update };
        if !dry_run {
            *self.update.lock().unwrap() = Some(update.clone());
        }
        Ok(Response::new(update))
    }

    async fn get_update(
        &self,
        _request: Request<v1::GetUpdateRequest>,
    ) -> Result<Response<v1::GetUpdateResponse>, Status> {
        if let Some(next) = self.update_looks.lock().unwrap().pop_front() {
            *self.update.lock().unwrap() = Some(next);
        }
        let update = self.update.lock().unwrap().clone();
        // An earlier one, which is over.
        let update = update.unwrap_or_else(|| {
            let bundle = v1::UpdateBundle { version: "0.9.0".to_owned(), ..Default::default() };
            update_of(bundle, v1::cluster_update::State::Done)
        });
        let update = Some(update);
        let waits_for = format!("{} does not have the bundle yet", node_id(NODE));
        let waits_since = 1_700_000_000;
        Ok(Response::new(v1::GetUpdateResponse { update, waits_for, waits_since }))
    }

    async fn rotate_authorities(
        &self,
        _request: Request<v1::RotateAuthoritiesRequest>,
    ) -> Result<Response<v1::Rotation>, Status> {
        self.note("RotateAuthorities");
        let number = self.authority.authorities().await.rotations + 1;
        self.authority.rotate(number).await;
        self.authority.conclude().await;
        let own = self.authority.curator(NODE).await;
        for shown in self.shown.lock().unwrap().iter() {
            shown.send_replace(Some(own.clone()));
        }
        Ok(Response::new(begun_rotation()))
    }

    async fn get_rotation(
        &self,
        _request: Request<v1::GetRotationRequest>,
    ) -> Result<Response<v1::GetRotationResponse>, Status> {
        Ok(Response::new(self.rotation().await))
    }

    async fn control_update(
        &self,
        request: Request<v1::ControlUpdateRequest>,
    ) -> Result<Response<v1::ClusterUpdate>, Status> {
        use v1::control_update_request::Control;
        let control = request.into_inner().control();
        self.note(&format!("ControlUpdate {}", control.as_str_name()));
        let mut update = self.update.lock().unwrap();
        let update = update.as_mut().unwrap();
        match control {
            Control::Pause => {
                update.paused = true;
                update.set_state(v1::cluster_update::State::Running);
            }
            Control::Resume => {
                update.paused = false;
                update.set_state(v1::cluster_update::State::Failed);
            }
            Control::Abort => update.set_state(v1::cluster_update::State::Aborted),
            Control::Unspecified => panic!("no control"),
        }
        Ok(Response::new(update.clone()))
    }
}
