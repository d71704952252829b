use proptest::prelude::*;

use super::super::tests::{after, card, observed};
use super::*;
use crate::parameters::{Bonding, Hash, Match, Network, Vlan};

fn bond(name: &str, members: &[&str], mode: Bonding) -> Bond {
    let members = members.iter().map(|name| card(name)).collect();
    Bond { name: name.to_owned(), members, mode, settings: LinkSettings::default() }
}

fn vlan(parent: &str, id: u16) -> Vlan {
    let parent = match parent.starts_with("bond") {
        true => Parent::Bond(parent.to_owned()),
        false => Parent::Card(card(parent)),
    };
    Vlan { parent, id, settings: LinkSettings { dhcp: true, ..LinkSettings::default() } }
}

fn network(bonds: Vec<Bond>, vlans: Vec<Vlan>) -> Network {
    Network { bonds, vlans, ..Network::default() }
}

/// The machine after all rounds; each has at most a few actions.
fn made(mut observed: Observed, config: &Network) -> Observed {
    for _round in 0..6 {
        let actions = Layout::of(&observed, config).actions;
        if actions.is_empty() {
            return observed;
        }
        observed = after(observed, &actions);
    }
    panic!("there is always something to do: {:?}", Layout::of(&observed, config).actions);
}

fn named<'a>(observed: &'a Observed, name: &str) -> Option<(u32, &'a Link)> {
    observed.links.iter().find(|(_, link)| link.name == name).map(|(index, link)| (*index, link))
}

#[test]
fn a_vlan_on_a_bond_is_made_in_rounds() {
    let config = network(
        vec![bond("bond0", &["eth0", "eth1"], Bonding::ActiveBackup)],
        vec![vlan("bond0", 7)],
    );
    let first = Layout::of(&observed(), &config);
    let address = Some(observed().links[&2].hardware);
    let expected = Action::AddBond("bond0".to_owned(), Bonding::ActiveBackup, address);
    assert_eq!(first.actions, [expected]);
    assert_eq!(first.joining, BTreeSet::from([2, 3]));
    let made = made(observed(), &config);
    let (bond, _) = named(&made, "bond0").unwrap();
    assert_eq!([2, 3].map(|card| made.links[&card].master), [Some(bond); 2]);
    let (vlan, link) = named(&made, "bond0.7").unwrap();
    assert_eq!(link.kind, Kind::Vlan { parent: bond, id: 7 });
    let layout = Layout::of(&made, &config);
    let links: Vec<u32> = layout.settings.iter().map(|(index, _)| *index).collect();
    assert_eq!((links, layout.faults.len(), layout.joining.len()), (vec![bond, vlan], 0, 0));
}

#[test]
fn a_bond_has_the_address_of_its_first_member_whichever_card_is_there_first() {
    let mut config = network(vec![bond("bond0", &["eth9", "eth1"], Bonding::ActiveBackup)], vec![]);
    let address = |config: &parameters::Network| match &Layout::of(&observed(), config).actions[..]
    {
        [Action::AddBond(_, _, address)] => *address,
        other => panic!("{other:?}"),
    };
    assert_eq!(address(&config), None, "its card is not there");
    let mac = Mac([2, 0, 0, 0, 0, 9]);
    config.bonds[0].members[0] = Card { matches: Some(Match::Mac(mac)), ..Card::default() };
    assert_eq!(address(&config), Some(mac), "nor is this one, but its address is known");
}

#[test]
fn what_another_configuration_made_is_removed() {
    let lacp = Bonding::Lacp { hash: Hash::Layer2, min_links: 0 };
    let before = network(vec![bond("bond0", &["eth0", "eth1"], lacp)], vec![vlan("bond0", 7)]);
    let before = made(observed(), &before);
    let alone = made(before.clone(), &Network::default());
    assert_eq!(alone.links.len(), 3, "{alone:?}");
    assert!(alone.links.values().all(|link| link.master.is_none()));
    // Another mode is another bond.
    let other = network(vec![bond("bond0", &["eth0"], Bonding::ActiveBackup)], Vec::new());
    let changed = made(before.clone(), &other);
    let (index, link) = named(&changed, "bond0").unwrap();
    assert_eq!(link.kind, Kind::Bond(Some(Bonding::ActiveBackup)));
    assert_eq!([2, 3].map(|card| changed.links[&card].master), [Some(index), None]);
    // A card moves from one bond to another, whose name comes later or earlier.
    let two = [bond("bond0", &["eth0"], lacp), bond("bond1", &["eth1"], lacp)];
    let moved = made(before, &network(two.to_vec(), Vec::new()));
    let owner = |card: u32| moved.links[&moved.links[&card].master.unwrap()].name.clone();
    assert_eq!([owner(2), owner(3)], ["bond0", "bond1"]);
}

