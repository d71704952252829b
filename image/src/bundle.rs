//! The update bundle of a build: what `polis_bundle` writes, from an image's parts.
//!
//! Invariants:
//! - The bundle appears whole or not at all.
//! - Its kernel image names the system of the manifest, and not that of a later build in the same
//!   folder.

use std::{
    borrow::Cow,
    fs::{self, File},
    io::{BufWriter, Cursor, Read, Write as _},
    path::Path,
};

use polis_bundle::{Manifest as Contents, Part, Refusal, SECURITY_LEVEL, write};
use semver::Version;

use crate::{
    atomic, boot_files,
    error::{At as _, Error, Result},
    etcd, layout,
    manifest::{self, Manifest, Variant},
    signing::{ImageSigner, ReleaseKey},
    uki::{self, Section},
};

/// The oldest version that a system of these sources updates: older ones keep something on
/// the disk that it does not read.
const UPDATES_FROM: Version = Version::new(0, 1, 0);
/// The only kind of processor that images are built for.
const ARCHITECTURE: &str = "x86_64";

/// Writes the bundle of a built image to `out`. A caller that holds the [`crate::Guard`] of its
/// folder reads the parts of one build.
///
/// # Errors
///
/// A part is missing, the kernel image is of another build, the version is not one, or the file
/// cannot be written.
pub fn bundle(
    manifest: &Manifest,
    signer: &ImageSigner,
    release: &ReleaseKey,
    out: &Path,
) -> Result<()> {
    let invalid = |reason: String| Error::Bundle(Refusal::Manifest { reason });
    let version = Version::parse(&manifest.version)
        .map_err(|error| invalid(format!("the version {}: {error}", manifest.version)))?;
    let uki = manifest.path(&manifest.uki);
    let unsigned = fs::read(&uki).at("read", &uki)?;
    let sections = uki::sections(&uki, &unsigned)?;
    if !text(&sections, ".cmdline").contains(&manifest.verity.root_hash) {
        return Err(Error::OtherBuild { path: uki });
    }
    let kernel = boot_files::kernel_of(&unsigned, signer)?;
    let system = manifest.path(&manifest.system);
    let open = || File::open(&system).at("open", &system);
    let contents = Contents {
        version,
        security_level: SECURITY_LEVEL,
        architecture: ARCHITECTURE.to_owned(),
        variant: manifest.variant.word().to_owned(),
        image: manifest.image_version.clone(),
        from: UPDATES_FROM,
        etcd: etcd_of(&sections)?,
        kubernetes: kubernetes_of(&sections, manifest.variant)?,
        kernel: Part::of(&kernel[..]).at("hash", &uki)?,
        system: Part::of(open()?).at("hash", &system)?,
    };
    layout::plan("", contents.system.size, crate::SIZE_DEFAULT)?;
    let parts: [&mut dyn Read; 2] = [&mut Cursor::new(kernel), &mut open()?];
    atomic::replace(out, |draft| {
        let written = File::create(draft).and_then(|file| {
            let mut file = BufWriter::new(file);
            write(&mut file, &contents, release.key(), parts)?;
            file.flush()?;
            file.get_ref().sync_all()
        });
        written.at("write", out)
    })
}

/// The text of a section of a kernel image; empty where there is no such section.
fn text<'a>(sections: &'a [Section], name: &str) -> Cow<'a, str> {
    let section = sections.iter().find(|section| section.name == name);
    section.map(|section| String::from_utf8_lossy(&section.content)).unwrap_or_default()
}

/// The version of Kubernetes in the system of a kernel image, by its `os-release`.
fn kubernetes_of(sections: &[Section], variant: Variant) -> Result<Option<Version>> {
    if variant == Variant::Base {
        return Ok(None);
    }
    let os_release = text(sections, ".osrel");
    let version = os_release.lines().find_map(|line| line.strip_prefix(manifest::KUBERNETES));
    let version = version.and_then(|version| Version::parse(version).ok()).ok_or_else(|| {
        let reason = "the image names no version of Kubernetes in its os-release".to_owned();
        Error::Bundle(Refusal::Manifest { reason })
    })?;
    Ok(Some(version))
}

/// The version of etcd in the system of a kernel image, which lists its packages.
fn etcd_of(sections: &[Section]) -> Result<Version> {
    etcd::version(&text(sections, ".pkgs")).ok_or_else(|| {
        let reason = format!("the image lists no version of {}", etcd::PACKAGE);
        Error::Bundle(Refusal::Manifest { reason })
    })
}
