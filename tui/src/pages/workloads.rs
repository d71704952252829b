//! The Workloads page: does Kubernetes serve here, what does it wait for, which pods are
//! not well and why, and how full are the quotas?

use std::cmp::Reverse;

use ratatui::style::Style;
use ratatui::text::Line;

use super::Content;
use super::naming::short;
use crate::snapshot::{Part, PartState, Pod, PodState, Pods, Quota, Snapshot, Workloads};
use crate::text::{bytes, clean, count, cut, duration, name, plural, width as cells, wrap};
use crate::theme::{ATTENTION, DIM, Mark, PLAIN, STRONG};
use crate::widgets::block::{blank, title, titled};
use crate::widgets::headline::{INDENT, command, hanging, headline, note};
use crate::widgets::{Row, gauge};

/// Columns of a part after its name: state, restarts, how long.
const PART: usize = 22;
const STATE: usize = 11;
const RESTARTS: usize = 10;
const SINCE: usize = 15;

/// Columns of a quota: its name, and the longest text after its bar.
const QUOTA: usize = 22;
const AMOUNT: usize = 36;
const BAR_MAX: usize = 40;

/// The least for the name of a pod, and more than a name with its namespace has as a rule.
const POD_MIN: usize = 16;
const POD_MAX: usize = 72;
/// The runtime of a pod, where there is room for it.
const RUNTIME: usize = 12;

/// Percent of a quota from which on it is worth a look: kubelet removes unused images at 90.
const FULL: u8 = 85;
/// The same from which on kubelet evicts pods, and writes soon fail.
const FULL_BAD: u8 = 95;

/// Pods that fit in a sentence.
const NAMED_MAX: usize = 2;

const UNKNOWN: &str = "The roles of this node are not known yet. See the Boot page (F1) for the \
                       reason.";
const UNLISTED: &str = "The pods are not known: containerd has not listed them.";
const NO_ROLE: &str = "This node has no Kubernetes role and runs no workloads.";

/// The roles in the words of a node's record, and the words of a command for them.
pub(super) const CONTROLLER: (&str, &str) = ("Kubernetes controller", "kubernetes-controller");
const WORKER: (&str, &str) = ("Kubernetes worker", "kubernetes-worker");

pub(crate) fn content(snapshot: &Snapshot, width: usize, height: usize) -> Content {
    let Some(known) = snapshot.workloads.as_ref().filter(|known| !known.roles.is_empty()) else {
        return without_role(snapshot, width);
    };
    let (mark, answer) = classify(known);
    let mut head = headline(mark, &answer, width);
    head.push(blank());
    let mut rest = quotas(&known.quotas, width);
    rest.extend(match &known.pods {
        Some(pods) => self::pods(pods, width),
        None => unlisted(known, width),
    });
    // Of the parts that serve, their names say enough where room is short.
    let table = parts(&known.parts, width);
    let fits = head.len() + table.len() + rest.len() + known.waits.len() <= height;
    let mut body = unfit(known, snapshot, width);
    // The answer names the first of them, unless it has something worse to say, or no room.
    let is_short = |what: &String| cells(what) <= WAIT_MAX;
    let named = serves(known).0 == Mark::Busy && known.waits.first().is_some_and(is_short);
    let waits = known.waits.iter().skip(usize::from(named));
    let waits = waits.map(|what| format!("Waiting for {}.", clean(what)));
    body.extend(waits.flat_map(|text| note(Mark::Busy, &text, width)));
    if !body.is_empty() {
        body.push(blank());
    }
    body.extend(if fits { table } else { parts_in_short(&known.parts, width) });
    body.extend(rest);
    Content { head, body, ..Content::default() }
}

/// Whether this node is to run a part of Kubernetes.
pub(super) fn has_role(snapshot: &Snapshot) -> bool {
    snapshot.workloads.as_ref().is_some_and(|known| !known.roles.is_empty())
}

pub(crate) fn answer(snapshot: &Snapshot) -> (Mark, String) {
    match &snapshot.workloads {
        None => (Mark::Idle, UNKNOWN.to_owned()),
        Some(known) if known.roles.is_empty() => (Mark::Idle, NO_ROLE.to_owned()),
        Some(known) => classify(known),
    }
}

