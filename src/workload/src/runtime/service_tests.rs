//! The service without a containerd: before the first one, and after one has died.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::sync::Arc;

use super::super::config;
use super::super::daemon::write_files;
use super::super::gvisor;
use super::*;
use polis_base::files;
use polis_runtime::supervisor;
use polis_runtime::sys::cgroup::Group;

/// Everything below `base`.
fn config(base: &Path) -> Config {
    let tree = files::Root::at(base);
    Config {
        binary: base.join("containerd"),
        gvisor: files::File::public(base.join("runsc/config.toml")),
        host: host::Config {
            cgroup: base.join("cgroup"),
            proc: base.join("proc"),
            interfaces: base.join("net"),
            root: base.join("root"),
            nft: base.join("nft"),
            tree: tree.clone(),
        },
        ..Config::live(&tree)
    }
}

/// The service of a node with these roles below `base`, and what keeps its inputs open.
struct Bench {
    service: Service,
    _cluster: watch::Sender<cluster::Status>,
    given: watch::Sender<Option<v1::NodeRoles>>,
    storage: watch::Sender<storage::Status>,
    workload: watch::Sender<crate::Status>,
    network: watch::Sender<network::Status>,
    _proxy: watch::Sender<Option<Proxy>>,
}

impl Bench {
    fn new(base: &std::path::Path) -> Self {
        let member = cluster::Status { state: cluster::State::Home, ..cluster::Status::default() };
        let (_cluster, cluster) = watch::channel(member);
        let (given, roles) = watch::channel(None);
        let (storage, mounted) = watch::channel(storage::Status::Starting);
        let config = config(base);
        let status = watch::Sender::default();
        let pods = watch::Sender::default();
        let (workload, parts) = watch::channel(crate::Status::default());
        let (network, links) = watch::channel(network::Status::default());
        let (_proxy, proxy) = watch::channel(None);
        let service = Service {
            config,
            cluster,
            roles,
            storage: mounted,
            workload: parts,
            network: links,
            proxy,
            status,
            pods,
        };
        Self { service, _cluster, given, storage, workload, network, _proxy }
    }

    /// As an earlier containerd has left the machine: it was prepared, and a pod and its shim
    /// run. The groups stay populated, as those of processes that ignore SIGTERM.
    fn leave_pods(&self) {
        write_files(&self.service.config, config::Gvisor::Here).unwrap();
        for group in ["kubepods", Group::Shim.name()] {
            let group = self.service.config.host.cgroup.join(group);
            fs::create_dir_all(&group).unwrap();
            fs::write(group.join("cgroup.events"), "populated 1\n").unwrap();
        }
    }

    /// Whether the kernel was asked to kill what [`Self::leave_pods`] has left.
    fn have_ended(&self) -> bool {
        ["kubepods", Group::Shim.name()].into_iter().all(|group| {
            let file = self.service.config.host.cgroup.join(group).join("cgroup.kill");
            fs::read_to_string(file).is_ok_and(|text| text == "1")
        })
    }

    fn give(&self, roles: &[Role]) {
        self.given.send_replace(Some(Role::record(roles)));
    }

    fn make_worker(&self) {
        self.give(&[Role::KubernetesWorker]);
        let ready = storage::Ready {
            root: self.service.config.tree.clone(),
            kind: storage::Kind::Insecure,
            partition: uuid::Uuid::nil(),
            device: "/dev/vda3".into(),
            size: 8 << 30,
        };
        self.storage.send_replace(storage::Status::Ready(Arc::new(ready)));
    }
}

#[tokio::test(start_paused = true)]
async fn a_node_that_is_no_worker_starts_nothing() {
    let base = tempfile::tempdir().unwrap();
    let bench = Bench::new(base.path());
    let (ctx, handles) = Context::for_test();
    bench.give(&[Role::ConsensusMember]);
    let status = bench.service.status.subscribe();
    let end = async {
        tokio::time::sleep(Duration::from_secs(60)).await;
        assert!(handles.is_healthy());
        handles.cancel().await;
    };
    let (ended, ()) = tokio::join!(bench.service.clone().run(ctx), end);
    ended.unwrap();
    assert_eq!(*status.borrow(), Status::Stopped);
    assert!(!base.path().join("ephemeral").exists());
}

#[tokio::test(start_paused = true)]
async fn a_worker_of_the_base_variant_says_what_it_lacks() {
    let base = tempfile::tempdir().unwrap();
    let bench = Bench::new(base.path());
    let (ctx, mut handles) = Context::for_test();
    let mut status = bench.service.status.subscribe();
    bench.make_worker();
    let end = async {
        status.wait_for(|status| *status == Status::Absent).await.unwrap();
        bench.give(&[]);
        status.wait_for(|status| *status == Status::Stopped).await.unwrap();
        handles.cancel().await;
    };
    let (ended, ()) = tokio::join!(bench.service.clone().run(ctx), end);
    ended.unwrap();
    let lines = handles.take_lines();
    assert!(
        lines.iter().any(|line| line.contains("workload part=containerd state=failed cause=")),
        "{lines:?}"
    );
}

