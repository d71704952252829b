//! The sources of time that a node asks, and whom it serves. Pure: inputs in, the configuration
//! of chronyd out.
//!
//! | node | asks | serves |
//! |---|---|---|
//! | voter | the configured servers, the other voters | the members, and once it has asked the other voters its own clock, too |
//! | other member | the configured servers, the voters | - |
//! | not a member yet | the configured servers | - |
//!
//! Before the leader has named members and voters, the nodes of the last boot stand for both.
//!
//! Servers are named by the cluster's configuration, the parameters of the machine and DHCP.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::net::IpAddr;
use std::path::Path;

use polis_proto::v1;

use super::tracking::STRATUM_OWN;
use crate::network::names::Peers;
use crate::parameters::NtpServer;
use polis_wire::identity::NodeId;
use polis_wire::node_roles::{self, Nodes};

/// Nodes that are asked before a leader reports who votes: more than vote in any cluster.
const PEERS_MAX: usize = 16;

/// The port of NTP (RFC 5905).
pub const PORT: u16 = 123;

/// The inputs of a plan.
#[derive(Clone, Copy, Debug)]
pub struct Known<'a> {
    /// This node, once it has a key.
    pub own: Option<NodeId>,
    /// The roles that the cluster gives to this node.
    pub roles: Option<&'a v1::NodeRoles>,
    /// The members; `None` before the leader has named them.
    pub nodes: Option<&'a Nodes>,
    /// The nodes of the last boot, and those that were found on the segment.
    pub peers: &'a Peers,
    /// The servers in the cluster's configuration.
    pub cluster: &'a [NtpServer],
    /// The servers of parameters and DHCP.
    pub network: &'a [String],
    /// Whether this node has asked the other voters in this run.
    pub asked: Asked,
}

/// Whether this node has asked the other voters for their time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Asked {
    /// Not for long enough.
    Not,
    /// It follows their time now, or they gave none.
    Yes,
}

/// The sources of time, and whom this node serves. `Default` is neither.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// Servers by host, and whether their answers must be authenticated.
    servers: BTreeMap<String, bool>,
    /// Voters.
    voters: BTreeSet<IpAddr>,
    serving: Serving,
}

/// The clients of a node's clock.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
enum Serving {
    /// It serves no node.
    #[default]
    None,
    /// These members, with the time of its sources.
    Sources(BTreeSet<IpAddr>),
    /// These members, with its own clock where no source outside answers.
    Own(BTreeSet<IpAddr>),
}

impl Plan {
    /// The sources and clients that follow from what is known.
    #[must_use]
    pub fn new(known: &Known<'_>) -> Self {
        let mut servers: BTreeMap<String, bool> =
            known.network.iter().map(|host| (host.clone(), false)).collect();
        // The owner's word about a host counts more than that of its network.
        servers.extend(known.cluster.iter().map(|server| (server.host.clone(), server.nts)));
        let (voters, members) = match known.nodes {
            Some(nodes) => reported(nodes, known.own),
            None => remembered(known.peers, known.own),
        };
        let votes = node_roles::is_consensus_member(known.roles);
        // A voter that knows no other node yet may have forgotten them.
        let serving = if !votes || known.nodes.is_none() && members.is_empty() {
            Serving::None
        } else if voters.is_empty() || known.asked == Asked::Yes {
            Serving::Own(members)
        } else {
            Serving::Sources(members)
        };
        Self { servers, voters, serving }
    }

    /// Whether there is nothing to do for chronyd.
    pub(super) fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Whether this node still asks the other voters before it lends its clock.
    pub(super) fn is_asking(&self) -> bool {
        matches!(self.serving, Serving::Sources(_))
    }

    /// Whether this node asks the same voters under both plans.
    pub(super) fn has_voters_of(&self, other: &Self) -> bool {
        self.voters == other.voters
    }

    /// Whether this node lends its clock to the others.
    pub(super) fn lends(&self) -> bool {
        matches!(self.serving, Serving::Own(_))
    }

