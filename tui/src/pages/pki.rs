//! The PKI page: what ends soon, and does it renew itself?

use ratatui::style::Style;
use ratatui::text::Line;

use super::Content;
use super::naming::short;
use crate::snapshot::{Authority, Certificate, Pki, Snapshot};
use crate::text::{ago, clean, count, plural, width as cells, wrap};
use crate::theme::{DIM, Mark, PLAIN, STRONG};
use crate::widgets::block::{blank, title};
use crate::widgets::headline::{INDENT, headline};
use crate::widgets::{Row, gauge};

/// Columns of what ends: two dates and the days that are left.
const DATE: usize = 11;
const LEFT: usize = 14;

/// Column of names with their branch: a whole node ID where there is room.
const NAME_MAX: usize = 44;
const NAME_MIN: usize = 24;

/// Column of the names of facts.
const FACT: usize = 9;

/// Shortest and longest bar.
const BAR_MIN: usize = 12;
const BAR_MAX: usize = 40;

/// Days before its end when what never renews itself needs a person's plan: an
/// authority is replaced by hand, and everything that it signed with it.
const DAYS_FOR_A_PERSON: i64 = 180;

pub(crate) fn content(snapshot: &Snapshot, width: usize) -> Content {
    let Some(pki) = &snapshot.pki else {
        let head = headline(Mark::Idle, &absent(snapshot), width);
        return Content { head, ..Content::default() };
    };
    let (mark, answer) = classify(pki);
    let mut head = headline(mark, &answer, width);
    let columns = Columns::of(width);
    head.extend([blank(), columns.head()]);
    let mut body = Vec::new();
    for authority in &pki.authorities {
        if !body.is_empty() {
            body.push(blank());
        }
        let mut signed: Vec<_> =
            pki.certificates.iter().filter(|it| it.issuer == authority.name).collect();
        signed.sort_by_key(|certificate| certificate.days_left);
        body.extend(columns.authority(authority, !signed.is_empty(), width));
        let last = signed.len().saturating_sub(1);
        body.extend(signed.iter().enumerate().map(|(at, certificate)| {
            columns.certificate(certificate, if at == last { "└ " } else { "├ " })
        }));
    }
    let known = |certificate: &&Certificate| {
        pki.authorities.iter().any(|authority| authority.name == certificate.issuer)
    };
    let others: Vec<_> = pki.certificates.iter().filter(|it| !known(it)).collect();
    if !others.is_empty() {
        body.extend([blank(), title("Signed by others", width)]);
        body.extend(others.iter().map(|certificate| columns.certificate(certificate, "")));
    }
    Content { head, body, ..Content::default() }
}

/// Something that ends.
struct End<'a> {
    name: &'a str,
    ends: &'a str,
    days_left: i64,
    renews: Option<&'a str>,
    late: bool,
    when_used: bool,
    is_authority: bool,
}

impl End<'_> {
    /// Whether it ended without harm: it was not used for a third of its life.
    fn lapsed(&self) -> bool {
        self.when_used && self.days_left < 0
    }
}

/// Everything that ends, the soonest first.
fn ends(pki: &Pki) -> Vec<End<'_>> {
    let authorities = pki.authorities.iter().map(|authority| End {
        name: &authority.name,
        ends: &authority.ends,
        days_left: authority.days_left,
        renews: None,
        late: false,
        when_used: false,
        is_authority: true,
    });
    let valid = pki.certificates.iter().filter(|certificate| !certificate.revoked);
    let certificates = valid.map(|certificate| End {
        name: &certificate.name,
        ends: &certificate.ends,
        days_left: certificate.days_left,
        renews: certificate.renews.as_deref(),
        late: is_late(certificate),
        when_used: certificate.when_used,
        is_authority: false,
    });
    let mut ends: Vec<_> = authorities.chain(certificates).filter(|end| !end.lapsed()).collect();
    ends.sort_by_key(|end| end.days_left);
    ends
}

pub(crate) fn answer(snapshot: &Snapshot) -> (Mark, String) {
    match &snapshot.pki {
        Some(pki) => classify(pki),
        None => (Mark::Idle, absent(snapshot)),
    }
}

