//! The search for the disk that the machine was started from, or for the other one of its mirror:
//! drivers are loaded, disks read and compared, until one is chosen.
//!
//! ```text
//! announcements, ends of drivers --> tables of the disks --choose--> the disk
//!        ^                                  |
//!        +------------ wait <---------------+--nothing comes for DISK_DEADLINE--> error
//! ```
//!
//! Invariants:
//! - It waits for announcements of the kernel, not for time to pass, and every
//!   wait has a deadline with a name, but that for a driver that the kernel has not returned
//!   from: a disk is missing only when nothing looks for it any more. The other disk of a mirror is
//!   missing after a fixed time.
//! - A disk that does not answer is put aside (`tables`) and keeps no other one from being chosen.
//!
//! What this module does not do: decide between disks that look alike (`disk`).

use std::fs;
use std::os::fd::AsFd as _;
use std::time::Duration;

use polis_base::stage::Stage;
use polis_base::sys::clock;
use polis_base::sys::poll::{self, Interest};

use super::coldplug;
use super::command_line::Verity;
use super::deadline::{NOTICE, TABLE};
use super::disk::{self, Choice, Device, Disk, Found};
use super::drivers::Drivers;
use super::error::Error;
use super::firmware::Firmware;
use super::guru;
use super::machine::Machine;
use super::shutdown;
use super::tables::Tables;
use super::verified;

/// How long the disk may take once no driver looks for devices any more, and no disk has
/// been announced: a USB disk behind hubs takes ten seconds.
const DISK_DEADLINE: Duration = Duration::from_secs(30);
/// How long announcements put that off: a plug with a loose contact announces without end.
const ANNOUNCED_MAX: Duration = Duration::from_secs(300);
/// When the log first reports what the machine waits for.
const PATIENCE: Duration = Duration::from_secs(2);
/// How often it does so again.
const REMIND: Duration = Duration::from_secs(30);
/// How often a disk that has not answered is looked at: it may have by now.
const ASK: Duration = Duration::from_secs(1);
/// How long, in the same quiet, only the partition that the firmware names will do, and behind
/// the controller that it started from: a copy of the ESP may have been started from elsewhere.
const FIRMWARE_FIRST: Duration = Duration::from_secs(10);

/// The disk that is looked for.
#[derive(Clone, Copy, Debug)]
pub(super) enum Target<'a> {
    /// The one that the machine was started from.
    Own(&'a Firmware),
    /// The other one of the mirror that `own` is of, until `end`.
    Other {
        /// The disk that does not answer.
        own: &'a Found,
        /// When the search ends, also while drivers look for devices.
        end: Duration,
    },
}

impl Target<'_> {
    /// The disk, in words.
    fn wanted(self) -> String {
        match self {
            Self::Own(firmware) => firmware.wanted(),
            Self::Other { .. } => "the other disk of the mirror".to_owned(),
        }
    }

    fn end(self) -> Option<Duration> {
        match self {
            Self::Own(_) => None,
            Self::Other { end, .. } => Some(end),
        }
    }

    /// The time for each partition that may have the system, at `now`: a disk has two.
    pub(super) fn time(self, now: Duration) -> Duration {
        self.end().map_or(TABLE, |end| (end.saturating_sub(now) / 2).max(NOTICE))
    }
}

