//! The messages of discovery, and what a node accepts of those of others.

use proptest::prelude::*;

use super::*;
use polis_machine::parameters::Cidr;

pub(super) const HERE: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 2, 17));
pub(super) const HERE_6: IpAddr = IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 0x17));

/// The part of a message with an address of IPv4 that is signed.
pub(super) const SIGNED: usize = MAGIC_4.len() + 1 + 32 + 4 + size_of::<Nonce>();

pub(super) fn key(seed: u8) -> NodeKey {
    NodeKey::from_seed(&[seed; 32])
}

/// The question that the receiver asked last.
pub(super) const NONCE: Nonce = [5; 16];

pub(super) fn message(kind: Kind, key: &NodeKey, nonce: Nonce) -> Vec<u8> {
    message_at(HERE, kind, key, nonce)
}

pub(super) fn message_at(address: IpAddr, kind: Kind, key: &NodeKey, nonce: Nonce) -> Vec<u8> {
    Discovery { kind, key: key.public_key(), address, nonce }.signed(key)
}

fn asks(key: &NodeKey) -> Vec<u8> {
    message(Kind::Asks, key, [6; 16])
}

/// The result of the message at a node with the key 9, which knows the node of key 1.
pub(super) fn received(bytes: &[u8], from: IpAddr) -> Option<Discovery> {
    let peers = [1, 9].map(|seed| (key(seed).id(), IpAddr::from([10, 0, 2, 99])));
    classify(bytes, from, &peers.into(), key(9).id(), &[Some(NONCE), None], &mut |_node| true)
}

#[test]
fn an_announcement_counts_from_the_announced_address() {
    let discovery = received(&asks(&key(1)), HERE).unwrap();
    assert_eq!(
        (discovery.kind, discovery.node(), discovery.address),
        (Kind::Asks, key(1).id(), HERE)
    );
    assert_eq!(received(&asks(&key(1)), [10, 0, 2, 18].into()), None, "sent on");
    assert_eq!(received(&asks(&key(2)), HERE), None, "a stranger");
    assert_eq!(received(&asks(&key(9)), HERE), None, "itself");
}

#[test]
fn an_announcement_by_ipv6_counts_from_the_announced_address() {
    for kind in [Kind::Asks, Kind::Answers] {
        let sent = message_at(HERE_6, kind, &key(1), NONCE);
        assert_eq!(sent.len(), LENGTH_MAX);
        let discovery = received(&sent, HERE_6).unwrap();
        assert_eq!((discovery.kind, discovery.address), (kind, HERE_6));
        assert_eq!(received(&sent, "2001:db8::18".parse().unwrap()), None, "sent on");
        assert_eq!(received(&sent, "fe80::17".parse().unwrap()), None, "not its address");
        for at in 0..sent.len() {
            let mut changed = sent.clone();
            changed[at] ^= 1;
            let claimed = Discovery::read(&changed).map_or(HERE_6, |other| other.address);
            assert_eq!(received(&changed, claimed), None, "byte {at}");
        }
    }
    // The same address of IPv4 in another spelling.
    let mapped = "::ffff:10.0.2.17".parse().unwrap();
    assert_eq!(Discovery::read(&message_at(mapped, Kind::Asks, &key(1), NONCE)), None);
}

#[tokio::test]
async fn a_message_by_ipv6_leaves_from_the_address_that_it_names() {
    let Ok(receiver) = UdpSocket::bind((Ipv6Addr::LOCALHOST, 0)).await else {
        eprintln!("skipped: this kernel has no IPv6");
        return;
    };
    let socket = UdpSocket::bind((Ipv6Addr::UNSPECIFIED, 0)).await.unwrap();
    let (address, own) = (IpAddr::V6(Ipv6Addr::LOCALHOST), key(1));
    let sent = Discovery { kind: Kind::Asks, key: own.public_key(), address, nonce: NONCE };
    send(&socket, &sent, &own, receiver.local_addr().unwrap()).await.unwrap();
    let mut buffer = [0; LENGTH_MAX + 1];
    let (length, from) = receiver.recv_from(&mut buffer).await.unwrap();
    assert_eq!(received(&buffer[..length], from.ip()), Some(sent));
    let elsewhere = Discovery { address: HERE_6, ..sent };
    let to = receiver.local_addr().unwrap();
    assert!(send(&socket, &elsewhere, &own, to).await.is_err(), "not an address of this machine");
}

#[test]
fn an_answer_that_was_recorded_before_the_question_is_refused() {
    let answer = message(Kind::Answers, &key(1), NONCE);
    assert_eq!(received(&answer, HERE).unwrap().kind, Kind::Answers);
    // Recorded in an earlier outage, and sent from the former address.
    assert_eq!(received(&message(Kind::Answers, &key(1), [4; 16]), HERE), None);
    // The random number of another's question, in an answer that was not signed for it.
    let recorded = message(Kind::Answers, &key(1), [4; 16]);
    let mut changed = recorded.clone();
    let at = SIGNED - NONCE.len();
    changed[at..SIGNED].copy_from_slice(&NONCE);
    assert_eq!(received(&changed, HERE), None);
}

