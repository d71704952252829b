//! The messages of DHCPv6 (RFC 8415) that a client writes, and the ones that it reads.
//!
//! ```text
//! kind: 1 byte | transaction: 3 bytes | option: number, length, both 2 bytes; value | option ..
//! ```
//!
//! Anyone on the link can send an answer, so it is read as if an enemy wrote it: a length that
//! points past the end, a wrong transaction or another client's identity makes the whole answer
//! unusable; an option that the node does not know is skipped.
//!
//! Invariants:
//! - An [`Answer`] is to the question with this transaction and this client.
//! - Reading keeps at most [`SERVERS_MAX`] servers of each kind, and [`ID_MAX`] bytes of an ID.
//!
//! What this module does not do: decide whether an address may be used (`lease`), or wait
//! (`dhcpv6`).

use std::net::Ipv6Addr;
use std::time::Duration;

use super::super::lease::{SERVERS_MAX, is_host_v6};
use crate::parameters::Mac;

/// Kinds of messages (RFC 8415, 7.3).
const SOLICIT: u8 = 1;
pub(super) const ADVERTISE: u8 = 2;
const REQUEST: u8 = 3;
const RENEW: u8 = 5;
const REBIND: u8 = 6;
pub(super) const REPLY: u8 = 7;
const DECLINE: u8 = 9;
const INFORMATION_REQUEST: u8 = 11;

/// Options (RFC 8415, 21; RFC 3646, 4075 and 5908 for the servers).
const CLIENT_ID: u16 = 1;
const SERVER_ID: u16 = 2;
const IA_NA: u16 = 3;
const ADDRESS: u16 = 5;
const REQUESTED: u16 = 6;
const PREFERENCE: u16 = 7;
const ELAPSED: u16 = 8;
const STATUS: u16 = 13;
const NAME_SERVERS: u16 = 23;
const SNTP_SERVERS: u16 = 31;
const REFRESH: u16 = 32;
const NTP_SERVERS: u16 = 56;
const SOLICIT_WAIT_MAX: u16 = 82;
const INFORMATION_WAIT_MAX: u16 = 83;

/// An NTP server by its address (RFC 5908, 4.1).
const NTP_ADDRESS: u16 = 1;

/// Status codes (RFC 8415, 21.13).
const SUCCESS: u16 = 0;
const NO_ADDRESSES: u16 = 2;
const NO_BINDING: u16 = 3;

/// An ID of the kind "hardware address", of Ethernet (RFC 8415, 11.4).
const LINK_LAYER_ETHERNET: [u8; 4] = [0, 3, 0, 1];

/// The longest ID of a client or a server (RFC 8415, 11.1): a number and 128 bytes.
const ID_MAX: usize = 130;

/// Options of one message that are read; real answers have ten.
const OPTIONS_MAX: usize = 64;

/// The bounds of option 82 (RFC 8415, 21.24), in seconds.
const WAIT_MAX: std::ops::RangeInclusive<u32> = 60..=86_400;

/// The longest of these that is kept: the usual one of RFC 8415. Any machine of the link can answer
/// once, and a day later the client would still not know that a server is there.
const WAIT_KEPT_MAX: u32 = 3_600;

/// The identity of a client: of a link, and the same at each boot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) struct Client {
    /// The hardware address of the link.
    pub(in super::super) mac: Mac,
    /// Tells links with one hardware address apart: the ID of a VLAN, else zero.
    pub(in super::super) association: u32,
}

impl Client {
    fn id(self) -> Vec<u8> {
        [&LINK_LAYER_ETHERNET[..], &self.mac.0].concat()
    }
}

/// The address that a server offers or has given.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Binding {
    /// The server's ID.
    pub(super) server: Vec<u8>,
    pub(super) address: Ipv6Addr,
}

