//! Virtual machines that run Polis, for the tests, the demonstrations and the measurements.
//!
//! ```text
//! image::Image --> args::Config --argv--> machine::Machine --+--> serial   what the guest says
//!                  (pure)                 (one QEMU child)   +--> qmp      what is done to it
//!                                                            +--> console  the guest's hvc0
//!                 segment::Segment --plug--^                 +--> network
//!                 fleet::Fleet: several machines on a segment, one cluster
//! ```
//!
//! A story starts a [`Machine`], waits for event lines of its serial port and acts on
//! it from the outside. The crate never sleeps or guesses: it observes the guest by its
//! lines, by QMP, or by the end of the process.
//!
//! What this crate does not do: build images (`polis-image`), or interpret the node's
//! lines (the stories in `tests/`).

pub mod args;
pub mod cache;
pub mod capture;
pub mod cut;
pub mod deadline;
pub mod disk;
pub mod fleet;
mod frame;
mod gateway;
pub mod history;
pub mod host;
pub mod image;
mod ipv6;
pub mod kernel;
mod lease;
pub mod line;
pub mod machine;
pub mod operator;
pub mod plug;
pub mod processor;
pub mod qmp;
pub mod recording;
pub mod scan;
pub mod scratch;
pub mod screen;
pub mod segment;
pub mod serial;
pub mod template;
pub mod tpm;
mod vlan;

pub use args::{Accelerator, Bus, Config, Disk, Firmware, Network, Reset, Screen, Serial};
pub use fleet::Fleet;
pub use image::Image;
pub use line::Event;
pub use machine::{Error, Machine};
pub use operator::Operator;
pub use plug::Port;
pub use segment::Segment;
