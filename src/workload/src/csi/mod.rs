//! The volumes of pods: a driver of the Container Storage Interface for directories of the
//! data partition, each with a quota of its own.
//!
//! ```text
//! API server --claims, volumes--> provisioner --> store --> /data/volumes/pvc-UID
//!            <--objects, events--                  |          |      ^
//!            <--room------------- capacity --------+          |      |
//! kubelet --registration, publish, stats--> node --> bind ----+      |
//!                                           sweeper --removes--------+
//!
//! names        what Kubernetes calls the driver and its class
//! volume_id    the name of a volume                        pure
//! quantity     sizes of Kubernetes                         pure
//! claims       objects as they are read and written        pure
//! disk, store  the directories and their projects
//! trash        the removal of content
//! cluster      requests to the API server
//! reconcile    which volumes there are
//! provisioner  the watches of claims and volumes           a service
//! capacity     the room that the scheduler knows of        a service
//! mounting     flags, and the kernel's table of mounts
//! node         the calls of kubelet
//! registration how kubelet finds the driver
//! ```
//!
//! The driver has no controller: each worker provisions for itself, once the
//! scheduler has chosen it for the first pod of a claim.
//!
//! Invariants:
//! - The state of a volume lies on the disk: a restart begins with it.
//! - The part is ready when kubelet has taken the driver, and the provisioner sees the claims.
//!
//! What this module does not do: divide the partition (`host::quota`), or grant rights
//! (`objects`).

mod capacity;
mod claims;
mod cluster;
mod disk;
mod mounting;
pub(super) mod names;
mod node;
mod provisioner;
mod quantity;
mod reconcile;
mod registration;
mod store;
mod trash;
mod volume_id;

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use tokio::net::UnixListener;
use tokio::sync::{Semaphore, watch};
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::Server;

use polis_proto::csi::identity_server::IdentityServer;
use polis_proto::csi::node_server::NodeServer;
use polis_proto::plugin::registration_server::RegistrationServer;

use self::node::Plugin;
use self::registration::{Registered, Registration};
use super::api::Api;
use super::parts::{Part, PartState, Parts};
use super::socket;
use polis_base::cause;
use polis_base::files::{self, Dir};
use polis_runtime::event::Closed;
use polis_runtime::supervisor::{Context, Policy, blocking};
use polis_wire::identity::NodeId;

pub use self::capacity::Publisher;
pub use self::disk::Disk;
pub use self::names::DRIVER;
pub use self::provisioner::{Provisioner, Status};
pub use self::store::{Error as StoreError, Store};
pub use self::trash::Swept;
pub use self::volume_id::{NotAVolume, VolumeId};

/// The socket, in kubelet's directory of plugins. kubelet puts the escaped path of the socket
/// into `:authority`, where the HTTP library takes `%` only before an `@`: RFC 3986 allows
/// it in the user information, and not in the name of a host as kubelet means it.
const SOCKET: &str = "@local.csi.polis.internal.sock";

/// Where kubelet's directory is, as kubelet knows it.
const PODS: &str = "/var/lib/kubelet/pods";

