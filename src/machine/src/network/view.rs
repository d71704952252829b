//! The links as the status shows them: what is there, and what is planned.

use super::dhcpv6::Want;
use super::leases::Leases;
use super::plan::{self, Layout, Link, Observed, Wanted};
use super::{Interface, Kind, Membership};

/// Every card, bond and VLAN, in the kernel's order.
pub(super) fn interfaces(
    observed: &Observed,
    wanted: &Wanted,
    layout: &Layout<'_>,
    [leases, leases_v6]: [&Leases; 2],
) -> Vec<Interface> {
    let links = observed.links.iter();
    let links = links.filter_map(|(index, link)| Some((*index, link, kind(observed, link)?)));
    links
        .map(|(index, link, kind)| {
            let planned = layout.settings.iter().find(|(of, _)| *of == index);
            let addresses = observed.addresses.iter().filter(|(of, _)| *of == index);
            Interface {
                index,
                name: link.name.clone(),
                kind,
                mac: link.mac,
                carrier: link.carrier,
                driver: link.driver.clone(),
                path: link.place.clone(),
                mtu: link.mtu,
                planned: planned.map(|(_, settings)| (*settings).clone()),
                addresses: addresses.map(|(_, cidr)| *cidr).collect(),
                asking: wanted.dhcp.contains(&index)
                    || wanted.dhcpv6.get(&index) == Some(&Want::Address),
                leased: leases.leased(index),
                leased_v6: leases_v6.leased(index),
            }
        })
        .collect()
}

/// `None` for loopback.
fn kind(observed: &Observed, link: &Link) -> Option<Kind> {
    Some(match link.kind {
        plan::Kind::Loopback => return None,
        plan::Kind::Ethernet => {
            let member = |bond| Membership {
                bond: name(observed, bond).to_owned(),
                active: link.active && link.carrier,
            };
            Kind::Card(link.master.map(member))
        }
        plan::Kind::Bond(mode) => Kind::Bond(mode),
        plan::Kind::Vlan { parent, id } => Kind::Vlan { on: name(observed, parent).to_owned(), id },
    })
}

/// The name of a link.
pub(super) fn name(observed: &Observed, link: u32) -> &str {
    observed.links.get(&link).map_or("a link that is gone", |link| link.name.as_str())
}
