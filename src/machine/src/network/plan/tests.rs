use std::net::Ipv4Addr;

use proptest::prelude::*;

use super::*;
use crate::parameters::{Card, Match};

/// Loopback 1, `eth0` 2 and `eth1` 3, both with carrier, as after `Up`.
pub(in super::super) fn observed() -> Observed {
    let link = |kind, name: &str, last| Link {
        kind,
        name: name.to_owned(),
        mac: Mac([0x52, 0x54, 0, 0, 0, last]),
        hardware: Mac([0x52, 0x54, 0, 0, 0, last]),
        master: None,
        active: true,
        driver: None,
        up: true,
        carrier: true,
        mtu: 1500,
        mtu_max: None,
        place: String::new(),
        usb: false,
        router: None,
        managed: false,
        informed: false,
        switches: None,
    };
    let links = BTreeMap::from([
        (1, link(Kind::Loopback, "lo", 0)),
        (2, link(Kind::Ethernet, "eth0", 2)),
        (3, link(Kind::Ethernet, "eth1", 3)),
    ]);
    Observed { links, ..Observed::default() }
}

pub(in super::super) fn unplug(mut observed: Observed, link: u32) -> Observed {
    observed.links.get_mut(&link).unwrap().carrier = false;
    observed
}

fn cidr(text: &str) -> Cidr {
    text.parse().unwrap()
}

fn lease(address: &str, gateway: [u8; 4]) -> Lease {
    Lease {
        address: cidr(address),
        routes: vec![(cidr("0.0.0.0/0"), Some(Ipv4Addr::from(gateway)))],
        nameservers: vec![IpAddr::from([10, 0, 2, 3])],
        ntp_servers: Vec::new(),
        mtu: None,
        lifetime: Duration::from_secs(3600),
        server: Ipv4Addr::from(gateway).into(),
    }
}

/// A card by its name.
pub(super) fn card(name: &str) -> Card {
    Card { matches: Some(Match::Name(name.to_owned())), ..Card::default() }
}

fn interface(card: Card, addresses: &[&str]) -> parameters::Interface {
    let addresses = addresses.iter().map(|address| cidr(address)).collect();
    parameters::Interface { card, settings: LinkSettings { addresses, ..LinkSettings::default() } }
}

fn by_name(name: &str, addresses: &[&str]) -> parameters::Interface {
    interface(card(name), addresses)
}

fn network(interfaces: Vec<parameters::Interface>) -> parameters::Network {
    parameters::Network { interfaces, ..parameters::Network::default() }
}

/// The state of the kernel after `actions`.
pub(super) fn after(mut observed: Observed, actions: &[Action]) -> Observed {
    for action in actions {
        let next = observed.links.keys().max().unwrap() + 1;
        match action {
            Action::RemoveLink(link) => remove(&mut observed, *link),
            Action::AddBond(name, mode, _) => {
                assert!(observed.links.values().all(|link| link.name != *name), "{name}");
                observed.links.insert(next, made(name, Kind::Bond(Some(*mode))));
            }
            Action::AddVlan { name, parent, id } => {
                assert!(observed.links.contains_key(parent));
                assert!(observed.links.values().all(|link| link.name != *name), "{name}");
                let kind = Kind::Vlan { parent: *parent, id: *id };
                observed.links.insert(next, made(name, kind));
            }
            Action::Leave(link) => observed.links.get_mut(link).unwrap().master = None,
            Action::Join { link, bond } => {
                assert!(matches!(observed.links[bond].kind, Kind::Bond(_)));
                let link = observed.links.get_mut(link).unwrap();
                assert_eq!(link.master.replace(*bond), None, "a card is in one bond");
            }
            Action::Up(link) => observed.links.get_mut(link).unwrap().up = true,
            Action::Mtu(link, mtu) => observed.links.get_mut(link).unwrap().mtu = *mtu,
            Action::Switch(link, _, switches) => {
                observed.links.get_mut(link).unwrap().switches = Some(*switches);
            }
            Action::RemoveAddress(link, cidr) => {
                assert!(observed.addresses.remove(&(*link, *cidr)));
                observed.ending.remove(&(*link, *cidr));
            }
            Action::AddAddress(link, cidr, lifetime) => {
                observed.addresses.insert((*link, *cidr));
                match lifetime {
                    Some(_) => observed.ending.insert((*link, *cidr)),
                    None => observed.ending.remove(&(*link, *cidr)),
                };
            }
            Action::RemoveRoute(route) => assert!(observed.routes.remove(route)),
            Action::AddRoute(route) => {
                observed.routes.insert(*route);
            }
        }
    }
    observed
}

