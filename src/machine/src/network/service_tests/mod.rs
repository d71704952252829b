//! The service against the kernel: each test has a network namespace of its own,
//! with a cable (a veth pair) from `eth0` to a server's `wire`.
//!
//! They need root, and print that instead of failing without it.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddrV4, SocketAddrV6};
use std::sync::Arc;
use std::time::Duration;

use futures::TryStreamExt as _;
use netlink_packet_route::address::{AddressAttribute, AddressFlags};
use rtnetlink::{Handle, LinkUnspec, LinkVeth};
use rustix::net::{self, AddressFamily, SocketFlags, SocketType, sockopt};
use rustix::thread::UnshareFlags;
use tokio::net::UdpSocket;
use tokio::sync::watch;
use tokio::time::Instant;

use super::{Config, Interfaces, Order, Service, Status};
use crate::parameters::{self, Card, Cidr, Known, LinkSettings, Loaded, Match};
use polis_base::files::File;
use polis_base::stage::{Stage, State};
use polis_runtime::event;
use polis_runtime::supervisor::Context;

mod cables;

/// Far above what anything here takes, also on a busy machine.
const PATIENCE: Duration = Duration::from_secs(30);

/// The service's ends of the cables.
const INTERFACES: Interfaces = Interfaces::Named("eth");

const LEASED: Ipv4Addr = Ipv4Addr::new(10, 7, 0, 15);
const SERVER: Ipv4Addr = Ipv4Addr::new(10, 7, 0, 1);

/// Enters a new network namespace and runs the story there, or skips it.
fn in_namespace<F: Future<Output = ()>>(story: impl FnOnce(Wire) -> F) {
    #[expect(deprecated, reason = "the other one is unsafe because of flags that are not used")]
    let entered = rustix::thread::unshare(UnshareFlags::NEWNET);
    if let Err(error) = entered {
        eprintln!("skipped: a network namespace needs root ({error})");
        return;
    }
    // One thread: another would be in the namespace that it was started in.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let (connection, handle, _) = rtnetlink::new_connection().unwrap();
        let story = async {
            handle.link().add(LinkVeth::new("eth0", "wire").build()).execute().await.unwrap();
            let folder = tempfile::tempdir().unwrap();
            let (order, proof, asks) = Default::default();
            story(Wire { handle, folder, order, proof, asks }).await;
        };
        tokio::select! {
            () = connection => panic!("the kernel closed the socket"),
            loaded = tokio::time::timeout(PATIENCE, story) => loaded.expect("the story ends in time"),
        }
    });
}

struct Wire {
    handle: Handle,
    folder: tempfile::TempDir,
    order: watch::Sender<Option<Order>>,
    proof: watch::Sender<Option<Instant>>,
    asks: watch::Sender<parameters::Asking>,
}

impl Wire {
    async fn index(&self, name: &str) -> u32 {
        let mut found = self.handle.link().get().match_name(name).execute();
        found.try_next().await.unwrap().unwrap().header.index
    }

    /// Plugs the other end of the cable in, or pulls it out.
    async fn cable(&self, plugged: bool) {
        let wire = LinkUnspec::new_with_index(self.index("wire").await);
        let wire = if plugged { wire.up() } else { wire.down() };
        self.handle.link().set(wire.build()).execute().await.unwrap();
    }

    /// Plugs the cable in with both ends up, and waits until both send: the kernel drops what is
    /// sent right after a new carrier.
    async fn settled_cable(&self) {
        let eth0 = LinkUnspec::new_with_index(self.index("eth0").await).up().build();
        self.handle.link().set(eth0).execute().await.unwrap();
        self.cable(true).await;
        for end in ["eth0", "wire"] {
            // Before it answers about a link, the kernel has it send.
            self.index(end).await;
        }
    }

