//! Whose calls a machine in maintenance serves, and the key that it serves with.
//!
//! ```text
//! parameters found a cluster ---> the owner's key          | a key made at this start: its
//! parameters register ----------> an owner, by the CA      | fingerprint is on the screen
//! none that can be used --------> the holder of the code   | the code's key
//! ```
//!
//! Pure but for random numbers.

use std::fmt;
use std::sync::Arc;

use zeroize::Zeroizing;

use super::Error;
use polis_machine::parameters::{Cluster, Loaded};
use polis_wire::identity::{Fingerprint, NodeKey};
use polis_wire::maintenance::Code;
use polis_wire::pki::Authorities;
use polis_wire::rpc::{Credentials, Peer, Role};

/// The owner that parameters name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Owner {
    /// The holder of this raw Ed25519 key.
    Key([u8; 32]),
    /// A user with the role owner, by a certificate of this CA, in DER.
    Cluster(Vec<u8>),
}

/// The callers, and the key of this machine.
#[derive(Clone)]
pub(super) struct Gate {
    key: NodeKey,
    admits: Admits,
}

#[derive(Clone)]
enum Admits {
    Owner(Owner),
    /// The holder of the caller's key of the code.
    Code {
        text: Arc<Zeroizing<String>>,
        caller: [u8; 32],
    },
}

impl fmt::Debug for Gate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let admits = match &self.admits {
            Admits::Owner(owner) => format!("{owner:?}"),
            Admits::Code { .. } => "Code(…)".to_owned(),
        };
        f.debug_struct("Gate").field("key", &self.key).field("admits", &admits).finish()
    }
}

impl Gate {
    /// The owner in the parameters of a machine, if they can be used.
    pub(super) fn owner(loaded: &Loaded) -> Option<Owner> {
        Some(match &loaded.parameters()?.cluster {
            Cluster::Bootstrap(bootstrap) => Owner::Key(bootstrap.owner_public_key),
            Cluster::Register(register) => Owner::Cluster(register.ca_certificate.clone()),
        })
    }

    /// A gate with a new key, and a new code where there is no owner. Slow where there is none.
    pub(super) fn new(owner: Option<Owner>) -> Result<Self, Error> {
        if let Some(owner) = owner {
            return Ok(Self { key: NodeKey::generate()?, admits: Admits::Owner(owner) });
        }
        let code = Code::generate().map_err(Error::Random)?;
        let (text, keys) = (Arc::new(code.text()), code.keys());
        let caller = keys.caller.public_key();
        Ok(Self { key: keys.machine, admits: Admits::Code { text, caller } })
    }

    /// The certificate to serve with, and the CA whose certificates are good, if there is one.
    pub(super) fn credentials(&self) -> Result<Credentials, Error> {
        let authorities = match &self.admits {
            Admits::Owner(Owner::Cluster(ca)) => Some(Authorities::sole(ca.clone()).into()),
            Admits::Owner(Owner::Key(_)) | Admits::Code { .. } => None,
        };
        let (certificate, key) = (self.key.proof()?, self.key.to_pkcs8_der()?.into());
        Ok(Credentials { certificate, key, authorities })
    }

    /// What a person needs beside the address: the words of an option of `polisctl`. Slow where
    /// there is an owner.
    pub(super) fn notice(&self) -> Zeroizing<String> {
        Zeroizing::new(match &self.admits {
            Admits::Owner(_) => {
                let fingerprint = Fingerprint::of_key(&self.key.public_key());
                format!("--fingerprint {}", fingerprint.words())
            }
            Admits::Code { text, .. } => format!("--code {}", text.as_str()),
        })
    }

    /// The name of `peer` for the log, if its calls are served; else what it lacks.
    pub(super) fn admit(&self, peer: &Peer) -> Result<String, &'static str> {
        match (&self.admits, peer) {
            (Admits::Code { caller, .. }, Peer::Key(key)) if caller == key => {
                Ok("the holder of the code".to_owned())
            }
            (Admits::Owner(Owner::Key(owner)), Peer::Key(key)) if owner == key => {
                Ok("the owner of the node parameters".to_owned())
            }
            (Admits::Owner(Owner::Cluster(_)), Peer::User { role: Role::Owner, .. }) => {
                Ok(peer.to_string())
            }
            (Admits::Code { .. }, _) => Err("the code on the screen of this machine"),
            (Admits::Owner(Owner::Key(_)), _) => {
                Err("the owner's key that the node parameters of this machine name")
            }
            (Admits::Owner(Owner::Cluster(_)), _) => {
                Err("the certificate of an owner of the cluster that this machine registers with")
            }
        }
    }
}
