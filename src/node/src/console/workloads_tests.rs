//! Tests of the workloads that the console makes of event values.

use polis_runtime::supervisor::{Entry, Tree};

use super::*;
use crate::console::load::Load;
use polis_base::environment::Environment;
use polis_base::sys::quota::Limits;
use polis_control::{cluster, consensus};
use polis_workload::{Part as Of, PartState as Has};

const UPTIME: Duration = Duration::from_secs(900);

fn values(roles: &[Role]) -> Values {
    let variable = |name: &str| match name {
        "POLIS_STAGES" => Some("kernel=0-4.5".to_owned()),
        "POLIS_CONTROL_FD" => Some("3".to_owned()),
        "POLIS_RECOVERY_FD" | "POLIS_MAINTENANCE" => None,
        name => Some(name.to_owned()),
    };
    let mut values = Values::nothing(Environment::from_variables(variable).unwrap());
    values.cluster.state = cluster::State::Home;
    values.roles = Some(Role::record(roles));
    values
}

/// A service that died ten seconds ago.
fn dead(restarts: u32, cause: &str) -> Entry {
    Entry {
        state: supervisor::State::Dead,
        restarts,
        cause: Some(cause.to_owned()),
        down: true,
        since: UPTIME.saturating_sub(Duration::from_secs(10)),
    }
}

fn folded(values: &Values) -> Workloads {
    workloads(values, UPTIME, SystemTime::UNIX_EPOCH + UPTIME).unwrap()
}

#[test]
fn a_machine_that_is_no_member_knows_nothing_and_one_without_a_role_has_nothing() {
    let mut values = values(&[Role::ConsensusMember]);
    assert_eq!(folded(&values), Workloads::default());
    values.roles = None;
    assert_eq!(workloads(&values, UPTIME, SystemTime::UNIX_EPOCH), None);
    values.roles = Some(Role::record(&[Role::KubernetesWorker]));
    values.cluster.state = cluster::State::Foreign;
    assert_eq!(workloads(&values, UPTIME, SystemTime::UNIX_EPOCH), None);
}

#[test]
fn every_part_has_its_state_and_the_restarts_of_its_service() {
    let mut values = values(&[Role::ConsensusMember, Role::KubernetesController]);
    let cause = "apiserver ended with status 1: bind: in use".to_owned();
    for part in Of::CONTROLLER {
        values.workload.parts.insert(part, Has::Ready);
    }
    values.workload.parts.insert(Of::ApiServer, Has::Failed { cause: cause.clone() });
    let entry = dead(4, "short");
    let mut tree = Tree::default();
    tree.insert("root.workload.controller.apiserver".into(), entry.clone());
    // The etcd member's certificates are not those of the API server.
    tree.insert("root.consensus.certificates".into(), entry);
    values.services = tree;
    let shown = folded(&values);
    assert_eq!(shown.roles, ["Kubernetes controller"]);
    let names: Vec<_> = shown.parts.iter().map(|part| &*part.name).collect();
    assert_eq!(names, Of::CONTROLLER.map(Of::name));
    let api = &shown.parts[1];
    assert_eq!((api.state, api.restarts), (PartState::Failed, 4));
    assert_eq!(api.cause, Some(cause), "its own last words");
    assert_eq!(api.since, Some(Duration::from_secs(10)));
    assert_eq!((shown.parts[0].restarts, shown.parts[0].since), (0, None));
    assert_eq!(shown.waits, [NO_VOTE]);
    assert_eq!((shown.pods, shown.quotas), (None, Vec::new()));
}

#[test]
fn a_part_that_starts_again_keeps_the_reason_of_its_end() {
    let mut values = values(&[Role::KubernetesController]);
    values.workload.parts.insert(Of::Scheduler, Has::Starting);
    values.services.insert("root.workload.controller.scheduler".into(), dead(1, "status 1"));
    assert_eq!(folded(&values).parts[0].cause.as_deref(), Some("status 1"));
    let mut again = |state| {
        let entry = Entry { state, ..dead(1, "status 1") };
        values.services.insert("root.workload.controller.scheduler".into(), entry);
        folded(&values).parts[0].cause.clone()
    };
    // The second start of a crash loop.
    assert_eq!(again(supervisor::State::Starting).as_deref(), Some("status 1"));
    assert_eq!(again(supervisor::State::Healthy), None, "it waits for another part");
}

#[test]
fn a_containerd_that_died_has_its_last_words() {
    let mut values = values(&[Role::KubernetesWorker]);
    values.containerd = runtime::Status::Failed("no such plugin".to_owned());
    let part = &folded(&values).parts[0];
    assert_eq!((part.state, part.cause.as_deref()), (PartState::Failed, Some("no such plugin")));
}

