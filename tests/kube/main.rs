//! Stories of the control plane of Kubernetes, natively on this host.
//!
//! The services `consensus` and `workload` run as on a node, against the real etcd, API
//! server, controller manager and scheduler, with the command lines and files that a node
//! uses: only addresses and directories are other ones, so that the stories run side by side.
//! No story needs a pod. `cargo xtask test` provides the programs.

#![expect(clippy::unwrap_used, reason = "a story fails where something else came")]
#![expect(clippy::print_stdout, reason = "the runner keeps what a story says")]

mod access;
mod certificates;
mod conformance;
mod control_plane;
mod drain;
#[path = "../etcd/harness.rs"]
#[expect(dead_code, reason = "the stories of etcd use the rest of it")]
mod harness;
mod registries;
mod registry;
mod rotation;
mod suite;
mod volumes;
mod world;

use std::process::ExitCode;
use std::time::Duration;

use polis_tests::{Story, Suite};

const SUITE: Suite =
    Suite { name: "kube", retries: 1, deadline: Duration::from_secs(1200), per_processor: 1 };

const FILES: &[&[Story]] = &[
    access::STORIES,
    certificates::STORIES,
    conformance::STORIES,
    control_plane::STORIES,
    drain::STORIES,
    registries::STORIES,
    rotation::STORIES,
    volumes::STORIES,
];

fn main() -> ExitCode {
    polis_tests::main(SUITE, FILES)
}
