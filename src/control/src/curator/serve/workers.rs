//! The certificates of Kubernetes for workers: a worker need not be a member of etcd, so
//! the leader signs for it.
//!
//! The authority of Kubernetes lies beside the curator's records, in the namespace that the
//! controllers use too. The leader writes there under the lock of its term, and each write
//! requires the state that it has read.
//!
//! Invariants:
//! - A node changes at most [`KEYS_MAX`] keys in a row, and then one each [`KEYS_PACE`].
//! - The certificate of a key that was replaced is on the CRL.

use std::time::Duration;

use polis_proto::v1;
use tracing::warn;

use super::Lead;
use crate::consensus::client::User;
use crate::curator::budgets::Budgets;
use crate::curator::convert;
use crate::curator::error::Error;
use crate::curator::state::Refusal;
use polis_base::sys::clock;
use polis_wire::identity::NodeId;
use polis_wire::pki::{
    self, Issued, Namespace, Reason, Store, WorkerPurpose, kubernetes_authority,
};

/// Attempts while others write: another part of the same node asks at the same moment, and a
/// controller makes the authority.
const ATTEMPTS_MAX: u32 = 8;

/// The keys that a node may change in a row: four for each of its six certificates. A worker
/// changes a key only where it has lost it; a rotation changes none.
const KEYS_MAX: u32 = 24;

/// The time after which a node may change one more: each change leaves an entry on the CRL and a
/// certificate on the list of what was issued, for good.
const KEYS_PACE: Duration = Duration::from_secs(60 * 60);

impl Lead {
    /// The certificate of a worker for the key in the request.
    pub(super) async fn worker_certificate(
        &self,
        id: NodeId,
        request: v1::IssueWorkerCertificateRequest,
    ) -> Result<v1::IssueWorkerCertificateResponse, Error> {
        let purpose = purpose(request.purpose())?;
        let key = convert::key(&request.public_key, "public_key", 2)?;
        let node = self.store().node(id).await?;
        if node.state() != v1::NodeState::Up {
            return Err(Error::Refused(Refusal::NotUp));
        }
        if node.roles.as_ref().is_none_or(|roles| roles.kubernetes_worker.is_none()) {
            return Err(Error::NoWorker);
        }
        let namespace = Namespace::new(self.fenced(User::KubernetesPki)?, "");
        let budgets = budgets(&self.handlers.0.audit.budgets);
        let issued = issue(&namespace, &budgets, purpose, id, key).await?;
        // The role may have been taken away meanwhile: the certificate is then withheld.
        let after = self.store().node(id).await?;
        if after.state() != v1::NodeState::Up
            || after.roles.as_ref().is_none_or(|roles| roles.kubernetes_worker.is_none())
        {
            return Err(Error::NoWorker);
        }
        let authority = kubernetes_authority();
        let authorities = namespace.authorities(&authority).await?.ok_or_else(|| {
            pki::Error::Damaged { what: "certificate", name: authority.name.clone() }
        })?;
        Ok(v1::IssueWorkerCertificateResponse {
            certificate: issued.der,
            ca_certificate: issued.issuer_der,
            authorities: Some(authorities.to_message()),
        })
    }
}

fn purpose(purpose: v1::WorkerCertificate) -> Result<WorkerPurpose, Error> {
    match purpose {
        v1::WorkerCertificate::Kubelet => Ok(WorkerPurpose::Kubelet),
        v1::WorkerCertificate::KubeletServer => Ok(WorkerPurpose::KubeletServer),
        v1::WorkerCertificate::KubeProxy => Ok(WorkerPurpose::KubeProxy),
        v1::WorkerCertificate::Dns => Ok(WorkerPurpose::Dns),
        v1::WorkerCertificate::Csi => Ok(WorkerPurpose::Csi),
        v1::WorkerCertificate::Policy => Ok(WorkerPurpose::Policy),
        v1::WorkerCertificate::Unspecified => {
            Err(Error::Field("purpose must name a certificate of a worker".to_owned()))
        }
    }
}

/// The keys that nodes may change; counted beside their other budgets.
fn budgets(calls: &Budgets) -> Budgets {
    calls.beside("worker keys", KEYS_MAX, KEYS_PACE)
}

