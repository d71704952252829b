//! `cargo xtask image`: builds the disk image, or inspects one.

mod programs;
mod report;

use std::{
    collections::BTreeMap,
    env, fs,
    path::{Path, PathBuf},
    process::Command,
    sync::{Arc, atomic::Ordering},
    time::Instant,
};

use anyhow::{Context as _, Result, anyhow};
use clap::{Subcommand, ValueEnum, builder::NonEmptyStringValueParser};
use polis_image::{
    Config, Format, Kind, Manifest, Options, Source, Variant, golang,
    signing::{ImageSigner, Passphrase, ReleaseKey},
};
use semver::Version;

use self::programs::{
    POLISCTL, POLISCTL_BUILT, PROGRAMS, SYSTEM_IMAGES, build_without_faults, cargo_build, programs,
};
pub(crate) use self::programs::{build_programs, cargo, curator_load, polisctl, workspace};
use self::report::{print, report};
use crate::keys::{self, PassphraseFrom};
use crate::{host, progress::Terminal};

/// Arguments of `cargo xtask image`.
#[derive(Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Option<Sub>,
    #[command(flatten)]
    build: Build,
}

#[derive(Debug, Subcommand)]
enum Sub {
    /// Print partitions, sections, versions and packages of an image file.
    Inspect {
        /// The image: raw or qcow2.
        file: PathBuf,
    },
    /// Build twice from the same inputs and compare every byte.
    Verify {
        /// The programs of the images.
        #[arg(long, value_enum, default_value_t = Programs::Base)]
        variant: Programs,
    },
    /// Build programs of the full image, without an image: those that are built from Go
    /// modules, in target/go/bin.
    Programs {
        /// Folders of image/go [default: all that an image has].
        names: Vec<String>,
        #[command(flatten)]
        packages: Packages,
    },
}

/// The programs of an image.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
enum Programs {
    /// The packages that every node needs, without workloads: quick to build.
    Base,
    /// The same, with containerd and Kubernetes.
    #[default]
    Full,
}

impl From<Programs> for Variant {
    fn from(programs: Programs) -> Self {
        match programs {
            Programs::Base => Self::Base,
            Programs::Full => Self::Full,
        }
    }
}

#[derive(Debug, clap::Args)]
#[command(mut_arg("passphrase_file", |argument| argument.requires("keys")))]
struct Build {
    /// The programs of the image.
    #[arg(long, value_enum, default_value_t)]
    variant: Programs,
    /// Write the image here as well.
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Format of the file.
    #[arg(long, value_enum, default_value_t)]
    format: FileFormat,
    /// Sign with the keys of this folder, which `cargo xtask keys create` makes.
    #[arg(long, value_name = "DIR")]
    keys: Option<PathBuf>,
    #[command(flatten)]
    passphrase: PassphraseFrom,
    /// Write an update bundle as well, signed with the release key of --keys [default: of keys
    /// for trying, made in target/keys].
    #[arg(long, value_name = "FILE")]
    bundle: Option<PathBuf>,
    /// The version that the image has [default: that of the sources].
    #[arg(long, value_name = "V", value_parser = version)]
    version: Option<Version>,
    /// Put this parameters file on the ESP.
    #[arg(long, value_name = "FILE")]
    parameters: Option<PathBuf>,
    /// Size of the disk in bytes.
    #[arg(long, value_name = "BYTES", default_value_t = polis_image::SIZE_DEFAULT)]
    size: u64,
    #[command(flatten)]
    packages: Packages,
    /// Lock the packages that are current now, then build.
    #[arg(long)]
    update_payload: bool,
}

/// The source of Debian's packages, for every command that builds an image.
#[derive(Clone, Debug, Default, clap::Args)]
pub(crate) struct Packages {
    /// Take Debian's packages from this mirror instead of the host's.
    #[arg(long, value_name = "URL", value_parser = NonEmptyStringValueParser::new())]
    mirror: Option<String>,
    /// Refuse packages that are not of the lock file; without this option, the build uses
    /// the current versions and lists them.
    #[arg(long)]
    locked: bool,
    /// Try this archive of old versions first for packages that the mirror no longer has
    /// [default: POLIS_SNAPSHOT].
    #[arg(long, value_name = "URL", value_parser = NonEmptyStringValueParser::new())]
    snapshot: Option<String>,
}

#[derive(Clone, Copy, Debug, Default, ValueEnum)]
enum FileFormat {
    #[default]
    Raw,
    Qcow2,
}

