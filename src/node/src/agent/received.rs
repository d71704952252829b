//! The messages of one stream of nodes: what the leader has sent so far, read and checked.

use std::sync::Arc;
use std::time::Duration;

use polis_proto::v1;
use tokio::time::Instant;
use tracing::error;

use crate::firewall::Order;
use crate::forwarding;
use polis_machine::parameters::{self, Firewall, NtpServer, Proxy};
use polis_wire::identity::NodeId;
use polis_wire::node_roles::{NODES_MAX, Nodes};
use polis_wire::pki::{Authorities, Crl};
use polis_wire::pod_network::Networks;
use polis_wire::rpc::{self, AccessList, Serials, Users};

/// The networks, as a warning names them.
pub(super) const NETWORKS: &str = "the networks of pods and Services";

/// The content of one stream so far.
#[derive(Debug, Default)]
pub(super) struct Received {
    pub(super) nodes: Nodes,
    revoked: Option<Serials>,
    /// The time servers, and as the message has them.
    pub(super) time: Option<(Vec<NtpServer>, v1::TimeConfiguration)>,
    /// Those that the disk has.
    pub(super) kept_time: Option<v1::TimeConfiguration>,
    /// The targets of logs, and as the message has them.
    pub(super) log: Option<(forwarding::Order, v1::LogConfiguration)>,
    /// Those that the disk has.
    pub(super) kept_log: Option<v1::LogConfiguration>,
    /// The proxy, and as the message has it.
    pub(super) proxy: Option<(Option<Proxy>, v1::ProxyConfiguration)>,
    /// The one that the disk has.
    pub(super) kept_proxy: Option<v1::ProxyConfiguration>,
    pub(super) firewall: Option<Order>,
    /// The confirmed one that the disk has.
    pub(super) kept_firewall: Option<Firewall>,
    users: Option<Users>,
    pub(super) authorities: Option<Arc<Authorities>>,
    /// Those that this node uses: of the last boot, or the first that a leader named.
    pub(super) networks: Option<Networks>,
    /// Others, which the leader names.
    pub(super) other_networks: Option<Networks>,
    /// Those that the disk has.
    pub(super) kept_networks: Option<Networks>,
    /// Roles of this node that the disk does not have yet.
    pub(super) new_roles: Option<v1::NodeRoles>,
    pub(super) current: bool,
}

impl Received {
    /// Nothing yet, for a node that uses these networks.
    pub(super) fn with(networks: Option<Networks>) -> Self {
        Self { networks, ..Self::default() }
    }

    pub(super) fn apply(&mut self, event: v1::WatchEvent) {
        for gone in event.gone {
            if let Ok(id) = gone.parse() {
                self.nodes.remove(&id);
            }
        }
        for node in event.nodes {
            // A node without an ID can be neither shown nor admitted.
            let Ok(id) = node.id.parse::<NodeId>() else { continue };
            if self.nodes.len() < NODES_MAX || self.nodes.contains_key(&id) {
                self.nodes.insert(id, node);
            }
        }
        if !event.crl.is_empty() {
            match Crl::read(&event.crl) {
                Some(crl) => self.revoked = Some(Arc::new(crl.serials())),
                // A node that the last message named stays out.
                None => error!("the CRL of the cluster cannot be read and is not used"),
            }
        }
        if let Some(time) = event.time {
            match parameters::time_servers(time.clone(), "time") {
                Ok(servers) => self.time = Some((servers, time)),
                Err(error) => error!(%error, "the time servers of the cluster are not used"),
            }
        }
        if let Some(log) = event.log {
            match forwarding::Order::read(log.clone()) {
                Ok(order) => self.log = Some((order, log)),
                Err(error) => error!(%error, "the targets of logs of the cluster are not used"),
            }
        }
        if let Some(message) = event.proxy {
            match parameters::proxy(&message, "proxy") {
                Ok(proxy) => self.proxy = Some((proxy, message)),
                Err(error) => error!(%error, "the proxy of the cluster is not used"),
            }
        }
        if let Some(order) = event.firewall {
            match read(order) {
                Ok(order) => self.firewall = Some(order),
                Err(error) => error!(%error, "the firewall of the cluster is not used"),
            }
        }
        if let Some(named) = event.networks.as_ref().and_then(read_networks) {
            let used = *self.networks.get_or_insert(named);
            self.other_networks = (named != used).then_some(named);
        }
        if let Some(users) = event.users {
            self.users = Some(rpc::users(&users.users));
        }
        if let Some(authorities) = event.authorities {
            match Authorities::from_message(authorities) {
                Some(read) => self.authorities = Some(Arc::new(read)),
                None => error!("the CA of the cluster cannot be read; the last one stays"),
            }
        }
        self.current |= event.current;
    }

    /// The roles that the disk gets: not before it has the networks, without whose file the next
    /// boot begins with the default ones.
    pub(super) fn roles_to_keep(&self) -> Option<v1::NodeRoles> {
        self.new_roles.filter(|_| self.networks == self.kept_networks)
    }

    /// Why the leader names other networks than this node uses; `None` while it does not.
    pub(super) fn networks_fault(&self) -> Option<String> {
        let (used, named) = self.networks.zip(self.other_networks)?;
        Some(format!(
            "the leader names the networks {} for pods and {} for Services, and this node keeps \
             {} and {}: a leader of an earlier version dropped them from the configuration of the \
             cluster; update all nodes, then restore a snapshot of etcd from before",
            named.pods, named.services, used.pods, used.services,
        ))
    }

