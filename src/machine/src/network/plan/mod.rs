//! Decides what links, addresses and routes the machine should have.
//!
//! This module only computes: the state of the kernel, the parameters and the leases of
//! DHCP go in; the wanted state comes out, and then the difference.
//!
//! ```text
//! no interface configured:  every link up; all with carrier ask DHCP; one lease is the
//!                           node's (`primary`), its link alone goes on asking; without a
//!                           lease, an address from a router is (`advertised`)
//! links configured:         every link up; bonds and VLANs are made (`links`); each does what
//!                           its configuration says, the others nothing
//! ```
//!
//! Invariants:
//! - Applying the plan to what it was made from and planning again gives no action.
//! - An IPv4 address is taken away only when another is wanted or one was lost:
//!   a restarted service leaves the address of its former run alone.

mod ipv6;
mod links;
mod waiting;

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv6Addr};
use std::time::Duration;

use super::dhcpv6::Want;
use super::lease::Lease;
use crate::parameters::{self, Bonding, Cidr, Ipv6, LinkSettings, Mac};

pub(super) use self::ipv6::{KnownV6, Switches, candidates as candidates_v6, listening, modes};
pub(super) use self::links::Layout;
pub(super) use self::waiting::waiting;

/// The state of the kernel.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Observed {
    /// By index.
    pub(super) links: BTreeMap<u32, Link>,
    /// Without link-local ones.
    pub(super) addresses: BTreeSet<(u32, Cidr)>,
    /// The faults of some of them; IPv6 only.
    pub(super) flaws: BTreeMap<(u32, Cidr), Flaw>,
    /// Those that this module or its former runs added.
    pub(super) own: BTreeSet<(u32, Cidr)>,
    /// Those that the kernel removes at the end of their lifetime.
    pub(super) ending: BTreeSet<(u32, Cidr)>,
    /// Those that this module or its former runs made.
    pub(super) routes: BTreeSet<Route>,
}

impl Observed {
    /// Whether the machine has an address, and no other machine has it, too.
    pub(super) fn has(&self, address: (u32, Cidr)) -> bool {
        self.addresses.contains(&address) && self.flaws.get(&address) != Some(&Flaw::Duplicate)
    }

    /// The most bytes in a packet of this link: of a bond, as many as each of its members takes.
    fn mtu_max(&self, link: u32) -> Option<u32> {
        let parts = self.links.iter();
        let parts = parts.filter(|(index, part)| **index == link || part.master == Some(link));
        parts.filter_map(|(_, part)| part.mtu_max).min()
    }

    /// The cards that no bond has.
    fn free_cards(&self) -> impl Iterator<Item = u32> {
        let free = |link: &Link| link.kind == Kind::Ethernet && link.master.is_none();
        self.links.iter().filter(move |(_, link)| free(link)).map(|(index, _)| *index)
    }
}

/// Why an IPv6 address should not be chosen as the node's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Flaw {
    /// Another machine of the segment has it.
    Duplicate,
    /// The kernel still asks whether another machine has it.
    Tentative,
    /// It is temporary, or its router advises against it by now.
    Passing,
}

/// A link that this module cares for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Link {
    pub(super) kind: Kind,
    pub(super) name: String,
    pub(super) mac: Mac,
    /// The hardware address that its maker gave it: that of a member of a bond is another one.
    pub(super) hardware: Mac,
    pub(super) up: bool,
    pub(super) carrier: bool,
    pub(super) mtu: u32,
    /// The most that it takes, where its driver says so.
    pub(super) mtu_max: Option<u32>,
    /// The bond that it is a member of.
    pub(super) master: Option<u32>,
    /// Whether that sends through it: an active backup waits.
    pub(super) active: bool,
    /// The kernel's driver, if it has one.
    pub(super) driver: Option<String>,
    /// Where its hardware is, below `/sys/devices`; the same at each boot. Empty without.
    pub(super) place: String,
    /// Whether that is behind USB.
    pub(super) usb: bool,
    /// The router that advertises itself there as the way out, by IPv6.
    pub(super) router: Option<Ipv6Addr>,
    /// Whether routers there say that a DHCPv6 server gives the addresses (the flag M).
    pub(super) managed: bool,
    /// Whether they say that it names servers (the flag O).
    pub(super) informed: bool,
    /// What the kernel does about IPv6; `None`: it has none at all.
    pub(super) switches: Option<Switches>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Loopback,
    /// A card.
    Ethernet,
    /// `None`: a mode in which the node makes none.
    Bond(Option<Bonding>),
    Vlan {
        parent: u32,
        id: u16,
    },
}

/// The origin of a route; the kernel remembers it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Origin {
    Parameters,
    Dhcp,
}

