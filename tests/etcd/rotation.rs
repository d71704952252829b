//! The rotation of the authority of etcd's peers, with real members, and the order in which a
//! leader rotates the keys of Kubernetes.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use polis_control::consensus::client::User;
use polis_control::consensus::{Start, Status, peer_authority, trusted_digest};
use polis_control::curator::state::Request as Change;
use polis_proto::v1;
use polis_proto::v1::management_client::ManagementClient;
use polis_tests::{Story, patiently, story};
use polis_wire::pki::memory::Memory;
use polis_wire::pki::{
    Authorities, Certificate, Host, Issued, Issuer, KeySet, Mode, Namespace, Pin, ServiceAccounts,
    Store, Template, Write, front_proxy_authority, kubernetes_authority,
};
use polis_wire::rpc::client::Client;
use tonic::Code;

use crate::calls::{heartbeat, reason, take_consensus};
use crate::cluster::{led, voters};
use crate::curators::BootstrapNode;
use crate::harness::{Machine, Node};
use crate::tls::{Answer, shake_hands};
use crate::voters::Voters;

/// The stories of this file.
pub(crate) const STORIES: &[Story] = &[
    story!(threads peers_get_another_authority_while_they_write_and_one_of_them_is_off).takes(60),
    story!(threads no_voter_leaves_while_another_one_starts_again_and_the_other_way_round)
        .takes(25),
    story!(async the_next_key_of_tokens_is_listed_before_it_signs_and_the_authorities_follow),
];

/// How long a leader may take for a step that waits for nothing.
const PATIENCE: Duration = Duration::from_secs(30);

/// Waits until the files of these members name these authorities.
async fn written(nodes: &[&Node], authorities: &Authorities) {
    let digest = Some(trusted_digest(authorities));
    for node in nodes {
        let named = |status: &Status| status.authorities == digest;
        node.waits("to name the authorities of now", named).await;
    }
}

/// Starts etcd again, and waits until it trusts what its files name.
async fn starts_again(node: &Node) {
    node.restarts.ask();
    let current = |status: &Status| {
        status.authorities_at_start == status.authorities && status.voter().is_some()
    };
    node.waits("to have started with the authorities of now", current).await;
}

/// The certificate of a thief who has the key of the authority from a disk.
async fn forged(node: &Node, wish: &Certificate) -> Issued {
    let etcd = node.peers_pki().await;
    let memory = Memory::default();
    let mut copies = Vec::new();
    for leaf in ["certificate", "key", "crl"] {
        let key = format!("authorities/{}/{leaf}", peer_authority().name);
        let entry = Store::get(&etcd, &key).await.unwrap().unwrap();
        copies.push(Write::Put(key, entry.value));
    }
    assert!(memory.commit(Vec::new(), copies).await.unwrap());
    let now = polis_base::sys::clock::now();
    Namespace::new(memory, "").ensure(wish, now).await.unwrap()
}

