//! `cargo xtask test`: formatting, lints, and every test, the last in QEMU.
//!
//! All parts run, whatever the ones before said, so one run lists every
//! failure. The image is built once, before the first part that needs it.
//!
//! What cannot run on a host says so: a tool that is not installed here, a
//! device that its QEMU does not have.

use std::collections::BTreeMap;
use std::env;
use std::fs;
use std::io::{BufRead, BufReader, IsTerminal as _, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use clap::ValueEnum as _;
use polis_image::Kind;

use crate::{host, image, run, trees};

/// Where stories keep their logs, a folder each. A story that could not run
/// leaves a file `skipped` there with the reason.
const STORIES: &str = "target/e2e";

/// The same for the tests with a real etcd.
const ETCD_STORIES: &str = "target/etcd";

/// The stories of several machines each; `.config/nextest.toml` gives them weights.
const CLUSTERS: [&str; 5] = ["three::", "outage::", "newcomer::", "replaced::", "disaster::"];

/// etcd of the payload, for the tests that drive a real one on the host.
const ETCD: &str = "target/payload/root/usr/bin/etcd";

/// Arguments of `cargo xtask test`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Parts to run (lint, unit, tpm, image, etcd, e2e), all if none is named; and
    /// last, if only some tests are wanted, what their names contain.
    #[arg(value_name = "PART|FILTER", value_parser = word)]
    words: Vec<String>,
}

/// An empty word would be a filter that lets everything through.
fn word(text: &str) -> Result<String, &'static str> {
    if text.is_empty() { Err("a part or a filter is wanted") } else { Ok(text.to_owned()) }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Part {
    /// Formatting, lints, licences.
    Lint,
    /// Tests without an image: seconds.
    Unit,
    /// Tests with an emulated TPM, on the host.
    Tpm,
    /// The image, built twice: the same inputs must give the same bytes.
    Image,
    /// Tests with a real etcd, on the host.
    Etcd,
    /// Stories of whole machines in QEMU: minutes.
    E2e,
}

impl Part {
    const ALL: [Self; 6] = [Self::Lint, Self::Unit, Self::Tpm, Self::Image, Self::Etcd, Self::E2e];

    fn name(self) -> String {
        self.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
    }

    /// Whether it has tests whose names a filter can be compared with.
    fn has_tests(self) -> bool {
        match self {
            Self::Lint | Self::Image => false,
            Self::Unit | Self::Tpm | Self::Etcd | Self::E2e => true,
        }
    }
}

/// What is to be run.
#[derive(Debug, PartialEq, Eq)]
struct Wanted {
    parts: Vec<Part>,
    filter: Option<String>,
}

impl Wanted {
    /// Reads the words of a command line: parts, then at most one filter.
    fn read(words: &[String]) -> Result<Self, String> {
        let all = Part::ALL.map(Part::name).join(", ");
        let parts: Vec<Part> = words
            .iter()
            .map_while(|word| Part::ALL.into_iter().find(|part| part.name() == *word))
            .collect();
        let (first, filter) = match &words[parts.len()..] {
            [] => (parts.is_empty(), None),
            [word] if parts.is_empty() => {
                return Err(format!("there is no part `{word}`; the parts are {all}"));
            }
            [filter] => (false, Some(filter.clone())),
            [filter, more, ..] => {
                return Err(format!(
                    "`{more}` comes after the filter `{filter}`: the parts come first ({all}), \
                     then one filter"
                ));
            }
        };
        if let (Some(filter), Some(part)) = (&filter, parts.iter().find(|part| !part.has_tests())) {
            let part = part.name();
            return Err(format!(
                "`{filter}` would be a filter, and `{part}` has no tests to filter"
            ));
        }
        Ok(Self { parts: if first { Part::ALL.to_vec() } else { parts }, filter })
    }
}

/// What a step came to.
#[derive(Debug)]
struct Outcome {
    name: &'static str,
    took: Duration,
    /// Why it failed; nothing if it did not.
    failure: Option<String>,
    counts: Counts,
}

/// Tests that ran. A build error counts none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Counts {
    passed: usize,
    failed: usize,
}

