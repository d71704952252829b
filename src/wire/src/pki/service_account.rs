//! The keys that sign and verify the tokens of Kubernetes' service accounts.
//!
//! They are not certificates, and they are the only keys of a cluster that are not Ed25519:
//! Kubernetes accepts RSA and ECDSA here. Every API server verifies the tokens of every
//! other one, so all of them share one signing key, which lies in the namespace.
//!
//! ```text
//! service-accounts/signing               PKCS#8 DER, ECDSA P-256
//! service-accounts/verifying/<digest>    SPKI DER of every key that ever signed
//! ```
//!
//! Invariants:
//! - The transaction that makes a signing key also lists its public half, so a token is
//!   never signed by a key that no server verifies.
//! - Of several nodes at once, one makes the key.

use rcgen::{KeyPair, PKCS_ECDSA_P256_SHA256, PublicKeyData as _};
use sha2::{Digest as _, Sha256};
use zeroize::Zeroizing;

use super::store::{Guard, Store, Write};
use super::{Error, template};
use polis_base::hex;

const SIGNING: &str = "service-accounts/signing";
const VERIFYING: &str = "service-accounts/verifying/";

/// Its name in errors.
const NAME: &str = "the service-account key";

/// Digits of the digest in the key of a public half.
const DIGITS: usize = 16;

/// The service-account keys of one folder of a store.
#[derive(Clone, Debug)]
pub struct ServiceAccounts<S> {
    store: S,
    folder: String,
}

/// The keys of a cluster.
#[derive(Clone)]
pub struct KeySet {
    /// The private key that signs, PKCS#8 in PEM.
    pub signing: Zeroizing<String>,
    /// The public keys that verify, SPKI in PEM, one after the other.
    pub verifying: String,
}

impl std::fmt::Debug for KeySet {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("KeySet").field("verifying", &self.verifying).finish_non_exhaustive()
    }
}

impl<S: Store> ServiceAccounts<S> {
    /// The keys of `store` below `folder`: empty, or ending with a slash.
    pub fn new(store: S, folder: impl Into<String>) -> Self {
        Self { store, folder: folder.into() }
    }

    /// Reads the keys, or makes the first one.
    ///
    /// # Errors
    ///
    /// [`Error::Lost`] if another node makes it at the same moment; see [`Error::retriable`].
    pub async fn ensure(&self) -> Result<KeySet, Error> {
        let failed = |source| Error::Store { name: NAME.to_owned(), source };
        let signing_at = format!("{}{SIGNING}", self.folder);
        if let Some(found) = self.store.get(&signing_at).await.map_err(failed)? {
            let verifying_at = format!("{}{VERIFYING}", self.folder);
            let listed = self.store.list(&verifying_at).await.map_err(failed)?;
            let public: Vec<_> = listed.into_iter().map(|(_, entry)| entry.value).collect();
            return key_set(&Zeroizing::new(found.value), &public);
        }
        let pair = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256)
            .map_err(|source| Error::Sign { name: NAME.to_owned(), source })?;
        let signing = Zeroizing::new(pair.serialize_der());
        let public = pair.subject_public_key_info();
        let digest = hex::encode(&Sha256::digest(&public));
        let verifying_at = format!("{}{VERIFYING}{}", self.folder, &digest[..DIGITS]);
        let guards = vec![Guard::Absent(signing_at.clone())];
        let writes = vec![
            Write::Put(signing_at, signing.to_vec()),
            Write::Put(verifying_at, public.clone()),
        ];
        if !self.store.commit(guards, writes).await.map_err(failed)? {
            return Err(Error::Lost { name: NAME.to_owned() });
        }
        key_set(&signing, &[public])
    }
}

/// Puts the stored halves together.
fn key_set(signing: &[u8], public: &[Vec<u8>]) -> Result<KeySet, Error> {
    let damaged = |what| Error::Damaged { what, name: NAME.to_owned() };
    let der = signing.into();
    let pair = KeyPair::from_pkcs8_der_and_sign_algo(&der, &PKCS_ECDSA_P256_SHA256)
        .map_err(|_unreadable| damaged("private half"))?;
    if !public.contains(&pair.subject_public_key_info()) {
        return Err(damaged("public half"));
    }
    let verifying = public.iter().map(|der| template::pem("PUBLIC KEY", der)).collect();
    Ok(KeySet { signing: Zeroizing::new(template::pem("PRIVATE KEY", signing)), verifying })
}

#[cfg(test)]
mod tests {
    use super::super::store::memory::Memory;
    use super::*;

    #[tokio::test]
    async fn the_key_is_made_once_and_its_public_half_is_listed() {
        let memory = Memory::default();
        let keys = ServiceAccounts::new(memory.clone(), "");
        let made = keys.ensure().await.unwrap();
        let read = keys.ensure().await.unwrap();
        assert_eq!(made.signing, read.signing);
        assert_eq!(made.verifying, read.verifying);
        assert!(made.signing.starts_with("-----BEGIN PRIVATE KEY-----\n"));
        assert!(made.verifying.starts_with("-----BEGIN PUBLIC KEY-----\n"));
        assert_eq!(memory.contents().len(), 2);
        assert!(!format!("{made:?}").contains("PRIVATE"));
    }

    #[tokio::test]
    async fn a_former_public_half_still_verifies() {
        let memory = Memory::default();
        let keys = ServiceAccounts::new(memory.clone(), "");
        keys.ensure().await.unwrap();
        let former = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).unwrap();
        let put = Write::Put(format!("{VERIFYING}0"), former.subject_public_key_info());
        assert!(memory.commit(Vec::new(), vec![put]).await.unwrap());
        let read = keys.ensure().await.unwrap();
        assert_eq!(read.verifying.matches("BEGIN PUBLIC KEY").count(), 2);
    }

    #[tokio::test]
    async fn a_signing_key_without_a_verifying_key_is_damage() {
        let memory = Memory::default();
        let keys = ServiceAccounts::new(memory.clone(), "");
        keys.ensure().await.unwrap();
        let listed = memory.contents().into_keys().find(|key| key.starts_with(VERIFYING)).unwrap();
        assert!(memory.commit(Vec::new(), vec![Write::Delete(listed)]).await.unwrap());
        assert!(matches!(keys.ensure().await, Err(Error::Damaged { .. })));
    }
}
