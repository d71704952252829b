//! The state of every service: an event value.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::Shared;
use polis_base::serial::EventLine;

/// Every service that was ever started, by dotted name.
pub type Tree = BTreeMap<Arc<str>, Entry>;

/// The state of one service, with its history.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Its state.
    pub state: State,
    /// How often it was started again.
    pub restarts: u32,
    /// Why it died last, if it ever did.
    pub cause: Option<String>,
    /// It died, and has not reported healthy since.
    pub down: bool,
    /// Since when it is in this state, in time since the kernel started.
    pub since: Duration,
}

/// The state of a service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// It runs and has not reported healthy.
    Starting,
    /// It has reported healthy.
    Healthy,
    /// It ended on purpose.
    Done,
    /// It died and will be started again.
    Dead,
    /// It died too often; its parent died with it.
    Failed,
    /// It was stopped, or ended with its parent or group.
    Stopped,
}

impl State {
    /// The word for it on the serial line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Healthy => "healthy",
            Self::Done => "done",
            Self::Dead => "dead",
            Self::Failed => "failed",
            Self::Stopped => "stopped",
        }
    }
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl Shared {
    /// Records that `name` is now in `state`; a death has a `cause`.
    ///
    /// Prints the event line of a death and of a recovery.
    pub(super) fn set_state(&self, name: &Arc<str>, state: State, cause: Option<&str>) {
        let mut line = None;
        self.tree.send_modify(|tree| {
            let since = polis_base::sys::clock::uptime();
            let known = tree.contains_key(name);
            let entry = tree.entry(Arc::clone(name)).or_insert(Entry {
                state,
                restarts: 0,
                cause: None,
                down: false,
                since,
            });
            if known && state == State::Starting {
                entry.restarts += 1;
            }
            entry.state = state;
            entry.since = since;
            if let Some(cause) = cause {
                entry.cause = Some(cause.to_owned());
                entry.down = true;
            }
            // A start after a stop on purpose recovers nothing, whatever ended a run long ago.
            let recovers = state == State::Healthy && entry.down;
            if recovers {
                entry.down = false;
            }
            if cause.is_some() || recovers {
                let cause = entry.cause.as_deref().unwrap_or_default();
                line = Some(
                    EventLine::new("service")
                        .field("name", name)
                        .field("state", state)
                        .field("restarts", entry.restarts)
                        .field("cause", cause),
                );
            }
        });
        if let Some(line) = line {
            self.lines.event(line);
        }
    }
}
