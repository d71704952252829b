//! Draws a share of a whole as a bar: how full, how far, how old.

/// A bar of `cells`, filled to `percent`. What has begun shows, and what is not
/// complete is not drawn full.
pub(crate) fn share(cells: usize, percent: u8) -> String {
    let filled = filled(cells, percent);
    format!("{}{}", "█".repeat(filled), "░".repeat(cells - filled))
}

/// A bar like [`share`], with a line through it at `mark` percent.
pub(crate) fn share_until(cells: usize, percent: u8, mark: u8) -> String {
    let at = cells * usize::from(mark.min(100)) / 100;
    share(cells, percent)
        .chars()
        .enumerate()
        .map(|(cell, c)| if cell == at { '│' } else { c })
        .collect()
}

fn filled(cells: usize, percent: u8) -> usize {
    match percent {
        0 => 0,
        1..100 => {
            (cells * usize::from(percent) / 100).min(cells.saturating_sub(1)).max(1).min(cells)
        }
        _ => cells,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bar_is_full_only_at_the_end_and_empty_only_at_the_start() {
        assert_eq!(share(4, 0), "░░░░");
        assert_eq!(share(4, 1), "█░░░");
        assert_eq!(share(4, 50), "██░░");
        assert_eq!(share(4, 99), "███░");
        assert_eq!(share(4, 100), "████");
        assert_eq!(share(4, 255), "████");
        assert_eq!(share(1, 50), "█");
        assert_eq!(share(0, 50), "");
    }

    #[test]
    fn the_renewal_is_a_line_in_the_bar() {
        assert_eq!(share_until(6, 33, 66), "█░░│░░");
        assert_eq!(share_until(6, 33, 100), "█░░░░░");
    }
}
