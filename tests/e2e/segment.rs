//! Machines on one segment: how they are reached, and the effect of a cut.

use std::net::IpAddr;

use anyhow::{Context as _, Result};
use polis_qemu::args::Link;
use polis_qemu::{Config, Segment};
use polis_tests::{Story, story};

use crate::world::{self, World};

/// The port that every node serves to everyone.
const MANAGEMENT: u16 = 7839;

/// The stories of this file.
pub(crate) const STORIES: &[Story] = &[story!(a_node_on_a_segment_is_reached_through_its_gateway)];

fn a_node_on_a_segment_is_reached_through_its_gateway() -> Result<()> {
    let world = World::new("a_node_on_a_segment_is_reached_through_its_gateway")?;
    let mut segment = Segment::start(1, &world.path("network"))?;
    let config = Config { link: Link::Segment(segment.plug(0)), ..world.bootstrap_config("")? };
    let mut machine = world.boot(&config)?;
    world::home(&mut machine)?;
    let ready = machine.seen(|event| event.word == "ready");
    let ready = ready.last().context("no ready")?;
    let address: IpAddr = ready.text("address").parse()?;
    let host = polis_qemu::host::free_port()?;
    segment.forward(host, address, MANAGEMENT)?;
    world::answer(host).context("no answer through the gateway")
}
