//! The search for the leader.
//!
//! ```text
//! candidate --dialled, asked--> leads: found
//!                               refuses, or no answer: noted
//!                               does not lead: [follower] --its stream--> it leads: found
//!                                                                         it names another: asked
//! ```
//!
//! A curator that does not lead announces the next leader on the stream of its answer. So it is
//! kept, for the next search too: while there is no leader, each caller has one connection to a
//! curator, and not one for each search. A handshake costs more than any other call, and in an
//! election every node and every operator searches.
//!
//! Invariants:
//! - The leader is a node that the candidates name, or that one of these points to; any
//!   curator of the cluster, only for a candidate without a node ID.
//! - Each of them proves by its certificate that it is a curator: every node has the CA's
//!   signature, and one that was stolen could pretend to lead.
//! - A curator that refuses and does not lead may use an old copy of the records: the other
//!   candidates are asked first.
//! - No follower is trusted for longer than [`FRESH`]: a machine that lost its power ends no
//!   stream.

use std::collections::BTreeSet;
use std::future::poll_fn;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use futures::StreamExt as _;
use futures::stream::FuturesUnordered;
use polis_proto::v1;
use polis_proto::v1::curator_local_client::CuratorLocalClient;
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tonic::{Status, Streaming};

use super::{Candidate, Connection, DialError, Error, Expect, Trust, dial, is_refusal};
use crate::endpoint::CURATOR_PORT;
use crate::rpc::access_list::{AccessList, Fallen, is_removal};
use crate::rpc::tls::Credentials;
use polis_base::cause;

/// The delay between one candidate and the next: a live one has answered by then.
const STAGGER: Duration = Duration::from_millis(250);
/// Longest wait for a curator's first answer.
const ANSWER: Duration = Duration::from_secs(4);
/// Longest wait for the other candidates once one has refused and the last of them was
/// asked: a removed caller should learn of its removal from the remaining curators.
const OTHERS: Duration = Duration::from_secs(2);
/// Longest wait for an announcement once every candidate was asked. The caller searches again,
/// and asks those that did not answer.
const ANNOUNCEMENT: Duration = Duration::from_secs(2);
/// Longest time between the dialling of a follower and its last use.
const FRESH: Duration = Duration::from_secs(15);

/// Announces each change of leader.
pub(super) type Updates = Streaming<v1::GetCurrentLeaderResponse>;

/// A curator that does not lead.
#[derive(Debug)]
pub(super) struct Follower {
    candidate: Candidate,
    connection: Connection,
    updates: Updates,
    dialled: Instant,
    /// The leader that it named last.
    names: Option<Candidate>,
}

/// The curator that leads.
#[derive(Debug)]
pub(super) struct Found {
    pub(super) connection: Connection,
    pub(super) updates: Updates,
    /// The digest of the CRL that it has; empty: it has none.
    pub(super) crl_digest: Vec<u8>,
}

/// The answer of a curator about the leader.
#[derive(Debug, PartialEq, Eq)]
enum Says {
    /// It leads.
    Leads,
    /// Another does.
    Names(Candidate),
    /// It knows none.
    Nothing,
}

/// The answer of a candidate.
enum Answer {
    /// It leads.
    Leads(Box<Found>),
    /// It does not.
    Follows(Box<Follower>),
    /// It cannot help; the reason goes into the list.
    Nothing(String),
    /// It rejects this caller.
    Refused(Box<Status>),
}

/// The part of a search that is the same for all candidates.
#[derive(Clone, Debug)]
pub(super) struct Search<'a> {
    pub(super) credentials: &'a Credentials,
    pub(super) access_list: &'a AccessList,
    /// The candidates that were asked, or will be.
    pub(super) asked: BTreeSet<Candidate>,
}

