//! The rotation of the authorities: begins it, and continues with it while this curator leads.
//!
//! ```text
//! RotateAuthorities --> cluster/rotation
//!   --> the key of tokens: another verifies, too, then signs
//!   --> each authority: another signs, both are trusted
//!   --> every node that answers has a certificate of the next CA --> the former CA is not trusted
//!   --> every member of etcd has one of the next authority       --> the former one is not trusted
//!   --> the members start again one by one: etcd reads whom it trusts at its start
//!   --> every part of Kubernetes on a node that answers uses a certificate of its next authorities
//!       --> the former ones of Kubernetes are not trusted, the former key of tokens verifies none
//!   --> cluster/rotation: ended
//! ```
//!
//! Every step is one transaction that finds whether it was done before, so a power cut or another
//! leader continues it. Nodes that do not answer are not waited for: the bridges lead them to the
//! next CA, and their certificates as members of etcd stay good. So do those of a member that has
//! not reported the next one in its files: etcd has it before the disk of its node does. A member
//! that was cut off while the others started again does so when it answers.
//!
//! Invariants:
//! - An authority is not trusted any more only after every node that answers has told that its
//!   own certificate is of the next one. For Kubernetes, every certificate in etcd is of the next
//!   one, and its program had the time to read it.
//! - The key of tokens changes before the authorities of Kubernetes do: a kubelet starts again for
//!   a certificate of the next one, and then the tokens of its pods are of the next key, too.
//! - At most one member starts again at a time: none during an update of the cluster, while a node
//!   leaves, or while another voter does not answer, unless that has lasted for [`AWAY_MAX`].

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use polis_proto::v1;
use polis_proto::v1::get_rotation_response::{self, Step};
use tokio::time::sleep;
use tracing::{debug, info};

use super::{Handlers, Lead, seconds};
use crate::consensus::client::User;
use crate::consensus::{Member, peer_authority, trusted_digest};
use crate::curator::error::Error;
use crate::curator::fenced::Fenced;
use crate::curator::rotation::{self, Leaving, Node, Progress, progress};
use crate::curator::update::journal;
use polis_base::sys::clock;
use polis_runtime::supervisor::Context;
use polis_wire::identity::NodeId;
use polis_wire::node_roles::{Role, is_consensus_member};
use polis_wire::pki::{
    self, Authorities, Certificate, Kept, Namespace, Pin, ServiceAccounts, Turn, WorkerPurpose,
    front_proxy_authority, kubernetes_authority,
};

/// Between two looks at a rotation that goes on.
const EVERY: Duration = Duration::from_secs(1);

/// How long a voter that does not answer holds up the starts of the others, once in a rotation. A
/// machine is back in less; and a voter that is dead, or that the thief of a key keeps away, must
/// not keep the former authority trusted. Of three voters, the second one then costs etcd its
/// quorum for as long as it starts.
const AWAY_MAX: Duration = Duration::from_secs(5 * 60);

/// Goes on with a rotation. A service of every curator.
#[derive(Clone)]
pub(in crate::curator) struct Rotating {
    pub(in crate::curator) handlers: Handlers,
}

impl Rotating {
    pub(in crate::curator) async fn run(self, ctx: Context) -> Result<(), Infallible> {
        ctx.healthy();
        loop {
            let pass = async {
                match self.pass().await {
                    Ok(()) => {}
                    // The next pass sees what was written.
                    Err(error) => {
                        let error = &error as &dyn std::error::Error;
                        debug!(error, "cannot go on with the rotation");
                    }
                }
                sleep(EVERY).await;
            };
            // Boxed: the making of a certificate is large, and rare.
            if ctx.until_cancelled(Box::pin(pass)).await.is_none() {
                return Ok(());
            }
        }
    }

    async fn pass(&self) -> Result<(), Error> {
        let parts = &self.handlers.0;
        let lead = self.handlers.lead().ok();
        let known = {
            let directory = parts.directory.borrow();
            // A copy that is behind may lack a node that a step has to wait for. What was ordered
            // before stays ordered, for a departure to find it.
            if lead.as_ref().is_some_and(|lead| !lead.is_current(&directory)) {
                return Ok(());
            }
            directory.rotation()
        };
        let going_on = known.filter(|rotation| rotation.ended_at == 0);
        let restart = match (lead, going_on) {
            (Some(lead), Some(rotation)) => lead.go_on(&rotation).await?,
            (Some(lead), None) => lead.late_start().await,
            (None, _) => None,
        };
        parts.restart.send_if_modified(|known| std::mem::replace(known, restart) != restart);
        Ok(())
    }
}

