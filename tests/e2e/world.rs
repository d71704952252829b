//! The world of a story: an image, a folder, a disk, parameters, machines.

use std::cell::{Cell, RefCell};
use std::fs::{self, File};
use std::io::{self, Read as _};
use std::net::{Ipv4Addr, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use base64ct::{Base64, Encoding as _};
use polis_image::signing::{ImageSigner, Keys};
use polis_image::{Manifest, Options, SIZE_DEFAULT, assemble};
use polis_proto::v1::cluster_configuration::StorageSecurityPolicy;
use polis_proto::v1::node_parameters::Cluster;
use polis_proto::v1::{ClusterBootstrap, ClusterConfiguration, NodeParameters};
use polis_qemu::args::{self, Devices, Disk, Forward, FwCfg, Sockets, argv};
use polis_qemu::cache::{Cache, Entry, Key, Wanted};
use polis_qemu::deadline::Deadline;
use polis_qemu::fleet::PARAMETERS;
use polis_qemu::host::{Preference, accelerator, version};
use polis_qemu::{Accelerator, Bus, Config, Event, Firmware, Image, Machine, Reset, template};
use polis_tests::{skip, workspace};
use polis_wire::parameters::ARMOUR;
use prost::Message as _;
use tokio_rustls::rustls::{ClientConfig, ClientConnection, RootCertStore, crypto};

use crate::esp;

/// Longest that any boot may take to `ready`. A first boot takes some twenty
/// seconds on an idle host; one with two processors runs stories side by side
/// with the linker of the next test.
pub(crate) const BOOT: Duration = Duration::from_secs(300);

/// Longest that a running node may take to notice and report something.
pub(crate) const SOON: Duration = Duration::from_secs(120);

/// Printed when the driver of the power button has come; a press before is lost.
pub(crate) const POWER_BUTTON: &str = r#"listening to the power key of "Power Button""#;

/// The folder in `target` with a folder for each story.
const E2E: &str = "e2e";

/// The folder in `target` with the data that stories share, from one run to the next.
const CACHE: &str = "e2e-templates";

/// Names the folder of the development image of the next version.
pub(crate) const NEXT: &str = "POLIS_NEXT_IMAGE_DIR";

/// Names the folder of the development image with Kubernetes.
const FULL: &str = "POLIS_FULL_IMAGE_DIR";

/// Names the folder of the next version of that image.
pub(crate) const NEXT_FULL: &str = "POLIS_NEXT_FULL_IMAGE_DIR";

/// The clock of a saved machine stands still, and certificates begin a day before they
/// are made: one that is as old as a long run is good, one of yesterday is not.
const SAVED_MAX: Duration = Duration::from_secs(6 * 60 * 60);

/// Longest that one connection waits for its answer, and between two looks at that deadline.
const ANSWER: Duration = Duration::from_secs(20);
const ANSWER_LOOK: Duration = Duration::from_secs(1);

/// Size of a story's disk: the system, and enough for a data partition.
const DISK_SIZE: u64 = polis_image::SIZE_DEFAULT;

/// The same of a small one. An authenticated partition there is wiped while it is made, but
/// for a little: a larger one keeps half a processor busy for minutes after that, by which
/// most stories show nothing.
pub(crate) const DISK_SIZE_SMALL: u64 = 3104 << 20;

/// Where a machine that founds a cluster looks for a snapshot of etcd.
pub(crate) const SNAPSHOT: &str = "polis/etcd_snapshot.db";

/// Where a machine that resumes from stage 1 reads its parameters.
const ON_ESP: &str = "polis/parameters.pb";

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
    /// The same for direct boots that start sooner: see [`Image::quick`].
    pub(crate) quick: Image,
    pub(crate) manifest: Manifest,
    cache: Cache,
    /// The saved machines in use, which stay as long as this world.
    saved: RefCell<Vec<Entry>>,
    boots: Cell<u32>,
}

impl World {
    /// A fresh folder `target/e2e/<story>`, for machines of the development image.
    pub(crate) fn new(story: &str) -> Result<Self> {
        Self::with_image(story, "POLIS_IMAGE_DIR")
    }

    /// The same for machines of the product image.
    pub(crate) fn of_product(story: &str) -> Result<Self> {
        Self::with_image(story, "POLIS_PRODUCT_IMAGE_DIR")
    }

    /// The same for machines of the development image with Kubernetes. Without that image, the
    /// story is skipped.
    pub(crate) fn of_full(story: &str) -> Result<Self> {
        if std::env::var_os(FULL).is_none() {
            skip("no image with Kubernetes was built: see docs/testing.md")?;
        }
        Self::with_image(story, FULL)
    }

