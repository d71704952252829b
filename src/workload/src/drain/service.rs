//! Carries orders out: cordons this node, evicts its pods, looks again, and uncordons it.
//!
//! Every pass reads what is there and does what is missing, so a pass that was cut off, a
//! restart of `node`, or a loss of power only means that the next one begins anew.

use std::time::Duration;

use http::Method;
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout_at};
use tracing::{debug, info, warn};

use super::pods::{self, Evicted, Pod};
use super::{Drains, Failure, Order, Progress, State, Unmanaged};
use crate::api::{Api, Error, JSON, MERGE_PATCH, Session};
use crate::parts::{Part, Parts, Status};
use polis_base::cause;
use polis_runtime::event::Closed;
use polis_runtime::lines::Lines;
use polis_runtime::supervisor::Context;
use polis_wire::identity::NodeId;

/// The mark of a Node that Polis has cordoned: no other is uncordoned.
const CORDONED: &str = "polis.internal/cordoned";

/// Between two looks. A budget that forbids an eviction changes when a pod has become ready
/// elsewhere, which takes seconds.
const LOOK: Duration = Duration::from_secs(2);

/// How long a drained node waits for its caller's next step before it takes pods again: a
/// role that was taken away is known here in less.
const GRACE: Duration = Duration::from_secs(10);

/// After a failed attempt to uncordon.
const RETRY: Duration = Duration::from_secs(5);

/// Pods in one answer, each of which may be tens of kilobytes.
const PAGE: usize = 50;

/// Carries the orders of [`Drains`] out. Cloned into every run; holds no progress.
#[derive(Clone, Debug)]
pub struct Service {
    /// The API server, asked as the kubelet of this node.
    pub(crate) api: Api,
    pub(crate) node: NodeId,
    pub(crate) drains: Drains,
    pub(crate) parts: Parts,
}

/// The finding of a pass.
#[derive(Debug)]
enum Look {
    /// No pod has to go any more.
    Clear,
    /// Nothing would replace these pods.
    Unmanaged(String),
    /// So many pods have to go, and why the first of them has not.
    Waits { pods: usize, cause: String },
}

impl Service {
    /// The drain of `node`, whose kubelet calls the API server as `api` says. It uncordons
    /// the node once `status` has the part [`Part::Node`] as ready.
    #[must_use]
    pub fn new(
        api: Api,
        node: NodeId,
        drains: Drains,
        status: watch::Sender<Status>,
        lines: Lines,
    ) -> Self {
        Self { api, node, drains, parts: Parts::new(status, lines) }
    }

    /// Runs until cancelled.
    ///
    /// # Errors
    ///
    /// [`Closed`] when the owner of an input ended.
    pub async fn run(self, ctx: Context) -> Result<(), Closed> {
        let mut orders = self.drains.order.subscribe();
        ctx.healthy();
        loop {
            let order = orders.borrow_and_update().clone();
            let work = async {
                match &order {
                    Some(order) => self.drain(order).await,
                    None => self.restore().await,
                }
                // The result holds until the next order.
                std::future::pending::<()>().await;
            };
            tokio::select! {
                () = ctx.cancelled() => return Ok(()),
                // Cancel-safe: it waits for an event value.
                changed = orders.changed() => changed.map_err(|_closed| Closed("the drains"))?,
                // Cancel-safe: every step may be repeated.
                () = Box::pin(work) => {}
            }
        }
    }

    async fn drain(&self, order: &Order) {
        let force = order.unmanaged == Unmanaged::Evict;
        info!(timeout = order.timeout.as_secs(), force, "this node is drained");
        let deadline = order.since + order.timeout;
        let mut silent: Option<Instant> = None;
        let (mut left, mut waits) = (0, "the list of its pods".to_owned());
        let mut held_up = None;
        loop {
            self.publish(order, State::Draining, left, &waits);
            match timeout_at(deadline, self.pass(order.unmanaged, &mut held_up)).await {
                Ok(Ok(Look::Clear)) => return self.publish(order, State::Drained, 0, ""),
                Ok(Ok(Look::Unmanaged(names))) => {
                    let cause = format!("no controller would replace {names}");
                    let state = State::Failed(Failure::Unmanaged);
                    return self.publish(order, state, left, &cause);
                }
                Ok(Ok(Look::Waits { pods, cause })) => {
                    silent = None;
                    (left, waits) = (pods, cause);
                }
                // A refusal is an answer: the deadline ends it, not the silence.
                Ok(Err(error @ Error::Refused { .. })) => {
                    silent = None;
                    waits = format!("an API server: {}", cause::line(&error));
                }
                Ok(Err(error)) => {
                    silent.get_or_insert_with(Instant::now);
                    waits = format!("an API server: {}", cause::line(&error));
                }
                // The last cause still holds.
                Err(_elapsed) => {}
            }
            let late = Instant::now() >= deadline;
            if let Some(since) = silent
                && (late || since.elapsed() >= order.silence)
            {
                let seconds = since.elapsed().as_secs();
                let cause = format!("no answer for {seconds} s from {waits}");
                warn!(cause, "this node is not drained");
                return self.publish(order, State::GivenUp, left, &cause);
            }
            if late {
                let state = if force { State::GivenUp } else { State::Failed(Failure::Late) };
                warn!(pods = left, cause = waits, "this node is not drained in time");
                return self.publish(order, state, left, &waits);
            }
            self.publish(order, State::Draining, left, &waits);
            sleep(LOOK).await;
        }
    }

