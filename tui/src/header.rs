//! The parts that are the same on every page: the bar at the top, the keys at the
//! bottom.

use std::time::Duration;

use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::style::{Color, Modifier};

use crate::page::Page;
use crate::prompt::Prompt;
use crate::snapshot::{Cluster, Header, Snapshot};
use crate::text::{clean, cut, duration, end, plural};
use crate::theme::{ALARM, BAR, CURSOR, DOES, KEY, Mark, NOTICE, OPEN};
use crate::widgets::{Row, row};

/// For so long, the failure of the boot before counts as a warning; the Boot page has
/// it until the next boot.
const FAILURE_REMEMBERED: Duration = Duration::from_secs(86_400);

/// Draws the bar: the identity and the state of the node; below it the place, the
/// uptime, and the time.
pub(crate) fn draw(snapshot: &Snapshot, area: Rect, buffer: &mut Buffer) {
    let header = &snapshot.header;
    let strong = BAR.add_modifier(Modifier::BOLD);
    let (mark, state) = match header.cluster {
        Cluster::Home => (Mark::Good, strong),
        Cluster::Unknown | Cluster::Foreign | Cluster::Trusted => (Mark::Busy, strong),
        Cluster::Disowning | Cluster::Split => (Mark::Bad, strong.bg(Color::Red)),
    };
    let word = match header.cluster {
        // At boot, which is the only time, this says more.
        Cluster::Unknown => "starting",
        cluster => cluster.name(),
    };
    let how = Row::default().put(state, &format!(" {} {word} ", mark.glyph()));
    let who = Row::indented(1).put(strong, "POLIS").gap(2);
    // Its state is always there; a name that leaves no room for it is cut.
    let room = usize::from(area.width).saturating_sub(who.used() + how.used() + 1);
    let node = clean(header.node.as_deref().unwrap_or("no node ID yet"));
    let who = who.put(BAR, &cut(&node, room));
    let remarks = match remarks(snapshot) {
        0 => Row::default(),
        some => Row::default().put(
            BAR.fg(Color::LightYellow),
            &format!("{} {}  ", Mark::Attention.glyph(), plural(some as u64, "warning")),
        ),
    };
    buffer.set_style(area, BAR);
    spread(area, 0, who, &[remarks, how], buffer);
    draw_place(snapshot, place(area), buffer);
}

/// The row of the bar with the place, the uptime, and the time.
pub(crate) fn place(area: Rect) -> Rect {
    let first = area.height.min(1);
    Rect { y: area.y + first, height: area.height - first, ..area }
}

/// Draws no more than that row.
pub(crate) fn draw_place(snapshot: &Snapshot, area: Rect, buffer: &mut Buffer) {
    let header = &snapshot.header;
    let address = header.address.as_deref().unwrap_or("no address yet");
    let version = format!("{} slot {}", header.version, header.slot);
    let uptime = format!("up {}", duration(header.uptime));
    let place = |parts: &[&str]| {
        let put = |row: Row, part: &&str| {
            if row.used() > 1 { row.gap(3).put(BAR, part) } else { row.put(BAR, part) }
        };
        parts.iter().fold(Row::indented(1), put)
    };
    let room = |clock: &Row| usize::from(area.width).saturating_sub(clock.used() + 1);
    // The value that distinguishes a live screen from a frozen one goes last, and the words beside
    // it go before the address.
    let [whole_clock, clock] = clocks(header);
    let needed = place(&[address]).used();
    let clock = if needed <= room(&whole_clock) { whole_clock } else { clock };
    let room = room(&clock);
    let whole: &[&str] = &[&version, address, &uptime];
    let place = [whole, &[&version, address], &[address]]
        .into_iter()
        .map(place)
        .find(|place| place.used() <= room)
        .unwrap_or_else(|| place(whole));
    buffer.set_style(area, BAR);
    spread(area, 0, place, &[clock], buffer);
}

/// The time of day, with words and without: one that nothing has confirmed has its mark in both.
fn clocks(header: &Header) -> [Row; 2] {
    let mark = Mark::Attention.glyph();
    let leads = match header.clock_unset {
        true => [format!("{mark} not set: "), format!("{mark} ")],
        false => [String::new(), String::new()],
    };
    leads.map(|lead| {
        Row::default().put(BAR.fg(Color::LightYellow), &lead).put(BAR, &header.clock).gap(1)
    })
}

