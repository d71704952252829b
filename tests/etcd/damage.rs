//! Files of etcd that something else wrote to.

use std::fs;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use polis_base::trapdoor::code;
use polis_control::consensus::Start;
use polis_control::consensus::client::User;
use polis_tests::{Story, story};

use crate::harness::Machine;

/// Bytes that mean nothing to anyone.
const NOISE: [u8; 4096] = [0x5a; 4096];

/// The stories of this file.
pub(crate) const STORIES: &[Story] =
    &[story!(async an_etcd_that_blames_its_files_is_started_three_times_and_no_more)];

async fn an_etcd_that_blames_its_files_is_started_three_times_and_no_more() {
    let machine = Machine::new();
    let node = machine.start(Start::Bootstrap);
    let client = node.client(User::Curator).await;
    for number in 0..40 {
        client.put(&format!("key-{number}"), vec![7; 1000], None).await.unwrap();
    }
    node.stop().await;

    let member = machine.config.tree.data.path().join("member");
    let database = member.join("snap/db");
    let wal = fs::read_dir(member.join("wal")).unwrap().map(|entry| entry.unwrap().path());
    let wal = wal.filter(|path| path.extension().is_some_and(|kind| kind == "wal")).min().unwrap();
    // The first two pages of a database are headers, and one of them is enough.
    story(&machine, &database, |file| write(file, &[0, 4096])).await;
    story(&machine, &database, |file| {
        let pages = fs::metadata(file).unwrap().len() / 4096;
        write(file, &(2..pages).map(|page| page * 4096).collect::<Vec<_>>());
    })
    .await;
    story(&machine, &database, |file| {
        fs::File::options().write(true).open(file).unwrap().set_len(8192).unwrap();
    })
    .await;
    story(&machine, &wal, |file| write(file, &[8192])).await;

    // With its files as they were it is the member that it was.
    let node = machine.start(Start::Restart);
    node.voter().await;
    node.stop().await;
}

fn write(file: &Path, places: &[u64]) {
    let file = fs::File::options().write(true).open(file).unwrap();
    places.iter().for_each(|place| file.write_all_at(&NOISE, *place).unwrap());
}

/// Damages `file`, sees what becomes of the node, and puts the files back.
async fn story(machine: &Machine, file: &Path, damage: impl Fn(&Path)) {
    let data = machine.config.tree.data.path();
    let saved = data.with_extension("saved");
    copy(data, &saved);
    damage(file);
    let mut node = machine.start(Start::Restart);
    let report = node.supervisor.trapdoor().await;
    assert_eq!(report.code, code::CONSENSUS_DATABASE_DAMAGED, "{}", report.cause());
    assert!(report.cause().contains("its database is damaged"), "{}", report.cause());
    let deaths = node.lines("service");
    let deaths = deaths.iter().filter(|line| line.contains("its database is damaged")).count();
    assert_eq!(deaths, 2, "the third is the one that opens the trapdoor");
    node.stop().await;
    fs::remove_dir_all(data).unwrap();
    fs::rename(saved, data).unwrap();
}

fn copy(from: &Path, to: &PathBuf) {
    fs::create_dir(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let to = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy(&entry.path(), &to);
        } else {
            fs::copy(entry.path(), to).unwrap();
        }
    }
}
