//! The Boot page: is the node up? What does it wait for, since when, and what should I
//! do?

use std::time::Duration;

use ratatui::style::Style;
use ratatui::text::Line;

use super::{Content, WIDE, load, logs};
use crate::page::Page;
use crate::snapshot::{Cluster, Header, Logs, Snapshot, Stage, StageState};
use crate::text::{clean, duration, name, plural, width as cells, wrap};
use crate::theme::{ATTENTION, BAD, BUSY, DIM, GOOD, Mark, PLAIN, STRONG};
use crate::widgets::Row;
use crate::widgets::block::{beside, blank, titled};
use crate::widgets::headline::{self, INDENT, hanging, headline, note};
use crate::widgets::timeline::{Fill, Timeline};

/// Columns of the stage's name, its state and its length.
const NAME: usize = 12;
const STATE: usize = 9;
const LENGTH: usize = 12;

/// Longer bars than this say nothing more, and pull the eye away from the names.
const BAR_MAX: usize = 100;

/// Fewer stages than these are not folded into one.
const FOLDED_MIN: usize = 4;

/// Column of a page's name and key.
const PAGE: usize = 13;

/// On a wide screen, columns for the load, and what keeps it apart.
const RIGHT: usize = 44;
const GAP: usize = 3;

/// Rows of a chart.
const ROWS: usize = 3;

const SPLIT: &str = "cut off from the cluster: too few of its members answer. \
                     The etcd page (F3) names them.";
const NO_CURATOR: &str = "cut off from the cluster: no curator answers. Check the network to the \
                          other nodes; the Cluster page (F2) has their addresses.";
const DISOWNING: &str = "This node was removed from its cluster and cannot return. Reinstall the \
                         machine to use it again.";

const LET_IN: &str = "Starting: an operator must approve this machine. It has been waiting for";

pub(crate) fn content(snapshot: &Snapshot, unfolded: bool, width: usize, height: usize) -> Content {
    let others = others(snapshot);
    let (mark, answer) = answer(snapshot);
    let (mark, answer) = match others.iter().map(|(_, mark, _)| *mark).max() {
        Some(worst) if mark == Mark::Good => {
            let pages = others.iter().filter(|(_, mark, _)| *mark == worst).count();
            running(worst, pages as u64, snapshot.ready)
        }
        _ => (mark, answer),
    };
    let mut body = headline(mark, &answer, width);
    body.extend(words(snapshot, width));
    body.push(blank());
    let remarks = remarks(snapshot, width);
    if !remarks.is_empty() {
        body.extend(remarks);
        body.push(blank());
    }
    let load = snapshot.metrics.as_ref();
    let wide = width >= WIDE && load.is_some();
    let cells = if wide { width - RIGHT } else { width };
    let left = if wide { cells.saturating_sub(GAP) } else { cells };
    let mut facts: Vec<_> = others.iter().flat_map(|it| answer_of(it, left)).collect();
    if !facts.is_empty() {
        facts.push(blank());
    }
    let beside_it = load.filter(|_| wide).map(|load| load::down(load, RIGHT, ROWS));
    let below = load.filter(|_| !wide).map(|load| load::across(load, width, ROWS));
    let below = below.unwrap_or_default();
    let rows = height.saturating_sub(body.len() + facts.len() + below.len());
    facts.extend(stages(snapshot, unfolded, left, rows));
    body.extend(beside(facts, cells, beside_it.unwrap_or_default()));
    body.extend(below);
    body.extend(log(&snapshot.logs, width, height.saturating_sub(body.len())));
    Content { body, ..Content::default() }
}

/// The answers of the other pages, once the boot is over.
fn others(snapshot: &Snapshot) -> Vec<(Page, Mark, String)> {
    let is_shown = |page: &Page| match page {
        Page::Boot => false,
        Page::Workloads => super::workloads::has_role(snapshot),
        _ => true,
    };
    let pages = Page::ALL.into_iter().filter(is_shown);
    let pages = pages.filter(|_| snapshot.ready.is_some());
    pages.filter_map(|page| page.answer(snapshot).map(|(mark, text)| (page, mark, text))).collect()
}

