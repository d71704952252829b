//! Why an operation on a machine failed.

use std::io;
use std::time::Duration;

use crate::line::RACE;
use crate::qmp;

/// How a `polisctl` ends that timed out waiting.
const LATE: &str = "exit status: 3";

/// The status of a `polisctl` that was ended at its deadline.
pub(crate) const DEADLINE: &str = "a deadline: the machines had the time that was given";

/// Why an operation on a machine failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file or a socket of the launcher failed.
    #[error("cannot {doing}")]
    Host {
        /// Verb and object.
        doing: String,
        /// The system's complaint.
        source: io::Error,
    },
    /// QEMU did not start.
    #[error("QEMU ended before the machine ran: {output}")]
    Refused {
        /// Its standard error.
        output: String,
    },
    /// The machine protocol failed.
    #[error(transparent)]
    Qmp(#[from] qmp::Error),
    /// An operator's command failed.
    #[error("`polisctl {command}` ended with {status}: {output}")]
    Operator {
        /// The arguments.
        command: String,
        /// How it ended.
        status: String,
        /// Its standard error.
        output: String,
    },
    /// The machine is off.
    #[error("machine {number} is off")]
    IsOff {
        /// Counted from 1.
        number: usize,
    },
    /// A thread that followed a machine has a bug.
    #[error("the thread that followed a machine panicked")]
    Panicked,
    /// A wait failed.
    #[error("waited for {what}, but {outcome}\n{last}whole log: {log}")]
    Wait {
        /// The awaited line.
        what: String,
        /// The event that ended the wait.
        outcome: Outcome,
        /// The last event of each kind, and the last lines.
        last: String,
        /// The file with all lines.
        log: String,
    },
}

impl Error {
    /// Whether the machine ended by a fault of QEMU that another start does not meet.
    #[must_use]
    pub fn is_race(&self) -> bool {
        matches!(self, Self::Wait { outcome: Outcome::Fatal { why, .. }, .. } if *why == RACE)
    }

    /// Whether a wait ended because its time was up. A guest that was silent for most of it has
    /// crashed, which is a failure.
    #[must_use]
    pub fn is_late(&self) -> bool {
        match self {
            Self::Wait { outcome, .. } => matches!(outcome, Outcome::Late { .. }),
            Self::Operator { status, .. } => [LATE, DEADLINE].contains(&&**status),
            Self::Host { .. }
            | Self::Refused { .. }
            | Self::Qmp(_)
            | Self::IsOff { .. }
            | Self::Panicked => false,
        }
    }
}

/// The reason why a wait ended.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Outcome {
    /// The time was up, and the guest was still printing.
    #[error("timed out after {within:.0?} (the last line is {silent:.0?} old)")]
    Late {
        /// The time limit.
        within: Duration,
        /// The age of the last line.
        silent: Duration,
    },
    /// The guest has crashed: it was silent for most of the time, without a closing
    /// line.
    #[error(
        "the guest went silent {silent:.0?} ago without `POLIS off` or `POLIS guru`: it crashed"
    )]
    Silent {
        /// The age of the last line.
        silent: Duration,
    },
    /// The guest gave up in good order.
    #[error("the trapdoor opened: {line}")]
    Guru {
        /// The event line.
        line: String,
    },
    /// The guest ended in good order.
    #[error("the machine went off: {line}")]
    Off {
        /// The event line.
        line: String,
    },
    /// Firmware or kernel gave up.
    #[error("{why}: {line}")]
    Fatal {
        /// The reason, in words.
        why: &'static str,
        /// The line that shows it.
        line: String,
    },
    /// The process is gone.
    #[error("QEMU ended ({status})")]
    Ended {
        /// Its status, in words.
        status: String,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_is_late_when_its_time_is_up_and_not_when_it_has_become_hopeless() {
        let text = String::new;
        let wait = |outcome| Error::Wait { what: text(), outcome, last: text(), log: text() };
        let second = Duration::from_secs(1);
        assert!(wait(Outcome::Late { within: second, silent: second }).is_late());
        // A guest that went silent has crashed.
        assert!(!wait(Outcome::Silent { silent: second }).is_late());
        assert!(!wait(Outcome::Ended { status: text() }).is_late());
        let operator = |status: &str| Error::Operator {
            command: text(),
            status: status.to_owned(),
            output: text(),
        };
        assert!(operator("exit status: 3").is_late() && operator(DEADLINE).is_late());
        assert!(!operator("exit status: 1").is_late());
    }
}