impl Search<'_> {
    /// Asks `first` until one leads. `followers` are those of the last search; they are kept for
    /// the next one if this one fails.
    pub(super) async fn run(
        self,
        mut first: Vec<Candidate>,
        followers: &mut Vec<Follower>,
    ) -> Result<Found, Error> {
        if first.is_empty() {
            return Err(Error::NoCandidates);
        }
        let Self { credentials, access_list, mut asked } = self;
        followers.retain(|follower| {
            let Follower { candidate, connection, dialled, .. } = follower;
            let is_gone = access_list.is_gone(connection.node, &connection.certificate);
            dialled.elapsed() < FRESH && first.contains(candidate) && !is_gone
        });
        first.retain(|who| !followers.iter().any(|follower| follower.candidate == *who));
        let ask_later = |candidate: Candidate, delay: Duration| async move {
            sleep(delay).await;
            let answer = ask(&candidate, credentials, access_list).await;
            (candidate, answer)
        };
        let last = u32::try_from(first.len().saturating_sub(1)).unwrap_or(u32::MAX);
        let asked_by = Instant::now() + STAGGER * last;
        let mut asking: FuturesUnordered<_> =
            (0_u32..).zip(first).map(|(n, who)| ask_later(who, STAGGER * n)).collect();
        for leader in followers.iter().filter_map(|follower| follower.names.clone()) {
            if asked.insert(leader.clone()) {
                asking.push(ask_later(leader, Duration::ZERO));
            }
        }
        let mut tried = Vec::new();
        let mut refusal: Option<(Box<Status>, Instant)> = None;
        // When the last candidate had answered.
        let mut all_asked = None;
        loop {
            if asking.is_empty() && (refusal.is_some() || followers.is_empty()) {
                break;
            }
            let end = match &refusal {
                Some((_, end)) => Some(*end),
                None if asking.is_empty() => {
                    Some(*all_asked.get_or_insert_with(Instant::now) + ANNOUNCEMENT)
                }
                None => None,
            };
            let (candidate, answer) = tokio::select! {
                // Cancel-safe: an answer is taken whole or not at all.
                Some(answered) = asking.next() => answered,
                // Cancel-safe: as is an announcement.
                (follower, said) = announcement(followers) => {
                    let who = follower.candidate.clone();
                    match said {
                        Some(Ok(reply)) => (who, follower.answer(&reply)),
                        // Its connection has ended; the next search dials it again.
                        Some(Err(status)) => (who, Answer::Nothing(cause::line(&status))),
                        None => (who, Answer::Nothing("it has ended the stream".to_owned())),
                    }
                }
                // Cancel-safe: only waits.
                () = sleep_until(end.unwrap_or_else(Instant::now)), if end.is_some() => break,
            };
            match answer {
                Answer::Leads(found) => {
                    followers.clear();
                    return Ok(*found);
                }
                Answer::Refused(status) => {
                    // A removal is final; every other refusal may come from an old copy.
                    let heard = refusal.take();
                    let anew = || Instant::now().max(asked_by) + OTHERS;
                    let end = heard.as_ref().map_or_else(anew, |(_, end)| *end);
                    let before = heard.map(|(before, _)| before);
                    let before = before.filter(|before| is_removal(before) || !is_removal(&status));
                    refusal = Some((before.unwrap_or(status), end));
                }
                Answer::Follows(follower) => {
                    if let Some(leader) = &follower.names
                        && asked.insert(leader.clone())
                    {
                        asking.push(ask_later(leader.clone(), Duration::ZERO));
                        all_asked = None;
                    }
                    followers.push(*follower);
                }
                Answer::Nothing(why) => tried.push((candidate, why)),
            }
        }
        let named = followers.iter().rev().find_map(|follower| follower.names.clone());
        tried.extend(followers.iter().map(Follower::tried));
        match (refusal, named) {
            (Some((status, _)), _) => Err(Error::Refused(status)),
            (None, Some(leader)) => Err(Error::LeaderUnreachable { leader, tried }),
            (None, None) => Err(Error::NoLeader { tried }),
        }
    }
}

impl Follower {
    /// The answer that follows from what it said.
    fn answer(mut self, reply: &v1::GetCurrentLeaderResponse) -> Answer {
        self.names = match says(reply, &self.connection.node.to_string()) {
            Says::Leads => {
                let Self { connection, updates, .. } = self;
                let crl_digest = reply.crl_digest.clone();
                return Answer::Leads(Box::new(Found { connection, updates, crl_digest }));
            }
            Says::Names(leader) => Some(leader),
            Says::Nothing => None,
        };
        Answer::Follows(Box::new(self))
    }

    /// For the list of those that did not help.
    fn tried(&self) -> (Candidate, String) {
        let why = match &self.names {
            Some(leader) => format!("reports {leader} as the leader"),
            None => "it knows no leader".to_owned(),
        };
        (self.candidate.clone(), why)
    }
}

