//! The harness of the stories: the definition of a story, the selection of a run, and the
//! order.
//!
//! ```text
//! STORIES of each file --> select --> Queue --> Runner --> a process for each story
//!                          (filter,   (places,  (start, deadline,   |
//!                           sample)    order)    kill, retry)       v
//!                                                              run here, by  `--story`
//! ```
//!
//! Each binary in `tests/` is the runner and, started by itself with `--story NAME`, a
//! story. A process of its own gives a story an end that can be forced: its machines
//! are its children, and die with it.
//!
//! The missing parts of the libraries for this: weights, a deadline that ends a test with
//! its children, a second try, a sample. With these, nothing of a library would be left.

mod args;
mod queue;
mod runner;
mod select;
mod story;

use std::env;
use std::future::Future;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use polis_qemu::deadline::Deadline;

pub use self::story::{IntoResult, Sample, Skip, Story, Suite, block_on, skip};

/// The `main` of a binary with stories.
#[must_use]
pub fn main(suite: Suite, files: &[&[Story]]) -> ExitCode {
    let stories: Vec<Story> = files.iter().flat_map(|stories| stories.iter().copied()).collect();
    match args::run(suite, &stories) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::from(2)
        }
    }
}

/// The folder of the workspace.
#[must_use]
pub fn workspace() -> &'static Path {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    package.parent().unwrap_or(package)
}

/// `polisctl` as cargo built it beside this binary, or the program that `POLISCTL` names.
///
/// # Errors
/// When it is not there.
pub fn polisctl() -> Result<PathBuf> {
    if let Some(program) = env::var_os("POLISCTL") {
        return Ok(PathBuf::from(program));
    }
    // This binary is `<profile>/deps/<name>-<hash>`.
    let own = env::current_exe().context("cannot find this program")?;
    let beside = own.ancestors().nth(2).map(|folder| folder.join("polisctl"));
    let built = beside.filter(|program| program.is_file());
    built.context("no polisctl beside the stories; `cargo xtask test` builds it")
}

/// Waits for `future`, until `within` is over by the clock of deadlines.
///
/// # Errors
/// When it is over.
pub async fn patiently<F: Future>(within: Duration, future: F) -> Result<F::Output> {
    let (mut deadline, mut future) = (Deadline::within(within), pin!(future));
    loop {
        let look = deadline.look().with_context(|| format!("not within {within:?}"))?;
        let left = look.saturating_duration_since(Instant::now());
        if let Ok(output) = tokio::time::timeout(left, &mut future).await {
            return Ok(output);
        }
    }
}