#[test]
fn a_card_that_is_not_there_once_is_a_fault_that_lists_the_cards() {
    let mut twins = observed();
    for link in twins.links.values_mut() {
        link.driver = Some("virtio_net".to_owned());
    }
    "pci0000:00/0000:00:03.0".clone_into(&mut twins.links.get_mut(&2).unwrap().place);
    let with = |card: Card| Network {
        interfaces: vec![parameters::Interface { card, settings: LinkSettings::default() }],
        ..Network::default()
    };
    let faults = |network: &Network| Layout::of(&twins, network).faults;
    let missing = faults(&with(card("eth9")));
    assert_eq!(missing.len(), 1);
    for words in
        ["interface eth9 selects no card", "eth0 (52:54:00:00:00:02", "0000:00:03.0", "eth1 ("]
    {
        assert!(missing[0].contains(words), "{words}: {missing:?}");
    }
    let driver = Some("virtio_net".to_owned());
    let both = Card { driver: driver.clone(), ..Card::default() };
    assert!(faults(&with(both))[0].contains("selects several cards"));
    let path = "0000:00:03.0".parse().ok();
    let one = with(Card { driver, path, ..Card::default() });
    assert_eq!(Layout::of(&twins, &one).settings.len(), 1);
    assert!(faults(&one).is_empty());

    // By name and by hardware address, it is the same card.
    let mac = Card { matches: Some(Match::Mac(twins.links[&2].hardware)), ..Card::default() };
    let mut twice = with(card("eth0"));
    twice.interfaces.push(parameters::Interface { card: mac, settings: LinkSettings::default() });
    let fault = &faults(&twice)[0];
    assert!(fault.contains("selects eth0, which interface eth0 selects, too"), "{fault}");
}

#[test]
fn a_member_is_selected_by_the_address_that_its_maker_gave_it() {
    let by_mac = |observed: &Observed, index: u32| Card {
        matches: Some(Match::Mac(observed.links[&index].hardware)),
        ..Card::default()
    };
    let members = [by_mac(&observed(), 2), by_mac(&observed(), 3)].to_vec();
    let bond = Bond { members, ..bond("bond0", &[], Bonding::ActiveBackup) };
    let config = network(vec![bond], Vec::new());
    let mut made = made(observed(), &config);
    // As the kernel does it.
    let mac = made.links[&2].hardware;
    made.links.get_mut(&3).unwrap().mac = mac;
    let layout = Layout::of(&made, &config);
    assert!(layout.faults.is_empty() && layout.actions.is_empty(), "{layout:?}");
}

#[test]
fn the_primary_link_comes_first() {
    let mut config = network(Vec::new(), vec![vlan("eth0", 7), vlan("eth1", 8)]);
    config.vlans[1].settings.primary = true;
    let made = made(observed(), &config);
    let first = Layout::of(&made, &config).settings[0].0;
    assert_eq!(made.links[&first].name, "eth1.8");
}

fn any_network() -> impl Strategy<Value = Network> {
    let mode = prop_oneof![
        Just(Bonding::ActiveBackup),
        Just(Bonding::Lacp { hash: Hash::Layer2, min_links: 0 }),
        Just(Bonding::Lacp { hash: Hash::Layer3And4, min_links: 1 }),
    ];
    let members = prop::sample::subsequence(vec!["eth0", "eth1", "eth9"], 0..3);
    let bonds = prop::collection::vec((members, mode), 0..3);
    let vlans = prop::collection::btree_set(
        (prop::sample::select(vec!["bond0", "bond1", "eth0", "eth1"]), 1u16..4),
        0..4,
    );
    (bonds, vlans).prop_map(|(bonds, vlans)| {
        let bonds = bonds.iter().enumerate();
        let bonds = bonds.map(|(at, (members, mode))| bond(&format!("bond{at}"), members, *mode));
        network(bonds.collect(), vlans.into_iter().map(|(parent, id)| vlan(parent, id)).collect())
    })
}

proptest! {
    /// From any configuration to any other, and a second look changes nothing.
    #[test]
    fn links_are_made_in_rounds(configs in prop::collection::vec(any_network(), 1..4)) {
        let mut machine = observed();
        for config in &configs {
            machine = made(machine, config);
            let layout = Layout::of(&machine, config);
            prop_assert!(layout.joining.is_empty(), "{layout:?}");
            let links: BTreeSet<u32> = layout.settings.iter().map(|(index, _)| *index).collect();
            prop_assert_eq!(links.len(), layout.settings.len(), "one part for each link");
        }
        machine = made(machine, &Network::default());
        prop_assert_eq!(machine.links.len(), observed().links.len());
    }
}
