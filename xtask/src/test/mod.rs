//! `cargo xtask test`: formatting, lints, and every test, the last in QEMU.
//!
//! All parts run even after a failure, so that one run lists every failure. The image is
//! built once, before the first part that needs it. The programs of Kubernetes are built
//! behind all other parts, at the lowest priority: they take what waits, links and
//! single-threaded compilers leave idle. The stories of `kube` come last. The other programs of an
//! image with Kubernetes are built behind those; if they are there when the stories of machines
//! begin, these have that image, too.
//!
//! Tests that cannot run on this host are listed with the reason: a missing tool, or a
//! device that QEMU lacks.

mod background;
mod prometheus;
mod report;
mod selection;
mod steps;

use std::env;
use std::ffi::OsString;
use std::fs;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use polis_image::{Kind, Variant};
use polis_tests::{ALL, SEED, draws_all};

use self::background::Background;
use self::report::Report;
use self::selection::{Part, Wanted};
use crate::image::Packages;
use crate::{conformance, gallery, host, image, run, trees};

/// The logs of stories, a folder each.
const STORIES: &str = "target/e2e";

/// The size of an empty `target/` after a run of all parts, programs of Kubernetes included, and
/// of the disks of the stories that run at one time.
const SPACE: u64 = 20 << 30;

/// The output of each story, and the results of all.
const RESULTS: &str = "target/test";

/// etcd of the payload, for the tests that drive a real one on the host.
const ETCD: &str = "target/payload/root/usr/bin/etcd";

/// The stories of the product image, which is built only if one of them is selected.
const PRODUCT: &str = "product::";
/// Names the folder of that image.
const PRODUCT_IMAGE: &str = "POLIS_PRODUCT_IMAGE_DIR";
/// Names the folder of the newer image.
const NEXT_IMAGE: &str = "POLIS_NEXT_IMAGE_DIR";
/// The files of the stories that update machines to a newer image.
const UPDATES: [&str; 4] = ["update::", "cluster_update::", "secure_boot::", "signed_disk::"];

/// The stories of the image with Kubernetes, where its programs were built before.
const WORKLOADS: &str = "workloads::";

/// The file of the story that updates such a machine.
const WORKLOADS_UPDATED: &str = "workloads::updated::";
/// Names the folder of the newer image with Kubernetes.
const NEXT_FULL_IMAGE: &str = "POLIS_NEXT_FULL_IMAGE_DIR";

/// The file of the story that runs conformance tests on such a machine.
const WORKLOADS_CONFORMANCE: &str = "workloads::conformance::";

/// The programs for them that a build of the image, or of `run --kubernetes`, leaves.
const WORKLOAD_PROGRAMS: &[&str] = &["kube", "kubectl", "containerd", "runsc"];

/// Arguments of `cargo xtask test`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Parts to run (lint, unit, tpm, image, etcd, e2e, kube), all by default; and last, to
    /// select tests, a part of their names.
    #[arg(value_name = "PART|FILTER", value_parser = word)]
    selection: Vec<String>,
    /// Show each promise at every moment, where an ordinary run draws a sample.
    #[arg(long)]
    all: bool,
    /// Begin no story after so many minutes: what is left is listed as skipped, and no failure.
    #[arg(long, value_name = "MINUTES", value_parser = clap::value_parser!(u64).range(1..=10_000))]
    within: Option<u64>,
}

/// An empty argument would be a filter that selects everything.
fn word(text: &str) -> Result<String, &'static str> {
    if text.is_empty() { Err("expected a part or a filter") } else { Ok(text.to_owned()) }
}

