//! Writing a bundle.

use std::io::{self, Read, Write};

use ed25519_dalek::{Signer as _, SigningKey};
use sha2::{Digest as _, Sha256};

use crate::{
    MAGIC, MANIFEST_MAX,
    manifest::{Manifest, Part},
    refusal::Refusal,
    signed,
};

impl Part {
    /// Measures a part.
    ///
    /// # Errors
    ///
    /// It cannot be read.
    pub fn of(mut content: impl Read) -> io::Result<Self> {
        let mut hash = Sha256::new();
        let size = io::copy(&mut content, &mut hash)?;
        let digits = hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
        Ok(Self { size, sha256: digits })
    }
}

/// Writes a bundle with these parts, which the manifest has to describe.
///
/// # Errors
///
/// The manifest breaks a rule, or something cannot be read or written.
pub fn write(
    out: &mut dyn Write,
    manifest: &Manifest,
    key: &SigningKey,
    parts: [&mut dyn Read; 2],
) -> io::Result<()> {
    let invalid = |refusal: Refusal| io::Error::new(io::ErrorKind::InvalidInput, refusal);
    manifest.check().map_err(invalid)?;
    let bytes = manifest.encode().map_err(invalid)?;
    if bytes.len() > MANIFEST_MAX {
        let reason = format!("it is longer than {MANIFEST_MAX} bytes");
        return Err(invalid(Refusal::Manifest { reason }));
    }
    let signed = signed(&bytes);
    out.write_all(&MAGIC)?;
    out.write_all(key.verifying_key().as_bytes())?;
    out.write_all(&key.sign(&signed).to_bytes())?;
    out.write_all(&signed[MAGIC.len()..])?;
    for (part, (name, described)) in parts.into_iter().zip(manifest.parts()) {
        // A part that changed since it was measured would make a bundle that every node refuses.
        let mut hash = Hashing { out, hash: Sha256::new() };
        let size = io::copy(part, &mut hash)?;
        let hash = hash.hash.finalize();
        let digits: String = hash.iter().map(|byte| format!("{byte:02x}")).collect();
        if (size, &digits) != (described.size, &described.sha256) {
            return Err(invalid(Refusal::Changed { part: name }));
        }
    }
    out.flush()
}

/// Writes, and hashes what it writes.
struct Hashing<'a> {
    out: &'a mut dyn Write,
    hash: Sha256,
}

impl Write for Hashing<'_> {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        let count = self.out.write(buffer)?;
        self.hash.update(&buffer[..count]);
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}