    fn with_image(story: &str, variable: &str) -> Result<Self> {
        let built = std::env::var_os(variable)
            .with_context(|| format!("{variable} names no image; use `cargo xtask test e2e`"))?;
        let built = Path::new(&built);
        let dir = folder(story);
        if dir.exists() {
            fs::remove_dir_all(&dir)?;
        }
        fs::create_dir_all(&dir)?;
        let image = Image::load(built)?;
        let cache = Cache::new(&target(CACHE));
        Ok(Self {
            dir,
            quick: image.quick(&cache)?,
            cache,
            image,
            manifest: Manifest::load(built)?,
            saved: RefCell::default(),
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
        Ok(virtio(file))
    }

    /// A disk without a byte on it; `name` begins with `disk`.
    pub(crate) fn empty_disk(&self, name: &str, size: u64) -> Result<Disk> {
        let file = self.path(name);
        File::create(&file)?.set_len(size)?;
        Ok(virtio(file))
    }

    /// A disk whose programs these keys have signed; `name` begins with `disk`.
    pub(crate) fn signed_disk(&self, name: &str, keys: &Keys) -> Result<Disk> {
        self.signed_disk_of_size(name, keys, SIZE_DEFAULT)
    }

    /// The same, of any size.
    pub(crate) fn signed_disk_of_size(&self, name: &str, keys: &Keys, size: u64) -> Result<Disk> {
        self.signed_disk_of(name, &self.manifest, keys.image_signer()?, size)
    }

    /// The same, of any image.
    pub(crate) fn signed_disk_of(
        &self,
        name: &str,
        image: &Manifest,
        signer: ImageSigner,
        size: u64,
    ) -> Result<Disk> {
        let file = self.path(name);
        let signer = Some(Arc::new(signer));
        assemble(image, &Options { signer, size, ..Options::new(&file) })?;
        Ok(virtio(file))
    }

    /// `bytes` as the item of fw_cfg in which a node looks for its parameters.
    pub(crate) fn fw_cfg(&self, bytes: &[u8]) -> Result<Vec<FwCfg>> {
        let file = self.path("parameters.pb");
        fs::write(&file, bytes)?;
        Ok(vec![FwCfg { name: PARAMETERS.to_owned(), file }])
    }

    /// The quickest machine that founds a cluster: direct boot, parameters by fw_cfg.
    /// `append` goes behind the kernel command line.
    pub(crate) fn bootstrap_config(&self, append: &str) -> Result<Config> {
        Ok(Config {
            disk: Some(self.disk(None)?),
            fw_cfg: self.fw_cfg(&bootstrap().encode_to_vec())?,
            ..self.bare(append)
        })
    }

    /// A quick direct boot without a disk and without parameters.
    pub(crate) fn bare(&self, append: &str) -> Config {
        Config::new(self.quick.direct(append), accelerator(Preference::Auto, 1))
    }

    /// A machine of [`World::bootstrap_config`] that is home, and its identity: started from one
    /// that was saved when it was, once for all stories, so it costs a thirtieth of a boot.
    /// Its forwards and its reaction to a reset may be its own; every other machine
    /// boots. All that start so are the same node.
    pub(crate) fn at_home(&self, config: &Config) -> Result<(Machine, Identity)> {
        if config.accelerator == Accelerator::Kvm {
            // A boot takes two seconds, and a state is of one processor's model.
            let mut machine = self.boot(config)?;
            let identity = home(&mut machine)?;
            return Ok((machine, identity));
        }
        let template = Config { forwards: Vec::new(), reset: Reset::Restart, ..config.clone() };
        let wanted = Wanted { kind: "home", key: self.key(&template), age_max: Some(SAVED_MAX) };
        let saved = self.cache.entry(&wanted, |dir| self.save_at_home(&template, dir))?;
        let machine = template::restore(config, &saved.dir, &self.next_boot())?;
        let ready = machine.seen(|event| event.word == "ready");
        let identity = identity(&machine, ready.last().context("saved before it was ready")?)?;
        // It starts with nothing translated, so its first answer takes some seconds.
        for forward in &config.forwards {
            answers(forward)?;
        }
        Ok((machine, identity))
    }

    /// The same machine, which goes on from one that was saved in stage 1, once for all
    /// stories, and does not boot: for two thirds of the processor time until `ready`. For
    /// stories that show nothing of stage 1. Its parameters move from fw_cfg to the ESP.
    ///
    /// Every other machine stays as it is: of another kernel, kind of disk, card, screen, with
    /// a TPM, a clock or a console of its own.
    pub(crate) fn past_stage_1(&self, config: Config) -> Result<Config> {
        let as_saved = Config {
            disk: config.disk.clone(),
            recording: config.recording.clone(),
            disk_fault: config.disk_fault,
            link: config.link.clone(),
            forwards: config.forwards.clone(),
            fw_cfg: config.fw_cfg.clone(),
            reset: config.reset,
            ..Config::new(config.firmware.clone(), Accelerator::Tcg)
        };
        let Firmware::Direct { kernel, cmdline, .. } = &config.firmware else { return Ok(config) };
        let virtio = config.disk.as_ref().is_some_and(|disk| disk.bus == Bus::Virtio);
        let parameters = config.fw_cfg.iter().all(|item| item.name == PARAMETERS);
        if *kernel != self.quick.kernel || !virtio || !parameters || config != as_saved {
            return Ok(config);
        }
        let config = on_esp(config.clone())?;
        let bare = Config::new(config.firmware.clone(), config.accelerator);
        // Each kernel command line has a saved machine of its own, and all of them stay.
        let words = cmdline.strip_prefix(&self.quick.cmdline).unwrap_or(cmdline);
        let kind = format!("stage-1{}", words.replace([' ', '.', '='], "-"));
        let wanted = Wanted { kind: &kind, key: self.key(&bare), age_max: Some(SAVED_MAX) };
        let saved = self.cache.entry(&wanted, |dir| -> Result<()> {
            Ok(template::save_in_stage_1(&bare, dir, BOOT)?)
        })?;
        let devices = Devices::Plugged(saved.dir.clone());
        self.saved.borrow_mut().push(saved);
        Ok(Config { devices, ..config })
    }

    /// Boots a machine until it is at rest, and saves it in `dir`.
    fn save_at_home(&self, template: &Config, dir: &Path) -> Result<()> {
        let config = template::to_be_saved(template, dir);
        let mut machine = Machine::start(&config, &dir.join("boot"))?;
        home(&mut machine)?;
        // The last that a boot says, some seconds later; a driver may come later still.
        machine.wait_for("memory", SOON, |_| true)?;
        machine.wait_until_text(POWER_BUTTON, SOON)?;
        Ok(template::save(machine, &config, dir)?)
    }

    /// The hash of everything that makes a saved machine another one.
    fn key(&self, config: &Config) -> String {
        let nowhere = || PathBuf::from("socket");
        let sockets =
            Sockets { qmp: nowhere(), console: nowhere(), unread_port: nowhere(), tpm: nowhere() };
        // The folder of the story is in some of the words, and is not part of the machine.
        let own = self.dir.display().to_string();
        let words = argv(config, &sockets).into_iter();
        let words = words.map(|word| word.to_string_lossy().replace(&own, ""));
        let version = format!("{:?}", version());
        [self.image.version.clone(), version]
            .into_iter()
            .chain(words)
            .fold(Key::default(), |key, part| key.part(part.as_bytes()))
            .digits()
    }

    /// Boots a machine. Each boot has a folder of its own: `1`, `2`, ...
    pub(crate) fn boot(&self, config: &Config) -> Result<Machine> {
        Ok(template::start(config, &self.next_boot())?)
    }

    fn next_boot(&self) -> PathBuf {
        self.boots.set(self.boots.get() + 1);
        self.path(&self.boots.get().to_string())
    }
}

impl Drop for World {
    fn drop(&mut self) {
        // Hundreds of megabytes each, and the logs show more. The list may be empty.
        for entry in fs::read_dir(&self.dir).into_iter().flatten().flatten() {
            let name = entry.file_name();
            let name = name.to_string_lossy();
            let disk = name.starts_with("disk") && name.ends_with(".img");
            if disk || name.ends_with(".update") {
                let _removed = fs::remove_file(entry.path());
            }
        }
    }
}

/// The disk in this file, as most machines have it.
pub(crate) fn virtio(file: PathBuf) -> Disk {
    Disk { file, bus: Bus::Virtio, cache: args::Cache::Unsafe }
}

/// A client that knows no authority: it gets an answer, and can do nothing with it.
fn hello() -> Result<ClientConnection> {
    let provider = Arc::new(crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .with_root_certificates(RootCertStore::empty())
        .with_no_client_auth();
    Ok(ClientConnection::new(Arc::new(config), "node".try_into()?)?)
}

/// Parameters as text, for places that carry text.
pub(crate) fn text(parameters: &[u8]) -> String {
    format!("{ARMOUR}{}", Base64::encode_string(parameters))
}

/// The machine with its parameters on its ESP, and not in fw_cfg.
pub(crate) fn on_esp(config: Config) -> Result<Config> {
    let disk = config.disk.as_ref().context("no disk")?;
    for item in &config.fw_cfg {
        ensure!(item.name == PARAMETERS, "{} has no place on the ESP", item.name);
        esp::write(&disk.file, ON_ESP, &fs::read(&item.file)?)?;
    }
    Ok(Config { fw_cfg: Vec::new(), ..config })
}

/// Waits until a port of a machine answers a TLS client.
fn answers(forward: &Forward) -> Result<()> {
    let mut deadline = Deadline::within(BOOT);
    loop {
        match answer(forward.host) {
            Ok(()) => return Ok(()),
            // The machine took the connection and lost it, or did not take it yet.
            Err(_) if !deadline.is_over() => {}
            Err(error) => {
                return Err(error).with_context(|| format!("port {} is silent", forward.guest));
            }
        }
    }
}

/// Fails unless a TLS client gets an answer at this port of the host: QEMU or a gateway takes the
/// connection before the machine does.
fn answer(port: u16) -> io::Result<()> {
    let mut line = TcpStream::connect((Ipv4Addr::LOCALHOST, port))?;
    line.set_read_timeout(Some(ANSWER_LOOK))?;
    hello().map_err(io::Error::other)?.write_tls(&mut line)?;
    let mut deadline = Deadline::within(ANSWER);
    loop {
        match line.read_exact(&mut [0]) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock && !deadline.is_over() => {}
            end => return end,
        }
    }
}

fn folder(story: &str) -> PathBuf {
    target(E2E).join(story)
}

/// A folder that git does not see.
fn target(name: &str) -> PathBuf {
    workspace().join("target").join(name)
}

/// Parameters that found a cluster and ask for nothing else.
pub(crate) fn bootstrap() -> NodeParameters {
    founding(ClusterConfiguration {
        storage_security_policy: StorageSecurityPolicy::NeedsInsecure.into(),
        ..ClusterConfiguration::default()
    })
}

/// Parameters that found a cluster with this configuration.
pub(crate) fn founding(configuration: ClusterConfiguration) -> NodeParameters {
    with_cluster(ClusterBootstrap {
        owner_public_key: OWNER.to_vec(),
        cluster_configuration: Some(configuration),
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

/// The identity that a node and its cluster keep over a restart.
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
    let identity = identity(machine, &ready)?;
    let seen = look(machine);
    Ok((identity, seen))
}

/// The identity of a machine that is home, with every promise about that moment.
fn identity(machine: &Machine, ready: &Event) -> Result<Identity> {
    let this_boot = this_boot(machine);
    let last = |word: &str, of: &[Event]| {
        let found = of.iter().rev().find(|event| event.word == word).cloned();
        found.with_context(|| format!("ready without any `POLIS {word}`"))
    };
    // On a host that is busy enough, etcd may be late and the node split by the time that this
    // program reads of its readiness.
    let until = this_boot.iter().position(|event| event.word == "ready").unwrap_or_default();
    let cluster = last("cluster", &this_boot[..until])?;
    ensure!(cluster.is("state", "home"), "ready, but not home: {cluster}");
    let etcd = last("etcd", &this_boot)?;
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
    Ok(identity)
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

/// Waits for an event of this boot, which may have come already.
pub(crate) fn comes(
    machine: &mut Machine,
    word: &str,
    within: Duration,
    wanted: impl Fn(&Event) -> bool,
) -> Result<Event> {
    match this_boot(machine).into_iter().find(|event| event.word == word && wanted(event)) {
        Some(event) => Ok(event),
        None => Ok(machine.wait_for(word, within, wanted)?),
    }
}

/// Checks that a machine has said this.
pub(crate) fn says(machine: &Machine, text: &str) -> Result<()> {
    let said = machine.lines().iter().any(|line| line.text.contains(text));
    ensure!(said, "no line says `{text}`");
    Ok(())
}

/// Prints the chapters of a long story, with the time since it began.
pub(crate) fn chapters() -> impl Fn(&str) {
    let began = Instant::now();
    move |title: &str| eprintln!("{:6.1} s  {title}", began.elapsed().as_secs_f64())
}

/// Waits for the trapdoor, and checks what every guru meditation promises.
pub(crate) fn guru(machine: &mut Machine, code: &str) -> Result<Event> {
    guru_within(machine, BOOT, code)
}

/// The same, of a machine that is on.
pub(crate) fn guru_within(machine: &mut Machine, within: Duration, code: &str) -> Result<Event> {
    let guru = machine.wait_for("guru", within, |_| true)?;
    let anchor = format!("#{code}.");
    ensure!(guru.text("code").starts_with(&anchor), "another code than {anchor}: {guru}");
    for key in ["stage", "cause", "next", "t"] {
        ensure!(!guru.text(key).is_empty(), "a guru meditation without `{key}`: {guru}");
    }
    let page = include_str!("../../docs/errors.md");
    ensure!(page.contains(&format!("## {code} ")), "docs/errors.md has no section {code}");
    Ok(guru)
}
