//! The state of each part of the workload stack: one event value, and an event line for each
//! change.
//!
//! ```text
//! [starting] --checks succeed--> [ready] --> [failed: cause] --restarted--> [starting]
//!      +------ the role is taken away ------> [stopped]
//! ```
//!
//! A part that dies again before it was ready is in a crash loop; the last words of its end
//! stay until it is ready, however often it is started. A part that is starting may say why it
//! does not serve yet; its next state revokes that.
//!
//! Invariants:
//! - A line is printed for a change, and only then.
//! - `all` is ready exactly while every part is.

use std::collections::BTreeMap;
use std::time::Duration;

use polis_proto::v1;
use tokio::sync::watch;

use super::drain::state::State;
use polis_base::serial::EventLine;
use polis_runtime::event::{Closed, until};
use polis_runtime::lines::Lines;
use polis_wire::node_roles::Role;

/// How long a part counts as starting while the API server does not answer it. The first API
/// server of a cluster starts together with the parts that call it.
pub(super) const API_STARTS: Duration = Duration::from_secs(5 * 60);

/// The name of all parts together on the serial line.
const ALL: &str = "all";

/// The word of the drain of the node there. It is not a part: nothing waits for it.
const DRAIN: &str = "drain";

/// The name of gVisor there. It is not a part either: a machine that lacks something for it runs
/// every other pod.
const GVISOR: &str = "gvisor";

/// A part of the workload stack.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Part {
    /// The certificates, keys and files of this node.
    Certificates,
    /// The API server.
    ApiServer,
    /// The cluster's own objects.
    Reconciler,
    /// The controller manager.
    ControllerManager,
    /// The scheduler.
    Scheduler,
    /// The proxy for users of Polis.
    Access,
    /// The mesh between the nodes, of which each role of Kubernetes has a part.
    Mesh,
    /// The certificates, keys and files of a worker.
    WorkerCertificates,
    /// The way to the API servers.
    ApiBalancer,
    /// The container runtime.
    Containerd,
    /// The addresses of the node's pods.
    PodNetwork,
    /// The program that enforces NetworkPolicies.
    Policy,
    /// kubelet.
    Kubelet,
    /// The Node object.
    Node,
    /// kube-proxy.
    KubeProxy,
    /// The name server of the node's pods.
    Dns,
    /// The storage driver of the node's pods.
    Csi,
}

impl Part {
    /// The parts of the role Kubernetes controller, in the order of start.
    pub const CONTROLLER: [Self; 6] = [
        Self::Certificates,
        Self::ApiServer,
        Self::Reconciler,
        Self::ControllerManager,
        Self::Scheduler,
        Self::Access,
    ];

    /// The parts of the role Kubernetes worker, in the order of start.
    pub const WORKER: [Self; 10] = [
        Self::WorkerCertificates,
        Self::ApiBalancer,
        Self::PodNetwork,
        Self::Containerd,
        Self::Policy,
        Self::Kubelet,
        Self::Node,
        Self::KubeProxy,
        Self::Dns,
        Self::Csi,
    ];

    /// The parts of these roles, in the order of start: the mesh is part of each role of
    /// Kubernetes.
    pub fn of(roles: &v1::NodeRoles) -> impl Iterator<Item = Self> {
        let parts = |role| match role {
            Role::ConsensusMember => &[][..],
            Role::KubernetesController => &Self::CONTROLLER,
            Role::KubernetesWorker => &Self::WORKER,
        };
        let parts: Vec<_> = Role::given(roles).flat_map(parts).copied().collect();
        let mesh = (!parts.is_empty()).then_some(Self::Mesh);
        mesh.into_iter().chain(parts)
    }

    /// Its name on the serial line and in the tree of services.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Certificates => "certificates",
            Self::ApiServer => "apiserver",
            Self::Reconciler => "reconciler",
            Self::ControllerManager => "controller-manager",
            Self::Scheduler => "scheduler",
            Self::Access => "access",
            Self::Mesh => "mesh",
            Self::WorkerCertificates => "worker-certificates",
            Self::ApiBalancer => "api-balancer",
            Self::Containerd => "containerd",
            Self::PodNetwork => "pod-network",
            Self::Policy => "policy",
            Self::Kubelet => "kubelet",
            Self::Node => "node",
            Self::KubeProxy => "kube-proxy",
            Self::Dns => "dns",
            Self::Csi => "csi",
        }
    }
}

/// The state of a part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PartState {
    /// It does not serve yet.
    Starting,
    /// It serves.
    Ready,
    /// It died, or its checks fail.
    Failed {
        /// Its last error.
        cause: String,
    },
    /// It has ended with the role.
    Stopped,
}

impl PartState {
    /// The word on the serial line.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Ready => "ready",
            Self::Failed { .. } => "failed",
            Self::Stopped => "stopped",
        }
    }
}

/// Deaths in a row after which a part is in a crash loop: one may be an accident, and its
/// restart is the remedy.
const LOOP: u32 = 2;

/// The deaths of a part since it was ready.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Deaths {
    /// How many, at least one.
    pub count: u32,
    /// The last words of the newest.
    pub cause: String,
}

