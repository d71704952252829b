//! The etcd page: would the cluster survive the loss of a member?

use ratatui::style::Style;
use ratatui::text::Line;

use super::load::Chart;
use super::naming::{called_by_id, name_of, short};
use super::{Content, WIDE};
use crate::snapshot::{Bucket, Etcd, History, Member, MemberStatus, Snapshot, Snapshots};
use crate::text::{ago, bytes, clean, count, cut, duration, micros, name, plural, wrap};
use crate::theme::{ATTENTION, BUSY, DIM, Mark, PLAIN, STRONG};
use crate::widgets::block::{blank, title, titled};
use crate::widgets::headline::{INDENT, command, headline, note};
use crate::widgets::{Row, gauge};

/// Columns after the name: standing, lag, round trip, database.
const STANDING: usize = 25;
const LAG: usize = 10;
const TRIP: usize = 11;
const DB: usize = 12;

/// A whole node ID and one to keep apart; a narrow screen shows its beginning.
const NAME_MAX: usize = 39;
const NAME_MIN: usize = 16;

/// Between the columns and what stands beside them.
const GAP: usize = 4;

/// Column of the names of facts.
const FACT: usize = 11;

/// Longest bar, and the one of a learner beside its standing.
const BAR_MAX: usize = 30;
const LEARNER: usize = 10;

/// From here on, in percent, a person should think about the database's size.
const DB_FULL: u8 = 80;

/// A member that is so many entries behind is drawn to the eye.
const BEHIND: u64 = 1_000;

const NO_QUORUM: &str = "No quorum: this node cannot write to the cluster. Start the members \
                         that do not answer, or repair the network to them.";
const ONLY_VOTER: &str = "Losing this node stops the cluster: it is the only voter. \
                          Three voters survive the loss of one.";
const TWO_VOTERS: &str = "Losing one of the 2 voters stops the cluster. \
                          Three voters survive the loss of one.";
const STOPPED: &str = "This node's member is stopped; the state of the others is not known here. \
                       See Services (F5) for the reason.";
const STARTING: &str = "This node's member is starting; the state of the others is not known yet.";
const LEARNING: &str = "This node's member is a learner: it votes once it has caught up.";
const ASKING: &str = "The connections to the other voters are not known yet.";
const UNKNOWN: &str = "The connections to the other voters are not known: their nodes answer, but \
                      etcd here does not report its connections.";
const FULL: &str = "at 100 % etcd accepts no writes. Remove what the cluster does not need, such \
                    as old objects of Kubernetes.";

/// Names that fit in a sentence.
const NAMED_MAX: usize = 2;

/// From so many columns on, secondary facts stand beside the rest.
const PLACE: usize = 64;

pub(crate) fn content(snapshot: &Snapshot, width: usize) -> Content {
    let Some(etcd) = &snapshot.etcd else {
        let mut head = headline(Mark::Idle, &absent(snapshot), width);
        if super::cluster::members_elsewhere(snapshot).is_some() {
            // The beginning of it is enough, and with it the command has one line.
            let node = snapshot.header.node.as_deref().map_or("NODE".to_owned(), short);
            head.push(blank());
            head.extend(note(Mark::Idle, "To add one, an owner runs:", width));
            head.extend(command(
                &format!("polisctl node roles {node} --add consensus-member"),
                width,
            ));
        }
        return Content { head, ..Content::default() };
    };
    let (mark, answer) = classify(etcd, snapshot);
    let mut body = headline(mark, &answer, width);
    for alarm in &etcd.alarms {
        body.extend(headline(Mark::Bad, &alarm_text(alarm), width));
    }
    body.push(blank());
    if let Some(quorum) = quorum(etcd, width) {
        body.extend(quorum);
        body.push(blank());
    }
    let silent = etcd.members.iter().filter(|it| !it.own && it.answers == Some(false));
    // Without a quorum nothing can be deleted: the headline names what helps then.
    for member in silent.filter(|it| etcd.quorum && !it.name.is_empty()).take(NAMED_MAX) {
        let text = format!(
            "{} does not answer: switch it on, or check its network; if its machine is lost, \
             an operator runs:",
            called_by_id(snapshot, &member.name)
        );
        body.extend(note(Mark::Attention, &text, width));
        body.extend(command(&format!("polisctl node delete {} --force", member.name), width));
        body.push(blank());
    }
    let columns = Columns::of(width);
    body.push(titled(columns.head(etcd.members.len()), width));
    body.extend(etcd.members.iter().flat_map(|member| rows(member, snapshot, &columns, width)));
    body.push(blank());
    let database = if etcd.takes_part() { "Database" } else { "Database, at the last report" };
    body.push(title(database, width));
    body.extend(facts(etcd, width));
    body.extend(past(&etcd.past, width));
    body.extend(super::reach::block(snapshot, width));
    Content { body, ..Content::default() }
}

