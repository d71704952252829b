//! `polisctl node attest`: what the TPM of a node proves, against what was expected.
//!
//! ```text
//! keys of the TPM --certificate--> its maker
//!      | credential, nonce
//!      v
//! the node: secret, quote, registers --believed only if all of it holds--> each register
//!                                       expected | actual
//! ```
//!
//! The command checks everything itself: the node, and the cluster behind it, are not believed.

use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use polis_proto::v1;
use polis_proto::v1::node_management_client::NodeManagementClient;

use super::At;
use super::proof::{Known, System, judged, proved};
use crate::error::Error;
use crate::session::{PATIENCE, Session};
use crate::{Global, contexts, kernel};
use polis_base::sys::clock;
use polis_wire::attestation::{self, Answer, Challenge, Keys, REGISTERS};

/// Arguments of `node attest`.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// The node.
    node: String,
    #[command(flatten)]
    wanted: Wanted,
    #[command(flatten)]
    at: At,
}

/// The expected values of the proof of a TPM.
#[derive(Debug, clap::Args)]
pub(crate) struct Wanted {
    /// A system that the node may have started: an update bundle, a raw disk image, or a
    /// kernel image; repeatable.
    #[arg(long = "image", value_name = "FILE")]
    images: Vec<PathBuf>,
    /// The certificate of a maker of TPMs that you trust, in PEM or DER; repeatable. Another
    /// maker, and a TPM without a certificate, are errors then.
    #[arg(long = "maker", value_name = "FILE")]
    makers: Vec<PathBuf>,
}

impl Wanted {
    /// Reads the named files.
    pub(super) fn read(self) -> Result<Known, Error> {
        let system =
            |file: PathBuf| kernel::registers(&file).map(|registers| System { file, registers });
        let systems = self.images.into_iter().map(system).collect::<Result<_, _>>()?;
        let makers = self.makers.iter().map(|file| contexts::read_authority(file));
        Ok(Known { systems, makers: makers.collect::<Result<_, _>>()? })
    }
}

/// Runs the command.
pub(super) async fn run(arguments: Arguments, global: &Global) -> Result<(), Error> {
    let Arguments { node, wanted, at } = arguments;
    let known = wanted.read()?;

    let session = Session::prepare(global, PATIENCE)?;
    let target = session.target(Some(&node), at.at.as_ref()).await?;
    let connection = session.connect(&target).await?;
    let id = connection.node.to_string();
    let mut client = NodeManagementClient::new(connection.channel);
    let asked = client.get_attestation_keys(v1::GetAttestationKeysRequest {});
    let answer = session.within("read the keys of the node's TPM", asked).await?.into_inner();
    let keys = Keys::from_message(answer.keys.unwrap_or_default());
    let unproved = |error| unproved(&id, error);
    let challenge = Challenge::new(&keys).map_err(unproved)?;
    let request = v1::AttestRequest { question: Some(challenge.question(&REGISTERS)) };
    let answer = session.within("attest the node", client.attest(request)).await?.into_inner();
    let answer = Answer::from_message(answer.answer.unwrap_or_default()).map_err(unproved)?;
    challenge.check(&id, &REGISTERS, &answer).map_err(unproved)?;

    let (view, faults) = judged(&id, &keys, &answer.registers, &known).map_err(unproved)?;
    global.out.print(&view.document(!known.makers.is_empty())?)?;
    match faults.is_empty() {
        true => Ok(()),
        false => Err(differs(&id, &faults)),
    }
}

/// How old a proof may be that lets a machine in: a machine proves its TPM once a boot.
const RECENT: Duration = Duration::from_secs(30 * 60);

/// Whether a proof of this moment, in seconds since 1970, is too old to let a machine in.
fn is_old(at: i64) -> bool {
    seconds_now().saturating_sub(at) > i64::try_from(RECENT.as_secs()).unwrap_or(i64::MAX)
}

/// Seconds since 1970.
fn seconds_now() -> i64 {
    let since = clock::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_secs()).unwrap_or(i64::MAX)
}

