//! What the API server says of this node: whether its Node object exists, and is Ready.
//!
//! kubelet makes the object and reports to it; the node reads it with kubelet's certificate,
//! which may read no other.

use std::time::Duration;

use serde_json::Value;
use tokio::time::sleep;
use tracing::debug;

use crate::workload::api::{Answer, Api};
use crate::workload::certificates::chain;
use crate::workload::parts::{Part, PartState, Parts};
use polis_runtime::event::Closed;
use polis_runtime::supervisor::Context;
use polis_wire::identity::NodeId;

/// Between two looks, until the node is ready and then.
const LOOK_STARTING: Duration = Duration::from_secs(1);
const LOOK_READY: Duration = Duration::from_secs(10);

/// Runs until cancelled.
#[derive(Clone, Debug)]
pub(super) struct Service {
    /// The API server, asked as this node.
    pub(super) api: Api,
    pub(super) node: NodeId,
    pub(super) parts: Parts,
}

impl Service {
    pub(super) async fn run(self, ctx: Context) -> Result<(), Closed> {
        let kubelet = self.parts.ready(Part::Kubelet);
        let Some(kubelet) = ctx.until_cancelled(kubelet).await else { return Ok(()) };
        kubelet?;
        ctx.healthy();
        let mut been = false;
        loop {
            let Some(state) = ctx.until_cancelled(self.look()).await else { return Ok(()) };
            let wait = match state {
                PartState::Ready => {
                    been = true;
                    LOOK_READY
                }
                PartState::Starting | PartState::Failed { .. } | PartState::Stopped => {
                    LOOK_STARTING
                }
            };
            // A node that joins is not ready for a while, which is no failure yet.
            let state = if been || state == PartState::Ready { state } else { PartState::Starting };
            self.parts.set(Part::Node, state);
            if ctx.until_cancelled(sleep(wait)).await.is_none() {
                return Ok(());
            }
        }
    }

    async fn look(&self) -> PartState {
        match self.api.get(&path(self.node)).await {
            Ok(answer) => state(&answer),
            Err(error) => PartState::Failed { cause: chain(&error) },
        }
    }
}

/// Waits until kubelet has registered the node. Cancel-safe.
pub(super) async fn registered(api: Api, node: NodeId) {
    readable(&api, &path(node)).await;
}

/// Waits until the API server lets its caller read what is at `path`. Cancel-safe.
pub(super) async fn readable(api: &Api, path: &str) {
    loop {
        match api.check(path).await {
            Ok(()) => return,
            Err(error) => {
                debug!(error = &error as &dyn std::error::Error, "{path} is not readable");
            }
        }
        sleep(LOOK_STARTING).await;
    }
}

/// Waits until the Node was registered and has been deleted. Cancel-safe.
pub(super) async fn lost(api: Api, node: NodeId) {
    registered(api.clone(), node).await;
    loop {
        sleep(LOOK_READY).await;
        if api.get(&path(node)).await.is_ok_and(|answer| answer.status == 404) {
            return;
        }
    }
}

fn path(node: NodeId) -> String {
    format!("/api/v1/nodes/{node}")
}

/// What an answer to a request for the Node object says.
fn state(answer: &Answer) -> PartState {
    let failed = |cause: &str| PartState::Failed { cause: cause.to_owned() };
    if answer.status != 200 {
        return failed(&format!("the API server answers {} for this node", answer.status));
    }
    let object: Value = serde_json::from_slice(&answer.body).unwrap_or_default();
    let conditions = object["status"]["conditions"].as_array();
    let ready = conditions.into_iter().flatten().find(|one| one["type"] == "Ready");
    match ready {
        Some(ready) if ready["status"] == "True" => PartState::Ready,
        Some(ready) => failed(ready["message"].as_str().unwrap_or("the node is not ready")),
        None => failed("kubelet has not reported yet"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(status: u16, body: &str) -> PartState {
        state(&Answer { status, body: body.as_bytes().to_vec() })
    }

    #[test]
    fn a_node_is_ready_when_its_condition_says_so() {
        let object = |status: &str| {
            format!(
                r#"{{"status":{{"conditions":[{{"type":"DiskPressure","status":"False"}},
                   {{"type":"Ready","status":"{status}","message":"no network"}}]}}}}"#
            )
        };
        let failed = |cause: &str| PartState::Failed { cause: cause.to_owned() };
        assert_eq!(said(200, &object("True")), PartState::Ready);
        assert_eq!(said(200, &object("False")), failed("no network"));
        assert_eq!(said(200, &object("Unknown")), failed("no network"));
        assert_eq!(said(200, "{}"), failed("kubelet has not reported yet"));
        assert_eq!(said(200, "noise"), failed("kubelet has not reported yet"));
        assert_eq!(said(404, ""), failed("the API server answers 404 for this node"));
    }
}
