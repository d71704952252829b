//! The configuration of containerd, as text. Pure: derived from the tree of the node.
//!
//! What this module does not do: touch files or processes (`service`); configure gVisor
//! itself (`gvisor`).

use std::fmt;
use std::path::Path;

use super::gvisor;
use polis_base::files::Root;
use polis_runtime::sys::cgroup::Group;
use polis_wire::parameters::Proxy;

/// The image of the pause container of every pod.
pub const PAUSE: &str = "polis.internal/pause:1";

/// Where containerd keeps images, and what it knows of running containers.
const ROOT: &str = "/var/lib/containerd";
const STATE: &str = crate::host::mounts::CONTAINERS;

/// Between two looks of containerd at the counters of all containers; its default is a second.
const STATISTICS: &str = "10s";

/// Plugins without a use here: other snapshotters want devices or kernels of their own,
/// traces go nowhere, and `opt` wants to write to the system.
const DISABLED: [&str; 11] = [
    "io.containerd.differ.v1.erofs",
    "io.containerd.image-verifier.v1.bindir",
    "io.containerd.internal.v1.opt",
    "io.containerd.internal.v1.tracing",
    "io.containerd.mount-handler.v1.erofs",
    "io.containerd.snapshotter.v1.blockfile",
    "io.containerd.snapshotter.v1.devmapper",
    "io.containerd.snapshotter.v1.erofs",
    "io.containerd.snapshotter.v1.zfs",
    "io.containerd.tracing.processor.v1.otlp",
    "io.containerd.ttrpc.v1.otelttrpc",
];

/// A text as a string of TOML.
struct Quoted<T>(T);

impl<T: fmt::Display> fmt::Display for Quoted<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = self.0.to_string().replace('\\', r"\\").replace('"', "\\\"");
        write!(f, "\"{text}\"")
    }
}

fn path(path: &Path) -> Quoted<std::path::Display<'_>> {
    Quoted(path.display())
}

/// Whether this machine runs containers of gVisor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gvisor {
    /// containerd has the handler.
    Here,
    /// The machine lacks something for it.
    Lacking,
}

/// `config.toml` of containerd, for a node with this tree, and with this configuration of
/// gVisor's shim.
#[must_use]
pub fn containerd(tree: &Root, shim: &Path, gvisor: Gvisor) -> String {
    let mut parts = vec![main_part(tree), images(tree), runtime(tree)];
    if gvisor == Gvisor::Here {
        parts.push(handler(shim));
    }
    parts.join("\n")
}

/// Everything but the container runtime interface.
fn main_part(tree: &Root) -> String {
    let disabled: Vec<_> = DISABLED.iter().map(|name| format!("  {},\n", Quoted(name))).collect();
    let socket = tree.ephemeral.containerd.client();
    // A shim under load answers late, and is not dead: the defaults of 2 to 5 seconds lose
    // pods on a busy machine.
    format!(
        r#"version = 4
root = {root}
state = {state}
oom_score = -999
required_plugins = ["io.containerd.grpc.v1.cri"]
disabled_plugins = [
{disabled}]

[debug]
format = "json"

[timeouts]
"io.containerd.timeout.shim.load" = "60s"
"io.containerd.timeout.shim.cleanup" = "60s"
"io.containerd.timeout.shim.shutdown" = "20s"
"io.containerd.timeout.task.state" = "20s"

[plugins."io.containerd.server.v1.grpc"]
address = {socket}

[plugins."io.containerd.server.v1.ttrpc"]
address = {shims}

[plugins."io.containerd.nri.v1.nri"]
disable = true
"#,
        root = Quoted(ROOT),
        state = Quoted(STATE),
        disabled = disabled.concat(),
        socket = path(socket),
        shims = Quoted(format!("{}.ttrpc", socket.display())),
    )
}

/// Images, and where they come from.
///
/// containerd writes down that a layer is whole as soon as it is unpacked, and believes it for
/// ever. Both ways of unpacking, after a pull and before a first container, therefore flush the
/// file system before: a power cut would leave empty files in a layer that counts as whole.
///
/// The compressed form of a layer is deleted once the layer is unpacked: nothing on a node reads it
/// again, and it counts in the quota of workloads.
///
/// What a container writes into its own layer ends with it, so the kernel mounts that layer
/// `volatile`. Without the option, each unmount flushes the whole file system, on which etcd is,
/// too. containerd gives the end of a container ten seconds and, where it takes longer, tries again
/// after pauses that double. Layers of images are unpacked without such a mount.
fn images(tree: &Root) -> String {
    format!(
        r#"[plugins."io.containerd.service.v1.diff-service"]
sync_fs = true

[plugins."io.containerd.snapshotter.v1.overlayfs"]
mount_options = ["volatile"]

[plugins."io.containerd.cri.v1.images"]
snapshotter = "overlayfs"
use_local_image_pull = true
image_pull_with_sync_fs = true
discard_unpacked_layers = true

[plugins."io.containerd.cri.v1.images".pinned_images]
sandbox = {pause}

[plugins."io.containerd.cri.v1.images".registry]
config_path = {registries}
"#,
        pause = Quoted(PAUSE),
        registries = path(tree.ephemeral.registries.path()),
    )
}

