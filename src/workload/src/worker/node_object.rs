//! The Node object of this node: whether it exists and is Ready, and the label that says
//! whether the machine runs pods of the runtime class `gvisor`.
//!
//! kubelet makes the object and reports to it. The node reads it with kubelet's certificate,
//! which may read no other, and sets the label with it: kubelet itself sets labels once in
//! the life of the object, and another image may have another answer.

use std::path::{Path, PathBuf};
use std::time::Duration;

use http::Method;
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::time::{Instant, sleep};
use tracing::{debug, warn};

use super::random;
use crate::api::{Api, Error, MERGE_PATCH, Session, parse};
use crate::parts::{API_STARTS, Part, PartState, Parts};
use crate::runtime::gvisor;
use polis_base::cause;
use polis_base::sys::clock;
use polis_runtime::event::{Closed, until};
use polis_runtime::supervisor::restart::{History, Verdict};
use polis_runtime::supervisor::{Context, Policy, blocking};
use polis_wire::identity::NodeId;

/// Between two looks, until the node is ready and then, while the API server answers.
const LOOK_STARTING: Duration = Duration::from_secs(1);
const LOOK_READY: Duration = Duration::from_secs(10);

/// Runs until cancelled.
#[derive(Clone, Debug)]
pub(super) struct Service {
    /// The API server, asked as this node.
    pub(super) api: Api,
    pub(super) node: NodeId,
    /// Where the programs of the image are.
    pub(super) programs: PathBuf,
    /// Whether the object exists, by the last answer.
    pub(super) registered: watch::Sender<bool>,
    pub(super) parts: Parts,
}

/// The kernel's own account of itself.
const PROC: &str = "/proc";

impl Service {
    pub(super) async fn run(self, ctx: Context) -> Result<(), Closed> {
        let programs = self.programs.clone();
        let lacking = blocking(move || gvisor::lacking(Path::new(PROC), &programs)).await;
        self.parts.gvisor(&lacking);
        if !lacking.is_empty() {
            let cause = lacking.join("; ");
            warn!(%cause, "this machine runs no pods of the runtime class gvisor");
        }
        let kubelet = self.parts.ready(Part::Kubelet);
        let Some(kubelet) = ctx.until_cancelled(kubelet).await else { return Ok(()) };
        kubelet?;
        ctx.healthy();
        let mut look = Look { gvisor: lacking.is_empty(), refused: cause::Last::default() };
        let (begun, mut been, mut pauses) = (Instant::now(), false, Pauses::default());
        loop {
            let looked = ctx.until_cancelled(self.look(&mut look)).await;
            let Some(looked) = looked else { return Ok(()) };
            been |= matches!(looked, Ok(PartState::Ready));
            let wait = match &looked {
                Ok(PartState::Ready) => LOOK_READY,
                Ok(PartState::Starting | PartState::Failed { .. } | PartState::Stopped) => {
                    LOOK_STARTING
                }
                Err(error) => pauses.after(error),
            };
            if looked.is_ok() {
                pauses = Pauses::default();
            }
            let failed = |error: Error| PartState::Failed { cause: cause::line(&error) };
            match looked.unwrap_or_else(failed) {
                // A node that joins is not ready for a while, which is not a failure yet.
                PartState::Failed { cause } if !been && begun.elapsed() < API_STARTS => {
                    self.parts.wait(Part::Node, cause);
                }
                state => self.parts.set(Part::Node, state),
            }
            if ctx.until_cancelled(sleep(wait)).await.is_none() {
                return Ok(());
            }
        }
    }

    /// The state of the Node object; fails where the API server does not answer the question.
    async fn look(&self, look: &mut Look) -> Result<PartState, Error> {
        let answer = self.api.get(&path(self.node)).await?;
        if asks_for_rest(answer.status) {
            return Err(Error::refused(self.api.address, answer.status, &answer.body));
        }
        if let Some(is) = registered(answer.status) {
            self.registered.send_if_modified(|known| std::mem::replace(known, is) != is);
        }
        let object = parse(&answer.body).unwrap_or_default();
        if answer.status == 200
            && let Some(patch) = label(&object, look.gvisor)
        {
            match self.patch(&patch).await {
                Ok(()) => look.refused.clear(),
                Err(error) => {
                    if look.refused.is_new(&cause::line(&error)) {
                        warn!(error = &error as &dyn std::error::Error, "cannot label the Node");
                    }
                }
            }
        }
        Ok(state(answer.status, &object))
    }