/// The facts behind a step.
struct Seen {
    nodes: Vec<Node>,
    /// Those of Kubernetes, where it has any yet.
    kubernetes: Vec<Authorities>,
    /// The former key of tokens still verifies.
    former_tokens: bool,
    /// The CA of the cluster and those before it.
    cluster: Authorities,
    /// The authority of the peers and those before it.
    peers: Authorities,
}

impl Seen {
    fn leaving(&self) -> Leaving {
        Leaving {
            kubernetes: self.former_tokens
                || self.kubernetes.iter().any(|known| known.leaving.is_some()),
            ca: self.cluster.leaving.is_some(),
            peers: self.peers.leaving.is_some(),
        }
    }
}

/// How long a program of Kubernetes may use a certificate after another one has replaced it:
/// `client-go` looks at the file every five minutes, and its writer follows the leader in seconds.
const USED_MAX: Duration = Duration::from_secs(6 * 60);

/// Whether a certificate is of the authority that signs, and, while the former one is trusted,
/// its program surely uses it.
fn has_followed(kept: &Kept, former_is_trusted: bool, now: SystemTime) -> bool {
    kept.issued.is_some_and(|issued| !former_is_trusted || issued + USED_MAX <= now)
}

/// Who keeps a certificate of Kubernetes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Holder {
    node: NodeId,
    /// It is for a part of a worker, not of a controller.
    worker: bool,
}

impl Holder {
    /// By the name of the certificate: its purpose, and the node.
    fn of(name: &str) -> Option<Self> {
        // Both have hyphens.
        let mut places = name.match_indices('-');
        let (purpose, node) = places.find_map(|(at, hyphen)| {
            let node = name[at + hyphen.len()..].parse().ok()?;
            Some((&name[..at], node))
        })?;
        let worker = WorkerPurpose::ALL.iter().any(|known| known.name() == purpose);
        Some(Self { node, worker })
    }

    /// The role without which its node keeps the certificate for nothing.
    fn role(self) -> Role {
        if self.worker { Role::KubernetesWorker } else { Role::KubernetesController }
    }
}

/// The authorities of Kubernetes.
fn kubernetes_authorities() -> [Arc<Certificate>; 2] {
    [kubernetes_authority(), front_proxy_authority()]
}

impl Lead {
    /// Begins a rotation, or returns the one that goes on.
    pub(super) async fn rotate(&self) -> Result<v1::Rotation, Error> {
        Ok(self.store().begin_rotation(seconds()).await?)
    }

    /// How far the last rotation is.
    pub(super) async fn read_rotation(&self) -> Result<v1::GetRotationResponse, Error> {
        let rotation = self.store().rotation().await?.ok_or(Error::NoRotation)?;
        let seen = self.seen(rotation.without_away).await?;
        let progress = match rotation.ended_at {
            0 => progress(&seen.nodes, seen.leaving()),
            _ => Progress::default(),
        };
        let ids = |nodes: &[NodeId]| nodes.iter().map(ToString::to_string).collect();
        let missed = progress.missed.iter().map(|id| get_rotation_response::Missed {
            node_id: id.to_string(),
            silent_ms: u64::try_from(self.silent(*id).as_millis()).unwrap_or(u64::MAX),
        });
        Ok(v1::GetRotationResponse {
            rotation: Some(rotation),
            step: progress.step.into(),
            waits_for: ids(&progress.waits_for),
            away: ids(&progress.away),
            ca_certificate: seen.cluster.signing,
            waits_for_update: progress.step == Step::Restarts && self.is_updating(),
            missed: missed.collect(),
        })
    }

