//! Machines on a segment with IPv6 only: three found a cluster, join it, and come back; one gets
//! its address by DHCPv6.

use std::net::IpAddr;

use anyhow::{Context as _, Result, ensure};
use polis_qemu::fleet::Part;
use polis_qemu::{Event, Fleet};
use polis_tests::{Story, story};

use crate::fleet::{all_vote, ask_until, with_dhcpv6, with_ipv6_only};
use crate::samples;
use crate::world::{BOOT, World};

/// The stories of this file.
pub(crate) const STORIES: &[Story] = &[
    story!(three_machines_on_ipv6_alone_become_three_voters_and_come_back)
        .cluster()
        .takes(200)
        .one_of(samples::NETWORK),
    story!(a_machine_gets_its_address_by_dhcpv6_and_renews_it).takes(50),
];

const MACHINES: usize = 3;

fn three_machines_on_ipv6_alone_become_three_voters_and_come_back() -> Result<()> {
    let world = World::new("ipv6")?;
    let mut cluster = with_ipv6_only(&world, MACHINES)?;
    let ready = cluster.found()?;
    is_at(&cluster, 0, &ready)?;
    // The reason of the wait for DHCP, and its end.
    let waited = cluster.machine(0)?.seen(|stage| {
        let waits = stage.is("name", "network") && stage.is("state", "waiting");
        waits && stage.text("for").contains("becomes the address of this node")
    });
    ensure!(!waited.is_empty(), "the stage did not say what it waited for");
    // The router informs: name servers are from DHCPv6, and the address is of its prefix.
    says(&cluster, "a DHCPv6 server names 1 name and time servers on eth0", 1)?;
    cluster.admit(&[(1, Part::Voter), (2, Part::Voter)])?;
    all_vote(&mut cluster)?;
    cluster.wait_whole(MACHINES).context("not healthy before the cold start")?;

    // The operator asks for what needs IPv4, and gets the reason.
    let id = cluster.nodes[1].id.clone();
    let worker = ["--timeout", "1m", "node", "roles", &id, "--add", "kubernetes-worker"];
    let refused = cluster.operator.run(&worker).err().context("a worker without IPv4")?;
    let refused = refused.to_string();
    let reason = format!("the address {} of the node is one of IPv6", cluster.nodes[1].address);
    ensure!(refused.contains(&reason), "another reason: {refused}");

    for number in 0..MACHINES {
        cluster.cut_power(number);
    }
    for number in 0..MACHINES {
        cluster.boot(number)?;
    }
    for number in 0..MACHINES {
        let id = cluster.nodes[number].id.clone();
        let ready = cluster.machine(number)?.wait_for("ready", BOOT, |_| true)?;
        ensure!(ready.is("node", &id), "another node: {ready}");
        is_at(&cluster, number, &ready)?;
    }
    cluster.wait_whole(MACHINES).context("not healthy after the cold start")
}

/// Checks that a node that is ready has the address that its router made it have.
fn is_at(cluster: &Fleet, number: usize, ready: &Event) -> Result<()> {
    let address = cluster.nodes[number].address;
    ensure!(matches!(address, IpAddr::V6(_)), "{address} is not one of IPv6");
    ensure!(ready.is("address", &address.to_string()), "not at {address}: {ready}");
    Ok(())
}

fn a_machine_gets_its_address_by_dhcpv6_and_renews_it() -> Result<()> {
    let world = World::new("dhcpv6")?;
    let mut cluster = with_dhcpv6(&world)?;
    let ready = cluster.found()?;
    is_at(&cluster, 0, &ready)?;
    // It has no other, and reports where this one is from.
    let (id, address) = (cluster.nodes[0].id.clone(), cluster.nodes[0].address);
    let eth0 = ask_until("the node reports its links", || {
        let shown = cluster.operator.document(&["node", "network", &id])?;
        Ok(shown["links"].as_array().and_then(|links| links.first()).cloned())
    })?;
    let (addresses, origins) = (&eth0["addresses"], &eth0["origins"]);
    ensure!(*addresses == serde_json::json!([format!("{address}/128")]), "{eth0}");
    ensure!(*origins == serde_json::json!(["DHCPv6"]), "{eth0}");
    says(&cluster, "routers on eth0 advertise these name servers: 2001:db8:0:2::54", 1)?;
    // The first lease, and its renewals.
    says(&cluster, &format!("leases {address}/128 to eth0"), 3)?;
    cluster.wait_whole(1).context("after the renewal")?;
    let log = network_log(&cluster)?;
    ensure!(!log.contains("no longer has the address"), "the address was away: {log}");
    Ok(())
}

/// Waits until the first node has logged this text so often.
fn says(cluster: &Fleet, text: &str, times: usize) -> Result<()> {
    ask_until(text, || {
        let log = network_log(cluster)?;
        Ok((log.matches(text).count() >= times).then_some(()))
    })
}

fn network_log(cluster: &Fleet) -> Result<String> {
    let id = &cluster.nodes[0].id;
    Ok(cluster.operator.run(&["--timeout", "10s", "node", "logs", id, "--name", "network"])?)
}
