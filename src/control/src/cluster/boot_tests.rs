//! Tests of first boots, later boots, and losses between them.

use super::*;
use crate::curator::Store;
use polis_base::files;
use polis_base::sys::clock;

#[tokio::test]
async fn a_first_boot_ends_at_home_with_a_sealed_configuration_and_no_journal() {
    let machine = Machine::new();
    let status = machine.boot_home().await;
    assert_eq!(status.roles, [Role::ConsensusMember]);
    let root = machine.root();
    let sealed = root.esp.sealed_configuration.read().unwrap().unwrap();
    let sealed = Sealed::from_record(&sealed).unwrap();
    assert_eq!(Some(Identity::new(sealed.node_public_key).id), status.node);
    assert_eq!(root.esp.cluster_journal.read().unwrap(), None);
    assert!(root.data.node.credentials.certificate.read().unwrap().is_some());
}

#[tokio::test]
async fn a_power_cut_after_any_step_ends_as_the_same_node_in_the_same_cluster() {
    for steps in 1..=Step::ALL.len() {
        let machine = Machine::new();
        let cut = machine.boot(configured(), steps).await;
        assert!(matches!(cut, End::Cut), "{steps} steps: {cut:?}");
        let key = machine.root().data.node.credentials.key.read().ok().flatten();
        let before = machine.etcd.contents();
        let status = machine.boot_home().await;
        if let Some(key) = key {
            let node = NodeKey::from_pkcs8_der(&key).unwrap().id();
            assert_eq!(status.node, Some(node), "{steps} steps");
        }
        let after = machine.etcd.contents();
        for (key, value) in before {
            assert_eq!(after.get(&key), Some(&value), "{steps} steps: {key} was made again");
        }
        // The node stays home.
        assert_eq!(machine.boot_home().await, status, "{steps} steps");
        assert_eq!(machine.etcd.contents(), after, "{steps} steps");
    }
}

