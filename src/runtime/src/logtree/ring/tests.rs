//! The ring as a whole: every written entry can be read again, despite restarts and damage.

use std::fs;
use std::path::Path;
use std::time::Duration;

use tokio::sync::watch;

use super::*;
use crate::event::until;
use crate::logtree::{Backlog, Body, Entry, Item, Kinds, Levelled, Origin, Query};
use crate::supervisor::{Context, Handles};
use polis_base::serial::Severity;

/// A boot of a node that keeps its logs in `dir`.
struct Running {
    ctx: Context,
    handles: Handles,
    status: watch::Receiver<Status>,
    run: tokio::task::JoinHandle<Result<(), RunError>>,
}

fn config(dir: &Path, boot: &str) -> Config {
    Config {
        dir: dir.to_owned(),
        bytes_max: 8 * SEGMENT_MAX,
        boot_id: boot.to_owned(),
        started: 1_700_000_000,
        image: "image".to_owned(),
    }
}

#[expect(clippy::disallowed_methods, reason = "a test stands in for the supervisor")]
fn boot_in(ctx: Context, handles: Handles, config: Config) -> Running {
    let (sender, status) = watch::channel(Status::default());
    let run = tokio::spawn(Service { status: sender }.run(config, ctx.clone()));
    Running { ctx, handles, status, run }
}

fn boot(dir: &Path, name: &str) -> Running {
    let (ctx, handles) = Context::for_test();
    boot_in(ctx, handles, config(dir, name))
}

impl Running {
    fn log(&self, name: &str, severity: Severity, message: &str) {
        let body = Body::Levelled(Levelled::new(severity, message));
        self.ctx.logs().append(name, Origin::Service, body);
    }

    async fn ring(&mut self) -> Ring {
        until(&mut self.status, "ring", |status| status.ring.clone()).await.unwrap()
    }

    /// Stops it as the supervisor would; its tree stays alive.
    async fn stop(self) -> (Context, Handles) {
        self.handles.cancel().await;
        self.run.await.unwrap().unwrap();
        (self.ctx, self.handles)
    }
}

async fn all(ring: &Ring, boot: i32, query: Query) -> Vec<Item> {
    let mut past = ring.read(boot, query).await.unwrap();
    let mut items = Vec::new();
    while let Some(item) = past.next().await.unwrap() {
        items.push(item);
    }
    items
}

fn text(item: &Item) -> String {
    match item {
        Item::Entry(entry) => entry.body.to_string(),
        Item::Lost(count) => format!("lost {count}"),
    }
}

/// The messages of the test's services, in order.
async fn lines_of(ring: &Ring, boot: i32, backlog: Backlog) -> Vec<String> {
    let query = Query { name: "root".to_owned(), backlog, ..Query::all() };
    all(ring, boot, query).await.iter().map(text).collect()
}

#[tokio::test]
async fn the_lines_from_before_the_disk_are_in_the_ring_and_each_boot_has_its_own() {
    let dir = tempfile::tempdir().unwrap();
    let (ctx, handles) = Context::for_test();
    let early = Body::Raw("before there was a disk".to_owned());
    ctx.logs().append("root.early", Origin::Program, early);
    let mut first = boot_in(ctx, handles, config(dir.path(), "one"));
    first.ring().await;
    first.log("root.late", Severity::Info, "with a disk");
    first.stop().await;

    let mut second = boot(dir.path(), "two");
    let ring = second.ring().await;
    second.log("root", Severity::Info, "the second boot");
    second.stop().await;
    assert_eq!(lines_of(&ring, 0, Backlog::All).await, ["the second boot"]);
    assert_eq!(lines_of(&ring, -1, Backlog::All).await, ["before there was a disk", "with a disk"]);
    assert_eq!(lines_of(&ring, -1, Backlog::Last(1)).await, ["with a disk"]);
    assert!(lines_of(&ring, -1, Backlog::None).await.is_empty());
    let boots = ring.boots().await.unwrap();
    let ids: Vec<_> = boots.iter().map(|boot| (boot.ago, boot.id.as_str())).collect();
    assert_eq!(ids, [(0, "two"), (1, "one")]);
    assert!(boots.iter().all(|boot| boot.started == 1_700_000_000 && boot.bytes > 0));
    for asked in [-2, 1, i32::MIN, i32::MAX] {
        let refused = ring.read(asked, Query::all()).await.unwrap_err();
        assert!(matches!(refused, Error::NoSuchBoot { kept: 2, .. }), "{refused}");
    }
}

