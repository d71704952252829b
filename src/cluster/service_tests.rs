//! The cluster manager against a machine made of event values, with a power cut
//! after each step.

use std::net::{IpAddr, Ipv4Addr};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::*;
use crate::cluster::tests::bootstrap;
use crate::parameters::{Loaded, Parameters, Source};
use crate::pki::memory::Memory;
use crate::storage::Ready;
use crate::trapdoor::{Report, code};

/// Longer than any test may take.
const PATIENCE: Duration = Duration::from_secs(20);

/// etcd that serves as soon as there are orders, and whose content outlives a boot.
#[derive(Clone)]
struct Etcd {
    memory: Memory,
    orders: watch::Receiver<Option<Orders>>,
}

impl Consensus for Etcd {
    type Kv = Memory;

    async fn curator(&mut self) -> Result<Memory, Closed> {
        until(&mut self.orders, "orders", |orders| orders.is_some().then_some(())).await?;
        Ok(self.memory.clone())
    }
}

/// What outlives a power cut.
struct Machine {
    disk: tempfile::TempDir,
    etcd: Memory,
}

/// How a boot ended.
#[derive(Debug)]
enum End {
    Home(Status),
    Trapdoor(Report),
    Cut,
}

impl Machine {
    fn new() -> Self {
        Self { disk: tempfile::tempdir().unwrap(), etcd: Memory::default() }
    }

    fn root(&self) -> Root {
        Root::at(self.disk.path())
    }

    fn has_data(&self) -> bool {
        self.root().data.mount.path().exists()
    }

    /// One boot that is cut after `steps` steps.
    async fn boot(&self, told: Option<Cluster>, steps: usize) -> End {
        let root = self.root();
        root.esp.create().unwrap();
        let taken = AtomicUsize::new(0);
        let goes_on = move |_step| taken.fetch_add(1, Ordering::Relaxed) + 1 < steps;
        let config = Config { root: root.clone(), probe: Probe::new(goes_on) };

        let parameters = watch::Sender::new(Some(Arc::new(loaded(told))));
        let storage = watch::Sender::new(storage::Status::Starting);
        let network = watch::Sender::new(network::Status {
            primary: Some(IpAddr::V4(Ipv4Addr::LOCALHOST)),
            ..network::Status::default()
        });
        let orders = watch::Sender::new(None);
        let etcd = Etcd { memory: self.etcd.clone(), orders: orders.subscribe() };
        let service = Service {
            config,
            parameters: parameters.subscribe(),
            storage: storage.subscribe(),
            network: network.subscribe(),
            consensus: etcd,
            wanted: watch::Sender::new(None),
            identity: watch::Sender::new(None),
            orders,
            status: watch::Sender::default(),
        };
        let mut wanted = service.wanted.subscribe();
        let mut status = service.status.subscribe();
        let had_data = self.has_data();
        let disk = async {
            let partition = uuid::Uuid::from_bytes([9; 16]);
            storage.send_replace(storage::Status::Absent { partition });
            if !had_data {
                until(&mut wanted, "wanted", |wanted| wanted.as_ref().map(drop)).await.unwrap();
            }
            root.data.create().unwrap();
            let ready = Ready {
                root: root.clone(),
                kind: Kind::Insecure,
                partition,
                device: Path::new("/dev/test3").to_owned(),
                size: 1 << 30,
            };
            storage.send_replace(storage::Status::Ready(Arc::new(ready)));
            std::future::pending::<()>().await;
        };
        let (ctx, handles) = Context::for_test();
        let mut trapdoor = handles.trapdoor.clone();
        let home = until(&mut status, "status", |status| {
            (status.state == State::Home).then(|| status.clone())
        });
        let service = Box::pin(service.run(ctx));
        let boot = async {
            tokio::select! {
                // Each branch only waits.
                () = disk => unreachable!("the disk stays"),
                ended = service => match ended {
                    Err(Error::Interrupted(_)) => End::Cut,
                    other => panic!("{other:?}"),
                },
                report = until(&mut trapdoor, "trapdoor", Clone::clone) => End::Trapdoor(report.unwrap()),
                status = home => End::Home(status.unwrap()),
            }
        };
        Box::pin(tokio::time::timeout(PATIENCE, boot)).await.expect("a boot ends")
    }

    async fn boot_home(&self) -> Status {
        match self.boot(told(), usize::MAX).await {
            End::Home(status) => status,
            other => panic!("{other:?}"),
        }
    }

    async fn boot_refused(&self, told: Option<Cluster>) -> Report {
        match self.boot(told, usize::MAX).await {
            End::Trapdoor(report) => report,
            other => panic!("{other:?}"),
        }
    }
}

fn told() -> Option<Cluster> {
    Some(Cluster::Bootstrap(bootstrap()))
}

fn loaded(told: Option<Cluster>) -> Loaded {
    let parameters = told.map(|cluster| Parameters {
        cluster,
        network: parameters::Network::default(),
        console_tui: Vec::new(),
    });
    Loaded {
        found: parameters.map(|parameters| (parameters, Source::Esp)),
        warning: None,
        tried: vec!["fw_cfg: not there".to_owned(), "ESP: no such file".to_owned()],
    }
}

