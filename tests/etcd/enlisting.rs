//! A node whose member of etcd was taken out although it has the role.

use std::sync::Arc;

use polis_control::cluster::{self, State};
use polis_control::consensus::{Start, Status};
use polis_machine::network;
use polis_node::roles::enlist;
use polis_proto::v1;
use polis_tests::{Story, story};
use polis_wire::node_roles::Role;
use tokio::sync::watch;

use crate::calls::admit;
use crate::curators::{BootstrapNode, address};
use crate::harness::{Machine, eventually, supervise};

/// The stories of this file.
pub(crate) const STORIES: &[Story] =
    &[story!(threads a_member_that_was_taken_out_beside_its_role_enters_again_as_another)
        .takes(20)];

async fn a_member_that_was_taken_out_beside_its_role_enters_again_as_another() {
    let machines = [Machine::new(), Machine::new()];
    let [one, two] = &machines;
    let BootstrapNode { node: first, cluster, curator, owner, .. } =
        BootstrapNode::start(one).await;
    let second = admit(&cluster, &[&curator], &owner, two).await;
    second.voter_of(2).await;

    let id = two.key.id();
    let own = cluster.credentials(two).await;
    let data = two.root().data;
    data.create().unwrap();
    data.node.credentials.dir.create().unwrap();
    data.node.credentials.key.write(&two.key.to_pkcs8_der().unwrap()).unwrap();
    let roles = Role::record(&[Role::ConsensusMember]);
    let info =
        v1::NodeInfo { state: v1::NodeState::Up.into(), roles: Some(roles), ..Default::default() };
    let nodes = watch::Sender::new(Some(Arc::new([(id, info)].into())));
    let network = watch::Sender::new(network::Status {
        primary: Some(address(two)),
        ..network::Status::default()
    });
    let status = cluster::Status { state: State::Home, node: Some(id), ..Default::default() };
    let mut orders = second.orders.subscribe();
    let service = enlist::Service {
        data: data.clone(),
        client: cluster.client(&[&curator], own),
        nodes: nodes.subscribe(),
        network: network.subscribe(),
        consensus: second.status.clone(),
        orders: second.orders.clone(),
        cluster: cluster::Writer::new(status),
    };
    let running = supervise("enlisting", move |ctx| service.clone().run(ctx));
    let voted = || data.node.voter.read().unwrap().is_some_and(|vote| !vote.is_empty());
    eventually("the vote to be written down", voted).await;
    // Its invitation grows old: another start uses the data on its disk.
    assert_eq!(orders.borrow().as_ref().unwrap().start, Start::Restart);
    // It serves by these orders, and by no others.
    orders.mark_unchanged();

    let leaving = first.members.may_leave(id, &two.peer).await.unwrap();
    let before = leaving.as_ref().unwrap().id;
    first.members.evict(id, leaving.as_ref(), first.peers_pki().await).await.unwrap();
    // It may have left before the eviction is at its end, and even vote again.
    let another = |status: &Status| {
        status.members.len() == 2 && status.members.iter().all(|member| member.id != before)
    };
    first.waits("to have it as another member", another).await;
    assert!(orders.has_changed().unwrap(), "it was invited again");
    assert_eq!(data.node.leaving.read().unwrap(), None);

    running.supervisor.stop().await;
    curator.supervisor.stop().await;
    for node in [first, second] {
        node.stop().await;
    }
}
