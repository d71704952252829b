//! The plan of an update: which nodes get the new version, in which order, or what stands
//! against it.
//!
//! ```text
//! nodes that do not run it yet: no voters --> voters --> the leader
//! ```
//!
//! Invariants:
//! - A plan has each node that needs the update once, and no other.
//! - A plan in which a voter restarts leaves etcd a quorum while it does.
//! - A plan that brings a newer minor version of etcd has the consent of an owner.

use polis_bundle::{EtcdRefusal, EtcdTarget};
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
    /// Which programs it has.
    pub variant: String,
    /// The key that signed it, in hexadecimal digits.
    pub signer: String,
    /// The version of its etcd.
    pub etcd: Version,
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
        let v1::UpdateBundle { version, from, image, variant, signer, etcd } = message;
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
        Ok(Self {
            version: version_of("version", version)?,
            from: version_of("from", from)?,
            variant: variant.clone(),
            signer: signer.clone(),
            etcd: version_of("etcd", etcd)?,
        })
    }
}

/// What stands against a plan.
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
    let voters = voters(facts);
    if turns.iter().any(|fact| fact.voter) && !spares_one(voters) {
        return Err(Refusal::NoSpareVoter { voters });
    }
    turns.sort_by_key(|fact| place(fact));
    Ok(turns.into_iter().map(|fact| fact.id).collect())
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

/// How many voters etcd has.
pub(super) fn voters(facts: &[Fact]) -> usize {
    facts.iter().filter(|fact| fact.voter).count()
}

/// Whether etcd keeps its quorum without one of `voters`.
pub(super) fn spares_one(voters: usize) -> bool {
    voters.saturating_sub(1) > voters / 2
}

/// The place of a node among the others: smaller is earlier.
pub(super) fn place(fact: &Fact) -> (bool, bool, NodeId) {
    (fact.voter, fact.leads, fact.id)
}

#[cfg(test)]
pub(super) mod tests {
    use polis_proto::v1::NodeHealth;
    use proptest::prelude::*;

    use super::*;

    pub(crate) const SIGNER: &str = "aa11";

    pub(crate) fn id(seed: u8) -> NodeId {
        NodeId::from_public_key(&[seed; 32])
    }

    pub(crate) fn report(version: &str) -> v1::UpdateReport {
        v1::UpdateReport {
            boot_id: format!("boot of {version}"),
            version: version.to_owned(),
            ready: true,
            variant: "base".to_owned(),
            release_key: SIGNER.to_owned(),
            ..Default::default()
        }
    }

    pub(crate) fn fact(seed: u8, voter: bool, version: &str) -> Fact {
        let (health, report) = (NodeHealth::Healthy, Some(report(version)));
        Fact { id: id(seed), voter, leads: false, leaving: false, health, quorum: voter, report }
    }

    pub(crate) fn bundle() -> Bundle {
        Bundle {
            version: Version::new(1, 1, 0),
            from: Version::new(1, 0, 0),
            variant: "base".to_owned(),
            signer: SIGNER.to_owned(),
            etcd: Version::new(3, 5, 16),
        }
    }

    /// The plan for a cluster with etcd 3.5.
    pub(crate) fn planned(facts: &[Fact], bundle: &Bundle) -> Result<Vec<NodeId>, Refusal> {
        let etcd = EtcdTarget { runs: Some("3.5".parse().unwrap()), one_way: false };
        plan(facts, bundle, etcd)
    }

    /// Three voters, of which `leader` leads, and two other nodes.
    pub(crate) fn five(leader: u8) -> Vec<Fact> {
        let voters =
            (1..=3).map(|seed| Fact { leads: seed == leader, ..fact(seed, true, "1.0.0") });
        voters.chain((4..=5).map(|seed| fact(seed, false, "1.0.0"))).collect()
    }