/// Whether [`answer`] may have changed: ages and bytes change all the time.
pub(crate) fn may_answer_anew(old: &Snapshot, new: &Snapshot) -> bool {
    let (Some(old), Some(new)) = (&old.workloads, &new.workloads) else {
        return old.workloads != new.workloads;
    };
    let part = |it: &Part| (it.name.clone(), it.state);
    let pod = |it: &Pod| (it.namespace.clone(), it.name.clone(), it.state);
    let quota = |it: &Quota| (it.name.clone(), full(it));
    let pods = |it: &Workloads| it.pods.as_ref().map(|pods| (pods.total, pods.pods.len()));
    let all = |it: &Workloads| it.pods.iter().flat_map(|it| &it.pods).map(pod).collect::<Vec<_>>();
    (&old.roles, &old.unfit, &old.waits, pods(old))
        != (&new.roles, &new.unfit, &new.waits, pods(new))
        || !old.parts.iter().map(part).eq(new.parts.iter().map(part))
        || !old.quotas.iter().map(quota).eq(new.quotas.iter().map(quota))
        || old.pods != new.pods && all(old) != all(new)
}

/// A node without a role, and the command that gives it one.
fn without_role(snapshot: &Snapshot, width: usize) -> Content {
    let (mark, answer) = answer(snapshot);
    let mut body = headline(mark, &answer, width);
    if snapshot.workloads.is_some() {
        let nodes = || snapshot.nodes.iter().flat_map(|known| &known.nodes);
        let has = |role: &str| nodes().flat_map(|node| &node.roles).any(|given| given == role);
        let node = own(snapshot);
        let give = |(text, (_, slug)): (&str, (&str, &str))| {
            let mut lines = vec![blank()];
            lines.extend(note(Mark::Idle, text, width));
            lines.extend(command(&format!("polisctl node roles {node} --add {slug}"), width));
            lines
        };
        let first = ("To run the controllers of Kubernetes here, an owner runs:", CONTROLLER);
        let roles = (!has(CONTROLLER.0)).then_some(first);
        let roles = roles.into_iter().chain([("To run pods here, an owner runs:", WORKER)]);
        body.extend(roles.flat_map(give));
    }
    Content { body, ..Content::default() }
}

/// This node, in a command that has one line.
fn own(snapshot: &Snapshot) -> String {
    snapshot.header.node.as_deref().map_or("NODE".to_owned(), short)
}

/// The reason why this node serves nothing, and how to take its roles away.
fn unfit(known: &Workloads, snapshot: &Snapshot, width: usize) -> Vec<Line<'static>> {
    let Some(reason) = &known.unfit else { return Vec::new() };
    let mut lines = hanging(INDENT, "└ ", ATTENTION, reason, width);
    let given = |(role, _): &(&str, &str)| known.roles.iter().any(|given| given == role);
    for (at, (_, slug)) in [CONTROLLER, WORKER].into_iter().filter(given).enumerate() {
        if at == 0 {
            let text = "To take the role away, an owner runs:";
            lines.extend(hanging(INDENT, "", ATTENTION, text, width));
        }
        let text = format!("polisctl node roles {} --remove {slug}", own(snapshot));
        lines.extend(command(&text, width));
    }
    lines
}

/// Whether it serves, how full it is, and how its pods are.
fn classify(known: &Workloads) -> (Mark, String) {
    let (mut mark, mut text) = serves(known);
    let remarks = [quotas_in_short(&known.quotas), known.pods.as_ref().and_then(pods_in_short)];
    for (worse, remark) in remarks.into_iter().flatten() {
        // Pods that run do not make a node serve.
        mark = if worse >= Mark::Attention { mark.max(worse) } else { mark };
        text = format!("{text} {remark}");
    }
    (mark, text)
}