    /// The configuration of chronyd, whose command socket is `socket`.
    #[must_use]
    pub fn configuration(&self, socket: &Path) -> String {
        let mut text = String::new();
        let mut line = |words: std::fmt::Arguments<'_>| {
            // Writing to a string cannot fail.
            writeln!(text, "{words}").unwrap_or_default();
        };
        // Commands come through the socket only, and the supervisor knows the process.
        line(format_args!("cmdport 0"));
        line(format_args!("bindcmdaddress {}", socket.display()));
        line(format_args!("pidfile /"));
        // A clock that is off by more than a second is set at once after the start. Later it
        // only runs faster or slower, so that time neither jumps nor turns back.
        line(format_args!("makestep 1 3"));
        // The kernel writes the machine's own clock every eleven minutes.
        line(format_args!("rtcsync"));
        match &self.serving {
            Serving::None => line(format_args!("port 0")),
            Serving::Sources(members) | Serving::Own(members) => {
                line(format_args!("port {PORT}"));
                for member in members {
                    line(format_args!("allow {member}"));
                }
            }
        }
        if self.lends() {
            // Of the voters without a server, one leads and the others follow it.
            line(format_args!("local stratum {STRATUM_OWN} orphan"));
        }
        if self.servers.values().any(|nts| *nts) {
            // A clock that is far off cannot judge the dates of certificates before its first
            // measurement.
            line(format_args!("nocerttimecheck 1"));
            // A server with a certificate counts more while it answers; without it, the voters
            // are followed.
            line(format_args!("authselectmode ignore"));
        }
        for (host, nts) in &self.servers {
            // `STALE` in `tracking` follows from the longest interval, 2^9 s.
            let nts = if *nts { " nts trust" } else { "" };
            line(format_args!("server {host} iburst maxpoll 9{nts}"));
        }
        for voter in &self.voters {
            // On the cluster's own network, often enough for differences of a millisecond.
            line(format_args!("server {voter} iburst minpoll 4 maxpoll 6"));
        }
        text
    }
}

/// The addresses of the other voters and of the other members, as the leader reports them.
fn reported(nodes: &Nodes, own: Option<NodeId>) -> (BTreeSet<IpAddr>, BTreeSet<IpAddr>) {
    let others = nodes.iter().filter(|(id, _)| Some(**id) != own).map(|(_, node)| node);
    let members = others.filter(|node| node.state() == v1::NodeState::Up);
    let votes = |node: &v1::NodeInfo| node_roles::is_consensus_member(node.roles.as_ref());
    let address = |node: &v1::NodeInfo| {
        node.status.as_ref().and_then(|status| status.external_address.parse().ok())
    };
    let voters = members.clone().filter(|node| votes(node)).filter_map(address).collect();
    (voters, members.flat_map(node_roles::addresses).collect())
}

/// The same before there is a leader: each node that is known may vote. A voter whose clock is
/// off by months cannot learn more, since it takes the certificates of the others for ended.
fn remembered(peers: &Peers, own: Option<NodeId>) -> (BTreeSet<IpAddr>, BTreeSet<IpAddr>) {
    let others = peers.iter().filter(|(id, _)| Some(**id) != own);
    let known: BTreeSet<IpAddr> = others.map(|(_, address)| *address).take(PEERS_MAX).collect();
    (known.clone(), known)
}

#[cfg(test)]
mod tests {
    use polis_wire::node_roles::Role;

    use super::*;

    fn id(seed: u8) -> NodeId {
        NodeId::from_public_key(&[seed; 32])
    }

    fn nodes(all: &[(u8, &[Role], &str)]) -> Nodes {
        let node = |(seed, roles, address): &(u8, &[Role], &str)| {
            let status = v1::NodeStatus {
                external_address: (*address).to_owned(),
                ..v1::NodeStatus::default()
            };
            let info = v1::NodeInfo {
                state: v1::NodeState::Up.into(),
                roles: Some(Role::record(roles)),
                status: Some(status),
                ..v1::NodeInfo::default()
            };
            (id(*seed), info)
        };
        all.iter().map(node).collect()
    }

    const VOTER: &[Role] = &[Role::ConsensusMember];

    fn four() -> Nodes {
        nodes(&[
            (1, VOTER, "10.0.2.1"),
            (2, VOTER, "10.0.2.2"),
            (3, VOTER, "2001:db8::3"),
            (4, &[Role::KubernetesWorker], "10.0.2.4"),
        ])
    }

    fn plan(seed: u8, nodes: Option<&Nodes>, asked: Asked) -> Plan {
        let roles = nodes.and_then(|nodes| nodes[&id(seed)].roles);
        let cluster = [NtpServer { host: "ntp.example.org".to_owned(), nts: true }];
        let network = ["192.0.2.1".to_owned(), "ntp.example.org".to_owned()];
        let peers = Peers::new();
        Plan::new(&Known {
            own: Some(id(seed)),
            roles: roles.as_ref(),
            nodes,
            peers: &peers,
            cluster: &cluster,
            network: &network,
            asked,
        })
    }

    fn text(plan: &Plan) -> String {
        plan.configuration(Path::new("/ephemeral/time/chronyd.sock"))
    }

