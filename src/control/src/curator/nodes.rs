//! The records of nodes: applies changes to them.
//!
//! `state` defines which changes a record allows; this module checks the conditions beside
//! it, and makes the other changes of the same step.

use std::time::SystemTime;

use polis_proto::v1::{self, cluster_configuration::TpmMode};
use rand::TryRng as _;
use rand::rngs::SysRng;
use subtle::ConstantTimeEq as _;
use tracing::{info, warn};

use super::attestation_policy;
use super::attesting;
use super::capacity;
use super::disk_keys::encrypted;
use super::error::Error;
use super::names;
use super::pod_network::{self, Prefixes};
use super::returning;
use super::state::{self, Commitment, Refusal, Registration, Request, Step};
use super::store::{self, CONFLICTS_MAX, Outcome, Store, TICKET, join_key_at, node_key};
use super::tickets;
use polis_wire::identity::{Fingerprint, Identity, NodeId, NodeName, Nonce, Spoken};
use polis_wire::node_roles::{Role, is_consensus_member};
use polis_wire::pki::{self, Guard, Issued, Write};

/// A registered machine is named by its key, so 32 bytes are all that it may leave.
pub(super) const KEY_LENGTH: usize = 32;

impl<S: pki::Store + Clone> Store<S> {
    /// Registers a machine; returns the state of its request.
    ///
    /// # Errors
    ///
    /// [`Error::TicketWrong`], [`Error::TicketRotated`], [`Error::TicketEnded`],
    /// [`Error::JoinKeyTaken`] and the refusals of `state`.
    pub async fn register(
        &self,
        ticket: &[u8],
        registration: Registration,
    ) -> Result<v1::Node, Error> {
        let id = registration.identity.id;
        let known = self.read::<v1::Node>(&node_key(id)).await?;
        let known = known.is_some_and(|node| {
            node.public_key == registration.identity.public_key
                && node.join_key == registration.join_key
        });
        if !known {
            self.check_ticket(ticket, registration.now).await?;
        }
        let place = join_key_at(&registration.join_key);
        let entry = self.kv.get(&place).await.map_err(store::Error::Store)?;
        let guard = match &entry {
            None => Guard::Absent(place.clone()),
            Some(entry) => {
                let owner = store::decode::<v1::JoinKey>(&place, &entry.value)?;
                if owner.node_id != id.to_string() {
                    return Err(Error::JoinKeyTaken);
                }
                Guard::Unchanged(place.clone(), entry.revision)
            }
        };
        let owner = prost::Message::encode_to_vec(&v1::JoinKey { node_id: id.to_string() });
        let key = node_key(id);
        // A machine that waits asks again every few seconds, and its record has its name by then.
        let named = if known { None } else { self.name_of(&registration).await? };
        let node = self.update(&key, |old: Option<v1::Node>| {
            let is_new = old.is_none();
            if is_new && known {
                // It was deleted since, and its ticket was not checked: it has to ask again.
                return Err(Error::Store(store::Error::Contended { key: key.clone() }));
            }
            if old.as_ref().is_some_and(|old| old.public_key != registration.identity.public_key) {
                // Two keys with the same first half: that does not happen by chance.
                return Err(Error::Refused(Refusal::Known));
            }
            let before = old.as_ref().map(|old| old.join_key.clone());
            Ok(match state::step(old, Request::Register(registration.clone()))? {
                Step::Put(mut node) => {
                    let mut guards = vec![guard.clone()];
                    let name = named.as_ref().filter(|_| is_new).map(|(name, guard)| {
                        node.name = name.to_string();
                        guards.push(guard.clone());
                        names::take(name, id)
                    });
                    let put = Write::Put(place.clone(), owner.clone());
                    let replaced = before.filter(|before| *before != node.join_key);
                    let forget = replaced.map(|key| Write::Delete(join_key_at(&key)));
                    let writes = std::iter::once(put).chain(forget).chain(name).collect();
                    Outcome::Put(*node, guards, writes)
                }
                Step::Keep(node) | Step::Delete(node) => Outcome::Keep(*node),
            })
        });
        let node = node.await?;
        if !known {
            info!(event = "registered", node = %id, "a node registered");
        }
        Ok(node)
    }

