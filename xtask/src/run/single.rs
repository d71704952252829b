//! A run of one machine: its console or its serial line in this terminal, until either ends.

use std::io::{self, Write as _};
use std::path::Path;
use std::sync::atomic::AtomicUsize;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, bail};
use polis_qemu::machine::Outcome;
use polis_qemu::{Event, Image, Machine};

use super::machines::prepare;
use super::{Args, POWER_BUTTON, STOP_MAX, gave_up, said, stop_max};
use crate::kubernetes::{self, Deployment};
use crate::operator::{Operator, typed};
use crate::{host, terminal};

/// Between two looks at a deployment that has not ended.
const ASK: Duration = Duration::from_secs(1);

/// Runs the machine of `dir`; with `keeps`, the one that an earlier run left there.
pub(super) fn run(args: &Args, image: &Image, dir: &Path, keeps: bool) -> Result<()> {
    let shown = !args.headless && !args.until_ready && terminal::is_interactive();
    let folder = dir.to_owned();
    let first = if keeps { "again" } else { "for the first time" };
    let mut config = prepare(args, image, dir, shown)?;
    // A machine that ends when it is ready needs no operator.
    let operator = match args.until_ready && !args.kubernetes {
        true => None,
        false => Some(Operator::prepare(dir, &args.name, keeps)?),
    };
    if let Some(operator) = &operator {
        config.forwards.clone_from(&operator.forwards);
    }
    eprintln!(
        "run: booting image {} {first}, run {}, with {} MiB, logs in {}",
        image.version,
        config.accelerator,
        config.memory,
        dir.display()
    );
    let log = dir.join("serial.log");
    let (finish, finished) = mpsc::channel();
    let kubernetes = args.kubernetes;
    let operate = operator.map(|operator| {
        let command = format!("{} cluster info", typed(&operator.script()));
        eprintln!("run: once the node is ready, in another terminal: {command}");
        move || {
            let (polisctl, log_of_node) = (operator.polisctl.clone(), log.clone());
            operator.follow(&log, move |taken| match taken {
                Ok(node) if kubernetes => {
                    let nodes = vec![kubernetes::Node { id: node, log: log_of_node }];
                    let report = if shown { terminal::title } else { said };
                    let deployment = Deployment { dir: folder, operator: polisctl, nodes, report };
                    // The receiver ends with the console.
                    drop(finish.send(deployment.run()));
                }
                Err(error) if kubernetes => {
                    let error = error.context("cannot take ownership of the cluster");
                    drop(finish.send(Err(error)));
                }
                // The console uses this terminal; a failure there shows when it is used.
                _ if shown => {}
                Ok(_node) => eprintln!("run: in another terminal: {command}"),
                Err(error) => eprintln!("run: cannot take ownership of the cluster: {error:#}"),
            });
        }
    });
    let mut machine = Machine::start(&config, dir)?;
    if let Some(operate) = operate {
        operate();
    }
    let finished = kubernetes.then_some(finished);
    match shown {
        true => show(machine, args, finished.as_ref()),
        false => stream(&mut machine, args, finished.as_ref()),
    }
}

/// The node's console in this terminal, until either side ends it.
///
/// `finished` receives the outcome of the deployment, where there is one.
fn show(
    mut machine: Machine,
    args: &Args,
    finished: Option<&mpsc::Receiver<Result<String>>>,
) -> Result<()> {
    let console = machine.take_console().context("QEMU opened no console")?;
    eprintln!("run: this terminal becomes the node's console; {}", terminal::hint(1));
    let end = terminal::lend(&console, &AtomicUsize::new(0))?;
    if end == terminal::End::Quit {
        leave(&mut machine, args)?;
    }
    if end == terminal::End::Closed {
        // QEMU is ending: its last output comes before that.
        machine.wait_end(STOP_MAX).context("QEMU closed the console and still runs")?;
    }
    if let Some(guru) = machine.seen(|event| event.word == "guru").last() {
        return Err(stopped(guru));
    }
    let off = machine.seen(|event| event.word == "off").last().is_some();
    if end == terminal::End::Closed && !off {
        bail!("QEMU ended before the node; its last lines are in {}", machine.log().display());
    }
    if let Some(text) = at_home(&machine.seen(|_event| true)) {
        eprintln!("run: {text}");
    }
    match finished.map(mpsc::Receiver::try_recv) {
        None => {}
        Some(Ok(outcome)) => eprintln!("{}", outcome?),
        Some(Err(_not_yet)) => eprintln!("run: left before the demo answered"),
    }
    eprintln!("run: the serial line is in {}", machine.log().display());
    Ok(())
}

/// The end of a run that does not cut the power at once: with `--keep`, the node is stopped in
/// order, so that its disk is consistent.
fn leave(machine: &mut Machine, args: &Args) -> Result<()> {
    if !args.keep {
        return Ok(());
    }
    eprintln!("run: stopping the node, so that its disk is consistent");
    let mut end = || -> Result<(), polis_qemu::Error> {
        machine.wait_until_text(POWER_BUTTON, STOP_MAX)?;
        machine.qmp.power_button()?;
        machine.wait_for("off", stop_max(args), |_| true)?;
        machine.wait_end(STOP_MAX)?;
        Ok(())
    };
    end().context(
        "the node did not shut down cleanly: with --keep, its next boot is like one after a \
         power cut",
    )
}

