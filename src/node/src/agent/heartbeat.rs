//! Tells the leader that this node lives, and notes when it last could, or that
//! it is no node of the cluster any more.

use std::time::Duration;

use polis_proto::v1;
use polis_proto::v1::curator_client::CuratorClient;
use tokio::time::{Instant, sleep_until};
use tracing::debug;

use super::{Service, split};
use crate::cluster::state::Event;
use polis_runtime::event::{Closed, until};
use polis_runtime::supervisor::Context;
use polis_wire::rpc;
use polis_wire::rpc::client::{Patience, Repeat};

/// What a leader may ask for: neither a flood nor a silence.
const INTERVALS: std::ops::RangeInclusive<Duration> =
    Duration::from_secs(1)..=Duration::from_secs(60);

/// Beats until cancelled.
pub(super) async fn run(service: Service, ctx: Context) -> Result<(), Closed> {
    let mut cluster = service.outputs.cluster.subscribe();
    let home = until(&mut cluster, "the cluster", |status| status.is_member().then_some(()));
    let Some(home) = ctx.until_cancelled(home).await else { return Ok(()) };
    home?;
    ctx.healthy();
    let mut interval = service.config.heartbeat;
    loop {
        let began = Instant::now();
        // One beat does not wait into the next but one.
        let patience = Patience { attempt: interval, total: interval };
        let client = service.client.clone().patient(patience);
        let consensus = service.inputs.consensus.borrow().figures();
        let call = |channel| async move {
            CuratorClient::new(channel).heartbeat(v1::HeartbeatRequest { consensus }).await
        };
        match ctx.until_cancelled(client.call(Repeat::Allowed, call)).await {
            Some(Ok(response)) => {
                service.outputs.contact.send_replace(Some(Instant::now()));
                interval = asked(response.into_inner(), service.config.heartbeat);
            }
            Some(Err(status)) if rpc::is_removal(&status) => {
                split::change(&service, &ctx, (Event::Removed, status.message()));
                ctx.cancelled().await;
                return Ok(());
            }
            Some(Err(status)) => debug!(%status, "the heartbeat was not heard"),
            None => return Ok(()),
        }
        if ctx.until_cancelled(sleep_until(began + interval)).await.is_none() {
            return Ok(());
        }
    }
}

/// When the next one is due.
fn asked(response: v1::HeartbeatResponse, usual: Duration) -> Duration {
    match response.interval_ms {
        0 => usual,
        millis => {
            let asked = Duration::from_millis(millis.into());
            asked.clamp(*INTERVALS.start(), *INTERVALS.end())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_leader_sets_the_pace_within_reason() {
        let asked = |interval_ms| {
            super::asked(v1::HeartbeatResponse { interval_ms }, Duration::from_secs(5)).as_secs()
        };
        assert_eq!([0, 1, 7000, u32::MAX].map(asked), [5, 1, 7, 60]);
    }
}
