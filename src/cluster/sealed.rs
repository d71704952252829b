//! Reads and writes the two records of the cluster manager on the ESP.
//!
//! The **sealed configuration** is there once this node is a member, and for
//! ever after. The **journal** is there from the decision to bootstrap until the
//! sealed configuration is; it keeps what the bootstrap was begun with, so that
//! a boot that goes on with it does not depend on parameters that may have gone.
//!
//! ```text
//!            begin                seal                 tidy up
//! [neither] -------> [journal] --------> [journal and --------> [sealed]
//!                                            sealed]
//! ```

use polis_proto::v1;
use prost::Message as _;

use super::record::{self, Damage, Magic};
use crate::parameters::{self, Bootstrap, Cluster, ColdStart, StoragePolicy, TpmMode};
use crate::storage::Kind;

const SEALED: Magic = Magic(*b"polis sc");
const JOURNAL: Magic = Magic(*b"polis cj");

/// What a member needs to find its way home.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sealed {
    /// The key of the node that the data partition belongs to.
    pub node_public_key: [u8; 32],
    /// DER of the cluster's CA.
    pub cluster_ca: Vec<u8>,
    /// How the data partition is protected.
    pub storage: Kind,
}

impl Sealed {
    /// The record.
    #[must_use]
    pub fn to_record(&self) -> Vec<u8> {
        let storage_kind = match self.storage {
            Kind::Insecure => v1::StorageKind::Insecure,
            Kind::Encrypted => v1::StorageKind::Encrypted,
            Kind::Authenticated => v1::StorageKind::Authenticated,
        };
        let message = v1::SealedConfiguration {
            node_public_key: self.node_public_key.to_vec(),
            cluster_ca_certificate: self.cluster_ca.clone(),
            storage_kind: storage_kind.into(),
            ..Default::default()
        };
        record::write(SEALED, &message.encode_to_vec())
    }

    /// Reads a record.
    ///
    /// # Errors
    ///
    /// [`Damage`].
    pub fn from_record(record: &[u8]) -> Result<Self, Damage> {
        let payload = record::read(SEALED, record)?;
        let content = |what: &str| Damage::Content(what.to_owned());
        let message = v1::SealedConfiguration::decode(payload)
            .map_err(|error| Damage::Content(error.to_string()))?;
        let storage = match message.storage_kind() {
            v1::StorageKind::Insecure => Kind::Insecure,
            v1::StorageKind::Encrypted => Kind::Encrypted,
            v1::StorageKind::Authenticated => Kind::Authenticated,
            v1::StorageKind::Unspecified => return Err(content("no kind of storage")),
        };
        let node_public_key = message
            .node_public_key
            .try_into()
            .map_err(|_length| content("the node's key has not 32 bytes"))?;
        Ok(Self { node_public_key, cluster_ca: message.cluster_ca_certificate, storage })
    }
}

/// The journal's record of a bootstrap.
#[must_use]
pub fn journal_to_record(bootstrap: &Bootstrap) -> Vec<u8> {
    let cluster = v1::node_parameters::Cluster::ClusterBootstrap(v1::ClusterBootstrap {
        owner_public_key: bootstrap.owner_public_key.to_vec(),
        cluster_configuration: Some(configuration_message(&bootstrap.configuration)),
        labels: bootstrap.labels.clone(),
    });
    let message = v1::NodeParameters { cluster: Some(cluster), ..Default::default() };
    record::write(JOURNAL, &message.encode_to_vec())
}

/// Reads the journal, with the checks that every parameters file passes.
///
/// # Errors
///
/// [`Damage`].
pub fn journal_from_record(record: &[u8]) -> Result<Bootstrap, Damage> {
    let payload = record::read(JOURNAL, record)?;
    let parameters =
        parameters::parse(payload).map_err(|error| Damage::Content(error.to_string()))?;
    match parameters.cluster {
        Cluster::Bootstrap(bootstrap) => Ok(bootstrap),
        Cluster::Register(_) => Err(Damage::Content("it is of no bootstrap".to_owned())),
    }
}

/// The configuration as the cluster keeps it.
#[must_use]
pub fn configuration_message(
    configuration: &parameters::ClusterConfiguration,
) -> v1::ClusterConfiguration {
    use v1::cluster_configuration::{ColdStart as Cold, StorageSecurityPolicy, TpmMode as Tpm};
    let tpm = match configuration.tpm {
        TpmMode::Required => Tpm::Required,
        TpmMode::BestEffort => Tpm::BestEffort,
        TpmMode::Disabled => Tpm::Disabled,
    };
    let storage = match configuration.storage {
        StoragePolicy::Unspecified => StorageSecurityPolicy::Unspecified,
        StoragePolicy::Permissive => StorageSecurityPolicy::Permissive,
        StoragePolicy::NeedsEncryption => StorageSecurityPolicy::NeedsEncryption,
        StoragePolicy::NeedsEncryptionAndAuthentication => {
            StorageSecurityPolicy::NeedsEncryptionAndAuthentication
        }
        StoragePolicy::NeedsInsecure => StorageSecurityPolicy::NeedsInsecure,
    };
    let cold_start = match configuration.cold_start {
        ColdStart::Automatic => Cold::Automatic,
        ColdStart::Attended => Cold::Attended,
    };
    v1::ClusterConfiguration {
        cluster_domain: configuration.domain.clone(),
        tpm_mode: tpm.into(),
        storage_security_policy: storage.into(),
        cold_start: cold_start.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::tests::bootstrap;

    #[test]
    fn a_sealed_configuration_reads_back() {
        let sealed = Sealed {
            node_public_key: [7; 32],
            cluster_ca: b"certificate".to_vec(),
            storage: Kind::Insecure,
        };
        assert_eq!(Sealed::from_record(&sealed.to_record()), Ok(sealed));
    }

    #[test]
    fn the_journal_keeps_all_that_the_bootstrap_was_begun_with() {
        let bootstrap = bootstrap();
        assert_eq!(journal_from_record(&journal_to_record(&bootstrap)), Ok(bootstrap));
    }

    #[test]
    fn one_record_is_not_taken_for_the_other() {
        let journal = journal_to_record(&bootstrap());
        assert_eq!(Sealed::from_record(&journal), Err(Damage::Magic));
    }

    #[test]
    fn a_whole_record_with_a_strange_content_is_damaged() {
        let message = v1::SealedConfiguration {
            node_public_key: vec![1; 31],
            storage_kind: v1::StorageKind::Insecure.into(),
            ..Default::default()
        };
        let record = record::write(SEALED, &message.encode_to_vec());
        assert!(matches!(Sealed::from_record(&record), Err(Damage::Content(_))));
        let record = record::write(SEALED, &[0xff; 9]);
        assert!(matches!(Sealed::from_record(&record), Err(Damage::Content(_))));
    }
}
