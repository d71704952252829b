//! The root service: builds every service of the node and hands event values over.
//!
//! Only this module knows them all: [`Values`] has what they share, and each group of services has
//! a file with the constructor that makes them. [`run`] starts them. Only the stop is ordered here
//! by hand: the last service started is the first stopped. Each service waits for the event values
//! that it needs, so every service starts as early as it can.
//!
//! ```text
//! parameters --> network --> names          storage
//!      |            |          ^   \       ^   |
//!      |            v          |    \wanted|   | mounted
//!      +-------> cluster --identity--> ----+   |
//!                   | \--orders--> consensus <-+
//!                   v                  v
//!              credentials --> curator <---> agent
//!                   |            |          management
//!                   +--> roles <-+ ----> ready            console watches all
//! ```

mod base;
mod control;
mod membership;
mod user_interfaces;
mod values;

use tokio::sync::watch;

use self::base::Base;
use self::control::Control;
use self::membership::Membership;
use self::user_interfaces::UserInterfaces;
use self::values::Values;
use crate::daemon::{heartbeat, memory};
use crate::{console, firewall, maintenance};
use polis_base::environment::Environment;
use polis_base::recovery;
use polis_base::sys::reboot::Reason;
use polis_runtime::supervisor::{Context, Policy};
use polis_workload as workload;

/// The needs of the root service.
#[derive(Clone, Debug)]
pub struct Root {
    /// The facts from `init`.
    pub environment: Environment,
    /// The recovery key of the disk, if somebody gave it to this machine.
    pub recovery: recovery::Given,
    /// Becomes true when the node is ready.
    pub ready: watch::Sender<bool>,
    /// Changes as long as the runtime runs.
    pub beats: watch::Sender<u64>,
    /// The terminals that carry the console: `init` shows a failure there.
    pub terminals: watch::Sender<Vec<String>>,
    /// The requests to end the machine, in order. The requester logs the request and its
    /// user.
    pub end: watch::Sender<Option<Reason>>,
    /// The requests of somebody at the machine: a worker is drained first, and another request
    /// ends the machine at once.
    pub leave: watch::Sender<Option<Reason>>,
    /// Where this node is drained.
    pub drains: workload::drain::Drains,
    /// The parts of Kubernetes on this node.
    pub workload: watch::Sender<workload::Status>,
    /// What `init` shows of a machine in maintenance.
    pub maintenance: watch::Sender<maintenance::Shown>,
}

/// Starts every service, then waits: those of a node, or those of a machine in maintenance.
///
/// # Errors
///
/// Of maintenance alone; a node ends only by a child's death.
pub async fn run(root: Root, ctx: Context) -> Result<(), maintenance::Error> {
    if let Some(report) = &root.environment.maintenance {
        let Root { environment, end, maintenance, .. } = &root;
        let (end, shown) = (end.clone(), maintenance.clone());
        let firewall = firewall_config();
        return maintenance::Service::live(environment, report, firewall, end, shown)
            .run(ctx)
            .await;
    }
    Box::pin(serve(root, &ctx)).await;
    Ok(())
}

