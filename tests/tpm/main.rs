//! The TPM code of the node against an emulated TPM, without a machine.
//!
//! `cargo xtask test` provides `swtpm`.
#![expect(clippy::unwrap_used, reason = "a story fails where something else came")]

mod attesting;
mod bus;
mod sealing;
mod signed;

use std::process::ExitCode;
use std::time::Duration;

use polis_tests::{Story, Suite};

const SUITE: Suite =
    Suite { name: "tpm", retries: 0, deadline: Duration::from_secs(120), per_processor: 1 };

const FILES: &[&[Story]] = &[sealing::STORIES, signed::STORIES, attesting::STORIES];

fn main() -> ExitCode {
    polis_tests::main(SUITE, FILES)
}
