//! The public certificate authorities that a node trusts where a server is outside of its
//! cluster: registries of container images, and time servers with Network Time Security.

use std::{
    fs,
    path::{Path, PathBuf},
};

use crate::error::{At as _, Error, Result};

/// Where the payload has one file for each authority that Debian takes from Mozilla. Its
/// package makes the bundle in a script at its installation, and no such script runs here.
const FOLDER: &str = "usr/share/ca-certificates/mozilla";

/// The file in which GnuTLS, and Go's `crypto/x509` first, look for the authorities of a
/// system.
pub(crate) const BUNDLE: &str = "etc/ssl/certs/ca-certificates.crt";

/// The authorities in PEM, in the order of their files.
///
/// # Errors
///
/// The payload has none, or a file cannot be read.
pub(crate) fn bundle(payload: &Path) -> Result<String> {
    let folder = payload.join(FOLDER);
    let entries = fs::read_dir(&folder).at("list", &folder)?;
    let mut files = entries
        .map(|entry| entry.map(|entry| entry.path()).at("list", &folder))
        .collect::<Result<Vec<PathBuf>>>()?;
    files.retain(|path| path.extension().is_some_and(|extension| extension == "crt"));
    files.sort();
    if files.is_empty() {
        return Err(Error::NoAuthorities { folder });
    }
    let read = |path: &PathBuf| fs::read_to_string(path).at("read", path);
    let texts = files.iter().map(read).collect::<Result<Vec<_>>>()?;
    Ok(texts.iter().map(|text| format!("{}\n", text.trim_end())).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bundle_has_every_authority_in_a_fixed_order() {
        let payload = tempfile::tempdir().unwrap();
        let folder = payload.path().join(FOLDER);
        fs::create_dir_all(&folder).unwrap();
        assert!(matches!(bundle(payload.path()), Err(Error::NoAuthorities { .. })));
        for (name, text) in [("b.crt", "second"), ("a.crt", "first\n"), ("README", "no")] {
            fs::write(folder.join(name), text).unwrap();
        }
        assert_eq!(bundle(payload.path()).unwrap(), "first\nsecond\n");
    }
}
