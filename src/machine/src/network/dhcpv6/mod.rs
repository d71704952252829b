//! The DHCPv6 client of one link (RFC 8415): asks for an address, or for servers of names and time
//! alone, for as long as it is polled.
//!
//! ```text
//! [soliciting] --best offer--> [requesting] --reply--> Leased --T1: renew, T2: rebind--> Leased ..
//!    ^  ^  ^                        |                     |  |
//!    |  |  +------no reply----------+                     |  +--declined: another machine has it
//!    |  +---------Ended: no answer until its end, or the server takes it back
//!    +------------the server does not know it: the address stays until the next, or its end
//!
//! [informing] --reply--> Servers --after the time that the server says--> [informing]
//! ```
//!
//! `mozim`, which speaks DHCP for IPv4, has a client for addresses of IPv6, too. It identifies
//! itself by a random number at each start, so that a server with a pool gives a machine another
//! address at each boot; it has no stateless mode, and it keeps the statuses of servers to itself.
//! The codec `dhcproto` adds thirty crates to the tree, for two levels of options (`message`).
//!
//! Invariants:
//! - The identity is that of the link, the same at each boot and before there is a disk: its
//!   hardware address, as for IPv4, and the ID of a VLAN.
//! - Nothing that a server says makes it send more often than once in [`RENEW_MIN`] for one
//!   lease, or once in ten seconds, and then less and less often, without one.
//! - Addresses that other machines have are declined less and less often: a neighbour that claims
//!   each address does not use up those of the server.
//!
//! What this module does not do: touch the link (`apply`), keep a lease (`leases`), or decide
//! which links ask (`plan`).

mod message;

use std::io;
use std::net::{IpAddr, Ipv6Addr, SocketAddr, SocketAddrV6};
use std::sync::Arc;
use std::time::Duration;

use futures::stream::{self, Stream};
use rustix::net::{self, AddressFamily, SocketFlags, SocketType, sockopt};
use tokio::net::UdpSocket;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep, sleep_until, timeout_at};
use tracing::{debug, trace};

use super::lease::{Lease, Refused};

pub(super) use self::message::{Client, Status};

use self::message::{ADVERTISE, Answer, Association, Binding, Given, Question, REPLY};

/// All relay agents and servers of a link.
const SERVERS: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 1, 2);
const CLIENT_PORT: u16 = 546;
const SERVER_PORT: u16 = 547;

/// Bytes of an answer that are read: more than the MTU that every link has.
const ANSWER_MAX: usize = 2048;

/// The first question waits for a part of this, so that machines that start together do not ask
/// together.
const FIRST_MAX: Duration = Duration::from_secs(1);

/// The least time from a lease to its renewal, whatever the server says.
const RENEW_MIN: Duration = Duration::from_secs(5);

/// The least and the usual time after which servers are asked for again (RFC 8415, 7.6).
const REFRESH_MIN: Duration = Duration::from_secs(600);
const REFRESH: Duration = Duration::from_secs(86_400);

/// Wait after a failure of the client itself, for example without a socket.
const FAILED_WAIT: Duration = Duration::from_secs(2);

/// First wait after an answer without an address that can be used, and after a declined one.
const REFUSED_WAIT: Duration = Duration::from_secs(10);

/// The waits between transmissions of one question (RFC 8415, 15): each is twice the one before,
/// and all are up to a tenth shorter or longer.
#[derive(Clone, Copy, Debug)]
struct Pace {
    first: Duration,
    max: Duration,
    /// Transmissions; `None`: no limit.
    count: Option<u32>,
}

impl Pace {
    const fn of(first: u64, max: u64, count: Option<u32>) -> Self {
        Self { first: Duration::from_secs(first), max: Duration::from_secs(max), count }
    }

    fn next(self, last: Option<Duration>) -> Duration {
        let next = last.map_or(self.first, |last| (last * 2).min(self.max));
        next.mul_f64(rand::random_range(0.9..1.1))
    }
}

/// The longest wait is that of RFC 3315: with the hour of RFC 8415, a node would notice a server
/// that is repaired an hour later.
const SOLICIT: Pace = Pace::of(1, 120, None);
const REQUEST: Pace = Pace::of(1, 30, Some(10));
const RENEW: Pace = Pace::of(10, 600, None);
const DECLINE: Pace = Pace::of(1, 4, Some(4));
const INFORMATION: Pace = Pace::of(1, 120, None);

/// What a link asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Want {
    /// An address, and servers with it.
    Address,
    /// Servers of names and time alone.
    Servers,
}

/// The servers that a server named to a link without an address.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Servers {
    pub(super) nameservers: Vec<IpAddr>,
    pub(super) ntp_servers: Vec<IpAddr>,
}

