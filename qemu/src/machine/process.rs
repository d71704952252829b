//! The process of a machine: QEMU under `setpriv`, and the sockets to which it connects.

use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Child, Command};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::error::Error;
use crate::deadline::Deadline;
use crate::host::QEMU;

/// QEMU opens its sockets before it builds the machine; a busy host delays even that.
const START_MAX: Duration = Duration::from_secs(60);

/// QEMU under `setpriv`, which asks the kernel to kill it when the thread that
/// started it dies: a test that is killed leaves no machine behind. `setpriv`
/// belongs to util-linux, which every Debian has, and becomes QEMU itself.
#[expect(clippy::disallowed_methods, reason = "the rule is for the node; this runs on the host")]
pub(crate) fn command() -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL", "--", QEMU]);
    command
}

pub(crate) fn listen(path: &Path) -> Result<UnixListener, Error> {
    UnixListener::bind(path)
        .map_err(|source| Error::Host { doing: format!("listen on {}", path.display()), source })
}

/// Takes the connection that QEMU makes while it starts.
pub(crate) fn accept(listener: &UnixListener, child: &mut Child) -> Result<UnixStream, Error> {
    /// How often the child is checked: it may die without ever connecting.
    const LOOK: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };
    let mut deadline = Deadline::within(START_MAX);
    let host = |source| Error::Host { doing: "connect to QEMU".to_owned(), source };
    loop {
        let mut fds = [PollFd::new(listener, PollFlags::IN)];
        match poll(&mut fds, Some(&LOOK)) {
            Ok(0) | Err(rustix::io::Errno::INTR) => {}
            Ok(_) => return listener.accept().map(|(stream, _)| stream).map_err(host),
            Err(error) => return Err(host(error.into())),
        }
        let ended = child.try_wait().map_err(host)?;
        if ended.is_some() || deadline.is_over() {
            let output = match ended {
                Some(status) => status.to_string(),
                None => format!("no connection within {START_MAX:?}"),
            };
            return Err(Error::Refused { output });
        }
    }
}

/// Kills the child if it still runs, and returns how it ended.
pub(crate) fn end(child: &mut Child) -> String {
    // Fails only if it has already ended.
    let _killed = child.kill();
    child.wait().map_or_else(|error| error.to_string(), |status| status.to_string())
}
