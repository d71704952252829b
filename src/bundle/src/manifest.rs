//! The manifest of a bundle, and whether it suits a machine.

use semver::Version;
use serde::{Deserialize, Deserializer, Serialize};

use crate::etcd::EtcdTarget;
use crate::kubernetes::KubernetesTarget;
use crate::refusal::{PartName, Refusal};

/// Longest word of an architecture, of a variant, of the name of an image.
const WORD_MAX: usize = 32;
/// Longest version.
const VERSION_MAX: usize = 64;
/// Digits of a SHA-256.
const DIGITS: usize = 64;
/// Bytes of the largest part: a thousand times a system partition, so that the sum of sizes does
/// not overflow.
const PART_MAX: u64 = 1 << 40;

/// The manifest. A reader ignores fields that it does not know, here and in a [`Part`]. A field
/// that a reader must understand needs another format of the bundle. Builders write objects; the
/// derived decoder also reads an array of the values, in the order of the fields.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    /// Version of Polis.
    pub version: Version,
    /// Grows with each closed security hole that must not come back.
    pub security_level: u32,
    /// Kind of processor, such as `x86_64`.
    pub architecture: String,
    /// Which programs the system has: `base` or `full`.
    pub variant: String,
    /// The image as nodes print it, `image=`: the beginning of a hash over the content.
    pub image: String,
    /// The oldest version that it updates.
    pub from: Version,
    /// The version of its etcd.
    pub etcd: Version,
    /// The version of its Kubernetes; `None` in a system without workloads.
    #[serde(default, deserialize_with = "present", skip_serializing_if = "Option::is_none")]
    pub kubernetes: Option<Version>,
    /// The unified kernel image, signed.
    pub kernel: Part,
    /// The system with its hash tree.
    pub system: Part,
}

/// A part of a bundle.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Part {
    /// Its bytes.
    pub size: u64,
    /// Its SHA-256, in lower-case digits.
    pub sha256: String,
}

/// The machine and system that a bundle has to suit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    /// The version that runs.
    pub version: Version,
    /// Its security level.
    pub security_level: u32,
    /// Kind of processor.
    pub architecture: String,
    /// Which programs the running system has.
    pub variant: String,
    /// The etcd of the cluster.
    pub etcd: EtcdTarget,
    /// The Kubernetes of the machine; `None` where nothing of it runs that limits the step.
    pub kubernetes: Option<KubernetesTarget>,
    /// Bytes of a system partition.
    pub slot: u64,
    /// Bytes that are free on the ESP.
    pub esp: u64,
}

/// The version in a field that may be absent. A `null` is an error: absence has one form.
fn present<'de, D: Deserializer<'de>>(field: D) -> Result<Option<Version>, D::Error> {
    Version::deserialize(field).map(Some)
}

/// Checks the version of a system. Loaders read it in the name of the kernel image.
///
/// # Errors
///
/// The first rule that it breaks, in words.
pub fn check_version(version: &Version) -> Result<(), String> {
    if version.to_string().len() > VERSION_MAX {
        return Err(format!("version is longer than {VERSION_MAX} characters"));
    }
    if !version.build.is_empty() {
        return Err(format!("version {version} has a `+`, which loaders count tries by"));
    }
    if version.pre.bytes().any(|byte| byte.is_ascii_uppercase()) {
        return Err(format!(
            "version {version} has a capital letter, and the file system of the kernel images \
             does not distinguish it from a small one"
        ));
    }
    if !has_one_order(version) {
        return Err(format!(
            "version {version} sorts in another way for loaders: behind the `-` is one word of \
             letters, and numbers each behind a dot, as in 1.2.0-rc.9 for 1.2.0-rc9"
        ));
    }
    Ok(())
}

/// Whether loaders sort versions of this form as semantic versioning does.
///
/// For a loader, the digits in `rc10` are a number, and a number is newer than a word at its place;
/// for semantic versioning `rc10` is older than `rc9`, and a number older than a word. A system
/// that is newer for nodes and older for the loader would never be started. Where the first part is
/// a word and every other one a number, both compare alike.
fn has_one_order(version: &Version) -> bool {
    let mut parts = version.pre.split('.');
    let word = parts.next().unwrap_or_default();
    let is_number = |part: &str| part.bytes().all(|byte| byte.is_ascii_digit());
    word.bytes().all(|byte| byte.is_ascii_alphabetic()) && parts.all(is_number)
}

