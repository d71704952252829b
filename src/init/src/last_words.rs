//! The last words of a kernel that panicked, as firmware has kept them: read once, and removed.
//!
//! A panic ends `init` with everything else, so nothing counts the reboot that follows. The
//! kernel writes the end of its log where firmware keeps it (`pstore`): the error record table
//! of ACPI (ERST), or variables of UEFI. The next boot takes the records from there, and they
//! count as one failed boot, as a guru meditation does (`attempts`).
//!
//! ```text
//! panic --> ERST or variables --reset--> a few files in pstore --> [removed] --> words
//! ```
//!
//! The file system of pstore is mounted only where there may be a record: mounting it reads all
//! variables of UEFI, which a usual boot does not need.
//!
//! The records are foreign bytes: firmware, or any program that may write its variables, makes
//! them. Their number, their size and the characters in them are bounded, and only their kind and
//! one line are read for a meaning.
//!
//! Invariants:
//! - A record counts once: only one that was removed counts.
//!
//! What this module does not do: count (`attempts`), or decide what follows (`stage2`).

use std::cmp::Reverse;
use std::fs::{self, File};
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use super::modules::Modules;
use super::mounts;
use polis_base::serial::is_control;

/// Which driver keeps records on this machine; `(null)` means that no driver does yet.
const BACKEND: &str = "/sys/module/pstore/parameters/backend";
/// The driver that keeps them in variables of UEFI.
pub const EFI_MODULE: &str = "efi_pstore";
/// The names of these variables begin and end so.
const EFI_RECORD: (&str, &str) = ("dump-type", "-cfc8fc79-be2e-4ddc-97f0-9f98bfe298a0");

/// How the name of a part of the kernel's log begins in pstore.
const LOG: &str = "dmesg-";
/// Files that are looked at: a panic makes a dozen of a kilobyte, or two of eight.
const RECORDS_MAX: usize = 128;
const RECORD_MAX: u64 = 64 << 10;
/// Parts of one panic are written within moments; the next one comes a boot later.
const TOGETHER: Duration = Duration::from_secs(5);

/// The end of the log that is kept: the reason and the calls that led to it.
const LINES_MAX: usize = 40;
const LINE_MAX: usize = 200;

/// How the kernel begins the line with its reason.
const REASON: &str = "Kernel panic - not syncing: ";

/// The last lines of a kernel before it ended.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LastWords {
    /// Whether there is a record of a panic; the kernel survives other errors. Several panics
    /// count as one failed boot: firmware may hold those of another system.
    pub panicked: bool,
    /// The reason of the newest panic, in the kernel's words.
    pub cause: String,
    /// The end of its log.
    pub lines: Vec<String>,
    /// Records that could not be read or removed.
    pub faults: Vec<String>,
}

/// Takes what there is. `variables` is where those of UEFI are mounted.
#[must_use]
pub fn take(variables: &Path) -> LastWords {
    let backend = fs::read_to_string(BACKEND).unwrap_or_default();
    if matches!(backend.trim(), "" | "(null)") {
        if !has_record(variables) {
            return LastWords::default();
        }
        // Without it, the mount shows nothing, and the variables stay for the next boot.
        Modules::of_running_kernel().ok().map(|mut modules| modules.load(EFI_MODULE).ok());
    }
    let pstore = mounts::pstore();
    match mounts::apply(&pstore) {
        Ok(()) => take_from(&pstore.target),
        // A kernel without pstore.
        Err(_error) => LastWords::default(),
    }
}

/// Whether a variable of UEFI is a record.
fn has_record(variables: &Path) -> bool {
    let (start, end) = EFI_RECORD;
    fs::read_dir(variables).into_iter().flatten().flatten().any(|entry| {
        let name = entry.file_name();
        name.to_str().is_some_and(|name| name.starts_with(start) && name.ends_with(end))
    })
}

