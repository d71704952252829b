//! `polisctl events`: what has happened in the cluster, as a list with times.
//!
//! An event is a line of a node's log with the field `event`, which names it: a node
//! registered, joined, left, led, failed. The logs are the record: they are on the disk of
//! each node, by boot, so this needs no store of its own, and no leader.
//!
//! ```text
//! each node: log of this boot, and of earlier ones --field `event`--> merge by wall clock
//! ```
//!
//! What this module does not do: order events of two nodes whose clocks differ.

use std::time::Duration;

use futures::future::join_all;
use polis_proto::v1;
use polis_proto::v1::logs_response::Entry;
use polis_proto::v1::node_management_client::NodeManagementClient;
use serde::Serialize;
use tokio::time::timeout;
use tonic::Code;

use super::error::Error;
use super::node::targets;
use super::output::{Document, Text, or_dash};
use super::session::{Session, Target, at_most, refused};
use super::table::table;
use super::top::silent;
use super::{Global, units};

/// The field of a log line that makes it an event.
const FIELD: &str = "event";

/// How long one node may take for the log of one boot.
const NODE: Duration = Duration::from_secs(10);

/// Arguments of `events`.
#[derive(Debug, clap::Args)]
pub(super) struct Arguments {
    /// Only events of this time until now, such as 2h, by the clocks of the nodes.
    #[arg(long, value_name = "DURATION", value_parser = units::duration)]
    since: Option<Duration>,
    /// How many boots before this one to read, too.
    #[arg(long, default_value_t = 1, value_name = "N",
          value_parser = clap::value_parser!(u8).range(0..=16))]
    boots: u8,
}

/// An event, as programs read it.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct Event {
    /// RFC 3339; `null`: the node had no clock.
    time: Option<units::Time>,
    event: String,
    /// The node that it happened to.
    node: String,
    /// The node whose log has it.
    seen_by: String,
    message: String,
    #[serde(skip)]
    nanos: i64,
}

/// Runs the command.
pub(super) async fn run(arguments: &Arguments, global: &Global) -> Result<(), Error> {
    let session = Session::brief(global).await?;
    let targets = Box::pin(targets(&session)).await?;
    let progress = global.out.progress();
    let plural = if targets.len() == 1 { "" } else { "s" };
    progress.says(&format!("reading the log of {} node{plural}", targets.len()));
    let read = targets.iter().map(|target| read(&session, target, arguments.boots));
    let read = join_all(read).await;
    drop(progress);
    let (mut events, mut missing, mut troubles) = (Vec::new(), Vec::new(), Vec::new());
    for (target, (found, failure)) in targets.iter().zip(read) {
        if let Some(error) = failure {
            let which = if found.is_empty() { "no" } else { "not all" };
            missing.push(format!("{which} events of {}: {}", target.meant, error.summary()));
            troubles.push((target.meant.to_string(), error));
        }
        events.extend(found);
    }
    if events.is_empty() && troubles.len() == targets.len() {
        return Err(silent(&troubles));
    }
    let now = units::since_1970_nanos(polis_base::sys::clock::now());
    // Only a leader knows the names.
    let nodes = session.nodes(&[]).await.unwrap_or_default();
    print(in_order(events, arguments.since, now), &missing, &nodes, global)
}

fn print(
    events: Vec<Event>,
    missing: &[String],
    nodes: &[v1::NodeInfo],
    global: &Global,
) -> Result<(), Error> {
    for line in missing {
        global.out.remark(line);
    }
    let named = |id: &str| {
        let known = nodes.iter().find(|node| node.id == id && !node.name.is_empty());
        known.map_or_else(|| id.to_owned(), |node| node.name.clone())
    };
    let row = |event: &Event| {
        vec![
            units::text(event.time),
            event.event.clone(),
            or_dash(&named(&event.node)),
            event.message.clone(),
            named(&event.seen_by),
        ]
    };
    let rows: Vec<_> = events.iter().map(row).collect();
    let head = ["TIME", "EVENT", "NODE", "WHAT", "SEEN BY"];
    global.out.print(&Document::new(&events, Text::from(table(&head, &rows)))?)
}

/// The events since then, the oldest first.
fn in_order(mut events: Vec<Event>, since: Option<Duration>, now: i64) -> Vec<Event> {
    if let Some(since) = since {
        let since = i64::try_from(since.as_nanos()).unwrap_or(i64::MAX);
        events.retain(|event| event.nanos >= now.saturating_sub(since));
    }
    events.sort_by(|a, b| (a.nanos, &a.seen_by).cmp(&(b.nanos, &b.seen_by)));
    events
}

/// The events of a node, and why there are not all.
async fn read(session: &Session, target: &Target, boots: u8) -> (Vec<Event>, Option<Error>) {
    let mut events = Vec::new();
    let channel = match at_most(NODE, session.node(target)).await {
        Ok(channel) => channel,
        Err(error) => return (events, Some(error)),
    };
    let own = target.meant.to_string();
    for boot in 0..=i32::from(boots) {
        let request = v1::LogsRequest {
            children: true,
            minimum: v1::Severity::Info.into(),
            raw: v1::logs_request::Raw::None.into(),
            backlog: -1,
            boot: -boot,
            ..Default::default()
        };
        let log = async {
            let mut client = NodeManagementClient::new(channel.clone());
            let mut stream = client.logs(request).await?.into_inner();
            while let Some(answer) = stream.message().await? {
                events.extend(answer.entries.iter().filter_map(|entry| event(entry, &own)));
            }
            Ok::<_, tonic::Status>(())
        };
        match timeout(NODE, Box::pin(log)).await {
            Ok(Ok(())) => {}
            // Fewer boots than that are kept.
            Ok(Err(status)) if boot > 0 && status.code() == Code::NotFound => break,
            Ok(Err(status)) => return (events, Some(refused("read the log", &status))),
            Err(_elapsed) => {
                let text = format!("not whole within {}", units::span(NODE));
                return (events, Some(Error::timed_out(text)));
            }
        }
    }
    (events, None)
}