#[tokio::test]
async fn a_first_boot_ends_at_home_and_leaves_a_sealed_configuration_and_no_journal() {
    let machine = Machine::new();
    let status = machine.boot_home().await;
    assert_eq!(status.roles, [Role::ConsensusMember]);
    let root = machine.root();
    let sealed = root.esp.sealed_configuration.read().unwrap().unwrap();
    let sealed = Sealed::from_record(&sealed).unwrap();
    assert_eq!(Some(Identity::new(sealed.node_public_key).id), status.node);
    assert_eq!(root.esp.cluster_journal.read().unwrap(), None);
    assert!(root.data.node.credentials.certificate.read().unwrap().is_some());
}

#[tokio::test]
async fn a_power_cut_after_any_step_ends_as_the_same_node_in_the_same_cluster() {
    for steps in 1..=Step::ALL.len() {
        let machine = Machine::new();
        let cut = machine.boot(told(), steps).await;
        assert!(matches!(cut, End::Cut), "{steps} steps: {cut:?}");
        let key = machine.root().data.node.credentials.key.read().ok().flatten();
        let before = machine.etcd.contents();
        let status = machine.boot_home().await;
        if let Some(key) = key {
            let node = NodeKey::from_pkcs8_der(&key).unwrap().id();
            assert_eq!(status.node, Some(node), "{steps} steps");
        }
        let after = machine.etcd.contents();
        for (key, value) in before {
            assert_eq!(after.get(&key), Some(&value), "{steps} steps: {key} was made again");
        }
        // And home it stays.
        assert_eq!(machine.boot_home().await, status, "{steps} steps");
        assert_eq!(machine.etcd.contents(), after, "{steps} steps");
    }
}

#[tokio::test]
async fn a_member_comes_back_without_any_parameters() {
    let machine = Machine::new();
    let first = machine.boot_home().await;
    match machine.boot(None, usize::MAX).await {
        End::Home(status) => assert_eq!(status, first),
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_power_cut_that_leaves_the_sealed_configuration_empty_is_no_loss() {
    let machine = Machine::new();
    // The last cut comes after the sealed configuration and before the journal goes.
    let cut = machine.boot(told(), Step::ALL.len() - 1).await;
    assert!(matches!(cut, End::Cut), "{cut:?}");
    let sealed = machine.root().esp.sealed_configuration;
    let record = sealed.read().unwrap();
    assert!(record.is_some());
    sealed.write(b"").unwrap();
    machine.boot_home().await;
    assert_eq!(sealed.read().unwrap(), record);
}

#[tokio::test]
async fn a_begun_bootstrap_goes_on_without_parameters() {
    let machine = Machine::new();
    let cut = machine.boot(told(), 3).await;
    assert!(matches!(cut, End::Cut), "{cut:?}");
    let ended = machine.boot(None, usize::MAX).await;
    assert!(matches!(ended, End::Home(_)), "{ended:?}");
}

#[tokio::test]
async fn a_machine_that_nobody_told_anything_says_where_it_looked() {
    let report = Machine::new().boot_refused(None).await;
    assert_eq!(report.code, code::PARAMETERS_ABSENT);
    assert_eq!(report.tried, ["fw_cfg: not there", "ESP: no such file"]);
}

#[tokio::test]
async fn a_policy_that_cannot_be_kept_makes_nothing() {
    let machine = Machine::new();
    let mut wish = bootstrap();
    wish.configuration.storage = StoragePolicy::NeedsEncryption;
    let report = machine.boot_refused(Some(Cluster::Bootstrap(wish))).await;
    assert_eq!(report.code, code::STORAGE_CANNOT_ENCRYPT);
    assert!(!machine.has_data());
    assert_eq!(machine.root().esp.cluster_journal.read().unwrap(), None);
}

#[tokio::test]
async fn each_loss_has_a_code_of_its_own_and_changes_nothing() {
    let sealed = |root: &Root| root.esp.sealed_configuration.clone();

    let machine = Machine::new();
    machine.boot_home().await;
    let record = sealed(&machine.root()).read().unwrap().unwrap();

    sealed(&machine.root()).write(&record[..record.len() - 1]).unwrap();
    let report = machine.boot_refused(told()).await;
    assert_eq!(report.code, code::CLUSTER_SEALED_DAMAGED);

    sealed(&machine.root()).remove().unwrap();
    let report = machine.boot_refused(told()).await;
    assert_eq!(report.code, code::CLUSTER_SEALED_LOST);

    sealed(&machine.root()).write(&record).unwrap();
    let key = machine.root().data.node.credentials.key.clone();
    let der = key.read().unwrap().unwrap();
    key.remove().unwrap();
    assert_eq!(machine.boot_refused(told()).await.code, code::CLUSTER_NODE_KEY);
    let other = NodeKey::generate().unwrap().to_pkcs8_der().unwrap();
    key.write(&other).unwrap();
    assert_eq!(machine.boot_refused(told()).await.code, code::CLUSTER_NODE_KEY);

    key.write(&der).unwrap();
    machine.boot_home().await;
}

#[tokio::test]
async fn another_cluster_s_store_is_not_home() {
    let machine = Machine::new();
    machine.boot_home().await;
    let stranger = Machine { etcd: Memory::default(), ..machine };
    let report = stranger.boot_refused(told()).await;
    assert_eq!(report.code, code::CLUSTER_STORE);
    assert!(stranger.etcd.contents().is_empty());
}
