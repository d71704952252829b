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
    let head = blocking(move || file.head()).await?;
    // One that was used is all zeros.
    if head.iter().all(|byte| *byte == 0) {
        return Ok(());
    }
    if age::is_encrypted(&head) {
        return Err(Error::EncryptedSnapshot);
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

/// The rights of `etcdutl`: as root, which alone may read the ESP, and without the rights of root
/// beyond that. The directory is new and so root's; the start of etcd gives it away with all that
/// is in it.
pub(super) fn confinement(snapshot: &Path, data: &Path) -> Confinement {
    Confinement::new().reads(snapshot).writes(data)
}
