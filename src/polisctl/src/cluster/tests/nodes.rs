//! What is shown of a node.

use polis_proto::v1;

use super::node;
use crate::node::View;
use crate::output::Document;

#[test]
fn a_node_that_cannot_serve_its_role_is_reported_below_the_list() {
    use v1::{NodeHealth::*, NodeState::*};
    let mut unfit = node(1, Up, Healthy);
    if let Some(status) = &mut unfit.status {
        "no programs\u{1b}[2J".clone_into(&mut status.workload_fault);
    }
    let nodes = [View::of(&unfit), View::of(&node(2, Up, Healthy))];
    let text = crate::node::faults(&nodes);
    let last = text.lines().last().unwrap();
    assert_eq!(last, "polis-01010101010101010101010101010101: no programs?[2J");
    assert_eq!(text.lines().count(), 1);
    assert!(nodes[0].fields().contains("no programs?[2J"));
}

#[test]
fn a_node_is_described_with_its_words() {
    use crate::output::Format;
    use v1::{NodeHealth::*, NodeState::*};
    let nodes = [View::of(&node(1, Up, Healthy))];
    insta::assert_snapshot!(crate::node::nodes_table(&nodes), @r"
    NODE                                    STATE  HEALTH   ROLES             ADDRESS    VERSION  LAST HEARTBEAT
    polis-01010101010101010101010101010101  up     healthy  consensus-member  192.0.2.1  0.1.0    1.2 s ago
    ");
    let view = crate::node::described_view(&node(1, New, Absent));
    let document = Document::new(&view, view.fields()).unwrap();
    insta::assert_snapshot!(document.render(Format::Table).unwrap(), @r"
    node          polis-01010101010101010101010101010101
    name          -
    state         new
    health        absent; last heartbeat 1.2 s ago
    roles         consensus-member
    address       192.0.2.1
    version       0.1.0
    image         -
    boot          -
    storage       authenticated
    disk key in   unspecified
    TPM           no
    recovery key  -
    labels        -
    registered    2023-11-14 22:13:20 UTC
    fingerprint   throw-blast-cage-follow
                  72cd6e8422c407fb6d098690f1130b7ded7ec2f7f5e1d30bd9d521f015363793
    ");
    insta::assert_snapshot!(document.render(Format::Json).unwrap(), @r#"
    {
      "address": "192.0.2.1",
      "boot_id": "",
      "fingerprint": "72cd6e8422c407fb6d098690f1130b7ded7ec2f7f5e1d30bd9d521f015363793",
      "health": "absent",
      "heartbeat_age_ms": 1200,
      "id": "polis-01010101010101010101010101010101",
      "image": "",
      "key_keeper": "unspecified",
      "labels": {},
      "name": null,
      "recovery_key_unsaved": false,
      "registered_at": "2023-11-14T22:13:20Z",
      "roles": [
        "consensus-member"
      ],
      "state": "new",
      "storage": "authenticated",
      "tpm": false,
      "version": "0.1.0",
      "words": "throw-blast-cage-follow"
    }
    "#);
}

#[test]
fn a_node_whose_address_another_machine_has_too_is_described_with_that() {
    use crate::output::Format;
    use v1::{NodeHealth::*, NodeState::*};
    let described = |state: v1::NetworkState, cause: &str, faults: &[&str]| {
        let mut node = node(1, Up, Healthy);
        let network = v1::NetworkReport {
            number: 7,
            state: state.into(),
            cause: cause.to_owned(),
            faults: faults.iter().map(|fault| (*fault).to_owned()).collect(),
            ..Default::default()
        };
        node.status.get_or_insert_default().network = Some(network);
        let view = View::of(&node);
        Document::new(&view, view.fields()).unwrap()
    };
    let network = |document: &Document| {
        let text = document.render(Format::Table).unwrap();
        let lines = text.lines().skip_while(|line| !line.starts_with("network"));
        let lines = lines.take_while(|line| !line.starts_with("image"));
        lines.collect::<Vec<_>>().join("\n")
    };
    let fault = "another machine, 02:00:00:00:00:09, has the address 192.0.2.1 of eth0, too";
    let both = described(v1::NetworkState::Reverted, "no curator", &[fault, "\u{1b}vlan7"]);
    insta::assert_snapshot!(network(&both), @r"
    network       reverted: no curator
                  another machine, 02:00:00:00:00:09, has the address 192.0.2.1 of eth0, too
                  ?vlan7
    ");
    assert_eq!(both.value()["network_faults"], serde_json::json!([fault, "?vlan7"]));
    let alone = described(v1::NetworkState::Unspecified, "", &[fault]);
    assert_eq!(network(&alone), format!("network       {fault}"));
    let quiet = described(v1::NetworkState::Unspecified, "", &[]);
    assert_eq!(network(&quiet), "");
    assert_eq!(quiet.value().get("network_faults"), None);
}
