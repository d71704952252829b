//! The bar of a share of a whole: how full, how far, how old.

use ratatui::style::Style;

use super::Row;

/// Adds a bar of `cells` to `row`, filled to `percent`, and with a line through it at
/// `mark` percent. A bar that has begun shows, and an incomplete bar is not drawn full.
pub(crate) fn share(row: Row, cells: usize, style: Style, percent: u8, mark: Option<u8>) -> Row {
    row.dotted(style, &bar(cells, percent, mark))
}

fn bar(cells: usize, percent: u8, mark: Option<u8>) -> String {
    let filled = match percent {
        0 => 0,
        1..100 => {
            let whole = cells * usize::from(percent) / 100;
            whole.min(cells.saturating_sub(1)).max(1).min(cells)
        }
        _ => cells,
    };
    let mark = mark.map(|percent| cells * usize::from(percent) / 100);
    let cell = |cell| match cell {
        cell if Some(cell) == mark => '│',
        cell if cell < filled => '▄',
        _ => '·',
    };
    (0..cells).map(cell).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bar_is_full_only_at_the_end_and_empty_only_at_the_start() {
        let share = |cells, percent| bar(cells, percent, None);
        assert_eq!(share(4, 0), "····");
        assert_eq!(share(4, 1), "▄···");
        assert_eq!(share(4, 50), "▄▄··");
        assert_eq!(share(4, 99), "▄▄▄·");
        assert_eq!(share(4, 100), "▄▄▄▄");
        assert_eq!(share(4, 255), "▄▄▄▄");
        assert_eq!(share(1, 50), "▄");
        assert_eq!(share(0, 50), "");
    }

    #[test]
    fn the_renewal_is_a_line_in_the_bar() {
        assert_eq!(bar(6, 33, Some(66)), "▄··│··");
        assert_eq!(bar(6, 33, Some(100)), "▄·····");
    }
}
