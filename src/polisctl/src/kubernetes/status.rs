//! `polisctl kubernetes status`: the parts of each controller and worker, the nodes, and the
//! pods that are not well.
//!
//! The leader knows which node has which role. Without one, as while etcd has no quorum, the
//! nodes that the context knows are asked, and each says which parts it runs.

use std::time::Duration;

use futures::future::join_all;
use serde_json::Value;
use tokio::time::timeout;

use super::pods::{Node, Unwell};
use super::{
    Branch, CONTROLLER, Member, Part, WORKER, controllers, parts, read, services, unready, workers,
};
use crate::Global;
use crate::error::{Error, Exit};
use crate::output::{Document, Text, fields, or_dash};
use crate::session::{Session, at_most};
use crate::table::table;
use crate::watch::Watch;

/// Pods in one answer, and answers that are read.
const PAGE: usize = 250;
const PAGES_MAX: usize = 40;

/// Longest that a node may take to name its parts, regardless of `--timeout`.
const ANSWER: Duration = Duration::from_secs(4);

/// The same for an API server, which itself waits ten seconds for its etcd.
const READINESS: Duration = Duration::from_secs(15);

/// Why a controller whose API server is silent is not ready.
const SILENT: &str = "its API server does not answer in time";

/// The state of Kubernetes, as programs read it.
#[derive(Debug, serde::Serialize)]
struct Status {
    /// The source of the status: `leader`, or `nodes` without a leader.
    source: &'static str,
    /// Why no leader could be asked.
    problems: Vec<String>,
    controllers: Vec<Served>,
    workers: Vec<Runs>,
    /// `null`: no API server is ready.
    nodes: Option<Vec<Node>>,
    /// `null`: no API server is ready.
    pods: Option<Pods>,
}

/// A controller, as programs read it.
#[derive(Debug, serde::Serialize)]
struct Served {
    node: String,
    /// Whether its API server serves users.
    ready: bool,
    /// Why it does not.
    cause: String,
    /// Empty if the node does not answer.
    parts: Vec<Part>,
}

/// A worker, as programs read it.
#[derive(Debug, serde::Serialize)]
struct Runs {
    node: String,
    /// Why it cannot carry the role.
    cause: String,
    /// Empty if the node does not answer.
    parts: Vec<Part>,
}

#[derive(Debug, Default, serde::Serialize)]
struct Pods {
    /// How many were looked at.
    seen: usize,
    /// Whether these are all.
    complete: bool,
    unwell: Vec<Unwell>,
}

/// Prints it.
pub(super) async fn run(watch: Watch, global: &Global) -> Result<(), Error> {
    let mut session = Session::brief(global).await?;
    if !watch.is_on() {
        session.limit_all(global);
    }
    let ask = async || {
        // Only these questions need a leader: an API server that is late says nothing about it.
        let members =
            async { Ok::<_, Error>((controllers(&session).await?, workers(&session).await?)) };
        let status = match Box::pin(members).await {
            Ok((controllers, workers)) => {
                Box::pin(Status::ask(&session, &controllers, workers)).await?
            }
            Err(error) if error.exit() == Exit::TimedOut => {
                Box::pin(Status::ask_nodes(&session, error)).await?
            }
            Err(error) => return Err(error),
        };
        let text = status.text();
        Document::new(&status, text)
    };
    watch.run(global, ask).await
}

/// The parts of a role; empty for a node that does not answer.
async fn parts_of(session: &Session, node: &Member, branch: &Branch) -> Vec<Part> {
    at_most(ANSWER, parts(session, node, branch)).await.unwrap_or_default()
}

fn items(list: &Value) -> impl Iterator<Item = &Value> {
    list["items"].as_array().into_iter().flatten()
}

async fn list_nodes(session: &Session, controller: &Member) -> Result<Vec<Node>, Error> {
    let list = read(session, controller, "/api/v1/nodes").await?;
    Ok(items(&list).map(Node::of).collect())
}

async fn list_pods(session: &Session, controller: &Member) -> Result<Pods, Error> {
    let mut pods = Pods::default();
    let mut next = String::new();
    for _page in 0..PAGES_MAX {
        let path = format!("/api/v1/pods?limit={PAGE}{next}");
        let list = read(session, controller, &path).await?;
        pods.seen += items(&list).count();
        pods.unwell.extend(items(&list).filter_map(Unwell::of));
        let token = list["metadata"]["continue"].as_str().unwrap_or_default();
        if token.is_empty() {
            pods.complete = true;
            break;
        }
        next = format!("&continue={}", escaped(token));
    }
    Ok(pods)
}

/// A value in the query of a path.
fn escaped(text: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    let byte = |byte: u8| match plain(byte) {
        true => char::from(byte).to_string(),
        false => format!("%{byte:02X}"),
    };
    text.bytes().map(byte).collect()
}

