//! The load charts: processors, disks, network, memory.

use std::time::Duration;

use ratatui::style::Style;
use ratatui::text::Line;

use crate::snapshot::Metrics;
use crate::text::{bytes, duration, plural, width as cells};
use crate::theme::{BUSY, DIM, Mark, PLAIN, STRONG};
use crate::widgets::block::{blank, title, titled};
use crate::widgets::chart::{ceiling, chart};
use crate::widgets::{Row, gauge};

/// From here on, two units are exact enough.
const MINUTE: Duration = Duration::from_secs(60);

/// Between two charts.
const GAP: usize = 3;

/// From here on, in percent, something is nearly full.
const FULL: u8 = 85;

/// The lowest end of a scale for bytes a second: below it, nothing is going on.
const LEAST: u64 = 64 << 10;

/// The lowest end of a scale of percents.
const LEAST_PERCENT: u64 = 25;

/// Longest bar.
const BAR_MAX: usize = 30;

/// The recent values of a chart, before it has a size.
pub(super) struct Chart {
    title: &'static str,
    mark: Option<Mark>,
    style: Style,
    values: Vec<u64>,
    max: u64,
    print: fn(u64) -> String,
    of: String,
}

impl Chart {
    /// Any values; the scale does not end below `least`.
    pub(super) fn new(
        title: &'static str,
        values: Vec<u64>,
        least: u64,
        print: fn(u64) -> String,
    ) -> Self {
        let max = ceiling(&values, least);
        Self { title, mark: None, style: BUSY, values, max, print, of: String::new() }
    }

    /// Bytes a second.
    pub(super) fn flow(title: &'static str, values: Vec<u64>) -> Self {
        Self::new(title, values, LEAST, rate)
    }

    fn percents(title: &'static str, values: &[u8]) -> Self {
        let values: Vec<u64> = values.iter().copied().map(u64::from).collect();
        let highest = values.iter().copied().max().unwrap_or(0);
        let max = [LEAST_PERCENT, 50].into_iter().find(|max| highest <= *max).unwrap_or(100);
        let mark = values.last().filter(|now| **now >= FULL.into()).map(|_full| Mark::Attention);
        let style = mark.unwrap_or(Mark::Good).style();
        let print = |percent| format!("{percent} %");
        Self { title, mark, style, values, max, print, of: String::new() }
    }

    /// The same with the whole that the percents refer to.
    fn of(self, of: String) -> Self {
        Self { of: format!(" of {of}"), ..self }
    }

    /// A row with the newest number, and where there is room with the end of the
    /// scale; below it the chart in `rows`.
    pub(super) fn draw(&self, width: usize, rows: usize) -> Vec<Row> {
        let now = self.values.last().map_or_else(|| "..".to_owned(), |now| (self.print)(*now));
        let head = named(self.title, self.mark).gap(1).put(PLAIN, &now);
        let scale = format!("max {}", (self.print)(self.max));
        let fits = head.used() + cells(&self.of) + 1 + cells(&scale) < width;
        let head = if fits { head.put(DIM, &self.of) } else { head };
        let left = width.saturating_sub(head.used());
        let head = if left > cells(&scale) + 1 { head.right(left, DIM, &scale) } else { head };
        let mut lines = vec![Row::default().join(width, head)];
        let columns = chart(&self.values, self.max, width, rows);
        lines.extend(columns.iter().map(|row| Row::default().dotted(self.style, row)));
        lines
    }
}

/// A name, behind the mark of what is worth a look: its colour alone does not say that.
fn named(name: &str, mark: Option<Mark>) -> Row {
    let row = match mark {
        Some(mark) => Row::default().put(mark.style(), mark.glyph()).gap(1),
        None => Row::default(),
    };
    row.put(STRONG, name)
}

/// Charts in a row, each of `rows`, and how full memory and data partition are.
pub(super) fn across(metrics: &Metrics, width: usize, rows: usize) -> Vec<Line<'static>> {
    let charts = charts(metrics);
    let column = (width + GAP) / charts.len();
    let mut lines = vec![title_of(metrics, column.saturating_sub(GAP), width)];
    lines.extend(beside(&charts, width, rows));
    lines.push(blank());
    let half = width / 2;
    let bars = half.saturating_sub(GAP);
    let gauges = [memory(metrics, bars), data(metrics, bars)].into_iter().flatten();
    lines.push(gauges.fold(Row::default(), |row, it| row.join(half, it)).line());
    lines.extend(wiping(metrics, bars).map(|row| Row::default().join(half, row).line()));
    lines
}

/// Charts of one width and height beside each other.
pub(super) fn beside(charts: &[Chart], width: usize, rows: usize) -> Vec<Line<'static>> {
    let column = (width + GAP) / charts.len().max(1);
    let drawn: Vec<Vec<Row>> =
        charts.iter().map(|chart| chart.draw(column.saturating_sub(GAP), rows)).collect();
    let line = |row: usize| {
        drawn.iter().fold(Row::default(), |line, chart| {
            line.join(column, chart.get(row).cloned().unwrap_or_default())
        })
    };
    (0..=rows).map(|row| line(row).line()).collect()
}

