//! The remote console: sends the content of the screen to consoles elsewhere.
//!
//! Invariants:
//! - At most ten frames a second, and no frame while nothing changes.
//! - Of the log, a frame holds the entries newer than those of the frame before: the
//!   log is most of a snapshot, and the other end has the rest. All of it goes again
//!   once the entries are dated by another clock.

use std::sync::Arc;
use std::time::Duration;

use futures::Stream;
use futures::stream;
use polis_proto::v1;
use polis_tui::Snapshot;
use polis_tui::snapshot::Logs;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};
use tonic::Status;

/// Between two frames.
const PACE: Duration = Duration::from_millis(100);

/// Where one console is.
struct Watching {
    snapshot: watch::Receiver<Arc<Snapshot>>,
    /// The entries that the reader was sent in the last frame, and the rest of the
    /// earlier ones.
    sent: Arc<Logs>,
    /// When the next frame may be sent.
    next: Instant,
}

/// Frames without end; the first at once.
pub(super) fn frames(
    mut snapshot: watch::Receiver<Arc<Snapshot>>,
) -> impl Stream<Item = Result<v1::ConsoleFrame, Status>> {
    snapshot.mark_changed();
    let watching = Watching { snapshot, sent: Arc::default(), next: Instant::now() };
    stream::unfold(watching, |mut watching| async move {
        watching.snapshot.changed().await.ok()?;
        sleep_until(watching.next).await;
        let newest = watching.snapshot.borrow_and_update().clone();
        let frame = frame(&newest, first_unseen(&watching.sent, &newest.logs));
        watching.sent = Arc::clone(&newest.logs);
        watching.next = Instant::now() + PACE;
        Some((frame, watching))
    })
}

/// The first entry of the `newest` log that the reader lacks, which already has the
/// `sent` entries.
fn first_unseen(sent: &Logs, newest: &Logs) -> u64 {
    match sent.entries.last() {
        Some(last) if !newest.is_dated_unlike(sent) => last.number + 1,
        _ => 0,
    }
}

fn frame(snapshot: &Snapshot, first: u64) -> Result<v1::ConsoleFrame, Status> {
    let json = serde_json::to_vec(&snapshot.with_logs_from(first));
    let snapshot = json.map_err(|error| Status::internal(format!("no JSON: {error}")))?;
    Ok(v1::ConsoleFrame { snapshot })
}

#[cfg(test)]
mod tests {
    use futures::{FutureExt as _, StreamExt as _};
    use polis_tui::snapshot::LogEntry;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_console_sees_the_newest_snapshot_at_most_ten_times_a_second() {
        let (sender, snapshot) = watch::channel(Arc::<Snapshot>::default());
        let mut frames = Box::pin(frames(snapshot));
        let read = |frame: Option<Result<v1::ConsoleFrame, Status>>| -> Snapshot {
            serde_json::from_slice(&frame.unwrap().unwrap().snapshot).unwrap()
        };
        let first = read(frames.next().await);
        assert_eq!(first, Snapshot::default());
        assert!(frames.next().now_or_never().is_none(), "nothing has changed");
        let began = Instant::now();
        for version in ["1", "2", "3"] {
            sender.send_modify(|snapshot| {
                Arc::make_mut(snapshot).header.version = version.to_owned();
            });
        }
        assert_eq!(read(frames.next().await).header.version, "3");
        assert!(began.elapsed() >= PACE);
    }

    #[tokio::test(start_paused = true)]
    async fn a_console_that_is_open_while_the_clock_is_set_shows_what_the_machine_s_own_does() {
        let (sender, snapshot) = watch::channel(Arc::<Snapshot>::default());
        let mut frames = Box::pin(frames(snapshot));
        let mut seen = Logs::default();
        for (clock, lines) in [("", 3), ("", 4), ("12:00", 4), ("12:00", 5), ("11:00", 6)] {
            sender.send_modify(|snapshot| {
                let entry = |number| {
                    let clock = clock.to_owned();
                    Arc::new(LogEntry { number, clock, ..LogEntry::default() })
                };
                let entries = (0..lines).map(entry).collect();
                let logs = Logs { entries, total: lines, ..Logs::default() };
                Arc::make_mut(snapshot).logs = Arc::new(logs);
            });
            let frame = frames.next().await.unwrap().unwrap();
            let mut frame: Snapshot = serde_json::from_slice(&frame.snapshot).unwrap();
            let logs = Arc::make_mut(&mut frame.logs);
            logs.put_before(&seen, usize::MAX);
            seen = logs.clone();
            assert_eq!(seen, *sender.borrow().logs, "{clock}, {lines}");
        }
    }
}
