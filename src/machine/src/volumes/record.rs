//! The record of the volumes that this node has made: which partition each is, and its key.
//!
//! The record lies on the data partition, so the keys are as safe as that partition, and end
//! with it.
//!
//! Invariants:
//! - Keys are wiped from memory with their last copy, and print as `…`.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use polis_wire::parameters::VolumeName;
use serde::{Deserialize, Serialize, Serializer};
use uuid::Uuid;
use zeroize::Zeroizing;

use crate::storage::Kind;
use crate::storage::key::{Keys, Passphrase, SIZE};
use crate::storage::table::new_id;
use polis_base::files::{self, File};
use polis_base::hex;

/// More than an entry takes as JSON: its name has 32 bytes, its GUID 36, its key 64.
const ENTRY_MAX: usize = 512;

/// Why the record cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file cannot be read or written.
    #[error(transparent)]
    File(#[from] files::Error),
    /// Its content is not a record.
    #[error("the record of volumes is damaged")]
    Damaged(#[source] serde_json::Error),
}

/// The key of a volume, in hexadecimal.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "String")]
struct Key(#[serde(serialize_with = "plain")] Zeroizing<String>);

impl From<String> for Key {
    fn from(text: String) -> Self {
        Self(Zeroizing::new(text))
    }
}

fn plain<S: Serializer>(text: &Zeroizing<String>, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(text)
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("…")
    }
}

/// A volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Entry {
    name: String,
    /// The GUID of its partition.
    #[serde(with = "id")]
    pub(super) partition: Uuid,
    /// How it is protected.
    pub(super) kind: Kind,
    key: Key,
    /// Whether it was made to the end: then nothing ever makes it again.
    pub(super) whole: bool,
}

impl Entry {
    /// A new volume with a key and an identity of its own.
    pub(super) fn new(name: &VolumeName, kind: Kind) -> Self {
        let key = Zeroizing::new(rand::random::<[u8; SIZE]>());
        Self {
            name: name.to_string(),
            partition: new_id(),
            kind,
            key: Key(Zeroizing::new(hex::encode(&key[..]))),
            whole: false,
        }
    }

    /// Its key; `None` for a damaged one.
    pub(super) fn keys(&self) -> Option<Keys> {
        let bytes = Zeroizing::new(hex::decode(&self.key.0)?);
        let bytes: [u8; SIZE] = bytes.as_slice().try_into().ok()?;
        let passphrase = Passphrase::new(Zeroizing::new(bytes));
        Some(Keys { passphrase, recovery: None })
    }
}

/// A GUID as text.
mod id {
    use serde::{Deserialize as _, Deserializer, Serializer, de::Error as _};
    use uuid::Uuid;

    pub(super) fn serialize<S: Serializer>(id: &Uuid, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(id)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(source: D) -> Result<Uuid, D::Error> {
        String::deserialize(source)?.parse().map_err(D::Error::custom)
    }
}

/// The content of the record.
fn encode(entries: &[Entry]) -> Result<Zeroizing<Vec<u8>>, Error> {
    // Allocated once: the former buffers of a growing vector are not wiped.
    let mut bytes = Zeroizing::new(Vec::with_capacity(ENTRY_MAX * (entries.len() + 1)));
    serde_json::to_writer(&mut *bytes, entries).map_err(Error::Damaged)?;
    Ok(bytes)
}

/// The record; cheap to clone. Every method blocks.
#[derive(Clone, Debug)]
pub(super) struct Record {
    file: File,
    /// One writer at a time.
    turn: Arc<Mutex<()>>,
}

impl Record {
    pub(super) fn new(file: File) -> Self {
        Self { file, turn: Arc::default() }
    }

    fn entries(&self) -> Result<Vec<Entry>, Error> {
        let Some(bytes) = self.file.read()?.map(Zeroizing::new) else { return Ok(Vec::new()) };
        serde_json::from_slice(&bytes).map_err(Error::Damaged)
    }

    /// The names of all volumes.
    pub(super) fn names(&self) -> Result<Vec<VolumeName>, Error> {
        Ok(self.entries()?.iter().filter_map(|entry| entry.name.parse().ok()).collect())
    }

    /// The volume with this name.
    pub(super) fn get(&self, name: &VolumeName) -> Result<Option<Entry>, Error> {
        Ok(self.entries()?.into_iter().find(|entry| entry.name == name.as_str()))
    }

    /// Keeps a volume, in place of one with its name.
    pub(super) fn put(&self, entry: &Entry) -> Result<(), Error> {
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let mut entries = self.entries()?;
        entries.retain(|other| other.name != entry.name);
        entries.push(entry.clone());
        Ok(self.file.write(&encode(&entries)?)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_volume_is_read_as_it_was_kept_and_its_key_is_not_printed() {
        let base = tempfile::tempdir().unwrap();
        let record = Record::new(File::private(base.path().join("volumes.json")));
        let (db, log): (VolumeName, VolumeName) = ("db".parse().unwrap(), "log".parse().unwrap());
        assert_eq!(record.get(&db).unwrap(), None);
        let first = Entry::new(&db, Kind::Authenticated);
        let second = Entry::new(&log, Kind::Encrypted);
        assert_ne!(first.key, second.key);
        record.put(&first).unwrap();
        record.put(&second).unwrap();
        let whole = Entry { whole: true, ..first.clone() };
        record.put(&whole).unwrap();
        assert_eq!(record.get(&db).unwrap(), Some(whole));
        assert_eq!(record.names().unwrap().len(), 2);
        let shown = format!("{first:?} {:?}", first.keys());
        assert!(!shown.contains(first.key.0.as_str()), "{shown}");
        assert!(first.keys().is_some());
    }

    #[test]
    fn keys_are_encoded_into_one_buffer() {
        let entry = Entry::new(&"d".repeat(32).parse().unwrap(), Kind::Authenticated);
        for count in [1, 16] {
            let bytes = encode(&vec![entry.clone(); count]).unwrap();
            assert!(bytes.len() <= ENTRY_MAX * count, "{} bytes", bytes.len());
            assert_eq!(bytes.capacity(), ENTRY_MAX * (count + 1));
        }
    }

    #[test]
    fn a_damaged_record_is_an_error_and_stays() {
        let base = tempfile::tempdir().unwrap();
        let file = File::private(base.path().join("volumes.json"));
        file.write(b"[{").unwrap();
        let record = Record::new(file.clone());
        let entry = Entry::new(&"db".parse().unwrap(), Kind::Insecure);
        assert!(matches!(record.put(&entry), Err(Error::Damaged(_))));
        assert_eq!(file.read().unwrap().unwrap(), b"[{");
    }
}
