//! Users, their certificates, and the owners that secrets are encrypted to.

use std::time::Duration;

use polis_proto::v1::{self, UserRole};
use prost::Message as _;

use super::{founded, noon, owner_key};
use crate::curator::error::Error;
use crate::curator::store::{USERS, crl_key};
use polis_wire::pki::{Crl, Facts, Guard, Issued, Store as _, Write};

#[tokio::test]
async fn the_owner_s_key_opens_the_door_and_no_other_does() {
    let (store, _) = founded().await;
    assert!(matches!(store.escrow(&[8; 32], noon()).await, Err(Error::NotOwner)));
    let first = store.escrow(&owner_key(), noon()).await.unwrap();
    assert_eq!(first.der, store.escrow(&owner_key(), noon()).await.unwrap().der);
    let facts = Facts::read(&first.der).unwrap();
    assert_eq!((facts.subject.as_str(), facts.unit.as_deref()), ("owner", Some("owner")));
    // After two thirds of its life.
    let later = noon() + Duration::from_secs(25 * 24 * 60 * 60);
    let second = store.escrow(&owner_key(), later).await.unwrap();
    assert_ne!(first.der, second.der);
}

#[tokio::test]
async fn a_renewal_says_whether_the_certificate_is_a_new_one() {
    let (store, memory) = founded().await;
    let first = store.create_user("ann", UserRole::Viewer, &[2; 32], noon()).await.unwrap();
    let before = memory.contents();
    for _ in 0..3 {
        let (same, is_new) = store.renew_user("ann", noon()).await.unwrap();
        assert_eq!((same.der, is_new), (first.der.clone(), false));
    }
    assert_eq!(memory.contents(), before);
    let later = noon() + Duration::from_secs(25 * 24 * 60 * 60);
    let (second, is_new) = store.renew_user("ann", later).await.unwrap();
    assert!(is_new && second.der != first.der);
    let (same, is_new) = store.renew_user("ann", later).await.unwrap();
    assert_eq!((same.der, is_new), (second.der, false));
}

#[tokio::test]
async fn a_user_is_made_once_and_revoked_for_good() {
    let (store, memory) = founded().await;
    let make = |name: &'static str, role, key: u8| {
        let store = store.clone();
        async move { store.create_user(name, role, &[key; 32], noon()).await }
    };
    for bad in ["", "Alice", "a b", "polis-1", &"x".repeat(65)] {
        let refused = store.create_user(bad, UserRole::Viewer, &[2; 32], noon()).await;
        assert!(matches!(refused, Err(Error::Field(_))), "{bad}");
    }
    let first = make("ann", UserRole::Viewer, 2).await.unwrap();
    assert_eq!(first.der, make("ann", UserRole::Viewer, 2).await.unwrap().der);
    let taken = make("ann", UserRole::Viewer, 3).await;
    assert!(matches!(taken, Err(Error::UserTaken { what: "key", .. })));
    let taken = make("ann", UserRole::Operator, 2).await;
    assert!(matches!(taken, Err(Error::UserTaken { what: "role", .. })));
    // One key is one person.
    let shared = make("bob", UserRole::Viewer, 2).await;
    assert!(matches!(shared, Err(Error::KeyTaken { by, .. }) if by == "ann"));

    store.revoke_user("ann", noon()).await.unwrap();
    store.revoke_user("ann", noon()).await.unwrap();
    assert!(matches!(store.renew_user("ann", noon()).await, Err(Error::UserRevoked { .. })));
    let crl = memory.get(&crl_key()).await.unwrap().unwrap();
    let crl = Crl::read(&crl.value).unwrap();
    assert!(crl.revokes(&Facts::read(&first.der).unwrap().serial));
    // The name may be given again, to another key.
    let second = make("ann", UserRole::Operator, 3).await.unwrap();
    assert!(!crl.revokes(&Facts::read(&second.der).unwrap().serial));
}

