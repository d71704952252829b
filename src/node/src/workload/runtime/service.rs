//! The life of containerd: prepared, started, asked for its health, and ended.

use std::path::PathBuf;
use std::time::Duration;

use polis_proto::v1;
use tokio::sync::watch;
use tonic::transport::{Channel, Endpoint};
use tracing::{info, warn};

use super::health::{self, Health};
use super::{Pods, Status, config, gvisor, import, layout, pods};
use crate::workload::certificates::chain;
use crate::workload::{self, Part, ground};
use crate::{cluster, storage};
use polis_base::files;
use polis_base::serial::EventLine;
use polis_runtime::logtree::Parser;
use polis_runtime::supervisor::{Context, Policy, blocking};
use polis_runtime::sys::cgroup::Group;
use polis_runtime::sys::process::{self, Child, Command};
use polis_wire::node_roles::Role;

/// Between two looks at a containerd that does not answer yet.
const LOOK_SOON: Duration = Duration::from_millis(250);
/// Between two questions about its health.
const ASK: Duration = Duration::from_secs(10);
/// Silent answers in a row after which it counts as hung.
const SILENCE_MAX: u32 = 6;
/// It ends its own requests within this; pods go on without it.
const GRACE: Duration = Duration::from_secs(5);
/// How long pods have to end when the machine does: with [`GRACE`], within the time that the
/// supervisor gives a service to stop.
const PODS_AT_END: Duration = Duration::from_secs(3);
/// How long they have when the role is taken away: Kubernetes' own default.
const PODS_WITHOUT_ROLE: Duration = Duration::from_secs(30);
/// The kernel kills pods, kubelet's other children and the API server before it.
const OOM_SCORE: i16 = -999;
/// The kernel's own bound (`fs.nr_open`): a descriptor for each log and pipe of each
/// container.
const OPEN_FILES: u64 = 1 << 20;

/// Where everything is.
#[derive(Clone, Debug)]
pub struct Config {
    /// The program.
    pub binary: PathBuf,
    /// The directory with the programs that containerd starts.
    pub programs: PathBuf,
    /// The configuration of gVisor, at the one path where its shim looks before it has that
    /// of the handler.
    pub gvisor: files::File,
    /// The OCI layout with the images of the system.
    pub images: PathBuf,
    /// The tree of the node.
    pub tree: files::Root,
    /// The interfaces of the machine.
    pub ground: ground::Config,
}

impl Config {
    /// The places of a running node.
    #[must_use]
    pub fn live(tree: &files::Root) -> Self {
        Self {
            binary: "/usr/bin/containerd".into(),
            programs: "/usr/bin".into(),
            gvisor: files::File::public(gvisor::CONFIGURATION.into()),
            images: "/usr/share/polis/images".into(),
            tree: tree.clone(),
            ground: ground::Config::live(tree),
        }
    }
}

