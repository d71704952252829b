//! The last known time, on the data partition: the floor of a machine whose clock stood before
//! the date of its image.
//!
//! The content of the file is the seconds since 1970 and a line feed.
//!
//! Invariants:
//! - Only a time that another clock confirmed is kept, and each one replaces the one before: a
//!   wrong clock that was set right leaves nothing.
//! - Only a clock that stood before the date of the image is set to it, and by ten years at
//!   most: it says nothing against a clock that somebody may have set.
//! - The disk gets one write an hour, and one at an orderly end.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tokio::sync::watch;
use tokio::time::{Instant, timeout};
use tracing::{debug, warn};

use super::{Ahead, Source, State, Status};
use crate::storage;
use polis_base::files::File;
use polis_base::sys::clock;
use polis_runtime::save::Save as _;
use polis_runtime::supervisor::blocking;

/// Between two writes: the time that a machine loses at a loss of power, far below what harms
/// certificates.
const EVERY: Duration = Duration::from_secs(60 * 60);
/// How far a clock may be from the one that confirms it, in microseconds.
const NEAR: u64 = 10_000_000;
/// How far a clock is set forward at most: an authority lives no longer.
const FORWARD_MAX: Duration = Duration::from_secs(10 * 365 * 86_400);
/// How long the disk is waited for: a stalled one must not keep chronyd from being asked.
const DISK: Duration = Duration::from_secs(5);

/// Whether another clock confirms this one: it follows a source, or lends its time to others,
/// and a server or voter that answers is near.
pub(super) fn is_confirmed(status: &Status, ahead: &Ahead) -> bool {
    matches!(status.state, State::Cluster | State::Synced)
        && ahead.values().any(|ahead| ahead.unsigned_abs() <= NEAR)
}

/// The time to set a clock to that reads `now`, from the content of the file.
fn later(content: &[u8], now: SystemTime) -> Option<SystemTime> {
    let text = str::from_utf8(content).ok()?.strip_suffix('\n')?;
    let time = UNIX_EPOCH.checked_add(Duration::from_secs(text.parse().ok()?))?;
    let forward = time.duration_since(now).ok()?;
    (!forward.is_zero() && forward <= FORWARD_MAX).then_some(time)
}

/// The file, once the data partition is open.
fn file(storage: &watch::Receiver<storage::Status>) -> Option<File> {
    storage.borrow().ready().map(|ready| ready.root.data.node.clock.clone())
}

/// Sets a clock that stands at the date of the image to the last known time. Returns its status
/// then; `None` where nothing changes.
pub(super) async fn raise(
    file: File,
    set: fn(SystemTime) -> std::io::Result<()>,
) -> Option<Status> {
    let content = timeout(DISK, blocking(move || file.read())).await.ok()?;
    let time = match content {
        Ok(content) => later(&content?, clock::now())?,
        Err(error) => {
            warn!(error = &error as &dyn std::error::Error, "cannot read the last known time");
            return None;
        }
    };
    match set(time) {
        Ok(()) => {
            warn!("the clock stood before the last known time and is set to it");
            Some(Status { state: State::Floor, source: Source::Kept, ..Status::default() })
        }
        Err(error) => {
            warn!("the clock stands before the last known time and cannot be set: {error}");
            None
        }
    }
}

/// Keeps the time.
#[derive(Debug, Default)]
pub(super) struct Keeper {
    confirmed: bool,
    kept: Option<Instant>,
}

impl Keeper {
    /// Takes note of whether the clock is confirmed, and keeps its time where that is due.
    pub(super) async fn note(
        &mut self,
        storage: &watch::Receiver<storage::Status>,
        confirmed: bool,
    ) {
        self.confirmed = confirmed;
        if self.kept.is_none_or(|at| at.elapsed() >= EVERY) {
            self.keep(storage).await;
        }
    }

    /// Keeps the time, if the clock was confirmed when it was looked at last.
    pub(super) async fn keep(&mut self, storage: &watch::Receiver<storage::Status>) {
        let Some(file) = file(storage).filter(|_| self.confirmed) else { return };
        // A disk that fails is asked again an hour later.
        self.kept = Some(Instant::now());
        let seconds = clock::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        match timeout(DISK, file.save(format!("{seconds}\n"))).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => {
                warn!(error = &error as &dyn std::error::Error, "cannot keep the time");
            }
            Err(_elapsed) => debug!("the disk has not kept the time yet"),
        }
    }
}