/// A link that the node made, as the kernel has it then.
fn made(name: &str, kind: Kind) -> Link {
    Link { kind, name: name.to_owned(), up: false, ..observed().links[&2].clone() }
}

/// The kernel removes the VLANs of a link with it, and frees its cards.
fn remove(observed: &mut Observed, index: u32) {
    assert!(observed.links.remove(&index).is_some());
    let on = |link: &Link| matches!(link.kind, Kind::Vlan { parent, .. } if parent == index);
    let above: Vec<u32> =
        observed.links.iter().filter(|(_, link)| on(link)).map(|(above, _)| *above).collect();
    for link in observed.links.values_mut() {
        link.master = link.master.filter(|master| *master != index);
    }
    for index in above {
        remove(observed, index);
    }
}

#[test]
fn links_come_up_before_the_parameters_are_known_and_nothing_else_happens() {
    let mut observed = observed();
    for link in observed.links.values_mut() {
        link.up = false;
    }
    let wanted = wanted(&observed, None, &BTreeMap::new());
    let actions = actions(&observed, &wanted, Former::Keep, &[]);
    assert_eq!(actions, [Action::Up(1), Action::Up(2), Action::Up(3)]);
    assert!(wanted.dhcp.is_empty());
}

#[test]
fn without_a_configuration_every_interface_with_carrier_asks() {
    let observed = unplug(observed(), 3);
    let wanted = wanted(&observed, Some(&network(vec![])), &BTreeMap::new());
    assert_eq!(wanted.dhcp, BTreeSet::from([2]));
}

#[test]
fn the_lease_of_one_link_is_the_node_s_and_the_others_stay_spares() {
    let lease = lease("10.0.2.15/24", [10, 0, 2, 2]);
    let wanted = wanted(&observed(), Some(&network(vec![])), &BTreeMap::from([(3, &lease)]));
    assert_eq!(wanted.dhcp, BTreeSet::from([3]));
    assert_eq!(wanted.primary, Some((3, lease.address)));
    assert_eq!(wanted.gateway, Some(IpAddr::from([10, 0, 2, 2])));
    assert_eq!(wanted.nameservers, [IpAddr::from([10, 0, 2, 3])]);
    assert!(wanted.up.contains(&2));
    let route = Route {
        link: 3,
        destination: cidr("0.0.0.0/0"),
        gateway: Some(IpAddr::from([10, 0, 2, 2])),
        metric: 0,
        origin: Origin::Dhcp,
        on_link: false,
    };
    assert_eq!(
        actions(&observed(), &wanted, Former::Keep, &[]),
        [Action::AddAddress(3, lease.address, Some(lease.lifetime)), Action::AddRoute(route)]
    );
}

#[test]
fn a_new_address_replaces_the_old_one() {
    let mut observed = observed();
    observed.addresses.insert((2, cidr("10.0.2.15/24")));
    let lease = lease("10.0.9.1/24", [10, 0, 9, 254]);
    let wanted = wanted(&observed, Some(&network(vec![])), &BTreeMap::from([(2, &lease)]));
    let actions = actions(&observed, &wanted, Former::Keep, &[]);
    assert_eq!(actions[0], Action::RemoveAddress(2, cidr("10.0.2.15/24")));
    assert_eq!(actions[1], Action::AddAddress(2, lease.address, Some(lease.lifetime)));
}

