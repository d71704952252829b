//! Whole command lines against a node on loopback.

use crate::loopback::{Cluster, NODE};
use crate::testing::World;
use polis_wire::rpc::testing::node_id;

/// Every command that talks to a node itself, without the node and its address.
const OF_A_NODE: [&[&str]; 5] = [
    &["node", "reboot"],
    &["node", "poweroff"],
    &["node", "status"],
    &["node", "services"],
    &["node", "logs"],
];

#[test]
fn a_command_with_an_address_asks_nothing_of_a_node_that_was_not_named() {
    let world = World::new();
    let cluster = Cluster::new(&world);
    let at = cluster.address();
    let found = node_id(NODE).to_string();
    let another = node_id(2).to_string();
    for command in OF_A_NODE {
        for named in [&another[6..10], &another[..12], &another[6..], &*another] {
            let said = world.refuses(&[command, &[named, "--at", &at]].concat());
            assert!(said.contains(&found) && said.contains(named), "{command:?}: {said}");
            assert_eq!(cluster.asked(), [""; 0], "{command:?} of {named}");
        }
        for named in [&found[6..10], &found[..12], &*found] {
            world.runs(&[command, &[named, "--at", &at]].concat());
            assert_eq!(cluster.asked().len(), 1, "{command:?} of {named}");
        }
    }
    let ended = world.run(&["node", "reboot", "abc", "--at", &at]);
    assert_eq!((ended.status, &*ended.stdout), (2, ""), "{}", ended.stderr);
    assert!(ended.stderr.contains("\"abc\" is not a node ID"), "{}", ended.stderr);
    assert_eq!(cluster.asked(), [""; 0]);
}

#[test]
fn the_end_of_a_machine_names_the_node_in_full() {
    let world = World::new();
    let cluster = Cluster::new(&world);
    let found = node_id(NODE).to_string();
    let said = world.runs(&["node", "reboot", &found[6..10], "--at", &cluster.address()]);
    assert_eq!(said, format!("{found} reboots\n"));
    assert_eq!(cluster.asked(), ["Reboot"]);
}
