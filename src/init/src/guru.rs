//! The guru meditation: a failure shown on every terminal, until a person or the countdown ends it.
//!
//! ```text
//!  report --> serial line --> ESP --> end of every process --> screens
//!                                                                 |
//!  [counting down] --H--> [held]            R, P, button ---------+--> end
//!        |                                                        |
//!        +--- the time is up, and the count of it is on the ESP,
//!             or the disk does not answer ------------------------+
//! ```
//!
//! Where the recovery key of the disk would help, `U` asks for it, on the terminal
//! where it was pressed, and stops the countdown; with a key the countdown is over and
//! `node` is started again.
//!
//! Invariants:
//! - The event line is written first: the failure is on record, even if a later step
//!   fails.
//! - `init` drops the keys that were pressed before the event line: they do not answer the failure.
//! - A typed recovery key is neither kept nor logged. Screens show it, the serial port
//!   shows a star for each character, because its output is recorded.
//! - Without a counter on the ESP the machine holds, unless its system is on trial: then the
//!   loader has counted, and the next start is that of the system before.
//! - Where the disk does not answer, the machine counts down ten times as long, asks it once more,
//!   and reboots uncounted: only a reset helps such a disk, and the time keeps it from a loop. A
//!   system that was on trial at its start, and may have been kept since, has the short countdown:
//!   once, since its next start is one of the system before or of a kept one.
//! - The watchdog is petted: a holding machine is not reset.
//! - A call that `node` in maintenance has admitted puts a reboot off, and never brings it nearer.
//!
//! What this module does not do: limit the reboots (`attempts`), write to the ESP (`record`) or
//! draw (`polis_tui::guru`).

use std::collections::BTreeSet;
use std::os::fd::AsFd;
use std::path::Path;
use std::time::Duration;

use polis_tui::Command;
use polis_tui::guru::{self, Guru, View};
use polis_tui::keys::{Key, Parser};
use rustix::process::{Pid, Signal};
use zeroize::Zeroizing;

use polis_base::recovery;
use polis_base::serial::{EventLine, Severity};
use polis_base::stage::Stage;
use polis_base::sys::poll::{self, Interest};
use polis_base::sys::reboot::Reason;
use polis_base::sys::spawn::Ended;
use polis_base::sys::terminal::Terminal;
use polis_base::sys::{clock, vt};
use polis_base::trapdoor::{Report, UNLOCK};

use super::attempts::REBOOTS_MAX;
use super::machine::{Machine, reap};
use super::maintenance::{Maintenance, Wish};
use super::mounts;
use super::record::{self, Kept, Uncounted, count, remember};
use super::screen::{POLL_INTERVAL, SILENCE, Screen};
use super::trial;

/// The factor of the countdown when the disk does not answer.
const UNANSWERED: u32 = 10;

/// How long after a call the machine does not reboot by itself.
const AFTER_CALL: Duration = Duration::from_secs(600);

/// The keys while it counts down.
const KEYS: &str = "H holds, R reboots, P powers off, L shows the log";

/// The border blinks twice a second.
const PHASE: Duration = Duration::from_millis(500);

/// The machine's next action if no person acts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Countdown {
    /// The machine reboots at that time.
    Until(Duration),
    /// The machine holds, because a person asked for it.
    Held,
    /// The machine holds, because it rebooted too often.
    Exhausted,
    /// The machine holds, because the reboots can't be counted.
    Uncounted,
}

impl Countdown {
    fn countdown(self, now: Duration) -> guru::Countdown {
        match self {
            Self::Until(end) => {
                // Rounded up: the last thing that is shown is a 1.
                let left = end.saturating_sub(now) + Duration::from_millis(999);
                let seconds = u32::try_from(left.as_secs()).unwrap_or(u32::MAX);
                guru::Countdown::Reboot { seconds }
            }
            Self::Held => guru::Countdown::Held,
            Self::Exhausted => guru::Countdown::Exhausted,
            Self::Uncounted => guru::Countdown::Uncounted,
        }
    }