/// The answer of another page, with its name and its key.
fn answer_of((page, mark, text): &(Page, Mark, String), width: usize) -> Vec<Line<'static>> {
    let style = match mark {
        Mark::Attention | Mark::Bad => mark.style(),
        Mark::Idle | Mark::Good | Mark::Busy => PLAIN,
    };
    let column = INDENT + PAGE;
    let lines = wrap(&clean(text), width.saturating_sub(column));
    let row = |(at, line): (usize, &String)| {
        let row = match at {
            0 => Row::default()
                .cell(INDENT, mark.style(), mark.glyph())
                .put(STRONG, page.title())
                .put(DIM, &format!(" F{}", *page as u8 + 1)),
            _ => Row::default(),
        };
        row.to(column).put(style, line).line()
    };
    lines.iter().enumerate().map(row).collect()
}

/// The newest lines of the log, where there is room for some.
fn log(logs: &Logs, width: usize, rows: usize) -> Vec<Line<'static>> {
    let title = Row::default().put(STRONG, "Log").put(DIM, " F6");
    let block = logs::block(logs, title, logs::Of::All, width, rows.saturating_sub(1));
    if block.is_empty() { block } else { std::iter::once(blank()).chain(block).collect() }
}

/// The words that a person compares before they approve this node.
fn words(snapshot: &Snapshot, width: usize) -> Vec<Line<'static>> {
    let Header { cluster: Cluster::Foreign, words: Some(words), .. } = &snapshot.header else {
        return Vec::new();
    };
    let reason = |stage: &Stage| match &stage.state {
        StageState::Waiting { what, .. } => what.contains(words.as_str()),
        _ => false,
    };
    if snapshot.stages.iter().any(reason) {
        return Vec::new();
    }
    let lead = "key fingerprint: ";
    let row = Row::indented(INDENT).put(DIM, lead).put(STRONG, words);
    if row.used() <= width { vec![row.line()] } else { hanging(INDENT, "", STRONG, words, width) }
}

fn remarks(snapshot: &Snapshot, width: usize) -> Vec<Line<'static>> {
    let mut lines = Vec::new();
    if let Some(failure) = &snapshot.previous_failure {
        let text = format!("The previous boot failed: {failure}");
        lines.extend(note(Mark::Attention, &text, width));
    }
    for warning in &snapshot.warnings {
        lines.extend(note(Mark::Attention, &warning.text, width));
        if let Some(help) = &warning.help {
            lines.extend(hanging(INDENT, "► ", PLAIN, help, width));
        }
    }
    lines
}

/// The worst fact about this node first: failures, losses, waits.
pub(crate) fn answer(snapshot: &Snapshot) -> (Mark, String) {
    let is_failed = |stage: &&Stage| stage.state == StageState::Failed;
    if let Some(stage) = snapshot.stages.iter().find(is_failed) {
        return (Mark::Bad, format!("Boot stopped: stage \"{}\" failed.", name(&stage.name)));
    }
    let (and, but) = match snapshot.ready {
        Some(_since) => ("Running, but", "Running, but"),
        None => ("Starting, and", "Starting:"),
    };
    match snapshot.header.cluster {
        Cluster::Split => {
            let why = if is_leaderless(snapshot) { SPLIT } else { NO_CURATOR };
            return (Mark::Bad, format!("{and} {why}"));
        }
        Cluster::Disowning => return (Mark::Bad, DISOWNING.to_owned()),
        Cluster::Unknown | Cluster::Foreign | Cluster::Trusted | Cluster::Home => {}
    }
    for stage in &snapshot.stages {
        if let StageState::Waiting { since, .. } = &stage.state {
            if snapshot.header.cluster == Cluster::Foreign {
                return (Mark::Attention, format!("{LET_IN} {}.", duration(*since)));
            }
            let (name, since) = (name(&stage.name), duration(*since));
            return (Mark::Busy, format!("{but} {name} has been waiting for {since}."));
        }
    }
    if snapshot.ready.is_some() {
        return running(Mark::Good, 0, snapshot.ready);
    }
    let started = snapshot.stages.iter().filter(|stage| stage.state == StageState::Started);
    let names: Vec<String> = started.map(|stage| name(&stage.name)).collect();
    let what = if names.is_empty() { String::new() } else { format!(": {}", names.join(", ")) };
    (Mark::Busy, format!("Starting{what}."))
}

