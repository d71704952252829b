//! The heartbeat of this node: reports to the leader that the node lives, and records
//! when that last succeeded, whether the leader is on another machine, or that the node was
//! removed from the cluster.

use std::time::Duration;

use polis_proto::v1;
use polis_proto::v1::curator_client::CuratorClient;
use tokio::time::{Instant, sleep_until};
use tracing::debug;

use super::{Service, split, turn};
use polis_control::cluster::state::Event;
use polis_runtime::event::{Closed, until};
use polis_runtime::supervisor::Context;
use polis_wire::identity::NodeId;
use polis_wire::rpc::client::{Repeat, Timeouts};
use polis_wire::rpc::{self, Credentials};

/// The limits of the interval that a leader may ask for: neither a flood nor a silence.
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
        // Beats that are asked for more often have as much time as the others.
        let longest = interval.max(service.config.heartbeat);
        let timeouts = Timeouts { attempt: longest, total: longest };
        let client = service.client.clone().with_timeouts(timeouts);
        let consensus = service.inputs.consensus.borrow().figures();
        let clock = Some(service.inputs.time.borrow().figures());
        let update = Some(turn::report(&service).await);
        let authorities = service.outputs.credentials.borrow().as_ref().and_then(kept);
        let authorities = authorities.map_or_else(Vec::new, Vec::from);
        let log_deliveries = service.inputs.forwarding.borrow().figures();
        let snapshot_delivery = service.inputs.shipping.borrow().figures();
        let request = v1::HeartbeatRequest {
            consensus,
            clock,
            update,
            authorities,
            log_deliveries,
            snapshot_delivery,
        };
        let call = |channel| {
            let request = request.clone();
            async move { CuratorClient::new(channel).heartbeat(request).await }
        };
        // On the heap: two copies of the request would make a large future.
        let answer = Box::pin(client.call(Repeat::Allowed, call));
        match ctx.until_cancelled(answer).await {
            Some(Ok(response)) => {
                service.outputs.contact.send_replace(Some(Instant::now()));
                proves(&service, began);
                let response = response.into_inner();
                interval = asked(&response, service.config.heartbeat);
                let asks = response.prove_tpm;
                let prove = &service.outputs.prove_tpm;
                prove.send_if_modified(|known| std::mem::replace(known, asks) != asks);
                if response.restart_etcd {
                    service.restarts.ask();
                }
                turn::ordered(&service, response.update).await;
            }
            Some(Err(status)) if rpc::is_removal(&status) => {
                split::change(&service, &ctx, (Event::Removed, status.message()));
                ctx.cancelled().await;
                return Ok(());
            }
            Some(Err(status)) => debug!(%status, "the heartbeat was not acknowledged"),
            None => return Ok(()),
        }
        if ctx.until_cancelled(sleep_until(began + interval)).await.is_none() {
            return Ok(());
        }
    }
}

/// Notes since when the node is known to reach the cluster over its network: a leader answered a
/// call that began then. One on this machine proves nothing; there, another machine has to have
/// reached its curator.
fn proves(service: &Service, began: Instant) {
    let leader = *service.client.leader_id().borrow();
    let reached = *service.inputs.reached.borrow();
    let proof = proof(leader, service.own(), began, reached);
    service.outputs.proof.send_if_modified(|known| {
        // `None` is the least.
        let later = *known < proof;
        if later {
            *known = proof;
        }
        later
    });
}

fn proof(
    leader: Option<NodeId>,
    own: Option<NodeId>,
    began: Instant,
    reached: Option<Instant>,
) -> Option<Instant> {
    leader.and_then(|leader| if Some(leader) == own { reached } else { Some(began) })
}

/// SHA-256 of the authorities that this node keeps, once the one that signs has signed its own
/// certificate.
fn kept(credentials: &Credentials) -> Option<[u8; 32]> {
    let authorities = credentials.authorities.as_ref()?;
    authorities.signed(&credentials.certificate).then(|| authorities.digest())
}

/// When the next one is due.
fn asked(response: &v1::HeartbeatResponse, usual: Duration) -> Duration {
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
    fn a_leader_on_this_machine_proves_nothing_by_its_answer() {
        let [own, other] = [1, 2].map(|seed| Some(NodeId::from_public_key(&[seed; 32])));
        let (began, reached) = (Instant::now(), Some(Instant::now() + Duration::from_secs(1)));
        assert_eq!(proof(other, own, began, reached), Some(began));
        assert_eq!(proof(own, own, began, reached), reached);
        assert_eq!(proof(own, own, began, None), None);
        assert_eq!(proof(None, own, began, reached), None, "it is known no more");
    }

    #[test]
    fn a_leader_sets_the_pace_within_reason() {
        let asked = |interval_ms| {
            let response = v1::HeartbeatResponse { interval_ms, ..Default::default() };
            super::asked(&response, Duration::from_secs(5)).as_secs()
        };
        assert_eq!([0, 1, 7000, u32::MAX].map(asked), [5, 1, 7, 60]);
    }
}
