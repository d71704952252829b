//! Answers: is it up? What is it waiting for, since when, and what should I do?

use std::time::Duration;

use ratatui::style::Style;
use ratatui::text::Line;

use super::{Content, blank, title};
use crate::snapshot::{Cluster, Snapshot, Stage, StageState};
use crate::text::{clean, duration, pad};
use crate::theme::{ATTENTION, BAD, BUSY, DIM, GOOD, Mark, PLAIN};
use crate::widgets::Row;
use crate::widgets::headline::{INDENT, hanging, headline, note};
use crate::widgets::timeline::{Fill, Timeline};

/// Columns of the stage's name, its state and its length.
const NAME: usize = 12;
const STATE: usize = 14;
const LENGTH: usize = 11;

/// Longer bars than this say nothing more, and pull the eye away from the names.
const BAR_MAX: usize = 100;

pub(crate) fn content(snapshot: &Snapshot, width: usize) -> Content {
    let (mark, answer) = answer(snapshot);
    let mut body = headline(mark, &answer, width);
    body.push(blank());
    if let Some(failure) = &snapshot.previous_failure {
        body.extend(note(
            Mark::Attention,
            &format!("The boot before this one failed: {failure}"),
            width,
        ));
    }
    for warning in &snapshot.warnings {
        body.extend(note(Mark::Attention, warning, width));
    }
    if body.len() > 2 {
        body.push(blank());
    }
    if !snapshot.stages.is_empty() {
        body.extend(timeline(&snapshot.stages, width));
        body.push(blank());
    }
    if !snapshot.network.is_empty() {
        body.push(title("Network"));
        body.extend(snapshot.network.iter().flat_map(|interface| {
            let name = pad(&clean(&interface.name), NAME);
            hanging(INDENT, &name, PLAIN, &interface.text, width)
        }));
    }
    Content { head: Vec::new(), body }
}

fn answer(snapshot: &Snapshot) -> (Mark, String) {
    let failed = snapshot.stages.iter().find(|stage| stage.state == StageState::Failed);
    let waiting = snapshot.stages.iter().find_map(|stage| match &stage.state {
        StageState::Waiting { what, since } => Some((stage, what, since)),
        _ => None,
    });
    if let Some(stage) = failed {
        return (Mark::Bad, format!("Not up: the stage \"{}\" has failed.", stage.name));
    }
    match snapshot.header.cluster {
        Cluster::Split => return (Mark::Bad, "Up, but cut off from the cluster: too few members answer. The etcd page (F2) names them.".to_owned()),
        Cluster::Disowning => return (Mark::Bad, "This node was removed from its cluster and will never be a member again.".to_owned()),
        Cluster::Unknown | Cluster::Foreign | Cluster::Trusted | Cluster::Home => {}
    }
    if let Some((stage, _, since)) = waiting {
        let verb = if snapshot.ready.is_some() { "Up, but" } else { "Not up yet:" };
        return (
            Mark::Busy,
            format!("{verb} {} has been waiting for {}.", stage.name, duration(*since)),
        );
    }
    if let Some(ready) = snapshot.ready {
        return (
            Mark::Good,
            format!("Up. It was ready {} after the kernel started.", duration(ready)),
        );
    }
    let running: Vec<&str> = snapshot
        .stages
        .iter()
        .filter(|stage| stage.state == StageState::Started)
        .map(|stage| stage.name.as_str())
        .collect();
    match running.as_slice() {
        [] => (Mark::Busy, "Starting.".to_owned()),
        names => (Mark::Busy, format!("Starting: {}.", names.join(", "))),
    }
}

fn timeline(stages: &[Stage], width: usize) -> Vec<Line<'static>> {
    let column = INDENT + NAME + STATE + LENGTH + 2;
    let cells = width.saturating_sub(column).min(BAR_MAX);
    let end = stages.iter().map(|stage| stage.started.saturating_add(stage.elapsed)).max();
    let line = Timeline::new(cells, end.unwrap_or(Duration::ZERO));
    let mut lines: Vec<Line<'static>> =
        stages.iter().flat_map(|stage| rows(stage, line, column, width)).collect();
    lines.push(Row::indented(column).put(DIM, &line.axis()).line());
    lines
}

fn rows(stage: &Stage, line: Timeline, column: usize, width: usize) -> Vec<Line<'static>> {
    let look = Look::of(stage);
    let bar = match look.fill {
        Some(fill) => line.bar(stage.started, stage.elapsed, fill),
        None => line.empty(),
    };
    let state = match stage.progress {
        Some(percent) if look.fill == Some(Fill::Dense) => {
            format!("{} {} %", look.word, percent.min(100))
        }
        _ => look.word.to_owned(),
    };
    let length = look.fill.map_or_else(String::new, |_| duration(stage.elapsed));
    let row = Row::default()
        .cell(INDENT, look.style, look.mark.glyph())
        .cell(NAME, PLAIN, &stage.name)
        .cell(STATE, look.style, &state)
        .right(LENGTH, PLAIN, &length)
        .to(column);
    // The axis' marks are for the second look; the bar is for the first.
    let row = bar.split_inclusive('·').fold(row, |row, part| {
        let (bar, mark) = part.strip_suffix('·').map_or((part, ""), |bar| (bar, "·"));
        row.put(look.style, bar).put(DIM, mark)
    });
    let mut lines = vec![row.line()];
    if let StageState::Waiting { what, since } = &stage.state {
        let text = format!("for {what} - {} so far", duration(*since));
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
    fn of(stage: &Stage) -> Self {
        let (mark, word, style, fill) = match stage.state {
            StageState::Pending => (Mark::Idle, "pending", DIM, None),
            StageState::Started => (Mark::Busy, "started", BUSY, Some(Fill::Dense)),
            StageState::Waiting { .. } => {
                (Mark::Attention, "waiting", ATTENTION, Some(Fill::Light))
            }
            StageState::Done => (Mark::Good, "done", GOOD, Some(Fill::Solid)),
            StageState::Failed => (Mark::Bad, "failed", BAD, Some(Fill::Solid)),
        };
        Self { mark, word, style, fill }
    }
}
