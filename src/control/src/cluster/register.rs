//! Registration: makes a machine that was given a ticket a member of a running cluster.
//!
//! ```text
//! journal: node key, join key, NUK
//!    -> RegisterNode  -- [foreign] -- again and again, until an operator has approved it
//!    -> journal: kind of disk, recovery key     share of the CUK     [trusted]
//!    -> data partition -> node key on it -> CommitNode
//!    -> credentials, roles, directory -> sealed configuration -> journal removed  [home]
//! ```
//!
//! Every step may be repeated: the curator gives the same answer to the same keys, and the
//! keys are in the journal.
//!
//! Invariants:
//! - The node stores everything before it sends it to the cluster: no power cut makes this
//!   machine register as a second node, or lose the key of a disk that holds data.
//! - A rejection ends the attempt; an outage never does. A node deleted before it committed
//!   registers again.

use polis_proto::v1;
use prost::Message as _;
use tracing::{info, warn};

use super::approval::Approval;
use super::error::{Error, Refusal, UNKNOWN};
use super::journal::{Planned, Registering};
use super::partition::{Opened, ensure_open, kind_for, plan, unsaved};
use super::probe::Step;
use super::record::Damage;
use super::remote::{self, Failure, Remote};
use super::sealed::{BegunKeys, Keeping, Sealed};
use super::service::{Consensus, Home, KeyFile};
use super::state::Event;
use super::unlock::disk::Found;
use super::unlock::keeper::Slot;
use super::unlock::keys::{Half, Secrets};
use super::unlock::sealer::Sealer;
use super::unlock::{Keys, Unlocker};
use super::{Service, membership};
use crate::curator::Store;
use polis_base::boot;
use polis_base::stage::{self, Stage};
use polis_machine::parameters::{self, ClusterConfiguration, ColdStart, Register, TpmMode};
use polis_machine::storage::Kind;
use polis_machine::storage::key::RecoveryKey;
use polis_runtime::save::Save as _;
use polis_runtime::supervisor::{Context, blocking};
use polis_wire::identity::{Identity, NodeKey, Store as _};
use polis_wire::pki::{self, Authorities};
use polis_wire::rpc::client::candidates;

/// An approved node with its data partition open.
struct Entered {
    kind: Kind,
    keeping: Keeping,
    keys: Option<Keys>,
    recovery: Option<RecoveryKey>,
}

/// A registering machine: with which cluster, and by which keys.
struct Asking<'a> {
    curators: &'a Remote,
    registering: &'a Registering,
    secrets: &'a Secrets,
    key: &'a NodeKey,
    sealer: &'a Sealer,
}

impl<C: Consensus> Service<C> {
    /// Makes the keys of a node that registers for the first time.
    pub(super) async fn begin_registering(
        &mut self,
        register: Register,
    ) -> Result<Registering, Error> {
        let unlocker = self.config.unlocker(self.disk());
        let registering = blocking(move || -> Result<_, Error> {
            let key = Half::random()?;
            let node = NodeKey::from_seed(key.bytes()).public_key();
            let secrets = Secrets { key: Some(key), ..Secrets::random()? };
            // The cluster's TPM policy is not known yet.
            let secrets = unlocker.sealer.hide(TpmMode::BestEffort, &secrets)?;
            Ok(Registering { register, node, secrets, disk: None })
        })
        .await?;
        self.keep(&registering).await?;
        self.config.probe.passed(Step::Begun)?;
        Ok(registering)
    }

    async fn keep(&self, registering: &Registering) -> Result<(), Error> {
        Ok(self.config.root.esp.cluster_journal.save(registering.to_record()).await?)
    }

    /// Continues from the step that an earlier attempt reached. If the node was removed after it
    /// committed, what it left is wiped where the parameters say so.
    pub(super) async fn register(
        &mut self,
        ctx: &Context,
        registering: Registering,
    ) -> Result<Home<C::Kv>, Error> {
        let mark = removed(&registering);
        match Box::pin(self.be_admitted(ctx, registering)).await {
            Err(Error::Curator(refused)) if refused.is_removal() => {
                let node = Identity::new(mark.node_public_key).id;
                Err(self.turned_away(ctx, node, refused, Some(mark)).await)
            }
            ended => ended,
        }
    }

