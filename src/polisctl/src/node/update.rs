//! `polisctl node update`: another system for one machine.
//!
//! ```text
//! the bundle, checked here --> the node: written, read back --> drained, rebooted
//!     --> the node is back: with the new system, or with the one before, and why
//! ```
//!
//! The node is not touched before the whole file was checked here: a copy that is damaged
//! costs no slot.

use std::path::PathBuf;
use std::time::Duration;

use polis_bundle::Manifest;
use polis_proto::v1;
use polis_proto::v1::node_management_client::NodeManagementClient;
use tokio::time::{Instant, sleep};
use tonic::Status;

use super::drain::Drain;
use super::{At, view};
use crate::ask::{Go, Sure};
use crate::error::Error;
use crate::output::Document;
use crate::session::{PATIENCE, Session, Target, at_most, refused};
use crate::text::clean;
use crate::update::OneWay;
use crate::{Global, units, update, upload};
use polis_wire::rpc::client::Channel;

const WHAT: &str = "update the node";

/// How long the node may take to be back, without `--timeout`: a system on trial has ten
/// minutes, its cluster two more, its workloads ten, and then the one before starts.
const BACK: Duration = Duration::from_secs(30 * 60);
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
    one_way: OneWay,
    #[command(flatten)]
    at: At,
    #[command(flatten)]
    drain: Drain,
    #[command(flatten)]
    sure: Sure,
}

/// Runs the command.
pub(super) async fn run(arguments: Arguments, global: &Global) -> Result<(), Error> {
    let Arguments { node, file, no_reboot, one_way, at, drain, sure } = arguments;
    sure.can_be(global)?;
    let (_signer, manifest) = update::checked(&file)?;
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
    let warning = one_way.warning(&before.etcd, &manifest, sure)?;
    let effect = format!(
        "{name} at {}, which runs {}, gets version {} and {then}.{warning}",
        reached.address, before.status.version, manifest.version,
    );
    if sure.of(global, &effect)? == Go::NoFurther {
        return Ok(());
    }
    // It goes on as long as bytes do, and the node ends one that stalls.
    session.go_on();
    let installed =
        upload::send(WHAT, &file, one_way.one_way, global, |pieces| client.update(pieces)).await?;
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

/// The report of a node about itself.
#[derive(Clone, Debug, Default)]
struct Said {
    ready: bool,
    status: v1::NodeStatus,
    /// The cluster version of etcd; empty: the node does not know it.
    etcd: String,
}

async fn status(client: &mut NodeManagementClient<Channel>) -> Result<Said, Status> {
    let answer = client.get_status(v1::GetStatusRequest {}).await?.into_inner();
    let v1::GetStatusResponse { ready, status, etcd_cluster, .. } = answer;
    Ok(Said { ready, status: status.unwrap_or_default(), etcd: etcd_cluster })
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
        if let Ok(said) = at_most(ATTEMPT, asked).await {
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

/// The reason why the node is not back with the new system yet; `None` once it is.
fn came_back(
    said: &Said,
    before: &Said,
    manifest: &Manifest,
) -> Result<Option<&'static str>, Error> {
    let Said { ready, status, .. } = said;
    if status.boot_id.is_empty() || status.boot_id == before.status.boot_id {
        return Ok(Some("it reboots"));
    }
    let new = status.version == manifest.version.to_string();
    // A node that reports no image is compared by the version alone.
    let is_kept = new && *ready && !status.trial;
    if is_kept && !status.image.is_empty() && status.image != manifest.image {
        return Err(Error::new(format!(
            "its image is {}, and that of the bundle is {}",
            clean(&status.image),
            manifest.image
        ))
        .context(format!("the node runs another system of version {}", manifest.version))
        .or_help("build the bundle with a newer version: a node takes no other"));
    }
    match (new, ready) {
        (true, true) if !status.trial => Ok(None),
        (true, true) => {
            Ok(Some("its new system is on trial: ready, its cluster and workloads are watched"))
        }
        (true, false) => Ok(Some("its new system is on trial, and not ready yet")),
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
        Said { ready, status, ..Said::default() }
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
        let of_image = |image: &str| {
            let mut said = said("2", &new, true, false, "");
            image.clone_into(&mut said.status.image);
            look(said)
        };
        assert_eq!(of_image(&manifest.image).unwrap(), None);
        let text = of_image("ff").unwrap_err().render();
        assert!(text.starts_with("error: the node runs another system of version 1.0.0"), "{text}");
        assert!(text.contains("its image is ff"), "{text}");
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
}