/// Runs the command.
pub(crate) fn run(args: Args) -> Result<()> {
    let until = args.within.map(|minutes| Instant::now() + Duration::from_secs(minutes * 60));
    let Wanted { mut parts, filter } = Wanted::read(&args.selection).map_err(host::Usage)?;
    let filter = filter.as_deref();
    if let Some(filter) = filter {
        host::require(&[host::BUILD])?;
        parts = matched(&parts, filter, |part| has_test(part, filter))?;
    }
    let wanted = |part| parts.contains(&part);
    let mut needs = vec![host::BUILD];
    if wanted(Part::Image) || wanted(Part::Etcd) || wanted(Part::Kube) || wanted(Part::E2e) {
        needs.extend([host::PAYLOAD, run::QEMU]);
    }
    if wanted(Part::Tpm) || wanted(Part::E2e) {
        needs.push(host::TPM);
    }
    if wanted(Part::E2e) {
        needs.push(host::ISO);
    }
    host::require(&needs)?;
    let names = match filter {
        Some(filter) if wanted(Part::E2e) => Some(names("e2e", filter)?),
        _ => None,
    };
    let stories = Stories { filter, names, all: args.all || draws_all(), until, seed: seed()? };
    println!("test: {SEED}={} draws what this run shows of each sample", stories.seed);
    let root = image::workspace();
    let first = wanted(Part::E2e) && filter.is_none() && !root.join(STORIES).exists();
    let what = "a first run of everything";
    if first && let Some(warning) = host::short_of_space(&root, SPACE, what) {
        println!("test: {warning}");
    }
    let mut report = Report::default();
    // Beside at least one other part, or it would only be slower.
    let background = wanted(Part::Kube) && parts.len() > 1;
    let (mut suite, mut programs) = (None, None);
    if background {
        // Dropped when the first build ends.
        let (first, ended) = mpsc::channel::<()>();
        suite = Some(Background::begin(move || {
            let _first = first;
            image::suite()
        }));
        programs = wanted(Part::E2e).then(|| {
            Background::begin(move || {
                let _ended = ended.recv();
                image::workload_programs()
            })
        });
    }
    for part in Part::ALL.into_iter().filter(|part| wanted(*part)) {
        // Otherwise it would take its time and fail in every place but that one.
        host::require_space(&root, part.space(), &format!("the part {}", part.name()))?;
        match part {
            Part::Lint => lint(&mut report),
            Part::Unit => {
                if wanted(Part::E2e) {
                    report.step("build", &mut everything());
                }
                report.tests("unit", &mut quick(filter));
            }
            Part::Tpm => report.stories("tpm", &mut stories.binary("tpm")?),
            Part::Image => {
                if report.image() {
                    // In this process, since cargo may have replaced the file of this
                    // program.
                    report.call("two images", || image::verify(Kind::Development, Variant::Base));
                }
            }
            Part::Etcd => {
                if report.image() {
                    let mut command = stories.binary("etcd")?;
                    command.env("POLIS_ETCD", image::workspace().join(ETCD));
                    report.stories("etcd", &mut command);
                }
            }
            Part::E2e => {
                if report.image() {
                    machines(&mut report, &stories, suite.as_ref(), programs.take())?;
                }
            }
            Part::Kube => {
                if report.image() {
                    kube(&mut report, &stories, suite.take())?;
                }
            }
        }
    }
    report.close(&image::workspace().join(RESULTS))
}

fn lint(report: &mut Report) {
    report.step("formatting", cargo().args(["fmt", "--all", "--check"]));
    let lints = ["clippy", "--workspace", "--all-targets", "--quiet", "--", "-D", "warnings"];
    report.step("lints", cargo().args(lints));
    report.call("crates", trees::check);
    report.call("gallery", gallery::check);
    if host::find("cargo-deny").is_some() || in_cargo_home("cargo-deny") {
        // Advisories come from a database on the network, which a build must not need.
        let checks = ["check", "bans", "licenses", "sources"];
        report.step("licences", cargo().args(["deny", "--log-level", "warn"]).args(checks));
    } else {
        // No package has it, and its compilation takes minutes.
        report.skip("licences: run `cargo install --locked cargo-deny` for them");
    }
    match host::find(prometheus::PROMTOOL) {
        Some(promtool) => {
            report.call("alert rules", || prometheus::check(&promtool));
        }
        // Its package brings a server that every later start of the host would run.
        None => report.skip("alert rules: promtool (package prometheus) is not installed"),
    }
}

