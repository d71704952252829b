//! The change of the network by an order of the cluster: tried, then confirmed or reverted. Pure.
//!
//! ```text
//!                    the machine cannot have it
//!          order +------------------------------------------------> [refused]
//! [any] ---------+--> [trying] --in force, then another machine --> [confirmed]
//!                        |       was reached over it
//!                        +-- TRIAL over, or started again ---------> [reverted]
//! ```
//!
//! The record is on the disk before an order is in force, so a machine that loses its power in
//! the trial starts with the network that was confirmed.
//!
//! Invariants:
//! - Only a network that was confirmed is in force after a start (`a_trial_ends_with_a_restart`).
//! - An order is tried once: its number is in the record from then on.
//! - Without a proof that is younger than the network, the former one is in force after
//!   [`TRIAL`] (`a_trial_without_a_proof_is_over_at_its_end`).
//!
//! What this module does not do: read the clock, write the record or links (`service`), or say
//! what a proof is (`agent` of the node).

use std::time::Duration;

use polis_proto::v1;
use polis_proto::v1::NetworkState as State;
use prost::Message as _;
use sha2::{Digest as _, Sha256};
use tokio::time::Instant;

use super::{Change, Order};
use crate::parameters::{self, Network};

/// How long an order has to be confirmed: some heartbeats, after a switch has let the first
/// packet through.
pub(super) const TRIAL: Duration = Duration::from_secs(45);

/// Characters of a cause that are kept.
const CAUSE_MAX: usize = 400;

/// The last order, the network that was confirmed, and that of the parameters.
#[derive(Debug, Default)]
pub(super) struct Changes {
    number: u64,
    state: State,
    cause: String,
    confirmed: Option<Network>,
    /// SHA-256 of the network of the parameters when that was confirmed; empty without any.
    confirmed_over: Vec<u8>,
    parameters: Option<Network>,
    /// The same of the parameters of this boot.
    own: Vec<u8>,
    trying: Option<Trying>,
}

#[derive(Debug)]
struct Trying {
    network: Option<Network>,
    until: Instant,
    /// Since when the kernel has all of it.
    since: Option<Instant>,
    /// Why it has not, as far as that is known.
    missing: String,
}

impl Changes {
    /// The network on the disk. A record that cannot be read is an error in words; without
    /// it, the network is that of the parameters.
    pub(super) fn read(bytes: &[u8]) -> Result<Self, String> {
        let record = v1::NetworkRecord::decode(bytes);
        let record = record.map_err(|error| format!("it is damaged: {error}"))?;
        let state = record.state();
        let confirmed = record.confirmed.map(|message| parameters::network(message, "confirmed"));
        let confirmed = confirmed.transpose().map_err(|error| error.to_string())?;
        let mut changes = Self {
            number: record.number,
            state,
            cause: record.cause,
            confirmed,
            confirmed_over: record.parameters,
            ..Self::default()
        };
        if state == State::Trying {
            changes.end(
                State::Reverted,
                "the machine or its network service started again before a curator answered",
            );
        }
        Ok(changes)
    }

    /// The network that the disk is to have.
    pub(super) fn record(&self) -> Vec<u8> {
        let record = v1::NetworkRecord {
            number: self.number,
            state: self.state.into(),
            cause: self.cause.clone(),
            confirmed: self.confirmed.as_ref().map(Network::message),
            parameters: self.confirmed_over.clone(),
        };
        record.encode_to_vec()
    }

