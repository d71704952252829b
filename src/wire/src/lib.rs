//! What node and operator both speak: who is who, how one calls the other, and what a
//! machine is told.
//!
//! It knows neither etcd, nor disks, nor processes.

pub mod endpoint;
pub mod identity;
pub mod node_roles;
pub mod parameters;
pub mod pki;
pub mod rpc;
