//! The cluster at one moment, and how it is drawn.

use std::cmp::Reverse;

use polis_proto::v1;
use polis_tui::clean;
use polis_tui::ratatui::buffer::Buffer;
use polis_tui::ratatui::style::{Color, Modifier, Style};

use super::card::{Card, Mark};
use crate::session::Target;
use crate::text::{cut, fit};

/// The waits and warnings of a node, at most so many notes.
const NOTES_MAX: usize = 3;
/// Nodes that the headline names: 80 columns have room for the names of two.
const NAMED_MAX: usize = 2;
/// Columns before a note.
const INDENT: usize = 5;

const HEAD: Style = Style::new().fg(Color::White).bg(Color::Blue);
const DIM: Style = Style::new().fg(Color::DarkGray);
const CURSOR: Style = Style::new().add_modifier(Modifier::REVERSED);

/// The cluster at one moment.
#[derive(Clone, Debug, Default)]
pub(super) struct Board {
    pub(super) cluster: String,
    /// The records of the last list, one for each card.
    pub(super) nodes: Vec<v1::NodeInfo>,
    pub(super) cards: Vec<Card>,
    /// When the nodes were listed last, by the operator's clock.
    pub(super) at: String,
    /// Why a newer list is missing.
    pub(super) trouble: Option<String>,
    /// Why a console did not open, or ended, until the next key.
    pub(super) notice: Option<String>,
}

impl Board {
    /// Takes a newer look at the cluster; returns the place of the chosen node in it.
    pub(super) fn renew(&mut self, newer: Self, chosen: usize) -> usize {
        let id = self.nodes.get(chosen).map(|node| &node.id);
        let place = newer.nodes.iter().position(|node| Some(&node.id) == id);
        *self = Self { notice: self.notice.take(), ..newer };
        place.unwrap_or(chosen)
    }

    /// The console of a node; a node without an address has a notice instead.
    pub(super) fn open(&mut self, chosen: usize) -> Option<Target> {
        let card = self.cards.get(chosen)?;
        if card.target.is_none() {
            // 80 columns have room for it with a whole node ID.
            self.notice = Some(format!("no console: no address of {} is known", card.called));
        }
        card.target.clone()
    }

    /// One line for the whole cluster.
    pub(super) fn headline(&self) -> (Mark, String) {
        let worst = self.cards.iter().map(|card| card.mark).max().unwrap_or(Mark::Bad);
        let some = self.cards.iter().filter(|card| card.mark != Mark::Good).count();
        let nodes = match self.cards.len() {
            1 => "1 node".to_owned(),
            count => format!("{count} nodes"),
        };
        match (&self.trouble, some) {
            (Some(trouble), _) => {
                (Mark::Bad, format!("No newer list of nodes since {}: {trouble}", self.at))
            }
            (None, 0) => (worst, format!("{nodes}, all healthy")),
            (None, some) => (worst, format!("{nodes}, {some} to look at: {}", self.worst())),
        }
    }

    /// The nodes to look at, the worst first: most of a large cluster is out of sight.
    fn worst(&self) -> String {
        let mut some: Vec<_> = self.cards.iter().filter(|card| card.mark != Mark::Good).collect();
        some.sort_by_key(|card| Reverse(card.mark));
        let first: Vec<_> = some.iter().take(NAMED_MAX).map(|card| &*card.called).collect();
        match some.len().saturating_sub(NAMED_MAX) {
            0 => first.join(", "),
            more => format!("{} and {more} more", first.join(", ")),
        }
    }

