//! The end-to-end suite as a program: its list of tests, and runs of some of them.
//!
//! A run is several processes at a time, each with a few tests: most tests wait, for a
//! controller or for time to pass. Tests that change what others use (`[Serial]`) follow
//! one by one in a process of their own.

use std::collections::VecDeque;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use polis_tests::{Outcome, StoryResult};
use serde::Deserialize;

/// Tests of one process: its start costs a second, and its report comes at its end.
const BATCH: usize = 8;
/// Longest that a process may take. The suite ends itself then, with a report.
const DEADLINE: &str = "--ginkgo.timeout=2h";
/// How much of a failure goes into the report.
const MESSAGE_MAX: usize = 500;

/// The suite, and the cluster that it tests.
#[derive(Debug)]
pub(super) struct Suite {
    pub(super) program: PathBuf,
    pub(super) kubectl: PathBuf,
    pub(super) kubeconfig: PathBuf,
    /// Logs and reports of the processes.
    pub(super) folder: PathBuf,
    /// How many processes run at a time.
    pub(super) processes: usize,
    /// Whether the suite waits until all nodes and pods of the system are ready.
    pub(super) awaits_nodes: bool,
}

/// A test of the suite.
#[derive(Clone, Debug)]
pub(super) struct Test {
    pub(super) name: String,
    /// It takes minutes.
    pub(super) slow: bool,
}

/// The names of all conformance tests, which the suite itself knows.
///
/// # Errors
///
/// The suite does not start, or lists nothing.
pub(super) fn names(program: &Path) -> Result<Vec<String>> {
    let output = Command::new(program)
        .arg("--list-conformance-tests")
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("cannot start {}", program.display()))?;
    let text = String::from_utf8_lossy(&output.stdout);
    let names: Vec<_> = text.lines().map(str::to_owned).collect();
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success() && !names.is_empty(), "the suite lists no test: {said}");
    Ok(names)
}

impl Suite {
    /// Runs these tests; calls `show` with each result, in batches.
    ///
    /// # Errors
    ///
    /// A process cannot be started, or its folder cannot be made.
    pub(super) fn run(
        &self,
        tests: &[Test],
        show: &(dyn Fn(&StoryResult) + Sync),
    ) -> Result<Vec<StoryResult>> {
        let (batches, serial) = batches(tests);
        let queue = Mutex::new(batches.into_iter().enumerate().collect::<VecDeque<_>>());
        let next = || queue.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
        let work = || -> Result<Vec<StoryResult>> {
            let mut results = Vec::new();
            while let Some((number, batch)) = next() {
                results.extend(self.batch(&number.to_string(), &batch, show)?);
            }
            Ok(results)
        };
        let mut results = Vec::new();
        let parts: Vec<Result<_>> = thread::scope(|scope| {
            let workers: Vec<_> = (0..self.processes).map(|_| scope.spawn(work)).collect();
            let join = |worker: thread::ScopedJoinHandle<'_, _>| {
                worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            };
            workers.into_iter().map(join).collect()
        });
        for part in parts {
            results.extend(part?);
        }
        if !serial.is_empty() {
            results.extend(self.batch("serial", &serial, show)?);
        }
        results.sort_by(|one, other| one.name.cmp(&other.name));
        Ok(results)
    }

    /// One process.
    fn batch(
        &self,
        name: &str,
        tests: &[String],
        show: &(dyn Fn(&StoryResult) + Sync),
    ) -> Result<Vec<StoryResult>> {
        let folder = self.folder.join(name);
        fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
        let (log, report) = (folder.join("log"), folder.join("report.json"));
        let out = File::create(&log).with_context(|| format!("cannot make {}", log.display()))?;
        let mut command = self.command(&folder, &report, tests);
        command.stdin(Stdio::null()).stdout(out.try_clone()?).stderr(out);
        let status = command.status().with_context(|| format!("cannot start {command:?}"))?;
        let text = fs::read(&report).unwrap_or_default();
        let specs = specs(&text).unwrap_or_default();
        let how = format!("it did not run: the suite ended with {status}, see {}", log.display());
        let results: Vec<_> = tests.iter().map(|test| result(test, &specs, &how)).collect();
        results.iter().for_each(show);
        Ok(results)
    }

    fn command(&self, folder: &Path, report: &Path, tests: &[String]) -> Command {
        let mut command = Command::new(&self.program);
        let option = |name: &str, value: &Path| format!("--{name}={}", value.display());
        command
            .current_dir(folder)
            .arg(option("kubeconfig", &self.kubeconfig))
            .arg(option("kubectl-path", &self.kubectl))
            .arg(option("report-dir", folder))
            .arg(option("ginkgo.json-report", report))
            .arg(option("e2e-output-dir", folder))
            .args(["--provider=skeleton", "--disable-log-dump", "--ginkgo.no-color", DEADLINE]);
        if !self.awaits_nodes {
            // Otherwise the suite would count nodes before its first test, and not start
            // without one.
            command.args(["--allowed-not-ready-nodes=-1", "--num-nodes=0"]);
        }
        command.args(tests.iter().map(|test| format!("--ginkgo.focus={}$", escaped(test))));
        command
    }
}

