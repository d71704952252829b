//! The disks of a mirror among those of the machine: each is read apart from the others, and for a
//! bounded time, since any disk of the machine may hang (`apart`).
//!
//! Invariants:
//! - A disk that does not answer is not there, for now. Its read goes on, and is not repeated.
//! - A disk with two ways to it is one disk.

use futures::future::join_all;
use polis_runtime::supervisor::blocking;

use super::Config;
use super::disks::Disk;
use crate::install::disks::{self, Disk as Described, Disks};
use crate::storage::apart::{self, Key, Pending, apart};

/// Disks that are being read.
#[derive(Default)]
pub(super) struct Reads {
    /// All disks of the machine, to select one.
    pub(super) all: Disks,
    pending: Pending<Key, Option<Disk>>,
}

impl Reads {
    /// The disks of any mirror beside the disk `own`; one that cannot be read is not among them.
    pub(super) async fn find(&mut self, config: &Config, own: &str) -> Vec<Disk> {
        let (sys, own) = (config.sys.clone(), own.to_owned());
        let listed = blocking(move || {
            let names = others(&disks::unasked(&sys, &own), &own);
            names.into_iter().map(|name| apart::key(&sys, name)).collect::<Vec<Key>>()
        });
        let listed = listed.await;
        // What else is being read was pulled.
        self.pending.keep(&listed);
        let reads: Vec<_> = listed
            .into_iter()
            .map(|key| {
                let (sys, path) = (config.sys.clone(), config.dev.join(&key.0));
                self.pending.answer(key, || apart(move || Disk::read(&sys, &path).ok().flatten()))
            })
            .collect();
        let mut found: Vec<Disk> = join_all(reads).await.into_iter().flatten().flatten().collect();
        // A name may be that of another disk by now.
        found.retain(|disk| disk.is_there(&config.sys));
        found
    }
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
