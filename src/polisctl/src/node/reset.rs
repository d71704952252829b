//! `polisctl node reset`: ends a membership and the data of the machine behind it.
//!
//! ```text
//! the node itself: wipe yourself once you are removed --> the leader: decommission
//!     --> the node learns of it: keys, mark on its data partition, reboot, partition
//! ```
//!
//! The node is asked first, because a decommissioned one answers no call. It wipes
//! nothing before the cluster has removed it, and forgets the request after ten minutes, so a
//! decommissioning that is refused leaves it as it was.
//!
//! What this module does not do: wipe a machine that does not answer. Node parameters do
//! (`parameters register --wipes`).

use polis_proto::v1;
use polis_proto::v1::node_management_client::NodeManagementClient;

use super::drain::Drain;
use super::removal::{decommissioned, volumes_end};
use super::{At, called};
use crate::Global;
use crate::ask::{Go, Sure};
use crate::error::Error;
use crate::output::Document;
use crate::session::Session;

/// Arguments of `node reset`.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// The node.
    node: String,
    #[command(flatten)]
    at: At,
    #[command(flatten)]
    drain: Drain,
    #[command(flatten)]
    sure: Sure,
}

/// Runs the command.
pub(super) async fn run(arguments: &Arguments, global: &Global) -> Result<(), Error> {
    let Arguments { node, at, drain, sure } = arguments;
    sure.can_be(global)?;
    let mut session = Session::open(global).await?;
    let found = session.find(node).await?;
    let (name, node_id) = (called(&found), found.id.clone());
    if found.state() == v1::NodeState::Decommissioned {
        return Err(Error::new(format!("{name} is decommissioned and no longer answers"))
            .or_help(by_parameters(&node_id)));
    }
    let target = session.target(Some(&node_id), at.at.as_ref()).await?;
    let reached = session.connect(&target).await;
    let reached = reached.map_err(|error| error.with_help(by_parameters(&node_id)))?;
    let effect = format!(
        "{name} at {} leaves the cluster for good, wipes its keys and its data partition, and \
         reboots; no recovery key opens the disk any more.{} It then follows its node parameters \
         again: those that found a cluster found a new one.",
        reached.address,
        volumes_end(&found),
    );
    if sure.of(global, &effect)? == Go::NoFurther {
        return Ok(());
    }
    let held = drain.before(&session, &found, global).await?;
    session.begin_anew();
    let request = v1::ResetRequest { node_id: node_id.clone() };
    let mut client = NodeManagementClient::new(reached.channel);
    session.within("reset the node", client.reset(request)).await?;
    decommissioned(&session, node_id.clone()).await?;
    drop(held);
    let value = serde_json::json!({ "node": node_id, "decommissioned": true, "wipes": true });
    let text = format!("{name} is decommissioned; it wipes its disk and reboots");
    global.out.print(&Document::new(&value, text)?)
}

fn by_parameters(id: &str) -> String {
    format!(
        "a machine that does not answer wipes itself by its parameters: `polisctl parameters \
         register --wipes {id} -o FILE`; a dead node is deleted before: `polisctl node delete {id} \
         --force`"
    )
}
