//! The measured side: a member of etcd and its curator, as a node runs them.

use std::collections::BTreeMap;
use std::io::Read as _;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context as _, Result, ensure};
use futures::{StreamExt as _, TryStreamExt as _};
use polis_base::files::Root;
use polis_base::sys::clock;
use polis_control::consensus::client::{Client, User};
use polis_control::consensus::snapshots::Pace;
use polis_control::consensus::{self, Orders, Peer, Probe, QUOTA, Start};
use polis_control::curator::state::{Commitment, Registration};
use polis_control::curator::tickets::TicketRequest;
use polis_control::curator::{self, Founding, Store};
use polis_machine::{network, time};
use polis_proto::v1;
use polis_proto::v1::management_client::ManagementClient;
use polis_runtime::board::Board;
use polis_runtime::event::until;
use polis_runtime::lines::Lines;
use polis_runtime::logtree::Tree;
use polis_runtime::supervisor::{Policy, Supervisor};
use polis_wire::identity::{Identity, NodeKey};
use polis_wire::pki::Host;
use polis_wire::rpc::{AccessList, Credentials, Limits, Listen, Metrics, Table};
use tokio::sync::watch;
use tokio::time::Instant;
use zeroize::Zeroizing;

use super::{Caller, Callers, callers_at};

/// Records that are made side by side.
const AT_ONCE: usize = 16;

/// Where the peers of etcd would be, if there were any.
const PEERS: Ipv4Addr = Ipv4Addr::new(127, 77, 0, 1);

