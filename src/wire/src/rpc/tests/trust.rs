//! Certificates that change or end, and authorities that follow each other.

use std::sync::Arc;
use std::time::Duration;

use polis_proto::v1;
use polis_proto::v1::curator_local_client::CuratorLocalClient;
use tokio::time::Instant;
use tonic::Code;

use super::{server, who};
use crate::pki::{Authorities, Facts, Template};
use crate::rpc::Role;
use crate::rpc::client::{DialError, Expect, Trust, dial};
use crate::rpc::testing::{Authority, SOON, key, node_id};
use polis_base::sys::clock;

#[tokio::test]
async fn a_certificate_by_a_clock_that_was_ahead_is_accepted_on_both_sides_and_an_ended_one_not() {
    let authority = Authority::new().await;
    let days = |days: u64| Duration::from_secs(days * 24 * 60 * 60);
    let node = |seed, at| {
        let authority = authority.clone();
        async move { authority.sign(&node_id(seed).to_string(), Template::Node, seed, at).await }
    };
    let early = node(2, clock::now() + days(400)).await;
    let running = server(&authority).await;
    running.up(&[1, 2]);
    let caller = who(&running, &authority, Some(&early)).await;
    assert_eq!(caller.unwrap(), format!("node {}", node_id(2)));
    running.credentials.send_replace(Some(early));
    assert!(who(&running, &authority, None).await.is_ok());
    let ended = node(3, clock::now() - days(91)).await;
    running.credentials.send_replace(Some(ended));
    let refused = running.dial(&authority, None).await.unwrap_err();
    assert!(refused.help().contains("compare the clock"), "{refused:?}");
    running.stop().await;
}

#[tokio::test]
async fn new_credentials_hold_for_the_next_connection_and_old_ones_go_on() {
    let authority = Authority::new().await;
    let running = server(&authority).await;
    let first = running.dial(&authority, None).await.unwrap();
    assert_eq!(first.node, node_id(1));
    running.credentials.send_replace(Some(authority.node(2).await));
    let end = Instant::now() + SOON;
    while running.dial(&authority, None).await.unwrap().node != node_id(2) {
        assert!(Instant::now() < end);
        tokio::task::yield_now().await;
    }
    let mut client = CuratorLocalClient::new(first.channel);
    client.get_ca_certificate(v1::GetCaCertificateRequest {}).await.unwrap();
    running.stop().await;
}

#[tokio::test]
async fn a_client_takes_no_other_cluster_s_node_and_no_other_node() {
    let authority = Authority::new().await;
    let foreign = Authority::new().await;
    let running = server(&authority).await;
    let error = running.dial(&foreign, None).await.unwrap_err();
    assert!(matches!(error, DialError::Handshake { .. }), "{error:?}");
    let (host, port) = (running.address.ip().to_string(), running.address.port());
    let trust = Trust::in_one(authority.der.clone());
    let other = dial(&host, port, Expect::Node(node_id(2)), &trust, None).await.unwrap_err();
    let source = std::error::Error::source(&other).unwrap().to_string();
    assert!(source.contains(&node_id(1).to_string()), "{source}");
    // Unchecked, it receives the certificate that it should compare.
    let shown = dial(&host, port, Expect::AnyNode, &Trust::Unchecked, None).await.unwrap();
    let facts = Facts::read(&shown.certificate).unwrap();
    assert_eq!(facts.public_key, key(1).verifying_key().to_bytes());
    running.stop().await;
}

#[tokio::test]
async fn a_peer_that_trusts_only_a_former_ca_accepts_the_next_one() {
    let authority = Authority::new().await;
    let (away, stale_curator) = (authority.node(2).await, authority.curator(1).await);
    let ann = authority.user("ann", Role::Operator, 3).await;
    // As many as the bridges reach.
    for rotation in 1..=5 {
        authority.rotate(rotation).await;
        let running = server(&authority).await;
        running.up(&[1, 2]);
        // `who` trusts the first CA alone, and its callers show what that one has signed.
        let node = who(&running, &authority, Some(&away)).await;
        assert_eq!(node.unwrap(), format!("node {}", node_id(2)));
        authority.conclude().await;
        running.credentials.send_replace(Some(authority.curator(1).await));
        let node = who(&running, &authority, Some(&away)).await;
        assert_eq!(node.unwrap(), format!("node {}", node_id(2)));
        let user = who(&running, &authority, Some(&ann)).await;
        assert_eq!(user.unwrap(), "operator ann");
        // The other way round: a server that was away accepts a certificate of the next CA.
        running.credentials.send_replace(Some(stale_curator.clone()));
        let node = who(&running, &authority, Some(&authority.node(2).await)).await;
        assert_eq!(node.unwrap(), format!("node {}", node_id(2)));
        running.stop().await;
    }
}

#[tokio::test]
async fn a_former_ca_certifies_neither_servers_nor_unlisted_callers() {
    let authority = Authority::new().await;
    let stolen = authority.curator(1).await;
    let forged = authority.forged("eve", Role::Owner, 4).await;
    authority.rotate(1).await;
    let both = authority.authorities().await;
    authority.conclude().await;
    let after = authority.authorities().await;
    let running = server(&authority).await;
    running.up(&[1]);
    let eve = who(&running, &authority, Some(&forged)).await.unwrap_err();
    assert_eq!(eve.code(), Code::Unauthenticated, "{eve}");
    running.credentials.send_replace(Some(stolen));
    let (host, port) = (running.address.ip().to_string(), running.address.port());
    let by = |authorities: Arc<Authorities>| {
        let host = host.clone();
        async move { dial(&host, port, Expect::Curator(None), &Trust::cluster(authorities), None).await }
    };
    assert!(by(both).await.is_ok(), "trusted until the rotation is over");
    let refused = by(after).await.unwrap_err();
    assert!(matches!(refused, DialError::Handshake { .. }), "{refused:?}");
    running.stop().await;
}
