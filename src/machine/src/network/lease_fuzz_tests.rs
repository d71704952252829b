//! Fuzz target of the answers of DHCP servers, as `mozim` hands them over.

use mozim::DhcpV4ClasslessRoute;
use polis_fuzz::{Accepted, Target};

use super::*;

/// A lease whose fields are cut off the input one after the other.
fn offer(mut input: &[u8]) -> DhcpV4Lease {
    let mut word = || {
        let (word, rest) = input.split_first_chunk::<4>().unwrap_or((&[0; 4], &[]));
        input = rest;
        u32::from_be_bytes(*word)
    };
    let mut offer = DhcpV4Lease::default();
    offer.yiaddr = word().into();
    offer.subnet_mask = word().into();
    offer.lease_time_sec = word();
    offer.srv_id = word().into();
    offer.mtu = u16::try_from(word()).ok();
    let counts = word().to_be_bytes();
    let mut addresses = |count: u8| {
        (count > 0).then(|| (0..count).map(|_| Ipv4Addr::from(word())).collect::<Vec<_>>())
    };
    offer.dns_srvs = addresses(counts[0]);
    offer.ntp_srvs = addresses(counts[1]);
    offer.gateways = addresses(counts[2]);
    offer.classless_routes = (counts[3] > 0).then(|| {
        let route = |_| DhcpV4ClasslessRoute {
            destination: word().into(),
            prefix_length: word().to_be_bytes()[3],
            router: word().into(),
        };
        (0..counts[3]).map(route).collect()
    });
    offer
}

#[test]
fn dhcp_leases() {
    let words =
        |words: &[u32]| words.iter().flat_map(|word| word.to_be_bytes()).collect::<Vec<_>>();
    let head = [0x0a00_020f, 0xffff_ff00, 86_400, 0x0a00_0202, 1500];
    let plain = words(&[&head[..], &[0x0202_0100], &[0x0a00_0203; 5]].concat());
    let route = [0x0a01_0000, 16, 0x0a00_0202];
    let routed = words(&[&head[..], &[0x0000_0001], &route].concat());
    Target::new("machine.dhcp").samples([plain, routed]).run(|input| {
        let Ok(lease) = Lease::check(&offer(input)) else { return Accepted::No };
        assert!(lease.nameservers.len() <= SERVERS_MAX && lease.ntp_servers.len() <= SERVERS_MAX);
        assert!(lease.routes.len() <= ROUTES_MAX && lease.lifetime >= LIFETIME_MIN);
        assert!(lease.routes.iter().all(|(to, _)| *to == to.network()));
        assert!(lease.gateway().is_none_or(is_host));
        Accepted::Yes
    });
}
