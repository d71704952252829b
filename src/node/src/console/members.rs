//! The state of the members of etcd: asks each for its progress, its size and its delay.
//!
//! etcd reports on each member to itself, and on the others to its leader, so a screen that
//! is to show all of them must ask around. Each node serves `GetStatus` to the nodes of its
//! cluster, over a connection that is kept.
//!
//! ```text
//! [waiting: nothing is known] --voter--> ask itself how it is, and every other member's node,
//!     ^                                  all at once; etcd whom it is connected to, unless
//!     |                                  all answer promptly and it has said so lately
//!     |                                        |            ^
//!     +-- no voter any more -- [published] <---+            |
//!                                  +-- PACE, or other members
//! ```
//!
//! Invariants:
//! - A node that does not answer delays the others for at most [`ANSWER`].
//! - A value that was not learned in the last round is not shown; but for the connections of
//!   etcd, of which one that ends while both nodes answer shows after [`CONNECTIONS_MAX`].
//!
//! What this module does not do: decide anything. `consensus::Members` decides
//! whether a cluster goes on without a member.

use std::collections::{BTreeMap, BTreeSet};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures::future::join_all;
use polis_proto::v1;
use polis_proto::v1::node_management_client::NodeManagementClient;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};
use tracing::debug;

use polis_control::consensus::{Member, MemberId, Members, Status};
use polis_runtime::event::{Closed, until};
use polis_runtime::supervisor::Context;
use polis_wire::identity::NodeId;
use polis_wire::node_roles::Nodes;
use polis_wire::rpc::Credentials;
use polis_wire::rpc::client::{Connection, Expect, Trust, dial};

/// Between two rounds: a few hundred bytes a member, and a dead one is on the screens
/// within two rounds.
const PACE: Duration = Duration::from_secs(5);
/// The same while a member learns: a person waits for it.
const PACE_LEARNING: Duration = Duration::from_secs(2);
/// An answer that takes longer counts as missing.
const ANSWER: Duration = Duration::from_secs(2);
/// While all answer within this time, [`Connections`] of a moment ago count.
const PROMPT: Duration = Duration::from_millis(500);
/// How long they count. etcd names its peers on the page of all its metrics only, and to write
/// that page is a tenth of what a member at rest does if it is asked in every round.
const CONNECTIONS_MAX: Duration = Duration::from_secs(30);
/// Members that are asked: a sensible cluster does not have more.
const MEMBERS_MAX: usize = 16;

/// The result of the last round, by member numbers.
pub(super) type Learned = BTreeMap<MemberId, Probed>;

/// The result for one member.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Probed {
    /// Whether this node's etcd has a connection to it; `None` if etcd does not report it.
    pub(super) connected: Option<bool>,
    /// The report of its node about it.
    pub(super) reported: Option<Reported>,
}

/// The report of a node about its member.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Reported {
    /// How long question and answer took.
    pub(super) took: Duration,
    /// Entries of the log that it has not applied, of those that are known here.
    pub(super) behind: u64,
    /// How much of the log it has applied, in percent.
    pub(super) share: u8,
    /// Bytes of its database.
    pub(super) db_size: u64,
    /// The members that it reaches, if its node knows that of each.
    pub(super) reaches: Option<Vec<u64>>,
}

/// The state that is kept from one round to the next.
#[derive(Debug, Default)]
struct Kept {
    /// To the node of each member.
    nodes: BTreeMap<MemberId, Connection>,
    connections: Option<Connections>,
}

/// The members that etcd was connected to.
#[derive(Debug)]
struct Connections {
    at: Instant,
    to: BTreeSet<MemberId>,
}

impl Connections {
    /// Whether they still count: each member is among them.
    fn count(&self, members: &[Member]) -> bool {
        let all = members.iter().all(|member| self.to.contains(&member.id));
        all && self.at.elapsed() < CONNECTIONS_MAX
    }
}

