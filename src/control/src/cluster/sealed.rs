//! The records of the cluster manager on the ESP: reads and writes them.
//!
//! The **sealed configuration** exists from the moment this node is a member, and is never
//! removed. The **journal** exists from the decision to bootstrap until the sealed
//! configuration does; it keeps what the bootstrap was begun with, so that a boot that
//! continues it does not depend on parameters that may be gone. The **key change** exists
//! from the moment before slot 0 of the disk gets another key until the sealed
//! configuration has that key.
//!
//! ```text
//!            begin                seal                 tidy up
//! [neither] -------> [journal] --------> [journal and --------> [sealed]
//!                                            sealed]
//! ```

use polis_proto::v1;
use prost::Message as _;

use zeroize::Zeroizing;

use super::record::{self, Damage, Magic, Protection};
use super::unlock::keys::Secrets;
use super::unlock::sealer::{Guarded, from_fields, to_fields};
use polis_machine::parameters::{
    self, Bootstrap, Cluster, ColdStart, NtpServer, StoragePolicy, TpmMode,
};
use polis_machine::storage::Kind;
use polis_wire::parameters::Firewall;

const SEALED: Magic = Magic(*b"polis sc");
const JOURNAL: Magic = Magic(*b"polis cj");
const CHANGE: Magic = Magic(*b"polis kc");

/// The data with which a member joins at its next boot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sealed {
    /// The key of the node that the data partition belongs to.
    pub node_public_key: [u8; 32],
    /// DER of the CA that the cluster had when the node entered.
    pub cluster_ca: Vec<u8>,
    /// DER of the CA that the node knew at its last start, where that is another one.
    pub rotated_ca: Option<Vec<u8>>,
    /// How the data partition is protected.
    pub storage: Kind,
    /// The secrets that open it with the cluster's help; `None` without encryption.
    pub secrets: Option<Guarded<Secrets>>,
    /// How its keys are kept.
    pub keeping: Keeping,
    /// The cluster has removed this node; its secrets are gone.
    pub disowned: bool,
    /// Its data partition is being wiped, too; only with `disowned`.
    pub wiped: bool,
}

/// The cluster's policy for the keys of its nodes' disks, as far as a node needs it before
/// its disk is open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Keeping {
    /// Whether the TPM keeps them.
    pub tpm: TpmMode,
    /// Whether the machine joins without help.
    pub cold_start: ColdStart,
}

impl Keeping {
    /// The policy in `configuration`.
    #[must_use]
    pub fn of(configuration: &parameters::ClusterConfiguration) -> Self {
        Self { tpm: configuration.tpm, cold_start: configuration.cold_start }
    }
}

impl Default for Keeping {
    fn default() -> Self {
        Self::of(&parameters::ClusterConfiguration::default())
    }
}

impl Sealed {
    /// The CA that the node trusts until its disk is open.
    #[must_use]
    pub fn trusted(&self) -> &[u8] {
        self.rotated_ca.as_deref().unwrap_or(&self.cluster_ca)
    }

    /// The CAs of the cluster that it names.
    #[must_use]
    pub fn cas(&self) -> Vec<Vec<u8>> {
        std::iter::once(&self.cluster_ca).chain(&self.rotated_ca).cloned().collect()
    }

    /// The record.
    #[must_use]
    pub fn to_record(&self) -> Zeroizing<Vec<u8>> {
        let (secrets, sealed_secrets) = to_fields(self.secrets.as_ref());
        let message = v1::SealedConfiguration {
            node_public_key: self.node_public_key.to_vec(),
            cluster_ca_certificate: self.cluster_ca.clone(),
            storage_kind: kind_message(self.storage).into(),
            secrets,
            sealed_secrets,
            tpm_mode: tpm_message(self.keeping.tpm).into(),
            cold_start: cold_start_message(self.keeping.cold_start).into(),
            disowned: self.disowned,
            wiped: self.wiped,
            rotated_ca_certificate: self.rotated_ca.clone().unwrap_or_default(),
        };
        let payload = Zeroizing::new(message.encode_to_vec());
        record::write(SEALED, protection(self.secrets.as_ref()), &payload)
    }

