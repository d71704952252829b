//! The test bench of the cluster manager: a machine made of event values, with a power cut
//! after each step. The files beside hold the tests.

#[path = "boot_tests.rs"]
mod boots;
#[path = "fake_curator_tests.rs"]
mod fake_curator;
#[path = "key_tests.rs"]
mod key_stories;
#[path = "return_tests.rs"]
mod returns;
#[path = "wipe_tests.rs"]
mod wipes;

use std::net::{IpAddr, Ipv4Addr};
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use super::*;
use crate::cluster::probe::Step;
use crate::cluster::state::Event;
use crate::cluster::tests::{FakeTpm, Tpms, bootstrap};
use crate::cluster::unlock::Announcements;
use crate::cluster::unlock::keeper::Slot;
use crate::cluster::unlock::keys::{Half, Secrets};
use crate::cluster::unlock::request::{self, Requests};
use crate::cluster::unlock::sealer::Guarded;
use polis_base::recovery::form;
use polis_machine::parameters::{
    Cluster, ColdStart, Loaded, Parameters, Source, StoragePolicy, TpmMode,
};
use polis_machine::storage::key::{Key, RecoveryKey};
use polis_machine::storage::{Kind, Make, Ready, Wanted};
use polis_wire::identity::NodeId;
use polis_wire::pki::memory::Memory;

/// Longer than any test may take.
const PATIENCE: Duration = Duration::from_secs(20);

/// An etcd that serves as soon as it has orders, and whose content outlives a boot.
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

/// The state that outlives a power cut.
struct Machine {
    disk: tempfile::TempDir,
    etcd: Memory,
    tpm: Arc<FakeTpm>,
    /// The data partition, once it is made.
    partition: Arc<Mutex<Option<Partition>>>,
    /// The recovery key that the hypervisor gives.
    recovery: Option<String>,
    firmware: bool,
    /// The node that the parameters say to wipe.
    wipes: Option<NodeId>,
    /// How an owner has the key of the disk sealed once the machine is home.
    seals: Option<Binding>,
    /// Whether a person comes when the machine waits for the key of its disk.
    attended: bool,
    /// Whether the cluster removes the node once the machine is home.
    removed: bool,
    /// Whether the data partition is marked for its end.
    given_up: AtomicBool,
    /// A part of the text of a wait, from which on timers end at once.
    hurries: Option<&'static str>,
}

/// A data partition, with the keys of its slots.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Partition {
    kind: Kind,
    slots: [Vec<u8>; 2],
}

impl Partition {
    fn made(make: &Make) -> Self {
        let slots = make
            .keys()
            .map(|keys| [keys.passphrase.text(), keys.recovery.as_ref().unwrap().text()]);
        let slots = slots.map_or_else(Default::default, |slots| slots.map(|text| text.to_vec()));
        Self { kind: make.kind(), slots }
    }

    fn opens(&mut self, key: &Key, rekey: Option<&storage::key::Passphrase>) -> bool {
        let fits = *key.text() == self.slots[usize::from(key.slot())];
        if let (true, Some(rekey)) = (fits, rekey) {
            self.slots[0] = rekey.text().to_vec();
        }
        fits
    }
}

/// How a boot ended.
#[derive(Debug)]
enum End {
    Home(Status),
    Trapdoor(Report),
    Reboot,
    Cut,
}

impl Machine {
    fn new() -> Self {
        Self {
            disk: tempfile::tempdir().unwrap(),
            etcd: Memory::default(),
            tpm: Arc::new(FakeTpm { machine: Mutex::new(Tpms::None), ..FakeTpm::default() }),
            partition: Arc::default(),
            recovery: None,
            firmware: false,
            wipes: None,
            seals: None,
            attended: true,
            removed: false,
            given_up: AtomicBool::new(false),
            hurries: None,
        }
    }

    fn with_tpm() -> Self {
        Self { tpm: Arc::default(), ..Self::new() }
    }

    fn efivars(&self) -> PathBuf {
        let efivars = self.disk.path().join("efivars");
        if self.firmware {
            std::fs::create_dir_all(&efivars).unwrap();
            std::fs::write(efivars.join("Boot0000"), b"").unwrap();
        }
        efivars
    }

    fn given(&self) -> recovery::Given {
        let sys = self.disk.path().join("sys");
        let item = sys.join("firmware/qemu_fw_cfg/by_name").join(recovery::FW_CFG_ITEM);
        std::fs::create_dir_all(&item).unwrap();
        match &self.recovery {
            Some(text) => std::fs::write(item.join("raw"), text).unwrap(),
            None => drop(std::fs::remove_file(item.join("raw"))),
        }
        recovery::Given::nothing(&sys)
    }

