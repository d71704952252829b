//! The rules in a kernel: each test has a network namespace of its own.
//!
//! They need root and `nft`, and print that instead of failing without them.

use std::io::{ErrorKind, Write as _};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rtnetlink::LinkUnspec;
use rustix::thread::UnshareFlags;

use super::rules::{Metadata, Rules};
use super::{counters, text};

const NFT: &str = "/usr/sbin/nft";

/// A connection on loopback is there at once, or its packets are dropped.
const CONNECT: Duration = Duration::from_millis(300);

/// The metadata services, which are addresses of loopback here.
const SERVICES: [&str; 3] = ["169.254.169.254", "168.63.129.16", "fd00:ec2::254"];

/// Enters a new network namespace with the addresses of metadata services, unless it cannot.
fn entered() -> bool {
    if !std::path::Path::new(NFT).exists() {
        eprintln!("skipped: there is no {NFT}");
        return false;
    }
    #[expect(deprecated, reason = "the other one is unsafe because of flags that are not used")]
    let entered = rustix::thread::unshare(UnshareFlags::NEWNET);
    if let Err(error) = entered {
        eprintln!("skipped: a network namespace needs root ({error})");
        return false;
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let (connection, handle, _) = rtnetlink::new_connection().unwrap();
        let made = async {
            handle.link().set(LinkUnspec::new_with_index(1).up().build()).execute().await.unwrap();
            for address in SERVICES {
                let address: IpAddr = address.parse().unwrap();
                let bits = if address.is_ipv4() { 32 } else { 128 };
                handle.address().add(1, address, bits).execute().await.unwrap();
            }
        };
        tokio::select! {
            () = connection => panic!("the kernel closed the socket"),
            () = made => {}
        }
    });
    true
}

#[expect(clippy::disallowed_methods, reason = "the rule is for the node; this runs on the host")]
fn nft(arguments: &[&str], input: &str) -> Vec<u8> {
    let mut nft = Command::new(NFT);
    nft.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut nft = nft.spawn().unwrap();
    nft.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    let output = nft.wait_with_output().unwrap();
    assert!(output.status.success(), "{input}");
    output.stdout
}

/// The kernel takes up an address of IPv6 a moment after it was added.
fn bound(address: SocketAddr) -> TcpListener {
    let end = Instant::now() + Duration::from_secs(10);
    loop {
        match TcpListener::bind(address) {
            Err(error) if error.kind() == ErrorKind::AddrNotAvailable && Instant::now() < end => {
                std::thread::yield_now();
            }
            bound => return bound.unwrap(),
        }
    }
}

fn dropped() -> u64 {
    counters::read(&nft(&["--json", "list", "table", "inet", text::TABLE], "")).unwrap().dropped
}

#[test]
fn no_process_reaches_a_metadata_service_unless_the_node_asks_it() {
    if !entered() {
        return;
    }
    let listeners = SERVICES.map(|address| {
        let address: IpAddr = address.parse().unwrap();
        bound(SocketAddr::new(address, 80))
    });
    let reached = |listener: &TcpListener| {
        TcpStream::connect_timeout(&listener.local_addr().unwrap(), CONNECT).is_ok()
    };
    for (metadata, open) in
        [(Metadata::Closed, false), (Metadata::Asked, true), (Metadata::Closed, false)]
    {
        nft(&["-f", "-"], &text::text(&Rules { metadata, ..Rules::default() }));
        for listener in &listeners {
            let before = dropped();
            assert_eq!(reached(listener), open, "{listener:?}, {metadata:?}");
            assert_eq!(dropped() > before, !open, "{listener:?}, {metadata:?}");
        }
    }
    // Names and time come from the same addresses, and other ports are not theirs.
    let names = UdpSocket::bind("169.254.169.254:53").unwrap();
    names.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    let client = UdpSocket::bind("169.254.169.254:0").unwrap();
    client.send_to(b"?", "169.254.169.254:53").unwrap();
    assert_eq!(names.recv(&mut [0; 8]).unwrap(), 1);
    let other = TcpListener::bind("169.254.169.254:8080").unwrap();
    assert!(reached(&other));
}
