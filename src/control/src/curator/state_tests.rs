//! Every request in every state of a node's record.

use proptest::prelude::*;

use super::*;

fn registration(join_key: u8) -> Registration {
    Registration {
        identity: Identity::new([7; 32]),
        join_key: [join_key; 32],
        tpm: true,
        labels: BTreeMap::new(),
        address: "192.0.2.1".to_owned(),
        name: None,
        now: 5,
        nonce: [9; 16],
        attestation: None,
    }
}

#[test]
fn the_newest_proof_of_a_machine_counts_and_no_news_changes_nothing() {
    let of = |at, key| {
        let keys = v1::TpmKeys { endorsement_key: vec![key], ..Default::default() };
        Some(v1::TpmAttestation { at, keys: Some(keys), ..Default::default() })
    };
    let proved = |at| of(at, 1);
    let with = |attestation| Request::Register(Registration { attestation, ..registration(1) });
    let put = |old, request| match step(old, request).unwrap() {
        Step::Put(node) | Step::Keep(node) | Step::Delete(node) => *node,
    };
    for state in [NodeState::New, NodeState::Standby] {
        let node = with_state(put(None, with(proved(1))), state);
        assert_eq!(node.attestation, proved(1));
        assert_eq!(put(Some(node.clone()), with(None)).attestation, proved(1), "{state:?}");
        assert_eq!(put(Some(node.clone()), with(proved(2))).attestation, proved(2), "{state:?}");
        // Another TPM proves nothing once an operator has approved the machine.
        let other = put(Some(node), with(of(3, 2))).attestation;
        let expected = if state == NodeState::New { of(3, 2) } else { proved(1) };
        assert_eq!(other, expected, "{state:?}");
    }
}

#[test]
fn a_member_proves_each_boot_once_and_a_machine_without_a_tpm_leaves_no_fault() {
    let [_, _, _, _, (_, joined), _] = columns();
    let proof = |at, boot: &str, fault: &str| v1::TpmAttestation {
        at,
        boot_id: boot.to_owned(),
        fault: fault.to_owned(),
        ..Default::default()
    };
    let prove = |node: &v1::Node, proof| match step(Some(node.clone()), Request::Prove(proof)) {
        Ok(Step::Keep(node) | Step::Put(node)) => *node,
        other => panic!("{other:?}"),
    };
    let at = |node: &v1::Node| node.attestation.as_ref().map_or(0, |proof| proof.at);
    let none = v1::Node { tpm: false, attestation: None, ..joined.unwrap() };
    assert_eq!(at(&prove(&none, proof(1, "a", "no TPM"))), 0);
    let sealed = v1::Node { tpm: true, ..none.clone() };
    assert_eq!(at(&prove(&sealed, proof(1, "a", "no TPM"))), 1);
    let known = prove(&none, proof(2, "a", ""));
    assert_eq!(at(&known), 2);
    for again in [proof(3, "a", ""), proof(3, "a", "silent")] {
        assert_eq!(at(&prove(&known, again)), 2);
    }
    let failed = prove(&known, proof(4, "b", "silent"));
    assert_eq!(at(&failed), 4);
    assert_eq!(at(&prove(&failed, proof(5, "b", "silent"))), 4, "no write for each attempt");
    assert_eq!(at(&prove(&failed, proof(6, "b", ""))), 6);
}

fn commitment(key: u8) -> Commitment {
    Commitment {
        cluster_unlock_key: vec![key; 32],
        storage_kind: v1::StorageKind::Authenticated,
        recovery_key: vec![key; 32],
        boot_id: String::new(),
    }
}

fn consensus() -> v1::NodeRoles {
    let consensus_member = Some(v1::node_roles::ConsensusMember {});
    v1::NodeRoles { consensus_member, ..Default::default() }
}

fn roles(add: v1::NodeRoles) -> Request {
    Request::Roles { add, remove: v1::NodeRoles::default() }
}