/// Takes the records that are files in `directory`.
fn take_from(directory: &Path) -> LastWords {
    let mut words = LastWords::default();
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let mut paths: Vec<PathBuf> = entries
        .filter(|entry| entry.file_name().to_str().is_some_and(|name| name.starts_with(LOG)))
        .map(|entry| entry.path())
        .collect();
    paths.sort();
    let mut parts = Vec::new();
    for path in paths.iter().take(RECORDS_MAX) {
        let part = read(path);
        let name = path.file_name().unwrap_or_default().display();
        // Before it counts: one that stays would count at every boot.
        if let Err(error) = fs::remove_file(path) {
            words.faults.push(format!("record {name} cannot be removed: {error}"));
            continue;
        }
        match part {
            Some(part) => parts.push(part),
            None => words.faults.push(format!("record {name} is not one of a kernel's log")),
        }
    }
    parts.retain(|part| part.panic);
    let Some(newest) = parts.iter().map(|part| part.written).max() else { return words };
    // A record may have any time.
    let with_it =
        |part: &Part| newest.duration_since(part.written).is_ok_and(|age| age <= TOGETHER);
    parts.retain(with_it);
    words.panicked = true;
    // The last part of the log has the number one.
    parts.sort_by_key(|part| Reverse(part.number));
    let lines: Vec<String> = parts.iter().flat_map(|part| part.text.lines()).map(clean).collect();
    let reason = lines.iter().rev().find_map(|line| Some(line.split_once(REASON)?.1.to_owned()));
    words.cause = reason.unwrap_or_else(|| "its record does not say why".to_owned());
    words.lines = lines[lines.len().saturating_sub(LINES_MAX)..].to_vec();
    words
}

/// One record: a part of the end of a log.
#[derive(Debug)]
struct Part {
    /// Whether the kernel ended after it.
    panic: bool,
    /// Counted from the end of the log, from 1.
    number: u32,
    written: SystemTime,
    text: String,
}

fn read(path: &Path) -> Option<Part> {
    let file = File::open(path).ok()?;
    let written = file.metadata().and_then(|metadata| metadata.modified()).ok()?;
    let mut bytes = Vec::new();
    file.take(RECORD_MAX).read_to_end(&mut bytes).ok()?;
    let text = String::from_utf8_lossy(&bytes);
    let (panic, number, text) = parse(&text)?;
    Some(Part { panic, number, written, text: text.to_owned() })
}

/// Reads what the kernel puts before a part (`fs/pstore/platform.c`): `Panic#2 Part1`, the
/// number of panics and errors since it started, and the number of the part.
fn parse(text: &str) -> Option<(bool, u32, &str)> {
    let (head, text) = text.split_once('\n')?;
    let (kind, rest) = head.split_once('#')?;
    let (count, part) = rest.split_once(" Part")?;
    let _count: u32 = count.parse().ok()?;
    let number = part.trim_end().parse().ok().filter(|number| *number >= 1)?;
    Some((kind == "Panic", number, text))
}

