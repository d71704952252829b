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
//! Invariants:
//! - A write that etcd answers within [`SLOW`] costs no other call.
//! - A write is given up only after the member has followed a new leader for [`GRACE`]: a write
//!   that survived is committed together with that leader's first entry, and is answered then.
//!
//! What this module does not do: repeat the write. It may have happened, or may still happen.

use std::future::Future;
use std::pin::pin;
use std::time::Duration;

use tokio::time::{sleep, timeout};

use super::{Error, call};

/// Longer than a write takes, and shorter than an election.
const SLOW: Duration = Duration::from_millis(400);

/// Between two questions for the term: the member answers from memory.
const EVERY: Duration = Duration::from_millis(100);

/// Longer than the first entry of a leader takes on a disk that is busy.
const GRACE: Duration = Duration::from_millis(400);

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
    tokio::select! {
        // The answer counts, where both have come.
        biased;
        // Cancel-safe: a call that is dropped is one without an answer.
        answer = &mut work => return answer,
        // Cancel-safe: only asks and waits. Boxed, since every caller's future contains it.
        () = Box::pin(changed(etcd)) => {}
    }
    match timeout(GRACE, work).await {
        Ok(answer) => answer,
        Err(_elapsed) => Err(Error::LeaderChanged { what }),
    }
}

/// Waits until the member follows another leader than at the first question.
async fn changed(etcd: &etcd_client::Client) {
    let mut first = None;
    let mut pause = SLOW;
    loop {
        sleep(pause).await;
        pause = EVERY;
        let Some(seen) = ask(etcd).await else { continue };
        if is_another(*first.get_or_insert(seen), seen) {
            return;
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