    /// The access list, where `before` had it.
    pub(super) fn access_list(&self, before: &AccessList) -> AccessList {
        let in_state = |state| {
            let nodes = self.nodes.iter().filter(move |(_, node)| node.state() == state);
            nodes.map(|(id, _)| *id).collect()
        };
        AccessList {
            nodes: Some(in_state(v1::NodeState::Up)),
            removed: in_state(v1::NodeState::Decommissioned),
            serials: self.revoked.clone().unwrap_or_else(|| before.serials.clone()),
            users: self.users.clone().or_else(|| before.users.clone()),
        }
    }
}

/// The firewall of an event.
fn read(order: v1::FirewallOrder) -> Result<Order, parameters::Error> {
    let confirmed = parameters::firewall(order.confirmed.unwrap_or_default(), "confirmed")?;
    let time = Duration::from_millis(order.tried_for_ms.into());
    let tried = order.tried.map(|tried| parameters::firewall(tried, "tried")).transpose()?;
    // The node returns by itself, whatever becomes of the leader.
    Ok(Order { confirmed, tried: tried.map(|tried| (tried, Instant::now() + time)) })
}

/// The networks of a message; one that cannot be read is not used.
pub(super) fn read_networks(message: &v1::ClusterNetworks) -> Option<Networks> {
    let v1::ClusterNetworks { pod_network, service_network } = message;
    let read = parameters::networks(pod_network, service_network, "networks");
    read.inspect_err(|error| error!(%error, "{NETWORKS} of the cluster are not used")).ok()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    fn node(seed: u8, state: v1::NodeState) -> v1::NodeInfo {
        let id = NodeId::from_public_key(&[seed; 32]).to_string();
        v1::NodeInfo { id, state: state.into(), ..Default::default() }
    }

    #[test]
    fn only_nodes_that_are_up_have_access() {
        let mut received = Received::default();
        let nodes = vec![node(1, v1::NodeState::Up), node(2, v1::NodeState::New)];
        received.apply(v1::WatchEvent { nodes, ..Default::default() });
        assert!(!received.current);
        received.apply(v1::WatchEvent { current: true, ..Default::default() });
        let before = AccessList { serials: Arc::new([vec![7]].into()), ..AccessList::default() };
        let access_list = received.access_list(&before);
        assert_eq!(access_list.nodes, Some([NodeId::from_public_key(&[1; 32])].into()));
        assert_eq!(access_list.serials, before.serials, "without a new CRL the last one stays");
        let gone = vec![node(1, v1::NodeState::Up).id];
        received.apply(v1::WatchEvent { gone, ..Default::default() });
        assert_eq!(received.access_list(&before).nodes, Some(BTreeSet::new()));
    }

    proptest! {
        #[test]
        fn arbitrary_events_do_no_harm(
            ids in prop::collection::vec(".{0,50}", 0..20), gone in prop::collection::vec(".{0,50}", 0..20),
            crl in prop::collection::vec(any::<u8>(), 0..200), current: bool, host in ".{0,50}",
            name in ".{0,50}", public_key in prop::collection::vec(any::<u8>(), 0..40), role: i32,
            signing in prop::collection::vec(any::<u8>(), 0..200), network in "[0-9./]{0,20}",
            tried in prop::option::of(prop::collection::vec(".{0,50}", 0..4)), tried_for_ms: u32,
            own in prop::collection::vec(".{0,50}", 0..4),
        ) {
            let nodes = ids.into_iter().map(|id| v1::NodeInfo { id, ..Default::default() });
            let mut received = Received::default();
            let server = v1::NtpServer { host: host.clone(), nts: false };
            let time = Some(v1::TimeConfiguration { servers: vec![server] });
            let user = v1::User { name, role, public_key, revoked: false };
            let users = Some(v1::Users { users: vec![user] });
            let nodes = nodes.collect();
            let authorities = Some(v1::Authorities { signing, ..Default::default() });
            let target = v1::LogTarget { url: host.clone(), ca: String::new() };
            let cluster_domain = host.clone();
            let url = "http://proxy.example:3128".to_owned();
            let proxy = Some(v1::ProxyConfiguration { url, direct: vec![host.clone()], own });
            let log = Some(v1::LogConfiguration { targets: vec![target], cluster_domain });
            let named = |sources| v1::FirewallConfiguration { sources, ports: vec![host.clone()] };
            let firewall = Some(v1::FirewallOrder {
                confirmed: Some(named(Vec::new())),
                tried: tried.map(named),
                tried_for_ms,
            });
            let networks = v1::ClusterNetworks { pod_network: network, ..Default::default() };
            let networks = Some(networks);
            received.apply(v1::WatchEvent {
                nodes, gone, current, crl, time, users, authorities, firewall, log, networks, proxy,
            });
            // It becomes the environment of containerd.
            let entries = received.proxy.iter().flat_map(|(proxy, _)| proxy).flat_map(Proxy::direct);
            prop_assert!(entries.into_iter().all(|entry| entry.bytes().all(|c| c.is_ascii_graphic())));
            // They become the input of `nft`, too.
            let apart = |it: Networks| !it.pods.overlaps(it.services);
            prop_assert!(received.networks.is_none_or(apart));
            // Its text becomes the input of `nft`.
            let order = received.firewall.iter().flat_map(|order| &order.confirmed.ports);
            prop_assert!(order.map(ToString::to_string).all(|ports| ports == host));
            prop_assert!(received.revoked.is_none() && received.authorities.is_none());
            // A host is part of a line of chronyd's configuration.
            let servers = received.time.iter().flat_map(|(servers, _)| servers);
            prop_assert!(servers.into_iter().all(|server| !server.host.contains(char::is_whitespace)));
        }
    }
}
