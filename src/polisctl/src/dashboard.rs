//! `polisctl dashboard`: the whole cluster on one screen; Enter opens the console of a node.
//!
//! The records and the health of all nodes come from the leader, the rest from the snapshot
//! that each node draws its own console from.
//!
//! ```text
//! leader: nodes, health --+
//! each node: snapshot ----+--look--> Board --draw--> /dev/tty <--keys-- a person
//! ```
//!
//! Invariants:
//! - A node that does not answer is shown with the reason, and never as healthy.
//! - Without a leader the headline says so and since when the records are old; each node
//!   of them is asked still.
//! - A text that is cut, and notes that are left out, say so.
//! - Every character of a text takes one cell: one that is wider would move the rest of its row.
//!
//! What this module does not do: compare the clocks of the nodes.

use std::io::{self, IsTerminal as _};
use std::time::Duration;

use futures::future::join_all;
use polis_base::canvas::{Canvas, Colours};
use polis_base::sys::clock;
use polis_proto::v1;
use polis_tui::ratatui::buffer::Buffer;
use polis_tui::ratatui::style::{Color, Modifier, Style};
use polis_tui::snapshot::StageState;
use polis_tui::{Key, Snapshot, clean};
use tokio::time::{sleep, timeout};

use super::console::{attach, glance};
use super::error::Error;
use super::node::View;
use super::screen::{Input, Screen, until_ended, write};
use super::session::{self, PATIENCE, Session, Target, at_most};
use super::text::{cut, fit};
use super::{Global, units};

/// Between two looks at the cluster.
const PACE: Duration = Duration::from_secs(2);
/// How long one node may take; it answers at once.
const NODE: Duration = Duration::from_secs(3);
/// How long the leader may take to list the nodes, before the screen says that it does not.
const LEADER: Duration = Duration::from_secs(4);
/// The waits and warnings of a node, at most so many notes.
const NOTES_MAX: usize = 3;
/// Columns before a note.
const INDENT: usize = 5;

const HEAD: Style = Style::new().fg(Color::White).bg(Color::Blue);
const DIM: Style = Style::new().fg(Color::DarkGray);
const CURSOR: Style = Style::new().add_modifier(Modifier::REVERSED);

/// How a node is: a glyph, a word and a colour that always go together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Mark {
    Good,
    Attention,
    Bad,
}

impl Mark {
    fn glyph(self) -> &'static str {
        match self {
            Self::Good => "■",
            Self::Attention => "▲",
            Self::Bad => "!",
        }
    }

    fn style(self) -> Style {
        match self {
            Self::Good => Style::new().fg(Color::Green),
            Self::Attention => Style::new().fg(Color::LightYellow),
            Self::Bad => Style::new().fg(Color::LightRed).add_modifier(Modifier::BOLD),
        }
    }
}

/// A node on the screen.
#[derive(Clone, Debug)]
struct Card {
    called: String,
    mark: Mark,
    /// State and health, in words.
    word: String,
    roles: String,
    load: String,
    /// The reason to wait, and notes for a person.
    notes: Vec<String>,
    target: Option<Target>,
}

/// The cluster at one moment.
#[derive(Clone, Debug, Default)]
struct Board {
    cluster: String,
    /// The records of the last list.
    nodes: Vec<v1::NodeInfo>,
    cards: Vec<Card>,
    /// When the nodes were listed last, by the operator's clock.
    at: String,
    /// Why a newer list is missing.
    trouble: Option<String>,
}

/// Runs the command.
pub(super) async fn run(global: &Global) -> Result<(), Error> {
    if !io::stdin().is_terminal() || !io::stdout().is_terminal() {
        return Err(Error::new("the dashboard needs a terminal")
            .or_help("`polisctl cluster status` prints the state without one"));
    }
    until_ended(Box::pin(show(global))).await
}

async fn show(global: &Global) -> Result<(), Error> {
    let mut session = Session::prepare(global, PATIENCE)?;
    // An error of the first look is printed as plain text.
    let mut board = Box::pin(look(&session, &Board::default())).await?;
    session.go_on();
    let mut selected = 0;
    loop {
        let chosen = {
            let mut desk = Desk::open(global.colours)?;
            Box::pin(desk.drive(&session, &mut board, &mut selected)).await?
        };
        // The desk is gone, and with it its screen: the console brings its own.
        let Some(target) = chosen else { return Ok(()) };
        if let Err(error) = Box::pin(attach(&mut session, &target, global.colours)).await {
            board.trouble = Some(error.summary());
        }
    }
}

