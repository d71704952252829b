//! The state of a cluster, and what keeps it from being healthy.

use polis_proto::v1;

use super::{consensus, id, info, node};
use crate::cluster::status::Status;
use crate::node::View;
use polis_wire::identity::NodeId;

#[test]
fn disks_that_are_lacking_are_named_and_the_cluster_is_healthy_all_the_same() {
    let with = |digit, mirror: &str, volumes: &[(&str, &str, &str)]| {
        let mut node = node(digit, v1::NodeState::Up, v1::NodeHealth::Healthy);
        let status = node.status.get_or_insert_default();
        status.mirror = mirror.to_owned();
        let report = |(name, state, cause): &(&str, &str, &str)| v1::VolumeReport {
            name: (*name).to_owned(),
            state: (*state).to_owned(),
            cause: (*cause).to_owned(),
        };
        status.volumes = volumes.iter().map(report).collect();
        node
    };
    let shown = |nodes: &[v1::NodeInfo]| {
        let consensus = v1::ConsensusStatus {
            leader: 1,
            members: consensus().members.into_iter().take(1).collect(),
            ..consensus()
        };
        let status = Status::of(&info(), nodes, &consensus);
        assert!(status.healthy, "{:?}", status.problems);
        status.document().unwrap().render(crate::output::Format::Table).unwrap()
    };
    let whole = with(1, "whole on vda and vdb", &[("db", "ready", ""), ("log", "starting", "")]);
    assert!(!shown(&[whole]).contains("disks"));
    for (mirror, volumes, says) in [
        ("only on vda: replace the other disk", &[][..], ": mirror only on vda: replace"),
        ("whole on vda and vdb; vdb fails reads", &[], ": mirror whole on vda and vdb; vdb"),
        ("", &[("db", "failed", "its disk is missing")], ": volume db failed: its disk is missing"),
    ] {
        let text = shown(&[with(1, mirror, volumes)]);
        assert!(text.contains(&format!("disks    {}{says}", id(1))), "{text}");
    }
}

#[test]
fn a_full_database_is_a_problem_with_the_next_step() {
    use v1::{NodeHealth::*, NodeState::*};
    let nodes = [node(1, Up, Healthy), node(2, Up, Healthy)];
    let consensus = v1::ConsensusStatus { alarms: vec!["NOSPACE".to_owned()], ..consensus() };
    let status = Status::of(&info(), &nodes, &consensus);
    assert!(status.problems.iter().any(|it| it == "etcd raises NOSPACE"), "{:?}", status.problems);
    let text = status.document().unwrap().render(crate::output::Format::Table).unwrap();
    assert!(text.contains("\nfull etcd "), "{text}");
    assert!(text.contains("the members make room within minutes"), "{text}");
    assert!(text.contains("docs/consensus.md"), "{text}");
}

#[test]
fn different_data_of_members_is_a_problem_with_the_next_step() {
    use v1::{NodeHealth::*, NodeState::*};
    let alarms = vec!["NOSPACE".to_owned(), "CORRUPT".to_owned()];
    let nodes = [node(1, Up, Healthy), node(2, Up, Healthy)];
    let status = Status::of(&info(), &nodes, &v1::ConsensusStatus { alarms, ..consensus() });
    let [.., full, differs] = &status.problems[..] else { panic!("{:?}", status.problems) };
    assert_eq!(full, "etcd raises NOSPACE");
    assert!(differs.starts_with("etcd raises CORRUPT: members have different data"), "{differs}");
    let text = status.document().unwrap().render(crate::output::Format::Table).unwrap();
    assert!(text.contains("other data  etcd does not say whose data is wrong"), "{text}");
    assert!(text.contains("docs/disaster.md"), "{text}");
}

