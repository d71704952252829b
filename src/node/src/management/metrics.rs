//! The metrics of this node: the content of `/metrics`.
//!
//! Pure but for the memory, which only the kernel knows. Names are listed in
//! `docs/metrics.md`.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use super::Inputs;
use super::text::{Kind, Page};
use crate::{forwarding, shipping};
use polis_base::stage::{self, Stages};
use polis_base::sys::clock;
use polis_control::consensus::MemberStatus;
use polis_control::consensus::snapshots::Snapshots;
use polis_control::curator::update::journal;
use polis_control::{cluster, consensus};
use polis_machine::{mirror, time, volumes};
use polis_proto::v1;
use polis_runtime::logtree;
use polis_runtime::supervisor::{State, Tree};
use polis_runtime::sys::process;
use polis_wire::pki::{Facts, Overview};
use polis_wire::rpc::metrics::{BUCKETS, Metrics};
use polis_workload as workload;
use polis_workload::drain;

/// The states of a service.
const STATES: [State; 6] =
    [State::Starting, State::Healthy, State::Done, State::Dead, State::Failed, State::Stopped];

/// The states of a node in its cluster.
const CLUSTER: [cluster::State; 6] = [
    cluster::State::Unknown,
    cluster::State::Foreign,
    cluster::State::Trusted,
    cluster::State::Home,
    cluster::State::Split,
    cluster::State::Disowning,
];

/// The standings of a member of etcd.
const STANDINGS: [MemberStatus; 4] = [
    MemberStatus::Starting,
    MemberStatus::Learner { behind: 0 },
    MemberStatus::Voter,
    MemberStatus::Stopped,
];

