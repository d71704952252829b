//! The view of node parameters.

use std::collections::BTreeMap;

use polis_proto::v1;
use serde::Serialize;

use super::format::{Decoded, Format};
use super::network;
use crate::error::Error;
use crate::output::{Document, fields, or_dash};
use crate::text::clean;
use polis_base::hex;
use polis_wire::identity::Fingerprint;
use polis_wire::node_labels::is_reserved;
use polis_wire::parameters::{
    Cluster, ClusterConfiguration, ColdStart, Parameters, StoragePolicy, TpmMode,
};

#[derive(Debug, Serialize)]
struct View {
    /// The format of the file, if the parameters come from one.
    #[serde(skip_serializing_if = "Option::is_none")]
    format: Option<Format>,
    #[serde(skip_serializing_if = "Option::is_none")]
    cluster_bootstrap: Option<Bootstrap>,
    #[serde(skip_serializing_if = "Option::is_none")]
    cluster_register: Option<Register>,
    network: network::View,
    console_tui: Vec<String>,
    /// The node whose data partition is wiped first.
    #[serde(skip_serializing_if = "Option::is_none")]
    wipes: Option<String>,
    /// The disk that the machine installs to first.
    #[serde(skip_serializing_if = "Option::is_none")]
    install: Option<InstallView>,
    /// The volumes of further disks, by name, and the disk of each.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    volumes: BTreeMap<String, String>,
    /// The disk on which the one that the machine runs from is mirrored.
    #[serde(skip_serializing_if = "Option::is_none")]
    mirror: Option<String>,
}

#[derive(Debug, Serialize)]
struct InstallView {
    disk: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    wipe: Option<&'static str>,
    id: String,
}

#[derive(Debug, Serialize)]
struct Bootstrap {
    owner_public_key: String,
    cluster_configuration: Configuration,
    labels: BTreeMap<String, String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
}

/// The configuration of a cluster, as programs read it.
#[derive(Debug, Serialize)]
pub(crate) struct Configuration {
    pub(crate) cluster_domain: String,
    pub(crate) tpm_mode: &'static str,
    pub(crate) storage_security_policy: &'static str,
    pub(crate) cold_start: &'static str,
    pub(crate) time_servers: Vec<String>,
    pub(crate) pod_network: String,
    pub(crate) service_network: String,
}

#[derive(Debug, Serialize)]
struct Register {
    nodes: Vec<Node>,
    register_ticket_bytes: usize,
    ca_fingerprint: String,
    ca_words: String,
    labels: BTreeMap<String, String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
}

#[derive(Debug, Serialize)]
struct Node {
    id: String,
    addresses: Vec<String>,
}

/// All parameters; of the ticket, which is a secret, only its length.
pub(super) fn document(parameters: &Parameters) -> Result<Document, Error> {
    let view = view(parameters);
    Document::new(&view, text(&view, None))
}

/// The same, and the format of the file that they come from.
pub(super) fn of_file(parameters: &Parameters, decoded: &Decoded) -> Result<Document, Error> {
    let view = View { format: Some(decoded.format), ..view(parameters) };
    Document::new(&view, text(&view, Some(decoded.described())))
}

fn view(parameters: &Parameters) -> View {
    let (mut cluster_bootstrap, mut cluster_register) = (None, None);
    match &parameters.cluster {
        Cluster::Bootstrap(bootstrap) => {
            cluster_bootstrap = Some(Bootstrap {
                owner_public_key: hex::encode(&bootstrap.owner_public_key),
                cluster_configuration: configuration(&bootstrap.configuration),
                labels: bootstrap.labels.clone(),
                name: bootstrap.name.as_ref().map(ToString::to_string),
            });
        }
        Cluster::Register(register) => {
            let ca = Fingerprint::of_certificate(&register.ca_certificate);
            let nodes = register
                .directory
                .iter()
                .map(|node| Node { id: node.id.to_string(), addresses: node.addresses.clone() });
            cluster_register = Some(Register {
                nodes: nodes.collect(),
                register_ticket_bytes: register.ticket.0.len(),
                ca_fingerprint: ca.to_string(),
                ca_words: ca.words(),
                labels: register.labels.clone(),
                name: register.name.as_ref().map(ToString::to_string),
            });
        }
    }
    View {
        format: None,
        cluster_bootstrap,
        cluster_register,
        network: network::View::of(&parameters.network),
        console_tui: parameters.console_tui.clone(),
        wipes: parameters.wipes.map(|id| id.to_string()),
        volumes: parameters
            .volumes
            .iter()
            .map(|volume| (volume.name.to_string(), volume.disk.to_string()))
            .collect(),
        mirror: parameters.mirror.as_ref().map(ToString::to_string),
        install: parameters.install.as_ref().map(|install| InstallView {
            disk: install.disk.to_string(),
            wipe: install.wipe.name(),
            id: hex::encode(&install.id),
        }),
    }
}

