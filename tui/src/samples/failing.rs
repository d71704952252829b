//! A day on which everything goes wrong.

use std::sync::Arc;
use std::time::Duration;

use super::{NODES, certificate, date, ordinary, restarted, say, service_of, stage, used};
use crate::snapshot::{Cluster, Health, ServiceState, Severity, Snapshot, StageState, Warning};

/// A node that has lost its cluster, with trouble of every kind.
#[must_use]
pub fn failing() -> Snapshot {
    let mut snapshot = ordinary();
    snapshot.header.cluster = Cluster::Split;
    restarted(&mut snapshot, 192);
    snapshot.previous_failure = Some(
        "#0803.0000 etcd ended with status 2: its database is damaged: invalid page type (image 5d41402abc4b2a76)"
            .to_owned(),
    );
    snapshot.warnings = vec![
        Warning {
            text: "A person who takes the disk can read it: a share of its key is stored on it."
                .to_owned(),
            help: Some(
                "use a TPM; or an owner: polisctl cluster configure --cold-start attended"
                    .to_owned(),
            ),
        },
        Warning { text: "The data partition is full: 12 MiB are left.".to_owned(), help: None },
    ];
    snapshot.stages[7] = stage(
        "consensus",
        StageState::Waiting {
            what: "a majority of the voters: polis-0b7d3a99 and polis-5c2e90b1 do not answer; \
                   check that they are on and that the network connects them"
                .to_owned(),
            since: Duration::from_secs(130),
        },
        5_100,
        186_900,
    );
    for (at, name) in [(8, "curator"), (9, "roles")] {
        snapshot.stages[at] = stage(name, StageState::Pending, 0, 0);
    }
    snapshot.ready = None;
    snapshot.network.interfaces[0].carrier = true;
    snapshot.workloads = Some(super::workloads::unwell(192));
    if let Some(nodes) = &mut snapshot.nodes {
        nodes.nodes[0].roles.extend(super::workloads::ROLES.map(str::to_owned));
        nodes.leader = None;
        nodes.stale = Some(Duration::from_secs(131));
        for node in &mut nodes.nodes[1..] {
            node.health = Health::Late;
            node.leader = false;
            node.heartbeat = Some(Duration::from_secs(134));
        }
    }
    if let Some(etcd) = &mut snapshot.etcd {
        for member in &mut etcd.members[1..] {
            member.answers = Some(false);
            member.leader = false;
            member.lag = None;
            member.round_trip = None;
            member.db_size = None;
            member.reaches = None;
        }
        etcd.members[0].reaches = Some(Vec::new());
        etcd.members[0].lag = Some(12_096);
        etcd.applied = 1_192_021;
        // More than the quota, which raises the alarm.
        etcd.db_size = 2_051 << 20;
        etcd.members[0].db_size = Some(etcd.db_size);
        etcd.alarms = vec!["NOSPACE on 8e9e05c52164694d".to_owned()];
        etcd.quorum = false;
        etcd.survives = None;
        if let Some(snapshots) = &mut etcd.snapshots {
            snapshots.newest = None;
            snapshots.kept = 0;
            snapshots.problem = Some(
                "too little room for a snapshot: 4230 MiB of the data partition must be free for \
                 a snapshot, so that etcd keeps room for itself, and 301 MiB are; a larger disk \
                 or fewer volumes make room"
                    .to_owned(),
            );
        }
    }
    if let Some(pki) = &mut snapshot.pki {
        let etcd = &mut pki.authorities[1];
        (etcd.days_left, etcd.ends, etcd.used) = (120, date::day(120), used(3_530, 3_650));
        etcd.crl = None;
        pki.certificates[4] = certificate(NODES[0], "etcd CA", 3_530, 3_650);
        let mut old = certificate("metrics", "cluster CA", 93, 90);
        old.renews = None;
        let mut revoked = certificate("operator", "cluster CA", 19, 30);
        revoked.revoked = true;
        pki.certificates.extend([old, revoked]);
    }
    for (name, state, restarts, cause) in [
        (
            "consensus",
            ServiceState::Healthy,
            4,
            Some("etcd was killed by signal 9 (SIGKILL): rejected connection on peer endpoint"),
        ),
        ("curator", ServiceState::Starting, 0, None),
        ("agent", ServiceState::Restarting, 2, Some("no curator answers")),
        ("promoter", ServiceState::Done, 0, None),
        ("names", ServiceState::Dead, 11, Some("panic: no key")),
    ] {
        if let Some(service) = service_of(&mut snapshot, name) {
            service.state = state;
            service.restarts = restarts;
            service.cause = cause.map(str::to_owned);
            service.since = match state {
                ServiceState::Healthy => Duration::from_secs(131),
                _ => Duration::from_millis(2_300),
            };
        }
    }
    if let Some(metrics) = &mut snapshot.metrics {
        metrics.data_used = 7_930 << 20;
    }
    let logs = &mut snapshot.logs;
    say(
        logs,
        &[(61_020, Severity::Error, "root.consensus", "etcd was killed by signal 9 (SIGKILL)")],
    );
    // The ordinary entries of that time are dropped by now, the warnings and errors are
    // kept.
    Arc::make_mut(logs).total += 3412;
    say(
        logs,
        &[
            (61_021, Severity::Debug, "root.supervisor", "root.consensus.etcd runs again in 1.4 s"),
            (
                62_300,
                Severity::Warning,
                "root.consensus.etcd",
                "lost the leader: no heartbeat of 0b7d3a9915c04e21 for 1.1 s; rejected connection from 10.0.2.17:51022: remote error: tls: bad certificate",
            ),
            (63_000, Severity::Fatal, "root.names", "panic: no key"),
            (66_112, Severity::Error, "root.cluster", "split: cut off from the other voters"),
        ],
    );
    super::date::dated(snapshot)
}
