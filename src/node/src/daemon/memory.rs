//! The memory line: prints how much memory the processes of a node at rest take.
//!
//! A machine has no shell in which somebody could look, and the tests and the measurements
//! keep a promise about the memory of a node. So it reads `/proc` some time after it was
//! ready, and prints one line; and once more some time after everything that its roles of
//! Kubernetes ask for was ready:
//!
//! ```text
//! POLIS memory init=2140 node=21500 etcd=61000 t=31.002      (KiB, resident)
//! POLIS memory init=2140 node=23500 etcd=71000 apiserver=310000 ... t=231.002
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
use polis_workload as workload;

/// From ready to rest: a start has made its lasting allocations, and has freed the
/// temporary ones.
const REST: Duration = Duration::from_secs(10);

/// The processes by their names in the line, and as the kernel names them: it keeps 15
/// characters.
const PROCESSES: [(&str, &str); 8] = [
    ("etcd", "etcd"),
    ("apiserver", "kube-apiserver"),
    ("controller-manager", "kube-controller"),
    ("scheduler", "kube-scheduler"),
    ("containerd", "containerd"),
    ("kubelet", "kubelet"),
    ("kube-proxy", "kube-proxy"),
    ("dns", "coredns"),
];

/// Inputs. Cloned into every run; holds no progress.
#[derive(Clone, Debug)]
pub struct Service {
    /// Whether the node is ready.
    pub ready: watch::Receiver<bool>,
    /// The parts of Kubernetes.
    pub workload: watch::Receiver<workload::Status>,
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
        if !rest(&ctx).await {
            return Ok(());
        }
        let serve = event::until(&mut self.workload, "the parts of Kubernetes", |status| {
            (status.all() == Some(workload::PartState::Ready)).then_some(())
        });
        let Some(serve) = ctx.until_cancelled(serve).await else { return Ok(()) };
        serve?;
        rest(&ctx).await;
        ctx.cancelled().await;
        Ok(())
    }
}

/// Waits, and prints the line; returns false if cancelled before.
async fn rest(ctx: &Context) -> bool {
    if ctx.until_cancelled(tokio::time::sleep(REST)).await.is_none() {
        return false;
    }
    let own = [("init", Some("1".to_owned())), ("node", Some("self".to_owned()))];
    let others = PROCESSES.map(|(name, program)| {
        (name, process::find(program).first().map(|found| found.as_raw_pid().to_string()))
    });
    let mut line = EventLine::new("memory");
    for (name, id) in own.into_iter().chain(others) {
        if let Some(resident) = id.and_then(|id| process::resident(&id)) {
            line = line.field(name, resident);
        }
    }
    ctx.lines().event(line);
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_node_tells_its_memory_once_it_has_rested() {
        let (ctx, mut handles) = Context::for_test();
        let (ready, is_ready) = watch::channel(false);
        let (parts, workload) = watch::channel(workload::Status::default());
        let end = async {
            tokio::time::sleep(REST * 2).await;
            assert!(handles.take_lines().is_empty(), "reported before it was ready");
            ready.send_replace(true);
            tokio::time::sleep(REST * 2).await;
            let lines = handles.take_lines();
            let kubelet = (workload::Part::Kubelet, workload::PartState::Ready);
            parts.send_modify(|status| status.parts.extend([kubelet]));
            tokio::time::sleep(REST * 2).await;
            assert_eq!(handles.take_lines().len(), 1, "once more with the parts of Kubernetes");
            handles.cancel().await;
            lines
        };
        let service = Service { ready: is_ready, workload };
        let (ended, lines) = tokio::join!(service.run(ctx), end);
        assert_eq!(ended, Ok(()));
        let event = lines.iter().find_map(|line| EventLine::parse(line)).unwrap();
        assert_eq!(event.word(), "memory");
        assert!(event.get("node").is_some(), "{lines:?}");
    }
}
