//! Tests of the records, against a store in a map.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};

use polis_proto::v1::cluster_configuration::TpmMode;
use polis_proto::v1::{self, NodeState, UserRole};
use prost::Message as _;

use super::Founding;
use super::error::Error;
use super::state::{Commitment, Refusal, Registration, Request};
use super::store::Store;
use super::tickets::TicketRequest;
use polis_wire::identity::{Fingerprint, Identity};
use polis_wire::node_roles::Role;
use polis_wire::pki::memory::Memory;
use polis_wire::pki::{self, Entry, Facts, Guard, Issued, Store as _, Write};

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

#[tokio::test]
async fn a_ticket_is_made_once_and_void_once_it_was_rotated_or_has_ended() {
    let (store, _) = founded().await;
    assert!(matches!(store.register(b"", registration(2, 3)).await, Err(Error::TicketWrong)));
    let first = store.ticket(TicketRequest::Read, 1).await.unwrap();
    assert_eq!(first, store.ticket(TicketRequest::Read, 2).await.unwrap());
    assert_eq!((first.opaque.len(), first.ends_at), (32, 0));
    let lifetime = Some(Duration::from_secs(50));
    let second = store.ticket(TicketRequest::Rotate { lifetime }, 60).await.unwrap();
    assert_eq!(second.ends_at, 110);
    let refused = store.register(&first.opaque, registration(2, 3)).await;
    assert!(matches!(refused, Err(Error::TicketRotated)));
    let late = Registration { now: 110, ..registration(2, 3) };
    assert!(matches!(store.register(&second.opaque, late).await, Err(Error::TicketEnded)));
    let node = store.register(&second.opaque, registration(2, 3)).await.unwrap();
    assert_eq!(node.state(), NodeState::New);
}

#[tokio::test]
async fn a_machine_that_waits_is_answered_although_its_ticket_is_void_by_now() {
    let (store, _) = founded().await;
    let ticket = store.ticket(TicketRequest::Read, 1).await.unwrap().opaque;
    store.register(&ticket, registration(2, 3)).await.unwrap();
    store.ticket(TicketRequest::Rotate { lifetime: None }, 2).await.unwrap();
    let again = store.register(&ticket, registration(2, 3)).await.unwrap();
    assert_eq!(again.state(), NodeState::New);
    // With another join key it is a new request.
    let other = store.register(&ticket, registration(2, 4)).await;
    assert!(matches!(other, Err(Error::TicketRotated)));
}

/// A store in which an operator deletes a record right after it was read for the first time.
#[derive(Clone)]
struct Deleting {
    memory: Memory,
    record: String,
    deletes: Arc<AtomicBool>,
}

