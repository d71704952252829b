//! The messages of Polis, generated from `polis/v1/*.proto`. No logic lives here.

/// Version 1 of the messages.
pub mod v1 {
    include!(concat!(env!("OUT_DIR"), "/polis.v1.rs"));
}

/// The encoded `FileDescriptorSet` of all files, for reflection and strict parsing.
pub const DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bin"));
