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
use prost::Message as _;
use tokio::sync::watch;
use tokio::time::{Instant, sleep};
use tonic::Status;
use tracing::{debug, error, info, warn};

use super::Service;
use crate::firewall::Order;
use crate::forwarding;
use polis_base::files::File;
use polis_machine::network;
use polis_machine::parameters::{self, Firewall, NtpServer};
use polis_runtime::event::{Closed, until};
use polis_runtime::save::Save as _;
use polis_runtime::supervisor::{Context, blocking};
use polis_wire::identity::NodeId;
use polis_wire::node_roles::{NODES_MAX, Nodes, Role};
use polis_wire::pki::{Authorities, Crl};
use polis_wire::rpc::client::Repeat;
use polis_wire::rpc::{self, AccessList, Serials, Users};

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
    remember(&service).await;
    ctx.healthy();
    loop {
        match ctx.until_cancelled(Box::pin(hear(&service, own))).await {
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

/// The firewall of an event.
fn read(order: v1::FirewallOrder) -> Result<Order, parameters::Error> {
    let confirmed = parameters::firewall(order.confirmed.unwrap_or_default(), "confirmed")?;
    let time = Duration::from_millis(order.tried_for_ms.into());
    let tried = order.tried.map(|tried| parameters::firewall(tried, "tried")).transpose()?;
    // The node returns by itself, whatever becomes of the leader.
    Ok(Order { confirmed, tried: tried.map(|tried| (tried, Instant::now() + time)) })
}

/// Takes up the roles and the firewall of the last boot, until a newer message arrives.
async fn remember(service: &Service) {
    let roles = recall(&service.config.roles, "the roles").await;
    let log = recall(&service.config.log_targets, "the targets of logs").await;
    let targets = log.and_then(|kept| forwarding::Order::read(kept).ok());
    service.outputs.log_targets.send_if_modified(|known| {
        let new = known.is_none() && targets.is_some();
        if new {
            *known = targets;
        }
        new
    });
    let time = recall(&service.config.time_servers, "the time servers").await;
    take_up(&service.outputs.time_servers, time);
    let firewall = recall(&service.config.firewall, "the firewall").await;
    let firewall = firewall.and_then(|kept| parameters::firewall(kept, "firewall").ok());
    if let Some(confirmed) = firewall {
        service.outputs.firewall.send_if_modified(|known| {
            let new = known.is_none();
            if new {
                *known = Some(Order { confirmed, tried: None });
            }
            new
        });
    }
    service.outputs.roles.send_if_modified(|known: &mut Option<v1::NodeRoles>| {
        let new = known.is_none() && roles.is_some();
        if new {
            *known = roles;
        }
        new
    });
}

/// The time servers of the last boot, unless the leader has sent newer ones.
fn take_up(known: &watch::Sender<Vec<NtpServer>>, kept: Option<v1::TimeConfiguration>) {
    let kept = kept.and_then(|kept| parameters::time_servers(kept, "time").ok());
    let Some(servers) = kept.filter(|servers| !servers.is_empty()) else { return };
    known.send_if_modified(|known| {
        let is_first = known.is_empty();
        if is_first {
            *known = servers;
        }
        is_first
    });
}

/// Reads what [`keep`] wrote.
async fn recall<M: prost::Message + Default>(file: &File, what: &str) -> Option<M> {
    let file = file.clone();
    match blocking(move || file.read()).await {
        Ok(Some(bytes)) => M::decode(bytes.as_slice()).ok(),
        Ok(None) => None,
        Err(error) => {
            warn!(error = &error as &dyn std::error::Error, "cannot read {what} of the last boot");
            None
        }
    }
}

async fn hear(service: &Service, own: NodeId) -> Result<(), Status> {
    let request = v1::WatchRequest::default();
    let call = |channel| {
        let request = request.clone();
        async move { CuratorClient::new(channel).watch(request).await }
    };
    let mut stream = service.client.call(Repeat::Allowed, call).await?.into_inner();
    // A machine that lost its power does not end its stream; a heartbeat notices first.
    let mut changed = std::pin::pin!(service.client.another_leader());
    let mut received = Received::default();
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
            publish(service, own, &mut received).await;
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

/// The content of one stream so far.
#[derive(Debug, Default)]
pub(super) struct Received {
    nodes: Nodes,
    revoked: Option<Serials>,
    /// The time servers, and as the message has them.
    time: Option<(Vec<NtpServer>, v1::TimeConfiguration)>,
    /// Those that the disk has.
    kept_time: Option<v1::TimeConfiguration>,
    /// The targets of logs, and as the message has them.
    log: Option<(forwarding::Order, v1::LogConfiguration)>,
    /// Those that the disk has.
    kept_log: Option<v1::LogConfiguration>,
    firewall: Option<Order>,
    /// The confirmed one that the disk has.
    kept_firewall: Option<Firewall>,
    users: Option<Users>,
    authorities: Option<Arc<Authorities>>,
    current: bool,
}

impl Received {
    pub(super) fn apply(&mut self, event: v1::WatchEvent) {
        for gone in event.gone {
            if let Ok(id) = gone.parse() {
                self.nodes.remove(&id);
            }
        }
        for node in event.nodes {
            // A node without an ID can be neither shown nor admitted.
            let Ok(id) = node.id.parse::<NodeId>() else { continue };
            if self.nodes.len() < NODES_MAX || self.nodes.contains_key(&id) {
                self.nodes.insert(id, node);
            }
        }
        if !event.crl.is_empty() {
            match Crl::read(&event.crl) {
                Some(crl) => self.revoked = Some(Arc::new(crl.serials())),
                // A node that the last message named stays out.
                None => error!("the CRL of the cluster cannot be read and is not used"),
            }
        }
        if let Some(time) = event.time {
            match parameters::time_servers(time.clone(), "time") {
                Ok(servers) => self.time = Some((servers, time)),
                Err(error) => error!(%error, "the time servers of the cluster are not used"),
            }
        }
        if let Some(log) = event.log {
            match forwarding::Order::read(log.clone()) {
                Ok(order) => self.log = Some((order, log)),
                Err(error) => error!(%error, "the targets of logs of the cluster are not used"),
            }
        }
        if let Some(order) = event.firewall {
            match read(order) {
                Ok(order) => self.firewall = Some(order),
                Err(error) => error!(%error, "the firewall of the cluster is not used"),
            }
        }
        if let Some(users) = event.users {
            self.users = Some(rpc::users(&users.users));
        }
        if let Some(authorities) = event.authorities {
            match Authorities::from_message(authorities) {
                Some(read) => self.authorities = Some(Arc::new(read)),
                None => error!("the CA of the cluster cannot be read; the last one stays"),
            }
        }
        self.current |= event.current;
    }

    /// The access list, where `before` had it.
    fn access_list(&self, before: &AccessList) -> AccessList {
        let in_state = |state| {
            let nodes = self.nodes.iter().filter(move |(_, node)| node.state() == state);
            nodes.map(|(id, _)| *id).collect()
        };
        AccessList {
            nodes: Some(in_state(v1::NodeState::Up)),
            removed: in_state(v1::NodeState::Decommissioned),
            serials: self.revoked.clone().unwrap_or_else(|| before.serials.clone()),
            users: self.users.clone().or_else(|| before.users.clone()),
        }
    }
}

async fn publish(service: &Service, own: NodeId, received: &mut Received) {
    let outputs = &service.outputs;
    let mut new_roles = None;
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
            new_roles = Some(roles);
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
        outputs.time_servers.send_if_modified(|known| {
            let changed = known != servers;
            known.clone_from(servers);
            changed
        });
    }
    if let Some((order, _)) = &received.log {
        outputs.log_targets.send_if_modified(|known| {
            let changed = known.as_ref() != Some(order);
            *known = Some(order.clone());
            changed
        });
    }
    if received.firewall.is_some() {
        outputs.firewall.send_if_modified(|known| {
            let changed = *known != received.firewall;
            known.clone_from(&received.firewall);
            changed
        });
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
    // Last: the disk may be slow, and callers wait for the list of users.
    if let Some(roles) = new_roles {
        keep(&service.config.roles, roles.encode_to_vec(), "the roles").await;
    }
    let log = received.log.as_ref().map(|(_, log)| log);
    if let Some(log) = log.filter(|log| Some(*log) != received.kept_log.as_ref()) {
        let record = log.encode_to_vec();
        if keep(&service.config.log_targets, record, "the targets of logs").await {
            received.kept_log = Some(log.clone());
        }
    }
    let time = received.time.as_ref().map(|(_, time)| time);
    if let Some(time) = time.filter(|time| Some(*time) != received.kept_time.as_ref()) {
        let record = time.encode_to_vec();
        if keep(&service.config.time_servers, record, "the time servers").await {
            received.kept_time = Some(time.clone());
        }
    }
    let confirmed = received.firewall.as_ref().map(|order| &order.confirmed);
    if let Some(firewall) = confirmed.filter(|it| Some(*it) != received.kept_firewall.as_ref()) {
        let record = firewall.to_message().encode_to_vec();
        if keep(&service.config.firewall, record, "the firewall").await {
            received.kept_firewall = Some(firewall.clone());
        }
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

/// Writes a file whose loss only costs a delay; returns whether the disk has it.
pub(super) async fn keep(file: &File, content: Vec<u8>, what: &str) -> bool {
    let saved = file.save(content).await;
    if let Err(error) = &saved {
        let error = error as &dyn std::error::Error;
        warn!(error, "cannot store {what} for the next boot");
    }
    saved.is_ok()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;
    use tokio::time::timeout;

    use super::*;

    fn node(seed: u8, state: v1::NodeState) -> v1::NodeInfo {
        let id = NodeId::from_public_key(&[seed; 32]).to_string();
        v1::NodeInfo { id, state: state.into(), ..Default::default() }
    }

    #[test]
    fn only_nodes_that_are_up_have_access() {
        let mut received = Received::default();
        let nodes = vec![node(1, v1::NodeState::Up), node(2, v1::NodeState::New)];
        received.apply(v1::WatchEvent { nodes, ..Default::default() });
        assert!(!received.current);
        received.apply(v1::WatchEvent { current: true, ..Default::default() });
        let before = AccessList { serials: Arc::new([vec![7]].into()), ..AccessList::default() };
        let access_list = received.access_list(&before);
        assert_eq!(access_list.nodes, Some([NodeId::from_public_key(&[1; 32])].into()));
        assert_eq!(access_list.serials, before.serials, "without a new CRL the last one stays");
        let gone = vec![node(1, v1::NodeState::Up).id];
        received.apply(v1::WatchEvent { gone, ..Default::default() });
        assert_eq!(received.access_list(&before).nodes, Some(BTreeSet::new()));
    }

    #[test]
    fn the_health_of_nodes_goes_with_the_leader_that_reported_it() {
        let id = NodeId::from_public_key(&[1; 32]);
        let mut healthy = node(1, v1::NodeState::Up);
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

    #[tokio::test]
    async fn the_time_servers_of_the_last_boot_count_until_the_leader_sends_others() {
        let folder = tempfile::tempdir().unwrap();
        let file = File::private(folder.path().join("time_servers.pb"));
        let of = |host: &str| {
            let server = v1::NtpServer { host: host.to_owned(), nts: true };
            v1::TimeConfiguration { servers: vec![server] }
        };
        assert!(keep(&file, of("192.0.2.1").encode_to_vec(), "the time servers").await);
        let known = watch::Sender::new(Vec::new());
        take_up(&known, recall(&file, "the time servers").await);
        assert_eq!(known.borrow()[0].host, "192.0.2.1");
        take_up(&known, Some(of("192.0.2.2")));
        assert_eq!(known.borrow()[0].host, "192.0.2.1", "the leader's stay");
        let known = watch::Sender::new(Vec::new());
        for unusable in [None, Some(of("a b")), Some(v1::TimeConfiguration::default())] {
            take_up(&known, unusable);
            assert_eq!(known.borrow().len(), 0);
        }
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

    proptest! {
        #[test]
        fn arbitrary_events_do_no_harm(
            ids in prop::collection::vec(".{0,50}", 0..20), gone in prop::collection::vec(".{0,50}", 0..20),
            crl in prop::collection::vec(any::<u8>(), 0..200), current: bool, host in ".{0,50}",
            name in ".{0,50}", public_key in prop::collection::vec(any::<u8>(), 0..40), role: i32,
            signing in prop::collection::vec(any::<u8>(), 0..200),
            tried in prop::option::of(prop::collection::vec(".{0,50}", 0..4)), tried_for_ms: u32,
        ) {
            let nodes = ids.into_iter().map(|id| v1::NodeInfo { id, ..Default::default() });
            let mut received = Received::default();
            let server = v1::NtpServer { host: host.clone(), nts: false };
            let time = Some(v1::TimeConfiguration { servers: vec![server] });
            let user = v1::User { name, role, public_key, revoked: false };
            let users = Some(v1::Users { users: vec![user] });
            let nodes = nodes.collect();
            let authorities = Some(v1::Authorities { signing, ..Default::default() });
            let target = v1::LogTarget { url: host.clone(), ca: String::new() };
            let cluster_domain = host.clone();
            let log = Some(v1::LogConfiguration { targets: vec![target], cluster_domain });
            let named = |sources| v1::FirewallConfiguration { sources, ports: vec![host.clone()] };
            let firewall = Some(v1::FirewallOrder {
                confirmed: Some(named(Vec::new())),
                tried: tried.map(named),
                tried_for_ms,
            });
            received.apply(v1::WatchEvent {
                nodes, gone, current, crl, time, users, authorities, firewall, log,
            });
            // Its text becomes the input of `nft`.
            let order = received.firewall.iter().flat_map(|order| &order.confirmed.ports);
            prop_assert!(order.map(ToString::to_string).all(|ports| ports == host));
            prop_assert!(received.revoked.is_none() && received.authorities.is_none());
            // A host is part of a line of chronyd's configuration.
            let servers = received.time.iter().flat_map(|(servers, _)| servers);
            prop_assert!(servers.into_iter().all(|server| !server.host.contains(char::is_whitespace)));
        }
    }
}
