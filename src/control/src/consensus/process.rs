//! One process of etcd: starts it, waits until it answers, and classifies why it ended.
//!
//! Invariants:
//! - An etcd that has ended is classified by its own lines, and by those of this run only.
//!
//! What this module does not do: watch the member while it runs (`serve`).

use std::time::Duration;

use super::args::{self, Call, Pace, Purpose};
use super::client::Clients;
use super::damage::{self, Verdict};
use super::severity;
use super::{Config, Error, Orders};
use polis_base::serial::Severity;
use polis_base::sys::clock;
use polis_runtime::logtree::{Backlog, Body, Parser, Query};
use polis_runtime::supervisor::{Context, blocking};
use polis_runtime::sys::cgroup::Group;
use polis_runtime::sys::confine::Confinement;
use polis_runtime::sys::process::{Child, Command, Exit};

/// A member that hands its leadership over takes six seconds at worst; the
/// supervisor waits for ten.
pub(super) const STOP_MAX: Duration = Duration::from_secs(8);

/// The group of the directory reaches the sockets in it, which etcd leaves to its umask. Its data
/// has narrower modes.
const UMASK: u32 = 0o007;

/// The name of etcd's own log, below this service's.
pub(super) const ETCD: &str = "etcd";

/// The lines of an ended etcd that are examined: the stacks of some hundred goroutines.
const WORDS_MAX: usize = 4096;

/// The time between two checks of a member that is not there yet: short against its start.
pub(super) const POLL_SOON: Duration = Duration::from_millis(10);

/// An etcd that was just started.
pub(super) struct Started {
    pub(super) child: Child,
    /// When: its lines come after that.
    pub(super) begun: Duration,
}

/// Starts etcd. Its socket has no listener before that.
pub(super) async fn spawn(
    config: &Config,
    ctx: &Context,
    orders: &Orders,
    pace: Pace,
    purpose: Purpose<'_>,
) -> Result<Started, Error> {
    let socket = config.sockets.client();
    // A socket that a killed etcd left behind looks like one that serves.
    let _absent = std::fs::remove_file(socket);
    let name = orders.key.id().to_string();
    let call = Call {
        name: &name,
        tree: &config.tree,
        sockets: &config.sockets,
        peer: &orders.peer,
        listen: config.listen,
        quota: config.quota,
        pace,
        purpose,
    };
    admit(config).await?;
    let mut command = Command::new(&config.binary)
        .confined(confinement(config))
        .umask(UMASK)
        .args(args::arguments(&call))
        .directory(config.sockets.dir.path())
        .log(ctx.sink(ETCD, Parser::Json).ruled(severity::lower));
    for (name, value) in args::environment(purpose) {
        command = command.env(name, value);
    }
    // On a node with workloads, beside which it must keep its share of the machine.
    if let Some(group) = Group::Etcd.existing() {
        command = command.cgroup(group);
    }
    let begun = clock::uptime();
    Ok(Started { child: command.spawn().await.map_err(Error::Process)?, begun })
}

/// Makes its files and the directory of its sockets those of its user. The node is root, and
/// reads and writes them all the same; the directory keeps the group of the API server.
async fn admit(config: &Config) -> Result<(), Error> {
    let Some(user) = config.user else { return Ok(()) };
    let (tree, sockets) = (config.tree.clone(), config.sockets.dir.clone());
    Ok(blocking(move || tree.admit().and_then(|()| sockets.give(user))).await?)
}

/// The rights of etcd: it may serve peers and the socket, and use its own files. Its user
/// may enter neither the rest of the data partition nor the ESP.
fn confinement(config: &Config) -> Confinement {
    let confinement = Confinement::new()
        .writes(config.tree.data.path())
        .writes(config.sockets.dir.path())
        // Not its credentials one by one: a renewed certificate and a new CRL are other files.
        .reads(config.tree.dir.path());
    match config.user {
        Some(user) => confinement.user(user),
        None => confinement,
    }
}

