//! `polisctl cluster update`: another system for every node, one after the other.
//!
//! ```text
//! the bundle, checked here --> the leader plans --> the leader's node keeps the bundle
//!     --> the cluster goes on by itself; `status` shows how far it is, `wait` waits for its end
//! ```

mod wait;

use std::path::{Path, PathBuf};
use std::time::Duration;

use polis_base::hex;
use polis_bundle::Manifest;
use polis_proto::v1;
use polis_proto::v1::cluster_update::State;
use polis_proto::v1::cluster_update::step::State as Progress;
use polis_proto::v1::control_update_request::Control;
use polis_proto::v1::management_client::ManagementClient;
use polis_proto::v1::node_management_client::NodeManagementClient;
use serde::Serialize;
use tokio::time::sleep;

use crate::ask::{DryRun, Go, Sure};
use crate::error::Error;
use crate::node::called;
use crate::output::{Document, Text, fields, or_dash};
use crate::session::{PATIENCE, Session};
use crate::table::table;
use crate::update::OneWay;
use crate::watch::Watch;
use crate::{Global, units, update, upload};
use polis_base::sys::clock;
use polis_wire::rpc::client::Repeat;

const STORE: &str = "store the bundle";

/// How often the leader is asked whether it knows of a bundle that was sent, and the pause. In
/// tests it never learns of one.
const LOOKS: u32 = 20;
const LOOK: Duration = Duration::from_millis(if cfg!(test) { 1 } else { 500 });

/// Arguments of `cluster update`.
#[derive(Debug, clap::Args)]
#[command(
    subcommand_negates_reqs = true,
    override_usage = "polisctl cluster update [OPTIONS] <FILE>\n       \
                      polisctl cluster update [OPTIONS] <COMMAND>"
)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    part: Option<Part>,
    /// The bundle, which `cargo xtask image --bundle` writes.
    #[arg(required = true)]
    file: Option<PathBuf>,
    #[command(flatten)]
    one_way: OneWay,
    /// Wait until the update has ended, as `cluster update wait` does.
    #[arg(long)]
    wait: bool,
    #[command(flatten)]
    sure: Sure,
}

/// The control of the update that goes on.
#[derive(Debug, clap::Subcommand)]
enum Part {
    /// Show how far the update is, or how the last one ended.
    Status(Watch),
    /// Wait until the update has ended, and print each turn as it begins and ends.
    ///
    /// Status 0: every node keeps the new version. Status 1: a node did not take it, which stops
    /// the update, or the update was aborted. Status 3: --timeout ran out; without it, the command
    /// waits as long as the update takes. The update goes on without this command.
    Wait,
    /// Give no further node its turn; the one that has it goes on.
    Pause(DryRun),
    /// Go on; a node that did not take the new version gets another turn.
    Resume(DryRun),
    /// End the update; nodes that have the new version keep it.
    Abort(Sure),
}

/// Runs the command.
pub(super) async fn run(arguments: Arguments, global: &Global) -> Result<(), Error> {
    let Arguments { part, file, one_way, wait, sure } = arguments;
    match part {
        Some(Part::Status(watch)) => {
            let session = Session::brief(global).await?;
            watch.run(global, async || shown(&session, None).await).await
        }
        Some(Part::Wait) => Box::pin(wait::run(global)).await,
        Some(Part::Pause(dry_run)) => {
            let effect = "No further node gets its turn until the update is resumed.";
            match dry_run.of(global, effect)? {
                Go::On => control(Control::Pause, global).await,
                Go::NoFurther => Ok(()),
            }
        }
        Some(Part::Resume(dry_run)) => {
            let effect = "The turns of the update go on, also that of a node that failed.";
            match dry_run.of(global, effect)? {
                Go::On => control(Control::Resume, global).await,
                Go::NoFurther => Ok(()),
            }
        }
        Some(Part::Abort(sure)) => {
            let effect = "The update of the cluster ends where it is: nodes that have the new \
                          version keep it.";
            if sure.of(global, effect)? == Go::NoFurther {
                return Ok(());
            }
            control(Control::Abort, global).await
        }
        None => begin(&file.unwrap_or_default(), one_way, wait, sure, global).await,
    }
}

