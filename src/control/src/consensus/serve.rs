//! The watch over a running etcd: publishes its status until etcd ends, or must.
//!
//! ```text
//! [starting] --leader--> [voter] --growth wanted, pace of a lone one--> Grow
//!   |    |                  ^  |
//!   |    +---> [learner] ---+  +--ended--> Error
//!   +--its announcement is lost--> Announce
//! ```
//!
//! Invariants:
//! - The watch goes on while etcd does not answer, and publishes what it waits for. Only
//!   etcd's own end, the node's, or a reason to start etcd again ([`After`]) ends the watch.
//! - The status never says that others may be added while the file `alone` is on the disk.
//!
//! What this module does not do: start etcd, or classify why it ended (`process`).

use std::sync::Arc;
use std::time::Duration;

use polis_proto::v1;
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, timeout};
use tracing::{info, warn};

use super::announcement::Announcement;
use super::args::Pace;
use super::awaited;
use super::client::{self, Clients};
use super::members::hand_over;
use super::process::{ETCD, POLL_SOON, STOP_MAX, Started, died};
use super::status::members_of;
use super::{Alarm, Config, Error, MemberId, MemberStatus, Status, peers};
use polis_base::serial::EventLine;
use polis_base::stage::{Stage, State};
use polis_base::sys::clock;
use polis_runtime::logtree::{Backlog, Body, Query};
use polis_runtime::save::Save as _;
use polis_runtime::supervisor::{Context, blocking};
use polis_runtime::sys::process::{self, Child, Exit};
use polis_wire::identity::NodeId;

/// The lines of an etcd that has read its log and has no contact with a leader: a voter
/// logs one each time that it stands for election; a member that is not a voter by that
/// log, since it lost its power right after its vote, logs one each time that it cannot
/// send the others its name.
const LEADERLESS: [&str; 2] =
    ["is starting a new election at term", "failed to publish local member to cluster"];

/// The number of lines that are searched for them: they come every few seconds, and
/// complaints about each unreachable peer come as often.
const RECENT: usize = 200;

/// The time between two checks of a member that learns, so that the console shows its progress.
const POLL_LEARNING: Duration = Duration::from_millis(100);

/// The time between two checks of a voter: a pace that a person can follow.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// How long an etcd that is started again may take to end. It would wait seven seconds for the
/// streams of its clients, which do not end. Acknowledged writes are on the disks of a majority.
const RESTART_MAX: Duration = Duration::from_millis(500);

/// An answer that takes longer than an election counts as missing.
const ANSWER_MAX: Duration = Duration::from_secs(2);

/// A start that takes longer deserves an explanation on the screen.
const PATIENCE: Duration = Duration::from_secs(3);

/// The state that the watch shares with the rest of the node.
#[derive(Clone, Debug, Default)]
pub(super) struct Channels {
    pub(super) status: watch::Sender<Status>,
    /// Whether a second member is to be added.
    pub(super) growth: watch::Sender<bool>,
    /// Signals that the next check of the member will show a change.
    pub(super) wake: Arc<Notify>,
    /// Asks for another start of etcd.
    pub(super) restart: Arc<Notify>,
}

/// The reason why etcd was stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum After {
    /// The node stops.
    Cancelled,
    /// It must be started again such that others may come.
    Grow,
    /// It must be started again, since it trusts a former authority.
    Rotate,
    /// It must be started again, since it waits for an announcement that is lost.
    Announce,
}

enum Event {
    Cancelled,
    RestartWanted,
    Unannounced,
    Exited(Result<Exit, process::Error>),
    GrowthWanted,
    Seen(Result<Box<Status>, Silence>),
}

/// The reason why the member has no status.
enum Silence {
    /// It does not answer.
    Mute,
    /// It answers that there is no leader.
    Leaderless,
}

/// One etcd process and its known state.
pub(super) struct Serving<'a> {
    config: &'a Config,
    channels: &'a Channels,
    ctx: &'a Context,
    child: Child,
    clients: Clients,
    pace: Pace,
    /// Whether the file `alone` is on the disk.
    marked: bool,
    growth: watch::Receiver<bool>,
    /// That of a new member, until it serves.
    announcement: Option<Announcement>,
    started: Instant,
    /// The time in this boot since which it has had no contact with a leader.
    alone_since: Option<Duration>,
    /// The members in the last list of a leader in an earlier run.
    last: v1::ClusterDirectory,
    /// The name of this node.
    own: String,
    /// The text of its wait that was published last.
    awaited: Option<String>,
    /// Whether its log shows that it waits for a leader, and when the log was searched.
    leaderless: bool,
    /// The longest write of its log of which it complained while it waited.
    slow_write: Option<Duration>,
    /// When it had a leader last, in time since the kernel started.
    served: Option<Duration>,
    looked_at: Option<Instant>,
    begun: Duration,
    reported: Option<EventLine>,
}

