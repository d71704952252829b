//! A client of the leading curator; its calls survive a change of leader.
//!
//! The node's own services and `polisctl` call curators with it. It holds the addresses
//! of possible curators ([`Candidate`]s, an event value), asks them which node leads
//! ([`search`]), and keeps the one connection to the leader until that fails.
//!
//! ```text
//!             ask candidates, each a little later than the one before
//! [none] -----------------------------------------------------------> [leader]
//!    ^                                                                   |
//!    +-- its stream names another, a call finds it gone, or it says      |
//!        that it does not lead <-----------------------------------------+
//! ```
//!
//! Invariants:
//! - A call that may not be made twice is made again only where the refusal
//!   proves that it did nothing.
//! - A refusal is returned to the caller; only an outage is waited out.

mod channel;
mod dial;
pub mod https;
mod search;

use std::collections::BTreeSet;
use std::error::Error as _;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use polis_proto::v1;
use tokio::sync::{Mutex, watch};
use tokio::time::{Instant, sleep, timeout_at};
use tonic::{Code, Status};
use tracing::{debug, info};

pub use self::channel::Channel;
pub use self::dial::{Connection, Error as DialError, Expect, Trust, dial};
use self::search::{Follower, Search, Updates};
use super::access_list::AccessList;
use super::is_not_leader;
use super::tls::Credentials;
use crate::endpoint::{CURATOR_PORT, Endpoint};
use crate::identity::NodeId;
use polis_runtime::event::until;

/// Wait between two searches: an election takes some seconds.
const RETRY_MIN: Duration = Duration::from_millis(100);
const RETRY_MAX: Duration = Duration::from_secs(2);

/// A possible curator.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Candidate {
    /// Which node it is on, if that is known.
    pub node: Option<NodeId>,
    /// Name or address.
    pub host: String,
    /// The port.
    pub port: u16,
}

impl fmt::Display for Candidate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Endpoint { host: self.host.clone(), port: self.port }.fmt(f)
    }
}

/// The candidates of a directory; entries without a valid node ID are left out.
#[must_use]
pub fn candidates(directory: &v1::ClusterDirectory) -> Vec<Candidate> {
    let nodes = directory.nodes.iter().filter_map(|node| Some((node.id.parse().ok()?, node)));
    nodes
        .flat_map(|(id, node): (NodeId, _)| {
            node.addresses.iter().map(move |address| {
                // An unreadable address is tried all the same: so the error names it
                // when no candidate answers.
                let unread = |_invalid| Endpoint { host: address.clone(), port: CURATOR_PORT };
                let Endpoint { host, port } = address.parse().unwrap_or_else(unread);
                Candidate { node: Some(id), host, port }
            })
        })
        .collect()
}

/// Whether a call may be made twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Repeat {
    /// Twice is as once.
    Allowed,
    /// Twice is not as once.
    Never,
}

/// How long a client waits.
#[derive(Clone, Copy, Debug)]
pub struct Timeouts {
    /// For one attempt at a call that may be repeated.
    pub attempt: Duration,
    /// For all attempts together, finding the leader included.
    pub total: Duration,
}

impl Default for Timeouts {
    fn default() -> Self {
        Self { attempt: Duration::from_secs(10), total: Duration::from_secs(30) }
    }
}

/// Why the leader was not found.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The candidate list is empty.
    #[error("no curator is known")]
    NoCandidates,
    /// No candidate that was asked leads, or knows the leader.
    #[error("no leader was found: {}", listed(tried))]
    NoLeader {
        /// The candidates that were asked, and their results.
        tried: Vec<(Candidate, String)>,
    },
    /// A candidate knows the leader, and that one does not serve this caller.
    #[error("the leader at {leader} cannot be asked: {}", listed(tried))]
    LeaderUnreachable {
        /// The leader, as a candidate named it.
        leader: Candidate,
        /// The candidates that were asked, and their results.
        tried: Vec<(Candidate, String)>,
    },
    /// A curator does not serve us.
    #[error("a curator refuses: {}", .0.message())]
    Refused(Box<Status>),
}

fn listed(tried: &[(Candidate, String)]) -> String {
    let each: Vec<_> = tried.iter().map(|(who, why)| format!("{who}: {why}")).collect();
    each.join("; ")
}

