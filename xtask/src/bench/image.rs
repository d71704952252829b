//! `cargo xtask bench image`: the duration of a build and the size of an image.
//!
//! Each build is the ordinary command, in a process of its own. The time of cargo is
//! excluded: it is the same with any builder.
//!
//! The changed source is restored, and what was moved is moved back, also after a failure or
//! a signal.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use polis_image::{Kind, Manifest, Variant};

use super::build::Changed;
use super::stop::Stop;
use super::{Args, Row, Table};
use crate::image::workspace;

/// The changed file: a source of a program of the image, so that every later step has work.
const CHANGED: &str = "src/node/src/main.rs";

/// Bytes that a node needs without Kubernetes.
const SIZE_GOAL: f64 = 200e6;
/// Bytes that a node needs with it.
const FULL_SIZE_GOAL: f64 = 300e6;

/// The programs from Go modules in the full image.
const IN_FULL: [&str; 10] = [
    "containerd",
    "containerd-shim-runc-v2",
    "containerd-shim-runsc-v1",
    "coredns",
    "host-local",
    "kube",
    "portmap",
    "ptp",
    "runc",
    "runsc",
];

/// This program, even if cargo has replaced its file since the start.
const ITSELF: &str = "/proc/self/exe";

pub(super) fn measure(args: &Args, stop: &Stop) -> Result<Table> {
    let runs = args.runs;
    let mut table = Table::new("image", runs)?;
    let _held = stop.hold();
    build(Variant::Base, None)?;
    let mut same = Row::new("nothing changed, after cargo", "s").goal(1.0);
    let mut changed = Row::new("one line changed, after cargo", "s").goal(5.0);
    let mut cold = Row::new("cold with the payload downloaded, after cargo", "s");
    for run in 0..runs {
        stop.check()?;
        same.values.push(build(Variant::Base, None)?);
        changed.values.push(with_changed_line(run)?);
        build(Variant::Base, None)?;
        cold.values.push(cold_build(Variant::Base)?);
    }
    // Restores the usual folders, which the cold builds replaced.
    build(Variant::Base, None)?;
    table.rows.extend([same, changed, cold]);

    table.rows.extend(sizes("base", &crate::image::built(Kind::Product)?, SIZE_GOAL));
    full(&mut table, args, stop)?;
    Ok(table)
}

/// The rows of the image with Kubernetes, where its programs were built before.
fn full(table: &mut Table, args: &Args, stop: &Stop) -> Result<()> {
    if !args.cold && !crate::image::go_program("kube").is_file() {
        println!("image: no rows of the full image: target/go/bin/kube is not there");
        return Ok(());
    }
    // Downloads what is not there yet, too.
    build(Variant::Full, None)?;
    let mut same = Row::new("full, nothing changed, after cargo", "s").goal(1.0);
    for _run in 0..args.runs {
        stop.check()?;
        same.values.push(build(Variant::Full, None)?);
    }
    table.rows.push(same);
    if args.cold {
        let kept = MovedAway::new("target/go")?;
        let mut cold = Row::new("full, cold with all downloaded, after cargo", "s");
        cold.values.push(cold_build(Variant::Full)?);
        table.rows.push(cold);
        drop(kept);
        // Restores the usual folders.
        build(Variant::Full, None)?;
    }
    let packages = crate::image::Packages::default();
    let manifest = crate::image::built_from(Kind::Product, Variant::Full, &packages)?;
    table.rows.extend(sizes("full", &manifest, FULL_SIZE_GOAL));
    for name in IN_FULL {
        let file = crate::image::go_program(name);
        let metadata = fs::metadata(&file);
        let bytes = metadata.with_context(|| format!("cannot look at {}", file.display()))?.len();
        let name = format!("full, program {name} before compression");
        table.rows.push(bytes_row(name, bytes, None));
    }
    Ok(())
}

/// The bytes of an image by part.
fn sizes(variant: &str, manifest: &Manifest, goal: f64) -> [Row; 7] {
    let sizes = manifest.sizes;
    let all = sizes.uki + sizes.erofs + sizes.verity;
    [
        ("kernel", sizes.kernel, None),
        ("initramfs", sizes.initramfs, None),
        ("microcode", sizes.microcode, None),
        ("unified kernel image, on the ESP", sizes.uki, None),
        ("system, file system", sizes.erofs, None),
        ("system, hash tree", sizes.verity, None),
        ("ESP and system, what a node needs", all, Some(goal)),
    ]
    .map(|(name, bytes, goal)| bytes_row(format!("{variant}, {name}"), bytes, goal))
}

