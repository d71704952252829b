//! The status of a mirror, and how it is shown: on the console, in an event line, as text.

use polis_base::serial::EventLine;

/// The state of a mirror.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Either disk alone starts the machine.
    Whole,
    /// The data of both is compared after a power cut; each has all of it.
    Comparing {
        /// How far.
        percent: u8,
    },
    /// One disk is being filled.
    Filling {
        /// How far.
        percent: u8,
    },
    /// One disk alone.
    Degraded,
}

impl State {
    /// The names of all states.
    pub const NAMES: [&str; 4] = ["whole", "comparing", "filling", "degraded"];

    /// As an event line has it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Whole => "whole",
            Self::Comparing { .. } => "comparing",
            Self::Filling { .. } => "filling",
            Self::Degraded => "degraded",
        }
    }
}

/// The published status of a machine with a mirror.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// The state.
    pub state: State,
    /// The disks with all data.
    pub whole: Vec<String>,
    /// The disk that is filled.
    pub filled: Option<String>,
    /// Why nothing is done about it, for people.
    pub cause: Option<String>,
}

/// Steps in which an operator sees the progress.
const TENTHS: u8 = 10;

impl Report {
    /// As text for operators, with the progress in steps.
    #[must_use]
    pub fn text(&self) -> String {
        let disks = self.whole.join(" and ");
        let text = match self.state {
            State::Whole | State::Comparing { .. } => format!("whole on {disks}"),
            State::Filling { percent } => {
                let filled = self.filled.as_deref().unwrap_or("a disk");
                format!("fills {filled} from {disks}: {} %", percent / TENTHS * TENTHS)
            }
            State::Degraded => format!("only on {disks}: replace the other disk"),
        };
        let cause = self.cause.as_ref().map(|cause| format!("; {cause}"));
        text + &cause.unwrap_or_default()
    }
}

impl Report {
    /// As the serial port has it.
    pub(super) fn line(&self) -> EventLine {
        let percent = match self.state {
            State::Filling { percent } | State::Comparing { percent } => {
                Some((percent / TENTHS * TENTHS).to_string())
            }
            State::Whole | State::Degraded => None,
        };
        let mut line = EventLine::new("mirror")
            .field("state", self.state.name())
            .field("disks", self.whole.join(","));
        let more = [("filled", &self.filled), ("percent", &percent), ("cause", &self.cause)];
        for (name, value) in more {
            if let Some(value) = value {
                line = line.field(name, value);
            }
        }
        line
    }
}

/// The status: `None` without a mirror.
pub type Status = Option<Report>;

/// The warnings of the console.
#[must_use]
pub fn warnings(status: &Status) -> Vec<String> {
    let Some(report) = status else { return Vec::new() };
    let disks = report.whole.join(" and ");
    let because = report.cause.as_ref().map(|cause| format!(": {cause}")).unwrap_or_default();
    match report.state {
        State::Whole if report.cause.is_none() => Vec::new(),
        State::Whole | State::Comparing { .. } => report.cause.iter().cloned().collect(),
        State::Filling { percent } => {
            let filled = report.filled.as_deref().unwrap_or("a disk");
            vec![format!("the mirror fills {filled} from {disks}: {percent} %{because}")]
        }
        State::Degraded => {
            vec![format!("only {disks} of the mirror is left; replace the other disk{because}")]
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mirror_that_is_not_whole_is_a_warning_with_its_disks() {
        let report = |state, filled: Option<&str>, cause: Option<&str>| {
            let [filled, cause] = [filled, cause].map(|text| text.map(str::to_owned));
            warnings(&Some(Report { state, whole: vec!["vda".to_owned()], filled, cause }))
        };
        assert!(warnings(&None).is_empty());
        assert!(report(State::Whole, None, None).is_empty());
        assert!(report(State::Comparing { percent: 4 }, None, None).is_empty());
        let filling = report(State::Filling { percent: 30 }, Some("vdb"), None);
        assert_eq!(filling, ["the mirror fills vdb from vda: 30 %"]);
        let degraded = report(State::Degraded, None, Some("no disk fits"));
        let wanted = "only vda of the mirror is left; replace the other disk: no disk fits";
        assert_eq!(degraded, [wanted]);
    }
}
