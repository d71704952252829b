//! Answers: what ends soon, and does it renew itself?

use ratatui::text::Line;

use super::{Content, blank, title};
use crate::snapshot::{Authority, Certificate, Crl, Pki, Snapshot};
use crate::text::{count, cut, duration, plural};
use crate::theme::{DIM, Mark, PLAIN};
use crate::widgets::headline::{INDENT, headline};
use crate::widgets::{Row, life};
use crate::words::words;

/// Columns of a certificate: name, issuer, two dates, days.
const NAME: usize = 17;
const ISSUER: usize = 15;
const DATE: usize = 11;
const LEFT: usize = 11;

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
            .cell(LEFT, DIM, "in")
            .put(DIM, "life so far")
            .line(),
    );
    body.extend(pki.certificates.iter().map(|certificate| row(certificate, width)));
    body.extend([blank(), title("Revoked certificates"), crl(pki.crl.as_ref())]);
    Content { head: Vec::new(), body }
}

/// What matters most: what has ended, then what a person must renew, then what renews itself.
fn answer(pki: &Pki) -> (Mark, String) {
    let all = || {
        let authorities = pki.authorities.iter().map(|a| (&a.name, &a.ends, a.days_left, None));
        let certificates =
            pki.certificates.iter().map(|c| (&c.name, &c.ends, c.days_left, c.renews.as_ref()));
        authorities.chain(certificates)
    };
    let Some((name, ends, days, _)) = all().min_by_key(|(_, _, days, _)| *days) else {
        return (Mark::Idle, "There are no certificates yet.".to_owned());
    };
    if days < 0 {
        return (Mark::Bad, format!("\"{name}\" ended on {ends}, {} ago.", self::days(days)));
    }
    if let Some(late) = pki.certificates.iter().find(|c| c.renews.is_some() && c.used > c.renew_at)
    {
        return (
            Mark::Attention,
            format!(
                "\"{}\" should have renewed itself and has not; it ends in {}. The logs (F5) say why.",
                late.name,
                self::days(late.days_left)
            ),
        );
    }
    let manual =
        all().filter(|(_, _, _, renews)| renews.is_none()).min_by_key(|(_, _, days, _)| *days);
    if let Some((name, ends, days, _)) = manual.filter(|(_, _, days, _)| *days < DAYS_FOR_A_PERSON)
    {
        return (
            Mark::Attention,
            format!(
                "\"{name}\" ends in {}, on {ends}, and does not renew itself.",
                self::days(days)
            ),
        );
    }
    match all()
        .filter_map(|(name, _, days, renews)| Some((name, renews?, days)))
        .min_by_key(|(_, _, days)| *days)
    {
        Some((name, renews, _)) => {
            (Mark::Good, format!("Nothing needs you. Next, \"{name}\" renews itself on {renews}."))
        }
        None => (
            Mark::Good,
            format!("Nothing needs you. Next, \"{name}\" ends in {}.", self::days(days)),
        ),
    }
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
            .put(PLAIN, &authority.name)
            .put(DIM, &format!("  ends {}, {}", authority.ends, left(authority.days_left)))
            .line(),
        Row::indented(INDENT)
            .cell(9, DIM, "words")
            .put(PLAIN, &words(&authority.fingerprint))
            .line(),
        Row::indented(INDENT).cell(9, DIM, "SHA-256").put(PLAIN, &hex).line(),
    ]
}

fn row(certificate: &Certificate, width: usize) -> Line<'static> {
    let late = certificate.renews.is_some() && certificate.used > certificate.renew_at;
    let days = if certificate.renews.is_none() { DAYS_FOR_A_PERSON } else { 0 };
    let mark = if late {
        Mark::Attention.max(mark(certificate.days_left, 0))
    } else {
        mark(certificate.days_left, days)
    };
    let row = Row::default()
        .cell(INDENT, mark.style(), mark.glyph())
        .cell(NAME, PLAIN, &cut(&certificate.name, NAME - 1))
        .cell(ISSUER, PLAIN, &cut(&certificate.issuer, ISSUER - 1))
        .cell(DATE, PLAIN, certificate.renews.as_deref().unwrap_or("by hand"))
        .cell(DATE, PLAIN, &certificate.ends)
        .cell(LEFT, mark.style(), &left(certificate.days_left));
    let cells = width.saturating_sub(row.used()).min(BAR_MAX);
    let until = if certificate.renews.is_some() { certificate.renew_at } else { 100 };
    row.put(mark.style(), &life::share_until(cells, certificate.used, until)).line()
}

fn mark(days_left: i64, days_enough: i64) -> Mark {
    match days_left {
        ..0 => Mark::Bad,
        some if some < days_enough => Mark::Attention,
        _ => Mark::Good,
    }
}

fn left(days_left: i64) -> String {
    if days_left < 0 { "ended".to_owned() } else { days(days_left) }
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
