//! The mesh of invented nodes.

use proptest::prelude::*;

use super::*;

fn id(number: u8) -> NodeId {
    NodeId::from_public_key(&[number; 32])
}

fn key(number: u8) -> PublicKey {
    PublicKey::new([number; 32]).unwrap()
}

/// Networks whose Services are not the default ones.
fn networks() -> Networks {
    Networks { services: "172.24.0.0/16".parse().unwrap(), ..Networks::default() }
}

/// The member with this number: its key and its prefix follow from it.
fn member(number: u8) -> Member {
    Member {
        key: key(number),
        prefix: format!("10.192.{number}.0/24").parse().unwrap(),
        address: Some([10, 0, 2, number].into()),
    }
}

fn members(numbers: &[u8]) -> BTreeMap<NodeId, Member> {
    numbers.iter().map(|number| (id(*number), member(*number))).collect()
}

#[test]
fn a_node_reaches_the_pods_of_the_others_and_not_its_own_by_the_mesh() {
    let mut members = members(&[1, 2, 3]);
    members.get_mut(&id(3)).unwrap().address = None;
    let (mesh, rejected) = plan(id(1), networks(), &members);
    let mesh = mesh.unwrap();
    assert!(rejected.is_empty());
    assert_eq!(mesh.address, Ipv4Addr::new(10, 192, 1, 1));
    assert_eq!(mesh.routes, [networks().pods, networks().services]);
    let second = Peer {
        key: key(2),
        endpoint: Some("10.0.2.2:7838".parse().unwrap()),
        allowed: "10.192.2.0/24".parse().unwrap(),
        keepalive: None,
    };
    let third = Peer {
        key: key(3),
        endpoint: None,
        allowed: "10.192.3.0/24".parse().unwrap(),
        keepalive: Some(25),
    };
    assert_eq!(mesh.peers, [(key(2), second), (key(3), third)].into());
}

#[test]
fn a_node_without_a_prefix_has_no_mesh() {
    assert_eq!(plan(id(9), networks(), &members(&[1, 2])).0, None);
}

#[test]
fn two_nodes_with_the_same_addresses_or_key_are_both_left_out() {
    let mut members = members(&[1, 2, 3, 4, 5, 6]);
    // Wider than the other, so that one lies in it.
    members.get_mut(&id(2)).unwrap().prefix = "10.192.2.0/23".parse().unwrap();
    members.get_mut(&id(5)).unwrap().key = key(4);
    members.get_mut(&id(6)).unwrap().prefix = "10.224.6.0/24".parse().unwrap();
    let (mesh, rejected) = plan(id(1), networks(), &members);
    assert!(mesh.unwrap().peers.is_empty());
    let expected = [
        (id(2), Rejected::Overlap(id(3))),
        (id(3), Rejected::Overlap(id(2))),
        (id(4), Rejected::SameKey(id(5))),
        (id(5), Rejected::SameKey(id(4))),
        (id(6), Rejected::Outside("10.224.6.0/24".parse().unwrap())),
    ];
    assert_eq!(rejected, expected.into());
    assert_eq!(
        Rejected::Overlap(id(3)).to_string(),
        format!("its pod prefix overlaps that of {}", id(3))
    );
}

#[test]
fn one_moved_node_is_one_change() {
    let before = plan(id(1), networks(), &members(&[1, 2, 3])).0.unwrap();
    let mut members = members(&[1, 2, 3]);
    members.get_mut(&id(2)).unwrap().address = Some([10, 0, 9, 9].into());
    members.remove(&id(3));
    let after = plan(id(1), networks(), &members).0.unwrap();
    let expected = [Change::Remove(key(3)), Change::Set(after.peers[&key(2)].clone())];
    assert_eq!(changes(&kernel(&before.peers), &after.peers), expected);
}

#[test]
fn a_peer_that_called_keeps_the_address_that_it_called_from() {
    let mut member = members(&[1, 2]);
    member.get_mut(&id(2)).unwrap().address = None;
    let wanted = plan(id(1), networks(), &member).0.unwrap().peers;
    let mut present = kernel(&wanted);
    present.get_mut(&key(2)).unwrap().endpoint = Some("192.0.2.7:40000".parse().unwrap());
    assert_eq!(changes(&present, &wanted), []);
}

