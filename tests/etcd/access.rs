//! The access rules of a real curator, checked over real TLS.
//!
//! Every RPC of the descriptors has a row; one that is added without a row fails
//! the test, and so does a row that the server does not agree with.

use std::collections::BTreeMap;
use std::time::Duration;

use polis_control::consensus::Start;
use polis_control::consensus::client::User;
use polis_control::curator::Store;
use polis_proto::v1::UserRole;
use polis_tests::{Story, story};
use polis_wire::identity::{Identity, NodeKey};
use polis_wire::rpc::Credentials;
use polis_wire::rpc::client::{Expect, Trust, dial};
use prost_reflect::DescriptorPool;
use tonic::{Code, Request, Status};

use crate::curators::{Cluster, Curator, credentials, leader, self_signed};
use crate::harness::Machine;

/// Callers who may get in, in the order of the columns.
const CALLERS: [&str; 6] = ["nobody", "key", "node", "viewer", "operator", "owner"];

/// Each RPC, and a mark for each of [`CALLERS`].
const ROWS: [(&str, &str); 67] = [
    ("polis.v1.Aaa/Escrow", ".x...."),
    ("polis.v1.Aaa/Renew", "...xxx"),
    ("polis.v1.Aaa/CreateUser", ".....x"),
    ("polis.v1.Aaa/RevokeUser", ".....x"),
    ("polis.v1.Aaa/ListUsers", "...xxx"),
    ("polis.v1.Curator/Watch", "..xxxx"),
    ("polis.v1.Curator/UpdateNodeStatus", "..x..."),
    ("polis.v1.Curator/ReportCalls", "..x..."),
    ("polis.v1.Curator/Heartbeat", "..x..."),
    ("polis.v1.Curator/ProveTpm", "..x..."),
    ("polis.v1.Curator/RegisterNode", ".x...."),
    ("polis.v1.Curator/CommitNode", ".x...."),
    ("polis.v1.Curator/JoinNode", ".x...."),
    ("polis.v1.Curator/IssueCertificate", "..x..."),
    ("polis.v1.Curator/IssueWorkerCertificate", "..x..."),
    ("polis.v1.Curator/WatchRegistries", "..x..."),
    ("polis.v1.Curator/JoinConsensus", "..x..."),
    ("polis.v1.Curator/GetConsensusStatus", "..xxxx"),
    ("polis.v1.CuratorLocal/GetCurrentLeader", ".xxxxx"),
    ("polis.v1.CuratorLocal/GetCaCertificate", "xxxxxx"),
    ("polis.v1.Maintenance/Describe", ".x...x"),
    ("polis.v1.Maintenance/ReadLog", ".x...x"),
    ("polis.v1.Maintenance/GiveParameters", ".x...x"),
    ("polis.v1.Maintenance/End", ".x...x"),
    ("polis.v1.Management/GetRegisterTicket", ".....x"),
    ("polis.v1.Management/GetClusterInfo", "..xxxx"),
    ("polis.v1.Management/GetNodes", "...xxx"),
    ("polis.v1.Management/ApproveNode", "....xx"),
    ("polis.v1.Management/UpdateNodeRoles", ".....x"),
    ("polis.v1.Management/NameNode", "....xx"),
    ("polis.v1.Management/UpdateNodeLabels", "....xx"),
    ("polis.v1.Management/UpdateNodeTaints", "....xx"),
    ("polis.v1.Management/ConfigureNodeNetwork", "....xx"),
    ("polis.v1.Management/DecommissionNode", "....xx"),
    ("polis.v1.Management/DeleteNode", "....xx"),
    ("polis.v1.Management/ConfigureCluster", ".....x"),
    ("polis.v1.Management/ConfirmFirewall", ".....x"),
    ("polis.v1.Management/SetRegistry", ".....x"),
    ("polis.v1.Management/DeleteRegistry", ".....x"),
    ("polis.v1.Management/ListRegistries", "...xxx"),
    ("polis.v1.Management/GetRecoveryKey", ".....x"),
    ("polis.v1.Management/ConfirmRecoveryKey", ".....x"),
    ("polis.v1.Management/GetEtcdStatus", "...xxx"),
    ("polis.v1.Management/SnapshotEtcd", "....xx"),
    ("polis.v1.Management/BeginUpdate", ".....x"),
    ("polis.v1.Management/GetUpdate", "...xxx"),
    ("polis.v1.Management/ControlUpdate", ".....x"),
    ("polis.v1.Management/RotateAuthorities", ".....x"),
    ("polis.v1.Management/GetRotation", "...xxx"),
    ("polis.v1.Management/GetAudit", "....xx"),
    ("polis.v1.NodeManagement/GetStatus", "..xxxx"),
    ("polis.v1.NodeManagement/Logs", "...xxx"),
    ("polis.v1.NodeManagement/GetFirewall", "...xxx"),
    ("polis.v1.NodeManagement/Services", "...xxx"),
    ("polis.v1.NodeManagement/Drain", "....xx"),
    ("polis.v1.NodeManagement/Reboot", "....xx"),
    ("polis.v1.NodeManagement/GetAttestationKeys", "....xx"),
    ("polis.v1.NodeManagement/Attest", "....xx"),
    ("polis.v1.NodeManagement/AnnounceFirmwareUpdate", ".....x"),
    ("polis.v1.NodeManagement/Reset", ".....x"),
    ("polis.v1.NodeManagement/Console", "...xxx"),
    ("polis.v1.NodeManagement/Unlock", ".....x"),
    ("polis.v1.NodeManagement/Update", ".....x"),
    ("polis.v1.NodeManagement/StoreBundle", ".....x"),
    ("polis.v1.NodeManagement/FetchBundle", "..x..."),
    ("grpc.health.v1.Health/Check", "..xxxx"),
    ("grpc.reflection.v1.ServerReflection/ServerReflectionInfo", "..xxxx"),
];

