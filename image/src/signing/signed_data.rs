//! The envelope of every RSA signature here: PKCS #7 `SignedData` with one signer.
//!
//! Made by the types of the crate `cms`. Nothing in it is optional or random: the envelope
//! follows from the signed bytes, the certificate and the signature.

use cms::{
    cert::{CertificateChoices, IssuerAndSerialNumber},
    content_info::CmsVersion,
    signed_data::{
        CertificateSet, EncapsulatedContentInfo, SignedAttributes, SignedData, SignerIdentifier,
        SignerInfo, SignerInfos,
    },
};
use x509_cert::{
    der::{
        Any, Result,
        asn1::{ObjectIdentifier, OctetString, SetOfVec},
    },
    spki::AlgorithmIdentifierOwned,
};

use super::identity::Signer;

/// SHA-256.
pub(super) const SHA256: ObjectIdentifier = ObjectIdentifier::new_unwrap("2.16.840.1.101.3.4.2.1");
/// `rsaEncryption`: PKCS #1 1.5, with the digest algorithm named beside it.
const RSA: ObjectIdentifier = ObjectIdentifier::new_unwrap("1.2.840.113549.1.1.1");

/// An algorithm whose parameters are NULL, as PKCS #1 has them.
pub(super) fn algorithm(oid: ObjectIdentifier) -> AlgorithmIdentifierOwned {
    AlgorithmIdentifierOwned { oid, parameters: Some(Any::null()) }
}

/// The envelope.
pub(super) fn signed_data(
    signer: &Signer,
    content: EncapsulatedContentInfo,
    attributes: Option<SignedAttributes>,
    signature: &[u8],
) -> Result<SignedData> {
    let certificate = signer.certificate();
    let tbs = certificate.tbs_certificate();
    let sid = SignerIdentifier::IssuerAndSerialNumber(IssuerAndSerialNumber {
        issuer: tbs.issuer().clone(),
        serial_number: tbs.serial_number().clone(),
    });
    let info = SignerInfo {
        version: CmsVersion::V1,
        sid,
        digest_alg: algorithm(SHA256),
        signed_attrs: attributes,
        signature_algorithm: algorithm(RSA),
        signature: OctetString::new(signature)?,
        unsigned_attrs: None,
    };
    let certificate = CertificateChoices::Certificate(certificate.clone());
    Ok(SignedData {
        version: CmsVersion::V1,
        digest_algorithms: SetOfVec::try_from(vec![algorithm(SHA256)])?,
        encap_content_info: content,
        certificates: Some(CertificateSet(SetOfVec::try_from(vec![certificate])?)),
        crls: None,
        signer_infos: SignerInfos(SetOfVec::try_from(vec![info])?),
    })
}
