//! The configuration files of a worker's programs. Pure.

use std::fmt::Write as _;
use std::net::{IpAddr, Ipv4Addr};
use std::path::Path;

use serde_json::{Value, json};

use crate::mesh::{self, Prefix};
use crate::site::Site;
use polis_base::files::{self, Kubernetes, Pair};
use polis_runtime::sys::cgroup::Group;
use polis_wire::identity::NodeId;
use polis_wire::node_roles::{RESERVED_CONTROLLER, RESERVED_SYSTEM, RESERVED_WORKER};
use polis_wire::pki::WorkerPurpose;

/// Where kubelet answers for its health, on loopback.
pub(super) const KUBELET_HEALTH: u16 = 10248;
/// Where kube-proxy answers for its health and its metrics, on loopback.
pub(super) const PROXY_HEALTH: u16 = 10256;
const PROXY_METRICS: u16 = 10249;
/// Where CoreDNS answers for its health and its readiness, on loopback.
pub(super) const DNS_HEALTH: u16 = 7841;
pub(super) const DNS_READY: u16 = 7842;
/// Where the program that enforces NetworkPolicies answers for its health, on loopback.
pub(super) const POLICY_HEALTH: u16 = 7843;

/// The address of the name server in every pod: link-local, so that it is the same on every
/// node and never leaves one.
pub(super) const DNS_ADDRESS: Ipv4Addr = Ipv4Addr::new(169, 254, 77, 53);

/// Name servers of the node that CoreDNS asks: it does not start with more. The routers of a
/// network with several links advertise more of them.
const SERVERS_MAX: usize = 15;

/// Questions for the node's name servers that wait at once; the next one is refused. A pod that
/// asks without end would otherwise fill the memory of the node while these do not answer.
const FORWARDED_MAX: u32 = 1000;

/// The errors of questions that the node's name servers do not answer, also where they refuse the
/// connection or cannot be reached: the text of the kernel comes last. While they are down, each
/// question of each pod is one: the first is logged, and then their number.
const UNANSWERED: &str = "(i/o timeout|connection refused|no route to host|network is unreachable)$\
                          |^concurrent queries exceeded maximum";

/// Images that kubelet pulls at once. Each takes memory of containerd, which no limit of a pod
/// counts, and each of its layers flushes the disk that etcd is on.
const PULLS_MAX: u32 = 8;

/// Pods on one node: a prefix has 253 addresses for them.
const PODS_MAX: u32 = 250;

/// Processes of one pod: a bomb in it leaves the node's own numbers alone.
const PROCESSES_MAX: u32 = 4096;

/// Numbers of processes that pods together never get: the kernel's own threads, and those of
/// the node, etcd, containerd and Kubernetes.
const PROCESSES_RESERVED: &str = "2048";
/// Less than this is left: pods are evicted, before the last number of theirs is taken. On a
/// machine of 1 GiB, which has some 8,000 numbers, the two meet.
const PROCESSES_FREE: &str = "20%";

/// Less than this of the quota of workloads is left for so long: pods are evicted.
const DISK_FREE: &str = "5%";
const DISK_GRACE: &str = "30s";
/// Between two looks at the volume of a pod; kubelet takes up to twice as long.
const VOLUMES_LOOK: &str = "10s";
/// Seconds that an evicted pod has to end, if it asks for more.
const EVICTED_GRACE_S: u32 = 10;

/// The signals of a full disk, each with this value. Images and the volumes of pods are on
/// one file system.
fn disk(value: &str) -> Value {
    json!({
        "nodefs.available": value,
        "nodefs.inodesFree": value,
        "imagefs.available": value,
        "imagefs.inodesFree": value,
    })
}

