//! The limits of what nodes and machines send: registrations that wait, changes of a record,
//! statuses and reports of calls.
//!
//! What this module does not do: limit the calls of all (`rpc`), or the proofs of TPMs
//! (`proving`).

use std::time::Duration;

use polis_proto::v1;
use prost::Message as _;
use tonic::Status;

use super::Handlers;
use crate::curator::attesting;
use crate::curator::budgets::Budgets;
use crate::curator::error::Error;
use crate::curator::reported;
use crate::curator::state::{self, Request as Change, Step};
use polis_wire::identity::NodeId;

/// The number of machines that may wait for approval: more than an operator reads through,
/// and few enough to do no harm.
const WAITING_MAX: usize = 1024;
// Each of them can prove its TPM.
const _: () = assert!(WAITING_MAX <= attesting::QUESTIONS_MAX);

/// The bytes of their records together. Every curator keeps them, and every watcher gets them:
/// the longest labels make one record as large as a hundred others.
const WAITING_BYTES_MAX: usize = 4 << 20;

/// Changes of its registration that a machine may make in a row: several times those of a start,
/// in which it proves its TPM to each leader anew.
const CHANGES_MAX: u32 = 12;

/// The time after which it may make one more. etcd keeps what was replaced for an hour: if all
/// records that may wait change as often, that is an eighth of its quota.
const CHANGES_PACE: Duration = Duration::from_secs(60);

impl Handlers {
    /// Whether the limits of pending registrations allow one more machine.
    pub(super) fn check_room(&self, id: NodeId) -> Result<(), Error> {
        let directory = self.0.directory.borrow();
        let nodes = directory.nodes().map(|(_, known)| known.node.as_ref());
        let (waiting, bytes) = pending(nodes);
        let full = waiting >= WAITING_MAX || bytes >= WAITING_BYTES_MAX;
        if full && directory.node(id).is_none() {
            return Err(Error::WaitingRoom { waiting, bytes });
        }
        Ok(())
    }

    /// Takes a change of its record from the budget of a machine, if it is known.
    pub(super) fn take_change(&self, id: NodeId, request: Change) -> Result<(), Error> {
        let known = self.0.directory.borrow().node(id).map(|known| v1::Node::clone(&known.node));
        match known {
            Some(known) => take_change(&self.0.audit.budgets, id, known, request),
            // The limits of pending registrations bound those.
            None => Ok(()),
        }
    }
}

/// Takes a request from the budget of a machine, which is kept beside those of nodes, if it changes
/// the record: a machine that only asks whether it was approved needs none.
fn take_change(calls: &Budgets, id: NodeId, known: v1::Node, request: Change) -> Result<(), Error> {
    let budget = calls.beside("registrations", CHANGES_MAX, CHANGES_PACE);
    if matches!(state::step(Some(known), request), Ok(Step::Put(_))) && !budget.take(id, 1) {
        return Err(Error::Registrations { max: CHANGES_MAX, seconds: CHANGES_PACE.as_secs() });
    }
    Ok(())
}

/// Takes the calls of a report from the budget of a node. A report without any takes one, too: the
/// log is read for each.
pub(super) fn take_calls(calls: &Budgets, node: NodeId, count: u32) -> Result<(), Status> {
    if calls.take(node, count.max(1)) {
        return Ok(());
    }
    Err(Status::resource_exhausted(format!(
        "a node reports at most {} calls at once, and one each {} s after that; it reports the \
         others later",
        reported::CALLS_MAX,
        reported::PACE.as_secs()
    )))
}

/// Takes one status from the budget of a node, which is kept beside that of its calls.
pub(super) fn take_status(calls: &Budgets, node: NodeId) -> Result<(), Status> {
    if reported::statuses(calls).take(node, 1) {
        return Ok(());
    }
    Err(Status::resource_exhausted(format!(
        "a node sends at most {} statuses at once, and one each {} s after that; it sends the \
         newest later",
        reported::STATUSES_MAX,
        reported::STATUS_PACE.as_secs()
    )))
}

