//! The audit log: a chain of entries in etcd that the leader makes longer.
//!
//! ```text
//! audit/head               v1.AuditHead: number and hash of the newest entry, and the oldest
//! audit/entries/<number>   v1.AuditEntry, with the hash of the entry before
//! ```
//!
//! The layer that serves the calls of operators (`serve::audit`) appends; `GetAudit` reads
//! pages of a hundred. At most [`KEPT_MAX`] entries are kept: each new one removes the oldest,
//! whose hash goes to the head.
//!
//! Invariants:
//! - An entry and the head that names it are written in one transaction.
//! - An entry that exists is never overwritten, whatever the head says.
//! - A page and the head beside it are of one moment.
//!
//! What this module does not do: check the chain (`polis_wire::audit`, in the operator's tool).

use std::sync::Arc;

use polis_proto::v1::{AuditEntry, AuditHead};
use prost::Message as _;
use tokio::sync::{Mutex, MutexGuard, watch};
use tracing::{error, info};

use super::budgets::Budgets;
use super::reported;
use super::store::{CONFLICTS_MAX, Error, Store, decode};
use polis_base::hex;
use polis_runtime::logtree::{self, Body};
use polis_wire::audit::{BEGINNING, hash};
use polis_wire::pki::{self, Guard, Write};

/// The source of the lines of the audit log in the log of a node: see [`is_line`].
pub const LINES: &str = "polis_audit";

const HEAD: &str = "audit/head";
const ENTRIES: &str = "audit/entries/";

/// Entries that are kept: some 4 MB, a small part of etcd's database.
pub const KEPT_MAX: u64 = 10_000;

/// Entries that one append removes at most: more than one where a smaller bound came later.
const PRUNED_MAX: u64 = 8;

/// The longest text of an entry, in bytes.
pub(super) const TEXT_MAX: usize = 200;

/// Entries of a page: the keys whose number differs only in its last two digits.
const PAGE: u64 = 100;

/// The knowledge of one process about the chain. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Audit {
    /// The head that was read or written last; held while the chain is read or written.
    chain: Arc<Mutex<AuditHead>>,
    /// The number of the newest entry, for readers that follow.
    newest: watch::Sender<u64>,
    /// The entries that nodes may add to it.
    pub(super) budgets: Budgets,
    /// Held while the report of a node is written.
    pub(super) reports: Arc<Mutex<()>>,
}

impl Default for Audit {
    fn default() -> Self {
        Self {
            chain: Arc::default(),
            newest: watch::Sender::default(),
            budgets: reported::budgets(),
            reports: Arc::default(),
        }
    }
}

impl Audit {
    /// Changes with each new entry.
    #[must_use]
    pub fn follow(&self) -> watch::Receiver<u64> {
        self.newest.subscribe()
    }
}

/// Whether an entry in the log of a node is of the audit log, so that only callers who may read
/// that may read it.
#[must_use]
pub fn is_line(entry: &logtree::Entry) -> bool {
    match &entry.body {
        Body::Levelled(line) => line.source == LINES,
        Body::Raw(_) => false,
    }
}

/// The bound of the log; smaller in tests.
#[derive(Clone, Copy, Debug)]
pub(super) struct Kept(pub(super) u64);

impl<S: pki::Store + Clone> Store<S> {
    /// Appends an entry: its number and its hashes are set here.
    ///
    /// # Errors
    ///
    /// etcd did not take it.
    pub async fn audit(&self, audit: &Audit, entry: AuditEntry) -> Result<AuditEntry, Error> {
        self.audit_within(Kept(KEPT_MAX), audit, entry).await
    }

