//! A machine that is given a ticket, against a real curator beside a real etcd.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use polis_base::files::Root;
use polis_base::sys::clock;
use polis_base::trapdoor::{Report, code};
use polis_base::{boot, recovery};
use polis_control::cluster::unlock::sealer;
use polis_control::cluster::{self, Probe, State};
use polis_control::consensus;
use polis_machine::storage::{self, Kind, Ready, Wanted};
use polis_machine::tpm::{self, Blob};
use polis_machine::{install, network};
use polis_proto::v1;
use polis_proto::v1::curator_client::CuratorClient;
use polis_proto::v1::management_client::ManagementClient;
use polis_runtime::event::until;
use polis_tests::{Story, story};
use polis_wire::attestation::software::Software;
use polis_wire::attestation::{Answer, Keys, Question, REGISTERS, qualifier};
use polis_wire::identity::{Fingerprint, NodeId, NodeKey};
use polis_wire::parameters::{Cluster as Told, DirectoryNode, Loaded, Network, Parameters};
use polis_wire::parameters::{Register, Source, Ticket};
use polis_wire::pki;
use polis_wire::rpc::client::{Client, Repeat};
use tokio::sync::watch;
use zeroize::Zeroizing;

use crate::auditing;
use crate::calls::{approve, delete, heartbeat, reason, ticket};
use crate::curators::{BootstrapNode, Cluster, Curator, credentials, self_signed};
use crate::harness::{Machine, Running, supervise};

const PATIENCE: Duration = Duration::from_secs(60);

/// A machine that registers: its disk outlives a boot.
struct Newcomer {
    disk: tempfile::TempDir,
    has_data: bool,
    /// The steps as soon as the node's key is on the disk, once.
    hook: Hook,
    tpm: Arc<dyn sealer::Tpm>,
}

/// A TPM in software, which seals nothing.
#[derive(Debug, Default)]
struct Emulated {
    software: Software,
    /// The node names the attestation key of another TPM.
    pretends: bool,
}

impl sealer::Tpm for Emulated {
    fn is_there(&self) -> bool {
        true
    }

    fn signer(&self) -> Vec<u8> {
        Vec::new()
    }

    fn seal(
        &self,
        signer: &[u8],
        pcrs: &[u32],
        purpose: &[u8],
        secret: &[u8],
    ) -> Result<Blob, tpm::Error> {
        Ok(Blob {
            public: purpose.to_vec(),
            private: Vec::new(),
            root: vec![1],
            pcrs: pcrs.to_vec(),
            signer: signer.to_vec(),
            nonce: vec![0; 12],
            ciphertext: secret.to_vec(),
        })
    }

    fn unseal(&self, _purpose: &[u8], blob: &Blob) -> Result<Zeroizing<Vec<u8>>, tpm::Error> {
        Ok(Zeroizing::new(blob.ciphertext.clone()))
    }

    fn keys(&self) -> Result<Keys, tpm::Error> {
        let keys = self.software.keys();
        let other = Software::default().keys().attestation;
        Ok(if self.pretends { Keys { attestation: other, ..keys } } else { keys })
    }

    fn prove(&self, node: &str, question: &Question) -> Result<Answer, tpm::Error> {
        let asked = qualifier(&question.nonce, node);
        let registers = question.registers.iter().map(|number| (*number, [5; 32])).collect();
        let opened = self.software.prove(&question.credential, &asked, registers);
        // It guesses.
        Ok(opened.unwrap_or_else(|| Answer {
            secret: vec![0; 32],
            quote: Vec::new(),
            signature: Vec::new(),
            registers: question.registers.iter().map(|number| (*number, [5; 32])).collect(),
        }))
    }
}

type Hook = Arc<Mutex<Option<Box<dyn FnOnce() + Send>>>>;

/// The steps of a boot with a journal that are over when the node's key is on the disk.
const KEY: usize = 1;

/// How a boot ended.
#[derive(Debug)]
enum End {
    Home(NodeId),
    Trapdoor(Report),
    Cut,
    /// It is still on, and got so far.
    Waits(State, Option<NodeId>),
}

impl Newcomer {
    fn new() -> Self {
        let disk = tempfile::tempdir().unwrap();
        Root::at(disk.path()).esp.create().unwrap();
        let tpm = Arc::new(sealer::Machine {
            dev: disk.path().to_owned(),
            extra: disk.path().to_owned(),
        });
        Self { disk, has_data: false, hook: Hook::default(), tpm }
    }

