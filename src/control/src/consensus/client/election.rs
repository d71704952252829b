//! Leases, and elections that are held with them.
//!
//! Lease numbers are global to etcd, so only the name of an election is prefixed; the key
//! of a leader comes back absolute and is passed on unchanged.

use std::time::Duration;

use etcd_client::{LeaderKey, ProclaimOptions, ResignOptions};
use tokio::time::Instant;
use tokio::time::error::Elapsed;

use super::{Client, Error, call};

const KEEP: &str = "keep a lease";

/// The delay before a broken connection is made again.
const KEEP_RETRY: Duration = Duration::from_millis(100);

/// A lease: keys written under it are deleted when it is not kept alive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lease {
    id: i64,
    ttl: Duration,
}

impl Lease {
    /// etcd's number for the lease.
    #[must_use]
    pub fn id(&self) -> i64 {
        self.id
    }
}

/// A won election.
#[derive(Clone, Debug)]
pub struct Leadership(LeaderKey);

/// Equal if they come from the same election win.
impl PartialEq for Leadership {
    fn eq(&self, other: &Self) -> bool {
        self.lock() == other.lock()
    }
}

impl Eq for Leadership {}

impl Leadership {
    /// The revision at which the lock came to be.
    #[must_use]
    pub fn revision(&self) -> i64 {
        self.0.rev()
    }

    /// The absolute key of the lock, and the revision it came to be at.
    pub(super) fn lock(&self) -> (Vec<u8>, i64) {
        (self.0.key().to_vec(), self.0.rev())
    }
}

impl Client {
    /// Takes a lease of `ttl`, in whole seconds.
    ///
    /// # Errors
    ///
    /// [`Error::retriable`] says whether it makes sense to try again.
    pub async fn lease(&self, ttl: Duration) -> Result<Lease, Error> {
        let seconds = i64::try_from(ttl.as_secs().max(1)).unwrap_or(i64::MAX);
        let mut leases = self.etcd.lease_client();
        let granted = call("take a lease", leases.grant(seconds, None)).await?;
        Ok(Lease { id: granted.id(), ttl })
    }

    /// Keeps a lease for as long as it is polled; ends when the lease is lost, and at the
    /// latest when it may be lost: a time to live after the last request that was answered.
    /// Until then, it makes a broken connection again.
    ///
    /// A member passes such a request on to the leader of etcd, and waits for one that has just
    /// died for seconds. So a request that is not answered soon is made again, beside the first:
    /// the lease outlives an election, which renews it, too.
    pub async fn keep(&self, lease: &Lease) -> Error {
        let mut ends = Instant::now() + lease.ttl;
        loop {
            let Err(error) = self.keep_while_connected(lease, &mut ends).await else { continue };
            if !matches!(error, Error::Unreachable { .. }) || Instant::now() + KEEP_RETRY >= ends {
                return error;
            }
            tokio::time::sleep(KEEP_RETRY).await;
        }
    }

    /// Ends without an error where another connection was answered before this one.
    async fn keep_while_connected(&self, lease: &Lease, ends: &mut Instant) -> Result<(), Error> {
        let broken = |source| Error::new(KEEP, source);
        let late = |_elapsed| Error::Timeout { what: KEEP };
        let mut leases = self.etcd.lease_client();
        let begun = self.or_beside(lease, ends, leases.keep_alive(lease.id)).await;
        let Some(begun) = begun else { return Ok(()) };
        let (mut keeper, mut answers) = begun.map_err(late)?.map_err(broken)?;
        loop {
            let asked = Instant::now();
            let answered = async {
                keeper.keep_alive().await?;
                answers.message().await
            };
            let Some(answer) = self.or_beside(lease, ends, answered).await else { return Ok(()) };
            match answer.map_err(late)?.map_err(broken)? {
                Some(answer) if answer.ttl() > 0 => *ends = asked + lease.ttl,
                // A time to live of zero: etcd does not know the lease any more.
                Some(_) | None => return Err(Error::Ended { what: "the lease" }),
            }
            // Three chances before the lease ends.
            tokio::time::sleep(lease.ttl / 3).await;
        }
    }

