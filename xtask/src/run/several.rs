//! `cargo xtask run --nodes N`: a cluster of several nodes on one virtual network.
//!
//! Node 1 founds the cluster; the others get a ticket, are approved by the fingerprints
//! that their serial lines show, and get their roles: all steps of an operator, by
//! `polisctl`.
//!
//! ```text
//! target/run/<name>/   owner.key  polisctl  operator/   network/
//!     1/  disk.img  serial.log  parameters.pb
//!     2/  ...
//! ```
//!
//! In a terminal, the console of node 1 appears in it, and the cluster starts in the
//! background. The terminal's title shows each step, then the state of `cluster status`,
//! polled every few seconds, behind the machines that have ended. Without a terminal, every serial
//! line is printed with the node's number. Meanwhile `cargo xtask link` cuts, delays and repairs
//! links.
//!
//! Invariants:
//! - A machine lives as long as the thread that started it: `polis_qemu` kills it with that
//!   thread.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{BufRead as _, BufReader, Seek as _, SeekFrom};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use polis_qemu::args::FwCfg;
use polis_qemu::fleet::{Milestone, PARAMETERS, Part};
use polis_qemu::line::Line;
use polis_qemu::{Fleet, Image, Operator};

use crate::kubernetes::{self, Deployment};
use crate::link::Server;
use crate::run::{self, Args, STOP_MAX, kept};
use crate::{image, operator, terminal};

/// The default number of voters: the cluster survives the loss of one.
const VOTERS: u8 = 3;

/// Between two reads of the end of a serial log.
const LOOK: Duration = Duration::from_millis(200);

/// Between two queries of `cluster status`.
const ASK_EVERY: Duration = Duration::from_secs(3);
/// Deadline of `cluster status`, after which the state is unknown.
const ASK_MAX: &str = "4s";
/// Characters of a cause in the title, which is one line of a window.
const CAUSE_MAX: usize = 100;

/// Runs the command.
pub(crate) fn run(args: &Args, image: &Image) -> Result<()> {
    let dir = image::workspace().join("target/run").join(&args.name);
    let shown = !args.headless && !args.until_ready && terminal::is_interactive();
    let plan = Plan::prepare(args, image, &dir, shown)?;
    let command = operator::typed(&operator::script(&dir));
    eprintln!(
        "run: booting {} nodes of image {}, logs in {}",
        args.nodes,
        image.version,
        dir.display()
    );
    // Printed before a console covers it.
    eprintln!("run: once the cluster is healthy, in another terminal: {command} cluster status");
    if shown {
        return show(plan, args);
    }
    for number in 1..=usize::from(args.nodes) {
        stream(number, &plan.folder(number).join("serial.log"));
    }
    let mut fleet = plan.fleet()?.reporting(|milestone| eprintln!("run: {}", describe(milestone)));
    let _links = plan.links(&fleet)?;
    plan.raise(&mut fleet, |_console| ())
        .map_err(|error| run::gave_up("the cluster did not become healthy", error))?;
    eprintln!("run: the cluster is healthy\n{}", table(&fleet.milestones()));
    if args.kubernetes {
        eprintln!("{}", plan.deployment(&fleet, run::said).run()?);
    }
    if args.until_ready {
        return if args.keep { stop(&mut fleet, run::stop_max(args)) } else { Ok(()) };
    }
    end(&mut fleet)
}

/// The cluster to start.
struct Plan {
    dir: PathBuf,
    /// The machines, in order; those of a kept run are members already, or are becoming
    /// members.
    machines: Vec<(polis_qemu::Config, Kept)>,
    operator: Operator,
    voters: usize,
    patience: Duration,
}

/// Whether a machine has the disk of an earlier run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kept {
    Yes,
    No,
}

impl Kept {
    /// A disk without parameters, because the last run ended early, counts as absent.
    fn of(args: &Args, folder: &Path) -> Self {
        let begun = kept::disk(args, folder) && folder.join("parameters.pb").exists();
        if begun { Self::Yes } else { Self::No }
    }
}

