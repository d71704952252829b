//! The log tree over gRPC: sends it to clients.
//!
//! Invariants:
//! - A message stays far below what a caller takes, however long the lines are.
//! - A reader that is too slow receives the number of entries it lost, at their place.
//! - A caller who may not read the audit log receives none of its lines ([`Visibility`]).

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use futures::Stream;
use futures::stream;
use polis_proto::v1;
use polis_proto::v1::Permission;
use polis_proto::v1::logs_request::Raw;
use polis_proto::v1::logs_response;
use tonic::Status;

use polis_base::serial::Severity;
use polis_base::sys::clock;
use polis_control::curator::audit;
use polis_runtime::logtree::ring::{self, BootLog};
use polis_runtime::logtree::{Backlog, Body, Entry, Item, Kinds, Query, Reader, Tree};
use polis_wire::rpc::Peer;

/// Entries of one message.
const ENTRIES_MAX: usize = 128;
/// Bytes of one message after which no entry is added; an entry has 16 KiB at most.
const BYTES_MAX: usize = 64 << 10;
/// Bytes of the longest name that a service can have, with room to spare.
const NAME_MAX: usize = 256;

/// The request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Asked {
    pub(super) query: Query,
    pub(super) follow: bool,
    /// 0: this boot; -1: the one before; and so on.
    pub(super) boot: i32,
}

/// The entries that a caller may read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Visibility {
    /// All of them.
    All,
    /// Those that are not of the audit log.
    WithoutAudit,
}

impl Visibility {
    /// That of a caller of `Logs`.
    pub(super) fn of(caller: &Peer) -> Self {
        match caller {
            Peer::User { role, .. } if role.grants(Permission::ReadAudit) => Self::All,
            Peer::None | Peer::Key(_) | Peer::Node(_) | Peer::User { .. } => Self::WithoutAudit,
        }
    }

    fn has(self, entry: &Entry) -> bool {
        match self {
            Self::All => true,
            Self::WithoutAudit => !audit::is_line(entry),
        }
    }
}

/// Reads a request.
///
/// # Errors
///
/// Which field makes no sense.
pub(super) fn asked(request: v1::LogsRequest) -> Result<Asked, Status> {
    let invalid = |text: String| Err(Status::invalid_argument(text));
    let (minimum, raw) = (request.minimum(), request.raw());
    let v1::LogsRequest { name, children, backlog, follow, boot, .. } = request;
    if name.len() > NAME_MAX {
        return invalid(format!("name has {} bytes; allowed are {NAME_MAX}", name.len()));
    }
    if boot > 0 {
        return invalid(format!("boot is {boot}; this one is 0, the one before -1, and so on"));
    }
    if follow && boot != 0 {
        return invalid("an earlier boot has ended and cannot be followed".to_owned());
    }
    let query = Query {
        // Nothing is written under no name: the root of the tree is all of it.
        children: children || name.is_empty(),
        name,
        severity_min: match minimum {
            v1::Severity::Unspecified | v1::Severity::Debug => Severity::Debug,
            v1::Severity::Info => Severity::Info,
            v1::Severity::Warning => Severity::Warning,
            v1::Severity::Error => Severity::Error,
            v1::Severity::Fatal => Severity::Fatal,
        },
        kinds: match raw {
            Raw::Unspecified => Kinds::All,
            Raw::Only => Kinds::Raw,
            Raw::None => Kinds::Levelled,
        },
        backlog: match usize::try_from(backlog) {
            Ok(0) => Backlog::None,
            Ok(count) => Backlog::Last(count),
            Err(_negative) => Backlog::All,
        },
    };
    Ok(Asked { query, follow, boot })
}

/// Entries that are there already, then the end.
pub(super) fn finished(
    entries: Vec<Arc<Entry>>,
    started: SystemTime,
    visibility: Visibility,
) -> impl Stream<Item = Result<v1::LogsResponse, Status>> {
    stream::unfold(entries.into_iter(), move |mut entries| async move {
        let mut message = Message::new(started, visibility);
        while message.has_room() {
            let Some(entry) = entries.next() else { break };
            message.add(&entry);
        }
        (!message.is_empty()).then(|| (Ok(message.response), entries))
    })
}

