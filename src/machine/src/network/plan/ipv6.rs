//! What each link does about IPv6: the switches of the kernel, and what is asked of DHCPv6.
//!
//! ```text
//! AUTO    SLAAC;  flag M: an address by DHCPv6;  flag O alone: servers by DHCPv6
//! SLAAC   SLAAC
//! DHCPV6          an address by DHCPv6, without a flag, too
//! OFF     nothing: the kernel has no IPv6 on the link
//! ```
//!
//! What has been asked for is asked for as long as the link has a carrier: with two routers, the
//! flags of the one that advertised last count in the kernel.

use std::collections::{BTreeMap, BTreeSet};

use super::super::dhcpv6::{Servers, Want};
use super::super::lease::Lease;
use super::super::rdnss;
use super::{Cidr, Kind, Layout, Link, Observed, Wanted};
use crate::parameters::{self, Ipv6};

/// The switches of a link in the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(in super::super) struct Switches {
    /// It makes addresses of advertised prefixes.
    pub(in super::super) slaac: bool,
    /// It has no IPv6.
    pub(in super::super) off: bool,
}

impl Switches {
    fn of(ipv6: Ipv6) -> Self {
        Self { slaac: ipv6 != Ipv6::Dhcpv6, off: ipv6 == Ipv6::Off }
    }
}

/// What is known about DHCPv6.
#[derive(Debug, Default)]
pub(in super::super) struct KnownV6<'a> {
    pub(in super::super) leases: BTreeMap<u32, &'a Lease>,
    /// The servers that links without an address got.
    pub(in super::super) servers: Option<&'a BTreeMap<u32, Servers>>,
    /// What is asked for already.
    pub(in super::super) asking: BTreeMap<u32, Want>,
    /// Addresses of a former run that no server has given to this one yet.
    pub(in super::super) inherited: Option<&'a BTreeSet<(u32, Cidr)>>,
}

/// The configuration of each link that has addresses.
pub(in super::super) fn modes(
    observed: &Observed,
    config: &parameters::Network,
) -> BTreeMap<u32, Ipv6> {
    if config.is_automatic() {
        return observed.free_cards().map(|index| (index, Ipv6::Auto)).collect();
    }
    let settings = Layout::of(observed, config).settings.into_iter();
    settings.map(|(index, settings)| (index, settings.ipv6)).collect()
}

/// The links that may ask DHCPv6, with or without a carrier.
pub(in super::super) fn candidates(modes: &BTreeMap<u32, Ipv6>) -> Vec<u32> {
    let may = |(_, ipv6): &(&u32, &Ipv6)| matches!(ipv6, Ipv6::Auto | Ipv6::Dhcpv6);
    modes.iter().filter(may).map(|(index, _)| *index).collect()
}

impl Wanted {
    /// Adds what this configuration wants of IPv6.
    pub(in super::super) fn ipv6(
        &mut self,
        observed: &Observed,
        config: &parameters::Network,
        known: &KnownV6<'_>,
    ) {
        let modes = modes(observed, config);
        let is_own = |link: &Link| link.kind != Kind::Loopback && link.master.is_none();
        let links = observed.links.iter().filter(|(_, link)| is_own(link));
        self.switches = links
            .map(|(index, _)| (*index, modes.get(index).copied().unwrap_or_default()))
            .map(|(index, ipv6)| (index, Switches::of(ipv6)))
            .collect();
        for (index, ipv6) in &modes {
            let link = observed.links.get(index).filter(|link| link.carrier);
            let want = link.and_then(|link| want(link, *ipv6, known.asking.get(index).copied()));
            self.dhcpv6.extend(want.map(|want| (*index, want)));
        }
        let mut links = candidates(&modes);
        // The servers of an unplugged link come last: nothing reaches them over it.
        links.sort_by_key(|index| observed.links.get(index).is_none_or(|link| !link.carrier));
        for index in links {
            if let Some(lease) = known.leases.get(&index) {
                if !self.has_otherwise(observed, index, lease.address) {
                    self.addresses.entry((index, lease.address)).or_insert(Some(lease.lifetime));
                }
                self.serve(&lease.nameservers, &lease.ntp_servers);
            } else if let Some(servers) = known.servers.and_then(|servers| servers.get(&index)) {
                self.serve(&servers.nameservers, &servers.ntp_servers);
            }
        }
        let asks = |index: &u32| self.dhcpv6.get(index) == Some(&Want::Address);
        let inherited = known.inherited.into_iter().flatten();
        self.kept = inherited.filter(|(index, _)| asks(index)).copied().collect();
    }

    /// Whether the link has this address with another prefix, or the parameters give it so. The
    /// kernel has an address of IPv6 once on a link: to add it again would change the lifetime of
    /// the one that is there, at every look.
    fn has_otherwise(&self, observed: &Observed, link: u32, address: Cidr) -> bool {
        let mut all = self.addresses.keys().chain(&observed.addresses);
        all.any(|(of, cidr)| *of == link && cidr.address() == address.address() && *cidr != address)
    }

