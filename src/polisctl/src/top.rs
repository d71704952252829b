//! `polisctl top`: the load of the nodes, as each of them measures it for its own console; with
//! `--services` the load of their processes.
//!
//! A node reports the processor time of each process since it started, so two questions with a
//! pause between them say what each uses now.
//!
//! What this module does not do: distinguish the services that run in the node's own process.

use std::collections::BTreeMap;
use std::time::Duration;

use futures::future::join_all;
use polis_proto::v1;
use polis_proto::v1::node_management_client::NodeManagementClient;
use polis_tui::Snapshot;
use polis_tui::snapshot::Metrics;
use serde::Serialize;
use tokio::time::sleep;
use tonic::Response;

use super::Global;
use super::console::glance;
use super::error::{Error, Exit};
use super::node::targets;
use super::output::{Document, Text};
use super::session::{Session, Target, at_most, refused};
use super::table::table;
use super::watch::Watch;

/// How long one node may take; it answers at once.
const NODE: Duration = Duration::from_secs(5);

/// Arguments of `top`.
#[derive(Debug, clap::Args)]
pub(super) struct Arguments {
    /// Only this node [default: all].
    node: Option<String>,
    /// Show the processes instead: that of the node itself, in which most services run, and
    /// each program that a service runs; 100 % of CPU is one processor.
    #[arg(long)]
    services: bool,
    #[command(flatten)]
    watch: Watch,
}

/// The load of a node, as programs read it; `null` is not measured yet, or not known.
#[derive(Debug, Default, PartialEq, Serialize)]
struct Load {
    node: String,
    processors: Option<u32>,
    cpu_percent: Option<u8>,
    memory_used_bytes: Option<u64>,
    memory_bytes: Option<u64>,
    data_used_bytes: Option<u64>,
    data_bytes: Option<u64>,
    disk_read_bytes_per_second: Option<u64>,
    disk_written_bytes_per_second: Option<u64>,
    received_bytes_per_second: Option<u64>,
    sent_bytes_per_second: Option<u64>,
    /// Why it is not known.
    trouble: Option<String>,
}

/// Runs the command.
pub(super) async fn run(arguments: &Arguments, global: &Global) -> Result<(), Error> {
    let mut session = Session::brief(global).await?;
    if arguments.watch.is_on() {
        session.go_on();
    }
    let read = async || {
        let targets = match &arguments.node {
            Some(node) => vec![Box::pin(session.target(Some(node), None)).await?],
            None => Box::pin(targets(&session)).await?,
        };
        if arguments.services {
            return services(&session, &targets, global).await;
        }
        let asked = targets.iter().map(|target| at_most(NODE, glance(&session, target)));
        let (mut loads, mut troubles) = (Vec::new(), Vec::new());
        for (target, answer) in targets.iter().zip(join_all(asked).await) {
            let node = target.meant.to_string();
            match answer {
                Ok(snapshot) => loads.push(Load::of(node, &snapshot)),
                Err(error) => {
                    let (named, trouble) = (node.clone(), Some(error.summary()));
                    troubles.push((named, error));
                    loads.push(Load { node, trouble, ..Load::default() });
                }
            }
        }
        if troubles.len() == targets.len() {
            return Err(silent(&troubles));
        }
        document(&loads)
    };
    arguments.watch.run(global, read).await
}

impl Load {
    fn of(node: String, snapshot: &Snapshot) -> Self {
        let Some(metrics) = &snapshot.metrics else {
            let trouble = Some("the node has not measured its load yet".to_owned());
            return Self { node, trouble, ..Self::default() };
        };
        let newest = |samples: &[u64]| samples.last().copied();
        let Metrics { memory_total, memory_used, data_total, data_used, .. } = *metrics;
        let mounted = data_total > 0;
        Self {
            node,
            processors: Some(metrics.processors),
            cpu_percent: metrics.cpu.last().copied(),
            memory_used_bytes: Some(memory_used),
            memory_bytes: Some(memory_total),
            data_used_bytes: mounted.then_some(data_used),
            data_bytes: mounted.then_some(data_total),
            disk_read_bytes_per_second: newest(&metrics.disk_read),
            disk_written_bytes_per_second: newest(&metrics.disk_written),
            received_bytes_per_second: newest(&metrics.received),
            sent_bytes_per_second: newest(&metrics.sent),
            trouble: None,
        }
    }