/// A question.
#[derive(Clone, Copy, Debug)]
pub(super) enum Question<'a> {
    /// Which server has an address?
    Solicit,
    /// The address that this server offered.
    Request(&'a Binding),
    /// Longer, from the server that gave it.
    Renew(&'a Binding),
    /// Longer, from any server.
    Rebind(&'a Binding),
    /// Another machine has it.
    Decline(&'a Binding),
    /// Servers of names and time alone.
    Information,
}

impl Question<'_> {
    /// The message. `elapsed` is the time since its first transmission.
    pub(super) fn message(
        self,
        client: Client,
        transaction: [u8; 3],
        elapsed: Duration,
    ) -> Vec<u8> {
        let kind = match self {
            Self::Solicit => SOLICIT,
            Self::Request(_) => REQUEST,
            Self::Renew(_) => RENEW,
            Self::Rebind(_) => REBIND,
            Self::Decline(_) => DECLINE,
            Self::Information => INFORMATION_REQUEST,
        };
        let mut message = vec![kind];
        message.extend(transaction);
        put(&mut message, CLIENT_ID, &client.id());
        if let Self::Request(with) | Self::Renew(with) | Self::Decline(with) = self {
            put(&mut message, SERVER_ID, &with.server);
        }
        let hundredths = u16::try_from(elapsed.as_millis() / 10).unwrap_or(u16::MAX);
        put(&mut message, ELAPSED, &hundredths.to_be_bytes());
        let servers = [NAME_SERVERS, NTP_SERVERS, SNTP_SERVERS];
        let more: &[u16] = match self {
            Self::Information => &[REFRESH, INFORMATION_WAIT_MAX],
            _ => &[SOLICIT_WAIT_MAX],
        };
        if !matches!(self, Self::Decline(_)) {
            let options = servers.iter().chain(more).flat_map(|option| option.to_be_bytes());
            put(&mut message, REQUESTED, &options.collect::<Vec<_>>());
        }
        let wanted = match self {
            Self::Information => return message,
            Self::Solicit => None,
            Self::Request(with) | Self::Renew(with) | Self::Rebind(with) | Self::Decline(with) => {
                Some(with.address)
            }
        };
        // The times are the server's to say.
        let mut association = client.association.to_be_bytes().to_vec();
        association.extend([0; 8]);
        if let Some(address) = wanted {
            let value = [&address.octets()[..], &[0; 8]].concat();
            put(&mut association, ADDRESS, &value);
        }
        put(&mut message, IA_NA, &association);
        message
    }
}

fn put(message: &mut Vec<u8>, option: u16, value: &[u8]) {
    // No value of this module is longer than `ID_MAX`.
    let length = u16::try_from(value.len()).unwrap_or(u16::MAX);
    message.extend(option.to_be_bytes());
    message.extend(length.to_be_bytes());
    message.extend(value);
}

/// Why an answer is not one to the question.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Unusable {
    #[error("it is cut off")]
    Short,
    #[error("it has more than {OPTIONS_MAX} options")]
    Options,
    #[error("it is another message")]
    Kind,
    #[error("it is for another question")]
    Transaction,
    #[error("it is for another client")]
    Client,
    #[error("it has no ID of a server, or a longer one than {ID_MAX} bytes")]
    Server,
}

/// An answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Answer {
    /// The server's ID.
    pub(super) server: Vec<u8>,
    /// Of several answers, the one with the highest counts.
    pub(super) preference: u8,
    pub(super) association: Association,
    /// Best first.
    pub(super) nameservers: Vec<Ipv6Addr>,
    pub(super) ntp_servers: Vec<Ipv6Addr>,
    /// After how long servers are asked for again, in seconds.
    pub(super) refresh: Option<u32>,
    /// The longest wait between two questions.
    pub(super) wait_max: Option<Duration>,
}

/// The part of an answer about the client's address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Association {
    /// The answer has none, or one that makes no sense.
    Absent,
    /// The server gives none to this client, with this status.
    Refused(Status),
    Given(Given),
}

/// Why a server gives no address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(in super::super) enum Status {
    /// It has none left.
    #[error("it has no address for this node (NoAddrsAvail)")]
    NoAddresses,
    /// It does not know the client: after a loss of its records.
    #[error("it does not know the lease of this node (NoBinding)")]
    NoBinding,
    /// Another one.
    #[error("it refuses, with status {0}")]
    Other(u16),
}

/// An address with its times, in seconds; [`u32::MAX`] means without end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Given {
    pub(super) address: Ipv6Addr,
    pub(super) preferred: u32,
    /// Zero: the address must not be used any more.
    pub(super) valid: u32,
    /// When to renew and when to rebind; zero: the client chooses.
    pub(super) renew: u32,
    pub(super) rebind: u32,
}

impl Answer {
    /// Reads a message of this kind.
    pub(super) fn read(
        bytes: &[u8],
        kind: u8,
        client: Client,
        transaction: [u8; 3],
    ) -> Result<Self, Unusable> {
        let (head, options) = bytes.split_first_chunk::<4>().ok_or(Unusable::Short)?;
        if head[0] != kind {
            return Err(Unusable::Kind);
        }
        if head[1..] != transaction {
            return Err(Unusable::Transaction);
        }
        let mut answer = Self {
            server: Vec::new(),
            preference: 0,
            association: Association::Absent,
            nameservers: Vec::new(),
            ntp_servers: Vec::new(),
            refresh: None,
            wait_max: None,
        };
        let (mut for_us, mut refused) = (false, None);
        for option in Options::of(options) {
            let (number, value) = option?;
            match number {
                CLIENT_ID => for_us = value == client.id(),
                SERVER_ID if (1..=ID_MAX).contains(&value.len()) => {
                    answer.server = value.to_vec();
                }
                PREFERENCE => answer.preference = value.first().copied().unwrap_or_default(),
                STATUS => refused = status(value),
                IA_NA => {
                    if let Some(found) = association(value, client.association)? {
                        answer.association = found;
                    }
                }
                NAME_SERVERS => add(&mut answer.nameservers, value),
                SNTP_SERVERS => add(&mut answer.ntp_servers, value),
                NTP_SERVERS => {
                    for server in Options::of(value) {
                        let (kind, value) = server?;
                        if kind == NTP_ADDRESS {
                            add(&mut answer.ntp_servers, value);
                        }
                    }
                }
                REFRESH => answer.refresh = number_of(value),
                SOLICIT_WAIT_MAX | INFORMATION_WAIT_MAX => {
                    let seconds = number_of(value).filter(|seconds| WAIT_MAX.contains(seconds));
                    let kept = seconds.map(|seconds| seconds.min(WAIT_KEPT_MAX));
                    answer.wait_max = kept.map(|seconds| Duration::from_secs(seconds.into()));
                }
                _ => {}
            }
        }
        if !for_us {
            return Err(Unusable::Client);
        }
        if answer.server.is_empty() {
            return Err(Unusable::Server);
        }
        if let Some(status) = refused {
            answer.association = Association::Refused(status);
        }
        Ok(answer)
    }
}

