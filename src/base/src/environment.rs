//! The boot environment: the variables that `init` passes to `node`.

use std::os::fd::RawFd;
use std::path::PathBuf;
use std::time::Duration;

use crate::serial::EventLine;
use crate::stage::{Entry, Stage, Stages, State};
use crate::trapdoor::Report;

/// The values that `init` passes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Environment {
    /// The descriptor of the control channel.
    pub control: RawFd,
    /// The descriptor from which the recovery key of the disk is read, if a
    /// person typed one.
    pub recovery: Option<RawFd>,
    /// The disk that the machine was booted from.
    pub disk: PathBuf,
    /// The device of its EFI system partition.
    pub esp: PathBuf,
    /// The slot that the system was started from: `A` or `B`.
    pub slot: String,
    /// The version of the system.
    pub version: String,
    /// Which image it is.
    pub image: String,
    /// The stages that `init` has completed.
    pub stages: Stages,
    /// Why the boot before this one failed, if it did.
    pub previous_guru: Option<String>,
    /// Why this machine is in maintenance, if it is: `node` then serves nothing else.
    pub maintenance: Option<Report>,
}

/// A variable is missing or invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The variable is not there.
    #[error("{0} is not set")]
    Absent(&'static str),
    /// The variable has an invalid value.
    #[error("{name} is {value:?}, not {expected}")]
    Malformed {
        /// The name of the variable.
        name: &'static str,
        /// Its value.
        value: String,
        /// The expected value.
        expected: &'static str,
    },
}

const CONTROL: &str = "POLIS_CONTROL_FD";
const RECOVERY: &str = "POLIS_RECOVERY_FD";
const STAGES: &str = "POLIS_STAGES";

/// The variable with the report of a machine in maintenance, as the line of an event.
pub const MAINTENANCE: &str = "POLIS_MAINTENANCE";
/// The log lines before that report, written by `init`.
pub const MAINTENANCE_LOG: &str = "/run/maintenance.log";

impl Environment {
    /// Reads the variables through `get`.
    ///
    /// # Errors
    ///
    /// [`Error`] for the first variable that is absent or malformed.
    pub fn from_variables(get: impl Fn(&str) -> Option<String>) -> Result<Self, Error> {
        let required = |name| get(name).filter(|it| !it.is_empty()).ok_or(Error::Absent(name));
        let descriptor = |name, value: String| {
            value.parse().map_err(|_not_a_number| Error::Malformed {
                name,
                value,
                expected: "the number of a descriptor",
            })
        };
        let control = descriptor(CONTROL, required(CONTROL)?)?;
        let recovery = get(RECOVERY).filter(|it| !it.is_empty());
        let recovery = recovery.map(|value| descriptor(RECOVERY, value)).transpose()?;
        let stages = get(STAGES).unwrap_or_default();
        Ok(Self {
            control,
            recovery,
            disk: required("POLIS_DISK")?.into(),
            esp: required("POLIS_ESP")?.into(),
            slot: required("POLIS_SLOT")?,
            version: required("POLIS_VERSION")?,
            image: required("POLIS_IMAGE")?,
            stages: parse_stages(&stages).ok_or(Error::Malformed {
                name: STAGES,
                value: stages.clone(),
                expected: "a list of name=start-end in seconds",
            })?,
            previous_guru: get("POLIS_PREVIOUS_GURU").filter(|text| !text.is_empty()),
            maintenance: get(MAINTENANCE).map(report).transpose()?,
        })
    }
}

/// The report of a machine in maintenance.
fn report(line: String) -> Result<Report, Error> {
    let report = EventLine::parse(&line).as_ref().and_then(Report::from_line);
    report.ok_or(Error::Malformed {
        name: MAINTENANCE,
        value: line,
        expected: "a line as that of an event, POLIS guru",
    })
}

/// `kernel=0-4.310,initramfs=4.310-5.002`; an end may be missing.
fn parse_stages(text: &str) -> Option<Stages> {
    let mut stages = Stages::new();
    for item in text.split(',').filter(|item| !item.is_empty()) {
        let (name, times) = item.split_once('=')?;
        let (start, end) = times.split_once('-').unwrap_or((times, ""));
        let started = seconds(start)?;
        let (state, changed) = match end {
            "" => (State::Started, started),
            end => (State::Done, seconds(end)?),
        };
        stages.insert(Stage::from_name(name)?, Entry { state, started, changed });
    }
    Some(stages)
}

fn seconds(text: &str) -> Option<Duration> {
    Duration::try_from_secs_f64(text.parse().ok()?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn variable(name: &str) -> Option<String> {
        let value = match name {
            "POLIS_CONTROL_FD" => "3",
            "POLIS_DISK" => "/dev/vda",
            "POLIS_ESP" => "/dev/vda1",
            "POLIS_SLOT" => "A",
            "POLIS_VERSION" => "0.1.0",
            "POLIS_IMAGE" => "0123456789abcdef",
            "POLIS_STAGES" => "kernel=0-4.310,initramfs=4.310-5.002,system=5.002",
            _ => return None,
        };
        Some(value.to_owned())
    }

    #[test]
    fn what_init_sets_is_understood() {
        let environment = Environment::from_variables(variable).unwrap();
        assert_eq!(environment.previous_guru, None);
        assert_eq!((environment.control, environment.recovery), (3, None));
        let stages = environment.stages;
        assert_eq!(stages[&Stage::Kernel].changed, Duration::from_millis(4310));
        assert_eq!(stages[&Stage::System].state, State::Started);
        assert_eq!(stages.len(), 3);
    }

    #[test]
    fn without_a_channel_node_knows_that_it_was_started_by_hand() {
        let error = Environment::from_variables(|_| None).unwrap_err();
        assert_eq!(error.to_string(), "POLIS_CONTROL_FD is not set");
    }

    #[test]
    fn the_report_of_a_machine_in_maintenance_arrives_whole() {
        let report = Report::new(crate::trapdoor::code::PARAMETERS_ABSENT, vec!["a \"b\"".into()]);
        let with = |line: String| {
            Environment::from_variables(|name| match name {
                MAINTENANCE => Some(line.clone()),
                name => variable(name),
            })
        };
        assert_eq!(with(report.to_line().to_string()).unwrap().maintenance, Some(report));
        assert!(matches!(with("POLIS ready".to_owned()), Err(Error::Malformed { .. })));
        assert_eq!(Environment::from_variables(variable).unwrap().maintenance, None);
    }

    #[test]
    fn a_variable_that_cannot_be_is_quoted() {
        let wrong = |name: &str| match name {
            "POLIS_STAGES" => Some("kernel=now".to_owned()),
            name => variable(name),
        };
        let error = Environment::from_variables(wrong).unwrap_err();
        assert!(error.to_string().starts_with("POLIS_STAGES is \"kernel=now\""));
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic(text in "[a-z=,.0-9-]{0,40}") {
            let _parsed = parse_stages(&text);
        }
    }
}
