//! The folder of an owner's keys: made once, as a whole, and read by each build.
//!
//! ```text
//! platform.key  exchange.key  signature.key   RSA-2048, encrypted (PKCS #8, PBES2)
//! platform.crt  exchange.crt  signature.crt   their certificates (X.509)
//! policy.key    policy.pub                    RSA-2048
//! release.key   release.pub                   Ed25519
//! PK.auth       KEK.auth      db.auth         for firmware in setup mode
//! dbx.auth                                    what was revoked; not there before that
//! ```
//!
//! Invariants:
//! - The folder appears whole, or not at all; one that has anything in it is left alone, but for
//!   `dbx.auth`, which is replaced as a whole.
//! - Private keys have mode 0600 from their first byte on, the folder 0700.

mod files;
mod make;
mod opened;
mod revoked;
mod show;
#[cfg(test)]
pub(crate) mod tests;

pub use self::files::ensure_free;
pub(super) use self::files::public_file;
pub use self::make::Keys;
pub use self::opened::{ImageSigner, ReleaseKey};
pub use self::revoked::{revoke, revoked};
pub use self::show::{Private, Shown, show};
