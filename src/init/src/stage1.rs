//! Stage 1: finds, verifies and enters the system, from the initramfs.
//!
//! ```text
//! /dev /proc /sys --> command line --> drivers, until the disk is there
//!      --> dm-verity on the system partition --> mounted --> the root
//! ```
//!
//! The process that enters the system is the one that was started: its program stays in
//! memory, where a damaged block cannot reach it, and a second start would cost time.
//!
//! Invariants:
//! - The system partition is mounted only through dm-verity.
//! - It waits for announcements of the kernel, not for time to pass, and every
//!   wait has a deadline with a name, but that for a driver that the kernel has not returned
//!   from: a disk is missing only when nothing looks for it any more.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{self, Write as _};
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use rustix::mount::MountFlags;
use rustix::process::Signal;

use polis_base::extra;
use polis_base::serial::Severity;
use polis_base::stage::Stage;
use polis_base::sys::dm::{DeviceMapper, Table};
use polis_base::sys::mount::{self, Mount};
use polis_base::sys::poll::{self, Interest};
use polis_base::sys::signal::Signals;
use polis_base::sys::terminal::Terminal;
use polis_base::sys::uevent::Listener;
use polis_base::sys::{self, clock, efivar, reboot, vt};

use super::attempts::Store;
use super::boot_path::BootPath;
use super::coldplug;
use super::command_line::{self, CommandLine, Verity};
use super::disk::{self, Choice, Device, Disk, Found, Slot};
use super::early::Early;
use super::error::Error;
use super::extra::Extra;
use super::gpt::Guid;
use super::guru;
use super::loader::Loader;
use super::machine::{Machine, Start, System};
use super::modules::{self, Modules};
use super::mounts;
use super::off;

/// By this file `init` knows that it runs in the initramfs.
pub const MARK: &str = "/stage1";

/// Where the initramfs has its modules.
const MODULES: &str = "/modules";
/// Where the system is mounted before it becomes the root.
const SYSTEM: &str = "/system";
/// The name of the verified device.
const VERIFIED: &str = "polis-system";

/// How long the disk may take once no driver looks for devices any more, and no disk has
/// been announced: a USB disk behind hubs takes ten seconds.
const DISK_DEADLINE: Duration = Duration::from_secs(30);
/// How long announcements put that off: a plug with a loose contact announces without end.
const ANNOUNCED_MAX: Duration = Duration::from_secs(300);
/// When the log first reports what the machine waits for.
const PATIENCE: Duration = Duration::from_secs(2);
/// How often it does so again.
const REMIND: Duration = Duration::from_secs(30);
/// How long, in the same quiet, only the partition that the firmware names will do, and behind
/// the controller that it started from: a copy of the ESP may have been started from elsewhere.
const FIRMWARE_FIRST: Duration = Duration::from_secs(10);

/// The vendors of the firmware's variables that are read: the boot stub, which stores the
/// partition it was started from, and UEFI.
const LOADER: &str = "4a67b082-0a4c-41cf-b6c7-440b29bb8c4f";
const UEFI: &str = "8be4df61-93ca-11d2-aa0d-00e098032b8c";

/// The modules of the ESP's file system.
const ESP_MODULES: [&str; 2] = ["nls_cp437", "vfat"];
/// The modules that verify and read the system.
const SYSTEM_MODULES: [&str; 3] = ["blake2b_generic", "dm_verity", "erofs"];
/// The data partition's file system.
const DATA_MODULE: &str = "xfs";
/// The driver of QEMU's fw_cfg, and its device.
const FW_CFG_MODULE: &str = "qemu_fw_cfg";
const FW_CFG: &str = "/sys/bus/acpi/devices/QEMU0002:00";

/// Data and hash blocks, as every image is made with.
const BLOCK: u64 = BLOCK_BYTES as u64;
const BLOCK_BYTES: usize = 4096;
/// The unit of the device mapper.
const SECTOR: u64 = 512;

/// Signals that process 1 handles.
const SIGNALS: [Signal; 6] =
    [Signal::CHILD, Signal::INT, Signal::TERM, Signal::USR2, Signal::POWER, Signal::HUP];

