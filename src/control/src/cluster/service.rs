//! The service of the cluster manager: brings this machine home, once a boot.
//!
//! ```text
//! records on the ESP --+
//! is there data? ------+--> decide --bootstrap--> journal --> want a data partition
//! parameters, maybe ---+       |                                     |
//!                              +--install--> another disk, and the machine ends
//!                              +--join-----------------+     node key: made
//!                                                      v             v
//!                                             node key: read   orders: bootstrap
//!                                             orders: again          |
//!                                                      |             v
//!                                       check <- etcd serves -> make it a member
//!                                                      |             |
//!                                                      +--> home <---+
//! ```
//!
//! An encrypted data partition is opened before the node's key is read: `unlock`.
//!
//! The steps overlap where they can: the data partition is made while the network looks for
//! an address, and etcd needs no address to start.
//!
//! Invariants:
//! - The journal is on the ESP before anything that it refers to is made.
//! - Wherever a run ends, the next one ends at home, as the same node.
//!
//! What this module does not do: decide (`decide`), or take any of the ways (`bootstrap`,
//! `join`, `register`).

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use polis_proto::v1;
use sha2::{Digest as _, Sha256};
use tokio::sync::watch;
use tokio::time::{Instant, sleep};
use tracing::{info, warn};

use super::decide::{Data, Decision, Wipe, decide, installs, needs_parameters, wipe};
use super::error::Refusal;
use super::hints::Hints;
use super::journal::Journal;
use super::probe::Probe;
use super::record;
use super::sealed::Sealed;
use super::state::State;
use super::unlock::Unlocker;
use super::unlock::disk::{Disk, Found};
use super::unlock::firmware::{self, Outcome};
use super::unlock::keeper::{Keeper, Shares};
use super::unlock::request;
use super::unlock::sealer::{Binding, Sealer, Tpm};
use super::{Error, KeyStatus, Status, Writer};
use crate::consensus::{self, Orders, Peer, Start, client};
use crate::curator::Store;
use polis_base::cause;
use polis_base::files::{File, Root};
use polis_base::recovery;
use polis_base::stage::{self, Stage};
use polis_base::sys::reboot::Reason;
use polis_base::trapdoor::{Report, code};
use polis_machine::install;
use polis_machine::parameters::Install;
use polis_machine::{network, parameters, storage};
use polis_runtime::event::{Closed, until};
use polis_runtime::supervisor::{Context, blocking};
use polis_wire::identity::{self, Identity, NodeKey};
use polis_wire::node_roles::Role;
use polis_wire::pki;

/// The delay between attempts at a store that does not answer: one election.
const RETRY: Duration = Duration::from_millis(500);

/// The time between two checks of whether the recovery key is saved.
const POLL_INTERVAL: Duration = Duration::from_secs(10);

/// How a run reaches the curator's part of etcd.
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

/// The configuration, fixed for the life of the process.
#[derive(Clone, Debug)]
pub struct Config {
    /// The tree.
    pub root: Root,
    /// Observes every step of a bootstrap; for tests.
    pub probe: Probe,
    /// The machine's TPM.
    pub tpm: Arc<dyn Tpm>,
    /// Where the kernel shows the variables of the firmware.
    pub efivars: PathBuf,
    /// The recovery key, if one was given to this machine.
    pub recovery: recovery::Given,
    /// The running system, where the parameters ask to install it.
    pub install: install::Config,
}

impl Config {
    pub(super) fn unlocker(&self, disk: Disk) -> Unlocker {
        let sealer = Sealer::new(Arc::clone(&self.tpm), &self.efivars);
        let shares = Shares::new(sealer.clone(), &self.root.esp, &self.efivars);
        Unlocker { root: self.root.clone(), sealer, shares, disk }
    }
}