/// Containers, and their network.
///
/// containerd asks the shim of each container for its counters all the time, for the rate of its
/// processor time, and the shim of gVisor starts a `runsc` for each answer. kubelet measures rates
/// by itself, every ten seconds.
fn runtime(tree: &Root) -> String {
    // The image starts its kernel without AppArmor; another kernel's would lack the program
    // that loads profiles.
    format!(
        r#"[plugins."io.containerd.cri.v1.runtime"]
disable_apparmor = true
enable_unprivileged_ports = true
enable_unprivileged_icmp = true
ignore_image_defined_volumes = true
netns_mounts_under_state_dir = true
device_ownership_from_security_context = true
enable_criu = false
stats_collect_period = {statistics}

[plugins."io.containerd.cri.v1.runtime".containerd]
default_runtime_name = "runc"

[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"

[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc.options]
BinaryName = "/usr/bin/runc"
SystemdCgroup = false
ShimCgroup = {shim}

[plugins."io.containerd.cri.v1.runtime".cni]
bin_dirs = ["/usr/lib/cni"]
conf_dir = {network}
use_internal_loopback = true

[plugins."io.containerd.grpc.v1.cri"]
stream_server_address = "127.0.0.1"
"#,
        statistics = Quoted(STATISTICS),
        shim = Quoted(format!("/{}", Group::Shim.name())),
        network = path(tree.ephemeral.pod_network.path()),
    )
}

/// The handler of gVisor.
fn handler(shim: &Path) -> String {
    format!(
        r#"[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.{handler}]
runtime_type = "io.containerd.runsc.v1"

[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.{handler}.options]
TypeUrl = "io.containerd.runsc.v1.options"
ConfigPath = {config}
"#,
        handler = gvisor::HANDLER,
        config = path(shim),
    )
}

/// The only variables in containerd's environment. Its children find `runc`, the shims and
/// `nft` by the first. Pulls of images go through the proxy; containers do not get the variables.
#[must_use]
pub fn environment(tree: &Root, proxy: Option<&Proxy>) -> Vec<(&'static str, String)> {
    let scratch = tree.ephemeral.containerd_scratch.path().display().to_string();
    let mut variables = vec![("PATH", "/usr/bin:/usr/sbin".to_owned()), ("TMPDIR", scratch)];
    if let Some(proxy) = proxy {
        variables.push(("HTTP_PROXY", proxy.url()));
        variables.push(("HTTPS_PROXY", proxy.url()));
        variables.push(("NO_PROXY", proxy.direct().join(",")));
    }
    variables
}

#[cfg(test)]
mod tests {
    use polis_proto::v1;

    use super::*;

    #[test]
    fn the_configuration_of_a_node() {
        let shim = Path::new(gvisor::CONFIGURATION);
        insta::assert_snapshot!(containerd(&Root::live(), shim, Gvisor::Here));
    }

    #[test]
    fn containers_are_not_asked_for_their_counters_every_second() {
        let text = runtime(&Root::live());
        assert!(text.contains("stats_collect_period = \"10s\"\n"), "{text}");
    }

    #[test]
    fn an_image_is_kept_in_one_form() {
        let text = images(&Root::live());
        // containerd's transfer service, the other way to pull, discards no layer.
        for setting in ["use_local_image_pull = true\n", "discard_unpacked_layers = true\n"] {
            assert!(text.contains(setting), "{text}");
        }
    }

    #[test]
    fn the_end_of_a_container_flushes_no_disk_and_an_unpacked_layer_does() {
        let text = images(&Root::live());
        let overlay = "[plugins.\"io.containerd.snapshotter.v1.overlayfs\"]\n";
        let volatile = format!("{overlay}mount_options = [\"volatile\"]\n");
        let settings = [&*volatile, "\nsync_fs = true\n", "image_pull_with_sync_fs = true\n"];
        for setting in settings {
            assert!(text.contains(setting), "{text}");
        }
    }

    #[test]
    fn a_machine_without_gvisor_has_no_handler_of_it() {
        let text = containerd(&Root::live(), Path::new("/shim"), Gvisor::Lacking);
        assert!(text.contains("runtimes.runc]") && !text.contains(gvisor::HANDLER), "{text}");
    }

    #[test]
    fn a_text_cannot_leave_its_quotes() {
        assert_eq!(Quoted(r#"a"b\c"#).to_string(), r#""a\"b\\c""#);
    }

    #[test]
    fn programs_are_found_by_their_path_only() {
        let variables = environment(&Root::live(), None);
        let path = ("PATH", "/usr/bin:/usr/sbin".to_owned());
        assert_eq!(variables, [path, ("TMPDIR", "/ephemeral/containerd/tmp".to_owned())]);
    }

    #[test]
    fn pulls_go_through_the_proxy_but_for_the_cluster_itself() {
        let message = v1::ProxyConfiguration {
            url: "http://proxy.example:3128".to_owned(),
            direct: vec!["registry.example".to_owned(), "192.0.2.0/24".to_owned()],
            own: vec!["cluster.internal".to_owned(), "10.192.0.0/11".to_owned()],
        };
        let proxy = polis_wire::parameters::proxy(&message, "proxy").unwrap().unwrap();
        let variables = environment(&Root::live(), Some(&proxy));
        let direct = "localhost,127.0.0.0/8,::1/128,cluster.local,cluster.internal,10.192.0.0/11,\
                      registry.example,192.0.2.0/24";
        let expected = [
            ("HTTP_PROXY", "http://proxy.example:3128"),
            ("HTTPS_PROXY", "http://proxy.example:3128"),
            ("NO_PROXY", direct),
        ];
        assert_eq!(variables[2..], expected.map(|(name, value)| (name, value.to_owned())));
    }
}
