//! The changes in the kernel for invented devices.

use std::time::Duration;

use proptest::prelude::*;

use super::super::plan::Peer;
use super::*;
use polis_wire::pod_network::Networks;

fn networks() -> [Prefix; 2] {
    let Networks { pods, services } = Networks::default();
    [pods, services]
}

fn key(number: u8) -> PublicKey {
    PublicKey::new([number; 32]).unwrap()
}

fn peer(number: u8, third: u8) -> Peer {
    Peer {
        key: key(number),
        endpoint: Some(SocketAddr::from(([10, 0, 2, number], PORT))),
        allowed: format!("10.192.{third}.0/24").parse().unwrap(),
        keepalive: None,
    }
}

fn mesh(third: u8, peers: &[(u8, u8)]) -> Mesh {
    Mesh {
        address: Ipv4Addr::new(10, 192, third, 1),
        routes: networks().into(),
        peers: peers.iter().map(|(number, third)| (key(*number), peer(*number, *third))).collect(),
    }
}

/// The kernel, as far as the mesh goes.
fn apply(observed: Observed, action: &Action, own: PublicKey) -> Observed {
    let mut device = match observed {
        Observed::Absent => {
            assert_eq!(*action, Action::Create);
            return Observed::Device(Device { index: 7, mtu: 1500, ..Device::default() });
        }
        Observed::Foreign(index) => {
            assert_eq!(*action, Action::Delete(index));
            return Observed::Absent;
        }
        Observed::Device(device) => device,
    };
    match action {
        Action::Create => panic!("it exists"),
        Action::Delete(index) => {
            assert_eq!(*index, device.index);
            return Observed::Absent;
        }
        Action::Configure => (device.key, device.port) = (Some(own), PORT),
        Action::Peer(Change::Remove(key)) => drop(device.peers.remove(key)),
        Action::Peer(Change::Set(peer)) => {
            // As WireGuard does: a range belongs to one peer, and a set takes it from another.
            for other in device.peers.values_mut() {
                other.allowed = other.allowed.filter(|range| *range != peer.allowed);
            }
            let present = device.peers.entry(peer.key).or_default();
            present.endpoint = peer.endpoint.or(present.endpoint);
            present.allowed = Some(peer.allowed);
            present.keepalive = peer.keepalive;
        }
        Action::Up(_) => (device.up, device.mtu) = (true, MTU),
        Action::AddAddress(_, address) => drop(device.addresses.insert((*address, 32))),
        Action::RemoveAddress(_, address, bits) => {
            assert!(device.addresses.remove(&(*address, *bits)));
            device.routes.retain(|route| route.source != Some(*address));
        }
        Action::AddRoute(_, route) => {
            assert!(device.up, "a route into a device that is down");
            assert!(device.addresses.iter().any(|(address, _)| Some(*address) == route.source));
            device.routes.retain(|one| one.destination != route.destination);
            device.routes.insert(*route);
        }
        Action::RemoveRoute(_, route) => drop(device.routes.remove(route)),
    }
    Observed::Device(device)
}

fn settled(mut observed: Observed, wanted: Option<(&Mesh, PublicKey)>) -> Observed {
    let own = wanted.map_or(key(99), |(_, key)| key);
    for _pass in 0..3 {
        let actions = actions(&observed, wanted);
        if actions.is_empty() {
            return observed;
        }
        observed = actions.iter().fold(observed, |kernel, action| apply(kernel, action, own));
    }
    panic!("it does not settle: {:?}", actions(&observed, wanted));
}