/// The outcome of a call.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Outcome {
    /// It reached its handler, with any answer.
    LetIn,
    /// It was refused before.
    Refused(Code),
    /// The connection is closed.
    Cut,
    /// No answer for 20 s.
    Silent,
}

/// Makes a call with an empty request, and waits for the first message.
async fn call(at: &Curator, trust: &Trust, shown: Option<&Credentials>, path: &str) -> Outcome {
    let host = at.address.ip().to_string();
    let dialled = dial(&host, at.address.port(), Expect::AnyNode, trust, shown).await;
    // A server of TLS 1.3 classifies the certificate after the client is through.
    let Ok(connection) = dialled else { return Outcome::Cut };
    let mut grpc = tonic::client::Grpc::new(connection.channel);
    let called = async {
        grpc.ready().await.map_err(|error| Status::unavailable(error.to_string()))?;
        let codec = tonic_prost::ProstCodec::<(), ()>::default();
        let path = format!("/{path}").parse().unwrap();
        let mut answers = grpc.server_streaming(Request::new(()), path, codec).await?.into_inner();
        answers.message().await
    };
    match polis_tests::patiently(Duration::from_secs(20), called).await {
        Ok(Ok(_)) => Outcome::LetIn,
        Ok(Err(status)) => outcome(&status),
        Err(_elapsed) => Outcome::Silent,
    }
}

fn outcome(status: &Status) -> Outcome {
    // A handler's own refusal gives its reason, in a word.
    let handler = status.metadata().contains_key("polis-reason");
    match status.code() {
        Code::Unauthenticated | Code::PermissionDenied if !handler => {
            Outcome::Refused(status.code())
        }
        Code::Unavailable | Code::Unknown | Code::Internal | Code::Cancelled
            if std::error::Error::source(status).is_some() =>
        {
            Outcome::Cut
        }
        _ => Outcome::LetIn,
    }
}

/// The stories of this file.
pub(crate) const STORIES: &[Story] = &[
    story!(every_rpc_of_the_descriptors_has_a_row),
    story!(threads each_caller_is_let_in_where_the_table_says_so_and_nowhere_else),
];

fn every_rpc_of_the_descriptors_has_a_row() {
    let pool = DescriptorPool::decode(polis_proto::DESCRIPTORS).unwrap();
    let rows: BTreeMap<_, _> = ROWS.into();
    assert_eq!(rows.len(), ROWS.len(), "a row is there twice");
    let mut left: Vec<_> = rows.keys().filter(|path| path.starts_with("polis.")).collect();
    for service in pool.services() {
        for method in service.methods() {
            let path = format!("{}/{}", service.full_name(), method.name());
            assert!(rows.contains_key(path.as_str()), "{path} has no row of permitted callers");
            left.retain(|row| **row != path);
        }
    }
    assert!(left.is_empty(), "unknown calls: {left:?}");
}