#[tokio::test]
async fn a_question_moves_no_node() {
    let (service, _values) = cut_off();
    let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let from = SocketAddr::from((HERE, PORT));
    let own = key(9);
    let question = asks(&key(1));
    let answer = message(Kind::Answers, &key(1), NONCE);
    let (asked, found) = ([Some(NONCE), None], service.found.subscribe());
    service.hear(&socket, &own, (&question, from), &asked, &mut |_node| true).await;
    assert_eq!(*found.borrow(), Peers::new(), "sent again by anybody");
    service.hear(&socket, &own, (&answer, from), &asked, &mut |_node| true).await;
    assert_eq!(*found.borrow(), Peers::from([(key(1).id(), HERE)]));
}

#[tokio::test]
async fn a_message_from_beyond_the_segment_costs_no_signature_and_finds_no_node() {
    let (service, _values) = cut_off();
    let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let answer = |at| message_at(at, Kind::Answers, &key(1), NONCE);
    let mut verified = 0;
    let mut may_verify = |_node: NodeId| {
        verified += 1;
        true
    };
    for at in [IpAddr::from([10, 0, 3, 17]), HERE] {
        let from = SocketAddr::from((at, PORT));
        let (bytes, asked) = (answer(at), [Some(NONCE), None]);
        service.hear(&socket, &key(9), (&bytes, from), &asked, &mut may_verify).await;
    }
    assert_eq!(verified, 1);
    assert_eq!(*service.found.borrow(), Peers::from([(key(1).id(), HERE)]));
    // The network of an address by DHCPv6 is the address alone.
    assert!(is_near(&network::Status::default(), HERE_6));
}

/// A service of the node with the key 9, which knows the node of key 1 and no leader, and
/// the owners of its values.
fn cut_off() -> (Service, (watch::Sender<Option<NodeId>>, watch::Sender<Peers>)) {
    let disk = tempfile::tempdir().unwrap();
    let root = polis_base::files::Root::at(disk.path());
    let leader = watch::Sender::new(None);
    let peers = watch::Sender::new(Peers::from([(key(1).id(), [10, 0, 2, 6].into())]));
    let service = Service {
        key: root.data.node.credentials.key,
        identity: watch::Sender::new(None).subscribe(),
        consensus: watch::Sender::new(consensus::Status::default()).subscribe(),
        leader: leader.subscribe(),
        network: watch::Sender::new(at("10.0.2.9/24")).subscribe(),
        peers: peers.subscribe(),
        found: watch::Sender::default(),
    };
    (service, (leader, peers))
}

/// A node with this address.
fn at(text: &str) -> network::Status {
    let cidr: Cidr = text.parse().unwrap();
    let interface = network::Interface {
        index: 3,
        name: "e".to_owned(),
        kind: network::Kind::Card(None),
        path: String::new(),
        mtu: 1500,
        planned: None,
        mac: polis_machine::parameters::Mac([2, 0, 0, 0, 0, 1]),
        carrier: true,
        driver: None,
        addresses: vec![cidr],
        asking: false,
        leased: None,
        leased_v6: None,
    };
    let primary = Some(cidr.address());
    network::Status { primary, interfaces: vec![interface], ..Default::default() }
}

#[test]
fn an_announcement_for_another_node_is_refused() {
    let (public, nonce) = (key(1).public_key(), NONCE);
    let forged = Discovery { kind: Kind::Asks, key: public, address: HERE, nonce };
    assert_eq!(received(&forged.signed(&key(2)), HERE), None);
    let genuine = asks(&key(1));
    for at in 0..genuine.len() {
        let mut changed = genuine.clone();
        changed[at] ^= 1;
        let claimed = Discovery::read(&changed).map_or(HERE, |discovery| discovery.address);
        assert_eq!(received(&changed, claimed), None, "byte {at}");
    }
    assert_eq!(received(&genuine[..genuine.len() - 1], HERE), None);
    assert_eq!(received(&[&genuine[..], &[0]].concat(), HERE), None);
}

#[test]
fn a_node_that_is_back_where_it_was_in_an_earlier_outage_is_found_again() {
    let (service, (leader, _peers)) = cut_off();
    let (node, before) = (key(1).id(), IpAddr::from([10, 0, 2, 5]));
    let mut found = service.found.subscribe();
    service.find(node, before);
    assert_eq!(*found.borrow_and_update(), Peers::from([(node, before)]));
    // Meanwhile the leader publishes another address.
    leader.send_replace(Some(node));
    service.forget();
    assert_eq!(*found.borrow_and_update(), Peers::new());
    service.find(node, before);
    assert_eq!(*found.borrow(), Peers::new(), "a leader is received");
    leader.send_replace(None);
    service.forget();
    service.find(node, before);
    assert!(found.has_changed().unwrap());
    assert_eq!(*found.borrow_and_update(), Peers::from([(node, before)]));
}