/// The words for a configuration.
pub(crate) fn configuration(configuration: &ClusterConfiguration) -> Configuration {
    Configuration {
        cluster_domain: configuration.domain.clone(),
        tpm_mode: match configuration.tpm {
            TpmMode::Required => "required",
            TpmMode::BestEffort => "best-effort",
            TpmMode::Disabled => "disabled",
        },
        storage_security_policy: match configuration.storage {
            StoragePolicy::Unspecified => "unspecified",
            StoragePolicy::Permissive => "permissive",
            StoragePolicy::NeedsEncryption => "encrypted",
            StoragePolicy::NeedsEncryptionAndAuthentication => "authenticated",
            StoragePolicy::NeedsInsecure => "insecure",
        },
        cold_start: match configuration.cold_start {
            ColdStart::Automatic => "automatic",
            ColdStart::Attended => "attended",
        },
        time_servers: configuration
            .time_servers
            .iter()
            .map(|server| time_server(&server.host, server.nts))
            .collect(),
        pod_network: configuration.networks.pods.to_string(),
        service_network: configuration.networks.services.to_string(),
    }
}

/// A time server, in the words of `--time-server`.
pub(crate) fn time_server(host: &str, nts: bool) -> String {
    format!("{host}{}", if nts { ",nts" } else { "" })
}

/// Time servers, for people.
pub(crate) fn time_servers(servers: &[String]) -> String {
    if servers.is_empty() {
        return "none: the voters agree on a time of their own".to_owned();
    }
    servers.join("\n")
}

/// A storage policy, in the word of `--storage`.
pub(crate) fn policy(policy: v1::cluster_configuration::StorageSecurityPolicy) -> &'static str {
    use v1::cluster_configuration::StorageSecurityPolicy as Policy;
    match policy {
        Policy::Unspecified => "unspecified",
        Policy::Permissive => "permissive",
        Policy::NeedsEncryption => "encrypted",
        Policy::NeedsEncryptionAndAuthentication => "authenticated",
        Policy::NeedsInsecure => "insecure",
    }
}

/// A setting, for people: an unspecified one has this default.
pub(crate) fn or_default(word: &str, default: &str) -> String {
    match word {
        "unspecified" => format!("{default}, by default"),
        word => word.to_owned(),
    }
}

/// A storage policy, for people; unspecified means the strictest.
pub(crate) fn storage(policy: &str) -> String {
    or_default(policy, "authenticated")
}

impl Configuration {
    /// Its lines in a list of fields.
    pub(crate) fn fields(&self) -> [(&'static str, String); 7] {
        [
            ("domain", self.cluster_domain.clone()),
            ("TPM", self.tpm_mode.to_owned()),
            ("storage", storage(self.storage_security_policy)),
            ("cold start", self.cold_start.to_owned()),
            ("time", time_servers(&self.time_servers)),
            ("pods", self.pod_network.clone()),
            ("Services", self.service_network.clone()),
        ]
    }
}

fn text(view: &View, format: Option<String>) -> String {
    let mut lines: Vec<_> = format.map(|format| ("format", format)).into_iter().collect();
    if let Some(node) = &view.wipes {
        lines.push(("wipes", format!("the data partition of {node}, before all else")));
    }
    for (name, disk) in &view.volumes {
        lines.push(("volume", format!("{name}, on the disk with {disk}")));
    }
    if let Some(disk) = &view.mirror {
        lines.push(("mirror", format!("on the disk with {disk}")));
    }
    if let Some(InstallView { disk, wipe, id }) = &view.install {
        let over = match wipe {
            None => "if it is empty",
            Some("member") => "over the data of a node",
            Some(_) => "over any data but a node's",
        };
        lines.push(("installs", format!("to the disk with {disk}, {over}, once\nas {id}")));
    }
    if let Some(bootstrap) = &view.cluster_bootstrap {
        lines.push(("does", "bootstrap a new cluster".to_owned()));
        lines.push(("owner key", bootstrap.owner_public_key.clone()));
        lines.extend(bootstrap.cluster_configuration.fields());
        lines.push(("labels", labels(&bootstrap.labels)));
        lines.extend(bootstrap.name.clone().map(|name| ("name", name)));
    }
    if let Some(register) = &view.cluster_register {
        lines.push(("does", "register with a running cluster".to_owned()));
        let nodes = register.nodes.iter();
        let nodes = nodes.map(|node| format!("{} at {}", node.id, node.addresses.join(", ")));
        lines.push(("nodes", nodes.collect::<Vec<_>>().join("\n")));
        lines.push(("CA", format!("{}\n{}", register.ca_words, register.ca_fingerprint)));
        lines.push(("ticket", format!("{} bytes", register.register_ticket_bytes)));
        lines.push(("labels", labels(&register.labels)));
        lines.extend(register.name.clone().map(|name| ("name", name)));
    }
    lines.extend(view.network.fields());
    let mut terminals = vec!["tty1".to_owned()];
    terminals.extend(view.console_tui.iter().cloned());
    lines.push(("console", terminals.join(", ")));
    fields(&lines)
}

/// `a=1, b=2`, or a dash. Those that a Node object never gets say so.
pub(crate) fn labels(labels: &BTreeMap<String, String>) -> String {
    let label = |(key, value): (&String, &String)| {
        let reserved = if is_reserved(key) { " (reserved, not in Kubernetes)" } else { "" };
        clean(&format!("{key}={value}{reserved}"))
    };
    let labels: Vec<String> = labels.iter().map(label).collect();
    or_dash(&labels.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_label_that_a_node_object_never_gets_says_so() {
        let shown = |key: &str| labels(&BTreeMap::from([(key.to_owned(), "x".to_owned())]));
        assert_eq!(shown("topology.kubernetes.io/zone"), "topology.kubernetes.io/zone=x");
        assert_eq!(shown("kubernetes.io/os"), "kubernetes.io/os=x (reserved, not in Kubernetes)");
    }
}
