//! Plans of updates for clusters in several states.

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
    Fact {
        id: id(seed),
        voter,
        leads: false,
        leaving: false,
        kubernetes: None,
        health,
        quorum: voter,
        report,
    }
}

pub(crate) fn bundle() -> Bundle {
    Bundle {
        version: Version::new(1, 1, 0),
        from: Version::new(1, 0, 0),
        image: "00ff".to_owned(),
        variant: "base".to_owned(),
        signer: SIGNER.to_owned(),
        etcd: Version::new(3, 5, 16),
        kubernetes: None,
    }
}

/// A bundle with this Kubernetes.
fn with_kubernetes(version: &str) -> Bundle {
    Bundle { kubernetes: Some(version.parse().unwrap()), ..bundle() }
}

/// A node that runs this program of Kubernetes, in a version that it may not say: an empty word.
pub(crate) fn with(program: KubernetesProgram, version: &str, fact: Fact) -> Fact {
    let kubernetes = version.to_owned();
    let report = fact.report.map(|report| v1::UpdateReport { kubernetes, ..report });
    Fact { kubernetes: Some(program), report, ..fact }
}

/// The plan for a cluster with etcd 3.5.
pub(crate) fn planned(facts: &[Fact], bundle: &Bundle) -> Result<Vec<NodeId>, Refusal> {
    let etcd = EtcdTarget { runs: Some("3.5".parse().unwrap()), one_way: false };
    plan(facts, bundle, etcd)
}

/// Three voters, of which `leader` leads, and two other nodes.
pub(crate) fn five(leader: u8) -> Vec<Fact> {
    let voters = (1..=3).map(|seed| Fact { leads: seed == leader, ..fact(seed, true, "1.0.0") });
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
fn a_node_with_another_system_of_the_same_version_stands_against_a_plan() {
    let outcome = |version: &str, image: &str| {
        let mut facts = five(1);
        facts[1] = fact(2, true, version);
        facts[1].report.as_mut().unwrap().image = image.to_owned();
        planned(&facts, &bundle()).map(|turns| turns.len())
    };
    assert_eq!(outcome("1.1.0", "00ff"), Ok(4));
    assert_eq!(outcome("1.1.0", ""), Ok(4), "a node of an earlier version reports none");
    let refused = outcome("1.1.0", "ab12").unwrap_err().to_string();
    let expected = "runs another system of version 1.1.0: its image is ab12, and that of the \
                    bundle is 00ff; ";
    assert!(refused.contains(expected), "{refused}");
    assert_eq!(outcome("1.0.0", "ab12"), Ok(5));
    // Two variants of one version have two images: such a node was updated singly.
    let mut facts = five(1);
    facts[1] = fact(2, true, "1.1.0");
    let report = facts[1].report.as_mut().unwrap();
    (report.image, report.variant) = ("ab12".to_owned(), "full".to_owned());
    assert_ne!(bundle().variant, "full");
    assert_eq!(planned(&facts, &bundle()).map(|turns| turns.len()), Ok(4));
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
        assert!(matches!(far, Err(Refusal::Etcd(EtcdRefusal::SkipsMinor { .. }))), "{far:?}");
        let older = outcome(runs, consent, "3.4.0");
        assert!(matches!(older, Err(Refusal::Etcd(EtcdRefusal::Older { .. }))), "{older:?}");
        assert_eq!(outcome(None, consent, "3.5.16"), Err(Refusal::EtcdUnknown));
    }
    // No node takes it.
    let done: Vec<_> = (1..=3).map(|seed| fact(seed, true, "1.1.0")).collect();
    assert_eq!(plan(&done, &bundle(), EtcdTarget::default()), Ok(Vec::new()));
}

#[test]
fn another_kubernetes_comes_to_api_servers_one_minor_version_at_a_time() {
    let outcome = |program, runs: &str, brings: &str| {
        let mut facts = five(1);
        facts[1] = with(program, runs, fact(2, true, "1.0.0"));
        planned(&facts, &with_kubernetes(brings)).map(|turns| turns.len())
    };
    let (api_server, kubelet) = (KubernetesProgram::ApiServer, KubernetesProgram::Kubelet);
    assert_eq!(outcome(api_server, "1.37.2", "1.37.5"), Ok(5));
    assert_eq!(outcome(api_server, "1.37.2", "1.38.0"), Ok(5));
    let refused = outcome(api_server, "1.37.2", "1.39.0").unwrap_err().to_string();
    let expected = format!(
        "{} cannot take it: the bundle has Kubernetes 1.39.0, and the API server is of 1.37.2: API \
         servers are updated by one minor version at a time; update to a version with Kubernetes \
         1.38 first",
        id(2),
    );
    assert_eq!(refused, expected);
    assert_eq!(outcome(kubelet, "1.37.2", "1.39.0"), Ok(5));
    let behind = outcome(kubelet, "1.37.2", "1.41.0").unwrap_err().to_string();
    assert!(behind.contains("three minor versions older"), "{behind}");
    for program in [api_server, kubelet] {
        let older = outcome(program, "1.37.2", "1.36.9").unwrap_err().to_string();
        assert!(older.contains("of an older minor version than 1.37.2"), "{older}");
        assert_eq!(outcome(program, "", "1.39.0"), Ok(5), "it does not say what it runs");
    }
    // Where both refuse it, the help is about the API server: a worker that is updated
    // alone would get ahead of it.
    let mut facts = five(1);
    facts[0] = with(kubelet, "1.37.2", fact(1, true, "1.0.0"));
    facts[1] = with(api_server, "1.37.2", fact(2, true, "1.0.0"));
    let both = planned(&facts, &with_kubernetes("1.41.0")).unwrap_err().to_string();
    assert!(both.ends_with("update to a version with Kubernetes 1.38 first"), "{both}");
    // Nodes that do not run Kubernetes, and a cluster without a node to update.
    assert_eq!(planned(&five(1), &with_kubernetes("1.39.0")).map(|turns| turns.len()), Ok(5));
    let done = [with(api_server, "1.37.2", fact(1, true, "1.1.0"))];
    assert_eq!(planned(&done, &with_kubernetes("1.39.0")), Ok(Vec::new()));
}

