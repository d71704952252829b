//! Join: brings this machine back as the member that it was before it was switched off.
//!
//! ```text
//! sealed configuration -> open disk -> node key: read, and the one that was sealed
//!    |-- to be wiped, by the parameters and the cluster (`confirm`) ---------------> [wiped]
//!    |-- was a member of etcd --> orders: again --> etcd serves --> record checked --> [home]
//!    |                                 '--> no answer: ask the others --> removed, or no role
//!    '-- was not --> certificate has ended: a new one by approval (`returning`) ------> [home]
//! ```
//!
//! Invariants:
//! - A lost part is never made again: if a node key, a log of etcd or a data partition is
//!   missing, the run ends with an error that names it.

use tracing::{info, warn};

use super::disown::{Doubt, Verdict};
use super::error::{Error, Refusal};
use super::hints::Hints;
use super::membership;
use super::partition::check_kind;
use super::record::{self, Record};
use super::sealed::Sealed;
use super::service::{Config, Consensus, Home, KeyFile, waited_out};
use super::unlock::disk::Found;
use super::unlock::firmware::{Outcome, seal_again};
use super::unlock::sealer::{Binding, Guarded};
use super::unlock::{Keys, Unlocker};
use super::{KeyStatus, Service, member_removal, remote_unlock};
use crate::consensus::{self, Start};
use crate::curator::Store;
use polis_base::files;
use polis_base::recovery::form;
use polis_base::stage::{self, Stage};
use polis_base::sys::clock;
use polis_machine::parameters::ColdStart;
use polis_machine::storage::Kind;
use polis_machine::storage::key::RecoveryKey;
use polis_runtime::event::until;
use polis_runtime::supervisor::{Context, blocking};
use polis_wire::identity::{self, Identity, NodeKey};

impl<C: Consensus> Service<C> {
    /// Joins as the member that this machine is. Without a sealed configuration, only the
    /// recovery key leads there.
    pub(super) async fn start_again(
        &mut self,
        ctx: &Context,
        sealed: Result<Sealed, Refusal>,
    ) -> Result<Home<C::Kv>, Error> {
        if let Ok(sealed) = &sealed {
            let node = Identity::new(sealed.node_public_key).id;
            self.status.named(node);
            if sealed.disowned {
                return Err(self.disown(ctx).await);
            }
        }
        let keys = match (Box::pin(self.open(ctx, sealed.as_ref())).await, &sealed) {
            (Err(Error::Curator(refused)), Ok(sealed)) if refused.is_removal() => {
                let node = Identity::new(sealed.node_public_key).id;
                return Err(self.turned_away(ctx, node, refused, None).await);
            }
            (opened, _) => match opened? {
                Some(keys) => Some(self.bind_again(keys).await),
                None => None,
            },
        };
        // Opening the disk may have written the sealed configuration again.
        let file = self.config.root.esp.sealed_configuration.clone();
        let sealed = match (sealed, record::read_from(&file, Sealed::from_record).await?) {
            (_, Record::Whole(sealed)) | (Ok(sealed), _) => sealed,
            (Err(refusal), _) => return Err(refusal.into()),
        };

        let key = self.own_key(&sealed).await?;
        let node = key.identity();
        let sealed = membership::keep_rotated(&self.config.root, sealed).await?;
        if self.is_to_be_wiped(ctx, &sealed, &key).await? {
            return Err(self.wipe_disk().await);
        }
        if !self.was_member_of_etcd().await? {
            info!("this node has no member of etcd");
            return self.without_etcd(ctx, node, sealed, keys).await;
        }
        self.give_orders(key, Start::Restart);
        let doubt = Doubt {
            ctx,
            root: self.config.root.clone(),
            hints: Hints { parameters: self.parameters.clone(), cas: sealed.cas() },
            own: node.id,
        };
        let store = tokio::select! {
            // Cancel-safe, both: they wait, and ask.
            store = self.store() => store?,
            verdict = doubt.end() => match verdict {
                Verdict::Removed => return Err(self.disown(ctx).await),
                Verdict::NoMember => {
                    self.leave_etcd().await?;
                    ctx.stage(Stage::Cluster, stage::State::Started);
                    return self.without_etcd(ctx, node, sealed, keys).await;
                }
            },
        };
        self.with_etcd(node, sealed, keys, store).await
    }

    /// Ends an announcement of a firmware update, as far as an earlier start has not: seals the
    /// keys that opened the disk to the registers of this start, and to the policy key of its
    /// system. A failure leaves them to the next one.
    async fn bind_again(&self, keys: Keys) -> Keys {
        let Unlocker { root, sealer, shares, .. } = self.config.unlocker(self.disk());
        match seal_again(&root.esp, &sealer, &shares, Binding::Registers).await {
            Ok(Outcome::Sealed(secrets)) => {
                let before = &keys.secrets;
                let signed = before.signer() != secrets.signer();
                if signed {
                    info!("from now on, only systems of this system's policy key open the disk");
                }
                if !signed || before.binding() == Some(Binding::TpmAlone) {
                    warn!(
                        "the announcement of a firmware update is over: the key of the disk is \
                         sealed to the registers of this start; announce again if the new \
                         firmware is still to come, and look at Secure Boot, which an update may \
                         have switched off"
                    );
                }
                Keys { secrets, ..keys }
            }
            Ok(Outcome::Unchanged | Outcome::NotSealed) => keys,
            Err(error) => {
                let error = &error as &dyn std::error::Error;
                warn!(error, "cannot seal the key of the disk to this start");
                keys
            }
        }
    }

