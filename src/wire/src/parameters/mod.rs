//! The node parameters, which configure a machine before its first boot; read strictly.
//!
//! ```text
//! bytes or text --> armour --> wire: known fields only --> validate --> Parameters
//! ```
//!
//! Invariants:
//! - A file that contains anything unknown is rejected whole. A partly applied file
//!   does not do what the operator asked for, and the rejected part may hold the
//!   network configuration that leads to this machine.
//!
//! What this module does not do: find the file (`parameters` of the node), or decide
//! what the machine does with it (`cluster`).

mod armour;
mod attestation_policy;
mod cidr;
pub mod disk;
mod disk_volume;
mod error;
mod firewall;
mod install;
mod kubernetes_names;
mod log_target;
mod network;
mod networks;
mod node_taints;
mod platform;
mod proxy;
mod snapshot_target;
mod source;
mod text;
mod validate;
mod wire;

use std::collections::BTreeMap;
use std::fmt;

use polis_proto::v1;
use zeroize::Zeroizing;

use crate::identity::{NodeId, NodeName};
use crate::pod_network::Networks;

pub use self::armour::{ARMOUR, message, text};
pub use self::attestation_policy::{AttestationPolicy, Maker, System, attestation_policy};
pub use self::cidr::{Cidr, Mac};
pub use self::disk_volume::{DiskVolume, VolumeName};
pub use self::error::{Error, FieldError, absent};
pub use self::firewall::{Firewall, Ports, Protocol};
pub use self::install::{ID_BYTES, Install, Message, Selector, Transport, Wipe};
pub use self::kubernetes_names::kubernetes_names;
pub use self::log_target::{LogProtocol, LogTarget};
pub use self::network::{
    Bond, Bonding, Card, Hash, Interface, Ipv6, LinkSettings, Match, Network, Parent, Place, Route,
    Vlan,
};
pub use self::networks::networks;
pub use self::node_taints::{
    TAINTS_MAX, node_taints, removed_taints, taint_effect, taint_effect_name, taint_text,
};
pub use self::platform::{Dmi, Platform};
pub use self::proxy::{Proxy, proxy};
pub use self::snapshot_target::snapshot_target;
pub use self::source::{BYTES_MAX, FW_CFG_ITEM, Source};
pub use self::validate::{
    MTU, VLAN_IDS, configuration, firewall, key, labels, log_targets, network, parse, time_servers,
};

/// The value that was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Loaded {
    /// The parameters, and where they came from; `None` if no place has any.
    pub found: Option<(Parameters, Source)>,
    /// Something that an operator should know although the boot goes on.
    pub warning: Option<String>,
    /// The places that were searched and their results, one sentence for each place.
    pub tried: Vec<String>,
}

impl Loaded {
    /// The parameters, if there are any.
    #[must_use]
    pub fn parameters(&self) -> Option<&Parameters> {
        self.found.as_ref().map(|(parameters, _)| parameters)
    }

    /// Where to reach the cluster, if the parameters name a CA of it: they ask for admission to
    /// it, which a member has already.
    #[must_use]
    pub fn directory(&self, is_its: impl FnOnce(&[u8]) -> bool) -> Option<v1::ClusterDirectory> {
        let Cluster::Register(register) = &self.parameters()?.cluster else { return None };
        is_its(&register.ca_certificate).then(|| register.directory())
    }
}

/// Checked node parameters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parameters {
    /// The cluster to found or to register with.
    pub cluster: Cluster,
    /// How to reach the world.
    pub network: Network,
    /// Terminals besides tty1 that carry the console, by name under `/dev`.
    pub console_tui: Vec<String>,
    /// The node whose data partition this machine wipes, if it finds it.
    pub wipes: Option<NodeId>,
    /// The disk that the machine installs its system to, if it is to.
    pub install: Option<Install>,
    /// The volumes of further disks.
    pub volumes: Vec<DiskVolume>,
    /// The disk on which the one that the machine runs from is mirrored, if it is to be.
    pub mirror: Option<Selector>,
}

