//! Stories of whole machines, told against QEMU and the serial line.
//!
//! Each file is a theme, each test a story, and each story gets a folder in
//! `target/e2e` with the logs of every boot. `world` is what they share.
//!
//! A story waits for event lines of the serial port, as its contract has them, or
//! asks the operator's program again until a deadline. `cargo xtask test e2e` builds
//! the image and runs them; `docs/testing.md` says how to run one.
#![cfg(test)]

mod attended;
mod console;
mod deaths;
mod disaster;
mod disks;
mod esp;
mod first_boot;
mod fleet;
mod guru;
mod hardware;
mod hostile;
mod keys;
mod locked;
mod newcomer;
mod operate;
mod outage;
mod owner;
mod power_cut;
mod recorded;
mod replaced;
mod restart;
mod segment;
mod stolen;
mod storage;
mod storage_faults;
mod storage_kinds;
mod three;
mod world;
