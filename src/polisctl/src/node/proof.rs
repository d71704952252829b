//! The proof of a TPM, compared with the expected values: by `node attest`, which asked the
//! node, and in the record of a node, for which the leader did.
//!
//! ```text
//! keys, registers, both proved --> maker, and each register: expected | actual
//! ```
//!
//! What this module does not do: check a proof (`attestation`), or read files.

use std::path::PathBuf;

use polis_base::hex;
use polis_bundle::Registers;
use polis_proto::v1;
use serde::Serialize;

use crate::error::Error;
use crate::output::{Document, Text, fields, or_dash};
use crate::table::table;
use crate::text::clean;
use crate::units;
use polis_wire::attestation::{self, Certificate, EndorsementKey, Keys, REGISTERS};

/// The measurements of firmware, boot stub and kernel in the registers.
const MEASURED: [(u32, &str); REGISTERS.len()] = [
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

/// The expected values of a proof.
pub(super) struct Known {
    /// The systems, of which the node should have started one.
    pub(super) systems: Vec<System>,
    /// Certificates in DER; empty: any maker will do, and none.
    pub(super) makers: Vec<Vec<u8>>,
}

/// An attestation that holds, as programs read it.
#[derive(Debug, Serialize)]
pub(super) struct View {
    node: String,
    tpm: Tpm,
    /// The named file that the node has started, or the first that it should have; `null`:
    /// no file was named.
    image: Option<String>,
    registers: Vec<Register>,
    as_expected: bool,
}

#[derive(Debug, Serialize)]
struct Tpm {
    /// Of the endorsement key: `ecc-p256` or `rsa-2048`.
    key: &'static str,
    /// Whether it opened the credential: an attestation that is not is an error.
    activated: bool,
    /// The signer of its certificate, by that certificate alone; `null`: it has none.
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

/// The limits of the proof by register 11.
const ANCHOR: &str = "Register 11 proves the system only of a machine whose firmware starts none \
                      but yours: any other system can extend it to the same value. Secure Boot \
                      with your keys shows in register 7; compare that with a machine you know.";

/// A file that was named, with the registers after a start of it.
pub(super) struct System {
    pub(super) file: PathBuf,
    pub(super) registers: Registers,
}

/// The proof, and its differences from the expected values.
pub(super) fn judged(
    node: &str,
    keys: &Keys,
    registers: &Registers,
    known: &Known,
) -> Result<(View, Vec<String>), attestation::Error> {
    let (tpm, mut faults) = certified(keys, &known.makers)?;
    let started = known.systems.iter().find(|system| fits(system, registers));
    let system = started.or(known.systems.first());
    let registers = compared(registers, system);
    faults.extend(registers.iter().filter_map(Register::fault));
    let wanted: Vec<u32> = match system {
        Some(system) => system.registers.keys().copied().collect(),
        None => EMPTY.to_vec(),
    };
    let absent = wanted.iter().filter(|number| !registers.iter().any(|it| it.number == **number));
    faults.extend(absent.map(|number| format!("the TPM has not signed register {number}")));
    let view = View {
        node: node.to_owned(),
        tpm,
        image: system.map(|system| system.file.display().to_string()),
        registers,
        as_expected: faults.is_empty(),
    };
    Ok((view, faults))
}

/// The newest proof of a TPM that the leader keeps in the record of a node, as programs read it.
#[derive(Debug, Serialize)]
pub(super) struct Recorded {
    at: Option<units::Time>,
    /// The boot of the node that it is of.
    boot_id: String,
    /// Whether the node has started again since.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    earlier_boot: bool,
    /// Why nothing is proved; `null`: it is.
    #[serde(skip_serializing_if = "Option::is_none")]
    fault: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tpm: Option<Tpm>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    registers: Vec<Register>,
}

impl Recorded {
    /// The proof in a record; `None` if its TPM has proved nothing.
    pub(super) fn of(node: &v1::NodeInfo) -> Option<Self> {
        let attestation = node.attestation.clone()?;
        let at = units::since_1970(attestation.at).map(units::Time);
        let boot_id = clean(&attestation.boot_id);
        let now = node.status.as_ref().map(|status| status.boot_id.as_str()).unwrap_or_default();
        // A machine that registers does not report its boot.
        let earlier_boot = !now.is_empty() && now != attestation.boot_id;
        let nothing = Known { systems: Vec::new(), makers: Vec::new() };
        let (fault, tpm, registers) = match proved(node, &nothing) {
            Ok((view, _faults)) => (None, Some(view.tpm), view.registers),
            Err(fault) => (Some(clean(&fault)), None, Vec::new()),
        };
        Some(Self { at, boot_id, earlier_boot, fault, tpm, registers })
    }

    /// The same in a line or two.
    pub(super) fn text(&self) -> String {
        let boot = if self.earlier_boot { ", of an EARLIER BOOT" } else { "" };
        let at = format!("{}{boot}", or_dash(&units::text(self.at)));
        let Some(tpm) = &self.tpm else {
            return format!("FAILED at {at}: {}", self.fault.as_deref().unwrap_or_default());
        };
        let maker = match &tpm.issuer {
            Some(issuer) => format!("{issuer}, as its own certificate says, not checked"),
            None => "not known".to_owned(),
        };
        let value = |number: u32| {
            let found = self.registers.iter().find(|register| register.number == number);
            found.map(|register| short(&register.actual)).unwrap_or_default()
        };
        let added = self.registers.iter().any(|register| register.as_expected == Some(false));
        let added = if added { "SOMETHING WAS ADDED to its start" } else { "nothing was added" };
        format!("at {at}; maker: {maker}\nkernel image {}…; {added}", value(11))
    }
}

/// The proof in the record of a node, or why it proves nothing.
pub(super) fn proved(node: &v1::NodeInfo, known: &Known) -> Result<(View, Vec<String>), String> {
    let nothing = || "it has proved no TPM to the cluster".to_owned();
    let attestation = node.attestation.clone().ok_or_else(nothing)?;
    if !attestation.fault.is_empty() {
        return Err(attestation.fault);
    }
    let keys = Keys::from_message(attestation.keys.ok_or_else(nothing)?);
    let registers = attestation::from_messages(attestation.registers);
    let judged = registers.and_then(|registers| judged(&node.id, &keys, &registers, known));
    judged.map_err(|error| error.to_string())
}

/// The content of the TPM's certificate, and its faults.
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
            // Any text that the machine has put there.
            tpm.issuer = Some(clean(&certificate.issuer()));
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
    MEASURED.into_iter().filter_map(register).collect()
}

/// The beginning of a value.
fn short(value: &str) -> &str {
    value.get(..DIGITS).unwrap_or(value)
}

impl Register {
    /// Its fault.
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
    /// The document of both.
    pub(super) fn document(&self, named: bool) -> Result<Document, Error> {
        let maker = match (&self.tpm.issuer, &self.tpm.maker) {
            (_, Some(maker)) => format!("{maker}, as named with --maker"),
            (Some(issuer), None) if named => format!("{issuer}, which was not named with --maker"),
            (Some(issuer), None) => {
                format!("{issuer}, not checked: name the maker with --maker FILE")
            }
            (None, _) => {
                "not known: the TPM has no certificate, and may be an emulated one".to_owned()
            }
        };
        let image = match &self.image {
            Some(image) => image.clone(),
            None => "not compared: name what the node should run with --image FILE".to_owned(),
        };
        let lines = [
            ("node", self.node.clone()),
            ("TPM", format!("proved; endorsement key: {}", self.tpm.key)),
            ("maker", maker),
            ("image", image),
        ];
        let rows: Vec<_> = self.registers.iter().map(Register::row).collect();
        let headings = ["REGISTER", "MEASURES", "EXPECTED", "ACTUAL", "RESULT"];
        let mut text = Text::from(fields(&lines)).and("\n").then(table(&headings, &rows));
        if self.image.is_some() {
            text = text.and(format!("\n{ANCHOR}\n"));
        }
        Document::new(self, text)
    }
}