    /// The recovery key, as the owner saved it.
    fn saved_recovery_key(&self) -> String {
        let contents = self.etcd.contents();
        let (_, node) = contents.iter().find(|(key, _)| key.starts_with("nodes/")).unwrap();
        let node = <polis_proto::v1::Node as prost::Message>::decode(node.as_slice()).unwrap();
        let mut key = Vec::new();
        let owner = polis_wire::age::Identity::of_key(&crate::cluster::tests::owner());
        polis_wire::age::decrypt(&owner, &*node.recovery_key, &mut key).unwrap();
        form::write(&key.try_into().unwrap()).to_string()
    }

    fn cluster_unlock_key(&self) -> Vec<u8> {
        let contents = self.etcd.contents();
        let (_, node) = contents.iter().find(|(key, _)| key.starts_with("nodes/")).unwrap();
        <polis_proto::v1::Node as prost::Message>::decode(node.as_slice())
            .unwrap()
            .cluster_unlock_key
    }

    fn set(&self, tpms: Tpms) {
        *self.tpm.machine.lock().unwrap() = tpms;
    }

    fn unlocker(&self) -> Unlocker {
        let tpm = Arc::clone(&self.tpm) as Arc<dyn Tpm>;
        let config = Config {
            root: self.root(),
            probe: Probe::default(),
            tpm,
            efivars: self.efivars(),
            recovery: self.given(),
            install: polis_machine::install::Config::nowhere(),
        };
        let (status, wanted) =
            (watch::channel(storage::Status::Starting).1, watch::Sender::new(None));
        config.unlocker(Disk { status, wanted })
    }

    fn shares(&self) -> Shares {
        self.unlocker().shares
    }

    fn secrets(&self) -> Guarded<Secrets> {
        let record = self.root().esp.sealed_configuration.read().unwrap().unwrap();
        Sealed::from_record(&record).unwrap().secrets.unwrap()
    }

    fn root(&self) -> Root {
        Root::at(self.disk.path())
    }

    fn has_data(&self) -> bool {
        self.partition.lock().unwrap().is_some()
    }

