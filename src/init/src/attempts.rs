//! The ledger of failed boots: how many failed in a row, and their reports.
//!
//! Both lie on the ESP, the only place that can be written before a data
//! partition is open: `polis/guru/attempts` and a ring of `guru-0.txt` to
//! `guru-7.txt` beside it, each in two copies (`files::in_place`).
//!
//! ```text
//! [0] --guru, reboot--> [1] --guru, reboot--> [2] --guru, reboot--> [3] --guru--> holds
//!  ^                     |                     |                     |
//!  +------- ready -------+---------------------+---------------------+
//! ```
//!
//! Invariants:
//! - The machine reboots by itself only after the count of it is on the disk: a
//!   count that can't be read or written holds the machine, so that no fault of
//!   the ESP makes an endless loop. A disk that does not answer at all is the exception
//!   (`guru`).
//! - The number of failures never goes back, even when the ledger is torn: each report
//!   contains its own number, so the ring never overwrites a newer report as if it were
//!   an older one.
//! - A person's own reboot is not counted: someone is there.
//!
//! What this module does not do: wait or reboot (`guru`).

use std::fs;
use std::path::Path;

use polis_base::files::in_place::{self, Found};
use polis_base::files::{self, Error, Guru, Root};
use polis_base::serial::EventLine;

/// How often in a row the machine reboots by itself.
pub const REBOOTS_MAX: u32 = 3;
/// How many failures are kept.
const RING: u64 = 8;
/// How the line with the number starts.
const NUMBER: &str = "number: ";
/// A summary is one line on a screen.
const SUMMARY_MAX: usize = 300;

/// The counters.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ledger {
    /// Reboots after a guru meditation since the last good boot.
    pub reboots: u32,
    /// Guru meditations since the machine was made.
    pub sequence: u64,
    /// The last failure in one line, until a boot after it was good.
    pub last: Option<String>,
}

impl Ledger {
    /// The ledger as one line of a file.
    fn to_text(&self) -> String {
        let line = EventLine::new("attempts")
            .field("reboots", self.reboots)
            .field("sequence", self.sequence);
        let line = match &self.last {
            Some(last) => line.field("last", last),
            None => line,
        };
        format!("{line}\n")
    }

    /// Reads the file's line. `None` if it is malformed.
    fn from_text(text: &str) -> Option<Self> {
        let line = EventLine::parse(text.strip_suffix('\n')?)?;
        if line.word() != "attempts" {
            return None;
        }
        Some(Self {
            reboots: line.get("reboots")?.parse().ok()?,
            sequence: line.get("sequence")?.parse().ok()?,
            last: line.get("last").map(str::to_owned),
        })
    }

    /// The ledger after one more failure, and the place of its report.
    #[must_use]
    pub fn failed(&self, summary: &str) -> (Self, Place) {
        let place = Place(usize::try_from(self.sequence % RING).unwrap_or_default());
        let last = summary.chars().take(SUMMARY_MAX).collect();
        let sequence = self.sequence.wrapping_add(1);
        (Self { sequence, last: Some(last), ..self.clone() }, place)
    }

    /// The ledger before the machine reboots by itself; `None` if it must not.
    #[must_use]
    pub fn rebooting(&self) -> Option<Self> {
        let reboots = self.reboots.checked_add(1).filter(|reboots| *reboots <= REBOOTS_MAX)?;
        Some(Self { reboots, ..self.clone() })
    }

    /// The replacement of a damaged ledger, beside reports up to `sequence`: the count
    /// is at its limit, so that the machine holds the next time.
    fn torn(sequence: u64) -> Self {
        Self { reboots: REBOOTS_MAX, sequence, last: None }
    }

    /// The ledger after a good boot.
    #[must_use]
    pub fn ready(&self) -> Self {
        Self { reboots: 0, last: None, ..self.clone() }
    }
}

/// A place in the ring of reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place(usize);

/// The line of a report with its number, from 0.
#[must_use]
pub fn number_line(sequence: u64) -> String {
    format!("{NUMBER}{sequence}")
}

fn number_of(report: &str) -> Option<u64> {
    report.lines().find_map(|line| line.strip_prefix(NUMBER)?.trim().parse().ok())
}

