//! The difference between the settings of a cluster and those of a file: what changes, and which
//! messages carry it.
//!
//! [`SETTINGS`] has a row for each field of the configuration of a cluster; a test compares it with
//! the message.
//!
//! What this module does not do: send the messages (`settings`).

use std::time::SystemTime;

use polis_proto::v1;
use polis_wire::identity::Fingerprint;
use polis_wire::parameters;
use polis_wire::registry::Registry as Checked;
use serde::Serialize;
use serde_json::Value;
use x509_parser::pem::Pem;

use super::file::{Registry, Settings};
use crate::error::{Error, Explain as _};
use crate::text::clean;

/// A setting in the configuration of a cluster.
struct Setting {
    /// Its name in the file.
    name: &'static str,
    /// Why it cannot change; `None`: it can.
    fixed: Option<&'static str>,
    /// Copies its field from one message to another. More than one setting may be in a field.
    take: fn(&v1::ClusterConfiguration, &mut v1::ClusterConfiguration),
}

const fn setting(
    name: &'static str,
    take: fn(&v1::ClusterConfiguration, &mut v1::ClusterConfiguration),
) -> Setting {
    Setting { name, fixed: None, take }
}

/// Every setting but the registries, which have a record of their own.
const SETTINGS: [Setting; 15] = [
    Setting {
        name: "cluster_domain",
        fixed: Some("names and certificates of the cluster have it"),
        take: |from, to| to.cluster_domain.clone_from(&from.cluster_domain),
    },
    Setting {
        name: "pod_network",
        fixed: Some("rules and routes of every node have it"),
        take: |from, to| to.pod_network.clone_from(&from.pod_network),
    },
    Setting {
        name: "service_network",
        fixed: Some("Services, certificates and routes have it"),
        take: |from, to| to.service_network.clone_from(&from.service_network),
    },
    setting("tpm_mode", |from, to| to.tpm_mode = from.tpm_mode),
    setting("storage_security_policy", |from, to| {
        to.storage_security_policy = from.storage_security_policy;
    }),
    setting("cold_start", |from, to| to.cold_start = from.cold_start),
    setting("time_servers", |from, to| to.time.clone_from(&from.time)),
    setting("log_targets", |from, to| to.log.clone_from(&from.log)),
    setting("kubernetes_names", |from, to| to.kubernetes.clone_from(&from.kubernetes)),
    setting("snapshot_target", |from, to| to.snapshots.clone_from(&from.snapshots)),
    setting("attestation_policy", |from, to| to.attestation.clone_from(&from.attestation)),
    setting("proxy", |from, to| to.proxy.clone_from(&from.proxy)),
    setting("no_proxy", |from, to| to.proxy.clone_from(&from.proxy)),
    setting("firewall_sources", |from, to| to.firewall.clone_from(&from.firewall)),
    setting("firewall_ports", |from, to| to.firewall.clone_from(&from.firewall)),
];

/// A setting with its value in the cluster and the one in the file; `null`: none.
#[derive(Debug, PartialEq, Serialize)]
pub(super) struct Change {
    setting: String,
    old: Value,
    new: Value,
}

impl Change {
    /// In one line, for people.
    pub(super) fn line(&self) -> String {
        format!("{}: {} -> {}", clean(&self.setting), shown(&self.old), shown(&self.new))
    }
}

/// What changes, and the messages for it. Empty: the cluster has the settings of the file.
#[derive(Default)]
pub(super) struct Difference {
    pub(super) changes: Vec<Change>,
    /// The fields of the configuration that change.
    pub(super) configuration: v1::ClusterConfiguration,
    /// The registries that get another entry.
    pub(super) set: Vec<v1::Registry>,
    /// The hosts of the registries that lose theirs.
    pub(super) deleted: Vec<String>,
}