/// Configuration, inputs and outputs. Cloned into every run; holds no progress.
#[derive(Clone, Debug)]
pub struct Service {
    /// This node's member.
    pub consensus: watch::Receiver<Status>,
    /// The peers that etcd is connected to.
    pub members: Members,
    /// Where the other nodes are.
    pub nodes: watch::Receiver<Option<Arc<Nodes>>>,
    /// The identity of this node to the others.
    pub credentials: watch::Receiver<Option<Credentials>>,
    /// Where the other nodes serve.
    pub port: u16,
}

impl Service {
    /// Asks until cancelled.
    pub(super) async fn run(
        mut self,
        ctx: Context,
        learned: watch::Sender<Learned>,
    ) -> Result<(), Closed> {
        let mut kept = Kept::default();
        ctx.healthy();
        loop {
            if self.consensus.borrow().voter().is_none() {
                publish(&learned, Learned::new());
            }
            let voter = until(&mut self.consensus, "the etcd member", |status| {
                status.voter().map(|_clients| status.clone())
            });
            let Some(status) = ctx.until_cancelled(voter).await else { return Ok(()) };
            let status = status?;
            let round = self.round(&status, &mut kept);
            let Some(new) = ctx.until_cancelled(Box::pin(round)).await else { return Ok(()) };
            publish(&learned, new);
            let outdated = outdated(&mut self.consensus, &status);
            let Some(leader_lost) = ctx.until_cancelled(outdated).await else { return Ok(()) };
            if leader_lost? {
                kept.connections = None;
                forget_connections(&learned);
            }
        }
    }

    async fn round(&self, status: &Status, kept: &mut Kept) -> Learned {
        kept.nodes.retain(|id, _| status.members.iter().any(|member| member.id == *id));
        let credentials = self.credentials.borrow().clone();
        let others = status.members.iter().filter(|member| Some(member.id) != status.member);
        let asked = others.take(MEMBERS_MAX).map(|member| {
            let connection = kept.nodes.remove(&member.id);
            let credentials = credentials.as_ref();
            async move { (member.id, self.ask(member, credentials, connection).await) }
        });
        let mut answers = pin!(join_all(asked));
        let prompt = timeout(PROMPT, &mut answers).await.ok();
        let all_answer = prompt.as_ref().is_some_and(|answers: &Vec<(_, Option<_>)>| {
            answers.iter().all(|(_, answer)| answer.is_some())
        });
        let known = kept.connections.take();
        let known = known.filter(|known| all_answer && known.count(&status.members));
        let connections = async {
            match known {
                Some(known) => Some(known),
                None => self.connections(status).await,
            }
        };
        let answers = async {
            match prompt {
                Some(prompt) => prompt,
                None => answers.await,
            }
        };
        let (answers, connections, own) = tokio::join!(answers, connections, ask_own(status));
        kept.connections = connections;
        let connected = kept.connections.as_ref().map(|connections| &connections.to);
        let mut learned = Learned::new();
        if let (Some(id), Some(took)) = (status.member, own) {
            let own = v1::ConsensusMember {
                applied_index: status.applied,
                db_bytes: status.db_size,
                ..Default::default()
            };
            learned.insert(id, probed(status, id, None, Some((took, own))));
        }
        for (id, answer) in answers {
            let reported = answer.map(|(connection, took, reported)| {
                kept.nodes.insert(id, connection);
                (took, reported)
            });
            learned.insert(id, probed(status, id, connected, reported));
        }
        learned
    }

    /// Asks etcd. A single member has no peer, and etcd would log a long message about it.
    async fn connections(&self, status: &Status) -> Option<Connections> {
        if status.members.len() < 2 {
            return None;
        }
        let to = self.members.answering().await.ok()?;
        Some(Connections { at: Instant::now(), to })
    }

