//! `polisctl support`: one archive for a bug report.
//!
//! ```text
//! about.json                    versions, when, and what is missing with its reason
//! cluster.json                  state and description; without a leader, what nodes report
//! nodes/<ID>/status.json        what the node reports of itself
//! nodes/<ID>/services.json      its services with restarts and causes
//! nodes/<ID>/log.txt            the newest lines of its log
//! nodes/<ID>/log-before.txt     the same of the boot before
//! ```
//!
//! Invariants:
//! - No call that answers with a secret is made: no ticket, no recovery key, no snapshot,
//!   and no file of the context but its name is read for the archive. A word in a log that
//!   could be a key is left out.
//! - The archive has a bound, and a node that does not answer takes a bounded time.
//! - A part that is missing is named in the archive with its reason.
//!
//! What this module does not do: hide names and addresses of the cluster, which a report
//! needs. A person reads the archive before it is published.

mod archive;
mod text;

use std::path::PathBuf;
use std::time::Duration;

use futures::future::join_all;
use polis_proto::v1;
use polis_proto::v1::node_management_client::NodeManagementClient;
use polis_tui::bytes;
use serde::Serialize;

use self::archive::Archive;
use self::text::Newest;
use super::error::{Error, Exit};
use super::node::{documents, log_lines};
use super::output::{self, Document};
use super::session::{Session, Target, at_most};
use super::unfinished::must_be_new;
use super::{Global, cluster, leaderless, units};
use polis_base::sys::clock;

/// Longest that one node may take for all that is asked of it.
const NODE: Duration = Duration::from_secs(20);
/// How many nodes are queried at once: so many logs are in memory.
const AT_ONCE: usize = 8;
/// The most of one log. A day of a healthy node is less.
const LOG_MAX: usize = 4 * 1024 * 1024;
/// The number of lines of a log that are requested.
const LINES_MAX: i64 = 50_000;
/// No more nodes are added once the archive is so large: a larger report is hard
/// to send.
const ARCHIVE_MAX: u64 = 128 * 1024 * 1024;

/// Arguments of `support`.
#[derive(Debug, clap::Args)]
pub(super) struct Arguments {
    /// The path of the new archive, in the format tar.
    #[arg(short, long, value_name = "FILE", value_parser = output::file())]
    out: PathBuf,
}

/// A part that is not in the archive.
#[derive(Clone, Debug, Serialize)]
struct Missing {
    part: String,
    reason: String,
}

/// The head of the archive.
#[derive(Debug, Serialize)]
struct About<'a> {
    polisctl: &'static str,
    made_at: units::Time,
    context: &'a str,
    /// The cluster has not been asked through a leader.
    leaderless: bool,
    missing: &'a [Missing],
}

/// Runs the command.
pub(super) async fn run(arguments: Arguments, global: &Global) -> Result<(), Error> {
    let out = arguments.out;
    must_be_new(&out)?;
    let session = Session::brief(global).await?;
    let mut missing = Vec::new();
    let overview = overview(&session, &mut missing).await?;
    let mut archive = Archive::begin(&out, clock::now())?;
    archive.add("cluster.json", overview.cluster.as_bytes())?;
    let limit = global.timeout.map_or(NODE, |total| NODE.min(total));
    let progress = global.out.progress();
    for (done, targets) in overview.targets.chunks(AT_ONCE).enumerate() {
        progress.says(&format!("asking nodes: {} of {}", done * AT_ONCE, overview.targets.len()));
        if archive.bytes() > ARCHIVE_MAX {
            let part = |target: &Target| format!("nodes/{}", target.meant);
            missing.extend(targets.iter().map(|target| Missing {
                part: part(target),
                reason: format!("the archive has {} already", bytes(archive.bytes())),
            }));
            continue;
        }
        for answer in join_all(targets.iter().map(|target| ask(&session, target, limit))).await {
            answer.write(&mut archive, &mut missing)?;
        }
    }
    drop(progress);
    let about = About {
        polisctl: env!("CARGO_PKG_VERSION"),
        made_at: units::Time(clock::now()),
        context: &session.context.name,
        leaderless: overview.leaderless,
        missing: &missing,
    };
    archive.add("about.json", serde_json::to_string_pretty(&about)?.as_bytes())?;
    let size = archive.finish()?;
    let file = out.to_string_lossy();
    let value = serde_json::json!({ "file": file, "bytes": size, "missing": missing });
    let mut text = format!(
        "{} in {}; it has no keys, but names and addresses: read it before you publish it",
        bytes(size),
        out.display()
    );
    for Missing { part, reason } in &missing {
        text.push_str(&format!("\nmissing: {part}: {reason}"));
    }
    global.out.print(&Document::new(&value, text)?)
}