/// Runs the services of a node.
async fn serve(root: Root, ctx: &Context) {
    let values = Values::new(&root);
    let base = Base::new(&values, &root, ctx);
    let membership = Membership::new(&values, &root);
    let control = Control::new(&values, &root);
    let user_interfaces = UserInterfaces::new(&values, &root);
    let Root { ready, beats, .. } = root;

    // A service that fails for want of something outside may find it later: only the
    // service itself knows that it never will, and then opens the trapdoor.
    let forever = Policy::forever();
    ctx.spawn("heartbeat", forever, move |ctx| {
        heartbeat::Service { beats: beats.clone() }.run(ctx)
    });
    ctx.spawn("kernel", forever, move |ctx| base.kernel.clone().run(ctx));
    // Started early, so that it stops late, and shows the stop.
    if !console::is_off() {
        ctx.spawn("console", forever, move |ctx| user_interfaces.console.clone().run(ctx));
    }
    // Before storage, which uses its device until it stops.
    ctx.spawn("mirror", forever, move |ctx| base.mirror.clone().run(ctx));
    ctx.spawn("storage", forever, move |ctx| base.storage.clone().run(ctx));
    ctx.spawn("volumes", forever, move |ctx| base.volumes.clone().run(ctx));
    ctx.spawn("logs", forever, move |ctx| base.logs.clone().run(ctx));
    ctx.spawn("update", forever, move |ctx| base.update.clone().run(ctx));
    ctx.spawn("network", forever, move |ctx| base.network.clone().run(ctx));
    ctx.spawn("names", forever, move |ctx| base.names.clone().run(ctx));
    ctx.spawn("time", forever, move |ctx| base.time.clone().run(ctx));
    ctx.spawn("firewall", forever, move |ctx| base.firewall.clone().run(ctx));
    ctx.spawn("forwarding", forever, move |ctx| base.forwarding.clone().run(ctx));
    ctx.spawn("parameters", forever, move |ctx| base.parameters.clone().run(ctx));
    ctx.spawn("consensus", forever, move |ctx| membership.consensus.clone().run(ctx));
    ctx.spawn("cluster", forever, move |ctx| membership.cluster.clone().run(ctx));
    ctx.spawn("credentials", forever, move |ctx| membership.credentials.clone().run(ctx));
    ctx.spawn("curator", forever, move |ctx| control.curator.clone().run(ctx));
    ctx.spawn("shipping", forever, move |ctx| control.shipping.clone().run(ctx));
    ctx.spawn("roles", forever, move |ctx| control.roles.clone().run(ctx));
    ctx.spawn("health", forever, move |ctx| control.health.clone().run(ctx));
    ctx.spawn("peers", forever, move |ctx| membership.peers.clone().run(ctx));
    ctx.spawn("discovery", forever, move |ctx| membership.discovery.clone().run(ctx));
    ctx.spawn("enlist", forever, move |ctx| membership.enlist.clone().run(ctx));
    ctx.spawn("agent", forever, move |ctx| control.agent.clone().run(ctx));
    ctx.spawn("runtime", forever, move |ctx| control.containerd.clone().run(ctx));
    ctx.spawn("workload", forever, move |ctx| control.workload.clone().run(ctx));
    ctx.spawn("nodes", forever, move |ctx| user_interfaces.nodes.clone().run(ctx));
    ctx.spawn("management", forever, move |ctx| user_interfaces.management.clone().run(ctx));
    let workload = values.workload.subscribe();
    let memory = memory::Service { ready: ready.subscribe(), workload };
    ctx.spawn("memory", forever, move |ctx| memory.clone().run(ctx));
    // Last, so that it stops first.
    #[cfg(feature = "fault-injection")]
    crate::injection::start(
        ctx,
        &ready,
        &values.member.status(),
        &root.recovery,
        &values.pods.subscribe(),
    );
    ctx.healthy();
    ctx.cancelled().await;
}

/// The firewall: in force, unless a test asks for its absence.
fn firewall_config() -> firewall::Config {
    #[cfg(feature = "fault-injection")]
    let open = crate::injection::no_firewall();
    #[cfg(not(feature = "fault-injection"))]
    let open = false;
    firewall::Config::live(open)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    /// The names of the services, in the order in which they are started.
    fn started() -> Vec<&'static str> {
        let (code, _tests) = include_str!("mod.rs").split_once("#[cfg(test)]").unwrap();
        let sources = [code, include_str!("../injection/mod.rs")];
        let calls = sources.into_iter().flat_map(|code| code.split("ctx.spawn(\"").skip(1));
        calls.filter_map(|call| Some(call.split_once('"')?.0)).collect()
    }

    #[test]
    fn the_picture_of_the_tree_has_every_service_in_the_order_of_start() {
        let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/supervision.md");
        let page = std::fs::read_to_string(page).unwrap();
        let (_, picture) = page.split_once("```text\nroot ").unwrap();
        let (picture, _) = picture.split_once("```").unwrap();
        let drawn = picture.lines().filter_map(|line| {
            let branch = line.strip_prefix("├ ").or_else(|| line.strip_prefix("└ "))?;
            branch.split_whitespace().next()
        });
        assert_eq!(drawn.collect::<Vec<_>>(), started());
    }
}
