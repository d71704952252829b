//! The DHCP client of one link: asks for an address for as long as it is polled.
//!
//! The protocol is `mozim`'s. It retries by itself and reports only to the log, so this
//! module watches it: a server that offered and then fell silent is left after
//! [`SELECTING_MAX`], a client without an answer is replaced after [`ASKING_MAX`], one whose
//! lease no server confirms at T2 after [`REBINDING_MAX`], and a lease is checked before it is
//! published. Whatever times a server gives, a lease is renewed after [`RENEW_MIN`] at the earliest.
//!
//! ```text
//! [asking] --acknowledged, checked--> Leased --T1: renewed--> Leased ..
//!    ^   +--acknowledged, refused---> Refused                 |    |
//!    |                                   |                    |    |
//!    +--REFUSED_WAIT---------------------+    Ended <--expired+    |
//!    +--T2: not confirmed within REBINDING_MAX---------------------+
//! ```
//!
//! What this module does not do: touch the link (`apply`), or keep a lease (`leases`).

use std::time::Duration;

use futures::stream::{self, Stream};
use mozim::{DhcpV4Client, DhcpV4Config, DhcpV4State};
use tracing::debug;

use super::lease::{Lease, Refused};
use crate::parameters::Mac;

/// How long a server may take from its offer to its acknowledgement. The first
/// repetition comes after 5 s; a server that misses two is not there.
const SELECTING_MAX: Duration = Duration::from_secs(15);

/// How long one client asks before a fresh one takes over. `mozim` doubles its
/// waits up to a minute; a fresh one starts over, so that a switch which only
/// forwards after half a minute costs the boot eight more seconds, not thirty.
pub(super) const ASKING_MAX: Duration = Duration::from_secs(20);

/// How long the servers may take to confirm a lease at T2. `mozim` drops a refusal (NAK), so that
/// a server that has taken the address back is silent for it, and it names the former server, so
/// that no other one answers. A fresh client asks all of them anew, and a server that still has
/// the lease gives the same address. Until then `leases` keeps the lease.
const REBINDING_MAX: Duration = Duration::from_secs(5);

/// The least time from a lease to its renewal. `mozim` accepts one second from a server.
pub(super) const RENEW_MIN: Duration = Duration::from_secs(5);

/// Wait after an answer that was refused: the next will most likely be the same.
const REFUSED_WAIT: Duration = Duration::from_secs(10);

/// Wait after a failure of the client itself, for example without a socket.
const FAILED_WAIT: Duration = Duration::from_secs(2);

/// The event.
#[derive(Debug)]
pub(super) enum Event {
    /// A lease is new, or it was renewed.
    Leased(Lease),
    /// A server answered, and the answer cannot be used.
    Refused(Refused),
    /// The lease is over.
    Ended,
    /// The client cannot work; it is tried again.
    Failed(mozim::DhcpError),
}

struct Client {
    name: String,
    index: u32,
    mac: Mac,
    client: Option<DhcpV4Client>,
    leased: bool,
    wait: Option<Duration>,
}

/// Asks on a link; dropping the stream ends it.
pub(super) fn ask(index: u32, name: String, mac: Mac) -> impl Stream<Item = Event> + Send {
    let client = Client { name, index, mac, client: None, leased: false, wait: None };
    stream::unfold(client, |mut client| async {
        let event = client.next().await;
        Some((event, client))
    })
}

impl Client {
    async fn next(&mut self) -> Event {
        if let Some(wait) = self.wait.take() {
            tokio::time::sleep(wait).await;
        }
        let mut limit = (!self.leased).then_some(ASKING_MAX);
        loop {
            let client = match &mut self.client {
                Some(client) => client,
                none => match start(&self.name, self.index, self.mac).await {
                    Ok(client) => none.insert(client),
                    Err(error) => return self.failed(error),
                },
            };
            let state = match limit {
                None => client.run().await,
                Some(max) => match tokio::time::timeout(max, client.run()).await {
                    Ok(state) => state,
                    Err(_elapsed) => {
                        debug!("no DHCP server on {} answers: a fresh client asks", self.name);
                        self.client = None;
                        // `leases` keeps the lease to its end.
                        self.leased = false;
                        limit = Some(ASKING_MAX);
                        continue;
                    }
                },
            };
            match state {
                Err(error) => return self.failed(error),
                Ok(DhcpV4State::Done(offer)) => match Lease::check(&offer) {
                    Ok(lease) => {
                        self.leased = true;
                        self.wait = Some(RENEW_MIN);
                        return Event::Leased(lease);
                    }
                    Err(refused) => return self.refused(refused),
                },
                Ok(DhcpV4State::InitReboot) if self.leased => {
                    self.leased = false;
                    return Event::Ended;
                }
                Ok(state) => limit = state_max(&state),
            }
        }
    }

    /// A fresh client asks all servers, with its own limit, also where this was a renewal.
    fn refused(&mut self, refused: Refused) -> Event {
        self.client = None;
        // `leases` keeps the lease to its end.
        self.leased = false;
        self.wait = Some(REFUSED_WAIT);
        Event::Refused(refused)
    }

    fn failed(&mut self, error: mozim::DhcpError) -> Event {
        self.client = None;
        // `leases` keeps the lease to its end.
        self.leased = false;
        self.wait = Some(FAILED_WAIT);
        Event::Failed(error)
    }
}

/// How long a client may stay in this state; `None`: it works to the clock of its lease.
fn state_max(state: &DhcpV4State) -> Option<Duration> {
    match state {
        DhcpV4State::InitReboot => Some(ASKING_MAX),
        DhcpV4State::Selecting => Some(SELECTING_MAX),
        DhcpV4State::Rebinding => Some(REBINDING_MAX),
        DhcpV4State::Done(_) | DhcpV4State::Renewing => None,
    }
}

async fn start(name: &str, index: u32, mac: Mac) -> Result<DhcpV4Client, mozim::DhcpError> {
    let mut config = DhcpV4Config::new(name);
    config.set_iface_index(index).set_iface_mac_raw(&mac.0)?.use_mac_as_client_id();
    DhcpV4Client::init(config, None).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn after_a_renewal_that_cannot_be_used_a_fresh_client_asks_with_a_limit() {
        let (name, mac) = ("eth0".to_owned(), Mac([2, 0, 0, 0, 0, 1]));
        let mut client = Client { name, index: 2, mac, client: None, leased: true, wait: None };
        let refused = Refused::Lifetime(Duration::from_secs(10));
        assert!(matches!(client.refused(refused), Event::Refused(_)));
        // A client with a lease has no limit.
        assert!(!client.leased);
        assert_eq!(client.wait, Some(REFUSED_WAIT));
    }
}
