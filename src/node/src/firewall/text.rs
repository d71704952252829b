//! The rules as `nft` reads them. Pure.
//!
//! ```text
//! packet to the node --> begins nothing, or answers the node --> accepted
//!       | new
//!       +--> of a pod --> a port for pods? ----------+
//!       |                                            +--> counted, accepted
//!       +--> of another --> a port for its address? -+
//!                             | no
//!                             +--> dropped
//! packet of a pod to another node --> a port of Polis? --> dropped
//! packet of a pod or a process ----> metadata of a cloud? --> dropped
//! packet that is passed on --------> neither from a pod nor to one, nor translated? --> dropped
//! ```
//!
//! A pod's packets leave its node with the node's address, so the other node would take them for
//! those of a member: they are looked at where they leave.
//!
//! A worker forwards because of its pods, and the kernel knows no such reason: without a rule, a
//! machine in one network of the worker would reach every machine in its other networks.

use std::fmt::Write as _;
use std::net::IpAddr;

use super::rules::{Callers, Metadata, Rule, Rules};
use polis_wire::parameters::Cidr;
use polis_wire::parameters::Protocol;

/// The name of the table.
pub(super) const TABLE: &str = "polis-firewall";

/// The comment of the rules that drop what no other rule accepted.
pub(super) const DROPPED: &str = "dropped";

/// Where packets of pods come from, and where those to pods go: their own interfaces, and the mesh.
const POD_INTERFACES: [&str; 2] = ["veth*", polis_workload::mesh::DEVICE];

/// The metadata services of clouds, and what Azure has beside its own: each address with its ports
/// of TCP. The same addresses serve DNS and NTP over UDP, which stay open.
const METADATA: [(&str, &str); 5] = [
    ("ip daddr 169.254.169.254", "80"),
    ("ip daddr 168.63.129.16", "{ 80, 32526 }"),
    ("ip6 daddr fd00:ec2::254", "80"),
    ("ip6 daddr fd20:ce::254", "80"),
    ("ip6 daddr fd00:c1::a9fe:a9fe", "80"),
];

/// What is passed on beside the packets of pods and those to pods. A Service may lead to a pod in
/// the network of another node: its connections come and go by the same interface, and only their
/// translation tells them from others.
const PASSED_ON: &str = "\t\tct state established,related accept\n\
                         \t\tct status dnat accept\n\
                         \t\tjump rest\n";

/// The first lines of every input: they make the table if there is none, so that it can be deleted.
/// `nft` carries out one input in one transaction, so no packet passes between two tables.
fn fresh() -> String {
    format!("table inet {TABLE}\ndelete table inet {TABLE}\n")
}

/// The input of `nft` that replaces all rules.
pub(super) fn text(rules: &Rules) -> String {
    let mut text = fresh();
    let mut line = |words: std::fmt::Arguments<'_>| {
        // Writing to a string cannot fail.
        writeln!(text, "{words}").unwrap_or_default();
    };
    let members: Vec<Cidr> = rules.members.iter().filter_map(|it| whole(*it)).collect();
    let known = members.iter().chain(&rules.sources).copied().collect::<Vec<_>>();
    line(format_args!("table inet {TABLE} {{"));
    for (name, networks) in [("members", &members), ("known", &known)] {
        for (family, v4) in [("4", true), ("6", false)] {
            let own = networks.iter().filter(|network| network.address().is_ipv4() == v4);
            let own: Vec<String> = own.map(ToString::to_string).collect();
            line(format_args!("\tset {name}{family} {{"));
            line(format_args!("\t\ttype ipv{family}_addr; flags interval; auto-merge;"));
            if !own.is_empty() {
                line(format_args!("\t\telements = {{ {} }}", own.join(", ")));
            }
            line(format_args!("\t}}"));
        }
    }
    line(format_args!("\tchain input {{"));
    line(format_args!("\t\ttype filter hook input priority filter; policy drop;"));
    line(format_args!("\t\tiifname \"lo\" accept"));
    // No connection begins with such a packet. One of a connection from before a reset of the power
    // is answered with a reset, so that the other end does not wait for its own deadline.
    line(format_args!("\t\ttcp flags & (fin | syn | rst | ack) != syn accept"));
    line(format_args!("\t\tct state established,related accept"));
    line(format_args!("\t\tct state invalid counter drop comment \"{DROPPED}\""));
    // Errors about connections, and the question whether the node is there.
    line(format_args!(
        "\t\ticmp type {{ echo-request, destination-unreachable, time-exceeded, \
         parameter-problem }} accept"
    ));
    // The same, and what IPv6 needs on a segment: neighbours, routers, groups.
    line(format_args!(
        "\t\ticmpv6 type {{ echo-request, destination-unreachable, packet-too-big, \
         time-exceeded, parameter-problem, nd-router-advert, nd-neighbor-solicit, \
         nd-neighbor-advert, mld-listener-query }} accept"
    ));
    // Answers of DHCP servers, of which a broadcast belongs to no connection.
    line(format_args!("\t\tudp sport 67 udp dport 68 accept"));
    line(format_args!("\t\tip6 saddr fe80::/10 udp sport 547 udp dport 546 accept"));
    for interface in POD_INTERFACES {
        line(format_args!("\t\tiifname \"{interface}\" jump pods"));
    }
    for rule in &rules.rules {
        let ports = dport(rule);
        let accept = format!("counter accept comment \"{}\"", rule.name);
        match rule.callers {
            Callers::Any => line(format_args!("\t\t{ports} {accept}")),
            Callers::Known => {
                line(format_args!("\t\tip saddr @known4 {ports} {accept}"));
                line(format_args!("\t\tip6 saddr @known6 {ports} {accept}"));
            }
        }
    }
    line(format_args!("\t\tjump rest"));
    line(format_args!("\t}}"));
    line(format_args!("\tchain pods {{"));
    // CoreDNS, which listens on an address of the node for its own pods.
    for protocol in [Protocol::Tcp, Protocol::Udp] {
        line(format_args!("\t\t{protocol} dport 53 accept"));
    }
    for rule in rules.rules.iter().filter(|rule| rule.pods) {
        line(format_args!("\t\t{} counter accept comment \"{}\"", dport(rule), rule.name));
    }
    line(format_args!("\t\tjump rest"));
    line(format_args!("\t}}"));
    line(format_args!("\tchain rest {{"));
    // Broadcasts of others are not worth counting.
    line(format_args!("\t\tmeta pkttype != host drop"));
    line(format_args!("\t\tcounter drop comment \"{DROPPED}\""));
    line(format_args!("\t}}"));
    text.push_str(&passing(rules));
    text.push_str("}\n");
    text
}

