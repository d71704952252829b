//! The fixed paths of Kubernetes, on a system that is read-only.
//!
//! Programs of Kubernetes, and third-party agents in pods, look for some directories at
//! paths that no option changes. The image of the full variant has an empty directory at
//! each of them; a worker mounts what belongs there: a directory of the data partition
//! where the contents must survive a reboot, memory where they must not.
//!
//! The kernel's limits of these directories are those of the data partition: `nosuid` and
//! `nodev` hold for volumes of pods, too. The roots of containers are mounts of their own.
//!
//! Invariant: a mount below a path here does not appear below its directory on the data
//! partition (`sys::mount::bind`).

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};

use rustix::mount::MountFlags;

use polis_base::files::{self, Data};
use polis_base::sys::mount::{self, Mount};

/// The object at a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Content {
    /// A directory of the data partition.
    Data(files::Dir),
    /// Memory, of at most this size; see `tmpfs(5)`.
    Memory(&'static str),
}

/// One mount as it should be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// The path that Kubernetes knows.
    pub target: PathBuf,
    /// The object at that place.
    pub content: Content,
}

/// Why a path is not what Kubernetes needs.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The kernel does not list the mounts.
    #[error("cannot read the table of mounts")]
    Table {
        /// Its error.
        source: io::Error,
    },
    /// The image has no such directory: it is not of the full variant.
    #[error("the image has no directory {}", target.display())]
    NoPlace {
        /// The path.
        target: PathBuf,
    },
    /// The directory on the data partition cannot be made.
    #[error(transparent)]
    Directory(#[from] files::Error),
    /// The kernel refuses to show the directory at the path.
    #[error("cannot mount {} at {}", directory.display(), target.display())]
    Bind {
        /// The directory on the data partition.
        directory: PathBuf,
        /// The path.
        target: PathBuf,
        /// Its error.
        source: io::Error,
    },
    /// The kernel refuses to mount memory.
    #[error(transparent)]
    Memory(#[from] mount::Error),
}

/// Where containerd keeps what it knows of running containers. The root of each is a mount
/// there, whose upper layer is on the data partition.
pub const CONTAINERS: &str = "/run/containerd";

/// The mounts of a worker, below `root`, which is `/` on a node.
#[must_use]
pub fn plan(root: &Path, data: &Data) -> Vec<Wanted> {
    let from = |directory: &files::Dir, target: &str| Wanted {
        target: root.join(target),
        content: Content::Data(directory.clone()),
    };
    // Each holds a few files of text at most, except for programs of third-party networks.
    let memory =
        |size, target: &str| Wanted { target: root.join(target), content: Content::Memory(size) };
    vec![
        from(&data.containerd, "var/lib/containerd"),
        from(&data.kubelet, "var/lib/kubelet"),
        from(&data.pod_logs, "var/log"),
        memory("16m", "var/lib/cni"),
        memory("1m", "etc/cni/net.d"),
        memory("128m", "opt/cni/bin"),
        memory("1m", "etc/kubernetes"),
        memory("16m", "usr/libexec/kubernetes"),
    ]
}

/// Makes the directories of the data partition and mounts what is not mounted yet. Blocks.
///
/// # Errors
///
/// The first mount that fails.
pub fn apply(wanted: &[Wanted]) -> Result<(), Error> {
    let mounted = mount::points().map_err(|source| Error::Table { source })?;
    for wanted in missing(wanted, &mounted) {
        apply_one(wanted)?;
    }
    Ok(())
}

/// Unmounts them with everything below, and the roots of containers below `root`, the last
/// mount first; returns what stays: a process uses it. While one of them stands, the data
/// partition cannot be closed. Blocks.
///
/// # Errors
///
/// [`Error::Table`].
pub fn release(root: &Path, wanted: &[Wanted]) -> Result<Vec<(PathBuf, io::Error)>, Error> {
    let mounted = mount::points().map_err(|source| Error::Table { source })?;
    let containers = root.join(CONTAINERS.trim_start_matches('/'));
    let stay = below(&containers, wanted, mounted).into_iter().filter_map(|target| {
        let error = mount::unmount(&target).err()?;
        Some((target, error))
    });
    Ok(stay.collect())
}

/// Of the mount points, those of the plan, those below them, and those of containers, the
/// last one first.
fn below(containers: &Path, wanted: &[Wanted], mut mounted: Vec<PathBuf>) -> Vec<PathBuf> {
    mounted.retain(|point| {
        point.starts_with(containers)
            || wanted.iter().any(|wanted| point.starts_with(&wanted.target))
    });
    mounted.reverse();
    mounted
}

/// The mounts that are not there yet.
fn missing<'a>(wanted: &'a [Wanted], mounted: &[PathBuf]) -> Vec<&'a Wanted> {
    let mounted: BTreeSet<_> = mounted.iter().collect();
    wanted.iter().filter(|wanted| !mounted.contains(&wanted.target)).collect()
}

