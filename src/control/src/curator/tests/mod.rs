//! Tests of the records, against a store in a map.

mod configuring;
mod lifecycle;
mod names;
mod proving;
mod registering;
mod repeating;
mod returning;
mod users;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use polis_proto::v1;

use crate::curator::Founding;
use crate::curator::state::{Commitment, Registration};
use crate::curator::store::Store;
use polis_wire::identity::{Identity, NodeName};
use polis_wire::pki::memory::Memory;
use polis_wire::pki::{self, Entry, Guard, Write};

fn first_node() -> Identity {
    Identity::new([1; 32])
}

/// The public key of the owner whom the cluster is founded for.
fn owner_key() -> [u8; 32] {
    ed25519_dalek::SigningKey::from_bytes(&[9; 32]).verifying_key().to_bytes()
}

fn noon() -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_secs(1_800_000_000)
}

async fn founded() -> (Store<Memory>, Memory) {
    let memory = Memory::default();
    let store = Store::new(memory.clone());
    let configuration = v1::ClusterConfiguration {
        storage_security_policy: v1::cluster_configuration::StorageSecurityPolicy::NeedsEncryption
            .into(),
        ..Default::default()
    };
    let founding = Founding {
        node: first_node(),
        labels: BTreeMap::new(),
        name: None,
        owner_public_key: owner_key(),
        configuration,
        disk: None,
        storage_kind: v1::StorageKind::Insecure,
        restored: false,
    };
    store.found(&founding).await.unwrap();
    store.ensure_authority(noon()).await.unwrap();
    (store, memory)
}

fn registration(key: u8, join_key: u8) -> Registration {
    Registration {
        identity: Identity::new([key; 32]),
        join_key: [join_key; 32],
        tpm: false,
        labels: BTreeMap::new(),
        address: "192.0.2.7".to_owned(),
        name: None,
        now: 100,
        nonce: [4; 16],
        attestation: None,
    }
}

fn commitment() -> Commitment {
    Commitment {
        cluster_unlock_key: vec![5; 32],
        storage_kind: v1::StorageKind::Encrypted,
        recovery_key: vec![6; 32],
        boot_id: String::new(),
    }
}

/// A firewall with one source, and a wish for it.
fn firewall(source: &str) -> (v1::FirewallConfiguration, v1::ClusterConfiguration) {
    let firewall =
        v1::FirewallConfiguration { sources: vec![source.to_owned()], ports: Vec::new() };
    let wish = v1::ClusterConfiguration { firewall: Some(firewall.clone()), ..Default::default() };
    (firewall, wish)
}

fn name(text: &str) -> Option<NodeName> {
    Some(text.parse().unwrap())
}

/// A store in which another writer writes once, right after `record` was read for the first time.
#[derive(Clone)]
struct Interfering {
    memory: Memory,
    record: String,
    write: Arc<Mutex<Option<Write>>>,
}

impl Interfering {
    fn new(memory: &Memory, record: &str, write: Write) -> Self {
        let write = Arc::new(Mutex::new(Some(write)));
        Self { memory: memory.clone(), record: record.to_owned(), write }
    }
}

impl pki::Store for Interfering {
    async fn read<const N: usize>(&self, keys: [&str; N]) -> anyhow::Result<[Option<Entry>; N]> {
        let read = self.memory.read(keys).await;
        if keys.contains(&self.record.as_str()) {
            let write = self.write.lock().unwrap().take();
            if let Some(write) = write {
                assert!(self.memory.commit(Vec::new(), vec![write]).await?);
            }
        }
        read
    }

    async fn list(&self, prefix: &str) -> anyhow::Result<Vec<(String, Entry)>> {
        self.memory.list(prefix).await
    }

    async fn commit(&self, guards: Vec<Guard>, writes: Vec<Write>) -> anyhow::Result<bool> {
        self.memory.commit(guards, writes).await
    }
}
