//! The chart of recent values, as columns of half blocks.
//!
//! The font of the Linux console has one block of half height and no finer ones,
//! so a chart of two rows has four steps. That is enough to see a wave, a peak
//! or a plateau, which is what it is for; the number stands beside it.

/// `values`, the newest at the right, in `rows` of `cells`, the top one first. A value
/// above zero is always seen; a dot is a sample of zero, and an empty cell means no
/// sample.
pub(crate) fn chart(values: &[u64], max: u64, cells: usize, rows: usize) -> Vec<String> {
    let newest = &values[values.len().saturating_sub(cells)..];
    let steps = 2 * rows as u128;
    let height = |value: u64| {
        let step = (u128::from(value) * steps).div_ceil(u128::from(max.max(1)));
        usize::try_from(step.min(steps)).unwrap_or(usize::MAX)
    };
    let row = |row: usize| {
        let below = 2 * (rows - 1 - row);
        let glyph = |value: &u64| match height(*value).saturating_sub(below) {
            0 if below == 0 => '·',
            0 => ' ',
            1 => '▄',
            _ => '█',
        };
        let empty = std::iter::repeat_n(' ', cells - newest.len());
        empty.chain(newest.iter().map(glyph)).collect()
    };
    (0..rows).map(row).collect()
}

/// The end of a scale that holds all of `values` and does not jump with each of
/// them: the next power of two, and no less than `least`.
pub(crate) fn ceiling(values: &[u64], least: u64) -> u64 {
    let highest = values.iter().copied().max().unwrap_or(0).max(least);
    highest.checked_next_power_of_two().unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::text::width;

    #[test]
    fn a_wave_is_seen_and_a_little_is_more_than_nothing() {
        assert_eq!(chart(&[0, 1, 25, 50, 75, 100], 100, 8, 2), ["      ▄█", "  ·▄▄███"]);
        assert_eq!(chart(&[0, 1, 50, 51, 100], 100, 5, 1), ["·▄▄██"]);
        assert_eq!(chart(&[9, 9, 0], 9, 1, 1), ["·"]);
    }

    #[test]
    fn a_scale_stays_while_its_values_move_a_little() {
        assert_eq!(ceiling(&[900, 1_000], 1), ceiling(&[600], 1));
        assert_eq!(ceiling(&[3], 1 << 10), 1 << 10);
        assert_eq!(ceiling(&[u64::MAX], 1), u64::MAX);
    }

    proptest! {
        #[test]
        fn a_chart_has_the_size_that_was_asked_for(
            values in prop::collection::vec(any::<u64>(), 0..50),
            max in any::<u64>(),
            cells in 0usize..60,
            rows in 1usize..5,
        ) {
            let chart = chart(&values, max, cells, rows);
            prop_assert_eq!(chart.len(), rows);
            prop_assert!(chart.iter().all(|row| width(row) == cells));
        }
    }
}
