//! The `node` binary: everything around the supervision tree.
//!
//! `init` starts `node` with its environment ([`polis_base::environment`]) and a channel.
//! `node` builds the services ([`crate::root`]), and ends in one of five ways:
//!
//! ```text
//!               a service opens the trapdoor
//! [running] ------------------------------------> guru on the channel, status 70
//!     |  \--- `stop` on the channel, or a
//!     |       service asks for the end --> ordered stop --> `off` on it, status 0
//!     |       where somebody at the machine asked, a worker's pods leave first: [`leave`]
//!     |---- panic in the main task ---> guru on the channel, status 70
//!     |---- `init` is gone -----------> status 71: no process is left to work for
//!     +---- killed -------------------> `init` sees it, and says so itself
//! ```
//!
//! Invariants:
//! - Everything that a service or the main task wrote before the end is written first,
//!   within [`FLUSH_DEADLINE`].
//! - The end never waits for a thread of the runtime: the runtime is not dropped.

pub mod heartbeat;
mod leave;
pub mod logs;
pub mod memory;
mod panics;
mod serial_port;

use std::io::{self, Write as _};
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use tokio::sync::watch;
use tracing::{error, info, warn};

use self::leave::Leave;
use crate::maintenance;
use crate::root::{self, Root};
use polis_base::environment::Environment;
use polis_base::recovery;
use polis_base::serial::EventLine;
use polis_base::sys::reboot::Reason;
use polis_base::sys::{files, inherit};
use polis_base::trapdoor::{Report, code};
use polis_runtime::board::Board;
use polis_runtime::lines::Lines;
use polis_runtime::logtree::{self, layer};
use polis_runtime::supervisor::Supervisor;
use polis_runtime::sys::control::{self, Channel};
use polis_workload::drain::{Drains, Held};

/// Status after the trapdoor: the report is on the channel.
const STATUS_TRAPDOOR: u8 = 70;
/// Status when `node` itself cannot go on; the reason is on standard error.
const STATUS_BROKEN: u8 = 71;
/// Status when `node` was started by anything but `init`.
const STATUS_USAGE: u8 = 2;

/// Files that may be open: the connections of three servers, with room to spare.
const OPEN_FILES: u64 = 64 << 10;
/// How long the last lines may take. `init` reads them as fast as they come.
const FLUSH_DEADLINE: Duration = Duration::from_secs(1);
/// Threads that run services. They wait more than they work; etcd is the one
/// that needs the processors.
const WORKERS: usize = 2;
/// Threads for calls that block: files, mostly, and short ones.
const BLOCKING_MAX: usize = 8;

/// Runs `node`; the status is for `init`.
#[must_use]
pub fn main() -> ExitCode {
    let environment = match Environment::from_variables(|name| std::env::var(name).ok()) {
        Ok(environment) => environment,
        Err(error) => {
            complain(&format!(
                "error: {error}\n\
                 node runs every service of a Polis machine, and only init starts it.\n\
                 help: `cargo xtask run` boots a machine that has both"
            ));
            return ExitCode::from(STATUS_USAGE);
        }
    };
    panics::install();
    match start(environment) {
        Ok(status) => ExitCode::from(status),
        Err(error) => {
            complain(&format!("{error:#}"));
            ExitCode::from(STATUS_BROKEN)
        }
    }
}

/// Writes to standard error, which `init` reads line by line.
fn complain(text: &str) {
    // Nothing is left to do when that fails too.
    let _lost = writeln!(io::stderr(), "{text}");
}

fn start(environment: Environment) -> anyhow::Result<u8> {
    use anyhow::Context as _;
    let control = inherit::take(environment.control).context("no control channel to init")?;
    // The kernel's own bound is for a program at a terminal, not for a server.
    files::allow(OPEN_FILES).context("cannot raise the limit of open files")?;
    // Before anything else is opened: its number must still be what init left there.
    let recovery = recovery::Given::inherit(environment.recovery, Path::new("/sys"));
    // `/etc` has links to files in it, which services write from their start on.
    polis_base::files::Root::live()
        .ephemeral
        .etc
        .create()
        .context("cannot make the directory behind /etc")?;
    let (lines, queue) = Lines::channel();
    serial_port::start(lines.clone(), queue)
        .context("cannot start the writer of the serial port")?;
    let logs = logtree::Tree::new(Some(lines.clone()));
    layer::install(logs.clone());
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(WORKERS)
        .max_blocking_threads(BLOCKING_MAX)
        .thread_name("node")
        .enable_all()
        .build()
        .context("cannot start the runtime")?;
    // Never dropped: that would wait for threads that may be stuck in a device.
    let runtime = Box::leak(Box::new(runtime));
    let panic_control = control.try_clone().context("cannot open a second control channel")?;
    let ended = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        runtime.block_on(async {
            let control = Channel::new(control).context("cannot watch the control channel")?;
            Ok(run(environment, recovery, &control, lines, logs).await)
        })
    }));
    // Nothing that the main task owned is used after its panic.
    ended.unwrap_or_else(|payload| {
        let report = fit(panicked(panics::text(payload.as_ref())));
        control::send_now(&panic_control, &report.to_line().to_string())
            .context("cannot report a panic to init")?;
        Ok(STATUS_TRAPDOOR)
    })
}

