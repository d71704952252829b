//! The driver loader: it loads the drivers of all devices, in parallel with the boot.
//!
//! One thread, since drivers are handed to the kernel in an order that matters to a boot: the
//! network first, what the data partition needs next, the rest when `node` is ready, or waits for
//! a disk with its parameters. A machine with one processor would otherwise share it between the
//! boot and the probing of ports that nothing is plugged into.
//!
//! ```text
//! /sys/bus/*/devices/*/modalias --+     [what the boot needs] ------> kernel
//!                                 +-->            | ready, waits, or PATIENCE
//! announcements (main loop) ------+     [the rest, as it appears] --> kernel
//!                                              | nothing new for SETTLED, no watchdog
//!                                          [softdog] --------------> kernel
//! ```
//!
//! What this module does not do: wait for a device. Its users wait.

use std::collections::BTreeSet;
use std::ffi::CStr;
use std::fs;
use std::io::{self, PipeWriter, Write};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, SyncSender, TrySendError};
use std::thread;
use std::time::{Duration, Instant};

use super::last_words::EFI_MODULE;
use super::modules::{self, Modules};
use polis_base::sys;

/// Modaliases that wait for the thread. A hub full of devices has dozens.
const QUEUE_MAX: usize = 256;

/// Modules that every node needs and no device requests: the data partition's file system,
/// and the input of the power button.
const BY_NAME: &[&str] = &["xfs", "evdev"];

/// Modules of the firewall, for the rules that `node` sets once a cable is there. `nft` would make
/// the kernel look for each in the list of all aliases.
const FIREWALL: &[&str] = &["nf_tables", "nft_ct"];

/// Only a machine with UEFI has variables that keep the last words of its kernel.
const UEFI: &str = "/sys/firmware/efi";

/// How long the rest waits for the boot: a machine whose only way to the network
/// is behind a bus of the rest must not wait long for it.
const PATIENCE: Duration = Duration::from_secs(5);

/// A device that a driver has found announces itself at once, and its own driver is loaded
/// then: when nothing has come for so long, what is missing is not there.
const SETTLED: Duration = Duration::from_secs(5);

/// The first watchdog that the kernel knows.
const WATCHDOG: &str = "/dev/watchdog";
/// The kernel's own timer, for a machine without a watchdog. It panics where it would just
/// reset, so that the kernel says what it ran, and keeps that where it can.
const SOFTWARE_WATCHDOG: (&str, &CStr) = ("softdog", c"soft_panic=1");

/// The priority of a thread whose work yields to all other work.
const LATER: i32 = 10;

/// How soon a device is needed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Urgency {
    /// The boot depends on it: parameters and network.
    Boot,
    /// A person may press it at any moment, and the kernel drops unread key presses.
    Person,
    /// Screens: the driver wipes the screen once.
    Screen,
    /// The rest.
    Later,
}

fn urgency(alias: &str) -> Urgency {
    // fw_cfg; network devices of virtio, of PCI (class 02) and of hypervisors.
    let starts = ["virtio:d00000001v", "acpi:QEMU0002:", "vmbus:"];
    let network = alias.starts_with("pci:") && alias.contains("bc02sc");
    let power_buttons = ["acpi:LNXPWRBN:", "acpi:PNP0C0C:"];
    let screen = alias.starts_with("virtio:d00000010v")
        || (alias.starts_with("pci:") && alias.contains("bc03sc"));
    if network || starts.iter().any(|start| alias.starts_with(start)) {
        Urgency::Boot
    } else if power_buttons.iter().any(|start| alias.starts_with(start)) {
        Urgency::Person
    } else if screen {
        Urgency::Screen
    } else {
        Urgency::Later
    }
}

/// The handle through which the main loop reports devices.
#[derive(Clone, Debug)]
pub struct Coldplug {
    queue: SyncSender<String>,
    again: Arc<AtomicBool>,
    over: Arc<AtomicBool>,
}

impl Coldplug {
    /// Starts the thread. It writes its messages to `said`, one line each.
    ///
    /// # Errors
    ///
    /// When no thread can be started.
    pub fn start(output: PipeWriter) -> io::Result<Self> {
        let (queue, received) = mpsc::sync_channel(QUEUE_MAX);
        let again = Arc::new(AtomicBool::new(false));
        let over = Arc::new(AtomicBool::new(false));
        let mut worker =
            Worker { received, again: Arc::clone(&again), over: Arc::clone(&over), output };
        thread::Builder::new().name("modules".to_owned()).spawn(move || worker.run())?;
        Ok(Self { queue, again, over })
    }

    /// A device with this modalias has appeared. Never blocks.
    pub fn put(&self, alias: String) {
        if let Err(TrySendError::Full(_)) = self.queue.try_send(alias) {
            // The queue wakes the thread, which then looks at everything.
            self.look_again();
        }
    }