    /// Waits for `answer` until the lease ends. `None` where another connection was answered
    /// before: the lease then lives on from that.
    async fn or_beside<T>(
        &self,
        lease: &Lease,
        ends: &mut Instant,
        answer: impl Future<Output = T>,
    ) -> Option<Result<T, Elapsed>> {
        tokio::select! {
            // Cancel-safe, both: a renewal may be repeated.
            answer = tokio::time::timeout_at(*ends, answer) => Some(answer),
            asked = self.renew_beside(lease) => {
                *ends = asked + lease.ttl;
                None
            }
        }
    }

    /// Renews a lease on connections of its own, which each have a sixth of its life, from that
    /// time on; returns when the one that was answered was asked.
    async fn renew_beside(&self, lease: &Lease) -> Instant {
        let chance = lease.ttl / 6;
        tokio::time::sleep(chance).await;
        loop {
            let asked = Instant::now();
            // The first answer says that the lease lives, or is an error.
            let mut leases = self.etcd.lease_client();
            match tokio::time::timeout(chance, leases.keep_alive(lease.id)).await {
                Ok(Ok(_streams)) => return asked,
                Ok(Err(_)) => tokio::time::sleep(KEEP_RETRY).await,
                Err(_elapsed) => {}
            }
        }
    }

    /// Ends the lease of this number, which any run may have taken: cleans up after an
    /// earlier run of the same owner. A missing lease is not an error.
    ///
    /// # Errors
    ///
    /// [`Error::retriable`] says whether it makes sense to try again.
    pub async fn release_by_id(&self, id: i64) -> Result<(), Error> {
        let mut leases = self.etcd.lease_client();
        match call("end a lease", leases.revoke(id)).await {
            Err(error) if !error.says("requested lease not found") => Err(error),
            Ok(_) | Err(_) => Ok(()),
        }
    }

    /// Gives a lease back: every key written under it is deleted at once.
    ///
    /// # Errors
    ///
    /// [`Error::retriable`] says whether it makes sense to try again.
    pub async fn release(&self, lease: &Lease) -> Result<(), Error> {
        let mut leases = self.etcd.lease_client();
        call("give back a lease", leases.revoke(lease.id)).await.map(drop)
    }

    /// Waits until this candidate leads `election`. `value` is what the others see.
    ///
    /// # Errors
    ///
    /// [`Error::retriable`] says whether it makes sense to try again.
    pub async fn campaign(
        &self,
        election: &str,
        value: impl Into<Vec<u8>> + Send,
        lease: &Lease,
    ) -> Result<Leadership, Error> {
        let what = "campaign";
        let mut elections = self.etcd.election_client();
        // Waits while another candidate leads: no deadline.
        let won = elections.campaign(self.outer(election), value, lease.id).await;
        let mut won = won.map_err(|error| Error::new(what, error))?;
        won.take_leader().map(Leadership).ok_or(Error::Ended { what: "the election" })
    }

    /// The value that the leader of `election` campaigned with; `None` without a leader.
    ///
    /// # Errors
    ///
    /// [`Error::retriable`] says whether it makes sense to try again.
    pub async fn leader(&self, election: &str) -> Result<Option<Vec<u8>>, Error> {
        let mut elections = self.etcd.election_client();
        match call("read the leader", elections.leader(self.outer(election))).await {
            Ok(found) => Ok(found.kv().map(|kv| kv.value().to_vec())),
            Err(error) if error.says("election: no leader") => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Changes what the others see of a leadership.
    ///
    /// # Errors
    ///
    /// [`Error::retriable`] says whether it makes sense to try again; the
    /// leadership may be lost.
    pub async fn proclaim(
        &self,
        leadership: &Leadership,
        value: impl Into<Vec<u8>> + Send,
    ) -> Result<(), Error> {
        let options = ProclaimOptions::new().with_leader(leadership.0.clone());
        let mut elections = self.etcd.election_client();
        call("proclaim", elections.proclaim(value, Some(options))).await.map(drop)
    }

    /// Gives a leadership up; the next candidate leads at once.
    ///
    /// # Errors
    ///
    /// [`Error::retriable`] says whether it makes sense to try again.
    pub async fn resign(&self, leadership: Leadership) -> Result<(), Error> {
        let options = ResignOptions::new().with_leader(leadership.0);
        let mut elections = self.etcd.election_client();
        call("resign", elections.resign(Some(options))).await.map(drop)
    }
}