    /// Draws over all of an empty buffer.
    pub(super) fn draw(&self, selected: usize, buffer: &mut Buffer) {
        let area = buffer.area;
        let width = usize::from(area.width);
        let mut put = |y: usize, text: &str, style: Style| {
            let Ok(y) = u16::try_from(y) else { return };
            if y < area.height {
                buffer.set_stringn(area.x, area.y + y, cut(&clean(text), width), width, style);
            }
        };
        put(0, &format!("{:width$}", format!(" Polis, {}  {}", self.cluster, self.at)), HEAD);
        let (mark, text) = self.headline();
        put(1, &format!(" {} {text}", mark.glyph()), mark.style());
        if let Some(notice) = &self.notice {
            put(2, &format!(" {notice}"), Mark::Bad.style());
        }
        let rows = usize::from(area.height).saturating_sub(4);
        let lines = self.lines(selected, width);
        // The selected node and its notes stay in sight.
        let end = lines.iter().rposition(|line| line.of == selected).map_or(0, |at| at + 1);
        let start = lines.iter().position(|line| line.of == selected).unwrap_or(0);
        let top = end.saturating_sub(rows).min(start);
        for (y, line) in lines.iter().skip(top).take(rows).enumerate() {
            put(y + 3, &line.text, line.style);
        }
        let keys = " Up, Down: choose   Enter: console of the node   q: leave";
        let place = match self.cards.len() {
            0 => String::new(),
            all => format!("node {} of {all} ", selected + 1),
        };
        let room = width.saturating_sub(place.len());
        put(usize::from(area.height).saturating_sub(1), &format!("{keys:room$}{place}"), HEAD);
    }

    fn lines(&self, selected: usize, width: usize) -> Vec<Row> {
        let longest = |of: fn(&Card) -> usize| self.cards.iter().map(of).max().unwrap_or(0);
        let name = longest(|card| card.called.chars().count()).min(width / 2);
        let word = longest(|card| card.word.chars().count());
        let roles = longest(|card| card.roles.chars().count());
        let mut lines = Vec::new();
        for (of, card) in self.cards.iter().enumerate() {
            let Card { called, mark, word: state, roles: has, load, notes, .. } = card;
            let head = format!(" {} {:name$}  {state:word$}", mark.glyph(), cut(called, name));
            let whole = format!("{head}  {has:roles$}  {load}");
            // Beside a whole node ID, 80 columns have no room for all of it.
            let (text, below) = match whole.trim_end().chars().count() <= width {
                true => (whole, Vec::new()),
                false => (head, vec![has, load]),
            };
            let below = below.into_iter().filter(|text| !["", "-"].contains(&text.as_str()));
            let style = if of == selected { mark.style().patch(CURSOR) } else { mark.style() };
            lines.push(Row { of, text: format!("{text:width$}"), style });
            let more = notes.len().saturating_sub(NOTES_MAX);
            let more = (more > 0).then(|| format!("{more} more: Enter opens its console"));
            // On many terminals the dim colour is close to the background: notes do not have it.
            let notes = notes.iter().take(NOTES_MAX).chain(&more).map(|note| (note, Style::new()));
            for (note, style) in below.map(|fact| (fact, DIM)).chain(notes) {
                let rows = note_lines(note, width.saturating_sub(INDENT)).into_iter();
                let row = |text: String| Row { of, text: format!("{:INDENT$}{text}", ""), style };
                lines.extend(rows.map(row));
            }
        }
        lines
    }
}

/// A note in lines of so many columns. The screen cuts what is wider, so a command that does
/// not fit goes on in the next line.
fn note_lines(note: &str, columns: usize) -> Vec<String> {
    let fitted = fit(&clean(note), columns);
    let rows = fitted.lines().flat_map(|line| {
        let line: Vec<char> = line.chars().collect();
        line.chunks(columns.max(1)).map(|row| row.iter().collect()).collect::<Vec<String>>()
    });
    rows.collect()
}

/// A line about a node.
struct Row {
    of: usize,
    text: String,
    style: Style,
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use polis_tui::Snapshot;
    use polis_tui::ratatui::buffer::Cell;
    use polis_tui::ratatui::layout::Rect;
    use polis_tui::snapshot::{Metrics, Service, ServiceState, Stage, StageState, Warning};

    use super::*;

    fn node(name: &str, state: v1::NodeState, health: v1::NodeHealth) -> v1::NodeInfo {
        v1::NodeInfo {
            id: format!("polis-{name}"),
            name: name.to_owned(),
            state: state.into(),
            health: health.into(),
            ..Default::default()
        }
    }

    fn healthy() -> Snapshot {
        let metrics = Metrics {
            cpu: vec![12],
            memory_total: 100,
            memory_used: 25,
            data_total: 200,
            data_used: 20,
            ..Default::default()
        };
        Snapshot { metrics: Some(metrics), ..Default::default() }
    }

