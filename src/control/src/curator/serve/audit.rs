//! The audit of the calls of operators: one entry for each call that changes something, reads
//! a secret, or was refused.
//!
//! [`Handlers`] audit the services `Aaa` and `Management`, so no handler can forget its
//! entry; [`CALLS`] says of every call whether it has one.
//!
//! ```text
//! call --> handler --done----> entry in etcd --> answer
//!             |       |              \-- cannot be written: UNAVAILABLE, and no answer
//!             |       \--and changed nothing ([Unchanged])--> answer; [Service] writes one entry
//!             |                for each kind, as of refusals; none for `Renew`
//!             +-----refused--> answer; [Service] writes one entry for each kind: of users a
//!             |                minute, of nodes and callers without a certificate an hour
//!             +-----cut off--> [Service]
//! rpc lacks a permission ----> [Service]
//! ```
//!
//! A call that changes something runs in a task of its own (`changes`), from its handler to its
//! entry: it is cut off only if the curator stops. A caller that hangs up cuts off the reading of
//! a secret, and its wait for a departure.
//!
//! Invariants:
//! - The answer of an audited call that changed something, or reads a secret, leaves after its
//!   entry is in etcd.
//! - Of the calls of a viewer, which it makes as often as it likes, only a renewal that made
//!   another certificate has an entry when it is done: each new entry displaces the oldest one.
//! - A kind of refusal (caller, call, code) makes two entries a minute at most, and a user 121 an
//!   hour. Calls that changed nothing are counted with them: their code is that of success.
//! - Callers without a certificate of the cluster, which have as many keys as they like, are one
//!   caller in what was not done. They, and each node, make nine entries an hour at most.
//!
//! What this module does not do: record what a leader refuses because it does not lead (the
//! call is made again at the leader), or calls to nodes, which those report (`reported`).

use std::sync::Arc;

use http::Request;
use polis_proto::v1::{self, AuditEntry};
use prost::Message;
use prost::bytes::Bytes;
use tokio::sync::{Mutex, mpsc};
use tokio::time::{MissedTickBehavior, interval};
use tonic::body::Body;
use tonic::{Code, Response, Status};
use tracing::{info, warn};

use super::changes::By;
use super::kinds::{ANONYMOUS, Kinds};
use super::objects::what;
use super::{Handlers, Lead};
use crate::curator::audit::{LINES, cut};
use polis_runtime::event::Closed;
use polis_runtime::supervisor::Context;
use polis_wire::audit::layer::{self, Answer, Audit, Handler, UnderWay};
use polis_wire::audit::{begun, reason};
use polis_wire::rpc::{self, Caller, Peer};

/// Whether a call has an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Changes,
    /// As [`Self::Changes`], and it may be a departure: that is a task already, and is dropped if
    /// its caller leaves before it begins.
    Departs,
    /// As [`Self::Changes`], and open to viewers.
    Renews,
    ReadsSecret,
    No,
}

use Kind::{Changes, Departs, No, ReadsSecret, Renews};

/// Every call of the audited services.
const CALLS: &[(&str, Kind)] = &[
    ("/polis.v1.Aaa/CreateUser", Changes),
    ("/polis.v1.Aaa/Escrow", Changes),
    ("/polis.v1.Aaa/ListUsers", No),
    ("/polis.v1.Aaa/Renew", Renews),
    ("/polis.v1.Aaa/RevokeUser", Changes),
    ("/polis.v1.Management/ApproveNode", Changes),
    ("/polis.v1.Management/BeginUpdate", Changes),
    ("/polis.v1.Management/ConfigureCluster", Changes),
    ("/polis.v1.Management/ConfigureNodeNetwork", Changes),
    ("/polis.v1.Management/ConfirmFirewall", Changes),
    ("/polis.v1.Management/ConfirmRecoveryKey", Changes),
    ("/polis.v1.Management/ControlUpdate", Changes),
    ("/polis.v1.Management/DecommissionNode", Departs),
    ("/polis.v1.Management/DeleteNode", Departs),
    ("/polis.v1.Management/DeleteRegistry", Changes),
    ("/polis.v1.Management/GetAudit", No),
    ("/polis.v1.Management/GetClusterInfo", No),
    ("/polis.v1.Management/GetEtcdStatus", No),
    ("/polis.v1.Management/GetNodes", No),
    ("/polis.v1.Management/GetRecoveryKey", ReadsSecret),
    ("/polis.v1.Management/GetRegisterTicket", ReadsSecret),
    ("/polis.v1.Management/GetRotation", No),
    ("/polis.v1.Management/GetUpdate", No),
    ("/polis.v1.Management/ListRegistries", No),
    ("/polis.v1.Management/NameNode", Changes),
    ("/polis.v1.Management/RotateAuthorities", Changes),
    ("/polis.v1.Management/SetRegistry", Changes),
    ("/polis.v1.Management/SnapshotEtcd", ReadsSecret),
    ("/polis.v1.Management/UpdateNodeLabels", Changes),
    ("/polis.v1.Management/UpdateNodeRoles", Departs),
    ("/polis.v1.Management/UpdateNodeTaints", Changes),
];