/// The number of nodes that wait for approval, and the bytes of their records.
fn pending<'a>(nodes: impl Iterator<Item = &'a v1::Node>) -> (usize, usize) {
    nodes
        .filter(|node| node.state() == v1::NodeState::New)
        .fold((0, 0), |(count, bytes), node| (count + 1, bytes + node.encoded_len()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::curator::state::{Commitment, Registration};
    use polis_wire::identity::Identity;

    #[test]
    fn pending_machines_are_counted_with_the_bytes_of_their_records() {
        let labels = (0..64).map(|key| (format!("{key:064}"), "x".repeat(256))).collect();
        let large = v1::Node { state: v1::NodeState::New.into(), labels, ..Default::default() };
        let up = v1::Node { state: v1::NodeState::Up.into(), ..large.clone() };
        let nodes = vec![large.clone(); 250];
        let (waiting, bytes) = pending(nodes.iter().chain([&up]));
        assert_eq!((waiting, bytes), (250, 250 * large.encoded_len()));
        assert!(waiting < WAITING_MAX && bytes > WAITING_BYTES_MAX, "{bytes}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_node_sends_a_bounded_number_of_statuses_and_then_one_at_a_time() {
        let (budgets, id) = (reported::budgets(), NodeId::from_public_key(&[1; 32]));
        for _ in 0..reported::STATUSES_MAX {
            take_status(&budgets, id).unwrap();
        }
        let refused = take_status(&budgets, id).unwrap_err();
        assert_eq!(refused.code(), tonic::Code::ResourceExhausted);
        assert!(budgets.take(id, reported::CALLS_MAX), "it reports its calls all the same");
        take_status(&budgets, NodeId::from_public_key(&[2; 32])).unwrap();
        tokio::time::advance(reported::STATUS_PACE).await;
        take_status(&budgets, id).unwrap();
        assert!(take_status(&budgets, id).is_err());
    }

    #[tokio::test(start_paused = true)]
    async fn a_report_without_calls_costs_a_node_as_much_as_one_with_a_call() {
        let (budgets, id) = (reported::budgets(), NodeId::from_public_key(&[1; 32]));
        for _ in 0..reported::CALLS_MAX {
            take_calls(&budgets, id, 0).unwrap();
        }
        for count in [0, 1] {
            let refused = take_calls(&budgets, id, count).unwrap_err();
            assert_eq!(refused.code(), tonic::Code::ResourceExhausted, "{count}");
        }
        tokio::time::advance(reported::PACE).await;
        take_calls(&budgets, id, 1).unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn a_machine_that_waits_asks_as_often_as_it_likes_and_changes_its_record_seldom() {
        let (budgets, identity) = (reported::budgets(), Identity::new([7; 32]));
        let registration = Registration {
            identity,
            join_key: [1; 32],
            tpm: false,
            labels: std::collections::BTreeMap::new(),
            address: "192.0.2.1".to_owned(),
            name: None,
            now: 5,
            nonce: [9; 16],
            attestation: None,
        };
        let Ok(Step::Put(new)) = state::step(None, Change::Register(registration.clone())) else {
            panic!("a new machine has no record")
        };
        let new = *new;
        let take = |id, known: &v1::Node, request: &Change| {
            take_change(&budgets, id, known.clone(), request.clone())
        };
        let asks = Change::Register(registration.clone());
        let moved = Registration { address: "192.0.2.2".to_owned(), ..registration };
        let moves = Change::Register(moved);
        for _ in 0..CHANGES_MAX {
            take(identity.id, &new, &moves).unwrap();
        }
        let refused = take(identity.id, &new, &moves).unwrap_err();
        assert!(matches!(refused, Error::Registrations { .. }), "{refused}");
        assert_eq!(Status::from(refused).code(), tonic::Code::ResourceExhausted);
        take(identity.id, &new, &asks).unwrap();
        take(NodeId::from_public_key(&[2; 32]), &new, &moves).unwrap();
        // Approved, it may commit again and again, and each time replaces its keys.
        let approved = v1::Node { state: v1::NodeState::Standby.into(), ..new };
        let commits = Change::Commit(Commitment {
            cluster_unlock_key: vec![1; 32],
            storage_kind: v1::StorageKind::Encrypted,
            recovery_key: vec![2; 32],
            boot_id: String::new(),
        });
        assert!(take(identity.id, &approved, &commits).is_err());
        tokio::time::advance(CHANGES_PACE).await;
        take(identity.id, &approved, &commits).unwrap();
        assert!(take(identity.id, &approved, &commits).is_err());
    }
}