fn serves(known: &Workloads) -> (Mark, String) {
    if known.unfit.is_some() {
        let roles = known.roles.iter().map(|role| name(role)).collect::<Vec<_>>().join(", ");
        return (Mark::Bad, format!("This node cannot serve its role: {roles}."));
    }
    let of = |state: PartState| known.parts.iter().filter(move |part| part.state == state);
    let all = known.parts.len() as u64;
    let failed: Vec<_> = of(PartState::Failed).map(|part| name(&part.name)).collect();
    let ready = of(PartState::Ready).count() as u64;
    match failed.as_slice() {
        [] => {}
        [one] => return (Mark::Bad, format!("1 of {} has failed: {one}.", plural(all, "part"))),
        some => {
            let text = format!("{} of {} have failed", some.len(), plural(all, "part"));
            return (Mark::Bad, format!("{text}: {}.", list(some)));
        }
    }
    if all > 0 && of(PartState::Stopped).count() as u64 == all {
        return (Mark::Idle, "All parts have stopped.".to_owned());
    }
    let next = || known.parts.iter().find(|part| part.state != PartState::Ready);
    let wait = known.waits.first().map(|what| cut(&clean(what), WAIT_MAX));
    match wait.or_else(|| next().map(|part| name(&part.name))) {
        Some(wait) => {
            let text = format!("{ready} of {} ready, waiting for {wait}.", plural(all, "part"));
            (Mark::Busy, format!("Starting: {text}"))
        }
        None if all == 0 => (Mark::Busy, "Starting.".to_owned()),
        None if all == 1 => (Mark::Good, "Serves: its one part is ready.".to_owned()),
        None => (Mark::Good, format!("Serves: all {all} parts are ready.")),
    }
}

/// A condition in a sentence.
const WAIT_MAX: usize = 100;

fn list(names: &[String]) -> String {
    let first = names.iter().take(NAMED_MAX).cloned().collect::<Vec<_>>().join(", ");
    match names.len().saturating_sub(NAMED_MAX) {
        0 => first,
        more => format!("{first} and {more} more"),
    }
}

/// A row for each part.
fn parts(parts: &[Part], width: usize) -> Vec<Line<'static>> {
    if parts.is_empty() {
        return Vec::new();
    }
    let head = Row::default()
        .cell(INDENT + PART, STRONG, &plural(parts.len() as u64, "part"))
        .cell(STATE, DIM, "state");
    let head = end(head, width, (DIM, "restarts"), (DIM, "for"));
    let mut lines = vec![titled(head, width)];
    lines.extend(parts.iter().flat_map(|part| row_of(part, width)));
    lines.push(blank());
    lines
}

/// A row for each part that does not serve, and the names of the others.
fn parts_in_short(all: &[Part], width: usize) -> Vec<Line<'static>> {
    let (ready, others): (Vec<_>, Vec<_>) =
        all.iter().partition(|part| part.state == PartState::Ready);
    if ready.is_empty() {
        return parts(all, width);
    }
    let called = |part: &&Part| match part.restarts {
        0 => name(&part.name),
        some => format!("{} ({})", name(&part.name), plural(some, "restart")),
    };
    let names = ready.iter().map(called).collect::<Vec<_>>().join(", ");
    let mut lines = vec![title(&plural(all.len() as u64, "part"), width)];
    lines.extend(others.into_iter().flat_map(|part| row_of(part, width)));
    lines.extend(note(Mark::Good, &format!("ready: {names}"), width));
    lines.push(blank());
    lines
}

fn row_of(part: &Part, width: usize) -> Vec<Line<'static>> {
    let (mark, word) = match part.state {
        PartState::Starting => (Mark::Busy, "starting"),
        PartState::Ready => (Mark::Good, "ready"),
        PartState::Failed => (Mark::Bad, "failed"),
        PartState::Stopped => (Mark::Idle, "stopped"),
        PartState::Unknown => (Mark::Attention, "unknown"),
    };
    let row = Row::default()
        .cell(INDENT, mark.style(), mark.glyph())
        .cell(PART, PLAIN, &part.name)
        .cell(STATE, mark.style(), word);
    let (times, since) = (some(part.restarts), part.since.map(duration).unwrap_or_default());
    let mut lines = vec![end(row, width, (PLAIN, &times), (PLAIN, &since)).line()];
    if let Some(cause) = &part.cause {
        lines.extend(hanging(INDENT, "└ ", ATTENTION, cause, width));
    }
    lines
}

/// `row` with the restarts and a time, as far as there is room for them: a part of a number is a
/// wrong number.
fn end(row: Row, width: usize, restarts: (Style, &str), time: (Style, &str)) -> Row {
    let has_room = |cells: usize| row.used() + cells <= width;
    match (has_room(RESTARTS), has_room(RESTARTS + SINCE)) {
        (false, _) => row,
        (true, false) => row.right(RESTARTS, restarts.0, restarts.1),
        (true, true) => row.right(RESTARTS, restarts.0, restarts.1).right(SINCE, time.0, time.1),
    }
}

