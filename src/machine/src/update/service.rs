//! The trial of a new system: marks it good, or gives it up; and says what became of one that
//! was left.
//!
//! ```text
//! the running kernel image has a counter --> [trial]
//!   --ready--> [settling] --cluster healthy for a while--> [working] --workloads as before-->
//!      |           |                                          |           the name without counter
//!      |           \--two minutes--> guru 0311 <-ten minutes--/
//!      \--ten minutes--> guru 0310 --+--> the loader starts the one before
//! ```
//!
//! Invariants:
//! - A system is marked good only when this node was ready, and its cluster then stayed healthy
//!   for as long as [`ClusterHealth`] asks, with every workload ready that was ready before.

use std::time::Duration;

use tokio::sync::watch;
use tokio::time::timeout;
use tracing::{debug, info, warn};

use super::entry::{self, Entry, Standing};
use super::workload::{self, Workload};
use super::{Config, Error, Other, Status, Step};
use crate::storage::fat;
use polis_base::stage;
use polis_base::sys::clock;
use polis_base::trapdoor::{Report, code};
use polis_runtime::event::{Closed, until};
use polis_runtime::supervisor::{Context, blocking};

/// How long after the kernel's start a system on trial has to be ready: several times what
/// the slowest start takes that waits for others.
pub const TRIAL: Duration = Duration::from_secs(600);

/// How long that may take after the node is ready. A cluster whose leader was the node that
/// restarted is healthy within seconds.
const SETTLE_MAX: Duration = Duration::from_secs(120);

/// How long the workloads may take after that: as long as the node itself. A worker that waits for
/// them harms no other node.
const WORKLOAD_MAX: Duration = TRIAL;

/// The cause where the loader returned from the new system in the present start.
const REFUSED: &str = "the firmware refused its kernel image";
/// The cause of a system that left no word.
pub const NO_REPORT: &str = "it was not started, or ended without a report";

/// The health of the cluster, as this node sees it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClusterHealth {
    /// What is wrong; `None` if nothing is.
    pub fault: Option<String>,
    /// The number of elections of etcd, where this node is a member.
    pub term: u64,
    /// How long it has to stay so before it counts.
    pub settled: Duration,
}

/// Configuration, inputs and outputs. Cloned into every run; holds no progress.
#[derive(Clone, Debug)]
pub struct Service {
    /// The machine.
    pub config: Config,
    /// Why the boot before this one failed, if it did.
    pub previous: Option<String>,
    /// How long after the kernel's start a system on trial has to be ready.
    pub trial: Duration,
    /// Whether the node is ready.
    pub ready: watch::Receiver<bool>,
    /// The health of its cluster.
    pub health: watch::Receiver<ClusterHealth>,
    /// Its workload stack.
    pub workload: watch::Receiver<Workload>,
    /// The systems of this machine.
    pub status: watch::Sender<Status>,
}

