//! The firewall: the callers of each port of each node, and a configuration that keeps its own
//! operator out.

use std::collections::BTreeSet;
use std::net::Ipv4Addr;

use anyhow::{Context as _, Result, ensure};
use polis_qemu::Fleet;
use polis_qemu::fleet::Part;
use polis_qemu::scan::{Answers, Source, scan};
use polis_tests::{Story, story};
use serde_json::Value;

use crate::fleet::{ask_until, fleet, ipv4, run};
use crate::samples;
use crate::world::World;

/// The stories of this file.
pub(crate) const STORIES: &[Story] =
    &[story!(each_port_is_reached_by_its_callers_alone_and_no_rule_locks_its_owner_out)
        .cluster()
        .takes(180)
        .one_of(samples::NETWORK)];

const VOTER: usize = 0;
const WORKER: usize = 1;

/// An address of the segment that no machine has.
const STRANGER: Ipv4Addr = Ipv4Addr::new(10, 0, 2, 40);

/// The ports of TCP that `docs/network.md` lists for etcd, the curator, management and metrics.
const ETCD: u16 = 7834;
const CURATOR: u16 = 7835;
const MANAGEMENT: u16 = 7839;
const METRICS: u16 = 7840;

fn each_port_is_reached_by_its_callers_alone_and_no_rule_locks_its_owner_out() -> Result<()> {
    let world = World::new("firewall")?;
    let mut cluster = fleet(&world, 2, "")?;
    cluster.found()?;
    cluster.admit(&[(WORKER, Part::Worker)])?;
    cluster.wait_whole(2)?;

    // Rules that are set again count from zero: first, the voter knows the worker by the address
    // of its lease and by the one that the router advertised.
    let members = ask_until("the voter knows both addresses of the worker", || {
        let members = rules(&cluster, VOTER)?["members"].take();
        Ok(members.as_array().is_some_and(|all| all.len() == 2).then_some(members))
    })?;
    ensure!(members[0] == serde_json::json!(cluster.nodes[WORKER].address), "{members}");

    // As it is in a new cluster.
    let stranger = Source::Spare(STRANGER);
    reached(&cluster, stranger, VOTER, &[CURATOR, MANAGEMENT, METRICS])?;
    reached(&cluster, stranger, WORKER, &[MANAGEMENT, METRICS])?;
    let member = Source::Of(ipv4(&cluster, WORKER)?);
    reached(&cluster, member, VOTER, &[ETCD, CURATOR, MANAGEMENT, METRICS])?;
    let explained = rules(&cluster, VOTER)?;
    ensure!(explained["in_force"] == true && explained["fault"].is_null(), "{explained}");
    let counted = explained["dropped"].as_u64().context("no count")?;
    // Two scans, each of which sends one packet to each port.
    ensure!(counted >= 2 * (u64::from(u16::MAX) - 4), "the scans lost packets: {counted}");
    ensure!(explained["members"] == members, "{explained}");

    // Its sources do not have the operator: the command fails, and all is as before.
    let elsewhere = ["cluster", "configure", "--firewall-source", "192.0.2.0/24"];
    let failed = cluster.operator.run(&elsewhere).err().context("it was confirmed")?.to_string();
    ensure!(failed.contains("returns to the former one"), "{failed}");
    let before = ask_until("the operator reaches the node again", || {
        let status = ["--timeout", "5s", "node", "firewall", &cluster.nodes[VOTER].id];
        Ok(cluster.operator.document(&status).ok())
    })?;
    ensure!(before["sources"] == serde_json::json!([]), "{before}");
    cluster.wait_whole(2)?;

    // The operator's own network, and a port for pods.
    let own = "10.0.2.0/28";
    let options = ["--firewall-source", own, "--firewall-port", "tcp/8443"];
    run(&cluster, &[&["cluster", "configure"][..], &options].concat())?;
    for (number, open) in [(VOTER, &[CURATOR][..]), (WORKER, &[])] {
        let answers = reached(&cluster, stranger, number, open)?;
        ensure!(answers.closed == BTreeSet::from([8443]), "node {}: {answers:?}", number + 1);
        let explained = rules(&cluster, number)?;
        ensure!(explained["sources"] == serde_json::json!([own]), "{explained}");
        ensure!(explained["tried_for_seconds"].is_null(), "{explained}");
    }
    let member = Source::Of(ipv4(&cluster, WORKER)?);
    reached(&cluster, member, VOTER, &[ETCD, CURATOR, MANAGEMENT, METRICS])?;

    // A boot without a leader: the sources hold for all but the help of the owner.
    for number in [VOTER, WORKER] {
        cluster.cut_power(number);
    }
    cluster.boot(WORKER)?;
    let machine = cluster.machine(WORKER)?;
    machine.wait_for("cluster", crate::world::BOOT, |event| event.is("state", "home"))?;
    ask_until("a node without a leader has the former firewall", || {
        let answers = scanned(&cluster, stranger, WORKER)?;
        Ok((answers.open == BTreeSet::from([MANAGEMENT])).then_some(()))
    })?;
    cluster.boot(VOTER)?;
    cluster.wait_whole(2).map_err(Into::into)
}

/// Checks that exactly these ports of TCP are open to the source.
fn reached(cluster: &Fleet, from: Source, number: usize, open: &[u16]) -> Result<Answers> {
    let answers = scanned(cluster, from, number)?;
    let expected: BTreeSet<u16> = open.iter().copied().collect();
    eprintln!("node {} from {from:?}: {:?}", number + 1, answers.open);
    ensure!(answers.open == expected, "node {} from {from:?}: {answers:?}", number + 1);
    Ok(answers)
}

fn scanned(cluster: &Fleet, from: Source, number: usize) -> Result<Answers> {
    let segment = &cluster.segment;
    let target = segment.plug(u8::try_from(number)?);
    let to = (target, ipv4(cluster, number)?);
    Ok(scan(&segment.links(), &segment.spare(), from, to)?)
}

/// The rules of a node, as its operator reads them.
fn rules(cluster: &Fleet, number: usize) -> Result<Value> {
    let id = &cluster.nodes[number].id;
    Ok(cluster.operator.document(&["--timeout", "1m", "node", "firewall", id])?)
}
