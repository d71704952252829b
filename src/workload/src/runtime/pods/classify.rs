//! From the lists of containerd to the pods of a node. Pure.
//!
//! ```text
//! sandbox ready      a container ended badly ---- restarted before --> crash loop, else failed
//!                    one runs ------------------- ended badly lately -> restarted, else running
//!                    none runs ------------------ for two minutes ----> waiting, else starting
//! sandbox not ready  a container runs, or ended a moment ago ---------> stopping
//!                    one ended badly ---------------------------------> failed
//!                    all ended well ----------------------------------> completed
//! ```

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

use polis_proto::cri::{Container, ContainerState, ContainerStatus, PodSandbox, PodSandboxState};

use super::{Ended, Pod, Pods, State};

/// Longer than it takes to pull most images.
const WAITING_AFTER: Duration = Duration::from_secs(120);
/// A container that runs so long counts as well again: kubelet resets its backoff then.
const RESTARTED_FOR: Duration = Duration::from_secs(600);
/// kubelet removes a deleted pod within this: its containers end badly on the way, by a signal.
const STOPPING_FOR: Duration = Duration::from_secs(30);
/// The reason of a container that ended with the machine, in the words of containerd.
const MACHINE_ENDED: &str = "Unknown";

/// How many of each list are looked at.
const LISTED_MAX: usize = 4096;
/// The longest name in Kubernetes.
const NAME_MAX: usize = 253;
/// A message of a runtime may hold all output of a program.
const MESSAGE_MAX: usize = 256;

const RESTART_COUNT: &str = "io.kubernetes.container.restartCount";

/// How a container ended; a container ends once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct End {
    status: i32,
    reason: String,
    message: String,
    at: SystemTime,
}

impl From<ContainerStatus> for End {
    fn from(status: ContainerStatus) -> Self {
        Self {
            status: status.exit_code,
            reason: cut(&status.reason, NAME_MAX),
            message: cut(&status.message, MESSAGE_MAX),
            at: time(status.finished_at),
        }
    }
}

impl End {
    fn is_bad(&self) -> bool {
        self.status != 0 && self.reason != MACHINE_ENDED
    }
}

/// The newest container of a name in a pod, and the one before it.
struct Member<'a> {
    newest: &'a Container,
    before: Option<&'a Container>,
}

/// The lists of containerd, by pod.
pub(super) struct Lists {
    /// The newest sandbox of each pod, with its containers.
    pods: Vec<(PodSandbox, Vec<Container>)>,
}

impl Lists {
    pub(super) fn new(sandboxes: Vec<PodSandbox>, containers: Vec<Container>) -> Self {
        let mut newest: BTreeMap<String, PodSandbox> = BTreeMap::new();
        for sandbox in sandboxes.into_iter().take(LISTED_MAX) {
            let age = |it: &PodSandbox| {
                (it.metadata.as_ref().map_or(0, |metadata| metadata.attempt), it.created_at)
            };
            let uid = sandbox.metadata.as_ref().map(|metadata| metadata.uid.clone());
            let key = uid.filter(|uid| !uid.is_empty()).unwrap_or_else(|| sandbox.id.clone());
            if newest.get(&key).is_none_or(|other| age(other) < age(&sandbox)) {
                newest.insert(key, sandbox);
            }
        }
        let mut of: BTreeMap<String, Vec<Container>> = BTreeMap::new();
        for container in containers.into_iter().take(LISTED_MAX) {
            of.entry(container.pod_sandbox_id.clone()).or_default().push(container);
        }
        let with = |sandbox: PodSandbox| {
            let mut containers = of.remove(&sandbox.id).unwrap_or_default();
            containers.sort_by_key(|it| (name(it).to_owned(), restarts(it), it.created_at));
            (sandbox, containers)
        };
        Self { pods: newest.into_values().map(with).collect() }
    }

    /// Whether a container is still there.
    pub(super) fn has(&self, id: &str) -> bool {
        self.pods.iter().flat_map(|(_, containers)| containers).any(|it| it.id == id)
    }

    /// The ended containers whose end is not known.
    pub(super) fn unasked(&self, ends: &BTreeMap<String, End>) -> Vec<String> {
        let all = self.pods.iter().flat_map(|(_, containers)| containers);
        let unasked = all.filter(|it| it.state() == ContainerState::ContainerExited);
        unasked.filter(|it| !ends.contains_key(&it.id)).map(|it| it.id.clone()).collect()
    }

    /// The pods at `now`, those that need an operator first, at most `max` of them.
    pub(super) fn pods(&self, ends: &BTreeMap<String, End>, now: SystemTime, max: usize) -> Pods {
        let all = self.pods.iter();
        let mut pods: Vec<_> =
            all.map(|(sandbox, containers)| pod(sandbox, containers, ends, now)).collect();
        pods.sort_by(|one, two| {
            let key = |it: &Pod| (it.state, it.namespace.clone(), it.name.clone());
            key(one).cmp(&key(two))
        });
        let total = pods.len();
        pods.truncate(max);
        Pods { pods, total }
    }
}

