//! The steps from packages and our two programs to an image.
//!
//! ```text
//! payload --> modules --+--> initramfs ----------+
//!    |                  |                        v
//!    |   init, node ----+--> system --roothash-> uki --> image
//!    +--> kernel, firmware ----------------------^
//! ```
//!
//! `initramfs` and `system` run at the same time.
//!
//! Invariants:
//! - A step reads nothing that is not among its inputs.
//! - Nothing of the host, the user or the clock reaches an output.

use std::{
    fs,
    path::{Path, PathBuf},
    thread,
};

use crate::{
    cpio,
    digest::{hash, hex},
    error::{At as _, Error, Result},
    layout,
    lock::Lock,
    manifest::{self, Manifest, Options, Sizes},
    packages::{Category, FIRMWARE},
    payload::{Payload, Source, parallel},
    program,
    root::Sources,
    step::{Inputs, Observer, Steps},
    uki::{self, Section},
    verity::{self, Verity},
};

/// Where systemd's stub is in the payload.
const STUB: &str = "usr/lib/systemd/boot/efi/linuxx64.efi.stub";
/// UUID of the file system: it tells nothing apart that the hash does not.
const EROFS_UUID: &str = "00000000-0000-0000-0000-0000706f6c69";
/// LZ4 at its best level but one: the last costs ten times as long for half a
/// percent. Clusters of 64 KiB, since reading is bound by hashing, not by seeking.
const EROFS_OPTIONS: &[&str] =
    &["-zlz4hc,level=9", "-C65536", "-T0", "--all-root", "-x-1", "--quiet"];
/// Modules are packed already: trying again costs time and gains nothing.
const EROFS_HINTS: &str = "0 \\.ko\\.xz$\n";
/// What every image is started with. Serial last, so that it is `/dev/console`.
const CMDLINE: &str = "console=tty0 console=ttyS0,115200 quiet loglevel=4 panic=30 \
    cryptomgr.notests no_timer_check";

/// What to build from, and where to.
#[derive(Clone, Debug)]
pub struct Config {
    /// Where packages come from.
    pub source: Source,
    /// The static program that is PID 1.
    pub init: PathBuf,
    /// The static program with all services.
    pub node: PathBuf,
    /// Version of Polis.
    pub version: String,
    /// The output folder.
    pub out: PathBuf,
    /// Bytes of a parameters file for the ESP.
    pub parameters: Option<Vec<u8>>,
    /// Size of the disk image in bytes.
    pub size: u64,
}

/// Brings the payload here, links it below the output's parent, and returns it.
///
/// # Errors
///
/// The lock file is absent or wrong, or the mirror lacks a locked package.
pub fn payload(source: &Source, out: &Path, observer: &dyn Observer) -> Result<Payload> {
    let steps = Steps::open(out.join("steps"), observer)?;
    let lock = source.read()?;
    let root = source.tree(&lock);
    let inputs = Inputs::recipe(&[include_str!("payload.rs")]).text("payload.lock", &lock.print());
    steps
        .run("payload", inputs, std::slice::from_ref(&root), || source.prepare(&lock, observer))?;
    Ok(Payload { root, lock })
}

/// Builds the image.
///
/// # Errors
///
/// A step failed; the error says which object was in the way.
pub fn build(config: &Config, observer: &dyn Observer) -> Result<Manifest> {
    let Payload { root, lock } = payload(&config.source, &config.out, observer)?;
    let steps = Steps::open(config.out.join("steps"), observer)?;
    let builder =
        Builder { config, payload: &root, lock: &lock, release: release(&lock)?, steps: &steps };
    let manifest = builder.build();
    steps.digests.save()?;
    manifest
}

/// The release that the locked kernel calls itself: its package's name says so.
fn release(lock: &Lock) -> Result<String> {
    lock.packages
        .iter()
        .find(|package| package.category == Category::Kernel)
        .and_then(|package| package.name.strip_prefix("linux-image-"))
        .map(str::to_owned)
        .ok_or_else(|| Error::NoPackage { package: "linux-image".to_owned() })
}

struct Builder<'a> {
    config: &'a Config,
    payload: &'a Path,
    lock: &'a Lock,
    release: String,
    steps: &'a Steps<'a>,
}

