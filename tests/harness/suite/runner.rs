//! The runner: runs each story in a process of its own, and ends the one whose time is
//! up.
//!
//! ```text
//! waiting --start--> running --ends----------------------> passed, skipped
//!    ^                  |                                     ^
//!    |                  +--fails, or its deadline: killed     |
//!    +---------------------------+ (tries left) --no tries--> failed
//! ```
//!
//! A story leads a process group, so the runner ends it with everything that it has
//! started: QEMU, TPM, etcd, `polisctl`. The runner does that also behind a story that
//! ended by itself. A runner that is killed takes its stories along, by the signal that
//! the kernel sends them then, and these their machines, likewise.
//!
//! Invariants:
//! - The runner signals only a group whose leader it has started and not reaped.
//! - A deadline counts by the clock of `polis_qemu::deadline`, for the story and all its
//!   descendants.
//!
//! The result of a story has its wall time and the processor time of the story and of all
//! the programs that it waited for. The first depends on what else the host does; the
//! second hardly does, so it is the one to compare between two runs.

use std::fmt::Write as _;
use std::fs::{self, File, Permissions};
use std::io::{self, Read as _};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use polis_qemu::deadline::{Clock, STEP};
use polis_qemu::processor;
use polis_qemu::scratch::Scratch;
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process_group, waitid};

use super::queue::{Job, Queue, Turn};
use super::story::{Story, Suite};
use crate::draws_all;
use crate::report::{Outcome, Report, StoryResult};
use crate::seed::CUTS;

/// How often the runner looks whether a story has ended. A story takes seconds.
const LOOK: Duration = Duration::from_millis(100);

/// The mode of a folder that every user may pass through, and only this one may list.
const PASSED: u32 = 0o711;

/// Status of a story that this host cannot run. Nothing else here ends with it.
pub(crate) const SKIPPED: u8 = 77;

/// Why a story was not begun.
const NO_TIME: &str = "the time of this run was too short";

/// How much of a failed story's output is shown: its end.
const SHOWN: u64 = 64 * 1024;

/// Runs stories.
pub(crate) struct Runner<'a> {
    pub(crate) suite: Suite,
    pub(crate) places: u32,
    /// No story begins after this moment.
    pub(crate) until: Option<Instant>,
    /// The folder for the output of the stories.
    pub(crate) logs: PathBuf,
    /// The command that runs a story.
    pub(crate) launch: &'a dyn Fn(&Story, Turn) -> Command,
    /// Shows a line, or several.
    pub(crate) show: &'a dyn Fn(&str),
    /// Keeps the results so far, after each story: a run that is killed, or that stops by an
    /// error, leaves those of the stories before.
    pub(crate) keep: &'a dyn Fn(&Report),
}

/// A story that runs right now.
struct Running {
    job: Job,
    turn: Turn,
    child: Child,
    group: Pid,
    clock: Clock,
    began: Instant,
    looked: Instant,
    log: PathBuf,
    /// Its temporary files, which a story that is killed leaves behind.
    _files: Scratch,
}

/// How a try ended.
enum End {
    Status(ExitStatus),
    /// Killed at its deadline.
    Late,
}

/// A try that has ended.
struct Ended {
    end: End,
    /// Processor time of the story and of the programs that it waited for.
    processors: Duration,
}

