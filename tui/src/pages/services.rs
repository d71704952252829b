//! The Services page: what died, why, how often?

use std::collections::BTreeMap;

use ratatui::style::Style;
use ratatui::text::Line;

use super::Content;
use super::logs::{self, Of};
use crate::snapshot::{Logs, Service, ServiceState, Snapshot};
use crate::text::{clean, count, duration, name, plural, width as cells};
use crate::theme::{ATTENTION, CURSOR, DIM, Mark, PLAIN, STRONG};
use crate::widgets::Row;
use crate::widgets::block::{beside, blank};
use crate::widgets::headline::{INDENT, hanging, headline};

/// Columns after the tree: state, time in it, restarts.
const STATE: usize = 13;
const SINCE: usize = 14;
const RESTARTS: usize = 10;

/// Widest tree; the rest of a wide screen is for causes.
const TREE_MAX: usize = 44;

/// On a screen that has no room for this and all columns, the least useful ones are left
/// out: a service without a name says nothing.
const TREE_MIN: usize = 16;

/// Branches further down than this are drawn at this depth.
const DEPTH_MAX: usize = 16;

/// Names that fit in a sentence.
const NAMED_MAX: usize = 3;

/// Where a key moves the cursor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    First,
    Last,
    By(isize),
}

/// The folding of the tree by a person.
#[derive(Clone, Debug, Default)]
pub(crate) struct Tree {
    /// The dotted name of the service under the cursor, once there is a cursor.
    pub(crate) at: Option<String>,
    /// The request to hide or to show the children of all services.
    all: Option<bool>,
    /// The same, of single services, by their dotted names.
    asked: BTreeMap<String, bool>,
}

impl Tree {
    /// Moves the cursor among the displayed services. The first step sets it, at the end
    /// that is nearer to where the step leads.
    pub(crate) fn step(&mut self, services: &[Service], step: Step) {
        let shown: Vec<String> = self.shown(services).into_iter().map(|(_, path)| path).collect();
        let Some(last) = shown.len().checked_sub(1) else { return };
        let at = self.at.as_deref().and_then(|at| position(&shown, at));
        let at = match (step, at) {
            (Step::First, _) => 0,
            (Step::Last, _) => last,
            (Step::By(..0), None) => last,
            (Step::By(_), None) => 0,
            (Step::By(steps), Some(at)) => at.saturating_add_signed(steps).min(last),
        };
        self.at = Some(shown[at].clone());
    }

    /// The service under the cursor. Without a cursor, the key only sets it: a key that
    /// acts on a service acts on one that a person has seen.
    pub(crate) fn chosen(&mut self, services: &[Service]) -> Option<&str> {
        let was_set = self.at.is_some();
        self.step(services, Step::By(0));
        self.at.as_deref().filter(|_| was_set)
    }

    /// Folds or unfolds the service under the cursor.
    pub(crate) fn fold(&mut self, services: &[Service]) {
        let Some(path) = self.chosen(services).map(str::to_owned) else { return };
        let Some(at) = paths(services).into_iter().position(|other| other == path) else { return };
        let folded = self.is_folded(services, at, &path);
        self.asked.insert(path, !folded);
    }

    /// Folds everything except the first level, or unfolds all.
    pub(crate) fn fold_all(&mut self, fold: bool) {
        self.asked.clear();
        self.all = Some(fold);
        if fold {
            self.at = None;
        }
    }

    /// Whether the children of a service are hidden: as a person asked; else where
    /// all of them are well and always were, so that the tree fits on a screen.
    fn is_folded(&self, services: &[Service], at: usize, path: &str) -> bool {
        if let Some(folded) = self.asked.get(path) {
            return *folded;
        }
        if services[at].depth == 0 {
            return false;
        }
        self.all.unwrap_or_else(|| below(services, at).all(is_well))
    }

    /// The numbers of the services that no fold hides, with their dotted names.
    fn shown(&self, services: &[Service]) -> Vec<(usize, String)> {
        let mut hidden_below = None;
        let mut shown = Vec::new();
        for (at, (service, path)) in services.iter().zip(paths(services)).enumerate() {
            if hidden_below.is_some_and(|depth| service.depth > depth) {
                continue;
            }
            hidden_below = self.is_folded(services, at, &path).then_some(service.depth);
            shown.push((at, path));
        }
        shown
    }
}

/// The place of `path` among the `shown` services, or that of the nearest parent, which
/// hides it.
fn position(shown: &[impl AsRef<str>], path: &str) -> Option<usize> {
    let mut path = path;
    loop {
        if let Some(at) = shown.iter().position(|shown| shown.as_ref() == path) {
            return Some(at);
        }
        path = path.rsplit_once('.')?.0;
    }
}

