//! The addresses of the other nodes, for every service that resolves their names.
//!
//! ```text
//! directory on the ESP --at the start--+
//!                                      +--> peers --> hosts file
//! nodes, as the leader publishes -------+
//! found on the segment (`discovery`) ---+
//! ```
//!
//! A member of etcd dials the others by name before any leader exists: after a cold start,
//! the directory of the last boot is the only source.
//!
//! Invariants:
//! - The address of a node is dropped only for a newer one, or once the leader has sent
//!   every node that is up and this one is not among them.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use polis_proto::v1;
use prost::Message as _;
use tokio::sync::watch;
use tracing::warn;

use polis_base::files::File;
use polis_machine::network::names::Peers;
use polis_runtime::event::Closed;
use polis_runtime::supervisor::{Context, blocking};
use polis_wire::identity::NodeId;
use polis_wire::node_roles::Nodes;
use polis_wire::rpc::client::candidates;

/// Configuration, inputs and outputs. Cloned into every run; holds no progress.
#[derive(Clone, Debug)]
pub struct Service {
    /// The addresses at which the cluster was reached in the last boot.
    pub directory: File,
    /// Every node, once the leader has sent the list.
    pub nodes: watch::Receiver<Option<Arc<Nodes>>>,
    /// The nodes that were found at another address while no leader could publish it.
    pub found: watch::Receiver<Peers>,
    /// The address of every node.
    pub peers: watch::Sender<Peers>,
}

impl Service {
    /// Runs until cancelled.
    ///
    /// # Errors
    ///
    /// [`Closed`] when the owner of the input ended.
    pub async fn run(mut self, ctx: Context) -> Result<(), Closed> {
        let file = self.directory.clone();
        match blocking(move || file.read()).await {
            Ok(Some(bytes)) => match v1::ClusterDirectory::decode(bytes.as_slice()) {
                Ok(directory) => self.add(kept(&directory)),
                Err(error) => warn!(%error, "the cluster's directory on the ESP is damaged"),
            },
            Ok(None) => {}
            Err(error) => {
                let error = &error as &dyn std::error::Error;
                warn!(error, "cannot read the cluster's directory");
            }
        }
        ctx.healthy();
        // A list that was received before this run counts as new.
        self.nodes.mark_changed();
        loop {
            // The newest address is used: the order of two old ones is unknown.
            let waited = async {
                tokio::select! {
                    // Cancel-safe, both: they wait for event values.
                    changed = self.nodes.changed() => {
                        changed.map_err(|_closed| Closed("the nodes"))?;
                        let nodes = self.nodes.borrow_and_update().clone();
                        Ok(Newest::Reported(nodes.unwrap_or_default()))
                    }
                    changed = self.found.changed() => {
                        changed.map_err(|_closed| Closed("the discovery"))?;
                        Ok(Newest::Found(self.found.borrow_and_update().clone()))
                    }
                }
            };
            match ctx.until_cancelled(waited).await {
                Some(newest) => match newest? {
                    Newest::Reported(nodes) => {
                        self.forget(&nodes);
                        self.add(reported(&nodes));
                    }
                    Newest::Found(found) => self.add(found),
                },
                None => return Ok(()),
            }
        }
    }

    /// Drops nodes that are not members any more: their names do not resolve, and their
    /// messages are ignored.
    fn forget(&self, nodes: &Nodes) {
        if nodes.is_empty() {
            return;
        }
        self.peers.send_if_modified(|peers| {
            let before = peers.len();
            peers.retain(|id, _| nodes.get(id).is_some_and(is_up));
            peers.len() != before
        });
    }

    fn add(&self, found: Peers) {
        self.peers.send_if_modified(|peers| {
            let mut changed = false;
            for (id, address) in found {
                changed |= peers.insert(id, address) != Some(address);
            }
            changed
        });
    }
}

/// The newest source of addresses.
enum Newest {
    Reported(Arc<Nodes>),
    Found(Peers),
}

/// Whether a node is a member: a registering machine has no name here.
fn is_up(node: &v1::NodeInfo) -> bool {
    node.state() == v1::NodeState::Up
}

fn kept(directory: &v1::ClusterDirectory) -> Peers {
    let known = candidates(directory).into_iter();
    known.filter_map(|who| Some((who.node?, who.host.parse().ok()?))).collect()
}

