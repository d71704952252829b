//! A disk with Polis: what the builder of images and the installer put on one.
//!
//! ```text
//! | GPT | POLIS-ESP | POLIS-SYSTEM-A: file system, hash tree | POLIS-SYSTEM-B | free | GPT' |
//!    partitions  esp                              verity
//! ```
//!
//! Pure: bytes and tables come out, and the caller writes them. A [`Window`] reads one partition of
//! a disk.
//!
//! What this crate does not do: make POLIS-DATA (`storage` of the machine), or write to a
//! disk.

pub mod esp;
pub mod partitions;
pub mod verity;
mod window;

pub use self::verity::Verity;
pub use self::window::Window;

/// The sources of this crate: the builder of images begins again when one of them changes.
pub const SOURCES: &str =
    concat!(include_str!("esp.rs"), include_str!("partitions.rs"), include_str!("verity.rs"));
