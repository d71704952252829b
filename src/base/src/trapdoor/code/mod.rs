//! The codes of all failures that open the trapdoor: `#SSCC.DDDD`.
//!
//! `SS` is the stage, `CC` the cause within it, both decimal and never changed; `DDDD`
//! is a detail of the occurrence in hexadecimal (an error number, a field number, an
//! exit status), zero without a detail. The table of failures has a row for each: its
//! number, whether the disk's recovery key helps, and the next step. Each has a section
//! in `docs/errors.md`, headed by its code without the detail; a test checks that.

mod table;

use std::{fmt, io};

use crate::stage::Stage;

pub use table::*;

/// The code of a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Code {
    stage: Stage,
    cause: u8,
    detail: u16,
}

impl Code {
    /// The code of cause number `cause` in `stage`, without a detail.
    #[must_use]
    pub const fn new(stage: Stage, cause: u8) -> Self {
        Self { stage, cause, detail: 0 }
    }

    /// The same code with a detail of this occurrence.
    #[must_use]
    pub const fn with_detail(self, detail: u16) -> Self {
        Self { detail, ..self }
    }

    /// The same code with the kernel's error number as its detail, as far as it fits.
    #[must_use]
    pub fn with_error(self, error: &io::Error) -> Self {
        let number = error.raw_os_error().and_then(|number| u16::try_from(number).ok());
        self.with_detail(number.unwrap_or(0))
    }

    /// The stage in which this failure occurs.
    #[must_use]
    pub fn stage(self) -> Stage {
        self.stage
    }

    /// Whether the recovery key of the disk helps, independent of the reporting
    /// service.
    #[must_use]
    pub fn is_locked(self) -> bool {
        self.failure().is_some_and(|failure| failure.locked)
    }

    /// The next step for the operator; empty for a code that is not in the table.
    #[must_use]
    pub fn help(self) -> &'static str {
        self.failure().map_or("", |failure| failure.help)
    }

    fn failure(self) -> Option<&'static Failure> {
        FAILURES.iter().find(|failure| failure.code == self.with_detail(0))
    }

    /// `SSCC`: the heading of its section in `docs/errors.md`.
    #[must_use]
    pub fn anchor(self) -> String {
        format!("{:02}{:02}", self.stage.number(), self.cause)
    }

    /// Reads `#SSCC.DDDD`.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let (head, detail) = text.strip_prefix('#')?.split_once('.')?;
        let number: u8 = head.get(..2)?.parse().ok()?;
        let stage = Stage::ALL.into_iter().find(|stage| stage.number() == number)?;
        let cause = head.get(2..)?.parse().ok()?;
        Some(Self { stage, cause, detail: u16::from_str_radix(detail, 16).ok()? })
    }
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "#{:02}{:02}.{:04X}", self.stage.number(), self.cause, self.detail)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_code_reads_as_it_is_written() {
        let code = PARAMETERS_ABSENT.with_detail(0x1f);
        assert_eq!(code.to_string(), "#0601.001F");
        assert_eq!(Code::parse("#0601.001F"), Some(code));
    }

    #[test]
    fn each_code_has_one_number_and_one_section() {
        let page = include_str!("../../../../../docs/errors.md");
        let sections: Vec<_> =
            page.lines().filter_map(|line| line.strip_prefix("## ")?.split(' ').next()).collect();
        let mut anchors: Vec<_> = FAILURES.iter().map(|row| row.code.anchor()).collect();
        anchors.sort();
        assert_eq!(sections, anchors);
    }

    #[test]
    fn a_partition_is_wiped_before_it_is_deleted_so_that_its_rest_counts_as_free_space() {
        let deletes =
            |row: &&Failure| row.help.contains("partition") && row.help.contains("delete");
        let rows: Vec<_> = FAILURES.iter().filter(deletes).collect();
        assert!(rows.len() > 5, "only {} were found", rows.len());
        for row in rows {
            let (code, help) = (row.code, row.help);
            assert!(help.contains("wipe the first 16 MiB of the "), "{code}: {help}");
        }
    }
}
