//! The record of a failure on the ESP: its report, and the count of the reboot that follows.
//!
//! ```text
//! report --remember--> [counted] --the time is up, count--> reboot
//!            |--> [nowhere]: no ESP, or it refuses -------> hold
//!            +--> [unanswered] --asked once more, count---> reboot, counted or not
//! ```
//!
//! What this module does not do: decide what follows (`guru`), or know the files (`attempts`).

use std::fmt::Write as _;
use std::time::Duration;

use polis_base::serial::Severity;
use polis_base::sys::clock;
use polis_base::trapdoor::Report;

use super::attempts::{Ledger, number_line};
use super::deadline;
use super::esp;
use super::machine::{Identity, Machine};

/// The fate of the report and the count of failed boots.
#[derive(Debug)]
pub(super) enum Kept {
    /// The count is on the ESP.
    Counted(Ledger),
    /// The ESP is missing, or refuses the count.
    Nowhere,
    /// Its disk does not answer.
    Unanswered,
}

/// Stores the report on the ESP.
pub(super) fn remember(machine: &mut Machine, report: &Report, log: &[String]) -> Kept {
    esp::look(machine);
    let Some(store) = machine.attempts.clone() else {
        if machine.esp_silent {
            let text = "cannot save this failure on the ESP: its disk does not answer";
            machine.port.log(Severity::Error, text);
            return Kept::Unanswered;
        }
        let text = "the ESP is not mounted: this failure is not saved, and attempts are not \
                    counted";
        machine.port.log(Severity::Warning, text);
        return Kept::Nowhere;
    };
    let summary = format!("{} {}", report.code, report.cause());
    let (report, log, identity) = (report.clone(), log.to_vec(), machine.identity.clone());
    let uptime = clock::uptime();
    let kept = deadline::within(machine, deadline::ESP, move || {
        store.load().and_then(|ledger| {
            let text = text(&report, &identity, ledger.sequence, uptime, &log);
            store.remember(&ledger, &summary, &text)
        })
    });
    let mut complain = |error: String| {
        machine.port.log(Severity::Error, &format!("cannot save this failure on the ESP: {error}"));
    };
    match kept {
        Ok(Ok((ledger, report))) => {
            report.err().into_iter().for_each(|error| complain(error.into_io().to_string()));
            Kept::Counted(ledger)
        }
        Ok(Err(error)) => {
            complain(error.into_io().to_string());
            Kept::Nowhere
        }
        Err(error @ deadline::Error::Overdue { .. }) => {
            complain(error.to_string());
            Kept::Unanswered
        }
        Err(error @ deadline::Error::Lost) => {
            complain(error.to_string());
            Kept::Nowhere
        }
    }
}

/// Why a reboot is not counted.
#[derive(Debug)]
pub(super) enum Uncounted {
    /// The disk does not answer.
    Overdue,
    /// The count is missing, or is not to grow.
    Failed(std::io::Error),
}

/// Counts the reboot that comes now.
pub(super) fn count(machine: &mut Machine, kept: &Kept) -> Result<(), Uncounted> {
    let failed = |text: &str| Uncounted::Failed(std::io::Error::other(text.to_owned()));
    let known = match kept {
        Kept::Counted(ledger) => Some(ledger.clone()),
        // Perhaps it answers by now.
        Kept::Unanswered => None,
        Kept::Nowhere => return Err(failed("the count is missing")),
    };
    esp::look(machine);
    let Some(store) = machine.attempts.clone() else {
        let overdue = machine.esp_silent;
        return Err(if overdue { Uncounted::Overdue } else { failed("the count is missing") });
    };
    let counted = deadline::within(machine, deadline::ESP, move || {
        let ledger = known.map_or_else(|| store.load(), Ok)?;
        ledger.rebooting().map(|ledger| store.save(&ledger)).transpose()
    });
    match counted {
        Ok(Ok(Some(()))) => Ok(()),
        Ok(Ok(None)) => Err(failed("the machine has rebooted as often as it may")),
        Ok(Err(error)) => Err(Uncounted::Failed(error.into_io())),
        Err(deadline::Error::Overdue { .. }) => Err(Uncounted::Overdue),
        Err(error @ deadline::Error::Lost) => Err(failed(&error.to_string())),
    }
}

/// The report as lines for people.
pub(super) fn body(report: &Report) -> String {
    let mut text = String::new();
    let list = [("cause", &report.causes), ("tried", &report.tried)];
    writeln!(text, "GURU MEDITATION {} in stage {}", report.code, report.stage).ok();
    for (name, lines) in list {
        for line in lines {
            writeln!(text, "{name}: {line}").ok();
        }
    }
    writeln!(text, "next: {}", report.next).ok();
    text
}

/// The file on the ESP.
pub(super) fn text(
    report: &Report,
    identity: &Identity,
    sequence: u64,
    uptime: Duration,
    log: &[String],
) -> String {
    let Identity { version, image, slot } = identity;
    let seconds = uptime.as_secs_f64();
    let mut text = body(report);
    writeln!(text, "{}", number_line(sequence)).ok();
    writeln!(text, "version: {version}\nimage: {image}\nslot: {slot}").ok();
    writeln!(text, "uptime: {seconds:.3}\n\nlog:").ok();
    for line in log {
        writeln!(text, "{line}").ok();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use polis_base::stage::Stage;
    use polis_base::trapdoor::code;

    #[test]
    fn an_esp_whose_disk_does_not_answer_holds_no_machine_and_one_that_is_missing_does() {
        let report = Report::new(code::NODE_HUNG, vec!["x".to_owned()]);
        let mut machine = Machine::default();
        machine.esp_silent = true;
        let kept = remember(&mut machine, &report, &[]);
        assert!(matches!(kept, Kept::Unanswered), "{kept:?}");
        let counted = count(&mut machine, &kept);
        assert!(matches!(counted, Err(Uncounted::Overdue)), "{counted:?}");

        let mut machine = Machine::default();
        let kept = remember(&mut machine, &report, &[]);
        assert!(matches!(kept, Kept::Nowhere), "{kept:?}");
        let counted = count(&mut machine, &kept);
        assert!(matches!(counted, Err(Uncounted::Failed(_))), "{counted:?}");
    }

    #[test]
    fn the_file_says_what_happened_and_to_what() {
        let report = Report {
            code: code::NODE_KILLED.with_detail(9),
            stage: Stage::System,
            causes: vec!["node was killed".to_owned(), "by signal 9".to_owned()],
            tried: vec!["storage".to_owned()],
            next: "Reboot.".to_owned(),
            unlock: false,
        };
        let identity =
            Identity { version: "0.1.0".to_owned(), image: "abc".to_owned(), slot: "A".to_owned() };
        let log = ["last line".to_owned()];
        let text = text(&report, &identity, 12, Duration::from_millis(9412), &log);
        insta::assert_snapshot!(text, @r"
        GURU MEDITATION #0302.0009 in stage system
        cause: node was killed
        cause: by signal 9
        tried: storage
        next: Reboot.
        number: 12
        version: 0.1.0
        image: abc
        slot: A
        uptime: 9.412

        log:
        last line
        ");
    }
}