/// Whether a call has an entry; one that is missing from the table has.
fn kind(path: &str) -> Kind {
    let found = CALLS.iter().find(|(known, _)| *known == path);
    found.map_or(Changes, |(_, kind)| *kind)
}

/// In the answer of a handler: the call changed nothing, and reads no secret.
#[derive(Clone, Copy, Debug)]
struct Unchanged;

/// In the answer of a handler: the text behind the object of the call in its entry.
#[derive(Clone, Copy, Debug)]
pub(super) struct Found(pub(super) &'static str);

/// The answer of a call that has changed something or not.
pub(super) fn answer<T>(message: T, changed: bool) -> Response<T> {
    let mut answer = Response::new(message);
    if !changed {
        answer.extensions_mut().insert(Unchanged);
    }
    answer
}

/// How a call that was done is recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Recorded {
    /// By an entry of its own, before its answer.
    Alone,
    /// Counted, as refusals are: its caller may make it as often as it likes, and each entry
    /// displaces the oldest one. The first has an entry, since it may repeat a call whose leader
    /// died before its entry.
    Counted,
    Never,
}

/// How a call that was done is recorded, by the answer of its handler.
fn recorded(kind: Kind, answer: &http::Extensions) -> Recorded {
    let unchanged = answer.get::<Unchanged>().is_some();
    match kind {
        Changes | Departs if unchanged => Recorded::Counted,
        Renews if unchanged => Recorded::Never,
        Changes | Departs | Renews | ReadsSecret => Recorded::Alone,
        No => Recorded::Never,
    }
}

/// Counted calls that wait for the service: more than one reader writes down in a second.
const QUEUE: usize = 64;

/// Whether a call runs to its end although its caller leaves. The answer of one that reads a
/// secret would be of no use. A change of roles is a departure only if it takes a node out of etcd.
fn runs_on(kind: Kind, path: &str, message: &[u8]) -> bool {
    match kind {
        Changes | Renews => true,
        Departs if path.ends_with("/UpdateNodeRoles") => {
            let call = v1::UpdateNodeRolesRequest::decode(message);
            let remove = call.map(|call| call.remove.unwrap_or_default());
            remove.is_ok_and(|remove| remove.consensus_member.is_none())
        }
        Departs | ReadsSecret | No => false,
    }
}

impl Audit for Handlers {
    async fn serve(self, mut handler: impl Handler, request: Request<Body>) -> Answer {
        let kind = kind(request.uri().path());
        if kind == No {
            return handler.call(request).await;
        }
        let (request, message) = match layer::message(request).await {
            Ok(read) => read,
            Err(status) => return Ok(status.into_http()),
        };
        let runs_on = runs_on(kind, request.uri().path(), message.as_deref().unwrap_or_default());
        let caller = request.extensions().get::<Caller>();
        let by = caller.map_or(By::Anonymous, |caller| by(&caller.peer));
        let changes = self.0.changes.clone();
        let call = self.serve_audited(kind, handler, request, message);
        if !runs_on {
            return call.await;
        }
        let answer = changes.run(by, call).await;
        answer.unwrap_or_else(|| Ok(Status::unavailable(UNANSWERED).into_http()))
    }
}

