//! The node of Polis as a library: everything that `init` and `node` are made of.
//!
//! A directory is one concept, and each knows only those before it (`layers` has the
//! whole table, and checks it):
//!
//! - The base knows no domain. How the node lives: `event`, `supervisor`, `logtree`,
//!   `serial`, `stage`, `trapdoor`. The machine: `sys`, `environment`, `files`, `canvas`,
//!   `tpm`, `recovery`. Who is who, and how one calls: `identity`, `pki`, `rpc`, `nodes`.
//!   How it is written: `hex`, `endpoint`.
//! - The domains know the base, and each other through event values and typed handles:
//!   `storage`, `parameters`, `network`, `consensus`, then `curator` (the records in
//!   etcd), `cluster` (what this machine is), `liaison` and `roles` (what follows of it).
//! - The faces show all that: `management` and `console`.
//! - `root` is the only module that knows every service; `node` is the process around it.
//! - Two other programs share the base: `boot` is `init`, `ctl` is `polisctl`.

pub mod boot;
pub mod canvas;
pub mod cluster;
pub mod consensus;
pub mod console;
pub mod ctl;
pub mod curator;
pub mod endpoint;
pub mod environment;
pub mod event;
pub mod files;
pub mod hex;
pub mod identity;
#[cfg(test)]
mod layers;
pub mod liaison;
pub mod logtree;
pub mod management;
pub mod network;
pub mod node;
pub mod nodes;
pub mod parameters;
pub mod pki;
pub mod recovery;
pub mod roles;
pub mod root;
pub mod rpc;
pub mod serial;
pub mod stage;
pub mod storage;
pub mod supervisor;
pub mod sys;
pub mod tpm;
pub mod trapdoor;
