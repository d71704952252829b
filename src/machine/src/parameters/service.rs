//! The service of the parameters: looks for them once a boot and publishes the result.
//!
//! ```text
//! [Looking] --fw_cfg's driver is not done--> [Waiting] --done, or FW_CFG_WAIT over--+
//!     |                                                                             v
//!     +------------------------------------------------------> read fw_cfg, SMBIOS, ESP
//!                                                                                   |
//!     +--nothing there, disk without a home, within DISK_WAIT--+                    v
//!     +------------------------------------------------------->+------> look at config disks
//!                                                             understood, or none | | not usable
//!                                                                     [Published]<+ +> trapdoor
//! ```
//!
//! Invariants:
//! - A published value never changes: a restarted run finds the same bytes.
//! - Parameters that cannot be used are never published.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;
use tracing::{info, warn};

use super::config_disk::{Disks, Found};
use super::places::{FwCfg, Places};
use super::{BYTES_MAX, Error, Known, Loaded, Source, message, parse};
use crate::storage;
use polis_base::files::File;
use polis_base::stage::{Stage, State};
use polis_runtime::supervisor::Context;

/// How often a driver that is not done is looked at. sysfs does not notify of changes, and the
/// driver is usually done within some hundredths of a second.
const POLL: Duration = Duration::from_millis(5);

/// How long the driver may take before the console shows what the boot waits for.
const PATIENCE: Duration = Duration::from_secs(1);

/// How long the driver may take before the boot goes on without fw_cfg. Loading
/// it takes a tenth of a second on a slow machine.
const FW_CFG_WAIT: Duration = Duration::from_secs(10);

/// How often disks are looked at. `init` still loads the drivers of some.
const DISK_POLL: Duration = Duration::from_millis(250);

/// How long a disk with user data may take to appear on a machine that has nothing else: `init`
/// loads the driver of a CD-ROM drive once this waits, and that takes some seconds to find it.
const DISK_WAIT: Duration = Duration::from_secs(10);

/// How long disks may take to be read only to compare them.
const COMPARE_WAIT: Duration = Duration::from_secs(1);

/// Where to look.
#[derive(Clone, Debug)]
pub struct Config {
    /// Where sysfs is mounted.
    pub sys: PathBuf,
    /// Where the devices are.
    pub dev: PathBuf,
    /// The file on the ESP.
    pub esp: File,
}

/// The service. A run holds all progress.
#[derive(Clone, Debug)]
pub struct Service {
    /// Where to look.
    pub config: Config,
    /// Whether the disk has a home: a machine that has one waits for no disk with user data.
    pub storage: watch::Receiver<storage::Status>,
    /// The result.
    pub known: watch::Sender<Known>,
}

/// Why a run ended.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The thread that reads is gone.
    #[error("the thread that reads the parameters panicked")]
    Thread(#[source] tokio::task::JoinError),
}

impl Service {
    /// Publishes the parameters of this machine, then waits to be cancelled.
    ///
    /// # Errors
    ///
    /// [`RunError`]; a restart is always right.
    pub async fn run(self, ctx: Context) -> Result<(), RunError> {
        ctx.stage(Stage::Parameters, State::Started);
        let places = Places::new(&self.config.sys, &self.config.esp);
        let Some(fw_cfg) = ctx.until_cancelled(settle(&places, &ctx)).await else { return Ok(()) };
        let reading = tokio::task::spawn_blocking(move || of_machine(&places, fw_cfg));
        let Some(read) = ctx.until_cancelled(reading).await else { return Ok(()) };
        let mut looked = read.map_err(RunError::Thread)?;
        let other = looked.iter().any(|one| !matches!(one.read, Ok(None)));
        let Some(disks) = ctx.until_cancelled(self.disks(other, &ctx)).await else {
            return Ok(());
        };
        looked.extend(disks?);
        match decide(looked) {
            Ok(loaded) => {
                if let Some(warning) = &loaded.warning {
                    warn!("{warning}");
                }
                match &loaded.found {
                    Some((_, source)) => info!("node parameters from {source}"),
                    None => info!("no node parameters: {}", loaded.tried.join("; ")),
                }
                self.known.send_replace(Some(Arc::new(loaded)));
                ctx.stage(Stage::Parameters, State::Done);
                ctx.healthy();
                ctx.cancelled().await;
                Ok(())
            }
            Err(failed) => {
                let report = failed.error.report(failed.source, failed.tried);
                match ctx.trapdoor(report).await {}
            }
        }
    }
}