/// Loads drivers until the disk is there.
pub(super) fn find(
    machine: &mut Machine,
    drivers: &mut Drivers,
    tables: &mut Tables,
    target: Target<'_>,
    verity: &Verity,
) -> Result<(Found, Device), Error> {
    let mut search = Search::new(clock::uptime());
    let mut disks = tables.look(machine);
    loop {
        let ended = drivers.take(machine);
        let announced = machine.receive();
        // A table that could not be read may be readable by now, and a disk may answer by now.
        let unread = disks.iter().any(|disk| disk.table.is_err());
        if announced.disks || announced.lost || ended || unread || machine.uevents.is_none() {
            disks = tables.look(machine);
        }
        drivers.add(announced.aliases);
        if announced.lost {
            drivers.add(coldplug::present());
        }
        let busy = drivers.busy();
        let now = clock::uptime();
        let asked = tables.any_asked();
        let looking = ended || asked || !busy.is_empty();
        search.look(now, looking, announced.any || announced.lost);

        let late = search.quiet(now) >= FIRMWARE_FIRST;
        let when = When { drivers_done: drivers.done() && !asked, late };
        let mut silent = Vec::new();
        let chosen = choose(&disks, target, when, |found| {
            let system = verified::system(machine, found, verity, target.time(clock::uptime()));
            if let Err(Error::NoAnswer { since, .. }) = &system {
                silent.push((found.disk.clone(), *since));
            }
            system.is_ok()
        });
        if !silent.is_empty() {
            silent.iter().for_each(|(disk, since)| tables.put_aside(machine, disk, *since));
            disks = tables.look(machine);
        }
        if let Some(found) = chosen? {
            // The kernel announces partitions after the disk.
            if let Some(device) = devices(&found) {
                return Ok((found, device));
            }
        }
        if drivers.serve_some(machine) {
            continue;
        }
        // A driver may never end, and a person needs no deadline.
        if let Some(reason) = guru::requested(machine) {
            shutdown::end(machine, reason);
        }
        let now = clock::uptime();
        if search.is_over(now) || target.end().is_some_and(|end| now >= end) {
            machine.tried.push(format!("waited for {}", target.wanted()));
            machine.tried.push(format!("drivers that were loaded: {}", drivers.list()));
            machine.tried.push(format!("block devices: {}", block_devices()));
            let silent = tables.any_aside();
            // The disk with the ESP, as far as anything is known of it.
            machine.esp_silent = silent;
            return Err(absent(target.wanted(), &disks, silent, search.waited(now)));
        }
        if search.should_report(now, &busy) {
            let text = awaited(&target.wanted(), &list(&disks), &busy, now);
            machine.waiting(Stage::Initramfs, text);
        }
        let stuck = drivers.deadline(now);
        // Nothing wakes the search when a disk answers after all.
        let asks = (tables.any_asked() || tables.any_aside()).then_some(now + ASK);
        let next = search.next(now).into_iter().chain(stuck).chain(asks).chain(target.end()).min();
        wait(machine, drivers, next.map_or(REMIND, |at| at.saturating_sub(now)));
    }
}

/// Waits for a device, for a driver, for a person, or for so long.
fn wait(machine: &Machine, drivers: &Drivers, time: Duration) {
    let mut waited = Vec::new();
    waited.extend(machine.uevents.iter().map(|uevents| (uevents.as_fd(), Interest::Read)));
    waited.extend(drivers.as_fd().map(|loader| (loader, Interest::Read)));
    waited.extend(machine.signals.iter().map(|signals| (signals.as_fd(), Interest::Read)));
    poll::wait(&waited, Some(time)).ok();
}

/// How long the search for the disk has taken, and how long nothing has happened in it.
#[derive(Clone, Debug)]
struct Search {
    start: Duration,
    quiet_since: Duration,
    /// When it last reported what the machine waits for, and the drivers that were named.
    reported: Option<(Duration, Vec<String>)>,
}

impl Search {
    fn new(start: Duration) -> Self {
        Self { start, quiet_since: start, reported: None }
    }

    /// Notes what happens now: whether drivers look for devices, or have ended that, and whether
    /// the kernel has announced devices.
    fn look(&mut self, now: Duration, drivers: bool, announced: bool) {
        if drivers || (announced && self.waited(now) < ANNOUNCED_MAX) {
            self.quiet_since = now;
        }
    }

    fn waited(&self, now: Duration) -> Duration {
        now.saturating_sub(self.start)
    }

