//! The access proxy: lets users of Polis into Kubernetes, by their certificates and roles.
//!
//! `controller` starts one on each Kubernetes controller, on port 6444. It serves through the
//! server layer of all other ports ([`polis_wire::rpc`]): TLS 1.3 with the node's certificate
//! of the cluster or that of the API server, the access list at every request, and an end to
//! everything that a user has open once the user is revoked.
//!
//! ```text
//! kubectl --user's certificate--> [6444] --auth-proxy certificate--> API server, loopback
//!                                   |        X-Remote-User: polis:ann
//!                                   |        X-Remote-Group: polis:operators
//!                                   +-- headers that name a user are removed first
//! ```
//!
//! Invariants:
//! - The API server receives the name and the group of the certificate, and no other ones.
//! - A connection to the API server carries the requests of one connection of one user.
//! - The open requests of a user end with the access of the user.
//! - A client that asks for no name, or for that of the node, sees the node's certificate, and
//!   any other client that of the API server.
//!
//! What this module does not do: decide what a user may do in Kubernetes. The API server does,
//! by the bindings of `objects`.

mod answer;
mod headers;
mod proxy;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;

use self::proxy::{ANSWER_MAX, FOLLOW_MAX, Proxy};
use super::api::Api;
use super::credentials::Purpose;
use super::parts::{Part, PartState, Parts};
use super::site::Site;
use polis_base::cause;
use polis_runtime::event::Closed;
use polis_runtime::event::until;
use polis_runtime::supervisor::Context;
use polis_wire::identity::NodeId;
use polis_wire::rpc::{self, AccessList, App, Credentials, Limits, Metrics, Server, Table};

/// Why a run ends.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The port, or the credentials.
    #[error(transparent)]
    Server(#[from] rpc::Error),
    /// The owner of an input ended.
    #[error(transparent)]
    Closed(#[from] Closed),
}

/// The identity of this node, its permitted callers, and what is counted of them.
#[derive(Clone, Debug)]
pub struct Identity {
    /// The certificate that it serves with; empty before the node is home.
    pub credentials: watch::Receiver<Option<Credentials>>,
    /// The users that have lost their access.
    pub access_list: watch::Receiver<Arc<AccessList>>,
    /// The counters of the proxy, which management shows.
    pub metrics: Arc<Metrics>,
}

/// Runs until cancelled.
#[derive(Clone, Debug)]
pub(super) struct Service {
    pub(super) site: Site,
    pub(super) node: NodeId,
    pub(super) identity: Identity,
    /// The certificate of the API server, for clients that ask for a name of the cluster's
    /// configuration: that of the node has the node's name alone.
    pub(super) named: watch::Receiver<Option<Credentials>>,
    pub(super) parts: Parts,
}

impl Service {
    pub(super) async fn run(self, ctx: Context) -> Result<(), Error> {
        let parts = self.parts.clone();
        parts.set(Part::Access, PartState::Starting);
        let ended = self.serve(&ctx).await;
        match &ended {
            Ok(()) => parts.set(Part::Access, PartState::Stopped),
            Err(error) => parts.fail(Part::Access, cause::line(error)),
        }
        ended
    }

    async fn serve(self, ctx: &Context) -> Result<(), Error> {
        let ready = self.parts.ready(Part::Certificates);
        let Some(ready) = ctx.until_cancelled(ready).await else { return Ok(()) };
        ready?;
        // An empty list would let a revoked user in.
        let mut list = self.identity.access_list.clone();
        let known = until(&mut list, "the access list", |list| list.nodes.is_some().then_some(()));
        let Some(known) = ctx.until_cancelled(known).await else { return Ok(()) };
        known?;
        let upstream = Api {
            address: self.site.api(),
            ca: self.site.run.ca.clone(),
            client: Some(Purpose::AuthProxy.pair(&self.site.data)),
        };
        let (node, parts) = (self.node, self.parts.clone());
        let proxy = Proxy { node, upstream, answer_max: ANSWER_MAX, parts };
        let table = Arc::new(Table::users());
        let (listening, mut listens) = watch::channel(None);
        let server = Server {
            config: rpc::Config {
                name: "the proxy to Kubernetes",
                listen: self.site.access.clone(),
                limits: limits(),
            },
            credentials: self.identity.credentials,
            named: Some(self.named),
            access_list: self.identity.access_list,
            metrics: self.identity.metrics,
            table,
            app: App::Gateway(Arc::new(proxy)),
            refused: None,
            reached: None,
            listening,
        };
        let parts = self.parts;
        let opened = async {
            if listens.wait_for(Option::is_some).await.is_ok() {
                parts.set(Part::Access, PartState::Ready);
            }
            std::future::pending().await
        };
        tokio::select! {
            // Cancel-safe, both: the run ends with the first.
            ended = server.run(ctx.clone()) => Ok(ended?),
            ended = opened => ended,
        }
    }
}

/// The limits of callers.
fn limits() -> Limits {
    Limits {
        // Without HTTP/2 each watch has a connection of its own, and a terminal interface
        // watches dozens of resources. Where four users have all of them, the one with the most
        // makes way for a fifth.
        known: 1024,
        known_per_name: 256,
        // A caller without a certificate of the cluster receives one rejection.
        untrusted: 32,
        untrusted_per_address: 8,
        // The proxy itself waits less long for any other answer.
        deadline: FOLLOW_MAX,
        // A person may read the log of a pod page by page.
        stall: Duration::from_secs(60 * 60),
        // Between two requests; clients keep a connection for 90 s.
        idle: Duration::from_secs(120),
        ..Limits::default()
    }
}
