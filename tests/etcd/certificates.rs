//! The certificates of the cluster, kept in a real etcd.

use std::sync::Arc;
use std::time::SystemTime;

use polis_control::consensus::Start;
use polis_control::consensus::client::User;
use polis_runtime::event::until;
use polis_tests::{Story, story};
use polis_wire::identity::NodeKey;
use polis_wire::pki::{
    Certificate, Crl, Error, Facts, Host, Issuer, Mode, Namespace, Overview, Reason, Template,
    certificates_der,
};

use crate::harness::{cluster_of_one, eventually};
use crate::tls::{Answer, shake_hands};

fn authority(name: &str) -> Arc<Certificate> {
    Arc::new(Certificate {
        issuer: Issuer::Itself,
        name: name.to_owned(),
        template: Template::EtcdAuthority,
        mode: Mode::Managed,
    })
}

fn certificate(authority: &Arc<Certificate>, name: &str, template: Template) -> Certificate {
    Certificate {
        issuer: Issuer::Authority(Arc::clone(authority)),
        name: name.to_owned(),
        template,
        mode: Mode::Managed,
    }
}

fn peer() -> Template {
    Template::EtcdPeer { host: Host::Name("somebody".to_owned()) }
}

fn now() -> SystemTime {
    polis_base::sys::clock::now()
}

/// The stories of this file.
pub(crate) const STORIES: &[Story] = &[
    story!(async many_that_want_a_certificate_at_once_get_the_same),
    story!(async a_change_of_the_crl_reaches_the_file_of_etcd_and_the_overview),
    story!(async the_peer_port_is_for_certificates_of_peers_alone),
    story!(async a_certificate_that_came_from_the_future_is_renewed_without_a_restart),
    story!(async a_key_that_is_not_the_nodes_cannot_take_its_certificate),
];

async fn many_that_want_a_certificate_at_once_get_the_same() {
    let (_machine, node, curator) = cluster_of_one(User::Curator).await;
    let wish = certificate(&authority("cluster"), "polis-x", Template::Node);
    let attempts = (0..8).map(|_| {
        let namespace = Namespace::new(curator.clone(), "pki/");
        let wish = wish.clone();
        async move {
            let mut lost = 0;
            loop {
                match namespace.ensure(&wish, now()).await {
                    Ok(issued) => return (issued, lost),
                    Err(error @ Error::Lost { .. }) if error.retriable() => lost += 1,
                    Err(error) => panic!("{error:?}"),
                }
            }
        }
    });
    let made = futures::future::join_all(attempts).await;
    assert!(made.iter().all(|(issued, _)| issued.der == made[0].0.der));
    // At least one of them came too late for the authority or the certificate.
    assert!(
        made.iter().any(|(_, lost)| *lost > 0),
        "no writer lost the race: this test shows nothing"
    );
    let issued = curator.list("pki/authorities/cluster/issued/").await.unwrap();
    assert_eq!(issued.entries.len(), 1);
    node.stop().await;
}

async fn a_change_of_the_crl_reaches_the_file_of_etcd_and_the_overview() {
    let (machine, mut node, client) = cluster_of_one(User::EtcdPki).await;
    let peers = authority("etcd-peers");
    let namespace = Namespace::new(client, "");
    let wish = certificate(&peers, "somebody", peer());
    let issued = namespace.ensure(&wish, now()).await.unwrap();
    let serial = Facts::read(&issued.der).unwrap().serial;
    assert_eq!(namespace.revoke(&peers, "somebody", Reason::Left, now()).await.unwrap(), 1);
    let expected = namespace.crl(&peers).await.unwrap().unwrap();
    assert!(expected.revokes(&serial));
    eventually("the file to be the CRL", || machine.crl_file() == expected.pem().into_bytes())
        .await;
    let shown = until(&mut node.overview, "overview", |overview: &Overview| {
        overview.authorities.first().filter(|it| !it.revoked.is_empty()).cloned()
    });
    let shown = shown.await.unwrap();
    assert_eq!((shown.crl_number, shown.revoked[0].subject.as_deref()), (2, Some("somebody")));
    node.stop().await;
}

