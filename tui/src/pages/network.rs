//! The Network page: can others reach this machine, by which address, and for how long?

use std::time::Duration;

use ratatui::text::Line;

use super::load::{self, Chart};
use super::{Content, WIDE};
use crate::snapshot::{Address, Interface, Network, Snapshot};
use crate::text::{clean, duration, name, pad, plural};
use crate::theme::{DIM, Mark, PLAIN, STRONG};
use crate::widgets::Row;
use crate::widgets::block::{beside, blank, title, titled};
use crate::widgets::headline::{INDENT, hanging, headline};

/// Column of the names of facts.
const FACT: usize = 10;

/// Rows of a chart.
const ROWS: usize = 2;

/// A lease with less time left counts as ended.
const LEFT_MIN: Duration = Duration::from_millis(1);

pub(crate) fn content(snapshot: &Snapshot, width: usize) -> Content {
    let network = &snapshot.network;
    let (mark, answer) = answer(snapshot);
    let mut body = headline(mark, &answer, width);
    if let Some(waiting) = &network.waiting {
        body.extend(hanging(INDENT, "└ waits for ", Mark::Attention.style(), waiting, width));
    }
    let (mark, text) = match network.change.state.as_str() {
        "trying" => (Mark::Busy, "an ordered network, until a curator is reached over it"),
        "reverted" | "refused" => (Mark::Attention, network.change.cause.as_str()),
        _ => (Mark::Good, ""),
    };
    if !text.is_empty() {
        let state = if mark == Mark::Busy {
            "└ tries ".to_owned()
        } else {
            format!("└ {}: ", network.change.state)
        };
        body.extend(hanging(INDENT, &state, mark.style(), text, width));
    }
    for fault in &network.faults {
        body.extend(hanging(INDENT, "└ ", Mark::Attention.style(), fault, width));
    }
    for interface in &network.interfaces {
        body.push(blank());
        body.extend(block(interface, width));
    }
    if !network.interfaces.is_empty() {
        body.push(blank());
        body.push(title("Global", width));
        body.extend(global(network, width));
    }
    Content { body, ..Content::default() }
}

pub(crate) fn answer(snapshot: &Snapshot) -> (Mark, String) {
    let (mut mark, mut text) = reached(snapshot);
    let Network { faults, interfaces, .. } = &snapshot.network;
    let lost: Vec<_> = interfaces.iter().filter_map(|it| Some((it, degraded_bond(it)?))).collect();
    let lost = match lost.as_slice() {
        [] => None,
        [(member, bond)] => {
            Some(format!("{} of {} has no carrier.", name(&member.name), name(bond)))
        }
        some => Some(format!("{} members of bonds have no carrier.", some.len())),
    };
    let faults = match faults.len() as u64 {
        0 => None,
        faults => Some(format!("The network has {}.", plural(faults, "fault"))),
    };
    for more in lost.into_iter().chain(faults) {
        text = format!("{text} {more}");
        mark = mark.max(Mark::Attention);
    }
    (mark, text)
}

/// The bond that goes without this member, since it has no carrier.
fn degraded_bond(interface: &Interface) -> Option<&str> {
    interface.bond.as_deref().filter(|_| !interface.carrier)
}

/// The address by which others can reach this node, or why they cannot.
fn reached(snapshot: &Snapshot) -> (Mark, String) {
    let network = &snapshot.network;
    let all = || network.interfaces.iter();
    let primary = all().find_map(|interface| {
        let address = interface.addresses.iter().find(|address| address.primary)?;
        Some((interface, address))
    });
    match (primary, &snapshot.header.address) {
        (Some((interface, address)), _) => {
            let (at, on) = (name(plain(address)), name(&interface.name));
            match interface.carrier {
                true => (Mark::Good, format!("This node has the address {at}, on {on}.")),
                false => (
                    Mark::Bad,
                    format!(
                        "This node cannot be reached at {at}: {on} has no carrier. Check the \
                         cable and the switch."
                    ),
                ),
            }
        }
        (None, Some(address)) => {
            (Mark::Good, format!("This node has the address {}.", name(address)))
        }
        (None, None) if network.interfaces.is_empty() => {
            (Mark::Idle, "No network interface was found yet.".to_owned())
        }
        (None, None) if all().all(|interface| !interface.carrier) => {
            (Mark::Bad, "No interface has a carrier: this node cannot be reached.".to_owned())
        }
        (None, None) => {
            (Mark::Attention, "This node has no address yet and cannot be reached.".to_owned())
        }
    }
}

/// An address without the length of its network's prefix.
fn plain(address: &Address) -> &str {
    address.cidr.split_once('/').map_or(address.cidr.as_str(), |(plain, _)| plain)
}

