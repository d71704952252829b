//! What a verifier and a node share of the TPM: its formats, and the cryptography of its
//! specification.

pub mod derive;
pub mod format;
