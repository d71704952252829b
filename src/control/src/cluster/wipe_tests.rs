//! Tests of machines that wipe what a removed node left on them.

use super::fake_curator::Curator;
use super::*;
use crate::cluster::journal::{Planned, Registering};
use crate::cluster::sealed::Keeping;
use polis_wire::pki::{Store as _, Write};

/// How a removed node is found at its next boot.
fn disown(machine: &Machine) {
    let file = machine.root().esp.sealed_configuration;
    let sealed = Sealed::from_record(&file.read().unwrap().unwrap()).unwrap();
    let sealed = Sealed { disowned: true, secrets: None, ..sealed };
    file.write(&sealed.to_record()).unwrap();
    machine.shares().forget(Slot::Current).unwrap();
}

/// A machine that was a member, and the node that it was.
async fn member(configured: &Option<Cluster>) -> (Machine, NodeId) {
    let machine = Machine::new();
    match machine.boot(configured.clone(), usize::MAX).await {
        End::Home(status) => (machine, status.node.unwrap()),
        other => panic!("{other:?}"),
    }
}

/// Boots until nothing is left to restart for; returns the node, and how often it restarted.
async fn boots(machine: &Machine, configured: &Option<Cluster>) -> (NodeId, usize) {
    for reboots in 0..4 {
        match machine.boot(configured.clone(), usize::MAX).await {
            End::Home(status) => return (status.node.unwrap(), reboots),
            End::Reboot => {}
            other => panic!("{other:?}"),
        }
    }
    panic!("it reboots without end")
}

fn kinds() -> [Option<Cluster>; 2] {
    let mut authenticated = bootstrap();
    authenticated.configuration.storage = StoragePolicy::NeedsEncryptionAndAuthentication;
    [configured(), Some(Cluster::Bootstrap(authenticated))]
}

#[tokio::test]
async fn a_named_node_is_wiped_and_the_machine_is_a_new_one_whatever_is_cut() {
    for configured in kinds() {
        for steps in 1.. {
            let (mut machine, before) = member(&configured).await;
            disown(&machine);
            machine.wipes = Some(before);
            // The cluster that it founds now is another one.
            machine.etcd = Memory::default();
            let first = machine.boot(configured.clone(), steps).await;
            assert!(matches!(first, End::Cut | End::Reboot), "{steps} steps: {first:?}");
            let root = machine.root();
            let left = root.esp.sealed_configuration.read().unwrap().unwrap();
            let left = Sealed::from_record(&left).unwrap();
            assert!(left.wiped && left.disowned && left.secrets.is_none(), "keys go first");
            assert_eq!(root.esp.cold_start.read().unwrap(), None);

            let second = machine.boot(configured.clone(), steps).await;
            let (after, _reboots) = boots(&machine, &configured).await;
            assert_ne!(after, before, "{steps} steps");
            // The same parameters are still there, and mean nothing to the new node.
            assert_eq!(boots(&machine, &configured).await, (after, 0), "{steps} steps");
            if matches!(second, End::Home(_)) {
                assert!(steps > Step::ALL.len(), "the cuts came between the steps");
                break;
            }
        }
    }
}

#[tokio::test]
async fn parameters_that_name_a_node_of_the_cluster_wipe_nothing() {
    let (mut machine, node) = member(&configured()).await;
    machine.wipes = Some(node);
    assert_eq!(boots(&machine, &configured()).await, (node, 0));
    assert!(machine.has_data());
}

#[tokio::test]
async fn parameters_that_name_another_node_wipe_nothing() {
    let other = Identity::new([5; 32]).id;
    let (mut machine, node) = member(&configured()).await;
    machine.wipes = Some(other);
    assert_eq!(boots(&machine, &configured()).await, (node, 0), "a member");
    disown(&machine);
    let before = machine.root().esp.sealed_configuration.read().unwrap();
    let report = machine.boot_refused(configured()).await;
    assert_eq!(report.code, code::CLUSTER_WIPES_OTHER);
    let cause = report.cause();
    assert!(cause.contains(&other.to_string()) && cause.contains(&node.to_string()), "{cause}");
    assert!(report.next.contains(&format!("--wipes {node}")), "{}", report.next);
    assert_eq!(machine.root().esp.sealed_configuration.read().unwrap(), before);
    assert!(machine.has_data());
}

#[tokio::test]
async fn a_removed_node_names_the_parameters_that_wipe_it() {
    let (machine, node) = member(&configured()).await;
    disown(&machine);
    let report = machine.boot_refused(configured()).await;
    assert_eq!(report.code, code::CLUSTER_REMOVED);
    assert!(report.next.contains(&format!("register --wipes {node}")), "{}", report.next);
    assert!(machine.has_data());
}

