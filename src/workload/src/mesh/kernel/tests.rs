//! The mesh against the kernel, in network namespaces of its own.
//!
//! They need root, and print that instead of failing without it. A story with tunnels is
//! skipped, with a word, where the kernel has no WireGuard.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::mpsc;
use std::time::Duration;

use netlink_packet_route::link::InfoKind;
use rtnetlink::{LinkUnspec, LinkVeth};
use rustix::thread::UnshareFlags;
use tokio::net::UdpSocket;
use tokio::time::{sleep, timeout};

use super::super::actions::{Device, Route, actions};
use super::super::plan::{Member, Mesh, plan};
use super::super::{MTU, PublicKey};
use super::*;
use polis_wire::identity::NodeId;
use polis_wire::pod_network::Networks;

/// Far above what anything here takes, also on an emulated processor.
const PATIENCE: Duration = Duration::from_secs(60);

/// Enters a new network namespace with this thread; false if it may not.
fn entered() -> bool {
    #[expect(deprecated, reason = "the other one is unsafe because of flags that are not used")]
    let entered = rustix::thread::unshare(UnshareFlags::NEWNET);
    if let Err(error) = &entered {
        eprintln!("skipped: a network namespace needs root ({error})");
    }
    entered.is_ok()
}

/// Runs a story with the kernel of this thread's namespace.
fn with_kernel(story: impl AsyncFnOnce(&Kernel) -> Result<(), Error>) {
    // One thread: another would be in the namespace that it was started in.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let story = connected(async |kernel| timeout(PATIENCE, story(kernel)).await.unwrap());
    runtime.block_on(story).unwrap();
}

fn key() -> PrivateKey {
    let base = tempfile::tempdir().unwrap();
    let tree = polis_base::files::Root::at(base.path());
    tree.data.mesh.create().unwrap();
    PrivateKey::load_or_make(&tree.data.mesh_key).unwrap()
}

#[test]
fn the_addresses_and_routes_of_an_interface_are_set_read_and_removed() {
    if !entered() {
        return;
    }
    // The kernel of a test host may have no WireGuard; to addresses and routes, one interface
    // is like another.
    with_kernel(async |kernel| {
        let links = &kernel.links;
        let read = async || link::observe(links, InfoKind::Veth).await.unwrap();
        assert_eq!(read().await, Observed::Absent);
        links.link().add(LinkVeth::new(DEVICE, "wire").build()).execute().await.unwrap();
        links.link().set(LinkUnspec::new_with_name("wire").up().build()).execute().await.unwrap();
        let Observed::Device(Device { index, .. }) = read().await else { panic!("it is there") };
        assert_eq!(kernel.observe().await.unwrap(), Observed::Foreign(index));

        let key = key();
        let Networks { pods, services } = Networks::default();
        let own = Ipv4Addr::new(10, 192, 3, 1);
        let route = |destination| Route { destination, source: Some(own) };
        let all = [
            Action::AddAddress(index, own),
            Action::Up(index),
            Action::AddRoute(index, route(pods)),
            Action::AddRoute(index, route(services)),
        ];
        // Twice is once.
        for action in all.iter().chain(&all) {
            kernel.apply(action, &key).await?;
        }
        let Observed::Device(device) = read().await else { panic!("it is there") };
        assert!(device.up);
        assert_eq!(device.mtu, MTU);
        assert_eq!(device.addresses, [(own, 32)].into());
        assert_eq!(device.routes, [route(pods), route(services)].into());

        // Another prefix: the routes are replaced, and not doubled.
        let new = Ipv4Addr::new(10, 192, 9, 1);
        let moved = Route { destination: pods, source: Some(new) };
        let gone = Action::RemoveRoute(index, route(services));
        let all = [
            Action::AddAddress(index, new),
            Action::AddRoute(index, moved),
            gone.clone(),
            gone,
            Action::RemoveAddress(index, own, 32),
            Action::RemoveAddress(index, own, 32),
        ];
        for action in &all {
            kernel.apply(action, &key).await?;
        }
        let Observed::Device(device) = read().await else { panic!("it is there") };
        assert_eq!(device.addresses, [(new, 32)].into());
        assert_eq!(device.routes, [moved].into());

        kernel.delete(index).await?;
        kernel.delete(index).await?;
        assert_eq!(read().await, Observed::Absent);
        Ok(())
    });
}

/// The facts that the two machines of the story know of each other.
#[derive(Clone, Copy)]
struct Known {
    keys: [PublicKey; 2],
}

fn address(machine: u8) -> Ipv4Addr {
    Ipv4Addr::new(10, 0, 2, machine + 1)
}

fn id(machine: u8) -> NodeId {
    NodeId::from_public_key(&[machine + 1; 32])
}

fn mesh(machine: u8, known: Known) -> Mesh {
    let member = |machine: u8| Member {
        key: known.keys[usize::from(machine)],
        prefix: format!("10.192.{machine}.0/24").parse().unwrap(),
        address: Some(IpAddr::V4(address(machine))),
    };
    let members: BTreeMap<_, _> = [0, 1].map(|machine| (id(machine), member(machine))).into();
    plan(id(machine), Networks::default(), &members).0.unwrap()
}

/// Applies until there is nothing to do; returns the device, and the number of actions.
async fn settle(
    kernel: &Kernel,
    mesh: Option<&Mesh>,
    key: &PrivateKey,
) -> Result<(Observed, usize), Error> {
    let mut done = 0;
    loop {
        let observed = kernel.observe().await?;
        let actions = actions(&observed, mesh.map(|mesh| (mesh, key.public())));
        if actions.is_empty() {
            return Ok((observed, done));
        }
        for action in &actions {
            kernel.apply(action, key).await?;
        }
        done += actions.len();
        assert!(done < 20, "it does not settle: {actions:?}");
    }
}

