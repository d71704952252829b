//! One child process of the workload stack, and its health.
//!
//! ```text
//! [starting] --`ready` succeeds--> [ready] --fails--> [failed: cause]
//!     |                              ^---- succeeds again ---+
//!     |                              |
//!     +-- STARTING_MAX               +-- `live` fails SILENT_MAX times in a row, or it ends
//!     v                              v
//!   the run ends, and the supervisor starts another one
//! ```
//!
//! A server that is not ready is not restarted: its etcd may be without a quorum, and a
//! restart would only lose its caches. A server whose `live` check fails is restarted.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use tokio::time::{Instant, sleep};
use tracing::{debug, info};

use super::api::{self, Api, Session};
use super::http_health;
use super::parts::{API_STARTS, Part, PartState, Parts};
use polis_base::cause;
use polis_base::files;
use polis_base::serial::Severity;
use polis_runtime::logtree::{Body, Levelled, Parser};
use polis_runtime::supervisor::Context;
use polis_runtime::sys::cgroup::Group;
use polis_runtime::sys::confine::Confinement;
use polis_runtime::sys::process::{self, Child, Command, Exit};

/// The supervisor waits for ten seconds; an API server ends within three.
pub(super) const STOP_MAX: Duration = Duration::from_secs(8);

/// The interval of health checks, for a part that starts and for one that serves.
const LOOK_STARTING: Duration = Duration::from_millis(500);
const LOOK_READY: Duration = Duration::from_secs(10);

/// An API server on an emulated processor needs minutes.
const STARTING_MAX: Duration = Duration::from_secs(15 * 60);

/// Failed `live` checks in a row after which a part counts as hanging.
const SILENT_MAX: u32 = 6;

/// Characters of the last words of a process: the log has the rest, and the screen of an
/// operator has no room for it.
const WORDS_MAX: usize = 500;

/// Why a run of a part ended.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Its file of configuration cannot be written.
    #[error("cannot configure {}", part.name())]
    Files {
        /// Which one.
        part: Part,
        /// Why.
        source: files::Error,
    },
    /// It could not be started, or waited for.
    #[error("cannot run {}", part.name())]
    Process {
        /// Which one.
        part: Part,
        /// Why.
        source: process::Error,
    },
    /// It ended.
    #[error("{} {exit}{said}", part.name())]
    Died {
        /// Which one.
        part: Part,
        /// How.
        exit: Exit,
        /// Its last error message, after a colon; empty without one.
        said: String,
    },
    /// It was not ready in time.
    #[error("{} was not ready within {} minutes of its start: {said}", part.name(), STARTING_MAX.as_secs() / 60)]
    Slow {
        /// Which one.
        part: Part,
        /// The last reason.
        said: String,
    },
    /// Its `live` check fails.
    #[error("{} does not answer any more: {said}", part.name())]
    Hangs {
        /// Which one.
        part: Part,
        /// The last reason.
        said: String,
    },
    /// An input of its command line has changed.
    #[error("{} is started again: {what}", part.name())]
    Outdated {
        /// Which one.
        part: Part,
        /// The change.
        what: &'static str,
    },
    /// The owner of an input ended.
    #[error(transparent)]
    Closed(#[from] polis_runtime::event::Closed),
}

/// How a program of a part is asked for its health.
#[derive(Clone, Debug)]
pub(super) enum Probe {
    /// Over TLS.
    Tls(Api),
    /// Over plain HTTP, on loopback.
    Http(SocketAddr),
}

/// One health check.
#[derive(Clone, Debug)]
pub(super) struct Check {
    probe: Probe,
    path: &'static str,
}

impl Check {
    pub(super) fn tls(api: &Api, path: &'static str) -> Self {
        Self { probe: Probe::Tls(api.clone()), path }
    }

    pub(super) fn plain(address: SocketAddr, path: &'static str) -> Self {
        Self { probe: Probe::Http(address), path }
    }