    fn waiting() -> Snapshot {
        let state = StageState::Waiting {
            what: "2 of 3 voters".to_owned(),
            since: Duration::from_secs(75),
        };
        let stage = Stage { name: "consensus".to_owned(), state, ..Default::default() };
        let warning = Warning { text: "The recovery key is not saved.".to_owned(), help: None };
        Snapshot { stages: vec![stage], warnings: vec![warning], ..healthy() }
    }

    fn board() -> Board {
        use v1::{NodeHealth, NodeState};
        let up = |name| node(name, NodeState::Up, NodeHealth::Healthy);
        let cards = vec![
            Card::of(&up("web-1"), None, Some(Ok(healthy()))),
            Card::of(&up("web-2"), None, Some(Ok(waiting()))),
            Card::of(
                &node("web-3", NodeState::Up, NodeHealth::Late),
                None,
                Some(Err("refused".into())),
            ),
            Card::of(&node("web-4", NodeState::New, NodeHealth::Absent), None, None),
        ];
        let at = "2026-01-02 03:04:05 UTC".to_owned();
        Board { cluster: "home".to_owned(), cards, at, ..Board::default() }
    }

    fn screen(board: &Board, selected: usize, width: u16, height: u16) -> String {
        let mut buffer = Buffer::empty(Rect::new(0, 0, width, height));
        board.draw(selected, &mut buffer);
        let rows = buffer.content.chunks(usize::from(width));
        let row = |cells: &[Cell]| {
            cells.iter().map(|cell| cell.symbol()).collect::<String>().trim_end().to_owned()
        };
        rows.map(row).collect::<Vec<_>>().join("\n")
    }

    #[test]
    fn each_node_is_there_with_what_it_waits_for() {
        let screen = screen(&board(), 0, 100, 24);
        for wanted in [
            "home",
            "4 nodes, 3 to look at: web-3, web-2 and 1 more",
            "node 1 of 4",
            "■ web-1",
            "CPU 12 %, memory 25 %, data 10 %",
            "▲ web-2",
            "consensus waits for 2 of 3 voters (1 min 15 s)",
            "The recovery key is not saved.",
            "! web-3",
            "does not answer: refused",
            "polisctl node delete polis-web-3 --force",
            "polisctl node approve polis-web-4",
            "q: leave",
        ] {
            assert!(screen.contains(wanted), "no {wanted:?} in\n{screen}");
        }
    }

    #[test]
    fn a_note_has_all_of_its_words_and_its_command_on_one_line_of_80_columns() {
        let id = "polis-8e9e05c52164694d3f1a77c0b2d95e06";
        let mut late = node("web-1", v1::NodeState::Up, v1::NodeHealth::Late);
        late.id = id.to_owned();
        let reason = "no answer within 3 s, and the machine at its last known address is another";
        let card = Card::of(&late, None, Some(Err(reason.to_owned())));
        let board = Board { cards: vec![card], ..board() };
        let wide = screen(&board, 0, 80, 24);
        let command = format!("`polisctl node delete {id} --force`");
        assert!(wide.lines().any(|line| line.trim() == command), "{wide}");
        let words = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(words(&wide).contains(&format!("does not answer: {reason}")), "{wide}");
        // Where it cannot be on one line, nothing of it is cut.
        let narrow = screen(&board, 0, 40, 24).replace(['\n', ' '], "");
        assert!(narrow.contains(&command.replace(' ', "")), "{narrow}");
    }

    #[test]
    fn a_wide_or_a_combined_character_takes_one_cell() {
        let text = "disk \u{6f22}\u{5b57} \u{1f4a5}e\u{301}\u{1b}[2J is late".to_owned();
        let warned = Snapshot { warnings: vec![Warning { text, help: None }], ..healthy() };
        let wide = node("\u{6f22}-1", v1::NodeState::Up, v1::NodeHealth::Healthy);
        let cards = vec![Card::of(&wide, None, Some(Ok(warned)))];
        let screen = screen(&Board { cards, ..board() }, 0, 80, 24);
        for wanted in [" \u{25b2} ?-1  up, healthy  ", "disk ?? ?e? [2J is late"] {
            assert!(screen.contains(wanted), "no {wanted:?} in\n{screen}");
        }
    }

