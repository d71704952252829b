//! The reconciler: applies the cluster's own objects and keeps the Node objects as the
//! records of the nodes want them.
//!
//! ```text
//! every hour ------------------------------> every object is applied
//! one was refused, 2 s to 5 minutes ago ---> every object is applied again
//! one timed out or was 503, 2 to 30 s ago -> the same
//! one has failed, API server ready again --> the same, at once
//!
//! every 30 seconds ------------------------> former authorities leave what aggregated APIs trust
//! workers, their roles or names change, ---> rights of the workers, labels and taints, Nodes
//!   a worker serves, every 30 seconds         without a worker are deleted
//! this has failed, 2 to 30 s ago ----------> the same; at once where workers, their roles or
//!                                            names have changed
//! ```
//!
//! The reconciler reads the bindings of the workers, and applies those that differ: the audit log
//! has a line for each request to apply one, and its size is bounded.
//!
//! The objects and the records have a loop each. That of the records begins after the first attempt
//! on the objects, as among these are the policies that restrict the rights of workers.
//!
//! Every controller does so. To apply the same object twice changes nothing, so they need no
//! leader among them. The part about nodes waits while no leader of the cluster reports the
//! records: the rights and Nodes of the past stay.
//!
//! The API server may refuse an object for as long as an owner has another one of its name, or
//! an admission webhook of theirs does not answer. The part is *failed* then, with the object and
//! what to do about it.
//!
//! Invariants:
//! - A refused object holds up neither the others, nor the rights of workers, nor the programs
//!   that wait for the reconciler: without a scheduler, the pod of that webhook would never run.
//! - A webhook that hangs at each object holds up the rights and the programs for [`TRIED_MAX`]
//!   once, and no new worker after that.
//!
//! What this module does not do: remove other objects that a former version applied.
//! There are none yet.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use polis_proto::v1;
use rustls::pki_types::CertificateDer;
use serde_json::Value;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};
use tracing::{debug, info};

use super::api::{self, JSON, METADATA, Session};
use super::nodes::{self, Action};
use super::objects::{self, Object};
use super::parts::{Part, PartState, Parts};
use super::taints;
use polis_base::cause;
use polis_base::files::File;
use polis_runtime::event::{Closed, until};
use polis_runtime::supervisor::{Context, blocking};
use polis_wire::identity::NodeId;
use polis_wire::node_roles::Nodes;
use polis_wire::pki;

/// The delay after which a foreign change of an object is undone at the latest.
const EVERY: Duration = Duration::from_secs(60 * 60);

/// The same for a Node: an object of a removed worker must not stay.
const NODES_EVERY: Duration = Duration::from_secs(30);

/// Between two passes, whatever changes: a leader reports each change by itself.
const SPACING: Duration = Duration::from_secs(1);

/// After the first failure: the API server may just be starting again. Each further one doubles the
/// pause, up to a bound that depends on the failure.
const RETRY: Duration = Duration::from_secs(2);

/// The longest pause after failures that end without a person: etcd holds an election, or the API
/// server has too much to do.
const PASSING_MAX: Duration = Duration::from_secs(30);

/// The longest pause after refusals. A person has to end their reason, and sees within this that
/// it has ended.
const REFUSED_MAX: Duration = Duration::from_secs(5 * 60);

/// How long the first attempt on the objects may hold up what comes after it. The API server waits
/// for a webhook that hangs for ten seconds and longer, at each object.
const TRIED_MAX: Duration = Duration::from_secs(30);

/// Between two looks at whether the API server is ready. One that is not is checked twice a second.
const LOOK: Duration = Duration::from_millis(250);

/// How often a pass writes the taints of a Node that others change at the same time, such as the
/// other controllers; the next pass tries again.
const TAINT_ATTEMPTS: usize = 3;

/// Objects in one answer: the metadata of a Node is a few kilobytes, most of it who set which
/// field, and a binding names each worker.
const PAGE: usize = 500;

/// Whom servers of aggregated APIs trust. Each API server adds what it trusts itself, and removes
/// only what has ended.
const TRUST: &str = "/api/v1/namespaces/kube-system/configmaps/extension-apiserver-authentication";
/// Its values with certificates in PEM: the authorities of components, and those of proxies.
const AUTHORITIES: [&str; 2] = ["client-ca-file", "requestheader-client-ca-file"];
/// How long it has an authority that this node does not trust before it is deleted, for the first
/// time or again. An API server reads its files again after a minute at the latest, and until then
/// writes a former authority back; another controller may have followed a rotation before this one.
const TRUST_PAUSE: Duration = Duration::from_secs(60);

