//! `polisctl cluster configure --firewall-source`: tries another firewall and confirms it, from
//! outside and through it.
//!
//! ```text
//! configure --> nodes have it on trial --> a new connection to each --> confirm
//!                                              | one fails
//!                                              +--> the trial ends by itself
//! ```

use std::time::Duration;

use futures::{StreamExt as _, TryStreamExt as _};
use polis_proto::v1;
use polis_proto::v1::management_client::ManagementClient;
use polis_proto::v1::node_management_client::NodeManagementClient;
use tokio::time::{Instant, sleep, timeout_at};

use crate::Global;
use crate::error::Error;
use crate::node::called;
use crate::session::{Session, refused, target};
use polis_wire::rpc::client::Repeat;

/// Between two attempts at a node.
const AGAIN: Duration = Duration::from_millis(if cfg!(test) { 1 } else { 500 });

/// Nodes that are called at the same time.
const CALLS_MAX: usize = 32;

/// How long nodes may take to apply it and to answer through it: half of the trial.
const ANSWER: Duration = Duration::from_millis(if cfg!(test) { 1_000 } else { 60_000 });

/// The options of the firewall.
#[derive(Debug, Default, clap::Args)]
pub(crate) struct Wish {
    /// A network, or an address, from which operators, collectors of metrics and clients of
    /// Kubernetes may call nodes. Repeatable; the former sources end. Nodes need no entry, and
    /// every address reaches the leader.
    #[arg(long = "firewall-source", value_name = "NETWORK")]
    sources: Vec<String>,
    /// Accept these callers from any address, as a new cluster does.
    #[arg(long, conflicts_with = "sources")]
    firewall_any_source: bool,
    /// A port that nodes accept from any address, for pods in the network of their node, such as
    /// tcp/443 or udp/5000-5100. Repeatable; the former ports are closed.
    #[arg(long = "firewall-port", value_name = "PROTOCOL/PORT")]
    ports: Vec<String>,
    /// Close the ports of --firewall-port.
    #[arg(long, conflicts_with = "ports")]
    no_firewall_ports: bool,
}

impl Wish {
    pub(super) fn is_empty(&self) -> bool {
        self.sources.is_empty()
            && !self.firewall_any_source
            && self.ports.is_empty()
            && !self.no_firewall_ports
    }

    /// The given options.
    pub(super) fn options(&self) -> Vec<String> {
        let flag = |set: bool, name: &str| set.then(|| name.to_owned());
        let sources = self.sources.iter().map(|source| format!("--firewall-source {source}"));
        let ports = self.ports.iter().map(|port| format!("--firewall-port {port}"));
        let any = flag(self.firewall_any_source, "--firewall-any-source");
        let none = flag(self.no_firewall_ports, "--no-firewall-ports");
        sources.chain(any).chain(ports).chain(none).collect()
    }

    /// The firewall after the change; a part that is not named stays as it was confirmed.
    fn of(&self, confirmed: v1::FirewallConfiguration) -> v1::FirewallConfiguration {
        let sources = !self.sources.is_empty() || self.firewall_any_source;
        let ports = !self.ports.is_empty() || self.no_firewall_ports;
        v1::FirewallConfiguration {
            sources: if sources { self.sources.clone() } else { confirmed.sources },
            ports: if ports { self.ports.clone() } else { confirmed.ports },
        }
    }

    /// The firewall after the change, of a cluster as it is now.
    pub(super) async fn over(
        &self,
        session: &Session,
    ) -> Result<Option<v1::FirewallConfiguration>, Error> {
        if self.is_empty() {
            return Ok(None);
        }
        let known = session.cluster_info().await?.configuration.unwrap_or_default();
        Ok(Some(self.of(known.firewall.unwrap_or_default())))
    }
}

/// Reaches every healthy node through the firewall that is tried, and confirms it.
pub(super) async fn confirm(
    configured: &v1::ClusterConfiguration,
    session: &Session,
    global: &Global,
) -> Result<(), Error> {
    let trial = configured.firewall_trial.as_ref();
    let Some(tried) = trial.and_then(|trial| trial.configuration.clone()) else {
        // It is the former one.
        return Ok(());
    };
    let reached = Box::pin(reach(&tried, session, global)).await;
    let confirmed = async {
        reached?;
        // Another session, so another connection: one that is open passes every firewall.
        let session = Session::open(global).await?;
        let made = session.call("confirm the firewall", Repeat::Allowed, |channel| {
            let request = v1::ConfirmFirewallRequest { configuration: Some(tried.clone()) };
            async move { ManagementClient::new(channel).confirm_firewall(request).await }
        });
        Box::pin(made).await.map(drop)
    };
    Box::pin(confirmed).await.map_err(|error| {
        error.context(
            "the firewall is not confirmed; every node returns to the former one within two \
             minutes",
        )
    })
}

