//! The disks of a mirror among those of the machine: each is read apart from the others, and for a
//! bounded time, since any disk of the machine may hang.
//!
//! Invariants:
//! - A disk that does not answer is not there, for now. Its read goes on, and is not repeated.
//! - A disk with two ways to it is one disk.

use std::collections::BTreeMap;
use std::time::Duration;

use futures::FutureExt as _;
use futures::future::{BoxFuture, join_all};
use polis_runtime::supervisor::blocking;
use tokio::time::timeout;

use super::Config;
use super::disks::{Disk, sequence};
use crate::install::disks::{self, Disk as Described};

/// How long a disk may take to say what it is: a few blocks of it.
const READ_MAX: Duration = Duration::from_secs(5);

/// The name of a disk, and the kernel's number of it: another one may get the name.
type Key = (String, Option<u64>);

/// Disks that are being read.
#[derive(Default)]
pub(super) struct Reads {
    pending: BTreeMap<Key, BoxFuture<'static, Option<Disk>>>,
}

impl Reads {
    /// The disks of any mirror beside the disk `own`; one that cannot be read is not among them.
    pub(super) async fn find(&mut self, config: &Config, own: &str) -> Vec<Disk> {
        let (sys, own) = (config.sys.clone(), own.to_owned());
        let listed = blocking(move || {
            let names = others(&disks::list(&sys, &own), &own);
            let key = |name: String| {
                let number = sequence(&sys, &name);
                (name, number)
            };
            names.into_iter().map(key).collect::<Vec<Key>>()
        });
        let reads: Vec<_> = listed
            .await
            .into_iter()
            .map(|key| {
                let (sys, path) = (config.sys.clone(), config.dev.join(&key.0));
                let read = self.pending.remove(&key).unwrap_or_else(|| {
                    blocking(move || Disk::read(&sys, &path).ok().flatten()).boxed()
                });
                answer(key, read)
            })
            .collect();
        // What is left was pulled.
        self.pending.clear();
        let mut found = Vec::new();
        for (key, answer) in join_all(reads).await {
            match answer {
                Ok(disk) => found.extend(disk),
                Err(read) => drop(self.pending.insert(key, read)),
            }
        }
        // A name may be that of another disk by now.
        found.retain(|disk| disk.is_there(&config.sys));
        found
    }
}

/// What a disk says, or the read that goes on.
async fn answer<T>(
    key: Key,
    mut read: BoxFuture<'static, T>,
) -> (Key, Result<T, BoxFuture<'static, T>>) {
    let answer = timeout(READ_MAX, &mut read).await;
    (key, answer.map_err(|_elapsed| read))
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

    #[tokio::test(start_paused = true)]
    async fn a_read_that_hangs_ends_in_time_and_goes_on() {
        let slow = async {
            tokio::time::sleep(READ_MAX + Duration::from_secs(1)).await;
            7
        };
        let key = || ("vdb".to_owned(), Some(3));
        let (_, hangs) = answer(key(), slow.boxed()).await;
        let Err(read) = hangs else { panic!("it answered") };
        let (_, later) = answer(key(), read).await;
        assert!(matches!(later, Ok(7)));
    }
}