/// The files on the ESP.
#[derive(Clone, Debug)]
pub struct Store {
    files: Guru,
}

impl Store {
    /// The store in the tree at `root`, which has the ESP at `esp`.
    #[must_use]
    pub fn in_tree(root: &Path) -> Self {
        Self { files: Root::at(root).esp.guru }
    }

    /// Reads the ledger. A machine without one has never failed; a damaged one counts
    /// as full, and the reports beside it give their number.
    ///
    /// # Errors
    ///
    /// When the ESP can't be read.
    pub fn load(&self) -> Result<Ledger, Error> {
        match in_place::read(self.files.attempts.path()) {
            Ok(Found { content: None, .. }) => Ok(Ledger::default()),
            Ok(Found { content: Some(text), .. }) => {
                let read = std::str::from_utf8(&text).ok().and_then(Ledger::from_text);
                Ok(read.unwrap_or_else(|| self.rebuilt()))
            }
            Err(Error::Damaged { .. } | Error::NotAFile { .. }) => Ok(self.rebuilt()),
            Err(error) => Err(error),
        }
    }

    /// The ledger as far as the reports beside it show: their number.
    #[must_use]
    pub fn rebuilt(&self) -> Ledger {
        let numbers = self.files.reports.iter().filter_map(|report| {
            let text = in_place::read(report.path()).ok()?.content?;
            number_of(&String::from_utf8_lossy(&text))
        });
        Ledger::torn(numbers.max().map_or(0, |newest| newest.wrapping_add(1)))
    }

    /// Writes the ledger.
    ///
    /// # Errors
    ///
    /// When the ESP can't be written.
    pub fn save(&self, ledger: &Ledger) -> Result<(), Error> {
        Self::write(&self.files.attempts, ledger.to_text().as_bytes())
    }

    /// Writes the report of the failure that [`Ledger::failed`] gave this place.
    ///
    /// # Errors
    ///
    /// When the ESP can't be written.
    pub fn report(&self, place: Place, text: &str) -> Result<(), Error> {
        // The cause comes first, and the end of the log last.
        let end = text.len().min(in_place::CONTENT_MAX);
        let file = self.files.reports.get(place.0);
        file.map_or(Ok(()), |file| Self::write(file, &text.as_bytes()[..end]))
    }

    /// Saves one more failure. Returns the ledger, and whether its report was written: a
    /// place that the disk refuses does not stop the count.
    ///
    /// # Errors
    ///
    /// When the ledger can't be written.
    pub fn remember(
        &self,
        ledger: &Ledger,
        summary: &str,
        report: &str,
    ) -> Result<(Ledger, Result<(), Error>), Error> {
        let (ledger, place) = ledger.failed(summary);
        let written = self.report(place, report);
        self.save(&ledger)?;
        Ok((ledger, written))
    }