/// Why a step of a pass failed.
#[derive(Debug, thiserror::Error)]
enum Error {
    /// One of the cluster's own objects is not applied.
    #[error("cannot apply {path}{}", remedy(source))]
    Apply { path: String, source: api::Error },
    /// A Node is not labelled.
    #[error("cannot label {path}")]
    Label { path: String, source: api::Error },
    /// A Node does not have the taints of its record.
    #[error("cannot set the taints of {path}")]
    Taint { path: String, source: api::Error },
    /// Another request.
    #[error(transparent)]
    Api(#[from] api::Error),
}

impl Error {
    /// The error of the request.
    fn of_api(&self) -> &api::Error {
        match self {
            Self::Apply { source, .. }
            | Self::Label { source, .. }
            | Self::Taint { source, .. }
            | Self::Api(source) => source,
        }
    }

    /// Whether the API server took the request and did not carry it out, which says nothing of
    /// other requests.
    fn is_refusal(&self) -> bool {
        match self.of_api() {
            // It may wait for a webhook longer than a request may take.
            api::Error::Refused { .. } | api::Error::Silent { .. } => true,
            api::Error::Credentials { .. }
            | api::Error::Connect { .. }
            | api::Error::Http { .. }
            | api::Error::Long { .. } => false,
        }
    }

    /// The longest pause after it.
    fn pause_max(&self) -> Duration {
        match self.of_api() {
            // 500 is the answer for a webhook that fails.
            api::Error::Refused { status: 408 | 429 | 501..=599, .. }
            | api::Error::Silent { .. } => PASSING_MAX,
            api::Error::Refused { .. } => REFUSED_MAX,
            api::Error::Credentials { .. }
            | api::Error::Connect { .. }
            | api::Error::Http { .. }
            | api::Error::Long { .. } => RETRY,
        }
    }
}

/// The failure after which objects are applied again sooner; of two alike, the first.
fn sooner(before: Result<(), Error>, error: Error) -> Error {
    match before {
        Err(first) if first.pause_max() <= error.pause_max() => first,
        Ok(()) | Err(_) => error,
    }
}

/// The next step for an owner whose cluster refuses an object.
fn remedy(error: &api::Error) -> &'static str {
    match error {
        // An object of this name has another value of a field that never changes.
        api::Error::Refused { status: 422, .. } => "; delete it, and it is made again",
        api::Error::Refused { .. } | api::Error::Silent { .. } => {
            "; if this stays, look for an admission webhook or policy that refuses it"
        }
        api::Error::Credentials { .. }
        | api::Error::Connect { .. }
        | api::Error::Http { .. }
        | api::Error::Long { .. } => "",
    }
}

/// The requests of the reconciler. The node uses [`Session`].
pub(super) trait Server: Send + Sync {
    /// Applies an object.
    fn apply(&self, object: &Object) -> impl Future<Output = Result<(), api::Error>> + Send;

    /// Reads an object; `None` if there is none.
    fn read(&self, path: &str) -> impl Future<Output = Result<Option<Value>, api::Error>> + Send;

    /// Reads the objects of a list in this form.
    fn list(
        &self,
        path: &str,
        accept: &str,
    ) -> impl Future<Output = Result<Vec<Value>, api::Error>> + Send;

    /// Changes an object by a merge patch, if it still has the UID and the version in it. Returns
    /// whether it was changed.
    fn merge(
        &self,
        path: &str,
        patch: &Value,
    ) -> impl Future<Output = Result<bool, api::Error>> + Send;

    /// Deletes an object, if it still has this UID and this version. Returns whether it was
    /// deleted.
    fn delete(
        &self,
        path: &str,
        uid: &str,
        version: &str,
    ) -> impl Future<Output = Result<bool, api::Error>> + Send;

    /// A pass has ended.
    fn rest(&self);
}

impl Server for Session {
    async fn apply(&self, object: &Object) -> Result<(), api::Error> {
        Self::apply(self, object).await
    }

    async fn read(&self, path: &str) -> Result<Option<Value>, api::Error> {
        Self::read(self, path).await
    }

