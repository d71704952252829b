//! The state that `init` keeps from its first moment to its last.
//!
//! Both stages, the guru meditation and the end of the machine work on the same
//! [`Machine`], so that the serial port is available in all of them.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write as _;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::process::{Pid, Signal};

use polis_base::serial::{EventLine, Severity};
use polis_base::stage::{self, Stage, State};
use polis_base::sys::reboot::Reason;
use polis_base::sys::signal::Signals;
use polis_base::sys::spawn::{self, Ended, Reaped};
use polis_base::sys::terminal::Terminal;
use polis_base::sys::uevent::{self, Listener, Received};
use polis_base::sys::watchdog::Watchdog;
use polis_base::sys::{clock, dm, kmsg, poll, signal};
use polis_base::trapdoor::{Report, code};

use super::attempts::Store;
use super::buttons::Buttons;
use super::command_line::{COUNTDOWN, CommandLine, INIT_DEADLINE};
use super::extra::Extra;
use super::kernel_log::KernelEvent;
use super::port::Port;
use super::processors::{Outcome, Processors};

/// The watchdog is petted six times within its timeout.
const PET_INTERVAL: Duration = Duration::from_secs(10);
/// How long processes may take to end after `SIGTERM`.
const TERM_TIME: Duration = Duration::from_secs(5);
/// How long the kernel may take to end those that were killed.
const KILL_TIME: Duration = Duration::from_secs(5);
/// How often to check whether they have; `SIGCHLD` wakes earlier.
const REAP_INTERVAL: Duration = Duration::from_millis(100);
/// Evidence beyond this repeats itself.
const KERNEL_EVENTS_MAX: usize = 16;
/// Where sysfs has block devices by their numbers.
const BLOCK: &str = "/sys/dev/block";

/// The system that the machine was started from.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Identity {
    /// The version of the system.
    pub version: String,
    /// The image, as `POLIS boot` names it.
    pub image: String,
    /// `A` or `B`.
    pub slot: String,
}

/// The partition that the system runs from.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct System {
    /// Its name.
    pub partition: &'static str,
    /// Its device.
    pub device: PathBuf,
    /// `major:minor`, as the kernel's log names it.
    pub numbers: String,
}

impl System {
    /// Whether it is read from the device `major:minor`, which the kernel describes below `block`:
    /// its partition, or what a mirror has put in its place. A pod may have verified devices, too.
    fn is_on(&self, block: &str, device: &str) -> bool {
        let name = || fs::read_to_string(Path::new(block).join(device).join("dm/name"));
        self.numbers == device || name().is_ok_and(|name| name.trim_end() == dm::SYSTEM_DISKS)
    }
}

/// The input of stage 2.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Start {
    /// The disk that the machine was started from.
    pub disk: PathBuf,
    /// The ESP's device.
    pub esp: PathBuf,
    /// The files that the boot stub added to the initramfs.
    pub extra: Extra,
    /// The parsed kernel command line.
    pub command_line: CommandLine,
}

/// The announcements of the kernel.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Announced {
    /// The modaliases of new devices.
    pub aliases: Vec<String>,
    /// Whether there was any announcement, also of a device without a modalias.
    pub any: bool,
    /// Whether one was of a disk or a partition.
    pub disks: bool,
    /// Whether announcements were lost: all devices have to be looked at.
    pub lost: bool,
}

/// When each of `init`'s stages started and ended.
pub type Times = BTreeMap<Stage, (Duration, Option<Duration>)>;

/// All state that lasts.
#[derive(Debug)]
pub struct Machine {
    /// The serial port.
    pub port: Port,
    /// The running system.
    pub identity: Identity,
    /// The system partition, once it is known.
    pub system: Option<System>,
    /// The result of stage 1, once it is over.
    pub start: Option<Start>,
    /// Why the boot before this one failed, if it did.
    pub previous: Option<String>,
    /// The store of the ledger, once the ESP is mounted.
    pub attempts: Option<Store>,
    /// The ESP is not mounted, since its disk does not answer.
    pub esp_silent: bool,
    /// The disk of the system does not answer.
    pub system_silent: bool,
    /// Terminals that show the guru meditation, below `/dev`.
    pub terminals: Vec<String>,
    /// The attempts of stage 1, until it succeeds.
    pub tried: Vec<String>,
    /// How long a guru meditation waits before it reboots.
    pub countdown: Duration,
    /// How long `init` may be silent where only the kernel watches it.
    pub init_deadline: Duration,
    /// The loader tries this system: the next start is that of the one before, until `node` keeps
    /// this one.
    pub trial: bool,
    /// The times of the stages.
    pub times: Times,
    /// The kernel's announcements.
    pub uevents: Option<Listener>,
    /// The kernel's log, once it can be read.
    pub kernel: Option<kmsg::Reader>,
    /// The entries of the kernel's log that explain a death.
    pub kernel_log: Vec<KernelEvent>,
    /// Signals to this process.
    pub signals: Option<Signals>,
    /// Power buttons.
    pub buttons: Buttons,
    processors: Option<Processors>,
    watchdog: Option<Watchdog>,
    petted: Duration,
}