/// Entries of an earlier boot, then the end.
pub(super) fn past(
    past: BootLog,
    visibility: Visibility,
) -> impl Stream<Item = Result<v1::LogsResponse, Status>> {
    let started = started_at(past.started());
    stream::unfold(Some(past), move |past| async move {
        let mut past = past?;
        let mut message = Message::new(started, visibility);
        while message.has_room() {
            match past.next().await {
                Ok(Some(item)) => message.take(item),
                Ok(None) => return (!message.is_empty()).then(|| (Ok(message.response), None)),
                Err(error) => return Some((Err(unreadable(&error)), None)),
            }
        }
        Some((Ok(message.response), Some(past)))
    })
}

/// When an earlier boot started, by the clock of that time: seconds since 1970, as the disk
/// has them. A moment that no clock has counts as 1970.
fn started_at(seconds: u64) -> SystemTime {
    let started = SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(seconds));
    started.unwrap_or(SystemTime::UNIX_EPOCH)
}

/// The reason why an earlier boot cannot be read.
pub(super) fn unreadable(error: &ring::Error) -> Status {
    let text = error.to_string();
    match error {
        ring::Error::NoSuchBoot { .. } => Status::not_found(text),
        ring::Error::Disk { .. } => Status::data_loss(text),
        ring::Error::Lost => Status::internal(text),
    }
}

/// The past entries, and the new ones, without end.
pub(super) fn following(
    tree: &Tree,
    query: Query,
    visibility: Visibility,
) -> impl Stream<Item = Result<v1::LogsResponse, Status>> + use<> {
    stream::unfold(tree.read(query), move |mut reader: Reader| async move {
        let mut message = Message::new(started(), visibility);
        while message.is_empty() {
            message.take(reader.next().await?);
        }
        while message.has_room() {
            let Some(item) = reader.try_next() else { break };
            message.take(item);
        }
        Some((Ok(message.response), reader))
    })
}

/// When the kernel started, by the wall clock of now.
pub(super) fn started() -> SystemTime {
    clock::now().checked_sub(clock::uptime()).unwrap_or(SystemTime::UNIX_EPOCH)
}

/// A message that grows.
struct Message {
    response: v1::LogsResponse,
    bytes: usize,
    started: SystemTime,
    visibility: Visibility,
}

impl Message {
    fn new(started: SystemTime, visibility: Visibility) -> Self {
        Self { response: v1::LogsResponse::default(), bytes: 0, started, visibility }
    }

    fn has_room(&self) -> bool {
        self.response.entries.len() < ENTRIES_MAX && self.bytes < BYTES_MAX
    }

    fn is_empty(&self) -> bool {
        self.response.entries.is_empty() && self.response.lost == 0
    }

    fn take(&mut self, item: Item) {
        match item {
            Item::Entry(entry) => self.add(&entry),
            Item::Lost(count) => self.response.lost = self.response.lost.saturating_add(count),
        }
    }

    fn add(&mut self, entry: &Entry) {
        if !self.visibility.has(entry) {
            return;
        }
        let entry = convert(entry, self.started);
        self.bytes += prost::Message::encoded_len(&entry);
        self.response.entries.push(entry);
    }
}

fn convert(entry: &Entry, started: SystemTime) -> logs_response::Entry {
    // Saturating: an entry of an earlier boot is as the disk has it.
    let started = started.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let since_1970 = started.saturating_add(entry.at);
    let mut converted = logs_response::Entry {
        name: entry.name.to_string(),
        severity: severity(entry.body.severity()).into(),
        uptime_seconds: entry.at.as_secs_f64(),
        time_unix_nanos: i64::try_from(since_1970.as_nanos()).unwrap_or(i64::MAX),
        ..Default::default()
    };
    match &entry.body {
        Body::Raw(text) => {
            converted.raw = true;
            converted.message.clone_from(text);
        }
        Body::Levelled(levelled) => {
            converted.source.clone_from(&levelled.source);
            converted.message.clone_from(&levelled.message);
            converted.fields = levelled.fields.iter().cloned().collect();
        }
    }
    converted
}

