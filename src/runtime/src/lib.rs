//! The environment of a service: event values, the supervisor, the log tree, and the
//! child processes.
//!
//! This is a crate beside `polis-base`, and not a feature of it, because cargo builds
//! the union of the features that two programs ask for: `init` would link the async
//! runtime whenever it is built together with `node`.

pub mod board;
pub mod event;
pub mod lines;
pub mod logtree;
pub mod save;
pub mod supervisor;
pub mod sys;