/// Fails unless the TPM of a node that waits for approval has proved what is wanted. The
/// leader has checked the proof; without `--image` and `--maker` nothing is wanted.
pub(super) fn check_recorded(node: &v1::NodeInfo, known: &Known) -> Result<(), Error> {
    if known.systems.is_empty() && known.makers.is_empty() {
        return Ok(());
    }
    let (_view, faults) = proved(node, known).map_err(|fault| {
        Error::new(fault).context(format!("{} may not enter by its TPM", node.id)).or_help(
            "nothing shows what the machine runs: keep it out, or look at the machine itself; it asks \
             its TPM again at its next boot",
        )
    })?;
    let old = node.attestation.as_ref().is_some_and(|proof| is_old(proof.at));
    if old {
        let minutes = RECENT.as_secs() / 60;
        let node = &node.id;
        return Err(Error::new(format!(
            "{node} has proved its TPM more than {minutes} minutes ago"
        ))
        .or_help("it may run another system by now: reboot the machine, which proves it anew"));
    }
    match faults.is_empty() {
        true => Ok(()),
        false => Err(differs(&node.id, &faults)),
    }
}

/// The error of an answer that proves nothing.
fn unproved(node: &str, error: attestation::Error) -> Error {
    let what = format!("nothing that {node} says of its TPM and its start is proved");
    Error::from(anyhow::Error::from(error).context(what)).or_help(
        "repeat the command; if it fails again, the node answers for a TPM that it does not have, \
         or somebody changes its answers: do not trust the machine",
    )
}

/// The error of an answer that is proved, and not what was expected.
fn differs(node: &str, faults: &[String]) -> Error {
    Error::new(format!("{node} is not as expected: {}", faults.join("; "))).or_help(
        "it has another TPM, runs another system, or was started with additions: compare with \
         `polisctl node status NODE`, and name the system that it should run with --image; \
         --output json prints whole values",
    )
}

#[cfg(test)]
mod tests {
    use polis_wire::attestation::software::Software;

    use polis_bundle::Registers;

    use super::*;
    use crate::kernel::tests::kernel as image;
    use crate::loopback::{Cluster, KERNEL, NODE};
    use crate::node::proof::Recorded;
    use crate::testing::World;
    use polis_wire::rpc::testing::node_id;