/// A number of restarts; 0 needs no attention.
fn some(restarts: u64) -> String {
    if restarts == 0 { String::new() } else { count(restarts) }
}

/// How full a quota is, in percent: of bytes or files, the larger share.
fn full(quota: &Quota) -> Option<u8> {
    let share = |used: u64, limit: u64| {
        let percent = (u128::from(used) * 100).checked_div(u128::from(limit))?;
        Some(u8::try_from(percent).unwrap_or(100).min(100))
    };
    share(quota.used, quota.limit).max(share(quota.files, quota.files_limit))
}

fn mark_of(percent: u8) -> Mark {
    match percent {
        0..FULL => Mark::Good,
        FULL..FULL_BAD => Mark::Attention,
        _ => Mark::Bad,
    }
}

/// The fullest quota, if it is nearly full.
fn quotas_in_short(quotas: &[Quota]) -> Option<(Mark, String)> {
    let fullest = quotas.iter().max_by_key(|quota| full(quota))?;
    let percent = full(fullest).filter(|percent| *percent >= FULL)?;
    let text = format!("The quota of {} is {percent} % full.", name(&fullest.name));
    Some((mark_of(percent), text))
}

fn quotas(quotas: &[Quota], width: usize) -> Vec<Line<'static>> {
    if quotas.is_empty() {
        return Vec::new();
    }
    let mut lines = vec![title("Quotas on the data partition", width)];
    let bar = width.saturating_sub(INDENT + QUOTA + AMOUNT).min(BAR_MAX);
    for quota in quotas {
        let Quota { used, limit, files, files_limit, .. } = *quota;
        lines.push(amount(&quota.name, (used, limit), bytes, bar, width));
        lines.push(amount("  files", (files, files_limit), count, bar, width));
    }
    lines.push(blank());
    lines
}

fn amount(
    what: &str,
    (used, limit): (u64, u64),
    say: fn(u64) -> String,
    bar: usize,
    width: usize,
) -> Line<'static> {
    let percent = full(&Quota { used, limit, ..Quota::default() });
    let mark = percent.map_or(Mark::Idle, mark_of);
    let row = Row::default().cell(INDENT, mark.style(), mark.glyph()).cell(QUOTA, PLAIN, what);
    let style = if mark >= Mark::Attention { mark.style() } else { PLAIN };
    let (row, text) = match percent {
        None => (row, format!("{} in use, no limit", say(used))),
        Some(percent) => {
            let row = gauge::share(row, bar, mark.style(), percent, Some(FULL));
            let text = format!("{} of {}, {percent} %", say(used), say(limit));
            (row.gap(usize::from(bar > 0)), text)
        }
    };
    let left = width.saturating_sub(row.used());
    row.put(style, &cut(&text, left)).line()
}

/// The state of a pod, as the mark and the word.
fn standing(pod: &Pod) -> (Mark, &'static str) {
    match pod.state {
        PodState::Running => (Mark::Good, "running"),
        PodState::Starting => (Mark::Busy, "starting"),
        PodState::Stopping => (Mark::Busy, "stopping"),
        PodState::Completed => (Mark::Idle, "completed"),
        PodState::Waiting => (Mark::Attention, "waiting"),
        PodState::Restarted => (Mark::Attention, "restarted"),
        PodState::Unknown => (Mark::Attention, "unknown"),
        PodState::Failed => (Mark::Bad, "failed"),
        PodState::CrashLoop => (Mark::Bad, "crash loop"),
    }
}

/// The pods in a sentence. One that is not well is a warning: the node itself serves.
fn pods_in_short(pods: &Pods) -> Option<(Mark, String)> {
    let unwell = pods.pods.iter().filter(|pod| standing(pod).0 >= Mark::Attention);
    let names: Vec<_> = unwell.map(|pod| name(&full_name(pod))).collect();
    let all = plural(pods.total, "pod");
    // Those that are not well come first in the list, which may end before the last of them.
    let is_cut = names.len() == pods.pods.len() && pods.total > names.len() as u64;
    let least = if is_cut { "At least " } else { "" };
    Some(match names.as_slice() {
        [] if pods.total == 0 => return None,
        [] => (Mark::Good, format!("{all}, all well.")),
        [one] => (Mark::Attention, format!("1 of {all} is not well: {one}.")),
        some => {
            let text = format!("{least}{} of {all} are not well: {}.", some.len(), list(some));
            (Mark::Attention, text)
        }
    })
}

