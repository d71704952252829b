//! A running machine: a QEMU child, its serial port, its protocol, its console.
//!
//! ```text
//! start --> [running] --wait_for*--> [running] --kill, quit, off--> [ended]
//!                |                                                     ^
//!                +------------------- dropped --------------------------+
//! ```
//!
//! Waiting goes forward only: each line is looked at once, in the order in which the
//! guest wrote it, so the lines of a second boot are never mixed up with the first.
//! [`Machine::seen`] still returns lines that a wait passed over. A wait ends by the
//! clock of [`crate::deadline`], which leaves out time that the host gave to other
//! work.
//!
//! Invariants:
//! - A machine ends when its value is dropped, or when this process dies, and never
//!   affects another process: only its own child is signalled.
//! - A wait fails at once when its line can no longer come: the firmware gave up, the
//!   kernel panicked, the trapdoor opened, QEMU ended.
//! - A failure names the awaited line, the guest's last lines, and the path of the
//!   whole log.

mod error;
mod process;

use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::{self, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use crate::args::{Config, Sockets, argv};
use crate::deadline::Deadline;
use crate::host::QEMU;
use crate::line::{Event, Line, NOT_STARTED, fatal};
use crate::processor;
use crate::qmp;
use crate::scratch::Scratch;
use crate::screen::Picture;
use crate::serial::{Next, Port};
use crate::tpm::{SWTPM, Tpm};

pub(crate) use self::error::DEADLINE;
pub use self::error::{Error, Outcome};
pub(crate) use self::process::{accept, command, end, listen};

/// How many of the guest's last lines a failure shows.
const LAST_LINES: usize = 20;

/// A guest that is silent for so long, before a deadline, is considered dead.
const SILENCE: Duration = Duration::from_secs(60);

/// A running machine.
#[derive(Debug)]
pub struct Machine {
    child: Child,
    /// The machine protocol, for commands without a method here.
    pub qmp: qmp::Client,
    port: Port,
    console: Option<UnixStream>,
    /// Held, and never read.
    _unread: Option<UnixStream>,
    dir: PathBuf,
    started: Instant,
    /// The next line that a wait reads.
    cursor: usize,
    /// The first line since the machine was reset last.
    epoch: usize,
    /// Whether firmware has another disk to turn to.
    has_second_disk: bool,
    /// Ends with the machine.
    _tpm: Option<Tpm>,
    /// Holds the sockets.
    _sockets: Scratch,
}

impl Machine {
    /// Starts a machine. Its logs and pictures go to `dir`, which is made:
    /// `serial.log` (appended to), `qemu.log`, `command`.
    ///
    /// # Errors
    /// When QEMU is missing, refuses its arguments, or dies at once.
    pub fn start(config: &Config, dir: &Path) -> Result<Self, Error> {
        let host = |doing: String| move |source| Error::Host { doing, source };
        fs::create_dir_all(dir).map_err(host(format!("make {}", dir.display())))?;
        let runtime = Scratch::new().map_err(host("make a folder for sockets".to_owned()))?;
        let socket = |name| runtime.path().join(name);
        let sockets = Sockets {
            qmp: socket("qmp"),
            console: socket("console"),
            unread_port: socket("port"),
            tpm: socket("tpm"),
        };
        let qmp = listen(&sockets.qmp)?;
        let console = config.console.then(|| listen(&sockets.console)).transpose()?;
        let port = config.unread_port.then(|| listen(&sockets.unread_port)).transpose()?;
        let tpm = config.tpm.as_ref().map(|state| Tpm::for_machine(state, &sockets.tpm));
        let tpm = tpm.transpose().map_err(host(format!("start {SWTPM}")))?;

        let args = argv(config, &sockets);
        let mut shown = QEMU.to_owned();
        args.iter().for_each(|arg| {
            let _infallible = write!(shown, " {:?}", arg.display().to_string());
        });
        let file = dir.join("command");
        fs::write(&file, shown + "\n").map_err(host(format!("write {}", file.display())))?;
        let log = dir.join("qemu.log");
        let stderr = File::create(&log).map_err(host(format!("make {}", log.display())))?;

        let started = Instant::now();
        let mut child = command()
            .args(args)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(stderr)
            .spawn()
            .map_err(host(format!("start {QEMU}")))?;
        let connected = accept(&qmp, &mut child).and_then(|qmp| {
            let console = console.map(|console| accept(&console, &mut child)).transpose()?;
            let port = port.map(|port| accept(&port, &mut child)).transpose()?;
            Ok((qmp::Client::new(qmp)?, console, port))
        });
        let (qmp, console, unread) = match connected {
            Ok(channels) => channels,
            Err(error) => {
                end(&mut child);
                // A QEMU that dies while it starts prints the reason, which is the
                // better error.
                let output = fs::read_to_string(&log).unwrap_or_default().trim().to_owned();
                return Err(if output.is_empty() { error } else { Error::Refused { output } });
            }
        };
        // Piped above, so it is there.
        let stdout = child.stdout.take().ok_or_else(|| io::ErrorKind::BrokenPipe.into());
        let port = stdout
            .and_then(|stdout| Port::open(stdout, &dir.join("serial.log"), started))
            .map_err(host(format!("log the serial port to {}", dir.display())))?;
        Ok(Self {
            child,
            qmp,
            port,
            console,
            _unread: unread,
            dir: dir.to_owned(),
            started,
            cursor: 0,
            epoch: 0,
            has_second_disk: config.second_disk.is_some(),
            _tpm: tpm,
            _sockets: runtime,
        })
    }

    /// Puts lines before the first: the output of the saved machine.
    pub(crate) fn restore_lines<'a>(&mut self, lines: impl Iterator<Item = &'a str>) {
        self.port.restore_lines(lines);
        self.cursor = self.port.count();
    }

    /// Waits for an event line `POLIS word` for which `matches` holds.
    ///
    /// # Errors
    /// When it does not come within `within`, or can no longer come.
    pub fn wait_for(
        &mut self,
        word: &str,
        within: Duration,
        matches: impl Fn(&Event) -> bool,
    ) -> Result<Event, Error> {
        let what = format!("`POLIS {word}` with the right fields");
        self.wait(&what, within, |line| {
            line.event().filter(|event| event.word == word && matches(event))
        })
    }

    /// Waits for any line that contains `text`.
    ///
    /// # Errors
    /// When it does not come within `within`, or can no longer come.
    pub fn wait_for_text(&mut self, text: &str, within: Duration) -> Result<Line, Error> {
        let what = format!("a line with `{text}`");
        self.wait(&what, within, |line| line.text.contains(text).then(|| line.clone()))
    }

    /// Pushes the reset button.
    ///
    /// # Errors
    /// When QEMU is gone.
    pub fn reset(&mut self) -> Result<(), Error> {
        self.epoch = self.port.count();
        Ok(self.qmp.reset()?)
    }

    /// Waits until a line that contains `text` has come, now or earlier, but
    /// since the last [`Machine::reset`].
    ///
    /// # Errors
    /// When it has not come within `within`, or can no longer come.
    pub fn wait_until_text(&mut self, text: &str, within: Duration) -> Result<(), Error> {
        if self.port.lines(self.epoch).iter().any(|line| line.text.contains(text)) {
            return Ok(());
        }
        self.wait_for_text(text, within).map(drop)
    }

    /// Waits for the first line for which `pick` returns a value.
    ///
    /// # Errors
    /// When the line does not come within `within`, or can no longer come.
    pub fn wait<T>(
        &mut self,
        what: &str,
        within: Duration,
        pick: impl Fn(&Line) -> Option<T>,
    ) -> Result<T, Error> {
        let mut deadline = Deadline::within(within);
        loop {
            // Late at once where the deadline has come.
            let look = deadline.look().unwrap_or_else(Instant::now);
            let line = match self.port.next(self.cursor, look) {
                Next::Line(line) => line,
                Next::Late if !deadline.is_over() => continue,
                Next::Late => {
                    let outcome = self.lateness(within);
                    return Err(self.failed(what, outcome));
                }
                Next::Closed => {
                    let status = end(&mut self.child);
                    return Err(self.failed(what, Outcome::Ended { status }));
                }
            };
            self.cursor += 1;
            if let Some(picked) = pick(&line) {
                return Ok(picked);
            }
            let turns = self.has_second_disk && line.text.contains(NOT_STARTED);
            if let Some(outcome) = hopeless(&line).filter(|_outcome| !turns) {
                return Err(self.failed(what, outcome));
            }
        }
    }

    /// The next line; `None` after `within`, by the wall clock, or at the end of the
    /// machine.
    pub fn next_line(&mut self, within: Duration) -> Option<Line> {
        match self.port.next(self.cursor, Instant::now() + within) {
            Next::Line(line) => {
                self.cursor += 1;
                Some(line)
            }
            Next::Late | Next::Closed => None,
        }
    }

    fn lateness(&self, within: Duration) -> Outcome {
        let last = self.port.lines(0).last().map_or(Duration::ZERO, |line| line.at);
        let silent = self.started.elapsed().saturating_sub(last);
        if silent >= SILENCE {
            Outcome::Silent { silent }
        } else {
            Outcome::Late { within, silent }
        }
    }

    fn failed(&self, what: &str, outcome: Outcome) -> Error {
        let lines = self.port.lines(0);
        Error::Wait {
            what: what.to_owned(),
            outcome,
            last: summary(&lines[..self.cursor.min(lines.len())]),
            log: self.log().display().to_string(),
        }
    }

    /// Every event line so far for which `matches` holds, also those that waits passed over.
    #[must_use]
    pub fn seen(&self, matches: impl Fn(&Event) -> bool) -> Vec<Event> {
        self.port.lines(0).iter().filter_map(Line::event).filter(matches).collect()
    }

    /// Every line so far.
    #[must_use]
    pub fn lines(&self) -> Vec<Line> {
        self.port.lines(0)
    }

    /// The file with all lines.
    #[must_use]
    pub fn log(&self) -> PathBuf {
        self.dir.join("serial.log")
    }

    /// The time at which QEMU was started: the times of lines count from it.
    #[must_use]
    pub fn started(&self) -> Instant {
        self.started
    }

    /// The processor time that QEMU has used so far.
    #[must_use]
    pub fn processor_time(&self) -> Option<Duration> {
        processor::time(self.child.id())
    }

    /// Types at the serial port.
    ///
    /// # Errors
    /// When QEMU is gone.
    pub fn type_serial(&mut self, text: &str) -> Result<(), Error> {
        let typed = self.child.stdin.as_mut().ok_or_else(|| io::ErrorKind::BrokenPipe.into());
        typed
            .and_then(|stdin| stdin.write_all(text.as_bytes()))
            .map_err(|source| Error::Host { doing: "type at the serial port".to_owned(), source })
    }

    /// The other end of the guest's `hvc0`, once.
    pub fn take_console(&mut self) -> Option<UnixStream> {
        self.console.take()
    }

    /// The current content of the screen; also kept as `name.png` beside the logs.
    ///
    /// # Errors
    /// When the machine has no screen, or the file cannot be written.
    pub fn picture(&mut self, name: &str) -> Result<Picture, Error> {
        let absolute = std::path::absolute(&self.dir)
            .map_err(|source| Error::Host { doing: "find the logs' folder".to_owned(), source })?;
        self.qmp.screendump(&absolute.join(format!("{name}.png")), "png")?;
        let pixels = absolute.join(format!("{name}.ppm"));
        self.qmp.screendump(&pixels, "ppm")?;
        let picture = Picture::read(&pixels)
            .map_err(|source| Error::Host { doing: "read the screen".to_owned(), source });
        // The same picture as the PNG, and a hundred times its size.
        let _removed = fs::remove_file(&pixels);
        picture
    }

    /// Waits until QEMU has ended by itself, as after a power-off.
    ///
    /// # Errors
    /// When it has not ended within `within`.
    pub fn wait_end(&mut self, within: Duration) -> Result<ExitStatus, Error> {
        let mut deadline = Deadline::within(within);
        loop {
            let look = deadline.look().unwrap_or_else(Instant::now);
            match self.port.next(self.cursor, look) {
                Next::Line(_) => self.cursor += 1,
                Next::Closed => break,
                Next::Late if !deadline.is_over() => {}
                Next::Late => {
                    let outcome = self.lateness(within);
                    return Err(self.failed("the end of the machine", outcome));
                }
            }
        }
        // The port closes with the process: this returns at once.
        self.child
            .wait()
            .map_err(|source| Error::Host { doing: "wait for QEMU".to_owned(), source })
    }

    /// How QEMU ended, if it has ended.
    ///
    /// # Errors
    /// When the system does not say.
    pub fn ended(&mut self) -> Result<Option<ExitStatus>, Error> {
        self.child
            .try_wait()
            .map_err(|source| Error::Host { doing: "ask for the state of QEMU".to_owned(), source })
    }

    /// Cuts the power: the guest gets no chance to do anything.
    pub fn kill(mut self) {
        end(&mut self.child);
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        end(&mut self.child);
    }
}

