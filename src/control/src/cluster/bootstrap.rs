//! The bootstrap: creates a cluster of this one machine.
//!
//! ```text
//! keys of the disk -> journal -> data partition -> node key on it -> orders for etcd
//!    -> an address -> node, owner, configuration in etcd -> sealed configuration
//!    -> journal removed  [home]
//! ```
//!
//! Every step may be repeated: its result is stored before the next step begins.
//!
//! Invariants:
//! - The journal is on the ESP before anything that it refers to is made.
//!
//! What this module does not do: define what makes a node a member (`membership`).

use tracing::warn;

use super::Service;
use super::error::{Error, Refusal};
use super::journal::Journal;
use super::membership;
use super::partition::{ensure_open, kind_for, plan, unsaved};
use super::probe::Step;
use super::record::{self, Record};
use super::sealed::{Begun, Keeping, configuration_message, kind_message};
use super::service::{Config, Consensus, Home, KeyFile, waited_out};
use super::unlock::disk::Found;
use super::unlock::keys::Secrets;
use crate::consensus::Start;
use crate::curator::Founding;
use polis_machine::parameters::{Bootstrap, Cluster};
use polis_runtime::save::Save as _;
use polis_runtime::supervisor::{Context, blocking};
use polis_wire::identity;

impl<C: Consensus> Service<C> {
    /// Takes the first step of a new cluster: stores the keys of the data partition before
    /// the partition is made.
    pub(super) async fn begin(&mut self, bootstrap: &Bootstrap) -> Result<Begun, Error> {
        let kind = kind_for(bootstrap.configuration.storage);
        let mut disk = self.disk();
        if disk.is_being_made() {
            // An earlier run requested it, according to the journal that it wrote.
            disk.mounted().await?;
            let journal = &self.config.root.esp.cluster_journal;
            return match record::read_from(journal, Journal::from_record).await? {
                Record::Whole(Journal::Bootstrap(begun)) => Ok(begun),
                Record::Damaged(damage) => Err(Refusal::JournalDamaged(damage).into()),
                Record::Absent | Record::Whole(Journal::Register(_)) => {
                    Err(Refusal::SealedLost.into())
                }
            };
        }
        let Found::Absent(partition) = disk.look().await? else { return Err(Error::Changed) };
        let unlocker = self.config.unlocker(disk.clone());
        let tpm = bootstrap.configuration.tpm;
        let (make, keys) =
            blocking(move || plan(&unlocker, tpm, &Secrets::random()?, kind, partition)).await?;
        let begun = Begun { bootstrap: bootstrap.clone(), kind, keys };
        let journal = &self.config.root.esp.cluster_journal;
        journal.save(begun.to_record()).await?;
        self.config.probe.passed(Step::Begun)?;
        disk.make(make).await?;
        Ok(begun)
    }

    /// Continues from the step that an earlier attempt reached.
    pub(super) async fn bootstrap(
        &mut self,
        ctx: &Context,
        begun: &Begun,
    ) -> Result<Home<C::Kv>, Error> {
        let bootstrap = &begun.bootstrap;
        let mut disk = self.disk();
        let mut unlocker = self.config.unlocker(disk.clone());
        let (found, kind) = (disk.look().await?, begun.kind);
        let opened = ensure_open(&mut unlocker, found, kind, begun.keys.as_ref()).await?;
        let disk = opened
            .as_ref()
            .map(|opened| (membership::record(&opened.keys), opened.recovery.bytes().to_vec()));
        let keys = opened.map(|opened| opened.keys);

        let store = KeyFile(self.config.root.data.node.credentials.key.clone());
        let key = blocking(move || identity::ensure(&store).map_err(Error::Key)).await?;
        self.config.probe.passed(Step::Key)?;
        let node = key.identity();
        self.give_orders(key, Start::Bootstrap);

        let store = self.store().await?;
        let snapshot = self.config.root.esp.etcd_snapshot.clone();
        let restored = blocking(move || snapshot.is_filled()).await?;
        let founding = Founding {
            node,
            labels: bootstrap.labels.clone(),
            name: bootstrap.name.clone(),
            owner_public_key: bootstrap.owner_public_key,
            configuration: configuration_message(&bootstrap.configuration),
            disk,
            storage_kind: kind_message(kind),
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
        let keys = keys.map(|keys| unsaved(&keys, keeping));
        Ok(Home { node, ca: sealed.cluster_ca, keys, store: Some(store) })
    }

    pub(super) fn warn_if_parameters_changed(&self, begun: &Bootstrap) {
        let known = self.parameters.borrow().clone();
        let configured = known.as_ref().and_then(|known| known.parameters());
        if configured
            .is_some_and(|configured| configured.cluster != Cluster::Bootstrap(begun.clone()))
        {
            warn!(
                "the node parameters have changed since the bootstrap started; it continues with \
                 the earlier ones"
            );
        }
    }
}