    /// Reads a record.
    ///
    /// # Errors
    ///
    /// [`Damage`].
    pub fn from_record(record: &[u8]) -> Result<Self, Damage> {
        let (protection, payload) = record::read(SEALED, record)?;
        let message: v1::SealedConfiguration = decode(payload)?;
        let storage = kind_value(message.storage_kind())?;
        let keeping = Keeping {
            tpm: tpm_value(message.tpm_mode()),
            cold_start: cold_start_value(message.cold_start()),
        };
        let node_public_key = message
            .node_public_key
            .try_into()
            .map_err(|_length| content("the node's key is not 32 bytes long"))?;
        let secrets = from_fields(message.secrets.as_ref(), message.sealed_secrets)?;
        check_protection(protection, secrets.as_ref())?;
        let (disowned, wiped) = (message.disowned, message.wiped);
        if wiped && !disowned {
            return Err(content("it is wiped without being disowned"));
        }
        if secrets.is_some() != (storage > Kind::Insecure && !disowned) {
            return Err(content("its secrets do not match its kind of storage"));
        }
        let cluster_ca = message.cluster_ca_certificate;
        let rotated_ca = message.rotated_ca_certificate;
        let rotated_ca = (!rotated_ca.is_empty()).then_some(rotated_ca);
        Ok(Self {
            node_public_key,
            cluster_ca,
            rotated_ca,
            storage,
            secrets,
            keeping,
            disowned,
            wiped,
        })
    }
}

pub(super) fn content(what: &str) -> Damage {
    Damage::Content(what.to_owned())
}

pub(super) fn decode<M: prost::Message + Default>(payload: &[u8]) -> Result<M, Damage> {
    M::decode(payload).map_err(|error| Damage::Content(error.to_string()))
}

pub(super) fn protection(secrets: Option<&Guarded<Secrets>>) -> Protection {
    match secrets {
        Some(Guarded::Tpm(_)) => Protection::Tpm,
        Some(Guarded::Plain(_)) | None => Protection::Plain,
    }
}

pub(super) fn check_protection(
    claimed: Protection,
    secrets: Option<&Guarded<Secrets>>,
) -> Result<(), Damage> {
    match claimed == protection(secrets) {
        true => Ok(()),
        false => Err(content("its secrets have another protection than stated")),
    }
}

pub(super) fn kind_message(kind: Kind) -> v1::StorageKind {
    match kind {
        Kind::Insecure => v1::StorageKind::Insecure,
        Kind::Encrypted => v1::StorageKind::Encrypted,
        Kind::Authenticated => v1::StorageKind::Authenticated,
    }
}

pub(super) fn kind_value(kind: v1::StorageKind) -> Result<Kind, Damage> {
    match kind {
        v1::StorageKind::Insecure => Ok(Kind::Insecure),
        v1::StorageKind::Encrypted => Ok(Kind::Encrypted),
        v1::StorageKind::Authenticated => Ok(Kind::Authenticated),
        v1::StorageKind::Unspecified => Err(content("no kind of storage")),
    }
}

/// The parameters of the bootstrap in progress.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Begun {
    /// The parameters at that time.
    pub bootstrap: Bootstrap,
    /// The kind of data partition that was to be made.
    pub kind: Kind,
    /// The keys of that partition, if it has any.
    pub keys: Option<BegunKeys>,
}

/// The keys of a partition that is being made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BegunKeys {
    /// The secrets of this machine.
    pub secrets: Guarded<Secrets>,
    /// The recovery key, encrypted with both halves: its nonce.
    pub recovery_nonce: Vec<u8>,
    /// Its ciphertext.
    pub recovery: Vec<u8>,
}

impl Begun {
    /// The journal's record.
    #[must_use]
    pub fn to_record(&self) -> Zeroizing<Vec<u8>> {
        let Bootstrap { owner_public_key, configuration, labels, name } = &self.bootstrap;
        let cluster = v1::node_parameters::Cluster::ClusterBootstrap(v1::ClusterBootstrap {
            owner_public_key: owner_public_key.to_vec(),
            cluster_configuration: Some(configuration_message(configuration)),
            labels: labels.clone(),
            name: name.as_ref().map(ToString::to_string).unwrap_or_default(),
        });
        let parameters = v1::NodeParameters { cluster: Some(cluster), ..Default::default() };
        let guarded = self.keys.as_ref().map(|keys| &keys.secrets);
        let (secrets, sealed_secrets) = to_fields(guarded);
        let (recovery_nonce, recovery_ciphertext) = match &self.keys {
            Some(keys) => (keys.recovery_nonce.clone(), keys.recovery.clone()),
            None => Default::default(),
        };
        let message = v1::BootstrapJournal {
            parameters: Some(parameters),
            storage_kind: kind_message(self.kind).into(),
            secrets,
            sealed_secrets,
            recovery_nonce,
            recovery_ciphertext,
        };
        let payload = Zeroizing::new(message.encode_to_vec());
        record::write(JOURNAL, protection(guarded), &payload)
    }

