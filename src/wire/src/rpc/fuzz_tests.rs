//! Fuzz target of the messages of all RPCs, requests and answers: decoding and encoding.

use std::collections::BTreeMap;

use polis_fuzz::{Accepted, Target};
use polis_proto::v1;
use prost::Message;
use prost_reflect::{DescriptorPool, DynamicMessage, Kind, MapKey, MessageDescriptor, Value};

/// Decodes a message and encodes it again.
type Decode = fn(&[u8]) -> Option<Vec<u8>>;

fn decode<M: Message + Default>(bytes: &[u8]) -> Option<Vec<u8>> {
    M::decode(bytes).ok().map(|message| message.encode_to_vec())
}

macro_rules! messages {
    ($($name:ident)*) => { [$((stringify!($name), decode::<v1::$name> as Decode)),*] };
}

/// Each message that an RPC takes or returns.
const MESSAGES: [(&str, Decode); COUNT] = messages! {
    AnnounceFirmwareUpdateRequest AnnounceFirmwareUpdateResponse ApproveNodeRequest
    ApproveNodeResponse AttestRequest AttestResponse BeginUpdateRequest ClusterUpdate
    CommitNodeRequest CommitNodeResponse ConfigureClusterRequest ConfigureClusterResponse
    ConfigureNodeNetworkRequest ConfirmFirewallRequest ConfirmFirewallResponse
    ConfirmRecoveryKeyRequest ConfirmRecoveryKeyResponse ConsensusStatus ConsoleFrame
    ConsoleRequest ControlUpdateRequest CreateUserRequest DecommissionNodeRequest
    DecommissionNodeResponse DeleteNodeRequest DeleteNodeResponse DeleteRegistryRequest
    DeleteRegistryResponse DescribeRequest DescribeResponse DrainProgress DrainRequest
    EndRequest EndResponse EscrowRequest EscrowResponse FetchBundleRequest
    GetAttestationKeysRequest GetAttestationKeysResponse GetAuditRequest GetAuditResponse
    GetCaCertificateRequest GetCaCertificateResponse GetClusterInfoRequest
    GetClusterInfoResponse GetConsensusStatusRequest GetCurrentLeaderRequest
    GetCurrentLeaderResponse GetEtcdStatusRequest GetFirewallRequest GetFirewallResponse
    GetNodesRequest GetRecoveryKeyRequest GetRecoveryKeyResponse GetRegisterTicketRequest
    GetRegisterTicketResponse GetRotationRequest GetRotationResponse GetStatusRequest
    GetStatusResponse GetUpdateRequest GetUpdateResponse GiveParametersRequest
    GiveParametersResponse HeartbeatRequest HeartbeatResponse IssueCertificateRequest
    IssueCertificateResponse IssueWorkerCertificateRequest IssueWorkerCertificateResponse
    JoinConsensusRequest JoinConsensusResponse JoinNodeRequest JoinNodeResponse
    ListRegistriesRequest ListRegistriesResponse ListUsersRequest ListUsersResponse LogsRequest
    LogsResponse NameNodeRequest NodeInfo ProveTpmRequest ProveTpmResponse ReadLogRequest
    ReadLogResponse RebootRequest RebootResponse RegisterNodeRequest RegisterNodeResponse
    Registries RenewRequest ReportCallsRequest ReportCallsResponse ResetRequest ResetResponse
    RevokeUserRequest RevokeUserResponse RotateAuthoritiesRequest Rotation ServicesRequest
    ServicesResponse SetRegistryRequest SetRegistryResponse SnapshotChunk SnapshotEtcdRequest
    UnlockRequest UnlockResponse UpdateNodeLabelsRequest UpdateNodeRolesRequest
    UpdateNodeStatusRequest UpdateNodeStatusResponse UpdateNodeTaintsRequest UpdateProgress
    UpdateRequest WatchEvent WatchRegistriesRequest WatchRequest
};
const COUNT: usize = 118;

/// How deep messages in messages go in a sample.
const DEPTH_MAX: usize = 4;

/// A message with every field set.
fn sample(descriptor: &MessageDescriptor, depth: usize) -> DynamicMessage {
    let mut message = DynamicMessage::new(descriptor.clone());
    for field in descriptor.fields() {
        let Some(value) = value(&field.kind(), depth) else { continue };
        let value = if field.is_map() {
            let Kind::Message(entry) = field.kind() else { continue };
            let key = MapKey::String("key".to_owned());
            let Some(value) = self::value(&entry.map_entry_value_field().kind(), depth) else {
                continue;
            };
            Value::Map([(key, value)].into())
        } else if field.is_list() {
            Value::List(vec![value.clone(), value])
        } else {
            value
        };
        message.try_set_field(&field, value).unwrap();
    }
    message
}

fn value(kind: &Kind, depth: usize) -> Option<Value> {
    Some(match kind {
        Kind::Message(_) if depth == DEPTH_MAX => return None,
        Kind::Message(message) => Value::Message(sample(message, depth + 1)),
        Kind::String => Value::String("text".to_owned()),
        Kind::Bytes => Value::Bytes(vec![7; 32].into()),
        Kind::Bool => Value::Bool(true),
        Kind::Double => Value::F64(1.5),
        Kind::Float => Value::F32(1.5),
        Kind::Enum(_) => Value::EnumNumber(1),
        Kind::Int32 | Kind::Sint32 | Kind::Sfixed32 => Value::I32(-7),
        Kind::Int64 | Kind::Sint64 | Kind::Sfixed64 => Value::I64(-7),
        Kind::Uint32 | Kind::Fixed32 => Value::U32(300),
        Kind::Uint64 | Kind::Fixed64 => Value::U64(300),
    })
}

/// The messages of the RPCs, by the descriptors.
fn described() -> BTreeMap<String, MessageDescriptor> {
    let pool = DescriptorPool::decode(polis_proto::DESCRIPTORS).unwrap();
    let services = pool.services().filter(|service| service.package_name() == "polis.v1");
    let methods: Vec<_> =
        services.flat_map(|service| service.methods().collect::<Vec<_>>()).collect();
    let messages = methods.iter().flat_map(|method| [method.input(), method.output()]);
    messages.map(|message| (message.name().to_owned(), message)).collect()
}

#[test]
fn every_message_of_an_rpc_is_in_the_table() {
    let names: Vec<_> = MESSAGES.iter().map(|(name, _)| (*name).to_owned()).collect();
    assert_eq!(names, described().into_keys().collect::<Vec<_>>());
}

#[test]
fn rpc_messages() {
    // The place of the message in the table, then its bytes.
    let samples = (0_u8..)
        .zip(described().into_values())
        .map(|(number, message)| [&[number][..], &sample(&message, 0).encode_to_vec()].concat());
    Target::new("wire.rpc_messages").samples(samples).run(|input| {
        let Some((number, bytes)) = input.split_first() else { return Accepted::No };
        let (name, decode) = MESSAGES[usize::from(*number) % MESSAGES.len()];
        let Some(encoded) = decode(bytes) else { return Accepted::No };
        assert_eq!(decode(&encoded).as_ref(), Some(&encoded), "{name}");
        Accepted::Yes
    });
}
