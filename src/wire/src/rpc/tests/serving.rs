//! Calls of a server that stops, deadlines, and the lines of the log.

use std::time::Duration;

use polis_proto::v1;
use polis_proto::v1::curator_local_client::CuratorLocalClient;
use polis_proto::v1::management_client::ManagementClient;
use tokio::time::Instant;
use tonic::Code;
use tracing_subscriber::layer::SubscriberExt as _;

use super::{app, local, server, who};
use crate::rpc::testing::{Authority, Running, self_signed};
use crate::rpc::{Limits, Role};
use polis_runtime::logtree::layer::ToTree;
use polis_runtime::logtree::{Query, Tree};

#[tokio::test]
async fn a_server_that_stops_ends_its_streams_with_a_reason_and_at_once() {
    let authority = Authority::new().await;
    let running = server(&authority).await;
    let connection = running.dial(&authority, Some(&self_signed(9, None))).await.unwrap();
    let mut client = CuratorLocalClient::new(connection.channel);
    let stream = client.get_current_leader(v1::GetCurrentLeaderRequest {}).await.unwrap();
    let mut stream = stream.into_inner();
    stream.message().await.unwrap().unwrap();
    let began = Instant::now();
    let (ended, ()) = tokio::join!(stream.message(), running.stop());
    assert_eq!(ended.unwrap_err().code(), Code::Unavailable);
    assert!(began.elapsed() < Limits::default().stop, "{:?}", began.elapsed());
}

#[tokio::test]
async fn a_call_ends_at_its_deadline_and_is_counted() {
    let authority = Authority::new().await;
    let mut local = local(1);
    local.slow = Duration::from_secs(600);
    let limits = Limits { deadline: Duration::from_millis(50), ..Limits::default() };
    let running = Running::start(&authority, authority.curator(1).await, app(&local), limits).await;
    let late = who(&running, &authority, None).await.unwrap_err();
    assert_eq!(late.code(), Code::DeadlineExceeded);
    let (path, calls) = running.metrics.calls().next().unwrap();
    assert_eq!(path, "/polis.v1.CuratorLocal/GetCaCertificate");
    assert_eq!(calls.codes().collect::<Vec<_>>(), [(Code::DeadlineExceeded, 1)]);
    running.stop().await;
}

#[tokio::test]
async fn a_call_that_changes_something_is_in_the_log_with_its_user() {
    let tree = Tree::new(None);
    let subscriber = tracing_subscriber::registry().with(ToTree(tree.clone()));
    let _default = tracing::subscriber::set_default(subscriber);
    let authority = Authority::new().await;
    let running = server(&authority).await;
    for (name, role) in [("ann", Role::Operator), ("bob", Role::Viewer)] {
        let user = authority.user(name, role, 3).await;
        let connection = running.dial(&authority, Some(&user)).await.unwrap();
        let mut client = ManagementClient::new(connection.channel);
        let read = client.get_cluster_info(v1::GetClusterInfoRequest::default()).await.unwrap_err();
        assert_eq!(read.code(), Code::Unimplemented, "this server has no such service");
        let changed = client.approve_node(v1::ApproveNodeRequest::default()).await.unwrap_err();
        let refused = Code::PermissionDenied;
        assert_eq!(changed.code() == refused, role == Role::Viewer, "{changed}");
    }
    running.stop().await;
    let lines = tree.backlog(&Query::all());
    let lines = lines.iter().map(|entry| entry.body.to_string());
    let calls: Vec<_> = lines.filter(|line| line.contains("calls")).collect();
    assert_eq!(calls, ["a user calls ApproveNode by=\"operator ann\" from=127.0.0.1"]);
}