impl Service {
    /// Looks at disks with user data, and waits for one where it matters: a machine without a
    /// home, and without parameters in an `other` place. Cancel-safe.
    async fn disks(&self, other: bool, ctx: &Context) -> Result<Vec<Looked>, RunError> {
        let disks = Disks::new(&self.config.sys, &self.config.dev);
        let start = Instant::now();
        let wait = if other { COMPARE_WAIT } else { DISK_WAIT };
        loop {
            let look = disks.clone();
            let look = tokio::task::spawn_blocking(move || look.look());
            // A disk that does not answer keeps its thread, and no boot. Each look has its own time:
            // the last one begins when the wait ends.
            let Ok(found) = tokio::time::timeout(wait, look).await else {
                return Ok(vec![no_disk(Some(NO_ANSWER))]);
            };
            let found = found.map_err(RunError::Thread)?;
            if !found.is_empty() {
                return Ok(found.into_iter().map(Looked::disk).collect());
            }
            if other || self.has_home() || start.elapsed() >= wait {
                return Ok(vec![no_disk(None)]);
            }
            if start.elapsed() >= PATIENCE {
                let what = "a disk labelled cidata or config-2, since no other place has node \
                            parameters";
                ctx.stage(Stage::Parameters, State::Waiting(what.to_owned()));
            }
            tokio::time::sleep(DISK_POLL).await;
        }
    }

    fn has_home(&self) -> bool {
        let status = &*self.storage.borrow();
        !matches!(status, storage::Status::Starting | storage::Status::Absent { .. })
    }
}

/// Says that a disk with user data is missing, or another thing.
fn no_disk(note: Option<&'static str>) -> Looked {
    let place = "disk labelled cidata or config-2".to_owned();
    Looked { place, note, ..Looked::new(Source::NoCloud, Ok(None)) }
}

/// Waits until it is known whether fw_cfg has items. Cancel-safe.
async fn settle(places: &Places, ctx: &Context) -> FwCfg {
    let start = Instant::now();
    loop {
        let fw_cfg = places.fw_cfg();
        let waited = start.elapsed();
        if fw_cfg != FwCfg::Starting || waited >= FW_CFG_WAIT {
            return fw_cfg;
        }
        if waited >= PATIENCE {
            let what = "the driver of fw_cfg (module qemu_fw_cfg); without it the boot continues \
                        with the other places";
            ctx.stage(Stage::Parameters, State::Waiting(what.to_owned()));
        }
        tokio::time::sleep(POLL).await;
    }
}

/// Parameters that cannot be used.
#[derive(Debug)]
struct Failed {
    error: Error,
    source: Source,
    tried: Vec<String>,
}

/// The message in a place, if there is one.
type Read = Result<Option<Vec<u8>>, Error>;

/// A place that was looked at.
#[derive(Debug)]
struct Looked {
    source: Source,
    /// Its name for people.
    place: String,
    read: Read,
    /// Something else to say than how many bytes were there.
    note: Option<&'static str>,
}

impl Looked {
    fn new(source: Source, read: Read) -> Self {
        let read = read.and_then(|bytes| bytes.map(message).transpose());
        Self { source, place: source.place(), read, note: None }
    }

    fn disk(found: Found) -> Self {
        let looked = Self::new(found.source, found.read);
        let place = format!("{} ({})", looked.place, found.device);
        Self { place, note: found.note, ..looked }
    }

