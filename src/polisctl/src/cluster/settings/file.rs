//! The file of settings of a cluster: its fields, and the way between them and the messages.
//!
//! ```text
//! YAML or JSON --read--> Settings --over--> the configuration after it --of--> Settings
//! ```
//!
//! Invariants:
//! - An unknown field is refused, so a misspelt setting is not lost.
//! - No secret is written or read: [`Secret`] stands in its place.
//! - [`Settings::of`] has one spelling for each value, except in `no_proxy`, which the cluster
//!   keeps as it was given.
//!
//! What this module does not do: compare two files (`difference`), or call a cluster.

use polis_base::hex;
use polis_proto::v1;
use polis_wire::parameters::{self, AttestationPolicy, FieldError};
use polis_wire::pki;
use polis_wire::registry::{Authority, REGISTRIES_MAX, Registry as Checked};
use serde::de::{DeserializeOwned, Error as _};
use serde::{Deserialize, Deserializer, Serialize};

use crate::error::Error;
use crate::parameters::{Rules, show};

/// The value of the field `format` in a file that this version writes and reads.
const FORMAT: &str = "polis-settings-v1";

/// The word for a secret.
const UNCHANGED: &str = "unchanged";

/// Where the messages are, in the errors about their fields.
const ROOT: &str = "configuration";

/// Paths in the messages, and the names of the same fields in the file. Each is replaced in turn.
const NAMES: [(&str, &str); 11] = [
    ("configuration.time.servers", "time_servers"),
    ("configuration.log.targets", "log_targets"),
    ("configuration.kubernetes.names", "kubernetes_names"),
    ("configuration.snapshots", "snapshot_target"),
    ("configuration.attestation", "attestation_policy"),
    ("attestation_policy.systems", "attestation_policy.images"),
    (".kernel_image", ".register_11"),
    ("configuration.proxy.url", "proxy"),
    ("configuration.proxy.direct", "no_proxy"),
    ("configuration.firewall.", "firewall_"),
    ("configuration.", ""),
];

/// The settings in a file. A setting that the file does not name is `None`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Settings {
    format: String,
    #[serde(deserialize_with = "given", skip_serializing_if = "Option::is_none")]
    cluster_domain: Option<String>,
    #[serde(deserialize_with = "given", skip_serializing_if = "Option::is_none")]
    tpm_mode: Option<String>,
    #[serde(deserialize_with = "given", skip_serializing_if = "Option::is_none")]
    storage_security_policy: Option<String>,
    #[serde(deserialize_with = "given", skip_serializing_if = "Option::is_none")]
    cold_start: Option<String>,
    #[serde(deserialize_with = "list", skip_serializing_if = "Option::is_none")]
    time_servers: Option<Vec<String>>,
    #[serde(deserialize_with = "given", skip_serializing_if = "Option::is_none")]
    pod_network: Option<String>,
    #[serde(deserialize_with = "given", skip_serializing_if = "Option::is_none")]
    service_network: Option<String>,
    #[serde(deserialize_with = "list", skip_serializing_if = "Option::is_none")]
    log_targets: Option<Vec<LogTarget>>,
    #[serde(deserialize_with = "list", skip_serializing_if = "Option::is_none")]
    kubernetes_names: Option<Vec<String>>,
    /// Inside, `None`: snapshots go nowhere.
    #[serde(deserialize_with = "given", skip_serializing_if = "Option::is_none")]
    snapshot_target: Option<Option<SnapshotTarget>>,
    /// Inside, `None`: there is no policy.
    #[serde(deserialize_with = "given", skip_serializing_if = "Option::is_none")]
    attestation_policy: Option<Option<Attestation>>,
    /// Inside, `None`: there is no proxy.
    #[serde(deserialize_with = "given", skip_serializing_if = "Option::is_none")]
    proxy: Option<Option<String>>,
    #[serde(deserialize_with = "list", skip_serializing_if = "Option::is_none")]
    no_proxy: Option<Vec<String>>,
    #[serde(deserialize_with = "list", skip_serializing_if = "Option::is_none")]
    firewall_sources: Option<Vec<String>>,
    #[serde(deserialize_with = "list", skip_serializing_if = "Option::is_none")]
    firewall_ports: Option<Vec<String>>,
    #[serde(deserialize_with = "list", skip_serializing_if = "Option::is_none")]
    registries: Option<Vec<Registry>>,
}

