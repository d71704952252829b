//! The clients of etcd: namespaces, guards, pipes, leases and elections.

use std::collections::BTreeMap;
use std::time::Duration;

use polis_control::consensus::client::{Change, Kv, Txn, User};
use polis_control::curator::{self, Fenced};
use polis_runtime::event::until;
use polis_tests::{Story, story};
use polis_wire::pki::{Guard, Write};
use tokio::sync::watch;

use crate::harness::{Machine, cluster_of_one};

fn keys(entries: &[Kv]) -> Vec<&str> {
    entries.iter().map(|kv| kv.key.as_str()).collect()
}

/// The stories of this file.
pub(crate) const STORIES: &[Story] = &[
    story!(async a_namespace_sees_its_own_keys_only),
    story!(async a_listing_of_many_pages_is_whole),
    story!(async a_listing_of_large_values_is_whole),
    story!(async a_transaction_happens_whole_or_not_at_all),
    story!(async a_pipe_tells_of_what_vanished_while_it_was_cut_off),
    story!(async a_key_is_unknown_then_absent_then_there_then_gone),
    story!(async what_is_written_under_a_lease_ends_with_it),
    story!(async only_the_leader_writes),
    story!(async a_deposed_leader_neither_makes_nor_revokes_a_certificate_of_a_peer).takes(5),
];

async fn a_namespace_sees_its_own_keys_only() {
    let (_machine, node, client) = cluster_of_one(User::Curator).await;
    let inside = client.sub("kubernetes");
    client.put("nodes/a", "1", None).await.unwrap();
    client.put("nodes/b", "2", None).await.unwrap();
    client.put("other", "3", None).await.unwrap();
    inside.put("nodes/a", "4", None).await.unwrap();
    assert_eq!(keys(&client.list("nodes/").await.unwrap().entries), ["nodes/a", "nodes/b"]);
    assert_eq!(keys(&client.list("").await.unwrap().entries), ["nodes/a", "nodes/b", "other"]);
    assert_eq!(keys(&inside.list("").await.unwrap().entries), ["nodes/a"]);
    assert_eq!(inside.get("nodes/a").await.unwrap().unwrap().value, b"4");
    assert!(client.delete("nodes/a").await.unwrap());
    assert!(!client.delete("nodes/a").await.unwrap());
    assert_eq!(client.get("nodes/a").await.unwrap(), None);
    assert!(inside.get("nodes/a").await.unwrap().is_some());
    node.stop().await;
}

async fn a_listing_of_many_pages_is_whole() {
    let (_machine, node, client) = cluster_of_one(User::Curator).await;
    for first in (0..1300).step_by(100) {
        let put = |n| Write::Put(format!("n/{n:05}"), vec![b'x'; 100]);
        let writes = (first..first + 100).map(put).collect();
        client.txn(Txn { writes, ..Txn::default() }).await.unwrap();
    }
    let listing = client.list("n/").await.unwrap();
    let expected: Vec<_> = (0..1300).map(|n| format!("n/{n:05}")).collect();
    assert_eq!(keys(&listing.entries), expected);
    node.stop().await;
}

/// The records of 400 machines with the longest labels: a page of 500 exceeds a message.
async fn a_listing_of_large_values_is_whole() {
    let (_machine, node, client) = cluster_of_one(User::Curator).await;
    for first in (0..400).step_by(40) {
        let put = |n| Write::Put(format!("n/{n:05}"), vec![b'x'; 25 << 10]);
        let writes = (first..first + 40).map(put).collect();
        client.txn(Txn { writes, ..Txn::default() }).await.unwrap();
    }
    let listing = client.list("n/").await.unwrap();
    let expected: Vec<_> = (0..400).map(|n| format!("n/{n:05}")).collect();
    assert_eq!(keys(&listing.entries), expected);
    assert!(listing.entries.iter().all(|kv| kv.value.len() == 25 << 10));
    node.stop().await;
}