/// Removes the next follower whose stream has something to say, or has ended; waits without end
/// while there is none. Cancel-safe.
async fn announcement(
    followers: &mut Vec<Follower>,
) -> (Follower, Option<Result<v1::GetCurrentLeaderResponse, Status>>) {
    poll_fn(|cx| {
        for at in 0..followers.len() {
            if let Poll::Ready(said) = followers[at].updates.poll_next_unpin(cx) {
                return Poll::Ready((followers.swap_remove(at), said));
            }
        }
        Poll::Pending
    })
    .await
}

/// Asks one candidate for the leader.
async fn ask(candidate: &Candidate, credentials: &Credentials, access_list: &AccessList) -> Answer {
    let Some(authorities) = &credentials.authorities else {
        return Answer::Nothing("the cluster's CA is not known".to_owned());
    };
    let (authorities, serials) = (Arc::clone(authorities), Arc::clone(&access_list.serials));
    let trust = Trust::Cluster { authorities, revoked: serials };
    let expect = Expect::Curator(candidate.node);
    let dialled = dial(&candidate.host, candidate.port, expect, &trust, Some(credentials));
    let connection = match dialled.await {
        Ok(connection) => connection,
        // Until the handshake is over, the other end is unauthenticated, and may send
        // anything; the verdict on our own certificate comes after.
        Err(error @ DialError::Protocol { .. }) if is_revoked(&error) => {
            return Answer::Refused(Box::new(revoked()));
        }
        Err(error) => return Answer::Nothing(cause::line(&error)),
    };
    if access_list.removed.contains(&connection.node) {
        return Answer::Nothing("it was removed from the cluster".to_owned());
    }
    let mut local = CuratorLocalClient::new(connection.channel.clone());
    let first = async {
        let mut updates =
            local.get_current_leader(v1::GetCurrentLeaderRequest {}).await?.into_inner();
        Ok::<_, Status>((updates.message().await?, updates))
    };
    let (reply, updates) = match timeout(ANSWER, first).await {
        Ok(Ok((Some(reply), updates))) => (reply, updates),
        Ok(Ok((None, _))) => return Answer::Nothing("it ends the stream at once".to_owned()),
        Ok(Err(status)) if is_refusal(&status) => return Answer::Refused(Box::new(status)),
        Ok(Err(status)) if is_revoked(&status) => return Answer::Refused(Box::new(revoked())),
        Ok(Err(status)) => return Answer::Nothing(cause::line(&status)),
        Err(_elapsed) => return Answer::Nothing("it does not report the leader".to_owned()),
    };
    let (candidate, dialled) = (candidate.clone(), Instant::now());
    Follower { candidate, connection, updates, dialled, names: None }.answer(&reply)
}

/// The answer of the curator `own` about the leader.
fn says(reply: &v1::GetCurrentLeaderResponse, own: &str) -> Says {
    if reply.leader_id == own {
        return Says::Leads;
    }
    let port = u16::try_from(reply.leader_port).ok().filter(|port| *port > 0);
    match reply.leader_id.parse() {
        Ok(node) if !reply.leader_address.is_empty() => Says::Names(Candidate {
            node: Some(node),
            host: reply.leader_address.clone(),
            port: port.unwrap_or(CURATOR_PORT),
        }),
        Ok(_) | Err(_) => Says::Nothing,
    }
}

/// Whether the other end rejects our certificate as revoked, by an alert of TLS.
/// It counts only after the handshake: see [`ask`].
fn is_revoked(error: &(dyn std::error::Error + 'static)) -> bool {
    let alert = rustls::AlertDescription::CertificateRevoked;
    let alert = rustls::Error::AlertReceived(alert).to_string();
    // By its text: the library between keeps nothing else of an error of the socket. A
    // message that the other end sends does not match.
    let is_alert = |error: &(dyn std::error::Error + 'static)| {
        error.downcast_ref::<std::io::Error>().is_some_and(|error| error.to_string() == alert)
    };
    let mut cause = Some(error);
    while let Some(error) = cause {
        if is_alert(error) {
            return true;
        }
        cause = error.source();
    }
    false
}

fn revoked() -> Status {
    Fallen::Revoked("this caller".to_owned()).into()
}
