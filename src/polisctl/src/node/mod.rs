//! `polisctl node`: commands about nodes.
//!
//! Commands about membership go to the leader; reboots, logs and locked disks are requests
//! to the node itself.

mod attest;
mod drain;
mod firewall;
mod firmware;
mod logs;
mod look;
mod network;
mod proof;
mod recovery;
mod reset;
#[cfg(test)]
#[path = "tests.rs"]
mod stories;
mod update;
mod view;

use std::path::PathBuf;

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use polis_proto::v1;
use polis_proto::v1::management_client::ManagementClient;
use polis_proto::v1::node_management_client::NodeManagementClient;
use tonic::{Response, Status};

use self::drain::Drain;
use super::ask::{self, DryRun, Go, Sure};
use super::error::{Error, Exit};
use super::output::{Document, Text};
use super::session::{self, PATIENCE, Session, Target};
use super::watch::Watch;
use super::{Global, parameters};
use polis_wire::endpoint::{self, Endpoint, MANAGEMENT_PORT};
use polis_wire::identity::{NodeName, Spoken};
use polis_wire::node_roles::Role;
use polis_wire::rpc::REASON;
use polis_wire::rpc::client::Repeat;

pub(super) use self::logs::lines as log_lines;
pub(super) use self::look::documents;
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
    Status(look::Arguments),
    /// Print the services of a node: the tree, with states, restarts and causes.
    Services(look::Arguments),
    /// Print the rules of a node's firewall: the allowed callers of each port, and its purpose.
    Firewall(look::Arguments),
    /// Print the links of a node, or order another network for it: it tries that, and returns to
    /// the former one unless it still reaches the cluster.
    Network(Box<network::Arguments>),
    /// Have a node's TPM prove what the node was started with, and compare it.
    Attest(attest::Arguments),
    /// Approve a node that waits for approval.
    Approve {
        /// The node.
        node: String,
        /// The fingerprint on the machine's screen: four words, or 64
        /// hexadecimal digits.
        #[arg(long, value_name = "WORDS|HEX", value_parser = spoken)]
        fingerprint: Option<String>,
        /// Skip the comparison of the fingerprint: any machine with the ticket may be
        /// approved.
        #[arg(long, conflicts_with = "fingerprint")]
        unchecked: bool,
        #[command(flatten)]
        wanted: attest::Wanted,
        #[command(flatten)]
        dry_run: DryRun,
    },
    /// Add and remove roles.
    Roles {
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
    },
    /// Set and remove labels.
    Label {
        /// The node.
        node: String,
        /// `KEY=VALUE` sets a label, `KEY-` removes it.
        #[arg(required = true, value_name = "KEY=VALUE|KEY-")]
        labels: Vec<String>,
        #[command(flatten)]
        dry_run: DryRun,
    },
    /// Give a node a name, which commands accept in place of its ID.
    Name {
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
    },
    /// Stop the services of a machine and reboot it.
    Reboot(End),
    /// Stop the services of a machine and power it off.
    Poweroff(End),
    /// Put the system of an update bundle on a machine and reboot it into that system; it goes
    /// back by itself if it does not get ready.
    Update(update::Arguments),
    /// Announce a firmware update of a machine: the next start opens its disk whatever the
    /// firmware measures.
    AnnounceFirmwareUpdate(firmware::Arguments),
    /// Remove a node's roles and membership for good.
    Decommission {
        /// The node.
        node: String,
        #[command(flatten)]
        drain: Drain,
        #[command(flatten)]
        sure: Sure,
    },
    /// Decommission a node, and let its machine wipe its keys and its data partition.
    Reset {
        /// The node.
        node: String,
        #[command(flatten)]
        at: At,
        #[command(flatten)]
        drain: Drain,
        #[command(flatten)]
        sure: Sure,
    },
    /// Delete a node's record, and revoke its certificates.
    Delete {
        /// The node.
        node: String,
        /// Delete it even in state up, as a lost machine.
        #[arg(long)]
        force: bool,
        #[command(flatten)]
        sure: Sure,
    },
    /// Print the log of a node.
    Logs(logs::Arguments),
    /// Print the recovery key of a node's disk, delete the cluster's copy, or turn a saved one into
    /// a passphrase.
    RecoveryKey(recovery::Arguments),
    /// Open the disk of a node that waits for its key.
    Unlock {
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
    },
}