/// The file, where a clock that stood before the date of the image has no server to follow, and
/// the data partition is open. What the voters agree on does not count: all may have stood there.
pub(super) fn wanted(
    status: &watch::Sender<Status>,
    storage: &watch::Receiver<storage::Status>,
) -> Option<File> {
    let own = matches!(status.borrow().state, State::Floor | State::Cluster);
    file(storage).filter(|_| own)
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;
    use std::sync::Arc;

    use proptest::prelude::*;

    use super::*;
    use polis_base::files::Root;

    const YEAR: Duration = Duration::from_secs(365 * 86_400);

    fn text(time: SystemTime) -> Vec<u8> {
        format!("{}\n", time.duration_since(UNIX_EPOCH).unwrap().as_secs()).into_bytes()
    }

    fn opened(base: &std::path::Path) -> (watch::Sender<storage::Status>, File) {
        let root = Root::at(base);
        let file = root.data.node.clock.clone();
        std::fs::create_dir_all(file.path().parent().unwrap()).unwrap();
        let ready = storage::Ready {
            root,
            kind: storage::Kind::Insecure,
            partition: uuid::Uuid::nil(),
            device: PathBuf::new(),
            size: 0,
        };
        (watch::Sender::new(storage::Status::Ready(Arc::new(ready))), file)
    }

    fn following(state: State) -> Status {
        Status { state, ..Status::default() }
    }

    #[test]
    fn only_a_clock_that_another_is_near_is_confirmed() {
        let sources = |ahead| Ahead::from([([10, 0, 0, 1].into(), ahead)]);
        for state in State::ALL {
            let follows = matches!(state, State::Cluster | State::Synced);
            assert_eq!(is_confirmed(&following(state), &sources(1_000)), follows, "{state:?}");
            assert!(!is_confirmed(&following(state), &sources(90 * 86_400 * 1_000_000)));
            // A voter alone lends its own clock, right or wrong.
            assert!(!is_confirmed(&following(state), &Ahead::new()));
        }
    }

    #[test]
    fn a_time_sets_a_clock_forward_and_by_ten_years_at_most() {
        let now = UNIX_EPOCH + YEAR * 56;
        assert_eq!(later(&text(now + YEAR), now), Some(now + YEAR));
        for time in [now, now - YEAR, now + YEAR * 11] {
            assert_eq!(later(&text(time), now), None, "{time:?}");
        }
        for bad in [&b""[..], b"\n", b"1800000000", b"-1\n", b"x\n", b"\xff\n"] {
            assert_eq!(later(bad, now), None, "{bad:?}");
        }
        assert_eq!(later(format!("{}\n", u64::MAX).as_bytes(), now), None);
    }

    proptest! {
        #[test]
        fn any_content_is_read(content in prop::collection::vec(any::<u8>(), 0..40)) {
            let now = UNIX_EPOCH + YEAR * 56;
            prop_assert!(later(&content, now).is_none_or(|time| time > now));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_confirmed_time_is_kept_at_once_then_hourly_and_at_the_end() {
        let base = tempfile::tempdir().unwrap();
        let (storage, file) = opened(base.path());
        let storage = storage.subscribe();
        let mut keeper = Keeper::default();
        keeper.note(&storage, false).await;
        keeper.keep(&storage).await;
        assert_eq!(file.read().unwrap(), None, "nothing confirms it");
        let gone = |what| {
            assert!(file.read().unwrap().is_some(), "{what}");
            std::fs::remove_file(file.path()).unwrap();
        };
        keeper.note(&storage, true).await;
        gone("at once");
        keeper.note(&storage, true).await;
        assert_eq!(file.read().unwrap(), None, "within the hour");
        tokio::time::advance(EVERY).await;
        keeper.note(&storage, true).await;
        gone("hourly");
        keeper.keep(&storage).await;
        gone("at the end");
    }

    #[tokio::test]
    async fn a_clock_at_the_date_of_its_image_is_set_to_the_last_known_time() {
        let base = tempfile::tempdir().unwrap();
        let (storage, file) = opened(base.path());
        let storage = storage.subscribe();
        for state in State::ALL {
            let own = matches!(state, State::Floor | State::Cluster);
            let status = watch::Sender::new(following(state));
            assert_eq!(wanted(&status, &storage).is_some(), own, "{state:?}");
        }
        assert_eq!(raise(file.clone(), |_| Ok(())).await, None, "there is none");
        file.write(&text(clock::now() + YEAR)).unwrap();
        let raised = raise(file.clone(), |_| Ok(())).await.unwrap();
        assert_eq!((raised.state, raised.source), (State::Floor, Source::Kept));
        file.write(&text(clock::now() - YEAR)).unwrap();
        assert_eq!(raise(file, |_| panic!("it is set back")).await, None);
    }
}
