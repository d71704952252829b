//! The calls of operators that this node was given: kept until the leader has them in the
//! audit log of the cluster.
//!
//! ```text
//! call --> handler --> answer --> kept: memory, and the disk once it is open --> answer leaves
//!                        |          ^ |
//!                        |          | +--> agent --ReportCalls--> leader, audit log --> dropped
//!                        |          |
//!                        |          each minute, one entry for all of a kind
//!                        |          |
//!                        +--> refused again: counted --> answer leaves
//! ```
//!
//! [`Calls`] are around `NodeManagement`, so no handler can forget its entry;
//! [`NODE_CALLS`](polis_wire::audit::NODE_CALLS) says of every call whether it has one.
//!
//! Invariants:
//! - A call that was done has an entry of its own once it has reached its handler, and so has one
//!   that was cut off before its answer, since it may have been done. Of the calls of one caller
//!   that were refused with one code, the first of a minute has one, and the others have one
//!   together; a caller with many codes and calls makes no more entries in an hour than [`Kinds`]
//!   says.
//! - The answer of a call with an entry of its own leaves after that is on the disk, once the disk
//!   is open: a machine that ends by the call reports it after its next start.
//! - A disk that takes no entry delays an answer by [`PATIENCE`] at most, and prevents none: an
//!   operator must be able to reboot a broken machine.
//! - At most [`KEPT_MAX`] entries wait. Where more would, refusals go before calls that were done
//!   or cut off, and a caller with many calls of one kind loses those before another call of
//!   anyone: a flood of calls cannot hide another call. An entry says how many calls are lost; the
//!   log of the node has each.
//! - Calls that were done or cut off are reported before refusals, which may wait for hours: a
//!   leader takes few entries of a node.
//! - The file has the newest state of all that were asked to be written: one write at a time.
//!
//! What this module does not do: record what the permissions of a caller rule out, or vouch
//! for the node: the leader takes its word.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use http::Request;
use polis_proto::v1::{self, AuditEntry, CallJournal};
use prost::Message as _;
use tokio::sync::watch;
use tokio::time::{sleep, timeout};
use tonic::body::Body;
use tonic::{Code, Status};
use tracing::warn;

use polis_base::files::File;
use polis_control::curator::audit::LINES;
use polis_control::curator::serve::Kinds;
use polis_runtime::supervisor::{Context, blocking};
use polis_wire::audit::layer::{self, Answer, Audit, Handler, UnderWay};
use polis_wire::audit::{begun, is_recorded, reason};
use polis_wire::rpc::{Caller, Peer};

/// Takes the entries of counted refusals.
type Counted = fn(&mut Kinds) -> Vec<AuditEntry>;

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
    /// The refusals of this minute.
    refusals: Kinds,
    /// The calls that were lost since the node started.
    lost: u64,
    /// The entry that says so, until the leader has it.
    loss: Option<AuditEntry>,
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

    /// Keeps a call, in memory at once. False if it is only counted.
    fn push(&self, call: AuditEntry) -> bool {
        let kept = self.kept().keep(call);
        if kept {
            self.number.send_modify(|number| *number += 1);
        }
        kept
    }

    /// Keeps a call, on the disk once that is open.
    async fn add(&self, call: AuditEntry) {
        if self.push(call) {
            self.store().await;
        }
    }

    /// Makes entries of the refusals that were counted, each minute and when the run ends.
    pub(super) async fn count(&self, ctx: &Context) {
        ctx.until_cancelled(self.count_on()).await;
        if timeout(PATIENCE, self.end_window(Kinds::closed)).await.is_err() {
            warn!("the disk did not take the number of refused calls in time");
        }
    }

    async fn count_on(&self) -> Infallible {
        loop {
            sleep(Kinds::WINDOW).await;
            self.end_window(Kinds::ended).await;
        }
    }

    async fn end_window(&self, counted: Counted) {
        let counted = self.kept().end_window(counted);
        if counted {
            self.number.send_modify(|number| *number += 1);
            self.store().await;
        }
    }

    /// The entries to report next, at most so many: the oldest calls that were done or cut off, or
    /// without one the oldest refusals, and the number of those that are lost.
    #[must_use]
    pub fn oldest(&self, count: usize) -> Vec<AuditEntry> {
        let kept = self.kept();
        let done = kept.calls.iter().filter(|call| !is_refusal(call));
        let done: Vec<_> = done.take(count).cloned().collect();
        match done.is_empty() {
            true => kept.all().take(count).cloned().collect(),
            false => done,
        }
    }

    /// Drops calls that the leader has, or refuses for good.
    pub async fn drop_all(&self, gone: &[AuditEntry]) {
        {
            let mut kept = self.kept();
            kept.calls.retain(|call| !gone.contains(call));
            if kept.loss.as_ref().is_some_and(|loss| gone.contains(loss)) {
                kept.loss = None;
            }
        }
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
            (self.file.clone(), CallJournal { calls: kept.all().cloned().collect() })
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
    /// All entries, that of the lost ones last.
    fn all(&self) -> impl Iterator<Item = &AuditEntry> {
        self.calls.iter().chain(&self.loss)
    }

    /// Keeps a call; false if it is only counted.
    fn keep(&mut self, call: AuditEntry) -> bool {
        let first = match is_refusal(&call) {
            true => self.refusals.seen(call),
            false => Some(call),
        };
        let kept = first.is_some();
        self.calls.extend(first);
        self.bound();
        kept
    }

    /// Makes entries of the refusals that were counted; false without one.
    fn end_window(&mut self, counted: Counted) -> bool {
        let counted = counted(&mut self.refusals);
        let any = !counted.is_empty();
        self.calls.extend(counted);
        self.bound();
        any
    }

    /// Loses entries until the others, and the one that says so, are few enough.
    fn bound(&mut self) {
        while self.all().count() > KEPT_MAX {
            let Some(first) = first_to_go(&self.calls) else { return };
            let call = self.calls.remove(first);
            let (by, repeats) = (&call.who, call.repeats);
            warn!(
                target: LINES,
                by,
                call = call.call,
                repeats,
                "a call is not in the audit log: too many wait"
            );
            // Without a number it is one call.
            self.lost = self.lost.saturating_add(repeats.max(1));
            self.loss = Some(loss(call, self.lost));
        }
    }
}

