//! Decides what this machine is to be, and makes it so: the cluster manager.
//!
//! `root` starts [`Service`]. It tells `storage` which data partition to make and
//! `consensus` what to do, and everyone else who this node is.
//!
//! ```text
//! decide      records, data, parameters -> what to do     pure
//! sealed      the two records on the ESP                  bytes <-> values
//! record      the frame around them                       pure
//! membership  what makes a member, step by step
//! state       the word for it                             pure
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

pub mod credentials;
pub mod decide;
mod error;
mod membership;
pub mod record;
pub mod sealed;
mod service;
pub mod state;

use std::fmt;

use crate::identity::NodeId;

pub use self::error::Error;
pub use self::membership::{Probe, Step};
pub use self::service::{Config, Consensus, Service};
pub use self::state::State;

/// What everyone else may know.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Status {
    /// What this machine is to its cluster.
    pub state: State,
    /// Its name, once it has its key.
    pub node: Option<NodeId>,
    /// SHA-256 of the certificate of the cluster's CA, once it is home.
    pub ca: Option<[u8; 32]>,
    /// What it does for the cluster.
    pub roles: Vec<Role>,
}

/// What a node does for its cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Runs an etcd member and, with it, the control plane.
    ConsensusMember,
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::ConsensusMember => "consensus member",
        })
    }
}

/// Runs `work` where it may block.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, Error> + Send + 'static,
) -> Result<T, Error> {
    tokio::task::spawn_blocking(work).await.unwrap_or(Err(Error::Lost))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use crate::parameters::{Bootstrap, ClusterConfiguration, StoragePolicy};

    /// A bootstrap with every field set.
    pub(super) fn bootstrap() -> Bootstrap {
        let owner = ed25519_dalek::SigningKey::from_bytes(&[3; 32]);
        Bootstrap {
            owner_public_key: owner.verifying_key().to_bytes(),
            configuration: ClusterConfiguration {
                domain: "test.internal".to_owned(),
                storage: StoragePolicy::NeedsInsecure,
                ..ClusterConfiguration::default()
            },
            labels: BTreeMap::from([("rack".to_owned(), "1".to_owned())]),
        }
    }
}