    /// The effect of a call from outside: the caller has some minutes for the next one.
    fn called(self, now: Duration) -> Self {
        match self {
            Self::Until(end) => Self::Until(end.max(now + AFTER_CALL)),
            held @ (Self::Held | Self::Exhausted | Self::Uncounted) => held,
        }
    }

    fn is_over(self, now: Duration) -> bool {
        matches!(self, Self::Until(end) if now >= end)
    }

    /// The effect of a person's command: a new countdown, or the end.
    fn command(self, command: Command) -> Result<Self, Reason> {
        match (self, command) {
            (_, Command::Reboot) => Err(Reason::Reboot),
            (_, Command::PowerOff) => Err(Reason::PowerOff),
            (Self::Until(_), Command::Hold) => Ok(Self::Held),
            (countdown, Command::Hold | Command::Redraw | Command::Unlock | Command::Leave) => {
                Ok(countdown)
            }
        }
    }
}

/// The action after the countdown.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// The machine is to end.
    End(Reason),
    /// `node` is to try again with this recovery key.
    Unlock(recovery::Text),
}

/// Whether the kernel explains the failure: adds the evidence in its log to the causes.
fn explain(machine: &mut Machine, report: &mut Report) {
    machine.investigate();
    let Some((system, kind, block)) = machine.damage() else { return };
    let text = format!(
        "the kernel found {} ({}) damaged: {kind} block {block}",
        system.partition,
        system.device.display()
    );
    let known = format!("block {block}");
    if !report.causes.iter().any(|cause| cause.contains(&known)) {
        report.causes.push(text);
    }
}

/// Shows `report` until a person or the countdown ends it, and returns the next action.
pub fn meditate(machine: &mut Machine, mut report: Report) -> Action {
    report.tried.append(&mut machine.tried);
    explain(machine, &mut report);
    // The log up to the failure, without the lines about the failure itself.
    let log: Vec<String> = machine.port.kept().map(str::to_owned).collect();
    machine.port.come_back();
    forget_typed(machine);
    announce(machine, &report);
    let kept = remember(machine, &report, &log);
    if machine.trial && !matches!(kept, Kept::Unanswered) {
        trial::look(machine, Path::new(mounts::VARIABLES), Path::new(mounts::ESP));
    }
    let attempt = match &kept {
        Kept::Counted(ledger) => ledger.reboots.saturating_add(1),
        Kept::Nowhere | Kept::Unanswered => 1,
    };
    let countdown = begin(machine, &kept, attempt);
    if report.unlock {
        let text = "the disk is locked; U asks for its recovery key";
        machine.port.log(Severity::Info, text);
    }
    machine.end_processes();
    // Without a screen this fails, which is harmless.
    vt::activate(1).ok();
    let mut meditation = Meditation {
        maintenance: maintenance(machine, &kept, &report, &log),
        kept,
        countdown,
        shown: shown(machine, &report, attempt, log),
        screens: Screens::default(),
        line: Line::new(),
    };
    loop {
        if let Some(action) = meditation.turn(machine) {
            return action;
        }
    }
}

/// The first countdown, which the serial line announces.
fn begin(machine: &mut Machine, kept: &Kept, attempt: u32) -> Countdown {
    let until = |time| Countdown::Until(clock::uptime() + time);
    let unanswered = machine.countdown * UNANSWERED;
    let countdown = match kept {
        _ if machine.trial => until(machine.countdown),
        Kept::Counted(ledger) if ledger.rebooting().is_some() => until(machine.countdown),
        Kept::Counted(_) => Countdown::Exhausted,
        Kept::Nowhere => Countdown::Uncounted,
        Kept::Unanswered => until(unanswered),
    };
    match kept {
        Kept::Unanswered if !machine.trial => say_unanswered(machine, unanswered),
        _ => say_what_comes(machine, countdown, attempt),
    }
    if machine.trial {
        say_trial(machine, kept);
    }
    countdown
}

fn maintenance(
    machine: &mut Machine,
    kept: &Kept,
    report: &Report,
    log: &[String],
) -> Option<Maintenance> {
    // A program on a disk that does not answer would never start, nor `init` go on.
    if matches!(kept, Kept::Unanswered) || machine.system_silent {
        return None;
    }
    Maintenance::new(machine, report, log, clock::uptime())
}

