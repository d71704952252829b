//! Builds every service of the node and hands event values over.
//!
//! Only this file knows them all. Nothing is ordered here by hand but the stop:
//! what is started last is stopped first. Each service waits for the event
//! values that it needs, so whatever can start early does.
//!
//! ```text
//! parameters --> network --> names          storage
//!      |            |          ^   \       ^   |
//!      |            v          |    \wanted|   | mounted
//!      +-------> cluster --identity--> ----+   |
//!                   | \--orders--> consensus <-+
//!                   v                  v
//!              credentials --> curator <---> liaison
//!                   |            |          management
//!                   +--> roles <-+ ----> ready            console watches all
//! ```

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use tokio::sync::watch;

use crate::logtree::{kernel, ring};
use crate::network::{self, names};
use crate::node::environment::Environment;
use crate::node::exercise::{self, Exercise};
use crate::node::fault::{self, Fault};
use crate::node::{heartbeat, logs};
use crate::roles::{self, memory};
use crate::rpc::client::{Client, Patience};
use crate::supervisor::{Context, Policy};
use crate::sys::efivar;
use crate::sys::reboot::Reason;
use crate::{
    cluster, consensus, console, curator, files, liaison, management, parameters, recovery, rpc,
    storage,
};

/// What the root service needs.
#[derive(Clone, Debug)]
pub struct Root {
    /// What `init` told.
    pub environment: Environment,
    /// The recovery key of the disk, if somebody gave it to this machine.
    pub recovery: recovery::Given,
    /// What to break on purpose.
    pub fault: Option<Fault>,
    /// Becomes true when the node is ready.
    pub ready: watch::Sender<bool>,
    /// Changes as long as the runtime runs.
    pub beats: watch::Sender<u64>,
    /// The terminals that carry the console: `init` shows a failure there.
    pub terminals: watch::Sender<Vec<String>>,
    /// How the machine is asked to end, in order. Whoever asks logs it, and who wanted it.
    pub end: watch::Sender<Option<Reason>>,
}

