//! Addresses of the parameters, and other machines that have them, too.

use std::net::IpAddr;

use super::{INTERFACES, LEASED, eth0, fixed, in_namespace, loaded, until, while_running};
use crate::network::observe::observe;
use crate::parameters::{self, LinkSettings};

#[test]
fn a_static_address_needs_no_cable_and_no_server() {
    in_namespace(|wire| async move {
        let settings = LinkSettings {
            addresses: vec!["192.0.2.7/24".parse().unwrap(), "fd00::7/64".parse().unwrap()],
            routes: vec![parameters::Route {
                destination: "0.0.0.0/0".parse().unwrap(),
                gateway: IpAddr::from([192, 0, 2, 1]),
                metric: 7,
            }],
            mtu: Some(1400),
            ..LinkSettings::default()
        };
        let (service, _owner) = wire.service(loaded(eth0(settings)));
        while_running(service, async |mut status| {
            let status = until(&mut status, |s| s.primary.is_some()).await;
            assert_eq!(status.primary, Some(IpAddr::from([192, 0, 2, 7])));
            assert_eq!(status.addresses().len(), 2);
            assert!(status.interfaces.iter().all(|interface| !interface.asking));
        })
        .await;
        let observed = observe(&wire.handle, INTERFACES).await.unwrap();
        let eth0 = wire.index("eth0").await;
        assert_eq!(observed.links[&eth0].mtu, 1400);
        assert!(observed.links.values().all(|link| link.up), "{observed:?}");
        assert!(observed.ending.is_empty(), "{observed:?}");
        let route = observed.routes.first().unwrap();
        assert_eq!((route.link, route.metric, observed.routes.len()), (eth0, 7, 1));
    });
}

#[test]
fn another_machine_with_the_address_of_the_node_is_found_by_asking() {
    in_namespace(|wire| async move {
        wire.settled_cable().await;
        let (service, _owner) = wire.service(loaded(fixed("10.7.0.15/24")));
        while_running(service, async |mut status| {
            // The kernel answers for its addresses on every cable, so on the other end of this
            // one, too, with the hardware address of that.
            let both = until(&mut status, |s| !s.faults.is_empty()).await;
            let fault = &both.faults[0];
            assert!(fault.contains("has the address 10.7.0.15 of eth0, too"), "{fault}");
            assert_eq!(both.primary, Some(IpAddr::V4(LEASED)), "it stays");
            assert_eq!(both.waiting, None);
        })
        .await;
    });
}

#[test]
fn another_machine_that_claims_the_address_of_the_node_later_is_reported() {
    in_namespace(|wire| async move {
        wire.settled_cable().await;
        // The other end of the cable does not answer for this one.
        std::fs::write("/proc/sys/net/ipv4/conf/wire/arp_ignore", "1").unwrap();
        let (service, _owner) = wire.service(loaded(fixed("10.7.0.15/24")));
        while_running(service, async |mut status| {
            let alone = until(&mut status, |s| s.primary == Some(IpAddr::V4(LEASED))).await;
            assert_eq!(alone.faults, [""; 0]);
            let other = polis_base::sys::arp::Socket::open().unwrap();
            let mac = [2, 0, 0, 0, 0, 9];
            other.announce(wire.index("wire").await, mac, LEASED).unwrap();
            let both = until(&mut status, |s| !s.faults.is_empty()).await;
            assert!(both.faults[0].contains("02:00:00:00:00:09"), "{:?}", both.faults);
        })
        .await;
    });
}