    #[test]
    fn a_voter_asks_servers_and_voters_and_serves_the_members() {
        insta::assert_snapshot!(text(&plan(1, Some(&four()), Asked::Yes)), @"
        cmdport 0
        bindcmdaddress /ephemeral/time/chronyd.sock
        pidfile /
        makestep 1 3
        rtcsync
        port 123
        allow 10.0.2.2
        allow 10.0.2.4
        allow 2001:db8::3
        local stratum 10 orphan
        nocerttimecheck 1
        authselectmode ignore
        server 192.0.2.1 iburst maxpoll 9
        server ntp.example.org iburst maxpoll 9 nts trust
        server 10.0.2.2 iburst minpoll 4 maxpoll 6
        server 2001:db8::3 iburst minpoll 4 maxpoll 6
        ");
    }

    #[test]
    fn another_member_serves_nobody() {
        insta::assert_snapshot!(text(&plan(4, Some(&four()), Asked::Yes)), @"
        cmdport 0
        bindcmdaddress /ephemeral/time/chronyd.sock
        pidfile /
        makestep 1 3
        rtcsync
        port 0
        nocerttimecheck 1
        authselectmode ignore
        server 192.0.2.1 iburst maxpoll 9
        server ntp.example.org iburst maxpoll 9 nts trust
        server 10.0.2.1 iburst minpoll 4 maxpoll 6
        server 10.0.2.2 iburst minpoll 4 maxpoll 6
        server 2001:db8::3 iburst minpoll 4 maxpoll 6
        ");
    }

    #[test]
    fn a_voter_lends_its_clock_only_after_it_has_asked_the_others() {
        let before = plan(1, Some(&four()), Asked::Not);
        assert!(before.is_asking());
        assert!(!text(&before).contains("local"), "{}", text(&before));
        // The only one has no other to ask.
        let alone = nodes(&[(1, VOTER, "10.0.2.1"), (4, &[], "10.0.2.4")]);
        let alone = plan(1, Some(&alone), Asked::Not);
        assert!(!alone.is_asking());
        assert!(text(&alone).contains("local stratum 10 orphan"), "{}", text(&alone));
    }

    #[test]
    fn the_address_of_a_worker_changes_who_is_served_and_that_of_a_voter_who_is_asked() {
        let with = |voter: &str, worker: &str| {
            let nodes = nodes(&[(1, VOTER, "10.0.2.1"), (2, VOTER, voter), (4, &[], worker)]);
            plan(1, Some(&nodes), Asked::Not)
        };
        let asking = with("10.0.2.2", "10.0.2.4");
        let worker = with("10.0.2.2", "10.0.2.5");
        assert!(asking.is_asking() && asking != worker && asking.has_voters_of(&worker));
        assert!(!asking.has_voters_of(&with("10.0.2.3", "10.0.2.4")));
    }

    /// The plan of node 1 before a leader has named the members.
    fn early(roles: Option<&v1::NodeRoles>, peers: &[(u8, &str)], asked: Asked) -> Plan {
        let peers = peers.iter().map(|(seed, address)| (id(*seed), address.parse().unwrap()));
        Plan::new(&Known {
            own: Some(id(1)),
            roles,
            nodes: None,
            peers: &peers.collect(),
            cluster: &[],
            network: &[],
            asked,
        })
    }

    #[test]
    fn before_there_is_a_leader_the_nodes_of_the_last_boot_are_asked_and_served() {
        let voter = Role::record(VOTER);
        let peers = [(1, "10.0.2.1"), (2, "10.0.2.2")];
        let asking = early(Some(&voter), &peers, Asked::Not);
        assert!(asking.is_asking());
        assert!(text(&asking).contains("server 10.0.2.2 "), "{}", text(&asking));
        assert!(!text(&asking).contains("10.0.2.1 "), "itself: {}", text(&asking));
        // However far the clocks of all voters are apart, they come together.
        let lending = early(Some(&voter), &peers, Asked::Yes);
        assert!(lending.lends() && text(&lending).contains("allow 10.0.2.2\n"));
        // A worker asks, too, and a voter that knows no other node lends nothing.
        let worker = early(None, &peers, Asked::Yes);
        assert!(text(&worker).contains("server 10.0.2.2 ") && text(&worker).contains("port 0"));
        assert!(early(Some(&voter), &[], Asked::Yes).is_empty());
    }

    #[test]
    fn a_machine_without_any_source_runs_no_chronyd() {
        let known = Known {
            own: None,
            roles: None,
            nodes: None,
            peers: &Peers::new(),
            cluster: &[],
            network: &[],
            asked: Asked::Not,
        };
        assert!(Plan::new(&known).is_empty());
    }

    #[test]
    fn members_without_an_address_and_nodes_that_are_none_are_left_out() {
        let mut nodes = nodes(&[(1, VOTER, "10.0.2.1"), (2, VOTER, ""), (3, VOTER, "10.0.2.3")]);
        nodes.get_mut(&id(3)).unwrap().set_state(v1::NodeState::Decommissioned);
        let plan = plan(1, Some(&nodes), Asked::Yes);
        assert!(plan.voters.is_empty());
        assert_eq!(plan.serving, Serving::Own(BTreeSet::new()));
    }

    #[test]
    fn an_address_from_another_node_is_an_address_or_nothing() {
        let nodes = nodes(&[(1, VOTER, "10.0.2.1"), (2, VOTER, "10.0.2.2\nallow all")]);
        let text = text(&plan(1, Some(&nodes), Asked::Yes));
        assert!(!text.contains("all\n"), "{text}");
    }
}