    /// Adds the name servers that routers advertise, those on the node's own link first. They come
    /// behind the servers of DHCP (RFC 8106, 5.3.1).
    pub(in super::super) fn name_servers(&mut self, links: &[u32], servers: &rdnss::Servers) {
        let own = self.primary.map(|(link, _)| link).filter(|link| links.contains(link));
        for link in own.iter().chain(links) {
            self.serve(&servers.of(*link), &[]);
        }
    }
}

/// The links whose router advertisements count: those with a carrier and IPv6. Without a
/// configuration yet, every link with a carrier that is not a member of a bond.
pub(in super::super) fn listening(
    observed: &Observed,
    config: Option<&parameters::Network>,
) -> Vec<u32> {
    let modes = config.map(|config| modes(observed, config));
    let is_on = |index: &u32| match &modes {
        Some(modes) => modes.get(index).is_some_and(|ipv6| *ipv6 != Ipv6::Off),
        None => true,
    };
    let links = observed.links.iter();
    let links = links.filter(|(_, link)| link.kind != Kind::Loopback && link.master.is_none());
    links.filter(|(index, link)| link.carrier && is_on(index)).map(|(index, _)| *index).collect()
}

fn want(link: &Link, ipv6: Ipv6, asked: Option<Want>) -> Option<Want> {
    match ipv6 {
        Ipv6::Slaac | Ipv6::Off => None,
        Ipv6::Dhcpv6 => Some(Want::Address),
        Ipv6::Auto if link.managed || asked == Some(Want::Address) => Some(Want::Address),
        Ipv6::Auto => asked.or(link.informed.then_some(Want::Servers)),
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{observed, unplug};
    use super::super::{Action, Former, actions, wanted};
    use super::*;
    use crate::parameters::{Interface, LinkSettings, Network};

    fn network(ipv6: Ipv6) -> Network {
        let settings = LinkSettings { ipv6, ..LinkSettings::default() };
        let card = super::super::tests::card("eth0");
        Network { interfaces: vec![Interface { card, settings }], ..Network::default() }
    }

    /// `eth0` with a router that has these flags, and the kernel's usual switches.
    fn advertised(managed: bool, informed: bool) -> Observed {
        let mut observed = observed();
        for link in observed.links.values_mut() {
            link.switches = Some(Switches { slaac: true, off: false });
        }
        let eth0 = observed.links.get_mut(&2).unwrap();
        (eth0.managed, eth0.informed) = (managed, informed);
        observed
    }

    fn plan(observed: &Observed, config: &Network, known: &KnownV6<'_>) -> Wanted {
        let mut wanted = wanted(observed, Some(config), &BTreeMap::new());
        wanted.ipv6(observed, config, known);
        wanted
    }

    #[test]
    fn the_flags_of_a_router_count_where_the_configuration_leaves_it_to_them() {
        let (address, servers) = (Some(Want::Address), Some(Want::Servers));
        for (ipv6, managed, informed, want) in [
            (Ipv6::Auto, false, false, None),
            (Ipv6::Auto, false, true, servers),
            (Ipv6::Auto, true, false, address),
            (Ipv6::Auto, true, true, address),
            (Ipv6::Slaac, true, true, None),
            (Ipv6::Dhcpv6, false, false, address),
            (Ipv6::Dhcpv6, false, true, address),
            (Ipv6::Off, true, true, None),
        ] {
            let observed = advertised(managed, informed);
            let wanted = plan(&observed, &network(ipv6), &KnownV6::default());
            assert_eq!(wanted.dhcpv6.get(&2).copied(), want, "{ipv6} {managed} {informed}");
            assert_eq!(wanted.dhcpv6.get(&3), None, "a card that is not configured");
        }
        // Without a configuration, each card does as its router says.
        let wanted = plan(&advertised(true, false), &Network::default(), &KnownV6::default());
        assert_eq!(wanted.dhcpv6, BTreeMap::from([(2, Want::Address)]));
    }

    #[test]
    fn a_link_goes_on_asking_when_another_router_has_other_flags_and_not_without_a_carrier() {
        let asking = BTreeMap::from([(2, Want::Address)]);
        let known = || KnownV6 { asking: asking.clone(), ..KnownV6::default() };
        let (plain, auto) = (advertised(false, true), network(Ipv6::Auto));
        assert_eq!(plan(&plain, &auto, &known()).dhcpv6, asking);
        assert!(plan(&unplug(plain.clone(), 2), &auto, &known()).dhcpv6.is_empty());
        assert!(plan(&plain, &network(Ipv6::Slaac), &known()).dhcpv6.is_empty());
    }

    #[test]
    fn the_switches_of_the_kernel_follow_the_configuration_and_return() {
        let turn = |slaac, off| Action::Switch(2, "eth0".to_owned(), Switches { slaac, off });
        for (ipv6, expected) in [
            (Ipv6::Auto, None),
            (Ipv6::Slaac, None),
            (Ipv6::Dhcpv6, Some(turn(false, false))),
            (Ipv6::Off, Some(turn(true, true))),
        ] {
            let mut observed = advertised(false, false);
            let wanted = plan(&observed, &network(ipv6), &KnownV6::default());
            let made = actions(&observed, &wanted, Former::Keep, &[]);
            assert_eq!(made, expected.into_iter().collect::<Vec<_>>(), "{ipv6}");
            // And back, as another network is in force.
            observed.links.get_mut(&2).unwrap().switches = Some(Switches::of(ipv6));
            let wanted = plan(&observed, &Network::default(), &KnownV6::default());
            let made = actions(&observed, &wanted, Former::Keep, &[]);
            let back = (Switches::of(ipv6) != Switches::of(Ipv6::Auto)).then(|| turn(true, false));
            assert_eq!(made, back.into_iter().collect::<Vec<_>>(), "from {ipv6}");
        }
    }

    #[test]
    fn an_address_of_a_server_is_whole_and_a_prefix_gives_none_where_dhcpv6_is_asked_alone() {
        let lease = Lease::check_v6(
            "2001:db8::7".parse().unwrap(),
            600,
            std::net::Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 2).into(),
        );
        let lease = lease.unwrap();
        let known = KnownV6 { leases: BTreeMap::from([(2, &lease)]), ..KnownV6::default() };
        let made: Cidr = "2001:db8::5054:ff:fe00:2/64".parse().unwrap();
        for (ipv6, stays) in [(Ipv6::Auto, true), (Ipv6::Dhcpv6, false)] {
            let mut observed = advertised(true, false);
            observed.addresses.insert((2, made));
            let wanted = plan(&observed, &network(ipv6), &known);
            let made_of_prefix = Action::RemoveAddress(2, made);
            let all = actions(&observed, &wanted, Former::Keep, &[]);
            assert!(all.contains(&Action::AddAddress(2, lease.address, Some(lease.lifetime))));
            assert_eq!(all.contains(&made_of_prefix), !stays, "{ipv6}: {all:?}");
        }
    }

    #[test]
    fn the_name_servers_of_an_unplugged_link_come_behind_those_of_the_others() {
        let router = std::net::Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 2);
        let servers = ["2001:db8::53", "2001:db8:1::53"];
        let servers = servers.map(|server| server.parse::<std::net::IpAddr>().unwrap());
        let lease = |address: &str, server| {
            let lease = Lease::check_v6(address.parse().unwrap(), 600, router.into()).unwrap();
            Lease { nameservers: vec![server], ..lease }
        };
        let (first, other) = (lease("2001:db8::7", servers[0]), lease("2001:db8:1::7", servers[1]));
        let named = |observed: &Observed| {
            let leases = BTreeMap::from([(2, &first), (3, &other)]);
            let known = KnownV6 { leases, ..KnownV6::default() };
            plan(observed, &Network::default(), &known).nameservers
        };
        let both = advertised(true, false);
        assert_eq!(named(&both), servers);
        assert_eq!(named(&unplug(both, 2)), [servers[1], servers[0]]);
    }

    #[test]
    fn an_address_that_the_link_has_with_another_prefix_is_not_added_by_dhcpv6() {
        let server = std::net::Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 2);
        let lease = Lease::check_v6("2001:db8::7".parse().unwrap(), 600, server.into()).unwrap();
        let known = KnownV6 { leases: BTreeMap::from([(2, &lease)]), ..KnownV6::default() };
        let there: Cidr = "2001:db8::7/64".parse().unwrap();
        let (mut observed, mut fixed) = (advertised(true, false), network(Ipv6::Auto));
        fixed.interfaces[0].settings.addresses.push(there);
        let wanted = plan(&observed, &fixed, &known);
        let made = actions(&observed, &wanted, Former::Keep, &[]);
        assert_eq!(made, [Action::AddAddress(2, there, None)], "the parameters give it");

        observed.addresses.insert((2, there));
        let wanted = plan(&observed, &network(Ipv6::Auto), &known);
        let made = actions(&observed, &wanted, Former::Keep, &[]);
        assert!(made.is_empty(), "the kernel made it of a prefix: {made:?}");
        observed.addresses.clear();
        let wanted = plan(&observed, &network(Ipv6::Auto), &known);
        let made = actions(&observed, &wanted, Former::Keep, &[]);
        assert_eq!(made, [Action::AddAddress(2, lease.address, Some(lease.lifetime))]);
    }

    #[test]
    fn an_address_of_a_former_run_stays_until_a_server_has_answered() {
        let former = (2, "2001:db8::7/128".parse().unwrap());
        let mut observed = advertised(true, false);
        observed.addresses.insert(former);
        observed.own.insert(former);
        let inherited = BTreeSet::from([former]);
        let removes = |inherited: &BTreeSet<(u32, Cidr)>, ipv6| {
            let known = KnownV6 { inherited: Some(inherited), ..KnownV6::default() };
            let wanted = plan(&observed, &network(ipv6), &known);
            let all = actions(&observed, &wanted, Former::Remove, &[]);
            all.contains(&Action::RemoveAddress(former.0, former.1))
        };
        assert!(!removes(&inherited, Ipv6::Auto));
        assert!(removes(&BTreeSet::new(), Ipv6::Auto), "a server has given another one");
        assert!(removes(&inherited, Ipv6::Slaac), "nothing asks for it");
    }
}