/// kubelet's own file, on a node that is a controller, too, or not. kubelet registers its Node with
/// these taints.
pub(super) fn kubelet(
    site: &Site,
    tree: &files::Root,
    controller: bool,
    taints: &[Value],
) -> Vec<u8> {
    let reserved = RESERVED_WORKER + if controller { RESERVED_CONTROLLER } else { 0 };
    let pair = pair(&site.data, WorkerPurpose::KubeletServer);
    let socket = tree.ephemeral.containerd.client();
    let mut file = json!({
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {
            "anonymous": {"enabled": false},
            "webhook": {"enabled": true},
            "x509": {"clientCAFile": site.run.worker_ca.path()},
        },
        "authorization": {"mode": "Webhook"},
        "readOnlyPort": 0,
        "healthzBindAddress": site.loopback,
        "healthzPort": KUBELET_HEALTH,
        "tlsCertFile": pair.certificate.path(),
        "tlsPrivateKeyFile": pair.key.path(),
        "tlsMinVersion": "VersionTLS13",
        // The node renews them.
        "rotateCertificates": false,
        "containerRuntimeEndpoint": format!("unix://{}", socket.display()),
        "cgroupRoot": "/",
        "kubeletCgroups": format!("/{}", Group::Kubelet.name()),
        "clusterDNS": [DNS_ADDRESS],
        "clusterDomain": site.domain(),
        "resolvConf": "/etc/resolv.conf",
        "podLogsDir": "/var/log/pods",
        "volumePluginDir": "/var/lib/kubelet/flexvolume",
        // kube-proxy has its own tables, and a bridge does not exist.
        "makeIPTablesUtilChains": false,
        "hairpinMode": "none",
        "failSwapOn": false,
        // The node has set them before (`host`).
        "protectKernelDefaults": true,
        // Profiles and log levels of kubelet itself; its logs and `exec` are other handlers.
        "enableProfilingHandler": false,
        "enableDebugFlagsHandler": false,
        "enableControllerAttachDetach": true,
        "serializeImagePulls": false,
        "maxParallelImagePulls": PULLS_MAX,
        "maxPods": PODS_MAX,
        "podPidsLimit": PROCESSES_MAX,
        // Containers that ask for no profile get the runtime's own.
        "seccompDefault": true,
        "oomScoreAdj": -999,
        "kubeReserved": {"cpu": "200m", "memory": format!("{reserved}Mi")},
        "systemReserved": {"memory": format!("{RESERVED_SYSTEM}Mi"), "pid": PROCESSES_RESERVED},
        "enforceNodeAllocatable": ["pods"],
        // To set one of these drops all defaults.
        "evictionHard": {
            "memory.available": "100Mi",
            "pid.available": PROCESSES_FREE,
        },
        // Not at once: kubelet evicts the pod that it knows to have the most, so it has to
        // look at their volumes first. The quota holds meanwhile.
        "evictionSoft": disk(DISK_FREE),
        "evictionSoftGracePeriod": disk(DISK_GRACE),
        "evictionMaxPodGracePeriod": EVICTED_GRACE_S,
        "volumeStatsAggPeriod": VOLUMES_LOOK,
        "imageGCHighThresholdPercent": 90,
        "imageGCLowThresholdPercent": 80,
        // It would need a service that the system does not have; the node ends pods itself.
        "shutdownGracePeriod": "0s",
    });
    // Once in the life of the Node: the reconciler keeps them (`taints`).
    file["registerWithTaints"] = json!(taints);
    bytes(&file)
}

/// kube-proxy's own file.
pub(super) fn kube_proxy(site: &Site, node: NodeId) -> Vec<u8> {
    bytes(&json!({
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": "nftables",
        "clientConnection": {"kubeconfig": site.run.kube_proxy.path()},
        "hostnameOverride": node.to_string(),
        "clusterCIDR": site.networks.pods.to_string(),
        "detectLocalMode": "ClusterCIDR",
        "healthzBindAddress": site.loopback_port(PROXY_HEALTH).to_string(),
        "metricsBindAddress": site.loopback_port(PROXY_METRICS).to_string(),
        "nodePortAddresses": ["primary"],
        // The node sets the bounds, by the memory of the machine (`host::sysctl`).
        "conntrack": {"maxPerCore": 0, "min": 0},
        "nftables": {"minSyncPeriod": "1s", "syncPeriod": "30s"},
    }))
}

/// The file of the name server; `servers` answer what is not of the cluster, the best first.
pub(super) fn corefile(site: &Site, servers: &[IpAddr]) -> String {
    let mut text = format!(
        ".:53 {{\n    \
         bind {DNS_ADDRESS}\n    \
         errors {{\n        \
         consolidate 10s \"{UNANSWERED}\" warning show_first\n    \
         }}\n    \
         health {health}\n    \
         ready {ready}\n    \
         kubernetes {domain} in-addr.arpa ip6.arpa {{\n        \
         kubeconfig {kubeconfig}\n        \
         pods verified\n        \
         ttl 5\n        \
         startup_timeout 10s\n        \
         fallthrough in-addr.arpa ip6.arpa\n    \
         }}\n",
        health = site.loopback_port(DNS_HEALTH),
        ready = site.loopback_port(DNS_READY),
        domain = site.domain(),
        kubeconfig = site.run.dns.path().display(),
    );
    // If the network named this address, CoreDNS would ask itself, and `loop` would end it.
    let others = servers.iter().filter(|server| **server != DNS_ADDRESS);
    let servers: Vec<_> = others.take(SERVERS_MAX).map(ToString::to_string).collect();
    // Without a server to ask, `forward` is an error, and `loop` has nothing to look for.
    if !servers.is_empty() {
        // The best is asked first, as the node does: another one may know fewer names.
        let _infallible = writeln!(
            text,
            "    forward . {} {{\n        policy sequential\n        \
             max_concurrent {FORWARDED_MAX}\n    }}\n    loop",
            servers.join(" "),
        );
    }
    // Clients take the first address: those of a headless Service are in random order.
    text.push_str("    loadbalance\n    cache 30\n    reload 5s\n}\n");
    text
}

