//! What this node keeps of the messages of the leader for the next boot: a node that starts
//! while it reaches no leader has the roles and the configuration of its last boot.
//!
//! Invariants:
//! - A kept value never takes the place of one that this node received in this boot, except for
//!   the networks, which a cluster never changes: no leader replaces those that were kept.
//! - Roles are neither written nor taken up before the networks that they use.

use polis_proto::v1;
use prost::Message as _;
use tokio::sync::watch;
use tracing::warn;

use super::received::{NETWORKS, Received, read_networks};
use super::{Config, Service};
use crate::firewall::Order;
use crate::forwarding;
use polis_base::files::File;
use polis_machine::parameters::{self, NtpServer, Proxy};
use polis_runtime::save::Save as _;
use polis_runtime::supervisor::blocking;
use polis_wire::pod_network::Networks;

/// The file with the networks cannot be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Damaged;

/// Takes up the roles and the firewall of the last boot, until a newer message arrives. Returns the
/// networks of pods and Services that the disk has.
pub(super) async fn remember(service: &Service) -> Option<Networks> {
    // Before the roles: what they start uses them.
    let networks = recall_networks(&service.config.networks, &service.outputs.networks).await;
    let roles = match networks {
        Ok(_) => recall(&service.config.roles, "the roles").await,
        Err(Damaged) => None,
    };
    recall_outside(&service.config, &service.outputs.proxy, &service.outputs.log_targets).await;
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
    networks.unwrap_or_default()
}

