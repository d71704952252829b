//! The return of a node whose certificate ended while it was off: asks a leader for a new one, by
//! the key of the node, and waits until an operator has approved this boot.
//!
//! ```text
//! certificate has ended, by the clock of this machine
//!    -> RegisterNode  -- [foreign] -- again and again, until an operator has approved this boot
//!    -> CommitNode       [trusted]
//!    -> authorities, certificate on the disk -> home
//! ```
//!
//! `join` asks before a node without etcd is home. A voter renews its certificate by its own etcd
//! (`membership`).
//!
//! Invariants:
//! - An outage, a TPM that does not name its keys, and a leader by whose clock the certificate has
//!   not ended delay the boot by [`PATIENCE`] at most: the node is home then, and cut off. A leader
//!   that counts the node as running is an outage, too. After any other answer of a leader the node
//!   waits without a limit.
//! - Only a certificate that works takes the place of the old one, and only authorities to which
//!   the known ones lead. The authorities are written first: after a cut between the two, the next
//!   boot asks again.
//!
//! What this module does not do: renew a certificate that has not ended (`agent`).

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use polis_proto::v1;
use tokio::time::error::Elapsed;
use tokio::time::{Instant, sleep, sleep_until, timeout_at};
use tracing::{info, warn};

use super::approval::Approval;
use super::confirm::PATIENCE;
use super::credentials;
use super::error::Refused;
use super::remote::{Failure, Remote};
use super::sealed::Sealed;
use super::service::Consensus;
use super::state::Event;
use super::unlock::sealer::Tpm;
use super::{Error, Service};
use polis_base::stage::{Stage, State};
use polis_base::sys::clock;
use polis_base::{boot, cause};
use polis_runtime::save::Save as _;
use polis_runtime::supervisor::{Context, blocking};
use polis_wire::identity::{Identity, NodeKey};
use polis_wire::pki::{self, Authorities, Facts, moment};
use polis_wire::rpc::Credentials;

/// The time between two questions, while the leader has no request of this node.
const RETRY: Duration = Duration::from_secs(5);

/// The reason of a leader by whose clock the certificate has not ended.
const NOT_ENDED: &str = "not-ended";
/// The reason of a leader that reads another field than the one that this node sends.
const FIELD: &str = "field";

impl<C: Consensus> Service<C> {
    /// Receives a new certificate if that of this node has ended. Without an answer of a leader
    /// the node goes on with the one that it has.
    pub(super) async fn return_if_ended(
        &mut self,
        ctx: &Context,
        sealed: &Sealed,
    ) -> Result<(), Error> {
        let files = self.config.root.data.node.credentials.clone();
        // The service that publishes the credentials reports those that cannot be read.
        let Ok(own) = blocking(move || credentials::read(&files)).await else { return Ok(()) };
        let Some(ends) = ended(&own) else { return Ok(()) };
        warn!(ended = moment(ends), "the certificate of this node has ended");
        match Box::pin(self.be_readmitted(ctx, sealed, &own)).await {
            Err(Error::Curator(refused)) if refused.is_removal() => {
                let node = Identity::new(sealed.node_public_key).id;
                Err(self.turned_away(ctx, node, refused, None).await)
            }
            ended => {
                ctx.stage(Stage::Cluster, State::Started);
                ended
            }
        }
    }

