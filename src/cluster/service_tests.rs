//! The cluster manager against a machine made of event values, with a power cut
//! after each step.

use std::net::{IpAddr, Ipv4Addr};
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::*;
use crate::cluster::keeper::Slot;
use crate::cluster::keys::{Half, Secrets};
use crate::cluster::membership::Step;
use crate::cluster::tests::{Chips, FakeChip, bootstrap};
use crate::cluster::vault::Guarded;
use crate::cluster::{Desk, desk};
use crate::parameters::{Cluster, ColdStart, Loaded, Parameters, Source, StoragePolicy, TpmMode};
use crate::pki::memory::Memory;
use crate::recovery::form;
use crate::storage::key::{Key, RecoveryKey};
use crate::storage::{Kind, Make, Ready, Wanted};

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
    chip: Arc<FakeChip>,
    /// The data partition, once it is made.
    partition: Arc<Mutex<Option<Partition>>>,
    /// What the hypervisor gives as recovery key.
    recovery: Option<String>,
    firmware: bool,
}

/// A data partition, with what opens its slots.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Partition {
    kind: Kind,
    slots: [Vec<u8>; 2],
}

impl Partition {
    fn made(make: &Make) -> Self {
        let slots = make.keys().map(|keys| [keys.passphrase.text(), keys.recovery.text()]);
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
    Cut,
}

impl Machine {
    fn new() -> Self {
        Self {
            disk: tempfile::tempdir().unwrap(),
            etcd: Memory::default(),
            chip: Arc::new(FakeChip(Mutex::new(Chips::None))),
            partition: Arc::default(),
            recovery: None,
            firmware: false,
        }
    }

    fn with_tpm() -> Self {
        Self { chip: Arc::default(), ..Self::new() }
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
        form::write(&node.recovery_key.try_into().unwrap()).to_string()
    }

    fn cluster_unlock_key(&self) -> Vec<u8> {
        let contents = self.etcd.contents();
        let (_, node) = contents.iter().find(|(key, _)| key.starts_with("nodes/")).unwrap();
        <polis_proto::v1::Node as prost::Message>::decode(node.as_slice())
            .unwrap()
            .cluster_unlock_key
    }

    fn set(&self, chips: Chips) {
        *self.chip.0.lock().unwrap() = chips;
    }

