//! The keys that sign and verify the tokens of Kubernetes' service accounts.
//!
//! They are not certificates, and they are the only keys of a cluster that are not Ed25519:
//! Kubernetes accepts RSA and ECDSA here. Every API server verifies the tokens of every
//! other one, so all of them share one signing key, which lies in the namespace.
//!
//! ```text
//! service-accounts/signing               PKCS#8 DER, ECDSA P-256
//! service-accounts/verifying/<digest>    SPKI DER of that key, and of the one before while a
//!                                        rotation goes on
//! service-accounts/rotation              the number of the rotation that made the signing key,
//!                                        in decimal; absent for the first one
//! ```
//!
//! Invariants:
//! - The transaction that makes a signing key also lists its public half, so a token is
//!   never signed by a key that no server verifies.
//! - Of several nodes at once, one makes the key.
//! - A key that has signed once and does not verify any more never comes back.

use base64ct::{Base64UrlUnpadded, Encoding as _};
use rcgen::{KeyPair, PKCS_ECDSA_P256_SHA256, PublicKeyData as _};
use ring::rand::SystemRandom;
use ring::signature::{ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair};
use sha2::{Digest as _, Sha256};
use zeroize::Zeroizing;

use super::store::{Guard, Store, Write};
use super::{Error, template};
use polis_base::hex;

const SIGNING: &str = "service-accounts/signing";
const VERIFYING: &str = "service-accounts/verifying/";
const ROTATION: &str = "service-accounts/rotation";

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

/// A public key as Kubernetes knows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VerifyingKey {
    /// Its name in the header of a token (`kid`), as an API server with a key file computes it.
    pub id: String,
    /// SPKI DER.
    pub der: Vec<u8>,
}

impl VerifyingKey {
    fn new(der: Vec<u8>) -> Self {
        Self { id: Base64UrlUnpadded::encode_string(&Sha256::digest(&der)), der }
    }
}

/// The two parts of a token that its signer makes (JWS, RFC 7515, section 3.1), each in the base64
/// of URLs.
#[derive(Clone, PartialEq, Eq)]
pub struct Signed {
    /// The protected header.
    pub header: String,
    /// The signature: `r` and `s`, of 32 bytes each (RFC 7518, section 3.4).
    pub signature: String,
}

/// With the claims, both are a token.
impl std::fmt::Debug for Signed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Signed").finish_non_exhaustive()
    }
}

/// The keys of a cluster.
pub struct KeySet {
    signing: Zeroizing<Vec<u8>>,
    pair: EcdsaKeyPair,
    /// The public half of the signing key.
    own: VerifyingKey,
    /// All keys that verify.
    pub verifying: Vec<VerifyingKey>,
}

impl std::fmt::Debug for KeySet {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("KeySet").field("verifying", &self.verifying).finish_non_exhaustive()
    }
}

impl KeySet {
    /// Puts the stored halves together.
    fn new(signing: Zeroizing<Vec<u8>>, public: Vec<Vec<u8>>) -> Result<Self, Error> {
        let damaged = || damaged("private half");
        let own = public_half(&signing)?;
        let pair = EcdsaKeyPair::from_pkcs8(
            &ECDSA_P256_SHA256_FIXED_SIGNING,
            &signing,
            &SystemRandom::new(),
        );
        let pair = pair.map_err(|_unreadable| damaged())?;
        let own = VerifyingKey::new(own);
        let verifying: Vec<_> = public.into_iter().map(VerifyingKey::new).collect();
        if !verifying.contains(&own) {
            return Err(self::damaged("public half"));
        }
        Ok(Self { signing, pair, own, verifying })
    }

    /// The private key, PKCS#8 in PEM.
    #[must_use]
    pub fn signing_pem(&self) -> Zeroizing<String> {
        Zeroizing::new(template::pem("PRIVATE KEY", &self.signing))
    }

    /// The name of the key that signs.
    #[must_use]
    pub fn id(&self) -> &str {
        &self.own.id
    }

    /// Whether the key before this one still verifies.
    #[must_use]
    pub fn is_leaving(&self) -> bool {
        self.verifying.len() > 1
    }