#[test]
fn an_address_of_a_former_run_stays_until_there_is_another() {
    let mut observed = observed();
    observed.addresses.insert((2, cidr("10.0.2.15/24")));
    let wanted = wanted(&observed, Some(&network(vec![])), &BTreeMap::new());
    assert!(actions(&observed, &wanted, Former::Keep, &[]).is_empty());
    assert_eq!(
        actions(&observed, &wanted, Former::Remove, &[]),
        [Action::RemoveAddress(2, cidr("10.0.2.15/24"))]
    );
}

#[test]
fn what_the_kernel_configures_by_itself_is_left_alone() {
    let mut observed = observed();
    observed.addresses.insert((1, cidr("127.0.0.1/8")));
    observed.addresses.insert((2, cidr("fd00::5054:ff:fe00:2/64")));
    let wanted = wanted(&observed, Some(&network(vec![])), &BTreeMap::new());
    assert!(actions(&observed, &wanted, Former::Remove, &[]).is_empty());
}

#[test]
fn a_renewal_extends_the_address_in_place() {
    let mut observed = observed();
    let lease = lease("10.0.2.15/24", [10, 0, 2, 2]);
    let wanted = wanted(&observed, Some(&network(vec![])), &BTreeMap::from([(2, &lease)]));
    observed = after(observed.clone(), &actions(&observed, &wanted, Former::Keep, &[]));
    assert_eq!(
        actions(&observed, &wanted, Former::Remove, &[(2, cidr("10.0.2.15/24"))]),
        [Action::AddAddress(2, lease.address, Some(lease.lifetime))]
    );
}

#[test]
fn a_gateway_outside_the_network_is_on_the_wire_all_the_same() {
    let lease = lease("10.0.2.15/32", [10, 0, 0, 1]);
    let wanted = wanted(&observed(), Some(&network(vec![])), &BTreeMap::from([(2, &lease)]));
    assert!(wanted.routes.iter().all(|route| route.on_link));
}

#[test]
fn a_link_local_gateway_is_on_the_wire_by_itself_for_ipv6_alone() {
    for (address, to, gateway, on_link) in [
        ("192.0.2.7/32", "0.0.0.0/0", "169.254.1.1", true),
        ("169.254.1.7/16", "0.0.0.0/0", "169.254.1.1", false),
        ("2001:db8::7/64", "::/0", "fe80::1", false),
    ] {
        let mut fixed = by_name("eth0", &[address]);
        let (destination, gateway) = (cidr(to), gateway.parse().unwrap());
        fixed.settings.routes.push(parameters::Route { destination, gateway, metric: 0 });
        let wanted = wanted(&observed(), Some(&network(vec![fixed])), &BTreeMap::new());
        let made: Vec<_> = wanted.routes.iter().map(|route| route.on_link).collect();
        assert_eq!(made, [on_link], "{gateway}");
    }
}

#[test]
fn a_static_configuration_is_found_by_name_and_by_mac() {
    let mac = Match::Mac(Mac([0x52, 0x54, 0, 0, 0, 3]));
    let card = Card { matches: Some(mac), ..Card::default() };
    let mut by_mac = interface(card, &["192.0.2.7/24"]);
    by_mac.settings.routes.push(parameters::Route {
        destination: cidr("0.0.0.0/0"),
        gateway: IpAddr::from([192, 0, 2, 1]),
        metric: 0,
    });
    by_mac.settings.mtu = Some(9000);
    let config = network(vec![by_mac, by_name("eth0", &["198.51.100.7/24"])]);
    let wanted = wanted(&observed(), Some(&config), &BTreeMap::new());
    assert!(wanted.dhcp.is_empty());
    assert_eq!(wanted.primary, Some((3, cidr("192.0.2.7/24"))), "the first of the parameters");
    assert_eq!(wanted.gateway, Some(IpAddr::from([192, 0, 2, 1])));
    let actions = actions(&observed(), &wanted, Former::Keep, &[]);
    assert!(actions.contains(&Action::Mtu(3, 9000)));
    assert!(actions.contains(&Action::AddAddress(2, cidr("198.51.100.7/24"), None)));
}