/// The event.
#[derive(Debug)]
pub(super) enum Event {
    /// An address is new, or its lease was renewed.
    Leased(Lease),
    /// Servers alone.
    Told(Servers),
    /// A server answered that it gives no address.
    Denied(Status),
    /// A server answered, and its address cannot be used.
    Refused(Refused),
    /// The lease is over.
    Ended,
    /// The client cannot work; it is tried again.
    Failed(io::Error),
}

/// The events of a link, and the means to decline its address.
pub(super) struct Asking {
    pub(super) events: std::pin::Pin<Box<dyn Stream<Item = Event> + Send>>,
    pub(super) declined: Arc<Notify>,
}

/// Asks on the link with this name and index; dropping the stream ends it.
pub(super) fn ask(index: u32, name: String, client: Client, want: Want) -> Asking {
    let link = Link::new(index, name, client, want);
    let declined = Arc::clone(&link.declined);
    let events = Box::pin(stream::unfold(link, |mut link| async {
        let event = link.next().await;
        Some((event, link))
    }));
    Asking { events, declined }
}

struct Link {
    name: String,
    index: u32,
    client: Client,
    want: Want,
    socket: Option<UdpSocket>,
    state: State,
    /// The longest wait that a server asked for.
    wait_max: Option<Duration>,
    /// The status that was reported last.
    denied: Option<Status>,
    /// The next wait after an answer without an address.
    refused_wait: Duration,
    /// The next wait after an address that was declined.
    declined_wait: Duration,
    declined: Arc<Notify>,
}

#[derive(Debug)]
enum State {
    Waiting(Duration),
    Soliciting,
    Requesting(Binding),
    Bound(Bound),
    Informing,
}

/// An address that the link has.
#[derive(Debug)]
struct Bound {
    binding: Binding,
    renew: Instant,
    rebind: Instant,
    ends: Instant,
}

/// Where an answer leads to.
enum Heard {
    /// The lease, and the servers that came with it.
    Lease(Box<(Lease, Bound)>),
    /// The server takes the address back.
    Withdrawn,
    /// The server does not know the client.
    Unknown,
    Denied(Status),
    Refused(Refused),
}

impl Link {
    fn new(index: u32, name: String, client: Client, want: Want) -> Self {
        Self {
            name,
            index,
            client,
            want,
            socket: None,
            state: State::Waiting(FIRST_MAX.mul_f64(rand::random_range(0.0..1.0))),
            wait_max: None,
            denied: None,
            refused_wait: REFUSED_WAIT,
            declined_wait: REFUSED_WAIT,
            declined: Arc::new(Notify::new()),
        }
    }

    async fn next(&mut self) -> Event {
        loop {
            match self.step().await {
                Ok(Some(event)) => return event,
                Ok(None) => {}
                Err(error) => {
                    // `leases` keeps the lease to its end.
                    self.socket = None;
                    self.state = State::Waiting(FAILED_WAIT);
                    return Event::Failed(error);
                }
            }
        }
    }

    /// One state; the event, if it leads to one.
    async fn step(&mut self) -> io::Result<Option<Event>> {
        match std::mem::replace(&mut self.state, State::Soliciting) {
            State::Waiting(wait) => {
                sleep(wait).await;
                if self.want == Want::Servers {
                    self.state = State::Informing;
                }
                Ok(None)
            }
            State::Soliciting => self.solicit().await,
            State::Requesting(offered) => self.request(offered).await,
            State::Bound(bound) => self.hold(bound).await,
            State::Informing => self.inform().await,
        }
    }

    /// Collects offers for the first wait; after that, the first offer counts.
    async fn solicit(&mut self) -> io::Result<Option<Event>> {
        let (mut best, mut waited, mut failed): (Option<(u8, Binding)>, _, _) = (None, false, None);
        let pace = Pace { max: self.wait_max.unwrap_or(SOLICIT.max), ..SOLICIT };
        let offer = self.exchange(Question::Solicit, ADVERTISE, pace, None, |heard| {
            let Some((answer, from)) = heard else {
                waited = true;
                return best.take().map(|(_, binding)| Ok(binding)).or(failed.take().map(Err));
            };
            match answer.association {
                // An offer that cannot be used must not keep the link from another server's.
                Association::Given(given) => {
                    // It must not keep the link from the offer of another server.
                    if let Err(refused) = Lease::check_v6(given.address, given.valid, from) {
                        failed = Some(Heard::Refused(refused));
                        return None;
                    }
                    let offer = Binding { server: answer.server, address: given.address };
                    if waited || answer.preference == u8::MAX {
                        return Some(Ok(offer));
                    }
                    if best.as_ref().is_none_or(|(best, _)| *best < answer.preference) {
                        best = Some((answer.preference, offer));
                    }
                    None
                }
                Association::Refused(status) => {
                    failed = Some(Heard::Denied(status));
                    None
                }
                Association::Absent => None,
            }
        });
        Ok(match offer.await? {
            Some(Ok(offer)) => {
                self.state = State::Requesting(offer);
                None
            }
            Some(Err(failed)) => self.turn(failed),
            None => None,
        })
    }

