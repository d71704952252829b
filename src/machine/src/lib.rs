//! The machine under a node: its disks, network, TPM, parameters and systems.
//!
//! Nothing here knows a cluster. Each module is one service, or one device:
//!
//! - `tpm` seals to the machine's TPM;
//! - `storage` finds, opens and prepares the encrypted data partition;
//! - `parameters` reads the configuration that the machine got at its first boot;
//! - `network` gives the machine its addresses, by its parameters or by DHCP;
//! - `time` keeps its clock, by chronyd;
//! - `update` writes another system beside the one that runs;
//! - `install` writes the one that runs to another disk;
//! - `mirror` keeps the disk that the machine runs from on another one, too;
//! - `volumes` takes further disks for volumes of workloads.

pub mod install;
pub mod mirror;
pub mod network;
pub mod parameters;
pub mod storage;
pub mod time;
pub mod tpm;
pub mod update;
pub mod volumes;