/// Serves until standard input ends.
pub(super) async fn run(folder: &Path, etcd: &Path, nodes: usize) -> Result<()> {
    let root = Root::at(folder);
    root.create()?;
    let listen = SocketAddr::from((PEERS, consensus::PEER_PORT));
    let config = consensus::Config {
        binary: etcd.to_owned(),
        user: None,
        tree: root.data.etcd,
        sockets: root.ephemeral.consensus,
        listen,
        restorer: etcd.with_file_name("etcdutl"),
        snapshot: root.esp.etcd_snapshot,
        directory: root.esp.cluster_directory,
        quota: QUOTA,
        snapshot_pace: Pace::default(),
        probe: Probe::default(),
    };
    let key = NodeKey::generate()?;
    let peer = Peer { host: Host::Address(PEERS.into()), port: consensus::PEER_PORT };
    let orders = Orders { key: key.clone(), peer, start: Start::Bootstrap };
    let (_orders, ordered) = watch::channel(Some(orders));
    let member = consensus::Service::new(config, ordered);

    let bound = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("cannot listen")?;
    let address = bound.local_addr().context("cannot listen")?;
    let primary = Some(address.ip());
    let network = watch::Sender::new(network::Status { primary, ..Default::default() });
    let identity = watch::Sender::new(Some(key.identity()));
    let credentials = watch::Sender::new(None);
    // The clock of this node is not measured.
    let ahead = watch::Sender::<time::Ahead>::default();
    let table = Arc::new(Table::polis()?);
    let curator = curator::Service {
        config: curator::Config {
            listen: Listen::Bound(Arc::new(bound)),
            port: address.port(),
            // All callers have one address here, and are known.
            limits: Limits { handshakes_per_address: 256, ..Limits::default() },
            ..curator::Config::live()
        },
        identity: identity.subscribe(),
        consensus: member.status(),
        members: member.members(),
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
    let (mut status, mut serving) = (member.status(), curator.status.subscribe());
    let (lines, _written) = Lines::channel();
    let board = Board::new(BTreeMap::new(), lines.clone());
    let (begin, begins) = watch::channel(false);
    let supervisor = Supervisor::start(board, lines, Tree::new(None), move |ctx| {
        let (member, curator, mut begins) = (member.clone(), curator.clone(), begins.clone());
        async move {
            ctx.healthy();
            let forever = Policy::forever();
            ctx.spawn("consensus", forever, move |ctx| member.clone().run(ctx));
            // The records are there before the curator is.
            drop(begins.wait_for(|begin| *begin).await);
            ctx.spawn("curator", forever, move |ctx| curator.clone().run(ctx));
            ctx.cancelled().await;
            Ok::<_, consensus::Error>(())
        }
    });

    let clients = until(&mut status, "etcd", |status| status.voter().cloned()).await?;
    let store = Store::new(clients.user(User::Curator));
    let (own, callers) = populate(&store, &key, nodes, address).await?;
    let text = serde_json::to_vec(&callers).context("cannot encode the callers")?;
    std::fs::write(callers_at(folder), text).context("cannot write the callers")?;
    credentials.send_replace(Some(own));
    let began = Instant::now();
    begin.send_replace(true);
    until(&mut serving, "the curator", |status| status.is_ready().then_some(())).await?;
    answers(&callers).await?;
    println!("ready {}", began.elapsed().as_millis());
    // Until the process that started this one closes it.
    let ended = tokio::task::spawn_blocking(|| std::io::stdin().read_to_end(&mut Vec::new()));
    ended.await.context("cannot wait")?.context("cannot read")?;
    supervisor.stop().await;
    Ok(())
}

/// Has an operator list all nodes.
async fn answers(callers: &Callers) -> Result<()> {
    let connection = callers.connect(&callers.operator).await?;
    let mut management = ManagementClient::new(connection.channel);
    let nodes = management.get_nodes(v1::GetNodesRequest::default()).await?.into_inner();
    let count = nodes.try_fold(0, |count, _node| async move { Ok(count + 1) }).await?;
    // And the one that serves.
    ensure!(count == callers.nodes.len() + 1, "{count} nodes are listed");
    Ok(())
}

/// Founds the cluster, and admits all nodes.
async fn populate(
    store: &Store<Client>,
    key: &NodeKey,
    nodes: usize,
    address: SocketAddr,
) -> Result<(Credentials, Callers)> {
    let policy = v1::cluster_configuration::StorageSecurityPolicy::NeedsInsecure;
    let founding = Founding {
        name: None,
        node: key.identity(),
        labels: BTreeMap::new(),
        owner_public_key: [0; 32],
        disk: None,
        storage_kind: v1::StorageKind::Insecure,
        restored: false,
        configuration: v1::ClusterConfiguration {
            storage_security_policy: policy.into(),
            ..Default::default()
        },
    };
    store.found(&founding).await?;
    let now = clock::now();
    let authority = store.ensure_authority(now).await?.der;
    let issued = store.ensure_node_certificate(key.identity(), now).await?;
    let own = Caller { certificate: issued.der, key: key.to_pkcs8_der()?.to_vec() };
    let own = own.credentials(&authority);

    let ticket = store.ticket(TicketRequest::Read, 0).await?.opaque;
    let made = futures::stream::iter(0..nodes).map(|_| node(store, &ticket));
    let nodes = made.buffer_unordered(AT_ONCE).try_collect().await?;
    let user = NodeKey::generate()?;
    let role = v1::UserRole::Operator;
    let issued = store.create_user("operator", role, &user.public_key(), now).await?;
    let operator = Caller { certificate: issued.der, key: user.to_pkcs8_der()?.to_vec() };
    let changed = key.id().to_string();
    Ok((own, Callers { address: address.to_string(), authority, operator, nodes, changed }))
}

/// One node that is home.
async fn node(store: &Store<Client>, ticket: &[u8]) -> Result<Caller> {
    let key = NodeKey::generate()?;
    let identity = Identity::new(key.public_key());
    let join_key = NodeKey::generate()?.public_key();
    let registration = Registration {
        name: None,
        identity,
        join_key,
        tpm: false,
        labels: BTreeMap::new(),
        address: "192.0.2.1".to_owned(),
        now: 0,
        nonce: [1; 16],
        attestation: None,
    };
    store.register(ticket, registration).await?;
    store.approve(identity.id, None, None).await?;
    let commitment = Commitment {
        cluster_unlock_key: Vec::new(),
        storage_kind: v1::StorageKind::Insecure,
        recovery_key: Vec::new(),
        boot_id: String::new(),
    };
    store.enter(identity, commitment).await?;
    store.join(&join_key, None).await?;
    let issued = store.ensure_node_certificate(identity, clock::now()).await?;
    let key = Zeroizing::new(key.to_pkcs8_der()?.to_vec());
    Ok(Caller { certificate: issued.der, key: key.to_vec() })
}