/// The chains of packets that are not for the node: of pods, and its own.
fn passing(rules: &Rules) -> String {
    let metadata = match rules.metadata {
        Metadata::Asked => &[][..],
        Metadata::Closed => &METADATA,
    };
    let metadata = metadata.iter().map(|(address, ports)| {
        format!("\t\t{address} tcp dport {ports} counter drop comment \"{DROPPED}\"\n")
    });
    let metadata: String = metadata.collect();
    // An answer to a node may go to such a port, which its translation of addresses has chosen.
    let members = [("4", "ip"), ("6", "ip6")].map(|(family, ip)| {
        format!(
            "\t\tiifname \"{}\" ct direction original {ip} daddr @members{family} \
             meta l4proto {{ tcp, udp }} th dport {{ 123, 6444, 7834-7839 }} jump rest\n",
            POD_INTERFACES[0]
        )
    });
    let pods = POD_INTERFACES.map(|interface| {
        format!("\t\tiifname \"{interface}\" accept\n\t\toifname \"{interface}\" accept\n")
    });
    let chain = |name: &str, lines: &str| {
        format!(
            "\tchain {name} {{\n\t\ttype filter hook {name} priority filter; policy accept;\n\
             {lines}\t}}\n"
        )
    };
    // A Service may lead to the address: its translation comes before either chain.
    let forward = format!("{}{metadata}{}{PASSED_ON}", members.concat(), pods.concat());
    chain("forward", &forward) + &chain("output", &metadata)
}

/// The input of `nft` that removes all rules.
pub(super) fn removal() -> String {
    fresh()
}

fn dport(rule: &Rule) -> String {
    format!("{} dport {}", rule.ports.protocol, rule.ports.numbers())
}

/// One address as a network.
fn whole(address: IpAddr) -> Option<Cidr> {
    Cidr::new(address, if address.is_ipv4() { 32 } else { 128 })
}

#[cfg(test)]
mod tests {
    use polis_wire::parameters::Ports;

    use super::*;

    #[test]
    fn each_rule_has_its_line_for_each_family_and_the_rest_is_dropped() {
        let rule = |name: &str, ports, callers, pods| Rule {
            name: name.to_owned(),
            ports,
            callers,
            pods,
            purpose: "",
        };
        let rules = Rules {
            rules: vec![
                rule("etcd", Ports::tcp(7834), Callers::Known, false),
                rule("metrics", Ports::tcp(7840), Callers::Known, true),
                rule("udp/5000-5100", "udp/5000-5100".parse().unwrap(), Callers::Any, true),
            ],
            members: [IpAddr::from([10, 0, 2, 16]), "2001:db8::7".parse().unwrap()].into(),
            sources: vec!["192.0.2.0/24".parse().unwrap()],
            metadata: Metadata::Closed,
        };
        let asked = text(&Rules { metadata: Metadata::Asked, ..rules.clone() });
        assert!(!asked.contains("169.254.169.254"), "{asked}");
        insta::assert_snapshot!(text(&rules));
        insta::assert_snapshot!(removal(), @r"
        table inet polis-firewall
        delete table inet polis-firewall
        ");
    }

    #[test]
    fn a_node_passes_on_what_is_of_pods_or_translated_and_nothing_else() {
        let text = text(&Rules::default());
        let (_, forward) = text.split_once("\tchain forward {\n").unwrap();
        let (forward, _) = forward.split_once("\t}\n").unwrap();
        let lines: Vec<_> = forward.lines().map(str::trim).collect();
        let first = lines.iter().position(|line| line.ends_with(" accept")).unwrap();
        // No packet is accepted before the rules that drop packets of pods.
        assert!(lines[..first].iter().any(|line| line.contains("169.254.169.254")), "{lines:?}");
        assert_eq!(
            lines[first..],
            [
                "iifname \"veth*\" accept",
                "oifname \"veth*\" accept",
                "iifname \"polis0\" accept",
                "oifname \"polis0\" accept",
                "ct state established,related accept",
                "ct status dnat accept",
                "jump rest",
            ]
        );
    }
}
