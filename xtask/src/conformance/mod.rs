//! `cargo xtask conformance`: the conformance tests of Kubernetes' own end-to-end suite.
//!
//! ```text
//! --stage api            --> story of tests/kube: a control plane on this host ---+
//! --stage pods, images   --> story of tests/e2e: a registry on this host, which   |
//!                            the cluster of `cargo xtask run` has as a mirror     |
//!                              | kubeconfig  <------------------------------------+
//!                              v
//! --kubeconfig FILE      --> suite (target/go/bin/e2e) --> target/conformance/<stage>/
//!                              ^
//! table.txt: stage of each test
//! ```
//!
//! A story calls this command again, with the kubeconfig of its cluster. So the level
//! `kube` of the tests runs the same, and the level `e2e` the quickest tests with pods on a
//! machine of its own.
//!
//! What this module does not do: certify. A run covers a part of the conformance suite.

mod images;
mod suite;
mod table;

use std::collections::BTreeMap;
use std::env;
use std::ffi::OsString;
use std::fmt::Write as _;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use polis_tests::{Outcome, Report, StoryResult};

use self::suite::{Suite, Test};
use self::table::{Need, Table};
use crate::{host, image};

/// The results, a folder for each stage.
const RESULTS: &str = "target/conformance";
/// The level and the name of the story that starts a control plane for this command.
const STORY_API: [&str; 2] = ["kube", "conformance::tests_that_need_no_pod_pass"];
/// The level and the name of the story that serves the images of the tests with pods.
const STORY_PODS: [&str; 2] = ["e2e", "workloads::conformance::tests_with_pods_pass_on_a_cluster"];
/// The arguments of this command with which a story calls it, as a list in JSON.
const COMMAND: &str = "POLIS_CONFORMANCE";
/// For the story that serves images: the layout, and the folder of the cluster.
const IMAGES: &str = "POLIS_CONFORMANCE_IMAGES";
const CLUSTER: &str = "POLIS_CONFORMANCE_CLUSTER";
/// The cluster of `cargo xtask run --kubernetes`, and its kubeconfig.
const RUN: &str = "target/run/polis";
const KUBECONFIG: &str = "kubeconfig";
/// An image that most tests with pods start. No registry but that of Kubernetes' project
/// has it.
const IMAGE: &str = "e2e-test-images/agnhost";

/// Arguments of `cargo xtask conformance`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Which tests to run: those that need no pod, or those that do.
    #[arg(long, value_enum, default_value_t = Stage::Api)]
    stage: Stage,
    /// Test the cluster of this kubeconfig, as one who may do everything [default: a new
    /// control plane on this host for the stage api; the cluster of `cargo xtask run
    /// --kubernetes` for the stage pods].
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
    /// How many processes of the suite run at a time [default: 6 for the stage api, 2 for
    /// the stage pods].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=64))]
    processes: Option<u8>,
    /// Leave out the slow tests: those that upstream marks, and those that the table marks.
    #[arg(long)]
    quick: bool,
    /// For the stage pods: the workers pull the images of the tests from their registry,
    /// instead of stand-ins from this host.
    #[arg(long)]
    pull: bool,
    /// Take the programs as they are.
    #[arg(long, hide = true)]
    built: bool,
    /// Only tests whose names contain one of these.
    #[arg(value_name = "FILTER")]
    filters: Vec<String>,
}

/// A part of the tests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Stage {
    /// Tests that need no pod that runs.
    Api,
    /// Tests with pods.
    Pods,
}

impl Stage {
    fn name(self) -> &'static str {
        match self {
            Self::Api => "api",
            Self::Pods => "pods",
        }
    }

    fn need(self) -> Need {
        match self {
            Self::Api => Need::Api,
            Self::Pods => Need::Pods,
        }
    }
}

impl Args {
    /// The arguments of a story in `cargo xtask test`, which has built the programs.
    fn of_story(stage: Stage) -> Self {
        Self {
            stage,
            kubeconfig: None,
            processes: None,
            quick: false,
            pull: false,
            built: true,
            filters: Vec::new(),
        }
    }

    fn processes(&self) -> u8 {
        let usual = match self.stage {
            Stage::Api => 6,
            // Each test has a pod or more, which an emulated machine starts in seconds.
            Stage::Pods => 2,
        };
        self.processes.unwrap_or(usual)
    }
}

/// A test that this run leaves out, and why.
type Skip = (String, String);

