//! `polisctl node announce-firmware-update`: lets the next start of a machine have other firmware.
//!
//! The TPM opens the key of a disk only while the firmware measures what it did. The node has
//! the key sealed without that condition until its next start, or until this is cancelled.
//!
//! What this module does not do: update firmware, or reboot the machine.

use polis_proto::v1;
use polis_proto::v1::node_management_client::NodeManagementClient;

use super::{At, called};
use crate::Global;
use crate::ask::{Go, Sure};
use crate::error::Error;
use crate::output::Document;
use crate::session::Session;

/// Arguments of `node announce-firmware-update`.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// The node.
    node: String,
    /// End an announcement: the firmware is not updated after all.
    #[arg(long)]
    cancel: bool,
    #[command(flatten)]
    at: At,
    #[command(flatten)]
    sure: Sure,
}

/// Runs the command.
pub(super) async fn run(arguments: &Arguments, global: &Global) -> Result<(), Error> {
    let Arguments { node, cancel, at, sure } = arguments;
    let cancel = *cancel;
    if !cancel {
        sure.can_be(global)?;
    }
    let mut session = Session::open(global).await?;
    let found = session.find(node).await?;
    let (name, node_id) = (called(&found), found.id);
    let target = session.target(Some(&node_id), at.at.as_ref()).await?;
    let reached = session.connect(&target).await?;
    let go = match cancel {
        true => {
            let effect = format!(
                "{name} at {} seals the key of its disk to its present firmware.",
                reached.address
            );
            sure.only_shown(global, &effect)?
        }
        false => {
            let effect = format!(
                "{name} at {} opens its disk at its next start whatever the firmware measures. \
                 Until then, another system that is started on this machine can open it, too, and \
                 with a copy of the ESP from that time also later. The next start seals the key of \
                 the disk to its firmware and ends this, even if that firmware is the old one.",
                reached.address
            );
            sure.of(global, &effect)?
        }
    };
    if go == Go::NoFurther {
        return Ok(());
    }
    session.begin_anew();
    let request = v1::AnnounceFirmwareUpdateRequest { cancel };
    let mut client = NodeManagementClient::new(reached.channel);
    let what = if cancel { "cancel the firmware update" } else { "announce the firmware update" };
    let answer = session.within(what, client.announce_firmware_update(request)).await?;
    let sealed = answer.into_inner().sealed;
    let announced = sealed && !cancel;
    let value = serde_json::json!({ "node": node_id, "sealed": sealed, "announced": announced });
    global.out.print(&Document::new(&value, text(&name, sealed, cancel))?)
}

fn text(name: &str, sealed: bool, cancel: bool) -> String {
    match (sealed, cancel) {
        (false, _) => format!(
            "the TPM of {name} does not keep the key of its disk: a firmware update needs no \
             announcement"
        ),
        (true, false) => format!(
            "{name} is ready for new firmware: install it now, since the next start of Polis ends \
             the announcement; if it clears the TPM, the recovery key is needed all the same"
        ),
        (true, true) => format!("{name} expects its present firmware at its next start"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::loopback::{Cluster, NODE};
    use crate::testing::World;
    use polis_wire::rpc::testing::node_id;

    #[test]
    fn a_firmware_update_is_announced_after_a_question_and_cancelled_without() {
        let world = World::new();
        let cluster = Cluster::new(&world);
        let (id, at) = (node_id(NODE).to_string(), cluster.address());
        let announce = ["node", "announce-firmware-update", &*id, "--at", &at];
        assert!(world.refuses(&announce).contains("confirm with --yes"));
        let ended = world.asks(&announce, "no\n");
        assert_eq!(ended.status, 1, "{}", ended.stderr);
        assert!(ended.stderr.contains("whatever the firmware measures"), "{}", ended.stderr);
        world.runs(&[&announce[..], &["--dry-run"]].concat());
        world.runs(&[&announce[..], &["--cancel", "--dry-run"]].concat());
        assert_eq!(cluster.asked(), [""; 0]);
        let ended = world.asks(&announce, "y\n");
        assert!(ended.stdout.contains("is ready for new firmware"), "{}", ended.stderr);
        assert_eq!(cluster.asked(), ["AnnounceFirmwareUpdate"]);
        let output = world.runs(&[&announce[..], &["--cancel"]].concat());
        assert!(output.contains("expects its present firmware"), "{output}");
        assert_eq!(cluster.asked(), ["AnnounceFirmwareUpdate cancel"]);
    }

    #[test]
    fn a_node_without_a_sealed_key_needs_no_announcement() {
        for cancel in [false, true] {
            assert!(text("mail-1", false, cancel).ends_with("needs no announcement"));
        }
    }
}
