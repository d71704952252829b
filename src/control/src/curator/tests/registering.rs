//! Tickets, and machines that register.

use std::time::Duration;

use polis_proto::v1::NodeState;

use super::{Interfering, founded, registration};
use crate::curator::error::Error;
use crate::curator::state::{Refusal, Registration};
use crate::curator::store::{Store, node_key};
use crate::curator::tickets::TicketRequest;
use polis_wire::identity::Identity;
use polis_wire::pki::Write;

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

#[tokio::test]
async fn a_machine_that_is_deleted_while_it_asks_again_needs_a_ticket_that_is_valid() {
    let (store, memory) = founded().await;
    let ticket = store.ticket(TicketRequest::Read, 1).await.unwrap().opaque;
    store.register(&ticket, registration(2, 3)).await.unwrap();
    store.ticket(TicketRequest::Rotate { lifetime: None }, 2).await.unwrap();
    let record = node_key(Identity::new([2; 32]).id);
    let delete = Write::Delete(record.clone());
    let deleting = Store::new(Interfering::new(&memory, &record, delete));
    let lost = deleting.register(&ticket, registration(2, 3)).await;
    assert!(matches!(lost, Err(Error::Store(_))), "{lost:?}");
    let again = deleting.register(&ticket, registration(2, 3)).await;
    assert!(matches!(again, Err(Error::TicketRotated)), "{again:?}");
    assert!(!memory.contents().contains_key(&record));
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