/// How a row is shared out. On a screen without room for all columns, the least useful ones are
/// left out: a part of a number is a wrong number.
struct Columns {
    name: usize,
    standing: usize,
    lag: bool,
    trip: bool,
    db: bool,
    /// Whether there is room for the number and the address of a member, too.
    wide: bool,
}

impl Columns {
    fn of(width: usize) -> Self {
        let left = width.saturating_sub(INDENT + STANDING + LAG + TRIP + DB);
        let name = left.clamp(NAME_MIN, NAME_MAX);
        let standing = STANDING.min(width.saturating_sub(INDENT + name));
        let fits = |more: usize| INDENT + name + STANDING + more <= width;
        Self {
            name,
            standing,
            lag: fits(LAG),
            trip: fits(LAG + TRIP),
            db: fits(LAG + TRIP + DB),
            wide: left >= NAME_MAX + PLACE,
        }
    }

    fn head(&self, members: usize) -> Row {
        let row =
            Row::default().cell(INDENT + self.name, STRONG, &plural(members as u64, "member"));
        let row = match self.lag {
            // The head of the second column is wider than its values.
            true => row.cell(STANDING - LAG, DIM, "standing").right(2 * LAG, DIM, "entries behind"),
            false => row.cell(self.standing, DIM, "standing"),
        };
        let row = if self.trip { row.right(TRIP, DIM, "answers") } else { row };
        let row = if self.db { row.right(DB, DIM, "database") } else { row };
        if self.wide { row.gap(GAP).put(DIM, "number and address") } else { row }
    }
}

/// The charts of the recent past, where there is room.
fn past(past: &History, width: usize) -> Vec<Line<'static>> {
    let History { pace, commit, elections, db_size } = past;
    if width < WIDE || commit.is_empty() {
        return Vec::new();
    }
    let charts = [
        Chart::new("Commit", commit.clone(), LEAST_COMMIT, micros),
        Chart::new("Leader changes", elections.clone(), LEAST_ELECTIONS, count),
        Chart::new("Database", db_size.clone(), LEAST_DB, bytes),
    ];
    let span = pace.saturating_mul(u32::try_from(commit.len()).unwrap_or(u32::MAX));
    let text = format!(" of the last {}, a column for {}", duration(span), duration(*pace));
    let head = Row::default().put(STRONG, "History").put(DIM, &text);
    let mut lines = vec![blank(), titled(head, width)];
    lines.extend(super::load::beside(&charts, width, PAST));
    lines
}

/// Rows of a chart of the past.
const PAST: usize = 2;

/// The lowest ends of the scales: a commit in microseconds that no disk is faster than by
/// much, a leader that changes now and then, and a database in bytes that is small.
const LEAST_COMMIT: u64 = 1 << 10;
const LEAST_ELECTIONS: u64 = 4;
const LEAST_DB: u64 = 1 << 20;

fn voters(etcd: &Etcd) -> impl Iterator<Item = &Member> {
    etcd.members.iter().filter(|member| member.standing == MemberStatus::Voter)
}

/// The most important: of alarms and members, the worse.
pub(crate) fn answer(snapshot: &Snapshot) -> (Mark, String) {
    let Some(etcd) = &snapshot.etcd else { return (Mark::Idle, absent(snapshot)) };
    let (mark, answer) = classify(etcd, snapshot);
    match etcd.alarms.first() {
        Some(alarm) if mark < Mark::Bad => (Mark::Bad, alarm_text(alarm)),
        _ => (mark, answer),
    }
}

