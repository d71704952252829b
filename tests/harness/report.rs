//! The result of a run of stories, as `cargo xtask test` reads it.

use serde::{Deserialize, Serialize};

/// How a story ended, after its last try.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Outcome {
    /// At the first try.
    Passed,
    /// Not at the first try.
    Flaky,
    /// It did not; in a word or two, how.
    Failed(String),
    /// This host cannot run it, for this reason.
    Skipped(String),
}

/// One story.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StoryResult {
    /// File and function.
    pub name: String,
    /// How it ended.
    pub outcome: Outcome,
    /// Wall time of its last try.
    pub seconds: f64,
    /// Processor time of its last try, with that of its machines; 0 where it is not measured.
    pub processor_seconds: f64,
    /// How often it was tried.
    pub tries: u32,
}

/// All stories of a binary.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// Those that ran.
    pub stories: Vec<StoryResult>,
    /// How many a sample has left out.
    pub not_drawn: usize,
}

impl Report {
    /// How many passed, at any try.
    #[must_use]
    pub fn passed(&self) -> usize {
        self.count(|outcome| matches!(outcome, Outcome::Passed | Outcome::Flaky))
    }

    /// How many failed at every try.
    #[must_use]
    pub fn failed(&self) -> usize {
        self.count(|outcome| matches!(outcome, Outcome::Failed(_)))
    }

    fn count(&self, wanted: impl Fn(&Outcome) -> bool) -> usize {
        self.stories.iter().filter(|result| wanted(&result.outcome)).count()
    }
}
