//! Places in the network of pods, given and taken in any order.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;
use polis_wire::identity::Identity;
use polis_wire::node_roles::Role;
use polis_wire::pki::memory::Memory;

/// Nodes of a test.
const NODES: u8 = 5;

fn id(node: u8) -> NodeId {
    Identity::new([node; 32]).id
}

fn prefix(index: u8) -> Prefix {
    format!("10.192.{index}.0/24").parse().unwrap()
}

/// The default networks, of which these prefixes are taken.
fn prefixes(taken: impl IntoIterator<Item = Prefix>) -> Prefixes {
    Prefixes { networks: Networks::default(), taken: taken.into_iter().collect() }
}

fn node(roles: &[Role]) -> v1::Node {
    v1::Node { roles: Some(Role::record(roles)), ..v1::Node::default() }
}

fn given(add: &[Role]) -> Request {
    Request::Roles { add: Role::record(add), remove: v1::NodeRoles::default() }
}

fn taken(remove: &[Role]) -> Request {
    Request::Roles { add: v1::NodeRoles::default(), remove: Role::record(remove) }
}

const WORKER: [Role; 1] = [Role::KubernetesWorker];

#[test]
fn the_first_role_gives_the_first_free_prefix_and_the_last_takes_it_back() {
    let used = prefixes([prefix(0), prefix(1), prefix(3)]);
    let place = |node: &v1::Node| node.cluster_network.as_ref().map(|it| it.pod_prefix.clone());
    let first = settle(node(&WORKER), Some(&used)).unwrap();
    assert_eq!(place(&first).as_deref(), Some("10.192.2.0/24"));
    // The second role changes nothing, and neither does one of the two going.
    let both = [Role::ConsensusMember, Role::KubernetesController, Role::KubernetesWorker];
    let second = v1::Node { roles: Some(Role::record(&both)), ..first.clone() };
    assert_eq!(settle(second.clone(), Some(&prefixes([]))).unwrap(), second);
    let one = v1::Node { roles: Some(Role::record(&both[..2])), ..second };
    assert_eq!(place(&settle(one, None).unwrap()), place(&first));
    let none = v1::Node { roles: Some(Role::record(&both[..1])), ..first };
    assert_eq!(settle(none, None).unwrap().cluster_network, None);
}

#[test]
fn a_full_network_refuses_a_new_node_and_keeps_the_others() {
    let networks = Networks::default();
    let all = prefixes(networks.node_prefixes());
    let full = Refusal::PodNetworkFull { network: networks.pods };
    assert_eq!(settle(node(&WORKER), Some(&all)), Err(full));
    let one = prefixes(networks.node_prefixes().skip(1));
    let settled = settle(node(&WORKER), Some(&one)).unwrap();
    assert_eq!(settle(settled.clone(), Some(&all)), Ok(settled));
}

#[test]
fn a_node_of_an_earlier_version_gets_no_role_of_kubernetes_in_other_networks() {
    let services = "172.24.0.0/16".parse().unwrap();
    let others = Networks { services, ..Networks::default() };
    let report = |image: &str| {
        let (version, image) = ("0.9.0".to_owned(), image.to_owned());
        v1::UpdateReport { version, image, ..Default::default() }
    };
    let (earlier, present) = (report(""), report("0123456789abcdef"));
    let check = |add: &[Role], networks, report: Option<&v1::UpdateReport>| {
        check_version(id(1), &Role::record(add), networks, report)
    };
    for role in [Role::KubernetesController, Role::KubernetesWorker] {
        let refused = check(&[role], others, Some(&earlier)).unwrap_err();
        let text = refused.to_string();
        assert!(matches!(refused, Error::EarlierVersion { node, .. } if node == id(1)), "{text}");
        assert!(text.contains(&id(1).to_string()) && text.contains("0.9.0"), "{text}");
        assert_eq!(tonic::Status::from(refused).code(), tonic::Code::FailedPrecondition);
        check(&[role], others, Some(&present)).unwrap();
        check(&[role], others, None).unwrap();
        check(&[role], Networks::default(), Some(&earlier)).unwrap();
    }
    check(&[Role::ConsensusMember], others, Some(&earlier)).unwrap();
}