/// Configuration, inputs and outputs. Cloned into every run; holds no progress.
#[derive(Clone, Debug)]
pub struct Service<C = watch::Receiver<consensus::Status>> {
    /// The configuration.
    pub config: Config,
    /// The parameters of this machine.
    pub parameters: watch::Receiver<parameters::Known>,
    /// Whether there is a data partition.
    pub storage: watch::Receiver<storage::Status>,
    /// The address.
    pub network: watch::Receiver<network::Status>,
    /// etcd.
    pub consensus: C,
    /// The data partition to make, if it does not exist.
    pub wanted: watch::Sender<Option<storage::Wanted>>,
    /// The identity of this node, once that is known.
    pub identity: watch::Sender<Option<Identity>>,
    /// The orders for the member of etcd.
    pub orders: watch::Sender<Option<Orders>>,
    /// Where an operator can give a recovery key while this waits for one.
    pub unlock_requests: watch::Sender<request::Open>,
    /// Where an owner can announce a firmware update while this is home.
    pub announcements: watch::Sender<firmware::Open>,
    /// Until when a removal by the cluster is to wipe the data partition, too: an owner asked.
    pub reset: watch::Receiver<Option<Instant>>,
    /// The end of the machine, when it has to wipe itself.
    pub end: watch::Sender<Option<Reason>>,
    /// The published status.
    pub status: Writer,
}

/// A node that is home.
pub(super) struct Home<Kv> {
    pub(super) node: Identity,
    pub(super) ca: Vec<u8>,
    pub(super) keys: Option<KeyStatus>,
    /// The cluster's store, where this node has a member of etcd.
    pub(super) store: Option<Store<Kv>>,
}

impl<C: Consensus> Service<C> {
    /// Runs until cancelled.
    ///
    /// # Errors
    ///
    /// [`Error`], if another run may do better.
    pub async fn run(mut self, ctx: Context) -> Result<(), Error> {
        ctx.stage(Stage::Cluster, stage::State::Started);
        // A run that follows one that was home starts over, and publishes that.
        self.status.begin(ctx.lines());
        let Some(ended) = ctx.until_cancelled(Box::pin(self.live(&ctx))).await else {
            return Ok(());
        };
        let report = match &ended {
            Error::Refused(Refusal::NothingToDo) => self.nothing_to_do(),
            error => error.report(),
        };
        let Some(report) = report else { return Err(ended) };
        let report = self.with_unlock(report);
        match ctx.until_cancelled(ctx.trapdoor(report)).await {
            Some(never) => match never {},
            None => Ok(()),
        }
    }

    /// Brings the machine home, and stays until the cluster removes this node, or a step fails.
    async fn live(&mut self, ctx: &Context) -> Error {
        let home = match self.lead_home(ctx).await {
            Ok(home) => home,
            Err(error) => return error,
        };
        ctx.stage(Stage::Cluster, stage::State::Done);
        ctx.healthy();
        self.until_removed(&home).await;
        self.disown(ctx).await
    }

    /// Follows the recovery key and takes announcements of firmware updates until the cluster
    /// removes this node.
    async fn until_removed(&self, home: &Home<C::Kv>) {
        let mut own = self.status.subscribe();
        let removed = until(&mut own, "the cluster", |status| {
            (status.state == State::Disowning).then_some(())
        });
        let follow = async {
            self.follow_recovery_key(home).await;
            std::future::pending::<()>().await;
        };
        tokio::pin!(removed, follow);
        let mut announcements = firmware::wait(&self.announcements);
        loop {
            let request = tokio::select! {
                // Cancel-safe, all: they wait, and publish or take in one step.
                _removed = &mut removed => return,
                () = &mut follow => return,
                request = announcements.next() => request,
            };
            // Not a branch: a removal that comes now waits, and wipes what this writes.
            self.announced(request).await;
        }
    }

    /// Seals the key of the disk as an owner wishes.
    async fn announced(&self, firmware::Request { binding, answer }: firmware::Request) {
        let Unlocker { root, sealer, shares, .. } = self.config.unlocker(self.disk());
        let outcome = firmware::seal_again(&root.esp, &sealer, &shares, binding).await;
        let answered = match outcome {
            Ok(Outcome::NotSealed) => Ok(false),
            Ok(Outcome::Unchanged | Outcome::Sealed(_)) => {
                let announced = binding == Binding::TpmAlone;
                self.status.firmware_update_announced(announced);
                match announced {
                    true => warn!("{ANNOUNCED}"),
                    false => info!("the key of the disk is sealed to the registers of this start"),
                }
                Ok(true)
            }
            Err(error) => {
                let error = cause::line(&error);
                warn!(error, "cannot seal the key of the disk again");
                Err(firmware::Refused::Failed(error))
            }
        };
        // The caller may have gone.
        let _gone = answer.send(answered);
    }