/// Whether [`answer`] may have changed, as to the certificates: all that it reads.
pub(crate) fn may_answer_anew(old: &Snapshot, new: &Snapshot) -> bool {
    let (Some(old), Some(new)) = (&old.pki, &new.pki) else { return old.pki != new.pki };
    let authorities = |it: &Pki| it.authorities.len();
    let differ = |(old, new): (&Authority, &Authority)| {
        (&old.name, &old.ends, old.days_left) != (&new.name, &new.ends, new.days_left)
    };
    authorities(old) != authorities(new)
        || old.authorities.iter().zip(&new.authorities).any(differ)
        || old.certificates != new.certificates
}

/// Why there is nothing to show.
fn absent(snapshot: &Snapshot) -> String {
    match super::cluster::members_elsewhere(snapshot) {
        Some(members) => format!(
            "The authorities of the cluster are in etcd: see {members}. This node's certificate \
             is renewed automatically."
        ),
        None => {
            "This node has no certificates yet. See the Boot page (F1) for the reason.".to_owned()
        }
    }
}

/// The most important first: expired certificates, certificates that should have
/// renewed themselves, certificates that a person must renew; then the next automatic
/// renewal.
fn classify(pki: &Pki) -> (Mark, String) {
    let ends = ends(pki);
    let Some(first) = ends.first() else {
        return (Mark::Idle, "No certificates yet.".to_owned());
    };
    if first.days_left < 0 {
        let (name, End { ends, days_left, .. }) = (short(first.name), first);
        // A clock that is ahead ends certificates that are valid elsewhere.
        let ago = format!("{} ago by this clock", days(*days_left));
        let step = if first.is_authority { REPLACE } else { LOOK };
        return (Mark::Bad, format!("\"{name}\" ended on {ends}, {ago}. {step}"));
    }
    if let Some(End { name, ends, .. }) = ends.iter().find(|end| end.late && end.when_used) {
        let what = format!("\"{}\" ends on {ends} unless its user runs polisctl", short(name));
        return (Mark::Attention, format!("{what} before that day."));
    }
    if let Some(End { name, days_left, .. }) = ends.iter().find(|end| end.late) {
        let what = format!("\"{}\" is overdue for renewal and ends in", short(name));
        return (
            Mark::Attention,
            format!("{what} {}. See the logs (F6) for the reason.", days(*days_left)),
        );
    }
    let needs_a_person = |end: &&End<'_>| end.renews.is_none() && end.days_left < DAYS_FOR_A_PERSON;
    if let Some(end) = ends.iter().find(needs_a_person) {
        let End { name, ends, days_left, is_authority, .. } = end;
        let (name, left) = (short(name), days(*days_left));
        let step = if *is_authority { REPLACE_IN_TIME } else { "" };
        let what = format!(
            "\"{name}\" ends in {left}, on {ends}, and is not renewed automatically{step}."
        );
        return (Mark::Attention, what);
    }
    let next = ends.iter().find_map(|end| Some((short(end.name), end.renews?, end.when_used)));
    let what = match next {
        Some((name, day, true)) => format!("\"{name}\" renews on use from {day}"),
        Some((name, day, false)) => format!("\"{name}\" is renewed on {day}"),
        None => format!("\"{}\" ends in {}", short(first.name), days(first.days_left)),
    };
    (Mark::Good, format!("No action needed. Next: {what}."))
}

/// The next step for a certificate of a node that has ended, for an authority, and for one that
/// ends soon.
const LOOK: &str = "Check the clock, then the logs (F6) of its node.";
const REPLACE: &str =
    "Check the clock; an owner replaces the authority: `polisctl cluster rotate-ca`.";
const REPLACE_IN_TIME: &str = "; an owner replaces it: `polisctl cluster rotate-ca`";

/// Days before its end when a person who does not use a certificate is reminded of it.
const DAYS_TO_USE: i64 = 7;

/// Whether a certificate lives although it should have been replaced.
fn is_late(certificate: &Certificate) -> bool {
    if certificate.when_used {
        return (0..DAYS_TO_USE).contains(&certificate.days_left);
    }
    certificate.renews.is_some() && certificate.used > certificate.renew_at
}

fn days(days: i64) -> String {
    plural(days.unsigned_abs(), "day")
}

/// How a row is shared out.
struct Columns {
    name: usize,
    bar: usize,
    /// Whether there is room for both dates beside the days that are left.
    dates: bool,
}

