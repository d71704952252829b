//! The audit log: the entry of a call, its hash in the chain, and the check of a whole log.
//!
//! ```text
//! entry 7           entry 8            head
//! previous: of 6    previous: of 7     number: 8
//! hash  ----------> hash  -----------> hash: of 8
//! ```
//!
//! The leader and the nodes make entries of the calls they are given, the leader hashes what it
//! writes, and the operator's tool checks what it reads, all by this module.
//!
//! Invariants:
//! - A hash covers every field of its entry, the hash of the entry before among them.
//!
//! The layer that makes entries of the calls of a service is in [`layer`].
//!
//! What this module does not do: sign. A person who can write etcd can make a whole new
//! chain; a [`Mark`] of the old one, kept elsewhere, shows that.

#[cfg(test)]
mod fuzz_tests;
pub mod layer;

use std::fmt;
use std::str::FromStr;
use std::time::UNIX_EPOCH;

use polis_proto::v1::{AuditEntry, AuditHead};
use prost::Message as _;
use sha2::{Digest as _, Sha256};
use tonic::Status;

use crate::identity::Fingerprint;
use crate::rpc::{Caller, Peer, REASON};
use polis_base::hex;
use polis_base::sys::clock;

/// Before what is hashed: no other hash of the cluster is over the same bytes.
const DOMAIN: &[u8] = b"polis audit entry 1\0";

/// The hash before the first entry.
pub const BEGINNING: [u8; 32] = [0; 32];

/// The call of an entry that counts refused calls of one caller, of any kind.
pub const OTHER_CALLS: &str = "other calls";

/// Every call of `NodeManagement`, and whether it is recorded. Programs that only read, of which
/// a console does so every second, would fill the log.
pub const NODE_CALLS: &[(&str, bool)] = &[
    ("AnnounceFirmwareUpdate", true),
    ("Attest", true),
    ("Console", false),
    ("Drain", true),
    ("FetchBundle", false),
    // The first half of `Attest`.
    ("GetAttestationKeys", false),
    ("GetFirewall", false),
    ("GetStatus", false),
    ("Logs", false),
    ("Reboot", true),
    ("Reset", true),
    ("Services", false),
    ("StoreBundle", true),
    ("Unlock", true),
    ("Update", true),
];

/// Whether a node records a call, by the `/package.Service/Method` of gRPC; one that is missing
/// from the table is recorded.
#[must_use]
pub fn is_recorded(path: &str) -> bool {
    let name = path.rsplit('/').next().unwrap_or(path);
    NODE_CALLS.iter().find(|(known, _)| *known == name).is_none_or(|(_, recorded)| *recorded)
}

/// The entry of a call that begins now, by `path`, the `/package.Service/Method` of gRPC.
#[must_use]
pub fn begun(caller: Option<&Caller>, path: &str) -> AuditEntry {
    let key = caller.and_then(|caller| match (&caller.certificate, &caller.peer) {
        (Some(certificate), _) => Some(certificate.key),
        (None, Peer::Key(key)) => Some(*key),
        (None, _) => None,
    });
    let now = clock::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    AuditEntry {
        time_unix_ms: i64::try_from(now.as_millis()).unwrap_or(i64::MAX),
        who: caller.map_or_else(|| Peer::None.to_string(), |caller| caller.peer.to_string()),
        key: key.map(|key| Fingerprint::of_key(&key).to_string()).unwrap_or_default(),
        from: caller.map(|caller| caller.address.ip().to_string()).unwrap_or_default(),
        call: path.rsplit('/').next().unwrap_or(path).to_owned(),
        ..AuditEntry::default()
    }
}

/// The keyword of a refusal, and its text.
#[must_use]
pub fn reason(status: &Status) -> String {
    let word = status.metadata().get(REASON).and_then(|word| word.to_str().ok());
    word.map_or_else(|| status.message().to_owned(), |word| format!("{word}: {}", status.message()))
}

/// The hash of an entry.
#[must_use]
pub fn hash(entry: &AuditEntry) -> [u8; 32] {
    let fields = AuditEntry { hash: Vec::new(), ..entry.clone() };
    let mut hash = Sha256::new();
    hash.update(DOMAIN);
    hash.update(fields.encode_to_vec());
    hash.finalize().into()
}

/// An entry by its number and its hash, `NUMBER:HASH`, which a person keeps outside the
/// cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark {
    /// The number of the entry.
    pub number: u64,
    /// Its hash.
    pub hash: [u8; 32],
}

impl fmt::Display for Mark {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.number, hex::encode(&self.hash))
    }
}

/// The text is not a mark.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a mark is NUMBER:HASH, with a hash of 64 digits, as `audit verify` prints it")]
pub struct InvalidMark;

impl FromStr for Mark {
    type Err = InvalidMark;

    fn from_str(text: &str) -> Result<Self, InvalidMark> {
        let (number, hash) = text.split_once(':').ok_or(InvalidMark)?;
        let number = number.parse().map_err(|_parse| InvalidMark)?;
        let hash = hex::decode(hash).and_then(|hash| hash.try_into().ok());
        Ok(Self { number, hash: hash.ok_or(InvalidMark)? })
    }
}

