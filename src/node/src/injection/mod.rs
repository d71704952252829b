//! Fault injection and the workload generator: the faults and the load that tests ask
//! of a node.
//!
//! No shell reaches a machine, so the kernel command line of a direct boot asks for it:
//! `polis.fault=NAME` for a failure ([`fault`]), `polis.exercise=NAME` for load
//! ([`generator`]). This module exists only with the cargo feature `fault-injection`,
//! which the development image has; the product image ignores both words.

pub mod fault;
mod flood;
pub mod generator;

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use polis_base::recovery;
use polis_runtime::supervisor::{Context, Policy};
use tokio::sync::watch;

use self::fault::Fault;
use self::generator::Generator;
use polis_control::consensus;
use polis_workload::runtime;

/// Starts the services that this boot's command line asks for; usually no line.
pub(crate) fn start(
    ctx: &Context,
    ready: &watch::Sender<bool>,
    member: &watch::Receiver<consensus::Status>,
    recovery: &recovery::Given,
    pods: &watch::Receiver<Option<runtime::Pods>>,
) {
    if let Some(generator) = Generator::of_this_boot() {
        let (ready, consensus) = (ready.subscribe(), member.clone());
        let service = generator::Service { generator, ready, consensus };
        ctx.spawn("exercise", Policy::forever(), move |ctx| service.clone().run(ctx));
    }
    if let Some(fault) = Fault::of_this_boot() {
        let struck = Arc::<AtomicBool>::default();
        let (ready, recovery, pods) = (ready.subscribe(), recovery.clone(), pods.clone());
        let service = fault::Service { fault, recovery, ready, pods, struck };
        ctx.spawn("fault", fault.policy(), move |ctx| service.clone().run(ctx));
    }
}

/// Whether this boot's command line asks for a node without a firewall.
pub(crate) fn no_firewall() -> bool {
    Fault::of_this_boot() == Some(Fault::NoFirewall)
}

/// Panics when this boot's command line asks for a main task that does.
pub(crate) fn main_task_is_ready() {
    #[expect(clippy::panic, reason = "the fault that the command line asks for")]
    if Fault::of_this_boot() == Some(Fault::MainPanic) {
        panic!("requested by polis.fault");
    }
}