/// A route of the main table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Route {
    pub(super) link: u32,
    pub(super) destination: Cidr,
    pub(super) gateway: Option<IpAddr>,
    pub(super) metric: u32,
    pub(super) origin: Origin,
    /// The gateway is on the wire, although the link has no address in its network.
    pub(super) on_link: bool,
}

/// The wanted state.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Wanted {
    up: BTreeSet<u32>,
    mtu: BTreeMap<u32, u32>,
    /// With the rest of their lifetime; `None` is forever.
    addresses: BTreeMap<(u32, Cidr), Option<Duration>>,
    routes: BTreeSet<Route>,
    /// Links that ask DHCP.
    pub(super) dhcp: BTreeSet<u32>,
    /// Links that ask DHCPv6, and what for.
    pub(super) dhcpv6: BTreeMap<u32, Want>,
    switches: BTreeMap<u32, Switches>,
    /// Addresses that stay, although nothing wants them yet.
    kept: BTreeSet<(u32, Cidr)>,
    /// The node's address, whether or not the kernel has it already.
    pub(super) primary: Option<(u32, Cidr)>,
    pub(super) gateway: Option<IpAddr>,
    pub(super) nameservers: Vec<IpAddr>,
    pub(super) ntp_servers: Vec<String>,
}

/// One step from the present to the wanted state.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Action {
    /// Of a bond or a VLAN; the VLANs on it go with it.
    RemoveLink(u32),
    /// With this hardware address, or that of the first card that joins.
    AddBond(String, Bonding, Option<Mac>),
    AddVlan {
        name: String,
        parent: u32,
        id: u16,
    },
    /// A card leaves its bond.
    Leave(u32),
    Join {
        link: u32,
        bond: u32,
    },
    Up(u32),
    Mtu(u32, u32),
    /// The switches of the link with this name.
    Switch(u32, String, Switches),
    RemoveAddress(u32, Cidr),
    /// Also renews the lifetime of an address that is there.
    AddAddress(u32, Cidr, Option<Duration>),
    RemoveRoute(Route),
    AddRoute(Route),
}

/// IPv6 routes without a metric get this one from the kernel.
const METRIC_DEFAULT_V6: u32 = 1024;

/// Milliseconds between two looks of a bond at the carrier of its members: a pulled cable costs
/// less than a TCP connection notices.
pub(super) const MIIMON: u32 = 100;

/// The mark of the node beside an address that it adds: the number of a static route. The
/// kernel notes other numbers beside its own.
pub(super) const OWN: u8 = 4;

/// The MTU of a bond or a VLAN for which nothing says another.
const MTU_DEFAULT: u32 = 1500;

/// The links that may ask DHCP, with or without carrier.
pub(super) fn candidates(observed: &Observed, config: &parameters::Network) -> Vec<u32> {
    links_with(observed, config, |settings| settings.dhcp)
}

/// The links whose address a router or a DHCPv6 server may give: those without one in the
/// parameters.
pub(super) fn routed(observed: &Observed, config: &parameters::Network) -> Vec<u32> {
    links_with(observed, config, |settings| {
        settings.addresses.is_empty() && settings.ipv6 != Ipv6::Off
    })
}

/// The configured links whose settings are so, and every card without a configuration.
fn links_with(
    observed: &Observed,
    config: &parameters::Network,
    are: impl Fn(&LinkSettings) -> bool,
) -> Vec<u32> {
    if config.is_automatic() {
        return observed.free_cards().collect();
    }
    let mut links: Vec<u32> = Layout::of(observed, config)
        .settings
        .into_iter()
        .filter(|(_, settings)| are(settings))
        .map(|(index, _)| index)
        .collect();
    links.sort_unstable();
    links
}

/// The links that ask DHCP now, when all that may do so.
pub(super) fn all_ask(observed: &Observed, config: &parameters::Network) -> BTreeSet<u32> {
    let carrier = |index: &u32| observed.links.get(index).is_some_and(|link| link.carrier);
    candidates(observed, config).into_iter().filter(carrier).collect()
}

/// Plans. `config` is `None` until the parameters are known: then links come up,
/// and nothing else.
pub(super) fn wanted(
    observed: &Observed,
    config: Option<&parameters::Network>,
    leases: &BTreeMap<u32, &Lease>,
) -> Wanted {
    let mut wanted = Wanted { up: observed.links.keys().copied().collect(), ..Wanted::default() };
    let Some(config) = config else { return wanted };
    wanted.nameservers.clone_from(&config.nameservers);
    wanted.ntp_servers.clone_from(&config.ntp_servers);

    let layout = Layout::of(observed, config);
    // The bond brings them up; until then they have to be down.
    wanted.up.retain(|index| !layout.joining.contains(index));
    // In the order of the configuration, so that the first of them gives the primary address.
    for (at, (index, settings)) in layout.settings.iter().enumerate() {
        wanted.configure(*index, settings);
        if let Some(lease) = leases.get(index) {
            wanted.take(observed, *index, lease, u32::try_from(at).unwrap_or(0));
        }
    }
    if config.is_automatic() {
        for index in observed.free_cards() {
            if let Some(lease) = leases.get(&index) {
                wanted.take(observed, index, lease, 0);
            }
        }
    }
    wanted.fit_mtus(observed);
    wanted.fit_gateway();

    wanted.dhcp = all_ask(observed, config);
    if config.is_automatic() && !leases.is_empty() {
        wanted.dhcp.retain(|index| leases.contains_key(index));
    }
    wanted
}