/// The options of a message or of an option.
struct Options<'a> {
    rest: &'a [u8],
    left: usize,
}

impl<'a> Options<'a> {
    fn of(bytes: &'a [u8]) -> Self {
        Self { rest: bytes, left: OPTIONS_MAX }
    }
}

impl<'a> Iterator for Options<'a> {
    type Item = Result<(u16, &'a [u8]), Unusable>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.rest.is_empty() {
            return None;
        }
        let rest = std::mem::take(&mut self.rest);
        let Some(left) = self.left.checked_sub(1) else { return Some(Err(Unusable::Options)) };
        self.left = left;
        let Some((&[a, b, c, d], rest)) = rest.split_first_chunk() else {
            return Some(Err(Unusable::Short));
        };
        let length = usize::from(u16::from_be_bytes([c, d]));
        let Some((value, rest)) = rest.split_at_checked(length) else {
            return Some(Err(Unusable::Short));
        };
        self.rest = rest;
        Some(Ok((u16::from_be_bytes([a, b]), value)))
    }
}

/// The part about the address of this client; `None` if it is for another link of the client.
fn association(value: &[u8], of: u32) -> Result<Option<Association>, Unusable> {
    let (head, options) = value.split_first_chunk::<12>().ok_or(Unusable::Short)?;
    let number = |at: usize| number_of(&head[at..at + 4]).unwrap_or_default();
    if number(0) != of {
        return Ok(None);
    }
    let (renew, rebind) = (number(4), number(8));
    // The server confused the two (RFC 8415, 21.4).
    if renew > rebind && rebind != 0 {
        return Ok(Some(Association::Absent));
    }
    let mut given = None;
    for option in Options::of(options) {
        match option? {
            (STATUS, value) => {
                if let Some(status) = status(value) {
                    return Ok(Some(Association::Refused(status)));
                }
            }
            (ADDRESS, value) => {
                // The former address, with no time left, may come before the new one.
                let next = address(value, renew, rebind)?;
                given = match (given, next) {
                    (Some(Given { valid: 0, .. }) | None, Some(next)) => Some(next),
                    (given, _) => given,
                };
            }
            _ => {}
        }
    }
    Ok(Some(given.map_or(Association::Absent, Association::Given)))
}

fn address(value: &[u8], renew: u32, rebind: u32) -> Result<Option<Given>, Unusable> {
    let (address, rest) = value.split_first_chunk::<16>().ok_or(Unusable::Short)?;
    let (times, options) = rest.split_first_chunk::<8>().ok_or(Unusable::Short)?;
    let number = |at: usize| number_of(&times[at..at + 4]).unwrap_or_default();
    let (preferred, valid) = (number(0), number(4));
    for option in Options::of(options) {
        if let (STATUS, value) = option?
            && status(value).is_some()
        {
            return Ok(None);
        }
    }
    let given = Given { address: Ipv6Addr::from(*address), preferred, valid, renew, rebind };
    Ok((preferred <= valid).then_some(given))
}

/// A status other than success.
fn status(value: &[u8]) -> Option<Status> {
    let code = u16::from_be_bytes(*value.first_chunk()?);
    match code {
        SUCCESS => None,
        NO_ADDRESSES => Some(Status::NoAddresses),
        NO_BINDING => Some(Status::NoBinding),
        other => Some(Status::Other(other)),
    }
}

/// Adds the addresses of a list that hosts can have.
fn add(servers: &mut Vec<Ipv6Addr>, value: &[u8]) {
    let (addresses, _rest) = value.as_chunks::<16>();
    for server in addresses.iter().map(|octets| Ipv6Addr::from(*octets)) {
        if servers.len() < SERVERS_MAX && is_host_v6(server) && !servers.contains(&server) {
            servers.push(server);
        }
    }
}

fn number_of(value: &[u8]) -> Option<u32> {
    value.first_chunk().map(|bytes| u32::from_be_bytes(*bytes))
}

#[cfg(test)]
#[path = "message_tests.rs"]
mod tests;
