//! The bootstrap of etcd: creates a cluster. etcd needs certificates, and certificates live
//! in etcd.
//!
//! ```text
//! mark -> clear -> (fill from a snapshot) -> start without a port
//!                                                    |
//!                       authority -> certificate <---+
//!                                         |
//! unmark <- stop <- write to the disk <---+
//! ```
//!
//! Invariants:
//! - Removing the mark is the one moment at which the cluster comes to be. Until then only
//!   this function has seen it, so every attempt starts afresh: half a log or half a
//!   database is never opened again.
//! - etcd has ended, and its writes were flushed, before the mark is removed. So this etcd
//!   need not flush each write by itself.
//!
//! What this module does not do: start etcd for good (`service`).

use std::time::Duration;

use tracing::info;

use super::args::{Pace, Purpose};
use super::client::User;
use super::credentials::{Credentials, authority, peer_certificate};
use super::process::{self, STOP_MAX, Started, died};
use super::{Config, Error, Orders, Step, credentials, restore};
use polis_base::sys::clock;
use polis_runtime::save::Save as _;
use polis_runtime::supervisor::{Context, blocking};
use polis_wire::pki::Namespace;

/// Far more than etcd needs on the slowest machine: past it, a fault is likely and a fresh
/// attempt is better.
const READY_MAX: Duration = Duration::from_secs(60);

/// Takes every step. Safe to repeat after an end anywhere.
pub(super) async fn bootstrap(
    config: &Config,
    ctx: &Context,
    orders: &Orders,
) -> Result<(), Error> {
    let tree = &config.tree;
    let probe = &config.probe;
    info!("founding a cluster");

    tree.bootstrapping.save(Vec::new()).await?;
    probe.passed(Step::Marked)?;

    let (data, alone) = (tree.data.clone(), tree.alone.clone());
    blocking(move || data.clear().and_then(|()| alone.remove())).await?;
    probe.passed(Step::Cleared)?;
    restore::restore(config, ctx, orders).await?;

    let Started { mut child, begun } =
        process::spawn(config, ctx, orders, Pace::Alone, Purpose::Found).await?;
    let clients = tokio::select! {
        // Cancel-safe: both only wait.
        exit = child.wait() => {
            return Err(died(config, ctx, begun, exit.map_err(Error::Process)?).await);
        }
        clients = tokio::time::timeout(READY_MAX, process::ready(config)) => {
            clients.map_err(|_elapsed| Error::Silent(READY_MAX))??
        }
    };
    probe.passed(Step::Started)?;

    let namespace = Namespace::new(clients.user(User::EtcdPki), "");
    let authority = authority();
    namespace.ensure(&authority, clock::now()).await?;
    probe.passed(Step::Authority)?;

    let desired = peer_certificate(&orders.key.identity(), &orders.peer);
    let issued = namespace.ensure(&desired, clock::now()).await?;
    let crl = namespace.crl(&authority).await?.ok_or(Error::Damaged { missing: "CRL" })?;
    probe.passed(Step::Certificate)?;

    let authorities = namespace.authorities(&authority).await?;
    let authorities =
        authorities.ok_or(Error::Damaged { missing: "certificate of the authority" })?;
    let credentials = Credentials { authorities, certificate: issued.der, crl: crl.der };
    credentials::write(tree, &credentials, &orders.key).await?;
    probe.passed(Step::Written)?;

    child.terminate(STOP_MAX).await.map_err(Error::Process)?;
    probe.passed(Step::Stopped)?;

    // A cluster of one from its first start on.
    tree.alone.save(Vec::new()).await?;
    let data = tree.data.clone();
    blocking(move || data.flush()).await?;
    let mark = tree.bootstrapping.clone();
    blocking(move || mark.remove()).await?;
    probe.passed(Step::Finished)?;
    info!("the cluster is founded");
    Ok(())
}
