//! The reachability of the members of etcd: finds out which of them answer.
//!
//! The client protocol does not show which peers etcd is connected to; the metrics, on the
//! socket beside, do. But a machine that lost its power does not close its connections:
//! etcd counts it as connected for minutes. So this module also dials each member, and a
//! member counts as answering only if it takes the connection now.

use std::collections::BTreeSet;
use std::io;
use std::path::Path;
use std::time::Duration;

use polis_bundle::ClusterVersion;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpStream, UnixStream};

use super::{Member, MemberId};

/// The metrics of a busy member are some hundred kilobytes.
const ANSWER_MAX: u64 = 8 << 20;

/// They are computed in milliseconds.
const ANSWER_TIME: Duration = Duration::from_secs(5);

/// Where etcd serves its metrics.
const METRICS: &str = "/metrics";

/// One for each peer; 1 while a connection exists in either direction.
const METRIC: &str = "etcd_network_active_peers{";

/// How often the backend was written to the disk since etcd was started, the time of all
/// that together, and how often the leader changed.
const COMMITS: &str = "etcd_disk_backend_commit_duration_seconds_count";
const COMMIT_TIME: &str = "etcd_disk_backend_commit_duration_seconds_sum";
const LEADER_CHANGES: &str = "etcd_server_leader_changes_seen_total";

/// The streams of a member that copy its database out: those that began, those that ended, and
/// those to peers that are on their way.
const COPIES_BEGUN: &str = "grpc_server_started_total{";
const COPIES_ENDED: &str = "grpc_server_handled_total{";
const COPY_CALL: &str = "grpc_method=\"Snapshot\"";
const COPIES_TO_PEERS: &str = "etcd_network_snapshot_send_inflights_total{";

/// The work of a member since it was started.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Work {
    /// Commits of the database to the disk.
    pub commits: f64,
    /// Seconds that they took together.
    pub commit_seconds: f64,
    /// Changes of the leader that it saw.
    pub leader_changes: f64,
}

/// A member in the same network takes a connection in milliseconds; a busy one,
/// in some hundred.
const DIAL_MAX: Duration = Duration::from_secs(3);

/// The members of `members` that take a connection now.
pub(super) async fn reachable(members: &[Member]) -> BTreeSet<MemberId> {
    let dialled = members.iter().map(|member| async {
        // All URLs of peers are ours, and have a host and a port.
        let place = member.peer_url.strip_prefix("https://")?;
        let connected = tokio::time::timeout(DIAL_MAX, TcpStream::connect(place)).await;
        connected.ok()?.ok().map(|_connection| member.id)
    });
    futures::future::join_all(dialled).await.into_iter().flatten().collect()
}

/// The peers that the member behind this socket is connected to.
pub(super) async fn answering(socket: &Path) -> io::Result<BTreeSet<MemberId>> {
    Ok(parse(&get(socket, METRICS).await?))
}

/// The cluster version that the member behind this socket knows; `None` before the first voters
/// have agreed on one.
pub(super) async fn cluster_version(socket: &Path) -> io::Result<Option<ClusterVersion>> {
    Ok(parse_version(&get(socket, "/version").await?))
}

/// Whether a client or a peer takes a copy of the database of the member behind this socket.
pub(super) async fn sends_copies(socket: &Path) -> io::Result<bool> {
    Ok(parse_copies(&get(socket, METRICS).await?))
}

/// The numbers of the member behind this socket.
pub(super) async fn work(socket: &Path) -> io::Result<Work> {
    Ok(parse_work(&get(socket, METRICS).await?))
}

async fn get(socket: &Path, path: &str) -> io::Result<String> {
    // Version 1.0 of HTTP: the answer comes in one piece and ends with the connection.
    let request = format!("GET {path} HTTP/1.0\r\nHost: etcd\r\n\r\n");
    let asked = async {
        let mut stream = UnixStream::connect(socket).await?;
        stream.write_all(request.as_bytes()).await?;
        let mut answer = Vec::new();
        stream.take(ANSWER_MAX).read_to_end(&mut answer).await?;
        Ok::<_, io::Error>(answer)
    };
    let answer = tokio::time::timeout(ANSWER_TIME, asked).await??;
    Ok(String::from_utf8_lossy(&answer).into_owned())
}

/// `{"etcdserver":"3.5.16","etcdcluster":"3.5.0"}`, behind the head of the answer.
fn parse_version(answer: &str) -> Option<ClusterVersion> {
    let (_head, body) = answer.split_once("\r\n\r\n")?;
    let versions: serde_json::Value = serde_json::from_str(body).ok()?;
    versions.get("etcdcluster")?.as_str()?.parse().ok()
}

/// `etcd_server_leader_changes_seen_total 3`; zero for what is missing.
fn parse_work(metrics: &str) -> Work {
    let value = |name: &str| {
        let rest = |line: &str| line.strip_prefix(name)?.strip_prefix(' ')?.trim().parse().ok();
        let value: Option<f64> = metrics.lines().find_map(rest);
        value.filter(|value| value.is_finite() && *value >= 0.0).unwrap_or_default()
    };
    Work {
        commits: value(COMMITS),
        commit_seconds: value(COMMIT_TIME),
        leader_changes: value(LEADER_CHANGES),
    }
}

