//! The hash by which firmware knows a kernel image, taken from what an owner has of it.

use std::{
    fs::{self, File},
    io::{self, BufReader, Read as _},
    path::Path,
};

use polis_bundle::Bundle;

use crate::{
    error::{At as _, Error, Result},
    inspect::inspect,
    signing,
};

/// The first bytes of a program for UEFI, and of an update bundle.
const PROGRAM: &[u8] = b"MZ";
const BUNDLE: &[u8] = b"POLIS-UPDATE";

/// The hash by which firmware knows a program (Authenticode, SHA-256): of the kernel image in an
/// update bundle or a disk image, or of the program itself.
///
/// # Errors
///
/// The file cannot be read, or is none of the three.
pub fn authenticode_hash(path: &Path) -> Result<[u8; 32]> {
    let foreign = |reason: String| Error::Foreign { path: path.to_owned(), reason };
    let file = File::open(path).at("open", path)?;
    let mut magic = Vec::new();
    (&file).take(BUNDLE.len() as u64).read_to_end(&mut magic).at("read", path)?;
    let program = if magic.starts_with(PROGRAM) {
        fs::read(path).at("read", path)?
    } else if magic == BUNDLE {
        let reader = BufReader::new(File::open(path).at("open", path)?);
        let mut kernel = Vec::new();
        Bundle::open(reader, None)
            .and_then(|bundle| bundle.parts([&mut kernel, &mut io::sink()], &mut |_bytes| ()))
            .map_err(|error| foreign(error.to_string()))?;
        kernel
    } else {
        let hash = inspect(path)?.authenticode;
        return hash.ok_or_else(|| foreign("its kernel image cannot be signed".to_owned()));
    };
    signing::authenticode_hash(&program).map_err(|fault| foreign(fault.to_string()))
}
