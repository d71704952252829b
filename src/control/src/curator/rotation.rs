//! The rotation of the authorities: its record, and which step is next.
//!
//! Every authority keeps its own steps (`pki::Authorities`); the record says that a rotation was
//! asked for, and when it ended.

use std::collections::BTreeSet;
use std::time::SystemTime;

use polis_proto::v1;
use polis_proto::v1::get_rotation_response::Step;
use tracing::info;

use super::store::{Error, Outcome, ROTATION, Store, authority};
use polis_wire::identity::NodeId;
use polis_wire::pki;

/// The leader's view of a node that is up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Node {
    /// Which one.
    pub(super) id: NodeId,
    /// It sends heartbeats, or the leader is too new to say that it does not.
    pub(super) answers: bool,
    /// It does not answer, and not for long: it may be on its way back.
    pub(super) returns: bool,
    /// Its certificate is of the CA that signs, and it keeps the CAs of now.
    pub(super) certificate: bool,
    /// Its member of etcd, if it has the role.
    pub(super) peer: Option<Member>,
    /// Its parts of Kubernetes use certificates of the authorities that sign; true without a role.
    pub(super) kubernetes: bool,
}

/// Which former authorities are still trusted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Leaving {
    /// One of those of Kubernetes.
    pub(super) kubernetes: bool,
    /// The CA of the cluster.
    pub(super) ca: bool,
    /// The authority of the peers.
    pub(super) peers: bool,
}

/// The leader's view of a member of etcd.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Member {
    /// It serves.
    pub(super) serves: bool,
    /// Its files name the authorities of now, and its certificate is of the one that signs.
    pub(super) written: bool,
    /// etcd was started with the authorities that its files name.
    pub(super) started: bool,
}

impl Node {
    /// Whether etcd misses its member, which may be on its way back.
    #[must_use]
    pub(super) fn is_missed(&self) -> bool {
        let starts = |member: Member| self.answers && !member.serves;
        self.peer.is_some_and(|member| starts(member) || self.returns)
    }

    /// Whether its member of etcd has been away for too long to be waited for.
    #[must_use]
    pub(super) fn stays_away(&self) -> bool {
        self.peer.is_some() && !self.answers && !self.returns
    }

    /// Whether its member of etcd serves with other authorities than its files name.
    #[must_use]
    pub(super) fn starts_late(&self) -> bool {
        self.peer.is_some_and(|member| member.serves && !member.started)
    }
}

/// How far a rotation is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Progress {
    /// The step that is not done; `Unspecified` if all are.
    pub(super) step: Step,
    /// The nodes that it waits for.
    pub(super) waits_for: Vec<NodeId>,
    /// The nodes that do not answer, and are not waited for.
    pub(super) away: Vec<NodeId>,
    /// The nodes whose members are away and may be on their way back: no other one starts again
    /// meanwhile.
    pub(super) missed: Vec<NodeId>,
}

/// How far a rotation is, by what the nodes say.
///
/// Kubernetes comes last: its programs take minutes, and one that fails keeps no other authority
/// from its end.
#[must_use]
pub(super) fn progress(nodes: &[Node], leaving: Leaving) -> Progress {
    let (answer, away): (Vec<_>, Vec<_>) = nodes.iter().partition(|node| node.answers);
    let without = |done: fn(&Node) -> bool| -> Vec<NodeId> {
        answer.iter().filter(|node| !done(node)).map(|node| node.id).collect()
    };
    let kubernetes = without(|node| node.kubernetes);
    let certificates = without(|node| node.certificate);
    let peers = without(|node| node.peer.is_none_or(|member| member.written));
    let starts = without(|node| node.peer.is_none_or(|member| member.started));
    let (step, waits_for) = if leaving.ca || !certificates.is_empty() {
        (Step::Certificates, certificates)
    } else if leaving.peers || !peers.is_empty() {
        (Step::Peers, peers)
    } else if !starts.is_empty() {
        (Step::Restarts, starts)
    } else if leaving.kubernetes || !kubernetes.is_empty() {
        (Step::Kubernetes, kubernetes)
    } else {
        (Step::Unspecified, Vec::new())
    };
    // A member that starts on a node that answers is waited for, too, and without a limit.
    let is_away = |node: &&Node| node.peer.is_some() && node.returns;
    let missed = nodes.iter().filter(|node| step == Step::Restarts && is_away(node));
    Progress {
        step,
        waits_for,
        away: away.iter().map(|node| node.id).collect(),
        missed: missed.map(|node| node.id).collect(),
    }
}

