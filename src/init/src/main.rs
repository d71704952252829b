//! PID 1: starts the machine, outlives `node`, and writes the last line.

use std::process::ExitCode;

fn main() -> ExitCode {
    polis_init::main(std::env::args())
}
