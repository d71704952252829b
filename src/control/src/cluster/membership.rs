//! The steps that make a node a member for good: in the cluster's store and on its own disk.
//!
//! ```text
//! store: founding records -> CA -> node certificate
//!     disk: credentials -> sealed configuration -> share forgotten, if attended
//!         -> journal removed
//! ```
//!
//! Invariants:
//! - Every step may be repeated, and finds the result of an earlier attempt.
//! - The sealed configuration is written last of all that a member needs, so a boot that
//!   finds it finds the rest.
//!
//! What this module does not do: wait for anything (`service`).

use std::time::SystemTime;

use polis_proto::v1;
use tracing::{info, warn};

use super::Error;
use super::journal::Journal;
use super::probe::{Probe, Step};
use super::record::{self, Record};
use super::sealed::{Keeping, Sealed, cold_start_value, tpm_value};
use super::unlock::Keys;
use super::unlock::keeper::{Keeper, Shares, Slot};
use crate::curator::{DiskKeys, Founding, Store};
use polis_base::files::Root;
use polis_base::sys::clock;
use polis_machine::parameters::ColdStart;
use polis_machine::storage::Kind;
use polis_runtime::save::Save as _;
use polis_runtime::supervisor::blocking;
use polis_wire::identity::Identity;
use polis_wire::pki::{self, Authorities};

/// The local inputs of the first node of a cluster.
#[derive(Clone, Copy, Debug)]
pub(super) struct Own<'a> {
    pub(super) root: &'a Root,
    pub(super) shares: &'a Shares,
    pub(super) kind: Kind,
    pub(super) keys: Option<&'a Keys>,
    pub(super) keeping: Keeping,
}

/// Takes every remaining step.
pub(super) async fn ensure<S: pki::Store + Clone>(
    store: &Store<S>,
    founding: &Founding,
    own: Own<'_>,
    probe: &Probe,
) -> Result<Sealed, Error> {
    let Own { root, shares, kind, keys, keeping } = own;
    store.found(founding).await?;
    probe.passed(Step::Founded)?;

    let authority = store.ensure_authority(clock::now()).await?;
    probe.passed(Step::Authority)?;

    let issued = store.ensure_node_certificate(founding.node, clock::now()).await?;
    probe.passed(Step::Certificate)?;

    let credentials = &root.data.node.credentials;
    let pem = |der: &[u8]| pki::certificate_pem(der).into_bytes();
    credentials.certificate.save(pem(&issued.der)).await?;
    // With those before it: a cluster that begins again from a snapshot may have rotated its CA.
    let authorities = store.authorities().await?;
    credentials.authorities.save(authorities.to_record()).await?;
    probe.passed(Step::Credentials)?;

    let sealed = Sealed {
        node_public_key: founding.node.public_key,
        cluster_ca: authority.der,
        rotated_ca: None,
        storage: kind,
        secrets: keys.map(|keys| keys.secrets.clone()),
        keeping,
        disowned: false,
        wiped: false,
    };
    root.esp.sealed_configuration.save(sealed.to_record()).await?;
    probe.passed(Step::Sealed)?;

    if keeping.cold_start == ColdStart::Attended && keys.is_some() {
        let shares = shares.clone();
        blocking(move || shares.forget(Slot::Current)).await?;
    }

    conclude(root, Some(store)).await?;
    probe.passed(Step::Finished)?;
    Ok(sealed)
}

/// Checks that the store is the one of the cluster in `sealed`; returns the node's record.
pub(super) async fn check<S: pki::Store + Clone>(
    store: &Store<S>,
    sealed: &Sealed,
    node: Identity,
) -> Result<v1::Node, Error> {
    // Together: while a cluster starts, each linearizable read may take a second.
    let (record, authorities) = tokio::try_join!(store.complete(node), store.authorities())?;
    if !authorities.contains(&sealed.cluster_ca) && !authorities.contains(sealed.trusted()) {
        return Err(Error::OtherCluster);
    }
    Ok(record)
}

