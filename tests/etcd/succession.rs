//! The lock of a leader whose machine led etcd, too: kept while it answers, ended once it is
//! dead. Something renews both locks here for as long as they exist, so no lease runs out.

use std::net::SocketAddr;
use std::time::{Duration, SystemTime};

use polis_control::consensus::Member;
use polis_control::consensus::client::{Client, User};
use polis_control::curator::directory::Leader;
use polis_control::curator::leader::LEASE;
use polis_tests::{Story, patiently, story};
use polis_wire::identity::NodeId;
use prost::Message as _;
use tokio::net::TcpListener;
use tokio::task::JoinSet;

use crate::cluster::{led, voters};
use crate::curators::{Cluster, Curator, leader};
use crate::harness::{Machine, Node};

/// The stories of this file.
pub(crate) const STORIES: &[Story] =
    &[story!(threads a_dead_leader_that_led_etcd_too_does_not_keep_its_lock_for_a_lease).takes(30)];

/// A lock that is renewed until it is gone.
async fn renewed(client: Client, node: NodeId, at: SocketAddr) {
    let lease = client.lease(LEASE).await.unwrap();
    let leader =
        Leader { node, address: Some(at.ip()), port: at.port(), since: SystemTime::UNIX_EPOCH };
    let value = leader.to_message().encode_to_vec();
    tokio::join!(client.keep(&lease), async {
        client.campaign("leader", value, &lease).await.unwrap();
    });
}

/// Waits until it knows that the member of this node leads.
async fn led_by(of: &Node, node: NodeId) {
    of.waits("to know the leader", |status| {
        let leader = status.members.iter().find(|member| Some(member.id) == status.leader);
        leader.and_then(Member::node) == Some(node)
    })
    .await;
}

async fn a_dead_leader_that_led_etcd_too_does_not_keep_its_lock_for_a_lease() {
    let machines = [Machine::new(), Machine::new(), Machine::new()];
    let mut nodes = voters(&machines).await;
    let (cluster, _own) = Cluster::found(&machines[0], &nodes[0]).await;
    // The machine that leads etcd holds the lock, and its curator answers; the next in line
    // takes no connection; the third has a curator that waits.
    let leading = led(&nodes).await.0.pid();
    let at = nodes.iter().position(|node| node.pid() == leading).unwrap();
    nodes.rotate_left(at);
    let mut machines = machines;
    machines.rotate_left(at);
    let ids = machines.each_ref().map(|machine| machine.key.id());
    let clients = nodes[2].voter().await;
    let client = || clients.voter().unwrap().user(User::Curator);

    let answers = TcpListener::bind((machines[0].config.listen.ip(), 0)).await.unwrap();
    let mut renewals = JoinSet::new();
    let held = renewals.spawn(renewed(client(), ids[0], answers.local_addr().unwrap()));
    until_locks(&client(), 1).await;
    let closed = TcpListener::bind((machines[1].config.listen.ip(), 0)).await.unwrap();
    let next = renewals.spawn(renewed(client(), ids[1], closed.local_addr().unwrap()));
    drop(closed);
    until_locks(&client(), 2).await;

    let own = cluster.credentials(&machines[2]).await;
    let candidate = Curator::start(&machines[2], &nodes[2], own);
    until_locks(&client(), 3).await;
    led_by(&nodes[2], ids[0]).await;

    // etcd's lead is handed over: the candidate asks, and leaves the lock to its holder.
    let second = nodes[1].voter().await.member.unwrap();
    nodes[0].etcd().await.move_leader(second.0).await.unwrap();
    let asked = patiently(Duration::from_secs(20), answers.accept()).await;
    drop(asked.expect("the holder is asked").unwrap());
    led_by(&nodes[2], ids[1]).await;
    assert!(!held.is_finished() && candidate.term().is_none(), "a leader that answers goes on");

    // It goes in order, and the next one, whose machine leads etcd, goes with it.
    held.abort();
    let first = locks(&client()).await.remove(0);
    client().release_by_id(first).await.unwrap();
    let mut status = candidate.status.clone();
    let leads = polis_runtime::event::until(&mut status, "status", |status| {
        status.leadership.leader.as_ref().filter(|leader| leader.node == ids[1]).map(drop)
    });
    patiently(Duration::from_secs(20), leads).await.expect("the next one leads").unwrap();
    let [first, second, third] = nodes;
    second.stop().await;
    leader(&[&candidate], 4 * LEASE).await;
    let over = async {
        while !next.is_finished() {
            drop(renewals.join_next().await);
        }
    };
    patiently(Duration::from_secs(20), over).await.expect("its lease is gone");

    candidate.supervisor.stop().await;
    for node in [first, third] {
        node.stop().await;
    }
}

/// The leases of the locks, in the order in which they were taken.
async fn locks(client: &Client) -> Vec<i64> {
    let mut locks = client.list("leader/").await.unwrap().entries;
    locks.sort_by_key(|lock| lock.created);
    locks.iter().map(|lock| lock.lease).collect()
}

async fn until_locks(client: &Client, count: usize) {
    let counted = async {
        while locks(client).await.len() != count {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    patiently(Duration::from_secs(20), counted).await.expect("as many locks");
}
