//! `polisctl node update`: another system for one machine.
//!
//! ```text
//! the bundle, checked here --> the node: written, read back --> drained, rebooted
//!     --> the node is back: with the new system, or with the one before, and why
//! ```
//!
//! The node is not touched before the whole file was checked here: a copy that is damaged
//! costs no slot.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use futures::{SinkExt as _, StreamExt as _};
use polis_bundle::Manifest;
use polis_proto::v1;
use polis_proto::v1::node_management_client::NodeManagementClient;
use polis_proto::v1::update_progress::Phase;
use polis_tui::bytes;
use tokio::io::AsyncReadExt as _;
use tokio::time::{Instant, sleep, timeout};
use tonic::Status;

use super::{At, Drain, Go, Sure, view};
use crate::error::{Error, Explain as _};
use crate::output::Document;
use crate::session::{PATIENCE, Session, Target, refused};
use crate::{Global, units, update};
use polis_wire::rpc::client::Channel;

const WHAT: &str = "update the node";

/// How much is sent at once; a node takes at most four times that.
const PIECE: usize = 256 << 10;
/// Pieces that wait to be sent.
const PIECES: usize = 4;
/// How long the node may take to be back, without `--timeout`: a system on trial has ten
/// minutes, and then the one before starts.
const BACK: Duration = Duration::from_secs(20 * 60);
/// Between two attempts to reach it.
const RETRY: Duration = Duration::from_secs(1);
/// Longest that one attempt takes.
const ATTEMPT: Duration = Duration::from_secs(10);

/// Arguments of `node update`.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// The node.
    node: String,
    /// The bundle, which `cargo xtask image --bundle` writes.
    file: PathBuf,
    /// Only put the system on the disk: the next reboot, whenever it comes, tries it.
    #[arg(long)]
    no_reboot: bool,
    #[command(flatten)]
    at: At,
    #[command(flatten)]
    drain: Drain,
    #[command(flatten)]
    sure: Sure,
}

/// Runs the command.
pub(super) async fn run(arguments: Arguments, global: &Global) -> Result<(), Error> {
    let Arguments { node, file, no_reboot, at, drain, sure } = arguments;
    sure.can_be(global)?;
    let manifest = update::checked(&file)?;
    let mut session = Session::prepare(global, PATIENCE)?;
    let target = session.target(Some(&node), at.at.as_ref()).await?;
    let reached = session.connect(&target).await?;
    let name = reached.node.to_string();
    let mut client = NodeManagementClient::new(reached.channel.clone());
    let before = session.within("read the state of the node", status(&mut client)).await?;
    let then = match no_reboot {
        true => "tries it at its next reboot",
        false => "reboots into it",
    };
    let effect = format!(
        "{name} at {}, which runs {}, gets version {} and {then}.",
        reached.address, before.status.version, manifest.version,
    );
    if sure.of(global, &effect)? == Go::NoFurther {
        return Ok(());
    }
    // It goes on as long as bytes do, and the node ends one that stalls.
    session.go_on();
    let installed = send(&mut client, &file, global).await?;
    let v1::UpdateProgress { version, slot, .. } = installed;
    if no_reboot {
        let value = serde_json::json!({
            "node": name, "version": version, "slot": slot, "rebooted": false,
        });
        let text = format!("{name} has version {version} in slot {slot}; its next reboot tries it");
        return global.out.print(&Document::new(&value, text)?);
    }
    let armed = || {
        format!(
            "version {version} is in slot {slot} of {name}, and its next reboot tries it, whenever \
             that is"
        )
    };
    let held = drain.hold(reached.channel, &name, global).await;
    let held = held.map_err(|error| error.context(armed()))?;
    let reboot = client.reboot(v1::RebootRequest::default());
    let rebooting = session.within("reboot the machine", reboot).await;
    rebooting.map_err(|error| error.context(armed()))?;
    drop(held);
    let after = back(&session, &target, &before, &manifest, global).await?;
    let text = format!(
        "{name} runs version {}; other system: {}",
        view::version(&after.version, &after.slot, after.trial),
        after.other_system
    );
    let value = serde_json::json!({
        "node": name, "version": after.version, "slot": after.slot, "rebooted": true,
        "other_system": after.other_system,
    });
    global.out.print(&Document::new(&value, text)?)
}

/// What a node says of itself.
#[derive(Clone, Debug, Default)]
struct Said {
    ready: bool,
    status: v1::NodeStatus,
}

async fn status(client: &mut NodeManagementClient<Channel>) -> Result<Said, Status> {
    let answer = client.get_status(v1::GetStatusRequest {}).await?.into_inner();
    Ok(Said { ready: answer.ready, status: answer.status.unwrap_or_default() })
}

/// Sends the bundle; returns what the node says once its system is on the disk.
async fn send(
    client: &mut NodeManagementClient<Channel>,
    file: &Path,
    global: &Global,
) -> Result<v1::UpdateProgress, Error> {
    let reading = || format!("cannot read {}", file.display());
    let mut bundle = tokio::fs::File::open(file).await.doing(reading)?;
    let total = bundle.metadata().await.doing(reading)?.len();
    let (mut pieces, sent) = futures::channel::mpsc::channel(PIECES);
    let sending = async move {
        loop {
            let mut data = vec![0; PIECE];
            let count = bundle.read(&mut data).await?;
            data.truncate(count);
            // A node that has an answer takes no more.
            if count == 0 || pieces.send(v1::UpdateRequest { data }).await.is_err() {
                return io::Result::Ok(());
            }
        }
    };
    let progress = global.out.progress();
    progress.says(&format!("sending {}", bytes(total)));
    let receiving = async {
        let answers = client.update(sent).await.map_err(|status| refused(WHAT, &status))?;
        let mut answers = answers.into_inner();
        while let Some(told) = answers.next().await {
            let told = told.map_err(|status| refused(WHAT, &status))?;
            match told.phase() {
                Phase::Installed => return Ok(told),
                Phase::Verify => progress.says(&line("reading back", &told)),
                Phase::Write | Phase::Unspecified => progress.says(&line("writing", &told)),
            }
        }
        Err(Error::new("the node has ended the update without a word"))
    };
    let sending = async { sending.await.doing(reading) };
    tokio::pin!(sending, receiving);
    tokio::select! {
        // Cancel-safe: both are polled on below.
        sent = &mut sending => sent?,
        told = &mut receiving => return told,
    }
    receiving.await
}