/// The published status of the workload stack. Empty on a node without a Kubernetes role.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Status {
    /// Every part that the roles of the node ask for.
    pub parts: BTreeMap<Part, PartState>,
    /// The parts that died since they were ready.
    pub deaths: BTreeMap<Part, Deaths>,
    /// Why parts that are starting do not serve yet, where they say so.
    pub waits: BTreeMap<Part, String>,
    /// Why this worker runs no pods of the runtime class `gvisor`; `None` where it does.
    pub gvisor: Option<String>,
    /// The reason why this node cannot serve a role that it has, with the remedy; nothing is
    /// started then.
    pub unfit: Option<String>,
    /// Whether this node is drained.
    pub drain: State,
    /// The reason why a drain waits, or ended; else empty.
    pub drain_cause: String,
}

impl Status {
    /// All parts as one; `None` if the roles ask for none.
    #[must_use]
    pub fn all(&self) -> Option<PartState> {
        if let Some(cause) = &self.unfit {
            return Some(PartState::Failed { cause: cause.clone() });
        }
        let failed = self.parts.iter().find_map(|(part, state)| match state {
            PartState::Failed { cause } => Some(format!("{}: {cause}", part.name())),
            PartState::Starting | PartState::Ready | PartState::Stopped => None,
        });
        if let Some(cause) = failed {
            return Some(PartState::Failed { cause });
        }
        let every = |state: &PartState| self.parts.values().all(|one| one == state);
        match self.parts.is_empty() {
            true => None,
            false if every(&PartState::Ready) => Some(PartState::Ready),
            false if every(&PartState::Stopped) => Some(PartState::Stopped),
            false => Some(PartState::Starting),
        }
    }

    /// The first part in a crash loop, with its last words, in a sentence without a number: it
    /// changes with the words alone.
    #[must_use]
    pub fn crash_loop(&self) -> Option<String> {
        let mut deaths = self.deaths.iter();
        let (part, deaths) = deaths.find(|(_, deaths)| deaths.count >= LOOP)?;
        Some(format!("{} ends again and again: {}", part.name(), deaths.cause))
    }

    /// What is wrong with a part that the roles of the node ask for; `None` while it is ready.
    #[must_use]
    pub fn fault(&self, part: Part) -> Option<String> {
        if let Some(unfit) = &self.unfit {
            return Some(unfit.clone());
        }
        match self.parts.get(&part) {
            Some(PartState::Ready) => None,
            Some(PartState::Failed { cause }) => Some(cause.clone()),
            Some(PartState::Starting | PartState::Stopped) | None => {
                let last = self.deaths.get(&part).map(|deaths| deaths.cause.clone());
                let waits = || self.waits.get(&part).map(|why| format!("it is starting: {why}"));
                Some(last.or_else(waits).unwrap_or_else(|| "it is starting".to_owned()))
            }
        }
    }

    /// Whether this part is ready.
    #[must_use]
    pub fn is_ready(&self, part: Part) -> bool {
        self.parts.get(&part) == Some(&PartState::Ready)
    }
}

/// The one way to change the status. Cheap to clone.
#[derive(Clone, Debug)]
pub(super) struct Parts {
    status: watch::Sender<Status>,
    lines: Lines,
}

impl Parts {
    pub(super) fn new(status: watch::Sender<Status>, lines: Lines) -> Self {
        Self { status, lines }
    }

    /// Sets the parts of the roles: new ones are starting, and those of a role that stays
    /// keep their state. The mesh follows the roles by itself, and stays as it is.
    pub(super) fn expect(&self, parts: &[Part]) {
        self.change(|status| {
            status.unfit = None;
            status.parts.retain(|part, _| *part == Part::Mesh || parts.contains(part));
            if !parts.contains(&Part::Node) {
                status.drain = State::None;
                status.drain_cause.clear();
                status.gvisor = None;
            }
            for part in parts {
                status.parts.entry(*part).or_insert(PartState::Starting);
            }
        });
    }

    /// Sets the reason why this node cannot serve its roles.
    pub(super) fn unfit(&self, cause: &str) {
        self.change(|status| {
            status.parts.clear();
            status.gvisor = None;
            status.unfit = Some(cause.to_owned());
        });
    }

    /// The node has no role any more. The mesh ends by itself.
    pub(super) fn none(&self) {
        self.change(|status| {
            status.unfit = None;
            status.drain = State::None;
            status.drain_cause.clear();
            status.gvisor = None;
            status.parts.retain(|part, _| *part == Part::Mesh);
        });
    }

    /// A part has ended with the role.
    pub(super) fn remove(&self, part: Part) {
        self.change(|status| {
            status.parts.remove(&part);
        });
    }

    /// Sets the state of a part.
    pub(super) fn set(&self, part: Part, state: PartState) {
        self.change(|status| {
            status.parts.insert(part, state);
            status.waits.remove(&part);
        });
    }

    /// A part is starting, and does not serve yet for this reason.
    pub(super) fn wait(&self, part: Part, why: impl Into<String>) {
        self.change(|status| {
            status.parts.insert(part, PartState::Starting);
            status.waits.insert(part, why.into());
        });
    }