/// The services below one.
fn below(services: &[Service], at: usize) -> impl Iterator<Item = &Service> {
    let depth = services[at].depth;
    services[at + 1..].iter().take_while(move |it| it.depth > depth)
}

/// Whether there is nothing to see about a service.
fn is_well(service: &Service) -> bool {
    let well = matches!(service.state, ServiceState::Healthy | ServiceState::Done);
    well && service.restarts == 0 && service.cause.is_none()
}

/// The dotted name of each service: its parents' names and its own.
fn paths(services: &[Service]) -> Vec<String> {
    let mut parts: Vec<&str> = Vec::new();
    let mut all = Vec::with_capacity(services.len());
    for service in services {
        parts.truncate(usize::from(service.depth));
        parts.push(&service.name);
        all.push(parts.join("."));
    }
    all
}

/// On a screen with more columns than these, the log stands beside the tree; on others
/// below it, where there is room.
const TREE_AND_CAUSE: usize = 130;
const GAP: usize = 3;

pub(crate) fn content(snapshot: &Snapshot, state: &Tree, width: usize, height: usize) -> Content {
    let services = &snapshot.services;
    let (mark, answer) = answer(snapshot);
    let mut head = headline(mark, &answer, width);
    if services.is_empty() {
        return Content { head, ..Content::default() };
    }
    let right = width.saturating_sub(TREE_AND_CAUSE + GAP);
    if right >= TREE_AND_CAUSE / 2 {
        let rows = height.saturating_sub(head.len() + 1);
        let log_lines = log_lines(&snapshot.logs, state, right, rows);
        let content = tree_content(services, state, TREE_AND_CAUSE, head);
        // Beside the head of the columns and the tree, which may be scrolled: so
        // only where all of it fits.
        if !log_lines.is_empty() && content.head.len() + content.body.len() <= height {
            let Content { mut head, body, above, focus, days } = content;
            let mut log_lines = log_lines.into_iter();
            let title = log_lines.next().into_iter().collect();
            let columns = head.pop().into_iter().collect();
            head.extend(beside(columns, TREE_AND_CAUSE + GAP, title));
            let body = beside(body, TREE_AND_CAUSE + GAP, log_lines.collect());
            return Content { head, body, above, focus, days };
        }
        return content;
    }
    let mut content = tree_content(services, state, width, std::mem::take(&mut head));
    let rows = height.saturating_sub(content.head.len() + content.body.len() + 1);
    let log_lines = log_lines(&snapshot.logs, state, width, rows);
    if !log_lines.is_empty() {
        content.body.push(blank());
        content.body.extend(log_lines);
    }
    content
}

/// The recent log of the service under the cursor; without a cursor, warnings and
/// errors.
fn log_lines(logs: &Logs, state: &Tree, width: usize, rows: usize) -> Vec<Line<'static>> {
    match &state.at {
        Some(at) => {
            let title = Row::default().put(STRONG, &name(at)).put(DIM, " newest lines, L for all");
            let names = [at.as_str()];
            logs::block(logs, title, Of::Below(&names), width, rows)
        }
        None => {
            let title = Row::default().put(STRONG, "Warnings and worse").put(DIM, " F6");
            logs::block(logs, title, Of::Wrong, width, rows)
        }
    }
}

/// The tree below `head`, which has the answer.
fn tree_content(
    services: &[Service],
    state: &Tree,
    width: usize,
    mut head: Vec<Line<'static>>,
) -> Content {
    let columns = Columns::of(width);
    head.push(blank());
    let row = Row::indented(INDENT).cell(columns.tree, DIM, "service").cell(STATE, DIM, "state");
    head.push(columns.end(row, (DIM, "for"), (DIM, "restarts")).line());
    let branches = branches(services);
    let mut body = Vec::new();
    let mut focus = None;
    let shown = state.shown(services);
    let paths: Vec<&str> = shown.iter().map(|(_, path)| path.as_str()).collect();
    let cursor = state.at.as_deref().and_then(|at| position(&paths, at)).map(|at| shown[at].0);
    for (at, path) in shown {
        let service = &services[at];
        let fold = match state.is_folded(services, at, &path) {
            true => Fold::Folded(hidden(below(services, at))),
            false => Fold::No,
        };
        let start = body.len();
        let here = cursor == Some(at);
        body.extend(lines(service, &branches[at], &fold, here, &columns, width));
        if here {
            focus = Some(start..body.len());
        }
    }
    Content { head, body, focus, ..Content::default() }
}

/// How a row is shared out.
struct Columns {
    tree: usize,
    since: bool,
    restarts: bool,
}

impl Columns {
    fn of(width: usize) -> Self {
        let left = width.saturating_sub(INDENT + STATE);
        let with = |cells: usize| left.checked_sub(cells).filter(|tree| *tree >= TREE_MIN);
        let all = with(SINCE + RESTARTS);
        let two = with(RESTARTS);
        let tree = all.or(two).unwrap_or(left).min(TREE_MAX);
        Self { tree, since: all.is_some(), restarts: two.is_some() }
    }

