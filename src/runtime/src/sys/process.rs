//! Child processes; all of them are started here.
//!
//! A child gets only the environment and the arguments that are named here; its output
//! goes line by line into the log tree; it dies with the node, or when its [`Child`] is
//! dropped.
//!
//! ```text
//! Command --spawn--> Child --wait------------> Exit
//!    |                 +----terminate(grace)-> Exit   SIGTERM, then SIGKILL
//!    |                 +----drop-------------> SIGKILL
//!    +------run------> output, or Error::Failed with the last lines
//! ```
//!
//! Invariants:
//! - No child outlives the node: the kernel kills it when the thread that
//!   started it ends, and that thread ends with the process only.
//! - A child never waits for its output to be read, and never inherits a
//!   descriptor beyond the standard three.
//! - No wait for a child is one for the processes that it leaves behind.

use std::collections::{BTreeMap, VecDeque};
use std::ffi::{OsStr, OsString};
use std::fmt;
use std::io;
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::PathBuf;
use std::pin::pin;
use std::process::{ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::time::Duration;

use rustix::fs::Mode;
use rustix::param::clock_ticks_per_second;
use rustix::process::{Pid, Signal, getpid, getppid, set_parent_process_death_signal};
use tokio::io::{
    AsyncBufReadExt as _, AsyncRead, AsyncReadExt as _, AsyncWriteExt as _, BufReader,
};
use tokio::sync::oneshot;
use tokio::task::JoinSet;
use tokio::time::timeout;
use zeroize::Zeroizing;

use super::confine::{self, Confinement};
use super::limits::{Limits, Opened, Refused};
use crate::logtree::{self, Body, Sink};

/// Bytes of one line of output; a longer one is split.
const LINE_MAX: u64 = 16 * 1024;
/// Bytes of standard output that [`Command::run`] keeps.
const OUTPUT_MAX: usize = 1024 * 1024;
/// Lines kept for the error message of a failed program.
const TAIL_MAX: usize = 12;
/// How many of them the message quotes.
const QUOTED_MAX: usize = 3;
/// Characters of each quoted line: an error message stays short.
const QUOTE_MAX: usize = 300;
/// How long what is left in the pipes may take after the exit. A grandchild may hold them open
/// without end.
const DRAIN_DEADLINE: Duration = Duration::from_secs(1);

/// Why a program did not run, or did not do its work.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// It could not be started.
    #[error("cannot start {}", program.display())]
    Start {
        /// Which one.
        program: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Its control group does not exist.
    #[error("cannot start {} in the control group {}", program.display(), cgroup.display())]
    Cgroup {
        /// Which one.
        program: PathBuf,
        /// The directory of the group.
        cgroup: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// It cannot be confined.
    #[error("cannot confine {}", program.display())]
    Confine {
        /// Which one.
        program: PathBuf,
        /// Why.
        source: Box<confine::Error>,
    },
    /// It runs, and the kernel does not report how it ended.
    #[error("cannot wait for {}", program.display())]
    Wait {
        /// Which one.
        program: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// It did not read its input.
    #[error("cannot write to {}", program.display())]
    Write {
        /// Which one.
        program: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// It ended with an error.
    #[error("{} {exit}{}", program.display(), output(tail))]
    Failed {
        /// Which one.
        program: PathBuf,
        /// How it ended.
        exit: Exit,
        /// The last lines of its output.
        tail: Vec<Body>,
    },
}

fn output(tail: &[Body]) -> String {
    let last = &tail[tail.len().saturating_sub(QUOTED_MAX)..];
    let quoted: Vec<String> =
        last.iter().map(|body| body.to_string().chars().take(QUOTE_MAX).collect()).collect();
    match &quoted[..] {
        [] => ", without output".to_owned(),
        lines => format!(": {}", lines.join(" / ")),
    }
}

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exit(ExitStatus);

impl Exit {
    /// Whether it ended with status 0.
    #[must_use]
    pub fn is_success(self) -> bool {
        self.0.success()
    }

    /// Its exit status, unless a signal ended it.
    #[must_use]
    pub fn code(self) -> Option<i32> {
        self.0.code()
    }

    /// The number of the signal that ended it.
    #[must_use]
    pub fn signal(self) -> Option<i32> {
        self.0.signal()
    }
}

impl fmt::Display for Exit {
    /// In words, to be read after the name of the program.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.0.code(), self.0.signal()) {
            (Some(code), _) => write!(f, "ended with status {code}"),
            (None, Some(signal)) => match signal_name(signal) {
                Some(name) => write!(f, "was killed by signal {signal} ({name})"),
                None => write!(f, "was killed by signal {signal}"),
            },
            (None, None) => f.write_str("ended in an unknown way"),
        }
    }
}

fn signal_name(signal: i32) -> Option<&'static str> {
    const NAMED: [(Signal, &str); 9] = [
        (Signal::HUP, "SIGHUP"),
        (Signal::INT, "SIGINT"),
        (Signal::ILL, "SIGILL"),
        (Signal::ABORT, "SIGABRT"),
        (Signal::BUS, "SIGBUS"),
        (Signal::KILL, "SIGKILL"),
        (Signal::SEGV, "SIGSEGV"),
        (Signal::PIPE, "SIGPIPE"),
        (Signal::TERM, "SIGTERM"),
    ];
    NAMED.iter().find(|(known, _)| known.as_raw() == signal).map(|(_, name)| *name)
}

/// A program that is to be started.
#[derive(Debug)]
#[must_use = "a command does nothing until it is started"]
pub struct Command {
    program: PathBuf,
    args: Vec<OsString>,
    env: Vec<(OsString, OsString)>,
    directory: Option<PathBuf>,
    input: Option<Input>,
    sink: Option<Sink>,
    limits: Limits,
}

/// The input of a child: possibly a secret, so it is wiped, and never printed.
struct Input(Zeroizing<Vec<u8>>);

impl fmt::Debug for Input {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("…")
    }
}

