//! The names of nodes.

use super::{first_node, founded, name, registration};
use crate::curator::error::Error;
use crate::curator::state::{Refusal, Registration, Request};
use crate::curator::tickets::TicketRequest;
use polis_wire::identity::Identity;
use polis_wire::pki::{Store as _, Write};

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
