//! The services that need no cluster.

use std::path::PathBuf;

use super::values::Values;
use super::{Root, firewall_config};
use crate::daemon::logs;
use crate::{firewall, forwarding};
use polis_machine::network::{self, names};
use polis_machine::{mirror, parameters, storage, time, update, volumes};
use polis_runtime::logtree::kernel;
use polis_runtime::supervisor::Context;

/// The services without a cluster: the machine, its disk, its network, its parameters.
pub(super) struct Base {
    pub(super) kernel: kernel::Service,
    pub(super) mirror: mirror::Service,
    pub(super) storage: storage::Service,
    pub(super) volumes: volumes::Service,
    pub(super) logs: logs::Service,
    pub(super) update: update::Service,
    pub(super) parameters: parameters::Service,
    pub(super) network: network::Service,
    pub(super) names: names::Service,
    pub(super) firewall: firewall::Service,
    pub(super) forwarding: forwarding::Service,
    pub(super) time: time::Service,
}

impl Base {
    pub(super) fn new(values: &Values, root: &Root, ctx: &Context) -> Self {
        let tree = &values.tree;
        Self {
            kernel: kernel::Service { tree: ctx.logs().clone() },
            mirror: mirror::Service {
                config: mirror::Config::live(&root.environment, tree),
                known: values.known.subscribe(),
                wanted: values.wanted.subscribe(),
                storage: values.storage.subscribe(),
                ready: root.ready.subscribe(),
                end: root.end.clone(),
                backing: values.backing.clone(),
                status: values.mirror.clone(),
            },
            storage: storage::Service {
                config: storage::Config {
                    disk: root.environment.disk.clone(),
                    root: tree.clone(),
                    mount_options: storage::machine::MOUNT_OPTIONS,
                },
                wanted: values.wanted.subscribe(),
                status: values.storage.clone(),
                health: values.health.clone(),
                backing: values.backing.subscribe(),
            },
            volumes: volumes::Service::live(
                &root.environment,
                tree.clone(),
                values.known.subscribe(),
                values.storage.subscribe(),
                values.volumes.clone(),
            ),
            logs: logs::Service {
                image: root.environment.image.clone(),
                storage: values.storage.subscribe(),
                status: values.ring.clone(),
            },
            update: update::Service {
                config: values.door.config().clone(),
                previous: root.environment.previous_guru.clone(),
                trial: update::TRIAL,
                ready: root.ready.subscribe(),
                health: values.cluster_health.subscribe(),
                workload: values.workload_health.subscribe(),
                status: values.update.clone(),
            },
            parameters: parameters::Service {
                config: parameters::Config {
                    sys: PathBuf::from("/sys"),
                    dev: PathBuf::from("/dev"),
                    esp: tree.esp.parameters.clone(),
                    given: tree.esp.given_parameters.clone(),
                    kept: tree.esp.user_data.clone(),
                    metadata: parameters::METADATA_ADDRESS,
                    metadata_v6: parameters::metadata_v6,
                },
                storage: values.storage.subscribe(),
                asks: values.asks.clone(),
                known: values.known.clone(),
            },
            network: network::Service {
                config: network::Config {
                    interfaces: network::Interfaces::Hardware,
                    sys: PathBuf::from("/sys"),
                    resolv_conf: tree.ephemeral.resolv_conf.clone(),
                    record: tree.esp.network.clone(),
                },
                known: values.known.subscribe(),
                order: values.network_order.subscribe(),
                proof: values.proof.subscribe(),
                asks: values.asks.subscribe(),
                status: values.network.clone(),
            },
            names: names::Service {
                config: names::Config {
                    hosts: tree.ephemeral.hosts.clone(),
                    hostname: tree.ephemeral.hostname.clone(),
                    machine_id: tree.ephemeral.machine_id.clone(),
                    kernel: names::Kernel::Set,
                },
                identity: values.identity.subscribe(),
                network: values.network.subscribe(),
                peers: values.peers.subscribe(),
            },
            firewall: firewall::Service {
                config: firewall_config(),
                inputs: firewall::Inputs {
                    cluster: values.cluster.subscribe(),
                    consensus: values.member.status(),
                    roles: values.given.subscribe(),
                    nodes: values.nodes.subscribe(),
                    peers: values.peers.subscribe(),
                    order: values.order.subscribe(),
                    asks: values.asks.subscribe(),
                },
                network: values.network.subscribe(),
                status: values.firewall.clone(),
            },
            forwarding: forwarding::Service {
                config: forwarding::Config::live(tree, &root.environment.version),
                inputs: forwarding::Inputs {
                    storage: values.storage.subscribe(),
                    ring: values.ring.subscribe(),
                    order: values.log_targets.subscribe(),
                    proxy: values.proxy.subscribe(),
                    cluster: values.cluster.subscribe(),
                    nodes: values.nodes.subscribe(),
                },
                status: values.forwarding.clone(),
            },
            time: time::Service {
                config: time::Config::live(tree, &values.time.borrow()),
                inputs: time::Inputs {
                    identity: values.identity.subscribe(),
                    network: values.network.subscribe(),
                    roles: values.given.subscribe(),
                    nodes: values.nodes.subscribe(),
                    peers: values.peers.subscribe(),
                    servers: values.time_servers.subscribe(),
                    storage: values.storage.subscribe(),
                },
                status: values.time.clone(),
                ahead: values.ahead.clone(),
            },
        }
    }
}
