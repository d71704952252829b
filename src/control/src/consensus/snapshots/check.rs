//! The check of a snapshot before it counts.
//!
//! Two parts, the cheap one first: the SHA-256 that etcd appended to its content, which shows
//! that the disk has what etcd sent, and etcd's own tool, which walks through every page and
//! every key of the database and so shows that it can be opened. Otherwise
//! damage would be found only on the day of a disaster.
//!
//! `etcdutl snapshot restore` compares the same checksum, but does not walk through the pages, and
//! writes a second database and a log of 64 MB, beside a member that needs the room.
//!
//! What this module does not do: read a database in the node's own process.

use std::path::{Path, PathBuf};
use std::time::Duration;

use polis_base::files::{self, Dir};
use polis_runtime::logtree::Parser;
use polis_runtime::supervisor::{Context, blocking};
use polis_runtime::sys::confine::Confinement;
use polis_runtime::sys::process::{self, Command};

use super::folder;

/// Far more than the tool needs for the largest database on a slow disk.
const TOOL_MAX: Duration = Duration::from_secs(300);

/// The first program that the kernel ends where memory is short.
const OOM_FIRST: i16 = 1000;

/// Why a snapshot does not count.
#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    /// It cannot be read.
    #[error("cannot read the new snapshot")]
    Files(#[from] files::Error),
    /// It is not what etcd sent.
    #[error("the disk does not have what etcd sent: the checksum does not match")]
    Sum,
    /// The tool found damage, or did not run.
    #[error("etcd's own tool rejects the new snapshot")]
    Tool(#[source] process::Error),
    /// The tool did not end.
    #[error("etcd's own tool did not end within {} s", TOOL_MAX.as_secs())]
    Slow,
    /// The tool's answer has no revision.
    #[error("etcd's own tool does not name the revision of the new snapshot: {0:?}")]
    Answer(String),
}

/// The result of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Checked {
    /// Bytes of the file.
    pub(super) bytes: u64,
    /// The revision of etcd in it.
    pub(super) revision: u64,
}

/// Checks the draft in the folder. It is on the disk by then.
pub(super) async fn check(tool: PathBuf, dir: &Dir, ctx: &Context) -> Result<Checked, Error> {
    let own = dir.clone();
    let bytes = blocking(move || folder::whole(&own)).await?.ok_or(Error::Sum)?;
    let file = dir.path().join(folder::UNFINISHED);
    let command = Command::new(tool)
        .confined(confinement(&file))
        .oom_score_adj(OOM_FIRST)
        .args(["snapshot", "status"])
        .arg(&file)
        .args(["--write-out", "json"])
        .log(ctx.sink("etcdutl", Parser::Json));
    // Dropped after the time is over, and so killed.
    let ran = tokio::time::timeout(TOOL_MAX, command.run()).await;
    let answer = ran.map_err(|_elapsed| Error::Slow)?.map_err(Error::Tool)?;
    Ok(Checked { bytes, revision: revision(&answer)? })
}

/// The revision in the answer of the tool.
fn revision(answer: &[u8]) -> Result<u64, Error> {
    let read: Option<serde_json::Value> = serde_json::from_slice(answer).ok();
    let revision = read.and_then(|answer| answer.get("revision")?.as_u64());
    revision.ok_or_else(|| {
        let shown: Vec<u8> = answer.iter().copied().take(ANSWER_MAX).collect();
        Error::Answer(String::from_utf8_lossy(&shown).into_owned())
    })
}

/// Bytes of an answer that a message quotes.
const ANSWER_MAX: usize = 100;

/// The rights of `etcdutl`: it opens the file for reading alone, as root, its owner.
fn confinement(file: &Path) -> Confinement {
    Confinement::new().reads(file)
}

#[cfg(test)]
mod tests {
    use polis_base::files::Root;
    use polis_runtime::sys::acts;

    use super::*;

    #[tokio::test]
    async fn the_check_of_a_snapshot_reaches_neither_the_kernel_s_interface_nor_the_node_s_key() {
        let base = tempfile::tempdir().unwrap();
        let root = Root::at(base.path());
        let test = "consensus::process::tests::act_of_a_confined_child";
        let confinement = confinement(root.esp.etcd_snapshot.path());
        acts::keeps_from_all(test, &confinement, &[], &root).await;
    }

    #[test]
    fn the_revision_is_read_from_the_answer_of_the_tool() {
        let answer = br#"{"hash":3015569967,"revision":7,"totalKey":6,"totalSize":20480}"#;
        assert_eq!(revision(answer).unwrap(), 7);
        for other in [&b""[..], b"{}", br#"{"revision":-1}"#, br#"{"revision":"7"}"#, b"[7]"] {
            let error = revision(other).unwrap_err().to_string();
            assert!(error.starts_with("etcd's own tool does not name"), "{error}");
        }
    }
}
