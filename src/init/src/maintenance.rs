//! `node` in maintenance: runs while a guru meditation is shown, so that the machine answers calls.
//!
//! ```text
//! guru --> [starts] --> [runs] --dies--> [waits, longer each time] --> [starts]
//!              |          |  lines --> serial port
//!              |          +- `maintenance` --> screen, serial port, a later reboot
//!              |          +- `off` ----------> the end of the machine
//!              +--nothing for ESP--> [never again]
//! ```
//!
//! Invariants:
//! - Nothing of this `node` opens the trapdoor: its death is a line of the log.
//! - It delays no key: its start, which reads from the disk, has a thread of its own. If the disk
//!   has not answered after [`deadline::ESP`], the machine has no maintenance.
//! - Its event lines are not on the serial port: those there are of the boot that failed.
//! - The line with a code is never passed to a disk: the report is written before this starts.
//!
//! What this module does not do: decide who may call (`node`).

use std::fs;
use std::io;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::time::Duration;

use rustix::process::Pid;

use polis_base::environment::{MAINTENANCE, MAINTENANCE_LOG};
use polis_base::serial::{EventLine, Severity};
use polis_base::sys::reboot::Reason;
use polis_base::sys::spawn::{self, Ended};
use polis_base::trapdoor::Report;

use super::deadline::{self, Work};
use super::machine::Machine;
use super::node::{Late, Message, NODE, Node, variables};
use super::relay::is_event;

/// Before a `node` that has died is started again, the first time and at most.
const WAIT_MIN: Duration = Duration::from_secs(5);
const WAIT_MAX: Duration = Duration::from_secs(300);
/// How often its pipes are read before the next screen is drawn.
const READS_MAX: usize = 8;
/// Characters of the text for the screen: a command, an address of IPv6 and a code have 130.
const TEXT_MAX: usize = 200;
/// Bytes of the report in a variable: the kernel allows 128 KiB, the channel 16.
const REPORT_MAX: usize = 64 << 10;

/// What `node` wants of the guru meditation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Request {
    /// This caller was admitted: the machine is not to reboot under it.
    Called(String),
    /// A caller asks for the end of the machine.
    End(Reason),
}

/// The state of the `node` in maintenance.
#[derive(Debug)]
pub struct Maintenance {
    variables: Vec<(String, String)>,
    node: Option<Node>,
    starting: Option<Starting>,
    /// When it is started, while it does not run.
    start: Duration,
    wait: Duration,
    /// The text for the screen.
    text: String,
    /// The calls that it has reported in this run.
    calls: u64,
}

/// A `node` that is being started.
#[derive(Debug)]
struct Starting {
    begun: Duration,
    work: Work<io::Result<Late>>,
}

impl Maintenance {
    /// Prepares the start at `now`. `None` on a machine that cannot have one: `node` needs the
    /// disk and its ESP.
    pub fn new(
        machine: &mut Machine,
        report: &Report,
        log: &[String],
        now: Duration,
    ) -> Option<Self> {
        machine.start.as_ref()?;
        machine.attempts.as_ref()?;
        let line = report.to_line().to_string();
        if line.len() > REPORT_MAX {
            return None;
        }
        if let Err(error) = write(Path::new(MAINTENANCE_LOG), log) {
            let text = format!("cannot leave the log for maintenance: {error}");
            machine.port.log(Severity::Warning, &text);
        }
        let mut variables = variables(machine);
        variables.push((MAINTENANCE.to_owned(), line));
        Some(Self {
            variables,
            node: None,
            starting: None,
            start: now,
            wait: WAIT_MIN,
            text: String::new(),
            calls: 0,
        })
    }

    /// The text for the screen; empty while there is none.
    #[must_use]
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Whether it is being started. No process may be reaped meanwhile: the ID of this one is not
    /// known yet, and the start itself waits for it where the program cannot run.
    #[must_use]
    pub fn is_starting(&self) -> bool {
        self.starting.is_some()
    }