    fn quiet(&self, now: Duration) -> Duration {
        now.saturating_sub(self.quiet_since)
    }

    /// Whether no disk will come any more.
    fn is_over(&self, now: Duration) -> bool {
        self.quiet(now) >= DISK_DEADLINE
    }

    /// Whether it is time to report what the machine waits for: after [`PATIENCE`], every
    /// [`REMIND`], and when other drivers are the reason.
    fn should_report(&mut self, now: Duration, busy: &[(String, Duration)]) -> bool {
        let slow: Vec<String> = slow(busy, now).map(|(name, _seconds)| name.to_owned()).collect();
        let due = match &self.reported {
            None => self.waited(now) >= PATIENCE,
            Some((at, named)) => now >= *at + REMIND || *named != slow,
        };
        if due {
            self.reported = Some((now, slow));
        }
        due
    }

    /// The next moment at which one of these answers changes.
    fn next(&self, now: Duration) -> Option<Duration> {
        let quiet = [FIRMWARE_FIRST, DISK_DEADLINE].map(|after| self.quiet_since + after);
        let reported = self.reported.as_ref().map_or(self.start + PATIENCE, |(at, _)| *at + REMIND);
        quiet.into_iter().chain([reported]).filter(|at| *at > now).min()
    }
}

/// The drivers that have looked for their devices for longer than most do, with the seconds.
fn slow(busy: &[(String, Duration)], now: Duration) -> impl Iterator<Item = (&str, u64)> {
    let times = busy.iter().map(move |(name, since)| (&**name, now.saturating_sub(*since)));
    times.filter(|(_, time)| *time >= PATIENCE).map(|(name, time)| (name, time.as_secs()))
}

/// The device that the machine waits for, and the remedy.
fn awaited(wanted: &str, disks: &str, busy: &[(String, Duration)], now: Duration) -> String {
    let slow: Vec<String> =
        slow(busy, now).map(|(name, seconds)| format!("{name} ({seconds} s)")).collect();
    if slow.is_empty() {
        return format!("{wanted}; check its cable and its power; there are: {disks}");
    }
    format!(
        "{wanted}; still looking for devices: driver {}; an adapter with many disks takes minutes, \
         and one that never ends is broken or badly cabled; there are: {disks}",
        slow.join(", driver ")
    )
}

/// How far the search for the disk is.
#[derive(Clone, Copy, Debug)]
struct When {
    /// Every device that the kernel has announced was served, and every disk has answered or is
    /// aside.
    drivers_done: bool,
    /// The disk that firmware names has not appeared for [`FIRMWARE_FIRST`].
    late: bool,
}

/// The disk that is looked for. When firmware's own has not appeared and it is late, another that
/// has the system of this kernel, as `fits` knows.
fn choose(
    disks: &[Disk],
    target: Target<'_>,
    when: When,
    fits: impl FnMut(&Found) -> bool,
) -> Result<Option<Found>, Error> {
    let firmware = match target {
        Target::Own(firmware) => firmware,
        Target::Other { own, .. } => return other(disks, own, fits),
    };
    let of = |candidates| {
        let candidates = disk::distinct(candidates, disk::identifier);
        disk::choose(candidates, firmware.path.as_ref(), disk::way)
    };
    let choice = match of(disk::candidates(disks, firmware.esp)) {
        Choice::None if when.late => {
            let mut others = disk::candidates(disks, None);
            others.retain(fits);
            of(others)
        }
        choice => choice,
    };
    match choice {
        Choice::This(found) => Ok(Some(found)),
        Choice::Perhaps(found) => Ok(when.drivers_done.then_some(found)),
        Choice::Elsewhere(mut found) if when.late && found.len() == 1 => Ok(found.pop()),
        Choice::Several(found) => Err(alike(&found)),
        Choice::Elsewhere(found) if when.late => Err(alike(&found)),
        Choice::None | Choice::Elsewhere(_) => Ok(None),
    }
}