    /// Sets what the machine lacks for pods of the runtime class `gvisor`.
    pub(super) fn gvisor(&self, lacking: &[String]) {
        let cause = (!lacking.is_empty()).then(|| lacking.join("; "));
        self.change(|status| status.gvisor = cause);
    }

    /// A part has failed with this cause.
    pub(super) fn fail(&self, part: Part, cause: impl Into<String>) {
        self.set(part, PartState::Failed { cause: cause.into() });
    }

    /// Sets whether this node is drained.
    pub(super) fn drain(&self, state: State, cause: &str) {
        self.change(|status| {
            status.drain = state;
            cause.clone_into(&mut status.drain_cause);
        });
    }

    /// A part has died with these last words. Unlike a failed check, this is counted.
    pub(super) fn died(&self, part: Part, cause: &str) {
        self.change(|status| {
            let state = PartState::Failed { cause: cause.to_owned() };
            status.parts.insert(part, state);
            let count = status.deaths.get(&part).map_or(0, |deaths| deaths.count);
            let deaths = Deaths { count: count.saturating_add(1), cause: cause.to_owned() };
            status.deaths.insert(part, deaths);
        });
    }

    /// The state of a part; `None` for one that the roles do not ask for.
    pub(super) fn state(&self, part: Part) -> Option<PartState> {
        self.status.borrow().parts.get(&part).cloned()
    }

    /// Waits until the roles of the node ask for a part, or no longer do. Cancel-safe.
    pub(super) async fn asked_for(&self, part: Part, asked: bool) -> Result<(), Closed> {
        let mut status = self.status.subscribe();
        until(&mut status, "the workload", |status| {
            (status.parts.contains_key(&part) == asked).then_some(())
        })
        .await
    }

    /// Waits until a part is ready. Cancel-safe.
    pub(super) async fn ready(&self, part: Part) -> Result<(), Closed> {
        let mut status = self.status.subscribe();
        until(&mut status, "the workload", |status| status.is_ready(part).then_some(())).await
    }

    /// Changes the value, and prints the differences.
    fn change(&self, change: impl FnOnce(&mut Status)) {
        self.status.send_if_modified(|status| {
            let before = status.clone();
            change(status);
            let recovered = |part: &Part| match status.parts.get(part) {
                None | Some(PartState::Ready | PartState::Stopped) => true,
                Some(PartState::Starting | PartState::Failed { .. }) => false,
            };
            status.deaths.retain(|part, _| !recovered(part));
            let starting = |part: &Part| status.parts.get(part) == Some(&PartState::Starting);
            status.waits.retain(|part, _| starting(part));
            for line in news(&before, status) {
                self.lines.event(line);
            }
            before != *status
        });
    }
}

/// The event lines for a change.
fn news(before: &Status, after: &Status) -> Vec<EventLine> {
    let line = |part: &str, state: &PartState| {
        let line = EventLine::new("workload").field("part", part).field("state", state.name());
        match state {
            PartState::Failed { cause } => line.field("cause", cause),
            PartState::Starting | PartState::Ready | PartState::Stopped => line,
        }
    };
    let other_wait = |part: &Part| {
        let why = after.waits.get(part);
        why.is_some() && before.waits.get(part) != why
    };
    let changed = after
        .parts
        .iter()
        .filter(|(part, state)| before.parts.get(part) != Some(state) || other_wait(part));
    let with_why = |(part, state): (&Part, &PartState)| {
        let line = line(part.name(), state);
        match after.waits.get(part) {
            Some(why) => line.field("cause", why),
            None => line,
        }
    };
    let mut lines: Vec<_> = changed.map(with_why).collect();
    let gone = before
        .parts
        .iter()
        .filter(|(part, state)| !after.parts.contains_key(part) && **state != PartState::Stopped);
    lines.extend(gone.map(|(part, _)| line(part.name(), &PartState::Stopped)));
    let all = |status: &Status| status.all().unwrap_or(PartState::Stopped);
    let is = all(after);
    // While one part after the other ends, all of them neither start nor have stopped.
    let stopped = |state: &PartState| *state == PartState::Stopped;
    let ending = after.parts.values().any(stopped) && !after.parts.values().all(stopped);
    if all(before) != is && !ending {
        lines.push(line(ALL, &is));
    }
    if before.gvisor != after.gvisor {
        let state = match after.gvisor.clone() {
            Some(cause) => PartState::Failed { cause },
            None if after.parts.contains_key(&Part::Node) => PartState::Ready,
            None => PartState::Stopped,
        };
        lines.push(line(GVISOR, &state));
    }
    let drain = |status: &Status| (status.drain, status.drain_cause.clone());
    if drain(before) != drain(after) {
        let (state, cause) = drain(after);
        let line = EventLine::new(DRAIN).field("state", state.name());
        lines.push(if cause.is_empty() { line } else { line.field("cause", &cause) });
    }
    lines
}

#[cfg(test)]
#[path = "parts_tests.rs"]
mod tests;
