//! PID 1: starts the machine, outlives `node`, and has the last word.

fn main() {}
