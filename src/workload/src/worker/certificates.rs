//! The certificates and files of a worker: keys made on this node, certificates from the
//! leader.
//!
//! A worker need not be a member of etcd, and one that is asks the leader too, so there is
//! one way.
//!
//! ```text
//! key on the node --public half--> leader: role? --signed--> beside the key
//!        ^                                                       |
//!        +-- every hour, when an owner rotates the authorities, and when the record of the node
//!            has another address: kept if still good
//! ```
//!
//! A certificate of a worker lives for three days, and the leader renews it after two thirds, when
//! another authority signs, and when kubelet serves at another address. The bridges of a rotation
//! follow each certificate.
//! Without a leader the parts go on with what is on the disk, also behind a boot.
//!
//! Invariants:
//! - A certificate is written only if it belongs to the key beside it and the authority has
//!   signed it.
//! - A file is replaced whole, and only by other content.

use std::sync::Arc;
use std::time::Duration;

use polis_proto::v1;
use polis_proto::v1::curator_client::CuratorClient;
use tokio::sync::watch;
use tracing::{info, warn};

use super::configuration::{self, pair};
use crate::certificates::{
    Error as FilesError, Trusted, look, own_key, publish, replace, until_another_look,
};
use crate::configuration::kubeconfig;
use crate::parts::{Part, PartState, Parts};
use crate::site::Site;
use polis_base::cause;
use polis_base::files;
use polis_base::sys::clock;
use polis_runtime::event::{Closed, until};
use polis_runtime::supervisor::{Context, blocking};
use polis_wire::identity::NodeId;
use polis_wire::node_roles::Nodes;
use polis_wire::pki::{self, Authorities, Facts, WorkerPurpose};
use polis_wire::rpc::Credentials;
use polis_wire::rpc::client::{Client, Repeat};

/// After a failed attempt: a leader may just be elected.
const RETRY: Duration = Duration::from_secs(5);

