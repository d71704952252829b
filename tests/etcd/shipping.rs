//! Snapshots of a real etcd that leave the machine: sent to a stand-in of a store by the leader,
//! fetched with the key of the bucket, decrypted with that of the owner, and begun with.

use std::fs;
use std::time::Duration;

use polis_base::files::Root;
use polis_base::sys::clock;
use polis_control::consensus::Start;
use polis_control::consensus::client::User;
use polis_node::shipping::{Config, Delivery, Inputs, Service, Status};
use polis_proto::v1;
use polis_proto::v1::management_client::ManagementClient;
use polis_runtime::event::until;
use polis_tests::{Story, patiently, story};
use polis_wire::age;
use polis_wire::rpc::client::{Client, Repeat};
use polis_wire::s3::testing::{Fault, KEY, REGION, SECRET, Store};
use polis_wire::s3::{self, Credentials};
use polis_wire::snapshot::object::Name;
use tokio::sync::watch;
use tonic::Code;

use crate::curators::{BootstrapNode, Curator};
use crate::harness::{Machine, Node, Running, supervise};
use crate::operating::identity;
use crate::snapshots::{FAST, content, fill};

/// Longer than anything here may take on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// The stories of this file.
pub(crate) const STORIES: &[Story] = &[
    story!(async a_snapshot_reaches_a_store_and_founds_a_cluster_with_the_same_content),
    story!(async the_key_of_a_store_is_written_with_its_target_and_handed_out_by_no_call),
];

/// The shipping of a node.
struct Shipping {
    status: watch::Receiver<Status>,
    running: Running,
}

impl Shipping {
    fn start(root: &Root, node: &Node, curator: &Curator) -> Self {
        let status = watch::Sender::default();
        let service = Service {
            config: Config { snapshots: root.data.etcd.snapshots.clone(), ..Config::live(root) },
            inputs: Inputs {
                curator: curator.status.clone(),
                directory: curator.directory.clone(),
                consensus: node.status.clone(),
            },
            status: status.clone(),
        };
        let running = supervise("shipping", move |ctx| service.clone().run(ctx));
        Self { status: status.subscribe(), running }
    }

    /// Waits until what has reached the target is so.
    async fn waits(&self, what: &str, so: impl Fn(&Delivery) -> bool) -> Delivery {
        let mut status = self.status.clone();
        let found = until(&mut status, "the target", |status| {
            status.delivery.clone().filter(|delivery| so(delivery))
        });
        let found = patiently(PATIENCE, found).await;
        let now = || self.status.borrow().clone();
        found.unwrap_or_else(|_late| panic!("waited for {what}, but it is {:?}", now())).unwrap()
    }
}

fn target(store: &Store, prefix: &str) -> v1::SnapshotConfiguration {
    v1::SnapshotConfiguration {
        url: store.url(store.address.port(), prefix),
        region: REGION.to_owned(),
        ca: store.ca.clone(),
    }
}

fn key(secret: &str) -> v1::SnapshotCredentials {
    let [access_key_id, secret_access_key] = [KEY, secret].map(str::to_owned);
    v1::SnapshotCredentials { access_key_id, secret_access_key }
}

/// Changes the target of snapshots, the key of it, or both.
async fn configure(
    owner: &Client,
    target: Option<v1::SnapshotConfiguration>,
    key: Option<v1::SnapshotCredentials>,
) -> Result<v1::ConfigureClusterResponse, tonic::Status> {
    let configuration = v1::ClusterConfiguration { snapshots: target, ..Default::default() };
    let request = v1::ConfigureClusterRequest {
        configuration: Some(configuration),
        snapshot_credentials: key,
    };
    owner
        .call(Repeat::Allowed, |channel| {
            let request = request.clone();
            async move {
                let mut leader = ManagementClient::new(channel);
                Ok(leader.configure_cluster(request).await?.into_inner())
            }
        })
        .await
}

/// The newest object of a bucket, by its name, fetched as any client of S3 would.
async fn fetched(store: &Store, prefix: &str) -> (Name, Vec<u8>) {
    let client = s3::Client {
        bucket: store.bucket(prefix),
        credentials: Credentials::new(KEY, SECRET).unwrap(),
        bundle: "/nonexistent".into(),
        clock: clock::now,
    };
    let objects = client.list("cluster.internal-", "").await.unwrap();
    let newest = objects.last().unwrap();
    let name = Name::parse(newest.key.rsplit_once('/').unwrap().1).unwrap();
    let mut content = Vec::new();
    let mut sink = |piece: &[u8]| {
        content.extend_from_slice(piece);
        Ok(())
    };
    client.get(&newest.key, newest.size, &mut sink).await.unwrap();
    (name, content)
}