/// Whether this node has a member of etcd, and that knows no leader: a node is cut off for that,
/// or else because no curator answers.
fn is_leaderless(snapshot: &Snapshot) -> bool {
    snapshot.etcd.as_ref().is_some_and(|etcd| !etcd.quorum)
}

/// Whether [`answer`] may have changed, with the same header: all that it reads.
pub(crate) fn may_answer_anew(old: &Snapshot, new: &Snapshot) -> bool {
    (old.ready, &old.stages) != (new.ready, &new.stages) || is_leaderless(old) != is_leaderless(new)
}

/// The answer once the node is ready, where `worst` is the worst mark of the other pages
/// and `pages` the number of pages that have it.
fn running(worst: Mark, pages: u64, ready: Option<Duration>) -> (Mark, String) {
    let (mark, state) = match worst {
        Mark::Bad => (worst, format!("Running, {}.", plural(pages, "error"))),
        Mark::Attention => (worst, format!("Running, {}.", plural(pages, "warning"))),
        Mark::Idle | Mark::Good | Mark::Busy => (Mark::Good, "Running.".to_owned()),
    };
    let ready = ready.map(duration).unwrap_or_default();
    (mark, format!("{state} Ready {ready} after the kernel started."))
}

/// The stages on a line of time; if `rows` are too few, the finished stages are folded
/// into fewer rows, unless a person asked for all of them.
fn stages(snapshot: &Snapshot, unfolded: bool, width: usize, rows: usize) -> Vec<Line<'static>> {
    let stages = &snapshot.stages;
    let all: Vec<Vec<&Stage>> = stages.iter().map(|stage| vec![stage]).collect();
    let whole = timeline(&all, snapshot, width);
    if unfolded || whole.len() <= rows {
        return whole;
    }
    let is_over = |stage: &Stage| {
        stage.state == StageState::Done
            || stage.state == StageState::Pending && snapshot.ready.is_some()
    };
    if stages.iter().all(is_over) {
        return over(stages, width, rows);
    }
    let first = stages.iter().take_while(|stage| stage.state == StageState::Done).count();
    if first < FOLDED_MIN {
        return whole;
    }
    let mut folded = vec![stages[..first].iter().collect()];
    folded.extend(stages[first..].iter().map(|stage| vec![stage]));
    timeline(&folded, snapshot, width)
}

/// A boot that is over: how long each of its stages took, where there is room.
fn over(stages: &[Stage], width: usize, rows: usize) -> Vec<Line<'static>> {
    const BETWEEN: &str = " · ";
    let title = Row::default().put(STRONG, "Boot").put(DIM, " Enter shows when each stage began");
    let mut lines = vec![titled(title, width)];
    let mut row = Row::default();
    for stage in stages.iter().filter(|stage| stage.state == StageState::Done) {
        let took = format!(" {}", duration(stage.elapsed));
        let cells = cells(BETWEEN) + cells(&clean(&stage.name)) + cells(&took);
        if row.used() > 0 && row.used() + cells > width {
            lines.push(std::mem::take(&mut row).line());
        }
        let between = if row.used() > 0 { BETWEEN } else { "" };
        row = row.put(DIM, between).put(PLAIN, &stage.name).put(DIM, &took);
    }
    lines.extend([row.line(), blank()]);
    if lines.len() > rows {
        // Of all that stands here, this is needed least.
        lines.drain(1..lines.len() - 1);
    }
    lines.truncate(rows);
    lines
}

