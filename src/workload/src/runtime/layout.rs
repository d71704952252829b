//! The images that the system brings along, read from its OCI layout.
//!
//! The image builder makes the layout; the kernel verifies each block of it as it is read,
//! so a wrong one is a bug of the builder, and an error here.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::Deserialize;

/// The annotation with the full reference of an image.
const NAME: &str = "io.containerd.image.name";
/// An index or a manifest has some hundred bytes.
const DOCUMENT_MAX: u64 = 1 << 20;

/// Why the layout cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file is missing, or too large.
    #[error("cannot read {}", path.display())]
    Read {
        /// Which one.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A file is not what its name says.
    #[error("cannot understand {}", path.display())]
    Malformed {
        /// Which one.
        path: PathBuf,
        /// Why.
        source: serde_json::Error,
    },
    /// A name that would leave the folder of blobs.
    #[error("the image layout has no blob {digest}")]
    Digest {
        /// The object in its place.
        digest: String,
    },
}

/// A blob as another one refers to it.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Descriptor {
    /// Its kind.
    pub media_type: String,
    /// `sha256:` and 64 hexadecimal digits.
    pub digest: String,
    /// Bytes.
    pub size: u64,
    /// Of these, the index uses one.
    #[serde(default)]
    annotations: std::collections::BTreeMap<String, String>,
}

#[derive(Deserialize)]
struct Index {
    manifests: Vec<Descriptor>,
}

#[derive(Deserialize)]
struct Manifest {
    config: Descriptor,
    layers: Vec<Descriptor>,
}

/// One blob, and what it keeps from being collected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Blob {
    /// Its descriptor.
    pub descriptor: Descriptor,
    /// Its file.
    pub path: PathBuf,
    /// The labels by which containerd's collector finds the blobs below it.
    pub labels: Vec<(String, String)>,
}

/// One image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Image {
    /// The full reference.
    pub reference: String,
    /// Its manifest.
    pub target: Descriptor,
    /// All of its blobs, the manifest last.
    pub blobs: Vec<Blob>,
}

/// Reads the images of the layout in `folder`. Blocks.
///
/// # Errors
///
/// [`Error`].
pub fn read(folder: &Path) -> Result<Vec<Image>, Error> {
    let index: Index = parse(&folder.join("index.json"))?;
    let images = index.manifests.into_iter().map(|target| image(folder, target));
    images.collect()
}

fn image(folder: &Path, target: Descriptor) -> Result<Image, Error> {
    let path = place(folder, &target)?;
    let manifest: Manifest = parse(&path)?;
    let config = "containerd.io/gc.ref.content.config".to_owned();
    let mut labels = vec![(config, manifest.config.digest.clone())];
    for (number, layer) in manifest.layers.iter().enumerate() {
        let label = format!("containerd.io/gc.ref.content.l.{number}");
        labels.push((label, layer.digest.clone()));
    }
    let leaf = |descriptor: Descriptor| {
        let path = place(folder, &descriptor)?;
        Ok(Blob { descriptor, path, labels: Vec::new() })
    };
    let below = manifest.layers.into_iter().chain([manifest.config]).map(leaf);
    let mut blobs = below.collect::<Result<Vec<_>, _>>()?;
    blobs.push(Blob { descriptor: target.clone(), path, labels });
    let reference = target.annotations.get(NAME).cloned().unwrap_or_default();
    Ok(Image { reference, target, blobs })
}

/// The file of a blob.
fn place(folder: &Path, descriptor: &Descriptor) -> Result<PathBuf, Error> {
    let digest = &descriptor.digest;
    let hash = digest
        .strip_prefix("sha256:")
        .filter(|hash| hash.len() == 64 && hash.bytes().all(|byte| byte.is_ascii_hexdigit()));
    let wrong = || Error::Digest { digest: digest.clone() };
    Ok(folder.join("blobs/sha256").join(hash.ok_or_else(wrong)?))
}

fn parse<T: serde::de::DeserializeOwned>(path: &Path) -> Result<T, Error> {
    let failed = |source| Error::Read { path: path.to_owned(), source };
    if fs::metadata(path).map_err(failed)?.len() > DOCUMENT_MAX {
        return Err(failed(io::ErrorKind::FileTooLarge.into()));
    }
    let bytes = fs::read(path).map_err(failed)?;
    serde_json::from_slice(&bytes)
        .map_err(|source| Error::Malformed { path: path.to_owned(), source })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The layout of the image builder, laid out in a folder.
    fn layout() -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for program in ["demo", "pause"] {
            fs::write(folder.path().join(program), program).unwrap();
        }
        let layout = polis_image::oci::layout(&polis_image::oci::IMAGES, folder.path()).unwrap();
        layout.lay_out(&folder.path().join("images")).unwrap();
        folder
    }

    #[test]
    fn the_builder_s_layout_reads_back() {
        let folder = layout();
        let images = read(&folder.path().join("images")).unwrap();
        let names: Vec<_> = images.iter().map(|image| image.reference.as_str()).collect();
        assert_eq!(names, ["polis.internal/demo:1", super::super::config::PAUSE]);
        for Image { blobs, target, .. } in images {
            let [layer, config, manifest] = &blobs[..] else { panic!("{blobs:?}") };
            assert_eq!(manifest.descriptor, target);
            let expected = [
                ("containerd.io/gc.ref.content.config", &config.descriptor.digest),
                ("containerd.io/gc.ref.content.l.0", &layer.descriptor.digest),
            ];
            let expected = expected.map(|(name, digest)| (name.to_owned(), digest.clone()));
            assert_eq!(manifest.labels, expected);
            for blob in &blobs {
                assert_eq!(fs::metadata(&blob.path).unwrap().len(), blob.descriptor.size);
            }
        }
    }

    #[test]
    fn a_digest_does_not_lead_out_of_the_layout() {
        let folder = layout();
        let index = folder.path().join("images/index.json");
        let text = fs::read_to_string(&index).unwrap();
        let at = text.find("sha256:").unwrap() + "sha256:".len();
        let wrong = format!("{}{:.>64}{}", &text[..at], "/../etc/passwd", &text[at + 64..]);
        fs::write(&index, wrong).unwrap();
        let error = read(&folder.path().join("images")).unwrap_err();
        assert!(matches!(error, Error::Digest { .. }), "{error}");
    }

    #[test]
    fn an_image_without_a_layout_is_named() {
        let error = read(Path::new("/nowhere")).unwrap_err();
        assert_eq!(error.to_string(), "cannot read /nowhere/index.json");
    }
}