#[test]
fn configured_interfaces_ask_only_where_the_parameters_say_so() {
    let mut asking = by_name("eth1", &[]);
    asking.settings.dhcp = true;
    let config = network(vec![asking]);
    assert_eq!(candidates(&observed(), &config), [3]);
    assert_eq!(wanted(&observed(), Some(&config), &BTreeMap::new()).dhcp, BTreeSet::from([3]));
}

#[test]
fn addresses_of_a_former_configuration_are_removed_and_those_of_routers_stay() {
    let mut observed = observed();
    let (old, routed) = ((2, cidr("fd00::7/64")), (2, cidr("2001:db8::5/64")));
    observed.addresses.extend([old, routed, (2, cidr("192.0.2.7/24"))]);
    observed.own.extend([old, (2, cidr("192.0.2.7/24"))]);
    let config = network(vec![by_name("eth0", &["192.0.2.8/24"])]);
    let wanted = wanted(&observed, Some(&config), &BTreeMap::new());
    let mut removed = actions(&observed, &wanted, Former::Remove, &[]);
    removed.retain(|action| matches!(action, Action::RemoveAddress(..)));
    let expected = [cidr("192.0.2.7/24"), cidr("fd00::7/64")];
    assert_eq!(removed, expected.map(|cidr| Action::RemoveAddress(2, cidr)));
}

#[test]
fn a_vlan_takes_no_more_bytes_than_the_link_below_it() {
    let mut observed = observed();
    let vlan = Link { kind: Kind::Vlan { parent: 2, id: 7 }, ..observed.links[&2].clone() };
    observed.links.insert(4, vlan);
    let settings = LinkSettings { mtu: Some(9000), ..LinkSettings::default() };
    let below = parameters::Interface { card: card("eth0"), settings: settings.clone() };
    let parent = parameters::Parent::Card(card("eth0"));
    let vlan = parameters::Vlan { parent, id: 7, settings };
    let all = parameters::Network { vlans: vec![vlan], ..network(vec![below]) };
    let mtus = |config: &parameters::Network| {
        wanted(&observed, Some(config), &BTreeMap::new()).mtu.into_iter().collect::<Vec<_>>()
    };
    assert_eq!(mtus(&all), [(2, 9000), (4, 9000)]);
    let alone = parameters::Network { interfaces: Vec::new(), ..all.clone() };
    assert_eq!(mtus(&alone), [(4, 1500)], "the card has 1500");
    let mut plain = all;
    plain.vlans[0].settings.mtu = None;
    assert_eq!(mtus(&plain), [(2, 9000), (4, 1500)], "a former one does not stay");
    // A card for which nothing says an MTU any more gets its own back.
    let mut wanted = wanted(&observed, Some(&network(vec![])), &BTreeMap::new());
    wanted.restore(&observed, &BTreeMap::from([(2, 1480)]));
    assert_eq!(wanted.mtu.get(&2), Some(&1480));
}