#[tokio::test(start_paused = true)]
async fn a_flood_costs_a_bounded_number_of_signatures() {
    let mut budget = Budget::new(Instant::now());
    let nodes: Vec<_> = (0..20).map(|seed| NodeId::from_public_key(&[seed; 32])).collect();
    let mut taken = |tries: usize| {
        let tries = nodes.iter().cycle().take(tries);
        tries.filter(|node| budget.take(**node, Instant::now(), 0.0)).count()
    };
    assert_eq!(taken(500), 50);
    assert_eq!(taken(1), 0);
    tokio::time::advance(Duration::from_secs(1)).await;
    assert_eq!(taken(500), 50);
}

#[tokio::test(start_paused = true)]
async fn of_more_messages_than_may_be_verified_chance_chooses_and_not_the_order() {
    let mut budget = Budget::new(Instant::now());
    let [flooded, quiet] = [1, 2].map(|seed| key(seed).id());
    let chances = (0..20).map(|number| f64::from(number) / 20.0);
    let forged = chances.filter(|chance| budget.take(flooded, Instant::now(), *chance)).count();
    assert_eq!(forged, 5, "the first second knows none before");
    assert!(!budget.take(flooded, Instant::now(), 0.0), "its own message, behind the others");
    tokio::time::advance(Duration::from_secs(1)).await;
    // 5 of 21: forged ones in front of it do not decide.
    let forged = [0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3];
    assert!(!forged.iter().any(|chance| budget.take(flooded, Instant::now(), *chance)));
    assert!(budget.take(flooded, Instant::now(), 0.2), "its own message");
    assert!(budget.take(quiet, Instant::now(), 0.99), "another node has its part");
    tokio::time::advance(Duration::from_secs(2)).await;
    assert!(budget.take(flooded, Instant::now(), 0.99), "the flood is over");
}

#[tokio::test(start_paused = true)]
async fn five_forged_messages_in_front_of_a_node_s_own_do_not_silence_it() {
    let mut budget = Budget::new(Instant::now());
    let node = key(1).id();
    // Before each question of the node, and after a time without messages.
    for _question in 0..3 {
        let mut verified = |chance| budget.take(node, Instant::now(), chance);
        let forged = [0.99, 0.99, 0.5, 0.5, 0.5].map(&mut verified);
        assert_eq!(forged, [true, true, true, false, false]);
        assert!(verified(0.3), "its own message");
        tokio::time::advance(POLL_INTERVAL).await;
    }
}

#[tokio::test(start_paused = true)]
async fn many_nodes_have_the_same_chance_each() {
    let mut budget = Budget::new(Instant::now());
    let nodes: Vec<_> = (0..200).map(|seed| NodeId::from_public_key(&[seed; 32])).collect();
    let mut verified = |chance: fn(usize) -> f64| {
        let nodes = nodes.iter().enumerate();
        let may = nodes.filter(|(at, node)| budget.take(**node, Instant::now(), chance(*at)));
        may.map(|(at, _)| at).collect::<Vec<_>>()
    };
    assert_eq!(verified(|_| 0.0), (0..50).collect::<Vec<usize>>(), "the first ones");
    tokio::time::advance(Duration::from_secs(1)).await;
    // 50 of 200: the last one as well as the first one.
    assert_eq!(verified(|at| if [0, 199].contains(&at) { 0.2 } else { 0.3 }), [0, 199]);
    tokio::time::advance(Duration::from_secs(1)).await;
    assert_eq!(verified(|_| 0.2).len(), 50);
}

#[tokio::test(start_paused = true)]
async fn messages_in_the_name_of_one_node_leave_the_others_their_part() {
    let mut budget = Budget::new(Instant::now());
    let [repeated, other] = [1, 2].map(|seed| key(seed).id());
    for _second in 0..2 {
        let mut taken = |node, tries: usize| {
            (0..tries).filter(|_try| budget.take(node, Instant::now(), 0.0)).count()
        };
        assert_eq!(taken(repeated, 500), 5);
        assert_eq!(taken(other, 2), 2, "its question and its answer");
        tokio::time::advance(Duration::from_secs(1)).await;
    }
}

#[test]
fn everyone_is_the_last_address_of_the_segment_and_the_group_of_all_nodes() {
    let everyone = |text| place(&at(text)).map(|(_, everyone)| everyone.to_string());
    assert_eq!(everyone("10.0.2.17/24").as_deref(), Some("10.0.2.255:7836"));
    assert_eq!(everyone("172.16.9.9/12").as_deref(), Some("172.31.255.255:7836"));
    assert_eq!(everyone("10.0.0.1/32").as_deref(), Some("10.0.0.1:7836"));
    assert_eq!(everyone("fd00::1/64").as_deref(), Some("[ff02::1%3]:7836"));
    assert_eq!(place(&network::Status::default()), None);
}

proptest! {
    #[test]
    fn arbitrary_bytes_are_ignored(input in prop::collection::vec(any::<u8>(), 0..200)) {
        let _beacon = Discovery::read(&input);
        for magic in [MAGIC_4, MAGIC_6] {
            let framed = [&magic[..], &input].concat();
            let from = Discovery::read(&framed).map_or(HERE, |discovery| discovery.address);
            prop_assert_eq!(received(&framed, from), None);
        }
    }
}
