//! Authenticode: signatures in UEFI programs, made and checked.
//!
//! ```text
//! | DOS, PE headers ... checksum ... security directory ... | sections | certificate table |
//!                       ^ not hashed ^ not hashed                        ^ not hashed
//! ```
//!
//! The hashed ranges follow the Microsoft PE and COFF specification. A file whose sections
//! leave gaps or overlap is refused: its gaps would be covered by no signature, and readers
//! differ in what they hash of it.
//!
//! A signature of this module has nothing in it that does not follow from the program, the
//! certificate and the RSA signature. So [`verify`] builds the whole table again and compares
//! bytes, and no parser of signatures stands between a file and its verdict.
//!
//! Invariants:
//! - Each byte of a signed file is hashed, compared, or must be zero.
//! - No input makes this module panic.

use std::ops::Range;

use cms::{
    cert::CertificateChoices,
    content_info::ContentInfo,
    signed_data::{EncapsulatedContentInfo, SignedAttributes, SignedData},
};
use sha2::{Digest as _, Sha256};
use x509_cert::{
    attr::Attribute,
    der::{
        self, Any, Decode as _, Encode as _, SliceReader, Tag,
        asn1::{ObjectIdentifier, OctetString, SetOfVec},
    },
};

use super::{
    Error,
    identity::{Identity, Signer},
    sign as failed,
    signed_data::{SHA256, algorithm, signed_data},
};

/// Offsets from the PE signature on.
const SECTION_COUNT: usize = 6;
const OPTIONAL_SIZE: usize = 20;
const OPTIONAL: usize = 24;
const SIZE_OF_HEADERS: usize = OPTIONAL + 60;
const CHECKSUM: usize = OPTIONAL + 64;
const DIRECTORY_COUNT: usize = OPTIONAL + 108;
/// The entry of the certificate table, the fifth of the data directories.
const SECURITY: usize = OPTIONAL + 112 + 4 * 8;
/// Magic of the optional header with 64-bit addresses.
const PE32_PLUS: u16 = 0x20b;
/// An entry of the section table, and where it names size and place in the file.
const SECTION: usize = 40;
const RAW: Range<usize> = 16..24;

/// A certificate table starts and ends at multiples of this.
const ALIGNMENT: usize = 8;
/// `WIN_CERTIFICATE`: length, revision 2.0, PKCS #7 signed data.
const HEADER: usize = 8;
const REVISION: u16 = 0x0200;
const KIND: u16 = 0x0002;

const SIGNED_DATA: ObjectIdentifier = ObjectIdentifier::new_unwrap("1.2.840.113549.1.7.2");
const CONTENT_TYPE: ObjectIdentifier = ObjectIdentifier::new_unwrap("1.2.840.113549.1.9.3");
const MESSAGE_DIGEST: ObjectIdentifier = ObjectIdentifier::new_unwrap("1.2.840.113549.1.9.4");
/// `SPC_INDIRECT_DATA`: the digest of something that lies elsewhere.
const INDIRECT: ObjectIdentifier = ObjectIdentifier::new_unwrap("1.3.6.1.4.1.311.2.1.4");
/// `SPC_PE_IMAGE_DATA`: of a PE file.
const PE_IMAGE: ObjectIdentifier = ObjectIdentifier::new_unwrap("1.3.6.1.4.1.311.2.1.15");
/// `SpcPeImageData`, in DER: no flags, and a file without a name.
const NAMELESS: [u8; 11] = [0x30, 9, 3, 1, 0, 0xa0, 4, 0xa2, 2, 0x80, 0];