impl From<Error> for Status {
    fn from(error: Error) -> Self {
        match error {
            Error::Refused(status) => *status,
            Error::NoCandidates | Error::NoLeader { .. } | Error::LeaderUnreachable { .. } => {
                Self::unavailable(error.to_string())
            }
        }
    }
}

/// The curator that leads.
#[derive(Clone, Debug)]
pub struct Leader {
    /// The way to it.
    pub connection: Connection,
    /// The digest of the CRL of the cluster's CA ([`Crl::digest`](crate::pki::Crl::digest)), as it
    /// sent it when it was found; empty: there is none.
    pub crl_digest: Vec<u8>,
    /// Announces a change of leader.
    updates: Arc<Mutex<Updates>>,
    number: u64,
}

/// Calls the leader, whichever node leads. Clones share the connection.
#[derive(Clone, Debug)]
pub struct Client {
    candidates: watch::Receiver<Vec<Candidate>>,
    credentials: watch::Receiver<Option<Credentials>>,
    /// The nodes that were removed from the cluster, where that is known.
    access_list: Option<watch::Receiver<Arc<AccessList>>>,
    timeouts: Timeouts,
    found: Arc<Mutex<Found>>,
    /// The current leader, for watchers.
    leader: watch::Sender<Option<NodeId>>,
}

#[derive(Debug, Default)]
struct Found {
    leader: Option<Leader>,
    /// Where the last leader was: the next one is often the same.
    last: Option<Candidate>,
    /// The curators that announce the next leader, while the leader is unknown.
    followers: Vec<Follower>,
    count: u64,
}

impl Client {
    /// A client that follows its inputs. It needs credentials with an authority.
    #[must_use]
    pub fn new(
        candidates: watch::Receiver<Vec<Candidate>>,
        credentials: watch::Receiver<Option<Credentials>>,
        timeouts: Timeouts,
    ) -> Self {
        let found = Arc::default();
        let leader = watch::Sender::new(None);
        Self { candidates, credentials, access_list: None, timeouts, found, leader }
    }

    /// The same client, which ignores the answers of nodes that were removed from the
    /// cluster.
    #[must_use]
    pub fn wary(self, access_list: watch::Receiver<Arc<AccessList>>) -> Self {
        Self { access_list: Some(access_list), ..self }
    }

    /// A client of a program that runs once.
    #[must_use]
    pub fn fixed(candidates: Vec<Candidate>, credentials: Credentials, timeouts: Timeouts) -> Self {
        // The last values stay readable when their senders are gone.
        let (_sender, candidates) = watch::channel(candidates);
        let (_sender, credentials) = watch::channel(Some(credentials));
        Self::new(candidates, credentials, timeouts)
    }

    /// The same client, with other time limits.
    #[must_use]
    pub fn with_timeouts(self, timeouts: Timeouts) -> Self {
        Self { timeouts, ..self }
    }

    /// Its time limits.
    #[must_use]
    pub fn timeouts(&self) -> Timeouts {
        self.timeouts
    }

    /// The leader, as far as this client knows.
    #[must_use]
    pub fn leader_id(&self) -> watch::Receiver<Option<NodeId>> {
        self.leader.subscribe()
    }

    /// Waits until the leader is another one than now, or unknown. Cancel-safe.
    pub fn another_leader(&self) -> impl Future<Output = ()> + use<> {
        another(self.leader_id())
    }

