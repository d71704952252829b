//! Snapshots on their way to a stand-in of a store, which cuts the line, loses objects, refuses
//! and comes back; the sender dies and begins anew.

use std::path::PathBuf;
use std::time::{Duration, UNIX_EPOCH};

use polis_base::files::{Dir, Root};
use polis_base::sys::clock;
use polis_control::consensus::snapshots::Taken;
use polis_control::curator::snapshot_target::Target;
use polis_wire::age::{self, Identity, Recipient};
use polis_wire::rpc::testing;
use polis_wire::s3::Client;
use polis_wire::s3::testing::{Fault, Store};
use polis_wire::snapshot::Checksum;
use polis_wire::snapshot::object::Name;
use ring::digest::{SHA256, digest};

use super::ship::{Error, Shipper};
use super::*;

/// An owner, as both sides know the key.
fn owner() -> (Identity, Recipient) {
    let key = testing::key(9);
    (Identity::of_key(&key), Recipient::of_key(key.verifying_key().as_bytes()).unwrap())
}

const CLUSTER: u64 = 0x0d2f;
const FOLDER: &str = "x/cluster.internal-0000000000000d2f/";

/// A node with snapshots in its folder.
struct Node {
    _base: tempfile::TempDir,
    dir: Dir,
}

impl Node {
    fn new() -> Self {
        let base = tempfile::tempdir().unwrap();
        let dir = Root::at(base.path()).data.etcd.snapshots;
        dir.create().unwrap();
        Self { _base: base, dir }
    }

    /// Puts a snapshot there; `content` is without etcd's checksum.
    fn take(&self, number: u64, at: u64, revision: u64, content: &[u8]) -> Taken {
        let whole = [content, digest(&SHA256, content).as_ref()].concat();
        let name = format!("{number:08}-{at}-{revision}.db");
        std::fs::write(self.dir.path().join(name), &whole).unwrap();
        let at = UNIX_EPOCH + Duration::from_secs(at);
        Taken { number, at, bytes: whole.len() as u64, revision }
    }

    fn shipper(&self, store: &Store) -> Shipper {
        let (bucket, credentials) = (store.bucket("x/"), Store::credentials());
        let owners = vec![owner().1];
        let domain = "cluster.internal".to_owned();
        let bundle = PathBuf::from("/nonexistent");
        let client = Client {
            bucket: bucket.clone(),
            credentials: credentials.clone(),
            bundle,
            clock: clock::now,
        };
        let target = Target { bucket, credentials, owners, domain };
        Shipper { client, target, cluster: CLUSTER, dir: self.dir.clone() }
    }
}

/// The names and contents of the snapshots in a store.
fn stored(store: &Store) -> Vec<(Name, Vec<u8>)> {
    let objects = store.with(|state| state.objects.clone());
    let read = |(key, body): (String, Vec<u8>)| {
        (Name::parse(key.strip_prefix(FOLDER).unwrap()).unwrap(), body)
    };
    objects.into_iter().map(read).collect()
}

fn content() -> Vec<u8> {
    (0..=255).cycle().take((1 << 20) + 77).collect()
}

#[tokio::test]
async fn a_snapshot_arrives_encrypted_with_its_checksum_in_its_name() {
    let (store, node) = (Store::start("127.0.0.1"), Node::new());
    let shipper = node.shipper(&store);
    let taken = node.take(1, 1_795_694_400, 1234, &content());
    let found = shipper.look(&taken).await.unwrap();
    assert!(!found.has_it && found.newest.is_none());
    let shipped = shipper.send(&taken).await.unwrap();
    assert_eq!((shipped.at, shipped.revision), (taken.at, 1234));
    let (name, body) = stored(&store).remove(0);
    assert_eq!(name.to_string()[..22], *"20261126T120000Z-1234-");
    assert_eq!(
        (body.len() as u64, digest(&SHA256, &body).as_ref()),
        (shipped.bytes, &name.sha256[..])
    );
    let piece = &content()[..8];
    assert!(!body.windows(8).any(|bytes| bytes == piece), "a plain piece");
    let (mut plain, mut checksum) = (Vec::new(), Checksum::default());
    age::decrypt(&owner().0, &*body, &mut plain).unwrap();
    checksum.add(&plain);
    assert!(checksum.is_whole() && plain.starts_with(&content()));
    let stranger = Identity::of_key(&testing::key(8));
    assert!(age::decrypt(&stranger, &*body, &mut Vec::new()).is_err());

    // It is not sent again, by this node or by another leader with an older one.
    let found = shipper.look(&taken).await.unwrap();
    assert!(found.has_it && found.newest == Some(shipped));
    let older = node.take(2, 1_795_694_400 - 1200, 1200, b"older");
    assert!(shipper.look(&older).await.unwrap().has_it);
    let newer = node.take(3, 1_795_694_400 + 3600, 1300, b"newer");
    assert!(!shipper.look(&newer).await.unwrap().has_it);
    assert_eq!(stored(&store).len(), 1);
}