/// Every binary with tests or stories, in one run of cargo: in a run for each, the last
/// crate would leave one processor idle every time.
fn everything() -> Command {
    let mut command = cargo();
    command.args(["test", "--quiet", "--workspace", "--tests", "--no-run"]);
    command
}

/// Everything that needs no image.
fn quick(filter: Option<&str>) -> Command {
    let mut command = cargo();
    // Of the programs only this one has tests of its own; `--bins` would link each of them as
    // an empty test.
    command.args(["test", "--workspace", "--lib", "--bin", "xtask", "--no-fail-fast"]).args(filter);
    // The programs run one after another, and many tests wait: for an answer, a deadline.
    let threads = thread::available_parallelism().map_or(1, usize::from) * 2;
    command.env("RUST_TEST_THREADS", threads.to_string());
    command
}

/// The stories of the control plane of Kubernetes, and the conformance tests that need no pod.
/// A host without a way to Go's modules skips them.
fn kube(report: &mut Report, stories: &Stories<'_>, begun: Option<Background>) -> Result<()> {
    let mut cannot = None;
    let built = report.call("kubernetes", || {
        let built = match begun {
            Some(begun) => begun.wait(stories.until),
            None => image::suite().map(|()| true),
        };
        match built {
            Ok(true) => {}
            Ok(false) => {
                cannot =
                    Some("kube: its programs were not built in the time of this run".to_owned());
            }
            Err(error) if no_way_to_modules(&error) => cannot = Some(format!("kube: {error:#}")),
            Err(error) => return Err(error),
        }
        Ok(())
    });
    if let Some(cannot) = cannot {
        report.skip(&cannot);
        return Ok(());
    }
    if !built {
        return Ok(());
    }
    let mut command = stories.binary("kube")?;
    command.env("POLIS_ETCD", image::workspace().join(ETCD));
    command.env("POLIS_KUBE", image::go_program("kube"));
    // Without it, the story says that it is skipped.
    if conformance::is_built() {
        conformance::tell_story(&mut command, stories.all)?;
    }
    report.stories("kube", &mut command);
    Ok(())
}

/// Longest that a run whose time is limited keeps for the stories of `kube`: they take six minutes
/// on an idle host, four of them for the conformance tests, which come last.
const KEPT: Duration = Duration::from_secs(8 * 60);

/// The moment after which no story of machines begins, where those of `kube` follow: they mostly
/// wait, and on a slow host none of them would have its turn. They get a quarter of what is left,
/// at most [`KEPT`], in which the last story of machines ends, too.
fn before_kube(now: Instant, until: Instant) -> Instant {
    let left = until.saturating_duration_since(now);
    now + (left - KEPT.min(left / 4))
}

/// Whether the programs of an image with Kubernetes are there and nothing builds them just now. A
/// cold build takes 27 minutes of processor time, so no test waits for one.
fn has_workload_programs(report: &mut Report, background: Option<Background>) -> bool {
    if let Some(background) = background {
        if !background.is_over() {
            return false;
        }
        if let Err(error) = background.wait(None) {
            if !no_way_to_modules(&error) {
                report.call("programs", || Err(error));
            }
            return false;
        }
    }
    WORKLOAD_PROGRAMS.iter().all(|name| image::go_program(name).is_file())
}

/// Whether a build failed because this host cannot reach Go's modules.
fn no_way_to_modules(error: &anyhow::Error) -> bool {
    error.downcast_ref::<polis_image::Error>().is_some_and(polis_image::Error::no_way_to_modules)
}

