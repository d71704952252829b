//! The calls of operators that this node was given: kept until the leader has them in the
//! audit log of the cluster.
//!
//! ```text
//! call --> handler --> answer --> kept: memory, and the disk once it is open --> answer leaves
//!                                   |
//!                                   +--> agent --ReportCalls--> leader, audit log --> dropped
//! ```
//!
//! [`Recorded`] is around `NodeManagement`, so no handler can forget its entry; [`CALLS`] says
//! of every call whether it has one.
//!
//! Invariants:
//! - The answer of a recorded call leaves after its entry is on the disk, where there is one:
//!   a machine that ends by the call reports it after its next start.
//! - A disk that takes no entry delays a call by [`PATIENCE`] at most, and prevents none: who
//!   reboots a broken machine must be able to.
//! - At most [`KEPT_MAX`] entries wait; the oldest goes first. The log of the node has each.
//!
//! What this module does not do: record what the permissions of a caller rule out, or vouch
//! for the node: the leader takes its word.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use http::{Request, Response};
use http_body_util::{BodyExt as _, Full};
use polis_proto::v1::{self, AuditEntry, CallJournal};
use prost::Message as _;
use tokio::sync::{Mutex, watch};
use tokio::time::timeout;
use tonic::body::Body;
use tonic::codegen::Service;
use tonic::server::NamedService;
use tonic::{Code, Status};
use tracing::warn;

use polis_base::files::File;
use polis_runtime::save::Save as _;
use polis_runtime::supervisor::blocking;
use polis_wire::audit::{begun, reason};
use polis_wire::rpc::{Caller, Peer};

/// Every call of `NodeManagement`, and whether it is recorded. Programs that only read, of
/// which a console does so every second, would fill the log.
const CALLS: &[(&str, bool)] = &[
    ("/polis.v1.NodeManagement/AnnounceFirmwareUpdate", true),
    ("/polis.v1.NodeManagement/Attest", true),
    ("/polis.v1.NodeManagement/Console", false),
    ("/polis.v1.NodeManagement/Drain", true),
    ("/polis.v1.NodeManagement/FetchBundle", false),
    // The first half of `Attest`.
    ("/polis.v1.NodeManagement/GetAttestationKeys", false),
    ("/polis.v1.NodeManagement/GetFirewall", false),
    ("/polis.v1.NodeManagement/GetStatus", false),
    ("/polis.v1.NodeManagement/Logs", false),
    ("/polis.v1.NodeManagement/Reboot", true),
    ("/polis.v1.NodeManagement/Reset", true),
    ("/polis.v1.NodeManagement/Services", false),
    ("/polis.v1.NodeManagement/StoreBundle", true),
    ("/polis.v1.NodeManagement/Unlock", true),
    ("/polis.v1.NodeManagement/Update", true),
];

/// What a request says.
type Detail = fn(&[u8]) -> String;

/// The calls whose request says more than their name.
const DETAILS: [(&str, Detail); 2] = [
    ("/polis.v1.NodeManagement/AnnounceFirmwareUpdate", cancel),
    ("/polis.v1.NodeManagement/Reboot", end),
];

/// Bytes of a gRPC frame before its message: whether it is compressed, and its length.
const FRAME_HEAD: usize = 5;

/// Entries that wait for a leader: some 100 KB.
const KEPT_MAX: usize = 256;

/// Longest that the answer of a call waits for the disk.
const PATIENCE: Duration = Duration::from_secs(2);

/// Whether a call is recorded; one that is missing from the table is.
fn is_recorded(path: &str) -> bool {
    CALLS.iter().find(|(known, _)| *known == path).is_none_or(|(_, recorded)| *recorded)
}

/// The calls that wait. Clones share them.
#[derive(Clone, Debug)]
pub struct Calls {
    file: File,
    kept: Arc<Mutex<Kept>>,
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
        Self { file, kept: Arc::default(), number: watch::Sender::default() }
    }

    /// Changes with each new call.
    #[must_use]
    pub fn follow(&self) -> watch::Receiver<u64> {
        self.number.subscribe()
    }

    /// Reads the calls of earlier boots, once the data partition is open.
    pub async fn open(&self) {
        let mut kept = self.kept.lock().await;
        if kept.opened {
            return;
        }
        let file = self.file.clone();
        let mut calls = blocking(move || read(&file)).await;
        calls.append(&mut kept.calls);
        kept.calls = calls;
        kept.opened = true;
        self.bound_and_store(&mut kept).await;
    }

    /// Keeps a call.
    async fn add(&self, call: AuditEntry) {
        let mut kept = self.kept.lock().await;
        kept.calls.push(call);
        self.number.send_modify(|number| *number += 1);
        self.bound_and_store(&mut kept).await;
    }

    /// The oldest calls, at most so many.
    pub async fn oldest(&self, count: usize) -> Vec<AuditEntry> {
        self.kept.lock().await.calls.iter().take(count).cloned().collect()
    }

    /// Drops calls that the leader has, or refuses for good.
    pub async fn drop_all(&self, gone: &[AuditEntry]) {
        let mut kept = self.kept.lock().await;
        kept.calls.retain(|call| !gone.contains(call));
        self.bound_and_store(&mut kept).await;
    }

    async fn bound_and_store(&self, kept: &mut Kept) {
        let beyond = kept.calls.len().saturating_sub(KEPT_MAX);
        for lost in kept.calls.drain(..beyond) {
            warn!(by = lost.who, call = lost.call, "a call is not in the audit log: too many wait");
        }
        if !kept.opened {
            return;
        }
        let journal = CallJournal { calls: kept.calls.clone() };
        if let Err(error) = self.file.save(journal.encode_to_vec()).await {
            let error: &dyn std::error::Error = &error;
            warn!(error, "cannot store the calls that wait for the audit log");
        }
    }
}

