//! Nodes as the directory keeps them.

use proptest::prelude::*;

use super::*;

fn id(node: u8) -> NodeId {
    NodeId::from_public_key(&[node; 32])
}

fn record(node: u8, revision: i64) -> Kv {
    let value = v1::Node { registered_at: revision, ..Default::default() }.encode_to_vec();
    Kv { key: store::node_key(id(node)), value, created: 1, modified: revision, lease: 0 }
}

fn lock(lease: u8, created: i64) -> Change {
    let leader = Leader {
        node: id(lease),
        address: Some([192, 0, 2, lease].into()),
        port: 7835,
        since: SystemTime::UNIX_EPOCH,
    };
    let value = leader.to_message().encode_to_vec();
    let key = format!("{LEADERS}{lease}");
    Change::Put(Kv { key, value, created, modified: created, lease: lease.into() })
}

fn at(revision: i64) -> Mirror {
    Mirror { revision, ..Mirror::default() }
}

#[test]
fn the_first_candidate_leads_until_its_lock_is_gone() {
    let mut directory = Directory::default();
    directory.apply(&at(9), &[lock(2, 9), lock(1, 7)]);
    assert_eq!(directory.leader().unwrap().node, id(1));
    directory.apply(&at(10), &[Change::Gone(format!("{LEADERS}1"))]);
    assert_eq!(directory.leader().unwrap().node, id(2));
    assert_eq!(directory.revision(), 10);
}

#[test]
fn a_copy_holds_what_former_leaders_wrote_once_it_has_no_lock_of_theirs() {
    let mut directory = Directory::default();
    assert!(!directory.holds(9, 0), "nothing was listed yet");
    // The second candidate waits since revision 9; the leader writes at 20, and dies.
    directory.apply(&at(19), &[lock(1, 7), lock(2, 9)]);
    assert!(!directory.holds(9, 0), "the write at 20 is missing");
    directory.apply(&at(21), &[Change::Gone(format!("{LEADERS}1"))]);
    assert!(directory.holds(9, 0) && directory.holds(9, 21));
    assert!(!directory.holds(9, 22), "what this leader wrote counts, too");
    assert!(directory.doubt() && !directory.holds(9, 0), "no watch follows etcd");
}

/// As a watch reports it: the present records, all of them new.
fn listing(revision: i64, changes: &[Change]) -> (Mirror, Vec<Change>) {
    let mut mirror = at(revision);
    for change in changes {
        let Change::Put(kv) = change else { continue };
        mirror.entries.insert(kv.key.clone(), kv.clone());
    }
    (mirror, changes.to_vec())
}

#[test]
fn a_store_that_was_restored_without_registries_has_none() {
    let registries = vec![v1::Registry { host: "a.example".to_owned(), ..Default::default() }];
    let value = v1::Registries { registries }.encode_to_vec();
    let key = REGISTRIES.to_owned();
    let put = Change::Put(Kv { key, value, created: 1, modified: 1, lease: 0 });
    let mut directory = Directory::default();
    let (mirror, changes) = listing(9, &[put]);
    directory.begin(&mirror, &changes);
    assert_eq!(directory.registries.registries.len(), 1);
    directory.begin(&at(4), &[]);
    assert!(directory.registries.registries.is_empty());
}

#[test]
fn a_record_deleted_between_two_watches_is_gone_in_the_second() {
    let directory = watch::Sender::<Directory>::default();
    let user = |name: &str| {
        let value = v1::User { name: name.to_owned(), ..Default::default() }.encode_to_vec();
        let key = format!("{USERS}{name}");
        Change::Put(Kv { key, value, created: 1, modified: 1, lease: 0 })
    };
    let put = |node| Change::Put(record(node, 1));
    let (mirror, changes) =
        listing(9, &[lock(1, 7), lock(2, 9), put(1), put(2), user("ann"), user("bob")]);
    keeper(&directory)(&mirror, &changes);
    let mut seen = Seen::default();
    seen.delta(&directory.borrow(), None, 9);

    // The node left etcd and entered again: its curator is another run.
    let (mirror, changes) = listing(30, &[lock(2, 9), lock(3, 20), put(2), user("bob")]);
    let mut keep = keeper(&directory);
    assert_eq!(directory.borrow().revision(), 0, "stale data admits no node");
    assert_eq!(directory.borrow().leader(), None);
    keep(&mirror, &changes);
    {
        let directory = directory.borrow();
        assert_eq!(directory.leader().unwrap().node, id(2), "the lock of 1 has gone");
        assert_eq!(directory.nodes().map(|(id, _)| id).collect::<Vec<_>>(), [id(2)]);
        assert_eq!(seen.delta(&directory, None, 9).0.gone, [id(1)]);
        let users: Vec<_> = directory.users().map(|user| &*user.name).collect();
        assert_eq!(users, ["bob"]);
    }
    keep(&at(31), &[put(4)]);
    assert_eq!(directory.borrow().nodes().count(), 2, "later it receives only changes");
}