impl<'a> Serving<'a> {
    pub(super) async fn new(
        config: &'a Config,
        channels: &'a Channels,
        ctx: &'a Context,
        started: Started,
        pace: Pace,
        own: NodeId,
    ) -> Result<Self, Error> {
        let Started { child, begun } = started;
        let directory = config.directory.clone();
        let last = blocking(move || awaited::named_last(&directory)).await;
        Ok(Self {
            config,
            channels,
            ctx,
            child,
            clients: Clients::connect(config.sockets.client()).await?,
            pace,
            marked: pace == Pace::Alone,
            growth: channels.growth.subscribe(),
            announcement: None,
            started: Instant::now(),
            alone_since: None,
            last,
            own: own.to_string(),
            awaited: None,
            leaderless: false,
            slow_write: None,
            served: None,
            looked_at: None,
            begun,
            reported: None,
        })
    }

    /// The same, of a new member whose announcement may be lost.
    pub(super) fn announced(self, announcement: Option<Announcement>) -> Self {
        Self { announcement, ..self }
    }

    /// Watches until etcd ends, or must.
    pub(super) async fn run(mut self) -> Result<After, Error> {
        let mut pause = POLL_SOON;
        loop {
            if *self.growth.borrow_and_update() && self.make_room().await? == Room::Restart {
                return Ok(After::Grow);
            }
            match self.next_event(pause).await {
                Event::Cancelled => {
                    self.stop(STOP_MAX).await?;
                    return Ok(After::Cancelled);
                }
                Event::Unannounced => {
                    self.stop(RESTART_MAX).await?;
                    return Ok(After::Announce);
                }
                Event::Exited(exit) => {
                    let exit = exit.map_err(Error::Process)?;
                    return Err(died(self.config, self.ctx, self.begun, exit).await);
                }
                Event::GrowthWanted => {}
                Event::RestartWanted => {
                    if self.is_outdated() {
                        let status = self.channels.status.borrow().clone();
                        // Otherwise the others elect one.
                        let _handed = hand_over(&status, &self.clients, &self.config.sockets).await;
                        self.channels.status.send_modify(|status| {
                            (status.clients, status.leader) = (None, None);
                            status.standing = MemberStatus::Starting;
                        });
                        self.stop(RESTART_MAX).await?;
                        return Ok(After::Rotate);
                    }
                }
                Event::Seen(Err(silence)) => self.unseen(&silence),
                Event::Seen(Ok(seen)) => {
                    let learning = seen.members.iter().any(|member| member.learner);
                    pause = match seen.standing {
                        MemberStatus::Voter if !learning => POLL_INTERVAL,
                        MemberStatus::Voter | MemberStatus::Learner { .. } => POLL_LEARNING,
                        MemberStatus::Starting | MemberStatus::Stopped => POLL_SOON,
                    };
                    self.seen(*seen).await?;
                }
            }
        }
    }