/// The damage that a check of the log found.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Broken {
    /// There are entries and no head, or a head whose numbers are impossible.
    #[error("the head of the audit log is missing or damaged")]
    Head,
    /// An entry is not there.
    #[error("entry {number} of the audit log is missing")]
    Missing {
        /// Its number.
        number: u64,
    },
    /// An entry is not the one that was written.
    #[error("entry {number} of the audit log was changed: its content does not have its hash")]
    Changed {
        /// Its number.
        number: u64,
    },
    /// An entry does not follow the one before it.
    #[error(
        "entry {number} of the audit log does not follow the one before it: that one was \
         changed or replaced"
    )]
    Link {
        /// Its number.
        number: u64,
    },
    /// An entry that the head does not know.
    #[error("entry {number} of the audit log is not between the ends that its head names")]
    Outside {
        /// Its number.
        number: u64,
    },
    /// The newest entry is not the one that the head names.
    #[error("the newest entry of the audit log, {number}, is not the one that its head names")]
    End {
        /// Its number.
        number: u64,
    },
    /// The log ends before an entry that was noted.
    #[error("the audit log ends with entry {newest}, before entry {number}, which was noted")]
    Cut {
        /// The noted number.
        number: u64,
        /// The newest that is there.
        newest: u64,
    },
    /// The entry that was noted is another one now.
    #[error("entry {number} of the audit log is not the one that was noted")]
    Noted {
        /// Its number.
        number: u64,
    },
    /// The entry that was noted is not kept any more.
    #[error("entry {number} was noted, and the audit log begins with entry {first} by now")]
    Gone {
        /// The noted number.
        number: u64,
        /// The oldest that is there.
        first: u64,
    },
}

/// Checks all entries from the oldest to the newest, and that the noted entry is among them.
///
/// # Errors
///
/// The first place at which the log is not whole.
pub fn check(head: &AuditHead, entries: &[AuditEntry], noted: Option<Mark>) -> Result<(), Broken> {
    if head.number == 0 {
        if !entries.is_empty() || *head != AuditHead::default() {
            return Err(Broken::Head);
        }
    } else {
        links(head, entries)?;
    }
    match noted {
        Some(noted) => holds(head, entries, noted),
        None => Ok(()),
    }
}

fn links(head: &AuditHead, entries: &[AuditEntry]) -> Result<(), Broken> {
    let AuditHead { number: newest, first, .. } = *head;
    if first == 0 || first > newest {
        return Err(Broken::Head);
    }
    let (mut expected, mut previous) = (first, head.before.clone());
    for entry in entries {
        let number = entry.number;
        if number < expected || number > newest {
            return Err(Broken::Outside { number });
        }
        if number > expected {
            return Err(Broken::Missing { number: expected });
        }
        let hash = hash(entry);
        if entry.hash != hash {
            return Err(Broken::Changed { number });
        }
        if entry.previous != previous {
            return Err(Broken::Link { number });
        }
        (expected, previous) = (number.saturating_add(1), hash.to_vec());
    }
    if expected <= newest {
        return Err(Broken::Missing { number: expected });
    }
    if previous != head.hash {
        return Err(Broken::End { number: newest });
    }
    Ok(())
}

