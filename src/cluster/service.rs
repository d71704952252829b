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
//! An encrypted data partition is opened before the node's key is read: `unlock`.
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

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use sha2::{Digest as _, Sha256};
use tokio::sync::watch;
use tokio::time::sleep;
use tracing::{info, warn};

use super::decide::{Data, Decision, Record, Refusal, decide, needs_parameters};
use super::desk;
use super::disk::{Disk, Found};
use super::disown::{self, Verdict};
use super::journal::Journal;
use super::keeper::{Keeper, Shares, Slot};
use super::keys::{self, Half, Secrets};
use super::membership::{self, Probe, Step};
use super::record::Damage;
use super::sealed::{Begun, BegunKeys, Keeping, Sealed, configuration_message};
use super::state::{Event, State};
use super::unlock::{Keys, Unlocker};
use super::vault::{Chip, Vault};
use super::{Error, KeyStatus, Role, Status, blocking, join};
use crate::consensus::{self, Orders, Peer, Start, client};
use crate::curator::{Founding, Store};
use crate::event::{Closed, until};
use crate::identity::{self, Fingerprint, Identity, NodeKey};
use crate::parameters::{self, Bootstrap, Cluster, ColdStart, StoragePolicy, TpmMode};
use crate::recovery::{self, form};
use crate::serial::EventLine;
use crate::stage::{self, Stage};
use crate::storage::file::File;
use crate::storage::key::RecoveryKey;
use crate::storage::{self, Kind, Make, Root};
use crate::supervisor::Context;
use crate::sys::clock;
use crate::trapdoor::{Report, code};
use crate::{network, pki, rpc, tpm};

/// Wait between attempts at a store that does not answer: an election long.
const RETRY: Duration = Duration::from_millis(500);

/// Wait between two looks at whether the recovery key is saved.
const LOOK_AGAIN: Duration = Duration::from_secs(10);

/// What the recovery key in a journal is encrypted for.
const RECOVERY: &[u8] = b"polis recovery key";

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
    /// The machine's TPM.
    pub chip: Arc<dyn Chip>,
    /// Where the kernel shows the variables of the firmware.
    pub efivars: PathBuf,
    /// The recovery key, if somebody gave it to this machine.
    pub recovery: recovery::Given,
}

