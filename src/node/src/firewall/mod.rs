//! The firewall of the node: what is not for this node's roles, from callers that these ports
//! are for, is dropped.
//!
//! ```text
//! roles, member of etcd --+
//! members, addresses -----+--> rules --> text --> nft --> kernel
//! cluster's configuration-+      |                          |
//!                                +--> Status, counters <----+
//! ```
//!
//! ```text
//! rules     what is known -> rules            pure
//! text      rules -> the input of nft         pure
//! counters  the output of nft -> counters     pure
//! service   when
//! ```
//!
//! Every port has TLS and asks for certificates, so the firewall is a second wall: code that reads
//! bytes before it knows who sends them is not reached by everyone.
//!
//! Invariants:
//! - No change of the rules cuts a node off from the others: they are callers in every
//!   configuration (`members_reach_what_they_need_whatever_the_configuration_says`).
//! - A configuration that is only tried ends by itself, without a leader, too ([`Order::at`]).
//!
//! What this module does not do: filter packets of pods to pods (`policy`), or decide which
//! configuration the cluster has (`curator`).

mod counters;
mod rules;
mod service;
mod text;

use tokio::time::Instant;

use polis_wire::parameters::Firewall;

pub use self::counters::Counted;
pub use self::rules::{Callers, Rule};
pub use self::service::{Config, Inputs, Service, State, Status};

/// What the cluster orders.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Order {
    /// The configuration that is not in question.
    pub confirmed: Firewall,
    /// The one that is tried, and until when.
    pub tried: Option<(Firewall, Instant)>,
}

impl Order {
    /// The configuration that holds at `now`, and how long without another order.
    pub fn at(&self, now: Instant) -> (&Firewall, Option<Instant>) {
        match &self.tried {
            Some((tried, until)) if now < *until => (tried, Some(*until)),
            Some(_) | None => (&self.confirmed, None),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_trial_ends_by_itself() {
        let source = "192.0.2.0/24".parse().unwrap();
        let tried = Firewall { sources: vec![source], ..Firewall::default() };
        let now = Instant::now();
        let until = now + Duration::from_secs(9);
        let order = Order { tried: Some((tried.clone(), until)), ..Order::default() };
        assert_eq!(order.at(now), (&tried, Some(until)));
        assert_eq!(order.at(until), (&Firewall::default(), None));
    }
}
