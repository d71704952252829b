//! Addresses of IPv6: of a router's prefix, by DHCPv6, static ones; and name servers of routers.

use std::net::{IpAddr, Ipv6Addr, SocketAddrV6};
use std::time::Duration;

use netlink_packet_route::address::{AddressAttribute, AddressFlags};
use rustix::net::{self, AddressFamily, SocketFlags, SocketType, sockopt};
use tokio::net::UdpSocket;
use tokio::sync::watch;

use super::{INTERFACES, Wire, eth0, in_namespace, loaded, until, while_running};
use crate::network::apply::apply;
use crate::network::observe::observe;
use crate::network::plan::Action;
use crate::network::{Order, Status};
use crate::parameters::{self, Cidr, Known, LinkSettings};
use polis_runtime::event;

/// A prefix that is on the link, and of which addresses are made.
const PREFIX_FOR_ADDRESSES: u8 = 0xc0;
/// A prefix that is only on the link.
const PREFIX: u8 = 0x80;
/// What a router says about DHCPv6.
const MANAGED: u8 = 0x80;
const INFORMED: u8 = 0x40;

/// The least that a router can be: it advertises itself and a prefix, on `wire`, again and again.
async fn advertise(wire: &Wire) {
    advertise_with(wire, 0, PREFIX_FOR_ADDRESSES).await;
}

async fn advertise_with(wire: &Wire, about_dhcp: u8, prefix: u8) {
    advertise_servers(wire, about_dhcp, prefix, &watch::Sender::default()).await;
}

/// The same, with an option of name servers while there is one.
async fn advertise_servers(
    wire: &Wire,
    about_dhcp: u8,
    prefix: u8,
    servers: &watch::Sender<Vec<u8>>,
) {
    let (kind, flags) = (SocketType::RAW, SocketFlags::NONBLOCK | SocketFlags::CLOEXEC);
    let icmp = Some(net::ipproto::ICMPV6);
    let socket = net::socket_with(AddressFamily::INET6, kind, flags, icmp).unwrap();
    sockopt::set_ipv6_multicast_hops(&socket, 255).unwrap();
    let mut message = vec![134, 0, 0, 0, 64, about_dhcp];
    message.extend(1800_u16.to_be_bytes());
    message.extend([0; 8]);
    message.extend([3, 4, 64, prefix]);
    message.extend([0xff; 8]);
    message.extend([0; 4]);
    message.extend(Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 0).octets());
    let all = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);
    let to = SocketAddrV6::new(all, 0, 0, wire.index("wire").await);
    let mut again = tokio::time::interval(Duration::from_millis(200));
    loop {
        again.tick().await;
        let message = [&message[..], &servers.borrow()].concat();
        // Until the wire has an address of its own, the kernel refuses.
        let _sent = net::sendto(&socket, &message, net::SendFlags::empty(), &to);
    }
}

fn without_dhcp(addresses: &[&str], routes: Vec<parameters::Route>) -> Known {
    let addresses = addresses.iter().map(|address| address.parse().unwrap()).collect();
    loaded(eth0(LinkSettings { addresses, routes, ..LinkSettings::default() }))
}

#[test]
fn a_router_gives_the_address_where_dhcp_is_off_and_it_goes_with_the_kernel_s() {
    in_namespace(|wire| async move {
        wire.cable(true).await;
        let (service, _owner) = wire.service(without_dhcp(&[], Vec::new()));
        let again = service.clone();
        let story = async {
            let mut primary = None;
            while_running(service, async |mut status| {
                let status = until(&mut status, |s| s.primary.is_some()).await;
                let Some(IpAddr::V6(address)) = status.primary else { panic!("{status:?}") };
                assert_eq!(address.segments()[..4], [0x2001, 0xdb8, 0, 0]);
                assert!(matches!(status.gateway, Some(IpAddr::V6(_))), "{status:?}");
                primary = status.primary;
            })
            .await;
            // Started again, it has the same address at once.
            while_running(again, async |mut status| {
                until(&mut status, |s| s.primary == primary && s.waiting.is_none()).await;
                let eth0 = wire.index("eth0").await;
                let own = Cidr::new(primary.unwrap(), 64).unwrap();
                apply(&wire.handle, &Action::RemoveAddress(eth0, own)).await.unwrap();
                until(&mut status, |s| s.primary.is_none()).await;
            })
            .await;
        };
        tokio::select! { () = advertise(&wire) => {}, () = story => {} }
    });
}