/// The main task panicked: nothing is left to start it again.
fn panicked(text: &str) -> Report {
    let cause = "the main task of node panicked".to_owned();
    Report::new(code::NODE_PANICKED, vec![cause, text.to_owned()])
}

/// Why `node` ends.
enum End {
    Trapdoor(Report),
    Stop(String),
    Orphaned,
}

async fn run(
    environment: Environment,
    recovery: Result<recovery::Given, recovery::Error>,
    control: &Channel,
    lines: Lines,
    logs: logtree::Tree,
) -> u8 {
    let recovery = recovery.unwrap_or_else(|error| {
        error!(error = &error as &dyn std::error::Error, "continuing without the typed key");
        recovery::Given::nothing(Path::new("/sys"))
    });
    let board = Board::new(environment.stages.clone(), lines.clone());
    let (ready, mut is_ready) = watch::channel(false);
    let (terminals, mut drawn_on) = watch::channel(Vec::new());
    let (beats, mut beaten) = watch::channel(0);
    let (end, mut asked_to_end) = watch::channel(None);
    let (leave, mut asked_to_leave) = watch::channel(None);
    let (drains, workload) = (Drains::default(), watch::Sender::default());
    let pods = Leave { drains: drains.clone(), workload: workload.subscribe() };
    let mut leaving = None;
    let (maintenance, mut shown) = watch::channel(maintenance::Shown::default());
    let root = Root {
        environment,
        recovery,
        ready,
        beats,
        terminals,
        end,
        leave,
        drains,
        workload,
        maintenance,
    };
    let supervisor =
        Supervisor::start(board, lines.clone(), logs, move |ctx| root::run(root.clone(), ctx));
    // No new pod comes until everything has stopped.
    let mut held = None;
    let end = loop {
        tokio::select! {
            // Cancel-safe: waits for an event value.
            report = supervisor.trapdoor() => break End::Trapdoor(report),
            // Cancel-safe: a message is received whole or not at all.
            message = control.receive() => match message {
                Ok(Some(message)) => match EventLine::parse(&message) {
                    Some(line) if line.word() == "stop" => {
                        let reason = line.get("reason").unwrap_or("poweroff").to_owned();
                        if leaving.is_some() || !pods.is_needed() {
                            break End::Stop(reason);
                        }
                        send(control, &EventLine::new("draining")).await;
                        leaving = Some((reason, Box::pin(pods.clone().drained())));
                    }
                    _ => warn!(message, "init sent an unknown message"),
                },
                Ok(None) => break End::Orphaned,
                Err(error) => {
                    complain(&format!("the control channel failed: {error}"));
                    break End::Orphaned;
                }
            },
            // Cancel-safe: waits for an event value.
            Ok(()) = asked_to_end.changed() => {
                let reason: Option<Reason> = *asked_to_end.borrow_and_update();
                if let Some(reason) = reason {
                    break End::Stop(reason.name().to_owned());
                }
            }
            // Cancel-safe: waits for an event value.
            Ok(()) = asked_to_leave.changed() => {
                let reason: Option<Reason> = *asked_to_leave.borrow_and_update();
                if let Some(reason) = reason {
                    let reason = reason.name().to_owned();
                    if leaving.is_some() || !pods.is_needed() {
                        break End::Stop(reason);
                    }
                    leaving = Some((reason, Box::pin(pods.clone().drained())));
                }
            }
            // Cancel-safe: the drain stays where it is, and is asked again.
            left = gone(&mut leaving) => {
                held = left.1;
                break End::Stop(left.0);
            }
            // Cancel-safe: waits for an event value.
            Ok(()) = drawn_on.changed() => {
                let names = drawn_on.borrow_and_update().clone();
                let line = EventLine::new("terminals");
                let line = names.iter().fold(line, |line, name| line.field("tty", name));
                send(control, &line).await;
            }
            // Cancel-safe: waits for an event value.
            Ok(()) = shown.changed() => {
                let maintenance::Shown { text, calls, caller } = shown.borrow_and_update().clone();
                let line = EventLine::new("maintenance").field("text", text);
                send(control, &line.field("calls", calls).field("caller", caller)).await;
            }
            // Cancel-safe: waits for an event value.
            Ok(()) = beaten.changed() => send(control, &EventLine::new("beat")).await,
            // Cancel-safe: waits for an event value.
            Ok(()) = is_ready.changed() => {
                send(control, &EventLine::new("ready")).await;
                #[cfg(feature = "fault-injection")]
                crate::injection::main_task_is_ready();
            }
        }
    };
    let status = match end {
        End::Trapdoor(report) => {
            flush(&lines).await;
            send(control, &fit(report).to_line()).await;
            STATUS_TRAPDOOR
        }
        End::Stop(reason) => {
            info!(reason, "stopping every service");
            supervisor.stop().await;
            info!("every service has stopped");
            flush(&lines).await;
            send(control, &EventLine::new("off").field("reason", reason)).await;
            0
        }
        End::Orphaned => STATUS_BROKEN,
    };
    drop(held);
    flush(&lines).await;
    status
}

