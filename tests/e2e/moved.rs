//! A cluster whose machines are all at other addresses after a cold start.

use anyhow::{Context as _, Result, ensure};
use polis_qemu::Fleet;
use polis_qemu::fleet::Part;

use crate::fleet::{APPEND, checked, fleet, writes_go_on};
use crate::world::{BOOT, World};

#[test]
fn a_cluster_that_was_off_comes_home_although_every_address_has_changed() -> Result<()> {
    let world = World::new("moved")?;
    let mut cluster = fleet(&world, 3, APPEND)?;
    cluster.found()?;
    cluster.admit(&[(1, Part::Voter), (2, Part::Worker)])?;
    cluster.wait_whole(3)?;
    moved(&mut cluster)?;
    writes_go_on(&mut cluster, &[0, 1])?;
    checked(&world, 2).map(drop)
}

/// Cuts the power of all machines, gives each another address, and waits until
/// the cluster is whole.
pub(crate) fn moved(cluster: &mut Fleet) -> Result<()> {
    let all = 0..cluster.nodes.len();
    let before: Vec<_> = cluster.nodes.iter().map(|node| node.address).collect();
    all.clone().for_each(|number| cluster.cut_power(number));
    cluster.renumber()?;
    // The last one first: nobody leads before some have found each other.
    for number in all.clone().rev() {
        cluster.boot(number)?;
    }
    for number in all.clone() {
        let address = cluster.nodes[number].address;
        ensure!(!before.contains(&address), "{address} is an old address");
        let ready = cluster.machine(number)?.wait_for("ready", BOOT, |_| true)?;
        ensure!(ready.is("address", &address.to_string()), "not at {address}: {ready}");
    }
    cluster.wait_whole(all.len()).context("not whole at the new addresses")
}
