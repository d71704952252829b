//! Leads this machine home, once a boot.
//!
//! ```text
//! records on the ESP --+
//! is there data? ------+--> decide --bootstrap--> journal --> want a data partition
//! parameters, maybe ---+       |                                     |
//!                              +--start again----------+     node key: made
//!                                                      v             v
//!                                             node key: read   orders: bootstrap
//!                                             orders: again          |
//!                                                      |             v
//!                                       check <- etcd serves -> make it a member
//!                                                      |             |
//!                                                      +--> home <---+
//! ```
//!
//! Nothing waits longer than it must: the data partition is made while the
//! network looks for an address, and etcd needs none to start.
//!
//! Invariants:
//! - The journal is on the ESP before anything is made that it speaks of.
//! - A run that ends anywhere is followed by one that ends at home, as the same node.
//!
//! What this module does not do: decide (`decide`), or know what makes a member
//! (`membership`).

use std::time::Duration;

use sha2::{Digest as _, Sha256};
use tokio::sync::watch;
use tokio::time::sleep;
use tracing::{info, warn};

use super::decide::{Data, Decision, Record, Refusal, decide, needs_parameters};
use super::membership::{self, Probe, Step};
use super::record::Damage;
use super::sealed::{Sealed, configuration_message, journal_from_record, journal_to_record};
use super::state::{Event, State};
use super::{Error, Role, Status, blocking};
use crate::consensus::{self, Orders, Peer, Start, client};
use crate::curator::{Founding, Store};
use crate::event::{Closed, until};
use crate::identity::{self, Identity, NodeKey};
use crate::parameters::{self, Bootstrap, Cluster, StoragePolicy};
use crate::serial::EventLine;
use crate::stage::{self, Stage};
use crate::storage::file::File;
use crate::storage::{self, Kind, Make, Root};
use crate::supervisor::Context;
use crate::{network, pki};

/// Wait between attempts at a store that does not answer: an election long.
const RETRY: Duration = Duration::from_millis(500);

/// How a run gets at the curator's part of etcd.
pub trait Consensus: Clone + Send + Sync + 'static {
    /// The curator's part.
    type Kv: pki::Store + Clone + 'static;

    /// Waits until this machine's member serves. Cancel-safe.
    fn curator(&mut self) -> impl Future<Output = Result<Self::Kv, Closed>> + Send;
}

impl Consensus for watch::Receiver<consensus::Status> {
    type Kv = client::Client;

    async fn curator(&mut self) -> Result<client::Client, Closed> {
        until(self, "etcd", |status| {
            status.voter().map(|clients| clients.user(client::User::Curator))
        })
        .await
    }
}

/// What is fixed for the life of the process.
#[derive(Clone, Debug)]
pub struct Config {
    /// The tree.
    pub root: Root,
    /// Sees every step of a bootstrap; for tests.
    pub probe: Probe,
}

/// Configuration, inputs and outputs. Cloned into every run; holds no progress.
#[derive(Clone, Debug)]
pub struct Service<C = watch::Receiver<consensus::Status>> {
    /// What is fixed.
    pub config: Config,
    /// What this machine was told.
    pub parameters: watch::Receiver<parameters::Known>,
    /// Whether there is a data partition.
    pub storage: watch::Receiver<storage::Status>,
    /// The address.
    pub network: watch::Receiver<network::Status>,
    /// etcd.
    pub consensus: C,
    /// The data partition to make, if there is none.
    pub wanted: watch::Sender<Option<storage::Wanted>>,
    /// Who this node is, once that is known.
    pub identity: watch::Sender<Option<Identity>>,
    /// What the member of etcd is to do.
    pub orders: watch::Sender<Option<Orders>>,
    /// What everyone else may know.
    pub status: watch::Sender<Status>,
}

impl<C: Consensus> Service<C> {
    /// Runs until cancelled.
    ///
    /// # Errors
    ///
    /// [`Error`], where another run may do better.
    pub async fn run(mut self, ctx: Context) -> Result<(), Error> {
        ctx.stage(Stage::Cluster, stage::State::Started);
        // A run that follows one that was home starts over, and says so.
        self.publish(&ctx, Status::default());
        let Some(led) = ctx.until_cancelled(Box::pin(self.lead_home(&ctx))).await else {
            return Ok(());
        };
        if let Err(error) = led {
            let report = match &error {
                Error::Refused(Refusal::NothingToDo) => self.nothing_to_do(),
                error => error.report(),
            };
            let Some(report) = report else { return Err(error) };
            match ctx.until_cancelled(ctx.trapdoor(report)).await {
                Some(never) => match never {},
                None => return Ok(()),
            }
        }
        ctx.stage(Stage::Cluster, stage::State::Done);
        ctx.healthy();
        ctx.cancelled().await;
        Ok(())
    }

