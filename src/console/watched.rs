//! Watches everything that the console shows, and tells news from what moves all the time.

use futures::FutureExt as _;
use futures::future::{BoxFuture, select_all};
use tokio::sync::watch;

use super::load::Load;
use super::members::Learned;
use super::words::Words;
use super::{ClusterNodes, Inputs};
use crate::event::Closed;
use crate::identity::Identity;
use crate::node::environment::Environment;
use crate::parameters::Known;
use crate::pki::Overview;
use crate::stage::Stages;
use crate::supervisor::Tree;
use crate::{cluster, consensus, network, storage};

/// The newest of everything at one moment.
#[derive(Clone, Debug)]
pub(super) struct Values {
    pub(super) environment: Environment,
    pub(super) stages: Stages,
    pub(super) services: Tree,
    pub(super) known: Known,
    pub(super) network: network::Status,
    pub(super) storage: storage::Status,
    pub(super) health: storage::Health,
    pub(super) cluster: cluster::Status,
    pub(super) consensus: consensus::Status,
    pub(super) pki: Overview,
    pub(super) cluster_nodes: ClusterNodes,
    pub(super) identity: Option<Identity>,
    pub(super) load: Option<Load>,
    pub(super) words: Words,
    pub(super) members: Learned,
}

/// Everything that is shown, as its owners tell it.
#[derive(Debug)]
pub(super) struct Watched {
    pub(super) inputs: Inputs,
    pub(super) stages: watch::Receiver<Stages>,
    pub(super) services: watch::Receiver<Tree>,
    pub(super) load: watch::Receiver<Option<Load>>,
    pub(super) words: watch::Receiver<Words>,
    pub(super) members: watch::Receiver<Learned>,
}

impl Watched {
    /// What is true now.
    pub(super) fn newest(&mut self, environment: &Environment) -> Values {
        let Inputs {
            known,
            network,
            storage,
            health,
            cluster,
            consensus,
            pki,
            cluster_nodes,
            identity,
        } = &mut self.inputs;
        Values {
            environment: environment.clone(),
            stages: self.stages.borrow_and_update().clone(),
            services: self.services.borrow_and_update().clone(),
            known: known.borrow_and_update().clone(),
            network: network.borrow_and_update().clone(),
            storage: storage.borrow_and_update().clone(),
            health: health.borrow_and_update().clone(),
            cluster: cluster.borrow_and_update().clone(),
            consensus: consensus.borrow_and_update().clone(),
            pki: pki.borrow_and_update().clone(),
            cluster_nodes: cluster_nodes.borrow_and_update().clone(),
            identity: *identity.borrow_and_update(),
            load: self.load.borrow_and_update().clone(),
            words: self.words.borrow_and_update().clone(),
            members: self.members.borrow_and_update().clone(),
        }
    }

    /// Waits until any of them changes that a person waits for. The others change
    /// all the time, and are in the next picture, with the clock. Cancel-safe.
    pub(super) async fn changed(&mut self) -> Result<(), Closed> {
        let Inputs {
            known,
            network,
            storage,
            cluster,
            pki,
            identity,
            health: _,
            consensus: _,
            cluster_nodes: _,
        } = &mut self.inputs;
        let any = [
            changed(&mut self.stages, "the stages"),
            changed(&mut self.services, "the services"),
            changed(known, "the parameters"),
            changed(network, "the network"),
            changed(storage, "the storage"),
            changed(cluster, "the cluster"),
            changed(pki, "the certificates"),
            changed(identity, "the identity"),
            changed(&mut self.words, "the words"),
        ];
        select_all(any).await.0
    }
}

fn changed<'a, T: Send + Sync>(
    value: &'a mut watch::Receiver<T>,
    name: &'static str,
) -> BoxFuture<'a, Result<(), Closed>> {
    async move { value.changed().await.map_err(|_closed| Closed(name)) }.boxed()
}