fn pod(
    sandbox: &PodSandbox,
    containers: &[Container],
    ends: &BTreeMap<String, End>,
    now: SystemTime,
) -> Pod {
    let members = members(containers);
    let (state, about) = state(sandbox, &members, ends, now);
    let ended = about.and_then(|container| {
        let End { status, reason, message, .. } = ends.get(&container.id)?.clone();
        Some(Ended { container: cut(name(container), NAME_MAX), reason, message, status })
    });
    let metadata = sandbox.metadata.clone().unwrap_or_default();
    Pod {
        namespace: cut(&metadata.namespace, NAME_MAX),
        name: cut(&metadata.name, NAME_MAX),
        state,
        ended,
        restarts: members.iter().map(|member| restarts(member.newest)).sum(),
        runtime: cut(&sandbox.runtime_handler, NAME_MAX),
        created: time(sandbox.created_at),
    }
}

/// The containers of a pod by name, of which each is listed in the order of its restarts.
fn members(containers: &[Container]) -> Vec<Member<'_>> {
    let same = |one: &Container, two: &Container| name(one) == name(two);
    let groups = containers.chunk_by(same).map(<[Container]>::split_last);
    groups.flatten().map(|(newest, earlier)| Member { newest, before: earlier.last() }).collect()
}

/// The state of a pod, and the container that it is about.
fn state<'a>(
    sandbox: &PodSandbox,
    members: &[Member<'a>],
    ends: &BTreeMap<String, End>,
    now: SystemTime,
) -> (State, Option<&'a Container>) {
    let end = |container: &Container| ends.get(&container.id);
    let since = |then: SystemTime| now.duration_since(then).unwrap_or_default();
    let runs = |it: &&Member<'_>| it.newest.state() == ContainerState::ContainerRunning;
    let bad = |it: &&Member<'_>| {
        it.newest.state() == ContainerState::ContainerExited
            && end(it.newest).is_some_and(End::is_bad)
    };
    let newest_end = members.iter().filter_map(|it| end(it.newest)).map(|end| end.at).max();
    let ended_badly = members.iter().filter(bad).max_by_key(|it| restarts(it.newest));
    if sandbox.state() == PodSandboxState::SandboxNotready {
        let quiet = newest_end.is_some_and(|end| since(end) >= STOPPING_FOR);
        return match ended_badly {
            _ if members.iter().any(|it| runs(&it)) => (State::Stopping, None),
            Some(it) if quiet => (State::Failed, Some(it.newest)),
            None if !members.is_empty() && members.iter().all(|it| is_well(it, ends)) => {
                (State::Completed, None)
            }
            _ if members.iter().any(|it| ended_with_machine(it, ends)) => (State::Starting, None),
            _ => (State::Stopping, None),
        };
    }
    if let Some(it) = ended_badly {
        let again = restarts(it.newest) > 0;
        return (if again { State::CrashLoop } else { State::Failed }, Some(it.newest));
    }
    let lately = |it: &&Member<'a>| runs(it) && since(time(it.newest.created_at)) < RESTARTED_FOR;
    let before = |it: &Member<'a>| it.before.filter(|it| end(it).is_some_and(End::is_bad));
    if let Some(before) = members.iter().filter(lately).find_map(before) {
        return (State::Restarted, Some(before));
    }
    if members.iter().any(|it| runs(&it)) {
        return (State::Running, None);
    }
    let made = members.iter().map(|it| time(it.newest.created_at));
    let last = made.chain(newest_end).chain([time(sandbox.created_at)]).max();
    let waits = last.is_some_and(|last| since(last) >= WAITING_AFTER);
    (if waits { State::Waiting } else { State::Starting }, None)
}

fn is_well(member: &Member<'_>, ends: &BTreeMap<String, End>) -> bool {
    ends.get(&member.newest.id).is_some_and(|end| end.status == 0)
}

fn ended_with_machine(member: &Member<'_>, ends: &BTreeMap<String, End>) -> bool {
    ends.get(&member.newest.id).is_some_and(|end| end.reason == MACHINE_ENDED)
}

fn name(container: &Container) -> &str {
    container.metadata.as_ref().map_or("", |metadata| &metadata.name)
}

fn restarts(container: &Container) -> u64 {
    let attempt = container.metadata.as_ref().map_or(0, |metadata| metadata.attempt);
    let counted = container.annotations.get(RESTART_COUNT);
    // kubelet writes an `int`, and no honest one is larger.
    let counted = counted.and_then(|text| text.parse::<u32>().ok());
    counted.unwrap_or(attempt).into()
}

/// A time in nanoseconds since 1970; what lies before is 1970.
fn time(nanoseconds: i64) -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_nanos(u64::try_from(nanoseconds).unwrap_or(0))
}

fn cut(text: &str, max: usize) -> String {
    text.chars().take(max).collect()
}