/// Enters the system. `machine` holds the details of a failure.
///
/// # Errors
///
/// The first step that did not succeed.
pub fn run(machine: &mut Machine) -> Result<Start, Error> {
    let early = prepare(machine)?;
    machine.kernel_done();
    machine.started(Stage::Initramfs);
    let line = sys::command_line::read().map_err(Error::ReadCommandLine)?;
    machine.countdown = command_line::countdown(&line);
    machine.init_deadline = command_line::init_deadline(&line);
    let mut drivers = Drivers::open(machine);
    // First of all, so that every failure of a system on trial is one of a trial.
    let firmware = firmware(machine, &mut drivers);
    machine.trial = firmware.trial;
    let command_line = CommandLine::parse(&line).map_err(Error::CommandLine)?;

    let (found, esp) = find(machine, &mut drivers, &firmware, &command_line.verity)?;
    let disk = Path::new("/dev").join(&found.disk);
    // In parallel with the thread, which has the ESP's by now.
    for name in SYSTEM_MODULES {
        drivers.load(machine, name);
    }
    mount_esp(machine, &mut drivers, &esp.path);
    // The parameters may be there: `node` should not have to wait for the driver.
    if Path::new(FW_CFG).exists() {
        drivers.load(machine, FW_CFG_MODULE);
    }
    let (slot, device) = system(&found, &command_line.verity)?;
    slot.name().clone_into(&mut machine.identity.slot);
    let Device { path, numbers } = device;
    let system = System { partition: slot.partition(), device: path, numbers };
    machine.system = Some(system.clone());
    let (extra, faults) = Extra::take(Path::new(extra::IN_INITRAMFS));
    for fault in faults {
        machine.port.log(Severity::Warning, &fault);
    }
    enter(machine, &system, &command_line, early)?;
    machine.done(Stage::Initramfs);
    Ok(Start { disk, esp: esp.path, extra, command_line })
}

/// Sets up all that reporting a failure needs, and the thread that loads modules.
fn prepare(machine: &mut Machine) -> Result<Option<Early>, Error> {
    let mounted = mounts::apply_first();
    machine.port.open();
    // Where this is not allowed, kernel messages share the port: a nuisance.
    vt::silence_kernel().ok();
    mounted.map_err(Error::Prepare)?;
    let own = |what| move |source| Error::Own { what, source };
    machine.signals = Some(Signals::receive(&SIGNALS).map_err(own("receive signals"))?);
    // As soon as signals can't be lost to another thread: nothing takes longer.
    let early = order_modules();
    // From here on Ctrl-Alt-Del is a request and not a reset.
    reboot::catch_ctrl_alt_del().map_err(own("take over Ctrl-Alt-Del"))?;
    machine.uevents = Some(Listener::open().map_err(own("receive device announcements"))?);
    Ok(early)
}

/// Starts to load the modules that the boot needs soon. Without the thread, they are
/// loaded one after another.
fn order_modules() -> Option<Early> {
    let early = Early::start(Path::new(MODULES)).ok()?;
    ESP_MODULES.into_iter().for_each(|module| early.load(module));
    if Path::new(FW_CFG).exists() {
        early.load(FW_CFG_MODULE);
    }
    early.load(DATA_MODULE);
    Some(early)
}

/// How likely a device leads to the disk: an early success saves the rest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Way {
    /// Fast to probe.
    Quick,
    /// Searches its cables.
    Slow,
    /// Waits for devices to answer, and brings the keyboard.
    Usb,
}

fn way(alias: &str) -> Way {
    // NVMe is PCI class 01, subclass 08.
    let nvme = alias.starts_with("pci:") && alias.contains("bc01sc08");
    let usb = alias.starts_with("pci:") && alias.contains("bc0Csc03");
    let quick = ["virtio:", "scsi:"].iter().any(|bus| alias.starts_with(bus));
    if quick || nvme {
        Way::Quick
    } else if usb || ["usb:", "hid:", "input:"].iter().any(|bus| alias.starts_with(bus)) {
        Way::Usb
    } else {
        Way::Slow
    }
}

/// The modules of the initramfs, and which of their devices were served.
struct Drivers {
    modules: Option<Modules>,
    /// Loads those of devices; without one, stage 1 waits for each.
    loader: Option<Loader>,
    loaded: BTreeSet<String>,
    served: BTreeSet<String>,
    waiting: BTreeSet<String>,
}

