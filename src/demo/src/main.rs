//! The demo workload: answers HTTP until it is asked to end; `demo get HOST:PORT` asks it, and
//! the other arguments try the limits of the pod.

use std::env;
use std::fs;
use std::io::{self, Write as _};
use std::os::fd::AsFd as _;
use std::path::Path;
use std::process::ExitCode;

use polis_base::sys::poll::{self, Interest};
use polis_base::sys::signal::Signals;
use polis_demo::{Facts, get, listen, serve, trial};
use rustix::process::Signal;

/// Where kubelet keeps the token of the service account of a pod.
const TOKEN: &str = "/var/run/secrets/kubernetes.io/serviceaccount/token";

fn main() -> ExitCode {
    let arguments: Vec<_> = env::args().skip(1).collect();
    let arguments: Vec<_> = arguments.iter().map(String::as_str).collect();
    let outcome = match *arguments.as_slice() {
        [] => run(),
        ["get", server] => get(server).and_then(print),
        ["token"] => header_of_token(Path::new(TOKEN)).and_then(print),
        ["read", file] => trial::read(Path::new(file)).and_then(print),
        [trial, ref rest @ .., number] => attempt(trial, rest, number).and_then(print),
        [_] => Err(usage()),
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

/// One trial up to this number.
fn attempt(trial: &str, rest: &[&str], number: &str) -> io::Result<String> {
    let number = || trial::number(number);
    match (trial, rest) {
        ("write", [file]) => trial::write(Path::new(file), number()?),
        ("allocate", [file]) => trial::allocate(Path::new(file), number()?),
        ("files", [directory]) => trial::files(Path::new(directory), number()?),
        ("memory", []) => Ok(trial::memory(number()?)),
        ("threads", []) => Ok(trial::threads(number()?)),
        _ => Err(usage()),
    }
}

fn usage() -> io::Error {
    io::Error::other(
        "usage: demo [get HOST:PORT | token | write FILE BYTES | read FILE | allocate FILE BYTES | \
         files DIRECTORY COUNT | memory BYTES | threads COUNT]",
    )
}

/// The header of a token (JWS), as it is there: it names the key that signed, and has no secret.
fn header_of_token(file: &Path) -> io::Result<String> {
    let token = fs::read_to_string(file)?;
    Ok(format!("{}\n", token.split('.').next().unwrap_or_default()))
}

fn print(text: String) -> io::Result<()> {
    io::stdout().write_all(text.as_bytes())
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