/// The nodes whose members are known to have a certificate of the next authority on their disks.
/// In etcd any node may have one: a node that loses its power right after that has only the former
/// one on its disk.
#[must_use]
pub(super) fn followed(nodes: &[Node]) -> BTreeSet<String> {
    let written = |node: &&Node| node.peer.is_some_and(|member| member.written);
    nodes.iter().filter(written).map(|node| node.id.to_string()).collect()
}

/// Which of the members in `due` starts again next, unless etcd misses one: the leader of etcd
/// hands over as it stops, so it is the last.
#[must_use]
pub(super) fn next_start(all: &[Node], due: &[NodeId], leader: Option<NodeId>) -> Option<NodeId> {
    if all.iter().any(Node::is_missed) {
        return None;
    }
    due.iter().copied().min_by_key(|id| Some(*id) == leader)
}

impl<S: pki::Store + Clone> Store<S> {
    /// The last rotation.
    ///
    /// # Errors
    ///
    /// [`Error`].
    pub async fn rotation(&self) -> Result<Option<v1::Rotation>, Error> {
        self.read(ROTATION).await
    }

    /// Begins a rotation, unless one goes on; returns it.
    ///
    /// # Errors
    ///
    /// [`Error`].
    pub async fn begin_rotation(&self, now: i64) -> Result<v1::Rotation, Error> {
        let begin = |old: Option<v1::Rotation>| {
            let old = old.unwrap_or(v1::Rotation { ended_at: 1, ..Default::default() });
            if old.ended_at == 0 {
                return Ok(Outcome::Keep(old));
            }
            let number = old.number + 1;
            let new = v1::Rotation { number, began_at: now, ..Default::default() };
            Ok(Outcome::Put(new, Vec::new(), Vec::new()))
        };
        self.update(ROTATION, begin).await
    }

    /// Notes that the starts of the rotation of this number wait for no voter that is away, for the
    /// next leader, which does not know how long one has been.
    ///
    /// # Errors
    ///
    /// [`Error`].
    pub async fn go_without_away(&self, number: u64) -> Result<(), Error> {
        let note = |old: Option<v1::Rotation>| {
            let old = old.unwrap_or_default();
            if old.number != number || old.ended_at != 0 || old.without_away {
                return Ok::<_, Error>(Outcome::Keep(old));
            }
            Ok(Outcome::Put(v1::Rotation { without_away: true, ..old }, Vec::new(), Vec::new()))
        };
        self.update(ROTATION, note).await.map(drop)
    }

    /// Notes that the rotation of this number has ended.
    ///
    /// # Errors
    ///
    /// [`Error`].
    pub async fn end_rotation(&self, number: u64, now: i64) -> Result<(), Error> {
        let end = |old: Option<v1::Rotation>| {
            let old = old.unwrap_or_default();
            if old.number != number || old.ended_at != 0 {
                return Ok::<_, Error>(Outcome::Keep(old));
            }
            info!(
                event = "rotated",
                rotation = number,
                "the rotation of the authorities has ended"
            );
            Ok(Outcome::Put(v1::Rotation { ended_at: now.max(1), ..old }, Vec::new(), Vec::new()))
        };
        self.update(ROTATION, end).await.map(drop)
    }

    /// Lets another CA sign, unless the rotation of this number has begun.
    ///
    /// # Errors
    ///
    /// [`Error::Pki`].
    pub async fn rotate(&self, number: u64, now: SystemTime) -> Result<(), Error> {
        if self.certificates().rotate(&authority(), number, now).await? {
            info!(rotation = number, "another CA signs the certificates of nodes and users");
        }
        Ok(())
    }

