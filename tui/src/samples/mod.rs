//! The samples: snapshots that tests and galleries draw.

mod busy;
mod crowd;
mod date;
mod failing;
mod guru;
mod ordinary;
mod overflowing;
#[cfg(test)]
mod tests;
mod worker;
pub(crate) mod workloads;

use std::sync::Arc;
use std::time::Duration;

pub use self::busy::busy;
pub use self::crowd::crowd;
pub use self::failing::failing;
pub use self::guru::{guru, guru_in_maintenance, guru_locked, guru_overflowing, guru_wide};
pub use self::ordinary::ordinary;
pub use self::overflowing::overflowing;
pub use self::worker::worker;

use crate::snapshot::{
    Address, Certificate, Cluster, Header, Interface, LogEntry, Logs, Member, MemberStatus,
    Metrics, Network, Service, ServiceState, Severity, Snapshot, Stage, StageState,
};

/// Three nodes of one cluster; the first is the one whose console this is.
const NODES: [&str; 3] = [
    "polis-8e9e05c52164694d3f1a77c0b2d95e06",
    "polis-0b7d3a9915c04e218f6610aa3c5d7e94",
    "polis-5c2e90b1f7d84a6399d01b8e4f3a2c75",
];

/// Each of them by name, with its content.
#[must_use]
pub fn all() -> [(&'static str, Snapshot); 9] {
    [
        ("empty", empty()),
        ("booting", booting()),
        ("registering", registering()),
        ("ordinary", ordinary()),
        ("worker", worker()),
        ("busy", busy()),
        ("failing", failing()),
        ("overflowing", overflowing()),
        ("crowd", crowd()),
    ]
}

/// A machine of which nothing is known yet.
#[must_use]
pub fn empty() -> Snapshot {
    Snapshot {
        header: Header {
            version: "0.1.0".to_owned(),
            slot: "A".to_owned(),
            uptime: Duration::from_millis(310),
            clock: date::NOW.to_owned(),
            ..Header::default()
        },
        ..Snapshot::default()
    }
}

/// A machine that waits for its network, after a boot that failed.
#[must_use]
pub fn booting() -> Snapshot {
    let waiting = "a DHCP lease on eth0; is the cable in, and is there a DHCP server?";
    let mut snapshot = empty();
    snapshot.header.uptime = Duration::from_millis(15_880);
    snapshot.previous_failure = Some(
        "#0803.0000 etcd ended with status 2: its database is damaged: invalid page type (image 5d41402abc4b2a76)"
            .to_owned(),
    );
    snapshot.stages = vec![
        stage("kernel", StageState::Done, 0, 910),
        stage("initramfs", StageState::Done, 910, 640),
        stage("system", StageState::Done, 1_550, 1_120),
        stage("storage", StageState::Started, 2_700, 13_180),
        stage(
            "network",
            StageState::Waiting { what: waiting.to_owned(), since: Duration::from_millis(12_040) },
            2_680,
            13_200,
        ),
        stage("parameters", StageState::Done, 2_690, 40),
    ];
    snapshot.stages.extend(
        ["cluster", "consensus", "curator", "roles"]
            .map(|name| stage(name, StageState::Pending, 0, 0)),
    );
    snapshot.network = Network {
        interfaces: vec![
            interface("eth0", "52:54:00:12:34:56", true, &[]),
            Interface { driver: None, ..interface("enp0s20f0u1", "00:e0:4c:68:0a:11", false, &[]) },
        ],
        waiting: Some(waiting.to_owned()),
        ..Network::default()
    };
    snapshot.services = ["root", "storage", "network", "names", "parameters", "console"]
        .map(|name| Service {
            since: Duration::from_millis(13_100),
            ..service(u16::from(name != "root"), name)
        })
        .into();
    snapshot.services[1].state = ServiceState::Starting;
    snapshot.metrics = Some(Metrics {
        pace: Duration::from_secs(2),
        processors: 4,
        cpu: vec![38, 22, 8, 7, 4, 3],
        memory: vec![6, 7, 8, 8, 8, 8],
        memory_total: 2 << 30,
        memory_used: 172 << 20,
        disk_read: vec![61 << 20, 20 << 20, 0, 0, 0, 0],
        disk_written: vec![0, 0, 48 << 20, 190 << 20, 188 << 20, 191 << 20],
        received: vec![0; 6],
        sent: vec![342; 6],
        ..Metrics::default()
    });
    snapshot.logs = logs(&[
        (1_551, Severity::Info, "root", "Polis 0.1.0, slot A, image 5d41402abc4b2a76"),
        (2_702, Severity::Info, "root.storage", "making the data partition on /dev/vda, 7.4 GiB"),
        (3_800, Severity::Info, "root.network", "eth0 is up, asks for an address"),
        (
            12_300,
            Severity::Warning,
            "root.network",
            "eth0: no answer to DHCPDISCOVER after 5 attempts; the next one is in 16 s, and the link has been up for 9.1 s",
        ),
    ]);
    snapshot
}

/// A machine that waits for approval by a cluster.
#[must_use]
pub fn registering() -> Snapshot {
    let [node, words] = [NODES[1], "saddle-bright-canyon-oyster"];
    let waiting = format!(
        "an operator who approves this node: its fingerprint is {words}; compare it with that of \
         `polisctl node approve {node}`"
    );
    let mut snapshot = booting();
    snapshot.previous_failure = None;
    snapshot.header = Header {
        node: Some(node.to_owned()),
        words: Some(words.to_owned()),
        cluster: Cluster::Foreign,
        address: Some("10.0.2.16".to_owned()),
        ..snapshot.header
    };
    for done in &mut snapshot.stages[3..6] {
        *done = stage(&done.name, StageState::Done, 2_700, 1_420);
    }
    let since = Duration::from_secs(246);
    snapshot.stages[6] =
        stage("cluster", StageState::Waiting { what: waiting, since }, 2_690, 248_310);
    let address = [("10.0.2.16/24", "DHCP", Some(42_900))];
    snapshot.network = Network {
        interfaces: vec![interface("eth0", "52:54:00:12:34:57", true, &address)],
        gateway: Some("10.0.2.2".to_owned()),
        nameservers: vec!["10.0.2.3".to_owned()],
        ..Network::default()
    };
    snapshot.services[1].state = ServiceState::Healthy;
    snapshot.metrics = Some(Metrics {
        pace: Duration::from_secs(2),
        processors: 4,
        cpu: percents(1, 6, 1),
        memory: percents(9, 10, 2),
        memory_total: 2 << 30,
        memory_used: 215 << 20,
        disk_read: wave(0, 4 << 10, 5),
        disk_written: wave(0, 90 << 10, 6),
        received: wave(0, 3 << 10, 3),
        sent: wave(0, 2 << 10, 4),
        data_total: 7_942 << 20,
        data_used: 88 << 20,
        data_unwritten: 0,
    });
    restarted(&mut snapshot, 251);
    snapshot.logs = logs(&[
        (1_551, Severity::Info, "root", "Polis 0.1.0, slot A, image 5d41402abc4b2a76"),
        (4_120, Severity::Info, "root.network", "eth0 has 10.0.2.16/24 by DHCP for 43200 s"),
        (4_730, Severity::Info, "root.cluster", "this machine registers with a cluster"),
        (
            5_010,
            Severity::Info,
            "root.cluster",
            "waiting for an operator's approval fingerprint=saddle-bright-canyon-oyster",
        ),
    ]);
    snapshot
}

fn stage(name: &str, state: StageState, started: u64, elapsed: u64) -> Stage {
    let [started, elapsed] = [started, elapsed].map(Duration::from_millis);
    Stage { name: name.to_owned(), state, started, elapsed }
}

fn interface(
    name: &str,
    mac: &str,
    carrier: bool,
    addresses: &[(&str, &str, Option<u64>)],
) -> Interface {
    let address = |&(cidr, source, lease): &(&str, &str, Option<u64>)| Address {
        cidr: cidr.to_owned(),
        source: source.to_owned(),
        primary: true,
        lease: lease.map(Duration::from_secs),
    };
    Interface {
        name: name.to_owned(),
        mac: mac.to_owned(),
        driver: Some("virtio_net".to_owned()),
        carrier,
        asking: true,
        addresses: addresses.iter().map(address).collect(),
        ..Interface::default()
    }
}

fn member(name: &str, id: u64) -> Member {
    Member {
        name: name.to_owned(),
        id,
        url: format!("https://{name}:7834"),
        standing: MemberStatus::Voter,
        answers: Some(true),
        ..Member::default()
    }
}

/// A certificate that was made `age` days ago for `life` days.
fn certificate(name: &str, issuer: &str, age: i64, life: i64) -> Certificate {
    Certificate {
        name: name.to_owned(),
        issuer: issuer.to_owned(),
        ends: date::day(life - age),
        days_left: life - age,
        renews: Some(date::day(2 * life / 3 - age)),
        when_used: false,
        renew_at: 66,
        used: used(age, life),
        revoked: false,
    }
}

/// The share of a life that is over, in percent.
fn used(age: i64, life: i64) -> u8 {
    u8::try_from((100 * age / life).clamp(0, 100)).unwrap_or(100)
}

/// The service that is called `name`.
fn service_of<'a>(snapshot: &'a mut Snapshot, name: &str) -> Option<&'a mut Service> {
    snapshot.services.iter_mut().find(|service| service.name == name)
}