async fn peers_get_another_authority_while_they_write_and_one_of_them_is_off() {
    let machines = [Machine::new(), Machine::new(), Machine::new()];
    let nodes = voters(&machines).await;
    led(&nodes).await;
    let [first, second, third] = nodes;
    third.stop().await;
    let authority = peer_authority();
    let pki = Namespace::new(first.peers_pki().await, "");
    let now = polis_base::sys::clock::now;
    let thief = Certificate {
        issuer: Issuer::Authority(authority.clone()),
        name: "thief".to_owned(),
        template: Template::EtcdPeer { host: Host::Name("thief".to_owned()) },
        mode: Mode::Managed,
    };
    let stolen = forged(&first, &thief).await;
    let port = machines[0].config.listen;
    let trusted = || machines[0].config.tree.peer_pki.ca.read().unwrap().unwrap();
    assert_eq!(shake_hands(port, &trusted(), Some(&stolen)).await, Answer::Served);

    let followed = BTreeSet::from([machines[0].name(), machines[1].name()]);
    let own_of_third = Certificate {
        issuer: Issuer::Authority(authority.clone()),
        name: machines[2].name(),
        template: Template::EtcdPeer { host: machines[2].peer.host.clone() },
        mode: Mode::External(machines[2].key.public_key()),
    };
    let begun = Instant::now();
    let ends = AtomicBool::new(false);
    let writes = async {
        let client = first.client(User::Curator).await;
        let (mut acknowledged, mut last, mut longest) = (0_u32, Instant::now(), Duration::ZERO);
        while !ends.load(Ordering::Relaxed) {
            let value = (acknowledged + 1).to_string();
            if client.put("count", value.as_str(), None).await.is_ok() {
                acknowledged += 1;
                longest = longest.max(last.elapsed());
                last = Instant::now();
            }
        }
        let read = client.get("count").await.unwrap().unwrap().value;
        let read: u32 = String::from_utf8(read).unwrap().parse().unwrap();
        (acknowledged, read, longest)
    };
    let rotation = async {
        assert!(pki.rotate(&authority, 1, now()).await.unwrap());
        let both = pki.authorities(&authority).await.unwrap().unwrap();
        written(&[&first, &second], &both).await;
        // The third one lost its power right after etcd had its next certificate.
        pki.renew(&own_of_third, now()).await.unwrap().unwrap();
        assert!(pki.conclude(&authority, Pin::AllBut(&followed)).await.unwrap());
        let after = pki.authorities(&authority).await.unwrap().unwrap();
        written(&[&first, &second], &after).await;
        // The bridges lead each of them to the next authority until it starts again.
        starts_again(&second).await;
        println!("one is back after {:?}", begun.elapsed());
        first.voter_of(3).await;
        starts_again(&first).await;
        println!("both are back after {:?}", begun.elapsed());
        ends.store(true, Ordering::Relaxed);
    };
    let ((acknowledged, read, longest), ()) = tokio::join!(writes, rotation);
    println!("{acknowledged} writes, the longest gap {longest:?}");
    assert!(acknowledged > 0 && read >= acknowledged, "{read} of {acknowledged}");

    // The port rejects the certificate of the former authority.
    let refused = shake_hands(port, &trusted(), Some(&stolen)).await;
    assert!(matches!(refused, Answer::Refused(_)), "{refused:?}");
    // The third member has only its old certificate on its disk. It forms a quorum with the first,
    // without a leader that it could ask.
    second.stop().await;
    let third = machines[2].start(Start::Restart);
    third.voter_of(3).await;
    let second = machines[1].start(Start::Restart);
    second.voter_of(3).await;
    let now_trusted = pki.authorities(&authority).await.unwrap().unwrap();
    written(&[&first, &second, &third], &now_trusted).await;
    for node in [first, second, third] {
        node.stop().await;
    }
}

/// Sends heartbeats of three voters, of which the second one trusts the authorities of this number
/// and its files name those of number one. Returns whether it is to start again.
async fn beat(voters: &[Client; 3], trusts: u8) -> bool {
    let mut ordered = Vec::new();
    for (voter, trusts) in voters.iter().zip([1, trusts, 1]) {
        let figures = v1::ConsensusFigures {
            leader: 1,
            authorities: vec![1; 32],
            authorities_at_start: vec![trusts; 32],
            ..Default::default()
        };
        let request = v1::HeartbeatRequest { consensus: Some(figures), ..Default::default() };
        ordered.push(heartbeat(voter, request).await.restart_etcd);
    }
    assert!(!ordered[0] && !ordered[2], "{ordered:?}");
    ordered[1]
}

