//! The curator: keeps the cluster's records in etcd, and serves them to nodes and people.
//! It is the control plane.
//!
//! Runs beside every voter of etcd. One of them leads and serves everything; the others
//! serve `CuratorLocal` and name the leader.
//!
//! ```text
//! fenced     the one way to write, for one term
//! store      records <-> bytes, read-modify-write
//! founding   the first records of a cluster, all at once
//! state      what may become of a node's record              pure
//! returning  the same of a node whose certificate has ended   pure
//! readmission  gives such a node its new certificate
//! attesting  the questions to the TPMs of machines that register, and of members
//! attestation_policy  whether a machine fits by what its TPM proved   pure
//! nodes, tickets, users, configuration, registries, pod_network   changes of records
//! update     the update of all nodes: plan and journal          pure
//! health     the heartbeats                                  a service
//! attested   the members that do not fit the attestation policy  a service
//! leader     the election                                    a service
//! proof      the certificate of this node as a curator      a service
//! skew       ends the term of a leader with a wrong clock    a service
//! directory  a copy of all records, for any number of readers  a service
//! access_list  the current access list, for the servers of this node  a service
//! audit      the chain of the audit log, in etcd
//! bounds     the bounds of what a node reports                 pure
//! budgets    the calls that a node may make in a row
//! serve      the services of the API
//! service    all of it, beside a member of etcd
//! ```
//!
//! Invariants:
//! - Every write of a leader is conditional on its lock.
//! - No secret of a record leaves in an answer that is not about that secret.
//!
//! What this module does not do: check permissions of callers (`rpc`), run etcd
//! (`consensus`), or decide what this machine is to be (`cluster`).

pub mod access_list;
mod attestation_policy;
mod attested;
pub mod attesting;
pub mod audit;
mod bounds;
pub mod budgets;
mod capacity;
pub mod configuration;
mod convert;
pub mod directory;
pub mod disk_keys;
pub mod error;
pub mod fenced;
mod founding;
#[cfg(test)]
mod fuzz_tests;
pub mod health;
pub mod leader;
mod names;
pub mod nodes;
mod pod_network;
mod proof;
mod readmission;
pub mod refused;
mod registries;
mod reported;
pub mod returning;
mod rotation;
pub mod serve;
mod service;
mod skew;
pub mod snapshot_target;
pub mod state;
pub mod store;
mod succession;
#[cfg(test)]
mod tests;
pub mod tickets;
pub mod update;
pub mod users;

pub use self::directory::Directory;
pub use self::disk_keys::DiskKeys;
pub use self::error::Error;
pub use self::fenced::{Deposed, Fenced};
pub use self::founding::Founding;
pub use self::leader::Leadership;
pub use self::service::{Config, Error as ServiceError, Service, Status};
pub use self::store::Store;