    /// The descriptors to wait for.
    pub fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.node.iter().flat_map(Node::descriptors)
    }

    /// Handles everything that has happened: children that have ended, output, messages.
    pub fn turn(
        &mut self,
        machine: &mut Machine,
        ended: &[(Pid, Ended)],
        now: Duration,
    ) -> Vec<Request> {
        let requests = self.read(machine);
        let own = self.node.as_ref().map(Node::process);
        if let Some((_, how)) = ended.iter().find(|(process, _)| Some(*process) == own) {
            self.died(machine, *how, now);
        }
        if self.node.is_none() && self.starting.is_none() && now >= self.start {
            let variables = self.variables.clone();
            let start = || spawn::start(Path::new(NODE), variables, None).map(Late::new);
            self.begin(machine, now, start);
        }
        self.look(machine, now);
        requests
    }

    /// Begins to start it by `start`, which reads from the disk.
    fn begin(
        &mut self,
        machine: &mut Machine,
        now: Duration,
        start: impl FnOnce() -> io::Result<Late> + Send + 'static,
    ) {
        match Work::begin(start) {
            Ok(work) => self.starting = Some(Starting { begun: now, work }),
            Err(error) => self.failed(machine, now, &error.to_string()),
        }
    }

    /// Looks whether it has started by now.
    fn look(&mut self, machine: &mut Machine, now: Duration) {
        let Some(Starting { begun, work }) = self.starting.take() else { return };
        let waited = now.saturating_sub(begun);
        let started = match work.answer() {
            None if waited < deadline::ESP => {
                self.starting = Some(Starting { begun, work });
                return;
            }
            None => Err(deadline::Error::Overdue { waited }),
            Some(started) => started,
        };
        match started.map(|started| started.and_then(Late::take)) {
            Ok(Ok(started)) => {
                self.node = Some(Node::new(started));
                self.calls = 0;
            }
            Ok(Err(error)) => self.failed(machine, now, &error.to_string()),
            Err(error) => {
                machine.system_silent |= matches!(error, deadline::Error::Overdue { .. });
                self.failed(machine, now, &error.to_string());
            }
        }
    }

    /// It could not be started.
    fn failed(&mut self, machine: &mut Machine, now: Duration, cause: &str) {
        let text = format!("cannot start node for maintenance: {cause}");
        machine.port.log(Severity::Warning, &text);
        self.later(now);
        if machine.system_silent {
            // Each attempt would leave a thread behind.
            self.start = Duration::MAX;
        }
    }

    fn later(&mut self, now: Duration) {
        (self.node, self.start) = (None, now + self.wait);
        self.wait = (self.wait * 2).min(WAIT_MAX);
        self.text.clear();
    }

    fn died(&mut self, machine: &mut Machine, how: Ended, now: Duration) {
        let how = match how {
            Ended::Status(status) => format!("status {status}"),
            Ended::Signal(signal) => format!("signal {signal}"),
        };
        let seconds = self.wait.as_secs();
        let text = format!("maintenance ended with {how}; it starts again in {seconds} s");
        machine.port.log(Severity::Warning, &text);
        self.later(now);
    }

    fn read(&mut self, machine: &mut Machine) -> Vec<Request> {
        let mut requests = Vec::new();
        for _ in 0..READS_MAX {
            let Some(node) = &mut self.node else { break };
            let lines = node.lines();
            let errors = node.errors();
            let message = node.message();
            if lines.is_none() && errors.is_none() && message == Message::None {
                break;
            }
            for line in lines.iter().flatten().filter(|line| !is_event(line)) {
                machine.port.line(line);
            }
            for line in errors.iter().flatten() {
                machine.port.log_as(Severity::Error, "maintenance", line);
            }
            if let Message::Line(message) = message {
                requests.extend(self.message(machine, &message));
            }
        }
        requests
    }

    fn message(&mut self, machine: &mut Machine, message: &EventLine) -> Option<Request> {
        match message.word() {
            "maintenance" => {
                let text: String =
                    message.get("text").unwrap_or_default().chars().take(TEXT_MAX).collect();
                if text != self.text && !text.is_empty() {
                    machine.port.log(Severity::Info, &format!("in maintenance: {text}"));
                    // It serves: the next death is the first again.
                    self.wait = WAIT_MIN;
                }
                self.text = text;
                let calls = message.get("calls").and_then(|calls| calls.parse().ok());
                let calls = calls.unwrap_or(self.calls);
                let more = calls > self.calls;
                self.calls = calls;
                let caller = message.get("caller").unwrap_or_default();
                more.then(|| Request::Called(caller.chars().take(TEXT_MAX).collect()))
            }
            "off" => message.get("reason").and_then(Reason::from_name).map(Request::End),
            "guru" => {
                let cause = message.get("cause").unwrap_or("no cause was reported");
                let text = format!("maintenance cannot go on: {cause}");
                machine.port.log(Severity::Warning, &text);
                None
            }
            // Its signs of life: a maintenance that hangs only does not answer.
            _ => None,
        }
    }
}

fn write(path: &Path, log: &[String]) -> io::Result<()> {
    let text = log.join("\n") + "\n";
    let mut file =
        fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(path)?;
    io::Write::write_all(&mut file, text.as_bytes())
}

#[cfg(test)]
mod tests {
    use rustix::net::{AddressFamily, SendFlags, SocketFlags, SocketType, socketpair};

    use super::*;
    use polis_base::sys::spawn::Started;

    const NOW: Duration = Duration::from_secs(100);

    /// Maintenance with a `node` at whose place the test writes.
    fn maintenance() -> (Maintenance, [rustix::fd::OwnedFd; 3]) {
        let pair =
            |kind| socketpair(AddressFamily::UNIX, kind, SocketFlags::NONBLOCK, None).unwrap();
        let (stdout, out) = pair(SocketType::STREAM);
        let (stderr, err) = pair(SocketType::STREAM);
        let (control, theirs) = pair(SocketType::SEQPACKET);
        let process = Pid::from_raw(4242).unwrap();
        let maintenance = Maintenance {
            variables: Vec::new(),
            node: Some(Node::new(Started { process, stdout, stderr, control })),
            starting: None,
            start: NOW,
            wait: WAIT_MIN,
            text: String::new(),
            calls: 0,
        };
        (maintenance, [out, err, theirs])
    }