/// Runs the command.
pub(crate) fn run(args: Args) -> Result<()> {
    let Wanted { parts, filter } = Wanted::read(&args.words).map_err(host::Usage)?;
    let filter = filter.as_deref();
    let wanted = |part| parts.contains(&part);
    let mut needs = vec![host::BUILD];
    if wanted(Part::Image) || wanted(Part::Etcd) || wanted(Part::E2e) {
        needs.extend([host::PAYLOAD, run::QEMU]);
    }
    if wanted(Part::Tpm) || wanted(Part::E2e) {
        needs.push(host::TPM);
    }
    host::require(&needs)?;
    let mut report = Report::default();
    let runner = Runner::find();
    for part in Part::ALL.into_iter().filter(|part| wanted(*part)) {
        match part {
            Part::Lint => lint(&mut report),
            Part::Unit => report.tests("unit", &mut runner.quick(filter)),
            Part::Tpm => {
                report.tests("tpm", &mut runner.binary("tpm", filter));
            }
            Part::Image => {
                if report.image() {
                    // In this process: cargo may have put another program in the place of this
                    // one since it was started.
                    report.call("two images", || image::verify(Kind::Development));
                }
            }
            Part::Etcd => {
                if report.image() {
                    let folder = emptied(ETCD_STORIES)?;
                    let mut command = runner.binary("etcd", filter);
                    report.tests("etcd", command.env("POLIS_ETCD", image::workspace().join(ETCD)));
                    report.skips.extend(skipped_stories(&folder));
                }
            }
            Part::E2e => {
                if report.image() {
                    stories(&mut report, &runner, filter)?;
                }
            }
        }
    }
    report.close()
}

fn lint(report: &mut Report) {
    report.step("formatting", cargo().args(["fmt", "--all", "--check"]));
    let lints = ["clippy", "--workspace", "--all-targets", "--quiet", "--", "-D", "warnings"];
    report.step("lints", cargo().args(lints));
    report.call("crates", trees::check);
    let mut gallery = cargo();
    gallery.args(["run", "--quiet", "--package", "xtask", "--", "gallery", "--check"]);
    report.step("gallery", &mut gallery);
    if host::find("cargo-deny").is_some() || in_cargo_home("cargo-deny") {
        // Advisories come from a database on the network, which a build must not need.
        let checks = ["check", "bans", "licenses", "sources"];
        report.step("licences", cargo().args(["deny", "--log-level", "warn"]).args(checks));
    } else {
        report.skips.push("licences: cargo-deny is not installed on this host".to_owned());
    }
}

fn stories(report: &mut Report, runner: &Runner, filter: Option<&str>) -> Result<()> {
    let folder = &emptied(STORIES)?;
    if let Some((major, minor)) = polis_qemu::host::version() {
        let accelerator = polis_qemu::host::accelerator(polis_qemu::host::Wish::Auto, 1);
        println!("test: QEMU {major}.{minor}, {accelerator}; logs go to {STORIES}");
    }
    let images = match env::var_os("POLIS_IMAGE_DIR") {
        Some(folder) => std::path::absolute(folder).context("cannot tell the current folder")?,
        None => image::folder(Kind::Development),
    };
    for (name, mut command) in runner.stories(filter) {
        command.env("POLIS_IMAGE_DIR", &images);
        // A story fails with a sentence and the guest's last lines; frames of the
        // test runner would only bury them.
        command.env("RUST_LIB_BACKTRACE", "0");
        report.tests(name, &mut command);
    }
    report.skips.extend(skipped_stories(folder));
    Ok(())
}

/// A folder of stories, without what an earlier run left there.
fn emptied(name: &str) -> Result<PathBuf> {
    let folder = image::workspace().join(name);
    if folder.exists() {
        fs::remove_dir_all(&folder).with_context(|| format!("cannot empty {name}"))?;
    }
    Ok(folder)
}

/// A line for each story that said that it cannot run here.
fn skipped_stories(folder: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    let mut skips: BTreeMap<String, String> = BTreeMap::new();
    for entry in entries.flatten() {
        if let Ok(reason) = fs::read_to_string(entry.path().join("skipped")) {
            skips.insert(entry.file_name().display().to_string(), reason.trim().to_owned());
        }
    }
    skips.into_iter().map(|(story, reason)| format!("{story}: {reason}")).collect()
}

fn cargo() -> Command {
    image::cargo(&image::workspace())
}

/// Where `cargo install` puts programs, which need not be on the path.
fn in_cargo_home(program: &str) -> bool {
    let home = env::var_os("CARGO_HOME").map(PathBuf::from);
    let home = home.or_else(|| Some(Path::new(&env::var_os("HOME")?).join(".cargo")));
    home.is_some_and(|home| home.join("bin").join(program).is_file())
}

