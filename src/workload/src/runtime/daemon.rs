//! One process of containerd: prepared, started, asked for its health, and ended.
//!
//! The run ends with the process, and the supervisor starts another one; pods go on meanwhile.
//! When the proxy changes, which containerd reads at its start only, the same run starts the next
//! process. A run that is cancelled ends the pods first: their shims clean up while containerd is
//! there.
//!
//! What this module does not do: decide whether the node runs pods, or end the pods of a
//! containerd that is down (`service`).

use std::convert::Infallible;
use std::time::Duration;

use futures::FutureExt as _;
use tokio::sync::watch;
use tokio::time::Instant;
use tonic::transport::{Channel, Endpoint};
use tracing::{debug, info, warn};

use super::health::{self, Health};
use super::places::Config;
use super::{Status, config, gvisor, import, layout};
use crate::host;
use polis_base::cause;
use polis_base::files;
use polis_runtime::logtree::Parser;
use polis_runtime::supervisor::{Context, blocking};
use polis_runtime::sys::cgroup::Group;
use polis_runtime::sys::process::{self, Child, Command};
use polis_wire::node_roles::Role;
use polis_wire::parameters::Proxy;

/// Between two looks at a containerd that does not answer yet.
const LOOK_SOON: Duration = Duration::from_millis(250);
/// It reads its database at its start, and an emulated processor needs minutes; the parts of
/// Kubernetes have as long.
const STARTING_MAX: Duration = Duration::from_secs(15 * 60);
/// Between two questions about its health.
const ASK: Duration = Duration::from_secs(10);
/// Silent answers in a row after which it counts as hung.
const SILENCE_MAX: u32 = 6;
/// It ends its own requests within this; pods go on without it.
const GRACE: Duration = Duration::from_secs(5);
/// The kernel kills pods, kubelet's other children and the API server before it.
const OOM_SCORE: i16 = -999;
/// The kernel's own bound (`fs.nr_open`): a descriptor for each log and pipe of each
/// container.
const OPEN_FILES: u64 = 1 << 20;
/// As many as there are numbers (`kernel.pid_max`), for containerd and for each user in pods: the
/// kernel counts all pods with one user together, and its own bound, by memory, is small enough
/// that one pod could keep another from starting threads. kubelet bounds the processes of each pod.
const PROCESSES: u64 = 1 << 18;

/// How long pods have to end when the machine does: with [`GRACE`], within the time that the
/// supervisor gives a service to stop.
pub(super) const PODS_AT_END: Duration = Duration::from_secs(3);

