//! A mirror while the node runs: notes a disk that is lost, takes one that comes, and keeps what
//! starts the machine the same on both.
//!
//! The service calls [`monitor`], which looks once a second. What may take long, or hang, is one
//! job beside that: a copy, or the search for a disk.
//!
//! Invariants:
//! - A lost disk is noted on the other one before the kernel's device forgets it, and no job keeps
//!   the look waiting. A job that a disk holds up names the disk.
//! - A disk that stalls is named within seconds, and gets no new job. It stays below the device
//!   until the kernel drops it: an acknowledged write is never on the other one alone.
//! - A disk that is filled becomes one of both only when the machine starts from it alone.
//! - What starts the machine is copied from a disk in use, to the other one.

mod answers;
mod work;

use std::time::Duration;

use tokio::time::{Instant, MissedTickBehavior};
use tracing::{error, warn};

use self::answers::{Answers, Silent};
use self::work::{Copied, Done, Job};
use super::assemble::Mirror;
use super::disks::Disk;
use super::esp;
use super::kernel::{Device, Health};
use super::plan::{Leg, Used};
use super::reads::Reads;
use super::{Error, Report, Service, State, device, system};
use crate::storage;
use crate::storage::health::{Fault, What};
use crate::storage::stall;
use crate::storage::steps::Steps;
use polis_base::sys::{clock, command_line};
use polis_runtime::event::Closed;
use polis_runtime::supervisor::{Context, blocking};

/// How often the device and the ESP are looked at.
const PACE: Duration = Duration::from_secs(1);

/// The mirror, and what is known of it.
struct Monitor<'a> {
    service: &'a mut Service,
    ctx: &'a Context,
    mirror: Mirror,
    /// The disk that the kernel fills.
    filled: Option<Leg>,
    /// Whether the lost disk is still below a device, or its ESP mounted.
    leaving: bool,
    /// Why the last attempt to take or copy failed, or to look at the device or the ESP.
    cause: Option<String>,
    /// When a disk was last looked for.
    searched: Option<Instant>,
    reads: Reads,
    copied: Copied,
    job: Option<Job>,
    /// What the job does on another disk.
    steps: Steps,
    answers: Answers,
    /// The disks that stall.
    silent: Option<Silent>,
    /// After how long without an answer the node stops.
    hung: Duration,
}

impl<'a> Monitor<'a> {
    /// With nothing begun.
    fn new(
        service: &'a mut Service,
        ctx: &'a Context,
        mirror: Mirror,
        filled: Option<Leg>,
        hung: Duration,
    ) -> Self {
        Self {
            service,
            ctx,
            mirror,
            filled,
            leaving: false,
            cause: None,
            searched: None,
            reads: Reads::default(),
            copied: Copied::new(),
            job: None,
            steps: Steps::default(),
            answers: Answers::default(),
            silent: None,
            hung,
        }
    }
}

/// Monitors the mirror; returns only when an owner of an input has ended.
pub(super) async fn monitor(
    service: &mut Service,
    ctx: &Context,
    mirror: Mirror,
) -> Result<(), Closed> {
    let below = blocking(device::below).await.unwrap_or_default();
    let filled = match mirror.used {
        Used::Only(leg) if below.starts_with("raid") => Some(leg.other()),
        Used::Only(_) | Used::Both => None,
    };
    let hung = stall::deadline(&command_line::read().unwrap_or_default());
    let mut monitor = Monitor::new(service, ctx, mirror, filled, hung);
    // After a restart of the service, some of that may be left to do.
    monitor.leaving = monitor.mirror.used != Used::Both && monitor.filled.is_none();
    let mut tick = tokio::time::interval(PACE);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        let step = tokio::select! {
            // Cancel-safe per its docs.
            _now = tick.tick() => monitor.look().await,
            // Cancel-safe: the job stays in its place until it is done.
            done = job(&mut monitor.job) => {
                monitor.job = None;
                monitor.finish(done).await
            }
        };
        if let Err(error) = step {
            monitor.failed(&error);
        }
    }
}

/// Waits for the job, if there is one.
async fn job(job: &mut Option<Job>) -> Done {
    match job {
        Some(job) => job.await,
        None => std::future::pending().await,
    }
}