async fn each_caller_is_let_in_where_the_table_says_so_and_nowhere_else() {
    let machine = Machine::new();
    let node = machine.start(Start::Bootstrap);
    let (cluster, own) = Cluster::found(&machine, &node).await;
    let curator = Curator::start(&machine, &node, own.clone());
    leader(&[&curator], Duration::from_secs(5)).await;
    let now = polis_base::sys::clock::now();
    let month = Duration::from_secs(31 * 24 * 60 * 60);
    let signed = |key: &NodeKey, der: Vec<u8>| credentials(key, der, cluster.authority.clone());
    let user = async |store: &Store<_>, name: &str, role, at| {
        let key = NodeKey::generate().unwrap();
        let made = store.create_user(name, role, &key.public_key(), at).await.unwrap();
        signed(&key, made.der)
    };
    let store = &cluster.store;
    let untrusted = self_signed(&NodeKey::generate().unwrap());
    let viewer = user(store, "vera", UserRole::Viewer, now).await;
    let operator = user(store, "otto", UserRole::Operator, now).await;
    let owner = user(store, "olga", UserRole::Owner, now).await;
    let callers =
        [None, Some(&untrusted), Some(&own), Some(&viewer), Some(&operator), Some(&owner)];

    // Before the owner rotates the CA, which the servers of this test do not learn.
    let late = user(store, "late", UserRole::Owner, now - 2 * month).await;
    let gone = user(store, "gone", UserRole::Owner, now).await;
    store.revoke_user("gone", now).await.unwrap();
    let client = node.client(User::Curator).await;
    let foreign = Store::new(client.sub("foreign"));
    foreign.ensure_authority(now).await.unwrap();
    let foreign_user = user(&foreign, "olga", UserRole::Owner, now).await;
    let foreign_node = foreign.ensure_node_certificate(machine.key.identity(), now).await.unwrap();
    let foreign_node = signed(&machine.key, foreign_node.der);
    let ghost = NodeKey::generate().unwrap();
    let issued = store.ensure_node_certificate(Identity::new(ghost.public_key()), now).await;
    let ghost = signed(&ghost, issued.unwrap().der);
    let trust = Trust::in_one(cluster.authority.clone());
    let mut wrong = Vec::new();
    for (path, marks) in ROWS {
        for ((name, shown), mark) in CALLERS.iter().zip(callers).zip(marks.chars()) {
            let expected = match mark {
                'x' => Outcome::LetIn,
                _ if shown.is_none_or(|shown| shown.authorities.is_none()) => {
                    Outcome::Refused(Code::Unauthenticated)
                }
                _ => Outcome::Refused(Code::PermissionDenied),
            };
            let found = call(&curator, &trust, shown, path).await;
            if found != expected {
                wrong.push(format!("{path} by {name}: {found:?}, expected {expected:?}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));

    // Callers that are rejected everywhere, even where anyone is served.
    let outcasts = [
        ("expired", late),
        ("revoked", gone),
        ("foreign", foreign_user),
        ("foreign node", foreign_node),
    ];
    // The message about a revocation is on its way for some milliseconds.
    let cut = async {
        while call(&curator, &trust, Some(&outcasts[1].1), ROWS[0].0).await != Outcome::Cut {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    polis_tests::patiently(Duration::from_secs(20), cut).await.expect("the revoked user is cut");
    for (name, shown) in &outcasts {
        for (path, _) in ROWS {
            let found = call(&curator, &trust, Some(shown), path).await;
            assert_eq!(found, Outcome::Cut, "{path} by {name}");
        }
    }

    // A node whose certificate is good but that is not one of ours.
    for (path, _) in ROWS {
        let refused = call(&curator, &trust, Some(&ghost), path).await;
        assert_eq!(refused, Outcome::Refused(Code::PermissionDenied), "{path}");
    }
    curator.supervisor.stop().await;
    node.stop().await;
}
