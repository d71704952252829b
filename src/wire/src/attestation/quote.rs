//! Checks a quote: the TPM's own statement about its registers (`TPMS_ATTEST`, `TPMS_QUOTE_INFO`).
//!
//! The signature is checked before anything is read from the statement. A restricted key
//! signs nothing from outside that begins with the TPM's mark, so a statement with the mark
//! is of the TPM.

use std::collections::{BTreeMap, BTreeSet};

use ring::signature::{ECDSA_P256_SHA256_FIXED, UnparsedPublicKey};
use sha2::{Digest as _, Sha256};

use super::Error;
use super::derive::{SIZE, coordinate, uncompressed};
use super::format::{Reader, Short};
use super::key::{ALG_ECDSA, ALG_SHA256, AttestationKey};

/// `TPM_GENERATED_VALUE`: the TPM itself has made it.
const GENERATED: u32 = 0xff54_4347;
/// `TPM_ST_ATTEST_QUOTE`.
const QUOTE: u16 = 0x8018;

/// The values of registers in the SHA-256 bank, by their numbers.
pub type Registers = BTreeMap<u32, [u8; SIZE]>;

/// The fields of a statement that a check needs.
struct Statement<'a> {
    qualifier: &'a [u8],
    /// The registers of the SHA-256 bank that it is about.
    selected: BTreeSet<u32>,
    digest: &'a [u8],
}

impl From<Short> for Error {
    fn from(_short: Short) -> Self {
        Self::Quote
    }
}

/// Checks that `key` signed a quote for this question and these values of the registers.
pub(super) fn check(
    key: &AttestationKey,
    quote: &[u8],
    signature: &[u8],
    qualifier: &[u8],
    registers: &Registers,
) -> Result<(), Error> {
    let public = UnparsedPublicKey::new(&ECDSA_P256_SHA256_FIXED, uncompressed(&key.point));
    let signature = fixed(signature).ok_or(Error::Signature)?;
    public.verify(quote, &signature).map_err(|_unspecified| Error::Signature)?;
    let statement = read(quote)?;
    if statement.qualifier != qualifier {
        return Err(Error::Question);
    }
    if !statement.selected.iter().eq(registers.keys()) {
        return Err(Error::Selection);
    }
    let digest = registers.values().fold(Sha256::new(), Sha256::chain_update).finalize();
    if statement.digest != &digest[..] {
        return Err(Error::Registers);
    }
    Ok(())
}

/// A `TPMT_SIGNATURE` of ECDSA with SHA-256, as two numbers of one length.
fn fixed(signature: &[u8]) -> Option<[u8; 2 * SIZE]> {
    let mut reader = Reader(signature);
    if reader.u16().ok()? != ALG_ECDSA || reader.u16().ok()? != ALG_SHA256 {
        return None;
    }
    let (r, s) = (coordinate(reader.sized().ok()?)?, coordinate(reader.sized().ok()?)?);
    reader.end().ok()?;
    let mut fixed = [0; 2 * SIZE];
    fixed[..SIZE].copy_from_slice(&r);
    fixed[SIZE..].copy_from_slice(&s);
    Some(fixed)
}

fn read(quote: &[u8]) -> Result<Statement<'_>, Error> {
    let mut reader = Reader(quote);
    if reader.u32()? != GENERATED || reader.u16()? != QUOTE {
        return Err(Error::Quote);
    }
    let _signer = reader.sized()?;
    let qualifier = reader.sized()?;
    // Clock, resets, restarts, whether the clock is safe; the version of the firmware.
    let _clock_and_version = reader.take(8 + 4 + 4 + 1 + 8)?;
    // One bank.
    if reader.u32()? != 1 || reader.u16()? != ALG_SHA256 {
        return Err(Error::Selection);
    }
    let length = usize::from(reader.u8()?);
    let bits = reader.take(length)?;
    let selected = (0_u32..).zip(bits).flat_map(|(place, byte)| {
        (0..8).filter(move |bit| byte >> bit & 1 == 1).map(move |bit| place * 8 + bit)
    });
    let statement = Statement { qualifier, selected: selected.collect(), digest: reader.sized()? };
    reader.end()?;
    Ok(statement)
}
