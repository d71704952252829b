//! The files that enrol an owner's keys in firmware: signature lists in authenticated
//! updates of the variables PK, KEK, db and dbx (UEFI 2.10, 8.2.2 and 32.4.1).
//!
//! ```text
//! EFI_TIME | WIN_CERTIFICATE_UEFI_GUID { SignedData } | EFI_SIGNATURE_LIST { X.509 or SHA-256 }
//! ```
//!
//! In setup mode firmware takes each of them once. A machine that has keys takes an update whose
//! time is later than that of the former one: the time is fixed in the files with keys, and grows
//! in the list of what is revoked.

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
/// A list of SHA-256 hashes.
const SHA256: Uuid = uuid!("c1c41626-504c-4092-aca9-41f936934328");
/// A signature in PKCS #7.
const PKCS7: Uuid = uuid!("4aafd29d-68df-49ee-8aa9-347d375665a7");
/// Namespace of the GUIDs by which lists name the owner of a key.
const OWNERS: Uuid = uuid!("0d3a9c5e-7a0f-4a52-8d06-3a6d5b0c1f4e");

/// Kept over a loss of power, there for firmware and for the system, written with a
/// signature and a time.
const ATTRIBUTES: u32 = 0x01 | 0x02 | 0x04 | 0x20;
/// `EFI_TIME` of every update with keys: the first of January 2026, and zeros for what must be
/// zero.
pub(super) const TIME: [u8; 16] = [0xea, 0x07, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
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
pub(super) const DBX: Variable = Variable { name: "dbx", vendor: SECURITY };

impl Variable {
    /// The file that systemd-boot looks for in a folder of keys.
    pub(super) fn file(&self) -> String {
        format!("{}.auth", self.name)
    }

    /// The update that sets the variable to a signature list, at `time`, an `EFI_TIME`.
    pub(super) fn update(
        &self,
        list: &[u8],
        time: &[u8; 16],
        signer: &Identity,
    ) -> Result<Vec<u8>, Error> {
        let signature = signer.sign(&self.signed(list, time))?;
        let content = EncapsulatedContentInfo { econtent_type: DATA, econtent: None };
        // Bare, without the `ContentInfo` around it, as UEFI wants it here.
        let envelope = signed_data(signer.signer(), content, None, &signature)
            .and_then(|data| data.to_der())
            .map_err(sign)?;
        let length = u32::try_from(8 + 16 + envelope.len()).map_err(sign)?;
        let mut update = time.to_vec();
        update.extend(length.to_le_bytes());
        update.extend(REVISION.to_le_bytes());
        update.extend(KIND.to_le_bytes());
        update.extend(PKCS7.to_bytes_le());
        update.extend(envelope);
        update.extend(list);
        Ok(update)
    }

    /// The signed bytes: the variable, then its content.
    fn signed(&self, list: &[u8], time: &[u8; 16]) -> Vec<u8> {
        let mut bytes: Vec<u8> = self.name.encode_utf16().flat_map(u16::to_le_bytes).collect();
        bytes.extend(self.vendor.to_bytes_le());
        bytes.extend(ATTRIBUTES.to_le_bytes());
        bytes.extend(time);
        bytes.extend(list);
        bytes
    }
}

/// The GUID of an owner, which follows from the platform key.
pub(super) fn owner(platform: &Signer) -> Uuid {
    Uuid::new_v5(&OWNERS, platform.der())
}

/// A signature list with one certificate.
pub(super) fn certificate(certificate: &Signer, owner: &Uuid) -> Result<Vec<u8>, Error> {
    list(X509, &[certificate.der()], owner)
}

/// A signature list with the hashes of programs, each of which has 32 bytes.
pub(super) fn hashes<'a>(
    hashes: impl IntoIterator<Item = &'a [u8; 32]>,
    owner: &Uuid,
) -> Result<Vec<u8>, Error> {
    let hashes: Vec<&[u8]> = hashes.into_iter().map(|hash| &hash[..]).collect();
    list(SHA256, &hashes, owner)
}

/// A signature list. The entries have the same length.
fn list(kind: Uuid, entries: &[&[u8]], owner: &Uuid) -> Result<Vec<u8>, Error> {
    let length = entries.first().map_or(0, |entry| entry.len());
    let size = u32::try_from(16 + length).map_err(sign)?;
    let whole = u32::try_from(28 + entries.len() * (16 + length)).map_err(sign)?;
    let mut list = kind.to_bytes_le().to_vec();
    // The whole list, the header between (none), and each entry.
    for number in [whole, 0, size] {
        list.extend(number.to_le_bytes());
    }
    for entry in entries {
        list.extend(owner.to_bytes_le());
        list.extend(*entry);
    }
    Ok(list)
}

/// The time and the hashes of an update that [`Variable::update`] made of [`hashes`].
///
/// # Errors
///
/// The first fault of the update, in words.
pub(super) fn read_hashes(
    update: &[u8],
    owner: &Uuid,
) -> Result<([u8; 16], Vec<[u8; 32]>), &'static str> {
    const SHORT: &str = "it is cut short";
    let (time, rest) = update.split_first_chunk().ok_or(SHORT)?;
    let length = rest.first_chunk().ok_or(SHORT)?;
    let length = usize::try_from(u32::from_le_bytes(*length)).map_err(|_large| SHORT)?;
    let list = rest.get(length..).ok_or(SHORT)?;
    let (kind, list) = list.split_first_chunk().ok_or(SHORT)?;
    if Uuid::from_bytes_le(*kind) != SHA256 {
        return Err("it is no list of SHA-256 hashes");
    }
    let (sizes, entries) = list.split_first_chunk::<12>().ok_or(SHORT)?;
    let expected = [28 + entries.len(), 0, 48].map(|size| u32::try_from(size).unwrap_or(0));
    let (entries, rest) = entries.as_chunks::<48>();
    if *sizes != *expected.map(u32::to_le_bytes).as_flattened() || !rest.is_empty() {
        return Err("its sizes are wrong");
    }
    let mut found = Vec::new();
    for entry in entries {
        let (by, hash) = entry.split_first_chunk().ok_or(SHORT)?;
        if Uuid::from_bytes_le(*by) != *owner {
            return Err("it is of another owner");
        }
        found.push(hash.try_into().map_err(|_length| SHORT)?);
    }
    Ok((*time, found))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_signature_list_has_the_layout_of_uefi() {
        let owner = Uuid::from_bytes([7; 16]);
        let list = hashes([&[1; 32], &[2; 32]], &owner).unwrap();
        let kind = [0x26, 0x16, 0xc4, 0xc1, 0x4c, 0x50, 0x92, 0x40];
        assert_eq!(list[..8], kind);
        let sizes = [124_u32, 0, 48].map(u32::to_le_bytes).concat();
        assert_eq!(list[16..28], sizes);
        let entry = |byte| [[7; 16].to_vec(), vec![byte; 32]].concat();
        assert_eq!(list[28..], [entry(1), entry(2)].concat());
    }

    proptest! {
        #[test]
        fn no_input_is_too_strange_to_read(update: Vec<u8>) {
            let _read = read_hashes(&update, &Uuid::nil());
        }
    }
}
