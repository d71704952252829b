//! The floor: the shortest possible boot to a working etcd.
//!
//! An initramfs whose first process (`floor-init`) mounts a disk and starts
//! etcd, and a disk that has an empty file system already.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};
use polis_image::{Manifest, Tree, program};

use crate::image::workspace;

/// The modules for XFS on a virtio disk, in the order of their dependencies.
const MODULES: [&str; 4] = [
    "kernel/crypto/crc32c_generic",
    "kernel/lib/libcrc32c",
    "kernel/fs/xfs/xfs",
    "kernel/drivers/block/virtio_blk",
];

/// As large as the data partition of a measured node.
const DISK_SIZE: u64 = 2 << 30;

/// Where the first process mounts file systems, beside `/dev`, which has the console before.
const PLACES: [&str; 3] = ["data", "proc", "sys"];

/// The files of the floor's machine.
#[derive(Debug)]
pub(super) struct Floor {
    pub(super) initramfs: PathBuf,
    /// Copied for each first boot.
    pub(super) disk: PathBuf,
    /// The image's command line, without the parameters of Polis.
    pub(super) cmdline: String,
}

/// Makes initramfs and disk in `folder`.
pub(super) fn make(manifest: &Manifest, folder: &Path) -> Result<Floor> {
    fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let payload = workspace().join("target/payload/root");

    let mut tree = Tree::default();
    tree.device("dev/console", 5, 1);
    for place in PLACES {
        tree.folder(place, 0o755);
    }
    tree.program("init", first_process()?);
    tree.program("etcd", payload.join("usr/bin/etcd"));
    // All dependencies of etcd: the C library and its loader.
    let libraries = payload.join("usr/lib/x86_64-linux-gnu");
    tree.program("lib64/ld-linux-x86-64.so.2", libraries.join("ld-linux-x86-64.so.2"));
    tree.program("lib/x86_64-linux-gnu/libc.so.6", libraries.join("libc.so.6"));
    add_modules(&mut tree, manifest, &MODULES)?;
    let initramfs = folder.join("floor.cpio");
    fs::write(&initramfs, tree.archive()?).context("cannot write the floor's initramfs")?;

    let disk = folder.join("floor.img");
    make_disk(&disk, DISK_SIZE)?;
    Ok(Floor { initramfs, disk, cmdline: cmdline(manifest) })
}

/// Adds kernel modules, which the first process loads in the order of their names: `modules`,
/// each behind those that it needs.
pub(super) fn add_modules(tree: &mut Tree, manifest: &Manifest, modules: &[&str]) -> Result<()> {
    let payload = workspace().join("target/payload/root");
    let folder = payload.join("usr/lib/modules").join(&manifest.kernel_release);
    for (order, module) in modules.iter().enumerate() {
        let mut xz = program::payload(&payload, "usr/bin/xz");
        let packed = folder.join(format!("{module}.ko.xz"));
        let bytes = program::run(xz.args(["--decompress", "--stdout"]).arg(packed))?;
        tree.text(&format!("modules/{order}.ko"), bytes);
    }
    Ok(())
}

/// Makes a disk of so many bytes that has an empty XFS.
pub(super) fn make_disk(disk: &Path, size: u64) -> Result<()> {
    File::create(disk)
        .and_then(|file| file.set_len(size))
        .with_context(|| format!("cannot make {}", disk.display()))?;
    // The payload's program, so that the file system matches the guest's kernel.
    let payload = workspace().join("target/payload/root");
    let mut mkfs = program::payload(&payload, "usr/sbin/mkfs.xfs");
    program::run(mkfs.args(["-q", "-K", "-f"]).arg(disk))?;
    Ok(())
}

/// The image's command line, without the parameters of Polis.
pub(super) fn cmdline(manifest: &Manifest) -> String {
    let words = manifest.cmdline.split(' ').filter(|word| !word.starts_with("polis."));
    words.collect::<Vec<_>>().join(" ")
}

/// Builds `floor-init` as Polis's own programs are built.
fn first_process() -> Result<PathBuf> {
    let workspace = workspace();
    let status = crate::image::cargo(&workspace)
        .args(["build", "--quiet", "--profile", "appliance"])
        .args(["--package", "polis-qemu", "--bin", "floor-init"])
        .status()
        .context("cannot start cargo")?;
    ensure!(status.success(), "cargo build ended with {status}");
    Ok(workspace.join("target/x86_64-unknown-linux-gnu/appliance/floor-init"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_process_finds_every_folder_in_which_it_mounts_something() {
        let source = workspace().join("qemu/src/bin/floor-init.rs");
        let source = fs::read_to_string(source).unwrap();
        let mounts = source.lines().filter_map(|line| line.trim().strip_prefix("mount("));
        let mounted: Vec<_> = mounts
            .map(|words| match words.split(", ").nth(1).unwrap() {
                "DATA" => "data",
                place => place.trim_matches('"').trim_start_matches('/'),
            })
            .collect();
        assert_eq!(mounted, ["dev", "proc", "sys", "data"]);
        assert!(mounted[1..].iter().all(|place| PLACES.contains(place)), "{mounted:?}");
    }
}