    async fn patch(&self, patch: &Value) -> Result<(), Error> {
        let path = path(self.node);
        let sent = Session::new(&self.api).send(Method::PATCH, &path, MERGE_PATCH, patch).await?;
        self.api.succeeded(&sent)
    }
}

/// The knowledge of a run about the machine, and its last report.
struct Look {
    /// Whether the machine lacks nothing for gVisor.
    gvisor: bool,
    /// Why the label was refused.
    refused: cause::Last,
}

/// The change that gives the Node its label, or takes it; `None` where it is right.
fn label(object: &Value, gvisor: bool) -> Option<Value> {
    let has = object["metadata"]["labels"][gvisor::LABEL].as_str();
    let wanted = gvisor.then_some(gvisor::HERE);
    // The UID: another object of this name is another registration.
    let uid = &object["metadata"]["uid"];
    (has != wanted).then(|| json!({"metadata": {"uid": uid, "labels": {gvisor::LABEL: wanted}}}))
}

/// The pauses after tries at an API server that does not answer: each is longer than the one
/// before, up to one and a half times [`LOOK_READY`], and different on each node. A server that
/// recovers is kept from its own work by every TLS handshake.
#[derive(Debug, Default)]
struct Pauses(History);

impl Pauses {
    /// The pause after a try that ended so. A refusal is an answer, and what it refuses may be
    /// there in a moment.
    fn after(&mut self, error: &Error) -> Duration {
        if matches!(error, Error::Refused { status, .. } if !asks_for_rest(*status)) {
            *self = Self::default();
            return LOOK_STARTING;
        }
        let random = random();
        // The bound varies like every other pause.
        let longest = LOOK_READY.mul_f64(0.5 + random);
        match self.0.died(Policy::forever(), clock::uptime(), None, random) {
            Verdict::Restart(pause) => pause.min(longest),
            Verdict::GiveUp(_) => longest,
        }
    }
}

/// Whether a server that answers so has too much to do, or cannot do it now.
fn asks_for_rest(status: u16) -> bool {
    status == 429 || status >= 500
}

/// Waits until the API server lets its caller read what is at `path`, and reports why it does
/// not yet. An API server of this node that becomes ready is asked at once. Cancel-safe.
pub(super) async fn readable(api: &Api, path: &str, parts: &Parts, report: impl Fn(&Error)) {
    let mut pauses = Pauses::default();
    loop {
        let Err(error) = api.check(path).await else { return };
        debug!(error = &error as &dyn std::error::Error, "{path} is not readable");
        report(&error);
        let own = parts.state(Part::ApiServer);
        let starts = own.is_some_and(|own| own != PartState::Ready);
        let absent = is_unregistered(&error, parts.state(Part::Kubelet).as_ref());
        let usual = pauses.after(&error);
        let pause = if absent { LOOK_READY } else { usual };
        tokio::select! {
            // Cancel-safe, all: they wait for the time or for a value.
            () = sleep(pause) => {}
            _ready = parts.ready(Part::ApiServer), if starts => {}
            _ready = parts.ready(Part::Kubelet), if absent => {}
        }
    }
}

/// Whether an object is not there, and kubelet, which would make it, does not run yet.
fn is_unregistered(error: &Error, kubelet: Option<&PartState>) -> bool {
    matches!(error, Error::Refused { status: 404, .. }) && kubelet != Some(&PartState::Ready)
}

/// Whether the Node exists, if an answer with this status says so.
fn registered(status: u16) -> Option<bool> {
    match status {
        200 => Some(true),
        404 => Some(false),
        _ => None,
    }
}

/// Waits until the Node was registered and has been deleted. Cancel-safe.
///
/// # Errors
///
/// [`Closed`] when the owner of the value is gone.
pub(super) async fn lost(mut registered: watch::Receiver<bool>) -> Result<(), Closed> {
    for is in [true, false] {
        until(&mut registered, "the Node object", |now| (*now == is).then_some(())).await?;
    }
    Ok(())
}

fn path(node: NodeId) -> String {
    format!("/api/v1/nodes/{node}")
}

