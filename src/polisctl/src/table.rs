//! Rows under headings, and how they fit into a terminal.
//!
//! Without a terminal a table is as wide as its cells. In one, it is the first of these that
//! fits:
//!
//! 1. with IDs of nodes cut to what distinguishes them, which every command accepts;
//! 2. with cells of several lines, broken between words;
//! 3. without the column that a command can spare;
//! 4. each row as a block of lines, a name and a value each.
//!
//! So no line is broken by the terminal, and no word by the table. `comfy-table` would lay
//! rows out; the IDs would be cut here all the same, and with them the widths found.

use std::fmt;

use super::text::{self, clean, fit, pad};

/// Between two columns.
const GAP: usize = 2;

/// The beginning of every node ID, and the number of digits that follow.
const PREFIX: &str = "polis-";
const DIGITS: usize = 32;
/// Fewest digits that are shown: more than a command needs, so that a new node rarely
/// shares them.
const DIGITS_MIN: usize = 8;

/// Rows, the headings first.
#[derive(Clone, Debug)]
pub(super) struct Table {
    rows: Vec<Vec<String>>,
    /// The heading of the column that a narrow terminal leaves out.
    spare: Option<&'static str>,
}

/// Rows under headings.
pub(super) fn table(headings: &[&str], rows: &[Vec<String>]) -> Table {
    let head = headings.iter().map(|&heading| heading.to_owned()).collect::<Vec<_>>();
    let cleaned = std::iter::once(&head).chain(rows);
    let rows = cleaned.map(|row| row.iter().map(|cell| clean(cell)).collect()).collect();
    Table { rows, spare: None }
}

impl fmt::Display for Table {
    /// Each column as wide as its widest cell.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.laid_out(&self.widths()))
    }
}

impl Table {
    /// The same; a terminal without room for all columns leaves this one out.
    pub(super) fn sparing(self, heading: &'static str) -> Self {
        Self { spare: Some(heading), ..self }
    }

    /// The table with each cell as `change` makes it.
    pub(super) fn with_cells(&self, change: impl Fn(&str) -> String) -> Self {
        let row = |row: &Vec<String>| row.iter().map(|cell| change(cell)).collect();
        Self { rows: self.rows.iter().map(row).collect(), spare: self.spare }
    }

    /// The table in so many columns of a terminal.
    pub(super) fn fit(&self, columns: usize) -> String {
        if total(&self.widths()) <= columns {
            return self.to_string();
        }
        let short = self.with_short_ids();
        let narrow = short.narrow(columns).or_else(|| short.without_spare()?.narrow(columns));
        narrow.unwrap_or_else(|| short.blocks(columns))
    }

    /// The table with cells broken between words, if that is narrow enough.
    fn narrow(&self, columns: usize) -> Option<String> {
        let mut widths = self.widths();
        let least = self.least();
        while total(&widths) > columns {
            let wide = (0..widths.len()).filter(|&at| widths[at] > least[at]);
            let widest = wide.max_by_key(|&at| widths[at])?;
            widths[widest] -= 1;
        }
        Some(self.laid_out(&widths))
    }

    fn without_spare(&self) -> Option<Self> {
        let head = self.rows.first()?;
        let spare = head.iter().position(|heading| Some(&**heading) == self.spare)?;
        let kept = |row: &Vec<String>| {
            let cells = row.iter().enumerate().filter(|(at, _)| *at != spare);
            cells.map(|(_, cell)| cell.clone()).collect()
        };
        Some(Self { rows: self.rows.iter().map(kept).collect(), spare: None })
    }

    /// A block for each row: its cells below each other, each behind its heading.
    fn blocks(&self, columns: usize) -> String {
        let Some((head, rows)) = self.rows.split_first() else { return String::new() };
        let wide = head.iter().map(|heading| text::width(heading)).max().unwrap_or_default();
        let line = |(heading, cell): (&String, &String)| {
            fit(format!("{}{:GAP$}{cell}", pad(heading, wide), "").trim_end(), columns) + "\n"
        };
        let block = |row: &Vec<String>| head.iter().zip(row).map(line).collect::<String>();
        rows.iter().map(block).collect::<Vec<_>>().join("\n")
    }

    fn widths(&self) -> Vec<usize> {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or_default();
        let width = |at: usize| {
            self.rows.iter().filter_map(|row| row.get(at)).map(|cell| text::width(cell)).max()
        };
        (0..columns).map(|at| width(at).unwrap_or_default()).collect()
    }

    /// How narrow each column may become: no word is broken.
    fn least(&self) -> Vec<usize> {
        let words = |cell: &String| words(cell).iter().map(|word| text::width(word)).max();
        let least =
            |at: usize| self.rows.iter().filter_map(|row| row.get(at)).filter_map(words).max();
        (0..self.widths().len()).map(|at| least(at).unwrap_or_default()).collect()
    }

    /// The same with the shortest unambiguous beginnings of node IDs.
    fn with_short_ids(&self) -> Self {
        let cells = || self.rows.iter().flatten();
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
        let rows = self.rows.iter().map(|row| row.iter().map(cut).collect()).collect();
        Self { rows, spare: self.spare }
    }

