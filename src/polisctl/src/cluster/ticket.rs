//! The register ticket: prints it, makes a new one, and reads what a new node needs with it.

use std::time::Duration;

use polis_proto::v1;
use polis_proto::v1::management_client::ManagementClient;

use crate::ask::{Go, Sure};
use crate::error::Error;
use crate::node::called;
use crate::output::Document;
use crate::session::Session;
use crate::{Global, units};
use polis_base::hex;
use polis_wire::identity::NodeId;
use polis_wire::rpc::client::Repeat;

/// The commands about the ticket.
#[derive(Debug, clap::Subcommand)]
pub(crate) enum Ticket {
    /// Make a new ticket, which replaces the old one.
    Rotate {
        /// Its lifetime, such as 2h [default: unlimited].
        #[arg(long, value_name = "DURATION", value_parser = units::duration)]
        lifetime: Option<Duration>,
        #[command(flatten)]
        sure: Sure,
    },
}

/// The effect of a rotation.
const ROTATION: &str = "The cluster makes a new ticket, and rejects every machine that has the \
                        present one and is not approved yet.";

/// The data that a machine needs to register.
#[derive(Debug)]
pub(crate) struct Admission {
    /// The register ticket.
    pub(crate) ticket: Vec<u8>,
    /// DER of the only authority that the machine trusts.
    pub(crate) ca: Vec<u8>,
    /// The nodes of the cluster.
    pub(crate) nodes: Vec<v1::cluster_directory::Node>,
}

/// Prints the ticket; with a command, changes it first.
pub(super) async fn run(command: Option<Ticket>, global: &Global) -> Result<(), Error> {
    if let Some(Ticket::Rotate { sure, .. }) = &command
        && sure.of(global, ROTATION)? == Go::NoFurther
    {
        return Ok(());
    }
    let session = Session::open(global).await?;
    let answer = ticket(&session, command.as_ref()).await?;
    let ends = units::since_1970(answer.ends_at).map(units::Time);
    let value = serde_json::json!({ "ticket": hex::encode(&answer.ticket), "ends": ends });
    if let Some(ends) = &ends {
        global.out.remark(&format!("It ends on {ends}."));
    }
    global.out.print(&Document::new(&value, hex::encode(&answer.ticket))?)
}

async fn ticket(
    session: &Session,
    command: Option<&Ticket>,
) -> Result<v1::GetRegisterTicketResponse, Error> {
    let (rotate, lifetime) = match command {
        None => (false, None),
        Some(Ticket::Rotate { lifetime, .. }) => (true, *lifetime),
    };
    let lifetime_seconds = lifetime.map_or(0, |lifetime| lifetime.as_secs().max(1));
    let request = v1::GetRegisterTicketRequest { rotate, lifetime_seconds };
    // A second rotation would replace the ticket that was printed.
    let repeat = if rotate { Repeat::Never } else { Repeat::Allowed };
    session
        .call("get the register ticket", repeat, |channel| async move {
            ManagementClient::new(channel).get_register_ticket(request).await
        })
        .await
}

/// The data that a machine needs to register.
///
/// A node that `wipes` names must be removed before.
pub(crate) async fn admission(global: &Global, wipes: Option<NodeId>) -> Result<Admission, Error> {
    let session = Session::open(global).await?;
    if let Some(id) = wipes {
        let id = id.to_string();
        let nodes = session.nodes(&[]).await?;
        if let Some(node) = nodes.iter().find(|node| node.id == id && still_belongs(node)) {
            return Err(Error::new(format!("{} still belongs to the cluster", called(node)))
                .or_help(format!(
                    "wipe it while it runs: `polisctl node reset {id}`; or remove it first: \
                     `polisctl node decommission {id}`, or for a dead machine `polisctl node \
                     delete {id} --force`"
                )));
        }
    }
    let info = session.cluster_info().await?;
    let ticket = ticket(&session, None).await?.ticket;
    let nodes = info.cluster_directory.unwrap_or_default().nodes;
    Ok(Admission { ticket, ca: info.ca_certificate, nodes })
}

/// Whether parameters that wipe this node would end a membership.
fn still_belongs(node: &v1::NodeInfo) -> bool {
    matches!(node.state(), v1::NodeState::Standby | v1::NodeState::Up)
}