    async fn lead_home(&mut self, ctx: &Context) -> Result<(), Error> {
        let (node, ca) = match self.decide().await? {
            Decision::StartAgain(sealed) => {
                info!("this machine is a member");
                self.start_again(&sealed).await?
            }
            Decision::Bootstrap(bootstrap) => {
                info!("this machine founds a cluster");
                self.begin(&bootstrap).await?;
                self.bootstrap(ctx, &bootstrap).await?
            }
            Decision::GoOn(bootstrap) => {
                info!("this machine goes on founding a cluster");
                self.warn_if_told_otherwise(&bootstrap);
                self.bootstrap(ctx, &bootstrap).await?
            }
        };
        let state = State::Unknown.after(Event::Entered).unwrap_or_default();
        let ca = Some(Sha256::digest(&ca).into());
        let status = Status { state, node: Some(node.id), ca, roles: vec![Role::ConsensusMember] };
        self.publish(ctx, status);
        Ok(())
    }

    async fn decide(&mut self) -> Result<Decision, Error> {
        let esp = &self.config.root.esp;
        let sealed = read_record(&esp.sealed_configuration, Sealed::from_record).await?;
        let journal = read_record(&esp.cluster_journal, journal_from_record).await?;
        let data = until(&mut self.storage, "storage", |status| match status {
            storage::Status::Starting => None,
            storage::Status::Absent { .. } => Some(Data::Absent),
            storage::Status::Locked { .. }
            | storage::Status::Refused { .. }
            | storage::Status::Ready(_) => Some(Data::Present),
        })
        .await?;
        let known = match needs_parameters(&sealed, data) {
            true => Some(until(&mut self.parameters, "the parameters", Clone::clone).await?),
            false => None,
        };
        let told = known.as_ref().and_then(|known| known.parameters());
        let told = told.map(|parameters| &parameters.cluster);
        Ok(decide(&sealed, &journal, data, told)?)
    }

    /// Takes the first step of a new cluster.
    async fn begin(&self, bootstrap: &Bootstrap) -> Result<(), Error> {
        let make = make_for(bootstrap.configuration.storage)?;
        let journal = &self.config.root.esp.cluster_journal;
        journal.save(journal_to_record(bootstrap)).await?;
        self.config.probe.passed(Step::Begun)?;
        self.wanted.send_replace(Some(storage::Wanted::Make(make)));
        Ok(())
    }

    /// Returns the node, and the DER of its cluster's CA.
    async fn bootstrap(
        &mut self,
        ctx: &Context,
        bootstrap: &Bootstrap,
    ) -> Result<(Identity, Vec<u8>), Error> {
        let kind = self.data_ready().await?;
        let store = KeyFile(self.config.root.data.node.credentials.key.clone());
        let key = blocking(move || identity::ensure(&store).map_err(Error::Key)).await?;
        self.config.probe.passed(Step::Key)?;
        let node = key.identity();
        self.give_orders(key, Start::Bootstrap);

        let store = self.store().await?;
        let founding = Founding {
            node,
            labels: bootstrap.labels.clone(),
            owner_public_key: bootstrap.owner_public_key,
            configuration: configuration_message(&bootstrap.configuration),
        };
        self.address(ctx).await?;
        let Config { root, probe } = &self.config;
        loop {
            match membership::ensure(&store, &founding, kind, root, probe).await {
                Err(error) if waited_out(&error).await => {}
                made => break made.map(|sealed| (node, sealed.cluster_ca)),
            }
        }
    }

    /// Returns the node, and the DER of its cluster's CA.
    async fn start_again(&mut self, sealed: &Sealed) -> Result<(Identity, Vec<u8>), Error> {
        self.data_ready().await?;
        let store = KeyFile(self.config.root.data.node.credentials.key.clone());
        let key = blocking(move || match identity::Store::read(&store) {
            Ok(Some(der)) => NodeKey::from_pkcs8_der(&der).map_err(Error::Key),
            Ok(None) => Err(Error::KeyLost),
            Err(error) => Err(Error::Key(identity::Error::Read(error))),
        })
        .await?;
        let node = key.identity();
        let expected = Identity::new(sealed.node_public_key);
        if node != expected {
            return Err(Error::OtherNode { expected: expected.id, found: node.id });
        }
        self.give_orders(key, Start::Again);

        let store = self.store().await?;
        loop {
            match membership::check(&store, sealed, node).await {
                Err(error) if waited_out(&error).await => {}
                checked => break checked?,
            }
        }
        // Where a power cut came between the last two steps of the bootstrap.
        membership::remove_journal(&self.config.root).await?;
        Ok((node, sealed.cluster_ca.clone()))
    }