#[tokio::test]
async fn a_member_comes_back_without_any_parameters() {
    let machine = Machine::new();
    let first = machine.boot_home().await;
    match machine.boot(None, usize::MAX).await {
        End::Home(status) => assert_eq!(status, first),
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_power_cut_that_leaves_the_sealed_configuration_empty_is_no_loss() {
    let machine = Machine::new();
    // The last cut comes after the sealed configuration is written and before the journal
    // is removed.
    let cut = machine.boot(configured(), Step::ALL.len() - 1).await;
    assert!(matches!(cut, End::Cut), "{cut:?}");
    let sealed = machine.root().esp.sealed_configuration;
    let record = sealed.read().unwrap();
    assert!(record.is_some());
    sealed.write(b"").unwrap();
    machine.boot_home().await;
    assert_eq!(sealed.read().unwrap(), record);
}

#[tokio::test]
async fn a_begun_bootstrap_goes_on_without_parameters() {
    let machine = Machine::new();
    let cut = machine.boot(configured(), 3).await;
    assert!(matches!(cut, End::Cut), "{cut:?}");
    let ended = machine.boot(None, usize::MAX).await;
    assert!(matches!(ended, End::Home(_)), "{ended:?}");
}

#[tokio::test]
async fn a_machine_without_parameters_lists_the_places_that_it_read() {
    let report = Machine::new().boot_refused(None).await;
    assert_eq!(report.code, code::PARAMETERS_ABSENT);
    assert_eq!(report.tried, ["fw_cfg: not there", "ESP: no such file"]);
}

#[tokio::test]
async fn a_power_cut_on_the_way_out_of_etcd_ends_at_home_without_a_member() {
    type Cut = fn(&Root);
    let cuts: [Cut; 4] = [
        |_root| {},
        |root| std::fs::remove_dir_all(root.data.etcd.log.path()).unwrap(),
        |root| consensus::forget(&root.data.etcd).unwrap(),
        |root| {
            consensus::forget(&root.data.etcd).unwrap();
            root.data.node.voter.remove().unwrap();
        },
    ];
    for (step, cut) in cuts.iter().enumerate() {
        let machine = Machine::new();
        let node = machine.boot_home().await.node;
        let root = machine.root();
        let files::Data { etcd, node: files, .. } = &root.data;
        std::fs::create_dir_all(etcd.log.path()).unwrap();
        std::fs::write(etcd.log.path().join("0.wal"), b"votes").unwrap();
        etcd.peer_pki.dir.create().unwrap();
        etcd.peer_pki.key.write(b"key").unwrap();
        files.voter.write(b"").unwrap();
        files.leaving.write(b"").unwrap();
        cut(&root);
        for boot in 1..=2 {
            let status = machine.boot_home().await;
            assert_eq!(status.node, node);
            assert_eq!(status.roles, [], "cut after step {step}, boot {boot}: it is a member");
            assert!(etcd.log.is_empty().unwrap(), "cut after step {step}");
            assert_eq!(etcd.peer_pki.key.read().unwrap(), None);
            let left = [&files.voter, &files.leaving].map(|file| file.read().unwrap());
            assert_eq!(left, [None, None], "cut after step {step}");
        }
    }
}

#[tokio::test]
async fn each_loss_has_a_code_of_its_own_and_changes_nothing() {
    let sealed = |root: &Root| root.esp.sealed_configuration.clone();

    let machine = Machine::new();
    machine.boot_home().await;
    let record = sealed(&machine.root()).read().unwrap().unwrap();

    sealed(&machine.root()).write(&record[..record.len() - 1]).unwrap();
    let report = machine.boot_refused(configured()).await;
    assert_eq!(report.code, code::CLUSTER_SEALED_DAMAGED);

    sealed(&machine.root()).remove().unwrap();
    let report = machine.boot_refused(configured()).await;
    assert_eq!(report.code, code::CLUSTER_SEALED_LOST);

    sealed(&machine.root()).write(&record).unwrap();
    let key = machine.root().data.node.credentials.key.clone();
    let der = key.read().unwrap().unwrap();
    key.remove().unwrap();
    assert_eq!(machine.boot_refused(configured()).await.code, code::CLUSTER_NODE_KEY);
    let other = NodeKey::generate().unwrap().to_pkcs8_der().unwrap();
    key.write(&other).unwrap();
    assert_eq!(machine.boot_refused(configured()).await.code, code::CLUSTER_NODE_KEY);

    key.write(&der).unwrap();
    machine.boot_home().await;
}

#[tokio::test]
async fn another_cluster_s_store_is_not_home() {
    let machine = Machine::new();
    machine.boot_home().await;
    let untrusted = Machine { etcd: Memory::default(), ..machine };
    let report = untrusted.boot_refused(configured()).await;
    assert_eq!(report.code, code::CLUSTER_STORE);
    assert!(untrusted.etcd.contents().is_empty());
}

#[tokio::test]
async fn a_voter_that_was_off_past_the_end_of_its_certificate_joins_with_a_new_one() {
    let machine = Machine::new();
    let node = machine.boot_home().await.node.unwrap();
    let file = machine.root().data.node.credentials.certificate;
    let on_disk = || pki::certificate_der(&file.read().unwrap().unwrap()).unwrap();
    let identity = Identity::new(pki::Facts::read(&on_disk()).unwrap().public_key);
    assert_eq!(identity.id, node);
    let store = Store::new(machine.etcd.clone());
    let now = clock::now();
    let end = async || {
        store.revoke(&node.to_string(), pki::Reason::Left, now).await.unwrap();
        let long_ago = now - Duration::from_secs(100 * 24 * 60 * 60);
        let old = store.ensure_node_certificate(identity, long_ago).await.unwrap();
        file.write(pki::certificate_pem(&old.der).as_bytes()).unwrap();
        old.der
    };

    let old = end().await;
    machine.boot_home().await;
    let new = on_disk();
    assert_ne!(new, old);
    assert!(pki::Facts::read(&new).unwrap().not_after > now);
    let kept = store.renew_node_certificate(identity, now).await.unwrap().unwrap();
    assert_eq!(kept.der, new);

    // A revoked certificate is not issued again.
    let old = end().await;
    store.revoke(&node.to_string(), pki::Reason::Left, now).await.unwrap();
    machine.boot_home().await;
    assert_eq!(on_disk(), old);
}