/// Which nodes to list.
#[derive(Debug, clap::Args)]
pub(super) struct List {
    /// Only with this label; repeatable.
    #[arg(long = "label", value_name = "KEY=VALUE")]
    labels: Vec<String>,
    /// Only in this state; repeatable.
    #[arg(long = "state", value_enum)]
    states: Vec<State>,
    #[command(flatten)]
    watch: Watch,
}

/// A machine to reboot or power off.
#[derive(Debug, clap::Args)]
pub(super) struct End {
    /// The node.
    node: String,
    #[command(flatten)]
    at: At,
    #[command(flatten)]
    drain: Drain,
    #[command(flatten)]
    sure: Sure,
}

/// The address of a node that the cluster does not have.
#[derive(Debug, clap::Args)]
pub(super) struct At {
    /// The address of the node's own port [default: asked of the cluster].
    #[arg(long, value_name = "HOST[:PORT]", value_parser = management)]
    pub(super) at: Option<Endpoint>,
}

/// A fingerprint as it was typed: the cluster compares it.
fn spoken(text: &str) -> Result<String, <Spoken as std::str::FromStr>::Err> {
    text.parse::<Spoken>().map(|_fingerprint| text.to_owned())
}

fn management(text: &str) -> Result<Endpoint, endpoint::Invalid> {
    Endpoint::parse(text, MANAGEMENT_PORT)
}

/// The state of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum State {
    /// Waits for approval.
    New,
    /// Is approved and has not committed yet.
    Standby,
    /// A member.
    Up,
    /// Was removed.
    Decommissioned,
}

