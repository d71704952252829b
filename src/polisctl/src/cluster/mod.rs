//! `polisctl cluster`: commands about the cluster.

mod attestation;
mod firewall;
pub(super) mod info;
mod kubernetes_names;
mod logs;
mod proxy;
mod registry;
mod rotate;
mod settings;
mod snapshots;
mod status;
pub(super) mod ticket;
mod update;
mod wait;

#[cfg(test)]
mod tests;

use clap::builder::RangedU64ValueParser;
use polis_proto::v1;
use polis_proto::v1::management_client::ManagementClient;

use self::info::Info;
use self::registry::Registry;
use self::status::Status;
use self::ticket::Ticket;
use super::ask::{DryRun, Go};
use super::error::{Error, Exit, Explain as _};
use super::output::Document;
use super::session::Session;
use super::watch::Watch;
use super::{Global, leaderless, ownership, parameters};
use polis_wire::node_roles::NODES_MAX;
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
    /// Print the ticket that machines register with, or make a new one.
    Ticket {
        #[command(subcommand)]
        command: Option<Ticket>,
    },
    /// Set how workers reach registries of images: mirrors, authorities, users.
    Registry {
        #[command(subcommand)]
        command: Registry,
    },
    /// Change the configuration of all nodes of the cluster.
    ///
    /// Fields without an option keep their value. Every node asks new time servers, sends its log
    /// to new targets and uses another proxy at once, a controller has a certificate for new names
    /// of Kubernetes within seconds, and a new attestation policy holds at once for the machines
    /// that enter. A member of etcd applies the other changes when it joins next: a share of its
    /// disk's key that must no longer be stored opens the disk for one more boot. Other nodes and
    /// every data partition keep the configuration that they committed with.
    ///
    /// Another firewall is tried first: this command calls every healthy node through it, and
    /// confirms it. If that fails, every node returns to the former one within two minutes.
    Configure {
        #[command(flatten)]
        rules: parameters::Rules,
        #[command(flatten)]
        logs: logs::Targets,
        #[command(flatten)]
        snapshots: snapshots::Target,
        #[command(flatten)]
        kubernetes: kubernetes_names::Names,
        #[command(flatten)]
        proxy: proxy::Proxy,
        #[command(flatten)]
        attestation: attestation::Policy,
        #[command(flatten)]
        firewall: firewall::Wish,
        #[command(flatten)]
        dry_run: DryRun,
    },
    /// Print the settings of the cluster as one file, or write them to a file.
    ///
    /// The file has what `cluster configure` and `cluster registry set` set, and no secrets:
    /// `unchanged` stands in place of each. `cluster apply` reads it.
    Export(settings::Export),
    /// Change the settings of the cluster to those of a file that `cluster export` has written.
    ///
    /// Prints what differs, asks, and sends that alone. A setting that the file does not name
    /// stays as it is; a list in the file replaces the whole list of the cluster.
    Apply(settings::Apply),
    /// Give every node another system from an update bundle, one after the other.
    ///
    /// Nodes that do not vote come first, then the voters, the leader of the cluster last.
    /// The leader goes on by itself, also after a change of leaders or a loss of power, and
    /// stops at the first node that does not take the new version.
    Update(update::Arguments),
    /// Replace the CA of the cluster, the authority of etcd's members, and those of Kubernetes.
    ///
    /// Use it when a key of theirs may be in the wrong hands: the disk of a voter or a snapshot
    /// was stolen. The cluster serves meanwhile, and goes on by itself after a change of leaders
    /// or a loss of power. Nodes and users that are away learn of it when they are back.
    RotateCa(rotate::Arguments),
    /// Wait until the cluster is healthy.
    ///
    /// A cluster is healthy when a curator leads, every node in state up is healthy, no part
    /// of Kubernetes ends again and again, every member of etcd votes and answers, and no node
    /// differs from the attestation policy. Without --timeout it waits ten minutes.
    Wait {
        /// Wait also for this number of nodes in state up.
        #[arg(long, default_value_t = 1, value_name = "N",
              value_parser = RangedU64ValueParser::<usize>::from(..=NODES_MAX as u64))]
        nodes: usize,
    },
}