/// Why a worker has no certificates.
#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("the leader issued no certificate for {purpose}")]
    Refused { purpose: &'static str, source: Box<tonic::Status> },
    #[error("the leader issued an unusable certificate for {purpose}: {why}")]
    Unfit { purpose: &'static str, why: &'static str },
    #[error(transparent)]
    Files(#[from] FilesError),
}

impl From<files::Error> for Error {
    fn from(error: files::Error) -> Self {
        Self::Files(error.into())
    }
}

/// Runs until cancelled.
#[derive(Clone, Debug)]
pub(super) struct Service {
    pub(super) site: Site,
    pub(super) node: NodeId,
    pub(super) client: Client,
    /// The node's own, which change when the authorities of the cluster do.
    pub(super) credentials: watch::Receiver<Option<Credentials>>,
    /// The records of nodes, as the leader has them.
    pub(super) nodes: watch::Receiver<Option<Arc<Nodes>>>,
    pub(super) look: Duration,
    /// The authorities in the file that programs read.
    pub(super) trusted: watch::Sender<Trusted>,
    pub(super) parts: Parts,
}

impl Service {
    pub(super) async fn run(mut self, ctx: Context) -> Result<(), std::convert::Infallible> {
        let part = Part::WorkerCertificates;
        let service = self.clone();
        // The parts start beside the first look: without a leader, it takes its whole patience.
        if blocking(move || service.write_configuration().is_ok() && service.usable()).await {
            publish(&self.trusted, self.site.run.worker_ca.clone()).await;
            self.parts.set(part, PartState::Ready);
        }
        let mut failed = cause::Last::default();
        loop {
            let known = address(self.nodes.borrow().as_deref(), self.node);
            // Boxed: a call to the leader is large, and rare.
            let Some(done) = ctx.until_cancelled(Box::pin(self.pass())).await else {
                return Ok(());
            };
            publish(&self.trusted, self.site.run.worker_ca.clone()).await;
            let wait = match done {
                Ok(wait) => {
                    ctx.healthy();
                    failed.clear();
                    self.parts.set(part, PartState::Ready);
                    wait
                }
                Err(error) => {
                    if failed.is_new(&cause::line(&error)) {
                        let error = &error as &dyn std::error::Error;
                        warn!(error, every = ?RETRY, "trying again until it succeeds");
                    }
                    let service = self.clone();
                    if blocking(move || service.usable()).await {
                        self.parts.set(part, PartState::Ready);
                    } else {
                        self.parts.fail(part, cause::line(&error));
                    }
                    RETRY
                }
            };
            let (nodes, node) = (&mut self.nodes, self.node);
            let look = until_another_look(wait, &mut self.credentials);
            let wait = async {
                tokio::select! {
                    // Cancel-safe, both: they wait for a time and for event values.
                    () = look => {}
                    Ok(()) = until_another_address(nodes, node, known) => {}
                }
            };
            if ctx.until_cancelled(wait).await.is_none() {
                return Ok(());
            }
        }
    }

    /// Asks for every certificate; returns how long to wait before the next look.
    async fn pass(&self) -> Result<Duration, Error> {
        let service = self.clone();
        blocking(move || service.write_configuration()).await?;
        // One that the leader refuses, as a leader of an earlier version may, keeps no other
        // part from its own.
        let (mut known, mut failed) = (Vec::new(), None);
        for purpose in WorkerPurpose::ALL {
            match self.certificate(purpose).await {
                Ok(authorities) => known.push(authorities),
                Err(error) => drop(failed.get_or_insert(error)),
            }
        }
        if let Some(error) = failed {
            return Err(error);
        }
        // A rotation that began meanwhile: the first ones are of the former authority.
        let same = known.windows(2).all(|pair| pair[0] == pair[1]);
        Ok(if same { look(&known, self.look) } else { RETRY })
    }

    /// Asks for one certificate, and writes it; returns the authorities that the leader tells.
    async fn certificate(&self, purpose: WorkerPurpose) -> Result<Authorities, Error> {
        let pair = pair(&self.site.data, purpose);
        let key = blocking({
            let pair = pair.clone();
            move || own_key(&pair)
        })
        .await?;
        let public = key.verifying_key().to_bytes();
        let call = |channel| async move {
            let request = v1::IssueWorkerCertificateRequest {
                purpose: asked(purpose).into(),
                public_key: public.to_vec(),
            };
            CuratorClient::new(channel).issue_worker_certificate(request).await
        };
        let issued = self.client.call(Repeat::Allowed, call).await.map_err(|source| {
            Error::Refused { purpose: purpose.name(), source: Box::new(source) }
        })?;
        let issued = issued.into_inner();
        let unfit = |why| Error::Unfit { purpose: purpose.name(), why };
        let authorities = match issued.authorities {
            Some(told) => Authorities::from_message(told).ok_or("its authorities are unreadable"),
            // A leader of an earlier version rotates none of Kubernetes.
            None => Ok(Authorities::sole(issued.ca_certificate)),
        };
        let authorities = authorities.map_err(unfit)?;
        check(&issued.certificate, &authorities.signing, public).map_err(unfit)?;
        let site = self.site.clone();
        let (trusted, chain) =
            (authorities.trusted_pem(), authorities.chain_pem(&issued.certificate));
        let new = blocking(move || {
            replace(&site.data.last_ca(), &trusted)?;
            replace(&site.run.worker_ca, &trusted)?;
            replace(&pair.certificate, &chain)
        })
        .await?;
        if new {
            info!(purpose = purpose.name(), "a new certificate");
        }
        Ok(authorities)
    }

    /// Whether the certificates on the disk still work. Those of the storage driver and of the
    /// enforcement of policies may be missing: a leader of an earlier version does not give
    /// them, and these parts say themselves what they wait for. Blocks.
    fn usable(&self) -> bool {
        let now = clock::now();
        let read = |file: &files::File| pki::certificates_der(&file.read().ok()??);
        let Some(trusted) = read(&self.site.run.worker_ca) else { return false };
        let needed = |purpose: &WorkerPurpose| {
            !matches!(purpose, WorkerPurpose::Csi | WorkerPurpose::Policy)
        };
        WorkerPurpose::ALL.into_iter().filter(needed).all(|purpose| {
            let pair = pair(&self.site.data, purpose);
            let Some(chain) = read(&pair.certificate) else { return false };
            let Some(facts) = Facts::read(&chain[0]) else { return false };
            let Ok(key) = own_key(&pair) else { return false };
            let public = key.verifying_key().to_bytes();
            let ours = trusted.iter().any(|ca| check(&chain[0], ca, public).is_ok());
            ours && facts.not_after > now
        })
    }

    /// Trusts the authorities of the last boot, until a leader tells those of now. Blocks.
    fn recall(&self) -> Result<(), files::Error> {
        let Site { data, run, .. } = &self.site;
        if run.worker_ca.read()?.is_none()
            && let Some(last) = data.last_ca().read()?
            && pki::certificates_der(&last).is_some()
        {
            run.worker_ca.write(&last)?;
        }
        Ok(())
    }

    /// The files that follow from the site and the node alone. Blocks.
    fn write_configuration(&self) -> Result<(), Error> {
        let (site, run) = (&self.site, &self.site.run);
        site.data.create()?;
        run.create()?;
        self.recall()?;
        replace(&run.kube_proxy_config, &configuration::kube_proxy(site, self.node))?;
        let ways = [
            (&run.kubelet, WorkerPurpose::Kubelet),
            (&run.kube_proxy, WorkerPurpose::KubeProxy),
            (&run.dns, WorkerPurpose::Dns),
            (&run.policy, WorkerPurpose::Policy),
        ];
        for (file, purpose) in ways {
            let client = pair(&site.data, purpose);
            replace(file, &kubeconfig(site.api_balancer(), &run.worker_ca, &client))?;
        }
        Ok(())
    }
}

/// The address of the node in the records; `None` while they have none.
fn address(nodes: Option<&Nodes>, node: NodeId) -> Option<String> {
    let status = nodes?.get(&node)?.status.as_ref()?;
    Some(status.external_address.clone()).filter(|address| !address.is_empty())
}

/// Waits until the record of the node has another address than `known`: the leader puts that into
/// the certificate of kubelet's server.
async fn until_another_address(
    nodes: &mut watch::Receiver<Option<Arc<Nodes>>>,
    node: NodeId,
    known: Option<String>,
) -> Result<(), Closed> {
    until(nodes, "the nodes", |nodes| {
        let now = address(nodes.as_deref(), node);
        (now.is_some() && now != known).then_some(())
    })
    .await
}

/// The purpose on the wire.
fn asked(purpose: WorkerPurpose) -> v1::WorkerCertificate {
    match purpose {
        WorkerPurpose::Kubelet => v1::WorkerCertificate::Kubelet,
        WorkerPurpose::KubeletServer => v1::WorkerCertificate::KubeletServer,
        WorkerPurpose::KubeProxy => v1::WorkerCertificate::KubeProxy,
        WorkerPurpose::Dns => v1::WorkerCertificate::Dns,
        WorkerPurpose::Csi => v1::WorkerCertificate::Csi,
        WorkerPurpose::Policy => v1::WorkerCertificate::Policy,
    }
}

/// Whether a certificate belongs to this key, and to the authority beside it.
fn check(certificate: &[u8], authority: &[u8], key: [u8; 32]) -> Result<(), &'static str> {
    let facts = Facts::read(certificate).ok_or("it cannot be read")?;
    if facts.public_key != key {
        return Err("it belongs to another key");
    }
    match pki::signed_by(certificate, authority) {
        true => Ok(()),
        false => Err("the authority has not signed it"),
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;
    use polis_runtime::lines::Lines;
    use polis_wire::pki::Namespace;
    use polis_wire::pki::memory::Memory;
    use polis_wire::rpc::client::Timeouts;

    use super::*;

    #[tokio::test]
    async fn only_a_certificate_of_the_authority_for_the_own_key_is_written() {
        let node = NodeId::from_public_key(&[7; 32]);
        let now = clock::now();
        let wish = WorkerPurpose::Kubelet.certificate(node, None, [1; 32]);
        let issued = Namespace::new(Memory::default(), "").ensure(&wish, now).await.unwrap();
        let foreign = Namespace::new(Memory::default(), "").ensure(&wish, now).await.unwrap();
        assert_eq!(check(&issued.der, &issued.issuer_der, [1; 32]), Ok(()));
        let other = check(&issued.der, &issued.issuer_der, [2; 32]);
        assert_eq!(other, Err("it belongs to another key"));
        let unsigned = check(&issued.der, &foreign.issuer_der, [1; 32]);
        assert_eq!(unsigned, Err("the authority has not signed it"));
        assert_eq!(check(b"noise", &issued.issuer_der, [1; 32]), Err("it cannot be read"));
    }

    #[tokio::test]
    async fn a_worker_asks_again_once_its_record_has_another_address() {
        let node = NodeId::from_public_key(&[7; 32]);
        let at = |address: &str| {
            let status =
                v1::NodeStatus { external_address: address.to_owned(), ..Default::default() };
            let info = v1::NodeInfo { status: Some(status), ..Default::default() };
            Some(Arc::new(Nodes::from([(node, info)])))
        };
        let (told, mut nodes) = watch::channel(at("192.0.2.7"));
        let known = address(nodes.borrow().as_deref(), node);
        assert_eq!(known.as_deref(), Some("192.0.2.7"));
        let mut another = Box::pin(until_another_address(&mut nodes, node, known));
        for same in [at("192.0.2.7"), at(""), None] {
            told.send_replace(same);
            assert!(another.as_mut().now_or_never().is_none());
        }
        told.send_replace(at("192.0.2.8"));
        another.await.unwrap();
    }

    #[tokio::test]
    async fn a_boot_without_a_leader_has_the_certificates_and_authorities_of_the_last_one() {
        let folder = tempfile::tempdir().unwrap();
        let site = Site::live(&files::Root::at(folder.path()));
        let node = NodeId::from_public_key(&[7; 32]);
        let service = Service {
            site: site.clone(),
            node,
            client: Client::new(
                watch::channel(Vec::new()).1,
                watch::channel(None).1,
                Timeouts::default(),
            ),
            credentials: watch::channel(None).1,
            nodes: watch::channel(None).1,
            look: Duration::ZERO,
            trusted: watch::Sender::default(),
            parts: Parts::new(watch::Sender::default(), Lines::channel().0),
        };
        site.run.create().unwrap();
        site.run.ca.write(b"of a controller").unwrap();
        service.write_configuration().unwrap();
        let pki = Namespace::new(Memory::default(), "");
        for purpose in WorkerPurpose::ALL {
            let pair = pair(&site.data, purpose);
            let key = own_key(&pair).unwrap().verifying_key().to_bytes();
            let wish = purpose.certificate(node, None, key);
            let issued = pki.ensure(&wish, clock::now()).await.unwrap();
            pair.certificate.write(pki::certificate_pem(&issued.der).as_bytes()).unwrap();
            assert!(!service.usable(), "no authority is known");
            site.data.last_ca().write(b"noise").unwrap();
            service.write_configuration().unwrap();
            assert_eq!(site.run.worker_ca.read().unwrap(), None, "what is damaged is not used");
            let trusted = pki::certificate_pem(&issued.issuer_der);
            site.data.last_ca().write(trusted.as_bytes()).unwrap();
        }
        service.write_configuration().unwrap();
        assert!(service.usable());
        // A leader has told others meanwhile.
        site.run.worker_ca.write(b"of now").unwrap();
        service.write_configuration().unwrap();
        assert_eq!(site.run.worker_ca.read().unwrap().unwrap(), b"of now");
        let controllers = site.run.ca.read().unwrap().unwrap();
        assert_eq!(controllers, b"of a controller", "a node with both roles has both files");
    }
}
