//! The names of nodes: sets and removes them, and keeps each unique in the cluster.
//!
//! ```text
//! nodes/<ID>.name  <-- one transaction -->  node_names/<name>: the ID
//! ```
//!
//! Invariants:
//! - At most one node's record has a name, and `node_names` has the ID of that node: both
//!   change in one transaction, also when two operators act at the same moment.
//! - The deletion of a node frees its name.
//!
//! What this module does not do: validate names (`identity::NodeName`), or decide in which
//! states a node may get one (`state`).

use polis_proto::v1;
use prost::Message as _;
use tracing::info;

use super::error::Error;
use super::state::{self, Refusal, Request, Step};
use super::store::{self, CONFLICTS_MAX, NODE_NAMES, Store, node_key};
use polis_wire::identity::{NodeId, NodeName};
use polis_wire::pki::{self, Guard, Write};

impl<S: pki::Store + Clone> Store<S> {
    /// Sets the name of a node, or removes it.
    ///
    /// # Errors
    ///
    /// [`Error::NameTaken`] and the refusals of `state`.
    pub async fn name_node(&self, id: NodeId, name: Option<&NodeName>) -> Result<v1::Node, Error> {
        let key = node_key(id);
        let wanted = name.map(ToString::to_string).unwrap_or_default();
        for _attempt in 0..CONFLICTS_MAX {
            let entry = self.kv.get(&key).await.map_err(store::Error::Store)?;
            let entry = entry.ok_or(Refusal::Unknown)?;
            let before: v1::Node = store::decode(&key, &entry.value)?;
            let former = release(&before.name);
            let node = match state::step(Some(before), Request::Name(wanted.clone()))? {
                Step::Keep(node) => return Ok(*node),
                Step::Put(node) | Step::Delete(node) => node,
            };
            let mut guards = vec![Guard::Unchanged(key.clone(), entry.revision)];
            let mut writes = vec![Write::Put(key.clone(), node.encode_to_vec())];
            writes.extend(former);
            if let Some(name) = name {
                guards.push(self.unless_taken(name, id).await?);
                writes.push(take(name, id));
            }
            if self.kv.commit(guards, writes).await.map_err(store::Error::Store)? {
                info!(event = "named", node = %id, name = wanted, "a node was named");
                return Ok(*node);
            }
        }
        Err(store::Error::Contended { key }.into())
    }

    /// A guard that holds while no other node has the name.
    pub(super) async fn unless_taken(&self, name: &NodeName, id: NodeId) -> Result<Guard, Error> {
        let place = place(name.as_str());
        let Some(entry) = self.kv.get(&place).await.map_err(store::Error::Store)? else {
            return Ok(Guard::Absent(place));
        };
        let owner: v1::NodeName = store::decode(&place, &entry.value)?;
        if owner.node_id != id.to_string() {
            return Err(Error::NameTaken { name: name.to_string(), by: owner.node_id });
        }
        Ok(Guard::Unchanged(place, entry.revision))
    }
}

/// Gives a name to a node, in the transaction of the node's record.
pub(super) fn take(name: &NodeName, id: NodeId) -> Write {
    let owner = v1::NodeName { node_id: id.to_string() };
    Write::Put(place(name.as_str()), owner.encode_to_vec())
}

/// Frees the name of a node; does nothing for a node without a name.
pub(super) fn release(name: &str) -> Option<Write> {
    (!name.is_empty()).then(|| Write::Delete(place(name)))
}

fn place(name: &str) -> String {
    format!("{NODE_NAMES}{name}")
}