    /// The result, in one sentence.
    fn result(&self) -> String {
        let place = &self.place;
        match (self.note, &self.read) {
            (Some(note), _) => format!("{place}: {note}"),
            (None, Ok(None)) => format!("{place}: absent"),
            (None, Ok(Some(bytes))) => format!("{place}: {} bytes", bytes.len()),
            (None, Err(Error::TooLarge)) => format!("{place}: more than {BYTES_MAX} bytes"),
            (None, Err(Error::NotBase64)) => format!("{place}: not base64"),
            (None, Err(_)) => format!("{place}: unreadable"),
        }
    }
}

/// What a driver that did not start means for the operator.
const NO_DRIVER: &str = "the driver of the device did not start";

/// What disks that hang mean.
const NO_ANSWER: &str = "a disk of this machine does not answer";

/// Looks at the places that the machine has from its start, the first one first.
fn of_machine(places: &Places, fw_cfg: FwCfg) -> Vec<Looked> {
    let from_fw_cfg = match fw_cfg {
        FwCfg::Ready => Looked::new(Source::FwCfg, places.read(Source::FwCfg)),
        FwCfg::Missing => Looked::new(Source::FwCfg, Ok(None)),
        FwCfg::Starting => Looked { note: Some(NO_DRIVER), ..Looked::new(Source::FwCfg, Ok(None)) },
    };
    let others = [Source::Smbios, Source::Esp];
    let others = others.map(|source| Looked::new(source, places.read(source)));
    std::iter::once(from_fw_cfg).chain(others).collect()
}

/// Takes the first place that has anything, even if that cannot be used, and compares the rest
/// with it.
fn decide(looked: Vec<Looked>) -> Result<Loaded, Failed> {
    let tried: Vec<String> = looked.iter().map(Looked::result).collect();
    let mut warnings: Vec<String> = looked
        .iter()
        .filter(|one| one.note.is_some_and(|note| note == NO_DRIVER || note == NO_ANSWER))
        .map(|one| format!("{}; node parameters there are ignored", one.result()))
        .collect();
    let mut looked = looked.into_iter().filter(|one| !matches!(one.read, Ok(None)));
    let Some(used) = looked.next() else {
        return Ok(Loaded { found: None, warning: joined(&warnings), tried });
    };
    let (place, source) = (used.place, used.source);
    for other in looked {
        match (&used.read, &other.read) {
            (Ok(used), Ok(same)) if used == same => warnings
                .push(format!("{place} is used; {} has the same and is ignored", other.place)),
            (Ok(_), Err(error)) => warnings
                .push(format!("{place} is used; {} could not be compared: {error}", other.place)),
            _ => warnings.push(format!(
                "{place} takes precedence over {}, which differs and is ignored",
                other.place
            )),
        }
    }
    match used.read.and_then(|bytes| parse(&bytes.unwrap_or_default())) {
        Ok(parameters) => {
            Ok(Loaded { found: Some((parameters, source)), warning: joined(&warnings), tried })
        }
        Err(error) => Err(Failed { error, source, tried }),
    }
}

