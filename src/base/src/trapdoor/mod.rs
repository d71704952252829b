//! The reports of failures that a machine cannot recover from by itself.
//!
//! A service that meets one makes a [`Report`] and opens the trapdoor with it
//! (`supervisor::Context::trapdoor`); `node` sends it to `init` over the control
//! channel and ends; `init` paints it, writes it to the ESP and counts attempts.
//! `init` makes reports of its own when `node` dies without a report.
//!
//! ```text
//! service --Report--> node --control channel--> init --> screens, serial line, ESP
//!                       x  (dies) ------------> init
//! ```
//!
//! What this module does not do: draw (`polis_tui::guru`) or act (`boot`).

pub mod code;

use crate::cause;
use crate::serial::EventLine;
use crate::stage::Stage;

pub use self::code::Code;

/// The key of a `guru` line, `yes` where the recovery key of the disk would help.
pub const UNLOCK: &str = "unlock";

/// The details of a failure, for a person in front of the machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// Stable; each has a section in `docs/errors.md`.
    pub code: Code,
    /// The stage that the machine was in.
    pub stage: Stage,
    /// The failure first, then what caused it, the root last.
    pub causes: Vec<String>,
    /// The attempts before giving up.
    pub tried: Vec<String>,
    /// The next step for the person, in one sentence.
    pub next: String,
    /// Whether the recovery key of the disk would help: the guru meditation
    /// then asks for it, and `init` starts `node` again with it.
    pub unlock: bool,
}

impl Report {
    /// A report of this code, with the next step of the table of failures.
    #[must_use]
    pub fn new(code: Code, causes: Vec<String>) -> Self {
        let (stage, next) = (code.stage(), code.help().to_owned());
        Self { code, stage, causes, tried: Vec::new(), next, unlock: code.is_locked() }
    }

    /// A report of this code from an error and its causes.
    pub fn from_error(code: Code, error: &(dyn std::error::Error + 'static)) -> Self {
        Self::new(code, cause::chain(error))
    }

    /// The cause in one line: the chain, joined.
    #[must_use]
    pub fn cause(&self) -> String {
        self.causes.join(": ")
    }

    /// The report as one message of the control channel.
    #[must_use]
    pub fn to_line(&self) -> EventLine {
        let mut line = EventLine::new("guru").field("code", self.code).field("stage", self.stage);
        for cause in &self.causes {
            line = line.field("cause", cause);
        }
        for tried in &self.tried {
            line = line.field("tried", tried);
        }
        let line = line.field("next", &self.next);
        if self.unlock { line.field(UNLOCK, "yes") } else { line }
    }

    /// Reads a message of the control channel; `None` if it is not a report.
    #[must_use]
    pub fn from_line(line: &EventLine) -> Option<Self> {
        if line.word() != "guru" {
            return None;
        }
        Some(Self {
            code: Code::parse(line.get("code")?)?,
            stage: Stage::from_name(line.get("stage")?)?,
            causes: line.all("cause").map(str::to_owned).collect(),
            tried: line.all("tried").map(str::to_owned).collect(),
            next: line.get("next")?.to_owned(),
            unlock: line.get(UNLOCK) == Some("yes"),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_crosses_the_control_channel_unchanged() {
        let report = Report {
            code: code::PARAMETERS_ABSENT,
            stage: Stage::Parameters,
            causes: vec!["no node \"parameters\"".to_owned(), "line 1\nline 2".to_owned()],
            tried: vec!["fw_cfg".to_owned(), "ESP".to_owned()],
            next: "put them there".to_owned(),
            unlock: false,
        };
        for report in [Report { unlock: true, ..report.clone() }, report] {
            let line = EventLine::parse(&report.to_line().to_string());
            assert_eq!(line.as_ref().and_then(Report::from_line), Some(report));
        }
    }

    #[test]
    fn a_locked_disk_asks_for_its_recovery_key_with_every_reporter() {
        let error = std::io::Error::other("refused");
        let report = |code| Report::from_error(code, &error);
        assert!(report(code::STORAGE_TPM_REFUSES.with_detail(7)).unlock);
        assert!(!report(code::STORAGE_DAMAGED).unlock);
    }
}
