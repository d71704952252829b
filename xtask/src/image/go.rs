//! The programs that are built from Go modules, for images and for the tools of this host.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::Result;
use polis_image::{Kind, Variant, golang};

use super::images::{config, link, link_payload};
use super::options::Packages;
use super::programs::workspace;
use crate::{host, progress::Terminal};

/// Kubernetes' client, for people.
pub(crate) const KUBECTL: &str = "target/kubernetes/kubectl";

/// Builds programs from Go modules, and prints where they are.
pub(super) fn build_go(names: &[String], packages: &Packages) -> Result<()> {
    let config = config(Kind::Product, Variant::Full, packages);
    host::require(&[host::PAYLOAD, host::BUILD])?;
    let programs = golang::programs(&config.source, &config.go, names, &Terminal::default())?;
    for program in programs {
        let bytes = fs::metadata(&program).map_or(0, |metadata| metadata.len());
        println!("{bytes:>12}  {}", program.display());
    }
    Ok(())
}

/// Builds `kubectl`, which no image contains, and links it as [`KUBECTL`].
pub(crate) fn kubectl(packages: &Packages) -> Result<()> {
    let config = config(Kind::Development, Variant::Full, packages);
    host::require(&[host::PAYLOAD, host::BUILD])?;
    let names = ["kubectl".to_owned()];
    golang::programs(&config.source, &config.go, &names, &Terminal::default())?;
    link(&workspace().join(KUBECTL), Path::new("../go/bin/kubectl"))
}

/// Builds what `conformance` needs and no image of its own has to be made for: the programs
/// of Kubernetes, its suite, the program of most pods of that suite, and the payload with etcd.
pub(crate) fn suite() -> Result<()> {
    go_programs(&["kube", "kubectl", "e2e", "agnhost"])
}

/// Builds the programs of an image with Kubernetes, and no image.
pub(crate) fn workload_programs() -> Result<()> {
    go_programs(&[])
}

/// Builds programs from Go modules that no image has to be made for, and the payload. Without
/// names, those of an image.
pub(crate) fn go_programs(names: &[&str]) -> Result<()> {
    let config = config(Kind::Development, Variant::Full, &Packages::default());
    host::require(&[host::PAYLOAD, host::BUILD])?;
    let names: Vec<_> = names.iter().map(|name| (*name).to_owned()).collect();
    golang::programs(&config.source, &config.go, &names, &Terminal::default())?;
    link_payload(&config.source.root()?)?;
    Ok(())
}

/// Where a program that is built from a Go module is.
pub(crate) fn go_program(name: &str) -> PathBuf {
    workspace().join("target/go/bin").join(name)
}