/// Asks the leader for the nodes, and each of them for the rest. Without an answer of the
/// leader the nodes are those of `last`, if it has any.
async fn look(session: &Session, last: &Board) -> Result<Board, Error> {
    let list = Box::pin(session.nodes(&[]));
    let listed = match last.nodes.is_empty() {
        // The first list may take as long as in any command.
        true => list.await,
        false => timeout(LEADER, list).await.unwrap_or_else(|_elapsed| {
            Err(Error::new(format!("no leader answers within {}", units::span(LEADER))))
        }),
    };
    let (nodes, at, trouble) = match listed {
        Ok(nodes) => (nodes, units::date(clock::now()), None),
        Err(error) if last.nodes.is_empty() => return Err(error),
        Err(error) => (last.nodes.clone(), last.at.clone(), Some(error.summary())),
    };
    let cards = join_all(nodes.iter().map(|node| card(session, node))).await;
    Ok(Board { cluster: session.context.name.clone(), nodes, cards, at, trouble })
}

async fn card(session: &Session, node: &v1::NodeInfo) -> Card {
    let target = session::target(node).ok();
    let answer = match (&target, node.state()) {
        (Some(target), v1::NodeState::Up) => {
            let answer = at_most(NODE, glance(session, target)).await;
            Some(answer.map_err(|error| error.summary()))
        }
        (_, _) => None,
    };
    let card = Card::of(node, target, answer);
    let notes = card.notes.iter().map(|note| session.for_reader(note)).collect();
    Card { notes, ..card }
}

impl Card {
    /// `answer` is missing for a node that is not asked, since it is not a member.
    fn of(
        node: &v1::NodeInfo,
        target: Option<Target>,
        answer: Option<Result<Snapshot, String>>,
    ) -> Self {
        let mut notes = Vec::new();
        let mut mark = match node.state() {
            v1::NodeState::Up => Mark::Good,
            v1::NodeState::New => {
                notes.push(format!("waits for approval: `polisctl node approve {}`", node.id));
                Mark::Attention
            }
            v1::NodeState::Unspecified | v1::NodeState::Standby | v1::NodeState::Decommissioned => {
                Mark::Attention
            }
        };
        if let Some(advice) = View::of(node).return_of_former_voter() {
            mark = Mark::Bad;
            notes.push(format!(
                "it was a voter before the cluster was restored from a snapshot; {advice}"
            ));
        } else if node.state() == v1::NodeState::Up && node.health() == v1::NodeHealth::Late {
            mark = Mark::Bad;
            notes.push(format!(
                "its heartbeat is overdue; if its machine is lost: `polisctl node delete {} --force`",
                node.id
            ));
        }
        let is_unknown = matches!(node.health(), v1::NodeHealth::Unknown | v1::NodeHealth::Absent);
        if node.state() == v1::NodeState::Up && is_unknown {
            mark = Mark::Attention;
            notes.push("the leader has no heartbeat of it yet".to_owned());
        }
        let mut load = String::new();
        match answer {
            None => {}
            Some(Err(reason)) => {
                mark = Mark::Bad;
                notes.push(format!("does not answer: {reason}"));
            }
            Some(Ok(snapshot)) => {
                load = loads(&snapshot);
                let asks = needs(&snapshot);
                if !asks.is_empty() {
                    mark = mark.max(Mark::Attention);
                }
                notes.extend(asks);
            }
        }
        let word = View::of(node).standing();
        let called = if node.name.is_empty() { node.id.clone() } else { node.name.clone() };
        let roles = View::of(node).roles_text();
        Self { called, mark, word, roles, load, notes, target }
    }
}

/// The waits and warnings of a node.
fn needs(snapshot: &Snapshot) -> Vec<String> {
    let waits = snapshot.stages.iter().filter_map(|stage| match &stage.state {
        StageState::Waiting { what, since } => {
            Some(format!("{} waits for {what} ({})", stage.name, units::span(*since)))
        }
        StageState::Failed => Some(format!("{} failed", stage.name)),
        StageState::Pending | StageState::Started | StageState::Done => None,
    });
    let warns = snapshot.warnings.iter().map(|warning| match &warning.help {
        // The text leads to it.
        Some(help) if warning.text.ends_with(':') => format!("{} `{help}`", warning.text),
        _ => warning.text.clone(),
    });
    waits.chain(warns).collect()
}