/// One interface: its kind, its addresses, and its traffic.
fn block(interface: &Interface, width: usize) -> Vec<Line<'static>> {
    let unused = "does not use it: check cable and switch";
    let lost = degraded_bond(interface).map(|bond| format!("no carrier, {} {unused}", name(bond)));
    let (mark, state) = match (interface.carrier, interface.addresses.is_empty()) {
        (false, _) => match &lost {
            Some(state) => (Mark::Attention, state.as_str()),
            None => (Mark::Idle, "no carrier: check cable and switch"),
        },
        (true, true) if interface.silent => (Mark::Good, "up"),
        (true, true) if interface.asking => (Mark::Busy, "requesting an address (DHCP)"),
        (true, true) => (Mark::Attention, "has no address"),
        (true, false) => (Mark::Good, "up"),
    };
    let head = Row::default()
        .cell(INDENT, mark.style(), mark.glyph())
        .put(STRONG, &name(&interface.name))
        .gap(2)
        .put(mark.style(), state);
    let mut lines = vec![titled(head, width)];
    let flowed = || interface.received.iter().chain(&interface.sent).any(|bytes| *bytes > 0);
    // Unused ports of a large machine would push those in use off the screen.
    let traffic = !interface.received.is_empty() && (interface.carrier || flowed());
    let wide = width >= WIDE && traffic;
    // A bit more than half: on 120 columns, an address with its lease has one line.
    let cells = if wide { width * 11 / 20 } else { width };
    let mut facts = Vec::new();
    if !interface.kind.is_empty() {
        facts.extend(fact("kind", &interface.kind, cells));
    }
    if let Some(planned) = &interface.planned {
        let planned = if planned.is_empty() { "no address" } else { planned };
        facts.extend(fact("planned", planned, cells));
    }
    for address in &interface.addresses {
        facts.extend(fact("address", &address_text(address), cells));
    }
    let driver = interface.driver.as_deref().map(|it| format!(", driver {it}"));
    // The usual one is on every machine.
    let mtu = (![0, 1500].contains(&interface.mtu)).then(|| format!(", MTU {}", interface.mtu));
    let (driver, mtu) = (driver.unwrap_or_default(), mtu.unwrap_or_default());
    let hardware = format!("{}{driver}{mtu}", interface.mac);
    facts.extend(fact("hardware", &hardware, cells));
    let charts = |width: usize| {
        let charts = [
            Chart::flow("in", interface.received.clone()),
            Chart::flow("out", interface.sent.clone()),
        ];
        load::beside(&charts, width, ROWS)
    };
    if wide {
        lines.extend(beside(facts, cells, charts(width - cells)));
    } else {
        lines.extend(facts);
        if traffic {
            let charts = charts(width.saturating_sub(INDENT));
            lines.extend(beside(Vec::new(), INDENT, charts));
        }
    }
    lines
}

fn address_text(address: &Address) -> String {
    let source = match address.source.as_str() {
        "" => String::new(),
        source => format!(" by {source}"),
    };
    let lease = match address.lease {
        None => String::new(),
        // A renewal would have moved its end; the address goes with the lease.
        Some(left) if left < LEFT_MIN => ", lease ended: no server renewed it".to_owned(),
        Some(left) => format!(", lease ends in {}", duration(left)),
    };
    format!("{}{source}{lease}", address.cidr)
}

fn fact(what: &str, text: &str, width: usize) -> Vec<Line<'static>> {
    // Wrapped by hand, so that the name of the fact and the fact have two styles.
    let column = INDENT + FACT;
    let lines = crate::text::wrap(&clean(text), width.saturating_sub(column + 1));
    let row = |(at, line): (usize, &String)| {
        let what = if at == 0 { what } else { "" };
        Row::indented(INDENT).put(DIM, &pad(what, FACT)).put(PLAIN, line).line()
    };
    lines.iter().enumerate().map(row).collect()
}

