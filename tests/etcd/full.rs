//! A database that reaches its quota.

use polis_control::consensus::client::{Error, User};
use polis_control::consensus::{Alarm, Start};
use polis_tests::{Story, story};

use crate::harness::Machine;

/// Above the size of an empty database, below the amount that a test can write quickly.
const QUOTA: u64 = 16 << 20;

/// The stories of this file.
pub(crate) const STORIES: &[Story] = &[story!(async a_full_database_is_given_room_again)];

async fn a_full_database_is_given_room_again() {
    let mut machine = Machine::new();
    machine.config.quota = QUOTA;
    let node = machine.start(Start::Bootstrap);
    let client = node.voter().await.voter().unwrap().user(User::Curator);
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