impl Drivers {
    fn open(machine: &mut Machine) -> Self {
        let modules = Modules::open(Path::new(MODULES));
        if let Err(error) = &modules {
            // A kernel with everything built in has no modules.
            let text = format!("the initramfs has no modules: {error}");
            machine.port.log(Severity::Warning, &text);
        }
        let waiting = coldplug::present();
        let (loaded, served) = (BTreeSet::new(), BTreeSet::new());
        let loader = Loader::new(Arc::new(|name| {
            let modules = Modules::open(Path::new(MODULES));
            modules.map_err(|_error| modules::Error::Absent { name: name.to_owned() })?.load(name)
        }));
        Self { modules: modules.ok(), loader: loader.ok(), loaded, served, waiting }
    }

    /// New devices were announced.
    fn add(&mut self, aliases: impl IntoIterator<Item = String>) {
        let new = aliases.into_iter().filter(|alias| !self.served.contains(alias));
        self.waiting.extend(new.collect::<Vec<_>>());
    }

    /// Whether every device that was announced is served.
    fn done(&self) -> bool {
        self.waiting.is_empty() && self.loader.as_ref().is_none_or(Loader::is_idle)
    }

    /// The drivers that look for their devices, and since when.
    fn busy(&self) -> Vec<(String, Duration)> {
        let busy = self.loader.iter().flat_map(Loader::busy);
        busy.map(|(name, since)| (name.to_owned(), since)).collect()
    }

    /// Notes which drivers have ended their search; returns whether one has.
    fn take(&mut self, machine: &mut Machine) -> bool {
        let Some(loader) = &mut self.loader else { return false };
        let done = loader.take(clock::uptime());
        let some = !done.is_empty();
        done.into_iter().for_each(|done| self.note(machine, &done.name, done.result));
        some
    }

    /// Hands the drivers of the most likely remaining class to the kernel, unless it is busy
    /// with others. `false` when it is, or when all are served.
    fn serve_some(&mut self, machine: &mut Machine) -> bool {
        if self.loader.as_ref().is_some_and(|loader| !loader.has_room(clock::uptime())) {
            return false;
        }
        let Some(best) = self.waiting.iter().map(|alias| way(alias)).min() else { return false };
        let (now, later): (BTreeSet<_>, BTreeSet<_>) =
            std::mem::take(&mut self.waiting).into_iter().partition(|alias| way(alias) == best);
        self.waiting = later;
        let aliases = now.iter().map(String::as_str).collect();
        let found = self.modules.as_ref().map(|modules| modules.find(&aliases));
        match found {
            Some(Ok(found)) => {
                let names: BTreeSet<String> = found.into_values().flatten().collect();
                names.iter().for_each(|name| self.order(machine, name));
            }
            Some(Err(error)) => {
                let text = format!("cannot read which modules there are: {error}");
                machine.port.log(Severity::Error, &text);
            }
            None => {}
        }
        self.served.extend(now);
        true
    }

    /// The drivers that found their hardware.
    fn list(&self) -> String {
        if self.loaded.is_empty() {
            return "none".to_owned();
        }
        self.loaded.iter().map(String::as_str).collect::<Vec<_>>().join(" ")
    }

    /// Has the loader load a driver.
    fn order(&mut self, machine: &mut Machine, name: &str) {
        let has = self.modules.as_ref().is_some_and(|modules| modules.has(name));
        match &mut self.loader {
            Some(loader) if has => loader.load(name, clock::uptime()),
            Some(_) => {}
            None => self.load(machine, name),
        }
    }

    /// Loads a module if the initramfs has it: otherwise it is part of the kernel, or
    /// the step that needs it reports the error.
    fn load(&mut self, machine: &mut Machine, name: &str) {
        let Some(modules) = self.modules.as_mut().filter(|modules| modules.has(name)) else {
            return;
        };
        let loaded = modules.load(name);
        self.note(machine, name, loaded);
    }