    /// Makes `call` to the leader, and again to the next where that is right.
    ///
    /// # Errors
    ///
    /// The refusal, or the last error when the time limit was reached.
    pub async fn call<T, F, R>(&self, repeat: Repeat, mut call: F) -> Result<T, Status>
    where
        F: FnMut(Channel) -> R,
        R: Future<Output = Result<T, Status>>,
    {
        let end = Instant::now() + self.timeouts.total;
        let mut wait = RETRY_MIN;
        // The last result: it explains more than a timeout does. A leader that was found
        // and failed is not *no leader*.
        let mut known = None;
        loop {
            let failed = match timeout_at(end, self.leader()).await {
                Ok(Ok(leader)) => {
                    let attempt_end = match repeat {
                        Repeat::Allowed => Instant::now() + self.timeouts.attempt,
                        // A second attempt is not allowed, so no time is reserved for
                        // one.
                        Repeat::Never => end,
                    };
                    let attempt = call(leader.connection.channel.clone());
                    let status = match timeout_at(attempt_end, attempt).await {
                        Ok(Ok(done)) => return Ok(done),
                        Ok(Err(status)) => status,
                        Err(_elapsed) => {
                            Status::deadline_exceeded("the leader does not answer in time")
                        }
                    };
                    match classify(&status, repeat) {
                        Verdict::Final => return Err(status),
                        Verdict::Retry => {
                            debug!(%status, "the call is retried");
                            self.forget(&leader).await;
                            known = Some(status.clone());
                            status
                        }
                    }
                }
                Ok(Err(refused @ Error::Refused(_))) => return Err(refused.into()),
                Ok(Err(error)) => {
                    let status = Status::from(error);
                    known = Some(status.clone());
                    status
                }
                Err(_elapsed) => known
                    .take()
                    .unwrap_or_else(|| Status::unavailable("no leader was found in time")),
            };
            if Instant::now() + wait >= end {
                return Err(failed);
            }
            sleep(wait).await;
            wait = (wait * 2).min(RETRY_MAX);
        }
    }

    /// Forgets the leader whenever its own stream announces another, without end: the
    /// next call goes to the right one at once. Cancel-safe.
    pub async fn follow(&self) -> std::convert::Infallible {
        let mut wait = RETRY_MIN;
        loop {
            match self.leader().await {
                Ok(leader) => {
                    wait = RETRY_MIN;
                    // Held for as long as it leads; only followers take it.
                    let mut updates = leader.updates.lock().await;
                    let own = leader.connection.node.to_string();
                    while let Ok(Some(reply)) = updates.message().await {
                        if reply.leader_id != own {
                            break;
                        }
                    }
                    drop(updates);
                    self.forget(&leader).await;
                }
                Err(error) => {
                    debug!("{error}");
                    sleep(wait).await;
                    wait = (wait * 2).min(RETRY_MAX);
                }
            }
        }
    }

    /// The leader, searched again if it is not known.
    ///
    /// # Errors
    ///
    /// [`Error`].
    pub async fn leader(&self) -> Result<Leader, Error> {
        // Held during the search: a concurrent call waits for the same search.
        let mut found = self.found.lock().await;
        if let Some(leader) = &found.leader {
            return Ok(leader.clone());
        }
        let mut credentials = self.credentials.clone();
        let credentials = until(&mut credentials, "the credentials", Clone::clone).await;
        let credentials = credentials.map_err(|_closed| Error::NoCandidates)?;
        let candidates = self.candidates.borrow().clone();
        let known = |last: &Candidate| {
            candidates.iter().any(|known| known.node.is_none() || known.node == last.node)
        };
        // A former leader may have stopped being a curator.
        let last = found.last.clone().filter(known);
        let mut asked = BTreeSet::new();
        let first = last.into_iter().chain(candidates);
        let first: Vec<_> = first.filter(|candidate| asked.insert(candidate.clone())).collect();
        let access_list =
            self.access_list.as_ref().map(|access_list| Arc::clone(&access_list.borrow()));
        let access_list = access_list.unwrap_or_default();
        let search = Search { credentials: &credentials, access_list: &access_list, asked };
        let leads = search.run(first, &mut found.followers).await?;
        let search::Found { connection, updates, crl_digest } = leads;
        info!(leader = %connection.node, address = %connection.address, "found the leader");
        found.count += 1;
        found.last = Some(Candidate {
            node: Some(connection.node),
            host: connection.address.ip().to_string(),
            port: connection.address.port(),
        });
        self.leader.send_replace(Some(connection.node));
        let (updates, number) = (Arc::new(Mutex::new(updates)), found.count);
        let leader = Leader { connection, crl_digest, updates, number };
        found.leader = Some(leader.clone());
        Ok(leader)
    }

    /// The leader, if it is known.
    pub async fn known_leader(&self) -> Option<Leader> {
        self.found.lock().await.leader.clone()
    }