/// Why a program cannot be signed, or why its signature does not hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// It is not a program for UEFI on 64-bit machines.
    #[error("it is not a 64-bit UEFI program: {0}")]
    Foreign(&'static str),
    /// Some of its bytes lie in no section, or in two.
    #[error("its sections leave gaps or overlap")]
    Ragged,
    /// It has a signature.
    #[error("it is signed already")]
    Signed,
    /// It has none.
    #[error("it is not signed")]
    Unsigned,
    /// The place of its certificate table is impossible.
    #[error("its certificate table is not at its end")]
    Misplaced,
    /// The table is not one that this signer makes for this program.
    #[error("it was changed after it was signed, or another signed it")]
    Different,
    /// The table fits, and the signature in it does not.
    #[error("the signature in it is wrong")]
    Forged,
}

/// The places of a PE file that matter to a signature.
struct Places {
    checksum: usize,
    directory: usize,
    /// The end of what is hashed.
    end: usize,
    /// Whether a certificate table follows.
    signed: bool,
}

fn u16_at(file: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_le_bytes(*file.get(at..)?.first_chunk()?))
}

/// A number of 32 bits, as a place or a length.
fn u32_at(file: &[u8], at: usize) -> Option<usize> {
    usize::try_from(u32::from_le_bytes(*file.get(at..)?.first_chunk()?)).ok()
}

impl Places {
    fn of(file: &[u8]) -> Result<Self, Fault> {
        let short = Fault::Foreign("its headers are cut short");
        if !file.starts_with(b"MZ") {
            return Err(Fault::Foreign("it does not begin with MZ"));
        }
        let pe = u32_at(file, 0x3c).ok_or(short)?;
        if file.get(pe..).and_then(<[u8]>::first_chunk) != Some(b"PE\0\0") {
            return Err(Fault::Foreign("it has no PE header"));
        }
        if u16_at(file, pe + OPTIONAL) != Some(PE32_PLUS) {
            return Err(Fault::Foreign("it is not of the format PE32+"));
        }
        let optional = usize::from(u16_at(file, pe + OPTIONAL_SIZE).ok_or(short)?);
        let directories = u32_at(file, pe + DIRECTORY_COUNT).ok_or(short)?;
        if directories < 5 || OPTIONAL + optional < SECURITY + 8 {
            return Err(Fault::Foreign("it has no place for a signature"));
        }
        let sections = usize::from(u16_at(file, pe + SECTION_COUNT).ok_or(short)?);
        let table = pe + OPTIONAL + optional;
        let headers = u32_at(file, pe + SIZE_OF_HEADERS).ok_or(short)?;
        let table = file.get(table..table + sections * SECTION).ok_or(short)?;
        if headers < pe + OPTIONAL + optional + table.len() || headers > file.len() {
            return Err(Fault::Foreign("its size of headers is wrong"));
        }
        let body = body(headers, table)?;
        let directory = pe + SECURITY;
        let place = u32_at(file, directory).ok_or(short)?;
        let size = u32_at(file, directory + 4).ok_or(short)?;
        let signed = (place, size) != (0, 0);
        let end = if signed { place } else { file.len() };
        if end < body {
            return Err(Fault::Ragged);
        }
        let aligned = place.is_multiple_of(ALIGNMENT) && size > HEADER;
        if signed && (!aligned || place.checked_add(size) != Some(file.len())) {
            return Err(Fault::Misplaced);
        }
        Ok(Self { checksum: pe + CHECKSUM, directory, end, signed })
    }

    /// SHA-256 of all that is hashed.
    fn hash(&self, file: &[u8]) -> [u8; 32] {
        let mut hash = Sha256::new();
        hash.update(&file[..self.checksum]);
        hash.update(&file[self.checksum + 4..self.directory]);
        hash.update(&file[self.directory + 8..self.end]);
        hash.finalize().into()
    }
}

/// The end of the sections, which have to follow the headers and each other.
fn body(headers: usize, table: &[u8]) -> Result<usize, Fault> {
    let mut raw: Vec<(usize, usize)> = table
        .chunks_exact(SECTION)
        .filter_map(|entry| {
            let raw = &entry[RAW];
            Some((u32_at(raw, 4)?, u32_at(raw, 0)?))
        })
        .filter(|(_, size)| *size > 0)
        .collect();
    raw.sort_unstable();
    raw.into_iter().try_fold(headers, |end, (place, size)| {
        if place == end { end.checked_add(size).ok_or(Fault::Ragged) } else { Err(Fault::Ragged) }
    })
}