    async fn list(&self, path: &str, accept: &str) -> Result<Vec<Value>, api::Error> {
        Self::list(self, path, accept, PAGE, |object| Some(object.clone())).await
    }

    async fn merge(&self, path: &str, patch: &Value) -> Result<bool, api::Error> {
        Self::merge(self, path, patch).await
    }

    async fn delete(&self, path: &str, uid: &str, version: &str) -> Result<bool, api::Error> {
        Self::delete(self, path, uid, version).await
    }

    fn rest(&self) {
        self.close();
    }
}

/// Runs until cancelled.
#[derive(Clone, Debug)]
pub(super) struct Service<S> {
    /// The client for the API server, with the rights of `system:masters`.
    pub(super) api: S,
    /// The authorities of components.
    pub(super) ca: File,
    /// The authorities of proxies that name a user.
    pub(super) front_proxy_ca: File,
    /// This node.
    pub(super) node: NodeId,
    /// Every node of the cluster.
    pub(super) nodes: watch::Receiver<Option<Arc<Nodes>>>,
    /// Whether the API server was asked for every object once, whatever it answered, or has needed
    /// longer than [`TRIED_MAX`] for that.
    pub(super) tried: watch::Sender<bool>,
    pub(super) parts: Parts,
}

/// How the last attempt of each loop ended; `None` before its first.
#[derive(Debug, Default)]
struct Ends {
    /// The cluster's own objects.
    objects: Option<Result<(), String>>,
    /// What follows the records of the nodes, and the trust in authorities.
    records: Option<Result<(), String>>,
}

impl Ends {
    /// The state of the part; `None` before the end of an attempt on the objects. The programs that
    /// wait for that see the part ready first, so it does not wait for the other loop.
    fn state(&self) -> Option<PartState> {
        match (&self.objects, &self.records) {
            (Some(Err(cause)), _) | (_, Some(Err(cause))) => {
                Some(PartState::Failed { cause: cause.clone() })
            }
            (Some(Ok(())), _) => Some(PartState::Ready),
            (None, _) => None,
        }
    }
}

/// The attempts of one loop.
#[derive(Debug, Default)]
struct Attempts {
    /// The pause after the last one, if it failed.
    pause: Option<Duration>,
}

impl Attempts {
    /// Records the end of one; a failure becomes its cause.
    fn ended(&mut self, ended: Result<(), Error>) -> Result<(), String> {
        let last = self.pause.take();
        ended.map_err(|error| {
            let pause = last.map_or(RETRY, |last| (last * 2).min(error.pause_max()));
            debug!(error = &error as &dyn std::error::Error, ?pause, "an attempt failed");
            self.pause = Some(pause);
            cause::line(&error)
        })
    }
}

