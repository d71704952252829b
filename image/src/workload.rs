//! What the full variant of the root has beside its programs: the mount points of the fixed
//! paths of Kubernetes, the container images of the system, and the authorities of public
//! registries.
//!
//! The system is read-only, so a path where a worker mounts something must exist in it.
//! `docs/worker.md` says what is mounted where.

use std::{
    fs,
    path::{Path, PathBuf},
};

use crate::{
    error::{At as _, Error, Result},
    oci,
    tree::Tree,
};

/// Folders that a worker mounts over.
pub const MOUNT_POINTS: [&str; 8] = [
    "etc/cni/net.d",
    "etc/kubernetes",
    "opt/cni/bin",
    "usr/libexec/kubernetes",
    "var/lib/cni",
    "var/lib/containerd",
    "var/lib/kubelet",
    "var/log",
];

/// Where the payload has one file for each authority that Debian takes from Mozilla. Its
/// package makes the bundle in a script at its installation, and no such script runs here.
const AUTHORITIES: &str = "usr/share/ca-certificates/mozilla";

/// The first of the files in which Go's `crypto/x509` looks for the authorities of a system.
const BUNDLE: &str = "etc/ssl/certs/ca-certificates.crt";

/// Adds all of it to the plan of a root; `images` is a layout of [`oci::layout`], and
/// `authorities` are those of [`authorities`].
pub fn add(root: &mut Tree, images: Tree, authorities: String) {
    for point in MOUNT_POINTS {
        root.folder(point, 0o755);
    }
    root.place(oci::FOLDER, images);
    root.text(BUNDLE, authorities);
}

/// The authorities of public registries, in PEM, in the order of their files.
///
/// # Errors
///
/// The payload has none, or a file cannot be read.
pub(crate) fn authorities(payload: &Path) -> Result<String> {
    let folder = payload.join(AUTHORITIES);
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
    fn a_root_has_the_places_and_the_images() {
        let (mut root, mut images) = (Tree::default(), Tree::default());
        images.text("index.json", "{}");
        add(&mut root, images, "a\n".to_owned());
        let paths: Vec<_> = root.iter().map(|(path, _)| path).collect();
        assert!(paths.contains(&"usr/share/polis/images/index.json"));
        assert!(paths.contains(&BUNDLE));
        assert!(MOUNT_POINTS.iter().all(|point| paths.contains(point)));
    }

    #[test]
    fn the_bundle_has_every_authority_in_a_fixed_order() {
        let payload = tempfile::tempdir().unwrap();
        let folder = payload.path().join(AUTHORITIES);
        fs::create_dir_all(&folder).unwrap();
        assert!(matches!(authorities(payload.path()), Err(Error::NoAuthorities { .. })));
        for (name, text) in [("b.crt", "second"), ("a.crt", "first\n"), ("README", "no")] {
            fs::write(folder.join(name), text).unwrap();
        }
        assert_eq!(authorities(payload.path()).unwrap(), "first\nsecond\n");
    }
}