    /// Asks the node of `member`; returns the connection for the next time.
    async fn ask(
        &self,
        member: &Member,
        credentials: Option<&Credentials>,
        connection: Option<Connection>,
    ) -> Option<(Connection, Duration, v1::ConsensusMember)> {
        let connection = match connection {
            Some(connection) => connection,
            None => {
                let node: NodeId = member.name.parse().ok()?;
                let credentials = credentials?;
                let trust = Trust::cluster(credentials.authorities.clone()?);
                let expect = Expect::Node(node);
                let host = self.address(node)?;
                let dialled = dial(&host, self.port, expect, &trust, Some(credentials));
                match timeout(ANSWER, dialled).await {
                    Ok(Ok(connection)) => connection,
                    Ok(Err(error)) => {
                        debug!(%node, %error, "cannot read the state of a member");
                        return None;
                    }
                    Err(_elapsed) => return None,
                }
            }
        };
        let mut client = NodeManagementClient::new(connection.channel.clone());
        let asked = Instant::now();
        let answer = timeout(ANSWER, client.get_status(v1::GetStatusRequest {})).await;
        let answer = answer.ok()?.ok()?.into_inner();
        Some((connection, asked.elapsed(), answer.etcd?))
    }

    /// The address at which a node reports that others reach it.
    fn address(&self, node: NodeId) -> Option<String> {
        let nodes = self.nodes.borrow().clone()?;
        let address = nodes.get(&node)?.status.as_ref()?.external_address.clone();
        (!address.is_empty()).then_some(address)
    }
}

fn publish(learned: &watch::Sender<Learned>, new: Learned) {
    learned.send_if_modified(|known| {
        let changed = *known != new;
        *known = new;
        changed
    });
}

/// Makes the connections of etcd unknown.
fn forget_connections(learned: &watch::Sender<Learned>) {
    learned.send_if_modified(|learned| {
        let known = learned.values_mut().filter_map(|probed| probed.connected.take());
        known.count() > 0
    });
}

/// Waits until the result of `asked` is too old to show, or is incomplete; returns whether
/// etcd has lost the leader that it had then. A member has died or was cut off, most likely,
/// and the connections from before that do not show it.
async fn outdated(consensus: &mut watch::Receiver<Status>, asked: &Status) -> Result<bool, Closed> {
    let learning = asked.members.iter().any(|member| member.learner);
    let pace = if learning { PACE_LEARNING } else { PACE };
    let lost = |status: &Status| asked.leader.is_some() && status.leader != asked.leader;
    let other = |status: &Status| {
        (status.standing, &status.members) != (asked.standing, &asked.members) || lost(status)
    };
    tokio::select! {
        () = sleep(pace) => Ok(false),
        // Cancel-safe: waits for an event value.
        other = consensus.wait_for(other) => match other {
            Ok(status) => Ok(lost(&status)),
            Err(_closed) => Err(Closed("the etcd member")),
        },
    }
}

/// How long the own member takes to report its state.
async fn ask_own(status: &Status) -> Option<Duration> {
    let clients = status.clients.as_ref()?;
    let asked = Instant::now();
    timeout(ANSWER, clients.ping()).await.ok()?.ok()?;
    Some(asked.elapsed())
}

