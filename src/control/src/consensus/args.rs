//! The command line of etcd. Pure: derived from what is known.
//!
//! What this module does not do: touch files or processes (`service`).

use std::net::SocketAddr;

use super::{Member, Peer};
use polis_base::files::{Etcd, Sockets};
use polis_wire::pki;

/// Keeps members of different clusters apart, which would otherwise have the same numbers.
const CLUSTER_TOKEN: &str = "POLIS";

/// At start, the database is rewritten if that frees this many mebibytes. It is the one
/// moment at which no client waits for this member.
const DEFRAGMENT_MIB: u32 = 64;

/// The number of entries after which a member makes a snapshot of itself, and drops the log
/// before it.
const SNAPSHOT_EVERY: u32 = 1000;

/// The entries kept before a snapshot, for members that come back: Kubernetes writes some
/// ten a second, and a machine is back after two minutes. A member that missed more, and a
/// newcomer to any but a young cluster, receives the database and no history: with etcd's
/// own 100 000 entries, a newcomer would dial every member that ever was, and until it has
/// acknowledged the first of them, its leader would send all entries that fit into one
/// message again at each heartbeat (see `docs/consensus.md`).
const CATCH_UP: u32 = 2000;

/// The interval of the leader's heartbeats, and how long its silence may last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pace {
    /// For the only member of a cluster: it waits for no other vote, so a long timeout
    /// would only delay its start. A shorter one than this costs more than it brings: each
    /// heartbeat wakes the machine. Never with a second voter: two members with different
    /// timeouts depose each other without end.
    Alone,
    /// For members in one network: etcd's own default. Half of both deposes leaders on a
    /// machine whose disk or processor stalls for half a second, again and again, and every
    /// client waits for each election.
    Lan,
}

impl Pace {
    /// Milliseconds between heartbeats, and without one before an election.
    fn intervals(self) -> (u32, u32) {
        match self {
            // etcd wants the second to be at least five times the first.
            Self::Alone => (50, 250),
            Self::Lan => (100, 1000),
        }
    }
}

/// The purpose for which the member is started.
#[derive(Clone, Copy, Debug)]
pub(super) enum Purpose<'a> {
    /// The first start of a new cluster: no certificates yet, so no port either.
    Found,
    /// With the data on the disk.
    Serve,
    /// The first start in the cluster of these members.
    Join(&'a [Member]),
}

/// The inputs from which a command line follows.
#[derive(Clone, Copy, Debug)]
pub(super) struct Call<'a> {
    pub(super) name: &'a str,
    pub(super) tree: &'a Etcd,
    pub(super) sockets: &'a Sockets,
    pub(super) peer: &'a Peer,
    pub(super) listen: SocketAddr,
    pub(super) quota: u64,
    pub(super) pace: Pace,
    pub(super) purpose: Purpose<'a>,
}

/// The only variables in etcd's environment. Go resolves names by itself, so that it reads
/// `/etc/hosts` afresh and needs no library of the system.
const ENVIRONMENT: [(&str, &str); 1] = [("GODEBUG", "netdns=go")];

/// A process of half a second has no use for a garbage collector.
const ENVIRONMENT_FOUND: [(&str, &str); 2] = [("GODEBUG", "netdns=go"), ("GOGC", "off")];