/// Reads the version of an image.
fn version(text: &str) -> Result<Version, String> {
    let version = Version::parse(text).map_err(|error| {
        format!("{error}; allowed is a semantic version, as 1.2.3 or 1.2.3-rc.1")
    })?;
    polis_image::check_version(&version)?;
    Ok(version)
}

/// Runs the command.
pub(crate) fn run(args: Args) -> Result<()> {
    match args.command {
        None => build_and_report(&args.build),
        Some(Sub::Inspect { file }) => {
            if polis_image::is_qcow2(&file)? {
                host::require(&[host::QEMU_IMG])?;
            }
            print(&polis_image::inspect(&file)?);
            Ok(())
        }
        Some(Sub::Verify { variant }) => verify(Kind::Product, variant.into()),
        Some(Sub::Programs { names, packages }) => build_go(&names, &packages),
    }
}

fn build_and_report(arguments: &Build) -> Result<()> {
    let start = Instant::now();
    can_be_made(arguments)?;
    let mut config = config(Kind::Product, arguments.variant.into(), &arguments.packages);
    config.size = arguments.size;
    config.parameters = arguments.parameters.as_deref().map(read).transpose()?;
    if let Some(version) = &arguments.version {
        config.version = version.to_string();
    }
    // Before the build, so that the passphrase is not requested at its end.
    let mut release = None;
    if let Some((folder, passphrase)) = signing_keys(arguments)? {
        config.signer = Some(Arc::new(ImageSigner::open(&folder, &passphrase)?));
        let open = || ReleaseKey::open(&folder, &passphrase);
        release = arguments.bundle.as_ref().map(|_file| open()).transpose()?;
    }
    let format: &[_] = match arguments.format {
        FileFormat::Raw => &[],
        FileFormat::Qcow2 => host::QEMU_IMG,
    };
    host::require(&[format, host::PAYLOAD, host::BUILD])?;
    if arguments.update_payload {
        let lock = config.source.update()?;
        println!("locked {} packages in {}", lock.packages.len(), config.source.lock.display());
    }
    let manifest = match &arguments.parameters {
        None => build(&config, &[])?,
        Some(path) => {
            // Parameters for an image are checked by the node's parser.
            prepare(&config)?;
            cargo_build(Kind::Product, &[&programs_of(&config)[..], &[POLISCTL]].concat())?;
            check_parameters(path)?;
            assembled(&config)?
        }
    };
    if let (Some(out), Some(signer), Some(release)) = (&arguments.bundle, &config.signer, &release)
    {
        polis_image::bundle(&manifest, signer, release, out)?;
    }
    let built = manifest.path(&manifest.image);
    let file = match (arguments.format, &arguments.out) {
        (FileFormat::Raw, None) => built,
        (format, out) => {
            let (format, extension) = match format {
                FileFormat::Raw => (Format::Raw, "img"),
                FileFormat::Qcow2 => (Format::Qcow2, "qcow2"),
            };
            let out = out.clone().unwrap_or_else(|| built.with_extension(extension));
            let Config { size, parameters, signer, .. } = config;
            let options = Options { format, size, parameters, signer, out };
            polis_image::assemble(&manifest, &options)?;
            options.out
        }
    };
    let sha256 = match file == manifest.path(&manifest.image) {
        true => manifest.sha256.clone(),
        false => polis_image::sha256(&file)?,
    };
    report(&manifest, &file, &sha256);
    if let Some(bundle) = &arguments.bundle {
        println!("bundle {}", bundle.display());
        println!("sha256 {}", polis_image::sha256(bundle)?);
    }
    println!("total {:.2} s", start.elapsed().as_secs_f64());
    Ok(())
}

/// Checks what would end a build, which takes minutes or half an hour, before it begins.
fn can_be_made(arguments: &Build) -> Result<()> {
    polis_image::layout::plan("", 0, arguments.size).map_err(polis_image::Error::from)?;
    can_be_as_large(&workspace().join("target"), arguments.size)?;
    are_different(arguments)?;
    for file in [&arguments.out, &arguments.bundle].into_iter().flatten() {
        can_be_written(file)?;
    }
    match &arguments.out {
        Some(out) => can_be_as_large(folder_of(out), arguments.size),
        None => Ok(()),
    }
}

