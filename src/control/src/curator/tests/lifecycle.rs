//! The life of a node, from its registration to its deletion.

use std::collections::BTreeMap;
use std::time::Duration;

use polis_proto::v1::{self, NodeState};

use super::{commitment, first_node, founded, noon, registration};
use crate::curator::error::Error;
use crate::curator::state::{Commitment, Refusal, Request};
use crate::curator::store::USERS;
use crate::curator::tickets::TicketRequest;
use polis_wire::identity::{Fingerprint, Identity};
use polis_wire::pki::{Facts, Store as _, Write};

#[tokio::test]
async fn a_node_lives_from_its_registration_to_its_deletion() {
    let (store, memory) = founded().await;
    let ticket = store.ticket(TicketRequest::Read, 1).await.unwrap().opaque;
    let identity = Identity::new([2; 32]);
    store.register(&ticket, registration(2, 3)).await.unwrap();

    let refused = store.enter(identity, commitment()).await;
    assert!(matches!(refused, Err(Error::Refused(Refusal::NotApproved))));
    let other = Fingerprint::of_key(&[8; 32]).to_string().parse().unwrap();
    let refused = store.approve(identity.id, Some(&other), None).await;
    assert!(matches!(refused, Err(Error::Fingerprint { .. })));
    // The key alone could have been prepared: its words do not count.
    let prepared = Fingerprint::of_key(&[2; 32]).words().parse().unwrap();
    let refused = store.approve(identity.id, Some(&prepared), None).await;
    assert!(matches!(refused, Err(Error::Fingerprint { .. })));
    let own = Fingerprint::of_registration(&[2; 32], &[4; 16]).unwrap();
    let own = own.words().parse().unwrap();
    let approved = store.approve(identity.id, Some(&own), None).await.unwrap();
    assert_eq!(approved.state(), NodeState::Standby);

    let plain = Commitment { storage_kind: v1::StorageKind::Insecure, ..commitment() };
    assert!(matches!(store.enter(identity, plain.clone()).await, Err(Error::Field(_))));
    let none = Commitment { cluster_unlock_key: vec![], recovery_key: vec![], ..plain };
    let refused = store.enter(identity, none).await;
    assert!(matches!(refused, Err(Error::StoragePolicy { .. })));
    let refused = store.join(&[3; 32], None).await;
    assert!(matches!(refused, Err(Error::Refused(Refusal::NotUp))));
    let up = store.enter(identity, commitment()).await.unwrap();
    assert_eq!(up.state(), NodeState::Up);
    // The answer was lost: it comes again, with other keys.
    let again = Commitment { cluster_unlock_key: vec![7; 32], ..commitment() };
    store.enter(identity, again).await.unwrap();

    let (found, joined) = store.join(&[3; 32], None).await.unwrap();
    assert_eq!((found, joined.cluster_unlock_key), (identity.id, vec![7; 32]));
    let refused = store.enter(identity, commitment()).await;
    assert!(matches!(refused, Err(Error::Refused(Refusal::Joined))));
    assert!(matches!(
        store.register(&ticket, registration(2, 4)).await,
        Err(Error::Refused(Refusal::Known))
    ));

    let refused = store.change(identity.id, Request::Delete { force: false }).await;
    assert!(matches!(refused, Err(Error::Refused(Refusal::StillUp))));
    store.change(identity.id, Request::Decommission).await.unwrap();
    let refused = store.join(&[3; 32], None).await;
    assert!(matches!(refused, Err(Error::Refused(Refusal::Decommissioned))));
    store.change(identity.id, Request::Delete { force: false }).await.unwrap();
    assert!(matches!(store.join(&[3; 32], None).await, Err(Error::Refused(Refusal::Unknown))));
    let left: Vec<_> = memory.contents().into_keys().collect();
    assert!(!left.iter().any(|key| key.starts_with("join_keys/")), "{left:?}");
}

#[tokio::test]
async fn the_record_of_a_machine_is_checked_before_the_policies_of_the_cluster() {
    let (store, memory) = founded().await;
    let ticket = store.ticket(TicketRequest::Read, 1).await.unwrap().opaque;
    let identity = Identity::new([2; 32]);
    let none = Vec::new();
    // The cluster demands an encrypted disk.
    let plain = Commitment {
        storage_kind: v1::StorageKind::Insecure,
        cluster_unlock_key: none.clone(),
        recovery_key: none,
        ..commitment()
    };
    let refuses = async |expected: Refusal| {
        for given in [commitment(), plain.clone()] {
            match store.enter(identity, given).await {
                Err(Error::Refused(refusal)) => assert_eq!(refusal, expected),
                other => panic!("{expected:?}: {other:?}"),
            }
        }
    };

    // The owners cannot be listed.
    let user = format!("{USERS}zed");
    let damage = Write::Put(user.clone(), vec![0xff]);
    assert!(memory.commit(Vec::new(), vec![damage]).await.unwrap());
    refuses(Refusal::Unknown).await;
    store.register(&ticket, registration(2, 3)).await.unwrap();
    refuses(Refusal::NotApproved).await;
    store.approve(identity.id, None, None).await.unwrap();
    assert!(matches!(store.enter(identity, commitment()).await, Err(Error::Store(_))));
    assert!(memory.commit(Vec::new(), vec![Write::Delete(user)]).await.unwrap());

    store.enter(identity, commitment()).await.unwrap();
    store.change(identity.id, Request::Decommission).await.unwrap();
    refuses(Refusal::Decommissioned).await;
    store.change(identity.id, Request::Delete { force: false }).await.unwrap();
    refuses(Refusal::Unknown).await;
}