/// Runs the command.
pub(super) async fn run(command: Command, global: &Global) -> Result<(), Error> {
    match command {
        Command::TakeOwnership(arguments) => Box::pin(ownership::run(arguments, global)).await,
        Command::Info => {
            let session = Session::open(global).await?;
            global.out.print(&Info::document(&session.cluster_info().await?)?)
        }
        Command::Status(watch) => {
            let session = Session::brief(global).await?;
            let read = async || match Box::pin(Status::read(&session)).await {
                Ok(status) => status.document(),
                Err(error) if error.exit() == Exit::TimedOut => {
                    Box::pin(leaderless::view(&session, error)).await?.document()
                }
                Err(error) => Err(error),
            };
            watch.run(global, read).await
        }
        Command::Health => health(global).await,
        Command::Ticket { command } => ticket::run(command, global).await,
        Command::Registry { command } => registry::run(command, global).await,
        Command::Configure {
            rules,
            logs,
            snapshots,
            kubernetes,
            proxy,
            attestation,
            firewall,
            dry_run,
        } => {
            let wish = Wish { rules, logs, snapshots, kubernetes, proxy, attestation, firewall };
            Box::pin(configure(&wish, dry_run, global)).await
        }
        Command::Export(arguments) => Box::pin(settings::export(&arguments, global)).await,
        Command::Apply(arguments) => Box::pin(settings::apply(&arguments, global)).await,
        Command::Update(arguments) => Box::pin(update::run(arguments, global)).await,
        Command::RotateCa(arguments) => Box::pin(rotate::run(arguments, global)).await,
        Command::Wait { nodes } => wait::run(global, nodes).await,
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
    let info = Info::of(&session.cluster_info().await?);
    Ok(serde_json::json!({ "status": status, "info": info }))
}

/// The changes that an operator asks for.
struct Wish {
    rules: parameters::Rules,
    logs: logs::Targets,
    snapshots: snapshots::Target,
    kubernetes: kubernetes_names::Names,
    proxy: proxy::Proxy,
    attestation: attestation::Policy,
    firewall: firewall::Wish,
}

impl Wish {
    fn is_empty(&self) -> bool {
        let Self { rules, logs, snapshots, kubernetes, proxy, attestation, firewall } = self;
        let places = logs.is_empty() && snapshots.is_empty() && kubernetes.is_empty();
        let guards = attestation.is_empty() && firewall.is_empty();
        rules.is_empty() && places && proxy.is_empty() && guards
    }

    /// The given options.
    fn options(&self) -> String {
        let Self { rules, logs, snapshots, kubernetes, proxy, attestation, firewall } = self;
        let options = [rules.options()].into_iter().chain(logs.options());
        let options = options.chain(snapshots.options()).chain(kubernetes.options());
        let options = options.chain(proxy.options()).chain(attestation.options());
        let options = options.chain(firewall.options()).filter(|option| !option.is_empty());
        options.collect::<Vec<_>>().join(" ")
    }
}

async fn configure(wish: &Wish, dry_run: DryRun, global: &Global) -> Result<(), Error> {
    let Wish { rules, logs, snapshots, kubernetes, proxy, attestation, firewall } = wish;
    if wish.is_empty() {
        return Err(Error::usage(
            "name what to change: --tpm, --storage, --cold-start, --time-server, \
             --no-time-servers, --log-target, --no-log-targets, --snapshot-target, \
             --snapshot-credentials, --no-snapshot-target, --kubernetes-name, \
             --no-kubernetes-names, --proxy, --without-proxy, --attestation-image, \
             --attestation-maker, --no-attestation, --firewall-source, --firewall-any-source, \
             --firewall-port, --no-firewall-ports",
        ));
    }
    let (log, target, key) = (logs.named()?, snapshots.named()?, snapshots.credentials()?);
    let (names, proxy, policy) = (kubernetes.named()?, proxy.named()?, attestation.named()?);
    let mut effect = format!("The settings of all nodes change: {}.", wish.options());
    if !attestation.is_empty() {
        effect.push_str(
            " The attestation policy is then as named here: images and makers that are not named \
             do not stay in it.",
        );
    }
    if dry_run.of(global, &effect)? == Go::NoFurther {
        return Ok(());
    }
    let session = Session::open(global).await?;
    let wish = firewall.over(&session).await?;
    let configuration = v1::ClusterConfiguration {
        log,
        snapshots: target,
        kubernetes: names,
        proxy,
        attestation: policy,
        firewall: wish,
        ..rules.named()
    };
    let request = v1::ConfigureClusterRequest {
        configuration: Some(configuration),
        snapshot_credentials: key,
    };
    let configured = send(&request, &session).await?;
    if !firewall.is_empty() {
        firewall::confirm(&configured, &session, global).await?;
    }
    global.out.print(&Info::document(&session.cluster_info().await?)?)
}

/// Sends a change of the configuration; returns the configuration after it.
async fn send(
    request: &v1::ConfigureClusterRequest,
    session: &Session,
) -> Result<v1::ClusterConfiguration, Error> {
    let answer = session.call("configure the cluster", Repeat::Allowed, |channel| {
        let request = request.clone();
        async move { ManagementClient::new(channel).configure_cluster(request).await }
    });
    Ok(answer.await?.configuration.unwrap_or_default())
}
