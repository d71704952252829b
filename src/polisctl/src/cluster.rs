//! `polisctl cluster`: commands about the cluster.

use std::time::Duration;

use polis_proto::v1;
use polis_proto::v1::management_client::ManagementClient;
use serde::Serialize;
use tokio::time::{Instant, sleep};

use super::ask::{DryRun, Go, Sure};
use super::error::{Error, Exit, Explain as _};
use super::node::{View, called, faults, nodes_table};
use super::output::{Document, Text, fields, or_dash};
use super::parameters::Admission;
use super::session::Session;
use super::table::table;
use super::watch::Watch;
use super::{Global, etcd, leaderless, ownership, parameters, units};
use polis_base::hex;
use polis_wire::identity::{Fingerprint, NodeId};
use polis_wire::node_roles::is_consensus_member;
use polis_wire::rpc::client::Repeat;

/// Commands about the cluster.
#[derive(Debug, clap::Subcommand)]
pub(super) enum Command {
    /// Exchange the owner's key for a certificate, and make a context.
    TakeOwnership(ownership::Arguments),
    /// Print what a client or a new node needs to reach and trust the cluster.
    Info,
    /// Print the state of the cluster: nodes, leader, etcd.
    Status(Watch),
    /// Check the cluster, for scripts: status 0 if it is healthy.
    ///
    /// Status 1: it has problems, which are printed, or no leader. Status 3: no curator answers.
    Health,
    /// Print the register ticket, or make a new one.
    Ticket {
        #[command(subcommand)]
        command: Option<Ticket>,
    },
    /// Change the configuration of all nodes of the cluster.
    ///
    /// Fields without an option keep their value. A member of etcd applies the change when
    /// it joins next: a share of its disk's key that must no longer be stored opens the
    /// disk for one more boot. Other nodes and every data partition keep the configuration
    /// that they committed with.
    Configure {
        #[command(flatten)]
        rules: parameters::Rules,
        #[command(flatten)]
        dry_run: DryRun,
    },
    /// Wait until the cluster is healthy.
    ///
    /// A cluster is healthy when a curator leads, every node in state up is healthy, and
    /// every member of etcd votes and answers.
    Wait {
        /// Wait also for this number of nodes in state up.
        #[arg(long, default_value_t = 1, value_name = "N")]
        nodes: usize,
    },
}

/// The commands about the ticket.
#[derive(Debug, clap::Subcommand)]
pub(super) enum Ticket {
    /// Make a new ticket, which replaces the old one.
    Rotate {
        /// Its lifetime, such as 2h [default: unlimited].
        #[arg(long, value_name = "DURATION", value_parser = units::duration)]
        lifetime: Option<Duration>,
        #[command(flatten)]
        sure: Sure,
    },
}