/// The number of things to remark on. One that lasts for months does not count.
fn remarks(snapshot: &Snapshot) -> usize {
    let lately = snapshot.header.uptime < FAILURE_REMEMBERED;
    snapshot.warnings.len() + usize::from(lately && snapshot.previous_failure.is_some())
}

/// Whether the bar of `new` differs from that of `old` beside the time and the uptime.
pub(crate) fn shows_change(old: &Snapshot, new: &Snapshot) -> bool {
    !old.header.is_same_but_for_time(&new.header) || remarks(old) != remarks(new)
}

/// Draws a row from both ends; parts at the right that no longer fit are left out.
fn spread(area: Rect, row: u16, left: Row, right: &[Row], buffer: &mut Buffer) {
    if row >= area.height {
        return;
    }
    let y = area.y + row;
    row::draw(&left.clone().line(), area.x, y, area.width, buffer);
    let mut end = usize::from(area.width);
    for part in right.iter().rev() {
        let Some(start) = end.checked_sub(part.used()).filter(|start| *start > left.used()) else {
            return;
        };
        // Both fit in the width of the area, which is a `u16`.
        let [x, width] = [start, part.used()].map(|cells| u16::try_from(cells).unwrap_or(0));
        row::draw(&part.clone().line(), area.x + x, y, width, buffer);
        end = start;
    }
}

/// Draws the row of keys; the open page is in brackets, and another page with news has
/// its mark.
pub(crate) fn draw_keys(open: Page, snapshot: &Snapshot, area: Rect, buffer: &mut Buffer) {
    buffer.set_style(area, DOES);
    let fits = |(keys, help): &(Row, Row)| keys.used() + help.used() < area.width.into();
    let short = Row::default().put(KEY, "?");
    let whole = short.clone().put(DOES, " keys ");
    let forms = [
        (Form::Functions, &whole),
        (Form::Names, &short),
        (Form::Digits, &whole),
        (Form::Digits, &short),
    ];
    let mut rows = forms.map(|(form, help)| (keys(open, snapshot, form), help.clone())).into_iter();
    let last = rows.next_back();
    if let Some((keys, help)) = rows.find(fits).or(last) {
        spread(area, 0, keys, &[help], buffer);
    }
}

/// How pages are named in the row of keys, where there is room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    /// By their function keys and names.
    Functions,
    /// By the digits that open pages too, and their names.
    Names,
    /// By the digits; the open page by its name too.
    Digits,
}

fn keys(open: Page, snapshot: &Snapshot, form: Form) -> Row {
    let mut keys = Row::default();
    for (page, number) in Page::ALL.into_iter().zip(1..) {
        let (key, title) = match form {
            Form::Functions => ("F", page.title()),
            Form::Names => ("", page.title()),
            Form::Digits => ("", ""),
        };
        keys = if page == open {
            keys.put(OPEN, &format!("[{key}{number} {}]", page.title()))
        } else {
            let gap = if title.is_empty() { "" } else { " " };
            let keys = keys.put(KEY, &format!(" {key}{number}{gap}")).put(DOES, title);
            match page.remark(snapshot) {
                None => keys.put(DOES, " "),
                Some(mark @ Mark::Bad) => keys.put(ALARM, mark.glyph()),
                Some(mark) => keys.put(BAR.patch(mark.style()), mark.glyph()),
            }
        };
    }
    keys
}

/// Draws the typed text in place of the keys.
pub(crate) fn draw_prompt(prompt: &Prompt, area: Rect, buffer: &mut Buffer) {
    buffer.set_style(area, DOES);
    let lead = Row::default().put(DOES, &format!(" Lines {}", prompt.what.lead()));
    // A person types at the end of the text, where the cursor has a cell.
    let room = usize::from(area.width).saturating_sub(lead.used() + 1);
    let typed = lead.put(BAR, &end(&clean(&prompt.text), room)).put(CURSOR, " ");
    let help = Row::default()
        .put(KEY, "Enter")
        .put(DOES, " keeps it  ")
        .put(KEY, "Esc")
        .put(DOES, " drops it ");
    spread(area, 0, typed, &[help], buffer);
}

/// Draws a sentence in place of the keys.
pub(crate) fn draw_notice(notice: &str, area: Rect, buffer: &mut Buffer) {
    if area.height > 0 {
        let width = usize::from(area.width);
        let row = Row::indented(1).put(NOTICE, &cut(&clean(notice), width.saturating_sub(2)));
        row::draw(&row.to(width).line(), area.x, area.y, area.width, buffer);
        buffer.set_style(area, NOTICE);
    }
}