impl Plan {
    fn prepare(args: &Args, image: &Image, dir: &Path, shown: bool) -> Result<Self> {
        run::make_folder(dir)?;
        // Without the disk of the first node, the cluster is a new one.
        let whole = Kept::of(args, &dir.join("1")) == Kept::Yes;
        if !whole {
            kept::forget(dir)?;
        }
        let mut machines = Vec::new();
        for number in 1..=args.nodes {
            let folder = dir.join(number.to_string());
            let kept = Kept::of(args, &folder);
            if kept == Kept::No && folder.exists() {
                fs::remove_dir_all(&folder)
                    .with_context(|| format!("cannot remove {}", folder.display()))?;
            }
            let mut config = run::machine(args, image, &folder, number)?;
            let parameters = folder.join("parameters.pb");
            if number == 1 {
                run::named_founding(dir, &folder, shown, "node-1")?;
                config.console = shown;
            }
            if parameters.exists() {
                config.fw_cfg = vec![FwCfg { name: PARAMETERS.to_owned(), file: parameters }];
            }
            machines.push((config, kept));
        }
        let (program, config) = operator::install(dir, whole)?;
        Ok(Self {
            dir: dir.to_owned(),
            machines,
            operator: Operator::new(&program, &config, &args.name),
            voters: args.voters.unwrap_or(VOTERS.min(args.nodes)).into(),
            patience: Duration::from_secs(args.timeout),
        })
    }

    fn folder(&self, number: usize) -> PathBuf {
        self.dir.join(number.to_string())
    }

    /// The machines, connected and powered off.
    fn fleet(&self) -> Result<Fleet> {
        let configs = self.machines.iter().map(|(config, _)| config.clone()).collect();
        let key = self.dir.join("owner.key");
        let mut fleet = Fleet::new(&self.dir, configs, self.operator.clone(), &key)?;
        fleet.patience = self.patience;
        Ok(fleet)
    }

    /// The steps of `--kubernetes` with a cluster that is up.
    fn deployment(&self, fleet: &Fleet, report: fn(&str)) -> Deployment {
        let nodes = fleet.nodes.iter().enumerate().map(|(number, node)| kubernetes::Node {
            id: node.id.clone(),
            log: self.folder(number + 1).join("serial.log"),
        });
        let (dir, operator) = (self.dir.clone(), fleet.operator.clone());
        Deployment { dir, operator, nodes: nodes.collect(), report }
    }

    /// Lets `cargo xtask link` cut, delay and repair the links of `fleet`.
    fn links(&self, fleet: &Fleet) -> Result<Server> {
        let nodes = u8::try_from(self.machines.len())?;
        Server::open(&self.dir, fleet.segment.links(), nodes)
    }

    /// Boots all machines, and waits until each has its final role. `first` receives the
    /// console of node 1, if it has one.
    fn raise(&self, fleet: &mut Fleet, first: impl FnOnce(UnixStream)) -> Result<()> {
        let mut console = Some(first);
        let mut lend = |fleet: &mut Fleet| -> Result<()> {
            if let (Some(taken), Some(first)) = (fleet.machine(0)?.take_console(), console.take()) {
                first(taken);
            }
            Ok(())
        };
        let are = |wanted: Kept| -> Vec<usize> {
            let machines = self.machines.iter().enumerate();
            machines.filter(|(_, (_, kept))| *kept == wanted).map(|(number, _)| number).collect()
        };
        let (old, mut new) = (are(Kept::Yes), are(Kept::No));
        let parts = |numbers: &[usize]| -> Vec<(usize, Part)> {
            let part = |number| if number < self.voters { Part::Voter } else { Part::Worker };
            numbers.iter().map(|number| (*number, part(*number))).collect()
        };
        if old.is_empty() {
            new.retain(|number| *number != 0);
            fleet.boot(0)?;
            lend(fleet)?;
            fleet.own()?;
        } else {
            for &number in &old {
                fleet.boot(number)?;
            }
            lend(fleet)?;
            // The last run may have ended before the cluster had an owner; taking ownership
            // again does no harm.
            fleet.own_again()?;
            fleet.let_in(&parts(&old))?;
        }
        fleet.admit(&parts(&new))?;
        Ok(fleet.wait_whole(self.machines.len())?)
    }
}