#[test]
fn a_static_address_of_ipv6_alone_is_the_node_s() {
    in_namespace(|wire| async move {
        wire.cable(true).await;
        let route = parameters::Route {
            destination: "::/0".parse().unwrap(),
            gateway: "fd00::1".parse().unwrap(),
            metric: 0,
        };
        let (service, _owner) = wire.service(without_dhcp(&["fd00::7/64"], vec![route]));
        while_running(service, async |mut status| {
            let status = until(&mut status, |s| s.primary.is_some()).await;
            assert_eq!(status.primary, Some("fd00::7".parse().unwrap()));
            assert_eq!(status.gateway, Some("fd00::1".parse().unwrap()));
            assert_eq!(status.waiting, None);
        })
        .await;
        let observed = observe(&wire.handle, INTERFACES).await.unwrap();
        assert_eq!(observed.routes.len(), 1, "{observed:?}");
    });
}

const LEASED_V6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 0x77);
const NAME_SERVER_V6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 0x53);

/// The least that a DHCPv6 server can be, on `wire`: an address for everyone, for 60 seconds and
/// renewed after `renew`, and a name server; each question is noted. While `silent`, it only notes.
async fn serve_v6(
    wire: &Wire,
    renew: u32,
    asked: &watch::Sender<Vec<u8>>,
    silent: &watch::Sender<bool>,
) {
    let (family, flags) = (AddressFamily::INET6, SocketFlags::NONBLOCK | SocketFlags::CLOEXEC);
    let socket = net::socket_with(family, SocketType::DGRAM, flags, None).unwrap();
    net::bind(&socket, &SocketAddrV6::new(Ipv6Addr::UNSPECIFIED, 547, 0, 0)).unwrap();
    let socket = UdpSocket::from_std(socket.into()).unwrap();
    let all = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 1, 2);
    socket.join_multicast_v6(&all, wire.index("wire").await).unwrap();
    let mut question = [0; 1500];
    loop {
        let (length, from) = socket.recv_from(&mut question).await.unwrap();
        asked.send_modify(|asked| asked.push(question[0]));
        if *silent.borrow() {
            continue;
        }
        let mut answer = vec![if question[0] == 1 { 2 } else { 7 }];
        answer.extend(&question[1..4]);
        // The identity comes first.
        let client = usize::from(u16::from_be_bytes([question[6], question[7]]));
        answer.extend(&question[4..8 + client]);
        answer.extend([0, 2, 0, 3, 9, 9, 9]);
        answer.extend([0, 23, 0, 16]);
        answer.extend(NAME_SERVER_V6.octets());
        if question[..length].windows(4).any(|option| option[..2] == [0, 3] && option[3] >= 12) {
            answer.extend([0, 3, 0, 40, 0, 0, 0, 0]);
            answer.extend(renew.to_be_bytes());
            answer.extend((renew * 2).to_be_bytes());
            answer.extend([0, 5, 0, 24]);
            answer.extend(LEASED_V6.octets());
            answer.extend([0, 0, 0, 60, 0, 0, 0, 60]);
        }
        // Until the wire has an address of its own, the kernel refuses.
        let _sent = socket.send_to(&answer, from).await;
    }
}

/// `eth0` with this setting for IPv6, and no DHCP for IPv4.
fn with_ipv6(ipv6: parameters::Ipv6) -> Known {
    loaded(eth0(LinkSettings { ipv6, ..LinkSettings::default() }))
}