    async fn request(&mut self, offered: Binding) -> io::Result<Option<Event>> {
        let question = Question::Request(&offered);
        let heard = self.exchange(question, REPLY, REQUEST, None, |heard| {
            let (answer, from) = heard?;
            classified(answer, from, Instant::now())
        });
        let heard = heard.await?;
        Ok(heard.and_then(|heard| self.turn(heard)))
    }

    /// Waits, renews, rebinds.
    async fn hold(&mut self, bound: Bound) -> io::Result<Option<Event>> {
        let declined = Arc::clone(&self.declined);
        tokio::select! {
            // Cancel-safe, both: they only wait.
            () = sleep_until(bound.renew) => self.declined_wait = REFUSED_WAIT,
            () = declined.notified() => {
                let question = Question::Decline(&bound.binding);
                let heard = |heard: Option<_>| heard.map(|_answer: (Answer, IpAddr)| ());
                self.exchange(question, REPLY, DECLINE, None, heard).await?;
                self.state = self.after_decline();
                return Ok(Some(Event::Ended));
            }
        }
        let renewals = [
            (Question::Renew(&bound.binding), bound.rebind),
            (Question::Rebind(&bound.binding), bound.ends),
        ];
        for (question, until) in renewals {
            let heard = self.exchange(question, REPLY, RENEW, Some(until), |heard| {
                let (answer, from) = heard?;
                // Another server may still have the address.
                classified(answer, from, Instant::now())
                    .filter(|heard| !matches!(heard, Heard::Denied(_) | Heard::Refused(_)))
            });
            if let Some(heard) = heard.await? {
                return Ok(self.turn(heard));
            }
        }
        Ok(Some(Event::Ended))
    }

    async fn inform(&mut self) -> io::Result<Option<Event>> {
        let pace = Pace { max: self.wait_max.unwrap_or(INFORMATION.max), ..INFORMATION };
        let heard = |heard: Option<(Answer, IpAddr)>| heard.map(|(answer, _from)| answer);
        let Some(answer) = self.exchange(Question::Information, REPLY, pace, None, heard).await?
        else {
            self.state = State::Informing;
            return Ok(None);
        };
        let refresh = answer.refresh.map(|seconds| Duration::from_secs(seconds.into()));
        self.state = State::Waiting(refresh.map_or(REFRESH, |refresh| refresh.max(REFRESH_MIN)));
        // The client expects no answer until then, and does not keep the port.
        self.socket = None;
        Ok(Some(Event::Told(servers(&answer))))
    }

    /// Goes where an answer leads to.
    fn turn(&mut self, heard: Heard) -> Option<Event> {
        match heard {
            Heard::Lease(leased) => {
                let (lease, bound) = *leased;
                self.state = State::Bound(bound);
                self.denied = None;
                self.refused_wait = REFUSED_WAIT;
                Some(Event::Leased(lease))
            }
            Heard::Withdrawn => {
                self.state = self.later();
                Some(Event::Ended)
            }
            Heard::Unknown => {
                self.state = self.later();
                None
            }
            Heard::Denied(status) => self.denied(status),
            Heard::Refused(refused) => {
                self.state = self.later();
                Some(Event::Refused(refused))
            }
        }
    }

    /// The wait after an answer without an address: each is twice the one before, until there is
    /// a lease, so that a server without a free address is not asked every ten seconds for good.
    fn later(&mut self) -> State {
        let wait = self.refused_wait;
        self.refused_wait = (wait * 2).min(self.wait_max.unwrap_or(SOLICIT.max)).max(REFUSED_WAIT);
        State::Waiting(wait)
    }

    /// The wait after an address that another machine has: each is twice the one before, until a
    /// lease lasts to its renewal.
    fn after_decline(&mut self) -> State {
        let wait = self.declined_wait;
        self.declined_wait = (wait * 2).min(SOLICIT.max);
        State::Waiting(wait)
    }

    /// A status is reported once.
    fn denied(&mut self, status: Status) -> Option<Event> {
        self.state = self.later();
        (self.denied.replace(status) != Some(status)).then_some(Event::Denied(status))
    }