    /// Announcements were lost: look at all devices.
    pub fn look_again(&self) {
        self.again.store(true, Ordering::Release);
        self.wake();
    }

    /// The remaining drivers may load: the boot is over, or waits for a device of theirs.
    pub fn load_the_rest(&self) {
        if !self.over.swap(true, Ordering::AcqRel) {
            self.wake();
        }
    }

    fn wake(&self) {
        // An empty modalias matches nothing. A full queue wakes the thread by itself.
        self.queue.try_send(String::new()).ok();
    }
}

struct Worker {
    received: Receiver<String>,
    again: Arc<AtomicBool>,
    over: Arc<AtomicBool>,
    output: PipeWriter,
}

impl Worker {
    fn run(&mut self) {
        match Modules::of_running_kernel() {
            Ok(mut modules) => self.first(&mut modules),
            Err(error) => self.say(&format!("the system has no modules for this kernel: {error}")),
        }
        // The tables of the first pass are half a megabyte, and rarely needed again.
        let mut settled = false;
        while let Some(alias) = self.next(&mut settled) {
            let mut aliases = BTreeSet::from([alias]);
            while let Ok(alias) = self.received.try_recv() {
                aliases.insert(alias);
            }
            if self.again.swap(false, Ordering::AcqRel) {
                aliases.extend(present());
            }
            if let Ok(mut modules) = Modules::of_running_kernel() {
                self.load(&mut modules, &aliases);
            }
        }
    }

    /// The next modalias, empty where announcements were lost; `None` when the machine ends. Once
    /// no device comes for [`SETTLED`], the machine gets a watchdog.
    fn next(&mut self, settled: &mut bool) -> Option<String> {
        // A full queue takes no wake-up, and `first` may have read all of it since.
        if self.again.load(Ordering::Acquire) {
            return Some(String::new());
        }
        if !*settled {
            match self.received.recv_timeout(SETTLED) {
                Ok(alias) => return Some(alias),
                Err(RecvTimeoutError::Disconnected) => return None,
                Err(RecvTimeoutError::Timeout) => {}
            }
            *settled = true;
            self.watch();
        }
        self.received.recv().ok()
    }

    /// Loads the kernel's own watchdog where no driver has found one. The main loop opens it.
    fn watch(&mut self) {
        if Path::new(WATCHDOG).exists() {
            return;
        }
        let (name, parameters) = SOFTWARE_WATCHDOG;
        match Modules::of_running_kernel() {
            Ok(mut modules) => self.one(&mut modules, name, parameters),
            Err(error) => self.say(&format!("no watchdog, and no module {name}: {error}")),
        }
    }

    fn first(&mut self, modules: &mut Modules) {
        // The kernel links nothing else before XFS, and `node` has the processor
        // meanwhile.
        sys::thread::set_priority(LATER);
        let mut present = present();
        let mut take = |wanted| {
            let (taken, left) = present.iter().cloned().partition(|alias| urgency(alias) == wanted);
            present = left;
            taken
        };
        self.load(modules, &take(Urgency::Boot));
        for name in BY_NAME {
            self.one(modules, name, c"");
        }
        self.load_undelayed(modules, &take(Urgency::Person));
        for name in FIREWALL {
            self.one(modules, name, c"");
        }
        // A panic is on record only from here on; nothing of it is read now.
        if Path::new(UEFI).exists() {
            self.one(modules, EFI_MODULE, c"");
        }
        let (screen, mut later) = (take(Urgency::Screen), take(Urgency::Later));
        later.extend(self.until_the_rest_may_load(modules));
        self.load(modules, &screen);
        self.load(modules, &later);
    }

    /// Loads urgent drivers as devices appear, and returns the ones that can wait.
    fn until_the_rest_may_load(&mut self, modules: &mut Modules) -> BTreeSet<String> {
        let deadline = Instant::now() + PATIENCE;
        let mut later = BTreeSet::new();
        while !self.over.load(Ordering::Acquire) {
            let left = deadline.saturating_duration_since(Instant::now());
            // The sender is gone once the trapdoor is open: its keys may need a driver.
            let Ok(alias) = self.received.recv_timeout(left) else { break };
            match urgency(&alias) {
                Urgency::Boot => self.load(modules, &BTreeSet::from([alias])),
                Urgency::Person => self.load_undelayed(modules, &BTreeSet::from([alias])),
                Urgency::Screen | Urgency::Later => drop(later.insert(alias)),
            }
        }
        later
    }

    /// A driver delayed halfway has shown the button but does not receive its key
    /// presses.
    fn load_undelayed(&mut self, modules: &mut Modules, aliases: &BTreeSet<String>) {
        sys::thread::set_priority(0);
        self.load(modules, aliases);
        sys::thread::set_priority(LATER);
    }

