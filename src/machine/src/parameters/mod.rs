//! The node parameters of this machine: a service that finds them once a boot.
//!
//! [`Service`] looks in every place, has every field checked, and publishes [`Loaded`].
//! The cluster manager, `network` and `console` wait for it, and never see an unchecked
//! value.
//!
//! ```text
//! fw_cfg ------+
//! SMBIOS ------+
//! ESP ---------+--> bytes --> polis_wire::parameters --> Loaded (event value)
//! config disk -+                                     +-> trapdoor, a code for each cause
//! ```
//!
//! Invariants:
//! - Where several places carry parameters, the first in this order wins, always: the decision
//!   waits for the driver of fw_cfg, it does not race with it.
//! - Parameters that are there and cannot be used stop the boot.
//!
//! What this module does not do: decide what the machine does with them (`cluster`),
//! even when they are missing: a node with a cluster does not need them.

mod config_disk;
mod places;
mod service;
mod smbios;

use std::sync::Arc;

pub use polis_wire::parameters::*;

pub use self::service::{Config, RunError, Service};

/// The event value of this module: `None` until every place was looked at.
pub type Known = Option<Arc<Loaded>>;