impl Handlers {
    /// Serves an audited call, whose message was read, and makes its entry.
    async fn serve_audited(
        self,
        kind: Kind,
        mut handler: impl Handler,
        request: Request<Body>,
        message: Option<Bytes>,
    ) -> Answer {
        let path = request.uri().path();
        let caller = request.extensions().get::<Caller>();
        let peer = caller.map_or(Peer::None, |caller| caller.peer.clone());
        let entry = AuditEntry {
            what: message.map(|message| what(path, &message)).unwrap_or_default(),
            ..begun(caller, path)
        };
        let record = |entry| self.0.attempts.record(not_done(&peer, entry));
        // This future may be dropped before its end: the change may have happened.
        let mut call = UnderWay::new(entry, record);
        let response = handler.call(request).await?;
        if let Some(Found(text)) = response.extensions().get::<Found>() {
            call.add(text);
        }
        let status = Status::from_header_map(response.headers());
        if let Some(status) = status.filter(|status| status.code() != Code::Ok) {
            let entry = call.end();
            if !rpc::is_not_leader(&status) {
                let (code, reason) = (status.code().into(), reason(&status));
                record(AuditEntry { code, reason, ..entry });
            }
            return Ok(response);
        }
        match recorded(kind, response.extensions()) {
            Recorded::Alone => {}
            Recorded::Counted => {
                self.0.attempts.record(call.end());
                return Ok(response);
            }
            Recorded::Never => {
                let _none = call.end();
                return Ok(response);
            }
        }
        Ok(match self.audit(call.entry()).await {
            Ok(()) => {
                let _done = call.end();
                response
            }
            // Its entry is tried again, as that of a call that ended without an answer: the next
            // attempt of the caller may find nothing to change.
            Err(status) => {
                warn!("the answer of a call is held back: {status}");
                unwritten(kind).into_http()
            }
        })
    }

    /// Appends an entry to the log, as the leader.
    pub(super) async fn audit(&self, entry: AuditEntry) -> Result<(), Status> {
        let lead = self.lead()?;
        let entry = AuditEntry { node: self.0.node.to_string(), ..entry };
        let written = Box::pin(lead.store().audit(&self.0.audit, entry)).await;
        written.map(drop).map_err(|error| lead.refuse(error))
    }
}

/// The entry of a call that was not done, as it is counted. A caller without a certificate of the
/// cluster is not named: its key and its address say nothing, and it has many.
fn not_done(peer: &Peer, entry: AuditEntry) -> AuditEntry {
    match by(peer) {
        By::Member => entry,
        By::Anonymous => AuditEntry {
            who: ANONYMOUS.to_owned(),
            key: String::new(),
            from: String::new(),
            ..entry
        },
    }
}

/// Whether a caller has a certificate of the cluster.
fn by(peer: &Peer) -> By {
    match peer {
        Peer::Node(_) | Peer::User { .. } => By::Member,
        Peer::None | Peer::Key(_) => By::Anonymous,
    }
}

/// The answer to a call whose change has none: the curator stopped before it began, or during it.
const UNANSWERED: &str = "this curator has stopped, and what the call asked for may have been done; \
                          look whether it was before you try again";

/// The answer of a call whose entry cannot be written.
fn unwritten(kind: Kind) -> Status {
    Status::unavailable(match kind {
        ReadsSecret => "the audit log cannot be written, so this is not shown; try again",
        Changes | Departs | Renews | No => {
            "the change was made, and the audit log cannot be written; try again"
        }
    })
}

impl Lead {
    /// The answer of a call that changes records by [`Lead::store`] alone.
    pub(super) fn answer<T>(&self, message: T) -> Response<T> {
        answer(message, self.store().kv.wrote())
    }
}

/// The handle to report what was not done, or changed nothing. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Attempts(mpsc::Sender<AuditEntry>);

/// The other end of [`Attempts`], and what the server layer refused.
#[derive(Clone, Debug)]
pub(in crate::curator) struct Queue(Arc<Mutex<Ends>>);

#[derive(Debug)]
struct Ends {
    attempts: mpsc::Receiver<AuditEntry>,
    refused: mpsc::Receiver<rpc::Refused>,
}

impl Attempts {
    /// Both ends, and the one for the server layer.
    #[must_use]
    pub(in crate::curator) fn channel() -> (Self, Queue, mpsc::Sender<rpc::Refused>) {
        let (tell, attempts) = mpsc::channel(QUEUE);
        let (refuse, refused) = mpsc::channel(QUEUE);
        (Self(tell), Queue(Arc::new(Mutex::new(Ends { attempts, refused }))), refuse)
    }

    /// Hands on an entry, unless more of them wait than can be written down. Many entries wait, and
    /// the first of each kind for as long as the others are counted, so their texts are cut here.
    fn record(&self, entry: AuditEntry) {
        let (what, reason) = (cut(&entry.what), cut(&entry.reason));
        if let Err(full) = self.0.try_send(AuditEntry { what, reason, ..entry }) {
            let AuditEntry { who, call, .. } = full.into_inner();
            warn!(target: LINES, by = who, call, "too many calls to count for the audit log");
        }
    }
}