    async fn ask(&self) -> Result<(), api::Error> {
        match &self.probe {
            Probe::Tls(api) => api.check(self.path).await,
            Probe::Http(address) => http_health::check(*address, self.path).await,
        }
    }

    /// The same check, for a program that starts and is asked again and again.
    fn repeated(&self) -> Repeated<'_> {
        let session = match &self.probe {
            Probe::Tls(api) => Some(Session::new(api)),
            Probe::Http(_) => None,
        };
        Repeated { check: self, session }
    }
}

/// A check that is made twice a second.
struct Repeated<'a> {
    check: &'a Check,
    /// Over TLS: one connection for all of them.
    session: Option<Session>,
}

impl Repeated<'_> {
    async fn ask(&self) -> Result<(), api::Error> {
        match &self.session {
            Some(session) => session.check(self.check.path).await,
            None => self.check.ask().await,
        }
    }
}

/// How the process of a part runs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Process {
    /// Its control group.
    pub(super) group: Group,
    /// Its place in the order of the OOM killer; `None` is the kernel's.
    pub(super) oom_score: Option<i16>,
    /// The form of its log lines.
    pub(super) parser: Parser,
}

impl Process {
    /// A program of Kubernetes, with the weight of the control plane.
    pub(super) const KUBE: Self =
        Self { group: Group::Kube, oom_score: None, parser: Parser::Klog };
}

/// A part of the workload stack that is a child process.
#[derive(Clone, Debug)]
pub(super) struct Component {
    pub(super) part: Part,
    /// The program: a link to the one binary, which looks at its name.
    pub(super) program: PathBuf,
    pub(super) args: Vec<String>,
    pub(super) process: Process,
    /// Its rights; `None` are those of the node.
    pub(super) confinement: Option<Confinement>,
    /// Its readiness check.
    pub(super) ready: Check,
    /// Checked as well, until the part is ready for the first time: work that the program does
    /// after its start, and that its own check does not know of.
    pub(super) first: Option<Check>,
    /// Its liveness check.
    pub(super) live: Check,
    pub(super) parts: Parts,
}

impl Component {
    /// Runs it until cancelled, or until `outdated` returns.
    ///
    /// # Errors
    ///
    /// [`Error`], whenever the process is not running any more.
    pub(super) async fn run(
        &self,
        ctx: &Context,
        outdated: impl Future<Output = Error>,
    ) -> Result<(), Error> {
        let part = self.part;
        self.parts.set(part, PartState::Starting);
        let ended = self.serve(ctx, outdated).await;
        match &ended {
            Ok(()) => self.parts.set(part, PartState::Stopped),
            Err(Error::Outdated { .. }) => self.parts.set(part, PartState::Starting),
            Err(error) => self.parts.died(part, &cause::line(error)),
        }
        ended
    }

    async fn serve(
        &self,
        ctx: &Context,
        outdated: impl Future<Output = Error>,
    ) -> Result<(), Error> {
        let part = self.part;
        let process = |source| Error::Process { part, source };
        let mut command = Command::new(&self.program)
            .args(&self.args)
            // Go resolves names itself, and reads `/etc/hosts` at each lookup.
            .env("GODEBUG", "netdns=go")
            .env("PATH", "/usr/bin:/usr/sbin")
            .log(ctx.sink(part.name(), self.process.parser).ruled(quieten));
        if let Some(group) = self.process.group.existing() {
            command = command.cgroup(group);
        }
        if let Some(score) = self.process.oom_score {
            command = command.oom_score_adj(score);
        }
        if let Some(confinement) = &self.confinement {
            command = command.confined(confinement.clone());
        }
        let mut child = command.spawn().await.map_err(process)?;
        let ended = tokio::select! {
            // Cancel-safe: only waits.
            () = ctx.cancelled() => Ok(()),
            // Cancel-safe.
            exit = child.wait() => {
                let exit = exit.map_err(process)?;
                return Err(Error::Died { part, exit, said: last_words(&child) });
            }
            // Cancel-safe: an unfinished health check has no effect.
            error = self.watch(ctx) => Err(error),
            // Cancel-safe: only waits.
            error = outdated => Err(error),
        };
        child.terminate(STOP_MAX).await.map_err(process)?;
        ended
    }

