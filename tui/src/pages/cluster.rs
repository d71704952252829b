//! The Cluster page: which nodes are there, are all well, and does one wait for a
//! person?

use std::collections::BTreeSet;
use std::time::Duration;

use ratatui::style::Style;
use ratatui::text::Line;

use super::Content;
use super::naming::{called, short};
use crate::snapshot::{
    Cluster, Health, MemberStatus, Node, NodeState, Nodes, Snapshot, Update, UpdateState,
};
use crate::text::{clean, count, duration, plural, width as cells};
use crate::theme::{ATTENTION, DIM, Mark, PLAIN, STRONG};
use crate::widgets::Row;
use crate::widgets::block::{blank, titled};
use crate::widgets::headline::{INDENT, command, hanging, headline, note};

/// Columns after the name: address, state, role in etcd, heartbeat.
const ADDRESS: usize = 17;
/// The same where there is room for the longest address of IPv6.
const ADDRESS_MAX: usize = 41;
const STATE: usize = 12;
const ETCD: usize = 9;
const HEARTBEAT: usize = 15;

/// A whole node ID and one to keep apart; a narrow screen shows its beginning.
const NAME_MAX: usize = 39;
const NAME_MIN: usize = 14;

/// So much room beside the columns holds the other facts.
const ROLES: usize = 50;

/// More nodes than this have a row each, and only this node has a second one.
const DETAILS_MAX: usize = 8;

/// Names that fit in a sentence.
const NAMED_MAX: usize = 2;

pub(crate) fn content(snapshot: &Snapshot, width: usize) -> Content {
    let Some(known) = snapshot.nodes.as_ref().filter(|known| !known.nodes.is_empty()) else {
        let mut body = headline(Mark::Idle, alone(snapshot), width);
        body.extend(identity(snapshot, width));
        return Content { body, ..Content::default() };
    };
    let unreachable = unreachable(snapshot);
    let (mark, answer) = answer(snapshot);
    let mut head = headline(mark, &answer, width);
    if let Some(stale) = known.stale {
        let text = format!("No curator answers: this list is {} old.", duration(stale));
        head.extend(note(Mark::Bad, &text, width));
    }
    if let Some(update) = &known.update {
        head.extend(update_lines(update, known, width));
    }
    head.push(blank());
    let columns = Columns::of(width, known);
    head.push(columns.head(known.nodes.len(), width));
    let mut nodes: Vec<&Node> = known.nodes.iter().collect();
    // Nodes that need a person come first; the others stay where they are.
    nodes.sort_by_key(|node| std::cmp::Reverse(standing(node, &unreachable).0.max(Mark::Good)));
    let details = nodes.len() <= DETAILS_MAX;
    let seen = Seen {
        etcd: nodes.iter().any(|node| node.etcd.is_some()),
        stale: known.stale.is_some(),
        late_after: known.late_after,
        unreachable,
    };
    let rows = nodes.iter().flat_map(|node| rows(node, &columns, &seen, details, width));
    let mut body: Vec<_> = rows.collect();
    body.extend(super::reach::block(snapshot, width));
    body.extend(identity(snapshot, width));
    Content { head, body, ..Content::default() }
}

/// The update of the cluster that goes on.
fn update_lines(update: &Update, known: &Nodes, width: usize) -> Vec<Line<'static>> {
    let (mark, word) = match update.state {
        UpdateState::Loading | UpdateState::Running => (Mark::Busy, ""),
        UpdateState::Paused => (Mark::Attention, " paused"),
        UpdateState::Failed => (Mark::Bad, " failed"),
        UpdateState::Unknown => (Mark::Attention, ", in a state that this version does not know"),
    };
    let Update { version, done, total, .. } = update;
    let mut text =
        format!("Update to {version}{word}: {done} of {}", plural(*total as u64, "node"));
    let named = |id: &str| {
        let node = known.nodes.iter().find(|node| node.id == id);
        node.map_or_else(|| short(id), called)
    };
    // The turn is named already.
    let prefix = update.node.as_ref().map(|id| format!("{id}: "));
    let waits = prefix.and_then(|prefix| update.waits_for.strip_prefix(&*prefix));
    let waits = waits.unwrap_or(&update.waits_for);
    let waits = known.nodes.iter().fold(waits.to_owned(), |text, node| match &*node.id {
        "" => text,
        id => text.replace(id, &called(node)),
    });
    if let Some(id) = &update.node {
        let since = update.since.iter().map(|since| format!(" since {since}"));
        text.extend(["; ".to_owned(), named(id)].into_iter().chain(since));
    }
    match waits.as_str() {
        "" => text.push('.'),
        waits => text.extend([": ", waits, "."]),
    }
    let mut lines = note(mark, &text, width);
    match update.state {
        UpdateState::Failed => lines.extend(command("polisctl cluster update status", width)),
        UpdateState::Paused => {
            lines.extend(hanging(INDENT, "", ATTENTION, "to continue, an owner runs:", width));
            lines.extend(command("polisctl cluster update resume", width));
        }
        UpdateState::Loading | UpdateState::Running | UpdateState::Unknown => {}
    }
    lines
}

