//! `node` as `init` sees it: its environment, its pipes, its messages, its last output.
//!
//! What this module does not do: classify (`life`) or act (`stage2`).

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};
use rustix::process::{Pid, Signal, kill_process};

use polis_base::serial::EventLine;
use polis_base::stage::Stage;
use polis_base::sys::spawn::{self, Ended, Started};
use polis_base::trapdoor::{Report, code};

use super::kernel_log::KernelEvent;
use super::machine::{Machine, Times};
use super::relay::{Partial, is_event};

/// The program with all services.
pub(super) const NODE: &str = "/usr/bin/node";

/// The longest message on the control channel.
const MESSAGE_MAX: usize = 16 << 10;
/// How much is read from a pipe at once; it is full at 64 KiB.
const READ_MAX: usize = 16 << 10;
/// Lines of standard error that are kept: a panic takes three.
const LAST_LINES: usize = 4;

/// The result of a read of the control channel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Message {
    /// No message now.
    None,
    /// This message.
    Line(EventLine),
    /// Bytes that are not a message.
    Nonsense,
}

/// `node`, while it runs.
#[derive(Debug)]
pub struct Node {
    process: Pid,
    stdout: Option<OwnedFd>,
    stderr: Option<OwnedFd>,
    control: Option<OwnedFd>,
    lines: Partial,
    errors: Partial,
    last_lines: VecDeque<String>,
    /// Stages that it has started, by name, and their state.
    stages: BTreeMap<String, String>,
}

impl Node {
    /// A `node` that was just started.
    #[must_use]
    pub fn new(started: Started) -> Self {
        Self {
            process: started.process,
            stdout: Some(started.stdout),
            stderr: Some(started.stderr),
            control: Some(started.control),
            lines: Partial::default(),
            errors: Partial::default(),
            last_lines: VecDeque::new(),
            stages: BTreeMap::new(),
        }
    }

    /// Its process.
    #[must_use]
    pub fn process(&self) -> Pid {
        self.process
    }

    /// The descriptors to wait for.
    pub fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        [&self.stdout, &self.stderr, &self.control].into_iter().flatten().map(AsFd::as_fd)
    }

    /// Lines that it wrote for the serial port; `None` when there is nothing to
    /// read now. Never blocks.
    pub fn lines(&mut self) -> Option<Vec<String>> {
        let bytes = read_some(&mut self.stdout)?;
        let lines = self.lines.take(&bytes);
        lines.iter().for_each(|line| note(&mut self.stages, line));
        Some(lines)
    }

    /// Lines that it wrote to its standard error; `None` as for [`Node::lines`].
    pub fn errors(&mut self) -> Option<Vec<String>> {
        let bytes = read_some(&mut self.stderr)?;
        let lines = self.errors.take(&bytes);
        lines.iter().for_each(|line| self.remember(line));
        Some(lines)
    }

    /// Its unfinished last lines on both, when it has ended; not that of an event, which lacks
    /// some of its keys.
    pub fn rest(&mut self) -> (Option<String>, Option<String>) {
        let error = self.errors.end();
        error.iter().for_each(|line| self.remember(line));
        (self.lines.end().filter(|line| !is_event(line)), error)
    }

    fn remember(&mut self, line: &str) {
        if self.last_lines.len() == LAST_LINES {
            self.last_lines.pop_front();
        }
        self.last_lines.push_back(line.to_owned());
    }

    /// The next message that it sent. Never blocks.
    pub fn message(&mut self) -> Message {
        let Some(control) = &self.control else { return Message::None };
        let mut buffer = vec![0; MESSAGE_MAX];
        // With TRUNC the length is that of the whole message, though it was cut.
        match rustix::net::recv(control, &mut buffer, RecvFlags::DONTWAIT | RecvFlags::TRUNC) {
            Ok((_, length)) if length > 0 => {
                let bytes = buffer.get(..length);
                let line = bytes.and_then(|bytes| std::str::from_utf8(bytes).ok());
                line.and_then(EventLine::parse).map_or(Message::Nonsense, Message::Line)
            }
            Err(Errno::AGAIN | Errno::INTR) => Message::None,
            // It has closed its end.
            Ok(_) | Err(_) => {
                self.control = None;
                Message::None
            }
        }
    }

    /// Sends it a message; returns whether that was possible. Never blocks.
    pub fn send(&self, message: &EventLine) -> bool {
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        self.control.as_ref().is_some_and(|control| {
            rustix::net::send(control, message.to_string().as_bytes(), flags).is_ok()
        })
    }

    /// Whether a stage waits for something that it has named.
    #[must_use]
    pub fn awaits(&self, stage: Stage) -> bool {
        self.stages.get(stage.name()).is_some_and(|state| state == "waiting")
    }

    /// The stages that are neither done nor failed.
    fn at_work(&self) -> Vec<&str> {
        let open = ["started", "waiting"];
        let open = self.stages.iter().filter(|(_, state)| open.contains(&state.as_str()));
        open.map(|(name, _)| name.as_str()).collect()
    }

    /// The report of its silence; `threads` describes the state of each of its threads.
    #[must_use]
    pub fn hung(&self, silent: Duration, threads: String) -> Report {
        let seconds = silent.as_secs();
        let mut causes = vec![format!("node runs but sent no heartbeat for {seconds} s")];
        causes.push(threads);
        causes.extend(self.last_lines.iter().map(|line| format!("its last line: {line}")));
        let at_work = self.at_work().join(", ");
        let tried = (!at_work.is_empty()).then(|| format!("its stage: {at_work}"));
        let tried = tried.into_iter().collect();
        Report { tried, ..Report::new(code::NODE_HUNG, causes) }
    }

    /// The report of its death.
    #[must_use]
    pub fn death(&self, ended: Ended, kernel_log: &[KernelEvent]) -> Report {
        let out_of_memory = kernel_log.iter().any(|kernel_log| kernel_log.killed(self.process));
        let (code, text) = match ended {
            Ended::Signal(_) if out_of_memory => (
                code::NODE_OUT_OF_MEMORY,
                "the kernel was out of memory and killed node".to_owned(),
            ),
            Ended::Signal(signal) => (
                code::NODE_KILLED.with_detail(u16::try_from(signal).unwrap_or(0)),
                format!("node was killed by signal {signal}"),
            ),
            Ended::Status(status) => (
                code::NODE_EXITED.with_detail(u16::try_from(status).unwrap_or(0)),
                format!("node ended unexpectedly with status {status}"),
            ),
        };
        let mut causes = vec![text];
        causes.extend(self.last_lines.iter().map(|line| format!("its last line: {line}")));
        let at_work = self.at_work().join(", ");
        let tried = (!at_work.is_empty()).then(|| format!("its stage: {at_work}"));
        let tried = tried.into_iter().collect();
        Report { tried, ..Report::new(code, causes) }
    }
}

