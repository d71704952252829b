//! The attestation policy: compares what the TPM of a machine has proved with what the cluster
//! wants.
//!
//! ```text
//! policy in the configuration --+
//! newest proof in the record ---+--> it fits, or each difference: expected | actual
//! ```
//!
//! `nodes` asks at the approval of a machine, and again when the machine commits: one that does
//! not fit stays out. `attested` asks for members: a difference is reported, and keeps no member
//! out.
//!
//! Invariants:
//! - Without a policy every machine fits, and one that cannot be read admits no machine.
//! - A machine without a proof that holds never fits a policy.
//!
//! What this module does not do: check a proof (`attesting`).

use std::fmt;

use polis_proto::v1;

use super::error::Error;
use super::store::{self, CONFIGURATION};
use polis_base::hex;
use polis_wire::attestation::{
    Certificate, EndorsementKey, Error as Unproved, Keys, Registers, from_messages,
};
use polis_wire::parameters::{self, AttestationPolicy, Maker, System};

/// The register of the kernel image.
const KERNEL_IMAGE: u32 = 11;

/// The registers that stay zero, since nothing is added to the start of a node.
const ADDITIONS: [(u32, &str); 2] =
    [(12, "additions to the command line"), (13, "extensions of the system")];

/// Bytes of a value that people compare; `polisctl node describe` has all.
const SHOWN: usize = 8;

/// Characters of the name of a maker, which a machine may have made up.
const NAME_MAX: usize = 128;

/// Why a machine does not fit a policy. Its text has each difference, with *expected* and
/// *actual*.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Misfit {
    /// Its TPM has proved nothing, for this reason.
    Unproved(String),
    /// Its TPM has proved something else.
    Differs {
        /// How the kernel image differs from those of the policy, if it does.
        image: Option<String>,
        /// The other differences.
        others: Vec<String>,
    },
}

impl fmt::Display for Misfit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unproved(why) => f.write_str(why),
            Self::Differs { image, others } => {
                let all: Vec<_> = image.iter().chain(others).map(String::as_str).collect();
                f.write_str(&all.join("; "))
            }
        }
    }
}

/// Fails unless the TPM that gave this proof fits the policy.
///
/// # Errors
///
/// [`Error::AttestationPolicy`]; [`store::Error::Damaged`] for a policy that cannot be read.
pub(super) fn check(
    policy: Option<&v1::AttestationPolicy>,
    proof: Option<&v1::TpmAttestation>,
) -> Result<(), Error> {
    match misfit(policy, proof)? {
        None => Ok(()),
        Some(misfit) => Err(Error::AttestationPolicy { why: misfit.to_string() }),
    }
}

/// Why the TPM that gave this proof does not fit the policy; `None` if it does.
///
/// # Errors
///
/// [`store::Error::Damaged`] for a policy that cannot be read.
pub(super) fn misfit(
    policy: Option<&v1::AttestationPolicy>,
    proof: Option<&v1::TpmAttestation>,
) -> Result<Option<Misfit>, store::Error> {
    let Some(policy) = policy else { return Ok(None) };
    let read = parameters::attestation_policy(policy, "attestation");
    let damaged = |_invalid| store::Error::Damaged { key: CONFIGURATION.to_owned() };
    let Some(policy) = read.map_err(damaged)? else { return Ok(None) };
    Ok(match proof {
        None => Some(Misfit::Unproved("its TPM has proved nothing to the leader".to_owned())),
        Some(proof) if !proof.fault.is_empty() => {
            Some(Misfit::Unproved(format!("its TPM has proved nothing: {}", proof.fault)))
        }
        Some(proof) => differences(&policy, proof).unwrap_or_else(|error| {
            Some(Misfit::Unproved(format!("the proof of its TPM does not hold: {error}")))
        }),
    })
}