/// The state of the Node object in an answer.
fn state(status: u16, object: &Value) -> PartState {
    let failed = |cause: &str| PartState::Failed { cause: cause.to_owned() };
    if status != 200 {
        return failed(&format!("the API server answers {status} for this node"));
    }
    let conditions = object["status"]["conditions"].as_array();
    let ready = conditions.into_iter().flatten().find(|one| one["type"] == "Ready");
    match ready {
        Some(ready) if ready["status"] == "True" => PartState::Ready,
        Some(ready) => failed(ready["message"].as_str().unwrap_or("the node is not ready")),
        None => failed("kubelet has not reported yet"),
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;
    use polis_base::files::Root;
    use tokio::time::timeout;

    use super::*;
    use crate::parts::Status;

    /// The service of a worker whose kubelet is ready, and whose API server has no certificate
    /// yet. No program of gVisor is in the image.
    fn service(base: &Path, ctx: &Context) -> (Service, watch::Receiver<Status>) {
        let status = watch::Sender::new(Status::default());
        let seen = status.subscribe();
        let parts = Parts::new(status, ctx.lines().clone());
        parts.expect(&[Part::Kubelet, Part::Node]);
        parts.set(Part::Kubelet, PartState::Ready);
        let ca = Root::at(base).ephemeral.kubernetes.worker_ca;
        let api = Api { address: ([127, 0, 0, 1], 1).into(), ca, client: None };
        let node = NodeId::from_public_key(&[7; 32]);
        let registered = watch::Sender::default();
        (Service { api, node, programs: base.to_owned(), registered, parts }, seen)
    }

    #[tokio::test(start_paused = true)]
    async fn a_node_that_joins_says_why_it_is_not_ready_and_fails_after_a_while() {
        let base = tempfile::tempdir().unwrap();
        let (ctx, handles) = Context::for_test();
        let (service, mut seen) = service(base.path(), &ctx);
        let story = async {
            let begun = Instant::now();
            let says = |why: &str| why.contains("/worker-ca.crt");
            let waits =
                |status: &Status| status.waits.get(&Part::Node).is_some_and(|why| says(why));
            drop(timeout(API_STARTS, seen.wait_for(waits)).await.unwrap().unwrap());
            assert_eq!(seen.borrow().parts[&Part::Node], PartState::Starting);
            let failed = |status: &Status| match &status.parts[&Part::Node] {
                PartState::Failed { cause } => says(cause),
                PartState::Starting | PartState::Ready | PartState::Stopped => false,
            };
            drop(timeout(2 * API_STARTS, seen.wait_for(failed)).await.unwrap().unwrap());
            assert!(begun.elapsed() >= API_STARTS);
            handles.cancel().await;
        };
        let (ended, ()) = tokio::join!(service.run(ctx), story);
        ended.unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn a_machine_without_gvisor_says_so_once_and_takes_it_back_with_the_role() {
        let base = tempfile::tempdir().unwrap();
        let (ctx, mut handles) = Context::for_test();
        let (service, mut seen) = service(base.path(), &ctx);
        let parts = service.parts.clone();
        let story = async {
            drop(seen.wait_for(|status| status.gvisor.is_some()).await.unwrap());
            handles.cancel().await;
        };
        let (ended, ()) = tokio::join!(service.clone().run(ctx.clone()), story);
        ended.unwrap();
        // The supervisor starts it again: it looks, and then its run ends at once.
        service.run(ctx).await.unwrap();
        parts.none();
        let lines = handles.take_lines();
        let of_gvisor: Vec<_> = lines.iter().filter(|line| line.contains("part=gvisor")).collect();
        let [failed, stopped] = &of_gvisor[..] else { panic!("{lines:?}") };
        let cause = "part=gvisor state=failed cause=\"the image has no program runsc;";
        assert!(failed.contains(cause), "{failed}");
        assert!(stopped.contains("part=gvisor state=stopped"), "{stopped}");
    }

    #[tokio::test(start_paused = true)]
    async fn an_api_server_that_does_not_answer_is_asked_less_and_less_often() {
        let base = tempfile::tempdir().unwrap();
        let (ctx, _handles) = Context::for_test();
        let (Service { api, parts, .. }, _seen) = service(base.path(), &ctx);
        let tries = std::cell::Cell::new(0_u32);
        let count = |_why: &Error| tries.set(tries.get() + 1);
        let time = Duration::from_secs(600);
        timeout(time, readable(&api, "/api", &parts, count)).await.unwrap_err();
        // With a second between them they would be 600.
        assert!((40..130).contains(&tries.get()), "{}", tries.get());
        // One that starts on this node is asked once it is ready.
        parts.set(Part::ApiServer, PartState::Starting);
        tries.set(0);
        let story = async {
            sleep(time).await;
            let before = tries.get();
            parts.set(Part::ApiServer, PartState::Ready);
            sleep(Duration::from_millis(1)).await;
            assert_eq!(tries.get(), before + 1);
        };
        tokio::select! {
            () = readable(&api, "/api", &parts, count) => panic!("nothing is readable"),
            () = story => {}
        }
    }

    #[test]
    fn only_a_server_that_cannot_answer_is_left_alone_for_longer_and_longer() {
        let address = ([127, 0, 0, 1], 6445).into();
        let mut pauses = Pauses::default();
        for status in [401, 403, 404] {
            assert_eq!(pauses.after(&Error::refused(address, status, b"")), LOOK_STARTING);
        }
        let longest = LOOK_READY.mul_f64(1.5);
        for status in [429, 500, 503] {
            let mut pauses = Pauses::default();
            for _try in 0..20 {
                assert!(pauses.after(&Error::refused(address, status, b"")) <= longest);
            }
            assert!(pauses.after(&Error::Silent { address }) >= LOOK_READY / 2, "{status}");
        }
    }

    #[test]
    fn a_node_is_not_asked_for_every_second_before_kubelet_has_made_it() {
        let address = ([127, 0, 0, 1], 6445).into();
        let absent = Error::refused(address, 404, b"");
        assert!(is_unregistered(&absent, Some(&PartState::Starting)));
        assert!(is_unregistered(&absent, None));
        // It is there in a moment.
        assert!(!is_unregistered(&absent, Some(&PartState::Ready)));
        // The rights of a new worker do not wait for its kubelet.
        let forbidden = Error::refused(address, 403, b"");
        assert!(!is_unregistered(&forbidden, Some(&PartState::Starting)));
    }

    #[tokio::test]
    async fn a_node_is_lost_once_it_was_there_and_an_answer_says_that_it_is_not() {
        let (known, registered) = watch::channel(false);
        let mut lost = std::pin::pin!(lost(registered));
        for (status, is_lost) in [(404, false), (200, false), (503, false), (404, true)] {
            if let Some(is) = super::registered(status) {
                known.send_replace(is);
            }
            let ended = lost.as_mut().now_or_never();
            assert_eq!(ended, is_lost.then_some(Ok(())), "{status}");
        }
    }

    fn said(status: u16, body: &str) -> PartState {
        state(status, &serde_json::from_str(body).unwrap_or_default())
    }

    #[test]
    fn the_label_says_whether_the_machine_runs_pods_of_gvisor() {
        let node = |labels: Value| json!({"metadata": {"uid": "u", "labels": labels}});
        let patch = |value: Value| {
            let labels = json!({"polis.internal/gvisor": value});
            Some(json!({"metadata": {"uid": "u", "labels": labels}}))
        };
        let here = json!({"polis.internal/gvisor": "true", "mine": "x"});
        assert_eq!(label(&node(json!({"mine": "x"})), true), patch(json!("true")));
        assert_eq!(label(&node(here.clone()), true), None);
        // Another image: the label of the former one is taken back.
        assert_eq!(label(&node(here), false), patch(Value::Null));
        assert_eq!(label(&node(Value::Null), false), None);
        let other = json!({"polis.internal/gvisor": "perhaps"});
        assert_eq!(label(&node(other), true), patch(json!("true")));
    }

    #[test]
    fn a_node_is_ready_when_its_condition_says_so() {
        let object = |status: &str| {
            format!(
                r#"{{"status":{{"conditions":[{{"type":"DiskPressure","status":"False"}},
                   {{"type":"Ready","status":"{status}","message":"no network"}}]}}}}"#
            )
        };
        let failed = |cause: &str| PartState::Failed { cause: cause.to_owned() };
        assert_eq!(said(200, &object("True")), PartState::Ready);
        assert_eq!(said(200, &object("False")), failed("no network"));
        assert_eq!(said(200, &object("Unknown")), failed("no network"));
        assert_eq!(said(200, "{}"), failed("kubelet has not reported yet"));
        assert_eq!(said(200, "noise"), failed("kubelet has not reported yet"));
        assert_eq!(said(404, ""), failed("the API server answers 404 for this node"));
    }
}
