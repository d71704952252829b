//! The reader of a guest's serial port: into memory and into a file, line by line.
//!
//! A thread reads until the port closes, which is when QEMU ends. All other threads
//! wait on its result, without polling.
//!
//! ```text
//! QEMU's standard output --> thread --+--> serial.log
//!                                     +--> Port: lines, closed
//! ```
//!
//! Invariants:
//! - A line is in the file before any waiter receives it, so the file of a failed story
//!   holds the line that it failed on.
//! - Memory is bounded: a line is cut at [`LINE_MAX`], and past [`LINES_MAX`]
//!   lines only the file grows.

use std::fs::File;
use std::io::{self, Read, Write};
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::line::{Line, clean};

/// Longer than any event line: 16 KiB is the most that crosses the node's control channel.
const LINE_MAX: usize = 64 * 1024;

/// A boot prints some hundreds of lines; a guest that prints this many is in a loop.
const LINES_MAX: usize = 200_000;

/// The lines read so far. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct Port(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    lines: Vec<Line>,
    closed: bool,
}

/// The result of [`Port::next`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Next {
    /// The line at that place.
    Line(Line),
    /// The line did not come in time.
    Late,
    /// The port is closed: the line will never come.
    Closed,
}

impl Port {
    /// Starts to read `source`; `started` is the time of QEMU's start.
    ///
    /// # Errors
    /// When the log file cannot be made.
    pub fn open(
        source: impl Read + Send + 'static,
        log: &Path,
        started: Instant,
    ) -> io::Result<Self> {
        let mut log = File::options().create(true).append(true).open(log)?;
        let port = Self::default();
        let writer = port.clone();
        thread::Builder::new().name("serial".to_owned()).spawn(move || {
            writer.read(source, &mut log, started);
            writer.state().closed = true;
            writer.0.changed.notify_all();
        })?;
        Ok(port)
    }

    fn read(&self, mut source: impl Read, log: &mut File, started: Instant) {
        let mut pending = Vec::new();
        let mut chunk = [0; 4096];
        loop {
            let count = match source.read(&mut chunk) {
                Ok(0) => break,
                Ok(count) => count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(_closed) => break,
            };
            let at = started.elapsed();
            for &byte in &chunk[..count] {
                if byte == b'\n' || pending.len() == LINE_MAX {
                    self.put(Line { at, text: clean(&pending) }, log);
                    pending.clear();
                }
                if byte != b'\n' {
                    pending.push(byte);
                }
            }
        }
        if !pending.is_empty() {
            self.put(Line { at: started.elapsed(), text: clean(&pending) }, log);
        }
    }

    fn put(&self, line: Line, log: &mut File) {
        // A full host disk must not end the machine; the lines stay in memory.
        let _written = writeln!(log, "{}", line.text);
        let mut state = self.state();
        if state.lines.len() < LINES_MAX {
            state.lines.push(line);
            drop(state);
            self.0.changed.notify_all();
        }
    }

    /// Adds lines that came at another port, before the first line of this one.
    pub(crate) fn restore_lines<'a>(&self, lines: impl Iterator<Item = &'a str>) {
        let lines = lines.map(|text| Line { at: Duration::ZERO, text: text.to_owned() });
        self.state().lines.extend(lines.take(LINES_MAX));
    }

    /// Waits until `deadline` for the line at place `index`, counted from 0.
    #[must_use]
    pub fn next(&self, index: usize, deadline: Instant) -> Next {
        let mut state = self.state();
        loop {
            if let Some(line) = state.lines.get(index) {
                return Next::Line(line.clone());
            }
            if state.closed {
                return Next::Closed;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left == Duration::ZERO {
                return Next::Late;
            }
            let waited = self.0.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Every line from place `index` on.
    #[must_use]
    pub fn lines(&self, index: usize) -> Vec<Line> {
        self.state().lines.get(index..).unwrap_or_default().to_vec()
    }

    /// How many lines there are.
    #[must_use]
    pub fn count(&self) -> usize {
        self.state().lines.len()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // The state is consistent between any two statements: a panic elsewhere does no
        // harm.
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream;

    const SOON: Duration = Duration::from_secs(10);

    fn port() -> (UnixStream, Port, tempfile::TempDir) {
        let (write, read) = UnixStream::pair().unwrap();
        let dir = tempfile::tempdir().unwrap();
        let port = Port::open(read, &dir.path().join("serial.log"), Instant::now()).unwrap();
        (write, port, dir)
    }

    fn text(port: &Port, index: usize) -> String {
        match port.next(index, Instant::now() + SOON) {
            Next::Line(line) => line.text,
            other => format!("{other:?}"),
        }
    }

    #[test]
    fn a_waiter_gets_lines_in_order_and_then_the_end() {
        let (mut guest, port, dir) = port();
        guest.write_all(b"one\r\ntwo\nhal").unwrap();
        assert_eq!(text(&port, 0), "one");
        assert_eq!(text(&port, 1), "two");
        guest.write_all(b"f").unwrap();
        drop(guest);
        assert_eq!(text(&port, 2), "half");
        assert_eq!(port.next(3, Instant::now() + SOON), Next::Closed);
        let log = std::fs::read_to_string(dir.path().join("serial.log")).unwrap();
        assert_eq!(log, "one\ntwo\nhalf\n");
    }

    #[test]
    fn a_silent_port_is_late_at_the_deadline() {
        let (_guest, port, _dir) = port();
        assert_eq!(port.next(0, Instant::now()), Next::Late);
    }

    #[test]
    fn an_endless_line_is_cut() {
        let (mut guest, port, _dir) = port();
        guest.write_all(&vec![b'x'; LINE_MAX + 1]).unwrap();
        drop(guest);
        assert_eq!(text(&port, 0).len(), LINE_MAX);
        assert_eq!(text(&port, 1).len(), 1);
    }
}