/// Waits until the member answers and has a leader.
pub(super) async fn ready(config: &Config) -> Result<Clients, Error> {
    let socket = config.sockets.client();
    let clients = Clients::connect(socket).await?;
    loop {
        // To look up a file name is cheaper than a refused connection.
        if socket.exists() {
            let read = clients.raw().kv_client().get("ready", None).await;
            if read.is_ok() {
                return Ok(clients);
            }
        }
        tokio::time::sleep(POLL_SOON).await;
    }
}

/// Classifies why the etcd that began at `begun` ended by itself. Only the etcd of a
/// removed member ends with success, and it does so again at each start; one that is asked
/// to end dies of the signal.
pub(super) async fn died(config: &Config, ctx: &Context, begun: Duration, exit: Exit) -> Error {
    if exit.is_success() {
        return Error::Removed;
    }
    // All of it: a Go program that panics prints the reason first, and then the stack.
    let output = ctx.logs().backlog(&Query {
        name: format!("{}.{ETCD}", ctx.name()),
        children: false,
        backlog: Backlog::Last(WORDS_MAX),
        ..Query::all()
    });
    let output = output.iter().filter(|entry| entry.at >= begun).map(|entry| &entry.body);
    let words = match damage::classify(output.clone()) {
        Verdict::Damaged(words) => Some(words),
        Verdict::Fault => {
            let file = config.tree.data.path().join("member/snap/db");
            let read = tokio::task::spawn_blocking(move || damage::is_readable(&file)).await;
            // If the disk does not answer now, it may answer again.
            matches!(read, Ok(true)).then(|| "it is shorter than its header states".to_owned())
        }
        Verdict::Sound => None,
    };
    match words {
        Some(output) => Error::Corrupt { exit, output },
        None => Error::Died { exit, output: last_lines(output) },
    }
}

/// The useful part of the last lines for a person: the newest complaint. A Go panic is not
/// written as JSON, and its first line names the cause.
fn last_lines<'a>(output: impl DoubleEndedIterator<Item = &'a Body> + Clone) -> String {
    let is_panic = |body: &&Body| matches!(body, Body::Raw(line) if line.starts_with("panic:"));
    let complains = |body: &&Body| match body {
        Body::Levelled(entry) => entry.severity >= Severity::Warning,
        Body::Raw(_) => true,
    };
    let words = output.clone().find(is_panic).or_else(|| output.rev().find(complains));
    words.map(|words| format!(": {words}")).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use polis_base::files::Root;
    use polis_runtime::sys::acts;

    use super::super::restore;
    use super::*;

    /// Not a test: what the children of the next one do.
    #[test]
    fn act_of_a_confined_child() {
        acts::child();
    }

    #[tokio::test]
    async fn etcd_and_a_restore_reach_neither_the_kernel_s_interface_nor_the_node_s_key() {
        let base = tempfile::tempdir().unwrap();
        let root = Root::at(base.path());
        let config = Config::live(&root);
        let (snapshot, data) = (config.snapshot.path(), config.tree.data.path());
        for confinement in [confinement(&config), restore::confinement(snapshot, data)] {
            let test = "consensus::process::tests::act_of_a_confined_child";
            acts::keeps_from_all(test, &confinement, &[], &root).await;
        }
    }

    #[test]
    fn the_last_line_is_the_newest_complaint() {
        let words = |lines: &[&str]| {
            let lines: Vec<_> = lines.iter().map(|line| Parser::Json.parse(line)).collect();
            last_lines(lines.iter())
        };
        let info = r#"{"level":"info","msg":"closing"}"#;
        let warn = r#"{"level":"warn","msg":"slow"}"#;
        let fatal = r#"{"level":"fatal","msg":"discovery failed","error":"bind: in use"}"#;
        assert_eq!(words(&[info]), "");
        assert_eq!(words(&[warn, fatal, info]), ": discovery failed error=\"bind: in use\"");
        assert_eq!(
            words(&[fatal, "panic: nil map", "", "goroutine 1 [running]:"]),
            ": panic: nil map"
        );
    }
}
