//! The steps from packages and our two programs to an image.
//!
//! ```text
//! payload --> modules --+--> unpack ----+--> initramfs ------------+
//!    |                  +--> firmware --+                          v
//!    |   init, node --> strip ----------+--> system --root hash--> uki --> image
//!    +--> programs of workloads --------^                          ^
//!    +--> kernel, microcode ---------------------------------------/
//! ```
//!
//! `initramfs`, `system` and `kernel` run at the same time. Only the programs of a
//! development image are stripped here: others come from cargo as they are shipped.
//!
//! Invariants:
//! - A step reads only its inputs.
//! - The host, the user and the clock have no influence on an output.

use std::{
    fs,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    sync::Arc,
    thread,
};

use crate::{
    command_line::{CMDLINE, command_line},
    digest::{Digests, hash},
    error::{At as _, Error, Result},
    esp,
    firmware::{self, Named},
    golang::{self, Built},
    guard::{self, Guard},
    layout,
    lock::Lock,
    manifest::{self, Kind, Manifest, Options, Sizes, Variant},
    microcode, modules, oci,
    packages::{Category, FIRMWARE},
    payload::{Payload, Source, parallel},
    program,
    programs::{self, Programs},
    provide::provide,
    root::Sources,
    signing::ImageSigner,
    step::{Inputs, Observer, Steps},
    system,
    tree::Tree,
    uki::{self, Section},
    verity::{self, Verity},
    workload,
};

/// Where systemd's stub is in the payload.
const STUB: &str = "usr/lib/systemd/boot/efi/linuxx64.efi.stub";
/// Where its loader is.
const LOADER: &str = "usr/lib/systemd/boot/efi/systemd-bootx64.efi";
/// This file's own text: a recipe of the steps whose work is done here.
const RECIPE: &str = include_str!("build.rs");

/// The inputs of a build, and its output folder.
#[derive(Clone, Debug)]
pub struct Config {
    /// The purpose of the image.
    pub kind: Kind,
    /// Where packages come from, and which: those of the image's variant.
    pub source: Source,
    /// The Go programs of an image with workloads.
    pub go: golang::Folders,
    /// The static program that is PID 1.
    pub init: PathBuf,
    /// The static program with all services.
    pub node: PathBuf,
    /// The folder of the static programs in [`oci::IMAGES`], for an image with workloads.
    pub system_images: PathBuf,
    /// Version of Polis.
    pub version: String,
    /// The output folder.
    pub out: PathBuf,
    /// Bytes of a parameters file for the ESP.
    pub parameters: Option<Vec<u8>>,
    /// The signer of what the machine starts; an image without keys is unsigned.
    pub signer: Option<Arc<ImageSigner>>,
    /// Size of the disk image in bytes.
    pub size: u64,
}

/// Builds the image. Until the guard is dropped, no later build replaces its parts.
///
/// # Errors
///
/// A step failed; the error names the object.
pub fn build(config: &Config, observer: &dyn Observer) -> Result<(Manifest, Guard)> {
    // An invalid size is rejected now, and not after all the work.
    layout::plan("", 0, config.size)?;
    // A second build of one folder finds all outputs cached then.
    let guard = guard::hold(&config.out, observer)?;
    let steps = Steps::open(config.out.join("steps"), observer)?;
    let payload = provide(&config.source, observer)?;
    let go = match config.source.variant {
        Variant::Base => Built::default(),
        Variant::Full => {
            golang::Builder::new(&config.source, &config.go, &payload, observer)?.image()?
        }
    };
    let Config { init, node, system_images, kind, out, .. } = config;
    let programs =
        Programs { init: init.clone(), node: node.clone(), system_images: system_images.clone() };
    let programs = programs::strip(programs, *kind, config.source.variant, out, &steps)?;
    let builder = Builder {
        config,
        programs: &programs,
        go: &go,
        payload: &payload.root,
        packages: payload.lock.print() + &payload.listing(),
        release: release(&payload.lock)?,
        content: &payload,
        steps: &steps,
    };
    let manifest = builder.build();
    steps.digests.save()?;
    Ok((manifest?, guard))
}

/// The release of the locked kernel, from its package's name.
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
    programs: &'a Programs,
    /// The programs of workloads.
    go: &'a Built,
    /// Where the payload is unpacked.
    payload: &'a Path,
    /// Its content ...
    content: &'a Payload,
    /// ... as a text that changes with it.
    packages: String,
    release: String,
    steps: &'a Steps<'a>,
}

