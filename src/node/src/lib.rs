//! The process `node` as a library: one directory a service.
//!
//! The crate knows the base, the runtime and the wire; within it each module knows only
//! those that the table in `tests/layers/node.rs` gives it:
//!
//! - The domains know each other through event values and typed handles: `storage`,
//!   `parameters`, `network`, `consensus`, then `curator` (the records in etcd), `cluster`
//!   (the state of this machine), `workload` (the parts of Kubernetes and what runs pods),
//!   `agent` and `roles` (the consequences), `update` (another system for this machine), and
//!   `tpm` (sealing to the machine's TPM).
//! - The faces show all that: `management` and `console`.
//! - `root` is the only module that knows every service; `daemon` is the process around it.
//! - `injection` breaks the node on purpose, in development images only.

pub mod agent;
pub mod cluster;
pub mod consensus;
pub mod console;
pub mod curator;
pub mod daemon;
#[cfg(feature = "fault-injection")]
pub mod injection;
pub mod management;
pub mod network;
pub mod parameters;
pub mod roles;
pub mod root;
pub mod storage;
pub mod tpm;
pub mod update;
pub mod workload;