/// Why a run ended.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The machine cannot carry workloads.
    #[error(transparent)]
    Ground(#[from] ground::Error),
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
    /// It runs and does not answer.
    #[error("containerd has not answered {SILENCE_MAX} times in a row")]
    Silent(#[source] Box<tonic::Status>),
    /// The owner of an input ended.
    #[error("lost {0}")]
    Closed(&'static str),
}

/// What becomes of pods when a run ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Remains {
    /// A containerd that died leaves them alone: the next one finds them.
    Stay,
    /// The machine ends, or the role was taken away.
    End,
}

/// Configuration, inputs and outputs. Cloned into every run; holds no progress.
#[derive(Clone, Debug)]
pub struct Service {
    /// Where everything is.
    pub config: Config,
    /// Whether this node is a member.
    pub cluster: watch::Receiver<cluster::Status>,
    /// The roles that the cluster gives to it; `None` before it knows them.
    pub roles: watch::Receiver<Option<v1::NodeRoles>>,
    /// The data partition.
    pub storage: watch::Receiver<storage::Status>,
    /// The parts of Kubernetes: kubelet ends before containerd does.
    pub workload: watch::Receiver<workload::Status>,
    /// What everyone else may know.
    pub status: watch::Sender<Status>,
    /// The pods; `None` while containerd does not answer.
    pub pods: watch::Sender<Option<Pods>>,
}

impl Service {
    /// Runs containerd while this node is a worker, until cancelled.
    ///
    /// # Errors
    ///
    /// [`Error`]; the supervisor starts a fresh run.
    pub async fn run(self, ctx: Context) -> Result<(), Error> {
        let ended = self.follow(&ctx).await;
        if let Err(error) = &ended {
            self.status.send_replace(Status::Failed(chain(error)));
        }
        ended
    }

    async fn follow(&self, ctx: &Context) -> Result<(), Error> {
        if !self.is_wanted() {
            self.status.send_replace(Status::Stopped);
        }
        let pods = pods::Service {
            socket: self.config.tree.ephemeral.containerd.client().to_owned(),
            runtime: self.status.subscribe(),
            pods: self.pods.clone(),
        };
        ctx.spawn("pods", Policy::forever(), move |ctx| pods.clone().run(ctx));
        loop {
            if !self.is_wanted() {
                // Nothing to run is no fault. A run that begins again after a failure is not
                // healthy before containerd answers.
                ctx.healthy();
            }
            let Some(wanted) = ctx.until_cancelled(self.wanted(true)).await else { return Ok(()) };
            wanted?;
            if !self.config.binary.exists() {
                warn!("the image of this machine is of the base variant: it runs no pods");
                let line = EventLine::new("workload").field("part", "containerd");
                ctx.lines().event(line.field("state", "absent"));
                self.status.send_replace(Status::Absent);
                ctx.healthy();
                let Some(gone) = ctx.until_cancelled(self.wanted(false)).await else {
                    return Ok(());
                };
                gone?;
                self.status.send_replace(Status::Stopped);
                continue;
            }
            self.status.send_replace(Status::Starting);
            let start = Box::pin(self.start(ctx));
            let Some(mut child) = ctx.until_cancelled(start).await.transpose()? else {
                return Ok(());
            };
            let (served, remains) = tokio::select! {
                // Cancel-safe, all of them: the child is ended below, and the rest waits or
                // asks.
                served = self.serve(ctx) => (served, Remains::Stay),
                exit = child.wait() => (Err(child.failed(exit?).into()), Remains::Stay),
                withdrawn = self.wanted(false) => (withdrawn, Remains::End),
                () = ctx.cancelled() => (Ok(()), Remains::End),
            };
            self.status.send_replace(Status::Stopped);
            if remains == Remains::End {
                self.end_pods(ctx).await;
            }
            if child.id().is_some() {
                let exit = child.terminate(GRACE).await?;
                info!(%exit, "containerd");
            }
            served?;
            let ground = self.config.ground.clone();
            blocking(move || ground::release(&ground)).await;
        }
    }

    /// Ends the pods before containerd, which cleans up behind them. When the machine ends
    /// meanwhile, they have less time.
    async fn end_pods(&self, ctx: &Context) {
        let group = &self.config.ground.cgroup;
        let ended = ctx.until_cancelled(ground::pods::end(group, PODS_WITHOUT_ROLE)).await;
        if ended.is_none() {
            ground::pods::end(group, PODS_AT_END).await;
        }
    }

    /// Whether this node is to run pods, or still does.
    fn is_wanted(&self) -> bool {
        let kubelet = self.workload.borrow().parts.contains_key(&Part::Kubelet);
        let worker =
            self.roles().contains(&Role::KubernetesWorker) && self.cluster.borrow().is_member();
        (worker || kubelet) && self.storage.borrow().ready().is_some()
    }

    fn roles(&self) -> Vec<Role> {
        Role::given(&self.roles.borrow().unwrap_or_default()).collect()
    }

    /// Waits until this node is to run pods, or is not.
    async fn wanted(&self, wanted: bool) -> Result<(), Error> {
        let (mut cluster, mut storage) = (self.cluster.clone(), self.storage.clone());
        let mut roles = self.roles.clone();
        let mut workload = self.workload.clone();
        loop {
            cluster.mark_unchanged();
            roles.mark_unchanged();
            storage.mark_unchanged();
            workload.mark_unchanged();
            if self.is_wanted() == wanted {
                return Ok(());
            }
            tokio::select! {
                // Cancel-safe, all of them: they wait for event values.
                changed = cluster.changed() => changed.map_err(|_closed| Error::Closed("the cluster"))?,
                changed = roles.changed() => changed.map_err(|_closed| Error::Closed("the roles"))?,
                changed = storage.changed() => changed.map_err(|_closed| Error::Closed("storage"))?,
                changed = workload.changed() => {
                    changed.map_err(|_closed| Error::Closed("the parts of Kubernetes"))?;
                }
            }
        }
    }

    /// Prepares the machine and starts the program.
    async fn start(&self, ctx: &Context) -> Result<Child, Error> {
        let roles = self.roles();
        let ground = self.config.ground.clone();
        blocking(move || ground::prepare(&ground, &roles)).await?;
        let config = self.config.clone();
        let lacking =
            blocking(move || gvisor::lacking(&config.ground.proc, &config.programs)).await;
        let handler = report(ctx, &lacking);
        let config = self.config.clone();
        blocking(move || write_files(&config, handler)).await?;
        let ephemeral = &self.config.tree.ephemeral;
        let mut command = Command::new(&self.config.binary)
            .arg("--config")
            .arg(ephemeral.containerd_config.path())
            .directory(ephemeral.containerd.dir.path())
            .oom_score_adj(OOM_SCORE)
            .open_files(OPEN_FILES)
            .log(ctx.sink("containerd", Parser::Raw));
        for (name, value) in config::environment(&self.config.tree) {
            command = command.env(name, value);
        }
        if let Some(group) = Group::Containerd.existing() {
            command = command.cgroup(group);
        }
        Ok(command.spawn().await?)
    }

    /// Imports the images, then asks for its health again and again. Ends with an error
    /// only.
    async fn serve(&self, ctx: &Context) -> Result<(), Error> {
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

    /// Waits until it answers.
    async fn connected(&self) -> Result<(Channel, Health), Error> {
        let socket = self.config.tree.ephemeral.containerd.client();
        let address = format!("unix://{}", socket.display());
        let channel = Endpoint::from_shared(address).map_err(Error::Socket)?.connect_lazy();
        loop {
            // To look up a file name is cheaper than a refused connection.
            if socket.exists()
                && let Ok(health) = health::ask(&channel).await
            {
                return Ok((channel, health));
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

/// Whether containerd gets the handler of gVisor. A machine that lacks something for it says
/// so once: its other pods run.
fn report(ctx: &Context, lacking: &[String]) -> config::Gvisor {
    if lacking.is_empty() {
        return config::Gvisor::Here;
    }
    let cause = lacking.join("; ");
    warn!(%cause, "this machine runs no pods of the runtime class gvisor");
    let line = EventLine::new("workload").field("part", "gvisor").field("state", "absent");
    ctx.lines().event(line.field("cause", cause));
    config::Gvisor::Lacking
}

/// Writes the configuration, and removes the socket of an earlier run, which would look like
/// one that serves.
fn write_files(config: &Config, handler: config::Gvisor) -> Result<(), files::Error> {
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
#[path = "service_tests.rs"]
mod tests;
