//! Stage 2: builds the tree of mounts, starts `node`, and runs the main loop.
//!
//! ```text
//! mounts --> ESP --> node --> [main loop] --> how it ended
//!                      |          ^
//!                      |          |  node's lines, its messages, its end
//!                      |          |  signals, buttons, devices, the kernel's log
//!                      +----------+
//! ```
//!
//! The main loop waits in one place for all of them, turns each into an event of
//! [`life`](super::life) and carries the effects out. Drivers load in a thread of their
//! own (`coldplug`).
//!
//! Invariants:
//! - Until `node` runs, nothing waits for a disk without a deadline (`patience`).
//! - The loop blocks only in its one wait, for [`patience::ESP`] at most when it resets the count
//!   of failed boots, and for [`patience::STACKS`] when it reports a `node` that hangs.
//! - The last messages of `node` are read before its death is classified.

use std::fs;
use std::io::{self, PipeReader, Read};
use std::os::fd::AsFd;
use std::path::Path;
use std::time::Duration;

use polis_base::extra;
use polis_base::files;
use polis_base::recovery;
use polis_base::serial::{EventLine, Severity};
use polis_base::stage::Stage;
use polis_base::sys::poll::{self, Interest};
use polis_base::sys::reboot::Reason;
use polis_base::sys::spawn::{self, Ended};
use polis_base::sys::{clock, files as sys_files, vt};
use polis_base::trapdoor::{Report, code};

use super::attempts::Store;
use super::coldplug::Coldplug;
use super::command_line::NODE_DEADLINE;
use super::error::Error;
use super::esp;
use super::guru::reason_of;
use super::heartbeat::Heartbeat;
use super::last_words::{self, LastWords};
use super::life::{Effect, Event, Outcome, State};
use super::machine::{Identity, Machine, Start, reap};
use super::mounts;
use super::node::{Late, Message, NODE, Node, variables};
use super::patience::{self, Work};
use super::record;
use super::relay::Partial;
use super::threads;
use super::verified;

/// How much of the drivers' thread's output is read at once.
const READ_MAX: usize = 4 << 10;
/// How often a pipe is read before the next pipe's turn.
const READS_MAX: usize = 4;
/// How often they are read when `node` has ended: a pipe holds 64 KiB, which is
/// four reads, and the channel some hundred messages.
const RESTS_MAX: usize = 256;
/// More terminals than a machine has connectors.
const TERMINALS_MAX: usize = 8;

/// How the machine is to end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum End {
    /// In order.
    Off(Reason),
    /// With a guru meditation.
    Guru(Report),
}

/// Runs the machine until it is to end.
///
/// # Errors
///
/// When it can't even start.
pub fn run(machine: &mut Machine, start: Start) -> Result<End, Error> {
    identify(machine)?;
    let identity = machine.identity.clone();
    let line = EventLine::new("boot")
        .field("version", &identity.version)
        .field("image", &identity.image)
        .field("slot", &identity.slot);
    machine.port.event(line);
    machine.started(Stage::System);
    // Only a hint: a fault of the file is reported when it is started.
    Work::begin(|| sys_files::readahead(Path::new(NODE)).ok()).ok();
    mount_tree(machine)?;
    if let Err(error) = start.extra.give(Path::new(extra::DIRECTORY)) {
        let text = format!("cannot hand on the signed measurements of this system: {error}");
        machine.port.log(Severity::Error, &text);
    }
    // A placeholder until the machine has a name.
    rustix::system::sethostname(b"polis").ok();
    greet();
    let unmountable = mount_esp(machine, &start.esp);
    machine.previous = last_failure(machine);
    machine.start = Some(start);
    // The records of a panic are taken from firmware also where nothing else goes on.
    if let Some(report) = count_panics(machine).or(unmountable) {
        return Ok(End::Guru(report));
    }
    machine.done(Stage::System);
    machine.find_devices();
    node(machine, None)
}

/// Starts `node` once more, on the machine that the first one left behind, with
/// the recovery key of the disk. Every mount is still there: the tree is `init`'s,
/// and a data partition that is mounted already is as good as one that is not.
///
/// # Errors
///
/// When `node` can't be started.
pub fn again(machine: &mut Machine, key: &recovery::Text) -> Result<End, Error> {
    machine.port.log(Severity::Info, "starting node again, with the recovery key that was typed");
    greet();
    node(machine, Some(key))
}

