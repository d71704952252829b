//! The reason why the node has no address, and the next step: what the stage shows.

use std::collections::BTreeSet;

use super::super::dhcpv6::Want;
use super::{Kind, Layout, Observed, Wanted, candidates, routed};
use crate::parameters;

/// The reason why the node has no address and the next step; `None` once it has one.
pub(in super::super) fn waiting(
    observed: &Observed,
    config: Option<&parameters::Network>,
    wanted: &Wanted,
) -> Option<String> {
    let Some(config) = config else {
        let what = "the node parameters, which say how to reach the network; the stage parameters \
                    says what they wait for";
        return Some(what.to_owned());
    };
    if wanted.primary.is_some_and(|primary| observed.has(primary)) {
        return None;
    }
    if let Some((link, cidr)) = wanted.primary {
        if observed.flaws.contains_key(&(link, cidr)) {
            return Some(format!(
                "an address that this machine has alone: another machine on the segment has \
                 {cidr}, too; give one of them another address"
            ));
        }
        let name = observed.links.get(&link).map_or("a link", |link| link.name.as_str());
        return Some(format!("the kernel to take the address {cidr} on {name}; the log says why"));
    }
    answer(observed, config, wanted).or_else(|| cable(observed, config))
}

/// The answer that is missing, where a link waits for one.
fn answer(observed: &Observed, config: &parameters::Network, wanted: &Wanted) -> Option<String> {
    let link = |index: &u32| observed.links.get(index).filter(|link| link.carrier);
    let routed = routed(observed, config).into_iter().filter(|index| link(index).is_some());
    let routed: BTreeSet<u32> = routed.collect();
    let asks = |index: &u32| wanted.dhcpv6.get(index) == Some(&Want::Address);
    let asked: BTreeSet<u32> = routed.iter().copied().filter(asks).collect();
    if !asked.is_empty() {
        return Some(format!(
            "an answer from a DHCPv6 server on {}: check that one serves this network, and that \
             a router advertises a way out there, or configure an address in the node parameters",
            names(observed, &asked)
        ));
    }
    if !wanted.dhcp.is_empty() {
        return Some(format!(
            "an answer from a DHCP server on {}, or an IPv6 address from a router: check that one \
             of them serves this network, or configure an address in the node parameters",
            names(observed, &wanted.dhcp)
        ));
    }
    (!routed.is_empty()).then(|| {
        format!(
            "an IPv6 address from a router on {}: check that one advertises itself and a prefix, \
             or configure DHCP or an address in the node parameters",
            names(observed, &routed)
        )
    })
}

/// The interface or the cable that is missing.
fn cable(observed: &Observed, config: &parameters::Network) -> Option<String> {
    let ethernet = || observed.links.values().filter(|link| link.kind == Kind::Ethernet);
    if ethernet().next().is_none() {
        return Some(
            "an Ethernet interface: not found; connect one, or check that this kernel has its \
             driver"
                .to_owned(),
        );
    }
    let routed = routed(observed, config);
    let unplugged: BTreeSet<u32> = candidates(observed, config).into_iter().chain(routed).collect();
    if !unplugged.is_empty() {
        return Some(format!(
            "a carrier on {}: plug in the cable, check the switch",
            names(observed, &unplugged)
        ));
    }
    let faults = Layout::of(observed, config).faults;
    if let Some(fault) = faults.first() {
        return Some(format!("a link that the network configuration gives an address: {fault}"));
    }
    Some(
        "an address: the network configuration gives none; configure DHCP or an address".to_owned(),
    )
}

fn names(observed: &Observed, links: &BTreeSet<u32>) -> String {
    let links = links.iter().filter_map(|index| observed.links.get(index));
    links.map(|link| link.name.as_str()).collect::<Vec<_>>().join(", ")
}
