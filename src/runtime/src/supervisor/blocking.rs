//! Runs work that blocks on a thread that may wait, for services.
//!
//! The workers of the runtime are few, and every service lives on them: whoever
//! reads a file or asks a chip does it with [`blocking`].
//!
//! Invariants:
//! - What the work logs belongs to whoever asked for it: the span goes along.
//! - A panic of the work is one of its caller. It is a bug like any other, and no
//!   less of one for where it ran: the supervisor says so and starts the service
//!   again, instead of an error that blames a disk.
//! - Where the work is a favour, done for somebody outside or for nothing but room,
//!   [`attempt`] makes the panic a [`Lost`], so that the service lives on.
//!
//! What this module does not do: end work that was begun. Whoever stops waiting
//! leaves it to run to its end.

use std::any::Any;

use tokio::task::JoinError;
use tracing::Span;

/// The thread that did the work ended with a panic, which the log has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lost;

/// Runs `work` where it may block. If it panics, so does whoever waits.
pub async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    match run(work).await {
        Ok(done) => done,
        Err(payload) => std::panic::resume_unwind(payload),
    }
}

/// Runs `work` where it may block, for somebody who goes on without it.
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
        // Work is cancelled only by the end of the runtime: nobody polls this again.
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
