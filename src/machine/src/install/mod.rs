//! The installation: puts the system that runs, from a stick or another disk, on the disk of
//! the machine that its parameters select.
//!
//! ```text
//! [disks settle] --> select --> look --empty, unfinished, or wiped by words--> write --> verify
//!                      |         |                                                        |
//!                      |         +--installed by this installation--> [present]   boot <--+
//!                      |         +--other data--> guru 0432             off         |
//!                      +--not exactly one disk--> guru 0431                         v
//!                                                                               [installed]
//!                                                                                 reboot
//! ```
//!
//! The cluster manager asks for it instead of making the machine a node; no data partition is
//! made on the medium. Everything that is known of an installation is on its disk
//! ([`content`]), so a medium may install any number of machines, and a cut one begins again.
//!
//! Invariants:
//! - Nothing is written unless exactly one disk fits the selector.
//! - A disk with data is written only if the parameters say so in words; the medium never.
//! - A power cut at any moment leaves a disk that firmware does not start, and that the next
//!   run recognises as unfinished, or a complete one.
//! - A disk that has the ID of the installation is complete and left alone.
//! - Every wait for a disk has a bound, and names a remedy.
//!
//! What this module does not do: decide whether this machine installs, or end the machine
//! (`cluster`).

pub(crate) mod boot_files;
pub(crate) mod content;
pub mod disks;
mod error;
mod plan;
pub(crate) mod select;
mod write;

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use polis_wire::parameters::{Install, Selector, Wipe};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, timeout};
use tracing::{info, warn};

use self::content::Content;
use self::disks::{Disk, Disks, List, Steady};
pub use self::error::Error;
pub use self::select::Refusal;
use self::write::{Job, System};
use crate::storage::deadline::{LARGE, SOON};
use crate::storage::detached::{detached, name_of};
use crate::storage::service::PROBE_MAX;
use crate::storage::{self, slot::Slot, table};
use polis_base::environment::Environment;
use polis_base::serial::EventLine;
use polis_base::stage::{Stage, State};
use polis_base::sys::reboot::Reason;
use polis_base::sys::{block, command_line};
use polis_base::{files, hex};
use polis_runtime::supervisor::Context;

/// How often the list of disks is looked at.
const POLL: Duration = Duration::from_millis(250);
/// How long a disk that fits may take to appear: an adapter with full shelves takes a minute.
const PATIENCE: Duration = Duration::from_secs(120);
/// A line of the serial port for each tenth of a phase.
const TENTHS: u64 = 10;
/// Reports of progress that wait to be announced: the writes wait for the rest.
const REPORTS_MAX: usize = 16;
/// How long the writes may take from one report to the next, 32 MiB and a flush at most, and before
/// the first one, the kernel images of the medium; the kernel gives up on most disks before.
const REPORT_MAX: Duration = LARGE;

/// The running system, and where the kernel shows disks.
#[derive(Clone, Debug)]
pub struct Config {
    /// The disk that the machine was started from.
    pub medium: PathBuf,
    /// The slot that it runs from: `A` or `B`.
    pub slot: String,
    /// Where the ESP of the medium is mounted.
    pub esp: PathBuf,
    /// Where sysfs is mounted.
    pub sys: PathBuf,
    /// Where the devices are.
    pub dev: PathBuf,
}

impl Config {
    /// The machine that this process runs on.
    #[must_use]
    pub fn live(environment: &Environment, tree: &files::Root) -> Self {
        Self {
            medium: environment.disk.clone(),
            slot: environment.slot.clone(),
            esp: tree.esp.mount.path().to_owned(),
            sys: "/sys".into(),
            dev: "/dev".into(),
        }
    }

    /// A machine without any disk, for tests of services that install nothing.
    #[must_use]
    pub fn nowhere() -> Self {
        let nowhere = || PathBuf::from("/nonexistent");
        let (medium, esp, sys, dev) = (nowhere(), nowhere(), nowhere(), nowhere());
        Self { medium, slot: "A".to_owned(), esp, sys, dev }
    }