async fn device(kernel: &Kernel) -> Device {
    let Observed::Device(device) = kernel.observe().await.unwrap() else { panic!("no device") };
    device
}

/// Gives `name` its address and switches it on.
async fn cable(kernel: &Kernel, name: &str, machine: u8) {
    let links = &kernel.links;
    let request = links.link().get().match_name(name.to_owned()).execute();
    let message = futures::TryStreamExt::try_next(&mut Box::pin(request)).await.unwrap().unwrap();
    let index = message.header.index;
    let own = IpAddr::V4(address(machine));
    links.address().add(index, own, 24).execute().await.unwrap();
    links.link().set(LinkUnspec::new_with_index(index).up().build()).execute().await.unwrap();
}

/// Whether this kernel has WireGuard.
fn has_wireguard() -> bool {
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || {
        if !entered() {
            return;
        }
        with_kernel(async |kernel| {
            let made = kernel.apply(&Action::Create, &key()).await;
            if let Err(error) = &made {
                assert!(matches!(error, Error::Unsupported(_)), "{error:?}");
                eprintln!("skipped: {error}");
            }
            sender.send(made.is_ok()).unwrap();
            Ok(())
        });
    });
    receiver.recv().unwrap_or(false)
}

/// The second machine: echoes what arrives at its address in the mesh.
fn echoes(
    own: PrivateKey,
    known: Known,
    cable_in: mpsc::Sender<u32>,
    plugged: mpsc::Receiver<()>,
    serves: mpsc::Sender<()>,
) {
    assert!(entered());
    cable_in.send(rustix::thread::gettid().as_raw_nonzero().get().unsigned_abs()).unwrap();
    plugged.recv().unwrap();
    with_kernel(async |kernel| {
        cable(kernel, "wire", 1).await;
        let mesh = mesh(1, known);
        settle(kernel, Some(&mesh), &own).await?;
        let socket = UdpSocket::bind((mesh.address, 7)).await.unwrap();
        serves.send(()).unwrap();
        let mut packet = [0; 64];
        loop {
            let (length, from) = socket.recv_from(&mut packet).await.unwrap();
            // From the address of the peer in the mesh, so the answer takes the tunnel, too.
            assert_eq!(from.ip(), IpAddr::V4(Ipv4Addr::new(10, 192, 0, 1)));
            socket.send_to(&packet[..length], from).await.unwrap();
            if &packet[..length] == b"end" {
                assert_eq!(device(kernel).await.handshakes().count(), 1);
                return Ok(());
            }
        }
    });
}

/// Sends `text` through the mesh until it comes back.
async fn echo(socket: &UdpSocket, text: &str) {
    let there = SocketAddr::from(([10, 192, 1, 1], 7));
    let mut packet = [0; 64];
    loop {
        socket.send_to(text.as_bytes(), there).await.unwrap();
        let Ok(received) = timeout(Duration::from_secs(2), socket.recv(&mut packet)).await else {
            continue;
        };
        if &packet[..received.unwrap()] == text.as_bytes() {
            return;
        }
    }
}

#[test]
fn two_machines_talk_through_their_tunnel_and_keep_their_session() {
    if !has_wireguard() || !entered() {
        return;
    }
    let keys = [key(), key()];
    let known = Known { keys: [keys[0].public(), keys[1].public()] };
    let [own, other] = keys;
    let (cable_in, other_thread) = mpsc::channel();
    let (plug, plugged) = mpsc::channel();
    let (serves, served) = mpsc::channel();
    let machine = std::thread::spawn(move || echoes(other, known, cable_in, plugged, serves));
    let thread = other_thread.recv().unwrap();
    with_kernel(async |kernel| {
        let links = &kernel.links;
        links.link().add(LinkVeth::new("eth0", "wire").build()).execute().await.unwrap();
        let there = LinkUnspec::new_with_name("wire").setns_by_pid(thread).build();
        links.link().set(there).execute().await.unwrap();
        cable(kernel, "eth0", 0).await;
        plug.send(()).unwrap();
        let mut wanted = mesh(0, known);
        settle(kernel, Some(&wanted), &own).await?;
        while served.try_recv().is_err() {
            sleep(Duration::from_millis(20)).await;
        }
        let socket = UdpSocket::bind((wanted.address, 0)).await.unwrap();
        echo(&socket, "one").await;
        let shaken: Vec<_> = device(kernel).await.handshakes().collect();
        let [(peer, Some(endpoint), at)] = shaken[..] else { panic!("{shaken:?}") };
        assert_eq!((peer, endpoint), (known.keys[1], SocketAddr::from((address(1), 7838))));

        // A second look finds nothing to do; a third node is one action, and the session stays.
        assert_eq!(settle(kernel, Some(&wanted), &own).await?.1, 0);
        let stranger = PublicKey::new([7; 32]).unwrap();
        let newcomer = super::super::Peer {
            key: stranger,
            endpoint: None,
            allowed: "10.192.7.0/24".parse().unwrap(),
            keepalive: Some(25),
        };
        wanted.peers.insert(stranger, newcomer);
        assert_eq!(settle(kernel, Some(&wanted), &own).await?.1, 1);
        echo(&socket, "two").await;
        let shaken: Vec<_> = device(kernel).await.handshakes().collect();
        assert_eq!(shaken, [(peer, Some(endpoint), at)]);
        echo(&socket, "end").await;

        let (observed, done) = settle(kernel, None, &own).await?;
        assert_eq!((observed, done), (Observed::Absent, 1));
        Ok(())
    });
    machine.join().unwrap();
}
