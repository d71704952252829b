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
//! - Untrusted senders make this node verify a bounded number of signatures a second, and a part
//!   of that number in the name of one node. Of more messages than that, it verifies a random
//!   part: the place of a message in a flood does not decide.
//! - Messages from outside of the networks of this node are ignored (IPv4).
//!
//! What this module does not do: find nodes beyond the own segment; or help a node whose disk
//! waits for a key, since its own key is on that disk.

use std::collections::BTreeMap;
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

/// How many of them may be in the name of one node, which sends a question and an answer in two
/// seconds. A machine that has received one message of a node can repeat it, and as easily make
/// others in its name, so a list of the messages that were seen would not help: only the signature
/// distinguishes them from the node's own. This leaves the other nodes their part.
const VERIFIED_EACH_MAX: u32 = 5;

/// How many messages in the name of one node are verified before chance decides: its question and
/// its answer.
const VERIFIED_SURE: u32 = 2;

/// The time for which these numbers hold.
const WINDOW: Duration = Duration::from_secs(1);

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
///
/// A forged message costs as much as a genuine one. If the first messages of a second used up the
/// number, five forged ones would silence a node, and of many nodes those that ask later in the
/// second would never get an answer. So each message is verified with a probability: by the second
/// before, it is 1 where few messages came, and otherwise the share of them that may be verified.
/// The second before does not show a flood that begins: there, each message in the name of a node
/// after the first [`VERIFIED_SURE`] has a smaller probability than the one before.
#[derive(Debug)]
struct Budget {
    since: Instant,
    left: u32,
    /// The messages in the name of each node, and how many of them were verified.
    received: BTreeMap<NodeId, (u32, u32)>,
    /// The share of the messages that may be verified, by the second before: in the name of each
    /// node where there were more, and of all.
    shares: BTreeMap<NodeId, f64>,
    share: f64,
}

impl Budget {
    fn new(now: Instant) -> Self {
        Self {
            since: now,
            left: VERIFIED_MAX,
            received: BTreeMap::new(),
            shares: BTreeMap::new(),
            share: 1.0,
        }
    }

    /// The budget of the next second, by what was received in this one.
    fn after(&self, now: Instant) -> Self {
        let share = |most: u32, of: u32| (f64::from(most) / f64::from(of.max(1))).min(1.0);
        let counts = || self.received.iter().map(|(node, (count, _))| (node, *count));
        let many = counts().filter(|(_, count)| *count > VERIFIED_EACH_MAX);
        let each = counts().map(|(_, count)| count.min(VERIFIED_EACH_MAX));
        let all = each.fold(0, u32::saturating_add);
        Self {
            shares: many.map(|(node, count)| (*node, share(VERIFIED_EACH_MAX, count))).collect(),
            share: share(VERIFIED_MAX, all),
            ..Self::new(now)
        }
    }

    /// Takes one for a message in the name of `node`, which is a known one. `chance` is a random
    /// number from 0 to 1.
    fn take(&mut self, node: NodeId, now: Instant, chance: f64) -> bool {
        let elapsed = now.duration_since(self.since);
        if elapsed >= 2 * WINDOW {
            *self = Self::new(now);
        } else if elapsed >= WINDOW {
            *self = self.after(now);
        }
        let (received, verified) = self.received.entry(node).or_default();
        *received = received.saturating_add(1);
        let early = f64::from(VERIFIED_SURE) / f64::from(*received);
        let share = self.share * self.shares.get(&node).copied().unwrap_or(early.min(1.0));
        let may = self.left > 0 && *verified < VERIFIED_EACH_MAX && chance < share;
        if may {
            self.left -= 1;
            *verified += 1;
        }
        may
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
        let mut budget = Budget::new(Instant::now());
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
                        let budget = &mut |node| budget.take(node, Instant::now(), rand::random());
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
        may_verify: &mut impl FnMut(NodeId) -> bool,
    ) {
        if !is_near(&self.network.borrow(), from.ip()) {
            return;
        }
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
    may_verify: &mut impl FnMut(NodeId) -> bool,
) -> Option<Discovery> {
    let discovery = Discovery::read(bytes)?;
    let node = discovery.node();
    let known = node != own && peers.contains_key(&node) && from == discovery.address;
    let meant = match discovery.kind {
        Kind::Asks => true,
        Kind::Answers => asked.contains(&Some(discovery.nonce)),
    };
    (known && meant && may_verify(node) && discovery.is_genuine(bytes)).then_some(discovery)
}

/// Whether a message may come from a segment of this node. A broadcast of IPv4 does not leave its
/// segment, and neither does the answer to it. The network of an IPv6 address does not say what is
/// on its link.
fn is_near(network: &network::Status, from: IpAddr) -> bool {
    let mut own = network.interfaces.iter().flat_map(|interface| &interface.addresses);
    from.is_ipv6() || own.any(|cidr| cidr.contains(from))
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
#[path = "discovery_tests.rs"]
mod tests;

#[cfg(test)]
#[path = "discovery_fuzz_tests.rs"]
mod fuzz_tests;
