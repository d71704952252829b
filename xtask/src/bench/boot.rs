//! `cargo xtask bench boot`: from the start of QEMU to a node that is ready.
//!
//! Each boot of Polis is compared with a boot of the floor, with the same kernel and the
//! same arguments of QEMU. The configurations take turns, so that a slowdown of the host
//! affects all of them. `--beside FOLDER` adds another image, so that two versions of Polis are
//! compared in the same rounds, and `--count` counts instructions instead of seconds.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result};
use polis_image::Kind;
use polis_proto::v1::cluster_configuration::StorageSecurityPolicy;
use polis_qemu::args::{Cache, Disk, FwCfg};
use polis_qemu::host::{Preference, accelerator};
use polis_qemu::image::Flash;
use polis_qemu::{Bus, Config, Error, Firmware, Image, Machine};

use super::count::{self, Plugin};
use super::floor::{self, Floor};
use super::{Args, Row, Table};
use crate::parameters;
use crate::run::POWER_BUTTON;

/// Upper bound of every step on a host that is fast enough to measure on.
const LONG: Duration = Duration::from_secs(300);

/// The goals of a first and a later boot, relative to the floor.
const GOALS: [f64; 2] = [1.6, 1.25];

/// A plain disk, as the floor has. `bench storage` boots with the others.
const POLICY: StorageSecurityPolicy = StorageSecurityPolicy::NeedsInsecure;

/// The goal of each process's resident memory at rest, in KiB.
const MEMORY_GOALS: [(&str, f64); 2] = [("init", 4096.0), ("node", 40_960.0)];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Start {
    Direct,
    Uefi,
}

/// A machine that boots twice each round: on a fresh disk, and again.
struct Configuration {
    name: &'static str,
    folder: PathBuf,
    config: Config,
    /// The disk that a first boot starts from.
    fresh: PathBuf,
    /// The event that ends the measurement.
    word: &'static str,
    /// What counts instead of seconds.
    plugin: Option<Plugin>,
    /// Both quantities of [`quantities`] at that event, of first boots and of later ones.
    costs: [[Vec<f64>; 2]; 2],
    memory: [Vec<f64>; MEMORY_GOALS.len()],
}

/// What is measured: name and unit.
fn quantities(count: bool) -> [(&'static str, &'static str); 2] {
    if count {
        [(", instructions", "billions"), (", translated blocks", "thousands")]
    } else {
        [("", "s"), (", processor", "s")]
    }
}

