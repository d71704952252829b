//! The rules of a node, from what it knows. Pure.
//!
//! `docs/network.md` lists the same ports with their listeners.

use std::collections::BTreeSet;
use std::net::IpAddr;

use polis_control::cluster::discovery;
use polis_control::consensus::PEER_PORT;
use polis_machine::time;
use polis_proto::v1;
use polis_wire::endpoint::{CURATOR_PORT, KUBERNETES_PORT, MANAGEMENT_PORT, METRICS_PORT};
use polis_wire::node_roles::{has_kubernetes, is_consensus_member};
use polis_wire::parameters::Cidr;
use polis_wire::parameters::{Firewall, Ports, Protocol};
use polis_workload::{API_PORT, KUBELET_PORT, NODE_PORTS, mesh};

/// The inputs of the rules.
#[derive(Clone, Copy, Debug)]
pub(super) struct Known<'a> {
    /// The roles that the cluster gives to this node.
    pub(super) roles: Option<&'a v1::NodeRoles>,
    /// Whether etcd runs here: a member votes before the roles of this boot are known.
    pub(super) etcd: bool,
    /// The addresses of the other members, as far as they are known.
    pub(super) members: &'a BTreeSet<IpAddr>,
    /// Whether a leader tells of the members now: before the node is home, and when it is cut
    /// off, their addresses may change without this node knowing.
    pub(super) home: bool,
    /// The configuration of the cluster.
    pub(super) firewall: &'a Firewall,
    /// Whether this machine asks its cloud for parameters.
    pub(super) metadata: Metadata,
}

/// The users of this machine that reach the metadata service of its cloud. It answers questions
/// about the machine, and gives credentials of the cloud, to every process that asks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Metadata {
    /// Every process: the node asks for its parameters, and runs no pods yet.
    Asked,
    /// No process and no pod, and not the node either.
    #[default]
    Closed,
}

/// The senders of the packets that a rule accepts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Callers {
    /// Those of any address.
    Any,
    /// Those of other nodes of the cluster, and of the sources in its configuration.
    Known,
}

/// One rule: the callers of some ports, and the purpose.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    /// Its name: that of the listener, or of the configured port.
    pub name: String,
    /// The ports.
    pub ports: Ports,
    /// The senders of the packets that it accepts.
    pub callers: Callers,
    /// Whether pods of any node reach it, too.
    pub pods: bool,
    /// The service behind it.
    pub purpose: &'static str,
}

/// All rules of a node, and the addresses that they name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rules {
    /// In the order of their ports.
    pub rules: Vec<Rule>,
    /// The addresses of the other nodes.
    pub members: BTreeSet<IpAddr>,
    /// The sources; empty: any address.
    pub sources: Vec<Cidr>,
    /// The users that reach the metadata service.
    pub metadata: Metadata,
}

impl Rules {
    pub(super) fn new(known: &Known<'_>) -> Self {
        let Known { roles, etcd, home, firewall, metadata, .. } = *known;
        let votes = etcd || is_consensus_member(roles);
        let controls = roles.is_some_and(|roles| roles.kubernetes_controller.is_some());
        let works = roles.is_some_and(|roles| roles.kubernetes_worker.is_some());
        let limited = |limits: bool| if limits { Callers::Known } else { Callers::Any };
        // Without a leader, members may have addresses that this node cannot know yet, and the
        // owner may have to help from another one.
        let members = limited(home);
        let outside = limited(!firewall.sources.is_empty());
        let operators = limited(home && !firewall.sources.is_empty());
        let rule = |name: &str, ports, callers, pods, purpose| Rule {
            name: name.to_owned(),
            ports,
            callers,
            pods,
            purpose,
        };
        let mut rules = vec![
            rule(
                "discovery",
                Ports::udp(discovery::PORT),
                Callers::Any,
                false,
                "nodes of this segment that lost the others",
            ),
            rule(
                "management",
                Ports::tcp(MANAGEMENT_PORT),
                operators,
                false,
                "operators, and nodes in an update",
            ),
            rule("metrics", Ports::tcp(METRICS_PORT), outside, true, "collectors of metrics"),
        ];
        if votes {
            let time = Ports::udp(time::PORT);
            rules.extend([
                rule("time", time, members, false, "the clocks of the other nodes"),
                rule("etcd", Ports::tcp(PEER_PORT), members, false, "the members of etcd"),
                // A node reports a new address here, and an owner mends a firewall that keeps them
                // from everything else.
                rule(
                    "curator",
                    Ports::tcp(CURATOR_PORT),
                    Callers::Any,
                    false,
                    "nodes, machines that register, operators",
                ),
            ]);
        }
        if controls {
            let access = Ports::tcp(KUBERNETES_PORT);
            rules.extend([
                rule("apiserver", Ports::tcp(API_PORT), outside, true, "clients of Kubernetes"),
                rule("access", access, outside, false, "users of Polis, with kubectl"),
            ]);
        }
        if has_kubernetes(roles) {
            rules.push(rule(
                "mesh",
                Ports::udp(mesh::PORT),
                // A peer behind a router that translates addresses; WireGuard answers to keys
                // alone.
                Callers::Any,
                false,
                "WireGuard of the other nodes with a role of Kubernetes",
            ));
        }
        if works {
            let (first, last) = (*NODE_PORTS.start(), *NODE_PORTS.end());
            let checks = Ports { protocol: Protocol::Tcp, first, last };
            rules.extend([
                rule("kubelet", Ports::tcp(KUBELET_PORT), members, true, "API servers"),
                rule(
                    "node ports",
                    checks,
                    Callers::Any,
                    true,
                    "balancers that ask kube-proxy for the health of a Service",
                ),
            ]);
        }
        let opened = firewall.ports.iter().map(|ports| {
            let name = ports.to_string();
            rule(&name, *ports, Callers::Any, true, "a port in the configuration of the cluster")
        });
        rules.extend(opened);
        rules.sort_by_key(|rule| (rule.ports.first, rule.ports.protocol));
        let (members, sources) = (known.members.clone(), firewall.sources.clone());
        Self { rules, members, sources, metadata }
    }
}