impl From<State> for v1::NodeState {
    fn from(state: State) -> Self {
        match state {
            State::New => Self::New,
            State::Standby => Self::Standby,
            State::Up => Self::Up,
            State::Decommissioned => Self::Decommissioned,
        }
    }
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

/// The help after a timeout of a deletion, which first removes the node from etcd: that may
/// take longer than a call, and a repeated call goes on where it stopped.
const REPEAT: &str = "if `polisctl node list` still shows the node, repeat the command with more \
                      time, for example `--timeout 2m`; a busy cluster needs it for a voter";

/// The help after a timeout of a decommissioning, which continues without the client.
const GOES_ON: &str = "if the decommissioning has started, it continues: see `polisctl cluster \
                       status`, or repeat the command to wait for its end";

/// Runs the command.
pub(super) async fn run(command: Command, global: &Global) -> Result<(), Error> {
    match command {
        Command::List(arguments) => list(&arguments, global).await,
        Command::Describe { node } => describe(&node, global).await,
        Command::Status(arguments) => look::status(&arguments, global).await,
        Command::Services(arguments) => look::services(&arguments, global).await,
        Command::Firewall(arguments) => firewall::run(&arguments, global).await,
        Command::Network(arguments) => Box::pin(network::run(&arguments, global)).await,
        Command::Attest(arguments) => Box::pin(attest::run(arguments, global)).await,
        Command::Approve { node, fingerprint, unchecked, wanted, dry_run } => {
            approve(&node, fingerprint, unchecked, wanted, dry_run, global).await
        }
        Command::Roles { node, add, remove, drain, sure } => {
            change_roles(&node, &add, &remove, drain, sure, global).await
        }
        Command::Label { node, labels, dry_run } => label(&node, &labels, dry_run, global).await,
        Command::Name { node, name, remove: _, dry_run } => {
            give_name(&node, name.as_ref(), dry_run, global).await
        }
        Command::Reboot(end) => ends(&end, false, global).await,
        Command::Poweroff(end) => ends(&end, true, global).await,
        Command::Update(arguments) => update::run(arguments, global).await,
        Command::AnnounceFirmwareUpdate(arguments) => firmware::run(&arguments, global).await,
        Command::Decommission { node, drain, sure } => {
            decommission(&node, drain, sure, global).await
        }
        Command::Reset { node, at, drain, sure } => {
            reset::run(&node, &at, drain, sure, global).await
        }
        Command::Delete { node, force, sure } => delete(&node, force, sure, global).await,
        Command::Logs(arguments) => logs::run(arguments, global).await,
        Command::RecoveryKey(arguments) => recovery::run(arguments, global).await,
        Command::Unlock { node, recovery_key_file, fingerprint, at, dry_run } => {
            unlock(&node, recovery_key_file, fingerprint.as_ref(), &at, dry_run, global).await
        }
    }
}

async fn describe(node: &str, global: &Global) -> Result<(), Error> {
    let session = Session::open(global).await?;
    described(&session.find(node).await?, global)
}

async fn change_roles(
    node: &str,
    add: &[Role],
    remove: &[Role],
    drain: Drain,
    sure: Sure,
    global: &Global,
) -> Result<(), Error> {
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

async fn decommission(node: &str, drain: Drain, sure: Sure, global: &Global) -> Result<(), Error> {
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
fn volumes_end(node: &v1::NodeInfo) -> &'static str {
    let worker = node.roles.as_ref().is_some_and(|roles| roles.kubernetes_worker.is_some());
    if worker { " The persistent volumes on it are lost." } else { "" }
}

/// Has the leader decommission a node.
async fn decommissioned(
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

async fn delete(node: &str, force: bool, sure: Sure, global: &Global) -> Result<(), Error> {
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

/// Every node with an address: those that the leader lists as members, else those that the
/// context knows.
pub(super) async fn targets(session: &Session) -> Result<Vec<Target>, Error> {
    match session.nodes(&[]).await {
        Ok(nodes) => {
            let up = nodes.iter().filter(|node| node.state() == v1::NodeState::Up);
            Ok(up.filter_map(|node| session::target(node).ok()).collect())
        }
        Err(error) if error.exit() == Exit::TimedOut => match session.known_nodes() {
            known if known.is_empty() => Err(error),
            known => Ok(known),
        },
        Err(error) => Err(error),
    }
}

/// Everything about one node.
pub(super) fn described_view(node: &v1::NodeInfo) -> View {
    View::with_words(node)
}

fn described(node: &v1::NodeInfo, global: &Global) -> Result<(), Error> {
    let view = described_view(node);
    global.out.print(&Document::new(&view, view.fields())?)
}

/// Prints the nodes.
pub(super) async fn list(arguments: &List, global: &Global) -> Result<(), Error> {
    let List { labels, states, watch } = arguments;
    let labels = parameters::pairs("--label", labels)?;
    let mut session = Session::open(global).await?;
    if watch.is_on() {
        session.go_on();
    }
    let fits = |node: &v1::NodeInfo| {
        let state = node.state();
        (states.is_empty() || states.iter().any(|wanted| v1::NodeState::from(*wanted) == state))
            && labels.iter().all(|(key, value)| node.labels.get(key) == Some(value))
    };
    let listed = async || {
        let nodes = session.nodes(&[]).await?;
        let views: Vec<View> = nodes.iter().filter(|node| fits(node)).map(View::of).collect();
        Document::new(&views, Text::from(nodes_table(&views)).and(faults(&views)))
    };
    watch.run(global, listed).await
}

async fn approve(
    node: &str,
    fingerprint: Option<String>,
    unchecked: bool,
    wanted: attest::Wanted,
    dry_run: DryRun,
    global: &Global,
) -> Result<(), Error> {
    let mut session = Session::open(global).await?;
    let node = session.find(node).await?;
    attest::check_recorded(&node, wanted)?;
    if dry_run.of(global, &format!("{} may enter the cluster.", called(&node)))? == Go::NoFurther {
        return Ok(());
    }
    let fingerprint = match fingerprint {
        Some(spoken) => spoken,
        None if unchecked => String::new(),
        None => {
            let shown = view::fingerprint(&node).ok_or_else(|| {
                Error::new(format!("{} has no key", node.id))
                    .or_help("its record is damaged: `polisctl node delete`, and register it again")
            })?;
            let proof = proof::Recorded::of(&node);
            let proof = match proof.map(|proof| proof.text()) {
                Some(proof) => format!("What its TPM proved: {proof}\n\n"),
                None => "Its TPM has proved nothing.\n\n".to_owned(),
            };
            let question = format!(
                "{} waits for approval. Its fingerprint is\n\n    {}\n    \
                 {shown}\n\n{}Does the machine's screen show the same?",
                called(&node),
                shown.words(),
                proof
            );
            let instead = "name the fingerprint on the machine's screen: --fingerprint WORDS; or \
                           skip the comparison: --unchecked";
            ask::confirm(global, &question, instead)?;
            session.begin_anew();
            shown.to_string()
        }
    };
    let request = v1::ApproveNodeRequest { node_id: node.id, fingerprint };
    let answer = session.call("approve the node", Repeat::Allowed, |channel| {
        let request = request.clone();
        async move { ManagementClient::new(channel).approve_node(request).await }
    });
    described(&answer.await?.node.unwrap_or_default(), global)
}

async fn label(
    node: &str,
    labels: &[String],
    dry_run: DryRun,
    global: &Global,
) -> Result<(), Error> {
    let wanted = labels.join(" ");
    let (remove, set): (Vec<_>, Vec<_>) =
        labels.iter().cloned().partition(|label| !label.contains('=') && label.ends_with('-'));
    let remove: Vec<_> =
        remove.iter().map(|label| label.strip_suffix('-').unwrap_or(label).to_owned()).collect();
    let set = parameters::pairs("label", &set)?;
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

async fn give_name(
    node: &str,
    name: Option<&NodeName>,
    dry_run: DryRun,
    global: &Global,
) -> Result<(), Error> {
    let session = Session::open(global).await?;
    let found = session.find(node).await?;
    let effect = match name {
        Some(name) => format!("{} gets the name {name}.", called(&found)),
        None => format!("{} loses its name.", called(&found)),
    };
    if dry_run.of(global, &effect)? == Go::NoFurther {
        return Ok(());
    }
    let name = name.map(ToString::to_string).unwrap_or_default();
    let request = v1::NameNodeRequest { node_id: found.id, name };
    let node = session.call("name the node", Repeat::Allowed, |channel| {
        let request = request.clone();
        async move { ManagementClient::new(channel).name_node(request).await }
    });
    described(&node.await?, global)
}

async fn ends(end: &End, power_off: bool, global: &Global) -> Result<(), Error> {
    end.sure.can_be(global)?;
    let mut session = Session::prepare(global, PATIENCE)?;
    let target = session.target(Some(&end.node), end.at.at.as_ref()).await?;
    let node = session.connect(&target).await?;
    let (id, at) = (node.node.to_string(), node.address);
    // The certificate has the ID alone.
    let name = match end.node.parse::<NodeName>() {
        Ok(name) => format!("{name} ({id})"),
        Err(_not_a_name) => id.clone(),
    };
    let effect = match power_off {
        true => format!("{name} at {at} stops its services and powers off."),
        false => format!("{name} at {at} stops its services and reboots."),
    };
    if end.sure.of(global, &effect)? == Go::NoFurther {
        return Ok(());
    }
    let held = end.drain.hold(node.channel.clone(), &name, global).await?;
    session.begin_anew();
    let what = if power_off { "power the machine off" } else { "reboot the machine" };
    let mut client = NodeManagementClient::new(node.channel);
    session.within(what, client.reboot(v1::RebootRequest { power_off })).await?;
    drop(held);
    let value = serde_json::json!({ "node": id, "power_off": power_off });
    let text = if power_off { "powers off" } else { "reboots" };
    global.out.print(&Document::new(&value, format!("{name} {text}"))?)
}

async fn unlock(
    node: &str,
    file: Option<PathBuf>,
    fingerprint: Option<&Spoken>,
    at: &At,
    dry_run: DryRun,
    global: &Global,
) -> Result<(), Error> {
    let mut session = Session::prepare(global, PATIENCE)?;
    let target = session.target(Some(node), at.at.as_ref()).await?;
    let address = &target.address;
    let effect = format!("{node} at {address} gets the recovery key, and opens its disk.");
    if dry_run.of(global, &effect)? == Go::NoFurther {
        return Ok(());
    }
    // A mistyped key is rejected here, without a connection to the machine.
    let text = recovery::saved_text(file.as_deref())?;
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
