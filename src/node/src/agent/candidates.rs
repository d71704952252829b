//! The candidates for the leader: the list of nodes to ask, kept on the ESP for the
//! next boot.
//!
//! Invariants:
//! - An empty directory never replaces one that names nodes.
//! - The file is written when it changes and not else: it is on flash, and FAT.
//! - The agent asks only the nodes that the last message of a leader names as members
//!   of etcd, wherever it found their addresses: a leader could end this node, and
//!   every node has a certificate. Besides these, and after all others, it asks the
//!   nodes that the parameters of this machine name, until it received a message from a
//!   leader in this boot: an operator gives such parameters after unknown nodes founded
//!   the cluster again.

use std::net::Ipv4Addr;

use polis_proto::v1;
use prost::Message as _;
use tokio::sync::watch;
use tracing::warn;

use super::Service;
use super::kept::keep;
use polis_machine::network::names::Peers;
use polis_runtime::event::Closed;
use polis_runtime::supervisor::{Context, blocking};
use polis_wire::identity::NodeId;
use polis_wire::node_roles::{Nodes, is_consensus_member};
use polis_wire::rpc::client::{Candidate, candidates};

/// Keeps the candidates and the file until cancelled.
pub(super) async fn run(service: Service, ctx: Context) -> Result<(), Closed> {
    let mut kept = read(&service).await;
    let mut nodes = service.outputs.nodes.subscribe();
    let mut cluster = service.outputs.cluster.subscribe();
    let mut credentials = service.outputs.credentials.subscribe();
    let mut found = service.inputs.found.clone();
    let mut parameters = service.inputs.parameters.clone();
    ctx.healthy();
    loop {
        let moved = found.borrow_and_update().clone();
        let received = nodes.borrow_and_update().clone();
        let (own, member) = {
            let status = cluster.borrow_and_update();
            (status.node, status.is_member())
        };
        if member && kept.nodes.is_empty() {
            // The answer that admitted this node contained the directory.
            kept = read(&service).await;
        }
        let directory =
            received.as_deref().map(directory).filter(|received| !received.nodes.is_empty());
        if let Some(directory) = directory
            && directory != kept
        {
            keep(&service.config.directory, directory.encode_to_vec(), "the directory").await;
            kept = directory;
        }
        let configured = {
            let known = parameters.borrow_and_update();
            let authorities = credentials.borrow_and_update().clone();
            let authorities = authorities.and_then(|known| known.authorities);
            let is_its = |der: &[u8]| authorities.is_some_and(|known| known.contains(der));
            let unheard = known.as_ref().filter(|_| member && received.is_none());
            unheard.and_then(|known| known.directory(is_its)).unwrap_or_default()
        };
        let known = ask(own, service.config.port, &kept, &moved, &configured);
        service.outputs.candidates.send_if_modified(|old| {
            let changed = *old != known;
            *old = known;
            changed
        });
        let waited = async {
            let changed = |changed: Result<(), watch::error::RecvError>, name| {
                changed.map_err(|_closed| Closed(name))
            };
            tokio::select! {
                // Cancel-safe, all: they wait for event values.
                received = nodes.changed() => changed(received, "the nodes"),
                named = cluster.changed() => changed(named, "the cluster"),
                certified = credentials.changed() => changed(certified, "the credentials"),
                moved = found.changed() => changed(moved, "the discovery"),
                configured = parameters.changed() => changed(configured, "the parameters"),
            }
        };
        match ctx.until_cancelled(waited).await {
            Some(waited) => waited?,
            None => return Ok(()),
        }
    }
}

async fn read(service: &Service) -> v1::ClusterDirectory {
    let file = service.config.directory.clone();
    match blocking(move || file.read()).await {
        Ok(bytes) => bytes.map(|bytes| decode(&bytes)).unwrap_or_default(),
        Err(error) => {
            warn!(error = &error as &dyn std::error::Error, "cannot read the cluster's directory");
            v1::ClusterDirectory::default()
        }
    }
}

/// An unreadable directory counts as empty: the next message of the leader mends it.
fn decode(bytes: &[u8]) -> v1::ClusterDirectory {
    v1::ClusterDirectory::decode(bytes).unwrap_or_else(|error| {
        warn!(%error, "the cluster's directory on the ESP is damaged");
        v1::ClusterDirectory::default()
    })
}

/// Where curators are: beside the members of etcd.
fn directory(nodes: &Nodes) -> v1::ClusterDirectory {
    let reached = nodes.iter().filter_map(|(id, node)| {
        let address = &node.status.as_ref()?.external_address;
        let member = node.state() == v1::NodeState::Up && is_consensus_member(node.roles.as_ref());
        (member && !address.is_empty()).then(|| v1::cluster_directory::Node {
            id: id.to_string(),
            addresses: vec![address.clone()],
        })
    });
    v1::ClusterDirectory { nodes: reached.collect() }
}