/// The differences between a proof and the policy; `None` without any.
fn differences(
    policy: &AttestationPolicy,
    proof: &v1::TpmAttestation,
) -> Result<Option<Misfit>, Unproved> {
    let keys = Keys::from_message(proof.keys.clone().unwrap_or_default());
    let registers = from_messages(proof.registers.clone())?;
    let image = image(&policy.systems, &registers);
    let added = ADDITIONS.iter().filter_map(|(number, measures)| {
        let is_empty = registers.get(number) == Some(&[0; 32]);
        (!is_empty).then(|| register(*number, measures, &registers, &short(&[0; 32])))
    });
    let maker = maker(&policy.makers, &keys)?;
    let others: Vec<_> = added.chain(maker).collect();
    let fits = image.is_none() && others.is_empty();
    Ok((!fits).then_some(Misfit::Differs { image, others }))
}

/// How the kernel image differs from all of these systems.
fn image(systems: &[System], registers: &Registers) -> Option<String> {
    let actual = registers.get(&KERNEL_IMAGE);
    let fits = systems.iter().any(|system| Some(&system.kernel_image) == actual);
    if fits || systems.is_empty() {
        return None;
    }
    let expected =
        systems.iter().map(|system| format!("{} ({})", short(&system.kernel_image), system.name));
    let expected = expected.collect::<Vec<_>>().join(" or ");
    Some(register(KERNEL_IMAGE, "kernel image", registers, &expected))
}

/// A register that is not as expected.
fn register(number: u32, measures: &str, registers: &Registers, expected: &str) -> String {
    let actual = registers.get(&number).map_or_else(|| "not signed".to_owned(), short);
    format!("register {number} ({measures}) is {actual}, expected {expected}")
}

/// The beginning of a value.
fn short(value: &[u8; 32]) -> String {
    format!("{}…", hex::encode(&value[..SHOWN]))
}

/// How the maker of the TPM differs from all of these.
fn maker(makers: &[Maker], keys: &Keys) -> Result<Option<String>, Unproved> {
    if makers.is_empty() {
        return Ok(None);
    }
    let expected: Vec<_> = makers.iter().map(|maker| quoted(&maker.subject)).collect();
    let expected = expected.join(" or ");
    let Some(certificate) = &keys.certificate else {
        return Ok(Some(format!(
            "its TPM has no certificate of a maker, as an emulated one, expected one signed by \
             {expected}"
        )));
    };
    let certificate = Certificate::read(certificate)?;
    certificate.certifies(&EndorsementKey::read(&keys.endorsement)?)?;
    let signed = certificate.signed_by_one_of(makers.iter().map(|maker| maker.der.as_slice()));
    Ok(signed.err().map(|_stranger| {
        let issuer = quoted(&certificate.issuer());
        format!("the maker of its TPM is {issuer}, as it says itself, expected {expected}")
    }))
}

/// A name in quotes, without control characters.
fn quoted(name: &str) -> String {
    format!("{:?}", name.chars().take(NAME_MAX).collect::<String>())
}

#[cfg(test)]
mod tests {
    use polis_wire::attestation::software::{Maker as Authority, Software};
    use polis_wire::attestation::{REGISTERS, to_messages};

    use super::*;

    const IMAGE: [u8; 32] = [0x11; 32];

    fn policy(images: &[(&str, [u8; 32])], makers: &[&Authority]) -> v1::AttestationPolicy {
        let system = |(name, value): &(&str, [u8; 32])| v1::attestation_policy::System {
            name: (*name).to_owned(),
            kernel_image: value.to_vec(),
        };
        v1::AttestationPolicy {
            systems: images.iter().map(system).collect(),
            makers: makers.iter().map(|maker| maker.der.clone()).collect(),
        }
    }

    /// The proof of a start of [`IMAGE`], but for these registers.
    fn proof(keys: Keys, others: &[(u32, [u8; 32])]) -> v1::TpmAttestation {
        let mut registers: Registers = REGISTERS.into_iter().map(|n| (n, [3; 32])).collect();
        registers.extend([(11, IMAGE), (12, [0; 32]), (13, [0; 32])]);
        registers.extend(others.iter().copied());
        v1::TpmAttestation {
            at: 1,
            keys: Some(keys.into_message()),
            registers: to_messages(registers),
            ..Default::default()
        }
    }

