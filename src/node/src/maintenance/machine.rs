//! What a machine in maintenance tells of itself: its logs, its parameters.
//!
//! Everything here blocks on files; `serve` calls it where that is allowed.

use polis_base::cause;
use polis_base::files::{Esp, File};
use polis_base::serial::{Severity, log_line};
use polis_base::sys::kmsg;

/// Whether this machine is a member of a cluster, or was: also where that cannot be read.
pub(super) fn has_home(esp: &Esp) -> bool {
    !matches!(esp.sealed_configuration.read(), Ok(None))
}

/// The kernel's log, as far as its memory has it.
pub(super) fn kernel_log() -> String {
    let mut text = String::new();
    let Ok(mut reader) = kmsg::Reader::open(kmsg::From::Start) else { return text };
    while let Ok(Some(record)) = reader.next_record() {
        let severity = match record.level {
            0..=2 => Severity::Fatal,
            3 => Severity::Error,
            4 => Severity::Warning,
            5 | 6 => Severity::Info,
            _ => Severity::Debug,
        };
        text.push_str(&log_line(record.time, severity, "kernel", &record.text));
        text.push('\n');
    }
    text
}

/// The reports of failures on the ESP, the oldest first; in the place of one that cannot be read,
/// the cause.
pub(super) fn reports(reports: &[File]) -> String {
    let read = reports.iter().filter_map(|report| {
        let text = match report.read().transpose()? {
            Ok(bytes) => String::from_utf8_lossy(&bytes).into_owned(),
            Err(error) => format!("a report cannot be read: {}", cause::line(&error)),
        };
        let number = text.lines().find_map(|line| line.strip_prefix("number: ")?.parse().ok());
        Some((number.unwrap_or(0_u64), text))
    });
    let mut read: Vec<_> = read.collect();
    read.sort();
    read.into_iter().map(|(_, text)| text + "\n").collect()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use polis_base::files::Root;

    use super::*;

    #[test]
    fn reports_come_in_the_order_of_their_numbers_and_a_damaged_one_is_named() {
        let base = tempfile::tempdir().unwrap();
        let root = Root::at(base.path());
        root.create().unwrap();
        let folder = root.esp.guru.reports[0].path().parent().unwrap();
        fs::create_dir_all(folder).unwrap();
        for (place, number) in [(0, 8), (1, 1), (7, 7)] {
            let text = format!("number: {number}\nbody");
            root.esp.guru.reports[place].write(text.as_bytes()).unwrap();
        }
        let damaged = root.esp.guru.reports[2].path();
        fs::write(damaged, "damaged").unwrap();
        let text = reports(&root.esp.guru.reports);
        let numbers: Vec<_> = text.lines().filter(|line| line.starts_with("number")).collect();
        assert_eq!(numbers, ["number: 1", "number: 7", "number: 8"]);
        let first = text.lines().next().unwrap();
        assert!(first.starts_with("a report cannot be read: "), "{first}");
        assert!(first.contains(damaged.to_str().unwrap()), "{first}");
    }

    #[test]
    fn a_sealed_configuration_is_a_home_even_if_it_is_damaged() {
        let base = tempfile::tempdir().unwrap();
        let root = Root::at(base.path());
        root.create().unwrap();
        assert!(!has_home(&root.esp));
        root.esp.sealed_configuration.write(b"sealed").unwrap();
        assert!(has_home(&root.esp));
        fs::write(root.esp.sealed_configuration.path(), b"damaged").unwrap();
        assert!(has_home(&root.esp));
    }
}