/// The other disk of the mirror that `own` is of, if it has the system of this kernel.
fn other(
    disks: &[Disk],
    own: &Found,
    fits: impl FnMut(&Found) -> bool,
) -> Result<Option<Found>, Error> {
    let mut found = disk::candidates(disks, None);
    found.retain(|found| own.is_mirrored_by(found));
    found.retain(fits);
    let mut found = disk::distinct(found, disk::identifier);
    if found.len() > 1 {
        return Err(alike(&found));
    }
    Ok(found.pop())
}

/// The device of the disk's ESP, once the kernel has made those of all its partitions that
/// stage 1 needs.
fn devices(found: &Found) -> Option<Device> {
    let made = |number: &u32| disk::device(&found.disk, *number).is_some();
    let systems = found.systems.iter().all(|(_slot, number)| made(number));
    disk::device(&found.disk, found.esp).filter(|_esp| systems)
}

fn alike(found: &[Found]) -> Error {
    let names: Vec<&str> = found.iter().map(|found| found.disk.as_str()).collect();
    Error::DisksAlike { disks: names.join(" and ") }
}

/// Every block device, even those that can't be a disk, for the operator.
fn block_devices() -> String {
    let entries = fs::read_dir("/sys/block").into_iter().flatten().flatten();
    let mut names: Vec<String> =
        entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort();
    if names.is_empty() { "none".to_owned() } else { names.join(" ") }
}

fn absent(wanted: String, disks: &[Disk], silent: bool, waited: Duration) -> Error {
    if silent {
        return Error::Silent { wanted, disks: list(disks), waited };
    }
    if disks.is_empty() {
        Error::NoDisk { waited }
    } else {
        Error::NoEsp { wanted, disks: list(disks), waited }
    }
}

