//! What every story starts from: an image, a folder, a disk, parameters, machines.

use std::cell::Cell;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use polis_image::{Manifest, Options, assemble};
use polis_proto::v1::cluster_configuration::StorageSecurityPolicy;
use polis_proto::v1::node_parameters::Cluster;
use polis_proto::v1::{ClusterBootstrap, ClusterConfiguration, NodeParameters};
use polis_qemu::args::{Cache, Disk, FwCfg};
use polis_qemu::host::{Wish, accelerator};
use polis_qemu::{Bus, Config, Event, Image, Machine};
use polis_tests::workspace;
use prost::Message as _;

/// Longest that any boot may take to `ready`. A first boot takes some twenty
/// seconds on an idle host; one with two processors runs stories side by side
/// with the linker of the next test.
pub(crate) const BOOT: Duration = Duration::from_secs(300);

/// Longest that a running node may take to notice and tell something.
pub(crate) const SOON: Duration = Duration::from_secs(120);

/// Size of a story's disk: the system, and enough for a data partition.
const DISK_SIZE: u64 = 2 << 30;

/// An Ed25519 public key whose private half is in RFC 8032, section 7.1: good
/// enough to own a cluster that lives a minute.
pub(crate) const OWNER: [u8; 32] = [
    0xd7, 0x5a, 0x98, 0x01, 0x82, 0xb1, 0x0a, 0xb7, 0xd5, 0x4b, 0xfe, 0xd3, 0xc9, 0x64, 0x07, 0x3a,
    0x0e, 0xe1, 0x72, 0xf3, 0xda, 0xa6, 0x23, 0x25, 0xaf, 0x02, 0x1a, 0x68, 0xf7, 0x07, 0x51, 0x1a,
];

/// A story's own corner. Its disks go when the story ends; its logs stay.
pub(crate) struct World {
    dir: PathBuf,
    pub(crate) image: Image,
    pub(crate) manifest: Manifest,
    boots: Cell<u32>,
}

impl World {
    /// A fresh folder `target/e2e/<story>`.
    pub(crate) fn new(story: &str) -> Result<Self> {
        let built = std::env::var_os("POLIS_IMAGE_DIR")
            .context("POLIS_IMAGE_DIR names no image; use `cargo xtask test e2e`")?;
        let built = Path::new(&built);
        let dir = folder(story);
        if dir.exists() {
            fs::remove_dir_all(&dir)?;
        }
        fs::create_dir_all(&dir)?;
        Ok(Self {
            dir,
            image: Image::load(built)?,
            manifest: Manifest::load(built)?,
            boots: Cell::new(0),
        })
    }

    /// A path in the story's folder.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// A disk as an installer would leave it, with parameters on its ESP or without.
    pub(crate) fn disk(&self, parameters: Option<&[u8]>) -> Result<Disk> {
        self.disk_of_size(DISK_SIZE, parameters)
    }

    /// The same, of any size.
    pub(crate) fn disk_of_size(&self, size: u64, parameters: Option<&[u8]>) -> Result<Disk> {
        let file = self.path("disk.img");
        let parameters = parameters.map(<[u8]>::to_vec);
        assemble(&self.manifest, &Options { parameters, size, ..Options::new(&file) })?;
        Ok(Disk { file, bus: Bus::Virtio, cache: Cache::Unsafe })
    }

    /// `bytes` as the item of fw_cfg in which a node looks for its parameters.
    pub(crate) fn fw_cfg(&self, bytes: &[u8]) -> Result<Vec<FwCfg>> {
        let file = self.path("parameters.pb");
        fs::write(&file, bytes)?;
        Ok(vec![FwCfg { name: "opt/polis/parameters.pb".to_owned(), file }])
    }

    /// The quickest machine that founds a cluster: direct boot, parameters by fw_cfg.
    /// `append` goes behind the kernel command line.
    pub(crate) fn founder(&self, append: &str) -> Result<Config> {
        Ok(Config {
            disk: Some(self.disk(None)?),
            fw_cfg: self.fw_cfg(&bootstrap().encode_to_vec())?,
            ..self.bare(append)
        })
    }

    /// A direct boot without a disk and without parameters.
    pub(crate) fn bare(&self, append: &str) -> Config {
        Config::new(self.image.direct(append), accelerator(Wish::Auto, 1))
    }