#[tokio::test]
async fn data_whose_node_is_not_known_is_not_wiped() {
    let (mut machine, node) = member(&configured()).await;
    machine.wipes = Some(node);
    machine.root().esp.sealed_configuration.erase().unwrap();
    let report = machine.boot_refused(configured()).await;
    assert_eq!(report.code, code::CLUSTER_SEALED_LOST);
    assert!(machine.has_data());
}

/// The sealed configuration of a machine whose wipe has begun.
fn wiping(machine: &Machine) -> Sealed {
    let left = machine.root().esp.sealed_configuration.read().unwrap().unwrap();
    let left = Sealed::from_record(&left).unwrap();
    assert!(left.wiped && left.disowned && left.secrets.is_none(), "keys go first");
    left
}

#[tokio::test]
async fn a_named_node_that_its_cluster_does_not_have_is_wiped_whatever_is_cut() {
    let stories = [("unknown", 1), ("unknown", usize::MAX), ("decommissioned", usize::MAX)];
    for configured in kinds() {
        for (reason, steps) in stories {
            let (mut machine, before) = member(&configured).await;
            let curator = Curator::start(&machine.etcd, &[reason]).await;
            curator.is_known_to(&machine);
            machine.wipes = Some(before);
            // The cluster that it founds now is another one.
            machine.etcd = Memory::default();
            let first = machine.boot(configured.clone(), steps).await;
            assert!(matches!(first, End::Cut | End::Reboot), "{reason}: {first:?}");
            wiping(&machine);
            let (after, _reboots) = boots(&machine, &configured).await;
            assert_ne!(after, before, "{reason}");
        }
    }
}

#[tokio::test]
async fn a_named_node_that_its_cluster_has_is_not_wiped() {
    for configured in kinds() {
        for reason in ["joined", "not-up", "storage-policy"] {
            let (mut machine, node) = member(&configured).await;
            let curator = Curator::start(&machine.etcd, &[reason]).await;
            curator.is_known_to(&machine);
            machine.wipes = Some(node);
            assert_eq!(boots(&machine, &configured).await, (node, 0), "{reason}");
            assert!(machine.has_data(), "{reason}");
        }
    }
}

#[tokio::test]
async fn a_named_node_whose_certificate_is_accepted_is_not_wiped_if_its_keys_are_unknown() {
    for configured in kinds() {
        let (mut machine, node) = member(&configured).await;
        let curator = Curator::start(&machine.etcd, &["unknown"]).await;
        curator.accepts([node].into());
        curator.is_known_to(&machine);
        machine.wipes = Some(node);
        assert_eq!(boots(&machine, &configured).await, (node, 0));
        assert!(machine.has_data());
    }
}

#[tokio::test]
async fn the_answer_of_another_cluster_wipes_nothing() {
    let (mut machine, node) = member(&configured()).await;
    let stranger = Curator::start(&Memory::default(), &["unknown"]).await;
    stranger.is_known_to(&machine);
    machine.wipes = Some(node);
    assert_eq!(boots(&machine, &configured()).await, (node, 0));
    assert!(machine.has_data());
}

#[tokio::test]
async fn a_locked_disk_of_a_node_that_its_cluster_does_not_have_is_wiped_only_if_it_is_named() {
    let [_, authenticated] = kinds();
    let other = Identity::new([5; 32]).id;
    let (mut machine, node) = member(&authenticated).await;
    machine.attended = false;
    machine.root().esp.cold_start.remove().unwrap();
    for (reason, code) in
        [("unknown", code::CLUSTER_UNKNOWN), ("decommissioned", code::CLUSTER_REMOVED)]
    {
        let curator = Curator::start(&machine.etcd, &[reason]).await;
        curator.is_known_to(&machine);
        for (named, missing) in
            [(None, "name no node".to_owned()), (Some(other), other.to_string())]
        {
            machine.wipes = named;
            let report = machine.boot_refused(authenticated.clone()).await;
            assert_eq!(report.code, code);
            assert!(report.cause().contains(&missing), "{}", report.cause());
            assert!(report.next.contains(&format!("--wipes {node}")), "{}", report.next);
            assert!(machine.has_data());
        }
    }
    let curator = Curator::start(&machine.etcd, &["unknown"]).await;
    curator.is_known_to(&machine);
    machine.wipes = Some(node);
    let end = machine.boot(authenticated, usize::MAX).await;
    assert!(matches!(end, End::Reboot), "{end:?}");
    wiping(&machine);
}

/// The same records, in an etcd of their own.
async fn copied(etcd: &Memory) -> Memory {
    let copy = Memory::default();
    let puts = etcd.contents().into_iter().map(|(key, value)| Write::Put(key, value));
    assert!(copy.commit(Vec::new(), puts.collect()).await.unwrap());
    copy
}