/// The stories of whole machines. `suite` builds the programs of `kube`, if that part follows, and
/// `programs` the others of an image with Kubernetes.
fn machines(
    report: &mut Report,
    stories: &Stories<'_>,
    suite: Option<&Background>,
    programs: Option<Background>,
) -> Result<()> {
    let folder = image::workspace().join(STORIES);
    if folder.exists() {
        fs::remove_dir_all(&folder).with_context(|| format!("cannot empty {STORIES}"))?;
    }
    if let Some((major, minor)) = polis_qemu::host::version() {
        let accelerator = polis_qemu::host::accelerator(polis_qemu::host::Preference::Auto, 1);
        println!("test: QEMU {major}.{minor}, {accelerator}; logs go to {STORIES}");
    }
    let development = image::folder(Kind::Development, Variant::Base);
    let mut folders = vec![("POLIS_IMAGE_DIR", named("POLIS_IMAGE_DIR", development)?)];
    if stories.select(PRODUCT) {
        let (build, folder): (fn() -> _, _) = match stories.all {
            true => (|| image::built(Kind::Product), image::folder(Kind::Product, Variant::Base)),
            false => (image::built_quick_product, image::folder_quick_product()),
        };
        if env::var_os(PRODUCT_IMAGE).is_none() {
            report.call("product", || build().map(drop));
        }
        folders.push((PRODUCT_IMAGE, named(PRODUCT_IMAGE, folder)?));
    }
    if UPDATES.iter().any(|file| stories.select(file)) {
        if env::var_os(NEXT_IMAGE).is_none() {
            report.call("next", || image::built_next(Variant::Base).map(drop));
        }
        let next = image::folder_next(Variant::Base);
        folders.push((NEXT_IMAGE, named(NEXT_IMAGE, next)?));
    }
    // Without time for a story, nothing would use these images.
    let wanted = stories.select(WORKLOADS) && stories.may_begin();
    let settings = match wanted && has_workload_programs(report, programs) {
        true => workloads(report, stories, &mut folders)?,
        false => Vec::new(),
    };
    // Behind the builds: it says how much time is left. Without its programs, `kube` would spend
    // its share on them, or be skipped.
    let built = suite.is_some_and(Background::is_over) && image::go_program("kube").is_file();
    let until = match built {
        true => stories.until.map(|until| before_kube(Instant::now(), until)),
        false => stories.until,
    };
    let mut command = stories.binary_until("e2e", until)?;
    command.envs(folders).envs(settings);
    // A story fails with a sentence and the guest's last lines; a backtrace of the harness
    // would hide them.
    command.env("RUST_LIB_BACKTRACE", "0");
    report.stories("e2e", &mut command);
    Ok(())
}

