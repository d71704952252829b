//! Builds the disk image: same inputs, same bytes.

pub mod layout;