/// The calls on the disk; a file that cannot be read has none.
fn read(file: &File) -> Vec<AuditEntry> {
    let warned = |error: &(dyn std::error::Error + 'static)| {
        warn!(error, "cannot read the calls that waited for the audit log");
    };
    let bytes = file.read().inspect_err(|error| warned(error)).ok().flatten().unwrap_or_default();
    let journal = CallJournal::decode(bytes.as_slice()).inspect_err(|error| warned(error));
    journal.unwrap_or_default().calls
}

/// A service, each of whose calls by a user is kept as [`CALLS`] says.
#[derive(Clone, Debug)]
pub(super) struct Recorded<S> {
    pub(super) inner: S,
    pub(super) calls: Calls,
}

impl<S: NamedService> NamedService for Recorded<S> {
    const NAME: &'static str = S::NAME;
}

impl<S> Service<Request<Body>> for Recorded<S>
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible>
        + Clone
        + Send
        + 'static,
    S::Future: Send,
{
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, task: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.inner.poll_ready(task)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        // The clone that was made ready serves this call.
        let waiting = self.inner.clone();
        let mut inner = std::mem::replace(&mut self.inner, waiting);
        match request.extensions().get::<Caller>().filter(|caller| is_user(caller)).cloned() {
            Some(caller) if is_recorded(request.uri().path()) => {
                Box::pin(recorded(inner, self.calls.clone(), caller, request))
            }
            _ => Box::pin(inner.call(request)),
        }
    }
}

fn is_user(caller: &Caller) -> bool {
    match caller.peer {
        Peer::User { .. } => true,
        Peer::None | Peer::Key(_) | Peer::Node(_) => false,
    }
}

async fn recorded<S>(
    mut inner: S,
    calls: Calls,
    caller: Caller,
    mut request: Request<Body>,
) -> Result<Response<Body>, Infallible>
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible>,
{
    let mut entry = begun(Some(&caller), request.uri().path());
    let detail = DETAILS.iter().find(|(path, _)| *path == request.uri().path());
    if let Some((_, detail)) = detail {
        let (parts, body) = request.into_parts();
        // One message, which the server layer bounds.
        let bytes = match body.collect().await {
            Ok(body) => body.to_bytes(),
            Err(status) => return Ok(status.into_http()),
        };
        entry.what = bytes.get(FRAME_HEAD..).map(detail).unwrap_or_default();
        request = Request::from_parts(parts, Body::new(Full::new(bytes)));
    }
    let response = inner.call(request).await?;
    let status = Status::from_header_map(response.headers());
    if let Some(status) = status.filter(|status| status.code() != Code::Ok) {
        (entry.code, entry.reason) = (status.code().into(), reason(&status));
    }
    let call = entry.call.clone();
    if timeout(PATIENCE, calls.add(entry)).await.is_err() {
        warn!(by = %caller.peer, call, "the disk did not take a call for the audit log in time");
    }
    Ok(response)
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
    use polis_wire::rpc::{Role, Table};

    use super::*;

    fn call(number: i64) -> AuditEntry {
        AuditEntry { time_unix_ms: number, call: "Reboot".to_owned(), ..Default::default() }
    }

    #[test]
    fn every_call_of_a_node_is_in_the_table_in_its_order() {
        let table = Table::polis().unwrap();
        let served = table.rules().filter(|(path, _)| path.contains(".NodeManagement/"));
        let served: Vec<_> = served.collect();
        let paths: Vec<_> = served.iter().map(|(path, _)| *path).collect();
        let rows: Vec<_> = CALLS.iter().map(|(path, _)| *path).collect();
        assert_eq!(rows, paths);
        for (path, rule) in served {
            let more = rule.least_role() > Some(Role::Viewer);
            let read = ["/FetchBundle", "/GetAttestationKeys"].iter().any(|it| path.ends_with(it));
            assert!(is_recorded(path) || !more || read, "{path}");
        }
        assert!(is_recorded("/polis.v1.NodeManagement/NoSuch"));
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
        assert_eq!(calls.oldest(9).await, [call(2)], "the disk is locked");
        calls.open().await;
        assert_eq!(calls.oldest(9).await, [call(1), call(2)]);
        assert_eq!(read(&file), [call(1), call(2)]);
        calls.drop_all(&[call(1)]).await;
        assert_eq!(read(&file), [call(2)]);
        follow.borrow_and_update();

        for number in 3..400 {
            calls.add(call(number)).await;
        }
        let kept = read(&file);
        assert_eq!((kept.len(), &kept[0]), (KEPT_MAX, &call(400 - 256)));
        file.write(&[0xff; 9]).unwrap();
        let damaged = Calls::new(file);
        damaged.open().await;
        assert_eq!(damaged.oldest(9).await, []);
    }
}
