//! The state of a drain, as reports, metrics and event lines have it.

/// The state of a drain.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum State {
    /// The node takes pods.
    #[default]
    None,
    /// Pods are left.
    Draining,
    /// Only pods are left that belong to the node.
    Drained,
    /// It is not drained, and the caller may go on.
    GivenUp,
    /// It is not drained, and the caller should not go on.
    Failed(Failure),
}

/// Why a node is not drained.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// Nothing would replace a pod.
    Unmanaged,
    /// Pods are left at the deadline.
    Late,
}

impl State {
    /// Every state but [`State::None`], for tables.
    pub const ALL: [Self; 4] =
        [Self::Draining, Self::Drained, Self::GivenUp, Self::Failed(Failure::Late)];

    /// The word on the serial line, in reports and in metrics.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Draining => "draining",
            Self::Drained => "drained",
            Self::GivenUp => "given-up",
            Self::Failed(_) => "failed",
        }
    }
}