fn event(entry: &Entry, own: &str) -> Option<Event> {
    let event = entry.fields.get(FIELD)?.clone();
    Some(Event {
        time: units::nanos_since_1970(entry.time_unix_nanos).map(units::Time),
        event,
        node: entry.fields.get("node").cloned().unwrap_or_else(|| own.to_owned()),
        seen_by: own.to_owned(),
        message: entry.message.clone(),
        nanos: entry.time_unix_nanos,
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::loopback::{Cluster, NODE as SEED};
    use crate::testing::World;
    use polis_wire::rpc::testing::node_id;

    fn entry(nanos: i64, fields: &[(&str, &str)]) -> Entry {
        let fields = fields.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
        Entry {
            message: "it happened".to_owned(),
            time_unix_nanos: nanos,
            fields: fields.collect::<BTreeMap<_, _>>(),
            ..Entry::default()
        }
    }

    #[test]
    fn events_of_several_nodes_are_in_the_order_of_their_times() {
        assert_eq!(event(&entry(1, &[("node", "polis-2")]), "polis-1"), None, "not an event");
        let of = |nanos, by| event(&entry(nanos, &[("event", "leads")]), by).unwrap();
        let second = 1_000_000_000;
        let events = vec![of(9 * second, "b"), of(3 * second, "a"), of(5 * second, "b")];
        let times = |events: Vec<Event>| {
            events.into_iter().map(|event| event.nanos / second).collect::<Vec<_>>()
        };
        assert_eq!(times(in_order(events.clone(), None, 10 * second)), [3, 5, 9]);
        let recent = in_order(events, Some(Duration::from_secs(5)), 10 * second);
        assert_eq!(times(recent), [5, 9]);
        // Without a node of its own, it happened to the node that logged it.
        assert_eq!(of(1, "polis-1").node, "polis-1");
        let other = event(&entry(1, &[("event", "failed"), ("node", "polis-2")]), "polis-1");
        assert_eq!(other.unwrap().node, "polis-2");
    }

    /// The events that the log macros of a source have as their first field, on the line of the
    /// macro or below it.
    fn logged(source: &str) -> impl Iterator<Item = String> {
        let macros = ["error!(", "warn!(", "info!("];
        let starts = macros.into_iter().flat_map(move |begin| source.split(begin).skip(1));
        starts.filter_map(|fields| {
            let event = fields.trim_start().strip_prefix("event = \"")?;
            Some(event.split('"').next()?.to_owned())
        })
    }

    #[test]
    fn an_event_is_found_on_any_line_of_its_macro() {
        let source = "info!(event = \"a\", \"x\");\nwarn!(\n    event = \"b\",\n);\n\
                      error!(\n\tevent = \"c\"); info!(other = 1, \"event = \")";
        let mut found: Vec<_> = logged(source).collect();
        found.sort();
        assert_eq!(found, ["a", "b", "c"]);
    }

    #[test]
    fn the_manual_has_every_event_that_a_node_logs() {
        fn events(folder: &std::path::Path, found: &mut std::collections::BTreeSet<String>) {
            for entry in std::fs::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() {
                    events(&path, found);
                    continue;
                }
                found.extend(logged(&std::fs::read_to_string(&path).unwrap()));
            }
        }
        let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let mut found = std::collections::BTreeSet::new();
        for service in ["machine", "control", "workload", "node"] {
            events(&root.join("src").join(service).join("src"), &mut found);
        }
        // Changes of a node are events, as are its ways in and out.
        for event in [
            "joined", "left", "roles", "labels", "taints", "named", "votes", "voted", "copied",
            "rotated",
        ] {
            assert!(found.contains(event), "no line is the event {event}: {found:?}");
        }
        let manual = std::fs::read_to_string(root.join("docs/logs.md")).unwrap();
        for event in found {
            assert!(manual.contains(&format!("`{event}`")), "docs/logs.md lacks {event}");
        }
    }

    #[test]
    fn every_node_is_asked_and_one_that_is_dead_is_named() {
        let world = World::new();
        let cluster = Cluster::new(&world);
        let id = node_id(SEED).to_string();
        let json = world.runs(&["events", "-o", "json"]);
        let events: serde_json::Value = serde_json::from_str(&json).unwrap();
        assert_eq!(events[0]["event"], "ready");
        assert_eq!(events[0]["seen_by"], *id);
        assert!(world.runs(&["events", "--since", "1m"]).lines().count() <= 1, "years ago");
        // A boot whose log cannot be read is not one that is no longer kept.
        let ended = world.run(&["events", "--boots", "2", "-o", "json"]);
        assert_eq!(ended.status, 0, "{}", ended.stderr);
        let said = format!("not all events of {id}: cannot read the log: the logs of earlier");
        assert!(ended.stderr.contains(&said), "{}", ended.stderr);
        let events: serde_json::Value = serde_json::from_str(&ended.stdout).unwrap();
        assert_eq!(events.as_array().unwrap().len(), 2);
        drop(cluster);
    }
}
