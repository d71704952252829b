//! `polisctl cluster info`: what a client or a new node needs to know of the cluster.

use polis_proto::v1;
use serde::Serialize;

use super::{attestation, kubernetes_names, logs, proxy, snapshots};
use crate::error::Error;
use crate::output::{Document, fields, or_dash};
use crate::parameters;
use crate::text::word;
use polis_wire::identity::Fingerprint;
use polis_wire::pod_network::Networks;

/// The domain of the cluster.
pub(crate) fn domain(info: &v1::GetClusterInfoResponse) -> String {
    let named = info.configuration.as_ref().map(|named| named.cluster_domain.as_str());
    match named.unwrap_or_default() {
        "" => polis_wire::parameters::ClusterConfiguration::default().domain,
        domain => domain.to_owned(),
    }
}

#[derive(Debug, Serialize)]
pub(super) struct Info {
    cluster_domain: String,
    leader: String,
    ca_fingerprint: String,
    ca_words: String,
    nodes: Counts,
    tpm_mode: String,
    storage_security_policy: String,
    cold_start: String,
    time_servers: Vec<String>,
    /// Fixed when the cluster was founded.
    pod_network: String,
    service_network: String,
    /// Where every node sends its log.
    log_targets: Vec<String>,
    /// Under which names clients reach Kubernetes.
    kubernetes_names: Vec<String>,
    /// The HTTP proxy to servers outside of the cluster; empty: none.
    proxy: String,
    /// What is reached without it, beside the cluster itself.
    no_proxy: Vec<String>,
    /// Where the leader sends snapshots of etcd; empty: nowhere.
    snapshot_target: String,
    /// The proofs that the TPM of a machine has to give; `null`: nothing.
    attestation_policy: Option<attestation::View>,
    /// Callers that are not nodes; empty: any address.
    firewall_sources: Vec<String>,
    firewall_ports: Vec<String>,
    /// Whether another firewall is tried now.
    firewall_trial: bool,
    directory: Vec<Entry>,
}

#[derive(Debug, Serialize)]
struct Counts {
    new: u32,
    standby: u32,
    up: u32,
    decommissioned: u32,
}

#[derive(Debug, Serialize)]
struct Entry {
    id: String,
    addresses: Vec<String>,
}

impl Info {
    pub(super) fn document(info: &v1::GetClusterInfoResponse) -> Result<Document, Error> {
        let view = Self::of(info);
        let Counts { new, standby, up, decommissioned } = view.nodes;
        let nodes =
            format!("{up} up, {standby} standby, {new} new, {decommissioned} decommissioned");
        let directory = view.directory.iter();
        let directory =
            directory.map(|entry| format!("{} at {}", entry.id, entry.addresses.join(", ")));
        let policy = view.attestation_policy.as_ref().map(attestation::View::text);
        let lines = [
            ("domain", or_dash(&view.cluster_domain)),
            ("leader", or_dash(&view.leader)),
            ("nodes", nodes),
            ("CA", format!("{}\n{}", view.ca_words, view.ca_fingerprint)),
            ("storage", parameters::show::storage(&view.storage_security_policy)),
            ("TPM", parameters::show::or_default(&view.tpm_mode, "best-effort")),
            ("cold start", parameters::show::or_default(&view.cold_start, "automatic")),
            ("time", parameters::show::time_servers(&view.time_servers)),
            ("pods", view.pod_network.clone()),
            ("Services", view.service_network.clone()),
            ("logs go to", or_dash(&view.log_targets.join("\n"))),
            ("snapshots", or_dash(&view.snapshot_target)),
            ("Kubernetes", or_dash(&view.kubernetes_names.join("\n"))),
            ("proxy", view.proxy()),
            ("TPM policy", or_dash(&policy.unwrap_or_default())),
            ("firewall", view.firewall()),
            ("directory", or_dash(&directory.collect::<Vec<_>>().join("\n"))),
        ];
        Document::new(&view, fields(&lines))
    }

    pub(super) fn of(info: &v1::GetClusterInfoResponse) -> Self {
        let configuration = info.configuration.clone().unwrap_or_default();
        let servers = configuration.time.iter().flat_map(|time| &time.servers);
        let time_servers =
            servers.map(|server| parameters::show::time_server(&server.host, server.nts)).collect();
        let firewall = configuration.firewall.clone().unwrap_or_default();
        let (proxy, no_proxy) = proxy::shown(&configuration);
        let networks = Networks::default().to_message();
        let or = |named: &str, default: &str| match named {
            "" => default.to_owned(),
            named => named.to_owned(),
        };
        let ca = Fingerprint::of_certificate(&info.ca_certificate);
        let directory = info.cluster_directory.clone().unwrap_or_default().nodes.into_iter();
        Self {
            leader: info.leader.clone(),
            ca_fingerprint: ca.to_string(),
            ca_words: ca.words(),
            nodes: Counts {
                new: info.nodes_new,
                standby: info.nodes_standby,
                up: info.nodes_up,
                decommissioned: info.nodes_decommissioned,
            },
            tpm_mode: word(configuration.tpm_mode().as_str_name(), "TPM_MODE_").replace('_', "-"),
            storage_security_policy: parameters::show::policy(
                configuration.storage_security_policy(),
            )
            .to_owned(),
            cold_start: word(configuration.cold_start().as_str_name(), "COLD_START_"),
            time_servers,
            pod_network: or(&configuration.pod_network, &networks.pod_network),
            service_network: or(&configuration.service_network, &networks.service_network),
            log_targets: logs::shown(&configuration),
            kubernetes_names: kubernetes_names::shown(&configuration),
            proxy,
            no_proxy,
            snapshot_target: snapshots::shown(&configuration),
            attestation_policy: attestation::View::of(&configuration),
            firewall_sources: firewall.sources,
            firewall_ports: firewall.ports,
            firewall_trial: configuration.firewall_trial.is_some(),
            cluster_domain: domain(info),
            directory: directory
                .map(|node| Entry { id: node.id, addresses: node.addresses })
                .collect(),
        }
    }

    /// The way to servers outside of the cluster.
    fn proxy(&self) -> String {
        match (&*self.proxy, &self.no_proxy[..]) {
            ("", _) => "-".to_owned(),
            (proxy, []) => proxy.to_owned(),
            (proxy, direct) => format!("{proxy}, but not for {}", direct.join(", ")),
        }
    }

    /// The allowed callers of the nodes, beside the nodes themselves.
    fn firewall(&self) -> String {
        let sources = match &self.firewall_sources[..] {
            [] => "callers have any address".to_owned(),
            sources => format!("callers are in {}", sources.join(", ")),
        };
        let ports = match &self.firewall_ports[..] {
            [] => String::new(),
            ports => format!("; open to all: {}", ports.join(", ")),
        };
        let trial = if self.firewall_trial { "; another one is tried now" } else { "" };
        format!("{sources}{ports}{trial}")
    }
}
