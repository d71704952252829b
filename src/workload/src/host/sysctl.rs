//! Kernel parameters of a node with a role of Kubernetes, as one table.
//!
//! [`plan`] is pure; [`apply`] writes it below `/proc/sys`, and leaves alone what has its
//! value already.
//!
//! Forwarding and router advertisements need care: the kernel ignores advertisements on an
//! interface that forwards unless `accept_ra` is 2, and `network` relies on them. So each
//! uplink gets 2 before forwarding is switched on, and every other interface 0: a pod that
//! sends advertisements must not become the router of its node.
//!
//! The table of connections belongs to a module of the kernel, which the first rule of nftables
//! that looks at connections loads: its bounds ([`of_connections`]) are set after the rules of the
//! mesh.
//!
//! Forwarding ends with the role of a worker, and later interfaces accept advertisements again
//! ([`without_forwarding`]); the other parameters stay.

use std::fs;
use std::io;
use std::path::Path;

/// No value has more bytes.
const VALUE_MAX: usize = 4096;

/// Parameters of every node with a role of Kubernetes, in order.
const EVERY: &[(&str, &str)] = &[
    // The node's own ports, and those of the API server: no outgoing connection takes one
    // before its server listens.
    ("net/ipv4/ip_local_reserved_ports", "6443-6445,7834-7843,10248-10250,10256-10259"),
];

/// The switches of forwarding, which are off in a kernel that has just started.
const FORWARD: &str = "net/ipv4/ip_forward";
const FORWARD_V6: &str = "net/ipv6/conf/all/forwarding";

/// What later interfaces begin with; 1 in a kernel that has just started.
const ACCEPT_RA: &str = "net/ipv6/conf/default/accept_ra";

/// Parameters of a worker, in order, after those of its uplinks.
const WORKER: &[(&str, &str)] = &[
    // Packets of pods are forwarded. `conf/default` is what interfaces of pods begin with.
    (ACCEPT_RA, "0"),
    (FORWARD, "1"),
    (FORWARD_V6, "1"),
    // The answer of a pod to a node port leaves by another interface than the question
    // came by; the strict check drops it. The kernel takes the larger of `all` and the
    // interface's own.
    ("net/ipv4/conf/all/rp_filter", "0"),
    ("net/ipv4/conf/default/rp_filter", "0"),
    // A node is the gateway of its pods, and must not send them elsewhere.
    ("net/ipv4/conf/all/send_redirects", "0"),
    ("net/ipv4/conf/default/send_redirects", "0"),
    // kubelet does not start unless the next six have these values; `panic` overrides the 30
    // seconds of the command line.
    ("vm/overcommit_memory", "1"),
    ("vm/panic_on_oom", "0"),
    ("kernel/panic", "10"),
    ("kernel/panic_on_oops", "1"),
    ("kernel/keys/root_maxkeys", "1000000"),
    ("kernel/keys/root_maxbytes", "25000000"),
    // Every container that follows a file takes one; the kernel's 128 are a few pods.
    ("fs/inotify/max_user_instances", "8192"),
    // One for each file or directory that a program follows, for all pods with the same user. The
    // kernel's own bound is smaller on a smaller machine, and never larger. The memory of each
    // counts for the pod that makes it.
    ("fs/inotify/max_user_watches", "1048576"),
    // Requests of asynchronous I/O on the whole machine: a few databases take the kernel's 65536.
    ("fs/aio-max-nr", "1048576"),
    // Open files of the whole machine. The kernel has some 100 for each MiB of memory, which one
    // pod could take from all others and from CoreDNS. The memory of each file counts for the pod
    // that opens it, and every process has a bound of its own.
    ("fs/file-max", "9223372036854775807"),
    // Neighbours on all links and in all network namespaces together: a pod and its node know each
    // other, and a node knows each machine on its network. The kernel drops packets to any further
    // one, by default from 1024 on, and forgets the unused ones above the second bound.
    ("net/ipv4/neigh/default/gc_thresh3", "16384"),
    ("net/ipv4/neigh/default/gc_thresh2", "8192"),
    ("net/ipv6/neigh/default/gc_thresh3", "16384"),
    ("net/ipv6/neigh/default/gc_thresh2", "8192"),
    // Search engines refuse to start with the kernel's 65530, and a pod without privileges cannot
    // raise it. The memory of each map counts for the pod that makes it.
    ("vm/max_map_count", "1048576"),
    // 250 pods of a thousand threads.
    ("kernel/pid_max", "262144"),
];

