//! The disks of a mirror among those of the machine: each is read apart from the others, and for a
//! bounded time, since any disk of the machine may hang (`storage::detached`).
//!
//! Invariants:
//! - A disk that does not answer is not there, for now. Its read goes on, and is not repeated.
//! - A disk that fails is not there, either, and its error is known.
//! - A disk with two ways to it is one disk.

use std::collections::BTreeMap;
use std::io;

use futures::future::join_all;
use polis_runtime::supervisor::blocking;

use super::disks::Disk;
use super::{Config, Error};
use crate::install::disks::{self, Disk as Described, Disks};
use crate::storage::detached::{self, Key, Pending, detached};
use crate::storage::table;
use polis_base::cause;

/// Disks that are being read.
#[derive(Default)]
pub(super) struct Reads {
    /// All disks of the machine, to select one.
    pub(super) all: Disks,
    /// The disks that failed the last time, each with the reason.
    failing: BTreeMap<String, String>,
    pending: Pending<Key, Answer>,
}

/// A disk of a mirror, or why the disk fails; `None` for any other.
type Answer = Option<Result<Disk, String>>;

impl Reads {
    /// The disks of any mirror beside the disk `own`; one that cannot be read is not among them.
    pub(super) async fn find(&mut self, config: &Config, own: &str) -> Vec<Disk> {
        let (sys, own) = (config.sys.clone(), own.to_owned());
        let listed = blocking(move || {
            let names = others(&disks::unasked(&sys, &own), &own);
            names.into_iter().map(|name| detached::key(&sys, name)).collect::<Vec<Key>>()
        });
        let listed = listed.await;
        // What else is being read was pulled.
        self.pending.keep(&listed);
        let reads: Vec<_> = listed
            .iter()
            .map(|key| {
                let (sys, path) = (config.sys.clone(), config.dev.join(&key.0));
                let read = move || outcome(Disk::read(&sys, &path));
                self.pending.answer(key.clone(), || detached(read))
            })
            .collect();
        let answers = join_all(reads).await;
        self.failing.clear();
        let mut found = Vec::new();
        for ((name, _number), answer) in listed.into_iter().zip(answers) {
            match answer.flatten() {
                Some(Ok(disk)) => found.push(disk),
                Some(Err(why)) => drop(self.failing.insert(name, why)),
                None => {}
            }
        }
        // A name may be that of another disk by now.
        found.retain(|disk| disk.is_there(&config.sys));
        found
    }

    /// Why a disk is missing that may be one of a mirror.
    pub(super) fn fault(&self) -> Option<Error> {
        let (disk, why) = self.failing.first_key_value()?;
        let why = format!("{why}; check it, or pull it");
        Some(Error::Unfit { disk: disk.clone(), why })
    }
}

/// What the read of a disk says of it.
fn outcome(read: Result<Option<Disk>, Error>) -> Answer {
    match read {
        Ok(disk) => disk.map(Ok),
        // It reads, and has another table or none.
        Err(Error::Table { source, .. }) if !matches!(source, table::Error::Io { .. }) => None,
        Err(Error::Disk { source, .. }) if is_of_a_reader(&source) => None,
        Err(error) => Some(Err(cause::line(&error))),
    }
}

/// Whether a disk is not opened because it is a reader without a card, or with one that a switch
/// protects: neither is a disk of a mirror, and neither fails.
fn is_of_a_reader(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOMEDIUM | libc::EROFS))
}

/// The names of all disks but `own`, each once.
fn others(all: &[Described], own: &str) -> Vec<String> {
    let mut known: Vec<&str> = Vec::new();
    let mut names = Vec::new();
    for disk in all.iter().filter(|disk| disk.name != own && !disk.medium) {
        if !disk.wwid.is_empty() && known.contains(&&*disk.wwid) {
            continue;
        }
        known.push(&disk.wwid);
        names.push(disk.name.clone());
    }
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_that_cannot_be_read_is_named_and_one_without_a_mirror_is_not() {
        let failing = || io::Error::from_raw_os_error(libc::EIO);
        let of_table = |source| outcome(Err(Error::Table { disk: "vdb".to_owned(), source }));
        let of_disk = |source| {
            let (operation, disk) = ("open", "vdb".to_owned());
            outcome(Err(Error::Disk { operation, disk, source }))
        };
        assert!(outcome(Ok(None)).is_none() && of_table(table::Error::TooSmall(7)).is_none());
        for of_a_reader in [libc::ENOMEDIUM, libc::EROFS] {
            assert!(of_disk(io::Error::from_raw_os_error(of_a_reader)).is_none());
        }
        let unread = of_table(table::Error::Io { operation: "read", source: failing() });
        let record = outcome(Err(Error::Record { disk: "vdb".to_owned() }));
        for answer in [unread, of_disk(failing()), record] {
            let why = answer.unwrap().unwrap_err();
            assert!(why.contains("vdb"), "{why}");
            let failing = BTreeMap::from([("vdb".to_owned(), why)]);
            let fault = Reads { failing, ..Reads::default() }.fault().unwrap().to_string();
            assert!(fault.contains("vdb") && fault.ends_with("or pull it"), "{fault}");
        }
        assert!(Reads::default().fault().is_none());
    }

    #[test]
    fn a_second_way_to_a_disk_is_left_out() {
        let disk = |name: &str, wwid: &str, medium| Described {
            name: name.to_owned(),
            wwid: wwid.to_owned(),
            medium,
            ..Described::default()
        };
        let all = [
            disk("sda", "naa.1", true),
            disk("sdb", "naa.1", true),
            disk("sdc", "naa.2", false),
            disk("sdd", "naa.2", false),
            disk("vda", "", false),
            disk("vdb", "", false),
        ];
        assert_eq!(others(&all, "sda"), ["sdc", "vda", "vdb"]);
    }
}