#[tokio::test]
async fn the_filters_of_the_live_tree_hold_for_the_past() {
    let dir = tempfile::tempdir().unwrap();
    let mut node = boot(dir.path(), "one");
    let ring = node.ring().await;
    node.log("root.a", Severity::Debug, "debug of a");
    node.log("root.a.b", Severity::Warning, "warning of b");
    node.log("root.c", Severity::Warning, "warning of c");
    node.ctx.logs().append("root.a.b", Origin::Program, Body::Raw("raw of b".to_owned()));
    let (ctx, _handles) = node.stop().await;
    let a = Query { name: "root.a".to_owned(), ..Query::all() };
    for query in [
        a.clone(),
        Query { children: false, ..a.clone() },
        Query { severity_min: Severity::Warning, ..a.clone() },
        Query { kinds: Kinds::Raw, ..a.clone() },
        Query { kinds: Kinds::Levelled, backlog: Backlog::Last(1), ..a },
        Query { name: String::new(), ..Query::all() },
    ] {
        let live = ctx.logs().backlog(&query);
        let past = all(&ring, 0, query.clone()).await;
        let past: Vec<_> = past
            .iter()
            .filter_map(|item| match item {
                Item::Entry(entry) => Some(Entry::clone(entry)),
                Item::Lost(_) => None,
            })
            .collect();
        // The disk stores microseconds.
        let live = live.iter().map(|entry| Entry { at: micros(entry.at), ..Entry::clone(entry) });
        assert_eq!(past, live.collect::<Vec<_>>(), "{query:?}");
    }
}

fn micros(at: Duration) -> Duration {
    Duration::from_micros(u64::try_from(at.as_micros()).unwrap())
}

#[tokio::test]
async fn a_service_that_is_started_again_repeats_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let mut node = boot(dir.path(), "one");
    let ring = node.ring().await;
    node.log("root", Severity::Info, "first");
    let (ctx, _ended) = node.stop().await;
    // The same process, and so the same tree.
    let (again, handles) = Context::for_test_with(ctx.logs().clone());
    let mut node = boot_in(again, handles, config(dir.path(), "one"));
    assert_eq!(node.ring().await, ring, "the same boot goes on");
    node.log("root", Severity::Info, "second");
    node.stop().await;
    assert_eq!(lines_of(&ring, 0, Backlog::All).await, ["first", "second"]);
}

#[tokio::test]
async fn a_torn_tail_and_random_bytes_cost_no_other_line() {
    let dir = tempfile::tempdir().unwrap();
    let mut node = boot(dir.path(), "one");
    let ring = node.ring().await;
    for number in 0..50 {
        node.log("root", Severity::Info, &format!("line {number}"));
    }
    node.stop().await;
    let segment = segment::list(dir.path()).unwrap().pop().unwrap();
    let whole = fs::read(&segment.path).unwrap();
    let start = whole.iter().position(|byte| *byte == b'\n').unwrap() + 1;
    for cut in [start, start + 1, whole.len() / 2, whole.len() - 1] {
        let mut torn = whole[..cut].to_vec();
        // Bytes that FAT, XFS or a disk may leave behind the last whole sector.
        torn.extend([0; 100]);
        fs::write(&segment.path, &torn).unwrap();
        let left = lines_of(&ring, 0, Backlog::All).await;
        let complete = whole[..cut].iter().filter(|byte| **byte == b'\n').count();
        assert!(left.len() + 2 >= complete, "{} of {complete} lines at {cut}", left.len());
        assert!(left.iter().zip(0..).all(|(line, number)| *line == format!("line {number}")));
    }
    let mut noisy = whole.clone();
    noisy[whole.len() / 2] ^= 0x20;
    fs::write(&segment.path, &noisy).unwrap();
    assert_eq!(lines_of(&ring, 0, Backlog::All).await.len(), 49, "one line is damaged");

    // The next boot neither fails on it nor repairs it.
    fs::write(&segment.path, &whole[..whole.len() - 5]).unwrap();
    let mut next = boot(dir.path(), "two");
    let ring = next.ring().await;
    next.stop().await;
    assert_eq!(lines_of(&ring, -1, Backlog::All).await.len(), 49);
}