    pub(super) async fn audit_within(
        &self,
        kept: Kept,
        audit: &Audit,
        entry: AuditEntry,
    ) -> Result<AuditEntry, Error> {
        let mut known = audit.chain.lock().await;
        for _attempt in 0..CONFLICTS_MAX {
            let (guard, head) = self.end_of_chain(&mut known).await?;
            let entry = following(&head, entry.clone());
            let key = entry_key(entry.number);
            let (first, before, mut writes) = self.prune_chain(kept, &head, entry.number).await?;
            let head = AuditHead { number: entry.number, hash: entry.hash.clone(), first, before };
            writes.push(Write::Put(key.clone(), entry.encode_to_vec()));
            writes.push(Write::Put(HEAD.to_owned(), head.encode_to_vec()));
            let guards = vec![guard, Guard::Absent(key)];
            if self.kv.commit(guards, writes).await.map_err(Error::Store)? {
                audit.newest.send_replace(head.number);
                *known = head;
                leave_in_log(&entry);
                return Ok(entry);
            }
        }
        Err(Error::Contended { key: HEAD.to_owned() })
    }

    /// The head, and the entries of the page that `from` is in, which are not older than it.
    ///
    /// # Errors
    ///
    /// etcd did not answer, or a record cannot be decoded.
    pub async fn audit_page(
        &self,
        audit: &Audit,
        from: u64,
    ) -> Result<(AuditHead, Vec<AuditEntry>), Error> {
        // No entry is appended or removed in between.
        let _known = audit.chain.lock().await;
        let head = self.read::<AuditHead>(HEAD).await?.unwrap_or_default();
        let number = format!("{from:020}");
        // Without the last two digits.
        let prefix = format!("{ENTRIES}{}", &number[..number.len() - 2]);
        let mut entries = Vec::new();
        for (key, value) in self.kv.list(&prefix).await.map_err(Error::Store)? {
            let number = number_of(&key).ok_or_else(|| Error::Damaged { key: key.clone() })?;
            // A record whose number is not that of its key is handed out under that of its
            // key, where the check finds it.
            let entry = decode::<AuditEntry>(&key, &value.value).unwrap_or_default();
            if number >= from {
                entries.push(AuditEntry { number, ..entry });
            }
        }
        Ok((head, entries))
    }

    /// The newest entries: a hundred at least, where there are as many.
    ///
    /// # Errors
    ///
    /// As those of [`Store::audit_page`].
    pub(super) async fn audit_newest(&self, audit: &Audit) -> Result<Vec<AuditEntry>, Error> {
        let head = self.read::<AuditHead>(HEAD).await?.unwrap_or_default();
        let (_, mut newest) = self.audit_page(audit, head.number.saturating_sub(PAGE)).await?;
        newest.extend(self.audit_page(audit, head.number / PAGE * PAGE).await?.1);
        Ok(newest)
    }

    /// The head to append to, and the guard that it is still the one that was read.
    async fn end_of_chain(
        &self,
        known: &mut MutexGuard<'_, AuditHead>,
    ) -> Result<(Guard, AuditHead), Error> {
        let found = self.kv.get(HEAD).await.map_err(Error::Store)?;
        let (guard, read) = match &found {
            None => (Guard::Absent(HEAD.to_owned()), AuditHead::default()),
            Some(found) => {
                let guard = Guard::Unchanged(HEAD.to_owned(), found.revision);
                (guard, decode(HEAD, &found.value).unwrap_or_default())
            }
        };
        let goes_back =
            read.number < known.number || (read.number == known.number && read.hash != known.hash);
        let next = entry_key(read.number.saturating_add(1));
        let beyond = self.kv.get(&next).await.map_err(Error::Store)?.is_some();
        if !goes_back && !beyond {
            return Ok((guard, read));
        }
        error!(
            number = read.number,
            "the head of the audit log was changed by another writer; its chain needs a check"
        );
        // The log goes on behind everything that was ever in it: a gap stays visible.
        let head = self.rebuilt(read, known).await?;
        Ok((guard, head))
    }

