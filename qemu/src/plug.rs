//! The places of a segment, and the end of its cable that goes into a machine.

use std::path::PathBuf;

/// The place where a machine is plugged in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plug {
    /// The switch listens there.
    pub socket: PathBuf,
    /// Which machine it is; its hardware address follows from it.
    pub machine: u8,
}

impl Plug {
    /// The hardware address of the machine's card.
    #[must_use]
    pub fn mac(&self) -> String {
        self.hardware_address().map(|byte| format!("{byte:02x}")).join(":")
    }

    pub(crate) fn hardware_address(&self) -> [u8; 6] {
        [0x52, 0x54, 0, 0x70, 0x6f, self.machine]
    }
}

/// A place in the segment. Machines count from zero; the gateway has its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Port {
    /// A machine.
    Machine(u8),
    /// The way out.
    Gateway,
}
