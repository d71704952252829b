//! The node of Polis as a library: everything that `init` and `node` are made of.
//!
//! A directory is one concept. `supervisor`, `event`, `files`, `logtree`, `serial`,
//! `stage`, `canvas`, `trapdoor`, `sys`, `identity` and `pki` know no domain; the domains
//! know those, and each other only through event values and typed handles.
//! `root` is the only module that knows every service.

pub mod boot;
pub mod canvas;
pub mod cluster;
pub mod consensus;
pub mod console;
pub mod ctl;
pub mod curator;
pub mod environment;
pub mod event;
pub mod files;
pub mod identity;
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