/// Reads the value of a field that is in the file; some fields have the value `null`.
fn given<'de, D, T>(deserializer: D) -> Result<Option<T>, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de>,
{
    T::deserialize(deserializer).map(Some)
}

/// Reads the value of a list that is in the file. The parser takes a missing value for an empty
/// list, and that would open a firewall whose entries are all comments.
fn list<'de, D, T>(deserializer: D) -> Result<Option<Vec<T>>, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de>,
{
    match Option::deserialize(deserializer)? {
        None => Err(D::Error::custom("the list has no value; allowed is `[]` for an empty one")),
        read => Ok(read),
    }
}

/// In place of a secret: the one that the cluster has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", rename_all = "lowercase")]
enum Secret {
    Unchanged,
}

impl TryFrom<String> for Secret {
    type Error = &'static str;

    fn try_from(text: String) -> Result<Self, &'static str> {
        // The text may be a secret, so the error does not have it.
        match text.as_str() {
            UNCHANGED => Ok(Self::Unchanged),
            _ => Err("a secret is not accepted in this file; allowed is `unchanged`"),
        }
    }
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct LogTarget {
    url: String,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    ca: String,
}

impl LogTarget {
    fn of(target: &parameters::LogTarget) -> Self {
        Self { url: target.url(), ca: pem(&target.authorities) }
    }

    fn message(&self) -> v1::LogTarget {
        v1::LogTarget { url: self.url.clone(), ca: self.ca.clone() }
    }
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct SnapshotTarget {
    url: String,
    #[serde(default)]
    region: String,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    ca: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    credentials: Option<Secret>,
}

impl SnapshotTarget {
    fn message(&self) -> v1::SnapshotConfiguration {
        let Self { url, region, ca, credentials: _ } = self.clone();
        v1::SnapshotConfiguration { url, region, ca }
    }
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Attestation {
    #[serde(default)]
    images: Vec<Image>,
    /// In PEM.
    #[serde(default)]
    makers: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Image {
    name: String,
    /// In hexadecimal.
    register_11: String,
}

impl Attestation {
    fn of(AttestationPolicy { systems, makers }: AttestationPolicy) -> Self {
        let image = |system: parameters::System| Image {
            register_11: hex::encode(&system.kernel_image),
            name: system.name,
        };
        Self {
            images: systems.into_iter().map(image).collect(),
            makers: makers.iter().map(|maker| pki::certificate_pem(&maker.der)).collect(),
        }
    }

    fn message(&self) -> Result<v1::AttestationPolicy, Error> {
        let mut policy = v1::AttestationPolicy::default();
        for (i, Image { name, register_11 }) in self.images.iter().enumerate() {
            let kernel_image = hex::decode(register_11).ok_or_else(|| {
                let allowed = "allowed is the value of register 11, 64 hexadecimal digits";
                Error::new(format!("attestation_policy.images[{i}].register_11: {allowed}"))
            })?;
            let name = name.clone();
            policy.systems.push(v1::attestation_policy::System { name, kernel_image });
        }
        for (i, text) in self.makers.iter().enumerate() {
            let der = match x509_parser::pem::parse_x509_pem(text.as_bytes()) {
                Ok((_rest, read)) if read.label == "CERTIFICATE" => read.contents,
                _ => {
                    let allowed = "allowed is the certificate of a maker of TPMs, in PEM";
                    return Err(Error::new(format!("attestation_policy.makers[{i}]: {allowed}")));
                }
            };
            policy.makers.push(der);
        }
        Ok(policy)
    }
}

/// How workers reach a registry of images.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Registry {
    pub(super) host: String,
    #[serde(default)]
    mirrors: Vec<String>,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    ca: String,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub(super) username: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    password: Option<Secret>,
}

impl Registry {
    /// A registry with one spelling for each value; `i` is its position, for errors.
    fn of(message: &v1::Registry, i: usize) -> Result<Self, Error> {
        // Neither a cluster nor a file gives the password, and without one a user is refused.
        let has_user = !message.username.is_empty();
        let password = if has_user { UNCHANGED.to_owned() } else { String::new() };
        let read = Checked::read(&v1::Registry { password, ..message.clone() });
        let read = read.map_err(|invalid| Error::new(format!("registries[{i}].{invalid}")))?;
        let v1::Registry { host, mirrors, ca, username, .. } = read.to_message();
        Ok(Self { host, mirrors, ca, username, password: has_user.then_some(Secret::Unchanged) })
    }

