//! Wrappers of raw system calls, and the place of `unsafe` code.
//!
//! System calls that need an async runtime are in `sys` of the runtime crate.
//! Each file wraps one part of the kernel's interface in safe functions.

pub mod arp;
pub mod block;
pub mod clock;
pub mod command_line;
pub mod dm;
pub mod efivar;
pub mod files;
#[cfg(test)]
mod fuzz_tests;
pub mod inherit;
pub mod input;
pub mod kmsg;
pub mod module;
pub mod mount;
mod netlink;
pub mod poll;
pub mod pressure;
pub mod quota;
pub mod random;
pub mod reboot;
pub mod router;
pub mod signal;
pub mod socket;
pub mod spawn;
pub mod terminal;
pub mod thread;
pub mod uevent;
pub mod vt;
pub mod watchdog;
pub mod xfs;
