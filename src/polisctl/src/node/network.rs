//! `polisctl node network`: the links of a node, and another network for it, which the node tries
//! and keeps only if it still reaches the cluster.
//!
//! ```text
//! order --> leader --> node tries it --> a curator answers over it --> confirmed
//!                          |  45 s without
//!                          +--> reverted: the former one, and the cause
//! ```
//!
//! A leader that is ordered another network for its own node has no other curator to ask. It counts
//! a new connection from another machine, so every look at its state is over a new connection.

use std::time::Duration;

use polis_proto::v1;
use polis_proto::v1::management_client::ManagementClient;
use serde::Serialize;
use tokio::time::{Instant, sleep, timeout_at};

use super::called;
use super::view::network_faults;
use crate::Global;
use crate::ask::{DryRun, Go};
use crate::error::{Error, Explain as _};
use crate::output::{Document, Text, or_dash};
use crate::parameters::network::{self, Links};
use crate::session::Session;
use crate::table::table;
use crate::text::{clean, word};
use polis_wire::parameters;
use polis_wire::rpc::client::Repeat;

/// Between two looks at the state of the order.
const AGAIN: Duration = Duration::from_millis(if cfg!(test) { 1 } else { 1000 });

/// How long the answer may take: the trial of 45 seconds, and the way there and back.
const ANSWER: Duration = Duration::from_millis(if cfg!(test) { 500 } else { 90_000 });

/// The node, and its network.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// The node.
    node: String,
    #[command(flatten)]
    links: Links,
    /// Return to the network in the parameters of the node.
    #[arg(
        long,
        conflicts_with_all = ["interfaces", "bonds", "vlans", "nameservers", "ntp_servers"]
    )]
    from_parameters: bool,
    #[command(flatten)]
    dry_run: DryRun,
}

/// The network of a node, as programs read it.
#[derive(Debug, Serialize)]
struct View {
    node: String,
    /// `none`, `trying`, `confirmed`, `reverted` or `refused`.
    state: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    cause: String,
    /// The one that was ordered last; `null`: none, or that of the parameters.
    ordered: Option<network::View>,
    links: Vec<LinkView>,
    /// Parts of the network without a link, and addresses that another machine has, too.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    faults: Vec<String>,
}

#[derive(Debug, Serialize)]
struct LinkView {
    name: String,
    kind: String,
    carrier: bool,
    addresses: Vec<String>,
    /// Where each address is from: `DHCP`, `DHCPv6`, `configuration` or `router`.
    origins: Vec<String>,
    mac: String,
    driver: String,
    path: String,
    mtu: u32,
    /// The bond of a card, or the link below a VLAN.
    on: String,
    vlan: Option<u32>,
}

/// Prints the network of a node, or orders another one.
pub(super) async fn run(arguments: &Arguments, global: &Global) -> Result<(), Error> {
    let message = arguments.links.message()?;
    let is_empty = message == v1::NetworkConfiguration::default();
    if is_empty && !arguments.from_parameters {
        // The node is only looked at.
        let session = Session::open(global).await?;
        let node = session.find(&arguments.node).await?;
        return global.out.print(&View::of(&node).document()?);
    }
    let configuration = (!arguments.from_parameters).then_some(message);
    if let Some(message) = configuration.clone() {
        parameters::network(message, "network")
            .help(|| "docs/parameters.md lists every field and its values".to_owned())?;
    }
    let mut session = Session::open(global).await?;
    let node = session.find(&arguments.node).await?;
    let effect = format!(
        "{} tries {}, and returns to its former network unless it still reaches a curator.",
        called(&node),
        if configuration.is_some() { "this network" } else { "the network of its parameters" }
    );
    if arguments.dry_run.of(global, &effect)? == Go::NoFurther {
        return Ok(());
    }
    let request = v1::ConfigureNodeNetworkRequest { node_id: node.id.clone(), configuration };
    let ordered = session.call("order the network of the node", Repeat::Allowed, |channel| {
        let request = request.clone();
        async move { ManagementClient::new(channel).configure_node_network(request).await }
    });
    let number = Box::pin(ordered).await?.network_order.map_or(0, |order| order.number);
    let progress = global.out.progress();
    progress.says("waiting until the node has tried the network");
    let node = Box::pin(outcome(&node.id, number, &mut session, global)).await?;
    drop(progress);
    let report = report(&node);
    if report.state() == v1::NetworkState::Confirmed {
        return global.out.print(&View::of(&node).document()?);
    }
    let state = word(report.state().as_str_name(), "NETWORK_STATE_");
    Err(Error::new(format!("{} has its former network: {}", called(&node), clean(&report.cause)))
        .or_help(format!(
            "the order is {state}; see what there is: `polisctl node network {}`",
            node.id
        )))
}

