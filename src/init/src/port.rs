//! The serial port, written without ever waiting for it.
//!
//! `init` is the only writer: `node` hands its lines to `init`, and the kernel is
//! silenced except for a panic.

use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use polis_base::serial::{EventLine, Severity, log_line};
use polis_base::sys::clock;
use polis_base::sys::poll::{self, Interest};
use polis_base::sys::terminal::{Mode, Terminal};

use super::relay::Relay;

/// The port that the contract names.
pub const PATH: &str = "/dev/ttyS0";

/// The longest time for the driver to send a full buffer: 4 KiB at 115,200 baud. A port
/// that sends nothing for so long is considered dead.
const DRAIN_MAX: Duration = Duration::from_secs(1);
/// How long all pending output may take: a full buffer needs six seconds.
const DRAIN_ALL_MAX: Duration = Duration::from_secs(10);

/// The serial port; without one, its lines are only remembered.
#[derive(Debug, Default)]
pub struct Port {
    terminal: Option<Terminal>,
    relay: Relay,
}

impl Port {
    /// Opens the port. A machine without one works as well.
    pub fn open(&mut self) {
        self.terminal = Terminal::open(Path::new(PATH)).ok();
        if let Some(terminal) = &self.terminal {
            // Keys come one by one: someone may answer the guru from here.
            terminal.set_mode(Mode::Keys).ok();
        }
        self.flush();
    }

    /// Writes one line, as it is.
    pub fn line(&mut self, line: &str) {
        self.relay.put(clock::uptime(), line);
        self.flush();
    }

    /// Writes an event line that happened now.
    pub fn event(&mut self, line: EventLine) {
        self.line(&line.at(clock::uptime()).to_string());
    }

    /// Writes an event line that must be sent even if the port is far behind: the
    /// reason why the machine stops.
    pub fn force(&mut self, line: EventLine) {
        let now = clock::uptime();
        self.relay.force(now, &line.at(now).to_string());
        self.flush();
    }

    /// Writes a log line of `init`'s own.
    pub fn log(&mut self, severity: Severity, text: &str) {
        self.log_as(severity, "init", text);
    }

    /// Writes a log line under the name of another.
    pub fn log_as(&mut self, severity: Severity, name: &str, text: &str) {
        self.line(&log_line(clock::uptime(), severity, name, text));
    }

    /// Writes text that is not a whole line yet: the echo of typed keys. It is not
    /// remembered.
    pub fn echo(&mut self, text: &str) {
        self.relay.echo(text);
        self.flush();
    }

    /// The lines that were written last, the oldest first.
    pub fn kept(&self) -> impl DoubleEndedIterator<Item = &str> {
        self.relay.kept()
    }

    /// Stops writing lines while a screen is drawn on this port, or starts again.
    pub fn mute(&mut self, muted: bool) {
        self.relay.mute(muted);
    }

    /// Gives the port as many bytes as it accepts at once.
    pub fn flush(&mut self) {
        while !self.relay.pending().is_empty() {
            let Some(terminal) = &mut self.terminal else {
                let length = self.relay.pending().len();
                self.relay.written(clock::uptime(), length);
                continue;
            };
            match terminal.write(self.relay.pending()) {
                Ok(written) if written > 0 => self.relay.written(clock::uptime(), written),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                // A port without hardware: its lines go nowhere from now on.
                Ok(_) | Err(_) => self.terminal = None,
            }
        }
    }

    /// The descriptor to wait for, when lines wait for the port.
    #[must_use]
    pub fn waiting(&self) -> Option<BorrowedFd<'_>> {
        let terminal = self.terminal.as_ref()?;
        (!self.relay.pending().is_empty()).then(|| terminal.as_fd())
    }

    /// The descriptor on which keys arrive.
    #[must_use]
    pub fn keys(&self) -> Option<BorrowedFd<'_>> {
        self.terminal.as_ref().map(AsFd::as_fd)
    }

    /// The bytes typed at the other end. Never blocks.
    pub fn typed(&mut self) -> Vec<u8> {
        let mut buffer = [0; 64];
        match self.terminal.as_mut().map(|terminal| terminal.read(&mut buffer)) {
            Some(Ok(length)) if length > 0 => buffer[..length].to_vec(),
            // The end of the input is a port that has hung up.
            Some(Ok(_)) => {
                self.terminal = None;
                Vec::new()
            }
            Some(Err(_)) | None => Vec::new(),
        }
    }

    /// Waits until every line is sent, for a bounded time. The machine ends after it.
    pub fn drain(&mut self) {
        let until = clock::uptime() + DRAIN_ALL_MAX;
        loop {
            self.flush();
            let Some(left) = until.checked_sub(clock::uptime()) else { return };
            let Some(waiting) = self.waiting() else { break };
            match poll::wait(&[(waiting, Interest::Write)], Some(left.min(DRAIN_MAX))) {
                Ok(ready) if ready.contains(&true) => {}
                Ok(_) | Err(_) => return,
            }
        }
        // The driver still has some of it, and its own wait has no deadline.
        if let Some(Ok(file)) = self.terminal.as_ref().map(Terminal::try_clone_file) {
            let (done, drained) = mpsc::channel();
            let drain = move || {
                rustix::termios::tcdrain(&file).ok();
                done.send(()).ok();
            };
            if thread::Builder::new().name("drain".to_owned()).spawn(drain).is_ok() {
                drained.recv_timeout(DRAIN_MAX).ok();
            }
        }
    }
}
