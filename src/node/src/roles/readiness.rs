//! The readiness of this node: it is ready when it is home and everything that its
//! roles need serves.
//!
//! ```text
//! [waiting] --home, an address; a consensus member: etcd votes, the curator serves;
//!             others: a leader is known --> [ready]: `POLIS ready`, once a boot
//! ```
//!
//! Invariants:
//! - The line `ready` is printed once a boot, however often this service is started.
//! - It comes before the event value: a service that waits for the value may end the
//!   node.
//! - A node that was ready stays ready: the service that a later failure concerns
//!   reports it.
//!
//! What this module does not do: start what a role needs. `consensus` serves a
//! consensus member from the moment that it has orders: from the cluster
//! manager, or from [`super::enlist`] here.

use std::net::IpAddr;

use tokio::sync::watch;
use tracing::info;

use polis_base::hex;
use polis_base::serial::EventLine;
use polis_base::stage::{Stage, State};
use polis_control::{cluster, consensus, curator};
use polis_machine::network;
use polis_runtime::event::Closed;
use polis_runtime::supervisor::Context;
use polis_wire::identity::NodeId;
use polis_wire::node_roles::Role;

/// Configuration, inputs and outputs. Cloned into every run; holds no progress.
#[derive(Clone, Debug)]
pub struct Service {
    /// Which image this machine runs.
    pub image: String,
    /// This machine's state in its cluster.
    pub cluster: watch::Receiver<cluster::Status>,
    /// Its etcd member.
    pub consensus: watch::Receiver<consensus::Status>,
    /// Its curator.
    pub curator: watch::Receiver<curator::Status>,
    /// The leader, as this node last learned.
    pub leader: watch::Receiver<Option<NodeId>>,
    /// Its address.
    pub network: watch::Receiver<network::Status>,
    /// Whether this node was ready in this boot.
    pub ready: watch::Sender<bool>,
}

/// The report of a ready node.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Ready {
    node: NodeId,
    /// The ID that distinguishes the cluster from every other.
    ca: String,
    roles: String,
    address: IpAddr,
}

impl Service {
    /// Runs until cancelled.
    ///
    /// # Errors
    ///
    /// [`Closed`] when an owner of an input ended.
    pub async fn run(mut self, ctx: Context) -> Result<(), Closed> {
        ctx.stage(Stage::Roles, State::Started);
        let ready = loop {
            if let Some(ready) = self.look() {
                break ready;
            }
            let changed = async {
                tokio::select! {
                    // Cancel-safe, all of them: they wait for event values.
                    changed = self.cluster.changed() => changed.map_err(|_closed| "the cluster"),
                    changed = self.consensus.changed() => changed.map_err(|_closed| "etcd"),
                    changed = self.curator.changed() => changed.map_err(|_closed| "the curator"),
                    changed = self.network.changed() => changed.map_err(|_closed| "the network"),
                    changed = self.leader.changed() => changed.map_err(|_closed| "the client"),
                }
            };
            match ctx.until_cancelled(changed).await {
                Some(changed) => changed.map_err(Closed)?,
                None => return Ok(()),
            }
        };
        ctx.stage(Stage::Roles, State::Done);
        // A service that is started again after the node was ready prints nothing new.
        let printed = *self.ready.borrow();
        if !printed {
            let Ready { node, ca, roles, address } = ready;
            let line = EventLine::new("ready").field("node", node).field("roles", &roles);
            let line = line.field("address", address).field("image", &self.image).field("ca", ca);
            ctx.lines().event(line);
            info!(event = "ready", %node, roles, %address, "ready");
            // After the line: a service that waits for this may end the node.
            self.ready.send_replace(true);
        }
        ctx.healthy();
        ctx.cancelled().await;
        Ok(())
    }

    fn look(&mut self) -> Option<Ready> {
        let votes = self.consensus.borrow_and_update().voter().is_some();
        let serves = self.curator.borrow_and_update().is_ready();
        let address = self.network.borrow_and_update().primary;
        let cluster = self.cluster.borrow_and_update();
        let home = cluster.state == cluster::State::Home;
        let in_touch = self.leader.borrow_and_update().is_some();
        let serves = match cluster.roles.contains(&Role::ConsensusMember) {
            true => votes && serves,
            // A node without a role only has to receive one.
            false => in_touch,
        };
        let (node, address) = cluster.node.zip(address).filter(|_| home && serves)?;
        let ca = hex::encode(&cluster.ca?);
        Some(Ready { node, ca, roles: role_list(&cluster.roles), address })
    }
}

/// The roles as one value of an event line.
fn role_list(roles: &[Role]) -> String {
    if roles.is_empty() {
        return "none".to_owned();
    }
    let role_list: Vec<_> = roles.iter().map(|role| role.slug()).collect();
    role_list.join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_role_is_one_word() {
        assert_eq!(role_list(&[Role::ConsensusMember]), "consensus-member");
        assert_eq!(role_list(&[]), "none");
    }

    #[tokio::test(start_paused = true)]
    async fn a_node_without_a_cluster_is_not_ready() {
        let (ctx, mut handles) = Context::for_test();
        let (_cluster, cluster) = watch::channel(cluster::Status::default());
        let (_consensus, consensus) = watch::channel(consensus::Status::default());
        let (_curator, curator) = watch::channel(curator::Status::default());
        let (network, networks) = watch::channel(network::Status::default());
        let (_leader, leader) = watch::channel(None);
        let (ready, is_ready) = watch::channel(false);
        let service = Service {
            image: "i".to_owned(),
            cluster,
            consensus,
            curator,
            leader,
            network: networks,
            ready,
        };
        let end = async {
            network.send_modify(|status| status.primary = Some([10, 0, 2, 15].into()));
            tokio::time::sleep(std::time::Duration::from_secs(1)).await;
            handles.cancel().await;
        };
        let (ended, ()) = tokio::join!(service.run(ctx), end);
        assert_eq!(ended, Ok(()));
        assert!(!*is_ready.borrow());
        let lines = handles.take_lines();
        assert!(lines.iter().all(|line| !line.starts_with("POLIS ready")), "{lines:?}");
    }
}
