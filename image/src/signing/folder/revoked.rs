//! The list of revoked programs in a folder of keys, `dbx.auth`.

use std::{fs, io, path::Path};

use polis_base::{hex, sys::clock};

use super::files::{at, identity, read, signer, sync, write};
use crate::signing::{
    Error, Passphrase, Purpose,
    revocation::Revoked,
    variables::{self, DBX},
};

/// The list of what was revoked: the file as it is, and its content. `None` if nothing was.
pub(super) fn revocation(folder: &Path) -> Result<Option<(Vec<u8>, Revoked)>, Error> {
    let path = folder.join(DBX.file());
    let update = match read(&path) {
        Err(Error::File { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
            return Ok(None);
        }
        read => read?,
    };
    let owner = variables::owner(&signer(folder, Purpose::Platform)?);
    match Revoked::parse(&update, &owner) {
        Ok(revoked) => Ok(Some((update, revoked))),
        Err(reason) => {
            let (expected, reason) = ("list of revoked programs", reason.to_owned());
            Err(Error::Malformed { path, expected, reason })
        }
    }
}

/// Revokes programs, by their hashes ([`crate::authenticode_hash`]): writes the list `dbx.auth` of
/// a folder of keys anew, with the exchange key. Returns how many of them are new in it; the file
/// stays as it is if none is.
///
/// # Errors
///
/// A file is missing or damaged, the passphrase is wrong, or the list cannot be written.
pub fn revoke(
    folder: &Path,
    passphrase: &Passphrase,
    programs: &[[u8; 32]],
) -> Result<usize, Error> {
    let (_update, mut revoked) = revocation(folder)?.unwrap_or_default();
    let exchange = identity(folder, Purpose::Exchange, passphrase)?;
    let added = revoked.add(programs);
    if added == 0 {
        return Ok(0);
    }
    let owner = variables::owner(&signer(folder, Purpose::Platform)?);
    let update = revoked.update(&exchange, &owner, clock::now())?;
    let path = folder.join(DBX.file());
    let draft = folder.join(format!("{}.new-{}", DBX.file(), std::process::id()));
    write(&draft, &update, 0o644)?;
    fs::rename(&draft, &path).map_err(at("write", &path))?;
    sync(folder)?;
    Ok(added)
}

/// The hashes of the programs that were revoked with a folder of keys, as digits. Needs no
/// passphrase.
///
/// # Errors
///
/// The list is malformed.
pub fn revoked(folder: &Path) -> Result<Vec<String>, Error> {
    let (_update, revoked) = revocation(folder)?.unwrap_or_default();
    Ok(revoked.hashes().map(|hash| hex::encode(hash)).collect())
}
