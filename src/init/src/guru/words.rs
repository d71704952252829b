//! The lines of a guru meditation on the serial port: the failure, and the next action of the
//! machine.

use std::time::Duration;

use polis_base::serial::{EventLine, Severity};
use polis_base::stage::Stage;
use polis_base::trapdoor::{Report, UNLOCK};

use super::countdown::Countdown;
use crate::attempts::REBOOTS_MAX;
use crate::machine::Machine;
use crate::record::{self, Kept};

/// The keys while it counts down.
const KEYS: &str = "H holds, R reboots, P powers off, L shows the log";

pub(super) fn announce(machine: &mut Machine, report: &Report) {
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

pub(super) fn say_unanswered(machine: &mut Machine, time: Duration) {
    let seconds = time.as_secs();
    let text = format!("the disk does not answer: rebooting in {seconds} s; {KEYS}");
    machine.port.log(Severity::Info, &text);
}

pub(super) fn say_trial(machine: &mut Machine, kept: &Kept) {
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

pub(super) fn say_what_comes(machine: &mut Machine, countdown: Countdown, attempt: u32) {
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