    fn service(&self, known: Known) -> (Service, watch::Sender<Known>) {
        let (owner, known) = watch::channel(known);
        let config = Config {
            interfaces: INTERFACES,
            sys: "/sys".into(),
            // Says nothing of a date, and the code's own is past.
            resolv_conf: File::public(self.folder.path().join("resolv.conf")),
            record: File::public(self.folder.path().join("network.pb")),
        };
        let (order, proof) = (self.order.subscribe(), self.proof.subscribe());
        let (asks, status) = (self.asks.subscribe(), watch::Sender::new(Status::default()));
        (Service { config, known, order, proof, asks, status }, owner)
    }

    fn resolv_conf(&self) -> String {
        std::fs::read_to_string(self.folder.path().join("resolv.conf")).unwrap()
    }
}

/// Parameters with this network; their cluster plays no part here.
fn loaded(network: parameters::Network) -> Known {
    let cluster = parameters::Cluster::Bootstrap(parameters::Bootstrap {
        owner_public_key: [0; 32],
        configuration: parameters::ClusterConfiguration::default(),
        labels: Default::default(),
        name: None,
    });
    let parameters = parameters::Parameters {
        cluster,
        network,
        console_tui: Vec::new(),
        wipes: None,
        install: None,
        mirror: None,
        volumes: Vec::new(),
    };
    let found = Some((parameters, parameters::Source::Esp));
    Some(Arc::new(Loaded { found, warning: None, tried: Vec::new() }))
}

/// Runs the service while the story goes on.
async fn while_running(service: Service, story: impl AsyncFnOnce(watch::Receiver<Status>)) {
    let status = service.status.subscribe();
    let (ctx, _handles) = Context::for_test();
    tokio::select! {
        ended = service.run(ctx) => panic!("{ended:?}"),
        () = story(status) => {}
    }
}

async fn until(status: &mut watch::Receiver<Status>, found: impl Fn(&Status) -> bool) -> Status {
    event::until(status, "network", |s| found(s).then(|| s.clone())).await.unwrap()
}

/// A socket of a server on this wire; several share the port.
fn server(wire: &str) -> UdpSocket {
    let (family, flags) = (AddressFamily::INET, SocketFlags::NONBLOCK | SocketFlags::CLOEXEC);
    let socket = net::socket_with(family, SocketType::DGRAM, flags, None).unwrap();
    sockopt::set_socket_reuseaddr(&socket, true).unwrap();
    sockopt::set_socket_broadcast(&socket, true).unwrap();
    net::bind(&socket, &SocketAddrV4::new(Ipv4Addr::UNSPECIFIED, 67)).unwrap();
    let socket = UdpSocket::from_std(socket.into()).unwrap();
    socket.bind_device(Some(wire.as_bytes())).unwrap();
    socket
}

/// The server of most tests, on `wire`.
async fn serve(lifetime: u32) {
    serve_on("wire", LEASED, Some(SERVER), lifetime).await;
}

/// The least that a DHCP server can be: one address for everyone, with a way out or without.
async fn serve_on(wire: &str, leased: Ipv4Addr, way_out: Option<Ipv4Addr>, lifetime: u32) {
    let socket = server(wire);
    let mut options: Vec<u8> = Vec::new();
    if let Some(way_out) = way_out {
        options.extend([3, 4]);
        options.extend(way_out.octets());
    }
    options.extend([51, 4]);
    options.extend(lifetime.to_be_bytes());
    let mut asked = [0; 1500];
    loop {
        let length = socket.recv(&mut asked).await.unwrap();
        let Some(kind) = kind(&asked[..length]) else { continue };
        let answer = if kind == DISCOVER { OFFER } else { ACK };
        let reply = reply(&asked, answer, leased, &options);
        socket.send_to(&reply, (Ipv4Addr::BROADCAST, 68)).await.unwrap();
    }
}

