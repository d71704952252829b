//! The ledger of failed boots: how many failed in a row, and their reports.
//!
//! Both lie on the ESP, the only place that can be written before a data
//! partition is open: `polis/guru/attempts` and a ring of `guru-0.txt` to
//! `guru-7.txt` beside it.
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
//!   the ESP makes an endless loop.
//! - The number of failures never goes back, even when the ledger is torn: each report
//!   contains its own number, so the ring never overwrites a newer report as if it were
//!   an older one.
//! - A person's own reboot is not counted: someone is there.
//!
//! What this module does not do: wait or reboot (`guru`).

use std::fs::{self, File};
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use polis_base::files::{self, atomic};
use polis_base::serial::EventLine;

/// How often in a row the machine reboots by itself.
pub const REBOOTS_MAX: u32 = 3;
/// How many failures are kept.
const RING: u64 = 8;
/// A ledger is one line; a longer file is foreign.
const LEDGER_MAX: u64 = 4096;
/// How much of a report is read; the number is near its start.
const REPORT_MAX: u64 = 64 << 10;
/// How the line with the number starts.
const NUMBER: &str = "number: ";
/// A summary is one line on a screen.
const SUMMARY_MAX: usize = 300;
/// Reports do not contain secrets. FAT keeps no modes; its mount options decide.
const MODE: u32 = 0o644;

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

    /// The ledger after one more failure, and the name of the file that describes it.
    #[must_use]
    pub fn failed(&self, summary: &str) -> (Self, String) {
        let name = format!("guru-{}.txt", self.sequence % RING);
        let last = summary.chars().take(SUMMARY_MAX).collect();
        let sequence = self.sequence.wrapping_add(1);
        (Self { sequence, last: Some(last), ..self.clone() }, name)
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

/// The line of a report with its number, from 0.
#[must_use]
pub fn number_line(sequence: u64) -> String {
    format!("{NUMBER}{sequence}")
}

fn number_of(report: &str) -> Option<u64> {
    report.lines().find_map(|line| line.strip_prefix(NUMBER)?.trim().parse().ok())
}

/// The directory on the ESP.
#[derive(Clone, Debug)]
pub struct Store {
    directory: PathBuf,
}

impl Store {
    /// The store on the ESP that is mounted at `esp`.
    #[must_use]
    pub fn on(esp: &Path) -> Self {
        Self { directory: esp.join("polis/guru") }
    }

    /// Reads the ledger. A machine without one has never failed; a damaged one counts
    /// as full, and the reports beside it give their number.
    ///
    /// # Errors
    ///
    /// When the ESP can't be read.
    pub fn load(&self) -> io::Result<Ledger> {
        match self.read() {
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::InvalidData | io::ErrorKind::IsADirectory
                ) =>
            {
                Ok(self.rebuilt())
            }
            read => read,
        }
    }

    /// The ledger as far as the reports beside it show: their number.
    #[must_use]
    pub fn rebuilt(&self) -> Ledger {
        Ledger::torn(self.reports())
    }

    /// The number after that of the newest report in the ring.
    fn reports(&self) -> u64 {
        let numbers = (0..RING).filter_map(|place| {
            let path = self.directory.join(format!("guru-{place}.txt"));
            let file = File::open(path).ok()?;
            let mut text = Vec::new();
            file.take(REPORT_MAX).read_to_end(&mut text).ok()?;
            number_of(&String::from_utf8_lossy(&text))
        });
        numbers.max().map_or(0, |newest| newest.wrapping_add(1))
    }

    fn read(&self) -> io::Result<Ledger> {
        let path = self.directory.join("attempts");
        let size = match fs::metadata(&path) {
            Ok(metadata) => metadata.len(),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Ledger::default()),
            Err(error) => return Err(error),
        };
        let damaged = || io::Error::new(io::ErrorKind::InvalidData, "the file is damaged");
        if size > LEDGER_MAX {
            return Err(damaged());
        }
        let bytes = fs::read(path)?;
        std::str::from_utf8(&bytes).ok().and_then(Ledger::from_text).ok_or_else(damaged)
    }

    /// Writes the ledger.
    ///
    /// # Errors
    ///
    /// When the ESP can't be written.
    pub fn save(&self, ledger: &Ledger) -> io::Result<()> {
        self.write("attempts", ledger.to_text().as_bytes())
    }

    /// Writes one file: whole on the disk when this returns, or not at all.
    ///
    /// # Errors
    ///
    /// When the ESP can't be written.
    pub fn write(&self, name: &str, bytes: &[u8]) -> io::Result<()> {
        fs::create_dir_all(&self.directory)?;
        let place = self.directory.join(name);
        let temporary = self.directory.join(format!("{name}.new"));
        let replace =
            || atomic::replace(&place, &temporary, MODE, bytes).map_err(files::Error::into_io);
        match replace() {
            // Polis never makes a directory of this name, so it is the rest of a
            // damaged entry.
            Err(error) if error.kind() == io::ErrorKind::IsADirectory => {
                fs::remove_dir_all(&place)?;
                replace()
            }
            replaced => replaced,
        }
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
        let mut names = Vec::new();
        for _ in 0..9 {
            let (next, name) = ledger.failed("x");
            names.push(name);
            ledger = next;
        }
        assert_eq!(names[0], "guru-0.txt");
        assert_eq!(names[7], "guru-7.txt");
        assert_eq!(names[8], names[0]);
    }

    #[test]
    fn a_ledger_is_kept_and_a_damaged_one_holds_the_machine() {
        let esp = tempfile::tempdir().unwrap();
        let store = Store::on(esp.path());
        assert_eq!(store.load().unwrap(), Ledger::default());
        let (ledger, name) = Ledger::default().failed("a \"quoted\" cause\nof two lines");
        store.save(&ledger).unwrap();
        store.write(&name, b"text").unwrap();
        assert_eq!(store.load().unwrap(), ledger);
        for damage in [&b"POLIS attempts reboots=1"[..], b"", b"\xff\n", &[b'x'; 5000]] {
            fs::write(esp.path().join("polis/guru/attempts"), damage).unwrap();
            let torn = store.load().unwrap();
            assert_eq!((torn.rebooting(), torn.sequence), (None, 0), "no report says its number");
        }
    }

    #[test]
    fn a_damaged_ledger_writes_over_no_newer_report() {
        let esp = tempfile::tempdir().unwrap();
        let store = Store::on(esp.path());
        let mut ledger = Ledger::default();
        for _ in 0..11 {
            let (next, name) = ledger.failed("x");
            store.write(&name, number_line(ledger.sequence).as_bytes()).unwrap();
            ledger = next;
        }
        store.save(&ledger).unwrap();
        fs::write(esp.path().join("polis/guru/attempts"), b"\0\0\0\0").unwrap();
        let torn = store.load().unwrap();
        assert_eq!(torn.sequence, ledger.sequence);
        assert_eq!(torn.failed("y").1, "guru-3.txt", "the oldest makes room");
        assert_eq!(torn.ready().rebooting().unwrap().reboots, 1, "a good boot forgives all");
    }

    #[test]
    fn a_directory_where_a_file_should_be_stops_no_count() {
        let esp = tempfile::tempdir().unwrap();
        let store = Store::on(esp.path());
        fs::create_dir_all(esp.path().join("polis/guru/attempts.new/deep")).unwrap();
        fs::create_dir_all(esp.path().join("polis/guru/attempts/deep")).unwrap();
        assert_eq!(store.load().unwrap().rebooting(), None);
        store.save(&Ledger::default()).unwrap();
        assert_eq!(store.load().unwrap(), Ledger::default());
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