/// A bar for each of `groups`, which are stages that stand alike.
fn timeline(groups: &[Vec<&Stage>], snapshot: &Snapshot, width: usize) -> Vec<Line<'static>> {
    if groups.is_empty() {
        return Vec::new();
    }
    let column = INDENT + NAME + STATE + LENGTH + 2;
    let cells = width.saturating_sub(column).min(BAR_MAX);
    let end = groups.iter().flatten().map(|stage| stage.started.saturating_add(stage.elapsed));
    let line = Timeline::new(cells, end.max().unwrap_or(Duration::ZERO));
    let ready = snapshot.ready.is_some();
    let of = |group: &Vec<&Stage>| match group.as_slice() {
        [stage] => rows(stage, ready, line, column, width),
        many => rows(&together(many), ready, line, column, width),
    };
    let mut lines: Vec<Line<'static>> = groups.iter().flat_map(of).collect();
    lines.push(Row::indented(column).put(DIM, &line.axis()).line());
    lines
}

/// Stages that are over, as one.
fn together(stages: &[&Stage]) -> Stage {
    let started = stages.iter().map(|stage| stage.started).min().unwrap_or_default();
    let end = stages.iter().map(|stage| stage.started.saturating_add(stage.elapsed)).max();
    Stage {
        name: plural(stages.len() as u64, "stage"),
        state: StageState::Done,
        started,
        elapsed: end.unwrap_or_default().saturating_sub(started),
    }
}

fn rows(
    stage: &Stage,
    ready: bool,
    line: Timeline,
    column: usize,
    width: usize,
) -> Vec<Line<'static>> {
    let look = Look::of(stage, ready);
    let bar = match look.fill {
        Some(fill) => line.bar(stage.started, stage.elapsed, fill),
        None => line.empty(),
    };
    let length = look.fill.map_or_else(String::new, |_| duration(stage.elapsed));
    let row = Row::default()
        .cell(INDENT, look.style, look.mark.glyph())
        .cell(NAME, PLAIN, &stage.name)
        .cell(STATE, look.style, look.word)
        .right(LENGTH, PLAIN, &length)
        .to(column)
        .dotted(look.style, &bar);
    let mut lines = vec![row.line()];
    if let StageState::Waiting { what, since } = &stage.state {
        let (what, command) = split_command(what);
        let text = format!("{} so far, waiting for {what}", duration(*since));
        lines.extend(hanging(INDENT, "└ ", ATTENTION, &text, width));
        lines.extend(command.into_iter().flat_map(|command| headline::command(command, width)));
    }
    lines
}

/// The condition that the boot waits for, and the command at its end that brings it
/// about, if there is one.
fn split_command(what: &str) -> (&str, Option<&str>) {
    let split = || {
        let (before, command) = what.strip_suffix('`')?.rsplit_once('`')?;
        Some((before.trim_end(), command))
    };
    split().map_or((what, None), |(before, command)| (before, Some(command)))
}

/// How a stage looks in each of its states.
struct Look {
    mark: Mark,
    word: &'static str,
    style: Style,
    fill: Option<Fill>,
}

impl Look {
    /// A stage that has not begun once the node is `ready` does not apply to this node.
    fn of(stage: &Stage, ready: bool) -> Self {
        let (mark, word, style, fill) = match stage.state {
            StageState::Pending if ready => (Mark::Idle, "not here", DIM, None),
            StageState::Pending => (Mark::Idle, "pending", DIM, None),
            StageState::Started => (Mark::Busy, "started", BUSY, Some(Fill::Working)),
            StageState::Waiting { .. } => {
                (Mark::Attention, "waiting", ATTENTION, Some(Fill::Waiting))
            }
            StageState::Done => (Mark::Good, "done", GOOD, Some(Fill::Over)),
            StageState::Failed => (Mark::Bad, "failed", BAD, Some(Fill::Over)),
        };
        Self { mark, word, style, fill }
    }
}
