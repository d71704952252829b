//! Discovery: finds the other nodes after all addresses changed while all machines were off.
//!
//! A node knows the others by the addresses of the last boot. If a DHCP server has
//! forgotten its leases meanwhile, no node has the address that the others know, and no
//! leader can publish the new ones. So a node that is cut off asks on its own segment:
//!
//! ```text
//! cut off for a while: to all on the segment
//!                       "I am N, at A: which nodes are here? X" --> every node that knows N
//!        found <-- accepted only while this node is cut off <-- "I am M, at B. X", to A alone
//! ```
//!
//! All on the segment are the broadcast address of IPv4; of IPv6, the group of all nodes on the
//! link of the node's address.
//!
//! A message carries the public key of its sender, from which the name of the node follows,
//! and is signed with it; the address in it must equal the source address of the packet. X is
//! random, and new in each question: an answer to another question says nothing, so one that
//! was recorded cannot point a node to an address that another node had before, from whatever
//! address it is sent. A question says nothing of an address that its receiver believes, since
//! anybody may send it again; a node that is cut off asks itself. The machine at a found
//! address must still show the certificate of the node. Every node has a certificate, so the
//! place where discovery found a node does not say which node leads.
//!
//! Invariants:
//! - A node believes an address only from the answer to one of its last two questions.
//! - A node that is in contact with a leader ignores discovery messages, and forgets the
//!   addresses that it found before: in the next outage, any address may have changed
//!   again.
//! - A node accepts messages only from nodes that it knew before, and answers only those.
//! - Untrusted senders make this node verify a bounded number of signatures a second.
//!
//! What this module does not do: find nodes beyond the own segment; or help a node whose disk
//! waits for a key, since its own key is on that disk.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};
use std::time::Duration;

use ed25519_dalek::{Signature, VerifyingKey};
use tokio::net::UdpSocket;
use tokio::sync::watch;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep};
use tracing::{debug, info, warn};

use crate::consensus;
use polis_base::files::{self, File};
use polis_machine::network;
use polis_machine::network::names::Peers;
use polis_runtime::event::{Closed, until};
use polis_runtime::supervisor::{Context, blocking};
use polis_wire::identity::{self, Identity, NodeId, NodeKey};

/// The UDP port on which nodes listen for discovery messages.
pub const PORT: u16 = 7836;

/// The time between two checks of whether this node is cut off, and between two questions.
/// A node counts as cut off after two checks: a quick start finds its leader before.
const POLL_INTERVAL: Duration = Duration::from_secs(2);

/// The first bytes of a message that names an address of IPv4.
const MAGIC_4: &[u8; 18] = b"polis discovery 2\0";
/// The same with an address of IPv6.
const MAGIC_6: &[u8; 18] = b"polis discovery 3\0";

/// The signature, which comes last.
const SIGNATURE: usize = 64;

/// The longest message: magic, kind, public key, address, the random number, and the signature
/// of all that.
const LENGTH_MAX: usize = MAGIC_6.len() + 1 + 32 + 16 + size_of::<Nonce>() + SIGNATURE;

/// All nodes of a link (RFC 4291), which every machine with IPv6 listens to.
const ALL_NODES: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);

/// Signatures that a node verifies a second: each node asks once in two.
const VERIFIED_MAX: u32 = 50;

/// Inputs and outputs. Cloned into every run; holds no progress.
#[derive(Clone, Debug)]
pub struct Service {
    /// The key of this node.
    pub key: File,
    /// The identity of this node; its key is on its disk then, or soon after.
    pub identity: watch::Receiver<Option<Identity>>,
    /// Its member of etcd, if it has one.
    pub consensus: watch::Receiver<consensus::Status>,
    /// The leader, as far as this node knows.
    pub leader: watch::Receiver<Option<NodeId>>,
    /// The address.
    pub network: watch::Receiver<network::Status>,
    /// The known nodes and their addresses.
    pub peers: watch::Receiver<Peers>,
    /// The nodes that were found since this node is cut off, and their addresses.
    pub found: watch::Sender<Peers>,
}