/// Runs the command.
pub(crate) fn run(args: &Args) -> Result<()> {
    if args.pull && args.stage == Stage::Api {
        let text = "--pull is an option of `--stage pods`: no test of the stage api starts a pod";
        return Err(host::Usage(text.to_owned()).into());
    }
    let run = image::workspace().join(RUN);
    // Before the build of the suite, which may take half an hour.
    let kubeconfig = match (args.stage, &args.kubeconfig) {
        (_, Some(file)) => Some(existing(file)?),
        (Stage::Pods, None) => Some(existing(&run.join(KUBECONFIG))?),
        (Stage::Api, None) => None,
    };
    let makes_images = args.stage == Stage::Pods && args.kubeconfig.is_none() && !args.pull;
    if makes_images {
        host::require(&[images::NEEDS, host::PAYLOAD, host::BUILD])?;
    }
    if !args.built {
        image::suite()?;
    }
    match kubeconfig {
        None => natively(args),
        Some(_) if makes_images => with_images(args, &run),
        Some(kubeconfig) => against(args, kubeconfig),
    }
}

fn existing(kubeconfig: &Path) -> Result<PathBuf> {
    let found = fs::canonicalize(kubeconfig).and_then(|path| match path.is_file() {
        true => Ok(path),
        false => Err(io::Error::other("it is not a file")),
    });
    let help = "start a cluster with `cargo xtask run --kubernetes`, or name one with --kubeconfig";
    found
        .with_context(|| format!("cannot find the kubeconfig {}", kubeconfig.display()))
        .context(host::Help(help.to_owned()))
}

/// The command of the story, for [`command`]: this program, and its arguments but for the
/// kubeconfig.
fn arguments(own: &Path, args: &Args) -> String {
    let mut list = vec![own.display().to_string()];
    list.extend(["conformance", "--stage", args.stage.name(), "--built"].map(str::to_owned));
    list.extend(["--processes".to_owned(), args.processes().to_string()]);
    list.extend(args.quick.then(|| "--quick".to_owned()));
    // The story has the images.
    list.extend((args.stage == Stage::Pods).then(|| "--pull".to_owned()));
    // A filter may begin like an option.
    list.push("--".to_owned());
    list.extend(args.filters.iter().cloned());
    serde_json::Value::from(list).to_string()
}

/// Tells the story how to call this command: with all tests, or in an ordinary run without
/// those that take minutes.
pub(crate) fn tell_story(command: &mut Command, all: bool) -> Result<()> {
    let args = Args { quick: !all, ..Args::of_story(Stage::Api) };
    let own = env::current_exe().context("cannot find this program")?;
    command.env(COMMAND, arguments(&own, &args));
    Ok(())
}

/// Checks that this host has the programs that the images copy, and installs what is missing.
///
/// # Errors
///
/// A package is missing and may not be, or could not be, installed.
pub(crate) fn require_programs() -> Result<()> {
    host::require(&[images::NEEDS])
}