impl Runner<'_> {
    /// Runs all `stories`, and prints a line for each.
    pub(crate) fn run(&self, stories: &[Story]) -> Result<Report> {
        fs::create_dir_all(&self.logs)
            .with_context(|| format!("cannot make {}", self.logs.display()))?;
        let mut queue = Queue::new(stories, self.places, self.until.is_some());
        let mut running: Vec<Running> = Vec::new();
        let mut report = Report::default();
        while !queue.is_over() {
            if let Some(until) = self.until {
                let without = queue.without_time(until.saturating_duration_since(Instant::now()));
                report.stories.extend(without.iter().map(|story| self.not_begun(story)));
            }
            while let Some((job, turn)) = queue.next() {
                running.push(self.start(job, turn)?);
            }
            thread::sleep(LOOK);
            let mut at = 0;
            while at < running.len() {
                let deadline = self.deadline(&running[at].job.story);
                let Some(ended) = running[at].ended(deadline)? else {
                    at += 1;
                    continue;
                };
                let story = running.swap_remove(at);
                queue.ended(&story.job, story.turn);
                match self.result(&story, &ended) {
                    Some(result) => {
                        report.stories.push(result);
                        (self.keep)(&report);
                    }
                    None => queue.again(story.job),
                }
            }
        }
        Ok(report)
    }

    /// Whether no story may begin any more, also for a second try.
    fn is_late(&self) -> bool {
        self.until.is_some_and(|until| until < Instant::now())
    }

    /// The result of a story for which the run has no time.
    fn not_begun(&self, story: &Story) -> StoryResult {
        let name = story.name();
        (self.show)(&format!("{:>8} {name}: {NO_TIME}", "skipped"));
        let outcome = Outcome::Skipped(NO_TIME.to_owned());
        StoryResult { name, outcome, seconds: 0.0, processor_seconds: 0.0, tries: 0 }
    }

    fn start(&self, job: Job, turn: Turn) -> Result<Running> {
        let name = job.story.name();
        let file = name.replace("::", ".");
        let log = match job.try_number {
            1 => self.logs.join(format!("{file}.log")),
            number => self.logs.join(format!("{file}.{number}.log")),
        };
        let out = File::create(&log).with_context(|| format!("cannot make {}", log.display()))?;
        let files = Scratch::new()?;
        // The programs of a story run as users of their own, and pass through it. Each folder that
        // a story makes in it has its own mode.
        fs::set_permissions(files.path(), Permissions::from_mode(PASSED))?;
        let mut command = (self.launch)(&job.story, turn);
        command.env("TMPDIR", files.path()).stdin(Stdio::null());
        command.stdout(out.try_clone()?).stderr(out).process_group(0);
        let child = command.spawn().with_context(|| format!("cannot start {name}"))?;
        let group = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
        let (began, clock) = (Instant::now(), Clock::of(child.id()));
        Ok(Running {
            job,
            turn,
            group: group.context("a process without a number")?,
            child,
            clock,
            began,
            looked: began,
            log,
            _files: files,
        })
    }

    /// The longest that a story may take.
    fn deadline(&self, story: &Story) -> Duration {
        story.deadline.unwrap_or(self.suite.deadline) * patience()
    }

    /// Prints how a try ended; nothing if the story runs again.
    fn result(&self, running: &Running, ended: &Ended) -> Option<StoryResult> {
        let Job { story, try_number: tries } = running.job;
        let (name, took) = (story.name(), running.began.elapsed());
        let outcome = match (outcome(&ended.end, &running.log, self.deadline(&story)), tries) {
            (Outcome::Passed, 2..) => Outcome::Flaky,
            (outcome, _) => outcome,
        };
        let again =
            matches!(outcome, Outcome::Failed(_)) && tries <= self.suite.retries && !self.is_late();
        let word = match &outcome {
            Outcome::Passed => "ok",
            Outcome::Flaky => "FLAKY",
            Outcome::Failed(_) if again => "AGAIN",
            Outcome::Failed(_) => "FAILED",
            Outcome::Skipped(_) => "skipped",
        };
        let (took, processors) = (took.as_secs_f64(), ended.processors.as_secs_f64());
        let mut line = format!("{word:>8} {took:>7.1} s {processors:>7.1} s  {name}");
        if let Outcome::Failed(how) | Outcome::Skipped(how) = &outcome {
            line.push_str(": ");
            line.push_str(how);
        }
        if matches!(outcome, Outcome::Failed(_)) {
            let output = last(&running.log, SHOWN).unwrap_or_default();
            let output = String::from_utf8_lossy(&output);
            let (log, output) = (running.log.display(), output.trim_end());
            let _infallible = write!(line, "\n--- {log}\n{output}\n---");
        }
        (self.show)(&line);
        let result =
            StoryResult { name, outcome, seconds: took, processor_seconds: processors, tries };
        (!again).then_some(result)
    }
}

impl Running {
    /// Whether it has ended, or is ended here because its time is up.
    fn ended(&mut self, deadline: Duration) -> Result<Option<Ended>> {
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        // Not reaped yet: its number is still its own, and that of its group.
        if waitid(WaitId::Pid(self.group), options).context("cannot wait")?.is_some() {
            let processors = self.processors();
            let end = End::Status(self.sweep()?);
            return Ok(Some(Ended { end, processors }));
        }
        if self.looked.elapsed() < STEP.min(deadline) {
            return Ok(None);
        }
        self.looked = Instant::now();
        if self.clock.now() < deadline {
            return Ok(None);
        }
        let processors = self.processors();
        self.sweep()?;
        Ok(Some(Ended { end: End::Late, processors }))
    }

