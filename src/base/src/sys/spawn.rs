//! The start of `node`, and the reaping of processes. For the synchronous `init` only;
//! `node` starts its children through `sys::process`.

use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

use rustix::io::Errno;
use rustix::pipe::PipeFlags;
use rustix::process::{Pid, WaitOptions};

use super::signal;

/// The descriptor on which a started program finds its control channel.
pub const CONTROL_FD: i32 = 3;

/// The descriptor on which it finds a secret, if it is given one: the end of a pipe
/// that already holds all of it.
pub const SECRET_FD: i32 = 4;
/// Descriptors on their way to those numbers are above them.
const PASSED_MIN: i32 = 10;

/// The reading ends of a started program's output, and the channel to it.
#[derive(Debug)]
pub struct Started {
    /// Its process.
    pub process: Pid,
    /// Its standard output.
    pub stdout: OwnedFd,
    /// Its standard error.
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

/// Starts `program` with only these variables, with pipes on its output, a channel of
/// datagrams on [`CONTROL_FD`] and `secret`, if present, on [`SECRET_FD`]. Our ends
/// never block.
///
/// # Errors
///
/// When the program can't be started.
#[expect(unsafe_code, reason = "`pre_exec` runs code between fork and exec")]
#[expect(
    clippy::disallowed_methods,
    reason = "init starts one program, and waits for its start before it reaps"
)]
pub fn start<K: AsRef<OsStr>, V: AsRef<OsStr>>(
    program: &Path,
    variables: impl IntoIterator<Item = (K, V)>,
    secret: Option<&[u8]>,
) -> io::Result<Started> {
    let (control, theirs) = rustix::net::socketpair(
        rustix::net::AddressFamily::UNIX,
        rustix::net::SocketType::SEQPACKET,
        rustix::net::SocketFlags::CLOEXEC | rustix::net::SocketFlags::NONBLOCK,
        None,
    )?;
    // Neither descriptor takes the place of the other on the way to its number.
    let theirs = rustix::io::fcntl_dupfd_cloexec(&theirs, PASSED_MIN)?;
    let secret = secret.map(held).transpose()?;
    let mut command = Command::new(program);
    command
        .env_clear()
        .envs(variables)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let their_fd = theirs.as_raw_fd();
    let secret_fd = secret.as_ref().map(AsRawFd::as_raw_fd);
    let prepare = move || {
        signal::unblock_all()?;
        pass_on(their_fd, CONTROL_FD)?;
        secret_fd.map_or(Ok(()), |descriptor| pass_on(descriptor, SECRET_FD))
    };
    // SAFETY: `prepare` only makes system calls (sigprocmask, dup2, fcntl): it
    // neither allocates nor locks, as a child of a process with threads must not.
    unsafe { command.pre_exec(prepare) };
    let mut child = command.spawn()?;
    let lost = || io::Error::other("a pipe that was requested is not there");
    let stdout = OwnedFd::from(child.stdout.take().ok_or_else(lost)?);
    let stderr = OwnedFd::from(child.stderr.take().ok_or_else(lost)?);
    rustix::io::ioctl_fionbio(&stdout, true)?;
    rustix::io::ioctl_fionbio(&stderr, true)?;
    let process = Pid::from_child(&child);
    Ok(Started { process, stdout, stderr, control })
}

/// A pipe that holds `secret` and whose writing end is closed.
fn held(secret: &[u8]) -> io::Result<OwnedFd> {
    let (reader, writer) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?;
    // Both ends are ours, and an empty pipe has room for 64 KiB.
    let written = rustix::io::write(&writer, secret)?;
    if written < secret.len() {
        return Err(io::ErrorKind::WriteZero.into());
    }
    Ok(rustix::io::fcntl_dupfd_cloexec(&reader, PASSED_MIN)?)
}

/// Puts `descriptor` where the child is to find it, open across exec.
#[expect(unsafe_code, reason = "dup2 onto an unused number")]
fn pass_on(descriptor: i32, number: i32) -> io::Result<()> {
    // SAFETY: takes numbers, which differ by `PASSED_MIN`. A descriptor open at this
    // number belongs to this program, and the child does not use it any more.
    let result = unsafe { libc::dup2(descriptor, number) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// A child that has ended, if any: its own or an orphan. Never blocks.
#[must_use]
pub fn reap() -> Reaped {
    match rustix::process::wait(WaitOptions::NOHANG) {
        Ok(Some((process, status))) => {
            let ended = match (status.exit_status(), status.terminating_signal()) {
                (Some(code), _) => Ended::Status(code),
                (None, Some(signal)) => Ended::Signal(signal),
                // Stopped or continued: not requested, so it cannot occur.
                (None, None) => return Reaped::NoneEnded,
            };
            Reaped::Ended(process, ended)
        }
        Ok(None) | Err(Errno::INTR) => Reaped::NoneEnded,
        Err(_) => Reaped::NoChildren,
    }
}

/// The result of [`reap`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reaped {
    /// This one had ended.
    Ended(Pid, Ended),
    /// There are children, and all of them run.
    NoneEnded,
    /// All children were reaped.
    NoChildren,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_arrives_whole_on_its_number_and_is_at_its_end_then() {
        let cat = tempfile::tempdir().unwrap();
        let program = cat.path().join("program");
        let script = "#!/bin/sh\ncat <&4\necho; readlink /proc/self/fd/3\n";
        std::fs::write(&program, script).unwrap();
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        std::fs::set_permissions(&program, mode).unwrap();
        let variables = [("PATH", "/usr/bin:/bin")];
        let started = start(&program, variables, Some(b"ABCD-EFGH")).unwrap();
        rustix::io::ioctl_fionbio(&started.stdout, false).unwrap();
        let mut said = String::new();
        io::Read::read_to_string(&mut std::fs::File::from(started.stdout), &mut said).unwrap();
        let (secret, channel) = said.split_once('\n').unwrap();
        assert_eq!(secret, "ABCD-EFGH");
        assert!(channel.starts_with("socket:"), "{channel}");
        rustix::process::waitpid(Some(started.process), WaitOptions::empty()).unwrap();
    }
}