async fn begin(
    file: &Path,
    one_way: OneWay,
    waits: bool,
    sure: Sure,
    global: &Global,
) -> Result<(), Error> {
    sure.can_be(global)?;
    let (signer, manifest) = update::checked(file)?;
    let bundle = bundle(&manifest, signer.as_bytes());
    let mut session = Session::prepare(global, PATIENCE)?;
    let planned = plan(&session, &bundle, None).await?;
    let nodes = session.nodes(&[]).await?;
    let warning = match planned.steps.is_empty() {
        true => String::new(),
        false => one_way.warning(&planned.etcd, &manifest, sure)?,
    };
    let effect = format!("{}{warning}", effect(&planned, &nodes, &manifest));
    if sure.of(global, &effect)? == Go::NoFurther {
        return Ok(());
    }
    session.begin_anew();
    let begun = plan(&session, &bundle, Some(one_way)).await?;
    if begun.state() == State::Loading {
        let target = session.target(Some(&begun.holder), None).await?;
        let channel = session.connect(&target).await?.channel;
        // It goes on as long as bytes do, and the node ends one that stalls.
        session.go_on();
        let mut client = NodeManagementClient::new(channel);
        let stored =
            upload::send(STORE, file, false, global, |pieces| client.store_bundle(pieces)).await;
        stored.map_err(|error| {
            error
                .context("the cluster waits for the bundle, or for `polisctl cluster update abort`")
                .or_help("repeat the command, or end it: `polisctl cluster update abort`")
        })?;
        session.limit_all(global);
        // The leader learns of it by the holder's next heartbeats.
        let looks = if waits { 0 } else { LOOKS };
        for _look in 0..looks {
            if read(&session).await.is_ok_and(|read| !is_loading(&read)) {
                break;
            }
            sleep(LOOK).await;
        }
    }
    if waits {
        let begun = v1::GetUpdateResponse { update: Some(begun), ..Default::default() };
        return wait::until_ended(&mut session, &begun, nodes, global).await;
    }
    global.out.print(&shown(&session, Some(&begun)).await?)
}

/// Has the leader plan, and with `begins` also begin.
async fn plan(
    session: &Session,
    bundle: &v1::UpdateBundle,
    begins: Option<OneWay>,
) -> Result<v1::ClusterUpdate, Error> {
    session
        .call("plan the update", Repeat::Allowed, |channel| {
            let request = v1::BeginUpdateRequest {
                bundle: Some(bundle.clone()),
                dry_run: begins.is_none(),
                one_way: begins.is_some_and(|allowed| allowed.one_way),
            };
            async move { ManagementClient::new(channel).begin_update(request).await }
        })
        .await
}

fn bundle(manifest: &Manifest, signer: &[u8]) -> v1::UpdateBundle {
    v1::UpdateBundle {
        version: manifest.version.to_string(),
        from: manifest.from.to_string(),
        image: manifest.image.clone(),
        variant: manifest.variant.clone(),
        signer: hex::encode(signer),
        etcd: manifest.etcd.to_string(),
        kubernetes: manifest.kubernetes.as_ref().map(ToString::to_string).unwrap_or_default(),
    }
}

/// The plan in a sentence.
fn effect(planned: &v1::ClusterUpdate, nodes: &[v1::NodeInfo], manifest: &Manifest) -> String {
    let version = &manifest.version;
    let turns: Vec<_> = planned
        .steps
        .iter()
        .map(|step| {
            let kind = if step.voter { "voter" } else { "no voter" };
            format!("{}, {kind}", name(nodes, &step.node_id))
        })
        .collect();
    match turns.len() {
        0 => format!("Every node runs version {version}."),
        1 => format!("One node gets version {version} and restarts: {}.", turns.join("; ")),
        count => format!(
            "{count} nodes get version {version} and restart, one after the other: {}.",
            turns.join("; ")
        ),
    }
}

async fn control(control: Control, global: &Global) -> Result<(), Error> {
    let session = Session::open(global).await?;
    session
        .call("change the update", Repeat::Allowed, |channel| async move {
            let request = v1::ControlUpdateRequest { control: control.into() };
            ManagementClient::new(channel).control_update(request).await
        })
        .await?;
    global.out.print(&shown(&session, None).await?)
}

async fn read(session: &Session) -> Result<v1::GetUpdateResponse, Error> {
    session
        .call("read the update", Repeat::Allowed, |channel| async move {
            ManagementClient::new(channel).get_update(v1::GetUpdateRequest {}).await
        })
        .await
}

fn is_loading(read: &v1::GetUpdateResponse) -> bool {
    read.update.as_ref().is_some_and(|update| update.state() == State::Loading)
}

/// The update as it is now; right after its beginning that is `begun` at least.
async fn shown(session: &Session, begun: Option<&v1::ClusterUpdate>) -> Result<Document, Error> {
    let read = match (read(session).await, begun) {
        (Ok(read), _) => read,
        // It goes on whether it can be shown or not.
        (Err(_), Some(begun)) => {
            v1::GetUpdateResponse { update: Some(begun.clone()), ..Default::default() }
        }
        (Err(error), None) => return Err(error),
    };
    let nodes = session.nodes(&[]).await.unwrap_or_default();
    View::of(&read, &nodes).document()
}

/// An update, as programs read it.
#[derive(Clone, Debug, Serialize)]
pub(super) struct View {
    version: String,
    image: String,
    /// `loading`, `running`, `paused`, `failed`, `done`, `aborted`.
    state: &'static str,
    /// The node that keeps the bundle for the others.
    holder: String,
    began: Option<units::Time>,
    changed: Option<units::Time>,
    waits_for: String,
    waits_since: Option<units::Time>,
    steps: Vec<Step>,
}

