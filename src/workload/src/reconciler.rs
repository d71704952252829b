//! The reconciler: applies the cluster's own objects and keeps the Node objects as the
//! records of the nodes want them.
//!
//! ```text
//! every hour ------------------------------> every object is applied
//! every 30 seconds ------------------------> former authorities leave what aggregated APIs trust
//! a record has changed, every 30 seconds --> rights of the workers, labels, Nodes without
//!                                            a worker are deleted
//! ```
//!
//! Every controller does so. To apply the same object twice changes nothing, so they need no
//! leader among them. The part about nodes waits while no leader of the cluster reports the
//! records: the rights and Nodes of the past stay.
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

use super::api::{Api, Error};
use super::nodes::{self, Action};
use super::objects;
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

/// After a failed pass: the API server may just be starting again.
const RETRY: Duration = Duration::from_secs(2);

/// Nodes in one answer. One has at most 15 kB, most of it names of images.
const PAGE: usize = 100;

/// Whom servers of aggregated APIs trust. Each API server adds what it trusts itself, and removes
/// only what has ended.
const TRUST: &str = "/api/v1/namespaces/kube-system/configmaps/extension-apiserver-authentication";
/// Its values with certificates in PEM.
const AUTHORITIES: [&str; 2] = ["client-ca-file", "requestheader-client-ca-file"];

/// Runs until cancelled.
#[derive(Clone, Debug)]
pub(super) struct Service {
    /// The client for the API server, with the rights of `system:masters`.
    pub(super) api: Api,
    /// The authorities of proxies that name a user.
    pub(super) front_proxy_ca: File,
    /// This node.
    pub(super) node: NodeId,
    /// Every node of the cluster.
    pub(super) nodes: watch::Receiver<Option<Arc<Nodes>>>,
    pub(super) parts: Parts,
}

/// The work of a run, which the next pass need not repeat, or report again.
#[derive(Debug, Default)]
struct Done {
    /// When every object was applied.
    objects: Option<Instant>,
    /// The workers that have their rights.
    workers: Option<Vec<NodeId>>,
}

