//! `polisctl node reboot` and `node poweroff`: ends the machine of a node.

use polis_proto::v1;
use polis_proto::v1::node_management_client::NodeManagementClient;

use super::At;
use super::drain::Drain;
use crate::Global;
use crate::ask::{Go, Sure};
use crate::error::Error;
use crate::output::Document;
use crate::session::{PATIENCE, Session};
use polis_wire::identity::NodeName;

/// A machine to reboot or power off.
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
pub(super) async fn run(
    arguments: &Arguments,
    power_off: bool,
    global: &Global,
) -> Result<(), Error> {
    let Arguments { node: wanted, at, drain, sure } = arguments;
    sure.can_be(global)?;
    let mut session = Session::prepare(global, PATIENCE)?;
    let target = session.target(Some(wanted), at.at.as_ref()).await?;
    let node = session.connect(&target).await?;
    let (id, at) = (node.node.to_string(), node.address);
    // The certificate has the ID alone.
    let name = match wanted.parse::<NodeName>() {
        Ok(name) => format!("{name} ({id})"),
        Err(_not_a_name) => id.clone(),
    };
    let effect = match power_off {
        true => format!("{name} at {at} stops its services and powers off."),
        false => format!("{name} at {at} stops its services and reboots."),
    };
    if sure.of(global, &effect)? == Go::NoFurther {
        return Ok(());
    }
    let held = drain.hold(node.channel.clone(), &name, global).await?;
    session.begin_anew();
    let what = if power_off { "power the machine off" } else { "reboot the machine" };
    let mut client = NodeManagementClient::new(node.channel);
    session.within(what, client.reboot(v1::RebootRequest { power_off })).await?;
    drop(held);
    let value = serde_json::json!({ "node": id, "power_off": power_off });
    let text = if power_off { "powers off" } else { "reboots" };
    global.out.print(&Document::new(&value, format!("{name} {text}"))?)
}
