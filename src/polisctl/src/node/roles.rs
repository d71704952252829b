//! `polisctl node roles`: gives roles to a node and takes them away.

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use polis_proto::v1;
use polis_proto::v1::management_client::ManagementClient;

use super::drain::Drain;
use super::removal::GOES_ON;
use super::{called, described};
use crate::Global;
use crate::ask::{Go, Sure};
use crate::error::Error;
use crate::session::Session;
use polis_wire::node_roles::Role;
use polis_wire::rpc::client::Repeat;

/// Arguments of `node roles`.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// The node.
    node: String,
    /// Add this role; repeatable.
    #[arg(long, value_parser = role())]
    add: Vec<Role>,
    /// Remove this role; repeatable.
    #[arg(long, value_parser = role())]
    remove: Vec<Role>,
    #[command(flatten)]
    drain: Drain,
    #[command(flatten)]
    sure: Sure,
}

/// Parses a role, with a line of help for each.
fn role() -> impl TypedValueParser<Value = Role> {
    let values = Role::ALL.map(|role| {
        PossibleValue::new(role.slug()).help(match role {
            Role::ConsensusMember => "Runs an etcd member and, with it, the control plane",
            Role::KubernetesController => {
                "Runs the control plane of Kubernetes; needs consensus-member beside it"
            }
            Role::KubernetesWorker => "Runs pods of Kubernetes",
        })
    });
    PossibleValuesParser::new(values).map(|slug| {
        let known = Role::ALL.into_iter().find(|role| role.slug() == slug);
        known.expect("the parser accepts only names of roles")
    })
}

/// Runs the command.
pub(super) async fn run(arguments: &Arguments, global: &Global) -> Result<(), Error> {
    let Arguments { node, add, remove, drain, sure } = arguments;
    if add.is_empty() && remove.is_empty() {
        let roles = Role::ALL.map(Role::slug).join(", ");
        return Err(Error::usage("name a role: --add ROLE or --remove ROLE")
            .or_help(format!("the roles are {roles}")));
    }
    if let Some(both) = add.iter().find(|role| remove.contains(role)) {
        let slug = both.slug();
        return Err(Error::usage(format!("{slug} is both added and removed"))
            .or_help("name it with --add or with --remove alone"));
    }
    if !remove.is_empty() {
        sure.can_be(global)?;
    }
    let mut session = Session::open(global).await?;
    let found = session.find(node).await?;
    let leaves = remove.contains(&Role::ConsensusMember);
    let effect = effect_of_roles(&called(&found), add, remove);
    let node_id = found.id.clone();
    let go = match remove.is_empty() {
        true => sure.only_shown(global, &effect)?,
        false => sure.of(global, &effect)?,
    };
    if go == Go::NoFurther {
        return Ok(());
    }
    let held = match remove.contains(&Role::KubernetesWorker) {
        true => Some(drain.before(&session, &found, global).await?),
        false => None,
    };
    session.begin_anew();
    let (add, remove) = (Some(Role::record(add)), Some(Role::record(remove)));
    let request = v1::UpdateNodeRolesRequest { node_id, add, remove };
    let node = session.call("change the roles", Repeat::Allowed, |channel| {
        let request = request.clone();
        async move { ManagementClient::new(channel).update_node_roles(request).await }
    });
    let node = node.await.map_err(|error| match leaves {
        true => error.help_if_late(GOES_ON),
        false => error,
    });
    drop(held);
    described(&node?, global)
}

fn effect_of_roles(node: &str, add: &[Role], remove: &[Role]) -> String {
    let words =
        |roles: &[Role]| roles.iter().map(|role| role.slug()).collect::<Vec<_>>().join(", ");
    let mut parts = Vec::new();
    if !add.is_empty() {
        parts.push(format!("gets the role {}", words(add)));
    }
    if !remove.is_empty() {
        parts.push(format!("loses the role {}", words(remove)));
    }
    if remove.contains(&Role::ConsensusMember) {
        parts.push("removes its member of etcd and the data of it".to_owned());
    }
    format!("{node} {}.", parts.join(", "))
}