#[test]
fn workers_come_last_where_the_minor_version_of_kubernetes_rises() {
    let order = |worker: &str, brings: Option<&str>| {
        let mut facts: Vec<_> = five(1)
            .into_iter()
            .map(|fact| match fact.voter {
                true => with(KubernetesProgram::ApiServer, "1.37.2", fact),
                false => with(KubernetesProgram::Kubelet, worker, fact),
            })
            .collect();
        // A voter whose kubelet has no API server beside it.
        facts.push(with(KubernetesProgram::Kubelet, "1.37.2", fact(6, true, "1.0.0")));
        let bundle = brings.map_or_else(bundle, with_kubernetes);
        let turns = planned(&facts, &bundle).unwrap();
        let seed = |node: &NodeId| (1..=6).find(|seed| id(*seed) == *node).unwrap();
        turns.iter().map(seed).collect::<Vec<u8>>()
    };
    let rises = order("1.37.2", Some("1.38.0"));
    assert_eq!(rises[2], 1, "the leader is the last with an API server: {rises:?}");
    assert!(rises[..2].iter().all(|seed| [2, 3].contains(seed)), "{rises:?}");
    assert!(rises[3..5].iter().all(|seed| [4, 5].contains(seed)), "{rises:?}");
    assert_eq!(rises[5], 6);
    assert_eq!(order("", Some("1.37.9")), rises, "a worker that does not say what it runs");
    for same in [order("1.37.2", Some("1.37.9")), order("1.37.2", None), order("", None)] {
        assert!(same[..2].iter().all(|seed| [4, 5].contains(seed)), "{same:?}");
        assert_eq!(same[5], 1, "the leader is the last");
    }
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
        kubernetes: String::new(),
    };
    assert_eq!(Bundle::read(&good).unwrap(), bundle());
    let full = v1::UpdateBundle { kubernetes: "1.38.0".to_owned(), ..good.clone() };
    assert_eq!(Bundle::read(&full).unwrap(), with_kubernetes("1.38.0"));
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
    let kubernetes = wrong(&|one| one.kubernetes = "v1.38.0".to_owned());
    assert!(kubernetes.starts_with("bundle.kubernetes is"), "{kubernetes}");
}

proptest! {
    #[test]
    fn no_kubelet_is_raised_before_an_api_server_and_no_api_server_by_two_minor_versions(
        nodes in prop::collection::vec(
            (any::<bool>(), 0..3_u8, 34..40_u64, any::<bool>()), 0..12,
        ),
    ) {
        let facts: Vec<_> = (0_u8..).zip(&nodes).map(|(seed, (voter, role, minor, new))| {
            let plain = fact(seed, *voter || *role == 2, if *new { "1.1.0" } else { "1.0.0" });
            match role {
                0 => plain,
                1 => with(KubernetesProgram::Kubelet, &format!("1.{minor}.0"), plain),
                _ => with(KubernetesProgram::ApiServer, &format!("1.{minor}.0"), plain),
            }
        }).collect();
        let of = |node: &NodeId| facts.iter().find(|fact| fact.id == *node).unwrap();
        let fits = |fact: &Fact| {
            let oldest = match fact.kubernetes {
                None => return true,
                Some(KubernetesProgram::ApiServer) => 37,
                Some(KubernetesProgram::Kubelet) => 35,
            };
            (oldest..=38).contains(&fact.kubernetes().unwrap().runs.minor)
        };
        match planned(&facts, &with_kubernetes("1.38.0")) {
            Err(Refusal::NoSpareVoter { .. }) => {}
            Err(Refusal::Kubernetes { node, .. }) => prop_assert!(!fits(of(&node))),
            Err(refusal) => prop_assert!(false, "{refusal}"),
            Ok(turns) => {
                prop_assert!(turns.is_empty() || facts.iter().all(fits));
                let raised = turns.iter().position(|node| {
                    let minor = of(node).kubernetes().map(|target| target.runs.minor);
                    of(node).kubernetes == Some(KubernetesProgram::Kubelet) && minor < Some(38)
                });
                let after = &turns[raised.unwrap_or(turns.len())..];
                let api_server = Some(KubernetesProgram::ApiServer);
                prop_assert!(after.iter().all(|node| of(node).kubernetes != api_server));
            }
        }
    }

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
