//! Says what this machine is to its cluster: one word, and what leads to it. Pure.
//!
//! ```text
//!             Entered
//! [unknown] -----------> [home]
//! ```
//!
//! The contract has six words. The other four belong to registration and to the
//! end of a membership: no event of this version leads to them.

#![warn(clippy::wildcard_enum_match_arm)]

use std::fmt;

/// What this machine is to its cluster.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum State {
    /// Not yet determined; only at boot.
    #[default]
    Unknown,
    /// Registering; contact was made, not yet let in.
    Foreign,
    /// Approved; committing.
    Trusted,
    /// A member; most of a node's life.
    Home,
    /// Removed; will never be a member again.
    Disowning,
    /// Would be home, but is cut off from consensus.
    Split,
}

impl State {
    /// The word on the serial line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Unknown => "unknown",
            Self::Foreign => "foreign",
            Self::Trusted => "trusted",
            Self::Home => "home",
            Self::Disowning => "disowning",
            Self::Split => "split",
        }
    }

    /// The state after `event`; `None` if that cannot happen here.
    #[must_use]
    pub fn after(self, event: Event) -> Option<Self> {
        match (self, event) {
            (Self::Unknown, Event::Entered) => Some(Self::Home),
            (
                Self::Foreign | Self::Trusted | Self::Home | Self::Disowning | Self::Split,
                Event::Entered,
            ) => None,
        }
    }
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// All that makes a member is in the cluster's store and on this disk.
    Entered,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_is_unknown_until_it_has_entered_and_enters_once() {
        let home = State::default().after(Event::Entered);
        assert_eq!(home, Some(State::Home));
        assert_eq!(State::Home.after(Event::Entered), None);
        assert_eq!(State::Home.to_string(), "home");
    }
}