/// Whether the map lists an authority that is not in `known`.
fn has_others(map: &Value, known: &[Vec<CertificateDer<'static>>; 2]) -> bool {
    AUTHORITIES.iter().zip(known).any(|(key, known)| {
        let text = map["data"][key].as_str().unwrap_or_default();
        let mut listed = pki::certificates_der(text.as_bytes()).into_iter().flatten();
        listed.any(|listed| !known.contains(&listed))
    })
}

impl<S: Server> Service<S> {
    pub(super) async fn run(self, ctx: Context) -> Result<(), Closed> {
        ctx.until_cancelled(Box::pin(self.keep(&ctx))).await.unwrap_or(Ok(()))
    }

    /// Runs both loops once the API server is ready.
    async fn keep(&self, ctx: &Context) -> Result<(), Closed> {
        self.parts.ready(Part::ApiServer).await?;
        let ends = Mutex::default();
        tokio::select! {
            // Cancel-safe, both: every request may be repeated.
            ended = self.keep_objects(&ends, ctx) => ended,
            ended = self.keep_records(&ends) => ended,
        }
    }

    async fn keep_objects(&self, ends: &Mutex<Ends>, ctx: &Context) -> Result<(), Closed> {
        let objects = objects::all();
        let mut attempts = Attempts::default();
        loop {
            let applied = self.apply_all(&objects, ctx).await;
            if applied.is_ok() {
                info!(objects = objects.len(), "the cluster's own objects are in place");
            }
            let tried = applied.as_ref().err().is_none_or(Error::is_refusal);
            let ended = attempts.ended(applied);
            self.report(ends, |ends| ends.objects = Some(ended));
            if tried {
                self.set_tried(ctx);
            }
            self.rest(&mut attempts, EVERY).await?;
        }
    }

    async fn keep_records(&self, ends: &Mutex<Ends>) -> Result<(), Closed> {
        let mut tried = self.tried.subscribe();
        until(&mut tried, "the objects", |tried| tried.then_some(())).await?;
        let (mut nodes, mut attempts, mut workers) =
            (self.nodes.clone(), Attempts::default(), None);
        let mut others_since = None;
        let wanted = |nodes: &Option<Arc<Nodes>>| {
            nodes.as_ref().and_then(|nodes| nodes::wanted(nodes, self.node))
        };
        let serving =
            |nodes: &Option<Arc<Nodes>>| nodes.as_ref().map(|nodes| nodes::serving(nodes));
        loop {
            let records = nodes.borrow_and_update().clone();
            let followed = self.follow(&mut workers, records.as_deref()).await;
            let trusted = self.trust(&mut others_since).await;
            let ended = attempts.ended(followed.and(trusted));
            let (has, served, failed) = (wanted(&records), serving(&records), ended.is_err());
            self.report(ends, |ends| ends.records = Some(ended));
            let change = async {
                sleep(SPACING).await;
                loop {
                    nodes.changed().await.map_err(|_closed| Closed("the nodes"))?;
                    let now = nodes.borrow_and_update().clone();
                    // Records change all the time, and most changes concern no object. A worker
                    // that serves has a Node, which may be new; what has failed is not tried again
                    // sooner for that.
                    if wanted(&now) != has || (!failed && serving(&now) != served) {
                        return Ok::<_, Closed>(());
                    }
                }
            };
            tokio::select! {
                // Cancel-safe, both: they wait for a value or for the time.
                changed = change => changed?,
                rested = self.rest(&mut attempts, NODES_EVERY) => rested?,
            }
        }
    }

    /// Records how a loop has ended, and sets the state of the part.
    fn report(&self, ends: &Mutex<Ends>, record: impl FnOnce(&mut Ends)) {
        let mut ends = ends.lock().unwrap_or_else(PoisonError::into_inner);
        record(&mut ends);
        if let Some(state) = ends.state() {
            self.parts.set(Part::Reconciler, state);
        }
    }

    fn set_tried(&self, ctx: &Context) {
        ctx.healthy();
        self.tried.send_replace(true);
    }

    /// Waits until the next attempt is due: after `every`, and sooner after a failure. An API
    /// server that is ready again gets it at once, and the pauses begin anew. Cancel-safe.
    async fn rest(&self, attempts: &mut Attempts, every: Duration) -> Result<(), Closed> {
        self.api.rest();
        let failed = attempts.pause;
        let pause = failed.map_or(every, |pause| pause.min(every));
        tokio::select! {
            // Cancel-safe, both: they wait for a value or for the time.
            () = sleep(pause) => Ok(()),
            ready = self.ready_again(), if failed.is_some() => {
                attempts.pause = None;
                ready
            }
        }
    }

    /// Waits until the API server is not ready, and then until it is ready. Cancel-safe.
    async fn ready_again(&self) -> Result<(), Closed> {
        while self.parts.state(Part::ApiServer) == Some(PartState::Ready) {
            sleep(LOOK).await;
        }
        self.parts.ready(Part::ApiServer).await
    }

    /// Applies every object; returns a refusal. An attempt that takes long counts as one before its
    /// end: an API server that is not there would have ended it at once.
    async fn apply_all(&self, objects: &[Object], ctx: &Context) -> Result<(), Error> {
        let mut pass = Box::pin(self.apply(objects));
        let ended = timeout(TRIED_MAX, pass.as_mut()).await;
        match ended {
            Ok(applied) => applied,
            Err(_elapsed) => {
                self.set_tried(ctx);
                pass.await
            }
        }
    }

    /// Deletes the list of whom servers of aggregated APIs trust, once it has had an authority that
    /// this node does not trust for [`TRUST_PAUSE`]. The API servers write it again. `others_since`
    /// is when it was found to have one, or was deleted.
    async fn trust(&self, others_since: &mut Option<Instant>) -> Result<(), Error> {
        let Some(map) = self.api.read(TRUST).await? else { return Ok(()) };
        let files = [self.ca.clone(), self.front_proxy_ca.clone()];
        let read = move || {
            let ders = files.map(|file| pki::certificates_der(&file.read().ok()??));
            let [components, proxies] = ders;
            Some([components?, proxies?])
        };
        let Some(known) = blocking(read).await else { return Ok(()) };
        if !has_others(&map, &known) {
            *others_since = None;
            return Ok(());
        }
        if others_since.get_or_insert_with(Instant::now).elapsed() < TRUST_PAUSE {
            return Ok(());
        }
        let of = |field: &str| map["metadata"][field].as_str().unwrap_or_default();
        if self.api.delete(TRUST, of("uid"), of("resourceVersion")).await? {
            *others_since = Some(Instant::now());
            info!("a former authority of Kubernetes was removed from what aggregated APIs trust");
        }
        Ok(())
    }

    /// Applies each of these objects; returns the refusal that may end the soonest.
    async fn apply(&self, objects: &[Object]) -> Result<(), Error> {
        let mut applied = Ok(());
        for object in objects {
            let ended = self.api.apply(object).await;
            match ended.map_err(|source| Error::Apply { path: object.path.clone(), source }) {
                Err(error) if error.is_refusal() => applied = Err(sooner(applied, error)),
                // Without the server the rest would fail, too.
                ended => ended?,
            }
        }
        applied
    }

    /// Gives workers their rights, and keeps the Node objects as the records want them.
    async fn follow(
        &self,
        known: &mut Option<Vec<NodeId>>,
        nodes: Option<&Nodes>,
    ) -> Result<(), Error> {
        let Some(nodes) = nodes.filter(|nodes| nodes::reported(nodes, self.node)) else {
            return Ok(());
        };
        let workers = nodes::workers(nodes);
        // Every time: without these rights kubelets write nothing. Where the server does not list
        // the bindings, each is applied.
        let found = self.api.list(objects::BINDINGS, JSON).await.unwrap_or_default();
        let mut bindings = objects::workers(&workers);
        bindings.retain(|binding| !objects::is_bound(binding, &found));
        let given = self.apply(&bindings).await;
        if given.is_ok() && known.as_ref() != Some(&workers) {
            info!(workers = workers.len(), "the workers have their rights");
            *known = Some(workers);
        }
        given.and(self.keep_nodes(nodes).await)
    }

    /// Labels, taints and deletes Node objects; returns the first refusal.
    async fn keep_nodes(&self, nodes: &Nodes) -> Result<(), Error> {
        let found = self.api.list("/api/v1/nodes", METADATA).await?;
        let mut kept = Ok(());
        for action in nodes::plan(nodes, &found) {
            match self.act(action).await {
                Err(error) if error.is_refusal() => kept = kept.and(Err(error)),
                ended => ended?,
            }
        }
        // The list has no taints.
        for (node, record) in taints::of_interest(nodes, &found) {
            match self.taint(node, record).await {
                Err(error) if error.is_refusal() => kept = kept.and(Err(error)),
                ended => ended?,
            }
        }
        kept
    }

    /// Gives a Node the taints of its record.
    async fn taint(&self, node: NodeId, record: &v1::NodeInfo) -> Result<(), Error> {
        let path = format!("/api/v1/nodes/{node}");
        let failed = |source| Error::Taint { path: path.clone(), source };
        for _attempt in 0..TAINT_ATTEMPTS {
            let Some(object) = self.api.read(&path).await.map_err(failed)? else { return Ok(()) };
            let Some(patch) = taints::patch(record, &object) else { return Ok(()) };
            if self.api.merge(&path, &patch).await.map_err(failed)? {
                info!(%node, "the Node object has the taints of its record");
                return Ok(());
            }
        }
        Ok(())
    }

    async fn act(&self, action: Action) -> Result<(), Error> {
        match action {
            Action::Label(object) => {
                let labelled = self.api.apply(&object).await;
                labelled.map_err(|source| Error::Label { path: object.path, source })
            }
            Action::Delete { node, uid, version } => {
                let path = format!("/api/v1/nodes/{node}");
                if self.api.delete(&path, &uid, &version).await? {
                    info!(%node, "the Node object of a node without the role of a worker was deleted");
                }
                Ok(())
            }
        }
    }
}

#[cfg(test)]
#[path = "reconciler_tests.rs"]
mod tests;
