//! The attestation policy of a cluster: which systems a machine may have started, and which makers
//! of TPMs are trusted, from the configuration of the cluster.
//!
//! Invariants:
//! - A policy names at least one system or one maker, and each of them once.
//! - A name is one line of printable ASCII.
//!
//! What this module does not do: compare a proof with the policy (`curator`).

use polis_proto::v1;

use super::error::Error;
use super::text::{self, At as _, Refusal};

/// Both systems of an update for several variants of the image.
const SYSTEMS_MAX: usize = 16;
const MAKERS_MAX: usize = 16;
/// Characters of the name of a system.
const NAME_MAX: usize = 128;
/// Bytes of one certificate: several times what makers issue.
const CERTIFICATE_MAX: usize = 4096;

/// The proofs that the TPM of a machine has to give.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AttestationPolicy {
    /// The systems, of which the machine has started one; empty: any.
    pub systems: Vec<System>,
    /// The makers, of which one has signed the certificate of the TPM; empty: any, and none.
    pub makers: Vec<Maker>,
}

/// A system that a machine may have started.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct System {
    /// For people.
    pub name: String,
    /// Register 11 after its start.
    pub kernel_image: [u8; 32],
}

/// A maker of TPMs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Maker {
    /// The certificate of its authority.
    pub der: Vec<u8>,
    /// The name in that certificate.
    pub subject: String,
}

/// Reads the attestation policy; `path` is its position as errors report it. `None`: there is
/// none.
///
/// # Errors
///
/// [`Error::Field`].
pub fn attestation_policy(
    message: &v1::AttestationPolicy,
    path: &str,
) -> Result<Option<AttestationPolicy>, Error> {
    let v1::AttestationPolicy { systems, makers } = message;
    text::at_most(systems.len(), SYSTEMS_MAX, "systems").at(format!("{path}.systems"), 1)?;
    text::at_most(makers.len(), MAKERS_MAX, "makers").at(format!("{path}.makers"), 2)?;
    let mut policy = AttestationPolicy::default();
    for (i, v1::attestation_policy::System { name, kernel_image }) in systems.iter().enumerate() {
        let path = format!("{path}.systems[{i}]");
        checked_name(name).at(format!("{path}.name"), 1)?;
        let value = register(kernel_image, &policy.systems);
        let kernel_image = value.at(format!("{path}.kernel_image"), 2)?;
        policy.systems.push(System { name: name.clone(), kernel_image });
    }
    for (i, der) in makers.iter().enumerate() {
        let maker = maker(der, &policy.makers).at(format!("{path}.makers[{i}]"), 2)?;
        policy.makers.push(maker);
    }
    Ok(Some(policy).filter(|policy| *policy != AttestationPolicy::default()))
}

fn checked_name(text: &str) -> Result<(), Refusal> {
    let printable = |c: u8| matches!(c, b' '..=b'~');
    match (1..=NAME_MAX).contains(&text.len()) && text.bytes().all(printable) {
        true => Ok(()),
        false => Err(Refusal::of(text, format!("1 to {NAME_MAX} printable characters of ASCII"))),
    }
}

/// Reads the value of register 11.
fn register(bytes: &[u8], known: &[System]) -> Result<[u8; 32], Refusal> {
    let value = <[u8; 32]>::try_from(bytes).map_err(|_length| {
        Refusal::described(format!("{} bytes", bytes.len()), "the 32 bytes of register 11")
    })?;
    if value == [0; 32] {
        // Any system that does not measure itself has it.
        let allowed = "the value of register 11 after a start, which is never zero";
        return Err(Refusal::described("zeros", allowed));
    }
    if known.iter().any(|system| system.kernel_image == value) {
        return Err(Refusal::described("the value of another system", "each value once"));
    }
    Ok(value)
}

/// Reads the certificate of a maker.
fn maker(der: &[u8], known: &[Maker]) -> Result<Maker, Refusal> {
    let subject = text::authority(der, CERTIFICATE_MAX)?.subject().to_string();
    if known.iter().any(|maker| maker.der == der) {
        return Err(Refusal::described("the same certificate again", "each certificate once"));
    }
    Ok(Maker { der: der.to_vec(), subject })
}

#[cfg(test)]
mod tests {
    use super::*;

    use crate::attestation::software::Maker as Authority;

    fn system(name: &str, value: &[u8]) -> v1::attestation_policy::System {
        v1::attestation_policy::System { name: name.to_owned(), kernel_image: value.to_vec() }
    }

    fn read(
        systems: Vec<v1::attestation_policy::System>,
        makers: Vec<Vec<u8>>,
    ) -> Result<Option<AttestationPolicy>, Error> {
        attestation_policy(&v1::AttestationPolicy { systems, makers }, "attestation")
    }

    #[test]
    fn a_policy_names_systems_and_makers_each_once() {
        let authority = Authority::new("Maker of TPMs").der;
        let policy = read(vec![system("polis 1.update", &[1; 32])], vec![authority.clone()]);
        let policy = policy.unwrap().unwrap();
        assert_eq!(policy.systems[0].kernel_image, [1; 32]);
        assert_eq!(policy.makers, [Maker { der: authority, subject: "CN=Maker of TPMs".into() }]);
        assert_eq!(read(vec![], vec![]).unwrap(), None);
    }

    #[test]
    fn an_invalid_policy_is_refused_with_its_place() {
        let named = |name: &str| vec![system(name, &[1; 32])];
        let valued = |value: &[u8]| vec![system("a", value)];
        let many = |count: u8| (1..=count).map(|i| system("a", &[i; 32])).collect::<Vec<_>>();
        assert!(read(many(16), vec![]).is_ok());
        for (systems, place) in [
            (many(17), "attestation.systems"),
            (named(""), "attestation.systems[0].name"),
            (named("a\nb"), "attestation.systems[0].name"),
            (named("ü"), "attestation.systems[0].name"),
            (named(&"a".repeat(129)), "attestation.systems[0].name"),
            (valued(&[]), "attestation.systems[0].kernel_image"),
            (valued(&[1; 33]), "attestation.systems[0].kernel_image"),
            (valued(&[0; 32]), "attestation.systems[0].kernel_image"),
            ([named("a"), named("b")].concat(), "attestation.systems[1].kernel_image"),
        ] {
            let refused = read(systems, vec![]).unwrap_err().to_string();
            assert!(refused.contains(place), "{place}: {refused}");
        }
        let maker = Authority::new("Maker");
        let leaf = maker.keys().certificate.unwrap();
        let behind = [maker.der.clone(), vec![0]].concat();
        for (makers, place) in [
            (vec![maker.der.clone(); 17], "attestation.makers"),
            (vec![maker.der.clone(); 2], "attestation.makers[1]"),
            (vec![vec![]], "attestation.makers[0]"),
            (vec![vec![1; 4097]], "attestation.makers[0]"),
            (vec![b"noise".to_vec()], "attestation.makers[0]"),
            (vec![behind], "attestation.makers[0]"),
            (vec![leaf], "attestation.makers[0]"),
        ] {
            let refused = read(vec![], makers).unwrap_err().to_string();
            assert!(refused.contains(place), "{place}: {refused}");
        }
    }
}