    /// Waits until the program has done its first work. That may need other programs, as an
    /// API server with its etcd, so a restart would be no remedy, however long it takes; it is
    /// one for a program that hangs.
    async fn first_work(&self, first: &Check) -> Result<(), Error> {
        tokio::select! {
            // Cancel-safe, both: an unfinished health check has no effect.
            () = self.works(first) => Ok(()),
            error = self.hang() => Err(error),
        }
    }

    /// Waits until `first` succeeds. After [`API_STARTS`], the part has failed with the reason.
    async fn works(&self, first: &Check) {
        let (begun, first) = (Instant::now(), first.repeated());
        let mut last = cause::Last::default();
        while let Err(error) = first.ask().await {
            let error = cause::line(&error);
            if begun.elapsed() >= API_STARTS {
                self.parts.fail(self.part, format!("not ready yet: {error}"));
            }
            if last.is_new(&error) {
                debug!(error, "not ready yet");
            }
            sleep(LOOK_STARTING).await;
        }
    }

    /// Waits until the process hangs.
    async fn hang(&self) -> Error {
        let mut silent = 0;
        loop {
            sleep(LOOK_READY).await;
            if let Err(error) = self.check_live(&mut silent).await {
                return error;
            }
        }
    }

    /// Makes the `live` check, the last `silent` of which have failed; fails when the process
    /// hangs.
    async fn check_live(&self, silent: &mut u32) -> Result<(), Error> {
        match self.live.ask().await {
            Ok(()) => *silent = 0,
            Err(error) => {
                *silent += 1;
                if *silent >= SILENT_MAX {
                    return Err(Error::Hangs { part: self.part, said: cause::line(&error) });
                }
            }
        }
        Ok(())
    }

    /// Waits until the program, which was started when `begun` says, is ready for the first time.
    async fn starts(&self, begun: Instant) -> Result<(), Error> {
        let ready = self.ready.repeated();
        let mut last = cause::Last::default();
        loop {
            let said = match ready.ask().await {
                Ok(()) => return Ok(()),
                Err(error) => cause::line(&error),
            };
            if begun.elapsed() >= STARTING_MAX {
                return Err(Error::Slow { part: self.part, said });
            }
            if last.is_new(&said) {
                debug!(error = said, "not ready yet");
            }
            sleep(LOOK_STARTING).await;
        }
    }

    /// Watches the health of the process; returns when it has to be restarted.
    async fn watch(&self, ctx: &Context) -> Error {
        let begun = Instant::now();
        let part = self.part;
        if let Err(error) = self.starts(begun).await {
            return error;
        }
        if let Some(first) = &self.first
            && let Err(error) = self.first_work(first).await
        {
            return error;
        }
        info!(after = ?begun.elapsed(), "ready");
        ctx.healthy();
        self.parts.set(part, PartState::Ready);
        let mut silent = 0;
        loop {
            sleep(LOOK_READY).await;
            match self.ready.ask().await {
                Ok(()) => {
                    silent = 0;
                    self.parts.set(part, PartState::Ready);
                    continue;
                }
                Err(error) => self.parts.fail(part, cause::line(&error)),
            }
            if let Err(error) = self.check_live(&mut silent).await {
                return error;
            }
        }
    }
}

/// The beginning of the last error of a process, else of its last line; after a colon.
fn last_words(child: &Child) -> String {
    words(&child.tail()).map(|words| format!(": {words}")).unwrap_or_default()
}