    async fn lead_home(&mut self, ctx: &Context) -> Result<Home<C::Kv>, Error> {
        let home = match self.decide().await {
            Ok(Decision::StartAgain(sealed)) => {
                info!("this machine is a member");
                self.start_again(ctx, Ok(*sealed)).await?
            }
            Ok(Decision::Bootstrap(bootstrap)) => {
                info!("this machine founds a cluster");
                let begun = self.begin(&bootstrap).await?;
                self.bootstrap(ctx, &begun).await?
            }
            Ok(Decision::GoOn(begun)) => {
                info!("this machine continues to found a cluster");
                self.warn_if_parameters_changed(&begun.bootstrap);
                self.bootstrap(ctx, &begun).await?
            }
            Ok(Decision::Register(register)) => {
                info!("this machine registers with a cluster");
                let begun = self.begin_registering(register).await?;
                Box::pin(self.register(ctx, begun)).await?
            }
            Ok(Decision::GoOnRegistering(begun)) => {
                info!("this machine continues to register with a cluster");
                Box::pin(self.register(ctx, *begun)).await?
            }
            Ok(Decision::Install(order)) => return Err(Box::pin(self.install(ctx, &order)).await),
            // The end of the removed node may have been interrupted: its secrets go first.
            Err(error @ Error::Refused(Refusal::WipesOther { .. })) => {
                return Err(match self.disown(ctx).await {
                    Error::Disowned { .. } => error,
                    other => other,
                });
            }
            // On an encrypted disk, its recovery key makes up for it.
            Err(Error::Refused(refusal @ (Refusal::SealedLost | Refusal::SealedDamaged(_)))) => {
                self.start_again(ctx, Err(refusal)).await?
            }
            Err(error) => return Err(error),
        };
        let status = Status {
            state: State::Home,
            node: Some(home.node.id),
            fingerprint: self.status.borrow().fingerprint,
            ca: Some(Sha256::digest(&home.ca).into()),
            roles: home.store.iter().map(|_store| Role::ConsensusMember).collect(),
            keys: home.keys.clone(),
            waits_for_key: false,
        };
        if let Some(keys) = &home.keys {
            warn_of(keys);
        }
        self.status.entered(status, ctx.lines());
        Ok(home)
    }

    /// Decides, after the end of a node whose disk is to be wiped.
    async fn decide(&mut self) -> Result<Decision, Error> {
        let esp = self.config.root.esp.clone();
        let mut sealed = record::read_from(&esp.sealed_configuration, Sealed::from_record).await?;
        let data = match self.disk().look().await? {
            Found::Absent(_) => Data::Absent,
            Found::Locked(..) | Found::Mounted(_) => Data::Present,
        };
        let mut known = None;
        if needs_parameters(&sealed, data) {
            known = Some(until(&mut self.parameters, "the parameters", Clone::clone).await?);
        }
        let named = known.as_ref().and_then(|known| known.parameters()?.wipes);
        match wipe(&sealed, data, named)? {
            None => {}
            Some(Wipe::GiveUp) => return Err(self.wipe_disk().await),
            Some(Wipe::Forget) => {
                self.forget_node().await?;
                sealed = record::Record::Absent;
            }
        }
        let journal = record::read_from(&esp.cluster_journal, Journal::from_record).await?;
        let configured = known.as_ref().and_then(|known| known.parameters());
        if let Some(order) = installs(&sealed, &journal, data, configured)
            && !self.is_installed().await?
        {
            return Ok(Decision::Install(Box::new(order.clone())));
        }
        let configured = configured.map(|parameters| &parameters.cluster);
        Ok(decide(&sealed, &journal, data, configured)?)
    }

    /// Whether an installer has made the disk of this machine.
    async fn is_installed(&self) -> Result<bool, Error> {
        let config = self.config.install.clone();
        Ok(blocking(move || config.is_installed()).await?)
    }

    /// Installs the system to another disk, and has the machine end.
    async fn install(&self, ctx: &Context, order: &Install) -> Error {
        let outcome = match install::install(ctx, &self.config.install, order).await {
            Ok(outcome) => outcome,
            Err(error) => return error.into(),
        };
        self.end.send_replace(Some(outcome.end()));
        std::future::pending().await
    }

    /// The addresses of the cluster in the parameters of this machine.
    pub(super) fn configured(&self, sealed: &Sealed) -> v1::ClusterDirectory {
        Hints { parameters: self.parameters.clone(), cas: sealed.cas() }.directory()
    }

