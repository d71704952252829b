//! Starts `node`, and learns how processes ended. For the synchronous `init`
//! only; `node` starts its children through `sys::process`.

use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

use rustix::io::Errno;
use rustix::process::{Pid, WaitOptions};

use super::signal;

/// The descriptor on which a started program finds its control channel.
pub const CONTROL_FD: i32 = 3;

/// Reading ends of what a started program says, and the channel to it.
#[derive(Debug)]
pub struct Started {
    /// Its process.
    pub process: Pid,
    /// What it writes to its standard output.
    pub stdout: OwnedFd,
    /// What it writes to its standard error.
    pub stderr: OwnedFd,
    /// Our end of the channel.
    pub control: OwnedFd,
}

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// It returned this status.
    Status(i32),
    /// This signal killed it.
    Signal(i32),
}

/// Starts `program` with these variables and no others, with pipes on its
/// output and a channel of datagrams on [`CONTROL_FD`]. Our ends never block.
///
/// # Errors
///
/// When the program can't be started.
#[expect(unsafe_code, reason = "`pre_exec` runs code between fork and exec")]
#[expect(
    clippy::disallowed_methods,
    reason = "init starts one program and reaps in the same thread"
)]
pub fn start<K: AsRef<OsStr>, V: AsRef<OsStr>>(
    program: &Path,
    variables: impl IntoIterator<Item = (K, V)>,
) -> io::Result<Started> {
    let (control, theirs) = rustix::net::socketpair(
        rustix::net::AddressFamily::UNIX,
        rustix::net::SocketType::SEQPACKET,
        rustix::net::SocketFlags::CLOEXEC | rustix::net::SocketFlags::NONBLOCK,
        None,
    )?;
    let mut command = Command::new(program);
    command
        .env_clear()
        .envs(variables)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let their_fd = theirs.as_raw_fd();
    let prepare = move || {
        signal::unblock_all()?;
        pass_on(their_fd)
    };
    // SAFETY: `prepare` only makes system calls (sigprocmask, dup2, fcntl): it
    // neither allocates nor locks, as a child of a process with threads must not.
    unsafe { command.pre_exec(prepare) };
    let mut child = command.spawn()?;
    let lost = || io::Error::other("a pipe that was asked for is not there");
    let stdout = OwnedFd::from(child.stdout.take().ok_or_else(lost)?);
    let stderr = OwnedFd::from(child.stderr.take().ok_or_else(lost)?);
    rustix::io::ioctl_fionbio(&stdout, true)?;
    rustix::io::ioctl_fionbio(&stderr, true)?;
    let process = Pid::from_child(&child);
    Ok(Started { process, stdout, stderr, control })
}

/// Puts the child's end of the channel where it is to be found, open across exec.
#[expect(unsafe_code, reason = "dup2 onto a number that nobody owns")]
fn pass_on(descriptor: i32) -> io::Result<()> {
    let result = if descriptor == CONTROL_FD {
        // SAFETY: takes numbers; clears close-on-exec of an open descriptor.
        unsafe { libc::fcntl(CONTROL_FD, libc::F_SETFD, 0) }
    } else {
        // SAFETY: takes numbers. What was open at this number is one of ours,
        // and in the child nobody uses it any more.
        unsafe { libc::dup2(descriptor, CONTROL_FD) }
    };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// A child that has ended, if there is one: its own or an orphan. Never blocks.
#[must_use]
pub fn reap() -> Reaped {
    match rustix::process::wait(WaitOptions::NOHANG) {
        Ok(Some((process, status))) => {
            let ended = match (status.exit_status(), status.terminating_signal()) {
                (Some(code), _) => Ended::Status(code),
                (None, Some(signal)) => Ended::Signal(signal),
                // Stopped or continued: not asked for, so it can't be.
                (None, None) => return Reaped::NoneEnded,
            };
            Reaped::Ended(process, ended)
        }
        Ok(None) | Err(Errno::INTR) => Reaped::NoneEnded,
        Err(_) => Reaped::NoChildren,
    }
}

/// What [`reap`] found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reaped {
    /// This one had ended.
    Ended(Pid, Ended),
    /// There are children, and all of them run.
    NoneEnded,
    /// There are no children.
    NoChildren,
}