    #[test]
    fn workers_come_first_then_voters_then_the_leader() {
        for leader in 1..=3 {
            let turns = planned(&five(leader), &bundle()).unwrap();
            assert_eq!(turns.len(), 5);
            assert!(turns[..2].iter().all(|node| [id(4), id(5)].contains(node)), "{turns:?}");
            assert_eq!(turns[4], id(leader));
        }
    }

    #[test]
    fn a_node_with_the_version_gets_no_turn_and_a_finished_cluster_has_an_empty_plan() {
        let mut facts = five(1);
        facts[1] = fact(2, true, "1.1.0");
        assert!(!planned(&facts, &bundle()).unwrap().contains(&id(2)));
        let done: Vec<_> = (1..=2).map(|seed| fact(seed, true, "1.1.0")).collect();
        // Two voters cannot spare one, and none has to go.
        assert_eq!(planned(&done, &bundle()), Ok(Vec::new()));
    }

    #[test]
    fn what_stands_against_a_plan_is_named_with_its_node() {
        let changed = |change: &dyn Fn(&mut Fact)| {
            let mut facts = five(1);
            change(&mut facts[1]);
            planned(&facts, &bundle()).unwrap_err()
        };
        let node = id(2);
        let fault = |fault| Refusal::Fault { node, fault };
        let said = |change: &dyn Fn(&mut v1::UpdateReport)| {
            changed(&|fact| change(fact.report.as_mut().unwrap()))
        };
        assert_eq!(changed(&|fact| fact.health = NodeHealth::Late), fault(Fault::Late));
        assert_eq!(changed(&|fact| fact.health = NodeHealth::Unknown), fault(Fault::Unheard));
        assert_eq!(changed(&|fact| fact.health = NodeHealth::Absent), fault(Fault::Absent));
        assert_eq!(changed(&|fact| fact.report = None), fault(Fault::Mute));
        assert_eq!(changed(&|fact| fact.quorum = false), fault(Fault::NoQuorum));
        assert_eq!(said(&|report| report.ready = false), fault(Fault::NotReady));
        assert_eq!(said(&|report| report.trial = true), fault(Fault::OnTrial));
        assert_eq!(said(&|report| report.release_key.clear()), Refusal::NoKey { node });
        let signer = said(&|report| report.release_key = "bb22".to_owned());
        assert!(matches!(signer, Refusal::Signer { .. }), "{signer}");
        let variant = said(&|report| report.variant = "full".to_owned());
        assert!(variant.to_string().ends_with("runs the variant full, and the bundle has base"));
        let newer = said(&|report| report.version = "1.2.0".to_owned());
        assert!(matches!(newer, Refusal::NotNewer { .. }), "{newer}");
        let none = said(&|report| report.version = "what".to_owned());
        assert!(matches!(none, Refusal::NotNewer { .. }), "{none}");
        let old = said(&|report| report.version = "0.9.0".to_owned());
        assert!(old.to_string().ends_with("runs 0.9.0, and the bundle updates 1.0.0 or newer"));
        for voters in [1, 2] {
            let facts: Vec<_> = (1..=voters).map(|seed| fact(seed, true, "1.0.0")).collect();
            let refused = planned(&facts, &bundle()).unwrap_err();
            assert_eq!(refused, Refusal::NoSpareVoter { voters: voters.into() });
        }
    }

