//! Certificates are renewed under servers that go on running.

use std::net::SocketAddr;
use std::sync::Arc;

use polis_base::files::Group;
use polis_tests::{Story, story};
use polis_wire::pki::{Facts, certificates_der};
use polis_wire::rpc::provider;
use polis_workload::Part;
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, RootCertStore};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use crate::world::{Controller, SOON, wait_until};

/// The stories of this file.
pub(crate) const STORIES: &[Story] =
    &[story!(threads new_certificates_are_taken_without_a_restart).takes(40)];

async fn new_certificates_are_taken_without_a_restart() {
    let controller = Controller::ready().await;
    let servers = [
        (Part::ApiServer, "apiserver", controller.site.api()),
        (
            Part::ControllerManager,
            "controller-manager-server",
            controller.site.controller_manager(),
        ),
        (Part::Scheduler, "scheduler-server", controller.site.scheduler()),
    ];
    let node = controller.machine.name();
    let mut etcd = controller.etcd.etcd().await;
    for (part, purpose, address) in servers {
        let (before, pid) = (serial(&controller, address).await, controller.pid(part));
        // Without its record the certificate is made anew, as after two thirds of its life.
        let folder = format!("polis:kubernetes-pki/certificates/kubernetes/{purpose}-{node}/");
        let gone = etcd.delete(format!("{folder}certificate"), None).await.unwrap();
        assert_eq!(gone.deleted(), 1, "{folder}");
        let what = format!("another certificate of {purpose}");
        wait_until(SOON, &what, async || serial(&controller, address).await != before).await;
        assert_eq!(controller.pid(part), pid, "{purpose}");
        let file =
            controller.site.data.pair(purpose, Group::Root).certificate.read().unwrap().unwrap();
        let facts = Facts::read(&certificates_der(&file).unwrap()[0]).unwrap();
        assert_eq!(serial(&controller, address).await, facts.serial, "{purpose}");
    }
    controller.stop().await;
}

/// The serial number of the certificate that a server shows.
async fn serial(controller: &Controller, address: SocketAddr) -> Vec<u8> {
    Facts::read(&shown(controller, address).await.unwrap()).unwrap().serial
}

/// The certificate that a server shows; `None` if the authorities of now have not signed it.
pub(crate) async fn shown(controller: &Controller, address: SocketAddr) -> Option<Vec<u8>> {
    let ca = controller.site.run.ca.read().unwrap().unwrap();
    let mut roots = RootCertStore::empty();
    for authority in certificates_der(&ca).unwrap() {
        roots.add(authority).unwrap();
    }
    let config = ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    let tcp = TcpStream::connect(address).await.unwrap();
    let name = ServerName::IpAddress(address.ip().into());
    let tls = TlsConnector::from(Arc::new(config)).connect(name, tcp).await.ok()?;
    Some(tls.get_ref().1.peer_certificates()?[0].to_vec())
}