/// A guru meditation while it is shown.
struct Meditation {
    kept: Kept,
    countdown: Countdown,
    maintenance: Option<Maintenance>,
    shown: Guru,
    screens: Screens,
    line: Line,
}

impl Meditation {
    /// Draws, waits and handles everything that has happened; returns the next action, if there is
    /// one by now.
    fn turn(&mut self, machine: &mut Machine) -> Option<Action> {
        let now = clock::uptime();
        if self.countdown.is_over(now)
            && let Some(reason) = self.time_is_up(machine)
        {
            return Some(Action::End(reason));
        }
        self.shown.countdown = self.countdown.countdown(now);
        self.shown.maintenance = self.maintenance.as_ref().map_or("", Maintenance::text).to_owned();
        let phase = (now.as_millis() / PHASE.as_millis()).is_multiple_of(2);
        self.screens.draw(machine, &self.shown, phase, now);
        wait(machine, &self.screens.open, self.maintenance.as_ref(), until_next(now));
        machine.pet();
        machine.receive();
        machine.port.flush();
        let (ended, _none_left) = reap();
        if let Some(reason) = wished(machine).or_else(|| self.maintain(machine, &ended)) {
            return Some(Action::End(reason));
        }
        let (commands, typed) =
            received(machine, &mut self.screens.open, &mut self.line, &self.shown);
        if let Some(key) = typed {
            // The next `node` needs its port.
            machine.end_processes();
            return Some(Action::Unlock(key));
        }
        commands.into_iter().find_map(|command| self.command(machine, command)).map(Action::End)
    }

    /// Counts the reboot that is due; returns it, or goes on with another countdown.
    fn time_is_up(&mut self, machine: &mut Machine) -> Option<Reason> {
        match count(machine, &self.kept) {
            Ok(()) => Some(Reason::Reboot),
            Err(_uncounted) if machine.trial => Some(Reason::Reboot),
            Err(Uncounted::Overdue) if matches!(self.kept, Kept::Unanswered) => {
                Some(Reason::Reboot)
            }
            Err(Uncounted::Overdue) => {
                self.kept = Kept::Unanswered;
                let time = machine.countdown * UNANSWERED;
                self.countdown = Countdown::Until(clock::uptime() + time);
                say_unanswered(machine, time);
                None
            }
            Err(Uncounted::Failed(error)) => {
                let text = format!("holding, since the reboot can't be counted: {error}");
                machine.port.log(Severity::Error, &text);
                self.countdown = Countdown::Uncounted;
                None
            }
        }
    }

    /// Lets `node` in maintenance go on; returns the end that a caller asks for.
    fn maintain(&mut self, machine: &mut Machine, ended: &[(Pid, Ended)]) -> Option<Reason> {
        for wish in self.maintenance.as_mut()?.turn(machine, ended, clock::uptime()) {
            match wish {
                Wish::End(reason) => return Some(reason),
                Wish::Called(caller) => self.countdown = called(machine, self.countdown, &caller),
            }
        }
        None
    }

    /// Does a person's command; returns the end that it asks for.
    fn command(&mut self, machine: &mut Machine, command: Command) -> Option<Reason> {
        let next = match self.countdown.command(command) {
            Ok(next) => next,
            Err(reason) => return Some(reason),
        };
        if next != self.countdown {
            machine.port.log(Severity::Info, "holding on request; R reboots, P powers off");
        }
        self.countdown = next;
        None
    }
}

/// Drops the keys that are not read yet: those of a serial port since the start of the machine, and
/// those of a screen since `node` hangs.
fn forget_typed(machine: &Machine) {
    machine.port.forget_typed();
    for name in &machine.terminals {
        if let Ok(terminal) = Terminal::open(&Path::new("/dev").join(name)) {
            terminal.forget_typed().ok();
        }
    }
}