/// Writes entries about calls that were not done or changed nothing. Cloned into every run.
#[derive(Clone, Debug)]
pub(in crate::curator) struct Service {
    pub(in crate::curator) handlers: Handlers,
    pub(in crate::curator) queue: Queue,
}

impl Service {
    /// Runs until cancelled.
    ///
    /// # Errors
    ///
    /// [`Closed`] when the other ends are gone.
    pub(in crate::curator) async fn run(self, ctx: Context) -> Result<(), Closed> {
        ctx.healthy();
        ctx.until_cancelled(Box::pin(self.work())).await.unwrap_or(Ok(()))
    }

    async fn work(&self) -> Result<(), Closed> {
        let mut ends = self.queue.0.lock().await;
        let Ends { attempts, refused } = &mut *ends;
        let mut kinds = Kinds::default();
        let mut windows = interval(Kinds::WINDOW);
        windows.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                // Cancel-safe, all of them: they wait for values or for the time.
                entry = attempts.recv() => {
                    let entry = entry.ok_or(Closed("the curator"))?;
                    self.write_all(kinds.seen(entry)).await;
                }
                refused = refused.recv() => {
                    let refused = refused.ok_or(Closed("the server"))?;
                    if kind(&refused.path) != No && is_audited(&refused.path) {
                        self.write_all(kinds.seen(denied(refused))).await;
                    }
                }
                _tick = windows.tick() => self.write_all(kinds.ended()).await,
            }
        }
    }

    async fn write_all(&self, entries: impl IntoIterator<Item = AuditEntry>) {
        for entry in entries {
            let (who, call, repeats) = (entry.who.clone(), entry.call.clone(), entry.repeats);
            if let Err(status) = self.handlers.audit(entry).await {
                // A curator that does not lead refuses by the same table, and cannot write. Of a
                // leader that has lost its term the chain has the first refusal of each kind, and
                // lacks how many followed it in the last window: no other leader can know that.
                info!(
                    target: LINES,
                    by = who,
                    call,
                    repeats,
                    "a call is only in this log: {}",
                    status.message()
                );
            }
        }
    }
}

/// Whether a call is one of the audited services.
fn is_audited(path: &str) -> bool {
    CALLS.iter().any(|(known, _)| *known == path)
}