/// `grpc_server_handled_total{grpc_code="OK",grpc_method="Snapshot",…} 3`
fn parse_copies(metrics: &str) -> bool {
    let sum = |name: &str, with: &str| -> f64 {
        let value = |line: &str| {
            let (labels, value) = line.strip_prefix(name)?.split_once("} ")?;
            let value: f64 = value.trim().parse().ok()?;
            (labels.contains(with) && value.is_finite()).then_some(value)
        };
        metrics.lines().filter_map(value).sum()
    };
    sum(COPIES_BEGUN, COPY_CALL) > sum(COPIES_ENDED, COPY_CALL) || sum(COPIES_TO_PEERS, "") > 0.0
}

/// `etcd_network_active_peers{Local="8e9e05c5",Remote="8211f1d0"} 1`
fn parse(metrics: &str) -> BTreeSet<MemberId> {
    let remote = |line: &str| {
        let rest = line.strip_prefix(METRIC)?;
        let (labels, value) = rest.split_once("} ")?;
        if value.trim().parse::<f64>().ok()? < 1.0 {
            return None;
        }
        let (_, remote) = labels.split_once("Remote=\"")?;
        let (remote, _) = remote.split_once('"')?;
        u64::from_str_radix(remote, 16).ok().map(MemberId)
    };
    metrics.lines().filter_map(remote).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn connected_peers_are_those_whose_gauge_is_one() {
        let metrics = "HTTP/1.0 200 OK\r\n\r\n\
            # TYPE etcd_network_active_peers gauge\n\
            etcd_network_active_peers{Local=\"8e9e05c52164694d\",Remote=\"91bc3c398fb3c146\"} 1\n\
            etcd_network_active_peers{Local=\"8e9e05c52164694d\",Remote=\"fd422379fda50e48\"} 0\n\
            etcd_network_client_grpc_sent_bytes_total 26464\n";
        assert_eq!(parse(metrics), BTreeSet::from([MemberId(0x91bc_3c39_8fb3_c146)]));
    }

    #[test]
    fn the_work_of_a_member_is_read_and_what_is_no_number_is_none() {
        let metrics = "HTTP/1.0 200 OK\r\n\r\n\
            etcd_disk_backend_commit_duration_seconds_bucket{le=\"0.001\"} 9\n\
            etcd_disk_backend_commit_duration_seconds_sum 1.25e+01\n\
            etcd_disk_backend_commit_duration_seconds_count 1000\n\
            # TYPE etcd_server_leader_changes_seen_total counter\n\
            etcd_server_leader_changes_seen_total 3\n";
        let work = Work { commits: 1000.0, commit_seconds: 12.5, leader_changes: 3.0 };
        assert_eq!(parse_work(metrics), work);
        let wrong = "etcd_server_leader_changes_seen_total NaN\n";
        assert_eq!(parse_work(wrong), Work::default());
    }

    #[test]
    fn a_copy_of_the_database_is_on_its_way_from_its_begin_to_its_end() {
        let metrics = |begun: u32, ended: [u32; 2], to_peers: u32| {
            format!(
                "grpc_server_started_total{{grpc_method=\"Range\",grpc_type=\"unary\"}} 900\n\
                 grpc_server_started_total{{grpc_method=\"Snapshot\",grpc_type=\"s\"}} {begun}\n\
                 grpc_server_handled_total{{grpc_code=\"OK\",grpc_method=\"Snapshot\"}} {}\n\
                 grpc_server_handled_total{{grpc_code=\"Canceled\",grpc_method=\"Snapshot\"}} {}\n\
                 etcd_network_snapshot_send_inflights_total{{To=\"91bc3c398fb3c146\"}} {to_peers}\n",
                ended[0], ended[1]
            )
        };
        assert!(!parse_copies("") && !parse_copies(&metrics(3, [2, 1], 0)));
        assert!(parse_copies(&metrics(4, [2, 1], 0)));
        assert!(parse_copies(&metrics(3, [2, 1], 1)));
    }

    #[test]
    fn the_cluster_version_is_read_once_there_is_one() {
        let read = |body: &str| {
            let answer = format!("HTTP/1.0 200 OK\r\nContent-Length: 45\r\n\r\n{body}");
            parse_version(&answer).map(|version| version.to_string())
        };
        let known = r#"{"etcdserver":"3.6.1","etcdcluster":"3.5.0"}"#;
        assert_eq!(read(known), Some("3.5".to_owned()));
        for none in [r#"{"etcdserver":"3.5.16","etcdcluster":"not_decided"}"#, "{}", "404", ""] {
            assert_eq!(read(none), None, "{none}");
        }
        assert_eq!(parse_version(known), None, "an answer has a head");
    }

    #[tokio::test]
    async fn a_member_answers_only_if_a_listener_accepts_the_connection() {
        let listens = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let refuses = {
            let gone = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
            gone.local_addr().unwrap()
        };
        let member = |id, place: String| Member {
            id: MemberId(id),
            name: format!("polis-{id}"),
            peer_url: place,
            learner: false,
        };
        let members = [
            member(1, format!("https://{}", listens.local_addr().unwrap())),
            member(2, format!("https://{refuses}")),
            member(3, "nonsense".to_owned()),
        ];
        assert_eq!(reachable(&members).await, BTreeSet::from([MemberId(1)]));
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_name_no_peer_and_never_panic(text in "[ -~\n]{0,200}") {
            let _peers = parse(&text);
            let nameless = format!("{METRIC}{}", text.replace("Remote", ""));
            prop_assert!(parse(&nameless).is_empty());
        }
    }
}

#[cfg(test)]
#[path = "peers_fuzz_tests.rs"]
mod fuzz_tests;