/// A server that gives `first`, is asked to renew it after a second and to rebind it after two,
/// and takes it back then: it has `second` instead.
async fn serve_and_take_back(first: Ipv4Addr, second: Ipv4Addr) {
    let socket = server("wire");
    // The lease lasts an hour.
    let options = [51, 4, 0, 0, 14, 16, 58, 4, 0, 0, 0, 1, 59, 4, 0, 0, 0, 2];
    let mut leased = first;
    let mut asked = [0; 1500];
    loop {
        let length = socket.recv(&mut asked).await.unwrap();
        let Some(kind) = kind(&asked[..length]) else { continue };
        // A client that has an address names it.
        let answer = if asked[12..16] == [0; 4] {
            if kind == DISCOVER { OFFER } else { ACK }
        } else {
            leased = second;
            NAK
        };
        let reply = reply(&asked, answer, leased, &options);
        socket.send_to(&reply, (Ipv4Addr::BROADCAST, 68)).await.unwrap();
    }
}

const DISCOVER: u8 = 1;
const OFFER: u8 = 2;
const ACK: u8 = 5;
const NAK: u8 = 6;

/// The kind of a message of a DHCP client.
fn kind(asked: &[u8]) -> Option<u8> {
    asked[240..].windows(3).find(|option| option[..2] == [53, 1]).map(|option| option[2])
}

/// An answer of this kind to the question, for this address.
fn reply(asked: &[u8], kind: u8, leased: Ipv4Addr, options: &[u8]) -> Vec<u8> {
    let mut reply = vec![0; 240];
    reply[..4].copy_from_slice(&[2, 1, 6, 0]);
    reply[4..8].copy_from_slice(&asked[4..8]);
    reply[16..20].copy_from_slice(&leased.octets());
    reply[28..44].copy_from_slice(&asked[28..44]);
    reply[236..].copy_from_slice(&asked[236..240]);
    reply.extend([53, 1, kind, 1, 4, 255, 255, 255, 0]);
    for option in [54, 6] {
        reply.extend([option, 4]);
        reply.extend(SERVER.octets());
    }
    reply.extend(options);
    reply.push(255);
    reply
}

#[test]
fn dhcp_gives_the_address_the_way_out_and_the_name_server() {
    in_namespace(|wire| async move {
        wire.cable(true).await;
        let (service, _owner) = wire.service(loaded(parameters::Network::default()));
        while_running(service, async |mut status| {
            let story = async {
                let status = until(&mut status, |s| s.primary.is_some()).await;
                assert_eq!(status.primary, Some(IpAddr::V4(LEASED)));
                assert_eq!(status.gateway, Some(IpAddr::V4(SERVER)));
                assert_eq!(wire.resolv_conf(), "nameserver 10.7.0.1\n");
                assert_eq!(status.interfaces.len(), 1, "{:?}", status.interfaces);
                assert_eq!(status.interfaces[0].addresses.len(), 1);
            };
            tokio::select! { () = serve(3600) => {}, () = story => {} }
        })
        .await;
    });
}

#[test]
fn an_address_that_its_server_takes_back_gives_way_to_another_before_its_lease_ends() {
    in_namespace(|wire| async move {
        wire.cable(true).await;
        let (service, _owner) = wire.service(loaded(parameters::Network::default()));
        let other = Ipv4Addr::new(10, 7, 0, 16);
        while_running(service, async |mut status| {
            let story = async {
                until(&mut status, |s| s.primary == Some(IpAddr::V4(LEASED))).await;
                let status = until(&mut status, |s| s.primary == Some(IpAddr::V4(other))).await;
                assert_eq!(status.addresses(), [IpAddr::V4(other)], "the first one is gone");
            };
            tokio::select! { () = serve_and_take_back(LEASED, other) => {}, () = story => {} }
        })
        .await;
    });
}

