//! The mesh: one WireGuard tunnel from each node with a role of Kubernetes to each other,
//! through which pods reach pods, and the API server reaches webhooks.
//!
//! ```text
//! records of the nodes --> plan --> device, address, routes, peers --> actions --> kernel
//! key file ----------------^                            the kernel's --^
//! ```
//!
//! ```text
//! key      the key of this node
//! plan     records -> mesh; peers -> changes      pure
//! records  what the records mean for this node    pure
//! actions  mesh, kernel -> actions                pure
//! kept     the records on the disk, for a boot without a leader
//! kernel   reads the kernel, carries out actions
//! rules    the table of nftables
//! status   the event values
//! service  when
//! ```
//!
//! A peer may send from the addresses of its own pods and no others: the kernel drops what
//! a node claims to be from another node's pod.
//!
//! Invariants:
//! - Two peers never have an address in common, and never a key
//!   (`no_address_belongs_to_two_peers`).
//! - A change of one peer leaves the sessions of all others alone
//!   (`applied_changes_leave_nothing_to_change`).
//!
//! What this module does not do: allocate prefixes, which the leader does (`curator`), or
//! filter packets.

pub mod actions;
mod kept;
pub mod kernel;
pub mod key;
pub mod plan;
pub mod records;
pub mod rules;
#[cfg(test)]
mod samples;
mod service;
mod status;

pub use self::key::PublicKey;
pub use self::plan::{Change, Member, Mesh, Peer, Present, Rejected, changes, plan};
pub use self::service::{Config, Service};
pub use self::status::{Outputs, PeerStatus, Stage, Status};
pub use polis_wire::pod_network::Prefix;

/// The device.
pub const DEVICE: &str = "polis0";
/// The UDP port of every node.
pub const PORT: u16 = 7838;
/// The room that WireGuard's own header over IPv6 leaves in an Ethernet frame.
pub const MTU: u32 = 1420;
