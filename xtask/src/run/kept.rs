//! `cargo xtask run --keep`: the cluster of the last run with a name, and whether this run can
//! continue it.
//!
//! ```text
//! target/run/<name>/       options    those of OPTIONS that it was started with
//!     disk.img             one node
//!     1/disk.img  2/...    several
//! ```

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};

use super::{Args, make_folder};
use crate::operator;

/// The options that decide what is on a disk, or what opens it.
const OPTIONS: [&str; 3] = ["--kubernetes", "--secure-boot", "--tpm"];

/// The file with those of the last run.
const NOTED: &str = "options";

/// Whether to boot the disk that an earlier run left in `dir`.
pub(super) fn disk(args: &Args, dir: &Path) -> bool {
    args.keep && dir.join("disk.img").exists()
}

/// Whether to continue the cluster of the last run in `dir`.
pub(super) fn keeps(args: &Args, dir: &Path) -> bool {
    let first = if args.nodes == 1 { dir.to_owned() } else { dir.join("1") };
    disk(args, &first)
}

/// Checks that this run can continue the cluster that it is to keep.
///
/// # Errors
///
/// It cannot, and why.
pub(super) fn check(args: &Args, dir: &Path) -> Result<(), String> {
    if args.keep {
        continues(nodes_in(dir), usize::from(args.nodes))?;
    }
    match fs::read_to_string(dir.join(NOTED)) {
        Ok(noted) if keeps(args, dir) => repeats(noted.trim_end(), &options(args)),
        // A new cluster, or one of a program that noted nothing.
        _ => Ok(()),
    }
}

/// Removes the cluster of the last run in `dir`, and notes the options of the new one.
///
/// # Errors
///
/// A file cannot be removed or written.
pub(super) fn begin(args: &Args, dir: &Path) -> Result<()> {
    forget(dir)?;
    make_folder(dir)?;
    let file = dir.join(NOTED);
    fs::write(&file, options(args) + "\n")
        .with_context(|| format!("cannot write {}", file.display()))
}

/// Those of [`OPTIONS`] that a run has.
fn options(args: &Args) -> String {
    let given = [args.kubernetes, args.secure_boot, args.tpm];
    let given = OPTIONS.into_iter().zip(given).filter(|(_, given)| *given);
    given.map(|(option, _)| option).collect::<Vec<_>>().join(" ")
}

/// Whether a run with the options `now` can continue a cluster that was started with those of
/// `before`.
fn repeats(before: &str, now: &str) -> Result<(), String> {
    if before == now {
        return Ok(());
    }
    let [before, now] = [before, now].map(|options| match options {
        "" => "none",
        some => some,
    });
    Err(format!(
        "--keep: of {}, the cluster of the last run was started with {before}, and this run has \
         {now}: use the same, or start a new cluster without --keep",
        OPTIONS.join(", ")
    ))
}

/// The folders of the machines of an earlier run with several nodes, by their numbers.
fn numbered(dir: &Path) -> Vec<(usize, PathBuf)> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    entries
        .filter_map(|entry| Some((entry.file_name().to_str()?.parse().ok()?, entry.path())))
        .collect()
}

/// How many nodes the cluster of an earlier run has; 0 without a cluster.
fn nodes_in(dir: &Path) -> usize {
    let several = numbered(dir).into_iter().filter(|(_, folder)| folder.join("disk.img").exists());
    several.map(|(number, _)| number).max().unwrap_or(dir.join("disk.img").exists().into())
}

/// Whether a run with `nodes` nodes can continue the cluster of `before` nodes.
fn continues(before: usize, nodes: usize) -> Result<(), String> {
    match (before, nodes) {
        (0, _) | (1, 1) => Ok(()),
        (1, _) => Err(format!(
            "--keep: the last run had one node on a network of its own; continue it without \
             --nodes, or start {nodes} new nodes without --keep"
        )),
        (before, nodes) if before > nodes => Err(format!(
            "--keep: the cluster of the last run has {before} nodes, and needs all of them: use \
             --nodes {before}, or start a new one without --keep"
        )),
        _ => Ok(()),
    }
}

