//! The volumes of further disks: takes an empty disk that the parameters select, encrypts it as
//! the data partition is, and mounts it at `/data/disks/NAME`.
//!
//! ```text
//! parameters --name, selector--+
//! record ------name, identity--+--> one task for each volume
//!
//! no entry:  disks settle --> exactly one fits --> empty --> entry --> table, marked --+
//! entry:     the disk with its partition -----------------------------------------+    |
//!                                                                                 v    v
//!            key, mount, entry whole  <-- the steps of `storage::apply` ---------------+
//! ```
//!
//! A volume is one partition of a disk of its own, made by the steps of the data partition
//! (`storage::apply`), so a power cut anywhere is followed by a boot that finishes. Its key is
//! random and lies on the data partition (`record`): it is as safe as that, and ends with it.
//!
//! Invariants:
//! - Only an empty disk is taken, and only if exactly one fits the selector.
//! - A volume that was made to the end is found by its identity, and never made again.
//! - Two disks with the identity of one volume are never chosen between.
//! - A volume that is absent or fails stops nothing else: the node tries again.
//! - A mounted volume whose disk stalls is named within seconds, and ready again with the next
//!   answer of the disk, but not once the disk is gone.
//! - A disk that does not answer holds four threads of its own at most, for its serial number, its
//!   table, a step and a flush, and none that the node saves a file with. A volume waits for it
//!   only if no other disk has its partition, or if it is the one that fits the selector.
//! - Pods see `content` only; without the disk there is no such directory, so nothing that is
//!   meant for the volume ever lands on the data partition.
//!
//! What this module does not do: bind a volume to a claim (Kubernetes, by an object of an
//! operator).

mod disk;
mod record;

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::path::{Path, PathBuf};
use std::time::Duration;

use polis_wire::parameters::{Selector, VolumeName};
use tokio::io::Interest;
use tokio::sync::watch;
use tokio::time::{sleep, timeout};
use tracing::{error, info, warn};

pub use self::disk::Error;
use self::disk::{Machine, Opened, Reads};
use self::record::Record;
use crate::install::disks::{List, Steady};
use crate::parameters::Known;
use crate::storage::detached::name_of;
use crate::storage::health::{self, Devices, Fault, What};
use crate::storage::maintenance::maintain;
use crate::storage::stall::{SLOW, Watched};
use crate::storage::steps::Steps;
use crate::storage::{self, Kind};
use polis_base::cause;
use polis_base::environment::Environment;
use polis_base::files::Root;
use polis_base::serial::EventLine;
use polis_base::sys::clock;
use polis_base::sys::kmsg::{From, Reader};
use polis_runtime::event::{self, Closed};
use polis_runtime::logtree::Parser;
use polis_runtime::supervisor::{Context, Policy, blocking};
use polis_runtime::sys::readiness;

/// Between two attempts: somebody may plug a disk in, or mend one.
const RETRY: Duration = Duration::from_secs(5);
/// How often the list of disks is looked at, and the disk of a mounted volume.
const POLL: Duration = Duration::from_secs(1);

/// The state of a volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum State {
    /// Its disk is looked for, prepared or opened.
    Starting,
    /// It is mounted.
    Ready,
    /// It is not mounted, or cannot be used: for now, while its disk does not answer.
    Failed {
        /// Why, for people.
        cause: String,
    },
    /// Its disk is missing, and the parameters do not name it any more: the operator gave it up.
    Absent,
}

impl State {
    /// Its words, as operators and metrics have them.
    pub const NAMES: [&str; 4] = ["starting", "ready", "failed", "absent"];

    /// The word of this state.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Ready => "ready",
            Self::Failed { .. } => "failed",
            Self::Absent => "absent",
        }
    }

    /// Why it failed.
    #[must_use]
    pub fn cause(&self) -> Option<&str> {
        match self {
            Self::Failed { cause } => Some(cause),
            Self::Starting | Self::Ready | Self::Absent => None,
        }
    }
}

/// Every volume of this node.
pub type Status = BTreeMap<VolumeName, State>;

