//! The snapshots that a voter takes of itself.

use std::fs;
use std::os::unix::fs::{FileExt as _, PermissionsExt as _};
use std::time::{Duration, SystemTime};

use polis_base::sys::clock;
use polis_control::consensus::client::{Client, Kv, User};
use polis_control::consensus::snapshots::{Pace, Snapshots, Taken};
use polis_control::consensus::{Start, Status};
use polis_tests::{Story, story};

use crate::harness::Machine;

/// The snapshots that a node keeps.
const KEPT: usize = 24;

/// As fast as the clock in their names allows.
pub(crate) const FAST: Pace = Pace { period: Duration::from_secs(1), settle: Duration::ZERO };

/// The file that a power cut leaves of one that was being written.
const LEFTOVER: &str = "unfinished";
const REST: &[u8] = b"the beginning of a database";

/// The stories of this file.
pub(crate) const STORIES: &[Story] = &[
    story!(async a_voter_takes_snapshots_that_found_a_cluster_with_the_same_content),
    story!(async the_newest_24_snapshots_stay_and_a_damaged_one_does_not_count),
    story!(async a_copy_that_fails_its_check_does_not_count_and_is_removed),
];

/// The snapshots in the folder, in order.
fn files(machine: &Machine) -> Vec<String> {
    let names = machine.config.tree.snapshots.names().unwrap();
    names.into_iter().filter(|name| name.ends_with(".db")).collect()
}

/// Whether the rest of a power cut is still there. A new one may be in its place.
fn is_left(machine: &Machine, rest: &[u8]) -> bool {
    fs::read(place(machine, LEFTOVER)).is_ok_and(|content| content == rest)
}

fn place(machine: &Machine, name: &str) -> std::path::PathBuf {
    machine.config.tree.snapshots.path().join(name)
}

/// Writes a hundred values, of a thousand sevens each.
pub(crate) async fn fill(client: &Client) {
    for number in 0..100 {
        client.put(&format!("key-{number:02}"), vec![7; 1000], None).await.unwrap();
    }
}

/// What is there below a prefix, and the revision of the database.
pub(crate) async fn content(client: &Client, prefix: &str) -> (Vec<(String, Vec<u8>)>, u64) {
    let listing = client.list(prefix).await.unwrap();
    let entries = listing.entries.into_iter().map(|Kv { key, value, .. }| (key, value));
    (entries.collect(), u64::try_from(listing.revision).unwrap())
}

/// The state of the snapshots, once it is so.
fn state(status: &Status, so: impl Fn(&Snapshots) -> bool) -> bool {
    status.snapshots.as_ref().is_some_and(so)
}

fn newest(status: &Status) -> Taken {
    status.snapshots.as_ref().unwrap().newest.unwrap()
}

async fn a_voter_takes_snapshots_that_found_a_cluster_with_the_same_content() {
    let mut machine = Machine::new();
    machine.config.snapshot_pace = FAST;
    fs::write(place(&machine, LEFTOVER), REST).unwrap();
    fs::write(place(&machine, "notes.txt"), "a person's").unwrap();
    let begun = clock::now();
    let node = machine.start(Start::Bootstrap);
    let client = node.client(User::Curator).await;
    fill(&client).await;
    client.delete("key-50").await.unwrap();
    let (kept, revision) = content(&client, "").await;
    let has_it = |it: &Snapshots| it.newest.is_some_and(|newest| newest.revision >= revision);
    let status = node.waits("to have a snapshot", |status| state(status, has_it)).await;
    let taken = newest(&status);
    let took = clock::now().duration_since(begun).unwrap();
    let age = clock::now().duration_since(taken.at).unwrap();
    println!("{taken:?} is there {took:?} after the start");
    // Its time has whole seconds.
    assert!(age < took + Duration::from_secs(1), "{age:?} old");
    assert!(!is_left(&machine, REST) && place(&machine, "notes.txt").exists());
    assert!(taken.bytes > 100_000, "{taken:?}");
    let problem = status.snapshots.unwrap().problem().unwrap();
    assert_eq!(problem, "a file does not count: notes.txt: its name is not that of a snapshot");
    node.stop().await;
    let files = files(&machine);
    for name in &files {
        let mode = fs::metadata(place(&machine, name)).unwrap().permissions().mode();
        assert_eq!(mode & 0o7777, 0o600, "{name}");
    }

    // As `polisctl etcd decrypt` leaves one.
    let heir = Machine::new();
    fs::copy(place(&machine, files.last().unwrap()), heir.config.snapshot.path()).unwrap();
    let node = heir.start(Start::Bootstrap);
    let (restored, _) = content(&node.client(User::Curator).await, "").await;
    assert_eq!((restored.len(), restored), (99, kept));
    node.stop().await;
}