    pub(super) fn disk(&self) -> Disk {
        Disk { status: self.storage.clone(), wanted: self.wanted.clone() }
    }

    /// Offers the recovery key's way if the error allows it.
    fn with_unlock(&self, report: Report) -> Report {
        let locked = matches!(
            &*self.storage.borrow(),
            storage::Status::Locked { .. } | storage::Status::Refused { .. }
        );
        let lost = [code::CLUSTER_SEALED_LOST, code::CLUSTER_SEALED_DAMAGED];
        let unlock = locked && (report.unlock || lost.contains(&report.code));
        Report { unlock, ..report }
    }

    /// Publishes that the recovery key is saved, once its owner has confirmed it. That
    /// happens once in the life of a node: asking now and then is enough.
    async fn follow_recovery_key(&self, home: &Home<C::Kv>) {
        while self.status.borrow().keys.as_ref().is_some_and(|keys| keys.recovery_key_unsaved) {
            sleep(POLL_INTERVAL).await;
            let Some(store) = &home.store else { return };
            let Ok(record) = store.complete(home.node).await else { continue };
            if record.recovery_key.is_empty() {
                info!("the recovery key of this node's disk is saved");
                self.status.recovery_key_unsaved(false);
            }
        }
    }

    pub(super) fn give_orders(&self, key: NodeKey, start: Start) {
        let node = key.identity();
        info!(node = %node.id, "this node has its name");
        self.identity.send_replace(Some(node));
        self.status.named(node.id);
        let peer = Peer::of(node.id);
        self.orders.send_replace(Some(Orders { key, peer, start }));
    }

    pub(super) async fn store(&mut self) -> Result<Store<C::Kv>, Error> {
        let kv = self.consensus.curator().await?;
        Ok(Store::new(kv))
    }

    /// A cluster is created only when this node has an address for the others.
    pub(super) async fn address(&mut self, ctx: &Context) -> Result<(), Error> {
        if self.network.borrow_and_update().primary.is_none() {
            let what = "an address for this node; connect a network with DHCP, or set a static \
                        address in the node parameters: option --interface of `polisctl \
                        parameters bootstrap`";
            ctx.stage(Stage::Cluster, stage::State::Waiting(what.to_owned()));
            until(&mut self.network, "the network", |status| status.primary).await?;
            ctx.stage(Stage::Cluster, stage::State::Started);
        }
        Ok(())
    }

    fn nothing_to_do(&self) -> Option<Report> {
        let known = self.parameters.borrow().clone();
        known
            .map(|known| parameters::absent(&known))
            .or_else(|| Error::Refused(Refusal::NothingToDo).report())
    }
}

/// The warning of an announcement that is in force.
const ANNOUNCED: &str = "A FIRMWARE UPDATE IS ANNOUNCED: the next start opens the disk whatever \
                         the firmware measures, and seals its key again";

/// Logs what the console shows, too.
fn warn_of(keys: &KeyStatus) {
    if keys.keeper == Some(Keeper::Disk) {
        warn!(
            "THE KEY OF THE DATA PARTITION IS ON THE SAME DISK: this machine has neither a TPM \
             nor firmware that can store it, so a person who has the disk can read it; use a TPM, \
             or an owner runs `polisctl cluster configure --cold-start attended`: a member of etcd \
             then removes the key from its disk at its next start, and waits for the cluster or \
             for a person at each later one"
        );
    }
    if keys.firmware_update_announced {
        warn!("{ANNOUNCED}");
    }
    if keys.recovery_key_unsaved {
        warn!(
            "THE RECOVERY KEY OF THIS NODE'S DISK IS NOT SAVED YET: without it, the loss of the \
             TPM or the EFI system partition loses all data; an owner saves it with `polisctl node \
             recovery-key show`"
        );
    }
}

/// Whether `error` means that the store did not answer; if so, waits before the next attempt.
pub(super) async fn waited_out(error: &Error) -> bool {
    let Error::Store(error) = error else { return false };
    if error.retriable() {
        warn!(error = error as &dyn std::error::Error, "the cluster's store does not answer yet");
        sleep(RETRY).await;
    }
    error.retriable()
}

/// The place of the node's key.
#[derive(Debug)]
pub(super) struct KeyFile(pub(super) File);

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
