//! Fuzz targets of the audit log: its records, and the mark that a person keeps.

use polis_fuzz::{Accepted, Target};

use super::tests::{chain, mark};
use super::*;

/// A head and entries, each behind its length of one byte.
fn packed(head: &AuditHead, entries: &[AuditEntry]) -> Vec<u8> {
    let piece = |bytes: Vec<u8>| [&[u8::try_from(bytes.len()).unwrap()][..], &bytes].concat();
    let entries = entries.iter().flat_map(|entry| piece(entry.encode_to_vec()));
    piece(head.encode_to_vec()).into_iter().chain(entries).collect()
}

#[test]
fn audit_logs() {
    let samples = [1..=1, 1..=3, 40..=42].map(|numbers| {
        let (head, entries) = chain(numbers);
        packed(&head, &entries)
    });
    Target::new("wire.audit").samples(samples).run(|input| {
        let (mut pieces, mut rest) = (Vec::new(), input);
        while let Some((length, more)) = rest.split_first() {
            let (piece, more) = more.split_at(usize::from(*length).min(more.len()));
            pieces.push(piece);
            rest = more;
        }
        let Some((head, entries)) = pieces.split_first() else { return Accepted::No };
        let Ok(head) = AuditHead::decode(*head) else { return Accepted::No };
        let entries: Result<Vec<_>, _> =
            entries.iter().map(|entry| AuditEntry::decode(*entry)).collect();
        let Ok(entries) = entries else { return Accepted::No };
        let whole = check(&head, &entries, None);
        for noted in entries.iter().map(mark) {
            let noted = check(&head, &entries, Some(noted));
            assert_eq!(noted.is_ok(), whole.is_ok(), "a mark of a whole log holds");
        }
        whole.is_ok().into()
    });
}

#[test]
fn marks() {
    let sample = Mark { number: 12, hash: [0xab; 32] }.to_string();
    Target::new("wire.audit_mark").samples([sample]).length_max(256).run(|input| {
        let Ok(mark) = String::from_utf8_lossy(input).parse::<Mark>() else { return Accepted::No };
        assert_eq!(mark.to_string().parse(), Ok(mark));
        Accepted::Yes
    });
}