/// Why a run ended.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The machine cannot carry workloads.
    #[error(transparent)]
    Host(#[from] host::Error),
    /// A file of its configuration cannot be written.
    #[error(transparent)]
    Files(#[from] files::Error),
    /// containerd does not run.
    #[error(transparent)]
    Process(#[from] process::Error),
    /// The images of the system cannot be read.
    #[error(transparent)]
    Layout(#[from] layout::Error),
    /// The images of the system are not imported.
    #[error(transparent)]
    Import(#[from] import::Error),
    /// The path of its socket cannot be part of an address.
    #[error("cannot address the socket of containerd")]
    Socket(#[source] tonic::transport::Error),
    /// It runs and has never answered.
    #[error("containerd did not answer within {} minutes of its start: {said}", STARTING_MAX.as_secs() / 60)]
    Slow {
        /// The last reason.
        said: String,
    },
    /// It runs and does not answer any more.
    #[error("containerd has not answered {SILENCE_MAX} times in a row")]
    Silent(#[source] Box<tonic::Status>),
}

/// The inputs of a run. Cloned into every run; holds no progress.
#[derive(Clone, Debug)]
pub(super) struct Daemon {
    pub(super) config: Config,
    /// The proxy of the cluster.
    pub(super) proxy: watch::Receiver<Option<Proxy>>,
    pub(super) status: watch::Sender<Status>,
}

/// Why a process ended without a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ended {
    /// The run was cancelled; the pods have ended.
    Cancelled,
    /// The cluster has another proxy; the pods go on.
    Outdated,
}

impl Daemon {
    /// Runs containerd until it ends, or until cancelled.
    ///
    /// # Errors
    ///
    /// [`Error`]; the supervisor starts a fresh run.
    pub(super) async fn run(self, ctx: Context) -> Result<(), Error> {
        loop {
            match Box::pin(self.once(&ctx)).await {
                // The service ends the pods of a containerd that is down.
                Ok(Ended::Outdated) if ctx.cancelled().now_or_never().is_some() => return Ok(()),
                Ok(Ended::Outdated) => info!("containerd starts again with another proxy"),
                Ok(Ended::Cancelled) => return Ok(()),
                Err(error) => {
                    self.status.send_replace(Status::Failed(cause::line(&error)));
                    return Err(error);
                }
            }
        }
    }

    async fn once(&self, ctx: &Context) -> Result<Ended, Error> {
        self.status.send_replace(Status::Starting);
        // Not cut off by a cancellation: a mount of it must not come after the last unmount.
        Box::pin(self.prepare()).await?;
        let proxy = self.proxy.borrow().clone();
        let mut child = self.command(ctx, proxy.as_ref()).spawn().await?;
        let ended = tokio::select! {
            // Cancel-safe, all of them: the child is ended below, and the rest waits or asks.
            served = self.serve(ctx) => served.map(|never| match never {}),
            exit = child.wait() => Err(child.failed(exit?).into()),
            () = outdated(self.proxy.clone(), proxy.as_ref()) => Ok(Ended::Outdated),
            () = ctx.cancelled() => {
                self.status.send_replace(Status::Ending);
                host::pods::end(&self.config.host.cgroup, PODS_AT_END).await;
                Ok(Ended::Cancelled)
            }
        };
        if !matches!(ended, Ok(Ended::Cancelled)) {
            self.status.send_replace(Status::Starting);
        }
        end(&mut child).await?;
        ended
    }

    /// Prepares the machine. The files are first: they show [`Config::has_run`] that there may
    /// be something to end.
    async fn prepare(&self) -> Result<(), Error> {
        let config = self.config.clone();
        let write = move || {
            let lacking = gvisor::lacking(&config.host.proc, &config.programs);
            write_files(&config, handler(&lacking))
        };
        Box::pin(blocking(write)).await?;
        let host = self.config.host.clone();
        Ok(blocking(move || host::prepare(&host, &[Role::KubernetesWorker])).await?)
    }

    fn command(&self, ctx: &Context, proxy: Option<&Proxy>) -> Command {
        let ephemeral = &self.config.tree.ephemeral;
        let mut command = Command::new(&self.config.binary)
            .arg("--config")
            .arg(ephemeral.containerd_config.path())
            .directory(ephemeral.containerd.dir.path())
            .oom_score_adj(OOM_SCORE)
            .open_files(OPEN_FILES)
            .processes(PROCESSES)
            .log(ctx.sink("containerd", Parser::Json));
        for (name, value) in config::environment(&self.config.tree, proxy) {
            command = command.env(name, value);
        }
        match Group::Containerd.existing() {
            Some(group) => command.cgroup(group),
            None => command,
        }
    }

    /// Imports the images, then asks for its health again and again. Ends with an error
    /// only.
    async fn serve(&self, ctx: &Context) -> Result<Infallible, Error> {
        let folder = self.config.images.clone();
        let images = blocking(move || layout::read(&folder)).await?;
        let (channel, first) = self.connected().await?;
        import::import(&channel, &images).await?;
        ctx.healthy();
        self.status.send_replace(Status::Serving(first));
        let mut silent = 0;
        loop {
            tokio::time::sleep(ASK).await;
            match health::ask(&channel).await {
                Ok(health) => {
                    silent = 0;
                    self.publish(health);
                }
                Err(status) => {
                    silent += 1;
                    warn!(error = &status as &dyn std::error::Error, silent, "no answer");
                    if silent >= SILENCE_MAX {
                        return Err(Error::Silent(Box::new(status)));
                    }
                }
            }
        }
    }

    /// Waits until it answers, for [`STARTING_MAX`] at most.
    async fn connected(&self) -> Result<(Channel, Health), Error> {
        let socket = self.config.tree.ephemeral.containerd.client();
        let address = format!("unix://{}", socket.display());
        let channel = Endpoint::from_shared(address).map_err(Error::Socket)?.connect_lazy();
        let begun = Instant::now();
        let mut last = cause::Last::default();
        loop {
            // To look up a file name is cheaper than a refused connection.
            let said = if socket.exists() {
                match health::ask(&channel).await {
                    Ok(health) => return Ok((channel, health)),
                    Err(status) => cause::line(&status),
                }
            } else {
                format!("{} does not exist", socket.display())
            };
            if begun.elapsed() >= STARTING_MAX {
                return Err(Error::Slow { said });
            }
            if last.is_new(&said) {
                debug!(%said, "containerd does not answer yet");
            }
            tokio::time::sleep(LOOK_SOON).await;
        }
    }

    fn publish(&self, health: Health) {
        let serving = Status::Serving(health);
        self.status.send_if_modified(|status| {
            let changed = *status != serving;
            *status = serving;
            changed
        });
    }
}

/// Waits until the cluster has another proxy than `known`. Cancel-safe.
async fn outdated(mut proxy: watch::Receiver<Option<Proxy>>, known: Option<&Proxy>) {
    if proxy.wait_for(|proxy| proxy.as_ref() != known).await.is_err() {
        // Its owner ends with the node, which cancels this run.
        std::future::pending::<()>().await;
    }
}

/// Ends a process that has not ended by itself.
async fn end(child: &mut Child) -> Result<(), process::Error> {
    if child.id().is_some() {
        let exit = child.terminate(GRACE).await?;
        info!(%exit, "containerd");
    }
    Ok(())
}

/// Whether containerd gets the handler of gVisor: not on a machine that lacks something for it,
/// whose other pods run. `worker::node_object` reports that.
fn handler(lacking: &[String]) -> config::Gvisor {
    match lacking {
        [] => config::Gvisor::Here,
        _ => config::Gvisor::Lacking,
    }
}

/// Writes the configuration, and removes the socket of an earlier run, which would look like
/// one that serves.
pub(super) fn write_files(config: &Config, handler: config::Gvisor) -> Result<(), files::Error> {
    let ephemeral = &config.tree.ephemeral;
    let gvisor = config.gvisor.path().parent().map(|path| files::Dir::private(path.into()));
    let directories = [
        &ephemeral.containerd.dir,
        &ephemeral.registries,
        &ephemeral.containerd_scratch,
        &ephemeral.pod_network,
    ];
    for directory in directories.into_iter().chain(&gvisor) {
        directory.create()?;
    }
    let _absent = std::fs::remove_file(ephemeral.containerd.client());
    config.gvisor.write(gvisor::configuration().as_bytes())?;
    let text = config::containerd(&config.tree, config.gvisor.path(), handler);
    ephemeral.containerd_config.write(text.as_bytes())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use polis_proto::v1;
    use tokio::net::UnixListener;
    use tokio::time::timeout;

    use super::*;

    fn daemon(base: &Path) -> Daemon {
        let config = Config::live(&files::Root::at(base));
        Daemon { config, proxy: watch::channel(None).1, status: watch::Sender::default() }
    }

    /// Why it gives up, and not before its time.
    async fn given_up(daemon: &Daemon) -> String {
        let begun = Instant::now();
        let ended = timeout(STARTING_MAX * 2, daemon.connected()).await.unwrap();
        assert!(begun.elapsed() >= STARTING_MAX);
        ended.unwrap_err().to_string()
    }

    #[tokio::test(start_paused = true)]
    async fn a_containerd_without_a_socket_is_given_up() {
        let base = tempfile::tempdir().unwrap();
        let said = given_up(&daemon(base.path())).await;
        let begins = "containerd did not answer within 15 minutes of its start: ";
        assert!(
            said.starts_with(begins) && said.ends_with("/client.sock does not exist"),
            "{said}"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn a_containerd_that_accepts_and_says_nothing_is_given_up() {
        let base = tempfile::tempdir().unwrap();
        let daemon = daemon(base.path());
        let sockets = &daemon.config.tree.ephemeral.containerd;
        sockets.dir.create().unwrap();
        let _listener = UnixListener::bind(sockets.client()).unwrap();
        let said = given_up(&daemon).await;
        assert!(said.contains("15 minutes") && said.contains("no answer"), "{said}");
    }

    #[tokio::test]
    async fn another_proxy_starts_containerd_again_and_the_same_one_does_not() {
        let named = |url: &str| {
            let message = v1::ProxyConfiguration { url: url.to_owned(), ..Default::default() };
            polis_wire::parameters::proxy(&message, "proxy").unwrap()
        };
        let (first, second) = (named("http://a.example:3128"), named("http://b.example:3128"));
        for (known, other) in [(None, first.clone()), (first.clone(), second), (first, None)] {
            let sender = watch::Sender::new(known.clone());
            let mut waits = std::pin::pin!(outdated(sender.subscribe(), known.as_ref()));
            sender.send_replace(known.clone());
            assert!(waits.as_mut().now_or_never().is_none());
            sender.send_replace(other);
            assert!(waits.as_mut().now_or_never().is_some());
        }
    }

    #[test]
    fn a_machine_that_lacks_something_for_gvisor_has_no_handler_for_it() {
        assert_eq!(handler(&[]), config::Gvisor::Here);
        assert_eq!(handler(&["no filters".to_owned()]), config::Gvisor::Lacking);
    }
}