/// Puts a reboot off, for a caller.
fn called(machine: &mut Machine, countdown: Countdown, caller: &str) -> Countdown {
    let later = countdown.called(clock::uptime());
    let later_text = match later {
        Countdown::Until(_) if later != countdown => {
            format!("; no reboot for {} s", AFTER_CALL.as_secs())
        }
        _ => String::new(),
    };
    machine.port.log(Severity::Info, &format!("a call of {caller}{later_text}"));
    later
}

fn announce(machine: &mut Machine, report: &Report) {
    // `node` has reported its own stages.
    if matches!(report.stage, Stage::Kernel | Stage::Initramfs | Stage::System) {
        machine.failed(report.stage);
    }
    let line = EventLine::new("guru")
        .field("code", report.code)
        .field("stage", report.stage)
        .field("cause", report.cause())
        .field("next", &report.next);
    let line = if report.unlock { line.field(UNLOCK, "yes") } else { line };
    machine.port.force(line);
    for line in record::body(report).lines() {
        machine.port.log(Severity::Fatal, line);
    }
}

fn say_unanswered(machine: &mut Machine, time: Duration) {
    let seconds = time.as_secs();
    let text = format!("the disk does not answer: rebooting in {seconds} s; {KEYS}");
    machine.port.log(Severity::Info, &text);
}

fn say_trial(machine: &mut Machine, kept: &Kept) {
    let text = match kept {
        // Only its ESP says whether the system was kept since.
        Kept::Unanswered => {
            "this system was on trial at its start: unless it was kept since, the machine goes \
             back to the one before"
        }
        Kept::Counted(_) | Kept::Nowhere => {
            "this system is on trial: the machine goes back to the one before"
        }
    };
    machine.port.log(Severity::Info, text);
}

fn say_what_comes(machine: &mut Machine, countdown: Countdown, attempt: u32) {
    let boots = REBOOTS_MAX + 1;
    let text = match countdown {
        Countdown::Until(_) => format!(
            "failed boot {attempt} of {boots} in a row; rebooting in {} s; {KEYS}",
            machine.countdown.as_secs()
        ),
        Countdown::Held | Countdown::Exhausted => format!(
            "failed boot {attempt} of {boots} in a row; holding; R reboots, P powers off, L \
             shows the log"
        ),
        Countdown::Uncounted => "holding, since failed boots can't be counted; R reboots, \
             P powers off, L shows the log"
            .to_owned(),
    };
    machine.port.log(Severity::Info, &text);
}

fn shown(machine: &Machine, report: &Report, attempt: u32, log: Vec<String>) -> Guru {
    Guru {
        code: report.code.to_string(),
        stage: report.stage.to_string(),
        causes: report.causes.clone(),
        tried: report.tried.clone(),
        next: report.next.clone(),
        log,
        version: machine.identity.version.clone(),
        image: machine.identity.image.clone(),
        attempt,
        attempts_max: REBOOTS_MAX + 1,
        countdown: guru::Countdown::Held,
        unlock: report.unlock,
        maintenance: String::new(),
    }
}

/// The terminals with the picture on them.
#[derive(Default)]
struct Screens {
    open: Vec<Screen>,
    /// The terminals that were already reported as missing.
    output: BTreeSet<String>,
    /// When to look again for the missing ones.
    look: Duration,
}

impl Screens {
    fn draw(&mut self, machine: &mut Machine, shown: &Guru, phase: bool, now: Duration) {
        if now >= self.look {
            self.look = now + POLL_INTERVAL;
            for (name, error) in Screen::open_missing(&machine.terminals, &mut self.open, now) {
                let text = format!("no screen on {name}: {error}");
                if self.output.insert(name) {
                    machine.port.log(Severity::Warning, &text);
                }
            }
        }
        // A terminal that is gone is dropped; the others remain, and it may come back.
        self.open.retain_mut(|screen| screen.draw(shown, phase, now).is_ok());
    }
}

/// Until the border or the countdown changes.
fn until_next(now: Duration) -> Duration {
    let phase = PHASE.as_nanos();
    Duration::from_nanos(u64::try_from(phase - now.as_nanos() % phase).unwrap_or(1))
}

