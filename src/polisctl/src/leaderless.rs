//! The view of a cluster that has no leader: put together from the nodes that answer.
//!
//! The context knows where the nodes were when a leader last reported it. Each of them
//! reports its own state without a leader, and its member of etcd with it.
//!
//! What this module does not do: report what only a leader knows, such as roles, labels
//! and the nodes that wait for approval.

use std::time::Duration;

use futures::future::join_all;
use polis_proto::v1;
use polis_proto::v1::node_management_client::NodeManagementClient;
use serde::Serialize;

use super::error::Error;
use super::output::{Document, Text, fields, or_dash};
use super::session::{Session, Target, at_most};
use super::table::table;
use super::units;

/// Longest that a node may take: all are asked at once.
const ANSWER: Duration = Duration::from_secs(4);

/// The next step where no node answers.
const SILENT: &str = "no node that this context knows answers either: check that the machines are \
                      on, and the network between them and this computer; name an address that the \
                      context lacks: --endpoint HOST[:PORT]";

/// The view, as programs read it.
#[derive(Debug, Serialize)]
pub(super) struct View {
    /// Never: a cluster without a leader accepts no change.
    healthy: bool,
    /// `nodes`: no leader has confirmed any of it.
    source: &'static str,
    pub(super) problems: Vec<String>,
    leader: String,
    nodes: Vec<Node>,
}

/// A node that the context knows.
#[derive(Debug, Serialize)]
struct Node {
    id: String,
    address: String,
    answers: bool,
    /// Its own state in the cluster; empty if it does not answer.
    cluster_state: String,
    ready: bool,
    uptime_seconds: Option<f64>,
    /// `voter`, `learner`, or empty: no member, or none that serves.
    etcd: &'static str,
    /// The member of etcd that leads, to its knowledge; empty: none.
    follows: String,
    /// The part of it that waits, and for what; empty: none.
    waits_for: String,
}

/// Asks every node that the context knows; `why` no leader could be asked. The answer
/// is `why` where no node answers either.
pub(super) async fn view(session: &Session, why: Error) -> Result<View, Error> {
    let known = session.known_nodes();
    let asked = known.iter().map(|target| ask(session, target));
    let nodes: Vec<Node> = join_all(asked).await;
    match nodes.iter().any(|node| node.answers) {
        true => Ok(View::of(nodes, &why.summary())),
        false => Err(why.help_if_late(SILENT)),
    }
}

async fn ask(session: &Session, target: &Target) -> Node {
    let answer = async {
        let mut client = NodeManagementClient::new(session.node(target).await?);
        let answer = client.get_status(v1::GetStatusRequest {}).await;
        Ok::<_, Error>(answer.map_err(|status| Error::new(status.message()))?.into_inner())
    };
    Node::of(target, at_most(ANSWER, answer).await.ok())
}

impl Node {
    fn of(target: &Target, answer: Option<v1::GetStatusResponse>) -> Self {
        let answers = answer.is_some();
        let status = answer.unwrap_or_default();
        let etcd = match &status.etcd {
            None => "",
            Some(member) if member.learner => "learner",
            Some(_) => "voter",
        };
        let leader = status.etcd.as_ref().map_or(0, |member| member.leader);
        Self {
            id: if answers { status.node_id } else { target.meant.to_string() },
            address: target.address.host.clone(),
            answers,
            cluster_state: status.cluster_state,
            ready: status.ready,
            uptime_seconds: answers.then_some(status.uptime_seconds),
            etcd,
            waits_for: status.waits_for,
            follows: if leader == 0 { String::new() } else { format!("{leader:x}") },
        }
    }

    fn row(&self) -> Vec<String> {
        let up = self.uptime_seconds.and_then(|up| Duration::try_from_secs_f64(up).ok());
        vec![
            self.id.clone(),
            if self.answers { "yes" } else { "no" }.to_owned(),
            or_dash(&self.cluster_state),
            or_dash(self.etcd),
            or_dash(&self.follows),
            or_dash(&up.map(units::span).unwrap_or_default()),
            or_dash(&self.address),
        ]
    }
}

