//! The command line of a binary with stories.

use std::env;
use std::fs;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use clap::Parser;

use super::queue::Turn;
use super::runner::{Runner, SKIPPED};
use super::select::{Wanted, select};
use super::story::{Skip, Story, Suite, named};
use super::workspace;
use crate::report::{Outcome, Report};
use crate::{ALL, SEED, draws_all, seed};

/// How much less a story beside the others counts than one of them, in steps of `nice`: a
/// third of the weight, so it is slow and not still.
const BESIDE: i32 = 5;

/// Runs stories, each in a process of its own.
#[derive(Debug, Parser)]
struct Args {
    /// Only stories whose names contain one of these.
    filters: Vec<String>,
    /// Every story, also those that a sample would leave out.
    #[arg(long)]
    all: bool,
    /// Print the names of the stories that would run, and run none.
    #[arg(long)]
    list: bool,
    /// How many places there are; the suite says how many for each processor, unless given.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    places: Option<u32>,
    /// Begin no story after so many seconds; those that are left are reported as skipped.
    #[arg(long, value_name = "SECONDS")]
    within: Option<u64>,
    /// Write what came of it to this file, as JSON.
    #[arg(long, value_name = "FILE")]
    report: Option<PathBuf>,
    /// Run this story here, in this process.
    #[arg(long, value_name = "NAME", hide = true)]
    story: Option<String>,
    /// Let others go first.
    #[arg(long, requires = "story", hide = true)]
    beside: bool,
}

pub(crate) fn run(suite: Suite, stories: &[Story]) -> Result<ExitCode> {
    let args = Args::parse();
    if let Some(name) = &args.story {
        return run_one(&named(stories, name)?, args.beside);
    }
    let wanted = Wanted { filters: args.filters, all: args.all || draws_all(), seed: seed()? };
    let (selected, not_drawn) = select(stories, &wanted);
    if args.list {
        for story in &selected {
            println!("{}", story.name());
        }
        return Ok(ExitCode::SUCCESS);
    }
    let processors = thread::available_parallelism().map_or(1, usize::from);
    let places = || u32::try_from(processors).map(|number| number * suite.per_processor);
    let places = args.places.map_or_else(places, Ok)?;
    println!("{}: {} stories, {places} places, {SEED}={}", suite.name, selected.len(), wanted.seed);

    let own = env::current_exe().context("cannot find this program")?;
    let launch = |story: &Story, turn: Turn| {
        // The kernel ends the story when this process dies. `setpriv` belongs to
        // util-linux, which every Debian has, and becomes the story.
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL", "--"]).arg(&own).args(["--story", &story.name()]);
        if turn == Turn::Beside {
            command.arg("--beside");
        }
        command.env(SEED, wanted.seed.to_string());
        if wanted.all {
            command.env(ALL, "1");
        }
        command
    };
    let logs = workspace().join("target/test").join(suite.name);
    // A reader that went away must not end the stories.
    let show = |line: &str| drop(writeln!(io::stdout(), "{line}"));
    let until = args.within.map(|seconds| Instant::now() + Duration::from_secs(seconds));
    // The last time, a failure ends the run.
    let keep = |report: &Report| drop(write(args.report.as_deref(), report));
    let runner = Runner { suite, places, until, logs, launch: &launch, show: &show, keep: &keep };
    let report = Report { not_drawn, ..runner.run(&selected)? };
    print(&suite, &report);
    write(args.report.as_deref(), &report)?;
    Ok(if report.failed() == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Writes the report, if there is a place for it, so that a reader finds a whole one.
fn write(file: Option<&Path>, report: &Report) -> Result<()> {
    let Some(file) = file else { return Ok(()) };
    let new = file.with_extension("new");
    fs::write(&new, serde_json::to_string_pretty(report)?)
        .and_then(|()| fs::rename(&new, file))
        .with_context(|| format!("cannot write {}", file.display()))
}

/// Runs a story in this process.
fn run_one(story: &Story, beside: bool) -> Result<ExitCode> {
    if beside {
        rustix::process::nice(BESIDE).context("cannot be nice")?;
    }
    let Err(error) = (story.run)() else { return Ok(ExitCode::SUCCESS) };
    if let Some(skip) = error.downcast_ref::<Skip>() {
        println!("{skip}");
        return Ok(ExitCode::from(SKIPPED));
    }
    eprintln!("Error: {error:?}");
    Ok(ExitCode::FAILURE)
}

fn print(suite: &Suite, report: &Report) {
    let (passed, failed) = (report.passed(), report.failed());
    let skipped = report.stories.len() - passed - failed;
    let not_drawn = report.not_drawn;
    println!(
        "{}: {passed} passed, {failed} failed, {skipped} skipped, {not_drawn} not drawn",
        suite.name
    );
    for selected in &report.stories {
        if let Outcome::Failed(how) = &selected.outcome {
            println!("{}: failed: {}: {how}", suite.name, selected.name);
        }
    }
}
