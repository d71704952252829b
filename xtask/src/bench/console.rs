//! `cargo xtask bench console`: the cost of the console.
//!
//! The same machine boots with its console on the screen and on a line, and with
//! `polis.console=off`; with `polis.exercise=flood` the node measures itself at rest and
//! under a flood of log lines. The configurations take turns, so that a slowdown of the
//! host affects both of them.

use std::fs;
use std::io::Read as _;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result};
use polis_image::{Kind, Manifest};
use polis_proto::v1::ConsoleConfiguration;
use polis_proto::v1::cluster_configuration::StorageSecurityPolicy;
use polis_qemu::args::{Cache, Disk, FwCfg};
use polis_qemu::host::{Preference, accelerator};
use polis_qemu::{Bus, Config, Event, Image, Machine};
use prost::Message as _;

use super::{Args, Row, Table};
use crate::parameters;

/// Upper bound of every step on a host that is fast enough to measure on.
const LONG: Duration = Duration::from_secs(300);

/// The goals: memory that the console may add, in KiB, and processor time at rest, in
/// percent.
const MEMORY_GOAL: f64 = 8192.0;
const REST_GOAL: f64 = 1.0;

/// The values of one configuration.
#[derive(Default)]
struct Configuration {
    ready: Vec<f64>,
    rest: Vec<f64>,
    flood: Vec<f64>,
    memory: Vec<f64>,
    flooded: Vec<f64>,
    lines: Vec<f64>,
}

pub(super) fn measure(args: &Args) -> Result<Table> {
    let manifest = crate::image::built(Kind::Measurement)?;
    let image = Image::load(&manifest.folder)?;
    let folder = crate::image::workspace().join("target/bench/console");
    if folder.exists() {
        fs::remove_dir_all(&folder).context("cannot empty target/bench/console")?;
    }
    let [mut on, mut off] = [Configuration::default(), Configuration::default()];
    for round in 1..=args.runs {
        on.round(args, &image, &manifest, &folder.join(format!("on-{round}")), "")?;
        let without = " polis.console=off";
        off.round(args, &image, &manifest, &folder.join(format!("off-{round}")), without)?;
    }
    let mut table = Table::new("console", args.runs)?;
    let less = |one: &[f64], other: &[f64]| -> Vec<f64> {
        one.iter().zip(other).map(|(one, other)| one - other).collect()
    };
    let row = |name: &str, unit, values: Vec<f64>| Row { values, ..Row::new(name, unit) };
    table.rows = vec![
        row("ready, with a console", "s", on.ready.clone()),
        row("ready, without", "s", off.ready.clone()),
        row("node at rest, with a console", "KiB", on.memory.clone()),
        row("node at rest, without", "KiB", off.memory.clone()),
        row("memory of the console at rest", "KiB", less(&on.memory, &off.memory))
            .goal(MEMORY_GOAL),
        row("memory of the console after the flood", "KiB", less(&on.flooded, &off.flooded))
            .goal(MEMORY_GOAL),
        row("processor at rest, with a console", "%", on.rest.clone()),
        row("processor at rest, without", "%", off.rest.clone()),
        row("processor of the console at rest", "%", less(&on.rest, &off.rest)).goal(REST_GOAL),
        row("log lines a second in the flood, with a console", "lines", on.lines.clone()),
        row("log lines a second in the flood, without", "lines", off.lines.clone()),
        row("processor in the flood, with a console", "%", on.flood.clone()),
        row("processor in the flood, without", "%", off.flood.clone()),
        row("processor of the console in the flood", "%", less(&on.flood, &off.flood)),
    ];
    Ok(table)
}

impl Configuration {
    fn round(
        &mut self,
        args: &Args,
        image: &Image,
        manifest: &Manifest,
        folder: &Path,
        append: &str,
    ) -> Result<()> {
        fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
        let disk = folder.join("disk.img");
        polis_qemu::disk::copy(&manifest.path(&manifest.image), &disk)?;
        let file = folder.join("parameters.pb");
        let owner = parameters::owner_key(folder)?;
        let policy = StorageSecurityPolicy::NeedsInsecure;
        let mut encoded = parameters::with_policy(&owner, None, policy);
        // A message may be split into any number of pieces.
        let terminals = polis_proto::v1::NodeParameters {
            console: Some(ConsoleConfiguration { tui: vec!["hvc0".to_owned()] }),
            ..Default::default()
        };
        encoded.extend(terminals.encode_to_vec());
        fs::write(&file, encoded)?;
        let firmware = image.direct(&format!("polis.exercise=flood{append}"));
        let config = Config {
            disk: Some(Disk { file: disk.clone(), bus: Bus::Virtio, cache: Cache::Unsafe }),
            fw_cfg: vec![FwCfg { name: "opt/polis/parameters.pb".to_owned(), file }],
            cpus: args.cpus(),
            console: true,
            ..Config::new(firmware, accelerator(Preference::Auto, args.cpus()))
        };
        let mut machine = Machine::start(&config, &folder.join("1"))?;
        let line = machine.take_console().context("QEMU opened no console")?;
        std::thread::spawn(move || swallow(line));
        let ready = machine.wait_for("ready", LONG, |_| true)?;
        let phase = |machine: &mut Machine, name: &str| {
            machine.wait_for("exercise", LONG, |event| event.is("phase", name))
        };
        let rest = phase(&mut machine, "rest")?;
        let flood = phase(&mut machine, "flood")?;
        self.ready.push(ready.at.as_secs_f64());
        self.rest.push(number(&rest, "cpu")?);
        self.memory.push(number(&rest, "node")?);
        self.flood.push(number(&flood, "cpu")?);
        self.flooded.push(number(&flood, "node")?);
        let seconds = number(&flood, "seconds")?;
        self.lines.push(number(&flood, "lines")? / seconds);
        println!("console: {append:<20} {rest}, {flood}");
        machine.kill();
        fs::remove_file(&disk).context("cannot remove the disk")
    }
}

/// Reads the guest's screen as a terminal does.
fn swallow(mut line: UnixStream) {
    let mut bytes = [0; 4096];
    while line.read(&mut bytes).is_ok_and(|length| length > 0) {}
}

fn number(event: &Event, key: &str) -> Result<f64> {
    event.text(key).parse().with_context(|| format!("no number `{key}` in {event}"))
}
