//! How long a command may take: the wait for a leader, one attempt, all calls together.

use std::future::Future;
use std::time::Duration;

use tokio::time::{Instant, timeout, timeout_at};

use crate::error::Error;
use crate::{Global, units};
use polis_wire::rpc::client::Timeouts;

/// Longest that a command waits for the cluster: an election takes ten seconds.
pub(crate) const PATIENCE: Duration = Duration::from_secs(15);
/// Longest that a command looks for a leader where it has an answer without one.
pub(super) const LEADER: Duration = Duration::from_secs(5);
/// Longest that one attempt at a call may take.
pub(super) const ATTEMPT: Duration = Duration::from_secs(10);

/// The deadline of a command, for all of its calls together.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limit {
    pub(super) total: Duration,
    pub(super) end: Instant,
}

impl Limit {
    /// Starts now.
    pub(crate) fn new(total: Duration) -> Self {
        Self { total, end: Instant::now() + total }
    }

    /// The same time from now on: that which a person took to answer a question does not count.
    pub(crate) fn anew(self) -> Self {
        Self::new(self.total)
    }

    /// How long calls may take from now on: no longer than is left, so that their own end, which
    /// says what was tried, comes first.
    pub(crate) fn timeouts(limit: Option<Self>, default: Duration) -> Timeouts {
        let left = |limit: Self| limit.end.saturating_duration_since(Instant::now());
        let total = limit.map_or(default, left);
        Timeouts { attempt: ATTEMPT.min(total), total }
    }

    pub(super) fn over(self, what: &str) -> Error {
        Error::timed_out(format!("timed out after {}", units::span(self.total)))
            .context(format!("cannot {what}"))
            .or_help("allow more time: --timeout")
    }
}

/// Ends `work` at the deadline, if there is one. Cancel-safe if `work` is.
pub(crate) async fn within<T>(
    limit: Option<Limit>,
    what: &str,
    work: impl Future<Output = Result<T, Error>>,
) -> Result<T, Error> {
    let Some(limit) = limit else { return work.await };
    timeout_at(limit.end, work).await.unwrap_or_else(|_elapsed| Err(limit.over(what)))
}

/// Ends a question to one node after this time.
pub(crate) fn at_most<T>(
    limit: Duration,
    question: impl Future<Output = Result<T, Error>>,
) -> impl Future<Output = Result<T, Error>> {
    // On the heap: several nodes are asked at once.
    let asked = timeout(limit, Box::pin(question));
    async move {
        asked.await.unwrap_or_else(|_elapsed| {
            Err(Error::timed_out(format!("no answer within {}", units::span(limit))))
        })
    }
}

/// How long a command looks for a leader that it does not need.
pub(super) fn leader_time(timeout: Option<Duration>) -> Duration {
    timeout.map_or(LEADER, |total| LEADER.min(total / 2))
}

/// How long the calls of a command may take.
pub(super) fn timeouts(global: &Global, default: Duration) -> Timeouts {
    let total = global.timeout.unwrap_or(default);
    Timeouts { attempt: ATTEMPT.min(total), total }
}
