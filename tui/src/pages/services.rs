//! Answers: what died, why, how often?

use ratatui::text::Line;

use super::{Content, blank};
use crate::snapshot::{Service, ServiceState, Snapshot};
use crate::text::{clean, count, duration, name, plural, width as cells};
use crate::theme::{ATTENTION, DIM, Mark, PLAIN};
use crate::widgets::Row;
use crate::widgets::headline::{INDENT, hanging, headline};

/// Columns after the tree: state, time in it, restarts.
const STATE: usize = 13;
const SINCE: usize = 14;
const RESTARTS: usize = 10;

/// Widest tree; the rest of a wide screen is for causes.
const TREE_MAX: usize = 44;

/// Branches further down than this are drawn at this depth.
const DEPTH_MAX: usize = 16;

/// Names that fit in a sentence.
const NAMED_MAX: usize = 3;

pub(crate) fn content(snapshot: &Snapshot, width: usize) -> Content {
    let services = &snapshot.services;
    let (mark, answer) = answer(services);
    let mut head = headline(mark, &answer, width);
    if services.is_empty() {
        return Content { head, body: Vec::new() };
    }
    let tree = width.saturating_sub(INDENT + STATE + SINCE + RESTARTS).min(TREE_MAX);
    head.push(blank());
    head.push(
        Row::indented(INDENT)
            .cell(tree, DIM, "service")
            .cell(STATE, DIM, "state")
            .right(SINCE, DIM, "for")
            .right(RESTARTS, DIM, "restarts")
            .gap(2)
            .line(),
    );
    let rows = services.iter().zip(branches(services));
    Content {
        head,
        body: rows.flat_map(|(service, branch)| lines(service, &branch, tree, width)).collect(),
    }
}

fn answer(services: &[Service]) -> (Mark, String) {
    let named = |state: &[ServiceState]| -> Vec<&str> {
        services
            .iter()
            .filter(|service| state.contains(&service.state))
            .map(|service| service.name.as_str())
            .collect()
    };
    let down = named(&[ServiceState::Restarting, ServiceState::Dead]);
    let starting = named(&[ServiceState::Starting]);
    let restarts = services.iter().fold(0u64, |sum, service| sum.saturating_add(service.restarts));
    let all = services.len() as u64;
    let so_far = if restarts == 0 {
        String::new()
    } else {
        format!(" {} so far.", plural(restarts, "restart"))
    };
    match (down.as_slice(), starting.as_slice()) {
        _ if services.is_empty() => (Mark::Idle, "No service has started yet.".to_owned()),
        ([], []) => (Mark::Good, format!("All {} are well.{so_far}", plural(all, "service"))),
        ([], names) => {
            (Mark::Busy, format!("{} of {all} starting: {}.{so_far}", names.len(), list(names)))
        }
        (names, _) => {
            (Mark::Bad, format!("{} of {all} down: {}.{so_far}", names.len(), list(names)))
        }
    }
}

/// The first few names, and how many more there are.
fn list(names: &[&str]) -> String {
    let first = names.iter().take(NAMED_MAX).map(|text| name(text)).collect::<Vec<_>>().join(", ");
    match names.len().saturating_sub(NAMED_MAX) {
        0 => first,
        more => format!("{first} and {more} more"),
    }
}

/// What stands before each name: `│ └ `. Found from the end, where it is known
/// which branches still go on below.
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

fn lines(service: &Service, branch: &str, tree: usize, width: usize) -> Vec<Line<'static>> {
    let (mark, word) = match service.state {
        ServiceState::Starting => (Mark::Busy, "starting"),
        ServiceState::Healthy => (Mark::Good, "healthy"),
        ServiceState::Done => (Mark::Idle, "done"),
        ServiceState::Restarting => (Mark::Attention, "restarting"),
        ServiceState::Dead => (Mark::Bad, "dead"),
    };
    let restarts = if service.restarts == 0 { DIM } else { ATTENTION };
    let name = Row::default().put(DIM, branch).put(PLAIN, &service.name);
    let mut row = Row::default()
        .cell(INDENT, mark.style(), mark.glyph())
        .join(tree.saturating_sub(1), name)
        .gap(1)
        .cell(STATE, mark.style(), word)
        .right(SINCE, PLAIN, &duration(service.since))
        .right(RESTARTS, restarts, &count(service.restarts))
        .gap(2);
    let Some(cause) = &service.cause else { return vec![row.line()] };
    let cause = format!("last died: {}", clean(cause));
    if row.used() + cells(&cause) <= width {
        row = row.put(ATTENTION, &cause);
        return vec![row.line()];
    }
    let mut lines = vec![row.line()];
    lines.extend(hanging(INDENT + cells(branch), "  ", ATTENTION, &cause, width));
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn branches_end_where_no_sibling_follows() {
        let tree = [0, 1, 2, 2, 1, 2, 99];
        let services = tree.map(|depth| Service { depth, ..Service::default() });
        let branches = branches(&services);
        assert_eq!(branches[..6], ["", "├ ", "│ ├ ", "│ └ ", "└ ", "  └ "]);
        assert_eq!(branches[6].len(), "└ ".len() + 2 * (DEPTH_MAX - 1));
    }
}
