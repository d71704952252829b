//! The keepers of a share of the cluster's half of the disk's key, for a machine that joins
//! without help.
//!
//! ```text
//! keeper    the share is                            a pulled disk  a lost board
//! -------------------------------------------------------------------------------
//! TPM       on the ESP, sealed                      stays shut     needs recovery
//! firmware  in a variable of the firmware           stays shut     needs recovery
//! disk      on the ESP, as it is, with a warning    CAN BE READ    does not matter
//! ```
//!
//! The strongest keeper of the machine stores it. A share has two places: the one in force,
//! and the one that a change of keys is about to put in force.
//!
//! Invariants:
//! - A share that the TPM keeps replaces another only after the TPM has opened it, and every
//!   share is read back before anything depends on it.
//! - A share is never in two keepers: storing it in one removes it from the other.
//!
//! What this module does not do: decide whether to store a share (`service`).

use std::path::Path;

use polis_proto::v1;
use prost::Message as _;
use tracing::{info, warn};
use zeroize::Zeroizing;

use super::keys::{Half, Secrets};
use super::sealer::{Guarded, Sealer, blob_message, blob_value};
use crate::cluster::Error;
use crate::cluster::record::{self, Damage, Magic, Protection};
use polis_base::files::{self, Esp, File};
use polis_base::sys::efivar::Variable;

const MAGIC: Magic = Magic(*b"polis cs");

/// The keeper of a share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keeper {
    /// The TPM.
    Tpm,
    /// A variable of the firmware.
    Firmware,
    /// The EFI system partition: a person with the disk has the share.
    Disk,
}

impl Keeper {
    /// Its name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Tpm => "TPM",
            Self::Firmware => "firmware",
            Self::Disk => "disk",
        }
    }
}

/// Which share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::cluster) enum Slot {
    /// The one in force.
    Current,
    /// The one that a change of keys puts in force.
    Next,
}

/// The places of this machine. Calls block.
#[derive(Clone, Debug)]
pub(in crate::cluster) struct Shares {
    sealer: Sealer,
    places: [(File, Variable); 2],
}

impl Shares {
    pub(in crate::cluster) fn new(sealer: Sealer, esp: &Esp, efivars: &Path) -> Self {
        let variable = |name| Variable::new(efivars, name);
        Self {
            sealer,
            places: [
                (esp.cold_start.clone(), variable("PolisColdStart")),
                (esp.cold_start_next.clone(), variable("PolisColdStartNext")),
            ],
        }
    }

    /// Stores `share`, beside secrets that are sealed like `like`.
    pub(in crate::cluster) fn keep(
        &self,
        slot: Slot,
        like: &Guarded<Secrets>,
        share: &Half,
    ) -> Result<Keeper, Error> {
        let (file, variable) = self.place(slot);
        let guarded = self.sealer.hide_share(like, share)?;
        if self.sealer.open_share(&guarded)? != *share {
            return Err(Error::ShareNotKept(Keeper::Tpm.name()));
        }
        let record = Zeroizing::new(to_record(&guarded));
        let keeper = match &guarded {
            Guarded::Tpm(_) => Keeper::Tpm,
            Guarded::Plain(_) if variable.possible() => match variable.write(&record) {
                Ok(()) => Keeper::Firmware,
                Err(error) => {
                    let error = &error as &dyn std::error::Error;
                    warn!(error, "the firmware does not store the key of the disk");
                    Keeper::Disk
                }
            },
            Guarded::Plain(_) => Keeper::Disk,
        };
        match keeper {
            Keeper::Firmware => file.erase()?,
            Keeper::Tpm | Keeper::Disk => {
                file.write(&record)?;
                forget(variable);
            }
        }
        if self.find(slot)? != Some((guarded, keeper)) {
            return Err(Error::ShareNotKept(keeper.name()));
        }
        info!(keeper = keeper.name(), "the cluster's half of the disk's key is stored");
        Ok(keeper)
    }

