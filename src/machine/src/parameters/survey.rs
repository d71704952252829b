//! The parameters of a machine in maintenance: what its places have now, without a wait and
//! without a consequence.
//!
//! A machine comes here by a guru meditation: its places were looked at before, or the drivers had
//! their time. Parameters that cannot be used are why it holds, perhaps, and do not end this.
//!
//! Invariants:
//! - A disk that hangs holds one thread, however often a caller repeats the survey: each survey
//!   names it, and waits for the read that goes on.
//!
//! What this module does not do: ask a metadata service; it reads the copy of what that gave.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Mutex;

use super::cloud::kept_of;
use super::config_disk::Disks;
use super::decide::{Place, decide, of_disks, of_machine};
use super::places::Places;
use super::{Config, Loaded, Source, given};
use polis_runtime::supervisor::blocking;

/// How long the disks may take to answer.
const DISK_WAIT: Duration = Duration::from_secs(2);

/// The places of a machine, and what they have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Survey {
    /// The parameters in force; empty where the first that there are cannot be used.
    pub loaded: Loaded,
    /// Why they cannot be used.
    pub fault: Option<String>,
    /// The places that have something, the first in force.
    pub filled: Vec<Source>,
}

impl Survey {
    /// Whether parameters on the ESP would not be in force, because of another place.
    #[must_use]
    pub fn outranks_esp(&self) -> bool {
        self.filled.contains(&Source::FwCfg)
    }
}

/// The content of the file `given` of `config` with this message, which replaces the file on the
/// ESP as it is now. Blocks.
#[must_use]
pub fn given_content(config: &Config, message: &[u8]) -> Vec<u8> {
    let places = Places::new(&config.sys, &config.esp, &config.given);
    given::content(message, &places.read(Source::Esp))
}

/// Looks at the places of a machine. Clones share what is being read of its disks.
#[derive(Clone, Debug)]
pub struct Surveyor {
    config: Config,
    disk_wait: Duration,
    /// One survey at a time: the answer of a disk has one owner.
    disks: Arc<Mutex<Disks>>,
}

impl Surveyor {
    /// Nothing was read yet.
    #[must_use]
    pub fn new(config: Config) -> Self {
        let disks = Disks::new(&config.sys, &config.dev);
        Self { config, disk_wait: DISK_WAIT, disks: Arc::new(Mutex::new(disks)) }
    }

    /// Looks at every place of the machine.
    pub async fn survey(&self) -> Survey {
        let disks = Arc::clone(&self.disks).lock_owned().await;
        let Config { sys, esp, given, kept, .. } = &self.config;
        let (places, kept) = (Places::new(sys, esp, given), kept.clone());
        // The turn goes along: the next survey waits for a read that hangs, also where the caller
        // of this one is gone.
        let (disks, mut looked) = blocking(move || {
            let mut looked = of_machine(&places, places.fw_cfg());
            looked.push(Place::new(Source::Kept, kept_of(kept.read())));
            (disks, looked)
        })
        .await;
        let kept = looked.pop();
        looked.extend(of_disks(disks.look(self.disk_wait).await));
        looked.extend(kept);
        of(looked)
    }
}

fn of(looked: Vec<Place>) -> Survey {
    let filled = looked.iter().filter(|one| one.has_any()).map(|one| one.source).collect();
    match decide(looked) {
        Ok(loaded) => Survey { loaded, fault: None, filled },
        Err(failed) => {
            let fault = polis_base::cause::line(&failed.error);
            let loaded = Loaded { found: None, warning: None, tried: failed.tried };
            let fault = Some(format!("{}: {fault}", failed.source.place()));
            Survey { loaded, fault, filled }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io;
    use std::os::fd::OwnedFd;
    use std::path::Path;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use polis_wire::parameters::disk::FileSystem;

    use super::super::config_disk::tests::{fat, mounted};
    use super::super::decide::tests::{EXTRA, valid};
    use super::*;

    /// The places below this folder, which has none.
    fn config(base: &Path) -> Config {
        let tree = polis_base::files::Root::at(base);
        Config {
            sys: base.join("sys"),
            dev: base.join("dev"),
            esp: tree.esp.parameters,
            given: tree.esp.given_parameters,
            kept: tree.esp.user_data,
            metadata: super::super::METADATA_ADDRESS,
            metadata_v6: super::super::metadata_v6,
        }
    }

    #[test]
    fn the_first_place_is_in_force_and_one_that_cannot_be_used_is_only_named() {
        let esp = || Place::new(Source::Esp, Ok(Some(valid(&[]))));
        let smbios = || Place::new(Source::Smbios, Ok(Some(valid(EXTRA))));
        let survey = of(vec![esp(), smbios()]);
        assert_eq!(survey.loaded.found.as_ref().unwrap().1, Source::Esp);
        assert_eq!(survey.filled, [Source::Esp, Source::Smbios]);
        assert!(!survey.outranks_esp());

        let broken = Place::new(Source::FwCfg, Ok(Some(b"x".to_vec())));
        let survey = of(vec![broken, esp()]);
        assert_eq!(survey.loaded.found, None, "a later place does not take its turn");
        assert!(survey.fault.as_ref().unwrap().contains("fw_cfg"), "{survey:?}");
        assert!(survey.outranks_esp());
    }

    #[tokio::test]
    async fn a_machine_with_nothing_says_where_there_is_nothing() {
        let root = tempfile::tempdir().unwrap();
        let survey = Surveyor::new(config(root.path())).survey().await;
        assert_eq!((survey.loaded.found, survey.fault), (None, None));
        assert!(survey.filled.is_empty() && survey.loaded.tried.len() >= 3);
    }

    #[tokio::test]
    async fn a_disk_that_hangs_is_read_once_however_often_a_caller_asks() {
        /// The reads that have begun, of which none ends.
        static BEGUN: AtomicUsize = AtomicUsize::new(0);

        fn hang(_device: &Path, _kind: FileSystem) -> io::Result<OwnedFd> {
            BEGUN.fetch_add(1, Ordering::Relaxed);
            loop {
                std::thread::park();
            }
        }

        let root = tempfile::tempdir().unwrap();
        let config = config(root.path());
        fs::create_dir_all(config.sys.join("class/block/sdb")).unwrap();
        fs::create_dir_all(&config.dev).unwrap();
        fs::write(config.dev.join("sdb"), fat("CIDATA")).unwrap();
        let disks = mounted(Disks::new(&config.sys, &config.dev), hang);
        let disk_wait = Duration::from_millis(100);
        let surveyor = Surveyor { config, disk_wait, disks: Arc::new(Mutex::new(disks)) };
        let (one, other) = tokio::join!(surveyor.survey(), surveyor.survey());
        for survey in [one, other, surveyor.clone().survey().await] {
            let tried = &survey.loaded.tried;
            assert!(tried.iter().any(|place| place.contains("perhaps sdb")), "{tried:?}");
        }
        assert_eq!(BEGUN.load(Ordering::Relaxed), 1);
    }
}