    /// `row` with the columns that there is room for.
    fn end(&self, row: Row, since: (Style, &str), restarts: (Style, &str)) -> Row {
        let row = if self.since { row.right(SINCE, since.0, since.1) } else { row };
        match self.restarts {
            true => row.right(RESTARTS, restarts.0, restarts.1).gap(2),
            false => row,
        }
    }
}

/// Whether the children of a service are hidden.
enum Fold {
    No,
    Folded(Hidden),
}

/// The summary of a fold: a hidden failure always shows in it.
struct Hidden {
    services: u64,
    worst: Mark,
}

fn hidden<'a>(children: impl Iterator<Item = &'a Service>) -> Hidden {
    children.fold(Hidden { services: 0, worst: Mark::Idle }, |sum, child| Hidden {
        services: sum.services + 1,
        worst: sum.worst.max(look(child.state).0),
    })
}

pub(crate) fn answer(snapshot: &Snapshot) -> (Mark, String) {
    let services = &snapshot.services;
    let names = |named: Vec<(String, &Service)>| -> Vec<String> {
        named.into_iter().map(|(name, _)| name).collect()
    };
    let down = names(down(services));
    let starting = names(named(services, &[ServiceState::Starting]));
    let restarts = services.iter().fold(0u64, |sum, service| sum.saturating_add(service.restarts));
    let all = services.len() as u64;
    let so_far = if restarts == 0 {
        String::new()
    } else {
        format!(" {} so far.", plural(restarts, "restart"))
    };
    match (down.as_slice(), starting.as_slice()) {
        _ if services.is_empty() => (Mark::Idle, "No service has started yet.".to_owned()),
        ([], []) if all == 1 => (Mark::Good, format!("The one service is healthy.{so_far}")),
        ([], []) => (Mark::Good, format!("All {} are healthy.{so_far}", plural(all, "service"))),
        ([], names) => {
            (Mark::Busy, format!("{} of {all} starting: {}.{so_far}", names.len(), list(names)))
        }
        (names, _) => {
            (Mark::Bad, format!("{} of {all} down: {}.{so_far}", names.len(), list(names)))
        }
    }
}

/// The services that died, each behind its dotted name without the root: those that wait to be
/// started again, and those that stay dead. In the order of the tree.
#[must_use]
pub fn down(services: &[Service]) -> Vec<(String, &Service)> {
    named(services, &[ServiceState::Restarting, ServiceState::Dead])
}

/// The services in one of these states, with their names.
fn named<'a>(services: &'a [Service], states: &[ServiceState]) -> Vec<(String, &'a Service)> {
    if !services.iter().any(|service| states.contains(&service.state)) {
        return Vec::new();
    }
    let named = services.iter().zip(paths(services));
    let named = named.filter(|(service, _)| states.contains(&service.state));
    named.map(|(service, path)| (below_root(path), service)).collect()
}

/// A dotted name without the root that all of them have: of a `server`, whose it is.
fn below_root(path: String) -> String {
    match path.split_once('.') {
        Some((_root, below)) => below.to_owned(),
        None => path,
    }
}

/// Whether [`answer`] may have changed: all that it reads.
pub(crate) fn may_answer_anew(old: &Snapshot, new: &Snapshot) -> bool {
    let read = |it: &Service| (it.state, it.restarts, it.depth);
    let differ = |(old, new): (&Service, &Service)| read(old) != read(new) || old.name != new.name;
    old.services.len() != new.services.len() || old.services.iter().zip(&new.services).any(differ)
}

/// The first few names, and how many more there are.
fn list(names: &[String]) -> String {
    let first = names.iter().take(NAMED_MAX).map(|text| name(text)).collect::<Vec<_>>().join(", ");
    match names.len().saturating_sub(NAMED_MAX) {
        0 => first,
        more => format!("{first} and {more} more"),
    }
}

/// The lines before each name: `│ └ `. Found from the end, where it is known which
/// branches still go on below.
fn branches(services: &[Service]) -> Vec<String> {
    let mut open = [false; DEPTH_MAX + 1];
    let mut branches = Vec::with_capacity(services.len());
    for service in services.iter().rev() {
        let depth = usize::from(service.depth).min(DEPTH_MAX);
        let mut branch: String =
            (1..depth).map(|level| if open[level] { "│ " } else { "  " }).collect();
        if depth > 0 {
            branch.push_str(if open[depth] { "├ " } else { "└ " });
        }
        open[depth] = true;
        open[depth + 1..].fill(false);
        branches.push(branch);
    }
    branches.reverse();
    branches
}

