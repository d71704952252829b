//! The pause container: the first process of a pod, whose namespaces live as long as it.
//!
//! In a pod whose containers share their processes it is process 1, and reaps orphans.
//! Process 1 of a namespace gets only the signals that it asks for: without SIGTERM, each
//! deletion of a pod would wait for its whole grace period.

use std::io;
use std::os::fd::AsFd as _;
use std::process::ExitCode;

use polis_base::sys::poll::{self, Interest};
use polis_base::sys::signal::Signals;
use polis_base::sys::spawn::{Reaped, reap};
use rustix::process::Signal;

fn main() -> ExitCode {
    // The runtime reports the status; a container without a terminal has no other voice.
    if run().is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Sleeps until the runtime asks it to end.
fn run() -> io::Result<()> {
    let signals = Signals::receive(&[Signal::TERM, Signal::INT, Signal::CHILD])?;
    loop {
        // One signal stands for all children that ended before it was taken.
        while let Reaped::Ended(..) = reap() {}
        match signals.next_signal()? {
            Some(number) if number != Signal::CHILD.as_raw() => return Ok(()),
            Some(_) => {}
            None => {
                poll::wait(&[(signals.as_fd(), Interest::Read)], None)?;
            }
        }
    }
}