/// The folder of the keys that sign, and their passphrase.
fn signing_keys(arguments: &Build) -> Result<Option<(PathBuf, Passphrase)>> {
    if let Some(folder) = &arguments.keys {
        // A folder without keys is refused before its passphrase is asked for.
        ImageSigner::check(folder)?;
        let prompt = format!("Passphrase of {}: ", folder.display());
        return Ok(Some((folder.clone(), arguments.passphrase.read(&prompt)?)));
    }
    if arguments.bundle.is_none() {
        return Ok(None);
    }
    let folder = workspace().join("target/keys");
    println!(
        "signing with keys for trying, of {}; for machines that matter, make keys with \
         `cargo xtask keys create DIR` and name them with --keys",
        folder.display()
    );
    let passphrase = keys::for_trying(&folder)?;
    Ok(Some((folder, passphrase)))
}

/// Reads a file, and no device or pipe: one may have no end, and `polisctl` reads it again.
fn read(path: &Path) -> Result<Vec<u8>> {
    let cannot = || format!("cannot read {}", path.display());
    let metadata = fs::metadata(path).with_context(cannot)?;
    if !metadata.is_file() && !metadata.is_dir() {
        return Err(anyhow!("it is not a file"))
            .with_context(cannot)
            .context(host::Help("name a file".to_owned()));
    }
    fs::read(path).with_context(cannot)
}

/// Checks that no two options name one file, which one of them would replace.
fn are_different(arguments: &Build) -> Result<()> {
    let mut options = BTreeMap::new();
    for (option, file) in [
        ("--parameters", &arguments.parameters),
        ("--out", &arguments.out),
        ("--bundle", &arguments.bundle),
    ] {
        let Some(file) = file else { continue };
        let place = std::path::absolute(file).context("cannot read the current folder")?;
        if let Some(other) = options.insert(place, option) {
            let text = format!("{other} and {option} both name {}", file.display());
            return Err(host::Usage(text).into());
        }
    }
    Ok(())
}

/// Checks that a file can be written at `path`: not a device, whose place the file would take.
fn can_be_written(path: &Path) -> Result<()> {
    let cannot = || format!("cannot write {}", path.display());
    let is_folder = path.as_os_str().as_encoded_bytes().ends_with(b"/");
    if is_folder || path.exists() && !path.is_file() {
        return Err(anyhow!("it is not a file")).with_context(cannot).context(host::Help(
            "name a file; an image is copied from there to a device: dd if=FILE of=DEVICE bs=4M"
                .to_owned(),
        ));
    }
    tempfile::tempfile_in(folder_of(path)).map(drop).with_context(cannot)
}

fn folder_of(path: &Path) -> &Path {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    folder.unwrap_or(Path::new("."))
}

/// Checks that a file of `size` bytes, which stores no zeros, can be in `folder`.
fn can_be_as_large(folder: &Path, size: u64) -> Result<()> {
    let cannot = || format!("cannot make a disk of {size} bytes in {}", folder.display());
    let made = fs::create_dir_all(folder).and_then(|()| tempfile::tempfile_in(folder));
    made.with_context(cannot)?
        .set_len(size)
        .with_context(cannot)
        .context(host::Help("use a smaller size; every disk may be enlarged later".to_owned()))
}

/// Checks a parameters file as a node does, so that an error is reported here and not by the
/// first boot of a machine.
fn check_parameters(path: &Path) -> Result<()> {
    // The node's parser, without a dependency on the node's crate.
    let checked = Command::new(programs(Kind::Product).join(POLISCTL))
        .args(["parameters", "check"])
        .arg(path)
        .output()
        .context("cannot start polisctl")?;
    if !checked.status.success() {
        return Err(of_polisctl(&String::from_utf8_lossy(&checked.stderr)));
    }
    Ok(())
}

/// The error that `polisctl` has printed, with its next step as that of this command.
fn of_polisctl(printed: &str) -> anyhow::Error {
    let text = printed.trim().trim_start_matches("error: ");
    match text.split_once("\nhelp: ") {
        None => anyhow!(text.to_owned()),
        Some((text, help)) => anyhow!(text.to_owned()).context(host::Help(help.to_owned())),
    }
}

/// The base image of these sources, for the commands that boot it.
pub(crate) fn built(kind: Kind) -> Result<Manifest> {
    built_from(kind, Variant::Base, &Packages::default())
}

/// Builds programs from Go modules, and prints where they are.
fn build_go(names: &[String], packages: &Packages) -> Result<()> {
    let config = config(Kind::Product, Variant::Full, packages);
    host::require(&[host::PAYLOAD, host::BUILD])?;
    let programs = golang::programs(&config.source, &config.go, names, &Terminal::default())?;
    for program in programs {
        let bytes = fs::metadata(&program).map_or(0, |metadata| metadata.len());
        println!("{bytes:>12}  {}", program.display());
    }
    Ok(())
}

