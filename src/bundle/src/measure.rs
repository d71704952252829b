//! The values that a machine's TPM has in its registers after the boot stub of a kernel image
//! has started that image, and the policy of a TPM that these values satisfy.
//!
//! The stub (systemd's) extends register 11 with the name and the content of each section that
//! it uses, in an order of its own. It extends 12 and 13 with what it finds beside the image:
//! command lines, credentials, extensions. A node has none of them, so both keep their first
//! value.
//!
//! ```text
//! register 11 = H(... H(H(zeros || H(".linux\0")) || H(kernel)) ... || H(content of .sbat))
//! ```
//!
//! The headers are read here and not by a library of object files: the sections' table is all
//! that counts, and `polisctl` reads it, too.
//!
//! What this module does not do: check the signature of an image. It changes no section.

use std::collections::BTreeMap;

use sha2::{Digest as _, Sha256};

/// Values of registers in the SHA-256 bank, by their numbers.
pub type Registers = BTreeMap<u32, [u8; 32]>;

/// The register of the image's sections.
const SECTIONS: u32 = 11;
/// The registers of what is added from outside.
const ADDITIONS: [u32; 2] = [12, 13];

/// The sections that the stub measures, in its order. `.pcrsig` is never measured, since it
/// signs the outcome; sections of other names are not the stub's.
const MEASURED: [&[u8]; 13] = [
    b".linux",
    b".osrel",
    b".cmdline",
    b".initrd",
    b".ucode",
    b".splash",
    b".dtb",
    b".uname",
    b".sbat",
    b".pcrpkey",
    b".dtbauto",
    b".hwids",
    b".efifw",
];

/// Begins another set of sections, of which a person chooses one at boot.
const PROFILE: &[u8] = b".profile";

/// Bytes of an entry of the section table, and of a name in it.
const ENTRY: usize = 40;
const NAME: usize = 8;

/// This file's own text: a recipe for what is signed of an image.
pub const RECIPE: &str = include_str!("measure.rs");

/// `TPM_CC_PolicyPCR`.
const POLICY_PCR: [u8; 4] = 0x17f_u32.to_be_bytes();
/// `TPML_PCR_SELECTION` of register 11: one bank, SHA-256, three bytes with a bit a register.
const SELECTION: [u8; 10] = [0, 0, 0, 1, 0, 0x0b, 3, 0, 8, 0];

