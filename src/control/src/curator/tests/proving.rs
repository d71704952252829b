//! What a machine proves before it is approved and enters: its key, and its TPM.

use polis_proto::v1::cluster_configuration::TpmMode;
use polis_proto::v1::{self, NodeState};
use prost::Message as _;

use super::{Interfering, commitment, founded, noon, registration};
use crate::curator::error::Error;
use crate::curator::state::{Commitment, Registration};
use crate::curator::store::{Store, node_key};
use crate::curator::tickets::TicketRequest;
use polis_wire::identity::{Fingerprint, Identity, Spoken};
use polis_wire::pki::Write;

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

#[tokio::test]
async fn a_machine_that_registers_anew_during_the_comparison_is_not_approved() {
    let (store, memory) = founded().await;
    let ticket = store.ticket(TicketRequest::Read, 1).await.unwrap().opaque;
    store.register(&ticket, registration(2, 3)).await.unwrap();
    let id = Identity::new([2; 32]).id;
    let seen = Fingerprint::of_registration(&[2; 32], &[4; 16]).unwrap().to_string();
    let seen = seen.parse::<Spoken>().unwrap();
    let anew = v1::Node { nonce: vec![5; 16], ..store.node(id).await.unwrap() };
    let record = node_key(id);
    let write = Write::Put(record.clone(), anew.encode_to_vec());
    let replacing = Store::new(Interfering::new(&memory, &record, write));
    let refused = replacing.approve(id, Some(&seen), None).await;
    assert!(matches!(refused, Err(Error::Fingerprint { .. })), "{refused:?}");
    assert_eq!(store.node(id).await.unwrap().state(), NodeState::New);
    // Without an interference, the fingerprint of the new registration is the right one.
    let shown = Fingerprint::of_registration(&[2; 32], &[5; 16]).unwrap().to_string();
    let shown = shown.parse::<Spoken>().unwrap();
    store.approve(id, Some(&shown), None).await.unwrap();
}