/// A connection in the table takes some 400 bytes with its bucket, so a full table takes 2.5 % of
/// the memory. The kernel itself never tracks more than this.
const MEMORY_A_CONNECTION: u64 = 16 << 10;
/// From 16 GiB of memory on, a full table takes 400 MiB. kube-proxy would stop at this number, too.
const CONNECTIONS_MAX: u64 = 1 << 20;
/// The kernel rounds the number of buckets up to whole pages, and reports the rounded one.
const BUCKETS_A_PAGE: u64 = 512;

/// One parameter as it should be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parameter {
    /// Its path below `/proc/sys`.
    pub name: String,
    /// Its value, without a line end.
    pub value: String,
}

impl Parameter {
    /// The parameter `name` with this value.
    pub fn new(name: impl Into<String>, value: &str) -> Self {
        Self { name: name.into(), value: value.to_owned() }
    }
}

/// A parameter that the kernel refused.
#[derive(Debug, thiserror::Error)]
#[error("cannot set the kernel parameter {name} to {value}")]
pub struct Refused {
    name: String,
    value: String,
    source: io::Error,
}

impl Refused {
    /// Whether the kernel does not have the parameter: it is built, or was started, without what
    /// the parameter is about.
    #[must_use]
    pub fn is_absent(&self) -> bool {
        self.source.kind() == io::ErrorKind::NotFound
    }
}

/// The parameters in the order in which they are set. `uplinks` are the interfaces that
/// lead out of the machine.
#[must_use]
pub fn plan(worker: bool, uplinks: &[String]) -> Vec<Parameter> {
    let table = |table: &[(&str, &str)]| -> Vec<Parameter> {
        table.iter().map(|(name, value)| Parameter::new(*name, value)).collect()
    };
    let mut parameters = table(EVERY);
    if worker {
        parameters.extend(of_uplinks(uplinks));
        parameters.extend(table(WORKER));
    }
    parameters
}

/// The parameters that change at the end of the role of a worker, in order: a card that is plugged
/// in later learns its router again.
#[must_use]
pub fn without_forwarding() -> Vec<Parameter> {
    [(FORWARD, "0"), (FORWARD_V6, "0"), (ACCEPT_RA, "1")]
        .map(|(name, value)| Parameter::new(name, value))
        .into()
}

/// The parameters of a worker's uplinks.
#[must_use]
pub fn of_uplinks(uplinks: &[String]) -> Vec<Parameter> {
    let of_one = |uplink: &String| {
        let of = |family: &str, name: &str| format!("net/{family}/conf/{uplink}/{name}");
        [
            Parameter::new(of("ipv6", "accept_ra"), "2"),
            // Loose: an address that no route leads back to is still a forgery.
            Parameter::new(of("ipv4", "rp_filter"), "2"),
            Parameter::new(of("ipv4", "send_redirects"), "0"),
        ]
    };
    uplinks.iter().flat_map(of_one).collect()
}

/// The bounds of the table of connections on a machine with `memory` bytes, in order: the kernel
/// drops the first packet of a connection that does not fit. One bucket for each connection, as the
/// kernel has it. Without a figure of the memory, the kernel's own bounds stay.
#[must_use]
pub fn of_connections(memory: u64) -> Vec<Parameter> {
    let count = (memory / MEMORY_A_CONNECTION).min(CONNECTIONS_MAX);
    let count = count / BUCKETS_A_PAGE * BUCKETS_A_PAGE;
    if count == 0 {
        return Vec::new();
    }
    ["net/netfilter/nf_conntrack_buckets", "net/netfilter/nf_conntrack_max"]
        .map(|name| Parameter::new(name, &count.to_string()))
        .into()
}

/// Sets them below `proc`, and returns those that the kernel refused. Blocks.
#[must_use]
pub fn apply(proc: &Path, parameters: &[Parameter]) -> Vec<Refused> {
    let base = proc.join("sys");
    let refused = parameters.iter().filter_map(|Parameter { name, value }| {
        let source = set(&base.join(name), value).err()?;
        Some(Refused { name: name.clone(), value: value.clone(), source })
    });
    refused.collect()
}

fn set(path: &Path, value: &str) -> io::Result<()> {
    if read(path)?.trim_end() == value {
        return Ok(());
    }
    fs::write(path, value)
}

