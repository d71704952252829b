//! The report of a run: the parts, their stories, and the final output.

use std::fs;
use std::io::IsTerminal as _;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow};
use polis_tests::Outcome;
use serde_json::{Value, json};

use super::steps::{Counts, counted, report_of, shown};
use crate::host::Help;
use crate::run;

/// How many of the slowest stories are printed.
const SLOWEST: usize = 10;

/// The result of a step.
#[derive(Debug)]
struct Step {
    name: &'static str,
    took: Duration,
    /// Why it failed; `None` if it passed.
    failure: Option<String>,
    counts: Counts,
}

/// Everything so far.
#[derive(Default)]
pub(super) struct Report {
    steps: Vec<Step>,
    /// The result of each story, and its part.
    stories: Vec<(&'static str, polis_tests::StoryResult)>,
    skips: Vec<String>,
    /// The number of stories that the samples left out.
    not_drawn: usize,
    /// Whether the image was built; `None` before the first part that needs it.
    image: Option<bool>,
}

impl Report {
    /// Records a part that this host cannot run.
    pub(super) fn skip(&mut self, what: &str) {
        self.skips.push(what.to_owned());
    }

    /// Builds the image, at the first call.
    pub(super) fn image(&mut self) -> bool {
        if let Some(built) = self.image {
            return built;
        }
        let build = || run::built_image(polis_image::Kind::Development).map(drop);
        let built = self.call("image", build);
        self.image = Some(built);
        built
    }

    /// Runs a command that reports only by its exit status.
    pub(super) fn step(&mut self, name: &'static str, command: &mut Command) {
        println!("test: {name}: {}", shown(command));
        let start = Instant::now();
        let failure = match command.status() {
            Ok(status) if status.success() => None,
            Ok(status) => Some(status.to_string()),
            Err(error) => Some(format!("cannot be started: {error}")),
        };
        self.push(name, start, failure, Counts::default());
    }

    /// Runs a part that is a function of this program; whether it passed.
    pub(super) fn call(&mut self, name: &'static str, part: impl FnOnce() -> Result<()>) -> bool {
        println!("test: {name}");
        let start = Instant::now();
        let failure = part().err().map(|error| format!("{error:#}"));
        let passed = failure.is_none();
        self.push(name, start, failure, Counts::default());
        passed
    }

    /// Runs a command that runs tests, shows what it prints and counts them.
    pub(super) fn tests(&mut self, name: &'static str, command: &mut Command) {
        println!("test: {name}: {}", shown(command));
        let start = Instant::now();
        if std::io::stdout().is_terminal() {
            // Colours are lost with the pipes below.
            command.env("CARGO_TERM_COLOR", "always");
        }
        let (failure, counts) = match counted(command) {
            Ok((failure, counts)) => (failure, counts),
            Err(error) => (Some(format!("{error:#}")), Counts::default()),
        };
        self.push(name, start, failure, counts);
    }

    /// Runs a binary with stories, and reads the report that it leaves.
    pub(super) fn stories(&mut self, name: &'static str, command: &mut Command) {
        println!("test: {name}: {}", shown(command));
        let start = Instant::now();
        let file = report_of(name);
        // A report of an earlier run would be taken for this one's.
        let _absent = fs::remove_file(&file);
        let status = command.status();
        let parsed = read(&file);
        let failure = match (&status, &parsed) {
            (Err(error), _) => Some(format!("cannot be started: {error}")),
            (Ok(_), Ok(report)) if report.failed() > 0 => {
                Some(format!("{} of {} stories", report.failed(), report.stories.len()))
            }
            (Ok(status), _) if !status.success() => Some(status.to_string()),
            (Ok(_), Err(error)) => Some(format!("{error:#}")),
            (Ok(_), Ok(_)) => None,
        };
        let parsed = parsed.unwrap_or_default();
        self.push(
            name,
            start,
            failure,
            Counts { passed: parsed.passed(), failed: parsed.failed() },
        );
        self.not_drawn += parsed.not_drawn;
        for story in parsed.stories {
            if let Outcome::Skipped(reason) = &story.outcome {
                self.skips.push(format!("{}: {reason}", story.name));
            }
            self.stories.push((name, story));
        }
    }

    fn push(
        &mut self,
        name: &'static str,
        start: Instant,
        failure: Option<String>,
        counts: Counts,
    ) {
        self.steps.push(Step { name, took: start.elapsed(), failure, counts });
    }

    /// Prints the slowest stories, the times, the skips, every failure, and the closing
    /// line; writes all durations to `durations.json` in `folder`.
    pub(super) fn close(mut self, folder: &Path) -> Result<()> {
        self.sort();
        let file = folder.join("durations.json");
        fs::create_dir_all(folder)
            .and_then(|()| fs::write(&file, format!("{:#}\n", self.durations())))
            .with_context(|| format!("cannot write {}", file.display()))?;
        self.lines().iter().for_each(|line| println!("{line}"));
        let failed = self.failures();
        if failed.is_empty() {
            return Ok(());
        }
        let help = "`cargo xtask test PART`, or a part of a test's name, runs only these again";
        let text =
            format!("{} of {} parts failed: {}", failed.len(), self.steps.len(), failed.join("; "));
        Err(anyhow!(text).context(Help(help.to_owned())))
    }

