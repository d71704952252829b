//! The recent past of this node's member of etcd, for its charts: how long a commit takes, how
//! often the leader changed, how large the database is.
//!
//! ```text
//! etcd's metrics, database --PACE--> differences --> History (event value) --> fold
//! ```
//!
//! Invariants:
//! - A sample is of [`PACE`], whatever happened in it; one in which the member did not answer
//!   is zero.
//!
//! What this module does not do: keep more than an hour. The metrics have the history of a
//! node.

use std::convert::Infallible;
use std::time::Duration;

use polis_tui::snapshot::History;
use tokio::sync::watch;
use tokio::time::sleep;

use polis_control::consensus::{Members, Status, Work};
use polis_runtime::supervisor::Context;

/// The meaning of a column of a chart. The metrics of etcd have some hundred kilobytes.
const PACE: Duration = Duration::from_secs(120);
/// Columns that are kept: an hour.
const SAMPLES: usize = 30;

/// Configuration, inputs and outputs. Cloned into every run.
#[derive(Clone, Debug)]
pub(super) struct Service {
    /// This node's member.
    pub(super) consensus: watch::Receiver<Status>,
    /// Its metrics.
    pub(super) members: Members,
    pub(super) past: watch::Sender<History>,
}

impl Service {
    /// Samples until cancelled. The samples of an earlier run stay.
    pub(super) async fn run(self, ctx: Context) -> Result<(), Infallible> {
        ctx.healthy();
        let Some(mut before) = ctx.until_cancelled(self.work()).await else { return Ok(()) };
        while ctx.until_cancelled(sleep(PACE)).await.is_some() {
            let Some(work) = ctx.until_cancelled(self.work()).await else { return Ok(()) };
            let db_size = self.consensus.borrow().db_size;
            // A node without a member has no past of one.
            if work.is_some() || !self.past.borrow().commit.is_empty() {
                self.past.send_modify(|past| add(past, before, work, db_size));
            }
            before = work;
        }
        Ok(())
    }

    /// `None` while the member does not serve.
    async fn work(&self) -> Option<Work> {
        let serves = self.consensus.borrow().clients.is_some();
        // On the heap: the metrics are read in several layers.
        if serves { Box::pin(self.members.work()).await.ok() } else { None }
    }
}

/// Adds the sample between two readings.
fn add(past: &mut History, before: Option<Work>, now: Option<Work>, db_size: u64) {
    // A member that was started again counts from zero.
    let before = before.filter(|before| now.is_some_and(|now| now.commits >= before.commits));
    let (before, now) = (before.unwrap_or_default(), now.unwrap_or_default());
    let commits = now.commits - before.commits;
    let took =
        if commits > 0.0 { (now.commit_seconds - before.commit_seconds) / commits } else { 0.0 };
    let micros = Duration::try_from_secs_f64(took).unwrap_or_default().as_micros();
    let elections = Duration::try_from_secs_f64(now.leader_changes - before.leader_changes);
    past.pace = PACE;
    push(&mut past.commit, u64::try_from(micros).unwrap_or(u64::MAX));
    push(&mut past.elections, elections.unwrap_or_default().as_secs());
    push(&mut past.db_size, db_size);
}

fn push(series: &mut Vec<u64>, value: u64) {
    series.push(value);
    let surplus = series.len().saturating_sub(SAMPLES);
    series.drain(..surplus);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn work(commits: f64, commit_seconds: f64, leader_changes: f64) -> Option<Work> {
        Some(Work { commits, commit_seconds, leader_changes })
    }

    #[test]
    fn a_sample_is_what_happened_since_the_one_before() {
        let mut past = History::default();
        add(&mut past, None, work(100.0, 0.25, 1.0), 7);
        add(&mut past, work(100.0, 0.25, 1.0), work(200.0, 1.25, 3.0), 8);
        // Nothing was written.
        add(&mut past, work(200.0, 1.25, 3.0), work(200.0, 1.25, 3.0), 8);
        // It was started again.
        add(&mut past, work(200.0, 1.25, 3.0), work(10.0, 0.03, 1.0), 9);
        assert_eq!(past.commit, [2_500, 10_000, 0, 3_000]);
        assert_eq!(past.elections, [1, 2, 0, 1]);
        assert_eq!(past.db_size, [7, 8, 8, 9]);
        assert_eq!(past.pace, PACE);
    }

    #[test]
    fn a_member_that_does_not_answer_leaves_a_gap_and_an_hour_is_kept() {
        let mut past = History::default();
        add(&mut past, work(100.0, 0.25, 1.0), None, 7);
        assert_eq!((past.commit[0], past.elections[0]), (0, 0));
        for _sample in 0..40 {
            add(&mut past, None, None, 7);
        }
        assert_eq!(PACE * u32::try_from(past.commit.len()).unwrap(), Duration::from_secs(3600));
    }
}