    fn row(&self) -> Vec<String> {
        let dash = || "-".to_owned();
        let size = |bytes: Option<u64>| bytes.map_or_else(dash, polis_tui::bytes);
        let share = |used, total| match (used, total) {
            (Some(used), Some(total)) if total > 0 => {
                format!("{} of {}", polis_tui::bytes(used), polis_tui::bytes(total))
            }
            (_, _) => dash(),
        };
        let cpu = self.cpu_percent.map(|percent| format!("{percent} %"));
        vec![
            self.node.clone(),
            cpu.unwrap_or_else(dash),
            share(self.memory_used_bytes, self.memory_bytes),
            share(self.data_used_bytes, self.data_bytes),
            size(self.disk_read_bytes_per_second),
            size(self.disk_written_bytes_per_second),
            size(self.received_bytes_per_second),
            size(self.sent_bytes_per_second),
        ]
    }
}

fn document(loads: &[Load]) -> Result<Document, Error> {
    let head = ["NODE", "CPU", "MEMORY", "DATA", "READ/S", "WRITTEN/S", "IN/S", "OUT/S"];
    let rows: Vec<_> = loads.iter().map(Load::row).collect();
    let troubles = loads.iter().filter_map(|load| {
        load.trouble.as_ref().map(|trouble| format!("{}: {trouble}\n", load.node))
    });
    let text = Text::from(table(&head, &rows)).and(troubles.collect::<String>());
    Document::new(&loads, text)
}

/// No node has answered, each for its reason; without any, no node was asked.
pub(super) fn silent(troubles: &[(String, Error)]) -> Error {
    let reason = |(node, error): &(String, Error)| format!("{node}: {}", error.summary());
    let reasons = troubles.iter().map(reason).collect::<Vec<_>>().join("; ");
    let is_late = troubles.iter().all(|(_, error)| error.exit() == Exit::TimedOut);
    let error = match (troubles, is_late) {
        ([], _) => Error::new("no node of the cluster is up"),
        (_, true) => Error::timed_out(reasons).context("no node answers"),
        (_, false) => Error::new(reasons).context("no node answers"),
    };
    error.or_help("list the nodes and their states: `polisctl cluster status`")
}

/// The time that the use of the processor is measured over.
const SAMPLE: Duration = Duration::from_secs(1);

/// The resources that a process uses, as programs read them.
#[derive(Debug, PartialEq, Serialize)]
struct Process {
    node: String,
    /// The dotted name of its log.
    service: String,
    id: u32,
    /// Of one processor, so two of them together are 200; `null` for a process that has just
    /// started.
    cpu_percent: Option<f64>,
    /// The processor time since it started.
    cpu_seconds: f64,
    memory_bytes: u64,
}

/// The processes of the nodes, as programs read them.
#[derive(Debug, Serialize)]
struct Processes {
    /// Those that use most first.
    processes: Vec<Process>,
    /// The nodes that do not answer, and why.
    trouble: BTreeMap<String, String>,
}

