//! The check of leases that DHCP servers offer.
//!
//! Anyone on the wire can answer a DHCP request, so a lease is bounded and checked field
//! by field: a bad field that the node needs is refused with its reason, a bad field that
//! it can do without is left out.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::Duration;

use mozim::DhcpV4Lease;

use crate::parameters::Cidr;

/// Servers of one kind that are kept: the resolver reads three.
pub(super) const SERVERS_MAX: usize = 3;
/// Classless routes that are kept.
const ROUTES_MAX: usize = 64;
/// Shorter leases would be renewed without end.
const LIFETIME_MIN: Duration = Duration::from_secs(30);
/// The least that IPv6 needs; less would cut the node's own traffic to pieces.
const MTU_MIN: u16 = 1280;

/// Where to, and the next hop.
type Hop = (Cidr, Option<Ipv4Addr>);

/// The lease that a DHCP server gave this node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Lease {
    /// The address, with the length of its network.
    pub(super) address: Cidr,
    /// Where to, and the next hop; `None` is the network itself.
    pub(super) routes: Vec<Hop>,
    pub(super) nameservers: Vec<IpAddr>,
    pub(super) ntp_servers: Vec<IpAddr>,
    pub(super) mtu: Option<u32>,
    /// From the answer on; of a lease that is held, what is left of it.
    pub(super) lifetime: Duration,
    /// The server that gave it.
    pub(super) server: IpAddr,
}

/// Why an offer is not taken.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Refused {
    #[error("the address {0} is not a host address")]
    Address(IpAddr),
    #[error("the network mask {0} is invalid")]
    Mask(Ipv4Addr),
    #[error("the lease ends after {} s, allowed is at least {} s", .0.as_secs(), LIFETIME_MIN.as_secs())]
    Lifetime(Duration),
}

impl Lease {
    /// The default gateway.
    pub(super) fn gateway(&self) -> Option<Ipv4Addr> {
        let default = |(destination, _): &&Hop| destination.prefix() == 0;
        self.routes.iter().find(default).and_then(|(_, gateway)| *gateway)
    }

    /// Checks an answer.
    pub(super) fn check(offer: &DhcpV4Lease) -> Result<Self, Refused> {
        let address = cidr(offer.yiaddr, offer.subnet_mask)?;
        let lifetime = Duration::from_secs(offer.lease_time_sec.into());
        if lifetime < LIFETIME_MIN {
            return Err(Refused::Lifetime(lifetime));
        }
        // The kernel refuses a gateway that is this machine, or all machines of its network.
        let broadcast = offer.yiaddr.to_bits() | !offer.subnet_mask.to_bits();
        let is_gateway = |gateway: Ipv4Addr| {
            let is_broadcast = address.prefix() < 31 && gateway.to_bits() == broadcast;
            gateway != offer.yiaddr && is_host(gateway) && !is_broadcast
        };
        let routes = match &offer.classless_routes {
            // RFC 3442: with these, the router option does not count.
            Some(routes) => first_of_each(routes.iter().filter_map(|route| {
                let destination =
                    Cidr::new(route.destination.into(), route.prefix_length)?.network();
                match route.router {
                    // The kernel has that route by itself. This one would replace it, and its
                    // removal with a later lease would leave the address without any.
                    Ipv4Addr::UNSPECIFIED if destination == address.network() => None,
                    Ipv4Addr::UNSPECIFIED => Some((destination, None)),
                    router => is_gateway(router).then_some((destination, Some(router))),
                }
            })),
            None => first_of_each(
                hosts(offer.gateways.as_deref())
                    .filter(|gateway| is_gateway(*gateway))
                    .filter_map(|gateway| Some((everywhere()?, Some(gateway)))),
            ),
        };
        Ok(Self {
            address,
            routes,
            nameservers: servers(offer.dns_srvs.as_deref()),
            ntp_servers: servers(offer.ntp_srvs.as_deref()),
            mtu: offer.mtu.filter(|mtu| *mtu >= MTU_MIN).map(u32::from),
            lifetime,
            server: offer.srv_id.into(),
        })
    }
}