/// The settings of the story that founds a machine for the quickest tests with pods: how to call
/// this command, and the images, which are made here. The caller has called [`require_programs`].
pub(crate) fn settings_on_machine() -> Result<[(&'static str, OsString); 2]> {
    image::suite()?;
    let args = Args { filters: Table::new()?.quickest(), ..Args::of_story(Stage::Pods) };
    let own = env::current_exe().context("cannot find this program")?;
    Ok([(COMMAND, arguments(&own, &args).into()), (IMAGES, stand_ins()?.into())])
}

/// Whether the suite and the program of its pods were built: an ordinary run of the tests does
/// not wait for that.
pub(crate) fn is_built() -> bool {
    ["agnhost", "e2e", "kubectl"].iter().all(|name| image::go_program(name).is_file())
}

/// Starts a control plane by the story, which calls this command again.
fn natively(args: &Args) -> Result<()> {
    story(args, STORY_API, &[])
}

/// Serves stand-ins of the images to the cluster of a run by the story, which calls this
/// command again.
fn with_images(args: &Args, run: &Path) -> Result<()> {
    story(args, STORY_PODS, &[(IMAGES, &stand_ins()?), (CLUSTER, run)])
}

/// Makes stand-ins of the images; returns the folder of their layout.
fn stand_ins() -> Result<PathBuf> {
    let folder = image::workspace().join(RESULTS).join("images");
    images::write(&image::go_program("e2e"), &folder)?;
    Ok(folder)
}

fn story(args: &Args, [level, name]: [&str; 2], settings: &[(&str, &Path)]) -> Result<()> {
    let own = env::current_exe().context("cannot find this program")?;
    let status = image::cargo(&image::workspace())
        .args(["test", "--quiet", "--workspace", "--test", level, "--", "--story", name])
        .env("POLIS_ETCD", image::workspace().join("target/payload/root/usr/bin/etcd"))
        .env("POLIS_KUBE", image::go_program("kube"))
        .env(COMMAND, arguments(&own, args))
        .envs(settings.iter().copied())
        .status()
        .context("cannot start cargo")?;
    ensure!(status.success(), "conformance, stage {}: {status}", args.stage.name());
    Ok(())
}

/// Runs the suite against a cluster.
fn against(args: &Args, kubeconfig: PathBuf) -> Result<()> {
    let program = image::go_program("e2e");
    let names = suite::names(&program)?;
    let (mut wanted, skips) = select(args, names)?;
    wanted.sort_by(|one, other| one.name.cmp(&other.name));
    let folder = image::workspace().join(RESULTS).join(args.stage.name());
    if folder.exists() {
        fs::remove_dir_all(&folder)
            .with_context(|| format!("cannot empty {}", folder.display()))?;
    }
    let suite = Suite {
        program,
        kubectl: image::go_program("kubectl"),
        kubeconfig,
        folder,
        processes: usize::from(args.processes()),
        awaits_nodes: args.stage == Stage::Pods,
    };
    if args.stage == Stage::Pods && !args.pull {
        has_images(&suite)?;
    }
    let all = wanted.len() + skips.len();
    println!("conformance: stage {}: {} of {all} tests", args.stage.name(), wanted.len());
    let mut results = suite.run(&wanted, &|result| println!("{}", line(result)))?;
    let left_out = skips.into_iter().map(|(name, reason)| StoryResult {
        name,
        outcome: Outcome::Skipped(reason),
        seconds: 0.0,
        processor_seconds: 0.0,
        tries: 0,
    });
    results.extend(left_out);
    let report = Report { stories: results, not_drawn: 0 };
    let file = suite.folder.join("report.json");
    fs::write(&file, serde_json::to_string_pretty(&report)?)
        .with_context(|| format!("cannot write {}", file.display()))?;
    print!("{}", summary(&report));
    println!("conformance: logs and reports are in {}", suite.folder.display());
    match report.failed() {
        0 => Ok(()),
        failed => bail!("{failed} of {} conformance tests failed", wanted.len()),
    }
}

/// The tests of this run, and all others with the reason.
fn select(args: &Args, names: Vec<String>) -> Result<(Vec<Test>, Vec<Skip>)> {
    let table = Table::new()?;
    let (mut wanted, mut skips) = (Vec::new(), Vec::new());
    for (name, rule) in table.decide(names)? {
        let slow = rule.is_slow(&name);
        let filtered =
            !args.filters.is_empty() && !args.filters.iter().any(|part| name.contains(part));
        if rule.need != args.stage.need() {
            let reason = match rule.need {
                Need::Api => "stage api runs it".to_owned(),
                Need::Pods | Need::Never => rule.reason.to_owned(),
            };
            skips.push((name, reason));
        } else if filtered {
            skips.push((name, "the filter leaves it out".to_owned()));
        } else if args.quick && slow {
            skips.push((name, "it is slow".to_owned()));
        } else {
            wanted.push(Test { name, slow });
        }
    }
    if wanted.is_empty() {
        let (stage, filters) = (args.stage.name(), &args.filters);
        return Err(anyhow!(host::Usage(format!(
            "no test of stage {stage} contains one of {filters:?}"
        ))));
    }
    Ok((wanted, skips))
}

/// Checks that a worker has the image that most tests start: without it, each would wait
/// five minutes for a pod.
fn has_images(suite: &Suite) -> Result<()> {
    let output = Command::new(&suite.kubectl)
        .arg("--kubeconfig")
        .arg(&suite.kubeconfig)
        .args(["get", "nodes", "--output", "jsonpath={.items[*].status.images[*].names}"])
        .output()
        .context("cannot start kubectl")?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "cannot list the images of the nodes: {}", said.trim());
    if String::from_utf8_lossy(&output.stdout).contains(IMAGE) {
        return Ok(());
    }
    Err(anyhow!("no worker has the image registry.k8s.io/{IMAGE}, which most of these tests start"))
        .context(host::Help(
            "if the workers reach registry.k8s.io or a mirror of it, add --pull".to_owned(),
        ))
}

/// One result.
fn line(result: &StoryResult) -> String {
    let StoryResult { name, outcome, seconds, .. } = result;
    match outcome {
        Outcome::Passed | Outcome::Flaky => format!("      ok {seconds:>7.1} s  {name}"),
        Outcome::Failed(how) => format!("  FAILED {seconds:>7.1} s  {name}: {how}"),
        Outcome::Skipped(reason) => format!(" skipped {seconds:>7.1} s  {name}: {reason}"),
    }
}

