//! The services of the control plane, and of the roles that it gives to this node.

use std::sync::Arc;

use tokio::sync::watch;

use super::Root;
use super::values::Values;
use crate::{agent, roles, shipping};
use polis_control::curator;
use polis_workload as workload;
use polis_workload::runtime;

/// The services that lead the cluster, or follow the leader, that decide when the node is
/// ready, and that run what its roles ask for.
pub(super) struct Control {
    pub(super) curator: curator::Service,
    pub(super) shipping: shipping::Service,
    pub(super) agent: agent::Service,
    pub(super) containerd: runtime::Service,
    pub(super) roles: roles::readiness::Service,
    pub(super) health: roles::health::Service,
    pub(super) workload: workload::Service,
}

impl Control {
    pub(super) fn new(values: &Values, root: &Root) -> Self {
        let Values { tree, member, .. } = values;
        Self {
            curator: curator::Service {
                config: curator::Config::live(),
                identity: values.identity.subscribe(),
                consensus: member.status(),
                members: member.members(),
                network: values.network.subscribe(),
                ahead: values.ahead.subscribe(),
                credentials: values.credentials.subscribe(),
                metrics: Arc::clone(&values.metrics),
                table: Arc::clone(&values.table),
                access_list: values.access_list.clone(),
                directory: values.directory.clone(),
                reached: values.reached.clone(),
                update: values.cluster_update.clone(),
                status: values.curator.clone(),
            },
            shipping: shipping::Service {
                config: shipping::Config::live(tree),
                inputs: shipping::Inputs {
                    curator: values.curator.subscribe(),
                    directory: values.directory.subscribe(),
                    consensus: member.status(),
                },
                status: values.shipping.clone(),
            },
            agent: agent::Service {
                config: agent::Config::live(tree),
                client: values.client.clone(),
                inputs: agent::Inputs {
                    environment: root.environment.clone(),
                    consensus: member.status(),
                    network: values.network.subscribe(),
                    storage: values.storage.subscribe(),
                    parameters: values.known.subscribe(),
                    found: values.found.subscribe(),
                    workload: values.workload.subscribe(),
                    firewall: values.firewall.subscribe(),
                    time: values.time.subscribe(),
                    forwarding: values.forwarding.subscribe(),
                    shipping: values.shipping.subscribe(),
                    update: values.update.subscribe(),
                    mirror: values.mirror.subscribe(),
                    volumes: values.volumes.subscribe(),
                    mesh_key: values.mesh.key.subscribe(),
                    networks_fault: values.networks_fault.subscribe(),
                    reached: values.reached.subscribe(),
                    ready: root.ready.subscribe(),
                },
                outputs: agent::Outputs {
                    report: values.report.clone(),
                    candidates: values.candidates.clone(),
                    nodes: values.nodes.clone(),
                    time_servers: values.time_servers.clone(),
                    log_targets: values.log_targets.clone(),
                    proxy: values.proxy.clone(),
                    firewall: values.order.clone(),
                    network: values.network_order.clone(),
                    proof: values.proof.clone(),
                    roles: values.given.clone(),
                    networks: values.networks.clone(),
                    networks_fault: values.networks_fault.clone(),
                    access_list: values.access_list.clone(),
                    credentials: values.credentials.clone(),
                    cluster: values.cluster.clone(),
                    contact: watch::Sender::default(),
                    prove_tpm: watch::Sender::default(),
                    turn: watch::Sender::default(),
                    leave: watch::Sender::default(),
                    taking: watch::Sender::default(),
                    end: root.end.clone(),
                },
                restarts: member.restarts(),
                tools: agent::Tools {
                    door: values.door.clone(),
                    bundles: values.bundles.clone(),
                    drains: values.drains.clone(),
                    looks: Arc::default(),
                },
                calls: values.calls.clone(),
                tpm: values.tpm.clone(),
            },
            containerd: runtime::Service {
                config: runtime::Config::live(tree),
                cluster: values.cluster.subscribe(),
                roles: values.given.subscribe(),
                storage: values.storage.subscribe(),
                workload: values.workload.subscribe(),
                network: values.network.subscribe(),
                proxy: values.proxy.subscribe(),
                status: values.containerd.clone(),
                pods: values.pods.clone(),
            },
            roles: roles::readiness::Service {
                image: root.environment.image.clone(),
                cluster: values.cluster.subscribe(),
                consensus: member.status(),
                curator: values.curator.subscribe(),
                leader: values.client.leader_id(),
                network: values.network.subscribe(),
                ready: root.ready.clone(),
            },
            health: roles::health::Service {
                cluster: values.cluster.subscribe(),
                consensus: member.status(),
                roles: values.given.subscribe(),
                workload: values.workload.subscribe(),
                health: values.cluster_health.clone(),
                parts: values.workload_health.clone(),
            },
            workload: workload::Service {
                config: workload::Config::live(tree),
                cluster: values.cluster.subscribe(),
                roles: values.given.subscribe(),
                networks: values.networks.subscribe(),
                consensus: member.status(),
                network: values.network.subscribe(),
                nodes: values.nodes.subscribe(),
                containerd: values.containerd.subscribe(),
                client: values.client.clone(),
                identity: workload::Identity {
                    credentials: values.credentials.subscribe(),
                    access_list: values.access_list.subscribe(),
                    metrics: Arc::clone(&values.access_metrics),
                },
                status: values.workload.clone(),
                drains: values.drains.clone(),
                mesh: values.mesh.clone(),
            },
        }
    }
}
