//! The cluster's configuration: changes the settings that hold for the whole cluster.
//!
//! Another firewall is tried first, since it may keep out its own operator:
//!
//! ```text
//!                    configure                          confirm, through the new one
//! [confirmed: old] -----------> [old, and new on trial] ----------------------------> [new]
//!        ^                                |
//!        +------- the time is over: every node returns by itself
//! ```

use std::time::{Duration, SystemTime};

use polis_proto::v1;
use tracing::{info, warn};

use super::error::Error;
use super::pod_network;
use super::snapshot_target;
use super::store::{CONFIGURATION, Outcome, Store};
use polis_machine::parameters;
use polis_wire::parameters::Firewall;
use polis_wire::pki;
use polis_wire::pod_network::{Networks, Prefix};

/// How long a firewall is tried: nodes apply it within seconds, and their operator then calls
/// each of them.
const TRIAL: Duration = Duration::from_secs(120);

impl<S: pki::Store + Clone> Store<S> {
    /// Changes the fields that `wish` names; fields that are unset there stay as they are,
    /// so that two operators who change different fields at once do not undo each other.
    /// The settings that a running cluster is built on stay. `credentials` are those of the
    /// target of snapshots, where they change.
    ///
    /// # Errors
    ///
    /// [`Error::Field`], [`Error::Fixed`].
    pub async fn configure(
        &self,
        desired: v1::ClusterConfiguration,
        credentials: Option<v1::SnapshotCredentials>,
        now: SystemTime,
    ) -> Result<v1::ClusterConfiguration, Error> {
        // The networks are compared with those that the cluster has, whatever they are.
        let to_check = v1::ClusterConfiguration {
            pod_network: String::new(),
            service_network: String::new(),
            ..desired.clone()
        };
        let checked = parameters::configuration(to_check, "configuration");
        let checked = checked.map_err(|error| Error::Field(error.to_string()))?;
        let known = self.stored_credentials().await?;
        let written = self.update(CONFIGURATION, |old: Option<v1::ClusterConfiguration>| {
            let old = old.unwrap_or_default();
            let domain = if old.cluster_domain.is_empty() {
                parameters::ClusterConfiguration::default().domain
            } else {
                old.cluster_domain.clone()
            };
            // The value is in names that workload was given, and in certificates.
            if !desired.cluster_domain.is_empty() && checked.domain != domain {
                return Err(Error::Fixed { field: "cluster_domain", value: domain });
            }
            same_networks(&desired, pod_network::networks(&old)?)?;
            let (snapshots, beside) = snapshot_target::change(
                old.snapshots.as_ref(),
                desired.snapshots.as_ref(),
                credentials.as_ref(),
            )?;
            let either = |desired: i32, old: i32| if desired == 0 { old } else { desired };
            let new = v1::ClusterConfiguration {
                cluster_domain: domain,
                tpm_mode: either(desired.tpm_mode, old.tpm_mode),
                storage_security_policy: either(
                    desired.storage_security_policy,
                    old.storage_security_policy,
                ),
                cold_start: either(desired.cold_start, old.cold_start),
                time: desired.time.clone().or_else(|| old.time.clone()),
                log: desired.log.clone().map(stored).or_else(|| old.log.clone()),
                snapshots,
                attestation: match &desired.attestation {
                    None => old.attestation.clone(),
                    // One that names nothing takes the former one away.
                    Some(policy) => Some(policy.clone()).filter(|it| *it != Default::default()),
                },
                kubernetes: desired.kubernetes.clone().or_else(|| old.kubernetes.clone()),
                proxy: match &desired.proxy {
                    None => old.proxy.clone(),
                    Some(proxy) => stored_proxy(proxy),
                },
                pod_network: old.pod_network.clone(),
                service_network: old.service_network.clone(),
                firewall: old.firewall.clone(),
                firewall_trial: match &checked.firewall {
                    None => old.firewall_trial.clone(),
                    Some(firewall) => Firewalls::of(&old).trial_of(firewall, now),
                },
            };
            if new == old && beside.iter().all(|write| Some(write) == known.as_ref()) {
                return Ok(Outcome::Keep(old));
            }
            info!("the cluster's configuration was changed");
            if new.attestation != old.attestation {
                let policy = new.attestation.clone().unwrap_or_default();
                let (systems, makers) = (policy.systems.len(), policy.makers.len());
                warn!(systems, makers, "the cluster has another attestation policy");
            }
            Ok(Outcome::Put(new, Vec::new(), beside))
        });
        written.await
    }

    /// Ends the trial of `firewall`: it stays. A configuration that was confirmed before is
    /// confirmed again.
    ///
    /// # Errors
    ///
    /// [`Error::Field`], [`Error::NoTrial`].
    pub async fn confirm_firewall(
        &self,
        firewall: v1::FirewallConfiguration,
        now: SystemTime,
    ) -> Result<v1::ClusterConfiguration, Error> {
        let firewall = parameters::firewall(firewall, "configuration");
        let firewall = firewall.map_err(|error| Error::Field(error.to_string()))?.to_message();
        let written = self.update(CONFIGURATION, |old: Option<v1::ClusterConfiguration>| {
            let old = old.unwrap_or_default();
            let known = Firewalls::of(&old);
            let tried = known.tried(now).and_then(|trial| trial.configuration.as_ref());
            if tried != Some(&firewall) {
                // The answer to the first request may have been lost.
                let again = tried.is_none() && known.confirmed == firewall;
                return if again { Ok(Outcome::Keep(old)) } else { Err(Error::NoTrial) };
            }
            warn!(
                sources = firewall.sources.join(", "),
                ports = firewall.ports.join(", "),
                "the cluster has another firewall"
            );
            let new = v1::ClusterConfiguration {
                firewall: Some(firewall.clone()),
                firewall_trial: None,
                ..old
            };
            Ok(Outcome::Put(new, Vec::new(), Vec::new()))
        });
        written.await
    }
}

