//! The files that the boot stub adds to the initramfs, and `init` hands on: the signed measurements
//! of the kernel image, under systemd's names.
//!
//! What this module does not do: read them (`polis_machine::tpm`).

/// Where the boot stub puts them in the initramfs.
pub const IN_INITRAMFS: &str = "/.extra";

/// Where the node finds them, in memory.
pub const DIRECTORY: &str = "/run/extra";

/// The signatures of the measurements, JSON: the section `.pcrsig`.
pub const SIGNATURE: &str = "tpm2-pcr-signature.json";

/// The key that signed them, PEM: the section `.pcrpkey`.
pub const PUBLIC_KEY: &str = "tpm2-pcr-public-key.pem";

/// Bytes of such a file at most: several times what one needs.
pub const SIZE_MAX: u64 = 16 * 1024;
