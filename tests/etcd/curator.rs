//! Three curators with their members: nodes enter, leaders change, and writes go on
//! meanwhile.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use polis_control::consensus::Start;
use polis_control::consensus::client::User;
use polis_control::curator::leader::LEASE;
use polis_control::curator::state::Request;
use polis_machine::time::Ahead;
use polis_proto::v1;
use polis_tests::{Story, story};
use rustix::process::{Signal, kill_process};

use crate::calls::write;
use crate::curators::{Cluster, Curator, leader};
use crate::harness::Machine;
use crate::voters::voter;

/// The stories of this file.
pub(crate) const STORIES: &[Story] = &[
    story!(threads a_leader_that_is_cut_off_is_followed_by_another_and_nothing_is_lost_or_done_twice).takes(45),
    story!(threads a_lone_curator_does_not_wait_for_the_lock_of_its_last_boot),
];

async fn a_leader_that_is_cut_off_is_followed_by_another_and_nothing_is_lost_or_done_twice() {
    let machines = [Machine::new(), Machine::new(), Machine::new()];
    let [one, two, three] = &machines;
    let first = one.start(Start::Bootstrap);
    let (cluster, own) = Cluster::found(one, &first).await;
    let started = Instant::now();
    let curator = Curator::start(one, &first, own);
    leader(&[&curator], Duration::from_secs(5)).await;
    println!("a lone curator leads after {:?}", started.elapsed());
    let owner = cluster.owner(&[&curator]).await;

    let mut nodes = vec![first];
    let mut curators = vec![curator];
    for machine in [two, three] {
        let of: Vec<_> = curators.iter().collect();
        let (node, curator, _) = voter(&cluster, &of, &owner, machine).await;
        curators.push(curator);
        nodes.push(node);
    }
    let of: Vec<_> = curators.iter().collect();
    let owner = cluster.owner(&of).await;
    let node_id = one.name();

    // Everyone points at the same leader.
    for curator in &curators {
        let mut status = curator.status.clone();
        let knows = polis_runtime::event::until(&mut status, "status", |status| {
            status.leadership.leader.as_ref().map(|leader| leader.node)
        });
        assert_eq!(knows.await.unwrap(), curators[0].id);
    }
    let from = write(&owner, &node_id, 0).await.unwrap();
    assert_eq!(from.labels["number"], "0");
    let key = format!("polis:curator/nodes/{node_id}");
    let history = nodes[1].etcd().await.kv_client().get(key.as_str(), None).await.unwrap();
    let begin = history.kvs()[0].mod_revision();

    // Its member stops in the middle of its work, and every request of the curator to it
    // hangs.
    let deposed = curators[0].term().unwrap();
    let pid = nodes[0].pid();
    let cut = Instant::now();
    kill_process(pid, Signal::STOP).unwrap();
    let writer = async {
        let mut number = 0;
        // A slow host needs longer for as many.
        while cut.elapsed() < Duration::from_secs(30) || number <= 100 {
            number += 1;
            write(&owner, &node_id, number).await.unwrap();
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        number
    };
    let others = [&curators[1], &curators[2]];
    let next = async {
        let next = leader(&others, 2 * LEASE).await;
        println!("another leads {:?} after the cut", cut.elapsed());
        next
    };
    let (number, next) = tokio::join!(writer, next);
    println!("{number} numbers were written meanwhile");
    assert!(curators[0].term().is_none(), "it knows by its own clock that it leads no more");
    assert_eq!(curators[0].status.borrow().leadership.leader, None, "it knows no leader");
    kill_process(pid, Signal::CONT).unwrap();
    nodes[0].voter_of(3).await;
    // Its messages as the former leader change nothing.
    let late = Request::Labels {
        set: [("number".to_owned(), "late".to_owned())].into(),
        remove: Vec::new(),
    };
    let refused = loop {
        match deposed.store.change(one.key.id(), late.clone()).await {
            Err(error) if error.deposed() => break error,
            // Its member is only just back.
            Err(_early) => tokio::time::sleep(Duration::from_millis(20)).await,
            Ok(_) => panic!("a deposed leader wrote"),
        }
    };
    println!("the old leader's write: {refused:?}");

    // Every number is there once, in order.
    let client = nodes[1].client(User::Curator).await;
    let mut etcd = nodes[1].etcd().await;
    let options = etcd_client::WatchOptions::new().with_start_revision(begin);
    let mut watch = etcd.watch(key.as_str(), Some(options)).await.unwrap();
    let mut seen = Vec::new();
    while seen.last() != Some(&number) {
        let message = watch.message().await.unwrap().unwrap();
        for event in message.events() {
            let value = event.kv().unwrap().value();
            let node = <v1::Node as prost::Message>::decode(value).unwrap();
            seen.push(node.labels["number"].parse::<u64>().unwrap());
        }
    }
    assert_eq!(seen, (0..=number).collect::<Vec<_>>());
    drop((watch, client));

    // The clock of the leader is 90 days ahead of those of both others.
    let skewed = others[next];
    let mut apart = Ahead::new();
    for (host, machine) in (1..).zip(&machines) {
        let address = IpAddr::from([192, 0, 2, host]);
        let external_address = address.to_string();
        let status = v1::NodeStatus { external_address, ..v1::NodeStatus::default() };
        cluster.store.change(machine.key.id(), Request::Status(status)).await.unwrap();
        apart.insert(address, 90 * 86_400 * 1_000_000);
    }
    skewed.ahead.send_replace(apart);
    let near: Vec<_> = curators.iter().filter(|curator| curator.id != skewed.id).collect();
    let leading = near[leader(&near, 2 * LEASE).await].id;
    // Its status follows its term, which ended before its lock did.
    let mut status = skewed.status.clone();
    let stepped_down = polis_runtime::event::until(&mut status, "status", |status| {
        status.leadership.term.is_none().then_some(())
    });
    let within = polis_tests::patiently(Duration::from_secs(1), stepped_down).await;
    within.expect("its clock is wrong").unwrap();
    skewed.ahead.send_replace(Ahead::new());

    // In order: the next one leads before anyone has missed it.
    let at = curators.iter().position(|curator| curator.id == leading).unwrap();
    let stopping = curators.remove(at);
    let rest: Vec<_> = curators.iter().collect();
    let stopped = Instant::now();
    let handed = async {
        leader(&rest, Duration::from_secs(1)).await;
        stopped.elapsed()
    };
    let (handed, ()) = tokio::join!(handed, stopping.supervisor.stop());
    println!("handed over in {handed:?}, stopped in {:?}", stopped.elapsed());
    write(&owner, &node_id, number + 1).await.unwrap();
    for curator in curators {
        curator.supervisor.stop().await;
    }
    for node in nodes {
        node.stop().await;
    }
}

async fn a_lone_curator_does_not_wait_for_the_lock_of_its_last_boot() {
    let machine = Machine::new();
    let node = machine.start(Start::Bootstrap);
    let (cluster, own) = Cluster::found(&machine, &node).await;
    // As after a power cut: the lock is there, and its lease has just begun.
    let client = node.client(User::Curator).await;
    let lease = client.lease(Duration::from_secs(60)).await.unwrap();
    let before = v1::Leader { node_id: machine.name(), ..Default::default() };
    let value = prost::Message::encode_to_vec(&before);
    client.campaign("leader", value, &lease).await.unwrap();
    let started = Instant::now();
    let curator = Curator::start(&machine, &node, own);
    leader(&[&curator], Duration::from_secs(5)).await;
    println!("leads after {:?}", started.elapsed());
    cluster.owner(&[&curator]).await;
    curator.supervisor.stop().await;
    assert!(client.leader("leader").await.unwrap().is_none(), "its lock is gone");
    node.stop().await;
}