/// Processor, memory and data partition.
fn loads(snapshot: &Snapshot) -> String {
    let Some(metrics) = &snapshot.metrics else { return "load not measured yet".to_owned() };
    let percent = |used: u64, total: u64| (used.saturating_mul(100)).checked_div(total);
    let cpu = metrics.cpu.last().map(|cpu| format!("CPU {cpu} %"));
    let memory = percent(metrics.memory_used, metrics.memory_total);
    let data = percent(metrics.data_used, metrics.data_total);
    let memory = memory.map(|percent| format!("memory {percent} %"));
    let data = data.map(|percent| format!("data {percent} %"));
    [cpu, memory, data].into_iter().flatten().collect::<Vec<_>>().join(", ")
}

impl Board {
    /// One line for the whole cluster.
    fn headline(&self) -> (Mark, String) {
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
            (None, some) => (worst, format!("{nodes}, {some} to look at")),
        }
    }

    /// Draws over all of an empty buffer.
    fn draw(&self, selected: usize, buffer: &mut Buffer) {
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
        put(usize::from(area.height).saturating_sub(1), &format!("{keys:width$}"), HEAD);
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
            let shown = below.chain(notes.iter().take(NOTES_MAX)).chain(&more);
            let shown = shown.flat_map(|note| note_lines(note, width.saturating_sub(INDENT)));
            let note = |text: String| Row { of, text: format!("{:INDENT$}{text}", ""), style: DIM };
            lines.extend(shown.map(note));
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

/// The command of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wish {
    Nothing,
    Leave,
    Open,
}

/// Applies a key to the selection.
fn press(key: Key, selected: &mut usize, count: usize) -> Wish {
    let last = count.saturating_sub(1);
    match key {
        Key::Up | Key::Char('k') => *selected = selected.saturating_sub(1),
        Key::Down | Key::Char('j') => *selected = (*selected + 1).min(last),
        Key::Home => *selected = 0,
        Key::End => *selected = last,
        Key::Enter => return Wish::Open,
        Key::Char('q') | Key::Ctrl('c') => return Wish::Leave,
        _ => {}
    }
    Wish::Nothing
}

/// This terminal, while the dashboard is on it.
struct Desk {
    screen: Screen,
    canvas: Canvas,
    colours: Colours,
}

impl Desk {
    fn open(colours: Colours) -> Result<Self, Error> {
        let screen = Screen::open()?;
        Ok(Self { canvas: Canvas::whole(screen.size(), colours), screen, colours })
    }

    /// Draws and reads keys; returns the node whose console is wanted, if one is.
    async fn drive(
        &mut self,
        session: &Session,
        board: &mut Board,
        selected: &mut usize,
    ) -> Result<Option<Target>, Error> {
        let mut next = Box::pin(newer(session, board.clone()));
        loop {
            *selected = (*selected).min(board.cards.len().saturating_sub(1));
            write(&self.canvas.draw(|buffer| board.draw(*selected, buffer)))?;
            let input = tokio::select! {
                // Cancel-safe per its documentation.
                input = self.screen.input() => input?,
                // Cancel-safe: the look is kept, and goes on behind the keys.
                looked = &mut next => {
                    match looked {
                        Ok(looked) => *board = looked,
                        Err(error) => board.trouble = Some(error.summary()),
                    }
                    next = Box::pin(newer(session, board.clone()));
                    continue;
                }
            };
            let keys = match input {
                Input::Leave => return Ok(None),
                Input::Keys(keys) => keys,
                Input::Redraw => {
                    self.canvas = Canvas::whole(self.screen.size(), self.colours);
                    continue;
                }
            };
            for key in keys {
                match press(key, selected, board.cards.len()) {
                    Wish::Nothing => {}
                    Wish::Leave => return Ok(None),
                    Wish::Open => {
                        let card = board.cards.get(*selected);
                        if let Some(target) = card.and_then(|card| card.target.clone()) {
                            return Ok(Some(target));
                        }
                    }
                }
            }
        }
    }
}

/// The cluster at the next look, which begins after a pause.
async fn newer(session: &Session, last: Board) -> Result<Board, Error> {
    sleep(PACE).await;
    Box::pin(look(session, &last)).await
}

