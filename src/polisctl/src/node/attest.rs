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

use polis_base::hex;
use polis_bundle::Registers;
use polis_proto::v1;
use polis_proto::v1::node_management_client::NodeManagementClient;
use serde::Serialize;

use super::At;
use crate::error::Error;
use crate::output::{Document, Text, fields};
use crate::session::{PATIENCE, Session};
use crate::table::table;
use crate::{Global, contexts, kernel};
use polis_wire::attestation::{self, Answer, Certificate, Challenge, EndorsementKey, Keys};

/// The registers, and what firmware, boot stub and kernel measure into them.
const REGISTERS: [(u32, &str); 12] = [
    (0, "firmware"),
    (1, "settings of the firmware"),
    (2, "firmware of cards"),
    (3, "settings of cards"),
    (4, "programs that the firmware started"),
    (5, "partition table, settings of the loader"),
    (6, "events of the board"),
    (7, "Secure Boot and its keys"),
    (9, "initramfs, as the kernel read it"),
    (11, "kernel image"),
    (12, "additions to the command line"),
    (13, "extensions of the system"),
];

/// The registers that have the same value whatever image was started: nothing adds to them.
const EMPTY: [u32; 2] = [12, 13];

/// Digits of a value that people compare; a program gets all.
const DIGITS: usize = 16;

/// Arguments of `node attest`.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// The node.
    node: String,
    /// A system that the node may have started: an update bundle, a raw disk image, or a
    /// kernel image; repeatable.
    #[arg(long = "image", value_name = "FILE")]
    images: Vec<PathBuf>,
    /// The certificate of a maker of TPMs that you trust, in PEM or DER; repeatable. Another
    /// maker, and a TPM without a certificate, are errors then.
    #[arg(long = "maker", value_name = "FILE")]
    makers: Vec<PathBuf>,
    #[command(flatten)]
    at: At,
}

/// An attestation that holds, as programs read it.
#[derive(Debug, Serialize)]
struct View {
    node: String,
    tpm: Tpm,
    /// The named file that the node has started, or the first that it should have; `null`:
    /// none was named.
    image: Option<PathBuf>,
    registers: Vec<Register>,
    as_expected: bool,
}

#[derive(Debug, Serialize)]
struct Tpm {
    /// Of the endorsement key: `ecc-p256` or `rsa-2048`.
    key: &'static str,
    /// Whether it opened the credential: an attestation that is not is an error.
    activated: bool,
    /// Who signed its certificate, by that certificate alone; `null`: it has none.
    issuer: Option<String>,
    /// The maker whose certificate was named and that has signed it.
    maker: Option<String>,
}

#[derive(Debug, Serialize)]
struct Register {
    number: u32,
    measures: &'static str,
    /// `null`: it is not known what it should be.
    expected: Option<String>,
    actual: String,
    as_expected: Option<bool>,
}

/// A file that was named, with the registers after a start of it.
struct System {
    file: PathBuf,
    registers: Registers,
}

/// Runs the command.
pub(super) async fn run(arguments: Arguments, global: &Global) -> Result<(), Error> {
    let Arguments { node, images, makers, at } = arguments;
    let system =
        |file: PathBuf| kernel::registers(&file).map(|registers| System { file, registers });
    let systems = images.into_iter().map(system).collect::<Result<Vec<_>, _>>()?;
    let makers = makers.iter().map(|file| contexts::read_authority(file));
    let makers = makers.collect::<Result<Vec<_>, _>>()?;

    let session = Session::prepare(global, PATIENCE)?;
    let target = session.target(Some(&node), at.at.as_ref()).await?;
    let connection = session.connect(&target).await?;
    let id = connection.node.to_string();
    let mut client = NodeManagementClient::new(connection.channel);
    let asked = client.get_attestation_keys(v1::GetAttestationKeysRequest {});
    let keys = keys(session.within("read the keys of the node's TPM", asked).await?.into_inner());
    let unproved = |error| unproved(&id, error);
    let challenge = Challenge::new(&keys).map_err(unproved)?;
    let request = v1::AttestRequest {
        credential: challenge.credential.blob.clone(),
        encrypted_secret: challenge.credential.secret.clone(),
        nonce: challenge.nonce.to_vec(),
        registers: REGISTERS.iter().map(|(number, _)| *number).collect(),
    };
    let answer = session.within("attest the node", client.attest(request)).await?.into_inner();
    let answer = self::answer(answer).map_err(unproved)?;
    challenge.check(&id, &REGISTERS.map(|(number, _)| number), &answer).map_err(unproved)?;

    let (tpm, mut faults) = certified(&keys, &makers).map_err(unproved)?;
    let started = systems.iter().find(|system| fits(system, &answer.registers));
    let system = started.or(systems.first());
    let registers = compared(&answer.registers, system);
    faults.extend(registers.iter().filter_map(Register::fault));
    let view = View {
        node: id.clone(),
        tpm,
        image: system.map(|system| system.file.clone()),
        registers,
        as_expected: faults.is_empty(),
    };
    global.out.print(&view.document(!makers.is_empty())?)?;
    match faults.is_empty() {
        true => Ok(()),
        false => Err(differs(&id, &faults)),
    }
}

