//! Makes a credential: a secret that only the TPM with both keys can read
//! (`TPM2_MakeCredential`, which needs no TPM).
//!
//! ```text
//! seed --for the endorsement key: ECDH, or RSA-OAEP--> secret
//! seed --KDFa "STORAGE", name of the attestation key--> AES key   --CFB--> identity
//! seed --KDFa "INTEGRITY"-----------------------------> HMAC key  --> over identity and name
//! ```
//!
//! The TPM decrypts it only for a loaded key of that name, and a name covers the attributes
//! of the key: that it was made in this TPM, never leaves it, and signs only the TPM's words.
//!
//! Names are those of the specification, part 1, sections 24 and B.10.4, C.6.4.

use rand::rngs::SysRng;
use ring::hmac;
use ring::rand::{SecureRandom as _, SystemRandom};
use rsa::rand_core::UnwrapErr;
use rsa::{BoxedUint, Oaep, RsaPublicKey};
use zeroize::Zeroizing;

use super::Error;
use super::derive::{BLOCK, Direction, SIZE, Shared, cfb, kdfa};
use super::format::Writer;
use super::key::{EndorsementKey, MODULUS};

/// The use of the seed, which ECDH and OAEP both take in.
const IDENTITY: &[u8] = b"IDENTITY";

/// The exponent of all keys of RSA in TPMs.
const EXPONENT: u64 = 65537;

/// A secret for one TPM and one attestation key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Credential {
    /// The content of `TPM2B_ID_OBJECT`.
    pub blob: Vec<u8>,
    /// The content of `TPM2B_ENCRYPTED_SECRET`.
    pub secret: Vec<u8>,
}

/// Makes a credential with this content for the attestation key of this name.
pub(super) fn make(
    endorsement: &EndorsementKey,
    name: &[u8],
    content: &[u8; SIZE],
) -> Result<Credential, Error> {
    let (seed, secret) = match endorsement {
        EndorsementKey::Ecc(point) => {
            let shared =
                Shared::with(point, IDENTITY).map_err(|_unusable| Error::EndorsementKey)?;
            let point = Writer::default().sized(&shared.ours.0).sized(&shared.ours.1).done();
            (shared.secret, point)
        }
        EndorsementKey::Rsa(modulus) => encrypted(modulus)?,
    };
    let storage = kdfa::<BLOCK>(&*seed, b"STORAGE", name, &[]);
    let mut identity = Writer::default().sized(content).done();
    cfb(&storage, [0; BLOCK], &mut identity, Direction::Encrypt);
    let integrity = kdfa::<SIZE>(&*seed, b"INTEGRITY", &[], &[]);
    let integrity = hmac::Key::new(hmac::HMAC_SHA256, &*integrity);
    let proof = hmac::sign(&integrity, &[&*identity, name].concat());
    Ok(Credential { blob: Writer::default().sized(proof.as_ref()).bytes(&identity).done(), secret })
}

/// A seed, and the same for the owner of this key of RSA.
fn encrypted(modulus: &[u8; MODULUS]) -> Result<(Zeroizing<[u8; SIZE]>, Vec<u8>), Error> {
    let mut seed = Zeroizing::new([0; SIZE]);
    SystemRandom::new().fill(&mut *seed).map_err(|_unspecified| Error::Random)?;
    let refused = |_error| Error::EndorsementKey;
    let modulus = BoxedUint::from_be_slice_vartime(modulus);
    let key = RsaPublicKey::new(modulus, BoxedUint::from(EXPONENT)).map_err(refused)?;
    // The label has its terminating zero, as the specification wants.
    let padding = Oaep::<rsa::sha2::Sha256>::new_with_label([IDENTITY, &[0]].concat());
    let secret = key.encrypt(&mut UnwrapErr(SysRng), padding, &*seed);
    Ok((seed, secret.map_err(refused)?))
}