/// The node once it has tried the order.
async fn outcome(
    id: &str,
    number: u64,
    session: &mut Session,
    global: &Global,
) -> Result<v1::NodeInfo, Error> {
    let end = session.end().unwrap_or_else(|| Instant::now() + ANSWER);
    loop {
        // Another connection: one that is open proves nothing to a node that leads.
        session.reconnect(global)?;
        let last = match timeout_at(end, Box::pin(session.find(id))).await {
            Ok(Ok(node)) => {
                let report = report(&node);
                let trying = report.state() == v1::NetworkState::Trying;
                if report.number == number && !trying {
                    return Ok(node);
                }
                None
            }
            // A leader that tries another network is away for a moment.
            Ok(Err(error)) => Some(error),
            Err(_elapsed) => None,
        };
        if Instant::now() >= end {
            let silent = "the node has not reported the outcome";
            let error = match last {
                Some(error) => error.after_a_wait().context(silent),
                None => Error::timed_out(silent),
            };
            return Err(error.or_help(
                "a node that reaches no curator has its former network by now: check its console, \
                 page Network; a node with another address needs another --endpoint",
            ));
        }
        sleep(AGAIN).await;
    }
}

fn report(node: &v1::NodeInfo) -> v1::NetworkReport {
    node.status.as_ref().and_then(|status| status.network.clone()).unwrap_or_default()
}

impl View {
    fn of(node: &v1::NodeInfo) -> Self {
        let report = report(node);
        let order = node.network_order.clone().unwrap_or_default();
        // The report may be of the order before.
        let state = match report.number == order.number {
            true => report.state(),
            false => v1::NetworkState::Trying,
        };
        let state = match state {
            v1::NetworkState::Unspecified => "none".to_owned(),
            state => word(state.as_str_name(), "NETWORK_STATE_"),
        };
        let ordered = order.configuration;
        let ordered = ordered.and_then(|message| parameters::network(message, "network").ok());
        let link = |link: &v1::NetworkLink| LinkView {
            name: clean(&link.name),
            kind: clean(&link.kind),
            carrier: link.carrier,
            addresses: link.addresses.iter().map(|address| clean(address)).collect(),
            origins: link.origins.iter().map(|origin| clean(origin)).collect(),
            mac: clean(&link.mac),
            driver: clean(&link.driver),
            path: clean(&link.path),
            mtu: link.mtu,
            on: clean(&link.on),
            vlan: (link.vlan != 0).then_some(link.vlan),
        };
        Self {
            node: node.id.clone(),
            state,
            cause: clean(&report.cause),
            ordered: ordered.as_ref().map(network::View::of),
            links: report.links.iter().map(link).collect(),
            faults: network_faults(Some(&report)),
        }
    }

    fn document(&self) -> Result<Document, Error> {
        let row = |link: &LinkView| {
            let kind = match (link.vlan, &*link.on) {
                (Some(id), on) => format!("VLAN {id} on {on}"),
                (None, "") => link.kind.clone(),
                (None, on) => format!("{} in {on}", link.kind),
            };
            let carrier = if link.carrier { "yes" } else { "no" };
            vec![
                link.name.clone(),
                kind,
                carrier.to_owned(),
                or_dash(&addresses(link).join(", ")),
                link.mac.clone(),
                or_dash(&link.driver),
                or_dash(&link.path),
            ]
        };
        let rows: Vec<_> = self.links.iter().map(row).collect();
        let heads = ["LINK", "KIND", "CARRIER", "ADDRESSES", "MAC", "DRIVER", "PATH"];
        let mut text = Text::default().then(table(&heads, &rows));
        if !self.faults.is_empty() {
            text = text.and(format!("\n{}\n", self.faults.join("\n")));
        }
        let order = match (&*self.state, &*self.cause) {
            ("none", _) => {
                "\nNo network was ordered: that of its parameters is in force.\n".to_owned()
            }
            (state, "") => format!("\nThe ordered network: {state}.\n"),
            (state, cause) => format!("\nThe ordered network: {state}: {cause}.\n"),
        };
        text = text.and(order);
        if let Some(ordered) = &self.ordered {
            text = text.and(crate::output::fields(&ordered.fields()));
        }
        Document::new(self, text)
    }
}

