//! The container runtime of this node: containerd, with `runc` and gVisor below it.
//!
//! ```text
//! [stopped] --the role, a data partition--> [preparing] --ground--> [starting]
//!     ^                                                                 | it answers
//!     |                                                             [importing]
//!     |                                                                 | images of the system
//!     +------------- the role is taken away ----------------------- [serving]
//! ```
//!
//! A run that fails publishes why ([`Status::Failed`]), and the next one begins at
//! *preparing*.
//!
//! Pods outlive containerd, and the node: each has a shim, which is a child of `init` once
//! containerd is gone. A containerd that is started again finds them by its state.
//!
//! Invariants:
//! - containerd starts only after the quota of workloads and the mounts stand (`ground`).
//! - Kubernetes sees no runtime without the images of the system: they are imported before
//!   the status is [`Status::Serving`].
//!
//! What this module does not do: stop pods, which kubelet and the end of the node do.

pub mod config;
pub mod gvisor;
pub mod health;
pub mod import;
pub mod layout;
pub mod pods;
pub mod service;

pub use self::health::{Condition, Health};
pub use self::pods::Pods;
pub use self::service::{Config, Error, Service};

/// The published status.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Status {
    /// The node has not the role of a Kubernetes worker, or no data partition.
    #[default]
    Stopped,
    /// The image of this machine has no containerd: it is of the base variant.
    Absent,
    /// The machine is prepared, or containerd does not answer yet.
    Starting,
    /// containerd serves, and has the images of the system.
    Serving(Health),
    /// It died, with these last words, or the machine cannot be prepared; it is tried again.
    Failed(String),
}
