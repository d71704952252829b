//! `polisctl node approve`: admits machines that wait for approval, or gives nodes a new
//! certificate whose own ended while they were off.
//!
//! The operator compares the fingerprint on the machine's screen, and what its TPM has proved.
//! The leader compares what the command sends with the record that it changes: the fingerprint,
//! unless `--unchecked`, and the proof, if there was one. The machine registers again every few
//! seconds, and a person takes a while to answer. The approval of a node that asks for a new
//! certificate always has a fingerprint, since that names the boot: with `--unchecked`, it is the
//! one of the record.
//!
//! A node that is approved already is not asked about: its screen shows no fingerprint. So the
//! command can be repeated for the same nodes.
//!
//! The command reads the record of each of several nodes in its turn, since the questions about the
//! others take time. A failure concerns one node, except for a timeout: the cluster then answers
//! for no other node either, and the command ends.

use polis_proto::v1;
use polis_proto::v1::management_client::ManagementClient;

use super::{attest, called, described, proof, returning};
use crate::Global;
use crate::ask::{self, DryRun};
use crate::error::{Error, Exit};
use crate::output::{Document, or_dash};
use crate::session::Session;
use crate::text::clean;
use crate::units;
use polis_wire::identity::Spoken;
use polis_wire::rpc::client::Repeat;

/// Arguments of `node approve`.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// The node; several are approved one after the other, with a question for each.
    #[arg(required = true, value_name = "NODE")]
    nodes: Vec<String>,
    /// The fingerprint on the machine's screen: four words, or 64
    /// hexadecimal digits; for one node alone.
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

/// How each of the nodes is approved.
struct How {
    fingerprint: Option<String>,
    unchecked: bool,
    /// What its TPM must have proved.
    known: proof::Known,
    dry_run: DryRun,
}

/// What the command has done about one node.
enum Done {
    /// It is approved; with its record.
    Approved(Box<v1::NodeInfo>),
    /// Nothing, in a dry run; with the effect that it would have.
    Shown(String),
}

/// Runs the command.
pub(super) async fn run(arguments: Arguments, global: &Global) -> Result<(), Error> {
    let Arguments { nodes, fingerprint, unchecked, wanted, dry_run } = arguments;
    if nodes.len() > 1 && fingerprint.is_some() {
        return Err(Error::usage("--fingerprint is that of one machine, and several are named")
            .or_help("name one node, or leave --fingerprint out to be asked about each"));
    }
    // Once, and not for each node.
    let can_ask = unchecked || dry_run.is_on() || global.out.streams.has_person();
    if nodes.len() > 1 && !can_ask {
        return Err(ask::no_person(
            "name one node, and the fingerprint on its screen: --fingerprint WORDS; or skip the \
             comparison: --unchecked",
        ));
    }
    let how = How { fingerprint, unchecked, known: wanted.read()?, dry_run };
    let mut session = Session::open(global).await?;
    let [node] = &*nodes else {
        return Box::pin(several(&nodes, &how, &mut session, global)).await;
    };
    let found = session.find(node).await?;
    match Box::pin(approve(&found, "", &how, &mut session, global)).await? {
        Done::Approved(node) => described(&node, global),
        Done::Shown(effect) => global.out.print(&DryRun::document(&effect)?),
    }
}

/// Approves nodes one after the other, and lists which are approved and which are not.
async fn several(
    nodes: &[String],
    how: &How,
    session: &mut Session,
    global: &Global,
) -> Result<(), Error> {
    let total = nodes.len();
    let (mut entries, mut failed, mut is_late) = (Vec::new(), 0, false);
    for (at, wanted) in (1..).zip(nodes) {
        if is_late {
            failed += 1;
            let why = "the cluster did not answer in time about an earlier node";
            entries.push(entry(wanted, wanted, Some(why))?);
            continue;
        }
        let found = session.find(wanted).await;
        let (id, name, done) = match found {
            Ok(found) => {
                let turn = format!("Node {at} of {total}: ");
                let done = Box::pin(approve(&found, &turn, how, session, global)).await;
                (found.id.clone(), called(&found), done)
            }
            Err(error) => (wanted.clone(), wanted.clone(), Err(error)),
        };
        entries.push(match done {
            Ok(Done::Approved(_node)) => entry(&id, &name, None)?,
            Ok(Done::Shown(effect)) => DryRun::document_of(&id, &effect)?,
            Err(error) => {
                failed += 1;
                is_late = error.exit() == Exit::TimedOut;
                let entry = entry(&id, &name, Some(&*error.summary()))?;
                let error = error.helpful().context(format!("cannot approve {name}"));
                global.out.remark(error.render().trim_end());
                entry
            }
        });
    }
    global.out.entries(entries)?;
    if failed == 0 {
        return Ok(());
    }
    let error = Error::new(format!("cannot approve {failed} of {total} nodes"))
        .or_help("the causes are above; repeat the command for these nodes");
    Err(if is_late { error.after_a_wait() } else { error })
}

