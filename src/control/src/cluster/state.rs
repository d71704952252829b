//! The state of this machine in its cluster, and its transitions. Pure.
//!
//! ```text
//!                      Entered                               CutOff
//! [unknown] ------------------------------------> [home] --------------> [split]
//!     |  Contacted              Approved            ^ ^    Reconnected      |
//!     +-----------> [foreign] -----------> [trusted]+ +---------------------+
//!                       ^    Contacted         |
//!                       +-- forgotten again ---+
//! ```
//!
//! A machine that is, or was, a member may also learn that it was removed: `disowning`,
//! which has no way out.

#![warn(clippy::wildcard_enum_match_arm)]

use std::fmt;

/// The state of this machine in its cluster.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum State {
    /// Not yet determined; only at boot.
    #[default]
    Unknown,
    /// Registering; contact was made, not yet approved.
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

    /// The state after `event`; `None` if the event cannot happen here.
    #[must_use]
    pub fn after(self, event: Event) -> Option<Self> {
        match (self, event) {
            (Self::Unknown | Self::Trusted, Event::Entered)
            | (Self::Home | Self::Split, Event::Reconnected) => Some(Self::Home),
            (Self::Unknown | Self::Trusted, Event::Contacted) => Some(Self::Foreign),
            (Self::Unknown | Self::Foreign, Event::Approved) => Some(Self::Trusted),
            (Self::Home | Self::Split, Event::CutOff) => Some(Self::Split),
            (Self::Unknown | Self::Home | Self::Split, Event::Removed) => Some(Self::Disowning),
            (Self::Foreign | Self::Home | Self::Disowning | Self::Split, Event::Entered)
            | (Self::Foreign | Self::Home | Self::Disowning | Self::Split, Event::Contacted)
            | (Self::Trusted | Self::Home | Self::Disowning | Self::Split, Event::Approved)
            | (Self::Foreign | Self::Trusted | Self::Disowning, Event::Removed)
            | (
                Self::Unknown | Self::Foreign | Self::Trusted | Self::Disowning,
                Event::CutOff | Event::Reconnected,
            ) => None,
        }
    }
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// An event of the life of a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// A curator knows this machine now, and no operator has approved it.
    Contacted,
    /// An operator has approved it.
    Approved,
    /// Every record of a member is in the cluster's store and on this disk.
    Entered,
    /// The node had no contact with its cluster for long, or the own etcd member is alone.
    CutOff,
    /// The node is in contact with its cluster, and the own etcd member is not alone.
    Reconnected,
    /// The cluster has answered that it removed the node for good.
    Removed,
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

    #[test]
    fn a_machine_that_registers_is_foreign_then_trusted_then_home() {
        let foreign = State::default().after(Event::Contacted).unwrap();
        assert_eq!(foreign, State::Foreign);
        assert_eq!(foreign.after(Event::Contacted), None, "once");
        let trusted = foreign.after(Event::Approved).unwrap();
        assert_eq!(trusted.after(Event::Entered), Some(State::Home));
        assert_eq!(trusted.after(Event::Contacted), Some(foreign), "deleted before it entered");
        assert_eq!(foreign.after(Event::Entered), None, "no node commits unapproved");
    }

    #[test]
    fn a_removed_node_is_never_a_member_again() {
        assert_eq!(State::Split.after(Event::Removed), Some(State::Disowning));
        let events =
            [Event::Contacted, Event::Approved, Event::Entered, Event::CutOff, Event::Reconnected];
        for event in events {
            assert_eq!(State::Disowning.after(event), None, "{event:?}");
        }
        for state in [State::Foreign, State::Trusted] {
            assert_eq!(state.after(Event::Removed), None, "{state} was not reached yet");
        }
    }

    #[test]
    fn only_a_member_can_be_cut_off_and_it_heals() {
        assert_eq!(State::Home.after(Event::CutOff), Some(State::Split));
        assert_eq!(State::Split.after(Event::CutOff), Some(State::Split));
        assert_eq!(State::Split.after(Event::Reconnected), Some(State::Home));
        for state in [State::Unknown, State::Foreign, State::Trusted, State::Disowning] {
            assert_eq!(state.after(Event::CutOff), None);
            assert_eq!(state.after(Event::Reconnected), None);
        }
    }
}