impl Builder<'_> {
    fn build(&self) -> Result<Manifest> {
        self.modules()?;
        let image_version = self.image_version()?;
        let os_release = os_release(&self.config.version, &image_version);
        let sources = Sources {
            payload: self.payload,
            lock: self.lock,
            release: &self.release,
            init: &self.config.init,
            node: &self.config.node,
            os_release: &os_release,
            index: &self.out("modules"),
        };
        let (initramfs, system, copies) = thread::scope(|scope| {
            let initramfs = scope.spawn(|| self.initramfs(&sources));
            let copies = scope.spawn(|| self.copies());
            let system = self.system(&sources);
            (join(initramfs), system, join(copies))
        });
        initramfs?;
        copies?;
        let verity = system?;
        let cmdline = cmdline(&verity);
        self.uki(&cmdline, &os_release)?;
        let mut manifest = Manifest {
            folder: self.config.out.clone(),
            version: self.config.version.clone(),
            image_version,
            kernel_release: self.release.clone(),
            cmdline,
            verity,
            kernel: "vmlinuz".into(),
            initramfs: "initramfs.cpio".into(),
            uki: "polis.efi".into(),
            system: "system.img".into(),
            firmware: "firmware".into(),
            image: "polis.img".into(),
            sizes: Sizes::default(),
        };
        manifest.sizes = self.sizes(&manifest)?;
        self.image(&manifest)?;
        manifest.save()?;
        Ok(manifest)
    }

    fn out(&self, name: &str) -> PathBuf {
        self.config.out.join(name)
    }

    /// What the image is made of, in one hash: known before the image is.
    fn image_version(&self) -> Result<String> {
        let inputs =
            self.content()?.text("version", &self.config.version).text("command line", CMDLINE);
        Ok(inputs.digest()[..16].to_owned())
    }

    /// The inputs of everything that is in an image.
    fn content(&self) -> Result<Inputs> {
        let recipe = [
            include_str!("build.rs"),
            include_str!("root.rs"),
            include_str!("modules.rs"),
            include_str!("packages.rs"),
            include_str!("verity.rs"),
        ];
        Inputs::recipe(&recipe)
            .text("payload.lock", &self.lock.print())
            .file("init", &self.config.init, &self.steps.digests)?
            .file("node", &self.config.node, &self.steps.digests)
    }

    /// Asks kmod what depends on what, for all modules of the kernel.
    fn modules(&self) -> Result<()> {
        let inputs = Inputs::default().text("payload.lock", &self.lock.print());
        let names = ["modules.dep", "modules.alias", "modules.softdep"];
        let outputs = names.map(|name| self.out("modules").join(name));
        self.steps.run("modules", inputs, &outputs, || {
            let aside = self.out("modules.new");
            let mut depmod = program::payload(self.payload, "usr/sbin/depmod");
            depmod.arg("-b").arg(self.payload).arg("-o").arg(&aside).arg(&self.release);
            fs::create_dir_all(&aside).at("make", &aside)?;
            program::run(&mut depmod)?;
            fs::create_dir_all(self.out("modules")).at("make", self.out("modules"))?;
            let written = aside.join("lib/modules").join(&self.release);
            for (name, output) in names.iter().zip(&outputs) {
                fs::copy(written.join(name), output).at("copy", written.join(name))?;
            }
            fs::remove_dir_all(&aside).at("clear", &aside)
        })
    }

    /// What is taken from the payload as it is.
    fn copies(&self) -> Result<()> {
        let inputs =
            Inputs::recipe(&[include_str!("packages.rs")]).text("payload.lock", &self.lock.print());
        let mut pairs = vec![(format!("boot/vmlinuz-{}", self.release), self.out("vmlinuz"))];
        for name in FIRMWARE {
            pairs.push((format!("usr/share/OVMF/{name}"), self.out("firmware").join(name)));
        }
        let outputs: Vec<PathBuf> = pairs.iter().map(|(_, to)| to.clone()).collect();
        self.steps.run("kernel", inputs, &outputs, || {
            fs::create_dir_all(self.out("firmware")).at("make", self.out("firmware"))?;
            for (from, to) in &pairs {
                fs::copy(self.payload.join(from), to).at("copy", self.payload.join(from))?;
            }
            Ok(())
        })
    }

    fn initramfs(&self, sources: &Sources<'_>) -> Result<()> {
        let recipe = [include_str!("root.rs"), include_str!("modules.rs"), include_str!("cpio.rs")];
        let inputs = Inputs::recipe(&recipe).text("payload.lock", &self.lock.print()).file(
            "init",
            &self.config.init,
            &self.steps.digests,
        )?;
        let output = self.out("initramfs.cpio");
        self.steps.run("initramfs", inputs, std::slice::from_ref(&output), || {
            let unpacked = self.out("unpacked");
            fs::create_dir_all(&unpacked).at("make", &unpacked)?;
            let modules = sources.initramfs_modules()?;
            let unpack = |(packed, name): &(PathBuf, String)| {
                let mut xz = program::payload(self.payload, "usr/bin/xz");
                let bytes = program::run(xz.args(["--decompress", "--stdout"]).arg(packed))?;
                let path = unpacked.join(name);
                fs::write(&path, bytes).at("write", &path)
            };
            parallel(&modules, unpack, || {})?;
            let archive = cpio::write(&sources.initramfs(&unpacked)?)?;
            fs::remove_dir_all(&unpacked).at("clear", &unpacked)?;
            fs::write(&output, archive).at("write", &output)
        })
    }

    /// The root file system with its hash tree behind it.
    fn system(&self, sources: &Sources<'_>) -> Result<Verity> {
        let inputs = self.content()?.text("os-release", sources.os_release);
        let output = self.out("system.img");
        self.steps.run("system", inputs, std::slice::from_ref(&output), || {
            let folder = self.out("root");
            sources.root()?.lay_out(&folder)?;
            let hints = self.out("hints");
            fs::write(&hints, EROFS_HINTS).at("write", &hints)?;
            if output.exists() {
                fs::remove_file(&output).at("remove", &output)?;
            }
            let mut mkfs = program::payload(self.payload, "usr/bin/mkfs.erofs");
            mkfs.args(EROFS_OPTIONS).arg(format!("-U{EROFS_UUID}"));
            mkfs.arg(format!("--compress-hints={}", hints.display())).arg(&output).arg(&folder);
            program::run(&mut mkfs)?;
            for leftover in [fs::remove_dir_all(&folder), fs::remove_file(&hints)] {
                leftover.at("clear", &folder)?;
            }
            append_verity(&output, sources.os_release)
        })
    }

    fn uki(&self, cmdline: &str, os_release: &str) -> Result<()> {
        let (kernel, initramfs) = (self.out("vmlinuz"), self.out("initramfs.cpio"));
        let stub = self.payload.join(STUB);
        let inputs = Inputs::recipe(&[include_str!("uki.rs")])
            .text("payload.lock", &self.lock.print())
            .text("command line", cmdline)
            .text("os-release", os_release)
            .file("initramfs", &initramfs, &self.steps.digests)?
            .file("kernel", &kernel, &self.steps.digests)?;
        let output = self.out("polis.efi");
        self.steps.run("uki", inputs, std::slice::from_ref(&output), || {
            let read = |path: &Path| fs::read(path).at("read", path);
            let sections = [
                Section::new(".osrel", os_release),
                Section::new(".cmdline", cmdline),
                Section::new(".uname", self.release.as_str()),
                Section::new(".pkgs", self.lock.listing()),
                Section::new(".linux", read(&kernel)?),
                Section::new(".initrd", read(&initramfs)?),
            ];
            fs::write(&output, uki::build(&read(&stub)?, &sections)?).at("write", &output)
        })
    }

    fn sizes(&self, manifest: &Manifest) -> Result<Sizes> {
        let size = |name: &Path| -> Result<u64> {
            let path = self.config.out.join(name);
            Ok(fs::metadata(&path).at("look at", &path)?.len())
        };
        let system = size(&manifest.system)?;
        let erofs = manifest.verity.blocks * verity::BLOCK as u64;
        let layout = layout::plan(&manifest.verity.root_hash, system, self.config.size)?;
        let [esp, system_a] = &layout.partitions[..] else { return Ok(Sizes::default()) };
        Ok(Sizes {
            kernel: size(&manifest.kernel)?,
            initramfs: size(&manifest.initramfs)?,
            uki: size(&manifest.uki)?,
            erofs,
            verity: system - erofs,
            esp_partition: esp.length,
            system_partition: system_a.length,
        })
    }

    fn image(&self, manifest: &Manifest) -> Result<()> {
        let recipe = [
            include_str!("disk.rs"),
            include_str!("esp.rs"),
            include_str!("layout.rs"),
            include_str!("manifest.rs"),
        ];
        let parameters = self.config.parameters.as_deref().map(hash).unwrap_or_default();
        let inputs = Inputs::recipe(&recipe)
            .text("the parameters", &parameters)
            .text("the size", &self.config.size.to_string())
            .text("the system", &manifest.verity.root_hash)
            .file("the unified kernel image", &self.out("polis.efi"), &self.steps.digests)?;
        let out = self.out("polis.img");
        self.steps.run("image", inputs, std::slice::from_ref(&out), || {
            let options = Options {
                parameters: self.config.parameters.clone(),
                size: self.config.size,
                ..Options::new(&out)
            };
            manifest::assemble(manifest, &options)
        })
    }
}