/// Removes the files of an earlier run, whose disks and contexts belong to another cluster.
pub(super) fn forget(dir: &Path) -> Result<()> {
    let machines = numbered(dir).into_iter().map(|(_, folder)| folder);
    // A run that ends once the node is ready makes no contexts of its own.
    let contexts = Some(operator::contexts(dir)).filter(|folder| folder.exists());
    for folder in machines.chain(contexts) {
        fs::remove_dir_all(&folder)
            .with_context(|| format!("cannot remove {}", folder.display()))?;
    }
    // `kubectl`, and `cargo xtask conformance`, would ask the former cluster.
    for file in ["disk.img", "kubeconfig", "kubectl"].map(|name| dir.join(name)) {
        if file.exists() {
            fs::remove_file(&file).with_context(|| format!("cannot remove {}", file.display()))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, clap::Parser)]
    struct Line {
        #[command(flatten)]
        args: Args,
    }

    #[test]
    fn a_kept_cluster_is_continued_with_the_options_that_decided_its_disks() {
        let dir = tempfile::tempdir().unwrap();
        let args = |options: &str| {
            let words = std::iter::once("run").chain(options.split_whitespace());
            <Line as clap::Parser>::parse_from(words).args
        };
        let checked = |options: &str| check(&args(options), dir.path());
        begin(&args("--tpm --kubernetes"), dir.path()).unwrap();
        // There is no disk to keep.
        checked("--keep").unwrap();
        let disk = dir.path().join("disk.img");
        fs::write(&disk, "").unwrap();
        checked("--keep --kubernetes --tpm --direct").unwrap();
        checked("").unwrap();
        for (other, has) in [("--keep", "has none"), ("--keep --tpm", "has --tpm")] {
            let error = checked(other).unwrap_err();
            assert!(error.contains("started with --kubernetes --tpm, and"), "{error}");
            assert!(error.contains(has), "{error}");
        }
        assert!(keeps(&args("--keep --tpm"), dir.path()));
        assert!(!keeps(&args(""), dir.path()) && !keeps(&args("--keep --nodes 3"), dir.path()));
        begin(&args(""), dir.path()).unwrap();
        assert!(!disk.exists());
        fs::write(&disk, "").unwrap();
        checked("--keep").unwrap();
        assert!(checked("--keep --secure-boot").unwrap_err().contains("started with none"));
        // Of a program that noted nothing.
        fs::remove_file(dir.path().join(NOTED)).unwrap();
        checked("--keep --secure-boot").unwrap();
    }

    #[test]
    fn a_kept_cluster_is_neither_made_smaller_nor_mixed_with_a_node_alone() {
        assert!(continues(0, 1).is_ok() && continues(0, 3).is_ok());
        assert!(continues(1, 1).is_ok() && continues(3, 3).is_ok() && continues(3, 5).is_ok());
        assert!(continues(5, 3).unwrap_err().contains("has 5 nodes"));
        assert!(continues(3, 1).unwrap_err().contains("use --nodes 3"));
        assert!(continues(1, 3).unwrap_err().contains("had one node"));
    }

    #[test]
    fn a_new_run_forgets_every_disk_of_the_last_one_and_keeps_the_owner() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(nodes_in(dir.path()), 0);
        for number in ["1", "2", "5"] {
            fs::create_dir(dir.path().join(number)).unwrap();
            fs::write(dir.path().join(number).join("disk.img"), "").unwrap();
        }
        let kubeconfig = dir.path().join("kubeconfig");
        fs::write(&kubeconfig, "").unwrap();
        fs::write(dir.path().join("owner.key"), "").unwrap();
        fs::create_dir(operator::contexts(dir.path())).unwrap();
        assert_eq!(nodes_in(dir.path()), 5);
        forget(dir.path()).unwrap();
        assert_eq!(nodes_in(dir.path()), 0);
        assert!(dir.path().join("owner.key").exists() && !kubeconfig.exists());
        assert!(!operator::contexts(dir.path()).exists());
        fs::write(dir.path().join("disk.img"), "").unwrap();
        assert_eq!(nodes_in(dir.path()), 1);
        forget(dir.path()).unwrap();
        assert_eq!(nodes_in(dir.path()), 0);
    }
}
