//! Which callers a server accepts, and what those get that have lost their access.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use polis_proto::v1;
use polis_proto::v1::curator_local_client::CuratorLocalClient;
use tokio::time::{sleep, timeout};
use tonic::Code;

use super::{server, who};
use crate::pki::{Facts, Template};
use crate::rpc::client::{Candidate, Client, Repeat, Timeouts};
use crate::rpc::testing::{Authority, SOON, node_id, self_signed};
use crate::rpc::{Credentials, Role, is_removal};
use polis_base::cause;
use polis_base::sys::clock;

#[tokio::test]
async fn each_caller_is_taken_for_who_its_certificate_says() {
    let authority = Authority::new().await;
    let running = server(&authority).await;
    running.up(&[1, 2]);
    let none = who(&running, &authority, None).await;
    assert_eq!(none.unwrap(), "a caller without a certificate");
    let key_holder = self_signed(9, None);
    let key_holder = who(&running, &authority, Some(&key_holder)).await;
    assert_eq!(key_holder.unwrap(), format!("the key of {}", node_id(9)));
    let node = authority.node(2).await;
    let node = who(&running, &authority, Some(&node)).await;
    assert_eq!(node.unwrap(), format!("node {}", node_id(2)));
    let user = authority.user("ann", Role::Operator, 3).await;
    let user = who(&running, &authority, Some(&user)).await;
    assert_eq!(user.unwrap(), "operator ann");
    running.stop().await;
}

#[tokio::test]
async fn a_certificate_that_is_no_caller_s_ends_the_handshake() {
    let authority = Authority::new().await;
    let foreign = Authority::new().await;
    let running = server(&authority).await;
    running.up(&[1, 2]);
    let ago = clock::now() - Duration::from_secs(100 * 24 * 60 * 60);
    let revoked = authority.user("eve", Role::Viewer, 4).await;
    let serial = Facts::read(&revoked.certificate).unwrap().serial;
    running.access_list.send_modify(|access_list| {
        Arc::make_mut(access_list).serials = Arc::new(BTreeSet::from([serial]));
    });
    // A node under the name of another, a user with an unknown role.
    let pretender = authority.sign(&node_id(5).to_string(), Template::Node, 6, clock::now()).await;
    let unknown = authority.sign("x", Template::User { role: "king" }, 7, clock::now()).await;
    let peer = Template::EtcdPeer { host: crate::pki::Host::Name("a".to_owned()) };
    for (bad, reason) in [
        (foreign.node(2).await, "UnknownCA"),
        (
            authority.sign("old", Template::User { role: "owner" }, 8, ago).await,
            "CertificateExpired",
        ),
        (revoked, "CertificateRevoked"),
        (pretender, "CertificateUnknown"),
        (unknown, "CertificateUnknown"),
        (authority.sign("peer", peer, 9, clock::now()).await, "CertificateUnknown"),
    ] {
        let refused = who(&running, &authority, Some(&bad)).await.unwrap_err();
        let causes = cause::line(&refused);
        // The client's error depends on whether it had sent its first call by then.
        let reported = [reason, "BrokenPipe", "reset", "closed", "broken pipe", "unavailable"];
        assert!(reported.iter().any(|reported| causes.contains(reported)), "{reason}: {causes}");
    }
    assert_eq!(running.metrics.handshakes_failed.get(), 6);
    assert!(running.metrics.calls().next().is_none());
    running.stop().await;
}

#[tokio::test]
async fn the_certificate_of_a_curator_makes_no_caller() {
    let authority = Authority::new().await;
    let running = server(&authority).await;
    let refused = who(&running, &authority, Some(&authority.curator(2).await)).await;
    assert!(refused.is_err(), "{refused:?}");
    running.stop().await;
}

#[tokio::test]
async fn a_node_that_is_not_up_is_refused_at_each_call() {
    let authority = Authority::new().await;
    let running = server(&authority).await;
    let node = authority.node(2).await;
    let unknown = who(&running, &authority, Some(&node)).await.unwrap_err();
    assert_eq!(unknown.code(), Code::Unavailable);
    running.up(&[1]);
    let down = who(&running, &authority, Some(&node)).await.unwrap_err();
    assert_eq!(down.code(), Code::PermissionDenied);
    assert_eq!(down.message(), format!("node {} is not in state UP", node_id(2)));
    running.stop().await;
}

