//! The supervision tree.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::time;

/// A service of the supervision tree.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Service {
    /// How deep it stands in the tree; the root is 0.
    pub depth: u16,
    /// The last part of its dotted name.
    pub name: String,
    /// Its activity.
    pub state: ServiceState,
    /// How often it was restarted.
    pub restarts: u64,
    /// Why it died last.
    pub cause: Option<String>,
    /// How long it has been in this state.
    #[serde(with = "time")]
    pub since: Duration,
}

/// The activity of a service.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ServiceState {
    /// Runs, and has not reported itself healthy.
    #[default]
    Starting,
    /// Runs and serves.
    Healthy,
    /// Ended on purpose.
    Done,
    /// Died, and waits to be started again.
    Restarting,
    /// Died, and stays so.
    Dead,
}