impl Command {
    /// `program` is a path; `PATH` is not searched. The environment is empty, the input
    /// is `/dev/null`, the output is discarded.
    pub fn new(program: impl Into<PathBuf>) -> Self {
        Self {
            program: program.into(),
            args: Vec::new(),
            env: Vec::new(),
            directory: None,
            input: None,
            sink: None,
            limits: Limits::default(),
        }
    }

    /// Adds an argument.
    pub fn arg(mut self, arg: impl AsRef<OsStr>) -> Self {
        self.args.push(arg.as_ref().to_owned());
        self
    }

    /// Adds arguments.
    pub fn args<A: AsRef<OsStr>>(mut self, args: impl IntoIterator<Item = A>) -> Self {
        self.args.extend(args.into_iter().map(|arg| arg.as_ref().to_owned()));
        self
    }

    /// Sets a variable of the environment.
    pub fn env(mut self, name: impl AsRef<OsStr>, value: impl AsRef<OsStr>) -> Self {
        self.env.push((name.as_ref().to_owned(), value.as_ref().to_owned()));
        self
    }

    /// Sets the working directory; without it, `/`.
    pub fn directory(mut self, path: impl Into<PathBuf>) -> Self {
        self.directory = Some(path.into());
        self
    }

    /// The program's standard input; wiped from memory afterwards.
    pub fn input(mut self, bytes: Vec<u8>) -> Self {
        self.input = Some(Input(Zeroizing::new(bytes)));
        self
    }

    /// The sink for its output lines: `ctx.sink("etcd", Parser::Json)`.
    pub fn log(mut self, sink: Sink) -> Self {
        self.sink = Some(sink);
        self
    }

    /// Starts it in this control group, the path of an existing directory below
    /// `/sys/fs/cgroup`; without this, it starts in the node's own. Its first memory is
    /// then already the group's.
    pub fn cgroup(mut self, path: impl Into<PathBuf>) -> Self {
        self.limits.cgroup = Some(path.into());
        self
    }

    /// Its place in the order of the OOM killer, from -1000 (never killed) to 1000 (killed
    /// first); without this, the node's own.
    pub fn oom_score_adj(mut self, score: i16) -> Self {
        self.limits.oom_score_adj = Some(score);
        self
    }

    /// The number of descriptors that it may have open, soft and hard; without this, the
    /// node's own.
    pub fn open_files(mut self, count: u64) -> Self {
        self.limits.open_files = Some(count);
        self
    }

    /// The bits that no file or socket of its making has, as `umask` takes them; without this,
    /// the node's own.
    pub fn umask(mut self, bits: u32) -> Self {
        self.limits.umask = Some(Mode::from_raw_mode(bits));
        self
    }

    /// Its confinement; without it, the rights of the node.
    pub fn confined(mut self, confinement: Confinement) -> Self {
        self.limits.confinement = Some(Box::new(confinement));
        self
    }

    /// Starts it.
    ///
    /// # Errors
    ///
    /// [`Error::Start`], [`Error::Cgroup`] when its control group does not exist,
    /// [`Error::Confine`], and [`Error::Write`] when it does not take its input.
    pub async fn spawn(self) -> Result<Child, Error> {
        let (mut child, stdout) = self.start(Stdout::Logged).await?;
        debug_assert!(stdout.is_none(), "standard output is read by the child's readers");
        child.feed().await?;
        Ok(child)
    }

