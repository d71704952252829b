//! `polisctl node approve`: admits a machine that waits for approval.
//!
//! The operator compares the fingerprint on the machine's screen, and what its TPM has proved.
//! The leader compares what the command sends with the record that it changes: the fingerprint,
//! unless `--unchecked`, and the proof, if there was one. The machine registers again every few
//! seconds, and a person takes a while to answer.

use polis_proto::v1;
use polis_proto::v1::management_client::ManagementClient;

use super::{attest, called, described, proof, view};
use crate::Global;
use crate::ask::{self, DryRun, Go};
use crate::error::Error;
use crate::session::Session;
use polis_wire::identity::Spoken;
use polis_wire::rpc::client::Repeat;

/// Arguments of `node approve`.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
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
}

/// A fingerprint as it was typed: the cluster compares it.
fn spoken(text: &str) -> Result<String, <Spoken as std::str::FromStr>::Err> {
    text.parse::<Spoken>().map(|_fingerprint| text.to_owned())
}

/// Runs the command.
pub(super) async fn run(arguments: Arguments, global: &Global) -> Result<(), Error> {
    let Arguments { node, fingerprint, unchecked, wanted, dry_run } = arguments;
    let mut session = Session::open(global).await?;
    let node = session.find(&node).await?;
    attest::check_recorded(&node, wanted)?;
    if dry_run.of(global, &format!("{} may enter the cluster.", called(&node)))? == Go::NoFurther {
        return Ok(());
    }
    let fingerprint = match fingerprint {
        Some(spoken) => spoken,
        None if unchecked => String::new(),
        None => {
            let shown = ask_about(&node, global)?;
            session.begin_anew();
            shown
        }
    };
    // A later proof may be of another TPM or of another system.
    let request =
        v1::ApproveNodeRequest { node_id: node.id, fingerprint, attestation: node.attestation };
    let answer = session.call("approve the node", Repeat::Allowed, |channel| {
        let request = request.clone();
        async move { ManagementClient::new(channel).approve_node(request).await }
    });
    described(&answer.await?.node.unwrap_or_default(), global)
}

/// Shows the fingerprint of a node and what its TPM proved, and asks whether the machine's screen
/// shows the same; returns the fingerprint.
fn ask_about(node: &v1::NodeInfo, global: &Global) -> Result<String, Error> {
    let shown = view::fingerprint(node).ok_or_else(|| {
        Error::new(format!("{} has no key", node.id))
            .or_help("its record is damaged: `polisctl node delete`, and register it again")
    })?;
    let proof = match proof::Recorded::of(node).map(|proof| proof.text()) {
        Some(proof) => format!("What its TPM proved: {proof}\n\n"),
        None => "Its TPM has proved nothing.\n\n".to_owned(),
    };
    let question = format!(
        "{} waits for approval. Its fingerprint is\n\n    {}\n    \
         {shown}\n\n{proof}Does the machine's screen show the same?",
        called(node),
        shown.words(),
    );
    let instead = "name the fingerprint on the machine's screen: --fingerprint WORDS; or skip the \
                   comparison: --unchecked";
    ask::confirm(global, &question, instead)?;
    Ok(shown.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::loopback::{Cluster, NODE};
    use crate::testing::World;
    use polis_wire::rpc::testing::node_id;

    #[test]
    fn the_proof_that_was_looked_at_goes_with_the_approval() {
        let world = World::new();
        let cluster = Cluster::new(&world);
        let id = node_id(NODE).to_string();
        let approve = ["node", "approve", &*id, "--unchecked"];
        world.runs(&approve);
        assert_eq!(cluster.asked(), ["ApproveNode"]);
        cluster.has_proved(v1::TpmAttestation { at: 1_700_000_000, ..Default::default() });
        world.runs(&approve);
        assert_eq!(cluster.asked(), ["ApproveNode with the proof in the record"]);
    }
}