    /// The key of the node that this machine was.
    async fn own_key(&self, sealed: &Sealed) -> Result<NodeKey, Error> {
        let store = KeyFile(self.config.root.data.node.credentials.key.clone());
        let key = blocking(move || match identity::Store::read(&store) {
            Ok(Some(der)) => NodeKey::from_pkcs8_der(&der).map_err(Error::Key),
            Ok(None) => Err(Error::KeyLost),
            Err(error) => Err(Error::Key(identity::Error::Read(error))),
        })
        .await?;
        let (found, expected) = (key.identity(), Identity::new(sealed.node_public_key));
        if found != expected {
            return Err(Error::OtherNode { expected: expected.id, found: found.id });
        }
        Ok(key)
    }

    /// Joins as a member of etcd, whose records say where each key is kept.
    async fn with_etcd(
        &self,
        node: Identity,
        sealed: Sealed,
        keys: Option<Keys>,
        store: Store<C::Kv>,
    ) -> Result<Home<C::Kv>, Error> {
        let record = loop {
            match membership::check(&store, &sealed, node).await {
                Err(error) if waited_out(&error).await => {}
                checked => break checked?,
            }
        };
        let Config { root, .. } = &self.config;
        loop {
            match membership::renew_ended(&store, &record, node, root, clock::now()).await {
                Err(error) if waited_out(&error).await => {}
                renewed => break renewed?,
            }
        }
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
        // A power cut came between the last two steps of the bootstrap.
        loop {
            match membership::conclude(root, Some(&store)).await {
                Err(error) if waited_out(&error).await => {}
                concluded => break concluded?,
            }
        }
        let keys = (sealed.storage > Kind::Insecure).then(|| KeyStatus {
            sealed: keys.as_ref().is_some_and(|keys| keys.secrets.is_sealed()),
            keeper,
            recovery_key_unsaved: !record.recovery_key.is_empty(),
            firmware_update_announced: is_announced(&sealed),
        });
        Ok(Home { node, ca: sealed.cluster_ca, keys, store: Some(store) })
    }

    /// Joins as a member of the cluster without a member of etcd.
    async fn without_etcd(
        &mut self,
        ctx: &Context,
        node: Identity,
        sealed: Sealed,
        keys: Option<Keys>,
    ) -> Result<Home<C::Kv>, Error> {
        self.identity.send_replace(Some(node));
        self.status.named(node.id);
        // Boxed: this path is rare, and its future is large.
        Box::pin(self.return_if_ended(ctx, &sealed)).await?;
        membership::conclude(&self.config.root, None::<&Store<C::Kv>>).await?;
        let keys = match keys {
            Some(keys) => {
                let unlocker = self.config.unlocker(self.disk());
                Some(remote_unlock::keep(&unlocker, &sealed, keys).await?)
            }
            None => None,
        };
        let keys = (sealed.storage > Kind::Insecure).then(|| KeyStatus {
            sealed: keys.as_ref().is_some_and(|keys| keys.secrets.is_sealed()),
            keeper: keys.as_ref().and_then(|keys| keys.keeper),
            recovery_key_unsaved: false,
            firmware_update_announced: is_announced(&sealed),
        });
        Ok(Home { node, ca: sealed.cluster_ca, keys, store: None })
    }

    /// Whether a member of etcd is on the disk, or should be. The file of its roles answers
    /// it for a node that was never home with the role; a file of its own answers it for a
    /// node that has voted, so that a lost log is not mistaken for the absence of a member.
    async fn was_member_of_etcd(&self) -> Result<bool, Error> {
        let data = self.config.root.data.clone();
        blocking(move || {
            if member_removal::finish(&data)? {
                info!("removed the data of an etcd member that the cluster removed");
                return Ok(false);
            }
            let files::Data { etcd, node, .. } = data;
            let has_log = consensus::holds_entries(&etcd.log)?;
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
        if matches!(failure, Error::Closed(_)) {
            return Err(failure);
        }
        warn!(error = &failure as &dyn std::error::Error, "the disk needs a key from elsewhere");
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
                // Boxed: this path is rare, and its future is large.
                Box::pin(self.helped(ctx, unlocker, sealed, curators, partition)).await
            }
            failure => Err(failure),
        }
    }

    /// The recovery key that was given to this machine, if the text is one.
    async fn given(&mut self) -> Result<Option<RecoveryKey>, Error> {
        // The hypervisor's recovery key is known once the parameters are.
        until(&mut self.parameters, "the parameters", |known| known.as_ref().map(drop)).await?;
        let given = self.config.recovery.clone();
        let found = blocking(move || given.text().map_err(Error::RecoveryUnreadable)).await?;
        let Some((text, source)) = found else { return Ok(None) };
        info!("trying {source}");
        let key = form::read(text.expose()).map_err(Error::RecoveryMalformed)?;
        Ok(Some(RecoveryKey::new(key)))
    }
}

/// Whether the disk opens at the next start whatever the firmware measures. The keys do not say
/// it where an earlier run of the service opened the disk.
fn is_announced(sealed: &Sealed) -> bool {
    let binding = sealed.secrets.as_ref().and_then(Guarded::binding);
    binding == Some(Binding::TpmAlone)
}
