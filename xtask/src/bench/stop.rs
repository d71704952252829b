//! Signals that end a measurement which has changed something: a source, a folder.
//!
//! ```text
//! held:      SIGHUP, SIGINT, SIGTERM --> the measurement ends with an error, and restores
//! otherwise: SIGHUP, SIGINT, SIGTERM --> the process ends
//! ```
//!
//! A terminal sends SIGINT to cargo, too, so that what a measurement waits for ends at once.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context as _, Result, ensure};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::flag;

/// The signals of this process. There is one value: an action of `signal-hook` stays for good.
#[derive(Debug)]
pub(super) struct Stop {
    asked: Arc<AtomicBool>,
    /// Whether a signal ends the process.
    at_once: Arc<AtomicBool>,
}

/// While this lives, a signal does not end the process.
#[derive(Debug)]
pub(super) struct Held<'a>(&'a Stop);

impl Stop {
    pub(super) fn new() -> Result<Self> {
        let stop = Self { asked: Arc::default(), at_once: Arc::new(AtomicBool::new(true)) };
        for signal in [SIGHUP, SIGINT, SIGTERM] {
            flag::register_conditional_default(signal, Arc::clone(&stop.at_once))
                .and_then(|_id| flag::register(signal, Arc::clone(&stop.asked)))
                .context("cannot catch signals")?;
        }
        Ok(stop)
    }

    pub(super) fn hold(&self) -> Held<'_> {
        self.at_once.store(false, Ordering::SeqCst);
        Held(self)
    }

    /// Whether the process may go on.
    ///
    /// # Errors
    ///
    /// A signal has come while it was held.
    pub(super) fn check(&self) -> Result<()> {
        ensure!(!self.asked.load(Ordering::SeqCst), "stopped by a signal");
        Ok(())
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.0.at_once.store(true, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use signal_hook::low_level::raise;

    use super::*;

    #[test]
    fn a_signal_ends_a_measurement_that_has_to_restore_something_with_an_error() {
        let stop = Stop::new().unwrap();
        assert!(stop.at_once.load(Ordering::SeqCst));
        let held = stop.hold();
        stop.check().unwrap();
        // Not held, it would end the process of this test.
        raise(SIGHUP).unwrap();
        assert_eq!(stop.check().unwrap_err().to_string(), "stopped by a signal");
        drop(held);
        assert!(stop.at_once.load(Ordering::SeqCst));
        assert!(stop.check().is_err(), "no other measurement begins");
    }
}