#[tokio::test]
async fn a_line_that_is_cut_leaves_nothing_and_the_next_attempt_sends_all_of_it() {
    let (store, node) = (Store::start("127.0.0.1"), Node::new());
    let shipper = node.shipper(&store);
    let taken = node.take(1, 1_795_694_400, 1234, &content());
    for after in [0, 1, 300_000] {
        store.with(|state| state.fault = Some(Fault::CutsPut(after)));
        let error = shipper.send(&taken).await.unwrap_err();
        assert!(matches!(error, Error::Store(_)), "{error}");
        assert!(stored(&store).is_empty());
    }
    store.with(|state| state.fault = Some(Fault::Forgets));
    let error = shipper.send(&taken).await.unwrap_err();
    assert!(error.help().unwrap().contains("loses objects"), "{error}");
    store.with(|state| state.fault = None);
    // The sender loses its power in the middle: its next step is a look at the bucket.
    store.with(|state| state.fault = Some(Fault::Hangs));
    let cut = tokio::time::timeout(Duration::from_millis(500), shipper.send(&taken)).await;
    assert!(cut.is_err() && stored(&store).is_empty());
    store.with(|state| state.fault = None);
    assert!(!node.shipper(&store).look(&taken).await.unwrap().has_it);
    node.shipper(&store).send(&taken).await.unwrap();
    // It lost its power after the store had taken it.
    assert!(node.shipper(&store).look(&taken).await.unwrap().has_it);
    assert_eq!(stored(&store).len(), 1);
}

#[tokio::test]
async fn only_a_whole_snapshot_is_sent() {
    let (store, node) = (Store::start("127.0.0.1"), Node::new());
    let shipper = node.shipper(&store);
    let taken = node.take(1, 1_795_694_400, 1234, &content());
    let file = node.dir.path().join("00000001-1795694400-1234.db");
    let whole = std::fs::read(&file).unwrap();
    let mut flipped = whole.clone();
    flipped[70_000] ^= 1;
    for damaged in [&whole[..whole.len() - 1], &flipped, b""] {
        std::fs::write(&file, damaged).unwrap();
        let error = shipper.send(&taken).await.unwrap_err();
        assert!(matches!(error, Error::Damaged), "{error}");
        assert!(error.help().is_some());
    }
    std::fs::remove_file(&file).unwrap();
    let error = shipper.send(&taken).await.unwrap_err();
    assert!(matches!(error, Error::Gone), "{error}");
    assert!(store.with(|state| state.requests.is_empty()), "nothing was sent");
}

#[test]
fn a_heartbeat_carries_what_is_known() {
    assert_eq!(Status::default().figures(), None);
    let at = UNIX_EPOCH + Duration::from_secs(100);
    let since = UNIX_EPOCH + Duration::from_secs(200);
    let failure = Failure { cause: "refused".to_owned(), help: Some("ask".to_owned()), since };
    let delivery = Delivery {
        target: "s3+https://a:443/bucket".to_owned(),
        newest: Some(Shipped { at, revision: 7, bytes: 9 }),
        sent: 1,
        waits_for: None,
        failure: Some(failure),
    };
    let figures = Status { delivery: Some(delivery) }.figures().unwrap();
    let numbers = (figures.newest_at, figures.newest_revision, figures.newest_bytes);
    assert_eq!((numbers, figures.failing_since), ((100, 7, 9), 200));
    assert_eq!([&*figures.failure, &*figures.help, &*figures.waits_for], ["refused", "ask", ""]);
}
