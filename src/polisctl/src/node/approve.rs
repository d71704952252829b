//! `polisctl node approve`: admits a machine that waits for approval, or gives a node a new
//! certificate whose own ended while it was off.
//!
//! The operator compares the fingerprint on the machine's screen, and what its TPM has proved.
//! The leader compares what the command sends with the record that it changes: the fingerprint,
//! unless `--unchecked`, and the proof, if there was one. The machine registers again every few
//! seconds, and a person takes a while to answer. The approval of a node that asks for a new
//! certificate always has a fingerprint, since that names the boot: with `--unchecked`, it is the
//! one of the record.

use polis_proto::v1;
use polis_proto::v1::management_client::ManagementClient;

use super::{attest, called, described, proof, returning};
use crate::Global;
use crate::ask::{self, DryRun, Go};
use crate::error::Error;
use crate::output::or_dash;
use crate::session::Session;
use crate::text::clean;
use crate::units;
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

/// What an operator reads of a node that asks with another TPM.
const ANOTHER_TPM: &str = "This is ANOTHER TPM than the one in the record of the node: the machine \
                           has another board, or another machine has this disk or a copy of it.";

/// A fingerprint as it was typed: the cluster compares it.
fn spoken(text: &str) -> Result<String, <Spoken as std::str::FromStr>::Err> {
    text.parse::<Spoken>().map(|_fingerprint| text.to_owned())
}

/// Runs the command.
pub(super) async fn run(arguments: Arguments, global: &Global) -> Result<(), Error> {
    let Arguments { node, fingerprint, unchecked, wanted, dry_run } = arguments;
    let mut session = Session::open(global).await?;
    let found = session.find(&node).await?;
    let has_another_tpm = returning::has_another_tpm(&found);
    let node = returning::asking(&found);
    attest::check_recorded(&node, wanted)?;
    let outcome = match &node.returning {
        Some(_) if has_another_tpm => {
            format!("{} receives a new certificate. {ANOTHER_TPM}", called(&node))
        }
        Some(_) => format!("{} receives a new certificate.", called(&node)),
        None => format!("{} may enter the cluster.", called(&node)),
    };
    if dry_run.of(global, &outcome)? == Go::NoFurther {
        return Ok(());
    }
    if has_another_tpm {
        global.out.remark(ANOTHER_TPM);
    }
    let fingerprint = match fingerprint {
        Some(spoken) => spoken,
        None if unchecked => recorded(&node),
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

/// The fingerprint of an approval that compares nothing.
fn recorded(node: &v1::NodeInfo) -> String {
    let returns = node.returning.is_some();
    let fingerprint = returning::fingerprint(node).filter(|_fingerprint| returns);
    fingerprint.map(|fingerprint| fingerprint.to_string()).unwrap_or_default()
}

/// Why a node waits for approval.
fn reason(node: &v1::NodeInfo) -> String {
    let called = called(node);
    let Some(v1::Returning { asked_at, address, .. }) = &node.returning else {
        return format!("{called} waits for approval.");
    };
    let at = units::text(units::since_1970(*asked_at).map(units::Time));
    format!(
        "{called} asks for a new certificate: it was off for longer than its certificate is valid. \
         It asked first at {}, from {}. Approve it only if this machine is in front of you: a copy \
         of its disk asks in the same way.",
        or_dash(&at),
        or_dash(&clean(address)),
    )
}

/// Shows the fingerprint of a node and what its TPM proved, and asks whether the machine's screen
/// shows the same; returns the fingerprint.
fn ask_about(node: &v1::NodeInfo, global: &Global) -> Result<String, Error> {
    let shown = returning::fingerprint(node).ok_or_else(|| {
        Error::new(format!("{} has no key", node.id))
            .or_help("its record is damaged: `polisctl node delete`, and register it again")
    })?;
    let proof = match proof::Recorded::of(node).map(|proof| proof.text()) {
        Some(proof) => format!("What its TPM proved: {proof}\n\n"),
        None => "Its TPM has proved nothing.\n\n".to_owned(),
    };
    let question = format!(
        "{} Its fingerprint is\n\n    {}\n    \
         {shown}\n\n{proof}Does the machine's screen show the same?",
        reason(node),
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
    use crate::node::View;
    use crate::testing::World;
    use polis_wire::identity::Fingerprint;
    use polis_wire::rpc::testing::node_id;

    #[test]
    fn the_approval_of_a_node_that_returns_names_its_present_boot_even_if_nothing_is_compared() {
        let key = [7; 32];
        let proof = |at| Some(v1::TpmAttestation { at, ..Default::default() });
        let node = v1::NodeInfo {
            id: "polis-01".to_owned(),
            public_key: key.to_vec(),
            nonce: vec![1; 16],
            attestation: proof(1),
            ..Default::default()
        };
        assert_eq!(recorded(&node), "", "any machine with the ticket may be approved");
        assert_eq!(reason(&node), "polis-01 waits for approval.");
        assert_eq!(returning::asking(&node), node);
        let asks = v1::Returning {
            nonce: vec![2; 16],
            address: "192.0.2.7".to_owned(),
            asked_at: 1_700_000_000,
            attestation: proof(2),
            ..Default::default()
        };
        let node = v1::NodeInfo { returning: Some(asks), ..node };
        let asking = returning::asking(&node);
        let of = Fingerprint::of_registration(&key, &[2; 16]).unwrap();
        assert_eq!((recorded(&asking), asking.attestation.clone()), (of.to_string(), proof(2)));
        let reason = reason(&asking);
        assert!(reason.contains("first at 2023-11-14 22:13:20 UTC, from 192.0.2.7"), "{reason}");
        assert!(View::of(&node).waits_for_approval());
        let approved = v1::Returning { approved: true, ..node.returning.clone().unwrap() };
        let node = v1::NodeInfo { returning: Some(approved), ..node };
        assert!(!View::of(&node).waits_for_approval());
    }

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

    #[test]
    fn the_approval_of_a_node_that_returns_with_another_tpm_says_so() {
        let world = World::new();
        let cluster = Cluster::new(&world);
        let id = node_id(NODE).to_string();
        let proof = |endorsement_key: Vec<u8>| {
            let keys = v1::TpmKeys { endorsement_key, ..Default::default() };
            v1::TpmAttestation { keys: Some(keys), ..Default::default() }
        };
        cluster.has_proved(proof(vec![1]));
        cluster.asks_for_a_certificate(proof(vec![1]));
        let approve = |option: &str| world.run(&["node", "approve", &id, option]);
        for option in ["--unchecked", "--dry-run"] {
            let same = approve(option);
            assert_eq!(same.status, 0, "{}", same.stderr);
            assert!(!(same.stdout + &same.stderr).contains("ANOTHER TPM"), "{option}");
        }
        cluster.asks_for_a_certificate(proof(vec![2]));
        assert!(approve("--unchecked").stderr.contains("ANOTHER TPM"));
        assert!(approve("--dry-run").stdout.contains("ANOTHER TPM"));
        cluster.asked();
        let asked = world.asks(&["node", "approve", &*id], "no\n");
        assert_eq!(asked.status, 1, "{}", asked.stderr);
        assert!(asked.stderr.contains("ANOTHER TPM"), "{}", asked.stderr);
        assert_eq!(cluster.asked(), [""; 0]);
    }
}
