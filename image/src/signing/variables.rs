//! The files that enrol an owner's keys in firmware: signature lists in authenticated
//! updates of the variables PK, KEK and db (UEFI 2.10, 8.2.2 and 32.4.1).
//!
//! ```text
//! EFI_TIME | WIN_CERTIFICATE_UEFI_GUID { SignedData } | EFI_SIGNATURE_LIST { X.509 }
//! ```
//!
//! In setup mode firmware takes each of them once. The time in them is fixed: a change of
//! keys on a machine that has some needs a later one, and another way than these files.

use cms::signed_data::EncapsulatedContentInfo;
use uuid::{Uuid, uuid};
use x509_cert::der::{Encode as _, asn1::ObjectIdentifier};

use super::{
    Error,
    identity::{Identity, Signer},
    sign,
    signed_data::signed_data,
};

/// Vendor of PK and KEK.
const GLOBAL: Uuid = uuid!("8be4df61-93ca-11d2-aa0d-00e098032b8c");
/// Vendor of db.
const SECURITY: Uuid = uuid!("d719b2cb-3d3a-4596-a3bc-dad00e67656f");
/// A list of certificates.
const X509: Uuid = uuid!("a5c059a1-94e4-4aa7-87b5-ab155c2bf072");
/// A signature in PKCS #7.
const PKCS7: Uuid = uuid!("4aafd29d-68df-49ee-8aa9-347d375665a7");
/// Namespace of the GUIDs by which lists name the owner of a key.
const OWNERS: Uuid = uuid!("0d3a9c5e-7a0f-4a52-8d06-3a6d5b0c1f4e");

/// Kept over a loss of power, there for firmware and for the system, written with a
/// signature and a time.
const ATTRIBUTES: u32 = 0x01 | 0x02 | 0x04 | 0x20;
/// `EFI_TIME` of every update: the first of January 2026, and zeros for what must be zero.
const TIME: [u8; 16] = [0xea, 0x07, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
/// Revision of a `WIN_CERTIFICATE`, and its type with a GUID.
const REVISION: u16 = 0x0200;
const KIND: u16 = 0x0ef1;
/// Plain data: the signed bytes lie outside.
const DATA: ObjectIdentifier = ObjectIdentifier::new_unwrap("1.2.840.113549.1.7.1");

/// A variable of the firmware.
pub(super) struct Variable {
    name: &'static str,
    vendor: Uuid,
}

pub(super) const PK: Variable = Variable { name: "PK", vendor: GLOBAL };
pub(super) const KEK: Variable = Variable { name: "KEK", vendor: GLOBAL };
pub(super) const DB: Variable = Variable { name: "db", vendor: SECURITY };

impl Variable {
    /// The file that systemd-boot looks for in a folder of keys.
    pub(super) fn file(&self) -> String {
        format!("{}.auth", self.name)
    }

    /// The update that sets the variable to one certificate.
    pub(super) fn update(
        &self,
        certificate: &Signer,
        owner: &Uuid,
        signer: &Identity,
    ) -> Result<Vec<u8>, Error> {
        let list = list(certificate.der(), owner)?;
        let signature = signer.sign(&self.signed(&list))?;
        let content = EncapsulatedContentInfo { econtent_type: DATA, econtent: None };
        // Bare, without the `ContentInfo` around it, as UEFI wants it here.
        let envelope = signed_data(signer.signer(), content, None, &signature)
            .and_then(|data| data.to_der())
            .map_err(sign)?;
        let length = u32::try_from(8 + 16 + envelope.len()).map_err(sign)?;
        let mut update = TIME.to_vec();
        update.extend(length.to_le_bytes());
        update.extend(REVISION.to_le_bytes());
        update.extend(KIND.to_le_bytes());
        update.extend(PKCS7.to_bytes_le());
        update.extend(envelope);
        update.extend(list);
        Ok(update)
    }

    /// The signed bytes: the variable, then its content.
    fn signed(&self, list: &[u8]) -> Vec<u8> {
        let mut bytes: Vec<u8> = self.name.encode_utf16().flat_map(u16::to_le_bytes).collect();
        bytes.extend(self.vendor.to_bytes_le());
        bytes.extend(ATTRIBUTES.to_le_bytes());
        bytes.extend(TIME);
        bytes.extend(list);
        bytes
    }
}

/// The GUID of an owner, which follows from the platform key.
pub(super) fn owner(platform: &Signer) -> Uuid {
    Uuid::new_v5(&OWNERS, platform.der())
}

/// A signature list with one certificate.
fn list(certificate: &[u8], owner: &Uuid) -> Result<Vec<u8>, Error> {
    let size = u32::try_from(16 + certificate.len()).map_err(sign)?;
    let mut list = X509.to_bytes_le().to_vec();
    // The whole list, the header between (none), and each entry.
    for number in [28 + size, 0, size] {
        list.extend(number.to_le_bytes());
    }
    list.extend(owner.to_bytes_le());
    list.extend(certificate);
    Ok(list)
}