/// The environment of `node`.
pub(super) fn variables(machine: &Machine) -> Vec<(String, String)> {
    let mut variables = vec![
        ("PATH", "/usr/sbin:/usr/bin".to_owned()),
        ("POLIS_SLOT", machine.identity.slot.clone()),
        ("POLIS_VERSION", machine.identity.version.clone()),
        ("POLIS_IMAGE", machine.identity.image.clone()),
        ("POLIS_STAGES", stages(&machine.times)),
        ("POLIS_CONTROL_FD", spawn::CONTROL_FD.to_string()),
    ];
    if let Some(start) = &machine.start {
        variables.push(("POLIS_DISK", start.disk.display().to_string()));
        variables.push(("POLIS_ESP", start.esp.display().to_string()));
    }
    if let Some(previous) = &machine.previous {
        variables.push(("POLIS_PREVIOUS_GURU", previous.clone()));
    }
    variables.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
}

/// The stages that are over, as `name=start-end,...` in seconds.
pub(super) fn stages(times: &Times) -> String {
    let over = times.iter().filter_map(|(stage, (started, ended))| {
        Some(format!("{stage}={:.3}-{:.3}", started.as_secs_f64(), (*ended)?.as_secs_f64()))
    });
    over.collect::<Vec<_>>().join(",")
}

/// Records the stage that a line of the board is about. Unknown names are not kept, so
/// the map stays small.
fn note(stages: &mut BTreeMap<String, String>, line: &str) {
    if !line.starts_with("POLIS stage ") {
        return;
    }
    let Some(line) = EventLine::parse(line) else { return };
    if let (Some(name), Some(state)) = (line.get("name"), line.get("state"))
        && Stage::from_name(name).is_some()
    {
        stages.insert(name.to_owned(), state.to_owned());
    }
}

/// The bytes that a pipe has now; `None` if it is empty. Drops a pipe that has ended.
fn read_some(pipe: &mut Option<OwnedFd>) -> Option<Vec<u8>> {
    let mut buffer = vec![0; READ_MAX];
    match rustix::io::read(pipe.as_ref()?, &mut buffer) {
        Ok(length) if length > 0 => {
            buffer.truncate(length);
            Some(buffer)
        }
        Err(Errno::AGAIN | Errno::INTR) => None,
        Ok(_) | Err(_) => {
            *pipe = None;
            None
        }
    }
}

/// A `node` that just started. It ends where `init` has stopped waiting for it, because
/// its disk took too long: a guru meditation has begun.
#[derive(Debug)]
pub(super) struct Late(Option<Started>);

impl Late {
    pub(super) fn new(started: Started) -> Self {
        Self(Some(started))
    }