impl Action {
    /// The same whenever it is tried: what is left of a lifetime shrinks.
    pub(super) fn timeless(&self) -> Self {
        match self {
            Self::AddAddress(link, cidr, _) => Self::AddAddress(*link, *cidr, None),
            other => other.clone(),
        }
    }
}

impl Wanted {
    /// Adds the parameters of a link.
    fn configure(&mut self, link: u32, settings: &LinkSettings) {
        if let Some(mtu) = settings.mtu {
            self.mtu.insert(link, mtu);
        }
        for address in &settings.addresses {
            self.addresses.insert((link, *address), None);
            self.primary.get_or_insert((link, *address));
        }
        for route in &settings.routes {
            if route.destination.prefix() == 0 {
                self.gateway.get_or_insert(route.gateway);
            }
            let metric = match (route.metric, route.gateway) {
                (0, IpAddr::V6(_)) => METRIC_DEFAULT_V6,
                (metric, _) => metric,
            };
            self.add_route(Route {
                link,
                destination: route.destination,
                gateway: Some(route.gateway),
                metric,
                origin: Origin::Parameters,
                on_link: !is_on_wire(route.gateway)
                    && !settings.addresses.iter().any(|own| own.contains(route.gateway)),
            });
        }
    }

    /// Adds a route, unless there is one to its destination with its metric: the kernel has only
    /// one, and two would replace each other at every look. The parameters come before DHCP, and
    /// then the first link that has one.
    fn add_route(&mut self, route: Route) {
        let key = |route: &Route| (route.destination, route.metric);
        let known = self.routes.iter().find(|known| key(known) == key(&route)).copied();
        if let Some(known) = known {
            if known.origin <= route.origin {
                return;
            }
            self.routes.remove(&known);
        }
        self.routes.insert(route);
    }

    /// Replaces a gateway whose route gave way to one of the parameters.
    fn fit_gateway(&mut self) {
        let ways_out = || self.routes.iter().filter(|route| route.destination.prefix() == 0);
        if ways_out().all(|route| route.gateway != self.gateway) {
            self.gateway = ways_out().find_map(|route| route.gateway);
        }
    }

    /// Gives every bond and VLAN an MTU: it may have one of a former configuration. A VLAN takes
    /// no more than the link below it, whatever DHCP says.
    fn fit_mtus(&mut self, observed: &Observed) {
        for (index, link) in &observed.links {
            if let Kind::Bond(_) = link.kind {
                self.mtu.entry(*index).or_insert(MTU_DEFAULT);
            }
        }
        for (index, link) in &observed.links {
            let Kind::Vlan { parent, .. } = link.kind else { continue };
            let below = self.mtu.get(&parent).copied();
            let below = below.or_else(|| observed.links.get(&parent).map(|parent| parent.mtu));
            let mtu = self.mtu.entry(*index).or_insert(MTU_DEFAULT);
            *mtu = below.map_or(*mtu, |below| below.min(*mtu));
        }
    }

    /// Gives cards for which nothing says an MTU the one that they had before this run set one.
    pub(super) fn restore(&mut self, observed: &Observed, before: &BTreeMap<u32, u32>) {
        for index in observed.free_cards() {
            if let Some(mtu) = before.get(&index) {
                self.mtu.entry(index).or_insert(*mtu);
            }
        }
    }

    /// Takes an address that the kernel has, from a router or by DHCPv6, as the node's.
    pub(super) fn advertised(&mut self, observed: &Observed, (link, address): (u32, Cidr)) {
        self.primary = Some((link, address));
        let router = observed.links.get(&link).and_then(|link| link.router);
        self.gateway = self.gateway.or(router.map(IpAddr::V6));
    }