    async fn next_event(&mut self, pause: Duration) -> Event {
        let look = async {
            // The first event; news that came before are kept.
            let _slept = timeout(pause, self.channels.wake.notified()).await;
            look(self.config, &self.channels.status, &self.clients).await
        };
        let lost = async {
            match &mut self.announcement {
                Some(announcement) => announcement.lost().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            // Cancel-safe: only waits.
            () = self.ctx.cancelled() => Event::Cancelled,
            // Cancel-safe per its documentation.
            exit = self.child.wait() => Event::Exited(exit),
            // Cancel-safe per the documentation of `changed`.
            Ok(()) = self.growth.changed() => Event::GrowthWanted,
            // Cancel-safe: waits for its turn; a signal that comes before is kept.
            () = self.channels.restart.notified() => Event::RestartWanted,
            // Cancel-safe per its documentation.
            () = lost => Event::Unannounced,
            // Cancel-safe: only reads.
            seen = look => Event::Seen(seen.map(Box::new)),
        }
    }

    /// Whether etcd trusts other authorities than the file names.
    fn is_outdated(&self) -> bool {
        let status = self.channels.status.borrow();
        status.authorities.is_some() && status.authorities != status.authorities_at_start
    }

    async fn stop(&mut self, grace: Duration) -> Result<(), Error> {
        self.child.terminate(grace).await.map(drop).map_err(Error::Process)
    }

    /// Prepares this member for the addition of others.
    async fn make_room(&mut self) -> Result<Room, Error> {
        if self.pace == Pace::Alone {
            self.channels.status.send_modify(|status| status.clients = None);
            self.stop(STOP_MAX).await?;
            return Ok(Room::Restart);
        }
        if self.marked {
            let alone = self.config.tree.alone.clone();
            blocking(move || alone.remove()).await?;
            self.marked = false;
        }
        self.channels
            .status
            .send_if_modified(|status| !std::mem::replace(&mut status.ready_to_grow, true));
        Ok(Room::Ready)
    }

    /// Reads in the log of etcd whether one that does not answer yet has read what is on its
    /// disk, since it serves no client before there is a leader, and whether its disk is slow.
    fn read_log(&mut self) {
        if self.looked_at.is_some_and(|last| last.elapsed() < POLL_INTERVAL) {
            return;
        }
        self.looked_at = Some(Instant::now());
        let output = self.ctx.logs().backlog(&Query {
            name: format!("{}.{ETCD}", self.ctx.name()),
            children: false,
            backlog: Backlog::Last(RECENT),
            ..Query::all()
        });
        let says_so = |body: &Body| match body {
            Body::Levelled(it) => LEADERLESS.iter().any(|words| it.message.contains(words)),
            Body::Raw(_) => false,
        };
        // Every start has such a line, also that of a member which is only slow now.
        let since = self.begun.max(self.served.unwrap_or_default());
        self.leaderless |= output.iter().any(|entry| entry.at >= since && says_so(&entry.body));
        let waits = self.alone_since.unwrap_or_default().max(self.begun);
        let slow = |body: &Body| match body {
            Body::Levelled(it) => awaited::slow_write(it),
            Body::Raw(_) => None,
        };
        let writes = output.iter().filter(|entry| entry.at >= waits);
        let longest = writes.filter_map(|entry| slow(&entry.body)).max();
        self.slow_write = self.slow_write.max(longest);
    }

    fn unseen(&mut self, silence: &Silence) {
        let now = clock::uptime();
        let since = *self.alone_since.get_or_insert(now);
        let silent = now.saturating_sub(since);
        let is_mute = matches!(silence, Silence::Mute);
        if self.started.elapsed() < PATIENCE || is_mute && silent < PATIENCE {
            return;
        }
        self.read_log();
        let known = self.channels.status.borrow().members.clone();
        let mut what = if awaited::is_only_voter(&self.own, &known, &self.last, self.marked)
            || is_mute && !self.leaderless
        {
            awaited::slow(since)
        } else {
            awaited::leader(&self.own, &known, &self.last, since, silent)
        };
        if let Some(took) = self.slow_write {
            what = awaited::slow_disk(&what, took);
        }
        if self.awaited.as_ref() != Some(&what) {
            warn!("waiting for {what}");
            self.awaited = Some(what.clone());
            self.ctx.stage(Stage::Consensus, State::Waiting(what));
        }
        self.channels.status.send_if_modified(|status| status.leader.take().is_some());
    }

    async fn seen(&mut self, seen: Status) -> Result<(), Error> {
        let standing = seen.standing;
        self.announcement = None;
        self.alone_since = None;
        if seen.leader.is_some() {
            (self.served, self.leaderless) = (Some(clock::uptime()), false);
        }
        (self.awaited, self.slow_write) = (None, None);
        let alone = standing == MemberStatus::Voter && seen.members.len() == 1;
        let entered = self.channels.status.borrow().standing != standing;
        let known = self.channels.status.borrow().alarms.contains(&Alarm::Corrupt);
        if seen.alarms.contains(&Alarm::Corrupt) && !known {
            warn!(
                "members of etcd have different data, and it refuses every write: \
                 `polisctl cluster status` has the next step"
            );
        }
        self.channels.status.send_if_modified(|status| {
            // The keepers beside this one may have changed these since the question.
            let (authorities, snapshots) = (status.authorities, status.snapshots.clone());
            let seen = Status { authorities, snapshots, ..seen.clone() };
            let changed = *status != seen;
            *status = seen;
            changed
        });
        self.reported = report(&self.channels.status, self.ctx, self.reported.take());
        match standing {
            MemberStatus::Voter => {
                if entered {
                    let member = seen.member.map(|id| id.to_string()).unwrap_or_default();
                    info!(member, "etcd is serving, voter");
                }
                self.ctx.stage(Stage::Consensus, State::Done);
                self.ctx.healthy();
            }
            MemberStatus::Learner { behind } => {
                let what = format!(
                    "the leader to promote this learner, {behind} entries behind; if that stays \
                     so, check the network to the other voters and the disk of this node"
                );
                self.ctx.stage(Stage::Consensus, State::Waiting(what));
            }
            MemberStatus::Starting | MemberStatus::Stopped => {}
        }
        if alone && !self.marked && !*self.growth.borrow() {
            self.config.tree.alone.save(Vec::new()).await?;
            self.marked = true;
        }
        Ok(())
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Room {
    Ready,
    Restart,
}

/// Prints the event line, unless it equals `last`.
pub(super) fn report(
    status: &watch::Sender<Status>,
    ctx: &Context,
    last: Option<EventLine>,
) -> Option<EventLine> {
    let status = status.borrow().clone();
    let mut line = EventLine::new("etcd")
        .field("state", status.standing.name())
        .field("members", status.members.len())
        .field("term", status.term);
    if let Some(member) = status.member {
        line = line.field("member", member);
    }
    if last.as_ref() != Some(&line) {
        ctx.lines().event(line.clone());
    }
    Some(line)
}

/// Requests the member's status; fields that the answer lacks stay as they were.
async fn look(
    config: &Config,
    status: &watch::Sender<Status>,
    clients: &Clients,
) -> Result<Status, Silence> {
    // To look up a file name is cheaper than a refused connection.
    if !config.sockets.client().exists() {
        return Err(Silence::Mute);
    }
    let before = status.borrow().clone();
    let etcd = clients.raw();
    let answer = timeout(ANSWER_MAX, etcd.maintenance_client().status())
        .await
        .map_err(|_elapsed| Silence::Mute)?;
    let answer = answer.map_err(|error| {
        let error = client::Error::new("ask for the status", error);
        if error.says("no leader") { Silence::Leaderless } else { Silence::Mute }
    })?;

    let leader = Some(MemberId(answer.leader())).filter(|id| id.0 != 0);
    let members = match (answer.is_learner(), leader) {
        // A learner does not receive the list of the others.
        (true, _) | (false, None) => None,
        (false, Some(_)) => {
            let listed = timeout(ANSWER_MAX, etcd.cluster_client().member_list()).await;
            listed.ok().and_then(Result::ok)
        }
    };
    let members = members.map_or(before.members, |list| members_of(list.members()));
    let version = timeout(ANSWER_MAX, peers::cluster_version(&config.sockets.http())).await;
    let cluster_version = version.ok().and_then(Result::ok).flatten();
    let index = answer.raft_index();
    let applied = answer.raft_applied_index();
    let standing = if answer.is_learner() {
        MemberStatus::Learner { behind: index.saturating_sub(applied) }
    } else if leader.is_some() && !members.is_empty() {
        MemberStatus::Voter
    } else {
        before.standing
    };
    let header = answer.header();
    Ok(Status {
        standing,
        member: header.map(|header| MemberId(header.member_id())),
        cluster: header.map(etcd_client::ResponseHeader::cluster_id),
        peer_url: before.peer_url,
        version: answer.version().to_owned(),
        cluster_version: cluster_version.or(before.cluster_version),
        leader,
        term: answer.raft_term(),
        index,
        applied,
        revision: header.map_or(0, |header| u64::try_from(header.revision()).unwrap_or(0)),
        db_size: u64::try_from(answer.db_size()).unwrap_or(0),
        db_used: u64::try_from(answer.raft_used_db_size()).unwrap_or(0),
        db_quota: before.db_quota,
        alarms: alarms(answer.errors()),
        members,
        clients: Some(clients.clone()),
        ready_to_grow: before.ready_to_grow,
        removed: before.removed && leader.is_none(),
        authorities: before.authorities,
        authorities_at_start: before.authorities_at_start,
        snapshots: before.snapshots,
    })
}

/// etcd lists its alarms among the errors of its status.
fn alarms(errors: &[String]) -> Vec<Alarm> {
    let mut alarms: Vec<_> = errors
        .iter()
        .filter_map(|error| {
            if error.contains("alarm:NOSPACE") {
                Some(Alarm::NoSpace)
            } else if error.contains("alarm:CORRUPT") {
                Some(Alarm::Corrupt)
            } else {
                None
            }
        })
        .collect();
    alarms.sort();
    alarms.dedup();
    alarms
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn alarms_are_read_from_the_errors_of_a_status() {
        let errors =
            ["memberID:1 alarm:NOSPACE ", "etcdserver: no leader", "memberID:2 alarm:NOSPACE "]
                .map(str::to_owned);
        assert_eq!(alarms(&errors), [Alarm::NoSpace]);
        // It names no member.
        let errors = ["alarm:CORRUPT ", "alarm:NOSPACE ", "alarm:CORRUPT "].map(str::to_owned);
        assert_eq!(alarms(&errors), [Alarm::NoSpace, Alarm::Corrupt]);
    }
}