#[tokio::test]
async fn a_node_that_was_removed_since_its_commit_is_given_no_certificate() {
    let (store, _) = founded().await;
    let ticket = store.ticket(TicketRequest::Read, 1).await.unwrap().opaque;
    let identity = Identity::new([2; 32]);
    let certificate = async || store.member_certificate(identity, noon()).await;
    store.register(&ticket, registration(2, 3)).await.unwrap();
    store.approve(identity.id, None, None).await.unwrap();
    assert!(matches!(certificate().await, Err(Error::Refused(Refusal::NotUp))));
    store.enter(identity, commitment()).await.unwrap();
    let issued = certificate().await.unwrap();
    assert_eq!(Facts::read(&issued.der).unwrap().public_key, identity.public_key);
    store.change(identity.id, Request::Decommission).await.unwrap();
    assert!(matches!(certificate().await, Err(Error::Refused(Refusal::Decommissioned))));
    store.change(identity.id, Request::Delete { force: false }).await.unwrap();
    assert!(matches!(certificate().await, Err(Error::Refused(Refusal::Unknown))));
}

#[tokio::test]
async fn a_machine_that_commits_again_after_months_is_given_a_certificate_that_has_not_ended() {
    let (store, _) = founded().await;
    let ticket = store.ticket(TicketRequest::Read, 1).await.unwrap().opaque;
    let identity = Identity::new([2; 32]);
    store.register(&ticket, registration(2, 3)).await.unwrap();
    store.approve(identity.id, None, None).await.unwrap();
    store.enter(identity, commitment()).await.unwrap();
    let ends = async |now| {
        let issued = store.member_certificate(identity, now).await.unwrap();
        Facts::read(&issued.der).unwrap().not_after
    };
    let late = noon() + Duration::from_secs(91 * 24 * 60 * 60);
    assert!(ends(noon()).await < late);
    assert!(ends(late).await > late);
}

#[tokio::test]
async fn a_node_that_the_cluster_has_with_another_join_key_is_not_refused_like_a_removed_one() {
    let (store, _) = founded().await;
    let ticket = store.ticket(TicketRequest::Read, 1).await.unwrap().opaque;
    let identity = Identity::new([2; 32]);
    let asks = async |join_key: u8, named: Option<[u8; 32]>| match store
        .join(&[join_key; 32], named)
        .await
    {
        Err(Error::Refused(refusal)) => refusal,
        other => panic!("{other:?}"),
    };
    let own = Some(identity.public_key);
    assert_eq!(asks(4, own).await, Refusal::Unknown);
    // The answer is the same whatever the state of the node is.
    store.register(&ticket, registration(2, 3)).await.unwrap();
    assert_eq!(asks(4, own).await, Refusal::OtherJoinKey);
    store.approve(identity.id, None, None).await.unwrap();
    assert_eq!(asks(4, own).await, Refusal::OtherJoinKey);
    store.enter(identity, commitment()).await.unwrap();
    assert_eq!(asks(4, own).await, Refusal::OtherJoinKey);
    // A caller that does not know the whole key of the node learns nothing.
    let mut same_id = identity.public_key;
    same_id[31] = 0;
    assert_eq!(Identity::new(same_id).id, identity.id);
    for named in [None, Some(same_id), Some([7; 32])] {
        assert_eq!(asks(4, named).await, Refusal::Unknown);
    }
    // Another name changes no other answer.
    let (found, _joined) = store.join(&[3; 32], Some([7; 32])).await.unwrap();
    assert_eq!(found, identity.id);

    store.change(identity.id, Request::Decommission).await.unwrap();
    assert_eq!(asks(4, own).await, Refusal::Unknown);
    assert_eq!(asks(3, own).await, Refusal::Decommissioned);
    let other = Some(first_node().public_key);
    assert_eq!(asks(3, other).await, Refusal::OtherJoinKey, "the removed node is another one");
    store.change(identity.id, Request::Delete { force: false }).await.unwrap();
    assert_eq!(asks(3, own).await, Refusal::Unknown);
}

#[tokio::test]
async fn changes_at_the_same_moment_happen_one_after_the_other() {
    let (store, _) = founded().await;
    let set = |key: &str| Request::Labels {
        set: BTreeMap::from([(key.to_owned(), String::new())]),
        remove: Vec::new(),
    };
    let changes = (0..16).map(|at| {
        let store = store.clone();
        let set = set(&format!("l{at}"));
        async move { store.change(first_node().id, set).await }
    });
    for changed in futures::future::join_all(changes).await {
        changed.unwrap();
    }
    assert_eq!(store.node(first_node().id).await.unwrap().labels.len(), 16);
}

#[tokio::test]
async fn the_invitation_to_etcd_is_given_only_to_a_node_with_the_role() {
    let (store, _) = founded().await;
    let id = first_node().id;
    store.confirm_role(id).await.unwrap();
    store.change(id, Request::Leave(v1::Departure::default())).await.unwrap();
    let leaving = store.confirm_role(id).await;
    assert!(matches!(leaving, Err(Error::Refused(Refusal::Leaving))), "{leaving:?}");
    let consensus_member = Some(v1::node_roles::ConsensusMember {});
    let remove = v1::NodeRoles { consensus_member, ..Default::default() };
    store.change(id, Request::Roles { add: Default::default(), remove }).await.unwrap();
    assert!(matches!(store.confirm_role(id).await, Err(Error::NoRole)));
    store.change(id, Request::Decommission).await.unwrap();
    assert!(matches!(store.confirm_role(id).await, Err(Error::Refused(Refusal::NotUp))));
}