    fn with_tpm(pretends: bool) -> Self {
        let software = Software::default();
        Self { tpm: Arc::new(Emulated { software, pretends }), ..Self::new() }
    }

    /// One boot, cut after `steps` steps, watched until `enough`.
    async fn boot(
        &mut self,
        register: Option<&Register>,
        steps: usize,
        enough: impl Fn(&cluster::Status, bool) -> bool,
    ) -> End {
        let root = Root::at(self.disk.path());
        let taken = Arc::new(AtomicUsize::new(0));
        let (cut, mut was_cut) = watch::channel(false);
        let hook = Arc::clone(&self.hook);
        let probe = Probe::new(move |_step| {
            let over = taken.fetch_add(1, Ordering::Relaxed) + 1;
            if over == KEY
                && let Some(hook) = hook.lock().unwrap().take()
            {
                hook();
            }
            let goes_on = over < steps;
            if !goes_on {
                cut.send_replace(true);
            }
            goes_on
        });
        let parameters = register.map(|register| Parameters {
            cluster: Told::Register(register.clone()),
            network: Network::default(),
            console_tui: Vec::new(),
            wipes: None,
            install: None,
            volumes: Vec::new(),
            mirror: None,
        });
        let loaded = Loaded {
            found: parameters.map(|parameters| (parameters, Source::Esp)),
            warning: None,
            tried: Vec::new(),
        };
        let parameters = watch::Sender::new(Some(Arc::new(loaded)));
        let storage = watch::Sender::new(storage::Status::Starting);
        let network = watch::Sender::new(network::Status {
            primary: Some([127, 0, 0, 1].into()),
            ..network::Status::default()
        });
        let (_status, consensus) = watch::channel(consensus::Status::default());
        let service = cluster::Service {
            config: cluster::Config {
                root: root.clone(),
                probe,
                tpm: Arc::clone(&self.tpm),
                efivars: self.disk.path().join("efivars"),
                recovery: recovery::Given::nothing(self.disk.path()),
                install: install::Config::nowhere(),
            },
            parameters: parameters.subscribe(),
            storage: storage.subscribe(),
            network: network.subscribe(),
            consensus,
            wanted: watch::Sender::new(None),
            identity: watch::Sender::new(None),
            orders: watch::Sender::new(None),
            unlock_requests: watch::Sender::default(),
            announcements: watch::Sender::default(),
            reset: watch::channel(None).1,
            end: watch::Sender::new(None),
            status: cluster::Writer::default(),
        };
        let mut wanted = service.wanted.subscribe();
        let mut status = service.status.subscribe();
        let Running { supervisor, stages, .. } =
            supervise("cluster", move |ctx| service.clone().run(ctx));
        let stages = stages.watch();
        let partition = uuid::Uuid::from_bytes([9; 16]);
        let disk = async {
            if !self.has_data {
                storage.send_replace(storage::Status::Absent { partition });
                let make = until(&mut wanted, "wanted", |wanted| match wanted {
                    Some(Wanted::Make(make)) => Some(make.kind()),
                    _ => None,
                });
                assert_eq!(make.await.unwrap(), Kind::Insecure);
                self.has_data = true;
            }
            root.data.create().unwrap();
            let ready = Ready {
                root: root.clone(),
                kind: Kind::Insecure,
                partition,
                device: "/dev/test3".into(),
                size: 1 << 30,
            };
            storage.send_replace(storage::Status::Ready(Arc::new(ready)));
            std::future::pending::<()>().await;
        };
        let watching = async {
            loop {
                let waits = stages.borrow().values().any(|entry| {
                    matches!(&entry.state, polis_base::stage::State::Waiting(what) if what.contains("a curator of the cluster"))
                });
                let now = status.borrow_and_update().clone();
                if now.state == State::Home {
                    return End::Home(now.node.unwrap());
                }
                if enough(&now, waits) {
                    return End::Waits(now.state, now.node);
                }
                let _slice =
                    tokio::time::timeout(Duration::from_millis(50), status.changed()).await;
            }
        };
        let end = async {
            tokio::select! {
                // Each branch only waits.
                () = disk => unreachable!("the disk stays"),
                report = supervisor.trapdoor() => End::Trapdoor(report),
                _ = was_cut.wait_for(|cut| *cut) => End::Cut,
                end = watching => end,
            }
        };
        let end = polis_tests::patiently(PATIENCE, end).await.expect("a boot ends");
        supervisor.stop().await;
        end
    }

