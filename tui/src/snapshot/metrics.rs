//! The load of the machine, sampled at a steady pace.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::time;

/// The load of the machine. Each list has the newest sample last.
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
    /// Bytes of it in use: memory that could not be given to others at once.
    pub memory_used: u64,
    /// Bytes read from disks, a second.
    pub disk_read: Vec<u64>,
    /// Bytes written to disks, a second.
    pub disk_written: Vec<u64>,
    /// Bytes that came in by the network, a second.
    pub received: Vec<u64>,
    /// Bytes that went out, a second.
    pub sent: Vec<u64>,
    /// Bytes of the data partition's file system; zero while it has no file system.
    pub data_total: u64,
    /// Bytes of it in use.
    pub data_used: u64,
    /// Bytes of it that are free once they have been written: an authenticated disk
    /// prepares them in the background.
    pub data_unwritten: u64,
}
