//! Rows under headings, and how they fit into a terminal.
//!
//! Without a terminal a table is as wide as its cells. In one, node IDs are cut to what
//! tells them apart, which every command accepts, and then the widest columns are
//! wrapped: nothing else is left out, and no line is broken by the terminal.
//! `comfy-table` would lay the rows out; the IDs would be cut here all the same, and with
//! them the widths found.

use std::fmt;

use super::text::clean;

/// Between two columns.
const GAP: usize = 2;

/// What every node ID starts with, and how many digits follow.
const PREFIX: &str = "polis-";
const DIGITS: usize = 32;
/// Fewest digits that are shown: more than a command needs, so that a new node rarely
/// shares them.
const DIGITS_MIN: usize = 8;

/// Narrowest column that a cell is wrapped to.
const COLUMN_MIN: usize = 8;

/// Rows, the headings first.
#[derive(Clone, Debug)]
pub(super) struct Table(Vec<Vec<String>>);

/// Rows under headings.
pub(super) fn table(headings: &[&str], rows: &[Vec<String>]) -> Table {
    let head = headings.iter().map(|&heading| heading.to_owned()).collect::<Vec<_>>();
    let cleaned = std::iter::once(&head).chain(rows);
    Table(cleaned.map(|row| row.iter().map(|cell| clean(cell)).collect()).collect())
}

impl fmt::Display for Table {
    /// Each column as wide as its widest cell.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.laid_out(&self.widths()))
    }
}

impl Table {
    /// The table in so many columns of a terminal.
    pub(super) fn fit(&self, columns: usize) -> String {
        if total(&self.widths()) <= columns {
            return self.to_string();
        }
        let short = self.with_short_ids();
        let mut widths = short.widths();
        let least: Vec<usize> = short.least();
        while total(&widths) > columns {
            let wide = (0..widths.len()).filter(|&at| widths[at] > least[at]);
            // A table is never narrower than the words of its headings.
            let Some(widest) = wide.max_by_key(|&at| widths[at]) else { break };
            widths[widest] -= 1;
        }
        short.laid_out(&widths)
    }

    fn widths(&self) -> Vec<usize> {
        let columns = self.0.iter().map(Vec::len).max().unwrap_or_default();
        let width = |at: usize| {
            self.0.iter().filter_map(|row| row.get(at)).map(|cell| cell.chars().count()).max()
        };
        (0..columns).map(|at| width(at).unwrap_or_default()).collect()
    }

    /// How narrow each column may become: each word of a heading stays whole, and so does an
    /// ID.
    fn least(&self) -> Vec<usize> {
        let heading = |at: usize| self.0.first().and_then(|row| row.get(at));
        let wide = |at: usize, natural: usize| {
            let ids = self.0.iter().filter_map(|row| row.get(at)).filter(|cell| is_id(cell));
            let ids = ids.map(|cell| cell.chars().count()).max().unwrap_or_default();
            let words = heading(at).map_or("", String::as_str).split(' ');
            let heading = words.map(|word| word.chars().count()).max().unwrap_or_default();
            heading.max(ids).max(COLUMN_MIN).min(natural)
        };
        self.widths().into_iter().enumerate().map(|(at, natural)| wide(at, natural)).collect()
    }

    /// The same with the beginnings of node IDs that tell them apart.
    fn with_short_ids(&self) -> Self {
        let cells = || self.0.iter().flatten();
        let ids: std::collections::BTreeSet<&str> =
            cells().filter_map(|cell| whole_id(cell)).collect();
        let kept = (DIGITS_MIN..DIGITS).find(|&digits| {
            let cut: std::collections::BTreeSet<&str> =
                ids.iter().map(|id| &id[..digits]).collect();
            cut.len() == ids.len()
        });
        let kept = PREFIX.len() + kept.unwrap_or(DIGITS);
        let cut = |cell: &String| match whole_id(cell) {
            Some(_) => cell[..kept].to_owned(),
            None => cell.clone(),
        };
        Self(self.0.iter().map(|row| row.iter().map(cut).collect()).collect())
    }

    fn laid_out(&self, widths: &[usize]) -> String {
        let mut text = String::new();
        for row in &self.0 {
            let cells: Vec<Vec<String>> =
                row.iter().zip(widths).map(|(cell, width)| wrap(cell, *width)).collect();
            let lines = cells.iter().map(Vec::len).max().unwrap_or_default();
            for at in 0..lines {
                let mut line = String::new();
                for (cell, width) in cells.iter().zip(widths) {
                    let part = cell.get(at).map_or("", String::as_str);
                    line.push_str(&format!("{part:width$}{:GAP$}", ""));
                }
                text.push_str(line.trim_end());
                text.push('\n');
            }
        }
        text
    }
}

