//! The fold of the workloads of this node: parts, conditions, quotas and pods.
//!
//! Invariants:
//! - Pure, as [`fold`](super::fold::fold) is.
//! - Every part that is published is shown, under its own name: a new one needs no change
//!   here.

use std::time::{Duration, SystemTime};

use polis_tui::snapshot::{Part, PartState, Pod, PodState, Pods, Quota, Workloads};

use super::watched::Values;
use polis_base::sys::quota::Usage;
use polis_control::consensus;
use polis_runtime::supervisor;
use polis_wire::node_roles::Role;
use polis_workload as workload;
use polis_workload::runtime::{self, Condition, pods};

/// Where the services of the parts are in the tree.
const PARENTS: [&str; 2] = ["root.workload.", "root.runtime."];
/// containerd, if no part of that name is published.
const CONTAINERD: &str = "containerd";

const NO_VOTE: &str = "the etcd member of this node, which does not vote yet";
const NO_QUORUM: &str = "a majority of the voters of etcd";
const BASE: &str = "the image of this machine (variant base) has no containerd";
/// The runtime of a pod without a runtime class: the default handler of containerd.
const DEFAULT_RUNTIME: &str = "runc";

const NOT_MADE: &str = "no container has started: its image is not here yet, or a volume is \
                        missing";

/// The workloads at `uptime`, when the wall clock reads `now`; `None` before the roles are
/// known.
pub(super) fn workloads(values: &Values, uptime: Duration, now: SystemTime) -> Option<Workloads> {
    let given = values.roles.filter(|_| values.cluster.is_member())?;
    let is_ours = |role: &Role| *role != Role::ConsensusMember;
    let roles: Vec<Role> = Role::given(&given).filter(is_ours).collect();
    if roles.is_empty() {
        return Some(Workloads::default());
    }
    let parts = parts(values, &roles, uptime);
    let quota = values.load.as_ref().and_then(|load| load.quota.as_ref());
    let is_worker = roles.contains(&Role::KubernetesWorker);
    Some(Workloads {
        roles: roles.iter().map(|role| role.name().to_owned()).collect(),
        unfit: values.workload.unfit.clone(),
        waits: waits(values, &roles, &parts),
        parts,
        quotas: quota.filter(|_| is_worker).map(self::quota).into_iter().collect(),
        pods: values.pods.as_ref().map(|listed| Pods {
            pods: listed.pods.iter().map(|it| pod(it, now)).collect(),
            total: listed.total as u64,
        }),
    })
}

/// The parts that the roles ask for, with the restarts of their services.
fn parts(values: &Values, roles: &[Role], uptime: Duration) -> Vec<Part> {
    let status = &values.workload;
    let mut parts: Vec<_> = status
        .parts
        .iter()
        .map(|(part, state)| {
            let (state, cause) = match state {
                workload::PartState::Starting => {
                    (PartState::Starting, status.waits.get(part).cloned())
                }
                workload::PartState::Ready => (PartState::Ready, None),
                workload::PartState::Failed { cause } => (PartState::Failed, Some(cause.clone())),
                workload::PartState::Stopped => (PartState::Stopped, None),
            };
            with_service(part.name(), state, cause, values, uptime)
        })
        .collect();
    let is_worker = roles.contains(&Role::KubernetesWorker) && status.unfit.is_none();
    if is_worker && !parts.iter().any(|part| part.name == CONTAINERD) {
        let (state, cause) = match &values.containerd {
            runtime::Status::Unknown
            | runtime::Status::Stopped
            | runtime::Status::Starting
            | runtime::Status::Ending => (PartState::Starting, None),
            runtime::Status::Absent => (PartState::Failed, Some(BASE.to_owned())),
            runtime::Status::Failed(cause) => (PartState::Failed, Some(cause.clone())),
            runtime::Status::Serving(health) if health.runtime.holds => (PartState::Ready, None),
            runtime::Status::Serving(health) => {
                (PartState::Failed, Some(health.runtime.reason.clone()))
            }
        };
        parts.push(with_service(CONTAINERD, state, cause, values, uptime));
    }
    parts
}