/// Why a run ends.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// An input ended.
    #[error(transparent)]
    Closed(#[from] Closed),
    /// The disk.
    #[error("cannot read the key of this node")]
    File(#[from] files::Error),
    /// The file does not hold a valid key.
    #[error("the key of this node cannot be used")]
    Key(#[source] identity::Error),
    /// The node cannot receive messages.
    #[error("cannot listen on UDP port {PORT}")]
    Socket(#[source] std::io::Error),
}

/// The random number of a question, and of each answer to it.
type Nonce = [u8; 16];

/// The kind of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Asks = 1,
    Answers = 2,
}

/// A message with the signature of its sender.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Discovery {
    kind: Kind,
    key: [u8; 32],
    address: IpAddr,
    nonce: Nonce,
}

impl Discovery {
    fn signed(&self, key: &NodeKey) -> Vec<u8> {
        let (magic, address) = match self.address {
            IpAddr::V4(v4) => (MAGIC_4, v4.octets().to_vec()),
            IpAddr::V6(v6) => (MAGIC_6, v6.octets().to_vec()),
        };
        let mut bytes = magic.to_vec();
        bytes.push(self.kind as u8);
        bytes.extend(self.key);
        bytes.extend(address);
        bytes.extend(self.nonce);
        let signature = key.sign(&bytes);
        bytes.extend(signature);
        bytes
    }

    fn node(&self) -> NodeId {
        NodeId::from_public_key(&self.key)
    }

    /// Parses a message; does not verify its signature.
    fn read(bytes: &[u8]) -> Option<Self> {
        let (magic, rest) = bytes.split_first_chunk()?;
        let (kind, rest) = rest.split_first()?;
        let kind = match kind {
            1 => Kind::Asks,
            2 => Kind::Answers,
            _ => return None,
        };
        let (key, rest) = rest.split_first_chunk::<32>()?;
        let (address, rest) = match magic {
            MAGIC_4 => {
                let (octets, rest) = rest.split_first_chunk::<4>()?;
                (IpAddr::from(*octets), rest)
            }
            MAGIC_6 => {
                let (octets, rest) = rest.split_first_chunk::<16>()?;
                // An address of IPv4 has one spelling only.
                let v6 = Some(Ipv6Addr::from(*octets)).filter(|v6| v6.to_ipv4_mapped().is_none());
                (IpAddr::V6(v6?), rest)
            }
            _ => return None,
        };
        let (nonce, signature) = rest.split_first_chunk()?;
        let (key, nonce) = (*key, *nonce);
        (signature.len() == SIGNATURE).then_some(Self { kind, key, address, nonce })
    }

    /// Whether the holder of the key in the message signed it.
    fn is_genuine(&self, bytes: &[u8]) -> bool {
        let signed = bytes.len().checked_sub(SIGNATURE);
        let Some((signed, signature)) = signed.and_then(|at| bytes.split_at_checked(at)) else {
            return false;
        };
        let key = VerifyingKey::from_bytes(&self.key);
        let verified =
            key.and_then(|key| key.verify_strict(signed, &Signature::from_slice(signature)?));
        verified.is_ok()
    }
}

/// The number of signatures that may still be verified this second.
#[derive(Debug)]
struct Budget {
    since: Instant,
    left: u32,
}

impl Budget {
    fn take(&mut self, now: Instant) -> bool {
        if now.duration_since(self.since) >= Duration::from_secs(1) {
            *self = Self { since: now, left: VERIFIED_MAX };
        }
        let taken = self.left > 0;
        self.left = self.left.saturating_sub(1);
        taken
    }
}

impl Service {
    /// Runs until cancelled.
    ///
    /// # Errors
    ///
    /// [`Error`].
    pub async fn run(mut self, ctx: Context) -> Result<(), Error> {
        ctx.healthy();
        let named = until(&mut self.identity, "the identity", Option::clone);
        let Some(named) = ctx.until_cancelled(named).await else { return Ok(()) };
        named?;
        // A node that was just approved has its name before its disk.
        let key = loop {
            let file = self.key.clone();
            if let Some(der) = blocking(move || file.read()).await? {
                break NodeKey::from_pkcs8_der(&zeroize::Zeroizing::new(der))
                    .map_err(Error::Key)?;
            }
            if ctx.until_cancelled(sleep(POLL_INTERVAL)).await.is_none() {
                return Ok(());
            }
        };
        let socket = everywhere().await.map_err(Error::Socket)?;

        let mut looks = interval(POLL_INTERVAL);
        looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut budget = Budget { since: Instant::now(), left: VERIFIED_MAX };
        let mut before = false;
        // The last two: an answer may come after the next question.
        let mut asked = [None; 2];
        // One byte more than a message: a packet that fills the buffer is too long.
        let mut buffer = [0; LENGTH_MAX + 1];
        loop {
            tokio::select! {
                // Cancel-safe: only waits.
                () = ctx.cancelled() => return Ok(()),
                // Cancel-safe per its documentation.
                _tick = looks.tick() => {
                    let cut_off = self.is_cut_off();
                    if cut_off && before {
                        let nonce = rand::random();
                        asked = [Some(nonce), asked[0]];
                        self.ask(&socket, &key, nonce).await;
                    }
                    before = cut_off;
                    self.forget();
                }
                // Cancel-safe per its documentation.
                received = socket.recv_from(&mut buffer) => match received {
                    Ok((length, from)) => {
                        let from = SocketAddr::new(from.ip().to_canonical(), from.port());
                        let budget = &mut || budget.take(Instant::now());
                        let message = (&buffer[..length], from);
                        self.hear(&socket, &key, message, &asked, budget).await;
                    }
                    // An earlier answer of this node was not delivered.
                    Err(error) => debug!(%error, "no announcement was received"),
                },
            }
        }
    }

    /// Whether no leader publishes where the other nodes are.
    fn is_cut_off(&self) -> bool {
        let consensus = self.consensus.borrow();
        match consensus.is_absent() {
            true => self.leader.borrow().is_none(),
            false => consensus.leader.is_none(),
        }
    }

    /// Forgets the found nodes once a leader publishes where every node is.
    fn forget(&self) {
        if !self.is_cut_off() {
            self.found.send_if_modified(|found| !std::mem::take(found).is_empty());
        }
    }

    async fn ask(&self, socket: &UdpSocket, key: &NodeKey, nonce: Nonce) {
        let Some((address, everyone)) = place(&self.network.borrow()) else { return };
        let discovery = Discovery { kind: Kind::Asks, key: key.public_key(), address, nonce };
        match send(socket, &discovery, key, everyone).await {
            Ok(()) => debug!(%everyone, "asked for the addresses of the other nodes"),
            Err(error) => debug!(%error, %everyone, "cannot ask for the addresses of the other \
                                                     nodes"),
        }
    }

    async fn hear(
        &self,
        socket: &UdpSocket,
        key: &NodeKey,
        (bytes, from): (&[u8], SocketAddr),
        asked: &[Option<Nonce>],
        may_verify: &mut impl FnMut() -> bool,
    ) {
        let own = key.id();
        let received = classify(bytes, from.ip(), &self.peers.borrow(), own, asked, may_verify);
        let Some(discovery) = received else { return };
        let node = discovery.node();
        match discovery.kind {
            Kind::Answers => self.find(node, discovery.address),
            Kind::Asks => {
                let Some((address, _)) = place(&self.network.borrow()) else { return };
                let (key_shown, nonce) = (key.public_key(), discovery.nonce);
                let answer = Discovery { kind: Kind::Answers, key: key_shown, address, nonce };
                let to = SocketAddr::new(from.ip(), PORT);
                if let Err(error) = send(socket, &answer, key, to).await {
                    warn!(%error, %node, "cannot answer a node that searches for its cluster");
                }
            }
        }
    }

    /// Accepts the address of a node if no leader publishes another.
    fn find(&self, node: NodeId, at: IpAddr) {
        if !self.is_cut_off() {
            return;
        }
        let new = self.found.send_if_modified(|found| found.insert(node, at) != Some(at));
        if new && self.peers.borrow().get(&node) != Some(&at) {
            info!(%node, %at, "found a node at another address");
        }
    }
}

/// The content of a received message, if a known node sent it, and an answer only to one of the
/// questions with the numbers `asked`.
fn classify(
    bytes: &[u8],
    from: IpAddr,
    peers: &Peers,
    own: NodeId,
    asked: &[Option<Nonce>],
    may_verify: &mut impl FnMut() -> bool,
) -> Option<Discovery> {
    let discovery = Discovery::read(bytes)?;
    let node = discovery.node();
    let known = node != own && peers.contains_key(&node) && from == discovery.address;
    let meant = match discovery.kind {
        Kind::Asks => true,
        Kind::Answers => asked.contains(&Some(discovery.nonce)),
    };
    (known && meant && may_verify() && discovery.is_genuine(bytes)).then_some(discovery)
}

/// A socket for both address families where both exist.
async fn everywhere() -> io::Result<UdpSocket> {
    let socket = match UdpSocket::bind((Ipv6Addr::UNSPECIFIED, PORT)).await {
        Err(error) if error.kind() != io::ErrorKind::AddrInUse => {
            UdpSocket::bind((Ipv4Addr::UNSPECIFIED, PORT)).await
        }
        bound => bound,
    }?;
    socket.set_broadcast(true)?;
    Ok(socket)
}

/// Sends a message from the address that is in it.
async fn send(
    socket: &UdpSocket,
    discovery: &Discovery,
    key: &NodeKey,
    to: SocketAddr,
) -> io::Result<()> {
    let message = discovery.signed(key);
    match discovery.address {
        IpAddr::V4(_) => socket.send_to(&message, to).await?,
        // The kernel would take the link-local address for a group of the link, and any address
        // of the network for a node.
        IpAddr::V6(own) => UdpSocket::bind((own, 0)).await?.send_to(&message, to).await?,
    };
    Ok(())
}

/// The address of this node, and that of all nodes on its segment.
fn place(network: &network::Status) -> Option<(IpAddr, SocketAddr)> {
    let primary = network.primary?;
    let mut all = network
        .interfaces
        .iter()
        .flat_map(|interface| interface.addresses.iter().map(|cidr| (interface.index, cidr)));
    let (link, own) = all.find(|(_, cidr)| cidr.address() == primary)?;
    let everyone = match primary {
        IpAddr::V4(primary) => {
            let hosts = u32::MAX.checked_shr(own.prefix().into()).unwrap_or(0);
            (Ipv4Addr::from_bits(primary.to_bits() | hosts), PORT).into()
        }
        IpAddr::V6(_) => SocketAddrV6::new(ALL_NODES, PORT, 0, link).into(),
    };
    Some((primary, everyone))
}

#[cfg(test)]
mod tests {
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
        classify(bytes, from, &peers.into(), key(9).id(), &[Some(NONCE), None], &mut || true)
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
        assert!(
            send(&socket, &elsewhere, &own, to).await.is_err(),
            "not an address of this machine"
        );
    }

    #[test]
    fn an_answer_that_was_recorded_before_the_question_is_refused() {
        let answer = message(Kind::Answers, &key(1), NONCE);
        assert_eq!(received(&answer, HERE).unwrap().kind, Kind::Answers);
        // Recorded in an earlier outage, and sent from the address of then.
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
        service.hear(&socket, &own, (&question, from), &asked, &mut || true).await;
        assert_eq!(*found.borrow(), Peers::new(), "sent again by anybody");
        service.hear(&socket, &own, (&answer, from), &asked, &mut || true).await;
        assert_eq!(*found.borrow(), Peers::from([(key(1).id(), HERE)]));
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
            network: watch::Sender::new(network::Status::default()).subscribe(),
            peers: peers.subscribe(),
            found: watch::Sender::default(),
        };
        (service, (leader, peers))
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
        let mut budget = Budget { since: Instant::now(), left: VERIFIED_MAX };
        let mut taken = |tries: u32| (0..tries).filter(|_| budget.take(Instant::now())).count();
        assert_eq!(taken(10 * VERIFIED_MAX), 50);
        assert_eq!(taken(1), 0);
        tokio::time::advance(Duration::from_secs(1)).await;
        assert_eq!(taken(10 * VERIFIED_MAX), 50);
    }

    #[test]
    fn everyone_is_the_last_address_of_the_segment_and_the_group_of_all_nodes() {
        let on = |text: &str| {
            let (address, prefix) = text.split_once('/').unwrap();
            let cidr = Cidr::new(address.parse().unwrap(), prefix.parse().unwrap()).unwrap();
            let interface = network::Interface {
                index: 3,
                name: "e".to_owned(),
                mac: polis_machine::parameters::Mac([2, 0, 0, 0, 0, 1]),
                carrier: true,
                driver: None,
                addresses: vec![cidr],
                asking: false,
                leased: None,
            };
            let primary = Some(cidr.address());
            place(&network::Status { primary, interfaces: vec![interface], ..Default::default() })
        };
        let everyone = |text| on(text).map(|(_, everyone)| everyone.to_string());
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
}

#[cfg(test)]
#[path = "discovery_fuzz_tests.rs"]
mod fuzz_tests;
