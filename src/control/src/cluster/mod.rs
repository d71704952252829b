//! The cluster manager: decides what this machine is to be, and brings it there.
//!
//! `root` starts [`Service`]. It orders the data partition from `storage` and the member
//! from `consensus`, and publishes the identity of this node to every other service.
//!
//! ```text
//! decide      records, data, parameters -> what to do     pure
//! sealed      the records on the ESP                      bytes <-> values
//! record      the frame around them                       pure
//! unlock      from the halves, or the recovery key, to an open disk
//! remote_unlock  an open disk too, with the help of others
//! membership  what makes the first node a member, step by step
//! probe       the steps of a boot, for tests that stop after one
//! hints       where the cluster is, by the parameters
//! journal     what was begun and not finished             bytes <-> values
//! partition   which data partition, and the keys of a new one
//! bootstrap   from nothing to a cluster of one
//! join        from a member that was switched off to one that serves
//! register    from a ticket to a member of a running cluster
//! approval    the wait for an operator's approval
//! returning   a new certificate for a node whose own ended while it was off
//! remote      questions to its curators
//! member_removal  the data of a removed etcd member, and the end of a removal that was cut off
//! disown      the end of a membership
//! confirm     whether the cluster has removed a node that the parameters say to wipe
//! peers       where the other nodes are                   a service
//! discovery   the same, while no leader publishes it      a service
//! state       the word for it                             pure
//! writer      the one way in which it changes
//! service     when
//! credentials what this node serves and calls with, once it is home    a service
//! ```
//!
//! Invariants:
//! - A power cut at any moment of a bootstrap is followed by a boot that ends
//!   with the same node in the same cluster.
//! - A data partition in use is never the start of a new cluster.
//!
//! What this module does not do: touch disks (`storage`) or run etcd (`consensus`).

mod approval;
mod bootstrap;
mod confirm;
pub mod credentials;
pub mod decide;
pub mod discovery;
mod disown;
mod error;
mod hints;
mod join;
pub mod journal;
mod member_removal;
mod membership;
mod partition;
pub mod peers;
mod probe;
pub mod record;
mod register;
mod remote;
mod remote_unlock;
mod returning;
pub mod sealed;
mod service;
pub mod state;
pub mod unlock;
mod writer;

use polis_wire::identity::{Fingerprint, NodeId};
use polis_wire::node_roles::Role;

pub use self::error::Error;
pub use self::member_removal::{Membership, RETRY, TRUST, Vote, membership, remove_member};
pub use self::probe::{Interrupted, Probe, Step};
pub use self::service::{Config, Consensus, Service};
pub use self::state::State;
pub use self::unlock::Keeper;
pub use self::writer::Writer;

/// The published status of the cluster manager.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Status {
    /// The relation of this machine to its cluster.
    pub state: State,
    /// Its name, once it has its key.
    pub node: Option<NodeId>,
    /// The fingerprint of its registration, in the boot in which it registered.
    pub fingerprint: Option<Fingerprint>,
    /// SHA-256 of the certificate of the CA that the cluster had when this node entered, once it
    /// is home.
    pub ca: Option<[u8; 32]>,
    /// The roles that it has in the cluster.
    pub roles: Vec<Role>,
    /// How the keys of its disk are kept, once it is home; `None` if the disk is not encrypted.
    pub keys: Option<KeyStatus>,
    /// It waits for the key of its disk: [`unlock::Requests::unlock`] takes it.
    pub waits_for_key: bool,
}

/// How the keys of a node's disk are kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyStatus {
    /// Whether the node's half is sealed to the TPM. Unknown, so `false`, if an earlier run
    /// of the service opened the disk.
    pub sealed: bool,
    /// The keeper of a share of the cluster's half; `None` if the machine waits for help
    /// when it starts. [`Keeper::Disk`] deserves a warning.
    pub keeper: Option<Keeper>,
    /// Whether the recovery key still has to be saved by the owner.
    pub recovery_key_unsaved: bool,
    /// Whether a firmware update is announced: the next start opens the disk whatever the
    /// firmware measures.
    pub firmware_update_announced: bool,
}

