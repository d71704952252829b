//! Three members with mutual TLS, in one process.

use std::ffi::OsString;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use futures::{StreamExt as _, TryStreamExt as _};
use polis_control::consensus::client::{Error, User};
use polis_control::consensus::{
    Invitation, MemberStatus, MembersError, Refusal, Start, holds_entries,
};
use polis_proto::v1;
use polis_runtime::event::until;
use polis_tests::{Story, story};
use polis_wire::pki::Crl;
use prost::Message as _;
use rustix::process::{Pid, Signal, kill_process};

use crate::harness::{Machine, Node, PATIENCE, eventually};

/// Leaders that may stop until a write was lost with one: a busy host may elect for longer than
/// a call waits.
const LEADERS: usize = 3;

/// The lease of a leading curator.
const LEASE: Duration = polis_control::curator::leader::LEASE;

/// Takes a machine out of the cluster of `through`.
async fn evict(through: &Node, machine: &Machine) -> Result<(), MembersError> {
    let id = machine.key.id();
    let leaving = through.members.may_leave(id, &machine.peer).await?;
    through.members.evict(id, leaving.as_ref(), through.peers_pki().await).await
}

/// Adds a machine to the cluster of `through` as a learner; returns what it needs to start.
async fn invite(through: &Node, machine: &Machine) -> Invitation {
    let pki = through.peers_pki().await;
    through.members.add(&machine.key.identity(), &machine.peer, pki).await.unwrap()
}

/// Adds a machine to the cluster of `through`, and waits until it votes.
async fn add(through: &Node, machine: &Machine, voters: usize) -> Node {
    let started = Instant::now();
    let invitation = invite(through, machine).await;
    let added = Instant::now();
    // Asked again, the answer is the same: a node may have lost the first one.
    let again = invite(through, machine).await;
    assert_eq!(invitation, again);
    let node = machine.start(Start::Join(Box::new(invitation)));
    through.voter_of(voters).await;
    let voter = added.elapsed();
    node.voter_of(voters).await;
    println!(
        "member {voters}: added after {:?}, a voter {voter:?} later, serves {:?} later",
        added - started,
        added.elapsed()
    );
    node
}

/// The one file of a log, and how it begins, up to its first entry.
fn before_the_first_entry(machine: &Machine) -> (OsString, Vec<u8>) {
    let log = machine.config.tree.log.path();
    let is_log = |path: &Path| path.extension().is_some_and(|end| end == "wal");
    let mut files = fs::read_dir(log).unwrap().map(|entry| entry.unwrap().path());
    let file = files.find(|path| is_log(path)).unwrap();
    let log = fs::read(&file).unwrap();
    let mut at = 0;
    // A record begins with its kind.
    while log[at + 8..at + 10] != [0x08, 2] {
        let length = u64::from_le_bytes(log[at..at + 8].try_into().unwrap()) & !(0xff << 56);
        at += 8 + usize::try_from(length).unwrap().next_multiple_of(8);
    }
    let mut head = log[..at].to_vec();
    head.resize(log.len(), 0);
    (file.file_name().unwrap().to_owned(), head)
}

async fn put_and_read(writer: &Node, reader: &Node, value: &str) {
    let status = writer.voter().await;
    let client = status.voter().unwrap().user(User::Curator);
    client.put("shared", value, None).await.unwrap();
    let status = reader.voter().await;
    let read = status.voter().unwrap().user(User::Curator).get("shared").await.unwrap();
    assert_eq!(read.unwrap().value, value.as_bytes());
}

/// The stories of this file.
pub(crate) const STORIES: &[Story] = &[
    story!(threads a_member_whose_power_went_before_its_first_entry_begins_anew).takes(15),
    story!(threads a_newcomer_that_waits_for_another_one_leaves_the_log_alone).takes(15),
    story!(threads a_newcomer_to_a_cluster_with_a_past_takes_its_state_and_not_its_history)
        .takes(30),
    story!(threads a_member_that_boots_without_a_quorum_names_the_voter_that_it_needs).takes(10),
    story!(threads three_members_grow_restart_and_shrink).takes(30),
    story!(threads a_write_that_a_leader_took_with_it_ends_once_there_is_another).takes(25),
    story!(threads a_lease_is_kept_while_the_leader_stops_and_another_follows).takes(40),
];