    pub(super) fn take(mut self) -> io::Result<Started> {
        self.0.take().ok_or_else(|| io::ErrorKind::NotFound.into())
    }
}

impl Drop for Late {
    fn drop(&mut self) {
        if let Some(started) = &self.0 {
            // It has no child yet, and process 1 reaps it.
            kill_process(started.process, Signal::KILL).ok();
        }
    }
}

#[cfg(test)]
mod tests {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    use super::*;

    /// A `node` whose pipes the test holds the other ends of.
    fn node() -> (Node, [OwnedFd; 3]) {
        let pair =
            |kind| socketpair(AddressFamily::UNIX, kind, SocketFlags::NONBLOCK, None).unwrap();
        let (stdout, out) = pair(SocketType::STREAM);
        let (stderr, err) = pair(SocketType::STREAM);
        let (control, theirs) = pair(SocketType::SEQPACKET);
        let process = Pid::from_raw(4242).unwrap();
        (Node::new(Started { process, stdout, stderr, control }), [out, err, theirs])
    }

    #[test]
    fn node_awaits_something_from_the_line_that_says_so_to_the_next() {
        let (mut node, [out, _err, _theirs]) = node();
        for (state, waits) in [("started", false), ("waiting for=disk", true), ("done", false)] {
            let line = format!("POLIS stage name=parameters state={state} t=1.000\n");
            rustix::io::write(&out, line.as_bytes()).unwrap();
            node.lines().unwrap();
            assert_eq!(node.awaits(Stage::Parameters), waits, "{state}");
            assert!(!node.awaits(Stage::Network));
        }
    }

    #[test]
    fn what_node_was_at_and_said_is_known_when_it_dies() {
        let (mut node, [out, err, _theirs]) = node();
        let lines = "POLIS stage name=network state=started t=1.000\n\
            POLIS stage name=storage state=started t=1.000\n\
            POLIS stage name=storage state=done t=2.000\n\
            POLIS stage name=nonsense state=started t=2.000\n";
        rustix::io::write(&out, lines.as_bytes()).unwrap();
        rustix::io::write(&err, b"panicked\nat noon").unwrap();
        assert_eq!(node.lines().unwrap().len(), 4);
        assert_eq!(node.lines(), None);
        assert_eq!(node.errors().unwrap(), ["panicked"]);
        assert_eq!(node.rest(), (None, Some("at noon".to_owned())));
        let report = node.death(Ended::Signal(9), &[]);
        assert_eq!(report.code.to_string(), "#0302.0009");
        assert_eq!(report.tried, ["its stage: network"]);
        assert_eq!(report.causes[1..], ["its last line: panicked", "its last line: at noon"]);
    }

    #[test]
    fn an_event_line_that_its_death_has_cut_is_left_out_and_a_log_line_is_not() {
        for (text, rest) in [
            ("POLIS etcd state=voter mem", None),
            ("[    9.412] I root.cluster: the mem", Some("[    9.412] I root.cluster: the mem")),
        ] {
            let (mut node, [out, _err, _theirs]) = node();
            rustix::io::write(&out, text.as_bytes()).unwrap();
            assert_eq!(node.lines(), Some(Vec::new()));
            assert_eq!(node.rest().0.as_deref(), rest);
        }
    }

    #[test]
    fn an_out_of_memory_kill_differs_from_another_signal() {
        let (node, _theirs) = node();
        let kernel_log = [KernelEvent::OutOfMemory { process: 4242, name: "node".to_owned() }];
        assert_eq!(node.death(Ended::Signal(9), &kernel_log).code, code::NODE_OUT_OF_MEMORY);
        let other = [KernelEvent::OutOfMemory { process: 1, name: "etcd".to_owned() }];
        assert_eq!(node.death(Ended::Signal(9), &other).code.anchor(), "0302");
    }

    #[test]
    fn messages_pass_both_ways_and_an_invalid_one_differs_from_silence() {
        let (mut node, [_out, _err, theirs]) = node();
        assert_eq!(node.message(), Message::None);
        rustix::net::send(&theirs, b"POLIS ready", SendFlags::empty()).unwrap();
        rustix::net::send(&theirs, &[b'x'; MESSAGE_MAX + 1], SendFlags::empty()).unwrap();
        assert_eq!(node.message(), Message::Line(EventLine::new("ready")));
        assert_eq!(node.message(), Message::Nonsense);
        let stop = EventLine::new("stop").field("reason", "reboot");
        assert!(node.send(&stop));
        let mut buffer = [0; 64];
        let (_, length) = rustix::net::recv(&theirs, &mut buffer, RecvFlags::empty()).unwrap();
        assert_eq!(&buffer[..length], b"POLIS stop reason=reboot");
        drop(theirs);
        assert_eq!(node.message(), Message::None);
        assert!(!node.send(&stop));
    }
}
