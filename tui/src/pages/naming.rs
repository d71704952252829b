//! How pages name a node: by the name that a person gave it, else by the beginning of its ID.

use crate::snapshot::{Node, Snapshot};
use crate::text::{clean, name};

/// How a sentence calls a node: by its name, else by the beginning of its ID.
pub(super) fn called(node: &Node) -> String {
    node.name.as_deref().map_or_else(|| short(&node.id), |name| clean(name).into_owned())
}

/// The same of the node with this ID.
pub(super) fn called_by_id(snapshot: &Snapshot, id: &str) -> String {
    name_of(snapshot, id).unwrap_or_else(|| short(id))
}

/// The name that a person gave the node with this ID.
pub(super) fn name_of(snapshot: &Snapshot, id: &str) -> Option<String> {
    let mut nodes = snapshot.nodes.iter().flat_map(|known| &known.nodes);
    nodes.find(|node| node.id == id)?.name.as_deref().map(|name| clean(name).into_owned())
}

/// The beginning of a node ID, which is enough to distinguish nodes.
pub(super) fn short(id: &str) -> String {
    let digits = |id: &str| id.chars().count() > "polis-".len() + 12;
    match id.strip_prefix("polis-") {
        Some(_) if digits(id) => id.chars().take("polis-".len() + 8).collect(),
        _ => name(id),
    }
}
