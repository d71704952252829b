//! The base library that `init`, `node` and `polisctl` share.
//!
//! It contains no domain logic and links no async runtime, so that `init` cannot use
//! one.
//!
//! - How a boot is described: `boot`, `stage`, `serial`, `trapdoor`, `environment`, `cause`.
//! - The machine: `sys`, `files`, `canvas`, `recovery`, `extra`.
//! - The users of the system: `users`. What a person keeps secret: `secret`.
//! - How bytes are written: `hex`, `crockford`.

pub mod boot;
pub mod canvas;
pub mod cause;
pub mod crockford;
pub mod environment;
pub mod extra;
pub mod files;
pub mod hex;
pub mod recovery;
pub mod secret;
pub mod serial;
pub mod stage;
pub mod sys;
pub mod trapdoor;
pub mod users;