    /// Runs it to its end and returns what it wrote to standard output, at most
    /// a mebibyte. Standard error goes to the log. Dropping this kills it.
    ///
    /// # Errors
    ///
    /// [`Error::Failed`] unless it ends with status 0.
    pub async fn run(self) -> Result<Vec<u8>, Error> {
        let (mut child, stdout) = self.start(Stdout::Kept).await?;
        let mut output = Vec::new();
        let drain = async {
            let Some(mut stdout) = stdout else { return };
            let mut head = (&mut stdout).take(OUTPUT_MAX as u64);
            // A broken pipe is the end of the output; the exit status has the cause.
            let _end = head.read_to_end(&mut output).await;
            let _end = tokio::io::copy(&mut stdout, &mut tokio::io::sink()).await;
        };
        let feed = child.feed();
        let (exit, fed) = {
            let mut piped = pin!(async { tokio::join!(feed, drain).0 });
            tokio::select! {
                // Cancel-safe: what goes through the pipes goes on below.
                fed = &mut piped => (child.wait().await, fed),
                // Cancel-safe per its docs.
                exit = child.wait() => {
                    let fed = timeout(DRAIN_DEADLINE, piped).await;
                    (exit, fed.unwrap_or(Ok(())))
                }
            }
        };
        let exit = exit?;
        if !exit.is_success() {
            return Err(Error::Failed { program: child.program.clone(), exit, tail: child.tail() });
        }
        fed?;
        Ok(output)
    }

    async fn start(
        self,
        stdout: Stdout,
    ) -> Result<(Child, Option<tokio::process::ChildStdout>), Error> {
        let Self { program, args, env, directory, input, sink, limits } = self;
        let limits = limits.open(&program).map_err(|refused| match refused {
            Refused::NoGroup { cgroup, source } => {
                Error::Cgroup { program: program.clone(), cgroup, source }
            }
            Refused::Confinement(source) => Error::Confine { program: program.clone(), source },
        })?;
        #[expect(clippy::disallowed_methods, reason = "this is the one way to start a child")]
        let mut command = std::process::Command::new(&program);
        command
            .args(args)
            .env_clear()
            .envs(env)
            .current_dir(directory.as_deref().unwrap_or("/".as_ref()))
            .stdin(if input.is_some() { Stdio::piped() } else { Stdio::null() })
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            // A signal for the node's terminal is not one for its children.
            .process_group(0);
        let failed = |source| Error::Start { program: program.clone(), source };
        let mut inner = spawn_from_lasting_thread(command, limits).await.map_err(failed)?;
        let listed = inner.id().zip(sink.as_ref()).map(|(id, sink)| Listed::new(id, sink.name()));

        let tail = Arc::<Mutex<VecDeque<Body>>>::default();
        let mut readers = JoinSet::new();
        if let Some(stderr) = inner.stderr.take() {
            readers.spawn(read_lines(stderr, sink.clone(), Arc::clone(&tail)));
        }
        let kept = match stdout {
            Stdout::Kept => inner.stdout.take(),
            Stdout::Logged => {
                if let Some(stdout) = inner.stdout.take() {
                    readers.spawn(read_lines(stdout, sink, Arc::clone(&tail)));
                }
                None
            }
        };
        Ok((Child { program, inner, input, readers, tail, listed }, kept))
    }
}

/// The handling of standard output.
#[derive(Clone, Copy)]
enum Stdout {
    Logged,
    Kept,
}

/// A running process. Dropping it kills it.
#[derive(Debug)]
pub struct Child {
    program: PathBuf,
    inner: tokio::process::Child,
    input: Option<Input>,
    /// Aborted on drop; they end by themselves with the pipes.
    readers: JoinSet<()>,
    tail: Arc<Mutex<VecDeque<Body>>>,
    /// Until it has been waited for: then the kernel may give its number to another.
    listed: Option<Listed>,
}

impl Child {
    /// Its process ID, until it has been waited for.
    #[must_use]
    pub fn id(&self) -> Option<u32> {
        self.inner.id()
    }

    /// The last lines that it wrote, oldest first.
    #[must_use]
    pub fn tail(&self) -> Vec<Body> {
        let tail = self.tail.lock().unwrap_or_else(PoisonError::into_inner);
        tail.iter().cloned().collect()
    }