#[cfg(test)]
mod tests {
    use polis_wire::node_roles::Role;

    use super::*;

    fn rules(roles: &[Role], home: bool, firewall: &Firewall) -> Rules {
        Rules::new(&Known {
            roles: Some(&Role::record(roles)),
            etcd: false,
            members: &BTreeSet::from([IpAddr::from([10, 0, 2, 16])]),
            home,
            firewall,
            metadata: Metadata::Closed,
        })
    }

    fn listed(rules: &Rules) -> String {
        let line = |rule: &Rule| {
            let pods = if rule.pods { " pods" } else { "" };
            format!("{} {:?}{pods}\n", rule.ports, rule.callers)
        };
        rules.rules.iter().map(line).collect()
    }

    const NO_ONE: Firewall = Firewall { sources: Vec::new(), ports: Vec::new() };

    fn named() -> Firewall {
        Firewall {
            sources: vec!["192.0.2.0/24".parse().unwrap()],
            ports: vec!["tcp/443".parse().unwrap()],
        }
    }

    #[test]
    fn a_node_without_a_role_is_managed_measured_and_found() {
        insta::assert_snapshot!(listed(&rules(&[], true, &NO_ONE)), @r"
        udp/7836 Any
        tcp/7839 Any
        tcp/7840 Any pods
        ");
    }

    #[test]
    fn every_role_has_its_ports_and_the_sources_limit_the_others() {
        insta::assert_snapshot!(listed(&rules(&Role::ALL, true, &named())), @r"
        udp/123 Known
        tcp/443 Any pods
        tcp/6443 Known pods
        tcp/6444 Known
        tcp/7834 Known
        tcp/7835 Any
        udp/7836 Any
        udp/7838 Any
        tcp/7839 Known
        tcp/7840 Known pods
        tcp/10250 Known pods
        tcp/30000-32767 Any pods
        ");
    }

    #[test]
    fn without_a_leader_members_and_the_owner_come_from_any_address() {
        let rules = rules(&Role::ALL, false, &named());
        let limited = rules.rules.iter().filter(|rule| rule.callers == Callers::Known);
        let limited: Vec<_> = limited.map(|rule| rule.name.as_str()).collect();
        // The sources still hold for what neither needs.
        assert_eq!(limited, ["apiserver", "access", "metrics"]);
    }

    #[test]
    fn a_member_of_etcd_is_one_before_its_roles_are_known() {
        let members = BTreeSet::new();
        let known = Known {
            roles: None,
            etcd: true,
            members: &members,
            home: false,
            firewall: &NO_ONE,
            metadata: Metadata::Closed,
        };
        let ports: Vec<_> = Rules::new(&known).rules.into_iter().map(|rule| rule.name).collect();
        assert_eq!(ports, ["time", "etcd", "curator", "discovery", "management", "metrics"]);
    }

    #[test]
    fn no_configuration_keeps_a_node_or_its_owner_from_the_curator() {
        let curator = |firewall: &Firewall, home| {
            let rules = rules(&[Role::ConsensusMember], home, firewall);
            rules.rules.into_iter().find(|rule| rule.name == "curator").unwrap().callers
        };
        for firewall in [&NO_ONE, &named()] {
            assert_eq!([curator(firewall, true), curator(firewall, false)], [Callers::Any; 2]);
        }
    }
}
