//! Builds every service of the node and hands event values over.
//!
//! Only this file knows them all. Nothing is ordered here by hand except the
//! stop: what is started last is stopped first. Each service waits for the
//! event values that it needs, so whatever can start early does.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use tokio::sync::watch;

use crate::logtree::kernel;
use crate::node::environment::Environment;
use crate::node::fault::{self, Fault};
use crate::supervisor::{Context, Policy};

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
    ctx.healthy();
    ctx.cancelled().await;
    Ok(())
}
