//! The boot: its stages, and the conditions that they wait for.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::time;

/// A stage of the boot.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Stage {
    /// Its word on the serial line.
    pub name: String,
    /// Its activity.
    pub state: StageState,
    /// When it started, after the kernel did; zero while it is pending.
    #[serde(with = "time")]
    pub started: Duration,
    /// How long it took, or how long it has been at it.
    #[serde(with = "time")]
    pub elapsed: Duration,
}

/// The activity of a stage.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StageState {
    /// To come.
    #[default]
    Pending,
    /// At work.
    Started,
    /// Cannot go on before something happens.
    Waiting {
        /// The condition, and what a person can do about it.
        what: String,
        /// For how long already.
        #[serde(with = "time")]
        since: Duration,
    },
    /// Ended well.
    Done,
    /// Ended badly.
    Failed,
}