/// Why a run ended.
#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    /// The directory of the socket cannot be made.
    #[error(transparent)]
    Files(#[from] files::Error),
    /// The socket cannot be listened on.
    #[error("cannot listen on {}", path.display())]
    Listen {
        /// The socket.
        path: PathBuf,
        /// The error of the kernel.
        source: io::Error,
    },
    /// The server ended.
    #[error("the server for kubelet ended")]
    Server(#[source] tonic::transport::Error),
    /// The owner of an input ended.
    #[error(transparent)]
    Closed(#[from] Closed),
}

/// Configuration and inputs. Cloned into every run; holds no progress.
#[derive(Clone, Debug)]
pub(super) struct Service {
    /// The API server, asked as this driver on this node.
    pub(super) api: Api,
    pub(super) node: NodeId,
    pub(super) store: Store,
    /// Where kubelet looks for plugins.
    pub(super) plugins: Dir,
    pub(super) parts: Parts,
}

impl Service {
    /// Runs until cancelled.
    pub(super) async fn run(self, ctx: Context) -> Result<(), Error> {
        // kubelet adopts its directory with its quota before (`host`), and the provisioner
        // calls with a certificate.
        let (containerd, certificates) =
            (self.parts.ready(Part::Containerd), self.parts.ready(Part::WorkerCertificates));
        let ready = async { containerd.await.and(certificates.await) };
        let Some(ready) = ctx.until_cancelled(ready).await else { return Ok(()) };
        ready?;
        // Held here: at the end of the machine the provisioner may be the first to go.
        let status = watch::Sender::default();
        let provisioner = Provisioner {
            api: self.api.clone(),
            node: self.node,
            store: self.store.clone(),
            status: status.clone(),
        };
        let provided = status.subscribe();
        let forever = Policy::forever();
        ctx.spawn("provisioner", forever, move |ctx| provisioner.clone().run(ctx));
        let publisher =
            Publisher { api: self.api.clone(), node: self.node, store: self.store.clone() };
        ctx.spawn("capacity", forever, move |ctx| publisher.clone().run(ctx));
        let store = self.store.clone();
        ctx.spawn("sweeper", forever, move |ctx| provisioner::sweeper(store.clone(), ctx));
        let registered = watch::Sender::default();
        let heard = registered.subscribe();
        let _held = registered.clone();
        let plugin = Plugin {
            node: self.node,
            store: self.store.clone(),
            pods: PODS.into(),
            mounts: Arc::new(mounting::Kernel),
            turns: Arc::new(Semaphore::new(node::CALLS_MAX)),
        };
        let served = serve(&self.plugins, plugin, Registration { registered }, &ctx);
        ctx.healthy();
        let outcome = tokio::select! {
            // Cancel-safe, both: a call of kubelet that is cut off is repeated by it.
            served = served => served,
            closed = self.follow(provided, heard) => Err(closed.into()),
        };
        match &outcome {
            Ok(()) => self.parts.set(Part::Csi, PartState::Stopped),
            Err(error) => self.parts.fail(Part::Csi, cause::line(error)),
        }
        outcome
    }

    /// Shows the state of both ends as that of the part.
    async fn follow(
        &self,
        mut provided: watch::Receiver<Status>,
        mut heard: watch::Receiver<Registered>,
    ) -> Closed {
        loop {
            let state = state(&provided.borrow_and_update(), &heard.borrow_and_update());
            self.parts.set(Part::Csi, state);
            tokio::select! {
                // Cancel-safe, both: they wait for event values.
                changed = provided.changed() => if changed.is_err() {
                    return Closed("the provisioner");
                },
                changed = heard.changed() => if changed.is_err() {
                    return Closed("the registration");
                },
            }
        }
    }
}

/// The state of the part.
fn state(provided: &Status, heard: &Registered) -> PartState {
    match (provided, heard) {
        (Status::Failed { cause }, _) => PartState::Failed { cause: cause.clone() },
        (_, Registered::No { cause }) => {
            PartState::Failed { cause: format!("kubelet does not take the driver: {cause}") }
        }
        (Status::Watching, Registered::Yes) => PartState::Ready,
        (Status::Starting | Status::Watching, Registered::Unknown | Registered::Yes) => {
            PartState::Starting
        }
    }
}

/// Serves kubelet at the socket until cancelled.
async fn serve(
    plugins: &Dir,
    plugin: Plugin,
    registration: Registration,
    ctx: &Context,
) -> Result<(), Error> {
    let path = plugins.path().join(SOCKET);
    let place = (plugins.clone(), path.clone());
    let listener = blocking(move || listen(&place.0, &place.1)).await?;
    Server::builder()
        .add_service(RegistrationServer::new(registration))
        .add_service(IdentityServer::new(plugin.clone()))
        .add_service(NodeServer::new(plugin))
        .serve_with_incoming_shutdown(UnixListenerStream::new(listener), ctx.cancelled())
        .await
        .map_err(Error::Server)?;
    // kubelet forgets the driver with its socket.
    blocking(move || std::fs::remove_file(path)).await.ok();
    Ok(())
}

/// The socket, in a directory that is root's. Blocks.
fn listen(plugins: &Dir, path: &std::path::Path) -> Result<UnixListener, Error> {
    plugins.create()?;
    socket::listen(path).map_err(|source| Error::Listen { path: path.to_owned(), source })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_part_is_ready_when_both_ends_are() {
        let failed = |cause: &str| PartState::Failed { cause: cause.to_owned() };
        let lost = Status::Failed { cause: "no way".to_owned() };
        let no = Registered::No { cause: "a version".to_owned() };
        assert_eq!(state(&Status::Starting, &Registered::Unknown), PartState::Starting);
        assert_eq!(state(&Status::Watching, &Registered::Unknown), PartState::Starting);
        assert_eq!(state(&Status::Starting, &Registered::Yes), PartState::Starting);
        assert_eq!(state(&Status::Watching, &Registered::Yes), PartState::Ready);
        assert_eq!(state(&lost, &Registered::Yes), failed("no way"));
        let refused = "kubelet does not take the driver: a version";
        assert_eq!(state(&Status::Watching, &no), failed(refused));
    }
}
