//! The images of these sources: the inputs of each, its folder, and its build.

use std::{
    env, fs,
    path::{Path, PathBuf},
    sync::atomic::Ordering,
};

use anyhow::{Context as _, Result};
use polis_image::{Config, Guard, Kind, Manifest, Source, Variant, golang};
use semver::Version;

use super::options::Packages;
use super::programs::{
    POLISCTL, POLISCTL_BUILT, PROGRAMS, SYSTEM_IMAGES, build_without_faults, cargo_build, programs,
    workspace,
};
use crate::{host, progress::Terminal};

/// The base image of these sources, for the commands that boot it.
pub(crate) fn built(kind: Kind) -> Result<Manifest> {
    built_from(kind, Variant::Base, &Packages::default())
}

/// An image of these sources, from these packages.
pub(crate) fn built_from(kind: Kind, variant: Variant, packages: &Packages) -> Result<Manifest> {
    build_usual(&config(kind, variant, packages))
}

/// The image that is a version newer than the development image and otherwise the same, for the
/// stories of updates.
pub(crate) fn built_next(variant: Variant) -> Result<Manifest> {
    let mut config = config(Kind::Development, variant, &Packages::default());
    let version = Version::parse(&config.version).context("the version of the sources")?;
    config.version = Version::new(version.major, version.minor + 1, 0).to_string();
    config.out = folder_next(variant);
    Ok(build(&config, &[])?.0)
}

/// The folder of [`built_next`].
pub(crate) fn folder_next(variant: Variant) -> PathBuf {
    folder(Kind::Development, variant).with_extension("next")
}

/// The product image with a `node` as quick to build as that of the development image, for
/// the story of what the product leaves out.
pub(crate) fn built_quick_product() -> Result<Manifest> {
    let config = Config {
        node: programs(Kind::Development).join("node"),
        out: folder_quick_product(),
        ..config(Kind::Product, Variant::Base, &Packages::default())
    };
    prepare(&config)?;
    cargo_build(Kind::Product, &["init"])?;
    build_without_faults("node")?;
    Ok(assembled(&config)?.0)
}

/// The folder of [`built_quick_product`].
pub(crate) fn folder_quick_product() -> PathBuf {
    folder(Kind::Product, Variant::Base).with_extension("quick")
}

/// Builds an image; with the development image also [`polisctl`](super::polisctl), so that no
/// later step waits for it.
fn build_usual(config: &Config) -> Result<Manifest> {
    match config.kind {
        Kind::Product | Kind::Measurement => Ok(build(config, &[])?.0),
        Kind::Development => {
            let (manifest, _guard) = build(config, &[POLISCTL])?;
            POLISCTL_BUILT.store(true, Ordering::Relaxed);
            Ok(manifest)
        }
    }
}

/// The folder of an image and of its parts.
pub(crate) fn folder(kind: Kind, variant: Variant) -> PathBuf {
    let kind = match kind {
        Kind::Product => "image",
        Kind::Development => "image-development",
        Kind::Measurement => "image-measurement",
    };
    let variant = match variant {
        Variant::Base => "",
        Variant::Full => "-full",
    };
    workspace().join("target").join(format!("{kind}{variant}"))
}

/// Makes sure that the host has what a build needs. Downloads come before cargo: a host
/// without a way to them fails at once.
pub(super) fn prepare(config: &Config) -> Result<()> {
    host::require(&[host::PAYLOAD, host::BUILD])?;
    if config.source.variant == Variant::Full {
        golang::fetch(&config.source, &config.go, &Terminal::default())?;
    }
    Ok(())
}

/// The image, and beside it the programs that it does not contain. Its parts stay until the guard
/// is dropped.
pub(super) fn build(config: &Config, beside: &[&str]) -> Result<(Manifest, Guard)> {
    prepare(config)?;
    cargo_build(config.kind, &[&programs_of(config)[..], beside].concat())?;
    assembled(config)
}

