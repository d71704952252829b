//! The node parameters of this machine: a service that finds them once a boot.
//!
//! [`Service`] looks in every place, has every field checked, and publishes [`Loaded`].
//! The cluster manager, `network` and `console` wait for it, and never see an unchecked
//! value.
//!
//! ```text
//! fw_cfg ------+
//! ESP ---------+
//! SMBIOS ------+--> bytes --> polis_wire::parameters --> Loaded (event value)
//! config disk -+                                     +-> trapdoor, a code for each cause
//! metadata ----+
//! ```
//!
//! Invariants:
//! - Where several places carry parameters, the first in this order wins, always: the decision
//!   waits for the driver of fw_cfg, it does not race with it.
//! - Parameters that are there and cannot be used stop the boot.
//! - A metadata service is asked only where no place of the machine has any, by a machine without
//!   a home whose firmware names a cloud.
//!
//! What this module does not do: decide what the machine does with them (`cluster`),
//! even when they are missing: a node with a cluster does not need them.

mod arrivals;
mod cloud;
mod config_disk;
mod decide;
mod dmi;
mod given;
mod metadata;
mod places;
mod service;
mod smbios;
mod survey;

use std::sync::Arc;

pub use polis_wire::parameters::*;

pub use self::metadata::{ADDRESS as METADATA_ADDRESS, address_v6 as metadata_v6};
pub use self::service::{Config, RunError, Service};
pub use self::survey::{Survey, Surveyor, given_content};

/// The event value of this module: `None` until every place was looked at.
pub type Known = Option<Arc<Loaded>>;

/// The event value that says whether a metadata service is asked now: until [`Known`] has a
/// value, the network is then that of a machine without parameters, which has an address.
pub type Asking = bool;
