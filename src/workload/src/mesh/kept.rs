//! The places of the nodes that this one keeps on its disk: a node that boots while it reaches no
//! leader has the mesh of its last records.
//!
//! ```text
//! records of a leader --record--> places.pb --boot, no leader--> read --> records::place
//! ```
//!
//! The file has only what the mesh and the way to the API servers need of the records, and it
//! becomes records for these two alone. The firewall, the access list and everything else wait
//! for the leader, so this file opens nothing.
//!
//! Invariants:
//! - A file that is damaged in any part is not used at all.
//! - The file is there only while the records of a leader have a place for this node.
//!
//! What this module does not do: decide when the kept places count (`service`).

use polis_base::cause;
use polis_base::files::{self, File};
use polis_proto::v1;
use polis_proto::v1::mesh_places::Node;
use polis_runtime::supervisor::blocking;
use polis_wire::identity::NodeId;
use polis_wire::node_roles::{NODES_MAX, Nodes, Role};
use prost::Message as _;
use tracing::warn;

use super::records::member;

/// Characters of a damaged ID in the log.
const ID_SHOWN: usize = 80;

/// Why the file is not used.
#[derive(Debug, thiserror::Error)]
enum Error {
    #[error(transparent)]
    Files(#[from] files::Error),
    #[error("it is not a list of places")]
    Form(#[from] prost::DecodeError),
    #[error("it has {0} nodes")]
    Count(usize),
    #[error("the entry of {0:?} cannot be read")]
    Entry(String),
}

/// The file, and its content as far as it is known.
#[derive(Debug)]
pub(super) struct Kept {
    file: File,
    /// `None` before it is known; empty without a file.
    content: Option<Vec<u8>>,
    /// The last failure to write, which is logged once.
    failed: cause::Last,
}

impl Kept {
    pub(super) fn new(file: File) -> Self {
        Self { file, content: None, failed: cause::Last::default() }
    }

    /// The records of the last boot, as far as the mesh needs them.
    pub(super) async fn read(&mut self) -> Option<Nodes> {
        let file = self.file.clone();
        let read = blocking(move || -> Result<_, Error> {
            let Some(bytes) = file.read()? else { return Ok(None) };
            decode(&bytes).map(|nodes| Some((nodes, bytes)))
        });
        match read.await {
            Ok(found) => {
                let (nodes, bytes) = found.unzip();
                self.content = Some(bytes.unwrap_or_default());
                nodes
            }
            Err(error) => {
                let error = &error as &dyn std::error::Error;
                let path = self.file.path().display();
                warn!(error, %path, "the mesh of the last boot cannot be read and is not used");
                None
            }
        }
    }

    /// Writes the records of a leader to the file. A failure is tried again at the next
    /// call.
    pub(super) async fn write(&mut self, own: NodeId, nodes: &Nodes) {
        self.replace(record(own, nodes).encode_to_vec()).await;
    }

    /// Removes the file: this node has no place any more.
    pub(super) async fn forget(&mut self) {
        self.replace(Vec::new()).await;
    }

    async fn replace(&mut self, content: Vec<u8>) {
        if self.content.as_ref() == Some(&content) {
            return;
        }
        let (file, new) = (self.file.clone(), content.clone());
        let written = blocking(move || {
            if new.is_empty() {
                return file.remove();
            }
            // A boot changes nothing, mostly. A file that cannot be read is replaced.
            if file.read().ok().flatten().is_some_and(|old| old == new) {
                return Ok(());
            }
            file.write(&new)
        });
        match written.await {
            Ok(()) => {
                self.failed.clear();
                self.content = Some(content);
            }
            Err(error) => {
                let cause = cause::line(&error);
                if self.failed.is_new(&cause) {
                    warn!(cause, "cannot keep the mesh for the next boot");
                }
            }
        }
    }
}

/// The part of the records that the mesh needs; empty while they have no place for the node `own`.
fn record(own: NodeId, nodes: &Nodes) -> v1::MeshPlaces {
    let place = |(id, node): (&NodeId, &v1::NodeInfo)| {
        // A node that cannot be read here has no place in the mesh, and would spoil the file.
        let address = member(node)?.address;
        Some(Node {
            id: id.to_string(),
            cluster_network: node.cluster_network.clone(),
            external_address: address.map(|address| address.to_string()).unwrap_or_default(),
            kubernetes_controller: node.roles.is_some_and(|it| it.kubernetes_controller.is_some()),
        })
    };
    let is_up = |node: &v1::NodeInfo| node.state() == v1::NodeState::Up;
    if !nodes.get(&own).is_some_and(|node| is_up(node) && member(node).is_some()) {
        return v1::MeshPlaces::default();
    }
    let up = nodes.iter().filter(|(_, node)| is_up(node));
    v1::MeshPlaces { nodes: up.filter_map(place).collect() }
}

/// The records that the content of a file stands for.
fn decode(content: &[u8]) -> Result<Nodes, Error> {
    let places = v1::MeshPlaces::decode(content)?;
    if places.nodes.len() > NODES_MAX {
        return Err(Error::Count(places.nodes.len()));
    }
    places.nodes.into_iter().map(entry).collect()
}

fn entry(place: Node) -> Result<(NodeId, v1::NodeInfo), Error> {
    let unreadable = || Error::Entry(place.id.chars().take(ID_SHOWN).collect());
    let id: NodeId = place.id.parse().map_err(|_malformed| unreadable())?;
    let roles: &[Role] =
        if place.kubernetes_controller { &[Role::KubernetesController] } else { &[] };
    let node = v1::NodeInfo {
        id: place.id.clone(),
        state: v1::NodeState::Up.into(),
        roles: Some(Role::record(roles)),
        status: Some(v1::NodeStatus {
            external_address: place.external_address.clone(),
            ..Default::default()
        }),
        cluster_network: place.cluster_network.clone(),
        ..Default::default()
    };
    let address = &place.external_address;
    let is_address = address.is_empty() || address.parse::<std::net::IpAddr>().is_ok();
    if !is_address || member(&node).is_none() {
        return Err(unreadable());
    }
    Ok((id, node))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::mesh::records::Place;
    use crate::mesh::samples::{id, nodes, seen};

    #[test]
    fn the_kept_places_make_the_same_mesh_and_have_nothing_else() {
        let mut records = nodes(&[1, 2, 3, 4, 5, 6]);
        records.get_mut(&id(2)).unwrap().roles = Some(Role::record(&[Role::KubernetesController]));
        records.get_mut(&id(3)).unwrap().status = None;
        records.get_mut(&id(4)).unwrap().set_state(v1::NodeState::Decommissioned);
        records.get_mut(&id(5)).unwrap().cluster_network = None;
        records.get_mut(&id(6)).unwrap().status.as_mut().unwrap().external_address = "noise".into();
        let kept = decode(&record(id(1), &records).encode_to_vec()).unwrap();
        assert!(matches!(seen(&records), Place::Mesh { .. }));
        assert_eq!(seen(&kept), seen(&records));
        assert_eq!(
            kept.keys().collect::<Vec<_>>(),
            nodes(&[1, 2, 3, 6]).keys().collect::<Vec<_>>()
        );
        assert!(kept.values().all(|node| node.labels.is_empty()));
        let controls = |node| kept[&id(node)].roles.unwrap().kubernetes_controller.is_some();
        assert!(controls(2) && !controls(1));
    }

    #[test]
    fn nothing_is_kept_while_the_records_have_no_place_for_this_node() {
        let nothing = v1::MeshPlaces::default();
        assert_eq!(record(id(9), &nodes(&[1, 2])), nothing);
        let mut records = nodes(&[1, 2]);
        records.get_mut(&id(1)).unwrap().set_state(v1::NodeState::Decommissioned);
        assert_eq!(record(id(1), &records), nothing);
        let mut records = nodes(&[1, 2]);
        records.get_mut(&id(1)).unwrap().cluster_network = None;
        assert_eq!(record(id(1), &records), nothing);
        assert!(nothing.encode_to_vec().is_empty());
    }

    #[tokio::test]
    async fn a_kept_file_reads_back_and_goes_with_the_place_of_the_node() {
        let folder = tempfile::tempdir().unwrap();
        let file = File::private(folder.path().join("places.pb"));
        let mut kept = Kept::new(file.clone());
        assert_eq!(kept.read().await, None);
        let records = nodes(&[1, 2]);
        kept.write(id(1), &records).await;
        assert_eq!(seen(&Kept::new(file.clone()).read().await.unwrap()), seen(&records));
        // A record that changes nothing for the mesh writes nothing.
        file.remove().unwrap();
        let mut other = records;
        other.get_mut(&id(2)).unwrap().labels.clear();
        kept.write(id(1), &other).await;
        assert_eq!(file.read().unwrap(), None);
        kept.write(id(1), &nodes(&[1, 2, 3])).await;
        assert!(file.read().unwrap().is_some());
        kept.write(id(1), &nodes(&[2])).await;
        assert_eq!(file.read().unwrap(), None);
        kept.write(id(1), &nodes(&[1])).await;
        kept.forget().await;
        assert_eq!(file.read().unwrap(), None);
    }

    #[tokio::test]
    async fn a_damaged_file_is_not_used_and_is_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let file = File::private(folder.path().join("places.pb"));
        let whole = record(id(1), &nodes(&[1, 2]));
        let with = |change: fn(&mut Node)| {
            let mut damaged = whole.clone();
            change(&mut damaged.nodes[1]);
            damaged.encode_to_vec()
        };
        let damaged = [
            vec![0xff; 20],
            with(|node| node.id.push('x')),
            with(|node| node.cluster_network = None),
            with(|node| node.cluster_network.as_mut().unwrap().wireguard_public_key = vec![0; 32]),
            with(|node| node.cluster_network.as_mut().unwrap().pod_prefix.push('9')),
            with(|node| node.external_address = "10.0.2".to_owned()),
        ];
        for content in damaged {
            file.write(&content).unwrap();
            let mut kept = Kept::new(file.clone());
            assert_eq!(kept.read().await, None);
            kept.write(id(1), &nodes(&[1, 2])).await;
            assert_eq!(file.read().unwrap().unwrap(), whole.encode_to_vec());
        }
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_are_no_places_or_sound_ones(
            content in prop::collection::vec(any::<u8>(), 0..200)
        ) {
            for node in decode(&content).unwrap_or_default().values() {
                prop_assert!(member(node).is_some());
            }
        }
    }
}