/// Three voters.
pub(crate) async fn voters(machines: &[Machine; 3]) -> [Node; 3] {
    let first = machines[0].start(Start::Bootstrap);
    first.voter().await;
    let second = add(&first, &machines[1], 2).await;
    let third = add(&first, &machines[2], 3).await;
    [first, second, third]
}

/// The node whose member leads, and one whose member follows.
pub(crate) async fn led(nodes: &[Node; 3]) -> (&Node, &Node) {
    for node in nodes {
        node.voter_of(3).await;
    }
    // An election may go on behind the end of the last one.
    let mut etcd = nodes[0].etcd().await;
    let id = loop {
        match etcd.status().await.unwrap().leader() {
            0 => tokio::time::sleep(Duration::from_millis(50)).await,
            id => break id,
        }
    };
    let leads = |node: &&Node| node.status.borrow().member.is_some_and(|member| member.0 == id);
    let leader = nodes.iter().find(leads).unwrap();
    (leader, nodes.iter().find(|node| !leads(node)).unwrap())
}

async fn a_lease_is_kept_while_the_leader_stops_and_another_follows() {
    let machines = [Machine::new(), Machine::new(), Machine::new()];
    let nodes = voters(&machines).await;
    let (leader, follower) = led(&nodes).await;
    let client = follower.client(User::Curator).await;
    let lease = client.lease(LEASE).await.unwrap();
    client.put("alive", "1", Some(&lease)).await.unwrap();
    // It takes what it is sent, and answers nothing.
    let pid = leader.pid();
    let stopped = async {
        tokio::time::sleep(LEASE / 2).await;
        kill_process(pid, Signal::STOP).unwrap();
    };
    let kept = tokio::time::timeout(4 * LEASE, client.keep(&lease));
    let (kept, ()) = tokio::join!(kept, stopped);
    assert!(kept.is_err(), "the lease was lost: {kept:?}");
    assert_eq!(client.get("alive").await.unwrap().unwrap().lease, lease.id());
    kill_process(pid, Signal::CONT).unwrap();
    for node in nodes {
        node.stop().await;
    }
}

