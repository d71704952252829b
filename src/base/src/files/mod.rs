//! Names every file that the node keeps, and writes each so that a power cut leaves no half of it.
//!
//! The base of everyone who keeps something: a domain is given the [`File`], the
//! [`Dir`] or the part of [`Root`] that is its own, and never a path.
//!
//! ```text
//! tree    which places there are, on the ESP, the data partition and in memory
//! file    one place: bounded reads, whole writes
//! atomic  how a write is whole or not at all; for `init`, too
//! ```
//!
//! Invariants:
//! - Only this module makes a [`File`] or a [`Dir`], so a path is spelled out once.
//!
//! What this module does not do: mount anything, or know whether it is mounted
//! (`storage`).

pub mod atomic;
mod file;
mod tree;

pub use self::file::{Dir, Error, File};
pub use self::tree::{Credentials, Data, Ephemeral, Esp, Etcd, Node, PeerPki, Root, Sockets};