/// The machine was started `uptime` seconds ago: everything older is gone.
fn restarted(snapshot: &mut Snapshot, uptime: u64) {
    snapshot.header.uptime = Duration::from_secs(uptime);
    for service in &mut snapshot.services {
        service.since = Duration::from_secs(uptime.saturating_sub(9));
    }
    let logs = Arc::make_mut(&mut snapshot.logs);
    logs.entries.retain(|entry| entry.time < snapshot.header.uptime);
    // The rest follows later.
    logs.total = logs.entries.len() as u64;
    if let Some(metrics) = &mut snapshot.metrics {
        let samples = usize::try_from(uptime / metrics.pace.as_secs().max(1)).unwrap_or(0);
        for percents in [&mut metrics.cpu, &mut metrics.memory] {
            percents.drain(..percents.len().saturating_sub(samples));
        }
        let Metrics { disk_read, disk_written, received, sent, .. } = metrics;
        for flow in [disk_read, disk_written, received, sent] {
            flow.drain(..flow.len().saturating_sub(samples));
        }
    }
}

fn service(depth: u16, name: &str) -> Service {
    Service { depth, name: name.to_owned(), state: ServiceState::Healthy, ..Service::default() }
}

fn logs(entries: &[(u64, Severity, &str, &str)]) -> Arc<Logs> {
    let mut logs = Arc::default();
    say(&mut logs, entries);
    logs
}