    /// Looks at the pods once, and evicts those that have to go, up to one whose eviction has no
    /// answer: `held_up` is its `uid`, and the next pass begins behind it.
    async fn pass(&self, rule: Unmanaged, held_up: &mut Option<String>) -> Result<Look, Error> {
        let mut leaving = self.leaving(rule).await?;
        if let Some(names) = unmanaged(&leaving, rule) {
            return Ok(Look::Unmanaged(names));
        }
        if self.cordon().await? {
            // A pod may have been bound between the list and the cordon.
            leaving = self.leaving(rule).await?;
            if let Some(names) = unmanaged(&leaving, rule) {
                return Ok(Look::Unmanaged(names));
            }
        }
        let leaving = behind(leaving, held_up.take().as_deref());
        let mut held = None;
        for pod in leaving.iter().filter(|pod| !pod.ends) {
            let ended = self.evict(pod).await;
            let silent = matches!(ended, Err(Error::Silent { .. }));
            match tried(ended)? {
                Evicted::Yes => {}
                Evicted::NotYet(why) => {
                    held.get_or_insert_with(|| format!("{pod}: {why}"));
                }
            }
            // The next look shows whether the API server answers at all.
            if silent {
                *held_up = Some(pod.uid.clone());
                break;
            }
        }
        Ok(match leaving.is_empty() {
            true => Look::Clear,
            false => {
                let ends = || format!("the end of {}", pods::names(&leaving));
                Look::Waits { pods: leaving.len(), cause: held.unwrap_or_else(ends) }
            }
        })
    }

    /// The pods of this node that have to go.
    async fn leaving(&self, rule: Unmanaged) -> Result<Vec<Pod>, Error> {
        let path = format!("/api/v1/pods?fieldSelector=spec.nodeName%3D{}", self.node);
        let leaving = self.session().list(&path, JSON, PAGE, pods::leaving).await?;
        Ok(leave(leaving, rule))
    }

    /// Evicts a pod, which its disruption budget may forbid.
    async fn evict(&self, pod: &Pod) -> Result<Evicted, Error> {
        let Pod { namespace, name, uid, .. } = pod;
        let eviction = json!({
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"namespace": namespace, "name": name},
            "deleteOptions": {"preconditions": {"uid": uid}},
        });
        let path = format!("/api/v1/namespaces/{namespace}/pods/{name}/eviction");
        let answer = self.session().send(Method::POST, &path, JSON, &eviction).await?;
        Ok(pods::evicted(answer.status, &answer.body))
    }

    /// Cordons the node, unless somebody has. Returns whether it has become so now.
    async fn cordon(&self) -> Result<bool, Error> {
        let Some(object) = self.object().await? else { return Ok(false) };
        if object["spec"]["unschedulable"] == true {
            return Ok(false);
        }
        self.change(&json!({
            "metadata": {"annotations": {CORDONED: "true"}},
            "spec": {"unschedulable": true},
        }))
        .await?;
        info!("this node is cordoned");
        Ok(true)
    }

    /// Undoes the cordon of an earlier drain, of this boot or of one before.
    async fn restore(&self) {
        if matches!(self.drains.state(), State::Drained | State::GivenUp) {
            sleep(GRACE).await;
        }
        while self.parts.ready(Part::Node).await.is_ok() {
            match self.uncordon().await {
                Ok(()) => break,
                Err(error) => {
                    debug!(error = &error as &dyn std::error::Error, "cannot uncordon this node");
                }
            }
            sleep(RETRY).await;
        }
        self.drains.progress.send_replace(Progress::default());
        self.parts.drain(State::None, "");
    }

    async fn uncordon(&self) -> Result<(), Error> {
        let Some(object) = self.object().await? else { return Ok(()) };
        if !object["metadata"]["annotations"][CORDONED].is_string() {
            return Ok(());
        }
        self.change(&json!({
            "metadata": {"annotations": {CORDONED: null}},
            "spec": {"unschedulable": null},
        }))
        .await?;
        info!("this node is uncordoned");
        Ok(())
    }

    /// The Node of this node; `None` while there is none.
    async fn object(&self) -> Result<Option<Value>, Error> {
        self.session().read(&self.path()).await
    }

    async fn change(&self, change: &Value) -> Result<(), Error> {
        let answer = self.session().send(Method::PATCH, &self.path(), MERGE_PATCH, change).await?;
        self.api.succeeded(&answer)
    }

    /// A connection of its own: a drain asks rarely.
    fn session(&self) -> Session {
        Session::new(&self.api)
    }

    fn path(&self) -> String {
        format!("/api/v1/nodes/{}", self.node)
    }

    fn publish(&self, order: &Order, state: State, pods: usize, cause: &str) {
        let progress = Progress { number: order.number, state, pods, cause: cause.to_owned() };
        self.drains.progress.send_if_modified(|known| {
            let changed = *known != progress;
            known.clone_from(&progress);
            changed
        });
        self.parts.drain(state, cause);
    }
}

