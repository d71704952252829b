//! Nodes whose certificate ended while they were off.

use std::time::{Duration, SystemTime};

use polis_proto::v1::{self, NodeState, cluster_configuration::TpmMode};
use prost::Message as _;

use super::{Interfering, commitment, founded, noon, registration};
use crate::curator::error::Error;
use crate::curator::returning::{Refused, Return};
use crate::curator::state::{Refusal, Registration, Request};
use crate::curator::store::{CONFIGURATION, Store, node_key};
use crate::curator::tickets::TicketRequest;
use polis_wire::identity::{Fingerprint, Identity, Spoken};
use polis_wire::pki::memory::Memory;
use polis_wire::pki::{Facts, Reason, Store as _, Write};

fn late() -> SystemTime {
    noon() + Duration::from_secs(91 * 24 * 60 * 60)
}

/// A node that has been home, with a TPM.
async fn member() -> (Store<Memory>, Memory, Identity) {
    let (store, memory) = founded().await;
    let ticket = store.ticket(TicketRequest::Read, 1).await.unwrap().opaque;
    let identity = Identity::new([2; 32]);
    let registration = Registration { tpm: true, ..registration(2, 3) };
    store.register(&ticket, registration).await.unwrap();
    store.approve(identity.id, None, None).await.unwrap();
    store.enter(identity, commitment()).await.unwrap();
    store.member_certificate(identity, noon()).await.unwrap();
    (store, memory, identity)
}

fn asks(boot: &str, nonce: u8) -> Return {
    Return {
        boot_id: boot.to_owned(),
        nonce: [nonce; 16],
        address: "192.0.2.7".to_owned(),
        now: 100,
        attestation: None,
    }
}

/// What the screen of the machine shows.
fn words(nonce: u8) -> Spoken {
    Fingerprint::of_registration(&[2; 32], &[nonce; 16]).unwrap().words().parse().unwrap()
}

#[tokio::test]
async fn a_node_returns_by_an_approval_of_its_present_boot() {
    let (store, _, identity) = member().await;
    let approves = async |nonce: u8| store.approve(identity.id, Some(&words(nonce)), None).await;
    let is_refused = async |boot: &str| {
        let returned = store.returned(identity, boot, late()).await;
        matches!(returned, Err(Error::Refused(Refusal::NotApproved)))
    };
    assert!(is_refused("a").await, "it has not asked");
    store.ask_to_return(identity, asks("a", 1)).await.unwrap();
    assert!(is_refused("a").await);
    let unchecked = store.approve(identity.id, None, None).await;
    assert!(matches!(unchecked, Err(Error::Field(_))), "{unchecked:?}");
    // The fingerprint of its registration is not that of this boot.
    assert!(matches!(approves(4).await, Err(Error::Fingerprint { .. })));
    store.ask_to_return(identity, asks("b", 2)).await.unwrap();
    assert!(matches!(approves(1).await, Err(Error::Fingerprint { .. })));
    approves(2).await.unwrap();
    assert!(is_refused("a").await);

    let issued = store.returned(identity, "b", late()).await.unwrap();
    let facts = Facts::read(&issued.der).unwrap();
    assert_eq!(facts.public_key, identity.public_key);
    assert!(facts.not_after > late());
    let again = store.returned(identity, "b", late()).await.unwrap();
    assert_eq!(again.der, issued.der, "the answer was lost");
    store.ask_to_return(identity, asks("c", 3)).await.unwrap();
    assert!(is_refused("b").await && is_refused("c").await);
    let status = v1::NodeStatus::default();
    let node = store.change(identity.id, Request::Status(status)).await.unwrap();
    assert_eq!((node.state(), node.returning), (NodeState::Up, None));
    assert_eq!(node.cluster_unlock_key, [5; 32], "its disk opens as before");
}