    /// Reads the journal, with the checks that every parameters file passes.
    ///
    /// # Errors
    ///
    /// [`Damage`].
    pub fn from_record(record: &[u8]) -> Result<Self, Damage> {
        let (protection, payload) = record::read(JOURNAL, record)?;
        let message: v1::BootstrapJournal = decode(payload)?;
        let kind = kind_value(message.storage_kind())?;
        let parameters = message.parameters.unwrap_or_default().encode_to_vec();
        let parameters =
            parameters::parse(&parameters).map_err(|error| Damage::Content(error.to_string()))?;
        let Cluster::Bootstrap(bootstrap) = parameters.cluster else {
            return Err(content("it does not belong to a bootstrap"));
        };
        let secrets = from_fields(message.secrets.as_ref(), message.sealed_secrets)?;
        check_protection(protection, secrets.as_ref())?;
        if secrets.is_some() != (kind > Kind::Insecure) {
            return Err(content("its secrets do not match its kind of storage"));
        }
        let keys = secrets.map(|secrets| BegunKeys {
            secrets,
            recovery_nonce: message.recovery_nonce,
            recovery: message.recovery_ciphertext,
        });
        Ok(Self { bootstrap, kind, keys })
    }
}

/// The record of the secrets that a change of keys puts in force.
#[must_use]
pub fn change_to_record(secrets: &Guarded<Secrets>) -> Zeroizing<Vec<u8>> {
    let (plain, sealed_secrets) = to_fields(Some(secrets));
    let message = v1::KeyChange { secrets: plain, sealed_secrets };
    let payload = Zeroizing::new(message.encode_to_vec());
    record::write(CHANGE, protection(Some(secrets)), &payload)
}

/// Reads what [`change_to_record`] wrote.
///
/// # Errors
///
/// [`Damage`].
pub fn change_from_record(record: &[u8]) -> Result<Guarded<Secrets>, Damage> {
    let (protection, payload) = record::read(CHANGE, record)?;
    let message: v1::KeyChange = decode(payload)?;
    let secrets = from_fields(message.secrets.as_ref(), message.sealed_secrets)?;
    check_protection(protection, secrets.as_ref())?;
    secrets.ok_or_else(|| content("it has no secrets"))
}

/// The configuration as the cluster keeps it.
#[must_use]
pub fn configuration_message(
    configuration: &parameters::ClusterConfiguration,
) -> v1::ClusterConfiguration {
    use v1::cluster_configuration::StorageSecurityPolicy;
    let storage = match configuration.storage {
        StoragePolicy::Unspecified => StorageSecurityPolicy::Unspecified,
        StoragePolicy::Permissive => StorageSecurityPolicy::Permissive,
        StoragePolicy::NeedsEncryption => StorageSecurityPolicy::NeedsEncryption,
        StoragePolicy::NeedsEncryptionAndAuthentication => {
            StorageSecurityPolicy::NeedsEncryptionAndAuthentication
        }
        StoragePolicy::NeedsInsecure => StorageSecurityPolicy::NeedsInsecure,
    };
    v1::ClusterConfiguration {
        cluster_domain: configuration.domain.clone(),
        tpm_mode: tpm_message(configuration.tpm).into(),
        storage_security_policy: storage.into(),
        cold_start: cold_start_message(configuration.cold_start).into(),
        time: Some(time_message(&configuration.time_servers)),
        firewall: configuration.firewall.as_ref().map(Firewall::to_message),
        firewall_trial: None,
        // Nodes receive the targets of logs by their watch.
        log: None,
        // The leader reads the target of snapshots from its store.
        snapshots: None,
        // A cluster begins without one.
        attestation: None,
        // Controllers read the names of Kubernetes from etcd.
        kubernetes: None,
        // Nodes receive the proxy by their watch.
        proxy: None,
        pod_network: configuration.networks.pods.to_string(),
        service_network: configuration.networks.services.to_string(),
    }
}

fn time_message(servers: &[NtpServer]) -> v1::TimeConfiguration {
    let server = |server: &NtpServer| v1::NtpServer { host: server.host.clone(), nts: server.nts };
    v1::TimeConfiguration { servers: servers.iter().map(server).collect() }
}

pub(super) fn tpm_message(mode: TpmMode) -> v1::cluster_configuration::TpmMode {
    match mode {
        TpmMode::Required => v1::cluster_configuration::TpmMode::Required,
        TpmMode::BestEffort => v1::cluster_configuration::TpmMode::BestEffort,
        TpmMode::Disabled => v1::cluster_configuration::TpmMode::Disabled,
    }
}

/// The TPM policy in the cluster's configuration.
#[must_use]
pub fn tpm_value(mode: v1::cluster_configuration::TpmMode) -> TpmMode {
    use v1::cluster_configuration::TpmMode as Wire;
    match mode {
        Wire::Required => TpmMode::Required,
        Wire::Unspecified | Wire::BestEffort => TpmMode::BestEffort,
        Wire::Disabled => TpmMode::Disabled,
    }
}

