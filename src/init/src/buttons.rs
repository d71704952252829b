//! The power buttons: keys that a person presses to end the machine.
//!
//! ```text
//!             the file appears                           the driver is bound
//! [unknown] ------------------> [open, driver at work] ---------------------> [said]
//!                |                        |                                      |
//!                |                        +---------- removed, gone -------------+--> [unknown]
//!                +-- the driver was bound before -------------------------------> [said]
//! ```
//!
//! A driver registers its input device before it takes the interrupt that feeds it
//! (Linux' `drivers/acpi/button.c`), and a key press in between is lost: so a button is
//! announced only when its driver is bound. A button that a driver adds after that
//! works, but is not announced.

use std::collections::BTreeMap;
use std::fs;
use std::mem;
use std::path::{Path, PathBuf};

use polis_base::sys::input::{self, Button, Received};
use polis_base::sys::uevent::Event;

/// Where the kernel lists input devices.
const CLASS: &str = "/sys/class/input";

/// The power keys of the machine.
#[derive(Debug, Default)]
pub struct Buttons {
    /// By their files in `/dev`.
    open: BTreeMap<PathBuf, Button>,
    /// Input devices that were announced and whose drivers are not bound yet, by
    /// their paths below `/sys`.
    probing: BTreeMap<String, Vec<String>>,
}

impl Buttons {
    /// Opens the buttons that are present, where announcements were missed. Returns the
    /// names of the buttons that were not announced before.
    pub fn find(&mut self) -> Vec<String> {
        // A `bind` event may be among the missed ones, and is not repeated.
        let mut names: Vec<_> = mem::take(&mut self.probing).into_values().flatten().collect();
        let entries = fs::read_dir(CLASS).into_iter().flatten().flatten();
        let devices = entries.filter_map(|entry| entry.file_name().into_string().ok());
        names.extend(devices.filter_map(|device| self.open(&device)));
        names
    }

    /// Handles an announcement of the kernel. Returns the names of the buttons that
    /// work from now on.
    pub fn notice(&mut self, event: &Event) -> Vec<String> {
        let device = event.get("DEVNAME").and_then(|name| name.strip_prefix("input/"));
        match (event.action.as_str(), device) {
            ("add", Some(device)) => self.add(device, &event.path),
            ("add", None) if event.get("SUBSYSTEM") == Some("input") => {
                self.probing.insert(event.path.clone(), Vec::new());
                Vec::new()
            }
            ("remove", Some(device)) => {
                self.open.remove(&Path::new("/dev/input").join(device));
                Vec::new()
            }
            ("remove", None) => {
                self.probing.remove(&event.path);
                Vec::new()
            }
            ("bind", _) => {
                let all = mem::take(&mut self.probing).into_iter();
                let (bound, probing): (BTreeMap<_, _>, _) =
                    all.partition(|(path, _names)| is_below(path, &event.path));
                self.probing = probing;
                bound.into_values().flatten().collect()
            }
            _ => Vec::new(),
        }
    }

    /// The file of an input device has appeared: with the device, or long after if
    /// `evdev` was loaded late.
    fn add(&mut self, device: &str, path: &str) -> Vec<String> {
        let name = self.open(device);
        let mut probing = self.probing.iter_mut();
        match probing.find(|(parent, _names)| is_below(path, parent)) {
            Some((_parent, names)) => {
                names.extend(name);
                Vec::new()
            }
            None => name.into_iter().collect(),
        }
    }

    /// Opens an input device if it has a power key and is not open. Returns its name.
    fn open(&mut self, device: &str) -> Option<String> {
        let path = Path::new("/dev/input").join(device);
        if !device.starts_with("event") || self.open.contains_key(&path) {
            return None;
        }
        let attributes = Path::new(CLASS).join(device).join("device");
        let capabilities = fs::read_to_string(attributes.join("capabilities/key")).ok()?;
        if !input::has_power_key(&capabilities) {
            return None;
        }
        self.open.insert(path.clone(), Button::open(&path).ok()?);
        let name = fs::read_to_string(attributes.join("name")).unwrap_or_default();
        Some(name.trim().to_owned())
    }

    /// Reads them; returns whether one was pressed.
    pub fn pressed(&mut self) -> bool {
        let mut pressed = false;
        self.open.retain(|_path, button| match button.read() {
            Received::Pressed => {
                pressed = true;
                true
            }
            Received::Nothing => true,
            Received::Gone => false,
        });
        pressed
    }

    /// The buttons to wait for.
    pub fn iter(&self) -> impl Iterator<Item = &Button> {
        self.open.values()
    }
}

/// Whether a device is one of those that belong to another.
fn is_below(path: &str, parent: &str) -> bool {
    path.strip_prefix(parent).is_some_and(|rest| rest.starts_with('/'))
}

#[cfg(test)]
mod tests {
    use super::*;

    const BUTTON: &str = "/devices/LNXSYSTM:00/LNXPWRBN:00";

    fn event(action: &str, path: &str) -> Event {
        let text = format!("{action}@{path}\0ACTION={action}\0SUBSYSTEM=input\0");
        Event::parse(text.as_bytes()).expect("an announcement")
    }

    /// Buttons that were opened while their drivers were at work.
    fn probing(parents: &[&str]) -> Buttons {
        let mut buttons = Buttons::default();
        for parent in parents {
            let path = format!("{parent}/input/input5");
            assert!(buttons.notice(&event("add", &path)).is_empty());
            let names = buttons.probing.get_mut(&path).expect("it was announced");
            names.push((*parent).to_owned());
        }
        buttons
    }

    #[test]
    fn a_button_is_read_once_its_own_driver_is_bound() {
        let mut buttons = probing(&[BUTTON, "/devices/LNXSYSTM:00/LNXPWRBN:001"]);
        assert!(buttons.notice(&event("change", BUTTON)).is_empty());
        assert!(buttons.notice(&event("bind", "/devices/platform/i8042/serio0")).is_empty());
        assert_eq!(buttons.notice(&event("bind", BUTTON)), [BUTTON]);
        assert!(buttons.notice(&event("bind", BUTTON)).is_empty());
        assert_eq!(buttons.probing.len(), 1);
    }

    #[test]
    fn a_button_removed_during_its_probe_is_not_listed() {
        let mut buttons = probing(&[BUTTON]);
        let path = format!("{BUTTON}/input/input5");
        assert!(buttons.notice(&event("remove", &path)).is_empty());
        assert!(buttons.notice(&event("bind", BUTTON)).is_empty());
    }
}
