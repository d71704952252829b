//! The load: nodes with heartbeats, watchers, and an operator who writes.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, Result};
use futures::StreamExt as _;
use polis_proto::v1;
use polis_proto::v1::curator_client::CuratorClient;
use polis_proto::v1::management_client::ManagementClient;
use polis_wire::rpc::client::Connection;
use serde::Serialize;
use tokio::time::{Instant, interval_at, sleep_until};

use super::{Callers, callers_at};

/// Between two heartbeats of a node, as the curator asks for.
const HEARTBEAT: Duration = polis_wire::node_roles::HEARTBEAT;

/// Between two changes that the watchers receive.
const CHANGE: Duration = Duration::from_millis(200);

/// Until all watchers have received all nodes and their first heartbeats.
const WARM_UP: Duration = Duration::from_secs(20);

/// Handshakes side by side.
const AT_ONCE: usize = 32;

/// The label whose value is the number of the change.
const LABEL: &str = "number";

/// The measurements, in milliseconds.
#[derive(Debug, Default, Serialize)]
struct Seen {
    heartbeats: Vec<f64>,
    /// From the operator's call to the event at a watcher.
    events: Vec<f64>,
    failed: u64,
}

#[derive(Clone, Debug, Default)]
struct Shared {
    seen: Arc<Mutex<Seen>>,
    changes: Arc<Mutex<BTreeMap<u64, Instant>>>,
}

impl Shared {
    fn seen(&self, what: impl FnOnce(&mut Seen)) {
        what(&mut self.seen.lock().unwrap_or_else(PoisonError::into_inner));
    }

    fn changed(&self, number: u64, at: Instant) {
        self.changes.lock().unwrap_or_else(PoisonError::into_inner).insert(number, at);
    }

    fn made(&self, number: u64) -> Option<Instant> {
        self.changes.lock().unwrap_or_else(PoisonError::into_inner).get(&number).copied()
    }
}

/// Sends requests for so long, and prints the measurements.
pub(super) async fn run(folder: &Path, watchers: usize, span: Duration) -> Result<()> {
    let text = std::fs::read(callers_at(folder)).context("cannot read the callers")?;
    let callers: Callers = serde_json::from_slice(&text).context("cannot read the callers")?;
    let connections = futures::stream::iter(&callers.nodes)
        .map(|caller| callers.connect(caller))
        .buffered(AT_ONCE)
        .collect::<Vec<_>>()
        .await;
    let connections = connections.into_iter().collect::<Result<Vec<_>>>()?;
    let operator = callers.connect(&callers.operator).await?;

    let shared = Shared::default();
    let begin = Instant::now();
    let measured = begin + WARM_UP;
    let end = measured + span;
    let count = u32::try_from(connections.len()).unwrap_or(u32::MAX);
    let beats = (0..).zip(&connections).map(|(at, connection)| {
        let first = begin + HEARTBEAT * at / count;
        beat(connection, shared.clone(), first, measured)
    });
    let watches =
        connections.iter().take(watchers).map(|connection| watch(connection, shared.clone()));
    let all = async {
        futures::join!(
            futures::future::join_all(beats),
            futures::future::join_all(watches),
            change(&operator, &callers.changed, shared.clone(), measured),
        )
    };
    let tell = async {
        sleep_until(measured).await;
        println!("measuring");
        sleep_until(end).await;
    };
    tokio::select! {
        // Cancel-safe: requests under way when time is up do not count.
        _ = all => {}
        // Cancel-safe: only waits.
        () = tell => {}
    }
    let seen = shared.seen.lock().unwrap_or_else(PoisonError::into_inner);
    println!("{}", serde_json::to_string(&*seen).context("cannot encode what was seen")?);
    Ok(())
}

async fn beat(connection: &Connection, shared: Shared, first: Instant, measured: Instant) {
    let mut curator = CuratorClient::new(connection.channel.clone());
    let mut ticks = interval_at(first, HEARTBEAT);
    loop {
        let at = ticks.tick().await;
        let answer = curator.heartbeat(v1::HeartbeatRequest::default()).await;
        if at >= measured {
            shared.seen(|seen| match answer {
                // From when it was due: a late client is a late answer.
                Ok(_) => seen.heartbeats.push(at.elapsed().as_secs_f64() * 1e3),
                Err(_) => seen.failed += 1,
            });
        }
    }
}

async fn watch(connection: &Connection, shared: Shared) {
    let mut curator = CuratorClient::new(connection.channel.clone());
    let Ok(stream) = curator.watch(v1::WatchRequest::default()).await else {
        return shared.seen(|seen| seen.failed += 1);
    };
    let mut stream = stream.into_inner();
    while let Ok(Some(event)) = stream.message().await {
        let now = Instant::now();
        let numbers = event.nodes.iter().filter_map(|node| node.labels.get(LABEL)?.parse().ok());
        for number in numbers {
            let Some(made) = shared.made(number) else { continue };
            shared.seen(|seen| seen.events.push((now - made).as_secs_f64() * 1e3));
        }
    }
    shared.seen(|seen| seen.failed += 1);
}

async fn change(operator: &Connection, node_id: &str, shared: Shared, measured: Instant) {
    let mut management = ManagementClient::new(operator.channel.clone());
    let mut ticks = interval_at(measured, CHANGE);
    for number in 1_u64.. {
        let at = ticks.tick().await;
        shared.changed(number, at);
        let request = v1::UpdateNodeLabelsRequest {
            node_id: node_id.to_owned(),
            set: [(LABEL.to_owned(), number.to_string())].into(),
            remove: Vec::new(),
        };
        if management.update_node_labels(request).await.is_err() {
            shared.seen(|seen| seen.failed += 1);
        }
    }
}