fn total(widths: &[usize]) -> usize {
    widths.iter().sum::<usize>() + GAP * widths.len().saturating_sub(1)
}

/// The digits of a cell that is a node ID and nothing else.
fn whole_id(cell: &str) -> Option<&str> {
    let digits = cell.strip_prefix(PREFIX)?;
    let hex = |c: char| matches!(c, '0'..='9' | 'a'..='f');
    (digits.len() == DIGITS && digits.chars().all(hex)).then_some(digits)
}

/// Whether a cell is a node ID, whole or cut.
fn is_id(cell: &str) -> bool {
    let digits = cell.strip_prefix(PREFIX).unwrap_or_default();
    digits.len() >= DIGITS_MIN && digits.chars().all(|c| c.is_ascii_hexdigit())
}

/// A cell in lines of `width`, broken behind a space, a comma or a dash where there is one.
fn wrap(cell: &str, width: usize) -> Vec<String> {
    let mut lines = Vec::new();
    let mut rest: Vec<char> = cell.chars().collect();
    while rest.len() > width.max(1) {
        let fits = &rest[..width.max(1)];
        let behind = fits.iter().rposition(|c| matches!(c, ' ' | ',' | '-' | '/')).map(|at| at + 1);
        let end = behind.filter(|&end| end > width / 2).unwrap_or(fits.len());
        let line: String = rest.drain(..end).collect();
        lines.push(line.trim_end().to_owned());
        if rest.first() == Some(&' ') {
            rest.remove(0);
        }
    }
    lines.push(rest.into_iter().collect());
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(digit: u8) -> String {
        polis_wire::identity::NodeId::from_public_key(&[digit; 32]).to_string()
    }

    fn nodes() -> Table {
        let row = |digit: u8| {
            let cells = [
                &*id(digit),
                "decommissioned",
                "healthy",
                "consensus-member,kubernetes-controller",
                "2001:db8:ffff:ffff:ffff:ffff:ffff:ffff",
                "0.1.0",
                "12 min 30 s ago",
            ];
            cells.map(str::to_owned).to_vec()
        };
        let heads = ["NODE", "STATE", "HEALTH", "ROLES", "ADDRESS", "VERSION", "LAST HEARTBEAT"];
        table(&heads, &[row(1), row(2), row(3)])
    }

    /// What stands in the columns, without blanks and line breaks.
    fn letters(text: &str) -> std::collections::BTreeMap<char, usize> {
        let mut counts = std::collections::BTreeMap::new();
        text.chars()
            .filter(|c| !c.is_whitespace())
            .for_each(|c| *counts.entry(c).or_default() += 1);
        counts
    }

    #[test]
    fn a_table_fits_into_a_terminal_and_leaves_out_the_ends_of_ids_alone() {
        let table = nodes();
        for columns in [80, 100, 120] {
            let text = table.fit(columns);
            for line in text.lines() {
                assert!(line.chars().count() <= columns, "{columns}: {line}");
            }
            for digit in 1..=3 {
                let short = &id(digit)[..PREFIX.len() + DIGITS_MIN];
                assert_eq!(text.matches(short).count(), 1, "{columns}: {text}");
            }
            assert_eq!(letters(&text), letters(&table.with_short_ids().to_string()), "{text}");
        }
        let wide = total(&table.widths());
        assert_eq!(table.fit(wide), table.to_string(), "where there is room, it is whole");
    }

    #[test]
    fn ids_keep_as_many_digits_as_tell_them_apart() {
        let like = format!("{PREFIX}{}{}", "a".repeat(12), "0".repeat(20));
        let other = format!("{PREFIX}{}{}", "a".repeat(12), "1".repeat(20));
        let short = table(&["NODE"], &[vec![like.clone()], vec![other]]).fit(20);
        assert!(short.contains(&like[..PREFIX.len() + 13]), "{short}");
        assert!(!short.contains(&like), "{short}");
    }

    #[test]
    fn columns_are_as_wide_as_their_widest_cell() {
        let rows =
            [vec!["a".to_owned(), "longer".to_owned()], vec!["bcd".to_owned(), String::new()]];
        insta::assert_snapshot!(table(&["N", "WORD"], &rows), @r"
        N    WORD
        a    longer
        bcd
        ");
    }

    #[test]
    fn a_cell_cannot_command_the_terminal() {
        let rows = [vec!["a\u{1b}[2J\r\nb\u{202e}c".to_owned()]];
        assert_eq!(table(&["N"], &rows).to_string(), "N\na?[2J  b?c\n");
    }
}