/// Starts `node` and stays.
fn node(machine: &mut Machine, key: Option<&recovery::Text>) -> Result<End, Error> {
    let mut variables = variables(machine);
    if key.is_some() {
        variables.push(("POLIS_RECOVERY_FD".to_owned(), spawn::SECRET_FD.to_string()));
    }
    let key = key.cloned();
    let started = verified::step(machine, "start node", move || {
        let key = key.as_ref().map(|key| key.expose().as_bytes());
        spawn::start(Path::new(NODE), variables, key).map(Late::new)
    });
    let node = started?.and_then(Late::take);
    let node = node.map_err(|source| Error::StartNode { program: NODE, source })?;
    let (output, coldplug) = coldplug(machine);
    let start = machine.start.as_ref();
    let node_deadline = start.map_or(NODE_DEADLINE, |start| start.command_line.node_deadline);
    let main = Main {
        machine,
        node: Node::new(node),
        state: State::Running,
        coldplug,
        output,
        partial: Partial::default(),
        heartbeat: Heartbeat::new(node_deadline, clock::uptime()),
    };
    Ok(main.run())
}

/// Reads the identity of the system.
fn identify(machine: &mut Machine) -> Result<(), Error> {
    let read = || fs::read_to_string("/etc/os-release").unwrap_or_default();
    let text = verified::step(machine, "read the version of the system", read)?;
    for (key, place) in [
        ("VERSION_ID", &mut machine.identity.version),
        ("IMAGE_VERSION", &mut machine.identity.image),
    ] {
        if let Some(value) = os_release(&text, key) {
            value.clone_into(place);
        }
    }
    Ok(())
}

/// The value of `key` in the text of an `os-release` file.
fn os_release<'a>(text: &'a str, key: &str) -> Option<&'a str> {
    let value = text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix('='))?;
    Some(value.trim().trim_matches('"')).filter(|value| !value.is_empty())
}

fn mount_tree(machine: &mut Machine) -> Result<(), Error> {
    // Each mount looks its directory up in the system.
    let (lines, mounted) = verified::step(machine, "mount the tree", mounts::make_tree)?;
    lines.iter().for_each(|(severity, text)| machine.port.log(*severity, text));
    mounted.map_err(Error::Tree)
}

/// A short text for the screen before `node` draws on it.
fn greet() {
    // Without a screen this fails, which is harmless.
    vt::activate(1).ok();
    let version = env!("CARGO_PKG_VERSION");
    let text = format!("\x1b[2J\x1b[H\n  Polis {version} is starting\n");
    if let Ok(mut terminal) = polis_base::sys::terminal::Terminal::open(Path::new("/dev/tty1")) {
        io::Write::write_all(&mut terminal, text.as_bytes()).ok();
    }
}

/// Mounts the ESP unless stage 1 has. Returns a report where it cannot be mounted: `node` has its
/// records there.
fn mount_esp(machine: &mut Machine, device: &Path) -> Option<Report> {
    let error = esp::mount(machine, Stage::System, device, patience::ESP).err()?;
    // The guru meditation may be about a panic.
    machine.port.log(Severity::Error, &error);
    let cause = "node cannot run without the EFI system partition".to_owned();
    Some(Report::new(code::ESP_UNMOUNTABLE, vec![cause, error]))
}

/// Why the last boot failed, if it did.
fn last_failure(machine: &mut Machine) -> Option<String> {
    let store = machine.attempts.clone()?;
    match on_esp(machine, move || store.load()) {
        Ok(ledger) => ledger.last,
        Err(error) => {
            let text = format!("cannot read how many boots have failed: {error}");
            machine.port.log(Severity::Warning, &text);
            None
        }
    }
}

/// Does work with the files on the ESP.
fn on_esp<T: Send + 'static>(
    machine: &mut Machine,
    work: impl FnOnce() -> Result<T, files::Error> + Send + 'static,
) -> Result<T, io::Error> {
    match patience::within(machine, patience::ESP, work) {
        Ok(result) => result.map_err(files::Error::into_io),
        Err(error) => Err(io::Error::other(error)),
    }
}

