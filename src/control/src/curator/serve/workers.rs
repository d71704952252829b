//! The certificates of Kubernetes for workers: a worker need not be a member of etcd, so
//! the leader signs for it.
//!
//! The authority of Kubernetes lies beside the curator's records, in the namespace that the
//! controllers use too. The leader writes there under the lock of its term, and each write
//! requires the state that it has read.
//!
//! Pods verify kubelet by the authority of Kubernetes and the address that they dial, so the
//! certificate of its server names the node's address. A node reports that address itself, and an
//! intruder on a worker could report that of a controller: see [`address_of`].
//!
//! Invariants:
//! - A node changes at most [`KEYS_MAX`] keys and addresses in a row, and then one each
//!   [`KEYS_PACE`].
//! - The certificate of a key that was replaced is on the CRL.
//! - A certificate names no address that another member reports, and none from which the node did
//!   not call.

use std::net::IpAddr;
use std::time::Duration;

use polis_proto::v1;
use tracing::warn;

use super::Lead;
use crate::consensus::client::User;
use crate::curator::budgets::Budgets;
use crate::curator::convert;
use crate::curator::error::Error;
use crate::curator::pod_network::{check_address, networks};
use crate::curator::state::Refusal;
use polis_base::sys::clock;
use polis_wire::identity::NodeId;
use polis_wire::pki::{
    self, Issued, Namespace, Reason, Store, WorkerPurpose, kubernetes_authority,
};
use polis_wire::pod_network::Networks;

/// Attempts while others write: another part of the same node asks at the same moment, and a
/// controller makes the authority.
const ATTEMPTS_MAX: u32 = 8;

/// The keys and addresses that a node may change in a row: four for each of its six certificates.
/// A worker changes a key only where it has lost it; a rotation changes none.
const KEYS_MAX: u32 = 24;

/// The time after which a node may change one more: each change leaves an entry on the CRL and a
/// certificate on the list of what was issued, for some days.
const KEYS_PACE: Duration = Duration::from_secs(60 * 60);

impl Lead {
    /// The certificate of a worker for the key in the request; `from` is the address of the caller.
    pub(super) async fn worker_certificate(
        &self,
        id: NodeId,
        from: Option<IpAddr>,
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
        let address = match purpose == WorkerPurpose::KubeletServer {
            true => self.address_of(id, &node, from).await,
            false => None,
        };
        let issued = issue(&namespace, &budgets, purpose, (id, address), key).await?;
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

    /// The address that the certificate of a node may name, by the present records.
    async fn address_of(
        &self,
        id: NodeId,
        node: &v1::Node,
        from: Option<IpAddr>,
    ) -> Option<IpAddr> {
        // The leader's own node calls from this machine, and proves no other address.
        let from = match from? {
            from if from.is_loopback() && id == self.handlers.0.node => reported(node)?,
            from => from,
        };
        // The node asks again within the hour.
        let directory = self.current().await.ok()?;
        let directory = directory.borrow();
        let networks = networks(directory.configuration()).ok()?;
        let others = directory.nodes().filter(|(other, _)| *other != id);
        address_of(node, from, networks, others.map(|(_, known)| &*known.node))
    }
}

/// The address that others reach a node by, as it reports it.
fn reported(node: &v1::Node) -> Option<IpAddr> {
    node.status.as_ref()?.external_address.parse().ok()
}

/// The address that the certificate of a node may name: the one in its record, which is that of
/// its Node object, if the node has called `from` it and no other member reports it.
///
/// The connection of a call shows that the node receives what is sent to an address. That alone is
/// not a proof on a network whose machines can take each other's addresses, or behind a router that
/// hides several, so an address that another member reports is rejected. So are loopback and the
/// addresses of pods and Services: clients reach API servers there.
fn address_of<'a>(
    node: &v1::Node,
    from: IpAddr,
    networks: Networks,
    mut others: impl Iterator<Item = &'a v1::Node>,
) -> Option<IpAddr> {
    let own = reported(node)?;
    let fits = from == own && !own.is_loopback() && check_address(node, networks).is_ok();
    let taken = others.any(|other| is_member(other) && has(other, own));
    (fits && !taken).then_some(own)
}

/// Whether a node is in the cluster, or was approved: before, any machine may report anything.
fn is_member(node: &v1::Node) -> bool {
    matches!(node.state(), v1::NodeState::Standby | v1::NodeState::Up)
}

