//! Certificates are renewed under servers that go on running.

use std::net::SocketAddr;
use std::sync::Arc;

use etcd_client::Client;
use polis_base::files::Group;
use polis_proto::v1;
use polis_tests::{Story, story};
use polis_wire::pki::{Facts, certificates_der};
use polis_wire::rpc::provider;
use polis_workload::Part;
use prost::Message as _;
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, RootCertStore};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use crate::world::{Controller, SOON, wait_until};

/// The stories of this file.
pub(crate) const STORIES: &[Story] =
    &[story!(threads new_certificates_are_taken_without_a_restart).takes(50)];

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
    a_name_is_verified_until_it_is_removed(&controller, &mut etcd).await;
    controller.stop().await;
}

/// The API server and the access proxy have a name of the cluster's configuration in their
/// certificates for as long as it is there.
async fn a_name_is_verified_until_it_is_removed(controller: &Controller, etcd: &mut Client) {
    let name = "api.example";
    let none: &[&str] = &[];
    let pid = controller.pid(Part::ApiServer);
    for names in [none, &[name], none] {
        let kubernetes = v1::KubernetesConfiguration {
            names: names.iter().map(|name| (*name).to_owned()).collect(),
        };
        let record =
            v1::ClusterConfiguration { kubernetes: Some(kubernetes), ..Default::default() };
        etcd.put("polis:curator/cluster/configuration", record.encode_to_vec(), None)
            .await
            .unwrap();
        for address in [controller.site.api(), controller.access] {
            let what = format!("a certificate at {address} for {names:?} alone");
            wait_until(SOON, &what, async || {
                let expected = ServerName::try_from(name).unwrap();
                let shown = shown_as(controller, address, expected).await;
                shown.is_some() != names.is_empty()
            })
            .await;
        }
    }
    assert_eq!(controller.pid(Part::ApiServer), pid);
}

/// The serial number of the certificate that a server shows.
async fn serial(controller: &Controller, address: SocketAddr) -> Vec<u8> {
    Facts::read(&shown(controller, address).await.unwrap()).unwrap().serial
}

/// The certificate that a server shows; `None` if the authorities of now have not signed it.
pub(crate) async fn shown(controller: &Controller, address: SocketAddr) -> Option<Vec<u8>> {
    shown_as(controller, address, ServerName::IpAddress(address.ip().into())).await
}

/// The same to a client that asks for this name; `None` also if the certificate lacks it.
async fn shown_as(
    controller: &Controller,
    address: SocketAddr,
    name: ServerName<'static>,
) -> Option<Vec<u8>> {
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
    let tls = TlsConnector::from(Arc::new(config)).connect(name, tcp).await.ok()?;
    Some(tls.get_ref().1.peer_certificates()?[0].to_vec())
}
