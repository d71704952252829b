//! Calls that are repeated.

use std::collections::BTreeMap;

use polis_proto::v1::{self, UserRole};

use super::{firewall, first_node, founded, name, noon, owner_key};
use crate::curator::state::Request;
use crate::curator::store::Store;
use polis_wire::node_roles::Role;
use polis_wire::pki::Store as _;
use polis_wire::pki::memory::Memory;

/// A call of each kind that operators may make about the first node.
async fn operate(store: &Store<Memory>) {
    let id = first_node().id;
    let set = BTreeMap::from([("zone".to_owned(), "a".to_owned())]);
    let effect = v1::node_taint::Effect::NoSchedule.into();
    let taint = v1::NodeTaint { key: "gpu".to_owned(), value: String::new(), effect };
    let add = Role::record(&[Role::KubernetesWorker]);
    store.approve(id, None, None).await.unwrap();
    for change in [
        Request::Labels { set, remove: vec!["missing".to_owned()] },
        Request::Taints { set: vec![taint], remove: Vec::new() },
        Request::Roles { add, remove: v1::NodeRoles::default() },
        Request::Network(v1::NetworkOrder { number: 7, configuration: None }),
        Request::ForgetRecoveryKey,
    ] {
        store.change(id, change).await.unwrap();
    }
    store.name_node(id, name("web").as_ref()).await.unwrap();
}

/// A target of snapshots, and its key.
fn target(secret: &str) -> (v1::SnapshotConfiguration, v1::SnapshotCredentials) {
    let url = "s3+https://s3.example/bucket".to_owned();
    let target = v1::SnapshotConfiguration { url, ..Default::default() };
    let key = v1::SnapshotCredentials {
        access_key_id: "id".to_owned(),
        secret_access_key: secret.to_owned(),
    };
    (target, key)
}

/// A call of each kind that owners may make about the cluster.
async fn own(store: &Store<Memory>) {
    let (firewall, wish) = firewall("192.0.2.0/24");
    let (snapshots, key) = target("secret");
    let wish = v1::ClusterConfiguration { snapshots: Some(snapshots), ..wish };
    store.configure(wish, Some(key), noon()).await.unwrap();
    store.confirm_firewall(firewall, noon()).await.unwrap();
    let registry = v1::Registry { host: "a.example".to_owned(), ..Default::default() };
    store.set_registry(&registry, noon()).await.unwrap();
    store.escrow(&owner_key(), noon()).await.unwrap();
    store.create_user("ann", UserRole::Viewer, &[2; 32], noon()).await.unwrap();
    store.revoke_user("bob", noon()).await.unwrap();
    store.begin_rotation(100).await.unwrap();
}

/// The leader counts a call that wrote nothing in its audit log (`serve::audit`).
#[tokio::test]
async fn a_call_that_is_repeated_with_the_same_values_writes_nothing() {
    let (store, memory) = founded().await;
    store.create_user("bob", UserRole::Viewer, &[3; 32], noon()).await.unwrap();
    Box::pin(operate(&store)).await;
    Box::pin(own(&store)).await;
    // With the revisions: a value that is written again has another one.
    let before = memory.list("").await.unwrap();
    Box::pin(operate(&store)).await;
    Box::pin(own(&store)).await;
    let after = memory.list("").await.unwrap();
    let written = after.iter().filter(|entry| !before.contains(entry)).map(|(key, _)| key);
    assert_eq!(written.collect::<Vec<_>>(), Vec::<&String>::new());
    assert_eq!(after.len(), before.len());
    // Another key of the same bucket is a change.
    let (_, other) = target("other");
    store.configure(v1::ClusterConfiguration::default(), Some(other), noon()).await.unwrap();
    assert_ne!(memory.list("").await.unwrap(), after);
}