/// The value of a parameter, in one read: of a list of ports, the kernel gives a second
/// read nothing, and `fs::read_to_string` begins with a small one.
fn read(path: &Path) -> io::Result<String> {
    let mut value = vec![0; VALUE_MAX];
    let length = io::Read::read(&mut fs::File::open(path)?, &mut value)?;
    value.truncate(length);
    Ok(String::from_utf8_lossy(&value).into_owned())
}

/// The interfaces that lead out of the machine, of those below `class`, in order: cards, bonds and
/// VLANs. An interface whose name would leave its directory is left out.
#[must_use]
pub fn uplinks(class: &Path) -> Vec<String> {
    let entries = fs::read_dir(class).into_iter().flatten().flatten();
    let names = entries.filter(|entry| leads_out(&entry.path())).filter_map(|entry| {
        let name = entry.file_name().into_string().ok()?;
        // A dot in a path below `/proc/sys` is a dot of the name.
        (!name.contains('/') && !name.starts_with('.')).then_some(name)
    });
    let mut names: Vec<_> = names.collect();
    names.sort();
    names
}

/// Only hardware has a device. A bond and a VLAN have none, and the kernel announces them by their
/// kind; interfaces of pods and the mesh are of another kind, or of none.
fn leads_out(interface: &Path) -> bool {
    let announced = fs::read_to_string(interface.join("uevent")).unwrap_or_default();
    let link = |line: &str| matches!(line, "DEVTYPE=bond" | "DEVTYPE=vlan");
    interface.join("device").exists() || announced.lines().any(link)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(parameters: &[Parameter]) -> String {
        let lines: Vec<_> =
            parameters.iter().map(|it| format!("{} = {}", it.name, it.value)).collect();
        lines.join("\n")
    }

    #[test]
    fn a_controller_forwards_nothing() {
        insta::assert_snapshot!(
            shown(&plan(false, &["eth0".to_owned()])),
            @"net/ipv4/ip_local_reserved_ports = 6443-6445,7834-7843,10248-10250,10256-10259"
        );
    }

    #[test]
    fn a_worker_forwards_and_keeps_hearing_its_router() {
        insta::assert_snapshot!(shown(&plan(true, &["eth0".to_owned()])), @r"
        net/ipv4/ip_local_reserved_ports = 6443-6445,7834-7843,10248-10250,10256-10259
        net/ipv6/conf/eth0/accept_ra = 2
        net/ipv4/conf/eth0/rp_filter = 2
        net/ipv4/conf/eth0/send_redirects = 0
        net/ipv6/conf/default/accept_ra = 0
        net/ipv4/ip_forward = 1
        net/ipv6/conf/all/forwarding = 1
        net/ipv4/conf/all/rp_filter = 0
        net/ipv4/conf/default/rp_filter = 0
        net/ipv4/conf/all/send_redirects = 0
        net/ipv4/conf/default/send_redirects = 0
        vm/overcommit_memory = 1
        vm/panic_on_oom = 0
        kernel/panic = 10
        kernel/panic_on_oops = 1
        kernel/keys/root_maxkeys = 1000000
        kernel/keys/root_maxbytes = 25000000
        fs/inotify/max_user_instances = 8192
        fs/inotify/max_user_watches = 1048576
        fs/aio-max-nr = 1048576
        fs/file-max = 9223372036854775807
        net/ipv4/neigh/default/gc_thresh3 = 16384
        net/ipv4/neigh/default/gc_thresh2 = 8192
        net/ipv6/neigh/default/gc_thresh3 = 16384
        net/ipv6/neigh/default/gc_thresh2 = 8192
        vm/max_map_count = 1048576
        kernel/pid_max = 262144
        ");
    }

    #[test]
    fn the_table_of_connections_grows_with_the_memory() {
        let of = |memory| shown(&of_connections(memory));
        // Whole pages of buckets: 61,035 connections would be read back as another number.
        insta::assert_snapshot!(of(1_000_000_000), @r"
        net/netfilter/nf_conntrack_buckets = 60928
        net/netfilter/nf_conntrack_max = 60928
        ");
        insta::assert_snapshot!(of(1 << 40), @r"
        net/netfilter/nf_conntrack_buckets = 1048576
        net/netfilter/nf_conntrack_max = 1048576
        ");
        assert_eq!(of(0), "");
    }

    #[test]
    fn more_connections_fit_than_in_the_kernel_s_own_table_and_take_a_fortieth_of_the_memory() {
        // What the kernel chooses by itself, just above the sizes at which it chooses more.
        let machines = [
            (512_u64 << 20, 4096_u64),
            ((1 << 30) + 4096, 65_536),
            ((4 << 30) + 4096, 262_144),
            (64 << 30, 262_144),
        ];
        for (memory, kernel) in machines {
            for parameter in of_connections(memory) {
                let count: u64 = parameter.value.parse().unwrap();
                assert!(count >= kernel, "{memory}: {}", parameter.name);
                assert!(count * 400 <= memory / 40, "{memory}: {}", parameter.name);
            }
            assert_eq!(of_connections(memory).len(), 2, "{memory}");
        }
    }

    #[test]
    fn an_uplink_accepts_advertisements_before_the_kernel_forwards() {
        let uplinks = ["eth0", "eth1"].map(str::to_owned);
        let plan = plan(true, &uplinks);
        let at = |name: &str| plan.iter().position(|it| it.name == name).unwrap();
        for uplink in uplinks {
            let accepts = at(&format!("net/ipv6/conf/{uplink}/accept_ra"));
            assert!(accepts < at("net/ipv6/conf/all/forwarding"), "{uplink}");
        }
    }

    #[test]
    fn what_is_set_already_is_left_alone_and_a_refusal_is_named() {
        let proc = tempfile::tempdir().unwrap();
        let keys = proc.path().join("sys/kernel");
        fs::create_dir_all(&keys).unwrap();
        fs::write(keys.join("panic"), "10\n").unwrap();
        fs::write(keys.join("pid_max"), "32768\n").unwrap();
        let parameters = [
            Parameter::new("kernel/panic", "10"),
            Parameter::new("kernel/pid_max", "262144"),
            Parameter::new("kernel/absent", "1"),
        ];
        let refused = apply(proc.path(), &parameters);
        assert!(refused.iter().all(Refused::is_absent));
        let refused: Vec<_> = refused.iter().map(ToString::to_string).collect();
        assert_eq!(refused, ["cannot set the kernel parameter kernel/absent to 1"]);
        let text = |name: &str| fs::read_to_string(keys.join(name)).unwrap();
        // The line end shows that it was not written.
        assert_eq!((text("panic").as_str(), text("pid_max").as_str()), ("10\n", "262144"));
    }

    #[test]
    fn the_end_of_the_role_switches_forwarding_off_and_lets_later_interfaces_learn_routers() {
        let mut switches = plan(true, &[]);
        switches.retain(|it| it.name.contains("forward"));
        assert!(!switches.is_empty() && switches.iter().all(|it| it.value == "1"));
        let off = switches.into_iter().map(|it| Parameter { value: "0".to_owned(), ..it });
        let mut expected: Vec<_> = off.collect();
        expected.push(Parameter::new("net/ipv6/conf/default/accept_ra", "1"));
        assert_eq!(without_forwarding(), expected);
    }

    #[test]
    fn cards_bonds_and_vlans_lead_out_of_the_machine_and_nothing_else_does() {
        let class = tempfile::tempdir().unwrap();
        let kinds = [
            ("eth1", ""),
            ("eth0", ""),
            ("bond0", "DEVTYPE=bond\n"),
            ("bond0.7", "DEVTYPE=vlan\n"),
            ("cni0", "DEVTYPE=bridge\n"),
            ("polis0", "DEVTYPE=wireguard\n"),
            ("veth1", ""),
            ("lo", ""),
        ];
        for (name, kind) in kinds {
            let interface = class.path().join(name);
            fs::create_dir(&interface).unwrap();
            let announced = format!("{kind}INTERFACE={name}\nIFINDEX=7\n");
            fs::write(interface.join("uevent"), announced).unwrap();
        }
        for name in ["eth0", "eth1"] {
            fs::create_dir(class.path().join(name).join("device")).unwrap();
        }
        // A file of the module of bonds, which is no interface.
        fs::write(class.path().join("bonding_masters"), "bond0\n").unwrap();
        assert_eq!(uplinks(class.path()), ["bond0", "bond0.7", "eth0", "eth1"]);
        assert!(uplinks(Path::new("/nowhere")).is_empty());
    }
}