fn probed(
    status: &Status,
    id: MemberId,
    connected: Option<&BTreeSet<MemberId>>,
    reported: Option<(Duration, v1::ConsensusMember)>,
) -> Probed {
    let reported = reported.map(|(took, reported)| {
        let has = reported.applied_index.min(status.index);
        // Of an empty log, everybody has everything.
        let share = has.saturating_mul(100).checked_div(status.index).unwrap_or(100);
        Reported {
            took,
            behind: status.index - has,
            share: u8::try_from(share).unwrap_or(100),
            db_size: reported.db_bytes,
            reaches: reported.reach.map(|reach| reach.members),
        }
    });
    Probed { connected: connected.map(|connected| connected.contains(&id)), reported }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reported(applied_index: u64) -> Option<(Duration, v1::ConsensusMember)> {
        let reported = v1::ConsensusMember { applied_index, db_bytes: 7, ..Default::default() };
        Some((Duration::from_millis(3), reported))
    }

    #[test]
    fn a_member_is_behind_by_what_it_has_not_applied() {
        let status = Status { index: 200, ..Status::default() };
        let connected = BTreeSet::from([MemberId(1)]);
        let late = probed(&status, MemberId(1), Some(&connected), reported(50));
        assert_eq!(late.connected, Some(true));
        let late = late.reported.unwrap();
        assert_eq!((late.behind, late.share, late.db_size), (150, 25, 7));
        // It answered after we looked, and is further than we were then.
        let ahead = probed(&status, MemberId(1), None, reported(201));
        assert_eq!(
            ahead.reported.map(|reported| (reported.behind, reported.share)),
            Some((0, 100))
        );
    }

    #[tokio::test(start_paused = true)]
    async fn connections_count_for_a_while_and_for_the_members_that_they_name() {
        let member = |number: u64| Member {
            id: MemberId(number),
            name: number.to_string(),
            peer_url: String::new(),
            learner: false,
        };
        let three: Vec<_> = (1..=3).map(member).collect();
        let to = (1..=3).map(MemberId).collect();
        let known = Connections { at: Instant::now(), to };
        assert!(known.count(&three));
        let four: Vec<_> = (1..=4).map(member).collect();
        assert!(!known.count(&four));
        sleep(CONNECTIONS_MAX).await;
        assert!(!known.count(&three));
    }

    #[test]
    fn a_silent_member_is_shown_as_etcd_reports_it() {
        let gone = probed(&Status::default(), MemberId(2), Some(&BTreeSet::new()), None);
        assert_eq!(gone, Probed { connected: Some(false), reported: None });
        let empty = probed(&Status::default(), MemberId(2), None, reported(0)).reported.unwrap();
        assert_eq!((empty.behind, empty.share), (0, 100));
    }

    #[tokio::test(start_paused = true)]
    async fn what_was_learned_goes_with_the_member_that_learned_it() {
        let (_orders, ordered) = watch::channel(None);
        let root = polis_base::files::Root::live();
        let consensus = polis_control::consensus::Service::new(
            polis_control::consensus::Config::live(&root),
            ordered,
        );
        let ((_nodes, nodes), (_own, credentials)) = (watch::channel(None), watch::channel(None));
        let service = Service {
            consensus: consensus.status(),
            members: consensus.members(),
            nodes,
            credentials,
            port: 0,
        };
        let learned = watch::Sender::new(Learned::from([(MemberId(2), Probed::default())]));
        let mut shown = learned.subscribe();
        let (ctx, handles) = Context::for_test();
        ctx.spawn("members", polis_runtime::supervisor::Policy::forever(), move |ctx| {
            service.clone().run(ctx, learned.clone())
        });
        timeout(PACE, shown.wait_for(Learned::is_empty)).await.unwrap().unwrap();
        handles.cancel().await;
    }

    #[tokio::test(start_paused = true)]
    async fn a_member_that_is_added_is_asked_at_once() {
        let member = |number: u64| Member {
            id: MemberId(number),
            name: number.to_string(),
            peer_url: String::new(),
            learner: number == 4,
        };
        let three = Status { members: (1..=3).map(member).collect(), ..Status::default() };
        let status = watch::Sender::new(three.clone());
        let mut consensus = status.subscribe();
        let begun = Instant::now();
        outdated(&mut consensus, &three).await.unwrap();
        assert_eq!(begun.elapsed(), PACE);
        let four = Status { index: 7, members: (1..=4).map(member).collect(), ..three.clone() };
        status.send_replace(four.clone());
        outdated(&mut consensus, &three).await.unwrap();
        assert_eq!(begun.elapsed(), PACE);
        outdated(&mut consensus, &four).await.unwrap();
        assert_eq!(begun.elapsed(), PACE + PACE_LEARNING);
    }

    #[tokio::test(start_paused = true)]
    async fn a_lost_leader_makes_the_connections_unknown_and_a_new_one_does_not() {
        let led =
            |leader: Option<u64>| Status { leader: leader.map(MemberId), ..Status::default() };
        let status = watch::Sender::new(led(Some(1)));
        let mut consensus = status.subscribe();
        status.send_replace(led(None));
        assert!(outdated(&mut consensus, &led(Some(1))).await.unwrap());
        status.send_replace(led(Some(2)));
        assert!(outdated(&mut consensus, &led(Some(1))).await.unwrap());
        assert!(!outdated(&mut consensus, &led(None)).await.unwrap());

        let connected = Probed { connected: Some(true), reported: None };
        let learned = watch::Sender::new(Learned::from([(MemberId(1), connected)]));
        forget_connections(&learned);
        assert_eq!(learned.borrow()[&MemberId(1)].connected, None);
    }
}