impl Monitor<'_> {
    /// A lost disk is noted first, whatever else is being done.
    async fn look(&mut self) -> Result<(), Error> {
        let ready = *self.service.ready.borrow();
        self.copied.ready |= ready;
        self.listen(clock::uptime()).await;
        let state = self.state().await?;
        self.publish(state);
        if self.leaving {
            return self.leave().await;
        }
        if self.job.is_some() {
            return self.in_time();
        }
        if self.silent.is_some() {
            return Ok(());
        }
        match (state, self.mirror.used, self.filled) {
            (_, Used::Both, _) => self.compare(),
            (State::Whole, Used::Only(_), Some(_)) if ready => self.compare(),
            (_, Used::Only(_), None) if ready => self.search()?,
            (_, Used::Only(_), _) => {}
        }
        Ok(())
    }

    /// Names the disks below the device that stall, also while storage mounts the data, and ends
    /// the node where one never answers.
    async fn listen(&mut self, now: Duration) {
        let are_below = self.mirror.used == Used::Both || self.filled.is_some();
        let below = Leg::ALL.into_iter().filter(|_leg| are_below);
        let below: Vec<&Disk> = below.filter_map(|leg| self.mirror.disk(leg)).collect();
        let silent = self.answers.look(&self.service.config.sys, &below, now);
        let before = self.silent.as_ref().map(|silent| &silent.disks);
        match (before, &silent) {
            (before, Some(silent)) if before != Some(&silent.disks) => {
                error!("a disk stalls: {}", silent.text(self.hung));
            }
            // One that is lost is not below the device any more.
            (Some(disks), None) if are_below => warn!("{} answers again", disks.join(" and ")),
            _ => {}
        }
        self.silent = silent;
        let Some(Silent { disks, since }) = &self.silent else { return };
        if now.saturating_sub(*since) >= self.hung {
            let device = disks.join(" and ");
            let hung = Fault { what: What::Hung, device, sector: None };
            match self.ctx.trapdoor(storage::Error::Failing(hung).report()).await {}
        }
    }

    /// Fails while a disk holds up the job for longer than any should.
    fn in_time(&self) -> Result<(), Error> {
        self.steps.late().map_or(Ok(()), |late| Err(Error::Slow(late)))
    }

    /// The state of the device; goes on without a disk that is lost.
    async fn state(&mut self) -> Result<State, Error> {
        let source = match (self.mirror.used, self.filled) {
            (Used::Both, _) => None,
            (Used::Only(source), Some(_)) => Some(source),
            (Used::Only(_), None) => return Ok(State::Degraded),
        };
        let (device, lost) = self.device().await?;
        Ok(match (device, lost.as_slice()) {
            // The one that was dropped has missed writes: it must not be noted as the newest, and
            // what the kernel has is left to fail.
            (_, [_, _]) if source.is_none() => return Err(Error::NoneLeft),
            (_, &[lost, ..]) if Some(lost) != source => {
                self.lose(lost).await?;
                State::Degraded
            }
            (Some(device), _) if device.is_whole() => State::Whole,
            (device, _) => {
                let percent = device.map_or(0, |device| device.percent);
                match self.filled {
                    Some(_) => State::Filling { percent },
                    None if device.is_none() => State::Whole,
                    None => State::Comparing { percent },
                }
            }
        })
    }

    /// What the kernel says of the device, and the disks that are lost.
    async fn device(&mut self) -> Result<(Option<Device>, Vec<Leg>), Error> {
        let device = Device::parse(&blocking(device::status).await?);
        let lost = |leg: &Leg| {
            let there = |disk: &Disk| disk.is_there(&self.service.config.sys);
            let gone = !self.mirror.disk(*leg).is_some_and(there);
            gone || device.is_some_and(|device| device.of(*leg) == Health::Dropped)
        };
        Ok((device, Leg::ALL.into_iter().filter(lost).collect()))
    }

    /// Notes the next use. What was written before an error stays known.
    async fn raise(&mut self, used: Used) -> Result<(), Error> {
        let (config, mut mirror) = (self.service.config.clone(), self.mirror.clone());
        let (mirror, raised) = blocking(move || {
            let raised = mirror.raise(&config, used);
            (mirror, raised)
        })
        .await;
        self.mirror = mirror;
        raised
    }

    /// Goes on with the disk that is left.
    async fn lose(&mut self, lost: Leg) -> Result<(), Error> {
        let name = self.mirror.disk(lost).map(Disk::name).unwrap_or_default();
        warn!(disk = name, "a disk of the mirror is lost: the data is on the other one alone");
        self.raise(Used::Only(lost.other())).await?;
        self.filled = None;
        self.mirror.drop_disk(lost);
        self.leaving = true;
        Ok(())
    }

    /// Puts the disk that is left alone under the device, and has the machine run from it; tried
    /// again until all of that is done.
    async fn leave(&mut self) -> Result<(), Error> {
        let Some(disk) = self.mirror.source().cloned() else { return Ok(()) };
        let left = disk.clone();
        blocking(move || device::alone(&left)).await?;
        self.publish_backing();
        // It may still use the ESP.
        if self.job.is_some() {
            return self.in_time();
        }
        let config = self.service.config.clone();
        let moved = blocking(move || {
            system::leave(&config.slot, &disk)?;
            esp::instead(&config.esp, &disk)
        });
        if moved.await? {
            warn!("the machine was started from the lost disk, and runs from the other one");
        }
        self.leaving = false;
        self.copied = Copied::new();
        Ok(())
    }

    /// Says on which disks the data lies.
    fn publish_backing(&self) {
        let new = Some(self.mirror.backing(None));
        self.service.backing.send_if_modified(|backing| {
            let changed = *backing != new;
            *backing = new;
            changed
        });
    }

    fn failed(&mut self, error: &Error) {
        let cause = polis_base::cause::line(error);
        if self.cause.as_ref() != Some(&cause) {
            warn!(error = error as &dyn std::error::Error, "the mirror is not as it should be");
        }
        self.cause = Some(cause);
        let state = self.service.status.borrow().as_ref().map(|report| report.state);
        self.publish(state.unwrap_or(State::Degraded));
    }

    fn publish(&self, state: State) {
        // A disk that is filled counts when it has what starts the machine, too.
        let state = match (state, self.filled) {
            (State::Whole, Some(_)) => State::Filling { percent: 100 },
            (state, _) => state,
        };
        let name = |leg: Leg| self.mirror.disk(leg).map(Disk::name);
        let whole = Leg::ALL.into_iter().filter(|leg| self.mirror.used.has(*leg));
        let silent = self.silent.as_ref().map(|silent| silent.text(self.hung));
        let new = Report {
            state,
            whole: whole.filter_map(name).collect(),
            filled: self.filled.and_then(name),
            cause: silent.or_else(|| self.cause.clone()),
        };
        let last = self.service.status.borrow().as_ref().map(|old| old.line().to_string());
        if last != Some(new.line().to_string()) {
            self.ctx.lines().event(new.line());
        }
        self.service.status.send_if_modified(|status| {
            let changed = status.as_ref() != Some(&new);
            *status = Some(new);
            changed
        });
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::path::{Path, PathBuf};

    use futures::FutureExt as _;
    use polis_base::trapdoor::code;
    use polis_runtime::event::until;
    use tokio::sync::watch;
    use tokio::time::sleep;

    use super::super::assemble::tests::config;
    use super::super::disks::tests::source;
    use super::answers::tests::{both, count, settle};
    use super::*;
    use crate::storage::deadline::SMALL;

    pub(in super::super) fn service(folder: &Path) -> Service {
        Service {
            config: config(folder),
            known: watch::Sender::new(None).subscribe(),
            wanted: watch::Sender::new(None).subscribe(),
            storage: watch::Sender::new(storage::Status::Starting).subscribe(),
            ready: watch::Sender::new(true).subscribe(),
            end: watch::Sender::new(None),
            backing: watch::Sender::new(None),
            status: watch::Sender::new(None),
        }
    }

    fn start<'a>(service: &'a mut Service, ctx: &'a Context, mirror: Mirror) -> Monitor<'a> {
        Monitor::new(service, ctx, mirror, None, Duration::from_secs(40))
    }

    #[tokio::test]
    async fn a_disk_that_stalls_is_named_within_seconds_and_ends_the_node_in_the_end() {
        let folder = tempfile::tempdir().unwrap();
        let (ctx, mut handles) = Context::for_test();
        let mut service = service(folder.path());
        let (status, sys) = (service.status.subscribe(), service.config.sys.clone());
        let disks = both(folder.path()).map(Some);
        let (used, started) = (Used::Both, Leg::First);
        let mut monitor = start(&mut service, &ctx, Mirror { disks, used, started, dropped: None });
        count(&sys, "vdb", 7, 3);
        let cause = |monitor: &Monitor<'_>| {
            monitor.publish(State::Whole);
            status.borrow().as_ref().and_then(|report| report.cause.clone())
        };
        for second in [0, 8, 16, 24, 32] {
            let now = Duration::from_secs(second);
            monitor.listen(now).await;
            settle(&mut monitor.answers, now);
            let cause = cause(&monitor);
            let named = cause.as_ref().is_some_and(|cause| cause.starts_with("vdb of the mirror"));
            assert_eq!(named, second >= 16, "{second} s: {cause:?}");
        }
        assert_eq!(monitor.mirror.used, Used::Both, "no disk is dropped");
        let changed = esp::Seen::from([(PathBuf::from("polis/key_change.pb"), (1, None))]);
        monitor.finish(Done::Looked(Ok(changed))).await.unwrap();
        assert!(monitor.job.is_none(), "nothing is copied to a disk that stalls");
        let report = until(&mut handles.trapdoor, "trapdoor", Clone::clone);
        let report = tokio::select! {
            () = monitor.listen(Duration::from_secs(40)) => panic!("the node goes on"),
            report = report => report.unwrap(),
        };
        assert_eq!(report.code, code::STORAGE_FAILING);
        assert!(report.causes.iter().any(|cause| cause.contains("vdb")), "{report:?}");
        // It answers again.
        count(&sys, "vdb", 8, 0);
        monitor.listen(Duration::from_secs(42)).await;
        assert_eq!(cause(&monitor), None);
    }

    #[tokio::test]
    async fn a_fault_is_shown_until_a_look_finds_nothing_left_to_copy() {
        let folder = tempfile::tempdir().unwrap();
        let (ctx, _handles) = Context::for_test();
        let mut service = service(folder.path());
        let disks = both(folder.path()).map(Some);
        let (used, started) = (Used::Both, Leg::First);
        let mut monitor = start(&mut service, &ctx, Mirror { disks, used, started, dropped: None });
        let unread = || Error::Copy {
            operation: "read the ESP",
            disk: "vda".to_owned(),
            source: std::io::ErrorKind::TimedOut.into(),
        };
        // A file that another look finds is copied, which may fail again.
        let changed = esp::Seen::from([(PathBuf::from("polis/key_change.pb"), (1, None))]);
        for (seen, is_shown) in [(changed, true), (esp::Seen::new(), false)] {
            (monitor.copied, monitor.job) = (Copied::default(), None);
            monitor.failed(&unread());
            assert!(monitor.cause.is_some());
            monitor.finish(Done::Looked(Ok(seen))).await.unwrap();
            assert_eq!((monitor.cause.is_some(), monitor.job.is_some()), (is_shown, is_shown));
        }
    }

    #[tokio::test]
    async fn a_fault_of_a_disk_that_comes_is_shown_until_it_is_gone_and_logged_once() {
        let folder = tempfile::tempdir().unwrap();
        let (ctx, _handles) = Context::for_test();
        let mut service = service(folder.path());
        let (used, started) = (Used::Only(Leg::First), Leg::First);
        let disks = [Some(source()), None];
        let mut monitor = start(&mut service, &ctx, Mirror { disks, used, started, dropped: None });
        let found = |claimed| Done::Claimed(Reads::default(), Box::new(claimed));
        let unfit = || Error::Unfit { disk: "vdb".to_owned(), why: "it has data".to_owned() };
        let fault = monitor.finish(found(Err(unfit()))).await.unwrap_err();
        monitor.failed(&fault);
        let known = monitor.cause.clone();
        assert!(known.is_some());
        // By the known one `failed` decides whether it is a new one.
        monitor.finish(found(Err(unfit()))).await.unwrap_err();
        assert_eq!(monitor.cause, known, "it would be logged at each search");
        monitor.finish(found(Ok(None))).await.unwrap();
        assert_eq!(monitor.cause, None);
    }

    #[tokio::test(start_paused = true)]
    async fn a_disk_that_hangs_while_it_is_taken_is_named_with_a_remedy() {
        let folder = tempfile::tempdir().unwrap();
        let (ctx, _handles) = Context::for_test();
        let mut service = service(folder.path());
        let status = service.status.subscribe();
        let (used, started) = (Used::Only(Leg::First), Leg::First);
        let disks = [Some(source()), None];
        let mut monitor = start(&mut service, &ctx, Mirror { disks, used, started, dropped: None });
        monitor.job = Some(std::future::pending().boxed());
        let steps = monitor.steps.clone();
        let hung = steps.during("vdb", "taking it", SMALL, std::future::pending::<()>());
        let looks = async {
            monitor.look().await.unwrap();
            sleep(SMALL).await;
            let late = monitor.look().await.unwrap_err();
            monitor.failed(&late);
        };
        tokio::select! {
            () = hung => panic!("it does not end"),
            () = looks => {}
        }
        let cause = status.borrow().as_ref().and_then(|report| report.cause.clone()).unwrap();
        assert!(cause.contains("vdb") && cause.ends_with("or pull it"), "{cause}");
    }
}