/// The parts of this workspace in an image.
pub(super) fn programs_of(config: &Config) -> Vec<&'static str> {
    match config.source.variant {
        Variant::Base => PROGRAMS.to_vec(),
        Variant::Full => [PROGRAMS, SYSTEM_IMAGES].concat(),
    }
}

/// The image, of programs that cargo has built. Its parts stay until the guard is dropped.
pub(super) fn assembled(config: &Config) -> Result<(Manifest, Guard)> {
    let built = polis_image::build(config, &Terminal::default())?;
    link_payload(&config.source.root()?)?;
    Ok(built)
}

pub(super) fn config(kind: Kind, variant: Variant, packages: &Packages) -> Config {
    let workspace = workspace();
    let cache = match env::var_os("POLIS_CACHE") {
        Some(folder) => PathBuf::from(folder),
        None => workspace.join("target/payload"),
    };
    let mut source = Source::new(workspace.join("image/payload.lock"), cache);
    let Packages { mirror, locked, snapshot } = packages.clone();
    let named = env::var("POLIS_SNAPSHOT").ok().filter(|url| !url.is_empty());
    source.variant = variant;
    source.mirror = mirror;
    source.locked = locked;
    source.snapshot = snapshot.or(named);
    Config {
        kind,
        source,
        go: golang::Folders {
            modules: workspace.join("image/go"),
            out: workspace.join("target/go"),
        },
        system_images: programs(kind),
        init: programs(kind).join("init"),
        node: programs(kind).join("node"),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        out: folder(kind, variant),
        parameters: None,
        signer: None,
        size: polis_image::SIZE_DEFAULT,
    }
}

/// Makes or renews a symbolic link. In one step, since two builds may end at the same moment.
pub(super) fn link(link: &Path, target: &Path) -> Result<()> {
    if fs::read_link(link).is_ok_and(|present| present == target) {
        return Ok(());
    }
    let cannot = || format!("cannot make {}", link.display());
    let folder = link.parent().with_context(cannot)?;
    fs::create_dir_all(folder).with_context(cannot)?;
    let new = tempfile::Builder::new()
        .prefix(".link")
        .make_in(folder, |path| std::os::unix::fs::symlink(target, path))
        .with_context(cannot)?;
    new.into_temp_path().persist(link).with_context(cannot)?;
    Ok(())
}

/// Links the unpacked payload at a fixed place.
pub(super) fn link_payload(root: &Path) -> Result<PathBuf> {
    let place = workspace().join("target/payload/root");
    link(&place, root)?;
    Ok(place)
}

/// Builds an image twice, and fails where the results differ.
pub(crate) fn verify(kind: Kind, variant: Variant) -> Result<()> {
    let config = config(kind, variant, &Packages::default());
    let manifest = build_usual(&config)?;
    let folder = config.out.join("verify");
    let digests =
        polis_image::verify_reproducible(&manifest, &config, &folder, &Terminal::default())?;
    for (name, digest) in digests {
        println!("{digest}  {name}");
    }
    println!("two builds of the same inputs are equal");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_image_has_a_folder_of_its_own() {
        let kinds = [Kind::Product, Kind::Development, Kind::Measurement];
        let both = |kind| [Variant::Base, Variant::Full].map(|variant| folder(kind, variant));
        let folders: std::collections::BTreeSet<_> = kinds.into_iter().flat_map(both).collect();
        assert_eq!(folders.len(), 6);
    }

    #[test]
    fn a_build_gets_the_source_of_its_packages() {
        let packages = Packages {
            mirror: Some("http://m.example/debian".to_owned()),
            locked: true,
            snapshot: Some("http://old.example/debian".to_owned()),
        };
        let source = config(Kind::Development, Variant::Base, &packages).source;
        assert!(source.locked);
        assert_eq!((source.mirror, source.snapshot), (packages.mirror, packages.snapshot));
    }
}