    async fn data_ready(&mut self) -> Result<Kind, Error> {
        let kind = until(&mut self.storage, "storage", |status| status.ready().map(|r| r.kind));
        Ok(kind.await?)
    }

    fn give_orders(&self, key: NodeKey, start: Start) {
        let node = key.identity();
        info!(node = %node.id, "this node has its name");
        self.identity.send_replace(Some(node));
        self.status.send_modify(|status| status.node = Some(node.id));
        let peer = Peer::of(node.id);
        self.orders.send_replace(Some(Orders { key, peer, start }));
    }

    async fn store(&mut self) -> Result<Store<C::Kv>, Error> {
        let kv = self.consensus.curator().await?;
        Ok(Store::new(kv))
    }

    /// A founded cluster is one that others can reach.
    async fn address(&mut self, ctx: &Context) -> Result<(), Error> {
        if self.network.borrow_and_update().primary.is_none() {
            let what = "an address for this node; connect a network with DHCP, or put a static \
                        one in the node parameters";
            ctx.stage(Stage::Cluster, stage::State::Waiting(what.to_owned()));
            until(&mut self.network, "the network", |status| status.primary).await?;
            ctx.stage(Stage::Cluster, stage::State::Started);
        }
        Ok(())
    }

    fn warn_if_told_otherwise(&self, begun: &Bootstrap) {
        let known = self.parameters.borrow().clone();
        let told = known.as_ref().and_then(|known| known.parameters());
        if told.is_some_and(|told| told.cluster != Cluster::Bootstrap(begun.clone())) {
            warn!(
                "the node parameters have changed since the bootstrap was begun; it goes on as it was begun"
            );
        }
    }

    fn nothing_to_do(&self) -> Option<crate::trapdoor::Report> {
        let known = self.parameters.borrow().clone();
        known
            .map(|known| parameters::absent(&known))
            .or_else(|| Error::Refused(Refusal::NothingToDo).report())
    }

    /// Prints the state of `status`, and publishes it.
    fn publish(&self, ctx: &Context, status: Status) {
        let mut line = EventLine::new("cluster").field("state", status.state);
        if let Some(node) = status.node {
            line = line.field("node", node);
        }
        // First the line: others print lines of their own as soon as they know.
        ctx.lines().event(line);
        self.status.send_replace(status);
    }
}

/// The data partition that a policy asks for.
fn make_for(policy: StoragePolicy) -> Result<Make, Error> {
    match policy {
        StoragePolicy::NeedsInsecure | StoragePolicy::Permissive => Ok(Make::Insecure),
        StoragePolicy::Unspecified => {
            warn!(
                "THE DATA PARTITION WILL NOT BE ENCRYPTED: this version cannot, and the node \
                 parameters do not say whether it must be"
            );
            Ok(Make::Insecure)
        }
        StoragePolicy::NeedsEncryption | StoragePolicy::NeedsEncryptionAndAuthentication => {
            Err(Error::CannotEncrypt)
        }
    }
}

/// Whether `error` was that the store did not answer; if so, waits before the
/// next attempt.
async fn waited_out(error: &Error) -> bool {
    let Error::Store(error) = error else { return false };
    if error.retriable() {
        warn!(error = error as &dyn std::error::Error, "the cluster's store does not answer yet");
        sleep(RETRY).await;
    }
    error.retriable()
}

async fn read_record<T: Send + 'static>(
    file: &File,
    parse: impl Fn(&[u8]) -> Result<T, Damage> + Send + 'static,
) -> Result<Record<T>, Error> {
    let file = file.clone();
    blocking(move || match file.read() {
        Ok(None) => Ok(Record::Absent),
        Ok(Some(bytes)) => Ok(parse(&bytes).map_or_else(Record::Damaged, Record::Whole)),
        Err(storage::file::Error::TooLarge { .. } | storage::file::Error::NotAFile { .. }) => {
            Ok(Record::Damaged(Damage::Magic))
        }
        Err(error) => Err(error.into()),
    })
    .await
}

/// The place of the node's key.
#[derive(Debug)]
struct KeyFile(File);

impl identity::Store for KeyFile {
    fn read(&self) -> std::io::Result<Option<zeroize::Zeroizing<Vec<u8>>>> {
        let read = self.0.read().map_err(std::io::Error::other)?;
        Ok(read.map(zeroize::Zeroizing::new))
    }

    fn write(&self, key: &[u8]) -> std::io::Result<()> {
        self.0.write(key).map_err(std::io::Error::other)
    }
}

#[cfg(test)]
#[path = "service_tests.rs"]
mod tests;
