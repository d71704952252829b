//! `kubectl`, as a person uses it beside a machine of a story.

use std::io::{self, BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use polis_qemu::deadline::{Deadline, receive};
use polis_qemu::operator::finished;
use polis_tests::workspace;

use super::{KUBECTL, PART};
use crate::fleet::ask_until;
use crate::owner::Owner;
use crate::world::{SOON, World};

/// In an answer of the access proxy: the API server took no connection, or ended it.
const BUSY: &str = "does not answer";

/// `kubectl` with the access that a kubeconfig gives.
pub(super) struct Kubectl {
    program: PathBuf,
    kubeconfig: PathBuf,
}

impl Kubectl {
    /// The program that was built beside the image.
    pub(super) fn new(kubeconfig: PathBuf) -> Self {
        Self { program: workspace().join("target/go/bin/kubectl"), kubeconfig }
    }

    /// With the access that the owner gets from the cluster.
    pub(super) fn of(world: &World, owner: &Owner) -> Result<Self> {
        let kubeconfig = world.path("kubeconfig");
        owner.run(&["kubernetes", "kubeconfig", "-o", &kubeconfig.display().to_string()])?;
        Ok(Self::new(kubeconfig))
    }

    /// Runs it with `input` for at most [`PART`], in the time of the machines; returns its output.
    pub(super) fn run(&self, args: &[&str], input: &str) -> Result<String> {
        let mut child = self
            .command(args)
            .stdin(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .context("cannot start kubectl")?;
        let mut stdin = child.stdin.take().context("kubectl has no input")?;
        stdin.write_all(input.as_bytes()).context("kubectl does not read its input")?;
        drop(stdin);
        let ended = finished(child, Some(Deadline::within(PART)));
        let ended = ended.context("cannot wait for kubectl")?;
        ensure!(ended.success, "kubectl {args:?} ended with {}: {}", ended.status, ended.output);
        Ok(ended.printed)
    }

    /// Waits until these objects, with options that say where they are, are Ready.
    pub(super) fn ready(&self, what: &[&str]) -> Result<()> {
        self.run(&[&["wait", "--for=condition=Ready", KUBECTL], what].concat(), "").map(drop)
    }

    /// The answer of the API at this path.
    pub(super) fn raw(&self, path: &str) -> Result<String> {
        self.run(&["get", "--raw", path], "")
    }

    /// Waits until the API says that it serves and that its nodes are there.
    pub(super) fn serves(&self) -> Result<()> {
        ask_until("a ready API", || Ok(self.raw("/readyz").ok()))?;
        self.ready(&["nodes", "--all"])
    }

    /// Applies objects; again where the API server is too busy to take the call, which may be
    /// repeated: for at most so long, in the time of the machines.
    #[expect(
        clippy::disallowed_methods,
        reason = "the rule is for the node; this runs on the host"
    )]
    pub(super) fn apply(&self, objects: &str) -> Result<()> {
        let mut deadline = Deadline::within(SOON);
        loop {
            match self.run(&["apply", "--filename", "-"], objects) {
                Err(error) if error.to_string().contains(BUSY) && !deadline.is_over() => {
                    thread::sleep(Duration::from_secs(1));
                }
                applied => return applied.map(drop),
            }
        }
    }

    /// Deletes objects, and waits until they are gone: at most so long, in the time of the
    /// machines.
    pub(super) fn delete(&self, what: &[&str], within: Duration) -> Result<()> {
        self.start(&[&["delete", KUBECTL], what].concat())?.succeeds(within)
    }

    /// Starts a command that goes on until it is cut off, or dropped.
    pub(super) fn start(&self, args: &[&str]) -> Result<Running> {
        let mut child = self
            .command(args)
            .stdin(Stdio::null())
            .stderr(Stdio::inherit())
            .spawn()
            .context("cannot start kubectl")?;
        let lines = lines(child.stdout.take().context("kubectl has no output")?)?;
        Ok(Running { child, lines, what: args.join(" ") })
    }

    #[expect(
        clippy::disallowed_methods,
        reason = "the rule is for the node; this runs on the host"
    )]
    fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(&self.program);
        command.arg("--kubeconfig").arg(AsRef::<Path>::as_ref(&self.kubeconfig));
        command.args(args).stdout(Stdio::piped());
        command
    }
}

/// A `kubectl` that goes on.
pub(super) struct Running {
    child: Child,
    lines: Receiver<String>,
    what: String,
}

impl Running {
    /// Waits for a line of its output that contains `text`.
    pub(super) fn says(&self, text: &str, within: Duration) -> Result<()> {
        while let Some(line) = self.next(within, text)? {
            if line.contains(text) {
                return Ok(());
            }
        }
        bail!("kubectl {} ended before {text:?}", self.what)
    }

    /// Waits until it has closed its output, as it does at its end.
    pub(super) fn ends(&self, within: Duration) -> Result<()> {
        while self.next(within, "the end")?.is_some() {}
        Ok(())
    }

    /// The same, and its status must be success.
    fn succeeds(mut self, within: Duration) -> Result<()> {
        self.ends(within)?;
        let status = self.child.wait().context("cannot wait for kubectl")?;
        ensure!(status.success(), "kubectl {} ended with {status}", self.what);
        Ok(())
    }

    /// Whether it ends within this time. Its lines so far are lost.
    pub(super) fn is_over(&self, within: Duration) -> bool {
        let end = Instant::now() + within;
        loop {
            match self.lines.recv_timeout(end.saturating_duration_since(Instant::now())) {
                Ok(_line) => {}
                Err(RecvTimeoutError::Timeout) => return false,
                Err(RecvTimeoutError::Disconnected) => return true,
            }
        }
    }

    /// Its next line; `None` at its end.
    fn next(&self, within: Duration, wanted: &str) -> Result<Option<String>> {
        match receive(&self.lines, within) {
            Ok(line) => Ok(Some(line)),
            Err(RecvTimeoutError::Disconnected) => Ok(None),
            Err(RecvTimeoutError::Timeout) => {
                bail!("kubectl {}: no {wanted:?} within {within:?}", self.what)
            }
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _gone = self.child.kill();
        let _status = self.child.wait();
    }
}

/// The lines of an output, until its end.
fn lines(output: ChildStdout) -> io::Result<Receiver<String>> {
    let (line, lines) = channel();
    thread::Builder::new().spawn(move || {
        for text in BufReader::new(output).lines().map_while(Result::ok) {
            if line.send(text).is_err() {
                return;
            }
        }
    })?;
    Ok(lines)
}