    fn load(&mut self, modules: &mut Modules, aliases: &BTreeSet<String>) {
        let aliases = aliases.iter().map(String::as_str).collect();
        let found = match modules.find(&aliases) {
            Ok(found) => found,
            Err(error) => {
                return self.say(&format!("cannot read which modules there are: {error}"));
            }
        };
        for name in once_each(found.into_values().flatten(), modules::is_loading) {
            self.one(modules, &name, c"");
        }
    }

    fn one(&mut self, modules: &mut Modules, name: &str, parameters: &CStr) {
        match modules.load_with(name, parameters) {
            Ok(()) => {}
            Err(error) if error.is_absence() => {}
            Err(error) => {
                let source = std::error::Error::source(&error).map(ToString::to_string);
                self.say(&format!("{error}: {}", source.unwrap_or_default()));
            }
        }
    }

    fn say(&mut self, text: &str) {
        // The reader is gone only when the machine ends.
        self.output.write_all(format!("{text}\n").as_bytes()).ok();
    }
}

/// The modules, each once, without those that the kernel is loading: stage 1 has handed them over.
/// A second load waits for the end of the first, and a driver whose disk never answers has none.
fn once_each(
    names: impl Iterator<Item = String>,
    is_loading: impl Fn(&str) -> bool,
) -> impl Iterator<Item = String> {
    let mut seen = BTreeSet::new();
    names.filter(move |name| seen.insert(name.clone()) && !is_loading(name))
}

/// The modaliases of all present devices.
#[must_use]
pub fn present() -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    let mut take = |path: &Path| {
        if let Ok(text) = fs::read_to_string(path) {
            found.insert(text.trim_end().to_owned());
        }
    };
    for bus in entries("/sys/bus") {
        for device in entries(bus.join("devices")) {
            take(&device.join("modalias"));
        }
    }
    for input in entries("/sys/class/input") {
        take(&input.join("modalias"));
    }
    take(Path::new("/sys/devices/system/cpu/modalias"));
    found.remove("");
    found
}

fn entries(directory: impl AsRef<Path>) -> Vec<std::path::PathBuf> {
    fs::read_dir(directory).into_iter().flatten().flatten().map(|entry| entry.path()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_power_button_is_read_before_the_other_devices() {
        assert_eq!(urgency("acpi:LNXPWRBN:"), Urgency::Person);
        assert_eq!(urgency("acpi:PNP0C0C:"), Urgency::Person);
        assert_eq!(
            urgency("pci:v00001234d00001111sv00001AF4sd00001100bc03sc00i00"),
            Urgency::Screen
        );
        assert!(Urgency::Boot < Urgency::Person && Urgency::Person < Urgency::Later);
    }

    #[test]
    fn a_driver_that_waits_for_its_disk_holds_up_none_behind_it() {
        let names = ["ahci", "virtio_blk", "virtio_rng", "ahci"].map(str::to_owned);
        let loaded: Vec<_> = once_each(names.into_iter(), |name| name == "virtio_blk").collect();
        assert_eq!(loaded, ["ahci", "virtio_rng"]);
    }

    #[test]
    fn lost_announcements_are_made_up_for_though_the_queue_was_read_meanwhile() {
        let (_lines, output) = io::pipe().unwrap();
        let (queue, received) = mpsc::sync_channel(QUEUE_MAX);
        let (again, over) = (Arc::<AtomicBool>::default(), Arc::<AtomicBool>::default());
        let coldplug = Coldplug { queue, again: Arc::clone(&again), over: Arc::clone(&over) };
        let mut worker = Worker { received, again, over, output };
        for number in 0..=QUEUE_MAX {
            coldplug.put(format!("usb:v{number:04X}"));
        }
        // As `first` does while the rest waits for the boot.
        assert_eq!(worker.received.try_iter().count(), QUEUE_MAX);
        drop(coldplug);
        assert_eq!(worker.next(&mut true), Some(String::new()));
        worker.again.store(false, Ordering::Release);
        assert_eq!(worker.next(&mut true), None);
    }

    #[test]
    fn the_network_comes_before_the_rest() {
        let soon = [
            "virtio:d00000001v00001AF4",
            "pci:v00008086d000010D3sv00008086sd00000000bc02sc00i00",
            "acpi:QEMU0002:",
        ];
        assert!(soon.iter().all(|alias| urgency(alias) == Urgency::Boot));
        let later = ["virtio:d00000002v00001AF4", "cpu:type:x86,ven0000fam0006"];
        assert!(later.iter().all(|alias| urgency(alias) == Urgency::Later));
    }
}
