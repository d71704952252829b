//! A machine founds a cluster, in spite of every interruption.

use std::fs::Permissions;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::Path;
use std::sync::Arc;
use std::sync::Mutex;

use polis_base::trapdoor::code;
use polis_base::users;
use polis_control::consensus::client::User;
use polis_control::consensus::{Error, MemberStatus, Probe, Service, Start, Step};
use polis_runtime::supervisor::Context;
use polis_tests::{Story, story};
use tokio::sync::watch;

use crate::harness::Machine;

/// The stories of this file.
pub(crate) const STORIES: &[Story] = &[
    story!(async a_machine_founds_a_cluster_and_is_the_same_member_after_a_restart),
    story!(async etcd_runs_confined_on_a_disk_of_an_earlier_system_too),
    story!(async a_confined_tool_fills_a_new_cluster_from_a_snapshot),
    story!(async a_bootstrap_that_is_cut_off_after_every_step_ends_like_one_that_is_not),
    story!(async a_killed_etcd_is_started_again_and_nothing_is_lost),
    story!(async a_member_without_a_disk_opens_the_trapdoor),
    story!(async a_damaged_member_is_neither_started_nor_made_anew),
];

async fn a_machine_founds_a_cluster_and_is_the_same_member_after_a_restart() {
    let machine = Machine::new();
    let mut node = machine.start(Start::Bootstrap);
    let first = node.voter().await;
    assert_eq!(first.members.len(), 1);
    assert_eq!(first.members[0].name, machine.name());
    assert_eq!(first.members[0].peer_url, machine.peer.url());
    assert_eq!(first.leader, first.member);
    let lines = node.lines_up_to("etcd", "state=voter members=1").await;
    assert_eq!(lines[0], "POLIS etcd state=starting members=0 term=0");
    assert!(lines.last().unwrap().starts_with("POLIS etcd state=voter members=1"), "{lines:?}");
    let ca = machine.config.tree.peer_pki.ca.read().unwrap();
    node.stop().await;

    // Bootstrap again does not found a second time; neither does a plain start.
    for start in [Start::Bootstrap, Start::Restart] {
        let node = machine.start(start);
        let again = node.voter().await;
        assert_eq!((again.member, again.cluster), (first.member, first.cluster));
        assert_eq!(machine.config.tree.peer_pki.ca.read().unwrap(), ca);
        node.stop().await;
    }
}

async fn etcd_runs_confined_on_a_disk_of_an_earlier_system_too() {
    let machine = Machine::new().with_user_of_etcd();
    let node = machine.start(Start::Bootstrap);
    let first = node.voter().await;
    node.stop().await;
    if rustix::process::geteuid().is_root() {
        // All of it was root's before etcd had a user.
        owned_by_root(machine.config.tree.dir.path());
    }
    let node = machine.start(Start::Restart);
    assert_eq!(node.voter().await.member, first.member);
    let status = std::fs::read_to_string(format!("/proc/{}/status", node.pid())).unwrap();
    let status = status.replace('\t', " ");
    let mut expected = vec!["NoNewPrivs: 1", "Seccomp: 2"];
    if rustix::process::geteuid().is_root() {
        expected.extend([
            "Uid: 2379 2379 2379 2379",
            "Gid: 2379 2379 2379 2379",
            "CapPrm: 0000000000000000",
            "CapBnd: 0000000000000000",
        ]);
        // Root, etcd, and the API server by the group.
        let sockets = &machine.config.sockets;
        let (etcd, api_server) = (users::ETCD.id, users::API_SERVER.id);
        assert_eq!(shown(sockets.dir.path()), (etcd, api_server, 0o2710));
        for socket in [sockets.client(), &sockets.http()] {
            let (owner, group, mode) = shown(socket);
            assert_eq!((owner, group, mode & 0o077), (etcd, api_server, 0o070), "{mode:o}");
        }
    } else {
        println!("not tested: its user, which only root can change");
    }
    for line in expected {
        assert!(status.lines().any(|it| it == line), "{line} in\n{status}");
    }
    node.stop().await;
}

/// Owner, group and mode.
fn shown(path: &Path) -> (u32, u32, u32) {
    let found = std::fs::symlink_metadata(path).unwrap();
    (found.uid(), found.gid(), found.mode() & 0o7777)
}

