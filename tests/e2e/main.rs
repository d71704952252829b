//! Stories of whole machines, run against QEMU and the serial line.
//!
//! Each file is a theme, each test a story, and each story gets a folder in
//! `target/e2e` with the logs of every boot. `world` is their shared part.
//!
//! A story waits for event lines of the serial port, as its contract has them, or
//! asks the operator's program again until a deadline. `cargo xtask test e2e` builds
//! the image and runs them; `docs/testing.md` says how to run one.

#![expect(clippy::print_stdout, reason = "the runner keeps what a story says")]
#![expect(clippy::print_stderr, reason = "the same")]

mod attended;
mod attested;
mod bonds;
mod clock;
mod cluster_update;
mod config_drive;
mod console;
mod deaths;
mod disaster;
mod disks;
mod esp;
mod firewall;
mod first_boot;
mod fleet;
mod forwarding;
mod further_disk;
mod guru;
mod hardware;
mod hostile;
mod install;
mod ipv6;
mod keys;
mod locked;
mod maintenance;
mod metadata;
mod mirror;
mod newcomer;
mod operate;
mod outage;
mod owner;
mod power_cut;
mod product;
mod recorded;
#[path = "../kube/registry.rs"]
#[expect(dead_code, reason = "the stories of kube use the rest of it")]
#[expect(clippy::unwrap_used, reason = "a story fails where something else came")]
mod registry;
mod replaced;
mod restart;
mod rotation;
mod samples;
mod secure_boot;
mod signed_disk;
mod sources;
mod stolen;
mod storage;
mod storage_faults;
mod storage_kinds;
#[path = "../kube/suite.rs"]
mod suite;
mod table;
mod three;
mod update;
mod update_cut;
mod watched;
mod workloads;
mod world;

use std::process::ExitCode;
use std::time::Duration;

use polis_tests::{Story, Suite};

/// A host that stalls for seconds can spoil a story, so it may try once more, and is
/// then named as flaky.
const SUITE: Suite =
    Suite { name: "e2e", retries: 1, deadline: Duration::from_secs(16 * 60), per_processor: 1 };

const FILES: &[&[Story]] = &[
    attended::STORIES,
    attested::STORIES,
    bonds::STORIES,
    clock::STORIES,
    cluster_update::STORIES,
    console::STORIES,
    deaths::STORIES,
    disaster::STORIES,
    disks::STORIES,
    further_disk::STORIES,
    firewall::STORIES,
    first_boot::STORIES,
    forwarding::STORIES,
    guru::STORIES,
    hardware::STORIES,
    hostile::STORIES,
    install::STORIES,
    keys::STORIES,
    locked::STORIES,
    maintenance::STORIES,
    mirror::STORIES,
    newcomer::STORIES,
    operate::STORIES,
    outage::STORIES,
    power_cut::STORIES,
    product::STORIES,
    recorded::STORIES,
    replaced::STORIES,
    restart::STORIES,
    rotation::STORIES,
    secure_boot::STORIES,
    signed_disk::STORIES,
    sources::STORIES,
    storage_faults::STORIES,
    storage_kinds::STORIES,
    ipv6::STORIES,
    three::STORIES,
    update::STORIES,
    workloads::STORIES,
    workloads::conformance::STORIES,
    workloads::greedy::STORIES,
    workloads::killed::STORIES,
    workloads::mesh::STORIES,
    workloads::updated::STORIES,
];

fn main() -> ExitCode {
    if let Some(ended) = metadata::relay() {
        return ended;
    }
    polis_tests::main(SUITE, FILES)
}
