//! The timeline: the start and the duration of each row, on one scale for all.
//!
//! A finished stage is a bar; a running stage is a bar with a head that moves on, and a
//! waiting stage is a mere line with a head: seen without colours too.

use std::time::Duration;

use crate::text::{duration, width};

/// Fewest cells between two marks of the axis: the width of most labels.
const TICK_CELLS: u128 = 7;

/// Distances between marks that a person can count in, in milliseconds.
const STEPS: [u128; 19] = [
    100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 30_000, 60_000, 120_000, 300_000, 600_000,
    1_200_000, 1_800_000, 3_600_000, 7_200_000, 21_600_000, 43_200_000,
];

/// A scale from zero to the end of the last bar.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Timeline {
    cells: usize,
    millis: u128,
}

/// How a bar is filled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fill {
    /// Over.
    Over,
    /// At work.
    Working,
    /// Waiting.
    Waiting,
}

impl Timeline {
    /// A scale of `cells` that ends at `end`.
    pub(crate) fn new(cells: usize, end: Duration) -> Self {
        Self { cells, millis: end.as_millis().max(1) }
    }

    /// The cell in which `at` lies, or the one after the last.
    fn cell(self, at: Duration) -> usize {
        let cell = at.as_millis() * self.cells as u128 / self.millis;
        usize::try_from(cell).map_or(self.cells, |cell| cell.min(self.cells))
    }

    /// A row with a bar from `start`; a stage that has begun is at least a cell long.
    pub(crate) fn bar(self, start: Duration, length: Duration, fill: Fill) -> String {
        let first = self.cell(start).min(self.cells.saturating_sub(1));
        let end = self.cell(start.saturating_add(length)).max(first + 1);
        let (body, head) = match fill {
            Fill::Over => ('▄', '▄'),
            Fill::Working => ('▄', '►'),
            Fill::Waiting => ('─', '►'),
        };
        let glyph = |(at, empty)| match at {
            at if at + 1 == end => head,
            at if (first..end).contains(&at) => body,
            _ => empty,
        };
        self.empty().chars().enumerate().map(glyph).collect()
    }

    /// A row without a bar.
    pub(crate) fn empty(self) -> String {
        let ticks = self.ticks();
        let cell = |at| if ticks.iter().any(|tick| tick.0 == at) { '·' } else { ' ' };
        (0..self.cells).map(cell).collect()
    }

    /// The labels of the axis, each at its mark: of each mark, or of each second, or
    /// third, so that no label is missing between two others.
    pub(crate) fn axis(self) -> String {
        let ticks = self.ticks();
        let axis = (1..=ticks.len()).find_map(|each| self.labels(ticks.iter().step_by(each)));
        axis.unwrap_or_default()
    }

    /// The labels of `ticks`, unless one of them covers another.
    fn labels<'a>(self, ticks: impl Iterator<Item = &'a (usize, u128)>) -> Option<String> {
        let mut axis = String::new();
        for (cell, at) in ticks {
            let label = duration_label(*at);
            if !axis.is_empty() && *cell <= width(&axis) {
                return None;
            }
            // A mark too near to the end has no room for its label.
            if cell + width(&label) <= self.cells {
                axis.push_str(&" ".repeat(cell.saturating_sub(width(&axis))));
                axis.push_str(&label);
            }
        }
        Some(axis)
    }

    /// The cells of the axis' marks, and the times they stand for.
    fn ticks(self) -> Vec<(usize, u128)> {
        let cells = self.cells as u128;
        let fits = |step: &u128| step * cells >= TICK_CELLS * self.millis;
        let days = |millis: u128| millis.div_ceil(86_400_000) * 86_400_000;
        let step = STEPS
            .into_iter()
            .find(fits)
            .unwrap_or_else(|| days(TICK_CELLS * self.millis / cells.max(1)).max(86_400_000));
        let cell = |at: u128| usize::try_from(at * cells / self.millis).ok();
        (0..)
            .map(|number| number * step)
            .map_while(|at| cell(at).filter(|cell| *cell < self.cells).map(|cell| (cell, at)))
            .collect()
    }
}

/// A time on the axis; unlike a length of time, a whole number of seconds has no decimal.
fn duration_label(millis: u128) -> String {
    match millis {
        0 => "0".to_owned(),
        1..60_000 if millis.is_multiple_of(1000) => format!("{} s", millis / 1000),
        1..60_000 => format!("{}.{} s", millis / 1000, millis % 1000 / 100),
        _ => duration(Duration::from_millis(u64::try_from(millis).unwrap_or(u64::MAX))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn bars_lie_where_their_time_lies() {
        let second = Duration::from_secs(1);
        let line = Timeline::new(20, 10 * second);
        assert_eq!(line.axis(), "0         5 s");
        assert_eq!(line.empty(), "·         ·         ");
        assert_eq!(Timeline::new(36, 100 * 60 * second).axis(), "0      20 min 40 min 1 h");
        let minutes = Timeline::new(96, 190 * second).axis();
        let labels: Vec<_> =
            minutes.split("  ").map(str::trim).filter(|it| !it.is_empty()).collect();
        assert_eq!(labels, ["0", "40 s", "1 min 20 s", "2 min", "2 min 40 s"]);
        assert_eq!(line.bar(2 * second, second, Fill::Over), "·   ▄▄    ·         ");
        assert_eq!(line.bar(2 * second, second / 4, Fill::Over), "·   ▄     ·         ");
        assert_eq!(line.bar(5 * second, 5 * second, Fill::Waiting), "·         ─────────►");
        assert_eq!(line.bar(11 * second, second, Fill::Working), "·         ·        ►");
    }

    proptest! {
        #[test]
        fn every_row_has_the_width_it_was_given(
            cells in 0usize..200,
            times in prop::array::uniform3(prop_oneof![0..100_000u64, any::<u64>()]),
        ) {
            let [end, start, length] = times.map(Duration::from_millis);
            let line = Timeline::new(cells, end);
            prop_assert_eq!(width(&line.bar(start, length, Fill::Over)), cells);
            prop_assert!(width(&line.axis()) <= cells);
            prop_assert!(line.ticks().len() <= cells);
        }
    }
}
