//! `polisctl top`: the load of the nodes, as each of them measures it for its own console.
//!
//! What this module does not do: say which service uses how much. A node measures the
//! machine as a whole.

use std::time::Duration;

use futures::future::join_all;
use polis_tui::Snapshot;
use polis_tui::snapshot::Metrics;
use serde::Serialize;
use tokio::time::timeout;

use super::console::glance;
use super::error::Error;
use super::node::targets;
use super::output::{Document, Text};
use super::session::{Session, Target};
use super::table::table;
use super::watch::Watch;
use super::{Global, units};

/// How long one node may take; it answers at once.
const NODE: Duration = Duration::from_secs(5);

/// Arguments of `top`.
#[derive(Debug, clap::Args)]
pub(super) struct Arguments {
    /// Only this node [default: all].
    node: Option<String>,
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
        let loads = join_all(targets.iter().map(|target| load(&session, target))).await;
        if loads.iter().all(|load| load.trouble.is_some()) {
            let trouble = loads.into_iter().find_map(|load| load.trouble).unwrap_or_default();
            return Err(Error::new("no node answers").or_help(trouble));
        }
        document(&loads)
    };
    arguments.watch.run(global, read).await
}

async fn load(session: &Session, target: &Target) -> Load {
    let node = target.meant.to_string();
    // On the heap: several nodes are asked at once.
    let trouble = match timeout(NODE, Box::pin(glance(session, target))).await {
        Ok(Ok(snapshot)) => return Load::of(node, &snapshot),
        Ok(Err(error)) => error.summary(),
        Err(_elapsed) => format!("no answer within {}", units::span(NODE)),
    };
    Load { node, trouble: Some(trouble), ..Load::default() }
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
    fn what_is_not_measured_is_a_dash() {
        let load = Load::of("polis-1".to_owned(), &Snapshot::default());
        assert!(load.row()[1..].iter().all(|cell| cell == "-"));
        assert!(load.trouble.is_some_and(|trouble| trouble.contains("not measured")));
    }
}
