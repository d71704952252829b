//! The pods of this node, as containerd has them: which are not well, and why.
//!
//! ```text
//! containerd serves --every few seconds--> lists --classify--> Pods (event value)
//!       |                                    |
//!       v                                    +-- the end of a container is asked for once
//!  [unknown]: no value
//! ```
//!
//! containerd knows the pods while the API server and kubelet do not answer; the console
//! shows them then too.
//!
//! Invariants:
//! - Names and texts of pods may hold anything, and are bounded here in number and length.
//! - The value changes only when a pod does: times in it are points in time, not ages.
//!
//! What this module does not do: ask kubelet. The runtime does not know why a container was
//! never made, and says nothing of restart policies.

mod classify;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use polis_proto::cri::runtime_service_client::RuntimeServiceClient;
use polis_proto::cri::{ContainerStatusRequest, ListContainersRequest, ListPodSandboxRequest};
use tokio::sync::watch;
use tokio::time::timeout;
use tonic::transport::{Channel, Endpoint};
use tracing::warn;

use self::classify::{End, Lists};
use super::Status;
use polis_base::sys::clock;
use polis_runtime::event::Closed;
use polis_runtime::supervisor::Context;

/// Between two looks: a person who waits for a pod looks that often.
const LOOK: Duration = Duration::from_secs(5);
/// A containerd that starts containers on a busy machine answers late.
const ANSWER_MAX: Duration = Duration::from_secs(20);
/// The largest answer that is read: kubelet gives the annotations of a pod to its sandbox, and
/// a pod has up to 256 KiB of them.
const ANSWER_BYTES_MAX: usize = 16 << 20;
/// Ended containers that are asked about in one look; the others are asked about in the next.
const ASKED_MAX: usize = 32;
/// Pods in the value. kubelet runs 110 unless it is configured otherwise.
const PODS_MAX: usize = 256;

/// The pods of this node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pods {
    /// Those that need an operator first; at most 256.
    pub pods: Vec<Pod>,
    /// How many there are.
    pub total: usize,
}

/// A pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pod {
    /// Its namespace.
    pub namespace: String,
    /// Its name in the namespace.
    pub name: String,
    /// Its activity.
    pub state: State,
    /// The container that the state is about, and how it ended.
    pub ended: Option<Ended>,
    /// How often its containers were restarted.
    pub restarts: u64,
    /// The runtime class; empty for the default.
    pub runtime: String,
    /// When its sandbox was made.
    pub created: SystemTime,
}

/// A container that ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ended {
    /// Its name.
    pub container: String,
    /// One word, such as `OOMKilled`; empty if there is none.
    pub reason: String,
    /// A sentence; empty if there is none.
    pub message: String,
    /// Its exit status.
    pub status: i32,
}

/// The activity of a pod. The order is that in which they need an operator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum State {
    /// A container ended badly after a restart, and is to be restarted again.
    CrashLoop,
    /// A container ended badly.
    Failed,
    /// No container has run for too long.
    Waiting,
    /// Runs again since lately, after a container had ended badly.
    Restarted,
    /// No container runs yet.
    Starting,
    /// Ends.
    Stopping,
    /// Its containers run.
    Running,
    /// Every container ended well.
    Completed,
}

/// Inputs and outputs. Cloned into every run; holds no progress.
#[derive(Clone, Debug)]
pub(super) struct Service {
    /// The socket of containerd.
    pub(super) socket: PathBuf,
    /// Whether containerd serves.
    pub(super) runtime: watch::Receiver<Status>,
    /// The pods; `None` while containerd does not answer.
    pub(super) pods: watch::Sender<Option<Pods>>,
}

impl Service {
    /// Runs until cancelled.
    ///
    /// # Errors
    ///
    /// [`Closed`] when the owner of the runtime's status ended.
    pub(super) async fn run(mut self, ctx: Context) -> Result<(), Closed> {
        ctx.healthy();
        let ended = ctx.until_cancelled(self.follow()).await;
        self.publish(None);
        ended.unwrap_or(Ok(()))
    }

    async fn follow(&mut self) -> Result<(), Closed> {
        let lost = || Closed("the container runtime");
        let serves = |status: &Status| matches!(status, Status::Serving(_));
        loop {
            self.publish(None);
            let mut runtime = self.runtime.clone();
            runtime.wait_for(serves).await.map_err(|_closed| lost())?;
            tokio::select! {
                // Cancel-safe: asks and publishes whole values.
                () = self.look_again_and_again() => {}
                // Cancel-safe: waits for an event value.
                gone = runtime.wait_for(|status| !serves(status)) => {
                    gone.map_err(|_closed| lost())?;
                }
            }
        }
    }

    async fn look_again_and_again(&self) {
        let address = format!("unix://{}", self.socket.display());
        let Ok(endpoint) = Endpoint::from_shared(address) else {
            // The service that starts containerd ends with this error.
            return std::future::pending().await;
        };
        let channel = endpoint.connect_lazy();
        let mut ends = BTreeMap::new();
        let mut answers = true;
        loop {
            match timeout(ANSWER_MAX, look(&channel, &mut ends)).await {
                Ok(Ok(pods)) => {
                    self.publish(Some(pods));
                    answers = true;
                }
                failed => {
                    if std::mem::take(&mut answers) {
                        let error = match failed {
                            Ok(Err(status)) => status.to_string(),
                            _elapsed => format!("no answer within {ANSWER_MAX:?}"),
                        };
                        warn!(error, "containerd does not list its pods");
                    }
                    self.publish(None);
                }
            }
            tokio::time::sleep(LOOK).await;
        }
    }

    fn publish(&self, pods: Option<Pods>) {
        self.pods.send_if_modified(|before| {
            let changed = *before != pods;
            *before = pods;
            changed
        });
    }
}

/// Asks for everything, and for the `ends` of containers that are not known yet.
async fn look(channel: &Channel, ends: &mut BTreeMap<String, End>) -> Result<Pods, tonic::Status> {
    let mut client =
        RuntimeServiceClient::new(channel.clone()).max_decoding_message_size(ANSWER_BYTES_MAX);
    // Containers first: a sandbox that is listed later is without them, and looks as new as it
    // is.
    let containers = client.list_containers(ListContainersRequest {}).await?.into_inner();
    let sandboxes = client.list_pod_sandbox(ListPodSandboxRequest {}).await?.into_inner();
    let lists = Lists::new(sandboxes.items, containers.containers);
    ends.retain(|id, _end| lists.has(id));
    for container_id in lists.unasked(ends).into_iter().take(ASKED_MAX) {
        let request = ContainerStatusRequest { container_id: container_id.clone() };
        match client.container_status(request).await {
            Ok(answer) => {
                let status = answer.into_inner().status.unwrap_or_default();
                ends.insert(container_id, End::from(status));
            }
            // Removed meanwhile.
            Err(status) if status.code() == tonic::Code::NotFound => {}
            Err(status) => return Err(status),
        }
    }
    Ok(lists.pods(ends, clock::now(), PODS_MAX))
}

#[cfg(test)]
#[path = "../pods_tests.rs"]
mod tests;