/// The signed statement: this program has this hash.
struct Statement {
    content: EncapsulatedContentInfo,
    attributes: SignedAttributes,
}

impl Statement {
    fn of(hash: &[u8; 32]) -> der::Result<Self> {
        let digest =
            concat(&[algorithm(SHA256).to_der()?, OctetString::new(&hash[..])?.to_der()?])?;
        let image = concat(&[PE_IMAGE.to_der()?, NAMELESS.to_vec()])?;
        let indirect = [image, digest].concat();
        // The digest of the content leaves out the content's own tag and length.
        let summary = OctetString::new(&Sha256::digest(&indirect)[..])?;
        let attribute = |oid, value| -> der::Result<Attribute> {
            Ok(Attribute { oid, values: SetOfVec::try_from(vec![value])? })
        };
        let attributes = SetOfVec::try_from(vec![
            attribute(CONTENT_TYPE, Any::encode_from(&INDIRECT)?)?,
            attribute(MESSAGE_DIGEST, Any::encode_from(&summary)?)?,
        ])?;
        let econtent = Some(Any::new(Tag::Sequence, indirect)?);
        let content = EncapsulatedContentInfo { econtent_type: INDIRECT, econtent };
        Ok(Self { content, attributes })
    }

    /// The bytes that are signed.
    fn signed(&self) -> der::Result<Vec<u8>> {
        self.attributes.to_der()
    }

    /// The certificate table with this signature, and where the signature is in it: it ends
    /// the envelope, and zeros pad the table.
    fn table(&self, signer: &Signer, signature: &[u8]) -> der::Result<(Vec<u8>, Range<usize>)> {
        let attributes = Some(self.attributes.clone());
        let data = signed_data(signer, self.content.clone(), attributes, signature)?;
        let content = Any::encode_from(&data)?;
        let envelope = ContentInfo { content_type: SIGNED_DATA, content }.to_der()?;
        let end = HEADER + envelope.len();
        let length = end.next_multiple_of(ALIGNMENT);
        let mut table = u32::try_from(length)?.to_le_bytes().to_vec();
        table.extend(REVISION.to_le_bytes());
        table.extend(KIND.to_le_bytes());
        table.extend(envelope);
        table.resize(length, 0);
        Ok((table, end - signature.len()..end))
    }
}

/// A SEQUENCE of what is encoded already.
fn concat(parts: &[Vec<u8>]) -> der::Result<Vec<u8>> {
    Any::new(Tag::Sequence, parts.concat())?.to_der()
}

/// Signs a program. Its end is padded with zeros, and its checksum, which firmware does not
/// look at, becomes zero.
pub(super) fn sign(name: &str, file: &[u8], identity: &Identity) -> Result<Vec<u8>, Error> {
    let fault = |source| Error::Program { name: name.to_owned(), source };
    let mut file = file.to_vec();
    file.resize(file.len().next_multiple_of(ALIGNMENT), 0);
    let places = Places::of(&file).map_err(fault)?;
    if places.signed {
        return Err(fault(Fault::Signed));
    }
    file[places.checksum..places.checksum + 4].fill(0);
    let statement = Statement::of(&places.hash(&file)).map_err(failed)?;
    let signature = identity.sign(&statement.signed().map_err(failed)?)?;
    let (table, _) = statement.table(identity.signer(), &signature).map_err(failed)?;
    let place = u32::try_from(file.len()).map_err(failed)?.to_le_bytes();
    let size = u32::try_from(table.len()).map_err(failed)?.to_le_bytes();
    file[places.directory..places.directory + 8].copy_from_slice(&[place, size].concat());
    file.extend(table);
    Ok(file)
}