/// The reason why no nodes are shown.
fn alone(snapshot: &Snapshot) -> &'static str {
    match snapshot.header.cluster {
        Cluster::Unknown => {
            "This node is not in a cluster yet. See the Boot page (F1) for the reason."
        }
        Cluster::Foreign => "This node is not approved yet and cannot read the list of nodes.",
        Cluster::Trusted => "This node is approved and is entering the cluster.",
        Cluster::Home => "The list of nodes has not arrived yet.",
        Cluster::Disowning => "This node was removed from its cluster.",
        Cluster::Split => "No curator can be reached; the list of nodes is not available.",
    }
}

/// The ID of this node and the words of its key, for comparison.
fn identity(snapshot: &Snapshot, width: usize) -> Vec<Line<'static>> {
    let header = &snapshot.header;
    let Some(node) = &header.node else { return Vec::new() };
    let mut lines = vec![blank(), titled(Row::default().put(STRONG, "This node"), width)];
    let fact =
        |what: &str, text: &str| hanging(INDENT, &crate::text::pad(what, FACT), PLAIN, text, width);
    lines.extend(fact("ID", node));
    lines.extend(header.words.iter().flat_map(|words| fact("fingerprint", words)));
    if header.cluster == Cluster::Foreign {
        let text = "An operator compares the fingerprint with the output of this command, and \
                    approves:";
        lines.push(blank());
        lines.extend(note(Mark::Attention, text, width));
        lines.extend(command(&format!("polisctl node approve {node}"), width));
    }
    lines
}

/// The words for a node that does not send its heartbeat, for one whose member of etcd does
/// not answer, and for one about which the leader does not know yet.
const LATE: &str = "late";
const SILENT: &str = "silent";
const UNKNOWN: &str = "not known";

/// Column of the names of facts.
const FACT: usize = 12;

/// The members of etcd that do not answer this node's own: it notices a dead machine
/// before a leader misses the heartbeats, and also without a leader.
fn unreachable(snapshot: &Snapshot) -> BTreeSet<&str> {
    let members = snapshot.etcd.iter().flat_map(|etcd| &etcd.members);
    let silent = members.filter(|member| !member.own && member.answers == Some(false));
    silent.map(|member| member.name.as_str()).collect()
}

/// Whether this node's own member of etcd does not know yet if another voter answers: it has
/// just begun to vote, or has lost its leader. The leading curator notices the missing heartbeats
/// of a dead node later.
fn is_asking(snapshot: &Snapshot) -> bool {
    let members = snapshot.etcd.iter().flat_map(|etcd| &etcd.members);
    let voters = members.filter(|member| member.standing == MemberStatus::Voter);
    let (own, others): (Vec<_>, Vec<_>) = voters.partition(|member| member.own);
    !own.is_empty() && others.iter().any(|member| member.answers.is_none())
}

/// The headline while it asks.
fn unsure(known: &Nodes) -> String {
    let members = known.nodes.iter().filter(|node| node.state == NodeState::Up).count() as u64;
    format!("{}; the connections to the other voters are not known yet.", plural(members, "node"))
}

/// Whether a member of etcd reaches other members than before.
pub(crate) fn reaches_anew(old: &Snapshot, new: &Snapshot) -> bool {
    let members = |snapshot: &'_ Snapshot| {
        let members = snapshot.etcd.iter().flat_map(|etcd| &etcd.members);
        members.map(|member| (member.id, member.reaches.clone())).collect::<Vec<_>>()
    };
    unreachable(old) != unreachable(new)
        || is_asking(old) != is_asking(new)
        || members(old) != members(new)
}