async fn a_write_that_a_leader_took_with_it_ends_once_there_is_another() {
    let machines = [Machine::new(), Machine::new(), Machine::new()];
    let nodes = voters(&machines).await;
    let mut ended = Vec::new();
    for attempt in 0..LEADERS {
        let (leader, follower) = led(&nodes).await;
        let client = follower.client(User::Curator).await;
        client.put("before", "there", None).await.unwrap();
        // It takes what it is sent, and answers nothing.
        let pid = leader.pid();
        kill_process(pid, Signal::STOP).unwrap();
        let started = Instant::now();
        let written = client.put(&format!("lost/{attempt}"), "perhaps", None).await;
        println!("{:?} after {:?}", written, started.elapsed());
        // The next one finds the new leader.
        let again = polis_tests::patiently(Duration::from_secs(30), async {
            while client.put("after", "there", None).await.is_err() {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        });
        again.await.unwrap();
        println!("acknowledged again {:?} after the leader stopped", started.elapsed());
        kill_process(pid, Signal::CONT).unwrap();
        ended.push(written);
        if matches!(ended.last(), Some(Err(Error::LeaderChanged { .. }))) {
            break;
        }
    }
    let last = ended.last();
    assert!(matches!(last, Some(Err(Error::LeaderChanged { .. }))), "{ended:?}");
    for node in nodes {
        node.stop().await;
    }
}

async fn a_member_whose_power_went_before_its_first_entry_begins_anew() {
    let [one, two] = [Machine::new(), Machine::new()];
    let first = one.start(Start::Bootstrap);
    first.voter().await;
    assert!(holds_entries(&one.config.tree.log).unwrap(), "a voter has entries");
    assert!(!holds_entries(&two.config.tree.log).unwrap(), "a member without a log is new");

    // The result of a first start: a log that names no member.
    let (name, head) = before_the_first_entry(&one);
    let log = &two.config.tree.log;
    log.create().unwrap();
    fs::write(log.path().join(name), head).unwrap();
    assert!(!holds_entries(log).unwrap());
    let second = add(&first, &two, 2).await;
    put_and_read(&second, &first, "1").await;
    assert!(holds_entries(log).unwrap());
    second.stop().await;
    first.stop().await;
}

async fn a_newcomer_that_waits_for_another_one_leaves_the_log_alone() {
    let [one, two, three] = [Machine::new(), Machine::new(), Machine::new()];
    let first = one.start(Start::Bootstrap);
    first.voter().await;
    let invitation = invite(&first, &two).await;

    let identity = three.key.identity();
    let enters = async {
        loop {
            match first.members.add(&identity, &three.peer, first.peers_pki().await).await {
                Ok(invitation) => break invitation,
                Err(error) => println!("not yet: {error}"),
            }
        }
    };
    let starts = async {
        let mut etcd = first.etcd().await;
        // Its certificate is made first.
        let (mut overview, name) = (first.overview.clone(), three.name());
        let made = until(&mut overview, "overview", |overview| {
            overview.certificates.iter().any(|it| it.name == name).then_some(())
        });
        polis_tests::patiently(PATIENCE, made).await.unwrap().unwrap();
        let before = etcd.status().await.unwrap().raft_index();
        tokio::time::sleep(Duration::from_secs(2)).await;
        let after = etcd.status().await.unwrap().raft_index();
        assert!(after - before < 5, "{} entries in two seconds", after - before);
        two.start(Start::Join(Box::new(invitation)))
    };
    let (invitation, second) = tokio::join!(enters, starts);
    let third = three.start(Start::Join(Box::new(invitation)));
    for node in [&first, &second, &third] {
        node.voter_of(3).await;
    }
    for node in [third, second, first] {
        node.stop().await;
    }
}

async fn a_newcomer_to_a_cluster_with_a_past_takes_its_state_and_not_its_history() {
    /// More than a log that goes back to the first entry can have.
    const ENTRIES: u64 = 3200;
    let [one, two, three] = [Machine::new(), Machine::new(), Machine::new()];
    let first = one.start(Start::Bootstrap);
    let client = first.client(User::Curator).await;
    let entries = (0..ENTRIES).map(|entry| {
        let client = &client;
        async move { client.put(&format!("past/{}", entry % 7), "1", None).await }
    });
    futures::stream::iter(entries)
        .buffer_unordered(64)
        .try_for_each(|_stored| async { Ok(()) })
        .await
        .unwrap();

    let second = add(&first, &two, 2).await;
    put_and_read(&second, &first, "1").await;
    put_and_read(&first, &second, "2").await;

    let third = serves_soon(&first, &three).await;
    put_and_read(&third, &second, "3").await;
    for machine in [&two, &three] {
        // Made from entries, its first would be of the thousandth or so.
        let snapshots = snapshots(machine);
        assert!(snapshots.first().is_some_and(|&first| first >= ENTRIES), "{snapshots:?}");
    }

    // The data that they were sent is on their disks, too.
    third.stop().await;
    second.stop().await;
    let (second, third) = (two.start(Start::Restart), three.start(Start::Restart));
    second.voter_of(3).await;
    third.voter_of(3).await;
    put_and_read(&second, &third, "4").await;
    for node in [third, second, first] {
        node.stop().await;
    }
}

/// Adds a third member to a cluster with a past. It does not wait until etcd announces it again.
async fn serves_soon(through: &Node, machine: &Machine) -> Node {
    /// After a lost announcement, etcd would serve seven seconds after its start.
    const SERVES_MAX: Duration = Duration::from_secs(5);
    let invitation = invite(through, machine).await;
    let started = Instant::now();
    let node = machine.start(Start::Join(Box::new(invitation)));
    let served = polis_tests::patiently(SERVES_MAX, node.voter_of(3)).await;
    assert!(served.is_ok(), "it does not serve: {:#?}", node.status.borrow());
    println!("the third member served {:?} after its start", started.elapsed());
    node
}

/// The last entries that are in each of a member's snapshots, the oldest first.
fn snapshots(machine: &Machine) -> Vec<u64> {
    let directory = machine.config.tree.data.path().join("member/snap");
    let names = fs::read_dir(directory).unwrap();
    let names = names.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    // Term and index, in hexadecimal.
    let indexes = names.filter_map(|name| {
        let index = name.strip_suffix(".snap")?.split_once('-')?.1.to_owned();
        Some(u64::from_str_radix(&index, 16).unwrap())
    });
    let mut indexes: Vec<_> = indexes.collect();
    indexes.sort_unstable();
    indexes
}

async fn a_member_that_boots_without_a_quorum_names_the_voter_that_it_needs() {
    let [one, two] = [Machine::new(), Machine::new()];
    let first = one.start(Start::Bootstrap);
    first.voter().await;
    let second = add(&first, &two, 2).await;
    second.stop().await;
    first.stop().await;

    // As the agent keeps it.
    let last = v1::ClusterDirectory { nodes: [&one, &two].map(directory_entry).to_vec() };
    one.config.directory.write(&last.encode_to_vec()).unwrap();
    let mut first = one.start(Start::Restart);
    let wanted = format!("needs {} (last address {})", two.name(), two.peer.host);
    eventually("it says whom it needs", || {
        first.lines("stage").iter().any(|line| line.contains(&wanted))
    })
    .await;
    let second = two.start(Start::Restart);
    first.voter_of(2).await;
    second.voter_of(2).await;
    eventually("it says that it waits no more", || {
        first.lines("stage").iter().any(|line| line.contains("state=done"))
    })
    .await;
    second.stop().await;
    first.stop().await;
}

fn directory_entry(machine: &Machine) -> v1::cluster_directory::Node {
    let addresses = vec![machine.peer.host.to_string()];
    v1::cluster_directory::Node { id: machine.name(), addresses }
}

/// Whether no thread of a process runs: the state follows the name in `stat` (proc_pid_stat(5)).
fn is_stopped(pid: Pid) -> bool {
    let tasks = format!("/proc/{}/task", pid.as_raw_nonzero());
    fs::read_dir(tasks).unwrap().all(|task| {
        // A thread that is not there any more does not run either.
        let stat = fs::read_to_string(task.unwrap().path().join("stat"));
        stat.map_or(true, |stat| stat.rsplit_once(") ").unwrap().1.starts_with('T'))
    })
}

/// A leader of etcd that is cut off does not take its own list for that of a majority.
async fn lists_its_members_by_a_majority(nodes: &[Node; 3]) {
    /// Shorter than an election: until then the member takes itself for the leader.
    const CUT_OFF: Duration = Duration::from_millis(500);
    let (leader, _) = led(nodes).await;
    let own = leader.pid();
    let others: Vec<_> = nodes.iter().map(Node::pid).filter(|pid| *pid != own).collect();
    for pid in &others {
        kill_process(*pid, Signal::STOP).unwrap();
    }
    // A thread that still runs could answer.
    eventually("the other members to stop", || others.iter().all(|pid| is_stopped(*pid))).await;
    let mut listing = std::pin::pin!(leader.members.list());
    let alone = tokio::time::timeout(CUT_OFF, &mut listing).await;
    for pid in &others {
        kill_process(*pid, Signal::CONT).unwrap();
    }
    assert!(alone.is_err(), "it was listed without the others: {alone:?}");
    assert_eq!(listing.await.unwrap().len(), 3);
}

async fn three_members_grow_restart_and_shrink() {
    let machines = [Machine::new(), Machine::new(), Machine::new()];
    let [one, two, three] = &machines;
    let first = one.start(Start::Bootstrap);
    let lone = first.voter().await;
    assert!(one.config.tree.alone.read().unwrap().is_some(), "it knows that it is alone");

    let second = add(&first, two, 2).await;
    assert!(one.config.tree.alone.read().unwrap().is_none(), "it is not alone any more");
    let mut third = add(&second, three, 3).await;
    // It learns before it votes, and may have a vote by the time of its first report.
    let order = ["state=starting", "state=learner", "state=voter"];
    let states = third.lines_up_to("etcd", order[2]).await;
    let place = |line: &String| order.iter().position(|state| line.contains(state));
    let places: Vec<_> = states.iter().map(place).collect();
    assert!(places.is_sorted() && places.iter().all(Option::is_some), "{states:?}");
    assert_eq!(first.voter_of(3).await.member, lone.member);
    put_and_read(&first, &third, "1").await;

    // Each in turn, the leader too: the others go on, and it comes back by itself.
    let mut nodes = [Some(first), Some(second), Some(third)];
    for (at, machine) in machines.iter().enumerate() {
        nodes[at].take().unwrap().stop().await;
        let others: Vec<_> = nodes.iter().flatten().collect();
        let [writer, reader] = others[..] else { panic!("two are left") };
        put_and_read(writer, reader, machine.name().as_str()).await;
        nodes[at] = Some(machine.start(Start::Restart));
        nodes[at].as_ref().unwrap().voter_of(3).await;
    }
    for node in nodes.iter().flatten() {
        node.kill();
        node.waits("to be stopped", |status| status.standing == MemberStatus::Stopped).await;
        node.voter_of(3).await;
    }
    let nodes = nodes.map(Option::unwrap);
    Box::pin(lists_its_members_by_a_majority(&nodes)).await;
    let [first, second, third] = nodes;
    put_and_read(&third, &first, "2").await;

    // With the third off, taking away the second would be the end.
    third.stop().await;
    let refused = loop {
        match evict(&first, two).await {
            Err(MembersError::Refused(refused)) => break refused,
            // The connection to the third is not closed yet.
            other => assert!(other.is_err(), "the second was let go"),
        }
    };
    let Refusal::Quorum { voters: 2, needed: 2, answering: 1, missing, .. } = &refused else {
        panic!("{refused}")
    };
    assert_eq!(*missing, [three.name()]);
    let members = first.voter().await.members;
    let own = members.iter().find(|member| member.is_of(one.key.id(), &one.peer));
    let itself = first.members.evict(one.key.id(), own, first.peers_pki().await).await;
    assert!(matches!(itself, Err(MembersError::Itself)), "{itself:?}");

    // The third itself may go. Its removal is cut off before its certificate is
    // revoked, so it surely learns of it.
    let third = three.start(Start::Restart);
    let id = third.voter_of(3).await.member.unwrap();
    let mut etcd = first.etcd().await;
    while let Err(error) = etcd.member_remove(id.0).await {
        // Not before every member was active for five seconds.
        assert!(error.to_string().contains("unhealthy cluster"), "{error}");
        tokio::time::sleep(std::time::Duration::from_millis(100)).await;
    }
    eventually("the third to receive the removal", || {
        format!("{:?}", third.supervisor.tree().borrow())
            .contains("removed this one from the cluster")
    })
    .await;
    third.stop().await;
    // A retry finds only the second half left to do; and then nothing.
    evict(&first, three).await.unwrap();
    evict(&first, three).await.unwrap();
    first.voter_of(2).await;
    let crl = |machine: &Machine| {
        let pem = String::from_utf8(machine.crl_file()).unwrap();
        x509_parser::pem::parse_x509_pem(pem.as_bytes()).unwrap().1.contents
    };
    eventually("every member to know the CRL", || {
        [one, two].iter().all(|machine| Crl::read(&crl(machine)).unwrap().revoked.len() == 1)
    })
    .await;
    put_and_read(&second, &first, "3").await;
    let mut overview = second.overview.clone();
    let shown = until(&mut overview, "overview", |overview| {
        overview.authorities.iter().find(|it| it.revoked.len() == 1).cloned()
    });
    assert_eq!(shown.await.unwrap().revoked[0].subject, Some(three.name()));

    // And the second, in one go.
    evict(&first, two).await.unwrap();
    assert_eq!(first.voter_of(1).await.members.len(), 1);
    second.waits("to follow no leader", |status| status.leader.is_none()).await;
    second.stop().await;
    first.stop().await;
    let first = one.start(Start::Restart);
    assert_eq!(first.voter_of(1).await.member, lone.member);
    eventually("the first to know that it is alone", || {
        one.config.tree.alone.read().unwrap().is_some()
    })
    .await;
    first.stop().await;
}
