//! Fuzz target of the metrics of etcd.

use polis_fuzz::{Accepted, Target};

use super::{parse, parse_version, parse_work};

#[test]
fn metrics_of_etcd() {
    let metrics = "HTTP/1.0 200 OK\r\n\r\n\
        # TYPE etcd_network_active_peers gauge\n\
        etcd_network_active_peers{Local=\"8e9e05c52164694d\",Remote=\"91bc3c398fb3c146\"} 1\n\
        etcd_disk_backend_commit_duration_seconds_sum 1.25e+01\n\
        etcd_disk_backend_commit_duration_seconds_count 1000\n\
        etcd_server_leader_changes_seen_total 3\n";
    Target::new("control.etcd_metrics").samples([metrics]).run(|input| {
        let text = String::from_utf8_lossy(input);
        let work = parse_work(&text);
        for value in [work.commits, work.commit_seconds, work.leader_changes] {
            assert!(value.is_finite() && value >= 0.0);
        }
        if let Some(version) = parse_version(&text) {
            assert_eq!(version.to_string().parse(), Ok(version));
        }
        assert!(parse(&text).len() <= text.lines().count());
        Accepted::Yes
    });
}
