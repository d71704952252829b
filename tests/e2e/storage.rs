//! The shared part of the stories of the data partition: kinds, the counter in etcd,
//! the disk.
//!
//! `polis.exercise=count` makes a node count in etcd and print each number that etcd
//! has acknowledged, and the number that it found after a boot.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use polis_proto::v1::cluster_configuration::StorageSecurityPolicy;
use polis_proto::v1::{ClusterConfiguration, NodeParameters};
use polis_qemu::args::Disk;
use polis_qemu::{Config, Event, Machine};
use prost::Message as _;

use crate::table::partition;
use crate::world::{DISK_SIZE_SMALL, SOON, World, founding, home};

/// The start of the counted values.
pub(crate) const PLAINTEXT: &[u8] = b"polis-exercise-known-plaintext";

/// Counts in etcd.
pub(crate) const COUNT: &str = "polis.exercise=count";

/// How a data partition is protected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Insecure,
    Encrypted,
    Authenticated,
}

impl Kind {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Insecure => "insecure",
            Self::Encrypted => "encrypted",
            Self::Authenticated => "authenticated",
        }
    }

    fn policy(self) -> StorageSecurityPolicy {
        match self {
            Self::Insecure => StorageSecurityPolicy::NeedsInsecure,
            Self::Encrypted => StorageSecurityPolicy::NeedsEncryption,
            Self::Authenticated => StorageSecurityPolicy::NeedsEncryptionAndAuthentication,
        }
    }
}

/// A machine that founds a cluster whose policy asks for `kind`.
pub(crate) fn bootstrap_config(world: &World, kind: Kind, append: &str) -> Result<Config> {
    bootstrap_config_with(world, world.disk(None)?, kind, append)
}

/// The same with a disk of [`DISK_SIZE_SMALL`].
pub(crate) fn bootstrap_config_small(world: &World, kind: Kind, append: &str) -> Result<Config> {
    let disk = world.disk_of_size(DISK_SIZE_SMALL, None)?;
    bootstrap_config_with(world, disk, kind, append)
}

fn bootstrap_config_with(world: &World, disk: Disk, kind: Kind, append: &str) -> Result<Config> {
    Ok(Config {
        disk: Some(disk),
        fw_cfg: world.fw_cfg(&parameters(kind).encode_to_vec())?,
        ..world.bare(append)
    })
}

/// Parameters that found a cluster whose policy asks for `kind`.
pub(crate) fn parameters(kind: Kind) -> NodeParameters {
    founding(ClusterConfiguration {
        storage_security_policy: kind.policy().into(),
        ..ClusterConfiguration::default()
    })
}

/// Waits until the node is home with a partition of this kind, and has read the number.
pub(crate) fn home_and_counting(machine: &mut Machine, kind: Kind) -> Result<u64> {
    home(machine)?;
    counting(machine, kind)
}

/// The same of a machine that is home already.
pub(crate) fn counting(machine: &mut Machine, kind: Kind) -> Result<u64> {
    is_ready_as(machine, kind)?;
    let found = machine.wait_for("exercise", SOON, |event| event.get("found").is_some())?;
    number(&found, "found")
}

/// Checks that the machine has reported a partition of this kind.
pub(crate) fn is_ready_as(machine: &Machine, kind: Kind) -> Result<()> {
    let output = format!("kind={}", kind.name());
    let ready = |line: &str| line.contains("storage is ready") && line.contains(&output);
    ensure!(machine.lines().iter().any(|line| ready(&line.text)), "no {output} is ready");
    Ok(())
}

/// Waits until etcd has acknowledged `number`.
pub(crate) fn acknowledged(machine: &mut Machine, number: u64) -> Result<Event> {
    let reached = |event: &Event| self::number(event, "acknowledged").is_ok_and(|n| n >= number);
    Ok(machine.wait_for("exercise", SOON, reached)?)
}

/// Makes it count for a while and cuts the power. Returns the last number that the
/// machine has printed as acknowledged.
pub(crate) fn count_and_cut(mut machine: Machine, after: Duration) -> Result<u64> {
    let end = Instant::now() + after;
    while machine.next_line(end.saturating_duration_since(Instant::now())).is_some() {}
    let last = last_counted(&machine);
    machine.kill();
    last
}

/// The last number that the machine has printed as acknowledged; 0 before the first.
pub(crate) fn last_counted(machine: &Machine) -> Result<u64> {
    let counted = |event: &Event| event.word == "exercise" && event.get("acknowledged").is_some();
    machine.seen(counted).last().map_or(Ok(0), |event| number(event, "acknowledged"))
}

/// A number of an event.
pub(crate) fn number(event: &Event, key: &str) -> Result<u64> {
    let text = event.get(key).with_context(|| format!("no {key}: {event}"))?;
    text.parse().with_context(|| format!("{key} is not a number: {event}"))
}

/// The file that is the machine's disk.
pub(crate) fn file(config: &Config) -> Result<PathBuf> {
    Ok(config.disk.as_ref().context("no disk")?.file.clone())
}

/// First byte and length of POLIS-DATA.
pub(crate) fn data(disk: &Path) -> Result<(u64, u64)> {
    partition(disk, "POLIS-DATA")
}

/// Where `bytes` stand in the file, every place.
pub(crate) fn search(file: &Path, bytes: &[u8]) -> Result<Vec<u64>> {
    const CHUNK: usize = 8 << 20;
    let disk = File::open(file)?;
    let finder = memchr::memmem::Finder::new(bytes);
    let mut found = Vec::new();
    let mut chunk = vec![0; CHUNK + bytes.len()];
    let length = disk.metadata()?.len();
    let mut at = 0;
    while at < length {
        let wanted = chunk.len().min(usize::try_from(length - at)?);
        disk.read_exact_at(&mut chunk[..wanted], at)?;
        // A place at which the next chunk begins is the next chunk's.
        let places = finder.find_iter(&chunk[..wanted]).filter(|place| *place < CHUNK);
        found.extend(places.map(|place| at + place as u64));
        at += CHUNK as u64;
    }
    Ok(found)
}