#[test]
fn a_node_inside_of_a_network_of_kubernetes_is_refused() {
    let at = |address: &str| {
        let status = v1::NodeStatus { external_address: address.to_owned(), ..Default::default() };
        settle(v1::Node { status: Some(status), ..node(&WORKER) }, Some(&prefixes([])))
    };
    let refusal = at("10.200.0.7").unwrap_err();
    assert_eq!(
        refusal.to_string(),
        "the address 10.200.0.7 of the node is in 10.192.0.0/11, which Kubernetes uses for pods \
         and Services: give the machine an address outside of it"
    );
    assert!(at("10.224.0.1").unwrap_err().to_string().contains("10.224.0.0/16"));
    for outside in ["10.0.2.15", "10.225.0.1", ""] {
        assert!(at(outside).is_ok(), "{outside}");
    }
    let six = at("2001:db8::1").unwrap_err();
    assert_eq!(
        six.to_string(),
        "the address 2001:db8::1 of the node is one of IPv6, and pods and Services have IPv4 \
         alone: give the machine an address of IPv4, by DHCP or first in its parameters"
    );
}

#[tokio::test]
async fn a_cluster_gives_prefixes_of_its_own_network() {
    let (store, memory) = members().await;
    let configuration = v1::ClusterConfiguration {
        pod_network: "172.16.2.0/23".to_owned(),
        service_network: "192.168.0.0/24".to_owned(),
        ..Default::default()
    };
    let put = Write::Put(CONFIGURATION.to_owned(), configuration.encode_to_vec());
    pki::Store::commit(&memory, Vec::new(), vec![put]).await.unwrap();
    for (number, place) in [(1, "172.16.2.0/24"), (2, "172.16.3.0/24")] {
        let node = store.change(id(number), given(&WORKER)).await.unwrap();
        assert_eq!(node.cluster_network.unwrap().pod_prefix, place);
    }
    let full = store.change(id(3), given(&WORKER)).await.unwrap_err();
    assert!(full.to_string().starts_with("the pod network 172.16.2.0/23 has no free"), "{full}");
    // An address in a default network is one like any other, and one in its own is not.
    let networks = networks(&configuration).unwrap();
    let at = |address: &str| {
        let status = v1::NodeStatus { external_address: address.to_owned(), ..Default::default() };
        check_address(&v1::Node { status: Some(status), ..node(&WORKER) }, networks)
    };
    at("10.200.0.7").unwrap();
    let refused = at("192.168.0.9").unwrap_err().to_string();
    assert!(refused.contains("is in 192.168.0.0/24, which Kubernetes uses"), "{refused}");
}

/// A store with nodes that are members.
async fn members() -> (Store<Memory>, Memory) {
    let memory = Memory::default();
    let puts = (1..=NODES).map(|node| {
        let record = v1::Node {
            public_key: vec![node; 32],
            state: v1::NodeState::Up.into(),
            ..v1::Node::default()
        };
        Write::Put(node_key(id(node)), record.encode_to_vec())
    });
    pki::Store::commit(&memory, Vec::new(), puts.collect()).await.unwrap();
    (Store::new(memory.clone()), memory)
}

/// The places in the records of nodes, by their keys in the store, and their owners.
async fn recorded(store: &Store<Memory>) -> BTreeMap<String, NodeId> {
    let mut recorded = BTreeMap::new();
    for node in 1..=NODES {
        let Ok(record) = store.node(id(node)).await else { continue };
        assert_eq!(record.cluster_network.is_some(), has_kubernetes(record.roles.as_ref()));
        for place in places(record.cluster_network.as_ref()) {
            assert_eq!(recorded.insert(place, id(node)), None, "two nodes have one place");
        }
    }
    recorded
}

/// The places by the records of their own.
fn owned(memory: &Memory) -> BTreeMap<String, NodeId> {
    let own = |key: &str| key.starts_with(POD_PREFIXES) || key.starts_with(MESH_KEYS);
    let all = memory.contents().into_iter().filter(|(key, _)| own(key));
    all.map(|(key, value)| {
        let owner = v1::ClusterNetworkOwner::decode(value.as_slice()).unwrap();
        (key, owner.node_id.parse().unwrap())
    })
    .collect()
}

