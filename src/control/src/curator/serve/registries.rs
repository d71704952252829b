//! The registries of images: for workers with their credentials, for users without.

use std::sync::Arc;

use polis_proto::v1;
use tokio::sync::watch;
use tonic::Status;

use super::{Handlers, Lead, Stream};
use crate::curator::directory::Directory;
use crate::curator::error::Error;
use crate::curator::leader::{Leadership, Term};
use polis_wire::identity::NodeId;
use polis_wire::registry::shown;

/// The stream of one worker.
struct Watcher {
    handlers: Handlers,
    directory: watch::Receiver<Directory>,
    leadership: watch::Receiver<Leadership>,
    term: Term,
    worker: NodeId,
    sent: Option<Arc<v1::Registries>>,
}

/// Every registry, and again every one after each change, while `worker` is a worker.
pub(super) async fn watch(lead: Lead, worker: NodeId) -> Result<Stream<v1::Registries>, Status> {
    let directory = lead.current().await?;
    let Lead { handlers, term } = lead;
    let leadership = handlers.0.leadership.clone();
    let watcher = Watcher { handlers, directory, leadership, term, worker, sent: None };
    let stream = futures::stream::unfold(Some(watcher), |watcher| async move {
        let mut watcher = watcher?;
        match watcher.next().await {
            Ok(registries) => Some((Ok(registries), Some(watcher))),
            // The last message.
            Err(status) => Some((Err(status), None)),
        }
    });
    Ok(Box::pin(stream))
}

impl Watcher {
    async fn next(&mut self) -> Result<v1::Registries, Status> {
        loop {
            if self.leadership.borrow_and_update().term.as_ref() != Some(&self.term) {
                return Err(self.handlers.not_leader());
            }
            let registries = {
                let directory = self.directory.borrow_and_update();
                if !is_worker(&directory, self.worker) {
                    return Err(Error::NoWorker.into());
                }
                directory.registries()
            };
            if !self.sent.as_ref().is_some_and(|sent| Arc::ptr_eq(sent, &registries)) {
                self.sent = Some(Arc::clone(&registries));
                return Ok(v1::Registries::clone(&registries));
            }
            tokio::select! {
                // Cancel-safe, both: they wait for event values.
                changed = self.directory.changed() => {
                    changed.map_err(|_closed| self.handlers.not_leader())?;
                }
                changed = self.leadership.changed() => {
                    changed.map_err(|_closed| self.handlers.not_leader())?;
                }
            }
        }
    }
}

fn is_worker(directory: &Directory, id: NodeId) -> bool {
    let node = directory.node(id).map(|known| &known.node);
    node.is_some_and(|node| {
        let roles = node.roles.as_ref();
        node.state() == v1::NodeState::Up
            && roles.is_some_and(|roles| roles.kubernetes_worker.is_some())
    })
}

/// Every registry, without passwords.
pub(super) fn list(directory: &Directory) -> v1::ListRegistriesResponse {
    let registries = directory.registries().registries.iter().map(shown).collect();
    v1::ListRegistriesResponse { registries }
}

#[cfg(test)]
mod tests {
    use prost::Message as _;

    use super::*;
    use crate::consensus::client::{Change, Kv, Mirror};
    use crate::curator::store;

    fn put(key: String, value: Vec<u8>) -> Change {
        Change::Put(Kv { key, value, created: 1, modified: 1, lease: 0 })
    }

    #[test]
    fn a_list_for_users_has_no_password() {
        let registry = v1::Registry {
            host: "registry.example".to_owned(),
            username: "ann".to_owned(),
            password: "hidden".to_owned(),
            ..Default::default()
        };
        let record = v1::Registries { registries: vec![registry] };
        let mut directory = Directory::default();
        let change = put(store::REGISTRIES.to_owned(), record.encode_to_vec());
        directory.apply(&Mirror::default(), &[change]);
        let answer = list(&directory).encode_to_vec();
        let has = |word: &[u8]| answer.windows(word.len()).any(|at| at == word);
        assert!(has(b"ann") && !has(b"hidden"));
        assert!(!format!("{directory:?}").contains("hidden"));
        assert_eq!(directory.registries().registries[0].password, "hidden");
    }

    #[test]
    fn only_a_node_that_is_up_and_a_worker_gets_credentials() {
        let id = NodeId::from_public_key(&[7; 32]);
        let roles = v1::NodeRoles {
            kubernetes_worker: Some(v1::node_roles::KubernetesWorker {}),
            ..Default::default()
        };
        let of = |state: v1::NodeState, roles| {
            let node = v1::Node { state: state.into(), roles, ..Default::default() };
            let mut directory = Directory::default();
            let change = put(store::node_key(id), node.encode_to_vec());
            directory.apply(&Mirror::default(), &[change]);
            is_worker(&directory, id)
        };
        assert!(of(v1::NodeState::Up, Some(roles)));
        assert!(!of(v1::NodeState::Up, None));
        assert!(!of(v1::NodeState::Decommissioned, Some(roles)));
        assert!(!is_worker(&Directory::default(), id));
    }
}
