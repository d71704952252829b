//! The state of the cluster, by its leader: nodes, etcd, rejected machines, and what keeps it
//! from being healthy.

use polis_proto::v1;
use serde::Serialize;

use super::info::domain;
use super::update;
use crate::error::Error;
use crate::node::{View, called, faults, nodes_table};
use crate::output::{Document, Text, fields, or_dash};
use crate::session::Session;
use crate::table::table;
use crate::text::clean;
use crate::{etcd, units};
use polis_wire::identity::NodeId;
use polis_wire::node_roles::is_consensus_member;

#[derive(Debug, Serialize)]
pub(super) struct Status {
    pub(super) healthy: bool,
    /// `leader`: the leader has reported it.
    source: &'static str,
    /// Everything that keeps the cluster from being healthy, a sentence each.
    pub(super) problems: Vec<String>,
    cluster_domain: String,
    leader: String,
    pub(super) nodes: Vec<View>,
    etcd: etcd::Status,
    /// The update of the cluster that goes on.
    #[serde(skip_serializing_if = "Option::is_none")]
    update: Option<update::View>,
    /// Registrations that the leader refused, the newest first.
    refused: Vec<Refused>,
}

/// A refused registration.
#[derive(Clone, Debug, Serialize)]
struct Refused {
    /// The node ID of its key, as on its screen.
    id: String,
    address: String,
    reason: String,
    count: u64,
    last: Option<units::Time>,
}

impl Refused {
    fn of(refused: &v1::RefusedRegistration) -> Self {
        let key = <[u8; 32]>::try_from(refused.public_key.as_slice()).ok();
        Self {
            id: key.map(|key| NodeId::from_public_key(&key).to_string()).unwrap_or_default(),
            address: refused.address.clone(),
            reason: refused.reason.clone(),
            count: refused.count,
            last: units::since_1970(refused.last_at).map(units::Time),
        }
    }

    fn row(&self) -> Vec<String> {
        let cells = [
            self.id.as_str(),
            &self.address,
            &self.reason,
            &self.count.to_string(),
            &units::text(self.last),
        ];
        cells.map(or_dash).into()
    }
}

impl Status {
    pub(super) async fn read(session: &Session) -> Result<Self, Error> {
        let info = session.cluster_info().await?;
        let nodes = session.nodes(&[]).await?;
        let consensus = etcd::read(session).await?;
        Ok(Self::of(&info, &nodes, &consensus))
    }

    pub(super) fn of(
        info: &v1::GetClusterInfoResponse,
        nodes: &[v1::NodeInfo],
        consensus: &v1::ConsensusStatus,
    ) -> Self {
        let problems = problems(info, nodes, consensus);
        Self {
            healthy: problems.is_empty(),
            source: "leader",
            problems,
            cluster_domain: domain(info),
            leader: info.leader.clone(),
            nodes: nodes.iter().map(View::of).collect(),
            etcd: etcd::Status::of(consensus).with_names(nodes),
            update: info.update.as_ref().map(|read| update::View::of(read, nodes)),
            refused: info.refused_registrations.iter().map(Refused::of).collect(),
        }
    }

    /// The advice for nodes whose heartbeat is overdue.
    fn overdue(&self) -> Option<String> {
        let waits = |node: &View| node.return_of_former_voter().is_some() || node.asks_to_return();
        let is_meant = |node: &&View| node.is_late() && !waits(node);
        let late = self.nodes.iter().filter(is_meant);
        let commands: Vec<_> =
            late.map(|node| format!("`polisctl node delete {} --force`", node.id())).collect();
        (!commands.is_empty())
            .then(|| format!("switch it on; if its machine is lost:\n{}", commands.join("\n")))
    }

    /// The remedy for the voters of the former cluster, whose snapshot was restored.
    fn former(&self) -> Option<String> {
        let advice =
            |node: &View| Some(format!("{}: {}", node.called(), node.return_of_former_voter()?));
        let lines: Vec<_> = self.nodes.iter().filter_map(advice).collect();
        (!lines.is_empty()).then(|| lines.join("\n"))
    }

