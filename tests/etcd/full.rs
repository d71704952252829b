//! Databases that are full, or mostly free.

use etcd_client::CompactionOptions;
use polis_control::consensus::client::{Error, User};
use polis_control::consensus::{Alarm, Start};
use polis_tests::{Story, story};

use crate::harness::Machine;

/// Above the size of an empty database, below the amount that a test can write quickly.
const QUOTA: u64 = 16 << 20;

/// Values of a MiB each, all but one of which are forgotten: more than the free space at which a
/// member rewrites its database.
const VALUES: usize = 130;

/// The stories of this file.
pub(crate) const STORIES: &[Story] = &[
    story!(async a_full_database_is_given_room_again),
    story!(async a_database_that_is_mostly_free_is_rewritten_while_its_member_runs).takes(60),
];

async fn a_full_database_is_given_room_again() {
    let mut machine = Machine::new();
    machine.config.quota = QUOTA;
    let node = machine.start(Start::Bootstrap);
    let client = node.client(User::Curator).await;
    // The same key again and again: all but the newest value can be forgotten.
    let full = loop {
        match client.put("large", vec![7; 1 << 20], None).await {
            Ok(_) => {}
            Err(error) => break error,
        }
    };
    assert!(matches!(full, Error::Full { .. }), "{full:?}");
    node.waits("to raise the alarm", |status| status.alarms == [Alarm::NoSpace]).await;
    let after = node.waits("to have room again", |status| status.alarms.is_empty()).await;
    assert!(after.db_size < QUOTA / 2, "{after:?}");
    client.put("large", vec![7; 1 << 20], None).await.unwrap();
    node.stop().await;
}

async fn a_database_that_is_mostly_free_is_rewritten_while_its_member_runs() {
    let machine = Machine::new();
    let node = machine.start(Start::Bootstrap);
    let client = node.client(User::Curator).await;
    let value = vec![7; 1 << 20];
    for _number in 0..VALUES {
        client.put("large", value.clone(), None).await.unwrap();
    }
    let grown = (VALUES as u64) << 20;
    node.waits("to have grown", |status| status.db_size > grown).await;
    // As etcd does by itself once an hour.
    let mut etcd = node.etcd().await;
    let newest = etcd.get("none", None).await.unwrap().header().unwrap().revision();
    etcd.compact(newest, Some(CompactionOptions::new().with_physical())).await.unwrap();
    let after = node.waits("to be rewritten", |status| status.db_size < grown / 4).await;
    assert!(after.db_used > 1 << 20 && after.alarms.is_empty(), "{after:?}");
    assert_eq!(client.get("large").await.unwrap().unwrap().value, value);
    client.put("large", "small", None).await.unwrap();
    node.stop().await;
}