    #[test]
    fn what_has_no_room_beside_a_node_is_below_it_and_notes_that_are_left_out_are_counted() {
        let mut unnamed = node("", v1::NodeState::Up, v1::NodeHealth::Healthy);
        unnamed.id = "polis-8e9e05c52164694d3f1a77c0b2d95e06".to_owned();
        let roles = v1::NodeRoles {
            consensus_member: Some(v1::node_roles::ConsensusMember {}),
            ..Default::default()
        };
        unnamed.roles = Some(roles);
        let warning = |number| Warning { text: format!("Warning {number}."), help: None };
        let warned = Snapshot { warnings: (1..=5).map(warning).collect(), ..healthy() };
        let trouble = Some("no leader answers within 4 s, ".repeat(4));
        let cards = vec![Card::of(&unnamed, None, Some(Ok(warned)))];
        let board = Board { cards, trouble, ..board() };
        let screen = screen(&board, 0, 80, 24);
        for wanted in [
            "polis-8e9e05c52164694d3f1a77c0b2d95e06  up, healthy",
            "CPU 12 %, memory 25 %, data 10 %",
            "Warning 3.",
            "2 more: Enter opens its console",
        ] {
            assert!(screen.contains(wanted), "no {wanted:?} in\n{screen}");
        }
        assert!(!screen.contains("Warning 4."), "{screen}");
        let headline = screen.lines().nth(1).unwrap();
        assert!(headline.ends_with(".."), "{headline}");
    }

    #[test]
    fn a_dead_node_or_an_unknown_one_is_never_all_healthy() {
        let mut board = board();
        board.cards.truncate(1);
        assert_eq!(board.headline(), (Mark::Good, "1 node, all healthy".to_owned()));
        board.trouble = Some("no leader was found".to_owned());
        let (mark, text) = board.headline();
        assert_eq!(mark, Mark::Bad);
        assert!(text.contains("2026-01-02 03:04:05 UTC: no leader was found"), "{text}");
        assert_eq!(Board::default().headline().0, Mark::Bad, "nothing is known");
        // It answers, and the leader has no heartbeat of it.
        let new = node("web-1", v1::NodeState::Up, v1::NodeHealth::Unknown);
        let cards = vec![Card::of(&new, None, Some(Ok(healthy())))];
        let board = Board { cards, ..Board::default() };
        let headline = "1 node, 1 to look at: web-1".to_owned();
        assert_eq!(board.headline(), (Mark::Attention, headline));
        let late = node("web-1", v1::NodeState::Up, v1::NodeHealth::Late);
        assert_eq!(Card::of(&late, None, None).mark, Mark::Bad);
        let asks = v1::NodeInfo { returning: Some(v1::Returning::default()), ..late };
        assert_eq!(Card::of(&asks, None, None).mark, Mark::Attention);
        let former = v1::NodeInfo { former_voter: true, ..new };
        assert_eq!(Card::of(&former, None, Some(Ok(healthy()))).mark, Mark::Bad);
    }

    #[test]
    fn a_node_with_a_dead_or_a_restarting_service_is_not_healthy_and_names_it() {
        let of = |state, cause: Option<&str>| {
            let tree = [(0, "root"), (1, "consensus"), (2, "maintenance"), (1, "agent")];
            let mut services = tree.map(|(depth, name)| Service {
                depth,
                name: name.to_owned(),
                state: ServiceState::Healthy,
                ..Service::default()
            });
            services[2].state = state;
            services[2].cause = cause.map(str::to_owned);
            let up = node("web-1", v1::NodeState::Up, v1::NodeHealth::Healthy);
            let snapshot = Snapshot { services: services.into(), ..healthy() };
            let cards = vec![Card::of(&up, None, Some(Ok(snapshot)))];
            Board { cards, ..Board::default() }
        };
        for state in [ServiceState::Healthy, ServiceState::Done, ServiceState::Starting] {
            let board = of(state, Some("no key"));
            assert_eq!(board.headline(), (Mark::Good, "1 node, all healthy".to_owned()));
        }
        for (state, mark, note) in [
            (
                ServiceState::Restarting,
                Mark::Attention,
                "service consensus.maintenance is restarting, last died: no key",
            ),
            (
                ServiceState::Dead,
                Mark::Bad,
                "service consensus.maintenance is dead, last died: no key",
            ),
        ] {
            let board = of(state, Some("no key"));
            assert_eq!(board.headline(), (mark, "1 node, 1 to look at: web-1".to_owned()));
            assert_eq!(board.cards[0].notes, [note]);
        }
        let silent = of(ServiceState::Dead, None);
        assert_eq!(silent.cards[0].notes, ["service consensus.maintenance is dead"]);
    }