/// The warnings of the console.
#[must_use]
pub fn warnings(status: &Status) -> Vec<String> {
    let failed = status.iter().filter_map(|(name, state)| match state {
        State::Failed { cause } => Some(format!("the volume {name} cannot be used: {cause}")),
        State::Starting | State::Ready | State::Absent => None,
    });
    failed.collect()
}

/// The service. A run holds all progress.
#[derive(Clone, Debug)]
pub struct Service {
    /// The disk that the machine runs from.
    pub medium: PathBuf,
    /// The tree; volumes are mounted in it.
    pub root: Root,
    /// The parameters of this machine.
    pub known: watch::Receiver<Known>,
    /// Whether the data partition is there.
    pub storage: watch::Receiver<storage::Status>,
    /// The published states.
    pub status: watch::Sender<Status>,
}

/// Why a run ended.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// An owner of an input ended.
    #[error(transparent)]
    Closed(#[from] Closed),
    /// The record cannot be read.
    #[error(transparent)]
    Record(#[from] record::Error),
}

impl Service {
    /// The service of a running node.
    #[must_use]
    pub fn live(
        environment: &Environment,
        root: Root,
        known: watch::Receiver<Known>,
        storage: watch::Receiver<storage::Status>,
        status: watch::Sender<Status>,
    ) -> Self {
        Self { medium: environment.disk.clone(), root, known, storage, status }
    }

    /// Mounts every volume, and unmounts them when it is cancelled.
    ///
    /// # Errors
    ///
    /// [`RunError`]; a restart finds mounted volumes mounted.
    pub async fn run(mut self, ctx: Context) -> Result<(), RunError> {
        self.status.send_replace(Status::new());
        let Some(inputs) = ctx.until_cancelled(self.inputs()).await else { return Ok(()) };
        let (kind, orders) = inputs?;
        let record = Record::new(self.root.data.node.volumes.clone());
        let look = record.clone();
        let made = blocking(move || look.names()).await?;
        let mut wanted: BTreeMap<VolumeName, Option<Selector>> =
            made.into_iter().map(|name| (name, None)).collect();
        wanted.extend(orders.into_iter().map(|(name, disk)| (name, Some(disk))));
        let reads = Reads::default();
        for (name, selector) in wanted {
            let volume = Volume {
                machine: Machine {
                    sys: "/sys".into(),
                    dev: "/dev".into(),
                    medium: self.medium.clone(),
                    disks: self.root.data.disks.clone(),
                    record: record.clone(),
                    log: ctx.sink("disk", Parser::Tool),
                    reads: reads.clone(),
                    steps: Steps::default(),
                },
                name: name.clone(),
                selector,
                kind,
                status: self.status.clone(),
            };
            let service = format!("volume-{name}");
            ctx.spawn(&service, Policy::forever(), move |ctx| Box::pin(volume.clone().run(ctx)));
        }
        ctx.healthy();
        ctx.cancelled().await;
        Ok(())
    }

    /// The protection of the data partition, and the volumes that the parameters ask for.
    async fn inputs(&mut self) -> Result<(Kind, Vec<(VolumeName, Selector)>), Closed> {
        let kind = event::until(&mut self.storage, "storage", |status| {
            status.ready().map(|ready| ready.kind)
        });
        let kind = kind.await?;
        let orders = event::until(&mut self.known, "parameters", |known| {
            let parameters = known.as_ref()?.parameters();
            let volumes = parameters.map(|parameters| parameters.volumes.clone());
            Some(volumes.unwrap_or_default())
        });
        let orders = orders.await?;
        Ok((kind, orders.into_iter().map(|volume| (volume.name, volume.disk)).collect()))
    }
}

/// One volume.
#[derive(Clone, Debug)]
struct Volume {
    machine: Machine,
    name: VolumeName,
    /// The disk that a new one takes; `None` once the parameters do not name it.
    selector: Option<Selector>,
    /// The protection of a new one.
    kind: Kind,
    status: watch::Sender<Status>,
}

impl Volume {
    async fn run(self, ctx: Context) -> Result<(), Infallible> {
        self.set(State::Starting);
        ctx.healthy();
        let Some(opened) = ctx.until_cancelled(self.open(&ctx)).await else { return Ok(()) };
        self.set(State::Ready);
        info!(volume = %self.name, disk = %opened.live.disk.display(), kind = %opened.live.kind,
            "the volume is mounted");
        let line = self.line("ready").field("disk", opened.disk_name());
        ctx.lines().event(line.field("kind", opened.live.kind));
        let devices = opened.devices();
        let kept = async {
            tokio::select! {
                // Cancel-safe: the maintenance may stop at any moment.
                () = maintained(&opened) => {}
                // Cancel-safe: it waits for the kernel's log.
                watched = self.watch(&ctx, &devices) => if let Err(error) = watched {
                    self.unwatched(&error);
                    std::future::pending::<()>().await;
                },
                // Cancel-safe: it waits for the time, and a flush that has begun goes on.
                never = self.listen(&ctx, &opened.live.disk) => match never {},
            }
        };
        ctx.until_cancelled(kept).await;
        opened.live.leave().await;
        Ok(())
    }

    /// Tries until the volume is mounted. Cancel-safe between two steps of the disk.
    async fn open(&self, ctx: &Context) -> Opened {
        // An earlier run may have ended in the middle of a step.
        let machine = Machine { steps: Steps::default(), ..self.machine.clone() };
        let mut last = cause::Last::default();
        let mut steady = Steady::default();
        loop {
            let attempt = async {
                let found = machine.disks().await;
                // A disk that is known by its identity needs no wait.
                let list = steady.look(&found);
                let (selector, settled) = (self.selector.as_ref(), list == List::Settled);
                let opened = machine.open(&self.name, selector, self.kind, &found, settled).await;
                match (opened, list) {
                    (Ok(None), List::Restless(disks)) => Err(disk::Error::Restless { disks }),
                    (opened, _) => opened,
                }
            };
            let attempt = Box::pin(attempt);
            match self.ended(ctx, &machine.steps, &mut last, attempt).await {
                Ok(Some(opened)) => return opened,
                Ok(None) => sleep(POLL).await,
                Err(error) => {
                    self.failed(ctx, &mut last, &error);
                    sleep(RETRY).await;
                }
            }
        }
    }

    /// Waits for an attempt, however long it takes: a step that hangs holds a thread, and another
    /// attempt would hold one more. Reports a step that is late.
    async fn ended<T>(
        &self,
        ctx: &Context,
        steps: &Steps,
        last: &mut cause::Last,
        attempt: impl Future<Output = T>,
    ) -> T {
        let mut attempt = std::pin::pin!(attempt);
        let mut was_late = false;
        loop {
            if let Ok(done) = timeout(POLL, &mut attempt).await {
                return done;
            }
            let late = steps.late().map(disk::Error::Late);
            if let Some(error) = late.as_ref().filter(|_late| !was_late) {
                self.failed(ctx, last, error);
            }
            if was_late && late.is_none() {
                self.set(State::Starting);
            }
            was_late = late.is_some();
        }
    }

    /// Reports why the volume is not there.
    fn failed(&self, ctx: &Context, last: &mut cause::Last, error: &disk::Error) {
        let cause = cause::line(error);
        let is_given_up = self.selector.is_none() && matches!(error, disk::Error::Missing { .. });
        let state = match is_given_up {
            true => State::Absent,
            false => State::Failed { cause: cause.clone() },
        };
        if last.is_new(&cause) {
            let error = error as &dyn std::error::Error;
            warn!(error, volume = %self.name, "the volume is not there, and is tried again");
            ctx.lines().event(self.line(state.name()).field("cause", &cause));
        }
        self.set(state);
    }

    /// Reports what the kernel says of the disk, until its log cannot be read.
    async fn watch(&self, ctx: &Context, devices: &Devices) -> std::io::Result<()> {
        let mut log = Reader::open(From::Now)?;
        let watched = readiness::watch(&log, Interest::READABLE)?;
        let mut last = None;
        loop {
            // Cancel-safe: only waits.
            let mut ready = watched.readable().await?;
            while let Some(record) = log.next_record()? {
                let fault = health::of(&record, devices);
                if let Some(fault) = fault.filter(|fault| last.as_ref() != Some(fault)) {
                    self.fault(ctx, &fault);
                    last = Some(fault);
                }
            }
            ready.clear_ready();
        }
    }

    /// Names the disk while it does not answer: the kernel reports most such disks only after
    /// minutes, and others never.
    async fn listen(&self, ctx: &Context, disk: &Path) -> Infallible {
        let name = name_of(disk);
        let mut watched = Watched::of(&self.machine.sys, disk);
        let mut tick = tokio::time::interval(POLL);
        let mut stalled = None;
        loop {
            tick.tick().await;
            let now = clock::uptime();
            let since = watched.look(now).filter(|since| now.saturating_sub(*since) >= SLOW);
            stalled = match (stalled, since) {
                (None, Some(since)) => Some(self.stalls(ctx, &name, since)),
                (Some(state), None) => self.answers(ctx, &name, state),
                (stalled, _) => stalled,
            };
        }
    }

    /// Reports that the disk has not answered since this time of the boot; returns the state that
    /// says so.
    fn stalls(&self, ctx: &Context, disk: &str, since: Duration) -> State {
        let cause = format!(
            "the disk {disk} has not answered since second {} of this boot; check it and its \
             cable, or pull it and reboot the node",
            since.as_secs()
        );
        error!(volume = %self.name, "{cause}");
        ctx.lines().event(self.line("failed").field("cause", &cause));
        let stalled = State::Failed { cause };
        self.replace(&State::Ready, stalled.clone());
        stalled
    }

    /// Reports that it answers again: the volume is ready, unless more has failed meanwhile. A disk
    /// that was pulled owes no answer, either: the state of its volume stays, and is returned.
    fn answers(&self, ctx: &Context, disk: &str, stalled: State) -> Option<State> {
        if !self.machine.sys.join("block").join(disk).exists() {
            return Some(stalled);
        }
        warn!(volume = %self.name, disk, "the disk answers again");
        if self.replace(&stalled, State::Ready) {
            ctx.lines().event(self.line("ready").field("disk", disk));
        }
        None
    }

    fn unwatched(&self, error: &std::io::Error) {
        let error = error as &dyn std::error::Error;
        warn!(error, volume = %self.name, "errors of its disk are not detected");
    }

    fn fault(&self, ctx: &Context, fault: &Fault) {
        error!(volume = %self.name, "{fault}");
        ctx.lines().event(self.line("failing").field("cause", fault));
        match fault.what {
            // Only a new mount knows what is on the disk.
            What::Write | What::ShutDown | What::Hung => self.set(State::Failed {
                cause: format!("{fault}; check the disk, and reboot the node"),
            }),
            What::Changed | What::Read | What::Corrupt => {}
        }
    }

    fn line(&self, state: &str) -> EventLine {
        EventLine::new("volume").field("name", &self.name).field("state", state)
    }

    fn set(&self, state: State) {
        self.status.send_modify(|status| {
            status.insert(self.name.clone(), state);
        });
    }

    /// Puts a state in the place of this one; false where the volume has another.
    fn replace(&self, from: &State, to: State) -> bool {
        self.status.send_if_modified(|status| match status.get_mut(&self.name) {
            Some(state) if state == from => {
                *state = to;
                true
            }
            Some(_) | None => false,
        })
    }
}

/// Maintains the mounted volume, and waits.
async fn maintained(opened: &Opened) {
    maintain(&opened.live, &opened.partition).await;
    std::future::pending::<()>().await;
}

#[cfg(test)]
mod tests {
    use polis_base::files::{Dir, File};

    use super::*;

    #[test]
    fn only_a_volume_that_failed_is_a_warning() {
        let failed = State::Failed { cause: "no disk".to_owned() };
        let states =
            [("a", State::Starting), ("b", State::Ready), ("c", failed), ("d", State::Absent)];
        let status = states.map(|(name, state)| (name.parse().unwrap(), state)).into();
        assert_eq!(warnings(&status), ["the volume c cannot be used: no disk"]);
    }

    /// The volume `db` of a machine whose files are in this folder.
    fn volume(base: &Path, ctx: &Context) -> Volume {
        let machine = Machine {
            sys: base.to_owned(),
            dev: base.to_owned(),
            medium: "vda".into(),
            disks: Dir::private(base.join("disks")),
            record: Record::new(File::private(base.join("volumes.json"))),
            log: ctx.sink("disk", Parser::Tool),
            reads: Reads::default(),
            steps: Steps::default(),
        };
        let (name, status) = ("db".parse().unwrap(), watch::Sender::new(Status::new()));
        Volume { machine, name, selector: None, kind: Kind::Insecure, status }
    }

    #[tokio::test]
    async fn a_mounted_volume_whose_disk_stalls_is_named_until_the_disk_answers() {
        let base = tempfile::tempdir().unwrap();
        let (ctx, mut handles) = Context::for_test();
        let volume = volume(base.path(), &ctx);
        let state = || volume.status.borrow()[&volume.name].clone();
        volume.set(State::Ready);
        let stalled = volume.stalls(&ctx, "vdb", Duration::from_secs(70));
        assert_eq!(state(), stalled);
        let cause = stalled.cause().unwrap();
        assert!(cause.starts_with("the disk vdb has not answered since second 70"), "{cause}");
        assert!(cause.contains("check it and its cable"), "{cause}");
        // Its disk was pulled, and owes no answer.
        let stalled = volume.answers(&ctx, "vdb", stalled).unwrap();
        assert_eq!(state(), stalled);
        std::fs::create_dir_all(base.path().join("block/vdb")).unwrap();
        assert_eq!(volume.answers(&ctx, "vdb", stalled), None);
        assert_eq!(state(), State::Ready);
        let lines = handles.take_lines().join(" ");
        let states = ["state=failed cause=", "state=ready disk=vdb"];
        assert!(states.iter().all(|state| lines.contains(state)), "{lines}");
        // Only a new mount ends what a failed write has begun.
        let stalled = volume.stalls(&ctx, "vdb", Duration::from_secs(90));
        let fault = Fault { what: What::Write, device: "vdb".to_owned(), sector: None };
        volume.fault(&ctx, &fault);
        assert_eq!(volume.answers(&ctx, "vdb", stalled), None);
        assert!(state().cause().unwrap().contains("fails writes"), "{:?}", state());
    }

    #[tokio::test(start_paused = true)]
    async fn a_step_that_hangs_is_reported_with_its_disk_and_waited_for() {
        let base = tempfile::tempdir().unwrap();
        let (ctx, mut handles) = Context::for_test();
        let volume = volume(base.path(), &ctx);
        let (status, name) = (volume.status.clone(), volume.name.clone());
        volume.set(State::Starting);
        let (steps, limit) = (Steps::default(), Duration::from_secs(60));
        let hung = async {
            steps.during("vdb", "mounting the volume", limit, sleep(limit * 2)).await;
            // Another step, which is not late.
            sleep(POLL * 3).await;
            7
        };
        let looks = async {
            let mut states = Vec::new();
            for wait in [limit / 2, limit, limit / 2 + POLL * 2] {
                sleep(wait).await;
                states.push(status.borrow().get(&name).cloned().unwrap());
            }
            states
        };
        let mut last = cause::Last::default();
        let (done, states) = tokio::join!(volume.ended(&ctx, &steps, &mut last, hung), looks);
        assert_eq!(done, 7);
        let cause = states[1].cause().unwrap();
        assert!(cause.contains("vdb") && cause.contains("mounting the volume"), "{cause}");
        assert_eq!([&states[0], &states[2]], [&State::Starting; 2]);
        let lines = handles.take_lines();
        let failed = lines.iter().filter(|line| line.contains("state=failed")).count();
        assert_eq!(failed, 1, "{lines:?}");
    }
}