/// Whether [`answer`] may have changed, as to the members: all that it reads.
pub(crate) fn may_answer_anew(old: &Snapshot, new: &Snapshot) -> bool {
    let (Some(old), Some(new)) = (&old.etcd, &new.etcd) else { return old.etcd != new.etcd };
    let read = |it: &Etcd| (it.quorum, it.survives, it.members.len(), nearly_full(it));
    let differ = |(old, new): (&Member, &Member)| {
        (&old.name, old.standing, old.own, old.answers, is_unreported(old))
            != (&new.name, new.standing, new.own, new.answers, is_unreported(new))
    };
    read(old) != read(new)
        || (&old.state, &old.alarms) != (&new.state, &new.alarms)
        || old.members.iter().zip(&new.members).any(differ)
}

/// The reason why this node has no member.
fn absent(snapshot: &Snapshot) -> String {
    match super::cluster::members_elsewhere(snapshot) {
        Some(members) => {
            format!("This node runs no etcd member: {members} store the state of the cluster.")
        }
        None => {
            "This node runs no etcd member yet. See the Boot page (F1) for the reason.".to_owned()
        }
    }
}

/// The most important fact about the members. A member that does not serve knows
/// nothing about others, and its earlier knowledge is not shown as if it still held.
fn classify(etcd: &Etcd, snapshot: &Snapshot) -> (Mark, String) {
    let all = voters(etcd).count();
    let silent: Vec<_> = voters(etcd).filter(|member| member.answers == Some(false)).collect();
    let is_coming = |member: &&Member| {
        member.answers == Some(true) && member.standing != MemberStatus::Voter && !member.own
    };
    let learners = etcd.members.iter().filter(is_coming).count();
    let (mark, answer) = match (etcd.state.as_str(), etcd.survives) {
        ("stopped", _) => (Mark::Attention, STOPPED.to_owned()),
        ("starting", _) => (Mark::Busy, STARTING.to_owned()),
        _ if all == 0 => (Mark::Busy, format!("This member is {}.", name(&etcd.state))),
        _ if !etcd.quorum => (Mark::Bad, NO_QUORUM.to_owned()),
        ("learner", _) => (Mark::Busy, LEARNING.to_owned()),
        (_, None) if voters(etcd).any(is_unreported) => (Mark::Attention, UNKNOWN.to_owned()),
        (_, None) => (Mark::Busy, ASKING.to_owned()),
        (_, Some(0)) if silent.is_empty() && all == 1 => {
            // A machine on its own needs no other member.
            let others = snapshot.nodes.as_ref().is_some_and(|known| known.nodes.len() > 1);
            (if others { Mark::Attention } else { Mark::Idle }, ONLY_VOTER.to_owned())
        }
        (_, Some(0)) if silent.is_empty() => (Mark::Attention, TWO_VOTERS.to_owned()),
        (_, Some(0)) => {
            let gone = gone(&silent, snapshot);
            (Mark::Bad, format!("{gone}: losing one more voter stops the cluster."))
        }
        (_, Some(some)) if silent.is_empty() => {
            (Mark::Good, format!("The cluster survives the loss of {some} of its {all} voters."))
        }
        (_, Some(some)) => {
            let gone = gone(&silent, snapshot);
            (Mark::Attention, format!("{gone}. The cluster survives the loss of {some} more."))
        }
    };
    let answer = match learners {
        0 => answer,
        1 => format!("{answer} A learner is catching up."),
        some => format!("{answer} {some} learners are catching up."),
    };
    match nearly_full(etcd) {
        // An alarm, and what is worse, is said instead.
        Some(percent) if mark < Mark::Bad && etcd.alarms.is_empty() => {
            (Mark::Attention, format!("{answer} The database is {percent} % full: {FULL}"))
        }
        _ => (mark, answer),
    }
}

/// The share of its quota that the database has used, in percent, where it is known.
fn used(etcd: &Etcd) -> Option<u8> {
    let percent = (u128::from(etcd.db_size) * 100).checked_div(u128::from(etcd.db_quota))?;
    Some(u8::try_from(percent).unwrap_or(100).min(100))
}