fn full_name(pod: &Pod) -> String {
    format!("{}/{}", pod.namespace, pod.name)
}

/// Why no pod of a node that runs some is shown.
fn unlisted(known: &Workloads, width: usize) -> Vec<Line<'static>> {
    let is_worker = known.roles.iter().any(|role| role == WORKER.0);
    match is_worker && known.unfit.is_none() {
        true => {
            let mut lines = vec![title("Pods", width)];
            lines.extend(note(Mark::Idle, UNLISTED, width));
            lines
        }
        false => Vec::new(),
    }
}

/// A row for each pod, those that are not well first.
fn pods(pods: &Pods, width: usize) -> Vec<Line<'static>> {
    let left = width.saturating_sub(INDENT + STATE + RESTARTS + SINCE);
    let runtimes = left >= POD_MAX + RUNTIME;
    let column = left.clamp(POD_MIN, POD_MAX);
    let head = Row::default()
        .cell(INDENT + column, STRONG, &plural(pods.total, "pod"))
        .cell(STATE, DIM, "state");
    let head = end(head, width, (DIM, "restarts"), (DIM, "age"));
    let head = if runtimes { head.gap(2).cell(RUNTIME, DIM, "runtime") } else { head };
    let mut lines = vec![titled(head, width)];
    let mut shown: Vec<_> = pods.pods.iter().collect();
    shown.sort_by_key(|pod| Reverse(standing(pod).0.max(Mark::Good)));
    for pod in &shown {
        let (mark, word) = standing(pod);
        let style: Style = if mark == Mark::Bad { STRONG } else { PLAIN };
        let row = Row::default()
            .cell(INDENT, mark.style(), mark.glyph())
            .cell(column, style, &full_name(pod))
            .cell(STATE, mark.style(), word);
        let (times, age) = (some(pod.restarts), pod.age.map(duration).unwrap_or_default());
        let row = end(row, width, (PLAIN, &times), (PLAIN, &age));
        let runtime = pod.runtime.as_deref().filter(|_| runtimes).unwrap_or_default();
        lines.push(row.gap(2).cell(RUNTIME, PLAIN, runtime).line());
        lines.extend(reason(pod, width));
    }
    let hidden = pods.total.saturating_sub(shown.len() as u64);
    if hidden > 0 {
        let text =
            format!("{} more: `kubectl get pods --all-namespaces` lists them", count(hidden));
        lines.extend(note(Mark::Idle, &text, width));
    }
    lines
}

/// Rows for the reason of a pod's state: a pod of somebody else may have a long story.
const REASON_ROWS: usize = 3;

/// Why a pod is not well.
fn reason(pod: &Pod, width: usize) -> Vec<Line<'static>> {
    if standing(pod).0 < Mark::Attention {
        return Vec::new();
    }
    let lead = pod.container.as_ref().map(|container| format!("container {}", name(container)));
    let status = pod.exit_status.map(|status| format!("exit status {status}"));
    let facts = [pod.reason.as_deref().map(name), status];
    let facts = facts.into_iter().flatten().collect::<Vec<_>>().join(", ");
    let message = pod.message.as_deref().map(|text| clean(text).trim().to_owned());
    let parts = [lead, Some(facts), message].into_iter().flatten().filter(|text| !text.is_empty());
    let text = parts.collect::<Vec<_>>().join(": ");
    if text.is_empty() {
        return Vec::new();
    }
    let room = width.saturating_sub(INDENT + cells("└ "));
    let mut lines = wrap(&text, room);
    if lines.len() > REASON_ROWS {
        lines.truncate(REASON_ROWS);
        if let Some(last) = lines.last_mut() {
            *last = cut(&format!("{last} .."), room);
        }
    }
    hanging(INDENT, "└ ", ATTENTION, &lines.join(" "), width)
}
