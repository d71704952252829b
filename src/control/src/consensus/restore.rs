//! The restore from a snapshot: fills the data directory of a new cluster, which would
//! otherwise begin empty.
//!
//! ```text
//! ESP: etcd_snapshot.db --etcdutl--> /data/etcd/data: one member, this node
//! ```
//!
//! The member and the cluster ID are new, so a remaining member of the old cluster cannot
//! mistake this etcd for its own; keys, authorities and records are those of the snapshot.
//! Revisions go on far above any that the old cluster can have reached after the snapshot,
//! and everything older counts as compacted: a watcher that comes back reads afresh.
//!
//! What this module does not do: remove the snapshot (`cluster::membership`, once this node
//! is a member), or add this node to the records.

use std::path::Path;

use tracing::warn;

use super::{Config, Error, Orders};
use polis_base::files::{self, File};
use polis_runtime::logtree::Parser;
use polis_runtime::supervisor::{Context, blocking};
use polis_runtime::sys::confine::Confinement;
use polis_runtime::sys::process::Command;
use polis_wire::age;

use super::args;

/// The value that etcd's own tool suggests: years of writes.
const REVISIONS: u64 = 1_000_000_000;

/// Fills the member's directory from the snapshot, if there is one. The
/// directory must be empty.
pub(super) async fn restore(config: &Config, ctx: &Context, orders: &Orders) -> Result<(), Error> {
    let snapshot = config.snapshot.path().to_owned();
    let file = config.snapshot.clone();
    if !blocking(move || is_given(&file)).await? {
        return Ok(());
    }
    let name = orders.key.id().to_string();
    warn!(snapshot = %snapshot.display(), "this cluster starts from a snapshot");
    let data = config.tree.data.path();
    let command = Command::new(&config.restorer)
        .confined(confinement(&snapshot, data))
        .args(["snapshot", "restore"])
        .arg(&snapshot)
        .args(["--data-dir".as_ref(), data.as_os_str()])
        .args(["--name", &name])
        .args(args::only_member(&name, &orders.peer))
        .args(["--bump-revision", &REVISIONS.to_string(), "--mark-compacted"])
        .log(ctx.sink("etcdutl", Parser::Json));
    command.run().await.map(drop).map_err(Error::Snapshot)
}

/// Whether a person has put a snapshot there. Blocks.
fn is_given(snapshot: &File) -> Result<bool, Error> {
    let head = snapshot.head()?;
    if head.is_empty() {
        // A copy that was cut off leaves a name without content on the ESP: without this, the
        // machine would begin an empty cluster.
        let exists = snapshot.path().try_exists();
        return match exists.map_err(|e| files::Error::io("look at", snapshot.path(), e))? {
            true => Err(Error::EmptySnapshot),
            false => Ok(false),
        };
    }
    if age::is_encrypted(&head) {
        return Err(Error::EncryptedSnapshot);
    }
    // One that was used is all zeros.
    Ok(head.iter().any(|byte| *byte != 0))
}

/// The rights of `etcdutl`: as root, which alone may read the ESP, and without the rights of root
/// beyond that. The directory is new and so root's; the start of etcd gives it away with all that
/// is in it.
pub(super) fn confinement(snapshot: &Path, data: &Path) -> Confinement {
    Confinement::new().reads(snapshot).writes(data)
}

#[cfg(test)]
mod tests {
    use polis_base::files::Root;

    use super::*;

    #[test]
    fn a_snapshot_that_was_cut_off_begins_no_empty_cluster() {
        let base = tempfile::tempdir().unwrap();
        let root = Root::at(base.path());
        root.create().unwrap();
        let snapshot = root.esp.etcd_snapshot.clone();
        assert!(!is_given(&snapshot).unwrap());
        std::fs::write(snapshot.path(), b"").unwrap();
        let cut = is_given(&snapshot).unwrap_err();
        assert!(matches!(cut, Error::EmptySnapshot), "{cut}");
        std::fs::write(snapshot.path(), b"age-encryption.org/v1\n").unwrap();
        let encrypted = is_given(&snapshot).unwrap_err();
        assert!(matches!(encrypted, Error::EncryptedSnapshot), "{encrypted}");
        std::fs::write(snapshot.path(), b"a database").unwrap();
        assert!(is_given(&snapshot).unwrap());
        // What a bootstrap leaves of it.
        snapshot.erase().unwrap();
        assert!(!is_given(&snapshot).unwrap());
    }
}