pub(super) fn measure(args: &Args) -> Result<Table> {
    let manifest = crate::image::built(Kind::Product)?;
    let image = Image::load(&manifest.folder)?;
    let folder = crate::image::workspace().join("target/bench/boot");
    if folder.exists() {
        fs::remove_dir_all(&folder).context("cannot empty target/bench/boot")?;
    }
    let floor = floor::make(&manifest, &folder)?;
    let beside = args.beside.as_deref().map(Image::load).transpose()?;
    let starts: &[(Start, [&'static str; 3])] = &[
        (Start::Direct, ["floor, direct", "Polis, direct", "beside, direct"]),
        (Start::Uefi, ["floor, UEFI", "Polis, UEFI", "beside, UEFI"]),
    ];
    let starts = if args.direct { &starts[..1] } else { starts };
    let mut configurations = Vec::new();
    for &(start, names) in starts {
        configurations.push(floor_configuration(names[0], start, &image, &floor, &folder)?);
        configurations.push(node_configuration(names[1], start, &image, &folder)?);
        if let Some(image) = &beside {
            configurations.push(node_configuration(names[2], start, image, &folder)?);
        }
    }
    let plugin = args.count.then(|| Plugin::make(&folder)).transpose()?;
    // Only a translator counts.
    let preference = if args.count { Preference::Tcg } else { Preference::Auto };
    // The floor's machine has the same number of processors as the node's.
    for configuration in &mut configurations {
        configuration.plugin.clone_from(&plugin);
        configuration.config.accelerator = accelerator(preference, args.cpus());
        configuration.config.cpus = args.cpus();
    }
    for round in 1..=args.runs {
        for configuration in &mut configurations {
            configuration
                .round(round)
                .with_context(|| format!("round {round} of {}", configuration.name))?;
        }
    }
    let mut table = Table::new("boot", args.runs)?;
    for group in configurations.chunks_exact(configurations.len() / starts.len()) {
        let [floor, polis, beside @ ..] = group else { continue };
        rows(&mut table, floor, polis, args.count);
        for other in beside {
            compare(&mut table, polis, other, args.count);
        }
    }
    Ok(table)
}

/// The names of both boots, with their goals relative to the floor.
fn kinds() -> impl Iterator<Item = (usize, (&'static str, f64))> {
    ["first boot", "later boot"].into_iter().zip(GOALS).enumerate()
}

/// The ratios of two configurations, each within a round, where they differ less.
fn ratio(name: String, mine: &[f64], theirs: &[f64]) -> Row {
    let values = mine.iter().zip(theirs).map(|(mine, theirs)| mine / theirs).collect();
    Row { values, ..Row::new(name, "times") }
}

/// The rows of the image beside Polis.
fn compare(table: &mut Table, polis: &Configuration, other: &Configuration, count: bool) {
    for (boot, (kind, _goal)) in kinds() {
        for (at, (what, unit)) in quantities(count).into_iter().enumerate() {
            let (mine, theirs) = (&polis.costs[boot][at], &other.costs[boot][at]);
            let row = Row::new(format!("{}, {kind}{what}", other.name), unit);
            table.rows.push(Row { values: theirs.clone(), ..row });
            let name = format!("{}, {kind}{what} over beside", polis.name);
            table.rows.push(ratio(name, mine, theirs));
        }
    }
    for ((process, _), values) in MEMORY_GOALS.into_iter().zip(&other.memory) {
        let row = Row::new(format!("{}, resident memory of {process}", other.name), "KiB");
        table.rows.push(Row { values: values.clone(), ..row });
    }
}

/// The rows of a floor and of Polis on it. The goals are those of the wall time.
fn rows(table: &mut Table, floor: &Configuration, polis: &Configuration, count: bool) {
    for (boot, (kind, goal)) in kinds() {
        for (at, (what, unit)) in quantities(count).into_iter().enumerate() {
            let row = |configuration: &Configuration| Row {
                values: configuration.costs[boot][at].clone(),
                ..Row::new(format!("{}, {kind}{what}", configuration.name), unit)
            };
            let (floor, polis) = (row(floor), row(polis));
            let most = floor.median() * goal;
            let over = ratio(format!("{} over floor", polis.name), &polis.values, &floor.values);
            if count || at > 0 {
                table.rows.extend([floor, polis, over]);
            } else {
                table.rows.extend([floor, polis.goal(most), over.goal(goal)]);
            }
        }
    }
    for ((process, goal), values) in MEMORY_GOALS.into_iter().zip(&polis.memory) {
        let row = Row::new(format!("{}, resident memory of {process}", polis.name), "KiB");
        if !values.is_empty() {
            table.rows.push(Row { values: values.clone(), ..row.goal(goal) });
        }
    }
}

fn floor_configuration(
    name: &'static str,
    start: Start,
    image: &Image,
    floor: &Floor,
    folder: &Path,
) -> Result<Configuration> {
    let folder = folder.join(name.replace(", ", "-"));
    let (kernel, initramfs) = (image.kernel.clone(), floor.initramfs.clone());
    let cmdline = floor.cmdline.clone();
    let firmware = match start {
        Start::Direct => Firmware::Direct { kernel, initramfs, cmdline },
        Start::Uefi => match image.uefi(Flash::Plain, &folder, "")? {
            Firmware::Uefi { code, vars, .. } => {
                Firmware::UefiDirect { code, vars, kernel, initramfs, cmdline }
            }
            other => other,
        },
    };
    configuration(name, "floor", folder, firmware, floor.disk.clone())
}

fn node_configuration(
    name: &'static str,
    start: Start,
    image: &Image,
    folder: &Path,
) -> Result<Configuration> {
    let folder = folder.join(name.replace(", ", "-"));
    let firmware = match start {
        Start::Direct => image.direct(""),
        Start::Uefi => image.uefi(Flash::Plain, &folder, "")?,
    };
    let mut configuration = configuration(name, "ready", folder, firmware, image.disk.clone())?;
    let file = configuration.folder.join("parameters.pb");
    let owner = parameters::owner_key(&configuration.folder)?;
    fs::write(&file, parameters::with_policy(&owner, None, POLICY))
        .context("cannot write parameters")?;
    configuration.config.fw_cfg.push(FwCfg { name: "opt/polis/parameters.pb".to_owned(), file });
    Ok(configuration)
}

fn configuration(
    name: &'static str,
    word: &'static str,
    folder: PathBuf,
    firmware: Firmware,
    fresh: PathBuf,
) -> Result<Configuration> {
    fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let disk = Disk { file: folder.join("disk.img"), bus: Bus::Virtio, cache: Cache::Unsafe };
    let config =
        Config { disk: Some(disk), ..Config::new(firmware, accelerator(Preference::Auto, 1)) };
    Ok(Configuration {
        name,
        folder,
        config,
        fresh,
        word,
        plugin: None,
        costs: Default::default(),
        memory: Default::default(),
    })
}

impl Configuration {
    fn round(&mut self, round: u32) -> Result<()> {
        let costs = match self.boots(round) {
            Err(error) if error.downcast_ref::<Error>().is_some_and(Error::is_race) => {
                println!("{:<14} retry: a fault of QEMU ended the machine", self.name);
                self.boots(round)?
            }
            booted => booted?,
        };
        for (all, cost) in self.costs.iter_mut().zip(costs) {
            all[0].push(cost[0]);
            all[1].push(cost[1]);
        }
        Ok(())
    }

    /// A first boot, and the second on the same disk: what each takes until the measured event.
    fn boots(&mut self, round: u32) -> Result<Vec<[f64; 2]>> {
        let mut costs = Vec::new();
        let disk = self.folder.join("disk.img");
        polis_qemu::disk::copy(&self.fresh, &disk).context("cannot copy the disk")?;
        for boot in 0..self.costs.len() {
            let folder = self.folder.join(format!("{round}-{}", boot + 1));
            let counters = self.folder.join("counters");
            self.config.plugin = self.plugin.as_ref().map(|plugin| plugin.argument(&counters));
            let mut machine = Machine::start(&self.config, &folder)?;
            let event = machine.wait_for(self.word, LONG, |_| true)?;
            let (cost, units) = if self.plugin.is_some() {
                (count::read(&counters)?, "billions of instructions, thousands of blocks")
            } else {
                let processor = machine.processor_time().context("this kernel counts no ticks")?;
                ([event.at, processor].map(|time| time.as_secs_f64()), "s, s of a processor")
            };
            println!("{:<14} {:>8.2} {:>8.2}   {units}", self.name, cost[0], cost[1]);
            costs.push(cost);
            if self.word == "ready" {
                if boot == 0 {
                    self.remember(&mut machine)?;
                }
                machine.wait_until_text(POWER_BUTTON, LONG)?;
                machine.qmp.power_button()?;
                machine.wait_for("off", LONG, |_| true)?;
            }
            // The floor ends by itself.
            machine.wait_end(LONG)?;
        }
        fs::remove_file(&disk).context("cannot remove the disk")?;
        Ok(costs)
    }

    /// Records the memory at rest, which the node reports some time after `ready`.
    fn remember(&mut self, machine: &mut Machine) -> Result<()> {
        let event = machine.wait_for("memory", LONG, |_| true)?;
        for ((process, _), values) in MEMORY_GOALS.iter().zip(&mut self.memory) {
            values.push(event.text(process).parse().with_context(|| format!("bad {event}"))?);
        }
        Ok(())
    }
}