impl Lease {
    /// Checks an address that a DHCPv6 server gave for `valid` seconds.
    pub(super) fn check_v6(address: Ipv6Addr, valid: u32, server: IpAddr) -> Result<Self, Refused> {
        // The routes are from routers: the network of the address is not the server's to say.
        let whole = Cidr::new(address.into(), 128).filter(|_| is_host_v6(address));
        let address = whole.ok_or(Refused::Address(address.into()))?;
        let lifetime = Duration::from_secs(valid.into());
        if lifetime < LIFETIME_MIN {
            return Err(Refused::Lifetime(lifetime));
        }
        Ok(Self {
            address,
            routes: Vec::new(),
            nameservers: Vec::new(),
            ntp_servers: Vec::new(),
            mtu: None,
            lifetime,
            server,
        })
    }
}

/// The first route to each destination: the kernel has one, and another would take its place.
fn first_of_each(routes: impl Iterator<Item = Hop>) -> Vec<Hop> {
    let mut kept: Vec<Hop> = Vec::new();
    for (to, via) in routes {
        if kept.len() < ROUTES_MAX && kept.iter().all(|(known, _)| *known != to) {
            kept.push((to, via));
        }
    }
    kept
}

fn everywhere() -> Option<Cidr> {
    Cidr::new(Ipv4Addr::UNSPECIFIED.into(), 0)
}

/// Joins address and mask, if a host can have that address in such a network.
fn cidr(address: Ipv4Addr, mask: Ipv4Addr) -> Result<Cidr, Refused> {
    let ones = mask.to_bits().leading_ones();
    // A mask is ones, then zeros. An empty mask would put the world on the wire.
    if ones == 0 || mask.to_bits().count_ones() != ones {
        return Err(Refused::Mask(mask));
    }
    let host_bits = u32::MAX.checked_shr(ones).unwrap_or(0);
    let host = address.to_bits() & host_bits;
    // Networks of two addresses or one have neither a name nor a broadcast address.
    let reserved = ones < 31 && (host == 0 || host == host_bits);
    if !is_host(address) || reserved {
        return Err(Refused::Address(address.into()));
    }
    u8::try_from(ones)
        .ok()
        .and_then(|ones| Cidr::new(address.into(), ones))
        .ok_or(Refused::Mask(mask))
}

/// Whether one machine elsewhere, or this one, can have the address.
fn is_host(address: Ipv4Addr) -> bool {
    // 0.x.x.x is "this network"; from 224.0.0.0 on are multicast, reserved and broadcast.
    // Link-local ones are the business of the two ends: a management controller hands them out.
    !address.is_loopback() && !address.is_link_local() && (1..224).contains(&address.octets()[0])
}

/// The same for IPv6. Link-local addresses mean nothing without a link.
pub(super) fn is_host_v6(address: Ipv6Addr) -> bool {
    let special = address.is_unspecified() || address.is_loopback() || address.is_multicast();
    !special && !address.is_unicast_link_local() && address.to_ipv4_mapped().is_none()
}

fn hosts(addresses: Option<&[Ipv4Addr]>) -> impl Iterator<Item = Ipv4Addr> {
    addresses.unwrap_or_default().iter().copied().filter(|address| is_host(*address))
}

fn servers(addresses: Option<&[Ipv4Addr]>) -> Vec<IpAddr> {
    let mut servers = Vec::new();
    for server in hosts(addresses).map(IpAddr::V4) {
        if servers.len() < SERVERS_MAX && !servers.contains(&server) {
            servers.push(server);
        }
    }
    servers
}

#[cfg(test)]
mod tests {
    use mozim::DhcpV4ClasslessRoute;
    use proptest::prelude::*;

    use super::*;

    fn offer(address: &str, mask: &str) -> DhcpV4Lease {
        let mut offer = DhcpV4Lease::default();
        offer.yiaddr = address.parse().unwrap();
        offer.subnet_mask = mask.parse().unwrap();
        offer.lease_time_sec = 3600;
        offer
    }

