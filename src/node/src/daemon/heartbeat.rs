//! The signs of life by which `init` knows that the runtime runs.
//!
//! A thread of its own would beat on while every service is stuck. This is a task
//! like all others: when no worker of the runtime comes to it any more, or when
//! the clock of the runtime stands, it falls silent, and `init` opens the trapdoor
//! (`boot::heartbeat`).

use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{MissedTickBehavior, interval};

use polis_runtime::supervisor::Context;

/// Far more often than `init` demands, far less often than it would cost anything.
const INTERVAL: Duration = Duration::from_secs(5);

/// The service.
#[derive(Clone, Debug)]
pub struct Service {
    /// Changes with every beat; the main task passes it on.
    pub beats: watch::Sender<u64>,
}

impl Service {
    /// Beats until cancelled.
    ///
    /// # Errors
    ///
    /// None.
    pub async fn run(self, ctx: Context) -> Result<(), std::convert::Infallible> {
        let mut interval = interval(INTERVAL);
        interval.set_missed_tick_behavior(MissedTickBehavior::Delay);
        ctx.healthy();
        while ctx.until_cancelled(interval.tick()).await.is_some() {
            self.beats.send_modify(|beat| *beat = beat.wrapping_add(1));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn it_beats_at_once_and_then_at_its_pace() {
        let (ctx, handles) = Context::for_test();
        let (beats, mut seen) = watch::channel(0);
        let started = tokio::time::Instant::now();
        let listen = async {
            for _ in 0..3 {
                seen.changed().await.unwrap();
            }
            handles.cancel().await;
            started.elapsed()
        };
        let (ended, took) = tokio::join!(Service { beats }.run(ctx), listen);
        ended.unwrap();
        assert_eq!(took.as_secs(), 2 * INTERVAL.as_secs());
    }
}