    /// Waits for its end, and for its last lines to be in the log. Cancel-safe.
    ///
    /// # Errors
    ///
    /// [`Error::Wait`] when the kernel does not report its end.
    pub async fn wait(&mut self) -> Result<Exit, Error> {
        let status = self.inner.wait().await;
        let status =
            status.map_err(|source| Error::Wait { program: self.program.clone(), source })?;
        self.listed = None;
        let drained = async { while self.readers.join_next().await.is_some() {} };
        // Late lines of a grandchild are not worth waiting for.
        let _late = timeout(DRAIN_DEADLINE, drained).await;
        Ok(Exit(status))
    }

    /// The error to end with when the program should not have ended.
    #[must_use]
    pub fn failed(&self, exit: Exit) -> Error {
        Error::Failed { program: self.program.clone(), exit, tail: self.tail() }
    }

    /// Asks it to end (SIGTERM), kills it if it has not within `grace`, and
    /// waits for it.
    ///
    /// # Errors
    ///
    /// [`Error::Wait`] when the kernel does not report its end.
    pub async fn terminate(&mut self, grace: Duration) -> Result<Exit, Error> {
        self.signal(Signal::TERM);
        // Its last lines have a deadline of their own.
        if timeout(grace, self.inner.wait()).await.is_err() {
            tracing::warn!(
                program = %self.program.display(),
                ?grace,
                "did not end in time, killed"
            );
            self.signal(Signal::KILL);
        }
        self.wait().await
    }

    /// Sends `signal`, if it still runs.
    pub fn signal(&self, signal: Signal) {
        let id = self.inner.id().and_then(|id| i32::try_from(id).ok()).and_then(Pid::from_raw);
        if let Some(id) = id {
            // It may end at any moment: that is not an error.
            let _gone = rustix::process::kill_process(id, signal);
        }
    }

    /// Writes its input, once.
    fn feed(&mut self) -> impl Future<Output = Result<(), Error>> + use<> {
        let (input, stdin) = (self.input.take(), self.inner.stdin.take());
        let program = self.program.clone();
        async move {
            let (Some(input), Some(mut stdin)) = (input, stdin) else { return Ok(()) };
            let written = async {
                stdin.write_all(&input.0).await?;
                stdin.shutdown().await
            };
            written.await.map_err(|source| Error::Write { program, source })
        }
    }
}

/// The children with a log that run, by process ID: the dotted name of that log.
static RUNNING: Mutex<BTreeMap<u32, String>> = Mutex::new(BTreeMap::new());

/// The place of a child in [`RUNNING`].
#[derive(Debug)]
struct Listed(u32);

impl Listed {
    fn new(id: u32, name: &str) -> Self {
        RUNNING.lock().unwrap_or_else(PoisonError::into_inner).insert(id, name.to_owned());
        Self(id)
    }
}

impl Drop for Listed {
    fn drop(&mut self) {
        RUNNING.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.0);
    }
}

/// The resources that a process uses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Load {
    /// The dotted name of its log.
    pub name: String,
    /// Its process ID.
    pub id: u32,
    /// Processor time since it started, of all its threads, but not of its children.
    pub cpu: Duration,
    /// Resident memory in bytes, with what it shares with other processes.
    pub memory: u64,
}

/// The resources of this process, under the name `own`, and of each of its running children
/// that has a log. A child that has just ended is left out.
#[must_use]
pub fn loads(own: &str) -> Vec<Load> {
    let running = RUNNING.lock().unwrap_or_else(PoisonError::into_inner).clone();
    let all = std::iter::once((std::process::id(), own.to_owned())).chain(running);
    let load = |(id, name): (u32, String)| {
        let stat = std::fs::read_to_string(format!("/proc/{id}/stat")).ok()?;
        let memory = resident(&id.to_string())?.saturating_mul(1024);
        Some(Load { name, id, cpu: parse_cpu(&stat)?, memory })
    };
    all.filter_map(load).collect()
}

/// User and system time: the 14th and the 15th field. The second is the program's name, which
/// may have spaces and parentheses in it.
fn parse_cpu(stat: &str) -> Option<Duration> {
    /// Fields between the name and the first of both.
    const BEFORE: usize = 11;
    let (_, rest) = stat.rsplit_once(')')?;
    let mut ticks = rest.split_ascii_whitespace().skip(BEFORE).map(str::parse::<u64>);
    let ticks = ticks.next()?.ok()?.checked_add(ticks.next()?.ok()?)?;
    let second = u32::try_from(clock_ticks_per_second()).ok()?;
    let rest = u32::try_from(ticks.checked_rem(u64::from(second))?).ok()?;
    let whole = Duration::from_secs(ticks / u64::from(second));
    whole.checked_add(Duration::from_secs(1) * rest / second)
}

