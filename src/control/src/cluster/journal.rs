//! The journal: the record of what this machine has begun and not finished, which is a
//! bootstrap or a registration. One file on the ESP, one of two records.
//!
//! Invariants:
//! - A registering machine registers as the same node after every restart: its key is in
//!   the journal, as well protected as the machine can, until the data partition has it.

use polis_proto::v1;
use prost::Message as _;
use zeroize::Zeroizing;

use super::record::{self, Damage, Magic};
use super::sealed::{
    Begun, Keeping, check_protection, cold_start_message, cold_start_value, content, decode,
    kind_message, kind_value, protection, tpm_message, tpm_value,
};
use super::unlock::keys::Secrets;
use super::unlock::sealer::{Guarded, from_fields, to_fields};
use polis_machine::parameters::{self, Cluster, Register};
use polis_machine::storage::Kind;

const REGISTER: Magic = Magic(*b"polis rj");

/// The operation in progress.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Journal {
    /// The creation of a new cluster.
    Bootstrap(Begun),
    /// The registration with a cluster.
    Register(Registering),
}

impl Journal {
    /// Reads the record, of either kind.
    ///
    /// # Errors
    ///
    /// [`Damage`].
    pub fn from_record(record: &[u8]) -> Result<Self, Damage> {
        if record.starts_with(&REGISTER.0) {
            return Registering::from_record(record).map(Self::Register);
        }
        Begun::from_record(record).map(Self::Bootstrap)
    }
}

/// The parameters of the registration in progress.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Registering {
    /// The parameters at that time.
    pub register: Register,
    /// The public half of the node's key.
    pub node: [u8; 32],
    /// The secrets of this machine, the node's key included.
    pub secrets: Guarded<Secrets>,
    /// The data partition that is made once the node is approved.
    pub disk: Option<Planned>,
}

/// The data partition of a node that was approved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Planned {
    /// How it is protected.
    pub kind: Kind,
    /// How its keys are to be kept.
    pub keeping: Keeping,
    /// The nonce of the recovery key, which is encrypted with both halves. Empty without one.
    pub recovery_nonce: Vec<u8>,
    /// Its ciphertext.
    pub recovery: Vec<u8>,
}

impl Registering {
    /// The journal's record.
    #[must_use]
    pub fn to_record(&self) -> Zeroizing<Vec<u8>> {
        let Register { directory, ticket, ca_certificate, labels, name } = &self.register;
        let nodes = directory.iter().map(|node| v1::cluster_directory::Node {
            id: node.id.to_string(),
            addresses: node.addresses.clone(),
        });
        let register = v1::ClusterRegister {
            cluster_directory: Some(v1::ClusterDirectory { nodes: nodes.collect() }),
            register_ticket: ticket.0.to_vec(),
            ca_certificate: ca_certificate.clone(),
            labels: labels.clone(),
            name: name.as_ref().map(ToString::to_string).unwrap_or_default(),
        };
        let cluster = v1::node_parameters::Cluster::ClusterRegister(register);
        let (secrets, sealed_secrets) = to_fields(Some(&self.secrets));
        let disk = self.disk.as_ref();
        let message = v1::RegisterJournal {
            parameters: Some(v1::NodeParameters { cluster: Some(cluster), ..Default::default() }),
            node_public_key: self.node.to_vec(),
            secrets,
            sealed_secrets,
            storage_kind: disk.map_or(0, |disk| kind_message(disk.kind).into()),
            tpm_mode: disk.map_or(0, |disk| tpm_message(disk.keeping.tpm).into()),
            cold_start: disk.map_or(0, |disk| cold_start_message(disk.keeping.cold_start).into()),
            recovery_nonce: disk.map(|disk| disk.recovery_nonce.clone()).unwrap_or_default(),
            recovery_ciphertext: disk.map(|disk| disk.recovery.clone()).unwrap_or_default(),
        };
        let payload = Zeroizing::new(message.encode_to_vec());
        record::write(REGISTER, protection(Some(&self.secrets)), &payload)
    }

    fn from_record(record: &[u8]) -> Result<Self, Damage> {
        let (protection, payload) = record::read(REGISTER, record)?;
        let message: v1::RegisterJournal = decode(payload)?;
        let keeping = Keeping {
            tpm: tpm_value(message.tpm_mode()),
            cold_start: cold_start_value(message.cold_start()),
        };
        let kind = match message.storage_kind() {
            v1::StorageKind::Unspecified => None,
            kind => Some(kind_value(kind)?),
        };
        let parameters = message.parameters.unwrap_or_default().encode_to_vec();
        let parameters =
            parameters::parse(&parameters).map_err(|error| Damage::Content(error.to_string()))?;
        let Cluster::Register(register) = parameters.cluster else {
            return Err(content("it does not belong to a registration"));
        };
        let node = message
            .node_public_key
            .try_into()
            .map_err(|_length| content("the node's key is not 32 bytes long"))?;
        let secrets = from_fields(message.secrets.as_ref(), message.sealed_secrets)?;
        check_protection(protection, secrets.as_ref())?;
        let secrets = secrets.ok_or_else(|| content("it has no secrets"))?;
        let disk = kind.map(|kind| Planned {
            kind,
            keeping,
            recovery_nonce: message.recovery_nonce,
            recovery: message.recovery_ciphertext,
        });
        Ok(Self { register, node, secrets, disk })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::cluster::tests::{begun, blob, half, register};

    pub(super) fn registering(secrets: Guarded<Secrets>, kind: Option<Kind>) -> Registering {
        let disk = kind.map(|kind| Planned {
            kind,
            keeping: Keeping::default(),
            recovery_nonce: vec![3; 12],
            recovery: vec![4; 48],
        });
        Registering { register: register(), node: [5; 32], secrets, disk }
    }

    #[test]
    fn both_journals_read_back_and_neither_is_taken_for_the_other() {
        let plain = Secrets { node: half(1), join: half(2), key: Some(half(3)) };
        for secrets in [Guarded::Plain(plain), Guarded::Tpm(blob())] {
            for kind in [None, Some(Kind::Insecure), Some(Kind::Authenticated)] {
                let registering = registering(secrets.clone(), kind);
                let read = Journal::from_record(&registering.to_record());
                assert_eq!(read, Ok(Journal::Register(registering)));
            }
        }
        let begun = begun();
        assert_eq!(Journal::from_record(&begun.to_record()), Ok(Journal::Bootstrap(begun)));
    }

    proptest! {
        #[test]
        fn a_valid_frame_of_arbitrary_bytes_never_panics(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let record = record::write(REGISTER, record::Protection::Plain, &bytes);
            let _read = Journal::from_record(&record);
        }
    }
}

#[cfg(test)]
#[path = "journal_fuzz_tests.rs"]
mod fuzz_tests;