/// Builds `kubectl`, which no image contains, and links it as [`KUBECTL`].
pub(crate) fn kubectl(packages: &Packages) -> Result<()> {
    let config = config(Kind::Development, Variant::Full, packages);
    host::require(&[host::PAYLOAD, host::BUILD])?;
    let names = ["kubectl".to_owned()];
    golang::programs(&config.source, &config.go, &names, &Terminal::default())?;
    link(&workspace().join(KUBECTL), Path::new("../go/bin/kubectl"))
}

/// Builds what `conformance` needs and no image of its own has to be made for: the programs
/// of Kubernetes, its suite, and the payload with etcd.
pub(crate) fn suite() -> Result<()> {
    go_programs(&["kube", "kubectl", "e2e"])
}

/// Builds programs from Go modules that no image has to be made for, and the payload.
pub(crate) fn go_programs(names: &[&str]) -> Result<()> {
    let config = config(Kind::Development, Variant::Full, &Packages::default());
    host::require(&[host::PAYLOAD, host::BUILD])?;
    let names: Vec<_> = names.iter().map(|name| (*name).to_owned()).collect();
    golang::programs(&config.source, &config.go, &names, &Terminal::default())?;
    link_payload(&config.source.root()?)?;
    Ok(())
}

/// Kubernetes' client, for people.
pub(crate) const KUBECTL: &str = "target/kubernetes/kubectl";

/// Where a program that is built from a Go module is.
pub(crate) fn go_program(name: &str) -> PathBuf {
    workspace().join("target/go/bin").join(name)
}

/// An image of these sources, from these packages.
pub(crate) fn built_from(kind: Kind, variant: Variant, packages: &Packages) -> Result<Manifest> {
    build_usual(&config(kind, variant, packages))
}

/// The image that is a version newer than the development image and otherwise the same, for the
/// stories of updates.
pub(crate) fn built_next(variant: Variant) -> Result<Manifest> {
    let mut config = config(Kind::Development, variant, &Packages::default());
    let version = Version::parse(&config.version).context("the version of the sources")?;
    config.version = Version::new(version.major, version.minor + 1, 0).to_string();
    config.out = folder_next(variant);
    build(&config, &[])
}

/// The folder of [`built_next`].
pub(crate) fn folder_next(variant: Variant) -> PathBuf {
    folder(Kind::Development, variant).with_extension("next")
}

/// The product image with a `node` as quick to build as that of the development image, for
/// the story of what the product leaves out.
pub(crate) fn built_quick_product() -> Result<Manifest> {
    let config = Config {
        node: programs(Kind::Development).join("node"),
        out: folder_quick_product(),
        ..config(Kind::Product, Variant::Base, &Packages::default())
    };
    prepare(&config)?;
    cargo_build(Kind::Product, &["init"])?;
    build_without_faults("node")?;
    assembled(&config)
}

/// The folder of [`built_quick_product`].
pub(crate) fn folder_quick_product() -> PathBuf {
    folder(Kind::Product, Variant::Base).with_extension("quick")
}

/// Builds an image; with the development image also [`polisctl`], so that no later step
/// waits for it.
fn build_usual(config: &Config) -> Result<Manifest> {
    match config.kind {
        Kind::Product | Kind::Measurement => build(config, &[]),
        Kind::Development => {
            let manifest = build(config, &[POLISCTL])?;
            POLISCTL_BUILT.store(true, Ordering::Relaxed);
            Ok(manifest)
        }
    }
}

/// The folder of an image and of its parts.
pub(crate) fn folder(kind: Kind, variant: Variant) -> PathBuf {
    let kind = match kind {
        Kind::Product => "image",
        Kind::Development => "image-development",
        Kind::Measurement => "image-measurement",
    };
    let variant = match variant {
        Variant::Base => "",
        Variant::Full => "-full",
    };
    workspace().join("target").join(format!("{kind}{variant}"))
}

/// Makes sure that the host has what a build needs. Downloads come before cargo: a host
/// without a way to them fails at once.
fn prepare(config: &Config) -> Result<()> {
    host::require(&[host::PAYLOAD, host::BUILD])?;
    if config.source.variant == Variant::Full {
        golang::fetch(&config.source, &config.go, &Terminal::default())?;
    }
    Ok(())
}