    async fn be_readmitted(
        &mut self,
        ctx: &Context,
        sealed: &Sealed,
        own: &Credentials,
    ) -> Result<(), Error> {
        let deadline = Instant::now() + PATIENCE;
        let Some(ends) = ended(own) else { return Ok(()) };
        let others = self.addresses(sealed).await?;
        if others.is_empty() {
            warn!("no curator is asked for a new certificate: the address of no other is known");
            return Ok(());
        }
        match timeout_at(deadline, self.address(ctx)).await {
            Ok(found) => found?,
            Err(_elapsed) => return Ok(()),
        }
        let key = NodeKey::from_pkcs8_der(&own.key).map_err(Error::Key)?;
        let curators = Remote::new(&key, sealed.trusted(), others)?;
        let sealer = self.config.unlocker(self.disk()).sealer;
        let mut approval = Approval::new(&key, None, &sealer);
        let Ok(tpm_keys) = keys_by(deadline, &self.config.tpm, &approval).await else {
            warn!("no curator is asked for a new certificate: the TPM does not name its keys");
            return Ok(());
        };
        let mut request = v1::RegisterNodeRequest {
            tpm_keys: tpm_keys.clone(),
            boot_id: boot::secret(),
            returns: true,
            certificate: own.certificate.clone(),
            ..Default::default()
        };
        let (mut nonce, mut decided) = (Vec::<u8>::new(), false);
        let mut last = cause::Last::default();
        loop {
            let gives_up = ended(own).is_none() || !decided && Instant::now() >= deadline;
            // A leader that has the request says that the certificate has ended.
            if nonce.is_empty() && gives_up {
                return Ok(());
            }
            request.external_address = self.address_now();
            let asked = Box::pin(curators.ask(|mut curator| {
                let request = request.clone();
                async move { curator.register_node(request).await }
            }));
            let asked = match decided {
                true => asked.await,
                false => match timeout_at(deadline, asked).await {
                    Ok(asked) => asked,
                    Err(_elapsed) => continue,
                },
            };
            let why = match asked {
                Ok(mut answer) => {
                    decided = true;
                    let is_another = !nonce.is_empty() && nonce != answer.nonce;
                    nonce.clone_from(&answer.nonce);
                    if is_another && tpm_keys.is_some() {
                        // Another boot asked meanwhile, and the proof of the TPM went with the
                        // request that it replaced.
                        request.tpm_keys.clone_from(&tpm_keys);
                        sleep(RETRY).await;
                        continue;
                    }
                    if approval.proves(&mut request, &mut answer).await {
                        continue;
                    }
                    if answer.state() != v1::NodeState::Up {
                        approval.wait(ctx, &self.status, &answer).await?;
                        continue;
                    }
                    self.status.happened(Event::Approved, ctx.lines(), |_trusted| {});
                    ctx.stage(Stage::Cluster, State::Started);
                    match Box::pin(self.receive(&curators, own)).await? {
                        None => return Ok(()),
                        Some(why) => why,
                    }
                }
                Err(failure) => {
                    decided = !nonce.is_empty() || decides(&failure, decided);
                    reason(failure)?
                }
            };
            if last.is_new(&why) {
                warn!(why, "this node has no new certificate yet");
            }
            let what = awaited(ends, clock::now(), &why, decided);
            ctx.stage(Stage::Cluster, State::Waiting(what));
            let next = Instant::now() + RETRY;
            sleep_until(if decided { next } else { next.min(deadline) }).await;
        }
    }

    /// Receives the certificate of an approved boot, and writes it; returns why it has none yet.
    async fn receive(&self, curators: &Remote, own: &Credentials) -> Result<Option<String>, Error> {
        let committed = curators.ask(|mut curator| {
            let request = v1::CommitNodeRequest {
                boot_id: boot::secret(),
                returns: true,
                ..Default::default()
            };
            async move { curator.commit_node(request).await }
        });
        let answer = match committed.await {
            Ok(answer) => answer,
            Err(failure) => return reason(failure).map(Some),
        };
        let authorities = match check(own, &answer, clock::now()) {
            Ok(authorities) => authorities,
            Err(why) => return Ok(Some(format!("the answer of the leader is not used: {why}"))),
        };
        let files = &self.config.root.data.node.credentials;
        files.authorities.save(authorities.to_record()).await?;
        let certificate = pki::certificate_pem(&answer.certificate);
        files.certificate.save(certificate.into_bytes()).await?;
        info!("the certificate of this node had ended and is renewed");
        Ok(None)
    }
}

/// The keys of the TPM; `None` without a TPM, and for one that names none.
///
/// # Errors
///
/// [`Elapsed`]: it has not answered by `deadline`.
async fn keys_by(
    deadline: Instant,
    tpm: &Arc<dyn Tpm>,
    approval: &Approval<'_>,
) -> Result<Option<v1::TpmKeys>, Elapsed> {
    let tpm = Arc::clone(tpm);
    let asked = async {
        match blocking(move || tpm.is_there()).await {
            true => approval.tpm_keys().await,
            false => None,
        }
    };
    timeout_at(deadline, asked).await
}

/// When the certificate of this node ended; `None` if it has not, by the clock of this machine.
fn ended(own: &Credentials) -> Option<SystemTime> {
    let facts = Facts::read(&own.certificate)?;
    (facts.not_after <= clock::now()).then_some(facts.not_after)
}

/// The authorities in an answer, if these and its certificate may take the place of `own`.
fn check(
    own: &Credentials,
    answer: &v1::CommitNodeResponse,
    now: SystemTime,
) -> Result<Authorities, &'static str> {
    let known = own.authorities.as_deref().ok_or("the CA is not known")?;
    let new = answer.authorities.clone().and_then(Authorities::from_message);
    let new = new.ok_or("the CA of the cluster cannot be read")?;
    if !new.follow(known) {
        return Err("it names a CA to which the known one does not lead");
    }
    new.check_renewed(&own.certificate, &answer.certificate, now)?;
    Ok(new)
}

/// Whether a leader has answered about this node, after this failure; `before` is the same before
/// it. A leader by whose clock the certificate has not ended may accept it, whatever another one
/// answered.
fn decides(failure: &Failure, before: bool) -> bool {
    match failure {
        Failure::Refused(refused) if refused.reason == NOT_ENDED => false,
        Failure::Refused(refused) => before || !refused.reason.is_empty(),
        Failure::Untrusted(_) | Failure::Outage(_) => before,
    }
}