/// The serial line on the standard output. `finished` receives the outcome of the
/// deployment, where there is one.
fn stream(
    machine: &mut Machine,
    args: &Args,
    finished: Option<&mpsc::Receiver<Result<String>>>,
) -> Result<()> {
    let deadline = Instant::now() + Duration::from_secs(args.timeout);
    let far = Duration::from_secs(3600);
    let mut ready = false;
    let mut deployed = finished.is_none();
    loop {
        let watched = args.until_ready && !ready;
        let within = match (watched, deployed) {
            (true, _) => deadline.saturating_duration_since(Instant::now()),
            (false, true) => far,
            (false, false) => ASK,
        };
        let printed = machine.wait("the end", within, |line| {
            let is_read = writeln!(io::stdout(), "{}", line.text).is_ok();
            let event = line.event();
            let event = event.filter(|event| ["ready", "guru", "off"].contains(&&*event.word));
            // A script that waits for the status need not read the lines.
            if is_read || args.until_ready { event.map(Some) } else { Some(None) }
        });
        let event = match printed {
            Ok(Some(event)) => event,
            // The reader of the lines has left, as `head` does.
            Ok(None) => return Ok(()),
            // A node that has nothing to say is silent for longer than an hour.
            Err(polis_qemu::Error::Wait {
                outcome: Outcome::Late { .. } | Outcome::Silent { .. },
                ..
            }) if !watched => {
                let outcome = finished.filter(|_| !deployed).map(mpsc::Receiver::try_recv);
                match outcome {
                    Some(Ok(outcome)) => {
                        deployed = true;
                        eprintln!("{}", outcome?);
                        if args.until_ready {
                            return leave(machine, args);
                        }
                    }
                    Some(Err(mpsc::TryRecvError::Disconnected)) => {
                        bail!("the thread that deploys the demo has ended without an answer")
                    }
                    Some(Err(mpsc::TryRecvError::Empty)) | None => {}
                }
                continue;
            }
            Err(error) => return Err(gave_up(missed(args, ready), error.into())),
        };
        match &*event.word {
            "ready" if watched => {
                ready = true;
                if let Some(text) = at_home(&machine.seen(|_event| true)) {
                    eprintln!("run: {text}");
                }
                if deployed {
                    return leave(machine, args);
                }
            }
            "guru" if args.until_ready => return Err(stopped(&event)),
            "off" if args.until_ready => bail!("the machine went off: {}", missed(args, ready)),
            "off" if !event.is("reason", "reboot") => return Ok(()),
            _ => {}
        }
    }
}

/// What a run has not seen that ends too early.
fn missed(args: &Args, ready: bool) -> &'static str {
    match (args.until_ready, ready) {
        (true, false) => "the node did not become ready",
        (true, true) => "the demo did not answer",
        (false, _) => "the machine did not go off in order",
    }
}

/// The failure of a node whose trapdoor opened.
fn stopped(guru: &Event) -> anyhow::Error {
    anyhow!("the node stopped: {guru}")
        .context(host::Help("docs/errors.md explains the code".to_owned()))
}

/// The last time that the node became ready, and how long its boot took: the first
/// since QEMU started, a later one since its own kernel did.
fn at_home(events: &[Event]) -> Option<String> {
    let last = events.iter().rposition(|event| event.word == "ready")?;
    let ready = &events[last];
    let boots = events[..last].iter().filter(|event| event.word == "boot").count();
    let took = match (boots, ready.uptime()) {
        (0 | 1, _) => format!(", {:.1} s after QEMU started", ready.at.as_secs_f64()),
        (boots, Some(uptime)) => {
            format!(", {uptime:.1} s after the kernel of boot {boots} started")
        }
        (boots, None) => format!(" in boot {boots}"),
    };
    Some(format!("{} is ready at {}{took}", ready.text("node"), ready.text("address")))
}

#[cfg(test)]
mod tests {
    use super::super::tests::with;
    use super::*;

    #[test]
    fn a_run_that_ends_too_early_says_what_it_has_not_seen() {
        let said = |options: &[&str], ready| missed(&with(options), ready);
        assert_eq!(said(&["--until-ready"], false), "the node did not become ready");
        assert_eq!(said(&["--until-ready", "--kubernetes"], true), "the demo did not answer");
        // Whether the node was ready is not looked for.
        assert_eq!(said(&["--headless"], false), "the machine did not go off in order");
    }

    #[test]
    fn the_closing_line_counts_from_the_boot_that_it_speaks_of() {
        let event = |at, text| Event::parse(text, Duration::from_secs(at)).unwrap();
        let ready = "POLIS ready node=polis-01 address=10.0.2.15 t=9.100";
        let mut events = vec![
            event(4, "POLIS boot version=1 t=1.000"),
            event(12, ready),
            event(600, "POLIS off reason=reboot t=597.000"),
            event(605, "POLIS boot version=1 t=1.000"),
        ];
        let first = "polis-01 is ready at 10.0.2.15, 12.0 s after QEMU started";
        // Also while a later boot is not ready yet.
        assert_eq!(at_home(&events).as_deref(), Some(first));
        events.push(event(665, ready));
        let second = "polis-01 is ready at 10.0.2.15, 9.1 s after the kernel of boot 2 started";
        assert_eq!(at_home(&events).as_deref(), Some(second));
        assert_eq!(at_home(&events[..1]), None);
    }
}
