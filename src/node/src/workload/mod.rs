//! The workloads of this node: what a Kubernetes role needs from the machine, and the
//! programs that run pods.
//!
//! ```text
//! ground   control groups, kernel parameters, mounts, quotas    plan -> apply
//! mesh     the encrypted network between the pods of all nodes  records -> plan
//! runtime  containerd, and the images of the system in it
//! ```
//!
//! Invariant: a node without a Kubernetes role has none of it, neither a group, nor a
//! mount, nor a process.

pub mod ground;
pub mod mesh;
pub mod runtime;
