//! The command that starts a child process: its program, arguments, environment, limits and
//! confinement.

use std::ffi::{OsStr, OsString};
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::pin::pin;
use std::process::Stdio;

use rustix::fs::Mode;
use tokio::io::AsyncReadExt as _;
use tokio::time::timeout;

use super::child::{Child, DRAIN_DEADLINE, Input};
use super::error::Error;
use super::load::Listed;
use super::output::Readers;
use super::starter;
use crate::logtree::Sink;
use crate::sys::confine::Confinement;
use crate::sys::limits::{Limits, Refused};

/// Bytes of standard output that [`Command::run`] keeps.
const OUTPUT_MAX: usize = 1024 * 1024;

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
        self.input = Some(Input::new(bytes));
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

    /// The number of processes and threads that its user may have, soft and hard, which holds for
    /// every program that it starts, too; without this, the node's own, which is half of what the
    /// memory of the machine allows.
    pub fn processes(mut self, count: u64) -> Self {
        self.limits.processes = Some(count);
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
            return Err(child.failed(exit));
        }
        fed?;
        Ok(output)
    }

    pub(super) async fn start(
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
        let mut inner = starter::spawn(command, limits).await.map_err(failed)?;
        let listed = inner.id().zip(sink.as_ref()).map(|(id, sink)| Listed::new(id, sink.name()));

        let mut readers = Readers::default();
        if let Some(stderr) = inner.stderr.take() {
            readers.read(stderr, sink.clone());
        }
        let kept = match stdout {
            Stdout::Kept => inner.stdout.take(),
            Stdout::Logged => {
                if let Some(stdout) = inner.stdout.take() {
                    readers.read(stdout, sink);
                }
                None
            }
        };
        Ok((Child { program, inner, input, readers, listed }, kept))
    }
}

/// The handling of standard output.
#[derive(Clone, Copy)]
pub(super) enum Stdout {
    Logged,
    Kept,
}