fn words(tail: &[Body]) -> Option<String> {
    let complains = |body: &&Body| match body {
        Body::Levelled(levelled) => levelled.severity >= Severity::Error,
        // The programs print the reason of a bad start without a level.
        Body::Raw(text) => !text.trim().is_empty(),
    };
    let body = tail.iter().rev().find(complains).or_else(|| tail.last())?;
    Some(body.to_string().chars().take(WORDS_MAX).collect())
}

/// Lowers a line that each program writes at each start: no manifest is configured.
fn quieten(levelled: &mut Levelled) {
    if levelled.message == "The manifest file is empty, ignoring." {
        levelled.severity = Severity::Debug;
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;
    use polis_runtime::logtree::Tree;
    use tokio::time::timeout;

    fn parsed(lines: &[&str]) -> Vec<Body> {
        lines.iter().map(|line| Parser::Klog.parse(line)).collect()
    }

    #[test]
    fn the_last_words_are_the_newest_error() {
        let info = "I1122 14:03:12.916120   11251 controller.go:667] quota added";
        let error = "E1122 14:03:12.916120   11251 run.go:72] \"command failed\" err=\"in use\"";
        assert_eq!(words(&parsed(&[])), None);
        assert!(words(&parsed(&[info])).unwrap().contains("quota added"));
        assert!(words(&parsed(&[error, info])).unwrap().contains("command failed"));
        let plain = "Error: unknown flag: --no-such";
        assert_eq!(words(&parsed(&[error, plain])).as_deref(), Some(plain));
        let long = "goroutine 1: ".repeat(1000);
        assert_eq!(words(&parsed(&[&long])).as_deref(), long.get(..WORDS_MAX));
    }

    /// A program that answers nothing.
    fn silent(ctx: &Context) -> (Component, Check) {
        let closed = Check::plain((Ipv4Addr::LOCALHOST, 1).into(), "/healthz");
        let component = Component {
            part: Part::ControllerManager,
            program: "/nowhere/kube-controller-manager".into(),
            args: Vec::new(),
            process: Process::KUBE,
            confinement: None,
            ready: closed.clone(),
            first: Some(closed.clone()),
            live: closed.clone(),
            parts: Parts::new(tokio::sync::watch::Sender::default(), ctx.lines().clone()),
        };
        (component, closed)
    }

    #[tokio::test(start_paused = true)]
    async fn a_first_work_that_takes_long_is_a_failure_with_the_reason() {
        let (ctx, _handles) = Context::for_test();
        let (component, closed) = silent(&ctx);
        component.parts.set(component.part, PartState::Starting);
        let mut works = std::pin::pin!(component.works(&closed));
        let time = API_STARTS - Duration::from_secs(1);
        timeout(time, works.as_mut()).await.unwrap_err();
        assert_eq!(component.parts.state(component.part), Some(PartState::Starting));
        timeout(Duration::from_secs(30), works.as_mut()).await.unwrap_err();
        let state = component.parts.state(component.part);
        let Some(PartState::Failed { cause }) = state else { panic!("{state:?}") };
        assert!(cause.starts_with("not ready yet: ") && cause.contains("127.0.0.1:1"), "{cause}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_program_that_hangs_before_its_first_work_is_started_again() {
        let (ctx, _handles) = Context::for_test();
        let (component, closed) = silent(&ctx);
        let ended = component.first_work(&closed).await;
        assert!(matches!(ended, Err(Error::Hangs { .. })), "{ended:?}");
    }

    #[test]
    fn a_line_of_every_start_is_no_error() {
        let sink = Tree::new(None).sink("apiserver", Parser::Klog).ruled(quieten);
        let line =
            "E1122 14:03:09.353065   1 options.go:205] The manifest file is empty, ignoring.";
        let Some(Body::Levelled(levelled)) = sink.line(line.as_bytes()) else { panic!() };
        assert_eq!(levelled.severity, Severity::Debug);
    }
}
