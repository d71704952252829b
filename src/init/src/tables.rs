//! The partition tables of the disks, read with a deadline: a disk that does not answer is put
//! aside, and the others are looked at.
//!
//! ```text
//! [new] --ask--> [asked] -----> [answered]: its table, or why it is unusable, and then it is
//!                   |               ^        asked again
//!                   |               | it answers after all
//!                   +--> [aside]: nothing for TABLE
//! ```
//!
//! Invariants:
//! - All disks are asked at once: several that do not answer take as long as one.
//! - A look takes [`NOTICE`] at most, so a disk that the firmware proves waits no longer for one
//!   that does not answer.
//! - A disk that is aside, or whose reads took long and failed, is not asked again, so that it
//!   costs its time and its thread once. Another disk with its name is.
//! - A table that was read is not read again: nothing changes it before `node` runs.
//!
//! What this module does not do: know what a table means (`disk`).

use std::collections::BTreeMap;
use std::time::Duration;

use polis_base::serial::Severity;
use polis_base::stage::Stage;
use polis_base::sys::clock;

use super::deadline::{self, NOTICE, TABLE, Work};
use super::disk::{self, Block, Disk};
use super::gpt::Partition;
use super::machine::Machine;

type Table = Result<Vec<Partition>, String>;

#[derive(Debug)]
enum State {
    Answered(Table),
    /// Its table could not be read, and that took long: why.
    Failing(String),
    Silent {
        since: Duration,
        /// It has had its time.
        aside: bool,
        /// The read of its table that has not ended; `None` if another read did not.
        work: Option<Work<Table>>,
    },
}

/// The disks that were asked.
#[derive(Debug, Default)]
pub(super) struct Tables {
    disks: BTreeMap<Block, State>,
}

impl Tables {
    /// Asks the disks that are new, or whose table was unusable. Returns all.
    pub(super) fn look(&mut self, machine: &mut Machine) -> Vec<Disk> {
        self.look_at(machine, disk::blocks(), TABLE, disk::table)
    }

    /// Whether a disk may still answer in time.
    pub(super) fn any_asked(&self) -> bool {
        self.disks.values().any(|state| matches!(state, State::Silent { aside: false, .. }))
    }

    /// Whether a disk does not answer.
    pub(super) fn any_aside(&self) -> bool {
        self.disks.values().any(|state| matches!(state, State::Silent { aside: true, .. }))
    }

    /// Puts a disk aside that has not answered another question since then.
    pub(super) fn put_aside(&mut self, machine: &mut Machine, name: &str, since: Duration) {
        for (_, state) in self.disks.iter_mut().filter(|(block, _)| block.name == name) {
            complain(machine, name, since);
            *state = State::Silent { since, aside: true, work: None };
        }
    }

    fn look_at(
        &mut self,
        machine: &mut Machine,
        blocks: Vec<Block>,
        time: Duration,
        read: impl Fn(&Block) -> Table + Clone + Send + 'static,
    ) -> Vec<Disk> {
        self.disks.retain(|block, _| blocks.contains(block));
        let begun = clock::uptime();
        let mut asked = Vec::new();
        for block in blocks {
            match self.disks.get(&block) {
                Some(
                    State::Answered(Ok(_)) | State::Failing(_) | State::Silent { work: None, .. },
                ) => {}
                Some(State::Silent { since, work: Some(work), .. }) => {
                    let Some(table) = work.answer() else { continue };
                    let seconds = begun.saturating_sub(*since).as_secs();
                    let text = format!("disk {} answers, after {seconds} s", block.name);
                    machine.port.log(Severity::Warning, &text);
                    let late = usable(table)
                        .map_or_else(State::Failing, |table| State::Answered(Ok(table)));
                    self.disks.insert(block, late);
                }
                None | Some(State::Answered(Err(_))) => {
                    let (read, asks) = (read.clone(), block.clone());
                    match Work::begin(move || read(&asks)) {
                        Ok(work) => asked.push((block, work)),
                        Err(error) => {
                            self.disks.insert(block, State::Answered(Err(error.to_string())));
                        }
                    }
                }
            }
        }
        let asked = self.collect(machine, asked, NOTICE.min(time));
        if !asked.is_empty() {
            let names: Vec<&str> = asked.iter().map(|(block, _)| &*block.name).collect();
            let text = format!(
                "disk {}, which has not answered yet, and is put aside after {} s; check the disk \
                 and its cable",
                names.join(", disk "),
                time.as_secs()
            );
            machine.waiting(Stage::Initramfs, text);
        }
        self.disks.extend(asked.into_iter().map(|(block, work)| {
            (block, State::Silent { since: begun, aside: false, work: Some(work) })
        }));
        let now = clock::uptime();
        for (block, state) in &mut self.disks {
            let State::Silent { since, aside, .. } = state else { continue };
            if !*aside && now.saturating_sub(*since) >= time {
                complain(machine, &block.name, *since);
                *aside = true;
            }
        }
        self.disks.iter().map(|(block, state)| known(block, state)).collect()
    }