/// Counts a panic of the kernel since the last boot, if firmware has a record of one. Returns a
/// report where the machine must not go on by itself: it has been started again as often as it
/// may, or the panic cannot be counted.
fn count_panics(machine: &mut Machine) -> Option<Report> {
    // Only a driver for the records is read from a disk.
    let words = patience::within(machine, patience::SYSTEM, || {
        last_words::take(Path::new(mounts::VARIABLES))
    });
    let words = words.unwrap_or_else(|error| {
        let text = format!("cannot read the kernel's last words: {error}");
        machine.port.log(Severity::Error, &text);
        LastWords::default()
    });
    for fault in &words.faults {
        machine.port.log(Severity::Warning, &format!("of the kernel's last words, {fault}"));
    }
    if !words.panicked {
        return None;
    }
    let causes = vec!["the kernel panicked".to_owned(), words.cause];
    let report = Report::new(code::KERNEL_PANICKED, causes);
    machine.port.log(Severity::Error, &report.cause());
    for line in &words.lines {
        machine.port.log(Severity::Info, &format!("last words: {line}"));
    }
    // The guru meditation says why it cannot.
    let Some(store) = machine.attempts.clone() else { return Some(report) };
    let (identity, counted) = (machine.identity.clone(), report.clone());
    let lines = words.lines;
    let panic = move || count_panic(&identity, &store, &counted, &lines);
    match on_esp(machine, panic) {
        Ok(Some(last)) => machine.previous = Some(last),
        Ok(None) => return Some(report),
        Err(error) => {
            let text = format!("cannot count a panic of the kernel: {error}");
            machine.port.log(Severity::Error, &text);
            return Some(report);
        }
    }
    None
}

/// Counts one panic, and keeps its report; returns its summary. `None`: the machine has been
/// started again as often as it may.
fn count_panic(
    identity: &Identity,
    store: &Store,
    report: &Report,
    words: &[String],
) -> Result<Option<String>, files::Error> {
    let ledger = store.load()?;
    let Some(counted) = ledger.rebooting() else { return Ok(None) };
    let summary = format!("{} {}", report.code, report.cause());
    let text = record::text(report, identity, ledger.sequence, clock::uptime(), words);
    // A report that cannot be written does not stop the count.
    let (ledger, _written) = store.remember(&counted, &summary, &text)?;
    Ok(Some(ledger.last.unwrap_or(summary)))
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
        let reset = on_esp(self.machine, move || {
            let reset = store.load().and_then(|ledger| {
                let ready = ledger.ready();
                // The ESP is written only when there is a count to reset.
                if ready == ledger { Ok(()) } else { store.save(&ready) }
            });
            // An unreadable ledger is replaced: this boot shows that the machine is well.
            reset.or_else(|_error| store.save(&store.rebuilt().ready()))
        });
        if let Err(error) = reset {
            let text = format!("cannot reset the count of failed boots: {error}");
            self.machine.port.log(Severity::Warning, &text);
        }
    }

    fn ask_to_stop(&mut self, reason: Reason) {
        let text = format!("stopping: {}", reason.name());
        self.machine.port.log(Severity::Info, &text);
        if !self.node.tell(&EventLine::new("stop").field("reason", reason.name())) {
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
                for stack in threads::stacks(self.machine, proc, process, patience::STACKS) {
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

#[cfg(test)]
mod tests {
    use super::super::machine::Times;
    use super::super::node::stages;
    use super::*;

    #[test]
    fn the_system_says_its_version_with_and_without_quotes() {
        let text = "ID=polis\nNAME=\"Polis\"\nVERSION_ID=\"0.1.0\"\nIMAGE_VERSION=abcd\nX=\n";
        assert_eq!(os_release(text, "VERSION_ID"), Some("0.1.0"));
        assert_eq!(os_release(text, "IMAGE_VERSION"), Some("abcd"));
        assert_eq!(os_release(text, "X"), None);
        assert_eq!(os_release(text, "VERSION"), None);
    }

    #[test]
    fn an_esp_that_cannot_be_mounted_is_a_failure_of_its_own_with_the_error_of_the_mount() {
        let mut machine = Machine::default();
        let report = mount_esp(&mut machine, Path::new("/dev/none")).unwrap();
        assert_eq!((report.code, report.stage), (code::ESP_UNMOUNTABLE, Stage::System));
        assert!(report.causes[1].contains("/dev/none"), "{:?}", report.causes);
        assert!(report.next.contains("fsck.vfat"), "{}", report.next);
        assert_eq!(last_failure(&mut machine), None);

        machine.attempts = Some(Store::in_tree(Path::new("/nowhere")));
        assert_eq!(mount_esp(&mut machine, Path::new("/dev/none")), None, "stage 1 has mounted it");
    }

    #[test]
    fn only_stages_that_are_over_are_handed_on() {
        let second = Duration::from_secs(1);
        let times = Times::from([
            (Stage::Kernel, (Duration::ZERO, Some(second))),
            (Stage::Initramfs, (second, Some(second * 2))),
            (Stage::System, (second * 2, None)),
        ]);
        assert_eq!(stages(&times), "kernel=0.000-1.000,initramfs=1.000-2.000");
    }
}