#[test]
fn a_device_is_made_configured_and_removed() {
    let mesh = mesh(1, &[(2, 2), (3, 3)]);
    let wanted = Some((&mesh, key(1)));
    assert_eq!(actions(&Observed::Absent, wanted), [Action::Create]);
    let Observed::Device(device) = settled(Observed::Absent, wanted) else { panic!("no device") };
    assert_eq!((device.mtu, device.up, device.port), (1420, true, 7838));
    assert_eq!(device.addresses, [(Ipv4Addr::new(10, 192, 1, 1), 32)].into());
    let source = Some(Ipv4Addr::new(10, 192, 1, 1));
    let routes = networks().map(|destination| Route { destination, source });
    assert_eq!(device.routes, routes.into());
    assert_eq!(actions(&Observed::Device(device), None), [Action::Delete(7)]);
    assert_eq!(actions(&Observed::Absent, None), []);
    assert_eq!(settled(Observed::Foreign(4), None), Observed::Absent);
}

#[test]
fn one_changed_peer_is_one_action() {
    let before = mesh(1, &[(2, 2), (3, 3), (4, 4)]);
    let device = settled(Observed::Absent, Some((&before, key(1))));
    let mut after = before.clone();
    let moved = after.peers.get_mut(&key(3)).unwrap();
    moved.endpoint = Some(SocketAddr::from(([10, 0, 9, 9], PORT)));
    let expected = [Action::Peer(Change::Set(moved.clone()))];
    assert_eq!(actions(&device, Some((&after, key(1)))), expected);
}

#[test]
fn what_somebody_else_did_to_the_device_is_undone() {
    let mesh = mesh(1, &[(2, 2)]);
    let wanted = Some((&mesh, key(1)));
    let Observed::Device(good) = settled(Observed::Absent, wanted) else { panic!("no device") };
    let mut harmed = good.clone();
    (harmed.up, harmed.mtu, harmed.port) = (false, 9000, 51820);
    harmed.addresses.insert((Ipv4Addr::new(192, 0, 2, 1), 24));
    harmed.routes.insert(Route { destination: "192.0.2.0/24".parse().unwrap(), source: None });
    harmed.peers.insert(key(66), Present::default());
    harmed.peers.get_mut(&key(2)).unwrap().allowed = None;
    assert_eq!(settled(Observed::Device(harmed), wanted), Observed::Device(good));
}

#[test]
fn only_peers_that_had_a_handshake_are_listed() {
    let mesh = mesh(1, &[(2, 2), (3, 3)]);
    let Observed::Device(mut device) = settled(Observed::Absent, Some((&mesh, key(1)))) else {
        panic!("no device")
    };
    let time = SystemTime::UNIX_EPOCH + Duration::from_secs(9);
    device.peers.get_mut(&key(3)).unwrap().handshake = Some(time);
    let shaken: Vec<_> = device.handshakes().collect();
    assert_eq!(shaken, [(key(3), Some("10.0.2.3:7838".parse().unwrap()), time)]);
}

fn any_mesh() -> impl Strategy<Value = Option<(Mesh, PublicKey)>> {
    // A permutation, since the plan gives no two peers one range.
    let peers = prop::sample::subsequence(vec![2_u8, 3, 4, 5], 0..=4)
        .prop_flat_map(|keys| {
            let ranges = prop::sample::subsequence(vec![2_u8, 3, 4, 5, 6], keys.len());
            (Just(keys), ranges.prop_shuffle())
        })
        .prop_map(|(keys, ranges)| keys.into_iter().zip(ranges).collect::<Vec<_>>());
    prop::option::weighted(
        0.9,
        (7_u8..10, 20_u8..22, peers)
            .prop_map(|(third, own, peers)| (mesh(third, &peers), key(own))),
    )
}

proptest! {
    #[test]
    fn every_mesh_is_reached_from_every_other(all in prop::collection::vec(any_mesh(), 1..6)) {
        let mut kernel = Observed::Absent;
        for wanted in &all {
            let wanted = wanted.as_ref().map(|(mesh, key)| (mesh, *key));
            kernel = settled(kernel, wanted);
            match (&kernel, wanted) {
                (Observed::Absent, None) => {}
                (Observed::Device(device), Some((mesh, key))) => {
                    prop_assert_eq!(device.key, Some(key));
                    prop_assert!(device.peers.keys().eq(mesh.peers.keys()));
                }
                other => prop_assert!(false, "{other:?}"),
            }
        }
    }
}