    /// Takes the answers that come in `time`; returns the rest.
    fn collect(
        &mut self,
        machine: &mut Machine,
        asked: Vec<(Block, Work<Table>)>,
        mut time: Duration,
    ) -> Vec<(Block, Work<Table>)> {
        let mut rest = Vec::new();
        for (block, work) in asked {
            match work.wait(machine, &mut time) {
                Some(table) => {
                    self.disks.insert(block, State::Answered(usable(table)));
                }
                None => rest.push((block, work)),
            }
        }
        rest
    }
}

fn usable(table: Result<Table, deadline::Error>) -> Table {
    table.unwrap_or_else(|error| Err(error.to_string()))
}

fn known(block: &Block, state: &State) -> Disk {
    let table = match state {
        State::Answered(table) => table.clone(),
        State::Failing(error) => Err(error.clone()),
        State::Silent { since, .. } => {
            Err(format!("has not answered since {:.1} s after the start", since.as_secs_f64()))
        }
    };
    Disk { name: block.name.clone(), table }
}

fn complain(machine: &mut Machine, name: &str, since: Duration) {
    let seconds = clock::uptime().saturating_sub(since).as_secs();
    let text = format!(
        "disk {name} has not answered within {seconds} s and is put aside; check the disk and its \
         cable"
    );
    machine.port.log(Severity::Error, &text);
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::sync::{Arc, Mutex};

    use super::*;

    /// Long enough for a thread, and short enough for a test.
    const SHORT: Duration = Duration::from_secs(1);

    fn blocks(names: &[(&str, u64)]) -> Vec<Block> {
        names.iter().map(|(name, sequence)| Block::new(name, *sequence)).collect()
    }

    fn described(disks: &[Disk]) -> Vec<String> {
        disks.iter().map(Disk::describe).collect()
    }

    /// The names of the disks that were asked.
    type Asked = Arc<Mutex<Vec<String>>>;

    /// `sda` answers when the sender sends, and `sdb` has no table.
    fn reader() -> (Asked, mpsc::Sender<()>, impl Fn(&Block) -> Table + Clone + Send + 'static) {
        let asked = Asked::default();
        let (answer, answered) = mpsc::channel::<()>();
        let (known, answered) = (Arc::clone(&asked), Arc::new(Mutex::new(answered)));
        let read = move |block: &Block| {
            known.lock().unwrap().push(block.name.clone());
            match &*block.name {
                "sda" => drop(answered.lock().unwrap().recv()),
                "sdb" => return Err("no partition table".to_owned()),
                _ => {}
            }
            Ok(Vec::new())
        };
        (asked, answer, read)
    }

    #[test]
    fn a_disk_that_does_not_answer_is_put_aside_and_the_others_are_read() {
        let (mut machine, mut tables) = (Machine::default(), Tables::default());
        let (asked, answer, read) = reader();
        let three = blocks(&[("sda", 1), ("sdb", 2), ("sdc", 3)]);
        let found = tables.look_at(&mut machine, three.clone(), SHORT, read.clone());
        let found = described(&found);
        assert!(found[0].starts_with("sda (has not answered since "), "{found:?}");
        assert_eq!(found[1..], ["sdb (no partition table)", "sdc ()"]);
        assert!(tables.any_aside());
        let logged = |machine: &Machine| machine.port.kept().any(|line| line.contains("disk sda"));
        assert!(logged(&machine), "the disk is not named in the log");

        // It is not asked again, and costs no more time; the table that was read is kept.
        asked.lock().unwrap().clear();
        tables.look_at(&mut machine, three.clone(), TABLE, read.clone());
        assert_eq!(*asked.lock().unwrap(), ["sdb"]);

        // It was slow.
        answer.send(()).unwrap();
        let disks = std::iter::repeat_with(|| {
            tables.look_at(&mut machine, three.clone(), TABLE, read.clone())
        });
        let found = disks.map(|disks| described(&disks)).find(|found| found[0] == "sda ()");
        assert!(found.is_some());
    }

    #[test]
    fn a_disk_that_has_its_time_left_keeps_no_other_one_waiting_for_all_of_it() {
        let (mut machine, mut tables) = (Machine::default(), Tables::default());
        let (_asked, answer, read) = reader();
        let two = blocks(&[("sda", 1), ("sdc", 3)]);
        let begun = clock::uptime();
        let found = tables.look_at(&mut machine, two, TABLE, read);
        assert!(clock::uptime() - begun < TABLE / 2);
        assert_eq!(described(&found)[1], "sdc ()");
        assert!(tables.any_asked() && !tables.any_aside());
        drop(answer);
    }

    #[test]
    fn a_disk_whose_reads_take_long_and_fail_is_not_asked_again() {
        let (mut machine, mut tables) = (Machine::default(), Tables::default());
        let (asks, asked) = mpsc::channel();
        let (fail, failed) = mpsc::channel::<()>();
        let failed = Arc::new(Mutex::new(failed));
        let read = move |_: &Block| {
            asks.send(()).unwrap();
            failed.lock().unwrap().recv().ok();
            Err("Input/output error".to_owned())
        };
        let one = blocks(&[("sda", 1)]);
        let look = |tables: &mut Tables, machine: &mut Machine| {
            described(&tables.look_at(machine, one.clone(), SHORT, read.clone()))
        };
        assert!(look(&mut tables, &mut machine)[0].contains("has not answered"));
        fail.send(()).unwrap();
        let failed = std::iter::repeat_with(|| look(&mut tables, &mut machine));
        let failed = failed.map(|found| found[0].clone());
        assert!({ failed }.any(|found| found == "sda (Input/output error)"));
        look(&mut tables, &mut machine);
        assert!(!tables.any_asked() && !tables.any_aside());
        assert_eq!(asked.try_iter().count(), 1);
    }

    #[test]
    fn several_disks_that_do_not_answer_take_as_long_as_one() {
        let (mut machine, mut tables) = (Machine::default(), Tables::default());
        let (end, never) = mpsc::channel::<()>();
        let never = Arc::new(Mutex::new(never));
        let read = move |_: &Block| {
            assert!(never.lock().unwrap().recv().is_err());
            Ok(Vec::new())
        };
        let names: Vec<String> = (0..10).map(|number| format!("sd{number}")).collect();
        let all = names.iter().map(|name| Block::new(name, 1)).collect();
        let begun = clock::uptime();
        let found = tables.look_at(&mut machine, all, SHORT, read);
        assert!(clock::uptime() - begun < SHORT * 5);
        assert!(found.iter().all(|disk| disk.table.is_err()), "{found:?}");
        drop(end);
    }

    #[test]
    fn another_disk_with_the_name_of_one_that_is_aside_is_asked() {
        let (mut machine, mut tables) = (Machine::default(), Tables::default());
        let read = |_: &Block| Ok(Vec::new());
        tables.look_at(&mut machine, blocks(&[("sda", 1)]), SHORT, read);
        tables.put_aside(&mut machine, "sda", Duration::ZERO);
        let found = tables.look_at(&mut machine, blocks(&[("sda", 1)]), SHORT, read);
        assert!(found[0].table.is_err() && tables.any_aside(), "{found:?}");
        let found = tables.look_at(&mut machine, blocks(&[("sda", 2)]), SHORT, read);
        assert_eq!(described(&found), ["sda ()"]);
        assert!(!tables.any_aside());
    }
}
