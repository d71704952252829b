//! The help: a list of all keys over the open page.

use ratatui::buffer::Buffer;
use ratatui::layout::Rect;

use crate::page::Page;
use crate::theme::{BUSY, DIM, PLAIN};
use crate::widgets::{Row, dialog};

const EVERYWHERE: [(&str, &str); 5] = [
    ("F1 .. F8, 1 .. 8", "open a page"),
    ("Tab, Shift-Tab, arrows", "the next page, the one before"),
    ("F10, P", "reboot the machine or power it off"),
    ("Ctrl-L", "redraw the screen"),
    ("?", "show this help; any key closes it"),
];

/// On every page except the one with a cursor.
const SCROLL: [(&str, &str); 2] = [
    ("Up, Down, PgUp, PgDn", "scroll by a line, by a screen"),
    ("Home, End", "go to the first line, to the last one"),
];

const BOOT: [(&str, &str); 1] = [("Enter, Space", "unfold or fold the stages of the boot")];

const SERVICES: [(&str, &str); 6] = [
    ("Up, Down, PgUp, PgDn", "choose a service, one or some further on"),
    ("Home, End", "choose the first service, the last one"),
    ("Enter, Space", "hide what is below it, or show it again"),
    ("-, +", "hide all but the first level, show all"),
    ("L", "show its logs and those below it"),
    ("Esc", "clear the choice"),
];

const LOGS: [(&str, &str); 5] = [
    ("s, S", "show more severe lines only, show more lines"),
    ("/", "search for a text and highlight it"),
    ("n", "show lines of a name and its children, such as root.network"),
    ("Esc", "show all again"),
    ("End", "follow the newest line again"),
];

/// `polisctl` reads Ctrl-] itself: it also leaves while a text is typed or a command waits for its
/// answer.
const LEAVE: (&str, &str) = ("q, Ctrl-C, Ctrl-]", "leave this console");

/// Where the explanations start.
const COLUMN: usize = 25;

/// Cells of the box, its border included.
const COLUMNS: u16 = 76;

/// Draws the keys of `page` and those of all pages; `leaves` where a key leaves.
pub(crate) fn draw(page: Page, leaves: bool, area: Rect, buffer: &mut Buffer) {
    let row =
        |(key, what): &(&str, &str)| Row::indented(2).cell(COLUMN, BUSY, key).put(PLAIN, what);
    let mut rows = vec![Row::default()];
    let own: &[_] = match page {
        Page::Services => &SERVICES,
        Page::Logs => &LOGS,
        Page::Boot => &BOOT,
        Page::Cluster | Page::Etcd | Page::Pki | Page::Network | Page::Workloads => &[],
    };
    if !own.is_empty() {
        rows.push(Row::indented(2).put(DIM, "On this page"));
        rows.extend(own.iter().map(row));
        rows.extend([Row::default(), Row::indented(2).put(DIM, "On every page")]);
    }
    let scroll: &[_] = if page == Page::Services { &[] } else { &SCROLL };
    rows.extend(scroll.iter().chain(&EVERYWHERE).map(row));
    rows.extend(leaves.then(|| row(&LEAVE)));
    rows.push(Row::default());
    dialog::draw("Keys", BUSY, rows, COLUMNS, area, buffer);
}