/// The entry that goes first: refusals before calls that were done or cut off, and of both the
/// oldest of the caller, call and code with the most entries.
fn first_to_go(calls: &[AuditEntry]) -> Option<usize> {
    fn kind(call: &AuditEntry) -> (&str, &str, i32) {
        (&call.who, &call.call, call.code)
    }
    let mut counts = BTreeMap::<_, usize>::new();
    for call in calls {
        *counts.entry(kind(call)).or_default() += 1;
    }
    let order = |call: &AuditEntry| (is_refusal(call), counts.get(&kind(call)).copied());
    // Of equal ones the last is the largest.
    let largest = calls.iter().enumerate().rev().max_by_key(|&(_, call)| order(call));
    largest.map(|(index, _)| index)
}

/// Whether the call changed nothing. One that was cut off may have been done, and the number of
/// lost ones is worth as much.
fn is_refusal(call: &AuditEntry) -> bool {
    !matches!(Code::from_i32(call.code), Code::Ok | Code::Cancelled | Code::DataLoss)
}

/// The entry that says how many calls have none, after one of them.
fn loss(last: AuditEntry, lost: u64) -> AuditEntry {
    AuditEntry {
        time_unix_ms: last.time_unix_ms,
        who: "other callers".to_owned(),
        call: last.call,
        // A leader writes only one of several entries that differ in their reason alone.
        what: format!("{lost} calls"),
        code: Code::DataLoss.into(),
        reason: "so many calls, of this name and others, have no entry since the node started: \
                 too many waited for a leader"
            .to_owned(),
        ..AuditEntry::default()
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
        let call = UnderWay::new(entry, |entry| {
            self.push(entry);
        });
        let response = handler.call(request).await?;
        let mut entry = call.end();
        let status = Status::from_header_map(response.headers());
        if let Some(status) = status.filter(|status| status.code() != Code::Ok) {
            (entry.code, entry.reason) = (status.code().into(), reason(&status));
        }
        let call = entry.call.clone();
        if timeout(PATIENCE, self.add(entry)).await.is_err() {
            let by = &caller.peer;
            warn!(
                target: LINES,
                %by,
                call,
                "the disk did not take a call for the audit log in time"
            );
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
        drop(UnderWay::new(call(2), |call| {
            calls.push(call);
        }));
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
        // The last of them has the number of those that are lost: 2 to 144.
        assert_eq!((kept.len(), &kept[0]), (KEPT_MAX, &call(400 - 255)));
        assert_eq!(kept[KEPT_MAX - 1], loss(call(144), 143));
        file.write(&[0xff; 9]).unwrap();
        let damaged = Calls::new(file);
        damaged.open().await;
        assert_eq!(damaged.oldest(9), []);
    }

    /// Calls of a node whose disk is locked.
    fn in_memory() -> Calls {
        Calls::new(Root::at("/nonexistent".as_ref()).data.node.calls)
    }

    fn refused(who: &str, number: i64) -> AuditEntry {
        let code = Code::InvalidArgument.into();
        let (who, name) = (who.to_owned(), "Drain".to_owned());
        AuditEntry { time_unix_ms: number, who, call: name, code, ..Default::default() }
    }

    #[tokio::test]
    async fn a_flood_of_refusals_keeps_no_call_that_was_done_out_of_the_audit_log() {
        let calls = in_memory();
        for number in 0..1000 {
            calls.add(refused("operator otto", number)).await;
        }
        calls.add(call(1)).await;
        let first = refused("operator otto", 0);
        assert_eq!(calls.kept().calls, [first.clone(), call(1)]);
        assert_eq!(calls.oldest(9), [call(1)], "it is reported first");
        calls.end_window(Kinds::ended).await;
        let others = AuditEntry { repeats: 999, ..first.clone() };
        assert_eq!(calls.kept().calls, [first, call(1), others]);
        // Four entries a minute.
        for number in 0..200 {
            for who in ["operator otto", "operator olga"] {
                calls.add(refused(who, number)).await;
                calls.add(refused(who, number)).await;
            }
            calls.end_window(Kinds::ended).await;
        }
        assert_eq!(calls.oldest(9), [call(1)]);
        calls.drop_all(&[call(1)]).await;
        let mut waiting = calls.oldest(KEPT_MAX);
        assert_eq!(waiting.len(), KEPT_MAX - 1);
        let loss = waiting.pop().unwrap();
        let told: u64 = waiting.iter().map(|call| call.repeats.max(1)).sum();
        assert_eq!((loss.what, loss.code), (format!("{} calls", 1800 - told), 15));
        // The leader has all of them, the number of lost ones too.
        calls.drop_all(&calls.oldest(KEPT_MAX)).await;
        assert_eq!(calls.oldest(9), []);
    }

    #[tokio::test]
    async fn a_flood_of_calls_that_were_done_or_cut_off_drives_out_no_other_call() {
        for code in [Code::Ok, Code::Cancelled] {
            let calls = in_memory();
            let flood =
                |number| AuditEntry { code: code.into(), ..refused("operator otto", number) };
            calls.add(call(1)).await;
            for number in 0..400 {
                calls.add(flood(number)).await;
            }
            let kept = calls.kept().calls.clone();
            assert_eq!((kept.len(), &kept[0]), (KEPT_MAX - 1, &call(1)), "{code:?}");
            assert_eq!(kept.last(), Some(&flood(399)));
            let loss = calls.kept().loss.clone().unwrap();
            assert_eq!(loss.what, "146 calls");
        }
    }

    #[tokio::test]
    async fn a_call_that_was_cut_off_may_have_been_done_and_has_an_entry_of_its_own() {
        let calls = in_memory();
        let cut = |what: &str| AuditEntry {
            call: "AnnounceFirmwareUpdate".to_owned(),
            what: what.to_owned(),
            code: Code::Cancelled.into(),
            ..refused("operator otto", 1)
        };
        // An announcement, and its end.
        let both = [cut(""), cut("cancel")];
        for call in &both {
            calls.add(call.clone()).await;
        }
        assert_eq!(calls.kept().calls, both);
        // More refusals than the node keeps, of as many callers.
        for minute in 0..10 {
            for who in 0..60 {
                calls.add(refused(&format!("operator {who}"), minute)).await;
            }
            calls.end_window(Kinds::ended).await;
        }
        let kept = calls.kept().calls.clone();
        assert_eq!((kept.len(), &kept[..2]), (KEPT_MAX - 1, &both[..]));
        assert_eq!(calls.oldest(9), both, "they are reported first");
    }

    #[tokio::test(start_paused = true)]
    async fn refusals_that_were_counted_are_reported_within_a_minute_and_at_the_end() {
        let calls = in_memory();
        let (ctx, handles) = Context::for_test();
        let mut run = tokio::task::JoinSet::new();
        let counting = calls.clone();
        run.spawn(async move { counting.count(&ctx).await });
        for number in 0..3 {
            calls.add(refused("operator otto", number)).await;
        }
        let mut follow = calls.follow();
        timeout(Kinds::WINDOW * 2, follow.changed()).await.unwrap().unwrap();
        let first = refused("operator otto", 0);
        assert_eq!(calls.oldest(9), [first.clone(), AuditEntry { repeats: 2, ..first }]);
        for number in 3..5 {
            calls.add(refused("operator otto", number)).await;
        }
        handles.cancel().await;
        run.join_next().await.unwrap().unwrap();
        let first = refused("operator otto", 3);
        assert_eq!(calls.oldest(9)[2..], [first.clone(), AuditEntry { repeats: 1, ..first }]);
    }
}
