//! The networks of pods and Services, from the configuration of a cluster.
//!
//! Invariants:
//! - The two have no address in common, and the network of pods has room for two nodes or more.
//! - Neither has addresses that machines use for themselves: loopback, link-local, multicast.
//!
//! What this module does not do: refuse other networks to a running cluster (`configuration` of the
//! curator).

use std::net::{IpAddr, Ipv4Addr};
use std::ops::RangeInclusive;

use super::error::Error;
use super::text::{At as _, Refusal};
use super::{Cidr, Network};
use crate::pod_network::{NODE_LENGTH, Networks, Prefix};

/// Fixed bits of the network of pods: at least two nodes have a place in it.
const PODS: RangeInclusive<u8> = 8..=NODE_LENGTH - 1;
/// Fixed bits of the network of Services: an API server refuses a larger one.
const SERVICES: RangeInclusive<u8> = 12..=24;

/// The numbers of the fields.
const POD_NETWORK: u16 = 27;
const SERVICE_NETWORK: u16 = 28;

/// Networks whose addresses are not for pods and Services: of no machine, loopback, link-local,
/// multicast and reserved.
const RESERVED: [(Ipv4Addr, u8); 4] = [
    (Ipv4Addr::new(0, 0, 0, 0), 8),
    (Ipv4Addr::new(127, 0, 0, 0), 8),
    (Ipv4Addr::new(169, 254, 0, 0), 16),
    (Ipv4Addr::new(224, 0, 0, 0), 3),
];

/// Reads the networks of pods and of Services; an empty text is the default. `path` is the
/// position of both as errors report it.
///
/// # Errors
///
/// [`Error::Field`].
pub fn networks(pods: &str, services: &str, path: &str) -> Result<Networks, Error> {
    let default = Networks::default();
    let pods = read(pods, default.pods, &PODS).at(format!("{path}.pod_network"), POD_NETWORK)?;
    let at = format!("{path}.service_network");
    let services = read(services, default.services, &SERVICES).at(&*at, SERVICE_NETWORK)?;
    if pods.overlaps(services) {
        let allowed = format!(
            "a network apart from that of pods, which is {pods}; an empty one has its default"
        );
        return Err(Refusal::described(services, allowed)).at(at, SERVICE_NETWORK);
    }
    Ok(Networks { pods, services })
}

fn read(text: &str, default: Prefix, lengths: &RangeInclusive<u8>) -> Result<Prefix, Refusal> {
    if text.is_empty() {
        return Ok(default);
    }
    let network = text.parse::<Prefix>().ok().filter(|it| lengths.contains(&it.length()));
    let network = network.ok_or_else(|| {
        let (widest, narrowest) = (lengths.start(), lengths.end());
        let allowed = format!(
            "an IPv4 network of /{widest} to /{narrowest} without host bits, such as {default}"
        );
        Refusal::of(text, allowed)
    })?;
    let mut reserved = RESERVED.iter().filter_map(|it| Prefix::new(it.0, it.1).ok());
    if let Some(reserved) = reserved.find(|reserved| reserved.overlaps(network)) {
        return Err(Refusal::of(text, format!("a network without addresses of {reserved}")));
    }
    Ok(network)
}

