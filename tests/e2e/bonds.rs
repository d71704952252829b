//! A machine with two cards in a bond and a VLAN on it: it joins over them, loses a leg, and gets
//! other networks from its operator, good and bad.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use polis_qemu::args::Card;
use polis_qemu::fleet::Part;
use polis_qemu::plug::Port;
use polis_qemu::{Config, Event, Fleet};
use polis_tests::{Story, story};
use serde_json::Value;

use crate::fleet::{ask_until, blank_disk, ipv4, of};
use crate::samples;
use crate::world::{BOOT, SOON, World};

/// The stories of this file.
pub(crate) const STORIES: &[Story] =
    &[story!(a_bond_loses_a_leg_and_a_wrong_vlan_is_given_back_within_a_minute)
        .cluster()
        .takes(300)
        .one_of(samples::NETWORK)];

const MEMBER: usize = 1;
/// The VLAN of its ports, and one that the switch does not carry.
const VLAN: u16 = 7;
const WRONG: u16 = 8;
/// How long a wrong network may last.
const MINUTE: Duration = Duration::from_secs(60);
/// An address that only an ordered network has.
const EXTRA: &str = "10.0.9.1/24";

/// The options of its network, with more settings of the VLAN.
fn network(cluster: &Fleet, vlan: u16, settings: &str) -> Result<[String; 4]> {
    let legs = [cluster.segment.plug(u8::try_from(MEMBER)?), cluster.segment.spare()];
    let [first, second] = legs.map(|leg| leg.mac());
    let bond = format!("bond0,member={first},member={second},mode=active-backup");
    let vlan = format!("bond0,id={vlan},{settings}");
    Ok(["--bond".to_owned(), bond, "--vlan".to_owned(), vlan])
}

fn a_bond_loses_a_leg_and_a_wrong_vlan_is_given_back_within_a_minute() -> Result<()> {
    let world = World::new("bonds")?;
    let founder = world.bootstrap_config("")?;
    let blank = founder.disk.clone().context("no disk")?;
    let disk = blank_disk(&world, &blank, MEMBER)?;
    let mut cluster = of(&world, vec![founder, Config { disk: Some(disk), ..world.bare("") }])?;
    let spare = cluster.segment.spare();
    let legs = [Fleet::port(MEMBER), Port::Machine(spare.machine)];
    cluster.nodes[MEMBER].config.cards.push(Card::Leg(spare));
    cluster.segment.trunk(&legs, VLAN);

    // The first boot has nothing but its parameters.
    cluster.found()?;
    let options = network(&cluster, VLAN, "dhcp")?;
    let options: Vec<&str> = options.iter().map(String::as_str).collect();
    cluster.give_ticket_with(MEMBER, &options)?;
    cluster.boot(MEMBER)?;
    cluster.let_in(&[(MEMBER, Part::Worker)])?;
    cluster.wait_whole(2)?;
    // A node reports its links after it has joined.
    let (shown, vlan) = ask_until("a VLAN", || {
        let shown = links(&cluster)?;
        let mut all = shown["links"].as_array().into_iter().flatten();
        let vlan = all.find(|link| link["name"] == "bond0.7").cloned();
        Ok(vlan.map(|vlan| (shown, vlan)))
    })?;
    ensure!(vlan["on"] == "bond0" && vlan["vlan"] == VLAN && vlan["carrier"] == true, "{vlan}");
    let members = shown["links"].as_array().into_iter().flatten();
    let members = members.filter(|link| link["kind"] == "card" && link["on"] == "bond0").count();
    ensure!(members == 2, "not both cards are in the bond: {shown}");

    // A dead leg, the active one.
    cluster.machine(MEMBER)?.qmp.cable(false)?;
    let id = cluster.nodes[MEMBER].id.clone();
    ask_until("the operator reaches the node over the other leg", || {
        let status = ["--timeout", "10s", "node", "status", &id];
        Ok(cluster.operator.run(&status).ok())
    })?;
    cluster.wait_whole(2).context("with one leg")?;
    cluster.machine(MEMBER)?.qmp.cable(true)?;

    a_wrong_vlan_is_given_back(&mut cluster)?;
    a_good_network_stays(&mut cluster)?;
    a_trial_ends_with_the_power(&mut cluster)
}