    /// The message, without a password.
    pub(super) fn message(&self) -> v1::Registry {
        let Self { host, mirrors, ca, username, password: _ } = self.clone();
        v1::Registry { host, mirrors, ca, username, password: String::new() }
    }
}

/// The field that says what a file is, whatever else is in it.
#[derive(Debug, Deserialize)]
struct Head {
    format: Option<String>,
}

impl Settings {
    /// Reads the text of a file, in YAML or JSON.
    pub(super) fn read(text: &str) -> Result<Self, Error> {
        let refused = match parsed::<Head>(text)?.format {
            Some(format) if format == FORMAT => return parsed(text),
            Some(format) => format!("format is {format:?}; allowed is {FORMAT}"),
            None => format!("the field `format` is missing; allowed is {FORMAT}"),
        };
        Err(Error::new(refused).or_help("`polisctl cluster export` writes a file of settings"))
    }

    /// The text of a file, in YAML.
    pub(super) fn yaml(&self) -> Result<String, Error> {
        Ok(serde_saphyr::to_string(self)?)
    }

    /// Every setting of a cluster.
    pub(super) fn of(
        configuration: &v1::ClusterConfiguration,
        registries: &[v1::Registry],
    ) -> Result<Self, Error> {
        // A trial is not a setting: it ends by itself.
        let message = v1::ClusterConfiguration { firewall_trial: None, ..configuration.clone() };
        let read = parameters::configuration(message.clone(), ROOT).map_err(named)?;
        let words = show::configuration(&read);
        let storage = match words.storage_security_policy {
            // Both mean the same.
            "unspecified" => "authenticated",
            word => word,
        };
        let logs = parameters::log_targets(message.log.unwrap_or_default(), ROOT)?;
        let names = message.kubernetes.unwrap_or_default();
        let snapshots = message.snapshots.unwrap_or_default();
        let bucket = parameters::snapshot_target(&snapshots, ROOT)?;
        let snapshot_target = bucket.map(|bucket| SnapshotTarget {
            url: bucket.url(),
            ca: pem(&bucket.server.authorities),
            region: bucket.region,
            credentials: Some(Secret::Unchanged),
        });
        let policy = message.attestation.unwrap_or_default();
        let policy = parameters::attestation_policy(&policy, ROOT)?;
        let proxy = message.proxy.unwrap_or_default();
        let url = parameters::proxy(&proxy, ROOT)?.map(|proxy| proxy.url());
        let firewall = read.firewall.unwrap_or_default().to_message();
        Ok(Self {
            format: FORMAT.to_owned(),
            cluster_domain: Some(words.cluster_domain),
            tpm_mode: Some(words.tpm_mode.to_owned()),
            storage_security_policy: Some(storage.to_owned()),
            cold_start: Some(words.cold_start.to_owned()),
            time_servers: Some(words.time_servers),
            pod_network: Some(words.pod_network),
            service_network: Some(words.service_network),
            log_targets: Some(logs.iter().map(LogTarget::of).collect()),
            kubernetes_names: Some(parameters::kubernetes_names(&names, ROOT)?),
            snapshot_target: Some(snapshot_target),
            attestation_policy: Some(policy.map(Attestation::of)),
            proxy: Some(url),
            no_proxy: Some(proxy.direct),
            firewall_sources: Some(firewall.sources),
            firewall_ports: Some(firewall.ports),
            registries: Some(registries_of(registries)?),
        })
    }