#[tokio::test]
async fn containerd_stays_until_kubelet_has_ended() {
    let base = tempfile::tempdir().unwrap();
    let bench = Bench::new(base.path());
    let mut service = bench.service.clone();
    assert_eq!(service.wanted(), Wanted::Unknown);
    bench.make_worker();
    assert_eq!(service.wanted(), Wanted::Pods);
    let running = crate::Status {
        parts: [(Part::Kubelet, crate::PartState::Ready)].into(),
        ..crate::Status::default()
    };
    bench.workload.send_replace(running);
    bench.give(&[]);
    assert_eq!(service.wanted(), Wanted::Unknown);
    bench.workload.send_replace(crate::Status::default());
    assert_eq!(service.wanted(), Wanted::Nothing);
}

#[tokio::test(start_paused = true)]
async fn pods_end_with_the_role_without_containerd() {
    let base = tempfile::tempdir().unwrap();
    let bench = Bench::new(base.path());
    bench.leave_pods();
    let (ctx, handles) = Context::for_test();
    let mut status = bench.service.status.subscribe();
    let story = async {
        // While the roles are unknown, the pods of an earlier process stay.
        tokio::time::sleep(Duration::from_secs(60)).await;
        assert_eq!(*status.borrow_and_update(), Status::Unknown);
        assert!(!bench.have_ended());
        bench.give(&[]);
        status.wait_for(|status| *status == Status::Ending).await.unwrap();
        status.wait_for(|status| *status == Status::Stopped).await.unwrap();
        assert!(bench.have_ended());
        assert!(!bench.service.config.has_run());
        handles.cancel().await;
    };
    let (ended, ()) = tokio::join!(bench.service.clone().run(ctx), story);
    ended.unwrap();
}

#[tokio::test]
async fn forwarding_and_translation_end_with_the_role_before_the_mesh_does() {
    let base = tempfile::tempdir().unwrap();
    let bench = Bench::new(base.path());
    let config = &bench.service.config;
    // As an earlier process has left the machine, which ended on the way.
    write_files(config, config::Gvisor::Here).unwrap();
    let switches = ["ipv4/ip_forward", "ipv6/conf/all/forwarding"]
        .map(|name| config.host.proc.join("sys/net").join(name));
    for switch in &switches {
        fs::create_dir_all(switch.parent().unwrap()).unwrap();
        fs::write(switch, "1\n").unwrap();
    }
    // Interfaces of pods have ignored routers.
    let accepts = config.host.proc.join("sys/net/ipv6/conf/default/accept_ra");
    fs::create_dir_all(accepts.parent().unwrap()).unwrap();
    fs::write(&accepts, "0\n").unwrap();
    let input = base.path().join("input");
    let program = format!("#!/bin/sh\nexec /bin/cat > {}\n", input.display());
    fs::write(&config.host.nft, program).unwrap();
    fs::set_permissions(&config.host.nft, fs::Permissions::from_mode(0o755)).unwrap();
    let (ctx, handles) = Context::for_test();
    let mut status = bench.service.status.subscribe();
    bench.give(&[]);
    let story = async {
        status.wait_for(|status| *status == Status::Stopped).await.unwrap();
        let input = fs::read_to_string(&input).unwrap();
        for table in ["ip kube-proxy", "ip6 kube-proxy", "ip cni_hostport", "ip6 cni_hostport"] {
            assert!(input.contains(&format!("delete table {table}\n")), "{input}");
        }
        for switch in &switches {
            assert_eq!(fs::read_to_string(switch).unwrap(), "0", "{}", switch.display());
        }
        assert_eq!(fs::read_to_string(&accepts).unwrap(), "1");
        assert!(!config.has_run());
        handles.cancel().await;
    };
    let (ended, ()) = tokio::join!(bench.service.clone().run(ctx), story);
    ended.unwrap();
}

#[tokio::test(start_paused = true)]
async fn the_mesh_stays_until_nothing_translates_addresses_for_pods() {
    let base = tempfile::tempdir().unwrap();
    let bench = Bench::new(base.path());
    let config = &bench.service.config;
    write_files(config, config::Gvisor::Here).unwrap();
    // No program: it cannot be started.
    fs::write(&config.host.nft, "").unwrap();
    let (ctx, handles) = Context::for_test();
    let mut status = bench.service.status.subscribe();
    bench.give(&[]);
    let story = async {
        status.wait_for(|status| *status == Status::Ending).await.unwrap();
        sleep(3 * RETRY).await;
        assert_eq!(*status.borrow_and_update(), Status::Ending);
        assert!(config.has_run());
        fs::remove_file(&config.host.nft).unwrap();
        status.wait_for(|status| *status == Status::Stopped).await.unwrap();
        assert!(!config.has_run());
        handles.cancel().await;
    };
    let (ended, ()) = tokio::join!(bench.service.clone().run(ctx), story);
    ended.unwrap();
}

