//! The firewall of the node: it drops every packet that no role of the node expects from its
//! sender.
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
//! The ports of the control plane have TLS and ask for certificates, so the firewall is a second
//! wall: code that reads bytes before it knows their sender is open to few addresses.
//!
//! Invariants:
//! - No configuration keeps a node or its owner from the curator
//!   (`no_configuration_keeps_a_node_or_its_owner_from_the_curator`).
//! - No process and no pod reaches the metadata service of a cloud, unless the node asks it for its
//!   parameters (`no_process_reaches_a_metadata_service_unless_the_node_asks_it`).
//! - A node passes on packets of pods, packets to pods, and what a Service translates. It does not
//!   route between its networks
//!   (`a_node_passes_on_what_is_of_pods_or_translated_and_nothing_else`).
//! - A configuration that is only tried ends by itself, without a leader, too ([`Order::at`]).
//!
//! What this module does not do: filter packets of pods to pods (`policy`), or decide which
//! configuration the cluster has (`curator`).

mod counters;
#[cfg(test)]
mod kernel_tests;
mod rules;
mod service;
mod text;

use tokio::time::Instant;

use polis_wire::parameters::Firewall;

pub use self::counters::Counted;
pub use self::rules::{Callers, Rule};
pub use self::service::{Config, Inputs, Service, State, Status};

/// The order of the cluster.
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
