//! The calls of operators that this node was given: kept until the leader has them in the
//! audit log of the cluster.
//!
//! ```text
//! call --> handler --> answer --> kept: memory, and the disk once it is open --> answer leaves
//!                                   |
//!                                   +--> agent --ReportCalls--> leader, audit log --> dropped
//! ```
//!
//! [`Calls`] are around `NodeManagement`, so no handler can forget its entry;
//! [`NODE_CALLS`](polis_wire::audit::NODE_CALLS) says of every call whether it has one.
//!
//! Invariants:
//! - A call has an entry once it has reached its handler, also where its caller leaves before
//!   the answer.
//! - The answer of a recorded call leaves after its entry is on the disk, once that is open: a
//!   machine that ends by the call reports it after its next start.
//! - A disk that takes no entry delays an answer by [`PATIENCE`] at most, and prevents none: an
//!   operator must be able to reboot a broken machine.
//! - At most [`KEPT_MAX`] entries wait; the oldest goes first. The log of the node has each.
//! - The file has the newest state of all that were asked to be written: one write at a time.
//!
//! What this module does not do: record what the permissions of a caller rule out, or vouch
//! for the node: the leader takes its word.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use http::Request;
use polis_proto::v1::{self, AuditEntry, CallJournal};
use prost::Message as _;
use tokio::sync::watch;
use tokio::time::timeout;
use tonic::body::Body;
use tonic::{Code, Status};
use tracing::warn;

use polis_base::files::File;
use polis_runtime::supervisor::blocking;
use polis_wire::audit::layer::{self, Answer, Audit, Handler, UnderWay};
use polis_wire::audit::{begun, is_recorded, reason};
use polis_wire::rpc::{Caller, Peer};

/// Reads the detail of a request.
type Detail = fn(&[u8]) -> String;

/// The calls whose request says more than their name.
const DETAILS: [(&str, Detail); 2] = [
    ("/polis.v1.NodeManagement/AnnounceFirmwareUpdate", cancel),
    ("/polis.v1.NodeManagement/Reboot", end),
];

/// Entries that wait for a leader: some 100 KB.
const KEPT_MAX: usize = 256;

/// Longest that the answer of a call waits for the disk.
const PATIENCE: Duration = Duration::from_secs(2);

/// The calls that wait. Clones share them.
#[derive(Clone, Debug)]
pub struct Calls {
    file: File,
    kept: Arc<Mutex<Kept>>,
    /// Held by the thread that writes the file.
    writes: Arc<tokio::sync::Mutex<()>>,
    /// Grows with each call.
    number: watch::Sender<u64>,
}

#[derive(Debug, Default)]
struct Kept {
    /// The oldest first.
    calls: Vec<AuditEntry>,
    /// Whether the disk is open and its entries are among them.
    opened: bool,
}

impl Calls {
    /// No calls yet: those in `file` follow with [`Calls::open`].
    #[must_use]
    pub fn new(file: File) -> Self {
        let (kept, writes) = (Arc::default(), Arc::default());
        Self { file, kept, writes, number: watch::Sender::default() }
    }

    /// Changes with each new call.
    #[must_use]
    pub fn follow(&self) -> watch::Receiver<u64> {
        self.number.subscribe()
    }

    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads the calls of earlier boots, once the data partition is open. A file that the disk
    /// does not return stays as it is.
    pub async fn open(&self) {
        if self.kept().opened {
            return;
        }
        let file = self.file.clone();
        let Some(mut calls) = blocking(move || read(&file)).await else { return };
        {
            let mut kept = self.kept();
            calls.append(&mut kept.calls);
            kept.calls = calls;
            kept.opened = true;
            kept.bound();
        }
        self.store().await;
    }

    /// Keeps a call, in memory at once.
    fn push(&self, call: AuditEntry) {
        let mut kept = self.kept();
        kept.calls.push(call);
        kept.bound();
        drop(kept);
        self.number.send_modify(|number| *number += 1);
    }

    /// Keeps a call, on the disk once that is open.
    async fn add(&self, call: AuditEntry) {
        self.push(call);
        self.store().await;
    }

    /// The oldest calls, at most so many.
    #[must_use]
    pub fn oldest(&self, count: usize) -> Vec<AuditEntry> {
        self.kept().calls.iter().take(count).cloned().collect()
    }

    /// Drops calls that the leader has, or refuses for good.
    pub async fn drop_all(&self, gone: &[AuditEntry]) {
        self.kept().calls.retain(|call| !gone.contains(call));
        self.store().await;
    }

    /// Writes what waits by then, once the disk is open. A dropped wait leaves the write to its
    /// thread.
    async fn store(&self) {
        let turn = Arc::clone(&self.writes).lock_owned().await;
        let (file, journal) = {
            let kept = self.kept();
            if !kept.opened {
                return;
            }
            (self.file.clone(), CallJournal { calls: kept.calls.clone() })
        };
        let written = blocking(move || {
            let written = file.write(&journal.encode_to_vec());
            drop(turn);
            written
        });
        if let Err(error) = written.await {
            let error: &dyn std::error::Error = &error;
            warn!(error, "cannot store the calls that wait for the audit log");
        }
    }
}