/// The cluster to found or to register with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Cluster {
    /// A new cluster.
    Bootstrap(Bootstrap),
    /// One that runs already.
    Register(Register),
}

/// How to found a cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bootstrap {
    /// Raw Ed25519 public key of the future owner, who may take ownership; a point of
    /// full order.
    pub owner_public_key: [u8; 32],
    /// The configuration of the whole cluster.
    pub configuration: ClusterConfiguration,
    /// Labels of this node.
    pub labels: BTreeMap<String, String>,
    /// A name of this node beside its ID.
    pub name: Option<NodeName>,
}

/// How to register with a running cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Register {
    /// The nodes to ask; never empty.
    pub directory: Vec<DirectoryNode>,
    /// The proof that an operator approved the registration.
    pub ticket: Ticket,
    /// DER of the only authority that this node trusts.
    pub ca_certificate: Vec<u8>,
    /// Labels of this node.
    pub labels: BTreeMap<String, String>,
    /// A name of this node beside its ID.
    pub name: Option<NodeName>,
}

impl Register {
    /// Where the cluster is reached, as it is kept.
    #[must_use]
    pub fn directory(&self) -> v1::ClusterDirectory {
        let nodes = self.directory.iter().map(|node| v1::cluster_directory::Node {
            id: node.id.to_string(),
            addresses: node.addresses.clone(),
        });
        v1::ClusterDirectory { nodes: nodes.collect() }
    }
}

/// A register ticket. `Debug` does not show it.
#[derive(Clone, PartialEq, Eq)]
pub struct Ticket(pub Zeroizing<Vec<u8>>);

impl fmt::Debug for Ticket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Ticket(…)")
    }
}

/// A node of the cluster and where it can be reached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DirectoryNode {
    /// The node that must answer there.
    pub id: NodeId,
    /// `host`, `host:port`, `ip`, `ip:port` or `[ip]:port`; never empty.
    pub addresses: Vec<String>,
}

/// The configuration of the whole cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClusterConfiguration {
    /// Lower-case RFC 1123 name, at most 80 characters.
    pub domain: String,
    /// Whether nodes use their TPM.
    pub tpm: TpmMode,
    /// The protection that a data partition must provide.
    pub storage: StoragePolicy,
    /// How a node unlocks its disk when it cannot reach the cluster.
    pub cold_start: ColdStart,
    /// The time servers of every node; none: the voters agree on a time of their own.
    pub time_servers: Vec<NtpServer>,
    /// The allowed callers of the nodes; `None` in a change: it stays as it is.
    pub firewall: Option<Firewall>,
    /// The networks of pods and Services.
    pub networks: Networks,
}

impl Default for ClusterConfiguration {
    fn default() -> Self {
        Self {
            domain: "cluster.internal".to_owned(),
            tpm: TpmMode::BestEffort,
            storage: StoragePolicy::Unspecified,
            cold_start: ColdStart::Automatic,
            time_servers: Vec::new(),
            firewall: None,
            networks: Networks::default(),
        }
    }
}

/// A time server of the cluster.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct NtpServer {
    /// An IP address or a DNS name.
    pub host: String,
    /// Whether only answers count that Network Time Security (RFC 8915) authenticates.
    pub nts: bool,
}

/// Whether nodes use their TPM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TpmMode {
    /// A node without a TPM is rejected.
    Required,
    /// Where the machine has a TPM. The default.
    BestEffort,
    /// Never, even where the machine has a TPM.
    Disabled,
}

/// How a node unlocks its disk when it cannot reach the cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ColdStart {
    /// By a share of its disk's key that the machine keeps itself.
    Automatic,
    /// By a curator or the recovery key only.
    Attended,
}

/// The protection that a data partition must provide.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoragePolicy {
    /// Not specified; `storage` decides and reports its decision.
    Unspecified,
    /// Anything.
    Permissive,
    /// Encryption.
    NeedsEncryption,
    /// Encryption, and integrity too.
    NeedsEncryptionAndAuthentication,
    /// Neither.
    NeedsInsecure,
}
