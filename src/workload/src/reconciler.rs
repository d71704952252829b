//! The reconciler: applies the cluster's own objects and keeps the Node objects as the
//! records of the nodes want them.
//!
//! ```text
//! every hour ------------------------------> every object is applied
//! one was refused, 2 s to 5 minutes ago ---> every object is applied again
//! every 30 seconds ------------------------> former authorities leave what aggregated APIs trust
//! a record has changed, every 30 seconds --> rights of the workers, labels, Nodes without
//!                                            a worker are deleted
//! ```
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
//!
//! What this module does not do: remove other objects that a former version applied.
//! There are none yet.

use std::sync::Arc;
use std::time::Duration;

use rustls::pki_types::CertificateDer;
use serde_json::Value;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, sleep_until};
use tracing::{debug, info};

use super::api::{self, Api};
use super::nodes::{self, Action};
use super::objects::{self, Object};
use super::parts::{Part, PartState, Parts};
use polis_base::cause;
use polis_base::files::File;
use polis_runtime::event::Closed;
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

/// After a failed step: the API server may just be starting again.
const RETRY: Duration = Duration::from_secs(2);

/// The longest pause after refusals. A person has to end their reason, and sees within this that
/// it has ended.
const REFUSED_MAX: Duration = Duration::from_secs(5 * 60);

/// Nodes in one answer. One has at most 15 kB, most of it names of images.
const PAGE: usize = 100;

/// Whom servers of aggregated APIs trust. Each API server adds what it trusts itself, and removes
/// only what has ended.
const TRUST: &str = "/api/v1/namespaces/kube-system/configmaps/extension-apiserver-authentication";
/// Its values with certificates in PEM.
const AUTHORITIES: [&str; 2] = ["client-ca-file", "requestheader-client-ca-file"];

/// Why a step of a pass failed.
#[derive(Debug, thiserror::Error)]
enum Error {
    /// One of the cluster's own objects is not applied.
    #[error("cannot apply {path}{}", remedy(source))]
    Apply { path: String, source: api::Error },
    /// A Node is not labelled.
    #[error("cannot label {path}")]
    Label { path: String, source: api::Error },
    /// Another request.
    #[error(transparent)]
    Api(#[from] api::Error),
}

impl Error {
    /// Whether the API server took the request and did not carry it out, which says nothing of
    /// other requests.
    fn is_refusal(&self) -> bool {
        let (Self::Apply { source, .. } | Self::Label { source, .. } | Self::Api(source)) = self;
        match source {
            // It may wait for a webhook longer than a request may take.
            api::Error::Refused { .. } | api::Error::Silent { .. } => true,
            api::Error::Credentials { .. }
            | api::Error::Connect { .. }
            | api::Error::Http { .. } => false,
        }
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
        api::Error::Credentials { .. } | api::Error::Connect { .. } | api::Error::Http { .. } => "",
    }
}

/// The requests of the reconciler. The node uses [`Api`].
pub(super) trait Server: Send + Sync {
    /// Applies an object.
    fn apply(&self, object: &Object) -> impl Future<Output = Result<(), api::Error>> + Send;

    /// Reads an object; `None` if there is none.
    fn read(&self, path: &str) -> impl Future<Output = Result<Option<Value>, api::Error>> + Send;

    /// Reads the objects of a list.
    fn list(&self, path: &str) -> impl Future<Output = Result<Vec<Value>, api::Error>> + Send;

    /// Deletes an object, if it still has this UID and this version. Returns whether it was
    /// deleted.
    fn delete(
        &self,
        path: &str,
        uid: &str,
        version: &str,
    ) -> impl Future<Output = Result<bool, api::Error>> + Send;
}

impl Server for Api {
    async fn apply(&self, object: &Object) -> Result<(), api::Error> {
        Self::apply(self, object).await
    }

    async fn read(&self, path: &str) -> Result<Option<Value>, api::Error> {
        let answer = self.get(path).await?;
        if answer.status == 404 {
            return Ok(None);
        }
        self.succeeded(&answer)?;
        let object = serde_json::from_slice(&answer.body)
            .map_err(|error| api::Error::Http { address: self.address, source: error.into() })?;
        Ok(Some(object))
    }

    async fn list(&self, path: &str) -> Result<Vec<Value>, api::Error> {
        Self::list(self, path, PAGE).await
    }

    async fn delete(&self, path: &str, uid: &str, version: &str) -> Result<bool, api::Error> {
        Self::delete(self, path, uid, version).await
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
    /// Whether the API server was asked for every object once, whatever it answered.
    pub(super) tried: watch::Sender<bool>,
    pub(super) parts: Parts,
}

/// The work of a run, which the next pass need not repeat, or report again.
#[derive(Debug, Default)]
struct Done {
    /// The cluster's own objects.
    objects: Step,
    /// What follows the records of the nodes, and the trust in authorities.
    nodes: Step,
    /// The workers that have their rights.
    workers: Option<Vec<NodeId>>,
}

impl Done {
    /// Why something is not as it should be.
    fn cause(&self) -> Option<&str> {
        let failure = self.objects.failure.as_ref().or(self.nodes.failure.as_ref())?;
        Some(&failure.cause)
    }

    /// When the next pass is due.
    fn due(&self) -> Instant {
        self.objects.due.min(self.nodes.due).unwrap_or_else(Instant::now)
    }
}

/// One step of a pass: when it is due again, and why it failed.
#[derive(Debug, Default)]
struct Step {
    /// `None` before the first attempt.
    due: Option<Instant>,
    /// The end of the last attempt, if it failed.
    failure: Option<Failure>,
}

#[derive(Debug)]
struct Failure {
    cause: String,
    /// Whether the API server refused something; else it was not reached.
    refused: bool,
    /// The pause after it.
    pause: Duration,
}

impl Step {
    fn is_due(&self) -> bool {
        self.due.is_none_or(|due| due <= Instant::now())
    }