async fn services(
    session: &Session,
    targets: &[Target],
    global: &Global,
) -> Result<Document, Error> {
    let ask = async || join_all(targets.iter().map(|target| listed(session, target))).await;
    let first = Box::pin(ask()).await;
    global.out.waiting("measuring for 1 s", sleep(SAMPLE)).await;
    let second = Box::pin(ask()).await;
    let mut all = Processes { processes: Vec::new(), trouble: BTreeMap::new() };
    let mut troubles = Vec::new();
    for (target, (first, second)) in targets.iter().zip(first.into_iter().zip(second)) {
        let node = target.meant.to_string();
        match (first, second) {
            (Ok(first), Ok(second)) => all.processes.extend(processes(&node, &first, &second)),
            (Err(error), _) | (_, Err(error)) => troubles.push((node, error)),
        }
    }
    if all.processes.is_empty() {
        return Err(silent(&troubles));
    }
    all.trouble = troubles.into_iter().map(|(node, error)| (node, error.summary())).collect();
    let use_of =
        |process: &Process| (process.cpu_percent.unwrap_or_default(), process.memory_bytes);
    all.processes.sort_by(|one, other| {
        let ((cpu, memory), (more_cpu, more_memory)) = (use_of(one), use_of(other));
        more_cpu.total_cmp(&cpu).then(more_memory.cmp(&memory))
    });
    all.document()
}

async fn listed(session: &Session, target: &Target) -> Result<v1::ServicesResponse, Error> {
    let answer = async {
        let mut client = NodeManagementClient::new(session.node(target).await?);
        let answer = client.services(v1::ServicesRequest {}).await;
        answer.map(Response::into_inner).map_err(|status| refused("list the processes", &status))
    };
    at_most(NODE, answer).await
}

/// The resources that each process used between two answers of its node.
fn processes(
    node: &str,
    first: &v1::ServicesResponse,
    second: &v1::ServicesResponse,
) -> Vec<Process> {
    let passed = second.uptime_seconds - first.uptime_seconds;
    let used = |now: &v1::services_response::Process| {
        let is_same = |before: &&v1::services_response::Process| {
            (before.id, &before.name) == (now.id, &now.name)
        };
        let before = first.processes.iter().find(is_same)?;
        let used = (now.cpu_seconds - before.cpu_seconds).max(0.0);
        // A node that was rebooted meanwhile has a younger clock.
        (passed > 0.0).then(|| (used / passed * 1000.0).round() / 10.0)
    };
    let process = |now: &v1::services_response::Process| Process {
        node: node.to_owned(),
        service: now.name.clone(),
        id: now.id,
        cpu_percent: used(now),
        cpu_seconds: now.cpu_seconds,
        memory_bytes: now.memory_bytes,
    };
    second.processes.iter().map(process).collect()
}