    #[test]
    fn another_etcd_comes_one_minor_version_at_a_time_and_with_the_consent_of_an_owner() {
        let facts = five(1);
        let outcome = |runs: Option<&str>, one_way, brings: &str| {
            let runs = runs.map(|runs| runs.parse().unwrap());
            let bundle = Bundle { etcd: brings.parse().unwrap(), ..bundle() };
            plan(&facts, &bundle, EtcdTarget { runs, one_way }).map(|turns| turns.len())
        };
        let (runs, running) = (Some("3.5"), "3.5".parse().unwrap());
        let found = Version::new(3, 6, 1);
        assert_eq!(outcome(runs, true, "3.6.1"), Ok(5));
        let one_way = EtcdRefusal::OneWay { found, running };
        assert_eq!(outcome(runs, false, "3.6.1"), Err(one_way.into()));
        for consent in [true, false] {
            assert_eq!(outcome(runs, consent, "3.5.99"), Ok(5));
            let far = outcome(runs, consent, "3.7.0");
            assert!(matches!(far, Err(Refusal::Etcd(EtcdRefusal::Far { .. }))), "{far:?}");
            let older = outcome(runs, consent, "3.4.0");
            assert!(matches!(older, Err(Refusal::Etcd(EtcdRefusal::Older { .. }))), "{older:?}");
            assert_eq!(outcome(None, consent, "3.5.16"), Err(Refusal::EtcdUnknown));
        }
        // No node takes it.
        let done: Vec<_> = (1..=3).map(|seed| fact(seed, true, "1.1.0")).collect();
        assert_eq!(plan(&done, &bundle(), EtcdTarget::default()), Ok(Vec::new()));
    }

    #[test]
    fn what_a_caller_says_of_a_bundle_is_bounded() {
        let good = v1::UpdateBundle {
            version: "1.1.0".to_owned(),
            from: "1.0.0".to_owned(),
            image: "00ff".to_owned(),
            variant: "base".to_owned(),
            signer: SIGNER.to_owned(),
            etcd: "3.5.16".to_owned(),
        };
        assert_eq!(Bundle::read(&good).unwrap(), bundle());
        let wrong = |change: &dyn Fn(&mut v1::UpdateBundle)| {
            let mut message = good.clone();
            change(&mut message);
            Bundle::read(&message).unwrap_err().to_string()
        };
        assert!(wrong(&|one| one.version = "1".to_owned()).starts_with("bundle.version is"));
        assert!(wrong(&|one| one.from.clear()).starts_with("bundle.from is"));
        assert!(wrong(&|one| one.image = "../x".to_owned()).starts_with("bundle.image is"));
        assert!(wrong(&|one| one.variant = "x".repeat(65)).starts_with("bundle.variant is"));
        assert!(wrong(&|one| one.signer.clear()).starts_with("bundle.signer is"));
        assert!(wrong(&|one| one.etcd = "3.5".to_owned()).starts_with("bundle.etcd is"));
    }

    proptest! {
        #[test]
        fn a_plan_has_each_node_once_the_leader_last_and_never_ends_the_quorum(
            nodes in prop::collection::vec((any::<bool>(), any::<bool>()), 0..12), leader in 0_usize..12,
        ) {
            let facts: Vec<_> = (0_u8..).zip(&nodes).map(|(seed, (voter, new))| Fact {
                leads: *voter && usize::from(seed) == leader,
                ..fact(seed, *voter, if *new { "1.1.0" } else { "1.0.0" })
            }).collect();
            let voters = voters(&facts);
            let due: std::collections::BTreeSet<_> = facts
                .iter()
                .filter(|fact| fact.version() != Some(Version::new(1, 1, 0)))
                .map(|fact| fact.id)
                .collect();
            let of = |node: &NodeId| facts.iter().find(|fact| fact.id == *node).unwrap();
            match planned(&facts, &bundle()) {
                Err(Refusal::NoSpareVoter { .. }) => {
                    prop_assert!(voters < 3);
                    prop_assert!(due.iter().any(|node| of(node).voter));
                }
                Err(refusal) => prop_assert!(false, "{refusal}"),
                Ok(turns) => {
                    prop_assert_eq!(turns.len(), due.len());
                    prop_assert_eq!(&turns.iter().copied().collect::<std::collections::BTreeSet<_>>(), &due);
                    let first = turns.iter().position(|node| of(node).voter);
                    let first = first.unwrap_or(turns.len());
                    prop_assert!(turns[first..].iter().all(|node| of(node).voter));
                    prop_assert!(first == turns.len() || voters - 1 > voters / 2);
                    let leads = turns.iter().position(|node| of(node).leads);
                    prop_assert!(leads.is_none_or(|at| at + 1 == turns.len()));
                }
            }
        }
    }
}
