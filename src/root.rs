//! Builds every service of the node and hands event values over.
//!
//! Only this file knows them all. Nothing is ordered here by hand except the
//! stop: what is started last is stopped first. Each service waits for the
//! event values that it needs, so whatever can start early does.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use tokio::sync::watch;

use crate::logtree::kernel;
use crate::network::{self, names};
use crate::node::environment::Environment;
use crate::node::fault::{self, Fault};
use crate::parameters;
use crate::storage;
use crate::supervisor::{Context, Policy};

/// Where `init` mounted sysfs.
const SYS: &str = "/sys";

/// What the root service needs.
#[derive(Clone, Debug)]
pub struct Root {
    /// What `init` told.
    pub environment: Environment,
    /// What to break on purpose.
    pub fault: Option<Fault>,
    /// Becomes true when the node is ready.
    pub ready: watch::Sender<bool>,
}

/// Starts every service, then waits.
///
/// # Errors
///
/// None: only a child's death can end it.
pub async fn run(root: Root, ctx: Context) -> Result<(), std::convert::Infallible> {
    let kernel = kernel::Service { tree: ctx.logs().clone() };
    ctx.spawn("kernel", Policy::forever(), move |ctx| kernel.clone().run(ctx));
    if let Some(fault) = root.fault {
        let service = fault::Service {
            fault,
            ready: root.ready.subscribe(),
            struck: Arc::<AtomicBool>::default(),
        };
        ctx.spawn("fault", fault.policy(), move |ctx| service.clone().run(ctx));
    }
    let files = storage::Root::live();
    let known = watch::Sender::new(None);
    let network = watch::Sender::new(network::Status::default());
    let identity = watch::Sender::new(None);
    let named = watch::Sender::new(names::Status::default());

    let service = parameters::Service {
        config: parameters::Config { sys: SYS.into(), esp: files.esp.parameters.clone() },
        known: known.clone(),
    };
    ctx.spawn("parameters", Policy::forever(), move |ctx| service.clone().run(ctx));
    let service = network::Service {
        config: network::Config {
            interfaces: network::Interfaces::Hardware,
            sys: SYS.into(),
            os_release: "/etc/os-release".into(),
            resolv_conf: files.ephemeral.resolv_conf.clone(),
        },
        known: known.subscribe(),
        status: network.clone(),
    };
    ctx.spawn("network", Policy::forever(), move |ctx| service.clone().run(ctx));
    let service = names::Service {
        config: names::Config {
            hosts: files.ephemeral.hosts.clone(),
            hostname: files.ephemeral.hostname.clone(),
            machine_id: files.ephemeral.machine_id.clone(),
            kernel: names::Kernel::Set,
        },
        identity: identity.subscribe(),
        network: network.subscribe(),
        status: named.clone(),
    };
    ctx.spawn("names", Policy::forever(), move |ctx| service.clone().run(ctx));
    ctx.healthy();
    ctx.cancelled().await;
    Ok(())
}