    /// Boots a machine. Each boot has a folder of its own: `1`, `2`, ...
    pub(crate) fn boot(&self, config: &Config) -> Result<Machine> {
        self.boots.set(self.boots.get() + 1);
        Ok(Machine::start(config, &self.path(&self.boots.get().to_string()))?)
    }
}

impl Drop for World {
    fn drop(&mut self) {
        // Hundreds of megabytes each, and the logs tell more. There may be none.
        for entry in fs::read_dir(&self.dir).into_iter().flatten().flatten() {
            let name = entry.file_name();
            let name = name.to_string_lossy();
            if name.starts_with("disk") && name.ends_with(".img") {
                let _removed = fs::remove_file(entry.path());
            }
        }
    }
}

fn folder(story: &str) -> PathBuf {
    workspace().join("target/e2e").join(story)
}

/// Parameters that found a cluster and ask for nothing else.
pub(crate) fn bootstrap() -> NodeParameters {
    with_cluster(ClusterBootstrap {
        owner_public_key: OWNER.to_vec(),
        cluster_configuration: Some(ClusterConfiguration {
            storage_security_policy: StorageSecurityPolicy::NeedsInsecure.into(),
            ..ClusterConfiguration::default()
        }),
        ..ClusterBootstrap::default()
    })
}

/// Parameters with this bootstrap.
pub(crate) fn with_cluster(bootstrap: ClusterBootstrap) -> NodeParameters {
    NodeParameters {
        cluster: Some(Cluster::ClusterBootstrap(bootstrap)),
        ..NodeParameters::default()
    }
}

/// What makes a node and its cluster the same after a restart.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Identity {
    pub(crate) node: String,
    pub(crate) ca: String,
    pub(crate) member: String,
}

/// Waits until the node is home, and checks every promise about that moment.
pub(crate) fn home(machine: &mut Machine) -> Result<Identity> {
    home_with(machine, |_| ()).map(|(identity, ())| identity)
}

/// The same; `look` sees the machine at `ready`.
pub(crate) fn home_with<T>(
    machine: &mut Machine,
    look: impl FnOnce(&Machine) -> T,
) -> Result<(Identity, T)> {
    let ready = machine.wait_for("ready", BOOT, |_| true)?;
    let this_boot = this_boot(machine);
    let last = |word: &str| {
        let found = this_boot.iter().rev().find(|event| event.word == word);
        found.with_context(|| format!("ready without any `POLIS {word}`"))
    };
    let cluster = last("cluster")?;
    ensure!(cluster.is("state", "home"), "ready, but not home: {cluster}");
    let etcd = last("etcd")?;
    ensure!(etcd.is("state", "voter") && etcd.is("members", "1"), "ready without a vote: {etcd}");
    let identity = Identity {
        node: ready.text("node").to_owned(),
        ca: ready.text("ca").to_owned(),
        member: etcd.text("member").to_owned(),
    };
    ensure!(
        identity.node.starts_with("polis-") && identity.node.len() == "polis-".len() + 32,
        "no node ID: {ready}"
    );
    ensure!(!identity.ca.is_empty(), "ready without the CA's fingerprint: {ready}");
    ensure!(!identity.member.is_empty(), "no member ID: {etcd}");
    ensure!(!ready.text("address").is_empty(), "ready without an address: {ready}");
    let seen = look(machine);
    Ok((identity, seen))
}

/// The events since the machine booted last: a boot's first line is about its kernel.
pub(crate) fn this_boot(machine: &Machine) -> Vec<Event> {
    let events = machine.seen(|_| true);
    let first = |event: &Event| {
        event.word == "stage" && event.is("name", "kernel") && event.is("state", "started")
    };
    let start = events.iter().rposition(first).unwrap_or_default();
    events[start..].to_vec()
}

/// Waits for the trapdoor, and checks what every guru meditation promises.
pub(crate) fn guru(machine: &mut Machine, code: &str) -> Result<Event> {
    let guru = machine.wait_for("guru", BOOT, |_| true)?;
    let anchor = format!("#{code}.");
    ensure!(guru.text("code").starts_with(&anchor), "another code than {anchor}: {guru}");
    for key in ["stage", "cause", "next", "t"] {
        ensure!(!guru.text(key).is_empty(), "a guru meditation without `{key}`: {guru}");
    }
    let page = include_str!("../../docs/errors.md");
    ensure!(page.contains(&format!("## {code} ")), "docs/errors.md has no section {code}");
    Ok(guru)
}