impl Default for Machine {
    fn default() -> Self {
        Self {
            port: Port::default(),
            identity: Identity {
                version: env!("CARGO_PKG_VERSION").to_owned(),
                image: "unknown".to_owned(),
                slot: "unknown".to_owned(),
            },
            system: None,
            start: None,
            previous: None,
            attempts: None,
            esp_silent: false,
            system_silent: false,
            terminals: vec!["tty1".to_owned()],
            tried: Vec::new(),
            countdown: COUNTDOWN,
            init_deadline: INIT_DEADLINE,
            trial: false,
            times: Times::new(),
            uevents: None,
            kernel: None,
            kernel_log: Vec::new(),
            signals: None,
            buttons: Buttons::default(),
            processors: None,
            watchdog: None,
            petted: Duration::ZERO,
        }
    }
}

impl Machine {
    /// Reports that a stage starts.
    pub fn started(&mut self, stage: Stage) {
        let now = clock::uptime();
        self.times.insert(stage, (now, None));
        self.port.line(&stage::line(stage, &State::Started, now).to_string());
    }

    /// Reports that the kernel's stage is over; it began with the clock.
    pub fn kernel_done(&mut self) {
        let now = clock::uptime();
        self.times.insert(Stage::Kernel, (Duration::ZERO, Some(now)));
        self.port.line(&stage::line(Stage::Kernel, &State::Started, Duration::ZERO).to_string());
        self.port.line(&stage::line(Stage::Kernel, &State::Done, now).to_string());
    }

    /// Reports that a stage is over.
    pub fn done(&mut self, stage: Stage) {
        let now = clock::uptime();
        if let Some((_started, ended)) = self.times.get_mut(&stage) {
            *ended = Some(now);
        }
        self.port.line(&stage::line(stage, &State::Done, now).to_string());
    }

    /// Reports that a stage waits, also on the screen, which is `init`'s until `node` draws.
    pub fn waiting(&mut self, stage: Stage, what: String) {
        // Without a screen this fails, which is harmless. A test has another one.
        if std::process::id() == 1
            && let Ok(mut screen) = Terminal::open(Path::new("/dev/tty1"))
        {
            screen.write_all(format!("\n  Polis waits for {what}\n").as_bytes()).ok();
        }
        let line = stage::line(stage, &State::Waiting(what), clock::uptime());
        self.port.line(&line.to_string());
    }

    /// Reports that a stage failed.
    pub fn failed(&mut self, stage: Stage) {
        let line = stage::line(stage, &State::Failed, clock::uptime());
        self.port.line(&line.to_string());
    }

    /// Writes the closing line, the last line of all, also to a port with a screen: nothing draws
    /// there any more.
    pub fn off(&mut self, reason: Reason) {
        self.port.come_back();
        self.port.force(EventLine::new("off").field("reason", reason.name()));
        self.port.drain();
    }

    /// Reads the kernel's log up to its end and keeps the evidence of a death. Returns
    /// whether the running system was found damaged.
    pub fn investigate(&mut self) -> bool {
        if self.kernel.is_none() {
            self.kernel = kmsg::Reader::open(kmsg::From::Start).ok();
        }
        let Some(kernel) = &mut self.kernel else { return false };
        let mut damaged = false;
        while let Ok(Some(record)) = kernel.next_record() {
            let Some(kernel_log) = KernelEvent::find(&record) else { continue };
            damaged |= matches!(&kernel_log, KernelEvent::Corrupt { device, .. }
                if self.system.as_ref().is_some_and(|system| system.is_on(BLOCK, device)));
            if self.kernel_log.len() < KERNEL_EVENTS_MAX && !self.kernel_log.contains(&kernel_log) {
                self.kernel_log.push(kernel_log);
            }
        }
        damaged
    }