fn apply_one(Wanted { target, content }: &Wanted) -> Result<(), Error> {
    if !target.is_dir() {
        return Err(Error::NoPlace { target: target.clone() });
    }
    match content {
        Content::Data(directory) => {
            directory.create()?;
            bind(directory.path(), target)
        }
        Content::Memory(size) => {
            let flags = MountFlags::NOSUID | MountFlags::NODEV;
            let options = format!("mode=0755,size={size}");
            let mount = Mount::new("tmpfs", target, "tmpfs").flags(flags).options(options);
            Ok(mount.apply()?)
        }
    }
}

fn bind(directory: &Path, target: &Path) -> Result<(), Error> {
    mount::bind(directory, target).map_err(|source| Error::Bind {
        directory: directory.to_owned(),
        target: target.to_owned(),
        source,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use polis_base::files::Root;

    #[test]
    fn every_fixed_path_of_kubernetes_has_its_place() {
        let plan = plan(Path::new("/"), &Root::live().data);
        let lines: Vec<_> = plan
            .iter()
            .map(|wanted| match &wanted.content {
                Content::Data(directory) => {
                    format!("{} <- {}", wanted.target.display(), directory.path().display())
                }
                Content::Memory(size) => format!("{} <- memory {size}", wanted.target.display()),
            })
            .collect();
        insta::assert_snapshot!(lines.join("\n"), @r"
        /var/lib/containerd <- /data/containerd
        /var/lib/kubelet <- /data/kubernetes/kubelet
        /var/log <- /data/kubernetes/log
        /var/lib/cni <- memory 16m
        /etc/cni/net.d <- memory 1m
        /opt/cni/bin <- memory 128m
        /etc/kubernetes <- memory 1m
        /usr/libexec/kubernetes <- memory 16m
        ");
    }

    #[test]
    fn the_image_has_a_directory_at_every_path() {
        let plan = plan(Path::new("/"), &Root::live().data);
        let paths: BTreeSet<_> = plan.iter().map(|wanted| wanted.target.clone()).collect();
        let places = polis_image::workload::MOUNT_POINTS.map(|place| Path::new("/").join(place));
        assert_eq!(paths, places.into());
    }

    #[test]
    fn what_is_mounted_already_is_left_alone() {
        let plan = plan(Path::new("/"), &Root::live().data);
        let mounted = [PathBuf::from("/"), PathBuf::from("/var/lib/kubelet")];
        let missing = missing(&plan, &mounted);
        assert_eq!(missing.len(), plan.len() - 1);
        assert!(missing.iter().all(|wanted| wanted.target != mounted[1]));
    }

    #[test]
    fn what_lies_on_a_mount_goes_before_it_and_strangers_stay() {
        let plan = plan(Path::new("/"), &Root::live().data);
        let root = "/run/containerd/io.containerd.runtime.v2.task/k8s.io/1/rootfs";
        let pod = "/var/lib/kubelet/pods/1";
        let mounted = ["/", "/var/lib/kubelet", "/data", pod, "/var/logs", root, "/run/other"];
        let expected = [root, pod, "/var/lib/kubelet"].map(PathBuf::from);
        assert_eq!(
            below(Path::new("/run/containerd"), &plan, mounted.map(PathBuf::from).into()),
            expected
        );
    }

    #[test]
    fn an_image_without_the_directory_is_named() {
        let wanted = Wanted { target: "/no/such/place".into(), content: Content::Memory("1m") };
        let error = apply(&[wanted]).unwrap_err();
        assert_eq!(error.to_string(), "the image has no directory /no/such/place");
    }
}