/// Every process whose program has this name.
#[must_use]
pub fn find(name: &str) -> Vec<Pid> {
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    entries
        .filter(|entry| {
            let command = std::fs::read_to_string(entry.path().join("comm"));
            command.is_ok_and(|command| command.trim_end() == name)
        })
        .filter_map(|entry| Pid::from_raw(entry.file_name().to_str()?.parse().ok()?))
        .collect()
}

/// Resident memory of a process in KiB; `None` where it has just ended. The process is
/// a number, or `self`.
#[must_use]
pub fn resident(process: &str) -> Option<u64> {
    parse_resident(&std::fs::read_to_string(format!("/proc/{process}/status")).ok()?)
}

fn parse_resident(status: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    line.trim().strip_suffix(" kB")?.parse().ok()
}

async fn read_lines(
    pipe: impl AsyncRead + Unpin,
    sink: Option<Sink>,
    tail: Arc<Mutex<VecDeque<Body>>>,
) {
    let mut pipe = BufReader::new(pipe);
    let mut line = Vec::new();
    loop {
        line.clear();
        match (&mut pipe).take(LINE_MAX).read_until(b'\n', &mut line).await {
            // A broken pipe is an end like any other.
            Ok(0) | Err(_) => return,
            Ok(_) => {}
        }
        let body = match &sink {
            Some(sink) => sink.line(&line),
            None => logtree::text(&line).map(|text| Body::Raw(text.into_owned())),
        };
        let Some(body) = body else { continue };
        let mut tail = tail.lock().unwrap_or_else(PoisonError::into_inner);
        if tail.len() == TAIL_MAX {
            tail.pop_front();
        }
        tail.push_back(body);
    }
}

/// A request to the lasting thread to start a program.
struct Request {
    command: std::process::Command,
    limits: Opened,
    runtime: tokio::runtime::Handle,
    reply: oneshot::Sender<io::Result<tokio::process::Child>>,
}

/// Starts `command` from a thread that lives as long as the process.
///
/// The kernel sends the death signal when the *thread* that forked ends, and
/// the threads of a runtime come and go.
async fn spawn_from_lasting_thread(
    command: std::process::Command,
    limits: Opened,
) -> io::Result<tokio::process::Child> {
    let (reply, answer) = oneshot::channel();
    let request = Request { command, limits, runtime: tokio::runtime::Handle::current(), reply };
    hand_over(request)?;
    answer.await.map_err(|_closed| gone())?
}

/// Gives a request to the lasting thread; makes one if there is none, or none any more.
fn hand_over(request: Request) -> io::Result<()> {
    static REQUESTS: Mutex<Option<mpsc::Sender<Request>>> = Mutex::new(None);
    let mut requests = REQUESTS.lock().unwrap_or_else(PoisonError::into_inner);
    let request = match requests.as_ref() {
        None => request,
        Some(thread) => match thread.send(request) {
            Ok(()) => return Ok(()),
            Err(mpsc::SendError(request)) => request,
        },
    };
    let (thread, queue) = mpsc::channel::<Request>();
    let builder = std::thread::Builder::new().name("starter".to_owned()).stack_size(64 * 1024);
    builder.spawn(move || {
        for Request { command, limits, runtime, reply } in queue {
            let _in_runtime = runtime.enter();
            // The caller may have gone: then the child is dropped, and killed.
            let _child = reply.send(start(command, limits));
        }
    })?;
    thread.send(request).map_err(|_closed| gone())?;
    *requests = Some(thread);
    Ok(())
}

fn gone() -> io::Error {
    io::Error::other("the thread that starts processes is gone")
}

fn start(mut command: std::process::Command, limits: Opened) -> io::Result<tokio::process::Child> {
    let parent = getpid();
    let before_exec = move || {
        limits.apply()?;
        // After a change of the user, by which the kernel forgets the signal.
        set_parent_process_death_signal(Some(Signal::KILL))?;
        // The parent may have died before the death signal was set.
        if getppid() != Some(parent) {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        Ok(())
    };
    #[expect(unsafe_code, reason = "what runs between fork and exec cannot be set otherwise")]
    // SAFETY: the closure only makes system calls and allocates nothing, so it
    // may run in the child of a process with several threads.
    unsafe {
        command.pre_exec(before_exec);
    }
    let mut command = tokio::process::Command::from(command);
    command.kill_on_drop(true).spawn()
}

#[cfg(test)]
#[path = "process_tests.rs"]
mod tests;