/// Checks that the networks of a new cluster leave this machine its own addresses and its name
/// servers, to which the routes of the mesh would lead elsewhere.
///
/// The default ones are accepted: a machine without a role of Kubernetes may be inside of them,
/// and the leader refuses such a role to it.
///
/// # Errors
///
/// [`Error::Field`].
pub(super) fn check(networks: Networks, network: &Network) -> Result<(), Error> {
    if networks == Networks::default() {
        return Ok(());
    }
    let own = network.settings().flat_map(|link| &link.addresses).map(Cidr::address);
    let own = own.map(|address| (address, "the address"));
    let servers = network.nameservers.iter().map(|address| (*address, "a name server"));
    for (address, what) in own.chain(servers) {
        let IpAddr::V4(address) = address.to_canonical() else { continue };
        let Some(inside) = networks.with(address) else { continue };
        let (field, number) = match inside == networks.pods {
            true => ("pod_network", POD_NETWORK),
            false => ("service_network", SERVICE_NETWORK),
        };
        let allowed = format!("a network without {address}, {what} of this machine");
        return Err(Refusal::described(inside, allowed))
            .at(format!("cluster_bootstrap.cluster_configuration.{field}"), number);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parameters::FieldError;

    fn refused(pods: &str, services: &str) -> FieldError {
        match networks(pods, services, "c") {
            Err(Error::Field(refused)) => refused,
            other => panic!("{pods} {services}: {other:?}"),
        }
    }

    #[test]
    fn a_network_that_is_not_named_has_its_default() {
        let default = Networks::default();
        assert_eq!(networks("", "", "c").unwrap(), default);
        let message = default.to_message();
        let named = networks(&message.pod_network, &message.service_network, "c").unwrap();
        assert_eq!(named, default);
        let pods = networks("172.16.0.0/13", "", "c").unwrap();
        assert_eq!(pods.pods.to_string(), "172.16.0.0/13");
        assert_eq!(pods.services, default.services);
        let both = networks("10.192.0.0/23", "192.168.0.0/24", "c").unwrap();
        assert_eq!((both.pods.length(), both.services.length()), (23, 24));
        assert!(networks("11.0.0.0/8", "172.16.0.0/12", "c").is_ok());
    }

    #[test]
    fn a_network_of_another_form_or_size_is_refused() {
        for bad in ["10.0.0.0", "10.0.0.1/16", "10.0.0.0/7", "10.0.0.0/24", "fd00::/48", " "] {
            let refused = refused(bad, "");
            assert_eq!((&*refused.path, refused.number), ("c.pod_network", 27), "{bad}");
            assert_eq!(
                refused.allowed,
                "an IPv4 network of /8 to /23 without host bits, such as 10.192.0.0/11"
            );
        }
        for bad in ["172.0.0.0/11", "172.16.0.0/25", "172.16.0.1/16", "fd00::/112"] {
            let refused = refused("", bad);
            assert_eq!((&*refused.path, refused.number), ("c.service_network", 28), "{bad}");
            assert!(refused.allowed.starts_with("an IPv4 network of /12 to /24"), "{refused}");
        }
    }

    #[test]
    fn networks_that_machines_use_themselves_are_refused() {
        for (bad, reserved) in [
            ("0.0.0.0/8", "0.0.0.0/8"),
            ("127.64.0.0/16", "127.0.0.0/8"),
            ("169.0.0.0/8", "169.254.0.0/16"),
            ("169.254.0.0/16", "169.254.0.0/16"),
            ("224.0.0.0/16", "224.0.0.0/3"),
            ("240.0.0.0/16", "224.0.0.0/3"),
        ] {
            let refused = refused(bad, "");
            assert_eq!(refused.allowed, format!("a network without addresses of {reserved}"));
        }
        assert_eq!(refused("", "169.254.0.0/16").number, 28);
    }

    #[test]
    fn networks_with_a_common_address_are_refused() {
        for (pods, services) in
            [("10.0.0.0/8", ""), ("", "10.200.0.0/16"), ("172.16.0.0/16", "172.16.0.0/12")]
        {
            let refused = refused(pods, services);
            assert_eq!((&*refused.path, refused.number), ("c.service_network", 28));
            assert!(refused.allowed.starts_with("a network apart from that of pods"), "{refused}");
        }
    }

    #[test]
    fn a_machine_keeps_its_addresses_and_its_name_servers() {
        let network = |address: &str, nameserver: &str| {
            let interface = polis_proto::v1::network_configuration::Interface {
                r#match: "eth0".to_owned(),
                addresses: vec![address.to_owned()],
                ..Default::default()
            };
            let message = polis_proto::v1::NetworkConfiguration {
                interfaces: vec![interface],
                nameservers: vec![nameserver.to_owned()],
                ..Default::default()
            };
            crate::parameters::network(message, "network").unwrap()
        };
        let chosen = networks("172.16.0.0/13", "172.24.0.0/16", "c").unwrap();
        check(chosen, &network("10.200.0.7/16", "10.224.0.1")).unwrap();
        for (address, nameserver, number) in [
            ("172.16.9.7/24", "10.0.0.1", POD_NETWORK),
            ("172.24.0.7/24", "10.0.0.1", SERVICE_NETWORK),
            ("10.0.0.7/24", "172.17.0.1", POD_NETWORK),
            ("10.0.0.7/24", "::ffff:172.17.0.1", POD_NETWORK),
        ] {
            let Err(Error::Field(refused)) = check(chosen, &network(address, nameserver)) else {
                panic!("{address} {nameserver}")
            };
            assert_eq!(refused.number, number);
            assert!(refused.allowed.ends_with("of this machine"), "{refused}");
        }
        // The default networks are not compared with the machine.
        check(Networks::default(), &network("10.200.0.7/16", "10.224.0.1")).unwrap();
    }
}
