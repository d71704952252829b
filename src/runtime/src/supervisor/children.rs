//! How a service starts its children: one by one, or as a group.

use std::sync::{Arc, PoisonError};

use tokio_util::sync::CancellationToken;
use tracing::warn;

use super::context::{Child, Context, Service, service};
use super::restart::Policy;
use super::runner;

/// Children that live and die together: the death of one ends and restarts all.
#[derive(Debug)]
#[must_use = "a group runs only once it is started"]
pub struct Group<'a> {
    parent: &'a Context,
    policy: Policy,
    members: Vec<Service>,
}

impl Group<'_> {
    /// Adds a service. They start in the order they were added, and stop in reverse.
    pub fn service<R, F, E>(mut self, name: &str, run: R) -> Self
    where
        R: Fn(Context) -> F + Send + Sync + 'static,
        F: Future<Output = Result<(), E>> + Send + 'static,
        E: Into<anyhow::Error>,
    {
        self.members.push(service(self.parent.child_name(name), run));
        self
    }

    /// Starts them all.
    pub fn start(self) -> Child {
        self.parent.adopt(self.members, self.policy)
    }
}

impl Context {
    /// Starts `run` as a child of this run. It is started again when it dies, as
    /// `policy` says, and stopped when this run ends.
    ///
    /// `run` makes a fresh run each time: clone the service in it.
    pub fn spawn<R, F, E>(&self, name: &str, policy: Policy, run: R) -> Child
    where
        R: Fn(Self) -> F + Send + Sync + 'static,
        F: Future<Output = Result<(), E>> + Send + 'static,
        E: Into<anyhow::Error>,
    {
        self.adopt(vec![service(self.child_name(name), run)], policy)
    }

    /// Begins a group of children that live and die together.
    pub fn group(&self, policy: Policy) -> Group<'_> {
        Group { parent: self, policy, members: Vec::new() }
    }

    fn adopt(&self, members: Vec<Service>, policy: Policy) -> Child {
        let mut children = self.run.children.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(children) = children.as_mut() else {
            warn!(?members, "not started: the parent is stopping");
            let ended = CancellationToken::new();
            ended.cancel();
            return Child { stop: CancellationToken::new(), ended };
        };
        children.retain(|child| !child.ended.is_cancelled());
        let child = runner::start(self.shared.clone(), members, policy, Arc::clone(&self.run));
        children.push(child.clone());
        child
    }
}