    /// The share, if one is stored.
    pub(in crate::cluster) fn fetch(&self, slot: Slot) -> Result<Option<(Half, Keeper)>, Error> {
        let Some((guarded, keeper)) = self.find(slot)? else { return Ok(None) };
        Ok(Some((self.sealer.open_share(&guarded)?, keeper)))
    }

    /// The share as it is stored.
    pub(in crate::cluster) fn find(
        &self,
        slot: Slot,
    ) -> Result<Option<(Guarded<Half>, Keeper)>, Error> {
        let (file, variable) = self.place(slot);
        let record = match file.read() {
            Err(files::Error::Damaged { .. }) => Some(Err(Damage::Checksum)),
            record => record?.map(|record| from_record(&Zeroizing::new(record))),
        };
        if let Some(record) = record {
            match record {
                Ok(guarded) => {
                    let keeper = if guarded.is_sealed() { Keeper::Tpm } else { Keeper::Disk };
                    return Ok(Some((guarded, keeper)));
                }
                Err(damage) => {
                    warn!(file = %file.path().display(), "the share is damaged: {damage}");
                }
            }
        }
        match variable.read() {
            Ok(None) => Ok(None),
            Ok(Some(record)) => match from_record(&Zeroizing::new(record)) {
                Ok(guarded) => Ok(Some((guarded, Keeper::Firmware))),
                Err(damage) => {
                    warn!("the share in the firmware is damaged: {damage}");
                    Ok(None)
                }
            },
            Err(error) => {
                let error = &error as &dyn std::error::Error;
                warn!(error, "cannot read the variables of the firmware");
                Ok(None)
            }
        }
    }

    /// Removes the share completely from the ESP and from the firmware.
    pub(in crate::cluster) fn forget(&self, slot: Slot) -> Result<(), Error> {
        let (file, variable) = self.place(slot);
        file.erase()?;
        forget(variable);
        Ok(())
    }

    fn place(&self, slot: Slot) -> &(File, Variable) {
        let [current, next] = &self.places;
        match slot {
            Slot::Current => current,
            Slot::Next => next,
        }
    }
}

fn forget(variable: &Variable) {
    if let Err(error) = variable.remove() {
        let error = &error as &dyn std::error::Error;
        warn!(error, "the firmware did not delete a share");
    }
}

fn to_record(share: &Guarded<Half>) -> Zeroizing<Vec<u8>> {
    let (protection, message) = match share {
        Guarded::Plain(share) => (
            Protection::Plain,
            v1::ColdStartShare { cluster_unlock_key: share.bytes().to_vec(), sealed: None },
        ),
        Guarded::Tpm(blob) => (
            Protection::Tpm,
            v1::ColdStartShare { cluster_unlock_key: Vec::new(), sealed: Some(blob_message(blob)) },
        ),
    };
    record::write(MAGIC, protection, &Zeroizing::new(message.encode_to_vec()))
}