    fn note(&mut self, machine: &mut Machine, name: &str, loaded: Result<(), modules::Error>) {
        match loaded {
            Ok(()) => drop(self.loaded.insert(name.to_owned())),
            Err(error) if error.is_absence() => {}
            Err(error) => {
                let source = std::error::Error::source(&error).map(ToString::to_string);
                let text = format!("{error}: {}", source.unwrap_or_default());
                machine.port.log(Severity::Warning, &text);
            }
        }
    }
}

/// The firmware's report about the place that it started the machine from.
#[derive(Debug, Default)]
struct Firmware {
    /// The partition.
    esp: Option<Guid>,
    /// The way to its disk.
    path: Option<BootPath>,
    /// Whether the kernel image has a counter in its name.
    trial: bool,
}

/// Reads the firmware's variables.
fn firmware(machine: &mut Machine, drivers: &mut Drivers) -> Firmware {
    if !Path::new("/sys/firmware/efi").exists() {
        return Firmware::default();
    }
    drivers.load(machine, "efivarfs");
    if let Err(error) = mounts::firmware().apply() {
        let source = std::error::Error::source(&error).map(ToString::to_string);
        let text = format!("{error}: {}", source.unwrap_or_default());
        machine.port.log(Severity::Warning, &text);
    }
    let variable = |name: &str, vendor| {
        fs::read(Path::new(mounts::VARIABLES).join(format!("{name}-{vendor}"))).unwrap_or_default()
    };
    let esp = disk::guid_of_variable(&variable("LoaderDevicePartUUID", LOADER));
    // Four bytes of attributes, then the number of the entry.
    let path = match variable("BootCurrent", UEFI)[..] {
        [_, _, _, _, low, high] => {
            let name = format!("Boot{:04X}", u16::from_le_bytes([low, high]));
            BootPath::of_option(&variable(&name, UEFI))
        }
        _ => None,
    };
    let trial = efivar::on_trial(Path::new(mounts::VARIABLES));
    Firmware { esp, path, trial }
}

/// Loads drivers until the disk is there.
fn find(
    machine: &mut Machine,
    drivers: &mut Drivers,
    firmware: &Firmware,
    verity: &Verity,
) -> Result<(Found, Device), Error> {
    let mut search = Search::new(clock::uptime());
    let mut disks = disk::scan();
    loop {
        let ended = drivers.take(machine);
        let announced = machine.receive();
        // A table that could not be read may be readable by now.
        let unread = disks.iter().any(|disk| disk.table.is_err());
        if announced.disks || announced.lost || ended || unread || machine.uevents.is_none() {
            disks = disk::scan();
        }
        drivers.add(announced.aliases);
        if announced.lost {
            drivers.add(coldplug::present());
        }
        let busy = drivers.busy();
        let now = clock::uptime();
        search.look(now, ended || !busy.is_empty(), announced.any || announced.lost);

        let late = search.quiet(now) >= FIRMWARE_FIRST;
        let when = When { drivers_done: drivers.done(), late };
        if let Some(found) = choose(&disks, firmware, verity, when)? {
            // The kernel announces partitions after the disk.
            if let Some(device) = devices(&found) {
                return Ok((found, device));
            }
        }
        if drivers.serve_some(machine) {
            continue;
        }
        // A driver may never end, and a person needs no deadline.
        if let Some(reason) = guru::wished(machine) {
            off::end(machine, reason);
        }
        let now = clock::uptime();
        if search.is_over(now) {
            machine.tried.push(format!("waited for {}", firmware.wanted()));
            machine.tried.push(format!("drivers that were loaded: {}", drivers.list()));
            machine.tried.push(format!("block devices: {}", block_devices()));
            return Err(absent(firmware.wanted(), &disks, search.waited(now)));
        }
        if search.should_report(now, &busy) {
            let text = awaited(&firmware.wanted(), &list(&disks), &busy, now);
            show(&text);
            machine.waiting(Stage::Initramfs, text);
        }
        let stuck = drivers.loader.as_ref().and_then(|loader| loader.deadline(now));
        let next = search.next(now).into_iter().chain(stuck).min();
        wait(machine, drivers, next.map_or(REMIND, |at| at.saturating_sub(now)));
    }
}