/// The nodes to ask: first the curator of this machine, which may not run, then every
/// node in the directory, at its discovered address first. A discovered node that is
/// not in the directory is left out. Last come the nodes that the parameters of this
/// machine name (`configured`).
fn ask(
    own: Option<NodeId>,
    port: u16,
    directory: &v1::ClusterDirectory,
    found: &Peers,
    configured: &v1::ClusterDirectory,
) -> Vec<Candidate> {
    let at = |node: NodeId, host: String| Candidate { node: Some(node), host, port };
    let here = own.map(|node| at(node, Ipv4Addr::LOCALHOST.to_string()));
    let known = candidates(directory);
    let named = |node: &NodeId| known.iter().any(|known| known.node == Some(*node));
    let found: Vec<_> = found.iter().filter(|(node, _)| named(node)).collect();
    let found = found.into_iter().map(|(node, address)| at(*node, address.to_string()));
    let others = found.chain(known.iter().cloned()).chain(candidates(configured));
    let mut all = Vec::new();
    for one in here.into_iter().chain(others.filter(|other| other.node != own)) {
        if !all.contains(&one) {
            all.push(one);
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn no_nodes() -> v1::ClusterDirectory {
        v1::ClusterDirectory::default()
    }

    fn node(seed: u8, address: &str, member: bool) -> (NodeId, v1::NodeInfo) {
        let id = NodeId::from_public_key(&[seed; 32]);
        let consensus_member = member.then_some(v1::node_roles::ConsensusMember {});
        let info = v1::NodeInfo {
            id: id.to_string(),
            state: v1::NodeState::Up.into(),
            roles: Some(v1::NodeRoles { consensus_member, ..Default::default() }),
            status: Some(v1::NodeStatus {
                external_address: address.to_owned(),
                ..Default::default()
            }),
            ..Default::default()
        };
        (id, info)
    }

    #[test]
    fn curators_are_beside_members_of_etcd_that_have_an_address() {
        let nodes =
            Nodes::from([node(1, "10.0.0.1", true), node(2, "", true), node(3, "10.0.0.3", false)]);
        let directory = directory(&nodes);
        assert_eq!(directory.nodes.len(), 1);
        let id = |seed: u8| NodeId::from_public_key(&[seed; 32]);
        let asked = |own, found: Peers| -> Vec<String> {
            ask(own, 7835, &directory, &found, &no_nodes())
                .iter()
                .map(ToString::to_string)
                .collect()
        };
        assert_eq!(asked(Some(id(3)), Peers::new()), ["127.0.0.1:7835", "10.0.0.1:7835"]);
        assert_eq!(asked(Some(id(1)), Peers::new()).len(), 1);
        assert_eq!(asked(None, Peers::new()).len(), 1);
        let found = Peers::from([(id(1), [10, 0, 0, 9].into())]);
        assert_eq!(asked(Some(id(3)), found), ["127.0.0.1:7835", "10.0.0.9:7835", "10.0.0.1:7835"]);
        assert_eq!(asked(None, Peers::from([(id(1), [10, 0, 0, 1].into())])).len(), 1);
    }

    #[test]
    fn whom_the_parameters_name_is_asked_after_all_others() {
        let before = directory(&[node(1, "10.0.0.1", true)].into());
        let again = directory(&[node(1, "10.0.0.1", true), node(2, "10.0.0.2", true)].into());
        let asked = ask(None, 7835, &before, &Peers::new(), &again);
        let asked: Vec<_> = asked.iter().map(ToString::to_string).collect();
        assert_eq!(asked, ["10.0.0.1:7835", "10.0.0.2:7835"]);
    }

    #[test]
    fn a_worker_that_was_found_is_not_asked_who_leads() {
        let directory = directory(&[node(1, "10.0.0.1", true), node(3, "10.0.0.3", false)].into());
        let worker = NodeId::from_public_key(&[3; 32]);
        let found = Peers::from([(worker, [10, 0, 0, 9].into())]);
        let asked = ask(None, 7835, &directory, &found, &no_nodes());
        assert!(asked.iter().all(|candidate| candidate.node != Some(worker)), "{asked:?}");
        assert_eq!(asked.len(), 1);
    }

    proptest! {
        #[test]
        fn a_damaged_directory_is_as_none(input in prop::collection::vec(any::<u8>(), 0..200)) {
            let _candidates = ask(None, 1, &decode(&input), &Peers::new(), &no_nodes());
        }
    }
}
