//! The service of the parameters: looks for them once a boot and publishes the result.
//!
//! ```text
//! [Looking] --fw_cfg's driver is not done--> [Waiting] --done, or FW_CFG_WAIT over--+
//!     |                                                                             v
//!     +------------------------------------------------------------------------> read both
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

use super::places::{FwCfg, Places};
use super::{BYTES_MAX, Error, Known, Loaded, Parameters, Source, parse};
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

/// Where to look.
#[derive(Clone, Debug)]
pub struct Config {
    /// Where sysfs is mounted.
    pub sys: PathBuf,
    /// The file on the ESP.
    pub esp: File,
}

/// The service. A run holds all progress.
#[derive(Clone, Debug)]
pub struct Service {
    /// Where to look.
    pub config: Config,
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
        let reading = tokio::task::spawn_blocking(move || {
            let from_fw_cfg = match fw_cfg {
                FwCfg::Ready => places.read(Source::FwCfg),
                FwCfg::Missing | FwCfg::Starting => Ok(None),
            };
            decide(fw_cfg, from_fw_cfg, places.read(Source::Esp))
        });
        let Some(decided) = ctx.until_cancelled(reading).await else { return Ok(()) };
        match decided.map_err(RunError::Thread)? {
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
                        with the ESP alone";
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

type Read = Result<Option<Vec<u8>>, Error>;

/// Chooses between the contents of the two places.
fn decide(fw_cfg: FwCfg, from_fw_cfg: Read, from_esp: Read) -> Result<Loaded, Failed> {
    let mut warning = None;
    let first = match (fw_cfg, &from_fw_cfg) {
        (FwCfg::Missing, _) => "fw_cfg: absent".to_owned(),
        (FwCfg::Starting, _) => {
            let text = "fw_cfg: the driver of the device did not start";
            warning = Some(format!("{text}; node parameters there are ignored"));
            text.to_owned()
        }
        (FwCfg::Ready, read) => seen(Source::FwCfg, read),
    };
    let tried = vec![first, seen(Source::Esp, &from_esp)];
    if let Ok(None) = from_fw_cfg {
        return match understand(from_esp) {
            Ok(found) => Ok(Loaded { found: found.map(|p| (p, Source::Esp)), warning, tried }),
            Err(error) => Err(Failed { error, source: Source::Esp, tried }),
        };
    }
    let (ours, theirs) = (Source::FwCfg.place(), Source::Esp.place());
    match (&from_fw_cfg, &from_esp) {
        (Ok(Some(used)), Ok(Some(other))) if used != other => {
            warning = Some(format!(
                "{ours} takes precedence over {theirs}, which differs and is ignored"
            ));
        }
        (_, Err(error)) => {
            warning = Some(format!("{ours} is used; {theirs} could not be compared: {error}"));
        }
        (_, Ok(_)) => {}
    }
    match understand(from_fw_cfg) {
        Ok(found) => Ok(Loaded { found: found.map(|p| (p, Source::FwCfg)), warning, tried }),
        Err(error) => Err(Failed { error, source: Source::FwCfg, tried }),
    }
}

fn understand(read: Read) -> Result<Option<Parameters>, Error> {
    read?.map(|bytes| parse(&bytes)).transpose()
}

fn seen(source: Source, read: &Read) -> String {
    let place = source.place();
    match read {
        Ok(None) => format!("{place}: absent"),
        Ok(Some(bytes)) => format!("{place}: {} bytes", bytes.len()),
        Err(Error::TooLarge) => format!("{place}: more than {BYTES_MAX} bytes"),
        Err(_) => format!("{place}: unreadable"),
    }
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
        let config = Config { sys: base.path().join("sys"), esp: root.esp.parameters };
        let (sender, known) = watch::channel(None);
        let (ctx, handles) = Context::for_test();
        tokio::select! {
            ended = Service { config, known: sender }.run(ctx) => panic!("{ended:?}"),
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
            assert_eq!(report.tried.len(), 2);
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

    #[test]
    fn fw_cfg_wins_and_a_difference_is_named() {
        let loaded = decide(FwCfg::Ready, Ok(Some(valid(&[]))), Ok(Some(valid(EXTRA)))).unwrap();
        assert_eq!(loaded.found.unwrap().1, Source::FwCfg);
        let warning = loaded.warning.unwrap();
        assert!(warning.contains("opt/polis/parameters.pb"), "{warning}");
        assert!(warning.contains("polis/parameters.pb on the ESP"), "{warning}");
    }

    #[test]
    fn the_same_content_twice_is_no_warning() {
        let loaded = decide(FwCfg::Ready, Ok(Some(valid(&[]))), Ok(Some(valid(&[])))).unwrap();
        assert_eq!(loaded.warning, None);
    }

    #[test]
    fn the_esp_is_used_when_fw_cfg_has_no_item() {
        let loaded = decide(FwCfg::Ready, Ok(None), Ok(Some(valid(&[])))).unwrap();
        assert_eq!(loaded.found.unwrap().1, Source::Esp);
        assert_eq!(loaded.warning, None);
    }

    #[test]
    fn bad_bytes_in_fw_cfg_do_not_fall_back_to_the_esp() {
        let failed = decide(FwCfg::Ready, Ok(Some(vec![])), Ok(Some(valid(&[])))).unwrap_err();
        assert!(matches!(failed.error, Error::NothingChosen));
        assert_eq!(failed.source, Source::FwCfg);
    }

    #[test]
    fn a_bad_file_on_the_esp_is_a_warning_while_fw_cfg_is_used() {
        let esp = Err(Error::TooLarge);
        let loaded = decide(FwCfg::Ready, Ok(Some(valid(&[]))), esp).unwrap();
        assert!(loaded.warning.unwrap().contains("65536"));
    }

    #[test]
    fn nothing_anywhere_is_not_a_failure_and_says_where_it_looked() {
        let loaded = decide(FwCfg::Missing, Ok(None), Ok(None)).unwrap();
        assert_eq!(loaded.found, None);
        assert_eq!(loaded.tried.len(), 2);
        let report = super::super::absent(&loaded);
        assert_eq!(report.code, polis_base::trapdoor::code::PARAMETERS_ABSENT);
        assert_eq!(report.tried, loaded.tried);
    }

    #[test]
    fn a_driver_that_never_starts_is_a_warning() {
        let loaded = decide(FwCfg::Starting, Ok(None), Ok(Some(valid(&[])))).unwrap();
        assert!(loaded.warning.unwrap().contains("driver"));
    }
}