/// The cluster as a whole.
struct Overview {
    /// JSON.
    cluster: String,
    targets: Vec<Target>,
    leaderless: bool,
}

/// Asks the leader, else the nodes that the context knows. An error where none answers.
async fn overview(session: &Session, missing: &mut Vec<Missing>) -> Result<Overview, Error> {
    let read = async {
        let cluster = cluster::overview(session).await?;
        Ok::<_, Error>((cluster, session.nodes(&[]).await?))
    };
    match Box::pin(read).await {
        Ok((cluster, nodes)) => {
            let mut targets = Vec::new();
            for node in nodes {
                match super::session::target(&node) {
                    Ok(target) => targets.push(target),
                    Err(error) => missing.push(Missing {
                        part: format!("nodes/{}", node.id),
                        reason: error.summary(),
                    }),
                }
            }
            let cluster = serde_json::to_string_pretty(&cluster)?;
            Ok(Overview { cluster, targets, leaderless: false })
        }
        Err(error) if error.exit() == Exit::TimedOut => {
            let view = Box::pin(leaderless::view(session, error)).await?;
            let cluster = serde_json::to_string_pretty(&view)?;
            Ok(Overview { cluster, targets: session.known_nodes(), leaderless: true })
        }
        Err(error) => Err(error),
    }
}

