//! `polisctl node unlock`: gives the recovery key to a node whose disk waits for it.

use std::path::PathBuf;

use polis_proto::v1;
use polis_proto::v1::node_management_client::NodeManagementClient;

use super::{At, recovery};
use crate::Global;
use crate::ask::{DryRun, Go};
use crate::error::Error;
use crate::output::Document;
use crate::session::{PATIENCE, Session};
use polis_wire::identity::Spoken;

/// Arguments of `node unlock`.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// The node.
    node: String,
    /// A file with the recovery key; `-` is standard input [default: asked for].
    #[arg(long, value_name = "FILE")]
    recovery_key_file: Option<PathBuf>,
    /// The fingerprint on the machine's screen, in words or digits: a node that waits
    /// for its key has no certificate of the cluster.
    #[arg(long, value_name = "WORDS")]
    fingerprint: Option<Spoken>,
    #[command(flatten)]
    at: At,
    #[command(flatten)]
    dry_run: DryRun,
}

/// Runs the command.
pub(super) async fn run(arguments: &Arguments, global: &Global) -> Result<(), Error> {
    let Arguments { node, recovery_key_file, fingerprint, at, dry_run } = arguments;
    let mut session = Session::prepare(global, PATIENCE)?;
    let target = session.target(Some(node), at.at.as_ref()).await?;
    let address = &target.address;
    let effect = format!("{node} at {address} gets the recovery key, and opens its disk.");
    if dry_run.of(global, &effect)? == Go::NoFurther {
        return Ok(());
    }
    // A mistyped key is rejected here, without a connection to the machine.
    let text = recovery::saved_text(recovery_key_file.as_deref())?;
    session.begin_anew();
    let channel = match fingerprint {
        Some(fingerprint) => session.waiting_node(&target, fingerprint).await?,
        None => session.node(&target).await.map_err(|error| match error.is_handshake() {
            true => error.help_first(
                "a node that waits for its key shows a fingerprint on its screen, page Boot: \
                 name it with --fingerprint",
            ),
            false => error,
        })?,
    };
    let request = v1::UnlockRequest { recovery_key: text.trim().to_owned() };
    let mut client = NodeManagementClient::new(channel);
    session.within("open the disk", client.unlock(request)).await?;
    let value = serde_json::json!({ "node": node, "unlocked": true });
    global.out.print(&Document::new(&value, format!("{node} opened its disk"))?)
}