    /// Whether the machine runs from a disk that an installer has made: it installs nothing,
    /// whatever its parameters say. Blocks.
    ///
    /// # Errors
    ///
    /// [`Error::Table`], [`Error::Io`].
    pub fn is_installed(&self) -> Result<bool, Error> {
        let disk = File::open(&self.medium).map_err(Error::io("open", "the medium"))?;
        let table = table::read(&disk).map_err(Error::Table)?;
        Ok(storage::plan::is_installed(&table))
    }
}

/// How an installation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The disk has the system now.
    Installed,
    /// It had it already, from an earlier run of this installation.
    Present,
}

impl Outcome {
    /// How the machine ends: it starts the new system, or would start the medium for ever.
    #[must_use]
    pub fn end(self) -> Reason {
        match self {
            Self::Installed => Reason::Reboot,
            Self::Present => Reason::PowerOff,
        }
    }
}

/// The phases that a disk goes through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Select,
    Write,
    Verify,
    Boot,
}

impl Phase {
    fn name(self) -> &'static str {
        match self {
            Self::Select => "select",
            Self::Write => "write",
            Self::Verify => "verify",
            Self::Boot => "boot",
        }
    }
}

/// How far a phase is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Progress {
    phase: Phase,
    bytes: u64,
    total: u64,
}

/// Installs the running system as `order` says, and says so on console and serial line.
///
/// # Errors
///
/// [`Error`]; a disk that was not refused may be unfinished, and is finished by the next run.
pub async fn install(ctx: &Context, config: &Config, order: &Install) -> Result<Outcome, Error> {
    let mut announcer = Announcer { ctx: ctx.clone(), disk: "-".to_owned(), last: None };
    let outcome = run(ctx, config, order, &mut announcer).await;
    if let Err(error) = &outcome {
        announcer.failed(error);
    }
    outcome
}

async fn run(
    ctx: &Context,
    config: &Config,
    order: &Install,
    announcer: &mut Announcer,
) -> Result<Outcome, Error> {
    announcer.event(Phase::Select, "started");
    info!(selector = %order.disk, "this machine installs its system to another disk");
    let disks = settle(ctx, config, order).await?;
    let disk = select::choose(&disks, &order.disk)
        .map_err(|source| Error::Select { source, disks: select::explain(&disks, &order.disk) })?;
    announcer.disk.clone_from(&disk.name);
    let what = format!(
        "the disk {}, to which the system is installed, to answer; check it and its cable, or pull \
         it",
        disk.name
    );
    ctx.stage(Stage::Cluster, State::Waiting(what));
    let (job, named) = (config.clone(), disk.clone());
    let (id, wipe) = (order.id, order.wipe);
    let look = detached(move || admitted(&job.dev, &named, &id, wipe));
    let silent = || Error::Select {
        source: Refusal::Silent { name: disk.name.clone() },
        disks: select::explain(&disks, &order.disk),
    };
    let looked = in_time(look, silent).await?;
    if looked == Content::Installed {
        warn!(disk = %disk, "this system is installed already: remove the medium");
        announcer.event(Phase::Select, "present");
        let what = format!("a person: the system is installed on {}; remove the medium", disk.name);
        ctx.stage(Stage::Cluster, State::Waiting(what));
        return Ok(Outcome::Present);
    }
    info!(disk = %disk, content = ?looked, "the disk is written");
    announcer.event(Phase::Select, "done");
    let (job, order, name) = (config.clone(), order.clone(), disk.name.clone());
    let (tell, reports) = mpsc::channel(REPORTS_MAX);
    let writing = detached(move || {
        // Without a receiver, the writes are waited for no more.
        put(&job, &name, &order, &mut |progress| tell.blocking_send(progress).unwrap_or_default())
    });
    announcer.follow(reports, writing).await??;
    announcer.event(Phase::Boot, "done");
    info!(disk = %disk, "the system is installed");
    Ok(Outcome::Installed)
}