/// The answer of one node.
struct Answer {
    /// The name of its folder.
    folder: String,
    files: Vec<(&'static str, String)>,
    missing: Vec<(&'static str, String)>,
}

async fn ask(session: &Session, target: &Target, limit: Duration) -> Answer {
    let folder = target.meant.id().map_or_else(|| target.address.host.clone(), |id| id.to_string());
    let (mut files, mut missing) = (Vec::new(), Vec::new());
    let mut logs = [(0, "log.txt"), (-1, "log-before.txt")]
        .map(|(boot, name)| (boot, name, Newest::new(LOG_MAX), "not asked for in time".to_owned()));
    let work = async {
        let channel = session.node(target).await?;
        let mut client = NodeManagementClient::new(channel);
        let [status, services] = documents(&mut client).await?;
        files.push(("status.json", serde_json::to_string_pretty(status.value())?));
        // A cause quotes the last lines of a program.
        let mut services = services.value().clone();
        text::clear_keys(&mut services);
        files.push(("services.json", serde_json::to_string_pretty(&services)?));
        for (boot, _, text, failure) in &mut logs {
            "not whole within the time for one node".clone_into(failure);
            let request = v1::LogsRequest {
                children: true,
                minimum: v1::Severity::Debug.into(),
                backlog: LINES_MAX,
                boot: *boot,
                ..Default::default()
            };
            let read = log_lines(&mut client, request, |line| text.push(line)).await;
            *failure = read.err().map(|error| error.summary()).unwrap_or_default();
        }
        Ok::<(), Error>(())
    };
    let reason = at_most(limit, work).await.err().map(|error| error.summary());
    if files.is_empty() {
        let reason = reason.unwrap_or_else(|| "no answer".to_owned());
        return Answer { folder, files, missing: vec![("", reason)] };
    }
    for (_, name, text, failure) in logs {
        if !failure.is_empty() {
            missing.push((name, failure));
        }
        let text = text.into_text();
        if !text.is_empty() {
            files.push((name, text));
        }
    }
    Answer { folder, files, missing }
}

impl Answer {
    fn write(self, archive: &mut Archive, missing: &mut Vec<Missing>) -> Result<(), Error> {
        let place = |name: &str| format!("nodes/{}/{name}", self.folder);
        for (name, content) in &self.files {
            archive.add(&place(name), content.as_bytes())?;
        }
        let part = |name: &str| place(name).trim_end_matches('/').to_owned();
        missing.extend(
            self.missing
                .iter()
                .map(|(name, reason)| Missing { part: part(name), reason: reason.clone() }),
        );
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use crate::loopback::{Cluster, NODE, RECOVERY_KEY};
    use crate::testing::{World, closed_port};
    use polis_base::hex;
    use polis_wire::rpc::testing::node_id;

    fn has(archive: &[u8], text: &[u8]) -> bool {
        archive.windows(text.len()).any(|window| window == text)
    }

    #[test]
    fn the_archive_has_what_a_report_needs_and_no_secret() {
        let world = World::new();
        let cluster = Cluster::new(&world);
        let key = polis_base::recovery::form::write(&RECOVERY_KEY);
        let ticket = hex::encode(&[5; 32]);
        cluster.logs(&format!("opened with {} and {ticket}", *key));
        let said = world.runs(&["support", "-o", "@report.tar"]);
        assert!(said.contains("it has no keys"), "{said}");
        let archive = std::fs::read(world.path("report.tar")).unwrap();
        let id = node_id(NODE).to_string();
        for wanted in [
            "about.json",
            "cluster.json",
            &format!("nodes/{id}/status.json"),
            &format!("nodes/{id}/services.json"),
            &format!("nodes/{id}/log.txt"),
            "opened with",
            env!("CARGO_PKG_VERSION"),
            "root.consensus",
        ] {
            assert!(has(&archive, wanted.as_bytes()), "no {wanted}");
        }
        let pem = std::fs::read_to_string(world.path("owner.key")).unwrap();
        let secret = pem.lines().nth(1).unwrap();
        let certificate = world.path("polis/contexts/home/certificate.pem");
        let certificate = std::fs::read_to_string(certificate).unwrap();
        for secret in [
            secret.as_bytes(),
            certificate.lines().nth(1).unwrap().as_bytes(),
            key.as_bytes(),
            &key.as_bytes()[..9],
            ticket.as_bytes(),
            &[5; 32],
            &RECOVERY_KEY,
            b"PRIVATE KEY",
        ] {
            assert!(!has(&archive, secret), "{}", String::from_utf8_lossy(secret));
        }
        let asked = cluster.asked();
        for call in ["GetRegisterTicket", "GetRecoveryKey", "SnapshotEtcd"] {
            assert!(!asked.iter().any(|one| one == call), "{asked:?}");
        }
        let ended = world.run(&["support", "-o", "@report.tar"]);
        assert!(ended.stderr.contains("exists already"), "{}", ended.stderr);
    }

    #[test]
    fn without_a_leader_and_with_a_dead_node_the_archive_says_what_is_missing() {
        let world = World::new();
        let cluster = Cluster::new(&world);
        let (_bound, dead) = closed_port();
        let (here, gone) = (node_id(NODE).to_string(), node_id(2).to_string());
        cluster.knows(&world, &[(&here, "192.0.2.1"), (&gone, &dead)]);
        cluster.lose_the_leader();
        let json = world.runs(&["support", "-o", "@report.tar", "--output", "json"]);
        let value: serde_json::Value = serde_json::from_str(&json).unwrap();
        let missing = value["missing"].as_array().unwrap();
        let parts: Vec<&str> = missing.iter().map(|one| one["part"].as_str().unwrap()).collect();
        assert_eq!(parts, [format!("nodes/{gone}")]);
        let archive = std::fs::read(world.path("report.tar")).unwrap();
        assert!(has(&archive, b"\"leaderless\": true") && has(&archive, gone.as_bytes()));
        assert!(has(&archive, format!("nodes/{here}/log.txt").as_bytes()));
    }
}