#[test]
fn a_router_that_says_so_leads_to_an_address_by_dhcpv6_that_is_renewed_and_kept_by_the_next_run() {
    in_namespace(|wire| async move {
        wire.cable(true).await;
        let (service, _owner) = wire.service(with_ipv6(parameters::Ipv6::Auto));
        let again = service.clone();
        let (asked, silent) = (watch::Sender::default(), watch::Sender::new(false));
        let story = async {
            while_running(service, async |mut status| {
                let status = until(&mut status, |s| s.primary.is_some()).await;
                assert_eq!(status.primary, Some(LEASED_V6.into()));
                assert!(matches!(status.gateway, Some(IpAddr::V6(_))), "{status:?}");
                assert_eq!(status.nameservers, [IpAddr::from(NAME_SERVER_V6)]);
                let leased = status.interfaces[0].leased_v6.expect("a lease");
                assert_eq!(leased.address.to_string(), "2001:db8::77/128");
                assert!(wire.resolv_conf().contains("nameserver 2001:db8::53"));
                let mut asked = asked.subscribe();
                event::until(&mut asked, "a renewal", |all: &Vec<u8>| {
                    all.contains(&5).then_some(())
                })
                .await
                .unwrap();
                assert_eq!(asked.borrow()[..2], [1, 3], "an offer, and the request for it");
            })
            .await;
            // A run whose server is silent has the address of the former one.
            silent.send_replace(true);
            while_running(again, async |mut status| {
                until(&mut status, |s| s.primary == Some(LEASED_V6.into())).await;
                tokio::time::sleep(Duration::from_secs(2)).await;
                assert_eq!(status.borrow().primary, Some(LEASED_V6.into()));
                // It goes with a configuration that does not ask.
                let off = LinkSettings { ipv6: parameters::Ipv6::Off, ..LinkSettings::default() };
                wire.order.send_replace(Some(Order { number: 1, network: Some(eth0(off)) }));
                let gone = until(&mut status, |s| s.primary.is_none()).await;
                assert_eq!(gone.interfaces[0].addresses, []);
            })
            .await;
            let observed = observe(&wire.handle, INTERFACES).await.unwrap();
            let eth0 = &observed.links[&wire.index("eth0").await];
            assert!(eth0.switches.is_some_and(|switches| switches.off), "{eth0:?}");
        };
        tokio::select! {
            () = advertise_with(&wire, MANAGED, PREFIX) => {}
            () = serve_v6(&wire, 5, &asked, &silent) => {}
            () = story => {}
        }
    });
}

#[test]
fn a_router_that_only_informs_leads_to_servers_and_its_prefix_to_the_address() {
    in_namespace(|wire| async move {
        wire.cable(true).await;
        let (service, _owner) = wire.service(with_ipv6(parameters::Ipv6::Auto));
        let (asked, silent) = (watch::Sender::default(), watch::Sender::new(false));
        let story = while_running(service, async |mut status| {
            let status = until(&mut status, |s| s.primary.is_some() && !s.nameservers.is_empty());
            let status = status.await;
            assert_ne!(status.primary, Some(LEASED_V6.into()));
            assert_eq!(status.nameservers, [IpAddr::from(NAME_SERVER_V6)]);
            assert_eq!(status.interfaces[0].leased_v6, None);
            assert_eq!(*asked.borrow(), [11], "servers alone");
        });
        tokio::select! {
            () = advertise_with(&wire, INFORMED, PREFIX_FOR_ADDRESSES) => {}
            () = serve_v6(&wire, 5, &asked, &silent) => {}
            () = story => {}
        }
    });
}

/// The option of a router for this name server (RFC 8106, 5.1).
fn name_server(server: Ipv6Addr, seconds: u32) -> Vec<u8> {
    [&[25, 3, 0, 0], &seconds.to_be_bytes()[..], &server.octets()].concat()
}

#[test]
fn a_name_server_of_a_router_comes_behind_that_of_dhcpv6_and_goes_when_the_router_says_so() {
    in_namespace(|wire| async move {
        wire.cable(true).await;
        let (service, _owner) = wire.service(with_ipv6(parameters::Ipv6::Auto));
        let (asked, silent) = (watch::Sender::default(), watch::Sender::new(false));
        let advertised = Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 0x54);
        let servers = watch::Sender::new(name_server(advertised, 1800));
        let story = while_running(service, async |mut status| {
            let both = [NAME_SERVER_V6, advertised].map(IpAddr::from);
            until(&mut status, |s| s.nameservers == both).await;
            let lines = "nameserver 2001:db8::53\nnameserver 2001:db8::54\n";
            assert_eq!(wire.resolv_conf(), lines);
            servers.send_replace(name_server(advertised, 0));
            until(&mut status, |s| s.nameservers == both[..1]).await;
        });
        tokio::select! {
            () = advertise_servers(&wire, INFORMED, PREFIX_FOR_ADDRESSES, &servers) => {}
            () = serve_v6(&wire, 5, &asked, &silent) => {}
            () = story => {}
        }
    });
}

