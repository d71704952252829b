//! The maintenance of etcd: frees space in a full database.
//!
//! etcd compacts by itself, once an hour, and rewrites its database at start. When the
//! database reaches its quota all the same, every member refuses writes until an operator
//! or a service compacts, rewrites it and clears the alarm: this service does so, on each
//! member for itself. A member does not answer while it rewrites its database, so the members
//! take turns, the leader last. It then clears the alarms of members that do not answer, which
//! would keep all others from writing for as long as they are away.
//!
//! What this module does not do: rewrite a database that is mostly free
//! (`defragmentation`), or take snapshots (`snapshots`).

use std::collections::BTreeSet;
use std::time::Duration;

use etcd_client::{AlarmAction, AlarmType, CompactionOptions};
use tokio::sync::watch;
use tokio::time::Instant;
use tracing::{info, warn};

use super::client::{Clients, Error, call};
use super::members::Members;
use super::{Alarm, MemberId, Status};
use polis_runtime::event::{Closed, until};
use polis_runtime::supervisor::Context;

/// The delay before another attempt: rewriting a database of gigabytes takes a while.
const RETRY: Duration = Duration::from_secs(30);

/// Between the turns of two members: longer than a database of the quota's size is rewritten.
const TURN: Duration = Duration::from_secs(60);

/// How long copies of the database hold a rewrite up: the longest one takes half an hour, and one
/// after the other must not keep the database full.
const COPIES_MAX: Duration = Duration::from_secs(35 * 60);

#[derive(Clone, Debug)]
pub(super) struct Maintenance {
    pub(super) status: watch::Receiver<Status>,
    pub(super) members: Members,
}

impl Maintenance {
    pub(super) async fn run(mut self, ctx: Context) -> Result<(), Closed> {
        ctx.healthy();
        // Since when copies hold the rewrite up.
        let mut held = None;
        loop {
            let found = until(&mut self.status, "the etcd member", |status| {
                let members = u32::try_from(status.members.len()).unwrap_or_default();
                full(status).map(|(clients, member)| (clients, member, turn(status), members))
            });
            let Some(found) = ctx.until_cancelled(found).await else { return Ok(()) };
            let (clients, member, turn, members) = found?;
            warn!(in_s = turn.as_secs(), "the database of etcd is full: freeing space");
            if ctx.until_cancelled(tokio::time::sleep(turn)).await.is_none() {
                return Ok(());
            }
            if full(&self.status.borrow()).is_none() {
                continue;
            }
            let Some(copies) = ctx.until_cancelled(self.members.sends_copies()).await else {
                return Ok(());
            };
            // Where that is not known, the database is full all the same.
            if is_held_up(copies.unwrap_or(false), &mut held) {
                info!("a copy of the full database of etcd is on its way: waiting for its end");
                let rest = rest_of_round(turn, members);
                if ctx.until_cancelled(tokio::time::sleep(rest)).await.is_none() {
                    return Ok(());
                }
                continue;
            }
            let Some(made) = ctx.until_cancelled(make_room(&clients, member)).await else {
                return Ok(());
            };
            let mut pause = RETRY;
            match made {
                Ok(bytes) => {
                    info!(bytes, "the database of etcd has free space again");
                    // Boxed: it is large, and rare.
                    let cleared = Box::pin(self.clear_for_silent(&clients));
                    if ctx.until_cancelled(cleared).await.is_none() {
                        return Ok(());
                    }
                    // The alarms of the others stay until their turns are over.
                    pause = TURN * members;
                }
                Err(error) => {
                    warn!(
                        error = &error as &dyn std::error::Error,
                        "cannot free space in etcd yet"
                    );
                }
            }
            if ctx.until_cancelled(tokio::time::sleep(pause)).await.is_none() {
                return Ok(());
            }
        }
    }

    /// Clears the alarms of members that do not answer, if this member leads.
    async fn clear_for_silent(&self, clients: &Clients) {
        // Where it is not known who answers, every alarm may be of a member that clears it itself.
        let Ok(answering) = self.members.answering().await else { return };
        let status = self.status.borrow().clone();
        if let Err(error) = clear_alarms(clients, &status, &answering).await {
            let error = &error as &dyn std::error::Error;
            warn!(error, "cannot clear the alarms of members that do not answer yet");
        }
    }
}

/// Whether copies that are on their way hold up a rewrite, which they have done since `held`.
fn is_held_up(copies: bool, held: &mut Option<Instant>) -> bool {
    if !copies {
        *held = None;
    }
    copies && held.get_or_insert_with(Instant::now).elapsed() < COPIES_MAX
}

/// How long a member that was held up in its turn leaves the others theirs, before it waits for
/// its next one.
fn rest_of_round(turn: Duration, members: u32) -> Duration {
    (TURN * members.max(1)).saturating_sub(turn)
}

/// The way to this member, where it serves and this service must free space.
fn full(status: &Status) -> Option<(Clients, MemberId)> {
    status.voter().filter(|_| is_for_us(&status.alarms)).cloned().zip(status.member)
}

/// Whether these alarms are for this service. Once one alarm is cleared, etcd accepts writes,
/// although another one is raised; where members have different data, it must not.
fn is_for_us(alarms: &[Alarm]) -> bool {
    alarms.contains(&Alarm::NoSpace) && !alarms.contains(&Alarm::Corrupt)
}

/// How long this member waits for those before it.
pub(super) fn turn(status: &Status) -> Duration {
    let mut order: Vec<_> = status.members.iter().map(|member| member.id).collect();
    order.sort_by_key(|id| (status.leader == Some(*id), *id));
    let before = order.iter().position(|id| status.member == Some(*id)).unwrap_or_default();
    TURN * u32::try_from(before).unwrap_or_default()
}

