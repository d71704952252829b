//! Ownership of the files of a program that is not root: its data belongs to its user, and
//! the files that it only reads belong to root and to its group.
//!
//! Nothing is written where it already is as it should be: an ordinary start changes no
//! inode. A power cut leaves each inode old or new, and the next start does the rest.
//!
//! What this module does not do: decide which files these are (`files::tree`).

use std::fs::Metadata;
use std::io;
use std::os::unix::fs::{MetadataExt as _, lchown};
use std::path::Path;

use rustix::fs::{AtFlags, CWD, Mode};
use rustix::process::geteuid;

use super::error::Error;
use crate::users::{self, User};

/// The group of a file, beside the root that owns it. Small, since futures hold many files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Group {
    /// That of root.
    Root,
    /// That of etcd's user.
    Etcd,
    /// That of all programs of Kubernetes.
    Kubernetes,
    /// That of the API server's user.
    ApiServer,
    /// That of the controller manager's user.
    ControllerManager,
    /// That of the scheduler's user.
    Scheduler,
    /// That of kube-proxy's user.
    KubeProxy,
    /// That of CoreDNS' user.
    CoreDns,
    /// That of the user of the program that enforces NetworkPolicies.
    Policy,
}

impl Group {
    /// Its number, unless a new file has it by itself.
    pub(super) fn number(self) -> Option<u32> {
        Some(match self {
            Self::Root => return None,
            Self::Etcd => users::ETCD.id,
            Self::Kubernetes => users::KUBERNETES.id,
            Self::ApiServer => users::API_SERVER.id,
            Self::ControllerManager => users::CONTROLLER_MANAGER.id,
            Self::Scheduler => users::SCHEDULER.id,
            Self::KubeProxy => users::KUBE_PROXY.id,
            Self::CoreDns => users::COREDNS.id,
            Self::Policy => users::POLICY.id,
        })
    }
}

/// Whether this process may give files away. A test of an ordinary user may not, and starts
/// its programs as the same user.
pub(super) fn may_give() -> bool {
    geteuid().is_root()
}

/// Sets the mode and the group; a missing file is not an error.
pub(super) fn settle(path: &Path, mode: u32, group: Option<u32>) -> Result<(), Error> {
    let Some(found) = look(path)? else { return Ok(()) };
    if found.file_type().is_symlink() {
        return Ok(());
    }
    if let Some(group) = group
        && found.gid() != group
        && may_give()
    {
        lchown(path, None, Some(group)).map_err(|e| Error::io("set the group of", path, e))?;
    }
    if found.mode() & 0o7777 != mode {
        rustix::fs::chmodat(CWD, path, Mode::from_raw_mode(mode), AtFlags::empty())
            .map_err(|e| Error::io("set the mode of", path, e))?;
    }
    Ok(())
}

/// Makes `user` the owner of everything at and below `path`, and gives `path` itself this
/// group, and everything below it that of the user; a missing path is not an error. A file with
/// several names stays as it is.
pub(super) fn give(path: &Path, user: User, group: Option<u32>) -> Result<(), Error> {
    if !may_give() {
        return Ok(());
    }
    // Not by recursion: a program makes its directories as deep as it likes.
    let mut waiting = vec![(path.to_owned(), group.unwrap_or(user.id))];
    while let Some((path, group)) = waiting.pop() {
        let Some(found) = look(&path)? else { continue };
        // Another name of a file elsewhere would give that one away.
        if found.is_file() && found.nlink() > 1 {
            continue;
        }
        if (found.uid(), found.gid()) != (user.id, group) {
            lchown(&path, Some(user.id), Some(group))
                .map_err(|e| Error::io("set the owner of", &path, e))?;
        }
        if found.is_dir() {
            for entry in std::fs::read_dir(&path).map_err(|e| Error::io("list", &path, e))? {
                waiting.push((entry.map_err(|e| Error::io("list", &path, e))?.path(), user.id));
            }
        }
    }
    Ok(())
}

fn look(path: &Path) -> Result<Option<Metadata>, Error> {
    match std::fs::symlink_metadata(path) {
        Ok(found) => Ok(Some(found)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(Error::io("look at", path, error)),
    }
}

#[cfg(test)]
mod tests {
    use super::super::Root;
    use super::*;
    use crate::users::ETCD;

    /// Owner, group and mode.
    fn shown(path: &Path) -> (u32, u32, u32) {
        let found = std::fs::symlink_metadata(path).unwrap();
        (found.uid(), found.gid(), found.mode() & 0o7777)
    }

    #[test]
    fn a_disk_of_an_earlier_system_becomes_etcd_s_and_stays_so_when_files_are_replaced() {
        if !may_give() {
            println!("not tested: needs root");
            return;
        }
        let base = tempfile::tempdir().unwrap();
        let root = Root::at(base.path());
        root.create().unwrap();
        let tree = &root.data.etcd;
        let wal = tree.data.path().join("member/wal");
        std::fs::create_dir_all(&wal).unwrap();
        let outside = base.path().join("outside");
        for file in [&wal.join("0.wal"), &outside] {
            std::fs::write(file, "").unwrap();
        }
        std::os::unix::fs::symlink(&outside, wal.join("link")).unwrap();
        std::fs::hard_link(&outside, wal.join("second-name")).unwrap();
        tree.peer_pki.key.write(b"key").unwrap();
        // As it was before etcd had a user.
        for (path, mode) in [
            (tree.dir.path(), 0o700),
            (tree.peer_pki.dir.path(), 0o700),
            (tree.peer_pki.key.path(), 0o600),
        ] {
            lchown(path, Some(0), Some(0)).unwrap();
            rustix::fs::chmodat(CWD, path, Mode::from_raw_mode(mode), AtFlags::empty()).unwrap();
        }

        for _again in 0..2 {
            tree.admit().unwrap();
            let id = ETCD.id;
            assert_eq!(shown(tree.dir.path()), (0, id, 0o710));
            assert_eq!(shown(tree.peer_pki.dir.path()), (0, id, 0o710));
            assert_eq!(shown(tree.peer_pki.key.path()), (0, id, 0o640));
            assert_eq!(shown(tree.data.path()), (id, id, 0o700));
            assert_eq!(shown(&wal.join("0.wal")).0, id);
            assert_eq!(shown(&wal.join("link")).0, id);
            assert_eq!(
                shown(&outside).0,
                0,
                "a link is not followed, and a second name gives nothing away"
            );
            tree.peer_pki.key.write(b"new key").unwrap();
            tree.peer_crl.write(b"crl").unwrap();
            assert_eq!(shown(tree.peer_pki.key.path()), (0, id, 0o640));
            assert_eq!(shown(tree.peer_crl.path()), (0, id, 0o640));
        }
        assert_eq!(shown(root.data.node.dir.path()), (0, 0, 0o700));
        assert_eq!(shown(tree.snapshots.path()), (0, 0, 0o700));
    }
}