/// How far an update is.
fn line(what: &str, told: &v1::UpdateProgress) -> String {
    let percent = told.bytes.saturating_mul(100).checked_div(told.total).unwrap_or_default();
    let filled = usize::try_from(percent / 5).unwrap_or_default().min(20);
    let bar = format!("{}{}", "#".repeat(filled), "-".repeat(20 - filled));
    format!("{what} [{bar}] {percent} % of {}", bytes(told.total))
}

/// Waits until the node is back.
async fn back(
    session: &Session,
    target: &Target,
    before: &Said,
    manifest: &Manifest,
    global: &Global,
) -> Result<v1::NodeStatus, Error> {
    let total = global.timeout.unwrap_or(BACK);
    let end = Instant::now() + total;
    let progress = global.out.progress();
    let mut missing = "it reboots".to_owned();
    loop {
        progress.says(&format!("waiting for the node: {missing}"));
        let asked = async {
            let mut client = NodeManagementClient::new(session.node(target).await?);
            status(&mut client).await.map_err(|status| refused("ask the node", &status))
        };
        // One that cannot be reached reboots.
        if let Ok(Ok(said)) = timeout(ATTEMPT, Box::pin(asked)).await {
            match came_back(&said, before, manifest)? {
                None => return Ok(said.status),
                Some(what) => missing = what.to_owned(),
            }
        }
        if Instant::now() + RETRY >= end {
            drop(progress);
            return Err(Error::timed_out(missing)
                .context(format!("the node is not back after {}", units::span(total)))
                .or_help(
                    "see its screen; a system that is not ready ten minutes after its start goes \
                     back to the one before by itself: `polisctl node status NODE`",
                ));
        }
        sleep(RETRY).await;
    }
}

/// What is missing until the node is back with the new system; `None` once it is.
fn came_back(
    said: &Said,
    before: &Said,
    manifest: &Manifest,
) -> Result<Option<&'static str>, Error> {
    let Said { ready, status } = said;
    if status.boot_id.is_empty() || status.boot_id == before.status.boot_id {
        return Ok(Some("it reboots"));
    }
    let new = status.version == manifest.version.to_string();
    match (new, ready) {
        (true, true) if !status.trial => Ok(None),
        (true, _) => Ok(Some("its new system is on trial, and not ready yet")),
        // It says so only once it has looked at its disk.
        (false, true) if !status.other_system.is_empty() => {
            Err(Error::new(format!("other system: {}", status.other_system))
                .context(format!(
                    "the new system did not stay; the node runs {}",
                    view::version(&status.version, &status.slot, status.trial)
                ))
                .or_help(
                    "nothing of this system was changed; once the cause is mended, the same \
                     bundle may be sent again",
                ))
        }
        (false, _) => Ok(Some("it is back with the system before, and not ready yet")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::update::tests::bundle;

    fn manifest() -> Manifest {
        let bundle = bundle(&ed25519_dalek::SigningKey::from_bytes(&[3; 32]));
        polis_bundle::Bundle::open(&*bundle, None).unwrap().manifest().clone()
    }

    fn said(boot: &str, version: &dyn ToString, ready: bool, trial: bool, other: &str) -> Said {
        let (boot_id, version) = (boot.to_owned(), version.to_string());
        let (slot, other_system) = ("A".to_owned(), other.to_owned());
        let status =
            v1::NodeStatus { boot_id, version, slot, trial, other_system, ..Default::default() };
        Said { ready, status }
    }

    #[test]
    fn the_node_is_back_when_the_new_system_was_kept() {
        let manifest = manifest();
        let (old, new) = (manifest.from.clone(), manifest.version.clone());
        let before = said("1", &old, true, false, "");
        let look = |said: Said| came_back(&said, &before, &manifest);
        assert_eq!(look(before.clone()).unwrap(), Some("it reboots"));
        assert!(look(said("2", &new, false, true, "")).unwrap().unwrap().contains("on trial"));
        assert!(look(said("2", &new, true, true, "")).unwrap().unwrap().contains("on trial"));
        assert_eq!(look(said("2", &new, true, false, "")).unwrap(), None);
        let waits = look(said("3", &old, false, false, "1.0.0 in slot B, failed")).unwrap();
        assert!(waits.unwrap().contains("the system before"));
        let error = look(said("3", &old, true, false, "1.0.0 in slot B, failed: a guru"));
        let text = error.unwrap_err().render();
        assert!(
            text.starts_with("error: the new system did not stay; the node runs 0.9.0"),
            "{text}"
        );
        assert!(text.contains("1.0.0 in slot B, failed: a guru"), "{text}");
    }

    #[test]
    fn a_line_says_how_far_an_update_is() {
        let told = v1::UpdateProgress { bytes: 25 << 20, total: 100 << 20, ..Default::default() };
        assert_eq!(line("writing", &told), "writing [#####---------------] 25 % of 100.0 MiB");
        let none = line("writing", &v1::UpdateProgress::default());
        assert_eq!(none, "writing [--------------------] 0 % of 0 B");
    }
}