#[test]
fn dhcp_raises_no_mtu_above_what_a_card_or_a_member_of_a_bond_takes() {
    let mut observed = observed();
    let bond = Link { kind: Kind::Bond(Some(Bonding::ActiveBackup)), ..observed.links[&2].clone() };
    observed.links.insert(4, bond);
    for (index, max) in [(2, 1600), (3, 9000), (4, 65_535)] {
        observed.links.get_mut(&index).unwrap().mtu_max = Some(max);
    }
    let lease = Lease { mtu: Some(9000), ..lease("10.0.2.15/24", [10, 0, 2, 2]) };
    let mtu = |observed: &Observed, link| {
        let mut wanted = Wanted::default();
        wanted.take(observed, link, &lease, 0);
        wanted.mtu[&link]
    };
    assert_eq!([2, 3, 4].map(|link| mtu(&observed, link)), [1600, 9000, 9000]);
    observed.links.get_mut(&2).unwrap().master = Some(4);
    assert_eq!(mtu(&observed, 4), 1600);
}

#[test]
fn leases_that_were_renewed_together_have_their_new_ends_together() {
    let links = ["eth0", "eth1"].map(|name| {
        let mut link = by_name(name, &[]);
        link.settings.dhcp = true;
        link
    });
    let (one, two) = (lease("10.0.2.15/24", [10, 0, 2, 2]), lease("10.9.0.15/24", [10, 9, 0, 2]));
    let leases = BTreeMap::from([(2, &one), (3, &two)]);
    let wanted = wanted(&observed(), Some(&network(links.into())), &leases);
    let before = after(observed(), &actions(&observed(), &wanted, Former::Keep, &[]));
    let renewed = [(2, one.address), (3, two.address)];
    let added = renewed.map(|(link, cidr)| Action::AddAddress(link, cidr, Some(one.lifetime)));
    assert_eq!(actions(&before, &wanted, Former::Remove, &renewed), added);
}

#[test]
fn an_address_of_the_parameters_does_not_end_with_a_lease_of_the_same() {
    let mut both = by_name("eth0", &["10.0.2.15/24"]);
    both.settings.dhcp = true;
    let lease = lease("10.0.2.15/24", [10, 0, 2, 2]);
    let wanted = wanted(&observed(), Some(&network(vec![both])), &BTreeMap::from([(2, &lease)]));
    let forever = Action::AddAddress(2, lease.address, None);
    let added = actions(&observed(), &wanted, Former::Keep, &[]);
    assert!(added.contains(&forever), "{added:?}");
    // The kernel has it with the end of the lease, from before the parameters were known.
    let leased = Action::AddAddress(2, lease.address, Some(lease.lifetime));
    let before = after(observed(), &[leased]);
    let renewed = [(2, lease.address)];
    let added = actions(&before, &wanted, Former::Keep, &renewed);
    assert_eq!(added.iter().filter(|action| **action == forever).count(), 1, "{added:?}");
    assert_eq!(actions(&after(before, &added), &wanted, Former::Keep, &renewed), []);
}

#[test]
fn of_two_routes_of_the_parameters_that_of_the_first_interface_stays() {
    let with = |name: &str, address: &str, gateway: [u8; 4]| {
        let mut interface = by_name(name, &[address]);
        let (destination, gateway) = (cidr("0.0.0.0/0"), IpAddr::from(gateway));
        interface.settings.routes = vec![parameters::Route { destination, gateway, metric: 0 }];
        interface
    };
    let first = with("eth1", "192.0.2.7/24", [192, 0, 2, 1]);
    let second = with("eth0", "198.51.100.7/24", [198, 51, 100, 1]);
    let config = network(vec![first, second]);
    let wanted = wanted(&observed(), Some(&config), &BTreeMap::new());
    let links: Vec<_> = wanted.routes.iter().map(|route| route.link).collect();
    assert_eq!((links, wanted.primary), (vec![3], Some((3, cidr("192.0.2.7/24")))));
    assert_eq!(wanted.gateway, Some(IpAddr::from([192, 0, 2, 1])));
}

