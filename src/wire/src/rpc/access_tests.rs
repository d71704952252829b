//! Every RPC with every caller: which are served, and which are rejected.

use tonic::service::Routes;
use tonic::{Code, Request};

use super::testing::{Authority, Running, self_signed};
use super::*;

/// The callers that each RPC serves: none, holder of a key, node, viewer, operator,
/// owner.
const SERVED: &[(&str, &str)] = &[
    ("/grpc.health.v1.Health/Check", "..nvpo"),
    ("/grpc.health.v1.Health/Watch", "..nvpo"),
    ("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo", "..nvpo"),
    ("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", "..nvpo"),
    ("/metrics", "..nvpo"),
    ("/polis.v1.Aaa/CreateUser", ".....o"),
    ("/polis.v1.Aaa/Escrow", ".k...."),
    ("/polis.v1.Aaa/ListUsers", "...vpo"),
    ("/polis.v1.Aaa/Renew", "...vpo"),
    ("/polis.v1.Aaa/RevokeUser", ".....o"),
    ("/polis.v1.Curator/CommitNode", ".k...."),
    ("/polis.v1.Curator/GetConsensusStatus", "..nvpo"),
    ("/polis.v1.Curator/Heartbeat", "..n..."),
    ("/polis.v1.Curator/IssueCertificate", "..n..."),
    ("/polis.v1.Curator/IssueWorkerCertificate", "..n..."),
    ("/polis.v1.Curator/JoinConsensus", "..n..."),
    ("/polis.v1.Curator/JoinNode", ".k...."),
    ("/polis.v1.Curator/ProveTpm", "..n..."),
    ("/polis.v1.Curator/RegisterNode", ".k...."),
    ("/polis.v1.Curator/ReportCalls", "..n..."),
    ("/polis.v1.Curator/UpdateNodeStatus", "..n..."),
    ("/polis.v1.Curator/Watch", "..nvpo"),
    ("/polis.v1.Curator/WatchRegistries", "..n..."),
    ("/polis.v1.CuratorLocal/GetCaCertificate", "-knvpo"),
    ("/polis.v1.CuratorLocal/GetCurrentLeader", ".knvpo"),
    ("/polis.v1.Maintenance/Describe", ".k...o"),
    ("/polis.v1.Maintenance/End", ".k...o"),
    ("/polis.v1.Maintenance/GiveParameters", ".k...o"),
    ("/polis.v1.Maintenance/ReadLog", ".k...o"),
    ("/polis.v1.Management/ApproveNode", "....po"),
    ("/polis.v1.Management/BeginUpdate", ".....o"),
    ("/polis.v1.Management/ConfigureCluster", ".....o"),
    ("/polis.v1.Management/ConfigureNodeNetwork", "....po"),
    ("/polis.v1.Management/ConfirmFirewall", ".....o"),
    ("/polis.v1.Management/ConfirmRecoveryKey", ".....o"),
    ("/polis.v1.Management/ControlUpdate", ".....o"),
    ("/polis.v1.Management/DecommissionNode", "....po"),
    ("/polis.v1.Management/DeleteNode", "....po"),
    ("/polis.v1.Management/DeleteRegistry", ".....o"),
    ("/polis.v1.Management/GetAudit", "....po"),
    ("/polis.v1.Management/GetClusterInfo", "..nvpo"),
    ("/polis.v1.Management/GetEtcdStatus", "...vpo"),
    ("/polis.v1.Management/GetNodes", "...vpo"),
    ("/polis.v1.Management/GetRecoveryKey", ".....o"),
    ("/polis.v1.Management/GetRegisterTicket", ".....o"),
    ("/polis.v1.Management/GetRotation", "...vpo"),
    ("/polis.v1.Management/GetUpdate", "...vpo"),
    ("/polis.v1.Management/ListRegistries", "...vpo"),
    ("/polis.v1.Management/NameNode", "....po"),
    ("/polis.v1.Management/RotateAuthorities", ".....o"),
    ("/polis.v1.Management/SetRegistry", ".....o"),
    ("/polis.v1.Management/SnapshotEtcd", "....po"),
    ("/polis.v1.Management/UpdateNodeLabels", "....po"),
    ("/polis.v1.Management/UpdateNodeRoles", ".....o"),
    ("/polis.v1.Management/UpdateNodeTaints", "....po"),
    ("/polis.v1.NodeManagement/AnnounceFirmwareUpdate", ".....o"),
    ("/polis.v1.NodeManagement/Attest", "....po"),
    ("/polis.v1.NodeManagement/Console", "...vpo"),
    ("/polis.v1.NodeManagement/Drain", "....po"),
    ("/polis.v1.NodeManagement/FetchBundle", "..n..."),
    ("/polis.v1.NodeManagement/GetAttestationKeys", "....po"),
    ("/polis.v1.NodeManagement/GetFirewall", "...vpo"),
    ("/polis.v1.NodeManagement/GetStatus", "..nvpo"),
    ("/polis.v1.NodeManagement/Logs", "...vpo"),
    ("/polis.v1.NodeManagement/Reboot", "....po"),
    ("/polis.v1.NodeManagement/Reset", ".....o"),
    ("/polis.v1.NodeManagement/Services", "...vpo"),
    ("/polis.v1.NodeManagement/StoreBundle", ".....o"),
    ("/polis.v1.NodeManagement/Unlock", ".....o"),
    ("/polis.v1.NodeManagement/Update", ".....o"),
];

#[test]
fn every_rpc_has_a_row_that_says_whom_it_serves() {
    let table = Table::polis().unwrap();
    let paths: Vec<_> = table.rules().map(|(path, _)| path).collect();
    let rows: Vec<_> = SERVED.iter().map(|(path, _)| *path).collect();
    assert_eq!(paths, rows);
}

#[tokio::test]
async fn every_rpc_serves_only_its_callers() {
    let authority = Authority::new().await;
    // The server has no services: an accepted call finds nothing to serve it.
    let limits = Limits { untrusted_rate: (1000, 1000), ..Limits::default() };
    let node = authority.node(1).await;
    let running = Running::start(&authority, node, App::Grpc(Routes::default()), limits).await;
    running.up(&[1, 2]);
    let users = [Role::Viewer, Role::Operator, Role::Owner];
    let mut callers = vec![None, Some(self_signed(9, None)), Some(authority.node(2).await)];
    for (role, seed) in users.into_iter().zip(3..) {
        callers.push(Some(authority.user(role.as_str(), role, seed).await));
    }
    for (column, credentials) in callers.into_iter().enumerate() {
        let connection = running.dial(&authority, credentials.as_ref()).await.unwrap();
        let mut grpc = tonic::client::Grpc::new(connection.channel);
        for (path, served) in SERVED {
            grpc.ready().await.unwrap();
            let codec = tonic_prost::ProstCodec::<(), ()>::default();
            let path = http::uri::PathAndQuery::from_static(path);
            let refused = grpc.unary(Request::new(()), path.clone(), codec).await.unwrap_err();
            let expected: &[Code] = match served.as_bytes()[column] {
                b'.' if column < 2 => &[Code::Unauthenticated],
                b'.' => &[Code::PermissionDenied],
                _ => &[Code::Unimplemented],
            };
            assert!(expected.contains(&refused.code()), "{path} {column}: {refused:?}");
        }
    }
    running.stop().await;
}
