//! Reports the calls that this node was given to the leader, which adds them to the audit log.
//!
//! Invariants:
//! - A call is dropped once a leader has written it, or refuses it for good.

use std::time::Duration;

use polis_proto::v1;
use polis_proto::v1::curator_client::CuratorClient;
use tokio::time::sleep;
use tonic::Code;
use tracing::{debug, warn};

use super::Service;
use polis_base::cause;
use polis_runtime::event::{Closed, until};
use polis_runtime::supervisor::Context;
use polis_wire::rpc::client::Repeat;

/// Between two attempts, once the client has lost its patience.
const RETRY: Duration = Duration::from_secs(10);

/// Calls of one report.
const REPORT_MAX: usize = 16;

/// Reports until cancelled.
pub(super) async fn run(service: Service, ctx: Context) -> Result<(), Closed> {
    let mut cluster = service.outputs.cluster.subscribe();
    let calls = service.calls.clone();
    let mut new = calls.follow();
    // The data partition is open from then on.
    let home = until(&mut cluster, "the cluster", |status| status.is_member().then_some(()));
    let Some(home) = ctx.until_cancelled(home).await else { return Ok(()) };
    home?;
    calls.open().await;
    ctx.healthy();
    let mut failed = cause::Last::default();
    let work = async {
        loop {
            let _seen = *new.borrow_and_update();
            let oldest = calls.oldest(REPORT_MAX);
            if oldest.is_empty() {
                new.changed().await.map_err(|_closed| Closed("the calls"))?;
                continue;
            }
            let request = v1::ReportCallsRequest { calls: oldest.clone() };
            let call = |channel| {
                let request = request.clone();
                async move { CuratorClient::new(channel).report_calls(request).await }
            };
            match service.client.call(Repeat::Allowed, call).await {
                Ok(_done) => {
                    debug!(calls = oldest.len(), "the audit log has calls of this node");
                    failed.clear();
                    calls.drop_all(&oldest).await;
                }
                Err(status) => {
                    if failed.is_new(&status.to_string()) {
                        warn!(%status, "cannot report calls of this node for the audit log");
                    }
                    if status.code() == Code::InvalidArgument {
                        calls.drop_all(&oldest).await;
                    }
                    sleep(RETRY).await;
                }
            }
        }
    };
    ctx.until_cancelled(Box::pin(work)).await.unwrap_or(Ok(()))
}
