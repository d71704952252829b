//! The interfaces for people: the console, and the management API of this node.

use std::sync::Arc;

use super::values::Values;
use super::{Root, firewall_config};
use crate::{console, management};
use polis_control::cluster;
use polis_wire::endpoint::MANAGEMENT_PORT;

/// The services that show the node: on its terminals, and to those who operate it.
pub(super) struct UserInterfaces {
    pub(super) console: console::Service,
    pub(super) nodes: console::nodes::Service,
    pub(super) management: management::Service,
}

impl UserInterfaces {
    pub(super) fn new(values: &Values, root: &Root) -> Self {
        let member = &values.member;
        Self {
            console: console::Service {
                terminals: root.terminals.clone(),
                snapshot: values.snapshot.clone(),
                members: console::members::Service {
                    consensus: member.status(),
                    members: member.members(),
                    nodes: values.nodes.subscribe(),
                    credentials: values.credentials.subscribe(),
                    port: MANAGEMENT_PORT,
                },
                end: root.leave.clone(),
                environment: root.environment.clone(),
                inputs: console::Inputs {
                    known: values.known.subscribe(),
                    network: values.network.subscribe(),
                    storage: values.storage.subscribe(),
                    time: values.time.subscribe(),
                    health: values.health.subscribe(),
                    volumes: values.volumes.subscribe(),
                    mirror: values.mirror.subscribe(),
                    cluster: values.cluster.subscribe(),
                    consensus: member.status(),
                    pki: member.overview(),
                    cluster_nodes: values.cluster_nodes.subscribe(),
                    identity: values.identity.subscribe(),
                    roles: values.given.subscribe(),
                    workload: values.workload.subscribe(),
                    containerd: values.containerd.subscribe(),
                    pods: values.pods.subscribe(),
                    shipping: values.shipping.subscribe(),
                },
            },
            nodes: console::nodes::Service {
                nodes: values.nodes.subscribe(),
                leader: values.client.leader_id(),
                consensus: member.status(),
                own: values.cluster.subscribe(),
                update: values.cluster_update.subscribe(),
                shown: values.cluster_nodes.clone(),
            },
            management: management::Service {
                config: management::Config::live(),
                inputs: management::Inputs {
                    environment: root.environment.clone(),
                    cluster: values.cluster.subscribe(),
                    consensus: member.status(),
                    pki: member.overview(),
                    ready: root.ready.subscribe(),
                    report: values.report.subscribe(),
                    ring: values.ring.subscribe(),
                    snapshot: values.snapshot.subscribe(),
                    credentials: values.credentials.subscribe(),
                    unlock_requests: cluster::unlock::Requests::new(
                        values.unlock_requests.subscribe(),
                    ),
                    announcements: cluster::unlock::Announcements::new(
                        values.announcements.subscribe(),
                    ),
                    access_list: values.access_list.subscribe(),
                    workload: values.workload.subscribe(),
                    drains: values.drains.clone(),
                    time: values.time.subscribe(),
                    forwarding: values.forwarding.subscribe(),
                    shipping: values.shipping.subscribe(),
                    cluster_update: values.cluster_update.subscribe(),
                    mirror: values.mirror.subscribe(),
                    volumes: values.volumes.subscribe(),
                    firewall: values.firewall.subscribe(),
                },
                table: Arc::clone(&values.table),
                servers: vec![
                    ("curator", Arc::clone(&values.metrics)),
                    ("access", Arc::clone(&values.access_metrics)),
                ],
                end: root.end.clone(),
                reset: values.reset.clone(),
                update: values.door.clone(),
                bundles: values.bundles.clone(),
                calls: values.calls.clone(),
                firewall: firewall_config(),
                tpm: values.tpm.clone(),
                listening: Default::default(),
            },
        }
    }
}
