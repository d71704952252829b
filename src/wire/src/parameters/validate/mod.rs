//! Validation of encoded node parameters: bytes in, checked values out.
//!
//! Bounds on counts are far above any use and far below what could hurt: the
//! whole message has at most 64 KiB anyway.

mod network;

use std::collections::{BTreeMap, BTreeSet};

use ed25519_dalek::VerifyingKey;
use polis_proto::v1;
use prost::Message as _;
use zeroize::Zeroizing;

use super::error::Error;
use super::install::selector;
use super::text::{self, At as _, Refusal, located};
use super::{
    Bootstrap, Cidr, Cluster, ClusterConfiguration, ColdStart, DirectoryNode, DiskVolume, Firewall,
    Install, LogTarget, NtpServer, Parameters, Ports, Register, StoragePolicy, Ticket, TpmMode,
    attestation_policy, kubernetes_names, networks, proxy, snapshot_target, wire,
};
use crate::identity::{NodeId, NodeName};
use crate::registry::{self, Authority};

pub use self::network::{MTU, VLAN_IDS, network};

const LABELS_MAX: usize = 64;
const DIRECTORY_NODES_MAX: usize = 64;
/// Of one node of the directory.
const ADDRESSES_MAX: usize = 16;
const SERVERS_MAX: usize = 8;
const TERMINALS_MAX: usize = 8;
/// Targets of logs: each reads the ring of every node for itself.
const LOG_TARGETS_MAX: usize = 4;
/// Sources, or ports, of a firewall.
const FIREWALL_MAX: usize = 64;
const TICKET_MAX: usize = 1024;
const CERTIFICATE_MAX: usize = 16 * 1024;

/// Reads encoded node parameters.
///
/// # Errors
///
/// [`Error`], for the first thing that is not allowed.
pub fn parse(bytes: &[u8]) -> Result<Parameters, Error> {
    wire::check(bytes)?;
    let message = v1::NodeParameters::decode(bytes).map_err(Error::Malformed)?;
    let cluster = match message.cluster.clone().ok_or(Error::NothingChosen)? {
        v1::node_parameters::Cluster::ClusterBootstrap(message) => {
            Cluster::Bootstrap(bootstrap(message)?)
        }
        v1::node_parameters::Cluster::ClusterRegister(message) => {
            Cluster::Register(register(message)?)
        }
    };
    let network = network(message.network.clone().unwrap_or_default(), "network")?;
    if let Cluster::Bootstrap(bootstrap) = &cluster {
        networks::check(bootstrap.configuration.networks, &network)?;
    }
    let console_tui = message.console.clone().unwrap_or_default().tui;
    text::at_most(console_tui.len(), TERMINALS_MAX, "names").at("console.tui", 1)?;
    for (i, name) in console_tui.iter().enumerate() {
        text::terminal(name).at(format!("console.tui[{i}]"), 1)?;
    }
    let wipes = match &*message.wipes {
        "" => None,
        text => Some(node_id(text).at("wipes", 5)?),
    };
    let node = v1::NodeParameters { install: None, ..message.clone() };
    let install = message.install.map(|order| Install::read(&order, &node)).transpose()?;
    let volumes = DiskVolume::read_all(&message.volumes)?;
    let mirror = message.mirror.as_ref().map(|disk| selector(Some(disk), "mirror")).transpose()?;
    Ok(Parameters { cluster, network, console_tui, wipes, install, volumes, mirror })
}

/// Reads a raw Ed25519 public key; `path` is its position as errors report it.
///
/// # Errors
///
/// [`Error::Field`]: not a key, or one that anyone could sign for.
pub fn key(bytes: &[u8], path: &str, number: u16) -> Result<[u8; 32], Error> {
    public_key(bytes).at(path, number)
}

