//! The terminals that show a guru meditation; missing ones are looked for every
//! [`POLL_INTERVAL`].

use std::collections::BTreeSet;
use std::time::Duration;

use polis_tui::guru::Guru;

use polis_base::serial::Severity;

use crate::machine::Machine;
use crate::screen::{POLL_INTERVAL, Screen};

/// The terminals with the picture on them.
#[derive(Default)]
pub(super) struct Screens {
    pub(super) open: Vec<Screen>,
    /// The terminals that were already reported as missing.
    output: BTreeSet<String>,
    /// When to look again for the missing ones.
    look: Duration,
}

impl Screens {
    pub(super) fn draw(&mut self, machine: &mut Machine, shown: &Guru, phase: bool, now: Duration) {
        if now >= self.look {
            self.look = now + POLL_INTERVAL;
            for (name, error) in Screen::open_missing(&machine.terminals, &mut self.open, now) {
                let text = format!("no screen on {name}: {error}");
                if self.output.insert(name) {
                    machine.port.log(Severity::Warning, &text);
                }
            }
        }
        // A terminal that is gone is dropped; the others remain, and it may come back.
        self.open.retain_mut(|screen| screen.draw(shown, phase, now).is_ok());
    }
}