/// Waits until the disks of the machine have appeared: a second one that fits may come late.
async fn settle(ctx: &Context, config: &Config, order: &Install) -> Result<Vec<Disk>, Error> {
    let (start, mut steady) = (Instant::now(), Steady::default());
    let medium = name_of(&config.medium);
    ctx.stage(Stage::Cluster, State::Waiting(awaited(&[], &order.disk)));
    let all = Disks::default();
    loop {
        let disks = all.list(&config.sys, &medium).await;
        let nothing = matches!(
            select::choose(&disks, &order.disk),
            Err(Refusal::NoDisk { .. } | Refusal::Medium { .. } | Refusal::Silent { .. })
        );
        if nothing {
            ctx.stage(Stage::Cluster, State::Waiting(awaited(&disks, &order.disk)));
        }
        match steady.look(&disks) {
            List::Settled if !nothing || start.elapsed() >= PATIENCE => return Ok(disks),
            List::Settled | List::Changing => sleep(POLL).await,
            List::Restless(disks) => return Err(Error::Restless { disks }),
        }
    }
}

/// What the machine waits for while it takes none of these disks.
fn awaited(disks: &[Disk], selector: &Selector) -> String {
    match &select::silent(disks, selector)[..] {
        [] => "the disks of this machine to appear; connect the one that `install.disk` selects"
            .to_owned(),
        names => {
            let names = names.join(" and ");
            format!("{names} to answer; check the disk and its cable, or pull it")
        }
    }
}

/// Waits for a look at a disk, which may hang, as long as storage does; `silent` is the error of
/// one that does.
async fn in_time<T>(
    look: impl Future<Output = io::Result<Result<T, Error>>>,
    silent: impl FnOnce() -> Error,
) -> Result<T, Error> {
    match timeout(PROBE_MAX, look).await {
        Ok(looked) => looked.map_err(Error::io("read", "the disk"))?,
        Err(_elapsed) => Err(silent()),
    }
}

/// The content of the disk, if it may be written or has the system already.
fn admitted(dev: &Path, disk: &Disk, id: &[u8], wipe: Wipe) -> Result<Content, Error> {
    let opened = content::open(&dev.join(&disk.name)).map_err(Error::io("open", "the disk"))?;
    let content = content::look(&opened, id).map_err(Error::io("read", "the disk"))?;
    let occupied = |found: String, word| {
        let (name, disk) = (disk.name.clone(), disk.to_string());
        Err(Error::Occupied { name, disk, found, word })
    };
    match (content, wipe) {
        (Content::Member, Wipe::Nothing | Wipe::AnyData) => {
            occupied("the data of a node".to_owned(), "member")
        }
        (Content::Other(found), Wipe::Nothing | Wipe::Member) => occupied(found, "any-data"),
        (content, _) => Ok(content),
    }
}

/// Writes the disk. Blocks.
fn put(
    config: &Config,
    name: &str,
    order: &Install,
    progress: &mut dyn FnMut(Progress),
) -> Result<(), Error> {
    let system = running()?;
    let slot = Slot::of(&config.slot, &config.medium)?;
    let source = File::open(&slot.device).map_err(Error::io("open", "the system of the medium"))?;
    let disk = content::open(&config.dev.join(name)).map_err(Error::io("open", "the disk"))?;
    let measuring = || Error::io("measure", "the disk");
    let size = block::size(&disk).map_err(measuring())?;
    let block_size = u64::from(block::logical_block_size(&disk).map_err(measuring())?);
    let identity = table::new_id();
    let plan = plan::plan(size, block_size, system.length(), identity, &order.id)
        .map_err(|source| Error::Place { disk: name.to_owned(), source })?;
    let files =
        boot_files::read(&config.esp).map_err(Error::io("read", "the ESP of the medium"))?;
    let esp = boot_files::build(&identity.to_string(), block_size, files, &order.node.0)?;
    write::apply(&disk, &Job { plan: &plan, system: &system, source: &source, esp: &esp }, progress)
}

/// The running system, by the command line of the kernel.
fn running() -> Result<System, Error> {
    let line = command_line::read().map_err(Error::io("read", "the kernel command line"))?;
    let value =
        |word: &'static str| command_line::value(&line, word).ok_or(Error::CommandLine(word));
    let digits = |word: &'static str| {
        let text = value(word)?;
        hex::decode(if text == "-" { "" } else { text }).ok_or(Error::CommandLine(word))
    };
    let blocks = "polis.verity-blocks";
    Ok(System {
        root_hash: digits("polis.verity")?,
        salt: digits("polis.verity-salt")?,
        blocks: value(blocks)?.parse().map_err(|_digits| Error::CommandLine(blocks))?,
    })
}