/// The same of a database that is a matter for a person; not of one at the last report.
fn nearly_full(etcd: &Etcd) -> Option<u8> {
    used(etcd).filter(|percent| *percent >= DB_FULL && etcd.takes_part())
}

/// Whether the node of a member answered when etcd's own account was not available.
fn is_unreported(member: &Member) -> bool {
    member.answers.is_none() && member.round_trip.is_some()
}

/// The members that do not answer, as a sentence without its end.
fn gone(silent: &[&Member], snapshot: &Snapshot) -> String {
    let called = |member: &&Member| match member.name.as_str() {
        "" => "one that has not started".to_owned(),
        id => called_by_id(snapshot, id),
    };
    let names = silent.iter().map(called).take(NAMED_MAX).collect::<Vec<_>>().join(", ");
    match silent.len() {
        1 => format!("{names} does not answer"),
        some @ ..=NAMED_MAX => format!("{names} do not answer ({some} voters)"),
        some => format!("{names} and {} more do not answer", some - NAMED_MAX),
    }
}

fn alarm_text(alarm: &str) -> String {
    let help = if alarm.contains("NOSPACE") {
        ": the database is full, and only reads and deletes are allowed. The member makes room \
         within minutes; if the alarm stays, remove what the cluster does not need, such as old \
         objects of Kubernetes."
    } else if alarm.contains("CORRUPT") {
        ": members have different data, and every write is refused. `polisctl cluster status` \
         has the next step."
    } else {
        "."
    };
    format!("Alarm {alarm}{help}")
}

/// A box for each voter, and a line where the majority is. A member that does not serve
/// shows no boxes: it does not know which voters answer.
fn quorum(etcd: &Etcd, width: usize) -> Option<Vec<Line<'static>>> {
    let all = voters(etcd).count();
    if all == 0 || !etcd.takes_part() {
        return None;
    }
    let count = |answers| voters(etcd).filter(|member| member.answers == answers).count();
    let (answer, asked) = (count(Some(true)), count(None));
    let needed = all / 2 + 1;
    let row = Row::default().cell(FACT, DIM, "Voters");
    let row = (1..=all.min(BAR_MAX)).fold(row, |row, at| {
        let mark = match at {
            at if at <= answer => Mark::Good,
            at if at <= answer + asked => Mark::Idle,
            _ => Mark::Bad,
        };
        let edge = if at == needed && at < all { "│" } else { " " };
        row.put(mark.style(), mark.glyph()).put(DIM, edge)
    });
    let asked = if asked == 0 { String::new() } else { format!(", {asked} not known") };
    let verb = if answer == 1 { "answers" } else { "answer" };
    let need = if needed == 1 { "is" } else { "are" };
    let text = format!("{answer} of {all} {verb}{asked}; {needed} {need} needed to write");
    let style = if etcd.quorum { PLAIN } else { Mark::Bad.style() };
    Some(beside(row.gap(1), FACT, style, &text, width))
}

/// `text` after `lead`, which goes on below in `column`.
fn beside(lead: Row, column: usize, style: Style, text: &str, width: usize) -> Vec<Line<'static>> {
    // The first line has less room than the others: as if it began with an indent.
    let indent = "\u{a0}".repeat(lead.used().saturating_sub(column));
    let text = format!("{indent}{}", clean(text));
    let lines = wrap(&text, width.saturating_sub(column));
    let row = |(at, line): (usize, &String)| {
        let row = if at == 0 { lead.clone() } else { Row::indented(column) };
        row.put(style, line.trim_start_matches('\u{a0}')).line()
    };
    lines.iter().enumerate().map(row).collect()
}