/// A server that wants its lease renewed after a second; returns after what time it was asked.
async fn serve_without_patience() -> Duration {
    let socket = server("wire");
    // The lease lasts an hour; it is to be renewed after one second, and rebound after two.
    let options = [51, 4, 0, 0, 14, 16, 58, 4, 0, 0, 0, 1, 59, 4, 0, 0, 0, 2];
    let (mut asked, mut leased) = ([0; 1500], None);
    loop {
        let length = socket.recv(&mut asked).await.unwrap();
        let Some(kind) = kind(&asked[..length]) else { continue };
        // A client that has an address names it.
        if let Some(since) = leased
            && asked[12..16] != [0; 4]
        {
            return Instant::elapsed(&since);
        }
        let answer = if kind == DISCOVER { OFFER } else { ACK };
        if answer == ACK {
            leased = Some(Instant::now());
        }
        let reply = reply(&asked, answer, LEASED, &options);
        socket.send_to(&reply, (Ipv4Addr::BROADCAST, 68)).await.unwrap();
    }
}

#[test]
fn a_lease_is_not_renewed_within_five_seconds_whatever_its_server_says() {
    in_namespace(|wire| async move {
        wire.cable(true).await;
        let (service, _owner) = wire.service(loaded(parameters::Network::default()));
        while_running(service, async |_status| {
            let waited = serve_without_patience().await;
            assert!(waited >= super::dhcp::RENEW_MIN, "{waited:?}");
        })
        .await;
    });
}

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
        let observed = super::observe::observe(&wire.handle, INTERFACES).await.unwrap();
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

#[test]
fn a_late_cable_is_as_good_as_an_early_one() {
    in_namespace(|wire| async move {
        let (service, _owner) = wire.service(loaded(parameters::Network::default()));
        while_running(service, async |mut status| {
            let unplugged = until(&mut status, |s| !s.interfaces.is_empty()).await;
            assert!(unplugged.waiting.unwrap().contains("plug in the cable"));
            assert!(!unplugged.interfaces[0].asking);
            wire.cable(true).await;
            tokio::select! {
                () = serve(3600) => {}
                _ = until(&mut status, |s| s.primary.is_some()) => {}
            }
        })
        .await;
    });
}

#[test]
fn nothing_is_asked_before_the_parameters_are_known() {
    in_namespace(|wire| async move {
        wire.cable(true).await;
        let (service, owner) = wire.service(None);
        while_running(service, async |mut status| {
            let status_now = until(&mut status, |s| s.interfaces.iter().any(|i| i.carrier)).await;
            assert!(status_now.interfaces.iter().all(|i| !i.asking));
            owner.send_replace(loaded(parameters::Network::default()));
            until(&mut status, |s| s.interfaces.iter().any(|i| i.asking)).await;
        })
        .await;
    });
}

#[test]
fn parameters_that_are_asked_for_over_dhcp_replace_its_network_by_theirs() {
    in_namespace(|wire| async move {
        wire.cable(true).await;
        let (service, owner) = wire.service(None);
        wire.asks.send_replace(true);
        while_running(service, async |mut status| {
            let story = async {
                let by_dhcp = until(&mut status, |s| s.primary.is_some()).await;
                assert_eq!(by_dhcp.primary, Some(IpAddr::V4(LEASED)));
                // Parameters without a network change nothing.
                owner.send_replace(loaded(parameters::Network::default()));
                wire.asks.send_replace(false);
                tokio::task::yield_now().await;
                assert_eq!(status.borrow().primary, Some(IpAddr::V4(LEASED)));
            };
            tokio::select! { () = serve(3600) => {}, () = story => {} }
        })
        .await;
    });
    in_namespace(|wire| async move {
        wire.cable(true).await;
        let (service, owner) = wire.service(None);
        wire.asks.send_replace(true);
        while_running(service, async |mut status| {
            let story = async {
                until(&mut status, |s| s.primary.is_some()).await;
                let own: Cidr = "192.0.2.7/24".parse().unwrap();
                owner.send_replace(loaded(fixed("192.0.2.7/24")));
                let status = until(&mut status, |s| {
                    s.interfaces.iter().any(|interface| interface.addresses == [own])
                });
                let status = status.await;
                assert_eq!(status.primary, Some(own.address()));
                assert!(status.interfaces.iter().all(|interface| !interface.asking));
            };
            tokio::select! { () = serve(3600) => {}, () = story => {} }
        })
        .await;
    });
}