impl Kept {
    fn bound(&mut self) {
        let beyond = self.calls.len().saturating_sub(KEPT_MAX);
        for lost in self.calls.drain(..beyond) {
            warn!(by = lost.who, call = lost.call, "a call is not in the audit log: too many wait");
        }
    }
}

/// The calls on the disk; `None` if the disk does not return them. A damaged file has none.
fn read(file: &File) -> Option<Vec<AuditEntry>> {
    let warned = |error: &(dyn std::error::Error + 'static)| {
        warn!(error, "cannot read the calls that waited for the audit log");
    };
    let bytes = match file.read() {
        Ok(bytes) => bytes.unwrap_or_default(),
        Err(error) => {
            warned(&error);
            return None;
        }
    };
    let journal = CallJournal::decode(bytes.as_slice()).inspect_err(|error| warned(error));
    Some(journal.unwrap_or_default().calls)
}

impl Audit for Calls {
    /// Keeps each recorded call of a user.
    async fn serve(self, mut handler: impl Handler, request: Request<Body>) -> Answer {
        let path = request.uri().path().to_owned();
        let caller = request.extensions().get::<Caller>().filter(|caller| is_user(caller));
        let Some(caller) = caller.filter(|_user| is_recorded(&path)).cloned() else {
            return handler.call(request).await;
        };
        let mut entry = begun(Some(&caller), &path);
        let mut request = request;
        if let Some((_, detail)) = DETAILS.iter().find(|(known, _)| *known == path) {
            let message;
            (request, message) = match layer::message(request).await {
                Ok(read) => read,
                Err(status) => return Ok(status.into_http()),
            };
            entry.what = message.map(|message| detail(&message)).unwrap_or_default();
        }
        // The next write of the file takes a call along that is cut off.
        let call = UnderWay::new(entry, |entry| self.push(entry));
        let response = handler.call(request).await?;
        let mut entry = call.end();
        let status = Status::from_header_map(response.headers());
        if let Some(status) = status.filter(|status| status.code() != Code::Ok) {
            (entry.code, entry.reason) = (status.code().into(), reason(&status));
        }
        let call = entry.call.clone();
        if timeout(PATIENCE, self.add(entry)).await.is_err() {
            let by = &caller.peer;
            warn!(%by, call, "the disk did not take a call for the audit log in time");
        }
        Ok(response)
    }
}

fn is_user(caller: &Caller) -> bool {
    match caller.peer {
        Peer::User { .. } => true,
        Peer::None | Peer::Key(_) | Peer::Node(_) => false,
    }
}

/// Whether an announcement ends.
fn cancel(message: &[u8]) -> String {
    let request = v1::AnnounceFirmwareUpdateRequest::decode(message).unwrap_or_default();
    if request.cancel { "cancel" } else { "" }.to_owned()
}

/// How the machine is to end.
fn end(message: &[u8]) -> String {
    let request = v1::RebootRequest::decode(message).unwrap_or_default();
    if request.power_off { "power off" } else { "reboot" }.to_owned()
}

#[cfg(test)]
mod tests {
    use polis_base::files::Root;

    use super::*;

    fn call(number: i64) -> AuditEntry {
        AuditEntry { time_unix_ms: number, call: "Reboot".to_owned(), ..Default::default() }
    }

    #[tokio::test]
    async fn a_call_that_is_cut_off_or_finds_no_disk_is_kept() {
        let disk = tempfile::tempdir().unwrap();
        let calls = Calls::new(Root::at(disk.path()).data.node.calls);
        // A write that takes its time.
        let turn = Arc::clone(&calls.writes).lock_owned().await;
        assert!(timeout(Duration::from_millis(10), calls.add(call(1))).await.is_err());
        drop(UnderWay::new(call(2), |call| calls.push(call)));
        drop(turn);
        let kept: Vec<_> = calls.oldest(9).iter().map(|it| (it.time_unix_ms, it.code)).collect();
        assert_eq!(kept, [(1, 0), (2, Code::Cancelled.into())]);
    }

    #[tokio::test]
    async fn calls_wait_on_the_disk_for_a_leader_and_those_before_it_opened_too() {
        let disk = tempfile::tempdir().unwrap();
        let root = Root::at(disk.path());
        root.create().unwrap();
        let file = root.data.node.calls;
        let earlier = Calls::new(file.clone());
        earlier.open().await;
        earlier.add(call(1)).await;

        let calls = Calls::new(file.clone());
        let mut follow = calls.follow();
        calls.add(call(2)).await;
        assert!(follow.has_changed().unwrap());
        assert_eq!(calls.oldest(9), [call(2)], "the disk is locked");
        calls.open().await;
        assert_eq!(calls.oldest(9), [call(1), call(2)]);
        assert_eq!(read(&file).unwrap(), [call(1), call(2)]);
        calls.drop_all(&[call(1)]).await;
        assert_eq!(read(&file).unwrap(), [call(2)]);
        follow.borrow_and_update();

        for number in 3..400 {
            calls.add(call(number)).await;
        }
        let kept = read(&file).unwrap();
        assert_eq!((kept.len(), &kept[0]), (KEPT_MAX, &call(400 - 256)));
        file.write(&[0xff; 9]).unwrap();
        let damaged = Calls::new(file);
        damaged.open().await;
        assert_eq!(damaged.oldest(9), []);
    }
}