async fn the_newest_24_snapshots_stay_and_a_damaged_one_does_not_count() {
    let mut machine = Machine::new();
    machine.config.snapshot_pace = FAST;
    let node = machine.start(Start::Bootstrap);
    node.waits("to have a snapshot", |status| state(status, |it| it.kept > 0)).await;
    node.stop().await;
    let first = files(&machine).remove(0);
    let content = fs::read(place(&machine, &first)).unwrap();
    // Two days of them, each like one of the node's own.
    let name = |number: usize| format!("{number:08}-1793491200-7.db");
    for number in 100..148 {
        fs::write(place(&machine, &name(number)), &content).unwrap();
    }
    let node = machine.start(Start::Restart);
    let status = node.waits("to keep 24", |status| state(status, |it| it.kept == KEPT)).await;
    assert_eq!(status.snapshots.as_ref().unwrap().problem(), None);
    assert!(newest(&status).at > SystemTime::UNIX_EPOCH + Duration::from_secs(1_793_491_200));
    node.stop().await;
    let left = files(&machine);
    let own = left.iter().filter(|file| !file.ends_with("-1793491200-7.db")).count();
    println!("{own} own and {} older ones are left", left.len() - own);
    assert!(own > 0 && left.len() <= KEPT + 1, "{left:?}");
    assert!(!left.contains(&first), "{left:?}");

    // An hour apart, so that the look at the folder is seen before many are taken.
    machine.config.snapshot_pace = Pace { period: Duration::from_secs(3600), ..FAST };
    let [flipped, cut] = [left[left.len() - 2].clone(), left[left.len() - 1].clone()];
    let file = fs::File::options().write(true).open(place(&machine, &flipped)).unwrap();
    file.write_all_at(&[!content[9000]], 9000).unwrap();
    fs::File::options().write(true).open(place(&machine, &cut)).unwrap().set_len(8192).unwrap();
    let node = machine.start(Start::Restart);
    let status = node
        .waits("to report the damage", |status| state(status, |it| it.rejected.len() == 2))
        .await;
    let shown = status.snapshots.unwrap();
    // One more, if the newest of those that count is of the hour before.
    assert!([left.len() - 2, left.len() - 1].contains(&shown.kept), "{shown:?}");
    let why = "it is damaged: its checksum does not match";
    assert_eq!(shown.rejected, [format!("{flipped}: {why}"), format!("{cut}: {why}")]);
    let problem = shown.problem().unwrap();
    assert_eq!(problem, format!("2 files do not count: {flipped}: {why}, and 1 more"));
    node.stop().await;
}

async fn a_copy_that_fails_its_check_does_not_count_and_is_removed() {
    let mut machine = Machine::new();
    machine.config.snapshot_pace = FAST;
    // A tool that finds damage in everything.
    machine.config.restorer = "/usr/bin/false".into();
    let node = machine.start(Start::Bootstrap);
    let status = node
        .waits("to report the failure", |status| state(status, |it| it.failure.is_some()))
        .await;
    let shown = status.snapshots.unwrap();
    let problem = shown.problem().unwrap();
    assert_eq!((shown.kept, shown.newest), (0, None));
    let expected = "the new snapshot did not pass its check and was removed: etcd's own tool \
                    rejects the new snapshot: /usr/bin/false ended with status 1, without output";
    assert_eq!(problem, expected);
    node.stop().await;
    assert!(files(&machine).is_empty());
}