    fn laid_out(&self, widths: &[usize]) -> String {
        let mut text = String::new();
        for row in &self.rows {
            let cells: Vec<Vec<String>> =
                row.iter().zip(widths).map(|(cell, width)| wrap(cell, *width)).collect();
            let lines = cells.iter().map(Vec::len).max().unwrap_or_default();
            for at in 0..lines {
                let mut line = String::new();
                for (cell, width) in cells.iter().zip(widths) {
                    let part = cell.get(at).map_or("", String::as_str);
                    line.push_str(&format!("{}{:GAP$}", pad(part, *width), ""));
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

/// The parts of a cell, which breaks behind a space or a comma, and behind a dash or a slash
/// inside of a word. IDs, times and addresses are not broken.
fn words(cell: &str) -> Vec<&str> {
    let is_name = |word: &str| word.chars().all(|c| c.is_ascii_lowercase() || c == '-' || c == ',');
    cell.split_inclusive([' ', ','])
        .flat_map(|word| match is_name(word) {
            true => word.split_inclusive('-').collect::<Vec<_>>(),
            false => vec![word],
        })
        .map(|word| word.trim_end_matches(' '))
        .collect()
}

/// A cell in lines of `width`, broken between its words.
fn wrap(cell: &str, width: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    let mut begun = 0;
    for word in words(cell) {
        // The words are parts of the cell, in its order; a space may be between two.
        let at = begun + cell[begun..].find(word).unwrap_or_default();
        let gap = &cell[begun..at];
        begun = at + word.len();
        let line = lines.last_mut().expect("there is a first line");
        if line.is_empty() || text::width(line) + gap.len() + text::width(word) <= width {
            if !line.is_empty() {
                line.push_str(gap);
            }
            line.push_str(word);
        } else {
            lines.push(word.to_owned());
        }
    }
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

    /// The text in the columns, without blanks and line breaks.
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
        for columns in [60, 80, 100, 120] {
            let text = table.fit(columns);
            for line in text.lines() {
                assert!(line.chars().count() <= columns, "{columns}: {line}");
            }
            for digit in 1..=3 {
                let short = &id(digit)[..PREFIX.len() + DIGITS_MIN];
                assert_eq!(text.matches(short).count(), 1, "{columns}: {text}");
            }
            // A block for each row repeats the headings.
            if !text.contains("\n\n") {
                assert_eq!(letters(&text), letters(&table.with_short_ids().to_string()), "{text}");
            }
        }
        let wide = total(&table.widths());
        assert_eq!(table.fit(wide), table.to_string(), "where there is room, it is whole");
    }

    #[test]
    fn a_narrow_table_spares_a_column_and_then_shows_blocks() {
        let row =
            ["node-1", "up", "healthy", "consensus-member", "192.0.2.15", "0.1.0", "1.2 s ago"];
        let row = row.map(str::to_owned).to_vec();
        let heads = ["NODE", "STATE", "HEALTH", "ROLES", "ADDRESS", "VERSION", "LAST HEARTBEAT"];
        let table = table(&heads, &[row]).sparing("VERSION");
        insta::assert_snapshot!(table.fit(72), @r"
        NODE    STATE  HEALTH   ROLES          ADDRESS     VERSION  LAST
                                                                    HEARTBEAT
        node-1  up     healthy  consensus-     192.0.2.15  0.1.0    1.2 s ago
                                member
        ");
        insta::assert_snapshot!(table.fit(62), @r"
        NODE    STATE  HEALTH   ROLES         ADDRESS     LAST
                                                          HEARTBEAT
        node-1  up     healthy  consensus-    192.0.2.15  1.2 s ago
                                member
        ");
        insta::assert_snapshot!(table.fit(40), @r"
        NODE            node-1
        STATE           up
        HEALTH          healthy
        ROLES           consensus-member
        ADDRESS         192.0.2.15
        VERSION         0.1.0
        LAST HEARTBEAT  1.2 s ago
        ");
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
    fn a_column_has_room_for_wide_characters() {
        let wide = "\u{6f22}\u{5b57}";
        let row = |name: &str| vec![name.to_owned(), "up".to_owned(), "late today".to_owned()];
        let table = table(&["NODE", "STATE", "HEALTH"], &[row(&format!("{wide}-1")), row("web")]);
        assert_eq!(
            table.to_string(),
            format!(
                "NODE    STATE  HEALTH\n{wide}-1  up     late today\nweb     up     late today\n"
            )
        );
        assert_eq!(total(&table.widths()), 25);
        for columns in [20, 21, 24, 25] {
            let text = table.fit(columns);
            assert!(text.lines().all(|line| text::width(line) <= columns), "{columns}: {text}");
        }
    }

    #[test]
    fn a_cell_cannot_command_the_terminal() {
        let rows = [vec!["a\u{1b}[2J\r\nb\u{202e}c".to_owned()]];
        assert_eq!(table(&["N"], &rows).to_string(), "N\na?[2J  b?c\n");
    }
}
