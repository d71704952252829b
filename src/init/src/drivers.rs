//! The drivers of stage 1: which modules of the initramfs the devices of the machine ask for, in
//! the order in which they probably lead to the disk.
//!
//! `search` serves the devices until the disk is there; `stage1` loads by name what the ESP and the
//! system need.
//!
//! What this module does not do: hand a driver to the kernel (`loader`), or find its file
//! (`modules`).

use std::collections::BTreeSet;
use std::os::fd::BorrowedFd;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use polis_base::serial::Severity;
use polis_base::sys::clock;

use super::coldplug;
use super::loader::Loader;
use super::machine::Machine;
use super::modules::{self, Modules};

/// Where the initramfs has its modules.
pub(super) const MODULES: &str = "/modules";

/// How likely a device leads to the disk: an early success saves the rest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Rank {
    /// Fast to probe.
    Quick,
    /// Searches its cables.
    Slow,
    /// Waits for devices to answer, and brings the keyboard.
    Usb,
}

fn rank(alias: &str) -> Rank {
    // NVMe is PCI class 01, subclass 08.
    let nvme = alias.starts_with("pci:") && alias.contains("bc01sc08");
    let usb = alias.starts_with("pci:") && alias.contains("bc0Csc03");
    let quick = ["virtio:", "scsi:"].iter().any(|bus| alias.starts_with(bus));
    if quick || nvme {
        Rank::Quick
    } else if usb || ["usb:", "hid:", "input:"].iter().any(|bus| alias.starts_with(bus)) {
        Rank::Usb
    } else {
        Rank::Slow
    }
}

/// The modules of the initramfs, and which of their devices were served.
pub(super) struct Drivers {
    modules: Option<Modules>,
    /// Loads those of devices; without one, stage 1 waits for each.
    loader: Option<Loader>,
    loaded: BTreeSet<String>,
    served: BTreeSet<String>,
    waiting: BTreeSet<String>,
}

impl Drivers {
    /// Opens the modules of the initramfs.
    pub(super) fn open(machine: &mut Machine) -> Self {
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
    pub(super) fn add(&mut self, aliases: impl IntoIterator<Item = String>) {
        let new = aliases.into_iter().filter(|alias| !self.served.contains(alias));
        self.waiting.extend(new.collect::<Vec<_>>());
    }

    /// Whether every device that was announced is served.
    pub(super) fn done(&self) -> bool {
        self.waiting.is_empty() && self.loader.as_ref().is_none_or(Loader::is_idle)
    }

    /// The drivers that look for their devices, and since when.
    pub(super) fn busy(&self) -> Vec<(String, Duration)> {
        let busy = self.loader.iter().flat_map(Loader::busy);
        busy.map(|(name, since)| (name.to_owned(), since)).collect()
    }

    /// Notes which drivers have ended their search; returns whether one has.
    pub(super) fn take(&mut self, machine: &mut Machine) -> bool {
        let Some(loader) = &mut self.loader else { return false };
        let done = loader.take(clock::uptime());
        let some = !done.is_empty();
        done.into_iter().for_each(|done| self.note(machine, &done.name, done.result));
        some
    }

    /// Hands the drivers of the most likely remaining class to the kernel, unless it is busy
    /// with others. `false` when it is, or when all are served.
    pub(super) fn serve_some(&mut self, machine: &mut Machine) -> bool {
        if self.loader.as_ref().is_some_and(|loader| !loader.has_room(clock::uptime())) {
            return false;
        }
        let Some(best) = self.waiting.iter().map(|alias| rank(alias)).min() else { return false };
        let (now, later): (BTreeSet<_>, BTreeSet<_>) =
            std::mem::take(&mut self.waiting).into_iter().partition(|alias| rank(alias) == best);
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
    pub(super) fn list(&self) -> String {
        if self.loaded.is_empty() {
            return "none".to_owned();
        }
        self.loaded.iter().map(String::as_str).collect::<Vec<_>>().join(" ")
    }

    /// When a driver that is loading will be stuck.
    pub(super) fn deadline(&self, now: Duration) -> Option<Duration> {
        self.loader.as_ref().and_then(|loader| loader.deadline(now))
    }

    /// The descriptor that can be read when a driver was loaded.
    pub(super) fn as_fd(&self) -> Option<BorrowedFd<'_>> {
        self.loader.as_ref().map(Loader::as_fd)
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
    pub(super) fn load(&mut self, machine: &mut Machine, name: &str) {
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
#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quick_ways_to_a_disk_are_tried_before_slow_ones() {
        let nvme = "pci:v00001B36d00000010sv00001AF4sd00001100bc01sc08i02";
        let ahci = "pci:v00008086d00002922sv00001AF4sd00001100bc01sc06i01";
        let xhci = "pci:v00001B36d0000000Dsv00001AF4sd00001100bc0Csc03i30";
        assert_eq!(rank(nvme), rank("virtio:d00000002v00001AF4"));
        assert!(rank(nvme) < rank(ahci));
        assert!(rank(ahci) < rank(xhci));
    }
}