    /// Adds what DHCP gave a link.
    fn take(&mut self, observed: &Observed, link: u32, lease: &Lease, metric: u32) {
        if let Some(mtu) = lease.mtu {
            // The kernel refuses more.
            let mtu = observed.mtu_max(link).map_or(mtu, |max| max.min(mtu));
            self.mtu.entry(link).or_insert(mtu);
        }
        // One of the parameters has no end, also where a server gives it.
        self.addresses.entry((link, lease.address)).or_insert(Some(lease.lifetime));
        self.primary.get_or_insert((link, lease.address));
        if let Some(gateway) = lease.gateway() {
            self.gateway.get_or_insert(gateway.into());
        }
        for (destination, gateway) in &lease.routes {
            self.add_route(Route {
                link,
                destination: *destination,
                gateway: gateway.map(IpAddr::V4),
                metric,
                origin: Origin::Dhcp,
                on_link: gateway.is_some_and(|gateway| !lease.address.contains(gateway.into())),
            });
        }
        self.serve(&lease.nameservers, &lease.ntp_servers);
    }

    /// Adds servers, behind those that are known.
    fn serve(&mut self, nameservers: &[IpAddr], ntp_servers: &[IpAddr]) {
        for server in nameservers {
            if !self.nameservers.contains(server) {
                self.nameservers.push(*server);
            }
        }
        for server in ntp_servers.iter().map(ToString::to_string) {
            if !self.ntp_servers.contains(&server) {
                self.ntp_servers.push(server);
            }
        }
    }
}

/// Whether the kernel itself takes a gateway to be on the wire: a link-local one of IPv6. It has no
/// such rule for IPv4, and refuses the route unless the gateway is in a network of the link.
fn is_on_wire(gateway: IpAddr) -> bool {
    matches!(gateway, IpAddr::V6(v6) if v6.is_unicast_link_local())
}

/// Whether addresses that the plan does not want are taken away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Former {
    /// They may be of a former run, whose lease this run is about to get again.
    Keep,
    /// This run has had an address of its own.
    Remove,
}

/// The difference. `renewed` are the addresses whose leases were just renewed.
pub(super) fn actions(
    observed: &Observed,
    wanted: &Wanted,
    former: Former,
    renewed: &[(u32, Cidr)],
) -> Vec<Action> {
    let mut actions = Vec::new();
    let links = &observed.links;
    let down = |index: &&u32| links.get(index).is_some_and(|link| !link.up);
    actions.extend(wanted.up.iter().filter(down).map(|index| Action::Up(*index)));
    let other = |(index, mtu): &(&u32, &u32)| links.get(index).is_some_and(|l| l.mtu != **mtu);
    actions.extend(wanted.mtu.iter().filter(other).map(|(index, mtu)| Action::Mtu(*index, *mtu)));
    for (index, switches) in &wanted.switches {
        let Some(link) = links.get(index) else { continue };
        if link.switches.is_some_and(|is| is != *switches) {
            actions.push(Action::Switch(*index, link.name.clone(), *switches));
        }
    }

    let is_ours = |index: &u32| links.get(index).is_some_and(|l| l.kind != Kind::Loopback);
    let wants_v4 = wanted.addresses.keys().any(|(_, cidr)| cidr.address().is_ipv4());
    if former == Former::Remove || wants_v4 {
        // Other IPv6 addresses are the kernel's, by router advertisement.
        let surplus = observed.addresses.iter().filter(|(index, cidr)| {
            let of = (*index, *cidr);
            (cidr.address().is_ipv4() || observed.own.contains(&of))
                && is_ours(index)
                && !wanted.addresses.contains_key(&of)
                && !wanted.kept.contains(&of)
        });
        actions.extend(surplus.map(|(index, cidr)| Action::RemoveAddress(*index, *cidr)));
    }
    // Those that it made before it got the order to make none.
    let prefixes_off = |index: &u32| wanted.switches.get(index).is_some_and(|it| !it.slaac);
    let made = observed.addresses.iter().filter(|(index, cidr)| {
        cidr.address().is_ipv6()
            && !observed.own.contains(&(*index, *cidr))
            && prefixes_off(index)
            && !wanted.addresses.contains_key(&(*index, *cidr))
    });
    actions.extend(made.map(|(index, cidr)| Action::RemoveAddress(*index, *cidr)));
    for (of, lifetime) in &wanted.addresses {
        let changes = match lifetime {
            Some(_) => renewed.contains(of),
            // A server gave it before the parameters did.
            None => observed.ending.contains(of),
        };
        if changes || !observed.addresses.contains(of) {
            actions.push(Action::AddAddress(of.0, of.1, *lifetime));
        }
    }
    if former == Former::Remove || !wanted.routes.is_empty() {
        let surplus = observed.routes.difference(&wanted.routes);
        actions.extend(surplus.map(|route| Action::RemoveRoute(*route)));
    }
    let missing = wanted.routes.difference(&observed.routes);
    actions.extend(missing.map(|route| Action::AddRoute(*route)));
    actions
}

#[cfg(test)]
pub(super) mod tests;