/// The settings that no interface has of its own.
fn global(network: &Network, width: usize) -> Vec<Line<'static>> {
    let list = |all: &[String]| match all {
        [] => "none".to_owned(),
        some => some.join(", "),
    };
    let mut lines = fact("gateway", network.gateway.as_deref().unwrap_or("none"), width);
    lines.extend(fact("DNS", &list(&network.nameservers), width));
    lines.extend(fact("NTP", &list(&network.time_servers), width));
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::snapshot::Change;

    fn text(snapshot: &Snapshot) -> String {
        let lines = content(snapshot, 80).body;
        lines.iter().map(|line| format!("{line}\n")).collect()
    }

    #[test]
    fn planned_and_actual_are_shown_for_bonds_their_members_and_vlans() {
        let link = |name: &str, kind: &str, carrier: bool| Interface {
            name: name.to_owned(),
            kind: kind.to_owned(),
            mac: "52:54:00:70:6f:01".to_owned(),
            carrier,
            silent: true,
            ..Interface::default()
        };
        let address = Address { cidr: "10.0.2.15/24".to_owned(), ..Address::default() };
        let vlan = Interface {
            planned: Some("DHCP, MTU 1400".to_owned()),
            addresses: vec![Address { source: "DHCP".to_owned(), ..address }],
            mtu: 1400,
            ..link("bond0.7", "VLAN 7 on bond0", true)
        };
        let bond = Interface {
            planned: Some(String::new()),
            ..link("bond0", "bond, active-backup", true)
        };
        let member = |name: &str, part: &str, carrier: bool| Interface {
            bond: Some("bond0".to_owned()),
            ..link(name, &format!("member of bond0, {part}"), carrier)
        };
        let members = [member("eth0", "no carrier", false), member("eth1", "active", true)];
        let mut snapshot = Snapshot::default();
        snapshot.network.interfaces = members.into_iter().chain([bond, vlan]).collect();
        let shown = text(&snapshot);
        for words in [
            "▲ eth0  no carrier, bond0 does not use it: check cable and switch",
            "member of bond0, no carrier",
            "■ eth1  up",
            "planned   no address",
            "planned   DHCP, MTU 1400",
            "address   10.0.2.15/24 by DHCP",
            "MTU 1400",
            "VLAN 7 on bond0",
        ] {
            assert!(shown.contains(words), "{words}:\n{shown}");
        }
        assert!(!shown.contains("has no address\n"), "a member needs none:\n{shown}");
        // The other pages have only this to show.
        snapshot.network.interfaces[3].addresses[0].primary = true;
        let lost = |snapshot: &Snapshot| {
            let (mark, said) = answer(snapshot);
            (mark, said.replace("This node has the address 10.0.2.15, on bond0.7.", "…"))
        };
        let said = "… eth0 of bond0 has no carrier.".to_owned();
        assert_eq!(lost(&snapshot), (Mark::Attention, said));
        snapshot.network.interfaces[1].carrier = false;
        let said = "… 2 members of bonds have no carrier.".to_owned();
        assert_eq!(lost(&snapshot), (Mark::Attention, said));
        snapshot.network.interfaces.drain(..2);
        assert_eq!(lost(&snapshot), (Mark::Good, "…".to_owned()));
    }

    #[test]
    fn an_unused_port_has_no_charts_and_one_that_lost_its_carrier_has() {
        let rows = |carrier: bool, received: u64| {
            let (received, sent) = (vec![received, 0], vec![0, 0]);
            let port = Interface { carrier, received, sent, silent: true, ..Interface::default() };
            let mut snapshot = Snapshot::default();
            snapshot.network.interfaces = vec![port];
            text(&snapshot).lines().filter(|line| line.contains("max ")).count()
        };
        assert_eq!([rows(false, 0), rows(false, 9), rows(true, 0)], [0, 1, 1]);
    }

    #[test]
    fn a_lease_that_has_ended_has_no_rest_of_zero() {
        let shown = |lease| {
            let (cidr, source) = ("10.0.2.15/24".to_owned(), "DHCP".to_owned());
            address_text(&Address { cidr, source, primary: true, lease: Some(lease) })
        };
        let ended = "10.0.2.15/24 by DHCP, lease ended: no server renewed it";
        assert_eq!([Duration::ZERO, LEFT_MIN / 2].map(shown), [ended, ended]);
        assert_eq!(shown(LEFT_MIN), "10.0.2.15/24 by DHCP, lease ends in 1 ms");
    }

    #[test]
    fn a_network_that_was_given_up_says_why() {
        let mut snapshot = Snapshot::default();
        snapshot.network.change =
            Change { state: "reverted".to_owned(), cause: "no curator was reached".to_owned() };
        snapshot.network.faults = vec!["interface eth9 selects no card".to_owned()];
        let shown = text(&snapshot);
        assert!(shown.contains("└ reverted: no curator was reached"), "{shown}");
        assert!(shown.contains("eth9 selects no card"), "{shown}");
        // The other pages have only this to show.
        snapshot.header.address = Some("10.0.2.15".to_owned());
        let named = "This node has the address 10.0.2.15. The network has 1 fault.";
        assert_eq!(answer(&snapshot), (Mark::Attention, named.to_owned()));
        snapshot.network.change.state = "trying".to_owned();
        assert!(text(&snapshot).contains("└ tries an ordered network"));
    }
}