fn keys(answer: v1::GetAttestationKeysResponse) -> Keys {
    let certificate = answer.endorsement_certificate;
    Keys {
        endorsement: answer.endorsement_key,
        certificate: (!certificate.is_empty()).then_some(certificate),
        attestation: answer.attestation_key,
    }
}

fn answer(answer: v1::AttestResponse) -> Result<Answer, attestation::Error> {
    let v1::AttestResponse { secret, quote, signature, registers } = answer;
    let register = |register: v1::attest_response::Register| {
        let value = register.value.try_into().map_err(|_length| attestation::Error::Registers)?;
        Ok((register.number, value))
    };
    let registers = registers.into_iter().map(register);
    let registers = registers.collect::<Result<_, attestation::Error>>()?;
    Ok(Answer { secret, quote, signature, registers })
}

/// What the certificate of the TPM says, and what is wrong with it.
fn certified(keys: &Keys, makers: &[Vec<u8>]) -> Result<(Tpm, Vec<String>), attestation::Error> {
    let endorsement = EndorsementKey::read(&keys.endorsement)?;
    let key = match endorsement {
        EndorsementKey::Ecc(_) => "ecc-p256",
        EndorsementKey::Rsa(_) => "rsa-2048",
    };
    let mut tpm = Tpm { key, activated: true, issuer: None, maker: None };
    let mut faults = Vec::new();
    match keys.certificate.as_deref().map(Certificate::read) {
        None if makers.is_empty() => {}
        None => faults.push("its TPM has no certificate of a maker".to_owned()),
        Some(certificate) => {
            let certificate = certificate?;
            tpm.issuer = Some(certificate.issuer());
            certificate.certifies(&endorsement)?;
            if !makers.is_empty() {
                match certificate.signed_by_one_of(makers.iter().map(Vec::as_slice)) {
                    Ok(maker) => tpm.maker = Some(maker),
                    Err(error) => faults.push(error.to_string()),
                }
            }
        }
    }
    Ok((tpm, faults))
}

/// Whether a start of this system gives these values.
fn fits(system: &System, actual: &Registers) -> bool {
    system.registers.iter().all(|(number, value)| actual.get(number) == Some(value))
}

fn compared(actual: &Registers, system: Option<&System>) -> Vec<Register> {
    let expected = |number: u32| match system {
        Some(system) => system.registers.get(&number).copied(),
        None => EMPTY.contains(&number).then_some([0; 32]),
    };
    let register = |(number, measures): (u32, &'static str)| {
        let (actual, expected) = (actual.get(&number)?, expected(number));
        Some(Register {
            number,
            measures,
            expected: expected.map(|value| hex::encode(&value)),
            actual: hex::encode(actual),
            as_expected: expected.map(|expected| expected == *actual),
        })
    };
    REGISTERS.into_iter().filter_map(register).collect()
}

/// The beginning of a value.
fn short(value: &str) -> &str {
    value.get(..DIGITS).unwrap_or(value)
}

impl Register {
    /// What is wrong with it.
    fn fault(&self) -> Option<String> {
        let expected = self.expected.as_deref().filter(|_value| self.as_expected == Some(false))?;
        let Self { number, measures, actual, .. } = self;
        Some(format!(
            "register {number} ({measures}) is {}…, expected {}…",
            short(actual),
            short(expected)
        ))
    }

    fn row(&self) -> Vec<String> {
        let result = match self.as_expected {
            None => "-",
            Some(true) => "as expected",
            Some(false) => "DIFFERS",
        };
        let expected = self.expected.as_deref().map_or("-", short);
        [&self.number.to_string(), self.measures, expected, short(&self.actual), result]
            .map(str::to_owned)
            .to_vec()
    }
}

impl View {
    fn document(&self, named: bool) -> Result<Document, Error> {
        let maker = match (&self.tpm.issuer, &self.tpm.maker) {
            (_, Some(maker)) => format!("{maker}, as named with --maker"),
            (Some(issuer), None) if named => format!("{issuer}, which was not named with --maker"),
            (Some(issuer), None) => format!("{issuer}, by its own word: name it with --maker FILE"),
            (None, _) => {
                "not known: the TPM has no certificate, and may be an emulated one".to_owned()
            }
        };
        let image = match &self.image {
            Some(image) => image.display().to_string(),
            None => "not compared: name what the node should run with --image FILE".to_owned(),
        };
        let lines = [
            ("node", self.node.clone()),
            (
                "TPM",
                format!("proved: the key that signed is in it, beside one of {}", self.tpm.key),
            ),
            ("maker", maker),
            ("image", image),
        ];
        let rows: Vec<_> = self.registers.iter().map(Register::row).collect();
        let headings = ["REGISTER", "MEASURES", "EXPECTED", "ACTUAL", "RESULT"];
        let text = Text::from(fields(&lines)).and("\n").then(table(&headings, &rows));
        Document::new(self, text)
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
    use crate::kernel::tests::kernel as image;
    use crate::loopback::{Cluster, KERNEL, NODE};
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
        TPM    proved: the key that signed is in it, beside one of rsa-2048
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
}
