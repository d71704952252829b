//! The board of boot stages: where services report the stage that they work on.
//!
//! A change is an event value for the console and a line on the serial port.

use polis_base::stage::{Entry, Stage, Stages, State, line};
use tokio::sync::watch;

use crate::lines::Lines;

/// The board where services report the stage that they work on. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Board {
    stages: watch::Sender<Stages>,
    lines: Lines,
}

impl Board {
    /// A board that already shows the stages of `init`.
    #[must_use]
    pub fn new(before: Stages, lines: Lines) -> Self {
        Self { stages: watch::Sender::new(before), lines }
    }

    /// Records that `stage` is now in `state`, and prints a line when that is new.
    pub fn set(&self, stage: Stage, state: State) {
        let now = polis_base::sys::clock::uptime();
        let changed = self.stages.send_if_modified(|stages| match stages.get_mut(&stage) {
            Some(entry) if entry.state == state => false,
            Some(entry) => {
                entry.state = state.clone();
                entry.changed = now;
                true
            }
            None => {
                let entry = Entry { state: state.clone(), started: now, changed: now };
                stages.insert(stage, entry);
                true
            }
        });
        if changed {
            self.lines.put(line(stage, &state, now).to_string());
        }
    }

    /// The board as an event value.
    #[must_use]
    pub fn watch(&self) -> watch::Receiver<Stages> {
        self.stages.subscribe()
    }
}
