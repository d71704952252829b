//! The health of the cluster and of the workloads as this node sees it, for a system on trial: a
//! new one that is ready and harms etcd, or has no kubelet any more, must not stay.
//!
//! Invariants:
//! - Each change of etcd's term is a change of the value: a member that makes the others elect
//!   a leader again and again is never healthy for long.
//! - A cluster without a quorum is not healthy, and neither is one that gives no sign of life.
//! - The roles of the node say which workloads there are: one that was not started yet has a
//!   fault, too.
//! - A workload that has ended has a fault until it has been ready for a while: one that ends again
//!   and again is ready in between.
//!
//! What this module does not do: compare with the time before the update (`update::workload`).

use std::collections::BTreeMap;
use std::time::Duration;

use polis_proto::v1;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};

use polis_control::consensus::{Alarm, MemberStatus};
use polis_control::{cluster, consensus};
use polis_machine::update::ClusterHealth;
use polis_machine::update::workload::{Part, Workload};
use polis_runtime::event::Closed;
use polis_runtime::supervisor::Context;
use polis_runtime::supervisor::restart::HEALTHY_AFTER;
use polis_wire::node_roles::Role;
use polis_workload as workload;

/// How long etcd must serve without a change: it elects a leader in less, and a member that ends
/// again and again is seen.
const SETTLED: Duration = Duration::from_secs(10);

/// The same for a node without a member: longer than it takes until a node without an answer
/// of its leader is cut off.
const SETTLED_WITHOUT: Duration = Duration::from_secs(30);

/// Inputs and output. Cloned into every run; holds no progress.
#[derive(Clone, Debug)]
pub struct Service {
    /// This machine's state in its cluster.
    pub cluster: watch::Receiver<cluster::Status>,
    /// Its etcd member.
    pub consensus: watch::Receiver<consensus::Status>,
    /// The roles that the cluster gives to it; `None` before it knows them.
    pub roles: watch::Receiver<Option<v1::NodeRoles>>,
    /// Its parts of Kubernetes.
    pub workload: watch::Receiver<workload::Status>,
    /// The health of the cluster.
    pub health: watch::Sender<ClusterHealth>,
    /// The health of the workloads.
    pub parts: watch::Sender<Workload>,
}

impl Service {
    /// Runs until cancelled.
    ///
    /// # Errors
    ///
    /// [`Closed`] when an owner of an input ended.
    pub async fn run(mut self, ctx: Context) -> Result<(), Closed> {
        ctx.healthy();
        let mut ended = Ended::default();
        loop {
            let now = look(&self.cluster.borrow_and_update(), &self.consensus.borrow_and_update());
            replace(&self.health, now);
            let roles = *self.roles.borrow_and_update();
            let workload = self.workload.borrow_and_update().clone();
            ended.look(&workload, Instant::now());
            replace(&self.parts, parts(roles.as_ref(), &workload, &ended));
            let settled = ended.settles();
            let timer = async {
                match settled {
                    Some(at) => sleep_until(at).await,
                    None => std::future::pending().await,
                }
            };
            let changed = async {
                tokio::select! {
                    // Cancel-safe, all of them: they wait for event values or the time.
                    changed = self.cluster.changed() => changed.map_err(|_closed| "the cluster"),
                    changed = self.consensus.changed() => changed.map_err(|_closed| "etcd"),
                    changed = self.roles.changed() => changed.map_err(|_closed| "the roles"),
                    changed = self.workload.changed() => changed.map_err(|_closed| "the workload"),
                    () = timer => Ok(()),
                }
            };
            match ctx.until_cancelled(changed).await {
                Some(changed) => changed.map_err(Closed)?,
                None => return Ok(()),
            }
        }
    }
}

/// Sets an event value, which changes only if it is another one.
fn replace<T: PartialEq>(value: &watch::Sender<T>, now: T) {
    value.send_if_modified(|known| {
        let changed = *known != now;
        *known = now;
        changed
    });
}

/// Until the first look.
#[must_use]
pub fn unknown() -> ClusterHealth {
    let fault = Some("nothing is known of the cluster yet".to_owned());
    ClusterHealth { fault, ..ClusterHealth::default() }
}