fn severity(severity: Severity) -> v1::Severity {
    match severity {
        Severity::Debug => v1::Severity::Debug,
        Severity::Info => v1::Severity::Info,
        Severity::Warning => v1::Severity::Warning,
        Severity::Error => v1::Severity::Error,
        Severity::Fatal => v1::Severity::Fatal,
    }
}

#[cfg(test)]
mod tests {
    use futures::StreamExt as _;
    use proptest::prelude::*;
    use prost::Message as _;

    use super::*;
    use polis_runtime::logtree::{Levelled, Origin};
    use polis_wire::rpc::Role;

    fn tree() -> Tree {
        let tree = Tree::new(None);
        let levelled = Levelled {
            fields: vec![("k".to_owned(), "v".to_owned())],
            ..Levelled::new(Severity::Warning, "careful")
        };
        tree.append("root.a", Origin::Service, Body::Levelled(levelled));
        tree.append("root.b", Origin::Program, Body::Raw("line".to_owned()));
        tree
    }

    async fn all(tree: &Tree, request: v1::LogsRequest) -> Vec<logs_response::Entry> {
        let asked = asked(request).unwrap();
        let messages = finished(tree.backlog(&asked.query), started(), Visibility::All);
        let messages: Vec<_> = messages.collect().await;
        messages.into_iter().flat_map(|message| message.unwrap().entries).collect()
    }

    #[tokio::test]
    async fn an_entry_is_sent_with_all_its_fields() {
        let request = v1::LogsRequest { backlog: -1, ..Default::default() };
        let entries = all(&tree(), request.clone()).await;
        assert_eq!(entries.len(), 2);
        assert_eq!((entries[0].name.as_str(), entries[0].message.as_str()), ("root.a", "careful"));
        assert_eq!(entries[0].severity(), v1::Severity::Warning);
        assert_eq!(entries[0].fields["k"], "v");
        assert!(entries[1].raw && entries[1].time_unix_nanos > 0);
        let only = v1::LogsRequest { raw: Raw::Only.into(), ..request.clone() };
        assert_eq!(all(&tree(), only).await.len(), 1);
        let named = v1::LogsRequest { name: "root.a".to_owned(), ..request };
        assert_eq!(all(&tree(), named).await.len(), 1);
    }

    #[tokio::test]
    async fn a_follower_sees_the_backlog_and_what_comes() {
        let tree = tree();
        let request = v1::LogsRequest { backlog: 1, follow: true, ..Default::default() };
        let mut stream = Box::pin(following(&tree, asked(request).unwrap().query, Visibility::All));
        let first = stream.next().await.unwrap().unwrap();
        assert_eq!(first.entries[0].message, "line");
        tree.append("root.c", Origin::Service, Body::Raw("new".to_owned()));
        let next = stream.next().await.unwrap().unwrap();
        assert_eq!(next.entries[0].message, "new");
    }