/// Shows the state of `cluster status` of `fleet` in the terminal's title, followed by the
/// reason why the start of the cluster failed.
fn watch(fleet: &Fleet, failed: Option<&anyhow::Error>, ended: &Ended) -> operator::Watch {
    let ended = ended.clone();
    let operator = fleet.operator.clone();
    let ids: Vec<_> = fleet.nodes.iter().map(|node| node.id.clone()).collect();
    let failed = failed.map(anyhow::Error::to_string);
    operator::Watch::start(
        ASK_EVERY,
        move || operator.document(&["--timeout", ASK_MAX, "cluster", "status"]).ok(),
        move |state| {
            let state = titled(state, &ids, failed.as_deref());
            let texts = ended.texts().into_iter().chain([state]);
            terminal::title(&texts.collect::<Vec<_>>().join("; "));
        },
    )
}

/// A state as a title: nodes by their numbers, followed by the first line of the reason why
/// the start of the cluster failed.
fn titled(state: &str, ids: &[String], failed: Option<&str>) -> String {
    let known = ids.iter().enumerate().filter(|(_, id)| !id.is_empty());
    let state = known.fold(state.to_owned(), |state, (number, id)| {
        state.replace(id, &format!("node {}", number + 1))
    });
    let cause = failed.and_then(|why| why.lines().next());
    let Some(cause) = cause else { return state };
    let cause: String = cause.chars().take(CAUSE_MAX).collect();
    format!("{state}; the start stopped: {cause}")
}

/// The machines that ended while the others ran, a text for each.
#[derive(Clone, Debug, Default)]
struct Ended(Arc<Mutex<Vec<String>>>);

impl Ended {
    fn texts(&self) -> Vec<String> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn add(&self, text: String) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(text);
    }
}

/// Which machines of a fleet have ended.
#[derive(Debug)]
struct Roll {
    gone: BTreeSet<usize>,
    /// Whether each of them went off in order.
    is_clean: bool,
}

impl Roll {
    fn new() -> Self {
        Self { gone: BTreeSet::new(), is_clean: true }
    }

    /// The machines that have ended since the last call, by number, and what to say of each.
    fn call(&mut self, fleet: &mut Fleet) -> Result<Vec<(usize, String)>> {
        let mut new = Vec::new();
        for (number, node) in fleet.nodes.iter_mut().enumerate() {
            let Some(machine) = node.machine.as_mut() else { continue };
            if self.gone.contains(&number) {
                continue;
            }
            let Some(status) = machine.ended()? else { continue };
            let end = End::of(status, &machine.lines());
            self.is_clean &= end == End::Off;
            self.gone.insert(number);
            new.push((number, end.describe(number + 1, &machine.log())));
        }
        Ok(new)
    }
}

/// How a machine ended.
#[derive(Clone, Debug, PartialEq, Eq)]
enum End {
    /// It went off in order.
    Off,
    /// QEMU ended under it.
    Died {
        /// How QEMU ended, in words.
        status: String,
        /// The last line of its serial port.
        last: String,
    },
}

impl End {
    fn of(status: ExitStatus, lines: &[Line]) -> Self {
        let event = lines.iter().filter_map(Line::event).next_back();
        if status.success() && event.is_some_and(|event| event.word == "off") {
            return Self::Off;
        }
        let said = lines.iter().rev().map(|line| line.text.trim()).find(|text| !text.is_empty());
        let last: String = said.unwrap_or("nothing").chars().take(CAUSE_MAX).collect();
        Self::Died { status: status.to_string(), last }
    }

    fn describe(&self, number: usize, log: &Path) -> String {
        match self {
            Self::Off => format!("node {number} is off"),
            Self::Died { status, last } => format!(
                "node {number} ended by itself ({status}); its last line: {last} ({})",
                operator::shortest(log)
            ),
        }
    }
}

