//! The event lines that a serial log gets from now on.

use std::fs::File;
use std::io::{BufRead as _, BufReader, Seek as _, SeekFrom};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use polis_qemu::Event;

use crate::host::Late;

/// Between two reads of the end of the log.
const LOOK: Duration = Duration::from_millis(200);

/// A position in a log that grows.
#[derive(Debug)]
pub(crate) struct Tail {
    log: PathBuf,
    at: u64,
    reader: Option<BufReader<File>>,
    /// A line that has no end yet.
    line: Vec<u8>,
}

impl Tail {
    /// The present end of a log, which need not exist yet.
    pub(crate) fn at_end(log: &Path) -> Self {
        let at = std::fs::metadata(log).map_or(0, |log| log.len());
        Self { log: log.to_owned(), at, reader: None, line: Vec::new() }
    }

    /// After the log's last report that its node is ready: the lines of this boot about the
    /// node's roles follow it. The present end where there is none.
    pub(crate) fn after_ready(log: &Path) -> Self {
        const READY: &[u8] = b"POLIS ready ";
        let bytes = std::fs::read(log).unwrap_or_default();
        let at = bytes.windows(READY.len()).rposition(|window| window == READY);
        let at = at.unwrap_or(bytes.len()) as u64;
        Self { at, ..Self::at_end(log) }
    }

    /// The next event that `wanted` accepts.
    ///
    /// # Errors
    ///
    /// When there is none within `patience`; a guru meditation, and the end of the machine,
    /// end the wait at once.
    pub(crate) fn next_event(
        &mut self,
        patience: Duration,
        wanted: impl Fn(&Event) -> bool,
    ) -> Result<Event> {
        let deadline = Instant::now() + patience;
        loop {
            if let Some(event) = self.read()? {
                if wanted(&event) {
                    return Ok(event);
                }
                if event.word == "guru" || event.word == "off" {
                    bail!("the node stopped: {event}");
                }
            } else if Instant::now() > deadline {
                return Err(Late(format!("nothing within {} s", patience.as_secs())).into());
            } else {
                thread::sleep(LOOK);
            }
        }
    }

    /// The event of the next line that has one; `None` at the present end.
    ///
    /// # Errors
    ///
    /// When the log cannot be read.
    pub(crate) fn read(&mut self) -> Result<Option<Event>> {
        let path = self.log.display();
        let reader = match &mut self.reader {
            Some(reader) => reader,
            none => {
                let Ok(mut file) = File::open(&self.log) else { return Ok(None) };
                file.seek(SeekFrom::Start(self.at))
                    .with_context(|| format!("cannot read {path}"))?;
                none.insert(BufReader::new(file))
            }
        };
        loop {
            // Bytes, since a firmware may print what is not UTF-8.
            reader
                .read_until(b'\n', &mut self.line)
                .with_context(|| format!("cannot read {path}"))?;
            if !self.line.ends_with(b"\n") {
                return Ok(None);
            }
            let text = String::from_utf8_lossy(&std::mem::take(&mut self.line)).into_owned();
            let event = text
                .find("POLIS ")
                .and_then(|at| Event::parse(text[at..].trim_end(), Duration::ZERO));
            if event.is_some() {
                return Ok(event);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{self, OpenOptions};
    use std::io::Write as _;

    use super::*;

    #[test]
    fn events_after_the_start_are_read_in_order_and_an_unfinished_line_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("serial.log");
        fs::write(&log, "POLIS workload part=all state=ready t=1\n").unwrap();
        let mut tail = Tail::at_end(&log);
        let mut file = OpenOptions::new().append(true).open(&log).unwrap();
        file.write_all(b"\xff noise\nPOLIS workload part=a state=ready t=2\nPOLIS workl").unwrap();
        let next = |tail: &mut Tail| tail.next_event(Duration::ZERO, |_any| true);
        assert_eq!(next(&mut tail).unwrap().get("part"), Some("a"));
        assert!(next(&mut tail).is_err());
        file.write_all(b"oad part=b state=ready t=3\nPOLIS off reason=reboot t=4\n").unwrap();
        let b = tail.next_event(Duration::ZERO, |event| event.word == "workload").unwrap();
        assert_eq!(b.get("part"), Some("b"));
        let stopped = tail.next_event(Duration::ZERO, |event| event.word == "workload");
        let stopped = stopped.unwrap_err().to_string();
        assert!(stopped.contains("reboot"), "{stopped}");
    }
}