#[tokio::test]
async fn a_revoked_node_gets_the_reason_at_every_call() {
    let authority = Authority::new().await;
    let running = server(&authority).await;
    running.up(&[1, 2]);
    let node = authority.node(2).await;
    let serial = Facts::read(&node.certificate).unwrap().serial;
    running.access_list.send_modify(|access_list| {
        Arc::make_mut(access_list).serials = Arc::new(BTreeSet::from([serial]));
    });
    for _ in 0..20 {
        let refused = who(&running, &authority, Some(&node)).await.unwrap_err();
        assert!(is_removal(&refused), "{refused:?}");
    }
    running.stop().await;
}

#[tokio::test]
async fn only_a_revoked_caller_loses_its_open_streams_at_once() {
    let authority = Authority::new().await;
    let running = server(&authority).await;
    let open = async |credentials: &Credentials| {
        let connection = running.dial(&authority, Some(credentials)).await.unwrap();
        let mut client = CuratorLocalClient::new(connection.channel);
        let request = v1::GetCurrentLeaderRequest {};
        let mut stream = client.get_current_leader(request).await.unwrap().into_inner();
        stream.message().await.unwrap().unwrap();
        stream
    };
    let [ann, bob] =
        [("ann", 3), ("bob", 4)].map(|(name, seed)| authority.user(name, Role::Viewer, seed));
    let (ann, bob) = (ann.await, bob.await);
    let (mut anns, mut bobs) = (open(&ann).await, open(&bob).await);
    running.access_list.send_modify(|access_list| {
        Arc::make_mut(access_list).users.as_mut().unwrap().remove("ann");
    });
    let cut = timeout(SOON, anns.message()).await.unwrap().unwrap_err();
    assert_eq!(cut.code(), Code::Unauthenticated);
    assert!(cut.message().starts_with("the certificate of viewer ann is not "), "{cut}");
    assert_eq!(running.metrics.cut.get(), 1);
    assert!(timeout(Duration::from_millis(200), bobs.message()).await.is_err());
    assert!(who(&running, &authority, Some(&ann)).await.is_err());
    running.stop().await;
}

#[tokio::test]
async fn a_certificate_without_a_record_admits_no_user() {
    let authority = Authority::new().await;
    let running = server(&authority).await;
    let ann = authority.user("ann", Role::Viewer, 3).await;
    // As the holder of a stolen key of the CA makes it.
    let forged = authority.forged("eve", Role::Owner, 4).await;
    let refused = who(&running, &authority, Some(&forged)).await.unwrap_err();
    assert_eq!(refused.code(), Code::Unauthenticated, "{refused}");
    assert!(!is_removal(&refused));
    who(&running, &authority, Some(&ann)).await.unwrap();
    running.stop().await;
}

#[tokio::test]
async fn no_user_is_served_while_the_users_are_unknown() {
    let authority = Authority::new().await;
    let running = server(&authority).await;
    let ann = authority.user("ann", Role::Owner, 3).await;
    let known = running.access_list.borrow().users.clone();
    running.access_list.send_modify(|list| Arc::make_mut(list).users = None);
    let refused = who(&running, &authority, Some(&ann)).await.unwrap_err();
    assert_eq!(refused.code(), Code::Unavailable);
    assert!(refused.message().contains("which users there are"), "{refused}");
    // The list is late by less than the call waits.
    running.access_list.send_modify(|list| Arc::make_mut(list).users = Some(Default::default()));
    let listed = async {
        sleep(Duration::from_millis(100)).await;
        running.access_list.send_modify(|list| Arc::make_mut(list).users = known);
    };
    let (served, ()) = tokio::join!(who(&running, &authority, Some(&ann)), listed);
    served.unwrap();
    running.stop().await;
}

#[tokio::test]
async fn a_revoked_caller_learns_the_reason_even_if_the_handshake_fails() {
    let authority = Authority::new().await;
    let running = server(&authority).await;
    let node = authority.node(5).await;
    let serial = Facts::read(&node.certificate).unwrap().serial;
    running.up(&[5]);
    let (host, port) = (running.address.ip().to_string(), running.address.port());
    let timeouts = Timeouts { attempt: Duration::from_secs(2), total: SOON };
    let client = Client::fixed(vec![Candidate { node: None, host, port }], node, timeouts);
    let call = || {
        client.call(Repeat::Allowed, |channel| async {
            let mut local = CuratorLocalClient::new(channel);
            local.get_ca_certificate(v1::GetCaCertificateRequest {}).await.map(drop)
        })
    };
    running.access_list.send_modify(|access_list| {
        Arc::make_mut(&mut Arc::make_mut(access_list).serials).insert(serial);
    });
    let refused = call().await.unwrap_err();
    assert!(is_removal(&refused), "{refused:?}");
    running.stop().await;
}