/// The network of this node's pods, for containerd; `state` is where addresses are booked.
pub(super) fn pod_network(prefix: Prefix, state: &Path) -> Vec<u8> {
    let first = Ipv4Addr::from_bits(prefix.gateway().to_bits().saturating_add(1));
    let range = json!({"subnet": prefix.to_string(), "rangeStart": first});
    bytes(&json!({
        "cniVersion": "1.0.0",
        "name": "polis",
        "plugins": [
            {
                "type": "ptp",
                "mtu": mesh::MTU,
                // The table of the mesh does that, for packets that leave the cluster.
                "ipMasq": false,
                "ipam": {
                    "type": "host-local",
                    "dataDir": state,
                    "ranges": [[range]],
                    "routes": [{"dst": "0.0.0.0/0"}],
                },
            },
            {
                "type": "portmap",
                "backend": "nftables",
                "capabilities": {"portMappings": true},
                // The address of the name server is local to the node: without this, a pod with
                // the HostPort 53 would get the questions of all pods of the node.
                "conditionsV4": ["ip", "daddr", "!=", DNS_ADDRESS],
                "snat": true,
            },
        ],
    }))
}

/// JSON, indented.
fn bytes(value: &Value) -> Vec<u8> {
    format!("{value:#}\n").into_bytes()
}

/// The files of a certificate, for the one program that reads them.
pub(crate) fn pair(data: &Kubernetes, purpose: WorkerPurpose) -> Pair {
    let group = match purpose {
        // kubelet is root, and the driver is in this process.
        WorkerPurpose::Kubelet | WorkerPurpose::KubeletServer | WorkerPurpose::Csi => {
            files::Group::Root
        }
        WorkerPurpose::KubeProxy => files::Group::KubeProxy,
        WorkerPurpose::Dns => files::Group::CoreDns,
        WorkerPurpose::Policy => files::Group::Policy,
    };
    data.pair(purpose.name(), group)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::site::{live, with_networks};

    fn text(bytes: &[u8]) -> String {
        String::from_utf8(bytes.to_vec()).unwrap()
    }

    #[test]
    fn kubelet_serves_only_callers_that_the_api_server_permits() {
        let file = |controller| text(&kubelet(&live(), &files::Root::live(), controller, &[]));
        let worker = file(false);
        assert!(!worker.contains("failCgroupV1"), "{worker}");
        assert_eq!(file(true), worker.replace("400Mi", "1100Mi"));
        insta::assert_snapshot!(worker);
    }

    #[test]
    fn kubelet_registers_its_node_with_the_taints_of_the_record() {
        let taint = json!({"key": "gpu", "value": "", "effect": "NoSchedule"});
        let file = kubelet(&live(), &files::Root::live(), false, std::slice::from_ref(&taint));
        let file: Value = serde_json::from_slice(&file).unwrap();
        assert_eq!(file["registerWithTaints"], json!([taint]));
    }

    #[test]
    fn kube_proxy_uses_nftables() {
        let node = NodeId::from_public_key(&[7; 32]);
        let text = text(&kube_proxy(&live(), node)).replace(&node.to_string(), "NODE");
        let own = self::text(&kube_proxy(&with_networks(), node));
        assert!(own.contains(r#""clusterCIDR": "172.16.0.0/13""#), "{own}");
        insta::assert_snapshot!(text);
    }

    #[test]
    fn a_name_server_forwards_where_there_is_a_server() {
        let servers = ["192.0.2.53".parse().unwrap(), "2001:db8::53".parse().unwrap()];
        insta::assert_snapshot!(corefile(&live(), &servers));
        let itself = [IpAddr::from(DNS_ADDRESS)];
        for none in [&itself[..0], &itself[..]] {
            let alone = corefile(&live(), none);
            assert!(!alone.contains("forward .") && !alone.contains("loop"), "{alone}");
        }
    }

    #[test]
    fn a_name_server_starts_however_many_servers_a_network_has() {
        let servers: Vec<_> = (1..=40_u8).map(|host| IpAddr::from([192, 0, 2, host])).collect();
        let text = corefile(&live(), &servers);
        let asked = text.lines().find_map(|line| line.trim().strip_prefix("forward . ")).unwrap();
        let asked: Vec<_> = asked.trim_end_matches(" {").split(' ').collect();
        assert_eq!(asked.len(), SERVERS_MAX);
        assert_eq!((asked[0], asked[14]), ("192.0.2.1", "192.0.2.15"));
    }

    #[test]
    fn pods_have_the_addresses_after_that_of_their_node() {
        let prefix = "10.192.3.0/24".parse().unwrap();
        insta::assert_snapshot!(text(&pod_network(prefix, Path::new("/ephemeral/cni/ipam"))));
    }

    #[test]
    fn a_pod_with_a_port_of_the_node_gets_no_question_for_the_name_server() {
        let file = pod_network("10.192.3.0/24".parse().unwrap(), Path::new("/ephemeral/cni/ipam"));
        let file: Value = serde_json::from_slice(&file).unwrap();
        let portmap = &file["plugins"][1];
        assert_eq!(portmap["backend"], "nftables", "the condition is in the words of nftables");
        assert_eq!(portmap["conditionsV4"], json!(["ip", "daddr", "!=", "169.254.77.53"]));
    }
}
