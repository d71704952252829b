//! Stories run against a real etcd, without a virtual machine.
//!
//! Each starts the services of `polis` as a node does, in one process, with
//! directories of its own and loopback addresses of its own, so that all of
//! them may run side by side. `cargo xtask test` provides etcd.

#![expect(clippy::unwrap_used, reason = "a story fails where something else came")]
#![expect(clippy::print_stdout, reason = "the runner keeps what a story says")]

mod access;
mod attesting;
mod auditing;
mod bootstrap;
mod calls;
mod certificates;
mod clients;
mod cluster;
mod ctl;
mod curator;
mod curators;
mod damage;
mod drift;
mod enlisting;
mod full;
mod harness;
mod independent;
mod operating;
mod registering;
mod rotation;
mod shipping;
mod snapshots;
mod succession;
mod tls;
mod updating;
mod voters;

use std::process::ExitCode;
use std::time::Duration;

use polis_tests::{Story, Suite};

/// A story waits for elections and for the disk: all together use a tenth of a processor.
const SUITE: Suite =
    Suite { name: "etcd", retries: 0, deadline: Duration::from_secs(240), per_processor: 3 };

const FILES: &[&[Story]] = &[
    access::STORIES,
    attesting::STORIES,
    auditing::STORIES,
    bootstrap::STORIES,
    certificates::STORIES,
    clients::STORIES,
    cluster::STORIES,
    ctl::STORIES,
    curator::STORIES,
    damage::STORIES,
    drift::STORIES,
    enlisting::STORIES,
    full::STORIES,
    independent::STORIES,
    operating::STORIES,
    registering::STORIES,
    rotation::STORIES,
    shipping::STORIES,
    snapshots::STORIES,
    succession::STORIES,
    updating::STORIES,
];

fn main() -> ExitCode {
    polis_tests::main(SUITE, FILES)
}
