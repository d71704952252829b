//! Tests of machines that wipe what a removed node left on them.

use super::*;

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