#[test]
fn a_node_with_the_role_and_no_member_and_one_on_its_way_out_are_named() {
    use v1::{NodeHealth::*, NodeState::*};
    let leaving = v1::NodeInfo { leaving: true, ..node(4, Up, Healthy) };
    let nodes = [node(1, Up, Healthy), node(3, Up, Healthy), leaving, node(5, New, Absent)];
    let members = consensus().members[..1].to_vec();
    let status = Status::of(&info(), &nodes, &v1::ConsensusStatus { members, ..consensus() });
    let [enters, leaves] = &status.problems[..] else { panic!("{:?}", status.problems) };
    assert!(enters.starts_with(&format!("{} has the role consensus member", id(3))), "{enters}");
    assert!(enters.ends_with("remove the role and add it again"), "{enters}");
    assert_eq!(*leaves, format!("{} is leaving etcd", id(4)));

    // Changing the roles does not help a node that is off.
    let nodes = [node(1, Up, Healthy), node(3, Up, Late)];
    let members = consensus().members[..1].to_vec();
    let status = Status::of(&info(), &nodes, &v1::ConsensusStatus { members, ..consensus() });
    assert!(
        status.problems.iter().any(|problem| problem.ends_with("once it is back")),
        "{:?}",
        status.problems
    );
}

#[test]
fn unsaved_recovery_keys_are_listed_and_not_a_problem() {
    use crate::output::Format;
    use v1::{NodeHealth::*, NodeState::*};
    let unsaved = |digit| v1::NodeInfo { recovery_key_unsaved: true, ..node(digit, Up, Healthy) };
    let members = consensus().members[..1].to_vec();
    let consensus = v1::ConsensusStatus { members, ..consensus() };
    let shown = |nodes: &[v1::NodeInfo]| {
        let status = Status::of(&info(), nodes, &consensus);
        status.document().unwrap().render(Format::Table).unwrap()
    };
    let worker = |digit| v1::NodeInfo { roles: None, ..unsaved(digit) };
    insta::assert_snapshot!(shown(&[unsaved(1), worker(2), worker(3)]), @r"
    cluster   cluster.internal
    state     healthy
    leader    polis-01
    etcd      1 voter; the loss of one stops the cluster
    recovery  recovery keys unsaved on 3 nodes: `polisctl node recovery-key show polis-01010101010101010101010101010101`

    NODE                                    STATE  HEALTH   ROLES             ADDRESS    VERSION  LAST HEARTBEAT
    polis-01010101010101010101010101010101  up     healthy  consensus-member  192.0.2.1  0.1.0    1.2 s ago
    polis-02020202020202020202020202020202  up     healthy  -                 192.0.2.2  0.1.0    1.2 s ago
    polis-03030303030303030303030303030303  up     healthy  -                 192.0.2.3  0.1.0    1.2 s ago
    ");
    assert!(!shown(&[node(1, Up, Healthy)]).contains("recovery"));
}

#[test]
fn status_lists_what_keeps_the_cluster_from_being_healthy() {
    use crate::output::Format;
    use v1::{NodeHealth::*, NodeState::*};
    let nodes = [node(1, Up, Healthy), node(2, Up, Late), node(3, New, Absent)];
    let status = Status::of(&info(), &nodes, &consensus());
    insta::assert_snapshot!(status.document().unwrap().render(Format::Table).unwrap(), @r"
    cluster  cluster.internal
    state    polis-02020202020202020202020202020202: heartbeat overdue
             the etcd member of polis-02020202020202020202020202020202 is learning
    leader   polis-01
    etcd     1 voter, 1 learning; the loss of one stops the cluster
    overdue  switch it on; if its machine is lost:
             `polisctl node delete polis-02020202020202020202020202020202 --force`
    waiting  `polisctl node approve polis-03030303030303030303030303030303`

    NODE                                    STATE  HEALTH   ROLES             ADDRESS    VERSION  LAST HEARTBEAT
    polis-01010101010101010101010101010101  up     healthy  consensus-member  192.0.2.1  0.1.0    1.2 s ago
    polis-02020202020202020202020202020202  up     late     consensus-member  192.0.2.2  0.1.0    1.2 s ago
    polis-03030303030303030303030303030303  new    absent   consensus-member  192.0.2.3  0.1.0    1.2 s ago
    ");
    let whole = Status::of(
        &info(),
        &nodes[..1],
        &v1::ConsensusStatus { members: consensus().members[..1].to_vec(), ..consensus() },
    );
    assert!(whole.healthy, "{:?}", whole.problems);
    insta::assert_snapshot!(whole.document().unwrap().render(Format::Yaml).unwrap(), @r#"
    cluster_domain: cluster.internal
    etcd:
      alarms: []
      cluster_id: abc
      leader: "1"
      members:
      - answers: true
        applied_index: 420
        db_bytes: 5242880
        db_used_bytes: 1048576
        follows: "1"
        id: "1"
        index: 421
        leader: true
        name: null
        node_id: polis-01010101010101010101010101010101
        peer_urls:
        - https://polis-01:7834
        role: voter
        snapshots: null
        told_age_ms: 0
      quota_bytes: 2147483648
      revision: 77
      term: 4
      tolerates: 0
    healthy: true
    leader: polis-01
    nodes:
    - address: "192.0.2.1"
      boot_id: ""
      fingerprint: 72cd6e8422c407fb6d098690f1130b7ded7ec2f7f5e1d30bd9d521f015363793
      health: healthy
      heartbeat_age_ms: 1200
      id: polis-01010101010101010101010101010101
      image: ""
      key_keeper: unspecified
      labels: {}
      name: null
      recovery_key_unsaved: false
      registered_at: "2023-11-14T22:13:20Z"
      roles:
      - consensus-member
      state: up
      storage: authenticated
      tpm: false
      version: "0.1.0"
    problems: []
    refused: []
    source: leader
    "#);
}

#[test]
fn a_new_leader_does_not_call_healthy_nodes_never_heard_of() {
    use crate::output::Format;
    use v1::{NodeHealth::*, NodeState::*};
    let silent = v1::NodeInfo { heartbeat_age_ms: -1, ..node(1, Up, Unknown) };
    let consensus =
        v1::ConsensusStatus { members: consensus().members[..1].to_vec(), ..consensus() };
    let status = Status::of(&info(), &[silent], &consensus);
    assert!(!status.healthy);
    let text = status.document().unwrap().render(Format::Table).unwrap();
    assert!(text.contains("health unknown, no heartbeat since the leader changed"), "{text}");
    assert!(!text.contains("never") && text.contains("no heartbeat yet"), "{text}");
}

#[test]
fn a_voter_of_the_cluster_before_a_snapshot_is_not_said_to_continue_by_itself() {
    use crate::output::Format;
    use v1::{NodeHealth::*, NodeState::*};
    let consensus =
        v1::ConsensusStatus { members: consensus().members[..1].to_vec(), ..consensus() };
    let printed = |former_voter| {
        let second = v1::NodeInfo { former_voter, ..node(2, Up, Late) };
        let status = Status::of(&info(), &[node(1, Up, Healthy), second], &consensus);
        status.document().unwrap().render(Format::Table).unwrap()
    };
    let ordinary = printed(false);
    assert!(ordinary.contains("continues once it is back"), "{ordinary}");
    assert!(!ordinary.contains("former voter"), "{ordinary}");
    let text = printed(true);
    assert!(!text.contains("continues") && !text.contains("switch it on"), "{text}");
    let id = id(2);
    for wanted in [
        &format!("{id} was a voter before the cluster was restored"),
        "former voter",
        &format!("`polisctl node delete {id} --force`"),
        &format!("`polisctl node roles {} --remove consensus-member`", &id[..14]),
        "`polisctl parameters register`",
    ] {
        assert!(text.contains(wanted), "{wanted}: {text}");
    }
}

#[test]
fn a_node_that_asks_for_a_new_certificate_waits_for_approval_and_is_not_given_up() {
    use crate::output::Format;
    use v1::{NodeHealth::*, NodeState::*};
    let printed = |returning| {
        let second = v1::NodeInfo { returning, ..node(2, Up, Late) };
        let status = Status::of(&info(), &[node(1, Up, Healthy), second], &consensus());
        status.document().unwrap().render(Format::Table).unwrap()
    };
    let approve = format!("`polisctl node approve {}`", id(2));
    let late = printed(None);
    assert!(late.contains("its machine is lost") && !late.contains(&approve), "{late}");
    let asks = printed(Some(v1::Returning::default()));
    assert!(!asks.contains("its machine is lost") && asks.contains(&approve), "{asks}");
    let approved = printed(Some(v1::Returning { approved: true, ..Default::default() }));
    assert!(!approved.contains(&approve), "{approved}");
}

#[test]
fn a_node_whose_kubernetes_does_not_serve_is_named_with_the_cause() {
    use crate::output::Format;
    use v1::{NodeHealth::*, NodeState::*};
    let with = |key: u8, workload: &str, drain: &str| {
        let mut info = node(key, Up, Healthy);
        let status = info.status.get_or_insert_default();
        workload.clone_into(&mut status.workload);
        drain.clone_into(&mut status.drain);
        info
    };
    let printed = |nodes: &[v1::NodeInfo]| {
        let status = Status::of(&info(), nodes, &consensus());
        status.document().unwrap().render(Format::Table).unwrap()
    };
    let nodes =
        [with(1, "ready", ""), with(2, "failed: dns: no port", ""), with(3, "ready", "drained")];
    let text = printed(&nodes);
    let two = node(2, Up, Healthy).id;
    let three = node(3, Up, Healthy).id;
    for line in ["Kubernetes  ready on 1 of 3 nodes", &format!("{two}: failed: dns: no port")] {
        assert!(text.contains(line), "{line}: {text}");
    }
    assert!(text.contains(&format!("{three}: ready; drained")), "{text}");
    assert!(View::of(&nodes[2]).fields().contains("Kubernetes    ready; drained"));
    assert!(!printed(&[node(1, Up, Healthy)]).contains("Kubernetes"));
}

#[test]
fn a_part_in_a_crash_loop_is_a_problem_with_its_last_words() {
    use v1::{NodeHealth::*, NodeState::*};
    let mut node = node(1, Up, Healthy);
    if let Some(status) = &mut node.status {
        "kubelet ends again and again: no swap".clone_into(&mut status.workload_crash_loop);
    }
    let consensus =
        v1::ConsensusStatus { members: consensus().members[..1].to_vec(), ..consensus() };
    let status = Status::of(&info(), &[node.clone()], &consensus);
    let said = "polis-01010101010101010101010101010101: kubelet ends again and again: no swap";
    assert_eq!(status.problems, [said]);
    assert!(!status.healthy);
    assert_eq!(crate::node::faults(&[View::of(&node)]), format!("{said}\n"));
}

#[test]
fn a_member_that_does_not_fit_the_attestation_policy_is_a_problem() {
    use v1::{NodeHealth::*, NodeState::*};
    let fault = "started with another system: register 11 (kernel image) is 08…, expected 07…";
    let node = v1::NodeInfo { attestation_fault: fault.to_owned(), ..node(1, Up, Healthy) };
    let consensus =
        v1::ConsensusStatus { members: consensus().members[..1].to_vec(), ..consensus() };
    let status = Status::of(&info(), std::slice::from_ref(&node), &consensus);
    let said = format!("polis-01010101010101010101010101010101: {fault}");
    assert_eq!((status.problems, status.healthy), (vec![said.clone()], false));
    assert_eq!(crate::node::faults(&[View::of(&node)]), format!("{said}\n"));
    let described = crate::node::described_view(&node).fields();
    assert!(described.contains(&format!("attestation   {fault}")), "{described}");
}

#[test]
fn a_machine_that_was_refused_is_shown_with_the_id_of_its_screen_and_the_cause() {
    use crate::output::Format;
    let key = [7; 32];
    let refused = v1::RefusedRegistration {
        public_key: key.to_vec(),
        address: "192.0.2.9".to_owned(),
        reason: "ticket-rotated".to_owned(),
        count: 3,
        last_at: 1_700_000_000,
    };
    let quiet = info();
    let info = v1::GetClusterInfoResponse { refused_registrations: vec![refused], ..info() };
    let status = Status::of(&info, &[], &consensus());
    let id = NodeId::from_public_key(&key).to_string();
    let document = status.document().unwrap();
    let text = document.render(Format::Table).unwrap();
    for expected in [id.as_str(), "192.0.2.9", "ticket-rotated", "3", "2023-11-14"] {
        assert!(text.contains(expected), "{expected}: {text}");
    }
    let value = document.value();
    assert_eq!(value["refused"][0]["id"], id.as_str());
    assert_eq!(value["refused"][0]["reason"], "ticket-rotated");
    assert_eq!(value["refused"][0]["last"], "2023-11-14T22:13:20Z");
    // Without a refused registration the section is left out.
    let quiet = Status::of(&quiet, &[], &consensus());
    assert!(!quiet.document().unwrap().render(Format::Table).unwrap().contains("REFUSED"));
}
