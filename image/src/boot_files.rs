//! The files on the ESP that start the machine.
//!
//! ```text
//! without keys   EFI/BOOT/BOOTX64.EFI   the unified kernel image
//!
//! with keys      EFI/BOOT/BOOTX64.EFI   systemd-boot, signed
//!                EFI/Linux/polis-V.efi  the unified kernel image, signed
//!                loader/loader.conf
//!                loader/keys/auto/      PK.auth, KEK.auth, db.auth; dbx.auth if some was revoked
//! ```
//!
//! systemd-boot enrols the keys of `loader/keys/auto` while the firmware is in setup mode,
//! and starts the machine again. An unsigned image has nothing to enrol and needs no loader
//! between firmware and kernel.

use crate::{
    error::{Error, Result},
    esp::{self, Entry},
    signing::{Fault, ImageSigner, Signer, claimed, verify},
    uki::{self, Section},
};

/// The folder in which systemd-boot looks for unified kernel images.
pub(crate) const KERNELS: &str = "EFI/Linux";
/// The folder of the keys that it enrols.
const KEYS: &str = "loader/keys/auto";
/// No menu, no editing of command lines. Keys are enrolled without a question in virtual
/// machines only: a real one may have an option ROM that only its vendor's key has signed,
/// so there a person chooses the entry in the menu (a held space key shows it).
const CONFIGURATION: &str = "timeout 0\neditor no\nsecure-boot-enroll if-safe\n";

/// The files of an unsigned image.
pub(crate) fn unsigned(kernel: Vec<u8>) -> Vec<Entry> {
    vec![(esp::LOADER.to_owned(), kernel)]
}

/// The files of an image that is signed.
pub(crate) fn signed(
    kernel: &[u8],
    loader: &[u8],
    version: &str,
    signer: &ImageSigner,
) -> Result<Vec<Entry>> {
    let path = format!("{KERNELS}/polis-{version}.efi");
    let kernel = kernel_of(kernel, signer)?;
    let loader = signer.sign("systemd-boot", loader)?;
    let keys = signer.enrolment().iter();
    let keys = keys.map(|(name, update)| (format!("{KEYS}/{name}"), update.clone()));
    let own = [
        (esp::LOADER.to_owned(), loader),
        (path, kernel),
        ("loader/loader.conf".to_owned(), CONFIGURATION.into()),
    ];
    Ok(own.into_iter().chain(keys).collect())
}

/// A unified kernel image for the machines of this signer: with the key whose bundles they
/// take, with the measurements for which their TPMs open the disk, and signed.
pub(crate) fn kernel_of(kernel: &[u8], signer: &ImageSigner) -> Result<Vec<u8>> {
    let kernel = uki::with_release_key(kernel, signer.release())?;
    // The boot stub measures the policy key, and not what that key signs.
    let kernel = uki::build(&kernel, &[Section::new(".pcrpkey", signer.policy_key()?)])?;
    let policy = polis_bundle::approval(&kernel)
        .map_err(|unmeasurable| Error::Uki { reason: unmeasurable.to_string() })?;
    let kernel = uki::build(&kernel, &[Section::new(".pcrsig", signer.approve(&policy)?)])?;
    Ok(signer.sign("the unified kernel image", &kernel)?)
}

/// The standing of a program's signature.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Signature {
    /// It has none.
    Absent,
    /// It is whole, and of this signer. Whether a machine trusts that signer is the
    /// machine's business.
    Whole {
        /// The name in the certificate.
        subject: String,
        /// SHA-256 of the certificate.
        fingerprint: String,
    },
    /// It does not hold.
    Damaged(Fault),
}

impl Signature {
    pub(crate) fn of(program: &[u8]) -> Self {
        let whole = |signer: Signer| {
            verify(program, &signer)?;
            Ok(Self::Whole { subject: signer.subject(), fingerprint: signer.fingerprint() })
        };
        match claimed(program).and_then(whole) {
            Ok(whole) => whole,
            Err(Fault::Unsigned) => Self::Absent,
            Err(fault) => Self::Damaged(fault),
        }
    }
}