    async fn be_admitted(
        &mut self,
        ctx: &Context,
        registering: Registering,
    ) -> Result<Home<C::Kv>, Error> {
        let (unlocker, secrets) = self.open_secrets(&registering).await?;
        let key = node_key(&registering, &secrets)?;
        let node = key.identity();
        info!(node = %node.id, "this node has its name");
        self.identity.send_replace(Some(node));
        self.status.named(node.id);
        // Stored now: a later boot continues with the parameters of today.
        self.keep(&registering).await?;
        self.address(ctx).await?;

        let register = &registering.register;
        let directory = register.directory();
        let curators = Remote::new(&key, &register.ca_certificate, candidates(&directory))?;
        let asking = Asking {
            curators: &curators,
            registering: &registering,
            secrets: &secrets,
            key: &key,
            sealer: &unlocker.sealer,
        };
        let configuration = self.be_approved(ctx, &asking).await?;
        self.status.happened(Event::Approved, ctx.lines(), |_trusted| {});
        ctx.stage(Stage::Cluster, stage::State::Started);

        let prepared =
            self.prepare_disk(unlocker.clone(), &registering, secrets.clone(), &configuration);
        let entered = Box::pin(prepared).await?;
        self.keep_key(&key).await?;
        let committed = self.commit(ctx, &asking, &entered).await?;
        let authorities = committed.authorities.clone().and_then(Authorities::from_message);
        // The parameters may name the CA before a rotation.
        let authorities = authorities.filter(|known| known.succeed(&register.ca_certificate));
        let authorities = authorities.ok_or(Error::OtherCluster)?;
        ctx.stage(Stage::Cluster, stage::State::Started);
        self.keep_credentials(&committed, &authorities, &directory).await?;
        self.seal(&unlocker, node, authorities.signing, entered).await
    }

    /// The secrets in the journal, and the keys that open the disk with them.
    async fn open_secrets(
        &mut self,
        registering: &Registering,
    ) -> Result<(Unlocker, Secrets), Error> {
        let mut disk = self.disk();
        if disk.is_being_made() {
            // An earlier run requested it, according to the journal that it wrote.
            disk.mounted().await?;
        }
        let unlocker = self.config.unlocker(disk);
        let (sealer, guarded) = (unlocker.sealer.clone(), registering.secrets.clone());
        let secrets = blocking(move || sealer.open(&guarded)).await?;
        Ok((unlocker, secrets))
    }

    /// Puts the node's key on its disk, unless an earlier attempt did.
    async fn keep_key(&self, key: &NodeKey) -> Result<(), Error> {
        let store = KeyFile(self.config.root.data.node.credentials.key.clone());
        let der = key.to_pkcs8_der().map_err(Error::Key)?;
        blocking(move || {
            let kept = store
                .read()
                .map_err(|error| Error::Key(polis_wire::identity::Error::Read(error)))?;
            match kept == Some(der.clone()) {
                true => Ok(()),
                false => store
                    .write(&der)
                    .map_err(|error| Error::Key(polis_wire::identity::Error::Write(error))),
            }
        })
        .await?;
        Ok(self.config.probe.passed(Step::Key)?)
    }

    /// Commits: reports to the cluster that this node is ready to be a member. If the
    /// cluster has forgotten the node by now, registration starts again.
    async fn commit(
        &mut self,
        ctx: &Context,
        asking: &Asking<'_>,
        entered: &Entered,
    ) -> Result<v1::CommitNodeResponse, Error> {
        let Entered { kind, keys, recovery, .. } = entered;
        let request = v1::CommitNodeRequest {
            cluster_unlock_key: keys
                .as_ref()
                .map(|keys| keys.cluster.bytes().to_vec())
                .unwrap_or_default(),
            storage_kind: super::sealed::kind_message(*kind).into(),
            recovery_key: recovery.as_ref().map(|key| key.bytes().to_vec()).unwrap_or_default(),
            boot_id: boot::id(),
            ..Default::default()
        };
        loop {
            let committed = asking
                .curators
                .retry(ctx, |mut curator| {
                    let request = request.clone();
                    async move { curator.commit_node(request).await }
                })
                .await;
            match committed {
                Err(Failure::Refused(refused)) if refused.reason == UNKNOWN => {
                    warn!("this node was deleted before it committed: registering again");
                    self.be_approved(ctx, asking).await?;
                    self.status.happened(Event::Approved, ctx.lines(), |_trusted| {});
                }
                committed => return Ok(committed?),
            }
        }
    }

