//! Curators beside the members of `harness`, on loopback, with real TLS.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::Duration;

use polis_control::consensus::client::{Client, User};
use polis_control::consensus::{Invitation, PEER_PORT, Peer, Start};
use polis_control::curator::{self, Founding, Store};
use polis_machine::{network, time};
use polis_proto::v1;
use polis_runtime::supervisor::Supervisor;
use polis_wire::identity::{NodeId, NodeKey};
use polis_wire::pki::Authorities;
use polis_wire::pki::Host;
use polis_wire::rpc::client::{Candidate, Timeouts};
use polis_wire::rpc::{self, AccessList, Credentials, Limits, Listen, Metrics, Table};
use tokio::sync::watch;

use crate::harness::{Machine, Node, supervise};

/// A self-signed certificate of this key: only a proof of it.
pub(crate) fn self_signed(key: &NodeKey) -> Credentials {
    let pem = key.to_pkcs8_pem().unwrap();
    let pair = rcgen::KeyPair::from_pem(&pem).unwrap();
    let mut params = rcgen::CertificateParams::default();
    params.distinguished_name.push(rcgen::DnType::CommonName, "proof of a key");
    let certificate = params.self_signed(&pair).unwrap().der().to_vec();
    Credentials { certificate, key: secret(key), authorities: None }
}

fn secret(key: &NodeKey) -> Arc<zeroize::Zeroizing<Vec<u8>>> {
    Arc::new(zeroize::Zeroizing::new(key.to_pkcs8_der().unwrap().to_vec()))
}

/// The credentials of a caller that the cluster's CA has signed.
pub(crate) fn credentials(key: &NodeKey, certificate: Vec<u8>, authority: Vec<u8>) -> Credentials {
    let authorities = Some(Authorities::sole(authority).into());
    Credentials { certificate, key: secret(key), authorities }
}

/// A curator that runs beside a member.
pub(crate) struct Curator {
    pub(crate) id: NodeId,
    pub(crate) address: SocketAddr,
    pub(crate) supervisor: Supervisor,
    pub(crate) status: watch::Receiver<curator::Status>,
    /// Its copy of the records.
    pub(crate) directory: watch::Receiver<curator::Directory>,
    /// The update of the cluster, as its node shows it.
    pub(crate) update: watch::Receiver<Option<v1::GetUpdateResponse>>,
    /// The time by which its clock is ahead of the others.
    pub(crate) ahead: watch::Sender<time::Ahead>,
    _network: watch::Sender<network::Status>,
    _identity: watch::Sender<Option<polis_wire::identity::Identity>>,
    _credentials: watch::Sender<Option<Credentials>>,
}

impl Curator {
    /// Starts a curator beside `node`.
    pub(crate) fn start(machine: &Machine, node: &Node, credentials: Credentials) -> Self {
        let ip = machine.config.listen.ip();
        let bound = TcpListener::bind((ip, 0)).unwrap();
        let address = bound.local_addr().unwrap();
        let identity = watch::Sender::new(Some(machine.key.identity()));
        let network =
            watch::Sender::new(network::Status { primary: Some(ip), ..network::Status::default() });
        let credentials = watch::Sender::new(Some(credentials));
        let ahead = watch::Sender::<time::Ahead>::default();
        let table = Arc::new(Table::polis().unwrap());
        let service = curator::Service {
            config: curator::Config {
                listen: Listen::Bound(Arc::new(bound)),
                port: address.port(),
                // Tests call more often than untrusted callers do.
                limits: Limits {
                    untrusted_rate: (10_000, 10_000),
                    untrusted_rates: (10_000, 10_000),
                    ..Limits::default()
                },
                naming: |_id, address| Peer { host: Host::Address(address), port: PEER_PORT },
            },
            identity: identity.subscribe(),
            consensus: node.status.clone(),
            members: node.members.clone(),
            network: network.subscribe(),
            ahead: ahead.subscribe(),
            credentials: credentials.subscribe(),
            metrics: Arc::new(Metrics::new(&table)),
            table,
            access_list: watch::Sender::new(Arc::<AccessList>::default()),
            directory: watch::Sender::default(),
            reached: watch::Sender::default(),
            update: watch::Sender::default(),
            status: watch::Sender::default(),
        };
        let (status, directory) = (service.status.subscribe(), service.directory.subscribe());
        let update = service.update.subscribe();
        let running = supervise("curator", move |ctx| service.clone().run(ctx));
        Self {
            id: machine.key.id(),
            address,
            supervisor: running.supervisor,
            status,
            directory,
            update,
            ahead,
            _network: network,
            _identity: identity,
            _credentials: credentials,
        }
    }

    pub(crate) fn candidate(&self) -> Candidate {
        Candidate {
            node: Some(self.id),
            host: self.address.ip().to_string(),
            port: self.address.port(),
        }
    }

