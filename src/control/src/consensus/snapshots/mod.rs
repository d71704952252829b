//! The hourly snapshots of etcd: each voter keeps copies of its own database on its data
//! partition, and shows how old the newest one is.
//!
//! `service` starts this service beside the member. A snapshot helps where the member's own
//! database is lost or wrong and its disk is whole; `polisctl etcd snapshot` makes the one that
//! leaves the machine.
//!
//! ```text
//! voter --settle--> [looking] --due--> room? --> copy, flush --> check --> name, remove the oldest
//!                    ^     |                                                         |
//!                    |     +--not due--> [waiting] <--- published ------------------+
//!                    +-------------------- |   ^
//!                                              +--- any failure: published, retried
//! ```
//!
//! Invariants:
//! - A snapshot counts only once it is on the disk and was checked; a power cut at any moment
//!   leaves the older ones as they are.
//! - The member comes first: no snapshot takes the room that etcd needs to rewrite its database,
//!   and no failure here ends anything.
//! - Each voter has minutes of its own, so that the members are never all at work.
//!
//! What this module does not do: free space in the database (`maintenance`), or begin a cluster
//! from a snapshot (`restore`).

mod check;
mod folder;
mod plan;
mod state;

use std::path::PathBuf;
use std::time::{Duration, UNIX_EPOCH};

use tokio::sync::watch;
use tracing::{info, warn};

use self::folder::{Found, UNFINISHED};
pub use self::plan::budget;
use self::plan::{Entry, Name, Refusal};
pub use self::state::{Snapshots, Taken};
use self::state::{cut, seconds};
use super::Status;
use super::client::{self, Clients};
use polis_base::cause;
use polis_base::files::{self, Dir};
use polis_base::sys::clock;
use polis_runtime::event::{Closed, until};
use polis_runtime::supervisor::{Context, blocking};

/// A copy that takes longer is given up: etcd cannot free a page of its database meanwhile.
const COPY_MAX: Duration = Duration::from_secs(600);

/// Bytes that are collected before a write.
const PIECE: usize = 1 << 20;

/// Attempts in a period, once one has failed.
const ATTEMPTS: u64 = 6;

/// The files that do not count of which the status has the names.
const REJECTED_MAX: usize = 100;

/// How often snapshots are taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pace {
    /// Between two snapshots, in whole seconds.
    pub period: Duration,
    /// From the vote of the member to the first look at the disk, so that a start of the node is
    /// not slowed down; each voter before this one adds as much.
    pub settle: Duration,
}

impl Default for Pace {
    fn default() -> Self {
        Self { period: Duration::from_secs(3600), settle: Duration::from_secs(60) }
    }
}