fn bootstrap(message: v1::ClusterBootstrap) -> Result<Bootstrap, Error> {
    let owner_public_key = public_key(&message.owner_public_key).map_err(|refusal| {
        Error::OwnerKey(located(refusal, "cluster_bootstrap.owner_public_key", 1))
    })?;
    let configuration = match message.cluster_configuration {
        Some(message) if message.firewall.is_some() => {
            let allowed = "nothing: `polisctl cluster configure` sets it in a running cluster, \
                           which returns to the former one when it locks its operator out";
            return Err(Refusal::described("a firewall", allowed))
                .at("cluster_bootstrap.cluster_configuration.firewall", 6);
        }
        Some(message) if message.log.is_some() => {
            let allowed = "nothing: `polisctl cluster configure --log-target` sets them in a \
                           running cluster";
            return Err(Refusal::described("targets of logs", allowed))
                .at("cluster_bootstrap.cluster_configuration.log", 12);
        }
        Some(message) if message.snapshots.is_some() => {
            let allowed = "nothing: `polisctl cluster configure --snapshot-target` sets it in a \
                           running cluster, with its credentials";
            return Err(Refusal::described("a target of snapshots", allowed))
                .at("cluster_bootstrap.cluster_configuration.snapshots", 16);
        }
        Some(message) if message.attestation.is_some() => {
            let allowed = "nothing: `polisctl cluster configure --attestation-image` sets it in a \
                           running cluster";
            return Err(Refusal::described("an attestation policy", allowed))
                .at("cluster_bootstrap.cluster_configuration.attestation", 20);
        }
        Some(message) if message.kubernetes.is_some() => {
            let allowed = "nothing: `polisctl cluster configure --kubernetes-name` sets them in a \
                           running cluster";
            return Err(Refusal::described("names of Kubernetes", allowed))
                .at("cluster_bootstrap.cluster_configuration.kubernetes", 24);
        }
        Some(message) if message.proxy.is_some() => {
            let allowed = "nothing: `polisctl cluster configure --proxy` sets it in a running \
                           cluster";
            return Err(Refusal::described("a proxy", allowed))
                .at("cluster_bootstrap.cluster_configuration.proxy", 26);
        }
        Some(message) => configuration(message, "cluster_bootstrap.cluster_configuration")?,
        None => ClusterConfiguration::default(),
    };
    let labels = labels(message.labels, "cluster_bootstrap.labels", 3)?;
    let name = name(&message.name, "cluster_bootstrap.name", 4)?;
    Ok(Bootstrap { owner_public_key, configuration, labels, name })
}

/// Reads a raw Ed25519 public key that only one private key belongs to.
fn public_key(bytes: &[u8]) -> Result<[u8; 32], Refusal> {
    let allowed = "a raw Ed25519 public key of 32 bytes";
    let key: [u8; 32] = bytes
        .try_into()
        .map_err(|_length| Refusal::described(format!("{} bytes", bytes.len()), allowed))?;
    let point = VerifyingKey::from_bytes(&key).map_err(|_error| {
        Refusal::described("32 bytes that are not a point of the curve", allowed)
    })?;
    if point.is_weak() {
        // Anyone could sign for a point of small order.
        return Err(Refusal::described("a weak point of small order", allowed));
    }
    Ok(key)
}

/// Reads the configuration of a cluster; `path` is its position as errors report it.
///
/// # Errors
///
/// [`Error::Field`].
pub fn configuration(
    message: v1::ClusterConfiguration,
    path: &str,
) -> Result<ClusterConfiguration, Error> {
    let unknown =
        |value: i32, max: i32| Refusal::described(value, format!("a number from 0 to {max}"));
    let mut configuration = ClusterConfiguration::default();
    if !message.cluster_domain.is_empty() {
        text::cluster_domain(&message.cluster_domain).at(format!("{path}.cluster_domain"), 1)?;
        configuration.domain = message.cluster_domain;
    }
    {
        use v1::cluster_configuration::TpmMode as Message;
        configuration.tpm = match Message::try_from(message.tpm_mode) {
            Ok(Message::Unspecified | Message::BestEffort) => TpmMode::BestEffort,
            Ok(Message::Required) => TpmMode::Required,
            Ok(Message::Disabled) => TpmMode::Disabled,
            Err(_) => return Err(unknown(message.tpm_mode, 3)).at(format!("{path}.tpm_mode"), 2),
        };
    }
    {
        use v1::cluster_configuration::StorageSecurityPolicy as Message;
        configuration.storage = match Message::try_from(message.storage_security_policy) {
            Ok(Message::Unspecified) => StoragePolicy::Unspecified,
            Ok(Message::Permissive) => StoragePolicy::Permissive,
            Ok(Message::NeedsEncryption) => StoragePolicy::NeedsEncryption,
            Ok(Message::NeedsEncryptionAndAuthentication) => {
                StoragePolicy::NeedsEncryptionAndAuthentication
            }
            Ok(Message::NeedsInsecure) => StoragePolicy::NeedsInsecure,
            Err(_) => {
                return Err(unknown(message.storage_security_policy, 4))
                    .at(format!("{path}.storage_security_policy"), 3);
            }
        };
    }
    {
        use v1::cluster_configuration::ColdStart as Message;
        configuration.cold_start = match Message::try_from(message.cold_start) {
            Ok(Message::Unspecified | Message::Automatic) => ColdStart::Automatic,
            Ok(Message::Attended) => ColdStart::Attended,
            Err(_) => {
                return Err(unknown(message.cold_start, 2)).at(format!("{path}.cold_start"), 4);
            }
        };
    }
    if let Some(message) = message.time {
        configuration.time_servers = time_servers(message, &format!("{path}.time"))?;
    }
    if message.firewall_trial.is_some() {
        let allowed = "nothing: the cluster itself says which firewall it tries";
        return Err(Refusal::described("a trial", allowed)).at(format!("{path}.firewall_trial"), 7);
    }
    if let Some(message) = message.log {
        // Nodes receive them by their watch.
        log_targets(message, &format!("{path}.log"))?;
    }
    if let Some(message) = message.snapshots {
        // The leader reads it from its store.
        snapshot_target(&message, &format!("{path}.snapshots"))?;
    }
    if let Some(message) = message.attestation {
        // The leader compares machines with it.
        attestation_policy(&message, &format!("{path}.attestation"))?;
    }
    if let Some(message) = message.kubernetes {
        // Controllers read them from etcd.
        kubernetes_names(&message, &format!("{path}.kubernetes"))?;
    }
    if let Some(message) = message.proxy {
        // Nodes receive it by their watch.
        proxy(&message, &format!("{path}.proxy"))?;
    }
    configuration.networks = networks(&message.pod_network, &message.service_network, path)?;
    configuration.firewall = message
        .firewall
        .map(|message| firewall(message, &format!("{path}.firewall")))
        .transpose()?;
    Ok(configuration)
}

