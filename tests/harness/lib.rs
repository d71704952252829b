//! The harness of the stories ([`suite`]), what a run leaves behind, and the seed that it
//! draws by.
#![cfg_attr(
    feature = "stories",
    expect(clippy::print_stdout, reason = "a runner talks on its standard output"),
    expect(clippy::print_stderr, reason = "so does a story that fails, on its standard error"),
    expect(
        clippy::disallowed_methods,
        reason = "the rules are for the node; a runner on a host starts and reaps its own processes"
    )
)]

mod report;
mod seed;
#[cfg(feature = "stories")]
mod suite;

pub use report::{Outcome, Report, StoryResult};
pub use seed::{ALL, SEED, cuts, draws_all, pick, seed, share};
#[cfg(feature = "stories")]
pub use suite::{
    IntoResult, Sample, Skip, Story, Suite, block_on, main, patiently, polisctl, skip, workspace,
};
