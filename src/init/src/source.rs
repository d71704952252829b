//! The disk that the system is read from: the one that the machine was started from or, where that
//! does not answer, the other one of its mirror.
//!
//! ```text
//! the disk of the start --without a mirror, or its system answers--> this one
//!          +--nothing for SYSTEM--> put aside --OTHER--> the other disk of its mirror
//!                                                 +-----> this one, with its failure
//! ```
//!
//! Invariants:
//! - The disk that the machine was started from gives way only to the other disk of its mirror: not
//!   to a copy of itself, and not to one of several that look alike.
//! - Nothing of a disk of a mirror is mounted before the choice: a mount that was left behind may
//!   come later, in the place of one of the other disk.
//! - The failure of a disk of a mirror is shown no later than that of another one: the search for
//!   the other disk has a part of the time that the mount of an ESP has.
//!
//! What this module does not do: know which disk has the newest data (`node` does), or look for a
//! disk (`search`).

use std::time::Duration;

use polis_base::serial::Severity;
use polis_base::stage::Stage;
use polis_base::sys::clock;

use super::command_line::Verity;
use super::deadline;
use super::disk::{Device, Found, Slot};
use super::drivers::Drivers;
use super::error::Error;
use super::firmware::Firmware;
use super::machine::Machine;
use super::search::{self, Target};
use super::tables::Tables;
use super::verified;

/// Time for the other disk of a mirror, most of [`deadline::ESP`]: the kernel has mostly announced
/// it by now.
const OTHER: Duration = Duration::from_secs(15);
/// What is left of that for the ESP of a disk whose system does not answer: it answers at once or
/// not at all.
const ESP_LEFT: Duration = Duration::from_secs(5);

/// A disk, and what it answered.
#[derive(Debug)]
pub(super) struct Source {
    pub(super) disk: Found,
    pub(super) esp: Device,
    /// How long the mount of its ESP may take.
    pub(super) esp_time: Duration,
    /// The partition with the system of this kernel, or why there is none; `None` until it is
    /// looked for.
    answer: Option<Result<(Slot, Device), Error>>,
}

impl Source {
    fn new((disk, esp): (Found, Device)) -> Self {
        Self { disk, esp, esp_time: deadline::ESP, answer: None }
    }

    /// The partition with the system of this kernel.
    ///
    /// # Errors
    ///
    /// No partition of the disk has it, or the disk does not answer.
    pub(super) fn system(
        self,
        machine: &mut Machine,
        verity: &Verity,
    ) -> Result<(Slot, Device), Error> {
        let Self { disk, answer, .. } = self;
        answer.unwrap_or_else(|| verified::system(machine, &disk, verity, deadline::SYSTEM))
    }

    /// Since when it does not answer.
    fn silent_since(&self) -> Option<Duration> {
        match &self.answer {
            Some(Err(Error::NoAnswer { since, .. })) => Some(*since),
            _ => None,
        }
    }

    /// `other` if it has the system. Else this one, whose failure is reported.
    fn or(self, other: Result<Self, Error>) -> Self {
        let own = Self { esp_time: ESP_LEFT, ..self };
        other.ok().filter(|other| matches!(other.answer, Some(Ok(_)))).unwrap_or(own)
    }
}

/// Looks for the disk; of a mirror, for one whose system answers.
///
/// # Errors
///
/// There is no disk that the machine may have been started from.
pub(super) fn find(
    machine: &mut Machine,
    drivers: &mut Drivers,
    firmware: &Firmware,
    verity: &Verity,
) -> Result<Source, Error> {
    let mut tables = Tables::default();
    let target = Target::Own(firmware);
    let mut own = Source::new(search::find(machine, drivers, &mut tables, target, verity)?);
    if own.disk.mirror.is_some() {
        own.answer = Some(verified::system(machine, &own.disk, verity, deadline::SYSTEM));
    }
    let Some(since) = own.silent_since() else { return Ok(own) };
    let silent = own.disk.disk.clone();
    tables.put_aside(machine, &silent, since);
    let text =
        format!("the other disk of the mirror, since {silent} does not answer; pull that disk");
    machine.waiting(Stage::Initramfs, text);
    let other = other(machine, drivers, &mut tables, &own.disk, verity);
    if let Err(Error::DisksAlike { disks }) = &other {
        machine.tried.push(format!("looked for the other disk of the mirror: {disks} look alike"));
    }
    let source = own.or(other);
    if source.disk.disk != silent {
        let text = format!("starting from {}, since {silent} does not answer", source.disk.disk);
        machine.port.log(Severity::Warning, &text);
    }
    Ok(source)
}

