//! The services of a member: its way into the cluster, its etcd, and the other nodes.

use std::path::PathBuf;
use std::sync::Arc;

use super::Root;
use super::values::Values;
use crate::roles;
use polis_base::extra;
use polis_base::sys::efivar;
use polis_control::{cluster, consensus};
use polis_machine::install;

/// The services that make the machine a node of its cluster, and of etcd, and that find the
/// others.
pub(super) struct Membership {
    pub(super) consensus: consensus::Service,
    pub(super) cluster: cluster::Service,
    pub(super) credentials: cluster::credentials::Service,
    pub(super) peers: cluster::peers::Service,
    pub(super) discovery: cluster::discovery::Service,
    pub(super) enlist: roles::enlist::Service,
}

impl Membership {
    pub(super) fn new(values: &Values, root: &Root) -> Self {
        let Values { tree, member, .. } = values;
        Self {
            consensus: member.clone(),
            cluster: cluster::Service {
                config: cluster::Config {
                    root: tree.clone(),
                    probe: cluster::Probe::default(),
                    tpm: Arc::new(cluster::unlock::sealer::Machine {
                        dev: PathBuf::from("/dev"),
                        extra: PathBuf::from(extra::DIRECTORY),
                    }),
                    efivars: PathBuf::from(efivar::DIRECTORY),
                    recovery: root.recovery.clone(),
                    install: install::Config::live(&root.environment, tree),
                },
                parameters: values.known.subscribe(),
                storage: values.storage.subscribe(),
                network: values.network.subscribe(),
                consensus: member.status(),
                wanted: values.wanted.clone(),
                identity: values.identity.clone(),
                orders: values.orders.clone(),
                unlock_requests: values.unlock_requests.clone(),
                announcements: values.announcements.clone(),
                reset: values.reset.subscribe(),
                end: root.end.clone(),
                status: values.cluster.clone(),
            },
            credentials: cluster::credentials::Service {
                files: tree.data.node.credentials.clone(),
                cluster: values.cluster.subscribe(),
                credentials: values.credentials.clone(),
            },
            peers: cluster::peers::Service {
                directory: tree.esp.cluster_directory.clone(),
                nodes: values.nodes.subscribe(),
                found: values.found.subscribe(),
                peers: values.peers.clone(),
            },
            discovery: cluster::discovery::Service {
                key: tree.data.node.credentials.key.clone(),
                identity: values.identity.subscribe(),
                consensus: member.status(),
                leader: values.client.leader_id(),
                network: values.network.subscribe(),
                peers: values.peers.subscribe(),
                found: values.found.clone(),
            },
            enlist: roles::enlist::Service {
                data: tree.data.clone(),
                client: values.client.clone(),
                nodes: values.nodes.subscribe(),
                network: values.network.subscribe(),
                consensus: member.status(),
                orders: values.orders.clone(),
                cluster: values.cluster.clone(),
            },
        }
    }
}
