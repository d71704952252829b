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
use polis_proto::v1::curator_client::CuratorClient;
use polis_proto::v1::management_client::ManagementClient;
use polis_tests::{Story, story};
use polis_wire::identity::NodeKey;
use polis_wire::rpc::client::{Client, Repeat};
use rustix::process::{Signal, kill_process};
use tonic::{Code, Status};

use crate::curators::{Cluster, Curator, address, credentials, invitation, leader, self_signed};
use crate::harness::{Machine, Node};

/// Admits a machine, by the calls that it and an operator make.
pub(crate) async fn admit(
    cluster: &Cluster,
    of: &[&Curator],
    owner: &Client,
    machine: &Machine,
) -> Node {
    machine.start(invite(cluster, of, owner, machine).await)
}

/// The same, up to the start orders of its member of etcd.
pub(crate) async fn invite(
    cluster: &Cluster,
    of: &[&Curator],
    owner: &Client,
    machine: &Machine,
) -> Start {
    invite_with(cluster, of, owner, machine, &NodeKey::generate().unwrap()).await
}

/// The same, of a machine with this join key.
pub(crate) async fn invite_with(
    cluster: &Cluster,
    of: &[&Curator],
    owner: &Client,
    machine: &Machine,
    join_key: &NodeKey,
) -> Start {
    let ticket = owner.call(Repeat::Allowed, |channel| async move {
        let request = v1::GetRegisterTicketRequest::default();
        Ok(ManagementClient::new(channel).get_register_ticket(request).await?.into_inner())
    });
    let ticket = ticket.await.unwrap().ticket;
    let untrusted = cluster.client(of, self_signed(&machine.key));
    let register = |ticket: Vec<u8>| {
        let join_key = join_key.public_key().to_vec();
        let untrusted = &untrusted;
        async move {
            untrusted
                .call(Repeat::Allowed, |channel| {
                    let request = v1::RegisterNodeRequest {
                        register_ticket: ticket.clone(),
                        join_key: join_key.clone(),
                        ..Default::default()
                    };
                    async move {
                        Ok(CuratorClient::new(channel).register_node(request).await?.into_inner())
                    }
                })
                .await
        }
    };
    let refused = register(vec![1; 32]).await.unwrap_err();
    assert_eq!((refused.code(), reason(&refused)), (Code::PermissionDenied, "ticket-wrong"));
    let registered = register(ticket.clone()).await.unwrap();
    assert_eq!(registered.state(), v1::NodeState::New);

    let commit = || {
        let request = v1::CommitNodeRequest {
            storage_kind: v1::StorageKind::Insecure.into(),
            ..Default::default()
        };
        untrusted.call(Repeat::Allowed, move |channel| {
            let request = request.clone();
            async move { Ok(CuratorClient::new(channel).commit_node(request).await?.into_inner()) }
        })
    };
    let refused = commit().await.unwrap_err();
    assert_eq!(reason(&refused), "not-approved");
    let node_id = machine.name();
    let approved = owner.call(Repeat::Allowed, |channel| {
        let request =
            v1::ApproveNodeRequest { node_id: node_id.clone(), fingerprint: String::new() };
        async move { Ok(ManagementClient::new(channel).approve_node(request).await?.into_inner()) }
    });
    assert_eq!(approved.await.unwrap().node.unwrap().state(), v1::NodeState::Standby);
    assert_eq!(register(ticket).await.unwrap().state(), v1::NodeState::Standby);
    let entered = commit().await.unwrap();
    assert_eq!(entered, commit().await.unwrap(), "the same certificate again");

    let own = credentials(&machine.key, entered.certificate, cluster.authority.clone());
    let node = cluster.client(of, own);
    let join = || {
        let address = address(machine).to_string();
        node.call(Repeat::Allowed, move |channel| {
            let request = v1::JoinConsensusRequest { address: address.clone() };
            async move { Ok(CuratorClient::new(channel).join_consensus(request).await?.into_inner()) }
        })
    };
    let refused = join().await.unwrap_err();
    assert_eq!(reason(&refused), "no-role");
    let refused = worker_certificate(&node, [9; 32]).await.unwrap_err();
    assert_eq!((refused.code(), reason(&refused)), (Code::FailedPrecondition, "no-worker"));
    let roles = v1::NodeRoles {
        consensus_member: Some(v1::node_roles::ConsensusMember {}),
        ..Default::default()
    };
    let given =
        owner.call(Repeat::Allowed, |channel| {
            let (node_id, add) = (node_id.clone(), Some(roles));
            let request = v1::UpdateNodeRolesRequest { node_id, add, remove: None };
            async move {
                Ok(ManagementClient::new(channel).update_node_roles(request).await?.into_inner())
            }
        });
    assert_eq!(given.await.unwrap().roles, Some(roles));
    invitation(join().await.unwrap(), machine)
}

/// Asks for the certificate of kubelet for this key.
pub(crate) async fn worker_certificate(
    node: &Client,
    key: [u8; 32],
) -> Result<v1::IssueWorkerCertificateResponse, Status> {
    node.call(Repeat::Allowed, move |channel| async move {
        let request = v1::IssueWorkerCertificateRequest {
            purpose: v1::WorkerCertificate::Kubelet.into(),
            public_key: key.to_vec(),
        };
        Ok(CuratorClient::new(channel).issue_worker_certificate(request).await?.into_inner())
    })
    .await
}

pub(crate) fn reason(status: &Status) -> &str {
    status.metadata().get("polis-reason").map_or("", |word| word.to_str().unwrap())
}

/// Writes a number into the record of a node, as an operator would.
pub(crate) async fn write(
    client: &Client,
    node_id: &str,
    number: u64,
) -> Result<v1::NodeInfo, Status> {
    client
        .call(Repeat::Allowed, |channel| {
            let request = v1::UpdateNodeLabelsRequest {
                node_id: node_id.to_owned(),
                set: [("number".to_owned(), number.to_string())].into(),
                remove: Vec::new(),
            };
            async move {
                Ok(ManagementClient::new(channel).update_node_labels(request).await?.into_inner())
            }
        })
        .await
}

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
    for (voters, machine) in [(2, two), (3, three)] {
        let of: Vec<_> = curators.iter().collect();
        let node = admit(&cluster, &of, &owner, machine).await;
        node.voter_of(voters).await;
        let issued = cluster
            .store
            .ensure_node_certificate(machine.key.identity(), polis_base::sys::clock::now());
        let issued = issued.await.unwrap().der;
        let own = credentials(&machine.key, issued, cluster.authority.clone());
        curators.push(Curator::start(machine, &node, own));
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
        while cut.elapsed() < Duration::from_secs(30) {
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
    assert!(number > 100, "{number}");
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
            Err(error) => assert!(!error.deposed(), "{error}"),
            Ok(_) => panic!("a deposed leader wrote"),
        }
    };
    println!("the old leader's write: {refused:?}");

    // Every number is there once, in order.
    let client = nodes[1].voter().await.voter().unwrap().user(User::Curator);
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
        leader(&rest, Duration::from_secs(5)).await;
        stopped.elapsed()
    };
    let (handed, ()) = tokio::join!(handed, stopping.supervisor.stop());
    println!("handed over in {handed:?}, stopped in {:?}", stopped.elapsed());
    assert!(handed < Duration::from_secs(1), "{handed:?}");
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
    let client = node.voter().await.voter().unwrap().user(User::Curator);
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
