//! The node: every service of a machine under one supervision tree.

use std::process::ExitCode;

fn main() -> ExitCode {
    polis_node::daemon::main()
}
