//! `polisctl node label` and `node name`: what an operator writes into the record of a node.

use polis_proto::v1;
use polis_proto::v1::management_client::ManagementClient;

use super::{called, described};
use crate::ask::{DryRun, Go};
use crate::error::Error;
use crate::session::Session;
use crate::{Global, parameters};
use polis_wire::identity::NodeName;
use polis_wire::rpc::client::Repeat;

/// Arguments of `node label`.
#[derive(Debug, clap::Args)]
pub(crate) struct Label {
    /// The node.
    node: String,
    /// `KEY=VALUE` sets a label, `KEY-` removes it.
    #[arg(required = true, value_name = "KEY=VALUE|KEY-")]
    labels: Vec<String>,
    #[command(flatten)]
    dry_run: DryRun,
}

/// Arguments of `node name`.
#[derive(Debug, clap::Args)]
pub(crate) struct Name {
    /// The node.
    node: String,
    /// The new name: 1 to 63 of a-z, 0-9 and dash, beginning with a letter.
    #[arg(required_unless_present = "remove", value_name = "NAME")]
    name: Option<NodeName>,
    /// Take the name away.
    #[arg(long, conflicts_with = "name")]
    remove: bool,
    #[command(flatten)]
    dry_run: DryRun,
}

/// Sets and removes labels.
pub(super) async fn label(arguments: &Label, global: &Global) -> Result<(), Error> {
    let Label { node, labels, dry_run } = arguments;
    let wanted = labels.join(" ");
    let (remove, set): (Vec<_>, Vec<_>) =
        labels.iter().cloned().partition(|label| !label.contains('=') && label.ends_with('-'));
    let remove: Vec<_> =
        remove.iter().map(|label| label.strip_suffix('-').unwrap_or(label).to_owned()).collect();
    let set = parameters::set_labels("label", &set)?;
    if let Some(both) = set.keys().find(|key| remove.contains(key)) {
        return Err(Error::usage(format!("label {both:?} is both set and removed"))
            .or_help(format!("write {both}=VALUE to replace its value, or {both}- to remove it")));
    }
    let session = Session::open(global).await?;
    let found = session.find(node).await?;
    let (name, node_id) = (called(&found), found.id);
    if dry_run.of(global, &format!("{name} gets its labels changed: {wanted}."))? == Go::NoFurther {
        return Ok(());
    }
    let request = v1::UpdateNodeLabelsRequest { node_id, set, remove };
    let node = session.call("change the labels", Repeat::Allowed, |channel| {
        let request = request.clone();
        async move { ManagementClient::new(channel).update_node_labels(request).await }
    });
    described(&node.await?, global)
}

/// Gives a node a name, or takes it away.
pub(super) async fn name(arguments: &Name, global: &Global) -> Result<(), Error> {
    let Name { node, name, remove: _, dry_run } = arguments;
    let session = Session::open(global).await?;
    let found = session.find(node).await?;
    let effect = match name {
        Some(name) => format!("{} gets the name {name}.", called(&found)),
        None => format!("{} loses its name.", called(&found)),
    };
    if dry_run.of(global, &effect)? == Go::NoFurther {
        return Ok(());
    }
    let name = name.as_ref().map(ToString::to_string).unwrap_or_default();
    let request = v1::NameNodeRequest { node_id: found.id, name };
    let node = session.call("name the node", Repeat::Allowed, |channel| {
        let request = request.clone();
        async move { ManagementClient::new(channel).name_node(request).await }
    });
    described(&node.await?, global)
}