pub(super) fn cold_start_message(mode: ColdStart) -> v1::cluster_configuration::ColdStart {
    match mode {
        ColdStart::Automatic => v1::cluster_configuration::ColdStart::Automatic,
        ColdStart::Attended => v1::cluster_configuration::ColdStart::Attended,
    }
}

/// The policy for a machine that is alone, in the cluster's configuration.
#[must_use]
pub fn cold_start_value(mode: v1::cluster_configuration::ColdStart) -> ColdStart {
    use v1::cluster_configuration::ColdStart as Wire;
    match mode {
        Wire::Unspecified | Wire::Automatic => ColdStart::Automatic,
        Wire::Attended => ColdStart::Attended,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::cluster::tests::{blob, bootstrap, half};

    pub(super) fn plain() -> Guarded<Secrets> {
        Guarded::Plain(Secrets { node: half(1), join: half(2), key: None })
    }

    pub(super) fn sealed(secrets: Option<Guarded<Secrets>>) -> Sealed {
        Sealed {
            node_public_key: [7; 32],
            cluster_ca: b"certificate".to_vec(),
            rotated_ca: secrets.is_some().then(|| b"the next one".to_vec()),
            storage: if secrets.is_some() { Kind::Authenticated } else { Kind::Insecure },
            secrets,
            keeping: Keeping { tpm: TpmMode::Required, cold_start: ColdStart::Attended },
            disowned: false,
            wiped: false,
        }
    }

    pub(super) fn begun(secrets: Option<Guarded<Secrets>>) -> Begun {
        let kind = if secrets.is_some() { Kind::Encrypted } else { Kind::Insecure };
        let keys = secrets.map(|secrets| BegunKeys {
            secrets,
            recovery_nonce: vec![3; 12],
            recovery: vec![4; 48],
        });
        Begun { bootstrap: bootstrap(), kind, keys }
    }

    #[test]
    fn each_record_reads_back_however_its_secrets_are_kept() {
        for secrets in [None, Some(plain()), Some(Guarded::Tpm(blob()))] {
            let sealed = sealed(secrets.clone());
            assert_eq!(Sealed::from_record(&sealed.to_record()), Ok(sealed));
            let begun = begun(secrets.clone());
            assert_eq!(Begun::from_record(&begun.to_record()), Ok(begun));
            if let Some(secrets) = secrets {
                assert_eq!(change_from_record(&change_to_record(&secrets)), Ok(secrets));
            }
        }
    }

    #[test]
    fn one_record_is_not_taken_for_the_other() {
        let journal = begun(Some(plain())).to_record();
        assert_eq!(Sealed::from_record(&journal), Err(Damage::Magic));
        assert_eq!(change_from_record(&journal), Err(Damage::Magic));
    }

    #[test]
    fn what_is_public_is_readable_without_the_tpm() {
        let read = Sealed::from_record(&sealed(Some(Guarded::Tpm(blob()))).to_record()).unwrap();
        assert_eq!((read.node_public_key, read.cluster_ca), ([7; 32], b"certificate".to_vec()));
    }

    #[test]
    fn a_whole_record_with_a_strange_content_is_damaged() {
        let good = v1::SealedConfiguration {
            node_public_key: vec![1; 32],
            storage_kind: v1::StorageKind::Insecure.into(),
            ..Default::default()
        };
        let (secrets, _) = to_fields(Some(&plain()));
        let strange = [
            v1::SealedConfiguration { node_public_key: vec![1; 31], ..good.clone() },
            v1::SealedConfiguration { storage_kind: 0, ..good.clone() },
            // Encrypted without secrets, and the other way round.
            v1::SealedConfiguration { storage_kind: 3, ..good.clone() },
            v1::SealedConfiguration { secrets, ..good.clone() },
        ];
        for message in strange {
            let record = record::write(SEALED, Protection::Plain, &message.encode_to_vec());
            assert!(matches!(Sealed::from_record(&record), Err(Damage::Content(_))), "{message:?}");
        }
        let record = record::write(SEALED, Protection::Tpm, &good.encode_to_vec());
        assert!(matches!(Sealed::from_record(&record), Err(Damage::Content(_))));
        let record = record::write(SEALED, Protection::Plain, &[0xff; 9]);
        assert!(matches!(Sealed::from_record(&record), Err(Damage::Content(_))));
    }

    proptest! {
        #[test]
        fn a_valid_frame_of_arbitrary_bytes_never_panics(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            for (magic, protection) in
                [(SEALED, Protection::Plain), (JOURNAL, Protection::Tpm), (CHANGE, Protection::Plain)]
            {
                let record = record::write(magic, protection, &bytes);
                let _read = Sealed::from_record(&record);
                let _read = Begun::from_record(&record);
                let _read = change_from_record(&record);
            }
        }
    }
}

#[cfg(test)]
#[path = "sealed_fuzz_tests.rs"]
mod fuzz_tests;