    /// The parameters are known; `given` says whether there are any. Returns what an operator
    /// should know.
    pub(super) fn known(&mut self, parameters: Network, given: bool) -> Option<&'static str> {
        self.own = if given { digest(&parameters) } else { Default::default() };
        self.parameters = Some(parameters);
        let other = given && !self.confirmed_over.is_empty() && self.confirmed_over != self.own;
        if self.confirmed.is_none() || !other {
            return None;
        }
        self.confirmed = None;
        let why = "the node parameters have another network than before, which counts instead of \
                   the confirmed one";
        self.end(State::Reverted, why);
        Some(why)
    }

    /// The network in force; `None` until the parameters are known.
    pub(super) fn network(&self) -> Option<&Network> {
        let parameters = self.parameters.as_ref()?;
        let ordered = match &self.trying {
            Some(trying) => trying.network.as_ref(),
            None => self.confirmed.as_ref(),
        };
        Some(ordered.unwrap_or(parameters))
    }

    /// How it stands with the last order.
    pub(super) fn change(&self) -> Change {
        Change { number: self.number, state: self.state, cause: self.cause.clone() }
    }

    /// Whether the order is one that was not taken up yet, and can be.
    pub(super) fn is_new(&self, order: &Order) -> bool {
        self.parameters.is_some() && order.number != 0 && order.number != self.number
    }

    /// Takes up a new order. `fault` says why the machine cannot have its network.
    pub(super) fn take(&mut self, order: &Order, fault: Option<String>, now: Instant) {
        if !self.is_new(order) {
            return;
        }
        // Another order, before the last one was confirmed: the former network is the same.
        self.trying = None;
        self.number = order.number;
        if let Some(fault) = fault {
            return self.end(State::Refused, &fault);
        }
        let before = self.network().cloned();
        let until = now + TRIAL;
        let network = order.network.clone();
        self.trying = Some(Trying { network, until, since: None, missing: String::new() });
        if self.network() == before.as_ref() {
            return self.confirm();
        }
        self.state = State::Trying;
        self.cause.clear();
    }

    /// The record cannot be written, so an order must not be in force.
    pub(super) fn unwritten(&mut self, error: &str) {
        if self.trying.is_some() {
            self.end(State::Refused, &format!("it cannot be stored on the ESP: {error}"));
        }
    }

    /// Whether an order is tried.
    pub(super) fn is_trying(&self) -> bool {
        self.trying.is_some()
    }

    /// How far the kernel has the network that is tried: why not all of it.
    pub(super) fn applied(&mut self, missing: Option<String>, now: Instant) {
        let Some(trying) = &mut self.trying else { return };
        match missing {
            None => {
                trying.since.get_or_insert(now);
            }
            Some(missing) => {
                trying.since = None;
                trying.missing = missing;
            }
        }
    }

    /// Looks at the newest proof that another machine was reached: when that began.
    pub(super) fn review(&mut self, proof: Option<Instant>, now: Instant) {
        let Some(trying) = &self.trying else { return };
        if trying.since.is_some_and(|since| proof.is_some_and(|proof| proof >= since)) {
            return self.confirm();
        }
        if now < trying.until {
            return;
        }
        let seconds = TRIAL.as_secs();
        let cause = match trying.since {
            Some(_) => format!("no curator was reached over it within {seconds} s"),
            None => format!("it was not in force within {seconds} s: {}", trying.missing),
        };
        self.end(State::Reverted, &cause);
    }

    /// When [`Changes::review`] decides by itself.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.trying.as_ref().map(|trying| trying.until)
    }

    fn confirm(&mut self) {
        if let Some(trying) = self.trying.take() {
            self.confirmed = trying.network;
            self.confirmed_over = self.own.clone();
        }
        self.state = State::Confirmed;
        self.cause.clear();
    }

    fn end(&mut self, state: State, cause: &str) {
        self.trying = None;
        self.state = state;
        self.cause = cause.chars().take(CAUSE_MAX).collect();
    }
}

/// Tells the networks of parameters apart.
fn digest(network: &Network) -> Vec<u8> {
    Sha256::digest(network.message().encode_to_vec()).to_vec()
}

/// The word for a state, as lines and documents have it.
pub(super) fn word(state: State) -> &'static str {
    match state {
        State::Unspecified => "none",
        State::Trying => "trying",
        State::Confirmed => "confirmed",
        State::Reverted => "reverted",
        State::Refused => "refused",
    }
}

#[cfg(test)]
#[path = "change_tests.rs"]
mod tests;