/// Which program runs tests.
#[derive(Clone, Copy, Debug)]
enum Runner {
    /// A process a test, and a deadline for each.
    Nextest,
    /// Cargo's own: everywhere, and good enough.
    Cargo,
}

impl Runner {
    fn find() -> Self {
        if host::find("cargo-nextest").is_some() || in_cargo_home("cargo-nextest") {
            Self::Nextest
        } else {
            println!("test: cargo-nextest is not installed; `cargo test` does its work");
            Self::Cargo
        }
    }

    /// Everything that needs no image.
    fn quick(self, filter: Option<&str>) -> Command {
        let mut command = cargo();
        match self {
            Self::Nextest => command.args(["nextest", "run", "--workspace", "--no-tests=pass"]),
            Self::Cargo => {
                command.args(["test", "--workspace", "--lib", "--bins", "--no-fail-fast"])
            }
        };
        command.args(filter);
        command
    }

    /// One of the binaries in `tests/`, which is also the name of its profile.
    fn binary(self, name: &str, filter: Option<&str>) -> Command {
        match self {
            Self::Nextest => {
                let mut command = cargo();
                command.args(["nextest", "run", "--package", "polis-tests", "--no-tests=pass"]);
                command.args(["--test", name, "--profile", name]).args(filter);
                command
            }
            Self::Cargo => {
                // As in `.config/nextest.toml`: a machine keeps a processor busy.
                let threads = thread::available_parallelism().map_or(1, usize::from);
                let mut command = libtest(name, threads);
                command.args(filter);
                command
            }
        }
    }

    /// The stories of whole machines. Cargo's own runner knows no weights, so those
    /// of several machines get a turn of their own, one at a time.
    fn stories(self, filter: Option<&str>) -> Vec<(&'static str, Command)> {
        match (self, filter) {
            (Self::Nextest, _) | (Self::Cargo, Some(_)) => {
                vec![("e2e", self.binary("e2e", filter))]
            }
            (Self::Cargo, None) => {
                let mut clusters = libtest("e2e", 1);
                clusters.args(CLUSTERS);
                let mut rest = self.binary("e2e", None);
                rest.args(CLUSTERS.iter().flat_map(|name| ["--skip", name]));
                vec![("clusters", clusters), ("e2e", rest)]
            }
        }
    }
}

/// Cargo's own runner of a binary in `tests/`.
fn libtest(name: &str, threads: usize) -> Command {
    let mut command = cargo();
    command.args(["test", "--package", "polis-tests", "--test", name, "--"]);
    command.arg(format!("--test-threads={threads}"));
    command
}

#[derive(Default)]
struct Report {
    outcomes: Vec<Outcome>,
    skips: Vec<String>,
    /// Whether the image is there; unknown before the first part that needs it.
    image: Option<bool>,
}

impl Report {
    /// Builds the image, at the first call.
    fn image(&mut self) -> bool {
        if let Some(built) = self.image {
            return built;
        }
        let start = Instant::now();
        println!("test: image");
        let failure = run::built_image(Kind::Development).err().map(|error| format!("{error:#}"));
        let built = failure.is_none();
        self.push("image", start, failure, Counts::default());
        self.image = Some(built);
        built
    }

    /// Runs a command that tells by its status alone.
    fn step(&mut self, name: &'static str, command: &mut Command) {
        println!("test: {name}: {}", shown(command));
        let start = Instant::now();
        let failure = match command.status() {
            Ok(status) if status.success() => None,
            Ok(status) => Some(status.to_string()),
            Err(error) => Some(format!("cannot be started: {error}")),
        };
        self.push(name, start, failure, Counts::default());
    }

    /// Runs a part that is a function of this program.
    fn call(&mut self, name: &'static str, part: impl FnOnce() -> Result<()>) {
        println!("test: {name}");
        let start = Instant::now();
        let failure = part().err().map(|error| format!("{error:#}"));
        self.push(name, start, failure, Counts::default());
    }

    /// Runs a command that runs tests, shows what it prints and counts them.
    fn tests(&mut self, name: &'static str, command: &mut Command) {
        println!("test: {name}: {}", shown(command));
        let start = Instant::now();
        if std::io::stdout().is_terminal() {
            // The pipes below would make it plain.
            command.env("CARGO_TERM_COLOR", "always");
        }
        let (failure, counts) = match counted(command) {
            Ok((None, counts)) => (None, counts),
            Ok((Some(failure), counts)) => (Some(failure), counts),
            Err(error) => (Some(format!("{error:#}")), Counts::default()),
        };
        self.push(name, start, failure, counts);
    }