/// Why no snapshot was taken.
#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("cannot use the folder of the snapshots")]
    Files(#[from] files::Error),
    #[error("too little room for a snapshot")]
    Room(#[from] Refusal),
    #[error("etcd did not send its database")]
    Etcd(#[from] client::Error),
    #[error("the copy took longer than {} s", COPY_MAX.as_secs())]
    Slow,
    #[error("the new snapshot did not pass its check and was removed")]
    Check(#[from] check::Error),
}

/// Takes the snapshots. Cloned into every run; holds no progress.
#[derive(Clone, Debug)]
pub(super) struct Service {
    pub(super) dir: Dir,
    /// etcd's own tool, which reads databases.
    pub(super) tool: PathBuf,
    pub(super) pace: Pace,
    pub(super) status: watch::Receiver<Status>,
    /// Receives the state of the folder.
    pub(super) published: watch::Sender<Status>,
}

impl Service {
    /// Runs until cancelled.
    pub(super) async fn run(mut self, ctx: Context) -> Result<(), Closed> {
        ctx.healthy();
        let settled = async {
            self.voter().await?;
            let (before, _voters) = self.status.borrow().place();
            let turns = u32::try_from(before).unwrap_or(u32::MAX).saturating_add(1);
            tokio::time::sleep(self.pace.settle.saturating_mul(turns)).await;
            Ok::<_, Closed>(())
        };
        let Some(settled) = ctx.until_cancelled(settled).await else { return Ok(()) };
        settled?;
        let mut logged = cause::Last::default();
        loop {
            let Some(voter) = ctx.until_cancelled(self.voter()).await else { return Ok(()) };
            let Some(pause) = ctx.until_cancelled(self.turn(&voter?, &ctx, &mut logged)).await
            else {
                return Ok(());
            };
            if ctx.until_cancelled(tokio::time::sleep(pause)).await.is_none() {
                return Ok(());
            }
        }
    }

    /// Waits until this member votes.
    async fn voter(&mut self) -> Result<Clients, Closed> {
        until(&mut self.status, "the etcd member", |status| status.voter().cloned()).await
    }

    /// Looks at the folder, takes a snapshot if one is due, and publishes the result; returns the
    /// pause before the next look.
    async fn turn(&self, clients: &Clients, ctx: &Context, logged: &mut cause::Last) -> Duration {
        let dir = self.dir.clone();
        let mut found = match blocking(move || folder::look(&dir)).await {
            Ok(found) => found,
            Err(error) => {
                // The former state of the folder stays known.
                let known = self.published.borrow().snapshots.clone().unwrap_or_default();
                return self.failed(known, &error.into(), logged);
            }
        };
        let now = seconds(clock::now());
        let due = self.due_in(&found, now);
        if due > 0 {
            let known = self.published.borrow().snapshots.clone();
            self.publish(state(&found, known.and_then(|known| known.failure)));
            return Duration::from_secs(due);
        }
        // Boxed: it is large, and rare.
        match Box::pin(self.take(&mut found, now, clients, ctx)).await {
            Ok(()) => {
                logged.clear();
                self.publish(state(&found, None));
                Duration::from_secs(self.due_in(&found, seconds(clock::now())))
            }
            Err(error) => self.failed(state(&found, None), &error, logged),
        }
    }

    /// The seconds until the next snapshot is due.
    fn due_in(&self, found: &Found, now: u64) -> u64 {
        let newest = plan::newest(&found.entries).map(|entry| entry.name.at);
        plan::due_in(now, newest, self.period(), self.status.borrow().place())
    }

    fn period(&self) -> u64 {
        self.pace.period.as_secs().max(1)
    }

    /// Publishes what is there with the failure; returns the pause before the next attempt.
    fn failed(&self, shown: Snapshots, error: &Error, logged: &mut cause::Last) -> Duration {
        let error: &dyn std::error::Error = error;
        let text = cut(&cause::line(error));
        if logged.is_new(&text) {
            warn!(error, "cannot take a snapshot of etcd");
        }
        self.publish(Snapshots { failure: Some(text), ..shown });
        Duration::from_secs((self.period() / ATTEMPTS).max(1))
    }

    /// Copies the database, checks the copy, and lets the oldest snapshots go.
    async fn take(
        &self,
        found: &mut Found,
        now: u64,
        clients: &Clients,
        ctx: &Context,
    ) -> Result<(), Error> {
        let next = self.status.borrow().db_size;
        let (dir, entries) = (self.dir.clone(), found.entries.clone());
        let (removed, draft) = blocking(move || {
            let removed = plan::room(&entries, next, dir.space()?)?;
            folder::remove(&dir, &removed)?;
            Ok::<_, Error>((removed, dir.draft(UNFINISHED)?))
        })
        .await?;
        found.forget(&removed);
        let made = self.make(draft, found, now, clients, ctx).await;
        if made.is_err() {
            // The room is the member's. The next look removes what stays.
            let dir = self.dir.clone();
            let _removed = blocking(move || dir.remove(UNFINISHED)).await;
        }
        let entry = made?;
        found.entries.push(entry);
        let old = plan::superfluous(&found.entries);
        found.forget(&old);
        let Entry { name: Name { revision, .. }, bytes, .. } = entry;
        info!(revision, bytes, kept = found.entries.len(), file = %entry.name, "took a snapshot of etcd");
        let dir = self.dir.clone();
        Ok(blocking(move || folder::remove(&dir, &old)).await?)
    }

    async fn make(
        &self,
        draft: files::Draft,
        found: &Found,
        now: u64,
        clients: &Clients,
        ctx: &Context,
    ) -> Result<Entry, Error> {
        let copied = tokio::time::timeout(COPY_MAX, copy(draft, clients)).await;
        let draft = copied.map_err(|_elapsed| Error::Slow)??;
        let checked = check::check(self.tool.clone(), &self.dir, ctx).await?;
        let last = found.entries.iter().map(|entry| entry.name.number).max();
        let number = last.map_or(1, |last| last.saturating_add(1));
        let name = Name { number, at: now, revision: checked.revision };
        blocking(move || draft.keep(&name.to_string())).await?;
        Ok(Entry { name, bytes: checked.bytes, sound: true })
    }

    fn publish(&self, now: Snapshots) {
        let before = self.published.borrow().snapshots.clone().unwrap_or_default().rejected;
        for file in now.rejected.iter().filter(|file| !before.contains(file)) {
            warn!("a file among the snapshots of etcd does not count: {file}");
        }
        let now = Some(now);
        self.published.send_if_modified(|status| {
            let changed = status.snapshots != now;
            status.snapshots = now;
            changed
        });
    }
}

/// Writes the database of the member into a draft.
async fn copy(mut draft: files::Draft, clients: &Clients) -> Result<files::Draft, Error> {
    let mut stream = clients.snapshot().await?;
    let mut buffer = Vec::with_capacity(PIECE);
    loop {
        let piece = stream.next().await?;
        let ended = piece.is_none();
        buffer.extend(piece.into_iter().flatten());
        if ended || buffer.len() >= PIECE {
            let bytes = std::mem::take(&mut buffer);
            draft = blocking(move || draft.write(&bytes).map(|()| draft)).await?;
        }
        if ended {
            return Ok(blocking(move || draft.flush().map(|()| draft)).await?);
        }
    }
}

/// The state of the folder for others.
fn state(found: &Found, failure: Option<String>) -> Snapshots {
    let newest = plan::newest(&found.entries).map(|entry| Taken {
        number: entry.name.number,
        at: UNIX_EPOCH.checked_add(Duration::from_secs(entry.name.at)).unwrap_or(UNIX_EPOCH),
        bytes: entry.bytes,
        revision: entry.name.revision,
    });
    let kept = found.entries.iter().filter(|entry| entry.sound).count();
    let rejected = found.rejected.iter().take(REJECTED_MAX).cloned().collect();
    Snapshots { kept, newest, failure, rejected }
}

#[cfg(test)]
mod tests {
    use polis_proto::v1;

    use super::*;

    #[test]
    fn only_sound_ones_are_reported() {
        let entry = |number, sound| Entry {
            name: Name { number, at: 100 + number, revision: 9 },
            bytes: 7,
            sound,
        };
        let found = Found {
            entries: vec![entry(1, true), entry(2, true), entry(3, false)],
            rejected: vec!["3".to_owned()],
        };
        let message = state(&found, None).message();
        assert_eq!((message.kept, message.newest_at, message.newest_revision), (2, 102, 9));
        let none = Snapshots::default().message();
        assert_eq!(none, v1::LocalSnapshots::default());
    }
}