    /// The head that fits the entries that exist, and the one that this process knows.
    async fn rebuilt(&self, read: AuditHead, known: &AuditHead) -> Result<AuditHead, Error> {
        let listed = self.kv.list(ENTRIES).await.map_err(Error::Store)?;
        let mut head = if known.number > 0 { known.clone() } else { read };
        if head.first == 0 {
            head.first = listed.iter().find_map(|(key, _)| number_of(key)).unwrap_or(1);
            head.before = BEGINNING.to_vec();
        }
        let newest = listed.iter().rev().find_map(|(key, value)| {
            Some((number_of(key)?, AuditEntry::decode(value.value.as_slice()).ok()?))
        });
        if let Some((number, entry)) = newest.filter(|(number, _)| *number > head.number) {
            (head.number, head.hash) = (number, entry.hash);
        }
        Ok(head)
    }

    /// The oldest entry that stays, the hash of the one before it, and the removals.
    async fn prune_chain(
        &self,
        Kept(kept): Kept,
        head: &AuditHead,
        newest: u64,
    ) -> Result<(u64, Vec<u8>, Vec<Write>), Error> {
        let (mut first, mut before, mut writes) =
            (head.first.max(1), head.before.clone(), Vec::new());
        if before.is_empty() {
            before = BEGINNING.to_vec();
        }
        for _pruned in 0..PRUNED_MAX {
            if newest.saturating_sub(first) < kept {
                break;
            }
            let key = entry_key(first);
            let oldest = self.kv.get(&key).await.map_err(Error::Store)?;
            let oldest = oldest.and_then(|old| AuditEntry::decode(old.value.as_slice()).ok());
            match oldest {
                Some(oldest) => before = hash(&oldest).to_vec(),
                // The hash stays one that does not fit, so a check goes on finding the gap.
                None => error!(number = first, "the oldest entry of the audit log is missing"),
            }
            writes.push(Write::Delete(key));
            first += 1;
        }
        Ok((first, before, writes))
    }
}

/// The entry as it follows the newest one.
fn following(head: &AuditHead, entry: AuditEntry) -> AuditEntry {
    let previous = if head.number == 0 { BEGINNING.to_vec() } else { head.hash.clone() };
    let number = head.number.saturating_add(1);
    let (who, what, reason) = (cut(&entry.who), cut(&entry.what), cut(&entry.reason));
    let mut entry = AuditEntry { number, who, what, reason, previous, ..entry };
    entry.hash = hash(&entry).to_vec();
    entry
}

/// Every entry is a line of the log, too, which leaves the machine by other ways than etcd. Like
/// the entry, it is for callers who may read the audit log.
fn leave_in_log(entry: &AuditEntry) {
    info!(
        target: LINES,
        number = entry.number,
        by = entry.who,
        key = entry.key,
        from = entry.from,
        at = entry.at,
        what = entry.what,
        code = entry.code,
        reason = entry.reason,
        repeats = entry.repeats,
        hash = hex::encode(&entry.hash),
        "audit: {}",
        entry.call
    );
}

fn entry_key(number: u64) -> String {
    format!("{ENTRIES}{number:020}")
}

fn number_of(key: &str) -> Option<u64> {
    key.strip_prefix(ENTRIES)?.parse().ok()
}

/// The next page after that of `number`, or the largest number behind the last page.
pub(super) fn page_after(number: u64) -> u64 {
    (number / PAGE + 1).saturating_mul(PAGE)
}

