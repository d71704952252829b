//! Fuzz targets of node parameters: the message, and any form in which a place carries it.

use base64ct::{Base64, Encoding as _};
use polis_fuzz::{Accepted, Target};
use polis_proto::v1;
use prost::Message as _;

use super::super::{ARMOUR, message};
use super::parse;
use super::tests::{bootstrapping, eth0, registering, with};

/// Messages that together have every field.
fn samples() -> Vec<Vec<u8>> {
    use v1::network_configuration::{Bond, Card, Route, Settings, Vlan};
    let cluster_configuration = v1::ClusterConfiguration {
        cluster_domain: "a.example".to_owned(),
        tpm_mode: 1,
        storage_security_policy: 3,
        cold_start: 2,
        time: Some(v1::TimeConfiguration {
            servers: vec![v1::NtpServer { host: "ntp.example".to_owned(), nts: true }],
        }),
        pod_network: "172.16.0.0/13".to_owned(),
        service_network: "172.24.0.0/16".to_owned(),
        // Only a running cluster has a firewall of its own.
        ..v1::ClusterConfiguration::default()
    };
    let labels = [("rack/side".to_owned(), "1".to_owned())];
    let bootstrap = v1::ClusterBootstrap {
        cluster_configuration: Some(cluster_configuration),
        labels: labels.clone().into(),
        name: "node-1".to_owned(),
        ..bootstrapping()
    };
    let interface = v1::network_configuration::Interface {
        dhcp: true,
        addresses: vec!["10.0.2.7/24".to_owned(), "fd00::7/64".to_owned()],
        routes: vec![Route {
            destination: "10.1.0.0/16".to_owned(),
            gateway: "10.0.2.2".to_owned(),
            metric: 7,
        }],
        mtu: 1500,
        path: "0000:00:03.0".to_owned(),
        driver: "virtio_net".to_owned(),
        primary: true,
        ipv6: 3,
        ..eth0()
    };
    let card = |name: &str| Card { r#match: name.to_owned(), ..Card::default() };
    let settings = Some(Settings {
        dhcp: true,
        addresses: vec!["10.0.3.7/24".to_owned()],
        routes: interface.routes.clone(),
        mtu: 1400,
        primary: false,
        ipv6: 2,
    });
    let bond = Bond {
        name: "bond0".to_owned(),
        members: vec![card("eth1"), card("52:54:00:00:00:02")],
        mode: 2,
        hash: 3,
        min_links: 1,
        settings: settings.clone(),
    };
    let on_bond = Vlan { bond: bond.name.clone(), card: None, id: 7, settings: settings.clone() };
    let on_card = Vlan { bond: String::new(), card: Some(card("eth3")), id: 4094, settings };
    let network = v1::NetworkConfiguration {
        interfaces: vec![interface],
        nameservers: vec!["10.0.2.3".to_owned()],
        ntp_servers: vec!["ntp.example".to_owned()],
        bonds: vec![bond],
        vlans: vec![on_bond, on_card],
    };
    let register = v1::ClusterRegister { labels: labels.into(), ..registering() };
    let first = v1::NodeParameters {
        network: Some(network),
        console: Some(v1::ConsoleConfiguration { tui: vec!["ttyS1".to_owned()] }),
        ..with(v1::node_parameters::Cluster::ClusterBootstrap(bootstrap))
    };
    let second = v1::NodeParameters {
        wipes: format!("polis-{}", "0b".repeat(16)),
        ..with(v1::node_parameters::Cluster::ClusterRegister(register))
    };
    vec![first.encode_to_vec(), second.encode_to_vec()]
}

fn read(bytes: &[u8]) -> Accepted {
    let Ok(parameters) = parse(bytes) else { return Accepted::No };
    let message = v1::NodeParameters::decode(bytes).unwrap();
    let again = parse(&message.encode_to_vec());
    assert_eq!(again.ok(), Some(parameters), "what is accepted is accepted when encoded anew");
    Accepted::Yes
}

#[test]
fn parameters() {
    Target::new("wire.parameters").samples(samples()).run(read);
}

#[test]
fn parameters_as_text() {
    let text = |bytes: &Vec<u8>| format!("{ARMOUR}{}", Base64::encode_string(bytes));
    let texts: Vec<String> = samples().iter().map(text).collect();
    let folded = texts[0].replace("AA", "A\r\n A");
    Target::new("wire.parameters_text").samples(texts).samples([folded]).run(
        |input| match message(input.to_vec()) {
            Ok(bytes) => read(&bytes),
            Err(_) => Accepted::No,
        },
    );
}
