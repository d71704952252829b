//! Every file that the node keeps, with writes that a power cut never leaves half done.
//!
//! Each part of the node that stores something receives the [`File`], the [`Dir`] or
//! the part of [`Root`] that belongs to it, and never a path.
//!
//! ```text
//! tree      which places there are, on the ESP, the data partition and in memory
//! file      one place: bounded reads, whole writes
//! draft     large files of a directory, written in pieces and named once they are checked
//! atomic    how a write to the data partition is whole or not at all
//! owner     which files belong to the user of a program, or are read by it
//! in_place  the same for the ESP, whose file system has no journal; for `init`, too
//! ```
//!
//! Invariants:
//! - Only this module makes a [`File`] or a [`Dir`], so a path is spelled out once.
//!
//! What this module does not do: mount anything, or know whether it is mounted
//! (`storage`).

mod atomic;
mod draft;
mod error;
mod file;
pub mod in_place;
mod kubernetes;
mod owner;
mod regular;
mod sockets;
mod tree;

pub use self::draft::{Draft, Space};
pub use self::error::Error;
pub use self::file::{Dir, File};
pub use self::kubernetes::{Kubernetes, KubernetesRun, Pair};
pub use self::owner::Group;
pub use self::sockets::Sockets;
pub use self::tree::{Credentials, Data, Ephemeral, Esp, Etcd, Guru, Node, PeerPki, Root};
