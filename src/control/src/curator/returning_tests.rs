//! A node whose certificate ended while it was off: its requests in every state of its record.

use proptest::prelude::*;

use super::*;

fn asks(boot: &str, nonce: u8) -> Return {
    Return {
        boot_id: boot.to_owned(),
        nonce: [nonce; 16],
        address: "192.0.2.1".to_owned(),
        now: 100,
        attestation: None,
    }
}

fn returned(boot: &str) -> Request {
    Request::Returned { boot_id: boot.to_owned() }
}

fn node(state: NodeState) -> v1::Node {
    let joined = state == NodeState::Up;
    v1::Node { public_key: vec![7; 32], state: state.into(), joined, ..Default::default() }
}

fn consensus() -> v1::NodeRoles {
    let consensus_member = Some(v1::node_roles::ConsensusMember {});
    v1::NodeRoles { consensus_member, ..Default::default() }
}

/// The record after a request that is not refused.
fn after(node: v1::Node, request: Request) -> v1::Node {
    match step(Some(node), request) {
        Ok(Step::Put(node) | Step::Keep(node)) => *node,
        other => panic!("{other:?}"),
    }
}

#[test]
fn only_a_node_that_is_up_asks_and_only_an_approved_boot_returns() {
    let refusals = [
        (NodeState::New, Refusal::NotUp),
        (NodeState::Standby, Refusal::NotUp),
        (NodeState::Decommissioned, Refusal::Decommissioned),
    ];
    for (state, refusal) in refusals {
        for request in [Request::Return(asks("a", 1)), returned("a")] {
            assert_eq!(step(Some(node(state)), request.clone()), Err(refusal.clone()));
            assert_eq!(step(None, request), Err(Refusal::Unknown));
        }
    }
    let up = node(NodeState::Up);
    assert_eq!(step(Some(up.clone()), returned("a")), Err(Refusal::NotApproved));
    let nothing = step(Some(up.clone()), Request::Approve);
    assert!(matches!(nothing, Ok(Step::Keep(_))), "{nothing:?}");
    let asked = after(up, Request::Return(asks("a", 1)));
    assert_eq!(step(Some(asked.clone()), returned("a")), Err(Refusal::NotApproved));
    let approved = after(asked, Request::Approve);
    let same = step(Some(approved.clone()), returned("a"));
    assert_eq!(same, Ok(Step::Keep(Box::new(approved.clone()))), "it stays as it is");
    for other in ["b", ""] {
        assert_eq!(step(Some(approved.clone()), returned(other)), Err(Refusal::NotApproved));
    }
    let home = after(approved.clone(), Request::Status(v1::NodeStatus::default()));
    assert_eq!(home.returning, None, "it came by a certificate");
    assert_eq!(step(Some(home), returned("a")), Err(Refusal::NotApproved));
    assert_eq!(after(approved, Request::Decommission).returning, None);
}

#[test]
fn another_boot_ends_the_approval_and_the_same_one_writes_only_what_changed() {
    let first = after(node(NodeState::Up), Request::Return(asks("a", 1)));
    let again = Return { now: 200, ..asks("a", 2) };
    let polled = step(Some(first.clone()), Request::Return(again.clone()));
    assert!(matches!(polled, Ok(Step::Keep(_))), "a write for each question: {polled:?}");
    let moved = Return { address: "192.0.2.9".to_owned(), ..again };
    let moved = after(first, Request::Return(moved));
    let returning = moved.returning.clone().unwrap();
    assert_eq!((&*returning.address, returning.asked_at), ("192.0.2.9", 100));
    assert_eq!(returning.nonce, [1; 16]);

    let approved = after(moved, Request::Approve);
    let other = after(approved, Request::Return(asks("b", 3)));
    let returning = other.returning.clone().unwrap();
    assert_eq!((&*returning.boot_id, returning.approved), ("b", false));
    assert_eq!(returning.nonce, [3; 16]);
    // The former one is another request by now.
    let back = after(other, Request::Return(asks("a", 4))).returning.unwrap();
    assert_eq!((&*back.boot_id, back.approved, back.nonce), ("a", false, vec![4; 16]));
}

