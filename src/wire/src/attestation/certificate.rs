//! The certificate of an endorsement key: its maker says that the key is in a TPM of theirs.
//!
//! An authority that is given is trusted itself, whether it is a root or was certified by
//! one: the operator gives the certificate of the authority that signed, and no path is built.
//! Dates are not checked: a key does not leave its TPM because a date has passed, and makers
//! let certificates of TPMs that are in use end.

use x509_parser::prelude::{FromDer as _, X509Certificate};
use x509_parser::public_key::{PublicKey, RSAPublicKey};

use super::Error;
use super::derive::uncompressed;
use super::key::EndorsementKey;

/// `tcg-kp-EKCertificate`: the purpose of these certificates.
const PURPOSE: &str = "2.23.133.8.1";

/// The exponent of all keys of RSA in TPMs.
const EXPONENT: [u8; 3] = [1, 0, 1];

/// A certificate of an endorsement key that was read, and not checked yet.
#[derive(Clone, Debug)]
pub struct Certificate<'a>(X509Certificate<'a>);

impl<'a> Certificate<'a> {
    /// Reads a certificate in DER. A TPM may keep it in a larger place, filled up with zeros
    /// or ones.
    ///
    /// # Errors
    ///
    /// [`Error::CertificateMalformed`].
    pub fn read(der: &'a [u8]) -> Result<Self, Error> {
        let (rest, certificate) =
            X509Certificate::from_der(der).map_err(|_error| Error::CertificateMalformed)?;
        let filler = rest.iter().all(|byte| *byte == 0) || rest.iter().all(|byte| *byte == 0xff);
        if !filler {
            return Err(Error::CertificateMalformed);
        }
        Ok(Self(certificate))
    }

    /// Its signer, as it says itself.
    #[must_use]
    pub fn issuer(&self) -> String {
        self.0.issuer().to_string()
    }

    /// Whether it is for an endorsement key, and for this one.
    ///
    /// # Errors
    ///
    /// [`Error::CertificatePurpose`], [`Error::CertificateKey`].
    pub fn certifies(&self, key: &EndorsementKey) -> Result<(), Error> {
        let unreadable = |_error| Error::CertificateMalformed;
        if self.0.is_ca() {
            return Err(Error::CertificatePurpose);
        }
        // Older ones name no purpose; one that names others is for another key.
        let purposes = self.0.extended_key_usage().map_err(unreadable)?;
        let ours = |purposes: &x509_parser::extensions::ExtendedKeyUsage<'_>| {
            purposes.other.iter().any(|purpose| purpose.to_id_string() == PURPOSE)
        };
        if purposes.is_some_and(|purposes| !ours(purposes.value)) {
            return Err(Error::CertificatePurpose);
        }
        let public = self.0.public_key();
        let same = match key {
            EndorsementKey::Ecc(point) => match public.parsed().map_err(unreadable)? {
                PublicKey::EC(found) => found.data() == uncompressed(point),
                _ => false,
            },
            // Some makers name the algorithm RSA-OAEP, whose keys have the same form.
            EndorsementKey::Rsa(modulus) => {
                let found = RSAPublicKey::from_der(&public.subject_public_key.data);
                let number =
                    |bytes: &[u8]| bytes.iter().skip_while(|byte| **byte == 0).copied().collect();
                found.is_ok_and(|(_, found)| {
                    let numbers: [Vec<u8>; 2] = [number(found.modulus), number(found.exponent)];
                    numbers[0] == **modulus && numbers[1] == EXPONENT
                })
            }
        };
        if same { Ok(()) } else { Err(Error::CertificateKey) }
    }

    /// Whether one of these authorities, each a certificate in DER, has signed it. Returns the
    /// name of that authority.
    ///
    /// # Errors
    ///
    /// [`Error::CertificateIssuer`], also for a certificate that is not an authority's.
    pub fn signed_by_one_of<'b>(
        &self,
        authorities: impl IntoIterator<Item = &'b [u8]>,
    ) -> Result<String, Error> {
        for der in authorities {
            let Ok((_, authority)) = X509Certificate::from_der(der) else { continue };
            let named = authority.subject().as_raw() == self.0.issuer().as_raw();
            if authority.is_ca()
                && named
                && self.0.verify_signature(Some(authority.public_key())).is_ok()
            {
                return Ok(authority.subject().to_string());
            }
        }
        Err(Error::CertificateIssuer)
    }
}
