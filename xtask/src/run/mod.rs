//! `cargo xtask run`: boots the development image in QEMU as a new cluster.
//!
//! One node by default; `several` implements `--nodes`. In a terminal, the node's console
//! appears in it and the serial line goes to `serial.log`; without one, or with
//! `--headless` or `--until-ready`, the serial line is printed instead.
//!
//! All files of a machine are in `target/run/<name>/`: disk, firmware variables,
//! parameters, the owner's key, logs, and a `polisctl` for its cluster. The command holds
//! the lock of the name for its whole life.

mod kept;
pub(crate) mod several;

use std::env;
use std::fs;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, bail};
use polis_image::signing::Keys;
use polis_image::{Kind, Manifest, Options, Variant, assemble};
use polis_qemu::args::{Accelerator, Cache, Disk, FwCfg};
use polis_qemu::fleet::PARAMETERS;
use polis_qemu::host::{Preference, accelerator};
use polis_qemu::image::{Flash, cheap};
use polis_qemu::machine::Outcome;
use polis_qemu::{Bus, Config, Event, Image, Machine};

use crate::kubernetes::{self, Deployment};
use crate::lock::Lock;
use crate::operator::{Operator, shortest};
use crate::{host, image, parameters, terminal};

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

/// Between two looks at a deployment that has not ended.
const ASK: Duration = Duration::from_secs(1);

/// Arguments of `cargo xtask run`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Number of nodes.
    #[arg(long, default_value_t = 1, value_name = "N",
          value_parser = clap::value_parser!(u8).range(1..=16))]
    pub(crate) nodes: u8,
    /// How many of them vote in etcd; the others run no etcd member [default: all, but at
    /// most three].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=7))]
    pub(crate) voters: Option<u8>,
    /// Memory of a node in MiB [default: 1024, of several 512; with Kubernetes 3072 for the
    /// first node, 1536 for each other].
    #[arg(long, value_name = "MiB",
          value_parser = clap::value_parser!(u32).range(256..=1_048_576))]
    memory: Option<u32>,
    /// Processors of a node [default: 2; of several, with Secure Boot or with a TPM 1]. A boot
    /// is faster with two: drivers load in parallel to the steps that wait for them; not so
    /// behind firmware whose processors wait for each other.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64))]
    cpus: Option<u32>,
    /// Start through UEFI firmware, as hardware does (the default).
    #[arg(long, conflicts_with = "direct")]
    uefi: bool,
    /// Let QEMU load the kernel: some seconds faster, without firmware.
    #[arg(long)]
    direct: bool,
    /// Make keys for this run, sign the image, enrol the keys in the firmware and turn Secure
    /// Boot on. The first boot restarts once, behind the enrolment. `--keep` keeps all of it.
    #[arg(long, conflicts_with = "direct")]
    secure_boot: bool,
    /// The accelerator.
    #[arg(long, value_enum, default_value_t = Accel::Auto)]
    accel: Accel,
    /// Keep the disk of the last run with this name, and boot it again. `--kubernetes`,
    /// `--secure-boot` and `--tpm` have to be as in that run.
    #[arg(long)]
    pub(crate) keep: bool,
    /// Give the machine an emulated TPM 2.0; `--keep` keeps it, too. With several processors
    /// (`--cpus`, `--kubernetes`) and without KVM, words for them are on the kernel command line:
    /// register 12 is then not zero, and `polisctl node attest` reports an addition.
    #[arg(long)]
    tpm: bool,
    /// Use the image with Kubernetes, give the nodes its roles, deploy the demo workload and
    /// print its answer. The first build of that image takes about half an hour; under
    /// emulation the rest takes some three minutes.
    #[arg(long)]
    pub(crate) kubernetes: bool,
    /// Print the serial line, also in a terminal.
    #[arg(long)]
    pub(crate) headless: bool,
    /// Print the serial line and end when the node is ready: with status 0, with 1 if it fails, or
    /// with 3 if the time of --timeout is over. With `--kubernetes`, the end is the answer of the
    /// demo. The machine ends with the command: its power is cut, or with `--keep` it is stopped
    /// in order.
    #[arg(long)]
    pub(crate) until_ready: bool,
    /// How long `--until-ready` waits for the nodes.
    #[arg(long, default_value_t = 600, value_name = "SECONDS",
          value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    pub(crate) timeout: u64,
    /// Name of the machine, and of its folder in target/run.
    #[arg(long, default_value = "polis", value_parser = name)]
    pub(crate) name: String,
    #[command(flatten)]
    packages: image::Packages,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Accel {
    /// KVM where it works, else TCG.
    Auto,
    /// By the processor.
    Kvm,
    /// By translation; works everywhere.
    Tcg,
}