/// The node as the operator sees it.
fn links(cluster: &Fleet) -> Result<Value> {
    let id = &cluster.nodes[MEMBER].id;
    Ok(cluster.operator.document(&["--timeout", "1m", "node", "network", id])?)
}

/// Orders a network for the node; the error is that of the command.
fn order(cluster: &Fleet, timeout: &str, vlan: u16, settings: &str) -> Result<()> {
    let options = network(cluster, vlan, settings)?;
    let id = cluster.nodes[MEMBER].id.clone();
    let command = ["--timeout", timeout, "node", "network", &id].map(str::to_owned);
    cluster.operator.run(&[&command[..], &options[..]].concat())?;
    Ok(())
}

fn is(state: &'static str) -> impl Fn(&Event) -> bool {
    move |event| event.is("state", state)
}

fn a_wrong_vlan_is_given_back(cluster: &mut Fleet) -> Result<()> {
    // The same address in a VLAN that no port of the switch carries.
    let own = format!("address={}/24", ipv4(cluster, MEMBER)?);
    let refused = order(cluster, "3m", WRONG, &own).err().context("it was confirmed")?;
    let refused = refused.to_string();
    ensure!(refused.contains("has its former network: no curator was reached"), "{refused}");
    let machine = cluster.machine(MEMBER)?;
    let tried = machine.wait_for("network", SOON, is("trying"))?;
    let given_back = machine.wait_for("network", SOON, is("reverted"))?;
    ensure!(given_back.text("cause").contains("no curator was reached over it"), "{given_back}");
    let lasted = given_back.at.saturating_sub(tried.at);
    eprintln!("the wrong network lasted {lasted:?}");
    ensure!(lasted < MINUTE, "it lasted {lasted:?}");
    cluster.wait_whole(2).context("after the wrong VLAN")?;
    let shown = links(cluster)?;
    ensure!(shown["state"] == "reverted", "{shown}");
    let describe = ["--timeout", "1m", "node", "describe", &cluster.nodes[MEMBER].id];
    let described = cluster.operator.document(&describe)?;
    let said = described["ordered_network"].as_str().unwrap_or_default();
    ensure!(said.starts_with("reverted: no curator"), "{described}");
    Ok(())
}

fn a_good_network_stays(cluster: &mut Fleet) -> Result<()> {
    order(cluster, "3m", VLAN, &format!("dhcp,address={EXTRA},mtu=1400"))?;
    cluster.machine(MEMBER)?.wait_for("network", SOON, is("confirmed"))?;
    cluster.wait_whole(2).context("with the ordered network")?;
    has_extra(cluster)
}

/// Checks that the node has the network that was ordered and confirmed.
fn has_extra(cluster: &Fleet) -> Result<()> {
    let found = ask_until("the node reports the ordered network", || {
        let shown = links(cluster)?;
        let mut links = shown["links"].as_array().into_iter().flatten();
        let vlan = links.find(|link| link["name"] == "bond0.7").cloned();
        Ok(vlan.filter(|vlan| vlan["mtu"] == 1400))
    })?;
    let has = found["addresses"].as_array().is_some_and(|all| all.contains(&EXTRA.into()));
    ensure!(has, "the node does not have {EXTRA}: {found}");
    Ok(())
}

/// A machine whose power is cut in a trial starts with the network that was confirmed.
fn a_trial_ends_with_the_power(cluster: &mut Fleet) -> Result<()> {
    let own = format!("address={}/24", ipv4(cluster, MEMBER)?);
    // The command waits for longer than that.
    let ended = order(cluster, "5s", WRONG, &own);
    ensure!(ended.is_err(), "the order was confirmed");
    cluster.machine(MEMBER)?.wait_for("network", SOON, is("trying"))?;
    cluster.cut_power(MEMBER);
    cluster.boot(MEMBER)?;
    let machine = cluster.machine(MEMBER)?;
    let given_back = machine.wait_for("network", BOOT, is("reverted"))?;
    ensure!(given_back.text("cause").contains("started again"), "{given_back}");
    machine.wait_for("ready", BOOT, |_| true)?;
    cluster.wait_whole(2).context("after the power cut")?;
    has_extra(cluster)
}
