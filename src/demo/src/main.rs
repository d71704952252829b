//! The demo workload: answers HTTP until it is asked to end; `demo get HOST:PORT` asks it.

use std::env;
use std::io::{self, Write as _};
use std::os::fd::AsFd as _;
use std::process::ExitCode;

use polis_base::sys::poll::{self, Interest};
use polis_base::sys::signal::Signals;
use polis_demo::{Facts, get, listen, serve};
use rustix::process::Signal;

fn main() -> ExitCode {
    let arguments: Vec<_> = env::args().skip(1).collect();
    let arguments: Vec<_> = arguments.iter().map(String::as_str).collect();
    let outcome = match *arguments.as_slice() {
        [] => run(),
        ["get", server] => get(server).and_then(|answer| io::stdout().write_all(answer.as_bytes())),
        _ => Err(io::Error::other("usage: demo [get HOST:PORT]")),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Into the log of the container.
            let _closed = writeln!(io::stderr(), "demo: {error}");
            ExitCode::FAILURE
        }
    }
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
