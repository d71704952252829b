//! The plan of an update: which nodes get the new version, in which order, or what stands
//! against it.
//!
//! ```text
//! nodes that do not run it yet:       no voters --> voters --> the leader
//!
//! with a newer minor version of Kubernetes:
//!   all but workers without an API server:  no voters --> voters --> the leader
//!   --> workers without an API server:      no voters --> voters --> the leader
//! ```
//!
//! Invariants:
//! - A plan has each node that needs the update once, and no other.
//! - A plan in which a voter restarts leaves etcd a quorum while it does.
//! - A plan that brings a newer minor version of etcd has the consent of an owner.
//! - kubelet of a node without an API server gets a newer minor version of Kubernetes after every
//!   API server of the cluster.
//! - No API server gets a Kubernetes that is more than one minor version newer than its own.

use polis_bundle::{EtcdRefusal, EtcdTarget, KubernetesProgram, KubernetesRefusal};
use polis_proto::v1;
use semver::Version;

use super::facts::{Fact, Fault};
use polis_wire::identity::NodeId;

/// Bytes of the longest word about a bundle.
const WORD_MAX: usize = 64;

/// The facts of a bundle that a plan needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bundle {
    /// Its version.
    pub version: Version,
    /// The oldest version that it updates.
    pub from: Version,
    /// The beginning of the hash of its image.
    pub image: String,
    /// Which programs it has.
    pub variant: String,
    /// The key that signed it, in hexadecimal digits.
    pub signer: String,
    /// The version of its etcd.
    pub etcd: Version,
    /// The version of its Kubernetes; `None` in a system without workloads.
    pub kubernetes: Option<Version>,
}

/// A caller's description of a bundle is not valid: the field, and the allowed values.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Invalid(String);

impl Bundle {
    /// Reads the message of a caller.
    ///
    /// # Errors
    ///
    /// [`Invalid`].
    pub fn read(message: &v1::UpdateBundle) -> Result<Self, Invalid> {
        let v1::UpdateBundle { version, from, image, variant, signer, etcd, kubernetes } = message;
        for (field, text) in [("image", image), ("variant", variant), ("signer", signer)] {
            let plain = text.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
            if text.is_empty() || text.len() > WORD_MAX || !plain {
                let text = format!(
                    "bundle.{field} is {text:?}; allowed are 1 to {WORD_MAX} letters, digits and `_`"
                );
                return Err(Invalid(text));
            }
        }
        let version_of = |field: &str, text: &str| {
            let parsed = Version::parse(text).ok().filter(|_| text.len() <= WORD_MAX);
            parsed.ok_or_else(|| {
                Invalid(format!("bundle.{field} is {text:?}; allowed is a version such as 1.2.3"))
            })
        };
        let kubernetes = match kubernetes.as_str() {
            "" => None,
            text => Some(version_of("kubernetes", text)?),
        };
        Ok(Self {
            version: version_of("version", version)?,
            from: version_of("from", from)?,
            image: image.clone(),
            variant: variant.clone(),
            signer: signer.clone(),
            etcd: version_of("etcd", etcd)?,
            kubernetes,
        })
    }
}

/// Why an update cannot be planned.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// A node cannot be counted on.
    #[error("{node} is not as it should be: {fault}; every node has to be healthy and ready")]
    Fault {
        /// The node.
        node: NodeId,
        /// What is wrong.
        fault: Fault,
    },
    /// etcd would stop while a voter restarts.
    #[error(
        "etcd has {voters} {}, and needs all of them: while one restarts, the cluster stops; \
         allowed are three or more; add voters, or update each node by itself",
        if *voters == 1 { "voter" } else { "voters" }
    )]
    NoSpareVoter {
        /// How many there are.
        voters: usize,
    },
    /// The etcd of the bundle does not suit the cluster.
    #[error(transparent)]
    Etcd(#[from] EtcdRefusal),
    /// There is nothing to compare the etcd of the bundle with.
    #[error("the version of the etcd that runs is not known yet")]
    EtcdUnknown,
    /// The Kubernetes of the bundle does not suit that of a node.
    #[error("{node} cannot take it: {refusal}; {}", refusal.help())]
    Kubernetes {
        /// The node.
        node: NodeId,
        /// What is wrong.
        refusal: KubernetesRefusal,
    },
    /// Its image knows no signer.
    #[error("the image of {node} was built without keys, so it takes no update")]
    NoKey {
        /// The node.
        node: NodeId,
    },
    /// Its image takes the bundles of another signer.
    #[error("{node} takes the bundles of {expected}, and this one is signed by {signer}")]
    Signer {
        /// The node.
        node: NodeId,
        /// The key of its image.
        expected: String,
        /// The key of the bundle.
        signer: String,
    },
    /// It has another variant.
    #[error("{node} runs the variant {has}, and the bundle has {bundle}")]
    Variant {
        /// The node.
        node: NodeId,
        /// Its variant.
        has: String,
        /// That of the bundle.
        bundle: String,
    },
    /// It runs a newer version, or its version cannot be parsed.
    #[error("{node} runs {has}, and the bundle has {bundle}, which is not newer")]
    NotNewer {
        /// The node.
        node: NodeId,
        /// Its version.
        has: String,
        /// That of the bundle.
        bundle: Version,
    },
    /// It runs another system of the same version.
    #[error(
        "{node} runs another system of version {version}: its image is {has}, and that of the \
         bundle is {bundle}; a node takes a newer version only, so build the bundle with one"
    )]
    OtherContent {
        /// The node.
        node: NodeId,
        /// The version of both.
        version: Version,
        /// The image that it runs.
        has: String,
        /// That of the bundle.
        bundle: String,
    },
    /// It runs a version that the bundle does not update.
    #[error("{node} runs {has}, and the bundle updates {from} or newer")]
    TooOld {
        /// The node.
        node: NodeId,
        /// Its version.
        has: Version,
        /// The oldest that it updates.
        from: Version,
    },
}