/// The console of node 1 in this terminal; the cluster starts meanwhile.
fn show(plan: Plan, args: &Args) -> Result<()> {
    let (keep, with_kubernetes, stop_max) = (args.keep, args.kubernetes, run::stop_max(args));
    let machines = usize::from(args.nodes);
    let (lend, lent) = mpsc::sync_channel(1);
    let (leave, left) = mpsc::sync_channel::<()>(1);
    let others = Arc::new(AtomicUsize::new(machines - 1));
    let ended = Ended::default();
    let (counted, noted) = (Arc::clone(&others), ended.clone());
    // The machines belong to this thread.
    let raising = thread::spawn(move || -> Result<String> {
        let mut fleet = plan.fleet()?.reporting(|milestone| terminal::title(&describe(milestone)));
        let _links = plan.links(&fleet)?;
        // If node 1 did not start, the console is missing and its sender is dropped.
        let raised = plan.raise(&mut fleet, move |console| drop(lend.send(console)));
        let deployed = match (with_kubernetes, &raised) {
            (true, Ok(())) => Some(plan.deployment(&fleet, terminal::title).run()),
            _ => None,
        };
        let _watch = watch(&fleet, raised.as_ref().err(), &noted);
        let text = table(&fleet.milestones());
        let deployed = deployed.transpose();
        let text = raised
            .and(deployed)
            .map(|answer| format!("run: every node started\n{text}{}", answer.unwrap_or_default()));
        // An error cannot be printed while the console has the terminal.
        let started = fleet.nodes.iter().skip(1).filter(|node| node.machine.is_some()).count();
        counted.store(started, Ordering::Relaxed);
        let mut roll = Roll::new();
        while left.recv_timeout(LOOK) == Err(RecvTimeoutError::Timeout) {
            for (number, text) in roll.call(&mut fleet)? {
                // The console of the first one closes with it.
                counted.fetch_sub(usize::from(number > 0), Ordering::Relaxed);
                terminal::title(&text);
                noted.add(text);
            }
        }
        if keep {
            stop(&mut fleet, stop_max)?;
        }
        text
    });
    if let Ok(console) = lent.recv() {
        eprintln!(
            "run: this terminal becomes the console of node 1, its title shows the state of the \
             cluster; {}",
            terminal::hint(machines)
        );
        terminal::lend(&console, &others)?;
    }
    drop(leave);
    terminal::no_title();
    for text in ended.texts() {
        eprintln!("run: {text}");
    }
    if !keep && !raising.is_finished() {
        // Leaving the console stops the wait for the cluster.
        thread::sleep(LOOK);
        if !raising.is_finished() {
            eprintln!("run: left before the cluster was healthy");
            return Ok(());
        }
    }
    match raising.join() {
        Ok(outcome) => eprintln!("{}", outcome?),
        Err(_panic) => bail!("the thread that starts the cluster panicked"),
    }
    Ok(())
}

/// Stops every machine in order, within this time, so that its disk is consistent. A failure to
/// stop one does not affect the others.
fn stop(fleet: &mut Fleet, within: Duration) -> Result<()> {
    eprintln!("run: stopping the nodes, so that their disks are consistent");
    let on = fleet.nodes.iter_mut().enumerate();
    let machines: Vec<_> = on
        .filter_map(|(number, node)| {
            let machine = node.machine.as_mut()?;
            // A machine whose QEMU has ended is reported below.
            let _pressed = machine.qmp.power_button();
            Some((number + 1, machine))
        })
        .collect();
    let mut failed = Vec::new();
    for (number, machine) in machines {
        let ended = machine.wait_for("off", within, |_| true);
        if let Err(error) = ended.and_then(|_off| machine.wait_end(STOP_MAX)) {
            eprintln!("run: node {number} did not shut down cleanly: {error}");
            failed.push(number.to_string());
        }
    }
    ensure!(
        failed.is_empty(),
        "node {} did not shut down cleanly: with --keep, its next boot is like one after a power \
         cut",
        failed.join(", ")
    );
    Ok(())
}

/// Waits until every machine has ended, and says at once which has.
fn end(fleet: &mut Fleet) -> Result<()> {
    let all = fleet.nodes.iter().filter(|node| node.machine.is_some()).count();
    let mut roll = Roll::new();
    while roll.gone.len() < all {
        for (_, text) in roll.call(fleet)? {
            eprintln!("run: {text}; {} of {all} machines still run", all - roll.gone.len());
        }
        thread::sleep(LOOK);
    }
    ensure!(roll.is_clean, "not every machine went off in order");
    Ok(())
}

/// Prints new lines of a serial log, with the node's number.
fn stream(number: usize, log: &Path) {
    let log = log.to_owned();
    let before = fs::metadata(&log).map_or(0, |log| log.len());
    thread::spawn(move || {
        let mut file = loop {
            match File::open(&log) {
                Ok(file) => break file,
                Err(_not_yet) => thread::sleep(LOOK),
            }
        };
        let Ok(_at) = file.seek(SeekFrom::Start(before)) else { return };
        let mut reader = BufReader::new(file);
        let mut line = String::new();
        loop {
            match reader.read_line(&mut line) {
                Ok(_) if line.ends_with('\n') => {
                    print!("{number} |{line}");
                    line.clear();
                }
                // An incomplete line is continued at the next read.
                Ok(_) => thread::sleep(LOOK),
                Err(_) => line.clear(),
            }
        }
    });
}