impl Columns {
    fn of(width: usize) -> Self {
        let dates = INDENT + NAME_MIN + 2 * DATE + LEFT <= width;
        let rest = INDENT + LEFT + if dates { 2 * DATE } else { 0 };
        let name = width.saturating_sub(rest + BAR_MIN).clamp(NAME_MIN, NAME_MAX);
        // A shorter bar shows nothing.
        let bar = width.saturating_sub(rest + name).min(BAR_MAX);
        Self { name, bar: if bar < BAR_MIN / 2 { 0 } else { bar }, dates }
    }

    fn head(&self) -> Line<'static> {
        let whole = "authorities and what they signed";
        let fits = cells(whole) < INDENT + self.name;
        let row = Row::default().cell(
            INDENT + self.name,
            DIM,
            if fits { whole } else { "authorities, what they sign" },
        );
        match self.dates {
            true => row.cell(DATE, DIM, "renews").cell(DATE, DIM, "ends").cell(LEFT, DIM, ""),
            false => row.cell(LEFT, DIM, "ends"),
        }
        .put(DIM, if self.bar > 0 { "life so far" } else { "" })
        .line()
    }

    fn row(&self, mark: Mark, name: Row, renews: &str, ends: &str, days_left: i64) -> Row {
        let row = Row::default()
            .cell(INDENT, mark.style(), mark.glyph())
            .join(self.name.saturating_sub(1), name)
            .gap(1);
        let by_hand = if renews == BY_HAND { DIM } else { PLAIN };
        let row = match self.dates {
            true => row.cell(DATE, by_hand, renews).cell(DATE, PLAIN, ends),
            false => row,
        };
        row.cell(LEFT, mark.style(), &remaining(days_left))
    }

    fn authority(&self, it: &Authority, signed: bool, width: usize) -> Vec<Line<'static>> {
        let mark = mark(it.days_left, DAYS_FOR_A_PERSON);
        let name = Row::default().put(STRONG, &it.name);
        let row = self.row(mark, name, BY_HAND, &it.ends, it.days_left);
        let mut lines = vec![gauge::share(row, self.bar, mark.style(), it.used, None).line()];
        let branch = if signed { "│" } else { "" };
        let mut fact = |what: &str, style: Style, text: &str| {
            let left = width.saturating_sub(2 * INDENT + FACT);
            let lead = Row::default().cell(INDENT, PLAIN, "").cell(INDENT, DIM, branch);
            for (at, line) in wrap(&clean(text), left).iter().enumerate() {
                let what = if at == 0 { what } else { "" };
                lines.push(lead.clone().cell(FACT, DIM, what).put(style, line).line());
            }
        };
        if let Some(words) = &it.words {
            fact("words", PLAIN, words);
        }
        let hex: String = it.fingerprint.iter().map(|byte| format!("{byte:02x}")).collect();
        fact("SHA-256", PLAIN, &hex);
        let revokes = it.crl.as_ref().is_some_and(|crl| crl.entries > 0);
        fact("signed", if revokes { PLAIN } else { DIM }, &signed_text(it));
        lines
    }

    fn certificate(&self, it: &Certificate, branch: &str) -> Line<'static> {
        let enough = if it.renews.is_some() { 0 } else { DAYS_FOR_A_PERSON };
        let late = if is_late(it) { Mark::Attention } else { Mark::Good };
        let mark = match it.revoked || it.when_used && it.days_left < 0 {
            true => Mark::Idle,
            false => mark(it.days_left, enough).max(late),
        };
        let revoked = if it.revoked { " (revoked)" } else { "" };
        let name = Row::default()
            .put(DIM, branch)
            .put(if it.revoked { DIM } else { PLAIN }, &format!("{}{revoked}", it.name));
        let renews = it.renews.as_deref().unwrap_or(BY_HAND);
        let row = self.row(mark, name, renews, &it.ends, it.days_left);
        let renewal = it.renews.as_ref().map(|_day| it.renew_at);
        gauge::share(row, self.bar, mark.style(), it.used, renewal).line()
    }
}

const BY_HAND: &str = "by hand";

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

/// The certificates that an authority signed, and those that it revoked.
fn signed_text(it: &Authority) -> String {
    let signed = count(it.issued);
    let Some(crl) = &it.crl else { return format!("{signed}; no CRL yet") };
    let age = ago(crl.age);
    let revoked = match crl.entries {
        0 => "none".to_owned(),
        some => count(some),
    };
    format!("{signed}, revoked {revoked}; CRL {}, issued {age}", count(crl.number))
}
