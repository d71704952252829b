//! The announcement of a new member: detects that its etcd waits for one that does not come.
//!
//! etcd serves its clients once the entry of the log that has its name has passed by. A new
//! member of a cluster with a past receives the state of the cluster instead of the log. Where
//! the state contains that entry already, the entry does not pass by: etcd waits for seven
//! seconds and announces itself again. An etcd that is started again, with the state on its
//! disk, announces itself at once.
//!
//! ```text
//! started --it logs: the state is applied--+--> it serves
//!                                          +--> it does not serve for a while: lost
//! ```
//!
//! Invariants:
//! - Only a member beside two others or more is started again: it may vote by then, and two others
//!   decide without it. Where one of them is down, decisions wait until it is back, as after any
//!   start.
//!
//! What this module does not do: end etcd (`serve`), or start it again (`service`).

use std::time::Duration;

use tokio::time::{Instant, sleep_until};

use super::Member;
use polis_runtime::logtree::{Backlog, Body, Item, Query, Reader, Tree};

/// The message of an etcd that has applied the state. It has flushed the state before.
const APPLIED: &str = "applied snapshot";

/// The largest cluster in which the others need the new member for a majority.
const NEEDED: usize = 2;

/// An entry that is not in the state passes by within this part of the time that etcd took until
/// it had applied the state. With etcd 3.5.16 it took 38 ms at most after 80 ms, and 260 ms after
/// two seconds.
const LATE: u32 = 4;

/// The shortest wait: two members flush the entry to their disks first.
const WAIT_MIN: Duration = Duration::from_millis(250);

/// The longest wait: a start on a slow machine takes about as long.
const WAIT_MAX: Duration = Duration::from_secs(1);

/// The announcement of an etcd that enters a cluster.
#[derive(Debug)]
pub(super) struct Announcement {
    lines: Reader,
    begun: Instant,
    /// The time from which on it counts as lost.
    due: Option<Instant>,
}

impl Announcement {
    /// That of an etcd which is about to be started as one of `members` and logs under this
    /// name; `None` if the others need it for a majority.
    pub(super) fn expected(logs: &Tree, name: String, members: &[Member]) -> Option<Self> {
        if members.len() <= NEEDED {
            return None;
        }
        let query = Query { name, children: false, backlog: Backlog::None, ..Query::all() };
        Some(Self { lines: logs.read(query), begun: Instant::now(), due: None })
    }

    /// Completes once it counts as lost. Cancel-safe.
    pub(super) async fn lost(&mut self) {
        let due = loop {
            if let Some(due) = self.due {
                break due;
            }
            match self.lines.next().await {
                Some(Item::Entry(entry)) if is_applied(&entry.body) => {
                    self.due = Some(Instant::now() + patience(self.begun.elapsed()));
                }
                Some(Item::Entry(_) | Item::Lost(_)) => {}
                // The log ends with the node.
                None => std::future::pending().await,
            }
        };
        sleep_until(due).await;
    }
}

fn is_applied(body: &Body) -> bool {
    match body {
        Body::Levelled(it) => it.message == APPLIED,
        Body::Raw(_) => false,
    }
}

/// How long the announcement is awaited, once etcd has applied the state after this time.
fn patience(took: Duration) -> Duration {
    (took / LATE).clamp(WAIT_MIN, WAIT_MAX)
}

#[cfg(test)]
mod tests {
    use polis_runtime::logtree::Parser;
    use tokio::time::timeout;

    use super::super::MemberId;
    use super::*;

    const NAME: &str = "root.consensus.etcd";

    /// As etcd writes it.
    const LINE: &[u8] = br#"{"level":"info","msg":"applied snapshot"}"#;

    /// Longer than any wait in here.
    const LONG: Duration = Duration::from_secs(60);

    fn members(count: u64) -> Vec<Member> {
        let member = |id| Member {
            id: MemberId(id),
            name: format!("n{id}"),
            peer_url: format!("https://n{id}:7834"),
            learner: false,
        };
        (1..=count).map(member).collect()
    }

    #[test]
    fn the_second_member_of_a_cluster_is_not_started_again() {
        let logs = Tree::new(None);
        let is_expected =
            |count| Announcement::expected(&logs, NAME.to_owned(), &members(count)).is_some();
        assert!(!is_expected(1) && !is_expected(2), "the first one needs its vote");
        assert!(is_expected(3) && is_expected(4));
    }

    #[tokio::test(start_paused = true)]
    async fn an_etcd_that_receives_the_history_is_not_started_again() {
        let logs = Tree::new(None);
        let etcd = logs.sink(NAME, Parser::Json);
        // Of an earlier run.
        etcd.line(LINE);
        let expected = Announcement::expected(&logs, NAME.to_owned(), &members(3));
        let mut announcement = expected.unwrap();
        etcd.line(br#"{"level":"info","msg":"applying snapshot"}"#);
        etcd.line(APPLIED.as_bytes());
        logs.sink("root.other", Parser::Json).line(LINE);
        assert!(timeout(LONG, announcement.lost()).await.is_err());
    }

    #[tokio::test(start_paused = true)]
    async fn an_announcement_counts_as_lost_a_while_after_the_state_is_applied() {
        let logs = Tree::new(None);
        let expected = Announcement::expected(&logs, NAME.to_owned(), &members(3));
        let mut announcement = expected.unwrap();
        tokio::time::sleep(Duration::from_secs(2)).await;
        let applied = Instant::now();
        logs.sink(NAME, Parser::Json).line(LINE);
        // An interruption does not prolong the wait.
        while timeout(Duration::from_millis(100), announcement.lost()).await.is_err() {}
        let waited = applied.elapsed().as_millis();
        assert!((500..600).contains(&waited), "{waited}");
    }

    #[test]
    fn the_wait_follows_the_speed_of_the_machine_within_limits() {
        assert_eq!(patience(Duration::from_millis(80)), WAIT_MIN);
        assert_eq!(patience(Duration::from_secs(2)), Duration::from_millis(500));
        assert_eq!(patience(Duration::from_secs(30)), WAIT_MAX);
    }
}
