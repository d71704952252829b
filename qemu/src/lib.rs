//! Runs Polis in virtual machines, for the tests, the demonstrations and the measurements.
//!
//! ```text
//! image::Image --> args::Config --argv--> machine::Machine --+--> serial   what the guest says
//!                  (pure)                 (one QEMU child)   +--> qmp      what the outside does to it
//!                                                            +--> console  the guest's hvc0
//!                 segment::Segment --plug--^                 +--> network
//!                 fleet::Fleet: several machines on a segment, one cluster
//! ```
//!
//! A story starts a [`Machine`], waits for event lines of its serial port and
//! pulls at it from the outside. Nothing here sleeps or guesses: whatever the
//! guest does is learnt from a line, from QMP, or from the end of the process.
//!
//! What this crate does not do: build images (`polis-image`), or know what the
//! node means by its lines (the stories in `tests/`).

pub mod args;
pub mod cache;
pub mod cut;
pub mod disk;
pub mod fleet;
mod gateway;
pub mod history;
pub mod host;
pub mod image;
pub mod kernel;
mod lease;
pub mod line;
pub mod machine;
pub mod operator;
pub mod patience;
pub mod qmp;
pub mod recording;
pub mod screen;
pub mod segment;
pub mod serial;
pub mod template;
pub mod tpm;

pub use args::{Accelerator, Bus, Config, Disk, Firmware, Network, Reset, Screen};
pub use fleet::Fleet;
pub use image::Image;
pub use line::Event;
pub use machine::{Error, Machine};
pub use operator::Operator;
pub use segment::{Port, Segment};
