//! The container runtime of this node: containerd, with `runc` and gVisor below it.
//!
//! ```text
//! [stopped] --the role, a data partition--> [preparing] --host--> [starting]
//!     ^                                                                 | it answers
//!     |                                                             [importing]
//!     |                                                                 | images of the system
//!     +-- [ending] <---------- the role is taken away ------------- [serving]
//!       pods, containerd, mounts
//! ```
//!
//! A run that fails publishes why ([`Status::Failed`]), and the next one begins at
//! *preparing*.
//!
//! Pods outlive containerd, and the node: each has a shim, which is a child of `init` once
//! containerd is gone. A containerd that is started again finds them by its state.
//!
//! Invariants:
//! - containerd starts only after the quota of workloads and the mounts are in place (`host`).
//! - Kubernetes sees no runtime without the images of the system: they are imported before
//!   the status is [`Status::Serving`].
//!
//! - No pod is left when the status is [`Status::Stopped`].
//!
//! ```text
//! service  whether the node runs pods, and their end
//! daemon   one process of containerd
//! places   where everything is
//! config   its files                                     pure
//! registries  how it reaches registries of images
//! layout, import   the images of the system
//! health, pods     what it says of itself, and of its pods
//! ```

pub mod config;
mod daemon;
pub mod gvisor;
pub mod health;
pub mod import;
pub mod layout;
mod places;
pub mod pods;
pub mod registries;
pub mod service;

pub use self::daemon::Error;
pub use self::health::{Condition, Health};
pub use self::places::Config;
pub use self::pods::Pods;
pub use self::service::Service;

/// The published status.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Status {
    /// The node does not know yet whether it is a worker, and an earlier process of it may have
    /// left pods; or it has no data partition.
    #[default]
    Unknown,
    /// The node has not the role of a Kubernetes worker, and no pods.
    Stopped,
    /// The image of this machine has no containerd: it is of the base variant.
    Absent,
    /// The machine is prepared, or containerd does not answer yet.
    Starting,
    /// containerd serves, and has the images of the system.
    Serving(Health),
    /// The role is taken away, or the machine ends: the pods end, then containerd.
    Ending,
    /// It died, with these last words, or the machine cannot be prepared; it is tried again.
    Failed(String),
}
