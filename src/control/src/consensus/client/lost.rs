//! Ends a write that was lost with a leader of etcd.
//!
//! A member passes a write on to the leader. A leader that dies or is cut off takes the writes
//! with it that it has not passed on; the member cannot know that, and answers after seconds.
//!
//! ```text
//! write --no answer for SLOW--> ask for the term, every EVERY
//!                                  the same: the disks are slow, and the write waits
//!                                  another, or one again: --no answer for GRACE--> LeaderChanged
//! ```
//!
//! A member that is slow to answer has no time for questions: it is asked less often, and a
//! write that waits for it gets more time ([`Pace`]).
//!
//! Invariants:
//! - A write that etcd answers within [`SLOW`] costs no other call.
//! - A write is given up only after the member has followed a new leader for [`GRACE`]: a write
//!   that survived is committed together with that leader's first entry, and is answered then.
//!
//! What this module does not do: repeat the write. It may have happened, or may still happen.

use std::future::Future;
use std::pin::pin;
use std::time::Duration;

use tokio::time::{Instant, sleep, timeout};

use super::{Error, call};

/// Longer than a write takes, and about as long as an election.
const SLOW: Duration = Duration::from_secs(1);

/// Between two questions for the term: the member answers from memory.
const EVERY: Duration = Duration::from_millis(200);

/// Longer than the first entry of a leader takes on a disk that is busy.
const GRACE: Duration = Duration::from_millis(400);

/// The most of a member's time that the questions for the term may take: one part in so many.
const SHARE: u32 = 10;

/// How quick the member is, by the slowest of its answers.
#[derive(Clone, Copy, Debug, Default)]
struct Pace(Duration);

impl Pace {
    fn note(&mut self, took: Duration) {
        self.0 = self.0.max(took);
    }

    /// `usual`, or longer for a slow member.
    fn at_least(self, usual: Duration) -> Duration {
        usual.max(self.0.saturating_mul(SHARE))
    }
}

/// The member's knowledge of its leader.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Leader {
    /// It follows one, in this term.
    Term(u64),
    /// It answers that there is no leader.
    Missing,
}

/// Makes a write; ends with [`Error::LeaderChanged`] if it was lost with a leader.
pub(super) async fn write<T>(
    etcd: &etcd_client::Client,
    what: &'static str,
    work: impl Future<Output = Result<T, etcd_client::Error>>,
) -> Result<T, Error> {
    let mut work = pin!(call(what, work));
    let pace = tokio::select! {
        // The answer counts, where both have come.
        biased;
        // Cancel-safe: a call that is dropped is one without an answer.
        answer = &mut work => return answer,
        // Cancel-safe: only asks and waits. Boxed, since every caller's future contains it.
        pace = Box::pin(changed(etcd)) => pace,
    };
    match timeout(pace.at_least(GRACE), work).await {
        Ok(answer) => answer,
        Err(_elapsed) => Err(Error::LeaderChanged { what }),
    }
}

/// Waits until the member follows another leader than at the first question; returns how quick
/// it answers.
async fn changed(etcd: &etcd_client::Client) -> Pace {
    let mut first = None;
    let mut pace = Pace::default();
    let mut pause = SLOW;
    loop {
        sleep(pause).await;
        let asked = Instant::now();
        let answer = ask(etcd).await;
        pace.note(asked.elapsed());
        pause = pace.at_least(EVERY);
        let Some(seen) = answer else { continue };
        if is_another(*first.get_or_insert(seen), seen) {
            return pace;
        }
        if seen == Leader::Missing {
            first = Some(seen);
        }
    }
}

/// Whether a leader was replaced between these two answers.
fn is_another(first: Leader, now: Leader) -> bool {
    match (first, now) {
        (Leader::Term(first), Leader::Term(now)) => first != now,
        (Leader::Missing, Leader::Term(_)) => true,
        (_, Leader::Missing) => false,
    }
}

/// `None` without an answer.
async fn ask(etcd: &etcd_client::Client) -> Option<Leader> {
    match call("ask for the term", etcd.maintenance_client().status()).await {
        Ok(status) if status.leader() == 0 => Some(Leader::Missing),
        Ok(status) => Some(Leader::Term(status.raft_term())),
        Err(error) if error.says("no leader") => Some(Leader::Missing),
        Err(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::Leader::{Missing, Term};
    use super::*;

    #[test]
    fn a_slow_member_is_asked_less_often_and_gets_more_time() {
        let milliseconds = Duration::from_millis;
        let mut pace = Pace::default();
        assert_eq!(pace.at_least(EVERY), EVERY);
        pace.note(milliseconds(300));
        pace.note(milliseconds(2));
        assert_eq!(pace.at_least(EVERY), milliseconds(3000));
        assert_eq!(pace.at_least(GRACE), milliseconds(3000));
    }

    #[test]
    fn a_term_with_a_leader_that_differs_and_nothing_else_is_a_change() {
        assert!(!is_another(Term(3), Term(3)));
        assert!(is_another(Term(3), Term(4)));
        // An election goes on.
        assert!(!is_another(Term(3), Missing));
        assert!(!is_another(Missing, Missing));
        // The same leader again: what it was given before, it may have lost.
        assert!(is_another(Missing, Term(3)));
    }
}