fn joined(warnings: &[String]) -> Option<String> {
    (!warnings.is_empty()).then(|| warnings.join("; "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use polis_base::trapdoor::code;
    use polis_runtime::supervisor::Handles;

    /// Runs the service in an empty sysfs with `content` on the ESP.
    async fn run(content: Option<&[u8]>, story: impl AsyncFnOnce(watch::Receiver<Known>, Handles)) {
        let base = tempfile::tempdir().unwrap();
        let root = polis_base::files::Root::at(base.path());
        root.esp.create().unwrap();
        if let Some(content) = content {
            root.esp.parameters.write(content).unwrap();
        }
        let (sys, dev) = (base.path().join("sys"), base.path().join("dev"));
        let config = Config { sys, dev, esp: root.esp.parameters };
        let storage = watch::Sender::new(storage::Status::GivenUp).subscribe();
        let (sender, known) = watch::channel(None);
        let (ctx, handles) = Context::for_test();
        tokio::select! {
            ended = Service { config, storage, known: sender }.run(ctx) => panic!("{ended:?}"),
            () = story(known, handles) => {}
        }
    }

    #[tokio::test]
    async fn what_was_found_is_published_and_the_stage_is_done() {
        run(Some(&valid(&[])), async |mut known, handles| {
            let loaded =
                polis_runtime::event::until(&mut known, "known", Clone::clone).await.unwrap();
            assert!(loaded.parameters().is_some());
            // The stage follows the value, and nothing after it waits.
            tokio::task::yield_now().await;
            assert_eq!(handles.stages.borrow()[&Stage::Parameters].state, State::Done);
            assert!(handles.is_healthy());
        })
        .await;
    }

    #[tokio::test]
    async fn parameters_that_cannot_be_used_open_the_trapdoor_and_are_not_published() {
        run(Some(b"noise"), async |known, mut handles| {
            let report =
                polis_runtime::event::until(&mut handles.trapdoor, "trapdoor", Clone::clone);
            let report = report.await.unwrap();
            assert_eq!(report.code, code::PARAMETERS_MALFORMED);
            assert_eq!(report.tried.len(), 4);
            assert_eq!(*known.borrow(), None);
        })
        .await;
    }

    #[tokio::test]
    async fn a_machine_without_parameters_reports_that() {
        run(None, async |mut known, _handles| {
            let loaded =
                polis_runtime::event::until(&mut known, "known", Clone::clone).await.unwrap();
            assert_eq!(loaded.found, None);
        })
        .await;
    }

    /// The least that is valid: a bootstrap with the base point as the owner's key.
    fn valid(extra: &[u8]) -> Vec<u8> {
        let mut bytes = vec![0x0a, 34, 0x0a, 32, 0x58];
        bytes.extend([0x66; 31]);
        bytes.extend(extra);
        bytes
    }

    /// An empty `network`, which changes the bytes and nothing else.
    const EXTRA: &[u8] = &[0x1a, 0];

    #[tokio::test(start_paused = true)]
    async fn only_a_machine_without_a_home_and_without_parameters_waits_for_a_disk() {
        let base = tempfile::tempdir().unwrap();
        let absent = storage::Status::Absent { partition: uuid::Uuid::nil() };
        for (status, other, waits) in [
            (absent.clone(), false, true),
            (storage::Status::Starting, false, true),
            (storage::Status::GivenUp, false, false),
            (absent, true, false),
        ] {
            let esp = polis_base::files::Root::at(base.path()).esp.parameters;
            let config = Config { sys: base.path().join("sys"), dev: base.path().join("dev"), esp };
            let (_status, storage) = watch::channel(status);
            let (ctx, _handles) = Context::for_test();
            let service = Service { config, storage, known: watch::Sender::new(None) };
            let start = Instant::now();
            let looked = service.disks(other, &ctx).await.unwrap();
            assert_eq!(looked[0].result(), "disk labelled cidata or config-2: absent");
            assert_eq!(start.elapsed() >= DISK_WAIT, waits, "{other}");
        }
    }

    #[test]
    fn two_disks_that_differ_are_both_named() {
        let disk = |device: &str, content: Vec<u8>| {
            let (device, read) = (device.to_owned(), Ok(Some(content)));
            Looked::disk(Found { source: Source::NoCloud, device, read, note: None })
        };
        let loaded = decide(vec![disk("sdb", valid(&[])), disk("sdc", valid(EXTRA))]).unwrap();
        assert_eq!(loaded.found.unwrap().1, Source::NoCloud);
        let warning = loaded.warning.unwrap();
        assert!(warning.contains("(sdb)") && warning.contains("(sdc)"), "{warning}");
    }

    fn three(fw_cfg: Read, smbios: Read, esp: Read) -> Vec<Looked> {
        vec![
            Looked::new(Source::FwCfg, fw_cfg),
            Looked::new(Source::Smbios, smbios),
            Looked::new(Source::Esp, esp),
        ]
    }

    #[test]
    fn the_first_place_wins_and_every_difference_is_named() {
        let (ours, theirs) = (Ok(Some(valid(&[]))), || Ok(Some(valid(EXTRA))));
        let loaded = decide(three(ours, theirs(), theirs())).unwrap();
        assert_eq!(loaded.found.unwrap().1, Source::FwCfg);
        let warning = loaded.warning.unwrap();
        for place in ["opt/polis/parameters.pb", "SMBIOS", "polis/parameters.pb on the ESP"] {
            assert!(warning.contains(place), "{warning}");
        }
        let loaded = decide(three(Ok(None), Ok(Some(valid(&[]))), theirs())).unwrap();
        assert_eq!(loaded.found.unwrap().1, Source::Smbios);
        assert!(!loaded.warning.unwrap().contains("fw_cfg"));
    }

    #[test]
    fn the_same_content_at_a_second_place_is_named_in_either_form() {
        // The text of `valid(&[])`.
        let text = b"polis-parameters-v1:CiIKIFhmZmZmZmZmZmZmZmZmZmZmZmZmZmZmZmZmZmZmZmZm".to_vec();
        let loaded = decide(three(Ok(Some(valid(&[]))), Ok(Some(text)), Ok(None))).unwrap();
        let warning = loaded.warning.unwrap();
        assert!(warning.contains("opt/polis/parameters.pb"), "{warning}");
        assert!(warning.contains("SMBIOS") && warning.contains("has the same"), "{warning}");
    }

    #[test]
    fn the_esp_is_used_when_the_other_places_have_nothing() {
        let loaded = decide(three(Ok(None), Ok(None), Ok(Some(valid(&[]))))).unwrap();
        assert_eq!(loaded.found.unwrap().1, Source::Esp);
        assert_eq!(loaded.warning, None);
    }

    #[test]
    fn bad_bytes_do_not_fall_back_to_a_later_place() {
        let esp = || Ok(Some(valid(&[])));
        let failed = decide(three(Ok(Some(vec![])), Ok(None), esp())).unwrap_err();
        assert!(matches!(failed.error, Error::NothingChosen));
        assert_eq!(failed.source, Source::FwCfg);
        let noise = Ok(Some(b"polis-parameters-v1:%%".to_vec()));
        let failed = decide(three(Ok(None), noise, esp())).unwrap_err();
        assert!(matches!(failed.error, Error::NotBase64));
        let report = failed.error.report(failed.source, failed.tried);
        assert_eq!(report.code, code::PARAMETERS_MALFORMED);
        assert!(report.next.contains("SMBIOS"), "{}", report.next);
    }

    #[test]
    fn a_bad_file_on_the_esp_is_a_warning_while_fw_cfg_is_used() {
        let esp = Err(Error::TooLarge);
        let loaded = decide(three(Ok(Some(valid(&[]))), Ok(None), esp)).unwrap();
        assert!(loaded.warning.unwrap().contains("65536"));
    }

    #[test]
    fn nothing_anywhere_is_not_a_failure_and_says_where_it_looked() {
        let loaded = decide(three(Ok(None), Ok(None), Ok(None))).unwrap();
        assert_eq!(loaded.found, None);
        assert_eq!(loaded.tried.len(), 3);
        let report = super::super::absent(&loaded);
        assert_eq!(report.code, polis_base::trapdoor::code::PARAMETERS_ABSENT);
        assert_eq!(report.tried, loaded.tried);
    }

    #[test]
    fn a_driver_that_never_starts_is_a_warning() {
        let mut looked = three(Ok(None), Ok(None), Ok(Some(valid(&[]))));
        looked[0].note = Some(NO_DRIVER);
        let loaded = decide(looked).unwrap();
        assert!(loaded.warning.unwrap().contains("driver"));
    }
}