/// Completes the record of the CAs if an earlier version wrote it, and renews the certificate of
/// this node if it has expired: the machine was off for so long, and perhaps the whole cluster
/// with it, so that no leader could be asked. A voter does both without a leader.
pub(super) async fn renew_ended<S: pki::Store + Clone>(
    store: &Store<S>,
    record: &v1::Node,
    node: Identity,
    root: &Root,
    now: SystemTime,
) -> Result<(), Error> {
    complete_authorities(store, root).await?;
    let file = root.data.node.credentials.certificate.clone();
    let read = file.clone();
    let old = blocking(move || read.read()).await?.unwrap_or_default();
    let facts = pki::certificate_der(&old).and_then(|der| pki::Facts::read(&der));
    let ended = facts.is_some_and(|facts| facts.not_after <= now);
    if !ended || record.state() != v1::NodeState::Up {
        return Ok(());
    }
    match store.renew_node_certificate(node, now).await? {
        Some(issued) => {
            file.save(pki::certificate_pem(&issued.der).into_bytes()).await?;
            info!("the certificate of this node had ended and is renewed");
        }
        None => warn!("the certificate of this node is revoked and not renewed"),
    }
    Ok(())
}

/// Writes the record of the CAs that the store has in place of one with a CA of a rotation alone.
/// Earlier versions wrote such a record on the node that founded a cluster again from a snapshot.
/// No authorities follow from it, so this node would take part in no rotation.
async fn complete_authorities<S: pki::Store + Clone>(
    store: &Store<S>,
    root: &Root,
) -> Result<(), Error> {
    let file = root.data.node.credentials.authorities.clone();
    let read = file.clone();
    let record = blocking(move || read.read()).await?.unwrap_or_default();
    let Some(known) = Authorities::from_record(&record) else { return Ok(()) };
    if known.made_in() == 0 || known != Authorities::sole(known.signing.clone()) {
        return Ok(());
    }
    let whole = store.authorities().await?;
    // The store is this member's own; all the same, only what the known CA leads to is trusted.
    if whole.succeed(&known.signing) {
        file.save(whole.to_record()).await?;
        info!(rotations = whole.rotations, "the record of the CAs of the cluster is complete");
    }
    Ok(())
}

/// Keeps the CA of the cluster where the next start finds it before the disk is open: the one
/// that this node knew last. Returns what the ESP has then.
pub(super) async fn keep_rotated(root: &Root, sealed: Sealed) -> Result<Sealed, Error> {
    let (file, esp) =
        (root.data.node.credentials.authorities.clone(), root.esp.sealed_configuration.clone());
    let known = blocking(move || file.read()).await?;
    let known = known.and_then(|record| Authorities::from_record(&record));
    // During a rotation not every curator shows a certificate of the next one.
    let oldest = known.map(|known| known.leaving.unwrap_or(known.signing));
    let Some(newer) = oldest.filter(|ca| ca != sealed.trusted()) else { return Ok(sealed) };
    let sealed = Sealed { rotated_ca: Some(newer), ..sealed };
    esp.save(sealed.to_record()).await?;
    Ok(sealed)
}

/// Reconciles the cluster's records of this node's disk, the cluster's policy for it, and
/// the files on the ESP; returns the keeper of the share.
pub(super) async fn converge<S: pki::Store + Clone>(
    store: &Store<S>,
    node: Identity,
    keys: &Keys,
    own: &Sealed,
    root: &Root,
    shares: &Shares,
) -> Result<Option<Keeper>, Error> {
    // The cluster first: a share is removed only once the half is safe there.
    store.keep_disk_keys(node, &record(keys)).await?;
    let configuration = store.configuration().await?;
    let keeping = Keeping {
        tpm: tpm_value(configuration.tpm_mode()),
        cold_start: cold_start_value(configuration.cold_start()),
    };
    if keeping != own.keeping {
        let sealed = Sealed { keeping, secrets: Some(keys.secrets.clone()), ..own.clone() };
        root.esp.sealed_configuration.save(sealed.to_record()).await?;
    }
    let (shares, keys) = (shares.clone(), keys.clone());
    blocking(move || match (keeping.cold_start, keys.keeper) {
        (ColdStart::Attended, None) => Ok(None),
        (ColdStart::Attended, Some(_)) => shares.forget(Slot::Current).map(|()| None),
        (ColdStart::Automatic, Some(keeper)) => Ok(Some(keeper)),
        (ColdStart::Automatic, None) => {
            shares.keep(Slot::Current, &keys.secrets, &keys.cluster).map(Some)
        }
    })
    .await
}