/// The tests of each process, the slow ones first and alone; and those that follow one by
/// one. Tests with similar names wait for the same controller, so each process gets names that
/// are far apart.
fn batches(tests: &[Test]) -> (Vec<Vec<String>>, Vec<String>) {
    let (serial, others): (Vec<_>, Vec<_>) =
        tests.iter().partition(|test| test.name.contains("[Serial]"));
    let (slow, others): (Vec<_>, Vec<_>) = others.into_iter().partition(|test| test.slow);
    let name = |test: &Test| test.name.clone();
    let slow = slow.into_iter().map(|test| vec![name(test)]);
    let count = others.len().div_ceil(BATCH);
    let batch = |first| others.iter().skip(first).step_by(count).copied().map(name).collect();
    let batches = slow.chain((0..count).map(batch)).collect();
    (batches, serial.into_iter().map(name).collect())
}

/// A regular expression for exactly this text.
fn escaped(text: &str) -> String {
    text.chars().fold(String::new(), |mut escaped, letter| {
        if letter.is_ascii_punctuation() {
            escaped.push('\\');
        }
        escaped.push(letter);
        escaped
    })
}

/// A report of Ginkgo, as far as it is read here (`types.Report`).
#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Report {
    spec_reports: Vec<Spec>,
}

/// `types.SpecReport`: a test, or what runs before and after all tests.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Spec {
    container_hierarchy_texts: Option<Vec<String>>,
    leaf_node_type: String,
    leaf_node_text: String,
    state: String,
    /// Nanoseconds.
    #[serde(default)]
    run_time: u64,
    failure: Option<Failure>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
struct Failure {
    message: String,
    location: Location,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
struct Location {
    file_name: String,
    line_number: u32,
}

impl Spec {
    fn name(&self) -> String {
        let containers = self.container_hierarchy_texts.iter().flatten();
        let words: Vec<_> = containers.map(String::as_str).chain([&*self.leaf_node_text]).collect();
        words.join(" ")
    }