    /// The term of this curator, if it leads.
    pub(crate) fn term(&self) -> Option<curator::leader::Term> {
        self.status.borrow().leadership.term.clone()
    }
}

/// Waits until one of these leads, and returns which.
pub(crate) async fn leader(curators: &[&Curator], within: Duration) -> usize {
    let waits = curators.iter().enumerate().map(|(at, curator)| {
        let mut status = curator.status.clone();
        Box::pin(async move {
            let leads = polis_runtime::event::until(&mut status, "status", |status| {
                status.leadership.term.is_some().then_some(())
            });
            leads.await.unwrap();
            at
        })
    });
    let first = futures::future::select_all(waits);
    polis_tests::patiently(within, first).await.expect("somebody leads in time").0
}

/// A cluster that one machine founded, with its owner.
pub(crate) struct Cluster {
    pub(crate) owner: NodeKey,
    pub(crate) authority: Vec<u8>,
    pub(crate) store: Store<Client>,
}

impl Cluster {
    /// The files that the cluster manager of the first machine writes.
    pub(crate) async fn found(machine: &Machine, node: &Node) -> (Self, Credentials) {
        let store = Store::new(node.client(User::Curator).await);
        let owner = NodeKey::generate().unwrap();
        let policy = v1::cluster_configuration::StorageSecurityPolicy::NeedsInsecure;
        let founding = Founding {
            node: machine.key.identity(),
            labels: BTreeMap::new(),
            name: None,
            owner_public_key: owner.public_key(),
            configuration: v1::ClusterConfiguration {
                storage_security_policy: policy.into(),
                // Others than the default ones.
                pod_network: "172.16.0.0/13".to_owned(),
                service_network: "172.24.0.0/16".to_owned(),
                ..Default::default()
            },
            disk: None,
            storage_kind: v1::StorageKind::Insecure,
            restored: false,
        };
        store.found(&founding).await.unwrap();
        let now = polis_base::sys::clock::now();
        let authority = store.ensure_authority(now).await.unwrap().der;
        let cluster = Self { owner, authority, store };
        let own = cluster.credentials(machine).await;
        (cluster, own)
    }

    /// The credentials of a node of the cluster.
    pub(crate) async fn credentials(&self, machine: &Machine) -> Credentials {
        let (node, now) = (machine.key.identity(), polis_base::sys::clock::now());
        let issued = self.store.ensure_node_certificate(node, now).await.unwrap();
        credentials(&machine.key, issued.der, self.authority.clone())
    }

    /// A client of the leader, with these credentials.
    pub(crate) fn client(&self, of: &[&Curator], credentials: Credentials) -> rpc::client::Client {
        let authorities = Some(Authorities::sole(self.authority.clone()).into());
        let credentials = Credentials { authorities, ..credentials };
        let candidates = of.iter().map(|curator| curator.candidate()).collect();
        let timeouts = Timeouts { attempt: Duration::from_secs(3), total: Duration::from_secs(60) };
        rpc::client::Client::fixed(candidates, credentials, timeouts)
    }

    /// The owner, with a certificate for the key.
    pub(crate) async fn owner(&self, of: &[&Curator]) -> rpc::client::Client {
        use polis_proto::v1::aaa_client::AaaClient;
        let client = self.client(of, self_signed(&self.owner));
        let escrow = client
            .call(rpc::client::Repeat::Allowed, |channel| async move {
                Ok(AaaClient::new(channel).escrow(v1::EscrowRequest {}).await?.into_inner())
            })
            .await
            .unwrap();
        assert_eq!(escrow.ca_certificate, self.authority);
        self.client(of, credentials(&self.owner, escrow.certificate, self.authority.clone()))
    }
}

/// A cluster of one machine, as far as it is before another one comes.
pub(crate) struct BootstrapNode {
    pub(crate) node: Node,
    pub(crate) cluster: Cluster,
    /// It leads.
    pub(crate) curator: Curator,
    /// The credentials of the node.
    pub(crate) own: Credentials,
    pub(crate) owner: rpc::client::Client,
}

impl BootstrapNode {
    /// Switches `machine` on for the first time.
    pub(crate) async fn start(machine: &Machine) -> Self {
        let node = machine.start(Start::Bootstrap);
        let (cluster, own) = Cluster::found(machine, &node).await;
        let curator = Curator::start(machine, &node, own.clone());
        leader(&[&curator], Duration::from_secs(20)).await;
        let owner = cluster.owner(&[&curator]).await;
        Self { node, cluster, curator, own, owner }
    }
}

/// The answer to `JoinConsensus` as a node takes it.
pub(crate) fn invitation(answer: v1::JoinConsensusResponse, own: &Machine) -> Start {
    Start::Join(Box::new(Invitation::read(answer, own.key.id()).unwrap()))
}

/// The address of a machine.
pub(crate) fn address(machine: &Machine) -> IpAddr {
    machine.config.listen.ip()
}