fn list(disks: &[Disk]) -> String {
    if disks.is_empty() {
        return "none".to_owned();
    }
    disks.iter().map(Disk::describe).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use polis_base::trapdoor::code;

    use super::super::disk::tests::mirrored;
    use super::super::gpt::Guid;
    use super::*;

    fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn a_driver_that_takes_minutes_ends_no_search_and_leaves_the_disk_its_time() {
        let mut search = Search::new(at(1));
        for second in 2..100 {
            search.look(at(second), true, false);
            assert!(!search.is_over(at(second)), "after {second} s");
        }
        // It has ended: its disks have as long as those of a quick one.
        search.look(at(120), true, false);
        assert!(!search.is_over(at(149)));
        assert_eq!(search.next(at(140)), Some(at(150)));
        assert!(search.is_over(at(150)));
        assert_eq!(search.waited(at(150)), at(149));
    }

    #[test]
    fn a_plug_that_announces_without_end_does_not_put_the_end_off_for_ever() {
        let mut search = Search::new(at(0));
        for second in 0..330 {
            search.look(at(second), false, true);
            assert_eq!(search.is_over(at(second)), second >= 329, "after {second} s");
        }
    }

    #[test]
    fn the_machine_tells_what_it_waits_for_again_and_when_it_changes() {
        let mut search = Search::new(at(0));
        let driver = |name: &str, since| [(name.to_owned(), at(since))];
        assert!(!search.should_report(at(1), &[]));
        assert!(search.should_report(at(2), &[]));
        assert!(!search.should_report(at(3), &driver("mpt3sas", 2)), "it may be quick");
        assert!(search.should_report(at(4), &driver("mpt3sas", 2)));
        assert!(!search.should_report(at(33), &driver("mpt3sas", 2)));
        assert!(search.should_report(at(34), &driver("mpt3sas", 2)));
        assert!(search.should_report(at(35), &driver("hpsa", 30)));
    }

    #[test]
    fn a_slow_driver_is_named_with_its_time_and_what_would_help() {
        let busy = [("ahci".to_owned(), at(40)), ("mpt3sas".to_owned(), at(3))];
        let text = awaited("a disk with POLIS-ESP and a system", "none", &busy, at(41));
        insta::assert_snapshot!(text, @"a disk with POLIS-ESP and a system; still looking for devices: driver mpt3sas (38 s); an adapter with many disks takes minutes, and one that never ends is broken or badly cabled; there are: none");
        let text = awaited("a disk", "sda (no partition table)", &[], at(41));
        assert_eq!(
            text,
            "a disk; check its cable and its power; there are: sda (no partition table)"
        );
    }

    fn id(last: u8) -> Guid {
        Guid::parse(&format!("00000000-0000-0000-0000-0000000000{last:02x}")).unwrap()
    }

    /// A disk with an ESP of its own, of a mirror.
    fn own() -> Found {
        disk::candidates(&[mirrored("sda", id(1), Some(id(10)))], None).remove(0)
    }

    #[test]
    fn only_a_disk_of_the_same_mirror_with_this_system_takes_the_place_of_a_silent_one() {
        let mirror = Some(id(10));
        let silent = Disk { name: "sda".to_owned(), table: Err("has not answered".to_owned()) };
        let (foreign, none) = (mirrored("sdb", id(2), Some(id(11))), mirrored("sdc", id(3), None));
        let copy = mirrored("sdd", id(1), mirror);
        let all = [silent, foreign, none, copy];
        let (own, when) = (own(), When { drivers_done: true, late: true });
        let target = Target::Other { own: &own, end: at(15) };
        let other = |names: &[(&str, u8)], system: bool| {
            let more = names.iter().map(|(name, esp)| mirrored(name, id(*esp), mirror));
            let disks: Vec<Disk> = all.iter().cloned().chain(more).collect();
            choose(&disks, target, when, |_| system)
        };
        assert_eq!(other(&[], true).unwrap(), None);
        let found = other(&[("vdy", 4)], true).unwrap();
        assert_eq!(found.map(|found| found.disk).as_deref(), Some("vdy"));
        assert_eq!(other(&[("vdy", 4)], false).unwrap(), None, "it has another system");
        // One of them may be a copy of the other.
        let alike = other(&[("vdy", 4), ("vdz", 4)], true).unwrap_err();
        assert!(matches!(alike, Error::DisksAlike { .. }), "{alike}");
    }

    #[test]
    fn the_other_disk_of_a_mirror_is_waited_for_until_a_fixed_moment() {
        let own = own();
        let target = Target::Other { own: &own, end: at(15) };
        assert_eq!(target.end(), Some(at(15)));
        // Both partitions of a disk that stops answering have no more than is left.
        assert_eq!(target.time(at(5)) * 2, at(10));
        assert_eq!(target.time(at(15)), NOTICE);
        let firmware = Firmware::default();
        let target = Target::Own(&firmware);
        assert_eq!((target.end(), target.time(at(5))), (None, TABLE));
    }

    #[test]
    fn a_missing_disk_is_reported_with_the_existing_ones() {
        let esp = Guid::parse("6f1e4d07-5a3c-4c3b-9d3b-0123456789ab");
        let wanted = || Firmware { esp, ..Firmware::default() }.wanted();
        let waited = Duration::from_secs(30);
        let error = absent(wanted(), &[], false, waited);
        assert_eq!(error.to_string(), "no disk has appeared within 30 s");
        let disks = [Disk { name: "sda".to_owned(), table: Err("no partition table".to_owned()) }];
        let text = absent(wanted(), &disks, false, waited).to_string();
        assert!(text.contains("6f1e4d07") && text.contains("sda (no partition table)"), "{text}");

        // One that does not answer may be the one.
        let error = absent(wanted(), &disks, true, waited);
        assert!(matches!(error, Error::Silent { .. }), "{error}");
        assert_eq!(error.report().code, code::DISK_SILENT);
    }
}