/// Waits for a device, for a driver, for a person, or for so long.
fn wait(machine: &Machine, drivers: &Drivers, time: Duration) {
    let mut waited = Vec::new();
    waited.extend(machine.uevents.iter().map(|uevents| (uevents.as_fd(), Interest::Read)));
    waited.extend(drivers.loader.iter().map(|loader| (loader.as_fd(), Interest::Read)));
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
        return format!("{wanted}; there are: {disks}");
    }
    format!(
        "{wanted}; still looking for devices: driver {}; an adapter with many disks takes minutes, \
         and one that never ends is broken or badly cabled; there are: {disks}",
        slow.join(", driver ")
    )
}

/// Shows a line on the screen, which is `init`'s until `node` draws.
fn show(text: &str) {
    // Without a screen this fails, which is harmless.
    if let Ok(mut screen) = Terminal::open(Path::new("/dev/tty1")) {
        screen.write_all(format!("\n  Polis waits for {text}\n").as_bytes()).ok();
    }
}

impl Firmware {
    /// The disk that the machine was started from, in words.
    fn wanted(&self) -> String {
        match self.esp {
            Some(esp) => format!("the disk with partition {esp}"),
            None => "a disk with POLIS-ESP and a system".to_owned(),
        }
    }
}

/// How far the search for the disk is.
#[derive(Clone, Copy, Debug)]
struct When {
    /// Every device that the kernel has announced was served.
    drivers_done: bool,
    /// The disk that firmware names has not appeared for [`FIRMWARE_FIRST`].
    late: bool,
}

