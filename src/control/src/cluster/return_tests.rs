//! Tests of nodes whose certificate ended while they were off. `returning` has those of the
//! answers, and `tests/etcd` the story of one that is approved.

use super::fake_curator::Curator;
use super::*;
use crate::curator::Store;
use polis_base::sys::clock;

/// A node without etcd whose certificate has ended; and the certificate.
async fn ended() -> (Machine, NodeId, Vec<u8>) {
    let machine = Machine::new();
    let node = machine.boot_home().await.node.unwrap();
    let files = machine.root().data.node;
    files.roles.write(b"").unwrap();
    let own = on_disk(&machine);
    let identity = Identity::new(pki::Facts::read(&own).unwrap().public_key);
    let (store, now) = (Store::new(machine.etcd.clone()), clock::now());
    store.revoke(&node.to_string(), pki::Reason::Left, now).await.unwrap();
    let long_ago = now - Duration::from_secs(100 * 24 * 60 * 60);
    let old = store.ensure_node_certificate(identity, long_ago).await.unwrap().der;
    files.credentials.certificate.write(pki::certificate_pem(&old).as_bytes()).unwrap();
    (machine, node, old)
}

fn on_disk(machine: &Machine) -> Vec<u8> {
    let file = machine.root().data.node.credentials.certificate;
    pki::certificate_der(&file.read().unwrap().unwrap()).unwrap()
}

#[tokio::test]
async fn without_a_leader_that_takes_its_request_a_node_goes_home_as_it_is() {
    let (mut machine, node, old) = ended().await;
    let goes_home = async |machine: &Machine| match machine.boot(None, usize::MAX).await {
        End::Home(status) => assert_eq!((status.node, status.roles), (Some(node), Vec::new())),
        other => panic!("{other:?}"),
    };
    // It knows no other node; then the clocks differ.
    goes_home(&machine).await;
    let curator = Curator::start(&machine.etcd, &["not-ended"]).await;
    curator.is_known_to(&machine);
    machine.hurries = Some("(no); compare the clocks");
    goes_home(&machine).await;
    assert_eq!(on_disk(&machine), old);
}

#[tokio::test]
async fn a_node_that_its_cluster_lacks_by_now_keeps_its_data_unless_it_is_named() {
    let (machine, _node, old) = ended().await;
    for (reason, code) in
        [("unknown", code::CLUSTER_UNKNOWN), ("decommissioned", code::CLUSTER_REMOVED)]
    {
        let curator = Curator::start(&machine.etcd, &[reason]).await;
        curator.is_known_to(&machine);
        assert_eq!(machine.boot_refused(None).await.code, code);
        assert!(machine.has_data() && on_disk(&machine) == old);
    }
}