impl Status {
    /// Whether this machine is a member, within reach of the others or not.
    #[must_use]
    pub fn is_member(&self) -> bool {
        matches!(self.state, State::Home | State::Split)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::sync::Mutex;
    use std::sync::mpsc::Receiver;

    use zeroize::Zeroizing;

    use super::unlock::keys::Half;
    use super::unlock::sealer::Tpm;
    use polis_machine::parameters::{
        Bootstrap, ClusterConfiguration, DirectoryNode, Register, StoragePolicy, Ticket,
    };
    use polis_machine::tpm::{self, Blob};
    use polis_wire::attestation::{Answer, Keys, Question};
    use polis_wire::identity::NodeKey;
    use polis_wire::pod_network::Networks;

    /// A journal of a bootstrap without keys.
    pub(super) fn begun() -> super::sealed::Begun {
        let kind = polis_machine::storage::Kind::Insecure;
        super::sealed::Begun { bootstrap: bootstrap(), kind, keys: None }
    }

    /// A registration that passes every check.
    pub(super) fn register() -> Register {
        let key = NodeKey::from_seed(&[8; 32]);
        let pair = rcgen::KeyPair::from_pem(&key.to_pkcs8_pem().unwrap()).unwrap();
        let mut params = rcgen::CertificateParams::default();
        params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        Register {
            directory: vec![DirectoryNode { id: key.id(), addresses: vec!["10.0.0.1".to_owned()] }],
            ticket: Ticket(b"ticket".to_vec().into()),
            ca_certificate: params.self_signed(&pair).unwrap().der().to_vec(),
            labels: BTreeMap::new(),
            name: None,
        }
    }

    /// The owner of that cluster.
    pub(super) fn owner() -> ed25519_dalek::SigningKey {
        ed25519_dalek::SigningKey::from_bytes(&[3; 32])
    }

    /// A bootstrap with every field set.
    pub(super) fn bootstrap() -> Bootstrap {
        Bootstrap {
            owner_public_key: owner().verifying_key().to_bytes(),
            configuration: ClusterConfiguration {
                domain: "test.internal".to_owned(),
                storage: StoragePolicy::NeedsInsecure,
                networks: Networks {
                    pods: "172.16.0.0/13".parse().unwrap(),
                    services: "172.24.0.0/16".parse().unwrap(),
                },
                ..ClusterConfiguration::default()
            },
            labels: BTreeMap::from([("rack".to_owned(), "1".to_owned())]),
            name: None,
        }
    }

    /// An installation.
    pub(super) fn install() -> polis_machine::parameters::Install {
        polis_machine::parameters::Install {
            disk: polis_machine::parameters::Selector::default(),
            wipe: polis_machine::parameters::Wipe::Nothing,
            id: [7; 16],
            node: polis_machine::parameters::Message(Zeroizing::new(Vec::new())),
        }
    }

    pub(super) fn half(byte: u8) -> Half {
        Half::new(&[byte; 32]).unwrap()
    }

    pub(super) fn blob() -> Blob {
        Blob {
            public: vec![1],
            private: vec![2],
            root: vec![3],
            pcrs: vec![7, 12],
            signer: Vec::new(),
            nonce: vec![4; 12],
            ciphertext: vec![5; 48],
        }
    }

    /// A simulated TPM; `tests/tpm` has a real one.
    #[derive(Debug)]
    pub(super) struct FakeTpm {
        pub(super) machine: Mutex<Tpms>,
        /// The policy key that signed the running system.
        pub(super) signer: Mutex<Vec<u8>>,
        /// Until the other end is gone, the next question for its keys hangs.
        pub(super) hangs: Mutex<Option<Receiver<()>>>,
    }

    /// The TPM of a machine.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(super) enum Tpms {
        None,
        /// Which TPM, and how the machine was started.
        One(u8, u8),
    }

    impl Default for FakeTpm {
        fn default() -> Self {
            let machine = Mutex::new(Tpms::One(1, 1));
            Self { machine, signer: Mutex::default(), hangs: Mutex::default() }
        }
    }

    impl Tpm for FakeTpm {
        fn is_there(&self) -> bool {
            *self.machine.lock().unwrap() != Tpms::None
        }

        fn signer(&self) -> Vec<u8> {
            self.signer.lock().unwrap().clone()
        }

        fn seal(
            &self,
            signer: &[u8],
            pcrs: &[u32],
            purpose: &[u8],
            secret: &[u8],
        ) -> Result<Blob, tpm::Error> {
            if !signer.is_empty() && signer != Tpm::signer(self) {
                return Err(tpm::Error::Unapproved(tpm::Unapproved::OtherKey));
            }
            let Tpms::One(tpm, start) = *self.machine.lock().unwrap() else {
                return Err(tpm::Error::Absent);
            };
            let ciphertext = secret.iter().map(|byte| byte ^ 0x55).collect();
            let (public, private) = (purpose.to_vec(), vec![start]);
            let (pcrs, signer) = (pcrs.to_vec(), signer.to_vec());
            Ok(Blob { public, private, root: vec![tpm], pcrs, signer, ciphertext, ..blob() })
        }

        fn unseal(&self, purpose: &[u8], blob: &Blob) -> Result<Zeroizing<Vec<u8>>, tpm::Error> {
            match *self.machine.lock().unwrap() {
                Tpms::None => Err(tpm::Error::Absent),
                Tpms::One(tpm, _) if blob.root != [tpm] => Err(tpm::Error::Cleared),
                Tpms::One(..) if !blob.signer.is_empty() && blob.signer != Tpm::signer(self) => {
                    Err(tpm::Error::Unapproved(tpm::Unapproved::Changed))
                }
                Tpms::One(_, start) if !blob.pcrs.is_empty() && blob.private != [start] => {
                    Err(tpm::Error::Changed(blob.pcrs.clone()))
                }
                Tpms::One(..) if blob.public == purpose => {
                    Ok(Zeroizing::new(blob.ciphertext.iter().map(|byte| byte ^ 0x55).collect()))
                }
                Tpms::One(..) => Err(tpm::Error::Mismatch),
            }
        }

        fn keys(&self) -> Result<Keys, tpm::Error> {
            let hangs = self.hangs.lock().unwrap().take();
            if let Some(hangs) = hangs {
                hangs.recv().unwrap_err();
            }
            Err(tpm::Error::Absent)
        }

        fn prove(&self, _node: &str, _question: &Question) -> Result<Answer, tpm::Error> {
            Err(tpm::Error::Absent)
        }
    }
}
