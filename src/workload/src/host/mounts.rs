//! The fixed paths of Kubernetes, on a system that is read-only.
//!
//! Programs of Kubernetes, and third-party agents in pods, look for some directories at
//! paths that no option changes. The image of the full variant has an empty directory at
//! each of them; a worker mounts what belongs there: a directory of the data partition
//! where the contents must survive a reboot, memory where they must not.
//!
//! `/var/lib` as a whole is writable: agents of third parties keep their data below it, by a
//! `hostPath`. It comes first, and the mount points inside of it are made here. A pod may have had
//! `/var/lib` itself, so a file or a link in place of such a mount point is removed, and no link is
//! followed.
//!
//! The kernel's limits of these directories are those of the data partition: `nosuid` and
//! `nodev` hold for volumes of pods, too. Agents run programs that they keep below `/var/lib`,
//! so `noexec` does not hold. The roots of containers are mounts of their own.
//!
//! Invariants:
//! - A mount below a path here does not appear below its directory on the data partition
//!   (`sys::mount::bind`).
//! - No mount follows a link that a pod has left
//!   (`a_link_in_the_place_of_a_mount_is_replaced`).

use std::collections::BTreeSet;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use polis_base::files::{self, Data};
use polis_base::sys::mount;

/// The object at a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Content {
    /// A directory of the data partition.
    Data(files::Dir),
    /// Memory, of at most this size; see `tmpfs(5)`.
    Memory(&'static str),
}

impl fmt::Display for Content {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Data(directory) => write!(f, "{}", directory.path().display()),
            Self::Memory(size) => write!(f, "{size} of memory"),
        }
    }
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
    /// The directory to mount at, inside of another mount, cannot be made.
    #[error("cannot make the mount point {}", target.display())]
    Point {
        /// The path.
        target: PathBuf,
        /// The error of the kernel.
        source: io::Error,
    },
    /// The kernel refuses to show the object at the path.
    #[error("cannot mount {content} at {}", target.display())]
    Mount {
        /// The object.
        content: Content,
        /// The path.
        target: PathBuf,
        /// Its error.
        source: io::Error,
    },
}

/// Where containerd keeps what it knows of running containers. The root of each is a mount
/// there, whose upper layer is on the data partition.
pub const CONTAINERS: &str = "/run/containerd";

/// The mounts of a worker, below `root`, which is `/` on a node; one inside of another comes
/// after it.
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
        from(&data.host_paths, "var/lib"),
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
    for missing in missing(wanted, &mounted) {
        if is_inside(missing, wanted) {
            let target = &missing.target;
            make_point(target).map_err(|source| Error::Point { target: target.clone(), source })?;
        }
        apply_one(missing)?;
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

/// Whether it is inside of another mount of the plan: the image has no directory for it there.
fn is_inside(wanted: &Wanted, plan: &[Wanted]) -> bool {
    let target = &wanted.target;
    plan.iter().any(|outer| outer.target != *target && target.starts_with(&outer.target))
}

/// Makes the directory, in a directory where pods may have written: anything else of its name is
/// removed, and a link not followed.
fn make_point(target: &Path) -> io::Result<()> {
    match std::fs::symlink_metadata(target) {
        Ok(found) if found.is_dir() => return Ok(()),
        Ok(_) => std::fs::remove_file(target)?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(error),
    }
    std::fs::create_dir(target)
}

fn apply_one(Wanted { target, content }: &Wanted) -> Result<(), Error> {
    if !target.is_dir() {
        return Err(Error::NoPlace { target: target.clone() });
    }
    let mounted = match content {
        Content::Data(directory) => {
            directory.create()?;
            mount::bind(directory.path(), target)
        }
        Content::Memory(size) => mount::memory(target, size),
    };
    mounted.map_err(|source| Error::Mount {
        content: content.clone(),
        target: target.clone(),
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
            .map(|wanted| format!("{} <- {}", wanted.target.display(), wanted.content))
            .collect();
        insta::assert_snapshot!(lines.join("\n"), @r"
        /var/lib <- /data/kubernetes/host
        /var/lib/containerd <- /data/containerd
        /var/lib/kubelet <- /data/kubernetes/kubelet
        /var/log <- /data/kubernetes/log
        /var/lib/cni <- 16m of memory
        /etc/cni/net.d <- 1m of memory
        /opt/cni/bin <- 128m of memory
        /etc/kubernetes <- 1m of memory
        /usr/libexec/kubernetes <- 16m of memory
        ");
    }

    #[test]
    fn the_image_has_a_directory_at_every_path_that_is_not_inside_of_a_mount() {
        let plan = plan(Path::new("/"), &Root::live().data);
        let outer = plan.iter().filter(|wanted| !is_inside(wanted, &plan));
        let paths: BTreeSet<_> = outer.map(|wanted| wanted.target.clone()).collect();
        let places = polis_image::workload::MOUNT_POINTS.map(|place| Path::new("/").join(place));
        assert_eq!(paths, places.into());
    }

    #[test]
    fn a_mount_comes_after_the_one_that_it_is_inside_of() {
        let plan = plan(Path::new("/"), &Root::live().data);
        for (at, wanted) in plan.iter().enumerate() {
            assert_eq!(is_inside(wanted, &plan), is_inside(wanted, &plan[..at]), "{wanted:?}");
        }
        let inside = plan.iter().filter(|wanted| is_inside(wanted, &plan));
        let inside: Vec<_> = inside.map(|wanted| wanted.target.as_path()).collect();
        let expected = ["/var/lib/containerd", "/var/lib/kubelet", "/var/lib/cni"];
        assert_eq!(inside, expected.map(Path::new));
    }

    #[test]
    fn a_link_in_the_place_of_a_mount_is_replaced() {
        let base = tempfile::tempdir().unwrap();
        let elsewhere = base.path().join("elsewhere");
        std::fs::create_dir(&elsewhere).unwrap();
        std::fs::write(elsewhere.join("kept"), "").unwrap();
        let [link, dangling, file, new] =
            ["link", "dangling", "file", "new"].map(|name| base.path().join(name));
        std::os::unix::fs::symlink(&elsewhere, &link).unwrap();
        std::os::unix::fs::symlink("nowhere", &dangling).unwrap();
        std::fs::write(&file, "").unwrap();
        for point in [&link, &dangling, &file, &new] {
            for _again in 0..2 {
                make_point(point).unwrap();
                assert!(std::fs::symlink_metadata(point).unwrap().is_dir(), "{point:?}");
            }
            assert_eq!(std::fs::read_dir(point).unwrap().count(), 0, "{point:?}");
        }
        assert!(!base.path().join("nowhere").exists());
        make_point(&elsewhere).unwrap();
        assert!(elsewhere.join("kept").exists());
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
    fn what_is_inside_of_a_mount_goes_before_it() {
        let plan = plan(Path::new("/"), &Root::live().data);
        let mounted: Vec<_> = plan.iter().map(|wanted| wanted.target.clone()).collect();
        let order = below(Path::new("/run/containerd"), &plan, mounted);
        assert_eq!(order.last(), Some(&PathBuf::from("/var/lib")));
        assert_eq!(order.len(), plan.len());
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