/// Reads the firewall of a cluster; `path` is its position as errors report it.
///
/// # Errors
///
/// [`Error::Field`].
pub fn firewall(message: v1::FirewallConfiguration, path: &str) -> Result<Firewall, Error> {
    text::at_most(message.sources.len(), FIREWALL_MAX, "sources")
        .at(format!("{path}.sources"), 1)?;
    text::at_most(message.ports.len(), FIREWALL_MAX, "ports").at(format!("{path}.ports"), 2)?;
    let mut firewall = Firewall::default();
    for (i, text) in message.sources.iter().enumerate() {
        let source = source(text, &firewall.sources).at(format!("{path}.sources[{i}]"), 1)?;
        firewall.sources.push(source);
    }
    for (i, text) in message.ports.iter().enumerate() {
        let ports = open_ports(text, &firewall.ports).at(format!("{path}.ports[{i}]"), 2)?;
        firewall.ports.push(ports);
    }
    Ok(firewall)
}

/// Reads the network of callers, or the address of one.
fn source(text: &str, known: &[Cidr]) -> Result<Cidr, Refusal> {
    let address = text.parse::<std::net::IpAddr>().ok();
    let whole = address.and_then(|it| Cidr::new(it, if it.is_ipv4() { 32 } else { 128 }));
    let read = whole.or_else(|| text.parse().ok());
    let usable = |cidr: &Cidr| {
        *cidr == cidr.network() && !cidr.address().is_multicast() && !cidr.address().is_loopback()
    };
    let cidr = read.filter(usable).ok_or_else(|| {
        Refusal::of(text, "an address, or a network without host bits, such as 192.0.2.0/24")
    })?;
    if known.contains(&cidr) {
        return Err(Refusal::of(text, "each source once"));
    }
    Ok(cidr)
}

/// Reads ports that no rule of the node itself is about.
fn open_ports(text: &str, known: &[Ports]) -> Result<Ports, Refusal> {
    let ports: Ports = text
        .parse()
        .map_err(|_invalid| Refusal::of(text, "a port as tcp/443, or ports as udp/5000-5100"))?;
    if ports.is_of_node() {
        let allowed = "ports on which the node itself does not listen: those follow from its roles \
                       and the sources";
        return Err(Refusal::of(text, allowed));
    }
    if known.contains(&ports) {
        return Err(Refusal::of(text, "each port once"));
    }
    Ok(ports)
}

/// Reads the time servers of a cluster; `path` is their position as errors report it.
///
/// # Errors
///
/// [`Error::Field`].
pub fn time_servers(message: v1::TimeConfiguration, path: &str) -> Result<Vec<NtpServer>, Error> {
    text::at_most(message.servers.len(), SERVERS_MAX, "servers")
        .at(format!("{path}.servers"), 1)?;
    let mut servers = Vec::<NtpServer>::new();
    for (i, v1::NtpServer { host, nts }) in message.servers.into_iter().enumerate() {
        let path = format!("{path}.servers[{i}].host");
        text::host(&host).at(&*path, 1)?;
        if servers.iter().any(|server| server.host == host) {
            return Err(Refusal::of(&host, "each host once")).at(path, 1);
        }
        servers.push(NtpServer { host, nts });
    }
    Ok(servers)
}

