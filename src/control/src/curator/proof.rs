//! The proof of a curator: the certificate that distinguishes this node from one that runs
//! no curator.
//!
//! ```text
//! [none] --etcd has a quorum--> read or made --> [certificate] --2/3, or another CA--> made again
//!                                  ^  |
//!                                  +--+ RETRY
//! ```
//!
//! At a boot, an existing one is read, or renewed, before the node has its credentials, and the
//! port opens as soon as it has them. The first one is made only then: before, it is not known
//! whether the node still belongs to the cluster.
//!
//! The voter signs it by its own etcd, so neither a leader nor a call has a part in it, and a
//! node that left etcd gets none: departures revoke the last one. It is for the key of the
//! node, and is in etcd and in memory only: the disk of a former voter does not have it.
//!
//! Invariants:
//! - It is published with the key and the CA that this node has now.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::sleep;
use tracing::{debug, error};

use super::store::{self, Store};
use crate::consensus::client::Client;
use polis_base::sys::clock;
use polis_runtime::event::{Closed, until};
use polis_runtime::supervisor::Context;
use polis_wire::identity::Identity;
use polis_wire::pki::Facts;
use polis_wire::rpc::Credentials;

/// Between two looks at the clock, which may be set at any moment: a boot may begin with a wrong
/// one, and a client rejects a certificate of another date.
const LOOK: Duration = Duration::from_secs(2);

/// Between two attempts: etcd waits for a quorum, or two voters sign at once.
const RETRY: Duration = Duration::from_millis(500);

/// Keeps the certificate valid. A service of every curator.
#[derive(Clone, Debug)]
pub(super) struct Service {
    /// This node.
    pub(super) identity: Identity,
    /// The records, which this service writes beside the leader: certificates exist once.
    pub(super) store: Store<Client>,
    /// The credentials of this node.
    pub(super) node: watch::Receiver<Option<Credentials>>,
    /// The same, with the certificate of a curator.
    pub(super) own: watch::Sender<Option<Credentials>>,
    /// Whether an error that lasts was logged.
    pub(super) reported: bool,
}

impl Service {
    /// Runs until cancelled.
    ///
    /// # Errors
    ///
    /// [`Closed`] when the owner of the credentials ended.
    pub(super) async fn run(mut self, ctx: Context) -> Result<(), Closed> {
        ctx.healthy();
        let mut kept = None;
        if self.node.borrow().is_none() {
            let read =
                Box::pin(self.store.existing_curator_certificate(self.identity, clock::now()));
            let Some(read) = ctx.until_cancelled(read).await else { return Ok(()) };
            // An error comes again when the certificate is needed, and is reported then.
            kept = read.ok().flatten().map(|issued| issued.der);
        }
        loop {
            let work = async {
                if self.node.borrow().is_none() {
                    self.own.send_replace(None);
                }
                let node = until(&mut self.node, "the credentials", Clone::clone).await?;
                let wait = self.look(node, kept.take()).await;
                tokio::select! {
                    // Cancel-safe: only waits.
                    () = sleep(wait) => Ok(()),
                    // Cancel-safe: waits for an event value.
                    changed = self.node.changed() => {
                        changed.map_err(|_closed| Closed("the credentials"))
                    }
                }
            };
            // Boxed: the making of a certificate is large, and rare.
            match ctx.until_cancelled(Box::pin(work)).await {
                Some(done) => done?,
                None => return Ok(()),
            }
        }
    }

    /// Logs why the certificate is missing; once, where no time helps.
    fn report(&mut self, error: &store::Error) {
        let lasts = !error.retriable();
        let cause = error as &dyn std::error::Error;
        if lasts && !self.reported {
            error!(
                error = cause,
                "this curator cannot get its certificate, so port 7835 is closed"
            );
        } else {
            debug!(error = cause, "no certificate of a curator yet");
        }
        self.reported |= lasts;
    }

    /// Publishes a certificate that is not due for renewal, `kept` if it is the first; returns the
    /// wait before the next look.
    async fn look(&mut self, node: Credentials, kept: Option<Vec<u8>>) -> Duration {
        let now = clock::now();
        let own = self.own.borrow().as_ref().map(|own| own.certificate.clone());
        let known = own.or(kept).filter(|certificate| {
            let facts = Facts::read(certificate);
            let signed = node.authorities.as_ref().is_none_or(|it| it.signed(certificate));
            signed && facts.is_some_and(|facts| !facts.renewal_due(now))
        });
        let certificate = match known {
            Some(certificate) => certificate,
            None => match self.store.curator_certificate(self.identity, now).await {
                Ok(issued) => issued.der,
                Err(error) => {
                    self.report(&error);
                    return RETRY;
                }
            },
        };
        let own =
            Credentials { certificate, key: Arc::clone(&node.key), authorities: node.authorities };
        self.own.send_if_modified(|known| {
            let changed = known.as_ref() != Some(&own);
            *known = Some(own);
            changed
        });
        LOOK
    }
}