/// The state of a node, as the mark, the word and the next step of a person.
fn standing(node: &Node, unreachable: &BTreeSet<&str>) -> (Mark, &'static str) {
    match (node.state, node.health) {
        (NodeState::Up, Health::Healthy | Health::Unknown)
            if unreachable.contains(node.id.as_str()) =>
        {
            (Mark::Bad, SILENT)
        }
        (NodeState::New, _) => (Mark::Attention, "new"),
        (NodeState::Standby, _) => (Mark::Busy, "standby"),
        (NodeState::Up, Health::Late) => (Mark::Bad, LATE),
        (NodeState::Up, Health::Healthy) => (Mark::Good, "up"),
        // Before a leader knows: of itself, a node knows that it is there.
        (NodeState::Up, Health::Unknown) if node.own => (Mark::Good, "up"),
        (NodeState::Up, Health::Unknown) => (Mark::Attention, UNKNOWN),
        (NodeState::Decommissioned, _) => (Mark::Idle, "removed"),
        (NodeState::Unknown, _) => (Mark::Attention, "unknown"),
    }
}

pub(crate) fn answer(snapshot: &Snapshot) -> (Mark, String) {
    match &snapshot.nodes {
        Some(known) if !known.nodes.is_empty() => {
            let (mark, text) = classify(known, &unreachable(snapshot));
            match mark {
                Mark::Good if is_asking(snapshot) => (Mark::Attention, unsure(known)),
                _ => (mark, text),
            }
        }
        _ => (Mark::Idle, alone(snapshot).to_owned()),
    }
}

fn classify(known: &Nodes, unreachable: &BTreeSet<&str>) -> (Mark, String) {
    let (mark, text) = classify_nodes(known, unreachable);
    let failed = known.update.as_ref().filter(|update| update.state == UpdateState::Failed);
    match failed {
        // The nodes run, each with a version that is good, and the update waits for a person.
        Some(update) if mark == Mark::Good => {
            (Mark::Attention, format!("The update to {} has stopped. {text}", update.version))
        }
        _ => (mark, text),
    }
}

fn classify_nodes(known: &Nodes, unreachable: &BTreeSet<&str>) -> (Mark, String) {
    let of = |word: &str| -> Vec<&Node> {
        known.nodes.iter().filter(|node| standing(node, unreachable).1 == word).collect()
    };
    let (late, silent, unknown) = (of(LATE), of(SILENT), of(UNKNOWN));
    let (new, standby) = (of("new"), of("standby"));
    let members = known.nodes.iter().filter(|node| node.state == NodeState::Up).count() as u64;
    let leader = match &known.leader {
        Some(leader) if known.nodes.iter().any(|node| node.own && node.id == *leader) => {
            " This node leads.".to_owned()
        }
        Some(leader) => {
            let node = known.nodes.iter().find(|node| node.id == *leader);
            format!(" {} leads.", node.map_or_else(|| short(leader), called))
        }
        None if known.stale.is_some() => " The leader is not known.".to_owned(),
        None => " No leader: an election is running.".to_owned(),
    };
    let all = plural(members, "node");
    let some = |nodes: &[&Node], one: &str, more: &str| {
        let what = if nodes.len() == 1 { one } else { more };
        format!("{} of {all} {what}: {}.", count(nodes.len() as u64), list(nodes))
    };
    if !late.is_empty() {
        let text = some(&late, "with an overdue heartbeat", "with an overdue heartbeat");
        return (Mark::Bad, format!("{text}{leader}"));
    }
    if !silent.is_empty() {
        let text = some(&silent, "does not answer", "do not answer");
        return (Mark::Bad, format!("{text}{leader}"));
    }
    if !new.is_empty() {
        let wait = if new.len() == 1 { "waits" } else { "wait" };
        let text =
            format!("{} {wait} for approval: {}.", plural(new.len() as u64, "node"), list(&new));
        return (Mark::Attention, text);
    }
    if known.stale.is_some() {
        return (Mark::Bad, format!("{all}; their health is unknown.{leader}"));
    }
    if !unknown.is_empty() || known.leader.is_none() && members > 1 {
        let text = match unknown.is_empty() {
            true => format!("{all}; their health is unknown."),
            false => some(&unknown, "without a heartbeat yet", "without a heartbeat yet"),
        };
        return (Mark::Attention, format!("{text}{leader}"));
    }
    if known.leader.is_none() {
        return (Mark::Attention, format!("One node, healthy.{leader}"));
    }
    let coming = match standby.len() {
        0 => String::new(),
        some => format!(" {} entering.", plural(some as u64, "node")),
    };
    match members {
        1 => (Mark::Good, format!("One node, healthy.{coming}")),
        _ => (Mark::Good, format!("{all}, all healthy.{leader}{coming}")),
    }
}

fn list(nodes: &[&Node]) -> String {
    let first: Vec<_> = nodes.iter().take(NAMED_MAX).map(|node| called(node)).collect();
    match nodes.len().saturating_sub(NAMED_MAX) {
        0 => first.join(", "),
        more => format!("{} and {} more", first.join(", "), count(more as u64)),
    }
}

