//! The watch of the nodes: receives every node from the leader, with the roles of this
//! one.
//!
//! ```text
//! [asking] --stream--> [node_watch, not all yet] --current--> [node_watch]
//!    ^                            |                            |
//!    +-- leader known, pause -- broken, or another leads ------+
//! ```
//!
//! The first events of a stream hold everything, so a new stream starts from nothing,
//! and the old state holds until the new one is whole: all of it but the health of the
//! nodes, which only the leader of the moment knows.

use std::sync::Arc;
use std::time::Duration;

use polis_proto::v1;
use polis_proto::v1::curator_client::CuratorClient;
use tokio::sync::watch;
use tokio::time::{Instant, sleep};
use tonic::Status;
use tracing::{debug, error, info};

use super::Service;
use super::kept::{keep, remember, show, store};
use super::received::Received;
use polis_machine::{network, parameters};
use polis_runtime::event::{Closed, until};
use polis_runtime::supervisor::Context;
use polis_wire::identity::NodeId;
use polis_wire::node_roles::{Nodes, Role};
use polis_wire::pki::Authorities;
use polis_wire::pod_network::Networks;
use polis_wire::rpc::client::Repeat;

/// Between two attempts at a stream, on average: see [`pause`].
const RETRY: Duration = Duration::from_secs(1);
/// Between two attempts to keep the CA of the cluster.
const KEEP_AGAIN: Duration = Duration::from_secs(30);

/// Watches until cancelled.
pub(super) async fn run(service: Service, ctx: Context) -> Result<(), Closed> {
    let mut cluster = service.outputs.cluster.subscribe();
    let home =
        until(&mut cluster, "the cluster", |status| status.node.filter(|_| status.is_member()));
    let Some(own) = ctx.until_cancelled(home).await else { return Ok(()) };
    let own = own?;
    // The networks of a cluster never change: each stream begins with those of the last one.
    let mut networks = remember(&service).await;
    ctx.healthy();
    loop {
        match ctx.until_cancelled(Box::pin(hear(&service, own, &mut networks))).await {
            Some(Ok(())) => debug!("the leader ended the stream"),
            Some(Err(status)) => debug!(%status, "the stream of nodes ended with an error"),
            None => return Ok(()),
        }
        unknown_health(&service.outputs.nodes);
        match ctx.until_cancelled(before_retry(service.client.leader_id())).await {
            Some(waited) => waited?,
            None => return Ok(()),
        }
    }
}

/// Waits until a leader is known, and then for the pause. A pause that runs
/// during the election would end before it does, and the announcement of the leader would start
/// all streams at once.
async fn before_retry(mut leader: watch::Receiver<Option<NodeId>>) -> Result<(), Closed> {
    loop {
        let known = until(&mut leader, "the leader", |leader| *leader).await?;
        sleep(pause()).await;
        // The stream may end a moment before the client forgets the leader that has failed.
        if *leader.borrow() == Some(known) {
            return Ok(());
        }
    }
}

/// The pause before a retry: different on each node, because all of them lose their streams in the
/// same moment, and the first events of each hold every node.
fn pause() -> Duration {
    RETRY.mul_f64(rand::random_range(0.5..1.5))
}

async fn hear(
    service: &Service,
    own: NodeId,
    networks: &mut Option<Networks>,
) -> Result<(), Status> {
    let request = v1::WatchRequest::default();
    let call = |channel| {
        let request = request.clone();
        async move { CuratorClient::new(channel).watch(request).await }
    };
    let mut stream = service.client.call(Repeat::Allowed, call).await?.into_inner();
    // A machine that lost its power does not end its stream; a heartbeat notices first.
    let mut changed = std::pin::pin!(service.client.another_leader());
    let mut received = Received::with(*networks);
    loop {
        let event = tokio::select! {
            // Cancel-safe: tonic keeps what has arrived of a message.
            event = stream.message() => event?,
            // Cancel-safe: waits for an event value.
            () = &mut changed => return Err(Status::unavailable("the leader has changed")),
            // Cancel-safe: only waits.
            () = sleep(KEEP_AGAIN), if received.authorities.is_some() => Some(v1::WatchEvent::default()),
        };
        let Some(event) = event else { return Ok(()) };
        received.apply(event);
        if let Some(new) = received.authorities.take()
            && !rotated(service, &new).await
        {
            // The disk may have room again then.
            received.authorities = Some(new);
        }
        if received.current {
            service.outputs.contact.send_replace(Some(Instant::now()));
            publish(service, own, &mut received);
            *networks = received.networks;
            // Last: the disk may be slow, and callers wait for the list of users.
            store(service, &mut received).await;
        }
    }
}

