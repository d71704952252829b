//! The memory line: prints once how much memory the processes of a node at rest take.
//!
//! A machine has no shell in which somebody could look, and what a node costs is
//! a promise that the tests and the measurements keep. So it reads `/proc` some
//! time after it was ready, and prints one line:
//!
//! ```text
//! POLIS memory init=2140 node=21500 etcd=61000 t=31.002      (KiB, resident)
//! ```
//!
//! What this module does not do: watch. A process that grows shows in the log
//! of the kernel when it meets a limit.

use std::time::Duration;

use tokio::sync::watch;

use polis_base::serial::EventLine;
use polis_runtime::event::{self, Closed};
use polis_runtime::supervisor::Context;
use polis_runtime::sys::process;

/// From ready to rest: what a start allocates for good has been allocated, and
/// what it needed for a while has been freed.
const REST: Duration = Duration::from_secs(10);

/// Inputs. Cloned into every run; holds no progress.
#[derive(Clone, Debug)]
pub struct Service {
    /// Whether the node is ready.
    pub ready: watch::Receiver<bool>,
}

impl Service {
    /// Runs until cancelled.
    ///
    /// # Errors
    ///
    /// [`Closed`] when the owner of the value is gone.
    pub async fn run(mut self, ctx: Context) -> Result<(), Closed> {
        ctx.healthy();
        let ready = event::until(&mut self.ready, "ready", |ready| ready.then_some(()));
        let Some(ready) = ctx.until_cancelled(ready).await else { return Ok(()) };
        ready?;
        if ctx.until_cancelled(tokio::time::sleep(REST)).await.is_none() {
            return Ok(());
        }
        let etcd = process::find("etcd").first().map(|etcd| etcd.as_raw_pid().to_string());
        let processes =
            [("init", Some("1".to_owned())), ("node", Some("self".to_owned())), ("etcd", etcd)];
        let mut line = EventLine::new("memory");
        for (name, id) in processes {
            if let Some(resident) = id.and_then(|id| process::resident(&id)) {
                line = line.field(name, resident);
            }
        }
        ctx.lines().event(line);
        ctx.cancelled().await;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_node_tells_its_memory_once_it_has_rested() {
        let (ctx, mut handles) = Context::for_test();
        let (ready, is_ready) = watch::channel(false);
        let end = async {
            tokio::time::sleep(REST * 2).await;
            assert!(handles.take_lines().is_empty(), "reported before it was ready");
            ready.send_replace(true);
            tokio::time::sleep(REST * 2).await;
            handles.cancel().await;
        };
        let (ended, ()) = tokio::join!(Service { ready: is_ready }.run(ctx), end);
        assert_eq!(ended, Ok(()));
        let lines = handles.take_lines();
        let event = lines.iter().find_map(|line| EventLine::parse(line)).unwrap();
        assert_eq!(event.word(), "memory");
        assert!(event.get("node").is_some(), "{lines:?}");
    }
}