/// A part with what the supervisor knows of its service, which is called as the part is.
fn with_service(
    name: &str,
    state: PartState,
    cause: Option<String>,
    values: &Values,
    uptime: Duration,
) -> Part {
    let is_its = |service: &str| {
        PARENTS.iter().any(|parent| service.starts_with(parent))
            && service.rsplit('.').next() == Some(name)
    };
    let mut services = values.services.iter();
    let service = services.find(|(service, _)| is_its(service)).map(|(_, entry)| entry);
    // One that died and is started again, or waits for that, has its last words here until
    // it is healthy.
    let last = service
        .filter(|it| state == PartState::Starting && is_down(it.state))
        .and_then(|it| it.cause.clone());
    Part {
        name: name.to_owned(),
        state,
        cause: last.or(cause),
        restarts: service.map_or(0, |it| u64::from(it.restarts)),
        since: service.map(|it| uptime.saturating_sub(it.since)),
    }
}

/// Whether a service does not do its work and is to do it.
fn is_down(state: supervisor::State) -> bool {
    use supervisor::State::{Dead, Done, Failed, Healthy, Starting, Stopped};
    match state {
        Starting | Dead | Failed => true,
        Healthy | Done | Stopped => false,
    }
}

/// The conditions outside of the parts that keep them from serving.
fn waits(values: &Values, roles: &[Role], parts: &[Part]) -> Vec<String> {
    let mut waits = Vec::new();
    let is_ready = |part: &Part| part.state == PartState::Ready;
    if roles.contains(&Role::KubernetesController) && !parts.iter().all(is_ready) {
        let etcd = &values.consensus;
        if etcd.standing != consensus::MemberStatus::Voter {
            waits.push(NO_VOTE.to_owned());
        } else if etcd.leader.is_none() {
            waits.push(NO_QUORUM.to_owned());
        }
    }
    // The network of pods comes last of all: before that, the part that is to make it is what
    // the node waits for.
    if let runtime::Status::Serving(health) = &values.containerd {
        let Condition { holds, reason } = &health.network;
        if !holds && parts.iter().all(is_ready) {
            waits.push(format!("a network for pods: {reason}"));
        }
    }
    waits
}

fn quota(usage: &Usage) -> Quota {
    Quota {
        name: "pods, images, logs".to_owned(),
        used: usage.bytes,
        limit: usage.limits.bytes,
        files: usage.inodes,
        files_limit: usage.limits.inodes,
    }
}

fn pod(pod: &pods::Pod, now: SystemTime) -> Pod {
    let text = |text: &str| (!text.is_empty()).then(|| text.to_owned());
    let ended = pod.ended.as_ref();
    let message = match pod.state {
        pods::State::Waiting => Some(NOT_MADE.to_owned()),
        _ => ended.and_then(|it| text(&it.message)),
    };
    Pod {
        namespace: pod.namespace.clone(),
        name: pod.name.clone(),
        state: match pod.state {
            pods::State::CrashLoop => PodState::CrashLoop,
            pods::State::Failed => PodState::Failed,
            pods::State::Waiting => PodState::Waiting,
            pods::State::Restarted => PodState::Restarted,
            pods::State::Starting => PodState::Starting,
            pods::State::Stopping => PodState::Stopping,
            pods::State::Running => PodState::Running,
            pods::State::Completed => PodState::Completed,
        },
        container: ended.map(|it| it.container.clone()),
        reason: ended.and_then(|it| text(&it.reason)),
        exit_status: ended.map(|it| it.status),
        message,
        restarts: pod.restarts,
        runtime: text(&pod.runtime).filter(|it| it != DEFAULT_RUNTIME),
        age: age(pod, now),
    }
}

/// The age of a pod by the wall clock; not known where that was set back since the pod was made.
pub(super) fn age(pod: &pods::Pod, now: SystemTime) -> Option<Duration> {
    now.duration_since(pod.created).ok()
}

#[cfg(test)]
#[path = "workloads_tests.rs"]
mod tests;
