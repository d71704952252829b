//! PID 1: starts the machine, outlives `node`, and has the last word.

use std::process::ExitCode;

fn main() -> ExitCode {
    polis_init::main(std::env::args())
}