#[test]
fn containerd_is_a_part_of_a_worker_and_the_network_of_pods_is_waited_for_last() {
    let mut values = values(&[Role::KubernetesWorker]);
    let state = |values: &Values| folded(values).parts[0].state;
    assert_eq!(state(&values), PartState::Starting);
    values.containerd = runtime::Status::Absent;
    assert_eq!(state(&values), PartState::Failed);
    let holds = || Condition { holds: true, reason: String::new() };
    let lacks = |reason: &str| Condition { holds: false, reason: reason.to_owned() };
    let serving = |runtime, network| runtime::Status::Serving(runtime::Health { runtime, network });
    values.containerd = serving(holds(), lacks("no network config found"));
    let shown = folded(&values);
    assert_eq!(shown.parts[0].state, PartState::Ready);
    assert_eq!(shown.waits, ["a network for pods: no network config found"]);
    values.containerd = serving(lacks("shim"), lacks("no network config found"));
    let shown = folded(&values);
    assert_eq!(shown.parts[0].cause.as_deref(), Some("shim"));
    assert!(shown.waits.is_empty(), "the part is what the others wait for: {:?}", shown.waits);
}

#[test]
fn an_image_that_cannot_carry_the_role_has_the_reason_and_no_part() {
    let mut values = values(&[Role::KubernetesWorker]);
    values.workload.unfit = Some("base".to_owned());
    let shown = folded(&values);
    assert_eq!((shown.unfit.as_deref(), shown.parts.len()), (Some("base"), 0));
}

#[test]
fn quotas_and_pods_are_those_of_a_worker() {
    let limits = Limits { bytes: 100, inodes: 10 };
    let usage = Usage { bytes: 97, inodes: 3, limits };
    let pod = pods::Pod {
        namespace: "web".to_owned(),
        name: "shop".to_owned(),
        state: pods::State::Waiting,
        ended: None,
        restarts: 2,
        runtime: "runc".to_owned(),
        created: SystemTime::UNIX_EPOCH + UPTIME / 2,
    };
    for (role, has) in [(Role::KubernetesWorker, true), (Role::KubernetesController, false)] {
        let mut values = values(&[role]);
        values.load = Some(Load { quota: Some(usage), ..Load::default() });
        values.pods = has.then(|| runtime::Pods { pods: vec![pod.clone()], total: 9 });
        let shown = folded(&values);
        let quota = shown.quotas.first().map(|it| (it.used, it.limit, it.files, it.files_limit));
        assert_eq!(quota, has.then_some((97, 100, 3, 10)), "{role:?}");
        let Some(pods) = shown.pods else {
            assert!(!has);
            continue;
        };
        assert_eq!((pods.total, pods.pods.len()), (9, 1));
        let shown = &pods.pods[0];
        assert_eq!((shown.state, &shown.runtime), (PodState::Waiting, &None));
        assert_eq!(shown.message.as_deref(), Some(NOT_MADE));
        assert_eq!(shown.age, Some(UPTIME / 2));
    }
}

#[test]
fn an_etcd_that_lost_its_quorum_is_what_the_controllers_wait_for() {
    let mut values = values(&[Role::KubernetesController]);
    values.workload.parts.insert(Of::ApiServer, Has::Starting);
    values.consensus.standing = consensus::MemberStatus::Voter;
    assert_eq!(folded(&values).waits, [NO_QUORUM]);
    values.consensus.leader = Some(consensus::MemberId(1));
    assert!(folded(&values).waits.is_empty());
}

#[test]
fn ages_that_go_on_are_those_of_that_moment() {
    use crate::console::{age::later, fold::fold};
    let mut values = values(&[Role::KubernetesWorker]);
    values.services.insert("root.runtime.containerd".into(), dead(1, "killed"));
    let pod = pods::Pod {
        namespace: "web".to_owned(),
        name: "shop".to_owned(),
        state: pods::State::Running,
        ended: None,
        restarts: 0,
        runtime: String::new(),
        created: SystemTime::UNIX_EPOCH + UPTIME,
    };
    values.pods = Some(runtime::Pods { pods: vec![pod], total: 1 });
    let at = |seconds| SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
    let then = |up, now| fold(&values, &Default::default(), Duration::from_secs(up), at(now));
    let mut shown = then(900, 950);
    // The clock is set back before the pod was made.
    for (up, now) in [(901, 951_u64), (930, 5_000), (931, 3)] {
        shown = later(&shown, &values, &Default::default(), Duration::from_secs(up), at(now));
        assert_eq!(shown, then(up, now), "at {up}");
        let pods = shown.workloads.as_ref().and_then(|it| it.pods.as_ref()).unwrap();
        let age = now.checked_sub(UPTIME.as_secs()).map(Duration::from_secs);
        assert_eq!(pods.pods[0].age, age, "at {up}");
    }
}