    /// The slowest story first.
    fn sort(&mut self) {
        self.stories.sort_by(|(_, one), (_, other)| other.seconds.total_cmp(&one.seconds));
    }

    fn failures(&self) -> Vec<String> {
        let failed = |step: &Step| Some(format!("{}: {}", step.name, step.failure.as_ref()?));
        self.steps.iter().filter_map(failed).collect()
    }

    /// The final output.
    fn lines(&self) -> Vec<String> {
        let mut lines = vec![String::new()];
        for (part, story) in self.stories.iter().take(SLOWEST) {
            let (took, processors) = (story.seconds, story.processor_seconds);
            let name = &story.name;
            lines.push(format!(
                "slow         {took:>8.1} s  {part} {name} ({processors:.1} s of a processor)"
            ));
        }
        let mut total = Counts::default();
        for Step { name, took, failure, counts } in &self.steps {
            total.passed += counts.passed;
            total.failed += counts.failed;
            let result = failure.as_ref().map_or("ok", |_failed| "FAILED");
            lines.push(format!("{name:<12} {:>8.1} s  {result}", took.as_secs_f64()));
        }
        lines.extend(self.skips.iter().map(|skip| format!("skipped      {skip}")));
        if self.not_drawn > 0 {
            let not_drawn = self.not_drawn;
            lines.push(format!("not drawn    {not_drawn} stories; `--all` runs them"));
        }
        for (part, story) in &self.stories {
            match &story.outcome {
                Outcome::Flaky => lines.push(format!("flaky        {part}: {}", story.name)),
                Outcome::Failed(how) => {
                    lines.push(format!("failed       {part}: {}: {how}", story.name));
                }
                Outcome::Passed | Outcome::Skipped(_) => {}
            }
        }
        lines.extend(self.failures().iter().map(|failure| format!("failed       {failure}")));
        lines.push(format!("{} passed, {} failed", total.passed, total.failed));
        lines
    }

    /// Each part and each story with its seconds, the slowest story first.
    fn durations(&self) -> Value {
        let parts = self.steps.iter().map(|step| {
            let failed = step.failure.is_some();
            json!({ "name": step.name, "seconds": step.took.as_secs_f64(), "failed": failed })
        });
        let stories = self.stories.iter().map(|(part, story)| {
            json!({
                "part": part,
                "name": story.name,
                "seconds": story.seconds,
                "processor_seconds": story.processor_seconds,
                "tries": story.tries,
                "outcome": story.outcome,
            })
        });
        json!({ "parts": parts.collect::<Vec<_>>(), "stories": stories.collect::<Vec<_>>() })
    }
}

fn read(file: &Path) -> Result<polis_tests::Report> {
    let text = fs::read(file).with_context(|| format!("no report in {}", file.display()))?;
    serde_json::from_slice(&text).with_context(|| format!("cannot read {}", file.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn story(name: &str, seconds: f64, outcome: Outcome) -> polis_tests::StoryResult {
        let name = name.to_owned();
        polis_tests::StoryResult { name, outcome, seconds, processor_seconds: 1.0, tries: 1 }
    }

    #[test]
    fn the_end_lists_the_slowest_what_was_skipped_and_every_failure() {
        let mut report = Report::default();
        let counts = Counts { passed: 12, failed: 1 };
        report.push("e2e", Instant::now(), Some("1 of 13 stories".to_owned()), counts);
        report.skip("hardware::igb: no igb");
        report.not_drawn = 13;
        for number in 0..11_u8 {
            let parsed = story(&format!("a::{number}"), f64::from(number), Outcome::Passed);
            report.stories.push(("e2e", parsed));
        }
        report.stories.push(("e2e", story("b::sad", 99.0, Outcome::Failed("late".to_owned()))));
        report.stories.push(("e2e", story("b::odd", 98.0, Outcome::Flaky)));
        report.sort();
        let lines = report.lines();
        assert!(lines[1].ends_with("99.0 s  e2e b::sad (1.0 s of a processor)"), "{lines:#?}");
        assert_eq!(lines.iter().filter(|line| line.starts_with("slow")).count(), SLOWEST);
        for wanted in [
            "skipped      hardware::igb: no igb",
            "not drawn    13 stories; `--all` runs them",
            "flaky        e2e: b::odd",
            "failed       e2e: b::sad: late",
            "failed       e2e: 1 of 13 stories",
        ] {
            assert!(lines.iter().any(|line| line == wanted), "{wanted}: {lines:#?}");
        }
        assert_eq!(lines.last().unwrap(), "12 passed, 1 failed");
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("new");
        assert!(report.close(&folder).is_err());
        let written = fs::read_to_string(folder.join("durations.json")).unwrap();
        let written: Value = serde_json::from_str(&written).unwrap();
        assert_eq!(written["stories"].as_array().unwrap().len(), 13);
        assert_eq!(written["stories"][0]["outcome"]["failed"], "late");
        assert_eq!(written["parts"][0]["failed"], true);
    }

    #[test]
    fn a_binary_with_stories_that_leaves_no_report_has_failed() {
        let error = read(Path::new("/nonexistent/e2e.json")).unwrap_err();
        assert!(error.to_string().contains("no report"), "{error}");
    }
}