    #[track_caller]
    fn why(policy: &v1::AttestationPolicy, proof: Option<&v1::TpmAttestation>) -> String {
        match check(Some(policy), proof) {
            Err(Error::AttestationPolicy { why }) => why,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_machine_with_an_expected_start_and_maker_fits() {
        let (maker, other) = (Authority::new("Maker"), Authority::new("Other"));
        let images = [("old", [9; 32]), ("new", IMAGE)];
        let own = proof(maker.keys(), &[]);
        for fits in
            [policy(&images, &[]), policy(&[], &[&maker]), policy(&images, &[&other, &maker])]
        {
            assert!(check(Some(&fits), Some(&own)).is_ok(), "{fits:?}");
        }
        // Without makers, an emulated TPM does; without a policy, no TPM.
        let emulated = proof(Software::default().keys(), &[]);
        assert!(check(Some(&policy(&images, &[])), Some(&emulated)).is_ok());
        assert!(check(None, None).is_ok());
        assert!(check(Some(&policy(&[], &[])), None).is_ok());
    }

    #[test]
    fn each_difference_is_named_with_expected_and_actual() {
        let keys = || Software::default().keys();
        let images = policy(&[("old", [9; 32]), ("new", IMAGE)], &[]);
        assert_eq!(
            why(&images, Some(&proof(keys(), &[(11, [2; 32]), (12, [4; 32])]))),
            "register 11 (kernel image) is 0202020202020202…, expected 0909090909090909… (old) or \
             1111111111111111… (new); register 12 (additions to the command line) is \
             0404040404040404…, expected 0000000000000000…"
        );
        // Also where only makers are named.
        let (maker, other) = (Authority::new("Maker"), Authority::new("Other\n"));
        let named = policy(&[], &[&maker]);
        assert_eq!(
            why(&named, Some(&proof(maker.keys(), &[(13, [4; 32])]))),
            "register 13 (extensions of the system) is 0404040404040404…, expected \
             0000000000000000…"
        );
        assert_eq!(
            why(&named, Some(&proof(keys(), &[]))),
            "its TPM has no certificate of a maker, as an emulated one, expected one signed by \
             \"CN=Maker\""
        );
        assert_eq!(
            why(&named, Some(&proof(other.keys(), &[]))),
            "the maker of its TPM is \"CN=Other\\n\", as it says itself, expected \"CN=Maker\""
        );
        // Another authority with the same name.
        let pretends = Authority::new("Maker");
        assert!(why(&named, Some(&proof(pretends.keys(), &[]))).contains("as it says itself"));
    }

    #[test]
    fn a_machine_without_a_proof_that_holds_never_fits() {
        let maker = Authority::new("Maker");
        let wanted = policy(&[("image", IMAGE)], &[&maker]);
        assert_eq!(why(&wanted, None), "its TPM has proved nothing to the leader");
        let fault = "the quote is forged".to_owned();
        let failed = v1::TpmAttestation { fault, ..proof(maker.keys(), &[]) };
        assert_eq!(why(&wanted, Some(&failed)), "its TPM has proved nothing: the quote is forged");
        let empty = why(&wanted, Some(&v1::TpmAttestation::default()));
        assert!(empty.contains("register 11 (kernel image) is not signed"), "{empty}");
        // The certificate of another TPM of the same maker.
        let keys = Keys { certificate: maker.keys().certificate, ..maker.keys() };
        let stolen = why(&wanted, Some(&proof(keys, &[])));
        assert!(stolen.contains("for another endorsement key"), "{stolen}");
        let keys = Keys { certificate: Some(b"noise".to_vec()), ..maker.keys() };
        let noise = why(&wanted, Some(&proof(keys, &[])));
        assert!(noise.contains("cannot be read"), "{noise}");
    }

    #[test]
    fn a_policy_that_cannot_be_read_admits_no_machine() {
        let damaged = v1::AttestationPolicy { makers: vec![vec![1]], ..Default::default() };
        let proof = proof(Software::default().keys(), &[]);
        let refused = check(Some(&damaged), Some(&proof));
        assert!(matches!(refused, Err(Error::Store(store::Error::Damaged { .. }))), "{refused:?}");
    }
}