/// Marks the health of every node as unknown: no leader reports it any more.
fn unknown_health(nodes: &watch::Sender<Option<Arc<Nodes>>>) {
    nodes.send_if_modified(|known| {
        let Some(known) = known else { return false };
        let is_known = |node: &v1::NodeInfo| node.health() != v1::NodeHealth::Unknown;
        if !known.values().any(is_known) {
            return false;
        }
        for node in Arc::make_mut(known).values_mut() {
            node.set_health(v1::NodeHealth::Unknown);
            node.heartbeat_age_ms = -1;
        }
        true
    });
}

fn publish(service: &Service, own: NodeId, received: &mut Received) {
    let outputs = &service.outputs;
    // Before the roles: what they start has the proxy from its start.
    if let Some((proxy, _)) = &received.proxy {
        show(&outputs.proxy, proxy);
    }
    // Before the roles: what they start uses them.
    if let Some(networks) = &received.networks {
        show(&outputs.networks, networks);
    }
    let fault = received.networks_fault();
    if let Some(fault) = fault.as_ref().filter(|_| *outputs.networks_fault.borrow() != fault) {
        error!("{fault}");
    }
    show(&outputs.networks_fault, &fault);
    if let Some(node) = received.nodes.get(&own) {
        let roles = node.roles.unwrap_or_default();
        let is_new = outputs.roles.send_if_modified(|known| {
            let changed = *known != Some(roles);
            *known = Some(roles);
            changed
        });
        if is_new {
            let names: Vec<_> = Role::given(&roles).map(Role::name).collect();
            info!(roles = names.join(", "), "this node's roles");
            received.new_roles = Some(roles);
        }
    }
    if let Some(node) = received.nodes.get(&own) {
        if let Some(order) = &node.network_order {
            ordered(&outputs.network, order);
        }
        // The key that opens the disk alone is in the cluster until its owner has it.
        outputs.cluster.recovery_key_unsaved(node.recovery_key_unsaved);
    }
    outputs.nodes.send_replace(Some(Arc::new(received.nodes.clone())));
    if let Some((servers, _)) = &received.time {
        show(&outputs.time_servers, servers);
    }
    if let Some((order, _)) = &received.log {
        show(&outputs.log_targets, &Some(order.clone()));
    }
    if received.firewall.is_some() {
        show(&outputs.firewall, &received.firewall);
    }
    // Beside a curator, access is decided by the records themselves.
    if service.inputs.consensus.borrow().voter().is_none() {
        outputs.access_list.send_if_modified(|known| {
            let access_list = received.access_list(known);
            let changed = **known != access_list;
            if changed {
                *known = Arc::new(access_list);
            }
            changed
        });
    }
}

/// Hands on an order of a network that is another than the last one.
fn ordered(known: &watch::Sender<Option<network::Order>>, order: &v1::NetworkOrder) {
    if known.borrow().as_ref().is_some_and(|known| known.number == order.number) {
        return;
    }
    let network = order.configuration.clone();
    match network.map(|network| parameters::network(network, "network")).transpose() {
        Ok(network) => {
            known.send_replace(Some(network::Order { number: order.number, network }));
        }
        Err(error) => error!(%error, "the network that the cluster orders is not used"),
    }
}