    /// Writes the files that a member needs at its next boot.
    async fn keep_credentials(
        &self,
        committed: &v1::CommitNodeResponse,
        authorities: &Authorities,
        directory: &v1::ClusterDirectory,
    ) -> Result<(), Error> {
        let root = &self.config.root;
        let credentials = &root.data.node.credentials;
        let pem = |der: &[u8]| pki::certificate_pem(der).into_bytes();
        credentials.certificate.save(pem(&committed.certificate)).await?;
        credentials.authorities.save(authorities.to_record()).await?;
        root.data.node.roles.save(v1::NodeRoles::default().encode_to_vec()).await?;
        root.esp.cluster_directory.save(directory.encode_to_vec()).await?;
        Ok(self.config.probe.passed(Step::Credentials)?)
    }

    /// Writes the sealed configuration, and removes the journal: home.
    async fn seal(
        &self,
        unlocker: &Unlocker,
        node: Identity,
        ca: Vec<u8>,
        entered: Entered,
    ) -> Result<Home<C::Kv>, Error> {
        let Entered { kind, keeping, keys, .. } = entered;
        let root = &self.config.root;
        let sealed = Sealed {
            node_public_key: node.public_key,
            cluster_ca: ca,
            rotated_ca: None,
            storage: kind,
            secrets: keys.as_ref().map(|keys| keys.secrets.clone()),
            keeping,
            disowned: false,
            wiped: false,
        };
        root.esp.sealed_configuration.save(sealed.to_record()).await?;
        self.config.probe.passed(Step::Sealed)?;
        if keeping.cold_start == ColdStart::Attended && keys.is_some() {
            let shares = unlocker.shares.clone();
            blocking(move || shares.forget(Slot::Current)).await?;
        }
        membership::conclude(root, None::<&Store<C::Kv>>).await?;
        self.config.probe.passed(Step::Finished)?;
        let keys = keys.map(|keys| unsaved(&keys, keeping));
        Ok(Home { node, ca: sealed.cluster_ca, keys, store: None })
    }

    /// Registers until an operator has approved the node.
    async fn be_approved(
        &mut self,
        ctx: &Context,
        asking: &Asking<'_>,
    ) -> Result<ClusterConfiguration, Error> {
        let Asking { curators, registering, secrets, key, sealer } = *asking;
        let name = registering.register.name.as_ref();
        let mut approval = Approval::new(key, name, sealer);
        info!(node = %key.id(), "registering with the cluster");
        // A machine that uses its TPM proves it, once a boot.
        let tpm_keys = match registering.secrets.is_sealed() {
            true => approval.tpm_keys().await,
            false => None,
        };
        let mut request = v1::RegisterNodeRequest {
            register_ticket: registering.register.ticket.0.to_vec(),
            join_key: remote::join_key(secrets).public_key().to_vec(),
            tpm: registering.secrets.is_sealed(),
            labels: registering.register.labels.clone(),
            external_address: self.address_now(),
            name: name.map(ToString::to_string).unwrap_or_default(),
            tpm_keys,
            boot_id: boot::id(),
            ..Default::default()
        };
        loop {
            let mut answer = curators
                .retry(ctx, |mut curator| {
                    let request = request.clone();
                    async move { curator.register_node(request).await }
                })
                .await?;
            if approval.proves(&mut request, &mut answer).await {
                continue;
            }
            match answer.state() {
                v1::NodeState::Standby | v1::NodeState::Up => {
                    let message = answer.configuration.unwrap_or_default();
                    return parameters::configuration(message, "configuration")
                        .map_err(|error| Error::Configuration(error.to_string()));
                }
                v1::NodeState::Unspecified | v1::NodeState::New | v1::NodeState::Decommissioned => {
                }
            }
            approval.wait(ctx, &self.status, &answer).await?;
        }
    }

    /// The address that others reach this node by, as far as it is known.
    pub(super) fn address_now(&self) -> String {
        self.network.borrow().primary.map(|address| address.to_string()).unwrap_or_default()
    }

