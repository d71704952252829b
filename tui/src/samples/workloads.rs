//! The workloads of the samples.

use std::time::Duration;

use crate::snapshot::{Part, PartState, Pod, PodState, Pods, Quota, Workloads};

/// The parts of a controller and of a worker, in the order of their start.
const CONTROLLER: [&str; 5] =
    ["certificates", "apiserver", "reconciler", "controller-manager", "scheduler"];
const WORKER: [&str; 4] = ["containerd", "kubelet", "kube-proxy", "dns"];

pub(super) const ROLES: [&str; 2] = ["Kubernetes controller", "Kubernetes worker"];

/// The bytes and files that workloads may have on the data partition of the samples.
const BYTES: u64 = 5_775 << 20;
const FILES: u64 = BYTES / (16 << 10);

const DAY: u64 = 86_400;

/// A worker on which all is well.
pub(super) fn well(up: u64) -> Workloads {
    let state = |name: &&str| part(name, PartState::Ready, up - 12);
    let names = [
        ("kube-system", "dns-9xk2p", DAY * 13),
        ("web", "shop-6d5f7c9b44-2lqkm", DAY * 9),
        ("web", "shop-6d5f7c9b44-vm8tz", DAY * 9),
        ("web", "search-0", DAY * 2),
        ("batch", "report-29387520-5pvqx", 7_900),
    ];
    let pods = names.map(|(namespace, name, age)| Pod {
        age: Some(Duration::from_secs(age)),
        ..pod(namespace, name, PodState::Running)
    });
    let mut pods = Vec::from(pods);
    pods[3].runtime = Some("gvisor".to_owned());
    pods[4].state = PodState::Completed;
    Workloads {
        roles: vec![ROLES[1].to_owned()],
        parts: WORKER.iter().map(state).collect(),
        quotas: vec![quota(31)],
        pods: Some(Pods { total: pods.len() as u64, pods }),
        ..Workloads::default()
    }
}

/// A node that was given both roles a moment ago.
pub(super) fn starting() -> Workloads {
    let state = |(at, name): (usize, &&str)| match at {
        0 | 5 => part(name, PartState::Ready, 21),
        _ => part(name, PartState::Starting, 24),
    };
    let age = |seconds, pod| Pod { age: Some(Duration::from_secs(seconds)), ..pod };
    let pods = vec![
        age(9, pod("kube-system", "dns-t7w4c", PodState::Starting)),
        age(14, pod("web", "shop-6d5f7c9b44-kq2nd", PodState::Running)),
    ];
    Workloads {
        roles: ROLES.map(str::to_owned).into(),
        parts: CONTROLLER.iter().chain(&WORKER).enumerate().map(state).collect(),
        quotas: vec![quota(4)],
        pods: Some(Pods { total: pods.len() as u64, pods }),
        ..Workloads::default()
    }
}

/// A node on which much has gone wrong.
pub(super) fn unwell(up: u64) -> Workloads {
    let mut parts: Vec<_> = CONTROLLER
        .iter()
        .chain(&WORKER)
        .map(|name| part(name, PartState::Ready, up - 40))
        .collect();
    parts[4] = Part {
        cause: Some(
            "the scheduler ended with status 1: \"command failed\" err=\"failed to create \
             listener: listen tcp 127.0.0.1:10259: bind: address already in use\""
                .to_owned(),
        ),
        restarts: 7,
        ..part("scheduler", PartState::Failed, 11)
    };
    parts[1].restarts = 2;
    let age = |seconds, pod| Pod { age: Some(Duration::from_secs(seconds)), ..pod };
    let pods = vec![
        Pod {
            container: Some("app".to_owned()),
            reason: Some("Error".to_owned()),
            exit_status: Some(1),
            restarts: 5,
            ..age(170, pod("web", "shop-6d5f7c9b44-2lqkm", PodState::CrashLoop))
        },
        Pod {
            container: Some("indexer".to_owned()),
            reason: Some("OOMKilled".to_owned()),
            exit_status: Some(137),
            restarts: 3,
            ..age(184, pod("web", "search-0", PodState::Restarted))
        },
        Pod {
            message: Some(
                "no container has started: its image is not here yet, or a volume is missing"
                    .to_owned(),
            ),
            ..age(160, pod("batch", "import-7b9f8d6c55-x2v9r", PodState::Waiting))
        },
        age(188, pod("kube-system", "dns-9xk2p", PodState::Running)),
        age(120, pod("web", "shop-6d5f7c9b44-vm8tz", PodState::Running)),
    ];
    Workloads {
        roles: ROLES.map(str::to_owned).into(),
        parts,
        quotas: vec![quota(97)],
        pods: Some(Pods { total: pods.len() as u64, pods }),
        ..Workloads::default()
    }
}

/// A node whose image lacks the programs.
#[cfg(test)]
pub(crate) fn unfit() -> Workloads {
    Workloads {
        roles: vec![ROLES[1].to_owned()],
        unfit: Some(
            "the image of this node (variant base) does not carry Kubernetes: install one of the \
             variant full, or take the role away"
                .to_owned(),
        ),
        ..Workloads::default()
    }
}

/// As much of everything as a snapshot can hold, all of it `evil`.
pub(super) fn overflowing(evil: &str, time: Duration) -> Workloads {
    let evil = || evil.to_owned();
    let states = [PodState::CrashLoop, PodState::Running, PodState::Unknown, PodState::Failed];
    let pods = states.iter().cycle().take(250).map(|state| Pod {
        namespace: evil(),
        name: evil(),
        state: *state,
        container: Some(evil()),
        reason: Some(evil()),
        exit_status: Some(i32::MIN),
        message: Some(evil()),
        restarts: u64::MAX,
        runtime: Some(evil()),
        age: Some(time),
    });
    let states = [PartState::Failed, PartState::Unknown, PartState::Ready, PartState::Stopped];
    let parts = states.iter().cycle().take(9).map(|state| Part {
        name: evil(),
        state: *state,
        cause: Some(evil()),
        restarts: u64::MAX,
        since: Some(time),
    });
    let quota =
        Quota { name: evil(), used: u64::MAX, limit: 1, files: u64::MAX, files_limit: u64::MAX };
    Workloads {
        roles: vec![evil(); 3],
        unfit: None,
        parts: parts.collect(),
        waits: vec![evil(); 2],
        quotas: vec![quota, Quota { files: 7, ..Quota::default() }],
        pods: Some(Pods { pods: pods.collect(), total: u64::MAX }),
    }
}

fn part(name: &str, state: PartState, seconds: u64) -> Part {
    let since = Some(Duration::from_secs(seconds));
    Part { name: name.to_owned(), state, since, ..Part::default() }
}

fn pod(namespace: &str, name: &str, state: PodState) -> Pod {
    Pod { namespace: namespace.to_owned(), name: name.to_owned(), state, ..Pod::default() }
}

/// The quota of workloads, to so much in use.
fn quota(percent: u64) -> Quota {
    Quota {
        name: "pods, images, logs".to_owned(),
        used: BYTES.div_ceil(100) * percent,
        limit: BYTES,
        files: FILES.div_ceil(250) * percent,
        files_limit: FILES,
    }
}