impl Difference {
    /// Compares a file with the configuration and the registries of a cluster. An authority of a
    /// registry that changes must not have ended at `now`.
    pub(super) fn of(
        file: &Settings,
        configuration: &v1::ClusterConfiguration,
        registries: &[v1::Registry],
        now: SystemTime,
    ) -> Result<Self, Error> {
        let known = Settings::of(configuration, registries);
        let known = known.doing(|| "the settings of the cluster cannot be read".to_owned())?;
        let after = file.over(configuration)?;
        let named: Option<Vec<_>> =
            file.registries().map(|all| all.iter().map(Registry::message).collect());
        let wished = Settings::of(&after, named.as_deref().unwrap_or(registries))?;
        key_is_known(configuration, &after)?;
        let mut difference = Self::default();
        difference.compare(&known, &wished, &after)?;
        let (known, wished) = (known.registries(), wished.registries());
        let (known, wished) = (known.unwrap_or_default(), wished.unwrap_or_default());
        difference.compare_registries(known, wished, now)?;
        Ok(difference)
    }

    fn compare(
        &mut self,
        known: &Settings,
        wished: &Settings,
        after: &v1::ClusterConfiguration,
    ) -> Result<(), Error> {
        let (known, wished) = (serde_json::to_value(known)?, serde_json::to_value(wished)?);
        for Setting { name, fixed, take } in &SETTINGS {
            let value = |all: &Value| all.get(name).cloned().unwrap_or_default();
            let (old, new) = (value(&known), value(&wished));
            if old == new {
                continue;
            }
            if let Some(why) = fixed {
                let (old, new) = (shown(&old), shown(&new));
                let help = format!(
                    "leave {name} out, or name {old}: it was chosen when the cluster was founded \
                     and cannot change, since {why}"
                );
                let refused = format!("{name} is {new}; allowed is {old}");
                return Err(Error::new(refused).or_help(help));
            }
            take(after, &mut self.configuration);
            self.changes.push(Change { setting: (*name).to_owned(), old, new });
        }
        Ok(())
    }

    fn compare_registries(
        &mut self,
        known: &[Registry],
        wished: &[Registry],
        now: SystemTime,
    ) -> Result<(), Error> {
        let find = |all: &[Registry], host: &str| all.iter().find(|it| it.host == host).cloned();
        for registry in wished {
            let old = find(known, &registry.host);
            if old.as_ref() == Some(registry) {
                continue;
            }
            let host = &registry.host;
            if !registry.username.is_empty() {
                let refused = format!(
                    "the registry {host} differs and has a user, whose password is not in a file \
                     of settings"
                );
                let help = format!(
                    "set this registry with its password first: `polisctl cluster registry set \
                     {host}` with --username and --password-file"
                );
                return Err(Error::new(refused).or_help(help));
            }
            let checked = Checked::read_at(&registry.message(), now);
            checked.doing(|| format!("the registry {host:?} cannot be set"))?;
            self.change(host, old.as_ref(), Some(registry))?;
            self.set.push(registry.message());
        }
        for registry in known {
            if find(wished, &registry.host).is_none() {
                self.change(&registry.host, Some(registry), None)?;
                self.deleted.push(registry.host.clone());
            }
        }
        Ok(())
    }

    fn change(
        &mut self,
        host: &str,
        old: Option<&Registry>,
        new: Option<&Registry>,
    ) -> Result<(), Error> {
        let (old, new) = (serde_json::to_value(old)?, serde_json::to_value(new)?);
        self.changes.push(Change { setting: format!("registries[{host}]"), old, new });
        Ok(())
    }
}

/// Refuses a target of snapshots in a bucket whose key the cluster does not have: the leader
/// refuses it too, but a dry run does not ask it.
fn key_is_known(
    present: &v1::ClusterConfiguration,
    after: &v1::ClusterConfiguration,
) -> Result<(), Error> {
    let bucket = |configuration: &v1::ClusterConfiguration| {
        let target = configuration.snapshots.clone().unwrap_or_default();
        parameters::snapshot_target(&target, "snapshot_target")
    };
    let (old, new) = (bucket(present)?, bucket(after)?);
    let Some(new) = new else { return Ok(()) };
    if old.is_some_and(|old| old.has_the_key_of(&new)) {
        return Ok(());
    }
    let refused = "snapshot_target is in another bucket, whose key is not in a file of settings";
    Err(Error::new(refused).or_help(
        "set the target and its key first: `polisctl cluster configure --snapshot-credentials \
         FILE` with --snapshot-target",
    ))
}

