//! The certificates of Kubernetes for workers: a worker need not be a member of etcd, so
//! the leader signs for it.
//!
//! The authority of Kubernetes lies beside the curator's records, in the namespace that the
//! controllers use too. The leader writes there under the lock of its term, and each write
//! requires the state that it has read.

use polis_proto::v1;

use super::Lead;
use crate::consensus::client::User;
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
        let issued = issue(&namespace, purpose, id, key).await?;
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

/// The existing certificate for this key, renewed if that is due; else a new one. The one of
/// a lost key goes on the CRL, which no API server reads: it is valid until it ends.
async fn issue<S: Store>(
    namespace: &Namespace<S>,
    purpose: WorkerPurpose,
    node: NodeId,
    key: [u8; 32],
) -> Result<Issued, pki::Error> {
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
                let authority = kubernetes_authority();
                let reason = Reason::Unspecified;
                namespace.revoke_surely(&authority, &desired.name, reason, now).await?;
            }
            Err(pki::Error::Lost { .. }) if attempts < ATTEMPTS_MAX => {}
            made => return made,
        }
    }
}

#[cfg(test)]
mod tests {
    use polis_wire::pki::memory::Memory;
    use polis_wire::pki::{Facts, signed_by};

    use super::*;

    #[tokio::test]
    async fn a_worker_keeps_its_certificate_until_it_has_another_key() {
        let node = NodeId::from_public_key(&[7; 32]);
        let namespace = Namespace::new(Memory::default(), "");
        let first = issue(&namespace, WorkerPurpose::Kubelet, node, [1; 32]).await.unwrap();
        let again = issue(&namespace, WorkerPurpose::Kubelet, node, [1; 32]).await.unwrap();
        assert_eq!(first.der, again.der);
        assert!(signed_by(&first.der, &first.issuer_der));
        let other = issue(&namespace, WorkerPurpose::Kubelet, node, [2; 32]).await.unwrap();
        assert_eq!(Facts::read(&other.der).unwrap().public_key, [2; 32]);
        assert_eq!(other.issuer_der, first.issuer_der);
    }

    #[test]
    fn a_request_without_a_purpose_is_refused() {
        assert!(matches!(purpose(v1::WorkerCertificate::Unspecified), Err(Error::Field(_))));
        assert_eq!(purpose(v1::WorkerCertificate::Dns).unwrap(), WorkerPurpose::Dns);
    }
}