#[test]
fn parameters_with_the_address_of_the_lease_before_them_have_it_without_an_end() {
    in_namespace(|wire| async move {
        wire.cable(true).await;
        let (service, owner) = wire.service(None);
        wire.asks.send_replace(true);
        while_running(service, async |mut status| {
            let story = async {
                until(&mut status, |s| s.primary == Some(IpAddr::V4(LEASED))).await;
                owner.send_replace(loaded(fixed("10.7.0.15/24")));
                until(&mut status, |s| s.interfaces.iter().all(|link| !link.asking)).await;
            };
            tokio::select! { () = serve(3600) => {}, () = story => {} }
        })
        .await;
        let observed = super::observe::observe(&wire.handle, INTERFACES).await.unwrap();
        let held = |(_, cidr): &(u32, Cidr)| cidr.address() == IpAddr::V4(LEASED);
        assert!(observed.addresses.iter().any(held));
        assert!(!observed.ending.iter().any(held), "{observed:?}");
    });
}

#[test]
fn a_restarted_service_keeps_the_address_and_gets_it_again() {
    in_namespace(|wire| async move {
        wire.cable(true).await;
        let (service, _owner) = wire.service(loaded(parameters::Network::default()));
        let again = service.clone();
        let served = async {
            while_running(service, async |mut status| {
                until(&mut status, |s| s.primary.is_some()).await;
            })
            .await;
            let observed = super::observe::observe(&wire.handle, INTERFACES).await.unwrap();
            let held = |(_, cidr): &(u32, parameters::Cidr)| cidr.address() == IpAddr::V4(LEASED);
            assert!(observed.addresses.iter().any(held));
            assert!(observed.ending.iter().any(held), "it ends with the lease");
            again.status.send_replace(Status::default());
            while_running(again, async |mut status| {
                until(&mut status, |s| s.primary == Some(IpAddr::V4(LEASED))).await;
            })
            .await;
        };
        tokio::select! { () = serve(3600) => {}, () = served => {} }
    });
}

#[test]
fn a_vanished_interface_takes_the_address_with_it() {
    in_namespace(|wire| async move {
        wire.cable(true).await;
        let (service, _owner) = wire.service(loaded(parameters::Network::default()));
        while_running(service, async |mut status| {
            tokio::select! {
                () = serve(3600) => {}
                _ = until(&mut status, |s| s.primary.is_some()) => {}
            }
            let eth0 = wire.index("eth0").await;
            wire.handle.link().del(eth0).execute().await.unwrap();
            let gone = until(&mut status, |s| s.primary.is_none()).await;
            assert_eq!(gone.gateway, None);
        })
        .await;
    });
}

#[test]
fn the_stage_says_what_it_waits_for_and_then_that_it_is_done() {
    in_namespace(|wire| async move {
        wire.cable(true).await;
        let (service, _owner) = wire.service(loaded(parameters::Network::default()));
        let (ctx, mut handles) = Context::for_test();
        let story = async {
            let state = |stages: &polis_base::stage::Stages| {
                stages.get(&Stage::Network).map(|entry| entry.state.clone())
            };
            event::until(&mut handles.stages, "stages", |s| {
                matches!(state(s), Some(State::Waiting(what)) if what.contains("DHCP"))
                    .then_some(())
            })
            .await
            .unwrap();
            tokio::select! {
                () = serve(3600) => {}
                done = event::until(&mut handles.stages, "stages", |s| {
                    (state(s) == Some(State::Done)).then_some(())
                }) => done.unwrap(),
            }
        };
        tokio::select! {
            ended = service.run(ctx) => panic!("{ended:?}"),
            () = story => {}
        }
    });
}

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

