//! Answers: is it up? What is it waiting for, since when, and what should I do?

use std::time::Duration;

use ratatui::style::Style;
use ratatui::text::Line;

use super::{Content, WIDE, load, logs};
use crate::snapshot::{Cluster, Header, Logs, Snapshot, Stage, StageState};
use crate::text::{duration, name};
use crate::theme::{ATTENTION, BAD, BUSY, DIM, GOOD, Mark, PLAIN, STRONG};
use crate::widgets::Row;
use crate::widgets::block::{beside, blank};
use crate::widgets::headline::{INDENT, hanging, headline, note};
use crate::widgets::timeline::{Fill, Timeline};

/// Columns of the stage's name, its state and its length.
const NAME: usize = 12;
const STATE: usize = 9;
const LENGTH: usize = 12;

/// Longer bars than this say nothing more, and pull the eye away from the names.
const BAR_MAX: usize = 100;

/// On a wide screen, columns for the load, and what keeps it apart.
const RIGHT: usize = 44;
const GAP: usize = 3;

/// Rows of a chart.
const ROWS: usize = 3;

const SPLIT: &str = "Up, but cut off from the cluster: too few of its members answer. \
                     The etcd page (F3) names them.";
const DISOWNING: &str = "This node was removed from its cluster, for ever. \
                         To use the machine again, install it anew.";

const LET_IN: &str = "Not up yet: a person must let this machine into the cluster. It has been \
                      waiting for";

pub(crate) fn content(snapshot: &Snapshot, width: usize, height: usize) -> Content {
    let (mark, answer) = answer(snapshot);
    let mut body = headline(mark, &answer, width);
    body.extend(words(snapshot, width));
    body.push(blank());
    let remarks = remarks(snapshot, width);
    if !remarks.is_empty() {
        body.extend(remarks);
        body.push(blank());
    }
    let load = snapshot.metrics.as_ref();
    if width >= WIDE {
        let right = load.map(|load| load::down(load, RIGHT, ROWS)).unwrap_or_default();
        let cells = if right.is_empty() { width } else { width - RIGHT };
        let stages = timeline(snapshot, cells.saturating_sub(GAP));
        body.extend(beside(stages, cells, right));
    } else {
        body.extend(timeline(snapshot, width));
        if let Some(load) = load {
            body.extend(load::across(load, width, ROWS));
        }
    }
    body.extend(said(&snapshot.logs, width, height.saturating_sub(body.len())));
    Content { body, ..Content::default() }
}

/// The newest lines of the log, where there is room for some.
fn said(logs: &Logs, width: usize, rows: usize) -> Vec<Line<'static>> {
    let title = Row::default().put(STRONG, "Log").put(DIM, " F6");
    let block = logs::block(logs, title, logs::Of::All, width, rows.saturating_sub(1));
    if block.is_empty() { block } else { std::iter::once(blank()).chain(block).collect() }
}

/// What is compared before a person lets this node in.
fn words(snapshot: &Snapshot, width: usize) -> Vec<Line<'static>> {
    let Header { cluster: Cluster::Foreign, words: Some(words), .. } = &snapshot.header else {
        return Vec::new();
    };
    let lead = "its key in words: ";
    let row = Row::indented(INDENT).put(DIM, lead).put(STRONG, words);
    if row.used() <= width { vec![row.line()] } else { hanging(INDENT, "", STRONG, words, width) }
}

fn remarks(snapshot: &Snapshot, width: usize) -> Vec<Line<'static>> {
    let mut lines = Vec::new();
    if let Some(failure) = &snapshot.previous_failure {
        let text = format!("The boot before this one failed: {failure}");
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

/// The worst thing first: what failed, what is lost, what is waited for.
fn answer(snapshot: &Snapshot) -> (Mark, String) {
    let is_failed = |stage: &&Stage| stage.state == StageState::Failed;
    if let Some(stage) = snapshot.stages.iter().find(is_failed) {
        return (Mark::Bad, format!("Not up: the stage \"{}\" has failed.", name(&stage.name)));
    }
    match snapshot.header.cluster {
        Cluster::Split => return (Mark::Bad, SPLIT.to_owned()),
        Cluster::Disowning => return (Mark::Bad, DISOWNING.to_owned()),
        Cluster::Unknown | Cluster::Foreign | Cluster::Trusted | Cluster::Home => {}
    }
    for stage in &snapshot.stages {
        if let StageState::Waiting { since, .. } = &stage.state {
            if snapshot.header.cluster == Cluster::Foreign {
                return (Mark::Attention, format!("{LET_IN} {}.", duration(*since)));
            }
            let up = if snapshot.ready.is_some() { "Up, but" } else { "Not up yet:" };
            let (name, since) = (name(&stage.name), duration(*since));
            return (Mark::Busy, format!("{up} {name} has been waiting for {since}."));
        }
    }
    if let Some(ready) = snapshot.ready {
        let ready = duration(ready);
        return (Mark::Good, format!("Up. It was ready {ready} after the kernel started."));
    }
    let started = snapshot.stages.iter().filter(|stage| stage.state == StageState::Started);
    let names: Vec<String> = started.map(|stage| name(&stage.name)).collect();
    let what = if names.is_empty() { String::new() } else { format!(": {}", names.join(", ")) };
    (Mark::Busy, format!("Starting{what}."))
}

fn timeline(snapshot: &Snapshot, width: usize) -> Vec<Line<'static>> {
    let Snapshot { stages, ready, .. } = snapshot;
    if stages.is_empty() {
        return Vec::new();
    }
    let column = INDENT + NAME + STATE + LENGTH + 2;
    let cells = width.saturating_sub(column).min(BAR_MAX);
    let end = stages.iter().map(|stage| stage.started.saturating_add(stage.elapsed)).max();
    let line = Timeline::new(cells, end.unwrap_or(Duration::ZERO));
    let mut lines: Vec<Line<'static>> =
        stages.iter().flat_map(|stage| rows(stage, ready.is_some(), line, column, width)).collect();
    lines.push(Row::indented(column).put(DIM, &line.axis()).line());
    lines
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
        let text = format!("{} so far, for {what}", duration(*since));
        lines.extend(hanging(INDENT, "└ ", ATTENTION, &text, width));
    }
    lines
}

/// How a stage looks in each of its states.
struct Look {
    mark: Mark,
    word: &'static str,
    style: Style,
    fill: Option<Fill>,
}

impl Look {
    /// What has not begun once the node is `ready` is not for this node to do.
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