/// The hash by which firmware knows a program, signed or not: what a signature of it states, and
/// what a list of revoked programs has. A program without a signature has that of a signed one if
/// it needs no padding and its checksum is zero.
pub(crate) fn hash(file: &[u8]) -> Result<[u8; 32], Fault> {
    Ok(Places::of(file)?.hash(file))
}

/// Checks that this signer signed this program, with [`sign`], and that nothing of it has
/// changed since.
pub(crate) fn verify(file: &[u8], signer: &Signer) -> Result<(), Fault> {
    let places = Places::of(file)?;
    if !places.signed {
        return Err(Fault::Unsigned);
    }
    if u32_at(file, places.checksum) != Some(0) {
        return Err(Fault::Different);
    }
    let different = |_der: der::Error| Fault::Different;
    let statement = Statement::of(&places.hash(file)).map_err(different)?;
    // The table of a signature of the same length has it at the same place.
    let blank = vec![0; signer.signature_length().ok_or(Fault::Different)?];
    let (_, place) = statement.table(signer, &blank).map_err(different)?;
    let found = &file[places.end..];
    let signature = found.get(place).ok_or(Fault::Different)?;
    if statement.table(signer, signature).map_err(different)?.0 != found {
        return Err(Fault::Different);
    }
    match signer.has_signed(&statement.signed().map_err(different)?, signature) {
        true => Ok(()),
        false => Err(Fault::Forged),
    }
}

/// The certificate in the signature of a program: the claimed signer. [`verify`] says
/// whether the claim is true.
pub(crate) fn claimed(file: &[u8]) -> Result<Signer, Fault> {
    let places = Places::of(file)?;
    if !places.signed {
        return Err(Fault::Unsigned);
    }
    let envelope = file.get(places.end + HEADER..).ok_or(Fault::Misplaced)?;
    certificate(envelope).map_err(|_der| Fault::Different)
}

fn certificate(envelope: &[u8]) -> der::Result<Signer> {
    let envelope = ContentInfo::decode(&mut SliceReader::new(envelope)?)?;
    let data: SignedData = envelope.content.decode_as()?;
    let mut certificates = data.certificates.iter().flat_map(|set| set.0.iter());
    match certificates.next() {
        Some(CertificateChoices::Certificate(certificate)) => Signer::parse(&certificate.to_der()?),
        _ => Err(der::ErrorKind::Failed.into()),
    }
}

#[cfg(test)]
mod tests {

    use proptest::prelude::*;
    use x509_cert::der::{EncodePem as _, pem::LineEnding};

    use super::*;
    use crate::{
        program,
        signing::{Purpose, keys, other_keys},
        uki::{self, Section},
    };

    fn program() -> Vec<u8> {
        let sections = [Section::new(".cmdline", "quiet"), Section::new(".linux", vec![7; 3000])];
        uki::build(&uki::tests::stub(), &sections).unwrap()
    }

    fn signed() -> Vec<u8> {
        sign("program", &program(), &keys().identity(Purpose::Signature).unwrap()).unwrap()
    }

    fn signer() -> Signer {
        keys().identity(Purpose::Signature).unwrap().signer().clone()
    }

    #[test]
    fn the_same_program_and_key_give_the_same_bytes_which_verify() {
        let file = signed();
        assert!(file == signed());
        assert_eq!(verify(&file, &signer()), Ok(()));
        assert_eq!(claimed(&file), Ok(signer()));
        assert_eq!(verify(&program(), &signer()), Err(Fault::Unsigned));
        let other = other_keys().identity(Purpose::Signature).unwrap();
        assert_eq!(verify(&file, other.signer()), Err(Fault::Different));
    }

    #[test]
    fn a_flipped_byte_is_found_wherever_it_is() {
        let file = signed();
        let signer = signer();
        // Every byte of headers and signature, and some of what is between.
        let table = Places::of(&file).unwrap().end;
        let places = (0..0x400).chain((0x400..table).step_by(97)).chain(table..file.len());
        for at in places {
            let mut flipped = file.clone();
            flipped[at] ^= 1 << (at % 8);
            assert!(verify(&flipped, &signer).is_err(), "byte {at}");
            let _outcome = claimed(&flipped);
        }
    }