    /// Writes one file: whole on the disk when this returns, or not at all.
    fn write(file: &files::File, content: &[u8]) -> Result<(), Error> {
        if let Some(directory) = file.path().parent() {
            fs::create_dir_all(directory)
                .map_err(|error| Error::io("make directory", directory, error))?;
        }
        in_place::write(file.path(), Some(content))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_fourth_failure_in_a_row_holds_and_a_good_boot_resets() {
        let mut ledger = Ledger::default();
        for _ in 0..REBOOTS_MAX {
            ledger = ledger.failed("#0601.0000 no parameters").0.rebooting().unwrap();
        }
        let (ledger, _name) = ledger.failed("#0601.0000 no parameters");
        assert_eq!(ledger.rebooting(), None);
        assert_eq!(ledger.ready().rebooting().unwrap().reboots, 1);
        assert_eq!(ledger.ready().last, None);
        assert_eq!(ledger.ready().sequence, 4);
    }

    #[test]
    fn the_ninth_failure_takes_the_place_of_the_first() {
        let mut ledger = Ledger::default();
        let mut places = Vec::new();
        for _ in 0..9 {
            let (next, place) = ledger.failed("x");
            places.push(place);
            ledger = next;
        }
        assert_eq!((places[0], places[7]), (Place(0), Place(7)));
        assert_eq!(places[8], places[0]);
    }

    fn machine() -> (tempfile::TempDir, Store) {
        let root = tempfile::tempdir().unwrap();
        let store = Store::in_tree(root.path());
        (root, store)
    }

    #[test]
    fn a_ledger_is_kept_and_a_damaged_one_holds_the_machine() {
        let (_root, store) = machine();
        assert_eq!(store.load().unwrap(), Ledger::default());
        let (ledger, place) = Ledger::default().failed("a \"quoted\" cause\nof two lines");
        store.save(&ledger).unwrap();
        store.report(place, "text").unwrap();
        assert_eq!(store.load().unwrap(), ledger);
        let torn = |store: &Store| {
            let torn = store.load().unwrap();
            assert_eq!((torn.rebooting(), torn.sequence), (None, 0), "no report says its number");
        };
        for damage in [&b"POLIS attempts reboots=1"[..], b"", b"\xff\n", &[b'x'; 5000]] {
            Store::write(&store.files.attempts, damage).unwrap();
            torn(&store);
            fs::write(store.files.attempts.path(), damage).unwrap();
            torn(&store);
        }
    }

    #[test]
    fn a_damaged_ledger_writes_over_no_newer_report() {
        let (_root, store) = machine();
        let mut ledger = Ledger::default();
        for _ in 0..11 {
            let (next, place) = ledger.failed("x");
            store.report(place, &number_line(ledger.sequence)).unwrap();
            ledger = next;
        }
        store.save(&ledger).unwrap();
        fs::write(store.files.attempts.path(), b"\0\0\0\0").unwrap();
        let torn = store.load().unwrap();
        assert_eq!(torn.sequence, ledger.sequence);
        assert_eq!(torn.failed("y").1, Place(3), "the oldest makes room");
        assert_eq!(torn.ready().rebooting().unwrap().reboots, 1, "a good boot resets the attempts");
    }

    #[test]
    fn a_long_report_loses_its_end() {
        let (_root, store) = machine();
        let text = format!("number: 7\n{}", "\u{e4}".repeat(in_place::CONTENT_MAX));
        store.report(Place(7), &text).unwrap();
        assert_eq!(store.rebuilt().sequence, 8);
    }

    #[test]
    fn a_directory_where_a_file_should_be_stops_no_count() {
        let (_root, store) = machine();
        fs::create_dir_all(store.files.attempts.path().join("deep")).unwrap();
        assert_eq!(store.load().unwrap().rebooting(), None);
        store.save(&Ledger::default()).unwrap();
        assert_eq!(store.load().unwrap(), Ledger::default());
    }

    #[test]
    fn a_report_that_cannot_be_written_stops_no_count() {
        let (_root, store) = machine();
        let place = store.files.reports[0].path();
        fs::create_dir_all(place.parent().unwrap()).unwrap();
        rustix::fs::mknodat(
            rustix::fs::CWD,
            place,
            rustix::fs::FileType::Fifo,
            rustix::fs::Mode::from_raw_mode(0o600),
            0,
        )
        .unwrap();
        let (counted, written) = store.remember(&Ledger::default(), "x", "text").unwrap();
        assert!(matches!(written, Err(Error::NotAFile { .. })), "{written:?}");
        assert_eq!(counted.sequence, 1);
        assert_eq!(store.load().unwrap(), counted);
    }

    proptest! {
        #[test]
        fn a_ledger_reads_as_it_was_written(
            reboots: u32, sequence: u64, last in prop::option::of(any::<String>())
        ) {
            let ledger = Ledger { reboots, sequence, last };
            prop_assert_eq!(Ledger::from_text(&ledger.to_text()), Some(ledger));
        }

        #[test]
        fn the_machine_never_reboots_by_itself_more_often_than_it_may(ready in prop::collection::vec(any::<bool>(), 0..40)) {
            let mut ledger = Ledger::default();
            let mut in_a_row = 0;
            for ready in ready {
                ledger = if ready { ledger.ready() } else { ledger.failed("x").0 };
                if ready {
                    in_a_row = 0;
                } else if let Some(next) = ledger.rebooting() {
                    ledger = next;
                    in_a_row += 1;
                }
                prop_assert!(in_a_row <= REBOOTS_MAX);
            }
        }
    }
}