/// The nodes that get the new version, in the order of their turns.
///
/// # Errors
///
/// The first [`Refusal`].
pub fn plan(facts: &[Fact], bundle: &Bundle, etcd: EtcdTarget) -> Result<Vec<NodeId>, Refusal> {
    let mut turns = Vec::new();
    for fact in facts {
        let node = fact.id;
        if let Some(fault) = fact.fault() {
            return Err(Refusal::Fault { node, fault });
        }
        let report = fact.report.clone().unwrap_or_default();
        let not_newer =
            |has: String| Refusal::NotNewer { node, has, bundle: bundle.version.clone() };
        let has = fact.version().ok_or_else(|| not_newer(report.version.clone()))?;
        if has == bundle.version {
            same_content(fact, &bundle.version, &bundle.variant, &bundle.image)?;
            continue;
        }
        suits(node, &report, bundle)?;
        if has > bundle.version {
            return Err(not_newer(has.to_string()));
        }
        if has < bundle.from {
            return Err(Refusal::TooOld { node, has, from: bundle.from.clone() });
        }
        turns.push(fact);
    }
    if !turns.is_empty() {
        etcd.runs.ok_or(Refusal::EtcdUnknown)?;
        etcd.takes(&bundle.etcd)?;
    }
    if let Some(brings) = bundle.kubernetes.as_ref().filter(|_| !turns.is_empty()) {
        keeps_to_skew(facts, brings)?;
    }
    let voters = voters(facts);
    if turns.iter().any(|fact| fact.voter) && !spares_one(voters) {
        return Err(Refusal::NoSpareVoter { voters });
    }
    let order = Order::of(facts, bundle.kubernetes.as_ref());
    turns.sort_by_key(|fact| order.place(fact));
    Ok(turns.into_iter().map(|fact| fact.id).collect())
}

/// Whether a node with the version of a bundle has its image, too. The version alone decides where
/// the node does not report its image. The images of two variants always differ.
pub(super) fn same_content(
    fact: &Fact,
    version: &Version,
    variant: &str,
    image: &str,
) -> Result<(), Refusal> {
    let is_variant = fact.report.as_ref().is_some_and(|report| report.variant == variant);
    match fact.image() {
        Some(has) if has != image && is_variant => Err(Refusal::OtherContent {
            node: fact.id,
            version: version.clone(),
            has: has.to_owned(),
            bundle: image.to_owned(),
        }),
        Some(_) | None => Ok(()),
    }
}

fn suits(node: NodeId, report: &v1::UpdateReport, bundle: &Bundle) -> Result<(), Refusal> {
    let v1::UpdateReport { variant, release_key, .. } = report;
    if release_key.is_empty() {
        return Err(Refusal::NoKey { node });
    }
    if *release_key != bundle.signer {
        let (expected, signer) = (release_key.clone(), bundle.signer.clone());
        return Err(Refusal::Signer { node, expected, signer });
    }
    if *variant != bundle.variant {
        let (has, bundle) = (variant.clone(), bundle.variant.clone());
        return Err(Refusal::Variant { node, has, bundle });
    }
    Ok(())
}

/// Whether every node may get this Kubernetes. API servers are compared first: the help for a
/// worker is to update it alone, and its kubelet must not become newer than an API server.
fn keeps_to_skew(facts: &[Fact], brings: &Version) -> Result<(), Refusal> {
    for program in [KubernetesProgram::ApiServer, KubernetesProgram::Kubelet] {
        for fact in facts.iter().filter(|fact| fact.kubernetes == Some(program)) {
            let node = fact.id;
            let taken = fact.kubernetes().map_or(Ok(()), |target| target.takes(brings));
            taken.map_err(|refusal| Refusal::Kubernetes { node, refusal })?;
        }
    }
    Ok(())
}

/// How many voters etcd has.
pub(super) fn voters(facts: &[Fact]) -> usize {
    facts.iter().filter(|fact| fact.voter).count()
}

/// Whether etcd keeps its quorum without one of `voters`.
pub(super) fn spares_one(voters: usize) -> bool {
    voters.saturating_sub(1) > voters / 2
}

/// The order of the turns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Order {
    /// Voters are the last: a system that fails its trial is tried without them first.
    VotersLast,
    /// Workers without an API server are the last: their kubelet gets a newer minor version of
    /// Kubernetes, and is never newer than an API server.
    WorkersLast,
}

impl Order {
    /// The order for a bundle with this Kubernetes. It stays the same until each node whose
    /// Kubernetes is older has had its turn.
    pub(super) fn of(facts: &[Fact], brings: Option<&Version>) -> Self {
        let rises = |brings: &Version| {
            let mut nodes = facts.iter().filter(|fact| fact.kubernetes.is_some());
            // A node of an earlier version does not say what it has.
            nodes.any(|fact| fact.kubernetes().is_none_or(|target| target.rises(brings)))
        };
        if brings.is_some_and(rises) { Self::WorkersLast } else { Self::VotersLast }
    }

    /// The place of a node among the others: smaller is earlier.
    pub(super) fn place(self, fact: &Fact) -> (bool, bool, bool, NodeId) {
        let works = fact.kubernetes == Some(KubernetesProgram::Kubelet);
        (works && self == Self::WorkersLast, fact.voter, fact.leads, fact.id)
    }
}

#[cfg(test)]
#[path = "plan_tests.rs"]
pub(super) mod tests;