fn rows(
    member: &Member,
    snapshot: &Snapshot,
    columns: &Columns,
    width: usize,
) -> Vec<Line<'static>> {
    let id = format!("{:016x}", member.id);
    let name = match member.name.as_str() {
        "" => "(not started)".to_owned(),
        id if columns.name < NAME_MAX => called_by_id(snapshot, id),
        id => name_of(snapshot, id).unwrap_or_else(|| id.to_owned()),
    };
    let mark = match (member.answers, member.standing) {
        (Some(false), _) => Mark::Bad,
        (None, _) => Mark::Idle,
        (Some(true), MemberStatus::Voter) => Mark::Good,
        (Some(true), MemberStatus::Learner { .. }) => Mark::Busy,
    };
    let words = match member.standing {
        MemberStatus::Voter if member.leader => "voter, leader",
        MemberStatus::Voter => "voter",
        MemberStatus::Learner { .. } => "learner",
    };
    let words = match member.answers {
        Some(true) => words.to_owned(),
        Some(false) => match snapshot.etcd.as_ref().filter(|it| member.own && !it.takes_part()) {
            Some(own) => format!("{words}, {}", crate::text::name(&own.state)),
            None => format!("{words}, no answer"),
        },
        None => format!("{words}, not known"),
    };
    let words = if member.own && member.answers == Some(true) {
        format!("{words}, this node")
    } else {
        words
    };
    let standing = match (member.standing, member.answers) {
        // Its last answer is nothing to wait for.
        (MemberStatus::Learner { caught_up: Some(percent) }, Some(true)) => {
            let percent = percent.min(100);
            let row = Row::default().put(mark.style(), "learner ");
            gauge::share(row, LEARNER, BUSY, percent, None)
                .put(mark.style(), &format!(" {percent} %"))
        }
        _ => Row::default().put(mark.style(), &words),
    };
    let unknown = || "-".to_owned();
    let behind = member.lag.is_some_and(|lag| lag >= BEHIND);
    let lag = member.lag.map_or_else(unknown, count);
    let trip = member.round_trip.map_or_else(unknown, micros);
    let db = member.db_size.map_or_else(unknown, bytes);
    let row = Row::default()
        .cell(INDENT, mark.style(), mark.glyph())
        .cell(columns.name, if member.own { STRONG } else { PLAIN }, &name)
        .join(columns.standing, standing);
    let lagging = if behind { ATTENTION } else { PLAIN };
    let row = if columns.lag { row.right(LAG, lagging, &lag) } else { row };
    let row = if columns.trip { row.right(TRIP, PLAIN, &trip) } else { row };
    let row = if columns.db { row.right(DB, PLAIN, &db) } else { row };
    let place = format!("{id}  {}", crate::text::clean(&member.url));
    if columns.wide {
        let row = row.gap(GAP);
        let place = cut(&place, width.saturating_sub(row.used()));
        return vec![row.put(DIM, &place).line()];
    }
    let place = cut(&place, width.saturating_sub(INDENT));
    vec![row.line(), Row::indented(INDENT).put(DIM, &place).line()]
}

fn facts(etcd: &Etcd, width: usize) -> Vec<Line<'static>> {
    let fact = |name: &str| Row::default().cell(FACT, DIM, name);
    let behind = etcd.index.saturating_sub(etcd.applied);
    let applied = match behind {
        0 => "all applied".to_owned(),
        some => format!("{} not applied yet", count(some)),
    };
    let mut raft = format!("term {}, index {}, {applied}", etcd.term, count(etcd.index));
    if !etcd.version.is_empty() {
        raft = format!("{raft}; etcd {}", name(&etcd.version));
    }
    let mut size = fact("Size");
    let mut text = bytes(etcd.db_size);
    if let Some(percent) = used(etcd) {
        let style = if percent < DB_FULL { Mark::Good } else { Mark::Attention }.style();
        let left = width.saturating_sub(size.used() + TEXT).min(BAR_MAX);
        size = gauge::share(size, left, style, percent, Some(DB_FULL)).gap(1);
        text = format!("{text} of {}, {percent} %", bytes(etcd.db_quota));
    }
    if etcd.db_used > 0 {
        text = format!("{text}; {} in use", bytes(etcd.db_used));
    }
    let alarms = if etcd.alarms.is_empty() { "none".to_owned() } else { etcd.alarms.join(", ") };
    let facts = [(size, text), (fact("Raft"), raft), (fact("Alarms"), alarms)];
    let facts = facts.into_iter().map(|(lead, text)| (lead, PLAIN, text));
    let lead = fact("Snapshots");
    let kept = etcd.snapshots.iter().map(|it| (lead.clone(), PLAIN, kept(it)));
    let problem = etcd.snapshots.iter().filter_map(|it| it.problem.as_ref());
    let mark = Row::indented(FACT).put(Mark::Attention.style(), Mark::Attention.glyph()).gap(1);
    let problem = problem.map(|it| (mark.clone(), ATTENTION, it.clone()));
    let sent = etcd.bucket.iter().flat_map(|it| sent(it, &fact("Shipped"), &mark));
    facts
        .chain(kept)
        .chain(problem)
        .chain(sent)
        .flat_map(|(lead, style, text)| beside(lead, FACT, style, &text, width))
        .collect()
}