/// Whether a node reports `address` as one of its own.
fn has(node: &v1::Node, address: IpAddr) -> bool {
    node.status.as_ref().is_some_and(|status| {
        let all = std::iter::once(&status.external_address).chain(&status.other_addresses);
        all.filter_map(|text| text.parse::<IpAddr>().ok()).any(|its| its == address)
    })
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

/// The keys and addresses that nodes may change; counted beside their other budgets.
fn budgets(calls: &Budgets) -> Budgets {
    calls.beside("worker keys", KEYS_MAX, KEYS_PACE)
}

/// The existing certificate for this key, renewed if that is due, or if the node has another
/// address by now; else a new one. The one of a lost key goes on the CRL, which no API server
/// reads: it is valid until it ends.
async fn issue<S: Store>(
    namespace: &Namespace<S>,
    budgets: &Budgets,
    purpose: WorkerPurpose,
    (node, address): (NodeId, Option<IpAddr>),
    key: [u8; 32],
) -> Result<Issued, Error> {
    let mut desired = purpose.certificate(node, address, key);
    let lacks_host = match address {
        Some(_) => namespace.lacks_host(&desired).await,
        // The name alone never changes.
        None => Ok(false),
    };
    let lacks_host = match lacks_host {
        Err(pki::Error::OtherKey { .. }) => false,
        lacks_host => lacks_host?,
    };
    // A node that has changed too much keeps what it has.
    if lacks_host && !budgets.take(node, 1) {
        desired = purpose.certificate(node, None, key);
    }
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
            let issued =
                async |key| issue(&namespace, &budgets, purpose, (node, None), key).await.unwrap();
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
            issue(&namespace, &budgets, purpose, (id(seed), None), [key; 32]).await
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

    fn at(address: &str) -> v1::Node {
        let status = v1::NodeStatus { external_address: address.to_owned(), ..Default::default() };
        v1::Node { state: v1::NodeState::Up.into(), status: Some(status), ..Default::default() }
    }

    #[test]
    fn a_node_speaks_for_the_address_that_it_reports_and_calls_from_and_for_no_other() {
        let networks = Networks::default();
        let of = |node: &str, from: &str, others: &[v1::Node]| {
            let address = address_of(&at(node), from.parse().unwrap(), networks, others.iter());
            address.map(|address| address.to_string())
        };
        let own = Some("192.0.2.7".to_owned());
        let controllers = [at("192.0.2.1")];
        assert_eq!(of("192.0.2.7", "192.0.2.7", &controllers), own);
        // It reports the address of a controller, calls from there, or both.
        assert_eq!(of("192.0.2.1", "192.0.2.7", &controllers), None);
        assert_eq!(of("192.0.2.7", "192.0.2.1", &controllers), None);
        assert_eq!(of("192.0.2.1", "192.0.2.1", &controllers), None);
        let mut second = at("192.0.2.1");
        second.status.as_mut().unwrap().other_addresses = vec!["192.0.2.7".to_owned()];
        assert_eq!(of("192.0.2.7", "192.0.2.7", &[second]), None, "another one of a controller");
        // Machines that were not approved, or were removed, take no address from a member.
        for state in [v1::NodeState::New, v1::NodeState::Decommissioned] {
            let other = v1::Node { state: state.into(), ..at("192.0.2.7") };
            assert_eq!(of("192.0.2.7", "192.0.2.7", &[other]), own, "{state:?}");
        }
        let approved = v1::Node { state: v1::NodeState::Standby.into(), ..at("192.0.2.7") };
        assert_eq!(of("192.0.2.7", "192.0.2.7", &[approved]), None);
        // Those of an API server on loopback and of its Service, IPv6, and none.
        let service = networks.first_service().to_string();
        for other in ["127.0.0.1", service.as_str(), "2001:db8::7"] {
            assert_eq!(of(other, other, &[]), None, "{other}");
        }
        assert_eq!(of("", "192.0.2.7", &[]), None);
    }

    #[tokio::test(start_paused = true)]
    async fn a_node_with_another_address_has_another_certificate_within_its_budget() {
        let node = NodeId::from_public_key(&[7; 32]);
        let memory = Memory::default();
        let namespace = Namespace::new(memory.clone(), "");
        let budgets = budgets(&Budgets::new(1, KEYS_PACE));
        let issued = async |address: Option<u8>| {
            let address = address.map(|last| IpAddr::from([192, 0, 2, last]));
            let of = (node, address);
            let purpose = WorkerPurpose::KubeletServer;
            issue(&namespace, &budgets, purpose, of, [1; 32]).await.unwrap().der
        };
        let first = issued(None).await;
        let second = issued(Some(0)).await;
        assert_ne!(second, first);
        assert_eq!(Facts::read(&second).unwrap().public_key, [1; 32]);
        assert_eq!(issued(Some(0)).await, second);
        assert_eq!(issued(None).await, second, "a call by another way takes nothing from it");
        let mut last = second;
        for address in 1..24 {
            let next = issued(Some(address)).await;
            assert_ne!(next, last, "{address}");
            last = next;
        }
        let before = memory.contents();
        for address in 100..200 {
            assert_eq!(issued(Some(address)).await, last, "{address}");
        }
        assert_eq!(memory.contents(), before, "nothing is written beyond the budget");
        tokio::time::advance(KEYS_PACE).await;
        assert_ne!(issued(Some(24)).await, last);
    }

    #[test]
    fn a_request_without_a_purpose_is_refused() {
        assert!(matches!(purpose(v1::WorkerCertificate::Unspecified), Err(Error::Field(_))));
        assert_eq!(purpose(v1::WorkerCertificate::Dns).unwrap(), WorkerPurpose::Dns);
    }
}
