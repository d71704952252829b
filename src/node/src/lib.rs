//! The process `node`: the tree of its services, and how it shows itself.
//!
//! The services are in crates of their own, one below the other: `polis-machine` (disks,
//! network, TPM, parameters, systems), `polis-control` (etcd, the curator, the membership) and
//! `polis-workload` (Kubernetes). Here is what brings them together; each module knows only
//! those that the table in `tests/layers/modules.rs` gives it:
//!
//! - `forwarding` sends the log to where the cluster wants it, `shipping` the snapshots of etcd.
//! - `firewall`, `agent` and `roles` are the consequences of a membership.
//! - `management` and `console` show all that.
//! - `maintenance` is all that runs on a machine that holds at a guru meditation.
//! - `root` is the only module that knows every service; `daemon` is the process around it.
//! - `injection` breaks the node on purpose, in development images only.

pub mod agent;
pub mod console;
pub mod daemon;
pub mod firewall;
pub mod forwarding;
#[cfg(feature = "fault-injection")]
pub mod injection;
pub mod maintenance;
pub mod management;
pub mod roles;
pub mod root;
pub mod shipping;