impl Config {
    pub(super) fn unlocker(&self, disk: Disk) -> Unlocker {
        let vault = Vault::new(Arc::clone(&self.chip));
        let shares = Shares::new(vault.clone(), &self.root.esp, &self.efivars);
        Unlocker { root: self.root.clone(), vault, shares, disk }
    }
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
    /// Where a recovery key can be given while this waits for one.
    pub desk: watch::Sender<desk::Open>,
    /// What everyone else may know.
    pub status: watch::Sender<Status>,
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
    /// [`Error`], where another run may do better.
    pub async fn run(mut self, ctx: Context) -> Result<(), Error> {
        ctx.stage(Stage::Cluster, stage::State::Started);
        // A run that follows one that was home starts over, and says so.
        self.publish(&ctx, Status::default());
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

    /// Leads home, and stays there until the cluster removes this node, or
    /// something fails.
    async fn live(&mut self, ctx: &Context) -> Error {
        let home = match self.lead_home(ctx).await {
            Ok(home) => home,
            Err(error) => return error,
        };
        ctx.stage(Stage::Cluster, stage::State::Done);
        ctx.healthy();
        let mut own = self.status.subscribe();
        let removed = until(&mut own, "the cluster", |status| {
            (status.state == State::Disowning).then_some(())
        });
        let follow = async {
            self.follow_recovery_key(&home).await;
            std::future::pending::<()>().await;
        };
        tokio::select! {
            // Cancel-safe, both: they wait, and publish in one step.
            _removed = removed => {}
            () = follow => {}
        }
        self.disown(ctx).await
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
                info!("this machine goes on founding a cluster");
                self.warn_if_told_otherwise(&begun.bootstrap);
                self.bootstrap(ctx, &begun).await?
            }
            Ok(Decision::Register(register)) => {
                info!("this machine asks to be let into a cluster");
                let begun = self.begin_registering(register).await?;
                self.register(ctx, begun).await?
            }
            Ok(Decision::GoOnRegistering(begun)) => {
                info!("this machine goes on asking to be let into a cluster");
                self.register(ctx, *begun).await?
            }
            // Where the disk is encrypted, its recovery key makes up for it.
            Err(Error::Refused(refusal @ (Refusal::SealedLost | Refusal::SealedDamaged(_)))) => {
                self.start_again(ctx, Err(refusal)).await?
            }
            Err(error) => return Err(error),
        };
        let state = self.status.borrow().state.after(Event::Entered).unwrap_or_default();
        let status = Status {
            state,
            node: Some(home.node.id),
            ca: Some(Sha256::digest(&home.ca).into()),
            roles: home.store.iter().map(|_store| Role::ConsensusMember).collect(),
            keys: home.keys.clone(),
            waits_for_key: false,
        };
        if let Some(keys) = &home.keys {
            warn_of(keys);
        }
        self.publish(ctx, status);
        Ok(home)
    }

    async fn decide(&mut self) -> Result<Decision, Error> {
        let esp = &self.config.root.esp;
        let sealed = read_record(&esp.sealed_configuration, Sealed::from_record).await?;
        let journal = read_record(&esp.cluster_journal, Journal::from_record).await?;
        let data = match self.disk().look().await? {
            Found::Absent(_) => Data::Absent,
            Found::Locked(..) | Found::Mounted(_) => Data::Present,
        };
        let known = match needs_parameters(&sealed, data) {
            true => Some(until(&mut self.parameters, "the parameters", Clone::clone).await?),
            false => None,
        };
        let told = known.as_ref().and_then(|known| known.parameters());
        let told = told.map(|parameters| &parameters.cluster);
        Ok(decide(&sealed, &journal, data, told)?)
    }

    pub(super) fn disk(&self) -> Disk {
        Disk { status: self.storage.clone(), wanted: self.wanted.clone() }
    }

    /// Takes the first step of a new cluster: whatever the data partition will be
    /// opened with is kept before it is made.
    async fn begin(&mut self, bootstrap: &Bootstrap) -> Result<Begun, Error> {
        let kind = kind_for(bootstrap.configuration.storage);
        let mut disk = self.disk();
        if disk.is_being_made() {
            // An earlier run asked for it: by the journal that it wrote.
            disk.mounted().await?;
            let journal = &self.config.root.esp.cluster_journal;
            return match read_record(journal, Journal::from_record).await? {
                Record::Whole(Journal::Bootstrap(begun)) => Ok(begun),
                Record::Damaged(damage) => Err(Refusal::JournalDamaged(damage).into()),
                Record::Absent | Record::Whole(Journal::Register(_)) => {
                    Err(Refusal::SealedLost.into())
                }
            };
        }
        let Found::Absent(partition) = disk.look().await? else { return Err(Error::Lost) };
        let (make, begun) = if kind == Kind::Insecure {
            (Make::Insecure, Begun { bootstrap: bootstrap.clone(), kind, keys: None })
        } else {
            let unlocker = self.config.unlocker(disk.clone());
            let tpm = bootstrap.configuration.tpm;
            let (make, keys, _cluster) =
                blocking(move || new_keys(&unlocker, tpm, Secrets::random()?, kind, partition))
                    .await?;
            (make, Begun { bootstrap: bootstrap.clone(), kind, keys: Some(keys) })
        };
        let journal = &self.config.root.esp.cluster_journal;
        journal.save(begun.to_record()).await?;
        self.config.probe.passed(Step::Begun)?;
        disk.make(make).await?;
        Ok(begun)
    }

    /// Goes on from wherever an earlier attempt got.
    async fn bootstrap(&mut self, ctx: &Context, begun: &Begun) -> Result<Home<C::Kv>, Error> {
        let bootstrap = &begun.bootstrap;
        let mut disk = self.disk();
        let mut unlocker = self.config.unlocker(disk.clone());
        let (kind, keys) = match (disk.look().await?, &begun.keys) {
            (Found::Absent(_), _) => return Err(Error::Lost),
            (Found::Mounted(kind), None) => (kind, None),
            (Found::Locked(kind, _), None) => {
                return Err(Error::KindDiffers { expected: begun.kind, found: kind });
            }
            (found, Some(begun_keys)) => {
                let kind = check_kind(begun.kind, found)?;
                let opened = match found {
                    Found::Locked(_, partition) => {
                        unlocker.with(&begun_keys.secrets, Slot::Current, partition).await?
                    }
                    Found::Absent(_) | Found::Mounted(_) => {
                        unlocker.read(&begun_keys.secrets, Slot::Current).await?
                    }
                };
                (kind, Some(opened))
            }
        };
        let recovery = match (&begun.keys, &keys) {
            (Some(begun), Some((secrets, opened))) => Some(uncover(begun, secrets, opened)?),
            _ => None,
        };
        let keys = keys.map(|(_secrets, keys)| keys);

        let store = KeyFile(self.config.root.data.node.credentials.key.clone());
        let key = blocking(move || identity::ensure(&store).map_err(Error::Key)).await?;
        self.config.probe.passed(Step::Key)?;
        let node = key.identity();
        self.give_orders(key, Start::Bootstrap);

        let store = self.store().await?;
        let snapshot = self.config.root.esp.etcd_snapshot.path().to_owned();
        let restored = blocking(move || Ok(snapshot.is_file())).await?;
        let disk = keys.as_ref().zip(recovery);
        let founding = Founding {
            node,
            labels: bootstrap.labels.clone(),
            owner_public_key: bootstrap.owner_public_key,
            configuration: configuration_message(&bootstrap.configuration),
            disk: disk
                .map(|(keys, recovery)| (membership::record(keys), recovery.bytes().to_vec())),
            restored,
        };
        self.address(ctx).await?;
        let keeping = Keeping::of(&bootstrap.configuration);
        let Config { root, probe, .. } = &self.config;
        let own =
            membership::Own { root, shares: &unlocker.shares, kind, keys: keys.as_ref(), keeping };
        let sealed = loop {
            match membership::ensure(&store, &founding, own, probe).await {
                Err(error) if waited_out(&error).await => {}
                made => break made?,
            }
        };
        let keys = keys.map(|keys| KeyStatus {
            sealed: keys.secrets.is_sealed(),
            keeper: keys.keeper.filter(|_| keeping.cold_start == ColdStart::Automatic),
            recovery_key_unsaved: true,
        });
        Ok(Home { node, ca: sealed.cluster_ca, keys, store: Some(store) })
    }

    /// Comes back as the member that this machine is. Without a sealed
    /// configuration, only the recovery key leads there.
    async fn start_again(
        &mut self,
        ctx: &Context,
        sealed: Result<Sealed, Refusal>,
    ) -> Result<Home<C::Kv>, Error> {
        if let Ok(sealed) = &sealed {
            let node = Identity::new(sealed.node_public_key).id;
            self.status.send_modify(|status| status.node = Some(node));
            if sealed.disowned {
                return Err(self.disown(ctx).await);
            }
        }
        let keys = self.open(ctx, sealed.as_ref()).await?;
        // Opening may have made it anew.
        let file = self.config.root.esp.sealed_configuration.clone();
        let sealed = match (sealed, read_record(&file, Sealed::from_record).await?) {
            (_, Record::Whole(sealed)) | (Ok(sealed), _) => sealed,
            (Err(refusal), _) => return Err(refusal.into()),
        };

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
        if !self.was_member_of_etcd().await? {
            info!("this node has no member of etcd");
            return self.without_etcd(node, sealed, keys).await;
        }
        self.give_orders(key, Start::Again);

        let root = self.config.root.clone();
        let store = tokio::select! {
            // Cancel-safe, both: they wait, and ask.
            store = self.store() => store?,
            verdict = disown::doubt(&root, node.id) => match verdict {
                Verdict::Removed => return Err(self.disown(ctx).await),
                Verdict::NoRole => {
                    self.leave_etcd().await?;
                    return self.without_etcd(node, sealed, keys).await;
                }
            },
        };
        let record = loop {
            match membership::check(&store, &sealed, node).await {
                Err(error) if waited_out(&error).await => {}
                checked => break checked?,
            }
        };
        let Config { root, .. } = &self.config;
        let shares = self.config.unlocker(self.disk()).shares;
        let keeper = match &keys {
            Some(keys) => loop {
                match membership::converge(&store, node, keys, &sealed, root, &shares).await {
                    Err(error) if waited_out(&error).await => {}
                    converged => break converged?,
                }
            },
            None => None,
        };
        // Where a power cut came between the last two steps of the bootstrap.
        membership::remove_journal(root).await?;
        let keys = (sealed.storage > Kind::Insecure).then(|| KeyStatus {
            sealed: keys.as_ref().is_some_and(|keys| keys.secrets.is_sealed()),
            keeper,
            recovery_key_unsaved: !record.recovery_key.is_empty(),
        });
        Ok(Home { node, ca: sealed.cluster_ca, keys, store: Some(store) })
    }

    /// Comes back as a member of the cluster that is none of etcd.
    async fn without_etcd(
        &mut self,
        node: Identity,
        sealed: Sealed,
        keys: Option<Keys>,
    ) -> Result<Home<C::Kv>, Error> {
        self.identity.send_replace(Some(node));
        self.status.send_modify(|status| status.node = Some(node.id));
        membership::remove_journal(&self.config.root).await?;
        let keys = match keys {
            Some(keys) => {
                let unlocker = self.config.unlocker(self.disk());
                Some(join::keep(&unlocker, &sealed, keys).await?)
            }
            None => None,
        };
        let keys = (sealed.storage > Kind::Insecure).then(|| KeyStatus {
            sealed: keys.as_ref().is_some_and(|keys| keys.secrets.is_sealed()),
            keeper: keys.as_ref().and_then(|keys| keys.keeper),
            recovery_key_unsaved: false,
        });
        Ok(Home { node, ca: sealed.cluster_ca, keys, store: None })
    }

    /// Whether there is a member of etcd on the disk, or should be one. A node that
    /// never was home with the role is told by the file of its roles; one that has
    /// voted by a file of its own, so that a lost log is not taken for none.
    async fn was_member_of_etcd(&self) -> Result<bool, Error> {
        let data = &self.config.root.data;
        let (etcd, node) = (data.etcd.clone(), data.node.clone());
        blocking(move || {
            let has_log = !etcd.log.is_empty()?;
            let begun = has_log || etcd.bootstrapping.read()?.is_some();
            Ok(begun || node.voter.read()?.is_some() || node.roles.read()?.is_none())
        })
        .await
    }

    /// Opens the data partition of a member, if it needs a key.
    async fn open(
        &mut self,
        ctx: &Context,
        sealed: Result<&Sealed, &Refusal>,
    ) -> Result<Option<Keys>, Error> {
        let mut disk = self.disk();
        let found = disk.look().await?;
        if let Ok(sealed) = sealed {
            check_kind(sealed.storage, found)?;
        }
        let Found::Locked(_, partition) = found else {
            return match sealed {
                Ok(_) => Ok(None),
                Err(refusal) => Err(refusal.clone().into()),
            };
        };
        let mut unlocker = self.config.unlocker(disk);
        let failure = match sealed {
            Err(refusal) if !unlocker.is_changing().await? => refusal.clone().into(),
            sealed => match unlocker.by_itself(sealed.ok(), partition).await {
                Ok(keys) => return Ok(Some(keys)),
                Err(failure) => failure,
            },
        };
        if matches!(failure, Error::Closed(_) | Error::Lost) {
            return Err(failure);
        }
        warn!(error = &failure as &dyn std::error::Error, "the disk does not open by itself");
        let sealed = sealed.ok();
        if let Some(key) = self.given().await? {
            return unlocker.recover(key, sealed, partition).await;
        }
        let attended =
            sealed.is_some_and(|sealed| sealed.keeping.cold_start == ColdStart::Attended);
        let curators = match (&failure, sealed) {
            (Error::NoShare, Some(sealed)) => self.others(&unlocker, sealed).await?,
            _ => None,
        };
        match failure {
            Error::NoShare if attended || curators.is_some() => {
                // Rare, and its future is large.
                Box::pin(self.helped(ctx, unlocker, sealed, curators, partition)).await
            }
            failure => Err(failure),
        }
    }

    /// The recovery key that somebody gave to this machine, if it is one.
    async fn given(&mut self) -> Result<Option<RecoveryKey>, Error> {
        // What the hypervisor gives is known once the parameters are.
        until(&mut self.parameters, "the parameters", |known| known.as_ref().map(drop)).await?;
        let given = self.config.recovery.clone();
        let found = blocking(move || given.text().map_err(Error::RecoveryUnreadable)).await?;
        let Some((text, source)) = found else { return Ok(None) };
        info!("trying {source}");
        let key = form::read(text.expose()).map_err(Error::RecoveryMalformed)?;
        Ok(Some(RecoveryKey::new(key)))
    }

    /// Offers the recovery key's way where it leads somewhere.
    fn with_unlock(&self, report: Report) -> Report {
        let locked = matches!(
            &*self.storage.borrow(),
            storage::Status::Locked { .. } | storage::Status::Refused { .. }
        );
        let lost = [code::CLUSTER_SEALED_LOST, code::CLUSTER_SEALED_DAMAGED];
        let unlock = locked && (report.unlock || lost.contains(&report.code));
        Report { unlock, ..report }
    }

    /// Publishes that the recovery key is saved, once its owner says so. That comes
    /// once in the life of a node: asking now and then is enough.
    async fn follow_recovery_key(&self, home: &Home<C::Kv>) {
        while self.status.borrow().keys.as_ref().is_some_and(|keys| keys.recovery_key_unsaved) {
            sleep(LOOK_AGAIN).await;
            let Some(store) = &home.store else { return };
            let Ok(record) = store.complete(home.node).await else { continue };
            if record.recovery_key.is_empty() {
                info!("the recovery key of this node's disk is saved");
                self.status.send_modify(|status| {
                    if let Some(keys) = &mut status.keys {
                        keys.recovery_key_unsaved = false;
                    }
                });
            }
        }
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
    pub(super) async fn address(&mut self, ctx: &Context) -> Result<(), Error> {
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

    fn nothing_to_do(&self) -> Option<Report> {
        let known = self.parameters.borrow().clone();
        known
            .map(|known| parameters::absent(&known))
            .or_else(|| Error::Refused(Refusal::NothingToDo).report())
    }

    /// Prints the state of `status`, and publishes it.
    pub(super) fn publish(&self, ctx: &Context, status: Status) {
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
pub(super) fn kind_for(policy: StoragePolicy) -> Kind {
    match policy {
        StoragePolicy::NeedsInsecure => Kind::Insecure,
        StoragePolicy::NeedsEncryption => Kind::Encrypted,
        StoragePolicy::Unspecified
        | StoragePolicy::Permissive
        | StoragePolicy::NeedsEncryptionAndAuthentication => Kind::Authenticated,
    }
}

/// Refuses a partition that is protected less than it was.
pub(super) fn check_kind(expected: Kind, found: Found) -> Result<Kind, Error> {
    match found {
        Found::Locked(found, _) | Found::Mounted(found) if found != expected => {
            Err(Error::KindDiffers { expected, found })
        }
        Found::Absent(_) | Found::Locked(..) | Found::Mounted(_) => Ok(expected),
    }
}

/// Makes the keys of a new partition, and keeps the halves. Blocks.
pub(super) fn new_keys(
    unlocker: &Unlocker,
    tpm: TpmMode,
    secrets: Secrets,
    kind: Kind,
    partition: uuid::Uuid,
) -> Result<(Make, BegunKeys, Half), Error> {
    let cluster = Half::random()?;
    let recovery = keys::recovery_key()?;
    let hidden = unlocker.vault.hide(tpm, &secrets)?;
    // Until the cluster has its half, a share is kept also where none will be.
    unlocker.shares.keep(Slot::Current, &hidden, &cluster)?;
    let nonce = keys::nonce()?;
    let cover = keys::journal_key(&secrets.node, &cluster)?;
    let covered =
        tpm::encrypt(&cover, nonce, RECOVERY, recovery.bytes()).map_err(|_error| Error::Random)?;
    let passphrase = keys::passphrase(&secrets.node, &cluster, partition)?;
    let both = storage::key::Keys { passphrase, recovery };
    let make = match kind {
        Kind::Insecure => Make::Insecure,
        Kind::Encrypted => Make::Encrypted(both),
        Kind::Authenticated => Make::Authenticated(both),
    };
    let begun = BegunKeys { secrets: hidden, recovery_nonce: nonce.to_vec(), recovery: covered };
    Ok((make, begun, cluster))
}

/// The recovery key in the journal.
pub(super) fn uncover(
    begun: &BegunKeys,
    secrets: &Secrets,
    keys: &Keys,
) -> Result<RecoveryKey, Error> {
    let cover = keys::journal_key(&secrets.node, &keys.cluster)?;
    let opened = tpm::decrypt(&cover, &begun.recovery_nonce, RECOVERY, &begun.recovery);
    let damaged = || Damage::Content("its recovery key does not open".to_owned());
    let damaged = || Error::Refused(Refusal::JournalDamaged(damaged()));
    let bytes = opened.map_err(|_mismatch| damaged())?;
    let half = Half::new(&bytes).ok_or_else(damaged)?;
    Ok(RecoveryKey::new(zeroize::Zeroizing::new(*half.bytes())))
}

/// Says in the log what the console shows, too.
fn warn_of(keys: &KeyStatus) {
    if keys.keeper == Some(Keeper::Disk) {
        warn!(
            "THE KEY OF THE DATA PARTITION LIES ON THE SAME DISK: this machine has neither a TPM \
             nor firmware that keeps it, so whoever has the disk can read it; set cold_start to \
             ATTENDED to keep it nowhere"
        );
    }
    if keys.recovery_key_unsaved {
        warn!(
            "THE RECOVERY KEY OF THIS NODE'S DISK IS NOT SAVED YET: without it, a lost TPM or EFI \
             system partition is the loss of all data; run `polisctl node recovery-key`"
        );
    }
}

/// What this machine serves with while its disk is locked, and the words of its
/// key; nothing where it has no such key any more.
pub(super) async fn meanwhile(
    vault: &Vault,
    sealed: Option<&Sealed>,
) -> Option<(rpc::Credentials, String)> {
    let sealed = sealed?.clone();
    let vault = vault.clone();
    let made = blocking(move || {
        let Some(secrets) = &sealed.secrets else { return Ok(None) };
        let join = vault.open(secrets)?.join_key();
        let name = Identity::new(sealed.node_public_key).id.to_string();
        let certificate = pki::self_signed(&name, &join, clock::now());
        let certificate = certificate.map_err(|error| Error::Store(error.into()))?;
        let words = Fingerprint::of_key(join.verifying_key().as_bytes()).words();
        let key = Arc::new(pki::key_der(&join));
        let authority = Some(sealed.cluster_ca);
        Ok(Some((rpc::Credentials { certificate, key, authority }, words)))
    });
    made.await.unwrap_or_else(|error: Error| {
        let error: &dyn std::error::Error = &error;
        warn!(error, "a recovery key can be given at the console only");
        None
    })
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
