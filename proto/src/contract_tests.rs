//! The part of the messages that tools outside of the project write and read: its names, numbers
//! and types stay as they are. More may be beside it.

use std::collections::BTreeSet;

use prost::Message as _;
use prost_types::field_descriptor_proto::{Label, Type};
use prost_types::{DescriptorProto, EnumDescriptorProto, FileDescriptorSet};

/// A line for each field: message, name, number, `oneof`, type; and for each value of an
/// enumeration.
const PROMISED: &str = "
NodeParameters.cluster_bootstrap 1 cluster ClusterBootstrap
NodeParameters.cluster_register 2 cluster ClusterRegister
NodeParameters.network 3 - NetworkConfiguration
NodeParameters.console 4 - ConsoleConfiguration
ClusterBootstrap.owner_public_key 1 - bytes
ClusterBootstrap.cluster_configuration 2 - ClusterConfiguration
ClusterBootstrap.labels 3 - repeated ClusterBootstrap.LabelsEntry
ClusterBootstrap.LabelsEntry.key 1 - string
ClusterBootstrap.LabelsEntry.value 2 - string
ClusterRegister.cluster_directory 1 - ClusterDirectory
ClusterRegister.register_ticket 2 - bytes
ClusterRegister.ca_certificate 3 - bytes
ClusterRegister.labels 4 - repeated ClusterRegister.LabelsEntry
ClusterRegister.LabelsEntry.key 1 - string
ClusterRegister.LabelsEntry.value 2 - string
ClusterDirectory.nodes 1 - repeated ClusterDirectory.Node
ClusterDirectory.Node.id 1 - string
ClusterDirectory.Node.addresses 2 - repeated string
ClusterConfiguration.cluster_domain 1 - string
ClusterConfiguration.tpm_mode 2 - ClusterConfiguration.TpmMode
ClusterConfiguration.TpmMode.TPM_MODE_UNSPECIFIED 0
ClusterConfiguration.TpmMode.TPM_MODE_REQUIRED 1
ClusterConfiguration.TpmMode.TPM_MODE_BEST_EFFORT 2
ClusterConfiguration.TpmMode.TPM_MODE_DISABLED 3
ClusterConfiguration.storage_security_policy 3 - ClusterConfiguration.StorageSecurityPolicy
ClusterConfiguration.StorageSecurityPolicy.STORAGE_SECURITY_POLICY_UNSPECIFIED 0
ClusterConfiguration.StorageSecurityPolicy.STORAGE_SECURITY_POLICY_PERMISSIVE 1
ClusterConfiguration.StorageSecurityPolicy.STORAGE_SECURITY_POLICY_NEEDS_ENCRYPTION 2
ClusterConfiguration.StorageSecurityPolicy.\
STORAGE_SECURITY_POLICY_NEEDS_ENCRYPTION_AND_AUTHENTICATION 3
ClusterConfiguration.StorageSecurityPolicy.STORAGE_SECURITY_POLICY_NEEDS_INSECURE 4
NetworkConfiguration.interfaces 1 - repeated NetworkConfiguration.Interface
NetworkConfiguration.nameservers 2 - repeated string
NetworkConfiguration.ntp_servers 3 - repeated string
NetworkConfiguration.Interface.match 1 - string
NetworkConfiguration.Interface.dhcp 2 - bool
NetworkConfiguration.Interface.addresses 3 - repeated string
NetworkConfiguration.Interface.routes 4 - repeated NetworkConfiguration.Route
NetworkConfiguration.Interface.mtu 5 - uint32
NetworkConfiguration.Route.destination 1 - string
NetworkConfiguration.Route.gateway 2 - string
NetworkConfiguration.Route.metric 3 - uint32
ConsoleConfiguration.tui 1 - repeated string
";

/// The calls that outsiders know, by service.
const CALLS: [(&str, &str); 5] = [
    ("Aaa", "Escrow"),
    (
        "Management",
        "GetRegisterTicket GetClusterInfo GetNodes ApproveNode UpdateNodeRoles UpdateNodeLabels \
         DecommissionNode DeleteNode ConfigureCluster",
    ),
    (
        "Curator",
        "Watch UpdateNodeStatus Heartbeat RegisterNode CommitNode JoinNode IssueCertificate \
         GetConsensusStatus",
    ),
    ("CuratorLocal", "GetCurrentLeader GetCaCertificate"),
    ("NodeManagement", "Logs Services Reboot Console"),
];

/// The files of Polis, without what they import.
fn files() -> impl Iterator<Item = prost_types::FileDescriptorProto> {
    let all = FileDescriptorSet::decode(crate::DESCRIPTORS).unwrap();
    all.file.into_iter().filter(|file| file.package() == "polis.v1")
}

/// The lines of a message and of all inside it.
fn message(path: &str, message: &DescriptorProto, lines: &mut BTreeSet<String>) {
    for field in &message.field {
        let oneof = field.oneof_index.and_then(|at| usize::try_from(at).ok());
        let oneof = oneof.map_or("-", |at| message.oneof_decl[at].name());
        let repeated = if field.label() == Label::Repeated { "repeated " } else { "" };
        let kind = match field.r#type() {
            Type::Message | Type::Enum => {
                field.type_name().trim_start_matches(".polis.v1.").to_owned()
            }
            plain => plain.as_str_name().trim_start_matches("TYPE_").to_lowercase(),
        };
        let (name, number) = (field.name(), field.number());
        lines.insert(format!("{path}.{name} {number} {oneof} {repeated}{kind}"));
    }
    for inner in &message.nested_type {
        self::message(&format!("{path}.{}", inner.name()), inner, lines);
    }
    for inner in &message.enum_type {
        enumeration(&format!("{path}.{}", inner.name()), inner, lines);
    }
}

/// The lines of the values of an enumeration.
fn enumeration(path: &str, of: &EnumDescriptorProto, lines: &mut BTreeSet<String>) {
    let line = |(name, number): (&str, i32)| format!("{path}.{name} {number}");
    lines.extend(of.value.iter().map(|value| line((value.name(), value.number()))));
}

#[test]
fn node_parameters_have_the_names_numbers_and_types_that_outsiders_write() {
    let mut lines = BTreeSet::new();
    for top in files().flat_map(|file| file.message_type) {
        message(top.name(), &top, &mut lines);
    }
    let promised: Vec<_> = PROMISED.lines().filter(|line| !line.is_empty()).collect();
    assert_eq!(promised.len(), 42);
    for line in promised {
        let (name, _) = line.split_once(' ').unwrap();
        let is = lines.iter().find(|line| line.split(' ').next() == Some(name));
        assert_eq!(is.map(String::as_str), Some(line));
    }
}

#[test]
fn every_promised_call_is_there() {
    let services: Vec<_> = files().flat_map(|file| file.service).collect();
    for (service, calls) in CALLS {
        let of = services.iter().find(|other| other.name() == service);
        let of = of.unwrap_or_else(|| panic!("no service {service}"));
        for call in calls.split(' ') {
            assert!(of.method.iter().any(|method| method.name() == call), "{service}/{call}");
        }
    }
}