    #[test]
    fn a_node_is_compared_with_the_image_that_it_should_run() {
        let world = World::new();
        let cluster = Cluster::new(&world);
        let id = node_id(NODE).to_string();
        std::fs::write(world.path("right.efi"), image(KERNEL)).unwrap();
        std::fs::write(world.path("wrong.efi"), image(b"another kernel")).unwrap();
        let output = world.runs(&["node", "attest", &id, "--image", "@right.efi"]);
        insta::assert_snapshot!(output.replace(&id, "ID"), @r"
        node   ID
        TPM    proved; endorsement key: rsa-2048
        maker  not known: the TPM has no certificate, and may be an emulated one
        image  @right.efi

        REGISTER  MEASURES                                 EXPECTED          ACTUAL            RESULT
        0         firmware                                 -                 0707070707070707  -
        1         settings of the firmware                 -                 0707070707070707  -
        2         firmware of cards                        -                 0707070707070707  -
        3         settings of cards                        -                 0707070707070707  -
        4         programs that the firmware started       -                 0707070707070707  -
        5         partition table, settings of the loader  -                 0707070707070707  -
        6         events of the board                      -                 0707070707070707  -
        7         Secure Boot and its keys                 -                 0707070707070707  -
        9         initramfs, as the kernel read it         -                 0707070707070707  -
        11        kernel image                             74aa92417fb1c3e1  74aa92417fb1c3e1  as expected
        12        additions to the command line            0000000000000000  0000000000000000  as expected
        13        extensions of the system                 0000000000000000  0000000000000000  as expected

        Register 11 proves the system only of a machine whose firmware starts none but yours: any other system can extend it to the same value. Secure Boot with your keys shows in register 7; compare that with a machine you know.
        ");
        // One of several.
        let either = ["--image", "@wrong.efi", "--image", "@right.efi"];
        assert_eq!(world.runs(&[&["node", "attest", &id][..], &either].concat()), output);
        assert_eq!(cluster.asked(), ["Attest"; 2]);

        let ended = world.run(&["node", "attest", &id, "--image", "@wrong.efi"]);
        assert_eq!(ended.status, 1, "{}", ended.stdout);
        insta::assert_snapshot!(ended.stderr.replace(&id, "ID"), @r"
        error: ID is not as expected: register 11 (kernel image) is 74aa92417fb1c3e1…, expected 70db53caf355c1e4…
        help: it has another TPM, runs another system, or was started with additions: compare with `polisctl node status NODE`, and name the system that it should run with --image; --output json prints whole values
        ");
        let ended = world.run(&["node", "attest", &id, "--image", "@wrong.efi", "-o", "json"]);
        let value: serde_json::Value = serde_json::from_str(&ended.stdout).unwrap();
        assert_eq!((ended.status, &value["as_expected"]), (1, &false.into()));
        assert_eq!(value["tpm"]["activated"], true);
        let register = &value["registers"][9];
        assert_eq!((&register["number"], &register["as_expected"]), (&11.into(), &false.into()));
        assert_eq!(register["actual"].as_str().unwrap().len(), 64);
    }

    #[test]
    fn without_an_image_only_additions_are_compared() {
        let world = World::new();
        let cluster = Cluster::new(&world);
        let id = node_id(NODE).to_string();
        let output = world.runs(&["node", "attest", &id]);
        assert!(output.contains("not compared: name what the node should run"), "{output}");
        cluster.has_additions();
        let ended = world.run(&["node", "attest", &id]);
        assert_eq!(ended.status, 1, "{}", ended.stdout);
        assert!(
            ended.stderr.contains("register 12 (additions to the command line)"),
            "{}",
            ended.stderr
        );
    }

    #[test]
    fn a_machine_without_a_tpm_proves_nothing_and_says_so() {
        let world = World::new();
        let cluster = Cluster::new(&world);
        let id = node_id(NODE).to_string();
        cluster.has_no_tpm();
        insta::assert_snapshot!(world.refuses(&["node", "attest", &id]), @r"
        error: cannot read the keys of the node's TPM
        cause: this machine has no TPM 2.0
        help: nothing can be proved about such a machine; if it has a TPM 2.0, switch it on in the setup of the firmware
        ");
    }

    #[test]
    fn a_node_that_answers_for_another_tpm_is_not_believed() {
        let world = World::new();
        let cluster = Cluster::new(&world);
        let id = node_id(NODE).to_string();
        cluster.pretends();
        let output = world.refuses(&["node", "attest", &id]);
        insta::assert_snapshot!(output.replace(&id, "ID"), @r"
        error: nothing that ID says of its TPM and its start is proved
        cause: the attestation key is not in the TPM that has the endorsement key
        help: repeat the command; if it fails again, the node answers for a TPM that it does not have, or somebody changes its answers: do not trust the machine
        ");
    }

    #[test]
    fn a_maker_that_is_named_has_to_have_signed() {
        let world = World::new();
        let cluster = Cluster::new(&world);
        let id = node_id(NODE).to_string();
        std::fs::write(world.path("maker.der"), cluster.authority()).unwrap();
        let ended = world.run(&["node", "attest", &id, "--maker", "@maker.der"]);
        assert_eq!(ended.status, 1, "{}", ended.stdout);
        assert!(ended.stderr.contains("its TPM has no certificate of a maker"), "{}", ended.stderr);
    }

    /// A node that waits, with this proof in its record.
    fn waiting(attestation: Option<v1::TpmAttestation>) -> v1::NodeInfo {
        v1::NodeInfo { id: "polis-01".to_owned(), tpm: true, attestation, ..Default::default() }
    }

    /// The proof of a TPM that has started this kernel.
    fn proof(kernel: &[u8]) -> v1::TpmAttestation {
        let mut registers: Registers = REGISTERS.iter().map(|number| (*number, [3; 32])).collect();
        registers.extend(polis_bundle::registers(&image(kernel)).unwrap());
        v1::TpmAttestation {
            at: 1_700_000_000,
            keys: Some(Software::default().keys().into_message()),
            registers: attestation::to_messages(registers),
            ..Default::default()
        }
    }

    #[test]
    fn a_machine_that_waits_is_compared_with_what_it_should_run() {
        let world = World::new();
        for name in ["right", "wrong"] {
            std::fs::write(world.path(name), image(name.as_bytes())).unwrap();
        }
        let known = |images: &[&str]| {
            let images = images.iter().map(|name| world.path(name)).collect();
            Wanted { images, makers: Vec::new() }.read().unwrap()
        };
        let check = |attestation: Option<v1::TpmAttestation>, images: &[&str]| {
            let at = seconds_now();
            let recent = attestation.map(|proof| v1::TpmAttestation { at, ..proof });
            let checked = check_recorded(&waiting(recent), &known(images));
            checked.map_err(|error| error.render())
        };
        assert_eq!(check(Some(proof(b"right")), &["right"]), Ok(()));
        assert_eq!(check(Some(proof(b"right")), &["wrong", "right"]), Ok(()));
        assert_eq!(check(None, &[]), Ok(()), "nothing is wanted");
        let old = check_recorded(&waiting(Some(proof(b"right"))), &known(&["right"])).unwrap_err();
        assert!(old.render().contains("more than 30 minutes ago"), "{}", old.render());
        let refused = check(Some(proof(b"right")), &["wrong"]).unwrap_err();
        assert!(refused.contains("register 11 (kernel image) is "), "{refused}");
        assert!(refused.contains("…, expected "), "{refused}");
        let refused = check(None, &["right"]).unwrap_err();
        assert!(refused.contains("it has proved no TPM to the cluster"), "{refused}");
        let fault = "the attestation key is not in the TPM".to_owned();
        let failed = v1::TpmAttestation { fault, ..Default::default() };
        let refused = check(Some(failed), &["right"]).unwrap_err();
        insta::assert_snapshot!(refused, @r"
        error: polis-01 may not enter by its TPM
        cause: the attestation key is not in the TPM
        help: nothing shows what the machine runs: keep it out, or look at the machine itself; it asks its TPM again at its next boot
        ");
        let makers = vec![world.path("maker")];
        std::fs::write(&makers[0], Cluster::new(&world).authority()).unwrap();
        let maker = Wanted { images: Vec::new(), makers }.read().unwrap();
        let recent = v1::TpmAttestation { at: seconds_now(), ..proof(b"right") };
        let refused = check_recorded(&waiting(Some(recent)), &maker).unwrap_err();
        assert!(refused.render().contains("no certificate of a maker"), "{}", refused.render());
    }

    #[test]
    fn what_a_tpm_proved_is_told_in_two_lines() {
        let told = |attestation| Recorded::of(&waiting(Some(attestation))).unwrap().text();
        insta::assert_snapshot!(told(proof(b"kernel")), @r"
        at 2023-11-14 22:13:20 UTC; maker: not known
        kernel image ff4d55cd85724de9…; nothing was added
        ");
        let mut added = proof(b"kernel");
        let register = added.registers.iter_mut().find(|register| register.number == 12);
        register.unwrap().value = vec![1; 32];
        assert!(told(added).ends_with("SOMETHING WAS ADDED to its start"));
        // A member that has started again since.
        let status = v1::NodeStatus { boot_id: "b".to_owned(), ..Default::default() };
        let of =
            |boot_id: &str| v1::TpmAttestation { boot_id: boot_id.to_owned(), ..proof(b"kernel") };
        let member =
            |boot_id| v1::NodeInfo { status: Some(status.clone()), ..waiting(Some(of(boot_id))) };
        let told_of = |boot_id| Recorded::of(&member(boot_id)).unwrap().text();
        assert!(
            told_of("a").contains("22:13:20 UTC, of an EARLIER BOOT; maker"),
            "{}",
            told_of("a")
        );
        assert!(!told_of("b").contains("BOOT"), "{}", told_of("b"));
        let failed = v1::TpmAttestation { fault: "it is forged".to_owned(), ..Default::default() };
        assert!(told(failed).starts_with("FAILED at "));
        assert!(Recorded::of(&waiting(None)).is_none());
    }
}
