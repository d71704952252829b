//! The key of this node in the mesh (X25519). The node makes it, and it does not leave the
//! node's disk.
//!
//! The public half is in the node's record. The curve comes from the crate that the
//! identities of nodes use already; `ring` computes secrets of one exchange only.

use std::fmt;

use curve25519_dalek::montgomery::MontgomeryPoint;
use rand::TryRng as _;
use zeroize::{Zeroize as _, Zeroizing};

use polis_base::files;
use polis_base::hex;

/// Bytes of either half.
const LENGTH: usize = 32;

/// The reason why the node cannot use its key.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file cannot be read or written.
    #[error(transparent)]
    Files(#[from] files::Error),
    /// The kernel returns no random bytes.
    #[error("cannot make a key for the mesh")]
    Random(#[source] rand::rngs::SysError),
    /// The content of the file is not a key.
    #[error("{} is not a key of 32 bytes", path.display())]
    Malformed {
        /// The file.
        path: std::path::PathBuf,
    },
}

/// The public half, by which peers know the node.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct PublicKey([u8; LENGTH]);

impl PublicKey {
    /// The key with these bytes; `None` for zeros, which are not a valid key.
    #[must_use]
    pub fn new(bytes: [u8; LENGTH]) -> Option<Self> {
        (bytes != [0; LENGTH]).then_some(Self(bytes))
    }

    /// Its bytes.
    #[must_use]
    pub fn bytes(&self) -> &[u8; LENGTH] {
        &self.0
    }
}

impl fmt::Display for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex::encode(&self.0))
    }
}

impl fmt::Debug for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PublicKey({self})")
    }
}

/// The private half. Wiped when it is dropped.
pub struct PrivateKey(Zeroizing<[u8; LENGTH]>);

impl fmt::Debug for PrivateKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("…")
    }
}

impl PrivateKey {
    /// The key in `file`, which is made if there is none; its directory exists. Blocks.
    ///
    /// # Errors
    ///
    /// [`Error`]. A damaged file is never replaced: peers know the node by its key.
    pub fn load_or_make(file: &files::File) -> Result<Self, Error> {
        let Some(mut bytes) = file.read()? else {
            let mut key = Zeroizing::new([0; LENGTH]);
            rand::rngs::SysRng.try_fill_bytes(&mut *key).map_err(Error::Random)?;
            file.write(&*key)?;
            return Ok(Self(key));
        };
        let key = <[u8; LENGTH]>::try_from(bytes.as_slice());
        bytes.zeroize();
        let malformed = |_length| Error::Malformed { path: file.path().to_owned() };
        key.map(|key| Self(Zeroizing::new(key))).map_err(malformed)
    }

    /// Its public half.
    #[must_use]
    pub fn public(&self) -> PublicKey {
        PublicKey(MontgomeryPoint::mul_base_clamped(*self.0).to_bytes())
    }

    /// Its bytes, for the kernel, which clamps them as [`Self::public`] does.
    #[must_use]
    pub fn bytes(&self) -> &[u8; LENGTH] {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_public_half_is_that_of_the_standard() {
        // RFC 7748, section 6.1: Alice's keys.
        let private = [
            0x77, 0x07, 0x6d, 0x0a, 0x73, 0x18, 0xa5, 0x7d, 0x3c, 0x16, 0xc1, 0x72, 0x51, 0xb2,
            0x66, 0x45, 0xdf, 0x4c, 0x2f, 0x87, 0xeb, 0xc0, 0x99, 0x2a, 0xb1, 0x77, 0xfb, 0xa5,
            0x1d, 0xb9, 0x2c, 0x2a,
        ];
        let public = PrivateKey(Zeroizing::new(private)).public();
        let expected = "8520f0098930a754748b7ddcb43ef75a0dbf3a0d26381af4eba4a98eaa9b4e6a";
        assert_eq!(public.to_string(), expected);
    }

    #[test]
    fn a_key_is_made_once_and_stays() {
        let base = tempfile::tempdir().unwrap();
        let tree = files::Root::at(base.path());
        tree.data.mesh.create().unwrap();
        let first = PrivateKey::load_or_make(&tree.data.mesh_key).unwrap();
        let second = PrivateKey::load_or_make(&tree.data.mesh_key).unwrap();
        assert_eq!(first.public(), second.public());
        assert_eq!(format!("{first:?}"), "…");
        tree.data.mesh_key.write(b"short").unwrap();
        let error = PrivateKey::load_or_make(&tree.data.mesh_key).unwrap_err();
        assert!(error.to_string().ends_with("is not a key of 32 bytes"), "{error}");
        assert_eq!(tree.data.mesh_key.read().unwrap().as_deref(), Some(&b"short"[..]));
    }

    #[test]
    fn zeros_are_not_a_key() {
        assert_eq!(PublicKey::new([0; LENGTH]), None);
    }
}