    /// One boot that is cut after `steps` steps.
    async fn boot(&self, configured: Option<Cluster>, steps: usize) -> End {
        let root = self.root();
        root.esp.create().unwrap();
        let taken = AtomicUsize::new(0);
        let goes_on = move |_step| taken.fetch_add(1, Ordering::Relaxed) + 1 < steps;
        let config = Config {
            root: root.clone(),
            probe: Probe::new(goes_on),
            tpm: Arc::clone(&self.tpm) as Arc<dyn Tpm>,
            efivars: self.efivars(),
            recovery: self.given(),
            install: polis_machine::install::Config::nowhere(),
        };

        let parameters = watch::Sender::new(Some(Arc::new(loaded(configured, self.wipes))));
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
            unlock_requests: watch::Sender::default(),
            announcements: watch::Sender::default(),
            reset: watch::channel(None).1,
            end: watch::Sender::new(None),
            status: Writer::default(),
        };
        let announcements = Announcements::new(service.announcements.subscribe());
        let counter = Requests::new(service.unlock_requests.subscribe());
        let mut wanted = service.wanted.subscribe();
        let mut status = service.status.subscribe();
        let mut ends = service.end.subscribe();
        let mut given_up = service.wanted.subscribe();
        let disk = async {
            let id = uuid::Uuid::from_bytes([9; 16]);
            if self.given_up.swap(false, Ordering::Relaxed) {
                // The first thing that storage does.
                *self.partition.lock().unwrap() = None;
                std::fs::remove_dir_all(root.data.mount.path()).unwrap();
            }
            let found = self.partition.lock().unwrap().clone();
            let kind = match found {
                None => {
                    storage.send_replace(storage::Status::Absent { partition: id });
                    let make = until(&mut wanted, "wanted", |wanted| match wanted {
                        Some(Wanted::Make(make)) => Some(make.clone()),
                        _ => None,
                    });
                    let made = Partition::made(&make.await.unwrap());
                    self.partition.lock().unwrap().insert(made).kind
                }
                Some(Partition { kind: Kind::Insecure, .. }) => Kind::Insecure,
                Some(Partition { kind, .. }) => {
                    storage.send_replace(storage::Status::Locked { kind, partition: id });
                    loop {
                        wanted.changed().await.unwrap();
                        let asked = wanted.borrow_and_update().clone();
                        let Some(Wanted::Open { key, rekey }) = asked else { continue };
                        let opens = {
                            let mut partition = self.partition.lock().unwrap();
                            partition.as_mut().unwrap().opens(&key, rekey.as_ref())
                        };
                        if opens {
                            break kind;
                        }
                        let reason = "no key slot fits".to_owned();
                        let refused = storage::Status::Refused { kind, partition: id, reason };
                        storage.send_replace(refused);
                    }
                }
            };
            root.data.create().unwrap();
            let ready = Ready {
                root: root.clone(),
                kind,
                partition: id,
                device: Path::new("/dev/test3").to_owned(),
                size: 1 << 30,
            };
            storage.send_replace(storage::Status::Ready(Arc::new(ready)));
            std::future::pending::<()>().await;
        };
        let mark = async {
            until(&mut given_up, "wanted", |wanted| {
                matches!(wanted, Some(Wanted::GiveUp)).then_some(())
            })
            .await
            .unwrap();
            self.given_up.store(true, Ordering::Relaxed);
            storage.send_replace(storage::Status::GivenUp);
            std::future::pending::<()>().await;
        };
        let mut at_desk = status.clone();
        let person = async {
            until(&mut at_desk, "status", |status| status.waits_for_key.then_some(()))
                .await
                .unwrap();
            if self.attended {
                self.person(&counter).await;
            }
            std::future::pending::<()>().await;
        };
        let (ctx, handles) = Context::for_test();
        let mut trapdoor = handles.trapdoor.clone();
        let mut stages = handles.stages.clone();
        let hurry = async {
            if let Some(text) = self.hurries {
                let waits = |stages: &stage::Stages| match &stages.get(&Stage::Cluster)?.state {
                    stage::State::Waiting(why) => why.contains(text).then_some(()),
                    _ => None,
                };
                until(&mut stages, "stages", waits).await.unwrap();
                tokio::time::pause();
            }
            std::future::pending::<()>().await;
        };
        let (agent, lines) = (service.status.clone(), ctx.lines().clone());
        let home = async {
            let is_home = |status: &Status| (status.state == State::Home).then_some(());
            until(&mut status, "status", is_home).await?;
            if let Some(binding) = self.seals {
                owner_seals(&announcements, binding).await;
            }
            if self.removed {
                agent.happened(Event::Removed, &lines, |_disowning| {});
                std::future::pending::<()>().await;
            }
            Ok::<_, Closed>(status.borrow().clone())
        };
        let service = Box::pin(service.run(ctx));
        let boot = async {
            tokio::select! {
                // Each branch only waits.
                () = disk => unreachable!("the disk stays"),
                () = person => unreachable!("the person stays"),
                () = mark => unreachable!("it stays marked"),
                () = hurry => unreachable!("time stays as it is"),
                end = until(&mut ends, "end", |end| *end) => {
                    assert_eq!(end.unwrap(), Reason::Reboot);
                    End::Reboot
                }
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

    /// A person who comes when the machine waits.
    async fn person(&self, requests: &Requests) {
        let wrong = form::write(&[1; form::SIZE]);
        assert!(matches!(requests.unlock(&wrong).await, Err(request::Refused::Wrong(_))));
        assert_eq!(requests.unlock(&self.saved_recovery_key()).await, Ok(()));
    }

    async fn boot_home(&self) -> Status {
        match self.boot(configured(), usize::MAX).await {
            End::Home(status) => status,
            other => panic!("{other:?}"),
        }
    }

    async fn boot_refused(&self, configured: Option<Cluster>) -> Report {
        match self.boot(configured, usize::MAX).await {
            End::Trapdoor(report) => report,
            other => panic!("{other:?}"),
        }
    }
}

/// An owner who has the key of the disk sealed as soon as the node takes it.
async fn owner_seals(announcements: &Announcements, binding: Binding) {
    while announcements.bind(binding).await == Err(firmware::Refused::NotHome) {
        tokio::task::yield_now().await;
    }
}

fn configured() -> Option<Cluster> {
    Some(Cluster::Bootstrap(bootstrap()))
}

fn loaded(configured: Option<Cluster>, wipes: Option<NodeId>) -> Loaded {
    let parameters = configured.map(|cluster| Parameters {
        cluster,
        network: parameters::Network::default(),
        console_tui: Vec::new(),
        wipes,
        install: None,
        volumes: Vec::new(),
        mirror: None,
    });
    Loaded {
        found: parameters.map(|parameters| (parameters, Source::Esp)),
        warning: None,
        tried: vec!["fw_cfg: not there".to_owned(), "ESP: no such file".to_owned()],
    }
}