#[tokio::test(start_paused = true)]
async fn the_mesh_stays_until_the_kernel_forwards_nothing() {
    let base = tempfile::tempdir().unwrap();
    let bench = Bench::new(base.path());
    let config = &bench.service.config;
    write_files(config, config::Gvisor::Here).unwrap();
    // A directory cannot be read or written as a file.
    let switch = config.host.proc.join("sys/net/ipv4/ip_forward");
    fs::create_dir_all(&switch).unwrap();
    let (ctx, handles) = Context::for_test();
    let mut status = bench.service.status.subscribe();
    bench.give(&[]);
    let story = async {
        status.wait_for(|status| *status == Status::Ending).await.unwrap();
        sleep(3 * RETRY).await;
        assert_eq!(*status.borrow_and_update(), Status::Ending);
        assert!(config.has_run());
        fs::remove_dir(&switch).unwrap();
        fs::write(&switch, "1\n").unwrap();
        status.wait_for(|status| *status == Status::Stopped).await.unwrap();
        assert_eq!(fs::read_to_string(&switch).unwrap(), "0");
        assert!(!config.has_run());
        handles.cancel().await;
    };
    let (ended, ()) = tokio::join!(bench.service.clone().run(ctx), story);
    ended.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_bond_that_is_made_again_gets_the_parameters_of_an_uplink_again() {
    let base = tempfile::tempdir().unwrap();
    let bench = Bench::new(base.path());
    let config = &bench.service.config;
    // No program, and no control groups: nothing but the service sets parameters.
    fs::write(&config.binary, "").unwrap();
    let link = config.host.interfaces.join("bond0");
    fs::create_dir_all(&link).unwrap();
    fs::write(link.join("uevent"), "DEVTYPE=bond\nINTERFACE=bond0\n").unwrap();
    let accepts = config.host.proc.join("sys/net/ipv6/conf/bond0/accept_ra");
    fs::create_dir_all(accepts.parent().unwrap()).unwrap();
    bench.make_worker();
    let (ctx, handles) = Context::for_test();
    let made_twice = async {
        for index in [3, 4] {
            // The kernel gives a new interface those of an interface of a pod.
            fs::write(&accepts, "0\n").unwrap();
            let interfaces = vec![bond(index)];
            bench.network.send_replace(network::Status { interfaces, ..Default::default() });
            while fs::read_to_string(&accepts).unwrap() != "2" {
                sleep(Duration::from_millis(100)).await;
            }
        }
    };
    let story = async {
        let set = tokio::time::timeout(Duration::from_secs(60), made_twice).await;
        handles.cancel().await;
        set
    };
    let (ended, set) = tokio::join!(bench.service.clone().run(ctx), story);
    ended.unwrap();
    set.unwrap();
}

fn bond(index: u32) -> network::Interface {
    network::Interface {
        index,
        name: "bond0".to_owned(),
        kind: network::Kind::Bond(None),
        mac: polis_machine::parameters::Mac([2, 0, 0, 0, 0, 1]),
        carrier: true,
        driver: None,
        path: String::new(),
        mtu: 1500,
        planned: None,
        addresses: Vec::new(),
        asking: false,
        leased: None,
        leased_v6: None,
    }
}

#[tokio::test(start_paused = true)]
async fn pods_end_with_the_machine_while_containerd_is_down() {
    let base = tempfile::tempdir().unwrap();
    let bench = Bench::new(base.path());
    bench.leave_pods();
    // No program: each run dies, and most of the time the supervisor waits to start another.
    fs::write(&bench.service.config.binary, "").unwrap();
    bench.make_worker();
    let (ctx, handles) = Context::for_test();
    let mut tree = handles.tree.clone();
    let story = async {
        let is_dead = |tree: &supervisor::Tree| {
            tree.get("test.containerd").is_some_and(|entry| entry.state == supervisor::State::Dead)
        };
        drop(tree.wait_for(is_dead).await.unwrap());
        assert!(!bench.have_ended());
        handles.cancel().await;
    };
    let (ended, ()) = tokio::join!(bench.service.clone().run(ctx), story);
    ended.unwrap();
    assert!(bench.have_ended());
    assert_ne!(*bench.service.status.borrow(), Status::Stopped);
}

#[test]
fn the_files_of_containerd_are_written_and_an_old_socket_is_gone() {
    let base = tempfile::tempdir().unwrap();
    let config = config(base.path());
    let ephemeral = &config.tree.ephemeral;
    ephemeral.containerd.dir.create().unwrap();
    std::fs::write(ephemeral.containerd.client(), "").unwrap();
    for _twice in 0..2 {
        write_files(&config, config::Gvisor::Here).unwrap();
    }
    assert!(!ephemeral.containerd.client().exists());
    assert!(ephemeral.registries.path().is_dir());
    let written = ephemeral.containerd_config.read().unwrap().unwrap();
    let expected = config::containerd(&config.tree, config.gvisor.path(), config::Gvisor::Here);
    assert_eq!(written, expected.into_bytes());
    let gvisor = config.gvisor.read().unwrap().unwrap();
    assert_eq!(gvisor, gvisor::configuration().as_bytes());
}