#[test]
fn a_consensus_member_neither_asks_nor_returns_and_a_node_that_asks_does_not_become_one() {
    let voter = v1::Node { roles: Some(consensus()), ..node(NodeState::Up) };
    let renews = Err(Refusal::Returning(Refused::RenewsItself));
    assert_eq!(step(Some(voter.clone()), Request::Return(asks("a", 1))), renews);
    let approved = after(node(NodeState::Up), Request::Return(asks("a", 1)));
    let approved = after(approved, Request::Approve);
    let returning = approved.returning.clone();
    let slipped = v1::Node { returning, ..voter };
    assert_eq!(step(Some(slipped), returned("a")), renews);

    let remove = v1::NodeRoles::default();
    let gives = |add| Request::Roles { add, remove };
    let asks = Err(Refusal::Returning(Refused::Asks));
    assert_eq!(step(Some(approved.clone()), gives(consensus())), asks);
    let worker = v1::NodeRoles {
        kubernetes_worker: Some(v1::node_roles::KubernetesWorker {}),
        ..Default::default()
    };
    let approved = after(approved, gives(worker));
    assert!(approved.returning.is_some());
    let home = after(approved, Request::Status(v1::NodeStatus::default()));
    assert!(after(home, gives(consensus())).roles.unwrap().consensus_member.is_some());
}

#[test]
fn an_operator_sees_the_request_without_its_boot_and_only_the_same_tpm_proves_more_afterwards() {
    let proof = |at, key, boot: &str| {
        let keys = v1::TpmKeys { endorsement_key: vec![key], ..Default::default() };
        let boot_id = boot.to_owned();
        v1::TpmAttestation { at, keys: Some(keys), boot_id, ..Default::default() }
    };
    let asks = |attestation| Request::Return(Return { attestation, ..asks("secret", 1) });
    let kept = |node: &v1::Node| node.returning.clone().unwrap().attestation.map(|it| it.at);
    let member = v1::Node { attestation: Some(proof(1, 1, "old")), ..node(NodeState::Up) };
    let asked = after(member, asks(None));
    assert_eq!(kept(&asked), None, "the proof of an earlier boot is none of this one");
    let asked = after(asked, asks(Some(proof(2, 1, "secret"))));
    let asked = after(after(asked, asks(None)), asks(Some(proof(3, 2, "secret"))));
    assert_eq!(kept(&asked), Some(3), "the newest proof counts until an operator decides");
    let approved = after(asked, Request::Approve);
    assert_eq!(kept(&after(approved.clone(), asks(Some(proof(4, 1, "secret"))))), Some(3));
    assert_eq!(kept(&after(approved.clone(), asks(Some(proof(5, 2, "secret"))))), Some(5));

    let shown = returning::as_shown(&approved);
    assert_eq!((shown.nonce, shown.attestation), (vec![1; 16], Some(proof(3, 2, ""))));
    let view = format!("{:?}", returning::shown(approved.returning));
    assert!(view.contains("approved: true") && !view.contains("secret"), "{view}");
}

fn any_request() -> impl Strategy<Value = Request> {
    prop_oneof![
        "[ab]".prop_map(|boot| Request::Return(asks(&boot, 1))),
        "[ab]".prop_map(|boot| returned(&boot)),
        Just(Request::Approve),
        Just(Request::Status(v1::NodeStatus::default())),
        Just(Request::Join),
        Just(Request::Roles { add: consensus(), remove: v1::NodeRoles::default() }),
        Just(Request::Roles { add: v1::NodeRoles::default(), remove: consensus() }),
    ]
}

proptest! {
    #[test]
    fn no_boot_returns_that_was_not_approved_itself(
        requests in prop::collection::vec(any_request(), 0..40)
    ) {
        let mut record = node(NodeState::Up);
        // The boot that asked last, and the one that was approved.
        let (mut asked, mut approved) = (None::<String>, None::<String>);
        for request in requests {
            let result = step(Some(record.clone()), request.clone());
            let is_voter = record.roles.is_some();
            match &request {
                Request::Return(of) if !is_voter => {
                    if asked.as_ref() != Some(&of.boot_id) {
                        approved = None;
                    }
                    asked = Some(of.boot_id.clone());
                }
                Request::Approve => approved.clone_from(&asked),
                Request::Status(_) => (asked, approved) = (None, None),
                Request::Returned { boot_id } => {
                    let may = !is_voter && approved.as_ref() == Some(boot_id);
                    prop_assert_eq!(result.is_ok(), may);
                }
                _other => {}
            }
            if let Ok(Step::Put(next) | Step::Keep(next)) = result {
                record = *next;
            }
        }
    }
}