#[cfg(test)]
mod tests {
    use polis_tui::ratatui::layout::Rect;
    use polis_tui::snapshot::{Metrics, Stage, Warning};

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
        Board { cluster: "home".to_owned(), nodes: Vec::new(), cards, at, trouble: None }
    }

    fn screen(board: &Board, selected: usize, width: u16, height: u16) -> String {
        let mut buffer = Buffer::empty(Rect::new(0, 0, width, height));
        board.draw(selected, &mut buffer);
        let rows = buffer.content.chunks(usize::from(width));
        let row = |cells: &[polis_tui::ratatui::buffer::Cell]| {
            cells.iter().map(|cell| cell.symbol()).collect::<String>().trim_end().to_owned()
        };
        rows.map(row).collect::<Vec<_>>().join("\n")
    }

    #[test]
    fn each_node_is_there_with_what_it_waits_for() {
        let screen = screen(&board(), 0, 100, 24);
        for wanted in [
            "home",
            "4 nodes, 3 to look at",
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
        assert_eq!(board.headline(), (Mark::Attention, "1 node, 1 to look at".to_owned()));
    }

    #[test]
    fn without_a_leader_the_dashboard_says_so_and_still_asks_each_node() {
        use crate::loopback::{Cluster, NAME};
        use tokio::time::Instant;
        let world = crate::testing::World::new();
        let cluster = Cluster::new(&world);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let session = Session::prepare(&world.global(), PATIENCE).unwrap();
            let first = look(&session, &Board::default()).await.unwrap();
            assert_eq!(first.headline(), (Mark::Good, "1 node, all healthy".to_owned()));
            cluster.lose_the_leader();
            cluster.asked();
            let begun = Instant::now();
            let then = look(&session, &first).await.unwrap();
            // The bound of the leader and that of a node, and what a busy host adds.
            assert!(begun.elapsed() < Duration::from_secs(12), "{:?}", begun.elapsed());
            let (mark, text) = then.headline();
            assert_eq!(mark, Mark::Bad);
            assert!(
                text.starts_with(&format!("No newer list of nodes since {}", first.at)),
                "{text}"
            );
            assert_eq!(then.cards[0].called, NAME);
            assert_eq!(cluster.asked(), ["Console"], "the node was asked");
        });
    }

    #[test]
    fn a_note_names_the_role_for_a_command_that_its_reader_may_not_type() {
        use crate::loopback::Cluster;
        use polis_wire::rpc::Role;
        let world = crate::testing::World::new();
        let cluster = Cluster::new(&world);
        let (_bound, closed) = crate::testing::closed_port();
        cluster.has_a_crowd(&world, &closed);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        for (role, is_marked) in
            [(Role::Viewer, true), (Role::Operator, false), (Role::Owner, false)]
        {
            cluster.lets_in_as(&world, role);
            let looked = runtime.block_on(async {
                let session = Session::prepare(&world.global(), PATIENCE).unwrap();
                look(&session, &Board::default()).await.unwrap()
            });
            let notes: Vec<_> = looked.cards.iter().flat_map(|card| card.notes.clone()).collect();
            let suggested: Vec<_> =
                notes.iter().filter(|note| note.contains("`polisctl node")).collect();
            assert!(suggested.len() > 2, "{notes:?}");
            let mark = " (only an operator or an owner may)";
            assert!(
                suggested.iter().all(|note| note.contains(mark) == is_marked),
                "{role}: {suggested:?}"
            );
        }
    }

    #[test]
    fn the_chosen_node_is_in_sight_on_any_terminal() {
        let board = board();
        for (width, height) in [(20, 5), (40, 7), (80, 24), (240, 67)] {
            for selected in 0..board.cards.len() {
                let screen = screen(&board, selected, width, height);
                let called = &board.cards[selected].called;
                assert!(screen.contains(called), "{width}x{height}: no {called}\n{screen}");
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
    fn keys_choose_a_node_and_open_it() {
        let mut selected = 0;
        assert_eq!(press(Key::Up, &mut selected, 3), Wish::Nothing);
        assert_eq!(selected, 0);
        for _ in 0..5 {
            assert_eq!(press(Key::Down, &mut selected, 3), Wish::Nothing);
        }
        assert_eq!(selected, 2);
        assert_eq!(press(Key::Enter, &mut selected, 3), Wish::Open);
        assert_eq!(press(Key::Char('q'), &mut selected, 3), Wish::Leave);
        assert_eq!(press(Key::Down, &mut selected, 0), Wish::Nothing);
        assert_eq!(selected, 0, "an empty cluster");
    }
}
