//! Tests of what containerd's lists say about pods.

use polis_proto::cri::{
    Container, ContainerMetadata, ContainerState, ContainerStatus, PodSandbox, PodSandboxMetadata,
    PodSandboxState,
};
use proptest::prelude::*;

use super::*;

/// The moment of a look, in seconds since 1970.
const NOW: i64 = 1_000_000;

fn at(seconds: i64) -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_secs(u64::try_from(seconds).unwrap())
}

/// A sandbox of pod `uid` that was made so many seconds ago.
fn sandbox(uid: &str, attempt: u32, ago: i64) -> PodSandbox {
    let metadata = PodSandboxMetadata {
        name: format!("{uid}-0"),
        uid: uid.to_owned(),
        namespace: "web".to_owned(),
        attempt,
    };
    PodSandbox {
        id: format!("{uid}.{attempt}"),
        metadata: Some(metadata),
        created_at: (NOW - ago) * 1_000_000_000,
        ..PodSandbox::default()
    }
}

fn not_ready(sandbox: PodSandbox) -> PodSandbox {
    PodSandbox { state: PodSandboxState::SandboxNotready.into(), ..sandbox }
}

/// The container `name` of a sandbox, after so many restarts.
fn container(
    of: &PodSandbox,
    name: &str,
    restarts: u32,
    state: ContainerState,
    ago: i64,
) -> Container {
    let metadata = ContainerMetadata { name: name.to_owned(), attempt: restarts };
    Container {
        id: format!("{}.{name}.{restarts}", of.id),
        pod_sandbox_id: of.id.clone(),
        metadata: Some(metadata),
        state: state.into(),
        created_at: (NOW - ago) * 1_000_000_000,
        ..Container::default()
    }
}

/// How a container ended so many seconds ago.
fn end(exit_code: i32, reason: &str, ago: i64) -> End {
    End::from(ContainerStatus {
        finished_at: (NOW - ago) * 1_000_000_000,
        exit_code,
        reason: reason.to_owned(),
        ..ContainerStatus::default()
    })
}

use ContainerState::{ContainerExited as Exited, ContainerRunning as Running};

/// The only pod of these lists.
fn one(sandbox: &PodSandbox, containers: &[Container], ends: &[(usize, End)]) -> Pod {
    let ends = ends.iter().map(|(at, end)| (containers[*at].id.clone(), end.clone())).collect();
    let lists = Lists::new(vec![sandbox.clone()], containers.to_vec());
    let mut pods = lists.pods(&ends, at(NOW), PODS_MAX);
    assert_eq!((pods.total, pods.pods.len()), (1, 1));
    pods.pods.remove(0)
}

#[test]
fn a_pod_without_a_running_container_waits_after_two_minutes() {
    for (ago, expected) in [(3, State::Starting), (119, State::Starting), (121, State::Waiting)] {
        assert_eq!(one(&sandbox("a", 0, ago), &[], &[]).state, expected, "{ago} s");
    }
    // The first container prepares the pod; the second one is pulled since then.
    let pod = sandbox("a", 0, 900);
    let prepares = [container(&pod, "prepare", 0, Exited, 890)];
    let state = |ago| one(&pod, &prepares, &[(0, end(0, "Completed", ago))]).state;
    assert_eq!((state(10), state(130)), (State::Starting, State::Waiting));
}

#[test]
fn a_container_that_ends_badly_again_and_again_is_a_crash_loop_with_its_reason() {
    let pod = sandbox("a", 0, 900);
    let containers = [
        container(&pod, "app", 4, Exited, 40),
        container(&pod, "app", 3, Exited, 90),
        container(&pod, "sidecar", 0, Running, 890),
    ];
    let ends = [(0, end(137, "OOMKilled", 30)), (1, end(1, "Error", 60))];
    let found = one(&pod, &containers, &ends);
    assert_eq!((found.state, found.restarts), (State::CrashLoop, 4));
    let ended = found.ended.unwrap();
    assert_eq!((&*ended.container, &*ended.reason, ended.status), ("app", "OOMKilled", 137));
    // Its first end is not a loop yet.
    let first = [container(&pod, "app", 0, Exited, 40)];
    assert_eq!(one(&pod, &first, &[(0, end(1, "Error", 3))]).state, State::Failed);
}

#[test]
fn a_container_that_runs_again_is_well_after_ten_minutes() {
    let pod = sandbox("a", 0, 9_000);
    let state = |ago| {
        let containers =
            [container(&pod, "app", 1, Running, ago), container(&pod, "app", 0, Exited, 8_000)];
        one(&pod, &containers, &[(1, end(137, "OOMKilled", ago + 1))])
    };
    let lately = state(20);
    assert_eq!(lately.state, State::Restarted);
    assert_eq!(lately.ended.unwrap().reason, "OOMKilled");
    assert_eq!((state(601).state, state(601).ended), (State::Running, None));
}