/// The record in each column of the table.
fn columns() -> [(&'static str, Option<v1::Node>); 6] {
    let new = register(registration(1));
    let standby = with_state(new.clone(), NodeState::Standby);
    let up = commit(standby.clone(), NodeState::Standby, commitment(1)).unwrap();
    let up = v1::Node { roles: Some(consensus()), ..up };
    let joined = v1::Node { joined: true, ..up.clone() };
    let step = step(Some(joined.clone()), Request::Decommission).unwrap();
    let Step::Put(gone) = step else { panic!("it changes") };
    let columns = [Some(new), Some(standby), Some(up), Some(joined), Some(*gone)];
    let [new, standby, up, joined, gone] = columns;
    [
        ("absent", None),
        ("new", new),
        ("standby", standby),
        ("up", up),
        ("joined", joined),
        ("decommissioned", gone),
    ]
}

fn taint(key: &str, value: &str) -> v1::NodeTaint {
    let effect = v1::node_taint::Effect::NoSchedule.into();
    v1::NodeTaint { key: key.to_owned(), value: value.to_owned(), effect }
}

fn word(result: Result<Step, Refusal>) -> String {
    match result {
        Ok(Step::Keep(_)) => "same".to_owned(),
        Ok(Step::Put(node)) if node.joined => format!("{:?}, joined", node.state()),
        Ok(Step::Put(node)) => format!("{:?}", node.state()),
        Ok(Step::Delete(_)) => "gone".to_owned(),
        Err(refusal) => format!("!{refusal:?}"),
    }
}

#[test]
fn every_request_in_every_state_is_as_the_table_says() {
    let status = v1::NodeStatus { version: "1".to_owned(), ..Default::default() };
    let set = BTreeMap::from([("a".to_owned(), "b".to_owned())]);
    let rows = [
        ("register", Request::Register(registration(1))),
        ("register, other key", Request::Register(registration(2))),
        ("approve", Request::Approve),
        ("commit", Request::Commit(commitment(1))),
        ("commit, other keys", Request::Commit(commitment(2))),
        ("join", Request::Join),
        ("status", Request::Status(status)),
        ("prove", Request::Prove(v1::TpmAttestation { at: 7, ..Default::default() })),
        (
            "roles",
            roles(v1::NodeRoles {
                kubernetes_worker: Some(v1::node_roles::KubernetesWorker {}),
                ..Default::default()
            }),
        ),
        ("no roles", roles(v1::NodeRoles::default())),
        ("labels", Request::Labels { set, remove: Vec::new() }),
        ("taints", Request::Taints { set: vec![taint("a", "")], remove: Vec::new() }),
        ("name", Request::Name("web".to_owned())),
        ("no name", Request::Name(String::new())),
        ("network", Request::Network(v1::NetworkOrder { number: 7, ..Default::default() })),
        ("leave", Request::Leave(v1::Departure::default())),
        ("decommission", Request::Decommission),
        ("delete", Request::Delete { force: false }),
        ("delete, forced", Request::Delete { force: true }),
    ];
    let mut table = String::new();
    for (name, request) in rows {
        let cells = columns().map(|(_, node)| word(step(node, request.clone())));
        table += &format!("{name}: {}\n", cells.join(" | "));
    }
    insta::assert_snapshot!(table);
}

#[test]
fn a_decommissioned_node_keeps_no_secret() {
    let [.., (_, Some(gone))] = columns() else { panic!("the last column") };
    assert!(gone.cluster_unlock_key.is_empty() && gone.recovery_key.is_empty());
    assert_eq!(gone.roles, None);
}

#[test]
fn a_network_is_ordered_again_only_after_the_node_gave_it_up() {
    let [_, _, _, _, (_, joined), _] = columns();
    let order = |number, server: &str| v1::NetworkOrder {
        number,
        configuration: Some(v1::NetworkConfiguration {
            nameservers: vec![server.to_owned()],
            ..Default::default()
        }),
    };
    let number =
        |node: v1::Node, order: v1::NetworkOrder| match step(Some(node), Request::Network(order)) {
            Ok(Step::Keep(node) | Step::Put(node)) => node.network_order.unwrap().number,
            other => panic!("{other:?}"),
        };
    let joined = joined.unwrap();
    assert_eq!(number(joined.clone(), order(7, "192.0.2.1")), 7);
    let ordered = v1::Node { network_order: Some(order(7, "192.0.2.1")), ..joined };
    assert_eq!(number(ordered.clone(), order(8, "192.0.2.1")), 7, "a retry");
    assert_eq!(number(ordered.clone(), order(8, "192.0.2.2")), 8);
    let reported = |number, state: v1::NetworkState| {
        let network = v1::NetworkReport { number, state: state.into(), ..Default::default() };
        let status = v1::NodeStatus { network: Some(network), ..Default::default() };
        v1::Node { status: Some(status), ..ordered.clone() }
    };
    use v1::NetworkState::{Confirmed, Refused, Reverted, Trying};
    for (state, expected) in [(Trying, 7), (Confirmed, 7), (Reverted, 8), (Refused, 8)] {
        let again = number(reported(7, state), order(8, "192.0.2.1"));
        assert_eq!(again, expected, "{state:?}");
        // Its report about an earlier order does not count for this one.
        assert_eq!(number(reported(6, state), order(8, "192.0.2.1")), 7);
    }
}

#[test]
fn a_leaving_node_cannot_enter_etcd_and_leaving_ends_with_the_role() {
    let [_, _, _, _, (_, joined), _] = columns();
    let departure = v1::Departure { remove: Some(consensus()), ..Default::default() };
    let Ok(Step::Put(leaving)) = step(joined, Request::Leave(departure)) else {
        panic!("it changes")
    };
    assert!(leaving.leaving.is_some());
    let enters = step(Some(*leaving.clone()), roles(consensus()));
    assert_eq!(enters, Err(Refusal::Leaving));
    let taken = Request::Roles { add: v1::NodeRoles::default(), remove: consensus() };
    let Ok(Step::Put(out)) = step(Some(*leaving), taken) else { panic!("it changes") };
    assert_eq!((out.leaving, out.roles), (None, None));
    let Ok(Step::Put(back)) = step(Some(*out), roles(consensus())) else { panic!("it changes") };
    assert_eq!(back.roles, Some(consensus()));
}

#[test]
fn a_voter_of_a_former_cluster_is_one_until_it_loses_the_role() {
    let [_, _, _, _, (_, joined), _] = columns();
    let former = v1::Node { former_voter: true, roles: Some(consensus()), ..joined.unwrap() };
    let given = step(Some(former.clone()), roles(consensus()));
    assert!(matches!(given, Ok(Step::Keep(_))), "{given:?}");
    let taken = Request::Roles { add: v1::NodeRoles::default(), remove: consensus() };
    let Ok(Step::Put(out)) = step(Some(former), taken) else { panic!("it changes") };
    assert!(!out.former_voter);
    let Ok(Step::Put(back)) = step(Some(*out), roles(consensus())) else { panic!("it changes") };
    assert!(!back.former_voter && back.roles == Some(consensus()));
}

#[test]
fn what_an_operator_gives_a_node_that_waits_is_there_when_it_asks_again() {
    let labels = |key: &str| BTreeMap::from([(key.to_owned(), "b".to_owned())]);
    let asks = Registration { labels: labels("own"), ..registration(1) };
    let again = Registration { nonce: [8; 16], address: "192.0.2.2".to_owned(), ..asks.clone() };
    let label = Request::Labels { set: labels("given"), remove: vec!["own".to_owned()] };
    let requests = [
        Request::Register(asks),
        roles(consensus()),
        label,
        Request::Taints { set: vec![taint("gpu", "")], remove: Vec::new() },
        Request::Leave(v1::Departure::default()),
        Request::Register(again),
    ];
    let mut node = None;
    for request in requests {
        let Ok(Step::Put(next)) = step(node, request) else { panic!("it changes") };
        node = Some(*next);
    }
    let node = node.unwrap();
    assert_eq!((node.roles, node.labels), (Some(consensus()), labels("given")));
    assert_eq!(node.taints, [taint("gpu", "")]);
    assert_eq!(node.leaving, Some(v1::Departure::default()));
    assert_eq!(node.status.unwrap().external_address, "192.0.2.2");
}

#[test]
fn a_taint_is_replaced_and_removed_by_its_key_and_effect() {
    let [_, _, _, _, (_, joined), _] = columns();
    let of = |taint: v1::NodeTaint, effect: v1::node_taint::Effect| v1::NodeTaint {
        effect: effect.into(),
        ..taint
    };
    use v1::node_taint::Effect::{NoExecute, Unspecified};
    let changed = |node: v1::Node, set: &[v1::NodeTaint], remove: &[v1::NodeTaint]| {
        let request = Request::Taints { set: set.to_vec(), remove: remove.to_vec() };
        match step(Some(node), request) {
            Ok(Step::Put(node)) => *node,
            other => panic!("{other:?}"),
        }
    };
    let (gpu, db) = (taint("gpu", "a100"), taint("db", ""));
    let evicts = of(gpu.clone(), NoExecute);
    let set = [gpu.clone(), evicts.clone(), db.clone()];
    let node = changed(joined.unwrap(), &set, &[]);
    assert_eq!(node.taints, [db.clone(), gpu.clone(), evicts.clone()]);
    let request = Request::Taints { set: set.to_vec(), remove: vec![taint("none", "")] };
    assert!(matches!(step(Some(node.clone()), request), Ok(Step::Keep(_))), "the same again");
    let other = taint("gpu", "h100");
    let node = changed(node, std::slice::from_ref(&other), &[]);
    assert_eq!(node.taints, [db.clone(), other, evicts.clone()]);
    let one = changed(node.clone(), &[], &[of(taint("gpu", ""), NoExecute)]);
    assert_eq!(one.taints, [db.clone(), taint("gpu", "h100")]);
    let both = changed(node.clone(), &[], &[of(taint("gpu", ""), Unspecified)]);
    assert_eq!(both.taints, [db]);
    let many = (0..TAINTS_MAX).map(|number| taint(&format!("a{number}"), "")).collect();
    let many = Request::Taints { set: many, remove: Vec::new() };
    assert_eq!(step(Some(node), many), Err(Refusal::Taints));
}

#[test]
fn a_role_that_is_given_and_taken_is_taken() {
    let both = Request::Roles { add: consensus(), remove: consensus() };
    let [_, _, _, _, (_, joined), _] = columns();
    let Ok(Step::Put(node)) = step(joined, both) else { panic!("it changes") };
    assert_eq!(node.roles, None);
}

#[test]
fn a_controller_has_a_member_of_etcd_from_first_to_last() {
    let controller = v1::NodeRoles {
        kubernetes_controller: Some(v1::node_roles::KubernetesController {}),
        ..Default::default()
    };
    let both = v1::NodeRoles { consensus_member: consensus().consensus_member, ..controller };
    let taken = |remove| Request::Roles { add: v1::NodeRoles::default(), remove };
    let [_, _, (_, standby), _, (_, joined), (_, gone)] = columns();
    // Both at once, one after the other, and back; never the controller alone.
    assert_eq!(step(standby.clone(), roles(controller)), Err(Refusal::NoMember));
    assert!(matches!(step(standby, roles(both)), Ok(Step::Put(_))));
    let Ok(Step::Put(node)) = step(joined, roles(controller)) else { panic!("it changes") };
    assert_eq!(step(Some(*node.clone()), taken(consensus())), Err(Refusal::Controls));
    let Ok(Step::Put(out)) = step(Some(*node.clone()), taken(both)) else { panic!("it changes") };
    assert_eq!(out.roles, None);
    let Ok(Step::Put(member)) = step(Some(*node), taken(controller)) else { panic!("it changes") };
    assert_eq!(member.roles, Some(consensus()));
    assert_eq!(step(gone, roles(controller)), Err(Refusal::Decommissioned));
}

fn any_request() -> impl Strategy<Value = Request> {
    prop_oneof![
        (0..3_u8).prop_map(|key| Request::Register(registration(key))),
        Just(Request::Approve),
        (0..3_u8).prop_map(|key| Request::Commit(commitment(key))),
        Just(Request::Join),
        Just(Request::Status(v1::NodeStatus::default())),
        Just(roles(consensus())),
        "[mn]?".prop_map(Request::Name),
        Just(Request::ForgetRecoveryKey),
        Just(Request::Leave(v1::Departure::default())),
        Just(Request::Stay),
        Just(Request::Decommission),
        any::<bool>().prop_map(|force| Request::Delete { force }),
    ]
}

proptest! {
    #[test]
    fn a_life_only_goes_forwards_and_keys_in_use_stay(
        requests in prop::collection::vec(any_request(), 0..40)
    ) {
        let mut node: Option<v1::Node> = None;
        for request in requests {
            let before = node.clone();
            let forgets = request == Request::ForgetRecoveryKey;
            match step(node.clone(), request) {
                Ok(Step::Put(next)) => node = Some(*next),
                Ok(Step::Delete(_)) => node = None,
                Ok(Step::Keep(same)) => prop_assert_eq!(Some(&*same), node.as_ref()),
                Err(_) => {}
            }
            let (Some(before), Some(after)) = (before, &node) else { continue };
            prop_assert!(before.state <= after.state);
            prop_assert!(!before.joined || after.joined);
            if before.joined && after.state() == NodeState::Up {
                prop_assert_eq!(&before.cluster_unlock_key, &after.cluster_unlock_key);
                prop_assert_eq!(&before.join_key, &after.join_key);
                prop_assert!(forgets || before.recovery_key == after.recovery_key);
            }
            if after.state() == NodeState::Decommissioned {
                prop_assert_eq!(&after.roles, &None);
                prop_assert!(after.cluster_unlock_key.is_empty());
            }
        }
    }
}