fn eth0(settings: LinkSettings) -> parameters::Network {
    let card = Card { matches: Some(Match::Name("eth0".to_owned())), ..Card::default() };
    let interfaces = vec![parameters::Interface { card, settings }];
    parameters::Network { interfaces, ..parameters::Network::default() }
}

/// `eth0` with this address alone.
fn fixed(address: &str) -> parameters::Network {
    let addresses = vec![address.parse().unwrap()];
    eth0(LinkSettings { addresses, ..LinkSettings::default() })
}

#[test]
fn an_order_is_in_force_at_once_and_confirmed_by_a_later_proof() {
    in_namespace(|wire| async move {
        let (service, _owner) = wire.service(loaded(fixed("192.0.2.7/24")));
        let again = service.clone();
        let new = IpAddr::from([192, 0, 2, 8]);
        while_running(service, async |mut status| {
            until(&mut status, |s| s.primary.is_some()).await;
            let order = Order { number: 7, network: Some(fixed("192.0.2.8/24")) };
            wire.order.send_replace(Some(order));
            let trying = until(&mut status, |s| s.primary == Some(new)).await;
            assert_eq!((trying.change.word(), trying.change.number), ("trying", 7));
            assert_eq!(trying.addresses(), [new], "the former address is gone");
            wire.proof.send_replace(Some(Instant::now()));
            until(&mut status, |s| s.change.word() == "confirmed").await;
        })
        .await;
        // It stays, and the order is not taken up again.
        while_running(again, async |mut status| {
            let status = until(&mut status, |s| s.primary == Some(new)).await;
            assert_eq!(status.change.word(), "confirmed");
        })
        .await;
    });
}

#[test]
fn a_service_that_starts_again_in_a_trial_has_the_former_network() {
    in_namespace(|wire| async move {
        let (service, _owner) = wire.service(loaded(fixed("192.0.2.7/24")));
        let again = service.clone();
        let (old, new) = (IpAddr::from([192, 0, 2, 7]), IpAddr::from([192, 0, 2, 8]));
        while_running(service, async |mut status| {
            until(&mut status, |s| s.primary == Some(old)).await;
            let order = Order { number: 7, network: Some(fixed("192.0.2.8/24")) };
            wire.order.send_replace(Some(order));
            until(&mut status, |s| s.primary == Some(new)).await;
        })
        .await;
        while_running(again, async |mut status| {
            let status = until(&mut status, |s| s.addresses() == [old]).await;
            assert_eq!(status.change.word(), "reverted");
            assert!(status.change.cause.contains("started again"), "{:?}", status.change);
        })
        .await;
    });
}

#[test]
fn an_order_that_the_machine_cannot_have_is_refused_and_changes_nothing() {
    in_namespace(|wire| async move {
        let (service, _owner) = wire.service(loaded(fixed("192.0.2.7/24")));
        while_running(service, async |mut status| {
            until(&mut status, |s| s.primary.is_some()).await;
            let mut network = fixed("192.0.2.8/24");
            network.interfaces[0].card.driver = Some("e1000e".to_owned());
            wire.order.send_replace(Some(Order { number: 7, network: Some(network) }));
            let refused = until(&mut status, |s| s.change.word() == "refused").await;
            assert!(refused.change.cause.contains("there is eth0"), "{:?}", refused.change);
            assert_eq!(refused.primary, Some(IpAddr::from([192, 0, 2, 7])));
        })
        .await;
    });
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
                super::apply::apply(&wire.handle, &super::plan::Action::RemoveAddress(eth0, own))
                    .await
                    .unwrap();
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
        let observed = super::observe::observe(&wire.handle, INTERFACES).await.unwrap();
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
            let observed = super::observe::observe(&wire.handle, INTERFACES).await.unwrap();
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