/// Writes what the disk does not have yet of a stream. A failed write is repeated with the next
/// message.
pub(super) async fn store(service: &Service, received: &mut Received) {
    if let Some(networks) = received.networks.filter(|it| Some(*it) != received.kept_networks)
        && keep(&service.config.networks, networks.to_message().encode_to_vec(), NETWORKS).await
    {
        received.kept_networks = Some(networks);
    }
    if let Some(roles) = received.roles_to_keep()
        && keep(&service.config.roles, roles.encode_to_vec(), "the roles").await
    {
        received.new_roles = None;
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
    let proxy = received.proxy.as_ref().map(|(_, message)| message);
    if let Some(proxy) = proxy.filter(|proxy| Some(*proxy) != received.kept_proxy.as_ref())
        && keep(&service.config.proxy, proxy.encode_to_vec(), "the proxy").await
    {
        received.kept_proxy = Some(proxy.clone());
    }
    let confirmed = received.firewall.as_ref().map(|order| &order.confirmed);
    if let Some(firewall) = confirmed.filter(|it| Some(*it) != received.kept_firewall.as_ref()) {
        let record = firewall.to_message().encode_to_vec();
        if keep(&service.config.firewall, record, "the firewall").await {
            received.kept_firewall = Some(firewall.clone());
        }
    }
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

/// Publishes a value that is another than the last one.
pub(super) fn show<T: Clone + PartialEq>(known: &watch::Sender<T>, new: &T) {
    known.send_if_modified(|known| {
        let changed = *known != *new;
        known.clone_from(new);
        changed
    });
}

/// Takes up the proxy of the last boot, and then the targets of logs: no record goes to a target
/// past the proxy.
async fn recall_outside(
    config: &Config,
    proxy: &watch::Sender<Option<Proxy>>,
    log_targets: &watch::Sender<Option<forwarding::Order>>,
) {
    take_up_proxy(proxy, recall(&config.proxy, "the proxy").await);
    let log = recall(&config.log_targets, "the targets of logs").await;
    let targets = log.and_then(|kept| forwarding::Order::read(kept).ok());
    log_targets.send_if_modified(|known| {
        let new = known.is_none() && targets.is_some();
        if new {
            *known = targets;
        }
        new
    });
}

/// Takes up the networks of the last boot. If they cannot be read, those of the cluster may be
/// others than the default ones, and the roles wait for a leader. A node without the file has the
/// default ones until a leader names others: an earlier version wrote its roles.
async fn recall_networks(
    file: &File,
    known: &watch::Sender<Networks>,
) -> Result<Option<Networks>, Damaged> {
    let reading = file.clone();
    let kept = match blocking(move || reading.read()).await {
        Ok(Some(bytes)) => v1::ClusterNetworks::decode(bytes.as_slice()).ok(),
        Ok(None) => return Ok(None),
        Err(error) => {
            let error = &error as &dyn std::error::Error;
            warn!(error, "cannot read {NETWORKS} of the last boot");
            None
        }
    };
    // A file that this node wrote names both.
    let kept = kept.filter(|it| !it.pod_network.is_empty() && !it.service_network.is_empty());
    let networks = kept.and_then(|kept| read_networks(&kept));
    match networks {
        Some(networks) => show(known, &networks),
        None => warn!("without {NETWORKS}, the roles of this node wait for a leader"),
    }
    networks.map(Some).ok_or(Damaged)
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

/// The proxy of the last boot, unless the leader has sent a newer one. The roles follow it: what
/// they start has the proxy from its start.
fn take_up_proxy(known: &watch::Sender<Option<Proxy>>, kept: Option<v1::ProxyConfiguration>) {
    let read = kept.and_then(|kept| parameters::proxy(&kept, "proxy").ok());
    let Some(proxy) = read.flatten() else { return };
    known.send_if_modified(|known| {
        let is_first = known.is_none();
        if is_first {
            *known = Some(proxy);
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

#[cfg(test)]
mod tests {
    use polis_wire::node_roles::Role;

    use super::*;

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

    #[tokio::test]
    async fn the_networks_of_the_cluster_are_kept_for_the_next_boot_and_stay_as_they_are() {
        let folder = tempfile::tempdir().unwrap();
        let file = File::private(folder.path().join("networks.pb"));
        let of = |pods: &str| v1::ClusterNetworks {
            pod_network: pods.to_owned(),
            service_network: "192.168.0.0/24".to_owned(),
        };
        let mut received = Received::default();
        let event = |networks| v1::WatchEvent { networks, ..Default::default() };
        received.apply(event(Some(of("172.16.0.0/12"))));
        let networks = received.networks.unwrap();
        assert_eq!(networks.to_message(), of("172.16.0.0/12"));
        // A leader of an earlier version has none, and noise is not used.
        for other in [None, Some(of("172.16.0.1/12")), Some(of("192.168.0.0/16"))] {
            received.apply(event(other));
            assert_eq!(received.networks, Some(networks));
            assert_eq!(received.networks_fault(), None);
        }
        assert!(keep(&file, networks.to_message().encode_to_vec(), NETWORKS).await);
        received.new_roles = Some(Role::record(&[Role::KubernetesWorker]));
        assert_eq!(received.roles_to_keep(), None, "the disk does not have the networks");
        received.kept_networks = Some(networks);
        assert_eq!(received.roles_to_keep(), received.new_roles);
        let known = watch::Sender::new(Networks::default());
        let mut seen = known.subscribe();
        assert_eq!(recall_networks(&file, &known).await, Ok(Some(networks)));
        assert_eq!(*seen.borrow_and_update(), networks);
        show(&known, &networks);
        assert!(!seen.has_changed().unwrap(), "the same networks start nothing again");
    }

    #[tokio::test]
    async fn roles_wait_for_a_leader_where_the_kept_networks_are_damaged() {
        let folder = tempfile::tempdir().unwrap();
        let file = File::private(folder.path().join("networks.pb"));
        let networks =
            Networks { services: "192.168.0.0/24".parse().unwrap(), ..Networks::default() };
        let known = watch::Sender::new(networks);
        let none = recall_networks(&file, &known).await;
        assert_eq!(none, Ok(None), "an earlier version kept none");
        let half = v1::ClusterNetworks { service_network: String::new(), ..networks.to_message() };
        let mut bad = networks.to_message();
        "10.0.0.1/8".clone_into(&mut bad.pod_network);
        for damaged in [Vec::new(), vec![0xff; 9], half.encode_to_vec(), bad.encode_to_vec()] {
            assert!(keep(&file, damaged.clone(), NETWORKS).await);
            assert_eq!(recall_networks(&file, &known).await, Err(Damaged), "{damaged:?}");
        }
        assert_eq!(*known.borrow(), networks, "what the leader named stays");
    }

    #[tokio::test]
    async fn kept_networks_stay_where_a_leader_names_others_and_the_fault_says_why() {
        let folder = tempfile::tempdir().unwrap();
        let file = File::private(folder.path().join("networks.pb"));
        let kept = Networks {
            pods: "172.16.0.0/13".parse().unwrap(),
            services: "172.24.0.0/16".parse().unwrap(),
        };
        assert!(keep(&file, kept.to_message().encode_to_vec(), NETWORKS).await);
        let known = watch::Sender::new(Networks::default());
        let recalled = recall_networks(&file, &known).await.unwrap();
        let mut received = Received::with(recalled);
        let event = |networks: Networks| v1::WatchEvent {
            networks: Some(networks.to_message()),
            ..Default::default()
        };
        // A leader of an earlier version wrote the configuration: it names none, so the default.
        received.apply(event(Networks::default()));
        assert_eq!(received.networks, Some(kept));
        let fault = received.networks_fault().unwrap();
        for part in ["10.192.0.0/11", "172.16.0.0/13", "earlier version", "update all nodes"] {
            assert!(fault.contains(part), "{fault}");
        }
        // The networks are no reason against roles, which use the kept ones.
        received.kept_networks = Some(kept);
        received.new_roles = Some(Role::record(&[Role::KubernetesWorker]));
        assert_eq!(received.roles_to_keep(), received.new_roles);
        received.apply(event(kept));
        assert_eq!((received.networks, received.networks_fault()), (Some(kept), None));
    }

    #[tokio::test]
    async fn the_targets_of_logs_of_the_last_boot_follow_its_proxy() {
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str| File::private(folder.path().join(name));
        let root = polis_base::files::Root::at(folder.path());
        let (kept_proxy, log_targets) = (file("proxy.pb"), file("log_targets.pb"));
        let config = Config { proxy: kept_proxy, log_targets, ..Config::live(&root) };
        let url = "http://proxy.example:3128".to_owned();
        let kept = v1::ProxyConfiguration { url: url.clone(), ..Default::default() };
        assert!(keep(&config.proxy, kept.encode_to_vec(), "the proxy").await);
        let target =
            v1::LogTarget { url: "otlp+https://logs.example".to_owned(), ..Default::default() };
        let kept = v1::LogConfiguration { targets: vec![target], ..Default::default() };
        assert!(keep(&config.log_targets, kept.encode_to_vec(), "the targets of logs").await);
        let proxy: watch::Sender<Option<Proxy>> = watch::Sender::new(None);
        let targets = watch::Sender::new(None);
        let mut seen = targets.subscribe();
        let follower = async {
            seen.changed().await.unwrap();
            proxy.borrow().as_ref().map(Proxy::url)
        };
        let recalled = recall_outside(&config, &proxy, &targets);
        // The follower is polled first: it sees the targets before the next step of the other.
        let (first, ()) = tokio::join!(biased; follower, recalled);
        assert_eq!(first, Some(url));
    }

    #[tokio::test]
    async fn the_proxy_of_the_last_boot_counts_until_the_leader_names_another_or_none() {
        let folder = tempfile::tempdir().unwrap();
        let file = File::private(folder.path().join("proxy.pb"));
        let of = |url: &str| v1::ProxyConfiguration { url: url.to_owned(), ..Default::default() };
        let kept = of("http://a.example:3128");
        assert!(keep(&file, kept.encode_to_vec(), "the proxy").await);
        let known = watch::Sender::new(None);
        take_up_proxy(&known, recall(&file, "the proxy").await);
        assert_eq!(known.borrow().as_ref().map(Proxy::url), Some(kept.url));
        let mut received = Received::default();
        // One that cannot be read leaves the last one in place.
        for (url, is_used) in [("http://b.example:3128", true), ("noise", true), ("", false)] {
            received.apply(v1::WatchEvent { proxy: Some(of(url)), ..Default::default() });
            let (proxy, _) = received.proxy.as_ref().unwrap();
            assert_eq!(proxy.is_some(), is_used, "{url}");
            show(&known, proxy);
        }
        assert_eq!(*known.borrow(), None);
    }
}