    /// Takes the next step that can be taken; returns which member of etcd starts again now.
    async fn go_on(&self, rotation: &v1::Rotation) -> Result<Option<NodeId>, Error> {
        let (number, now) = (rotation.number, clock::now());
        let (store, peers, kubernetes) = (self.store(), self.peers()?, self.kubernetes()?);
        let mut due = Vec::new();
        for authority in kubernetes_authorities() {
            let known = kubernetes.authorities(&authority).await?;
            if known.is_some_and(|known| known.made_in() < number) {
                due.push(authority);
            }
        }
        // Never later than the authorities: no kubelet would start again for it.
        let tokens = self.tokens()?;
        if !due.is_empty() {
            match tokens.rotate(number, now).await? {
                Turn::Listed => return Ok(None),
                Turn::Begins => {
                    info!(rotation = number, "another key signs the tokens of service accounts");
                }
                Turn::Signs => {}
            }
        }
        // Before the CA of the cluster: its change makes nodes look after these, too.
        for authority in due {
            if kubernetes.rotate(&authority, number, now).await? {
                info!(rotation = number, authority = authority.name, "another authority signs");
            }
        }
        store.rotate(number, now).await?;
        if peers.rotate(&peer_authority(), number, now).await? {
            info!(rotation = number, "another authority signs the certificates of the peers");
        }
        let seen = self.seen(rotation.without_away).await?;
        let progress = progress(&seen.nodes, seen.leaving());
        match progress.step {
            Step::Unspecified => store.end_rotation(number, seconds()).await?,
            Step::Kubernetes if progress.waits_for.is_empty() => {
                if tokens.conclude().await? {
                    info!(rotation = number, "tokens of the former key end");
                }
                for authority in kubernetes_authorities() {
                    if kubernetes.conclude(&authority, Pin::None).await? {
                        info!(
                            rotation = number,
                            authority = authority.name,
                            "the former authority is not trusted any more"
                        );
                    }
                }
            }
            Step::Certificates if progress.waits_for.is_empty() => {
                if store.conclude().await? {
                    info!(
                        rotation = number,
                        "the former CA of the cluster is not trusted any more"
                    );
                }
            }
            Step::Peers if progress.waits_for.is_empty() => {
                let followed = rotation::followed(&seen.nodes);
                if peers.conclude(&peer_authority(), Pin::AllBut(&followed)).await? {
                    info!(rotation = number, "the former authority of the peers ends");
                }
            }
            Step::Kubernetes | Step::Certificates | Step::Peers => {}
            Step::Restarts => {
                let next = self.next_start(&seen.nodes, &progress.waits_for).await;
                // The start may cost this leader its term, and the next one would wait anew.
                if next.is_some() && seen.nodes.iter().any(Node::stays_away) {
                    store.go_without_away(number).await?;
                }
                return Ok(next);
            }
        }
        Ok(None)
    }

    /// A member of etcd that was away when the others started again, and kept its vote.
    async fn late_start(&self) -> Option<NodeId> {
        // Without a rotation, only the start of each member counts.
        let nodes = self.rotated_nodes(None, &BTreeSet::new());
        let late = nodes.iter().filter(|node| node.answers && node.starts_late());
        let late: Vec<_> = late.map(|node| node.id).collect();
        self.next_start(&nodes, &late).await
    }

    /// Which of the members in `due` starts again next, if one may.
    async fn next_start(&self, all: &[Node], due: &[NodeId]) -> Option<NodeId> {
        let parts = &self.handlers.0;
        let leader = {
            let status = parts.consensus.borrow();
            let leads = |member: &&Member| Some(member.id) == status.leader;
            status.members.iter().find(leads).and_then(Member::node)
        };
        let next = rotation::next_start(all, due, leader)?;
        // An update that was ended may have a voter that restarts all the same.
        if self.is_updating() || self.restarting().await.is_some() {
            return None;
        }
        if parts.changing.try_lock().is_err() {
            // The departure that holds it has to find the start that was ordered before.
            let ordered = *parts.restart.borrow();
            return ordered.filter(|node| due.contains(node));
        }
        (!parts.directory.borrow().has_departure()).then_some(next)
    }

    /// Whether the member of a node starts again now. The members of etcd do not change meanwhile:
    /// a departure that begins later finds the order (`departures`).
    pub(super) fn starts_again(&self, node: NodeId) -> bool {
        let ordered = *self.handlers.0.restart.borrow() == Some(node);
        let directory = self.handlers.0.directory.borrow();
        ordered && self.is_current(&directory) && !self.members_change(&directory)
    }

    fn peers(&self) -> Result<Namespace<Fenced>, Error> {
        Ok(Namespace::new(self.fenced(User::EtcdPki)?, ""))
    }

    fn kubernetes(&self) -> Result<Namespace<Fenced>, Error> {
        Ok(Namespace::new(self.fenced(User::KubernetesPki)?, ""))
    }

    /// The keys of the tokens of service accounts.
    fn tokens(&self) -> Result<ServiceAccounts<Fenced>, Error> {
        Ok(ServiceAccounts::new(self.fenced(User::KubernetesPki)?, ""))
    }