/// A step's panic is its caller's.
fn join<T>(thread: thread::ScopedJoinHandle<'_, T>) -> T {
    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// Appends the hash tree to a file system and says how to open the two.
fn append_verity(path: &Path, seed: &str) -> Result<Verity> {
    let mut data = fs::read(path).at("read", path)?;
    data.resize(data.len().next_multiple_of(verity::BLOCK), 0);
    let blocks = (data.len() / verity::BLOCK) as u64;
    // The salt need not be secret, only the image's own: two images share no hash.
    let salt = hash(seed.as_bytes());
    let salt_bytes: Vec<u8> = (0..salt.len())
        .step_by(2)
        .filter_map(|at| u8::from_str_radix(&salt[at..at + 2], 16).ok())
        .collect();
    let (root, tree) = verity::tree(&data, &salt_bytes);
    data.extend(tree);
    fs::write(path, &data).at("write", path)?;
    Ok(Verity { root_hash: hex(&root), salt, blocks })
}

fn os_release(version: &str, image_version: &str) -> String {
    format!(
        "ID=polis\nNAME=\"Polis\"\nPRETTY_NAME=\"Polis {version}\"\nVERSION_ID={version}\n\
         IMAGE_ID=polis\nIMAGE_VERSION={image_version}\n"
    )
}

fn cmdline(verity: &Verity) -> String {
    let Verity { root_hash, salt, blocks } = verity;
    let esp = layout::esp_guid(root_hash);
    format!(
        "polis.verity={root_hash} polis.verity-salt={salt} polis.verity-blocks={blocks} \
         polis.slot=A polis.esp={esp} {CMDLINE}"
    )
}