#[derive(Clone, Debug, Serialize)]
struct Step {
    node: String,
    #[serde(skip)]
    called: String,
    voter: bool,
    /// `waiting`, `turn`, `done`, `failed`, `gone`.
    state: &'static str,
    since: Option<units::Time>,
    cause: String,
}

impl View {
    pub(super) fn of(read: &v1::GetUpdateResponse, nodes: &[v1::NodeInfo]) -> Self {
        let update = read.update.clone().unwrap_or_default();
        let v1::UpdateBundle { version, image, .. } = update.bundle.clone().unwrap_or_default();
        let time = |seconds| units::since_1970(seconds).map(units::Time);
        let step = |step: &v1::cluster_update::Step| Step {
            node: step.node_id.clone(),
            called: name(nodes, &step.node_id),
            voter: step.voter,
            state: match step.state() {
                Progress::Waiting => "waiting",
                Progress::Turn => "turn",
                Progress::Done => "done",
                Progress::Failed => "failed",
                Progress::Gone => "gone",
                Progress::Unspecified => "unknown",
            },
            since: time(step.since),
            cause: step.cause.clone(),
        };
        // By the names that the other lines have.
        let waits_for = nodes.iter().fold(read.waits_for.clone(), |text, node| match &*node.name {
            "" => text,
            _ => text.replace(&node.id, &called(node)),
        });
        Self {
            version,
            image,
            state: state(&update),
            holder: update.holder.clone(),
            began: time(update.began_at),
            changed: time(update.changed_at),
            waits_for,
            waits_since: time(read.waits_since),
            steps: update.steps.iter().map(step).collect(),
        }
    }

    /// The line in the state of the cluster; `None` where nothing goes on.
    pub(super) fn line(&self) -> Option<String> {
        if matches!(self.state, "done" | "aborted" | "unknown") {
            return None;
        }
        Some(format!("{}; see `polisctl cluster update status`", self.summary()))
    }

    /// How far it is and what it waits for, in a line.
    fn summary(&self) -> String {
        let waits = match self.waits_for.as_str() {
            "" => String::new(),
            what => format!("; waits for {what}"),
        };
        format!("{} to version {}, {}{waits}", self.state, self.version, self.progress())
    }

    /// Whether both are of one update.
    fn is_same(&self, other: &Self) -> bool {
        (self.began, &self.version, &self.image) == (other.began, &other.version, &other.image)
    }

    /// How many nodes are done.
    fn progress(&self) -> String {
        let done = self.steps.iter().filter(|step| step.state == "done").count();
        format!("{done} of {} nodes done", self.steps.len())
    }

    /// The next command, where one is needed.
    fn next(&self) -> Option<&'static str> {
        match self.state {
            "failed" => Some(
                "repair the cause: see the node and its log; then `polisctl cluster update \
                 resume`, or `polisctl cluster update abort`",
            ),
            "paused" => Some("`polisctl cluster update resume` goes on"),
            "loading" => Some(
                "it begins once the leader knows that the bundle is there; if it was not sent \
                 whole: `polisctl cluster update FILE`, or end it: `polisctl cluster update \
                 abort`",
            ),
            _ => None,
        }
    }

    fn document(&self) -> Result<Document, Error> {
        let ago = |time: &units::Time| {
            let passed = clock::now().duration_since(time.0).unwrap_or_default();
            format!(" for {}", units::span(passed))
        };
        let mut lines = vec![
            ("version", self.version.clone()),
            ("state", format!("{}, {}", self.state, self.progress())),
            ("begun", units::text(self.began)),
        ];
        if !self.waits_for.is_empty() {
            let since = self.waits_since.as_ref().map(ago).unwrap_or_default();
            lines.push(("waits for", format!("{}{since}", self.waits_for)));
        }
        lines.extend(self.next().map(|next| ("next", next.to_owned())));
        let rows = self.steps.iter().map(|step| {
            let kind = if step.voter { "yes" } else { "no" };
            let cells = [&step.called, kind, step.state, &units::text(step.since), &step.cause];
            cells.map(or_dash).into()
        });
        let heads = ["NODE", "VOTER", "STATE", "SINCE", "CAUSE"];
        let text = Text::from(fields(&lines)).and("\n");
        Document::new(self, text.then(table(&heads, &rows.collect::<Vec<_>>())))
    }
}

/// The word for the state of an update.
fn state(update: &v1::ClusterUpdate) -> &'static str {
    match update.state() {
        State::Loading => "loading",
        State::Running if update.paused => "paused",
        State::Running => "running",
        State::Failed => "failed",
        State::Done => "done",
        State::Aborted => "aborted",
        State::Unspecified => "unknown",
    }
}

/// The name of a node, or its ID.
fn name(nodes: &[v1::NodeInfo], id: &str) -> String {
    nodes.iter().find(|node| node.id == id).map_or_else(|| id.to_owned(), called)
}