/// The same below each other, and the recent use of memory.
pub(super) fn down(metrics: &Metrics, width: usize, rows: usize) -> Vec<Line<'static>> {
    let mut lines = vec![title_of(metrics, width, width)];
    let [cpu, disk, network] = charts(metrics);
    // The fill level says more than its variation.
    let memory = Chart { max: 100, ..Chart::percents("Memory", &metrics.memory) };
    let memory = memory.of(bytes(metrics.memory_total));
    for chart in [cpu, memory, disk, network] {
        lines.extend(chart.draw(width, rows).into_iter().map(Row::line));
    }
    lines.push(blank());
    lines.extend(data(metrics, width).map(Row::line));
    lines.extend(wiping(metrics, width).map(Row::line));
    lines
}

/// The title says how long ago a chart of `cells` begins.
fn title_of(metrics: &Metrics, cells: usize, width: usize) -> Line<'static> {
    let shown = metrics.cpu.len().min(cells);
    let span = metrics.pace.saturating_mul(u32::try_from(shown).unwrap_or(u32::MAX));
    if span.is_zero() {
        return title("Load", width);
    }
    let span = if span >= MINUTE { duration(span) } else { format!("{} s", span.as_secs()) };
    let text = format!(" of the last {span}");
    titled(Row::default().put(STRONG, "Load").put(DIM, &text), width)
}

fn charts(metrics: &Metrics) -> [Chart; 3] {
    [
        Chart::percents("CPU", &metrics.cpu).of(plural(metrics.processors.into(), "core")),
        Chart::flow("Disk", sum(&metrics.disk_read, &metrics.disk_written)),
        Chart::flow("Network", sum(&metrics.received, &metrics.sent)),
    ]
}

/// Bytes a second.
fn rate(bytes_a_second: u64) -> String {
    format!("{}/s", bytes(bytes_a_second))
}

fn sum(one: &[u64], other: &[u64]) -> Vec<u64> {
    one.iter().zip(other).map(|(one, other)| one.saturating_add(*other)).collect()
}

/// How full the memory is, as a bar.
fn memory(metrics: &Metrics, width: usize) -> Option<Row> {
    gauge("Memory", metrics.memory_used, metrics.memory_total, width)
}

/// How full the data partition is.
fn data(metrics: &Metrics, width: usize) -> Option<Row> {
    gauge("Data", metrics.data_used, metrics.data_total, width)
}

/// How far an authenticated disk has written its free space; nothing once it has.
fn wiping(metrics: &Metrics, width: usize) -> Option<Row> {
    let Metrics { data_total: total, data_unwritten: left, .. } = *metrics;
    if left == 0 {
        return None;
    }
    let done = percent(total.saturating_sub(left), total)?;
    Some(bar("Wiping", done, None, total, width))
}

fn gauge(name: &str, used: u64, total: u64, width: usize) -> Option<Row> {
    let percent = percent(used, total)?;
    let mark = (percent >= FULL).then_some(Mark::Attention);
    Some(bar(name, percent, mark, total, width))
}

/// `part` of `whole`; nothing of nothing.
fn percent(part: u64, whole: u64) -> Option<u8> {
    let percent = (u128::from(part) * 100).checked_div(u128::from(whole))?.min(100);
    Some(u8::try_from(percent).unwrap_or(100))
}

fn bar(name: &str, percent: u8, mark: Option<Mark>, total: u64, width: usize) -> Row {
    let text = format!(" {}", bytes(total));
    let row = named(name, mark).put(PLAIN, &format!(" {percent} %")).gap(1);
    let row = row.to(NAME);
    let bar = width.saturating_sub(row.used() + cells(&text)).min(BAR_MAX);
    gauge::share(row, bar, mark.unwrap_or(Mark::Good).style(), percent, None).put(DIM, &text)
}

/// Column of a name with its percents, one apart.
const NAME: usize = 13;

#[cfg(test)]
mod tests {
    use super::*;

    fn drawn(lines: &[Line<'_>]) -> String {
        lines.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
    }

    #[test]
    fn what_is_nearly_full_has_a_mark_beside_its_colour() {
        let at = |percent: u8| Metrics {
            cpu: vec![percent],
            memory: vec![percent],
            memory_total: 100 << 20,
            memory_used: u64::from(percent) << 20,
            data_total: 100 << 20,
            data_used: u64::from(percent) << 20,
            ..Metrics::default()
        };
        for (percent, marked) in [(FULL - 1, false), (FULL, true)] {
            let metrics = at(percent);
            for lines in [across(&metrics, 77, 3), down(&metrics, 44, 3)] {
                let text = drawn(&lines);
                for name in ["CPU", "Memory", "Data"] {
                    let name = format!("▲ {name} {percent} %");
                    assert_eq!(text.contains(&name), marked, "{name:?} is on\n{text}");
                }
            }
        }
    }
}