/// Opens a connection to every healthy node, once it has the firewall.
async fn reach(
    tried: &v1::FirewallConfiguration,
    session: &Session,
    global: &Global,
) -> Result<(), Error> {
    let end = Instant::now() + ANSWER;
    let progress = global.out.progress();
    progress.says("calling every healthy node through the firewall");
    let nodes = healthy(session, end).await?;
    let calls = nodes.iter().map(|node| Box::pin(reached(tried, node, session, end)));
    let calls = futures::stream::iter(calls).buffer_unordered(CALLS_MAX);
    calls.try_collect::<()>().await
}

/// The healthy nodes, once a leader knows which are: a new one knows it after some heartbeats. A
/// node that is away gets the firewall when it is back.
async fn healthy(session: &Session, end: Instant) -> Result<Vec<v1::NodeInfo>, Error> {
    loop {
        let nodes = session.nodes(&[]).await?;
        let up = nodes.into_iter().filter(|node| node.state() == v1::NodeState::Up);
        let (healthy, others): (Vec<_>, Vec<_>) =
            up.partition(|node| node.health() == v1::NodeHealth::Healthy);
        let unknown = others.iter().any(|node| node.health() == v1::NodeHealth::Unknown);
        if !unknown && !healthy.is_empty() {
            return Ok(healthy);
        }
        if Instant::now() >= end {
            return Err(Error::timed_out("the leader does not report which nodes are healthy")
                .or_help("see how they are: `polisctl cluster status`"));
        }
        sleep(AGAIN).await;
    }
}

/// Waits until a node answers a new connection, with the firewall in force.
async fn reached(
    tried: &v1::FirewallConfiguration,
    node: &v1::NodeInfo,
    session: &Session,
    end: Instant,
) -> Result<(), Error> {
    let mut last = None;
    loop {
        match timeout_at(end, Box::pin(has(tried, node, session))).await {
            Ok(Ok(true)) => return Ok(()),
            Ok(Ok(false)) => last = None,
            Ok(Err(error)) => last = Some(error),
            Err(_elapsed) => {
                let slow = || Error::timed_out("it has not set the rules, or does not answer");
                let what = format!("{} was not reached through the firewall", called(node));
                return Err(last.map_or_else(slow, Error::after_a_wait).context(what).or_help(
                    "name a source that has the address of this machine, as the nodes see it",
                ));
            }
        }
        sleep(AGAIN).await;
    }
}

/// Whether the node answers a new connection, and has the firewall in force.
async fn has(
    tried: &v1::FirewallConfiguration,
    node: &v1::NodeInfo,
    session: &Session,
) -> Result<bool, Error> {
    let channel = session.node(&target(node)?).await?;
    let answer = NodeManagementClient::new(channel).get_firewall(v1::GetFirewallRequest {}).await;
    let answer = answer.map_err(|status| refused("read the firewall of the node", &status))?;
    let answer = answer.into_inner();
    Ok(answer.in_force && answer.configuration.as_ref() == Some(tried))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::loopback::{Cluster, KEPT_OUT};
    use crate::testing::World;

    #[test]
    fn a_firewall_is_confirmed_once_every_node_was_reached_through_it() {
        let world = World::new();
        let cluster = Cluster::new(&world);
        let done = world.run(&["cluster", "configure", "--firewall-source", "127.0.0.0/8"]);
        assert_eq!(done.status, 0, "{}", done.stderr);
        let asked = cluster.asked();
        assert_eq!(asked, ["ConfigureCluster", "GetFirewall", "ConfirmFirewall"]);
    }

    #[test]
    fn a_firewall_that_keeps_its_operator_out_is_not_confirmed() {
        let world = World::new();
        let cluster = Cluster::new(&world);
        let failed = world.run(&["cluster", "configure", "--firewall-source", KEPT_OUT]);
        assert_eq!((failed.status, &*failed.stdout), (3, ""));
        for words in
            ["returns to the former one within", "was not reached through", "help: name a source"]
        {
            assert!(failed.stderr.contains(words), "{words}: {}", failed.stderr);
        }
        assert!(!cluster.asked().contains(&"ConfirmFirewall".to_owned()));
    }

    #[test]
    fn what_is_not_named_stays() {
        let confirmed = v1::FirewallConfiguration {
            sources: vec!["192.0.2.1".to_owned()],
            ports: vec!["tcp/443".to_owned()],
        };
        let ports = Wish { ports: vec!["udp/53".to_owned()], ..Wish::default() };
        let changed = ports.of(confirmed.clone());
        assert_eq!((changed.sources, changed.ports), (confirmed.sources.clone(), ports.ports));
        let any = Wish { firewall_any_source: true, ..Wish::default() };
        let changed = any.of(confirmed.clone());
        assert_eq!((changed.sources, changed.ports), (Vec::new(), confirmed.ports.clone()));
        let none = Wish { no_firewall_ports: true, ..Wish::default() }.of(confirmed.clone());
        assert_eq!((none.sources, none.ports), (confirmed.sources, Vec::new()));
    }
}