/// A line as it can be shown: without the priority (`<4>`) before it.
fn clean(line: &str) -> String {
    let text = match line.strip_prefix('<').and_then(|rest| rest.split_once('>')) {
        Some((number, rest)) if number.parse::<u8>().is_ok() => rest,
        Some(_) | None => line,
    };
    text.chars().take(LINE_MAX).map(|c| if is_control(c) { ' ' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A pstore with these files, each written so many seconds after 1970.
    fn pstore(files: &[(&str, u64, &str)]) -> tempfile::TempDir {
        let directory = tempfile::tempdir().unwrap();
        for (name, seconds, content) in files {
            let path = directory.path().join(name);
            fs::write(&path, content).unwrap();
            let written = SystemTime::UNIX_EPOCH + Duration::from_secs(*seconds);
            File::options().write(true).open(path).unwrap().set_modified(written).unwrap();
        }
        directory
    }

    fn left(directory: &tempfile::TempDir) -> usize {
        fs::read_dir(directory.path()).unwrap().count()
    }

    #[test]
    fn a_panic_in_two_parts_is_read_in_its_order_once() {
        let pstore = pstore(&[
            (
                "dmesg-erst-1",
                100,
                "Panic#1 Part1\n<0>[   12.1] Kernel panic - not syncing: sysrq\
                                   \n<4>[   12.2]  panic+0x1/0x2\n",
            ),
            ("dmesg-erst-2", 101, "Panic#1 Part2\n<6>[   11.0] before\n"),
        ]);
        let words = take_from(pstore.path());
        assert_eq!((words.panicked, words.cause.as_str()), (true, "sysrq"));
        let lines = [
            "[   11.0] before",
            "[   12.1] Kernel panic - not syncing: sysrq",
            "[   12.2]  panic+0x1/0x2",
        ];
        assert_eq!(words.lines, lines);
        assert_eq!(words.faults, [""; 0]);
        assert_eq!(left(&pstore), 0);
        assert_eq!(take_from(pstore.path()), LastWords::default());
    }

    #[test]
    fn several_panics_count_as_one_and_the_newest_is_shown() {
        let panic = |reason| format!("Panic#1 Part1\n<0>[ 1.0] {REASON}{reason}\n");
        let (old, new) = (panic("old"), panic("new"));
        let pstore = pstore(&[
            ("dmesg-efi_pstore-9", 100, &old),
            ("dmesg-efi_pstore-1", 160, &new),
            ("dmesg-efi_pstore-8", 100, "Panic#1 Part2\nx\n"),
        ]);
        let words = take_from(pstore.path());
        assert_eq!((words.panicked, words.cause.as_str()), (true, "new"));
        assert_eq!(words.lines.len(), 1);
    }

    #[test]
    fn an_error_that_the_kernel_survived_and_another_s_record_do_not_count() {
        let pstore = pstore(&[
            ("dmesg-erst-1", 100, "Oops#1 Part1\n<1>[ 1.0] BUG: something\n"),
            ("mce-erst-2", 100, "\u{1}\u{2}"),
            ("console-ramoops-0", 100, "text"),
        ]);
        assert_eq!(take_from(pstore.path()), LastWords::default());
        assert_eq!(left(&pstore), 2, "only those of the kernel's log are taken");
    }

    #[test]
    fn what_is_not_a_record_is_named_and_taken_away() {
        let long = format!("Panic#1 Part1\n{}", "\u{1b}[2J\u{e4}".repeat(40_000));
        let files = [
            ("dmesg-erst-1.enc.z", 100, "\u{1}\u{2}\n"),
            ("dmesg-erst-2", 100, ""),
            ("dmesg-erst-3", 100, "Panic#x Part1\n"),
            ("dmesg-erst-4", 100, "Panic#1 Part0\n"),
            ("dmesg-erst-5", 100, &long),
        ];
        let words = take_from(pstore(&files).path());
        assert_eq!(words.faults.len(), 4);
        assert!(words.faults[0].contains("dmesg-erst-1.enc.z"), "{:?}", words.faults);
        assert_eq!((words.panicked, words.lines.len()), (true, 1));
        assert!(!words.lines[0].contains('\u{1b}') && words.lines[0].chars().count() == LINE_MAX);
        assert_eq!(words.cause, "its record does not say why");
    }

    #[test]
    fn a_record_that_stays_does_not_count() {
        let directory = tempfile::tempdir().unwrap();
        // A directory cannot be removed as a file.
        fs::create_dir(directory.path().join("dmesg-erst-1")).unwrap();
        let words = take_from(directory.path());
        assert!(!words.panicked);
        assert!(words.faults[0].contains("cannot be removed"), "{:?}", words.faults);
    }

    #[test]
    fn a_variable_of_uefi_is_known_for_a_record_by_its_name() {
        let variables = tempfile::tempdir().unwrap();
        let file = |name: &str| fs::write(variables.path().join(name), "").unwrap();
        file("BootCurrent-8be4df61-93ca-11d2-aa0d-00e098032b8c");
        file("dump-type0-1-1-1-C-8be4df61-93ca-11d2-aa0d-00e098032b8c");
        assert!(!has_record(variables.path()));
        file("dump-type0-1-1-1700000000-C-cfc8fc79-be2e-4ddc-97f0-9f98bfe298a0");
        assert!(has_record(variables.path()));
        assert!(!has_record(Path::new("/nowhere")));
    }

    proptest! {
        #[test]
        fn arbitrary_records_never_panic_and_what_is_shown_is_bounded(
            head in "(Panic|Oops|x)?#?[0-9]{0,12}( Part)?[0-9]{0,12}\n?",
            noise in prop::collection::vec(any::<u8>(), 0..2000),
        ) {
            let directory = tempfile::tempdir().unwrap();
            let content = [head.as_bytes(), &noise].concat();
            fs::write(directory.path().join("dmesg-x-1"), content).unwrap();
            let words = take_from(directory.path());
            prop_assert!(words.lines.len() <= LINES_MAX);
            prop_assert!(words.lines.iter().all(|line| line.chars().count() <= LINE_MAX));
            prop_assert!(words.lines.iter().all(|line| !line.contains(is_control)));
        }
    }
}

#[cfg(test)]
#[path = "last_words_fuzz_tests.rs"]
mod fuzz_tests;