    fn push(
        &mut self,
        name: &'static str,
        start: Instant,
        failure: Option<String>,
        counts: Counts,
    ) {
        self.outcomes.push(Outcome { name, took: start.elapsed(), failure, counts });
    }

    /// Prints the times, the skips, every failure, and the closing line.
    fn close(&self) -> Result<()> {
        println!();
        let mut total = Counts::default();
        for Outcome { name, took, failure, counts } in &self.outcomes {
            total.passed += counts.passed;
            total.failed += counts.failed;
            let result = failure.as_ref().map_or("ok", |_failed| "FAILED");
            println!("{name:<12} {:>8.1} s  {result}", took.as_secs_f64());
        }
        for skip in &self.skips {
            println!("skipped      {skip}");
        }
        let failed: Vec<String> = self
            .outcomes
            .iter()
            .filter_map(|outcome| Some(format!("{}: {}", outcome.name, outcome.failure.as_ref()?)))
            .collect();
        for failure in &failed {
            println!("failed       {failure}");
        }
        println!("{} passed, {} failed", total.passed, total.failed);
        if failed.is_empty() {
            return Ok(());
        }
        bail!("{} of {} parts failed: {}", failed.len(), self.outcomes.len(), failed.join("; "))
    }
}

/// The command line, for a person who wants to run it again.
fn shown(command: &Command) -> String {
    let program = Path::new(command.get_program()).file_name().unwrap_or_default().display();
    let mut line = program.to_string();
    for arg in command.get_args() {
        line.push(' ');
        line.push_str(&arg.display().to_string());
    }
    line
}

/// Runs `command` with its output passed on, and adds up what its summaries say.
fn counted(command: &mut Command) -> Result<(Option<String>, Counts)> {
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .context("cannot be started")?;
    let stdout = child.stdout.take().context("has no output")?;
    let stderr = child.stderr.take().context("has no error output")?;
    let errors = thread::spawn(move || tee(stderr, std::io::stderr()));
    let mut counts = tee(stdout, std::io::stdout());
    let status = child.wait().context("cannot be waited for")?;
    let more = errors.join().unwrap_or_default();
    counts.passed += more.passed;
    counts.failed += more.failed;
    let failure = match (status.success(), counts.failed) {
        (true, _) => None,
        (false, 0) => Some(status.to_string()),
        (false, failed) => Some(format!("{failed} of {} tests", failed + counts.passed)),
    };
    Ok((failure, counts))
}

fn tee(from: impl Read, mut to: impl Write) -> Counts {
    let mut counts = Counts::default();
    for line in BufReader::new(from).split(b'\n').map_while(Result::ok) {
        // A reader of ours that went away must not end the tests.
        let _shown = to.write_all(&line).and_then(|()| to.write_all(b"\n"));
        let summary = summary(&String::from_utf8_lossy(&line));
        counts.passed += summary.passed;
        counts.failed += summary.failed;
    }
    counts
}