/// Why a run ends.
#[derive(Debug, thiserror::Error)]
pub enum Ended {
    /// The owner of an input ended.
    #[error(transparent)]
    Closed(#[from] Closed),
    /// The systems of this machine cannot be listed.
    #[error("cannot list the systems of this machine")]
    Look(#[source] Error),
    /// The system that is on trial cannot be marked good.
    #[error("cannot keep the new system")]
    Keep(#[source] Error),
}

impl Service {
    /// Runs until cancelled.
    ///
    /// # Errors
    ///
    /// [`Ended`].
    pub async fn run(mut self, ctx: Context) -> Result<(), Ended> {
        let config = self.config.clone();
        match blocking(move || look(&config)).await {
            Ok((running, other)) => {
                // A loader that could not count the try leaves `+1`.
                let trial = running.standing != Standing::Good;
                let failed = other
                    .as_ref()
                    .map(|(entry, _refused)| entry)
                    .filter(|other| !trial && other.standing == Standing::Tried && !other.reported)
                    .cloned();
                let other = other.map(|(entry, refused)| self.other(entry, refused));
                if let Some((failed, other)) = failed.zip(other.as_ref()) {
                    self.left(failed, other, &ctx).await;
                }
                self.status.send_replace(Status { known: true, trial, other });
                if trial && self.trial(running, &ctx).await?.is_none() {
                    return Ok(());
                }
            }
            // A direct start, or an image without a loader.
            Err(Error::NoLoader(by)) => {
                debug!(by, "this machine has one system");
                self.status.send_modify(|status| status.known = true);
            }
            // Another run may do better, and a trial must not be forgotten.
            Err(error) => return Err(Ended::Look(error)),
        }
        ctx.healthy();
        ctx.cancelled().await;
        Ok(())
    }

    /// Waits until the new system has shown that it works. `None` once this run must end.
    async fn trial(&mut self, running: Entry, ctx: &Context) -> Result<Option<()>, Ended> {
        let Entry { file, version, .. } = running;
        let told = |step: Step, result: &str| {
            ctx.lines().event(step.line(&version, &self.config.slot, result));
        };
        info!(%version, "this system is on trial");
        let failed = async |step: Step, report: Report| {
            let line = step.line(&version, &self.config.slot, "failed");
            ctx.lines().event(line.field("cause", report.causes.join("; ")));
            ctx.until_cancelled(ctx.trapdoor(report)).await;
            Ok(None)
        };
        told(Step::Boot, "started");
        ctx.healthy();
        let ready = until(&mut self.ready, "ready", |ready| ready.then_some(()));
        let in_time = timeout(self.trial.saturating_sub(clock::uptime()), ready);
        match ctx.until_cancelled(in_time).await {
            None => return Ok(None),
            Some(Ok(ready)) => ready?,
            Some(Err(_elapsed)) => return failed(Step::Boot, late(self.trial, ctx)).await,
        }
        told(Step::Boot, "done");
        told(Step::Commit, "started");
        let settled = timeout(SETTLE_MAX, settled(&mut self.health));
        match ctx.until_cancelled(settled).await {
            None => return Ok(None),
            Some(Ok(settled)) => settled?,
            Some(Err(_elapsed)) => {
                let report = unhealthy(&self.health.borrow());
                return failed(Step::Commit, report).await;
            }
        }
        let (record, installed) = (self.config.before.clone(), version.clone());
        let before = blocking(move || workload::before(&record, &installed)).await;
        if !before.is_empty() {
            info!(parts = before.join(" "), "the trial waits for the workloads of before");
            let works = works(&mut self.workload, &mut self.health, &before);
            match ctx.until_cancelled(timeout(WORKLOAD_MAX, works)).await {
                None => return Ok(None),
                Some(Ok(works)) => works?,
                Some(Err(_elapsed)) => {
                    let lost = self.workload.borrow().lost(&before);
                    let report = idle(lost, &self.health.borrow());
                    return failed(Step::Commit, report).await;
                }
            }
        }
        let kernels = self.config.kernels.clone();
        let good = Entry::good(&version);
        let keep = move || {
            let kept = fat::rename(&kernels.join(&file), &kernels.join(&good));
            kept.map_err(Error::io(format!("make {good}")))
        };
        if let Err(error) = blocking(keep).await {
            let failed = Step::Commit.line(&version, &self.config.slot, "failed");
            ctx.lines().event(failed.field("cause", polis_base::cause::line(&error)));
            return Err(Ended::Keep(error));
        }
        // By the new name `init` knows that a later failure is not one of a trial.
        info!(%version, "the new system is kept");
        told(Step::Commit, "done");
        self.status.send_modify(|status| status.trial = false);
        Ok(Some(()))
    }

    /// Says once that a system was tried and did not stay.
    async fn left(&self, entry: Entry, other: &Other, ctx: &Context) {
        let Other { version, slot, cause, .. } = other;
        let cause = cause.as_deref().unwrap_or(NO_REPORT);
        warn!(%version, slot, cause, "the new system did not stay; this is the one before it");
        ctx.lines().event(Step::Rollback.line(version, slot, "done").field("cause", cause));
        let kernels = self.config.kernels.clone();
        let reported = kernels.join(Entry::reported(&entry.version));
        let noted = blocking(move || fat::rename(&kernels.join(&entry.file), &reported)).await;
        if let Err(error) = noted {
            // The next start says it again.
            debug!(error = &error as &dyn std::error::Error, "cannot note that this was said");
        }
    }

    fn other(&self, entry: Entry, refused: bool) -> Other {
        let Entry { version, standing, .. } = entry;
        // The ledger of failures is empty after a good boot, so this is most likely the trial's.
        let cause = if refused { Some(REFUSED.to_owned()) } else { self.previous.clone() };
        let cause = cause.filter(|_text| standing == Standing::Tried);
        Other { version, image: None, slot: self.config.other_slot(), standing, cause }
    }
}

/// The kernel image that runs, and the newest beside it, with whether the firmware refused that
/// one.
fn look(config: &Config) -> Result<(Entry, Option<(Entry, bool)>), Error> {
    let running = entry::running(&config.efivars, &config.kernels)?;
    let mut others = entry::list(&config.kernels)?;
    // A second name of the running version is not another system: a change of the name was cut
    // off, or it is the name on the other disk of a mirror.
    others.retain(|entry| entry.version != running.version);
    let other = others.into_iter().next().map(|entry| {
        let refused = entry::was_refused(&config.efivars, &entry);
        (entry, refused)
    });
    Ok((running, other))
}

/// Waits until the cluster was healthy without a change for as long as it has to be.
async fn settled(health: &mut watch::Receiver<ClusterHealth>) -> Result<(), Closed> {
    loop {
        let healthy = |health: &ClusterHealth| health.fault.is_none().then_some(health.settled);
        let long = until(health, "the health", healthy).await?;
        match timeout(long, health.changed()).await {
            Err(_elapsed) => return Ok(()),
            Ok(changed) => changed.map_err(|_closed| Closed("the health"))?,
        }
    }
}

/// Waits until each part that was ready before the update is ready, and the cluster is healthy
/// with all of them.
async fn works(
    workload: &mut watch::Receiver<Workload>,
    health: &mut watch::Receiver<ClusterHealth>,
    before: &[String],
) -> Result<(), Closed> {
    loop {
        let ready = |now: &Workload| now.lost(before).is_none().then_some(());
        until(workload, "the workload", ready).await?;
        let lost = until(workload, "the workload", |now| now.lost(before).map(drop));
        tokio::select! {
            // Cancel-safe, both: they wait for event values and for the time.
            settled = settled(health) => return settled,
            lost = lost => lost?,
        }
    }
}

/// The report of a trial in which the cluster did not settle.
fn unhealthy(health: &ClusterHealth) -> Report {
    let first = format!(
        "in the {} s after the new system was ready, its cluster was never healthy for {} s at a \
         stretch",
        SETTLE_MAX.as_secs(),
        health.settled.as_secs()
    );
    Report::new(code::TRIAL_UNHEALTHY, vec![first, wrong(health)])
}

/// The report of a trial in which a workload is not as before.
fn idle(lost: Option<String>, health: &ClusterHealth) -> Report {
    let first = format!(
        "in the {} s after its cluster was healthy, the new system did not have the workloads of \
         the node ready as before",
        WORKLOAD_MAX.as_secs()
    );
    Report::new(code::TRIAL_UNHEALTHY, vec![first, lost.unwrap_or_else(|| wrong(health))])
}

/// What is wrong with the cluster.
fn wrong(health: &ClusterHealth) -> String {
    let changes = || format!("it changes again and again; etcd is in term {}", health.term);
    health.fault.clone().unwrap_or_else(changes)
}

/// The report of a trial that has taken too long.
fn late(trial: Duration, ctx: &Context) -> Report {
    let seconds = trial.as_secs();
    let stages = ctx.stages().borrow().clone();
    let open = stages.iter().filter(|(_, entry)| entry.state != stage::State::Done);
    let open = open.map(|(stage, entry)| format!("the stage {stage} is {}", entry.state.name()));
    let first = format!("the new system was not ready {seconds} s after its start");
    Report::new(code::TRIAL_NOT_READY, std::iter::once(first).chain(open).collect())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use semver::Version;
    use tokio::time::sleep;

    use super::*;
    use crate::update::install::tests::Machine;

    fn service(machine: &Machine, ready: bool, previous: Option<&str>) -> Service {
        Service {
            config: machine.config.clone(),
            previous: previous.map(str::to_owned),
            trial: Duration::ZERO,
            ready: watch::Sender::new(ready).subscribe(),
            health: watch::Sender::new(ClusterHealth::default()).subscribe(),
            workload: watch::Sender::default().subscribe(),
            status: machine.status.clone(),
        }
    }

    #[tokio::test]
    async fn a_system_on_trial_is_kept_once_it_is_ready() {
        let machine = Machine::new("polis-1.1.0+0-1.efi");
        let (ctx, mut handles) = Context::for_test();
        let mut status = machine.status.subscribe();
        let owner = watch::Sender::new(false);
        let (_owner, health) = watch::channel(ClusterHealth::default());
        let (trial, ready) = (Duration::MAX, owner.subscribe());
        let service = Service { trial, ready, health, ..service(&machine, false, None) };
        owner.send_replace(true);
        let end = async {
            status.wait_for(|status| status.other.is_some() && !status.trial).await.unwrap();
            handles.cancel().await;
        };
        let (ended, ()) = tokio::join!(service.run(ctx), end);
        ended.unwrap();
        assert!(machine.kernels().contains(&"polis-1.1.0.efi".to_owned()));
        assert!(!machine.kernels().contains(&"polis-1.1.0+0-1.efi".to_owned()));
        let lines = handles.take_lines();
        assert!(
            lines[0].starts_with("POLIS update phase=boot version=1.1.0 slot=A result=started")
        );
        let rest: Vec<_> =
            lines[1..].iter().map(|line| line.split(' ').take(6).collect()).collect();
        let expected = [["boot", "done"], ["commit", "started"], ["commit", "done"]];
        let expected = expected.map(|[phase, result]| {
            let (phase, result) = (format!("phase={phase}"), format!("result={result}"));
            format!("POLIS update {phase} version=1.1.0 slot=A {result}")
        });
        assert_eq!(
            rest.iter().map(|words: &Vec<&str>| words.join(" ")).collect::<Vec<_>>(),
            expected
        );
        let other = machine.status.borrow().other.clone().unwrap();
        assert_eq!(other.to_string(), "0.9.0 in slot B, good");
    }

    #[tokio::test]
    async fn a_system_on_trial_that_is_not_ready_in_time_gives_up() {
        const FAILED: &str = "phase=boot version=1.1.0 slot=A result=failed cause=";
        let machine = Machine::new("polis-1.1.0+0-1.efi");
        let (ctx, mut handles) = Context::for_test();
        let (owner, ready) = watch::channel(false);
        let service = Service { ready, ..service(&machine, false, None) };
        ctx.stage(stage::Stage::Storage, stage::State::Done);
        ctx.stage(stage::Stage::Cluster, stage::State::Started);
        let run = service.run(ctx.clone());
        let report = tokio::select! {
            ended = run => panic!("{ended:?}"),
            report = until(&mut handles.trapdoor, "trapdoor", Clone::clone) => report.unwrap(),
        };
        drop(owner);
        assert_eq!(report.code, code::TRIAL_NOT_READY);
        let expected =
            ["the new system was not ready 0 s after its start", "the stage cluster is started"];
        assert_eq!(report.causes, expected);
        let lines = handles.take_lines();
        assert!(lines.iter().any(|line| line.contains(FAILED)), "{lines:?}");
        assert!(machine.kernels().contains(&"polis-1.1.0+0-1.efi".to_owned()), "it is not kept");
    }

    #[tokio::test(start_paused = true)]
    async fn a_system_that_is_ready_stays_once_its_cluster_is_healthy_without_a_change() {
        const SETTLED: Duration = Duration::from_secs(10);
        let machine = Machine::new("polis-1.1.0+0-1.efi");
        let (ctx, handles) = Context::for_test();
        let settled = SETTLED;
        let fault =
            |fault: &str, term| ClusterHealth { fault: Some(fault.to_owned()), term, settled };
        let (owner, health) = watch::channel(fault("no leader", 0));
        let trial = Duration::MAX;
        let service = Service { trial, health: health.clone(), ..service(&machine, true, None) };
        let mut status = machine.status.subscribe();
        let end = async {
            // Elections, and a fault: each begins the ten seconds anew.
            for term in 1..4 {
                owner.send_replace(ClusterHealth { fault: None, term, settled });
                sleep(SETTLED - Duration::from_secs(1)).await;
            }
            owner.send_replace(fault("stopped", 3));
            sleep(SETTLED * 2).await;
            assert!(machine.kernels().contains(&"polis-1.1.0+0-1.efi".to_owned()), "it is kept");
            owner.send_replace(ClusterHealth { fault: None, term: 3, settled });
            status.wait_for(|status| status.other.is_some() && !status.trial).await.unwrap();
            handles.cancel().await;
        };
        let (ended, ()) = tokio::join!(service.run(ctx), end);
        ended.unwrap();
        assert!(machine.kernels().contains(&"polis-1.1.0.efi".to_owned()));

        // Never well for so long: given up, with what is wrong.
        let machine = Machine::new("polis-1.1.0+0-1.efi");
        let (ctx, mut handles) = Context::for_test();
        owner.send_replace(fault("no leader", 3));
        let service = Service { trial, health, ..self::service(&machine, true, None) };
        let report = tokio::select! {
            ended = service.run(ctx) => panic!("{ended:?}"),
            report = until(&mut handles.trapdoor, "trapdoor", Clone::clone) => report.unwrap(),
        };
        assert_eq!(report.code, code::TRIAL_UNHEALTHY);
        assert_eq!(report.causes.last().unwrap(), "no leader");
        let lines = handles.take_lines();
        let failed = "phase=commit version=1.1.0 slot=A result=failed cause=";
        assert!(lines.iter().any(|line| line.contains(failed)), "{lines:?}");
        assert!(machine.kernels().contains(&"polis-1.1.0+0-1.efi".to_owned()), "it is kept");
    }

    #[tokio::test(start_paused = true)]
    async fn a_workload_that_was_ready_before_the_update_must_be_ready_and_no_other() {
        let with = workload::tests::with;
        let (owner, workload) = watch::channel(Workload::default());
        let health = ClusterHealth { settled: Duration::from_secs(10), ..Default::default() };
        let (_owner, health) = watch::channel(health);
        let service = |machine: &Machine| Service {
            trial: Duration::MAX,
            health: health.clone(),
            workload: workload.clone(),
            ..service(machine, true, None)
        };
        let installed = |machine: &Machine| {
            let before = with(&[("kubelet", ""), ("dns", "no port")]);
            workload::note(&machine.config.before, &Version::new(1, 1, 0), &before).unwrap();
        };
        // Minutes later it is ready again; what was not ready before does not count.
        for end in [with(&[("kubelet", ""), ("dns", "no port")]), with(&[])] {
            let machine = Machine::new("polis-1.1.0+0-1.efi");
            installed(&machine);
            owner.send_replace(with(&[("kubelet", "it is starting")]));
            let (ctx, handles) = Context::for_test();
            let mut status = machine.status.subscribe();
            let story = async {
                sleep(WORKLOAD_MAX / 2).await;
                assert!(machine.kernels().contains(&"polis-1.1.0+0-1.efi".to_owned()), "kept");
                owner.send_replace(end);
                status.wait_for(|status| status.other.is_some() && !status.trial).await.unwrap();
                handles.cancel().await;
            };
            let (ended, ()) = tokio::join!(service(&machine).run(ctx), story);
            ended.unwrap();
            assert!(machine.kernels().contains(&"polis-1.1.0.efi".to_owned()));
        }

        // It never is: given up, with its name.
        let machine = Machine::new("polis-1.1.0+0-1.efi");
        installed(&machine);
        owner.send_replace(with(&[("kubelet", "exited with status 1")]));
        let (ctx, mut handles) = Context::for_test();
        let report = tokio::select! {
            ended = service(&machine).run(ctx) => panic!("{ended:?}"),
            report = until(&mut handles.trapdoor, "trapdoor", Clone::clone) => report.unwrap(),
        };
        assert_eq!(report.code, code::TRIAL_UNHEALTHY);
        let lost = "kubelet was ready before the update and is not: exited with status 1";
        assert_eq!(report.causes.last().unwrap(), lost);
        let lines = handles.take_lines();
        let failed = "phase=commit version=1.1.0 slot=A result=failed cause=";
        assert!(lines.iter().any(|line| line.contains(failed) && line.contains(lost)), "{lines:?}");
        assert!(machine.kernels().contains(&"polis-1.1.0+0-1.efi".to_owned()), "it is not kept");
    }

    #[tokio::test]
    async fn the_system_before_says_once_what_became_of_the_new_one() {
        let machine = Machine::new("polis-1.0.0.efi");
        fs::write(machine.config.kernels.join("polis-1.1.0+0-1.efi"), "").unwrap();
        // The event lines of a start.
        let start = async |previous: Option<&str>| {
            let (ctx, mut handles) = Context::for_test();
            machine.status.send_replace(Status::default());
            let mut status = machine.status.subscribe();
            let service = service(&machine, true, previous);
            let end = async {
                status.wait_for(|status| status.other.is_some()).await.unwrap();
                handles.cancel().await;
            };
            let (ended, ()) = tokio::join!(service.run(ctx), end);
            ended.unwrap();
            handles.take_lines()
        };
        let other = || machine.status.borrow().other.clone().unwrap();
        let lines = start(Some("guru #0310.0000: late")).await;
        assert_eq!((other().version, other().slot), (Version::new(1, 1, 0), "B"));
        assert_eq!(other().to_string(), "1.1.0 in slot B, failed: guru #0310.0000: late");
        assert!(lines[0].starts_with(
            "POLIS update phase=rollback version=1.1.0 slot=B result=done cause=\"guru #0310.0000: late\""
        ), "{lines:?}");
        // The next start knows it, and has nothing to say of it.
        assert_eq!(start(None).await, Vec::<String>::new());
        assert_eq!(other().to_string(), "1.1.0 in slot B, failed");
        // A power cut before that was noted.
        let name = |file: &str| machine.config.kernels.join(file);
        fs::rename(name("polis-1.1.0+0-2.efi"), name("polis-1.1.0+0-1.efi")).unwrap();
        assert_eq!(start(None).await.len(), 1);
        // A try of the same version in another update is another event.
        fs::remove_file(name("polis-1.1.0+0-2.efi")).unwrap();
        fs::write(name("polis-1.1.0+1.efi"), "").unwrap();
        assert_eq!(start(None).await, Vec::<String>::new());
        fs::rename(name("polis-1.1.0+1.efi"), name("polis-1.1.0+0-1.efi")).unwrap();
        assert_eq!(start(None).await.len(), 1);
    }

    #[test]
    fn a_second_name_of_the_running_system_is_not_another_one() {
        let machine = Machine::new("polis-1.1.0.efi");
        let left = machine.config.kernels.join("polis-1.1.0+0-1.efi");
        fs::write(&left, "").unwrap();
        let other = || look(&machine.config).unwrap().1.unwrap().0;
        assert_eq!((other().version, other().standing), (Version::new(0, 9, 0), Standing::Good));
        // Nor is it one on trial, whose disk was lost.
        let machine = Machine::new("polis-1.1.0+0-1.efi");
        let name = |file: &str| machine.config.kernels.join(file);
        fs::rename(name("polis-1.1.0+0-1.efi"), name("polis-1.1.0+1.efi")).unwrap();
        let (running, other) = look(&machine.config).unwrap();
        assert_eq!(
            (running.file.as_str(), running.standing),
            ("polis-1.1.0+0-1.efi", Standing::Tried)
        );
        assert_eq!(other.unwrap().0.version, Version::new(0, 9, 0));
    }

    #[tokio::test(start_paused = true)]
    async fn a_trial_is_not_over_when_the_disk_with_its_kernel_image_is_lost() {
        let machine = Machine::new("polis-1.1.0+0-1.efi");
        fs::remove_file(machine.config.kernels.join("polis-1.1.0+0-1.efi")).unwrap();
        let (ctx, _handles) = Context::for_test();
        let (_owner, health) = watch::channel(ClusterHealth::default());
        let trial = Duration::MAX;
        let service = Service { trial, health, ..service(&machine, true, None) };
        let ended = service.run(ctx).await;
        assert!(matches!(ended, Err(Ended::Keep(_))), "{ended:?}");
        let status = machine.status.borrow();
        assert!(status.known && status.trial, "{status:?}");
    }

    #[test]
    fn a_kernel_image_that_the_loader_counted_and_did_not_start_was_refused() {
        let machine = Machine::new("polis-1.0.0.efi");
        fs::write(machine.config.kernels.join("polis-1.1.0+0-1.efi"), "").unwrap();
        let refused = || look(&machine.config).unwrap().1.unwrap().1;
        assert!(!refused());
        let counted = |path: &str| {
            let text = path.encode_utf16().chain([0]).flat_map(u16::to_le_bytes);
            let content: Vec<u8> = [6, 0, 0, 0].into_iter().chain(text).collect();
            let vendor = "4a67b082-0a4c-41cf-b6c7-440b29bb8c4f";
            let name = format!("{}-{vendor}", polis_base::sys::efivar::COUNTED);
            fs::write(machine.config.efivars.join(name), content).unwrap();
        };
        counted(r"\EFI\Linux\polis-1.2.0+0-1.efi");
        assert!(!refused());
        counted(r"\EFI\LINUX\polis-1.1.0+0-1.efi");
        assert!(refused());
        let service = service(&machine, true, Some("guru #0310.0000: late"));
        let other = |standing| {
            let version = Version::new(1, 1, 0);
            service.other(Entry { file: String::new(), version, standing, reported: false }, true)
        };
        assert_eq!(other(Standing::Tried).cause.as_deref(), Some(REFUSED));
        assert_eq!(other(Standing::Good).cause, None);
    }
}