    fn unlocker(&self) -> Unlocker {
        let chip = Arc::clone(&self.chip) as Arc<dyn Chip>;
        let config = Config {
            root: self.root(),
            probe: Probe::default(),
            chip,
            efivars: self.efivars(),
            recovery: self.given(),
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
    async fn boot(&self, told: Option<Cluster>, steps: usize) -> End {
        let root = self.root();
        root.esp.create().unwrap();
        let taken = AtomicUsize::new(0);
        let goes_on = move |_step| taken.fetch_add(1, Ordering::Relaxed) + 1 < steps;
        let config = Config {
            root: root.clone(),
            probe: Probe::new(goes_on),
            chip: Arc::clone(&self.chip) as Arc<dyn Chip>,
            efivars: self.efivars(),
            recovery: self.given(),
        };

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
            desk: watch::Sender::default(),
            status: watch::Sender::default(),
        };
        let counter = Desk::new(service.desk.subscribe());
        let mut wanted = service.wanted.subscribe();
        let mut status = service.status.subscribe();
        let disk = async {
            let id = uuid::Uuid::from_bytes([9; 16]);
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
        let mut at_desk = status.clone();
        let person = async {
            until(&mut at_desk, "status", |status| status.waits_for_key.then_some(()))
                .await
                .unwrap();
            self.person(&counter).await;
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
                () = person => unreachable!("the person stays"),
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

    /// Somebody who comes when the machine waits.
    async fn person(&self, desk: &Desk) {
        let wrong = form::write(&[1; form::SIZE]);
        assert!(matches!(desk.unlock(&wrong).await, Err(desk::Refused::Wrong(_))));
        assert_eq!(desk.unlock(&self.saved_recovery_key()).await, Ok(()));
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

/// The same bootstrap, encrypted.
fn encrypted(tpm: TpmMode, cold_start: ColdStart) -> Option<Cluster> {
    let mut wish = bootstrap();
    wish.configuration.storage = StoragePolicy::Unspecified;
    wish.configuration.tpm = tpm;
    wish.configuration.cold_start = cold_start;
    Some(Cluster::Bootstrap(wish))
}

fn automatic() -> Option<Cluster> {
    encrypted(TpmMode::BestEffort, ColdStart::Automatic)
}

impl Machine {
    /// A member whose disk is authenticated, and its recovery key.
    async fn member(self, told: Option<Cluster>) -> (Self, String) {
        let ended = self.boot(told, usize::MAX).await;
        assert!(matches!(ended, End::Home(_)), "{ended:?}");
        let saved = self.saved_recovery_key();
        (self, saved)
    }

    /// Boots with a recovery key until it is home, then without one, as the same node.
    async fn recovers(mut self, saved: String) -> Self {
        let node = self.etcd.contents().keys().find(|key| key.starts_with("nodes/")).cloned();
        self.recovery = Some(saved);
        let status = self.boot_home().await;
        assert_eq!(node, status.node.map(|node| format!("nodes/{node}")));
        self.recovery = None;
        assert_eq!(self.boot_home().await.node, status.node);
        self
    }
}

#[tokio::test]
async fn an_authenticated_disk_comes_home_alone_whoever_keeps_the_share() {
    for (machine, keeper) in [
        (Machine::with_tpm(), Keeper::Tpm),
        (Machine { firmware: true, ..Machine::new() }, Keeper::Firmware),
        (Machine::new(), Keeper::Disk),
    ] {
        let (machine, _saved) = machine.member(automatic()).await;
        assert_eq!(machine.partition.lock().unwrap().as_ref().unwrap().kind, Kind::Authenticated);
        let status = machine.boot_home().await;
        let keys = status.keys.unwrap();
        assert_eq!((keys.keeper, keys.sealed), (Some(keeper), keeper == Keeper::Tpm));
        assert!(keys.recovery_key_unsaved);
    }
}

#[tokio::test]
async fn a_power_cut_after_any_step_of_an_encrypted_bootstrap_loses_no_key() {
    for tpm in [Chips::One(1, 1), Chips::None] {
        for cold_start in [ColdStart::Automatic, ColdStart::Attended] {
            for steps in 1..=Step::ALL.len() {
                let told = encrypted(TpmMode::BestEffort, cold_start);
                let machine = Machine::new();
                machine.set(tpm);
                let cut = machine.boot(told.clone(), steps).await;
                assert!(matches!(cut, End::Cut), "{steps} steps: {cut:?}");
                let ended = machine.boot(told, usize::MAX).await;
                assert!(matches!(ended, End::Home(_)), "{steps} steps: {ended:?}");
                // Its owner's key is that of the disk, and nothing of a journal is left.
                let key = form::read(&machine.saved_recovery_key()).unwrap();
                let slot = machine.partition.lock().unwrap().clone().unwrap().slots[1].clone();
                assert_eq!(slot, *RecoveryKey::new(key).text(), "{steps} steps");
                assert_eq!(machine.root().esp.cluster_journal.read().unwrap(), None);
                let share = machine.root().esp.cold_start.read().unwrap();
                assert_eq!(share.is_some(), cold_start == ColdStart::Automatic);
                machine.boot_home().await;
            }
        }
    }
}

#[tokio::test]
async fn each_way_to_lose_a_key_has_a_code_touches_nothing_and_is_mended_by_the_recovery_key() {
    type Harm = fn(&Machine);
    let harms: [(Harm, crate::trapdoor::Code); 6] = [
        (|m| m.root().esp.sealed_configuration.remove().unwrap(), code::CLUSTER_SEALED_LOST),
        (
            |m| m.root().esp.sealed_configuration.write(b"polis sc, or so").unwrap(),
            code::CLUSTER_SEALED_DAMAGED,
        ),
        (
            |m| {
                let (shares, like) = (m.shares(), m.secrets());
                shares.keep(Slot::Current, &like, &Half::random().unwrap()).map(drop).unwrap();
            },
            code::STORAGE_KEY_WRONG,
        ),
        (|m| m.set(Chips::One(2, 1)), code::STORAGE_TPM_CLEARED),
        (|m| m.set(Chips::None), code::STORAGE_TPM_ABSENT),
        (|m| m.set(Chips::One(1, 2)), code::STORAGE_TPM_REFUSES),
    ];
    for (harm, expected) in harms {
        let (machine, saved) = Machine::with_tpm().member(automatic()).await;
        harm(&machine);
        let before = machine.partition.lock().unwrap().clone();
        let report = machine.boot_refused(automatic()).await;
        assert_eq!(report.code, expected);
        assert!(report.unlock, "{expected}");
        assert_eq!(*machine.partition.lock().unwrap(), before, "{expected}: the disk was touched");

        let machine =
            Machine { recovery: Some(form::write(&[1; form::SIZE]).to_string()), ..machine };
        let report = machine.boot_refused(None).await;
        assert_eq!(report.code, code::STORAGE_RECOVERY_KEY_WRONG);
        assert!(report.unlock);
        assert_eq!(*machine.partition.lock().unwrap(), before, "{expected}: the disk was touched");

        let machine = machine.recovers(saved).await;
        let after = machine.partition.lock().unwrap().clone().unwrap();
        assert_ne!(after.slots[0], before.unwrap().slots[0], "{expected}: new halves");
        let root = machine.root();
        assert_eq!(root.esp.key_change.read().unwrap(), None);
        assert_eq!(root.esp.cold_start_next.read().unwrap(), None);
        let (half, _) = machine.shares().fetch(Slot::Current).unwrap().unwrap();
        assert_eq!(machine.cluster_unlock_key(), half.bytes(), "etcd knows the new half");
    }
}

#[tokio::test]
async fn a_machine_that_is_attended_waits_for_the_recovery_key_and_keeps_no_share() {
    let told = encrypted(TpmMode::BestEffort, ColdStart::Attended);
    let (machine, _saved) = Machine::new().member(told).await;
    for _boot in 0..2 {
        let status = machine.boot_home().await;
        assert_eq!(status.keys.unwrap().keeper, None);
        assert_eq!(machine.root().esp.cold_start.read().unwrap(), None);
    }
}

#[tokio::test]
async fn a_share_that_is_lost_is_said_where_nobody_was_to_be_asked() {
    let (machine, saved) = Machine::new().member(automatic()).await;
    machine.root().esp.cold_start.remove().unwrap();
    assert_eq!(machine.boot_refused(None).await.code, code::STORAGE_SHARE_ABSENT);
    machine.recovers(saved).await;
}

#[tokio::test]
async fn a_cluster_that_demands_a_tpm_gets_one_or_nothing() {
    let required = encrypted(TpmMode::Required, ColdStart::Automatic);
    let machine = Machine::new();
    let report = machine.boot_refused(required.clone()).await;
    assert_eq!(report.code, code::STORAGE_TPM_ABSENT);
    assert!(!report.unlock, "there is no disk to unlock");
    assert!(!machine.has_data());
    assert_eq!(machine.root().esp.cluster_journal.read().unwrap(), None);

    // A member whose TPM is gone opens by its recovery key, each time.
    let (mut machine, saved) = Machine::with_tpm().member(required).await;
    machine.set(Chips::None);
    let before = machine.partition.lock().unwrap().clone();
    machine.recovery = Some(saved);
    machine.boot_home().await;
    assert_eq!(*machine.partition.lock().unwrap(), before, "nothing is sealed to nothing");
    machine.recovery = None;
    assert_eq!(machine.boot_refused(None).await.code, code::STORAGE_TPM_ABSENT);
    machine.set(Chips::One(1, 1));
    machine.boot_home().await;
}

#[tokio::test]
async fn a_tpm_that_must_not_be_used_is_not() {
    let disabled = encrypted(TpmMode::Disabled, ColdStart::Automatic);
    let (machine, _saved) = Machine::with_tpm().member(disabled).await;
    machine.set(Chips::None);
    assert_eq!(machine.boot_home().await.keys.unwrap().keeper, Some(Keeper::Disk));
}

#[tokio::test]
async fn a_weaker_partition_in_the_place_of_the_node_s_is_not_used() {
    let (machine, _saved) = Machine::new().member(automatic()).await;
    machine.partition.lock().unwrap().as_mut().unwrap().kind = Kind::Insecure;
    let report = machine.boot_refused(None).await;
    assert_eq!(report.code, code::STORAGE_KIND_DIFFERS);
}

#[tokio::test]
async fn a_change_of_keys_that_was_cut_opens_with_the_old_or_the_new_ones() {
    let (machine, saved) = Machine::new().member(automatic()).await;
    let old = machine.root().esp.sealed_configuration.read().unwrap().unwrap();
    let share = machine.root().esp.cold_start.read().unwrap().unwrap();
    let machine = {
        machine.root().esp.sealed_configuration.remove().unwrap();
        machine.recovers(saved).await
    };
    let esp = machine.root().esp;
    let (new, new_share) = (
        esp.sealed_configuration.read().unwrap().unwrap(),
        esp.cold_start.read().unwrap().unwrap(),
    );
    let secrets = Sealed::from_record(&new).unwrap().secrets.unwrap();
    let change = crate::cluster::sealed::change_to_record(&secrets);
    // Cut after the slot was changed, and then between each two steps after that.
    for (sealed, share) in
        [(Some(&old), &share), (Some(&new), &share), (Some(&new), &new_share), (None, &share)]
    {
        match sealed {
            Some(sealed) => esp.sealed_configuration.write(sealed).unwrap(),
            None => esp.sealed_configuration.remove().unwrap(),
        }
        esp.cold_start.write(share).unwrap();
        esp.cold_start_next.write(&new_share).unwrap();
        esp.key_change.write(&change).unwrap();
        machine.boot_home().await;
        assert_eq!(esp.key_change.read().unwrap(), None);
        assert_eq!(esp.cold_start_next.read().unwrap(), None);
        machine.boot_home().await;
    }
    // And cut before it: a change that never came into force goes.
    let (secrets, half) = (Secrets::random().unwrap(), Half::random().unwrap());
    let secrets = Guarded::Plain(secrets);
    machine.shares().keep(Slot::Next, &secrets, &half).unwrap();
    esp.key_change.write(&crate::cluster::sealed::change_to_record(&secrets)).unwrap();
    machine.boot_home().await;
    assert_eq!(esp.key_change.read().unwrap(), None);
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
