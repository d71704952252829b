//! The clock of this node: chronyd, supervised, with what the node knows of sources of time.
//!
//! ```text
//! parameters, DHCP --> network::Status --+
//! the cluster's configuration -----------+--> Plan --> chrony.conf --> chronyd --> kernel's clock
//! the voters, the members ---------------+     (pure)                     |
//! os-release --> floor --> [Floor]                     tracking ----------+--> Status, Ahead,
//! the data partition --> kept --> the same                                     POLIS time
//!                                              a time that was confirmed --> kept
//! ```
//!
//! The voters serve time to the members, and ask each other, so that a cluster without a
//! server outside agrees on one time. Where the node knows no source, no chronyd runs.
//!
//! ```text
//! [unset] --clock before the image's date--> [floor]
//!    |                                          |
//!    +-- a reference of stratum 10 or more -----+--> [cluster] <--+
//!    +-- a reference of a lower stratum --------+--> [synced] <---+-- each other
//!                                                       |         |
//!                              no reference, or a stale one --> [lost]
//! ```
//!
//! Invariants:
//! - Nothing waits for this service: a boot without any source of time is a boot as any other.
//! - No server is asked that the operator, the operator's network or the cluster did not name.
//! - A voter lends its own clock to the cluster only after it has asked the other voters for
//!   theirs: one whose battery is empty must not draw the cluster to the date of its image.
//!
//! What this module does not do: keep time between two measurements, or choose among servers;
//! chronyd does. It authenticates no answer of a voter (`docs/time.md`).

mod floor;
mod kept;
mod plan;
mod service;
mod tracking;

use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;

use polis_base::serial::EventLine;
use polis_proto::v1;

pub use self::floor::raise;
pub use self::plan::{Asked, Known, PORT, Plan};
pub use self::service::{Config, Error, Inputs, Service};

/// The standing of the clock.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum State {
    /// It runs as the machine had it, and was compared with nothing.
    #[default]
    Unset,
    /// It was before the date of the image, was set to that or to the last known time, and was
    /// compared with nothing.
    Floor,
    /// It follows the time that the voters of the cluster agree on.
    Cluster,
    /// It follows a server outside of the cluster, by way of a voter or not.
    Synced,
    /// It followed one of both, and neither has answered for too long.
    Lost,
}

impl State {
    /// Every state, in the order of the picture.
    pub const ALL: [Self; 5] = [Self::Unset, Self::Floor, Self::Cluster, Self::Synced, Self::Lost];

    /// The word for it on the serial line and in metrics.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Unset => "unset",
            Self::Floor => "floor",
            Self::Cluster => "cluster",
            Self::Synced => "synced",
            Self::Lost => "lost",
        }
    }
}

/// The source of the clock.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Source {
    /// Nothing.
    #[default]
    None,
    /// The date of the image.
    Image,
    /// The last known time, which the data partition has.
    Kept,
    /// This voter's own clock, which the other members follow.
    Own,
    /// The server or voter with this address.
    Address(IpAddr),
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => f.write_str("none"),
            Self::Image => f.write_str("image"),
            Self::Kept => f.write_str("kept"),
            Self::Own => f.write_str("own"),
            Self::Address(address) => address.fmt(f),
        }
    }
}

/// The published status of the clock.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Status {
    /// Its standing.
    pub state: State,
    /// Its source.
    pub source: Source,
    /// The lead over its source, in microseconds; `None` without a measurement.
    pub offset: Option<i64>,
    /// How far from the time of the first server of the chain it may be, in microseconds.
    pub error: Option<u64>,
}

impl Status {
    /// The status of a clock that stands at the date of the image.
    fn at_floor() -> Self {
        Self { state: State::Floor, source: Source::Image, ..Self::default() }
    }

    /// The status once no source answers.
    #[must_use]
    fn without_source(self) -> Self {
        match self.state {
            State::Unset | State::Floor => self,
            State::Cluster | State::Synced | State::Lost => {
                Self { state: State::Lost, source: Source::None, offset: None, error: None }
            }
        }
    }

    /// The status as a heartbeat carries it.
    #[must_use]
    pub fn figures(&self) -> v1::ClockFigures {
        let state = match self.state {
            State::Unset => v1::ClockState::Unset,
            State::Floor => v1::ClockState::Floor,
            State::Cluster => v1::ClockState::Cluster,
            State::Synced => v1::ClockState::Synced,
            State::Lost => v1::ClockState::Lost,
        };
        v1::ClockFigures { state: state.into(), offset_us: self.offset }
    }

    /// Whether the event line of `self` says something that `before` did not: the offset alone
    /// changes at each measurement.
    fn is_news(&self, before: &Self) -> bool {
        (self.state, self.source) != (before.state, before.source)
    }

    /// The event line.
    fn line(&self) -> EventLine {
        let offset = match self.offset {
            Some(micros) => format!("{:+.6}", seconds(micros)),
            None => "unknown".to_owned(),
        };
        EventLine::new("time")
            .field("state", self.state.name())
            .field("source", self.source)
            .field("offset", offset)
    }
}

/// The lead of this clock over each server and voter that answers, in microseconds.
pub type Ahead = BTreeMap<IpAddr, i64>;

/// Microseconds as seconds, for display.
#[must_use]
#[expect(clippy::cast_precision_loss, reason = "exact for 285 years")]
pub fn seconds(micros: i64) -> f64 {
    micros as f64 / 1e6
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_names_state_source_and_offset() {
        assert_eq!(
            Status::at_floor().line().to_string(),
            "POLIS time state=floor source=image offset=unknown"
        );
        let source = Source::Address("10.0.2.16".parse().unwrap());
        let status = Status { state: State::Synced, source, offset: Some(-1_500), error: None };
        assert_eq!(
            status.line().to_string(),
            "POLIS time state=synced source=10.0.2.16 offset=-0.001500"
        );
    }

    #[test]
    fn only_a_clock_that_followed_something_can_lose_it() {
        let at = |state| Status { state, ..Status::default() }.without_source().state;
        assert_eq!(
            State::ALL.map(at),
            [State::Unset, State::Floor, State::Lost, State::Lost, State::Lost]
        );
    }

    #[test]
    fn a_measurement_alone_is_no_news() {
        let before = Status { state: State::Synced, offset: Some(1), ..Status::default() };
        assert!(!Status { offset: Some(2), ..before }.is_news(&before));
        assert!(Status { state: State::Lost, ..before }.is_news(&before));
        assert!(Status { source: Source::Own, ..before }.is_news(&before));
    }
}