    /// The name that a machine asks for, while no other node has it. Without it, the machine
    /// registers all the same: its operator is not there to choose another.
    async fn name_of(
        &self,
        registration: &Registration,
    ) -> Result<Option<(NodeName, Guard)>, Error> {
        let Some(name) = &registration.name else { return Ok(None) };
        match self.unless_taken(name, registration.identity.id).await {
            Ok(guard) => Ok(Some((name.clone(), guard))),
            Err(Error::NameTaken { by, .. }) => {
                let node = registration.identity.id;
                warn!(%node, %name, by, "a node registers with a name that another node has");
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    async fn check_ticket(&self, given: &[u8], now: i64) -> Result<(), Error> {
        let ticket = self.read::<v1::RegisterTicket>(TICKET).await?.ok_or(Error::TicketWrong)?;
        if !same(given, &ticket.opaque) {
            return Err(match tickets::was_replaced(&ticket, given) {
                true => Error::TicketRotated,
                false => Error::TicketWrong,
            });
        }
        if ticket.ends_at != 0 && now >= ticket.ends_at {
            return Err(Error::TicketEnded);
        }
        Ok(())
    }

    /// Approves a node, whose fingerprint the operator has compared or not; `seen` is the proof of
    /// its TPM that the operator has looked at; with `None`, no proof is compared. A node that asks
    /// for a new certificate is approved with a fingerprint alone: that names the boot.
    ///
    /// # Errors
    ///
    /// [`Error::Fingerprint`], [`Error::ProvedAnew`], [`Error::AttestationPolicy`],
    /// [`Error::Field`] and the refusals of `state`.
    pub async fn approve(
        &self,
        id: NodeId,
        spoken: Option<&Spoken>,
        seen: Option<&v1::TpmAttestation>,
    ) -> Result<v1::Node, Error> {
        let mut compared = None;
        if let Some(spoken) = spoken {
            let node = self.read::<v1::Node>(&node_key(id)).await?.ok_or(Refusal::Unknown)?;
            let fingerprint = registered(id, &returning::as_shown(&node))?;
            let spoken = spoken.clone();
            // Fingerprint words cost some tens of milliseconds of a processor.
            let same = tokio::task::spawn_blocking(move || fingerprint.is(&spoken)).await;
            if !same.unwrap_or(false) {
                return Err(Error::Fingerprint { node: id.to_string() });
            }
            compared = Some(fingerprint);
        }
        let policy = self.configuration().await?.attestation;
        let key = node_key(id);
        let node = self.update(&key, |old: Option<v1::Node>| {
            let asks = old.as_ref().map(returning::as_shown);
            // The record may have been deleted since, and be that of another registration, or
            // another boot asks for a certificate.
            if let (Some(compared), Some(old)) = (compared, &asks)
                && registered(id, old)? != compared
            {
                return Err(Error::Fingerprint { node: id.to_string() });
            }
            if compared.is_none() && asks.as_ref().is_some_and(waits_to_return) {
                return Err(Error::Field(format!(
                    "fingerprint is missing: {id} asks for a new certificate, and the approval is \
                     of one boot of it; give the fingerprint that its screen shows"
                )));
            }
            // One that is in may run a system of a later update.
            if let Some(old) = asks.as_ref().filter(|old| is_decided(old)) {
                let newest = old.attestation.as_ref();
                if let Some(seen) = seen
                    && newest.is_none_or(|newest| !proves_the_same(newest, seen))
                {
                    return Err(Error::ProvedAnew { node: id.to_string() });
                }
                attestation_policy::check(policy.as_ref(), old.attestation.as_ref())?;
            }
            applied(id, old, Request::Approve, None)
        });
        let node = node.await?;
        info!(event = "approved", node = %id, "a node was approved");
        Ok(node)
    }

    /// Commits an approved machine.
    ///
    /// # Errors
    ///
    /// [`Error::StoragePolicy`], [`Error::TpmRequired`], [`Error::TpmUnproved`],
    /// [`Error::AttestationPolicy`], [`Error::Field`] and the refusals of `state`.
    pub async fn enter(
        &self,
        identity: Identity,
        commitment: Commitment,
    ) -> Result<v1::Node, Error> {
        let id = identity.id;
        check_keys(&commitment)?;
        let key = node_key(id);
        // The record is checked first: any machine may call, and the owners are listed and the key
        // is encrypted only for one that enters. A removed machine receives that reason whatever
        // the policies are by now: it may wipe its disk for no other.
        may_commit(self.read(&key).await?, identity, &commitment)?;
        let configuration = self.configuration().await?;
        let storage = configuration.storage_security_policy();
        if let Some((policy, kind)) = misfit(storage, commitment.storage_kind) {
            return Err(Error::StoragePolicy { policy, kind });
        }
        let needs_tpm = configuration.tpm_mode() == TpmMode::Required;
        let policy = configuration.attestation;
        let mut commitment = commitment;
        if !commitment.recovery_key.is_empty() {
            let owners = self.owner_recipients().await?;
            commitment.recovery_key = encrypted(&commitment.recovery_key, &owners)?;
        }
        let node = self.update(&key, |old: Option<v1::Node>| {
            may_commit(old.clone(), identity, &commitment)?;
            let proof = old.as_ref().and_then(|old| present(old, &commitment.boot_id));
            if let Some(old) = old.as_ref().filter(|_old| needs_tpm) {
                check_tpm(old, proof.as_ref())?;
            }
            // Once more: it may have proved another start since its approval.
            if old.as_ref().is_some_and(enters) {
                attestation_policy::check(policy.as_ref(), proof.as_ref())?;
            }
            applied(id, old, Request::Commit(commitment.clone()), None)
        });
        let node = node.await?;
        info!(event = "joined", node = %id, "a node committed");
        Ok(node)
    }

    /// The certificate of a machine that has committed.
    ///
    /// # Errors
    ///
    /// [`Error::Store`], and the refusals of `state` for a node that is not a member.
    pub async fn member_certificate(
        &self,
        identity: Identity,
        now: SystemTime,
    ) -> Result<Issued, Error> {
        // One that has ended is of no use: the machine may have lost its power for months before it
        // kept its certificate.
        let issued = match self.renew_node_certificate(identity, now).await? {
            Some(issued) => issued,
            None => self.ensure_node_certificate(identity, now).await?,
        };
        // Only now: a removal changes the record before it revokes what was issued until then, so
        // a certificate that it did not find is withheld here.
        state::member(self.node(identity.id).await?.state())?;
        Ok(issued)
    }

    /// Joins the node that proved this join key. `named` is the public key of the node that the
    /// caller says it is: nothing proves it, so it only keeps a node that the cluster has from
    /// being refused like a removed one, which may wipe its disk.
    ///
    /// # Errors
    ///
    /// The refusals of `state`; [`Refusal::Unknown`] if no node has this key;
    /// [`Refusal::OtherJoinKey`] in place of a removal if the cluster has the node `named`.
    pub async fn join(
        &self,
        join_key: &[u8; 32],
        named: Option<[u8; 32]>,
    ) -> Result<(NodeId, v1::Node), Error> {
        let joined = self.join_by_key(join_key).await;
        let is_removal =
            matches!(joined, Err(Error::Refused(Refusal::Unknown | Refusal::Decommissioned)));
        if let Some(named) = named.filter(|_named| is_removal)
            && self.has(&named).await?
        {
            return Err(Refusal::OtherJoinKey.into());
        }
        joined
    }

    /// Whether the cluster has a node with this public key, and has not removed it. An ID is
    /// known to many and has half of the key: it is not enough to learn this.
    async fn has(&self, public_key: &[u8; 32]) -> Result<bool, Error> {
        let key = node_key(NodeId::from_public_key(public_key));
        let node = self.read::<v1::Node>(&key).await?;
        let node = node.filter(|node| node.public_key == public_key);
        Ok(node.is_some_and(|node| node.state() != v1::NodeState::Decommissioned))
    }

    async fn join_by_key(&self, join_key: &[u8; 32]) -> Result<(NodeId, v1::Node), Error> {
        let found = self.read::<v1::JoinKey>(&join_key_at(join_key)).await?;
        let found = found.ok_or(Refusal::Unknown)?;
        let id = found.node_id.parse::<NodeId>();
        let id = id.map_err(|_invalid| store::Error::Damaged { key: join_key_at(join_key) })?;
        let key = node_key(id);
        let node = self.update(&key, |old: Option<v1::Node>| {
            if old.as_ref().is_some_and(|old| old.join_key != join_key) {
                return Err(Error::Refused(Refusal::Unknown));
            }
            applied(id, old, Request::Join, None)
        });
        Ok((id, node.await?))
    }

    /// Makes one of the other changes that `state` knows.
    ///
    /// # Errors
    ///
    /// The refusals of `state`.
    pub async fn change(&self, id: NodeId, request: Request) -> Result<v1::Node, Error> {
        let key = node_key(id);
        let places = pod_network::gives_place(&request);
        for _attempt in 0..CONFLICTS_MAX {
            // Again for each attempt: another node may have got the prefix meanwhile.
            let prefixes = if places { Some(self.prefixes().await?) } else { None };
            let mut before = None;
            let apply = |old: Option<v1::Node>| {
                before.clone_from(&old);
                applied(id, old, request.clone(), prefixes.as_ref())
            };
            if let Some(node) = self.attempt(&key, apply).await? {
                record(id, before.as_ref(), &node);
                return Ok(node);
            }
        }
        Err(store::Error::Contended { key }.into())
    }

    /// Checks once more that a node should be a member of etcd, under the lock of a leader
    /// that still leads.
    ///
    /// # Errors
    ///
    /// The refusals of [`may_enter_etcd`], and that another curator leads.
    pub async fn confirm_role(&self, id: NodeId) -> Result<(), Error> {
        let key = node_key(id);
        for _attempt in 0..CONFLICTS_MAX {
            let entry = self.kv.get(&key).await.map_err(store::Error::Store)?;
            let entry = entry.ok_or(Refusal::Unknown)?;
            may_enter_etcd(&store::decode(&key, &entry.value)?)?;
            // Nothing is written: the check is that a write would succeed.
            let guards = vec![Guard::Unchanged(key.clone(), entry.revision)];
            if self.kv.commit(guards, Vec::new()).await.map_err(store::Error::Store)? {
                return Ok(());
            }
        }
        Err(store::Error::Contended { key }.into())
    }

    /// One node.
    ///
    /// # Errors
    ///
    /// [`Refusal::Unknown`].
    pub async fn node(&self, id: NodeId) -> Result<v1::Node, Error> {
        Ok(self.read::<v1::Node>(&node_key(id)).await?.ok_or(Refusal::Unknown)?)
    }
}

/// Logs the change of roles, labels or taints as an event, and a new proof.
fn record(id: NodeId, before: Option<&v1::Node>, node: &v1::Node) {
    let Some(before) = before else { return };
    if before.roles != node.roles {
        let roles = node.roles.iter().flat_map(Role::given).map(Role::slug).collect::<Vec<_>>();
        let roles = roles.join(",");
        info!(event = "roles", node = %id, roles, "the roles of a node were changed");
    }
    if before.network_order != node.network_order {
        info!(event = "network", node = %id, "another network was ordered for a node");
    }
    if before.attestation != node.attestation {
        match node.attestation.as_ref().map(|proof| proof.fault.as_str()) {
            Some("") | None => info!(node = %id, "the TPM of a node proved its start"),
            Some(fault) => warn!(node = %id, fault, "the TPM of a node proves nothing"),
        }
    }
    if before.labels != node.labels {
        info!(event = "labels", node = %id, "the labels of a node were changed");
    }
    if before.taints != node.taints {
        info!(event = "taints", node = %id, "the taints of a node were changed");
    }
}

/// Whether a node should be a member of etcd.
///
/// # Errors
///
/// [`Refusal::NotUp`], [`Refusal::Leaving`] and [`Error::NoRole`].
pub(super) fn may_enter_etcd(node: &v1::Node) -> Result<(), Error> {
    if node.state() != v1::NodeState::Up {
        return Err(Refusal::NotUp.into());
    }
    if node.leaving.is_some() {
        return Err(Refusal::Leaving.into());
    }
    is_consensus_member(node.roles.as_ref()).then_some(()).ok_or(Error::NoRole)
}

/// The result of `request` for a record, with the other changes of the step. `prefixes` are those
/// in the network of pods, where the request may give one.
pub(super) fn applied(
    id: NodeId,
    old: Option<v1::Node>,
    request: Request,
    prefixes: Option<&Prefixes>,
) -> Result<Outcome<v1::Node>, Error> {
    let before = old.as_ref().and_then(|node| node.cluster_network.clone());
    let had = old.as_ref().and_then(|node| node.roles).unwrap_or_default();
    let (node, same) = match state::step(old, request)? {
        Step::Keep(node) => (*node, true),
        Step::Put(node) => (*node, false),
        Step::Delete(node) => {
            let (_, freed) = pod_network::changes(id, before.as_ref(), None);
            let forget = Write::Delete(join_key_at(&node.join_key));
            let name = names::release(&node.name).into_iter().collect();
            return Ok(Outcome::Delete(*node, [vec![forget], name, freed].concat()));
        }
    };
    // The reason of the address comes before that of the size.
    let node = pod_network::settle(node, prefixes)?;
    let roles = node.roles.unwrap_or_default();
    capacity::check(&had, &roles, node.status.as_ref()).map_err(Refusal::from)?;
    if same && node.cluster_network == before {
        return Ok(Outcome::Keep(node));
    }
    let after = node.cluster_network.as_ref();
    let (guards, writes) = pod_network::changes(id, before.as_ref(), after);
    Ok(Outcome::Put(node, guards, writes))
}

/// The node of a record.
///
/// # Errors
///
/// [`store::Error::Damaged`] if the record's key does not match its name.
pub(super) fn identity(id: NodeId, node: &v1::Node) -> Result<Identity, Error> {
    let key = <[u8; 32]>::try_from(node.public_key.as_slice()).ok().map(Identity::new);
    let identity = key.filter(|identity| identity.id == id);
    Ok(identity.ok_or_else(|| store::Error::Damaged { key: node_key(id) })?)
}

/// The fingerprint of a registration, as the machine shows it.
fn registered(id: NodeId, node: &v1::Node) -> Result<Fingerprint, Error> {
    let key = identity(id, node)?.public_key;
    let fingerprint = Fingerprint::of_registration(&key, &node.nonce);
    Ok(fingerprint.ok_or_else(|| store::Error::Damaged { key: node_key(id) })?)
}

/// A nonce for a registration.
pub(super) fn nonce() -> Result<Nonce, Error> {
    let mut nonce = Nonce::default();
    SysRng.try_fill_bytes(&mut nonce).map_err(|source| {
        store::Error::Pki(pki::Error::Random { name: "a nonce".to_owned(), source })
    })?;
    Ok(nonce)
}

/// Compares in a time that does not depend on where the two differ.
fn same(one: &[u8], other: &[u8]) -> bool {
    !one.is_empty() && bool::from(one.ct_eq(other))
}

/// Whether a node asks for a new certificate, and no operator has approved it.
fn waits_to_return(node: &v1::Node) -> bool {
    node.returning.as_ref().is_some_and(|returning| !returning.approved)
}

/// Whether an approval lets a machine in, or back.
fn is_decided(node: &v1::Node) -> bool {
    node.state() == v1::NodeState::New || waits_to_return(node)
}

/// Whether a machine was approved and is not in yet.
fn enters(node: &v1::Node) -> bool {
    matches!(node.state(), v1::NodeState::Standby | v1::NodeState::Up) && !node.joined
}

/// The newest proof of a machine, as far as it counts in this boot of the machine.
pub(super) fn present(node: &v1::Node, boot_id: &str) -> Option<v1::TpmAttestation> {
    let proof = node.attestation.clone()?;
    if proof.boot_id == boot_id {
        return Some(proof);
    }
    let fault = "the proof in its record is of an earlier start of the machine".to_owned();
    Some(attesting::failed(&proof.boot_id, fault, proof.at))
}

/// Whether a node of a cluster that requires a TPM has one: a machine can say so and have none.
/// `proof` is the one that counts.
///
/// # Errors
///
/// [`Error::TpmRequired`], [`Error::TpmUnproved`].
pub(super) fn check_tpm(node: &v1::Node, proof: Option<&v1::TpmAttestation>) -> Result<(), Error> {
    if !node.tpm {
        return Err(Error::TpmRequired);
    }
    let why = match proof {
        Some(proof) if proof.fault.is_empty() => return Ok(()),
        Some(proof) => proof.fault.clone(),
        None => "it did not answer the leader".to_owned(),
    };
    Err(Error::TpmUnproved { why })
}

/// Whether the record of a machine lets it commit.
///
/// # Errors
///
/// The refusals of `state`.
fn may_commit(
    record: Option<v1::Node>,
    identity: Identity,
    commitment: &Commitment,
) -> Result<(), Refusal> {
    if record.as_ref().is_some_and(|node| node.public_key != identity.public_key) {
        return Err(Refusal::Known);
    }
    state::step(record, Request::Commit(commitment.clone())).map(drop)
}

/// A disk with encryption has both keys, a disk without has neither.
fn check_keys(commitment: &Commitment) -> Result<(), Error> {
    let length = match commitment.storage_kind {
        v1::StorageKind::Unspecified => {
            return Err(Error::Field("storage_kind is missing".to_owned()));
        }
        v1::StorageKind::Insecure => 0,
        v1::StorageKind::Encrypted | v1::StorageKind::Authenticated => KEY_LENGTH,
    };
    let keys = [
        ("cluster_unlock_key", &commitment.cluster_unlock_key),
        ("recovery_key", &commitment.recovery_key),
    ];
    for (field, key) in keys {
        if key.len() != length {
            let has = key.len();
            return Err(Error::Field(format!("{field} has {has} bytes; allowed are {length}")));
        }
    }
    Ok(())
}

/// The demanded and the actual protection of a disk, if the two differ.
pub(super) fn misfit(
    policy: v1::cluster_configuration::StorageSecurityPolicy,
    kind: v1::StorageKind,
) -> Option<(&'static str, &'static str)> {
    use v1::StorageKind::{Authenticated, Encrypted, Insecure};
    use v1::cluster_configuration::StorageSecurityPolicy as Policy;
    let (name, fits) = match policy {
        Policy::Permissive => ("permissive", true),
        Policy::NeedsEncryption => ("encrypted", matches!(kind, Encrypted | Authenticated)),
        Policy::Unspecified | Policy::NeedsEncryptionAndAuthentication => {
            ("authenticated", kind == Authenticated)
        }
        Policy::NeedsInsecure => ("insecure", kind == Insecure),
    };
    let kind = match kind {
        v1::StorageKind::Unspecified => "unknown",
        Insecure => "insecure",
        Encrypted => "encrypted",
        Authenticated => "authenticated",
    };
    (!fits).then_some((name, kind))
}

/// Whether two proofs are of one TPM and one start, which a machine may prove more than once: their
/// times differ then.
fn proves_the_same(one: &v1::TpmAttestation, other: &v1::TpmAttestation) -> bool {
    (&one.keys, &one.registers, &one.fault, &one.boot_id)
        == (&other.keys, &other.registers, &other.fault, &other.boot_id)
}
