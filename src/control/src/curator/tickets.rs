//! The ticket: the one secret that lets machines register.
//!
//! A ticket opens nothing by itself: an operator approves each machine. The ticket keeps
//! the list of registering machines short.

use std::time::{Duration, UNIX_EPOCH};

use polis_proto::v1;
use rand::TryRng as _;
use rand::rngs::SysRng;
use sha2::{Digest as _, Sha256};
use time::OffsetDateTime;
use tracing::info;

use super::error::Error;
use super::store::{Outcome, Store, TICKET};
use polis_wire::pki;

/// Enough bytes that guessing fails.
const LENGTH: usize = 32;

/// The number of replaced tickets that are remembered, to report them as rotated, not as wrong.
const FORMER_MAX: usize = 16;

/// The limit of a lifetime: a longer one would outlast everyone now alive.
const LIFETIME_MAX: Duration = Duration::from_secs(100 * 365 * 24 * 60 * 60);

/// The change of the current ticket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TicketRequest {
    /// Show it; without a ticket, make one that does not expire.
    Read,
    /// Make a new one; the old one becomes invalid.
    Rotate {
        /// Its lifetime; `None` for a ticket that does not expire.
        lifetime: Option<Duration>,
    },
}

impl<S: pki::Store + Clone> Store<S> {
    /// The ticket that is valid; `now` in seconds since 1970.
    ///
    /// # Errors
    ///
    /// [`Error::Field`] for a lifetime beyond the limit.
    pub async fn ticket(
        &self,
        desired: TicketRequest,
        now: i64,
    ) -> Result<v1::RegisterTicket, Error> {
        let ends_at = match desired {
            TicketRequest::Read | TicketRequest::Rotate { lifetime: None } => 0,
            TicketRequest::Rotate { lifetime: Some(lifetime) } if lifetime > LIFETIME_MAX => {
                let most = LIFETIME_MAX.as_secs();
                return Err(Error::Field(format!("lifetime_seconds: allowed are 0 to {most}")));
            }
            TicketRequest::Rotate { lifetime: Some(lifetime) } => {
                now.saturating_add(i64::try_from(lifetime.as_secs()).unwrap_or(i64::MAX))
            }
        };
        let mut opaque = vec![0; LENGTH];
        SysRng.try_fill_bytes(&mut opaque).map_err(|source| {
            super::store::Error::Pki(pki::Error::Random { name: "a ticket".to_owned(), source })
        })?;
        let fresh = v1::RegisterTicket { opaque, created_at: now, ends_at, former: Vec::new() };
        let ticket = self.update(TICKET, |old: Option<v1::RegisterTicket>| {
            Ok::<_, Error>(match (old, desired) {
                (Some(old), TicketRequest::Read) => Outcome::Keep(old),
                (None, _) => Outcome::Put(fresh.clone(), Vec::new(), Vec::new()),
                (Some(old), TicketRequest::Rotate { .. }) => {
                    let fresh = v1::RegisterTicket { former: former(old), ..fresh.clone() };
                    Outcome::Put(fresh, Vec::new(), Vec::new())
                }
            })
        });
        let ticket = ticket.await?;
        if ticket.opaque == fresh.opaque {
            match end(&ticket) {
                Some(ends) => info!(%ends, "made a new register ticket"),
                None => info!("made a new register ticket, which does not end"),
            }
        }
        Ok(ticket)
    }
}

/// When a ticket ends; `None` if it does not.
fn end(ticket: &v1::RegisterTicket) -> Option<OffsetDateTime> {
    let since = u64::try_from(ticket.ends_at).ok().filter(|since| *since > 0)?;
    UNIX_EPOCH.checked_add(Duration::from_secs(since)).map(OffsetDateTime::from)
}

/// The remembered tickets up to `old`.
fn former(old: v1::RegisterTicket) -> Vec<Vec<u8>> {
    let mut former = old.former;
    former.push(Sha256::digest(&old.opaque).to_vec());
    let surplus = former.len().saturating_sub(FORMER_MAX);
    former.drain(..surplus);
    former
}

/// Whether `given` was valid before `ticket` replaced it.
pub(super) fn was_replaced(ticket: &v1::RegisterTicket, given: &[u8]) -> bool {
    let digest = Sha256::digest(given);
    ticket.former.iter().any(|former| former.as_slice() == digest.as_slice())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ticket_without_an_end_has_no_date_in_the_log() {
        let at = |ends_at| end(&v1::RegisterTicket { ends_at, ..Default::default() });
        assert_eq!((at(0), at(-1)), (None, None));
        let text = at(1_800_000_000).unwrap().to_string();
        assert!(text.starts_with("2027-01-15 8:00:00"), "{text}");
    }

    #[test]
    fn the_newest_replaced_tickets_are_remembered() {
        let mut ticket = v1::RegisterTicket::default();
        for number in 0..40_u8 {
            ticket = v1::RegisterTicket {
                former: former(ticket),
                opaque: vec![number; LENGTH],
                ..Default::default()
            };
        }
        assert_eq!(ticket.former.len(), FORMER_MAX);
        assert!(was_replaced(&ticket, &[38; LENGTH]));
        assert!(!was_replaced(&ticket, &[39; LENGTH]), "it is valid");
        assert!(!was_replaced(&ticket, &[2; LENGTH]), "too old");
    }
}
