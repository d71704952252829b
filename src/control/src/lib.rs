//! The control plane of a cluster, as far as each of its nodes takes part in it.
//!
//! - `consensus` runs a member of etcd, and is the only one that talks to it;
//! - `curator` keeps the records of the cluster in etcd, and serves them while it leads;
//! - `cluster` makes this machine a member: it founds, registers, joins and leaves.

pub mod cluster;
pub mod consensus;
pub mod curator;