/// The image, and beside it the programs that it does not contain.
fn build(config: &Config, beside: &[&str]) -> Result<Manifest> {
    prepare(config)?;
    cargo_build(config.kind, &[&programs_of(config)[..], beside].concat())?;
    assembled(config)
}

/// The parts of this workspace in an image.
fn programs_of(config: &Config) -> Vec<&'static str> {
    match config.source.variant {
        Variant::Base => PROGRAMS.to_vec(),
        Variant::Full => [PROGRAMS, SYSTEM_IMAGES].concat(),
    }
}

/// The image, of programs that cargo has built.
fn assembled(config: &Config) -> Result<Manifest> {
    let manifest = polis_image::build(config, &Terminal::default())?;
    link_payload(&config.source.root()?)?;
    Ok(manifest)
}

fn config(kind: Kind, variant: Variant, packages: &Packages) -> Config {
    let workspace = workspace();
    let cache = match env::var_os("POLIS_CACHE") {
        Some(folder) => PathBuf::from(folder),
        None => workspace.join("target/payload"),
    };
    let mut source = Source::new(workspace.join("image/payload.lock"), cache);
    let Packages { mirror, locked, snapshot } = packages.clone();
    let named = env::var("POLIS_SNAPSHOT").ok().filter(|url| !url.is_empty());
    source.variant = variant;
    source.mirror = mirror;
    source.locked = locked;
    source.snapshot = snapshot.or(named);
    Config {
        kind,
        source,
        go: golang::Folders {
            modules: workspace.join("image/go"),
            out: workspace.join("target/go"),
        },
        system_images: programs(kind),
        init: programs(kind).join("init"),
        node: programs(kind).join("node"),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        out: folder(kind, variant),
        parameters: None,
        signer: None,
        size: polis_image::SIZE_DEFAULT,
    }
}

/// Makes or renews a symbolic link. In one step, since two builds may end at the same moment.
fn link(link: &Path, target: &Path) -> Result<()> {
    if fs::read_link(link).is_ok_and(|present| present == target) {
        return Ok(());
    }
    let cannot = || format!("cannot make {}", link.display());
    let folder = link.parent().with_context(cannot)?;
    fs::create_dir_all(folder).with_context(cannot)?;
    let new = tempfile::Builder::new()
        .prefix(".link")
        .make_in(folder, |path| std::os::unix::fs::symlink(target, path))
        .with_context(cannot)?;
    new.into_temp_path().persist(link).with_context(cannot)?;
    Ok(())
}

/// Links the unpacked payload at a fixed place.
fn link_payload(root: &Path) -> Result<PathBuf> {
    let place = workspace().join("target/payload/root");
    link(&place, root)?;
    Ok(place)
}

/// Builds an image twice, and fails where the results differ.
pub(crate) fn verify(kind: Kind, variant: Variant) -> Result<()> {
    let config = config(kind, variant, &Packages::default());
    let manifest = build_usual(&config)?;
    let folder = config.out.join("verify");
    let digests =
        polis_image::verify_reproducible(&manifest, &config, &folder, &Terminal::default())?;
    for (name, digest) in digests {
        println!("{digest}  {name}");
    }
    println!("two builds of the same inputs are equal");
    Ok(())
}

#[cfg(test)]
mod tests {
    use clap::{Parser, error::ErrorKind};

    use super::*;

    #[derive(Debug, Parser)]
    struct Cli {
        #[command(flatten)]
        args: Args,
    }

    /// The build that these options ask for, or the error of the parser.
    fn parsed(options: &[&str]) -> Result<Build, clap::Error> {
        Cli::try_parse_from([&["image"], options].concat()).map(|cli| cli.args.build)
    }

    #[test]
    fn the_next_step_of_polisctl_is_that_of_this_command() {
        let printed = "error: p: invalid parameters\ncause: it is short\nhelp: write it again\n";
        let error = of_polisctl(printed);
        assert_eq!(error.downcast_ref::<host::Help>().unwrap().0, "write it again");
        assert_eq!(error.root_cause().to_string(), "p: invalid parameters\ncause: it is short");
        assert_eq!(of_polisctl("error: x\n").to_string(), "x");
    }