/// Builds what the stories of machines with Kubernetes need: images, whose folders are added to
/// `folders`, and for conformance tests those of pods. Returns the settings of the latter.
fn workloads(
    report: &mut Report,
    stories: &Stories<'_>,
    folders: &mut Vec<(&'static str, PathBuf)>,
) -> Result<Vec<(&'static str, OsString)>> {
    if env::var_os("POLIS_FULL_IMAGE_DIR").is_none() {
        let packages = Packages::default();
        let build = || image::built_from(Kind::Development, Variant::Full, &packages);
        report.call("full", || build().map(drop));
    }
    let full = image::folder(Kind::Development, Variant::Full);
    folders.push(("POLIS_FULL_IMAGE_DIR", named("POLIS_FULL_IMAGE_DIR", full)?));
    if stories.all || stories.names.is_some() && stories.select(WORKLOADS_UPDATED) {
        if env::var_os(NEXT_FULL_IMAGE).is_none() {
            let build = || image::built_next(Variant::Full).map(drop);
            report.call("next full", build);
        }
        let next = image::folder_next(Variant::Full);
        folders.push((NEXT_FULL_IMAGE, named(NEXT_FULL_IMAGE, next)?));
    }
    match stories.select(WORKLOADS_CONFORMANCE) && conformance::is_built() {
        true => Ok(images_of_pods(report)),
        false => Ok(Vec::new()),
    }
}

/// Makes the images of the pods of conformance tests, and returns the settings of their story.
/// A host without the programs that the images copy, or without a way to Go's modules, has none,
/// and skips the story.
fn images_of_pods(report: &mut Report) -> Vec<(&'static str, OsString)> {
    let (mut settings, mut cannot) = (Vec::new(), conformance::require_programs().err());
    if cannot.is_none() {
        report.call("images of pods", || {
            match conformance::settings_on_machine() {
                Ok(made) => settings.extend(made),
                Err(error) if no_way_to_modules(&error) => cannot = Some(error),
                Err(error) => return Err(error),
            }
            Ok(())
        });
    }
    if let Some(error) = cannot {
        report.skip(&format!("images of pods: {error:#}"));
    }
    settings
}

/// The parts among these that have a test which the filter selects, as `has` says.
///
/// # Errors
///
/// No part has one: a misspelt part must not pass as a filter, nor a misspelt filter as a run
/// without a failure.
fn matched(parts: &[Part], filter: &str, has: impl Fn(Part) -> Result<bool>) -> Result<Vec<Part>> {
    let list = |parts: &[Part]| parts.iter().map(|part| part.name()).collect::<Vec<_>>().join(", ");
    let mut matched = Vec::new();
    for part in parts {
        matched.extend(has(*part)?.then_some(*part));
    }
    if matched.is_empty() {
        let (of, all) = (list(parts), list(&Part::ALL));
        let text = format!("no test of {of} has `{filter}` in its name, and the parts are {all}");
        return Err(host::Usage(text).into());
    }
    println!("test: `{filter}` is in: {}", list(&matched));
    Ok(matched)
}

/// Whether the filter selects a test of a part.
fn has_test(part: Part, filter: &str) -> Result<bool> {
    match part {
        Part::Unit => has_quick(filter),
        _ => Ok(!names(&part.name(), filter)?.is_empty()),
    }
}

/// Whether the filter selects a quick test.
fn has_quick(filter: &str) -> Result<bool> {
    let mut list = quick(Some(filter));
    let output = list.args(["--quiet", "--", "--list"]).stderr(Stdio::inherit()).output();
    let output = output.context("cannot start cargo")?;
    ensure!(output.status.success(), "cannot list the quick tests");
    Ok(String::from_utf8_lossy(&output.stdout).lines().any(|line| line.ends_with(": test")))
}

/// The stories of a level that the filter selects.
fn names(level: &str, filter: &str) -> Result<Vec<String>> {
    let mut list = cargo();
    list.args(["test", "--quiet", "--workspace", "--test", level, "--", "--list", "--all", filter]);
    let output = list.stderr(Stdio::inherit()).output().context("cannot start cargo")?;
    ensure!(output.status.success(), "cannot list the stories");
    Ok(String::from_utf8_lossy(&output.stdout).lines().map(str::to_owned).collect())
}

/// The folder of an image: the one that `variable` names, or the one of these sources.
fn named(variable: &str, built: PathBuf) -> Result<PathBuf> {
    let folder = env::var_os(variable).map_or(built, PathBuf::from);
    std::path::absolute(folder).context("cannot read the current folder")
}

/// The arguments of every binary with stories.
struct Stories<'a> {
    filter: Option<&'a str>,
    /// The stories of machines that it selects.
    names: Option<Vec<String>>,
    all: bool,
    /// No story begins after this moment.
    until: Option<Instant>,
    seed: u64,
}

impl Stories<'_> {
    /// Whether stories of this file are selected.
    fn select(&self, file: &str) -> bool {
        self.names.as_ref().is_none_or(|names| names.iter().any(|name| name.starts_with(file)))
    }

    /// Whether a story may begin yet.
    fn may_begin(&self) -> bool {
        self.until.is_none_or(|until| Instant::now() < until)
    }

    /// The command that runs one of the binaries in `tests/`. It leaves its report at
    /// [`steps::report_of`].
    fn binary(&self, name: &'static str) -> Result<Command> {
        self.binary_until(name, self.until)
    }

    /// The same with another moment after which no story begins.
    fn binary_until(&self, name: &'static str, until: Option<Instant>) -> Result<Command> {
        let file = steps::report_of(name);
        if let Some(folder) = file.parent() {
            fs::create_dir_all(folder).with_context(|| format!("cannot make {RESULTS}"))?;
        }
        let mut command = cargo();
        // The whole workspace, so that features are those of all other builds.
        command.args(["test", "--quiet", "--workspace", "--test", name, "--"]);
        command.arg("--report").arg(file).args(self.filter);
        if let Some(until) = until {
            let left = until.saturating_duration_since(Instant::now());
            command.arg("--within").arg(left.as_secs().to_string());
        }
        command.env(SEED, self.seed.to_string());
        if self.all {
            command.env(ALL, "1");
        }
        Ok(command)
    }
}

