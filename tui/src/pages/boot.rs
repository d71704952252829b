//! Answers: is it up? What is it waiting for, since when, and what should I do?

use std::time::Duration;

use ratatui::style::Style;
use ratatui::text::Line;

use super::{Content, blank, title};
use crate::snapshot::{Address, Cluster, Interface, Snapshot, Stage, StageState};
use crate::text::{clean, duration, name, pad};
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

const SPLIT: &str = "Up, but cut off from the cluster: too few of its members answer. \
                     The etcd page (F2) names them.";
const DISOWNING: &str = "This node was removed from its cluster, for ever. \
                         To use the machine again, install it anew.";

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
        body.extend(note(Mark::Attention, &warning.text, width));
        if let Some(help) = &warning.help {
            body.extend(hanging(INDENT, "► ", PLAIN, help, width));
        }
    }
    if body.len() > 2 {
        body.push(blank());
    }
    if !snapshot.stages.is_empty() {
        body.extend(timeline(&snapshot.stages, width));
        body.push(blank());
    }
    let interfaces = &snapshot.network.interfaces;
    if !interfaces.is_empty() {
        body.push(title("Network"));
        body.extend(interfaces.iter().flat_map(|interface| {
            let name = pad(&clean(&interface.name), NAME);
            hanging(INDENT, &name, PLAIN, &addresses(interface), width)
        }));
    }
    Content { head: Vec::new(), body }
}

/// What an interface has, or why it has nothing.
fn addresses(interface: &Interface) -> String {
    let shown = |address: &Address| match address.source.as_str() {
        "" => address.cidr.clone(),
        source => format!("{} by {source}", address.cidr),
    };
    let shown: Vec<_> = interface.addresses.iter().map(shown).collect();
    match (shown.is_empty(), interface.carrier, interface.asking) {
        (false, ..) => shown.join(", "),
        (true, false, _) => "no carrier: no cable, or nothing at its other end".to_owned(),
        (true, true, true) => "asks for an address (DHCP)".to_owned(),
        (true, true, false) => "no address".to_owned(),
    }
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