async fn a_confined_tool_fills_a_new_cluster_from_a_snapshot() {
    let lost = Machine::new();
    let node = lost.start(Start::Bootstrap);
    let status = node.voter().await;
    let client = status.voter().unwrap().user(User::Curator);
    client.put("kept", "yes", None).await.unwrap();
    let mut stream = node.etcd().await.snapshot().await.unwrap();
    let mut snapshot = Vec::new();
    while let Some(part) = stream.message().await.unwrap() {
        snapshot.extend_from_slice(part.blob());
    }
    node.stop().await;

    let machine = Machine::new();
    let place = machine.config.snapshot.path();
    std::fs::write(place, &snapshot).unwrap();
    // As on the ESP, which only root reads.
    std::fs::set_permissions(place, Permissions::from_mode(0o600)).unwrap();
    let node = machine.start(Start::Bootstrap);
    let again = node.voter().await;
    assert_ne!((again.member, again.cluster), (status.member, status.cluster));
    let client = again.voter().unwrap().user(User::Curator);
    assert_eq!(client.get("kept").await.unwrap().unwrap().value, b"yes");
    node.stop().await;
}

fn owned_by_root(place: &Path) {
    std::os::unix::fs::chown(place, Some(0), Some(0)).unwrap();
    if place.is_dir() {
        std::fs::set_permissions(place, Permissions::from_mode(0o700)).unwrap();
        for entry in std::fs::read_dir(place).unwrap() {
            owned_by_root(&entry.unwrap().path());
        }
    } else {
        std::fs::set_permissions(place, Permissions::from_mode(0o600)).unwrap();
    }
}

async fn a_bootstrap_that_is_cut_off_after_every_step_ends_like_one_that_is_not() {
    let mut machine = Machine::new();
    let cut = Arc::new(Mutex::new(None));
    let probe = Arc::clone(&cut);
    machine.config.probe = Probe::new(move |step| *probe.lock().unwrap() != Some(step));
    // Each attempt gets one step further than the one before, and then dies silently:
    // its etcd is killed with it.
    for step in Step::ALL {
        *cut.lock().unwrap() = Some(step);
        let (_orders, orders) = watch::channel(Some(machine.orders(Start::Bootstrap)));
        let (ctx, _handles) = Context::for_test();
        let ended = Service::new(machine.config.clone(), orders).run(ctx).await;
        assert!(matches!(ended, Err(Error::Interrupted(at)) if at == step), "{step:?}: {ended:?}");
    }
    *cut.lock().unwrap() = None;
    let mut node = machine.start(Start::Bootstrap);
    let status = node.voter().await;
    assert_eq!(status.members.len(), 1);
    let authorities = |overview: &polis_wire::pki::Overview| {
        (!overview.authorities.is_empty()).then(|| overview.clone())
    };
    let overview =
        polis_runtime::event::until(&mut node.overview, "overview", authorities).await.unwrap();
    assert_eq!((overview.authorities.len(), overview.certificates.len()), (1, 1));
    assert_eq!(overview.authorities[0].issued, 1);
    node.stop().await;
}

async fn a_killed_etcd_is_started_again_and_nothing_is_lost() {
    let machine = Machine::new();
    let mut node = machine.start(Start::Bootstrap);
    let before = node.voter().await;
    let client = before.voter().unwrap().user(User::Curator);
    client.put("kept", "yes", None).await.unwrap();
    let started = std::time::Instant::now();
    node.kill();
    node.waits("to be stopped", |status| status.standing == MemberStatus::Stopped).await;
    let after = node.voter().await;
    println!("again a voter {:?} after SIGKILL", started.elapsed());
    assert_eq!(after.member, before.member);
    // A client from before the restart goes on working.
    assert_eq!(client.get("kept").await.unwrap().unwrap().value, b"yes");
    let deaths = node.lines("service");
    let killed =
        |line: &String| line.contains("cause=\"etcd was killed by") && line.contains("SIGKILL");
    assert!(deaths.iter().any(killed), "{deaths:?}");
    node.stop().await;
}

async fn a_member_without_a_disk_opens_the_trapdoor() {
    let machine = Machine::new();
    let node = machine.start(Start::Restart);
    let report = node.supervisor.trapdoor().await;
    assert_eq!(report.code, code::CONSENSUS_MEMBER_ABSENT);
    node.stop().await;
}

async fn a_damaged_member_is_neither_started_nor_made_anew() {
    let machine = Machine::new();
    let node = machine.start(Start::Bootstrap);
    node.voter().await;
    node.stop().await;
    machine.config.tree.peer_pki.key.remove().unwrap();
    for start in [Start::Bootstrap, Start::Restart] {
        let node = machine.start(start);
        let report = node.supervisor.trapdoor().await;
        assert_eq!(report.code, code::CONSENSUS_MEMBER_DAMAGED);
        assert!(report.cause().contains("its key is missing"), "{}", report.cause());
        node.stop().await;
        assert!(!machine.config.tree.data.is_empty().unwrap(), "the data is still there");
    }
}