/// Whether this line rules out every event that a story waits for.
fn hopeless(line: &Line) -> Option<Outcome> {
    if let Some(why) = fatal(&line.text) {
        return Some(Outcome::Fatal { why, line: line.text.clone() });
    }
    match line.event()?.word.as_str() {
        "guru" => Some(Outcome::Guru { line: line.text.clone() }),
        "off" => Some(Outcome::Off { line: line.text.clone() }),
        _ => None,
    }
}

/// The last event of each word (of each name, for those that have one), then the last lines.
fn summary(lines: &[Line]) -> String {
    let mut latest: Vec<Event> = Vec::new();
    for event in lines.iter().filter_map(Line::event) {
        latest.retain(|old| old.word != event.word || old.get("name") != event.get("name"));
        latest.push(event);
    }
    let mut text = String::from("last status:\n");
    for event in &latest {
        let _infallible = writeln!(text, "  {event}");
    }
    text.push_str("last lines:\n");
    for line in &lines[lines.len().saturating_sub(LAST_LINES)..] {
        let _infallible = writeln!(text, "  {line}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::{Accelerator, Firmware, Network, Screen};

    fn line(text: &str) -> Line {
        Line { at: Duration::from_secs(1), text: text.to_owned() }
    }

    #[test]
    fn a_summary_shows_the_last_event_of_each_stage() {
        let lines = [
            line("POLIS stage name=network state=started t=1"),
            line("POLIS stage name=storage state=started t=1"),
            line("POLIS stage name=network state=done t=2"),
        ];
        let text = summary(&lines);
        let status = text.split("last lines").next().unwrap();
        assert!(!status.contains(r#"name="network" state="started""#), "{text}");
        assert!(status.contains(r#"name="network" state="done""#), "{text}");
        assert!(status.contains(r#"name="storage" state="started""#), "{text}");
    }

    #[test]
    fn an_unexpected_guru_ends_a_wait() {
        let outcome = hopeless(&line(r#"POLIS guru code=#0601.0000 cause="x" t=9"#)).unwrap();
        assert!(outcome.to_string().contains("#0601.0000"));
        assert_eq!(hopeless(&line("POLIS ready node=x t=9")), None);
    }

    #[test]
    fn a_qemu_that_refuses_its_arguments_is_quoted() {
        let dir = tempfile::tempdir().unwrap();
        let firmware = Firmware::Direct {
            kernel: "/nonexistent".into(),
            initramfs: "/nonexistent".into(),
            cmdline: String::new(),
        };
        let config = Config {
            network: Network::None,
            screen: Screen::None,
            ..Config::new(firmware, Accelerator::Tcg)
        };
        // A host without QEMU may run the quick tests.
        if crate::host::version().is_none() {
            return;
        }
        let error = Machine::start(&config, dir.path()).unwrap_err();
        assert!(
            matches!(&error, Error::Refused { output } if output.contains("nonexistent")),
            "{error}"
        );
    }
}