/// Refuses other networks than those of the cluster, which are in rules and routes of every node,
/// in certificates and in Services.
fn same_networks(desired: &v1::ClusterConfiguration, known: Networks) -> Result<(), Error> {
    let fields = [
        ("pod_network", &desired.pod_network, known.pods),
        ("service_network", &desired.service_network, known.services),
    ];
    for (field, text, network) in fields {
        if !text.is_empty() && text.parse::<Prefix>() != Ok(network) {
            return Err(Error::Fixed { field, value: network.to_string() });
        }
    }
    Ok(())
}

/// The targets of logs without what only a watch has.
fn stored(log: v1::LogConfiguration) -> v1::LogConfiguration {
    v1::LogConfiguration { cluster_domain: String::new(), ..log }
}

/// The proxy without what only a watch has; `None` for one that is taken away.
fn stored_proxy(proxy: &v1::ProxyConfiguration) -> Option<v1::ProxyConfiguration> {
    let v1::ProxyConfiguration { url, direct, own: _ } = proxy;
    (!url.is_empty()).then(|| v1::ProxyConfiguration {
        url: url.clone(),
        direct: direct.clone(),
        own: Vec::new(),
    })
}

/// The proxy of a cluster as its nodes read it: with the parts of the cluster that are reached
/// without it.
#[must_use]
pub fn proxy(configuration: &v1::ClusterConfiguration) -> v1::ProxyConfiguration {
    let Some(proxy) = &configuration.proxy else { return v1::ProxyConfiguration::default() };
    // A damaged record names no networks: the default ones stand in for them.
    let Networks { pods, services } = pod_network::networks(configuration).unwrap_or_default();
    let domain = Some(configuration.cluster_domain.clone()).filter(|domain| !domain.is_empty());
    let own = domain.into_iter().chain([pods, services].map(|network| network.to_string()));
    v1::ProxyConfiguration { own: own.collect(), ..proxy.clone() }
}

/// The firewall of a cluster, and the one that is tried, as they are stored.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Firewalls {
    confirmed: v1::FirewallConfiguration,
    trial: Option<v1::FirewallTrial>,
}

impl Firewalls {
    pub(super) fn of(configuration: &v1::ClusterConfiguration) -> Self {
        Self {
            confirmed: configuration.firewall.clone().unwrap_or_default(),
            trial: configuration.firewall_trial.clone(),
        }
    }

    /// The trial that goes on at `now`. A clock that was set far back begins none again.
    fn tried(&self, now: SystemTime) -> Option<&v1::FirewallTrial> {
        let left = |trial: &v1::FirewallTrial| trial.until.saturating_sub(seconds(now));
        let longest = i64::try_from(TRIAL.as_secs()).unwrap_or(i64::MAX);
        self.trial.as_ref().filter(|trial| (1..=longest).contains(&left(trial)))
    }

    /// The trial of `desired`. One that goes on is not begun again, and a confirmed
    /// configuration needs no trial.
    fn trial_of(&self, desired: &Firewall, now: SystemTime) -> Option<v1::FirewallTrial> {
        let desired = Some(desired.to_message()).filter(|it| *it != self.confirmed)?;
        let goes_on =
            self.tried(now).filter(|trial| trial.configuration.as_ref() == Some(&desired));
        let until = goes_on.map_or_else(|| seconds(now + TRIAL), |trial| trial.until);
        Some(v1::FirewallTrial { configuration: Some(desired), until })
    }

    /// The order to the nodes at `now`.
    pub(super) fn order(&self, now: SystemTime) -> v1::FirewallOrder {
        let trial = self.tried(now);
        let left = trial.map_or(0, |trial| trial.until.saturating_sub(seconds(now)));
        let left = u64::try_from(left).unwrap_or_default().saturating_mul(1000);
        v1::FirewallOrder {
            confirmed: Some(self.confirmed.clone()),
            tried: trial.and_then(|trial| trial.configuration.clone()),
            tried_for_ms: u32::try_from(left).unwrap_or_default(),
        }
    }
}

/// The configuration as it is at `now`: a trial that is over is not in it.
pub(super) fn at(
    mut configuration: v1::ClusterConfiguration,
    now: SystemTime,
) -> v1::ClusterConfiguration {
    if Firewalls::of(&configuration).tried(now).is_none() {
        configuration.firewall_trial = None;
    }
    configuration
}

/// Seconds since 1970.
pub(super) fn seconds(time: SystemTime) -> i64 {
    let since = time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_secs()).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn later(seconds: u64) -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_secs(1_000 + seconds)
    }

    #[test]
    fn nodes_are_told_how_long_a_trial_goes_on() {
        let tried =
            v1::FirewallConfiguration { sources: vec!["192.0.2.1/32".to_owned()], ports: vec![] };
        let trial = v1::FirewallTrial { configuration: Some(tried.clone()), until: 1_120 };
        let known = Firewalls { confirmed: Default::default(), trial: Some(trial) };
        let order = known.order(later(20));
        assert_eq!((order.tried, order.tried_for_ms), (Some(tried), 100_000));
        // The clock of a leader that was set back.
        assert_eq!(known.order(later(0) - Duration::from_secs(500)).tried, None);
        let over = known.order(later(120));
        assert_eq!((over.tried, over.tried_for_ms), (None, 0));
        assert!(over.confirmed.is_some());
    }
}