/// The outcome of an eviction. One without an answer does not mean that the API server is lost,
/// which has answered before: an admission webhook may hold it up for longer than a request may
/// take.
fn tried(ended: Result<Evicted, Error>) -> Result<Evicted, Error> {
    match ended {
        Err(error @ Error::Silent { .. }) => Ok(Evicted::NotYet(cause::line(&error))),
        ended => ended,
    }
}

/// The pods in the order of their evictions: those behind the one that held up the last pass come
/// first, so that no webhook keeps them until the deadline.
fn behind(mut leaving: Vec<Pod>, held_up: Option<&str>) -> Vec<Pod> {
    let at = leaving.iter().position(|pod| held_up == Some(pod.uid.as_str()));
    leaving.rotate_left(at.map_or(0, |at| at + 1));
    leaving
}

/// Without the pods that stay.
fn leave(mut leaving: Vec<Pod>, rule: Unmanaged) -> Vec<Pod> {
    leaving.retain(|pod| rule != Unmanaged::Leave || !pod.unmanaged);
    leaving
}

/// The pods that nothing would replace, where they may not be evicted.
fn unmanaged(leaving: &[Pod], rule: Unmanaged) -> Option<String> {
    let names = pods::names(leaving.iter().filter(|pod| pod.unmanaged));
    (rule == Unmanaged::Refuse && !names.is_empty()).then_some(names)
}

#[cfg(test)]
mod tests {
    use polis_base::files;

    use super::*;

    fn pod(name: &str, unmanaged: bool) -> Pod {
        Pod {
            namespace: "default".to_owned(),
            name: name.to_owned(),
            uid: format!("uid of {name}"),
            ends: false,
            unmanaged,
        }
    }

    #[test]
    fn before_an_end_at_the_machine_pods_that_nothing_replaces_stay_and_hold_up_nothing() {
        let both = || vec![pod("alone", true), pod("replaced", false)];
        for (rule, left, named) in [
            (Unmanaged::Refuse, 2, true),
            (Unmanaged::Evict, 2, false),
            (Unmanaged::Leave, 1, false),
        ] {
            let leaving = leave(both(), rule);
            assert_eq!(leaving.len(), left, "{rule:?}");
            assert_eq!(unmanaged(&leaving, rule).is_some(), named, "{rule:?}");
        }
    }

    #[test]
    fn an_eviction_that_a_webhook_holds_up_is_waited_for_and_a_lost_api_server_is_not() {
        let address = ([127, 0, 0, 1], 1).into();
        let Ok(Evicted::NotYet(why)) = tried(Err(Error::Silent { address })) else {
            panic!("it was taken for an API server that is gone")
        };
        assert!(why.contains("127.0.0.1:1"), "{why}");
        let refused = std::io::ErrorKind::ConnectionRefused.into();
        tried(Err(Error::Connect { address, source: refused })).unwrap_err();
        assert_eq!(tried(Ok(Evicted::Yes)).unwrap(), Evicted::Yes);
    }

    #[test]
    fn a_pod_whose_eviction_is_held_up_keeps_no_other_one() {
        let order = |held_up: Option<&str>| {
            let leaving = ["a", "b", "c"].map(|name| pod(name, false)).into();
            behind(leaving, held_up).into_iter().map(|pod| pod.name).collect::<String>()
        };
        assert_eq!(order(None), "abc");
        assert_eq!(order(Some("uid of a")), "bca");
        assert_eq!(order(Some("uid of c")), "abc");
        assert_eq!(order(Some("uid of one that is gone")), "abc");
    }

    #[tokio::test]
    async fn a_drain_without_an_api_server_is_given_up_and_says_so() {
        let base = tempfile::tempdir().unwrap();
        let root = files::Root::at(base.path());
        let api = Api {
            address: ([127, 0, 0, 1], 1).into(),
            ca: root.ephemeral.kubernetes.ca,
            client: None,
        };
        let (lines, _written) = Lines::channel();
        let drains = Drains::default();
        let node = NodeId::from_public_key(&[7; 32]);
        let service = Service::new(api, node, drains.clone(), watch::Sender::default(), lines);
        let (ctx, handles) = Context::for_test();
        let held = drains.begin(Duration::from_secs(1), false);
        let caller = async {
            let mut seen = None;
            let last = loop {
                let next = held.next(seen.as_ref()).await.unwrap();
                if next.state != State::Draining {
                    break next;
                }
                seen = Some(next);
            };
            handles.cancel().await;
            last
        };
        let (ended, last) = tokio::join!(service.run(ctx), caller);
        ended.unwrap();
        assert_eq!(last.state, State::GivenUp);
        assert!(last.cause.contains("from an API server: cannot use"), "{}", last.cause);
    }
}
