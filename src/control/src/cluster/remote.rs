//! The client of a cluster's curators, for a machine that is not home.
//!
//! ```text
//! key, CA, directory --> one call --> answer
//!                                |--> refused:   a curator decided; a retry does not help
//!                                |--> untrusted: the answering machine is of another cluster:
//!                                |               a newcomer has a wrong address, a member waits
//!                                +--> outage:    no decision; retried without a limit
//! ```
//!
//! Invariants:
//! - A machine whose certificate the given CA did not sign is not trusted, and receives no
//!   ticket.

use std::sync::Arc;
use std::time::Duration;

use polis_proto::v1::curator_client::CuratorClient;
use rustls::CertificateError;
use tokio::time::sleep;

use tonic::{Code, Status};
use tracing::warn;

use super::error::{Error, Refused};
use polis_base::cause;
use polis_base::stage::{self, Stage};
use polis_runtime::supervisor::Context;
use polis_wire::identity::{self, NodeKey};
use polis_wire::pki::Authorities;
use polis_wire::rpc::Credentials;
use polis_wire::rpc::REASON;
use polis_wire::rpc::client::{
    Candidate, Channel, Client, DialError, Expect, Repeat, Timeouts, Trust, dial,
};

/// The deadline of one question, which includes finding the leader.
const TIMEOUTS: Timeouts =
    Timeouts { attempt: Duration::from_secs(10), total: Duration::from_secs(15) };
/// The delay before a retry after an outage.
const RETRY_MIN: Duration = Duration::from_secs(1);
const RETRY_MAX: Duration = Duration::from_secs(15);

/// The reason why a call has no answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Failure {
    /// A curator decided.
    Refused(Refused),
    /// The answering machine has no certificate of the CA.
    Untrusted(String),
    /// No curator decided.
    Outage(String),
}

impl Failure {
    /// The text of the wait, if the error is not final.
    fn outage(self, untrusted: Untrusted) -> Result<String, Self> {
        match (self, untrusted) {
            (Self::Outage(why), _) => Ok(why),
            (Self::Untrusted(who), Untrusted::Wait) => {
                Ok(format!("the machine at {who} is not in this cluster"))
            }
            (end, _) => Err(end),
        }
    }
}

/// The reaction if only untrusted machines answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Untrusted {
    /// It has the addresses of a wrong cluster, and stops.
    End,
    /// It is a member: its cluster may return to its addresses.
    Wait,
}

/// The curators of one cluster.
#[derive(Clone, Debug)]
pub(super) struct Remote {
    client: Client,
    candidates: Vec<Candidate>,
    trust: Trust,
}

impl Remote {
    /// Calls as the holder of `key`, and trusts the certificates of `authority` and of those that
    /// followed it.
    pub(super) fn new(
        key: &NodeKey,
        authority: &[u8],
        candidates: Vec<Candidate>,
    ) -> Result<Self, Error> {
        let certificate = key.proof().map_err(Error::Key)?;
        let der = key.to_pkcs8_der().map_err(Error::Key)?;
        let known = Arc::new(Authorities::sole(authority.to_vec()));
        let trust = Trust::cluster(Arc::clone(&known));
        let credentials = Credentials { certificate, key: Arc::new(der), authorities: Some(known) };
        let client = Client::fixed(candidates.clone(), credentials, TIMEOUTS);
        Ok(Self { client, candidates, trust })
    }

    /// Asks once.
    pub(super) async fn ask<T, F, R>(&self, mut call: F) -> Result<T, Failure>
    where
        F: FnMut(CuratorClient<Channel>) -> R,
        R: Future<Output = Result<tonic::Response<T>, Status>>,
    {
        let answer = self.client.call(Repeat::Allowed, |channel| {
            let answer = call(CuratorClient::new(channel));
            async move { Ok(answer.await?.into_inner()) }
        });
        let status = match answer.await {
            Ok(answer) => return Ok(answer),
            Err(status) => status,
        };
        match classify(&status) {
            Failure::Outage(text) => Err(self.who_answers(text).await),
            failure => Err(failure),
        }
    }

    /// Retries until a curator decides, and reports meanwhile what this waits for.
    pub(super) async fn retry<T, F, R>(&self, ctx: &Context, call: F) -> Result<T, Failure>
    where
        F: FnMut(CuratorClient<Channel>) -> R,
        R: Future<Output = Result<tonic::Response<T>, Status>>,
    {
        let words = |why: &str| {
            format!(
                "a curator of the cluster: {why}; check that a control-plane node is on, and that \
                 this machine reaches one of the addresses in its node parameters"
            )
        };
        self.retry_for(ctx, Untrusted::End, words, call).await
    }

