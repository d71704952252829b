//! The content of the full variant of the root beside its programs: the mount points of the
//! fixed paths of Kubernetes, and the container images of the system.
//!
//! The system is read-only, so a path where a worker mounts something must exist in it.
//! `docs/worker.md` says what is mounted where.

use crate::{oci, tree::Tree};

/// Folders that a worker mounts over; those inside of one of them are made by the worker.
pub const MOUNT_POINTS: [&str; 6] = [
    "etc/cni/net.d",
    "etc/kubernetes",
    "opt/cni/bin",
    "usr/libexec/kubernetes",
    "var/lib",
    "var/log",
];

/// Adds all of it to the plan of a root; `images` is a layout of [`oci::layout`].
pub fn add(root: &mut Tree, images: Tree) {
    for point in MOUNT_POINTS {
        root.folder(point, 0o755);
    }
    root.place(oci::FOLDER, images);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_root_has_the_places_and_the_images() {
        let (mut root, mut images) = (Tree::default(), Tree::default());
        images.text("index.json", "{}");
        add(&mut root, images);
        let paths: Vec<_> = root.iter().map(|(path, _)| path).collect();
        assert!(paths.contains(&"usr/share/polis/images/index.json"));
        assert!(MOUNT_POINTS.iter().all(|point| paths.contains(point)));
    }
}
