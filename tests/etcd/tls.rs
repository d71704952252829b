//! An untrusted caller at the port for peers.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use polis_wire::pki::{Issued, key_pem};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::pki_types::pem::PemObject as _;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, RootCertStore, crypto, version};

/// How the port took it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    Served,
    Refused(String),
}

/// Connects as a peer would and asks for the version, trusting `ca` alone.
pub(crate) async fn shake_hands(port: SocketAddr, ca: &[u8], shown: Option<&Issued>) -> Answer {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(ca).unwrap()).unwrap();
    let config = ClientConfig::builder_with_provider(Arc::new(crypto::ring::default_provider()))
        .with_protocol_versions(&[&version::TLS13])
        .unwrap()
        .with_root_certificates(roots);
    let config = match shown {
        Some(issued) => {
            let key = key_pem(issued.key.as_ref().unwrap());
            let key = PrivateKeyDer::from_pem_slice(key.as_bytes()).unwrap();
            let chain = vec![CertificateDer::from(issued.der.clone())];
            config.with_client_auth_cert(chain, key).unwrap()
        }
        None => config.with_no_client_auth(),
    };
    let asked = async {
        let tcp = TcpStream::connect(port).await?;
        let connector = TlsConnector::from(Arc::new(config));
        let mut tls = connector.connect(ServerName::from(port.ip()), tcp).await?;
        tls.write_all(b"GET /version HTTP/1.0\r\n\r\n").await?;
        let mut answer = Vec::new();
        // With version 1.3 of TLS a refusal comes instead of the first answer.
        tls.read_to_end(&mut answer).await?;
        Ok::<_, std::io::Error>(String::from_utf8_lossy(&answer).into_owned())
    };
    match polis_tests::patiently(Duration::from_secs(10), asked).await {
        Ok(Ok(answer)) if answer.contains("etcdserver") => Answer::Served,
        Ok(Ok(answer)) => Answer::Refused(answer),
        Ok(Err(error)) => Answer::Refused(error.to_string()),
        Err(_elapsed) => panic!("{port} neither served nor refused"),
    }
}