/// One of several nodes in the list at the end, with the reason if it is not approved.
fn entry(id: &str, name: &str, error: Option<&str>) -> Result<Document, Error> {
    let value = serde_json::json!({ "node": id, "approved": error.is_none(), "error": error });
    let text = match error {
        None => format!("{name}: approved"),
        Some(error) => format!("{name}: not approved: {error}"),
    };
    Document::new(&value, text)
}

/// Shows a node, asks about it and approves it. `turn` says which of several it is: the beginning
/// of a question or a remark; empty for one node.
async fn approve(
    found: &v1::NodeInfo,
    turn: &str,
    how: &How,
    session: &mut Session,
    global: &Global,
) -> Result<Done, Error> {
    let has_another_tpm = returning::has_another_tpm(found);
    let node = returning::asking(found);
    attest::check_recorded(&node, &how.known)?;
    if how.dry_run.is_on() {
        return Ok(Done::Shown(match &node.returning {
            Some(_) if has_another_tpm => {
                format!("{} receives a new certificate. {ANOTHER_TPM}", called(&node))
            }
            Some(_) => format!("{} receives a new certificate.", called(&node)),
            None => format!("{} may enter the cluster.", called(&node)),
        }));
    }
    if has_another_tpm {
        global.out.remark(&format!("{turn}{ANOTHER_TPM}"));
    }
    let fingerprint = match &how.fingerprint {
        Some(spoken) => spoken.clone(),
        None if how.unchecked => recorded(&node),
        // Without a call: the record may be that of another registration by now.
        None if is_approved(found) => return Ok(Done::Approved(Box::new(found.clone()))),
        None => {
            let shown = ask_about(&node, turn, global);
            session.begin_anew();
            shown?
        }
    };
    // A later proof may be of another TPM or of another system.
    let request =
        v1::ApproveNodeRequest { node_id: node.id, fingerprint, attestation: node.attestation };
    let answer = session.call("approve the node", Repeat::Allowed, |channel| {
        let request = request.clone();
        async move { ManagementClient::new(channel).approve_node(request).await }
    });
    Ok(Done::Approved(Box::new(answer.await?.node.unwrap_or_default())))
}