/// A name becomes a folder: letters, digits, `-` and `_`.
pub(crate) fn name(text: &str) -> Result<String, String> {
    let plain = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
    if text.is_empty() || text.len() > 32 || !text.chars().all(plain) {
        return Err("1 to 32 letters, digits, `-` and `_` are allowed".to_owned());
    }
    Ok(text.to_owned())
}

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
    let shown = !args.headless && !args.until_ready && terminal::is_interactive();
    let folder = dir.clone();
    let first = if keeps { "again" } else { "for the first time" };
    let mut config = prepare(&args, &image, &dir, shown)?;
    // A machine that ends when it is ready needs no operator.
    let operator = match args.until_ready && !args.kubernetes {
        true => None,
        false => Some(Operator::prepare(&dir, &args.name, keeps)?),
    };
    if let Some(operator) = &operator {
        config.forwards.clone_from(&operator.forwards);
    }
    eprintln!(
        "run: booting image {} {first}, run {}, with {} MiB, logs in {}",
        image.version,
        config.accelerator,
        config.memory,
        dir.display()
    );
    let log = dir.join("serial.log");
    let (finish, finished) = mpsc::channel();
    let kubernetes = args.kubernetes;
    let operate = operator.map(|operator| {
        let command = format!("{} cluster info", shortest(&operator.script()));
        eprintln!("run: once the node is ready, in another terminal: {command}");
        move || {
            let (polisctl, log_of_node) = (operator.polisctl.clone(), log.clone());
            operator.follow(&log, move |taken| match taken {
                Ok(node) if kubernetes => {
                    let nodes = vec![kubernetes::Node { id: node, log: log_of_node }];
                    let report = if shown { terminal::title } else { said };
                    let deployment = Deployment { dir: folder, operator: polisctl, nodes, report };
                    // The receiver ends with the console.
                    drop(finish.send(deployment.run()));
                }
                Err(error) if kubernetes => {
                    let error = error.context("cannot take ownership of the cluster");
                    drop(finish.send(Err(error)));
                }
                // The console uses this terminal; a failure there shows when it is used.
                _ if shown => {}
                Ok(_node) => eprintln!("run: in another terminal: {command}"),
                Err(error) => eprintln!("run: cannot take ownership of the cluster: {error:#}"),
            });
        }
    });
    let mut machine = Machine::start(&config, &dir)?;
    if let Some(operate) = operate {
        operate();
    }
    let finished = kubernetes.then_some(finished);
    match shown {
        true => show(machine, &args, finished.as_ref()),
        false => stream(&mut machine, &args, finished.as_ref()),
    }
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

/// The same image, signed with keys that are made for it and kept nowhere: the machine's
/// firmware takes their public halves from the image.
fn signed(image: Image, dir: &Path, keep: bool) -> Result<Image> {
    make_folder(dir)?;
    let out = dir.join("signed.img");
    if !keep || !out.exists() {
        eprintln!("run: making keys, and signing the image");
        let folder = image.disk.parent().unwrap_or(Path::new("."));
        let signer = Some(Arc::new(Keys::generate()?.image_signer()?));
        assemble(&Manifest::load(folder)?, &Options { signer, ..Options::new(&out) })?;
    }
    Ok(Image { disk: out, ..image })
}

/// Memory in MiB and processors of a node, by its number. Several share this host: see
/// `docs/benchmarks.md` for what they need.
fn shape(args: &Args, number: u8) -> (u32, u32) {
    let (memory, cpus) = match (args.kubernetes, args.nodes, number) {
        (false, 1, _) => (1024, 2),
        (false, _, _) => (512, 1),
        (true, _, 1) => (kubernetes::MEMORY_FIRST, 2),
        (true, _, _) => (kubernetes::MEMORY, 1),
    };
    // In system management mode, where the firmware for Secure Boot keeps its variables, every
    // processor spins until the last is there: translated, that takes up to twice as long. And
    // several translated processors need words that a TPM shows, see `words`.
    let cpus = if (args.secure_boot || args.tpm) && !args.kubernetes { 1 } else { cpus };
    (args.memory.unwrap_or(memory), args.cpus.unwrap_or(cpus))
}

/// The words to add to the kernel command line of a machine. Those that pass through firmware are
/// in register 12 of a TPM: its proof (`polisctl node attest`) would not fit the image. QEMU adds
/// others to those of several translated processors, which a machine cannot do without.
fn words(args: &Args, accelerator: Accelerator) -> &'static str {
    if args.tpm { "" } else { cheap(accelerator) }
}