/// The two trees of an image, and a text for each that changes with it.
struct Plan {
    root: Tree,
    root_listing: String,
    initramfs: Tree,
    initramfs_listing: String,
}

impl Builder<'_> {
    fn build(&self) -> Result<Manifest> {
        self.modules()?;
        let variant = self.config.source.variant;
        let sources = Sources::open(self.content, variant, &self.release, &self.out("modules"))?;
        self.unpack(&sources)?;
        let named = self.firmware(&sources)?;
        let plan = self.plan(&sources, &named)?;
        let image_version = self.image_version(&plan)?;
        let date = build_date(self.payload, &self.release)?;
        let os_release = os_release(self.config, &image_version, date)?;
        let (initramfs, system, kernel) = thread::scope(|scope| {
            let initramfs = scope.spawn(|| self.initramfs(&plan));
            let kernel = scope.spawn(|| self.kernel());
            let system = self.system(&plan, &os_release);
            (join(initramfs), system, join(kernel))
        });
        initramfs?;
        kernel?;
        let verity = system?;
        let cmdline = command_line(&verity);
        let microcode = self.microcode()?;
        self.uki(&cmdline, &os_release, microcode.map(|name| self.out(name)).as_deref())?;
        let mut manifest = Manifest {
            folder: self.config.out.clone(),
            kind: self.config.kind,
            variant,
            moved: self.content.moved.clone(),
            version: self.config.version.clone(),
            image_version,
            kernel_release: self.release.clone(),
            cmdline,
            verity,
            kernel: "vmlinuz".into(),
            initramfs: "initramfs.cpio".into(),
            microcode: microcode.map(Into::into),
            uki: "polis.efi".into(),
            loader: "loader.efi".into(),
            system: "system.img".into(),
            firmware: "firmware".into(),
            image: "polis.img".into(),
            sha256: String::new(),
            sizes: Sizes::default(),
        };
        manifest.sizes = self.sizes(&manifest)?;
        manifest.sha256 = self.image(&manifest)?;
        manifest.save()?;
        Ok(manifest)
    }

    fn out(&self, name: &str) -> PathBuf {
        self.config.out.join(name)
    }

    fn digests(&self) -> &Digests {
        &self.steps.digests
    }

    /// Runs kmod to find the dependencies of all modules of the kernel.
    fn modules(&self) -> Result<()> {
        let inputs = Inputs::recipe(&[RECIPE]).text("payload.lock", &self.packages);
        let names = ["modules.dep", "modules.alias", "modules.softdep"];
        let outputs = names.map(|name| self.out("modules").join(name));
        self.steps.run("modules", inputs, &outputs, || {
            let draft = self.out("modules.new");
            let mut depmod = program::payload(self.payload, "usr/sbin/depmod");
            depmod.arg("-b").arg(self.payload).arg("-o").arg(&draft).arg(&self.release);
            fs::create_dir_all(&draft).at("make", &draft)?;
            program::run(&mut depmod)?;
            fs::create_dir_all(self.out("modules")).at("make", self.out("modules"))?;
            let written = draft.join("lib/modules").join(&self.release);
            for (name, output) in names.iter().zip(&outputs) {
                fs::copy(written.join(name), output).at("copy", written.join(name))?;
            }
            fs::remove_dir_all(&draft).at("clear", &draft)
        })
    }

    /// Unpacks the modules that are in the image in plain form.
    fn unpack(&self, sources: &Sources<'_>) -> Result<()> {
        let modules = sources.plain_modules()?;
        let folder = self.out("unpacked");
        let names: Vec<&str> = modules.iter().map(|(_, name)| name.as_str()).collect();
        let outputs: Vec<PathBuf> = names.iter().map(|name| folder.join(name)).collect();
        let inputs = Inputs::recipe(&[])
            .text("payload.lock", &self.packages)
            .text("the list of plain modules", &names.join(" "));
        self.steps.run("unpack", inputs, &outputs, || {
            fs::create_dir_all(&folder).at("make", &folder)?;
            let unpack = |(packed, name): &(PathBuf, String)| {
                let mut xz = program::payload(self.payload, "usr/bin/xz");
                let bytes = program::run(xz.args(["--decompress", "--stdout"]).arg(packed))?;
                let path = folder.join(name);
                fs::write(&path, bytes).at("write", &path)
            };
            parallel(&modules, unpack, || {})
        })
    }

    /// Reads which firmware files the modules of the image name.
    fn firmware(&self, sources: &Sources<'_>) -> Result<Named> {
        let files = sources.packed_modules()?;
        let names: Vec<String> =
            files.iter().map(|file| modules::name(&file.to_string_lossy())).collect();
        let inputs = Inputs::recipe(&[include_str!("firmware.rs")])
            .text("payload.lock", &self.packages)
            .text("the list of modules", &names.join(" "));
        self.steps.run("firmware", inputs, &[], || firmware::read(self.payload, &files))
    }

    fn plan(&self, sources: &Sources<'_>, named: &Named) -> Result<Plan> {
        let Programs { init, node, system_images } = self.programs;
        let unpacked = self.out("unpacked");
        let mut root = sources.root(init, node, &unpacked, self.go, named)?;
        if self.config.source.variant == Variant::Full {
            workload::add(&mut root, oci::layout(&oci::IMAGES, system_images)?);
        }
        let initramfs = sources.initramfs(init, &unpacked, named)?;
        // The file's identity, not its place on this host: the lock and the hashes of
        // our two programs cover its content.
        let origin = |path: &Path| {
            let inside =
                path.strip_prefix(self.payload).or_else(|_outside| path.strip_prefix(&unpacked));
            let own = path.file_name().map(Path::new);
            inside.ok().or(own).unwrap_or(path).display().to_string()
        };
        Ok(Plan {
            root_listing: root.listing(origin),
            root,
            initramfs_listing: initramfs.listing(origin),
            initramfs,
        })
    }

    /// One hash of all inputs of the image: known before the image is, since the image
    /// contains it.
    fn image_version(&self, plan: &Plan) -> Result<String> {
        let inputs = self
            .of_the_system(plan)?
            .text("the initramfs's files", &plan.initramfs_listing)
            .text("version", &self.config.version)
            .text("kind", self.config.kind.word())
            .text("command line", CMDLINE);
        Ok(inputs.digest()[..16].to_owned())
    }

    /// The inputs of the system, except its version.
    fn of_the_system(&self, plan: &Plan) -> Result<Inputs> {
        let inputs = Inputs::recipe(&[include_str!("system.rs"), polis_layout::SOURCES])
            .text("payload.lock", &self.packages)
            .text("the list of files", &plan.root_listing)
            .file("init", &self.programs.init, self.digests())?
            .file("node", &self.programs.node, self.digests())?;
        let add = |inputs: Inputs, (path, file): &(String, PathBuf)| {
            inputs.file(path, file, self.digests())
        };
        self.go.programs.iter().try_fold(inputs, add)
    }

    /// Copies unchanged parts of the payload: the kernel, the loader, and firmware for
    /// machines in QEMU.
    fn kernel(&self) -> Result<()> {
        let inputs = Inputs::recipe(&[RECIPE, include_str!("packages.rs")])
            .text("payload.lock", &self.packages);
        let mut pairs = vec![
            (format!("boot/vmlinuz-{}", self.release), self.out("vmlinuz")),
            (LOADER.to_owned(), self.out("loader.efi")),
        ];
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

    fn initramfs(&self, plan: &Plan) -> Result<()> {
        let inputs = Inputs::recipe(&[include_str!("cpio.rs")])
            .text("payload.lock", &self.packages)
            .text("the list of files", &plan.initramfs_listing)
            .file("init", &self.programs.init, self.digests())?;
        let output = self.out("initramfs.cpio");
        self.steps.run("initramfs", inputs, std::slice::from_ref(&output), || {
            let archive = plan.initramfs.archive()?;
            fs::write(&output, archive).at("write", &output)
        })
    }

    fn system(&self, plan: &Plan, os_release: &str) -> Result<Verity> {
        let inputs = self.of_the_system(plan)?.text("os-release", os_release);
        let output = self.out("system.img");
        self.steps.run("system", inputs, std::slice::from_ref(&output), || {
            let mut tree = plan.root.clone();
            tree.text("etc/os-release", os_release);
            system::make(self.payload, &tree, os_release, &self.out("scratch"), &output)
        })
    }

    /// The name of the archive that comes before the initramfs in the kernel image. A development
    /// image has none: it starts in virtual machines, which have the microcode of their host.
    fn microcode(&self) -> Result<Option<&'static str>> {
        if self.config.kind == Kind::Development {
            return Ok(None);
        }
        let name = "microcode.cpio";
        let recipe = [include_str!("microcode.rs"), include_str!("cpio.rs")];
        let inputs = Inputs::recipe(&recipe).text("payload.lock", &self.packages);
        let output = self.out(name);
        self.steps.run("microcode", inputs, std::slice::from_ref(&output), || {
            fs::write(&output, microcode::archive(self.payload)?).at("write", &output)
        })?;
        Ok(Some(name))
    }

    fn uki(&self, cmdline: &str, os_release: &str, microcode: Option<&Path>) -> Result<()> {
        let (kernel, initramfs) = (self.out("vmlinuz"), self.out("initramfs.cpio"));
        let inputs = Inputs::recipe(&[RECIPE, include_str!("uki.rs")])
            .text("payload.lock", &self.packages)
            .text("command line", cmdline)
            .text("os-release", os_release)
            .file("initramfs", &initramfs, self.digests())?
            .file("kernel", &kernel, self.digests())?;
        let inputs = match microcode {
            None => inputs,
            Some(archive) => inputs.file("microcode", archive, self.digests())?,
        };
        let output = self.out("polis.efi");
        self.steps.run("uki", inputs, std::slice::from_ref(&output), || {
            let read = |path: &Path| fs::read(path).at("read", path);
            // The kernel looks for microcode before it can unpack anything.
            let mut initrd = microcode.map(read).transpose()?.unwrap_or_default();
            initrd.append(&mut read(&initramfs)?);
            let sections = [
                Section::new(".osrel", for_loader(os_release)),
                Section::new(".cmdline", cmdline),
                Section::new(".uname", self.release.as_str()),
                Section::new(".pkgs", self.content.listing()),
                Section::new(".linux", read(&kernel)?),
                Section::new(".initrd", initrd),
            ];
            let stub = read(&self.payload.join(STUB))?;
            let image = uki::build(&stub, &sections)?;
            uki::check_size(image.len() as u64)?;
            fs::write(&output, image).at("write", &output)
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
        let partition = |kind| {
            layout
                .partitions
                .iter()
                .find(|entry| entry.kind == kind)
                .map_or(0, |entry| entry.length)
        };
        Ok(Sizes {
            kernel: size(&manifest.kernel)?,
            initramfs: size(&manifest.initramfs)?,
            microcode: manifest.microcode.as_deref().map_or(Ok(0), size)?,
            uki: size(&manifest.uki)?,
            erofs,
            verity: system - erofs,
            esp_partition: partition(layout::ESP),
            system_partition: partition(layout::SYSTEM_A),
        })
    }

    /// The disk image; returns its hash.
    fn image(&self, manifest: &Manifest) -> Result<String> {
        let recipe = [
            include_str!("disk.rs"),
            polis_layout::SOURCES,
            include_str!("manifest.rs"),
            include_str!("boot_files.rs"),
            include_str!("uki.rs"),
            polis_bundle::MEASURE_RECIPE,
            include_str!("signing/authenticode.rs"),
            include_str!("signing/policy.rs"),
            include_str!("signing/signed_data.rs"),
        ];
        let signer = self.config.signer.as_ref();
        let parameters = self.config.parameters.as_deref().map(hash).unwrap_or_default();
        let inputs = Inputs::recipe(&recipe)
            .text("the parameters", &parameters)
            .text("the keys", &signer.map(|signer| signer.fingerprint()).unwrap_or_default())
            .text("the reserved files", &esp::reserved())
            .text("the size", &self.config.size.to_string())
            .text("the system", &manifest.verity.root_hash)
            .text("the version", &manifest.version)
            .file("the loader", &self.out("loader.efi"), self.digests())?
            .file("the unified kernel image", &self.out("polis.efi"), self.digests())?;
        let out = self.out("polis.img");
        let outputs = std::slice::from_ref(&out);
        self.steps.run("image", inputs.clone(), outputs, || {
            let options = Options {
                parameters: self.config.parameters.clone(),
                signer: signer.cloned(),
                size: self.config.size,
                ..Options::new(&out)
            };
            manifest::assemble(manifest, &options)
        })?;
        self.steps.run("sha256", inputs, outputs, || self.digests().of(&out))
    }
}

/// A step's panic becomes its caller's.
fn join<T>(thread: thread::ScopedJoinHandle<'_, T>) -> T {
    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// The date of the image, in seconds since 1970: when Debian built its kernel, which is its
/// package that changes most often. The image is younger than that on every build host, so
/// the date says nothing of the host and costs no reproducibility.
fn build_date(payload: &Path, release: &str) -> Result<u64> {
    let kernel = payload.join(format!("boot/vmlinuz-{release}"));
    let metadata = fs::metadata(&kernel).at("read", &kernel)?;
    Ok(u64::try_from(metadata.mtime()).unwrap_or_default())
}

fn os_release(config: &Config, image_version: &str, date: u64) -> Result<String> {
    let Config { version, kind, source, go, .. } = config;
    let variant = match source.variant {
        Variant::Base => String::new(),
        full @ Variant::Full => {
            let kubernetes = golang::kubernetes(go)?;
            format!("{}{full}\n{}{kubernetes}\n", manifest::VARIANT, manifest::KUBERNETES)
        }
    };
    Ok(format!(
        "ID=polis\nNAME=\"Polis\"\nPRETTY_NAME=\"Polis {version}\"\nVERSION_ID={version}\n\
         VARIANT_ID={kind}\n{variant}IMAGE_ID=polis\nIMAGE_VERSION={image_version}\n\
         BUILD_DATE={date}\n"
    ))
}

/// The `os-release` of a unified kernel image, by which systemd-boot starts the newest. It
/// would take `IMAGE_VERSION` for the version, and it reads what follows a `-` as newer, where
/// versions of Polis have a release that is still to come.
fn for_loader(os_release: &str) -> String {
    let line = |line: &str| match line.split_once('=') {
        Some(("IMAGE_VERSION", image)) => format!("POLIS_IMAGE={image}\n"),
        Some((key @ "VERSION_ID", version)) => format!("{key}={}\n", version.replace('-', "~")),
        _ => format!("{line}\n"),
    };
    os_release.lines().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_loader_orders_by_version_and_a_candidate_comes_before_its_release() {
        let text = "ID=polis\nVERSION_ID=1.0.0-rc.1\nIMAGE_ID=polis\nIMAGE_VERSION=ab\n";
        let expected = "ID=polis\nVERSION_ID=1.0.0~rc.1\nIMAGE_ID=polis\nPOLIS_IMAGE=ab\n";
        assert_eq!(for_loader(text), expected);
    }

    #[test]
    fn the_os_release_of_a_full_image_names_its_kubernetes_and_that_of_a_base_image_does_not() {
        let folder = tempfile::tempdir().unwrap();
        let place = |name: &str| folder.path().join(name);
        let mut config = Config {
            kind: Kind::Development,
            source: Source::new(place("payload.lock"), place("cache")),
            go: golang::Folders { modules: place("modules"), out: place("go") },
            init: place("init"),
            node: place("node"),
            system_images: place("images"),
            version: "1.2.3".to_owned(),
            out: place("out"),
            parameters: None,
            signer: None,
            size: manifest::SIZE_DEFAULT,
        };
        // It does not read the modules, which a host that builds base images may not have.
        let base = os_release(&config, "00ff", 7).unwrap();
        let expected = "VARIANT_ID=development\nIMAGE_ID=polis\nIMAGE_VERSION=00ff\nBUILD_DATE=7\n";
        assert!(base.ends_with(expected), "{base}");
        config.source.variant = Variant::Full;
        assert!(os_release(&config, "00ff", 7).is_err());
        let module = place("modules/kube");
        fs::create_dir_all(&module).unwrap();
        fs::write(module.join("go.mod"), "require k8s.io/kubernetes v1.37.2\n").unwrap();
        let full = os_release(&config, "00ff", 7).unwrap();
        let lines = "POLIS_VARIANT=full\nPOLIS_KUBERNETES=1.37.2\n";
        assert_eq!(full.replacen(lines, "", 1), base);
        assert!(full.contains(lines), "{full}");
        assert!(for_loader(&full).contains(lines));
    }

    #[test]
    fn a_lock_without_a_kernel_is_refused() {
        assert!(release(&Lock { packages: Vec::new() }).is_err());
    }
}