/// Reports the progress on console and serial line, each tenth of a phase once.
struct Announcer {
    ctx: Context,
    disk: String,
    /// The last reported phase, and the tenths of it.
    last: Option<(Phase, u64)>,
}

impl Announcer {
    fn line(&self, phase: Phase, result: &str) -> EventLine {
        EventLine::new("install")
            .field("phase", phase.name())
            .field("disk", &self.disk)
            .field("result", result)
    }

    fn event(&self, phase: Phase, result: &str) {
        self.ctx.lines().event(self.line(phase, result));
    }

    fn failed(&self, error: &Error) {
        let phase = self.last.map_or(Phase::Select, |(phase, _)| phase);
        let line = self.line(phase, "failed").field("cause", polis_base::cause::line(error));
        self.ctx.lines().event(line);
    }

    fn progress(&mut self, Progress { phase, bytes, total }: Progress) {
        let tenths = bytes.saturating_mul(TENTHS) / total.max(1);
        match self.last {
            Some(last) if last == (phase, tenths) => return,
            Some((before, _)) if before == phase => {}
            before => {
                if let Some((before, _)) = before {
                    self.event(before, "done");
                }
                self.event(phase, "started");
            }
        }
        self.last = Some((phase, tenths));
        let percent = tenths * 100 / TENTHS;
        if tenths > 0 && phase != Phase::Boot {
            self.ctx.lines().event(self.line(phase, "running").field("percent", percent));
        }
        self.show();
    }

    /// Shows on the console how far it is.
    fn show(&self) {
        let Some((phase, tenths)) = self.last else { return };
        let percent = tenths * 100 / TENTHS;
        let doing = match phase {
            Phase::Select | Phase::Write => format!("{percent} % written"),
            Phase::Verify => format!("written, {percent} % read back"),
            Phase::Boot => "written and read back".to_owned(),
        };
        let what = format!("the installation to {}: {doing}", self.disk);
        self.ctx.stage(Stage::Cluster, State::Waiting(what));
    }

    /// Announces the reports of the writes, and waits for these while they go on.
    async fn follow<T>(
        &mut self,
        mut reports: mpsc::Receiver<Progress>,
        writing: impl Future<Output = io::Result<T>>,
    ) -> Result<T, Error> {
        let (mut writing, mut silent) = (std::pin::pin!(writing), false);
        loop {
            let limit = if silent { REPORT_MAX.saturating_sub(SOON) } else { SOON };
            tokio::select! {
                // Cancel-safe: the writes go on where they are.
                written = &mut writing => {
                    while let Ok(progress) = reports.try_recv() {
                        self.progress(progress);
                    }
                    return written.map_err(Error::io("write", "the disk"));
                }
                // Cancel-safe per its docs, and a wait.
                next = timeout(limit, reports.recv()), if !reports.is_closed() => match next {
                    Ok(Some(progress)) => {
                        if std::mem::take(&mut silent) {
                            self.show();
                        }
                        self.progress(progress);
                    }
                    // The writes are about to end.
                    Ok(None) => {}
                    Err(_elapsed) if silent => {
                        let (disk, seconds) = (self.disk.clone(), REPORT_MAX.as_secs());
                        return Err(Error::Silent { disk, seconds });
                    }
                    Err(_elapsed) => {
                        silent = true;
                        self.wait();
                    }
                },
            }
        }
    }

    /// Shows on the console that the writes do not go on.
    fn wait(&self) {
        let what = format!(
            "the disk {} or the medium to answer: check both and their cables, and pull the one \
             that hangs; the installation stops after {} s",
            self.disk,
            REPORT_MAX.as_secs()
        );
        self.ctx.stage(Stage::Cluster, State::Waiting(what));
    }
}

#[cfg(test)]
mod tests;
