//! Interfaces, bonds and VLANs: an accepted configuration can be made, and a refusal names its
//! field.

use polis_proto::v1::NetworkConfiguration;
use polis_proto::v1::network_configuration::{Bond, Card, Interface, Settings, Vlan};
use proptest::prelude::*;

use super::super::{Bonding, Hash, Network, Parent};
use super::tests::any_interface;
use super::{Error, network};

fn card(name: &str) -> Card {
    Card { r#match: name.to_owned(), ..Card::default() }
}

fn settings(addresses: &[&str]) -> Settings {
    let addresses = addresses.iter().map(|address| (*address).to_owned()).collect();
    Settings { addresses, ..Settings::default() }
}

fn bond(name: &str, members: &[&str]) -> Bond {
    let members = members.iter().map(|name| card(name)).collect();
    Bond { name: name.to_owned(), members, ..Bond::default() }
}

fn vlan(bond: &str, id: u32) -> Vlan {
    Vlan { bond: bond.to_owned(), id, ..Vlan::default() }
}

fn of(bonds: Vec<Bond>, vlans: Vec<Vlan>) -> NetworkConfiguration {
    NetworkConfiguration { bonds, vlans, ..NetworkConfiguration::default() }
}

fn read(message: NetworkConfiguration) -> Result<Network, Error> {
    network(message, "network")
}

#[track_caller]
fn refused(message: NetworkConfiguration) -> (String, String) {
    match read(message) {
        Err(Error::Field(error)) => (error.path.clone(), error.to_string()),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_vlan_on_a_bond_of_two_cards_is_understood() {
    let lacp = Bond { mode: 2, hash: 3, min_links: 2, ..bond("bond0", &["eth0", "eth1"]) };
    let tagged = Vlan { settings: Some(settings(&["10.0.2.7/24"])), ..vlan("bond0", 7) };
    let network = read(of(vec![lacp], vec![tagged])).unwrap();
    let bond = &network.bonds[0];
    assert_eq!(bond.mode, Bonding::Lacp { hash: Hash::Layer3And4, min_links: 2 });
    assert_eq!(bond.mode.to_string(), "LACP by layer3+4, 2 links or more");
    assert_eq!(bond.members.iter().map(ToString::to_string).collect::<Vec<_>>(), ["eth0", "eth1"]);
    assert_eq!(network.vlans[0].parent, Parent::Bond("bond0".to_owned()));
    assert_eq!(network.vlans[0].settings.to_string(), "10.0.2.7/24");
    assert!(!network.is_automatic());
    // The longest name has room for the longest ID in the 15 bytes of a name.
    let longest = read(of(vec![self::bond("bondabcdef", &["eth0"])], Vec::new())).unwrap();
    assert_eq!(format!("{}.4094", longest.bonds[0].name).len(), 15);
}

#[test]
fn what_a_bond_cannot_be_names_its_field() {
    let two = || bond("bond0", &["eth0", "eth1"]);
    for (bonds, path) in [
        (vec![bond("team0", &["eth0"])], "bonds[0].name"),
        (vec![bond("bond", &["eth0"])], "bonds[0].name"),
        (vec![bond("bond0123456", &["eth0"])], "bonds[0].name"),
        (vec![bond("bondA", &["eth0"])], "bonds[0].name"),
        (vec![two(), bond("bond0", &["eth2"])], "bonds[1].name"),
        (vec![bond("bond0", &[])], "bonds[0].members"),
        (vec![bond("bond0", &["eth0", "eth0"])], "bonds[0].members[1]"),
        (vec![two(), bond("bond1", &["eth1"])], "bonds[1].members[0]"),
        (vec![bond("bond0", &["lo"])], "bonds[0].members[0].match"),
        (vec![bond("bond0", &[""])], "bonds[0].members[0].match"),
        (vec![Bond { mode: 3, ..two() }], "bonds[0].mode"),
        (vec![Bond { hash: 4, ..two() }], "bonds[0].hash"),
        (vec![Bond { mode: 1, hash: 1, ..two() }], "bonds[0].hash"),
        (vec![Bond { mode: 1, min_links: 1, ..two() }], "bonds[0].min_links"),
        (vec![Bond { mode: 2, min_links: 3, ..two() }], "bonds[0].min_links"),
        (
            vec![Bond { settings: Some(Settings { mtu: 1, ..Settings::default() }), ..two() }],
            "bonds[0].settings.mtu",
        ),
    ] {
        assert_eq!(refused(of(bonds, Vec::new())).0, format!("network.{path}"));
    }
}

#[test]
fn what_a_vlan_cannot_be_names_its_field() {
    let two = || vec![bond("bond0", &["eth0", "eth1"])];
    let on_card = |name: &str| Vlan { card: Some(card(name)), ..vlan("", 7) };
    let with = |settings| Vlan { settings: Some(settings), ..vlan("bond0", 7) };
    for (vlans, path) in [
        (vec![vlan("bond1", 7)], "vlans[0].bond"),
        (vec![vlan("", 7)], "vlans[0].bond"),
        (vec![Vlan { card: Some(card("eth2")), ..vlan("bond0", 7) }], "vlans[0].card"),
        (vec![on_card("eth0")], "vlans[0].card"),
        (vec![on_card("a b")], "vlans[0].card.match"),
        (vec![vlan("bond0", 0)], "vlans[0].id"),
        (vec![vlan("bond0", 4095)], "vlans[0].id"),
        (vec![vlan("bond0", 65_543)], "vlans[0].id"),
        (vec![vlan("bond0", 7), vlan("bond0", 7)], "vlans[1].id"),
        (vec![with(Settings { mtu: 9000, ..Settings::default() })], "vlans[0].settings.mtu"),
        (vec![with(settings(&["10.0.0.1"]))], "vlans[0].settings.addresses[0]"),
        (vec![with(settings(&["fd00::7/64", "fe80::7/64"]))], "vlans[0].settings.addresses[1]"),
        (vec![with(Settings { primary: true, ..settings(&[]) })], "vlans[0].settings.primary"),
    ] {
        assert_eq!(refused(of(two(), vlans)).0, format!("network.{path}"));
    }
    // The error names the allowed values, and the given one.
    let text = refused(of(two(), vec![vlan("bond1", 7)])).1;
    assert!(text.contains("\"bond1\"") && text.contains("(bond0)"), "{text}");
    assert!(refused(of(two(), vec![vlan("bond0", 0)])).1.contains("1 to 4094"));
    // One ID on two parents is two VLANs.
    assert!(read(of(two(), vec![vlan("bond0", 7), on_card("eth2")])).is_ok());
}

#[test]
fn at_most_one_link_is_primary_and_a_card_is_used_once() {
    let primary = |address| Settings { primary: true, ..settings(&[address]) };
    let first = Bond { settings: Some(primary("10.0.0.1/24")), ..bond("bond0", &["eth0"]) };
    let second = Vlan { settings: Some(primary("10.0.1.1/24")), ..vlan("bond0", 7) };
    let path = refused(of(vec![first], vec![second])).0;
    assert_eq!(path, "network.vlans[0].settings.primary");
    let interface = Interface { r#match: "eth0".to_owned(), dhcp: true, ..Interface::default() };
    let network = NetworkConfiguration {
        interfaces: vec![interface],
        ..of(vec![bond("bond0", &["eth0"])], Vec::new())
    };
    assert_eq!(refused(network).0, "network.bonds[0].members[0]");
}

#[test]
fn a_card_is_selected_by_its_place_and_its_driver() {
    let interface = |path: &str, driver: &str| NetworkConfiguration {
        interfaces: vec![Interface {
            path: path.to_owned(),
            driver: driver.to_owned(),
            dhcp: true,
            ..Interface::default()
        }],
        ..NetworkConfiguration::default()
    };
    let read = read(interface("0000:00:03.0", "virtio_net")).unwrap();
    assert_eq!(read.interfaces[0].card.to_string(), "path:0000:00:03.0+driver:virtio_net");
    assert_eq!(refused(interface("../etc", "")).0, "network.interfaces[0].path");
    assert_eq!(refused(interface("", "virtio net")).0, "network.interfaces[0].driver");
    assert_eq!(refused(interface("", "")).0, "network.interfaces[0].match");
}

prop_compose! {
    fn any_links()(
        interfaces in prop::collection::vec(any_interface(), 0..3),
        lacp: bool, hash in 0i32..=3, min_links in 0u32..=2,
        mtu in prop_oneof![Just(0u32), 1500u32..=9000],
        ids in prop::collection::btree_set(1u32..=4094, 0..4),
        dhcp: bool,
    ) -> NetworkConfiguration {
        let mut bond = Bond { mode: 1, ..bond("bond0", &["eth0", "eth1"]) };
        if lacp {
            bond = Bond { mode: 2, hash, min_links, ..bond };
        }
        bond.settings = Some(Settings { mtu, ..Settings::default() });
        let vlans = ids.into_iter().map(|id| Vlan {
            settings: Some(Settings { dhcp, mtu: mtu.min(1500), ..Settings::default() }),
            ..vlan("bond0", id)
        });
        NetworkConfiguration { interfaces, ..of(vec![bond], vlans.collect()) }
    }
}

proptest! {
    #[test]
    fn what_is_accepted_is_written_as_a_message_that_means_the_same(message in any_links()) {
        // Two random cards may have one address.
        if let Ok(first) = read(message) {
            let again = read(first.message()).unwrap();
            prop_assert_eq!(&again, &first);
            prop_assert_eq!(again.message(), first.message());
        }
    }

    #[test]
    fn arbitrary_values_are_accepted_or_refused_with_a_path(
        name in ".{0,20}", matches in ".{0,20}", path in ".{0,20}", driver in ".{0,20}",
        mode: i32, hash: i32, min_links: u32, id: u32, bond_of in ".{0,12}", mtu: u32,
        address in ".{0,20}", primary: bool,
    ) {
        let card = Card { r#match: matches, path, driver };
        let settings = Settings { mtu, addresses: vec![address], primary, ..Settings::default() };
        let settings = Some(settings);
        let bond =
            Bond { name, members: vec![card.clone()], mode, hash, min_links, settings: settings.clone() };
        let vlan = Vlan { bond: bond_of, card: Some(card), id, settings };
        match read(of(vec![bond], vec![vlan])) {
            Ok(network) => prop_assert_eq!(read(network.message()).ok(), Some(network)),
            Err(Error::Field(error)) => {
                prop_assert!(error.path.starts_with("network."), "{}", error.path);
                prop_assert!(!error.value.contains(char::is_control) && !error.allowed.is_empty());
            }
            Err(other) => prop_assert!(false, "{other}"),
        }
    }
}

#[test]
fn ipv6_is_one_of_the_enum_and_off_only_without_addresses_and_routes_of_it() {
    use crate::parameters::Ipv6;
    use polis_proto::v1::network_configuration::Route;
    let with = |ipv6, settings| {
        let settings = Some(Settings { ipv6, ..settings });
        of(vec![Bond { settings, ..bond("bond0", &["eth0"]) }], Vec::new())
    };
    let known = [Ipv6::Auto, Ipv6::Auto, Ipv6::Slaac, Ipv6::Dhcpv6, Ipv6::Off];
    for (number, ipv6) in (0..).zip(known) {
        let network = read(with(number, settings(&["10.0.0.1/24"]))).unwrap();
        assert_eq!(network.bonds[0].settings.ipv6, ipv6, "{number}");
    }
    for number in [5, -1] {
        let (path, text) = refused(with(number, settings(&[])));
        assert_eq!(path, "network.bonds[0].settings.ipv6");
        assert!(text.contains("0 to 4"), "{text}");
    }
    let route = Route {
        destination: "::/0".to_owned(),
        gateway: "fe80::1".to_owned(),
        ..Default::default()
    };
    let routed = Settings { routes: vec![route], ..settings(&[]) };
    for (settings, of) in [(settings(&["fd00::7/64"]), "fd00::7/64"), (routed, "::/0")] {
        let (path, text) = refused(with(4, settings.clone()));
        assert_eq!(path, "network.bonds[0].settings.ipv6");
        assert!(text.contains(&format!("OFF, and the link has {of}")), "{text}");
        assert!(read(with(3, settings)).is_ok());
    }
    let interface = Interface { r#match: "eth0".to_owned(), ipv6: 9, ..Interface::default() };
    let network = NetworkConfiguration { interfaces: vec![interface], ..Default::default() };
    assert_eq!(refused(network).0, "network.interfaces[0].ipv6");
}

#[test]
fn an_address_of_ipv6_has_one_prefix_on_its_link() {
    let with = |addresses: &[&str]| {
        let bond = Bond { settings: Some(settings(addresses)), ..bond("bond0", &["eth0"]) };
        of(vec![bond], vec![])
    };
    let (path, text) = refused(with(&["2001:db8::1/64", "2001:db8::1/48"]));
    assert_eq!(path, "network.bonds[0].settings.addresses[1]");
    assert!(text.contains("2001:db8::1/48") && text.contains("or 2001:db8::1/64"), "{text}");
    // The same network for two addresses, and the same address on two links.
    read(with(&["2001:db8::1/64", "2001:db8::2/48"])).unwrap();
    let tagged = Vlan { settings: Some(settings(&["2001:db8::1/48"])), ..vlan("bond0", 7) };
    read(NetworkConfiguration { vlans: vec![tagged], ..with(&["2001:db8::1/64"]) }).unwrap();
    // The kernel has both of IPv4.
    read(with(&["192.0.2.7/24", "192.0.2.7/16"])).unwrap();
}