    /// Signs the claims of a token, which are in the base64 of URLs already.
    ///
    /// # Errors
    ///
    /// [`Error::Sign`] if the kernel gives no random bytes.
    pub fn sign(&self, claims: &str) -> Result<Signed, Error> {
        // The name is in the base64 of URLs, which needs no escape.
        let header = format!(r#"{{"alg":"ES256","kid":"{}","typ":"JWT"}}"#, self.own.id);
        let header = Base64UrlUnpadded::encode_string(header.as_bytes());
        let signature =
            self.pair.sign(&SystemRandom::new(), format!("{header}.{claims}").as_bytes());
        let signature = signature.map_err(|_no_random_bytes| Error::Sign {
            name: NAME.to_owned(),
            source: rcgen::Error::RingUnspecified,
        })?;
        Ok(Signed { header, signature: Base64UrlUnpadded::encode_string(signature.as_ref()) })
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
        if let Some((keys, _revision)) = self.find().await? {
            return Ok(keys);
        }
        let (signing, public) = generate()?;
        let writes = vec![
            Write::Put(self.at(SIGNING), signing.to_vec()),
            Write::Put(self.at_public(&public), public.clone()),
        ];
        self.commit(vec![Guard::Absent(self.at(SIGNING))], writes).await?;
        KeySet::new(signing, vec![public])
    }

    /// Reads the keys; `None` before the first one is made.
    ///
    /// # Errors
    ///
    /// [`Error::Store`] and [`Error::Damaged`].
    pub async fn read(&self) -> Result<Option<KeySet>, Error> {
        Ok(self.find().await?.map(|(keys, _revision)| keys))
    }

    /// Lets another key sign from now on. The one before verifies until [`Self::conclude`], and
    /// its private half is deleted. Does nothing before there is a key, or if this rotation,
    /// counted from one, was begun before; returns whether it did.
    ///
    /// # Errors
    ///
    /// [`Error::Lost`] if the key changes at the same moment.
    pub async fn rotate(&self, rotation: u64) -> Result<bool, Error> {
        let (signing_at, rotation_at) = (self.at(SIGNING), self.at(ROTATION));
        let found = self.store.read([&signing_at, &rotation_at]).await.map_err(failed)?;
        let [Some(signing), made_in] = found else { return Ok(false) };
        let made_in = match made_in {
            Some(entry) => number(&entry.value).ok_or_else(|| damaged("number of its rotation"))?,
            None => 0,
        };
        if made_in >= rotation {
            return Ok(false);
        }
        let (next, public) = generate()?;
        let writes = vec![
            Write::Put(self.at_public(&public), public),
            Write::Put(signing_at.clone(), next.to_vec()),
            Write::Put(rotation_at, rotation.to_string().into_bytes()),
        ];
        self.commit(vec![Guard::Unchanged(signing_at, signing.revision)], writes).await?;
        Ok(true)
    }

    /// Lets only the signing key verify. Does nothing if that is so; returns whether it did.
    ///
    /// # Errors
    ///
    /// [`Error::Lost`] if the key changes at the same moment.
    pub async fn conclude(&self) -> Result<bool, Error> {
        let Some((keys, revision)) = self.find().await? else { return Ok(false) };
        let listed = self.store.list(&self.at(VERIFYING)).await.map_err(failed)?.into_iter();
        let former = listed.filter(|(_, entry)| entry.value != keys.own.der);
        let former: Vec<_> = former.map(|(key, _)| Write::Delete(key)).collect();
        if former.is_empty() {
            return Ok(false);
        }
        self.commit(vec![Guard::Unchanged(self.at(SIGNING), revision)], former).await?;
        Ok(true)
    }

    /// The keys, and the revision of the one that signs.
    async fn find(&self) -> Result<Option<(KeySet, i64)>, Error> {
        let Some(found) = self.store.get(&self.at(SIGNING)).await.map_err(failed)? else {
            return Ok(None);
        };
        // Read later, they have the public half of that key at least until a rotation has ended.
        let listed = self.store.list(&self.at(VERIFYING)).await.map_err(failed)?;
        let public = listed.into_iter().map(|(_, entry)| entry.value).collect();
        Ok(Some((KeySet::new(Zeroizing::new(found.value), public)?, found.revision)))
    }

    async fn commit(&self, guards: Vec<Guard>, writes: Vec<Write>) -> Result<(), Error> {
        match self.store.commit(guards, writes).await.map_err(failed)? {
            true => Ok(()),
            false => Err(Error::Lost { name: NAME.to_owned() }),
        }
    }

    fn at(&self, key: &str) -> String {
        format!("{}{key}", self.folder)
    }

    fn at_public(&self, public: &[u8]) -> String {
        let digest = hex::encode(&Sha256::digest(public));
        format!("{}{}", self.at(VERIFYING), &digest[..DIGITS])
    }
}

fn failed(source: anyhow::Error) -> Error {
    Error::Store { name: NAME.to_owned(), source }
}

fn damaged(what: &'static str) -> Error {
    Error::Damaged { what, name: NAME.to_owned() }
}

fn number(text: &[u8]) -> Option<u64> {
    std::str::from_utf8(text).ok()?.parse().ok()
}

/// A new key: PKCS#8 DER, and its public half, SPKI DER.
fn generate() -> Result<(Zeroizing<Vec<u8>>, Vec<u8>), Error> {
    let pair = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256)
        .map_err(|source| Error::Sign { name: NAME.to_owned(), source })?;
    Ok((Zeroizing::new(pair.serialize_der()), pair.subject_public_key_info()))
}