    #[test]
    fn a_call_is_reported_once_and_the_text_is_shown() {
        let (mut maintenance, [_out, _err, theirs]) = maintenance();
        let mut machine = Machine::default();
        let mut say = |calls: &str| {
            let line = EventLine::new("maintenance").field("text", "polisctl x --code Y");
            let line = line.field("calls", calls).field("caller", "the owner");
            rustix::net::send(&theirs, line.to_string().as_bytes(), SendFlags::empty()).unwrap();
            maintenance.turn(&mut machine, &[], NOW)
        };
        assert_eq!(say("0"), []);
        assert_eq!(say("1"), [Request::Called("the owner".to_owned())]);
        assert_eq!(say("1"), []);
        assert_eq!(say("nonsense"), []);
        assert_eq!(maintenance.text(), "polisctl x --code Y");
        assert!(machine.port.kept().any(|line| line.contains("--code Y")), "it is on the port");
    }

    #[test]
    fn its_event_lines_stay_off_the_port_and_its_log_lines_do_not() {
        let (mut maintenance, [out, err, theirs]) = maintenance();
        let mut machine = Machine::default();
        rustix::io::write(&out, b"POLIS stage name=network state=done t=1.0\n[1] I x: y\n")
            .unwrap();
        rustix::io::write(&err, b"panicked\n").unwrap();
        for junk in [&b"\xff"[..], b"POLIS guru", b"POLIS off reason=nonsense"] {
            rustix::net::send(&theirs, junk, SendFlags::empty()).unwrap();
        }
        assert_eq!(maintenance.turn(&mut machine, &[], NOW), []);
        let kept: Vec<_> = machine.port.kept().collect();
        assert!(kept.iter().any(|line| line.ends_with("x: y")), "{kept:?}");
        assert!(kept.iter().any(|line| line.contains("panicked")), "{kept:?}");
        assert!(!kept.iter().any(|line| line.contains("stage")), "{kept:?}");
        rustix::net::send(&theirs, b"POLIS off reason=poweroff", SendFlags::empty()).unwrap();
        assert_eq!(maintenance.turn(&mut machine, &[], NOW), [Request::End(Reason::PowerOff)]);
    }

    #[test]
    fn a_death_is_a_line_and_the_next_start_waits_longer_each_time() {
        let (mut maintenance, _ends) = maintenance();
        maintenance.text = "a code".to_owned();
        let mut machine = Machine::default();
        let dead = [(Pid::from_raw(4242).unwrap(), Ended::Signal(9))];
        let other = [(Pid::from_raw(7).unwrap(), Ended::Signal(9))];
        assert_eq!(maintenance.turn(&mut machine, &other, NOW), []);
        assert!(maintenance.node.is_some());
        maintenance.turn(&mut machine, &dead, NOW);
        assert!(maintenance.node.is_none() && maintenance.text().is_empty());
        assert_eq!((maintenance.start, maintenance.wait), (NOW + WAIT_MIN, WAIT_MIN * 2));
        for _ in 0..20 {
            maintenance.later(NOW);
        }
        assert_eq!(maintenance.start, NOW + WAIT_MAX);
    }

    /// Lets the start end that `maintenance` has begun.
    fn settle(maintenance: &mut Maintenance, machine: &mut Machine) {
        while maintenance.is_starting() {
            maintenance.look(machine, NOW);
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_start_that_hangs_with_its_disk_delays_no_turn_and_is_not_tried_again() {
        let (mut maintenance, _ends) = maintenance();
        maintenance.node = None;
        let mut machine = Machine::default();
        maintenance.begin(&mut machine, NOW, || Err(io::ErrorKind::NotFound.into()));
        settle(&mut maintenance, &mut machine);
        assert_eq!(maintenance.start, NOW + WAIT_MIN);
        assert!(!machine.system_silent);
        let (end, never) = std::sync::mpsc::channel::<()>();
        maintenance.begin(&mut machine, NOW, move || {
            assert!(never.recv().is_err());
            Err(io::ErrorKind::NotFound.into())
        });
        // Each of these turns handles the keys, long before the time is up.
        let late = NOW + deadline::ESP;
        maintenance.turn(&mut machine, &[], late - Duration::from_millis(1));
        assert!(maintenance.is_starting() && !machine.system_silent);
        maintenance.turn(&mut machine, &[], late);
        assert!(machine.system_silent && maintenance.node.is_none());
        assert!(!maintenance.is_starting());
        assert_eq!(maintenance.start, Duration::MAX);
        drop(end);
    }

    #[test]
    fn a_machine_without_a_disk_has_none() {
        let report = Report::new(polis_base::trapdoor::code::DISK_ABSENT, Vec::new());
        assert!(Maintenance::new(&mut Machine::default(), &report, &[], NOW).is_none());
    }
}