/// The leader died between the mark and the certificates, and somebody gives the name again.
#[tokio::test]
async fn a_revocation_that_was_cut_off_does_not_bring_the_old_certificate_back() {
    let (store, memory) = founded().await;
    let first = store.create_user("ann", UserRole::Viewer, &[2; 32], noon()).await.unwrap();
    let key = format!("{USERS}ann");
    let entry = memory.get(&key).await.unwrap().unwrap();
    let marked = v1::User { revoked: true, ..v1::User::decode(&*entry.value).unwrap() };
    let guard = Guard::Unchanged(key.clone(), entry.revision);
    let write = Write::Put(key, marked.encode_to_vec());
    assert!(memory.commit(vec![guard], vec![write]).await.unwrap());

    let second = store.create_user("ann", UserRole::Viewer, &[3; 32], noon()).await.unwrap();
    let crl = memory.get(&crl_key()).await.unwrap().unwrap();
    let crl = Crl::read(&crl.value).unwrap();
    let revoked = |issued: &Issued| crl.revokes(&Facts::read(&issued.der).unwrap().serial);
    assert!(revoked(&first) && !revoked(&second));
}

#[tokio::test]
async fn the_last_owner_stays() {
    let (store, _) = founded().await;
    store.escrow(&owner_key(), noon()).await.unwrap();
    let last = store.revoke_user("owner", noon()).await;
    assert!(matches!(last, Err(Error::LastOwner { .. })));
    store.create_user("ann", UserRole::Owner, &[2; 32], noon()).await.unwrap();
    store.revoke_user("owner", noon()).await.unwrap();
    assert!(matches!(store.escrow(&owner_key(), noon()).await, Err(Error::UserRevoked { .. })));
    assert!(matches!(store.revoke_user("ann", noon()).await, Err(Error::LastOwner { .. })));
    assert!(matches!(store.revoke_user("eve", noon()).await, Err(Error::UserUnknown { .. })));
}

#[tokio::test]
async fn secrets_are_encrypted_to_the_owners_of_that_moment() {
    use ed25519_dalek::SigningKey;
    use polis_wire::age::Recipient;
    let (store, _) = founded().await;
    let key = |seed: u8| SigningKey::from_bytes(&[seed; 32]).verifying_key().to_bytes();
    let owners = async || store.owner_recipients().await.unwrap();
    let recipient = |seed: u8| Recipient::of_key(&key(seed)).unwrap();
    assert_eq!(owners().await, [recipient(9)], "before its owner has taken it");
    store.escrow(&owner_key(), noon()).await.unwrap();
    assert_eq!(owners().await, [recipient(9)], "once");

    store.create_user("otto", UserRole::Operator, &key(1), noon()).await.unwrap();
    store.create_user("zoe", UserRole::Owner, &key(2), noon()).await.unwrap();
    store.create_user("ann", UserRole::Owner, &key(3), noon()).await.unwrap();
    assert_eq!(owners().await, [recipient(9), recipient(3), recipient(2)]);
    store.revoke_user("owner", noon()).await.unwrap();
    store.revoke_user("zoe", noon()).await.unwrap();
    assert_eq!(owners().await, [recipient(3)]);
    // The name is given again, to another key: the key of the founding stays without access.
    store.create_user("owner", UserRole::Viewer, &key(5), noon()).await.unwrap();
    assert_eq!(owners().await, [recipient(3)]);
    store.revoke_user("owner", noon()).await.unwrap();
    store.create_user("owner", UserRole::Owner, &key(6), noon()).await.unwrap();
    assert_eq!(owners().await, [recipient(6), recipient(3)]);

    for seed in 100..114 {
        let name = format!("b{seed}");
        store.create_user(&name, UserRole::Owner, &key(seed), noon()).await.unwrap();
    }
    assert_eq!(owners().await.len(), 16);
    let refused = store.create_user("more", UserRole::Owner, &key(200), noon()).await;
    assert!(matches!(refused, Err(Error::Field(_))), "{refused:?}");
    store.create_user("more", UserRole::Operator, &key(200), noon()).await.unwrap();
}
