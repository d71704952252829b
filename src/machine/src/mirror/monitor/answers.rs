//! Whether the disks below the device answer: names one that owes an answer, within seconds.
//!
//! The kernel acknowledges a write once both disks have it. So writes wait for a disk that stalls,
//! and the kernel names none of the two. It goes on with the other one when the driver of the disk
//! reports an error: after its own timeouts, some minutes for SATA, SAS and NVMe, never for a
//! virtual disk, and at once for a disk that is pulled.
//!
//! What this module does not do: make the kernel drop a disk. The kernel has no command for that,
//! and the writes would still wait: the driver of the disk owes its answer.

use std::path::Path;
use std::time::Duration;

use crate::mirror::disks::Disk;
use crate::storage::detached::Key;
use crate::storage::stall::{SLOW, Watched};

/// The disks that are asked.
#[derive(Debug, Default)]
pub(super) struct Answers(Vec<Asked>);

/// A disk that is asked.
#[derive(Debug)]
struct Asked {
    key: Key,
    disk: Watched,
}

/// Disks that owe an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Silent {
    /// The kernel's names of them.
    pub(super) disks: Vec<String>,
    /// Since when, by the uptime.
    pub(super) since: Duration,
}

impl Answers {
    /// Looks at these disks, which sysfs at `sys` describes; returns those that have owed an answer
    /// for too long.
    pub(super) fn look(&mut self, sys: &Path, disks: &[&Disk], now: Duration) -> Option<Silent> {
        let keys: Vec<Key> = disks.iter().map(|disk| (disk.name(), disk.sequence)).collect();
        self.0.retain(|asked| keys.contains(&asked.key));
        for (disk, key) in disks.iter().zip(keys) {
            if !self.0.iter().any(|asked| asked.key == key) {
                self.0.push(Asked { key, disk: Watched::of(sys, &disk.path) });
            }
        }
        let owe = |asked: &mut Asked| {
            let since = asked.disk.look(now)?;
            (now.saturating_sub(since) >= SLOW).then(|| (asked.key.0.clone(), since))
        };
        let (disks, since): (Vec<_>, Vec<_>) = self.0.iter_mut().filter_map(owe).unzip();
        let since = since.into_iter().min()?;
        Some(Silent { disks, since })
    }
}

impl Silent {
    /// For people: what waits, since when, and what helps. `hung` is the time after which the node
    /// stops.
    pub(super) fn text(&self, hung: Duration) -> String {
        let (since, hung) = (self.since.as_secs(), hung.as_secs());
        let disks = self.disks.join(" and ");
        let helps = match &*self.disks {
            [_] => "check the disk and its cable, or pull it: the node goes on with the other one",
            _ => "check their cables and their controller",
        };
        format!(
            "{disks} of the mirror: no answer since second {since} of this boot, and every write \
             waits for it; {helps}; the node stops after {hung} s without an answer"
        )
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::fs;

    use super::super::super::disks::tests::source;
    use super::*;

    fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    /// What the kernel counts of a disk.
    pub(in super::super) fn count(sys: &Path, disk: &str, done: u64, waiting: u64) {
        let folder = sys.join("block").join(disk);
        fs::create_dir_all(&folder).unwrap();
        let text = format!("{done} 0 0 0 0 0 0 0 {waiting} 0 0");
        fs::write(folder.join("stat"), text).unwrap();
    }

    /// Both disks of a mirror, neither of which has a device: a flush ends with an error.
    pub(in super::super) fn both(folder: &Path) -> [Disk; 2] {
        ["vda", "vdb"].map(|name| Disk { path: folder.join(name), ..source() })
    }

    /// Waits for the threads that flush.
    pub(in super::super) fn settle(answers: &mut Answers, now: Duration) {
        for asked in &mut answers.0 {
            while asked.disk.flushes.look(now).is_some() {
                std::thread::yield_now();
            }
        }
    }

    #[test]
    fn a_disk_that_owes_an_answer_is_named_within_seconds_with_what_helps() {
        let sys = tempfile::tempdir().unwrap();
        let [vda, vdb] = both(sys.path());
        let mut answers = Answers::default();
        let mut look = |second| {
            let found = answers.look(sys.path(), &[&vda, &vdb], at(second));
            settle(&mut answers, at(second));
            found
        };
        count(sys.path(), "vda", 5, 0);
        count(sys.path(), "vdb", 7, 3);
        assert_eq!([look(100), look(108)], [None, None]);
        // The other one answers: it has a request since this moment.
        count(sys.path(), "vda", 9, 1);
        let silent = look(116).unwrap();
        assert_eq!(silent, Silent { disks: vec!["vdb".to_owned()], since: at(100) });
        let text = silent.text(at(600));
        assert!(text.starts_with("vdb of the mirror: no answer since second 100"), "{text}");
        assert!(text.contains("pull it") && text.contains("after 600 s"), "{text}");
        // Where neither answers, the text does not ask for one to be pulled.
        look(124);
        let both = look(132).unwrap();
        assert_eq!((both.disks.len(), both.since), (2, at(100)));
        assert!(!both.text(at(600)).contains("pull it"));
        count(sys.path(), "vdb", 8, 2);
        assert_eq!(look(133).unwrap().disks, ["vda"]);
        count(sys.path(), "vda", 9, 0);
        assert_eq!(look(134), None);
    }

    #[test]
    fn a_disk_that_is_exchanged_owes_no_answer_of_the_one_before() {
        let sys = tempfile::tempdir().unwrap();
        let [vda, vdb] = both(sys.path());
        let mut answers = Answers::default();
        count(sys.path(), "vdb", 7, 3);
        for second in [0, 8] {
            answers.look(sys.path(), &[&vda, &vdb], at(second));
            settle(&mut answers, at(second));
        }
        let other = Disk { sequence: Some(9), ..vdb };
        assert_eq!(answers.look(sys.path(), &[&vda, &other], at(16)), None);
        assert_eq!(answers.0.len(), 2);
    }
}
