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

mod countdown;
mod meditation;
mod request;
mod screens;
mod typed;
mod words;

use std::path::Path;

use polis_tui::guru::{self, Guru};

use polis_base::recovery;
use polis_base::serial::Severity;
use polis_base::sys::reboot::Reason;
use polis_base::sys::{clock, vt};
use polis_base::trapdoor::Report;

use self::countdown::Countdown;
use self::meditation::Meditation;
pub use self::request::{reason_of, requested};
use self::screens::Screens;
use self::typed::{Line, forget_typed};
use self::words::{announce, say_trial, say_unanswered, say_what_comes};
use super::attempts::REBOOTS_MAX;
use super::machine::Machine;
use super::maintenance::Maintenance;
use super::mounts;
use super::record::{Kept, remember};
use super::trial;

/// The factor of the countdown when the disk does not answer.
const UNANSWERED: u32 = 10;

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
    // A program on a disk that does not answer would never start.
    if matches!(kept, Kept::Unanswered) || machine.system_silent {
        return None;
    }
    Maintenance::new(machine, report, log, clock::uptime())
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