    /// The first damaged block of the system, if there is one.
    #[must_use]
    pub fn damage(&self) -> Option<(&System, &str, u64)> {
        let system = self.system.as_ref()?;
        self.kernel_log.iter().find_map(|kernel_log| match kernel_log {
            KernelEvent::Corrupt { device, kind, block } if system.is_on(BLOCK, device) => {
                Some((system, kind.as_str(), *block))
            }
            KernelEvent::Corrupt { .. } | KernelEvent::OutOfMemory { .. } => None,
        })
    }

    /// The report of a damaged system, if it is damaged.
    #[must_use]
    pub fn damage_report(&self) -> Option<Report> {
        let (system, kind, block) = self.damage()?;
        let cause = format!(
            "{} ({}) is damaged: {kind} block {block} does not match its hash",
            system.partition,
            system.device.display()
        );
        Some(Report::new(code::SYSTEM_DAMAGED_RUNNING, vec![cause]))
    }

    /// Begins to start the processors that are offline.
    pub fn start_processors(&mut self) {
        if self.processors.is_none() {
            match Processors::begin() {
                Ok(processors) => self.processors = Some(processors),
                Err(error) => {
                    let text = format!("processors cannot be started: {error}");
                    self.port.log(Severity::Warning, &text);
                }
            }
        }
        if let Some(processors) = &self.processors {
            processors.start_all();
        }
    }

    fn log_processors(&mut self) {
        let outcomes = self.processors.iter().flat_map(Processors::outcomes);
        for (name, outcome) in outcomes.collect::<Vec<Outcome>>() {
            match outcome {
                Ok(()) => self.port.log(Severity::Info, &format!("processor {name} is running")),
                Err(error) => {
                    let text = format!("processor {name} cannot be started: {error}");
                    self.port.log(Severity::Warning, &text);
                }
            }
        }
    }

    /// Opens the devices that are present: the watchdog and power buttons. Begins to start
    /// processors that were added.
    pub fn find_devices(&mut self) {
        self.start_processors();
        self.find_watchdog();
        let received = self.buttons.find();
        self.log_buttons(&received);
    }

    fn log_buttons(&mut self, buttons: &[String]) {
        for name in buttons {
            // The driver may load late, and earlier key presses are lost.
            let text = format!("listening to the power key of {name:?}");
            self.port.log(Severity::Info, &text);
        }
    }

    fn find_watchdog(&mut self) {
        if self.watchdog.is_none()
            && let Ok(watchdog) = Watchdog::open(Path::new("/dev/watchdog"), self.init_deadline)
        {
            self.feed(watchdog);
        }
    }

    /// A watchdog was announced. One of the machine takes the place of the kernel's own timer,
    /// which ends with the kernel.
    fn meet_watchdog(&mut self, name: &str) {
        match &self.watchdog {
            None => self.find_watchdog(),
            Some(watchdog) if watchdog.is_software() => {
                // The one that is open is busy.
                let path = Path::new("/dev").join(name);
                let Ok(other) = Watchdog::open(&path, self.init_deadline) else { return };
                if let Some(software) = self.watchdog.take() {
                    software.disarm();
                }
                self.feed(other);
            }
            Some(_) => {}
        }
    }

    fn feed(&mut self, watchdog: Watchdog) {
        let what = if watchdog.is_software() { ", the kernel's own timer" } else { "" };
        let text = format!("the watchdog is running: {}{what}", watchdog.name());
        self.port.log(Severity::Info, &text);
        self.watchdog = Some(watchdog);
        self.petted = clock::uptime();
    }

    /// Reads the kernel's announcements.
    pub fn receive(&mut self) -> Announced {
        let mut announced = Announced::default();
        while let Some(uevents) = &self.uevents {
            match uevents.next_event() {
                Ok(Received::Event(event)) => {
                    self.notice(&event);
                    announced.any = true;
                    announced.disks |= event.get("SUBSYSTEM") == Some("block");
                    if event.action == "add" {
                        announced.aliases.extend(event.get("MODALIAS").map(str::to_owned));
                    }
                }
                Ok(Received::Lost) => announced.lost = true,
                Ok(Received::Nothing) => break,
                Err(error) => {
                    let text = format!("device announcements stopped: {error}");
                    self.port.log(Severity::Error, &text);
                    self.uevents = None;
                }
            }
        }
        if announced.lost {
            self.find_devices();
        }
        self.log_processors();
        announced
    }

