//! The parameters of a machine in maintenance: what its places have now, without a wait and
//! without a consequence.
//!
//! A machine comes here by a guru meditation: its places were looked at before, or the drivers had
//! their time. Parameters that cannot be used are why it holds, perhaps, and do not end this.
//!
//! What this module does not do: ask a metadata service; it reads the copy of what that gave.

use std::time::Duration;

use super::config_disk::Disks;
use super::elsewhere::kept_of;
use super::looked::{Looked, decide, of_disks, of_machine};
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

/// Looks at every place of the machine.
pub async fn survey(config: &Config) -> Survey {
    let (places, kept) =
        (Places::new(&config.sys, &config.esp, &config.given), config.kept.clone());
    let mut looked = blocking(move || {
        let mut looked = of_machine(&places, places.fw_cfg());
        looked.push(Looked::new(Source::Kept, kept_of(kept.read())));
        looked
    })
    .await;
    let disks = Disks::new(&config.sys, &config.dev);
    let kept = looked.pop();
    looked.extend(of_disks(disks.look(DISK_WAIT).await));
    looked.extend(kept);
    of(looked)
}

fn of(looked: Vec<Looked>) -> Survey {
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
    use super::super::looked::tests::{EXTRA, valid};
    use super::*;

    #[test]
    fn the_first_place_is_in_force_and_one_that_cannot_be_used_is_only_named() {
        let esp = || Looked::new(Source::Esp, Ok(Some(valid(&[]))));
        let smbios = || Looked::new(Source::Smbios, Ok(Some(valid(EXTRA))));
        let survey = of(vec![esp(), smbios()]);
        assert_eq!(survey.loaded.found.as_ref().unwrap().1, Source::Esp);
        assert_eq!(survey.filled, [Source::Esp, Source::Smbios]);
        assert!(!survey.outranks_esp());

        let broken = Looked::new(Source::FwCfg, Ok(Some(b"x".to_vec())));
        let survey = of(vec![broken, esp()]);
        assert_eq!(survey.loaded.found, None, "a later place does not take its turn");
        assert!(survey.fault.as_ref().unwrap().contains("fw_cfg"), "{survey:?}");
        assert!(survey.outranks_esp());
    }

    #[tokio::test]
    async fn a_machine_with_nothing_says_where_there_is_nothing() {
        let root = tempfile::tempdir().unwrap();
        let tree = polis_base::files::Root::at(root.path());
        let config = Config {
            sys: root.path().join("sys"),
            dev: root.path().join("dev"),
            esp: tree.esp.parameters,
            given: tree.esp.given_parameters,
            kept: tree.esp.user_data,
            metadata: super::super::METADATA_ADDRESS,
            metadata_v6: super::super::metadata_v6,
        };
        let survey = survey(&config).await;
        assert_eq!((survey.loaded.found, survey.fault), (None, None));
        assert!(survey.filled.is_empty() && survey.loaded.tried.len() >= 3);
    }
}
