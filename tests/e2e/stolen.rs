//! The keys of a node, taken from its disk as a person with an unprotected disk can,
//! and tried on the others.

use std::fs::File;
use std::io::{BufReader, Read as _};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use polis_proto::v1;
use polis_proto::v1::curator_local_client::CuratorLocalClient;
use polis_proto::v1::node_management_client::NodeManagementClient;
use polis_tests::patiently;
use polis_wire::identity::{NodeId, NodeKey};
use polis_wire::pki::{Authorities, CURATOR_NAME, ETCD_PEER_NAME};
use polis_wire::rpc::Credentials;
use polis_wire::rpc::client::{Expect, Trust, dial};
use rustls::pki_types::{CertificateDer, PrivatePkcs8KeyDer, ServerName, pem::PemObject as _};
use rustls::{ClientConfig, RootCertStore};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use x509_parser::prelude::{FromDer as _, X509Certificate};
use zeroize::Zeroizing;

/// Files of a file system begin at the start of one of its blocks.
const BLOCK: usize = 4096;

/// Longest that a server may take to accept or reject.
const ANSWER: Duration = Duration::from_secs(20);

/// The credentials of a node.
pub(crate) struct Stolen {
    /// To curators, and to the management of nodes.
    node: Credentials,
    /// To members of etcd.
    peer: Vec<u8>,
    /// The issuers of the certificates of the members of etcd.
    peers: Vec<u8>,
}

impl Stolen {
    /// Reads them from the disk of the node.
    pub(crate) fn from_disk(disk: &Path, node: NodeId) -> Result<Self> {
        let mut disk = BufReader::with_capacity(256 * BLOCK, File::open(disk)?);
        let mut block = [0; BLOCK];
        let mut key = None;
        let mut certificates = Vec::new();
        while disk.read_exact(&mut block).is_ok() {
            let block = &block[..];
            if block.starts_with(b"-----BEGIN PRIVATE KEY") {
                let der = PrivatePkcs8KeyDer::from_pem_slice(block);
                let der = der.map(|der| Zeroizing::new(der.secret_pkcs8_der().to_vec()));
                let ours = |der: &Zeroizing<Vec<u8>>| {
                    NodeKey::from_pkcs8_der(der).is_ok_and(|key| key.id() == node)
                };
                key = der.ok().filter(ours).or(key);
            } else if block.starts_with(b"-----BEGIN CERTIFICATE") {
                let der = CertificateDer::from_pem_slice(block);
                certificates.extend(der.map(|der| der.to_vec()));
            } else if block.starts_with(&[0x30, 0x82])
                && let Ok((rest, _certificate)) = X509Certificate::from_der(block)
            {
                certificates.push(block[..block.len() - rest.len()].to_vec());
            } else if let [0x0a, _, _, der @ ..] = block
                && let Ok((rest, _certificate)) = X509Certificate::from_der(der)
            {
                // The record of the authorities begins with the CA that signs.
                certificates.push(der[..der.len() - rest.len()].to_vec());
            }
        }
        let key = Arc::new(key.context("no key on the disk")?);
        // The newest of a kind is the last one: the disk is filled from its start.
        let last = |what: &str, wanted: &dyn Fn(&X509Certificate<'_>) -> bool| {
            let fits = |der: &&Vec<u8>| {
                X509Certificate::from_der(der).is_ok_and(|(_, found)| wanted(&found))
            };
            certificates.iter().rfind(fits).cloned().with_context(|| format!("no {what}"))
        };
        let named =
            |found: &X509Certificate<'_>| found.subject().to_string().contains(&node.to_string());
        // etcd keeps that of a curator, which is under the same key.
        let to_clients = |found: &X509Certificate<'_>| {
            let names = found.subject_alternative_name().ok().flatten();
            names.is_some_and(|names| format!("{:?}", names.value).contains(CURATOR_NAME))
        };
        let to_peers = |found: &X509Certificate<'_>| {
            let names = found.subject_alternative_name().ok().flatten();
            names.is_some_and(|names| format!("{:?}", names.value).contains(ETCD_PEER_NAME))
        };
        let signed = last("node certificate", &|found| {
            named(found) && !to_peers(found) && !to_clients(found)
        })?;
        let peer = last("peer certificate", &|found| named(found) && to_peers(found))?;
        let issuer = |of: &[u8]| -> Result<String> {
            Ok(X509Certificate::from_der(of)?.1.issuer().to_string())
        };
        let (above, above_peer) = (issuer(&signed)?, issuer(&peer)?);
        let authority = last("CA", &|found| found.subject().to_string() == above)?;
        let peers = last("CA of the peers", &|found| found.subject().to_string() == above_peer)?;
        let node = Credentials {
            certificate: signed,
            key,
            authorities: Some(Authorities::sole(authority).into()),
        };
        Ok(Self { node, peer, peers })
    }

    /// Whether a curator, the management of a node, and a member of etcd accept its
    /// former credentials, at these ports of this host.
    pub(crate) async fn is_taken(&self, ports: [u16; 3], node: &str) -> Result<[bool; 3]> {
        let [curator, management, etcd] = ports;
        let trust = Trust::cluster(self.node.authorities.clone().context("no CA")?);
        let ask = async |port: u16, curator: bool| {
            let dialled = dial("127.0.0.1", port, Expect::AnyNode, &trust, Some(&self.node)).await;
            let channel = match dialled {
                Ok(connection) => connection.channel,
                Err(error) if !error.is_absence() => return Ok(false),
                Err(error) => bail!(error),
            };
            let answer = match curator {
                true => {
                    let request = v1::GetCurrentLeaderRequest {};
                    CuratorLocalClient::new(channel).get_current_leader(request).await.map(drop)
                }
                false => {
                    let request = v1::GetStatusRequest {};
                    NodeManagementClient::new(channel).get_status(request).await.map(drop)
                }
            };
            Ok(answer.is_ok())
        };
        let curator = patiently(ANSWER, ask(curator, true)).await??;
        let management = patiently(ANSWER, ask(management, false)).await??;
        let etcd = patiently(ANSWER, self.greets(etcd, node)).await??;
        Ok([curator, management, etcd])
    }

    /// Whether a member of etcd answers.
    async fn greets(&self, port: u16, node: &str) -> Result<bool> {
        let mut roots = RootCertStore::empty();
        roots.add(self.peers.clone().into())?;
        let key = PrivatePkcs8KeyDer::from(self.node.key.to_vec());
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()?
            .with_root_certificates(roots)
            .with_client_auth_cert(vec![self.peer.clone().into()], key.into())?;
        let socket = TcpStream::connect(("127.0.0.1", port)).await?;
        let name = ServerName::try_from(node.to_owned())?;
        let stream = TlsConnector::from(Arc::new(config)).connect(name, socket).await;
        let Ok(mut stream) = stream else { return Ok(false) };
        // In TLS 1.3 the server reports its judgement of a certificate only afterwards.
        let request = b"GET /version HTTP/1.0\r\nHost: etcd\r\n\r\n";
        let mut answer = [0; 4];
        let answered = async {
            stream.write_all(request).await?;
            stream.read_exact(&mut answer).await
        };
        Ok(answered.await.is_ok() && answer == *b"HTTP")
    }
}