/// Counts by SIG, the reasons of skips, every failure, and the closing line.
fn summary(report: &Report) -> String {
    let mut sigs: BTreeMap<&str, [usize; 3]> = BTreeMap::new();
    let mut reasons: BTreeMap<&str, usize> = BTreeMap::new();
    for StoryResult { name, outcome, .. } in &report.stories {
        // Names begin with `[sig-<name>]`.
        let sig = name.split_once(']').map_or("", |(sig, _)| sig.trim_start_matches('['));
        let column = match outcome {
            Outcome::Passed | Outcome::Flaky => 0,
            Outcome::Failed(_) => 1,
            Outcome::Skipped(reason) => {
                *reasons.entry(reason).or_default() += 1;
                2
            }
        };
        sigs.entry(sig).or_default()[column] += 1;
    }
    let mut text = format!("\n{:<20} {:>7} {:>7} {:>7}\n", "", "passed", "failed", "skipped");
    for (sig, [passed, failed, skipped]) in &sigs {
        let _infallible = writeln!(text, "{sig:<20} {passed:>7} {failed:>7} {skipped:>7}");
    }
    for (reason, count) in &reasons {
        let _infallible = writeln!(text, "skipped {count:>7}  {reason}");
    }
    let failed = report.stories.iter().filter(|test| matches!(test.outcome, Outcome::Failed(_)));
    failed.for_each(|test| {
        let _infallible = writeln!(text, "{}", line(test));
    });
    let skipped: usize = reasons.values().sum();
    let (passed, failed) = (report.passed(), report.failed());
    let _infallible =
        writeln!(text, "conformance: {passed} passed, {failed} failed, {skipped} skipped");
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(filters: &[&str], quick: bool) -> Args {
        Args {
            stage: Stage::Api,
            kubeconfig: None,
            processes: Some(2),
            quick,
            pull: false,
            built: false,
            filters: filters.iter().map(|filter| (*filter).to_owned()).collect(),
        }
    }

    #[test]
    fn the_story_calls_with_what_the_person_asked_for() {
        let list = arguments(Path::new("/x/xtask"), &args(&["-v", "volume"], true));
        let expected = "[\"/x/xtask\",\"conformance\",\"--stage\",\"api\",\"--built\",\
                        \"--processes\",\"2\",\"--quick\",\"--\",\"-v\",\"volume\"]";
        assert_eq!(list, expected);
    }

    #[test]
    fn the_story_on_a_machine_calls_with_the_quickest_tests() {
        let filters = Table::new().unwrap().quickest();
        let args = Args { filters: filters.clone(), ..Args::of_story(Stage::Pods) };
        let list: Vec<String> =
            serde_json::from_str(&arguments(Path::new("/x/xtask"), &args)).unwrap();
        let (options, selected) = list.split_at(list.len() - filters.len());
        let expected = "/x/xtask conformance --stage pods --built --processes 2 --pull --";
        assert_eq!(options.join(" "), expected);
        assert_eq!(selected, filters);
    }

    #[test]
    fn a_kubeconfig_that_is_not_there_is_named_before_anything_is_built() {
        for path in ["/no/such/file", "/proc"] {
            let absent = Args { kubeconfig: Some(path.into()), ..args(&[], true) };
            let error = format!("{:#}", run(&absent).unwrap_err());
            assert!(error.contains(&format!("cannot find the kubeconfig {path}")), "{error}");
            assert!(error.contains("--kubeconfig"), "{error}");
        }
    }

    #[test]
    fn an_option_of_the_other_stage_is_wrong_usage() {
        let error = run(&Args { pull: true, ..args(&[], true) }).unwrap_err();
        assert!(error.is::<host::Usage>(), "{error}");
        assert!(error.to_string().contains("--stage pods"), "{error}");
    }

    #[test]
    fn the_summary_counts_by_sig_and_by_reason() {
        let test = |name: &str, outcome| StoryResult {
            name: name.to_owned(),
            outcome,
            seconds: 1.0,
            processor_seconds: 0.0,
            tries: 1,
        };
        let skipped = Outcome::Skipped("a pod has to run".to_owned());
        let report = Report {
            stories: vec![
                test("[sig-a] one", Outcome::Passed),
                test("[sig-a] two", Outcome::Failed("failed: no".to_owned())),
                test("[sig-b] three", skipped.clone()),
                test("[sig-b] four", skipped),
            ],
            not_drawn: 0,
        };
        insta::assert_snapshot!(summary(&report), @r"

                              passed  failed skipped
        sig-a                      1       1       0
        sig-b                      0       0       2
        skipped       2  a pod has to run
          FAILED     1.0 s  [sig-a] two: failed: no
        conformance: 1 passed, 1 failed, 2 skipped
        ");
    }
}
