//! `polisctl node`: commands about nodes.
//!
//! Commands about membership go to the leader; reboots, logs and locked disks are requests
//! to the node itself.

mod approve;
mod attest;
mod drain;
mod firewall;
mod firmware;
mod list;
mod logs;
mod network;
mod power;
mod proof;
mod record;
mod recovery;
mod removal;
mod reports;
mod reset;
mod returning;
mod roles;
mod state;
#[cfg(test)]
#[path = "tests.rs"]
mod stories;
mod taint;
mod unlock;
mod update;
mod view;

use polis_proto::v1;

use super::Global;
use super::error::Error;
use super::output::Document;
use super::session::Session;
use polis_wire::endpoint::{self, Endpoint, MANAGEMENT_PORT};

pub(super) use self::list::{List, list, targets};
pub(super) use self::logs::lines as log_lines;
pub(super) use self::state::documents;
pub(super) use self::view::{View, called, faults, nodes_table};

/// Commands about nodes. A node is named by its ID, its first four digits or more, or its
/// name.
#[derive(Debug, clap::Subcommand)]
pub(super) enum Command {
    /// List the nodes.
    #[command(visible_alias = "ls")]
    List(List),
    /// Print the record of a node.
    Describe {
        /// The node.
        node: String,
    },
    /// Print the state that the node itself reports; works without a leader.
    Status(state::Arguments),
    /// Print the services of a node: the tree, with states, restarts and causes.
    Services(state::Arguments),
    /// Print the rules of a node's firewall: the allowed callers of each port, and its purpose.
    Firewall(state::Arguments),
    /// Print the links of a node, or order another network for it: it tries that, and returns to
    /// the former one unless it still reaches the cluster.
    Network(Box<network::Arguments>),
    /// Have a node's TPM prove what the node was started with, and compare it.
    Attest(attest::Arguments),
    /// Approve a node that waits for approval.
    Approve(approve::Arguments),
    /// Add and remove roles.
    Roles(roles::Arguments),
    /// Set and remove labels.
    Label(record::Label),
    /// Set and remove taints, which keep pods of Kubernetes away that do not tolerate them.
    Taint(taint::Arguments),
    /// Give a node a name, which commands accept in place of its ID.
    Name(record::Name),
    /// Stop the services of a machine and reboot it.
    Reboot(power::Arguments),
    /// Stop the services of a machine and power it off.
    Poweroff(power::Arguments),
    /// Put the system of an update bundle on a machine and reboot it into that system; it goes
    /// back by itself if it does not get ready.
    Update(update::Arguments),
    /// Announce a firmware update of a machine: the next start opens its disk whatever the
    /// firmware measures.
    AnnounceFirmwareUpdate(firmware::Arguments),
    /// Remove a node's roles and membership for good.
    Decommission(removal::Decommission),
    /// Decommission a node, and let its machine wipe its keys and its data partition.
    Reset(reset::Arguments),
    /// Delete a node's record, and revoke its certificates.
    Delete(removal::Delete),
    /// Print the log of a node.
    Logs(logs::Arguments),
    /// Print the recovery key of a node's disk, delete the cluster's copy, or turn a saved one into
    /// a passphrase.
    RecoveryKey(recovery::Arguments),
    /// Open the disk of a node that waits for its key.
    Unlock(unlock::Arguments),
}

/// The address of a node that the cluster does not have.
#[derive(Debug, clap::Args)]
pub(super) struct At {
    /// The address of the node's own port [default: asked of the cluster].
    #[arg(long, value_name = "HOST[:PORT]", value_parser = management)]
    pub(super) at: Option<Endpoint>,
}

fn management(text: &str) -> Result<Endpoint, endpoint::Invalid> {
    Endpoint::parse(text, MANAGEMENT_PORT)
}

/// Runs the command.
pub(super) async fn run(command: Command, global: &Global) -> Result<(), Error> {
    match command {
        Command::List(arguments) => list(&arguments, global).await,
        Command::Describe { node } => describe(&node, global).await,
        Command::Status(arguments) => state::status(&arguments, global).await,
        Command::Services(arguments) => state::services(&arguments, global).await,
        Command::Firewall(arguments) => firewall::run(&arguments, global).await,
        Command::Network(arguments) => Box::pin(network::run(&arguments, global)).await,
        Command::Attest(arguments) => Box::pin(attest::run(arguments, global)).await,
        Command::Approve(arguments) => approve::run(arguments, global).await,
        Command::Roles(arguments) => roles::run(&arguments, global).await,
        Command::Label(arguments) => record::label(&arguments, global).await,
        Command::Taint(arguments) => taint::run(arguments, global).await,
        Command::Name(arguments) => record::name(&arguments, global).await,
        Command::Reboot(arguments) => power::run(&arguments, false, global).await,
        Command::Poweroff(arguments) => power::run(&arguments, true, global).await,
        Command::Update(arguments) => update::run(arguments, global).await,
        Command::AnnounceFirmwareUpdate(arguments) => firmware::run(&arguments, global).await,
        Command::Decommission(arguments) => removal::decommission(&arguments, global).await,
        Command::Reset(arguments) => reset::run(&arguments, global).await,
        Command::Delete(arguments) => removal::delete(&arguments, global).await,
        Command::Logs(arguments) => logs::run(arguments, global).await,
        Command::RecoveryKey(arguments) => recovery::run(arguments, global).await,
        Command::Unlock(arguments) => unlock::run(&arguments, global).await,
    }
}

async fn describe(node: &str, global: &Global) -> Result<(), Error> {
    let session = Session::open(global).await?;
    described(&session.find(node).await?, global)
}

/// Everything about one node.
pub(super) fn described_view(node: &v1::NodeInfo) -> View {
    View::with_words(node)
}

fn described(node: &v1::NodeInfo, global: &Global) -> Result<(), Error> {
    let view = described_view(node);
    global.out.print(&Document::new(&view, view.fields())?)
}