fn bytes_row(name: String, bytes: u64, goal: Option<f64>) -> Row {
    #[expect(clippy::cast_precision_loss, reason = "an image has far less than 2^52 bytes")]
    let values = vec![bytes as f64];
    Row { values, goal, ..Row::new(name, "bytes") }
}

/// Builds with one more line in one source file, which is restored afterwards.
fn with_changed_line(run: u32) -> Result<f64> {
    let _changed = Changed::new(CHANGED, run)?;
    build(Variant::Base, None)
}

/// A folder that is out of the way until this value is dropped: it has programs that no image
/// build makes again.
struct MovedAway {
    place: PathBuf,
    kept: PathBuf,
}

impl MovedAway {
    fn new(folder: &str) -> Result<Self> {
        let (place, kept) = (workspace().join(folder), workspace().join("target/bench/aside"));
        fs::rename(&place, &kept).with_context(|| format!("cannot move {}", place.display()))?;
        Ok(Self { place, kept })
    }
}

impl Drop for MovedAway {
    fn drop(&mut self) {
        let removed = match fs::remove_dir_all(&self.place) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        };
        if let Err(error) = removed.and_then(|()| fs::rename(&self.kept, &self.place)) {
            let (place, kept) = (self.place.display(), self.kept.display());
            eprintln!("bench: cannot move {kept} back to {place}: {error}");
        }
    }
}

/// Builds without earlier outputs and without the unpacked payload, from the downloaded
/// packages; programs from Go modules without a cache, from the downloaded modules.
fn cold_build(variant: Variant) -> Result<f64> {
    let usual = match std::env::var_os("POLIS_CACHE") {
        Some(folder) => std::path::absolute(folder).context("POLIS_CACHE")?,
        None => workspace().join("target/payload"),
    };
    let cache = workspace().join("target/bench/cache");
    let image = crate::image::folder(Kind::Product, variant);
    for folder in [&cache, &image] {
        if folder.exists() {
            fs::remove_dir_all(folder)
                .with_context(|| format!("cannot empty {}", folder.display()))?;
        }
    }
    let downloaded: &[&str] = match variant {
        Variant::Base => &["apt", "debs"],
        Variant::Full => &["apt", "debs", "go/mod"],
    };
    for name in downloaded {
        let link = cache.join(name);
        fs::create_dir_all(link.parent().unwrap_or(&cache)).context("cannot make a cache")?;
        symlink(usual.join(name), link).context("cannot make a cache")?;
    }
    let took = build(variant, Some(&cache))?;
    fs::remove_dir_all(&cache).with_context(|| format!("cannot empty {}", cache.display()))?;
    Ok(took)
}

/// Runs `cargo xtask image` for a variant; returns the seconds after
/// cargo's part.
fn build(variant: Variant, cache: Option<&Path>) -> Result<f64> {
    let variant = match variant {
        Variant::Base => "base",
        Variant::Full => "full",
    };
    let mut command = Command::new(ITSELF);
    if let Some(cache) = cache {
        command.env("POLIS_CACHE", cache);
    }
    let output = command
        .args(["image", "--variant", variant])
        .output()
        .context("cannot start the image builder")?;
    let text = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "the build failed:\n{text}{errors}");
    behind_cargo(&text).with_context(|| format!("cannot read the builder's times:\n{text}"))
}

/// The seconds of line `total` less those of line `cargo`.
fn behind_cargo(text: &str) -> Option<f64> {
    let seconds = |name: &str| {
        let mut lines = text.lines().filter_map(|line| line.strip_prefix(name));
        lines.find_map(|rest| rest.split_whitespace().next()?.parse::<f64>().ok())
    };
    Some(seconds("total ")? - seconds("cargo ")?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_of_cargo_is_taken_off() {
        let text = "cargo        80.31 s  built (compiled node)\npayload        0.00 s  cached\ntotal 85.50 s\n";
        assert!((behind_cargo(text).unwrap() - 5.19).abs() < 1e-9);
        assert_eq!(behind_cargo("total 1.00 s\n"), None);
    }
}