#[test]
fn a_service_that_starts_again_asks_the_routers_for_the_name_servers() {
    in_namespace(|wire| async move {
        wire.cable(true).await;
        let (service, _owner) = wire.service(with_ipv6(parameters::Ipv6::Slaac));
        let again = service.clone();
        let servers = watch::Sender::new(name_server(NAME_SERVER_V6, 1800));
        let named = |s: &Status| s.primary.is_some() && s.nameservers == [NAME_SERVER_V6];
        let story = while_running(service, async |mut status| {
            until(&mut status, named).await;
        });
        tokio::select! {
            () = advertise_servers(&wire, 0, PREFIX_FOR_ADDRESSES, &servers) => {}
            () = story => {}
        }
        // The router says nothing any longer unless it is asked.
        let (kind, flags) = (SocketType::RAW, SocketFlags::NONBLOCK | SocketFlags::CLOEXEC);
        let icmp = Some(net::ipproto::ICMPV6);
        let socket = net::socket_with(AddressFamily::INET6, kind, flags, icmp).unwrap();
        let socket = UdpSocket::from_std(socket.into()).unwrap();
        let routers = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 2);
        socket.join_multicast_v6(&routers, wire.index("wire").await).unwrap();
        let asked = async {
            let mut message = [0; 1500];
            while message[0] != 133 {
                socket.recv(&mut message).await.unwrap();
            }
        };
        let story = while_running(again, async |mut status| {
            asked.await;
            let advertise = advertise_servers(&wire, 0, PREFIX_FOR_ADDRESSES, &servers);
            tokio::select! {
                () = advertise => {}
                _status = until(&mut status, named) => {}
            }
        });
        story.await;
    });
}

#[test]
fn dhcpv6_alone_takes_no_address_of_a_prefix_and_needs_no_flag() {
    in_namespace(|wire| async move {
        wire.cable(true).await;
        let (service, _owner) = wire.service(with_ipv6(parameters::Ipv6::Dhcpv6));
        let (asked, silent) = (watch::Sender::default(), watch::Sender::new(false));
        let story = while_running(service, async |mut status| {
            let status = until(&mut status, |s| s.primary.is_some()).await;
            assert_eq!(status.primary, Some(LEASED_V6.into()));
            let addresses = &status.interfaces[0].addresses;
            assert_eq!(*addresses, [Cidr::new(LEASED_V6.into(), 128).unwrap()]);
        });
        tokio::select! {
            () = advertise_with(&wire, 0, PREFIX_FOR_ADDRESSES) => {}
            () = serve_v6(&wire, 20, &asked, &silent) => {}
            () = story => {}
        }
    });
}

#[test]
fn an_address_by_dhcpv6_that_another_machine_has_is_declined() {
    in_namespace(|wire| async move {
        wire.cable(true).await;
        let other = wire.index("wire").await;
        let mut request = wire.handle.address().add(other, LEASED_V6.into(), 128);
        // Held at once: while both ends examined it, the service's question could make this end
        // give way, and the service would keep the address.
        request.message_mut().attributes.push(AddressAttribute::Flags(AddressFlags::Nodad));
        request.execute().await.unwrap();
        let (service, _owner) = wire.service(with_ipv6(parameters::Ipv6::Dhcpv6));
        let (asked, silent) = (watch::Sender::default(), watch::Sender::new(false));
        let story = while_running(service, async |mut status| {
            let mut asked = asked.subscribe();
            let declined = |all: &Vec<u8>| all.contains(&9).then_some(());
            event::until(&mut asked, "a decline", declined).await.unwrap();
            let none = |s: &Status| s.interfaces.iter().all(|link| link.leased_v6.is_none());
            let status = until(&mut status, none).await;
            assert_eq!(status.primary, None);
        });
        tokio::select! {
            () = advertise_with(&wire, 0, PREFIX) => {}
            () = serve_v6(&wire, 20, &asked, &silent) => {}
            () = story => {}
        }
    });
}