/// Every source of the metrics.
#[derive(Clone)]
pub(super) struct Sources {
    pub(super) inputs: Inputs,
    pub(super) services: tokio::sync::watch::Receiver<Tree>,
    pub(super) stages: tokio::sync::watch::Receiver<Stages>,
    pub(super) logs: logtree::Tree,
    /// The servers of this node, by name.
    pub(super) servers: Vec<(&'static str, Arc<Metrics>)>,
}

impl Sources {
    /// The page, as of now.
    pub(super) fn page(&self) -> String {
        let mut page = Page::default();
        let Inputs { cluster, consensus, pki, credentials, ready, environment, .. } = &self.inputs;
        let labels = [("version", environment.version.as_str()), ("image", &environment.image)];
        page.family("polis_build_info", Kind::Gauge, "The system that this machine runs.")
            .sample(&labels, 1);
        let uptime = clock::uptime().as_secs_f64();
        let up = "Seconds since the kernel started.";
        page.one("polis_uptime_seconds", Kind::Gauge, up, uptime);
        let whether = "Whether this node was ready in this boot.";
        page.one("polis_ready", Kind::Gauge, whether, u8::from(*ready.borrow()));
        let state = cluster.borrow().state;
        let mut family = page.family(
            "polis_cluster_state",
            Kind::Gauge,
            "1 for what this node is to its cluster.",
        );
        for one in CLUSTER {
            family.sample(&[("state", one.name())], u8::from(one == state));
        }
        services(&mut page, &self.services.borrow());
        stages(&mut page, &self.stages.borrow());
        etcd(&mut page, &consensus.borrow(), clock::now());
        workload(&mut page, &self.inputs.workload.borrow());
        timekeeping(&mut page, &self.inputs.time.borrow());
        let own = credentials.borrow().as_ref().and_then(|own| Facts::read(&own.certificate));
        certificates(&mut page, &pki.borrow(), own.as_ref(), clock::now());
        calls(&mut page, &self.servers);
        let lost = "Entries of the log that readers were too slow for.";
        page.one("polis_log_lost_total", Kind::Counter, lost, self.logs.lost());
        let ring = self.inputs.ring.borrow();
        let help = "Entries of this boot's log that were not written to the disk.";
        page.one("polis_log_unwritten_total", Kind::Counter, help, ring.lost);
        let help = "Disk space of the logs of all boots.";
        page.one("polis_log_disk_bytes", Kind::Gauge, help, ring.bytes);
        drop(ring);
        forwarding(&mut page, &self.inputs.forwarding.borrow());
        shipping(&mut page, &self.inputs.shipping.borrow(), clock::now());
        mirror(&mut page, &self.inputs.mirror.borrow());
        further_disks(&mut page, &self.inputs.volumes.borrow());
        cluster_update(&mut page, self.inputs.cluster_update.borrow().as_ref(), clock::now());
        if let Some(kibibytes) = process::resident("self") {
            let help = "Memory of the node's process that is resident.";
            page.one("process_resident_memory_bytes", Kind::Gauge, help, kibibytes * 1024);
        }
        page.into_text()
    }
}

fn services(page: &mut Page, services: &Tree) {
    let mut family = page.family("polis_services", Kind::Gauge, "Supervised services by state.");
    for state in STATES {
        let count = services.values().filter(|entry| entry.state == state).count();
        family.sample(&[("state", state.name())], count);
    }
    let help = "Restarts of a service; services without one are left out.";
    let mut family = page.family("polis_service_restarts_total", Kind::Counter, help);
    for (name, entry) in services.iter().filter(|(_, entry)| entry.restarts > 0) {
        family.sample(&[("service", name)], entry.restarts);
    }
}

fn stages(page: &mut Page, stages: &Stages) {
    let help = "Seconds since the kernel started at which a stage of this boot began.";
    let mut family = page.family("polis_boot_stage_start_seconds", Kind::Gauge, help);
    for (stage, entry) in stages {
        family.sample(&[("stage", stage.name())], entry.started.as_secs_f64());
    }
    let help = "Seconds that a stage of this boot took; those that have not ended are left out.";
    let mut family = page.family("polis_boot_stage_duration_seconds", Kind::Gauge, help);
    for (stage, entry) in stages.iter().filter(|(_, entry)| entry.state == stage::State::Done) {
        let took = entry.changed.saturating_sub(entry.started);
        family.sample(&[("stage", stage.name())], took.as_secs_f64());
    }
}

fn etcd(page: &mut Page, status: &consensus::Status, now: SystemTime) {
    let mut family =
        page.family("polis_etcd_standing", Kind::Gauge, "1 for the state of this member of etcd.");
    for one in STANDINGS {
        family.sample(&[("standing", one.name())], u8::from(one.name() == status.standing.name()));
    }
    let mut gauge = |name, help, value: u64| page.one(name, Kind::Gauge, help, value);
    let count = |n: usize| u64::try_from(n).unwrap_or(u64::MAX);
    gauge("polis_etcd_members", "Members that are known.", count(status.members.len()));
    gauge("polis_etcd_voters", "Members that vote.", count(status.voters()));
    let help = "Voters that may fail before writes stop.";
    gauge("polis_etcd_tolerated_failures", help, count(status.tolerates()));
    let help = "Whether a leader is known.";
    gauge("polis_etcd_has_leader", help, status.leader.is_some().into());
    let leads = status.leader.is_some() && status.leader == status.member;
    gauge("polis_etcd_is_leader", "Whether this member leads.", leads.into());
    gauge("polis_etcd_term", "How often a leader was elected.", status.term);
    gauge("polis_etcd_index", "The newest entry of the log.", status.index);
    gauge("polis_etcd_applied_index", "The newest entry in the database.", status.applied);
    gauge("polis_etcd_db_bytes", "The database's file.", status.db_size);
    gauge("polis_etcd_db_used_bytes", "The part of it in use.", status.db_used);
    gauge("polis_etcd_db_quota_bytes", "Where writes are refused.", status.db_quota);
    gauge("polis_etcd_alarms", "Alarms that are raised.", count(status.alarms.len()));
    if let Some(snapshots) = &status.snapshots {
        local_snapshots(page, snapshots, now);
    }
}

/// Left out until this node has looked at its disk.
fn local_snapshots(page: &mut Page, snapshots: &Snapshots, now: SystemTime) {
    let help = "Checked snapshots of etcd on the disk of this node.";
    page.one("polis_etcd_snapshots", Kind::Gauge, help, snapshots.kept);
    let help = "Whether the last attempt to take one failed, or a file among them does not count.";
    let troubled = u8::from(snapshots.problem().is_some());
    page.one("polis_etcd_snapshots_troubled", Kind::Gauge, help, troubled);
    let help = "Seconds since the newest checked snapshot was begun; without one, left out.";
    let mut family = page.family("polis_etcd_snapshot_age_seconds", Kind::Gauge, help);
    if let Some(newest) = snapshots.newest {
        family.sample(&[], -remaining(newest.at, now));
    }
    let help = "The size of the newest checked snapshot; without one, left out.";
    let mut family = page.family("polis_etcd_snapshot_bytes", Kind::Gauge, help);
    if let Some(newest) = snapshots.newest {
        family.sample(&[], newest.bytes);
    }
}

fn workload(page: &mut Page, status: &workload::Status) {
    let help = "Whether a part of Kubernetes serves; without a role of it, there is none.";
    let mut family = page.family("polis_workload_part_ready", Kind::Gauge, help);
    for (part, state) in &status.parts {
        let ready = *state == workload::PartState::Ready;
        family.sample(&[("part", part.name())], u8::from(ready));
    }
    let help = "Whether this node has a role of Kubernetes that its image does not carry.";
    page.one("polis_workload_unfit", Kind::Gauge, help, u8::from(status.unfit.is_some()));
    let help = "1 for the state of the drain of this node.";
    let mut family = page.family("polis_workload_drain", Kind::Gauge, help);
    for state in [drain::State::None].into_iter().chain(drain::State::ALL) {
        family.sample(&[("state", state.name())], u8::from(state.name() == status.drain.name()));
    }
}

fn timekeeping(page: &mut Page, status: &time::Status) {
    let mut family =
        page.family("polis_clock_state", Kind::Gauge, "1 for the standing of the clock.");
    for state in time::State::ALL {
        family.sample(&[("state", state.name())], u8::from(state == status.state));
    }
    let help = "Seconds that the clock is ahead of its source; left out without one.";
    let mut family = page.family("polis_clock_offset_seconds", Kind::Gauge, help);
    if let Some(offset) = status.offset {
        family.sample(&[], time::seconds(offset));
    }
    let help = "Bound of the difference between the clock and the first server of its chain.";
    let mut family = page.family("polis_clock_error_seconds", Kind::Gauge, help);
    if let Some(error) = status.error.and_then(|error| i64::try_from(error).ok()) {
        family.sample(&[], time::seconds(error));
    }
}

fn forwarding(page: &mut Page, status: &forwarding::Status) {
    let mut family = |name, kind, help, value: fn(&forwarding::Target) -> u64| {
        let mut family = page.family(name, kind, help);
        for (url, target) in &status.targets {
            family.sample(&[("target", url)], value(target));
        }
    };
    let help = "Records on the disk that a target of logs does not have yet.";
    family("polis_log_target_behind", Kind::Gauge, help, |it| it.behind);
    let help = "Records that a target of logs took, with those that were sent again.";
    family("polis_log_target_sent_total", Kind::Counter, help, |it| it.sent);
    let help = "Records that were overwritten before a target of logs had them.";
    family("polis_log_target_missing_total", Kind::Counter, help, |it| it.missing);
    let help = "Records that a target of logs rejected.";
    family("polis_log_target_rejected_total", Kind::Counter, help, |it| it.rejected);
    let help = "Whether a target of logs cannot be reached.";
    family("polis_log_target_failing", Kind::Gauge, help, |it| it.failure.is_some().into());
}

fn shipping(page: &mut Page, status: &shipping::Status, now: SystemTime) {
    let Some(delivery) = &status.delivery else { return };
    let labels: [(&str, &str); 1] = [("target", &delivery.target)];
    let mut one = |name, kind, help, value: u64| {
        page.family(name, kind, help).sample(&labels, value);
    };
    if let Some(newest) = delivery.newest {
        let help = "Seconds since the newest snapshot of etcd at its target was begun.";
        let age = now.duration_since(newest.at).unwrap_or_default().as_secs();
        one("polis_snapshot_target_age_seconds", Kind::Gauge, help, age);
        let help = "Bytes of the newest snapshot of etcd at its target.";
        one("polis_snapshot_target_bytes", Kind::Gauge, help, newest.bytes);
    }
    let help = "Snapshots of etcd that this node has sent since it leads.";
    one("polis_snapshot_target_sent_total", Kind::Counter, help, delivery.sent);
    let help = "Whether the newest snapshot of etcd does not reach its target.";
    one("polis_snapshot_target_failing", Kind::Gauge, help, delivery.failure.is_some().into());
}

/// Left out without a mirror.
fn mirror(page: &mut Page, status: &mirror::Status) {
    let Some(report) = status else { return };
    let help = "1 for the state of the mirror of the disk that the node runs from.";
    let mut family = page.family("polis_mirror_state", Kind::Gauge, help);
    for state in mirror::State::NAMES {
        family.sample(&[("state", state)], u8::from(state == report.state.name()));
    }
}

/// Left out without further disks.
fn further_disks(page: &mut Page, status: &volumes::Status) {
    if status.is_empty() {
        return;
    }
    let help = "1 for the state of the volume on a further disk of the node.";
    let mut family = page.family("polis_volume_state", Kind::Gauge, help);
    for (name, state) in status {
        for word in volumes::State::NAMES {
            let labels = [("volume", name.to_string()), ("state", word.to_owned())];
            let labels = labels.each_ref().map(|(key, value)| (*key, value.as_str()));
            family.sample(&labels, u8::from(word == state.name()));
        }
    }
}

/// Left out on a node without a curator, and before the first update.
fn cluster_update(page: &mut Page, known: Option<&v1::GetUpdateResponse>, now: SystemTime) {
    let Some(update) = known.and_then(|known| known.update.as_ref()) else { return };
    let version = update.bundle.as_ref().map_or("", |bundle| &bundle.version);
    let help = "1 for the state of the update of the cluster that goes on, or of the last one.";
    let mut family = page.family("polis_cluster_update_state", Kind::Gauge, help);
    for word in journal::WORDS {
        let labels = [("version", version), ("state", word)];
        family.sample(&labels, u8::from(word == journal::word(update)));
    }
    let help = "Nodes in the plan of that update.";
    let mut family = page.family("polis_cluster_update_nodes", Kind::Gauge, help);
    family.sample(&[("version", version)], update.steps.len());
    let help = "Nodes of the plan that run the new version and are ready.";
    let mut family = page.family("polis_cluster_update_nodes_done", Kind::Gauge, help);
    family.sample(&[("version", version)], journal::done(update));
    let step = journal::in_turn(update).filter(|_| journal::is_open(update));
    let Some(step) = step else { return };
    let help = "Seconds since the turn of a node began; without a turn, left out.";
    let mut family = page.family("polis_cluster_update_turn_seconds", Kind::Gauge, help);
    let began = Duration::from_secs(u64::try_from(step.since).unwrap_or_default());
    let since = now.duration_since(SystemTime::UNIX_EPOCH + began).unwrap_or_default();
    family.sample(&[("version", version), ("node", &step.node_id)], since.as_secs());
}

fn certificates(page: &mut Page, pki: &Overview, own: Option<&Facts>, now: SystemTime) {
    let help = "Seconds until a certificate ends; negative after it.";
    let mut family = page.family("polis_certificate_remaining_seconds", Kind::Gauge, help);
    if let Some(own) = own {
        let labels = [("issuer", own.issuer.as_str()), ("name", &own.subject), ("use", "own")];
        family.sample(&labels, remaining(own.not_after, now));
    }
    for authority in &pki.authorities {
        let labels = [
            ("issuer", authority.namespace.as_str()),
            ("name", &authority.name),
            ("use", "authority"),
        ];
        family.sample(&labels, remaining(authority.not_after, now));
    }
    for one in pki.certificates.iter().filter(|one| !one.revoked) {
        let labels = [("issuer", one.issuer.as_str()), ("name", &one.name), ("use", "stored")];
        family.sample(&labels, remaining(one.not_after, now));
    }
    let mut family =
        page.family("polis_crl_revoked", Kind::Gauge, "Certificates on an authority's CRL.");
    for authority in &pki.authorities {
        let labels = [("issuer", authority.namespace.as_str()), ("name", &authority.name)];
        family.sample(&labels, authority.revoked.len());
    }
}

fn remaining(end: SystemTime, now: SystemTime) -> f64 {
    match end.duration_since(now) {
        Ok(left) => left.as_secs_f64(),
        Err(over) => -over.duration().as_secs_f64(),
    }
}

fn calls(page: &mut Page, servers: &[(&'static str, Arc<Metrics>)]) {
    let help = "Calls that have ended, by status.";
    let mut family = page.family("polis_rpc_calls_total", Kind::Counter, help);
    for (server, metrics) in servers {
        for (path, calls) in metrics.calls() {
            for (code, count) in calls.codes() {
                let code = format!("{code:?}");
                family.sample(&[("server", server), ("rpc", path), ("code", &code)], count);
            }
        }
    }
    let help = "Seconds until the answer to a call began.";
    let mut family = page.family("polis_rpc_answer_seconds", Kind::Histogram, help);
    for (server, metrics) in servers {
        for (path, calls) in metrics.calls() {
            let ends = BUCKETS.iter().map(ToString::to_string).chain(["+Inf".to_owned()]);
            for (end, count) in ends.zip(calls.within()) {
                let labels = [("server", *server), ("rpc", path), ("le", &end)];
                family.suffixed("_bucket", &labels, count);
            }
            let labels = [("server", *server), ("rpc", path)];
            family.suffixed("_sum", &labels, calls.seconds());
            family.suffixed("_count", &labels, calls.count());
        }
    }
    type Read = fn(&Metrics) -> u64;
    let connections: [(&'static str, Kind, &str, Read); 7] = [
        ("polis_rpc_connections", Kind::Gauge, "Connections that are open.", |m| m.open.get()),
        ("polis_rpc_accepted_total", Kind::Counter, "Connections that came.", |m| m.accepted.get()),
        (
            "polis_rpc_crowded_out_total",
            Kind::Counter,
            "Connections that were closed to admit others.",
            |m| m.crowded_out.get(),
        ),
        (
            "polis_rpc_handshakes_failed_total",
            Kind::Counter,
            "Handshakes that failed or took too long.",
            |m| m.handshakes_failed.get(),
        ),
        (
            "polis_rpc_cut_total",
            Kind::Counter,
            "Connections that were cut because their peer lost its access.",
            |m| m.cut.get(),
        ),
        (
            "polis_rpc_stalled_total",
            Kind::Counter,
            "Connections that were cut because an answer was not read.",
            |m| m.stalled.get(),
        ),
        (
            "polis_rpc_refused_total",
            Kind::Counter,
            "Calls that were refused before they reached their service.",
            |m| m.refused.get(),
        ),
    ];
    for (name, kind, help, read) in connections {
        let mut family = page.family(name, kind, help);
        for (server, metrics) in servers {
            family.sample(&[("server", server)], read(metrics));
        }
    }
}

#[cfg(test)]
mod tests {
    use polis_control::consensus::snapshots::Taken;
    use polis_proto::v1::cluster_update::step::State as Progress;
    use polis_proto::v1::cluster_update::{State, Step};

    use super::*;

    #[test]
    fn an_update_of_the_cluster_has_its_state_its_nodes_and_the_age_of_the_turn() {
        let shown = |known: Option<&v1::GetUpdateResponse>| {
            let mut page = Page::default();
            cluster_update(&mut page, known, SystemTime::UNIX_EPOCH + Duration::from_secs(107));
            let text = page.into_text();
            let lines = text.lines().filter(|line| !line.starts_with('#') && !line.ends_with(" 0"));
            lines.map(str::to_owned).collect::<Vec<_>>()
        };
        assert!(shown(None).is_empty(), "no curator, or no update");
        let step = |state: Progress, since| {
            let (state, node_id) = (state.into(), format!("polis-{since}"));
            Step { state, node_id, since, ..Step::default() }
        };
        let bundle = v1::UpdateBundle { version: "1.1.0".to_owned(), ..Default::default() };
        let mut update = v1::ClusterUpdate {
            bundle: Some(bundle),
            state: State::Running.into(),
            steps: vec![step(Progress::Done, 90), step(Progress::Turn, 100)],
            ..v1::ClusterUpdate::default()
        };
        let known = |update: &v1::ClusterUpdate| v1::GetUpdateResponse {
            update: Some(update.clone()),
            ..Default::default()
        };
        let lines = [
            "polis_cluster_update_state{version=\"1.1.0\",state=\"running\"} 1",
            "polis_cluster_update_nodes{version=\"1.1.0\"} 2",
            "polis_cluster_update_nodes_done{version=\"1.1.0\"} 1",
            "polis_cluster_update_turn_seconds{version=\"1.1.0\",node=\"polis-100\"} 7",
        ];
        assert_eq!(shown(Some(&known(&update))), lines);
        update.paused = true;
        assert!(shown(Some(&known(&update)))[0].contains("state=\"paused\""));
        // A turn that an owner has ended is none.
        update.set_state(State::Aborted);
        assert_eq!(shown(Some(&known(&update))).len(), 3);
    }

    #[test]
    fn a_further_disk_has_a_state() {
        let mut page = Page::default();
        further_disks(&mut page, &volumes::Status::new());
        let cause = "its disk is missing".to_owned();
        let state = volumes::State::Failed { cause };
        further_disks(&mut page, &[("db".parse().unwrap(), state)].into());
        let text = page.into_text();
        let lines = text.lines().filter(|line| !line.starts_with('#'));
        assert_eq!(
            lines.collect::<Vec<_>>(),
            [
                "polis_volume_state{volume=\"db\",state=\"starting\"} 0",
                "polis_volume_state{volume=\"db\",state=\"ready\"} 0",
                "polis_volume_state{volume=\"db\",state=\"failed\"} 1",
                "polis_volume_state{volume=\"db\",state=\"absent\"} 0",
            ]
        );
    }

    #[test]
    fn a_mirror_has_a_state() {
        let shown = |status| {
            let mut page = Page::default();
            super::mirror(&mut page, &status);
            let text = page.into_text();
            let lines = text.lines().filter(|line| !line.starts_with('#'));
            lines.map(str::to_owned).collect::<Vec<_>>()
        };
        assert!(shown(None).is_empty());
        let state = mirror::State::Filling { percent: 7 };
        let report = mirror::Report { state, whole: Vec::new(), filled: None, cause: None };
        assert_eq!(
            shown(Some(report)),
            [
                "polis_mirror_state{state=\"whole\"} 0",
                "polis_mirror_state{state=\"comparing\"} 0",
                "polis_mirror_state{state=\"filling\"} 1",
                "polis_mirror_state{state=\"degraded\"} 0",
            ]
        );
    }

    #[test]
    fn a_target_of_snapshots_has_its_age_and_whether_it_fails_while_this_node_leads() {
        let at = SystemTime::UNIX_EPOCH + Duration::from_secs(100);
        let shown = |delivery| {
            let mut page = Page::default();
            super::shipping(&mut page, &shipping::Status { delivery }, at + Duration::from_secs(7));
            let text = page.into_text();
            let lines = text.lines().filter(|line| !line.starts_with('#'));
            lines.map(str::to_owned).collect::<Vec<_>>()
        };
        assert!(shown(None).is_empty(), "another node leads");
        let newest = Some(shipping::Shipped { at, revision: 7, bytes: 9 });
        let target = "s3+https://a:443/bucket".to_owned();
        let delivery = shipping::Delivery { target, newest, sent: 3, ..Default::default() };
        assert_eq!(
            shown(Some(delivery)),
            [
                "polis_snapshot_target_age_seconds{target=\"s3+https://a:443/bucket\"} 7",
                "polis_snapshot_target_bytes{target=\"s3+https://a:443/bucket\"} 9",
                "polis_snapshot_target_sent_total{target=\"s3+https://a:443/bucket\"} 3",
                "polis_snapshot_target_failing{target=\"s3+https://a:443/bucket\"} 0",
            ]
        );
    }

    #[test]
    fn the_age_of_the_newest_snapshot_is_there_once_it_exists() {
        let at = SystemTime::UNIX_EPOCH + Duration::from_secs(100);
        let shown = |snapshots: Option<Snapshots>| {
            let mut page = Page::default();
            let status = consensus::Status { snapshots, ..Default::default() };
            etcd(&mut page, &status, at + Duration::from_secs(754));
            let text = page.into_text();
            let lines = text.lines().filter(|line| line.starts_with("polis_etcd_snapshot"));
            lines.map(str::to_owned).collect::<Vec<_>>()
        };
        assert!(shown(None).is_empty(), "not looked yet");
        let failed = Snapshots { failure: Some("no room".to_owned()), ..Snapshots::default() };
        assert_eq!(
            shown(Some(failed)),
            ["polis_etcd_snapshots 0", "polis_etcd_snapshots_troubled 1"]
        );
        let newest = Some(Taken { number: 1, at, bytes: 7, revision: 9 });
        let kept = Snapshots { kept: 24, newest, ..Snapshots::default() };
        assert_eq!(
            shown(Some(kept)),
            [
                "polis_etcd_snapshots 24",
                "polis_etcd_snapshots_troubled 0",
                "polis_etcd_snapshot_age_seconds 754",
                "polis_etcd_snapshot_bytes 7",
            ]
        );
    }
}