/// Appends entries to a log.
fn say(logs: &mut Arc<Logs>, entries: &[(u64, Severity, &str, &str)]) {
    let logs = Arc::make_mut(logs);
    for &(millis, severity, name, text) in entries {
        logs.entries.push(Arc::new(LogEntry {
            number: logs.total,
            time: Duration::from_millis(millis),
            severity,
            name: name.to_owned(),
            text: text.to_owned(),
            ..LogEntry::default()
        }));
        logs.total += 1;
    }
}

/// Samples that go up and down between `low` and `high`, with a peak now and then.
fn wave(low: u64, high: u64, seed: u64) -> Vec<u64> {
    const SAMPLES: u64 = 120;
    let range = high - low;
    let sample = |at: u64| {
        // Two triangles and some noise: uneven, and the same everywhere.
        let triangle = |period: u64| (at * 7 + seed * 13) % period * 100 / period;
        let bytes = (at * 7919 + seed * 104_729) % 31;
        let share = (triangle(53).abs_diff(50) + triangle(131).abs_diff(50)).min(100) / 2 + bytes;
        low + range * share.min(100) / 100
    };
    (0..SAMPLES).map(sample).collect()
}

/// The same in percent.
fn percents(low: u64, high: u64, seed: u64) -> Vec<u8> {
    wave(low, high, seed).into_iter().map(|it| u8::try_from(it).unwrap_or(100)).collect()
}

/// The memory in use is that of the newest sample.
fn remember(metrics: &mut Metrics, samples: Vec<u8>) {
    metrics.memory_used =
        metrics.memory_total.div_ceil(100) * samples.last().copied().map_or(0, u64::from);
    metrics.memory = samples;
}

/// The header of a node that is at home.
fn home(uptime: u64) -> Header {
    Header {
        node: Some(NODES[0].to_owned()),
        words: Some("marble-ocean-violin-raft".to_owned()),
        cluster: Cluster::Home,
        address: Some("10.0.2.15".to_owned()),
        uptime: Duration::from_secs(uptime),
        ..empty().header
    }
}