impl Processes {
    fn document(&self) -> Result<Document, Error> {
        let row = |process: &Process| {
            vec![
                process.node.clone(),
                process.service.clone(),
                process.id.to_string(),
                process.cpu_percent.map_or_else(|| "-".to_owned(), |cpu| format!("{cpu:.1} %")),
                polis_tui::bytes(process.memory_bytes),
            ]
        };
        let rows: Vec<_> = self.processes.iter().map(row).collect();
        let troubles = self.trouble.iter().map(|(node, trouble)| format!("{node}: {trouble}\n"));
        let text = Text::from(table(&["NODE", "SERVICE", "PROCESS", "CPU", "MEMORY"], &rows));
        Document::new(self, text.and(troubles.collect::<String>()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::loopback::{Cluster, NODE as SEED};
    use crate::testing::{World, closed_port};
    use polis_wire::rpc::testing::node_id;

    #[test]
    fn the_newest_sample_of_each_node_is_shown_and_a_dead_one_is_named() {
        let world = World::new();
        let cluster = Cluster::new(&world);
        let id = node_id(SEED).to_string();
        let json = world.runs(&["top", "-o", "json"]);
        let loads: serde_json::Value = serde_json::from_str(&json).unwrap();
        assert_eq!(loads[0]["node"], *id);
        assert_eq!(loads[0]["cpu_percent"], 12, "the newest, not the highest");
        assert_eq!(loads[0]["disk_read_bytes_per_second"], serde_json::Value::Null);
        let table = world.runs(&["top"]);
        assert!(table.contains("12 %") && table.contains(" of "), "{table}");
        // Without a leader the known nodes are asked; one of them is off.
        let (_bound, dead) = closed_port();
        let gone = node_id(2).to_string();
        cluster.knows(&world, &[(&id, "192.0.2.1"), (&gone, &dead)]);
        cluster.lose_the_leader();
        let table = world.runs(&["top", "--timeout", "6s"]);
        assert!(table.contains("12 %") && table.contains(&format!("{gone}: ")), "{table}");
    }

    #[test]
    fn the_processes_of_each_node_are_shown_by_use_and_a_dead_node_is_named() {
        let world = World::new();
        let cluster = Cluster::new(&world);
        let id = node_id(SEED).to_string();
        let json = world.runs(&["top", "--services", "-o", "json"]);
        let said: serde_json::Value = serde_json::from_str(&json).unwrap();
        let of = |at: usize, key: &str| said["processes"][at][key].clone();
        assert_eq!(
            (of(0, "service"), of(1, "service")),
            ("root.consensus.etcd".into(), "root".into())
        );
        assert_eq!((of(0, "cpu_percent"), of(1, "cpu_percent")), (50.0.into(), 25.0.into()));
        assert!(of(0, "cpu_seconds").is_f64(), "{said}");
        assert_eq!((of(0, "node"), of(1, "memory_bytes")), (id.clone().into(), (64 << 20).into()));
        let (_bound, dead) = closed_port();
        let gone = node_id(2).to_string();
        cluster.knows(&world, &[(&id, "192.0.2.1"), (&gone, &dead)]);
        cluster.lose_the_leader();
        let table = world.runs(&["top", "--services", "--timeout", "6s"]);
        assert!(table.contains("50.0 %") && table.contains(&format!("{gone}: ")), "{table}");
    }

    #[test]
    fn a_process_that_was_not_there_before_has_no_use_yet() {
        let process = |id, cpu_seconds| v1::services_response::Process {
            name: "root.etcd".to_owned(),
            id,
            cpu_seconds,
            memory_bytes: 7,
        };
        let at = |uptime_seconds, processes| v1::ServicesResponse {
            processes,
            uptime_seconds,
            ..Default::default()
        };
        let measured = |first, second| {
            let all = processes("n", &first, &second);
            all.into_iter().map(|process| process.cpu_percent).collect::<Vec<_>>()
        };
        let before = || at(10.0, vec![process(7, 1.0)]);
        // Two processors for two seconds.
        assert_eq!(measured(before(), at(12.0, vec![process(7, 5.0)])), [Some(200.0)]);
        assert_eq!(measured(before(), at(12.0, vec![process(8, 5.0)])), [None]);
        // Another boot.
        assert_eq!(measured(before(), at(3.0, vec![process(7, 0.5)])), [None]);
    }

    #[test]
    fn the_silence_of_all_nodes_has_its_cause_and_a_next_step() {
        let of = |node: &str, error| (node.to_owned(), error);
        let refuses = || of("polis-1", Error::new("it refuses"));
        let is_late = |node| of(node, Error::timed_out("no answer within 5.0 s"));
        let asked = silent(&[refuses()]).render();
        let said = "error: no node answers\ncause: polis-1: it refuses\nhelp: list the nodes";
        assert!(asked.starts_with(said), "{asked}");
        assert_eq!(silent(&[refuses(), is_late("polis-2")]).exit(), Exit::Failed);
        let waited = silent(&[is_late("polis-1"), is_late("polis-2")]);
        assert_eq!(waited.exit(), Exit::TimedOut);
        assert!(waited.render().contains("; polis-2: no answer within"), "{}", waited.render());
        let none = silent(&[]).render();
        assert!(none.starts_with("error: no node of the cluster is up\nhelp: list"), "{none}");
    }

    #[test]
    fn what_is_not_measured_is_a_dash() {
        let load = Load::of("polis-1".to_owned(), &Snapshot::default());
        assert!(load.row()[1..].iter().all(|cell| cell == "-"));
        assert!(load.trouble.is_some_and(|trouble| trouble.contains("not measured")));
    }
}
