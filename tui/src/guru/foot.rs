//! The last rows of a guru meditation: its keys, and the effect if no key is pressed.

use ratatui::text::Line;

use super::{Countdown, Guru, STRONG, TEXT, View, shortest_that_fits};
use crate::widgets::Row;

/// The keys, and what happens without them, in `rows` where the screen is too small for
/// all of it.
pub(super) fn foot(guru: &Guru, view: &View, width: usize, rows: usize) -> Vec<Line<'static>> {
    let counts = matches!(guru.countdown, Countdown::Reboot { .. });
    let [logs, short] = match view.logs {
        true => ["back to the report", "report"],
        false => ["all, with logs", "all"],
    };
    let of = |logs| {
        let keys = [
            Some(("R", "reboot")),
            Some(("P", "power off")),
            Some(("L", logs)),
            counts.then_some(("H", "hold")),
            guru.unlock.then_some(("U", "unlock")),
        ];
        keys.into_iter().flatten().collect::<Vec<_>>()
    };
    // The first way that needs no more than a row; else the last one, in as many as
    // there are.
    let ways = [(logs, 4), (logs, 2), (short, 2)];
    let mut ways = ways.into_iter().map(|(logs, gap)| in_rows(&of(logs), gap, width));
    let one = |lines: &Vec<Line<'_>>| lines.len() == 1;
    let keys = ways.find(one).unwrap_or_else(|| in_rows(&of(short), 2, width));
    let wait = shortest_that_fits(wait(guru), width);
    let mut lines = Vec::new();
    if keys.len() + 1 < rows {
        lines.push(Line::default());
    }
    lines.extend(keys);
    lines.push(Row::default().put(STRONG, &wait).line());
    lines
}

/// Keys with `gap` cells between them, in as many rows of `width` as they need.
pub(super) fn in_rows(keys: &[(&str, &str)], gap: usize, width: usize) -> Vec<Line<'static>> {
    let mut lines = Vec::new();
    let mut row = Row::default();
    for (key, what) in keys {
        let cells = crate::text::width(key) + 1 + crate::text::width(what);
        if row.used() > 0 && row.used() + gap + cells > width {
            lines.push(std::mem::take(&mut row).line());
        }
        if row.used() > 0 {
            row = row.gap(gap);
        }
        row = row.put(STRONG, key).gap(1).put(TEXT, what);
    }
    lines.push(row.line());
    lines
}

/// The effect if no key is pressed, the longest wording first.
fn wait(guru: &Guru) -> Vec<String> {
    let Guru { attempt, attempts_max, .. } = guru;
    let holds = "Holding until a key is pressed.".to_owned();
    match guru.countdown {
        // The attempts were not counted.
        Countdown::Reboot { seconds } if *attempt == 0 => {
            vec![
                format!("Reboots automatically in {seconds} s."),
                format!("Reboots in {seconds} s."),
            ]
        }
        Countdown::Reboot { seconds } => vec![
            format!(
                "Reboots in {seconds} s: failed boot {attempt} of {attempts_max}; no further \
                 attempts after number {attempts_max}."
            ),
            format!("Reboots in {seconds} s (boot {attempt} of {attempts_max})."),
            format!("Reboots in {seconds} s."),
        ],
        Countdown::Held if *attempt == 0 => {
            vec!["Holding on request, until a key is pressed.".to_owned(), holds]
        }
        Countdown::Held => vec![
            format!("Holding on request after failed boot {attempt}, until a key is pressed."),
            "Holding on request, until a key is pressed.".to_owned(),
            holds,
        ],
        Countdown::Exhausted => vec![
            format!("Holding after {attempt} failed boots in a row, until a key is pressed."),
            holds,
        ],
        Countdown::Uncounted => vec![
            "Holding until a key is pressed: failed boots cannot be counted.".to_owned(),
            holds,
        ],
    }
}
