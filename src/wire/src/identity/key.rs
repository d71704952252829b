//! The Ed25519 key of a node: generation, storage and export.
//!
//! Invariants:
//! - [`ensure`] never replaces a key that is there: a damaged one is an error,
//!   because a new key would be another node.
//! - `Debug` shows the node ID only.

use std::fmt;
use std::io;

use ed25519_dalek::pkcs8::spki::der::pem::LineEnding;
use ed25519_dalek::pkcs8::{self, DecodePrivateKey as _, EncodePrivateKey as _, KeypairBytes};
use ed25519_dalek::{Signer as _, SigningKey};
use rand::TryRng as _;
use rand::rngs::SysRng;
use zeroize::{Zeroize as _, Zeroizing};

use super::{Identity, NodeId};

/// The secret key of this node. Clones are wiped from memory like the original.
#[derive(Clone)]
pub struct NodeKey(SigningKey);

/// Why a usable node key is missing.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The key does not sign a certificate of itself.
    #[error("cannot sign with the node key")]
    Proof(#[source] rcgen::Error),
    /// The kernel gave no random bytes.
    #[error("cannot make a node key: no random bytes")]
    Random(#[source] rand::rngs::SysError),
    /// The store could not be read.
    #[error("cannot read the node key")]
    Read(#[source] io::Error),
    /// The store could not be written.
    #[error("cannot store the node key")]
    Write(#[source] io::Error),
    /// The stored bytes are not an Ed25519 key.
    #[error("the stored node key is damaged")]
    Damaged(#[source] pkcs8::Error),
    /// The key cannot be written as PKCS#8.
    #[error("cannot encode the node key")]
    Encode(#[source] pkcs8::Error),
}

/// Where the node key is kept; `storage` provides it.
pub trait Store {
    /// Reads the key; `None` if the store holds no key.
    ///
    /// # Errors
    ///
    /// When the store does not answer.
    fn read(&self) -> io::Result<Option<Zeroizing<Vec<u8>>>>;

    /// Stores the key so that a power cut leaves either nothing or all of it.
    ///
    /// # Errors
    ///
    /// When it may not be on the disk.
    fn write(&self, key: &[u8]) -> io::Result<()>;
}

/// Reads the node key; if the store is empty, generates and stores one. Blocks.
///
/// # Errors
///
/// [`Error`]; a stored key that cannot be parsed is left in place.
pub fn ensure(store: &impl Store) -> Result<NodeKey, Error> {
    if let Some(stored) = store.read().map_err(Error::Read)? {
        return NodeKey::from_pkcs8_der(&stored);
    }
    let key = NodeKey::generate()?;
    store.write(&key.to_pkcs8_der()?).map_err(Error::Write)?;
    Ok(key)
}

impl NodeKey {
    /// Makes a new key from the kernel's random bytes.
    ///
    /// # Errors
    ///
    /// [`Error::Random`].
    pub fn generate() -> Result<Self, Error> {
        let mut seed = Zeroizing::new([0; 32]);
        SysRng.try_fill_bytes(seed.as_mut()).map_err(Error::Random)?;
        Ok(Self(SigningKey::from_bytes(&seed)))
    }

    /// The key with these private bytes.
    #[must_use]
    pub fn from_seed(seed: &[u8; 32]) -> Self {
        Self(SigningKey::from_bytes(seed))
    }

    /// Reads a key as [`NodeKey::to_pkcs8_der`] writes it.
    ///
    /// # Errors
    ///
    /// [`Error::Damaged`].
    pub fn from_pkcs8_der(der: &[u8]) -> Result<Self, Error> {
        SigningKey::from_pkcs8_der(der).map(Self).map_err(Error::Damaged)
    }

    /// A certificate that proves possession of the key, and nothing more.
    ///
    /// # Errors
    ///
    /// [`Error::Proof`].
    pub fn proof(&self) -> Result<Vec<u8>, Error> {
        let pem = self.to_pkcs8_pem()?;
        let pair = rcgen::KeyPair::from_pem(&pem).map_err(Error::Proof)?;
        let mut parameters = rcgen::CertificateParams::default();
        parameters.distinguished_name = rcgen::DistinguishedName::new();
        parameters.distinguished_name.push(rcgen::DnType::CommonName, self.id().to_string());
        parameters.extended_key_usages = vec![rcgen::ExtendedKeyUsagePurpose::ClientAuth];
        Ok(parameters.self_signed(&pair).map_err(Error::Proof)?.der().to_vec())
    }

    /// The name of the node that holds this key.
    #[must_use]
    pub fn id(&self) -> NodeId {
        NodeId::from_public_key(&self.public_key())
    }

    /// The public part.
    #[must_use]
    pub fn identity(&self) -> Identity {
        Identity::new(self.public_key())
    }

    /// The raw public key.
    #[must_use]
    pub fn public_key(&self) -> [u8; 32] {
        self.0.verifying_key().to_bytes()
    }

    /// Signs `message`.
    #[must_use]
    pub fn sign(&self, message: &[u8]) -> [u8; 64] {
        self.0.sign(message).to_bytes()
    }

    /// The key as PKCS#8 version 1: the public key is left out, because OpenSSL
    /// cannot read version 2.
    ///
    /// # Errors
    ///
    /// [`Error::Encode`].
    pub fn to_pkcs8_der(&self) -> Result<Zeroizing<Vec<u8>>, Error> {
        let der = self.with_version_1(KeypairBytes::to_pkcs8_der)?;
        Ok(Zeroizing::new(der.as_bytes().to_vec()))
    }

    /// The same in PEM, for etcd.
    ///
    /// # Errors
    ///
    /// [`Error::Encode`].
    pub fn to_pkcs8_pem(&self) -> Result<Zeroizing<String>, Error> {
        self.with_version_1(|key| key.to_pkcs8_pem(LineEnding::LF))
    }

    fn with_version_1<T>(
        &self,
        encode: impl FnOnce(&KeypairBytes) -> Result<T, pkcs8::Error>,
    ) -> Result<T, Error> {
        let mut key = KeypairBytes { secret_key: self.0.to_bytes(), public_key: None };
        let encoded = encode(&key);
        // Its own `Drop` wipes only with a feature that nothing here turns on.
        key.secret_key.zeroize();
        encoded.map_err(Error::Encode)
    }
}

impl fmt::Debug for NodeKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NodeKey({}, …)", self.id())
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use ed25519_dalek::{Signature, Verifier as _, VerifyingKey};

    use super::*;

    #[derive(Default)]
    struct Memory(RefCell<Option<Vec<u8>>>);

    impl Store for Memory {
        fn read(&self) -> io::Result<Option<Zeroizing<Vec<u8>>>> {
            Ok(self.0.borrow().clone().map(Zeroizing::new))
        }

        fn write(&self, key: &[u8]) -> io::Result<()> {
            *self.0.borrow_mut() = Some(key.to_vec());
            Ok(())
        }
    }

    #[test]
    fn a_key_is_made_once_and_then_read() {
        let store = Memory::default();
        let first = ensure(&store).unwrap();
        let second = ensure(&store).unwrap();
        assert_eq!(first.public_key(), second.public_key());
    }

    #[test]
    fn a_damaged_key_is_an_error_and_stays_where_it_is() {
        let store = Memory(RefCell::new(Some(b"damaged".to_vec())));
        assert!(matches!(ensure(&store), Err(Error::Damaged(_))));
        assert_eq!(*store.0.borrow(), Some(b"damaged".to_vec()));
    }

    #[test]
    fn debug_prints_no_secret() {
        let key = NodeKey(SigningKey::from_bytes(&[7; 32]));
        assert_eq!(format!("{key:?}"), format!("NodeKey({}, …)", key.id()));
    }

    #[test]
    fn the_export_is_version_1_without_a_public_key() {
        let der = NodeKey(SigningKey::from_bytes(&[7; 32])).to_pkcs8_der().unwrap();
        // SEQUENCE of version 0, algorithm 1.3.101.112, and the seed in two octet strings: 48
        // bytes, no room for a public key.
        assert_eq!(der.len(), 48);
        assert_eq!(der[..5], [0x30, 0x2e, 0x02, 0x01, 0x00]);
        assert_eq!(der[16..], [7; 32]);
    }

    #[test]
    fn the_pem_reads_back() {
        let key = NodeKey::generate().unwrap();
        let pem = key.to_pkcs8_pem().unwrap();
        assert!(pem.starts_with("-----BEGIN PRIVATE KEY-----\n"));
        let read = SigningKey::from_pkcs8_pem(&pem).unwrap();
        assert_eq!(read.verifying_key().to_bytes(), key.public_key());
    }

    #[test]
    fn a_signature_verifies_with_the_public_key() {
        let key = NodeKey::generate().unwrap();
        let public = VerifyingKey::from_bytes(&key.public_key()).unwrap();
        let signature = Signature::from_bytes(&key.sign(b"message"));
        assert!(public.verify(b"message", &signature).is_ok());
        assert!(public.verify(b"another", &signature).is_err());
    }
}