/// An image whose registers cannot be computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not a unified kernel image: {0}")]
pub struct Unmeasurable(&'static str);

/// The registers after a start of this kernel image.
///
/// # Errors
///
/// [`Unmeasurable`].
pub fn registers(kernel: &[u8]) -> Result<Registers, Unmeasurable> {
    let sections = sections(kernel)?;
    if sections.contains_key(PROFILE) {
        return Err(Unmeasurable("it has several profiles"));
    }
    if !sections.contains_key(&b".linux"[..]) {
        return Err(Unmeasurable("it has no kernel"));
    }
    let mut value = [0; 32];
    for name in MEASURED {
        let Some(content) = sections.get(name) else { continue };
        value = extended(value, &[name, &[0]].concat());
        value = extended(value, content);
    }
    let mut registers: Registers = ADDITIONS.into_iter().map(|number| (number, [0; 32])).collect();
    registers.insert(SECTIONS, value);
    Ok(registers)
}

/// The digest of the TPM policy that holds after a start of this kernel image, and after no
/// start of another one: what the policy key of an image's owner signs.
///
/// # Errors
///
/// [`Unmeasurable`].
pub fn approval(kernel: &[u8]) -> Result<[u8; 32], Unmeasurable> {
    let registers = registers(kernel)?;
    let sections = registers.get(&SECTIONS).ok_or(Unmeasurable("it has no kernel"))?;
    Ok(policy(sections))
}

/// The digest of the TPM policy that holds while register 11 has the value `sections`
/// (`TPM2_PolicyPCR` in a new session: TPM 2.0 Library, part 3, 23.7).
#[must_use]
pub fn policy(sections: &[u8; 32]) -> [u8; 32] {
    Sha256::new_with_prefix([0; 32])
        .chain_update(POLICY_PCR)
        .chain_update(SELECTION)
        .chain_update(Sha256::digest(sections))
        .finalize()
        .into()
}

/// A register after something was measured into it.
fn extended(value: [u8; 32], measured: &[u8]) -> [u8; 32] {
    Sha256::new_with_prefix(value).chain_update(Sha256::digest(measured)).finalize().into()
}

/// The content of each section, by its name.
fn sections(image: &[u8]) -> Result<BTreeMap<&[u8], &[u8]>, Unmeasurable> {
    let cut = Unmeasurable("its headers are cut short");
    let field = |at: usize, length: usize| -> Result<usize, Unmeasurable> {
        let bytes = at.checked_add(length).and_then(|end| image.get(at..end)).ok_or(cut)?;
        let number = bytes.iter().rev().fold(0_u32, |number, byte| number << 8 | u32::from(*byte));
        usize::try_from(number).map_err(|_never| cut)
    };
    if !image.starts_with(b"MZ") {
        return Err(Unmeasurable("it is not a program for UEFI"));
    }
    let head = field(0x3c, 4)?;
    if image.get(head..).is_none_or(|head| !head.starts_with(b"PE\0\0")) {
        return Err(Unmeasurable("it is not a program for UEFI"));
    }
    let (count, optional) = (field(head + 6, 2)?, field(head + 20, 2)?);
    let table = head + 24 + optional;
    let mut sections = BTreeMap::new();
    for entry in (0..count).map(|number| table + number * ENTRY) {
        let name = image.get(entry..entry + NAME).ok_or(cut)?;
        let name = name.split(|byte| *byte == 0).next().unwrap_or_default();
        let (length, room) = (field(entry + 8, 4)?, field(entry + 16, 4)?);
        let start = field(entry + 20, 4)?;
        if !MEASURED.contains(&name) && name != PROFILE {
            continue;
        }
        let content = start.checked_add(length).and_then(|end| image.get(start..end));
        let content = content.filter(|_content| length <= room);
        let content = content.ok_or(Unmeasurable("a section is cut short"))?;
        if sections.insert(name, content).is_some() {
            return Err(Unmeasurable("a section is there twice"));
        }
    }
    Ok(sections)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Headers, a table, and the sections one after the other.
    pub(crate) fn image(sections: &[(&str, &[u8])]) -> Vec<u8> {
        let mut image = vec![0; 0x40];
        image[..2].copy_from_slice(b"MZ");
        image[0x3c] = 0x40;
        image.extend(b"PE\0\0\x64\x86");
        image.extend(u16::try_from(sections.len()).unwrap().to_le_bytes());
        image.extend([0; 16]);
        let mut start = image.len() + sections.len() * ENTRY;
        for (name, content) in sections {
            let mut entry = [0; ENTRY];
            entry[..name.len()].copy_from_slice(name.as_bytes());
            let length = u32::try_from(content.len()).unwrap().to_le_bytes();
            entry[8..12].copy_from_slice(&length);
            entry[16..20].copy_from_slice(&length);
            entry[20..24].copy_from_slice(&u32::try_from(start).unwrap().to_le_bytes());
            image.extend(entry);
            start += content.len();
        }
        sections.iter().for_each(|(_name, content)| image.extend(*content));
        image
    }

    #[test]
    fn the_stub_s_order_counts_and_not_that_of_the_file() {
        let parts: [(&str, &[u8]); 4] =
            [(".osrel", b"os"), (".pkgs", b"not measured"), (".linux", b"kernel"), (".sbat", b"s")];
        let measured = registers(&image(&parts)).unwrap();
        let mut value = [0; 32];
        for part in [&b".linux\0"[..], b"kernel", b".osrel\0", b"os", b".sbat\0", b"s"] {
            value = extended(value, part);
        }
        assert_eq!(measured, [(11, value), (12, [0; 32]), (13, [0; 32])].into());
        let mut turned = parts;
        turned.reverse();
        turned[2].1 = b"another list";
        assert_eq!(registers(&image(&turned)).unwrap(), measured);
        turned[1].1 = b"another kernel";
        assert_ne!(registers(&image(&turned)).unwrap(), measured);
    }

    #[test]
    fn the_policy_is_the_one_that_a_tpm_computes() {
        // By hand: SHA-256 of 32 zeros, 0000017f, 00000001 000b 03 000800, SHA-256 of the value.
        let zeros = "fd32fa22c52cfc8e1a0c29eb38519f87084cab0b04b0d8f020a4d38b2f4e223e";
        let sevens = "cc72550c0b76b3246d8e115bd8d82f1a37d4332f9bbbd379f8289d863d06cad0";
        for (value, expected) in [(0, zeros), (7, sevens)] {
            let digits = policy(&[value; 32]).map(|byte| format!("{byte:02x}"));
            assert_eq!(digits.concat(), expected);
        }
        let kernel = image(&[(".linux", b"kernel"), (".pcrsig", b"one")]);
        let sections = registers(&kernel).unwrap()[&11];
        assert_eq!(approval(&kernel).unwrap(), policy(&sections));
        // The signature is never measured, and the key is.
        let approved = |parts: &[(&str, &[u8])]| approval(&image(parts)).unwrap();
        assert_eq!(approved(&[(".linux", b"kernel")]), approval(&kernel).unwrap());
        assert_ne!(
            approved(&[(".linux", b"kernel"), (".pcrpkey", b"key")]),
            approval(&kernel).unwrap()
        );
    }

    #[test]
    fn what_the_stub_would_read_differently_is_refused() {
        let reason = |sections: &[(&str, &[u8])]| registers(&image(sections)).unwrap_err().0;
        assert_eq!(reason(&[(".osrel", b"")]), "it has no kernel");
        assert_eq!(reason(&[(".linux", b"a"), (".linux", b"b")]), "a section is there twice");
        assert_eq!(reason(&[(".linux", b"a"), (".profile", b"")]), "it has several profiles");
        let whole = image(&[(".linux", b"kernel")]);
        for length in 0..whole.len() {
            assert!(registers(&whole[..length]).is_err(), "{length}");
        }
    }
}
