//! The steps of a machine on its way into a cluster, and the way for a test to stop after
//! any of them.

use std::fmt;
use std::sync::Arc;

/// A step that was just taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// The ESP says that a bootstrap has begun.
    Begun,
    /// The node has its key.
    Key,
    /// The founding records are in the store.
    Founded,
    /// The cluster's CA exists.
    Authority,
    /// The node's certificate exists.
    Certificate,
    /// Key and certificates are on the data partition.
    Credentials,
    /// The ESP says that this node is a member.
    Sealed,
    /// The ESP does not speak of a bootstrap any more.
    Finished,
    /// The data partition of a removed node is marked for its end.
    GivenUp,
    /// The ESP does not speak of a removed node any more.
    Forgotten,
}

impl Step {
    /// The steps of an entry, in order.
    pub const ALL: [Self; 8] = [
        Self::Begun,
        Self::Key,
        Self::Founded,
        Self::Authority,
        Self::Certificate,
        Self::Credentials,
        Self::Sealed,
        Self::Finished,
    ];
}

/// A test ended the run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("interrupted after the step {0:?}")]
pub struct Interrupted(pub Step);

/// Lets a test end a run after any step, as a power cut would.
#[derive(Clone, Default)]
pub struct Probe(Option<Arc<dyn Fn(Step) -> bool + Send + Sync>>);

impl Probe {
    /// Asks `goes_on` after each step.
    pub fn new(goes_on: impl Fn(Step) -> bool + Send + Sync + 'static) -> Self {
        Self(Some(Arc::new(goes_on)))
    }

    pub(super) fn passed(&self, step: Step) -> Result<(), Interrupted> {
        match &self.0 {
            Some(goes_on) if !goes_on(step) => Err(Interrupted(step)),
            _ => Ok(()),
        }
    }
}

impl fmt::Debug for Probe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() { "Probe(set)" } else { "Probe(none)" })
    }
}
