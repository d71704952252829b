//! `cargo xtask bench storage`: the cost of a flush on each kind of data partition.
//!
//! A node with `polis.exercise=wal` writes records as etcd's log does, each flushed, and
//! reports the durations. The kinds take turns, so that a slowdown of the host affects all
//! of them. First boots are timed as well: the cost of a kind is highest when the partition
//! is created.
//!
//! A flush is timed twice: with a flush to the host's disk, as on a machine, and with a
//! flush to the host's memory, which shows the share of the processor.

use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result};
use polis_image::{Kind, Manifest};
use polis_proto::v1::cluster_configuration::StorageSecurityPolicy;
use polis_qemu::args::{Cache, Disk, FwCfg};
use polis_qemu::host::{Preference, accelerator};
use polis_qemu::{Bus, Config, Image, Machine};

use super::{Args, Row, Table};
use crate::parameters;

/// Upper bound of every step on a host that is fast enough to measure on.
const LONG: Duration = Duration::from_secs(300);

/// The goal of a flush on an encrypted partition, relative to an insecure one.
const GOAL: f64 = 1.3;

const KINDS: [(&str, StorageSecurityPolicy); 3] = [
    ("insecure", StorageSecurityPolicy::NeedsInsecure),
    ("encrypted", StorageSecurityPolicy::NeedsEncryption),
    ("authenticated", StorageSecurityPolicy::NeedsEncryptionAndAuthentication),
];

/// The durations of one kind.
struct Configuration {
    name: &'static str,
    policy: StorageSecurityPolicy,
    /// Seconds until the partition was ready in a first boot, and until the node was.
    storage: Vec<f64>,
    ready: Vec<f64>,
    /// Milliseconds for a record, with flushes to the host's disk.
    disk: Flushes,
    /// The same with flushes to the host's memory.
    memory: Flushes,
}

/// Milliseconds, a value a round.
#[derive(Default)]
struct Flushes {
    p50: Vec<f64>,
    p99: Vec<f64>,
}

impl Flushes {
    /// The ratio of each round to that of `base`.
    fn over(&self, base: &Self) -> Vec<f64> {
        self.p50.iter().zip(&base.p50).map(|(one, base)| one / base).collect()
    }
}

pub(super) fn measure(args: &Args) -> Result<Table> {
    let manifest = crate::image::built(Kind::Measurement)?;
    let image = Image::load(&manifest.folder)?;
    let folder = crate::image::workspace().join("target/bench/storage");
    if folder.exists() {
        fs::remove_dir_all(&folder).context("cannot empty target/bench/storage")?;
    }
    let mut configurations = KINDS.map(|(name, policy)| Configuration {
        name,
        policy,
        storage: Vec::new(),
        ready: Vec::new(),
        disk: Flushes::default(),
        memory: Flushes::default(),
    });
    for round in 1..=args.runs {
        for cache in [Cache::Writeback, Cache::Unsafe] {
            for configuration in &mut configurations {
                let folder = folder.join(format!("{}-{round}", configuration.name));
                configuration.round(args, &image, &manifest, cache, &folder)?;
                fs::remove_dir_all(&folder).context("cannot remove what was measured")?;
            }
        }
    }

    let mut table = Table::new("storage", args.runs)?;
    let [insecure, ..] = &configurations;
    for configuration in &configurations {
        let row = |what: &str, unit, values: &[f64]| {
            let values = values.to_vec();
            Row { values, ..Row::new(format!("{}, {what}", configuration.name), unit) }
        };
        table.rows.push(row("first boot, storage", "s", &configuration.storage));
        table.rows.push(row("first boot, ready", "s", &configuration.ready));
        table.rows.push(row("flush to the disk, p50", "ms", &configuration.disk.p50));
        table.rows.push(row("flush to the disk, p99", "ms", &configuration.disk.p99));
        table.rows.push(row("flush to memory, p50", "ms", &configuration.memory.p50));
        table.rows.push(row("flush to memory, p99", "ms", &configuration.memory.p99));
        if configuration.policy != StorageSecurityPolicy::NeedsInsecure {
            let to_disk = configuration.disk.over(&insecure.disk);
            let ratio = row("flush to the disk over insecure, p50", "times", &to_disk);
            let goal = configuration.policy == StorageSecurityPolicy::NeedsEncryption;
            table.rows.push(if goal { ratio.goal(GOAL) } else { ratio });
            let to_memory = configuration.memory.over(&insecure.memory);
            table.rows.push(row("flush to memory over insecure, p50", "times", &to_memory));
        }
    }
    Ok(table)
}

impl Configuration {
    fn round(
        &mut self,
        args: &Args,
        image: &Image,
        manifest: &Manifest,
        cache: Cache,
        folder: &Path,
    ) -> Result<()> {
        fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
        let disk = folder.join("disk.img");
        polis_qemu::disk::copy(&manifest.path(&manifest.image), &disk)?;
        let file = folder.join("parameters.pb");
        let owner = parameters::owner_key(folder)?;
        fs::write(&file, parameters::with_policy(&owner, None, self.policy))?;
        let firmware = image.direct("polis.exercise=wal");
        let config = Config {
            disk: Some(Disk { file: disk.clone(), bus: Bus::Virtio, cache }),
            fw_cfg: vec![FwCfg { name: "opt/polis/parameters.pb".to_owned(), file }],
            cpus: args.cpus(),
            ..Config::new(firmware, accelerator(Preference::Auto, args.cpus()))
        };
        let mut machine = Machine::start(&config, &folder.join("1"))?;
        let done = machine
            .wait_for("stage", LONG, |e| e.is("name", "storage") && e.is("state", "done"))?;
        let begun = machine.seen(|e| e.is("name", "storage") && e.is("state", "started"));
        let time = |event: &polis_qemu::Event| event.text("t").parse::<f64>();
        let begun = begun.first().context("stage storage ended without a start")?;
        let ready = machine.wait_for("ready", LONG, |_| true)?;
        let (flushes, name) = match cache {
            Cache::Writeback => {
                self.storage.push(time(&done)? - time(begun)?);
                self.ready.push(ready.at.as_secs_f64());
                (&mut self.disk, "disk")
            }
            Cache::Unsafe => (&mut self.memory, "memory"),
        };
        let timed = machine.wait_for("exercise", LONG, |e| e.get("p50").is_some())?;
        let milliseconds = |key: &str| -> Result<f64> {
            let microseconds: f64 = timed.text(key).parse().with_context(|| format!("{timed}"))?;
            Ok(microseconds / 1000.0)
        };
        let (p50, p99) = (milliseconds("p50")?, milliseconds("p99")?);
        println!("{:<14} to {name:<7} p50 {p50:>6.2} ms, p99 {p99:>6.2} ms", self.name);
        flushes.p50.push(p50);
        flushes.p99.push(p99);
        machine.kill();
        Ok(())
    }
}