    async fn home(&mut self, register: Option<&Register>) -> NodeId {
        match self.boot(register, usize::MAX, |_, _| false).await {
            End::Home(node) => node,
            other => panic!("{other:?}"),
        }
    }

    async fn refused(&mut self, register: &Register) -> Report {
        match self.boot(Some(register), usize::MAX, |_, _| false).await {
            End::Trapdoor(report) => report,
            other => panic!("{other:?}"),
        }
    }
}

/// The stories of this file.
pub(crate) const STORIES: &[Story] = &[
    story!(threads a_machine_with_a_ticket_becomes_one_member_whatever_happens_on_the_way)
        .takes(30),
    story!(threads a_machine_with_a_tpm_proves_it_while_it_waits_and_one_that_pretends_does_not)
        .takes(10),
    story!(threads a_node_off_past_the_end_of_its_certificate_returns_by_an_approval_of_its_boot)
        .takes(15),
];

/// The parameters of a machine that registers with this cluster.
async fn register_with(owner: &Client, cluster: &Cluster, curator: &Curator) -> Register {
    Register {
        directory: vec![DirectoryNode {
            id: curator.id,
            addresses: vec![curator.address.to_string()],
        }],
        ticket: Ticket(ticket(owner).await.into()),
        ca_certificate: cluster.authority.clone(),
        labels: BTreeMap::new(),
        name: None,
    }
}

async fn a_machine_with_a_tpm_proves_it_while_it_waits_and_one_that_pretends_does_not() {
    let machine = Machine::new();
    let BootstrapNode { node, cluster, curator, owner, .. } = BootstrapNode::start(&machine).await;
    let register = register_with(&owner, &cluster, &curator).await;
    let foreign = |status: &cluster::Status, _waits| status.state == State::Foreign;
    let proved = async |mut newcomer: Newcomer| {
        let end = newcomer.boot(Some(&register), usize::MAX, foreign).await;
        let End::Waits(_, Some(id)) = end else { panic!("{end:?}") };
        let before = cluster.store.node(id).await.unwrap().attestation;
        // It proves once a boot, and its record has the newest proof.
        let end = newcomer.boot(None, usize::MAX, foreign).await;
        assert!(matches!(end, End::Waits(_, Some(again)) if again == id), "{end:?}");
        let after = cluster.store.node(id).await.unwrap().attestation;
        assert_eq!(before.is_some(), after.is_some());
        after
    };
    assert_eq!(proved(Newcomer::new()).await, None, "it has no TPM");
    let found = proved(Newcomer::with_tpm(false)).await.unwrap();
    assert_eq!(found.fault, "");
    assert!(found.keys.is_some() && found.at > 0, "{found:?}");
    assert_eq!(found.registers.len(), REGISTERS.len());
    assert!(found.registers.iter().all(|register| register.value == [5; 32]), "{found:?}");
    let found = proved(Newcomer::with_tpm(true)).await.unwrap();
    assert!(found.fault.contains("not in the TPM"), "{found:?}");
    assert!(found.keys.is_none() && found.registers.is_empty(), "{found:?}");
    curator.supervisor.stop().await;
    node.stop().await;
}