    #[test]
    fn a_longer_or_shorter_file_is_refused() {
        let file = signed();
        for length in [0, 1, 0x40, 0x100, file.len() - 8, file.len() - 1] {
            assert!(verify(&file[..length], &signer()).is_err(), "{length} bytes");
        }
        assert_eq!(verify(&[&file[..], &[0; 8]].concat(), &signer()), Err(Fault::Misplaced));
    }

    #[test]
    fn a_program_is_signed_once_and_only_without_gaps() {
        let identity = keys().identity(Purpose::Signature).unwrap();
        let fault = |file: &[u8]| match sign("x", file, &identity) {
            Err(Error::Program { source, .. }) => source,
            other => panic!("{other:?}"),
        };
        assert_eq!(fault(&signed()), Fault::Signed);
        assert_eq!(fault(b"MZ"), Fault::Foreign("its headers are cut short"));
        assert_eq!(fault(b"#!/bin/sh"), Fault::Foreign("it does not begin with MZ"));
        // The first section moves by one byte: a gap in front of it, and an overlap behind.
        let mut moved = program();
        moved[0x40 + OPTIONAL + 240 + 20] += 1;
        assert_eq!(fault(&moved), Fault::Ragged);
    }

    /// Runs a referee, if this host has it; `false` means that it does not.
    fn referee(name: &str, arguments: &[&str]) -> Option<bool> {
        match program::host(name).args(arguments).output() {
            Ok(output) => Some(output.status.success()),
            Err(_absent) => {
                println!("skipped: this host has no {name}");
                None
            }
        }
    }

    #[test]
    fn sbverify_and_osslsigncode_accept_it_and_refuse_a_flipped_one() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name).display().to_string();
        let (good, bad, pem) = (path("good.efi"), path("bad.efi"), path("db.pem"));
        let mut file = signed();
        std::fs::write(&good, &file).unwrap();
        file[0x500] ^= 1;
        std::fs::write(&bad, &file).unwrap();
        let certificate = signer().certificate().clone();
        std::fs::write(&pem, certificate.to_pem(LineEnding::LF).unwrap()).unwrap();
        for (file, right) in [(&good, true), (&bad, false)] {
            let verdict = referee("sbverify", &["--cert", &pem, file]);
            assert!(verdict.is_none_or(|accepted| accepted == right), "sbverify {file}");
            let arguments = ["verify", "-CAfile", &pem, "-in", file];
            let verdict = referee("osslsigncode", &arguments);
            assert!(verdict.is_none_or(|accepted| accepted == right), "osslsigncode {file}");
        }
    }

    proptest! {
        #[test]
        fn a_malformed_program_is_refused_and_never_a_panic(
            changes in prop::collection::vec((0..0x200_usize, any::<u8>()), 1..8),
            length in 0..6000_usize,
        ) {
            let mut file = signed();
            for (at, byte) in changes {
                file[at] = byte;
            }
            file.truncate(length);
            prop_assert!(verify(&file, &signer()).is_err());
            let _outcome = claimed(&file);
            let _outcome = sign("x", &file, &keys().identity(Purpose::Signature).unwrap());
        }

        #[test]
        fn noise_in_place_of_a_signature_is_refused_and_never_a_panic(
            noise in prop::collection::vec(any::<u8>(), 0..64), at in 0..1400_usize,
        ) {
            let mut file = signed();
            let table = Places::of(&file).unwrap().end;
            let at = table + HEADER + at.min(file.len() - table - HEADER);
            let end = (at + noise.len()).min(file.len());
            let before = file.clone();
            file[at..end].copy_from_slice(&noise[..end - at]);
            prop_assert!(file == before || verify(&file, &signer()).is_err());
            let _outcome = claimed(&file);
        }
    }
}
