//! The formats and protocols that the node and the operator's tools share: identities,
//! the RPC layer, and the parameters of a machine.
//!
//! This crate does not depend on etcd, disks or processes.

pub mod age;
pub mod attestation;
pub mod audit;
pub mod endpoint;
pub mod identity;
pub mod maintenance;
pub mod node_labels;
pub mod node_roles;
pub mod outside;
pub mod parameters;
pub mod pki;
pub mod pod_network;
pub mod registry;
pub mod rpc;
pub mod s3;
pub mod snapshot;
pub mod tunnel;