/// The existing certificate for this key, renewed if that is due; else a new one. The one of
/// a lost key goes on the CRL, which no API server reads: it is valid until it ends.
async fn issue<S: Store>(
    namespace: &Namespace<S>,
    budgets: &Budgets,
    purpose: WorkerPurpose,
    node: NodeId,
    key: [u8; 32],
) -> Result<Issued, Error> {
    let desired = purpose.certificate(node, key);
    let mut attempts = 0;
    loop {
        let now = clock::now();
        attempts += 1;
        let made = match namespace.current(&desired, now).await {
            Ok(Some(issued)) => return Ok(issued),
            Ok(None) => namespace.ensure(&desired, now).await,
            Err(error) => Err(error),
        };
        match made {
            Err(pki::Error::OtherKey { .. }) if attempts < ATTEMPTS_MAX => {
                // Before etcd lists what was issued.
                if !budgets.take(node, 1) {
                    return Err(exhausted());
                }
                warn!(%node, purpose = purpose.name(), "a worker has another key for a certificate");
                let authority = kubernetes_authority();
                let reason = Reason::Unspecified;
                namespace.revoke_surely(&authority, &desired.name, reason, now).await?;
            }
            Err(pki::Error::Lost { .. }) if attempts < ATTEMPTS_MAX => {}
            made => return Ok(made?),
        }
    }
}

/// The rejection of a node that has changed too many keys.
fn exhausted() -> Error {
    Error::WorkerKeys { max: KEYS_MAX, minutes: KEYS_PACE.as_secs() / 60 }
}

#[cfg(test)]
mod tests {
    use polis_wire::pki::memory::Memory;
    use polis_wire::pki::{Facts, signed_by};

    use super::*;

    fn serial(issued: &Issued) -> Vec<u8> {
        Facts::read(&issued.der).unwrap().serial
    }

    #[tokio::test]
    async fn a_worker_keeps_its_certificate_until_it_has_another_key() {
        let node = NodeId::from_public_key(&[7; 32]);
        let namespace = Namespace::new(Memory::default(), "");
        let budgets = Budgets::new(KEYS_MAX, KEYS_PACE);
        for purpose in WorkerPurpose::ALL {
            let issued = async |key| issue(&namespace, &budgets, purpose, node, key).await.unwrap();
            let first = issued([1; 32]).await;
            let again = issued([1; 32]).await;
            assert_eq!(first.der, again.der);
            assert!(signed_by(&first.der, &first.issuer_der));
            let other = issued([2; 32]).await;
            assert_eq!(Facts::read(&other.der).unwrap().public_key, [2; 32]);
            assert_eq!(other.issuer_der, first.issuer_der);
            let crl = namespace.crl(&kubernetes_authority()).await.unwrap().unwrap();
            assert!(crl.revokes(&serial(&first)) && !crl.revokes(&serial(&other)), "{purpose:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_node_changes_a_bounded_number_of_keys_and_leaves_as_many_records() {
        let id = |seed: u8| NodeId::from_public_key(&[seed; 32]);
        let memory = Memory::default();
        let namespace = Namespace::new(memory.clone(), "");
        let budgets = budgets(&Budgets::new(1, KEYS_PACE));
        let (kubelet, dns) = (WorkerPurpose::Kubelet, WorkerPurpose::Dns);
        let issued = async |purpose, seed, key: u8| {
            issue(&namespace, &budgets, purpose, id(seed), [key; 32]).await
        };
        // The first key is no change, and neither is the same one again.
        for _ in 0..2 {
            issued(kubelet, 7, 0).await.unwrap();
        }
        for key in 1..=24 {
            issued(kubelet, 7, key).await.unwrap();
        }
        let before = memory.contents();
        for key in 100..200 {
            let error = issued(kubelet, 7, key).await.unwrap_err();
            assert!(matches!(error, Error::WorkerKeys { .. }), "{error:?}");
            assert_eq!(tonic::Status::from(error).code(), tonic::Code::ResourceExhausted);
        }
        assert_eq!(memory.contents(), before, "nothing is written for a refused key");
        let records = before.keys().filter(|key| key.contains("/issued/"));
        assert_eq!(records.count(), 25);
        // Its last key is good, other certificates are, and so are other nodes.
        issued(kubelet, 7, 24).await.unwrap();
        issued(dns, 7, 1).await.unwrap();
        issued(kubelet, 8, 1).await.unwrap();
        issued(kubelet, 8, 2).await.unwrap();
        tokio::time::advance(KEYS_PACE).await;
        issued(kubelet, 7, 25).await.unwrap();
        assert!(issued(kubelet, 7, 26).await.is_err());
    }

    #[test]
    fn a_request_without_a_purpose_is_refused() {
        assert!(matches!(purpose(v1::WorkerCertificate::Unspecified), Err(Error::Field(_))));
        assert_eq!(purpose(v1::WorkerCertificate::Dns).unwrap(), WorkerPurpose::Dns);
    }
}
