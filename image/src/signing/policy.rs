//! The policy key: approves the measurements of an image, so that the TPMs of its owner's
//! machines open their disks for it.
//!
//! ```text
//! .pcrpkey  the public half, in PEM; the boot stub measures it
//! .pcrsig   {"sha256":[{"pcrs":[11],"pkfp":KEY,"pol":POLICY,"sig":SIGNATURE}]}; not measured
//! ```
//!
//! The format is that of `systemd-measure sign`: KEY is the SHA-256 of the public half in DER,
//! POLICY the digest of `polis_bundle::approval`, both in hexadecimal, and SIGNATURE an
//! RSASSA-PKCS1-v1_5 of POLICY with SHA-256, in base64. Both sections have one spelling: the
//! same image and the same key give the same bytes.
//!
//! What this module does not do: compute the measurements, or put the sections into an image.

use std::fmt;

use base64ct::{Base64, Encoding as _};
use pkcs8::der::{Document, pem::LineEnding};
use polis_base::hex;
use ring::rsa::KeyPair;

use super::{
    Error, hash,
    identity::{self, PUBLIC},
    sign,
};

/// Approves the measurements of images.
pub(super) struct PolicyKey {
    pair: KeyPair,
    /// The public half in DER, with its algorithm.
    public: Vec<u8>,
}

impl PolicyKey {
    /// Puts the two halves together; `None` if they are not of the same key.
    pub(super) fn new(pair: KeyPair, public: Vec<u8>) -> Option<Self> {
        (identity::public(&pair) == public).then_some(Self { pair, public })
    }

    /// SHA-256 of the public half, in hexadecimal.
    pub(super) fn fingerprint(&self) -> String {
        hash(&self.public)
    }

    /// The content of `.pcrpkey`.
    pub(super) fn section(&self) -> Result<String, Error> {
        let document = Document::try_from(&self.public[..]);
        document.and_then(|der| der.to_pem(PUBLIC, LineEnding::LF)).map_err(sign)
    }

    /// The content of `.pcrsig` for an image whose start satisfies `policy`.
    pub(super) fn approve(&self, policy: &[u8; 32]) -> Result<String, Error> {
        let signature = identity::signature(&self.pair, policy).map_err(sign)?;
        Ok(format!(
            r#"{{"sha256":[{{"pcrs":[11],"pkfp":"{}","pol":"{}","sig":"{}"}}]}}"#,
            self.fingerprint(),
            hex::encode(policy),
            Base64::encode_string(&signature),
        ))
    }
}

impl fmt::Debug for PolicyKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("PolicyKey").field(&self.fingerprint()).finish()
    }
}

#[cfg(test)]
mod tests {
    use ring::signature::{RSA_PKCS1_2048_8192_SHA256, UnparsedPublicKey};

    use super::super::keys;
    use super::*;

    #[test]
    fn an_approval_has_one_spelling_and_the_public_half_verifies_it() {
        let signer = keys().image_signer().unwrap();
        let text = signer.approve(&[7; 32]).unwrap();
        assert_eq!(signer.approve(&[7; 32]).unwrap(), text);
        let read: serde_json::Value = serde_json::from_str(&text).unwrap();
        let entry = &read["sha256"][0];
        assert_eq!(entry["pcrs"], serde_json::json!([11]));
        assert_eq!(entry["pol"], "07".repeat(32));
        let pem = signer.policy_key().unwrap();
        let (label, der) = Document::from_pem(&pem).unwrap();
        assert_eq!(label, PUBLIC);
        assert_eq!(entry["pkfp"], hash(der.as_bytes()));
        let signature = Base64::decode_vec(entry["sig"].as_str().unwrap()).unwrap();
        // The key itself begins behind its algorithm, which has the same length in each.
        let key = UnparsedPublicKey::new(&RSA_PKCS1_2048_8192_SHA256, &der.as_bytes()[24..]);
        key.verify(&[7; 32], &signature).unwrap();
        assert!(key.verify(&[8; 32], &signature).is_err());
        assert!(!format!("{signer:?}").contains("PRIVATE"));
    }
}