fn wait(machine: &Machine, screens: &[Screen], maintenance: Option<&Maintenance>, time: Duration) {
    let mut waited = Vec::new();
    let output = maintenance.into_iter().flat_map(Maintenance::descriptors);
    waited.extend(output.map(|output| (output, Interest::Read)));
    for screen in screens {
        waited.push((screen.as_fd(), Interest::Read));
        if screen.is_behind() {
            waited.push((screen.as_fd(), Interest::Write));
        }
    }
    waited.extend(machine.port.keys().map(|keys| (keys, Interest::Read)));
    waited.extend(machine.port.waiting().map(|port| (port, Interest::Write)));
    waited.extend(machine.signals.iter().map(|signals| (signals.as_fd(), Interest::Read)));
    waited.extend(machine.buttons.iter().map(|button| (button.as_fd(), Interest::Read)));
    waited.extend(machine.uevents.iter().map(|uevents| (uevents.as_fd(), Interest::Read)));
    poll::wait(&waited, Some(time)).ok();
}

/// The request of the button, Ctrl-Alt-Del or a signal.
#[must_use]
pub fn wished(machine: &mut Machine) -> Option<Reason> {
    if machine.buttons.pressed() {
        return Some(Reason::PowerOff);
    }
    machine.received().into_iter().find_map(reason_of)
}

/// The meaning of a signal to process 1.
#[must_use]
pub fn reason_of(signal: i32) -> Option<Reason> {
    let reboot = [Signal::INT, Signal::TERM];
    let power_off = [Signal::USR2, Signal::POWER];
    if reboot.iter().any(|one| one.as_raw() == signal) {
        Some(Reason::Reboot)
    } else {
        power_off.iter().any(|one| one.as_raw() == signal).then_some(Reason::PowerOff)
    }
}

/// Reads the keys of all terminals: commands, and a recovery key if one is complete.
fn received(
    machine: &mut Machine,
    screens: &mut Vec<Screen>,
    line: &mut Line,
    shown: &Guru,
) -> (Vec<Command>, Option<recovery::Text>) {
    let (mut commands, mut typed) = (Vec::new(), None);
    let now = clock::uptime();
    screens.retain_mut(|screen| {
        let Ok(asked) = screen.commands(shown, now) else { return false };
        if asked.contains(&Command::Unlock) {
            typed = screen.take_typed();
        }
        // A screen that was overwritten is redrawn.
        if asked.contains(&Command::Redraw) {
            screen.clear();
        }
        commands.extend(asked);
        true
    });
    let asked = line.commands(machine, shown);
    if asked.contains(&Command::Unlock) {
        typed = line.view.take_typed();
    }
    commands.extend(asked);
    // The prompt accepts only characters that a text may have.
    (commands, typed.and_then(|typed| recovery::Text::new(typed.as_bytes()).ok()))
}

/// A person at the other end of the serial port: without a screen, but with keys.
struct Line {
    view: View,
    parser: Parser,
    received: Duration,
}

impl Line {
    fn new() -> Self {
        Self { view: View::default(), parser: Parser::default(), received: Duration::ZERO }
    }

    fn commands(&mut self, machine: &mut Machine, shown: &Guru) -> Vec<Command> {
        let typed = Zeroizing::new(machine.port.typed());
        let now = clock::uptime();
        let mut keys = self.parser.feed(&typed);
        if !typed.is_empty() {
            self.received = now;
        } else if now >= self.received + SILENCE {
            keys.extend(self.parser.idle());
        }
        keys.into_iter().filter_map(|key| self.key(machine, key, shown)).collect()
    }