    #[test]
    fn an_ordinary_offer_is_taken() {
        let mut offer = offer("10.0.2.15", "255.255.255.0");
        offer.gateways = Some(vec![Ipv4Addr::new(10, 0, 2, 2)]);
        offer.dns_srvs = Some(vec![Ipv4Addr::new(10, 0, 2, 3)]);
        let lease = Lease::check(&offer).unwrap();
        assert_eq!(lease.address.to_string(), "10.0.2.15/24");
        assert_eq!(lease.gateway(), Some(Ipv4Addr::new(10, 0, 2, 2)));
        assert_eq!(lease.nameservers, [IpAddr::from([10, 0, 2, 3])]);
    }

    #[test]
    fn an_address_that_no_host_can_have_is_refused() {
        for (address, mask) in [
            ("0.0.0.0", "255.255.255.0"),
            ("127.0.0.2", "255.0.0.0"),
            ("169.254.3.1", "255.255.0.0"),
            ("224.0.0.1", "255.255.255.0"),
            ("255.255.255.255", "255.255.255.255"),
            ("10.0.2.0", "255.255.255.0"),
            ("10.0.2.255", "255.255.255.0"),
        ] {
            let refused = Lease::check(&offer(address, mask));
            assert_eq!(refused, Err(Refused::Address(address.parse().unwrap())), "{address}");
        }
        assert!(Lease::check(&offer("10.0.2.0", "255.255.255.254")).is_ok());
        assert!(Lease::check(&offer("10.0.2.0", "255.255.255.255")).is_ok());
    }

    #[test]
    fn a_mask_with_holes_or_without_ones_is_refused() {
        for mask in ["0.0.0.0", "255.0.255.0", "0.255.255.255"] {
            assert!(matches!(Lease::check(&offer("10.0.2.15", mask)), Err(Refused::Mask(_))));
        }
    }

    #[test]
    fn a_lease_of_seconds_is_refused() {
        let mut offer = offer("10.0.2.15", "255.255.255.0");
        offer.lease_time_sec = 29;
        assert!(matches!(Lease::check(&offer), Err(Refused::Lifetime(_))));
    }

    #[test]
    fn classless_routes_replace_the_router() {
        let mut offer = offer("10.0.2.15", "255.255.255.0");
        offer.gateways = Some(vec![Ipv4Addr::new(10, 0, 2, 2)]);
        offer.classless_routes = Some(vec![DhcpV4ClasslessRoute {
            destination: Ipv4Addr::new(10, 1, 2, 3),
            prefix_length: 8,
            router: Ipv4Addr::UNSPECIFIED,
        }]);
        let lease = Lease::check(&offer).unwrap();
        assert_eq!(lease.routes, [("10.0.0.0/8".parse().unwrap(), None)]);
        assert_eq!(lease.gateway(), None);
    }

    #[test]
    fn the_network_of_the_address_has_the_route_of_the_kernel_alone() {
        let on_the_wire = |to: [u8; 4]| DhcpV4ClasslessRoute {
            destination: to.into(),
            prefix_length: 24,
            router: Ipv4Addr::UNSPECIFIED,
        };
        let mut offer = offer("10.0.2.15", "255.255.255.0");
        offer.classless_routes = Some([[10, 0, 2, 0], [10, 0, 3, 0]].map(on_the_wire).to_vec());
        let lease = Lease::check(&offer).unwrap();
        assert_eq!(lease.routes, [("10.0.3.0/24".parse().unwrap(), None)]);
    }