impl Manifest {
    /// Reads a manifest that was signed.
    pub(crate) fn parse(bytes: &[u8]) -> Result<Self, Refusal> {
        let malformed = |error: serde_json::Error| Refusal::Manifest { reason: error.to_string() };
        let manifest: Self = serde_json::from_slice(bytes).map_err(malformed)?;
        manifest.check()?;
        Ok(manifest)
    }

    /// The bytes that are signed.
    pub(crate) fn encode(&self) -> Result<Vec<u8>, Refusal> {
        serde_json::to_vec(self).map_err(|error| Refusal::Manifest { reason: error.to_string() })
    }

    /// The rules of the fields.
    pub(crate) fn check(&self) -> Result<(), Refusal> {
        let malformed = |reason: String| Err(Refusal::Manifest { reason });
        let words = [
            ("architecture", &self.architecture),
            ("variant", &self.variant),
            ("image", &self.image),
        ];
        for (field, word) in words {
            let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
            if word.is_empty() || word.len() > WORD_MAX || !word.chars().all(plain) {
                return malformed(format!(
                    "{field} has 1 to {WORD_MAX} lower-case letters, digits and `_`, not {word:?}"
                ));
            }
        }
        check_version(&self.version).or_else(malformed)?;
        let versions = [("from", &self.from), ("etcd", &self.etcd)].into_iter();
        let kubernetes = self.kubernetes.iter().map(|version| ("kubernetes", version));
        for (field, version) in versions.chain(kubernetes) {
            if version.to_string().len() > VERSION_MAX {
                return malformed(format!("{field} is longer than {VERSION_MAX} characters"));
            }
        }
        if self.from > self.version {
            return malformed(format!("from is {}, after version {}", self.from, self.version));
        }
        for (name, part) in self.parts() {
            let digit = |c: char| c.is_ascii_digit() || ('a'..='f').contains(&c);
            if part.sha256.len() != DIGITS || !part.sha256.chars().all(digit) {
                return malformed(format!("the SHA-256 of its {name} is not {DIGITS} digits"));
            }
            if part.size == 0 {
                return malformed(format!("its {name} is empty"));
            }
            if part.size > PART_MAX {
                let size = part.size;
                return malformed(format!("its {name} has {size} bytes, more than {PART_MAX}"));
            }
        }
        Ok(())
    }

    /// The parts, in the order of the file.
    #[must_use]
    pub fn parts(&self) -> [(PartName, &Part); 2] {
        [(PartName::Kernel, &self.kernel), (PartName::System, &self.system)]
    }

    /// Whether a machine may take it.
    ///
    /// # Errors
    ///
    /// The first rule that it breaks.
    pub fn suits(&self, target: &Target) -> Result<(), Refusal> {
        let other = |found: &String, expected: &String| (found.clone(), expected.clone());
        if self.architecture != target.architecture {
            let (found, expected) = other(&self.architecture, &target.architecture);
            return Err(Refusal::Architecture { found, expected });
        }
        if self.variant != target.variant {
            let (found, expected) = other(&self.variant, &target.variant);
            return Err(Refusal::Variant { found, expected });
        }
        if self.security_level < target.security_level {
            let (found, running) = (self.security_level, target.security_level);
            return Err(Refusal::Level { found, running });
        }
        if self.version <= target.version {
            let (found, running) = (self.version.clone(), target.version.clone());
            return Err(Refusal::Older { found, running });
        }
        if target.version < self.from {
            let (from, running) = (self.from.clone(), target.version.clone());
            return Err(Refusal::From { from, running });
        }
        target.etcd.takes(&self.etcd)?;
        if let (Some(target), Some(brings)) = (&target.kubernetes, &self.kubernetes) {
            target.takes(brings)?;
        }
        for ((part, Part { size, .. }), room) in
            self.parts().into_iter().zip([target.esp, target.slot])
        {
            if *size > room {
                return Err(Refusal::Large { part, size: *size, room });
            }
        }
        Ok(())
    }
}