#[test]
fn a_damaged_record_leaves_what_was_known() {
    let mut directory = Directory::default();
    directory.apply(&at(1), &[Change::Put(record(1, 1))]);
    let bad = Kv { value: vec![0xff; 5], ..record(1, 2) };
    directory.apply(&at(2), &[Change::Put(bad)]);
    assert_eq!(directory.node(id(1)).unwrap().node.registered_at, 1);
}

#[test]
fn a_watcher_of_one_node_receives_no_other() {
    let mut directory = Directory::default();
    directory.apply(&at(1), &[Change::Put(record(1, 1)), Change::Put(record(2, 1))]);
    let mut seen = Seen::default();
    let (delta, all) = seen.delta(&directory, Some(id(2)), 1);
    assert_eq!((delta.nodes.len(), delta.nodes[0].0, all), (1, id(2), true));
    directory.apply(&at(2), &[Change::Gone(store::node_key(id(1)))]);
    assert_eq!(seen.delta(&directory, Some(id(2)), 1).0, Delta::default());
    assert!(directory.set_health(id(2), v1::NodeHealth::Late));
    assert!(!directory.set_health(id(2), v1::NodeHealth::Late));
    assert_eq!(seen.delta(&directory, Some(id(2)), 1).0.nodes.len(), 1);
}

/// With the longest labels, 256 of them are larger than a message.
#[test]
fn an_event_of_large_records_fits_into_a_message() {
    let mut directory = Directory::default();
    for number in 0..200 {
        let label = |key: u8| (format!("{key:064}"), "x".repeat(256));
        let labels = (0..64).map(label).collect();
        let node = v1::Node { labels, ..Default::default() }.encode_to_vec();
        directory.apply(&at(1), &[Change::Put(Kv { value: node, ..record(number, 1) })]);
    }
    let (mut seen, mut sent) = (Seen::default(), 0);
    loop {
        let (delta, all) = seen.delta(&directory, None, 256);
        let bytes: usize = delta.nodes.iter().map(|(_, known)| known.node.encoded_len()).sum();
        assert!(bytes < 2 << 20, "{bytes} bytes in one event");
        sent += delta.nodes.len();
        if all {
            break;
        }
    }
    assert_eq!(sent, 200);
}

#[derive(Clone, Debug)]
enum Step {
    Put(u8),
    Delete(u8),
    Forget,
    Look(usize),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        5 => (0..8_u8).prop_map(Step::Put),
        3 => (0..8_u8).prop_map(Step::Delete),
        1 => Just(Step::Forget),
        3 => (1..4_usize).prop_map(Step::Look),
    ]
}

proptest! {
    #[test]
    fn a_watcher_that_has_caught_up_holds_what_the_directory_holds(
        steps in prop::collection::vec(step(), 0..80)
    ) {
        let mut directory = Directory::default();
        let mut seen = Seen::default();
        let mut reported: BTreeMap<NodeId, i64> = BTreeMap::new();
        for (revision, step) in (1_i64..).zip(steps.into_iter().chain([Step::Look(1)])) {
            let pages = match step {
                Step::Put(node) => {
                    directory.apply(&at(revision), &[Change::Put(record(node, revision))]);
                    continue;
                }
                Step::Delete(node) => {
                    let gone = Change::Gone(store::node_key(id(node)));
                    directory.apply(&at(revision), &[gone]);
                    continue;
                }
                // As if very many nodes had been removed.
                Step::Forget => {
                    directory.forgotten = directory.sequence;
                    directory.gone.clear();
                    continue;
                }
                Step::Look(max) => max,
            };
            loop {
                let (delta, all) = seen.delta(&directory, None, pages);
                prop_assert!(delta.nodes.len() <= pages);
                for gone in delta.gone {
                    prop_assert!(reported.remove(&gone).is_some(), "{gone} was never reported");
                }
                for (id, known) in delta.nodes {
                    reported.insert(id, known.node.registered_at);
                }
                if all {
                    break;
                }
            }
            let held: BTreeMap<_, _> =
                directory.nodes().map(|(id, known)| (id, known.node.registered_at)).collect();
            prop_assert_eq!(&reported, &held);
            prop_assert_eq!(directory.order.len(), held.len());
        }
    }
}