    /// The processor time so far. Zero on a kernel that does not report it.
    fn processors(&self) -> Duration {
        processor::time(self.child.id()).unwrap_or_default()
    }

    /// Kills everything that is left of the story's group, and reaps the story.
    fn sweep(&mut self) -> Result<ExitStatus> {
        // Refused only when nothing is left.
        let _killed = kill_process_group(self.group, Signal::KILL);
        self.child.wait().context("cannot wait for a story")
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // A runner that stops by an error leaves no story behind. One that has ended is
        // reaped, and its number may be somebody else's.
        if let Ok(None) = self.child.try_wait() {
            let _ended = self.sweep();
        }
    }
}

/// How many times as long a story may take as in an ordinary run: one that is asked for every
/// moment, or for a number of power cuts, boots a machine for each of them.
fn patience() -> u32 {
    if draws_all() || std::env::var_os(CUTS).is_some() { 4 } else { 1 }
}

fn outcome(end: &End, log: &Path, deadline: Duration) -> Outcome {
    match end {
        End::Late => Outcome::Failed(format!("killed at its deadline, {} s", deadline.as_secs())),
        End::Status(status) if status.success() => Outcome::Passed,
        End::Status(status) if status.code() == Some(i32::from(SKIPPED)) => {
            let output = last(log, SHOWN).unwrap_or_default();
            let output = String::from_utf8_lossy(&output);
            let reason = output.lines().rev().find_map(|line| line.strip_prefix("skipped: "));
            Outcome::Skipped(reason.unwrap_or("without a reason").to_owned())
        }
        End::Status(status) => Outcome::Failed(status.to_string()),
    }
}