    /// The nodes that wait for approval, with the command.
    fn waiting(&self) -> Option<String> {
        let new = self.nodes.iter().filter(|node| node.waits_for_approval());
        let lines: Vec<_> =
            new.map(|node| format!("`polisctl node approve {}`", node.id())).collect();
        (!lines.is_empty()).then(|| lines.join("\n"))
    }

    /// The command for recovery keys that only the cluster stores. The cluster is healthy
    /// all the same, but a lost cluster loses them.
    fn unsaved(&self) -> Option<String> {
        let unsaved = self.nodes.iter().filter(|node| node.is_recovery_key_unsaved());
        let unsaved: Vec<_> = unsaved.map(View::id).collect();
        let first = unsaved.first()?;
        let nodes = if unsaved.len() == 1 { "node" } else { "nodes" };
        let count = unsaved.len();
        Some(format!(
            "recovery keys unsaved on {count} {nodes}: `polisctl node recovery-key show {first}`"
        ))
    }

    /// The targets that logs do not reach. The cluster is healthy all the same: the lines stay
    /// on the disks of the nodes meanwhile.
    fn undelivered(&self) -> Option<String> {
        let lines: Vec<_> = self.nodes.iter().flat_map(View::undelivered).collect();
        (!lines.is_empty()).then(|| lines.join("\n"))
    }

    /// The faults of mirrors and further disks. The cluster is healthy all the same: the nodes
    /// work.
    fn disks(&self) -> Option<String> {
        let nodes = self.nodes.iter().filter(|node| node.is_up());
        let lines: Vec<_> = nodes.flat_map(View::disk_faults).collect();
        (!lines.is_empty()).then(|| lines.join("\n"))
    }

    /// Which snapshot of etcd is outside of the cluster. The cluster is healthy all the same:
    /// voters have theirs on their disks.
    fn shipped(&self) -> Option<String> {
        let lines: Vec<_> = self.nodes.iter().filter_map(View::shipped).collect();
        (!lines.is_empty()).then(|| lines.join("\n"))
    }

    /// Which nodes serve Kubernetes, and what the others wait for; `None` in a cluster
    /// without it. It is not a part of the cluster's own health.
    fn kubernetes(&self) -> Option<String> {
        let nodes = self.nodes.iter().filter(|node| node.is_up());
        let nodes: Vec<_> = nodes.filter_map(|node| Some((node, node.kubernetes()?))).collect();
        let of = nodes.len();
        let others: Vec<_> = nodes
            .iter()
            .filter(|(_, state)| state != "ready")
            .map(|(node, state)| format!("{}: {state}", node.called()))
            .collect();
        let ready = format!("ready on {} of {of} nodes", of - others.len());
        (of > 0).then(|| std::iter::once(ready).chain(others).collect::<Vec<_>>().join("\n"))
    }

    /// How a sentence calls the node of an ID.
    fn called(&self, id: &str) -> String {
        let known = self.nodes.iter().find(|node| node.id() == id);
        known.map_or_else(|| id.to_owned(), View::called)
    }

    pub(super) fn document(&self) -> Result<Document, Error> {
        let state = if self.healthy { "healthy".to_owned() } else { self.problems.join("\n") };
        let mut lines = vec![
            ("cluster", or_dash(&self.cluster_domain)),
            ("state", state),
            ("leader", or_dash(&self.called(&self.leader))),
            ("etcd", self.etcd.summary()),
        ];
        let update = self.update.as_ref().and_then(update::View::line);
        lines.extend(update.map(|line| ("update", line)));
        lines.extend(self.kubernetes().map(|state| ("Kubernetes", state)));
        lines.extend(self.etcd.remedy().map(|(about, advice)| (about, advice.to_owned())));
        lines.extend(self.overdue().map(|advice| ("overdue", advice)));
        lines.extend(self.former().map(|advice| ("former voter", advice)));
        lines.extend(self.waiting().map(|advice| ("waiting", advice)));
        lines.extend(self.disks().map(|text| ("disks", text)));
        lines.extend(self.undelivered().map(|text| ("logs", text)));
        lines.extend(self.shipped().map(|text| ("snapshots", text)));
        lines.extend(self.unsaved().map(|advice| ("recovery", advice)));
        let mut text = Text::from(fields(&lines))
            .and("\n")
            .then(nodes_table(&self.nodes))
            .and(faults(&self.nodes));
        if !self.refused.is_empty() {
            let rows: Vec<_> = self.refused.iter().map(Refused::row).collect();
            let heads = ["REFUSED", "ADDRESS", "REASON", "TIMES", "LAST"];
            text = text.and("\n").then(table(&heads, &rows));
        }
        Document::new(self, text)
    }
}