fn look(state: ServiceState) -> (Mark, &'static str) {
    match state {
        ServiceState::Starting => (Mark::Busy, "starting"),
        ServiceState::Healthy => (Mark::Good, "healthy"),
        ServiceState::Done => (Mark::Idle, "done"),
        ServiceState::Restarting => (Mark::Attention, "restarting"),
        ServiceState::Dead => (Mark::Bad, "dead"),
    }
}

fn lines(
    service: &Service,
    branch: &str,
    fold: &Fold,
    here: bool,
    columns: &Columns,
    width: usize,
) -> Vec<Line<'static>> {
    let (mark, word) = look(service.state);
    let restarts = if service.restarts == 0 { DIM } else { ATTENTION };
    let mut name = Row::default().put(DIM, branch).put(PLAIN, &service.name);
    if let Fold::Folded(Hidden { services: some @ 1.., worst }) = fold {
        name = name.put(worst.style(), &format!(" {}", worst.glyph()));
        name = name.put(DIM, &format!(" {some} more"));
    }
    let row = Row::default()
        .cell(INDENT, mark.style(), mark.glyph())
        .join(columns.tree.saturating_sub(1), name)
        .gap(1)
        .cell(STATE, mark.style(), word);
    let (since, times) = (duration(service.since), count(service.restarts));
    let row = columns.end(row, (PLAIN, &since), (restarts, &times));
    let mut lines = Vec::new();
    // Plain reverse: colours of their own would be lost on some terminals.
    let shown = |row: Row| if here { row.to(width).patch(CURSOR) } else { row };
    let Some(cause) = &service.cause else { return vec![shown(row).line()] };
    let cause = format!("last died: {}", clean(cause));
    if row.used() + cells(&cause) <= width {
        lines.push(shown(row.put(ATTENTION, &cause)).line());
        return lines;
    }
    lines.push(shown(row).line());
    lines.extend(hanging(INDENT + cells(branch), "  ", ATTENTION, &cause, width));
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_well_is_folded_by_itself_and_opens_when_it_is_not() {
        let tree = [(0, "root"), (1, "a"), (2, "b"), (1, "d"), (2, "e")];
        let mut services = tree.map(|(depth, name)| Service {
            depth,
            name: name.to_owned(),
            state: ServiceState::Healthy,
            ..Service::default()
        });
        let mut tree = Tree::default();
        let names = |tree: &Tree, services: &[Service]| {
            let shown = tree.shown(services).into_iter();
            shown.map(|(at, _)| services[at].name.clone()).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(names(&tree, &services), "root a d");
        services[4].restarts = 1;
        assert_eq!(names(&tree, &services), "root a d e");
        // The folding that a person asked for stays.
        tree.at = Some("root.d".to_owned());
        tree.fold(&services);
        assert_eq!(names(&tree, &services), "root a d");
        tree.fold_all(false);
        assert_eq!(names(&tree, &services), "root a b d e");
        tree.fold_all(true);
        assert_eq!(names(&tree, &services), "root a d");
    }

    #[test]
    fn one_service_alone_is_not_called_all_of_them() {
        let service = Service { state: ServiceState::Healthy, ..Service::default() };
        let snapshot = Snapshot { services: vec![service], ..Snapshot::default() };
        assert_eq!(answer(&snapshot), (Mark::Good, "The one service is healthy.".to_owned()));
    }

    #[test]
    fn a_fold_hides_what_is_below_and_nothing_else() {
        let tree = [(0, "root"), (1, "a"), (2, "b"), (3, "c"), (1, "d")];
        let services = tree.map(|(depth, name)| Service {
            depth,
            name: name.to_owned(),
            ..Service::default()
        });
        let names = |tree: &Tree| {
            tree.shown(&services).into_iter().map(|(_, path)| path).collect::<Vec<_>>()
        };
        let mut tree = Tree::default();
        assert_eq!(names(&tree)[3..], ["root.a.b.c", "root.d"]);
        tree.step(&services, Step::By(1));
        tree.step(&services, Step::By(1));
        assert_eq!(tree.at.as_deref(), Some("root.a"));
        tree.fold(&services);
        assert_eq!(names(&tree), ["root", "root.a", "root.d"]);
        tree.step(&services, Step::By(1));
        assert_eq!(tree.at.as_deref(), Some("root.d"));
        tree.fold_all(false);
        assert_eq!(names(&tree).len(), 5);
    }

    #[test]
    fn branches_end_where_no_sibling_follows() {
        let tree = [0, 1, 2, 2, 1, 2, 99];
        let services = tree.map(|depth| Service { depth, ..Service::default() });
        let branches = branches(&services);
        assert_eq!(branches[..6], ["", "├ ", "│ ├ ", "│ └ ", "└ ", "  └ "]);
        assert_eq!(branches[6].len(), "└ ".len() + 2 * (DEPTH_MAX - 1));
    }
}