/// The snapshots on the disk of this node, in one line.
fn kept(snapshots: &Snapshots) -> String {
    let Some(newest) = &snapshots.newest else {
        return "no checked one on this node's disk".to_owned();
    };
    format!(
        "{} on this node's disk, the newest {}: {}, revision {}",
        count(snapshots.kept),
        ago(newest.age),
        bytes(newest.bytes),
        count(newest.revision)
    )
}

/// The snapshots outside of the cluster, and below it the reason why they cannot be sent.
fn sent(bucket: &Bucket, lead: &Row, mark: &Row) -> Vec<(Row, Style, String)> {
    let newest = bucket.newest.as_ref().map(|newest| {
        let (age, size) = (ago(newest.age), bytes(newest.bytes));
        format!("the newest {age}: {size}, revision {}", count(newest.revision))
    });
    let waits = bucket.waits_for.as_ref().map(|it| format!("waits for {it}"));
    let known = newest.or(waits).unwrap_or_else(|| "no known snapshot yet".to_owned());
    let problem = bucket.problem.as_ref().map(|problem| {
        let failing = bucket.failing.map(|time| format!(" for {}", duration(time)));
        let failing = failing.unwrap_or_default();
        (mark.clone(), ATTENTION, format!("fails{failing}: {problem}"))
    });
    let first = (lead.clone(), PLAIN, format!("to {}, {known}", bucket.url));
    std::iter::once(first).chain(problem).collect()
}

/// Columns of the text after the bar: `12.5 MiB of 2.0 GiB, 1 %; 10.1 MiB in use`.
const TEXT: usize = 46;

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::snapshot::Taken;

    #[test]
    fn an_alarm_has_its_next_step() {
        let full = alarm_text("NOSPACE on 8e9e05c52164694d");
        assert!(full.contains("if the alarm stays, remove what the cluster does not"), "{full}");
        let corrupt = alarm_text("CORRUPT");
        assert!(corrupt.contains("`polisctl cluster status` has the next step"), "{corrupt}");
    }

    #[test]
    fn a_bucket_has_the_newest_snapshot_or_why_it_has_none() {
        let shown = |bucket: &Bucket| {
            let lines = sent(bucket, &Row::default(), &Row::default());
            lines.into_iter().map(|(_, _, text)| text).collect::<Vec<_>>()
        };
        let url = "s3+https://s3.example:443/bucket".to_owned();
        let none = Bucket { url, ..Bucket::default() };
        assert_eq!(shown(&none), ["to s3+https://s3.example:443/bucket, no known snapshot yet"]);
        let first = Bucket { waits_for: Some("the first one".to_owned()), ..none.clone() };
        assert_eq!(shown(&first), ["to s3+https://s3.example:443/bucket, waits for the first one"]);
        let newest = Some(Taken { age: Duration::from_secs(120), bytes: 8 << 20, revision: 1234 });
        let problem = Some("it refuses; ask its owner".to_owned());
        let failing = Some(Duration::from_secs(3600));
        let failing = Bucket { newest, problem, failing, ..none };
        let lines = shown(&failing);
        let first = "to s3+https://s3.example:443/bucket, the newest 2 min ago: 8.0 MiB, revision";
        assert!(lines[0].starts_with(first), "{lines:?}");
        assert_eq!(lines[1], "fails for 1 h: it refuses; ask its owner");
        // The clock was set back since the first failure.
        let unknown = Bucket { failing: None, ..failing };
        assert_eq!(shown(&unknown)[1], "fails: it refuses; ask its owner");
    }
}
