//! Answers: would the cluster survive the loss of a member?

use ratatui::text::Line;

use super::{Content, blank, title};
use crate::snapshot::{Etcd, Member, Snapshot, Standing};
use crate::text::{bytes, count, name, plural};
use crate::theme::{BUSY, DIM, Mark, PLAIN, STRONG};
use crate::widgets::headline::{INDENT, headline};
use crate::widgets::{Row, life};

/// Column of a node ID: `polis-` and 32 digits, and one to keep apart.
const NAME: usize = 40;

/// Column of the names of facts.
const FACT: usize = 11;

/// Longest bar.
const BAR_MAX: usize = 30;

/// From here on, in percent, a person should think about the database's size.
const DB_FULL: u8 = 80;

const NO_QUORUM: &str = "No quorum: nothing can be written to the cluster. \
                         Bring back the members that do not answer.";
const ONLY_VOTER: &str = "Losing this node stops the cluster: it is the only voter. \
                          Three voters survive the loss of one.";
const MORE_VOTERS: &str = "Bring back those that do not answer, or add one.";

pub(crate) fn content(snapshot: &Snapshot, width: usize) -> Content {
    let Some(etcd) = &snapshot.etcd else {
        let text = "This node runs no etcd member yet. The Boot page (F1) says what it waits for.";
        return Content { head: headline(Mark::Idle, text, width), body: Vec::new() };
    };
    let (mark, answer) = answer(etcd);
    let mut body = headline(mark, &answer, width);
    for alarm in &etcd.alarms {
        body.extend(headline(Mark::Bad, &alarm_text(alarm), width));
    }
    body.extend([blank(), title(&plural(etcd.members.len() as u64, "member"))]);
    body.extend(etcd.members.iter().flat_map(|member| rows(member, width)));
    body.push(blank());
    body.extend(facts(etcd, width));
    Content { head: Vec::new(), body }
}

fn answer(etcd: &Etcd) -> (Mark, String) {
    let is_voter = |member: &&Member| member.standing == Standing::Voter;
    let voters = etcd.members.iter().filter(is_voter).count() as u64;
    let learners = etcd.members.len() as u64 - voters;
    let (mark, answer) = match etcd.survives {
        _ if voters == 0 => (Mark::Busy, format!("This member is {}.", name(&etcd.state))),
        None => (Mark::Bad, NO_QUORUM.to_owned()),
        Some(0) if voters == 1 => (Mark::Attention, ONLY_VOTER.to_owned()),
        Some(0) => (
            Mark::Attention,
            format!("Losing one more of the {voters} voters stops the cluster. {MORE_VOTERS}"),
        ),
        Some(some) => {
            (Mark::Good, format!("The cluster survives the loss of {some} of its {voters} voters."))
        }
    };
    match learners {
        0 => (mark, answer),
        1 => (mark, format!("{answer} A learner is catching up.")),
        some => (mark, format!("{answer} {some} learners are catching up.")),
    }
}

fn alarm_text(alarm: &str) -> String {
    let help = if alarm.contains("NOSPACE") {
        ": the database is full, and only reads and deletes are allowed until it is compacted."
    } else if alarm.contains("CORRUPT") {
        ": members hold different data. Remove the one that is named and let it join anew."
    } else {
        "."
    };
    format!("Alarm {alarm}{help}")
}

fn rows(member: &Member, width: usize) -> Vec<Line<'static>> {
    let name = if member.name.is_empty() { "(never started)" } else { &member.name };
    let mark = match (member.answers, member.standing) {
        (false, _) => Mark::Bad,
        (true, Standing::Voter) => Mark::Good,
        (true, Standing::Learner { .. }) => Mark::Busy,
    };
    let mut words = match member.standing {
        Standing::Voter if member.leader => "voter, leader".to_owned(),
        Standing::Voter => "voter".to_owned(),
        Standing::Learner { caught_up: None } => "learner".to_owned(),
        Standing::Learner { caught_up: Some(percent) } => format!("learner, has {percent} %"),
    };
    if member.own {
        words.push_str(", this node");
    }
    if !member.answers {
        words.push_str(", does not answer");
    }
    let mut row = Row::default()
        .cell(INDENT, mark.style(), mark.glyph())
        .cell(NAME, if member.own { STRONG } else { PLAIN }, name)
        .put(mark.style(), &words);
    let left = width.saturating_sub(row.used() + 1).min(BAR_MAX);
    if let (Standing::Learner { caught_up: Some(percent) }, 5..) = (member.standing, left) {
        row = life::share(row.gap(1), left, BUSY, percent, None);
    }
    let place = Row::indented(INDENT).put(DIM, &format!("{:016x}  {}", member.id, member.url));
    vec![row.line(), place.line()]
}

fn facts(etcd: &Etcd, width: usize) -> Vec<Line<'static>> {
    let fact = |name: &str| Row::default().cell(FACT, DIM, name);
    let behind = etcd.index.saturating_sub(etcd.applied);
    let applied = match behind {
        0 => "all applied".to_owned(),
        some => format!("{} not applied yet", count(some)),
    };
    let raft = format!("term {}, index {}, {applied}", etcd.term, count(etcd.index));
    let mut database = fact("Database").put(PLAIN, &bytes(etcd.db_size));
    if let Some(percent) = (u128::from(etcd.db_size) * 100).checked_div(u128::from(etcd.db_quota)) {
        let percent = u8::try_from(percent).unwrap_or(100).min(100);
        let style = if percent < DB_FULL { Mark::Good } else { Mark::Attention }.style();
        database = database.put(PLAIN, &format!(" of {}, {percent} %  ", bytes(etcd.db_quota)));
        let left = width.saturating_sub(database.used()).min(BAR_MAX);
        database = life::share(database, left, style, percent, Some(DB_FULL));
    }
    let alarms = if etcd.alarms.is_empty() { "none".to_owned() } else { etcd.alarms.join(", ") };
    vec![
        fact("Member").put(PLAIN, &etcd.state).line(),
        fact("Raft").put(PLAIN, &raft).line(),
        database.line(),
        fact("Alarms").put(PLAIN, &alarms).line(),
    ]
}