/// The other disk of the mirror that `own` is of.
fn other(
    machine: &mut Machine,
    drivers: &mut Drivers,
    tables: &mut Tables,
    own: &Found,
    verity: &Verity,
) -> Result<Source, Error> {
    let target = Target::Other { own, end: clock::uptime() + OTHER };
    let mut other = Source::new(search::find(machine, drivers, tables, target, verity)?);
    let time = target.time(clock::uptime());
    other.answer = Some(verified::system(machine, &other.disk, verity, time));
    Ok(other)
}

#[cfg(test)]
mod tests {
    use super::super::gpt::Guid;
    use super::*;

    const SINCE: Duration = Duration::from_secs(3);

    fn device(name: &str) -> Device {
        Device { path: format!("/dev/{name}").into(), numbers: "254:1".to_owned() }
    }

    fn source(name: &str, answer: Result<(Slot, Device), Error>) -> Source {
        let esp_id = Guid::parse("00000000-0000-0000-0000-00000000000a").unwrap();
        let (disk, systems) = (name.to_owned(), vec![(Slot::A, 2)]);
        let disk = Found { disk, esp: 1, esp_id, systems, data: true, mirror: Some(esp_id) };
        Source { answer: Some(answer), ..Source::new((disk, device(name))) }
    }

    fn no_answer() -> Error {
        Error::NoAnswer {
            stage: Stage::Initramfs,
            step: "read the hash tree",
            partition: Slot::A.partition(),
            device: "/dev/vda2".into(),
            since: SINCE,
            waited: deadline::SYSTEM,
        }
    }

    #[test]
    fn the_other_disk_of_a_mirror_is_looked_for_only_where_the_first_does_not_answer() {
        let mut silent = source("vda", Err(no_answer()));
        assert_eq!(silent.silent_since(), Some(SINCE));
        // A disk without a mirror is not asked before its ESP is mounted.
        silent.answer = None;
        assert_eq!(silent.silent_since(), None);
        assert_eq!(source("vda", Ok((Slot::A, device("vda2")))).silent_since(), None);
        let empty = Error::NoSystem { disk: "vda".to_owned() };
        assert_eq!(source("vda", Err(empty)).silent_since(), None);
    }

    #[test]
    fn a_machine_whose_disk_does_not_answer_starts_from_the_other_one_if_that_has_the_system() {
        let mut machine = Machine::default();
        let verity = Verity { root_hash: String::new(), salt: String::new(), blocks: 1 };
        let own = || source("vda", Err(no_answer()));
        let answers = source("vdb", Ok((Slot::B, device("vdb3"))));
        let chosen = own().or(Ok(answers));
        assert_eq!((chosen.disk.disk.as_str(), &chosen.esp), ("vdb", &device("vdb")));
        assert_eq!(chosen.esp_time, deadline::ESP);
        assert_eq!(chosen.system(&mut machine, &verity).unwrap(), (Slot::B, device("vdb3")));
        let absent = Error::NoDisk { waited: SINCE };
        for other in [Ok(source("vdb", Err(no_answer()))), Err(absent)] {
            let chosen = own().or(other);
            assert_eq!(chosen.disk.disk, "vda");
            // In all, the failure is shown no later than that of a disk without a mirror.
            assert_eq!(OTHER + chosen.esp_time, deadline::ESP);
            let system = chosen.system(&mut machine, &verity);
            assert!(matches!(system, Err(Error::NoAnswer { .. })));
        }
    }
}
