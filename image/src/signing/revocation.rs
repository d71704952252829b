//! The programs that an owner has revoked: firmware with the owner's keys starts them no more.
//!
//! The list is the file `dbx.auth` of a folder of keys, an update of the firmware's variable dbx
//! that the exchange key signed. It replaces the list that a machine has, so it has every program
//! that was ever revoked, and each new one has a later time, as firmware demands.

use std::{
    collections::BTreeSet,
    time::{Duration, SystemTime},
};

use uuid::Uuid;
use x509_cert::der::DateTime;

use super::{
    Error,
    identity::Identity,
    sign,
    variables::{self, DBX},
};

/// The programs that are revoked, by the hashes that firmware compares (Authenticode, SHA-256).
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Revoked {
    /// The time of the list, an `EFI_TIME`.
    time: [u8; 16],
    hashes: BTreeSet<[u8; 32]>,
}

impl Default for Revoked {
    fn default() -> Self {
        Self { time: variables::TIME, hashes: BTreeSet::new() }
    }
}

impl Revoked {
    /// Reads the file of this owner.
    ///
    /// # Errors
    ///
    /// The first fault of the file, in words.
    pub(super) fn parse(update: &[u8], owner: &Uuid) -> Result<Self, &'static str> {
        let (time, hashes) = variables::read_hashes(update, owner)?;
        seconds(&time).ok_or("its time is impossible")?;
        Ok(Self { time, hashes: hashes.into_iter().collect() })
    }

    /// Adds programs; returns how many of them are new.
    pub(super) fn add(&mut self, programs: &[[u8; 32]]) -> usize {
        programs.iter().filter(|hash| self.hashes.insert(**hash)).count()
    }

    /// Whether a program is revoked.
    pub(super) fn has(&self, program: &[u8; 32]) -> bool {
        self.hashes.contains(program)
    }

    /// The hashes, in their order.
    pub(super) fn hashes(&self) -> impl Iterator<Item = &[u8; 32]> {
        self.hashes.iter()
    }

    /// The file. Its time is `now`, or the next second after that of the list before.
    pub(super) fn update(
        &mut self,
        exchange: &Identity,
        owner: &Uuid,
        now: SystemTime,
    ) -> Result<Vec<u8>, Error> {
        let now = now.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let before = seconds(&self.time).unwrap_or_default();
        let time = DateTime::from_unix_duration(now.max(before + Duration::from_secs(1)));
        self.time = efi(&time.map_err(sign)?);
        let list = variables::hashes(&self.hashes, owner)?;
        DBX.update(&list, &self.time, exchange)
    }
}

/// `EFI_TIME` of a moment, in UTC; the fraction of a second must be zero in an update.
fn efi(time: &DateTime) -> [u8; 16] {
    let mut efi = [0; 16];
    efi[..2].copy_from_slice(&time.year().to_le_bytes());
    let parts = [time.month(), time.day(), time.hour(), time.minutes(), time.seconds()];
    efi[2..7].copy_from_slice(&parts);
    efi
}

/// The time since 1970 of an `EFI_TIME`.
fn seconds(efi: &[u8; 16]) -> Option<Duration> {
    let [low, high, month, day, hour, minutes, seconds, ..] = *efi;
    let year = u16::from_le_bytes([low, high]);
    let time = DateTime::new(year, month, day, hour, minutes, seconds).ok()?;
    Some(time.unix_duration())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::signing::{Purpose, keys};

    #[test]
    fn a_list_reads_back_and_each_new_one_is_later() {
        let exchange = keys().identity(Purpose::Exchange).unwrap();
        let owner = Uuid::from_bytes([7; 16]);
        let mut list = Revoked::default();
        assert_eq!(list.add(&[[1; 32], [2; 32], [1; 32]]), 2);
        // 2026-11-27 04:05:06 UTC.
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(1_795_752_306);
        let first = list.update(&exchange, &owner, now).unwrap();
        assert_eq!(first[..8], [0xea, 0x07, 11, 27, 4, 5, 6, 0]);
        let mut read = Revoked::parse(&first, &owner).unwrap();
        assert_eq!(read, list);
        assert!(read.has(&[2; 32]) && !read.has(&[3; 32]));
        // Also where the clock of the host stands still, or in the past.
        assert_eq!(read.add(&[[2; 32], [3; 32]]), 1);
        let second = read.update(&exchange, &owner, SystemTime::UNIX_EPOCH).unwrap();
        assert_eq!(second[..8], [0xea, 0x07, 11, 27, 4, 5, 7, 0]);
        assert_eq!(Revoked::parse(&second, &owner).unwrap().hashes().count(), 3);
        let foreign = Revoked::parse(&second, &Uuid::from_bytes([8; 16]));
        assert_eq!(foreign.unwrap_err(), "it is of another owner");
        for end in 0..second.len() {
            assert!(Revoked::parse(&second[..end], &owner).is_err(), "{end}");
        }
    }
}