/// A milestone as a line.
pub(crate) fn describe(milestone: &Milestone) -> String {
    let Milestone { node, what, at } = milestone;
    format!("{:6.1} s  node {} {what}", at.as_secs_f64(), node + 1)
}

/// The milestones by node, each with its duration: of the first node since the start of the
/// fleet or its last milestone, of the others at the earliest since the first node was
/// done, which they wait for.
pub(crate) fn steps(milestones: &[Milestone]) -> Vec<(&Milestone, Duration)> {
    let first = milestones.iter().rfind(|milestone| milestone.node == 0);
    let opened = first.map_or(Duration::ZERO, |last| last.at);
    let mut ended = BTreeMap::from([(0, Duration::ZERO)]);
    let mut steps: Vec<_> = milestones
        .iter()
        .map(|milestone| {
            let before = ended.insert(milestone.node, milestone.at).unwrap_or(opened);
            (milestone, milestone.at.saturating_sub(before))
        })
        .collect();
    // In the order of time within a node.
    steps.sort_by_key(|(milestone, _)| milestone.node);
    steps
}

/// The milestones of each node, with time and duration.
fn table(milestones: &[Milestone]) -> String {
    let mut text = String::from("  node  what                      at      took\n");
    for (Milestone { node, what, at }, took) in steps(milestones) {
        let [at, took] = [*at, took].map(|time| time.as_secs_f64());
        text.push_str(&format!("  {:>4}  {what:<20} {at:>7.1} {took:>8.1}\n", node + 1));
    }
    text
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt as _;

    use super::*;

    #[test]
    fn a_machine_that_ended_by_itself_is_named_with_its_last_line() {
        let line = |text: &str| Line { at: Duration::from_secs(1), text: text.to_owned() };
        let log = Path::new("/run/3/serial.log");
        let (killed, done) = (ExitStatus::from_raw(9), ExitStatus::from_raw(0));
        let running = [line("POLIS ready node=x t=9"), line("I root: all is well\r"), line("")];
        let end = End::of(killed, &running);
        let said = end.describe(3, log);
        assert!(said.starts_with("node 3 ended by itself (signal: 9"), "{said}");
        assert!(said.contains("its last line: I root: all is well (/run/3/"), "{said}");
        // A guest that is cut off has not gone off in order, however QEMU ended.
        assert!(matches!(End::of(done, &running), End::Died { .. }));
        let off =
            [line("POLIS ready node=x t=9"), line("POLIS off t=12"), line("reboot: Power down")];
        assert_eq!(End::of(done, &off), End::Off);
        assert_eq!(End::Off.describe(2, log), "node 2 is off");
        assert!(End::of(killed, &[]).describe(1, log).contains("its last line: nothing"));
    }

    #[test]
    fn a_title_names_nodes_by_their_numbers_and_why_the_start_stopped() {
        let ids = ["polis-aa".to_owned(), "polis-bb".to_owned(), String::new()];
        let state = "polis-bb is late, and 1 more";
        assert_eq!(titled(state, &ids, None), "node 2 is late, and 1 more");
        let title = titled(state, &ids, Some("waited for node 3\nits last lines"));
        assert_eq!(title, "node 2 is late, and 1 more; the start stopped: waited for node 3");
    }

    #[test]
    fn the_table_says_how_long_each_step_took() {
        let milestone = |node, what, at| Milestone { node, what, at: Duration::from_secs(at) };
        let all = [
            milestone(0, "founded the cluster", 20),
            milestone(0, "has an owner", 22),
            milestone(1, "asked for approval", 40),
            milestone(2, "asked for approval", 41),
            milestone(1, "was approved", 43),
        ];
        insta::assert_snapshot!(table(&all), @r"
          node  what                      at      took
             1  founded the cluster     20.0     20.0
             1  has an owner            22.0      2.0
             2  asked for approval      40.0     18.0
             2  was approved            43.0      3.0
             3  asked for approval      41.0     19.0
        ");
    }
}