/// The addresses of a link, with where each is from.
fn addresses(link: &LinkView) -> Vec<String> {
    // Nodes of former versions do not report that.
    let origins = link.origins.iter().map(String::as_str).chain(std::iter::repeat(""));
    let all = link.addresses.iter().zip(origins);
    let shown = all.map(|(address, origin)| match origin {
        "" => address.clone(),
        origin => format!("{address} by {origin}"),
    });
    shown.collect()
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use polis_proto::v1;

    use crate::loopback::{Cluster, NODE, REVERTS, TRIES};
    use crate::output::Format;
    use crate::testing::World;
    use polis_wire::rpc::testing::node_id;

    const BOND: &[&str] =
        &["--bond", "bond0,member=eth0,member=eth1", "--vlan", "bond0,id=7,dhcp,ipv6=dhcpv6"];

    #[test]
    fn a_network_that_the_node_confirms_is_shown_with_its_links() {
        let world = World::new();
        let cluster = Cluster::new(&world);
        let id = node_id(NODE).to_string();
        let shown = world.runs(&["node", "network", &id]);
        assert!(shown.contains("No network was ordered"), "{shown}");
        let shown = world.runs(&[&["node", "network", &id], BOND].concat());
        for words in [
            "The ordered network: confirmed.",
            "bond0 of eth0 and eth1, active-backup",
            "7 on bond0, DHCP, IPv6 dhcpv6",
            "VLAN 7 on bond0",
            "card in bond0",
            "10.0.2.15/24 by DHCP, 2001:db8::7/128 by DHCPv6",
        ] {
            assert!(shown.contains(words), "{words}:\n{shown}");
        }
        assert_eq!(cluster.asked(), ["ConfigureNodeNetwork"]);
    }

    #[test]
    fn an_address_that_another_machine_has_too_is_below_the_links() {
        let fault = "another machine, 02:00:00:00:00:09, has the address 192.0.2.1 of eth0, too";
        let link = v1::NetworkLink { name: "eth0".to_owned(), ..Default::default() };
        let network = v1::NetworkReport {
            links: vec![link],
            faults: vec![format!("{fault}\u{1b}")],
            ..Default::default()
        };
        let status = v1::NodeStatus { network: Some(network), ..Default::default() };
        let node = v1::NodeInfo { status: Some(status), ..Default::default() };
        let document = super::View::of(&node).document().unwrap();
        let shown = document.render(Format::Table).unwrap();
        assert!(shown.contains(&format!("\n\n{fault}?\n\nNo network was ordered")), "{shown}");
        assert_eq!(document.value()["faults"][0], format!("{fault}?"));
    }

    #[test]
    fn a_network_that_the_node_gives_up_is_a_failure_with_its_cause() {
        let world = World::new();
        let _cluster = Cluster::new(&world);
        let id = node_id(NODE).to_string();
        let ended = world.run(&["node", "network", &id, "--nameserver", REVERTS]);
        assert_eq!(ended.status, 1);
        for words in ["has its former network: no curator was reached", "the order is reverted"] {
            assert!(ended.stderr.contains(words), "{words}: {}", ended.stderr);
        }
        let shown = world.runs(&["node", "network", &id]);
        assert!(shown.contains("reverted: no curator was reached"), "{shown}");
    }

    #[test]
    fn a_wait_for_the_outcome_that_is_over_is_a_timeout_and_is_as_long_as_was_asked_for() {
        let world = World::new();
        let _cluster = Cluster::new(&world);
        let id = node_id(NODE).to_string();
        let order = ["node", "network", &*id, "--nameserver", TRIES];
        for (more, least) in [(&[][..], 0), (&["--timeout", "3s"], 3)] {
            let begun = Instant::now();
            let ended = world.run(&[&order[..], more].concat());
            assert_eq!((ended.status, &*ended.stdout), (3, ""), "{}", ended.stderr);
            let said = "error: the node has not reported the outcome";
            assert!(ended.stderr.starts_with(said), "{}", ended.stderr);
            assert!(begun.elapsed() >= Duration::from_secs(least), "{:?}", begun.elapsed());
        }
    }

    #[test]
    fn nothing_is_sent_that_is_wrong_or_only_asked_for() {
        let world = World::new();
        let cluster = Cluster::new(&world);
        let id = node_id(NODE).to_string();
        let said = world.runs(&["node", "network", &id, "--from-parameters", "--dry-run"]);
        assert!(said.contains("tries the network of its parameters"), "{said}");
        for (wrong, status, words) in [
            (&["--vlan", "bond0,id=7"][..], 1, "network.vlans[0].bond"),
            (&["--bond", "bond0,member=eth0,members=2"], 2, "\"members=2\" is not known"),
            (&["--bond", "bond0,member=eth0,mode=lacp,min-links=2"], 1, "at most 1"),
            (&["--interface", "driver:a+driver:b,dhcp"], 2, "after another of its kind"),
            (&["--from-parameters", "--ntp", "a.example"], 2, "cannot be used with"),
        ] {
            let ended = world.run(&[&["node", "network", &id], wrong].concat());
            assert_eq!((ended.status, &*ended.stdout), (status, ""), "{}", ended.stderr);
            assert!(ended.stderr.contains(words), "{words}: {}", ended.stderr);
        }
        assert_eq!(cluster.asked(), [""; 0]);
    }
}
