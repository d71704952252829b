//! The update bundle: one file with everything that a machine needs for another system.
//!
//! ```text
//! | magic 16 | key 32 | signature 64 | length 4 | manifest, JSON | kernel image | system |
//! |<-------->|                       |<------------------------>|  signed, by Ed25519
//! ```
//!
//! The manifest names size and SHA-256 of the two parts, so the one signature covers the
//! whole file. It is written by the builder of images and read front to back, so a bundle
//! can be checked while it arrives.
//!
//! Invariants:
//! - Nothing of the manifest is used before its signature holds.
//! - A file has exactly one reading: a known field that comes twice is an error, and nothing
//!   follows the last part.
//! - A field that this version does not know is ignored. A bundle that a reader without it must not
//!   use has another format, and its number is signed, too.
//!
//! What this crate does not do: choose the trusted keys, or write to a disk.

mod etcd;
#[cfg(test)]
mod fuzz_tests;
mod kubernetes;
mod manifest;
mod measure;
mod reader;
mod refusal;
mod writer;

pub use self::etcd::{ClusterVersion, EtcdRefusal, EtcdTarget, NoClusterVersion};
pub use self::kubernetes::{KubernetesProgram, KubernetesRefusal, KubernetesTarget};
pub use self::manifest::{Manifest, Part, Target, check_version};
pub use self::measure::{
    RECIPE as MEASURE_RECIPE, Registers, Unmeasurable, approval, policy, registers,
};
pub use self::reader::{Bundle, Error};
pub use self::refusal::{PartName, Refusal};
pub use self::writer::write;

/// The security level of these sources, in every bundle that is built from them. Raised by
/// the commit that closes a security hole which must not come back: nodes refuse what is
/// below their own.
pub const SECURITY_LEVEL: u32 = 1;

/// The first bytes of every bundle. The last one is the number of the format, which rises with what
/// a reader must understand: a reader refuses every other number.
const MAGIC: [u8; 16] = *b"POLIS-UPDATE\0\0\0\x01";
/// Bytes of a manifest at most: several times what one needs.
const MANIFEST_MAX: usize = 16 * 1024;
/// Bytes of a public key, of a signature, and of the manifest's length.
const KEY: usize = 32;
const SIGNATURE: usize = 64;
const LENGTH: usize = 4;

/// The bytes that the release key signs.
fn signed(manifest: &[u8]) -> Vec<u8> {
    let length = u32::try_from(manifest.len()).unwrap_or(u32::MAX).to_le_bytes();
    [&MAGIC[..], &length, manifest].concat()
}
