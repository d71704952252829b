//! The service without a containerd: what it does before there is one.

use std::sync::Arc;

use super::*;

/// Everything below `base`.
fn config(base: &std::path::Path) -> Config {
    Config {
        binary: base.join("containerd"),
        gvisor: files::File::public(base.join("runsc/config.toml")),
        ..Config::live(&files::Root::at(base))
    }
}

/// The service of a node with these roles below `base`, and what keeps its inputs open.
struct Bench {
    service: Service,
    _cluster: watch::Sender<cluster::Status>,
    given: watch::Sender<Option<v1::NodeRoles>>,
    storage: watch::Sender<storage::Status>,
    workload: watch::Sender<workload::Status>,
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
        let (workload, parts) = watch::channel(workload::Status::default());
        let service =
            Service { config, cluster, roles, storage: mounted, workload: parts, status, pods };
        Self { service, _cluster, given, storage, workload }
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
        lines.iter().any(|line| line.contains("workload part=containerd state=absent")),
        "{lines:?}"
    );
}

#[tokio::test]
async fn containerd_stays_until_kubelet_has_ended() {
    let base = tempfile::tempdir().unwrap();
    let bench = Bench::new(base.path());
    bench.make_worker();
    assert!(bench.service.is_wanted());
    let running = workload::Status {
        parts: [(Part::Kubelet, workload::PartState::Ready)].into(),
        ..workload::Status::default()
    };
    bench.workload.send_replace(running);
    bench.give(&[]);
    assert!(bench.service.is_wanted());
    bench.workload.send_replace(workload::Status::default());
    bench.service.wanted(false).await.unwrap();
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

#[test]
fn a_machine_without_gvisor_says_so_once_and_what_it_lacks() {
    let (ctx, mut handles) = Context::for_test();
    assert_eq!(report(&ctx, &[]), config::Gvisor::Here);
    let lacking = ["no filters", "no namespaces"].map(str::to_owned);
    assert_eq!(report(&ctx, &lacking), config::Gvisor::Lacking);
    let lines = handles.take_lines();
    let [line] = lines.as_slice() else { panic!("{lines:?}") };
    let said = "workload part=gvisor state=absent cause=\"no filters; no namespaces\"";
    assert!(line.contains(said), "{line}");
}