    /// The result of the suite, in one line.
    fn message(&self) -> String {
        let Some(Failure { message, location }) = &self.failure else { return String::new() };
        let line = message.split_whitespace().collect::<Vec<_>>().join(" ");
        let line: String = line.chars().take(MESSAGE_MAX).collect();
        let file = location.file_name.rsplit('/').next().unwrap_or_default();
        match file {
            "" => line,
            file => format!("{line} ({file}:{})", location.line_number),
        }
    }
}

fn specs(text: &[u8]) -> Result<Vec<Spec>> {
    let reports: Vec<Report> = serde_json::from_slice(text).context("not a report of Ginkgo")?;
    Ok(reports.into_iter().flat_map(|report| report.spec_reports).collect())
}

/// The result of one test; `absent` says what happened if the report has none.
fn result(test: &str, specs: &[Spec], absent: &str) -> StoryResult {
    let spec = specs.iter().find(|spec| spec.leaf_node_type == "It" && spec.name() == test);
    let outcome = match spec {
        Some(spec) if spec.state == "passed" => Outcome::Passed,
        // The suite reports a test that it did not select in the same way, without a reason.
        Some(spec) if spec.state == "skipped" && !spec.message().is_empty() => {
            Outcome::Skipped(spec.message())
        }
        Some(spec) if spec.state != "skipped" => {
            Outcome::Failed(format!("{}: {}", spec.state, spec.message()))
        }
        _ => {
            let before = specs.iter().find(|spec| {
                spec.leaf_node_type != "It" && !["passed", "skipped"].contains(&&*spec.state)
            });
            Outcome::Failed(before.map_or_else(
                || absent.to_owned(),
                |spec| format!("{} {}: {}", spec.leaf_node_type, spec.state, spec.message()),
            ))
        }
    };
    let took = Duration::from_nanos(spec.map_or(0, |spec| spec.run_time));
    // One process runs many tests, so the processor time of one is not known.
    let (seconds, processor_seconds) = (took.as_secs_f64(), 0.0);
    StoryResult { name: test.to_owned(), outcome, seconds, processor_seconds, tries: 1 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slow_tests_come_first_and_serial_ones_last() {
        let test = |name: &str, slow| Test { name: name.to_owned(), slow };
        let quick = (0..10).map(|number| test(&format!("[sig] {number}"), false));
        let others = [("[sig] a", true), ("[sig] b [Serial]", false), ("[sig] c [Serial]", true)];
        let tests: Vec<_> = quick.chain(others.map(|(name, slow)| test(name, slow))).collect();
        let (batches, serial) = batches(&tests);
        assert_eq!(serial, ["[sig] b [Serial]", "[sig] c [Serial]"]);
        let sizes: Vec<_> = batches.iter().map(Vec::len).collect();
        assert_eq!(sizes, [1, 5, 5]);
        assert_eq!(batches[0], ["[sig] a"]);
        assert_eq!(batches[1][..2], ["[sig] 0", "[sig] 2"]);
    }

    #[test]
    fn a_name_is_no_pattern() {
        assert_eq!(escaped("[a] b/c (d)."), r"\[a\] b\/c \(d\)\.");
    }

    const REPORT: &str = r#"[{"SpecReports": [
        {"ContainerHierarchyTexts": null, "LeafNodeType": "SynchronizedBeforeSuite",
         "LeafNodeText": "", "State": "STATE", "RunTime": 1,
         "Failure": {"Message": "no way", "Location": {"FileName": "/x/e2e.go", "LineNumber": 7}}},
        {"ContainerHierarchyTexts": ["[sig] A"], "LeafNodeType": "It", "LeafNodeText": "works",
         "State": "passed", "RunTime": 1500000000},
        {"ContainerHierarchyTexts": ["[sig] A"], "LeafNodeType": "It", "LeafNodeText": "fails",
         "State": "timedout", "RunTime": 2, "Failure": {"Message": "too\n  late"}},
        {"ContainerHierarchyTexts": ["[sig] A"], "LeafNodeType": "It", "LeafNodeText": "skips",
         "State": "skipped", "Failure": {"Message": "needs two nodes"}},
        {"ContainerHierarchyTexts": ["[sig] A"], "LeafNodeType": "It", "LeafNodeText": "waits",
         "State": "skipped"}]}]"#;

    #[test]
    fn a_test_ends_as_the_report_says_and_fails_without_a_report() {
        let of = |test: &str, state: &str| {
            let specs = specs(REPORT.replace("STATE", state).as_bytes()).unwrap();
            result(test, &specs, "nothing ran").outcome
        };
        let failed = |how: &str| Outcome::Failed(how.to_owned());
        assert_eq!(of("[sig] A works", "passed"), Outcome::Passed);
        assert_eq!(of("[sig] A fails", "passed"), failed("timedout: too late"));
        let skipped = Outcome::Skipped("needs two nodes".to_owned());
        assert_eq!(of("[sig] A skips", "passed"), skipped);
        // Not selected, or never reached.
        assert_eq!(of("[sig] A waits", "passed"), failed("nothing ran"));
        let before = "SynchronizedBeforeSuite failed: no way (e2e.go:7)";
        assert_eq!(of("[sig] A waits", "failed"), failed(before));
        assert_eq!(of("[sig] B", "passed"), failed("nothing ran"));
        assert_eq!(result("[sig] A works", &[], "nothing ran").outcome, failed("nothing ran"));
    }
}