/// A text that fits into an entry.
pub(super) fn cut(text: &str) -> String {
    let mut end = text.len().min(TEXT_MAX);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text[..end].to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use polis_wire::audit::{Broken, Mark, check};
    use polis_wire::pki::Store as _;
    use polis_wire::pki::memory::Memory;

    fn by(who: &str) -> AuditEntry {
        AuditEntry { who: who.to_owned(), call: "DeleteNode".to_owned(), ..AuditEntry::default() }
    }

    async fn all(store: &Store<Memory>, audit: &Audit) -> (AuditHead, Vec<AuditEntry>) {
        let (mut from, mut entries) = (0, Vec::new());
        loop {
            let (head, page) = store.audit_page(audit, from).await.unwrap();
            entries.extend(page);
            from = page_after(from);
            if from > head.number {
                return (head, entries);
            }
        }
    }

    #[tokio::test]
    async fn entries_of_several_leaders_make_one_chain_over_several_pages() {
        let store = Store::new(Memory::default());
        let (audit, next_leader) = (Audit::default(), Audit::default());
        assert_eq!(all(&store, &audit).await, (AuditHead::default(), vec![]));
        for count in 0..230 {
            let audit = if count < 150 { &audit } else { &next_leader };
            store.audit(audit, by("owner ann")).await.unwrap();
        }
        let (head, entries) = all(&store, &audit).await;
        assert_eq!((head.number, head.first, entries.len()), (230, 1, 230));
        assert_eq!(check(&head, &entries, None), Ok(()));
        let (_, page) = store.audit_page(&audit, 130).await.unwrap();
        assert_eq!((page[0].number, page.len()), (130, 70));
    }

    #[tokio::test]
    async fn entries_at_the_same_moment_follow_one_another() {
        let store = Store::new(Memory::default());
        let audit = Audit::default();
        let appends = (0..20).map(|_| store.audit(&audit, by("owner ann")));
        for appended in futures::future::join_all(appends).await {
            appended.unwrap();
        }
        let (head, entries) = all(&store, &audit).await;
        assert_eq!((head.number, check(&head, &entries, None)), (20, Ok(())));
    }

    #[tokio::test]
    async fn the_oldest_entries_go_and_the_rest_is_still_a_chain() {
        let store = Store::new(Memory::default());
        let audit = Audit::default();
        let mut marks = Vec::new();
        for _ in 0..9 {
            let entry = store.audit_within(Kept(4), &audit, by("owner ann")).await.unwrap();
            marks.push(Mark { number: entry.number, hash: hash(&entry) });
        }
        let (head, entries) = all(&store, &audit).await;
        assert_eq!((head.first, head.number, entries.len()), (6, 9, 4));
        assert_eq!(check(&head, &entries, Some(marks[4])), Ok(()), "the last that is gone");
        assert_eq!(check(&head, &entries, Some(marks[8])), Ok(()));
        assert_eq!(
            check(&head, &entries, Some(marks[0])),
            Err(Broken::Gone { number: 1, first: 6 })
        );
    }

    #[tokio::test]
    async fn a_record_that_was_removed_or_replaced_in_etcd_is_found() {
        let memory = Memory::default();
        let store = Store::new(memory.clone());
        let audit = Audit::default();
        for _ in 0..5 {
            store.audit(&audit, by("owner ann")).await.unwrap();
        }
        let key = entry_key(3);
        let other = AuditEntry { number: 3, ..by("owner bob") }.encode_to_vec();
        memory.commit(vec![], vec![Write::Put(key.clone(), other)]).await.unwrap();
        let (head, entries) = all(&store, &audit).await;
        assert_eq!(check(&head, &entries, None), Err(Broken::Changed { number: 3 }));
        memory.commit(vec![], vec![Write::Put(key.clone(), vec![0xff])]).await.unwrap();
        let (head, entries) = all(&store, &audit).await;
        assert_eq!(check(&head, &entries, None), Err(Broken::Changed { number: 3 }));
        memory.commit(vec![], vec![Write::Delete(key)]).await.unwrap();
        let (head, entries) = all(&store, &audit).await;
        assert_eq!(check(&head, &entries, None), Err(Broken::Missing { number: 3 }));
    }

    #[tokio::test]
    async fn a_head_that_was_set_back_hides_nothing_and_overwrites_nothing() {
        let memory = Memory::default();
        let store = Store::new(memory.clone());
        let audit = Audit::default();
        let mut heads = Vec::new();
        for _ in 0..5 {
            store.audit(&audit, by("owner ann")).await.unwrap();
            heads.push(memory.contents()[HEAD].clone());
        }
        // The two newest entries are removed, with the head that names them.
        let back = vec![
            Write::Put(HEAD.to_owned(), heads[2].clone()),
            Write::Delete(entry_key(4)),
            Write::Delete(entry_key(5)),
        ];
        memory.commit(vec![], back).await.unwrap();
        store.audit(&audit, by("owner ann")).await.unwrap();
        let (head, entries) = all(&store, &audit).await;
        assert_eq!(head.number, 6);
        assert_eq!(check(&head, &entries, None), Err(Broken::Missing { number: 4 }));
        // The next leader does not know the old head: nothing that is there is lost.
        let memory = Memory::default();
        let store = Store::new(memory.clone());
        let audit = Audit::default();
        for _ in 0..5 {
            store.audit(&audit, by("owner ann")).await.unwrap();
        }
        let back = vec![Write::Put(HEAD.to_owned(), heads[2].clone())];
        memory.commit(vec![], back).await.unwrap();
        store.audit(&Audit::default(), by("owner ann")).await.unwrap();
        let (head, entries) = all(&store, &audit).await;
        assert_eq!((head.number, check(&head, &entries, None)), (6, Ok(())));
        memory.commit(vec![], vec![Write::Delete(HEAD.to_owned())]).await.unwrap();
        store.audit(&Audit::default(), by("owner ann")).await.unwrap();
        let (head, entries) = all(&store, &audit).await;
        assert_eq!((head.number, check(&head, &entries, None)), (7, Ok(())));
    }

    /// The sources of the lines that are logged.
    #[derive(Default)]
    struct Sources(std::sync::Mutex<Vec<&'static str>>);

    impl tracing::Subscriber for Sources {
        fn enabled(&self, _metadata: &tracing::Metadata<'_>) -> bool {
            true
        }

        fn new_span(&self, _span: &tracing::span::Attributes<'_>) -> tracing::span::Id {
            tracing::span::Id::from_u64(1)
        }

        fn record(&self, _span: &tracing::span::Id, _values: &tracing::span::Record<'_>) {}

        fn record_follows_from(&self, _span: &tracing::span::Id, _other: &tracing::span::Id) {}

        fn event(&self, event: &tracing::Event<'_>) {
            self.0.lock().unwrap().push(event.metadata().target());
        }

        fn enter(&self, _span: &tracing::span::Id) {}

        fn exit(&self, _span: &tracing::span::Id) {}
    }

    #[test]
    fn an_entry_is_a_line_of_the_log_that_is_known_as_one_of_the_audit_log() {
        let sources = Arc::new(Sources::default());
        tracing::subscriber::with_default(Arc::clone(&sources), || {
            leave_in_log(&by("owner ann"));
            error!("the head of the audit log was changed");
        });
        let sources = sources.0.lock().unwrap().clone();
        let line = |source: &str| {
            let levelled = logtree::Levelled::new(polis_base::serial::Severity::Info, "text");
            let levelled = logtree::Levelled { source: source.to_owned(), ..levelled };
            is_line(&logtree::Entry {
                number: 1,
                at: std::time::Duration::ZERO,
                name: "root.curator".into(),
                origin: logtree::Origin::Service,
                body: Body::Levelled(levelled),
            })
        };
        let known: Vec<_> = sources.into_iter().map(line).collect();
        assert_eq!(known, [true, false], "what an operator must see stays");
    }

    #[test]
    fn the_last_page_is_followed_by_the_largest_number() {
        assert_eq!([0, 99, 100].map(page_after), [100, 100, 200]);
        assert_eq!([u64::MAX - 16, u64::MAX].map(page_after), [u64::MAX - 15, u64::MAX]);
    }

    #[test]
    fn a_long_text_is_cut_between_two_letters() {
        assert_eq!(cut("short"), "short");
        assert_eq!(cut(&"ü".repeat(150)).len(), TEXT_MAX);
        assert_eq!(cut(&format!("a{}", "ü".repeat(150))).len(), TEXT_MAX - 1);
    }
}
