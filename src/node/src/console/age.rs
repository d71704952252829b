//! Ageing of a snapshot: makes it older, where only time has passed.
//!
//! A snapshot is made once a second, and on most days of a machine nothing happens
//! between two of them: ages then go on in a copy of the last, and nothing is
//! sorted, printed or put into words again.
//!
//! Invariants:
//! - The result equals the one that [`fold`](super::fold::fold) makes of the same
//!   values.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use polis_tui::snapshot::{
    Etcd, Logs, Network, Nodes, Pki, Snapshot, Stage, StageState, Workloads,
};

use super::fold::{CLOCK, days, failing, printed, since, used};
use super::watched::Values;
use polis_wire::pki::Overview;

/// `last`, which was made of the same `values`, at `uptime`, when the wall clock reads
/// `now`.
pub(super) fn later(
    last: &Snapshot,
    values: &Values,
    logs: &Arc<Logs>,
    uptime: Duration,
    now: SystemTime,
) -> Snapshot {
    let passed = uptime.saturating_sub(last.header.uptime);
    let mut snapshot = last.clone();
    snapshot.header.uptime = uptime;
    snapshot.header.clock = printed(now, CLOCK);
    snapshot.stages.iter_mut().for_each(|it| stage(it, passed));
    network(&mut snapshot.network, passed);
    snapshot.nodes.iter_mut().for_each(|it| nodes(it, passed));
    snapshot.etcd.iter_mut().for_each(|it| etcd(it, values, now));
    snapshot.pki.iter_mut().for_each(|it| pki(it, &values.pki, now));
    for service in &mut snapshot.services {
        grow(&mut service.since, passed);
    }
    snapshot.workloads.iter_mut().for_each(|it| workloads(it, values, passed, now));
    snapshot.logs = Arc::clone(logs);
    snapshot
}

fn grow(age: &mut Duration, passed: Duration) {
    *age = age.saturating_add(passed);
}

fn stage(stage: &mut Stage, passed: Duration) {
    match &mut stage.state {
        StageState::Started => {}
        StageState::Waiting { since, .. } => grow(since, passed),
        StageState::Pending | StageState::Done | StageState::Failed => return,
    }
    grow(&mut stage.elapsed, passed);
}

fn network(network: &mut Network, passed: Duration) {
    let addresses = network.interfaces.iter_mut().flat_map(|it| &mut it.addresses);
    for lease in addresses.filter_map(|address| address.lease.as_mut()) {
        *lease = lease.saturating_sub(passed);
    }
}

fn nodes(nodes: &mut Nodes, passed: Duration) {
    let heartbeats = nodes.nodes.iter_mut().filter_map(|node| node.heartbeat.as_mut());
    heartbeats.chain(&mut nodes.stale).for_each(|age| grow(age, passed));
}

/// Snapshots of etcd have their age by the wall clock, as certificates have.
fn etcd(shown: &mut Etcd, values: &Values, now: SystemTime) {
    let local = shown.snapshots.iter_mut().filter_map(|it| it.newest.as_mut());
    for (shown, newest) in local.zip(values.consensus.snapshots.iter().filter_map(|it| it.newest)) {
        shown.age = since(newest.at, now);
    }
    if let (Some(shown), Some(delivery)) = (&mut shown.bucket, &values.shipping.delivery) {
        if let (Some(shown), Some(newest)) = (&mut shown.newest, delivery.newest) {
            shown.age = since(newest.at, now);
        }
        shown.failing = delivery.failure.as_ref().and_then(|failure| failing(failure, now));
    }
}

/// Pods have their age by the wall clock, as certificates have.
fn workloads(shown: &mut Workloads, values: &Values, passed: Duration, now: SystemTime) {
    shown.parts.iter_mut().filter_map(|it| it.since.as_mut()).for_each(|age| grow(age, passed));
    let shown = shown.pods.iter_mut().flat_map(|it| &mut it.pods);
    for (shown, pod) in shown.zip(values.pods.iter().flat_map(|it| &it.pods)) {
        shown.age = super::workloads::age(pod, now);
    }
}

/// Certificates end by the wall clock, which may be set meanwhile.
fn pki(pki: &mut Pki, overview: &Overview, now: SystemTime) {
    for (shown, view) in pki.authorities.iter_mut().zip(&overview.authorities) {
        shown.days_left = days(now, view.not_after);
        shown.used = used(view.not_before, now, view.not_after);
        if let (Some(crl), Some(issued)) = (&mut shown.crl, view.crl_issued) {
            crl.age = now.duration_since(issued).unwrap_or_default();
        }
    }
    for (shown, view) in pki.certificates.iter_mut().zip(&overview.certificates) {
        shown.days_left = days(now, view.not_after);
        shown.used = used(view.not_before, now, view.not_after);
    }
}