    #[tokio::test]
    async fn the_lines_of_the_audit_log_go_to_callers_who_may_read_that() {
        let tree = tree();
        let line = |source: &str, message: &str| {
            let levelled = Levelled::new(Severity::Info, message);
            let levelled = Levelled { source: source.to_owned(), ..levelled };
            tree.append("root.curator", Origin::Service, Body::Levelled(levelled));
        };
        line(audit::LINES, "audit: DeleteNode");
        line("polis_control::curator", "it leads");
        let user = |role| Peer::User { name: "ann".to_owned(), role };
        let node = Peer::Node(polis_wire::identity::NodeId::from_public_key(&[7; 32]));
        for (caller, expected) in [
            (user(Role::Owner), Visibility::All),
            (user(Role::Operator), Visibility::All),
            (user(Role::Viewer), Visibility::WithoutAudit),
            (node, Visibility::WithoutAudit),
        ] {
            let visibility = Visibility::of(&caller);
            assert_eq!(visibility, expected, "{caller}");
            let rest = ["careful", "line", "it leads"];
            let all = ["careful", "line", "audit: DeleteNode", "it leads"];
            let shown = if visibility == Visibility::All { &all[..] } else { &rest[..] };
            let entries = tree.backlog(&Query::all());
            let read: Vec<_> = finished(entries, started(), visibility).collect().await;
            let read = read.into_iter().flat_map(|message| message.unwrap().entries);
            assert_eq!(read.map(|entry| entry.message).collect::<Vec<_>>(), shown, "{caller}");
        }
        // A follower receives no message for a line that is not for it.
        let query = Query { backlog: Backlog::None, ..Query::all() };
        let mut stream = Box::pin(following(&tree, query, Visibility::WithoutAudit));
        line(audit::LINES, "audit: NameNode");
        line("polis_control::curator", "it led");
        let next = stream.next().await.unwrap().unwrap();
        let next: Vec<_> = next.entries.iter().map(|entry| &*entry.message).collect();
        assert_eq!(next, ["it led"]);
    }

    #[tokio::test]
    async fn long_lines_make_many_messages_and_none_is_long() {
        let tree = Tree::new(None);
        for _ in 0..100 {
            tree.append("root", Origin::Service, Body::Raw("x".repeat(8000)));
        }
        let asked = asked(v1::LogsRequest { backlog: -1, ..Default::default() }).unwrap();
        let messages = finished(tree.backlog(&asked.query), started(), Visibility::All);
        let messages: Vec<_> = messages.collect().await;
        assert!(messages.len() > 5);
        let lengths = messages.iter().map(|message| message.as_ref().unwrap().encoded_len());
        assert!(lengths.max().unwrap() < BYTES_MAX + (32 << 10));
    }

    #[tokio::test]
    async fn a_slow_reader_receives_the_number_of_lost_entries() {
        let tree = Tree::new(None);
        let request = v1::LogsRequest { follow: true, ..Default::default() };
        let mut stream = Box::pin(following(&tree, asked(request).unwrap().query, Visibility::All));
        for _ in 0..2000 {
            tree.append("root", Origin::Service, Body::Raw("x".to_owned()));
        }
        let mut seen = 0;
        while seen < 2000 {
            let message = stream.next().await.unwrap().unwrap();
            seen += message.entries.len() + usize::try_from(message.lost).unwrap();
        }
        assert_eq!(seen, 2000);
        assert!(tree.lost() > 0);
    }

    #[test]
    fn what_makes_no_sense_is_refused_and_named() {
        let refused = |request| asked(request).unwrap_err().message().to_owned();
        let future = refused(v1::LogsRequest { boot: 1, ..Default::default() });
        assert!(future.starts_with("boot is 1;"), "{future}");
        let long = refused(v1::LogsRequest { name: "x".repeat(300), ..Default::default() });
        assert!(long.starts_with("name has 300 bytes"), "{long}");
        let past = v1::LogsRequest { boot: -1, follow: true, ..Default::default() };
        assert!(refused(past).contains("cannot be followed"));
    }

    proptest! {
        #[test]
        fn any_request_is_answered_or_refused(
            name in ".{0,300}", children: bool, minimum: i32, raw: i32, backlog: i64, follow: bool,
            boot: i32,
        ) {
            let request =
                v1::LogsRequest { name, children, minimum, raw, backlog, follow, boot };
            if let Ok(asked) = asked(request) {
                prop_assert!(asked.boot == 0 || !asked.follow);
                let _found = tree().backlog(&asked.query);
            }
        }
    }
}

#[cfg(test)]
#[path = "logs_fuzz_tests.rs"]
mod fuzz_tests;
