//! The main loop of stage 2: what `init` does while `node` runs.
//!
//! The loop waits in one place for everything that happens, turns each into an event of
//! [`life`](super::super::life) and carries the effects out. Drivers load in a thread of their
//! own (`coldplug`).
//!
//! Invariants:
//! - The loop blocks only in its one wait, for [`deadline::ESP`] at most when it resets the count
//!   of failed boots, and for [`deadline::STACKS`] when it reports a `node` that hangs.
//! - The last messages of `node` are read before its death is classified.
//!
//! What this module does not do: start `node`, or decide what follows an event (`life`).

use std::io::{self, PipeReader, Read};
use std::os::fd::AsFd;
use std::path::Path;
use std::time::Duration;

use polis_base::serial::{EventLine, Severity};
use polis_base::stage::Stage;
use polis_base::sys::clock;
use polis_base::sys::poll::{self, Interest};
use polis_base::sys::reboot::Reason;
use polis_base::sys::spawn::Ended;
use polis_base::trapdoor::Report;

use super::super::coldplug::Coldplug;
use super::super::command_line::NODE_DEADLINE;
use super::super::deadline;
use super::super::guru::reason_of;
use super::super::heartbeat::Heartbeat;
use super::super::life::{Effect, Event, Outcome, State};
use super::super::machine::{Machine, reap};
use super::super::node::{Message, Node};
use super::super::relay::Partial;
use super::super::threads;
use super::{End, answered};

/// How much of the drivers' thread's output is read at once.
const READ_MAX: usize = 4 << 10;
/// How often a pipe is read before the next pipe's turn.
const READS_MAX: usize = 4;
/// How often they are read when `node` has ended: a pipe holds 64 KiB, which is
/// four reads, and the channel some hundred messages.
const RESTS_MAX: usize = 256;
/// More terminals than a machine has connectors.
const TERMINALS_MAX: usize = 8;

/// Runs the machine, whose `node` was just started, until it is to end.
pub(super) fn run(machine: &mut Machine, node: Node) -> End {
    let (output, coldplug) = coldplug(machine);
    let start = machine.start.as_ref();
    let node_deadline = start.map_or(NODE_DEADLINE, |start| start.command_line.node_deadline);
    let main = Main {
        machine,
        node,
        state: State::Running,
        coldplug,
        output,
        partial: Partial::default(),
        heartbeat: Heartbeat::new(node_deadline, clock::uptime()),
    };
    main.run()
}

/// Starts to load drivers; the thread's messages come out of the pipe.
fn coldplug(machine: &mut Machine) -> (Option<PipeReader>, Option<Coldplug>) {
    let started = io::pipe().and_then(|(output, writer)| {
        rustix::io::ioctl_fionbio(&output, true)?;
        Ok((output, Coldplug::start(writer)?))
    });
    match started {
        Ok((output, coldplug)) => (Some(output), Some(coldplug)),
        Err(error) => {
            let text = format!("cannot load drivers: {error}");
            machine.port.log(Severity::Error, &text);
            (None, None)
        }
    }
}

/// The state of the main loop.
struct Main<'a> {
    machine: &'a mut Machine,
    node: Node,
    state: State,
    coldplug: Option<Coldplug>,
    output: Option<PipeReader>,
    partial: Partial,
    heartbeat: Heartbeat,
}

