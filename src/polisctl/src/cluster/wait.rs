//! `polisctl cluster wait`: asks again until the cluster is healthy.

use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::status::Status;
use crate::error::{Error, Exit, Explain as _};
use crate::session::Session;
use crate::{Global, units};

/// How long `wait` waits without `--timeout`.
const WAIT: Duration = Duration::from_secs(10 * 60);
/// Between two queries.
const PACE: Duration = Duration::from_secs(1);
/// Longest that one query searches for a leader: long enough for silent curators to time
/// out, so that the result of each is known.
const QUERY_MAX: Duration = Duration::from_secs(10);
/// Grace for the last query after the deadline, so that its result can be reported.
const GRACE: Duration = Duration::from_millis(500);

/// Waits until the cluster is healthy, with `wanted` nodes in state up.
pub(super) async fn run(global: &Global, wanted: usize) -> Result<(), Error> {
    let total = global.timeout.unwrap_or(WAIT);
    let end = Instant::now() + total;
    let mut session = Session::prepare(global, QUERY_MAX)?;
    let progress = global.out.progress();
    let mut missing = "looking for the leader of the cluster".to_owned();
    loop {
        progress.says(&missing);
        let left = end.saturating_duration_since(Instant::now());
        // One query must not use up the whole timeout: there would be nothing to report.
        session.limit_calls(QUERY_MAX.min(left));
        missing = match tokio::time::timeout(left + GRACE, look(&session, wanted)).await {
            Ok(Ok(Look::Whole(status))) => {
                drop(progress);
                return global.out.print(&status.document()?);
            }
            Ok(Ok(Look::Missing(missing))) => missing,
            // An outage may end while `wait` waits; a refusal does not.
            Ok(Err(error)) if error.exit() == Exit::TimedOut => error.summary(),
            Ok(Err(error)) => return Err(error),
            Err(_elapsed) => missing,
        };
        if Instant::now() + PACE >= end {
            drop(progress);
            return Err(Error::timed_out(missing)
                .context(format!("the cluster is not healthy after {}", units::span(total)))
                .or_help("see `polisctl cluster status`"));
        }
        sleep(PACE).await;
    }
}

/// The result of one query.
enum Look {
    Whole(Box<Status>),
    Missing(String),
}

async fn look(session: &Session, wanted: usize) -> Result<Look, Error> {
    let status =
        Status::read(session).await.doing(|| "cannot read the state of the cluster".to_owned())?;
    let up = status.nodes.iter().filter(|node| node.is_up()).count();
    if up < wanted {
        return Ok(Look::Missing(format!("{up} of {wanted} nodes are up")));
    }
    match status.problems.first() {
        None => Ok(Look::Whole(Box::new(status))),
        Some(problem) => Ok(Look::Missing(problem.clone())),
    }
}
