//! The update of the whole cluster: its plan, and the journal by which the leader of the moment
//! carries it out. Pure.
//!
//! ```text
//! facts of all nodes, bundle --plan--> order of the nodes --> journal in etcd
//!                                                               |  ^
//!         heartbeats of the nodes --facts--> step(journal) -----+  | written, fenced
//!                  ^                             \----------------/
//!                  \--turn: in the answer to the heartbeat of one node
//! ```
//!
//! | file | content |
//! |---|---|
//! | `facts` | what the leader knows of each node, and why a node cannot be counted on |
//! | `plan` | which nodes, in which order, or why there is no plan |
//! | `journal` | the next change of the journal, and what it waits for |
//!
//! Invariants:
//! - One node has a turn at a time. It gets it, and the leave to restart, only while every node is
//!   healthy and etcd can spare it.
//! - No node gets a turn after one that failed, until an owner resumes.
//! - The leader of the moment is the last, or before workers alone: those are the last where the
//!   minor version of Kubernetes rises.
//!
//! What this module does not do: read heartbeats or write records (`serve::updating`), or put a
//! system on a disk (`update`, on each node).

pub mod facts;
pub mod journal;
pub mod plan;

pub use self::facts::{Fact, Facts, Fault};
pub use self::journal::{Control, Next};
pub use self::plan::{Bundle, Refusal};