async fn a_node_off_past_the_end_of_its_certificate_returns_by_an_approval_of_its_boot() {
    let machine = Machine::new();
    let BootstrapNode { node, cluster, curator, owner, .. } = BootstrapNode::start(&machine).await;
    let register = register_with(&owner, &cluster, &curator).await;
    let foreign = |status: &cluster::Status, _waits| status.state == State::Foreign;
    let mut newcomer = Newcomer::new();
    let End::Waits(_, Some(id)) = newcomer.boot(Some(&register), usize::MAX, foreign).await else {
        panic!("a machine with a ticket waits for approval");
    };
    let name = id.to_string();
    approve(&owner, &name).await;
    assert_eq!(newcomer.home(Some(&register)).await, id);

    // It is off for a hundred days.
    let files = Root::at(newcomer.disk.path()).data.node.credentials;
    let key = NodeKey::from_pkcs8_der(&files.key.read().unwrap().unwrap()).unwrap();
    let now = clock::now();
    cluster.store.revoke(&name, pki::Reason::Left, now).await.unwrap();
    let long_ago = now - Duration::from_secs(100 * 24 * 60 * 60);
    let old = cluster.store.ensure_node_certificate(key.identity(), long_ago).await.unwrap().der;
    files.certificate.write(pki::certificate_pem(&old).as_bytes()).unwrap();

    // It asks, and shows the words of this request.
    let asks = async |newcomer: &mut Newcomer| {
        let end = newcomer.boot(None, usize::MAX, foreign).await;
        assert!(matches!(end, End::Waits(_, Some(again)) if again == id), "{end:?}");
        let asked = cluster.store.node(id).await.unwrap().returning.unwrap();
        assert!(!asked.approved);
        Fingerprint::of_registration(&key.public_key(), &asked.nonce).unwrap().to_string()
    };
    let shown = asks(&mut newcomer).await;
    let untrusted = cluster.client(&[&curator], self_signed(&key));
    let refuses_commit = async |boot_id: String| {
        let request = v1::CommitNodeRequest { boot_id, returns: true, ..Default::default() };
        let committed = untrusted.call(Repeat::Allowed, |channel| {
            let request = request.clone();
            async move { Ok(CuratorClient::new(channel).commit_node(request).await?.into_inner()) }
        });
        reason(&committed.await.unwrap_err()).to_owned()
    };
    assert_eq!(refuses_commit(boot::secret()).await, "not-approved");

    // A copy of its disk replaces the request: the words of the machine approve nothing.
    let copy = async |certificate: &[u8]| {
        let asked = untrusted.call(Repeat::Allowed, |channel| {
            let request = v1::RegisterNodeRequest {
                boot_id: "copy".to_owned(),
                returns: true,
                certificate: certificate.to_vec(),
                ..Default::default()
            };
            async move { CuratorClient::new(channel).register_node(request).await }
        });
        asked.await.map(tonic::Response::into_inner)
    };
    assert_eq!(copy(&old).await.unwrap().state(), v1::NodeState::New);
    let approves = async |fingerprint: String| {
        let node_id = name.clone();
        let request = v1::ApproveNodeRequest { node_id, fingerprint, ..Default::default() };
        let approved = owner.call(Repeat::Allowed, |channel| {
            let request = request.clone();
            async move { ManagementClient::new(channel).approve_node(request).await }
        });
        approved.await.map(drop)
    };
    assert_eq!(reason(&approves(shown).await.unwrap_err()), "fingerprint");
    let shown = asks(&mut newcomer).await;
    approves(shown).await.unwrap();
    // The other name of this boot is in its log.
    for other in ["copy".to_owned(), boot::id()] {
        assert_eq!(refuses_commit(other).await, "not-approved");
    }
    assert_eq!(newcomer.home(None).await, id);

    let own = pki::certificate_der(&files.certificate.read().unwrap().unwrap()).unwrap();
    assert!(pki::Facts::read(&own).unwrap().not_after > now);
    assert_eq!(reason(&copy(&own).await.unwrap_err()), "not-ended");
    let (_head, entries) = auditing::log(&owner).await.unwrap();
    let approvals = entries.iter().filter(|entry| entry.call == "ApproveNode" && entry.code == 0);
    let objects: Vec<_> = approvals.map(|entry| entry.what.as_str()).collect();
    assert_eq!(objects, [&*name, &*format!("{name}, new certificate")]);
    let member = cluster.client(&[&curator], credentials(&key, own, cluster.authority.clone()));
    heartbeat(&member, v1::HeartbeatRequest::default()).await;
    let reports = member.call(Repeat::Allowed, |channel| async move {
        let status = Some(v1::NodeStatus::default());
        let request = v1::UpdateNodeStatusRequest { status, ..Default::default() };
        CuratorClient::new(channel).update_node_status(request).await
    });
    reports.await.unwrap();
    assert_eq!(cluster.store.node(id).await.unwrap().returning, None);
    curator.supervisor.stop().await;
    node.stop().await;
}

