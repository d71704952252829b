//! `cargo xtask image`: builds the disk image, or inspects one.

mod checks;
mod go;
mod images;
mod options;
mod programs;
mod report;

use std::{path::PathBuf, sync::Arc, time::Instant};

use anyhow::Result;
use clap::Subcommand;
use polis_image::{
    Config, Format, Kind, Options,
    signing::{ImageSigner, Passphrase, ReleaseKey},
};

use self::checks::{can_be_made, check_parameters, read};
pub(crate) use self::go::{KUBECTL, go_program, go_programs, kubectl, suite, workload_programs};
use self::images::{assembled, build, config, prepare, programs_of};
pub(crate) use self::images::{
    built, built_from, built_next, built_quick_product, folder, folder_next, folder_quick_product,
    verify,
};
pub(crate) use self::options::Packages;
use self::options::{Build, FileFormat, Programs};
use self::programs::{POLISCTL, cargo_build};
pub(crate) use self::programs::{build_programs, cargo, curator_load, polisctl, workspace};
use self::report::{print, report};
use crate::{host, keys};

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
        Some(Sub::Programs { names, packages }) => go::build_go(&names, &packages),
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
    // Until the end: another build would replace the parts while they are read here.
    let (manifest, _guard) = match &arguments.parameters {
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

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Cli {
        #[command(flatten)]
        args: Args,
    }

    /// The build that these options ask for, or the error of the parser.
    pub(super) fn parsed(options: &[&str]) -> Result<Build, clap::Error> {
        Cli::try_parse_from([&["image"], options].concat()).map(|cli| cli.args.build)
    }
}