    /// Has the data partition made, or opens the one that an earlier attempt made.
    async fn prepare_disk(
        &mut self,
        mut unlocker: Unlocker,
        registering: &Registering,
        secrets: Secrets,
        configuration: &ClusterConfiguration,
    ) -> Result<Entered, Error> {
        let found = unlocker.disk.look().await?;
        let Found::Absent(partition) = found else {
            let planned = registering.disk.as_ref().ok_or_else(|| {
                let what = "it has no plan for the existing data partition";
                Error::Refused(Refusal::JournalDamaged(Damage::Content(what.to_owned())))
            })?;
            let begun = (planned.kind != Kind::Insecure).then(|| BegunKeys {
                secrets: registering.secrets.clone(),
                recovery_nonce: planned.recovery_nonce.clone(),
                recovery: planned.recovery.clone(),
            });
            return enter(unlocker, found, planned.kind, planned.keeping, begun).await;
        };

        let kind = kind_for(configuration.storage);
        let keeping = Keeping::of(configuration);
        let (maker, own) = (unlocker.clone(), secrets.clone());
        // From here on, the node's secrets are sealed as the cluster demands.
        let made = blocking(move || -> Result<_, Error> {
            let (make, begun) = plan(&maker, keeping.tpm, &own, kind, partition)?;
            let hidden = match &begun {
                Some(begun) => begun.secrets.clone(),
                None => maker.sealer.hide(keeping.tpm, &own)?,
            };
            Ok((make, begun, hidden))
        });
        let (make, begun, hidden) = made.await?;
        let (recovery_nonce, recovery) = match &begun {
            Some(begun) => (begun.recovery_nonce.clone(), begun.recovery.clone()),
            None => Default::default(),
        };
        let planned = Planned { kind, keeping, recovery_nonce, recovery };
        let registering =
            Registering { secrets: hidden, disk: Some(planned), ..registering.clone() };
        self.keep(&registering).await?;
        unlocker.disk.make(make).await?;
        enter(unlocker, Found::Mounted(kind), kind, keeping, begun).await
    }
}

/// Opens the data partition of an approved node.
async fn enter(
    mut unlocker: Unlocker,
    found: Found,
    kind: Kind,
    keeping: Keeping,
    begun: Option<BegunKeys>,
) -> Result<Entered, Error> {
    let opened = ensure_open(&mut unlocker, found, kind, begun.as_ref()).await?;
    let Some(Opened { secrets, keys, recovery }) = opened else {
        return Ok(Entered { kind, keeping, keys: None, recovery: None });
    };
    let keys = Some(bare(&unlocker, keeping, secrets, keys).await?);
    Ok(Entered { kind, keeping, keys, recovery: Some(recovery) })
}

/// The same secrets, sealed without the node's key: its disk has it now.
async fn bare(
    unlocker: &Unlocker,
    keeping: Keeping,
    opened: Secrets,
    keys: Keys,
) -> Result<Keys, Error> {
    let sealer = unlocker.sealer.clone();
    blocking(move || {
        let secrets = sealer.hide(keeping.tpm, &Secrets { key: None, ..opened })?;
        Ok(Keys { secrets, ..keys })
    })
    .await
}

/// The sealed configuration of a node that was removed before it had one: its wipe has begun.
fn removed(registering: &Registering) -> Sealed {
    let disk = registering.disk.as_ref();
    Sealed {
        node_public_key: registering.node,
        cluster_ca: registering.register.ca_certificate.clone(),
        rotated_ca: None,
        storage: disk.map_or(Kind::Insecure, |disk| disk.kind),
        secrets: None,
        keeping: disk.map_or_else(Keeping::default, |disk| disk.keeping),
        disowned: true,
        wiped: true,
    }
}

/// The key whose public half the journal names.
fn node_key(registering: &Registering, secrets: &Secrets) -> Result<NodeKey, Error> {
    let seed = secrets.key.as_ref().ok_or_else(no_key)?;
    let key = NodeKey::from_seed(seed.bytes());
    if key.public_key() == registering.node { Ok(key) } else { Err(no_key()) }
}

fn no_key() -> Error {
    let what = "it has no node key".to_owned();
    Error::Refused(Refusal::JournalDamaged(Damage::Content(what)))
}
