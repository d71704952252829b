//! The roles of this node: their needs, and the readiness of the node.
//!
//! ```text
//! readiness   when this node is ready: at home, and what its roles need serves  a service
//! health      the health of the cluster, for a system on trial                   a service
//! enlist      makes this node a member of etcd while it has the role            a service
//! ```

pub mod enlist;
pub mod health;
pub mod readiness;