    /// Ends the trust in the CA before; returns whether there was such trust.
    ///
    /// # Errors
    ///
    /// [`Error::Pki`].
    pub async fn conclude(&self) -> Result<bool, Error> {
        Ok(self.certificates().conclude(&authority(), pki::Pin::None).await?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use polis_wire::pki::memory::Memory;

    fn node(seed: u8, peer: Option<[bool; 3]>) -> Node {
        let peer = peer.map(|[serves, written, started]| Member { serves, written, started });
        let id = NodeId::from_public_key(&[seed; 32]);
        Node { id, answers: true, returns: false, certificate: true, peer, kubernetes: true }
    }

    #[test]
    fn each_step_waits_for_the_nodes_that_answer() {
        let old = |seed| Node { certificate: false, ..node(seed, None) };
        let away = |node: Node| Node { answers: false, ..node };
        let voter = node(1, Some([true, true, true]));
        let all = Leaving { kubernetes: true, ca: true, peers: true };
        let last = Leaving::default();
        let both = progress(&[voter, old(2), away(old(3))], all);
        assert_eq!((both.step, both.waits_for), (Step::Certificates, vec![old(2).id]));
        assert_eq!(both.away, [old(3).id]);
        let one = progress(&[voter, away(old(3))], all);
        assert_eq!((one.step, one.waits_for), (Step::Certificates, vec![]));
        let written = node(4, Some([true, false, true]));
        let peers = progress(&[voter, written], Leaving { peers: true, ..last });
        assert_eq!((peers.step, peers.waits_for), (Step::Peers, vec![written.id]));
        let started = node(5, Some([true, true, false]));
        let starts = progress(&[voter, started, node(6, None)], last);
        assert_eq!((starts.step, starts.waits_for), (Step::Restarts, vec![started.id]));
        assert_eq!(starts.missed, []);
        let [returns, stays] = [true, false].map(|returns| Node { returns, ..away(voter) });
        let missed = |third| progress(&[started, third, away(old(3))], last).missed;
        assert_eq!(missed(returns), [voter.id], "no member starts again before it is back");
        assert_eq!(missed(stays), []);
        assert_eq!(missed(node(4, Some([false, true, true]))), [], "it starts, and is not away");
        let lacks = |seed| Node { kubernetes: false, ..node(seed, None) };
        for leaving in [Leaving { kubernetes: true, ..last }, last] {
            let programs = progress(&[voter, lacks(8), away(lacks(9))], leaving);
            assert_eq!((programs.step, programs.waits_for), (Step::Kubernetes, vec![lacks(8).id]));
        }
        // A member that starts says nothing of itself, so it is waited for.
        let silent = node(7, Some([false, false, false]));
        assert!(silent.is_missed() && !silent.starts_late() && started.starts_late());
        assert_eq!(progress(&[voter, silent], last).step, Step::Peers);
        assert_eq!(progress(&[voter], last), Progress::default());
        assert_eq!(progress(&[voter, away(silent)], last).step, Step::Unspecified);
    }

    #[test]
    fn no_member_starts_again_while_another_one_is_away_or_starts() {
        let late = [1, 2].map(|seed| node(seed, Some([true, true, false])));
        let due = late.map(|node| node.id);
        let next = |third: Node, leader| next_start(&[late[0], late[1], third], &due, leader);
        let serves = node(3, Some([true, true, true]));
        assert_eq!(next(serves, Some(due[0])), Some(due[1]), "the leader of etcd is the last");
        assert_eq!(next_start(&late, &due[..1], Some(due[0])), Some(due[0]));
        assert_eq!(next_start(&[serves], &[], None), None);
        let starts = node(3, Some([false, true, true]));
        let away = Node { answers: false, returns: true, ..serves };
        for missed in [starts, away] {
            assert_eq!(next(missed, None), None, "{missed:?}");
            assert!(!missed.stays_away(), "{missed:?}");
        }
        // A worker that is away is no member, and a voter that stays away keeps no authority.
        let (dead, worker) = (Node { returns: false, ..away }, Node { peer: None, ..away });
        for (passed, stays) in [(dead, true), (worker, false)] {
            assert!(next(passed, None).is_some(), "{passed:?}");
            assert_eq!(passed.stays_away(), stays, "{passed:?}");
        }
    }

    #[test]
    fn a_member_has_followed_once_it_has_told_of_its_files() {
        let written = node(1, Some([true, true, false]));
        let off = Node { answers: false, ..node(2, Some([true, true, true])) };
        let silent = node(3, Some([true, false, false]));
        let worker = node(4, None);
        let names = [written, off].map(|node| node.id.to_string());
        assert_eq!(followed(&[written, off, silent, worker]), BTreeSet::from(names));
    }

    #[tokio::test]
    async fn a_rotation_that_goes_on_is_the_answer_to_the_next_wish() {
        let store = Store::new(Memory::default());
        assert_eq!(store.rotation().await.unwrap(), None);
        let first = store.begin_rotation(100).await.unwrap();
        let begun = v1::Rotation { number: 1, began_at: 100, ..Default::default() };
        assert_eq!(first, begun);
        assert_eq!(store.begin_rotation(101).await.unwrap(), first);
        store.go_without_away(1).await.unwrap();
        let without = v1::Rotation { without_away: true, ..begun };
        assert_eq!(store.begin_rotation(101).await.unwrap(), without);
        store.end_rotation(1, 102).await.unwrap();
        store.end_rotation(1, 103).await.unwrap();
        assert_eq!(store.rotation().await.unwrap().unwrap().ended_at, 102);
        let second = store.begin_rotation(104).await.unwrap();
        assert_eq!((second.number, second.without_away), (2, false));
        store.go_without_away(1).await.unwrap();
        store.end_rotation(1, 105).await.unwrap();
        assert_eq!(store.rotation().await.unwrap().unwrap(), second, "an old leader's word");
    }
}
