//! The service against the kernel: each test has a network namespace of its own,
//! with a cable (a veth pair) from `eth0` to a server's `wire`.
//!
//! They need root, and print that instead of failing without it.

mod addresses;
mod cables;
mod dhcp;
mod dhcp_server;
mod ipv6;
mod orders;

use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::Duration;

use futures::TryStreamExt as _;
use rtnetlink::{Handle, LinkUnspec, LinkVeth};
use rustix::thread::UnshareFlags;
use tokio::sync::watch;
use tokio::time::Instant;

use super::{Config, Interfaces, Order, Service, Status};
use crate::parameters::{self, Card, Known, LinkSettings, Loaded, Match};
use polis_base::files::File;
use polis_runtime::event;
use polis_runtime::supervisor::Context;

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