fn denied(refused: rpc::Refused) -> AuditEntry {
    let rpc::Refused { caller, path, reason } = refused;
    AuditEntry { code: Code::PermissionDenied.into(), reason, ..begun(Some(&caller), &path) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use polis_wire::node_roles::Role;

    #[test]
    fn every_call_of_an_operator_is_in_the_table_in_its_order() {
        let table = rpc::Table::polis().unwrap();
        let audited = ["/polis.v1.Aaa/", "/polis.v1.Management/"];
        let served = table.rules().map(|(path, _)| path);
        let served: Vec<_> =
            served.filter(|path| audited.iter().any(|begin| path.starts_with(begin))).collect();
        let rows: Vec<_> = CALLS.iter().map(|(path, _)| *path).collect();
        assert_eq!(rows, served);
        for (path, rule) in table.rules().filter(|(path, _)| served.contains(path)) {
            // A call that needs more than a viewer changes something or reads a secret.
            let more = rule.least_role() > Some(rpc::Role::Viewer);
            let audited = kind(path) != No || path.ends_with("/GetAudit");
            assert!(audited || !more, "{path}");
        }
        assert_eq!(kind("/polis.v1.Management/NoSuch"), Changes);
    }

    #[test]
    fn a_caller_that_leaves_cuts_off_a_departure_or_the_reading_of_a_secret_and_nothing_else() {
        let roles = |remove: &[Role]| {
            let remove = Some(Role::record(remove));
            v1::UpdateNodeRolesRequest { remove, ..Default::default() }.encode_to_vec()
        };
        let cut_off = |message: &[u8]| {
            let audited = CALLS.iter().filter(|(_, kind)| *kind != No);
            let ends = audited.filter(|(path, kind)| !runs_on(*kind, path, message));
            ends.map(|(path, _)| path.rsplit('/').next().unwrap()).collect::<Vec<_>>()
        };
        let departures = ["DecommissionNode", "DeleteNode"];
        let secrets = ["GetRecoveryKey", "GetRegisterTicket", "SnapshotEtcd"];
        let expected = [&departures[..], &secrets].concat();
        assert_eq!(cut_off(&[]), expected);
        assert_eq!(cut_off(&roles(&[Role::KubernetesWorker])), expected);
        let leaves = [&expected[..], &["UpdateNodeRoles"]].concat();
        assert_eq!(cut_off(&roles(&[Role::ConsensusMember])), leaves);
    }

    /// A viewer may renew its certificate as often as it likes, and the log has a bound.
    #[test]
    fn a_renewal_that_changed_nothing_has_no_entry_and_no_other_call_of_a_viewer_has_one() {
        let renewed = |changed| recorded(Renews, answer((), changed).extensions());
        assert_eq!([true, false].map(renewed), [Recorded::Alone, Recorded::Never]);

        let table = rpc::Table::polis().unwrap();
        let by_viewers = table.rules().filter(|(path, rule)| {
            rule.least_role() == Some(rpc::Role::Viewer) && is_audited(path) && kind(path) != No
        });
        let paths: Vec<_> = by_viewers.map(|(path, _)| path).collect();
        assert_eq!(paths, ["/polis.v1.Aaa/Renew"]);
        assert_eq!(kind(paths[0]), Renews);
    }

    #[test]
    fn an_operator_who_repeats_calls_that_change_nothing_does_not_roll_over_the_log() {
        let done = |kind, changed| recorded(kind, answer((), changed).extensions());
        assert_eq!(done(Changes, true), Recorded::Alone);
        assert_eq!(done(Changes, false), Recorded::Counted);
        assert_eq!(done(ReadsSecret, false), Recorded::Alone);

        let peer = Peer::User { name: "otto".to_owned(), role: rpc::Role::Operator };
        let address = std::net::SocketAddr::from(([192, 0, 2, 7], 4711));
        let caller = Caller { peer, address, certificate: None };
        let mut kinds = Kinds::default();
        let mut entries = Vec::new();
        for _minute in 0..60 {
            for _call in 0..1000 {
                for path in ["/polis.v1.Management/NameNode", "/polis.v1.Management/ApproveNode"] {
                    entries.extend(kinds.seen(begun(Some(&caller), path)));
                }
            }
            entries.extend(kinds.ended());
        }
        assert_eq!((&*entries[0].who, entries[0].code), ("operator otto", i32::from(Code::Ok)));
        let counted = entries.iter().map(|entry| entry.repeats).sum::<u64>();
        assert_eq!((entries.len(), counted), (121, 60 * 2 * 1000 - 60));
    }

    #[test]
    fn an_anonymous_caller_with_a_fresh_key_for_each_call_makes_few_entries() {
        let mut kinds = Kinds::default();
        let mut refused = |peer: Peer, code: Code| {
            let address = std::net::SocketAddr::from(([192, 0, 2, 7], 4711));
            let caller = Caller { peer, address, certificate: None };
            let entry = begun(Some(&caller), "/polis.v1.Aaa/Escrow");
            kinds.seen(not_done(&caller.peer, AuditEntry { code: code.into(), ..entry }))
        };
        let first = refused(Peer::Key([0; 32]), Code::PermissionDenied).unwrap();
        assert_eq!((&*first.who, &*first.call), (ANONYMOUS, "Escrow"));
        assert_eq!((&*first.key, &*first.from), ("", ""));
        for key in 1..=255 {
            assert_eq!(refused(Peer::Key([key; 32]), Code::PermissionDenied), None, "{key}");
        }
        assert_eq!(refused(Peer::None, Code::PermissionDenied), None);
        // It hangs up: another kind.
        let cut = [1, 2].map(|key| refused(Peer::Key([key; 32]), Code::Cancelled).is_some());
        assert_eq!(cut, [true, false]);
        let user = Peer::User { name: "otto".to_owned(), role: rpc::Role::Operator };
        let named = refused(user, Code::PermissionDenied).unwrap();
        assert_eq!((&*named.who, &*named.from), ("operator otto", "192.0.2.7"));
    }

    #[test]
    fn a_refusal_that_waits_has_no_long_text_of_its_caller() {
        let (attempts, queue, _refuse) = Attempts::channel();
        // A request of a user has up to 4 MiB, and its refusal repeats the field.
        let text = "x".repeat(4 << 20);
        let (what, reason) = (text.clone(), format!("field: node_id is {text:?}"));
        attempts.record(AuditEntry { what, reason, ..AuditEntry::default() });
        let mut ends = queue.0.try_lock().unwrap();
        let waits = ends.attempts.try_recv().unwrap();
        assert_eq!((waits.what.len(), waits.reason.len()), (200, 200));
    }
}

#[cfg(test)]
#[path = "audit_fuzz_tests.rs"]
mod fuzz_tests;