#[test]
fn of_two_routes_that_the_kernel_cannot_have_at_once_that_of_the_parameters_stays() {
    let route = |gateway: [u8; 4], metric| parameters::Route {
        destination: cidr("0.0.0.0/0"),
        gateway: IpAddr::from(gateway),
        metric,
    };
    let mut asking = by_name("eth0", &[]);
    asking.settings.dhcp = true;
    let mut fixed = by_name("eth1", &["192.0.2.7/24"]);
    fixed.settings.routes = vec![route([192, 0, 2, 1], 0), route([192, 0, 2, 9], 5)];
    let lease = lease("10.0.2.15/24", [10, 0, 2, 2]);
    let config = network(vec![asking, fixed]);
    let wanted = wanted(&observed(), Some(&config), &BTreeMap::from([(2, &lease)]));
    let gateways: Vec<_> =
        wanted.routes.iter().map(|route| (route.gateway, route.metric)).collect();
    let via = |last| Some(IpAddr::from([192, 0, 2, last]));
    assert_eq!(gateways, [(via(1), 0), (via(9), 5)]);
    assert_eq!(wanted.gateway, via(1), "the way out is the one that stays");
    let failed = Action::AddAddress(2, lease.address, Some(lease.lifetime));
    let later = Action::AddAddress(2, lease.address, Some(lease.lifetime / 2));
    assert_eq!(failed.timeless(), later.timeless(), "a failure is logged once");
}

#[test]
fn servers_of_the_parameters_come_before_those_of_dhcp() {
    let mut config = network(vec![]);
    config.nameservers.push(IpAddr::from([192, 0, 2, 53]));
    let lease = lease("10.0.2.15/24", [10, 0, 2, 2]);
    let wanted = wanted(&observed(), Some(&config), &BTreeMap::from([(2, &lease)]));
    assert_eq!(wanted.nameservers, [IpAddr::from([192, 0, 2, 53]), IpAddr::from([10, 0, 2, 3])]);
}

#[track_caller]
fn waits(observed: &Observed, config: &parameters::Network) -> String {
    let mut wanted = wanted(observed, Some(config), &BTreeMap::new());
    wanted.ipv6(observed, config, &KnownV6::default());
    waiting(observed, Some(config), &wanted).unwrap()
}

#[test]
fn what_is_waited_for_says_what_would_help() {
    let all = network(vec![]);
    insta::assert_snapshot!(waits(&Observed::default(), &all), @"an Ethernet interface: not \
                                                                 found; connect one, or check \
                                                                 that this kernel has its driver");
    let unplugged = unplug(unplug(observed(), 2), 3);
    insta::assert_snapshot!(waits(&unplugged, &all), @"a carrier on eth0, eth1: plug in the cable, check the switch");
    insta::assert_snapshot!(waits(&observed(), &all), @"an answer from a DHCP server on eth0, eth1, or an IPv6 address from a router: check that one of them serves this network, or configure an address in the node parameters");
    let mut managed = observed();
    managed.links.get_mut(&3).unwrap().managed = true;
    insta::assert_snapshot!(waits(&managed, &all), @"an answer from a DHCPv6 server on eth1: check that one serves this network, and that a router advertises a way out there, or configure an address in the node parameters");
    let routed = network(vec![by_name("eth0", &[])]);
    insta::assert_snapshot!(waits(&observed(), &routed), @"an IPv6 address from a router on eth0: check that one advertises itself and a prefix, or configure DHCP or an address in the node parameters");
    insta::assert_snapshot!(waits(&unplugged, &routed), @"a carrier on eth0: plug in the cable, check the switch");
    let config = network(vec![by_name("eth7", &["192.0.2.7/24"])]);
    insta::assert_snapshot!(waits(&observed(), &config), @"a link that the network configuration gives an address: interface eth7 selects no card: there is eth0 (52:54:00:00:00:02), eth1 (52:54:00:00:00:03)");
}

#[test]
fn nothing_is_waited_for_once_the_kernel_has_the_address() {
    let mut observed = observed();
    let config = network(vec![by_name("eth0", &["192.0.2.7/24"])]);
    assert!(waits(&observed, &config).contains("192.0.2.7/24"));
    observed.addresses.insert((2, cidr("192.0.2.7/24")));
    let wanted = wanted(&observed, Some(&config), &BTreeMap::new());
    assert_eq!(waiting(&observed, Some(&config), &wanted), None);
}