/// Everything that keeps a cluster from being healthy, a sentence each.
fn problems(
    info: &v1::GetClusterInfoResponse,
    nodes: &[v1::NodeInfo],
    consensus: &v1::ConsensusStatus,
) -> Vec<String> {
    let mut problems = Vec::new();
    if info.leader.is_empty() {
        problems.push("the curator has no leader".to_owned());
    }
    for node in nodes.iter().filter(|node| node.state() == v1::NodeState::Up) {
        match node.health() {
            v1::NodeHealth::Healthy => {}
            v1::NodeHealth::Late => problems.push(format!("{}: heartbeat overdue", called(node))),
            v1::NodeHealth::Unknown => problems.push(format!(
                "{}: health unknown, no heartbeat since the leader changed",
                called(node)
            )),
            v1::NodeHealth::Absent => problems.push(format!("{}: no heartbeat yet", called(node))),
        }
    }
    for node in nodes.iter().filter(|node| node.state() == v1::NodeState::Up) {
        let crash_loop = node.status.as_ref().map(|status| &*status.workload_crash_loop);
        if let Some(said) = crash_loop.filter(|said| !said.is_empty()) {
            problems.push(format!("{}: {said}", called(node)));
        }
    }
    for node in nodes.iter().filter(|node| !node.attestation_fault.is_empty()) {
        problems.push(format!("{}: {}", called(node), clean(&node.attestation_fault)));
    }
    for node in nodes.iter().filter(|node| node.state() == v1::NodeState::Standby) {
        problems.push(format!("{} has not committed yet", called(node)));
    }
    let enters = |node: &&v1::NodeInfo| {
        let role = is_consensus_member(node.roles.as_ref());
        let member = consensus.members.iter().any(|member| member.node_id == node.id);
        node.state() == v1::NodeState::Up && role && !member && !node.leaving
    };
    for node in nodes.iter().filter(enters) {
        if node.former_voter {
            problems.push(format!(
                "{} was a voter before the cluster was restored from a snapshot, and does not rejoin \
                 by itself",
                called(node)
            ));
            continue;
        }
        let advice = match node.health() {
            v1::NodeHealth::Healthy => "if this lasts, remove the role and add it again",
            v1::NodeHealth::Late | v1::NodeHealth::Unknown | v1::NodeHealth::Absent => {
                "it is off or cut off, and continues once it is back"
            }
        };
        problems.push(format!(
            "{} has the role consensus member but no member of etcd yet; {advice}",
            called(node)
        ));
    }
    for node in nodes.iter().filter(|node| node.leaving) {
        problems.push(format!("{} is leaving etcd", called(node)));
    }
    if consensus.leader == 0 {
        problems.push("etcd has no leader".to_owned());
    }
    for member in &consensus.members {
        let known = nodes.iter().find(|node| node.id == member.node_id);
        let name = match (known, member.node_id.as_str()) {
            (Some(node), _) => called(node),
            (None, "") => "a new member".to_owned(),
            (None, id) => id.to_owned(),
        };
        if !member.answers {
            problems.push(format!("the etcd member of {name} does not answer"));
        }
        if member.learner {
            problems.push(format!("the etcd member of {name} is learning"));
        }
    }
    problems.extend(consensus.alarms.iter().map(|alarm| raised(alarm)));
    problems
}

/// An alarm of etcd as a sentence.
fn raised(alarm: &str) -> String {
    let meaning = match alarm == etcd::CORRUPT {
        true => ": members have different data, and every write is refused",
        false => "",
    };
    format!("etcd raises {alarm}{meaning}")
}