    #[test]
    fn a_destination_has_one_route_and_no_route_a_gateway_that_the_kernel_refuses() {
        let route = |to: [u8; 4], prefix_length, via: [u8; 4]| DhcpV4ClasslessRoute {
            destination: to.into(),
            prefix_length,
            router: via.into(),
        };
        let mut offer = offer("10.0.2.15", "255.255.255.0");
        offer.classless_routes = Some(vec![
            route([10, 9, 0, 0], 16, [10, 0, 2, 15]),
            route([10, 9, 0, 0], 16, [10, 0, 2, 255]),
            route([10, 9, 0, 0], 16, [10, 0, 2, 2]),
            route([10, 9, 0, 1], 16, [10, 0, 2, 3]),
            route([0; 4], 0, [10, 1, 0, 255]),
        ]);
        let via = |last| Some(Ipv4Addr::new(10, 0, 2, last));
        let lease = Lease::check(&offer).unwrap();
        let outside = Some(Ipv4Addr::new(10, 1, 0, 255));
        let kept = [("10.9.0.0/16", via(2)), ("0.0.0.0/0", outside)];
        assert_eq!(lease.routes, kept.map(|(to, via)| (to.parse::<Cidr>().unwrap(), via)));
        offer.classless_routes = None;
        offer.gateways = Some(vec![[10, 0, 2, 255].into(), [10, 0, 2, 15].into()]);
        assert_eq!(Lease::check(&offer).unwrap().gateway(), None);
        offer.gateways = offer.gateways.map(|all| [all, vec![[10, 0, 2, 9].into()]].concat());
        assert_eq!(Lease::check(&offer).unwrap().gateway(), via(9));
    }

    #[test]
    fn what_the_node_can_do_without_is_left_out() {
        let mut offer = offer("10.0.2.15", "255.255.255.0");
        offer.gateways = Some(vec![Ipv4Addr::LOCALHOST, Ipv4Addr::BROADCAST]);
        offer.dns_srvs = Some(vec![Ipv4Addr::LOCALHOST, Ipv4Addr::new(10, 0, 2, 3)]);
        offer.mtu = Some(68);
        let lease = Lease::check(&offer).unwrap();
        assert!(lease.routes.is_empty());
        assert_eq!(lease.nameservers, [IpAddr::from([10, 0, 2, 3])]);
        assert_eq!(lease.mtu, None);
    }

    proptest! {
        #[test]
        fn whatever_is_offered_what_is_taken_is_bounded(
            address in any::<u32>(),
            ones in 0u32..=32,
            lifetime in any::<u32>(),
            mtu in any::<Option<u16>>(),
            servers in prop::option::of(prop::collection::vec(any::<u32>(), 0..300)),
            routes in prop::option::of(prop::collection::vec((any::<u32>(), any::<u8>(), any::<u32>()), 0..300)),
        ) {
            let mut offer = DhcpV4Lease::default();
            offer.yiaddr = Ipv4Addr::from_bits(address);
            offer.subnet_mask = Ipv4Addr::from_bits(!u32::MAX.checked_shr(ones).unwrap_or(0));
            offer.lease_time_sec = lifetime;
            offer.mtu = mtu;
            let servers = servers.map(|all| all.into_iter().map(Ipv4Addr::from_bits).collect::<Vec<_>>());
            offer.gateways.clone_from(&servers);
            offer.dns_srvs.clone_from(&servers);
            offer.ntp_srvs = servers;
            offer.classless_routes = routes.map(|all| all.into_iter().map(|(to, prefix_length, via)| DhcpV4ClasslessRoute {
                destination: Ipv4Addr::from_bits(to),
                prefix_length,
                router: Ipv4Addr::from_bits(via),
            }).collect());
            if let Ok(lease) = Lease::check(&offer) {
                prop_assert!(lease.nameservers.len() <= SERVERS_MAX);
                prop_assert!(lease.ntp_servers.len() <= SERVERS_MAX);
                prop_assert!(lease.routes.len() <= ROUTES_MAX);
                prop_assert!(lease.lifetime >= LIFETIME_MIN);
                prop_assert!(lease.mtu.is_none_or(|mtu| mtu >= u32::from(MTU_MIN)));
                prop_assert!(!lease.address.address().is_loopback());
                prop_assert!(lease.routes.iter().all(|(to, _)| *to == to.network()));
            }
        }
    }
}

#[cfg(test)]
#[path = "lease_fuzz_tests.rs"]
mod fuzz_tests;