#[tokio::test]
async fn nodes_that_get_a_role_at_the_same_moment_get_different_prefixes() {
    let (store, memory) = members().await;
    let all = (1..=NODES).map(|node| {
        let store = store.clone();
        async move { store.change(id(node), given(&WORKER)).await.unwrap() }
    });
    let records = futures::future::join_all(all).await;
    let prefixes: BTreeSet<_> =
        records.into_iter().map(|node| node.cluster_network.unwrap().pod_prefix).collect();
    let expected = (0..NODES).map(|index| prefix(index).to_string()).collect();
    assert_eq!(prefixes, expected);
    assert_eq!(recorded(&store).await, owned(&memory));
}

#[tokio::test]
async fn a_prefix_that_another_node_took_between_look_and_write_is_not_given_twice() {
    let (store, memory) = members().await;
    // As if the two leaders of an election had looked before either wrote.
    let none = prefixes([]);
    let late = settle(node(&WORKER), Some(&none)).unwrap().cluster_network;
    store.change(id(1), given(&WORKER)).await.unwrap();
    let (guards, writes) = changes(id(2), None, late.as_ref());
    assert!(!pki::Store::commit(&memory, guards, writes).await.unwrap());
    assert_eq!(owned(&memory), [(prefix_at("10.192.0.0/24"), id(1))].into());
}

#[tokio::test]
async fn a_key_belongs_to_one_node_and_is_free_again_after_it() {
    let (store, memory) = members().await;
    store.change(id(1), given(&WORKER)).await.unwrap();
    store.change(id(2), given(&WORKER)).await.unwrap();
    store.set_mesh_key(id(1), &[9; 32]).await.unwrap();
    store.set_mesh_key(id(1), &[9; 32]).await.unwrap();
    let refused = store.set_mesh_key(id(2), &[9; 32]).await;
    assert!(matches!(&refused, Err(Error::MeshKeyTaken { by }) if *by == id(1).to_string()));
    // A node whose key was lost has another one, and the old one is free.
    store.set_mesh_key(id(1), &[8; 32]).await.unwrap();
    store.set_mesh_key(id(2), &[9; 32]).await.unwrap();
    store.change(id(1), taken(&WORKER)).await.unwrap();
    store.change(id(2), Request::Decommission).await.unwrap();
    assert!(owned(&memory).is_empty());
    // Without a place, a key is not recorded.
    store.set_mesh_key(id(1), &[9; 32]).await.unwrap();
    assert!(owned(&memory).is_empty());
    assert_eq!(store.node(id(1)).await.unwrap().cluster_network, None);
}

#[derive(Clone, Debug)]
enum Move {
    Change(u8, Box<Request>),
    Key(u8, u8),
}

fn any_move() -> impl Strategy<Value = Move> {
    let roles = prop::sample::subsequence(Role::ALL.to_vec(), 0..=3);
    let request = prop_oneof![
        4 => roles.clone().prop_map(|roles| given(&roles)),
        3 => roles.prop_map(|roles| taken(&roles)),
        1 => Just(Request::Status(v1::NodeStatus::default())),
        1 => Just(Request::Decommission),
        1 => any::<bool>().prop_map(|force| Request::Delete { force }),
    ];
    prop_oneof![
        3 => (1..=NODES, request).prop_map(|(node, request)| Move::Change(node, Box::new(request))),
        1 => (1..=NODES, 1..4_u8).prop_map(|(node, key)| Move::Key(node, key)),
    ]
}

proptest! {
    #[test]
    fn two_nodes_never_have_one_place_and_a_freed_one_is_given_again(
        moves in prop::collection::vec(any_move(), 0..40)
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            let (store, memory) = members().await;
            for step in moves {
                let Prefixes { networks, taken: before } = store.prefixes().await.unwrap();
                // A refusal changes nothing, which the comparison below shows.
                match step {
                    Move::Change(node, request) => drop(store.change(id(node), *request).await),
                    Move::Key(node, key) => drop(store.set_mesh_key(id(node), &[key; 32]).await),
                }
                assert_eq!(recorded(&store).await, owned(&memory));
                let after = store.prefixes().await.unwrap().taken;
                let new: Vec<_> = after.difference(&before).collect();
                let mut all = networks.node_prefixes();
                let free = all.find(|prefix| !before.contains(prefix)).unwrap();
                assert!(new.iter().all(|prefix| **prefix == free), "{new:?}, free was {free}");
            }
        });
    }
}