fn look(cluster: &cluster::Status, consensus: &consensus::Status) -> ClusterHealth {
    let votes = cluster.roles.contains(&Role::ConsensusMember);
    let settled = if votes { SETTLED } else { SETTLED_WITHOUT };
    ClusterHealth { fault: fault(cluster, consensus), term: consensus.term, settled }
}

/// etcd first: a node whose member fails loses its cluster by it.
fn fault(cluster: &cluster::Status, consensus: &consensus::Status) -> Option<String> {
    if cluster.roles.contains(&Role::ConsensusMember) {
        if consensus.standing != MemberStatus::Voter {
            return Some(format!("the node's member of etcd is {}", consensus.standing.name()));
        }
        if consensus.leader.is_none() {
            return Some("etcd has no leader".to_owned());
        }
        if consensus.alarms.contains(&Alarm::Corrupt) {
            return Some(format!("etcd has the alarm {}", Alarm::Corrupt));
        }
    }
    let home = cluster.state == cluster::State::Home;
    (!home).then(|| format!("the node is {} and not home", cluster.state))
}

/// The parts that the roles ask for.
fn parts(roles: Option<&v1::NodeRoles>, status: &workload::Status, ended: &Ended) -> Workload {
    let part = |part: workload::Part| {
        let fault = status.fault(part).or_else(|| ended.fault(part));
        Part { name: part.name(), fault }
    };
    Workload {
        parts: roles.map(|roles| workload::Part::of(roles).map(part).collect()),
        api_server: roles.is_some_and(|roles| roles.kubernetes_controller.is_some()),
    }
}

/// The parts that have ended, until they have been ready for [`HEALTHY_AFTER`].
#[derive(Debug, Default)]
struct Ended(BTreeMap<workload::Part, End>);

/// The end of a part.
#[derive(Debug)]
struct End {
    cause: String,
    /// Since when it has been ready again.
    ready: Option<Instant>,
}

impl Ended {
    /// Takes up the ends that a status reports, and those of its parts that are ready again.
    fn look(&mut self, status: &workload::Status, now: Instant) {
        for (part, deaths) in &status.deaths {
            self.0.insert(*part, End { cause: deaths.cause.clone(), ready: None });
        }
        self.0.retain(|part, end| {
            if status.deaths.contains_key(part) {
                return true;
            }
            let since = *end.ready.get_or_insert(now);
            status.parts.contains_key(part) && now < since + HEALTHY_AFTER
        });
    }

    /// When the next of them has been ready for long enough.
    fn settles(&self) -> Option<Instant> {
        self.0.values().filter_map(|end| end.ready).map(|since| since + HEALTHY_AFTER).min()
    }

    fn fault(&self, part: workload::Part) -> Option<String> {
        let seconds = HEALTHY_AFTER.as_secs();
        let End { cause, .. } = self.0.get(&part)?;
        Some(format!("it has been ready for less than {seconds} s since its end: {cause}"))
    }
}

#[cfg(test)]
mod tests {
    use polis_control::consensus::MemberId;

    use super::*;

    #[test]
    fn the_roles_say_which_workloads_there_are_and_each_that_is_not_ready_has_a_fault() {
        use workload::PartState::{Failed, Ready, Starting};
        let failed = Failed { cause: "no root".to_owned() };
        let died = workload::Deaths { count: 2, cause: "exited with status 1".to_owned() };
        let mut status = workload::Status {
            parts: [
                (workload::Part::Containerd, failed),
                (workload::Part::Kubelet, Starting),
                (workload::Part::Dns, Ready),
                // Of a role that was taken away a moment ago.
                (workload::Part::ApiServer, Ready),
            ]
            .into(),
            deaths: [(workload::Part::Kubelet, died)].into(),
            ..workload::Status::default()
        };
        let ended = Ended::default();
        assert_eq!(parts(None, &status, &ended), Workload::default());
        let api_server = |role| parts(Some(&Role::record(&[role])), &status, &ended).api_server;
        assert!(api_server(Role::KubernetesController) && !api_server(Role::KubernetesWorker));
        let with = |roles: &[Role], status: &_| {
            parts(Some(&Role::record(roles)), status, &ended).parts.unwrap_or_default()
        };
        assert_eq!(with(&[Role::ConsensusMember], &status), []);
        let worker = with(&[Role::KubernetesWorker], &status);
        assert_eq!(worker.len(), workload::Part::WORKER.len() + 1, "with the mesh");
        let fault = |name| worker.iter().find(|part| part.name == name).unwrap().fault.as_deref();
        assert_eq!(fault("containerd"), Some("no root"));
        assert_eq!(fault("kubelet"), Some("exited with status 1"));
        assert_eq!(fault("csi"), Some("it is starting"), "nothing is known of it");
        assert_eq!(fault("dns"), None);
        status.unfit = Some("the image carries no Kubernetes".to_owned());
        let unfit = with(&[Role::KubernetesWorker, Role::KubernetesController], &status);
        assert!(unfit.iter().all(|part| part.fault == status.unfit));
    }

