//! Blocking work of services, on threads that may wait.
//!
//! The runtime has few worker threads, and every service shares them: a service that
//! reads a file or calls a chip uses [`blocking`].
//!
//! Invariants:
//! - The work logs under the name of its caller: the span goes along.
//! - A panic of the work is a panic of its caller. It is a bug like any other, on
//!   whichever thread it happens: the supervisor reports it and restarts the service,
//!   instead of an error that blames a disk.
//! - For optional work, done for a remote caller or only to free space, [`attempt`]
//!   turns the panic into a [`Lost`], so that the service stays alive.
//!
//! What this module does not do: cancel work that began. It runs to its end even if
//! the caller stops waiting.

use std::any::Any;

use tokio::task::JoinError;
use tracing::Span;

/// The thread that did the work ended with a panic, which the log contains.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lost;

/// Runs `work` where it may block. A panic of the work is raised again in the caller.
pub async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    match run(work).await {
        Ok(done) => done,
        Err(payload) => std::panic::resume_unwind(payload),
    }
}

/// Runs `work` where it may block, for a caller that can go on without it.
///
/// # Errors
///
/// [`Lost`] if it panics.
pub async fn attempt<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Lost> {
    run(work).await.map_err(|_payload| Lost)
}

async fn run<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Box<dyn Any + Send>> {
    let span = Span::current();
    let done = tokio::task::spawn_blocking(move || span.in_scope(work)).await;
    match done.map_err(JoinError::try_into_panic) {
        Ok(done) => Ok(done),
        Err(Ok(payload)) => Err(payload),
        // Work is cancelled only by the end of the runtime: this future is not polled
        // again.
        Err(Err(_cancelled)) => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests {
    use std::panic::AssertUnwindSafe;
    use std::sync::{Arc, Mutex};
    use std::thread::{self, ThreadId};

    use futures::FutureExt as _;
    use tracing::{Instrument as _, Subscriber};
    use tracing_subscriber::layer::{Context, Layer, SubscriberExt as _};

    use super::*;

    #[tokio::test]
    async fn a_panic_is_the_callers_or_lost() {
        let failing = || -> u8 { panic!("a bug") };
        let ended = AssertUnwindSafe(blocking(failing)).catch_unwind().await;
        assert_eq!(ended.unwrap_err().downcast_ref(), Some(&"a bug"));
        assert_eq!(attempt(failing).await, Err(Lost));
        assert_eq!(attempt(|| 7).await, Ok(7));
    }

    /// The threads on which a span was entered.
    #[derive(Clone, Default)]
    struct Entered(Arc<Mutex<Vec<ThreadId>>>);

    impl<S: Subscriber> Layer<S> for Entered {
        fn on_enter(&self, _id: &tracing::span::Id, _context: Context<'_, S>) {
            self.0.lock().unwrap().push(thread::current().id());
        }
    }

    #[tokio::test]
    async fn the_span_goes_along() {
        let entered = Entered::default();
        let subscriber = tracing_subscriber::registry().with(entered.clone());
        let _default = tracing::subscriber::set_default(subscriber);
        let service = tracing::info_span!("service");
        let worker = blocking(|| thread::current().id()).instrument(service).await;
        assert_ne!(worker, thread::current().id());
        assert!(entered.0.lock().unwrap().contains(&worker));
    }
}
