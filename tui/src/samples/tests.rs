//! Tests that samples hold together: a reader of the gallery takes them as a real
//! machine.

use std::time::Duration;

use super::*;
use crate::snapshot::{Health, MemberStatus, NodeState, Severity, StageState};

#[test]
fn nothing_in_a_sample_is_older_than_its_machine() {
    for (name, snapshot) in all().into_iter().filter(|(name, _)| *name != "overflowing") {
        let up = snapshot.header.uptime;
        let known = snapshot.services.iter().all(|service| service.since <= up);
        assert!(known, "{name}: a service is older than the machine");
        let parts = snapshot.workloads.iter().flat_map(|it| &it.parts);
        assert!(parts.filter_map(|part| part.since).all(|since| since <= up), "{name}: a part");
        assert!(snapshot.logs.entries.iter().all(|entry| entry.time <= up), "{name}: a late line");
        assert!(snapshot.logs.entries.is_sorted_by_key(|entry| entry.time), "{name}: log");
        for stage in &snapshot.stages {
            let end = stage.started + stage.elapsed;
            let runs = matches!(stage.state, StageState::Started | StageState::Waiting { .. });
            assert!(end <= up && (!runs || end == up), "{name}: {} ends at {end:?}", stage.name);
        }
        if let Some(metrics) = &snapshot.metrics {
            let used = 100 * metrics.memory_used / metrics.memory_total;
            let newest = u64::from(*metrics.memory.last().unwrap());
            assert!(used.abs_diff(newest) <= 1, "{name}: {used} % are not {newest} %");
        }
        let sampled = snapshot.metrics.map_or(Duration::ZERO, |metrics| {
            metrics.pace * u32::try_from(metrics.cpu.len()).unwrap()
        });
        assert!(sampled <= up.min(Duration::from_secs(240)), "{name}: {sampled:?} of samples");
    }
}

#[test]
fn a_sample_shows_nothing_that_no_machine_can() {
    for (name, snapshot) in all().into_iter().filter(|(name, _)| *name != "overflowing") {
        for node in snapshot.nodes.iter().flat_map(|known| &known.nodes) {
            // The leader reports the age of a heartbeat that is late, and of no other.
            assert_eq!(node.heartbeat.is_some(), node.health == Health::Late, "{name}");
            let member = node.state == NodeState::Up;
            assert!(member || node.health == Health::Unknown, "{name}: a beat of {}", node.id);
        }
        for address in snapshot.network.interfaces.iter().flat_map(|it| &it.addresses) {
            let known = ["DHCP", "parameters", "router", ""].contains(&address.source.as_str());
            assert!(known, "{name}: an address by {}", address.source);
        }
        if let Some(etcd) = &snapshot.etcd {
            let known = snapshot.nodes.iter().flat_map(|known| &known.nodes);
            let standings: Vec<_> = known.filter_map(|it| Some((&it.id, it.etcd?))).collect();
            for member in &etcd.members {
                let other = standings.iter().find(|(id, _)| **id == member.name);
                let other = other.map_or(member.standing, |(_, standing)| *standing);
                let learns = |it| matches!(it, MemberStatus::Learner { .. });
                assert_eq!(learns(member.standing), learns(other), "{name}: {}", member.name);
            }
            let full = etcd.alarms.iter().any(|alarm| alarm.starts_with("NOSPACE"));
            assert!(!full || etcd.db_size > etcd.db_quota, "{name}: an alarm for nothing");
        }
        // Only warnings and errors are kept beyond the newest entries.
        for pair in snapshot.logs.entries.windows(2) {
            let gap = pair[0].number + 1 < pair[1].number;
            assert!(!gap || pair[0].severity >= Severity::Warning, "{name}: {:?}", pair[0]);
        }
        for it in snapshot.pki.iter().flat_map(|pki| &pki.certificates) {
            assert_eq!(it.ends, date::day(it.days_left), "{name}: {}", it.name);
        }
    }
}
