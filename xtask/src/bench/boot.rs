//! `cargo xtask bench boot`: from the start of QEMU to a node that is ready.
//!
//! Beside each boot of Polis runs the floor, with the same kernel and the same
//! arguments of QEMU. All lanes take turns, so that a host that slows down slows
//! every one of them.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result};
use polis_image::{Kind, Manifest};
use polis_proto::v1::cluster_configuration::StorageSecurityPolicy;
use polis_qemu::args::{Cache, Disk, FwCfg};
use polis_qemu::host::{Wish, accelerator};
use polis_qemu::image::Flash;
use polis_qemu::{Bus, Config, Error, Firmware, Image, Machine};

use super::floor::{self, Floor};
use super::{Args, Row, Table};
use crate::{host, parameters, run};

/// Nothing takes longer on a host on which measuring makes sense.
const LONG: Duration = Duration::from_secs(300);

/// How much of the floor a first boot may take, and a later one.
const GOALS: [f64; 2] = [1.6, 1.25];

/// What the floor has as well: a plain disk. `bench storage` boots with the others.
const POLICY: StorageSecurityPolicy = StorageSecurityPolicy::NeedsInsecure;

/// Resident memory that each process may have at rest, in KiB.
const MEMORY_GOALS: [(&str, f64); 2] = [("init", 4096.0), ("node", 40_960.0)];

/// Said when the driver of the power button has come; a press before is lost.
const POWER_BUTTON: &str = r#"listening to the power key of "Power Button""#;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Start {
    Direct,
    Uefi,
}

/// A machine that is booted twice each round: on a fresh disk, and again.
struct Lane {
    name: &'static str,
    folder: PathBuf,
    config: Config,
    /// The disk that a first boot starts from.
    fresh: PathBuf,
    /// The event that ends the measurement.
    word: &'static str,
    /// Seconds to that event: first boots, later boots.
    times: [Vec<f64>; 2],
    memory: [Vec<f64>; MEMORY_GOALS.len()],
}

pub(super) fn measure(args: &Args) -> Result<Table> {
    host::require(&[run::QEMU])?;
    let manifest = crate::image::built(Kind::Product)?;
    let image = Image::load(&manifest.folder)?;
    let folder = crate::image::workspace().join("target/bench/boot");
    if folder.exists() {
        fs::remove_dir_all(&folder).context("cannot empty target/bench/boot")?;
    }
    let floor = floor::make(&manifest, &folder)?;
    let mut lanes = vec![
        floor_lane("floor, direct", Start::Direct, &image, &floor, &folder)?,
        node_lane("Polis, direct", Start::Direct, &image, &manifest, &folder)?,
    ];
    if !args.direct {
        lanes.push(floor_lane("floor, UEFI", Start::Uefi, &image, &floor, &folder)?);
        lanes.push(node_lane("Polis, UEFI", Start::Uefi, &image, &manifest, &folder)?);
    }
    // The floor's machine has as many processors as the node's.
    for lane in &mut lanes {
        lane.config.accelerator = accelerator(Wish::Auto, args.cpus);
        lane.config.cpus = args.cpus;
    }
    for round in 1..=args.runs {
        for lane in &mut lanes {
            lane.round(round).with_context(|| format!("round {round} of {}", lane.name))?;
        }
    }
    let mut table = Table::new("boot", args.runs)?;
    for pair in lanes.chunks_exact(2) {
        let [floor, polis] = pair else { continue };
        rows(&mut table, floor, polis);
    }
    Ok(table)
}

/// The rows of a floor and of what stands on it.
fn rows(table: &mut Table, floor: &Lane, polis: &Lane) {
    for (boot, (kind, goal)) in ["first boot", "later boot"].into_iter().zip(GOALS).enumerate() {
        let row = |lane: &Lane| Row {
            values: lane.times[boot].clone(),
            ..Row::new(format!("{}, {kind}", lane.name), "s")
        };
        let (floor, polis) = (row(floor), row(polis));
        let most = floor.median() * goal;
        let mut ratio = Row::new(format!("{} over floor", polis.name), "times").goal(goal);
        // Both of a round ran next to each other: their ratio is the steadier figure.
        ratio.values =
            polis.values.iter().zip(&floor.values).map(|(polis, floor)| polis / floor).collect();
        table.rows.extend([floor, polis.goal(most), ratio]);
    }
    for ((process, goal), values) in MEMORY_GOALS.into_iter().zip(&polis.memory) {
        let row = Row::new(format!("{}, resident memory of {process}", polis.name), "KiB");
        if !values.is_empty() {
            table.rows.push(Row { values: values.clone(), ..row.goal(goal) });
        }
    }
}

