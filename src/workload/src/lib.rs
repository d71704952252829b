//! The workload stack of this node: the parts of Kubernetes that its roles ask for.
//!
//! `root` starts [`Service`], which follows the node's roles. For the role Kubernetes
//! controller it runs the API server on the local socket of etcd, the controller manager and
//! the scheduler as child processes, and keeps their certificates and the cluster's own
//! objects. For the role Kubernetes worker it runs kubelet, kube-proxy and a name server
//! beside containerd.
//!
//! ```text
//! role, image carries the programs, etcd votes
//!      |
//!      v
//! certificates --> apiserver --> reconciler --> controller-manager
//!   files of this node   ^           |            scheduler
//!      |                 +- RBAC ----+
//!      +--> access (users of Polis)
//! ```
//!
//! Each arrow is a wait for [`Status`], in which a part is *ready* when its checks succeed. The
//! controller manager and the scheduler wait for one attempt of the reconciler, not for its
//! success.
//!
//! ```text
//! site            where everything is, and which addresses it uses
//! args            the command lines                       pure
//! configuration   the files that they name                pure
//! credentials     the certificates of a controller        pure
//! objects         the cluster's own objects               pure
//! certificates    makes, writes and renews them           a service
//! component       one child process, and its health
//! tokens          signs those of service accounts         a service
//! audit           copies the audit log into the log       a service
//! confinement     the rights of each program              pure
//! names           those of the API, in the configuration
//! nodes           what the records want of Node objects   pure
//! taints          the same, of their taints               pure
//! reconciler      applies the objects                     a service
//! api             requests to the parts on this machine
//! http_health     health checks over plain HTTP
//! socket          where these call this process
//! watch           the objects of one kind, and their changes
//! access          lets users of Polis in                  a service
//! parts           the state of each part, and its event lines
//! controller      starts all of it                        a service
//! worker          what runs pods                          a service
//! drain           moves the pods of this node away        a service
//! service         when
//!
//! host     control groups, kernel parameters, mounts, quotas    plan -> apply
//! mesh     the encrypted network between the pods of all nodes  records -> plan
//! runtime  containerd, and the images of the system in it
//! csi      the volumes of pods
//! ```
//!
//! Invariants:
//! - A part that dies is restarted for ever, with backoff; it never opens the trapdoor, and
//!   the node's own readiness does not depend on it.
//! - A node without a Kubernetes role has none of it, neither a group, nor a mount, nor a
//!   process.
//! - A private key that other nodes do not need is made on this node and stays there.
//! - A part whose etcd has lost its quorum is not restarted for that.
//!
//! What this module does not do: run etcd (`consensus`), or give roles to nodes
//! (`curator`).

// The configuration of kubelet is one `json!`, which takes a step for each of its words.
#![recursion_limit = "256"]

mod access;
mod api;
mod args;
mod audit;
mod certificates;
mod component;
mod configuration;
mod confinement;
mod controller;
mod credentials;
pub mod csi;
pub mod drain;
pub mod host;
mod http_health;
pub mod mesh;
mod names;
mod nodes;
mod objects;
mod parts;
mod reconciler;
pub mod runtime;
mod service;
mod site;
mod socket;
mod taints;
mod tokens;
mod watch;
mod worker;

pub use self::access::{Error as AccessError, Identity};
pub use self::api::{Answer, Api, Error as ApiError};
pub use self::certificates::Error as CertificatesError;
pub use self::component::Error as ComponentError;
pub use self::parts::{Deaths, Part, PartState, Status};
pub use self::service::{Config, Service};
pub use self::site::{API_PORT, KUBELET_PORT, NODE_PORTS, Site};