/// Reads the targets of logs; `path` is their position as errors report it.
///
/// # Errors
///
/// [`Error::Field`].
pub fn log_targets(message: v1::LogConfiguration, path: &str) -> Result<Vec<LogTarget>, Error> {
    text::at_most(message.targets.len(), LOG_TARGETS_MAX, "targets")
        .at(format!("{path}.targets"), 1)?;
    let mut targets = Vec::<LogTarget>::new();
    for (i, v1::LogTarget { url, ca }) in message.targets.into_iter().enumerate() {
        let path = format!("{path}.targets[{i}]");
        let mut target = LogTarget::read(&url).at(format!("{path}.url"), 1)?;
        if targets.iter().any(|known| known.url() == target.url()) {
            return Err(Refusal::of(&url, "each target once")).at(format!("{path}.url"), 1);
        }
        target.authorities = authorities(&ca).at(format!("{path}.ca"), 2)?;
        targets.push(target);
    }
    Ok(targets)
}

/// Reads certificates in PEM.
fn authorities(pem: &str) -> Result<Vec<Authority>, Refusal> {
    let allowed = "the certificates of authorities in PEM, or nothing for the public ones";
    registry::authorities(pem).map_err(|invalid| Refusal::described(invalid, allowed))
}

/// Reads the labels of a node; `path` is their position as errors report it.
///
/// # Errors
///
/// [`Error::Field`].
pub fn labels(
    labels: BTreeMap<String, String>,
    path: &str,
    number: u16,
) -> Result<BTreeMap<String, String>, Error> {
    text::at_most(labels.len(), LABELS_MAX, "labels").at(path, number)?;
    for (key, value) in &labels {
        text::label_key(key).at(path, number)?;
        text::label_value(value).at(format!("{path}[{}]", text::quoted(key)), number)?;
    }
    Ok(labels)
}

fn register(message: v1::ClusterRegister) -> Result<Register, Error> {
    let directory = directory(message.cluster_directory.unwrap_or_default())?;
    let ticket = message.register_ticket;
    if ticket.is_empty() || ticket.len() > TICKET_MAX {
        let refusal = Refusal::described(
            if ticket.is_empty() { "empty".to_owned() } else { format!("{} bytes", ticket.len()) },
            format!("a ticket of 1 to {TICKET_MAX} bytes"),
        );
        return Err(Error::Ticket(located(refusal, "cluster_register.register_ticket", 2)));
    }
    text::authority(&message.ca_certificate, CERTIFICATE_MAX).map_err(|refusal| {
        Error::CaCertificate(located(refusal, "cluster_register.ca_certificate", 3))
    })?;
    let labels = labels(message.labels, "cluster_register.labels", 4)?;
    Ok(Register {
        directory,
        ticket: Ticket(Zeroizing::new(ticket)),
        ca_certificate: message.ca_certificate,
        labels,
        name: name(&message.name, "cluster_register.name", 5)?,
    })
}

/// The name of a node; none where it is empty.
fn name(text: &str, path: &str, number: u16) -> Result<Option<NodeName>, Error> {
    if text.is_empty() {
        return Ok(None);
    }
    let allowed =
        "1 to 63 of a-z, 0-9 and dash, from a letter to a letter or digit, not like an ID";
    text.parse().map(Some).map_err(|_invalid| Refusal::of(text, allowed)).at(path, number)
}

fn directory(message: v1::ClusterDirectory) -> Result<Vec<DirectoryNode>, Error> {
    const PATH: &str = "cluster_register.cluster_directory.nodes";
    if message.nodes.is_empty() {
        return Err(Refusal::described("empty", "at least one node")).at(PATH, 1);
    }
    text::at_most(message.nodes.len(), DIRECTORY_NODES_MAX, "nodes").at(PATH, 1)?;
    let mut seen = BTreeSet::new();
    let mut nodes = Vec::with_capacity(message.nodes.len());
    for (i, node) in message.nodes.into_iter().enumerate() {
        let id = node_id(&node.id).at(format!("{PATH}[{i}].id"), 1)?;
        if !seen.insert(id) {
            return Err(Refusal::of(&node.id, "each node once")).at(format!("{PATH}[{i}].id"), 1);
        }
        let path = format!("{PATH}[{i}].addresses");
        if node.addresses.is_empty() {
            return Err(Refusal::described("empty", "at least one address")).at(path, 2);
        }
        text::at_most(node.addresses.len(), ADDRESSES_MAX, "addresses").at(path.as_str(), 2)?;
        for (j, address) in node.addresses.iter().enumerate() {
            text::endpoint(address).at(format!("{path}[{j}]"), 2)?;
        }
        nodes.push(DirectoryNode { id, addresses: node.addresses });
    }
    Ok(nodes)
}

fn node_id(text: &str) -> Result<NodeId, Refusal> {
    text.parse()
        .map_err(|_invalid| Refusal::of(text, "\"polis-\" and 32 lower-case hexadecimal digits"))
}

#[cfg(test)]
mod fuzz_tests;
#[cfg(test)]
mod network_tests;
#[cfg(test)]
mod tests;