fn holds(head: &AuditHead, entries: &[AuditEntry], noted: Mark) -> Result<(), Broken> {
    let Mark { number, hash } = noted;
    if number > head.number {
        return Err(Broken::Cut { number, newest: head.number });
    }
    // The hash of the entry before the oldest is in the head.
    if number.checked_add(1) == Some(head.first) {
        return if head.before == hash { Ok(()) } else { Err(Broken::Noted { number }) };
    }
    if number < head.first {
        return Err(Broken::Gone { number, first: head.first });
    }
    let found = entries.iter().find(|entry| entry.number == number);
    match found {
        Some(entry) if entry.hash == hash => Ok(()),
        Some(_) | None => Err(Broken::Noted { number }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rpc::{Role, Table};

    pub(super) fn chain(numbers: std::ops::RangeInclusive<u64>) -> (AuditHead, Vec<AuditEntry>) {
        let (first, mut entries) = (*numbers.start(), Vec::new());
        let before = if first == 1 { BEGINNING } else { [7; 32] };
        let (mut previous, mut newest) = (before.to_vec(), 0);
        for number in numbers {
            let mut entry = AuditEntry {
                number,
                who: "owner ann".to_owned(),
                call: "DeleteNode".to_owned(),
                previous,
                ..AuditEntry::default()
            };
            entry.hash = hash(&entry).to_vec();
            previous = entry.hash.clone();
            newest = number;
            entries.push(entry);
        }
        let head = AuditHead { number: newest, hash: previous, first, before: before.to_vec() };
        (head, entries)
    }

    pub(super) fn mark(entry: &AuditEntry) -> Mark {
        Mark { number: entry.number, hash: hash(entry) }
    }

    #[test]
    fn every_call_of_a_node_is_in_the_table_in_its_order() {
        const SERVICE: &str = "/polis.v1.NodeManagement/";
        let table = Table::polis().unwrap();
        let served = table.rules();
        let served = served.filter_map(|(path, rule)| Some((path.strip_prefix(SERVICE)?, rule)));
        let served: Vec<_> = served.collect();
        let names: Vec<_> = served.iter().map(|(name, _)| *name).collect();
        let rows: Vec<_> = NODE_CALLS.iter().map(|(name, _)| *name).collect();
        assert_eq!(rows, names);
        for (name, rule) in served {
            let more = rule.least_role() > Some(Role::Viewer);
            let reads = ["FetchBundle", "GetAttestationKeys"].contains(&name);
            assert!(is_recorded(&format!("{SERVICE}{name}")) || !more || reads, "{name}");
        }
        assert!(is_recorded("/polis.v1.NodeManagement/NoSuch"));
    }

    #[test]
    fn a_whole_log_is_whole_also_without_entries_or_without_its_beginning() {
        for numbers in [1..=1, 1..=5, 40..=45] {
            let (head, entries) = chain(numbers);
            assert_eq!(check(&head, &entries, None), Ok(()));
        }
        assert_eq!(check(&AuditHead::default(), &[], None), Ok(()));
    }

    #[test]
    fn the_hash_of_an_entry_stays_what_it_was() {
        let (_, entries) = chain(1..=1);
        // A changed encoding would break every chain that exists. Python: sha256(b"polis audit
        // entry 1\0" + b"\x08\x01\x1a\x09owner ann\x32\x0aDeleteNode\x62\x20" + bytes(32)).
        let expected = "9b748c55c16f09ad9be92f9ec6be112e7da2e727d63e4a0bc930ff149ba53ef0";
        assert_eq!(hex::encode(&hash(&entries[0])), expected);
    }

    #[test]
    fn an_entry_that_was_removed_changed_or_swapped_is_found_wherever_it_is() {
        for at in 0..5 {
            let (head, entries) = chain(1..=5);
            let number = entries[at].number;
            let mut removed = entries.clone();
            removed.remove(at);
            assert_eq!(check(&head, &removed, None), Err(Broken::Missing { number }));
            let mut changed = entries.clone();
            changed[at].who = "owner bob".to_owned();
            assert_eq!(check(&head, &changed, None), Err(Broken::Changed { number }));
            // With a hash that fits, the next entry or the head tells.
            changed[at].hash = hash(&changed[at]).to_vec();
            let next = match number {
                5 => Broken::End { number },
                _ => Broken::Link { number: number + 1 },
            };
            assert_eq!(check(&head, &changed, None), Err(next));
            let mut swapped = entries.clone();
            swapped.swap(at, (at + 1) % 5);
            assert!(check(&head, &swapped, None).is_err());
        }
    }

    #[test]
    fn a_log_that_was_cut_at_its_end_with_its_head_is_found_by_a_mark() {
        let (_, entries) = chain(1..=5);
        let (head, cut) = chain(1..=3);
        assert_eq!(check(&head, &cut, None), Ok(()), "nothing else in it tells");
        let broken = check(&head, &cut, Some(mark(&entries[4])));
        assert_eq!(broken, Err(Broken::Cut { number: 5, newest: 3 }));
        assert_eq!(check(&head, &cut, Some(mark(&entries[2]))), Ok(()));
        let other = Mark { number: 2, hash: [1; 32] };
        assert_eq!(check(&head, &cut, Some(other)), Err(Broken::Noted { number: 2 }));
    }

    #[test]
    fn a_pruned_beginning_is_whole_as_far_as_its_head_says() {
        let (head, mut entries) = chain(40..=45);
        let last_gone = Mark { number: 39, hash: [7; 32] };
        assert_eq!(check(&head, &entries, Some(last_gone)), Ok(()));
        let older = Mark { number: 3, hash: [7; 32] };
        assert_eq!(check(&head, &entries, Some(older)), Err(Broken::Gone { number: 3, first: 40 }));
        entries.remove(0);
        assert_eq!(check(&head, &entries, None), Err(Broken::Missing { number: 40 }));
    }

    #[test]
    fn a_head_that_is_gone_or_impossible_is_damaged() {
        let (head, entries) = chain(1..=2);
        assert_eq!(check(&AuditHead::default(), &entries, None), Err(Broken::Head));
        let impossible = AuditHead { first: 9, ..head };
        assert_eq!(check(&impossible, &entries, None), Err(Broken::Head));
    }

    #[test]
    fn a_mark_reads_back() {
        let mark = Mark { number: 12, hash: [0xab; 32] };
        assert_eq!(mark.to_string().parse(), Ok(mark));
        for wrong in ["", "12", "12:ab", "x:00", ":"] {
            assert_eq!(wrong.parse::<Mark>(), Err(InvalidMark), "{wrong}");
        }
    }
}
