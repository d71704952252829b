//! The registries of images on a worker: follows those of the cluster, and writes them where
//! containerd looks at each pull.
//!
//! ```text
//! leader --WatchRegistries--> checked again --> files in memory (`runtime::registries`)
//! ```
//!
//! Without a leader the files stay as they are: pods whose images are on the node start, and
//! pulls go on. They go with the role, and with the boot: passwords are on no disk of a
//! worker.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use polis_proto::v1;
use polis_proto::v1::curator_client::CuratorClient;
use tokio::time::sleep;
use tracing::{info, warn};

use crate::runtime::registries;
use polis_base::cause;
use polis_base::files;
use polis_runtime::supervisor::{Context, blocking};
use polis_wire::registry::Registry;
use polis_wire::rpc::client::{Client, Repeat};

/// After a stream has ended: a leader may just be elected.
const RETRY: Duration = Duration::from_secs(5);

/// Why the stream, or its last message, did not get through.
#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("the leader does not name the registries of images")]
    Leader(#[source] Box<tonic::Status>),
    #[error("the registries of images cannot be written")]
    Files(#[from] files::Error),
}

impl From<tonic::Status> for Error {
    fn from(status: tonic::Status) -> Self {
        Self::Leader(Box::new(status))
    }
}

/// Runs until cancelled.
#[derive(Clone, Debug)]
pub(super) struct Service {
    pub(super) directory: files::Dir,
    pub(super) client: Client,
    /// Whether the role has ended. Held while files are written: a write that a cancelled run
    /// has left behind ends before the files are removed, or does nothing.
    pub(super) over: Arc<Mutex<bool>>,
}

impl Service {
    pub(super) async fn run(self, ctx: Context) -> Result<(), std::convert::Infallible> {
        let mut failed = cause::Last::default();
        ctx.healthy();
        loop {
            // Boxed: a call to the leader is large, and rare.
            match ctx.until_cancelled(Box::pin(self.hear(&mut failed))).await {
                Some(Ok(())) => {}
                Some(Err(error)) if failed.is_new(&cause::line(&error)) => {
                    let error = &error as &dyn std::error::Error;
                    warn!(error, every = ?RETRY, "trying again until it succeeds");
                }
                Some(Err(_the_same)) => {}
                None => break,
            }
            if ctx.until_cancelled(sleep(RETRY)).await.is_none() {
                break;
            }
        }
        // With the role, or with the machine; a `node` that dies leaves them to its pods.
        self.forget().await;
        Ok(())
    }

    /// Follows one stream until it ends.
    async fn hear(&self, failed: &mut cause::Last) -> Result<(), Error> {
        let call = |channel| async move {
            CuratorClient::new(channel).watch_registries(v1::WatchRegistriesRequest {}).await
        };
        let mut stream = self.client.call(Repeat::Allowed, call).await?.into_inner();
        // A machine that lost its power does not end its stream; a heartbeat notices first.
        let mut changed = std::pin::pin!(self.client.another_leader());
        loop {
            let message = tokio::select! {
                // Cancel-safe: tonic keeps what has arrived of a message.
                message = stream.message() => message?,
                // Cancel-safe: waits for an event value.
                () = &mut changed => return Ok(()),
            };
            let Some(message) = message else { return Ok(()) };
            self.write(read(&message)).await?;
            failed.clear();
        }
    }

    async fn write(&self, registries: Vec<Registry>) -> Result<(), Error> {
        let (directory, over) = (self.directory.clone(), Arc::clone(&self.over));
        let hosts: Vec<_> = registries.iter().map(|one| one.host.clone()).collect();
        let written = blocking(move || {
            let over = over.lock().unwrap_or_else(PoisonError::into_inner);
            if *over {
                return Ok(false);
            }
            registries::write(&directory, &registries::files(&registries))
        });
        if written.await? {
            info!(hosts = hosts.join(", "), "containerd has the registries of the cluster");
        }
        Ok(())
    }

    async fn forget(&self) {
        let (directory, over) = (self.directory.clone(), Arc::clone(&self.over));
        let removed = blocking(move || {
            let mut over = over.lock().unwrap_or_else(PoisonError::into_inner);
            *over = true;
            registries::write(&directory, &registries::files(&[]))
        });
        if let Err(error) = removed.await {
            warn!(error = &error as &dyn std::error::Error, "the next start does it again");
        }
    }
}

/// The registries that this node understands: one of a newer version is left out, and named.
fn read(message: &v1::Registries) -> Vec<Registry> {
    let one = |message: &v1::Registry| match Registry::read(message) {
        Ok(registry) => Some(registry),
        Err(error) => {
            let host: String = message.host.chars().take(64).collect();
            warn!(host, error = &error as &dyn std::error::Error, "a registry is left out");
            None
        }
    };
    message.registries.iter().filter_map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_registry_that_cannot_be_read_does_not_hide_the_others() {
        let registry = |host: &str| v1::Registry { host: host.to_owned(), ..Default::default() };
        let registries = vec![registry("a.example"), registry("../.."), registry("b.example")];
        let read = read(&v1::Registries { registries });
        let hosts: Vec<_> = read.iter().map(|one| &*one.host).collect();
        assert_eq!(hosts, ["a.example", "b.example"]);
    }
}