/// Creates the folder of a machine that founds a cluster, and returns its configuration.
fn prepare(args: &Args, image: &Image, dir: &Path, shown: bool) -> Result<Config> {
    let config = machine(args, image, dir, 1)?;
    let file = founding(dir, dir, shown)?;
    Ok(Config {
        fw_cfg: vec![FwCfg { name: PARAMETERS.to_owned(), file }],
        console: shown,
        ..config
    })
}

/// Writes the parameters of the machine in `dir`, with which it founds a cluster for the
/// owner of the key in `owner`.
pub(crate) fn founding(owner: &Path, dir: &Path, shown: bool) -> Result<PathBuf> {
    named_founding(owner, dir, shown, "")
}

/// The same for a node with a name.
pub(crate) fn named_founding(owner: &Path, dir: &Path, shown: bool, name: &str) -> Result<PathBuf> {
    let owner = parameters::owner_key(owner)?;
    let file = dir.join("parameters.pb");
    fs::write(&file, parameters::bootstrap(&owner, shown.then_some("hvc0"), name))
        .with_context(|| format!("cannot write {}", file.display()))?;
    Ok(file)
}

/// Makes the folder of a run.
pub(crate) fn make_folder(dir: &Path) -> Result<()> {
    fs::create_dir_all(dir)
        .with_context(|| format!("cannot make {}", dir.display()))
        .context(host::Help("make the folder writable, or choose another with --name".to_owned()))
}

/// Creates the folder of the machine of this number, and returns its configuration.
pub(crate) fn machine(args: &Args, image: &Image, dir: &Path, number: u8) -> Result<Config> {
    make_folder(dir)?;
    let disk = dir.join("disk.img");
    if !kept::disk(args, dir) {
        let tpm = dir.join("tpm");
        if tpm.exists() {
            polis_qemu::tpm::Tpm::clear(&tpm)
                .with_context(|| format!("cannot remove {}", tpm.display()))?;
        }
        for old in [dir.join("vars.fd"), dir.join("serial.log"), dir.join("parameters.pb")] {
            if old.exists() {
                fs::remove_file(&old)
                    .with_context(|| format!("cannot remove {}", old.display()))?;
            }
        }
        polis_qemu::disk::copy(&image.disk, &disk)
            .and_then(|()| match args.kubernetes {
                true => polis_qemu::disk::resize(&disk, kubernetes::DISK),
                false => Ok(()),
            })
            .with_context(|| format!("cannot copy the image to {}", disk.display()))?;
    }
    let flash = if args.secure_boot { Flash::Secure } else { Flash::Plain };
    let wish = match args.accel {
        Accel::Auto => Preference::Auto,
        Accel::Kvm => Preference::Kvm,
        Accel::Tcg => Preference::Tcg,
    };
    let cache = if args.keep { Cache::Writeback } else { Cache::Unsafe };
    let (memory, cpus) = shape(args, number);
    let accelerator = accelerator(wish, cpus);
    let words = words(args, accelerator);
    let firmware = if args.direct { image.direct(words) } else { image.uefi(flash, dir, words)? };
    Ok(Config {
        disk: Some(Disk { file: disk, bus: Bus::Virtio, cache }),
        memory,
        cpus,
        watchdog: true,
        tpm: args.tpm.then(|| dir.join("tpm")),
        ..Config::new(firmware, accelerator)
    })
}

/// The node's console in this terminal, until either side ends it.
///
/// `finished` receives the outcome of the deployment, where there is one.
fn show(
    mut machine: Machine,
    args: &Args,
    finished: Option<&mpsc::Receiver<Result<String>>>,
) -> Result<()> {
    let console = machine.take_console().context("QEMU opened no console")?;
    eprintln!("run: this terminal becomes the node's console; {}", terminal::hint(1));
    let end = terminal::lend(&console, &AtomicUsize::new(0))?;
    if end == terminal::End::Quit {
        leave(&mut machine, args)?;
    }
    if end == terminal::End::Closed {
        // QEMU is ending: its last output comes before that.
        machine.wait_end(STOP_MAX).context("QEMU closed the console and still runs")?;
    }
    if let Some(guru) = machine.seen(|event| event.word == "guru").last() {
        return Err(stopped(guru));
    }
    let off = machine.seen(|event| event.word == "off").last().is_some();
    if end == terminal::End::Closed && !off {
        bail!("QEMU ended before the node; its last lines are in {}", machine.log().display());
    }
    if let Some(text) = at_home(&machine.seen(|_event| true)) {
        eprintln!("run: {text}");
    }
    match finished.map(mpsc::Receiver::try_recv) {
        None => {}
        Some(Ok(outcome)) => eprintln!("{}", outcome?),
        Some(Err(_not_yet)) => eprintln!("run: left before the demo answered"),
    }
    eprintln!("run: the serial line is in {}", machine.log().display());
    Ok(())
}