/// Whether an operator has approved a node, and its request for a new certificate if it has one.
fn is_approved(node: &v1::NodeInfo) -> bool {
    let is_in = matches!(node.state(), v1::NodeState::Standby | v1::NodeState::Up);
    is_in && node.returning.as_ref().is_none_or(|asks| asks.approved)
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
/// shows the same; returns the fingerprint. The question begins with `turn`.
fn ask_about(node: &v1::NodeInfo, turn: &str, global: &Global) -> Result<String, Error> {
    let shown = returning::fingerprint(node).ok_or_else(|| {
        Error::new(format!("{} has no key", node.id))
            .or_help("its record is damaged: `polisctl node delete`, and register it again")
    })?;
    let proof = match proof::Recorded::of(node).map(|proof| proof.text()) {
        Some(proof) => format!("What its TPM proved: {proof}\n\n"),
        None => "Its TPM has proved nothing.\n\n".to_owned(),
    };
    let question = format!(
        "{turn}{} Its fingerprint is\n\n    {}\n    \
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
    use crate::loopback::{Cluster, NAME, NODE};
    use crate::node::View;
    use crate::testing::{World, closed_port};
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

    /// The ID of a node of the crowd, which waits for approval.
    fn waiting() -> String {
        node_id(4).to_string()
    }

    #[test]
    fn each_of_several_nodes_is_asked_about_whatever_became_of_the_others() {
        let (world, (_bound, closed)) = (World::new(), closed_port());
        let cluster = Cluster::new(&world);
        cluster.has_a_crowd(&world, &closed);
        cluster.has_proved(v1::TpmAttestation::default());
        cluster.asks_for_a_certificate(v1::TpmAttestation::default());
        let (first, third) = (node_id(NODE).to_string(), waiting());
        let approve = ["node", "approve", &*first, "absent", &*third];
        let ended = world.asks(&approve, "no\nyes\n");
        assert_eq!((ended.status, cluster.asked()), (1, vec!["ApproveNode".to_owned()]));
        let asked = [format!("Node 1 of 3: {NAME} ({first}) asks"), "Node 3 of 3: ".to_owned()];
        for asked in asked {
            assert_eq!(ended.stderr.matches(&asked).count(), 1, "{asked}: {}", ended.stderr);
        }
        assert!(!ended.stderr.contains("Node 2 of 3"), "{}", ended.stderr);
        let cause = "error: cannot approve absent\ncause: there is no node \"absent\"\nhelp: ";
        assert!(ended.stderr.contains(cause), "{}", ended.stderr);
        let end = "error: cannot approve 2 of 3 nodes\nhelp: the causes are above; repeat the \
                   command for these nodes\n";
        assert!(ended.stderr.ends_with(end), "{}", ended.stderr);
        let lines: Vec<&str> = ended.stdout.lines().collect();
        let refused = format!("{NAME} ({first}): not approved: not confirmed: nothing was changed");
        let missing = "absent: not approved: there is no node \"absent\"";
        assert_eq!(lines[..2], [&*refused, missing]);
        assert!(lines[2].ends_with(&format!("({third}): approved")), "{lines:?}");
        assert_eq!(lines.len(), 3, "{lines:?}");

        let ended = world.asks(&[&approve[..], &["-o", "json"]].concat(), "yes\nno\n");
        let calls = vec!["ApproveNode with the proof in the record".to_owned()];
        assert_eq!((ended.status, cluster.asked()), (1, calls));
        let value: serde_json::Value = serde_json::from_str(&ended.stdout).unwrap();
        let refused = "not confirmed: nothing was changed";
        let expected = serde_json::json!([
            { "node": first, "approved": true, "error": null },
            { "node": "absent", "approved": false, "error": "there is no node \"absent\"" },
            { "node": third, "approved": false, "error": refused },
        ]);
        assert_eq!(value, expected);
    }

    #[test]
    fn a_node_that_is_approved_already_is_not_asked_about() {
        let (world, (_bound, closed)) = (World::new(), closed_port());
        let cluster = Cluster::new(&world);
        cluster.has_a_crowd(&world, &closed);
        let (member, new) = (node_id(NODE).to_string(), waiting());
        let approve = ["node", "approve", &*member, &*new, &*member];
        let ended = world.asks(&approve, "yes\n");
        assert_eq!((ended.status, cluster.asked()), (0, vec!["ApproveNode".to_owned()]));
        assert_eq!(ended.stderr.matches("Does the machine's screen").count(), 1);
        assert_eq!(ended.stdout.matches("): approved\n").count(), 3, "{}", ended.stdout);
        // A node that was removed is not approved.
        let removed = node_id(5).to_string();
        let ended = world.asks(&["node", "approve", &*removed], "no\n");
        assert_eq!((ended.status, cluster.asked()), (1, Vec::new()), "{}", ended.stderr);
    }

    #[test]
    fn several_nodes_are_approved_with_the_options_of_one() {
        let (world, (_bound, closed)) = (World::new(), closed_port());
        let cluster = Cluster::new(&world);
        cluster.has_a_crowd(&world, &closed);
        let (first, second) = (node_id(NODE).to_string(), waiting());
        let approve = |option: &str| world.run(&["node", "approve", &first, &second, option]);
        let shown = approve("--dry-run");
        assert_eq!((shown.status, cluster.asked()), (0, Vec::new()), "{}", shown.stderr);
        assert_eq!(shown.stdout.matches("may enter the cluster").count(), 2, "{}", shown.stdout);
        let dry_run = ["node", "approve", &*first, "absent", &*second, "--dry-run", "-o", "json"];
        let shown = world.run(&dry_run);
        assert_eq!((shown.status, cluster.asked()), (1, Vec::new()), "{}", shown.stderr);
        let value: serde_json::Value = serde_json::from_str(&shown.stdout).unwrap();
        for (at, node) in [&*first, "absent", &*second].into_iter().enumerate() {
            assert_eq!(value[at]["node"], node, "{value}");
            let is_shown = value[at]["dry_run"] == true && value[at]["effect"].is_string();
            assert_eq!(is_shown, node != "absent", "{value}");
        }
        let approved = approve("--unchecked");
        assert_eq!(approved.status, 0, "{}", approved.stderr);
        assert_eq!(approved.stdout.matches("): approved\n").count(), 2, "{}", approved.stdout);
        assert_eq!(cluster.asked(), ["ApproveNode"; 2]);
        // A script gets this error at once, and not for each node.
        let refused = world.run(&["node", "approve", &first, &second]);
        assert_eq!((refused.status, &*refused.stdout), (1, ""));
        assert_eq!(refused.stderr.matches("error: ").count(), 1, "{}", refused.stderr);
        assert!(refused.stderr.contains("not a terminal"), "{}", refused.stderr);
        let words = cluster.fingerprint();
        let named = ["node", "approve", &*first, &*second, "--fingerprint", &*words];
        let refused = world.asks(&named, "yes\nyes\n");
        assert_eq!((refused.status, &*refused.stdout), (2, ""));
        assert!(refused.stderr.contains("help: name one node, or leave"), "{}", refused.stderr);
        assert_eq!(cluster.asked(), [""; 0]);
    }

    #[test]
    fn a_cluster_that_does_not_answer_is_waited_for_once_and_not_for_each_node() {
        let world = World::new();
        let cluster = Cluster::new(&world);
        cluster.lose_the_leader();
        let (first, second) = (node_id(NODE).to_string(), waiting());
        let approve = ["node", "approve", &*first, &*second, "--unchecked", "--timeout", "300ms"];
        let ended = world.run(&approve);
        assert_eq!(ended.status, 3, "{}", ended.stderr);
        let remarks = ended.stderr.matches("error: cannot approve polis-").count();
        assert_eq!(remarks, 1, "{}", ended.stderr);
        let late = format!("{second}: not approved: the cluster did not answer in time");
        assert!(ended.stdout.contains(&late), "{}", ended.stdout);
        assert_eq!(cluster.asked(), [""; 0]);
    }
}