/// The public half of a private key, SPKI DER.
fn public_half(signing: &[u8]) -> Result<Vec<u8>, Error> {
    let pair = KeyPair::from_pkcs8_der_and_sign_algo(&signing.into(), &PKCS_ECDSA_P256_SHA256)
        .map_err(|_unreadable| damaged("private half"))?;
    Ok(pair.subject_public_key_info())
}

#[cfg(test)]
mod tests {
    use ring::signature::{ECDSA_P256_SHA256_FIXED, UnparsedPublicKey};

    use super::super::store::memory::Memory;
    use super::*;

    #[tokio::test]
    async fn the_key_is_made_once_and_its_public_half_is_listed() {
        let memory = Memory::default();
        let keys = ServiceAccounts::new(memory.clone(), "");
        assert!(keys.read().await.unwrap().is_none());
        assert!(!keys.rotate(1).await.unwrap(), "a cluster without Kubernetes has none");
        assert!(!keys.conclude().await.unwrap());
        let made = keys.ensure().await.unwrap();
        let read = keys.ensure().await.unwrap();
        assert_eq!(made.signing_pem(), read.signing_pem());
        assert_eq!(made.verifying, read.verifying);
        assert!(made.signing_pem().starts_with("-----BEGIN PRIVATE KEY-----\n"));
        assert_eq!(memory.contents().len(), 2);
        assert!(!format!("{made:?}").contains("signing"));
    }

    #[tokio::test]
    async fn after_a_rotation_another_key_signs_and_the_former_one_verifies_until_its_end() {
        let memory = Memory::default();
        let keys = ServiceAccounts::new(memory.clone(), "");
        let first = keys.ensure().await.unwrap();
        assert!(!first.is_leaving());
        assert!(keys.rotate(1).await.unwrap());
        assert!(!keys.rotate(1).await.unwrap(), "it is asked for again by the next leader");
        let second = keys.ensure().await.unwrap();
        assert_ne!(second.id(), first.id());
        assert!(second.is_leaving());
        assert_eq!(second.verifying.len(), 2);
        assert!(second.verifying.contains(&first.verifying[0]));

        assert!(keys.conclude().await.unwrap());
        assert!(!keys.conclude().await.unwrap());
        let last = keys.ensure().await.unwrap();
        assert_eq!((last.id(), last.verifying.len()), (second.id(), 1));
        let first = first.signing.to_vec();
        assert!(memory.contents().into_values().all(|value| value != first), "its key is gone");
        assert!(keys.rotate(2).await.unwrap());
    }

    #[tokio::test]
    async fn a_token_is_signed_as_its_header_says() {
        let keys = ServiceAccounts::new(Memory::default(), "");
        let keys = keys.ensure().await.unwrap();
        let claims = "eyJzdWIiOiJhIn0";
        let signed = keys.sign(claims).unwrap();
        let header = Base64UrlUnpadded::decode_vec(&signed.header).unwrap();
        let expected = format!(r#"{{"alg":"ES256","kid":"{}","typ":"JWT"}}"#, keys.id());
        assert_eq!(String::from_utf8(header).unwrap(), expected);
        let signature = Base64UrlUnpadded::decode_vec(&signed.signature).unwrap();
        // The point is the end of an SPKI with an uncompressed key.
        let der = &keys.verifying[0].der;
        let key = UnparsedPublicKey::new(&ECDSA_P256_SHA256_FIXED, &der[der.len() - 65..]);
        let message = format!("{}.{claims}", signed.header);
        key.verify(message.as_bytes(), &signature).unwrap();
        assert!(key.verify(b"another", &signature).is_err());
    }

    #[tokio::test]
    async fn damaged_values_are_named() {
        let memory = Memory::default();
        let keys = ServiceAccounts::new(memory.clone(), "");
        keys.ensure().await.unwrap();
        let put = |key: &str, value: &[u8]| vec![Write::Put(key.to_owned(), value.to_vec())];
        assert!(memory.commit(Vec::new(), put(ROTATION, b"-1")).await.unwrap());
        assert!(matches!(keys.rotate(1).await, Err(Error::Damaged { .. })));
        let listed = memory.contents().into_keys().find(|key| key.starts_with(VERIFYING)).unwrap();
        assert!(memory.commit(Vec::new(), vec![Write::Delete(listed)]).await.unwrap());
        let public = Error::Damaged { what: "public half", name: NAME.to_owned() };
        assert_eq!(keys.ensure().await.unwrap_err().to_string(), public.to_string());
        assert!(memory.commit(Vec::new(), put(SIGNING, b"noise")).await.unwrap());
        assert!(matches!(keys.read().await, Err(Error::Damaged { what: "private half", .. })));
    }
}