/// How long a node of this run may take to stop.
pub(crate) fn stop_max(args: &Args) -> Duration {
    if args.kubernetes { STOP_MAX + DRAIN_MAX } else { STOP_MAX }
}

/// The end of a run that does not cut the power at once: with `--keep`, the node is stopped in
/// order, so that its disk is consistent.
fn leave(machine: &mut Machine, args: &Args) -> Result<()> {
    if !args.keep {
        return Ok(());
    }
    eprintln!("run: stopping the node, so that its disk is consistent");
    let mut end = || -> Result<(), polis_qemu::Error> {
        machine.wait_until_text(POWER_BUTTON, STOP_MAX)?;
        machine.qmp.power_button()?;
        machine.wait_for("off", stop_max(args), |_| true)?;
        machine.wait_end(STOP_MAX)?;
        Ok(())
    };
    end().context(
        "the node did not shut down cleanly: with --keep, its next boot is like one after a \
         power cut",
    )
}

/// The serial line on the standard output. `finished` receives the outcome of the
/// deployment, where there is one.
fn stream(
    machine: &mut Machine,
    args: &Args,
    finished: Option<&mpsc::Receiver<Result<String>>>,
) -> Result<()> {
    let deadline = Instant::now() + Duration::from_secs(args.timeout);
    let far = Duration::from_secs(3600);
    let mut ready = false;
    let mut deployed = finished.is_none();
    loop {
        let watched = args.until_ready && !ready;
        let within = match (watched, deployed) {
            (true, _) => deadline.saturating_duration_since(Instant::now()),
            (false, true) => far,
            (false, false) => ASK,
        };
        let printed = machine.wait("the end", within, |line| {
            let is_read = writeln!(io::stdout(), "{}", line.text).is_ok();
            let event = line.event();
            let event = event.filter(|event| ["ready", "guru", "off"].contains(&&*event.word));
            // A script that waits for the status need not read the lines.
            if is_read || args.until_ready { event.map(Some) } else { Some(None) }
        });
        let event = match printed {
            Ok(Some(event)) => event,
            // The reader of the lines has left, as `head` does.
            Ok(None) => return Ok(()),
            // A node that has nothing to say is silent for longer than an hour.
            Err(polis_qemu::Error::Wait {
                outcome: Outcome::Late { .. } | Outcome::Silent { .. },
                ..
            }) if !watched => {
                let outcome = finished.filter(|_| !deployed).map(mpsc::Receiver::try_recv);
                match outcome {
                    Some(Ok(outcome)) => {
                        deployed = true;
                        eprintln!("{}", outcome?);
                        if args.until_ready {
                            return leave(machine, args);
                        }
                    }
                    Some(Err(mpsc::TryRecvError::Disconnected)) => {
                        bail!("the thread that deploys the demo has ended without an answer")
                    }
                    Some(Err(mpsc::TryRecvError::Empty)) | None => {}
                }
                continue;
            }
            Err(error) => return Err(gave_up(missed(args, ready), error.into())),
        };
        match &*event.word {
            "ready" if watched => {
                ready = true;
                if let Some(text) = at_home(&machine.seen(|_event| true)) {
                    eprintln!("run: {text}");
                }
                if deployed {
                    return leave(machine, args);
                }
            }
            "guru" if args.until_ready => return Err(stopped(&event)),
            "off" if args.until_ready => bail!("the machine went off: {}", missed(args, ready)),
            "off" if !event.is("reason", "reboot") => return Ok(()),
            _ => {}
        }
    }
}

/// What a run has not seen that ends too early.
fn missed(args: &Args, ready: bool) -> &'static str {
    match (args.until_ready, ready) {
        (true, false) => "the node did not become ready",
        (true, true) => "the demo did not answer",
        (false, _) => "the machine did not go off in order",
    }
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

/// The failure of a node whose trapdoor opened.
fn stopped(guru: &Event) -> anyhow::Error {
    anyhow!("the node stopped: {guru}")
        .context(host::Help("docs/errors.md explains the code".to_owned()))
}

