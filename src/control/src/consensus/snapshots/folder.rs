//! The folder of the snapshots on the data partition.
//!
//! ```text
//! unfinished --flushed and checked--> NUMBER-SECONDS-REVISION.db --not of the newest 24--> removed
//!      \--left by a power cut: removed by the next look
//! ```
//!
//! All functions block.
//!
//! Invariants:
//! - A file counts only if its name is that of a snapshot and its content ends with its own
//!   SHA-256, read from the disk.
//! - A file with another name is never removed: a person put it there.
//!
//! What this module does not do: decide which ones go (`plan`).

use std::fs::File;
use std::io::{self, Read as _};
use std::path::PathBuf;

use tracing::{info, warn};

use super::plan::{Entry, Name};
use polis_base::files::{self, Dir};
use polis_base::{cause, sys};
use polis_wire::snapshot::Checksum;

/// The name of one that is not whole.
pub(super) const UNFINISHED: &str = "unfinished";

/// How much is read at a time.
const PIECE: usize = 1 << 20;

/// The content of the folder.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Found {
    /// The files with the name of a snapshot.
    pub(super) entries: Vec<Entry>,
    /// The files that do not count, each with the reason.
    pub(super) rejected: Vec<String>,
}

impl Found {
    /// Leaves out snapshots that go.
    pub(super) fn forget(&mut self, gone: &[Name]) {
        self.entries.retain(|entry| !gone.contains(&entry.name));
        let is_of = |text: &String, name: &Name| text.starts_with(&format!("{name}: "));
        self.rejected.retain(|text| !gone.iter().any(|name| is_of(text, name)));
    }
}

/// Looks at every file, and removes the rest of an attempt that was cut off.
pub(super) fn look(dir: &Dir) -> Result<Found, files::Error> {
    dir.create()?;
    let mut found = Found::default();
    for text in dir.names()? {
        if text == UNFINISHED {
            warn!("removing a snapshot of etcd that was cut off");
            dir.remove(UNFINISHED)?;
            continue;
        }
        let Some(name) = Name::parse(&text) else {
            found.rejected.push(format!("{text}: its name is not that of a snapshot"));
            continue;
        };
        let (bytes, damage) = match dir.open(&text) {
            Ok(Some(file)) => match sum(&file) {
                Ok(sum) => (sum.size(), (!sum.is_whole()).then(|| DAMAGED.to_owned())),
                Err(error) => (size(&file), Some(format!("cannot read it: {error}"))),
            },
            Ok(None) => continue,
            Err(error) => (0, Some(cause::line(&error))),
        };
        found.entries.push(Entry { name, bytes, sound: damage.is_none() });
        found.rejected.extend(damage.map(|damage| format!("{text}: {damage}")));
    }
    Ok(found)
}

const DAMAGED: &str = "it is damaged: its checksum does not match";

/// Reads a draft from the disk; returns its size if etcd's checksum is at its end.
pub(super) fn whole(dir: &Dir) -> Result<Option<u64>, files::Error> {
    let Some(file) = dir.open(UNFINISHED)? else { return Ok(None) };
    let sum = sum(&file).map_err(|error| files::Error::io("read", &unfinished(dir), error))?;
    Ok(sum.is_whole().then_some(sum.size()))
}

/// Removes snapshots.
pub(super) fn remove(dir: &Dir, names: &[Name]) -> Result<(), files::Error> {
    for name in names {
        dir.remove(&name.to_string())?;
        info!(file = %name, "removed an old snapshot of etcd");
    }
    Ok(())
}

/// Where a draft is.
fn unfinished(dir: &Dir) -> PathBuf {
    dir.path().join(UNFINISHED)
}

fn size(file: &File) -> u64 {
    file.metadata().map_or(0, |metadata| metadata.len())
}

/// The checksum of a whole file, which then leaves the memory.
fn sum(mut file: &File) -> io::Result<Checksum> {
    let mut checksum = Checksum::default();
    let mut piece = vec![0; PIECE];
    loop {
        match file.read(&mut piece)? {
            0 => break,
            count => checksum.add(&piece[..count]),
        }
    }
    sys::files::forget(file)?;
    Ok(checksum)
}

#[cfg(test)]
mod tests {
    use sha2::{Digest as _, Sha256};

    use super::*;

    fn dir(base: &tempfile::TempDir) -> Dir {
        files::Root::at(base.path()).data.etcd.snapshots
    }

    fn snapshot(content: &[u8]) -> Vec<u8> {
        [content, &Sha256::digest(content)].concat()
    }

    #[test]
    fn only_whole_snapshots_count_and_the_rest_of_a_power_cut_goes() {
        let base = tempfile::tempdir().unwrap();
        let dir = dir(&base);
        assert_eq!(look(&dir).unwrap(), Found::default(), "the folder is made");
        let content = vec![7; 3 * PIECE + 5];
        let names = [1, 2, 3, 4].map(|number| Name { number, at: 9, revision: 8 });
        let place = |name: &str| dir.path().join(name);
        let whole = snapshot(&content);
        std::fs::write(place(&names[0].to_string()), &whole).unwrap();
        std::fs::write(place(&names[1].to_string()), &whole[..whole.len() - 1]).unwrap();
        let mut flipped = whole.clone();
        flipped[PIECE] ^= 1;
        std::fs::write(place(&names[2].to_string()), &flipped).unwrap();
        std::os::unix::fs::symlink(names[0].to_string(), place(&names[3].to_string())).unwrap();
        std::fs::write(place(UNFINISHED), &whole).unwrap();
        std::fs::write(place("notes.txt"), "a person's").unwrap();
        let mut found = look(&dir).unwrap();
        let sound: Vec<_> = found.entries.iter().map(|entry| entry.sound).collect();
        assert_eq!(sound, [true, false, false, false]);
        assert_eq!(found.entries[0].bytes, whole.len() as u64);
        assert_eq!(found.rejected.len(), 4, "{:?}", found.rejected);
        assert_eq!(found.rejected[0], format!("{}: {DAMAGED}", names[1]));
        assert_eq!(found.rejected[3], "notes.txt: its name is not that of a snapshot");
        assert!(!place(UNFINISHED).exists() && place("notes.txt").exists());
        found.forget(&names[1..]);
        assert_eq!((found.entries.len(), found.rejected.len()), (1, 1));
        remove(&dir, &names).unwrap();
        assert_eq!(dir.names().unwrap(), ["notes.txt"]);
    }

    #[test]
    fn a_draft_is_read_from_the_disk_before_it_gets_its_name() {
        let base = tempfile::tempdir().unwrap();
        let dir = dir(&base);
        look(&dir).unwrap();
        assert_eq!(whole(&dir).unwrap(), None);
        let content = snapshot(b"content");
        let mut draft = dir.draft(UNFINISHED).unwrap();
        draft.write(&content[..10]).unwrap();
        assert_eq!(whole(&dir).unwrap(), None);
        draft.write(&content[10..]).unwrap();
        draft.flush().unwrap();
        assert_eq!(whole(&dir).unwrap(), Some(content.len() as u64));
        let name = Name { number: 1, at: 2, revision: 3 };
        draft.keep(&name.to_string()).unwrap();
        let found = look(&dir).unwrap();
        assert_eq!((found.entries.len(), found.rejected.len()), (1, 0));
        assert_eq!(found.entries[0], Entry { name, bytes: content.len() as u64, sound: true });
    }
}