fn reported(nodes: &BTreeMap<NodeId, v1::NodeInfo>) -> Peers {
    let address = |node: &v1::NodeInfo| -> Option<IpAddr> {
        node.status.as_ref()?.external_address.parse().ok()
    };
    let up = nodes.iter().filter(|(_, node)| is_up(node));
    up.filter_map(|(id, node)| Some((*id, address(node)?))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_directory_counts_until_the_leader_tells_something_newer() {
        let disk = tempfile::tempdir().unwrap();
        let root = polis_base::files::Root::at(disk.path());
        root.create().unwrap();
        let [one, two] = [1, 2].map(|seed| NodeId::from_public_key(&[seed; 32]));
        let entry = |id: NodeId, address: &str| v1::cluster_directory::Node {
            id: id.to_string(),
            addresses: vec![address.to_owned()],
        };
        let nodes = vec![entry(one, "10.0.0.1:7835"), entry(two, "10.0.0.2")];
        let directory = v1::ClusterDirectory { nodes };
        let file = root.esp.cluster_directory;
        file.write(&directory.encode_to_vec()).unwrap();
        let nodes = watch::Sender::new(None);
        let discovery = watch::Sender::<Peers>::default();
        let (peers, found) = (watch::Sender::default(), discovery.subscribe());
        let service = Service { directory: file, nodes: nodes.subscribe(), found, peers };
        let mut known = service.peers.subscribe();
        let (ctx, handles) = Context::for_test();
        let look = async {
            let first = known.wait_for(|peers: &Peers| peers.len() == 2).await.unwrap().clone();
            assert_eq!(first[&one], IpAddr::from([10, 0, 0, 1]));
            let status =
                v1::NodeStatus { external_address: "10.0.0.9".to_owned(), ..Default::default() };
            let up = |status| v1::NodeInfo {
                state: v1::NodeState::Up.into(),
                status,
                ..Default::default()
            };
            nodes.send_replace(Some(Arc::new([(one, up(Some(status))), (two, up(None))].into())));
            let moved = known.wait_for(|peers| peers[&one] != first[&one]).await.unwrap().clone();
            assert_eq!(moved[&one], IpAddr::from([10, 0, 0, 9]));
            assert_eq!(moved[&two], IpAddr::from([10, 0, 0, 2]), "of it nothing newer is known");
            // The found address is used, although the leader sent another one before.
            discovery
                .send_replace([(one, [10, 0, 0, 5].into()), (two, [10, 0, 0, 6].into())].into());
            let found = known.wait_for(|peers| peers[&one] != moved[&one]).await.unwrap().clone();
            assert_eq!(found, *discovery.borrow());
            handles.cancel().await;
        };
        let (ended, ()) = tokio::join!(service.run(ctx), look);
        assert_eq!(ended, Ok(()));
    }

    #[tokio::test]
    async fn a_node_that_the_leader_names_no_more_or_not_as_up_has_no_address() {
        let disk = tempfile::tempdir().unwrap();
        let root = polis_base::files::Root::at(disk.path());
        root.create().unwrap();
        let [up, deleted, new] = [1, 2, 3].map(|seed| NodeId::from_public_key(&[seed; 32]));
        let info = |state: v1::NodeState| v1::NodeInfo {
            state: state.into(),
            status: Some(v1::NodeStatus {
                external_address: "10.0.0.9".to_owned(),
                ..Default::default()
            }),
            ..Default::default()
        };
        let reported = [(up, info(v1::NodeState::Up)), (new, info(v1::NodeState::New))];
        let nodes = watch::Sender::new(Some(Arc::new(reported.into())));
        let discovery = watch::Sender::<Peers>::default();
        let service = Service {
            directory: root.esp.cluster_directory,
            nodes: nodes.subscribe(),
            found: discovery.subscribe(),
            peers: watch::Sender::new([(deleted, [10, 0, 0, 2].into())].into()),
        };
        let mut known = service.peers.subscribe();
        let (ctx, handles) = Context::for_test();
        let look = async {
            let expected = Peers::from([(up, [10, 0, 0, 9].into())]);
            known.wait_for(|peers| *peers == expected).await.unwrap();
            handles.cancel().await;
        };
        let (ended, ()) = tokio::join!(service.run(ctx), look);
        assert_eq!(ended, Ok(()));
    }
}