/// How a row is shared out. On a screen without room for all columns, the least useful ones are
/// left out: a part of a number is a wrong number.
struct Columns {
    name: usize,
    address: usize,
    etcd: bool,
    heartbeat: bool,
    roles: bool,
}

impl Columns {
    fn of(width: usize, known: &Nodes) -> Self {
        let nodes = known.nodes.len();
        let left = width.saturating_sub(INDENT + ADDRESS + STATE + ETCD + HEARTBEAT);
        let addresses = known.nodes.iter().filter_map(|node| node.address.as_ref());
        let longest = addresses.map(|address| cells(address) + 2).max().unwrap_or(0);
        let more = longest.clamp(ADDRESS, ADDRESS_MAX) - ADDRESS;
        // The name is the first distinction of a node.
        let more = if left >= NAME_MIN + more { more } else { 0 };
        let left = left - more;
        let (name, address) = (left.clamp(NAME_MIN, NAME_MAX), ADDRESS + more);
        let used = INDENT + name + address + STATE;
        Self {
            name,
            address,
            etcd: used + ETCD + HEARTBEAT <= width,
            heartbeat: used + HEARTBEAT <= width,
            roles: left > NAME_MAX + ROLES || left > NAME_MAX && nodes > DETAILS_MAX,
        }
    }

    /// `row` with the last columns, as far as there is room for them.
    fn end(&self, row: Row, etcd: (Style, &str), heartbeat: (Style, &str)) -> Row {
        let row = if self.etcd { row.cell(ETCD, etcd.0, etcd.1) } else { row };
        if self.heartbeat { row.cell(HEARTBEAT, heartbeat.0, heartbeat.1) } else { row }
    }

    fn head(&self, nodes: usize, width: usize) -> Line<'static> {
        let row = Row::default()
            .cell(INDENT + self.name, STRONG, &plural(nodes as u64, "node"))
            .cell(self.address, DIM, "address")
            .cell(STATE, DIM, "state");
        let row = self.end(row, (DIM, "etcd"), (DIM, "heartbeat"));
        if self.roles {
            row.cell(0, DIM, "").put(DIM, "roles, labels").line()
        } else {
            titled(row, width)
        }
    }
}

/// The facts about all nodes together.
struct Seen<'a> {
    /// The members of etcd.
    etcd: bool,
    /// Whether the updates have stopped.
    stale: bool,
    /// How old a heartbeat gets before its node is late.
    late_after: Option<Duration>,
    /// The nodes whose member of etcd does not answer.
    unreachable: BTreeSet<&'a str>,
}

/// The role of a node that is to be a member of etcd.
const CONSENSUS: &str = "consensus member";

fn has_part(node: &Node) -> bool {
    node.roles.iter().any(|role| role == CONSENSUS)
}

/// The members of etcd, in a sentence, where this node is not a member and will not be
/// one.
pub(super) fn members_elsewhere(snapshot: &Snapshot) -> Option<String> {
    let known = snapshot.nodes.as_ref()?;
    let members: Vec<&Node> = known.nodes.iter().filter(|node| has_part(node)).collect();
    (has_no_part(snapshot) && !members.is_empty()).then(|| list(&members))
}

/// Whether this node is a member of the cluster without a member of etcd.
pub(crate) fn has_no_part(snapshot: &Snapshot) -> bool {
    let nodes = snapshot.nodes.iter().flat_map(|known| &known.nodes);
    let own = nodes.into_iter().find(|node| node.own);
    own.is_some_and(|own| own.state == NodeState::Up && !has_part(own))
}