    /// Sends a question until `heard` takes an answer, or until there is no time left. `heard`
    /// gets every answer with its sender, and nothing after each wait.
    async fn exchange<T>(
        &mut self,
        question: Question<'_>,
        kind: u8,
        pace: Pace,
        until: Option<Instant>,
        mut heard: impl FnMut(Option<(Answer, IpAddr)>) -> Option<T>,
    ) -> io::Result<Option<T>> {
        let socket = match &mut self.socket {
            Some(socket) => socket,
            none => none.insert(socket(&self.name)?),
        };
        let transaction: [u8; 3] = rand::random();
        let to = SocketAddrV6::new(SERVERS, SERVER_PORT, 0, self.index);
        let (begun, mut wait, mut sent) = (Instant::now(), None, 0);
        let mut buffer = [0; ANSWER_MAX];
        loop {
            if until.is_some_and(|until| Instant::now() >= until)
                || pace.count.is_some_and(|count| sent >= count)
            {
                return Ok(None);
            }
            let message = question.message(self.client, transaction, begun.elapsed());
            // The link may have no address yet: the next one is on its way then, too.
            if let Err(error) = socket.send_to(&message, to).await {
                debug!("cannot ask DHCPv6 on {}: {error}", self.name);
            }
            sent += 1;
            let next = pace.next(wait);
            wait = Some(next);
            let again = Instant::now() + next;
            let again = until.map_or(again, |until| until.min(again));
            while let Ok(received) = timeout_at(again, socket.recv_from(&mut buffer)).await {
                let (length, from) = received?;
                let bytes = buffer.get(..length).unwrap_or_default();
                let answer = match (from, Answer::read(bytes, kind, self.client, transaction)) {
                    // A server or relay of the link answers from its link-local address.
                    (SocketAddr::V6(from), Ok(answer)) if from.ip().is_unicast_link_local() => {
                        (answer, IpAddr::V6(*from.ip()))
                    }
                    (_, Ok(_)) => continue,
                    (_, Err(unusable)) => {
                        trace!("leaves out an answer of DHCPv6 on {}: {unusable}", self.name);
                        continue;
                    }
                };
                if let Some(wait_max) = answer.0.wait_max {
                    self.wait_max = Some(wait_max);
                }
                if let Some(taken) = heard(Some(answer)) {
                    return Ok(Some(taken));
                }
            }
            if let Some(taken) = heard(None) {
                return Ok(Some(taken));
            }
        }
    }
}

/// Where a reply about an address leads to; `None` if it says nothing about one.
fn classified(answer: Answer, from: IpAddr, now: Instant) -> Option<Heard> {
    let given = match answer.association {
        Association::Absent => return None,
        Association::Refused(Status::NoBinding) => return Some(Heard::Unknown),
        Association::Refused(status) => return Some(Heard::Denied(status)),
        Association::Given(given) if given.valid == 0 => return Some(Heard::Withdrawn),
        Association::Given(given) => given,
    };
    let mut lease = match Lease::check_v6(given.address, given.valid, from) {
        Ok(lease) => lease,
        Err(refused) => return Some(Heard::Refused(refused)),
    };
    let Servers { nameservers, ntp_servers } = servers(&answer);
    (lease.nameservers, lease.ntp_servers) = (nameservers, ntp_servers);
    let (renew, rebind) = times(given);
    let bound = Bound {
        binding: Binding { server: answer.server, address: given.address },
        renew: now + renew,
        rebind: now + rebind,
        ends: now + lease.lifetime,
    };
    Some(Heard::Lease(Box::new((lease, bound))))
}

/// When to renew and when to rebind: as the server says, or at the usual parts of the time for
/// which the address is preferred (RFC 8415, 14.2); never after its end.
fn times(given: Given) -> (Duration, Duration) {
    let seconds = |seconds: u32| Duration::from_secs(seconds.into());
    let (preferred, valid) = (seconds(given.preferred), seconds(given.valid));
    let base = if preferred.is_zero() { valid } else { preferred };
    let renew = if given.renew == 0 { base / 2 } else { seconds(given.renew) };
    let rebind = if given.rebind == 0 { base * 4 / 5 } else { seconds(given.rebind) };
    let rebind = rebind.max(RENEW_MIN).min(valid);
    (renew.max(RENEW_MIN).min(rebind), rebind)
}

fn servers(answer: &Answer) -> Servers {
    let all = |servers: &[Ipv6Addr]| servers.iter().copied().map(IpAddr::V6).collect();
    Servers { nameservers: all(&answer.nameservers), ntp_servers: all(&answer.ntp_servers) }
}

/// A socket of the client's port on this link alone; other links have their own.
fn socket(link: &str) -> io::Result<UdpSocket> {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = net::socket_with(AddressFamily::INET6, SocketType::DGRAM, flags, None)?;
    sockopt::set_ipv6_v6only(&socket, true)?;
    sockopt::set_socket_reuseaddr(&socket, true)?;
    net::bind(&socket, &SocketAddrV6::new(Ipv6Addr::UNSPECIFIED, CLIENT_PORT, 0, 0))?;
    let socket = UdpSocket::from_std(socket.into())?;
    socket.bind_device(Some(link.as_bytes()))?;
    Ok(socket)
}

#[cfg(test)]
mod tests;