#[test]
fn a_peer_that_roams_is_left_alone_while_its_session_holds() {
    let mesh = plan(id(1), networks(), &members(&[1, 2])).0.unwrap();
    let (now, second) = (SystemTime::UNIX_EPOCH + SESSION * 10, key(2));
    let mut present = kernel(&mesh.peers);
    let roamed = present.get_mut(&second).unwrap();
    roamed.endpoint = Some("192.0.2.7:40000".parse().unwrap());
    roamed.handshake = Some(now - SESSION / 2);
    let last_set = mesh.endpoints();
    let after = |present: &BTreeMap<_, _>, last_set: &BTreeMap<_, _>, now| {
        changes(present, &mesh.without_roamed(present, last_set, now).peers)
    };
    assert_eq!(after(&present, &last_set, now), []);
    // A process that has just started does not know what the one before it has set.
    assert_eq!(after(&present, &BTreeMap::new(), now), []);
    // Something else changes: the endpoint stays.
    let mut narrower = present.clone();
    narrower.get_mut(&second).unwrap().allowed = None;
    let kept = Change::Set(Peer { endpoint: None, ..mesh.peers[&second].clone() });
    assert_eq!(after(&narrower, &last_set, now), [kept]);
    // The record has another address now, or the session is over.
    let set = [Change::Set(mesh.peers[&second].clone())];
    let elsewhere = [(second, "10.0.9.9:7838".parse().unwrap())].into();
    assert_eq!(after(&present, &elsewhere, now), set);
    assert_eq!(after(&present, &last_set, now + SESSION), set);
    present.get_mut(&second).unwrap().handshake = None;
    assert_eq!(after(&present, &last_set, now), set);
}

/// The peers as the kernel has them.
fn kernel(peers: &BTreeMap<PublicKey, Peer>) -> BTreeMap<PublicKey, Present> {
    peers.iter().map(|(key, peer)| (*key, present(peer))).collect()
}

fn present(peer: &Peer) -> Present {
    let Peer { endpoint, allowed, keepalive, .. } = peer.clone();
    Present { endpoint, allowed: Some(allowed), keepalive, handshake: None }
}

/// The state of the kernel after the changes.
fn applied(
    mut peers: BTreeMap<PublicKey, Present>,
    changes: Vec<Change>,
) -> BTreeMap<PublicKey, Present> {
    for change in changes {
        match change {
            Change::Remove(key) => drop(peers.remove(&key)),
            Change::Set(peer) => drop(peers.insert(peer.key, present(&peer))),
        }
    }
    peers
}

fn any_members() -> impl Strategy<Value = BTreeMap<NodeId, Member>> {
    let member =
        (1_u8..6, 0_u8..8, 21_u8..=26, any::<bool>()).prop_map(|(k, net, length, known)| {
            let mask = u32::MAX << (32 - length);
            let network = Ipv4Addr::from_bits(Ipv4Addr::new(10, 192, net, 0).to_bits() & mask);
            Member {
                key: key(k),
                prefix: Prefix::new(network, length).unwrap(),
                address: known.then_some([10, 0, 2, k].into()),
            }
        });
    prop::collection::btree_map((1_u8..8).prop_map(id), member, 0..7)
}

proptest! {
    #[test]
    fn no_address_belongs_to_two_peers(members in any_members()) {
        let (mesh, rejected) = plan(id(1), networks(), &members);
        let own = members.get(&id(1)).filter(|_| !rejected.contains_key(&id(1)));
        prop_assert_eq!(mesh.is_some(), own.is_some());
        if let (Some(mesh), Some(own)) = (mesh, own) {
            let ranges: Vec<_> = mesh.peers.values().map(|peer| peer.allowed).collect();
            for (at, range) in ranges.iter().enumerate() {
                prop_assert!(!range.overlaps(own.prefix));
                prop_assert!(ranges[at + 1..].iter().all(|other| !range.overlaps(*other)));
            }
            // Everyone is a peer, or is left out with a reason.
            prop_assert_eq!(mesh.peers.len() + 1 + rejected.len(), members.len());
        }
    }

    #[test]
    fn applied_changes_leave_nothing_to_change(before in any_members(), after in any_members()) {
        let peers = |members| {
            plan(id(1), networks(), members).0.map(|it| it.peers).unwrap_or_default()
        };
        let (before, after) = (peers(&before), peers(&after));
        let before = kernel(&before);
        let now = applied(before.clone(), changes(&before, &after));
        prop_assert_eq!(changes(&now, &after), []);
        prop_assert!(now.keys().eq(after.keys()));
    }
}