    #[test]
    fn the_chosen_node_is_in_sight_on_any_terminal() {
        let board = board();
        for (width, height) in [(20, 5), (40, 7), (80, 24), (240, 67)] {
            for selected in 0..board.cards.len() {
                let screen = screen(&board, selected, width, height);
                let called = &board.cards[selected].called;
                // The headline names nodes, too.
                let is_listed = screen.lines().skip(3).any(|line| line.contains(called));
                assert!(is_listed, "{width}x{height}: no {called}\n{screen}");
            }
        }
        // No size panics.
        for (width, height) in [(1, 1), (3, 2), (0, 0)] {
            screen_of_any_size(&board, width, height);
        }
    }

    fn screen_of_any_size(board: &Board, width: u16, height: u16) {
        let mut buffer = Buffer::empty(Rect::new(0, 0, width, height));
        board.draw(0, &mut buffer);
    }

    #[test]
    fn a_note_has_the_colour_of_ordinary_text() {
        let mut buffer = Buffer::empty(Rect::new(0, 0, 80, 24));
        board().draw(0, &mut buffer);
        let text = |row: &[Cell]| row.iter().map(|cell| cell.symbol()).collect::<String>();
        let mut rows = buffer.content.chunks(80);
        let note = rows.find(|row| text(row).contains("does not answer: refused")).unwrap();
        assert!(note.iter().all(|cell| cell.fg == Color::Reset), "{note:?}");
    }

    #[test]
    fn a_node_without_an_address_says_that_no_console_can_be_opened() {
        let mut board = board();
        assert_eq!(board.open(3), None);
        assert_eq!(board.notice.as_deref(), Some("no console: no address of web-4 is known"));
        let mut known = node("web-4", v1::NodeState::Up, v1::NodeHealth::Healthy);
        known.id = "polis-8e9e05c52164694d3f1a77c0b2d95e06".to_owned();
        let external_address = "10.0.0.1".to_owned();
        known.status = Some(v1::NodeStatus { external_address, ..Default::default() });
        let target = crate::session::target(&known).ok();
        board.cards[3].target.clone_from(&target);
        board.notice = None;
        assert!(target.is_some());
        assert_eq!((board.open(3), board.notice.as_deref()), (target, None));
        assert_eq!((board.open(4), board.notice.as_deref()), (None, None), "no such node");
        // A node without a name is its whole ID.
        let unnamed = v1::NodeInfo { name: String::new(), status: None, ..known };
        board.cards[3] = Card::of(&unnamed, None, None);
        assert_eq!(board.open(3), None);
        let screen = screen(&board, 3, 80, 24);
        let notice = format!(" no console: no address of {} is known", unnamed.id);
        assert_eq!(screen.lines().nth(2), Some(&*notice), "{screen}");
    }

    #[test]
    fn a_console_that_did_not_open_says_why_and_makes_no_list_old() {
        let mut board = board();
        board.notice = Some("cannot reach web-3: refused".to_owned());
        assert_eq!(board.renew(self::board(), 0), 0);
        let screen = screen(&board, 0, 80, 24);
        assert!(screen.contains("4 nodes, 3 to look at"), "{screen}");
        assert_eq!(screen.lines().nth(2), Some(" cannot reach web-3: refused"), "{screen}");
    }

    #[test]
    fn the_chosen_node_stays_so_when_others_come_and_go() {
        let of = |names: &[&str]| {
            let up = |name: &&str| node(name, v1::NodeState::Up, v1::NodeHealth::Healthy);
            let nodes: Vec<_> = names.iter().map(up).collect();
            let cards = nodes.iter().map(|node| Card::of(node, None, None)).collect();
            Board { nodes, cards, ..Board::default() }
        };
        let mut board = of(&["b", "d"]);
        let chosen = board.renew(of(&["a", "b", "c", "d"]), 1);
        assert_eq!((chosen, &*board.cards[chosen].called), (3, "d"));
        assert_eq!(board.renew(of(&["b", "d"]), chosen), 1);
        // Where it is gone, the place stays.
        assert_eq!(board.renew(of(&["a", "b"]), 1), 1);
    }
}