/// The seed of this run: `POLIS_SEED`, or a number derived from the commit, or a random one
/// without a repository.
fn seed() -> Result<u64> {
    if env::var_os(SEED).is_some() {
        return polis_tests::seed();
    }
    let mut git = Command::new("git");
    git.current_dir(image::workspace()).args(["rev-parse", "HEAD"]);
    let output = git.output().ok().filter(|output| output.status.success());
    let commit = output.and_then(|output| of_commit(&String::from_utf8_lossy(&output.stdout)));
    Ok(commit.unwrap_or_else(rand::random))
}

/// The first sixteen digits of a commit.
fn of_commit(id: &str) -> Option<u64> {
    u64::from_str_radix(id.trim().get(..16)?, 16).ok()
}

fn cargo() -> Command {
    image::cargo(&image::workspace())
}

/// The folder of `cargo install`, which may not be on the path.
fn in_cargo_home(program: &str) -> bool {
    let home = env::var_os("CARGO_HOME").map(PathBuf::from);
    let home = home.or_else(|| Some(PathBuf::from(env::var_os("HOME")?).join(".cargo")));
    home.is_some_and(|home| home.join("bin").join(program).is_file())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_filter_without_a_test_is_wrong_usage_also_behind_a_part() {
        let (parts, e2e) = ([Part::Unit, Part::E2e], |part: Part| Ok(part == Part::E2e));
        assert_eq!(matched(&parts, "guru", e2e).unwrap(), [Part::E2e]);
        let error = matched(&parts[..1], "guru", e2e).unwrap_err();
        assert!(error.is::<host::Usage>(), "{error}");
        let text = error.to_string();
        assert!(text.starts_with("no test of unit has `guru` in its name"), "{text}");
        assert!(text.ends_with("the parts are lint, unit, tpm, image, etcd, e2e, kube"), "{text}");
    }

    #[derive(Debug, clap::Parser)]
    struct Cli {
        #[command(flatten)]
        args: Args,
    }

    #[test]
    fn a_time_that_no_run_takes_is_refused_with_what_is_allowed() {
        let within = |minutes: &str| {
            let parsed = <Cli as clap::Parser>::try_parse_from(["test", "--within", minutes]);
            parsed.map(|cli| cli.args.within).map_err(|error| error.to_string())
        };
        assert_eq!(within("10000"), Ok(Some(10_000)));
        for minutes in ["0", "10001", "18446744073709551615"] {
            let error = within(minutes).unwrap_err();
            assert!(error.contains("1..=10000"), "{error}");
        }
    }

    #[test]
    fn the_stories_of_kube_get_a_share_of_a_time_that_is_limited() {
        let (now, minutes) = (Instant::now(), |number: u64| Duration::from_secs(number * 60));
        for (left, expected) in [(72, 64), (32, 24), (8, 6), (0, 0)] {
            assert_eq!(before_kube(now, now + minutes(left)), now + minutes(expected), "{left}");
        }
    }

    #[test]
    fn a_story_may_begin_until_the_time_of_a_run_is_over() {
        let now = Instant::now();
        let hour = Duration::from_secs(60 * 60);
        for (until, expected) in [(None, true), (Some(now + hour), true), (Some(now), false)] {
            let stories = Stories { filter: None, names: None, all: false, until, seed: 0 };
            assert_eq!(stories.may_begin(), expected, "{until:?}");
        }
    }

    #[test]
    fn each_commit_draws_with_a_seed_of_its_own() {
        let one = of_commit("d04cf8aa0000000000000000000000000000000f\n");
        assert_eq!(one, Some(0xd04c_f8aa_0000_0000));
        assert_eq!(of_commit("fatal: not a git repository"), None);
        assert_eq!(of_commit(""), None);
    }
}
