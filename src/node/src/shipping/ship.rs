//! One snapshot on its way to the bucket: read twice, encrypted, sent, and looked for there.
//!
//! The file is encrypted twice with the same key, in pieces: the first time for its checksum,
//! which is a part of the signature and of the name, the second time for the store. So neither
//! the disk nor the memory has all of the encrypted one.

use std::fs::File;
use std::io::{self, Read as _, Seek as _};

use polis_base::files::{self, Dir};
use polis_base::sys;
use polis_control::consensus::snapshots::Taken;
use polis_control::curator::snapshot_target::Target;
use polis_control::curator::store;
use polis_runtime::supervisor::blocking;
use polis_wire::age::Encryptor;
use polis_wire::s3::{self, Client};
use polis_wire::snapshot::Checksum;
use polis_wire::snapshot::object::{self, Name};
use ring::digest::{Context as Digest, SHA256};
use tokio::sync::mpsc;

use super::{Shipped, plan};

/// Bytes that are read at a time.
const PIECE: usize = 256 << 10;

/// Why a snapshot did not reach the bucket.
#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    /// The store of the cluster, which has the target.
    #[error("cannot read where snapshots go")]
    Target(#[from] store::Error),
    /// The snapshot cannot be opened.
    #[error("cannot open the newest snapshot of this node")]
    Open(#[source] files::Error),
    /// The ring has removed it.
    #[error("the newest snapshot of this node was removed meanwhile")]
    Gone,
    /// The disk fails.
    #[error("cannot read the newest snapshot of this node")]
    Read(#[source] io::Error),
    /// It changed since it was checked.
    #[error("the newest snapshot of this node is damaged: its checksum does not match any more")]
    Damaged,
    /// The kernel gives no random bytes.
    #[error("cannot encrypt a snapshot")]
    Random(#[source] anyhow::Error),
    /// The bucket.
    #[error(transparent)]
    Store(#[from] s3::Error),
    /// The store took it, and does not have it.
    #[error("{target} has accepted a snapshot and does not list it with its {bytes} bytes")]
    Lost {
        /// The bucket.
        target: String,
        /// Its bytes.
        bytes: u64,
    },
}

impl Error {
    /// The remedy for a person; `None`: nothing but wait.
    pub(super) fn help(&self) -> Option<String> {
        match self {
            Self::Store(error) => error.help(),
            Self::Open(_) | Self::Read(_) | Self::Damaged => Some(
                "the disk of this node may fail: see `polisctl etcd status`; the next snapshot is \
                 tried in an hour"
                    .to_owned(),
            ),
            Self::Lost { .. } => Some(
                "the store loses objects: do not rely on it before that is explained".to_owned(),
            ),
            Self::Target(_) | Self::Gone | Self::Random(_) => None,
        }
    }
}

/// Sends the snapshots of this node to the bucket.
#[derive(Debug)]
pub(super) struct Shipper {
    pub(super) client: Client,
    pub(super) target: Target,
    /// Etcd's number of the cluster.
    pub(super) cluster: u64,
    /// The folder of the snapshots of this node.
    pub(super) dir: Dir,
}

/// A snapshot that was read for the first time.
struct Measured {
    file: File,
    /// The key of the second encryption, and the first bytes of the object.
    encryptor: Encryptor,
    begun: Vec<u8>,
    bytes: u64,
    sha256: [u8; 32],
}

/// The result of a look at the bucket.
#[derive(Debug)]
pub(super) struct Found {
    /// The newest snapshot there.
    pub(super) newest: Option<Shipped>,
    /// Whether it makes the snapshot of this node superfluous.
    pub(super) has_it: bool,
}

impl Shipper {
    /// Whether the bucket has a snapshot as new as this one.
    pub(super) async fn look(&self, taken: &Taken) -> Result<Found, Error> {
        let folder = self.folder();
        let objects = self.client.list(&folder, &plan::begin(&folder, taken)).await?;
        let shipped = plan::snapshots(&folder, &objects);
        let instead = plan::instead(&shipped, taken);
        let newest = instead.or_else(|| plan::newest(&shipped));
        Ok(Found { newest, has_it: instead.is_some() })
    }

    /// Sends this one; it is in the bucket then.
    pub(super) async fn send(&self, taken: &Taken) -> Result<Shipped, Error> {
        let (own, taken, owners) = (self.dir.clone(), *taken, self.target.owners.clone());
        let begun = Encryptor::begin(&owners).map_err(|error| Error::Random(error.into()))?;
        let Measured { file, encryptor, begun, bytes, sha256 } = blocking(move || {
            let file = taken.open(&own).map_err(Error::Open)?.ok_or(Error::Gone)?;
            measure(file, begun)
        })
        .await?;
        let at = taken.at.duration_since(std::time::UNIX_EPOCH).unwrap_or_default().as_secs();
        let name = Name { at, revision: taken.revision, sha256 };
        let key = format!("{}{name}", self.folder());
        let (sender, pieces) = mpsc::channel(1);
        let feeding = blocking(move || feed(file, encryptor, begun, &sender));
        let (put, fed) = tokio::join!(self.client.put(&key, bytes, sha256, pieces), feeding);
        // A disk that fails is the cause of a content that is cut off.
        fed.map_err(Error::Read)?;
        put?;
        let listed = self.client.list(&key, "").await?;
        if !listed.iter().any(|object| object.key == key && object.size == bytes) {
            return Err(Error::Lost { target: self.target.bucket.url(), bytes });
        }
        Ok(Shipped { at: name.time(), revision: name.revision, bytes })
    }

    fn folder(&self) -> String {
        object::folder(&self.target.domain, self.cluster)
    }
}

/// Reads a snapshot for its checksum, and for that of the object. Blocks.
fn measure(mut file: File, (first, begun): (Encryptor, Vec<u8>)) -> Result<Measured, Error> {
    let encryptor = first.again();
    let (mut digest, mut bytes) = (Digest::new(&SHA256), 0);
    let mut checksum = Checksum::default();
    let mut add = |sealed: &[u8]| {
        digest.update(sealed);
        bytes += sealed.len() as u64;
    };
    add(&begun);
    let mut first = first;
    each_piece(&mut file, |piece| {
        checksum.add(piece);
        add(&first.push(piece));
        true
    })
    .map_err(Error::Read)?;
    add(&first.finish());
    if !checksum.is_whole() {
        return Err(Error::Damaged);
    }
    file.rewind().map_err(Error::Read)?;
    let sha256 = digest.finish().as_ref().try_into().unwrap_or_default();
    Ok(Measured { file, encryptor, begun, bytes, sha256 })
}

/// Encrypts a snapshot in pieces, as long as they are taken. Blocks.
fn feed(
    mut file: File,
    mut encryptor: Encryptor,
    begun: Vec<u8>,
    pieces: &mpsc::Sender<Vec<u8>>,
) -> io::Result<()> {
    let send = |piece: Vec<u8>| piece.is_empty() || pieces.blocking_send(piece).is_ok();
    let all = send(begun)
        && each_piece(&mut file, |piece| send(encryptor.push(piece)))?
        && send(encryptor.finish());
    // One that is not sent is the fault of its receiver, which says why.
    let _sent = all;
    sys::files::forget(&file)
}

/// Reads a file in pieces until its end, or until `take` refuses one; returns whether all were
/// taken.
fn each_piece(file: &mut File, mut take: impl FnMut(&[u8]) -> bool) -> io::Result<bool> {
    let mut piece = vec![0; PIECE];
    loop {
        match file.read(&mut piece)? {
            0 => return Ok(true),
            count if take(&piece[..count]) => {}
            _ => return Ok(false),
        }
    }
}
