//! `polisctl node decommission` and `node delete`: end the membership of a node.
//!
//! The leader does the work, and continues it without this program; a repeated command waits for
//! the end of the same removal.

use polis_proto::v1;
use polis_proto::v1::management_client::ManagementClient;
use tonic::{Response, Status};

use super::drain::Drain;
use super::{called, described};
use crate::Global;
use crate::ask::{Go, Sure};
use crate::error::Error;
use crate::output::Document;
use crate::session::Session;
use polis_wire::rpc::REASON;
use polis_wire::rpc::client::Repeat;

/// Arguments of `node decommission`.
#[derive(Debug, clap::Args)]
pub(crate) struct Decommission {
    /// The node.
    node: String,
    #[command(flatten)]
    drain: Drain,
    #[command(flatten)]
    sure: Sure,
}

/// Arguments of `node delete`.
#[derive(Debug, clap::Args)]
pub(crate) struct Delete {
    /// The node.
    node: String,
    /// Delete it even in state up, as a lost machine.
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    sure: Sure,
}

/// The help after a timeout of a deletion, which first removes the node from etcd: that may
/// take longer than a call, and a repeated call goes on where it stopped.
const REPEAT: &str = "if `polisctl node list` still shows the node, repeat the command with more \
                      time, for example `--timeout 2m`; a busy cluster needs it for a voter";

/// The help after a timeout of a decommissioning, which continues without the client.
pub(super) const GOES_ON: &str = "if the decommissioning has started, it continues: see `polisctl \
                                  cluster status`, or repeat the command to wait for its end";

/// Decommissions a node.
pub(super) async fn decommission(arguments: &Decommission, global: &Global) -> Result<(), Error> {
    let Decommission { node, drain, sure } = arguments;
    sure.can_be(global)?;
    let mut session = Session::open(global).await?;
    let found = session.find(node).await?;
    let (name, node_id) = (called(&found), found.id.clone());
    let lost = volumes_end(&found);
    let effect = format!("{name} wipes its keys and can never be a member again.{lost}");
    if sure.of(global, &effect)? == Go::NoFurther {
        return Ok(());
    }
    let held = drain.before(&session, &found, global).await?;
    session.begin_anew();
    let answer = decommissioned(&session, node_id).await?;
    drop(held);
    described(&answer.node.unwrap_or_default(), global)
}

/// The consequence of the end of a worker's keys for its pods.
pub(super) fn volumes_end(node: &v1::NodeInfo) -> &'static str {
    let worker = node.roles.as_ref().is_some_and(|roles| roles.kubernetes_worker.is_some());
    if worker { " The persistent volumes on it are lost." } else { "" }
}

/// Has the leader decommission a node.
pub(super) async fn decommissioned(
    session: &Session,
    node_id: String,
) -> Result<v1::DecommissionNodeResponse, Error> {
    let request = v1::DecommissionNodeRequest { node_id };
    let answer = session.call("decommission the node", Repeat::Allowed, |channel| {
        let request = request.clone();
        async move { ManagementClient::new(channel).decommission_node(request).await }
    });
    answer.await.map_err(|error| error.help_if_late(GOES_ON))
}

/// Deletes the record of a node.
pub(super) async fn delete(arguments: &Delete, global: &Global) -> Result<(), Error> {
    let Delete { node, force, sure } = arguments;
    let force = *force;
    sure.can_be(global)?;
    let mut session = Session::open(global).await?;
    let found = session.find(node).await?;
    let node_id = found.id.clone();
    // The leader has the same rule; here it holds for a dry run, too.
    if !force && found.state() == v1::NodeState::Up {
        return Err(Error::new(format!(
            "cannot delete {}: it is a member of the cluster",
            called(&found)
        ))
        .or_help(format!(
            "decommission it first: `polisctl node decommission {node_id}`; or, if its machine is \
             lost, add --force"
        )));
    }
    let effect = format!("The cluster deletes {} and revokes its certificates.", called(&found));
    if sure.of(global, &effect)? == Go::NoFurther {
        return Ok(());
    }
    session.begin_anew();
    let request = v1::DeleteNodeRequest { node_id: node_id.clone(), force };
    let mut again = false;
    session
        .call("delete the node", Repeat::Allowed, |channel| {
            let (request, again) = (request.clone(), std::mem::replace(&mut again, true));
            async move {
                let answer = ManagementClient::new(channel).delete_node(request).await;
                deleted(answer.map(Response::into_inner), again).map(Response::new)
            }
        })
        .await
        .map_err(|error| error.help_if_late(REPEAT))?;
    let value = serde_json::json!({
        "deleted": node_id,
        "may_ask_again": may_ask_again(&found),
    });
    global.out.print(&Document::new(&value, forgotten(&found))?)
}

/// Whether a deleted machine registers again: it has a ticket and was never a member.
fn may_ask_again(node: &v1::NodeInfo) -> bool {
    matches!(node.state(), v1::NodeState::New | v1::NodeState::Standby)
}

/// A node that existed and does not is deleted: by this command, if an earlier attempt lost
/// the answer.
fn deleted(
    answer: Result<v1::DeleteNodeResponse, Status>,
    again: bool,
) -> Result<v1::DeleteNodeResponse, Status> {
    answer.or_else(|status| {
        let reason = status.metadata().get(REASON).and_then(|reason| reason.to_str().ok());
        match again && reason == Some("unknown") {
            true => Ok(v1::DeleteNodeResponse {}),
            false => Err(status),
        }
    })
}

fn forgotten(node: &v1::NodeInfo) -> String {
    let id = called(node);
    match may_ask_again(node) {
        true => format!(
            "{id} is deleted; while it runs, it registers again with the same ticket; to prevent \
             that, run `polisctl cluster ticket rotate`"
        ),
        false => format!("{id} is deleted"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::session::refused;

    #[test]
    fn a_node_that_is_gone_when_it_is_asked_for_again_was_deleted() {
        let refused = |slug: &'static str| {
            let mut status = Status::not_found("there is no such node");
            status.metadata_mut().insert(REASON, slug.parse().unwrap());
            Err(status)
        };
        assert!(deleted(refused("unknown"), true).is_ok());
        assert!(deleted(refused("unknown"), false).is_err(), "nothing was requested before");
        assert!(deleted(refused("quorum"), true).is_err());
        assert!(deleted(Ok(v1::DeleteNodeResponse {}), false).is_ok());
    }

    #[test]
    fn a_departure_whose_end_was_not_seen_is_reported_as_in_progress() {
        let printed = |status: &Status| {
            refused("decommission the node", status).help_if_late(GOES_ON).render()
        };
        let late = printed(&Status::deadline_exceeded("the leader does not answer in time"));
        assert!(late.contains("help: if the decommissioning has started, it continues"), "{late}");
        let refusal = printed(&Status::permission_denied("this call needs an operator"));
        assert!(refusal.contains("help: ask a user with that role"), "{refusal}");
    }

    #[test]
    fn deleting_a_machine_that_never_committed_warns_that_it_registers_again() {
        let printed = |state: v1::NodeState| {
            forgotten(&v1::NodeInfo { state: state.into(), ..Default::default() })
        };
        for state in [v1::NodeState::New, v1::NodeState::Standby] {
            assert!(printed(state).contains("polisctl cluster ticket rotate"));
        }
        for state in [v1::NodeState::Up, v1::NodeState::Decommissioned] {
            assert!(printed(state).ends_with("is deleted"));
        }
    }
}