    /// Drops a leader that no longer leads.
    async fn forget(&self, leader: &Leader) {
        let mut found = self.found.lock().await;
        if found.leader.as_ref().is_some_and(|current| current.number == leader.number) {
            found.leader = None;
            self.leader.send_replace(None);
        }
    }
}

/// The next step after a failed call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    Final,
    Retry,
}

fn classify(status: &Status, repeat: Repeat) -> Verdict {
    if is_not_leader(status) {
        return Verdict::Retry;
    }
    // A status with a source did not come from the other end: the connection failed.
    let outage = status.source().is_some()
        || matches!(status.code(), Code::Unavailable | Code::DeadlineExceeded);
    match repeat {
        Repeat::Allowed if outage && !is_refusal(status) => Verdict::Retry,
        Repeat::Allowed | Repeat::Never => Verdict::Final,
    }
}

fn is_refusal(status: &Status) -> bool {
    matches!(status.code(), Code::Unauthenticated | Code::PermissionDenied)
}

/// Waits until the leader is another one than at the call, or unknown.
fn another(mut leader: watch::Receiver<Option<NodeId>>) -> impl Future<Output = ()> {
    let now = *leader.borrow_and_update();
    async move {
        // The client lives as long as its calls.
        let _closed = leader.wait_for(|leader| *leader != now).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rpc::not_leader;

    #[tokio::test]
    async fn a_stream_ends_when_the_leader_changes_or_is_lost() {
        let id = |seed: u8| NodeId::from_public_key(&[seed; 32]);
        for next in [None, Some(id(2))] {
            let leader = watch::Sender::new(Some(id(1)));
            let ends = another(leader.subscribe());
            leader.send_replace(Some(id(1)));
            leader.send_replace(next);
            tokio::time::timeout(RETRY_MAX, ends).await.unwrap();
        }
    }

    #[test]
    fn a_call_that_did_nothing_is_made_again_and_one_that_may_have_is_not() {
        let outage = Status::unavailable("gone");
        assert_eq!(classify(&outage, Repeat::Allowed), Verdict::Retry);
        assert_eq!(classify(&outage, Repeat::Never), Verdict::Final);
        assert_eq!(classify(&not_leader(None), Repeat::Never), Verdict::Retry);
        let refusal = Status::not_found("no such node");
        assert_eq!(classify(&refusal, Repeat::Allowed), Verdict::Final);
        let broken = Status::from_error(Box::new(std::io::Error::other("reset")));
        assert_eq!(classify(&broken, Repeat::Allowed), Verdict::Retry);
        assert_eq!(classify(&broken, Repeat::Never), Verdict::Final);
    }

    #[test]
    fn a_leader_that_was_named_and_does_not_answer_is_not_no_leader() {
        let at = |host: &str| Candidate { node: None, host: host.to_owned(), port: 7835 };
        let tried = vec![
            (at("10.0.0.1"), "says that 10.0.0.2:7835 leads".to_owned()),
            (at("10.0.0.2"), "connection refused".to_owned()),
        ];
        let leader = at("10.0.0.2");
        let said = Error::LeaderUnreachable { leader, tried: tried.clone() }.to_string();
        assert!(said.starts_with("the leader at 10.0.0.2:7835 cannot be asked: "), "{said}");
        assert!(said.ends_with("10.0.0.2:7835: connection refused"), "{said}");
        assert!(Error::NoLeader { tried }.to_string().starts_with("no leader was found"));
    }

    #[test]
    fn a_directory_names_every_address_of_every_node() {
        let id = NodeId::from_public_key(&[1; 32]);
        let node = |id: String, addresses: &[&str]| v1::cluster_directory::Node {
            id,
            addresses: addresses.iter().map(|&address| address.to_owned()).collect(),
        };
        let nodes = vec![node(id.to_string(), &["10.0.0.1", "10.0.0.2"]), node("x".into(), &["y"])];
        let found = candidates(&v1::ClusterDirectory { nodes });
        let texts: Vec<_> = found.iter().map(ToString::to_string).collect();
        assert_eq!(texts, ["10.0.0.1:7835", "10.0.0.2:7835"]);
        assert!(found.iter().all(|candidate| candidate.node == Some(id)));
    }
}
