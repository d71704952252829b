//! The thread that starts every child, and lives as long as the process.

use std::io;
use std::os::unix::process::CommandExt as _;
use std::sync::{Mutex, PoisonError, mpsc};

use rustix::process::{Signal, getpid, getppid, set_parent_process_death_signal};
use tokio::sync::oneshot;

use crate::sys::limits::Opened;

/// A request to the lasting thread to start a program.
struct Request {
    command: std::process::Command,
    limits: Opened,
    runtime: tokio::runtime::Handle,
    reply: oneshot::Sender<io::Result<tokio::process::Child>>,
}

/// Starts `command` from a thread that lives as long as the process.
///
/// The kernel sends the death signal when the *thread* that forked ends, and
/// the threads of a runtime come and go.
pub(super) async fn spawn(
    command: std::process::Command,
    limits: Opened,
) -> io::Result<tokio::process::Child> {
    let (reply, answer) = oneshot::channel();
    let request = Request { command, limits, runtime: tokio::runtime::Handle::current(), reply };
    hand_over(request)?;
    answer.await.map_err(|_closed| gone())?
}

/// Gives a request to the lasting thread; makes one if there is none, or none any more.
fn hand_over(request: Request) -> io::Result<()> {
    static REQUESTS: Mutex<Option<mpsc::Sender<Request>>> = Mutex::new(None);
    let mut requests = REQUESTS.lock().unwrap_or_else(PoisonError::into_inner);
    let request = match requests.as_ref() {
        None => request,
        Some(thread) => match thread.send(request) {
            Ok(()) => return Ok(()),
            Err(mpsc::SendError(request)) => request,
        },
    };
    let (thread, queue) = mpsc::channel::<Request>();
    let builder = std::thread::Builder::new().name("starter".to_owned()).stack_size(64 * 1024);
    builder.spawn(move || {
        for Request { command, limits, runtime, reply } in queue {
            let _in_runtime = runtime.enter();
            // The caller may have gone: then the child is dropped, and killed.
            let _child = reply.send(start(command, limits));
        }
    })?;
    thread.send(request).map_err(|_closed| gone())?;
    *requests = Some(thread);
    Ok(())
}

fn gone() -> io::Error {
    io::Error::other("the thread that starts processes is gone")
}

fn start(mut command: std::process::Command, limits: Opened) -> io::Result<tokio::process::Child> {
    let parent = getpid();
    let before_exec = move || {
        keep_standard_only()?;
        limits.apply()?;
        // After a change of the user, by which the kernel forgets the signal.
        set_parent_process_death_signal(Some(Signal::KILL))?;
        // The parent may have died before the death signal was set.
        if getppid() != Some(parent) {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        Ok(())
    };
    #[expect(unsafe_code, reason = "what runs between fork and exec cannot be set otherwise")]
    // SAFETY: the closure only makes system calls and allocates nothing, so it
    // may run in the child of a process with several threads.
    unsafe {
        command.pre_exec(before_exec);
    }
    let mut command = tokio::process::Command::from(command);
    command.kill_on_drop(true).spawn()
}

/// Has the kernel close all descriptors but the standard three when the program begins. Libraries
/// open some without `O_CLOEXEC`: `mozim` does so with the raw sockets of DHCP, by which a confined
/// program could send any packet.
fn keep_standard_only() -> io::Result<()> {
    const FIRST: libc::c_uint = 3;
    let flags = libc::CLOSE_RANGE_CLOEXEC.cast_signed();
    #[expect(unsafe_code, reason = "no crate has this call")]
    // SAFETY: it closes nothing, and takes numbers only.
    let ended = unsafe { libc::close_range(FIRST, libc::c_uint::MAX, flags) };
    if ended < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