fn from_record(record: &[u8]) -> Result<Guarded<Half>, Damage> {
    let (protection, payload) = record::read(MAGIC, record)?;
    let message =
        v1::ColdStartShare::decode(payload).map_err(|error| Damage::Content(error.to_string()))?;
    match (protection, message.sealed) {
        (Protection::Tpm, Some(sealed)) => Ok(Guarded::Tpm(blob_value(sealed))),
        (Protection::Plain, None) => {
            let half = Half::new(&message.cluster_unlock_key);
            let half = half.ok_or_else(|| Damage::Content("a share has 32 bytes".to_owned()))?;
            Ok(Guarded::Plain(half))
        }
        (Protection::Plain, Some(_)) | (Protection::Tpm, None) => {
            Err(Damage::Content("it has another protection than stated".to_owned()))
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::cluster::tests::{FakeTpm, half};
    use polis_base::files::Root;

    struct World {
        base: tempfile::TempDir,
        shares: Shares,
    }

    fn world(firmware: bool) -> World {
        let base = tempfile::tempdir().unwrap();
        let root = Root::at(base.path());
        root.esp.create().unwrap();
        let efivars = base.path().join("efivars");
        if firmware {
            std::fs::create_dir(&efivars).unwrap();
            std::fs::write(efivars.join("Boot0000-of-the-firmware"), b"").unwrap();
        }
        let sealer = Sealer::new(Arc::new(FakeTpm::default()), &efivars);
        let shares = Shares::new(sealer, &root.esp, &efivars);
        World { base, shares }
    }

    fn plain() -> Guarded<Secrets> {
        Guarded::Plain(Secrets { node: half(1), join: half(2), key: None })
    }

    /// Whether the share can be read from the disk.
    fn on_disk(world: &World, share: &Half) -> bool {
        let esp = world.base.path().join("esp/polis");
        std::fs::read_dir(esp).unwrap().any(|entry| {
            let content = std::fs::read(entry.unwrap().path()).unwrap();
            content.windows(32).any(|window| window == share.bytes())
        })
    }

    #[test]
    fn the_strongest_keeper_keeps_it_and_only_the_last_shows_it_on_the_disk() {
        let sealed = Sealer::new(Arc::new(FakeTpm::default()), Path::new("/"))
            .hide(
                polis_machine::parameters::TpmMode::Required,
                &Secrets { node: half(1), join: half(2), key: None },
            )
            .unwrap();
        for (firmware, like, keeper) in [
            (true, sealed, Keeper::Tpm),
            (true, plain(), Keeper::Firmware),
            (false, plain(), Keeper::Disk),
        ] {
            let world = world(firmware);
            assert_eq!(world.shares.keep(Slot::Current, &like, &half(7)).unwrap(), keeper);
            assert_eq!(world.shares.fetch(Slot::Current).unwrap(), Some((half(7), keeper)));
            assert_eq!(world.shares.fetch(Slot::Next).unwrap(), None);
            assert_eq!(on_disk(&world, &half(7)), keeper == Keeper::Disk);
            world.shares.forget(Slot::Current).unwrap();
            assert_eq!(world.shares.fetch(Slot::Current).unwrap(), None);
        }
    }

    #[test]
    fn a_share_moves_and_is_never_in_two_places() {
        let world = world(true);
        world.shares.keep(Slot::Current, &plain(), &half(7)).unwrap();
        let sealed = Sealer::new(Arc::new(FakeTpm::default()), Path::new("/"))
            .hide(
                polis_machine::parameters::TpmMode::Required,
                &Secrets { node: half(1), join: half(2), key: None },
            )
            .unwrap();
        world.shares.keep(Slot::Current, &sealed, &half(8)).unwrap();
        world.shares.places[0].0.erase().unwrap();
        assert_eq!(world.shares.fetch(Slot::Current).unwrap(), None);
    }

    #[test]
    fn a_damaged_share_is_ignored() {
        let world = world(false);
        world.shares.keep(Slot::Current, &plain(), &half(7)).unwrap();
        let file = &world.shares.places[0].0;
        file.write(b"noise").unwrap();
        assert_eq!(world.shares.fetch(Slot::Current).unwrap(), None);
        std::fs::write(file.path(), b"noise").unwrap();
        assert_eq!(world.shares.fetch(Slot::Current).unwrap(), None);
    }

    proptest::proptest! {
        #[test]
        fn a_valid_frame_of_arbitrary_bytes_is_refused_or_reads_back(
            payload in proptest::collection::vec(proptest::prelude::any::<u8>(), 0..200),
            bare in proptest::collection::vec(proptest::prelude::any::<u8>(), 0..200),
        ) {
            assert!(from_record(&bare).is_err());
            for protection in [Protection::Plain, Protection::Tpm] {
                // The checksum is good: an attacker with the disk can compute one.
                let record = record::write(MAGIC, protection, &payload);
                if let Ok(share) = from_record(&record) {
                    assert_eq!(share.is_sealed(), protection == Protection::Tpm);
                    assert!(from_record(&to_record(&share)).unwrap() == share);
                }
            }
        }
    }
}

#[cfg(test)]
#[path = "keeper_fuzz_tests.rs"]
mod fuzz_tests;
