//! Answers: what ends soon, and does it renew itself?

use ratatui::text::Line;

use super::{Content, blank, title};
use crate::snapshot::{Authority, Certificate, Crl, Pki, Snapshot};
use crate::text::{count, duration, name, plural};
use crate::theme::{DIM, Mark, PLAIN};
use crate::widgets::headline::{INDENT, headline};
use crate::widgets::{Row, life};
use crate::words::words;

/// Columns of a certificate: name, issuer, two dates, days.
const NAME: usize = 16;
const ISSUER: usize = 13;
const DATE: usize = 11;
const LEFT: usize = 14;

/// Longest bar.
const BAR_MAX: usize = 40;

/// Days before its end when what never renews itself needs a person's plan: an
/// authority is replaced by hand, and everything that it signed with it.
const DAYS_FOR_A_PERSON: i64 = 180;

pub(crate) fn content(snapshot: &Snapshot, width: usize) -> Content {
    let Some(pki) = &snapshot.pki else {
        let text = "This node has no certificates yet. The Boot page (F1) says what it waits for.";
        return Content { head: headline(Mark::Idle, text, width), body: Vec::new() };
    };
    let (mark, answer) = answer(pki);
    let mut body = headline(mark, &answer, width);
    body.extend([blank(), title("Authorities")]);
    body.extend(pki.authorities.iter().flat_map(authority));
    body.push(blank());
    body.push(
        Row::default()
            .cell(INDENT + NAME, DIM, "Certificates")
            .cell(ISSUER, DIM, "signed by")
            .cell(DATE, DIM, "renews")
            .cell(DATE, DIM, "ends")
            .cell(LEFT, DIM, "")
            .put(DIM, "life so far")
            .line(),
    );
    body.extend(pki.certificates.iter().map(|certificate| row(certificate, width)));
    body.extend([blank(), title("Revoked certificates")]);
    body.extend(pki.authorities.iter().map(|authority| crl(authority.crl.as_ref())));
    Content { head: Vec::new(), body }
}

/// Something that ends.
struct End<'a> {
    name: String,
    ends: &'a str,
    days_left: i64,
    renews: Option<&'a str>,
    late: bool,
}

/// Everything that ends, the soonest first.
fn ends(pki: &Pki) -> Vec<End<'_>> {
    let authorities = pki.authorities.iter().map(|authority| End {
        name: name(&authority.name),
        ends: &authority.ends,
        days_left: authority.days_left,
        renews: None,
        late: false,
    });
    let certificates = pki.certificates.iter().map(|certificate| End {
        name: name(&certificate.name),
        ends: &certificate.ends,
        days_left: certificate.days_left,
        renews: certificate.renews.as_deref(),
        late: is_late(certificate),
    });
    let mut ends: Vec<_> = authorities.chain(certificates).collect();
    ends.sort_by_key(|end| end.days_left);
    ends
}

/// What matters most: what has ended, what should have renewed itself, what a
/// person must renew; then what comes next without anyone.
fn answer(pki: &Pki) -> (Mark, String) {
    let ends = ends(pki);
    let Some(first) = ends.first() else {
        return (Mark::Idle, "There are no certificates yet.".to_owned());
    };
    if first.days_left < 0 {
        let End { name, ends, days_left, .. } = first;
        return (Mark::Bad, format!("\"{name}\" ended on {ends}, {} ago.", days(*days_left)));
    }
    if let Some(End { name, days_left, .. }) = ends.iter().find(|end| end.late) {
        let what = format!("\"{name}\" should have renewed itself, and ends in");
        return (Mark::Attention, format!("{what} {}. The logs (F5) say why.", days(*days_left)));
    }
    let needs_a_person = |end: &&End<'_>| end.renews.is_none() && end.days_left < DAYS_FOR_A_PERSON;
    if let Some(End { name, ends, days_left, .. }) = ends.iter().find(needs_a_person) {
        let left = days(*days_left);
        let what = format!("\"{name}\" ends in {left}, on {ends}, and does not renew itself.");
        return (Mark::Attention, what);
    }
    let next = ends.iter().find_map(|end| Some((&end.name, end.renews?)));
    let what = match next {
        Some((name, day)) => format!("\"{name}\" renews itself on {day}"),
        None => format!("\"{}\" ends in {}", first.name, days(first.days_left)),
    };
    (Mark::Good, format!("Nothing needs you. Next, {what}."))
}

/// Whether a certificate lives although it should have been replaced.
fn is_late(certificate: &Certificate) -> bool {
    certificate.renews.is_some() && certificate.used > certificate.renew_at
}

fn days(days: i64) -> String {
    plural(days.unsigned_abs(), "day")
}

fn authority(authority: &Authority) -> Vec<Line<'static>> {
    let mark = mark(authority.days_left, DAYS_FOR_A_PERSON);
    let hex: String = authority.fingerprint.iter().map(|byte| format!("{byte:02x}")).collect();
    vec![
        Row::default()
            .cell(INDENT, mark.style(), mark.glyph())
            .put(PLAIN, &name(&authority.name))
            .put(DIM, &format!("  ends {}, {}", authority.ends, remaining(authority.days_left)))
            .line(),
        Row::indented(INDENT)
            .cell(9, DIM, "words")
            .put(PLAIN, &words(&authority.fingerprint))
            .line(),
        Row::indented(INDENT).cell(9, DIM, "SHA-256").put(PLAIN, &hex).line(),
    ]
}

fn row(certificate: &Certificate, width: usize) -> Line<'static> {
    let enough = if certificate.renews.is_some() { 0 } else { DAYS_FOR_A_PERSON };
    let late = if is_late(certificate) { Mark::Attention } else { Mark::Good };
    let mark = mark(certificate.days_left, enough).max(late);
    let row = Row::default()
        .cell(INDENT, mark.style(), mark.glyph())
        .cell(NAME, PLAIN, &certificate.name)
        .cell(ISSUER, PLAIN, &certificate.issuer)
        .cell(DATE, PLAIN, certificate.renews.as_deref().unwrap_or("by hand"))
        .cell(DATE, PLAIN, &certificate.ends)
        .cell(LEFT, mark.style(), &remaining(certificate.days_left));
    let cells = width.saturating_sub(row.used()).min(BAR_MAX);
    let renewal = certificate.renews.as_ref().map(|_day| certificate.renew_at);
    life::share(row, cells, mark.style(), certificate.used, renewal).line()
}

fn mark(days_left: i64, days_enough: i64) -> Mark {
    match days_left {
        ..0 => Mark::Bad,
        some if some < days_enough => Mark::Attention,
        _ => Mark::Good,
    }
}

fn remaining(days_left: i64) -> String {
    if days_left < 0 { "ended".to_owned() } else { format!("in {}", days(days_left)) }
}

fn crl(crl: Option<&Crl>) -> Line<'static> {
    let text = match crl {
        None => "no list yet".to_owned(),
        Some(crl) => format!(
            "list number {}, with {}, made {} ago",
            count(crl.number),
            if crl.entries == 1 {
                "1 entry".to_owned()
            } else {
                format!("{} entries", count(crl.entries))
            },
            duration(crl.age)
        ),
    };
    Row::indented(INDENT).put(PLAIN, &text).line()
}
