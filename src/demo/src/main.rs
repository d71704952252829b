//! The demo workload: answers HTTP until it is asked to end.

use std::io;
use std::os::fd::AsFd as _;
use std::process::ExitCode;

use polis_base::sys::poll::{self, Interest};
use polis_base::sys::signal::Signals;
use polis_demo::{Facts, listen, serve};
use rustix::process::Signal;

fn main() -> ExitCode {
    // The runtime reports the status.
    if run().is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn run() -> io::Result<()> {
    // Before any thread: process 1 of a container gets only signals that it asks for.
    let signals = Signals::receive(&[Signal::TERM, Signal::INT])?;
    serve(listen()?, Facts::gather())?;
    while signals.next_signal()?.is_none() {
        poll::wait(&[(signals.as_fd(), Interest::Read)], None)?;
    }
    Ok(())
}