/// Compacts all old revisions (a watch that is behind lists again), rewrites the database
/// and clears the alarm; returns the size of the database then. If it is still full, etcd
/// raises the alarm at the next write.
async fn make_room(clients: &Clients, member: MemberId) -> Result<i64, Error> {
    let mut kv = clients.raw().kv_client();
    let mut etcd = clients.raw().maintenance_client();
    let newest = kv.get("ready", None).await.map_err(|error| Error::new("read", error))?;
    let newest = newest.header().map_or(0, etcd_client::ResponseHeader::revision);
    // Physical: answers when the space is really free.
    let options = CompactionOptions::new().with_physical();
    match kv.compact(newest, Some(options)).await {
        Ok(_) => {}
        Err(error) => {
            let error = Error::new("compact", error);
            if !error.says("has been compacted") {
                return Err(error);
            }
        }
    }
    etcd.defragment().await.map_err(|error| Error::new("rewrite the database", error))?;
    let mut options = etcd_client::AlarmOptions::new();
    options.with_member(member.0);
    let cleared = etcd.alarm(AlarmAction::Deactivate, AlarmType::Nospace, Some(options)).await;
    cleared.map_err(|error| Error::new("clear the alarm", error))?;
    let status = etcd.status().await.map_err(|error| Error::new("ask for the status", error))?;
    Ok(status.db_size())
}

/// Clears the alarms that this member of `status` clears for others, where these members answer.
async fn clear_alarms(
    clients: &Clients,
    status: &Status,
    answering: &BTreeSet<MemberId>,
) -> Result<(), Error> {
    let mut etcd = clients.raw().maintenance_client();
    let listed = call("list the alarms", etcd.alarm(AlarmAction::Get, AlarmType::Nospace, None));
    let raised: Vec<_> =
        listed.await?.alarms().iter().map(|alarm| MemberId(alarm.member_id())).collect();
    for member in left_behind(status, &raised, answering) {
        let mut options = etcd_client::AlarmOptions::new();
        options.with_member(member.0);
        let cleared = etcd.alarm(AlarmAction::Deactivate, AlarmType::Nospace, Some(options));
        call("clear the alarm of another member", cleared).await?;
        warn!(%member, "cleared the alarm of a member of etcd that does not answer");
    }
    Ok(())
}

/// The members whose alarms the member of `status` clears for them: those that do not answer, if
/// it leads. Its turn is the last, so each member that answers has had its own.
///
/// One alarm keeps all members from writing, and it outlives its member: without this, the loss of
/// a machine with a full database would end all writes for good, also those that remove its node.
/// If its database is still full when it is back, its next write raises the alarm again.
fn left_behind(
    status: &Status,
    raised: &[MemberId],
    answering: &BTreeSet<MemberId>,
) -> Vec<MemberId> {
    let leads = status.leader.is_some() && status.leader == status.member;
    let silent = |member: &&MemberId| leads && !answering.contains(*member);
    raised.iter().filter(silent).copied().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::consensus::Member;

    #[tokio::test(start_paused = true)]
    async fn a_copy_of_the_database_holds_its_rewrite_up_and_copies_without_end_do_not() {
        let mut held = None;
        assert!(!is_held_up(false, &mut held));
        assert!(is_held_up(true, &mut held));
        tokio::time::advance(COPIES_MAX - RETRY).await;
        assert!(is_held_up(true, &mut held));
        assert!(!is_held_up(false, &mut held), "it has ended");
        assert!(is_held_up(true, &mut held), "another one has its own time");
        tokio::time::advance(COPIES_MAX).await;
        assert!(!is_held_up(true, &mut held));
    }

    #[test]
    fn no_alarm_is_cleared_while_members_have_different_data() {
        assert!(is_for_us(&[Alarm::NoSpace]));
        assert!(!is_for_us(&[Alarm::NoSpace, Alarm::Corrupt]));
        assert!(!is_for_us(&[Alarm::Corrupt]) && !is_for_us(&[]));
    }

    #[test]
    fn members_take_turns_and_the_leader_is_the_last() {
        let members = [1, 2, 3].map(|id| Member {
            id: MemberId(id),
            name: String::new(),
            peer_url: String::new(),
            learner: false,
        });
        let turn = |member: u64| {
            turn(&Status {
                member: Some(MemberId(member)),
                leader: Some(MemberId(1)),
                members: members.to_vec(),
                ..Status::default()
            })
        };
        assert_eq!([2, 3, 1].map(turn), [0, 1, 2].map(|before| TURN * before));
        // The turns of one that was held up stay apart from those of the others.
        for own in [2, 3, 1].map(turn) {
            assert_eq!(own + rest_of_round(own, 3), TURN * 3);
        }
        let alone = Status { member: Some(MemberId(7)), ..Status::default() };
        assert_eq!(super::turn(&alone), Duration::ZERO);
        assert_eq!(rest_of_round(Duration::ZERO, 0), TURN, "it never asks without a pause");
    }

    #[test]
    fn the_leader_clears_the_alarms_of_members_that_do_not_answer_and_of_no_other() {
        let ids = |ids: &[u64]| ids.iter().copied().map(MemberId).collect::<Vec<_>>();
        let raised = ids(&[1, 2, 3, 9]);
        let answering: BTreeSet<_> = ids(&[1, 2]).into_iter().collect();
        let status = |leader| Status { member: Some(MemberId(1)), leader, ..Status::default() };
        let cleared = |leader| left_behind(&status(leader), &raised, &answering);
        // One that is off, and one that was removed.
        assert_eq!(cleared(Some(MemberId(1))), ids(&[3, 9]));
        assert_eq!(cleared(Some(MemberId(2))), [], "its turn is not the last");
        assert_eq!(cleared(None), []);
    }
}