impl Main<'_> {
    fn run(mut self) -> End {
        loop {
            if self.machine.investigate()
                && let Some(report) = self.machine.damage_report()
            {
                return End::Guru(report);
            }
            self.machine.pet();
            let ended = self.reap();
            self.read_node();
            self.step(Event::Tick);
            if let Some(silent) = self.heartbeat.look(clock::uptime()) {
                self.step(Event::Hung(silent));
            }
            // Its messages are read by now: a report comes before the death.
            if let Some(ended) = ended {
                self.finish_node();
                self.step(Event::NodeEnded(ended));
            }
            if let State::Over(outcome) = &self.state {
                let outcome = outcome.clone();
                return self.end(outcome);
            }
            self.wait();
            self.listen();
            self.machine.port.flush();
        }
    }

    fn step(&mut self, event: Event) {
        let state = std::mem::replace(&mut self.state, State::Running);
        let (state, effects) = state.step(event, clock::uptime());
        self.state = state;
        for effect in effects {
            match effect {
                Effect::ResetAttempts => self.reset_attempts(),
                Effect::AskToStop(reason) => self.ask_to_stop(reason),
                Effect::Warn(text) => self.machine.port.log(Severity::Warning, &text),
            }
        }
    }

    /// Records that this boot is good.
    fn reset_attempts(&mut self) {
        let Some(store) = self.machine.attempts.clone() else { return };
        let reset = deadline::within(self.machine, deadline::ESP, move || {
            let reset = store.load().and_then(|ledger| {
                let ready = ledger.ready();
                // The ESP is written only when there is a count to reset.
                if ready == ledger { Ok(()) } else { store.save(&ready) }
            });
            // An unreadable ledger is replaced: this boot shows that the machine is well.
            reset.or_else(|_error| store.save(&store.rebuilt().ready()))
        });
        if let Err(error) = answered(reset) {
            let text = format!("cannot reset the count of failed boots: {error}");
            self.machine.port.log(Severity::Warning, &text);
        }
    }

    fn ask_to_stop(&mut self, reason: Reason) {
        let text = format!("stopping: {}", reason.name());
        self.machine.port.log(Severity::Info, &text);
        if !self.node.send(&EventLine::new("stop").field("reason", reason.name())) {
            self.machine.port.log(Severity::Warning, "node can't be asked to stop");
        }
    }

    /// Waits for any event.
    fn wait(&self) {
        let mut waited = Vec::new();
        waited.extend(self.node.descriptors().map(|pipe| (pipe, Interest::Read)));
        waited.extend(self.output.iter().map(|output| (output.as_fd(), Interest::Read)));
        let machine = &self.machine;
        waited.extend(machine.signals.iter().map(|signals| (signals.as_fd(), Interest::Read)));
        waited.extend(machine.uevents.iter().map(|uevents| (uevents.as_fd(), Interest::Read)));
        waited.extend(machine.kernel.iter().map(|kernel| (kernel.as_fd(), Interest::Read)));
        waited.extend(machine.buttons.iter().map(|button| (button.as_fd(), Interest::Read)));
        waited.extend(machine.port.waiting().map(|port| (port, Interest::Write)));
        let next = [self.state.deadline(), machine.pet_at(), Some(self.heartbeat.next())];
        let next = next.into_iter().flatten().min();
        let time = next.map(|at| at.saturating_sub(clock::uptime()));
        if poll::wait(&waited, time).is_err() {
            // Out of memory: the next attempt may succeed, and must not spin.
            poll::sleep(Duration::from_millis(100));
        }
    }

    /// Handles all events except those of `node`.
    fn listen(&mut self) {
        let announced = self.machine.receive();
        if let Some(coldplug) = &self.coldplug {
            announced.aliases.into_iter().for_each(|alias| coldplug.put(alias));
            if announced.lost {
                coldplug.look_again();
            }
        }
        self.read_drivers();
        if self.machine.buttons.pressed() {
            self.step(Event::Asked(Reason::PowerOff));
        }
        for signal in self.machine.received() {
            if let Some(reason) = reason_of(signal) {
                self.step(Event::Asked(reason));
            }
        }
    }

    fn read_drivers(&mut self) {
        let Some(output) = &mut self.output else { return };
        let mut buffer = [0; READ_MAX];
        match output.read(&mut buffer) {
            Ok(length) if length > 0 => {
                for line in self.partial.take(&buffer[..length]) {
                    self.machine.port.log_as(Severity::Warning, "init.modules", &line);
                }
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Ok(_) | Err(_) => self.output = None,
        }
    }

    /// Reaps every child; returns how `node` ended if it has.
    fn reap(&mut self) -> Option<Ended> {
        let (ended, _none_left) = reap();
        let own = ended.into_iter().find(|(process, _)| *process == self.node.process());
        own.map(|(_, ended)| ended)
    }

    /// Reads the output of `node`, up to a bound.
    fn read_node(&mut self) {
        for _ in 0..READS_MAX {
            let more = self.read_lines() | self.read_errors() | self.read_message();
            if !more {
                return;
            }
        }
    }

    fn read_lines(&mut self) -> bool {
        let Some(lines) = self.node.lines() else { return false };
        lines.iter().for_each(|line| self.machine.port.line(line));
        // A disk with node parameters may be behind a driver of the rest.
        if self.node.awaits(Stage::Parameters) {
            self.load_the_rest();
        }
        true
    }

    fn load_the_rest(&self) {
        if let Some(coldplug) = &self.coldplug {
            coldplug.load_the_rest();
        }
    }

    fn read_errors(&mut self) -> bool {
        let Some(lines) = self.node.errors() else { return false };
        lines.iter().for_each(|line| self.machine.port.log_as(Severity::Error, "root", line));
        true
    }

    fn read_message(&mut self) -> bool {
        match self.node.message() {
            Message::None => return false,
            Message::Line(message) => self.message(&message),
            Message::Nonsense => self.refuse("it is not an event line, or longer than 16 KiB"),
        }
        true
    }

    fn message(&mut self, message: &EventLine) {
        match message.word() {
            "beat" => {
                if let Some(silent) = self.heartbeat.received(clock::uptime()) {
                    let silent = silent.as_secs_f64();
                    let text = format!("node's heartbeat is late: {silent:.1} s after the last");
                    self.machine.port.log(Severity::Warning, &text);
                }
            }
            "ready" => {
                self.load_the_rest();
                self.step(Event::Ready);
            }
            "draining" => self.step(Event::Draining),
            "off" => match message.get("reason").and_then(Reason::from_name) {
                Some(reason) => self.step(Event::Off(reason)),
                None => self.refuse("off needs reason=reboot or reason=poweroff"),
            },
            "guru" => match Report::from_line(message) {
                Some(report) => self.step(Event::Guru(report)),
                None => self.refuse("a guru needs code, stage and next"),
            },
            "terminals" => self.terminals(message),
            _ => self.refuse("the message is not known"),
        }
    }

    /// `terminals tty=hvc0 tty=ttyS1`: where `node` draws besides tty1.
    fn terminals(&mut self, message: &EventLine) {
        let mut terminals = vec!["tty1".to_owned()];
        for name in message.all("tty").take(TERMINALS_MAX) {
            // A name below /dev and nothing else.
            let plain = name.len() <= 32 && name.bytes().all(|byte| byte.is_ascii_alphanumeric());
            if !plain || name.is_empty() {
                self.refuse("a tty is a name below /dev, of letters and digits");
            } else if !terminals.iter().any(|known| known == name) {
                terminals.push(name.to_owned());
            }
        }
        self.machine.port.leave(&terminals);
        self.machine.terminals = terminals;
    }

    fn refuse(&mut self, why: &str) {
        let text = format!("a message of node is invalid: {why}");
        self.machine.port.log(Severity::Error, &text);
    }

    /// Reads the rest of the output of `node`, which has ended. A process that
    /// inherited its pipes may still write, so this has a bound of its own.
    fn finish_node(&mut self) {
        for _ in 0..RESTS_MAX {
            if !(self.read_message() | self.read_lines() | self.read_errors()) {
                break;
            }
        }
        let (line, error) = self.node.rest();
        line.iter().for_each(|line| self.machine.port.line(line));
        error.iter().for_each(|line| self.machine.port.log_as(Severity::Error, "root", line));
    }

    fn end(self, outcome: Outcome) -> End {
        match outcome {
            Outcome::Off(reason) => End::Off(reason),
            Outcome::Guru(report) => End::Guru(report),
            Outcome::Hung(silent) => {
                self.machine.investigate();
                // Before acting on them.
                let (proc, process) = (Path::new("/proc"), self.node.process());
                let threads = threads::of(proc, process);
                for stack in threads::stacks(self.machine, proc, process, deadline::STACKS) {
                    self.machine.port.log(Severity::Error, &stack);
                }
                let damage = self.machine.damage_report();
                End::Guru(damage.unwrap_or_else(|| self.node.hung(silent, threads)))
            }
            Outcome::Death(ended) => {
                self.machine.investigate();
                let damage = self.machine.damage_report();
                End::Guru(
                    damage.unwrap_or_else(|| self.node.death(ended, &self.machine.kernel_log)),
                )
            }
        }
    }
}