impl View {
    fn of(nodes: Vec<Node>, why: &str) -> Self {
        let mut problems = vec![format!("no leader: {why}")];
        let silent = nodes.iter().filter(|node| !node.answers);
        problems.extend(silent.map(|node| {
            format!("{} does not answer at its last known address, {}", node.id, node.address)
        }));
        let leaderless = nodes.iter().filter(|node| !node.etcd.is_empty());
        problems.extend(
            leaderless
                .filter(|node| node.follows.is_empty())
                .map(|node| format!("the etcd member of {} knows no leader", node.id)),
        );
        let waiting = nodes.iter().filter(|node| !node.waits_for.is_empty());
        problems.extend(waiting.map(|node| format!("{}: {}", node.id, node.waits_for)));
        Self { healthy: false, source: "nodes", problems, leader: String::new(), nodes }
    }

    /// For a person: what it is, before what it says.
    pub(super) fn document(&self) -> Result<Document, Error> {
        let answering = self.nodes.iter().filter(|node| node.answers).count();
        let source = format!(
            "{answering} of {} nodes that this context knows; no leader confirms it",
            self.nodes.len()
        );
        let lines = [("source", source), ("state", self.problems.join("\n"))];
        let rows: Vec<_> = self.nodes.iter().map(Node::row).collect();
        let heads = ["NODE", "ANSWERS", "CLUSTER", "ETCD", "FOLLOWS", "UP FOR", "ADDRESS"];
        let text = Text::from(fields(&lines)).and("\n").then(table(&heads, &rows));
        Document::new(self, text)
    }
}

#[cfg(test)]
mod tests {
    use crate::loopback::{Cluster, LEADERLESS, NODE};
    use crate::testing::{World, closed_port};
    use polis_wire::rpc::testing::node_id;

    #[test]
    fn without_a_leader_the_state_is_put_together_from_the_nodes_that_answer() {
        let world = World::new();
        let cluster = Cluster::new(&world);
        let (_bound, dead) = closed_port();
        let (here, gone) = (node_id(NODE).to_string(), node_id(2).to_string());
        cluster.knows(&world, &[(&here, "192.0.2.1"), (&gone, &dead)]);
        cluster.lose_the_leader();
        let begun = std::time::Instant::now();
        let said = world.runs(&["cluster", "status"]);
        assert!(begun.elapsed().as_secs() < 12, "{:?}", begun.elapsed());
        assert!(
            said.starts_with("source  1 of 2 nodes that this context knows; no leader"),
            "{said}"
        );
        assert!(said.contains(&format!("{gone} does not answer")), "{said}");
        assert!(said.contains(&format!("{here}: {LEADERLESS}")), "{said}");
        assert_eq!(cluster.asked(), ["GetStatus"]);

        let json = world.runs(&["cluster", "status", "--output", "json"]);
        let value: serde_json::Value = serde_json::from_str(&json).unwrap();
        assert_eq!((&value["source"], &value["healthy"]), (&"nodes".into(), &false.into()));
        for node in value["nodes"].as_array().unwrap() {
            assert_eq!(node["answers"], node["id"] == *here, "{node}");
        }
    }

    #[test]
    fn without_a_leader_a_node_is_asked_at_its_last_known_address() {
        let world = World::new();
        let cluster = Cluster::new(&world);
        let here = node_id(NODE).to_string();
        cluster.knows(&world, &[(&here, "192.0.2.1")]);
        cluster.lose_the_leader();
        for wanted in [&*here, &here[6..12]] {
            let ended = world.run(&["node", "status", wanted]);
            assert_eq!(ended.status, 0, "{}", ended.stderr);
            assert!(ended.stdout.contains(&here), "{}", ended.stdout);
            let remark = "no leader was found; asking the node at its last known address";
            assert!(ended.stderr.contains(remark), "{}", ended.stderr);
            assert_eq!(cluster.asked(), ["GetStatus"]);
        }
    }

    #[test]
    fn without_any_answer_the_cause_stays() {
        let world = World::new();
        let cluster = Cluster::new(&world);
        cluster.lose_the_leader();
        let ended = world.run(&["cluster", "status", "--timeout", "2s"]);
        assert_eq!((ended.status, &*ended.stdout), (3, ""), "{}", ended.stderr);
        assert!(ended.stderr.contains("no leader was found"), "{}", ended.stderr);
        assert!(ended.stderr.contains("help: no node that this context"), "{}", ended.stderr);
    }
}