/// Runs the command.
pub(super) async fn run(command: Command, global: &Global) -> Result<(), Error> {
    match command {
        Command::TakeOwnership(arguments) => Box::pin(ownership::run(arguments, global)).await,
        Command::Info => {
            let session = Session::open(global).await?;
            let info = info(&session).await?;
            global.out.print(&Info::document(&info)?)
        }
        Command::Status(watch) => {
            let session = Session::brief(global).await?;
            let read = async || match Box::pin(Status::read(&session)).await {
                Ok(status) => status.with_words().document(),
                Err(error) if error.exit() == Exit::TimedOut => {
                    Box::pin(leaderless::view(&session, error)).await?.document()
                }
                Err(error) => Err(error),
            };
            watch.run(global, read).await
        }
        Command::Health => health(global).await,
        Command::Ticket { command } => {
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
        Command::Configure { rules, dry_run } => configure(&rules, dry_run, global).await,
        Command::Wait { nodes } => wait(global, nodes).await,
    }
}

/// Prints the verdict; an error where it is not a good one.
async fn health(global: &Global) -> Result<(), Error> {
    let session = Session::brief(global).await?;
    let problems = match Status::read(&session).await {
        Ok(status) => status.problems,
        Err(error) if error.exit() == Exit::TimedOut => {
            leaderless::view(&session, error).await?.problems
        }
        Err(error) => return Err(error),
    };
    let value = serde_json::json!({ "healthy": problems.is_empty(), "problems": problems });
    let text = if problems.is_empty() { "healthy".to_owned() } else { problems.join("\n") };
    global.out.print(&Document::new(&value, text)?)?;
    match problems.len() {
        0 => Ok(()),
        1 => Err(Error::new("the cluster has a problem")),
        count => Err(Error::new(format!("the cluster has {count} problems"))),
    }
    .help(|| "`polisctl cluster status` shows all of it".to_owned())
}

/// The state and the description of the cluster, as programs read them.
pub(super) async fn overview(session: &Session) -> Result<serde_json::Value, Error> {
    let status = Status::read(session).await?;
    let info = Info::of(&info(session).await?);
    Ok(serde_json::json!({ "status": status, "info": info }))
}

/// What a rotation does.
const ROTATION: &str = "The cluster makes a new ticket, and rejects every machine that has the \
                        present one and is not approved yet.";

/// Reads the description of the cluster, and stores the addresses of its curators.
pub(super) async fn info(session: &Session) -> Result<v1::GetClusterInfoResponse, Error> {
    let info = session
        .call("read the cluster's configuration", Repeat::Allowed, |channel| async move {
            ManagementClient::new(channel).get_cluster_info(v1::GetClusterInfoRequest {}).await
        })
        .await?;
    session.learn(info.cluster_directory.as_ref());
    Ok(info)
}

async fn configure(
    rules: &parameters::Rules,
    dry_run: DryRun,
    global: &Global,
) -> Result<(), Error> {
    if rules.is_empty() {
        return Err(Error::usage("name what to change: --tpm, --storage, --cold-start"));
    }
    let effect = format!("The settings of all nodes change: {}.", rules.options());
    if dry_run.of(global, &effect)? == Go::NoFurther {
        return Ok(());
    }
    let session = Session::open(global).await?;
    let configuration = rules.named();
    let request = v1::ConfigureClusterRequest { configuration: Some(configuration) };
    session
        .call("configure the cluster", Repeat::Allowed, |channel| {
            let request = request.clone();
            async move { ManagementClient::new(channel).configure_cluster(request).await }
        })
        .await?;
    global.out.print(&Info::document(&info(&session).await?)?)
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
pub(super) async fn admission(global: &Global, wipes: Option<NodeId>) -> Result<Admission, Error> {
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
    let info = info(&session).await?;
    let ticket = ticket(&session, None).await?.ticket;
    let nodes = info.cluster_directory.unwrap_or_default().nodes;
    Ok(Admission { ticket, ca: info.ca_certificate, nodes })
}

/// Whether parameters that wipe this node would end a membership.
fn still_belongs(node: &v1::NodeInfo) -> bool {
    matches!(node.state(), v1::NodeState::Standby | v1::NodeState::Up)
}

/// The domain of the cluster.
pub(super) fn domain(info: &v1::GetClusterInfoResponse) -> String {
    let named = info.configuration.as_ref().map(|named| named.cluster_domain.as_str());
    match named.unwrap_or_default() {
        "" => polis_wire::parameters::ClusterConfiguration::default().domain,
        domain => domain.to_owned(),
    }
}

#[derive(Debug, Serialize)]
struct Info {
    cluster_domain: String,
    leader: String,
    ca_fingerprint: String,
    ca_words: String,
    nodes: Counts,
    tpm_mode: String,
    storage_security_policy: String,
    cold_start: String,
    directory: Vec<Entry>,
}

#[derive(Debug, Serialize)]
struct Counts {
    new: u32,
    standby: u32,
    up: u32,
    decommissioned: u32,
}

#[derive(Debug, Serialize)]
struct Entry {
    id: String,
    addresses: Vec<String>,
}

/// The words of an enum of the API: `TPM_MODE_BEST_EFFORT` is `best_effort`.
pub(super) fn word(name: &str, prefix: &str) -> String {
    name.strip_prefix(prefix).unwrap_or(name).to_lowercase()
}

impl Info {
    fn document(info: &v1::GetClusterInfoResponse) -> Result<Document, Error> {
        let view = Self::of(info);
        let Counts { new, standby, up, decommissioned } = view.nodes;
        let nodes =
            format!("{up} up, {standby} standby, {new} new, {decommissioned} decommissioned");
        let directory = view.directory.iter();
        let directory =
            directory.map(|entry| format!("{} at {}", entry.id, entry.addresses.join(", ")));
        let lines = [
            ("domain", or_dash(&view.cluster_domain)),
            ("leader", or_dash(&view.leader)),
            ("nodes", nodes),
            ("CA", format!("{}\n{}", view.ca_words, view.ca_fingerprint)),
            ("storage", parameters::show::storage(&view.storage_security_policy)),
            ("TPM", view.tpm_mode.replace('_', " ")),
            ("cold start", view.cold_start.clone()),
            ("directory", or_dash(&directory.collect::<Vec<_>>().join("\n"))),
        ];
        Document::new(&view, fields(&lines))
    }

    fn of(info: &v1::GetClusterInfoResponse) -> Self {
        let configuration = info.configuration.clone().unwrap_or_default();
        let ca = Fingerprint::of_certificate(&info.ca_certificate);
        let directory = info.cluster_directory.clone().unwrap_or_default().nodes.into_iter();
        Self {
            leader: info.leader.clone(),
            ca_fingerprint: ca.to_string(),
            ca_words: ca.words(),
            nodes: Counts {
                new: info.nodes_new,
                standby: info.nodes_standby,
                up: info.nodes_up,
                decommissioned: info.nodes_decommissioned,
            },
            tpm_mode: word(configuration.tpm_mode().as_str_name(), "TPM_MODE_"),
            storage_security_policy: word(
                configuration.storage_security_policy().as_str_name(),
                "STORAGE_SECURITY_POLICY_",
            ),
            cold_start: word(configuration.cold_start().as_str_name(), "COLD_START_"),
            cluster_domain: domain(info),
            directory: directory
                .map(|node| Entry { id: node.id, addresses: node.addresses })
                .collect(),
        }
    }
}

#[derive(Debug, Serialize)]
struct Status {
    healthy: bool,
    /// `leader`: the leader has reported it.
    source: &'static str,
    /// Everything that keeps the cluster from being healthy, a sentence each.
    problems: Vec<String>,
    cluster_domain: String,
    leader: String,
    nodes: Vec<View>,
    etcd: etcd::Status,
    /// Registrations that the leader refused, the newest first.
    refused: Vec<Refused>,
}

/// A refused registration.
#[derive(Clone, Debug, Serialize)]
struct Refused {
    /// The node ID of its key.
    id: String,
    /// The words of its fingerprint, as on its screen.
    #[serde(skip_serializing_if = "Option::is_none")]
    words: Option<String>,
    #[serde(skip)]
    key: Option<[u8; 32]>,
    address: String,
    reason: String,
    count: u64,
    last: Option<units::Time>,
}

impl Refused {
    fn of(refused: &v1::RefusedRegistration) -> Self {
        let key = <[u8; 32]>::try_from(refused.public_key.as_slice()).ok();
        Self {
            id: key.map(|key| NodeId::from_public_key(&key).to_string()).unwrap_or_default(),
            words: None,
            key,
            address: refused.address.clone(),
            reason: refused.reason.clone(),
            count: refused.count,
            last: units::since_1970(refused.last_at).map(units::Time),
        }
    }

    /// The same with the words of its key, which take a moment to compute.
    fn with_words(&self) -> Self {
        let words = self.key.map(|key| Fingerprint::of_key(&key).words());
        Self { words, ..self.clone() }
    }

    fn row(&self) -> Vec<String> {
        let cells = [
            &self.id,
            self.words.as_deref().unwrap_or_default(),
            &self.address,
            &self.reason,
            &self.count.to_string(),
            &units::text(self.last),
        ];
        cells.map(or_dash).into()
    }
}

impl Status {
    async fn read(session: &Session) -> Result<Self, Error> {
        let info = info(session).await?;
        let nodes = session.nodes(&[]).await?;
        let consensus = etcd::read(session).await?;
        Ok(Self::of(&info, &nodes, &consensus))
    }

    fn of(
        info: &v1::GetClusterInfoResponse,
        nodes: &[v1::NodeInfo],
        consensus: &v1::ConsensusStatus,
    ) -> Self {
        let problems = problems(info, nodes, consensus);
        Self {
            healthy: problems.is_empty(),
            source: "leader",
            problems,
            cluster_domain: domain(info),
            leader: info.leader.clone(),
            nodes: nodes.iter().map(View::of).collect(),
            etcd: etcd::Status::of(consensus).with_names(nodes),
            refused: info.refused_registrations.iter().map(Refused::of).collect(),
        }
    }

    fn with_words(self) -> Self {
        let refused = self.refused.iter().map(Refused::with_words).collect();
        Self { refused, ..self }
    }

    /// What to do about nodes whose heartbeat is overdue.
    fn overdue(&self) -> Option<String> {
        let late = self.nodes.iter().filter(|node| node.is_late());
        let commands: Vec<_> =
            late.map(|node| format!("`polisctl node delete {} --force`", node.id())).collect();
        (!commands.is_empty())
            .then(|| format!("switch it on; if its machine is lost:\n{}", commands.join("\n")))
    }

    /// The nodes that wait for approval, with the command.
    fn waiting(&self) -> Option<String> {
        let new = self.nodes.iter().filter(|node| node.is_new());
        let lines: Vec<_> =
            new.map(|node| format!("`polisctl node approve {}`", node.id())).collect();
        (!lines.is_empty()).then(|| lines.join("\n"))
    }

    /// The command for recovery keys that only the cluster stores. The cluster is healthy
    /// all the same, but a lost cluster loses them.
    fn unsaved(&self) -> Option<String> {
        let unsaved = self.nodes.iter().filter(|node| node.is_recovery_key_unsaved());
        let unsaved: Vec<_> = unsaved.map(View::id).collect();
        let first = unsaved.first()?;
        let nodes = if unsaved.len() == 1 { "node" } else { "nodes" };
        let count = unsaved.len();
        Some(format!(
            "recovery keys unsaved on {count} {nodes}: `polisctl node recovery-key show {first}`"
        ))
    }

    fn document(&self) -> Result<Document, Error> {
        let state = if self.healthy { "healthy".to_owned() } else { self.problems.join("\n") };
        let mut lines = vec![
            ("cluster", or_dash(&self.cluster_domain)),
            ("state", state),
            ("leader", or_dash(&self.leader)),
            ("etcd", self.etcd.summary()),
        ];
        lines.extend(self.overdue().map(|advice| ("overdue", advice)));
        lines.extend(self.waiting().map(|advice| ("waiting", advice)));
        lines.extend(self.unsaved().map(|advice| ("recovery", advice)));
        let mut text = Text::from(fields(&lines))
            .and("\n")
            .then(nodes_table(&self.nodes))
            .and(faults(&self.nodes));
        if !self.refused.is_empty() {
            let rows: Vec<_> = self.refused.iter().map(Refused::row).collect();
            let heads = ["REFUSED", "WORDS", "ADDRESS", "REASON", "TIMES", "LAST"];
            text = text.and("\n").then(table(&heads, &rows));
        }
        Document::new(self, text)
    }
}

/// Everything that keeps a cluster from being healthy, a sentence each.
fn problems(
    info: &v1::GetClusterInfoResponse,
    nodes: &[v1::NodeInfo],
    consensus: &v1::ConsensusStatus,
) -> Vec<String> {
    let mut problems = Vec::new();
    if info.leader.is_empty() {
        problems.push("the curator has no leader".to_owned());
    }
    for node in nodes.iter().filter(|node| node.state() == v1::NodeState::Up) {
        match node.health() {
            v1::NodeHealth::Healthy => {}
            v1::NodeHealth::Late => problems.push(format!("{}: heartbeat overdue", called(node))),
            v1::NodeHealth::Unknown => problems.push(format!(
                "{}: health unknown, no heartbeat since the leader changed",
                called(node)
            )),
            v1::NodeHealth::Absent => problems.push(format!("{}: no heartbeat yet", called(node))),
        }
    }
    for node in nodes.iter().filter(|node| node.state() == v1::NodeState::Standby) {
        problems.push(format!("{} has not committed yet", called(node)));
    }
    let enters = |node: &&v1::NodeInfo| {
        let role = is_consensus_member(node.roles.as_ref());
        let member = consensus.members.iter().any(|member| member.node_id == node.id);
        node.state() == v1::NodeState::Up && role && !member && !node.leaving
    };
    for node in nodes.iter().filter(enters) {
        let advice = match node.health() {
            v1::NodeHealth::Healthy => "if this lasts, remove the role and add it again",
            v1::NodeHealth::Late | v1::NodeHealth::Unknown | v1::NodeHealth::Absent => {
                "it is off or cut off, and continues once it is back"
            }
        };
        problems.push(format!(
            "{} has the role consensus member but no member of etcd yet; {advice}",
            called(node)
        ));
    }
    for node in nodes.iter().filter(|node| node.leaving) {
        problems.push(format!("{} is leaving etcd", called(node)));
    }
    if consensus.leader == 0 {
        problems.push("etcd has no leader".to_owned());
    }
    for member in &consensus.members {
        let known = nodes.iter().find(|node| node.id == member.node_id);
        let name = match (known, member.node_id.as_str()) {
            (Some(node), _) => called(node),
            (None, "") => "a new member".to_owned(),
            (None, id) => id.to_owned(),
        };
        if !member.answers {
            problems.push(format!("the etcd member of {name} does not answer"));
        }
        if member.learner {
            problems.push(format!("the etcd member of {name} is learning"));
        }
    }
    problems.extend(consensus.alarms.iter().map(|alarm| format!("etcd raises {alarm}")));
    problems
}

/// How long `wait` waits without `--timeout`.
const WAIT: Duration = Duration::from_secs(10 * 60);
/// Between two queries.
const PACE: Duration = Duration::from_secs(1);
/// Longest that one query searches for a leader: long enough for silent curators to time
/// out, so that the result of each is known.
const QUERY_MAX: Duration = Duration::from_secs(10);
/// Grace for the last query after the deadline, so that its result can be reported.
const GRACE: Duration = Duration::from_millis(500);

async fn wait(global: &Global, wanted: usize) -> Result<(), Error> {
    let total = global.timeout.unwrap_or(WAIT);
    let end = Instant::now() + total;
    let mut session = Session::prepare(global, QUERY_MAX)?;
    let progress = global.out.progress();
    let mut missing = "looking for the leader of the cluster".to_owned();
    loop {
        progress.says(&missing);
        let left = end.saturating_duration_since(Instant::now());
        // One query must not use up the whole timeout: there would be nothing to report.
        session.limit_calls(QUERY_MAX.min(left));
        missing = match tokio::time::timeout(left + GRACE, look(&session, wanted)).await {
            Ok(Ok(Look::Whole(status))) => {
                drop(progress);
                return global.out.print(&status.document()?);
            }
            Ok(Ok(Look::Missing(missing))) => missing,
            // An outage may end while `wait` waits; a refusal does not.
            Ok(Err(error)) if error.exit() == Exit::TimedOut => error.summary(),
            Ok(Err(error)) => return Err(error),
            Err(_elapsed) => missing,
        };
        if Instant::now() + PACE >= end {
            drop(progress);
            return Err(Error::timed_out(missing)
                .context(format!("the cluster is not healthy after {}", units::span(total)))
                .or_help("see `polisctl cluster status`"));
        }
        sleep(PACE).await;
    }
}

/// The result of one query.
enum Look {
    Whole(Box<Status>),
    Missing(String),
}

async fn look(session: &Session, wanted: usize) -> Result<Look, Error> {
    let status =
        Status::read(session).await.doing(|| "cannot read the state of the cluster".to_owned())?;
    let up = status.nodes.iter().filter(|node| node.is_up()).count();
    if up < wanted {
        return Ok(Look::Missing(format!("{up} of {wanted} nodes are up")));
    }
    match status.problems.first() {
        None => Ok(Look::Whole(Box::new(status))),
        Some(problem) => Ok(Look::Missing(problem.clone())),
    }
}

#[cfg(test)]
#[path = "cluster_tests.rs"]
mod tests;