#[test]
fn a_pod_that_is_deleted_stops_and_does_not_fail() {
    let pod = not_ready(sandbox("a", 0, 900));
    let containers = [container(&pod, "app", 0, Exited, 890)];
    let state =
        |status, reason, ago| one(&pod, &containers, &[(0, end(status, reason, ago))]).state;
    assert_eq!(state(143, "Error", 2), State::Stopping);
    assert_eq!(state(143, "Error", 40), State::Failed);
    assert_eq!(state(0, "Completed", 2), State::Completed);
    // After a reboot, before kubelet has made the pod again.
    assert_eq!(state(255, "Unknown", 40), State::Starting);
    let runs = [container(&pod, "app", 0, Running, 890)];
    assert_eq!(one(&pod, &runs, &[]).state, State::Stopping);
}

#[test]
fn only_the_newest_sandbox_of_a_pod_counts_and_the_worst_pod_comes_first() {
    let (old, new) = (not_ready(sandbox("b", 0, 900)), sandbox("b", 1, 300));
    let crashing = sandbox("c", 0, 900);
    let containers = vec![
        container(&old, "app", 0, Exited, 890),
        container(&new, "app", 1, Running, 290),
        container(&crashing, "app", 2, Exited, 20),
    ];
    let lists = Lists::new(vec![old, new, crashing], containers.clone());
    let mut unasked = lists.unasked(&BTreeMap::new());
    assert_eq!(unasked, ["c.0.app.2"], "containers of an old sandbox are not queried");
    assert!(!lists.has("b.0.app.0") && lists.has("b.1.app.1"));
    let ends = BTreeMap::from([(unasked.remove(0), end(2, "Error", 10))]);
    assert!(lists.unasked(&ends).is_empty(), "an end is asked for once");
    let pods = lists.pods(&ends, at(NOW), 1);
    assert_eq!((pods.total, pods.pods.len()), (2, 1));
    assert_eq!((&*pods.pods[0].name, pods.pods[0].state), ("c-0", State::CrashLoop));
    let all = lists.pods(&ends, at(NOW), PODS_MAX).pods;
    assert_eq!((&*all[1].name, all[1].state), ("b-0", State::Running));
}

#[test]
fn restarts_are_those_that_kubelet_counts() {
    let pod = sandbox("a", 0, 900);
    let mut app = container(&pod, "app", 2, Running, 800);
    for (written, expected) in [("7", 7), ("-1", 2), ("99999999999", 2), ("", 2)] {
        app.annotations.insert("io.kubernetes.container.restartCount".into(), written.into());
        assert_eq!(one(&pod, &[app.clone()], &[]).restarts, expected, "{written:?}");
    }
}

#[test]
fn texts_of_pods_are_cut() {
    let mut pod = sandbox("a", 0, 900);
    pod.metadata.as_mut().unwrap().name = "\u{1b}é".repeat(5_000);
    let containers = [container(&pod, &"n".repeat(9_999), 1, Exited, 20)];
    let status = ContainerStatus {
        exit_code: 1,
        message: "m".repeat(99_999),
        finished_at: NOW,
        ..ContainerStatus::default()
    };
    let found = one(&pod, &containers, &[(0, End::from(status))]);
    let ended = found.ended.unwrap();
    assert_eq!(found.name.chars().count(), 253);
    assert_eq!((ended.container.len(), ended.message.len()), (253, 256));
}

/// Anything that a list may hold, with few distinct names, so that some meet.
fn lists() -> impl Strategy<Value = (Vec<PodSandbox>, Vec<Container>)> {
    let time = || prop_oneof![Just(0), Just(i64::MIN), Just(i64::MAX), any::<i64>()];
    let sandbox = (0..3u8, any::<u32>(), 0..3i32, time(), any::<bool>());
    let sandbox = sandbox.prop_map(|(uid, attempt, state, created_at, whole)| {
        let made = self::sandbox(&uid.to_string(), attempt % 3, 0);
        let metadata = made.metadata.clone().filter(|_| whole);
        PodSandbox { state, created_at, metadata, ..made }
    });
    let container = (0..3u8, 0..3u32, 0..3u8, any::<u32>(), 0..5i32, time());
    let container = container.prop_map(|(uid, attempt, name, restarts, state, created_at)| {
        let of = self::sandbox(&uid.to_string(), attempt, 0);
        let made = self::container(&of, &name.to_string(), restarts, Running, 0);
        Container { state, created_at, ..made }
    });
    (prop::collection::vec(sandbox, 0..9), prop::collection::vec(container, 0..20))
}

proptest! {
    #[test]
    fn no_list_panics_and_none_is_longer_than_it_may_be(
        (sandboxes, containers) in lists(),
        status in any::<i32>(),
        now in 0..i64::MAX / 1_000_000_000,
        max in 0..4usize,
    ) {
        let lists = Lists::new(sandboxes.clone(), containers);
        let ends = lists.unasked(&BTreeMap::new()).into_iter();
        let ends = ends.map(|id| (id, end(status, "Error", 1))).collect();
        let pods = lists.pods(&ends, at(now), max);
        prop_assert!(pods.pods.len() <= max && pods.total <= sandboxes.len());
        prop_assert!(pods.pods.is_sorted_by_key(|pod| pod.state));
        prop_assert!(lists.unasked(&ends).is_empty());
    }
}