async fn no_voter_leaves_while_another_one_starts_again_and_the_other_way_round() {
    let machines = [Machine::new(), Machine::new(), Machine::new()];
    let [_, two, three] = &machines;
    let Voters { nodes, cluster, curators, own, owner } = Box::pin(Voters::start(&machines)).await;
    let voters = own.map(|own| cluster.client(&curators.each_ref(), own));
    let becomes = async |ordered: bool, trusts: u8| {
        let same = async {
            while beat(&voters, trusts).await != ordered {
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        };
        patiently(PATIENCE, same).await.expect("the order to start again changes");
    };

    becomes(true, 2).await;
    let refused = take_consensus(&owner, &three.name()).await.unwrap_err();
    assert_eq!((refused.code(), reason(&refused)), (Code::FailedPrecondition, "rotation-restarts"));
    assert!(refused.message().starts_with(&two.name()), "{refused}");
    assert_eq!(cluster.store.node(three.key.id()).await.unwrap().leaving, None);

    // It is back, and the third one leaves.
    becomes(false, 1).await;
    let departure = v1::Departure {
        then: v1::departure::Then::Roles.into(),
        add: None,
        remove: Some(v1::NodeRoles {
            consensus_member: Some(v1::node_roles::ConsensusMember {}),
            ..Default::default()
        }),
    };
    cluster.store.change(three.key.id(), Change::Leave(departure)).await.unwrap();
    let mut copy = curators[0].directory.clone();
    copy.wait_for(|copy| copy.has_departure()).await.unwrap();
    let leaves = async {
        loop {
            let ordered = beat(&voters, 2).await;
            let record = cluster.store.node(three.key.id()).await.unwrap();
            if record.leaving.is_none() {
                return record;
            }
            assert!(!ordered, "etcd would miss two of three voters");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let record = patiently(PATIENCE, leaves).await.expect("the third one leaves");
    assert_eq!(record.roles, None);
    becomes(true, 2).await;

    for curator in curators {
        curator.supervisor.stop().await;
    }
    for node in nodes {
        node.stop().await;
    }
}

async fn the_next_key_of_tokens_is_listed_before_it_signs_and_the_authorities_follow() {
    let machine = Machine::new();
    let BootstrapNode { node, curator, owner, .. } = BootstrapNode::start(&machine).await;
    let client = node.client(User::KubernetesPki).await;
    let tokens = ServiceAccounts::new(client.clone(), "");
    let pki = Namespace::new(client.clone(), "");
    for authority in [kubernetes_authority(), front_proxy_authority()] {
        pki.ensure(&authority, polis_base::sys::clock::now()).await.unwrap();
    }
    let first = tokens.ensure().await.unwrap();
    let rotations = async || {
        let authorities = [kubernetes_authority(), front_proxy_authority()];
        let of = async |at: usize| pki.authorities(&authorities[at]).await.unwrap().unwrap();
        [of(0).await.made_in(), of(1).await.made_in()]
    };
    let becomes = async |so: fn(&KeySet, &KeySet) -> bool| {
        loop {
            let now = tokens.read().await.unwrap().unwrap();
            if so(&now, &first) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };

    let mut management = ManagementClient::new(owner.leader().await.unwrap().connection.channel);
    management.rotate_authorities(v1::RotateAuthoritiesRequest {}).await.unwrap();
    let listed = becomes(|now, first| now.verifying.len() == 2 && now.id() == first.id());
    patiently(PATIENCE, listed).await.expect("another key is listed");
    // The leader looks once a second.
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert_eq!(tokens.read().await.unwrap().unwrap().id(), first.id(), "servers do not know it");
    assert_eq!(rotations().await, [0, 0], "kubelets would ask for tokens too early");
    // As if that was long ago.
    let record = Write::Put("service-accounts/rotation".to_owned(), b"1 0".to_vec());
    assert!(Store::commit(&client, Vec::new(), vec![record]).await.unwrap());
    patiently(PATIENCE, becomes(|now, first| now.id() != first.id())).await.expect("it signs");
    let follow = async {
        while rotations().await != [1, 1] {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    patiently(PATIENCE, follow).await.expect("the authorities follow");
    assert!(tokens.read().await.unwrap().unwrap().is_leaving(), "the former one verifies");
    curator.supervisor.stop().await;
    node.stop().await;
}