async fn a_snapshot_reaches_a_store_and_founds_a_cluster_with_the_same_content() {
    let mut machine = Machine::new();
    machine.config.snapshot_pace = FAST;
    let BootstrapNode { node, cluster, curator, owner, .. } = BootstrapNode::start(&machine).await;
    let shipping = Shipping::start(&machine.root(), &node, &curator);
    assert_eq!(*shipping.status.borrow(), Status::default(), "the cluster names no bucket");
    let client = node.client(User::Curator).await;
    fill(&client).await;
    let (kept, revision) = content(&client, "key-").await;

    // The store is away at first, and then does not know the key.
    let store = Store::start("127.0.0.1");
    store.with(|state| state.fault = Some(Fault::Refuses(503, "SlowDown", "")));
    configure(&owner, Some(target(&store, "polis")), Some(key("wrong"))).await.unwrap();
    let failing = shipping.waits("a failure", |it| it.failure.is_some()).await;
    assert!(failing.failure.unwrap().cause.contains("SlowDown"));
    store.with(|state| state.fault = None);
    let refused = |it: &Delivery| {
        let failure = it.failure.as_ref();
        failure.is_some_and(|failure| failure.cause.contains("SignatureDoesNotMatch"))
    };
    let refusing = shipping.waits("a refusal", refused).await;
    let help = refusing.failure.unwrap().help.unwrap();
    assert!(help.contains("--snapshot-credentials"), "{help}");
    assert!(store.with(|state| state.objects.is_empty()));
    configure(&owner, None, Some(key(SECRET))).await.unwrap();

    let has_it = |it: &Delivery| it.newest.is_some_and(|newest| newest.revision >= revision);
    let shipped = shipping.waits("a snapshot in the store", has_it).await;
    println!("{shipped:?}");
    assert_eq!(shipped.failure, None);
    // The leader stops: the bucket stays as it is.
    shipping.running.supervisor.stop().await;
    let number = node.status.borrow().cluster.unwrap();
    curator.supervisor.stop().await;
    node.stop().await;
    let folder = format!("polis/cluster.internal-{number:016x}/");
    let keys = store.with(|state| state.objects.keys().cloned().collect::<Vec<_>>());
    assert!(keys.iter().all(|key| key.starts_with(&folder)), "{keys:?}");

    // The disaster: only the bucket and the key of the owner are left.
    let (name, object) = fetched(&store, "polis/").await;
    assert_eq!(ring::digest::digest(&ring::digest::SHA256, &object).as_ref(), name.sha256);
    assert!(!object.windows(8).any(|bytes| bytes == [7; 8]), "a plain value");
    let heir = Machine::new();
    let mut plain = Vec::new();
    age::decrypt(&identity(&cluster.owner), &*object, &mut plain).unwrap();
    fs::write(heir.config.snapshot.path(), plain).unwrap();
    let node = heir.start(Start::Bootstrap);
    let (restored, _) = content(&node.client(User::Curator).await, "key-").await;
    assert_eq!((restored.len(), restored), (100, kept));
    node.stop().await;
}

async fn the_key_of_a_store_is_written_with_its_target_and_handed_out_by_no_call() {
    let machine = Machine::new();
    let BootstrapNode { node, cluster, curator, owner, .. } = BootstrapNode::start(&machine).await;
    let store = Store::start("127.0.0.1");
    let refused = configure(&owner, Some(target(&store, "a")), None).await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument);
    assert!(refused.message().contains("snapshot_credentials"), "{refused:?}");
    let refused = configure(&owner, None, Some(key(SECRET))).await.unwrap_err();
    assert!(refused.message().contains("no target of snapshots"), "{refused:?}");
    let bad = v1::SnapshotCredentials { access_key_id: "a b".to_owned(), ..key(SECRET) };
    let refused = configure(&owner, Some(target(&store, "a")), Some(bad)).await.unwrap_err();
    assert!(refused.message().contains("access key ID"), "{refused:?}");
    assert!(!refused.message().contains(SECRET), "{refused:?}");
    assert_eq!(cluster.store.configuration().await.unwrap().snapshots, None);
    assert!(cluster.store.snapshot_target().await.unwrap().is_none());

    let answer = configure(&owner, Some(target(&store, "a")), Some(key(SECRET))).await.unwrap();
    let info = owner.call(Repeat::Allowed, |channel| async move {
        let request = v1::GetClusterInfoRequest::default();
        Ok(ManagementClient::new(channel).get_cluster_info(request).await?.into_inner())
    });
    let audit = owner.call(Repeat::Allowed, |channel| async move {
        let mut leader = ManagementClient::new(channel);
        let mut entries = leader.get_audit(v1::GetAuditRequest::default()).await?.into_inner();
        let mut all = Vec::new();
        while let Some(entry) = entries.message().await? {
            all.push(entry);
        }
        Ok(all)
    });
    let said = format!("{answer:?} {:?} {:?}", info.await.unwrap(), audit.await.unwrap());
    assert!(said.contains("ConfigureCluster") && !said.contains(SECRET), "{said}");
    assert!(!format!("{:?}", key(SECRET)).contains(SECRET));
    let stored = cluster.store.snapshot_target().await.unwrap().unwrap();
    assert_eq!(*stored.credentials.secret_access_key, SECRET);
    assert!(!format!("{stored:?}").contains(SECRET));

    // Another prefix of the same bucket needs no key, another bucket does.
    configure(&owner, Some(target(&store, "b")), None).await.unwrap();
    let elsewhere = v1::SnapshotConfiguration {
        url: "s3+https://other.example/bucket".to_owned(),
        ..Default::default()
    };
    let refused = configure(&owner, Some(elsewhere), None).await.unwrap_err();
    assert!(refused.message().contains("another bucket"), "{refused:?}");
    let stored = cluster.store.snapshot_target().await.unwrap().unwrap();
    assert_eq!(stored.bucket.prefix, "b/");
    // Without a target there is no key.
    configure(&owner, Some(v1::SnapshotConfiguration::default()), None).await.unwrap();
    assert!(cluster.store.snapshot_target().await.unwrap().is_none());
    let client = node.client(User::Curator).await;
    assert!(client.get("cluster/snapshot_credentials").await.unwrap().is_none());
    curator.supervisor.stop().await;
    node.stop().await;
}