impl Status {
    /// The state of these controllers and workers, and what an API server has.
    async fn ask(session: &Session, nodes: &[Member], workers: Vec<Member>) -> Result<Self, Error> {
        let (mut controllers, mut serves) = (Vec::new(), None);
        for node in nodes {
            let cause = timeout(READINESS, unready(session, node)).await;
            let cause = cause.unwrap_or_else(|_elapsed| Ok(Some(SILENT.to_owned())))?;
            if cause.is_none() && serves.is_none() {
                serves = Some(node);
            }
            controllers.push(Served {
                node: node.id.clone(),
                ready: cause.is_none(),
                cause: cause.unwrap_or_default(),
                parts: parts_of(session, node, &CONTROLLER).await,
            });
        }
        let mut running = Vec::new();
        for node in workers {
            let parts = parts_of(session, &node, &WORKER).await;
            running.push(Runs { node: node.id, cause: node.fault, parts });
        }
        let workers = running;
        let (source, problems) = ("leader", Vec::new());
        Ok(match serves {
            None => Self { source, problems, controllers, workers, nodes: None, pods: None },
            Some(serves) => Self {
                source,
                problems,
                controllers,
                workers,
                nodes: Some(list_nodes(session, serves).await?),
                pods: Some(list_pods(session, serves).await?),
            },
        })
    }

    /// The same without a leader; `why` none could be asked. That is the answer where no node
    /// answers either.
    async fn ask_nodes(session: &Session, why: Error) -> Result<Self, Error> {
        let known = session.known_nodes();
        let asked = known.iter().map(|target| at_most(ANSWER, services(session, target)));
        let answers = join_all(asked).await;
        let answers = known.iter().zip(answers).filter_map(|(target, answer)| {
            let id = target.meant.to_string();
            let member = Member { id, target: target.clone(), fault: String::new() };
            Some((member, answer.ok()?))
        });
        let answers: Vec<_> = answers.collect();
        if answers.is_empty() {
            return Err(why);
        }
        let mut problems = vec![format!("no leader: {}", why.summary())];
        let silent = known
            .iter()
            .filter(|target| answers.iter().all(|(member, _)| member.target != **target));
        problems.extend(silent.map(|target| format!("{} does not answer", target.meant)));
        let (mut controllers, mut workers) = (Vec::new(), Vec::new());
        for (member, services) in answers {
            let runs = |branch: &Branch| {
                services.iter().any(|service| service.name.starts_with(branch.path))
            };
            if runs(&CONTROLLER) {
                let serves = timeout(READINESS, unready(session, &member)).await;
                let cause = match serves {
                    Ok(Ok(cause)) => cause,
                    Ok(Err(error)) => Some(error.summary()),
                    Err(_elapsed) => {
                        Some(format!("{SILENT}: without a quorum, etcd does not either"))
                    }
                };
                controllers.push(Served {
                    node: member.id.clone(),
                    ready: cause.is_none(),
                    cause: cause.unwrap_or_default(),
                    parts: CONTROLLER.parts(services.clone()),
                });
            }
            if runs(&WORKER) {
                let parts = WORKER.parts(services);
                workers.push(Runs { node: member.id, cause: String::new(), parts });
            }
        }
        Ok(Self { source: "nodes", problems, controllers, workers, nodes: None, pods: None })
    }

    fn text(&self) -> Text {
        let mut rows = Vec::new();
        for controller in &self.controllers {
            let whole = if controller.ready { "ready" } else { "not ready" };
            let cells = [&controller.node, "all", whole, "-", &*or_dash(&controller.cause)];
            rows.push(cells.map(str::to_owned).to_vec());
            rows.extend(controller.parts.iter().map(|part| part.row(&controller.node)));
        }
        let heads = ["CONTROLLER", "PART", "STATE", "RESTARTS", "CAUSE"];
        let text = match self.problems.is_empty() {
            true => Text::default(),
            false => {
                let source = "the nodes that answer; no leader confirms it".to_owned();
                let lines = [("source", source), ("state", self.problems.join("\n"))];
                Text::from(fields(&lines)).and("\n")
            }
        };
        let text = text.then(table(&heads, &rows));
        let text = match self.workers.is_empty() {
            true => text,
            false => {
                let rows: Vec<_> = self.workers.iter().flat_map(Runs::rows).collect();
                let heads = ["WORKER", "PART", "STATE", "RESTARTS", "CAUSE"];
                text.and("\n").then(table(&heads, &rows))
            }
        };
        let Some(nodes) = &self.nodes else {
            let serves = self.controllers.iter().any(|controller| controller.ready);
            return text.and(match serves {
                true => "\nWithout a leader, nodes and pods are left to `kubectl`.\n",
                false => "\nNo API server is ready: nodes and pods are not known.\n",
            });
        };
        let text = match nodes.is_empty() {
            true => text.and("\nThe cluster has no nodes for pods.\n"),
            false => {
                let rows: Vec<_> = nodes.iter().map(Node::row).collect();
                text.and("\n").then(table(&Node::HEADS, &rows))
            }
        };
        let Some(pods) = &self.pods else { return text };
        let seen = match pods.complete {
            true => format!("Pods: {}", pods.seen),
            false => format!("Pods: the first {}", pods.seen),
        };
        if pods.unwell.is_empty() {
            return text.and(format!("\n{seen}, all of them well\n"));
        }
        let rows: Vec<_> = pods.unwell.iter().map(Unwell::row).collect();
        text.and(format!("\n{seen}, {} of them not well:\n", rows.len()))
            .then(table(&Unwell::HEADS, &rows))
    }
}

