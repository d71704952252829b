//! The keys that sign and verify the tokens of Kubernetes' service accounts.
//!
//! They are not certificates, and they are the only keys of a cluster that are not Ed25519:
//! Kubernetes accepts RSA and ECDSA here. Every API server verifies the tokens of every
//! other one, so all of them share one signing key, which lies in the namespace.
//!
//! ```text
//! service-accounts/signing               PKCS#8 DER, ECDSA P-256
//! service-accounts/next                  the same of the key that is to sign next
//! service-accounts/verifying/<digest>    SPKI DER of that key; while a rotation goes on, also of
//!                                        the next one and the one before
//! service-accounts/rotation              of which rotation the newest key is, and when it was
//!                                        listed, in seconds since 1970: two decimal numbers;
//!                                        absent for the first key
//! ```
//!
//! ```text
//! [A signs] --rotate--> [B verifies, too] --LISTED, rotate--> [B signs] --conclude--> [A is gone]
//! ```
//!
//! Invariants:
//! - The transaction that makes a key also lists its public half, and another key signs only
//!   once every server has read the list: no token is signed by a key that a server rejects.
//! - Of several nodes at once, one makes the key.
//! - A key that has signed once and does not verify any more never comes back.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

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
const NEXT: &str = "service-accounts/next";
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

/// Where a key of a rotation is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// It is listed, and servers read the list.
    Listed,
    /// It signs from now on.
    Begins,
    /// It signs already, or there is none to replace.
    Signs,
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
    /// How long a server may use the list of keys that it has read.
    pub const REFRESH: Duration = Duration::from_secs(60);

    /// How long a key is listed before it signs.
    pub const LISTED: Duration = Self::REFRESH.saturating_add(Duration::from_secs(30));

    /// Puts the stored halves together.
    fn new(signing: Zeroizing<Vec<u8>>, public: Vec<Vec<u8>>) -> Result<Self, Error> {
        let own = VerifyingKey::new(public_half(&signing)?);
        let random = SystemRandom::new();
        let pair = EcdsaKeyPair::from_pkcs8(&ECDSA_P256_SHA256_FIXED_SIGNING, &signing, &random);
        let pair = pair.map_err(|_unreadable| damaged("private half"))?;
        let verifying: Vec<_> = public.into_iter().map(VerifyingKey::new).collect();
        if !verifying.contains(&own) {
            return Err(damaged("public half"));
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

    /// Takes the next step to another key for this rotation, counted from one: lists it, and lets
    /// it sign after [`KeySet::LISTED`]. The one before verifies until [`Self::conclude`], and its
    /// private half is deleted.
    ///
    /// # Errors
    ///
    /// [`Error::Lost`] if the keys change at the same moment.
    pub async fn rotate(&self, rotation: u64, now: SystemTime) -> Result<Turn, Error> {
        let [signing_at, next_at, made_at] = [SIGNING, NEXT, ROTATION].map(|key| self.at(key));
        let found = self.store.read([&signing_at, &next_at, &made_at]).await.map_err(failed)?;
        let [Some(signing), next, made] = found else { return Ok(Turn::Signs) };
        let made = made.map(|entry| Made::read(&entry.value)).transpose()?.unwrap_or_default();
        if made.rotation < rotation {
            let (next, public) = generate()?;
            let made = Made { rotation, listed: seconds(now) };
            let writes = vec![
                Write::Put(self.at_public(&public), public),
                Write::Put(next_at, next.to_vec()),
                Write::Put(made_at, made.to_text().into_bytes()),
            ];
            self.commit(vec![Guard::Unchanged(signing_at, signing.revision)], writes).await?;
            return Ok(Turn::Listed);
        }
        let Some(next) = next else { return Ok(Turn::Signs) };
        // The clock of another leader may be a little behind the one by which it was listed. After
        // a clock that was wrong, it counts as listed for long.
        if seconds(now).abs_diff(made.listed) < KeySet::LISTED.as_secs() {
            return Ok(Turn::Listed);
        }
        let guards = vec![Guard::Unchanged(next_at.clone(), next.revision)];
        let writes = vec![Write::Put(signing_at, next.value), Write::Delete(next_at)];
        self.commit(guards, writes).await?;
        Ok(Turn::Begins)
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

/// Of which rotation a key is, and when it was listed, in seconds since 1970.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Made {
    rotation: u64,
    listed: u64,
}

impl Made {
    fn read(text: &[u8]) -> Result<Self, Error> {
        let read = || {
            let (rotation, listed) = std::str::from_utf8(text).ok()?.split_once(' ')?;
            Some(Self { rotation: rotation.parse().ok()?, listed: listed.parse().ok()? })
        };
        read().ok_or_else(|| damaged("record of its rotation"))
    }

    fn to_text(self) -> String {
        format!("{} {}", self.rotation, self.listed)
    }
}

fn seconds(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
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
        let none = keys.rotate(1, UNIX_EPOCH).await.unwrap();
        assert_eq!(none, Turn::Signs, "a cluster without Kubernetes has none");
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
        let now = UNIX_EPOCH + Duration::from_secs(1_790_000_000);
        let soon = now + KeySet::LISTED - Duration::from_secs(1);
        for at in [now, soon] {
            assert_eq!(keys.rotate(1, at).await.unwrap(), Turn::Listed);
            let listed = keys.ensure().await.unwrap();
            assert_eq!((listed.id(), listed.verifying.len()), (first.id(), 2));
        }
        assert_eq!(keys.rotate(1, now + KeySet::LISTED).await.unwrap(), Turn::Begins);
        assert_eq!(
            keys.rotate(1, now + KeySet::LISTED).await.unwrap(),
            Turn::Signs,
            "by the next leader"
        );
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
        // It was listed by a leader with a clock that is ahead: by seconds, and by far.
        let ahead = now + 9 * KeySet::LISTED;
        assert_eq!(keys.rotate(2, ahead).await.unwrap(), Turn::Listed);
        let behind = ahead - Duration::from_secs(5);
        assert_eq!(keys.rotate(2, behind).await.unwrap(), Turn::Listed);
        assert_eq!(keys.rotate(2, now).await.unwrap(), Turn::Begins);
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
        for noise in ["", "1", "-1 2", "1 x"] {
            assert!(memory.commit(Vec::new(), put(ROTATION, noise.as_bytes())).await.unwrap());
            let refused = keys.rotate(1, UNIX_EPOCH).await;
            assert!(matches!(refused, Err(Error::Damaged { .. })), "{noise}");
        }
        let listed = memory.contents().into_keys().find(|key| key.starts_with(VERIFYING)).unwrap();
        assert!(memory.commit(Vec::new(), vec![Write::Delete(listed)]).await.unwrap());
        let public = Error::Damaged { what: "public half", name: NAME.to_owned() };
        assert_eq!(keys.ensure().await.unwrap_err().to_string(), public.to_string());
        assert!(memory.commit(Vec::new(), put(SIGNING, b"noise")).await.unwrap());
        assert!(matches!(keys.read().await, Err(Error::Damaged { what: "private half", .. })));
    }
}