async fn the_peer_port_is_for_certificates_of_peers_alone() {
    let (machine, node, client) = cluster_of_one(User::EtcdPki).await;
    let namespace = Namespace::new(client, "");
    let port = machine.config.listen;
    let ca = machine.config.tree.peer_pki.ca.read().unwrap().unwrap();
    let peers = authority("etcd-peers");

    let good = namespace.ensure(&certificate(&peers, "good", peer()), now()).await.unwrap();
    assert_eq!(shake_hands(port, &ca, Some(&good)).await, Answer::Served);

    assert!(matches!(shake_hands(port, &ca, None).await, Answer::Refused(_)));

    let foreign = authority("foreign");
    let foreign = namespace.ensure(&certificate(&foreign, "good", peer()), now()).await.unwrap();
    assert!(matches!(shake_hands(port, &ca, Some(&foreign)).await, Answer::Refused(_)));

    // Signed by the right authority, but not for a peer of etcd.
    let user = certificate(&peers, "user", Template::User { role: "viewer" });
    let user = namespace.ensure(&user, now()).await.unwrap();
    assert!(matches!(shake_hands(port, &ca, Some(&user)).await, Answer::Refused(_)));

    namespace.revoke(&peers, "good", Reason::KeyCompromise, now()).await.unwrap();
    let crl = namespace.crl(&peers).await.unwrap().unwrap();
    eventually("the file to be the CRL", || machine.crl_file() == crl.pem().into_bytes()).await;
    assert!(matches!(shake_hands(port, &ca, Some(&good)).await, Answer::Refused(_)));
    node.stop().await;
}

async fn a_certificate_that_came_from_the_future_is_renewed_without_a_restart() {
    let (machine, node, client) = cluster_of_one(User::EtcdPki).await;
    let file = &machine.config.tree.peer_pki.cert;
    let before = file.read().unwrap();
    // As if the clock had been eleven years ahead when the node made it: one of a clock that was
    // ahead by less is valid now.
    let peers = authority("etcd-peers");
    let namespace = Namespace::new(client, "");
    let wish = Certificate {
        mode: Mode::External(machine.key.public_key()),
        ..certificate(
            &peers,
            &machine.name(),
            Template::EtcdPeer { host: machine.peer.host.clone() },
        )
    };
    let future = now() + std::time::Duration::from_secs(11 * 365 * 24 * 60 * 60);
    // The node makes itself a new one, too, as soon as it sees that its own is revoked.
    loop {
        namespace.revoke(&peers, &machine.name(), Reason::Unspecified, now()).await.unwrap();
        match namespace.ensure(&wish, future).await {
            Ok(made) if Facts::read(&made.der).unwrap().not_before > now() => break,
            Ok(_) | Err(Error::Lost { .. }) => {}
            Err(error) => panic!("{error}"),
        }
    }
    let pid = node.pid();
    // The watcher looks when it starts.
    node.stop().await;
    let node = machine.start(Start::Restart);
    node.voter().await;
    assert_ne!(node.pid(), pid);
    eventually("a certificate that is valid now", || {
        let stored = file.read().unwrap();
        let valid_from = |pem: &Vec<u8>| Some(Facts::read(&certificates_der(pem)?[0])?.not_before);
        stored != before && stored.as_ref().and_then(valid_from).is_some_and(|from| from <= now())
    })
    .await;
    assert!(Crl::read(&namespace.crl(&peers).await.unwrap().unwrap().der).is_some());
    let ca = machine.config.tree.peer_pki.ca.read().unwrap().unwrap();
    let good = certificate(&peers, "good", peer());
    let good = namespace.ensure(&good, now()).await.unwrap();
    assert_eq!(shake_hands(machine.config.listen, &ca, Some(&good)).await, Answer::Served);
    node.stop().await;
}

async fn a_key_that_is_not_the_nodes_cannot_take_its_certificate() {
    let (machine, node, client) = cluster_of_one(User::EtcdPki).await;
    let other = NodeKey::generate().unwrap();
    let wish = Certificate {
        mode: Mode::External(other.public_key()),
        ..certificate(&authority("etcd-peers"), &machine.name(), peer())
    };
    let made = Namespace::new(client, "").ensure(&wish, now()).await;
    assert!(matches!(made, Err(Error::OtherKey { .. })), "{made:?}");
    node.stop().await;
}