impl Runs {
    /// Its parts; of a node that cannot carry the role, or does not answer, one row.
    fn rows(&self) -> Vec<Vec<String>> {
        let none = || {
            let state = if self.cause.is_empty() { "no answer" } else { "unfit" };
            let cells = [&self.node, "all", state, "-", &*or_dash(&self.cause)];
            vec![cells.map(str::to_owned).to_vec()]
        };
        match self.parts.is_empty() {
            true => none(),
            false => self.parts.iter().map(|part| part.row(&self.node)).collect(),
        }
    }
}

impl Part {
    fn row(&self, node: &str) -> Vec<String> {
        let restarts = self.restarts.to_string();
        let cells = [node, &self.name, &self.state, &restarts, &*or_dash(&self.cause)];
        cells.map(str::to_owned).to_vec()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::loopback::{Cluster, NODE};
    use crate::testing::{World, closed_port};
    use polis_wire::rpc::testing::node_id;

    #[test]
    fn the_state_is_one_page_for_people_and_one_document_for_programs() {
        let world = World::new();
        let mut cluster = Cluster::new(&world);
        cluster.has_controller(&world);
        let printed = world.runs(&["kubernetes", "status"]);
        insta::assert_snapshot!(printed.replace(&node_id(NODE).to_string(), "polis-1"), @r"
        CONTROLLER                              PART          STATE    RESTARTS  CAUSE
        polis-1  all           ready    -         -
        polis-1  certificates  healthy  0         -
        polis-1  apiserver     healthy  0         -
        polis-1  access        healthy  0         -

        NODE     READY  VERSION  WHY
        polis-1  no     v1.37.2  KubeletNotReady: no network

        Pods: 3, 1 of them not well:
        NAMESPACE  POD   NODE     STATE             WHY
        shop       cart  polis-1  CrashLoopBackOff  container main: ended with 2 (Error)
        ");
        let json = world.runs(&["kubernetes", "status", "--output", "json"]);
        let value: Value = serde_json::from_str(&json).unwrap();
        assert_eq!(value["controllers"][0]["ready"], true);
        assert_eq!(value["nodes"][0]["ready"], false);
        assert_eq!(value["pods"]["unwell"][0]["state"], "CrashLoopBackOff");
        assert_eq!((&value["pods"]["seen"], &value["pods"]["complete"]), (&3.into(), &true.into()));
    }

    #[test]
    fn a_part_of_a_worker_that_ends_again_and_again_shows_its_last_words() {
        let world = World::new();
        let mut cluster = Cluster::new(&world);
        cluster.has_controller(&world);
        cluster.has_worker_with_a_crash_loop();
        let printed = world.runs(&["kubernetes", "status"]);
        let printed = printed.replace(&node_id(NODE).to_string(), "polis-1");
        let workers = printed.split("\n\n").nth(1).unwrap();
        insta::assert_snapshot!(workers, @r"
        WORKER                                  PART        STATE    RESTARTS  CAUSE
        polis-1  containerd  healthy  0         -
        polis-1  kubelet     dead     7         kubelet ended with status 1: no swap
        ");
        let json = world.runs(&["kubernetes", "status", "--output", "json"]);
        let value: Value = serde_json::from_str(&json).unwrap();
        let kubelet = &value["workers"][0]["parts"][1];
        assert_eq!((&kubelet["name"], &kubelet["restarts"]), (&"kubelet".into(), &7.into()));
    }

    #[test]
    fn without_a_leader_the_nodes_that_answer_tell_of_their_parts() {
        let world = World::new();
        let mut cluster = Cluster::new(&world);
        cluster.has_controller(&world);
        cluster.has_worker_with_a_crash_loop();
        cluster.api_server_starts();
        let (_bound, dead) = closed_port();
        let (here, gone) = (node_id(NODE).to_string(), node_id(2).to_string());
        cluster.knows(&world, &[(&here, "192.0.2.1"), (&gone, &dead)]);
        cluster.lose_the_leader();
        let printed = world.runs(&["kubernetes", "status"]);
        assert!(printed.starts_with("source  the nodes that answer; no leader"), "{printed}");
        assert!(printed.contains(&format!("{gone} does not answer")), "{printed}");
        assert!(printed.contains("waits for apiserver, which is starting: no quorum"), "{printed}");
        assert!(printed.contains("kubelet ended with status 1: no swap"), "{printed}");
        let json = world.runs(&["kubernetes", "status", "--output", "json"]);
        let value: Value = serde_json::from_str(&json).unwrap();
        assert_eq!((&value["source"], &value["nodes"]), (&"nodes".into(), &Value::Null));
        for role in ["controllers", "workers"] {
            assert_eq!(value[role][0]["node"], *here, "{value}");
        }
    }

    #[test]
    fn a_token_is_escaped_in_a_query() {
        assert_eq!(escaped("aB0-_."), "aB0-_.");
        assert_eq!(escaped("a=b&c d"), "a%3Db%26c%20d");
    }
}
