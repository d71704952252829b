//! The defragmentation of etcd in regular operation: a database file that is mostly free is
//! rewritten, and the disk has its space again.
//!
//! etcd frees pages inside of its file, and the file never becomes smaller by itself. A member
//! answers neither reads nor writes while it rewrites its database, so the members do it one
//! after the other, in the same order as with a full database, the leader last.
//!
//! ```text
//!        mostly free                                turn is over
//! [rest] -----------> every member answers? --yes--> [turn] ----> still? --> lock --> rewrite
//!    ^                        |                                     |         |          |
//!    |<----- RETRY -----------+-------------------------------------+---------+          |
//!    +<----- REST -----------------------------------------------------------------------+
//! ```
//!
//! Invariants:
//! - Two members never rewrite their databases at the same time: the lock is a key of etcd,
//!   whose lease outlives a rewrite.
//! - It begins only while every member votes and answers and no alarm is raised: one member
//!   less is then no member too few.
//!
//! What this module does not do: free space in a full database (`maintenance`), or rewrite the
//! database at a start, which etcd does.

use std::collections::BTreeSet;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};
use tracing::{info, warn};

use super::client::{self, Clients, User};
use super::maintenance::turn;
use super::members::{self, Members};
use super::{MemberId, Status};
use polis_base::cause;
use polis_base::files::{self, Dir};
use polis_runtime::event::{Closed, until};
use polis_runtime::supervisor::{Context, blocking};

/// Free bytes below which a rewrite is not worth the pause of the member.
const FREE_MIN: u64 = 100 << 20;

/// Bytes that stay free beside the new file: etcd preallocates two files of its log.
const ROOM: u64 = 256 << 20;

/// The delay before another attempt: a member that was off is back, or another one has done its
/// part. Shorter than a turn, so that the order of the turns holds.
const RETRY: Duration = Duration::from_secs(30);

/// The rest after a rewrite: etcd compacts once an hour, and frees no pages before.
const REST: Duration = Duration::from_secs(3600);

/// The life of the lock, which is not renewed, since the member that holds it does not answer.
/// A database of the quota's size is rewritten in less; a member that dies keeps the others
/// waiting for so long at most.
const LOCK: Duration = Duration::from_secs(600);

/// How long the lock is waited for: the member that has it may have just begun.
const LOCK_MAX: Duration = Duration::from_secs(5);

/// The name of the lock.
const ELECTION: &str = "defragmentation";

/// Why the database is not rewritten now.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
enum Blocker {
    #[error("this member is not a voter with a leader")]
    NoVoter,
    #[error("an alarm of etcd is raised")]
    Alarm,
    #[error("a member is learning")]
    Learner,
    #[error("members that do not answer: {}", missing.join(", "))]
    Silent { missing: Vec<String> },
    #[error("this member is sending a copy of its database")]
    Copy,
    #[error("this member leads, and no other one takes the lead")]
    Leads,
    #[error("the data partition has {} MiB free, and the new file takes {}", free >> 20, needed >> 20)]
    NoRoom { free: u64, needed: u64 },
    #[error("another member rewrites its database, or is before this one")]
    Turn,
}