#[tokio::test]
async fn a_named_node_that_its_cluster_has_with_another_join_key_is_not_wiped() {
    let [_, authenticated] = kinds();
    let (mut machine, node) = member(&authenticated).await;
    // The cluster does not learn of the recovery, as with a node without etcd.
    let records = copied(&machine.etcd).await;
    machine.root().esp.cold_start.remove().unwrap();
    machine.recovery = Some(machine.saved_recovery_key());
    assert_eq!(boots(&machine, &authenticated).await, (node, 0));
    machine.recovery = None;

    // It does not accept the certificate of the node either, which has ended.
    let curator = Curator::with_records(&records).await;
    curator.is_known_to(&machine);
    machine.wipes = Some(node);
    assert_eq!(boots(&machine, &authenticated).await, (node, 0), "the disk is open");
    machine.attended = false;
    machine.root().esp.cold_start.remove().unwrap();
    let report = machine.boot_refused(authenticated.clone()).await;
    assert_eq!(report.code, code::CLUSTER_UNKNOWN);
    assert!(report.unlock, "the recovery key opens the disk");
    assert!(report.cause().contains("another join key"), "{}", report.cause());
    assert!(machine.has_data());

    // The node is deleted.
    let removed = vec![Write::Delete(format!("nodes/{node}"))];
    assert!(records.commit(Vec::new(), removed).await.unwrap());
    let end = machine.boot(authenticated, usize::MAX).await;
    assert!(matches!(end, End::Reboot), "{end:?}");
    wiping(&machine);
}

#[tokio::test]
async fn a_node_that_is_removed_while_it_runs_is_wiped_at_once_if_it_is_named() {
    for configured in kinds() {
        let (mut machine, node) = member(&configured).await;
        machine.removed = true;
        machine.wipes = Some(node);
        let end = machine.boot(configured.clone(), usize::MAX).await;
        assert!(matches!(end, End::Reboot), "{end:?}");
        wiping(&machine);

        let (mut machine, node) = member(&configured).await;
        machine.removed = true;
        let report = machine.boot_refused(configured).await;
        assert_eq!(report.code, code::CLUSTER_REMOVED);
        assert!(report.next.contains(&format!("--wipes {node}")), "{}", report.next);
        assert!(machine.has_data());
    }
}

#[tokio::test]
async fn a_node_that_was_decommissioned_before_it_was_sealed_is_wiped_only_if_it_is_named() {
    let curator = Curator::start(&Memory::default(), &["decommissioned"]).await;
    let configured = curator.register();
    let mut machine = Machine::new();
    let journal = machine.root().esp.cluster_journal;
    let begun = || match Journal::from_record(&journal.read().unwrap().unwrap()).unwrap() {
        Journal::Register(begun) => begun,
        Journal::Bootstrap(_) => panic!("it registers"),
    };
    let id = |begun: &Registering| Identity::new(begun.node).id;
    machine.boot_refused(configured.clone()).await;
    // Its disk was made when it was approved.
    let disk = Planned {
        kind: Kind::Insecure,
        keeping: Keeping::default(),
        recovery_nonce: Vec::new(),
        recovery: Vec::new(),
    };
    let before = Registering { disk: Some(disk), ..begun() };
    journal.write(&before.to_record()).unwrap();
    let slots = <[Vec<u8>; 2]>::default();
    *machine.partition.lock().unwrap() = Some(Partition { kind: Kind::Insecure, slots });
    let report = machine.boot_refused(configured.clone()).await;
    assert_eq!(report.code, code::CLUSTER_REMOVED);
    assert!(report.next.contains(&format!("--wipes {}", id(&before))), "{}", report.next);
    assert!(machine.has_data());

    machine.wipes = Some(id(&before));
    let cut = machine.boot(configured.clone(), 1).await;
    assert!(matches!(cut, End::Cut), "{cut:?}");
    assert_eq!(wiping(&machine).node_public_key, before.node);
    // It registers as a new node, which the parameters do not name.
    let report = machine.boot_refused(configured.clone()).await;
    assert!(report.cause().contains(&id(&before).to_string()), "{}", report.cause());
    assert!(!machine.has_data());
    assert_eq!(machine.root().esp.sealed_configuration.read().unwrap(), None);
    let after = begun();
    assert_ne!(id(&after), id(&before));

    // The same without a disk.
    machine.wipes = Some(id(&after));
    let end = machine.boot(configured.clone(), usize::MAX).await;
    assert!(matches!(end, End::Reboot), "{end:?}");
    machine.boot_refused(configured).await;
    assert_ne!(id(&begun()), id(&after));
}