/// Waits until the pods are gone, where they are to go; then why, and what keeps others away.
async fn gone<F: Future<Output = Option<Held>> + Unpin>(
    leaving: &mut Option<(String, F)>,
) -> (String, Option<Held>) {
    match leaving {
        Some((reason, drained)) => {
            let held = drained.await;
            (std::mem::take(reason), held)
        }
        None => std::future::pending().await,
    }
}

async fn send(control: &Channel, line: &EventLine) {
    if let Err(error) = control.send(&line.to_string()).await {
        complain(&format!("cannot send `{}` to init: {error}", line.word()));
    }
}

/// Waits until the queued lines are written, with a deadline.
async fn flush(lines: &Lines) {
    let drained = async {
        while !lines.is_drained() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    let _slow = tokio::time::timeout(FLUSH_DEADLINE, drained).await;
}

/// Cuts a report down to what fits into one message of the channel, the longest texts first: the
/// next step, which is short beside a log, stays whole.
fn fit(mut report: Report) -> Report {
    /// Texts of a report, and characters of each that fit whatever they are: escaped, a character
    /// of a text takes six bytes at most.
    const TEXTS_MAX: usize = 8;
    const TEXT_MIN: usize = control::MESSAGE_MAX / 6 / (2 * TEXTS_MAX + 2);
    report.causes.truncate(TEXTS_MAX);
    report.tried.truncate(TEXTS_MAX);
    let mut most = control::MESSAGE_MAX;
    while most > TEXT_MIN && report.to_line().to_string().len() > control::MESSAGE_MAX {
        most = (most / 2).max(TEXT_MIN);
        let cut = |text: &mut String| {
            if text.chars().count() > most {
                *text = text.chars().take(most - 1).chain(['…']).collect();
            }
        };
        report.causes.iter_mut().chain(&mut report.tried).for_each(cut);
        cut(&mut report.next);
    }
    report
}

#[cfg(test)]
mod tests {
    use super::*;
    use polis_base::stage::Stage;

    #[test]
    fn the_longest_report_fits_into_one_message() {
        for filling in ["x", "é", "\u{1}", "\"", "字"] {
            let text = filling.repeat(20_000);
            let report = Report {
                code: code::SERVICE_GAVE_UP,
                stage: Stage::System,
                causes: vec![text.clone(); 30],
                tried: vec![text.clone(); 30],
                next: text,
                unlock: false,
            };
            let message = fit(report).to_line().to_string();
            assert!(message.len() <= control::MESSAGE_MAX, "{} bytes", message.len());
            let read = EventLine::parse(&message).as_ref().and_then(Report::from_line);
            assert_eq!(read.unwrap().causes.len(), 8);
        }
    }

    #[test]
    fn a_next_step_stays_whole_beside_the_longest_causes() {
        let code = code::CONSENSUS_DATABASE_DAMAGED;
        let short = Report::new(code, vec!["etcd ended".to_owned()]);
        assert_eq!(fit(short.clone()), short);
        let long = fit(Report::new(code, vec!["x".repeat(20_000); 30]));
        assert_eq!(long.next, code.help());
        assert!(long.causes[0].ends_with('…'), "{}", long.causes[0]);
    }

    #[test]
    fn a_short_report_stays_as_it_is() {
        let report = Report {
            code: code::SERVICE_GAVE_UP,
            stage: Stage::System,
            causes: vec!["one".to_owned()],
            tried: Vec::new(),
            next: "look".to_owned(),
            unlock: false,
        };
        assert_eq!(fit(report.clone()), report);
    }
}