async fn a_machine_with_a_ticket_becomes_one_member_whatever_happens_on_the_way() {
    let machine = Machine::new();
    let BootstrapNode { node, cluster, curator, owner, .. } = BootstrapNode::start(&machine).await;
    let register = register_with(&owner, &cluster, &curator).await;

    // A permanent error is reported and stops the registration; each has a code of its
    // own.
    let mut newcomer = Newcomer::new();
    let wrong = Register { ticket: Ticket(b"wrong".to_vec().into()), ..register.clone() };
    let report = newcomer.refused(&wrong).await;
    assert_eq!(report.code, code::CLUSTER_TICKET, "{report:?}");
    let info = owner.call(Repeat::Allowed, |channel| async move {
        let request = v1::GetClusterInfoRequest::default();
        Ok(ManagementClient::new(channel).get_cluster_info(request).await?.into_inner())
    });
    let turned_away = &info.await.unwrap().refused_registrations[0];
    assert_eq!((turned_away.reason.as_str(), turned_away.count), ("ticket-wrong", 1));
    assert_eq!(turned_away.address, "127.0.0.1");
    let other = polis_wire::identity::NodeKey::generate().unwrap();
    let untrusted = Register { ca_certificate: other.proof().unwrap(), ..register.clone() };
    let report = Newcomer::new().refused(&untrusted).await;
    assert_eq!(report.code, code::CLUSTER_UNTRUSTED, "{report:?}");

    // The node waits while an error may pass.
    let nobody = DirectoryNode { id: curator.id, addresses: vec!["127.0.0.1:1".to_owned()] };
    let unreachable = Register { directory: vec![nobody], ..register.clone() };
    let end = Newcomer::new().boot(Some(&unreachable), usize::MAX, |_, waits| waits).await;
    assert!(matches!(end, End::Waits(State::Unknown, _)), "{end:?}");

    // With the right ticket it is foreign; after a power cut it is still the same node.
    let foreign = |status: &cluster::Status, _waits| status.state == State::Foreign;
    let end = newcomer.boot(Some(&register), usize::MAX, foreign).await;
    let End::Waits(_, Some(id)) = end else { panic!("{end:?}") };
    let end = newcomer.boot(None, usize::MAX, foreign).await;
    let End::Waits(_, Some(again)) = end else { panic!("{end:?}") };
    assert_eq!(again, id, "the journal has its key");

    approve(&owner, &id.to_string()).await;
    // A power cut after every step.
    for steps in 1..=3 {
        let end = newcomer.boot(Some(&register), steps, |_, _| false).await;
        assert!(matches!(end, End::Cut), "{steps}: {end:?}");
    }
    let home = newcomer.home(Some(&register)).await;
    assert_eq!(home, id);
    let root = Root::at(newcomer.disk.path());
    assert_eq!(root.esp.cluster_journal.read().unwrap(), None);
    assert!(root.data.node.credentials.certificate.read().unwrap().is_some());
    let record = cluster.store.node(id).await.unwrap();
    assert_eq!(record.state(), v1::NodeState::Up);
    // A member needs no parameters to come back.
    assert_eq!(newcomer.home(None).await, id);

    // A node that was deleted before it entered registers again, with the same key, and
    // commits.
    let mut newcomer = Newcomer::new();
    let End::Waits(_, Some(id)) = newcomer.boot(Some(&register), usize::MAX, foreign).await else {
        panic!("a machine with a ticket waits for approval");
    };
    let name = id.to_string();
    approve(&owner, &name).await;
    let (operator, gone) = (owner.clone(), name.clone());
    let deletes = async move { delete(&operator, &gone, false).await.unwrap() };
    let hook = move || {
        tokio::task::block_in_place(|| tokio::runtime::Handle::current().block_on(deletes));
    };
    *newcomer.hook.lock().unwrap() = Some(Box::new(hook));
    let approved_again = async {
        while newcomer_is(&cluster, id).await != Some(v1::NodeState::Standby) {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        while newcomer_is(&cluster, id).await != Some(v1::NodeState::New) {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        approve(&owner, &name).await;
    };
    let (home, ()) = tokio::join!(newcomer.home(Some(&register)), approved_again);
    assert_eq!(home, id);

    // A replaced ticket is distinguished from a wrong one.
    owner
        .call(Repeat::Allowed, |channel| async move {
            let request = v1::GetRegisterTicketRequest { rotate: true, ..Default::default() };
            ManagementClient::new(channel).get_register_ticket(request).await
        })
        .await
        .unwrap();
    let report = Newcomer::new().refused(&register).await;
    assert_eq!(report.code, code::CLUSTER_TICKET, "{report:?}");
    assert!(report.cause().contains("replaced by a newer one"), "{report:?}");

    curator.supervisor.stop().await;
    node.stop().await;
}

async fn newcomer_is(cluster: &Cluster, id: NodeId) -> Option<v1::NodeState> {
    cluster.store.node(id).await.ok().map(|node| node.state())
}