async fn a_transaction_happens_whole_or_not_at_all() {
    let (_machine, node, client) = cluster_of_one(User::Curator).await;
    let create = |value: &str| Txn {
        guards: vec![Guard::Absent("a".to_owned())],
        writes: ["a", "b"].map(|key| Write::Put(key.to_owned(), value.into())).into(),
        reads: ["a", "c"].map(str::to_owned).into(),
        ..Txn::default()
    };
    let first = client.txn(create("1")).await.unwrap();
    assert!(first.succeeded && first.read.is_empty());
    let second = client.txn(create("2")).await.unwrap();
    assert!(!second.succeeded);
    let [Some(a), None] = second.read.as_slice() else { panic!("{second:?}") };
    assert_eq!(
        (a.key.as_str(), a.value.as_slice(), a.created),
        ("a", b"1".as_slice(), first.revision)
    );
    // A change of somebody else is noticed.
    client.put("a", "3", None).await.unwrap();
    let stale = Txn {
        guards: vec![Guard::Unchanged("a".to_owned(), a.modified)],
        writes: vec![Write::Delete("a".to_owned())],
        ..Txn::default()
    };
    assert!(!client.txn(stale.clone()).await.unwrap().succeeded);
    let newest = client.get("a").await.unwrap().unwrap();
    let guards = vec![Guard::Unchanged("a".to_owned(), newest.modified)];
    assert!(client.txn(Txn { guards, ..stale }).await.unwrap().succeeded);
    assert_eq!(client.get("a").await.unwrap(), None);
    node.stop().await;
}

async fn a_pipe_tells_of_what_vanished_while_it_was_cut_off() {
    let (_machine, node, client) = cluster_of_one(User::Curator).await;
    for key in ["n/a", "n/b", "n/c"] {
        client.put(key, "1", None).await.unwrap();
    }
    let (sender, mut known) = watch::channel(BTreeMap::<String, Vec<u8>>::new());
    let follow = client.follow("n/", |_mirror, changes| {
        sender.send_modify(|known| {
            for change in changes {
                match change {
                    Change::Put(kv) => drop(known.insert(kv.key.clone(), kv.value.clone())),
                    Change::Gone(key) => {
                        assert!(known.remove(key).is_some(), "{key} was never there");
                    }
                }
            }
        });
    });
    tokio::pin!(follow);
    let names = |known: &BTreeMap<String, Vec<u8>>| known.keys().cloned().collect::<Vec<_>>();
    let wanted = |wanted: &'static [&'static str]| {
        move |known: &BTreeMap<String, Vec<u8>>| (names(known) == wanted).then_some(())
    };
    tokio::select! {
        never = &mut follow => match never {},
        seen = until(&mut known, "known", wanted(&["n/a", "n/b", "n/c"])) => seen.unwrap(),
    }
    // The pipe is not driven now. etcd forgets the events of this time, and the
    // connection breaks.
    node.kill();
    node.waits("to be stopped", |status| status.voter().is_none()).await;
    node.voter().await;
    client.delete("n/a").await.unwrap();
    client.put("n/b", "2", None).await.unwrap();
    let newest = client.put("n/d", "1", None).await.unwrap();
    node.etcd().await.compact(newest, None).await.unwrap();
    tokio::select! {
        never = &mut follow => match never {},
        seen = until(&mut known, "known", wanted(&["n/b", "n/c", "n/d"])) => seen.unwrap(),
    }
    assert_eq!(known.borrow()["n/b"], b"2");
    // And it goes on live.
    client.delete("n/c").await.unwrap();
    tokio::select! {
        never = &mut follow => match never {},
        seen = until(&mut known, "known", wanted(&["n/b", "n/d"])) => seen.unwrap(),
    }
    node.stop().await;
}

async fn a_key_is_unknown_then_absent_then_there_then_gone() {
    let (_machine, node, client) = cluster_of_one(User::Curator).await;
    let value = watch::Sender::new(None);
    let mut seen = value.subscribe();
    let story = async {
        assert_eq!(until(&mut seen, "value", Clone::clone).await.unwrap(), None);
        client.put("k", "1", None).await.unwrap();
        let there = until(&mut seen, "value", |value: &Option<Option<Kv>>| value.clone().flatten());
        assert_eq!(there.await.unwrap().value, b"1");
        // A longer key is another key.
        client.put("k2", "1", None).await.unwrap();
        client.delete("k").await.unwrap();
        until(&mut seen, "value", |value| (*value == Some(None)).then_some(())).await.unwrap();
    };
    assert_eq!(*value.borrow(), None);
    tokio::select! {
        never = client.follow_key("k", &value) => match never {},
        () = story => {}
    }
    node.stop().await;
}

