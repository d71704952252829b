//! The builder of the disk image: same inputs, same bytes.
//!
//! [`build()`] runs every step whose inputs have changed and leaves the image and its
//! parts in one folder, with a [`Manifest`] that describes them. [`assemble`] puts
//! existing parts on another disk, with other parameters. `docs/images.md` has the
//! details.
//!
//! Invariants:
//! - No root, no mount, nothing installed on the host.
//! - The library prints nothing: it calls an [`Observer`].

mod apt;
#[cfg(test)]
mod archive_tests;
mod atomic;
mod authenticode;
mod authorities;
mod boot_files;
mod build;
mod bundle;
mod command_line;
mod cpio;
mod difference;
mod digest;
mod disk;
mod elf;
mod error;
mod etcd;
mod firmware;
pub mod golang;
mod guard;
mod inspect;
mod lock;
mod manifest;
mod microcode;
mod mirror;
mod modules;
mod moved;
pub mod oci;
mod packages;
mod payload;
pub mod program;
mod programs;
mod provide;
mod root;
pub mod signing;
mod step;
mod system;
mod tar;
mod tree;
mod uki;
mod verify;
pub mod workload;

pub use authenticode::authenticode_hash;
pub use boot_files::Signature;
pub use build::{Config, build};
pub use bundle::bundle;
pub use digest::sha256;
pub use error::{Error, Result};
pub use guard::Guard;
pub use inspect::{Inspection, Part, System, inspect, is_qcow2};
pub use lock::{Lock, Package};
pub use manifest::{Format, Kind, Manifest, Options, SIZE_DEFAULT, Sizes, Variant, assemble};
pub use microcode::{Microcode, Vendor};
pub use moved::Moved;
pub use packages::Category;
pub use payload::Source;
pub use step::{Observer, Report, Silent, Unit};
pub use tree::Tree;
pub use verify::verify_reproducible;

pub use polis_base::{secret, sys::terminal::without_echo};
pub use polis_bundle::check_version;
pub use polis_layout::{Verity, partitions as layout};
use polis_layout::{esp, verity};