    fn notice(&mut self, event: &uevent::Event) {
        let received = self.buttons.notice(event);
        self.log_buttons(&received);
        if let Some(processors) = &self.processors {
            processors.notice(event);
        }
        let Some(name) = event.get("DEVNAME") else { return };
        let subsystem = event.get("SUBSYSTEM").unwrap_or_default();
        let is_watchdog = match (subsystem, name.strip_prefix("watchdog")) {
            ("watchdog", Some(number)) => number.parse::<u8>().is_ok(),
            // A driver older than the kernel's core for them has only this name.
            ("misc", Some(rest)) => rest.is_empty(),
            _ => false,
        };
        if event.action == "add" && is_watchdog {
            self.meet_watchdog(name);
        }
    }

    /// Pets the watchdog if it is time.
    pub fn pet(&mut self) {
        let now = clock::uptime();
        let Some(watchdog) = &mut self.watchdog else { return };
        if now < self.petted + PET_INTERVAL {
            return;
        }
        self.petted = now;
        if let Err(error) = watchdog.pet() {
            let text = format!("the watchdog does not respond: {error}");
            self.port.log(Severity::Error, &text);
        }
    }

    /// When the watchdog must be petted next.
    #[must_use]
    pub fn pet_at(&self) -> Option<Duration> {
        self.watchdog.as_ref().map(|_watchdog| self.petted + PET_INTERVAL)
    }

    /// Prepares the watchdog for the end: off stays off, but a reboot that hangs
    /// ends in its reset.
    pub fn leave_watchdog(&mut self, reason: Reason) {
        match (reason, self.watchdog.take()) {
            (Reason::PowerOff, Some(watchdog)) => watchdog.disarm(),
            (Reason::Reboot, Some(mut watchdog)) => drop(watchdog.pet()),
            (_, None) => {}
        }
    }

    /// The signals that have arrived, by number.
    pub fn received(&mut self) -> Vec<i32> {
        let mut received = Vec::new();
        while let Some(Ok(Some(number))) = self.signals.as_ref().map(Signals::next_signal) {
            received.push(number);
        }
        received
    }

    /// Ends every other process: first by `SIGTERM`, then by force.
    pub fn end_processes(&mut self) {
        for (signal, time) in [(Signal::TERM, TERM_TIME), (Signal::KILL, KILL_TIME)] {
            // Even without a process to signal, dead ones may still have to be reaped.
            signal::send_to_all(signal).ok();
            if self.reap_until(clock::uptime() + time) {
                return;
            }
        }
        self.port.log(Severity::Warning, "some processes can't be ended, even by force");
    }

    /// Reaps until all children have ended or the time is up; returns whether all have.
    fn reap_until(&mut self, until: Duration) -> bool {
        loop {
            if reap().1 {
                return true;
            }
            let Some(left) = until.checked_sub(clock::uptime()) else { return false };
            self.received();
            self.pet();
            let wait = left.min(REAP_INTERVAL);
            match &self.signals {
                Some(signals) => {
                    poll::wait(&[(signals.as_fd(), poll::Interest::Read)], Some(wait)).ok();
                }
                None => poll::sleep(wait),
            }
        }
    }
}

/// Reaps every child that has ended; returns whether all have.
pub fn reap() -> (Vec<(Pid, Ended)>, bool) {
    let mut ended = Vec::new();
    loop {
        match spawn::reap() {
            Reaped::Ended(process, how) => ended.push((process, how)),
            Reaped::NoneEnded => return (ended, false),
            Reaped::NoChildren => return (ended, true),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_device_of_the_system_counts_as_the_system() {
        let block = tempfile::tempdir().unwrap();
        for (numbers, name) in [("254:3", dm::SYSTEM_DISKS), ("254:7", "csi-volume")] {
            let folder = block.path().join(numbers).join("dm");
            fs::create_dir_all(&folder).unwrap();
            fs::write(folder.join("name"), format!("{name}\n")).unwrap();
        }
        let system = System {
            partition: "POLIS-SYSTEM-A",
            device: "/dev/vda2".into(),
            numbers: "254:2".to_owned(),
        };
        let is_on = |device| system.is_on(&block.path().display().to_string(), device);
        assert_eq!(["254:2", "254:3", "254:7", "254:9"].map(is_on), [true, true, false, false]);
    }
}