async fn what_is_written_under_a_lease_ends_with_it() {
    let (_machine, node, client) = cluster_of_one(User::Curator).await;
    let lease = client.lease(Duration::from_secs(2)).await.unwrap();
    client.put("alive", "1", Some(&lease)).await.unwrap();
    // Kept, it outlives its term.
    let longer = tokio::time::timeout(Duration::from_secs(4), client.keep(&lease)).await;
    assert!(longer.is_err(), "the lease was lost: {longer:?}");
    assert_eq!(client.get("alive").await.unwrap().unwrap().lease, lease.id());
    client.release(&lease).await.unwrap();
    assert_eq!(client.get("alive").await.unwrap(), None);
    // And keeping a lease that is gone returns an error.
    client.keep(&lease).await;
    node.stop().await;
}

async fn a_deposed_leader_neither_makes_nor_revokes_a_certificate_of_a_peer() {
    let (_machine, node, client) = cluster_of_one(User::Curator).await;
    // Longer than etcd needs to make room for a second member.
    let ttl = Duration::from_secs(60);
    let (one, two) = (client.lease(ttl).await.unwrap(), client.lease(ttl).await.unwrap());
    let first = client.campaign("leader", "one", &one).await.unwrap();
    let old = Fenced::new(node.peers_pki().await, first.clone());
    let (second, resigned) =
        tokio::join!(client.campaign("leader", "two", &two), client.resign(first));
    resigned.unwrap();
    let new = Fenced::new(node.peers_pki().await, second.unwrap());

    let peer = Machine::new();
    let (identity, members) = (peer.key.identity(), &node.members);
    let late = members.add(&identity, &peer.peer, old.clone()).await.unwrap_err();
    assert!(curator::Error::from(late).deposed());
    assert_eq!(members.list().await.unwrap().len(), 1, "no learner without a certificate");
    let invitation = members.add(&identity, &peer.peer, new.clone()).await.unwrap();
    let late = members.revoke(identity.id, old).await.unwrap_err();
    assert!(curator::Error::from(late).deposed());
    let again = members.add(&identity, &peer.peer, new).await.unwrap();
    assert_eq!(invitation, again, "nothing was revoked");
    node.stop().await;
}

async fn only_the_leader_writes() {
    let (_machine, node, client) = cluster_of_one(User::Curator).await;
    // Longer than this takes on a slow host.
    let ttl = Duration::from_secs(60);
    let (one, two) = (client.lease(ttl).await.unwrap(), client.lease(ttl).await.unwrap());
    assert_eq!(client.leader("leader").await.unwrap(), None);
    let first = client.campaign("leader", "one", &one).await.unwrap();
    assert_eq!(client.leader("leader").await.unwrap().as_deref(), Some(&b"one"[..]));
    let write = |leader: &polis_control::consensus::client::Leadership| Txn {
        term: Some(leader.clone()),
        writes: vec![Write::Put("state".to_owned(), b"x".to_vec())],
        ..Txn::default()
    };
    assert!(client.txn(write(&first)).await.unwrap().succeeded);
    let old = first.clone();
    let (second, resigned) =
        tokio::join!(client.campaign("leader", "two", &two), client.resign(first));
    resigned.unwrap();
    let late = client.txn(write(&old)).await.unwrap();
    assert!(!late.succeeded && late.deposed, "{late:?}");
    let second = second.unwrap();
    assert!(client.txn(write(&second)).await.unwrap().succeeded);
    let guards = vec![Guard::Absent("state".to_owned())];
    let taken = client.txn(Txn { guards, reads: vec!["state".to_owned()], ..write(&second) });
    let taken = taken.await.unwrap();
    assert!(!taken.succeeded && !taken.deposed, "{taken:?}");
    assert!(matches!(taken.read.as_slice(), [Some(kv)] if kv.key == "state"), "{taken:?}");
    // The same name in another namespace is another election.
    assert_eq!(client.sub("x").leader("leader").await.unwrap(), None);
    node.stop().await;
}