    /// The facts; in a rotation whose starts wait for no voter that is away, none returns.
    async fn seen(&self, without_away: bool) -> Result<Seen, Error> {
        let cluster = self.store().authorities().await?;
        let missing =
            || pki::Error::Damaged { what: "certificate", name: peer_authority().name.clone() };
        let peers = self.peers()?.authorities(&peer_authority()).await?.ok_or_else(missing)?;
        let (mut kubernetes, mut late) = (Vec::new(), BTreeSet::new());
        let namespace = self.kubernetes()?;
        for authority in kubernetes_authorities() {
            let Some(known) = namespace.authorities(&authority).await? else { continue };
            let (leaves, now) = (known.leaving.is_some(), clock::now());
            let kept = namespace.kept_by_holders(&authority, now).await?;
            let late_ones = kept.iter().filter(|kept| !has_followed(kept, leaves, now));
            late.extend(late_ones.filter_map(|kept| Holder::of(&kept.name)));
            kubernetes.push(known);
        }
        let former_tokens = self.tokens()?.read().await?.is_some_and(|keys| keys.is_leaving());
        let digests = (cluster.digest(), trusted_digest(&peers));
        let mut nodes = self.rotated_nodes(Some(digests), &late);
        if without_away {
            nodes.iter_mut().for_each(|node| node.returns = false);
        }
        Ok(Seen { nodes, kubernetes, former_tokens, cluster, peers })
    }

    /// How long a node has sent no heartbeat, as far as this leader knows.
    fn silent(&self, node: NodeId) -> Duration {
        self.handlers.0.heartbeats.last(node).unwrap_or(self.term.since).elapsed()
    }

    /// Whether an update of the cluster goes on.
    fn is_updating(&self) -> bool {
        let update = self.handlers.0.directory.borrow().update();
        update.is_some_and(|update| journal::is_open(&update))
    }

    /// The leader's view of each node, compared with the digests of the authorities of the
    /// cluster and of the peers, and with the holders that have a former certificate of Kubernetes.
    fn rotated_nodes(
        &self,
        current: Option<([u8; 32], [u8; 32])>,
        late: &BTreeSet<Holder>,
    ) -> Vec<Node> {
        let (cluster, peers) = current.unzip();
        let same = |sent: &[u8], current: Option<[u8; 32]>| current.is_some_and(|it| sent == it);
        let directory = self.handlers.0.directory.borrow();
        let heartbeats = &self.handlers.0.heartbeats;
        let up = directory.nodes().filter(|(_, known)| known.node.state() == v1::NodeState::Up);
        up.map(|(id, known)| {
            let member = || {
                let figures = heartbeats.consensus(id).map(|(figures, _age)| figures);
                let v1::ConsensusFigures { authorities, authorities_at_start, .. } =
                    figures.clone().unwrap_or_default();
                rotation::Member {
                    serves: figures.is_some(),
                    written: same(&authorities, peers),
                    // A learner has told of no files yet.
                    started: authorities.is_empty() || authorities == authorities_at_start,
                }
            };
            let roles = known.node.roles.as_ref();
            let has = |role| roles.is_some_and(|roles| Role::given(roles).any(|had| had == role));
            Node {
                id,
                kubernetes: !late.iter().any(|holder| holder.node == id && has(holder.role())),
                answers: matches!(known.health, v1::NodeHealth::Healthy | v1::NodeHealth::Unknown),
                returns: known.health == v1::NodeHealth::Late && self.silent(id) < AWAY_MAX,
                certificate: heartbeats.authorities(id).is_some_and(|sent| same(&sent, cluster)),
                peer: is_consensus_member(known.node.roles.as_ref()).then(member),
            }
        })
        .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_certificate_counts_once_its_program_has_read_it_again() {
        let now = clock::now();
        let kept = |issued| Kept { name: String::new(), issued };
        assert!(!has_followed(&kept(None), false, now), "it is of another authority");
        assert!(!has_followed(&kept(Some(now)), true, now));
        assert!(has_followed(&kept(Some(now - USED_MAX)), true, now));
        assert!(has_followed(&kept(Some(now)), false, now), "the former one has ended");
    }

    #[test]
    fn the_name_of_a_certificate_says_on_which_node_and_for_which_role_it_is() {
        let node = NodeId::from_public_key(&[7; 32]);
        let of = |purpose: &str| Holder::of(&format!("{purpose}-{node}")).unwrap();
        assert_eq!(of("kubelet-server"), Holder { node, worker: true });
        assert_eq!(of("controller-manager").role(), Role::KubernetesController);
        assert_eq!(of("apiserver-kubelet"), Holder { node, worker: false });
        assert_eq!(Holder::of("kubelet"), None);
        assert_eq!(Holder::of(&node.to_string()), None);
    }
}