#[derive(Debug, thiserror::Error)]
enum Error {
    #[error(transparent)]
    Blocked(#[from] Blocker),
    #[error(transparent)]
    Members(#[from] members::Error),
    #[error(transparent)]
    Files(#[from] files::Error),
    #[error(transparent)]
    Etcd(#[from] client::Error),
}

/// Rewrites the database when that is due. Cloned into every run; holds no progress.
#[derive(Clone, Debug)]
pub(super) struct Service {
    pub(super) status: watch::Receiver<Status>,
    pub(super) members: Members,
    /// Where the database is.
    pub(super) data: Dir,
}

impl Service {
    /// Runs until cancelled.
    pub(super) async fn run(mut self, ctx: Context) -> Result<(), Closed> {
        ctx.healthy();
        let mut logged = cause::Last::default();
        loop {
            let due = until(&mut self.status, "the etcd member", |status| {
                is_mostly_free(status).then_some(())
            });
            let Some(found) = ctx.until_cancelled(due).await else { return Ok(()) };
            found?;
            let Some(done) = ctx.until_cancelled(Box::pin(self.attempt())).await else {
                return Ok(());
            };
            let pause = match done {
                Ok(()) => {
                    logged.clear();
                    REST
                }
                Err(error) => {
                    let cause = cause::line(&error);
                    if logged.is_new(&cause) {
                        let blocked = matches!(error, Error::Blocked(_));
                        if blocked {
                            info!(
                                cause,
                                "the database of etcd is mostly free, and not rewritten yet"
                            );
                        } else {
                            warn!(
                                cause,
                                "cannot rewrite the database of etcd, which is mostly free"
                            );
                        }
                    }
                    RETRY
                }
            };
            if ctx.until_cancelled(sleep(pause)).await.is_none() {
                return Ok(());
            }
        }
    }

    /// Waits for the turn of this member, and rewrites its database.
    async fn attempt(&self) -> Result<(), Error> {
        // Before the turn, too: the order begins when the last member is back.
        self.ready().await?;
        let waited = turn(&self.status.borrow());
        sleep(waited).await;
        if !is_mostly_free(&self.status.borrow()) {
            return Ok(());
        }
        let clients = self.ready().await?;
        if turn(&self.status.borrow()) > waited {
            // This member leads since then.
            return Err(Blocker::Turn.into());
        }
        let client = clients.user(User::Maintenance);
        let lease = client.lease(LOCK).await?;
        let own = self.status.borrow().member.map(|id| id.to_string()).unwrap_or_default();
        let locked = timeout(LOCK_MAX, client.campaign(ELECTION, own, &lease)).await;
        let done = match locked {
            Ok(Ok(_lock)) => self.rewrite(&clients).await,
            Ok(Err(error)) => Err(error.into()),
            Err(_elapsed) => Err(Blocker::Turn.into()),
        };
        if let Err(error) = client.release(&lease).await {
            warn!(error = &error as &dyn std::error::Error, "the others wait until the lock ends");
        }
        done
    }

    /// The way to this member, if it may rewrite its database now.
    async fn ready(&self) -> Result<Clients, Error> {
        let answering = self.members.answering().await?;
        let copies = self.members.sends_copies().await?;
        let status = self.status.borrow().clone();
        blocker(&status, &answering, copies).map_or(Ok(()), Err)?;
        let data = self.data.clone();
        let free = blocking(move || data.space()).await?.free;
        no_room(free, status.db_used).map_or(Ok(()), Err)?;
        Ok(status.voter().cloned().ok_or(Blocker::NoVoter)?)
    }

    async fn rewrite(&self, clients: &Clients) -> Result<(), Error> {
        // Leases are renewed by the leader, and a rewrite may take longer than one lives.
        let handed = self.members.hand_over(clients).await;
        let status = self.status.borrow().clone();
        if !handed && status.members.len() > 1 {
            return Err(Blocker::Leads.into());
        }
        let begun = Instant::now();
        info!(bytes = status.db_size, used = status.db_used, "rewriting the database of etcd");
        let mut etcd = clients.raw().maintenance_client();
        let error = |error| client::Error::new("rewrite the database", error);
        // No deadline: etcd goes on, whether it is waited for or not.
        etcd.defragment().await.map_err(error)?;
        let answer = etcd.status().await;
        let bytes = answer.map_err(|error| client::Error::new("ask for the status", error))?;
        let took_ms = begun.elapsed().as_millis();
        info!(bytes = bytes.db_size(), took_ms, "the database of etcd is rewritten");
        Ok(())
    }
}

/// Whether most of the file is free, and enough of it to be worth a pause.
fn is_mostly_free(status: &Status) -> bool {
    let free = status.db_size.saturating_sub(status.db_used);
    // Without the second number, nothing is known.
    status.db_used > 0 && free >= FREE_MIN && free > status.db_size / 2
}

/// The new file lies beside the former one until it is whole.
fn no_room(free: u64, used: u64) -> Option<Blocker> {
    let needed = used.saturating_add(ROOM);
    (free < needed).then_some(Blocker::NoRoom { free, needed })
}

/// The first reason against a rewrite now, where these members answer.
fn blocker(status: &Status, answering: &BTreeSet<MemberId>, copies: bool) -> Option<Blocker> {
    if status.voter().is_none() || status.leader.is_none() {
        return Some(Blocker::NoVoter);
    }
    if !status.alarms.is_empty() {
        return Some(Blocker::Alarm);
    }
    if status.members.iter().any(|member| member.learner) {
        return Some(Blocker::Learner);
    }
    let silent = status.members.iter().filter(|member| !answering.contains(&member.id));
    let missing: Vec<_> = silent.map(|member| member.called().to_owned()).collect();
    if !missing.is_empty() {
        return Some(Blocker::Silent { missing });
    }
    // etcd would wait for the end of the copy, and answer nothing until then.
    copies.then_some(Blocker::Copy)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::consensus::{Alarm, Member, MemberStatus};

    const MIB: u64 = 1 << 20;

    #[test]
    fn a_file_is_rewritten_where_more_than_half_and_100_mib_are_free() {
        let due = |size: u64, used: u64| {
            let (db_size, db_used) = (size * MIB, used * MIB);
            is_mostly_free(&Status { db_size, db_used, ..Status::default() })
        };
        assert!(due(199, 99) && due(2048, 1));
        assert!(!due(200, 100), "half");
        assert!(!due(120, 21), "99 MiB");
        assert!(!due(2048, 1500), "a quarter");
        assert!(!due(2048, 0), "not known");
        assert!(!due(10, 20), "the two numbers are of two moments");
    }

    #[test]
    fn a_rewrite_needs_room_for_the_new_file_beside_the_former_one() {
        assert_eq!(no_room(2048 * MIB, 1000 * MIB), None);
        let refused = no_room(1200 * MIB, 1000 * MIB).unwrap().to_string();
        assert_eq!(refused, "the data partition has 1200 MiB free, and the new file takes 1256");
    }

    async fn voter() -> Status {
        let member = |id| Member {
            id: MemberId(id),
            name: format!("n{id}"),
            peer_url: String::new(),
            learner: false,
        };
        Status {
            standing: MemberStatus::Voter,
            member: Some(MemberId(1)),
            leader: Some(MemberId(2)),
            members: [1, 2, 3].map(member).to_vec(),
            clients: Some(Clients::connect(std::path::Path::new("/nowhere")).await.unwrap()),
            ..Status::default()
        }
    }

    #[tokio::test]
    async fn no_member_rewrites_its_database_while_another_one_is_missing() {
        let status = voter().await;
        let answer = |ids: &[u64]| ids.iter().copied().map(MemberId).collect::<BTreeSet<_>>();
        let all = answer(&[1, 2, 3]);
        assert_eq!(blocker(&status, &all, false), None);
        let missing = blocker(&status, &answer(&[1, 3]), false).unwrap();
        assert_eq!(missing.to_string(), "members that do not answer: n2");
        assert_eq!(blocker(&status, &all, true), Some(Blocker::Copy));
        let leaderless = Status { leader: None, ..status.clone() };
        assert_eq!(blocker(&leaderless, &all, false), Some(Blocker::NoVoter));
        let starting = Status { clients: None, ..status.clone() };
        assert_eq!(blocker(&starting, &all, false), Some(Blocker::NoVoter));
        let full = Status { alarms: vec![Alarm::NoSpace], ..status.clone() };
        assert_eq!(blocker(&full, &all, false), Some(Blocker::Alarm));
        let mut entering = status;
        entering.members[2].learner = true;
        assert_eq!(blocker(&entering, &all, false), Some(Blocker::Learner));
    }
}
