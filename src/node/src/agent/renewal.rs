//! The renewal of this node's certificate, after two thirds of its life, or once another CA signs.
//!
//! ```text
//! [valid] --two thirds, or another CA--> ask the leader --checked, written--> [valid]
//!                                          ^      | refused, or no leader
//!                                          +------+ RETRY
//! ```
//!
//! Invariants:
//! - A certificate that works is replaced by one that works: for the same key and
//!   name, from the same CA, and not ended.
//! - It is on the disk before it is used.

use std::time::{Duration, SystemTime};

use polis_proto::v1;
use polis_proto::v1::curator_client::CuratorClient;
use tokio::time::sleep;
use tracing::{info, warn};

use super::Service;
use polis_base::cause;
use polis_base::sys::clock;
use polis_runtime::event::{Closed, until};
use polis_runtime::save::Save as _;
use polis_runtime::supervisor::Context;
use polis_wire::pki::{self, Facts};
use polis_wire::rpc::Credentials;
use polis_wire::rpc::client::Repeat;

/// Longest sleep: the clock may be set meanwhile.
const POLL_INTERVAL: Duration = Duration::from_secs(60 * 60);
/// Between two attempts; there is a month for them.
const RETRY: Duration = Duration::from_secs(60);

/// Why the certificate stays as it is.
#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("the leader issued no new certificate")]
    Refused(#[source] tonic::Status),
    #[error("the leader issued an unusable certificate: {0}")]
    Unfit(&'static str),
    #[error("cannot write the new certificate")]
    Write(#[source] polis_base::files::Error),
}

/// Renews until cancelled.
pub(super) async fn run(service: Service, ctx: Context) -> Result<(), Closed> {
    let mut credentials = service.outputs.credentials.subscribe();
    let mut failed = cause::Last::default();
    ctx.healthy();
    loop {
        let work = async {
            let own = until(&mut credentials, "the credentials", Clone::clone).await?;
            let wait = match wait(&own, clock::now()) {
                Some(Duration::ZERO) => match renew(&service, &own).await {
                    Ok(()) => {
                        failed.clear();
                        return Ok(());
                    }
                    Err(error) => {
                        let error = cause::line(&error);
                        if failed.is_new(&error) {
                            warn!(error, "the certificate of this node was not renewed");
                        }
                        RETRY
                    }
                },
                Some(wait) => wait.min(POLL_INTERVAL),
                None => POLL_INTERVAL,
            };
            tokio::select! {
                // Cancel-safe: only waits.
                () = sleep(wait) => Ok(()),
                // Cancel-safe: waits for an event value.
                changed = credentials.changed() => {
                    changed.map_err(|_closed| Closed("the credentials"))
                }
            }
        };
        match ctx.until_cancelled(work).await {
            Some(done) => done?,
            None => return Ok(()),
        }
    }
}

/// How long the certificate is good enough; `None` if it cannot be read.
fn wait(own: &Credentials, now: SystemTime) -> Option<Duration> {
    let facts = Facts::read(&own.certificate)?;
    let signed = own.authorities.as_ref().is_none_or(|known| known.signed(&own.certificate));
    if facts.renewal_due(now) || !signed {
        return Some(Duration::ZERO);
    }
    Some(facts.renew_at().duration_since(now).unwrap_or_default())
}

async fn renew(service: &Service, own: &Credentials) -> Result<(), Error> {
    let call = |channel| async {
        let request = v1::IssueCertificateRequest {};
        CuratorClient::new(channel).issue_certificate(request).await
    };
    let issued = service.client.call(Repeat::Allowed, call).await.map_err(Error::Refused)?;
    let certificate = issued.into_inner().certificate;
    check(own, &certificate, clock::now()).map_err(Error::Unfit)?;
    let pem = pki::certificate_pem(&certificate).into_bytes();
    service.config.certificate.save(pem).await.map_err(Error::Write)?;
    service.outputs.credentials.send_modify(|known| {
        if let Some(known) = known {
            known.certificate = certificate;
        }
    });
    info!("the certificate of this node is renewed");
    Ok(())
}

/// Whether `new` may take the place of the certificate in `own`.
fn check(own: &Credentials, new: &[u8], now: SystemTime) -> Result<(), &'static str> {
    let authorities = own.authorities.as_ref().ok_or("the CA is not known")?;
    authorities.check_renewed(&own.certificate, new, now)
}

#[cfg(test)]
mod tests {
    use super::*;
    use polis_wire::pki::Template;
    use polis_wire::rpc::testing::{Authority, node_id};

    const DAY: Duration = Duration::from_secs(24 * 60 * 60);

    #[tokio::test]
    async fn a_certificate_is_renewed_after_two_thirds_of_its_life() {
        let own = Authority::new().await.node(1).await;
        let now = clock::now();
        assert!(wait(&own, now).unwrap() > 50 * DAY);
        assert_eq!(wait(&own, now + 61 * DAY), Some(Duration::ZERO));
        let noise = Credentials { certificate: b"noise".to_vec(), ..own };
        assert_eq!(wait(&noise, now), None);
    }

    #[tokio::test]
    async fn a_certificate_of_a_former_ca_is_renewed_at_once() {
        let authority = Authority::new().await;
        let own = authority.node(1).await;
        authority.rotate(1).await;
        let own = Credentials { authorities: Some(authority.authorities().await), ..own };
        let now = clock::now();
        assert_eq!(wait(&own, now), Some(Duration::ZERO));
        assert_eq!(check(&own, &own.certificate, now), Err("the cluster's CA has not signed it"));
        let new = authority.node(1).await.certificate;
        assert_eq!(check(&own, &new, now), Ok(()));
        let renewed = Credentials { certificate: new, ..own };
        assert!(wait(&renewed, now).unwrap() > 50 * DAY);
    }

    #[tokio::test]
    async fn only_a_certificate_that_works_takes_the_place_of_another() {
        let authority = Authority::new().await;
        let own = authority.node(1).await;
        let now = clock::now();
        assert_eq!(check(&own, &own.certificate, now), Ok(()));
        let name = node_id(1).to_string();
        let foreign = Authority::new().await.node(1).await;
        let other = authority.node(2).await;
        let renamed = authority.sign(&format!("{name}x"), Template::Node, 1, now).await;
        for (bad, why) in [
            (&foreign.certificate[..], "the cluster's CA has not signed it"),
            (&other.certificate, "it belongs to another node"),
            (&renamed.certificate, "it belongs to another node"),
            (b"noise", "it cannot be read"),
        ] {
            assert_eq!(check(&own, bad, now), Err(why));
        }
        let late = check(&own, &own.certificate, now + 80 * DAY);
        assert_eq!(late, Err("it is already due for renewal"));
    }
}