/// Trusts the authorities of now, once the disk has them. Only those are taken that follow the ones
/// that are known. Returns whether there is nothing left to do.
async fn rotated(service: &Service, new: &Arc<Authorities>) -> bool {
    let known = service.outputs.credentials.borrow().clone();
    let Some(known) = known.and_then(|known| known.authorities) else { return false };
    if known == *new {
        return true;
    }
    if !new.follow(&known) {
        error!("the leader names a CA to which the known one does not lead; it is not trusted");
        return true;
    }
    if !keep(&service.config.authorities, new.to_record(), "the CA of the cluster").await {
        return false;
    }
    info!(rotations = new.rotations, "the CA of the cluster was rotated");
    service.outputs.credentials.send_modify(|credentials| {
        if let Some(credentials) = credentials {
            credentials.authorities = Some(Arc::clone(new));
        }
    });
    true
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use tokio::time::timeout;

    use super::*;

    #[test]
    fn the_health_of_nodes_goes_with_the_leader_that_reported_it() {
        let id = NodeId::from_public_key(&[1; 32]);
        let mut healthy = v1::NodeInfo { id: id.to_string(), ..Default::default() };
        healthy.set_state(v1::NodeState::Up);
        healthy.set_health(v1::NodeHealth::Healthy);
        let before = Nodes::from([(id, healthy)]);
        let nodes = watch::Sender::new(Some(Arc::new(before)));
        let mut shown = nodes.subscribe();
        unknown_health(&nodes);
        let after = shown.borrow_and_update().clone().unwrap();
        assert_eq!(after[&id].health(), v1::NodeHealth::Unknown);
        assert_eq!((after[&id].state(), after[&id].heartbeat_age_ms), (v1::NodeState::Up, -1));
        // Not another event for each attempt that fails.
        unknown_health(&nodes);
        assert!(!shown.has_changed().unwrap());
    }

    #[test]
    fn nodes_that_lost_the_leader_together_do_not_return_together() {
        let pauses: BTreeSet<Duration> = (0..20).map(|_| pause()).collect();
        assert!(pauses.len() > 1, "{pauses:?}");
        assert!(pauses.iter().all(|pause| (RETRY / 2..=RETRY * 3 / 2).contains(pause)));
    }

    #[tokio::test(start_paused = true)]
    async fn a_retry_waits_for_a_leader_that_is_still_known_after_the_pause() {
        let [old, new] = [1, 2].map(|seed| NodeId::from_public_key(&[seed; 32]));
        let leader = watch::Sender::new(None);
        let retry = || timeout(RETRY * 60, before_retry(leader.subscribe()));
        assert!(retry().await.is_err());
        leader.send_replace(Some(old));
        let forgotten = async {
            sleep(RETRY / 4).await;
            leader.send_replace(None);
        };
        let (waited, ()) = tokio::join!(retry(), forgotten);
        assert!(waited.is_err());
        leader.send_replace(Some(new));
        let begin = Instant::now();
        retry().await.unwrap().unwrap();
        assert!(begin.elapsed() >= RETRY / 2);
    }

    #[test]
    fn an_order_is_handed_on_once_and_only_if_it_is_valid() {
        let known = watch::Sender::new(None);
        let mut seen = known.subscribe();
        let bond =
            v1::network_configuration::Bond { name: "team0".to_owned(), ..Default::default() };
        let bad = v1::NetworkConfiguration { bonds: vec![bond], ..Default::default() };
        ordered(&known, &v1::NetworkOrder { number: 7, configuration: Some(bad) });
        assert_eq!(*seen.borrow_and_update(), None);
        let order = v1::NetworkOrder { number: 8, configuration: Some(Default::default()) };
        ordered(&known, &order);
        let network = Some(parameters::Network::default());
        assert_eq!(*seen.borrow_and_update(), Some(network::Order { number: 8, network }));
        ordered(&known, &order);
        assert!(!seen.has_changed().unwrap());
    }
}