fn floor_lane(
    name: &'static str,
    start: Start,
    image: &Image,
    floor: &Floor,
    folder: &Path,
) -> Result<Lane> {
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
    lane(name, "floor", folder, firmware, floor.disk.clone())
}

fn node_lane(
    name: &'static str,
    start: Start,
    image: &Image,
    manifest: &Manifest,
    folder: &Path,
) -> Result<Lane> {
    let folder = folder.join(name.replace(", ", "-"));
    let firmware = match start {
        Start::Direct => image.direct(""),
        Start::Uefi => image.uefi(Flash::Plain, &folder, "")?,
    };
    let mut lane = lane(name, "ready", folder, firmware, manifest.path(&manifest.image))?;
    let file = lane.folder.join("parameters.pb");
    let owner = parameters::owner_key(&lane.folder)?;
    fs::write(&file, parameters::with_policy(&owner, None, POLICY))
        .context("cannot write parameters")?;
    lane.config.fw_cfg.push(FwCfg { name: "opt/polis/parameters.pb".to_owned(), file });
    Ok(lane)
}

fn lane(
    name: &'static str,
    word: &'static str,
    folder: PathBuf,
    firmware: Firmware,
    fresh: PathBuf,
) -> Result<Lane> {
    fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let disk = Disk { file: folder.join("disk.img"), bus: Bus::Virtio, cache: Cache::Unsafe };
    let config = Config { disk: Some(disk), ..Config::new(firmware, accelerator(Wish::Auto, 1)) };
    Ok(Lane {
        name,
        folder,
        config,
        fresh,
        word,
        times: Default::default(),
        memory: Default::default(),
    })
}

impl Lane {
    fn round(&mut self, round: u32) -> Result<()> {
        let times = match self.boots(round) {
            Err(error) if error.downcast_ref::<Error>().is_some_and(Error::is_race) => {
                println!("{:<14} again: a fault of QEMU ended the machine", self.name);
                self.boots(round)?
            }
            booted => booted?,
        };
        for (all, took) in self.times.iter_mut().zip(times) {
            all.push(took);
        }
        Ok(())
    }

    /// A first boot, and the second on the same disk: seconds until what is measured.
    fn boots(&mut self, round: u32) -> Result<Vec<f64>> {
        let mut times = Vec::new();
        let disk = self.folder.join("disk.img");
        polis_qemu::disk::copy(&self.fresh, &disk).context("cannot copy the disk")?;
        for boot in 0..self.times.len() {
            let folder = self.folder.join(format!("{round}-{}", boot + 1));
            let mut machine = Machine::start(&self.config, &folder)?;
            let event = machine.wait_for(self.word, LONG, |_| true)?;
            println!("{:<14} {:>8.2} s", self.name, event.at.as_secs_f64());
            times.push(event.at.as_secs_f64());
            if self.word == "ready" {
                if boot == 0 {
                    self.remember(&mut machine)?;
                }
                machine.wait_until_said(POWER_BUTTON, LONG)?;
                machine.qmp.power_button()?;
                machine.wait_for("off", LONG, |_| true)?;
            }
            // The floor ends by itself.
            machine.wait_end(LONG)?;
        }
        fs::remove_file(&disk).context("cannot remove the disk")?;
        Ok(times)
    }

    /// Takes the memory at rest, of which the node tells some time after `ready`.
    fn remember(&mut self, machine: &mut Machine) -> Result<()> {
        let event = machine.wait_for("memory", LONG, |_| true)?;
        for ((process, _), values) in MEMORY_GOALS.iter().zip(&mut self.memory) {
            values.push(event.text(process).parse().with_context(|| format!("bad {event}"))?);
        }
        Ok(())
    }
}