    fn key(&mut self, machine: &mut Machine, key: Key, shown: &Guru) -> Option<Command> {
        let before = self.view.asks();
        if let (None, Key::Char('l' | 'L')) = (before, key) {
            for line in &shown.log {
                machine.port.log(Severity::Info, line);
            }
            return None;
        }
        let command = self.view.key(key, shown);
        match (before, self.view.asks()) {
            (None, Some(_)) => machine.port.log(
                Severity::Info,
                "type the recovery key; Enter opens the disk, Esc goes back; each character is \
                 shown as a star",
            ),
            // The log goes on below.
            (Some(_), None) => machine.port.echo("\n"),
            (Some(_), Some(_)) if command.is_some() => machine.port.echo("\n"),
            (Some(had), Some(has)) if has > had => machine.port.echo(&"*".repeat(has - had)),
            (Some(had), Some(has)) => machine.port.echo(&"\x08 \x08".repeat(had - has)),
            (None, None) => {}
        }
        command
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;

    use polis_base::sys::terminal::Mode;
    use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};

    use super::*;

    #[test]
    fn a_key_that_was_pressed_before_a_failure_is_shown_ends_no_machine() {
        let far = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
        grantpt(&far).unwrap();
        unlockpt(&far).unwrap();
        let path = ptsname(&far, Vec::new()).unwrap().into_string().unwrap();
        let mut terminal = Terminal::open(Path::new(&path)).unwrap();
        terminal.set_mode(Mode::Raw).unwrap();
        let name = path.strip_prefix("/dev/").unwrap().to_owned();
        let mut machine = Machine::default();
        machine.terminals = vec!["no/terminal".to_owned(), name];
        rustix::io::write(&far, b"RP").unwrap();
        forget_typed(&machine);
        rustix::io::write(&far, b"h").unwrap();
        assert_eq!(poll::wait(&[(terminal.as_fd(), Interest::Read)], None).unwrap(), [true]);
        let mut typed = [0; 8];
        let length = terminal.read(&mut typed).unwrap();
        assert_eq!(&typed[..length], b"h");
    }

    #[test]
    fn the_countdown_ends_at_its_time_and_shows_one_before() {
        let end = Duration::from_secs(70);
        let countdown = Countdown::Until(end);
        let before = end - Duration::from_millis(1);
        assert_eq!(countdown.countdown(before), guru::Countdown::Reboot { seconds: 1 });
        assert_eq!(
            countdown.countdown(Duration::from_secs(10)),
            guru::Countdown::Reboot { seconds: 60 }
        );
        assert!(!countdown.is_over(before));
        assert!(countdown.is_over(end));
    }

    #[test]
    fn a_call_puts_a_reboot_off_and_brings_none() {
        let now = Duration::from_secs(10);
        let soon = Countdown::Until(now + Duration::from_secs(5));
        assert_eq!(soon.called(now), Countdown::Until(now + AFTER_CALL));
        let late = Countdown::Until(now + AFTER_CALL * 2);
        assert_eq!(late.called(now), late);
        for holds in [Countdown::Held, Countdown::Exhausted, Countdown::Uncounted] {
            assert_eq!(holds.called(now), holds);
        }
    }

    #[test]
    fn a_held_machine_waits_for_ever_and_still_takes_a_command() {
        let held = Countdown::Until(Duration::ZERO).command(Command::Hold).unwrap();
        assert_eq!(held, Countdown::Held);
        assert!(!held.is_over(Duration::MAX));
        assert_eq!(held.command(Command::Reboot), Err(Reason::Reboot));
        let exhausted = Countdown::Exhausted.command(Command::Hold).unwrap();
        assert_eq!(exhausted, Countdown::Exhausted);
        assert_eq!(exhausted.command(Command::PowerOff), Err(Reason::PowerOff));
    }

    #[test]
    fn a_machine_that_cannot_count_reports_that_and_not_a_request() {
        let now = Duration::from_secs(10);
        assert_eq!(Countdown::Uncounted.countdown(now), guru::Countdown::Uncounted);
        assert_eq!(Countdown::Held.countdown(now), guru::Countdown::Held);
        assert_eq!(Countdown::Exhausted.countdown(now), guru::Countdown::Exhausted);
    }

    #[test]
    fn signals_that_ask_for_an_end_are_distinguished() {
        assert_eq!(reason_of(Signal::INT.as_raw()), Some(Reason::Reboot));
        assert_eq!(reason_of(Signal::POWER.as_raw()), Some(Reason::PowerOff));
        assert_eq!(reason_of(Signal::CHILD.as_raw()), None);
    }
}