/// Reads a summary of nextest (`Summary [ 1.2s] 3 tests run: 2 passed (1 slow),
/// 1 failed, 0 skipped`) or of cargo's own runner (`test result: ok. 2 passed; 1
/// failed; ...`). Any other line counts nothing.
fn summary(line: &str) -> Counts {
    let line = polis_qemu::line::clean(line.as_bytes());
    // nextest indents what a failed test printed, summaries of cargo's runner among it.
    if !line.trim_start().starts_with("Summary [") && !line.starts_with("test result:") {
        return Counts::default();
    }
    let words: Vec<&str> = line.split([' ', ',', ';']).filter(|word| !word.is_empty()).collect();
    let before = |what: &[&str]| -> usize {
        let numbers = words.windows(2).filter(|pair| what.contains(&pair[1]));
        numbers.filter_map(|pair| pair[0].parse::<usize>().ok()).sum()
    };
    // A test that ran out of time failed, and nextest counts it apart.
    Counts { passed: before(&["passed"]), failed: before(&["failed", "timed"]) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(words: &str) -> Result<Wanted, String> {
        Wanted::read(&words.split_whitespace().map(str::to_owned).collect::<Vec<_>>())
    }

    #[test]
    fn every_part_that_is_named_is_run_and_nothing_else() {
        assert_eq!(read("").unwrap().parts, Part::ALL);
        let wanted = read("lint unit").unwrap();
        assert_eq!(wanted, Wanted { parts: vec![Part::Lint, Part::Unit], filter: None });
        let wanted = read("unit e2e guru").unwrap();
        assert_eq!(wanted.parts, [Part::Unit, Part::E2e]);
        assert_eq!(wanted.filter.as_deref(), Some("guru"));
    }

    #[test]
    fn words_that_mean_nothing_are_refused_with_what_is_allowed() {
        for (words, told) in [
            ("guru", "the parts are lint, unit, tpm, image, etcd, e2e"),
            ("unit guru e2e", "the parts come first"),
            ("lint guru", "`lint` has no tests to filter"),
        ] {
            let error = read(words).unwrap_err();
            assert!(error.contains(told), "{words}: {error}");
        }
    }

    #[test]
    fn without_weights_a_story_of_several_machines_has_the_host_to_itself() {
        let shown = |runner: Runner, filter| -> Vec<String> {
            runner.stories(filter).iter().map(|(_, command)| super::shown(command)).collect()
        };
        let [clusters, rest] = &shown(Runner::Cargo, None)[..] else { panic!("two turns") };
        assert!(clusters.contains("--test-threads=1 three:: outage::"), "{clusters}");
        assert!(rest.contains("--skip three:: --skip outage::"), "{rest}");
        assert_eq!(shown(Runner::Cargo, Some("guru")).len(), 1);
        assert_eq!(shown(Runner::Nextest, None).len(), 1);
        let weights = include_str!("../../.config/nextest.toml");
        for name in CLUSTERS {
            assert!(weights.contains(name.trim_end_matches("::")), "{name} has no weight");
        }
    }

    #[test]
    fn summaries_of_both_runners_are_counted() {
        let nextest = "     Summary [   0.287s] 31/40 tests run: 28 passed (1 slow), 2 failed, 1 timed out, 9 skipped";
        assert_eq!(summary(nextest), Counts { passed: 28, failed: 3 });
        let coloured = "\u{1b}[32;1m     Summary\u{1b}[0m [   0.3s] \u{1b}[1m2\u{1b}[0m tests run: \u{1b}[1m2\u{1b}[0m passed, 0 skipped";
        assert_eq!(summary(coloured), Counts { passed: 2, failed: 0 });
        let cargo =
            "test result: FAILED. 3 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out";
        assert_eq!(summary(cargo), Counts { passed: 3, failed: 1 });
    }

    #[test]
    fn what_a_test_prints_is_no_summary() {
        assert_eq!(summary("7 passed, 9 failed"), Counts::default());
        assert_eq!(summary("PASS [ 0.1s] x::y::3 passed"), Counts::default());
        let shown = "    test result: FAILED. 0 passed; 1 failed; 0 ignored";
        assert_eq!(summary(shown), Counts::default());
    }

    #[test]
    fn a_story_that_could_not_run_is_listed_with_its_reason() {
        let dir = tempfile::tempdir().unwrap();
        for story in ["b", "a", "ran"] {
            fs::create_dir(dir.path().join(story)).unwrap();
        }
        fs::write(dir.path().join("b/skipped"), "no igb\n").unwrap();
        fs::write(dir.path().join("a/skipped"), "no kvm").unwrap();
        assert_eq!(skipped_stories(dir.path()), ["a: no kvm", "b: no igb"]);
    }

    #[test]
    fn every_cluster_story_has_the_weight_of_a_cluster() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../.config/nextest.toml");
        let names = CLUSTERS.map(|module| module.trim_end_matches("::")).join("|");
        let filter = format!("filter = \"test(/^({names})::/)\"");
        assert!(fs::read_to_string(path).unwrap().lines().any(|line| line == filter), "{filter}");
    }

    #[test]
    fn a_failing_command_is_told_with_its_count() {
        let mut command = Command::new("sh");
        command.args(["-c", "echo 'test result: FAILED. 1 passed; 2 failed;'; exit 101"]);
        let (failure, counts) = counted(&mut command).unwrap();
        assert_eq!(counts, Counts { passed: 1, failed: 2 });
        assert_eq!(failure.as_deref(), Some("2 of 3 tests"));
    }
}
