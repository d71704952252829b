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

use std::time::Duration;

use polis_proto::v1;
use prost::Message as _;
use tokio::time::sleep;
use tracing::{info, warn};

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
use polis_wire::identity::{Fingerprint, Identity, NodeId, NodeKey, NodeName, Store as _};
use polis_wire::pki::{self, Authorities};
use polis_wire::rpc::client::candidates;

/// The time between two checks of whether an operator has approved this node.
const POLL_INTERVAL: Duration = Duration::from_secs(2);

/// How often a leader may question the TPM in a boot: each new leader asks anew.
const PROOFS_MAX: u32 = 5;

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
        let mut shown: Option<(Fingerprint, String)> = None;
        let id = key.id();
        let named = &registering.register.name;
        info!(node = %id, "registering with the cluster");
        // A machine that uses its TPM proves it, once a boot.
        let tpm_keys = match registering.secrets.is_sealed() {
            true => {
                let sealer = sealer.clone();
                blocking(move || sealer.keys()).await
            }
            false => None,
        };
        let mut proofs = 0;
        let mut request = v1::RegisterNodeRequest {
            register_ticket: registering.register.ticket.0.to_vec(),
            join_key: remote::join_key(secrets).public_key().to_vec(),
            tpm: registering.secrets.is_sealed(),
            labels: registering.register.labels.clone(),
            external_address: self.address_now(),
            name: named.as_ref().map(ToString::to_string).unwrap_or_default(),
            tpm_keys,
            tpm_answer: None,
            boot_id: boot::id(),
        };
        loop {
            let mut answer = curators
                .retry(ctx, |mut curator| {
                    let request = request.clone();
                    async move { curator.register_node(request).await }
                })
                .await?;
            let question = answer.tpm_question.take().filter(|_question| proofs < PROOFS_MAX);
            request.tpm_answer = match question {
                None => None,
                Some(question) => {
                    proofs += 1;
                    let (sealer, node) = (sealer.clone(), id.to_string());
                    blocking(move || sealer.prove(&node, question)).await
                }
            };
            if request.tpm_answer.is_some() {
                continue;
            }
            request.tpm_keys = None;
            match answer.state() {
                v1::NodeState::Standby | v1::NodeState::Up => {
                    let message = answer.configuration.unwrap_or_default();
                    return parameters::configuration(message, "configuration")
                        .map_err(|error| Error::Configuration(error.to_string()));
                }
                v1::NodeState::Unspecified | v1::NodeState::New | v1::NodeState::Decommissioned => {
                }
            }
            let fingerprint = fingerprint(key, &answer)?;
            let words = match shown {
                Some((of, words)) if of == fingerprint => words,
                _ => blocking(move || fingerprint.words()).await,
            };
            shown = Some((fingerprint, words.clone()));
            self.status.shows(fingerprint);
            if self.status.happened(Event::Contacted, ctx.lines(), |_foreign| {}) {
                info!(node = %id, fingerprint = words, "waiting for an operator's approval");
            }
            ctx.stage(Stage::Cluster, stage::State::Waiting(awaited(&words, id, named.as_ref())));
            sleep(POLL_INTERVAL).await;
        }
    }

    fn address_now(&self) -> String {
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

/// The fingerprint that an operator compares: the leader chose a part of it.
fn fingerprint(key: &NodeKey, answer: &v1::RegisterNodeResponse) -> Result<Fingerprint, Error> {
    let why = || "the nonce of the registration has not 16 bytes".to_owned();
    Fingerprint::of_registration(&key.public_key(), &answer.nonce)
        .ok_or_else(|| Error::Configuration(why()))
}

/// The text of the wait for approval. Tools take the words from between `fingerprint is `
/// and the semicolon.
fn awaited(words: &str, id: NodeId, name: Option<&NodeName>) -> String {
    let named = name.map(|name| format!(" ({name})")).unwrap_or_default();
    format!(
        "an operator who approves this node{named}: its fingerprint is {words}; compare it with \
         that of `polisctl node approve {id}`"
    )
}

#[cfg(test)]
mod tests {
    use polis_qemu::Event;
    use polis_qemu::fleet::{Asks, asks};

    use super::*;

    #[test]
    fn the_fingerprint_is_in_the_reason_on_the_serial_line() {
        let name = "web-1".parse().unwrap();
        let awaited =
            awaited("able-acid-aged-also", NodeId::from_public_key(&[1; 32]), Some(&name));
        assert!(awaited.contains("this node (web-1)"), "{awaited}");
        let line = format!("POLIS stage name=cluster state=waiting for=\"{awaited}\" t=9.0");
        let event = Event::parse(&line, Duration::ZERO).unwrap();
        assert_eq!(asks(&event), Some(Asks::Approval("able-acid-aged-also".to_owned())));
    }
}