    /// Whether all of it was tried.
    fn is_tried(&self) -> bool {
        self.due.is_some() && self.failure.as_ref().is_none_or(|failure| failure.refused)
    }

    /// Records an attempt. The next one is due after `every`, and sooner if it failed.
    fn ended(&mut self, ended: Result<(), Error>, every: Duration) {
        let failure = ended.err().map(|error| {
            let refused = error.is_refusal();
            let pause = match &self.failure {
                Some(last) if refused => (last.pause * 2).min(REFUSED_MAX),
                Some(_) | None => RETRY,
            };
            debug!(error = &error as &dyn std::error::Error, ?pause, "a step failed");
            Failure { cause: cause::line(&error), refused, pause }
        });
        let pause = failure.as_ref().map_or(every, |failure| failure.pause.min(every));
        self.due = Some(Instant::now() + pause);
        self.failure = failure;
    }
}

/// Whether the map lists an authority that is not in `known`.
fn has_others(map: &Value, known: &[CertificateDer<'static>]) -> bool {
    let texts = AUTHORITIES.iter().filter_map(|key| map["data"][key].as_str());
    let mut listed = texts.filter_map(|text| pki::certificates_der(text.as_bytes())).flatten();
    listed.any(|listed| !known.contains(&listed))
}

impl<S: Server> Service<S> {
    pub(super) async fn run(mut self, ctx: Context) -> Result<(), Closed> {
        let ready = self.parts.ready(Part::ApiServer);
        let Some(ready) = ctx.until_cancelled(ready).await else { return Ok(()) };
        ready?;
        let mut done = Done::default();
        loop {
            let nodes = self.nodes.borrow_and_update().clone();
            let pass = Box::pin(self.pass(&mut done, nodes.as_deref()));
            if ctx.until_cancelled(pass).await.is_none() {
                return Ok(());
            }
            match done.cause() {
                None => self.parts.set(Part::Reconciler, PartState::Ready),
                Some(cause) => self.parts.fail(Part::Reconciler, cause),
            }
            if done.objects.is_tried() {
                ctx.healthy();
                self.tried.send_replace(true);
            }
            match ctx.until_cancelled(self.change(done.due())).await {
                Some(waited) => waited?,
                None => return Ok(()),
            }
        }
    }

    /// Waits until a record has changed, or the next pass is due. Cancel-safe.
    async fn change(&mut self, due: Instant) -> Result<(), Closed> {
        sleep(SPACING).await;
        tokio::select! {
            // Cancel-safe, both: they wait for a value or for the time.
            changed = self.nodes.changed() => changed.map_err(|_closed| Closed("the nodes")),
            () = sleep_until(due) => Ok(()),
        }
    }

    async fn pass(&self, done: &mut Done, nodes: Option<&Nodes>) {
        // The rights of workers are first: a webhook that does not answer may hold up each of
        // the other objects for seconds.
        let followed = self.follow(&mut done.workers, nodes).await;
        let trusted = self.trust().await;
        done.nodes.ended(followed.and(trusted), NODES_EVERY);
        if done.objects.is_due() {
            let objects = objects::all();
            let applied = self.apply(&objects).await;
            if applied.is_ok() {
                info!(objects = objects.len(), "the cluster's own objects are in place");
            }
            done.objects.ended(applied, EVERY);
        }
    }

    /// Deletes the list of whom servers of aggregated APIs trust, once it has an authority that this
    /// node does not trust any more. The API servers write it again.
    async fn trust(&self) -> Result<(), Error> {
        let Some(map) = self.api.read(TRUST).await? else { return Ok(()) };
        let files = [self.ca.clone(), self.front_proxy_ca.clone()];
        let read = move || {
            let ders = files.map(|file| pki::certificates_der(&file.read().ok()??));
            let [components, proxies] = ders;
            Some([components?, proxies?].concat())
        };
        let Some(known) = blocking(read).await else { return Ok(()) };
        if !has_others(&map, &known) {
            return Ok(());
        }
        let of = |field: &str| map["metadata"][field].as_str().unwrap_or_default();
        if self.api.delete(TRUST, of("uid"), of("resourceVersion")).await? {
            info!("a former authority of Kubernetes was removed from what aggregated APIs trust");
        }
        Ok(())
    }

    /// Applies each of these objects; returns the first refusal.
    async fn apply(&self, objects: &[Object]) -> Result<(), Error> {
        let mut applied = Ok(());
        for object in objects {
            let ended = self.api.apply(object).await;
            match ended.map_err(|source| Error::Apply { path: object.path.clone(), source }) {
                Err(error) if error.is_refusal() => applied = applied.and(Err(error)),
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
        // Every time: without these rights kubelets write nothing.
        let given = self.apply(&objects::workers(&workers)).await;
        if given.is_ok() && known.as_ref() != Some(&workers) {
            info!(workers = workers.len(), "the workers have their rights");
            *known = Some(workers);
        }
        given.and(self.keep_nodes(nodes).await)
    }

    /// Labels and deletes Node objects; returns the first refusal.
    async fn keep_nodes(&self, nodes: &Nodes) -> Result<(), Error> {
        let found = self.api.list("/api/v1/nodes").await?;
        let mut kept = Ok(());
        for action in nodes::plan(nodes, &found) {
            match self.act(action).await {
                Err(error) if error.is_refusal() => kept = kept.and(Err(error)),
                ended => ended?,
            }
        }
        kept
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