/// A value in one line, for people. A certificate is its subject and the words of its fingerprint.
fn shown(value: &Value) -> String {
    match value {
        Value::Null => "none".to_owned(),
        Value::Array(all) if all.is_empty() => "none".to_owned(),
        Value::Array(all) => all.iter().map(shown).collect::<Vec<_>>().join(", "),
        Value::Object(fields) => {
            let fields = fields.iter().map(|(name, value)| format!("{name} {}", shown(value)));
            format!("({})", fields.collect::<Vec<_>>().join(", "))
        }
        Value::String(text) => match certificates(text) {
            found if found.is_empty() => clean(text),
            found => found.join(" and "),
        },
        Value::Bool(_) | Value::Number(_) => value.to_string(),
    }
}

/// The certificates in a text of PEM.
fn certificates(text: &str) -> Vec<String> {
    let found = Pem::iter_from_buffer(text.as_bytes()).filter_map(Result::ok).map(|pem| {
        let words = Fingerprint::of_certificate(&pem.contents).words();
        let subject = pem.parse_x509().map(|read| read.subject().to_string());
        clean(&format!("certificate {words} of {}", subject.unwrap_or_default()))
    });
    found.collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use prost::Message as _;

    use super::*;

    /// A configuration with a value in every field that an operator sets. It names all of them, so
    /// that a new field does not compile without one.
    fn full() -> v1::ClusterConfiguration {
        v1::ClusterConfiguration {
            cluster_domain: "a".to_owned(),
            tpm_mode: 1,
            storage_security_policy: 1,
            cold_start: 1,
            time: Some(v1::TimeConfiguration::default()),
            firewall: Some(v1::FirewallConfiguration::default()),
            // The cluster alone sets it.
            firewall_trial: None,
            log: Some(v1::LogConfiguration::default()),
            snapshots: Some(v1::SnapshotConfiguration::default()),
            attestation: Some(v1::AttestationPolicy::default()),
            kubernetes: Some(v1::KubernetesConfiguration::default()),
            proxy: Some(v1::ProxyConfiguration::default()),
            pod_network: "b".to_owned(),
            service_network: "c".to_owned(),
        }
    }

    #[test]
    fn every_field_of_the_configuration_is_in_the_table_and_every_setting_in_the_file() {
        let (mut all, mut parts) = (v1::ClusterConfiguration::default(), BTreeSet::new());
        for Setting { name, take, .. } in &SETTINGS {
            let mut alone = v1::ClusterConfiguration::default();
            take(&full(), &mut alone);
            assert_ne!(alone, v1::ClusterConfiguration::default(), "{name} takes nothing");
            parts.insert(alone.encode_to_vec());
            take(&full(), &mut all);
        }
        assert_eq!(all, full(), "`cluster export` leaves fields out");
        let length: usize = parts.iter().map(Vec::len).sum();
        assert_eq!(length, full().encoded_len(), "a setting takes more than one field");
        let exported = Settings::of(&v1::ClusterConfiguration::default(), &[]).unwrap();
        let exported = serde_json::to_value(exported).unwrap();
        let exported: BTreeSet<_> = exported.as_object().unwrap().keys().cloned().collect();
        let names = SETTINGS.iter().map(|it| it.name).chain(["format", "registries"]);
        let names: BTreeSet<_> = names.map(str::to_owned).collect();
        assert_eq!(exported, names);
    }

    #[test]
    fn a_value_is_one_line() {
        let value = serde_json::json!({ "ca": "a\nb", "url": ["x", "y"], "none": [] });
        assert_eq!(shown(&value), "(ca a b, none none, url x, y)");
    }
}