/// The part of `keys` that the cluster keeps.
pub(super) fn record(keys: &Keys) -> DiskKeys {
    DiskKeys {
        cluster_unlock_key: *keys.cluster.bytes(),
        join_key: keys.join_key,
        tpm: keys.secrets.is_sealed(),
    }
}

/// Removes the journal. For a bootstrap, the snapshot that the cluster in `store` began with
/// is overwritten first: it holds every secret of the cluster. Otherwise a snapshot belongs to
/// an operator, who may have put it into the wrong machine, or into this one too late: after
/// the bootstrap had begun without it.
pub(super) async fn conclude<S: pki::Store + Clone>(
    root: &Root,
    store: Option<&Store<S>>,
) -> Result<(), Error> {
    let (journal, snapshot) = (root.esp.cluster_journal.clone(), root.esp.etcd_snapshot.clone());
    let journal_record = record::read_from(&journal, Journal::from_record).await?;
    let founded = matches!(journal_record, Record::Whole(Journal::Bootstrap(_)));
    let given = snapshot.clone();
    let filled = blocking(move || given.is_filled()).await?;
    let used = match store {
        Some(store) if filled && founded => store.began_again().await?,
        Some(_) | None => false,
    };
    blocking(move || {
        match (filled, used) {
            (true, true) => {
                warn!("the snapshot of etcd on the ESP is overwritten with zeros");
                snapshot.erase()?;
            }
            (true, false) => warn!(
                "the snapshot of etcd on the ESP is not used: this machine is already a member; \
                 to found a cluster from it here, wipe the first 16 MiB of the data partition, \
                 delete it and polis/sealed_configuration.pb, else remove the snapshot: it \
                 contains every secret"
            ),
            (false, _) => {}
        }
        Ok(journal.erase()?)
    })
    .await
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::path::Path;
    use std::sync::Arc;

    use polis_wire::pki::memory::Memory;

    use super::*;
    use crate::cluster::tests::{FakeTpm, begun};
    use crate::cluster::unlock::sealer::Sealer;

    fn founding(key: u8, restored: bool) -> Founding {
        Founding {
            node: Identity::new([key; 32]),
            labels: BTreeMap::new(),
            name: None,
            owner_public_key: [1; 32],
            configuration: v1::ClusterConfiguration::default(),
            disk: None,
            storage_kind: v1::StorageKind::Authenticated,
            restored,
        }
    }

    /// The store of a cluster that has rotated its CA once.
    async fn rotated() -> Store<Memory> {
        let store = Store::new(Memory::default());
        store.found(&founding(7, false)).await.unwrap();
        store.ensure_authority(clock::now()).await.unwrap();
        store.rotate(1, clock::now()).await.unwrap();
        assert!(store.conclude().await.unwrap());
        store
    }

    /// The tree of a machine without a disk key.
    fn machine(disk: &Path) -> (Root, Shares) {
        let root = Root::at(disk);
        root.create().unwrap();
        let sealer = Sealer::new(Arc::new(FakeTpm::default()), disk);
        let shares = Shares::new(sealer, &root.esp, disk);
        (root, shares)
    }

    fn known(root: &Root) -> Authorities {
        let record = root.data.node.credentials.authorities.read().unwrap().unwrap();
        Authorities::from_record(&record).unwrap()
    }

    #[tokio::test]
    async fn a_node_that_founds_a_cluster_again_knows_its_cas_and_follows_the_next_rotation() {
        let store = rotated().await;
        let disk = tempfile::tempdir().unwrap();
        let (root, shares) = machine(disk.path());
        let own = Own {
            root: &root,
            shares: &shares,
            kind: Kind::Insecure,
            keys: None,
            keeping: Keeping::default(),
        };
        let again = founding(8, true);
        let sealed = Box::pin(ensure(&store, &again, own, &Probe::default())).await.unwrap();
        let before = known(&root);
        assert_eq!(before, store.authorities().await.unwrap());
        assert_eq!((before.rotations, &before.signing), (1, &sealed.cluster_ca));
        check(&store, &sealed, again.node).await.unwrap();

        store.rotate(2, clock::now()).await.unwrap();
        let both = store.authorities().await.unwrap();
        assert!(both.follow(&before), "{both:?} after {before:?}");
        assert!(store.conclude().await.unwrap());
        assert!(store.authorities().await.unwrap().follow(&both));
    }

    #[tokio::test]
    async fn a_record_of_the_last_ca_alone_is_completed_from_the_store_that_it_leads_to() {
        let store = rotated().await;
        let disk = tempfile::tempdir().unwrap();
        let (root, _shares) = machine(disk.path());
        let node = Identity::new([8; 32]);
        let boots = async |written: &Authorities| {
            root.data.node.credentials.authorities.write(&written.to_record()).unwrap();
            let record = v1::Node::default();
            Box::pin(renew_ended(&store, &record, node, &root, clock::now())).await.unwrap();
            known(&root)
        };
        let first = store.authorities().await.unwrap();
        let alone = Authorities::sole(first.signing.clone());
        assert_eq!(boots(&alone).await, first);

        // Another rotation has begun since.
        store.rotate(2, clock::now()).await.unwrap();
        let whole = store.authorities().await.unwrap();
        assert!(!whole.follow(&alone), "it would never be trusted");
        assert_eq!(boots(&alone).await, whole);
        // A record that is complete follows by itself, whatever the store has.
        assert_eq!(boots(&first).await, first);
        let founder = Authorities::sole(first.former[0].clone());
        assert_eq!(boots(&founder).await, founder);
        let foreign = Authorities::sole(rotated().await.authorities().await.unwrap().signing);
        assert_eq!(boots(&foreign).await, foreign);
    }

    #[tokio::test]
    async fn only_the_end_of_a_bootstrap_removes_a_snapshot() {
        let disk = tempfile::tempdir().unwrap();
        let root = Root::at(disk.path());
        root.create().unwrap();
        let snapshot = root.esp.etcd_snapshot.clone();
        std::fs::write(snapshot.path(), b"a person's").unwrap();
        let store = Store::new(Memory::default());
        conclude(&root, Some(&store)).await.unwrap();
        root.esp.cluster_journal.write(b"damaged").unwrap();
        conclude(&root, Some(&store)).await.unwrap();
        // The snapshot came after this machine had begun a cluster without it.
        store.found(&founding(7, true)).await.unwrap();
        root.esp.cluster_journal.write(&begun().to_record()).unwrap();
        conclude(&root, Some(&store)).await.unwrap();
        assert_eq!(snapshot.read().unwrap().unwrap(), b"a person's");
        assert_eq!(root.esp.cluster_journal.read().unwrap(), None);
        // Another machine begins from what the first one has, as a snapshot.
        store.found(&founding(8, true)).await.unwrap();
        root.esp.cluster_journal.write(&begun().to_record()).unwrap();
        conclude(&root, Some(&store)).await.unwrap();
        assert!(!snapshot.is_filled().unwrap());
        assert_eq!(root.esp.cluster_journal.read().unwrap(), None);
    }
}
