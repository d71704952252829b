//! Child processes; all of them are started here.
//!
//! A child gets only the environment and the arguments that are named here; its output
//! goes line by line into the log tree; it dies with the node, or when its [`Child`] is
//! dropped.
//!
//! ```text
//! Command --spawn--> Child --wait------------> Exit
//!    |                 +----terminate(grace)-> Exit   SIGTERM, then SIGKILL
//!    |                 +----drop-------------> SIGKILL
//!    +------run------> output, or Error::Failed with the last lines
//! ```
//!
//! Invariants:
//! - No child outlives the node: the kernel kills it when the thread that
//!   started it ends, and that thread ends with the process only.
//! - A child never waits for its output to be read, and never inherits a
//!   descriptor beyond the standard three.
//! - No wait for a child is one for the processes that it leaves behind.

mod child;
mod command;
mod error;
mod exit;
mod load;
mod output;
mod starter;

pub use self::child::Child;
pub use self::command::Command;
pub use self::error::Error;
pub use self::exit::Exit;
pub use self::load::{Load, find, loads, resident};

#[cfg(test)]
mod tests;
