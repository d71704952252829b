//! The stages of a boot, and the states that each of them goes through.
//!
//! `init` walks through the first three and hands their times to `node`;
//! services of `node` report the rest to a board (`board` of the runtime). The
//! console and the serial line show the board.
//!
//! ```text
//! [pending] -> [started] <-> [waiting for ..] -> [done]
//!                  |               |
//!                  +---------------+-----------> [failed]
//! ```
//!
//! What this module does not do: choose the next stage. Services wait for the
//! event values that they need.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use crate::serial::EventLine;

/// A part of the boot, in the order in which they usually end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Stage {
    /// From power-on (or the jump into the kernel) to the first process.
    Kernel,
    /// Stage 1 of `init`: from the initramfs to the verified system.
    Initramfs,
    /// Stage 2 of `init`: mounts, consoles, modules, until `node` runs.
    System,
    /// The ephemeral tree and the data partition.
    Storage,
    /// An address.
    Network,
    /// The parameters of this machine.
    Parameters,
    /// The role of this machine in a cluster: bootstrap, register or join.
    Cluster,
    /// The etcd member.
    Consensus,
    /// The control plane.
    Curator,
    /// The services that the node's roles require.
    Roles,
}

impl Stage {
    /// All stages, in order.
    pub const ALL: [Self; 10] = [
        Self::Kernel,
        Self::Initramfs,
        Self::System,
        Self::Storage,
        Self::Network,
        Self::Parameters,
        Self::Cluster,
        Self::Consensus,
        Self::Curator,
        Self::Roles,
    ];

    /// The word on the serial line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Kernel => "kernel",
            Self::Initramfs => "initramfs",
            Self::System => "system",
            Self::Storage => "storage",
            Self::Network => "network",
            Self::Parameters => "parameters",
            Self::Cluster => "cluster",
            Self::Consensus => "consensus",
            Self::Curator => "curator",
            Self::Roles => "roles",
        }
    }

    /// The stage of that name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|stage| stage.name() == name)
    }

    /// The two digits `SS` of a guru code: 1 for the kernel and so on.
    #[must_use]
    pub fn number(self) -> u8 {
        self as u8 + 1
    }
}

impl fmt::Display for Stage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The state of a stage.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum State {
    /// At work.
    Started,
    /// Waits for an event: its name, and what to do about it.
    Waiting(String),
    /// Ended well.
    Done,
    /// Ended; the trapdoor has the details.
    Failed,
}

impl State {
    /// The word on the serial line.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Started => "started",
            Self::Waiting(_) => "waiting",
            Self::Done => "done",
            Self::Failed => "failed",
        }
    }
}

/// One stage on the board. Times are since the kernel started.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Its state.
    pub state: State,
    /// When it started.
    pub started: Duration,
    /// When its state changed last: since then it waits, or then it ended.
    pub changed: Duration,
}

/// Every stage that has started.
pub type Stages = BTreeMap<Stage, Entry>;

/// The stage that the boot is in: the last one reached in the usual order.
#[must_use]
pub fn current(stages: &Stages) -> Stage {
    let open = stages.iter().find(|(_, entry)| entry.state != State::Done);
    open.or_else(|| stages.last_key_value()).map_or(Stage::System, |(stage, _)| *stage)
}

/// The event line of a change, with a reason to wait that `init` does not have to cut.
#[must_use]
pub fn line(stage: Stage, state: &State, at: Duration) -> EventLine {
    let line = EventLine::new("stage").field("name", stage).field("state", state.name());
    match state {
        State::Waiting(what) => line.field("for", what),
        State::Started | State::Done | State::Failed => line,
    }
    .bounded()
    .at(at)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stage_that_waits_for_a_long_text_has_a_whole_line_with_its_time() {
        for letter in ["x", " ", "é", "\"", "\u{1}"] {
            let waiting = State::Waiting(letter.repeat(5000));
            let line = line(Stage::Consensus, &waiting, Duration::from_secs(1));
            let text = line.to_string();
            // `init` cuts a line of 2048 bytes.
            assert!(text.len() < 1024, "{} bytes", text.len());
            assert!(text.starts_with("POLIS stage name=consensus state=waiting for="), "{text}");
            assert!(text.ends_with(" t=1.000"), "{text}");
            assert_eq!(EventLine::parse(&text), Some(line));
        }
    }

    #[test]
    fn a_reason_to_wait_that_names_a_command_is_whole() {
        let command = "`polisctl node roles NODE --remove consensus-member` discards it";
        let waiting = State::Waiting(format!("{} \"{command}\"", "an owner: ".repeat(50)));
        let line = line(Stage::Cluster, &waiting, Duration::from_secs(1));
        assert!(line.get("for").is_some_and(|what| what.ends_with("discards it\"")), "{line}");
    }
}