    /// The same, with another text for the wait.
    pub(super) async fn retry_for<T, F, R>(
        &self,
        ctx: &Context,
        untrusted: Untrusted,
        words: impl Fn(&str) -> String,
        mut call: F,
    ) -> Result<T, Failure>
    where
        F: FnMut(CuratorClient<Channel>) -> R,
        R: Future<Output = Result<tonic::Response<T>, Status>>,
    {
        let mut wait = RETRY_MIN;
        let mut last = cause::Last::default();
        loop {
            let why = match self.ask(&mut call).await {
                Ok(answer) => return Ok(answer),
                Err(failure) => failure.outage(untrusted)?,
            };
            if last.is_new(&why) {
                warn!(why, "no curator answers; retrying");
            }
            ctx.stage(Stage::Cluster, stage::State::Waiting(words(&why)));
            sleep(wait).await;
            wait = (wait * 2).min(RETRY_MAX);
        }
    }

    /// Separates untrusted machines from an outage: every machine that answers is
    /// untrusted, and other machines may never return.
    async fn who_answers(&self, outage: String) -> Failure {
        let mut untrusted = Vec::new();
        for candidate in &self.candidates {
            let expect = candidate.node.map_or(Expect::AnyNode, Expect::Node);
            match dial(&candidate.host, candidate.port, expect, &self.trust, None).await {
                Err(error) if is_untrusted(&error) => untrusted.push(candidate.to_string()),
                _ => return Failure::Outage(outage),
            }
        }
        match untrusted.is_empty() {
            true => Failure::Outage(outage),
            false => Failure::Untrusted(untrusted.join(", ")),
        }
    }
}

/// Whether the other end showed a certificate of another CA.
fn is_untrusted(error: &DialError) -> bool {
    let DialError::Handshake { source, .. } = error else { return false };
    let tls = source.get_ref().and_then(|source| source.downcast_ref::<rustls::Error>());
    matches!(
        tls,
        Some(rustls::Error::InvalidCertificate(
            CertificateError::UnknownIssuer | CertificateError::BadSignature
        ))
    )
}

fn classify(status: &Status) -> Failure {
    let text = status.message().to_owned();
    let reason = status.metadata().get(REASON).and_then(|reason| reason.to_str().ok());
    match (status.code(), reason) {
        // A curator that decides sends a reason; every other error is a broken connection, a
        // change of leader, or a store that does not answer.
        (
            Code::PermissionDenied
            | Code::FailedPrecondition
            | Code::InvalidArgument
            | Code::NotFound
            | Code::AlreadyExists,
            Some(reason),
        ) => Failure::Refused(Refused { reason: reason.to_owned(), text }),
        (
            Code::PermissionDenied
            | Code::Unauthenticated
            | Code::Unimplemented
            | Code::InvalidArgument,
            None,
        ) => Failure::Refused(Refused { reason: String::new(), text }),
        _ => Failure::Outage(text),
    }
}

impl From<Failure> for Error {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Refused(refused) => Self::Curator(refused),
            Failure::Untrusted(who) => Self::Untrusted { who },
            Failure::Outage(why) => Self::Unreachable(why),
        }
    }
}

/// The key by which a member asks for its half.
pub(super) fn join_key(secrets: &super::unlock::keys::Secrets) -> NodeKey {
    identity::NodeKey::from_seed(secrets.join.bytes())
}

#[cfg(test)]
mod tests {
    use tonic::metadata::MetadataValue;

    use super::*;

    fn refusal(code: Code, reason: Option<&'static str>) -> Failure {
        let mut status = Status::new(code, "text");
        if let Some(reason) = reason {
            status.metadata_mut().insert(REASON, MetadataValue::from_static(reason));
        }
        classify(&status)
    }

    #[test]
    fn the_decision_of_a_curator_differs_from_an_outage() {
        let refused = |reason: &str| {
            Failure::Refused(Refused { reason: reason.to_owned(), text: "text".to_owned() })
        };
        let outage = Failure::Outage("text".to_owned());
        assert_eq!(refusal(Code::PermissionDenied, Some("ticket-wrong")), refused("ticket-wrong"));
        assert_eq!(refusal(Code::FailedPrecondition, Some("known")), refused("known"));
        assert_eq!(refusal(Code::Unauthenticated, None), refused(""));
        assert_eq!(refusal(Code::Unavailable, Some("store")), outage);
        assert_eq!(refusal(Code::Unavailable, None), outage);
        assert_eq!(refusal(Code::DeadlineExceeded, None), outage);
        assert_eq!(refusal(Code::Internal, Some("damaged")), outage);
        assert_eq!(refusal(Code::Unknown, None), outage);
    }

    #[test]
    fn a_member_waits_for_trusted_machines_and_a_new_machine_does_not() {
        let other = || Failure::Untrusted("10.0.0.7:7835".to_owned());
        let why = other().outage(Untrusted::Wait).unwrap();
        assert!(why.contains("10.0.0.7:7835"), "{why}");
        assert_eq!(other().outage(Untrusted::End), Err(other()));
        let refused = || refusal(Code::NotFound, Some("unknown"));
        assert_eq!(refused().outage(Untrusted::Wait), Err(refused()));
        for untrusted in [Untrusted::Wait, Untrusted::End] {
            let outage = Failure::Outage("gone".to_owned());
            assert_eq!(outage.outage(untrusted), Ok("gone".to_owned()));
        }
    }
}
