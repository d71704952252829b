//! A running child process: its input, its end and its last lines.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use rustix::process::{Pid, Signal};
use tokio::io::AsyncWriteExt as _;
use tokio::time::timeout;
use zeroize::Zeroizing;

use super::error::Error;
use super::exit::Exit;
use super::load::Listed;
use super::output::Readers;
use crate::logtree::Body;

/// How long what is left in the pipes may take after the exit. A grandchild may hold them open
/// without end.
pub(super) const DRAIN_DEADLINE: Duration = Duration::from_secs(1);

/// The input of a child: possibly a secret, so it is wiped, and never printed.
pub(super) struct Input(Zeroizing<Vec<u8>>);

impl Input {
    pub(super) fn new(bytes: Vec<u8>) -> Self {
        Self(Zeroizing::new(bytes))
    }
}

impl fmt::Debug for Input {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("…")
    }
}

/// A running process. Dropping it kills it.
#[derive(Debug)]
pub struct Child {
    pub(super) program: PathBuf,
    pub(super) inner: tokio::process::Child,
    pub(super) input: Option<Input>,
    pub(super) readers: Readers,
    /// Until it has been waited for: then the kernel may give its number to another.
    pub(super) listed: Option<Listed>,
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
        self.readers.tail()
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
        // Late lines of a grandchild are not worth waiting for.
        let _late = timeout(DRAIN_DEADLINE, self.readers.ended()).await;
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
    pub(super) fn feed(&mut self) -> impl Future<Output = Result<(), Error>> + use<> {
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
