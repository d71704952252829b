//! A story: a function, and the facts that the runner needs about it.

use std::fmt;
use std::future::Future;
use std::time::Duration;

use anyhow::{Context as _, Result};

/// Places of a story of several machines. Its machines are busy at different times, and
/// one that starves shows as a lost election.
const CLUSTER: u32 = 3;

/// The shared part of the stories of one binary.
#[derive(Clone, Copy, Debug)]
pub struct Suite {
    /// The name of the binary.
    pub name: &'static str,
    /// How often a story that failed runs again.
    pub retries: u32,
    /// Longest that a story may take, by the clock of deadlines.
    pub deadline: Duration,
    /// Places for each processor: one where machines are translated, more where stories
    /// mostly wait.
    pub per_processor: u32,
}

/// One story.
#[derive(Clone, Copy, Debug)]
pub struct Story {
    module: &'static str,
    function: &'static str,
    pub(crate) run: fn() -> Result<()>,
    /// Seconds that it usually takes. Decides the order, and nothing else.
    pub(crate) cost: u32,
    pub(crate) places: u32,
    pub(crate) sample: Option<Sample>,
    /// Its own deadline, in place of that of the suite.
    pub(crate) deadline: Option<Duration>,
}

/// Stories that show the same promise, or shares of one, of which an ordinary run draws some.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sample {
    /// What they show.
    pub of: &'static str,
    /// How many an ordinary run draws.
    pub drawn: usize,
}

impl Story {
    /// A story; [`crate::story!`] fills this in.
    #[must_use]
    pub const fn new(
        module: &'static str,
        function: &'static str,
        run: fn() -> Result<()>,
    ) -> Self {
        Self { module, function, run, cost: 1, places: 1, sample: None, deadline: None }
    }

    /// The same with a deadline of its own: a story that shows much with one machine.
    #[must_use]
    pub const fn at_most(self, deadline: Duration) -> Self {
        Self { deadline: Some(deadline), ..self }
    }

    /// The same, which usually takes so many seconds.
    #[must_use]
    pub const fn takes(self, seconds: u32) -> Self {
        Self { cost: seconds, ..self }
    }

    /// The same, with several machines that run at a time.
    #[must_use]
    pub const fn cluster(self) -> Self {
        Self { places: CLUSTER, ..self }
    }

    /// The same, as one of a sample: an ordinary run draws some of them, `--all` runs all.
    #[must_use]
    pub const fn one_of(self, sample: Sample) -> Self {
        Self { sample: Some(sample), ..self }
    }

    /// The same, which runs with `--all` alone, or by its name.
    #[must_use]
    pub const fn of_all(self) -> Self {
        self.one_of(Sample { of: self.module, drawn: 0 })
    }

    /// Its file and its function.
    #[must_use]
    pub fn name(&self) -> String {
        match self.module.split_once("::") {
            Some((_, file)) => format!("{file}::{}", self.function),
            None => self.function.to_owned(),
        }
    }
}

/// Makes a [`Story`] of a function: plain, `async` (one thread) or `threads` (`async`
/// on two threads).
#[macro_export]
macro_rules! story {
    (async $function:ident) => {
        $crate::story!(@ $function, $crate::block_on(false, $function()))
    };
    (threads $function:ident) => {
        $crate::story!(@ $function, $crate::block_on(true, $function()))
    };
    ($function:ident) => {
        $crate::story!(@ $function, $crate::IntoResult::into_result($function()))
    };
    (@ $function:ident, $run:expr) => {
        $crate::Story::new(module_path!(), stringify!($function), || $run)
    };
}

/// The return types of the function of a story.
pub trait IntoResult {
    /// How it ended.
    ///
    /// # Errors
    /// When the story failed.
    fn into_result(self) -> Result<()>;
}

impl IntoResult for () {
    fn into_result(self) -> Result<()> {
        Ok(())
    }
}

impl IntoResult for Result<()> {
    fn into_result(self) -> Result<()> {
        self
    }
}

/// Runs a story that is `async`, on a runtime of its own.
///
/// # Errors
/// When the runtime cannot start, or the story failed.
pub fn block_on<F: Future<Output: IntoResult>>(threads: bool, story: F) -> Result<()> {
    let mut runtime = match threads {
        true => tokio::runtime::Builder::new_multi_thread(),
        false => tokio::runtime::Builder::new_current_thread(),
    };
    // As many as a node has at the least.
    let runtime = runtime.worker_threads(2).enable_all().build()?;
    runtime.block_on(story).into_result()
}

/// The reason why a story cannot run on this host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Skip(pub(crate) String);

impl fmt::Display for Skip {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "skipped: {}", self.0)
    }
}

impl std::error::Error for Skip {}

/// Ends a story that cannot run on this host; the run lists it with the reason.
///
/// # Errors
/// Always: that is how the story ends.
pub fn skip(reason: &str) -> Result<()> {
    Err(Skip(reason.to_owned()).into())
}

/// Finds a story by its whole name.
pub(crate) fn named(stories: &[Story], name: &str) -> Result<Story> {
    let story = stories.iter().find(|story| story.name() == name);
    story.copied().with_context(|| format!("no story is called {name}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plain() {}

    async fn waits() -> Result<()> {
        tokio::task::yield_now().await;
        anyhow::bail!("the end")
    }

    async fn silent() {}

    #[test]
    fn a_story_is_named_by_its_file_and_its_function() {
        assert_eq!(Story::new("e2e::guru", "one", || Ok(())).name(), "guru::one");
        assert_eq!(Story::new("tpm", "one", || Ok(())).name(), "one");
        let story = crate::story!(plain);
        assert!(named(&[story], &story.name()).is_ok());
        assert!(named(&[story], "plain").is_err());
    }

    #[test]
    fn every_kind_of_function_runs() {
        assert!((crate::story!(plain).run)().is_ok());
        assert!((crate::story!(async silent).run)().is_ok());
        let error = (crate::story!(threads waits).run)().unwrap_err();
        assert_eq!(error.to_string(), "the end");
    }

    #[test]
    fn a_skip_differs_from_a_failure() {
        let error = skip("no card").unwrap_err();
        assert_eq!(error.downcast_ref::<Skip>(), Some(&Skip("no card".to_owned())));
    }
}