/// The disk that the machine was started from. When firmware's own has not appeared and it
/// is late, another that has the system of this kernel.
fn choose(
    disks: &[Disk],
    firmware: &Firmware,
    verity: &Verity,
    when: When,
) -> Result<Option<Found>, Error> {
    let of = |candidates| {
        let candidates = disk::distinct(candidates, disk::identifier);
        disk::choose(candidates, firmware.path.as_ref(), disk::way)
    };
    let choice = match of(disk::candidates(disks, firmware.esp)) {
        Choice::None if when.late => {
            let mut others = disk::candidates(disks, None);
            others.retain(|found| system(found, verity).is_ok());
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

fn absent(wanted: String, disks: &[Disk], waited: Duration) -> Error {
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

/// Mounts the ESP as early as possible: failures are kept and counted there.
fn mount_esp(machine: &mut Machine, drivers: &mut Drivers, device: &Path) {
    for name in ESP_MODULES {
        drivers.load(machine, name);
    }
    fs::create_dir_all("/esp").ok();
    // Where the initramfs has no vfat, stage 2 mounts it.
    if mounts::esp(device).apply().is_ok() {
        machine.attempts = Some(Store::in_tree(Path::new("/")));
    }
}

/// The system partition that has the system of this kernel, by the top of its hash tree.
fn system(found: &Found, verity: &Verity) -> Result<(Slot, Device), Error> {
    let devices: Vec<(Slot, Device)> = found
        .systems
        .iter()
        .filter_map(|(slot, number)| Some((*slot, disk::device(&found.disk, *number)?)))
        .collect();
    if devices.is_empty() {
        return Err(Error::NoSystem { disk: found.disk.clone() });
    }
    let mut reasons = Vec::new();
    for (slot, device) in devices {
        match top(&device.path, verity) {
            Ok(top) if verity.fits(&top) => return Ok((slot, device)),
            Ok(_) => reasons.push(format!("{} has another system or none", slot.partition())),
            Err(error) => reasons.push(format!("{} cannot be read: {error}", slot.partition())),
        }
    }
    Err(Error::OtherSystem { disk: found.disk.clone(), reasons: reasons.join(", ") })
}

/// The block that the hash tree begins with, behind the data.
fn top(device: &Path, verity: &Verity) -> io::Result<[u8; BLOCK_BYTES]> {
    let mut block = [0; BLOCK_BYTES];
    File::open(device)?.read_exact_at(&mut block, verity.blocks.saturating_mul(BLOCK))?;
    Ok(block)
}

/// The table of dm-verity: data, then its hash tree, on the same device.
fn table(device: &Path, verity: &Verity) -> Table {
    let device = device.display();
    let Verity { root_hash, salt, blocks } = verity;
    Table {
        length: blocks * (BLOCK / SECTOR),
        kind: "verity",
        parameters: format!(
            "1 {device} {device} {BLOCK} {BLOCK} {blocks} {blocks} blake2b-256 {root_hash} {salt}"
        ),
    }
}

fn enter(
    machine: &mut Machine,
    system: &System,
    command_line: &CommandLine,
    early: Option<Early>,
) -> Result<(), Error> {
    let System { partition, device, .. } = system;
    let refused = |source| Error::Verity { partition, device: device.clone(), source };
    let mapper = DeviceMapper::open().map_err(refused)?;
    let table = table(device, &command_line.verity);
    let verified = mapper.create_read_only(VERIFIED, &table).map_err(refused)?;
    fs::create_dir_all(SYSTEM).ok();
    let flags = MountFlags::RDONLY | MountFlags::NODEV;
    let mount = Mount::new(verified.display().to_string(), SYSTEM, "erofs").flags(flags);
    if let Err(source) = mount.apply() {
        return Err(blame(machine, system, source));
    }
    switch().map_err(|(step, source)| Error::Switch { step, source })?;
    if let Some(early) = early {
        early.give_back();
    }
    Ok(())
}

/// Why the system can't be mounted: the kernel's log names damaged blocks.
fn blame(machine: &mut Machine, system: &System, source: mount::Error) -> Error {
    machine.investigate();
    let System { partition, device, .. } = system.clone();
    match machine.damage() {
        Some((_system, kind, block)) => {
            Error::Corrupt { partition, device, kind: kind.to_owned(), block }
        }
        None => Error::MountSystem { partition, device, source },
    }
}

/// Makes the system the root, and frees the initramfs's memory.
fn switch() -> Result<(), (&'static str, io::Error)> {
    let system = Path::new(SYSTEM);
    for name in ["dev", "proc", "sys", "esp"] {
        let (from, to) = (Path::new("/").join(name), system.join(name));
        match mount::move_to(&from, &to) {
            Ok(()) => {}
            // The ESP is not mounted yet where the initramfs has no vfat.
            Err(error) if name == "esp" && error.kind() == io::ErrorKind::InvalidInput => {}
            Err(error) => return Err(("move a mount into the system", error)),
        }
    }
    // Our own program stays as long as we run it, the modules as long as one is loaded.
    for path in [MARK, "/init"] {
        fs::remove_file(path).ok();
    }
    mount::switch_root(system).map_err(|error| ("change the root", error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_says_where_the_hash_tree_starts() {
        let verity = Verity { root_hash: "ab".repeat(32), salt: "706f".to_owned(), blocks: 512 };
        let table = table(Path::new("/dev/vda2"), &verity);
        assert_eq!(table.length, 4096);
        let hash = "ab".repeat(32);
        let expected = format!("1 /dev/vda2 /dev/vda2 4096 4096 512 512 blake2b-256 {hash} 706f");
        assert_eq!(table.parameters, expected);
    }

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
        assert_eq!(text, "a disk; there are: sda (no partition table)");
    }

    #[test]
    fn quick_ways_to_a_disk_are_tried_before_slow_ones() {
        let nvme = "pci:v00001B36d00000010sv00001AF4sd00001100bc01sc08i02";
        let ahci = "pci:v00008086d00002922sv00001AF4sd00001100bc01sc06i01";
        let xhci = "pci:v00001B36d0000000Dsv00001AF4sd00001100bc0Csc03i30";
        assert_eq!(way(nvme), way("virtio:d00000002v00001AF4"));
        assert!(way(nvme) < way(ahci));
        assert!(way(ahci) < way(xhci));
    }

    #[test]
    fn a_missing_disk_is_reported_with_the_existing_ones() {
        let esp = Guid::parse("6f1e4d07-5a3c-4c3b-9d3b-0123456789ab");
        let wanted = || Firmware { esp, ..Firmware::default() }.wanted();
        let waited = Duration::from_secs(30);
        let error = absent(wanted(), &[], waited);
        assert_eq!(error.to_string(), "no disk has appeared within 30 s");
        let disks = [Disk { name: "sda".to_owned(), table: Err("no partition table".to_owned()) }];
        let text = absent(wanted(), &disks, waited).to_string();
        assert!(text.contains("6f1e4d07") && text.contains("sda (no partition table)"), "{text}");
    }
}