impl pki::Store for Deleting {
    async fn read<const N: usize>(&self, keys: [&str; N]) -> anyhow::Result<[Option<Entry>; N]> {
        let read = self.memory.read(keys).await;
        if keys.contains(&self.record.as_str()) && self.deletes.swap(false, Ordering::Relaxed) {
            let write = Write::Delete(self.record.clone());
            assert!(self.memory.commit(Vec::new(), vec![write]).await?);
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

#[tokio::test]
async fn a_machine_that_is_deleted_while_it_asks_again_needs_a_ticket_that_is_valid() {
    let (store, memory) = founded().await;
    let ticket = store.ticket(TicketRequest::Read, 1).await.unwrap().opaque;
    store.register(&ticket, registration(2, 3)).await.unwrap();
    store.ticket(TicketRequest::Rotate { lifetime: None }, 2).await.unwrap();
    let record = super::store::node_key(Identity::new([2; 32]).id);
    let deletes = Arc::new(AtomicBool::new(true));
    let deleting = Store::new(Deleting { memory: memory.clone(), record: record.clone(), deletes });
    let lost = deleting.register(&ticket, registration(2, 3)).await;
    assert!(matches!(lost, Err(Error::Store(_))), "{lost:?}");
    let again = deleting.register(&ticket, registration(2, 3)).await;
    assert!(matches!(again, Err(Error::TicketRotated)), "{again:?}");
    assert!(!memory.contents().contains_key(&record));
}

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
    let user = format!("{}zed", super::store::USERS);
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
async fn a_node_cannot_take_the_join_key_of_another() {
    let (store, memory) = founded().await;
    let ticket = store.ticket(TicketRequest::Read, 1).await.unwrap().opaque;
    store.register(&ticket, registration(2, 3)).await.unwrap();
    let taken = store.register(&ticket, registration(4, 3)).await;
    assert!(matches!(taken, Err(Error::JoinKeyTaken)));
    // A new registration of the same machine replaces the old one.
    store.register(&ticket, registration(2, 5)).await.unwrap();
    let keys = memory.contents().into_keys().filter(|key| key.starts_with("join_keys/"));
    assert_eq!(keys.count(), 1);
    store.register(&ticket, registration(4, 3)).await.unwrap();
}

#[tokio::test]
async fn two_keys_with_one_name_are_not_one_node() {
    let (store, _) = founded().await;
    let ticket = store.ticket(TicketRequest::Read, 1).await.unwrap().opaque;
    store.register(&ticket, registration(2, 3)).await.unwrap();
    let mut twin = [2; 32];
    twin[31] = 0;
    let twin = Registration { identity: Identity::new(twin), ..registration(2, 4) };
    let refused = store.register(&ticket, twin).await;
    assert!(matches!(refused, Err(Error::Refused(Refusal::Known))));
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
    let crl = memory.get(&super::store::crl_key()).await.unwrap().unwrap();
    let crl = polis_wire::pki::Crl::read(&crl.value).unwrap();
    assert!(crl.revokes(&Facts::read(&first.der).unwrap().serial));
    // The name may be given again, to another key.
    let second = make("ann", UserRole::Operator, 3).await.unwrap();
    assert!(!crl.revokes(&Facts::read(&second.der).unwrap().serial));
}

#[tokio::test]
async fn a_cluster_that_requires_a_tpm_admits_no_node_without_one() {
    let (store, _) = founded().await;
    let required =
        v1::ClusterConfiguration { tpm_mode: TpmMode::Required.into(), ..Default::default() };
    store.configure(required, None, noon()).await.unwrap();
    let ticket = store.ticket(TicketRequest::Read, 1).await.unwrap().opaque;
    let proved = |fault: &str| {
        Some(v1::TpmAttestation { at: 1, fault: fault.to_owned(), ..Default::default() })
    };
    let machines = [(false, None), (true, None), (true, proved("forged")), (true, proved(""))];
    for (number, (tpm, attestation)) in (2..).zip(machines) {
        let machine = Registration { tpm, attestation, ..registration(number, number + 10) };
        let identity = machine.identity;
        store.register(&ticket, machine).await.unwrap();
        store.approve(identity.id, None, None).await.unwrap();
        let entered = store.enter(identity, commitment()).await;
        match number {
            2 => assert!(matches!(entered, Err(Error::TpmRequired)), "{entered:?}"),
            3 => assert!(matches!(entered, Err(Error::TpmUnproved { .. })), "{entered:?}"),
            4 => assert!(entered.unwrap_err().to_string().ends_with("nothing: forged")),
            _ => assert_eq!(entered.unwrap().state(), NodeState::Up),
        }
    }
}

/// The proof of a TPM whose machine has started the system with this register 11.
fn started(image: u8) -> v1::TpmAttestation {
    use polis_wire::attestation::software::Software;
    let register = |(number, value): (u32, u8)| v1::TpmRegister { number, value: vec![value; 32] };
    v1::TpmAttestation {
        at: 1,
        keys: Some(Software::default().keys().into_message()),
        registers: [(11, image), (12, 0), (13, 0)].map(register).to_vec(),
        ..Default::default()
    }
}

#[tokio::test]
async fn a_machine_is_compared_with_the_attestation_policy_until_it_is_in() {
    let (store, _) = founded().await;
    let policy = |image: &[u8]| {
        let system = |value: &u8| v1::attestation_policy::System {
            name: "image".to_owned(),
            kernel_image: vec![*value; 32],
        };
        let systems = image.iter().map(system).collect();
        let attestation = Some(v1::AttestationPolicy { systems, makers: Vec::new() });
        v1::ClusterConfiguration { attestation, ..Default::default() }
    };
    let ticket = store.ticket(TicketRequest::Read, 1).await.unwrap().opaque;
    let machine = |attestation| Registration { attestation, ..registration(2, 12) };
    let id = machine(None).identity.id;
    let set = async |policy| store.configure(policy, None, noon()).await.unwrap().attestation;
    let refused = |result: Result<v1::Node, Error>| match result {
        Err(Error::AttestationPolicy { why }) => why,
        other => panic!("{other:?}"),
    };

    // Before the approval.
    assert_eq!(set(policy(&[7])).await, policy(&[7]).attestation);
    store.register(&ticket, machine(None)).await.unwrap();
    assert!(refused(store.approve(id, None, None).await).contains("proved nothing"));
    store.register(&ticket, machine(Some(started(8)))).await.unwrap();
    assert!(
        refused(store.approve(id, None, None).await).contains("register 11 (kernel image) is 0808")
    );
    store.register(&ticket, machine(Some(started(7)))).await.unwrap();
    store.approve(id, None, None).await.unwrap();

    // A proof of an earlier boot of the machine does not count.
    let restarted = Commitment { boot_id: "later".to_owned(), ..commitment() };
    let why = refused(store.enter(machine(None).identity, restarted).await);
    assert!(why.contains("an earlier start of the machine"), "{why}");

    // Before the commit: it was started anew, or the policy has changed. A repeated approval
    // changes nothing.
    store.register(&ticket, machine(Some(started(8)))).await.unwrap();
    let identity = machine(None).identity;
    refused(store.enter(identity, commitment()).await);
    store.approve(id, None, None).await.unwrap();
    assert_eq!(set(v1::ClusterConfiguration::default()).await, policy(&[7]).attestation);
    set(policy(&[7, 8])).await;
    assert_eq!(store.enter(identity, commitment()).await.unwrap().state(), NodeState::Up);

    // A member may run another system. Without a policy, any machine enters.
    set(policy(&[7])).await;
    let join_key = machine(None).join_key;
    store.join(&join_key, None).await.unwrap();
    store.approve(id, None, None).await.unwrap();
    assert_eq!(set(policy(&[])).await, None);
    let other = registration(3, 13);
    store.register(&ticket, other.clone()).await.unwrap();
    store.approve(other.identity.id, None, None).await.unwrap();
    store.enter(other.identity, commitment()).await.unwrap();
}

#[tokio::test]
async fn a_machine_is_approved_only_with_the_proof_that_the_operator_looked_at() {
    let (store, _) = founded().await;
    let ticket = store.ticket(TicketRequest::Read, 1).await.unwrap().opaque;
    let machine = |proof| Registration { attestation: Some(proof), ..registration(2, 12) };
    let (seen, other) = (started(7), started(8));
    let id = machine(seen.clone()).identity.id;
    store.register(&ticket, machine(seen.clone())).await.unwrap();
    // It registers again while the operator thinks.
    store.register(&ticket, machine(other.clone())).await.unwrap();
    let refused = store.approve(id, None, Some(&seen)).await;
    assert!(matches!(refused, Err(Error::ProvedAnew { .. })), "{refused:?}");
    // The same start was proved again.
    let earlier = v1::TpmAttestation { at: other.at - 1, ..other.clone() };
    let approved = store.approve(id, None, Some(&earlier)).await.unwrap();
    assert_eq!(approved.state(), NodeState::Standby);
    // The answer was lost, and the call is repeated.
    store.approve(id, None, Some(&other)).await.unwrap();
    store.approve(id, None, Some(&seen)).await.unwrap();
}

/// The leader died between the mark and the certificates, and somebody gives the name again.
#[tokio::test]
async fn a_revocation_that_was_cut_off_does_not_bring_the_old_certificate_back() {
    let (store, memory) = founded().await;
    let first = store.create_user("ann", UserRole::Viewer, &[2; 32], noon()).await.unwrap();
    let key = format!("{}ann", super::store::USERS);
    let entry = memory.get(&key).await.unwrap().unwrap();
    let marked = v1::User { revoked: true, ..v1::User::decode(&*entry.value).unwrap() };
    let guard = Guard::Unchanged(key.clone(), entry.revision);
    let write = Write::Put(key, marked.encode_to_vec());
    assert!(memory.commit(vec![guard], vec![write]).await.unwrap());

    let second = store.create_user("ann", UserRole::Viewer, &[3; 32], noon()).await.unwrap();
    let crl = memory.get(&super::store::crl_key()).await.unwrap().unwrap();
    let crl = polis_wire::pki::Crl::read(&crl.value).unwrap();
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
async fn what_a_running_cluster_is_built_on_cannot_change() {
    let (store, _) = founded().await;
    let desired = v1::ClusterConfiguration {
        cold_start: v1::cluster_configuration::ColdStart::Attended.into(),
        ..store.configuration().await.unwrap()
    };
    let written = store.configure(desired.clone(), None, noon()).await.unwrap();
    assert_eq!(written.cold_start, desired.cold_start);
    // A field that is left out stays.
    let same = v1::ClusterConfiguration { cluster_domain: String::new(), ..written.clone() };
    assert_eq!(store.configure(same, None, noon()).await.unwrap(), written);
    let other = v1::ClusterConfiguration { cluster_domain: "x.org".to_owned(), ..written.clone() };
    assert!(matches!(store.configure(other, None, noon()).await, Err(Error::Fixed { .. })));
    let strange = v1::ClusterConfiguration { tpm_mode: 77, ..written };
    assert!(matches!(store.configure(strange, None, noon()).await, Err(Error::Field(_))));
}

#[tokio::test]
async fn a_registry_is_set_changed_and_deleted() {
    let (store, memory) = founded().await;
    let registry = |host: &str, username: &str| v1::Registry {
        host: host.to_owned(),
        username: username.to_owned(),
        password: username.to_owned(),
        ..Default::default()
    };
    let bad = store.set_registry(&registry("no-dot", ""), noon()).await;
    assert!(matches!(bad, Err(Error::Field(_))), "{bad:?}");
    for host in ["b.example", "a.example"] {
        store.set_registry(&registry(host, "ann"), noon()).await.unwrap();
    }
    let hosts = async || {
        let read = store.read::<v1::Registries>(super::store::REGISTRIES).await.unwrap();
        let all = read.unwrap_or_default().registries;
        all.into_iter().map(|one| (one.host, one.username)).collect::<Vec<_>>()
    };
    let pair = |host: &str, name: &str| (host.to_owned(), name.to_owned());
    assert_eq!(hosts().await, [pair("a.example", "ann"), pair("b.example", "ann")]);
    // An absent one reads as none.
    store.set_registry(&registry("b.example", ""), noon()).await.unwrap();
    assert_eq!(hosts().await, [pair("a.example", "ann"), pair("b.example", "")]);
    let before = memory.get(super::store::REGISTRIES).await.unwrap().unwrap().revision;
    store.set_registry(&registry("b.example", ""), noon()).await.unwrap();
    let after = memory.get(super::store::REGISTRIES).await.unwrap().unwrap().revision;
    assert_eq!(before, after, "the same again writes nothing");
    store.delete_registry("a.example").await.unwrap();
    let again = store.delete_registry("a.example").await;
    assert!(matches!(again, Err(Error::RegistryUnknown { .. })), "{again:?}");
    for number in 1..polis_wire::registry::REGISTRIES_MAX {
        let host = format!("r{number}.example");
        store.set_registry(&registry(&host, ""), noon()).await.unwrap();
    }
    let full = store.set_registry(&registry("z.example", ""), noon()).await.unwrap_err();
    assert!(full.to_string().contains("delete one first"), "{full}");
    store.set_registry(&registry("b.example", "bob"), noon()).await.unwrap();
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

#[tokio::test]
async fn two_who_configure_different_things_do_not_undo_each_other() {
    use v1::cluster_configuration::ColdStart;
    let (store, _) = founded().await;
    let before = store.configuration().await.unwrap();
    // Each call changes one field, whatever it has read before.
    let tpm = v1::ClusterConfiguration { tpm_mode: TpmMode::Required.into(), ..Default::default() };
    store.configure(tpm, None, noon()).await.unwrap();
    let cold_start =
        v1::ClusterConfiguration { cold_start: ColdStart::Attended.into(), ..Default::default() };
    let written = store.configure(cold_start, None, noon()).await.unwrap();
    assert_eq!(written.tpm_mode(), TpmMode::Required);
    assert_eq!(written.cold_start(), ColdStart::Attended);
    assert_eq!(written.storage_security_policy, before.storage_security_policy);
    // Time servers stay until others, or none, are named.
    let servers = vec![v1::NtpServer { host: "192.0.2.1".to_owned(), nts: true }];
    let time = |servers: &[v1::NtpServer]| v1::ClusterConfiguration {
        time: Some(v1::TimeConfiguration { servers: servers.to_vec() }),
        ..Default::default()
    };
    store.configure(time(&servers), None, noon()).await.unwrap();
    let written = store.configure(v1::ClusterConfiguration::default(), None, noon()).await.unwrap();
    assert_eq!(written.time.unwrap().servers, servers);
    let written = store.configure(time(&[]), None, noon()).await.unwrap();
    assert_eq!(written.time.unwrap().servers, []);
    let log = |url: &str| v1::ClusterConfiguration {
        log: Some(v1::LogConfiguration {
            targets: vec![v1::LogTarget { url: url.to_owned(), ca: String::new() }],
            ..Default::default()
        }),
        ..Default::default()
    };
    store.configure(log("syslog+tls://logs.example"), None, noon()).await.unwrap();
    let written = store.configure(v1::ClusterConfiguration::default(), None, noon()).await.unwrap();
    assert_eq!(written.log, log("syslog+tls://logs.example").log);
    assert!(matches!(store.configure(log("syslog://a"), None, noon()).await, Err(Error::Field(_))));
    let bad = [v1::NtpServer { host: "a\nallow".to_owned(), nts: false }];
    assert!(matches!(store.configure(time(&bad), None, noon()).await, Err(Error::Field(_))));
}

/// A firewall with one source, and a wish for it.
fn firewall(source: &str) -> (v1::FirewallConfiguration, v1::ClusterConfiguration) {
    let firewall =
        v1::FirewallConfiguration { sources: vec![source.to_owned()], ports: Vec::new() };
    let wish = v1::ClusterConfiguration { firewall: Some(firewall.clone()), ..Default::default() };
    (firewall, wish)
}

#[tokio::test]
async fn a_firewall_is_tried_until_it_is_confirmed_or_its_time_is_over() {
    let (store, _) = founded().await;
    let later = |seconds| noon() + Duration::from_secs(seconds);
    let (one, wish) = firewall("192.0.2.0/24");
    let written = store.configure(wish.clone(), None, noon()).await.unwrap();
    let trial = written.firewall_trial.clone().unwrap();
    assert_eq!((written.firewall, trial.configuration), (None, Some(one.clone())));
    // A call that is repeated does not begin it again.
    let again = store.configure(wish.clone(), None, later(60)).await.unwrap();
    assert_eq!(again.firewall_trial.unwrap().until, trial.until);
    // Its time is over, and then it begins again.
    let late = store.confirm_firewall(one.clone(), later(120)).await;
    assert!(matches!(late, Err(Error::NoTrial)));
    let begun = store.configure(wish.clone(), None, later(130)).await.unwrap();
    assert_eq!(begun.firewall_trial.unwrap().until, trial.until + 130);
    // Only the one that is tried can be confirmed.
    let (other, _) = firewall("198.51.100.0/24");
    assert!(matches!(store.confirm_firewall(other, later(140)).await, Err(Error::NoTrial)));
    let kept = store.confirm_firewall(one.clone(), later(140)).await.unwrap();
    assert_eq!((kept.firewall.as_ref(), kept.firewall_trial.as_ref()), (Some(&one), None));
    assert_eq!(store.confirm_firewall(one.clone(), later(150)).await.unwrap(), kept, "once more");
    // The confirmed one needs no trial, and ends another one.
    let (_, wider) = firewall("0.0.0.0/0");
    assert!(store.configure(wider, None, later(200)).await.unwrap().firewall_trial.is_some());
    assert_eq!(store.configure(wish, None, later(201)).await.unwrap(), kept);
}

/// A call of each kind that operators may make about the first node.
async fn operate(store: &Store<Memory>) {
    let id = first_node().id;
    let set = BTreeMap::from([("zone".to_owned(), "a".to_owned())]);
    let add = Role::record(&[Role::KubernetesWorker]);
    store.approve(id, None, None).await.unwrap();
    for change in [
        Request::Labels { set, remove: vec!["missing".to_owned()] },
        Request::Roles { add, remove: v1::NodeRoles::default() },
        Request::Network(v1::NetworkOrder { number: 7, configuration: None }),
        Request::ForgetRecoveryKey,
    ] {
        store.change(id, change).await.unwrap();
    }
    store.name_node(id, name("web").as_ref()).await.unwrap();
}

/// A target of snapshots, and its key.
fn target(secret: &str) -> (v1::SnapshotConfiguration, v1::SnapshotCredentials) {
    let url = "s3+https://s3.example/bucket".to_owned();
    let target = v1::SnapshotConfiguration { url, ..Default::default() };
    let key = v1::SnapshotCredentials {
        access_key_id: "id".to_owned(),
        secret_access_key: secret.to_owned(),
    };
    (target, key)
}

/// A call of each kind that owners may make about the cluster.
async fn own(store: &Store<Memory>) {
    let (firewall, wish) = firewall("192.0.2.0/24");
    let (snapshots, key) = target("secret");
    let wish = v1::ClusterConfiguration { snapshots: Some(snapshots), ..wish };
    store.configure(wish, Some(key), noon()).await.unwrap();
    store.confirm_firewall(firewall, noon()).await.unwrap();
    let registry = v1::Registry { host: "a.example".to_owned(), ..Default::default() };
    store.set_registry(&registry, noon()).await.unwrap();
    store.escrow(&owner_key(), noon()).await.unwrap();
    store.create_user("ann", UserRole::Viewer, &[2; 32], noon()).await.unwrap();
    store.revoke_user("bob", noon()).await.unwrap();
    store.begin_rotation(100).await.unwrap();
}

/// The leader counts a call that wrote nothing in its audit log (`serve::audit`).
#[tokio::test]
async fn a_call_that_is_repeated_with_the_same_values_writes_nothing() {
    let (store, memory) = founded().await;
    store.create_user("bob", UserRole::Viewer, &[3; 32], noon()).await.unwrap();
    Box::pin(operate(&store)).await;
    Box::pin(own(&store)).await;
    // With the revisions: a value that is written again has another one.
    let before = memory.list("").await.unwrap();
    Box::pin(operate(&store)).await;
    Box::pin(own(&store)).await;
    let after = memory.list("").await.unwrap();
    let written = after.iter().filter(|entry| !before.contains(entry)).map(|(key, _)| key);
    assert_eq!(written.collect::<Vec<_>>(), Vec::<&String>::new());
    assert_eq!(after.len(), before.len());
    // Another key of the same bucket is a change.
    let (_, other) = target("other");
    store.configure(v1::ClusterConfiguration::default(), Some(other), noon()).await.unwrap();
    assert_ne!(memory.list("").await.unwrap(), after);
}

#[tokio::test]
async fn a_firewall_that_makes_no_sense_is_refused() {
    let (store, _) = founded().await;
    for bad in ["192.0.2.1/24", "any", "224.0.0.0/4", "127.0.0.1", "10.0.0.0/33", ""] {
        let wish = firewall(bad).1;
        let refused = store.configure(wish, None, noon()).await;
        assert!(matches!(refused, Err(Error::Field(_))), "{bad}: {refused:?}");
    }
    let wish = |ports: &[&str]| v1::ClusterConfiguration {
        firewall: Some(v1::FirewallConfiguration {
            sources: Vec::new(),
            ports: ports.iter().map(|port| (*port).to_owned()).collect(),
        }),
        ..Default::default()
    };
    for bad in [&["tcp/7839"][..], &["tcp/443", "tcp/443"], &["443"]] {
        let refused = store.configure(wish(bad), None, noon()).await;
        assert!(matches!(refused, Err(Error::Field(_))), "{bad:?}: {refused:?}");
    }
    // Callers cannot say which configuration is on trial.
    let trial = v1::ClusterConfiguration {
        firewall_trial: Some(v1::FirewallTrial::default()),
        ..Default::default()
    };
    assert!(matches!(store.configure(trial, None, noon()).await, Err(Error::Field(_))));
}

fn name(text: &str) -> Option<polis_wire::identity::NodeName> {
    Some(text.parse().unwrap())
}

#[tokio::test]
async fn a_name_belongs_to_one_node_and_is_free_once_that_gives_it_up() {
    let (store, memory) = founded().await;
    let ticket = store.ticket(TicketRequest::Read, 1).await.unwrap().opaque;
    let (first, second) = (first_node().id, Identity::new([2; 32]).id);
    store.register(&ticket, registration(2, 3)).await.unwrap();
    let (web, mail) = (name("web"), name("mail"));
    assert_eq!(store.name_node(first, web.as_ref()).await.unwrap().name, "web");
    assert_eq!(store.name_node(first, web.as_ref()).await.unwrap().name, "web", "once more");
    let Err(Error::NameTaken { by, .. }) = store.name_node(second, web.as_ref()).await else {
        panic!("two nodes have one name")
    };
    assert_eq!(by, first.to_string());
    assert_eq!(store.node(second).await.unwrap().name, "");
    // Another name frees the one before; so do no name, and the end of the record.
    store.name_node(first, mail.as_ref()).await.unwrap();
    store.name_node(second, web.as_ref()).await.unwrap();
    store.name_node(first, None).await.unwrap();
    store.name_node(second, mail.as_ref()).await.unwrap();
    store.name_node(first, web.as_ref()).await.unwrap();
    store.change(second, Request::Delete { force: false }).await.unwrap();
    store.name_node(first, mail.as_ref()).await.unwrap();
    let left: Vec<_> =
        memory.contents().into_keys().filter(|key| key.starts_with("node_names/")).collect();
    assert_eq!(left, ["node_names/mail"]);
    let unknown = store.name_node(second, web.as_ref()).await;
    assert!(matches!(unknown, Err(Error::Refused(Refusal::Unknown))));
}

#[tokio::test]
async fn a_machine_that_registers_again_keeps_its_name() {
    let (store, _) = founded().await;
    let ticket = store.ticket(TicketRequest::Read, 1).await.unwrap().opaque;
    let id = Identity::new([2; 32]).id;
    store.register(&ticket, registration(2, 3)).await.unwrap();
    store.name_node(id, name("web").as_ref()).await.unwrap();
    let again = store.register(&ticket, registration(2, 4)).await.unwrap();
    assert_eq!(again.name, "web");
}

#[tokio::test]
async fn a_decommissioned_node_gets_no_name_and_can_give_its_name_up() {
    let (store, _) = founded().await;
    let first = first_node().id;
    store.name_node(first, name("web").as_ref()).await.unwrap();
    store.change(first, Request::Decommission).await.unwrap();
    let refused = store.name_node(first, name("mail").as_ref()).await;
    assert!(matches!(refused, Err(Error::Refused(Refusal::Decommissioned))));
    assert_eq!(store.name_node(first, None).await.unwrap().name, "");
}

#[tokio::test]
async fn two_nodes_that_get_one_name_at_the_same_moment_do_not_both_have_it() {
    let (store, memory) = founded().await;
    let ticket = store.ticket(TicketRequest::Read, 1).await.unwrap().opaque;
    let (first, second) = (first_node().id, Identity::new([2; 32]).id);
    store.register(&ticket, registration(2, 3)).await.unwrap();
    let web = name("web");
    let named =
        tokio::join!(store.name_node(first, web.as_ref()), store.name_node(second, web.as_ref()));
    assert_eq!([named.0.is_ok(), named.1.is_ok()].iter().filter(|ok| **ok).count(), 1);
    let names = memory.contents().into_keys().filter(|key| key.starts_with("node_names/"));
    assert_eq!(names.count(), 1);
}

#[tokio::test]
async fn a_node_registers_with_the_name_of_its_parameters_unless_another_has_it() {
    let (store, memory) = founded().await;
    let ticket = store.ticket(TicketRequest::Read, 1).await.unwrap().opaque;
    let named = |key: u8| Registration { name: name("web-1"), ..registration(key, key + 10) };
    let first = store.register(&ticket, named(2)).await.unwrap();
    assert_eq!(first.name, "web-1");
    let second = store.register(&ticket, named(3)).await.unwrap();
    assert_eq!(second.name, "", "it registers without the name");
    // A name that an operator took away stays away, however often the machine asks.
    let id = Identity::new([2; 32]).id;
    store.name_node(id, None).await.unwrap();
    assert_eq!(store.register(&ticket, named(2)).await.unwrap().name, "");
    // The record of the name is read, and a conflict logged, at the first registration alone.
    let damaged = Write::Put("node_names/web-1".to_owned(), vec![0xff]);
    assert!(memory.commit(Vec::new(), vec![damaged]).await.unwrap());
    assert!(store.register(&ticket, named(4)).await.is_err());
    store.register(&ticket, named(3)).await.unwrap();
    let repaired = Write::Delete("node_names/web-1".to_owned());
    assert!(memory.commit(Vec::new(), vec![repaired]).await.unwrap());
    store.name_node(Identity::new([3; 32]).id, name("web-1").as_ref()).await.unwrap();
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