#[tokio::test]
async fn a_node_that_is_removed_revoked_or_a_voter_is_given_nothing() {
    let approved = async || {
        let (store, memory, identity) = member().await;
        store.ask_to_return(identity, asks("a", 1)).await.unwrap();
        store.approve(identity.id, Some(&words(1)), None).await.unwrap();
        (store, memory, identity)
    };
    let refused = async |store: &Store<Memory>, identity: Identity, expected: Refusal| {
        for again in [false, true] {
            let refused = match again {
                false => store.returned(identity, "a", late()).await.map(drop),
                true => store.ask_to_return(identity, asks("a", 1)).await.map(drop),
            };
            match refused {
                Err(Error::Refused(refusal)) => assert_eq!(refusal, expected),
                other => panic!("{expected:?}: {other:?}"),
            }
        }
    };

    let (store, _, identity) = approved().await;
    let mut twin = identity.public_key;
    twin[31] = 0;
    assert_eq!(Identity::new(twin).id, identity.id);
    refused(&store, Identity::new(twin), Refusal::Known).await;
    store.revoke(&identity.id.to_string(), Reason::Left, late()).await.unwrap();
    let returned = store.returned(identity, "a", late()).await;
    assert!(matches!(returned, Err(Error::Refused(Refusal::NotUp))), "{returned:?}");
    store.change(identity.id, Request::Decommission).await.unwrap();
    refused(&store, identity, Refusal::Decommissioned).await;
    store.change(identity.id, Request::Delete { force: false }).await.unwrap();
    refused(&store, identity, Refusal::Unknown).await;

    // It is removed while its certificate is made.
    let (store, memory, identity) = approved().await;
    let record = node_key(identity.id);
    let mut node = store.node(identity.id).await.unwrap();
    node.set_state(NodeState::Decommissioned);
    let write = Write::Put(record.clone(), node.encode_to_vec());
    let removing = Store::new(Interfering::new(&memory, &record, write));
    let returned = removing.returned(identity, "a", late()).await;
    assert!(matches!(returned, Err(Error::Refused(Refusal::Decommissioned))), "{returned:?}");

    let (store, _, identity) = member().await;
    let consensus_member = Some(v1::node_roles::ConsensusMember {});
    let add = v1::NodeRoles { consensus_member, ..Default::default() };
    let remove = v1::NodeRoles::default();
    store.change(identity.id, Request::Roles { add, remove }).await.unwrap();
    refused(&store, identity, Refused::RenewsItself.into()).await;
}

#[tokio::test]
async fn a_cluster_that_requires_a_tpm_gives_a_certificate_only_to_a_boot_that_proved_its_own() {
    let (store, memory, identity) = member().await;
    let configuration = v1::ClusterConfiguration {
        tpm_mode: TpmMode::Required.into(),
        ..store.configuration().await.unwrap()
    };
    let write = Write::Put(CONFIGURATION.to_owned(), configuration.encode_to_vec());
    assert!(memory.commit(Vec::new(), vec![write]).await.unwrap());
    let proves = |boot: &str| {
        let proof = v1::TpmAttestation { boot_id: boot.to_owned(), ..Default::default() };
        Return { attestation: Some(proof), ..asks("a", 1) }
    };
    let returned = async || store.returned(identity, "a", late()).await;
    store.ask_to_return(identity, asks("a", 1)).await.unwrap();
    store.approve(identity.id, Some(&words(1)), None).await.unwrap();
    assert!(matches!(returned().await, Err(Error::TpmUnproved { .. })));
    // A proof of an earlier boot.
    store.ask_to_return(identity, asks("b", 2)).await.unwrap();
    store.ask_to_return(identity, proves("b")).await.unwrap();
    store.approve(identity.id, Some(&words(1)), None).await.unwrap();
    assert!(matches!(returned().await, Err(Error::TpmUnproved { .. })));
    store.ask_to_return(identity, asks("b", 2)).await.unwrap();
    store.ask_to_return(identity, proves("a")).await.unwrap();
    // Another proof than the one that the operator looked at.
    let seen = v1::TpmAttestation { fault: "silent".to_owned(), ..Default::default() };
    let anew = store.approve(identity.id, Some(&words(1)), Some(&seen)).await;
    assert!(matches!(anew, Err(Error::ProvedAnew { .. })), "{anew:?}");
    let seen = v1::TpmAttestation::default();
    store.approve(identity.id, Some(&words(1)), Some(&seen)).await.unwrap();
    returned().await.unwrap();
}