    /// The configuration of a cluster after the file, which changes what it names.
    pub(super) fn over(
        &self,
        present: &v1::ClusterConfiguration,
    ) -> Result<v1::ClusterConfiguration, Error> {
        let mut new = v1::ClusterConfiguration { firewall_trial: None, ..present.clone() };
        let words = Rules::of_words(
            self.tpm_mode.as_deref(),
            self.storage_security_policy.as_deref(),
            self.cold_start.as_deref(),
            self.time_servers.as_deref(),
        )?;
        words.apply(&mut new);
        if let Some(domain) = &self.cluster_domain {
            new.cluster_domain.clone_from(domain);
        }
        if let Some(network) = &self.pod_network {
            new.pod_network.clone_from(network);
        }
        if let Some(network) = &self.service_network {
            new.service_network.clone_from(network);
        }
        if let Some(targets) = &self.log_targets {
            let targets = targets.iter().map(LogTarget::message).collect();
            new.log = Some(v1::LogConfiguration { targets, ..Default::default() });
        }
        if let Some(names) = &self.kubernetes_names {
            new.kubernetes = Some(v1::KubernetesConfiguration { names: names.clone() });
        }
        // An empty message takes away what there was.
        if let Some(target) = &self.snapshot_target {
            let message = target.as_ref().map(SnapshotTarget::message);
            new.snapshots = Some(message.unwrap_or_default());
        }
        if let Some(policy) = &self.attestation_policy {
            let message = policy.as_ref().map(Attestation::message).transpose()?;
            new.attestation = Some(message.unwrap_or_default());
        }
        match &self.proxy {
            None => {}
            Some(None) => new.proxy = Some(v1::ProxyConfiguration::default()),
            Some(Some(url)) => new.proxy.get_or_insert_default().url.clone_from(url),
        }
        if let Some(direct) = &self.no_proxy {
            new.proxy.get_or_insert_default().direct.clone_from(direct);
        }
        if let Some(sources) = &self.firewall_sources {
            new.firewall.get_or_insert_default().sources.clone_from(sources);
        }
        if let Some(ports) = &self.firewall_ports {
            new.firewall.get_or_insert_default().ports.clone_from(ports);
        }
        Ok(new)
    }

    /// The registries, if the file names them; without their passwords.
    pub(super) fn registries(&self) -> Option<&[Registry]> {
        self.registries.as_deref()
    }
}

/// Reads a document, whatever is in it.
fn parsed<T: DeserializeOwned>(text: &str) -> Result<T, Error> {
    // The error alone: the line that it is about may have a secret.
    let words = serde_saphyr::UserMessageFormatter;
    let said = |error: serde_saphyr::Error| error.without_snippet().render_with_formatter(&words);
    serde_saphyr::from_str(text).map_err(|error| Error::new(said(error)))
}

/// An error about a field of the messages, with the name that the field has in the file.
fn named(error: parameters::Error) -> Error {
    match error {
        parameters::Error::Field(field) => {
            let mut path = field.path.clone();
            for (there, here) in NAMES {
                path = path.replace(there, here);
            }
            parameters::Error::Field(FieldError { path, ..field }).into()
        }
        other => other.into(),
    }
}

fn registries_of(messages: &[v1::Registry]) -> Result<Vec<Registry>, Error> {
    if messages.len() > REGISTRIES_MAX {
        let count = messages.len();
        let refused = format!("registries is {count} entries; allowed is at most {REGISTRIES_MAX}");
        return Err(Error::new(refused));
    }
    let mut registries = Vec::<Registry>::new();
    for (i, message) in messages.iter().enumerate() {
        let registry = Registry::of(message, i)?;
        if registries.iter().any(|known| known.host == registry.host) {
            let text = format!("registries[{i}].host is {:?}", registry.host);
            return Err(Error::new(format!("{text}; allowed is each host once")));
        }
        registries.push(registry);
    }
    registries.sort_by(|one, other| one.host.cmp(&other.host));
    Ok(registries)
}

/// Certificates in PEM, one after the other.
fn pem(authorities: &[Authority]) -> String {
    authorities.iter().map(Authority::pem).collect()
}