/// Starts every service, then waits.
///
/// # Errors
///
/// None: only a child's death can end it.
pub async fn run(root: Root, ctx: Context) -> Result<(), std::convert::Infallible> {
    let Root { environment, recovery, fault, ready, beats, terminals, end } = root;
    let tree = files::Root::live();

    let known = watch::Sender::new(None);
    let addresses = watch::Sender::<network::Status>::default();
    let mounted = watch::Sender::new(storage::Status::Starting);
    let health = watch::Sender::default();
    let (wanted, kind) = watch::channel(None);
    let (orders, ordered) = watch::channel(None);
    let identity = watch::Sender::new(None);
    let peers = watch::Sender::default();
    let standing = watch::Sender::<cluster::Status>::default();
    let credentials = watch::Sender::new(None);
    let access = watch::Sender::new(Arc::<rpc::Standing>::default());
    // A table that cannot be read lets nobody in.
    let table = Arc::new(rpc::Table::polis().unwrap_or_else(|unreadable| {
        tracing::error!(error = &unreadable as &dyn std::error::Error, "nothing is served");
        rpc::Table::default()
    }));

    let member = consensus::Service::new(consensus::Config::live(&tree), ordered);
    let kernel = kernel::Service { tree: ctx.logs().clone() };
    let storage = storage::Service {
        config: storage::Config {
            disk: environment.disk.clone(),
            root: tree.clone(),
            mount_options: storage::machine::MOUNT_OPTIONS,
        },
        wanted: kind,
        status: mounted.clone(),
        health: health.clone(),
    };
    let logs = logs::Service {
        image: environment.image.clone(),
        storage: mounted.subscribe(),
        status: watch::Sender::<ring::Status>::default(),
    };
    let parameters = parameters::Service {
        config: parameters::Config { sys: PathBuf::from("/sys"), esp: tree.esp.parameters.clone() },
        known: known.clone(),
    };
    let network = network::Service {
        config: network::Config {
            interfaces: network::Interfaces::Hardware,
            sys: PathBuf::from("/sys"),
            os_release: PathBuf::from("/etc/os-release"),
            resolv_conf: tree.ephemeral.resolv_conf.clone(),
        },
        known: known.subscribe(),
        status: addresses.clone(),
    };
    let names = names::Service {
        config: names::Config {
            hosts: tree.ephemeral.hosts.clone(),
            hostname: tree.ephemeral.hostname.clone(),
            machine_id: tree.ephemeral.machine_id.clone(),
            kernel: names::Kernel::Set,
        },
        identity: identity.subscribe(),
        network: addresses.subscribe(),
        peers: peers.subscribe(),
        status: watch::Sender::default(),
    };
    let own = cluster::credentials::Service {
        files: tree.data.node.credentials.clone(),
        cluster: standing.subscribe(),
        credentials: credentials.clone(),
    };
    let curator = curator::Service {
        config: curator::Config::live(),
        identity: identity.subscribe(),
        consensus: member.status(),
        members: member.members(),
        network: addresses.subscribe(),
        credentials: credentials.subscribe(),
        metrics: Arc::new(rpc::Metrics::new(&table)),
        table: Arc::clone(&table),
        standing: access.clone(),
        directory: watch::Sender::default(),
        status: watch::Sender::default(),
    };
    let candidates = watch::Sender::default();
    let report = watch::Sender::default();
    let nodes = watch::Sender::default();
    let found = watch::Sender::default();
    let places = cluster::peers::Service {
        directory: tree.esp.cluster_directory.clone(),
        nodes: nodes.subscribe(),
        found: found.subscribe(),
        peers: peers.clone(),
    };
    let liaison = liaison::Service {
        config: liaison::Config::live(&tree),
        client: Client::new(candidates.subscribe(), credentials.subscribe(), Patience::default())
            .wary(access.subscribe()),
        inputs: liaison::Inputs {
            environment: environment.clone(),
            consensus: member.status(),
            network: addresses.subscribe(),
            storage: mounted.subscribe(),
            parameters: known.subscribe(),
            found: found.subscribe(),
        },
        outputs: liaison::Outputs {
            report: report.clone(),
            candidates,
            nodes: nodes.clone(),
            roles: watch::Sender::default(),
            standing: access.clone(),
            credentials: credentials.clone(),
            cluster: standing.clone(),
            contact: watch::Sender::default(),
        },
    };
    let beacon = cluster::beacon::Service {
        key: tree.data.node.credentials.key.clone(),
        identity: identity.subscribe(),
        consensus: member.status(),
        leader: liaison.client.leader_id(),
        network: addresses.subscribe(),
        peers: peers.subscribe(),
        found,
    };
    let enlisting = roles::enlist::Service {
        data: tree.data.clone(),
        client: liaison.client.clone(),
        nodes: nodes.subscribe(),
        network: addresses.subscribe(),
        consensus: member.status(),
        orders: orders.clone(),
        cluster: standing.clone(),
    };
    let cluster = cluster::Service {
        config: cluster::Config {
            root: tree,
            probe: cluster::Probe::default(),
            chip: Arc::new(cluster::vault::Machine { dev: PathBuf::from("/dev") }),
            efivars: PathBuf::from(efivar::DIRECTORY),
            recovery: recovery.clone(),
        },
        parameters: known.subscribe(),
        storage: mounted.subscribe(),
        network: addresses.subscribe(),
        consensus: member.status(),
        wanted,
        identity: identity.clone(),
        orders,
        desk: watch::Sender::default(),
        status: standing.clone(),
    };
    let roles = roles::Service {
        image: environment.image.clone(),
        cluster: standing.subscribe(),
        consensus: member.status(),
        curator: curator.status.subscribe(),
        leader: liaison.client.leader_id(),
        network: addresses.subscribe(),
        ready: ready.clone(),
    };

    let cluster_nodes = watch::Sender::<console::ClusterNodes>::default();
    let snapshot = watch::Sender::default();
    let shown = console::nodes::Service {
        nodes: nodes.subscribe(),
        leader: liaison.client.leader_id(),
        consensus: member.status(),
        own: standing.subscribe(),
        shown: cluster_nodes.clone(),
    };
    let management = management::Service {
        config: management::Config::live(),
        inputs: management::Inputs {
            environment: environment.clone(),
            cluster: standing.subscribe(),
            consensus: member.status(),
            pki: member.overview(),
            ready: ready.subscribe(),
            report: report.subscribe(),
            ring: logs.status.subscribe(),
            snapshot: snapshot.subscribe(),
            credentials: credentials.subscribe(),
            desk: cluster::Desk::new(cluster.desk.subscribe()),
            standing: access.subscribe(),
        },
        table,
        servers: vec![("curator", Arc::clone(&curator.metrics))],
        end: end.clone(),
        listening: Default::default(),
    };
    let console = console::Service {
        terminals,
        snapshot,
        members: console::members::Service {
            consensus: member.status(),
            members: member.members(),
            nodes: nodes.subscribe(),
            credentials: credentials.subscribe(),
            port: management::PORT,
        },
        end,
        environment,
        inputs: console::Inputs {
            known: known.subscribe(),
            network: addresses.subscribe(),
            storage: mounted.subscribe(),
            health: health.subscribe(),
            cluster: standing.subscribe(),
            consensus: member.status(),
            pki: member.overview(),
            cluster_nodes: cluster_nodes.subscribe(),
            identity: identity.subscribe(),
        },
    };

    let exercise = Exercise::of_this_boot().map(|exercise| exercise::Service {
        exercise,
        ready: ready.subscribe(),
        consensus: member.status(),
    });

    // Whatever fails for want of something outside may find it later: only a
    // service itself can tell that it never will, and then opens the trapdoor.
    let forever = Policy::forever();
    ctx.spawn("heartbeat", forever, move |ctx| {
        heartbeat::Service { beats: beats.clone() }.run(ctx)
    });
    ctx.spawn("kernel", forever, move |ctx| kernel.clone().run(ctx));
    // Early, so that it stops late, and shows the stop.
    if !console::is_off() {
        ctx.spawn("console", forever, move |ctx| console.clone().run(ctx));
    }
    ctx.spawn("storage", forever, move |ctx| storage.clone().run(ctx));
    ctx.spawn("logs", forever, move |ctx| logs.clone().run(ctx));
    ctx.spawn("network", forever, move |ctx| network.clone().run(ctx));
    ctx.spawn("names", forever, move |ctx| names.clone().run(ctx));
    ctx.spawn("parameters", forever, move |ctx| parameters.clone().run(ctx));
    ctx.spawn("consensus", forever, move |ctx| member.clone().run(ctx));
    ctx.spawn("cluster", forever, move |ctx| cluster.clone().run(ctx));
    ctx.spawn("credentials", forever, move |ctx| own.clone().run(ctx));
    ctx.spawn("curator", forever, move |ctx| curator.clone().run(ctx));
    ctx.spawn("roles", forever, move |ctx| roles.clone().run(ctx));
    ctx.spawn("peers", forever, move |ctx| places.clone().run(ctx));
    ctx.spawn("beacon", forever, move |ctx| beacon.clone().run(ctx));
    ctx.spawn("enlist", forever, move |ctx| enlisting.clone().run(ctx));
    ctx.spawn("liaison", forever, move |ctx| liaison.clone().run(ctx));
    ctx.spawn("nodes", forever, move |ctx| shown.clone().run(ctx));
    ctx.spawn("management", forever, move |ctx| management.clone().run(ctx));
    let memory = memory::Service { ready: ready.subscribe() };
    ctx.spawn("memory", forever, move |ctx| memory.clone().run(ctx));
    if let Some(exercise) = exercise {
        ctx.spawn("exercise", forever, move |ctx| exercise.clone().run(ctx));
    }
    if let Some(fault) = fault {
        let struck = Arc::<AtomicBool>::default();
        let ready = ready.subscribe();
        let service = fault::Service { fault, recovery, ready, struck };
        ctx.spawn("fault", fault.policy(), move |ctx| service.clone().run(ctx));
    }
    ctx.healthy();
    ctx.cancelled().await;
    Ok(())
}
