//! `cargo xtask run`: boots the development image in QEMU as a new cluster.
//!
//! One node by default (`single`), or `several` (`--nodes`). In a terminal, the node's console
//! appears in it and the serial line goes to `serial.log`; without one, or with
//! `--headless` or `--until-ready`, the serial line is printed instead.
//!
//! All files of a machine are in `target/run/<name>/`: disk, firmware variables,
//! parameters, the owner's key, logs, and a `polisctl` for its cluster. The command holds
//! the lock of the name for its whole life.

mod kept;
mod machines;
mod options;
pub(crate) mod several;
mod single;

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result};
use polis_image::{Kind, Variant};
use polis_qemu::Image;
use polis_qemu::machine::Outcome;

pub(crate) use self::machines::{machine, named_founding};
use self::machines::{shape, signed};
use self::options::Accel;
pub(crate) use self::options::{Args, name};
use crate::lock::Lock;
use crate::{host, image};

/// Requirements of running a machine: `setpriv` ends QEMU with this process.
pub(crate) const QEMU: &[host::Need] = &[
    host::Need { what: polis_qemu::host::QEMU, package: "qemu-system-x86" },
    host::Need { what: "setpriv", package: "util-linux" },
];

/// How long a guest may take to stop before its power is cut.
const STOP_MAX: Duration = Duration::from_secs(45);

/// How much longer a worker may take, which moves its pods away first.
const DRAIN_MAX: Duration = Duration::from_secs(60);

/// Logged when the driver of the power button is loaded; an earlier press is lost.
pub(crate) const POWER_BUTTON: &str = r#"listening to the power key of "Power Button""#;

/// Runs the command.
pub(crate) fn run(args: Args) -> Result<()> {
    let asked_for_kvm = args.accel == Accel::Kvm;
    let outcome = boot(args);
    // The message of QEMU on a host without KVM names only a register of the processor.
    let refused = |error: &anyhow::Error| {
        matches!(error.downcast_ref(), Some(polis_qemu::Error::Refused { .. }))
    };
    match outcome {
        Err(error) if asked_for_kvm && refused(&error) => Err(error.context(host::Help(
            "omit --accel: KVM is used where it works, and it does not seem to work here"
                .to_owned(),
        ))),
        other => other,
    }
}

fn boot(args: Args) -> Result<()> {
    if let Some(voters) = args.voters.filter(|voters| *voters > args.nodes) {
        let Args { nodes, .. } = args;
        return Err(host::Usage(format!(
            "--voters {voters} of --nodes {nodes}: a node has one vote; use {voters} nodes or \
             fewer votes"
        ))
        .into());
    }
    let runs = image::workspace().join("target/run");
    let dir = runs.join(&args.name);
    // Locked before anything in the folder is read, built or replaced.
    Lock::take(&runs, &args.name)?.hold_until_exit();
    kept::check(&args, &dir).map_err(host::Usage)?;
    let memory: Vec<_> = (1..=args.nodes).map(|number| shape(&args, number).0).collect();
    host::require_memory(&memory)?;
    let tpm: &[_] = if args.tpm { host::TPM } else { &[] };
    host::require(&[QEMU, tpm, host::PAYLOAD, host::BUILD])?;
    let variant = if args.kubernetes { Variant::Full } else { Variant::Base };
    let image = image_from(Kind::Development, variant, &args.packages)?;
    if args.kubernetes {
        image::kubectl(&args.packages)?;
    }
    let keeps = kept::keeps(&args, &dir);
    let image = if args.secure_boot { signed(image, &dir, keeps)? } else { image };
    if !keeps {
        kept::begin(&args, &dir)?;
    }
    if args.nodes > 1 {
        return several::run(&args, &image);
    }
    single::run(&args, &image, &dir, keeps)
}

/// Makes the folder of a run.
pub(crate) fn make_folder(dir: &Path) -> Result<()> {
    fs::create_dir_all(dir)
        .with_context(|| format!("cannot make {}", dir.display()))
        .context(host::Help("make the folder writable, or choose another with --name".to_owned()))
}

/// A step on the standard error.
pub(crate) fn said(step: &str) {
    eprintln!("run: {step}");
}

/// The base image of these sources, see [`image_from`].
pub(crate) fn built_image(kind: Kind) -> Result<Image> {
    image_from(kind, Variant::Base, &image::Packages::default())
}

/// An image of these sources, built where it is not yet; `POLIS_IMAGE_DIR` names a folder
/// with one that is to be used as it is.
pub(crate) fn image_from(
    kind: Kind,
    variant: Variant,
    packages: &image::Packages,
) -> Result<Image> {
    let folder = match env::var_os("POLIS_IMAGE_DIR") {
        Some(folder) => PathBuf::from(folder),
        None => image::built_from(kind, variant, packages)?.folder,
    };
    Ok(Image::load(&folder)?)
}

/// How long a node of this run may take to stop.
pub(crate) fn stop_max(args: &Args) -> Duration {
    if args.kubernetes { STOP_MAX + DRAIN_MAX } else { STOP_MAX }
}

/// The end of the wait for `what`, with the next step.
pub(crate) fn gave_up(what: &'static str, error: anyhow::Error) -> anyhow::Error {
    use polis_qemu::Error;
    let help = match error.downcast_ref::<Error>() {
        Some(late) if late.is_late() => {
            "the last `POLIS stage` lines say what a node waits for; more time: --timeout"
        }
        Some(Error::Wait { outcome: Outcome::Silent { .. }, .. }) => {
            "the last lines say what the machine did before it crashed; `qemu.log`, beside the \
             log, has what QEMU said"
        }
        _ => "the last lines say why; docs/errors.md explains the code of a guru meditation",
    };
    error.context(what).context(host::Help(help.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, clap::Parser)]
    pub(super) struct Line {
        #[command(flatten)]
        args: Args,
    }

    /// The arguments of a run with these options.
    pub(super) fn with(options: &[&str]) -> Args {
        <Line as clap::Parser>::parse_from([&["run"], options].concat()).args
    }

    #[test]
    fn a_run_whose_name_is_in_use_ends_before_it_touches_anything() {
        let name = format!("test-lock-{}", std::process::id());
        let runs = image::workspace().join("target/run");
        let _held = Lock::take(&runs, &name).unwrap();
        // No host has this much memory: a run that gets past the lock fails here, before it
        // builds an image.
        let memory = ["--nodes", "16", "--memory", "1048576"];
        let words = ["run", "--name", &name].into_iter().chain(memory);
        let args = <Line as clap::Parser>::parse_from(words).args;
        let error = format!("{:#}", run(args).unwrap_err());
        std::fs::remove_file(runs.join(format!("{name}.lock"))).unwrap();
        assert!(error.contains(&format!("process {}", std::process::id())), "{error}");
        assert!(!runs.join(&name).exists());
    }

    #[test]
    fn a_worker_has_a_minute_more_to_stop_in_which_it_moves_its_pods_away() {
        let [plain, worker] = [&[][..], &["--kubernetes"]].map(|options| stop_max(&with(options)));
        assert_eq!((plain, worker - plain), (STOP_MAX, Duration::from_secs(60)));
    }
}