/// Waits until the line that begins with this number is in the ring.
async fn written(node: &mut Running, ring: &Ring, number: u32) {
    loop {
        node.status.borrow_and_update();
        let last = lines_of(ring, 0, Backlog::Last(1)).await;
        let last = last.first().and_then(|line| line.split(' ').next()?.parse::<u32>().ok());
        if last.is_some_and(|last| last >= number) {
            return;
        }
        node.status.changed().await.unwrap();
    }
}

#[tokio::test]
async fn the_ring_stays_within_its_bound_at_any_rate() {
    let dir = tempfile::tempdir().unwrap();
    let mut old = boot(dir.path(), "old");
    old.ring().await;
    old.log("root", Severity::Info, "an old line");
    old.stop().await;
    let mut node = boot(dir.path(), "new");
    let ring = node.ring().await;
    node.log("root", Severity::Info, "the first line");
    let long = "x".repeat(7000);
    for number in 0..2000 {
        node.log("root", Severity::Info, &format!("{number} {long}"));
        // A longer backlog would exceed the queue, and be counted as lost.
        if number % 50 == 49 {
            written(&mut node, &ring, number - 20).await;
        }
    }
    node.log("root", Severity::Info, "the last line");
    node.stop().await;
    let segments = segment::list(dir.path()).unwrap();
    let bytes: u64 = segments.iter().map(|segment| segment.bytes).sum();
    assert!(bytes <= 8 * SEGMENT_MAX, "{bytes}");
    assert!(segments.iter().all(|segment| segment.bytes <= SEGMENT_MAX + (1 << 20)));
    assert_eq!(lines_of(&ring, -1, Backlog::All).await, ["an old line"]);
    let now = lines_of(&ring, 0, Backlog::All).await;
    assert_eq!(now.first().unwrap(), "the first line");
    assert_eq!(lines_of(&ring, 0, Backlog::Last(1)).await, ["the last line"]);
}

#[tokio::test]
async fn a_failing_disk_is_reported_and_retried() {
    let dir = tempfile::tempdir().unwrap();
    let logs = dir.path().join("logs");
    fs::create_dir(&logs).unwrap();
    let mut node = boot(&logs, "one");
    let ring = node.ring().await;
    fs::rename(&logs, dir.path().join("away")).unwrap();
    node.log("root", Severity::Error, "nowhere to go");
    until(&mut node.status, "failure", |status| status.error.clone()).await.unwrap();
    fs::create_dir(&logs).unwrap();
    node.log("root", Severity::Error, "back again");
    let mut status = node.status.clone();
    until(&mut status, "recovery", |status| status.error.is_none().then_some(())).await.unwrap();
    assert!(status.borrow().lost >= 1);
    node.stop().await;
    let left = lines_of(&ring, 0, Backlog::All).await;
    assert!(left.iter().any(|line| line.starts_with("lost ")), "{left:?}");
    assert!(left.contains(&"back again".to_owned()), "{left:?}");
}

#[test]
fn a_small_partition_has_a_small_ring() {
    assert_eq!(bytes_max(512 << 20), 16 << 20);
    assert_eq!(bytes_max(0), 8 << 20);
    assert_eq!(bytes_max(1 << 40), 64 << 20);
}