/// The last time that the node became ready, and how long its boot took: the first
/// since QEMU started, a later one since its own kernel did.
fn at_home(events: &[Event]) -> Option<String> {
    let last = events.iter().rposition(|event| event.word == "ready")?;
    let ready = &events[last];
    let boots = events[..last].iter().filter(|event| event.word == "boot").count();
    let took = match (boots, ready.uptime()) {
        (0 | 1, _) => format!(", {:.1} s after QEMU started", ready.at.as_secs_f64()),
        (boots, Some(uptime)) => {
            format!(", {uptime:.1} s after the kernel of boot {boots} started")
        }
        (boots, None) => format!(" in boot {boots}"),
    };
    Some(format!("{} is ready at {}{took}", ready.text("node"), ready.text("address")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, clap::Parser)]
    struct Line {
        #[command(flatten)]
        args: Args,
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
        fs::remove_file(runs.join(format!("{name}.lock"))).unwrap();
        assert!(error.contains(&format!("process {}", std::process::id())), "{error}");
        assert!(!runs.join(&name).exists());
    }

    /// The arguments of a run with these options.
    fn with(options: &[&str]) -> Args {
        <Line as clap::Parser>::parse_from([&["run"], options].concat()).args
    }

    #[test]
    fn a_machine_with_a_tpm_gets_no_words_that_its_proof_would_show() {
        let added = |options: &[&str], accelerator| words(&with(options), accelerator);
        assert_eq!(added(&["--tpm"], Accelerator::Tcg), "");
        assert!(added(&[], Accelerator::Tcg).contains("mitigations=off"));
        assert_eq!(added(&[], Accelerator::Kvm), "");
        // QEMU adds words for several processors, which are for a person to ask for.
        let processors = |options: &[&str]| shape(&with(options), 1).1;
        assert_eq!((processors(&[]), processors(&["--tpm"])), (2, 1));
        assert_eq!(processors(&["--tpm", "--cpus", "2"]), 2);
        assert_eq!(processors(&["--tpm", "--kubernetes"]), 2);
    }

    #[test]
    fn a_worker_has_a_minute_more_to_stop_in_which_it_moves_its_pods_away() {
        let [plain, worker] = [&[][..], &["--kubernetes"]].map(|options| stop_max(&with(options)));
        assert_eq!((plain, worker - plain), (STOP_MAX, Duration::from_secs(60)));
    }

    #[test]
    fn a_run_that_ends_too_early_says_what_it_has_not_seen() {
        let said = |options: &[&str], ready| missed(&with(options), ready);
        assert_eq!(said(&["--until-ready"], false), "the node did not become ready");
        assert_eq!(said(&["--until-ready", "--kubernetes"], true), "the demo did not answer");
        // Whether the node was ready is not looked for.
        assert_eq!(said(&["--headless"], false), "the machine did not go off in order");
    }

    #[test]
    fn a_time_that_no_clock_reaches_is_wrong_usage() {
        for wrong in ["0", "-1", "18446744073709551615"] {
            let option = format!("--timeout={wrong}");
            let error = <Line as clap::Parser>::try_parse_from(["run", &option]).unwrap_err();
            assert_eq!(error.exit_code(), 2);
            assert!(error.to_string().contains("--timeout"), "{error}");
        }
        <Line as clap::Parser>::try_parse_from(["run", "--timeout", "1000000"]).unwrap();
    }

    #[test]
    fn the_closing_line_counts_from_the_boot_that_it_speaks_of() {
        let event = |at, text| Event::parse(text, Duration::from_secs(at)).unwrap();
        let ready = "POLIS ready node=polis-01 address=10.0.2.15 t=9.100";
        let mut events = vec![
            event(4, "POLIS boot version=1 t=1.000"),
            event(12, ready),
            event(600, "POLIS off reason=reboot t=597.000"),
            event(605, "POLIS boot version=1 t=1.000"),
        ];
        let first = "polis-01 is ready at 10.0.2.15, 12.0 s after QEMU started";
        // Also while a later boot is not ready yet.
        assert_eq!(at_home(&events).as_deref(), Some(first));
        events.push(event(665, ready));
        let second = "polis-01 is ready at 10.0.2.15, 9.1 s after the kernel of boot 2 started";
        assert_eq!(at_home(&events).as_deref(), Some(second));
        assert_eq!(at_home(&events[..1]), None);
    }

    #[test]
    fn a_name_is_one_plain_word() {
        assert!(name("polis-2_b").is_ok());
        for bad in ["", "..", "a/b", "a b", &"x".repeat(33)] {
            assert!(name(bad).is_err(), "{bad}");
        }
    }
}