/// The end of a file, at most so many bytes.
fn last(path: &Path, most: u64) -> io::Result<Vec<u8>> {
    use std::io::{Seek as _, SeekFrom};
    let mut file = File::open(path)?;
    let length = file.metadata()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(most)))?;
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SUITE: Suite =
        Suite { name: "fake", retries: 1, deadline: Duration::from_secs(60), per_processor: 1 };

    const fn fake(name: &'static str) -> Story {
        Story::new("fake::x", name, || Ok(()))
    }

    /// A runner whose stories are the scripts of these names.
    fn run(suite: Suite, stories: &[(&'static str, &str)], dir: &Path) -> Report {
        run_until(None, suite, stories, dir)
    }

    fn run_until(
        until: Option<Instant>,
        suite: Suite,
        stories: &[(&'static str, &str)],
        dir: &Path,
    ) -> Report {
        let launch = |story: &Story, _turn: Turn| {
            let script = stories.iter().find(|(name, _)| story.name() == format!("x::{name}"));
            let mut command = Command::new("sh");
            command.current_dir(dir).args(["-c", script.unwrap().1]);
            command
        };
        let show = |_line: &str| ();
        let keep = |_report: &Report| ();
        let logs = dir.join("logs");
        let runner =
            Runner { suite, places: 2, until, logs, launch: &launch, show: &show, keep: &keep };
        let all: Vec<Story> = stories.iter().map(|(name, _)| fake(name)).collect();
        let mut report = runner.run(&all).unwrap();
        report.stories.sort_by(|one, other| one.name.cmp(&other.name));
        report
    }

    /// Whether the process whose number stands in a file runs.
    ///
    /// The runner signals and does not wait for what is not its child. A process that was
    /// killed runs until the kernel schedules it, so it has some time to end here, which
    /// is far less than what the scripts sleep.
    fn lives(file: &Path) -> bool {
        let number = fs::read_to_string(file).unwrap();
        let stat = PathBuf::from(format!("/proc/{}/stat", number.trim()));
        // One that has ended stays for a moment, until its new parent looks.
        let runs = || fs::read_to_string(&stat).is_ok_and(|stat| !stat.contains(") Z "));
        let began = Instant::now();
        while runs() && began.elapsed() < Duration::from_secs(60) {
            thread::sleep(Duration::from_millis(10));
        }
        runs()
    }

    #[test]
    fn each_story_ends_as_it_ends() {
        let dir = tempfile::tempdir().unwrap();
        let scripts = [
            ("a", "exit 0"),
            ("b", "echo why; exit 3"),
            ("c", "echo; echo 'skipped: no card'; exit 77"),
            ("d", "[ -e tried ] || { touch tried; exit 1; }"),
        ];
        let report = run(SUITE, &scripts, dir.path());
        let outcomes: Vec<_> =
            report.stories.iter().map(|result| (&result.outcome, result.tries)).collect();
        let failed = Outcome::Failed("exit status: 3".to_owned());
        let skipped = Outcome::Skipped("no card".to_owned());
        assert_eq!(
            outcomes,
            [(&Outcome::Passed, 1), (&failed, 2), (&skipped, 1), (&Outcome::Flaky, 2)]
        );
        assert_eq!((report.passed(), report.failed()), (2, 1));
        assert_eq!(fs::read_to_string(dir.path().join("logs/x.b.2.log")).unwrap(), "why\n");
    }

    #[test]
    fn a_story_that_hangs_is_killed_at_its_deadline_with_what_it_started() {
        let dir = tempfile::tempdir().unwrap();
        // A child that a story does not wait for, as QEMU is one, and a stubborn story.
        let hangs = "echo $$ > story; sleep 600 & echo $! > machine; trap '' TERM; wait; wait";
        let suite = Suite { retries: 0, deadline: Duration::from_millis(500), ..SUITE };
        let began = Instant::now();
        let report = run(suite, &[("hangs", hangs), ("quick", "exit 0")], dir.path());
        let how = "killed at its deadline, 0 s".to_owned();
        assert_eq!(report.stories[0].outcome, Outcome::Failed(how));
        assert_eq!(report.stories[1].outcome, Outcome::Passed);
        for file in ["story", "machine"] {
            assert!(!lives(&dir.path().join(file)), "the {file} outlives its deadline");
        }
        assert!(began.elapsed() < Duration::from_secs(60), "the deadline was not checked");
    }

    #[test]
    fn no_story_begins_when_the_time_of_the_run_is_over() {
        let dir = tempfile::tempdir().unwrap();
        let report = run_until(Some(Instant::now()), SUITE, &[("a", "touch ran")], dir.path());
        assert_eq!(report.stories[0].outcome, Outcome::Skipped(NO_TIME.to_owned()));
        assert!(report.stories[0].tries == 0 && !dir.path().join("ran").exists());
    }

    #[test]
    fn a_run_that_stops_by_an_error_has_kept_the_results_before_it() {
        let dir = tempfile::tempdir().unwrap();
        // The second story cannot be started.
        let launch = |story: &Story, _turn: Turn| match story.name() == "x::first" {
            true => Command::new("true"),
            false => Command::new("/nonexistent"),
        };
        let kept = std::cell::RefCell::new(Report::default());
        let keep = |report: &Report| drop(kept.replace(report.clone()));
        let (logs, show) = (dir.path().join("logs"), |_line: &str| ());
        let runner = Runner {
            suite: SUITE,
            places: 2,
            until: None,
            logs,
            launch: &launch,
            show: &show,
            keep: &keep,
        };
        let [first, second] = ["first", "second"].map(|name| fake(name).cluster());
        let error = runner.run(&[first, second]).unwrap_err();
        assert!(error.to_string().contains("cannot start x::second"), "{error}");
        let kept = kept.into_inner();
        assert_eq!((kept.stories.len(), kept.passed()), (1, 1), "{kept:?}");
        assert_eq!(kept.stories[0].name, "x::first");
    }

    #[test]
    fn the_processor_time_of_a_story_has_that_of_its_programs() {
        let dir = tempfile::tempdir().unwrap();
        // Some tenths of a second in a program that the story waits for.
        let busy = "sh -c 'i=0; while [ $i -lt 400000 ]; do i=$((i+1)); done'; true";
        let report = run(SUITE, &[("busy", busy), ("idle", "sleep 0.2")], dir.path());
        let [busy, idle] = [0, 1].map(|at| report.stories[at].processor_seconds);
        assert!(busy > 0.05 && busy > 3.0 * idle, "busy {busy} s, idle {idle} s");
    }

    #[test]
    fn what_a_story_leaves_behind_ends_with_it() {
        let dir = tempfile::tempdir().unwrap();
        let script = "sleep 600 & echo $! > left; echo \"$TMPDIR\" > files; \
                      stat --format=%a \"$TMPDIR\" > mode; touch \"$TMPDIR/x\"";
        let report = run(SUITE, &[("leaves", script)], dir.path());
        assert_eq!(report.passed(), 1);
        assert!(!lives(&dir.path().join("left")));
        let files = fs::read_to_string(dir.path().join("files")).unwrap();
        assert!(!Path::new(files.trim()).exists(), "temporary files are left");
        let mode = fs::read_to_string(dir.path().join("mode")).unwrap();
        assert_eq!(mode.trim(), "711", "programs of other users pass through it");
    }
}
