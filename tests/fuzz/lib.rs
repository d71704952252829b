//! The fuzz targets' common part: runs a parser on damaged input, and bounds what it uses.
//!
//! ```text
//! samples --+--> whole -----------------+
//!           +--> damaged 1 to 8 times --+--> the target --> panic, too much memory or time?
//! nothing  ----> random bytes ----------+         |
//!                                                 v
//!                                      the shortest input that fails, and its seed
//! ```
//!
//! A target is a test beside its parser. It gives samples, which are valid input of every
//! form, and a function that reads one input and states what must hold; see
//! `docs/testing.md` for the list. Damage reaches deeper than random bytes: a decoder
//! rejects nearly all of those by their first byte.
//!
//! Invariants:
//! - Every sample is accepted undamaged, so a target never ends at the first check of its
//!   parser unnoticed.
//! - A seed decides all inputs, and the failure prints it.
//!
//! What this crate does not do: measure coverage, which needs a nightly compiler.

mod damage;
mod heap;
mod target;

pub use self::target::{Accepted, Target};