    #[tokio::test(start_paused = true)]
    async fn a_workload_that_has_ended_counts_once_it_has_been_ready_for_a_minute() {
        use workload::PartState::{Ready, Starting};
        let (ctx, handles) = Context::for_test();
        let worker = Role::record(&[Role::KubernetesWorker]);
        let all = workload::Part::of(&worker).map(|part| (part, Ready)).collect();
        let status = workload::Status { parts: all, ..workload::Status::default() };
        let (stack, workload) = watch::channel(status);
        let (_cluster, cluster) = watch::channel(cluster::Status::default());
        let (_consensus, consensus) = watch::channel(consensus::Status::default());
        let (_roles, roles) = watch::channel(Some(worker));
        let (health, parts) = (watch::Sender::new(unknown()), watch::Sender::default());
        let service = Service { cluster, consensus, roles, workload, health, parts };
        let mut seen = service.parts.subscribe();
        let mut kubelet = async || {
            seen.changed().await.unwrap();
            let parts = seen.borrow_and_update().parts.clone().unwrap();
            parts.into_iter().find(|part| part.name == "kubelet").unwrap().fault
        };
        let story = async {
            assert_eq!(kubelet().await, None, "nothing has ended yet");
            for _loop in 0..2 {
                let cause = "exited with status 1".to_owned();
                let died = workload::Deaths { count: 1, cause };
                stack.send_modify(|status| {
                    status.parts.insert(workload::Part::Kubelet, Starting);
                    status.deaths.insert(workload::Part::Kubelet, died);
                });
                assert_eq!(kubelet().await.as_deref(), Some("exited with status 1"));
                tokio::time::sleep(HEALTHY_AFTER).await;
                stack.send_modify(|status| {
                    status.parts.insert(workload::Part::Kubelet, Ready);
                    status.deaths.clear();
                });
                let lately = "it has been ready for less than 60 s since its end: exited with \
                              status 1";
                assert_eq!(kubelet().await.as_deref(), Some(lately));
            }
            let ready = Instant::now();
            assert_eq!(kubelet().await, None);
            assert!(ready.elapsed() >= HEALTHY_AFTER, "{:?}", ready.elapsed());
            handles.cancel().await;
        };
        let (ran, ()) = tokio::join!(service.run(ctx), story);
        assert_eq!(ran, Ok(()));
    }

    #[test]
    fn a_cluster_is_healthy_with_a_voter_that_has_a_leader_and_every_other_state_is_named() {
        let mut cluster = cluster::Status { state: cluster::State::Home, ..Default::default() };
        let mut consensus = consensus::Status::default();
        let healthy = |term, settled| ClusterHealth { fault: None, term, settled };
        assert_eq!(look(&cluster, &consensus), healthy(0, SETTLED_WITHOUT));
        cluster.roles = vec![Role::ConsensusMember];
        let fault = |cluster: &_, consensus: &_| fault(cluster, consensus).unwrap_or_default();
        assert_eq!(fault(&cluster, &consensus), "the node's member of etcd is starting");
        consensus.standing = MemberStatus::Voter;
        assert_eq!(fault(&cluster, &consensus), "etcd has no leader");
        (consensus.leader, consensus.term) = (Some(MemberId(1)), 3);
        assert_eq!(look(&cluster, &consensus), healthy(3, SETTLED));
        consensus.alarms = vec![Alarm::NoSpace];
        assert_eq!(fault(&cluster, &consensus), "", "an update changes nothing about that");
        consensus.alarms.push(Alarm::Corrupt);
        assert_eq!(fault(&cluster, &consensus), "etcd has the alarm CORRUPT");
        consensus.alarms.clear();
        cluster.state = cluster::State::Split;
        assert_eq!(fault(&cluster, &consensus), "the node is split and not home");
    }
}