/// The environment of etcd.
pub(super) fn environment(purpose: Purpose<'_>) -> &'static [(&'static str, &'static str)] {
    match purpose {
        Purpose::Found => &ENVIRONMENT_FOUND,
        Purpose::Serve | Purpose::Join(_) => &ENVIRONMENT,
    }
}

/// The argument by which etcd and its tools know that a new cluster has one member.
pub(super) fn only_member(name: &str, peer: &Peer) -> [String; 6] {
    [
        "--initial-advertise-peer-urls".to_owned(),
        peer.url(),
        "--initial-cluster".to_owned(),
        format!("{name}={}", peer.url()),
        "--initial-cluster-token".to_owned(),
        CLUSTER_TOKEN.to_owned(),
    ]
}

/// The arguments of etcd.
pub(super) fn arguments(call: &Call<'_>) -> Vec<String> {
    let Call { name, tree, sockets, peer, listen, quota, pace, purpose } = call;
    let (heartbeat, election) = pace.intervals();
    // Nothing of the node asks etcd in JSON, and each start would pay for it.
    let mut args = vec!["--enable-grpc-gateway=false".to_owned()];
    let mut flag = |name: &str, value: String| args.extend([format!("--{name}"), value]);

    flag("name", (*name).to_owned());
    flag("data-dir", tree.data.path().display().to_string());
    flag("logger", "zap".to_owned());
    flag("log-outputs", "stderr".to_owned());
    flag("listen-client-urls", format!("unix://{}", sockets.client().display()));
    // Apart, because etcd warns of gRPC and HTTP on one socket at each start.
    flag("listen-client-http-urls", format!("unix://{}", sockets.http().display()));
    // Mandatory; never dialled, since every service that needs etcd runs beside a member.
    flag("advertise-client-urls", format!("unix://{name}:0"));
    flag("heartbeat-interval", heartbeat.to_string());
    flag("election-timeout", election.to_string());
    flag("quota-backend-bytes", quota.to_string());
    flag("snapshot-count", SNAPSHOT_EVERY.to_string());
    flag("experimental-snapshot-catchup-entries", CATCH_UP.to_string());
    flag("auto-compaction-mode", "periodic".to_owned());
    flag("auto-compaction-retention", "1h".to_owned());
    flag("experimental-bootstrap-defrag-threshold-megabytes", DEFRAGMENT_MIB.to_string());

    match purpose {
        Purpose::Found => {
            // A name that cannot be listened on would become 127.0.0.1:2380; other machines
            // cannot reach a unix socket in the working directory.
            flag("listen-peer-urls", "unix://nobody:0".to_owned());
            flag("initial-advertise-peer-urls", peer.url());
            flag("initial-cluster", format!("{name}={}", peer.url()));
            flag("initial-cluster-state", "new".to_owned());
            flag("initial-cluster-token", CLUSTER_TOKEN.to_owned());
            // The writes of this etcd count only once it has ended and all of them were
            // flushed; see `bootstrap`.
            args.push("--unsafe-no-fsync".to_owned());
            return args;
        }
        // Its data has the URL. Without it here, etcd makes one of the machine's address, and
        // refuses its own where that is one of IPv6.
        Purpose::Serve => flag("initial-advertise-peer-urls", peer.url()),
        Purpose::Join(members) => {
            // Exactly the present members: etcd compares them with its arguments.
            let urls = members.iter().map(|member| {
                let known = if member.peer_url == peer.url() { name } else { member.name.as_str() };
                format!("{known}={}", member.peer_url)
            });
            flag("initial-advertise-peer-urls", peer.url());
            flag("initial-cluster", urls.collect::<Vec<_>>().join(","));
            flag("initial-cluster-state", "existing".to_owned());
            flag("initial-cluster-token", CLUSTER_TOKEN.to_owned());
        }
    }
    let path = |file: &polis_base::files::File| file.path().display().to_string();
    flag("listen-peer-urls", format!("https://{listen}"));
    flag("peer-cert-file", path(&tree.peer_pki.cert));
    flag("peer-key-file", path(&tree.peer_pki.key));
    flag("peer-trusted-ca-file", path(&tree.peer_pki.ca));
    flag("peer-crl-file", path(&tree.peer_crl));
    flag("peer-cert-allowed-hostname", pki::ETCD_PEER_NAME.to_owned());
    // For peers too, despite the name.
    flag("tls-min-version", "TLS1.3".to_owned());
    flag("experimental-corrupt-check-time", "1h".to_owned());
    args.push("--peer-client-cert-auth".to_owned());
    // etcd would compare a peer's names with its source address, which is wrong
    // behind every router; the name that only peers have stands in for it.
    args.push("--experimental-peer-skip-client-san-verification".to_owned());
    args.push("--experimental-initial-corrupt-check".to_owned());
    args.push("--experimental-compact-hash-check-enabled".to_owned());
    args
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::consensus::MemberId;
    use polis_base::files::Root;
    use polis_wire::pki::Host;

    fn shown(pace: Pace, purpose: Purpose<'_>) -> String {
        let root = Root::live();
        let peer = Peer { host: Host::Name("polis-a".to_owned()), port: 7834 };
        let call = Call {
            name: "polis-a",
            tree: &root.data.etcd,
            sockets: &root.ephemeral.consensus,
            peer: &peer,
            listen: "0.0.0.0:7834".parse().unwrap(),
            quota: crate::consensus::QUOTA,
            pace,
            purpose,
        };
        arguments(&call).join("\n").replace("\n--", "\0--").replace('\n', " ").replace('\0', "\n")
    }

    #[test]
    fn a_new_cluster_has_no_port() {
        insta::assert_snapshot!(shown(Pace::Alone, Purpose::Found), @"
        --enable-grpc-gateway=false
        --name polis-a
        --data-dir /data/etcd/data
        --logger zap
        --log-outputs stderr
        --listen-client-urls unix:///ephemeral/consensus/client.sock
        --listen-client-http-urls unix:///ephemeral/consensus/http.sock
        --advertise-client-urls unix://polis-a:0
        --heartbeat-interval 50
        --election-timeout 250
        --quota-backend-bytes 2147483648
        --snapshot-count 1000
        --experimental-snapshot-catchup-entries 2000
        --auto-compaction-mode periodic
        --auto-compaction-retention 1h
        --experimental-bootstrap-defrag-threshold-megabytes 64
        --listen-peer-urls unix://nobody:0
        --initial-advertise-peer-urls https://polis-a:7834
        --initial-cluster polis-a=https://polis-a:7834
        --initial-cluster-state new
        --initial-cluster-token POLIS
        --unsafe-no-fsync
        ");
    }

    #[test]
    fn a_member_serves_its_peers_by_mutual_tls_only() {
        insta::assert_snapshot!(shown(Pace::Lan, Purpose::Serve), @"
        --enable-grpc-gateway=false
        --name polis-a
        --data-dir /data/etcd/data
        --logger zap
        --log-outputs stderr
        --listen-client-urls unix:///ephemeral/consensus/client.sock
        --listen-client-http-urls unix:///ephemeral/consensus/http.sock
        --advertise-client-urls unix://polis-a:0
        --heartbeat-interval 100
        --election-timeout 1000
        --quota-backend-bytes 2147483648
        --snapshot-count 1000
        --experimental-snapshot-catchup-entries 2000
        --auto-compaction-mode periodic
        --auto-compaction-retention 1h
        --experimental-bootstrap-defrag-threshold-megabytes 64
        --initial-advertise-peer-urls https://polis-a:7834
        --listen-peer-urls https://0.0.0.0:7834
        --peer-cert-file /data/etcd/peer_pki/cert.pem
        --peer-key-file /data/etcd/peer_pki/key.pem
        --peer-trusted-ca-file /data/etcd/peer_pki/ca.pem
        --peer-crl-file /data/etcd/peer.crl
        --peer-cert-allowed-hostname etcd-peer.polis.internal
        --tls-min-version TLS1.3
        --experimental-corrupt-check-time 1h
        --peer-client-cert-auth
        --experimental-peer-skip-client-san-verification
        --experimental-initial-corrupt-check
        --experimental-compact-hash-check-enabled
        ");
    }

    #[test]
    fn a_joining_member_names_every_member_and_itself() {
        let member = |id, name: &str, host: &str| Member {
            id: MemberId(id),
            name: name.to_owned(),
            peer_url: format!("https://{host}:7834"),
            learner: false,
        };
        let members = [member(1, "polis-b", "polis-b"), member(2, "", "polis-a")];
        let shown = shown(Pace::Lan, Purpose::Join(&members));
        assert!(
            shown.contains(
                "--initial-cluster polis-b=https://polis-b:7834,polis-a=https://polis-a:7834\n"
            ),
            "{shown}"
        );
        assert!(shown.contains("--initial-cluster-state existing\n"), "{shown}");
    }
}