/// The reason to wait.
///
/// # Errors
///
/// The answer that the cluster does not have this node.
fn reason(failure: Failure) -> Result<String, Error> {
    match failure {
        Failure::Refused(refused) if refused.is_removal() => Err(Error::Curator(refused)),
        Failure::Refused(Refused { reason, text }) if reason == FIELD => {
            Ok(format!("{text}; if the control plane is of an earlier version, update it first"))
        }
        Failure::Refused(refused) => Ok(refused.text),
        Failure::Untrusted(who) => Ok(format!("the machine at {who} is not in this cluster")),
        Failure::Outage(why) => Ok(why),
    }
}

/// The text of the wait, before an operator can approve this node.
fn awaited(ends: SystemTime, now: SystemTime, why: &str, decided: bool) -> String {
    let limit = if decided { "" } else { "; the boot goes on after a minute" };
    format!(
        "a new certificate of the cluster: that of this node ended at {}, and the clock of this \
         machine says {} ({why}); compare the clocks{limit}",
        moment(ends),
        moment(now)
    )
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::sync::mpsc;

    use polis_wire::rpc::testing::Authority;

    use super::*;
    use crate::cluster::tests::FakeTpm;
    use crate::cluster::unlock::sealer::Sealer;

    const DAY: Duration = Duration::from_secs(24 * 60 * 60);

    fn refused(reason: &str) -> Failure {
        Failure::Refused(Refused { reason: reason.to_owned(), text: "text".to_owned() })
    }

    #[test]
    fn a_clock_and_an_outage_delay_a_boot_for_a_while_and_an_answer_about_the_node_without_end() {
        let outages = [Failure::Outage("gone".to_owned()), Failure::Untrusted("x".to_owned())];
        for failure in outages.into_iter().chain([refused("")]) {
            assert!(!decides(&failure, false) && decides(&failure, true), "{failure:?}");
        }
        for before in [false, true] {
            assert!(!decides(&refused("not-ended"), before));
            for reason in ["voter", "not-approved", "not-up", "field", "known"] {
                assert!(decides(&refused(reason), before), "{reason}");
            }
        }
        let text = |decided| awaited(clock::now(), clock::now(), "why", decided);
        assert!(text(false).contains("after a minute") && !text(true).contains("after a minute"));
        assert!(text(true).contains("(why); compare the clocks"), "{}", text(true));
    }

    #[tokio::test]
    async fn a_tpm_that_hangs_delays_a_return_until_the_deadline_only() {
        let (fake, key) = (Arc::new(FakeTpm::default()), NodeKey::generate().unwrap());
        let (answer, hangs) = mpsc::channel();
        *fake.hangs.lock().unwrap() = Some(hangs);
        let tpm: Arc<dyn Tpm> = fake;
        let sealer = Sealer::new(Arc::clone(&tpm), Path::new("/nowhere"));
        let approval = Approval::new(&key, None, &sealer);
        let by = |limit| keys_by(Instant::now() + limit, &tpm, &approval);
        // Not in paused time, which does not advance while a thread hangs.
        by(Duration::from_millis(50)).await.unwrap_err();
        drop(answer);
        assert_eq!(by(Duration::from_secs(60)).await.unwrap(), None);
    }

    #[test]
    fn only_the_answer_that_the_cluster_lacks_the_node_ends_the_wait() {
        for removal in ["unknown", "decommissioned"] {
            assert!(matches!(reason(refused(removal)), Err(Error::Curator(_))), "{removal}");
        }
        for other in ["voter", "not-ended", "known", "not-approved", "attestation-policy", ""] {
            assert_eq!(reason(refused(other)).unwrap(), "text", "{other}");
        }
        assert!(reason(refused("field")).unwrap().contains("update it first"));
    }

    #[tokio::test]
    async fn only_what_follows_from_the_known_ca_takes_the_place_of_a_certificate() {
        let authority = Authority::new().await;
        let own = authority.node(1).await;
        let now = clock::now();
        let answer = |authorities: &Authorities, certificate: Vec<u8>| v1::CommitNodeResponse {
            certificate,
            authorities: Some(authorities.to_message()),
        };
        // While the node was off, the CA was rotated.
        authority.rotate(1).await;
        let rotated = authority.authorities().await;
        let new = authority.node(1).await.certificate;
        let good = answer(&rotated, new);
        assert_eq!(check(&own, &good, now).as_ref(), Ok(&*rotated));

        let stranger = Authority::new().await;
        let strangers = stranger.authorities().await;
        let strange = answer(&strangers, stranger.node(1).await.certificate);
        let leads = Err("it names a CA to which the known one does not lead");
        assert_eq!(check(&own, &strange, now), leads);
        let none = v1::CommitNodeResponse { authorities: None, ..good.clone() };
        assert_eq!(check(&own, &none, now), Err("the CA of the cluster cannot be read"));
        let other = answer(&rotated, authority.node(2).await.certificate);
        assert_eq!(check(&own, &other, now), Err("it belongs to another node"));
        let late = Err("it is already due for renewal");
        assert_eq!(check(&own, &good, now + 80 * DAY), late);
    }
}