#[test]
fn an_address_that_another_machine_has_too_is_not_the_node_s() {
    let mut observed = observed();
    let config = network(vec![by_name("eth0", &["fd00::7/64"])]);
    let address = (2, cidr("fd00::7/64"));
    observed.addresses.insert(address);
    let wanted = wanted(&observed, Some(&config), &BTreeMap::new());
    for (flaw, waits) in [(Flaw::Tentative, false), (Flaw::Duplicate, true)] {
        observed.flaws.insert(address, flaw);
        assert_eq!(observed.has(address), !waits);
        let reason = waiting(&observed, Some(&config), &wanted);
        assert_eq!(reason.is_some_and(|why| why.contains("has fd00::7/64, too")), waits);
    }
}

#[test]
fn an_address_from_a_router_is_the_kernel_s_and_changes_nothing_there() {
    let mut observed = observed();
    let address = (2, cidr("2001:db8::5/64"));
    observed.addresses.insert(address);
    observed.links.get_mut(&2).unwrap().router = Some("fe80::1".parse().unwrap());
    let mut wanted = wanted(&observed, Some(&network(vec![])), &BTreeMap::new());
    let before = actions(&observed, &wanted, Former::Remove, &[]);
    wanted.advertised(&observed, address);
    assert_eq!(wanted.gateway, Some("fe80::1".parse().unwrap()));
    assert_eq!(actions(&observed, &wanted, Former::Remove, &[]), before);
    assert_eq!(waiting(&observed, Some(&network(vec![])), &wanted), None);
    assert_eq!(routed(&observed, &network(vec![by_name("eth1", &[])])), [3]);
    assert!(routed(&observed, &network(vec![by_name("eth1", &["fd00::7/64"])])).is_empty());
}

prop_compose! {
    fn any_observed()(
        up in any::<[bool; 3]>(),
        carrier in any::<[bool; 3]>(),
        mtu in 1280u32..9000,
        addresses in prop::collection::btree_set((2u32..=3, (0u8..3, 8u8..=32)), 0..4),
    ) -> Observed {
        let mut observed = observed();
        for (i, link) in observed.links.values_mut().enumerate() {
            link.up = up[i];
            link.carrier = carrier[i];
            link.mtu = mtu;
        }
        observed.addresses = addresses.into_iter().map(|(link, (last, prefix))| {
            (link, Cidr::new(IpAddr::from([10, 0, 2, last]), prefix).unwrap())
        }).collect();
        observed
    }
}

proptest! {
    #[test]
    fn a_plan_that_was_applied_leaves_nothing_to_do(
        observed in any_observed(),
        leased in prop::option::of((2u32..=3, 1u8..250)),
        fixed in prop::option::of((2u32..=3, 1u8..250)),
    ) {
        let lease = leased.map(|(link, last)| (link, lease(&format!("10.0.3.{last}/24"), [10, 0, 3, 254])));
        let leases = lease.iter().map(|(link, lease)| (*link, lease)).collect();
        let config = network(fixed.iter().map(|(link, last)| {
            let mut fixed = by_name(&format!("eth{}", link - 2), &[&format!("10.0.4.{last}/24")]);
            fixed.settings.mtu = Some(1400);
            fixed
        }).collect());
        let wanted = wanted(&observed, Some(&config), &leases);
        let first = actions(&observed, &wanted, Former::Remove, &[]);
        let observed = after(observed, &first);
        prop_assert_eq!(actions(&observed, &wanted, Former::Remove, &[]), []);
        if wanted.primary.is_some() {
            prop_assert_eq!(waiting(&observed, Some(&config), &wanted), None);
        }
    }
}