fn rows(
    node: &Node,
    columns: &Columns,
    seen: &Seen<'_>,
    details: bool,
    width: usize,
) -> Vec<Line<'static>> {
    let (mark, word) = standing(node, &seen.unreachable);
    let state = if node.leader { format!("{word}, leads") } else { word.to_owned() };
    let name = match &node.name {
        Some(name) => clean(name).into_owned(),
        None if columns.name < NAME_MAX => short(&node.id),
        None => node.id.clone(),
    };
    let etcd = match node.etcd {
        // Its member is one of another etcd.
        None if node.former_voter => "former",
        // It has the role, and etcd has not added it yet.
        None if has_part(node) && seen.etcd => "joining",
        // A node without a member of its own does not receive which of them vote.
        None if has_part(node) => "member",
        None => "",
        Some(MemberStatus::Voter) => "voter",
        Some(MemberStatus::Learner { .. }) => "learner",
    };
    let heartbeat = heartbeat(node, seen);
    let row = Row::default()
        .cell(INDENT, mark.style(), mark.glyph())
        .cell(columns.name, if node.own { STRONG } else { PLAIN }, &name)
        .cell(columns.address, PLAIN, node.address.as_deref().unwrap_or("-"))
        .cell(STATE, mark.style(), &state);
    let late = if mark == Mark::Bad { ATTENTION } else { PLAIN };
    let row = columns.end(row, (PLAIN, etcd), (late, &heartbeat));
    let more = remark(node);
    let address = node.address.as_ref().filter(|address| cells(address) >= columns.address);
    let mut lines = Vec::new();
    if columns.roles {
        let left = width.saturating_sub(row.used());
        lines.push(row.put(DIM, &crate::text::cut(&clean(&more), left)).line());
    } else {
        lines.push(row.line());
        // The part that was cut is not shown elsewhere.
        if let Some(address) = address {
            let address = crate::text::cut(&clean(address), width.saturating_sub(INDENT));
            lines.push(Row::indented(INDENT).put(PLAIN, &address).line());
        }
        // Without a second row, only the style of its name would tell this node from the others.
        if (details || node.own) && !more.is_empty() {
            lines.push(
                Row::indented(INDENT)
                    .put(DIM, &crate::text::cut(&clean(&more), width - INDENT.min(width)))
                    .line(),
            );
        }
    }
    if node.former_voter {
        let text = "was a voter before the cluster was restored from a snapshot, and does not \
                    rejoin by itself; if its disk is lost, an operator deletes the node:";
        lines.extend(hanging(INDENT, "", ATTENTION, text, width));
        lines.extend(command(&format!("polisctl node delete {} --force", node.id), width));
        let text = "if its disk is whole, an owner makes parameters, with which it boots:";
        lines.extend(hanging(INDENT, "", ATTENTION, text, width));
        lines.extend(command("polisctl parameters register", width));
        let text = "then an owner takes its role, which gives up its etcd data; these may be \
                    newer than the snapshot:";
        lines.extend(hanging(INDENT, "", ATTENTION, text, width));
        let text = format!("polisctl node roles {} --remove consensus-member", node.id);
        lines.extend(command(&text, width));
        if node.roles.iter().any(|role| role == super::workloads::CONTROLLER.0) {
            let text = "with `--remove kubernetes-controller`, since it controls Kubernetes";
            lines.extend(hanging(INDENT, "", ATTENTION, text, width));
        }
    } else if mark == Mark::Bad && !seen.stale {
        // A node that is cut off itself cannot say that another is dead.
        let text = "switch it on, or check its network; if its machine is lost, an operator \
                    deletes the node:";
        lines.extend(hanging(INDENT, "", ATTENTION, text, width));
        lines.extend(command(&format!("polisctl node delete {} --force", node.id), width));
    }
    if node.state == NodeState::New {
        let words = node.words.as_deref().unwrap_or("its screen");
        let text = format!("an operator compares \"{words}\" with its screen, and approves it:");
        lines.extend(hanging(INDENT, "", ATTENTION, &text, width));
        lines.extend(command(&format!("polisctl node approve {}", node.id), width));
    }
    lines
}

/// The time since a node's last heartbeat: for a healthy node, only that it is not late,
/// since an age that counts seconds would add nothing and be redrawn each time.
fn heartbeat(node: &Node, seen: &Seen<'_>) -> String {
    match (node.heartbeat, node.health) {
        (Some(age), _) => format!("{} ago", duration(age)),
        (None, Health::Healthy) if seen.stale => "was on time".to_owned(),
        (None, Health::Healthy) => match seen.late_after {
            Some(late) => format!("< {} s ago", late.as_secs()),
            None => "on time".to_owned(),
        },
        (None, _) if node.state == NodeState::Decommissioned => "-".to_owned(),
        (None, Health::Unknown) if node.state == NodeState::Up => "not known".to_owned(),
        (None, _) => "none yet".to_owned(),
    }
}

/// The facts beyond the columns.
fn remark(node: &Node) -> String {
    // A name takes the column of the ID.
    let id = node.name.as_ref().map(|_name| short(&node.id));
    let own = node.own.then(|| "this node".to_owned());
    let roles = (!node.roles.is_empty()).then(|| node.roles.join(", "));
    let labels = (!node.labels.is_empty()).then(|| node.labels.join(" "));
    let version = node.version.as_ref().map(|version| format!("Polis {version}"));
    let clock = node.clock.as_ref().map(|clock| format!("clock {clock}"));
    let all = [id, own, roles, clock, labels, version];
    let all: Vec<String> = all.into_iter().flatten().collect();
    all.join(" · ")
}
