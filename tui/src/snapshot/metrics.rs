//! What the machine is busy with, sampled at a steady pace.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::time;

/// What the machine is busy with. Each list has the newest sample last.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Metrics {
    /// Time between two samples.
    #[serde(with = "time")]
    pub pace: Duration,
    /// How many processors there are.
    pub processors: u32,
    /// How busy they were, all together, in percent.
    pub cpu: Vec<u8>,
    /// How much of the memory was in use, in percent.
    pub memory: Vec<u8>,
    /// Bytes of memory.
    pub memory_total: u64,
    /// Bytes of it in use: what could not be given to someone else at once.
    pub memory_used: u64,
    /// Bytes read from disks, a second.
    pub disk_read: Vec<u64>,
    /// Bytes written to disks, a second.
    pub disk_written: Vec<u64>,
    /// Bytes that came in by the network, a second.
    pub received: Vec<u64>,
    /// Bytes that went out, a second.
    pub sent: Vec<u64>,
    /// Bytes of the data partition's file system; zero if there is none yet.
    pub data_total: u64,
    /// Bytes of it in use.
    pub data_used: u64,
}