/// Whether the map lists an authority that is not in `known`.
fn has_others(map: &Value, known: &[CertificateDer<'static>]) -> bool {
    let texts = AUTHORITIES.iter().filter_map(|key| map["data"][key].as_str());
    let mut listed = texts.filter_map(|text| pki::certificates_der(text.as_bytes())).flatten();
    listed.any(|listed| !known.contains(&listed))
}

impl Service {
    pub(super) async fn run(mut self, ctx: Context) -> Result<(), Closed> {
        let ready = self.parts.ready(Part::ApiServer);
        let Some(ready) = ctx.until_cancelled(ready).await else { return Ok(()) };
        ready?;
        let mut done = Done::default();
        loop {
            let nodes = self.nodes.borrow_and_update().clone();
            let pass = Box::pin(self.pass(&mut done, nodes.as_deref()));
            let Some(passed) = ctx.until_cancelled(pass).await else { return Ok(()) };
            let waited = match passed {
                Ok(()) => {
                    ctx.healthy();
                    self.parts.set(Part::Reconciler, PartState::Ready);
                    ctx.until_cancelled(self.change()).await
                }
                Err(error) => {
                    debug!(error = &error as &dyn std::error::Error, "cannot apply an object");
                    self.parts.fail(Part::Reconciler, cause::line(&error));
                    ctx.until_cancelled(async {
                        sleep(RETRY).await;
                        Ok(())
                    })
                    .await
                }
            };
            match waited {
                Some(waited) => waited?,
                None => return Ok(()),
            }
        }
    }

    /// Waits until a record has changed, or the time of the next look. Cancel-safe.
    async fn change(&mut self) -> Result<(), Closed> {
        let again = Instant::now() + NODES_EVERY;
        sleep(SPACING).await;
        tokio::select! {
            // Cancel-safe, both: they wait for a value or for the time.
            changed = self.nodes.changed() => changed.map_err(|_closed| Closed("the nodes")),
            () = sleep_until(again) => Ok(()),
        }
    }

    async fn pass(&self, done: &mut Done, nodes: Option<&Nodes>) -> Result<(), Error> {
        // An object that the API server refuses, since an owner has made another of its name,
        // keeps neither the others nor the rights of workers waiting.
        let applied = self.objects(done).await;
        let trusted = self.trust().await;
        self.follow(done, nodes).await.and(applied).and(trusted)
    }

    /// Deletes the list of whom servers of aggregated APIs trust, once it has an authority that this
    /// node does not trust any more. The API servers write it again.
    async fn trust(&self) -> Result<(), Error> {
        let answer = self.api.get(TRUST).await?;
        if answer.status == 404 {
            return Ok(());
        }
        self.api.succeeded(&answer)?;
        let map: Value = serde_json::from_slice(&answer.body)
            .map_err(|error| Error::Http { address: self.api.address, source: error.into() })?;
        let files = [self.api.ca.clone(), self.front_proxy_ca.clone()];
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

    /// Applies the cluster's own objects; returns the first error.
    async fn objects(&self, done: &mut Done) -> Result<(), Error> {
        if done.objects.is_some_and(|applied| applied.elapsed() < EVERY) {
            return Ok(());
        }
        let objects = objects::all();
        let mut applied = Ok(());
        for object in &objects {
            applied = applied.and(self.api.apply(object).await);
        }
        applied?;
        info!(objects = objects.len(), "the cluster's own objects are in place");
        done.objects = Some(Instant::now());
        Ok(())
    }

    /// Gives workers their rights, and keeps the Node objects as the records want them.
    async fn follow(&self, done: &mut Done, nodes: Option<&Nodes>) -> Result<(), Error> {
        let Some(nodes) = nodes.filter(|nodes| nodes::reported(nodes, self.node)) else {
            return Ok(());
        };
        let workers = nodes::workers(nodes);
        // Every time: without these rights kubelets write nothing.
        for object in &objects::workers(&workers) {
            self.api.apply(object).await?;
        }
        if done.workers.as_ref() != Some(&workers) {
            info!(workers = workers.len(), "the workers have their rights");
            done.workers = Some(workers);
        }
        let found = self.api.list("/api/v1/nodes", PAGE).await?;
        for action in nodes::plan(nodes, &found) {
            match action {
                Action::Label(object) => self.api.apply(&object).await?,
                Action::Delete { node, uid, version } => {
                    let path = format!("/api/v1/nodes/{node}");
                    if self.api.delete(&path, &uid, &version).await? {
                        info!(%node, "the Node object of a node without the role of a worker was deleted");
                    }
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use polis_base::sys::clock;
    use polis_wire::pki::memory::Memory;
    use polis_wire::pki::{Namespace, kubernetes_authority};
    use serde_json::json;

    use super::*;

    #[tokio::test]
    async fn a_former_authority_in_what_aggregated_apis_trust_is_found() {
        let authority = async || {
            let pki = Namespace::new(Memory::default(), "");
            pki.ensure(&kubernetes_authority(), clock::now()).await.unwrap().der
        };
        let [one, two, former] = [authority().await, authority().await, authority().await];
        let known: Vec<_> = [&one, &two].map(|der| CertificateDer::from(der.clone())).into();
        let map = |[components, proxies]: [&[&[u8]]; 2]| {
            let pem = |ders: &[&[u8]]| {
                String::from_utf8(pki::certificates_pem(ders.iter().copied())).unwrap()
            };
            let [components, proxies] = [pem(components), pem(proxies)];
            json!({"data": {
                "client-ca-file": components,
                "requestheader-client-ca-file": proxies,
                "requestheader-allowed-names": "[]",
            }})
        };
        assert!(!has_others(&map([&[&one], &[&two]]), &known));
        assert!(has_others(&map([&[&former, &one], &[&two]]), &known));
        assert!(has_others(&map([&[&one], &[&two, &former]]), &known));
        assert!(!has_others(&json!({}), &known));
    }
}
