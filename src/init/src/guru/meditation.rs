//! A guru meditation while it is shown: draws, waits, and handles keys, calls and the end of the
//! countdown.

use std::os::fd::AsFd as _;
use std::time::Duration;

use polis_tui::Command;
use polis_tui::guru::Guru;
use rustix::process::Pid;

use polis_base::serial::Severity;
use polis_base::sys::clock;
use polis_base::sys::poll::{self, Interest};
use polis_base::sys::reboot::Reason;
use polis_base::sys::spawn::Ended;

use super::countdown::{AFTER_CALL, Countdown};
use super::request::requested;
use super::screens::Screens;
use super::typed::{Line, received};
use super::words::say_unanswered;
use super::{Action, UNANSWERED};
use crate::machine::{Machine, reap};
use crate::maintenance::{Maintenance, Request};
use crate::record::{Kept, Uncounted, count};
use crate::screen::Screen;

/// The border blinks twice a second.
const PHASE: Duration = Duration::from_millis(500);

/// A guru meditation while it is shown.
pub(super) struct Meditation {
    pub(super) kept: Kept,
    pub(super) countdown: Countdown,
    pub(super) maintenance: Option<Maintenance>,
    pub(super) shown: Guru,
    pub(super) screens: Screens,
    pub(super) line: Line,
}

impl Meditation {
    /// Draws, waits and handles everything that has happened; returns the next action, if there is
    /// one by now.
    pub(super) fn turn(&mut self, machine: &mut Machine) -> Option<Action> {
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
        let starting = self.maintenance.as_ref().is_some_and(Maintenance::is_starting);
        let ended = if starting { Vec::new() } else { reap().0 };
        if let Some(reason) = requested(machine).or_else(|| self.maintain(machine, &ended)) {
            return Some(Action::End(reason));
        }
        let (commands, typed) =
            received(machine, &mut self.screens.open, &mut self.line, &self.shown);
        if let Some(key) = typed {
            // The next `node` needs its port, also from one that is only being started.
            self.maintenance = None;
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
        for request in self.maintenance.as_mut()?.turn(machine, ended, clock::uptime()) {
            match request {
                Request::End(reason) => return Some(reason),
                Request::Called(caller) => {
                    self.countdown = called(machine, self.countdown, &caller);
                }
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