    #[test]
    fn what_would_end_a_build_is_found_before_it_begins() {
        let folder = tempfile::tempdir().unwrap();
        let [file, absent] = ["image", "no/image"].map(|name| folder.path().join(name));
        can_be_written(&file).unwrap();
        fs::write(&file, "").unwrap();
        can_be_written(&file).unwrap();
        let refused = |path: &Path| format!("{:#}", can_be_written(path).unwrap_err());
        assert!(refused(&absent).contains("cannot write"), "{}", refused(&absent));
        let new = folder.path().join("new/");
        for other in [folder.path(), &*new, Path::new("/dev/null")] {
            assert!(refused(other).contains("it is not a file"), "{}", refused(other));
        }
        let absent = absent.display().to_string();
        for (options, said) in [
            (["--size", "1"], "not a multiple of 512"),
            (["--size", "18446744073709551104"], "cannot make a disk of 18446744073709551104"),
            (["--keys", &absent], "cannot read"),
            (["--parameters", "/dev/zero"], "it is not a file"),
            (["--out", &absent], "cannot write"),
            (["--bundle", &absent], "cannot write"),
            (["--parameters", &absent], "cannot read"),
        ] {
            let error = build_and_report(&parsed(&options).unwrap()).unwrap_err();
            assert!(format!("{error:#}").contains(said), "{options:?}: {error:#}");
        }
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn two_options_that_name_one_file_are_wrong_usage() {
        let here = std::path::absolute("file").unwrap().display().to_string();
        for options in [
            &["--out", "file", "--bundle", &here][..],
            &["--out", "./file", "--parameters", "file"],
            &["--bundle", "file", "--parameters", "file", "--out", "other"],
        ] {
            let error = build_and_report(&parsed(options).unwrap()).unwrap_err();
            assert!(error.is::<host::Usage>(), "{options:?}: {error}");
            assert!(error.to_string().contains(" both name "), "{options:?}: {error}");
        }
        are_different(&parsed(&["--out", "file", "--bundle", "file.bundle"]).unwrap()).unwrap();
    }

    #[test]
    fn a_bundle_may_name_keys_and_a_version() {
        let alone = parsed(&["--bundle", "file"]).unwrap();
        assert!(alone.bundle.is_some() && alone.keys.is_none());
        parsed(&["--bundle", "file", "--keys", "keys", "--version", "2.0.0"]).unwrap();
    }

    #[test]
    fn a_url_that_is_empty_is_wrong_usage() {
        for option in ["--mirror", "--snapshot"] {
            let error = parsed(&[option, ""]).unwrap_err();
            assert_eq!(error.exit_code(), 2);
            assert!(error.to_string().contains(option), "{error}");
        }
    }

    #[test]
    fn a_passphrase_without_keys_is_wrong_usage_and_the_error_names_them() {
        let error = parsed(&["--passphrase-file", "file"]).unwrap_err();
        assert_eq!((error.exit_code(), error.kind()), (2, ErrorKind::MissingRequiredArgument));
        assert!(error.to_string().contains("--keys <DIR>"), "{error}");
        parsed(&["--passphrase-file", "file", "--keys", "keys"]).unwrap();
    }

    #[test]
    fn a_version_alone_is_that_of_the_image_and_a_bad_one_is_wrong_usage() {
        let version = parsed(&["--version", "1.2.3-rc.1"]).unwrap().version.unwrap();
        assert_eq!(version.to_string(), "1.2.3-rc.1");
        let long = format!("1.2.3-{}", "a".repeat(64));
        for (bad, reason) in [
            ("1.2.3+4", "has a `+`"),
            // A bundle with it would be refused at the end of the build.
            ("1.2.3-rc1", "as in 1.2.0-rc.9"),
            (&*long, "longer than 64"),
            ("1.2", "semantic version"),
            ("", "semantic"),
        ] {
            let error = parsed(&["--version", bad]).unwrap_err();
            assert_eq!(error.exit_code(), 2);
            assert!(error.to_string().contains(reason), "{error}");
        }
    }

    #[test]
    fn every_image_has_a_folder_of_its_own() {
        let kinds = [Kind::Product, Kind::Development, Kind::Measurement];
        let both = |kind| [Variant::Base, Variant::Full].map(|variant| folder(kind, variant));
        let folders: std::collections::BTreeSet<_> = kinds.into_iter().flat_map(both).collect();
        assert_eq!(folders.len(), 6);
    }

    #[test]
    fn a_build_gets_the_source_of_its_packages() {
        let packages = Packages {
            mirror: Some("http://m.example/debian".to_owned()),
            locked: true,
            snapshot: Some("http://old.example/debian".to_owned()),
        };
        let source = config(Kind::Development, Variant::Base, &packages).source;
        assert!(source.locked);
        assert_eq!((source.mirror, source.snapshot), (packages.mirror, packages.snapshot));
    }
}
